//! The ring, connections, worker and peer that the models share.

use loom::{
    sync::atomic::{
        AtomicBool, AtomicU32, AtomicUsize,
        Ordering::{AcqRel, Acquire, Relaxed},
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
pub struct Packet {
    pub conn: u32,
    pub serial: u32,
    pub control: bool,
    pub advertised: u32,
}

/// The packets put into the ring, and how many of them have been published.
#[derive(Default)]
pub struct List {
    pub packets: Vec<Packet>,
    pub published: usize,
}

pub const AWAITED: usize = 1;
pub const ONE: usize = 2;

/// A ring with limited room.
#[derive(Clone)]
pub struct Ring(pub StdArc<RingState>);

pub struct RingState {
    /// Number of packets there is room for, times two, plus `AWAITED` if the peer was asked to report room.
    pub room: AtomicUsize,
    /// Room that data packets leave for control packets.
    pub reserve: usize,
    /// Loom explores other orders of dependent accesses only. It does not regard the time at which a lock is released as such,
    /// and remembers just the last access to a location. All threads access this location, which synchronizes nothing, before
    /// sending a packet and while they hold the ring, so that these orders are explored too.
    pub turn: AtomicUsize,
    pub list: StdMutex<List>,
}

impl Ring {
    pub fn new(room: usize, reserve: usize) -> Ring {
        let (room, turn) = (AtomicUsize::new(room * ONE), AtomicUsize::new(0));
        Ring(StdArc::new(RingState { room, reserve, turn, list: StdMutex::default() }))
    }

    pub fn turn(&self) {
        self.0.turn.fetch_add(1, Relaxed);
    }

    pub fn list(&self) -> Vec<Packet> {
        self.0.list.lock().unwrap().packets.clone()
    }

    /// Returns the serial numbers of a connection's data packets, in ring order.
    pub fn data(&self, conn: u32) -> Vec<u32> {
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
pub struct Conn(pub StdArc<ConnState>);

pub struct ConnState {
    pub id: u32,
    pub queued: AtomicUsize,
    /// The credit that its packets carry, in models that need it.
    pub advertised: Option<AtomicU32>,
}

impl Conn {
    pub fn new(id: u32) -> Conn {
        Conn(StdArc::new(ConnState { id, queued: AtomicUsize::new(0), advertised: None }))
    }

    pub fn with_credit(id: u32) -> Conn {
        Conn(StdArc::new(ConnState { id, queued: AtomicUsize::new(0), advertised: Some(AtomicU32::new(0)) }))
    }

    pub fn header(&self, serial: u32, op: Op) -> VsockHdr {
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
pub struct World(pub StdArc<Shared>);

pub struct Shared {
    pub sender: Sender<Ring, Conn>,
    pub ring: Ring,
    pub bell: AtomicBool,
}

impl World {
    pub fn new(direct: bool, room: usize, reserve: usize) -> World {
        let (sender, ring) = (Sender::new(direct), Ring::new(room, reserve));
        assert!(sender.replace(Some(ring.clone())).is_none());
        World(StdArc::new(Shared { sender, ring, bell: AtomicBool::new(false) }))
    }

    pub fn spawn<T: 'static>(&self, run: impl FnOnce(World) -> T + 'static) -> thread::JoinHandle<T> {
        let world = self.clone();
        thread::spawn(move || run(world))
    }

    pub fn ring(&self) -> &Ring {
        &self.0.ring
    }

    pub fn wake(&self) {
        // Loom orders read-modify-write operations with each other, but not with stores.
        self.0.bell.swap(true, AcqRel);
    }

    /// A program sends one packet.
    pub fn send(&self, conn: &Conn, serial: u8) {
        self.send_all(conn, &[serial]);
    }

    /// A program sends what takes several packets.
    pub fn send_all(&self, conn: &Conn, serials: &[u8]) {
        self.ring().turn();
        let (sent, effect) = self.0.sender.send(conn, conn.header(0, Op::Data), &mut Payload::bytes(serials), 100);
        assert_eq!(sent, serials.len());
        assert!(effect.broken.is_none());
        if effect.wake {
            self.wake();
        }
    }

    /// Sends a packet read from a host socket.
    pub fn fill(&self, conn: &Conn, serial: u8) {
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

    pub fn send_control(&self, conn: Option<&Conn>, serial: u32) {
        let header = match conn {
            Some(conn) => conn.header(serial, Op::CreditUpdate),
            None => VsockHdr { dst_port: serial, op: Op::Reset as u16, ..VsockHdr::default() },
        };
        if self.0.sender.send_control(conn, header).wake {
            self.wake();
        }
    }

    /// One run of the worker, which may also have been woken for another reason.
    pub fn work(&self) {
        self.0.bell.swap(false, AcqRel);
        self.flush();
    }

    pub fn flush(&self) {
        let effect = self.0.sender.flush(|_| {});
        assert!(effect.broken.is_none());
    }

    /// The peer takes `count` packets, and wakes the worker if it was asked to.
    pub fn give(&self, count: usize) {
        self.ring().0.room.fetch_add(count * ONE, AcqRel);
        if self.ring().0.room.fetch_and(!AWAITED, AcqRel) & AWAITED != 0 {
            self.wake();
        }
    }

    /// Runs the worker as long as it is woken.
    pub fn run(&self) {
        while self.0.bell.swap(false, AcqRel) {
            self.flush();
        }
    }

    /// Called when all threads are done: the worker runs as long as it is woken, and the peer makes room as long as it is asked
    /// to.
    pub fn finish(&self, conns: &[&Conn]) {
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
pub struct Seen(StdArc<StdAtomicU32>);

impl Seen {
    pub fn add(&self, number: u32) {
        self.0.fetch_or(1 << number, SeqCst);
    }

    /// Asserts that each of these was observed; others are allowed.
    pub fn assert(&self, numbers: &[u32]) {
        let seen: Vec<_> = (0..32).filter(|number| self.0.load(SeqCst) & 1 << number != 0).collect();
        assert!(
            numbers.iter().all(|number| seen.contains(number)),
            "not all outcomes were observed: {seen:?} of {numbers:?}"
        );
    }
}

/// `preemptions`: how often a thread is interrupted at most although it could continue; `None`: no limit.
pub fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}
