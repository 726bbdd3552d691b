//! Frames and receive buffers of any shape, made with the driver end of a bare ring: where descriptors begin and end
//! means nothing (virtio 1.3, 2.7.4.1), and what is no frame costs a counter or the queue.

mod common;

use common::acked;
use proptest::prelude::*;
use ringroad_frame::{Burst, Counters, MAX_FRAME, Snapshot};
use ringroad_mem::{Region, Table};
use ringroad_net::{RxQueue, TxQueue, bits};
use ringroad_ring::{Addresses, BURST, Buffer, DriverRing, Fault, Features, IndirectTables, Tuning, Used};
use ringroad_wire::vnet_hdr;
use std::{collections::VecDeque, fs::File, sync::Arc};

const GUEST: u64 = 0x1_0000_0000;
const HEADER: usize = vnet_hdr::SIZE;
/// What receive buffers hold before anything is received.
const UNTOUCHED: u8 = 0xee;

/// A queue in a guest's memory: its ring, indirect tables, and an arena for buffers, each used once.
struct Guest {
    acked: u64,
    size: u32,
    region: Arc<Region>,
    memory: Arc<Table>,
    at: Addresses,
    ring: DriverRing,
    /// Offset of what is free of the arena.
    next: usize,
    file: File,
}

impl Guest {
    /// `entries`: of each indirect table. `cut`: where in the arena the device's mapping of it is in two.
    fn new(acked: u64, size: u32, entries: usize, arena: usize, cut: Option<usize>) -> Guest {
        Guest::at(GUEST, acked, size, entries, arena, cut)
    }

    fn at(guest: u64, acked: u64, size: u32, entries: usize, arena: usize, cut: Option<usize>) -> Guest {
        let features = Features::negotiated(acked);
        let tables = DriverRing::bytes(features, size).next_multiple_of(4096);
        let start = tables + size as usize * entries * 16;
        let (region, file) = Region::create(start + arena, guest, false).unwrap();
        let indirect = IndirectTables::new(region.clone(), tables, size, entries).unwrap();
        let (mut ring, at) = DriverRing::start(&region, 0, features, size).unwrap();
        ring.set_indirect(indirect);
        let (mut table, mut from) = (Table::default(), 0);
        for to in cut.map(|cut| start + cut).into_iter().chain([start + arena]) {
            let offset = from as u64;
            let part = Region::map(&file, offset, (to - from) as u64, guest + offset, region.user() + offset).unwrap();
            table = table.with(part).unwrap();
            from = to;
        }
        Guest { acked, size, region, memory: Arc::new(table), at, ring, next: start, file }
    }

    fn plain(acked: u64) -> Guest {
        Guest::new(acked, 64, 8, 1 << 20, None)
    }

    fn tx(&self) -> (TxQueue, Arc<Counters>) {
        let counters = Arc::new(Counters::default());
        let base = common::base(self.acked);
        let queue = TxQueue::start(self.memory.clone(), self.acked, self.size, self.at, base, counters.clone());
        (queue.unwrap(), counters)
    }

    fn rx(&self) -> (RxQueue, Arc<Counters>) {
        let counters = Arc::new(Counters::default());
        let base = common::base(self.acked);
        let queue = RxQueue::start(self.memory.clone(), self.acked, self.size, self.at, base, counters.clone());
        (queue.unwrap(), counters)
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        let place = self.region.span((address - self.region.guest()) as usize, bytes.len()).unwrap();
        assert_eq!(place.write(bytes), bytes.len());
    }

    fn read(&self, buffers: &[Buffer]) -> Vec<u8> {
        let mut all = Vec::new();
        for buffer in buffers {
            let at = all.len();
            all.resize(at + buffer.len as usize, 0);
            self.region
                .span((buffer.address - self.region.guest()) as usize, buffer.len as usize)
                .unwrap()
                .read(&mut all[at..]);
        }
        all
    }

    /// New buffers of these lengths that hold these bytes, a byte apart so that none continues another.
    fn buffers(&mut self, lens: &[usize], bytes: &[u8]) -> Vec<Buffer> {
        let mut left = bytes;
        lens.iter()
            .map(|&len| {
                let address = self.region.guest() + self.next as u64;
                self.next += len + 1;
                let (bytes, rest) = left.split_at(len.min(left.len()));
                left = rest;
                self.write(address, bytes);
                Buffer { address, len: len as u32 }
            })
            .collect()
    }

    /// Makes a frame available, whole.
    fn send(&mut self, bytes: &[u8]) {
        let buffers = self.buffers(&[bytes.len()], bytes);
        self.ring.add(&buffers, &[]).unwrap();
        self.ring.publish();
    }

    /// Makes receive buffers available; the first `readable` are for the device to read.
    fn offer(&mut self, lens: &[usize], readable: usize) -> Vec<Buffer> {
        let all = self.buffers(lens, &vec![UNTOUCHED; lens.iter().sum()]);
        self.ring.add(&all[..readable], &all[readable..]).unwrap();
        self.ring.publish();
        all
    }
}

/// Cuts `len` bytes into at most `most` pieces of these sizes, over and over; the last has the rest.
fn cut(len: usize, sizes: &[usize], most: usize) -> Vec<usize> {
    let (mut pieces, mut left) = (Vec::new(), len);
    for &size in sizes.iter().cycle() {
        if left == 0 {
            break;
        }
        let piece = if pieces.len() + 1 == most { left } else { size.min(left) };
        pieces.push(piece);
        left -= piece;
    }
    pieces
}

fn frame(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * (2 * seed + 1) + (at >> 8) + seed) as u8).collect()
}

/// As it is received: a header that promises nothing, in `buffers` buffers.
fn received(frame: &[u8], buffers: u16) -> Vec<u8> {
    let mut all = vec![0; 10];
    all.extend(buffers.to_le_bytes());
    all.extend(frame);
    all
}

fn all_layouts() -> impl Iterator<Item = u64> {
    [false, true].into_iter().flat_map(|packed| {
        [false, true].map(|in_order| acked(&[(packed, bits::RING_PACKED), (in_order, bits::IN_ORDER)]))
    })
}

fn any_acked() -> impl Strategy<Value = u64> {
    any::<[bool; 5]>().prop_map(|[packed, in_order, merge, event, indirect]| {
        acked(&[
            (packed, bits::RING_PACKED),
            (in_order, bits::IN_ORDER),
            (merge, bits::NET_F_MRG_RXBUF),
            (event, bits::EVENT_IDX),
            (indirect, bits::INDIRECT_DESC),
        ])
    })
}

/// Sizes of pieces: all in one, the header alone, byte by byte, anything.
fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        Just(vec![usize::MAX]),
        Just(vec![HEADER, usize::MAX]),
        Just(vec![1]),
        Just(vec![5, 7, 14, usize::MAX]),
        prop::collection::vec(1..=40usize, 1..=6),
        prop::collection::vec(1..=3000usize, 1..=4),
    ]
}

#[derive(Clone, Debug)]
struct Shapes {
    acked: u64,
    /// Entries of the ring.
    log_size: u32,
    cut: usize,
}

fn shapes() -> impl Strategy<Value = Shapes> {
    (any_acked(), 3..=6u32, 1..100_000usize).prop_map(|(acked, log_size, cut)| Shapes { acked, log_size, cut })
}

/// All on, as usual, all off, or one of them off: what comes out is the same.
fn tuning() -> impl Strategy<Value = Tuning> {
    let all = Tuning::default();
    prop_oneof![
        4 => Just(all),
        1 => Just(Tuning::NONE),
        2 => Just(Tuning { fast_path: false, ..all }),
        1 => Just(Tuning { shadow_used: false, ..all }),
        1 => Just(Tuning { prefetch: 0, ..all }),
        1 => Just(Tuning { prefetch_write: false, ..all }),
        1 => Just(Tuning { translation_cache: false, ..all }),
        1 => Just(Tuning { small_copy: false, ..all }),
    ]
}

/// A frame's length, header and pieces.
type Shape = (usize, [u8; HEADER], Vec<usize>);

fn frames() -> impl Strategy<Value = Vec<Shape>> {
    let len = prop_oneof![4 => 14..=70usize, 4 => 14..=1600usize, 1 => 14..=65000usize];
    prop::collection::vec((len, any::<[u8; HEADER]>(), cuts()), 1..40)
}

/// A receive buffer's length and pieces.
fn rooms() -> impl Strategy<Value = Vec<(usize, Vec<usize>)>> {
    let len = prop_oneof![2 => HEADER..=40usize, 4 => HEADER..=2000usize, 1 => HEADER..=70000usize];
    prop::collection::vec((len, cuts()), 1..20)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_of_frame_goes_into_any_shape_of_buffer(
        sender in shapes(),
        receiver in shapes(),
        frames in frames(),
        rooms in rooms(),
        bursts in prop::collection::vec((1..=40usize, 0..=64usize), 1..8),
        tunings in (tuning(), tuning()),
        aligned in any::<bool>(),
    ) {
        const ARENA: usize = 8 << 20;
        // As many entries as pieces fit into the device's own list, so that it is never the limit.
        let mut from = Guest::new(sender.acked, 1 << sender.log_size, 64, ARENA, Some(sender.cut));
        let mut to = Guest::new(receiver.acked, 1 << receiver.log_size, 8, ARENA, Some(receiver.cut));
        let (mut tx, tx_counters) = from.tx();
        let (mut rx, rx_counters) = to.rx();
        tx.tune(tunings.0);
        rx.tune(tunings.1);
        let merge = receiver.acked & bits::NET_F_MRG_RXBUF != 0;
        let most = if receiver.acked & bits::INDIRECT_DESC != 0 { 8 } else { to.size as usize };
        let mut burst = Burst::default();
        let mut unsent: VecDeque<(usize, &Shape)> = frames.iter().enumerate().collect();
        let mut sent = VecDeque::new();
        let mut offered: VecDeque<Vec<Buffer>> = VecDeque::new();
        let mut filled: VecDeque<(Vec<Vec<Buffer>>, Vec<u8>)> = VecDeque::new();
        let mut rooms = rooms.iter().cycle();
        let mut expected = Snapshot::default();
        for &(count, offer) in bursts.iter().cycle() {
            if unsent.is_empty() && sent.is_empty() {
                break;
            }
            for _ in 0..offer {
                // Stop while there is memory for the largest one.
                if to.next + 70_000 * 2 > to.region.len() {
                    break;
                }
                let (len, sizes) = rooms.next().unwrap();
                let lens = cut(*len, sizes, most);
                if aligned {
                    // The header is the end of a line, as with DPDK's drivers.
                    to.next = to.next.next_multiple_of(64) + 64 - HEADER;
                }
                let buffers = to.buffers(&lens, &vec![UNTOUCHED; *len]);
                if to.ring.add(&[], &buffers).is_err() {
                    break;
                }
                offered.push_back(buffers);
            }
            to.ring.publish();
            for _ in 0..count {
                let Some(&(seed, (len, header, sizes))) = unsent.front() else { break };
                let bytes = [&header[..], &frame(seed, *len)].concat();
                let lens = cut(bytes.len(), sizes, from.size as usize);
                let buffers = from.buffers(&lens, &bytes);
                if from.ring.add(&buffers, &[]).is_err() {
                    from.next = (buffers[0].address - GUEST) as usize;
                    break;
                }
                sent.push_back(frame(seed, *len));
                unsent.pop_front();
            }
            from.ring.publish();

            let taken = tx.take(&mut burst).unwrap();
            prop_assert!(taken > 0 && taken <= sent.len().min(BURST));
            prop_assert_eq!(burst.frames().len(), taken);
            expected.bursts += 1;
            let mut placed = 0;
            for frame in sent.drain(..taken) {
                let total = HEADER + frame.len();
                let mut room = 0;
                let len = |chain: &Vec<Buffer>| chain.iter().map(|buffer| buffer.len as usize).sum::<usize>();
                let enough = offered.iter().position(|chain| {
                    room += len(chain);
                    room >= total
                });
                match enough {
                    Some(last) if last == 0 || merge => {
                        let chains = offered.drain(..=last).collect();
                        expected.bytes += frame.len() as u64;
                        placed += 1;
                        filled.push_back((chains, received(&frame, last as u16 + 1)));
                    }
                    _ if merge || offered.is_empty() => expected.full += 1,
                    _ => expected.oversize += 1,
                }
            }
            expected.frames += placed;
            let all: Vec<u8> = (0..taken as u8).collect();
            prop_assert_eq!(rx.put(&burst, &all).unwrap() as u64, placed);
            tx.done(&mut burst);
            // Shows the driver what it would keep back else.
            tx.wants_notification(true);
            prop_assert_eq!(from.ring.take_used(&mut [Used::default(); BURST]).unwrap(), taken);

            while let Some((chains, bytes)) = filled.pop_front() {
                let mut left = &bytes[..];
                for chain in &chains {
                    let mut used = [Used::default()];
                    prop_assert_eq!(to.ring.take_used(&mut used).unwrap(), 1);
                    let now = to.read(chain);
                    let (mine, rest) = left.split_at(left.len().min(now.len()));
                    left = rest;
                    prop_assert_eq!(used[0].len as usize, mine.len());
                    prop_assert!(now[..mine.len()] == *mine, "damaged");
                    prop_assert!(now[mine.len()..].iter().all(|&byte| byte == UNTOUCHED), "written beyond the frame");
                }
                prop_assert!(left.is_empty());
            }
            prop_assert_eq!(to.ring.take_used(&mut [Used::default()]).unwrap(), 0);
        }
        prop_assert_eq!(rx_counters.snapshot(), expected);
        let tx_counters = tx_counters.snapshot();
        prop_assert_eq!((tx_counters.frames, tx_counters.dropped()), (frames.len() as u64, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    /// Of a source that reads to where the frames go.
    #[test]
    fn frames_are_read_into_any_shape_of_buffer(
        receiver in shapes(),
        rooms in rooms(),
        room in 26..=4000usize,
        sources in prop::collection::vec(prop::collection::vec(prop_oneof![0..=20usize, 0..=4100usize], 0..50), 1..8),
    ) {
        let mut to = Guest::new(receiver.acked, 1 << receiver.log_size, 8, 8 << 20, Some(receiver.cut));
        let (mut rx, counters) = to.rx();
        let merge = receiver.acked & bits::NET_F_MRG_RXBUF != 0;
        let most = if receiver.acked & bits::INDIRECT_DESC != 0 { 8 } else { to.size as usize };
        let mut offered: VecDeque<Vec<Buffer>> = VecDeque::new();
        let mut rooms = rooms.iter().cycle();
        let mut expected = Snapshot::default();
        for lens in sources {
            while to.next + 150_000 < to.region.len() {
                let (len, sizes) = rooms.next().unwrap();
                let buffers = to.buffers(&cut(*len, sizes, most), &[]);
                if to.ring.add(&[], &buffers).is_err() {
                    break;
                }
                offered.push_back(buffers);
            }
            to.ring.publish();
            let capacity = |chain: &Vec<Buffer>| chain.iter().map(|buffer| buffer.len as usize).sum::<usize>();
            let (mut placed, mut refused, mut reads) = (Vec::new(), false, 0);
            for (seed, &len) in lens.iter().chain([&0]).enumerate().take(BURST) {
                let mut reserved = 0;
                let count = 1 + offered.iter().take_while(|chain| {
                    reserved += capacity(chain);
                    reserved < room
                }).count();
                refused = reserved < room || count > 1 && !merge;
                if refused || seed == lens.len() {
                    break;
                }
                reads += 1;
                let total = HEADER + len;
                if total > reserved {
                    expected.oversize += 1;
                } else if len < 14 {
                    expected.runt += 1;
                } else {
                    let (mut held, mut chains) = (0, Vec::new());
                    while held < total {
                        held += capacity(&offered[0]);
                        chains.push(offered.pop_front().unwrap());
                    }
                    expected.bytes += len as u64;
                    placed.push((received(&frame(seed, len), chains.len() as u16), chains));
                }
            }
            expected.frames += placed.len() as u64;
            expected.bursts += u64::from(!placed.is_empty());

            let mut read = 0;
            let filled = rx.fill(room, &mut |spans| {
                let len = *lens.get(read)?;
                let bytes = [vec![0xff; HEADER], frame(read, len)].concat();
                read += 1;
                let mut left = &bytes[..];
                spans.iter().for_each(|span| left = &left[span.write(left)..]);
                assert!(spans.iter().map(|span| span.len()).sum::<usize>() >= room);
                Some(bytes.len())
            });
            prop_assert_eq!(read, reads);
            let nothing = refused && reads == 0;
            prop_assert_eq!(filled, Ok((!nothing).then_some(placed.len())));
            for (bytes, chains) in placed {
                let mut left = &bytes[..];
                for chain in &chains {
                    let mut used = [Used::default()];
                    prop_assert_eq!(to.ring.take_used(&mut used).unwrap(), 1);
                    let now = to.read(chain);
                    let (mine, rest) = left.split_at(left.len().min(now.len()));
                    left = rest;
                    prop_assert_eq!(used[0].len as usize, mine.len());
                    prop_assert!(now[..mine.len()] == *mine, "damaged");
                }
            }
            prop_assert_eq!(to.ring.take_used(&mut [Used::default()]).unwrap(), 0);
        }
        prop_assert_eq!(counters.snapshot(), expected);
    }
}

#[test]
fn a_header_in_a_line_of_its_own_is_written_when_it_differs() {
    for acked in all_layouts() {
        let (mut from, mut to) = (Guest::plain(acked), Guest::plain(acked));
        let ((mut tx, _), (mut rx, _)) = (from.tx(), to.rx());
        let mut places = Vec::new();
        for there in [received(&[], 1), vec![UNTOUCHED; HEADER], vec![0; HEADER]] {
            to.next = to.next.next_multiple_of(64) + 64 - HEADER;
            places.push(to.offer(&[200], 0));
            to.write(places[places.len() - 1][0].address, &there);
            from.send(&[vec![0xff; HEADER], frame(places.len(), 100)].concat());
        }
        let mut burst = Burst::default();
        assert_eq!(tx.take(&mut burst), Ok(3));
        assert_eq!(rx.put(&burst, &[0, 1, 2]), Ok(3));
        for (index, place) in places.iter().enumerate() {
            assert_eq!(to.read(place)[..HEADER + 100], received(&frame(index + 1, 100), 1));
        }
    }
}

/// What becomes of a burst of three good frames and then a chain that is none.
fn take_after_good(guest: &mut Guest, bad: impl FnOnce(&mut Guest)) -> (Fault, Snapshot) {
    let (mut tx, counters) = guest.tx();
    for seed in 0..3 {
        guest.send(&[vec![0xff; HEADER], frame(seed, 60)].concat());
    }
    bad(guest);
    guest.send(&[0; 100]);
    let mut burst = Burst::default();
    assert_eq!(tx.take(&mut burst), Ok(3));
    for (seed, taken) in burst.frames().iter().enumerate() {
        assert_eq!(taken.ethernet(), &frame(seed, 60)[..taken.ethernet().len()]);
    }
    tx.done(&mut burst);
    let fault = tx.take(&mut burst).unwrap_err();
    assert_eq!(guest.ring.take_used(&mut [Used::default(); BURST]), Ok(3));
    assert_eq!(tx.take(&mut burst), Err(fault), "it stays the first one");
    assert!(burst.frames().is_empty());
    drop(tx);
    assert_eq!(Arc::strong_count(&guest.memory), 1, "nothing of the memory is kept");
    (fault, counters.snapshot())
}

#[test]
fn a_header_that_is_too_short_is_a_fault_after_the_frames_before_it() {
    for acked in all_layouts() {
        for len in [1, 11] {
            let mut guest = Guest::plain(acked);
            let (fault, counters) = take_after_good(&mut guest, |guest| guest.send(&vec![0; len]));
            assert!(
                matches!(fault, Fault::Header { len: found, needed: 12, .. } if found == len as u32),
                "{fault:?}, {len} bytes"
            );
            assert_eq!((counters.frames, counters.bytes, counters.dropped()), (3, 180, 0));
        }
    }
}

#[test]
fn a_writable_buffer_in_a_transmit_queue_is_a_fault_after_the_frames_before_it() {
    for acked in all_layouts() {
        for readable in [0, 1] {
            let mut guest = Guest::plain(acked);
            let (fault, counters) = take_after_good(&mut guest, |guest| {
                guest.offer(&[100, 100], readable);
            });
            assert!(matches!(fault, Fault::Writable { .. }), "{fault:?}, {readable} readable");
            assert_eq!((counters.frames, counters.bytes, counters.dropped()), (3, 180, 0));
        }
    }
}

/// A burst of `count` frames of 60 bytes.
fn burst_of(count: usize, len: usize) -> (Guest, TxQueue, Burst, Vec<u8>) {
    let mut guest = Guest::plain(acked(&[]));
    let (mut tx, _) = guest.tx();
    (0..count).for_each(|seed| guest.send(&[vec![0; HEADER], frame(seed, len)].concat()));
    let mut burst = Burst::default();
    assert_eq!(tx.take(&mut burst), Ok(count));
    (guest, tx, burst, (0..count as u8).collect())
}

#[test]
fn a_readable_or_short_receive_buffer_is_a_fault_after_the_frames_before_it() {
    for layout in all_layouts() {
        for merge in [0, bits::NET_F_MRG_RXBUF] {
            for (lens, readable, needed) in [(&[100, 100][..], 1, None), (&[100], 1, None), (&[4, 7], 0, Some(11))] {
                let (_sender, _tx, burst, all) = burst_of(4, 60);
                let mut guest = Guest::plain(layout | merge);
                let (mut rx, counters) = guest.rx();
                let good = [guest.offer(&[72], 0), guest.offer(&[71, 1], 0)];
                guest.offer(lens, readable);
                guest.offer(&[100], 0);
                assert_eq!(rx.put(&burst, &all), Ok(2));
                let mut used = [Used::default(); BURST];
                assert_eq!(guest.ring.take_used(&mut used), Ok(2));
                for (seed, buffers) in good.iter().enumerate() {
                    assert_eq!((guest.read(buffers), used[seed].len), (received(&frame(seed, 60), 1), 72));
                }
                // The two frames that met the fault are counted, those of the next burst are the caller's.
                let before = counters.snapshot();
                assert_eq!((before.frames, before.dropped(), before.stopped), (2, 2, 2));
                let fault = rx.put(&burst, &all).unwrap_err();
                match needed {
                    None => assert!(matches!(fault, Fault::Readable { .. }), "{fault:?}"),
                    Some(sum) => assert!(matches!(fault, Fault::Header { len, needed: 12, .. } if len == sum)),
                }
                assert_eq!(counters.snapshot(), before);
                assert_eq!(guest.ring.take_used(&mut used), Ok(0));
            }
        }
    }
}

#[test]
fn a_fault_in_the_middle_of_a_merged_frame_leaves_no_part_of_it() {
    for layout in all_layouts() {
        let (_sender, _tx, burst, all) = burst_of(1, 1000);
        let mut guest = Guest::plain(layout | bits::NET_F_MRG_RXBUF);
        let (mut rx, counters) = guest.rx();
        let first = guest.offer(&[500], 0);
        guest.offer(&[600], 1);
        assert!(matches!(rx.put(&burst, &all), Err(Fault::Readable { .. })));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); 2]), Ok(0));
        assert!(guest.read(&first).iter().all(|&byte| byte == UNTOUCHED));
        assert_eq!(counters.snapshot(), Snapshot::default());
    }
}

#[test]
fn runts_and_oversize_are_dropped_and_counted() {
    for acked in all_layouts() {
        let mut guest = Guest::plain(acked);
        let (mut tx, counters) = guest.tx();
        let mut burst = Burst::default();
        for len in 12..=25 {
            guest.send(&vec![0; len]);
        }
        guest.send(&[0; 26]);
        guest.send(&vec![0; HEADER + MAX_FRAME]);
        guest.send(&vec![0; HEADER + MAX_FRAME + 1]);
        assert_eq!(tx.take(&mut burst), Ok(17));
        assert_eq!(burst.frames().iter().map(|frame| frame.len()).collect::<Vec<_>>(), [14, MAX_FRAME]);
        tx.done(&mut burst);
        assert_eq!(guest.ring.take_used(&mut [Used::default(); BURST]), Ok(17));
        let counters = counters.snapshot();
        assert_eq!((counters.frames, counters.runt, counters.oversize), (2, 14, 1));
        assert_eq!((counters.bytes, counters.dropped()), (14 + MAX_FRAME as u64, 15));
    }
}

#[test]
fn a_frame_in_more_pieces_than_a_burst_holds_is_oversize() {
    for packed in [false, true] {
        let acked = acked(&[(packed, bits::RING_PACKED)]);
        let mut guest = Guest::new(acked, 4096, 0, 1 << 20, None);
        let (mut tx, counters) = guest.tx();
        let mut burst = Burst::default();
        let bytes = [vec![0; HEADER], frame(7, 1013)].concat();
        for pieces in [1, 512, 513, 3] {
            let buffers = guest.buffers(&cut(bytes.len(), &[1], pieces), &bytes);
            guest.ring.add(&buffers, &[]).unwrap();
            guest.ring.publish();
        }
        // The second and the third have to wait for a burst of their own.
        let mut lens = Vec::new();
        for _ in 0..4 {
            let taken = tx.take(&mut burst).unwrap();
            lens.push((taken, burst.frames().len()));
            tx.done(&mut burst);
        }
        assert_eq!(lens, [(1, 1), (1, 1), (2, 1), (0, 0)]);
        assert_eq!((counters.snapshot().frames, counters.snapshot().oversize), (3, 1));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); BURST]), Ok(4));
    }
}

#[test]
fn receive_buffers_in_many_pieces_take_a_whole_burst() {
    for packed in [false, true] {
        // More pieces than the device's own list holds at once, in chains that are all good.
        let (_sender, _tx, burst, all) = burst_of(32, 60);
        let mut guest = Guest::new(acked(&[(packed, bits::RING_PACKED)]), 4096, 0, 1 << 20, None);
        let (mut rx, counters) = guest.rx();
        let offered: Vec<_> = (0..40).map(|_| guest.offer(&[1; 80], 0)).collect();
        assert_eq!(rx.put(&burst, &all), Ok(32));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); 64]), Ok(32));
        for (seed, buffers) in offered[..32].iter().enumerate() {
            assert_eq!(guest.read(&buffers[..72]), received(&frame(seed, 60), 1));
        }
        assert_eq!((counters.snapshot().frames, counters.snapshot().dropped()), (32, 0));
    }
}

#[test]
fn large_frames_that_need_more_buffers_than_fit_into_one_list_all_arrive() {
    for layout in all_layouts() {
        let (_sender, _tx, burst, all) = burst_of(8, 6000);
        let mut guest = Guest::new(layout | bits::NET_F_MRG_RXBUF, 1024, 0, 1 << 20, None);
        let (mut rx, counters) = guest.rx();
        let offered: Vec<_> = (0..8 * 61).map(|_| guest.offer(&[100], 0).remove(0)).collect();
        assert_eq!(rx.put(&burst, &all), Ok(8));
        let mut used = [Used::default(); 1024];
        assert_eq!(guest.ring.take_used(&mut used), Ok(8 * 61));
        for (seed, buffers) in offered.chunks(61).enumerate() {
            assert_eq!(guest.read(buffers)[..6012], received(&frame(seed, 6000), 61));
        }
        assert_eq!((counters.snapshot().frames, counters.snapshot().dropped()), (8, 0));
    }
}

#[test]
fn a_receive_buffer_in_too_many_pieces_holds_nothing_and_is_not_lost() {
    for merge in [0, bits::NET_F_MRG_RXBUF] {
        let (_sender, _tx, burst, all) = burst_of(3, 60);
        let mut guest = Guest::new(acked(&[]) | merge, 2048, 0, 1 << 20, None);
        let (mut rx, counters) = guest.rx();
        guest.offer(&[1; 1025], 0);
        guest.offer(&[1000], 0);
        assert_eq!(rx.put(&burst, &all), Ok(0));
        assert_eq!(guest.ring.take_used(&mut [Used::default(); 2]), Ok(0));
        assert_eq!((counters.snapshot().oversize, counters.snapshot().dropped()), (3, 3));
    }
}

/// A sender and a receiver that have all their memory in common, the sender's under a second address too.
fn in_one_memory(sent: u64, got: u64) -> (Guest, Guest, TxQueue, RxQueue, [Arc<Counters>; 2]) {
    let (mut from, mut to) = (Guest::plain(sent), Guest::at(2 * GUEST, got, 64, 8, 1 << 16, None));
    let alias = Region::map(&from.file, 0, from.region.len() as u64, 3 * GUEST, 3 * GUEST).unwrap();
    let all = from.memory.with(to.memory.regions()[0].clone()).unwrap().with(alias).unwrap();
    from.memory = Arc::new(all);
    to.memory = from.memory.clone();
    let ((tx, tx_counters), (rx, rx_counters)) = (from.tx(), to.rx());
    (from, to, tx, rx, [tx_counters, rx_counters])
}

#[test]
fn a_frame_may_be_received_where_it_was_sent_from() {
    let mut burst = Burst::default();
    for layout in all_layouts() {
        for len in [14, 19, 20, 60, 300, 1518, 9000] {
            for shift in [0, 1, 8, 12, 100, 2 * GUEST] {
                let (mut from, mut to, mut tx, mut rx, _) = in_one_memory(layout, layout);
                let sent = [vec![0xff; HEADER], frame(len, len)].concat();
                let buffers = from.buffers(&[sent.len()], &sent);
                let there = Buffer { address: buffers[0].address + shift, ..buffers[0] };
                from.ring.add(&buffers, &[]).unwrap();
                from.ring.publish();
                to.ring.add(&[], &[there]).unwrap();
                to.ring.publish();
                assert_eq!(tx.take(&mut burst), Ok(1));
                assert_eq!(rx.put(&burst, &[0]), Ok(1));
                tx.done(&mut burst);
                let there = Buffer { address: buffers[0].address + shift % GUEST, ..there };
                let (now, expected) = (from.read(&[there]), received(&frame(len, len), 1));
                // Where both are the same; else its first bytes, and of the rest what the guest has brought on itself.
                let certain = if shift % GUEST == 0 { now.len() } else { now.len().min(ringroad_frame::HEAD) };
                assert_eq!(now[..certain], expected[..certain], "{len} bytes, shift {shift}");
            }
        }
    }
}

/// An address in any of the memory, rings and all, and a length.
fn anywhere() -> impl Strategy<Value = Buffer> {
    let offset = prop_oneof![0..5000u64, 0..80_000u64];
    (1..=3u64, offset, prop_oneof![1..=100u32, 1..=2000u32, 1..=70_000u32])
        .prop_map(|(part, offset, len)| Buffer { address: part * GUEST + offset, len })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    /// The guests' frames and buffers overlap each other, the rings, and themselves.
    #[test]
    fn buffers_anywhere_do_no_harm(
        sender in any_acked(),
        receiver in any_acked(),
        rounds in prop::collection::vec(
            prop::collection::vec((anywhere(), prop::option::of(anywhere()), anywhere()), 1..=32),
            1..6,
        ),
    ) {
        let (mut from, mut to, mut tx, mut rx, [sent, got]) = in_one_memory(sender, receiver);
        let mut burst = Burst::default();
        let (mut chains, mut frames) = (0, 0);
        for round in rounds {
            for (source, more, target) in round {
                let sources: Vec<Buffer> = [source].into_iter().chain(more).collect();
                // What the device has written over the rings, the driver end may stumble over.
                let _ = from.ring.add(&sources, &[]);
                let _ = to.ring.add(&[], &[target]);
            }
            from.ring.publish();
            to.ring.publish();
            let Ok(taken) = tx.take(&mut burst) else { break };
            chains += taken as u64;
            prop_assert!(taken <= BURST && burst.frames().len() <= taken);
            let all: Vec<u8> = (0..burst.frames().len() as u8).collect();
            match rx.put(&burst, &all) {
                Ok(put) => {
                    prop_assert!(put <= all.len());
                    frames += all.len() as u64;
                }
                Err(_) => break,
            }
            tx.done(&mut burst);
            let _ = from.ring.take_used(&mut [Used::default(); BURST]);
            let _ = to.ring.take_used(&mut [Used::default(); BURST]);
        }
        let (sent, got) = (sent.snapshot(), got.snapshot());
        prop_assert_eq!(sent.frames + sent.dropped(), chains);
        prop_assert_eq!(got.frames + got.dropped(), frames);
    }
}

/// What a port may send and receive is bounded by its MTU, on both sides, whatever path a frame takes.
#[test]
fn frames_longer_than_an_mtu_are_dropped_at_either_end() {
    for acked in all_layouts() {
        for tuning in [Tuning::default(), Tuning::NONE] {
            let (mut from, mut to) = (Guest::plain(acked), Guest::plain(acked));
            let ((mut tx, tx_counters), (mut rx, rx_counters)) = (from.tx(), to.rx());
            tx.tune(tuning);
            rx.tune(tuning);
            tx.limit(1522);
            rx.limit(1022);
            let buffers: Vec<_> = (0..8).map(|_| to.offer(&[2048], 0)).collect();
            // Of each limit one just within and one beyond; in one piece and in several.
            let lens = [1022, 1023, 1522, 1523, 60, 5000];
            for (seed, &len) in lens.iter().enumerate() {
                let bytes = [&[0; HEADER][..], &frame(seed, len)].concat();
                if seed % 2 == 0 {
                    from.send(&bytes);
                } else {
                    let buffers = from.buffers(&[HEADER, 14, len - 14], &bytes);
                    from.ring.add(&buffers, &[]).unwrap();
                    from.ring.publish();
                }
            }
            let mut burst = Burst::default();
            assert_eq!(tx.take(&mut burst), Ok(6), "all of them go back to the driver");
            assert_eq!((burst.frames().len(), burst.bound()), (4, 1522));
            assert_eq!(rx.put(&burst, &[0, 1, 2, 3]), Ok(2));
            tx.done(&mut burst);
            let sent = tx_counters.snapshot();
            assert_eq!((sent.frames, sent.oversize), (4, 2));
            let got = rx_counters.snapshot();
            assert_eq!((got.frames, got.oversize, got.full), (2, 2, 0));
            let mut used = [Used::default(); 8];
            let count = to.ring.take_used(&mut used).unwrap();
            let lens: Vec<_> = used[..count].iter().map(|used| used.len as usize - HEADER).collect();
            assert_eq!(lens, [1022, 60]);
            assert_eq!(to.read(&buffers[0])[..HEADER + 1022], received(&frame(0, 1022), 1));
            // What is read straight into the buffers, too.
            let mut lens = [1022, 1023, 60].into_iter();
            let filled = rx.fill(HEADER + 1522, &mut |_| lens.next().map(|len| HEADER + len));
            assert_eq!(filled, Ok(Some(2)));
            assert_eq!(rx_counters.snapshot().oversize, 3);
        }
    }
}

/// A burst of long frames would take the time of many: what is too much for one waits, and the next bursts begin small.
#[test]
fn a_burst_has_so_many_bytes_and_no_more() {
    for acked in all_layouts() {
        let mut from = Guest::new(acked, 256, 8, 20 << 20, None);
        let (mut tx, counters) = from.tx();
        let (long, short) = (frame(1, 60_000), frame(2, 60));
        let header = [0; HEADER];
        (0..128).for_each(|_| from.send(&[&header[..], &short].concat()));
        (0..128).for_each(|_| from.send(&[&header[..], &long].concat()));
        let mut burst = Burst::default();
        let mut bursts = Vec::new();
        let mut frames = 0;
        while frames < 256 {
            let taken = tx.take(&mut burst).unwrap();
            assert!(taken > 0);
            let bytes: usize = burst.frames().iter().map(|frame| frame.len()).sum();
            assert!(bytes <= (256 << 10) + 60_000 && burst.is_heavy() == (bytes > 128 << 10), "{bytes}");
            let expected = |index: usize| if frames + index < 128 { 60 } else { 60_000 };
            assert!(burst.frames().iter().enumerate().all(|(index, frame)| frame.len() == expected(index)));
            frames += taken;
            bursts.push(taken);
            tx.done(&mut burst);
        }
        assert_eq!(bursts[..2], [BURST, BURST]);
        assert!(bursts[2..].iter().all(|&taken| taken <= 5), "{bursts:?}");
        let snapshot = counters.snapshot();
        assert_eq!((snapshot.frames, snapshot.bytes), (256, 128 * (60 + 60_000)), "each is counted once");
        // Short frames make full bursts again.
        from.next = from.region.len() / 2;
        let mut used = [Used::default(); 256];
        assert!(tx.take(&mut burst) == Ok(0) && from.ring.take_used(&mut used).unwrap() > 0);
        let mut sizes = Vec::new();
        (0..200).for_each(|_| from.send(&[&header[..], &short].concat()));
        while sizes.iter().sum::<usize>() < 200 {
            sizes.push(tx.take(&mut burst).unwrap());
            tx.done(&mut burst);
        }
        assert!(sizes.contains(&BURST), "{sizes:?}");
    }
}

/// Receive buffers in a thousand pieces each cost their own guest frames, and nobody time.
#[test]
fn a_receiver_with_buffers_in_many_pieces_gets_so_many_of_a_burst() {
    for packed in [false, true] {
        let acked = acked(&[(packed, bits::RING_PACKED), (true, bits::INDIRECT_DESC)]);
        let (mut from, mut to) = (Guest::plain(acked), Guest::new(acked, 1024, 1024, 4 << 20, None));
        let ((mut tx, _), (mut rx, counters)) = (from.tx(), to.rx());
        (0..64).for_each(|_| drop(to.offer(&[2; 900], 0)));
        (0..64).for_each(|seed| from.send(&[&[0; HEADER][..], &frame(seed, 1000)].concat()));
        let mut burst = Burst::default();
        assert_eq!(tx.take(&mut burst), Ok(64));
        let all: Vec<u8> = (0..64).collect();
        let placed = rx.put(&burst, &all).unwrap();
        assert!((2..=4).contains(&placed), "{placed}");
        let snapshot = counters.snapshot();
        assert_eq!((snapshot.frames, snapshot.full), (placed as u64, 64 - placed as u64));
        // The next burst begins where this one has ended.
        assert_eq!(rx.put(&burst, &all[..1]), Ok(1));
    }
}
