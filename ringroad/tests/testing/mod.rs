//! What the tests of the program share: a directory, a running program, guests with a network or a vsock device.
#![allow(dead_code, reason = "each test file uses a part")]

use ringroad_host::{
    vhost_user::{Connection, Connector},
    vsock::{VsockClient, VsockConnector},
};
use ringroad_mem::Span;
use ringroad_net::{Features, bits};
use ringroad_vsock::Settings;
use std::{
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Time limit for anything that should happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn within(patience: Duration, mut is: impl FnMut() -> bool) -> bool {
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
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringroad-test-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a configuration of vhost-user ports with these names and further lines.
    pub fn config(&self, ports: &[(&str, &str)]) -> PathBuf {
        let mut text = String::new();
        for (name, more) in ports {
            let socket = self.file(&format!("{name}.sock"));
            let socket = socket.display();
            write!(text, "[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n{more}\n").unwrap();
        }
        self.write(&text)
    }

    pub fn write(&self, text: &str) -> PathBuf {
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
pub struct Program {
    pub child: Child,
    pub out: Arc<Mutex<String>>,
    pub err: Arc<Mutex<String>>,
}

pub fn follow(from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
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
    pub fn start(mut command: Command) -> Program {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (out, err) = (follow(child.stdout.take().unwrap()), follow(child.stderr.take().unwrap()));
        Program { child, out, err }
    }

    pub fn serve(config: &Path, arguments: &[&str]) -> Program {
        let mut command = ringroad();
        command.args(["serve", "-c"]).arg(config).args(arguments);
        Program::start(command)
    }

    pub fn out(&self) -> String {
        self.out.lock().unwrap().clone()
    }

    pub fn err(&self) -> String {
        self.err.lock().unwrap().clone()
    }

    /// Waits until the log contains a text.
    #[track_caller]
    pub fn logs(&self, what: &str) {
        assert!(within(PATIENCE, || self.err().contains(what)), "no {what:?} in:\n{}", self.err());
    }

    #[track_caller]
    pub fn prints(&self, what: &str) {
        assert!(within(PATIENCE, || self.out().contains(what)), "no {what:?} in:\n{}", self.out());
    }

    pub fn signal(&self, signal: &str) {
        let kill = format!("kill -{signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Reloads the configuration; returns what was logged.
    #[track_caller]
    pub fn reload(&self) -> String {
        const DONE: &str = "configuration reloaded";
        let before = self.err();
        self.signal("HUP");
        let done = || self.err().matches(DONE).count() > before.matches(DONE).count();
        assert!(within(PATIENCE, done), "{}", self.err());
        self.err()[before.len()..].to_owned()
    }

    /// Waits for its exit; all output has been read by then.
    #[track_caller]
    pub fn ends(&mut self, patience: Duration) -> ExitStatus {
        let mut status = None;
        within(patience, || {
            status = self.child.try_wait().unwrap();
            status.is_some() && Arc::strong_count(&self.out) + Arc::strong_count(&self.err) == 2
        });
        status.unwrap_or_else(|| panic!("it did not exit; its output:\n{}{}", self.out(), self.err()))
    }

    /// Sends a signal and expects an exit with success.
    #[track_caller]
    pub fn stop(&mut self, signal: &str) {
        self.signal(signal);
        let status = self.ends(Duration::from_secs(5));
        assert!(status.success(), "{status}: {}", self.err());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// User and system time of a process, in ticks of 10 ms.
pub fn ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

pub fn ringroad() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ringroad"))
}

/// Runs it to its end; returns exit code, standard output, standard error.
#[track_caller]
pub fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = ringroad();
    command.args(arguments);
    let mut program = Program::start(command);
    let status = program.ends(PATIENCE);
    (status.code().unwrap_or(-1), program.out(), program.err())
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
pub fn connects(socket: &Path) -> UnixStream {
    let mut stream = None;
    within(PATIENCE, || {
        stream = UnixStream::connect(socket).ok();
        stream.is_some()
    });
    stream.unwrap_or_else(|| panic!("nothing listens at {}", socket.display()))
}

// ----------------------------------------------------------------------------------------------------- test drivers

/// A driver connected to one of the daemon's sockets.
pub struct Guest(pub Connection);

impl Guest {
    pub fn new(socket: &Path, features: Features, size: u32, frame: usize) -> Guest {
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

    pub fn plain(socket: &Path) -> Guest {
        Guest::new(socket, Features::all(), 256, 1518)
    }

    /// Broadcasts a frame, with an EtherType of its own.
    pub fn send(&mut self, number: u8, len: usize) {
        let tx = &mut self.0.driver.tx[0];
        while tx.reclaim().unwrap() > 0 {}
        let head = [&[0xff; 6][..], &[2, 0, 0, 0, 0, number], &[0x88, 0xb5]].concat();
        let frame = [head, vec![number; len - 14]].concat();
        assert_eq!(tx.add(1, |_, place| place.write(&frame)), 1);
        tx.publish();
        self.0.tx[0].kick();
    }

    /// Returns the received frames, each with its number of buffers.
    pub fn received(&mut self) -> Vec<(Vec<u8>, usize)> {
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
    pub fn receives(&mut self, number: u8, len: usize) -> usize {
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

/// Connects a driver to one of the daemon's vsock devices.
pub fn vsock_guest(socket: &Path) -> VsockClient {
    let connector = VsockConnector {
        socket: socket.to_owned(),
        listen: false,
        patience: PATIENCE,
        features: ringroad_vsock::Features::all().bits(),
        queue_size: 64,
        receive: 4096,
        cid: None,
        settings: Settings::default(),
        reconnect: None,
    };
    let client = connector.connect().unwrap();
    assert!(client.stack().is_running());
    client
}

#[track_caller]
pub fn exchange(a: &mut Guest, b: &mut Guest) {
    for number in 1..5 {
        a.send(number, 60 + usize::from(number));
        b.receives(number, 60 + usize::from(number));
        b.send(number, 1514);
        a.receives(number, 1514);
    }
}

// ---------------------------------------------------------------------------------------------------- configuration

pub fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
}

/// Returns a command that runs in new namespaces with all capabilities; an ordinary user gets them by a user namespace.
pub fn unshared(what: &str) -> Command {
    let mut command = Command::new("unshare");
    if !is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg(what);
    command
}
