//! A running `ringroad serve` in a folder of its own, and what /proc says of it.

use rustix::process::{Pid, Signal, kill_process};
use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The program under test: `$RINGROAD_BIN`, or what was built beside this one.
pub fn binary() -> PathBuf {
    if let Some(path) = env::var_os("RINGROAD_BIN") {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "RINGROAD_BIN={}: there is no such file", path.display());
        return path;
    }
    // target/<profile>/deps/<test> or target/<profile>/soak.
    let here = env::current_exe().expect("this program has a path");
    let beside = here.ancestors().skip(1).take(2).map(|folder| folder.join("ringroad"));
    beside.into_iter().find(|path| path.is_file()).unwrap_or_else(|| {
        panic!("no `ringroad` beside {}: cargo build -p ringroad, or set RINGROAD_BIN", here.display())
    })
}

/// A configuration file in the making.
#[derive(Debug)]
pub struct Config {
    dir: PathBuf,
    sections: String,
    sockets: Vec<PathBuf>,
}

impl Config {
    /// Lines that stand before all ports: `[workers]`, `[switch]`.
    pub fn top(&mut self, lines: &str) {
        self.sections = format!("{lines}\n{}", self.sections);
    }

    /// A vhost-user port with its socket at `<name>.sock`.
    pub fn port(&mut self, name: &str) {
        self.port_with(name, "");
    }

    /// The same with more keys.
    pub fn port_with(&mut self, name: &str, keys: &str) {
        let socket = self.dir.join(format!("{name}.sock"));
        let _ = writeln!(
            self.sections,
            "[[port]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"{}\"\n{keys}\n",
            socket.display()
        );
        if !keys.contains("client") {
            self.sockets.push(socket);
        }
    }

    /// A TAP port.
    pub fn tap(&mut self, name: &str, interface: &str) {
        let _ = writeln!(self.sections, "[[port]]\nname = \"{name}\"\nkind = \"tap\"\ninterface = \"{interface}\"\n");
    }

    /// A vsock device with its socket at `<name>.sock` and the host's at `<name>.host`.
    pub fn vsock(&mut self, name: &str, cid: u64, keys: &str) {
        let (socket, host) = (self.dir.join(format!("{name}.sock")), self.dir.join(format!("{name}.host")));
        let _ = writeln!(
            self.sections,
            "[[vsock]]\ncid = {cid}\nsocket = \"{}\"\nhost = \"{}\"\n{keys}\n",
            socket.display(),
            host.display()
        );
        self.sockets.extend([socket, host]);
    }
}

/// How the daemon is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stderr {
    /// Into `log` in its folder.
    #[default]
    File,
    /// Into a pipe that nobody reads.
    Pipe,
}

/// A running daemon. Dropped, it is killed and its folder removed.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    dir: PathBuf,
    peak: Arc<AtomicU64>,
    done: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
    status: Option<ExitStatus>,
}

impl Daemon {
    /// Starts it and waits until its sockets are there.
    pub fn start(setup: impl FnOnce(&mut Config)) -> Daemon {
        Daemon::start_with(Stderr::File, setup)
    }

    /// The same with another standard error.
    pub fn start_with(stderr: Stderr, setup: impl FnOnce(&mut Config)) -> Daemon {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let dir = env::temp_dir().join(format!("rr-attack-{}-{serial}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        let mut config = Config { dir: dir.clone(), sections: String::new(), sockets: Vec::new() };
        setup(&mut config);
        fs::write(dir.join("ringroad.toml"), &config.sections).expect("a configuration");
        let create = |name: &str| Stdio::from(File::create(dir.join(name)).expect("a file"));
        let child = Command::new(binary())
            .args(["serve", "-c"])
            .arg(dir.join("ringroad.toml"))
            .stdin(Stdio::null())
            .stdout(create("counters"))
            .stderr(if stderr == Stderr::File { create("log") } else { Stdio::piped() })
            .spawn()
            .expect("the daemon starts");
        let (peak, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let watcher = {
            let (peak, done, pid) = (peak.clone(), done.clone(), child.id());
            thread::spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    peak.fetch_max(status(pid, "RssAnon:") << 10, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(10));
                }
            })
        };
        let mut daemon = Daemon { child, dir, peak, done, watcher: Some(watcher), status: None };
        let end = Instant::now() + Duration::from_secs(10);
        while !config.sockets.iter().all(|socket| socket.exists()) {
            assert!(daemon.is_alive(), "the daemon ended at once:\n{}", daemon.log());
            assert!(Instant::now() < end, "the daemon made no sockets in 10 s:\n{}", daemon.log());
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(50));
        daemon
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The vhost-user socket of a port or a vsock device.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.sock"))
    }

    /// The socket for programs of the host that connect to a guest.
    pub fn host(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.host"))
    }

    /// Where a guest's connections to a port of the host go.
    pub fn service(&self, name: &str, port: u32) -> PathBuf {
        self.dir.join(format!("{name}.host_{port}"))
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it runs.
    pub fn is_alive(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status.is_none()
    }

    /// How it ended, for people.
    pub fn end(&self) -> String {
        self.status.map_or("it runs".into(), |status| status.to_string())
    }

    /// Memory of its own, in bytes: what guests share with it is not counted.
    pub fn memory(&self) -> u64 {
        status(self.pid(), "RssAnon:") << 10
    }

    /// The most since it was asked last, looked at every 10 ms.
    pub fn peak(&self) -> u64 {
        self.peak.swap(0, Ordering::Relaxed).max(self.memory())
    }

    /// The most so far since [`Daemon::peak`], which goes on.
    pub fn peak_so_far(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Its threads.
    pub fn threads(&self) -> u64 {
        status(self.pid(), "Threads:")
    }

    /// Its open descriptors.
    pub fn fds(&self) -> u64 {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, |entries| entries.count() as u64)
    }

    /// Bytes that it has written to its standard error.
    pub fn logged(&self) -> u64 {
        fs::metadata(self.dir.join("log")).map_or(0, |meta| meta.len())
    }

    /// The end of what it has said.
    pub fn log(&self) -> String {
        let text = fs::read(self.dir.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(3000)..]).into_owned()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        if self.status.is_none()
            && let Some(pid) = Pid::from_raw(self.child.id() as i32)
        {
            let _ = kill_process(pid, signal);
        }
    }

    /// Waits for its end. `None`: it still runs.
    pub fn wait(&mut self, patience: Duration) -> Option<Duration> {
        let start = Instant::now();
        while self.is_alive() {
            if start.elapsed() > patience {
                return None;
            }
            thread::sleep(Duration::from_millis(2));
        }
        Some(start.elapsed())
    }

    /// Sends SIGTERM. Says how long it took to end; `None`: longer than `patience`.
    pub fn terminate(&mut self, patience: Duration) -> Option<Duration> {
        self.signal(Signal::TERM);
        self.wait(patience)
    }

    /// Changes the configuration, to be read with SIGHUP.
    pub fn configure(&self, setup: impl FnOnce(&mut Config)) {
        let mut config = Config { dir: self.dir.clone(), sections: String::new(), sockets: Vec::new() };
        setup(&mut config);
        fs::write(self.dir.join("ringroad.toml"), &config.sections).expect("a configuration");
    }

    /// Waits until somebody listens at a socket, without connecting.
    pub fn listens(&self, name: &str, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        while !self.socket(name).exists() {
            if Instant::now() > end {
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Connects to the socket of a guest's host side and asks for a port; waits for the answer.
    pub fn connect(&self, name: &str, port: u32, patience: Duration) -> std::io::Result<UnixStream> {
        use std::io::{Error, Read, Write};
        let mut stream = crate::frontend::connect(&self.host(name), patience)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
        let (mut line, mut byte) = (Vec::new(), [0]);
        while byte != *b"\n" {
            if stream.read(&mut byte)? == 0 {
                return Err(Error::other(format!("{:?} instead of OK", String::from_utf8_lossy(&line))));
            }
            line.push(byte[0]);
        }
        if line.starts_with(b"OK ") { Ok(stream) } else { Err(Error::other("not OK")) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.is_alive() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        self.done.store(true, Ordering::Relaxed);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A number from /proc/PID/status; 0 if there is none.
fn status(pid: u32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
