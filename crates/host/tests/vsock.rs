//! Host sockets behind a guest's vsock, over real sockets, with this project's driver as the guest: errors and disconnects of
//! programs on either side end their own connection, at once and for both ends, and nothing else.

#[path = "vsock/attacks.rs"]
mod attacks;
#[allow(dead_code, reason = "parts for a switch and its guests")]
mod common;
#[path = "vsock/connects.rs"]
mod connects;
#[path = "vsock/ends.rs"]
mod ends;
#[path = "vsock/many.rs"]
mod many;

use ringroad_host::vsock::{HostSide, VsockClient, VsockConfig, VsockConnector, VsockServer, VsockWorker};
use ringroad_vsock::{Addr, DriverSide, Features, Listener, Settings, SocketType, Stack, Stream};
use std::{
    fs,
    io::{self, Read, Write},
    net::SocketAddr,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc, RwLock, RwLockReadGuard,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long to wait for an expected event.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time limit for "at once" on a busy machine.
const SOON: Duration = Duration::from_secs(2);

type Guest = Stream<DriverSide>;

/// Locked for writing by tests that count the descriptors of this process, for reading by all others.
static DESCRIPTORS: RwLock<()> = RwLock::new(());

fn share_descriptors() -> RwLockReadGuard<'static, ()> {
    DESCRIPTORS.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A guest's device with its host sockets, and the guest.
struct Rig {
    // Dropped in this order.
    client: VsockClient,
    server: VsockServer,
    worker: VsockWorker,
    folder: Folder,
    config: VsockConfig,
    _shared: Option<RwLockReadGuard<'static, ()>>,
}

/// A directory that is removed on drop.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const CID: u64 = 3;

fn driver(socket: &Path) -> VsockClient {
    let connector = VsockConnector {
        socket: socket.to_owned(),
        listen: false,
        patience: PATIENCE,
        features: Features::all().bits(),
        queue_size: 128,
        receive: 16 << 10,
        cid: None,
        settings: Settings::default(),
        reconnect: None,
    };
    connector.connect().unwrap()
}

impl Rig {
    fn new() -> Rig {
        Rig { _shared: Some(share_descriptors()), ..Rig::alone(Vec::new()) }
    }

    /// For tests that hold [`DESCRIPTORS`] themselves. The ports in `forward` lead to TCP addresses.
    fn alone(forward: Vec<(u32, SocketAddr)>) -> Rig {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = Folder(std::env::temp_dir().join(format!("ringroad-vsock-{}-{number}", std::process::id())));
        fs::create_dir_all(&folder.0).unwrap();
        let config = VsockConfig {
            name: format!("vsock test {number}"),
            host: Some(folder.0.join("host")),
            forward,
            ..VsockConfig::new(CID, folder.0.join("guest"))
        };
        let worker = VsockWorker::start(None, Duration::ZERO, 0).unwrap();
        let server = VsockServer::start(config.clone(), &worker).unwrap();
        let client = driver(&config.socket);
        let rig = Rig { client, server, worker, folder, config, _shared: None };
        soon("the device runs", || rig.server.stack().is_running());
        rig
    }

    fn host(&self) -> &Arc<Stack<HostSide>> {
        self.server.stack()
    }

    fn guest(&self) -> &Arc<Stack<DriverSide>> {
        self.client.stack()
    }

    /// Listens on a port of the guest.
    fn listen(&self, port: u32) -> Listener<DriverSide> {
        Listener::bind(self.guest(), port, SocketType::Stream).unwrap()
    }

    /// Listens on a port of the host.
    fn listen_on_host(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.path(port)).unwrap()
    }

    fn path(&self, port: u32) -> PathBuf {
        self.folder.0.join(format!("host_{port}"))
    }

    /// Connects a program to the host's socket; it has not sent anything yet.
    fn program(&self) -> UnixStream {
        let program = UnixStream::connect(self.folder.0.join("host")).unwrap();
        program.set_read_timeout(Some(PATIENCE)).unwrap();
        program.set_write_timeout(Some(PATIENCE)).unwrap();
        program
    }

    /// Connects a program and requests a port. Returns `None` if the request is refused.
    fn ask(&self, port: u32) -> Option<UnixStream> {
        let mut program = self.program();
        program.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let mut byte = [0];
            match program.read(&mut byte) {
                Ok(1) => line.push(byte[0]),
                Ok(_) if line.is_empty() => return None,
                other => panic!("after {line:?}: {other:?}"),
            }
        }
        let text = String::from_utf8(line).unwrap();
        let number = text.strip_prefix("OK ").and_then(|rest| rest.trim_end().parse::<u32>().ok());
        assert!(number.is_some(), "expected \"OK <port>\", got {text:?}");
        Some(program)
    }

    /// Returns both ends of a connection that a program has requested.
    fn to_guest(&self, port: u32) -> (UnixStream, Guest) {
        let listener = self.listen(port);
        let program = self.ask(port).expect("somebody listens there");
        (program, accept(&listener))
    }

    /// Returns both ends of a connection that the guest has requested.
    fn to_host(&self, port: u32) -> (Guest, UnixStream) {
        let listener = self.listen_on_host(port);
        let guest = self.dial(port).unwrap();
        let (program, _) = listener.accept().unwrap();
        program.set_read_timeout(Some(PATIENCE)).unwrap();
        program.set_write_timeout(Some(PATIENCE)).unwrap();
        (guest, program)
    }

    fn dial(&self, port: u32) -> io::Result<Guest> {
        let guest = Stream::connect(self.guest(), Addr { cid: 2, port })?;
        guest.set_timeout(Some(PATIENCE));
        Ok(guest)
    }

    /// Checks that both ends drop all connections.
    #[track_caller]
    fn expect_no_connections(&self) {
        soon("no connections at the host", || self.host().report().connections == 0);
        soon("no connections at the guest", || self.guest().report().connections == 0);
        assert_eq!(self.host().report().wrong, 0, "packets that broke the rules, at the host");
        assert_eq!(self.guest().report().wrong, 0, "packets that broke the rules, at the guest");
    }

    /// Checks that a new connection works.
    #[track_caller]
    fn expect_service(&self) {
        let (program, guest) = self.to_guest(9999);
        exchange(&program, &guest);
    }
}

fn accept(listener: &Listener<DriverSide>) -> Guest {
    let guest = listener.accept_within(Some(PATIENCE)).unwrap();
    guest.set_timeout(Some(PATIENCE));
    guest
}

#[track_caller]
fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// Exchanges some bytes each way.
#[track_caller]
fn exchange(mut program: impl Read + Write, mut guest: &Guest) {
    let mut got = [0; 5];
    program.write_all(b"hello").unwrap();
    guest.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    guest.write_all(b"world").unwrap();
    program.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"world");
}

/// Checks for the end of the stream at once: a reset if the program has sent something that was not read.
#[track_caller]
fn turned_away(program: &mut UnixStream) {
    at_once(|| turned_away_at_last(program));
}

#[track_caller]
fn turned_away_at_last(program: &mut UnixStream) {
    let end = program.read(&mut [0; 8]);
    let reset = end.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset);
    assert!(matches!(end, Ok(0)) || reset, "{end:?}");
}

/// Byte `at` of the test data.
fn known(at: usize) -> u8 {
    (at ^ at >> 8 ^ at >> 17).wrapping_mul(31) as u8
}

/// Sends `total` bytes of test data, in parts of all sizes.
fn send(mut to: impl Write, total: usize) -> io::Result<()> {
    let (mut sent, mut step) = (0, 1);
    while sent < total {
        step = (step * 7 + 13) % 100_000;
        let chunk: Vec<u8> = (sent..total.min(sent + step + 1)).map(known).collect();
        to.write_all(&chunk)?;
        sent += chunk.len();
    }
    Ok(())
}

/// Reads to the end, checks the test data, and returns its length.
fn receive(mut from: impl Read) -> io::Result<usize> {
    let (mut buffer, mut total) = (vec![0; 70_000], 0);
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(total);
        }
        let wrong = buffer[..count].iter().enumerate().find(|&(at, &byte)| byte != known(total + at));
        assert_eq!(wrong, None, "within {count} bytes from {total} on");
        total += count;
    }
}

/// Runs a function and checks that it returns at once.
#[track_caller]
fn at_once<T>(run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = run();
    assert!(start.elapsed() < SOON, "it took {:?}", start.elapsed());
    result
}
