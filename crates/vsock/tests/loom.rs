//! Model checking of [`Sender`]: sending threads, the worker and the peer, in every order that loom explores. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p ringroad-vsock --test loom --release`.
//!
//! The ring is a list of packets with limited room that can be asked to report room. The worker behaves like the real one: it
//! runs when its bell is rung, by a sender that got `Effect::wake`, or by the peer if it was asked to. Once all threads are done,
//! the worker runs only while the bell is rung, so packets that wait with nobody to wake the worker are detected.
//!
//! What a thread does between two accesses to loom's locks and atomics is one atomic step. So the list can use an ordinary lock,
//! and its order is the order of events.
#![cfg(loom)]

use loom::{
    sync::{
        Mutex,
        atomic::{
            AtomicBool, AtomicU32, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
    thread,
};
use ringroad_mem::Span;
use ringroad_vsock::{Broken, Link, Owner, Payload, Sender};
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{
    io,
    num::NonZeroUsize,
    sync::{
        Arc as StdArc, Mutex as StdMutex,
        atomic::{AtomicU32 as StdAtomicU32, Ordering::SeqCst},
    },
};

/// A packet in the ring. Data packets carry one byte, their serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    conn: u32,
    serial: u32,
    control: bool,
    advertised: u32,
}

/// The packets put into the ring, and how many of them have been published.
#[derive(Default)]
struct List {
    packets: Vec<Packet>,
    published: usize,
}

const AWAITED: usize = 1;
const ONE: usize = 2;

/// A ring with limited room.
#[derive(Clone)]
struct Ring(StdArc<RingState>);

struct RingState {
    /// Number of packets there is room for, times two, plus `AWAITED` if the peer was asked to report room.
    room: AtomicUsize,
    /// Room that data packets leave for control packets.
    reserve: usize,
    /// Loom explores other orders of dependent accesses only. It does not regard the time at which a lock is released as such,
    /// and remembers just the last access to a location. All threads access this location, which synchronizes nothing, before
    /// sending a packet and while they hold the ring, so that these orders are explored too.
    turn: AtomicUsize,
    list: StdMutex<List>,
}

impl Ring {
    fn new(room: usize, reserve: usize) -> Ring {
        let (room, turn) = (AtomicUsize::new(room * ONE), AtomicUsize::new(0));
        Ring(StdArc::new(RingState { room, reserve, turn, list: StdMutex::default() }))
    }

    fn turn(&self) {
        self.0.turn.fetch_add(1, Relaxed);
    }

    fn list(&self) -> Vec<Packet> {
        self.0.list.lock().unwrap().packets.clone()
    }

    /// Returns the serial numbers of a connection's data packets, in ring order.
    fn data(&self, conn: u32) -> Vec<u32> {
        let list = self.list();
        list.iter().filter(|packet| packet.conn == conn && !packet.control).map(|packet| packet.serial).collect()
    }
}

impl Link for Ring {
    fn room(&mut self, control: bool) -> Result<Option<NonZeroUsize>, Broken> {
        let kept = if control { 0 } else { self.0.reserve };
        Ok((self.0.room.load(Acquire) / ONE > kept).then_some(NonZeroUsize::MIN))
    }

    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>) {
        assert!(self.0.room.fetch_sub(ONE, AcqRel) >= ONE, "put without room");
        self.turn();
        let control = header.op != Op::Data as u16;
        let bytes = payload.take(header.len as usize);
        let serial = match bytes[..] {
            [] if control => header.dst_port,
            [serial] if !control => u32::from(serial),
            _ => panic!("{header:?} with {} bytes", bytes.len()),
        };
        let (conn, advertised) = (header.src_port, header.fwd_cnt);
        self.0.list.lock().unwrap().packets.push(Packet { conn, serial, control, advertised });
    }

    fn fill(
        &mut self,
        mut header: VsockHdr,
        stamp: &mut dyn FnMut(&mut VsockHdr),
        _: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken> {
        if self.room(false)?.is_none() {
            return Ok(None);
        }
        header.len = read(&[]).unwrap() as u32;
        stamp(&mut header);
        self.put(&header, &mut Payload::bytes(&[header.dst_port as u8]));
        Ok(Some((1, Ok(1))))
    }

    fn publish(&mut self) -> bool {
        let mut list = self.0.list.lock().unwrap();
        list.published = list.packets.len();
        true
    }

    fn await_room(&mut self) -> bool {
        self.0.room.fetch_or(AWAITED, AcqRel) / ONE > self.0.reserve
    }
}

/// A connection.
#[derive(Clone)]
struct Conn(StdArc<ConnState>);

struct ConnState {
    id: u32,
    queued: AtomicUsize,
    /// The credit that its packets carry, in models that need it.
    advertised: Option<AtomicU32>,
}

impl Conn {
    fn new(id: u32) -> Conn {
        Conn(StdArc::new(ConnState { id, queued: AtomicUsize::new(0), advertised: None }))
    }

    fn with_credit(id: u32) -> Conn {
        Conn(StdArc::new(ConnState { id, queued: AtomicUsize::new(0), advertised: Some(AtomicU32::new(0)) }))
    }

    fn header(&self, serial: u32, op: Op) -> VsockHdr {
        VsockHdr { src_port: self.0.id, dst_port: serial, op: op as u16, ..VsockHdr::default() }
    }
}

impl Owner for Conn {
    fn key(&self) -> usize {
        self.0.id as usize
    }

    fn stamp(&self, header: &mut VsockHdr) {
        if let Some(advertised) = &self.0.advertised {
            header.fwd_cnt = advertised.load(Acquire);
        }
    }

    fn queued(&self) -> &AtomicUsize {
        &self.0.queued
    }
}

/// State shared by all threads.
#[derive(Clone)]
struct World(StdArc<Shared>);

struct Shared {
    sender: Sender<Ring, Conn>,
    ring: Ring,
    bell: AtomicBool,
}

impl World {
    fn new(direct: bool, room: usize, reserve: usize) -> World {
        let (sender, ring) = (Sender::new(direct), Ring::new(room, reserve));
        assert!(sender.replace(Some(ring.clone())).is_none());
        World(StdArc::new(Shared { sender, ring, bell: AtomicBool::new(false) }))
    }

    fn spawn<T: 'static>(&self, run: impl FnOnce(World) -> T + 'static) -> thread::JoinHandle<T> {
        let world = self.clone();
        thread::spawn(move || run(world))
    }

    fn ring(&self) -> &Ring {
        &self.0.ring
    }

    fn wake(&self) {
        // Loom orders read-modify-write operations with each other, but not with stores.
        self.0.bell.swap(true, AcqRel);
    }

    /// A program sends one packet.
    fn send(&self, conn: &Conn, serial: u8) {
        self.send_all(conn, &[serial]);
    }

    /// A program sends what takes several packets.
    fn send_all(&self, conn: &Conn, serials: &[u8]) {
        self.ring().turn();
        let (sent, effect) = self.0.sender.send(conn, conn.header(0, Op::Data), &mut Payload::bytes(serials), 100);
        assert_eq!(sent, serials.len());
        assert!(effect.broken.is_none());
        if effect.wake {
            self.wake();
        }
    }

    /// Sends a packet read from a host socket.
    fn fill(&self, conn: &Conn, serial: u8) {
        self.ring().turn();
        let header = conn.header(u32::from(serial), Op::Data);
        let (result, effect) = self.0.sender.fill(conn, header, 1, &mut |_| Ok(1), &mut |target| {
            target[0] = serial;
            Ok(1)
        });
        assert_eq!(result.unwrap(), Some(1));
        if effect.wake {
            self.wake();
        }
    }

    fn send_control(&self, conn: Option<&Conn>, serial: u32) {
        let header = match conn {
            Some(conn) => conn.header(serial, Op::CreditUpdate),
            None => VsockHdr { dst_port: serial, op: Op::Reset as u16, ..VsockHdr::default() },
        };
        if self.0.sender.send_control(conn, header).wake {
            self.wake();
        }
    }

    /// One run of the worker, which may also have been woken for another reason.
    fn work(&self) {
        self.0.bell.swap(false, AcqRel);
        self.flush();
    }

    fn flush(&self) {
        let effect = self.0.sender.flush(|_| {});
        assert!(effect.broken.is_none());
    }

    /// The peer takes `count` packets, and wakes the worker if it was asked to.
    fn give(&self, count: usize) {
        self.ring().0.room.fetch_add(count * ONE, AcqRel);
        if self.ring().0.room.fetch_and(!AWAITED, AcqRel) & AWAITED != 0 {
            self.wake();
        }
    }

    /// Runs the worker as long as it is woken.
    fn run(&self) {
        while self.0.bell.swap(false, AcqRel) {
            self.flush();
        }
    }

    /// Called when all threads are done: the worker runs as long as it is woken, and the peer makes room as long as it is asked
    /// to.
    fn finish(&self, conns: &[&Conn]) {
        loop {
            self.run();
            if !self.0.sender.is_waiting() {
                break;
            }
            let room = self.ring().0.room.load(Acquire);
            assert!(room & AWAITED != 0, "packets wait, and nobody will wake the worker");
            assert!(room / ONE <= self.ring().0.reserve, "packets wait although there is room");
            self.give(1);
        }
        let list = self.ring().0.list.lock().unwrap();
        assert_eq!(list.published, list.packets.len(), "not all packets were published");
        let ways = self.0.sender.ways();
        assert_eq!((ways.direct + ways.queued, ways.dropped), (list.packets.len() as u64, 0));
        for conn in conns {
            assert_eq!(conn.0.queued.load(Acquire), 0, "bytes still counted as queued");
        }
    }
}

/// Values observed in any of the explored orders.
#[derive(Clone, Default)]
struct Seen(StdArc<StdAtomicU32>);

impl Seen {
    fn add(&self, number: u32) {
        self.0.fetch_or(1 << number, SeqCst);
    }

    /// Asserts that each of these was observed; others are allowed.
    fn assert(&self, numbers: &[u32]) {
        let seen: Vec<_> = (0..32).filter(|number| self.0.load(SeqCst) & 1 << number != 0).collect();
        assert!(
            numbers.iter().all(|number| seen.contains(number)),
            "not all outcomes were observed: {seen:?} of {numbers:?}"
        );
    }
}

/// `preemptions`: how often a thread is interrupted at most although it could continue; `None`: no limit.
fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// Two connections send two packets each, one of them read from a host socket, while the worker flushes and the peer takes
/// packets. `queued`: numbers of packets sent through the outbox that must be observed.
fn all_arrive(direct: bool, room: usize, given: usize, preemptions: usize, queued: &[u32]) {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(preemptions), move || {
        let world = World::new(direct, room, 0);
        let conns = [Conn::new(1), Conn::new(2)];
        let [first, second] = conns.clone();
        let mut threads = vec![
            world.spawn(move |world| (0..2).for_each(|serial| world.send(&first, serial))),
            world.spawn(move |world| (0..2).for_each(|serial| world.fill(&second, serial))),
        ];
        if given > 0 {
            threads.push(world.spawn(move |world| world.give(given)));
        }
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&conns[0], &conns[1]]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0, 1]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    seen.assert(queued);
}

#[test]
fn all_arrive_with_enough_room() {
    all_arrive(true, 4, 0, 4, &[0, 1, 2, 3]);
}

#[test]
fn all_arrive_through_the_outbox() {
    all_arrive(false, 4, 0, 3, &[4]);
}

#[test]
fn all_arrive_with_room_for_one() {
    all_arrive(true, 1, 0, 3, &[3]);
}

#[test]
fn all_arrive_with_room_for_two() {
    all_arrive(true, 2, 0, 3, &[2, 3]);
}

#[test]
fn all_arrive_while_the_peer_makes_room() {
    all_arrive(true, 1, 2, 2, &[1, 2, 3]);
}

/// The first packet of a connection is queued behind another connection's, or not; the second one could be sent directly.
#[test]
fn a_connection_does_not_overtake_itself() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(4), move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&other, 0);
        world.give(3);
        let thread = {
            let one = one.clone();
            world.spawn(move |world| (0..2).for_each(|serial| world.send(&one, serial)))
        };
        world.work();
        thread.join().unwrap();
        world.finish(&[&one, &other]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    // A packet is sent directly only if the worker has emptied the outbox before.
    seen.assert(&[1, 2, 3]);
}

/// What does not fit is queued while more is sent and the peer takes packets.
#[test]
fn split_packets_keep_their_order() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 1, 0);
        let conns = [Conn::new(1), Conn::new(2)];
        let threads = [
            {
                let conn = conns[0].clone();
                world.spawn(move |world| {
                    world.send_all(&conn, &[0, 1]);
                    world.send_all(&conn, &[2, 3]);
                })
            },
            {
                let conn = conns[1].clone();
                world.spawn(move |world| {
                    world.give(1);
                    world.send_all(&conn, &[0, 1]);
                })
            },
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&conns[0], &conns[1]]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1, 2, 3], vec![0, 1]));
        seen_in.add(world.0.sender.ways().direct as u32);
    });
    seen.assert(&[1, 2]);
}

/// Two threads take turns sending packets of one connection, as threads of a program may.
#[test]
fn two_threads_of_a_connection_do_not_overtake_each_other() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&other, 0);
        world.give(3);
        let sending = StdArc::new(Mutex::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (one, sending) = (one.clone(), sending.clone());
                world.spawn(move |world| {
                    let mut next = sending.lock().unwrap();
                    world.send(&one, *next);
                    *next += 1;
                })
            })
            .collect();
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&one, &other]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    seen.assert(&[1, 2, 3]);
}

/// A queued control packet is sent before the queued data, except for the packet being moved at the time.
#[test]
fn control_packets_are_sent_before_data() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(None, move || {
        let world = World::new(true, 0, 0);
        let conn = Conn::new(1);
        (0..3).for_each(|serial| world.send(&conn, serial));
        world.give(3);
        let thread = {
            let conn = conn.clone();
            world.spawn(move |world| {
                world.send_control(Some(&conn), 0);
                world.ring().data(1).len()
            })
        };
        world.work();
        let before = thread.join().unwrap();
        world.finish(&[&conn]);
        let list = world.ring().list();
        let at = list.iter().position(|packet| packet.control).expect("the control packet was lost");
        assert!(at <= before + 1, "{} data packets before the control packet, but only {before} when it was sent", at);
        assert_eq!((list.len(), world.ring().data(1)), (4, vec![0, 1, 2]));
        seen_in.add(at as u32);
    });
    seen.assert(&[0, 1, 2, 3]);
}

/// A control packet is not queued twice, even if the worker puts one back after another was queued.
#[test]
fn a_control_packet_is_queued_once() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(None, move || {
        let world = World::new(true, 0, 0);
        let conn = Conn::new(1);
        world.send_control(Some(&conn), 0);
        let thread = {
            let conn = conn.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.send_control(Some(&conn), 1);
            })
        };
        world.work();
        thread.join().unwrap();
        world.finish(&[&conn]);
        let list = world.ring().list();
        assert_eq!(list.len(), 1, "{list:?}");
        seen_in.add(list[0].serial);
    });
    // The second one is kept only if it was queued while the worker held the first.
    seen.assert(&[0, 1]);
}

/// Data packets leave the last buffer to control packets, which do not wait for more buffers.
#[test]
fn control_packets_have_reserved_buffers() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 1, 1);
        let conn = Conn::new(1);
        let threads = [
            {
                let conn = conn.clone();
                world.spawn(move |world| world.send(&conn, 0))
            },
            world.spawn(|world| world.send_control(None, 7)),
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.run();
        assert_eq!(world.ring().list(), [Packet { conn: 0, serial: 7, control: true, advertised: 0 }]);
        seen_in.add(world.0.sender.ways().direct as u32);
        world.finish(&[&conn]);
        assert_eq!(world.ring().data(1), [0]);
    });
    seen.assert(&[0, 1]);
}

/// Advertised credit never decreases in ring order, whichever thread puts the packets there.
#[test]
fn advertised_credit_never_decreases() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(4), move || {
        let world = World::new(true, 3, 0);
        let conn = Conn::with_credit(1);
        let read = |conn: &Conn| conn.0.advertised.as_ref().unwrap().fetch_add(1, Release);
        let threads = [
            {
                let conn = conn.clone();
                world.spawn(move |world| {
                    world.send(&conn, 0);
                    world.send(&conn, 1);
                })
            },
            {
                let conn = conn.clone();
                // A program that reads, and sends credit updates.
                world.spawn(move |world| {
                    read(&conn);
                    world.send_control(Some(&conn), 0);
                    read(&conn);
                })
            },
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&conn]);
        let list = world.ring().list();
        assert!(list.is_sorted_by_key(|packet| packet.advertised), "{list:?}");
        let update = list.iter().find(|packet| packet.control).expect("the control packet was lost");
        assert!(update.advertised > 0, "it was sent after the first read");
        seen_in.add(list[0].advertised);
        seen_in.add(3 + list[2].advertised - list[0].advertised);
    });
    seen.assert(&[0, 1, 2, 3, 4, 5]);
}

/// A connection is removed while the worker moves its packets and, if `sends`, another thread sends on it: packets of other
/// connections survive.
fn forget(room: usize, sends: bool, preemptions: Option<usize>) {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(preemptions, move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&one, 0);
        world.send(&other, 0);
        world.send(&one, 1);
        world.send_control(Some(&one), 0);
        world.give(room);
        let mut threads = vec![{
            let one = one.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.0.sender.forget(&one);
            })
        }];
        if sends {
            let one = one.clone();
            threads.push(world.spawn(move |world| {
                world.send(&one, 2);
                world.send_control(Some(&one), 1);
            }));
        }
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        let data = world.ring().data(1);
        assert!(data.is_sorted_by(|a, b| a < b) && !data.starts_with(&[1]), "{data:?}");
        seen_in.add(data.len() as u32);
    });
    seen.assert(if sends { &[0, 1, 2, 3] } else { &[0, 1, 2] });
}

#[test]
fn a_connection_is_forgotten_while_the_ring_has_room() {
    forget(5, false, None);
}

#[test]
fn a_connection_is_forgotten_while_it_sends() {
    forget(5, true, Some(3));
}

#[test]
fn a_connection_is_forgotten_while_the_ring_is_full() {
    check(None, move || {
        let world = World::new(true, 0, 0);
        let (one, other) = (Conn::new(1), Conn::new(2));
        world.send(&one, 0);
        world.send(&other, 0);
        let thread = {
            let one = one.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.0.sender.forget(&one);
            })
        };
        // The worker takes the packet out, finds no room, and puts it back.
        world.work();
        thread.join().unwrap();
        world.finish(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        // The packet was removed from the outbox, or the worker held it and did not put it back.
        assert_eq!(world.ring().data(1), []);
    });
}

/// The outbox is cleared while the worker moves packets; packets sent later arrive.
fn clear(room: usize) {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(3), move || {
        let world = World::new(true, 0, 0);
        let (one, other, third) = (Conn::new(1), Conn::new(2), Conn::new(3));
        world.send(&one, 0);
        world.send(&one, 1);
        world.send_control(None, 0);
        world.give(room);
        let clears = {
            let other = other.clone();
            world.spawn(move |world| {
                world.ring().turn();
                world.0.sender.clear();
                let before = world.ring().list().len();
                world.send(&other, 0);
                before
            })
        };
        let sends = {
            let third = third.clone();
            world.spawn(move |world| world.send(&third, 0))
        };
        world.work();
        let before = clears.join().unwrap();
        sends.join().unwrap();
        world.finish(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        let later = world.ring().list().split_off(before);
        assert!(later.iter().all(|packet| packet.conn >= 2), "should have been dropped: {later:?}");
        let data = world.ring().data(1);
        assert!([0, 1].starts_with(&data), "{data:?}");
        assert!(world.ring().data(3).len() <= 1);
        seen_in.add(data.len() as u32);
        seen_in.add(3 + world.ring().data(3).len() as u32);
    });
    // All data packets or none: the worker holds the ring's lock for a whole flush.
    seen.assert(if room == 1 { &[0, 3, 4] } else { &[0, 2, 3, 4] });
}

#[test]
fn the_outbox_is_cleared_while_the_ring_has_room() {
    clear(5);
}

#[test]
fn the_outbox_is_cleared_while_the_ring_is_full() {
    clear(1);
}
