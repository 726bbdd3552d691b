//! Frames and receive buffers of any shape, made with the driver end of a bare ring: where descriptors begin and end
//! means nothing (virtio 1.3, 2.7.4.1), and what is no frame costs a counter or the queue.

#[path = "framing/bounds.rs"]
mod bounds;
mod common;
#[path = "framing/offloads.rs"]
mod offloads;
#[path = "framing/shapes.rs"]
mod shapes;
#[path = "framing/waiting.rs"]
mod waiting;

use common::acked;
use proptest::prelude::*;
use ringroad_frame::{Burst, Counters, MAX_FRAME, Poured, Snapshot};
use ringroad_mem::{Region, Table};
use ringroad_net::{
    RxQueue, TxQueue, bits,
    control::{Command, Control},
};
use ringroad_ring::{Addresses, BURST, Buffer, DriverRing, Fault, Features, IndirectTables, Tuning, Used};
use ringroad_wire::{
    ethernet::MacAddr,
    vnet_hdr::{self, F_NEEDS_CSUM},
};
use std::{collections::VecDeque, fs::File, sync::Arc, time::Duration};

const GUEST: u64 = 0x1_0000_0000;
const HEADER: usize = vnet_hdr::SIZE;
/// What receive buffers hold before anything is received.
const UNTOUCHED: u8 = 0xee;
/// A header without offloads: all that belongs to one means nothing.
const NOISE: [u8; HEADER] = [0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255];

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
    // Flags without a meaning, mostly none.
    let header = (prop_oneof![4 => Just(0), 1 => any::<u8>()], any::<[u8; HEADER - 2]>()).prop_map(|(flags, rest)| {
        std::array::from_fn(|at| [flags & !F_NEEDS_CSUM, 0].get(at).copied().unwrap_or_else(|| rest[at - 2]))
    });
    prop::collection::vec((len, header, cuts()), 1..40)
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
            tx.settle(Duration::ZERO);
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
                let bytes = [&NOISE[..], &frame(read, len)].concat();
                read += 1;
                let mut left = &bytes[..];
                spans.iter().for_each(|span| left = &left[span.write(left)..]);
                assert!(spans.iter().map(|span| span.len()).sum::<usize>() >= room);
                Some(bytes.len())
            });
            prop_assert_eq!(read, reads);
            let nothing = refused && reads == 0;
            let full = (merge || offered.is_empty()) && offered.len() < to.size as usize / 2;
            let poured = match nothing {
                false => Poured::Frames(placed.len()),
                true if full => Poured::Full,
                true => Poured::Unable,
            };
            prop_assert_eq!(filled, Ok(poured));
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
