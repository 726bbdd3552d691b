//! Common parts of the tests: a frontend that sends exactly the given messages, well-behaved guests, a switch with ports for
//! them, and the log by port.

use ringroad_host::{
    PortReport, PortSettings, WorkerConfig,
    vhost_user::{Access, Limits, Rate, Role, SocketError, VhostConfig, VhostPort},
};
use ringroad_mem::{Region, Span};
use ringroad_net::{Config, Driver, DriverConfig, Features, bits};
use ringroad_switch::Gather;
use ringroad_wire::ethernet::MacAddr;
use std::{
    fs,
    io::{self, ErrorKind, Read},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::{
            fs::MetadataExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, Once, mpsc},
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::{
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
    sock_ctrl_msg::ScmSocket,
};

/// How long to wait for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Requests by their names in the vhost-user specification.
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const GPU_SET_SOCKET: u32 = 33;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const CHECK_DEVICE_STATE: u32 = 43;
}
use request::*;

/// Header flags: the version, and the request for a reply.
pub const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;
/// Flag of SET_VRING_KICK and the like: no descriptor is attached.
pub const NO_FD: u64 = 0x100;

/// Feature bits of a driver with split rings.
pub const SPLIT: u64 = bits::VERSION_1 | bits::PROTOCOL_FEATURES;
/// The same with packed rings.
pub const PACKED: u64 = SPLIT | bits::RING_PACKED;

/// Waits until a condition holds. Returns `false` if it does not hold within `patience`.
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

pub fn eventfd() -> EventFd {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap()
}

/// Encodes 32-bit integers of a message.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Encodes 64-bit integers.
pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

/// Encodes a message.
pub fn message(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    [&words(&[request, flags, size]), payload].concat()
}

// ---------------------------------------------------------------------------------------------------------- the log

struct Log(Mutex<Vec<String>>);

static LOG: Log = Log(Mutex::new(Vec::new()));

impl Log {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        self.lines().push(format!("{} {}", record.level(), record.args()));
    }
    fn flush(&self) {}
}

/// Returns the log lines of a port, with levels. Each test has its own port names, so that tests do not see each other's
/// lines.
pub fn log_of(port: &str) -> Vec<String> {
    let about = [format!(" port {port}:"), format!(" port {port} ")];
    LOG.lines().iter().filter(|line| about.iter().any(|about| line.contains(about))).cloned().collect()
}

/// Waits for a line of a port that contains all the given words, and returns the first one.
#[track_caller]
pub fn logged(port: &str, wanted: &[&str]) -> String {
    let mut found = None;
    within(PATIENCE, || {
        found = log_of(port).into_iter().find(|line| wanted.iter().all(|word| line.contains(word)));
        found.is_some()
    });
    found.unwrap_or_else(|| panic!("no line with {wanted:?} about {port} in {:#?}", log_of(port)))
}

// ------------------------------------------------------------------------------------------------------- the switch

/// A directory that is removed on drop.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringroad-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// All ports of these tests are guests.
pub type Worker = ringroad_host::Worker<VhostPort>;
pub type Server = ringroad_host::vhost_user::Server<VhostPort>;

pub fn start_server(config: VhostConfig, worker: &Worker) -> Result<Server, SocketError> {
    Server::start(config, worker, |port| port)
}

/// Keeps what is logged from now on.
pub fn keep_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LOG).unwrap();
        log::set_max_level(log::LevelFilter::Debug);
    });
}

pub fn worker() -> Worker {
    keep_log();
    Worker::start(WorkerConfig { cpu: None, addresses: 64, ageing: 300, hold: 2, gather: Gather::Auto, turn: 4 })
        .unwrap()
}

/// The configuration space of all ports.
pub const CONFIG: Config = Config {
    mac: MacAddr([0x52, 0x54, 0, 0x12, 0x34, 0x56]),
    link_up: true,
    announce: false,
    queue_pairs: 1,
    mtu: 9001,
    speed: None,
};

/// A rate that tests of other things never reach.
const MUCH: Rate = Rate { burst: 1_000_000, rate: 1_000_000 };
pub const GENEROUS: Limits =
    Limits { mapped: 1 << 40, regions: 509, connects: MUCH, messages: MUCH, refusals: MUCH, lines: MUCH };

pub fn config(name: &str, socket: &Path) -> VhostConfig {
    VhostConfig {
        name: name.to_owned(),
        socket: socket.to_owned(),
        role: Role::Server,
        features: Features::all(),
        config: CONFIG,
        settings: PortSettings { limits: Default::default(), ..PortSettings::default() },
        frontend: GENEROUS,
        access: Access::default(),
    }
}

/// A switch with three ports: the tests attack port 0, ports 1 and 2 must not be affected.
pub struct Rig {
    pub servers: Vec<Server>,
    name: String,
    pub folder: Folder,
    pub worker: Worker,
}

impl Rig {
    pub fn new(name: &str) -> Rig {
        Rig::with_limits(name, GENEROUS)
    }

    /// The same with limits for port 0.
    pub fn with_limits(name: &str, frontend: Limits) -> Rig {
        Rig::with(name, |config| VhostConfig { frontend, ..config })
    }

    /// The same with a port 0 of another configuration.
    pub fn with(name: &str, first: impl Fn(VhostConfig) -> VhostConfig) -> Rig {
        let (worker, folder) = (worker(), Folder::new(name));
        let start = |index| {
            let config = config(&format!("{name}-{index}"), &folder.file(&format!("{index}.sock")));
            start_server(if index == 0 { first(config) } else { config }, &worker).unwrap()
        };
        Rig { servers: (0..3).map(start).collect(), name: name.to_owned(), folder, worker }
    }

    pub fn socket(&self, port: usize) -> PathBuf {
        self.folder.file(&format!("{port}.sock"))
    }

    /// Returns the name of port 0.
    pub fn victim(&self) -> String {
        format!("{}-0", self.name)
    }

    pub fn guest(&self, port: usize, acked: u64) -> Guest {
        let mut guest = Guest::new(Peer::connect(&self.socket(port)), acked, 64);
        guest.mac = MacAddr::local(port as u32 + 1);
        guest.start_all();
        guest
    }

    /// Returns a connection to port 0 that has negotiated features, and nothing else.
    pub fn peer(&self, acked: u64) -> Peer {
        let mut peer = Peer::connect(&self.socket(0));
        peer.negotiate(acked);
        peer
    }

    pub fn others(&self) -> Others {
        Others(self.guest(1, SPLIT), self.guest(2, PACKED))
    }

    pub fn report(&self, port: usize) -> PortReport {
        self.servers[port].handle().port().report()
    }

    /// Returns the faults of port 0, in both directions.
    pub fn faults(&self) -> u64 {
        let report = self.report(0);
        report.received.faults + report.sent.faults
    }

    #[track_caller]
    pub fn expect_faults(&self, faults: u64) {
        within(PATIENCE, || self.faults() >= faults);
        assert_eq!(self.faults(), faults, "faults of {}; log: {:#?}", self.victim(), log_of(&self.victim()));
    }
}

/// Two well-behaved guests, on ports 1 and 2.
pub struct Others(pub Guest, pub Guest);

impl Others {
    /// Checks that frames go both ways, on the connections that were made at the start.
    #[track_caller]
    pub fn work(&mut self) {
        exchange(&mut self.0, &mut self.1);
    }
}

/// Exchanges a few frames each way.
#[track_caller]
pub fn exchange(a: &mut Guest, b: &mut Guest) {
    for _ in 0..3 {
        let sequence = a.send_to(b.mac);
        assert!(b.receives(a.mac, sequence), "a frame from {} to {} was lost", a.mac, b.mac);
        let sequence = b.send_to(a.mac);
        assert!(a.receives(b.mac, sequence), "a frame from {} to {} was lost", b.mac, a.mac);
    }
}

/// Duplicates a descriptor into a file, by sending it over a socket: std has no safe conversion from raw descriptors.
pub fn file_of(fd: &impl AsRawFd) -> fs::File {
    let (from, to) = UnixStream::pair().unwrap();
    from.send_with_fd(&[0u8][..], fd.as_raw_fd()).unwrap();
    to.recv_with_fd(&mut [0]).unwrap().1.unwrap()
}

/// Clears O_NONBLOCK, as a frontend can on a descriptor that it has sent.
pub fn set_blocking(fd: &impl AsRawFd) {
    // An ioctl that works on any file.
    UnixStream::from(OwnedFd::from(file_of(fd))).set_nonblocking(false).unwrap();
}

/// Checks that the daemon's ports stop in time, whatever their frontends do.
#[track_caller]
pub fn ends_soon<T: Send + 'static>(rig: T) {
    let (ended, result) = mpsc::channel();
    thread::spawn(move || {
        drop(rig);
        let _ = ended.send(());
    });
    assert!(result.recv_timeout(PATIENCE).is_ok(), "a frontend blocks the ports from stopping");
}

/// Creates a memfd of `len` bytes.
pub fn memory(len: usize) -> fs::File {
    Region::create(len, 0, false).unwrap().1
}

/// Returns how many mappings and descriptors of a file, given by device and inode, this process has.
pub fn held((device, inode): (u64, u64)) -> (usize, usize) {
    // Inode numbers alone are not enough: notes of ring positions are files of another tmpfs, which counts from 1 as well.
    let file = format!("{:02x}:{:02x} {inode}", libc::major(device), libc::minor(device));
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let at = |line: &str| line.split_whitespace().skip(3).take(2).collect::<Vec<_>>().join(" ");
    let maps = maps.lines().filter(|line| at(line) == file).count();
    let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is = |meta: fs::Metadata| (meta.dev(), meta.ino()) == (device, inode);
    (maps, fds.filter_map(|fd| fs::metadata(fd.path()).ok()).filter(|meta| is(meta.clone())).count())
}

pub fn identity(file: &fs::File) -> (u64, u64) {
    let meta = file.metadata().unwrap();
    (meta.dev(), meta.ino())
}

// ----------------------------------------------------------------------------------------------------- the frontend

/// The frontend's end of a vhost-user socket.
pub struct Peer(pub UnixStream);

impl Peer {
    pub fn connect(path: &Path) -> Peer {
        Peer::of(UnixStream::connect(path).unwrap())
    }

    pub fn of(stream: UnixStream) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Peer(stream)
    }

    /// Accepts the next connection.
    pub fn accept(listener: &UnixListener) -> Peer {
        listener.set_nonblocking(true).unwrap();
        let mut stream = None;
        within(PATIENCE, || {
            stream = listener.accept().ok();
            stream.is_some()
        });
        let (stream, _) = stream.expect("nobody connected");
        stream.set_nonblocking(false).unwrap();
        Peer::of(stream)
    }

    /// Sends raw bytes. Ignores that the other side has disconnected.
    pub fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.0.send_with_fds(&[&bytes[sent..]], if sent == 0 { fds } else { &[] }) {
                Ok(count) => sent += count,
                Err(error) if matches!(io::Error::from(error).kind(), ErrorKind::BrokenPipe) => return,
                Err(error) => panic!("cannot send: {error}"),
            }
        }
    }

    /// Sends a request and returns the payload of its reply.
    #[track_caller]
    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(&message(request, VERSION, payload.len() as u32, payload), &[]);
        self.answer(request).unwrap_or_else(|error| panic!("no answer to request {request}: {error}"))
    }

    pub fn answer(&mut self, request: u32) -> io::Result<Vec<u8>> {
        let mut header = [0; 12];
        self.0.read_exact(&mut header)?;
        let word = |index: usize| u32::from_ne_bytes(header[4 * index..][..4].try_into().unwrap());
        assert_eq!((word(0), word(1)), (request, VERSION | 4), "the answer's request and flags");
        let mut payload = vec![0; word(2) as usize];
        self.0.read_exact(&mut payload)?;
        Ok(payload)
    }

    #[track_caller]
    pub fn ask_u64(&mut self, request: u32) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Sends a request with NEED_REPLY and returns whether it was accepted.
    #[track_caller]
    pub fn obeys(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) -> bool {
        self.send(&message(request, VERSION | NEED_REPLY, payload.len() as u32, payload), fds);
        let answer = self.answer(request);
        let answer = answer.unwrap_or_else(|error| panic!("request {request} was not acknowledged: {error}"));
        u64::from_ne_bytes(answer.try_into().unwrap()) == 0
    }

    #[track_caller]
    pub fn ok(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) {
        assert!(self.obeys(request, payload, fds), "request {request} was refused");
    }

    #[track_caller]
    pub fn refused(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) {
        assert!(!self.obeys(request, payload, fds), "request {request} was accepted");
    }

    /// Returns whether the other side closes the connection.
    pub fn ends(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
            }
        }
    }

    #[track_caller]
    pub fn negotiate(&mut self, acked: u64) {
        self.send(&message(SET_OWNER, VERSION, 0, &[]), &[]);
        let offered = self.ask_u64(GET_FEATURES);
        assert_eq!(acked & !offered, 0, "not offered");
        let protocol = self.ask_u64(GET_PROTOCOL_FEATURES);
        self.send(&message(SET_PROTOCOL_FEATURES, VERSION, 8, &longs(&[protocol])), &[]);
        self.ok(SET_FEATURES, &longs(&[acked]), &[]);
    }

    /// Stops a vring and returns its base.
    #[track_caller]
    pub fn get_base(&mut self, index: u32) -> u32 {
        let answer = self.ask(GET_VRING_BASE, &words(&[index, 0]));
        assert_eq!(answer[..4], index.to_ne_bytes());
        u32::from_ne_bytes(answer[4..].try_into().unwrap())
    }
}

/// Encodes the payload of SET_MEM_TABLE: guest address, size, user address, file offset of each region.
pub fn mem_table(regions: &[[u64; 4]]) -> Vec<u8> {
    [words(&[regions.len() as u32, 0]), longs(regions.as_flattened())].concat()
}

/// Encodes the payload of ADD_MEM_REG and REM_MEM_REG.
pub fn mem_reg(region: [u64; 4]) -> Vec<u8> {
    longs(&[&[0], &region[..]].concat())
}

// -------------------------------------------------------------------------------------------------------- the guest

/// The descriptors of a vring.
pub struct Vring {
    pub kick: EventFd,
    pub call: EventFd,
    pub err: EventFd,
}

impl Vring {
    /// Returns whether the device signals that a fault has stopped the vring.
    pub fn failed(&self) -> bool {
        within(PATIENCE, || self.err.read().is_ok())
    }
}

/// A guest's driver with its own memory and rings, on a connection controlled by the test.
pub struct Guest {
    pub peer: Peer,
    pub driver: Driver,
    pub acked: u64,
    pub size: u32,
    pub mac: MacAddr,
    /// Receive and transmit queue.
    pub vrings: [Vring; 2],
    next: u64,
    came: Vec<Vec<u8>>,
}

impl Guest {
    /// Negotiates features; nothing runs yet.
    pub fn new(mut peer: Peer, acked: u64, size: u32) -> Guest {
        peer.negotiate(acked);
        Guest::on(peer, acked, size)
    }

    /// The same on a connection that has negotiated features.
    pub fn on(peer: Peer, acked: u64, size: u32) -> Guest {
        let config = DriverConfig { acked, queue_pairs: 1, queue_size: size, frame: 1518, huge: false };
        let vring = || Vring { kick: eventfd(), call: eventfd(), err: eventfd() };
        let driver = Driver::new(config).unwrap();
        let mac = MacAddr::local(1);
        Guest { peer, driver, acked, size, mac, vrings: [vring(), vring()], next: 0, came: Vec::new() }
    }

    pub fn is_packed(&self) -> bool {
        self.acked & bits::RING_PACKED != 0
    }

    /// Returns the base of a ring that was never used.
    pub fn fresh(&self) -> u32 {
        if self.is_packed() { 0x8000_8000 } else { 0 }
    }

    /// Returns its memory region as in messages.
    pub fn region(&self) -> [u64; 4] {
        let region = &self.driver.region;
        [region.guest(), region.len() as u64, region.user(), 0]
    }

    #[track_caller]
    pub fn set_memory(&mut self) {
        let region = self.region();
        self.peer.ok(SET_MEM_TABLE, &mem_table(&[region]), &[self.driver.file.as_raw_fd()]);
    }

    /// Returns the payload of SET_VRING_ADDR: index and flags, descriptor, device ("used"), driver ("available") area, log.
    pub fn addresses(&self, index: u32) -> [u64; 5] {
        let at = if index == 0 { self.driver.rx[0].addresses() } else { self.driver.tx[0].addresses() };
        [index.into(), at.descriptor, at.device, at.driver, 0]
    }

    /// Sets up a vring completely, except for enabling it.
    #[track_caller]
    pub fn prepare(&mut self, index: u32, base: u32) {
        let addresses = longs(&self.addresses(index));
        let Vring { kick, call, err } = &self.vrings[index as usize];
        let peer = &mut self.peer;
        peer.ok(SET_VRING_NUM, &words(&[index, self.size]), &[]);
        peer.ok(SET_VRING_BASE, &words(&[index, base]), &[]);
        peer.ok(SET_VRING_ADDR, &addresses, &[]);
        peer.ok(SET_VRING_CALL, &longs(&[index.into()]), &[call.as_raw_fd()]);
        peer.ok(SET_VRING_ERR, &longs(&[index.into()]), &[err.as_raw_fd()]);
        peer.ok(SET_VRING_KICK, &longs(&[index.into()]), &[kick.as_raw_fd()]);
    }

    #[track_caller]
    pub fn start_all(&mut self) {
        self.set_memory();
        self.driver.rx[0].refill();
        for index in 0..2 {
            self.prepare(index, self.fresh());
            self.peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
        }
    }

    /// The same guest after a reset: new memory and rings, same connection.
    pub fn again(self) -> Guest {
        let acked = self.acked;
        self.again_with(acked)
    }

    /// The same with other features.
    #[track_caller]
    pub fn again_with(self, acked: u64) -> Guest {
        let Guest { mut peer, size, mac, .. } = self;
        peer.ok(SET_FEATURES, &longs(&[acked]), &[]);
        let mut guest = Guest { mac, ..Guest::on(peer, acked, size) };
        guest.start_all();
        guest
    }

    /// Adds a frame to the transmit queue, without a kick, and returns its sequence number.
    pub fn add(&mut self, to: MacAddr) -> Option<u64> {
        let sequence = self.next;
        let frame = [&to.0[..], &self.mac.0, &[0x88, 0xb5], &sequence.to_be_bytes(), &[7; 42]].concat();
        let added = self.add_frame(&frame);
        self.next += u64::from(added);
        added.then_some(sequence)
    }

    /// Adds any frame, without a kick. Returns `false` if there is no free buffer.
    pub fn add_frame(&mut self, frame: &[u8]) -> bool {
        let tx = &mut self.driver.tx[0];
        let _ = tx.reclaim().unwrap();
        let added = tx.add(1, |_, place| place.write(frame));
        tx.publish();
        added > 0
    }

    /// Sends a frame. Waits for a free buffer: a frame arrives a moment before its buffer is returned.
    #[track_caller]
    pub fn send_to(&mut self, to: MacAddr) -> u64 {
        let mut sequence = None;
        within(PATIENCE, || {
            sequence = self.add(to);
            sequence.is_some()
        });
        let sequence = sequence.expect("the transmit queue stays full");
        let _ = self.vrings[1].kick.write(1);
        sequence
    }

    /// Returns the sequence numbers of frames received from an address since the last call.
    pub fn received(&mut self, from: MacAddr) -> Vec<u64> {
        let came = &mut self.came;
        let mut receive = |pieces: &[Span<'_>]| {
            let mut frame = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
            let mut at = 0;
            pieces.iter().for_each(|piece| at += piece.read(&mut frame[at..]));
            came.push(frame);
        };
        while self.driver.rx[0].receive(true, &mut receive).unwrap() > 0 {}
        let _ = self.vrings[0].call.read();
        let number = |frame: &Vec<u8>| {
            assert_eq!((frame.len(), &frame[12..14], &frame[22..]), (64, &[0x88, 0xb5][..], &[7; 42][..]), "damaged");
            u64::from_be_bytes(frame[14..22].try_into().unwrap())
        };
        let frames = self.came.extract_if(.., |frame| frame.get(6..12) == Some(&from.0[..]));
        frames.map(|frame| number(&frame)).collect()
    }

    /// Returns whether the next frame from an address has this sequence number.
    pub fn receives(&mut self, from: MacAddr, sequence: u64) -> bool {
        within(PATIENCE, || self.received(from).contains(&sequence))
    }

    /// Writes to its memory at a user address, as a malicious driver could.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        let offset = (address - self.driver.region.user()) as usize;
        assert_eq!(self.driver.region.span(offset, bytes.len()).unwrap().write(bytes), bytes.len());
    }

    /// Makes one descriptor available in a ring that was not used yet.
    pub fn poke_descriptor(&self, index: u32, address: u64, len: u32, flags: u16) {
        let [_, descriptor, _, available, _] = self.addresses(index);
        let (flags, tail) = if self.is_packed() { (0, flags | 1 << 7) } else { (flags, 0) };
        self.poke(descriptor, &address.to_le_bytes());
        self.poke(descriptor + 8, &[&len.to_le_bytes()[..], &flags.to_le_bytes(), &tail.to_le_bytes()].concat());
        if !self.is_packed() {
            self.poke(available, &[0, 0, 1, 0, 0, 0]);
        }
    }
}
