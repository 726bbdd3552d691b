//! Scheduling in a [`Sender`]: tested with a ring that is a list, which records the position of each packet, and with real rings.
#![cfg(not(loom))]

use ringroad_mem::{Region, Span, Table};
use ringroad_ring::Fault;
use ringroad_vsock::{
    Broken, Driver, DriverConfig, Features, Inlet, Link, MAX_PACKET, Owner, Payload, RxQueue, Sender, TxQueue, Ways,
    bits,
};
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{
    io,
    num::NonZeroUsize,
    sync::{Arc, Mutex, atomic::AtomicUsize, atomic::Ordering},
};

/// As in send.rs: bytes a connection may send per turn, and what each packet counts in addition to its payload.
const QUANTUM: usize = MAX_PACKET;
const OVERHEAD: usize = 64;
/// As in send.rs: answers to packets of no connection that may wait.
const UNOWNED: usize = 1024;

/// A packet in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    conn: u32,
    serial: u32,
    len: usize,
    control: bool,
}

#[derive(Default)]
struct State {
    packets: Vec<Packet>,
    room: usize,
    /// Buffers that data packets leave free for control packets.
    reserve: usize,
    /// The peer has broken the ring.
    broken: bool,
    awaited: bool,
    /// While a packet is put into the ring, its connection ends.
    ending: Option<Arc<Sender<Ring, Conn>>>,
}

/// A ring whose buffers hold packets of any size.
#[derive(Clone, Default)]
struct Ring(Arc<Mutex<State>>);

impl Ring {
    fn new(room: usize, reserve: usize) -> Ring {
        Ring(Arc::new(Mutex::new(State { room, reserve, ..State::default() })))
    }

    fn give(&self, count: usize) {
        self.0.lock().unwrap().room += count;
    }

    fn is_awaited(&self) -> bool {
        self.0.lock().unwrap().awaited
    }

    fn packets(&self) -> Vec<Packet> {
        self.0.lock().unwrap().packets.clone()
    }
}

impl Link for Ring {
    fn room(&mut self, control: bool) -> Result<Option<NonZeroUsize>, Broken> {
        let state = self.0.lock().unwrap();
        if state.broken {
            return Err(Fault::Readable { id: 0 }.into());
        }
        let kept = if control { 0 } else { state.reserve };
        Ok((state.room > kept).then_some(NonZeroUsize::new(MAX_PACKET).unwrap()))
    }

    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>) {
        let mut state = self.0.lock().unwrap();
        state.room -= 1;
        let len = payload.take(header.len as usize).len();
        let control = header.op != Op::Data as u16;
        state.packets.push(Packet { conn: header.src_port, serial: header.dst_port, len, control });
        if let Some(sender) = &state.ending {
            sender.forget(&Conn::new(header.src_port));
        }
    }

    fn fill(
        &mut self,
        header: VsockHdr,
        stamp: &mut dyn FnMut(&mut VsockHdr),
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken> {
        if self.room(false)?.is_none() {
            return Ok(None);
        }
        let result = read(&[]);
        let len = *result.as_ref().unwrap_or(&0);
        assert!(len <= most);
        if len == 0 {
            return Ok(Some((0, result)));
        }
        let mut header = VsockHdr { len: len as u32, ..header };
        stamp(&mut header);
        self.put(&header, &mut Payload::bytes(&vec![0; len]));
        Ok(Some((1, result)))
    }

    fn publish(&mut self) -> bool {
        false
    }

    fn await_room(&mut self) -> bool {
        let mut state = self.0.lock().unwrap();
        state.awaited = true;
        state.room > state.reserve
    }
}

/// A connection.
#[derive(Clone)]
struct Conn {
    id: u32,
    queued: Arc<AtomicUsize>,
}

impl Conn {
    fn new(id: u32) -> Conn {
        Conn { id, queued: Arc::default() }
    }

    fn header(&self, serial: u32, op: Op) -> VsockHdr {
        VsockHdr { src_port: self.id, dst_port: serial, op: op as u16, ..VsockHdr::default() }
    }

    fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }
}

impl Owner for Conn {
    fn key(&self) -> usize {
        self.id as usize
    }

    fn stamp(&self, _: &mut VsockHdr) {}

    fn queued(&self) -> &AtomicUsize {
        &self.queued
    }
}

fn sender(ring: &Ring, direct: bool) -> Sender<Ring, Conn> {
    let sender = Sender::new(direct);
    assert!(sender.replace(Some(ring.clone())).is_none());
    sender
}

/// Sends `len` bytes; returns whether the worker has to move them.
fn send<L: Link>(sender: &Sender<L, Conn>, conn: &Conn, serial: u32, len: usize) -> bool {
    let bytes = vec![serial as u8; len];
    let (sent, effect) = sender.send(conn, conn.header(serial, Op::Data), &mut Payload::bytes(&bytes), usize::MAX);
    assert_eq!((sent, effect.broken), (len, None));
    effect.wake
}

fn flush<L: Link>(sender: &Sender<L, Conn>) {
    loop {
        let effect = sender.flush(|_| {});
        assert_eq!(effect.broken, None);
        if !effect.more {
            break;
        }
    }
}

#[test]
fn a_connection_that_ends_while_its_packet_is_sent_is_counted_once() {
    let ring = Ring::default();
    let sender = Arc::new(sender(&ring, true));
    ring.0.lock().unwrap().ending = Some(sender.clone());
    for packets in 1..4 {
        for id in 1..=3 {
            (0..packets).for_each(|serial| assert!(send(&sender, &Conn::new(id), serial, MAX_PACKET)));
        }
        ring.give(2);
        flush(&sender);
        // Two connections are gone, one waits; the peer forgets that as well.
        assert!(sender.is_waiting());
        sender.clear();
        assert!(!sender.is_waiting());
    }
    // What is queued from now on is seen, and sent.
    assert!(send(&sender, &Conn::new(9), 0, 100));
    assert!(sender.is_waiting());
    ring.give(1);
    flush(&sender);
    assert!(!sender.is_waiting());
    assert_eq!(ring.packets().last().map(|packet| packet.conn), Some(9));
    ring.0.lock().unwrap().ending = None;
}

/// A connection with a constant backlog of packets of one length.
struct Busy {
    conn: Conn,
    len: usize,
    next: u32,
    /// Bytes moved to the ring, as deficit round robin counts them.
    moved: usize,
}

impl Busy {
    fn new(id: u32, len: usize) -> Busy {
        Busy { conn: Conn::new(id), len, next: 0, moved: 0 }
    }

    /// Sends until `packets` packets are queued.
    fn top_up(&mut self, sender: &Sender<Ring, Conn>, packets: usize) {
        while self.conn.queued() < packets * self.len {
            assert!(send(sender, &self.conn, self.next, self.len));
            self.next += 1;
        }
    }
}

#[test]
fn connections_share_the_ring_by_bytes() {
    let ring = Ring::default();
    let sender = sender(&ring, true);
    let mut busy = [Busy::new(1, MAX_PACKET), Busy::new(2, 100), Busy::new(3, 3000)];
    let mut seen = 0;
    for step in 0..3000 {
        // No connection ever runs out of packets, however many are moved at once.
        let room = 1 + step * 7 % 41;
        busy.iter_mut().for_each(|busy| busy.top_up(&sender, room + 1));
        ring.give(room);
        flush(&sender);
        let packets = ring.packets();
        assert_eq!(packets.len(), seen + room);
        for packet in &packets[seen..] {
            busy[packet.conn as usize - 1].moved += packet.len + OVERHEAD;
            let moved = busy.each_ref().map(|busy| busy.moved);
            let difference = moved.iter().max().unwrap() - moved.iter().min().unwrap();
            assert!(difference <= 2 * (QUANTUM + OVERHEAD), "{moved:?} after {} packets", packets.len());
        }
        seen = packets.len();
    }
    let packets = ring.packets();
    for busy in &busy {
        assert!(busy.moved > 40 * QUANTUM, "connection {} was starved: {} bytes", busy.conn.id, busy.moved);
        let own = packets.iter().filter(|packet| packet.conn == busy.conn.id);
        assert!(own.clone().is_sorted_by_key(|packet| packet.serial));
        let bytes: usize = own.map(|packet| packet.len).sum();
        assert_eq!(bytes + busy.conn.queued(), busy.next as usize * busy.len, "bytes were lost or duplicated");
    }
    assert_eq!(sender.ways(), Ways { direct: 0, queued: seen as u64, dropped: 0 });
}

#[test]
fn a_newcomer_waits_for_at_most_one_round() {
    let ring = Ring::default();
    let sender = sender(&ring, true);
    let mut busy = [Busy::new(1, MAX_PACKET), Busy::new(2, 100), Busy::new(3, 3000)];
    let mut longest = 0;
    for id in 10..200 {
        // Newcomers arrive at any point of a round.
        busy.iter_mut().for_each(|busy| busy.top_up(&sender, 1000));
        ring.give(1 + id as usize % 97);
        flush(&sender);
        let before = ring.packets().len();
        assert!(send(&sender, &Conn::new(id), 0, 100));
        busy.iter_mut().for_each(|busy| busy.top_up(&sender, 1000));
        ring.give(500);
        flush(&sender);
        let packets = ring.packets();
        let waited =
            packets[before..].iter().position(|packet| packet.conn == id).expect("the newcomer is still waiting");
        for busy in &busy {
            let own = packets[before..before + waited].iter().filter(|packet| packet.conn == busy.conn.id);
            let bytes = own.map(|packet| packet.len + OVERHEAD).sum::<usize>();
            assert!(bytes <= QUANTUM + OVERHEAD, "{bytes} bytes of connection {} before {id}", busy.conn.id);
            longest = longest.max(bytes);
        }
    }
    assert!(longest > QUANTUM / 2, "no newcomer had to wait: {longest}");
}

#[test]
fn an_idle_connection_accumulates_no_deficit() {
    let ring = Ring::default();
    let sender = sender(&ring, false);
    let (one, other) = (Conn::new(1), Conn::new(2));
    for serial in 0..50 {
        // Alone, with an empty queue after each packet.
        send(&sender, &one, serial, 10);
        ring.give(1);
        flush(&sender);
    }
    for serial in 50..60 {
        send(&sender, &one, serial, MAX_PACKET);
        send(&sender, &other, serial, MAX_PACKET);
    }
    ring.give(20);
    flush(&sender);
    let turns: Vec<_> = ring.packets()[50..].iter().map(|packet| packet.conn).collect();
    assert_eq!(turns, [1, 2].repeat(10));
}

#[test]
fn control_packets_are_sent_before_data() {
    let ring = Ring::default();
    let sender = sender(&ring, true);
    let conns = [Conn::new(1), Conn::new(2)];
    for serial in 0..30 {
        conns.iter().for_each(|conn| assert!(send(&sender, conn, serial, 5000)));
    }
    let mut controls = 0;
    for step in 0..30 {
        let before = ring.packets().len();
        // Control packets that are tied to their owner, and resets; as many as there is room for, or fewer, or more.
        for _ in 0..step % 4 {
            let op = if controls % 2 == 0 { Op::CreditUpdate } else { Op::Reset };
            let header = VsockHdr { dst_port: controls, op: op as u16, ..VsockHdr::default() };
            assert!(sender.send_control(Some(&Conn::new(100 + controls)), header).wake);
            controls += 1;
        }
        ring.give(2);
        flush(&sender);
        let new = ring.packets()[before..].to_vec();
        assert_eq!(new.len(), 2);
        let (put, first) = (ring.packets().iter().filter(|packet| packet.control).count(), new[0]);
        assert!(new.is_sorted_by_key(|packet| !packet.control), "{new:?}");
        assert!(
            put as u32 == controls || new.iter().all(|packet| packet.control),
            "{first:?} was sent before control packets"
        );
    }
    ring.give(100);
    flush(&sender);
    let control = ring.packets().into_iter().filter(|packet| packet.control).map(|packet| packet.serial);
    assert!(control.eq(0..controls), "control packets keep their order");
    assert!(!sender.is_waiting());
}

#[test]
fn a_waiting_control_packet_is_not_queued_twice() {
    let ring = Ring::default();
    let sender = sender(&ring, true);
    let conns = [Conn::new(1), Conn::new(2)];
    let control = |conn: &Conn, op| sender.send_control(Some(conn), conn.header(0, op)).wake;
    let sent = |count| {
        ring.give(count);
        flush(&sender);
        assert!(!sender.is_waiting());
        assert_eq!(ring.packets().len(), count);
        assert!(std::mem::take(&mut ring.0.lock().unwrap().packets).iter().all(|packet| packet.control));
    };
    let all = || {
        assert!(conns.iter().all(|conn| control(conn, Op::CreditUpdate)));
        assert!(control(&conns[0], Op::CreditRequest));
        assert!(!control(&conns[0], Op::CreditUpdate));
    };
    all();
    // Taken out by the worker and put back, it still counts as waiting.
    flush(&sender);
    assert!(!control(&conns[0], Op::CreditUpdate));
    sent(3);
    // It can be queued again once it was sent or forgotten.
    all();
    sender.forget(&conns[0]);
    assert!(control(&conns[0], Op::CreditUpdate));
    sent(2);
    all();
    sender.clear();
    assert!(!sender.is_waiting());
    all();
    sent(3);
}

#[test]
fn data_packets_leave_buffers_for_control_packets() {
    let ring = Ring::new(5, 3);
    let sender = sender(&ring, true);
    let conn = Conn::new(1);
    let control = |serial| {
        let header = VsockHdr { dst_port: serial, op: Op::Reset as u16, ..VsockHdr::default() };
        sender.send_control(Some(&conn), header)
    };
    let waits: Vec<_> = (0..4).map(|serial| send(&sender, &conn, serial, 10)).collect();
    assert_eq!(waits, [false, false, true, true]);
    flush(&sender);
    assert_eq!(ring.packets().len(), 2, "two of five buffers");
    assert!(ring.is_awaited());
    // Queued, as data packets wait.
    assert!((0..4).all(|serial| control(serial).wake));
    flush(&sender);
    let packets = ring.packets();
    assert_eq!(packets.iter().map(|packet| packet.control).collect::<Vec<_>>(), [false, false, true, true, true]);
    assert!(sender.is_waiting());
    ring.give(5);
    flush(&sender);
    assert_eq!(ring.packets()[5], Packet { conn: 0, serial: 3, len: 0, control: true });
    // One more data packet: three buffers are left for control again.
    assert_eq!(ring.packets().len(), 7);
    ring.give(1);
    flush(&sender);
    assert!(!sender.is_waiting());
    assert!(!control(9).wake, "sent directly into a reserved buffer");
    assert_eq!(sender.ways(), Ways { direct: 3, queued: 6, dropped: 0 });
}

#[test]
fn direct_and_queued_packets_are_counted() {
    let ring = Ring::new(3, 0);
    let sender = sender(&ring, true);
    let (one, other) = (Conn::new(1), Conn::new(2));
    let ways = |direct, queued| assert_eq!(sender.ways(), Ways { direct, queued, dropped: 0 });
    assert!(!send(&sender, &one, 0, 2 * MAX_PACKET));
    ways(2, 0);
    // Part of it is sent directly, the rest is queued, and everything after it.
    assert!(send(&sender, &one, 1, 2 * MAX_PACKET));
    ways(3, 0);
    assert_eq!(one.queued(), MAX_PACKET);
    ring.give(1);
    assert!(send(&sender, &other, 0, 10));
    assert!(sender.send_control(None, VsockHdr::default()).wake);
    let mut copied = 0;
    let (result, effect) = sender.fill(
        &one,
        one.header(2, Op::Data),
        700,
        &mut |_| unreachable!("must not send directly"),
        &mut |target| {
            copied += target.len();
            Ok(500)
        },
    );
    assert_eq!((result.unwrap(), effect.wake, copied), (Some(500), true, 700));
    ways(3, 0);
    ring.give(10);
    let mut moved = Vec::new();
    assert_eq!(sender.flush(|conn| moved.push(conn.id)).broken, None);
    ways(3, 4);
    assert_eq!(moved, [1, 2, 1], "a whole quantum is one turn");
    assert_eq!((one.queued(), other.queued()), (0, 0));
    // The outbox is empty: sent directly again.
    assert!(!send(&sender, &one, 3, 10));
    assert!(!sender.send_control(Some(&one), VsockHdr::default()).wake);
    let (result, effect) = sender
        .fill(&one, one.header(4, Op::Data), 700, &mut |_| Ok(600), &mut |_| unreachable!("must not use the outbox"));
    assert_eq!((result.unwrap(), effect.wake), (Some(600), false));
    ways(6, 4);
    // A ring that is not running.
    let ring = sender.replace(None).unwrap();
    assert!(send(&sender, &one, 5, 10));
    flush(&sender);
    ways(6, 4);
    sender.replace(Some(ring));
    flush(&sender);
    ways(6, 5);

    let lens: Vec<_> = data_lens(&sender, 1);
    assert_eq!(lens, [MAX_PACKET, MAX_PACKET, MAX_PACKET, MAX_PACKET, 500, 10, 600, 10]);
}

/// Returns the lengths of a connection's data packets in the ring.
fn data_lens(sender: &Sender<Ring, Conn>, id: u32) -> Vec<usize> {
    let ring = sender.replace(None).unwrap();
    let packets = ring.packets();
    packets.iter().filter(|packet| packet.conn == id && !packet.control).map(|packet| packet.len).collect()
}

#[test]
fn answers_without_a_connection_are_dropped_when_too_many_wait() {
    let ring = Ring::default();
    let sender = sender(&ring, true);
    let answer = || sender.send_control(None, VsockHdr::default()).wake;
    assert!((0..UNOWNED).all(|_| answer()));
    assert!(!answer());
    assert!(!answer());
    assert_eq!(sender.ways().dropped, 2);
    // Control packets with an owner are not dropped.
    assert!((1..=100).all(|id| sender.send_control(Some(&Conn::new(id)), VsockHdr::default()).wake));
    // As many as were sent can be queued again, even if some were taken out and put back.
    ring.give(300);
    flush(&sender);
    flush(&sender);
    // Those with an owner were sent as well, in their turns.
    assert_eq!((0..400).filter(|_| answer()).count(), 200);
    assert_eq!(sender.ways(), Ways { direct: 0, queued: 300, dropped: 202 });
    sender.clear();
    assert_eq!((0..UNOWNED + 5).filter(|_| answer()).count(), UNOWNED);
    ring.give(2 * UNOWNED);
    flush(&sender);
    assert!(!sender.is_waiting());
}

/// Returns a sender whose worker has found the ring broken, with two data packets in the outbox, and a control packet if asked
/// for.
fn broken(conn: &Conn, control: bool) -> Sender<Ring, Conn> {
    let ring = Ring::default();
    let sender = sender(&ring, true);
    assert!(send(&sender, conn, 0, 10));
    assert!(send(&sender, conn, 1, 10));
    if control {
        assert!(sender.send_control(Some(conn), VsockHdr { dst_port: 2, op: 3, ..VsockHdr::default() }).wake);
    }
    ring.0.lock().unwrap().broken = true;
    assert!(sender.flush(|_| {}).broken.is_some());
    assert!(sender.replace(None).is_some());
    assert!(sender.is_waiting());
    flush(&sender);
    sender
}

/// The packet that the worker holds when it finds the ring broken stays queued too.
#[test]
fn queued_packets_survive_a_broken_ring() {
    for control in [false, true] {
        // The queue is restarted, and connections continue.
        let conn = Conn::new(1);
        let sender = broken(&conn, control);
        let fresh = Ring::new(10, 0);
        sender.replace(Some(fresh.clone()));
        flush(&sender);
        let serials: Vec<_> = fresh.packets().iter().map(|packet| packet.serial).collect();
        assert_eq!(serials, if control { vec![2, 0, 1] } else { vec![0, 1] });
        assert!(!sender.is_waiting());
        assert_eq!(conn.queued(), 0);
        assert!(!send(&sender, &conn, 2, 10), "sent directly, as the outbox is empty");

        // The outbox is cleared.
        let sender = broken(&conn, control);
        sender.clear();
        assert!(!sender.is_waiting());
    }
    // One owner's packets are dropped.
    let conn = Conn::new(1);
    let sender = broken(&conn, false);
    sender.forget(&conn);
    assert!(!sender.is_waiting());
}

const SIZE: u32 = 64;
/// A sixteenth of the ring, as in device.rs and driver.rs.
const RESERVE: usize = 4;

/// The rings of both ends: device to driver, and driver to device.
fn rings(acked: u64) -> (RxQueue, impl Inlet, impl Link, TxQueue) {
    let config = DriverConfig { acked, queue_size: SIZE, receive: 4096 };
    let Driver { region, file, rx, tx, .. } = Driver::new(config).unwrap();
    let mapped = Region::map(&file, 0, region.len() as u64, region.guest(), region.user()).unwrap();
    let memory = Arc::new(Table::default().with(mapped).unwrap());
    let base = if acked & bits::RING_PACKED != 0 { 0x8000_8000 } else { 0 };
    let receive = RxQueue::start(memory.clone(), acked, SIZE, rx.addresses(), base).unwrap();
    let transmit = TxQueue::start(memory, acked, SIZE, tx.addresses(), base).unwrap();
    (receive, rx, tx, transmit)
}

/// Takes all packets that have arrived: returns which are control packets, and the total bytes of data.
fn take_all(inlet: &mut impl Inlet) -> (Vec<bool>, usize) {
    let (mut controls, mut bytes) = (Vec::new(), 0);
    while inlet
        .take(|header, payload| {
            assert_eq!(header.len as usize, payload.len());
            controls.push(header.op != Op::Data as u16);
            bytes += payload.len();
        })
        .unwrap()
        .packets
        > 0
    {}
    (controls, bytes)
}

fn reserves(link: impl Link, inlet: &mut impl Inlet) {
    let sender = Sender::new(true);
    sender.replace(Some(link));
    let conn = Conn::new(1);
    let room = SIZE as usize - RESERVE;
    for serial in 0..room {
        assert!(!send(&sender, &conn, serial as u32, 100), "packet {serial} must be sent directly");
    }
    assert!(send(&sender, &conn, 0, 100));
    assert!((0..RESERVE + 1).all(|_| sender.send_control(None, conn.header(0, Op::CreditUpdate)).wake));
    flush(&sender);
    assert_eq!(sender.ways(), Ways { direct: room as u64, queued: RESERVE as u64, dropped: 0 });
    let (controls, bytes) = take_all(inlet);
    assert_eq!(controls, [vec![false; room], vec![true; RESERVE]].concat());
    assert_eq!(bytes, room * 100);
    flush(&sender);
    // There is room for data again, whose turn it has been all the time.
    assert_eq!(take_all(inlet), (vec![false, true], 100));
    assert!(!sender.is_waiting());
    assert_eq!(conn.queued(), 0);
    assert!(!send(&sender, &conn, 0, 100));
}

#[test]
fn real_rings_reserve_buffers_for_control_packets() {
    for bits in [0, bits::RING_PACKED, bits::IN_ORDER, bits::RING_PACKED | bits::IN_ORDER | bits::EVENT_IDX] {
        let acked = Features::all().bits() & !(bits::RING_PACKED | bits::IN_ORDER | bits::EVENT_IDX) | bits;
        let (receive, mut rx, tx, mut transmit) = rings(acked);
        reserves(receive, &mut rx);
        reserves(tx, &mut transmit);
    }
}

#[test]
fn each_part_of_a_split_packet_is_counted() {
    let (receive, mut rx, ..) = rings(Features::all().bits());
    let sender = Sender::new(true);
    sender.replace(Some(receive));
    let conn = Conn::new(1);
    // Each send takes 16 buffers; the ring has room for 60.
    let waits: Vec<_> = (0..5).map(|serial| send(&sender, &conn, serial, MAX_PACKET)).collect();
    assert_eq!(waits, [false, false, false, true, true]);
    assert_eq!(sender.ways(), Ways { direct: 60, queued: 0, dropped: 0 });
    assert_eq!(conn.queued(), (4 + 16) * 4096);
    assert_eq!(take_all(&mut rx).1, 60 * 4096);
    flush(&sender);
    // 21 packets rather than 20, because the connection's turn ends within a packet.
    assert_eq!(sender.ways(), Ways { direct: 60, queued: 21, dropped: 0 });
    assert_eq!(take_all(&mut rx).1, 20 * 4096);
    assert!(!sender.is_waiting());
}
