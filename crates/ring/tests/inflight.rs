//! Devices that die with buffers in flight and are succeeded by devices, our own or another implementation, that know only
//! the inflight region. Every buffer must be returned exactly once, in any order, and buffers must be resubmitted in the
//! order in which they were taken.
#![cfg(not(loom))]

#[allow(dead_code, reason = "shared with other tests")]
mod common;
#[path = "inflight/foreign.rs"]
mod foreign;
#[path = "inflight/malformed.rs"]
mod malformed;

use common::{GUEST, Memory, all_features};
use foreign::{Bytes, Stop};
use ringroad_mem::Region;
use ringroad_ring::{
    BURST, Buffer, Chain, Chains, DeviceRing, DriverRing, Features, IndirectTables, Inflight, Journal, Resumed,
    SetupError, Used,
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// The longest chain, in buffers.
const LONGEST: usize = 3;
/// Size of a buffer in bytes, and the distance from one to the next, so that they are not adjacent.
const BUFFER: usize = 32;
const STEP: usize = 64;

/// Pseudo-random numbers.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// A chain that the driver has sent.
struct Sent {
    serial: u64,
    cell: usize,
    buffers: usize,
}

/// A driver that outlives its devices, and the inflight region.
struct Rig {
    memory: Memory,
    region: Arc<Region>,
    /// Entries of each part of the region, at least the queue size.
    entries: u16,
    driver: DriverRing,
    multi_buffer: bool,
    serial: u64,
    back: u64,
    cells: Vec<usize>,
    sent: HashMap<u16, Sent>,
    /// Serial numbers of chains in flight, oldest first.
    order: Vec<u64>,
    /// Those of them that the next device must take first.
    expected: VecDeque<u64>,
    /// The first serial number to be taken from the ring after that.
    fresh: u64,
}

impl Rig {
    fn new(features: Features, size: u32, multi_buffer: bool) -> Rig {
        Self::with_entries(features, size, multi_buffer, size as u16)
    }

    fn with_entries(features: Features, size: u32, multi_buffer: bool, entries: u16) -> Rig {
        let start = DriverRing::bytes(features, size);
        let arena = size as usize * LONGEST * STEP;
        let (driver, file) = Region::create(start + arena + size as usize * LONGEST * 16, GUEST, false).unwrap();
        let memory = Memory::over(features, size, driver, &file);
        let mut driver = memory.driver();
        if multi_buffer {
            let tables = IndirectTables::new(memory.driver.clone(), start + arena, size, LONGEST).unwrap();
            driver.set_indirect(tables);
        }
        // The second of two queues.
        let region = Region::create(2 * Inflight::bytes(features.packed, entries), 0, false).unwrap().0;
        Rig {
            memory,
            region,
            entries,
            driver,
            multi_buffer,
            serial: 0,
            back: 0,
            cells: (0..size as usize).collect(),
            sent: HashMap::new(),
            order: Vec::new(),
            expected: VecDeque::new(),
            fresh: 0,
        }
    }

    fn packed(&self) -> bool {
        self.memory.features.packed
    }

    fn bytes(&self) -> Bytes {
        Bytes::new(&self.region, Inflight::bytes(self.packed(), self.entries))
    }

    /// Starts a device with a frontend that does not know the base.
    fn resume(&self) -> Result<(DeviceRing, Resumed), SetupError> {
        let Memory { device, features, size, at, .. } = &self.memory;
        let inflight = Inflight::new(&self.region, 1, self.entries, features.packed).unwrap();
        DeviceRing::resume(device, *features, *size, *at, features.fresh_base(), Journal::NONE, inflight)
    }

    /// Makes up to `count` chains available.
    fn add(&mut self, count: usize) {
        for _ in 0..count {
            let Some(&cell) = self.cells.last() else { break };
            let buffers = if self.multi_buffer { 1 + self.serial as usize % LONGEST } else { 1 };
            let address = |index: usize| self.memory.address((cell * LONGEST + index) * STEP);
            let list: Vec<_> =
                (0..buffers).map(|index| Buffer { address: address(index), len: BUFFER as u32 }).collect();
            self.memory.write(list[0].address, &self.serial.to_le_bytes());
            let Ok(id) = self.driver.add(&list[..1], &list[1..]) else { break };
            self.cells.pop();
            assert!(self.sent.insert(id, Sent { serial: self.serial, cell, buffers }).is_none());
            self.serial += 1;
        }
        self.driver.publish();
    }

    /// Takes all chains that the device has used.
    fn collect(&mut self) {
        let mut used = [Used::default(); 8];
        loop {
            let count = self.driver.take_used(&mut used).unwrap();
            if count == 0 {
                return;
            }
            for used in &used[..count] {
                let Sent { serial, cell, buffers } = self.sent.remove(&used.id).expect("returned only once");
                for index in (1..buffers).filter(|_| used.len > 0) {
                    let mut wrote = [0; 8];
                    let at = self.memory.arena + (cell * LONGEST + index) * STEP;
                    self.memory.driver.span(at, 8).unwrap().read(&mut wrote);
                    assert_eq!(u64::from_le_bytes(wrote), serial, "the buffer of another chain was written");
                }
                let at = self.order.iter().position(|&taken| taken == serial).expect("not in flight");
                self.order.remove(at);
                self.cells.push(cell);
                self.back += 1;
            }
        }
    }

    /// Checks a chain that a device takes.
    fn took(&mut self, serial: u64) {
        let expected = self.expected.pop_front().unwrap_or_else(|| {
            self.fresh += 1;
            self.order.push(self.fresh - 1);
            self.fresh - 1
        });
        assert_eq!(serial, expected, "in flight: {:?}", self.order);
    }

    /// Notes that the device has untaken it.
    fn untook(&mut self, serial: u64) {
        self.expected.push_front(serial);
    }

    /// The device has died.
    fn died(&mut self) {
        self.collect();
        self.expected = self.order.iter().copied().collect();
    }

    fn serial_of(&self, id: u16) -> u64 {
        self.sent.get(&id).expect("sent").serial
    }
}

/// A device of this crate.
struct Ours {
    ring: DeviceRing,
    burst: Chains,
    held: Vec<(Chain, u64)>,
}

impl Ours {
    fn new(ring: DeviceRing) -> Ours {
        Ours { ring, burst: Chains::new(BURST, 200), held: Vec::new() }
    }

    /// Takes some chains and untakes some of them.
    fn take(&mut self, rig: &mut Rig, random: &mut Random) {
        self.burst.start(&rig.memory.device);
        for _ in 0..1 + random.below(2) {
            let before = self.burst.list().len();
            let count = self.ring.take(&rig.memory.device, &mut self.burst, 1 + random.below(6)).unwrap();
            assert_eq!(self.burst.list().len(), before + count);
        }
        let serial = |burst: &Chains, chain: &Chain| {
            let mut serial = [0; 8];
            assert!(!burst.readable(chain).is_empty(), "{chain:?}");
            burst.readable(chain)[0].read(&mut serial);
            u64::from_le_bytes(serial)
        };
        let taken: Vec<u64> = self.burst.list().iter().map(|chain| serial(&self.burst, chain)).collect();
        taken.iter().for_each(|&serial| rig.took(serial));
        let keep = if random.below(3) == 0 { random.below(taken.len() + 1) } else { taken.len() };
        self.ring.untake(&mut self.burst, keep);
        taken[keep..].iter().rev().for_each(|&serial| rig.untook(serial));
        for (index, &serial) in taken[..keep].iter().enumerate() {
            let chain = self.burst.list()[index];
            let spans = self.burst.writable(&chain);
            assert_eq!(
                spans.len(),
                if rig.multi_buffer { serial as usize % LONGEST } else { 0 },
                "buffers of chain {serial}"
            );
            spans.iter().for_each(|span| assert_eq!(span.write(&serial.to_le_bytes()), 8));
            self.burst.list_mut()[index].written = chain.writable_len();
            self.held.push((self.burst.list()[index], serial));
        }
    }

    /// Returns some chains, in order or not.
    fn give(&mut self, in_order: bool, random: &mut Random) {
        let mut list = Vec::new();
        for _ in 0..random.below(5).min(self.held.len()) {
            let at = if in_order { 0 } else { random.below(self.held.len()) };
            list.push(self.held.remove(at).0);
        }
        if random.below(2) == 0 {
            self.ring.give(&list)
        } else {
            self.ring.give_deferred(&list)
        }
        if random.below(4) == 0 {
            self.ring.flush();
        }
    }
}

impl Ours {
    /// Dies while returning chains: rolls back the stores that would not have been executed.
    fn die(mut self, rig: &Rig, stop: Stop, in_order: bool, random: &mut Random) {
        if self.held.is_empty() || stop == Stop::Never {
            return;
        }
        self.ring.flush();
        let (region, packed) = (rig.bytes(), rig.packed());
        let user = rig.memory.driver.user();
        let area = |at: u64| Bytes::new(&rig.memory.driver, (at - user) as usize);
        if packed {
            // Chains are published one by one.
            let (free, used, wrap) = (region.u16(14), region.u16(18), region.u8(21));
            let descriptor = area(rig.memory.at.descriptor + 16 * u64::from(used) + 8);
            let before = descriptor.u64(0);
            let at = if in_order { 0 } else { random.below(self.held.len()) };
            self.ring.give(&[self.held[at].0]);
            if stop != Stop::HalfCleared {
                region.set_u8(32 + 32 * usize::from(region.u16(12)), 1);
            }
            region.set_u16(14, free);
            region.set_u16(18, used);
            region.set_u8(21, wrap);
            if stop == Stop::BeforePublish {
                descriptor.set_u64(0, before);
            }
            return;
        }
        let (used, index) = (region.u16(14), area(rig.memory.at.device));
        let mut list = Vec::new();
        for _ in 0..1 + random.below(self.held.len().min(4)) {
            let at = if in_order { 0 } else { random.below(self.held.len()) };
            list.push(self.held.remove(at).0);
        }
        self.ring.give(&list);
        let cleared = usize::from(stop == Stop::HalfCleared);
        list[cleared..].iter().for_each(|chain| region.set_u8(16 + 16 * usize::from(chain.id), 1));
        region.set_u16(14, used);
        if stop == Stop::BeforePublish {
            index.set_u16(2, used);
        }
    }
}

/// A device of either implementation. The foreign one identifies chains by head (split) or by entry and id (packed).
#[allow(clippy::large_enum_variant, reason = "one at a time")]
enum Device {
    Ours(Ours),
    Split(foreign::Split, Vec<u16>, VecDeque<u16>),
    Packed(foreign::Packed, Vec<(u16, u16)>, VecDeque<(u16, u16)>),
}

impl Device {
    fn step(&mut self, rig: &mut Rig, random: &mut Random) {
        let in_order = rig.memory.features.in_order;
        match self {
            Device::Ours(device) if random.below(2) == 0 => device.take(rig, random),
            Device::Ours(device) => device.give(in_order, random),
            Device::Split(device, held, resubmits) => {
                if let Some(head) = resubmits.pop_front().or_else(|| device.take()) {
                    rig.took(rig.serial_of(head));
                    held.push(head);
                }
                if random.below(2) == 0 && !held.is_empty() {
                    let head = held.remove(if in_order { 0 } else { random.below(held.len()) });
                    device.give(&[head], Stop::Never);
                }
            }
            Device::Packed(device, held, resubmits) => {
                if let Some(chain) = resubmits.pop_front().or_else(|| device.take()) {
                    rig.took(rig.serial_of(chain.1));
                    held.push(chain);
                }
                if random.below(2) == 0 && !held.is_empty() {
                    let chain = held.remove(if in_order { 0 } else { random.below(held.len()) });
                    device.give(&[chain], Stop::Never);
                }
            }
        }
    }

    /// Dies, perhaps while returning chains. Returns whether the driver may see used descriptors too early, which only our
    /// devices can repair.
    fn die(self, rig: &Rig, in_order: bool, random: &mut Random) -> bool {
        let stop = [Stop::Never, Stop::BeforePublish, Stop::AfterPublish, Stop::HalfCleared][random.below(4)];
        match self {
            Device::Ours(device) => {
                device.die(rig, stop, in_order, random);
                false
            }
            Device::Split(mut device, mut held, _) => {
                let from = if in_order { 0 } else { random.below(held.len().max(1)) };
                held.rotate_left(from);
                held.truncate(random.below(4));
                device.give(&held, stop);
                false
            }
            Device::Packed(mut device, mut held, _) => {
                let from = if in_order { 0 } else { random.below(held.len().max(1)) };
                held.rotate_left(from);
                held.truncate(random.below(4));
                if !held.is_empty() {
                    device.give(&held, stop);
                }
                stop == Stop::BeforePublish
            }
        }
    }
}

/// Runs a succession of devices on one ring; with `others` some are foreign. Returns how often buffers were resubmitted.
fn succession(features: Features, multi_buffer: bool, others: bool, seed: u64) -> u32 {
    let size = if features.packed { 13 } else { 16 };
    // The frontend may have asked for more entries than the ring has.
    let entries = size as u16 * (1 + seed as u16 % 3);
    let mut rig = Rig::with_entries(features, size, multi_buffer, entries);
    let (mut random, mut resubmitted, mut only_ours) = (Random(seed), 0, false);
    for _ in 0..30 {
        let mut device = if others && !only_ours && random.below(2) == 0 {
            if random.below(2) == 0 {
                // As DPDK does, whatever it finds there.
                rig.bytes().set_u16(10, entries);
            }
            match features.packed {
                false => {
                    let (device, heads) = foreign::Split::connect(&rig.memory, &rig.bytes(), entries);
                    Device::Split(device, Vec::new(), heads.into())
                }
                true => {
                    let (device, chains) = foreign::Packed::connect(&rig.memory, &rig.bytes(), entries);
                    Device::Packed(device, Vec::new(), chains.into())
                }
            }
        } else {
            let (ring, resumed) = rig.resume().unwrap();
            resubmitted += u32::from(matches!(resumed, Resumed::Inflight { resubmitted: 1.. }));
            Device::Ours(Ours::new(ring))
        };
        for _ in 0..random.below(25) {
            let count = random.below(8);
            rig.add(count);
            device.step(&mut rig, &mut random);
            if random.below(2) == 0 {
                rig.collect();
            }
        }
        only_ours = device.die(&rig, features.in_order, &mut random);
        rig.died();
    }
    // The last device returns everything and stops in an orderly way.
    let mut device = Ours::new(rig.resume().unwrap().0);
    for _ in 0..500 {
        device.take(&mut rig, &mut random);
        device.give(features.in_order, &mut random);
        rig.collect();
    }
    device.ring.flush();
    rig.collect();
    assert_eq!(rig.back + device.held.len() as u64, rig.serial, "{features:?}, seed {seed}: buffers are lost");
    device.ring.give(&device.held.iter().map(|(chain, _)| *chain).collect::<Vec<_>>());
    rig.collect();
    assert_eq!((rig.back, rig.driver.free()), (rig.serial, size as usize), "{features:?}, seed {seed}");
    resubmitted
}

fn all(others: bool) {
    for features in all_features() {
        for multi_buffer in [false, true] {
            let resubmitted: u32 = (0..40).map(|seed| succession(features, multi_buffer, others, seed)).sum();
            assert!(resubmitted > 40, "{features:?}: buffers were in flight only {resubmitted} times");
        }
    }
}

#[test]
fn our_successor_resumes() {
    all(false);
}

#[test]
fn our_and_foreign_devices_resume_from_each_other() {
    all(true);
}

#[test]
fn an_orderly_stop_leaves_nothing_in_flight() {
    for features in all_features().filter(|features| !features.in_order) {
        let mut rig = Rig::new(features, 16, true);
        let mut random = Random(7);
        let mut device = Ours::new(rig.resume().unwrap().0);
        rig.add(9);
        while device.held.len() < 5 {
            device.take(&mut rig, &mut random);
        }
        // The second and fourth are returned; the others are in flight when the device dies.
        let given = [device.held[3].0, device.held[1].0];
        device.ring.give(&given);
        rig.died();
        let before = rig.back;
        // Its successor takes one of them, untakes it, and stops.
        let (mut ring, resumed) = rig.resume().unwrap();
        let count = device.held.len() as u32 - 2;
        assert_eq!(resumed, Resumed::Inflight { resubmitted: count });
        let mut burst = Chains::new(BURST, 200);
        burst.start(&rig.memory.device);
        assert_eq!(ring.take(&rig.memory.device, &mut burst, 1), Ok(1));
        ring.untake(&mut burst, 0);
        ring.return_resubmits();
        let base = ring.base();
        rig.died();
        assert_eq!(rig.back, before + u64::from(count), "buffers that a base cannot express must be returned");
        // A device that knows only the base continues with what is in the ring.
        let mut next = Ours::new(rig.memory.device_at(base));
        while rig.back < rig.serial {
            next.take(&mut rig, &mut random);
            next.give(false, &mut random);
            next.ring.flush();
            rig.collect();
        }
        // The region must not offer anything to a later device either.
        let inflight = Inflight::new(&rig.region, 1, 16, features.packed).unwrap();
        inflight.end();
        assert_eq!(rig.bytes().u16(8), 0, "the region must be invalid after GET_VRING_BASE");
    }
}

/// A region for much larger queues: only the entries of this one are used, whatever an earlier one has left behind them.
#[test]
fn a_fresh_ring_clears_the_entries_behind_its_own() {
    const ENTRIES: u16 = 2000;
    for features in all_features() {
        let rig = Rig::with_entries(features, 16, false, ENTRIES);
        let part = Inflight::bytes(features.packed, ENTRIES);
        let used = Inflight::bytes(features.packed, 16);
        let garbage = vec![0xa5; rig.region.len()];
        rig.region.span(0, rig.region.len()).unwrap().write(&garbage);
        rig.bytes().set_u16(8, 0);
        rig.resume().unwrap();
        let mut now = garbage.clone();
        rig.region.span(0, rig.region.len()).unwrap().read(&mut now);
        assert!(now[..part] == garbage[..part], "the part of another queue");
        assert_eq!((rig.bytes().u16(8), rig.bytes().u16(10)), (1, 16), "{features:?}: version, desc_num");
        let entry = if features.packed { 32 } else { 16 };
        assert!(
            now[part + used..part + entry * (1 + usize::from(ENTRIES))].iter().all(|&byte| byte == 0),
            "{features:?}"
        );
    }
}

#[test]
fn a_region_left_by_a_smaller_ring_with_nothing_in_flight() {
    for features in all_features() {
        let mut rig = Rig::with_entries(features, 16, false, 32);
        drop(rig.resume().unwrap());
        rig.bytes().set_u16(10, 8);
        let (ring, resumed) = rig.resume().unwrap();
        assert!(!matches!(resumed, Resumed::Inflight { .. }), "{resumed:?}");
        assert_eq!(rig.bytes().u16(10), 16);
        rig.add(3);
        let mut random = Random(1);
        let mut device = Ours::new(ring);
        while rig.back < 3 {
            device.take(&mut rig, &mut random);
            device.give(features.in_order, &mut random);
            device.ring.flush();
            rig.collect();
        }
    }
}

#[test]
fn region_size_matches_the_structures() {
    // 16 + 16 n, and 32 + 32 n, in whole cache lines.
    assert_eq!([1, 3, 4, 256].map(|size| Inflight::bytes(false, size)), [64, 64, 128, 4160]);
    assert_eq!([1, 3, 4, 256].map(|size| Inflight::bytes(true, size)), [64, 128, 192, 8256]);
    let region = Region::create(2 * 4160, 0, false).unwrap().0;
    assert!(Inflight::new(&region, 1, 256, false).is_some());
    assert!(Inflight::new(&region, 2, 256, false).is_none());
    assert!(Inflight::new(&region, 1, 256, true).is_none());
    assert!(Inflight::new(&region, usize::MAX, 256, true).is_none());
}
