//! Fast path and normal path must give the same results: each input goes through both, and the results and the ring's
//! memory are compared. The same holds for every other optimisation that can be turned off.

use proptest::prelude::*;
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::{
    Addresses, BURST, Buffer, Chains, DeviceRing, DriverFault, DriverRing, Fault, Features, Tuning, Used,
};
use std::sync::Arc;

const GUEST: u64 = 0x10_0000;
const SIZE: u32 = 16;
/// Offset of buffers and indirect tables; the ring comes before.
const BUFFERS: u64 = 4096;
const BYTES: usize = 16384;

/// A ring and its buffers in two regions, so that the translation cache can miss.
struct Memory {
    table: Arc<Table>,
    at: Addresses,
}

impl Memory {
    fn new(packed: bool, content: &[u8]) -> Memory {
        let low = Region::private(BUFFERS as usize, GUEST).unwrap();
        let high = Region::private(BYTES - BUFFERS as usize, GUEST + BUFFERS).unwrap();
        let (_, at) = DriverRing::start(&low, 0, Features { packed, ..Features::default() }, SIZE).unwrap();
        let table = Table::default().with(low).unwrap().with(high).unwrap();
        let memory = Memory { table: Arc::new(table), at };
        memory.span(0, content.len()).write(content);
        memory
    }

    fn span(&self, offset: u64, len: usize) -> Span<'_> {
        self.table.search(GUEST + offset, len).unwrap()
    }

    fn ring(&self) -> Vec<u8> {
        let mut bytes = vec![0; BUFFERS as usize];
        self.span(0, bytes.len()).read(&mut bytes);
        bytes
    }
}

/// A chain as the device sees it, without the addresses, which differ from memory to memory.
type Seen = (u16, u16, u32, u32, bool, Vec<usize>);

fn seen(chains: &Chains) -> Vec<Seen> {
    let see = |chain: &ringroad_ring::Chain| {
        let pieces = chains.readable(chain).iter().chain(chains.writable(chain)).map(|piece| piece.len()).collect();
        (chain.id, chain.slots(), chain.readable_len(), chain.writable_len(), chain.clipped, pieces)
    };
    chains.list().iter().map(see).collect()
}

/// Result of each `take` with the chains seen, the final base, and the ring's memory.
type Trace = (Vec<(Result<usize, Fault>, Vec<Seen>)>, u32, Vec<u8>);

#[derive(Clone, Debug)]
enum Op {
    Take(usize),
    /// Returns this many of the taken chains, with this many bytes written to each; untakes the rest.
    Give(usize, u32),
    /// A write to the ring by the driver.
    Poke(u64, Vec<u8>),
}

fn op(packed: bool) -> impl Strategy<Value = Op> {
    let poke = (0..64u64, descriptor(packed)).prop_map(|(slot, bytes)| Op::Poke(16 * (slot % u64::from(SIZE)), bytes));
    prop_oneof![
        4 => (0..=BURST).prop_map(Op::Take),
        4 => (0..=BURST, 0..100u32).prop_map(|(count, written)| Op::Give(count, written)),
        2 => poke,
    ]
}

/// A descriptor that is mostly valid.
fn descriptor(packed: bool) -> impl Strategy<Value = Vec<u8>> {
    let address = prop_oneof![
        8 => (BUFFERS..BYTES as u64 - 200).prop_map(|offset| GUEST + offset),
        1 => (BUFFERS - 50..BUFFERS + 50).prop_map(|offset| GUEST + offset),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![8 => 1..100u32, 1 => Just(0), 1 => any::<u32>()];
    // Packed: AVAIL and USED as in the first or in the second pass.
    let pass = prop_oneof![6 => Just(0x80u16), 2 => Just(0x8000u16), 1 => any::<u16>()];
    let flags = prop_oneof![6 => Just(0u16), 4 => Just(2u16), 1 => Just(1u16), 1 => Just(4u16), 1 => 0..8u16];
    (address, len, pass, flags, 0..SIZE as u16).prop_map(move |(address, len, pass, flags, tail)| {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        let flags = if packed { flags | pass } else { flags };
        let (third, fourth) = if packed { (tail, flags) } else { (flags, tail) };
        bytes.extend(third.to_le_bytes());
        bytes.extend(fourth.to_le_bytes());
        bytes
    })
}

/// The start of the memory: descriptors and, in a split ring, the available ring behind them.
fn content(packed: bool) -> impl Strategy<Value = Vec<u8>> {
    let descriptors = prop::collection::vec(descriptor(packed), SIZE as usize);
    let available = (
        prop_oneof![9 => 0..=SIZE as u16, 1 => any::<u16>()],
        prop::collection::vec(0..SIZE as u16 + 1, SIZE as usize),
    );
    (descriptors, available).prop_map(|(descriptors, available)| (descriptors.concat(), available)).prop_map(
        move |(mut bytes, (index, entries))| {
            if !packed {
                bytes.resize(at_available(), 0);
                bytes.extend([0, 0]);
                bytes.extend(index.to_le_bytes());
                entries.iter().for_each(|entry| bytes.extend(entry.to_le_bytes()));
            }
            bytes
        },
    )
}

fn at_available() -> usize {
    let low = Region::private(BUFFERS as usize, GUEST).unwrap();
    let (_, at) = DriverRing::start(&low, 0, Features::default(), SIZE).unwrap();
    (at.driver - at.descriptor) as usize
}

fn tunings() -> [Tuning; 7] {
    let all = Tuning::default();
    [
        Tuning::NONE,
        Tuning { fast_path: false, ..all },
        Tuning { shadow_used: false, ..all },
        Tuning { prefetch: 0, ..all },
        Tuning { prefetch_write: false, ..all },
        Tuning { translation_cache: false, ..all },
        Tuning { small_copy: false, ..all },
    ]
}

/// Runs the operations; returns everything that the device sees and leaves behind.
fn device(features: Features, start: u16, content: &[u8], ops: &[Op], tuning: Tuning) -> Trace {
    let memory = Memory::new(features.packed, content);
    let start = u32::from(start);
    let base = if features.packed { features.fresh_base() | start | start << 16 } else { 0 };
    let mut ring = DeviceRing::start(&memory.table, features, SIZE, memory.at, base).unwrap();
    ring.tune(tuning);
    let mut chains = Chains::new(64, 128);
    chains.start(&memory.table);
    let mut events = Vec::new();
    for op in ops {
        match op {
            Op::Take(max) => {
                if tuning != Tuning::default() {
                    ring.hand_over(*max);
                }
                let taken = ring.take(&memory.table, &mut chains, *max);
                events.push((taken, seen(&chains)));
                if taken.is_err() {
                    break;
                }
            }
            Op::Give(count, written) => {
                ring.untake(&mut chains, *count);
                chains.list_mut().iter_mut().for_each(|chain| chain.written = *written.min(&chain.writable_len()));
                ring.give(chains.list());
                if tuning != Tuning::default() {
                    ring.demote_used(*count);
                }
                chains.start(&memory.table);
            }
            Op::Poke(at, bytes) => drop(memory.span(*at, bytes.len()).write(bytes)),
        }
    }
    (events, ring.base(), memory.ring())
}

#[derive(Clone, Debug)]
enum DriverOp {
    Add {
        readable: usize,
        writable: usize,
    },
    AddSingle {
        count: usize,
        writable: bool,
    },
    Publish,
    TakeUsed(usize),
    Reclaim(usize),
    /// The device uses this many of the oldest chains, as a batch or one by one, with this many bytes written to each.
    Use {
        count: usize,
        batch: bool,
        written: u32,
    },
    /// A stray write to where the device writes.
    Poke(u64, Vec<u8>),
}

fn driver_op() -> impl Strategy<Value = DriverOp> {
    prop_oneof![
        1 => (0..3usize, 0..3usize).prop_map(|(readable, writable)| DriverOp::Add { readable, writable }),
        4 => (0..20usize, any::<bool>()).prop_map(|(count, writable)| DriverOp::AddSingle { count, writable }),
        4 => Just(DriverOp::Publish),
        4 => (0..=BURST).prop_map(DriverOp::TakeUsed),
        2 => (0..=BURST).prop_map(DriverOp::Reclaim),
        5 => (1..20usize, any::<bool>(), 0..60u32)
            .prop_map(|(count, batch, written)| DriverOp::Use { count, batch, written }),
        1 => (0..2 * u64::from(SIZE), prop::collection::vec(any::<u8>(), 8))
            .prop_map(|(word, bytes)| DriverOp::Poke(8 * word, bytes)),
    ]
}

type Event = (Result<usize, DriverFault>, Vec<(u16, u32)>, usize);

fn driver(features: Features, ops: &[DriverOp], fast: bool) -> (Vec<Event>, Vec<u8>) {
    let low = Region::private(BUFFERS as usize, GUEST).unwrap();
    let (mut ring, at) = DriverRing::start(&low, 0, features, SIZE).unwrap();
    ring.set_fast_path(fast);
    let high = Region::private(BYTES - BUFFERS as usize, GUEST + BUFFERS).unwrap();
    let table = Arc::new(Table::default().with(low.clone()).unwrap().with(high).unwrap());
    let mut device = DeviceRing::start(&table, features, SIZE, at, features.fresh_base()).unwrap();
    let mut chains = Chains::new(64, 256);
    let buffer = |id: u16| Buffer { address: GUEST + BUFFERS + 64 * u64::from(id), len: 50 };
    let mut events = Vec::new();
    for op in ops {
        let (mut result, mut list) = (Ok(0), Vec::new());
        match *op {
            DriverOp::Add { readable, writable } => {
                let added = ring.add(&vec![buffer(1); readable], &vec![buffer(2); writable]);
                result = Ok(added.map_or(0, |id| usize::from(id) + 1));
            }
            DriverOp::AddSingle { count, writable } if fast => result = Ok(ring.add_single(count, writable, buffer)),
            DriverOp::AddSingle { count, writable } => {
                let mut added = 0;
                while added < count
                    && let Some(id) = ring.next_id(0)
                {
                    let (some, none) = ([buffer(id)], []);
                    let added_id = if writable { ring.add(&none, &some) } else { ring.add(&some, &none) };
                    assert_eq!(added_id, Ok(id));
                    added += 1;
                }
                result = Ok(added);
            }
            DriverOp::Publish => ring.publish(),
            DriverOp::TakeUsed(max) => {
                let mut used = [Used::default(); BURST];
                result = ring.take_used(&mut used[..max]);
                list = used[..result.unwrap_or(0)].iter().map(|used| (used.id, used.len)).collect();
            }
            DriverOp::Reclaim(max) => result = ring.reclaim(max),
            DriverOp::Use { count, batch, written } => {
                chains.start(&table);
                if device.take(&table, &mut chains, count).is_err() {
                    break;
                }
                chains.list_mut().iter_mut().for_each(|chain| chain.written = written.min(chain.writable_len()));
                // Without `batch` one by one, but still in order.
                let list = chains.list();
                if batch { device.give(list) } else { list.chunks(1).for_each(|one| device.give(one)) }
            }
            DriverOp::Poke(at, ref bytes) => {
                low.span(at as usize, 8).unwrap().write(bytes);
            }
        }
        let failed = result.is_err();
        events.push((result, list, ring.free()));
        if failed {
            break;
        }
    }
    let mut bytes = vec![0; BUFFERS as usize];
    low.span(0, bytes.len()).unwrap().read(&mut bytes);
    (events, bytes)
}

fn features() -> impl Strategy<Value = Features> {
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(packed, indirect, in_order)| Features {
        packed,
        indirect,
        in_order,
        event_idx: false,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn device_results_do_not_depend_on_tuning(
        (features, mut content, ops) in features().prop_flat_map(|features| {
            (Just(features), content(features.packed), prop::collection::vec(op(features.packed), 1..12))
        }),
        start in 0..SIZE as u16,
    ) {
        if features.packed {
            // The ring starts in the middle: slots before that belong to the next pass.
            for slot in 0..usize::from(start) {
                content[16 * slot + 14] ^= 0x80;
                content[16 * slot + 15] ^= 0x80;
            }
        }
        let expected = device(features, start, &content, &ops, Tuning::default());
        for tuning in tunings() {
            let (mut events, base, ring) = device(features, start, &content, &ops, tuning);
            if !tuning.shadow_used && features.in_order && features.packed {
                // Each used descriptor is written, not only one per batch.
                prop_assert_eq!((&events, base), (&expected.0, expected.1), "{:?}", tuning);
                continue;
            }
            prop_assert_eq!(std::mem::take(&mut events), expected.0.clone(), "{:?}", tuning);
            prop_assert_eq!((base, &ring), (expected.1, &expected.2), "{:?}", tuning);
        }
    }

    #[test]
    fn driver_fast_path_matches_normal_path(features in features(), ops in prop::collection::vec(driver_op(), 1..40)) {
        let (fast, normal) = (driver(features, &ops, true), driver(features, &ops, false));
        prop_assert_eq!(fast, normal);
    }
}
