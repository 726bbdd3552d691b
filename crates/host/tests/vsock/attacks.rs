//! Guests, frontends and programs that try to use up shared resources, beside a well-behaved guest. The attacker builds its
//! packets and messages by hand.

use super::*;
use crate::common::{self, Peer, Vring, lingering, longs, mem_table, request::*, words};
use ringroad_vsock::{Driver, DriverConfig, Inlet, Link, Payload};
use ringroad_wire::vsock_hdr::{Op, TYPE_STREAM, VsockHdr};
use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::AsRawFd,
    sync::{
        Mutex, Once,
        atomic::{AtomicBool, AtomicUsize},
    },
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const ATTACKER: u64 = 4;

/// Two guests of one worker: a well-behaved one with an echo service on port 1, and one for an attacker.
struct Pair {
    // Dropped in this order.
    server: VsockServer,
    rig: Rig,
    attacker: VsockConfig,
}

impl Pair {
    fn new(change: impl FnOnce(&mut VsockConfig)) -> Pair {
        Pair::of(Rig::new(), change)
    }

    fn of(rig: Rig, change: impl FnOnce(&mut VsockConfig)) -> Pair {
        let mut attacker = VsockConfig {
            name: rig.config.name.replace("test", "attacker"),
            host: Some(rig.folder.0.join("attacker-host")),
            ..VsockConfig::new(ATTACKER, rig.folder.0.join("attacker"))
        };
        change(&mut attacker);
        let server = VsockServer::start(attacker.clone(), &rig.worker).unwrap();
        Pair { server, rig, attacker }
    }

    fn attacker(&self) -> Attacker {
        let attacker = Attacker::new(&self.attacker.socket, 256);
        soon("the device runs", || self.server.stack().is_running());
        attacker
    }

    fn program(&self) -> UnixStream {
        UnixStream::connect(self.attacker.host.as_ref().unwrap()).unwrap()
    }

    fn listen_on_host(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.rig.folder.0.join(format!("attacker-host_{port}"))).unwrap()
    }

    /// Runs an attack for `time` and measures round trips of a byte with the well-behaved guest in the meantime.
    fn beside(&self, port: u32, time: Duration, attack: impl FnOnce(&AtomicBool) + Send) -> Spread {
        let (mut program, mut guest) = self.rig.to_guest(port);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut byte = [0];
                while let Ok(1) = guest.read(&mut byte) {
                    guest.write_all(&byte).unwrap();
                }
            });
            scope.spawn(|| attack(&stop));
            let start = Instant::now();
            let mut times = Vec::new();
            while start.elapsed() < time {
                let sent = Instant::now();
                program.write_all(b"x").unwrap();
                program.read_exact(&mut [0]).unwrap();
                times.push(sent.elapsed());
            }
            stop.store(true, Ordering::Relaxed);
            drop(program);
            times.sort_unstable();
            let at = |percent: usize| times[(times.len() - 1) * percent / 100];
            Spread { count: times.len(), p50: at(50), p99: at(99), most: at(100) }
        })
    }
}

/// Round-trip times.
#[derive(Debug)]
#[allow(dead_code, reason = "printed on failure")]
struct Spread {
    count: usize,
    p50: Duration,
    p99: Duration,
    most: Duration,
}

/// A guest that sends arbitrary packets.
struct Attacker {
    peer: Peer,
    driver: Driver,
    vrings: Vec<Vring>,
    size: u32,
    /// Bytes that each of its connections may send, by its port.
    room: Vec<u32>,
}

impl Attacker {
    fn new(socket: &Path, size: u32) -> Attacker {
        let acked = common::SPLIT;
        let mut peer = Peer::connect(socket);
        peer.negotiate(acked);
        let driver = Driver::new(DriverConfig { acked, queue_size: size, receive: 4096 }).unwrap();
        let region = &driver.region;
        let table = mem_table(&[[region.guest(), region.len() as u64, region.user(), 0]]);
        peer.ok(SET_MEM_TABLE, &table, &[driver.file.as_raw_fd()]);
        let eventfd = common::eventfd;
        let vring = |_| Vring { kick: eventfd(), call: eventfd(), err: eventfd() };
        let vrings = (0..3).map(vring).collect();
        let mut attacker = Attacker { peer, driver, vrings, size, room: Vec::new() };
        (0..3).for_each(|index| attacker.start(index));
        attacker
    }

    fn start(&mut self, index: u32) {
        let Driver { rx, tx, events, .. } = &self.driver;
        let at = [rx.addresses(), tx.addresses(), events.addresses()][index as usize];
        let size = if index == 2 { events.size() } else { self.size };
        let Vring { kick, call, err } = &self.vrings[index as usize];
        let peer = &mut self.peer;
        peer.ok(SET_VRING_NUM, &words(&[index, size]), &[]);
        peer.ok(SET_VRING_BASE, &words(&[index, 0]), &[]);
        peer.ok(SET_VRING_ADDR, &longs(&[index.into(), at.descriptor, at.device, at.driver, 0]), &[]);
        peer.ok(SET_VRING_CALL, &longs(&[index.into()]), &[call.as_raw_fd()]);
        peer.ok(SET_VRING_ERR, &longs(&[index.into()]), &[err.as_raw_fd()]);
        peer.ok(SET_VRING_KICK, &longs(&[index.into()]), &[kick.as_raw_fd()]);
        peer.ok(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
    }

    /// Returns the header of a packet from one of its ports to one of the host.
    fn header(op: Op, from: u32, to: u32) -> VsockHdr {
        VsockHdr {
            src_cid: ATTACKER,
            dst_cid: 2,
            src_port: from,
            dst_port: to,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc: u32::MAX / 2,
            ..VsockHdr::default()
        }
    }

    /// Adds a packet to the ring, if there is room, without a kick. Returns whether there was.
    fn put(&mut self, header: VsockHdr, payload: &[u8]) -> bool {
        if self.driver.tx.room(true).unwrap().is_none() {
            return false;
        }
        let header = VsockHdr { len: payload.len() as u32, ..header };
        self.driver.tx.put(&header, &mut Payload::bytes(payload));
        true
    }

    fn kick(&mut self) {
        self.driver.tx.publish();
        let _ = self.vrings[1].kick.write(1);
    }

    /// Sends a packet, once there is room.
    fn send(&mut self, header: VsockHdr, payload: &[u8]) {
        soon("there is room for a packet", || {
            let sent = self.put(header, payload);
            self.kick();
            self.take(|_| {});
            sent
        });
    }

    /// Receives packets. Returns their number.
    fn take(&mut self, mut each: impl FnMut(VsockHdr)) -> usize {
        let taken = self.driver.rx.take(|header, _| each(header)).unwrap();
        let _ = self.vrings[0].kick.write(1);
        taken.packets
    }

    /// Sends to a port of the host on several connections, for as long as anything is accepted.
    fn fill(&mut self, port: u32, from: Range<u32>) {
        let mut sent = vec![0u32; from.end as usize];
        // The credit in each response: the host divides a guest's budget among its connections.
        let mut room = self.room.clone();
        let mut passed = sent.clone();
        let mut last = Instant::now();
        while last.elapsed() < Duration::from_millis(300) {
            for from in from.clone() {
                let sent = &mut sent[from as usize];
                let len = room[from as usize].saturating_sub(*sent - passed[from as usize]).min(4000);
                if len > 0 && self.put(Attacker::header(Op::Data, from, port), &vec![7; len as usize]) {
                    *sent += len;
                    last = Instant::now();
                }
            }
            self.kick();
            self.take(|header| {
                assert_ne!(header.op, Op::Reset as u16, "port {}", header.dst_port);
                passed[header.dst_port as usize] = header.fwd_cnt;
                room[header.dst_port as usize] = header.buf_alloc;
            });
        }
    }

    /// Requests `count` connections to a port of the host. Returns how many were accepted and refused.
    fn connect(&mut self, port: u32, first: u32, count: u32) -> (u32, u32) {
        let (mut sent, mut opened, mut refused) = (0, 0, 0);
        soon("all requests are answered", || {
            // No more outstanding than the ring has room for replies.
            while sent < count && sent < opened + refused + 64 {
                assert!(self.put(Attacker::header(Op::Request, first + sent, port), &[]));
                sent += 1;
            }
            self.kick();
            let mut told = Vec::new();
            self.take(|header| {
                told.push((header.dst_port as usize, header.buf_alloc));
                opened += u32::from(header.op == Op::Response as u16);
                refused += u32::from(header.op == Op::Reset as u16);
            });
            for (port, room) in told {
                self.room.resize(self.room.len().max(port + 1), 0);
                self.room[port] = room;
            }
            opened + refused == count
        });
        (opened, refused)
    }
}

/// Limits for a victim's round trips on a busy machine: median, 99th percentile, maximum.
const HALF: Duration = Duration::from_millis(2);
const NEARLY_ALL: Duration = Duration::from_millis(40);
const EVER: Duration = Duration::from_millis(100);

/// Measures a victim without and during an attack, while no other test runs. Other processes may use the machine: one good
/// measurement of three is enough.
#[track_caller]
fn waits_little(measure: impl Fn(&Pair) -> (Spread, Spread)) {
    let _alone = DESCRIPTORS.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut found = Vec::new();
    for _ in 0..3 {
        let pair = Pair::of(Rig::alone(Vec::new()), |_| {});
        let (before, beside) = measure(&pair);
        let little = beside.p50 < HALF.max(5 * before.p50)
            && beside.p99 < NEARLY_ALL.max(5 * before.p99)
            && beside.most < EVER.max(5 * before.most);
        println!("before: {before:?}, beside: {beside:?}, {:?}", pair.server.sockets());
        if little {
            return;
        }
        found.push((before, beside));
    }
    panic!("without and during an attack: {found:#?}");
}

#[test]
fn a_flood_of_requests_delays_only_its_own_guest() {
    waits_little(|pair| {
        let quiet = pair.rig.to_guest(9);
        let mut attacker = pair.attacker();
        let _listener = pair.listen_on_host(7);
        let before = pair.beside(1, Duration::from_millis(500), |_| {});
        let beside = pair.beside(2, Duration::from_secs(2), |stop| {
            let mut port = 0;
            while !stop.load(Ordering::Relaxed) {
                while attacker.put(Attacker::header(Op::Request, port, 7), &[]) {
                    port += 1;
                }
                attacker.kick();
                attacker.take(|_| {});
                thread::sleep(Duration::from_micros(50));
            }
            assert!(port > 10_000, "{port} requests are not an attack");
        });
        // It got its share, and further requests were refused.
        let report = pair.server.sockets();
        assert!(report.refused > 1000, "{report:?}");
        exchange(&quiet.0, &quiet.1);
        (before, beside)
    });
}

#[test]
fn many_busy_sockets_delay_only_their_own_guest() {
    waits_little(|pair| {
        let mut attacker = pair.attacker();
        // Many programs with data to send, and a guest that has given no credit yet.
        let connect = |port| {
            let mut program = pair.program();
            program.set_nonblocking(true).unwrap();
            program.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
            let mut connected = None;
            soon("it asks", || {
                attacker.take(|header| connected = Some(header.src_port));
                connected.is_some()
            });
            let header = Attacker::header(Op::Response, port, connected.unwrap());
            attacker.send(VsockHdr { buf_alloc: 0, ..header }, &[]);
            while program.write(&[7; 16 << 10]).is_ok() {}
            (program, port, connected.unwrap())
        };
        let programs: Vec<_> = (0..1000).map(connect).collect();
        let before = pair.beside(1, Duration::from_millis(300), |_| {});
        let got = AtomicUsize::new(0);
        let beside = pair.beside(2, Duration::from_millis(300), |stop| {
            for &(_, port, host) in &programs {
                attacker.send(Attacker::header(Op::CreditUpdate, port, host), &[]);
            }
            while !stop.load(Ordering::Relaxed) {
                attacker.take(|header| _ = got.fetch_add(header.len as usize, Ordering::Relaxed));
            }
        });
        assert!(got.into_inner() > 1 << 20, "the attacker is served too");
        (before, beside)
    });
}

#[test]
fn connects_beyond_the_quota_wait_or_are_refused() {
    let pair = Pair::new(|config| config.connects = 50);
    let mut attacker = pair.attacker();
    let listener = pair.listen_on_host(7);
    let start = Instant::now();
    let (mut opened, mut refused) = (0, 0);
    for port in 0..1000 {
        attacker.send(Attacker::header(Op::Request, port, 7), &[]);
    }
    soon("all requests are answered", || {
        attacker.take(|header| {
            opened += usize::from(header.op == Op::Response as u16);
            refused += usize::from(header.op == Op::Reset as u16);
        });
        let report = pair.server.sockets();
        report.refused + report.open as u64 == 1000 && pair.server.stack().report().opened as usize == report.open
    });
    let took = start.elapsed();
    listener.set_nonblocking(true).unwrap();
    let accepted = std::iter::from_fn(|| listener.accept().ok()).count();
    // Fifty may wait. How many connect in the meantime depends on how fast the requests arrive: none if all arrive within one
    // turn of the worker; otherwise another burst of fifty, and 50 a second.
    let most = 100 + (50.0 * took.as_secs_f64()) as usize;
    assert!(accepted >= 50 && accepted <= most, "{accepted} within {took:?}");
    assert_eq!(pair.server.sockets().refused, 1000 - accepted as u64);
    // The other guest has its own quota.
    let (_guest, _program) = pair.rig.to_host(1);
}

#[test]
fn a_program_is_served_at_once_beside_a_crowd_with_incomplete_lines() {
    let rig = Rig::new();
    let path = rig.folder.0.join("host");
    let listener = rig.listen(1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let crowd = scope.spawn(|| {
            let mut crowd = Vec::new();
            while crowd.len() < 4000 && !stop.load(Ordering::Relaxed) {
                let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
                socket.set_nonblocking(true).unwrap();
                // The backlog may be full for a moment.
                if socket.connect(&socket2::SockAddr::unix(&path).unwrap()).is_ok() {
                    let _ = socket.send(b"CONNECT 1");
                    crowd.push(socket);
                } else {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            crowd
        });
        let start = Instant::now();
        while !crowd.is_finished() && start.elapsed() < SOON {
            thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..20 {
            let program = at_once(|| rig.ask(1)).unwrap();
            exchange(&program, &accept(&listener));
        }
        stop.store(true, Ordering::Relaxed);
        let crowd = crowd.join().unwrap();
        assert!(crowd.len() > 3000, "{} are not a crowd", crowd.len());
    });
}

#[test]
fn an_endless_crowd_delays_only_its_own_guest() {
    waits_little(|pair| {
        let address = socket2::SockAddr::unix(pair.attacker.host.as_ref().unwrap()).unwrap();
        let before = pair.beside(1, Duration::from_millis(500), |_| {});
        let mut came = 0;
        let beside = pair.beside(2, Duration::from_secs(2), |stop| {
            // The latest ones are kept open, so that they do not end by themselves.
            let mut crowd = VecDeque::new();
            while !stop.load(Ordering::Relaxed) {
                let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
                socket.set_nonblocking(true).unwrap();
                if socket.connect(&address).is_ok() {
                    came += 1;
                    let _ = socket.send(b"CONNECT 1");
                    crowd.push_back(socket);
                } else {
                    thread::yield_now();
                }
                if crowd.len() > 2000 {
                    crowd.pop_front();
                }
            }
        });
        assert!(came > 5000, "{came} are not a crowd");
        assert!(pair.server.sockets().open <= 257 && pair.server.sockets().turned_away > 1000);
        (before, beside)
    });
}

#[test]
fn kernel_memory_for_programs_that_do_not_read_is_limited() {
    const MANY: u32 = 300;
    const BUDGET: usize = 4 << 20;
    let pair = Pair::new(|config| config.socket_memory = BUDGET);
    let mut attacker = pair.attacker();
    let listener = pair.listen_on_host(7);
    let mut programs = Vec::new();
    for first in (0..MANY).step_by(100) {
        assert_eq!(attacker.connect(7, first, 100), (100, 0));
        programs.extend((0..100).map(|_| listener.accept().unwrap().0));
        attacker.fill(7, first..first + 100);
        // Ending the connections makes no difference, as the data is still unread.
        (first..first + 100).for_each(|port| attacker.send(Attacker::header(Op::Reset, port, 7), &[]));
        soon("they are over", || pair.server.stack().report().connections == 0);
    }
    assert_eq!(pair.server.sockets().open, MANY as usize);
    assert!(pair.server.sockets().buffers <= BUDGET);
    let kept: usize =
        programs.into_iter().map(|mut program| io::copy(&mut program, &mut io::sink()).unwrap() as usize).sum();
    assert!(kept > 1 << 20 && kept <= BUDGET + MANY as usize * (8 << 10), "the kernel kept {kept} bytes");
    soon("all is given back", || pair.server.sockets().open == 0 && pair.server.sockets().buffers == 0);
    pair.rig.expect_service();
}

#[test]
fn unused_kernel_memory_is_returned_for_others() {
    const BUDGET: usize = 4 << 20;
    let pair = Pair::new(|config| config.socket_memory = BUDGET);
    let mut attacker = pair.attacker();
    let listener = pair.listen_on_host(7);
    assert_eq!(attacker.connect(7, 0, 40), (40, 0));
    let programs: Vec<_> = (0..40).map(|_| listener.accept().unwrap().0).collect();
    attacker.fill(7, 0..40);
    let full = pair.server.sockets().buffers;
    assert!(full > BUDGET / 4 * 3, "{full}");
    for program in &programs {
        program.set_nonblocking(true).unwrap();
    }
    soon("the programs have read all, and the memory is free", || {
        programs.iter().for_each(|mut program| _ = io::copy(&mut program, &mut io::sink()));
        pair.server.sockets().buffers <= BUDGET / 2
    });
}

/// The worker takes the packets that were sent before a queue stops, in the guest's turn and within its limits. The thread of the
/// frontend's socket does no work for the guest.
#[test]
fn requests_at_a_stop_wait_for_their_turn() {
    let pair = Pair::new(|config| config.connects = 20);
    let mut attacker = pair.attacker();
    let _listener = pair.listen_on_host(7);
    // The quota is used up.
    assert_eq!(attacker.connect(7, 0, 20), (20, 0));
    // The worker no longer polls the ring, and there is no kick.
    thread::sleep(Duration::from_millis(20));
    for port in 100..110 {
        assert!(attacker.put(Attacker::header(Op::Request, port, 7), &[]));
    }
    attacker.driver.tx.publish();
    let base = attacker.peer.get_base(1);
    assert_eq!((base, pair.server.sockets().refused), (30, 0), "taken, and none refused");
    let mut opened = 0;
    soon("all requests are granted", || {
        attacker.take(|header| opened += usize::from(header.op == Op::Response as u16));
        opened == 10
    });
    pair.rig.expect_service();
}

#[test]
fn a_queue_that_stops_with_packets_left_resumes_there() {
    const PACKETS: usize = 400;
    let pair = Pair::new(|_| {});
    let mut attacker = Attacker::new(&pair.attacker.socket, 1024);
    soon("the device runs", || pair.server.stack().is_running());
    let listener = pair.listen_on_host(7);
    assert_eq!(attacker.connect(7, 0, 1), (1, 0));
    let (mut program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    thread::sleep(Duration::from_millis(20));
    for index in 0..PACKETS {
        let payload: Vec<u8> = (100 * index..100 * (index + 1)).map(known).collect();
        assert!(attacker.put(Attacker::header(Op::Data, 0, 7), &payload));
    }
    attacker.driver.tx.publish();
    let mut got = 0;
    let mut bases = Vec::new();
    while got < 100 * PACKETS {
        let base = attacker.peer.get_base(1);
        // A turn's worth at least: what was taken by then has arrived, and nothing else does.
        bases.push(base);
        program.set_nonblocking(true).unwrap();
        let mut bytes = vec![0; 100 * PACKETS];
        while let Ok(count @ 1..) = program.read(&mut bytes) {
            assert!(bytes[..count].iter().enumerate().all(|(at, &byte)| byte == known(got + at)), "from {got} on");
            got += count;
        }
        assert_eq!(got, 100 * (base as usize - 1), "stopped at {bases:?}");
        attacker.peer.ok(SET_VRING_BASE, &words(&[1, base]), &[]);
        let kick = attacker.vrings[1].kick.as_raw_fd();
        attacker.peer.ok(SET_VRING_KICK, &longs(&[1]), &[kick]);
    }
    assert!(bases[0] > 100 && *bases.last().unwrap() == PACKETS as u32 + 1, "{bases:?}");
    assert_eq!(pair.server.stack().report().wrong, 0);
}

#[test]
fn memory_is_checked_while_any_vring_uses_it() {
    let pair = Pair::new(|_| {});
    for stopped in 0..3 {
        let mut attacker = pair.attacker();
        attacker.peer.get_base(stopped);
        attacker.driver.file.set_len(0).unwrap();
        // The worker has to access one of the rings.
        for vring in &attacker.vrings {
            let _ = vring.kick.write(1);
        }
        let _ = pair.program().write_all(b"CONNECT 1\n");
        assert!(attacker.peer.ends(), "vring {stopped} stopped, the others' memory truncated");
        soon("the device has stopped", || !pair.server.stack().is_running());
    }
    pair.attacker();
    pair.rig.expect_service();
}

/// A descriptor in a message is closed by whoever reads the message, if nobody else has it open.
#[test]
fn descriptors_from_programs_delay_nobody() {
    let pair = Pair::new(|_| {});
    let _attacker = pair.attacker();
    let (program, guest) = pair.rig.to_guest(1);
    let service = pair.rig.listen_on_host(2);
    let to_service = pair.rig.dial(2).unwrap();
    let (service, _) = service.accept().unwrap();
    // A program sends one with its line, and with a line that is not read to its end; a service sends one with its data.
    for (socket, bytes) in [(pair.program(), &b"CONNECT 1\n"[..]), (pair.program(), &[b'x'; 100]), (service, b"data")] {
        let (lingering, _listener) = lingering();
        if socket.send_with_fds(&[bytes], &[lingering.as_raw_fd()]).is_err() {
            // Refused by the kernel: it is closed here.
            lingering.set_linger(None).unwrap();
        }
        drop((lingering, socket));
        for _ in 0..10 {
            at_once(|| exchange(&program, &guest));
            thread::sleep(Duration::from_millis(20));
        }
    }
    drop(to_service);
}

/// The log lines of all tests.
static LOG: Log = Log(Mutex::new(Vec::new()));

struct Log(Mutex<Vec<String>>);

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        self.0.lock().unwrap().push(record.args().to_string());
    }
    fn flush(&self) {}
}

#[test]
fn nonsense_from_programs_does_not_fill_the_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LOG).unwrap();
        log::set_max_level(log::LevelFilter::Info);
    });
    let rig = Rig::new();
    let about = format!("{}: ", rig.config.name);
    let lines =
        || -> Vec<String> { LOG.0.lock().unwrap().iter().filter(|line| line.starts_with(&about)).cloned().collect() };
    let start = Instant::now();
    for _ in 0..1000 {
        let mut program = rig.program();
        program.write_all(b"nonsense\n").unwrap();
        turned_away(&mut program);
    }
    let most = 20 + start.elapsed().as_secs() as usize + 1;
    assert!(lines().len() >= 20 && lines().len() <= most, "{} lines", lines().len());
    soon("a line has the number of suppressed lines", || {
        let mut program = rig.program();
        program.write_all(b"nonsense\n").unwrap();
        turned_away(&mut program);
        lines().iter().any(|line| line.contains("\"nonsense\\n\"") && line.ends_with("more lines suppressed)"))
    });
    assert!(rig.server.sockets().turned_away > 1000);
}
