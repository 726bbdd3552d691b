//! net::Driver against net::{TxQueue, RxQueue}: two guests and a wire between them, on random schedules. A model beside
//! them knows of each frame whether it arrives, in how many buffers, and if not, which counter has it.

mod common;

use proptest::prelude::*;
use ringroad_frame::{Burst, Counters, MAX_FRAME, Snapshot};
use ringroad_mem::Span;
use ringroad_net::{Driver, DriverConfig, DriverError, Notice, RxQueue, TxQueue, bits};
use ringroad_ring::{BURST, SetupError};
use ringroad_wire::{ethernet, vnet_hdr};
use std::{collections::VecDeque, sync::Arc, time::Duration};

/// The most receive buffers that a frame may be spread over.
const MERGED: usize = 256;
/// Bytes after which a burst has no more frames.
const BURST_BYTES: usize = 256 << 10;

/// Of one guest.
#[derive(Clone, Copy, Debug)]
struct End {
    acked: u64,
    size: u32,
    /// What its buffers are made for.
    frame: usize,
}

impl End {
    fn buffer(&self) -> usize {
        ((self.header() + self.frame).div_ceil(64) | 1) * 64
    }

    fn header(&self) -> usize {
        match (self.acked & bits::NET_F_HOST_UDP_TUNNEL_GSO != 0, self.acked & bits::NET_F_HASH_REPORT != 0) {
            (true, _) => vnet_hdr::TUNNELED,
            (false, true) => vnet_hdr::HASHED,
            (false, false) => vnet_hdr::SIZE,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    /// Adds `count` frames of `len` to `len + spread` bytes.
    Send {
        count: usize,
        len: usize,
        spread: usize,
        publish: bool,
    },
    Publish,
    /// A burst from the sender to the receiver, in two parts if `split`.
    Carry {
        split: bool,
    },
    Reclaim,
    Receive,
    Refill,
    /// The device, or the receiver, waits for a notification if there is nothing to do.
    DeviceSleeps,
    ReceiverSleeps,
    /// Another device goes on where this one stops.
    Restart,
}

/// Queue size and frame.
fn end(shape: impl Strategy<Value = (u32, usize)>) -> impl Strategy<Value = End> {
    let long = [0.25, 0.25].map(prop::bool::weighted);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), long);
    (flags, shape).prop_map(|((packed, in_order, merge, event, indirect, [hash, tunnels]), (size, frame))| End {
        acked: common::acked(&[
            (packed, bits::RING_PACKED),
            (in_order, bits::IN_ORDER),
            (merge, bits::NET_F_MRG_RXBUF),
            (event, bits::EVENT_IDX),
            (indirect, bits::INDIRECT_DESC),
            (hash, bits::NET_F_HASH_REPORT),
            (tunnels, bits::NET_F_HOST_UDP_TUNNEL_GSO),
        ]),
        size: if packed { size } else { 1 << size.ilog2() },
        frame,
    })
}

fn op() -> impl Strategy<Value = Op> {
    let frames = prop_oneof![
        4 => (1..=40usize, 14..=70usize, 0..=20usize),
        4 => (1..=40usize, 14..=1600usize, 0..=300usize),
        2 => (1..=4usize, 14..=65000usize, 0..=1usize),
        // Runts, and what is too large.
        1 => (1..=3usize, 0..=13usize, 0..=4usize),
        1 => (1..=2usize, MAX_FRAME - 2..=MAX_FRAME + 3, 0..=2usize),
    ];
    prop_oneof![
        6 => (frames, prop::bool::weighted(0.9))
            .prop_map(|((count, len, spread), publish)| Op::Send { count, len, spread, publish }),
        1 => Just(Op::Publish),
        6 => prop::bool::weighted(0.2).prop_map(|split| Op::Carry { split }),
        3 => Just(Op::Reclaim),
        5 => Just(Op::Receive),
        1 => Just(Op::Refill),
        2 => Just(Op::DeviceSleeps),
        2 => Just(Op::ReceiverSleeps),
        1 => Just(Op::Restart),
    ]
}

/// The bytes of a frame, which no other frame has.
fn bytes(serial: u64, len: usize) -> Vec<u8> {
    let step = serial as u8 | 1;
    let mut frame: Vec<u8> = (0..len).map(|at| (at as u8).wrapping_mul(step) ^ (at >> 8) as u8).collect();
    let stamp = len.min(8);
    frame[..stamp].copy_from_slice(&serial.to_le_bytes()[..stamp]);
    frame
}

fn gather(parts: &[Span<'_>]) -> Vec<u8> {
    let mut all = Vec::new();
    for part in parts {
        let at = all.len();
        all.resize(at + part.len(), 0);
        part.read(&mut all[at..]);
    }
    all
}

/// A frame that was sent: its number and length.
type Sent = (u64, usize);

struct Wire {
    sender_end: End,
    receiver_end: End,
    sender: Driver,
    receiver: Driver,
    tx: TxQueue,
    rx: RxQueue,
    tx_counters: Arc<Counters>,
    rx_counters: Arc<Counters>,
    burst: Burst,
    serial: u64,
    /// Added and not taken; the first `visible` are published.
    waiting: VecDeque<Sent>,
    visible: usize,
    taken: usize,
    /// Of those: given back, but kept from the driver for a while.
    late: usize,
    reclaimed: usize,
    /// Placed and not received, with the number of their buffers.
    arriving: VecDeque<(Sent, usize)>,
    /// Receive buffers that the device has filled, those that were taken back, and those of complete frames.
    filled: usize,
    emptied: usize,
    delivered: usize,
    device_awake: bool,
    /// The last bursts had so many bytes that frames were left for the next one.
    long: bool,
    receiver_awake: bool,
    sent: Snapshot,
    received: Snapshot,
}

impl Wire {
    fn new(sender_end: End, receiver_end: End) -> Wire {
        let sender = common::driver(sender_end.acked, sender_end.size, sender_end.frame);
        let mut receiver = common::driver(receiver_end.acked, receiver_end.size, receiver_end.frame);
        let (tx, tx_counters) = common::tx(&sender, sender_end.acked, sender_end.size);
        let (rx, rx_counters) = common::rx(&receiver, receiver_end.acked, receiver_end.size);
        assert_eq!(receiver.rx[0].refill(), receiver_end.size as usize);
        // The device does not wait for buffers; with EVENT_IDX in a split ring the first ones are news all the same.
        let is_news = receiver_end.acked & (bits::EVENT_IDX | bits::RING_PACKED) == bits::EVENT_IDX;
        assert_eq!(receiver.rx[0].wants_notification(), is_news);
        Wire {
            sender_end,
            receiver_end,
            sender,
            receiver,
            tx,
            rx,
            tx_counters,
            rx_counters,
            burst: Burst::default(),
            serial: 0,
            waiting: VecDeque::new(),
            visible: 0,
            taken: 0,
            late: 0,
            reclaimed: 0,
            arriving: VecDeque::new(),
            filled: 0,
            emptied: 0,
            delivered: 0,
            device_awake: true,
            long: false,
            receiver_awake: true,
            sent: Snapshot::default(),
            received: Snapshot::default(),
        }
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Send { count, len, spread, publish } => {
                let Wire { sender, serial, waiting, .. } = self;
                let free = sender.tx[0].free();
                let hashed = self.sender_end.header() != vnet_hdr::SIZE;
                let fill = |_, place: Span<'_>| {
                    let len = len + *serial as usize % (spread + 1);
                    assert_eq!(place.write(&bytes(*serial, len)), len);
                    waiting.push_back((*serial, len));
                    *serial += 1;
                    len
                };
                let tx = &mut sender.tx[0];
                let added = if hashed { tx.add_behind(count, fill) } else { tx.add(count, fill) };
                assert_eq!(added, count.min(free));
                if publish {
                    self.publish();
                }
            }
            Op::Publish => self.publish(),
            Op::Carry { split } if self.device_awake => {
                self.carry(split);
            }
            Op::Carry { .. } => {}
            Op::Reclaim => {
                self.reclaim();
            }
            Op::Receive if self.receiver_awake => {
                self.receive();
            }
            Op::Receive => {}
            // Not those of a frame of which only a part has been received.
            Op::Refill => assert_eq!(self.receiver.rx[0].refill(), 0),
            Op::DeviceSleeps => {
                self.device_awake = self.tx.enable_notification();
                self.late = 0;
            }
            Op::ReceiverSleeps => self.receiver_awake = self.receiver.rx[0].enable_notification(),
            Op::Restart => {
                let End { acked, size, .. } = self.sender_end;
                let (at, memory, base) = (self.sender.tx[0].addresses(), self.tx.memory().clone(), self.tx.base());
                self.tx = TxQueue::start(memory, acked, size, at, base, self.tx_counters.clone()).unwrap();
                self.device_awake = true;
                self.late = 0;
                let End { acked, size, .. } = self.receiver_end;
                let (at, memory, base) = (self.receiver.rx[0].addresses(), self.rx.memory().clone(), self.rx.base());
                self.rx = RxQueue::start(memory, acked, size, at, base, self.rx_counters.clone()).unwrap();
            }
        }
        assert!(self.device_awake || self.visible == 0, "the device sleeps and was not told");
        assert!(self.receiver_awake || self.filled == self.emptied, "the receiver sleeps and was not told");
    }

    fn publish(&mut self) {
        self.sender.tx[0].publish();
        self.visible = self.waiting.len();
        if self.sender.tx[0].wants_notification() && !self.device_awake {
            self.device_awake = true;
            self.tx.disable_notification();
        }
    }

    fn carry(&mut self, split: bool) -> usize {
        let taken = self.tx.take(&mut self.burst).unwrap();
        let most = self.visible.min(BURST);
        // Long frames wait for the next burst, and that one and those after it are shorter. What is no frame does not count.
        let mut lengths = self.waiting.iter().take(taken).map(|&(_, len)| len);
        let bytes: usize = lengths.clone().filter(|len| (ethernet::HEADER..=MAX_FRAME).contains(len)).sum();
        let last = lengths.next_back().unwrap_or(0);
        assert!(bytes.saturating_sub(last) <= BURST_BYTES, "{bytes} bytes in {taken} frames");
        self.long |= bytes > BURST_BYTES;
        assert!(taken == most || self.long && (1..most).contains(&taken), "{taken} of {most}");
        self.long &= taken < BURST || bytes > BURST_BYTES;
        if taken == 0 {
            // Nothing is kept back from a driver that waits.
            self.late = 0;
            return 0;
        }
        self.sent.bursts += 1;
        self.visible -= taken;
        self.taken += taken;
        let mut frames = Vec::new();
        for (serial, len) in self.waiting.drain(..taken) {
            match len {
                0..ethernet::HEADER => self.sent.runt += 1,
                ethernet::HEADER..=MAX_FRAME => {
                    self.sent.frames += 1;
                    self.sent.bytes += len as u64;
                    frames.push((serial, len));
                }
                _ => self.sent.oversize += 1,
            }
        }
        assert_eq!(self.burst.frames().iter().map(|frame| frame.len()).collect::<Vec<_>>(), {
            frames.iter().map(|&(_, len)| len).collect::<Vec<_>>()
        });
        let (mut one, mut other): (Vec<u8>, Vec<u8>) = ((0..frames.len() as u8).collect(), Vec::new());
        if split {
            (one, other) = one.into_iter().partition(|index| index % 3 != 1);
        }
        for which in [one, other] {
            if which.is_empty() {
                continue;
            }
            let expected = self.expect(which.iter().map(|&index| frames[index as usize]));
            assert_eq!(self.rx.put(&self.burst, &which).unwrap(), expected);
            let notice = self.rx.settle(Duration::ZERO);
            if notice == Notice::Now && !self.receiver_awake {
                self.receiver_awake = true;
                self.receiver.rx[0].disable_notification();
            }
        }
        self.tx.done(&mut self.burst);
        // In a packed ring what is before its end is not kept back when more follows.
        let size = self.sender_end.size as usize;
        let before = (self.taken - taken) % size;
        let packed = self.sender_end.acked & bits::RING_PACKED != 0;
        self.late = match before + taken {
            end if packed && end > size => end - size,
            _ if packed && before == 0 => taken,
            _ => self.late + taken,
        };
        // Less than a quarter of the ring.
        self.late = if self.late < size / 4 { self.late } else { 0 };
        taken
    }

    /// What has to become of these frames; returns how many of them are placed.
    fn expect(&mut self, frames: impl Iterator<Item = Sent>) -> usize {
        self.received.bursts += 1;
        let merge = self.receiver_end.acked & bits::NET_F_MRG_RXBUF != 0;
        let mut placed = 0;
        for (serial, len) in frames {
            let free = self.receiver_end.size as usize - (self.filled - self.delivered);
            let buffers = (self.receiver_end.header() + len).div_ceil(self.receiver_end.buffer());
            if buffers <= free && buffers <= if merge { MERGED } else { 1 } {
                self.received.frames += 1;
                self.received.bytes += len as u64;
                self.filled += buffers;
                self.arriving.push_back(((serial, len), buffers));
                placed += 1;
            } else if free == 0 || merge && free < MERGED {
                self.received.full += 1;
            } else {
                self.received.oversize += 1;
            }
        }
        placed
    }

    fn reclaim(&mut self) -> usize {
        let count = self.sender.tx[0].reclaim().unwrap();
        assert_eq!(count, (self.taken - self.late - self.reclaimed).min(BURST));
        self.reclaimed += count;
        assert_eq!(self.sender.tx[0].under_way(), self.serial as usize - self.reclaimed);
        count
    }

    fn receive(&mut self) -> usize {
        let Wire { receiver, arriving, delivered, .. } = self;
        let count = receiver.rx[0].receive(true, |parts| {
            let ((serial, len), buffers) = arriving.pop_front().expect("a frame that nobody sent");
            assert_eq!(parts.len(), buffers);
            assert!(gather(parts) == bytes(serial, len), "frame {serial} of {len} bytes is damaged");
            *delivered += buffers;
        });
        let count = count.unwrap();
        assert_eq!(count, (self.filled - self.emptied).min(BURST));
        self.emptied += count;
        count
    }

    fn finish(mut self) {
        self.publish();
        // A single `|`: all three.
        while (self.carry(false) > 0) | (self.receive() > 0) | (self.reclaim() > 0) {}
        assert_eq!((self.waiting.len(), self.arriving.len()), (0, 0));
        assert_eq!(self.sender.tx[0].under_way(), 0);
        let (sent, received) = (self.tx_counters.snapshot(), self.rx_counters.snapshot());
        assert_eq!((sent, received), (self.sent, self.received));
        assert_eq!(sent.frames + sent.dropped(), self.serial);
        assert_eq!(received.frames + received.dropped(), sent.frames);
        // Nobody keeps a guest's memory when there is nothing to do.
        let (memory, other) = (self.tx.memory().clone(), self.rx.memory().clone());
        drop((self.tx, self.rx));
        assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&other)), (1, 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_frame_arrives_or_is_counted(
        sender in end((1..=64u32, Just(MAX_FRAME + 64))),
        receiver in end(prop_oneof![
            (1..=600u32, 14..=200usize),
            (1..=600u32, 14..=2000usize),
            (1..=32u32, Just(65000usize)),
        ]),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut wire = Wire::new(sender, receiver);
        for op in ops {
            wire.run(op);
        }
        wire.finish();
    }
}

#[test]
fn what_was_prepared_is_sent_from_any_pair_of_queues() {
    for packed in [0, bits::RING_PACKED] {
        let (acked, queue_pairs, queue_size) = (bits::VERSION_1 | packed, 3, 64);
        let config = DriverConfig { acked, queue_pairs, queue_size, frame: 1518, huge: false };
        let mut guest = Driver::new(config).unwrap();
        let memory = common::table(&guest);
        let (mut burst, base) = (Burst::default(), common::base(acked));
        let serial = |pair: usize, id: u16| pair as u64 * 1000 + u64::from(id);
        for pair in 0..3 {
            guest.rx[pair].refill();
            let mut ids = Vec::new();
            guest.tx[pair].prepare(|id, place| {
                assert_eq!(place.write(&bytes(serial(pair, id), 1518)), 1518);
                ids.push(id);
            });
            assert_eq!(ids, (0..64).collect::<Vec<_>>());
        }
        for pair in 0..3 {
            let start = |at| (memory.clone(), acked, queue_size, at, base, Arc::<Counters>::default());
            let (memory, acked, size, at, base, counters) = start(guest.tx[pair].addresses());
            let mut tx = TxQueue::start(memory, acked, size, at, base, counters).unwrap();
            let (memory, acked, size, at, base, counters) = start(guest.rx[pair].addresses());
            let mut rx = RxQueue::start(memory, acked, size, at, base, counters).unwrap();
            let (mut sent, mut received) = (VecDeque::new(), 0);
            for _ in 0..5 {
                guest.tx[pair].reclaim().unwrap();
                guest.tx[pair].add(20, |id, _| {
                    sent.push_back(id);
                    1518
                });
                guest.tx[pair].publish();
                assert_eq!(tx.take(&mut burst), Ok(20));
                assert_eq!(rx.put(&burst, &(0..20).collect::<Vec<_>>()), Ok(20));
                tx.done(&mut burst);
                let count = guest.rx[pair].receive(true, |parts| {
                    received += 1;
                    assert!(gather(parts) == bytes(serial(pair, sent.pop_front().unwrap()), 1518));
                });
                assert_eq!(count, Ok(20));
            }
            assert_eq!((sent.len(), received), (0, 100));
        }
    }
}

#[test]
fn buffers_of_receive_and_transmit_queues_lie_half_a_page_apart_in_their_pages() {
    for packed in [0, bits::RING_PACKED] {
        for (queue_pairs, frame) in [(1, 64), (1, 1518), (3, 1518)] {
            let config =
                DriverConfig { acked: bits::VERSION_1 | packed, queue_pairs, queue_size: 256, frame, huge: false };
            let guest = Driver::new(config).unwrap();
            for (rx, tx) in guest.rx.iter().zip(&guest.tx) {
                for id in 0..256 {
                    let (received, sent) = (rx.buffer(id).unwrap(), tx.buffer(id).unwrap());
                    assert_eq!((sent - received) % 4096, 2048, "{packed:x} {queue_pairs} {frame} {id}");
                }
            }
        }
    }
}

#[test]
fn queues_that_are_not_possible_are_refused() {
    for (packed, queue_size) in [(0, 0), (0, 3), (0, 65536), (bits::RING_PACKED, 0), (bits::RING_PACKED, 32769)] {
        let acked = bits::VERSION_1 | packed;
        let config = DriverConfig { acked, queue_pairs: 1, queue_size, frame: 64, huge: false };
        let error = Driver::new(config).err().unwrap();
        assert!(matches!(error, DriverError::Setup(SetupError::Size { size, .. }) if size == queue_size), "{error}");
    }
}
