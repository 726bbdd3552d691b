//! A device whose registers are served by two threads in turn, and clients that mean no good.

use super::super::{
    CONFIG_REGION, Client as Driver, InterruptKind, Interrupts, PciRegion, Server, ServerConfig,
    messages::{Access, DmaMap, DmaUnmap, Header, NO_REPLY, command, receive, send},
    session::SessionContext,
};
use super::*;
use crate::socket::{Disposal, Limits, Lines, Peer};
use parking_lot::Mutex;
use ringroad_mem::{Region, Table};
use std::{
    collections::HashSet,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, atomic::AtomicU32},
    thread::{self, JoinHandle, ThreadId},
};
use zerocopy::IntoBytes;

const PATIENCE: Duration = Duration::from_secs(20);
/// Quick registers are below this; a write to the last of them panics.
const SLOW: u64 = 64;
const PANIC: u64 = 60;

#[derive(Default)]
struct Seen {
    registers: Mutex<[u32; 32]>,
    /// In the order in which they came.
    written: Mutex<Vec<u32>>,
    by: Mutex<HashSet<ThreadId>>,
    /// Threads that accessed slow registers, or anything else that a poller must leave alone.
    slow: Mutex<HashSet<ThreadId>>,
    memory: Mutex<Arc<Table>>,
    faults: AtomicU32,
    gone: AtomicU32,
}

#[derive(Clone)]
struct Toy {
    seen: Arc<Seen>,
    interrupts: Interrupts,
}

impl Toy {
    fn by(&self, region: u32, offset: u64) {
        self.seen.by.lock().insert(thread::current().id());
        if region != 0 || offset >= SLOW {
            self.seen.slow.lock().insert(thread::current().id());
        }
    }
}

impl VfioDevice for Toy {
    fn name(&self) -> &str {
        "toy"
    }
    fn region(&self, index: u32) -> PciRegion {
        if matches!(index, 0 | CONFIG_REGION) { PciRegion::new(128) } else { PciRegion::default() }
    }
    fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        self.by(region, offset);
        let value = self.seen.registers.lock().get(offset as usize / 4).copied().unwrap_or_default();
        data.iter_mut().zip(value.to_ne_bytes()).for_each(|(byte, value)| *byte = value);
    }
    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.by(region, offset);
        assert!(offset != PANIC, "a panic provoked by this test");
        let Ok(value) = data.try_into().map(u32::from_ne_bytes) else { return };
        self.seen.written.lock().push(value);
        if let Some(register) = self.seen.registers.lock().get_mut(offset as usize / 4) {
            *register = value;
        }
    }
    fn set_memory(&self, memory: Arc<Table>) {
        self.seen.slow.lock().insert(thread::current().id());
        *self.seen.memory.lock() = memory;
    }
    fn reset(&self) {
        self.seen.slow.lock().insert(thread::current().id());
    }
    fn count_fault(&self) {
        self.seen.slow.lock().insert(thread::current().id());
        self.seen.faults.fetch_add(1, Ordering::Relaxed);
    }
    fn disconnected(&self) {
        self.seen.slow.lock().insert(thread::current().id());
        self.seen.gone.fetch_add(1, Ordering::Relaxed);
    }
}

/// How the thread of the queues polls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Polling {
    /// Always.
    Always,
    /// It also stops when it may, or when it must, and starts again.
    Sometimes,
    /// Not at all: the test does.
    Never,
}

/// A device, its socket, and the thread that polls its queues.
struct Rig {
    server: Option<Server>,
    toy: Toy,
    lending: Arc<Lending<Toy>>,
    path: PathBuf,
    stop: Arc<AtomicBool>,
    poller: Option<JoinHandle<()>>,
    id: ThreadId,
}

impl Rig {
    fn new(name: &str, polling: Polling) -> Rig {
        let folder = std::env::temp_dir().join(format!("ringroad-lending-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("0.sock");
        let toy = Toy { seen: Arc::default(), interrupts: Interrupts::new(true, 1, 0) };
        let quick = |region, offset, _| region == 0 && offset < SLOW;
        let lending = Arc::new(Lending::new(quick).unwrap());
        let rate = |rate| crate::socket::Rate { burst: 1000, rate };
        let limits = Limits { connects: rate(1000), messages: rate(1_000_000), ..Limits::default() };
        let config = ServerConfig { poll: Duration::from_millis(5), limits, ..ServerConfig::new(name, &path) };
        let server = Some(Server::start_with(config, toy.clone(), lending.clone()).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let poller = {
            let (stop, lending) = (stop.clone(), lending.clone());
            thread::spawn(move || poll(&stop, &lending, polling))
        };
        let id = poller.thread().id();
        Rig { server, toy, lending, path, stop, poller: Some(poller), id }
    }

    fn driver(&self) -> Driver {
        Driver::connect(&self.path, PATIENCE).unwrap()
    }

    /// A client that is lent. What it has written so far was seen.
    fn lent(&self) -> Driver {
        let mut driver = self.driver();
        self.lend(&mut driver);
        driver
    }

    fn lend(&self, driver: &mut Driver) {
        within(|| {
            (0..20).for_each(|_| driver.post(0, 4, &7u32.to_ne_bytes()).unwrap());
            assert_eq!(read(driver, 4), 7);
            self.lending.lent.load(Ordering::Relaxed)
        });
    }

    /// The next client is served, by both threads.
    fn still_serves(&self) {
        self.toy.seen.by.lock().clear();
        let mut driver = self.lent();
        within(|| {
            self.lend(&mut driver);
            self.toy.seen.by.lock().contains(&self.id)
        });
        assert!(!self.toy.seen.slow.lock().contains(&self.id), "more than quick accesses");
    }

    fn gone(&self) -> u32 {
        self.toy.seen.gone.load(Ordering::Relaxed)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // While the queues are polled.
        self.server = None;
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.poller.take().unwrap().join();
        let _ = std::fs::remove_dir_all(self.path.parent().unwrap());
        assert!(ended.is_ok() || thread::panicking());
    }
}

fn poll(stop: &AtomicBool, lending: &Lending<Toy>, polling: Polling) {
    let mut random = 1u64;
    while polling != Polling::Never && !stop.load(Ordering::Relaxed) {
        // A worker catches what its ports do.
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lending.serve())).is_err() {
            lending.withdraw();
        }
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
        match (polling, random >> 61) {
            (Polling::Sometimes, 0) => lending.withdraw(),
            (Polling::Sometimes, 1) if lending.close() => thread::sleep(Duration::from_micros(random >> 56)),
            _ => thread::yield_now(),
        }
    }
}

fn within(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        thread::yield_now();
    }
}

fn read(driver: &mut Driver, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    driver.read(0, offset, &mut bytes).unwrap();
    u32::from_ne_bytes(bytes)
}

/// A connection that sends what it likes, after it was lent.
fn raw(rig: &Rig) -> UnixStream {
    rig.lent().into_stream()
}

fn message(command: u16, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    let header = Header { id: 1, command, size: 16 + payload.len() as u32, flags, error: 0 };
    [header.as_bytes(), &payload].concat()
}

fn write(offset: u64, value: u32) -> Vec<u8> {
    let access = Access { offset, region: 0, count: 4 };
    message(command::REGION_WRITE, NO_REPLY, &[access.as_bytes(), &value.to_ne_bytes()])
}

#[test]
fn a_client_that_writes_is_served_by_the_thread_that_polls() {
    let rig = Rig::new("posts", Polling::Always);
    rig.still_serves();
    assert!(rig.toy.seen.by.lock().len() == 2, "a client begins with its own thread");
    // So is one that waits for each reply.
    rig.toy.seen.by.lock().clear();
    let mut driver = rig.driver();
    within(|| {
        driver.write(0, 4, &7u32.to_ne_bytes()).unwrap();
        rig.toy.seen.by.lock().contains(&rig.id)
    });
    assert_eq!(rig.toy.seen.faults.load(Ordering::Relaxed), 0);
}

#[test]
fn accesses_keep_their_order_whoever_carries_them_out() {
    for polling in [Polling::Always, Polling::Sometimes] {
        let rig = Rig::new(if polling == Polling::Always { "order" } else { "order-sometimes" }, polling);
        let mut driver = rig.driver();
        let region = Region::create(4096, 0x10000, false).unwrap();
        let mut expected = Vec::new();
        for value in 0..30_000u32 {
            // Offsets that are quick, and now and then one that is not, and other commands.
            let offset = if value % 97 == 5 { SLOW } else { 4 * u64::from(value % 8) };
            match value % 50 {
                7 => driver.write(0, offset, &value.to_ne_bytes()).unwrap(),
                8 => driver.post_all(&[(0, offset, &value.to_ne_bytes()), (0, 8, &1u32.to_ne_bytes())]).unwrap(),
                _ => driver.post(0, offset, &value.to_ne_bytes()).unwrap(),
            }
            expected.push(value);
            if value % 50 == 8 {
                expected.push(1);
            }
            if value % 41 == 0 {
                driver.write(0, offset, &value.to_ne_bytes()).unwrap();
                expected.push(value);
                assert_eq!(read(&mut driver, offset), value);
            }
            if value % 3001 == 0 {
                driver.map(&region.0, &region.1, true).unwrap();
                assert_eq!(rig.toy.seen.memory.lock().regions().len(), 1);
                driver.unmap(&region.0).unwrap();
                assert_eq!(rig.toy.seen.memory.lock().regions().len(), 0);
            }
        }
        driver.reset().unwrap();
        drop(driver);
        assert_eq!(*rig.toy.seen.written.lock(), expected);
        rig.still_serves();
        assert_eq!(rig.toy.seen.faults.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn other_commands_are_left_to_the_thread_of_the_socket() {
    let rig = Rig::new("commands", Polling::Always);
    let mut driver = rig.lent();
    let region = Region::create(4096, 0x10000, false).unwrap();
    driver.map(&region.0, &region.1, true).unwrap();
    rig.lend(&mut driver);
    let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
    driver.set_interrupts(InterruptKind::Msi, 0, &[crate::sys::borrow(&eventfd)]).unwrap();
    rig.lend(&mut driver);
    driver.read(CONFIG_REGION, 0, &mut [0; 4]).unwrap();
    rig.lend(&mut driver);
    driver.read(0, 1, &mut [0; 2]).unwrap();
    rig.lend(&mut driver);
    driver.post(0, 2, &[0; 8]).unwrap();
    rig.lend(&mut driver);
    driver.post(0, 1 << 20, &[0; 4]).unwrap();
    rig.lend(&mut driver);
    assert!(driver.read(0, 1 << 20, &mut [0; 4]).is_err());
    rig.lend(&mut driver);
    driver.reset().unwrap();
    assert_eq!(rig.toy.seen.faults.load(Ordering::Relaxed), 2);
    drop(driver);
    within(|| rig.gone() == 1);
    assert_eq!(rig.toy.seen.memory.lock().regions().len(), 0);
    rig.still_serves();
}

#[test]
fn a_client_that_goes_or_sends_garbage_while_it_is_lent() {
    let rig = Rig::new("garbage", Polling::Always);
    let half = &write(4, 1)[..20];
    let huge = Header { id: 1, command: command::REGION_WRITE, size: u32::MAX, flags: 0, error: 0 };
    let short = Header { size: 3, ..huge };
    let reply = Header { size: 16, flags: 1, ..huge };
    let unknown = Header { size: 16, command: 77, flags: NO_REPLY, ..huge };
    let many = message(command::REGION_WRITE_MULTI, NO_REPLY, &[&u64::MAX.to_ne_bytes()]);
    let sent: [&[u8]; 8] =
        [&[], half, &[0xff; 100], huge.as_bytes(), short.as_bytes(), reply.as_bytes(), unknown.as_bytes(), &many];
    for (ended, bytes) in (1..).zip(sent) {
        let stream = raw(&rig);
        send(stream.as_fd(), bytes, &[]).unwrap();
        drop(stream);
        within(|| rig.gone() == ended);
    }
    rig.still_serves();
}

#[test]
fn half_a_message_is_waited_for_by_its_own_thread() {
    let rig = Rig::new("half", Polling::Always);
    let stream = raw(&rig);
    let whole = write(8, 4711);
    // Also behind whole ones, and with a descriptor in its middle.
    send(stream.as_fd(), &[&write(8, 1), &whole[..21]].concat(), &[]).unwrap();
    within(|| !rig.lending.lent.load(Ordering::Relaxed));
    send(stream.as_fd(), &whole[21..], &[]).unwrap();
    within(|| rig.toy.seen.registers.lock()[2] == 4711);
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..5 {
        send(stream.as_fd(), &write(8, 5), &[null.as_fd()]).unwrap();
    }
    within(|| rig.toy.seen.faults.load(Ordering::Relaxed) == 5);
    drop(stream);
    rig.still_serves();
}

#[test]
fn descriptors_reach_their_message_among_posted_writes() {
    let rig = Rig::new("descriptors", Polling::Always);
    let (region, file) = Region::create(4096, 0x10000, false).unwrap();
    let map = DmaMap { argsz: size_of::<DmaMap>() as u32, flags: 3, offset: 0, address: region.guest(), size: 4096 };
    let unmap = DmaUnmap { argsz: size_of::<DmaUnmap>() as u32, flags: 0, address: region.guest(), size: 4096 };
    let map = message(command::DMA_MAP, NO_REPLY, &[map.as_bytes()]);
    let unmap = message(command::DMA_UNMAP, NO_REPLY, &[unmap.as_bytes()]);
    let stream = raw(&rig);
    let before = rig.toy.seen.written.lock().len();
    for round in 0..300 {
        (0..40).for_each(|_| send(stream.as_fd(), &write(4, 1), &[]).unwrap());
        send(stream.as_fd(), &map, &[file.as_fd()]).unwrap();
        (0..round % 7).for_each(|_| send(stream.as_fd(), &write(4, 1), &[]).unwrap());
        send(stream.as_fd(), &unmap, &[]).unwrap();
    }
    let written = 300 * 40 + (0..300).map(|round| round % 7).sum::<usize>();
    within(|| rig.toy.seen.written.lock().len() == before + written);
    within(|| rig.toy.seen.memory.lock().regions().is_empty());
    assert_eq!(rig.toy.seen.faults.load(Ordering::Relaxed), 0);
    drop(stream);
    rig.still_serves();
}

#[test]
fn a_client_that_reads_no_replies_waits_alone() {
    let rig = Rig::new("deaf", Polling::Always);
    let stream = raw(&rig);
    let access = Access { offset: 8, region: 0, count: 4 };
    let reads = message(command::REGION_READ, 0, &[access.as_bytes()]).repeat(100);
    stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let mut last = Instant::now();
    // Until nothing moves: both directions are full.
    while last.elapsed() < Duration::from_millis(100) {
        let rest = &reads[sent % reads.len()..];
        if let Ok(more @ 1..) = send_now(stream.as_fd(), rest) {
            (sent, last) = (sent + more, Instant::now());
        }
    }
    assert!(!rig.lending.lent.load(Ordering::Relaxed), "with the socket's thread, which waits");
    // Every access gets its reply once the client reads.
    let whole = sent / 32 * 32;
    let (mut replies, mut buffer) = (0, [0; 4096]);
    within(|| {
        while let Ok(len) = receive(stream.as_fd(), &mut buffer, &mut Vec::new(), false) {
            replies += len;
        }
        replies >= whole / 32 * 36
    });
    drop(stream);
    rig.still_serves();
}

#[test]
fn a_panic_of_the_poller_ends_the_connection_only() {
    let rig = Rig::new("panic", Polling::Always);
    let stream = raw(&rig);
    send(stream.as_fd(), &write(PANIC, 1), &[]).unwrap();
    within(|| rig.gone() == 1);
    let mut rest = [0; 4096];
    within(|| matches!(receive(stream.as_fd(), &mut rest, &mut Vec::new(), true), Ok(0) | Err(_)));
    rig.still_serves();
}

#[test]
fn a_second_client_is_turned_away_and_a_removed_device_is_gone() {
    let mut rig = Rig::new("second", Polling::Always);
    let mut first = rig.lent();
    assert!(Driver::connect(&rig.path, Duration::from_millis(300)).is_err(), "one client at a time");
    rig.lend(&mut first);
    let start = Instant::now();
    rig.server = None;
    assert!(start.elapsed() < Duration::from_millis(400), "{:?}", start.elapsed());
    assert!(first.read(0, 4, &mut [0; 4]).is_err());
    assert_eq!(rig.gone(), 1);
}

#[test]
fn control_has_the_device_alone() {
    let rig = Rig::new("pause", Polling::Always);
    let mut driver = rig.lent();
    for _ in 0..100 {
        rig.lend(&mut driver);
        let paused = rig.lending.pause();
        let before = rig.toy.seen.written.lock().len();
        driver.post(0, 4, &1u32.to_ne_bytes()).unwrap();
        thread::sleep(Duration::from_micros(200));
        assert!(!rig.lending.lent.load(Ordering::Relaxed) || rig.toy.seen.written.lock().len() == before);
        drop(paused);
    }
}

#[test]
fn a_client_at_rest_goes_back() {
    let rig = Rig::new("rest", Polling::Sometimes);
    let mut driver = rig.driver();
    for _ in 0..100 {
        (0..20).for_each(|_| driver.post(0, 4, &7u32.to_ne_bytes()).unwrap());
        within(|| !rig.lending.lent.load(Ordering::Relaxed));
        // Nobody but the socket's thread waits for this one.
        thread::sleep(Duration::from_millis(1));
        assert_eq!(read(&mut driver, 4), 7);
    }
}

#[test]
fn a_poller_that_stops_for_good_leaves_no_client_behind() {
    let rig = Rig::new("stops", Polling::Never);
    let stops: [fn(&Lending<Toy>); 2] = [Lending::withdraw, |lending| within(|| lending.close())];
    let (mut driver, mut posted) = (rig.driver(), 0);
    for round in 0..100 {
        within(|| {
            rig.lending.serve();
            // This thread must not wait in a call for room in the socket: it is the one that would read.
            if posted - rig.toy.seen.written.lock().len() < 64 {
                driver.post(0, 4, &7u32.to_ne_bytes()).unwrap();
                posted += 1;
            }
            rig.lending.lent.load(Ordering::Relaxed)
        });
        let paused = (round % 4 == 0).then(|| rig.lending.pause());
        stops[round % 2](&rig.lending);
        drop(paused);
        assert_eq!(read(&mut driver, 4), 7);
        // Not lent, as nobody polls.
        (0..100).for_each(|_| driver.post(0, 4, &8u32.to_ne_bytes()).unwrap());
        posted += 100;
        assert_eq!(read(&mut driver, 4), 8);
    }
}

/// The poller has stopped after the socket's thread has looked.
#[test]
fn a_client_that_is_lent_to_nobody_comes_back_at_once() {
    let rig = Rig::new("nobody", Polling::Never);
    let (limits, lines) = (Arc::default(), Lines::new("toy", Limits::default().lines));
    let peer = Arc::new(Peer::new().unwrap());
    let context = SessionContext { limits, lines, peer, disposal: Disposal::default() };
    let lending = Lending::new(|_, _, _| true).unwrap();
    for open in [true, false] {
        let connection = Connection::new(UnixStream::pair().unwrap().0, Limits::default().messages.quota());
        let session = Session::new(rig.toy.clone(), context.clone());
        lending.open.store(open, Ordering::Relaxed);
        lending.lend(Box::new(Client::new(connection, session)));
        assert_eq!(lending.back().read().is_err(), open);
        assert!(lending.recall().is_some());
    }
}
