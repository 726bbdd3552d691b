//! Senders, the worker and the peer meeting at a [`Sender`], in every order that loom finds. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p ringroad-vsock --test loom --release`.
//!
//! The ring is a list of packets that has room for so many and can be asked to tell of room. The worker does what it really
//! does: it is woken by a bell, which whoever is told to (`Effect::wake`) rings, and the peer, if it was asked for that. When
//! all threads are done, it goes on only as long as somebody rings: what waits then, though nobody will, is found at once.
//!
//! What threads do between two accesses to loom's locks and atomics happens at one time, so that the list may be a usual one,
//! and says what happened before what.
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

/// A packet in the ring. Data are one byte, which is their serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    conn: u32,
    serial: u32,
    control: bool,
    told: u32,
}

/// What was put into the ring, and how much of it the peer was shown.
#[derive(Default)]
struct List {
    packets: Vec<Packet>,
    shown: usize,
}

const AWAITED: usize = 1;
const ONE: usize = 2;

/// A ring.
#[derive(Clone)]
struct Ring(StdArc<RingState>);

struct RingState {
    /// Room for so many packets, times two, and whether the peer was asked to tell of more.
    room: AtomicUsize,
    /// What data leave for control.
    reserve: usize,
    /// Loom tries other orders of accesses that depend on each other, but does not see that it matters when a lock is released,
    /// and of a location it remembers the last access only. All threads touch this one, which synchronizes nothing, before a
    /// packet and while they have the ring.
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

    /// The serial numbers of a connection's data, as they stand in the ring.
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
        assert!(self.0.room.fetch_sub(ONE, AcqRel) >= ONE, "no room was left");
        self.turn();
        let control = header.op != Op::Data as u16;
        let bytes = payload.take(header.len as usize);
        let serial = match bytes[..] {
            [] if control => header.dst_port,
            [serial] if !control => u32::from(serial),
            _ => panic!("{header:?} with {} bytes", bytes.len()),
        };
        let (conn, told) = (header.src_port, header.fwd_cnt);
        self.0.list.lock().unwrap().packets.push(Packet { conn, serial, control, told });
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
        list.shown = list.packets.len();
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
    /// The room that its packets tell of, where a model asks for that.
    told: Option<AtomicU32>,
}

impl Conn {
    fn new(id: u32) -> Conn {
        Conn(StdArc::new(ConnState { id, queued: AtomicUsize::new(0), told: None }))
    }

    fn telling(id: u32) -> Conn {
        Conn(StdArc::new(ConnState { id, queued: AtomicUsize::new(0), told: Some(AtomicU32::new(0)) }))
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
        if let Some(told) = &self.0.told {
            header.fwd_cnt = told.load(Acquire);
        }
    }

    fn queued(&self) -> &AtomicUsize {
        &self.0.queued
    }
}

/// All that threads share.
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
        // Loom orders read-modify-writes with each other, but not with stores.
        self.0.bell.swap(true, AcqRel);
    }

    /// A program sends a packet.
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

    /// A packet from a socket of the host.
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

    /// The worker, which may also be awake for another reason.
    fn work(&self) {
        self.0.bell.swap(false, AcqRel);
        self.flush();
    }

    fn flush(&self) {
        let effect = self.0.sender.flush(|_| {});
        assert!(effect.broken.is_none());
    }

    /// The peer has taken so many packets, and tells if it was asked to.
    fn give(&self, count: usize) {
        self.ring().0.room.fetch_add(count * ONE, AcqRel);
        if self.ring().0.room.fetch_and(!AWAITED, AcqRel) & AWAITED != 0 {
            self.wake();
        }
    }

    /// The worker, as long as it is woken.
    fn run(&self) {
        while self.0.bell.swap(false, AcqRel) {
            self.flush();
        }
    }

    /// When all threads are done: the worker goes on as long as it is woken, the peer gives room as long as it is asked to.
    fn settle(&self, conns: &[&Conn]) {
        loop {
            self.run();
            if !self.0.sender.is_waiting() {
                break;
            }
            let room = self.ring().0.room.load(Acquire);
            assert!(room & AWAITED != 0, "something waits, and nobody will wake the worker");
            assert!(room / ONE <= self.ring().0.reserve, "something waits, and there is room");
            self.give(1);
        }
        let list = self.ring().0.list.lock().unwrap();
        assert_eq!(list.shown, list.packets.len(), "the peer was not shown all");
        let ways = self.0.sender.ways();
        assert_eq!((ways.direct + ways.queued, ways.dropped), (list.packets.len() as u64, 0));
        for conn in conns {
            assert_eq!(conn.0.queued.load(Acquire), 0, "bytes that wait");
        }
    }
}

/// Numbers that came up in some order of things.
#[derive(Clone, Default)]
struct Seen(StdArc<StdAtomicU32>);

impl Seen {
    fn add(&self, number: u32) {
        self.0.fetch_or(1 << number, SeqCst);
    }

    /// Each of these did, and perhaps others.
    fn assert(&self, numbers: &[u32]) {
        let seen: Vec<_> = (0..32).filter(|number| self.0.load(SeqCst) & 1 << number != 0).collect();
        assert!(numbers.iter().all(|number| seen.contains(number)), "not all of it was tried: {seen:?} of {numbers:?}");
    }
}

/// `preemptions`: how often at most a thread is interrupted though it could go on; `None`: as often as there is a difference.
fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// Two connections send two packets each, one of them what it reads from a socket, while the worker flushes and the peer takes
/// packets. `queued`: how many have gone through the outbox, in some order of things.
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
        world.settle(&[&conns[0], &conns[1]]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0, 1]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    seen.assert(queued);
}

#[test]
fn all_arrive_where_there_is_room() {
    all_arrive(true, 4, 0, 4, &[0, 1, 2, 3]);
}

#[test]
fn all_arrive_through_the_outbox() {
    all_arrive(false, 4, 0, 3, &[4]);
}

#[test]
fn all_arrive_though_the_ring_is_full_after_one() {
    all_arrive(true, 1, 0, 3, &[3]);
}

#[test]
fn all_arrive_though_the_ring_is_full_after_two() {
    all_arrive(true, 2, 0, 3, &[2, 3]);
}

#[test]
fn all_arrive_while_the_peer_makes_room() {
    all_arrive(true, 1, 2, 2, &[1, 2, 3]);
}

/// A connection's first packet waits behind another one's, or does not, and the second one could go directly.
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
        world.settle(&[&one, &other]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    // One goes directly only if the worker has been there before it.
    seen.assert(&[1, 2, 3]);
}

/// What does not fit goes into the outbox while more comes, and the peer takes packets.
#[test]
fn packets_in_parts_keep_their_order() {
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
        world.settle(&[&conns[0], &conns[1]]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1, 2, 3], vec![0, 1]));
        seen_in.add(world.0.sender.ways().direct as u32);
    });
    seen.assert(&[1, 2]);
}

/// Two threads send packets of one connection in turn, as those of a program may.
#[test]
fn a_connection_of_two_threads_does_not_overtake_itself() {
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
        world.settle(&[&one, &other]);
        assert_eq!((world.ring().data(1), world.ring().data(2)), (vec![0, 1], vec![0]));
        seen_in.add(world.0.sender.ways().queued as u32);
    });
    seen.assert(&[1, 2, 3]);
}

/// Control that is in the outbox goes before the data there, all but the packet whose turn it is.
#[test]
fn control_goes_before_data() {
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
        world.settle(&[&conn]);
        let list = world.ring().list();
        let at = list.iter().position(|packet| packet.control).expect("control is lost");
        assert!(at <= before + 1, "{} packets went before control though only {before} had when it was sent", at);
        assert_eq!((list.len(), world.ring().data(1)), (4, vec![0, 1, 2]));
        seen_in.add(at as u32);
    });
    seen.assert(&[0, 1, 2, 3]);
}

/// Control that a connection has waiting is not said twice, also when the worker brings it back and another one has come.
#[test]
fn control_is_said_once() {
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
        world.settle(&[&conn]);
        let list = world.ring().list();
        assert_eq!(list.len(), 1, "{list:?}");
        seen_in.add(list[0].serial);
    });
    // The second one stays only if it came while the worker had the first one.
    seen.assert(&[0, 1]);
}

/// Data leave the last buffer for control, which does not wait for more of them.
#[test]
fn control_has_room_of_its_own() {
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
        assert_eq!(world.ring().list(), [Packet { conn: 0, serial: 7, control: true, told: 0 }]);
        seen_in.add(world.0.sender.ways().direct as u32);
        world.settle(&[&conn]);
        assert_eq!(world.ring().data(1), [0]);
    });
    seen.assert(&[0, 1]);
}

/// Room that is told goes up and up in the ring, whoever puts the packets there.
#[test]
fn room_told_never_goes_down() {
    let seen = Seen::default();
    let seen_in = seen.clone();
    check(Some(4), move || {
        let world = World::new(true, 3, 0);
        let conn = Conn::telling(1);
        let read = |conn: &Conn| conn.0.told.as_ref().unwrap().fetch_add(1, Release);
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
                // A program that reads, and tells so.
                world.spawn(move |world| {
                    read(&conn);
                    world.send_control(Some(&conn), 0);
                    read(&conn);
                })
            },
        ];
        world.work();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.settle(&[&conn]);
        let list = world.ring().list();
        assert!(list.is_sorted_by_key(|packet| packet.told), "{list:?}");
        let update = list.iter().find(|packet| packet.control).expect("control is lost");
        assert!(update.told > 0, "it was sent when there was room");
        seen_in.add(list[0].told);
        seen_in.add(3 + list[2].told - list[0].told);
    });
    seen.assert(&[0, 1, 2, 3, 4, 5]);
}

/// A connection is over while the worker moves its packets, and perhaps somebody sends another one of it: those of others
/// survive.
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
        world.settle(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        let data = world.ring().data(1);
        assert!(data.is_sorted_by(|a, b| a < b) && !data.starts_with(&[1]), "{data:?}");
        seen_in.add(data.len() as u32);
    });
    seen.assert(if sends { &[0, 1, 2, 3] } else { &[0, 1, 2] });
}

#[test]
fn a_connection_is_forgotten_while_there_is_room() {
    forget(5, false, None);
}

#[test]
fn a_connection_is_forgotten_that_still_sends() {
    forget(5, true, Some(3));
}

#[test]
fn a_connection_is_forgotten_in_a_full_ring() {
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
        // It takes the packet out, finds no room, and brings it back.
        world.work();
        thread.join().unwrap();
        world.settle(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        // It was forgotten in the outbox, or while the worker had it, which brought nothing back then.
        assert_eq!(world.ring().data(1), []);
    });
}

/// All is dropped while the worker moves packets; what is sent later arrives.
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
        world.settle(&[&other]);
        assert_eq!(world.ring().data(2), [0]);
        let later = world.ring().list().split_off(before);
        assert!(later.iter().all(|packet| packet.conn >= 2), "not dropped: {later:?}");
        let data = world.ring().data(1);
        assert!([0, 1].starts_with(&data), "{data:?}");
        assert!(world.ring().data(3).len() <= 1);
        seen_in.add(data.len() as u32);
        seen_in.add(3 + world.ring().data(3).len() as u32);
    });
    // The lock is kept for a whole flush.
    seen.assert(if room == 1 { &[0, 3, 4] } else { &[0, 2, 3, 4] });
}

#[test]
fn all_is_dropped_while_there_is_room() {
    clear(5);
}

#[test]
fn all_is_dropped_in_a_full_ring() {
    clear(1);
}
