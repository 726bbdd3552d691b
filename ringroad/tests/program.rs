//! The whole program, as its users start it: what it prints, how it ends, what it needs, and what becomes of frames.

use ringroad_host::vhost_user::{Connection, Connector};
use ringroad_mem::Span;
use ringroad_net::{Features, bits};
use serde_json::Value;
use std::{
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// For how long anything is waited for that should happen.
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

/// A folder that goes with its owner.
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

    /// A configuration of vhost-user ports with these names, and more lines for each.
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

/// A program that runs, with what it says. Dropped, it is killed.
struct Program {
    child: Child,
    out: Arc<Mutex<String>>,
    err: Arc<Mutex<String>>,
}

fn follow(from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let said = Arc::new(Mutex::new(String::new()));
    let copy = said.clone();
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            *copy.lock().unwrap() += &(line + "\n");
        }
    });
    said
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

    /// Waits until the log has something.
    #[track_caller]
    fn says(&self, what: &str) {
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

    /// How it ends, if it does so in time. All that it said has been read by then.
    #[track_caller]
    fn ends(&mut self, patience: Duration) -> ExitStatus {
        let mut status = None;
        within(patience, || {
            status = self.child.try_wait().unwrap();
            status.is_some() && Arc::strong_count(&self.out) + Arc::strong_count(&self.err) == 2
        });
        status.unwrap_or_else(|| panic!("it does not end; it said:\n{}{}", self.out(), self.err()))
    }

    /// A signal ends it as it should.
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

/// Runs it to its end: exit code, standard output, standard error.
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
    stream.unwrap_or_else(|| panic!("nobody listens at {}", socket.display()))
}

// ----------------------------------------------------------------------------------------------- drivers of our own

/// A driver at one of the daemon's sockets.
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
        // Again if it is turned away: while another test starts a program, that has a copy of each connection closed here.
        let mut guest = None;
        within(PATIENCE, || {
            guest = connector.connect().ok();
            guest.is_some()
        });
        Guest(guest.unwrap_or_else(|| panic!("no connection to {}", socket.display())))
    }

    fn plain(socket: &Path) -> Guest {
        Guest::new(socket, Features::ALL, 256, 1518)
    }

    /// Sends a frame to everybody, of a type that nobody else uses.
    fn send(&mut self, number: u8, len: usize) {
        let tx = &mut self.0.driver.tx[0];
        while tx.reclaim().unwrap() > 0 {}
        let head = [&[0xff; 6][..], &[2, 0, 0, 0, 0, number], &[0x88, 0xb5]].concat();
        let frame = [head, vec![number; len - 14]].concat();
        assert_eq!(tx.add(1, |_, place| place.write(&frame)), 1);
        tx.publish();
        self.0.tx[0].kick();
    }

    /// Frames that have come, and in how many buffers each.
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

    /// Waits for one frame, which must be whole; says in how many buffers it came.
    #[track_caller]
    fn receives(&mut self, number: u8, len: usize) -> usize {
        let mut frames = Vec::new();
        within(PATIENCE, || {
            frames.extend(self.received());
            !frames.is_empty()
        });
        let (frame, pieces) = frames.pop().expect("no frame came");
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
    assert_eq!(out, format!("{}: 2 ports, right\n", config.display()));
    assert!(!folder.file("a.sock").exists(), "it only reads");
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
        (format!("{port}{port}"), 6, "key `name`: expected nothing else to have it, found \"a\" in line 2 too"),
        (port.replace("vhost-user", "af-xdp"), 3, "key `kind`: expected \"vhost-user\" or \"tap\", found \"af-xdp\""),
        ("[[port]]\nname = \"a\"\n".into(), 1, "key `kind`: expected \"vhost-user\" or \"tap\", found no such key"),
        (format!("{port}interface = \"rr0\"\n"), 5, "key `interface`: only for kind \"tap\""),
        (
            port.replace("/tmp/", &"x".repeat(100)),
            4,
            "key `socket`: expected the path of a Unix socket, 1 to 107 bytes",
        ),
        ("[[port]\n".into(), 1, "not valid TOML"),
        (String::new(), 1, "key `port`: expected at least one port"),
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
    first.says("1 ports, ready");
    let (code, _, err) = run(&["serve", "-c", text(&config)]);
    assert_eq!(code, 1);
    let expected = format!("port a: socket {} is in use by a running program", folder.file("a.sock").display());
    assert!(err.contains(&expected), "{err}");
    // The first one did not notice, and its socket is still its own.
    let _ = Guest::plain(&folder.file("a.sock"));
    // One that is killed leaves its socket behind; the next one takes it.
    first.signal("KILL");
    first.ends(PATIENCE);
    assert!(folder.file("a.sock").exists());
    let mut second = Program::serve(&config, &[]);
    second.says("port a: removing the stale socket");
    second.says("1 ports, ready");
    drop(Guest::plain(&folder.file("a.sock")));
    second.stop("TERM");

    let socket = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket =";
    let here = folder.0.display();
    for (path, said) in [
        (format!("{here}/missing/a.sock"), "cannot make socket"),
        (format!("{here}/ringroad.toml"), "exists and is not a socket"),
        (format!("{here}"), "exists and is not a socket"),
        // procfs takes no files from anybody, root included.
        ("/proc/a.sock".into(), "cannot make socket /proc/a.sock"),
    ] {
        let config = folder.write(&format!("{socket} {path:?}\n"));
        let (code, _, err) = run(&["serve", "-c", text(&config)]);
        assert_eq!(code, 1, "{err}");
        assert!(err.contains("ringroad: port a: ") && err.contains(said) && err.contains(&path), "{err}");
    }
    // A CPU that there is not.
    let config = folder.write(&format!("[workers]\ncpus = [1023]\n{socket} \"{here}/b.sock\"\n"));
    let (code, _, err) = run(&["serve", "-c", text(&config)]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("cannot run a worker on CPU 1023 (key `workers.cpus`)"), "{err}");
}

// ---------------------------------------------------------------------------------------------------------- signals

#[test]
fn termination() {
    let folder = Folder::new("term");
    let config = folder.config(&[("a", ""), ("b", "queues = 4"), ("c", ""), ("d", ""), ("e", "role = \"client\"")]);
    for signal in ["TERM", "INT"] {
        let json = folder.file("counters.json");
        let mut serve = Program::serve(&config, &["--json", text(&json)]);
        serve.says("5 ports, ready");
        let (mut a, mut b) = (Guest::plain(&folder.file("a.sock")), Guest::plain(&folder.file("b.sock")));
        exchange(&mut a, &mut b);
        // Half a message, and nobody who reads the answers: neither may hold up the end.
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
        assert!(serve.out().starts_with("port  from: frames"), "{}", serve.out());
    }
}

#[test]
fn reload() {
    let folder = Folder::new("reload");
    let socket = |name: &str| folder.file(&format!("{name}.sock"));
    let config = folder.config(&[("kept", ""), ("too", ""), ("gone", ""), ("changed", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.says("4 ports, ready");
    let (mut kept, mut too) = (Guest::plain(&socket("kept")), Guest::plain(&socket("too")));
    let (gone, changed) = (Guest::plain(&socket("gone")), Guest::plain(&socket("changed")));
    exchange(&mut kept, &mut too);

    folder.config(&[("new", ""), ("changed", "mtu = 9000"), ("kept", ""), ("too", "")]);
    serve.signal("HUP");
    serve.says("configuration read again: 4 ports");
    assert!(within(PATIENCE, || gone.0.is_closed() && changed.0.is_closed()));
    assert!(!socket("gone").exists());
    assert!(!kept.0.is_closed() && !too.0.is_closed());
    exchange(&mut kept, &mut too);
    drop(too);
    let mut new = Guest::plain(&socket("new"));
    exchange(&mut kept, &mut new);
    exchange(&mut Guest::plain(&socket("changed")), &mut kept);
    let _ = new.received();

    // What only a restart can change is not passed over in silence.
    let ports = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("[switch]\nentries = 7\n{ports}")).unwrap();
    serve.signal("HUP");
    serve.says("changes of [switch] and `workers.cpus` take effect when ringroad is started again");

    // With an error in it, nothing changes.
    fs::write(&config, "[[port]]\nname = 7\n").unwrap();
    serve.signal("HUP");
    serve.says("ringroad.toml:2: port 1: key `name`: expected");
    serve.says("everything stays as it is");
    exchange(&mut kept, &mut new);
    // A port that cannot be made is missing; the others work.
    fs::write(folder.file("blocked.sock"), "").unwrap();
    folder.config(&[("kept", ""), ("new", ""), ("blocked", "")]);
    serve.signal("HUP");
    serve.says("port blocked: ");
    serve.says("configuration read again: 2 ports");
    exchange(&mut kept, &mut new);
    fs::remove_file(folder.file("blocked.sock")).unwrap();
    serve.signal("HUP");
    serve.says("configuration read again: 3 ports");
    drop(Guest::plain(&socket("blocked")));
    serve.stop("TERM");
}

#[test]
fn counters() {
    let folder = Folder::new("usr1");
    let config = folder.config(&[("left", ""), ("right", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.says("ready");
    let (mut left, mut right) = (Guest::plain(&folder.file("left.sock")), Guest::plain(&folder.file("right.sock")));
    exchange(&mut left, &mut right);
    serve.signal("USR1");
    serve.prints("right  ");
    let out = serve.out();
    let columns = |line: usize| out.lines().nth(line).unwrap().split("  ").map(str::trim).filter(|c| !c.is_empty());
    assert_eq!(columns(0).take(4).collect::<Vec<_>>(), ["port", "from: frames", "bytes", "lost"]);
    // Four frames of 61 to 64 bytes one way, four of 1514 the other.
    assert_eq!(columns(1).take(6).collect::<Vec<_>>(), ["left", "4", "250", "0", "4", "6 056"]);
    assert_eq!(columns(2).take(6).collect::<Vec<_>>(), ["right", "4", "6 056", "0", "4", "250"]);
    serve.stop("INT");

    // Who reads them may leave.
    let mut command = ringroad();
    command.args(["serve", "-c", text(&config)]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let err = follow(child.stderr.take().unwrap());
    let mut serve = Program { child, out: Arc::default(), err };
    serve.says("ready");
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
    // Somebody is there, but hangs up.
    let listener = UnixListener::bind(&socket).unwrap();
    let accept = thread::spawn(move || drop(listener.accept()));
    let (code, _, err) = run(&["blast", text(&socket), "--seconds", "1"]);
    assert_eq!(code, 1);
    assert!(err.contains("did not accept"), "{err}");
    accept.join().unwrap();
    for (arguments, said) in [
        (&["--ring", "split", "--queue-size", "3"][..], "--queue-size 3: a split ring needs a power of two"),
        (&["--queue-size", "32769"], "32769"),
        (&["--size", "59"], "expected sizes of 60 to"),
        (&["--rate", "fast"], "expected a number"),
        (&["--without", "packed"], "packed"),
    ] {
        let (code, _, err) = run(&[&["blast", text(&socket)], arguments].concat());
        assert!(code != 0 && err.contains(said), "{arguments:?}: {code}, {err}");
    }
}

/// Runs blast for a moment; its result.
#[track_caller]
fn blast(socket: &Path, arguments: &[&str]) -> Value {
    let all = [&["blast", text(socket), "--verify", "--seconds", "0.15", "--json", "-"], arguments].concat();
    let (code, out, err) = run(&all);
    assert_eq!(code, 0, "{arguments:?}: {out}{err}");
    serde_json::from_str(&out[out.find("\n{").unwrap() + 1..]).unwrap_or_else(|error| panic!("{error} in {out}"))
}

/// The same where as much as is sent must come back, but for what is still under way.
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
    serve.says("ready");
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
        // As much as goes: what does not fit is lost, but nothing is damaged and nothing comes twice.
        let result = blast(&socket, &["--ring", ring, "--size", "imix", "--flows", "8"]);
        assert_eq!(result["errors"], 0, "{result}");
        assert!(result["received"].as_u64().unwrap() > 0, "{result}");
    }
    serve.stop("TERM");
}

#[test]
fn the_device_goes_away() {
    let folder = Folder::new("goes");
    let config = folder.config(&[("a", "mode = \"reflect\"")]);
    let mut serve = Program::serve(&config, &["-vv"]);
    serve.says("ready");
    let mut command = ringroad();
    command.args(["blast", text(&folder.file("a.sock")), "--seconds", "30", "--rate", "1000", "--event-driven"]);
    let mut blast = Program::start(command);
    serve.says("queue 1 runs");
    serve.stop("TERM");
    let status = blast.ends(Duration::from_secs(5));
    assert_eq!(status.code(), Some(1), "{}", blast.out());
    assert!(blast.err().contains("the device at") && blast.err().contains("has gone"), "{}", blast.err());
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
    serve.says("ready");
    let socket = |name: &str| folder.file(&format!("{name}.sock"));
    for packed in [false, true] {
        let features = Features { packed, ..Features::ALL };
        let mut large = Guest::new(&socket("large"), features, 256, 65549);
        let mut small = Guest::new(&socket("small"), features, 256, 1518);
        let mut plain = Guest::new(&socket("plain"), features, 256, 1518);
        for (number, len) in (1..).zip([60, 1514, 1518, 1600, 9014, 65000, 65549]) {
            large.send(number, len);
            // As many buffers as it needs: each has room for 1600 bytes, of which 12 are the header's, once.
            assert_eq!(small.receives(number, len), (len + 12).div_ceil(1600), "{len} bytes");
            if len <= 1600 - 12 {
                assert_eq!(plain.receives(number, len), 1);
            }
        }
        // What is too large for a driver without mergeable buffers is dropped and counted; it goes on.
        small.send(9, 64);
        plain.receives(9, 64);
        large.receives(9, 64);
    }
    serve.signal("USR1");
    serve.prints("plain");
    let out = serve.out();
    let plain = out.lines().find(|line| line.starts_with("plain")).unwrap();
    let oversize = plain.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).nth(7).unwrap();
    assert_eq!(oversize, "8", "four sizes, twice: {out}");
    serve.stop("TERM");
}

#[test]
fn demo() {
    let (code, out, err) = run(&["demo", "--seconds", "1"]);
    assert_eq!(code, 0, "{out}{err}");
    for line in ["frames there and back", "payload errors          0\n", "round trip p50 / p99"] {
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
        (&["blast", "--help"], &["Examples:", "ringroad blast /run/vm1.sock"]),
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
    // The best of five: others use this machine too.
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        let mut serve = Program::serve(&config, &[]);
        assert!(within(PATIENCE, || sockets.iter().all(|socket| UnixStream::connect(socket).is_ok())));
        best = best.min(start.elapsed());
        serve.says("ready");
        serve.stop("TERM");
    }
    assert!(best < Duration::from_millis(50), "{best:?} from start to eight sockets");

    let serve = Program::serve(&config, &[]);
    serve.says("ready");
    // Two that are connected and have nothing to say are idle too.
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
    serve.says("ready");
    let mut a = Guest::plain(&folder.file("a.sock"));
    let limit = |limit: &str| {
        let pid = serve.child.id().to_string();
        assert!(Command::new("prlimit").args(["--pid", &pid, limit]).status().unwrap().success());
    };
    // Fewer than it has: no more for a while.
    limit("--nofile=4:");
    let second = connects(&folder.file("a.sock"));
    let waiting = connects(&folder.file("b.sock"));
    serve.says("port b: cannot accept a frontend: Too many open files");
    let before = serve.ticks();
    thread::sleep(Duration::from_millis(500));
    assert!(serve.ticks() - before <= 1, "it is busy with frontends that it cannot accept");
    limit("--nofile=1024:");
    serve.says("port a: a second frontend was turned away");
    serve.says("port b: frontend connected");
    drop((second, waiting));
    exchange(&mut a, &mut Guest::plain(&folder.file("b.sock")));
    serve.stop("TERM");
}

// -------------------------------------------------------------------------------------------------------------- TAP

fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
}

/// A command in namespaces of its own, in which it has all rights. Who is not root gets them by a user namespace.
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
        // Root without any capability may do no more than anybody.
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
    // In a network of its own, so that the name cannot be anybody else's.
    let mut command = unshared("--net");
    command.args([program, "serve", "-c", text(&config)]);
    let mut first = Program::start(command);
    first.says("1 ports, ready");
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
