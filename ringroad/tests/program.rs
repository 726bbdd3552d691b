//! Tests of the `ringroad` binary as users run it: output, exit, signals, reload, resource use, and forwarding of frames.

use ringroad_host::vhost_user::{Connection, Connector};
use ringroad_mem::Span;
use ringroad_net::{Features, bits};
use serde_json::Value;
use std::{
    fmt::Write as _,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Time limit for anything that should happen.
const PATIENCE: Duration = Duration::from_secs(10);

fn within(patience: Duration, mut is: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !is() {
        if start.elapsed() > patience {
            return false;
        }
        thread::sleep(Duration::from_micros(200));
    }
    true
}

/// A temporary directory, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringroad-program-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a configuration of vhost-user ports with these names and further lines.
    fn config(&self, ports: &[(&str, &str)]) -> PathBuf {
        let mut text = String::new();
        for (name, more) in ports {
            let socket = self.file(&format!("{name}.sock"));
            let socket = socket.display();
            write!(text, "[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n{more}\n").unwrap();
        }
        self.write(&text)
    }

    fn write(&self, text: &str) -> PathBuf {
        let path = self.file("ringroad.toml");
        fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running program and its output so far; killed when dropped.
struct Program {
    child: Child,
    out: Arc<Mutex<String>>,
    err: Arc<Mutex<String>>,
}

fn follow(from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let log = Arc::new(Mutex::new(String::new()));
    let copy = log.clone();
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            *copy.lock().unwrap() += &(line + "\n");
        }
    });
    log
}

impl Program {
    fn start(mut command: Command) -> Program {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (out, err) = (follow(child.stdout.take().unwrap()), follow(child.stderr.take().unwrap()));
        Program { child, out, err }
    }

    fn serve(config: &Path, arguments: &[&str]) -> Program {
        let mut command = ringroad();
        command.args(["serve", "-c"]).arg(config).args(arguments);
        Program::start(command)
    }

    fn out(&self) -> String {
        self.out.lock().unwrap().clone()
    }

    fn err(&self) -> String {
        self.err.lock().unwrap().clone()
    }

    /// Waits until the log contains a text.
    #[track_caller]
    fn logs(&self, what: &str) {
        assert!(within(PATIENCE, || self.err().contains(what)), "no {what:?} in:\n{}", self.err());
    }

    #[track_caller]
    fn prints(&self, what: &str) {
        assert!(within(PATIENCE, || self.out().contains(what)), "no {what:?} in:\n{}", self.out());
    }

    fn signal(&self, signal: &str) {
        let kill = format!("kill -{signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Waits for its exit; all output has been read by then.
    #[track_caller]
    fn ends(&mut self, patience: Duration) -> ExitStatus {
        let mut status = None;
        within(patience, || {
            status = self.child.try_wait().unwrap();
            status.is_some() && Arc::strong_count(&self.out) + Arc::strong_count(&self.err) == 2
        });
        status.unwrap_or_else(|| panic!("it did not exit; its output:\n{}{}", self.out(), self.err()))
    }

    /// Sends a signal and expects an exit with success.
    #[track_caller]
    fn stop(&mut self, signal: &str) {
        self.signal(signal);
        let status = self.ends(Duration::from_secs(5));
        assert!(status.success(), "{status}: {}", self.err());
    }

    /// User and system time, in ticks of 10 ms.
    fn ticks(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ringroad() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ringroad"))
}

/// Runs it to its end; returns exit code, standard output, standard error.
#[track_caller]
fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = ringroad();
    command.args(arguments);
    let mut program = Program::start(command);
    let status = program.ends(PATIENCE);
    (status.code().unwrap_or(-1), program.out(), program.err())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
fn connects(socket: &Path) -> UnixStream {
    let mut stream = None;
    within(PATIENCE, || {
        stream = UnixStream::connect(socket).ok();
        stream.is_some()
    });
    stream.unwrap_or_else(|| panic!("nothing listens at {}", socket.display()))
}

// ----------------------------------------------------------------------------------------------------- test drivers

/// A driver connected to one of the daemon's sockets.
struct Guest(Connection);

impl Guest {
    fn new(socket: &Path, features: Features, size: u32, frame: usize) -> Guest {
        let connector = Connector {
            socket: socket.to_owned(),
            listen: false,
            patience: PATIENCE,
            features: features.bits() | bits::PROTOCOL_FEATURES,
            queue_pairs: 1,
            queue_size: size,
            frame,
            huge: false,
        };
        // Retried if refused: a program that another test is just starting may still hold a copy of a connection closed here.
        let mut guest = None;
        within(PATIENCE, || {
            guest = connector.connect().ok();
            guest.is_some()
        });
        Guest(guest.unwrap_or_else(|| panic!("no connection to {}", socket.display())))
    }

    fn plain(socket: &Path) -> Guest {
        Guest::new(socket, Features::all(), 256, 1518)
    }

    /// Broadcasts a frame, with an EtherType of its own.
    fn send(&mut self, number: u8, len: usize) {
        let tx = &mut self.0.driver.tx[0];
        while tx.reclaim().unwrap() > 0 {}
        let head = [&[0xff; 6][..], &[2, 0, 0, 0, 0, number], &[0x88, 0xb5]].concat();
        let frame = [head, vec![number; len - 14]].concat();
        assert_eq!(tx.add(1, |_, place| place.write(&frame)), 1);
        tx.publish();
        self.0.tx[0].kick();
    }

    /// Returns the received frames, each with its number of buffers.
    fn received(&mut self) -> Vec<(Vec<u8>, usize)> {
        let mut frames = Vec::new();
        let mut take = |pieces: &[Span<'_>]| {
            let mut frame = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
            let mut at = 0;
            pieces.iter().for_each(|piece| at += piece.read(&mut frame[at..]));
            frames.push((frame, pieces.len()));
        };
        while self.0.driver.rx[0].receive(true, &mut take).unwrap() > 0 {}
        frames
    }

    /// Waits for one frame and checks its contents; returns its number of buffers.
    #[track_caller]
    fn receives(&mut self, number: u8, len: usize) -> usize {
        let mut frames = Vec::new();
        within(PATIENCE, || {
            frames.extend(self.received());
            !frames.is_empty()
        });
        let (frame, pieces) = frames.pop().expect("no frame arrived");
        assert!(frames.is_empty(), "{} frames more than expected", frames.len());
        assert_eq!(frame.len(), len);
        assert!(frame[11] == number && frame[14..].iter().all(|&byte| byte == number), "damaged");
        pieces
    }
}

#[track_caller]
fn exchange(a: &mut Guest, b: &mut Guest) {
    for number in 1..5 {
        a.send(number, 60 + usize::from(number));
        b.receives(number, 60 + usize::from(number));
        b.send(number, 1514);
        a.receives(number, 1514);
    }
}

// ---------------------------------------------------------------------------------------------------- configuration

#[test]
fn check() {
    let folder = Folder::new("check");
    let config = folder.config(&[("a", ""), ("b", "mode = \"drop\"")]);
    let (code, out, err) = run(&["serve", "--check", "-c", text(&config)]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(out, format!("{}: configuration OK: 2 ports\n", config.display()));
    assert!(!folder.file("a.sock").exists(), "--check must not create anything");
}

#[test]
fn configuration_errors() {
    let folder = Folder::new("errors");
    let port = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket = \"/tmp/never-made.sock\"\n";
    let cases = [
        (format!("{port}qeues = 2\n"), 5, "port \"a\": key `qeues`: unknown key, did you mean `queues`?"),
        (format!("{port}queues = 17\n"), 5, "port \"a\": key `queues`: expected 1 to 16, found 17"),
        (format!("{port}poll = \"5s\"\n"), 5, "key `poll`: expected"),
        (format!("\n\n{port}[port.features]\npackt = true\n"), 8, "key `features.packt`: unknown key, did you mean"),
        (format!("[workers]\ncpus = [0, 1]\n{port}"), 2, "key `workers.cpus`: expected a list of at most one CPU"),
        (format!("{port}{port}"), 6, "key `name`: duplicate name \"a\", already used in line 2"),
        (port.replace("vhost-user", "af-xdp"), 3, "key `kind`: expected \"vhost-user\" or \"tap\", found \"af-xdp\""),
        ("[[port]]\nname = \"a\"\n".into(), 1, "key `kind`: missing, expected \"vhost-user\" or \"tap\""),
        (format!("{port}interface = \"rr0\"\n"), 5, "key `interface`: only valid for kind \"tap\""),
        (
            port.replace("/tmp/", &"x".repeat(100)),
            4,
            "key `socket`: expected the path of a Unix socket, 1 to 107 bytes",
        ),
        ("[[port]\n".into(), 1, "not valid TOML"),
        (String::new(), 1, "key `port`: missing, expected at least one port"),
    ];
    for (text_of_file, line, message) in cases {
        let config = folder.write(&text_of_file);
        for arguments in [&["serve", "-c", text(&config)][..], &["serve", "--check", "-c", text(&config)]] {
            let (code, out, err) = run(arguments);
            assert_eq!((code, out.as_str()), (1, ""), "{err}");
            let start = format!("ringroad: {}:{line}: ", config.display());
            assert!(err.starts_with(&start) && err.contains(message), "expected {start}{message}, found {err}");
            assert_eq!(err.lines().count(), 1, "{err}");
        }
    }
    let missing = folder.file("missing.toml");
    let (code, _, err) = run(&["serve", "-c", text(&missing)]);
    assert_eq!(code, 1);
    assert_eq!(err, format!("ringroad: {}: No such file or directory (os error 2)\n", missing.display()));
    let (code, _, err) = run(&["serve"]);
    assert_eq!(code, 2);
    assert!(err.contains("--config <FILE>"), "{err}");
}

#[test]
fn sockets_that_cannot_be_made() {
    let folder = Folder::new("sockets");
    let config = folder.config(&[("a", "")]);
    let mut first = Program::serve(&config, &[]);
    first.logs("ready: 1 port\n");
    let (code, _, err) = run(&["serve", "-c", text(&config)]);
    assert_eq!(code, 1);
    let expected = format!("port a: socket {} is in use by a running program", folder.file("a.sock").display());
    assert!(err.contains(&expected), "{err}");
    // The first one is not affected and keeps its socket.
    let _ = Guest::plain(&folder.file("a.sock"));
    // A killed daemon leaves its socket behind; the next one takes it over.
    first.signal("KILL");
    first.ends(PATIENCE);
    assert!(folder.file("a.sock").exists());
    let mut second = Program::serve(&config, &[]);
    second.logs("port a: removing the stale socket");
    second.logs("ready: 1 port\n");
    drop(Guest::plain(&folder.file("a.sock")));
    second.stop("TERM");

    let socket = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket =";
    let here = folder.0.display();
    for (path, log) in [
        (format!("{here}/missing/a.sock"), "does not exist; create it"),
        (format!("{here}/ringroad.toml"), "exists and is not a socket"),
        (format!("{here}"), "exists and is not a socket"),
        // procfs takes no files from anybody, root included.
        ("/proc/a.sock".into(), "cannot create socket /proc/a.sock"),
    ] {
        let config = folder.write(&format!("{socket} {path:?}\n"));
        let (code, _, err) = run(&["serve", "-c", text(&config)]);
        assert_eq!(code, 1, "{err}");
        let place = Path::new(&path).parent().unwrap().to_str().unwrap();
        assert!(err.starts_with("ringroad: ") && err.contains(log) && err.contains(place), "{err}");
    }
    // A CPU that does not exist.
    let config = folder.write(&format!("[workers]\ncpus = [1023]\n{socket} \"{here}/b.sock\"\n"));
    let (code, _, err) = run(&["serve", "-c", text(&config)]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("ringroad.toml:2: key `workers.cpus`: expected an online CPU ("), "{err}");
}

#[test]
fn check_against_this_machine() {
    let folder = Folder::new("has");
    let here = folder.0.display();
    fs::write(folder.file("file"), "").unwrap();
    let port = |name: &str, rest: &str| format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\n{rest}\n");
    let text_of_file = [
        "[workers]\ncpus = [1023]\n".into(),
        port("a", &format!("socket = \"{here}/missing/a.sock\"")),
        port("b", &format!("socket = \"{here}/file\"")),
        port("c", &format!("socket = \"{here}/file/c.sock\"")),
        port("d", &format!("socket = \"{here}/d.sock\"")),
        port("e", &format!("socket = \"{here}/../{}/d.sock\"", folder.0.file_name().unwrap().display())),
        "[[port]]\nname = \"lo\"\nkind = \"tap\"\ninterface = \"lo\"\n".into(),
        format!("[[vsock]]\ncid = 3\nsocket = \"{here}/v.sock\"\nhost = \"{here}/absent/host\"\n"),
    ]
    .concat();
    let config = folder.write(&text_of_file);
    let line = |number: usize, rest: String| format!("ringroad: {}:{number}: {rest}", config.display());
    let expected = [
        line(2, "key `workers.cpus`: expected an online CPU (0".into()),
        line(6, format!("port \"a\": key `socket`: directory {here}/missing does not exist; create it: install -d -m 0750 -o $USER {here}/missing")),
        line(10, format!("port \"b\": key `socket`: {here}/file exists and is not a socket; remove it or choose another path")),
        line(14, format!("port \"c\": key `socket`: expected a directory, but {here}/file is not one; choose another path")),
        line(22, format!("port \"e\": key `socket`: duplicate socket: {here}/../")),
        line(26, "port \"lo\": key `interface`: expected a TAP interface, but lo exists and is of another kind; choose another name".into()),
        line(30, format!("vsock 1: key `host`: directory {here}/absent does not exist; create it")),
    ];
    for arguments in [&["serve", "--check", "-c", text(&config)][..], &["serve", "-c", text(&config)]] {
        let (code, out, err) = run(arguments);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        assert_eq!(err.lines().count(), expected.len(), "{err}");
        for (line, expected) in err.lines().zip(&expected) {
            assert!(line.starts_with(expected), "expected {expected}, found {line}");
        }
    }
    // Duplicate addresses.
    let port = |name: &str, rest: &str| port(name, &format!("socket = \"{here}/{name}.sock\"\n{rest}"));
    let mac = "mac = \"52:54:00:00:00:01\"";
    let config = folder.write(&(port("a", mac) + &port("b", mac)));
    let (code, _, err) = run(&["serve", "--check", "-c", text(&config)]);
    assert!(code == 1 && err.contains(":10: port \"b\": key `mac`: duplicate mac \"52:54:00:00:00:01\""), "{err}");
    // The configuration of a running daemon passes.
    let config = folder.config(&[("a", "")]);
    let serve = Program::serve(&config, &[]);
    serve.logs("ready");
    assert_eq!(run(&["serve", "--check", "-c", text(&config)]).0, 0);
}

#[test]
fn previews_of_a_reload() {
    let folder = Folder::new("cost");
    let before = folder.file("before.toml");
    fs::rename(folder.config(&[("a", ""), ("b", ""), ("c", "")]), &before).unwrap();
    let after = folder.config(&[("a", "poll = \"1ms\""), ("b", "queues = 2\nhairpin = true"), ("d", "")]);
    let expected = "port c: removed\nport a: key `port.poll`: in place\nport b: key `port.queues`: reconnects the guest\n\
        port b: key `port.hairpin`: in place\nport d: added\n";
    let (code, out, err) = run(&["serve", "--check", "-c", text(&after), "--against", text(&before)]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, format!("{expected}{}: configuration OK: 3 ports\n", after.display()));
    let (_, out, _) = run(&["serve", "--check", "-c", text(&after), "--against", text(&after)]);
    assert!(out.starts_with("no changes\n"), "{out}");

    // SIGUSR2: the daemon reports the same and changes nothing.
    let config = folder.config(&[("a", ""), ("b", ""), ("c", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let guests = ["b", "c"].map(|name| Guest::plain(&folder.file(&format!("{name}.sock"))));
    folder.config(&[("a", "poll = \"1ms\""), ("b", "queues = 2\nhairpin = true"), ("d", "")]);
    serve.signal("USR2");
    serve.logs("reload preview: 5 changes, 2 of them disruptive\n");
    for line in expected.lines() {
        assert!(serve.err().contains(&format!("reload preview: {line}\n")), "{line}: {}", serve.err());
    }
    assert!(guests.iter().all(|guest| !guest.0.is_closed()) && !folder.file("d.sock").exists());
    serve.signal("HUP");
    serve.logs("configuration reloaded: 3 ports (+d, -c)\n");
    for line in expected.lines() {
        assert!(serve.err().contains(&format!("reload: {line}\n")), "{line}: {}", serve.err());
    }
    assert!(within(PATIENCE, || guests.iter().all(|guest| guest.0.is_closed())));
    serve.stop("TERM");
}

// ---------------------------------------------------------------------------------------------------------- signals

#[test]
fn termination() {
    let folder = Folder::new("term");
    let config = folder.config(&[("a", ""), ("b", "queues = 4"), ("c", ""), ("d", ""), ("e", "role = \"client\"")]);
    for signal in ["TERM", "INT"] {
        let json = folder.file("counters.json");
        let mut serve = Program::serve(&config, &["--json", text(&json)]);
        serve.logs("ready: 5 ports\n");
        let (mut a, mut b) = (Guest::plain(&folder.file("a.sock")), Guest::plain(&folder.file("b.sock")));
        exchange(&mut a, &mut b);
        // An incomplete message, and a frontend that does not read replies: neither may delay the exit.
        let mut stalled = connects(&folder.file("c.sock"));
        stalled.write_all(&[1, 0, 0, 0, 1]).unwrap();
        let deaf = connects(&folder.file("d.sock"));
        deaf.set_nonblocking(true).unwrap();
        let question = [1u32, 1, 0].map(u32::to_ne_bytes).concat().repeat(64);
        let mut last = Instant::now();
        assert!(within(PATIENCE, || {
            while (&deaf).write(&question).is_ok() {
                last = Instant::now();
            }
            last.elapsed() > Duration::from_millis(100)
        }));
        serve.stop(signal);
        for name in ["a", "b", "c", "d"] {
            assert!(!folder.file(&format!("{name}.sock")).exists(), "{name}");
        }
        let counters: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(counters["ports"][0]["name"], "a");
        assert_eq!(counters["ports"][0]["from"]["frames"], 4);
        assert_eq!(counters["ports"][1]["to"]["frames"], 4);
        assert!(serve.out().lines().nth(1).is_some_and(|line| line.starts_with("port  |  frames")), "{}", serve.out());
    }
}

#[test]
fn reload() {
    let folder = Folder::new("reload");
    let socket = |name: &str| folder.file(&format!("{name}.sock"));
    let config = folder.config(&[("kept", ""), ("too", ""), ("gone", ""), ("changed", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready: 4 ports\n");
    let (mut kept, mut too) = (Guest::plain(&socket("kept")), Guest::plain(&socket("too")));
    let (gone, changed) = (Guest::plain(&socket("gone")), Guest::plain(&socket("changed")));
    exchange(&mut kept, &mut too);

    folder.config(&[("new", ""), ("changed", "mtu = 9000"), ("kept", ""), ("too", "")]);
    serve.signal("HUP");
    serve.logs("configuration reloaded: 4 ports (+new, -gone)\n");
    assert!(within(PATIENCE, || gone.0.is_closed() && changed.0.is_closed()));
    assert!(!socket("gone").exists());
    assert!(!kept.0.is_closed() && !too.0.is_closed());
    exchange(&mut kept, &mut too);
    drop(too);
    let mut new = Guest::plain(&socket("new"));
    exchange(&mut kept, &mut new);
    exchange(&mut Guest::plain(&socket("changed")), &mut kept);
    let _ = new.received();

    // An invalid file changes nothing.
    fs::write(&config, "[[port]]\nname = 7\n").unwrap();
    serve.signal("HUP");
    serve.logs("ringroad.toml:2: port 1: key `name`: expected");
    serve.logs("the running configuration is kept");
    exchange(&mut kept, &mut new);
    // A port that cannot be created is left out; the others work.
    fs::write(folder.file("blocked.sock"), "").unwrap();
    folder.config(&[("kept", ""), ("new", ""), ("blocked", "")]);
    serve.signal("HUP");
    serve.logs("ringroad.toml:14: port \"blocked\": key `socket`: ");
    serve.logs("blocked.sock exists and is not a socket");
    serve.logs("configuration reloaded: 2 ports (-changed, -too)\n");
    exchange(&mut kept, &mut new);
    fs::remove_file(folder.file("blocked.sock")).unwrap();
    serve.signal("HUP");
    serve.logs("configuration reloaded: 3 ports (+blocked)\n");
    drop(Guest::plain(&socket("blocked")));
    serve.stop("TERM");
}

/// Two guests that keep sending each other frames in turn. Each frame must arrive once and intact; other frames are ignored.
struct Traffic {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<usize>,
}

/// Frame numbers from here on are not used by [`Traffic`].
const OTHERS: u8 = 200;

impl Traffic {
    fn start(mut guests: [Guest; 2]) -> Traffic {
        let stop = Arc::<AtomicBool>::default();
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) {
                let (number, len) = ((rounds % 199) as u8 + 1, 60 + rounds % 1400);
                guests[rounds % 2].send(number, len);
                let mut frames = Vec::new();
                within(PATIENCE, || {
                    let ours = |(frame, _): &(Vec<u8>, usize)| (1..OTHERS).contains(&frame[11]);
                    frames.extend(guests[(rounds + 1) % 2].received().into_iter().filter(ours));
                    !frames.is_empty()
                });
                assert_eq!(frames.len(), 1, "frames in round {rounds}");
                assert!(frames[0].0.len() == len && frames[0].0[14..].iter().all(|&byte| byte == number), "damaged");
                assert!(guests.iter().all(|guest| !guest.0.is_closed()), "disconnected in round {rounds}");
                rounds += 1;
            }
            rounds
        });
        Traffic { stop, thread }
    }

    /// Stops it; at least `frames` must have arrived, and none been lost.
    #[track_caller]
    fn ends(self, frames: usize) {
        self.stop.store(true, Ordering::Relaxed);
        let rounds = self.thread.join().expect("no frame was lost or damaged");
        assert!(rounds >= frames, "{rounds} frames");
    }
}

/// Reloads a running daemon with changed configurations.
struct Reloads<'a> {
    folder: &'a Folder,
    serve: &'a Program,
    head: String,
    done: usize,
}

impl Reloads<'_> {
    /// Returns a configuration: ports `a` and `b` never change, port `c` has these further lines.
    fn text(&self, c: &str) -> String {
        let socket = |name: &str| self.folder.file(&format!("{name}.sock")).display().to_string();
        let port =
            |name: &str| format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = \"{}\"\n", socket(name));
        format!("{}{}{}{}{c}\n", self.head, port("a"), port("b"), port("c"))
    }

    /// Reloads; returns what the daemon logged.
    #[track_caller]
    fn reload(&mut self, text: &str) -> String {
        let before = self.serve.err().len();
        self.folder.write(text);
        self.serve.signal("HUP");
        self.done += 1;
        let read = || self.serve.err().matches("configuration reloaded").count();
        assert!(within(PATIENCE, || read() == self.done), "{}", self.serve.err());
        self.serve.err()[before..].to_owned()
    }

    /// Reloads with further lines for port `c`.
    #[track_caller]
    fn port(&mut self, c: &str) -> String {
        self.reload(&self.text(c))
    }

    /// Reloads with these lines before all ports, from now on.
    #[track_caller]
    fn head(&mut self, head: &str) -> String {
        self.head = format!("{head}\n");
        self.port("")
    }
}

#[test]
fn a_reload_changes_in_place_what_it_can() {
    let folder = Folder::new("inplace");
    let guest = |name: &str| Guest::plain(&folder.file(&format!("{name}.sock")));
    let config = folder.config(&[("a", ""), ("b", ""), ("c", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready: 3 ports\n");
    let traffic = Traffic::start([guest("a"), guest("b")]);
    let mut c = guest("c");
    let mut reloads = Reloads { folder: &folder, serve: &serve, head: String::new(), done: 0 };
    let only = |log: String, key: &str| {
        let logged: Vec<&str> = log.lines().filter(|line| line.contains("reload: ")).collect();
        assert!(logged.len() == 1 && logged[0].contains(&format!("key `{key}`: in place")), "{key}: {log}");
    };
    for (head, keys) in [
        ("[workers]\npoll = \"50us\"", &["workers.poll"][..]),
        ("[workers]\npoll = \"unlimited\"", &["workers.poll"]),
        ("[workers]\nturn = 1", &["workers.poll", "workers.turn"]),
        ("[workers]\ngather = \"8us\"", &["workers.gather", "workers.turn"]),
        ("[workers]\ncpus = [0]", &["workers.cpus", "workers.gather"]),
        ("[switch]\nageing = \"1s\"", &["workers.cpus", "switch.ageing"]),
        ("[switch]\nentries = 7", &["switch.ageing", "switch.entries"]),
        ("[log]\nlines = 77", &["switch.entries", "log.lines"]),
        ("", &["log.lines"]),
    ] {
        let log = reloads.head(head);
        for key in keys {
            assert!(log.contains(&format!("[INFO ] reload: key `{key}`: in place\n")), "{key}: {log}");
        }
        assert_eq!(log.matches("reload: ").count(), keys.len(), "{log}");
        assert!(!c.0.is_closed(), "{head}");
        c.send(OTHERS, 100);
    }
    // Returns how many frames c gets back of what it sends.
    let back = |c: &mut Guest| {
        while !c.received().is_empty() {}
        c.send(OTHERS + 1, 100);
        let mut count = 0;
        within(Duration::from_millis(200), || {
            count += c.received().iter().filter(|(frame, _)| frame[14] == OTHERS + 1).count();
            count > 0
        });
        count
    };
    assert_eq!(back(&mut c), 0);
    only(reloads.port("hairpin = true"), "port.hairpin");
    assert_eq!(back(&mut c), 1);
    reloads.port("");
    assert_eq!(back(&mut c), 0);
    only(reloads.port("mode = \"reflect\""), "port.mode");
    assert_eq!(back(&mut c), 1);
    reloads.port("mode = \"drop\"");
    assert_eq!(back(&mut c), 0);
    reloads.port("mode = \"generate\"");
    let made = |frames: Vec<(Vec<u8>, usize)>| frames.iter().filter(|(frame, _)| frame.len() == 64).count();
    assert!(within(PATIENCE, || made(c.received()) > 0), "the port generates frames");
    reloads.port("");
    assert_eq!(back(&mut c), 0);
    for poll in ["50us", "unlimited", "0"] {
        let log = reloads.port(&format!("poll = {poll:?}"));
        only(log, "port.poll");
    }
    reloads.port("");
    for tuning in [
        "fast_path = false",
        "shadow_used = false",
        "prefetch = 0",
        "prefetch_write = false",
        "translation_cache = false",
        "small_copy = false",
        "prefetch = 31",
    ] {
        only(reloads.port(&format!("tuning = {{ {tuning} }}")), "port.tuning");
        reloads.head("[workers]\nturn = 2");
        c.send(OTHERS, 1000);
    }
    assert!(!c.0.is_closed(), "{}", serve.err());
    reloads.head("");

    // What the guest of c negotiates reconnects it, and no other guest. The MAC address is not one of the traffic's: it would be
    // reserved for c from then on.
    for key in ["mac = \"02:00:00:00:01:00\"", "mtu = 9000", "features = { packed = false }", "queues = 2"] {
        let log = reloads.port(key);
        let name = key.split(' ').next().unwrap();
        let expected = format!("[WARN ] reload: port c: key `port.{name}`: reconnects the guest");
        assert!(log.contains(&expected), "{log}");
        assert!(within(PATIENCE, || c.0.is_closed()), "{key}");
        c = guest("c");
        c.send(OTHERS, 100);
    }
    traffic.ends(100);
    for name in ["a", "b"] {
        assert_eq!(serve.err().matches(&format!("port {name}: frontend connected")).count(), 1, "{}", serve.err());
    }
    serve.stop("TERM");
}

#[test]
fn a_reload_keeps_interfaces() {
    let folder = Folder::new("keeps");
    let tap = |more: &str| format!("[[port]]\nname = \"host\"\nkind = \"tap\"\ninterface = \"rrtest2\"\n{more}");
    let config = folder.write(&tap(""));
    // In a network namespace, so that the interface name is free.
    let mut command = unshared("--net");
    command.args([env!("CARGO_BIN_EXE_ringroad"), "serve", "-c", text(&config)]);
    let mut serve = Program::start(command);
    serve.logs("ready: 1 port\n");
    let ip = |arguments: &str| {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &serve.child.id().to_string()]);
        if !is_root() {
            command.args(["--user", "--preserve-credentials"]);
        }
        let output = command.arg("ip").args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    ip("addr add 10.99.0.1/24 dev rrtest2");
    let mut done = 0;
    let mut reload = |text: String| {
        let before = serve.err().len();
        folder.write(&text);
        serve.signal("HUP");
        done += 1;
        assert!(within(PATIENCE, || serve.err().matches("configuration reloaded").count() == done), "{}", serve.err());
        serve.err()[before..].to_owned()
    };
    let address = "inet 10.99.0.1/24";
    for text in [
        format!("[workers]\npoll = \"50us\"\n{}", tap("")),
        tap("poll = \"1ms\""),
        tap("hairpin = true"),
        tap("mode = \"drop\""),
        tap("mtu = 9000"),
        tap("mtu = 1400"),
    ] {
        let log = reload(text.clone());
        assert!(log.contains(": in place") && !log.contains("recreates"), "{log}");
        assert!(ip("-o addr show dev rrtest2").contains(address), "{text}");
    }
    assert!(ip("-o link show dev rrtest2").contains("mtu 1400"), "changed in place");
    let log = reload(tap("queues = 2"));
    assert!(log.contains("[WARN ] reload: port host: key `port.queues`: recreates the interface"), "{log}");
    assert!(!ip("-o addr show dev rrtest2").contains(address), "the interface was recreated");
    serve.stop("TERM");
}

/// Returns a full pipe.
fn full_pipe() -> (io::PipeReader, io::PipeWriter) {
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(&vec![b'.'; 65536]).unwrap();
    (reader, writer)
}

/// Sends SIGTERM; returns how long the exit took.
#[track_caller]
fn time_to_end(child: &mut Child) -> (Duration, ExitStatus) {
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let start = Instant::now();
    let mut status = None;
    within(PATIENCE, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    (
        start.elapsed(),
        status.unwrap_or_else(|| {
            let _ = child.kill();
            panic!("it did not exit")
        }),
    )
}

/// So that the port's own limits do not bound the log.
const UNLIMITED: &str = "limits = { connects = 1000000, lines = 1000000, messages = 1000000 }";

#[test]
fn output_that_nobody_reads() {
    let folder = Folder::new("unread");
    let config = folder.config(&[("a", UNLIMITED), ("b", "")]);
    let (socket_a, socket_b) = (folder.file("a.sock"), folder.file("b.sock"));
    let (err, err_writer) = full_pipe();
    let (out, out_writer) = full_pipe();
    let mut command = ringroad();
    command.args(["serve", "-vv", "-c", text(&config)]).stdin(Stdio::null()).stdout(out_writer).stderr(err_writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    assert!(within(PATIENCE, || socket_a.exists() && socket_b.exists()));
    let (mut a, mut b) = (Guest::plain(&socket_a), Guest::plain(&socket_b));
    exchange(&mut a, &mut b);
    // More lines than fit into a pipe, and counters that nobody reads.
    for _ in 0..2000 {
        let _ = UnixStream::connect(&socket_a);
    }
    for _ in 0..20 {
        assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
    }
    exchange(&mut a, &mut b);
    folder.config(&[("a", &format!("poll = \"1ms\"\n{UNLIMITED}")), ("b", ""), ("new", "")]);
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
    assert!(within(PATIENCE, || folder.file("new.sock").exists()));
    exchange(&mut a, &mut b);
    let (time, status) = time_to_end(&mut child);
    assert!(status.success() && time < Duration::from_secs(1), "{status}, {time:?}");
    assert!(!socket_a.exists());
    drop((err, out));
}

#[test]
fn the_log_is_bounded() {
    let folder = Folder::new("bounded");
    let config = folder.config(&[("a", UNLIMITED), ("b", "")]);
    fs::write(&config, format!("[log]\nlines = 5\n{}", fs::read_to_string(&config).unwrap())).unwrap();
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let _a = Guest::plain(&folder.file("a.sock"));
    let start = Instant::now();
    let mut connects = 0;
    while start.elapsed() < Duration::from_secs(2) {
        connects += usize::from(UnixStream::connect(folder.file("a.sock")).is_ok());
    }
    assert!(connects > 100, "{connects}");
    serve.logs("log lines suppressed: above the limit per second (key `log.lines`)");
    let lines = serve.err().lines().filter(|line| line.contains("port a")).count();
    // A burst of five, five a second, for two or three seconds.
    assert!(lines < 5 + 5 * 8, "{lines} lines for {connects} connects");
    // Messages caused by the operator are exempt.
    serve.signal("HUP");
    serve.logs("configuration reloaded");
    serve.stop("TERM");
}

/// A port is not stopped by a reload if it could not be started again.
#[test]
fn a_reload_that_would_fail_disconnects_no_guest() {
    let folder = Folder::new("cannot");
    let config = folder.config(&[("a", ""), ("b", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let guest = |name: &str| Guest::plain(&folder.file(&format!("{name}.sock")));
    let (mut a, mut b) = (guest("a"), guest("b"));
    let text_of_file = fs::read_to_string(&config).unwrap();
    folder.write(&text_of_file.replace("a.sock", "missing/a.sock"));
    serve.signal("HUP");
    serve.logs("missing does not exist; create it");
    serve.logs("port a is left unchanged");
    serve.logs("configuration reloaded: 2 ports\n");
    exchange(&mut a, &mut b);
    assert!(!a.0.is_closed() && !b.0.is_closed());
    // Two ports can swap their sockets: both are stopped before either is started.
    let swapped = text_of_file.replace("a.sock", "x.sock").replace("b.sock", "a.sock").replace("x.sock", "b.sock");
    folder.write(&swapped);
    serve.signal("HUP");
    assert!(within(PATIENCE, || a.0.is_closed() && b.0.is_closed()));
    assert!(
        within(PATIENCE, || serve.err().matches("configuration reloaded: 2 ports\n").count() == 2),
        "{}",
        serve.err()
    );
    exchange(&mut guest("a"), &mut guest("b"));
    serve.stop("TERM");
}

#[test]
fn exits_while_starting() {
    let folder = Folder::new("starts");
    ringroad_host::raise_file_limit();
    // A foreign socket with a full backlog: checking whether it is in use blocks.
    let socket = folder.file("a.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let waiting = Arc::<Mutex<Vec<UnixStream>>>::default();
    {
        let (waiting, socket) = (waiting.clone(), socket.clone());
        thread::spawn(move || {
            while let Ok(stream) = UnixStream::connect(&socket) {
                waiting.lock().unwrap().push(stream);
            }
        });
    }
    let mut count = 0;
    assert!(within(PATIENCE, || {
        thread::sleep(Duration::from_millis(100));
        let now = waiting.lock().unwrap().len();
        std::mem::replace(&mut count, now) == now
    }));
    let mut serve = Program::serve(&folder.config(&[("a", "")]), &[]);
    thread::sleep(Duration::from_millis(300));
    let (time, _) = time_to_end(&mut serve.child);
    assert!(time < Duration::from_secs(1), "{time:?} with {count} waiting: {}", serve.err());
    assert!(socket.exists(), "another program's socket");
}

#[test]
fn exits_while_control_is_blocked() {
    let folder = Folder::new("hangs");
    let config = folder.config(&[("a", "")]);
    let socket = folder.file("a.sock");
    let fifo = |name: &str| {
        let path = folder.file(name);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    };
    // At exit it blocks writing the counters to a FIFO without a reader.
    let counters = fifo("counters.json");
    let mut serve = Program::serve(&config, &["--json", text(&counters)]);
    serve.logs("ready");
    let (time, status) = time_to_end(&mut serve.child);
    assert!(time < Duration::from_secs(1), "{time:?}");
    assert_eq!(status.code(), Some(1), "the shutdown was incomplete");
    serve.logs("shutdown timed out after 600 ms while writing the counters; exiting anyway");
    assert!(!socket.exists());
    // In a reload it blocks reading the configuration from a FIFO without a writer.
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let guest = Guest::plain(&socket);
    fs::remove_file(&config).unwrap();
    fifo("ringroad.toml");
    serve.signal("HUP");
    thread::sleep(Duration::from_millis(100));
    assert!(!guest.0.is_closed());
    let (time, _) = time_to_end(&mut serve.child);
    assert!(time < Duration::from_secs(1), "{time:?}");
    serve.logs("exiting anyway");
    assert!(!socket.exists());
}

#[test]
fn counters() {
    let folder = Folder::new("usr1");
    let config = folder.config(&[("left", ""), ("right", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let (mut left, mut right) = (Guest::plain(&folder.file("left.sock")), Guest::plain(&folder.file("right.sock")));
    exchange(&mut left, &mut right);
    serve.signal("USR1");
    serve.prints("right  ");
    let out = serve.out();
    let columns = |line: usize| {
        let columns = out.lines().nth(line).unwrap().split("  ").map(str::trim).filter(|c| !["", "|"].contains(c));
        columns.take(8).collect::<Vec<_>>()
    };
    let groups: Vec<&str> = out.lines().next().unwrap().split('|').map(str::trim).collect();
    assert_eq!(groups, ["", "from port", "from port, dropped", "to port", "to port, dropped", "events"]);
    assert_eq!(columns(1), ["port", "frames", "bytes", "total", "storm", "spoofed", "frames", "bytes"]);
    // Four frames of 61 to 64 bytes one way, four of 1514 the other.
    assert_eq!(columns(2), ["left", "4", "250", "0", "0", "0", "4", "6 056"]);
    assert_eq!(columns(3), ["right", "4", "6 056", "0", "0", "0", "4", "250"]);
    serve.stop("INT");

    // The reader of the counters may close the pipe.
    let mut command = ringroad();
    command.args(["serve", "-c", text(&config)]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let err = follow(child.stderr.take().unwrap());
    let mut serve = Program { child, out: Arc::default(), err };
    serve.logs("ready");
    serve.signal("USR1");
    let (mut left, mut right) = (Guest::plain(&folder.file("left.sock")), Guest::plain(&folder.file("right.sock")));
    exchange(&mut left, &mut right);
    serve.stop("TERM");
}

// ------------------------------------------------------------------------------------------------------------ blast

#[test]
fn blast_against_nothing() {
    let folder = Folder::new("nothing");
    let socket = folder.file("nobody.sock");
    let expected = format!("ringroad: cannot connect to {}: ", socket.display());
    let (code, out, err) = run(&["blast", text(&socket), "--seconds", "1"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with(&expected) && err.contains("is a vhost-user device listening there?"), "{err}");
    // A listener that closes the connection.
    let listener = UnixListener::bind(&socket).unwrap();
    let accept = thread::spawn(move || drop(listener.accept()));
    let (code, _, err) = run(&["blast", text(&socket), "--seconds", "1"]);
    assert_eq!(code, 1);
    assert!(err.contains("did not accept"), "{err}");
    accept.join().unwrap();
    for (arguments, log) in [
        (&["--ring", "split", "--queue-size", "3"][..], "--queue-size 3: a split ring needs a power of two"),
        (&["--queue-size", "32769"], "32769"),
        (&["--size", "59"], "expected sizes of 60 to"),
        (&["--rate", "fast"], "expected a number"),
        (&["--without", "packed"], "packed"),
    ] {
        let (code, _, err) = run(&[&["blast", text(&socket)], arguments].concat());
        assert!(code != 0 && err.contains(log), "{arguments:?}: {code}, {err}");
    }
}

/// Runs blast briefly; returns its result.
#[track_caller]
fn blast(socket: &Path, arguments: &[&str]) -> Value {
    let all = [&["blast", text(socket), "--verify", "--seconds", "0.15", "--json", "-"], arguments].concat();
    let (code, out, err) = run(&all);
    assert_eq!(code, 0, "{arguments:?}: {out}{err}");
    serde_json::from_str(&out[out.find("\n{").unwrap() + 1..]).unwrap_or_else(|error| panic!("{error} in {out}"))
}

/// The same, where all frames must be returned except those still in flight.
#[track_caller]
fn blast_all(socket: &Path, arguments: &[&str], window: u64) {
    let window_argument = window.to_string();
    let result = blast(socket, &[arguments, &["--window", &window_argument]].concat());
    let number = |key: &str| result[key].as_u64().unwrap();
    assert_eq!((number("errors"), number("foreign")), (0, 0), "{arguments:?}: {result}");
    assert!(number("received") > 0, "{arguments:?}: {result}");
    assert!(number("received") + window >= number("sent"), "{arguments:?}: frames were lost: {result}");
}

#[test]
fn blast_every_ring() {
    let folder = Folder::new("rings");
    let config = folder.config(&[("a", "mode = \"reflect\"\nmtu = 65535")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let socket = folder.file("a.sock");
    for size in ["1", "3", "200", "32768"] {
        blast_all(&socket, &["--ring", "packed", "--queue-size", size], if size == "1" { 1 } else { 3 });
    }
    for size in ["1", "2", "256", "32768"] {
        blast_all(&socket, &["--ring", "split", "--queue-size", size], if size == "1" { 1 } else { 2 });
    }
    for ring in ["split", "packed"] {
        for without in ["in_order", "mrg_rxbuf", "event_idx", "indirect", "in_order,mrg_rxbuf,event_idx,indirect"] {
            blast_all(&socket, &["--ring", ring, "--without", without], 100);
        }
        blast_all(&socket, &["--ring", ring, "--event-driven", "--size", "imix"], 64);
        blast_all(&socket, &["--ring", ring, "--size", "60,64,1518,4096,9018,65000"], 16);
        blast_all(&socket, &["--ring", ring, "--size", "9018,65000", "--without", "mrg_rxbuf"], 16);
        // Without a window: frames may be dropped, but none damaged or duplicated.
        let result = blast(&socket, &["--ring", ring, "--size", "imix", "--flows", "8"]);
        assert_eq!(result["errors"], 0, "{result}");
        assert!(result["received"].as_u64().unwrap() > 0, "{result}");
    }
    serve.stop("TERM");
}

#[test]
fn the_device_disconnects() {
    let folder = Folder::new("goes");
    let config = folder.config(&[("a", "mode = \"reflect\"")]);
    let mut serve = Program::serve(&config, &["-vv"]);
    serve.logs("ready");
    let mut command = ringroad();
    command.args(["blast", text(&folder.file("a.sock")), "--seconds", "30", "--rate", "1000", "--event-driven"]);
    let mut blast = Program::start(command);
    serve.logs("queue 1: started");
    serve.stop("TERM");
    let status = blast.ends(Duration::from_secs(5));
    assert_eq!(status.code(), Some(1), "{}", blast.out());
    assert!(blast.err().contains("the device at") && blast.err().contains("has disconnected"), "{}", blast.err());
}

#[test]
fn jumbo_frames() {
    let folder = Folder::new("jumbo");
    let config = folder.config(&[
        ("large", "mtu = 65535"),
        ("small", "mtu = 65535"),
        ("plain", "mtu = 65535\n[port.features]\nmrg_rxbuf = false"),
    ]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let socket = |name: &str| folder.file(&format!("{name}.sock"));
    for packed in [false, true] {
        let features = Features::layout(packed);
        let mut large = Guest::new(&socket("large"), features, 256, 65549);
        let mut small = Guest::new(&socket("small"), features, 256, 1518);
        let mut plain = Guest::new(&socket("plain"), features, 256, 1518);
        for (number, len) in (1..).zip([60, 1514, 1518, 1600, 9014, 65000, 65549]) {
            large.send(number, len);
            // As many buffers as needed: each holds 1600 bytes, and the first one has the header of 12 bytes.
            assert_eq!(small.receives(number, len), (len + 12).div_ceil(1600), "{len} bytes");
            if len <= 1600 - 12 {
                assert_eq!(plain.receives(number, len), 1);
            }
        }
        // Frames too large for a driver without mergeable buffers are dropped and counted; others still arrive.
        small.send(9, 64);
        plain.receives(9, 64);
        large.receives(9, 64);
    }
    serve.signal("USR1");
    serve.prints("plain");
    let out = serve.out();
    let plain = out.lines().find(|line| line.starts_with("plain")).unwrap();
    let oversize = plain.split("  ").map(str::trim).filter(|cell| !["", "|"].contains(cell)).nth(9).unwrap();
    assert_eq!(oversize, "8", "four sizes, twice: {out}");
    serve.stop("TERM");
}

#[test]
fn demo() {
    let (code, out, err) = run(&["demo", "--seconds", "1"]);
    assert_eq!(code, 0, "{out}{err}");
    for line in ["frames returned", "payload errors          0\n", "round trip p50 / p99"] {
        assert!(out.contains(line), "no {line:?} in {out}");
    }
}

#[test]
fn help() {
    let (code, _, err) = run(&[]);
    assert!(code == 2 && err.contains("Usage"), "{err}");
    for (arguments, examples) in [
        (&["--help"][..], &["Examples:", "ringroad demo", "ringroad serve -c", "ringroad blast", "ringroad bench"][..]),
        (&["serve", "--help"], &["Example", "[[port]]", "kind = \"vhost-user\"", "SIGUSR1"]),
        (&["demo", "--help"], &["Example", "ringroad demo --seconds"]),
        (&["blast", "--help"], &["Examples:", "ringroad blast /run/ringroad/vm1.sock"]),
        (&["vsock", "--help"], &["Examples:", "ringroad vsock cat"]),
        (&["vsock", "cat", "--help"], &["Example:", "ringroad vsock cat"]),
        (&["bench", "--help"], &["Example", "ringroad bench"]),
    ] {
        let (code, out, _) = run(arguments);
        assert_eq!(code, 0);
        examples.iter().for_each(|example| assert!(out.contains(example), "{arguments:?}: no {example:?} in {out}"));
    }
    let (code, out, _) = run(&["--version"]);
    assert_eq!((code, out), (0, format!("ringroad {}\n", env!("CARGO_PKG_VERSION"))));
}

// -------------------------------------------------------------------------------------------------------- footprint

#[test]
fn eight_idle_ports() {
    let folder = Folder::new("idle");
    let names: Vec<String> = (0..8).map(|index| format!("port{index}")).collect();
    let config = folder.config(&names.iter().map(|name| (name.as_str(), "")).collect::<Vec<_>>());
    let sockets: Vec<PathBuf> = names.iter().map(|name| folder.file(&format!("{name}.sock"))).collect();
    // The best of five: the machine may be busy.
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        let mut serve = Program::serve(&config, &[]);
        assert!(within(PATIENCE, || sockets.iter().all(|socket| UnixStream::connect(socket).is_ok())));
        best = best.min(start.elapsed());
        serve.logs("ready");
        serve.stop("TERM");
    }
    assert!(best < Duration::from_millis(50), "{best:?} from start to eight sockets");

    let serve = Program::serve(&config, &[]);
    serve.logs("ready");
    // Connected guests without traffic are idle, too.
    let (mut a, mut b) = (Guest::plain(&sockets[0]), Guest::plain(&sockets[1]));
    exchange(&mut a, &mut b);
    thread::sleep(Duration::from_millis(50));
    let before = serve.ticks();
    thread::sleep(Duration::from_secs(2));
    assert_eq!(serve.ticks() - before, 0, "ticks of CPU time in two idle seconds");
    let status = fs::read_to_string(format!("/proc/{}/status", serve.child.id())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(resident < 20 << 10, "{resident} KiB resident");
    exchange(&mut a, &mut b);
}

#[test]
fn out_of_descriptors() {
    let folder = Folder::new("nofile");
    let config = folder.config(&[("a", ""), ("b", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let mut a = Guest::plain(&folder.file("a.sock"));
    let limit = |limit: &str| {
        let pid = serve.child.id().to_string();
        assert!(Command::new("prlimit").args(["--pid", &pid, limit]).status().unwrap().success());
    };
    // Below the number of open descriptors: no new ones.
    limit("--nofile=4:");
    let second = connects(&folder.file("a.sock"));
    let waiting = connects(&folder.file("b.sock"));
    serve.logs("port b: cannot accept a frontend: Too many open files");
    let before = serve.ticks();
    thread::sleep(Duration::from_millis(500));
    assert!(serve.ticks() - before <= 1, "it spins on frontends that it cannot accept");
    limit("--nofile=1024:");
    serve.logs("port a: a second frontend was turned away");
    serve.logs("port b: frontend connected");
    drop((second, waiting));
    exchange(&mut a, &mut Guest::plain(&folder.file("b.sock")));
    serve.stop("TERM");
}

// -------------------------------------------------------------------------------------------------------------- TAP

fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
}

/// Returns a command that runs in new namespaces with all capabilities; an ordinary user gets them by a user namespace.
fn unshared(what: &str) -> Command {
    let mut command = Command::new("unshare");
    if !is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg(what);
    command
}

fn tap_config(folder: &Folder) -> PathBuf {
    folder.write("[[port]]\nname = \"host\"\nkind = \"tap\"\ninterface = \"rrtest0\"\n")
}

#[test]
fn tap_without_permission() {
    let folder = Folder::new("permission");
    let config = tap_config(&folder);
    let program = env!("CARGO_BIN_EXE_ringroad");
    let mut command = if is_root() {
        // Root without capabilities has no more rights than an ordinary user.
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all", program]);
        command
    } else {
        Command::new(program)
    };
    command.args(["serve", "-c", text(&config)]);
    let mut serve = Program::start(command);
    assert_eq!(serve.ends(PATIENCE).code(), Some(1), "{}", serve.err());
    let expected = if Path::new("/dev/net/tun").exists() {
        "ringroad: TAP interface rrtest0: not permitted; run as root or with CAP_NET_ADMIN"
    } else {
        "ringroad: TAP interface rrtest0: /dev/net/tun does not exist; load the module (modprobe tun)"
    };
    assert!(serve.err().starts_with(expected), "{}", serve.err());
}

#[test]
fn tap_without_a_device() {
    let folder = Folder::new("notun");
    let config = tap_config(&folder);
    let mut command = unshared("--mount");
    let hide = "if [ -d /dev/net ]; then mount -t tmpfs none /dev/net || exit 9; fi; exec \"$@\"";
    command.args(["sh", "-c", hide, "sh", env!("CARGO_BIN_EXE_ringroad"), "serve", "-c", text(&config)]);
    let mut serve = Program::start(command);
    assert_eq!(serve.ends(PATIENCE).code(), Some(1), "{}", serve.err());
    let expected = "ringroad: TAP interface rrtest0: /dev/net/tun does not exist; load the module (modprobe tun)";
    assert!(serve.err().starts_with(expected), "{}", serve.err());
}

#[test]
fn tap_in_use() {
    let folder = Folder::new("busy");
    let config = tap_config(&folder);
    let program = env!("CARGO_BIN_EXE_ringroad");
    // In a network namespace, so that the interface name is free.
    let mut command = unshared("--net");
    command.args([program, "serve", "-c", text(&config)]);
    let mut first = Program::start(command);
    first.logs("ready: 1 port\n");
    let mut command = Command::new("nsenter");
    command.args(["--net", "--target", &first.child.id().to_string()]);
    if !is_root() {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.args([program, "serve", "-c", text(&config)]);
    let mut second = Program::start(command);
    assert_eq!(second.ends(PATIENCE).code(), Some(1), "{}", second.err());
    assert_eq!(second.err(), "ringroad: TAP interface rrtest0 is in use by another program\n");
    first.stop("TERM");
}
