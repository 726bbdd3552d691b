//! Device end against driver end over one shared memory, on random schedules. A model checks what each must see: every
//! chain once, in order, with its bytes; every used chain back once with its length and bytes; and no side asleep while it
//! has work.
#![cfg(not(loom))]

#[allow(dead_code, reason = "shared with other tests")]
mod common;
#[path = "both_ends/scripted.rs"]
mod scripted;

use common::{Memory, all_features};
use proptest::prelude::*;
use ringroad_mem::Region;
use ringroad_ring::{BURST, Buffer, Chain, Chains, DeviceRing, DriverRing, Features, IndirectTables, Used};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

/// The longest chain, in buffers.
const LONGEST: usize = 6;
/// The longest buffer, in bytes.
const BUFFER: usize = 128;

#[derive(Clone, Debug)]
struct Config {
    features: Features,
    size: u32,
    /// Entries of each indirect table, if tables are used.
    tables: Option<usize>,
    /// Capacity of a burst in chains and pieces.
    burst: (usize, u16),
    /// Offset in the arena where one of the device's regions ends and the next begins.
    cut: usize,
}

/// The next step. `ask`: then notify the other side if it wants to be notified.
#[derive(Clone, Copy, Debug)]
enum Op {
    Add { readable: usize, writable: usize },
    AddSingle { count: usize, writable: bool },
    Publish { ask: bool },
    DriverAsk,
    TakeUsed { max: usize },
    DriverSleep { poll: bool },
    Take { max: usize },
    Untake { count: usize },
    Give { count: usize, order: usize, ask: bool, deferred: bool },
    DeviceAsk,
    DeviceSleep { poll: bool },
    Restart,
}

impl Op {
    fn from_word(word: u32) -> Op {
        let (a, b, flag) = ((word >> 8 & 0xff) as usize, (word >> 16 & 0xff) as usize, word >> 31 != 0);
        match word & 0x1f {
            0..=5 => {
                let readable = a % (LONGEST + 1);
                let writable = b % (LONGEST + 1 - readable);
                Op::Add { readable, writable: if readable == 0 { writable.max(1) } else { writable } }
            }
            6..=7 => Op::AddSingle { count: a % 40, writable: flag },
            8..=11 => Op::Publish { ask: flag },
            12 => Op::DriverAsk,
            13..=15 => Op::TakeUsed { max: a % 40 },
            16 => Op::DriverSleep { poll: flag },
            17..=21 => Op::Take { max: a % 40 },
            22..=23 => Op::Untake { count: a % 4 },
            24..=27 => Op::Give { count: a % 40, order: b, ask: flag, deferred: word >> 30 & 1 != 0 },
            28 => Op::DeviceAsk,
            29 => Op::DeviceSleep { poll: flag },
            _ => Op::Restart,
        }
    }
}

/// A chain in flight, or added but not published.
struct Sent {
    serial: u64,
    cell: usize,
    buffers: Vec<Buffer>,
    readable: usize,
    slots: usize,
}

impl Sent {
    fn len(&self, buffers: std::ops::Range<usize>) -> u32 {
        self.buffers[buffers].iter().map(|buffer| buffer.len).sum()
    }
}

/// What one side has requested in the way of notifications.
#[derive(Default)]
struct Sleeper {
    asleep: bool,
    /// It has turned notifications off, and not on again since.
    disabled: bool,
}

struct Pair {
    config: Config,
    memory: Memory,
    driver: DriverRing,
    device: DeviceRing,
    burst: Chains,
    /// Number of chains added so far.
    serial: u64,
    /// Number of ring entries that they took.
    entries: usize,
    cells: Vec<usize>,
    sent: HashMap<u16, Sent>,
    /// Ids that the device has not taken, oldest first; the first `visible` of them are published.
    waiting: VecDeque<u16>,
    visible: usize,
    held: Vec<Chain>,
    given: VecDeque<Used>,
    /// Ring entries of each of the last returned chains that the driver need not see yet.
    deferred: VecDeque<usize>,
    returned: u64,
    driver_state: Sleeper,
    device_state: Sleeper,
}

fn byte(serial: u64, at: usize) -> u8 {
    (serial as usize).wrapping_mul(31).wrapping_add(at.wrapping_mul(7)).wrapping_add(serial as usize >> 6) as u8
}

fn pattern(serial: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| byte(serial, at)).collect()
}

impl Pair {
    fn new(config: Config) -> Pair {
        let (features, size) = (config.features, config.size);
        let tables = size as usize * config.tables.unwrap_or(0) * 16;
        let arena = size as usize * LONGEST * BUFFER;
        let memory = Memory::new(features, size, arena + tables, Some(config.cut % arena));
        let mut driver = memory.driver();
        if let Some(entries) = config.tables {
            let tables = IndirectTables::new(memory.driver.clone(), memory.arena + arena, size, entries).unwrap();
            driver.set_indirect(tables);
        }
        let mut burst = Chains::new(config.burst.0, config.burst.1);
        burst.start(&memory.device);
        Pair {
            device: memory.device(),
            driver,
            burst,
            serial: 0,
            entries: 0,
            cells: (0..size as usize).rev().collect(),
            sent: HashMap::new(),
            waiting: VecDeque::new(),
            visible: 0,
            held: Vec::new(),
            given: VecDeque::new(),
            deferred: VecDeque::new(),
            returned: 0,
            driver_state: Sleeper::default(),
            device_state: Sleeper::default(),
            memory,
            config,
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Add { readable, writable } => self.add(readable, writable),
            Op::AddSingle { count, writable } => self.add_single(count, writable),
            Op::Publish { ask } => {
                self.driver.publish();
                self.visible = self.waiting.len();
                if ask {
                    self.driver_ask();
                }
            }
            Op::DriverAsk => self.driver_ask(),
            Op::TakeUsed { max } => self.take_used(max),
            Op::DriverSleep { poll } => self.driver_sleep(poll),
            Op::Take { max } => self.take(max),
            Op::Untake { count } => self.untake(count),
            Op::Give { count, order, ask, deferred } => {
                self.give(count, order, deferred);
                if ask {
                    self.device_ask();
                }
            }
            Op::DeviceAsk => self.device_ask(),
            Op::DeviceSleep { poll } => self.device_sleep(poll),
            Op::Restart => self.restart(),
        }
        let used: usize = self.sent.values().map(|sent| sent.slots).sum();
        let free = self.config.size as usize - used;
        assert_eq!(self.driver.free(), free);
        assert_eq!(self.driver.next_id(free), None);
    }

    fn buffers(&self, serial: u64, cell: usize, count: usize) -> Vec<Buffer> {
        let buffer = |i: usize| {
            let mix = (serial * 8 + i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let len = 1 + (mix >> 32) as usize % BUFFER;
            let shift = (mix >> 48) as usize % (BUFFER - len + 1);
            Buffer { address: self.memory.address((cell * LONGEST + i) * BUFFER + shift), len: len as u32 }
        };
        (0..count).map(buffer).collect()
    }

    fn fill(&self, serial: u64, buffers: &[Buffer]) {
        let mut at = 0;
        for buffer in buffers {
            let bytes: Vec<u8> = (at..at + buffer.len as usize).map(|at| byte(serial, at)).collect();
            self.memory.write(buffer.address, &bytes);
            at += bytes.len();
        }
    }

    fn added(&mut self, id: u16, sent: Sent) {
        if self.config.features.in_order && !self.config.features.packed {
            assert_eq!(id as usize, self.entries % self.config.size as usize, "in ring order (2.7.5)");
        }
        self.serial += 1;
        self.entries += sent.slots;
        assert!(self.sent.insert(id, sent).is_none(), "id {id} was already in flight");
        self.waiting.push_back(id);
    }

    fn add(&mut self, readable: usize, writable: usize) {
        let (count, size, free) = (readable + writable, self.config.size as usize, self.driver.free());
        let tables = self.config.tables.filter(|_| self.config.features.indirect).unwrap_or(0);
        let slots = if count > 1 && count <= tables.min(size) { 1 } else { count };
        let expected = self.driver.next_id(0);
        let Some(&cell) = self.cells.last() else {
            assert_eq!(free, 0);
            return;
        };
        let buffers = self.buffers(self.serial, cell, count);
        let (to_read, to_write) = buffers.split_at(readable);
        self.fill(self.serial, to_read);
        let added = self.driver.add(to_read, to_write);
        assert_eq!(added.is_ok(), slots <= free, "{slots} of {free}");
        if let Ok(id) = added {
            assert_eq!(Some(id), expected);
            self.cells.pop();
            self.added(id, Sent { serial: self.serial, cell, buffers, readable, slots });
        }
    }

    fn add_single(&mut self, count: usize, writable: bool) {
        let possible = count.min(self.driver.free());
        let expected: Vec<_> = (0..possible).map(|ahead| self.driver.next_id(ahead).unwrap()).collect();
        let cells = self.cells.split_off(self.cells.len() - possible);
        let prepared: Vec<_> =
            cells.iter().zip(self.serial..).map(|(&cell, serial)| self.buffers(serial, cell, 1)[0]).collect();
        let mut ids = Vec::new();
        let added = self.driver.add_single(count, writable, |id| {
            ids.push(id);
            prepared[ids.len() - 1]
        });
        assert_eq!(added, possible);
        assert_eq!(ids, expected);
        for ((id, buffer), cell) in ids.into_iter().zip(prepared).zip(cells) {
            let readable = usize::from(!writable);
            self.fill(self.serial, &[buffer][..readable]);
            self.added(id, Sent { serial: self.serial, cell, buffers: vec![buffer], readable, slots: 1 });
        }
    }

    fn driver_ask(&mut self) {
        let wanted = self.driver.wants_notification();
        check_suppressed(&self.config, &self.device_state, wanted);
        self.device_state.asleep &= !wanted;
        assert!(!self.device_state.asleep || self.visible == 0, "asleep with {} chains pending", self.visible);
    }

    fn device_ask(&mut self) {
        self.device.flush();
        self.deferred.clear();
        let wanted = self.device.wants_notification(true);
        check_suppressed(&self.config, &self.driver_state, wanted);
        self.driver_state.asleep &= !wanted;
        let given = self.given.len();
        assert!(!self.driver_state.asleep || given == 0, "asleep with {given} used chains pending");
    }

    fn driver_sleep(&mut self, poll: bool) {
        if poll {
            self.driver.disable_notification();
            self.driver_state = Sleeper { asleep: false, disabled: true };
        } else {
            let ready = self.driver.enable_notification();
            assert!(!ready || !self.given.is_empty());
            assert!(ready || self.given.len() <= self.deferred.len());
            self.driver_state = Sleeper { asleep: !ready, disabled: false };
        }
    }

    fn device_sleep(&mut self, poll: bool) {
        self.process(0);
        if poll {
            self.device.disable_notification();
            self.device_state = Sleeper { asleep: false, disabled: true };
        } else {
            let ready = self.device.enable_notification();
            assert_eq!(ready, self.visible > 0);
            self.device_state = Sleeper { asleep: !ready, disabled: false };
        }
    }

    /// Number of pieces of a chain: one more for each buffer that crosses into the other region.
    fn pieces(&self, id: u16) -> usize {
        let regions = self.memory.device.regions();
        let crosses = |buffer: &&Buffer| {
            let end = buffer.address + u64::from(buffer.len);
            regions.get(1).is_some_and(|region| buffer.address < region.guest() && end > region.guest())
        };
        let buffers = &self.sent[&id].buffers;
        buffers.len() + buffers.iter().filter(crosses).count()
    }

    fn take(&mut self, max: usize) {
        if self.device_state.asleep {
            return;
        }
        let before = self.burst.list().len();
        let spans = |chain: &Chain| self.burst.readable(chain).len() + self.burst.writable(chain).len();
        let mut room = usize::from(self.config.burst.1) - self.burst.list().iter().map(spans).sum::<usize>();
        let fits = |id: &&u16| {
            let left = room.checked_sub(self.pieces(**id));
            room = left.unwrap_or(0);
            left.is_some()
        };
        let limit = max.min(self.visible).min(self.burst.room());
        let expected = self.waiting.iter().take(limit).take_while(fits).count();
        assert_eq!(self.device.take(&self.memory.device, &mut self.burst, max), Ok(expected));
        assert_eq!(self.burst.list().len(), before + expected);
        for chain in &self.burst.list()[before..] {
            let id = self.waiting.pop_front().unwrap();
            let sent = &self.sent[&id];
            assert_eq!(chain.id, id);
            assert!(!chain.clipped && chain.written == 0);
            let slots = if self.config.features.packed { sent.slots } else { 1 };
            assert_eq!(chain.slots() as usize, slots);
            assert_eq!(chain.readable_len(), sent.len(0..sent.readable));
            assert_eq!(chain.writable_len(), sent.len(sent.readable..sent.buffers.len()));
        }
        self.visible -= expected;
    }

    fn untake(&mut self, count: usize) {
        if self.device_state.asleep {
            return;
        }
        let keep = self.burst.list().len().saturating_sub(count);
        for chain in self.burst.list()[keep..].iter().rev() {
            self.waiting.push_front(chain.id);
            self.visible += 1;
        }
        self.device.untake(&mut self.burst, keep);
        assert_eq!(self.burst.list().len(), keep);
    }

    /// Reads and writes all chains of the burst, and empties it.
    fn process(&mut self, how: usize) {
        for i in 0..self.burst.list().len() {
            let chain = self.burst.list()[i];
            let serial = self.sent[&chain.id].serial;
            let mut got = Vec::new();
            for span in self.burst.readable(&chain) {
                let mut bytes = vec![0; span.len()];
                span.read(&mut bytes);
                got.extend(bytes);
            }
            assert_eq!(got, pattern(serial, chain.readable_len() as usize));
            let len = match (how + i) % 5 {
                0..=2 => 0,
                3 => chain.writable_len(),
                _ => serial as u32 % (chain.writable_len() + 1),
            };
            let reply = pattern(!serial, len as usize);
            let mut at = 0;
            for span in self.burst.writable(&chain) {
                at += span.write(&reply[at..]);
            }
            assert_eq!(at, reply.len());
            self.burst.list_mut()[i].written = len;
        }
        self.held.extend_from_slice(self.burst.list());
        self.burst.start(&self.memory.device);
    }

    fn give(&mut self, count: usize, order: usize, deferred: bool) {
        self.process(order);
        let count = count.min(self.held.len());
        if !self.config.features.in_order && !order.is_multiple_of(3) {
            let len = self.held.len().max(1);
            self.held.rotate_left(order % len);
            self.held[..count].reverse();
        }
        if deferred {
            self.device.give_deferred(&self.held[..count]);
            let slots = |chain: &Chain| if self.config.features.packed { chain.slots().into() } else { 1 };
            self.deferred.extend(self.held[..count].iter().map(slots));
            // At most a quarter of the ring is deferred.
            while self.deferred.iter().sum::<usize>() >= (self.config.size as usize / 4).max(1) {
                self.deferred.pop_front();
            }
        } else {
            self.device.give(&self.held[..count]);
            if count > 0 {
                self.deferred.clear();
            }
        }
        self.given.extend(self.held.drain(..count).map(|chain| Used { id: chain.id, len: chain.written }));
    }

    fn take_used(&mut self, max: usize) {
        if self.driver_state.asleep {
            return;
        }
        let mut out = vec![Used::default(); max];
        let count = self.driver.take_used(&mut out).unwrap();
        assert!(count <= max.min(self.given.len()));
        assert!(count >= max.min(self.given.len() - self.deferred.len()), "fewer used chains than published");
        self.deferred.drain(..(self.deferred.len() + count).saturating_sub(self.given.len()));
        for used in &out[..count] {
            assert_eq!(Some(*used), self.given.pop_front());
            let sent = self.sent.remove(&used.id).unwrap();
            let mut got = Vec::new();
            for buffer in &sent.buffers[sent.readable..] {
                let mut bytes = vec![0; buffer.len as usize];
                let offset = (buffer.address - common::GUEST) as usize;
                self.memory.driver.span(offset, bytes.len()).unwrap().read(&mut bytes);
                got.extend(bytes);
            }
            assert_eq!(got[..used.len as usize], pattern(!sent.serial, used.len as usize));
            self.cells.push(sent.cell);
            self.returned += 1;
        }
    }

    fn restart(&mut self) {
        if !self.burst.list().is_empty() || !self.held.is_empty() {
            return;
        }
        // A device that stops publishes what it has returned.
        self.device_ask();
        // The driver can compute the same base, whether it has taken the used chains or not, for a device without state.
        let base = self.device.base();
        assert_eq!((self.driver.base(), self.driver.missing(base)), (base, 0));
        self.device = self.memory.device_at(self.driver.base());
        self.device_state.asleep = false;
    }

    /// Runs until all chains are back; only a side that is awake acts.
    fn drain(&mut self) {
        let mut rounds = 0;
        loop {
            rounds += 1;
            assert!(rounds < 100_000, "does not terminate");
            self.step(Op::Publish { ask: true });
            self.step(Op::Take { max: usize::MAX });
            self.step(Op::Give { count: usize::MAX, order: rounds, ask: true, deferred: rounds % 2 == 0 });
            if !self.device_state.asleep && self.visible == 0 {
                self.step(Op::DeviceSleep { poll: false });
            }
            self.step(Op::TakeUsed { max: 100 });
            if !self.driver_state.asleep && self.given.is_empty() {
                self.step(Op::DriverSleep { poll: false });
            }
            if self.driver_state.asleep && self.device_state.asleep {
                break;
            }
        }
        assert!(self.sent.is_empty() && self.waiting.is_empty() && self.held.is_empty() && self.given.is_empty());
        assert_eq!(self.returned, self.serial);
        assert_eq!(self.cells.len(), self.config.size as usize);
        assert_eq!(self.driver.free(), self.config.size as usize);
    }
}

/// Flags and packed event structures can turn notifications off completely; a split ring's event index cannot quite.
fn check_suppressed(config: &Config, other: &Sleeper, wanted: bool) {
    if config.features.packed || !config.features.event_idx {
        assert!(!(other.disabled && wanted), "a notification although they are turned off");
    }
}

fn config() -> impl Strategy<Value = Config> {
    let split = prop_oneof![6 => 0..5u32, 4 => 5..=10u32, 1 => Just(15)].prop_map(|log| 1 << log);
    let packed = prop_oneof![6 => 1..=9u32, 4 => 10..=1000u32, 1 => Just(32768)];
    let size = prop_oneof![split.prop_map(|size| (false, size)), packed.prop_map(|size| (true, size))];
    let tables = prop::option::of(2..=8usize);
    let burst = (1..=40usize, prop_oneof![7..=40u16, Just(512)]);
    (size, any::<[bool; 3]>(), tables, burst, any::<usize>()).prop_map(
        |((packed, size), [indirect, event_idx, in_order], tables, burst, cut)| Config {
            features: Features { packed, indirect, event_idx, in_order },
            size,
            tables,
            burst,
            cut: cut % 5000,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_schedule(config in config(), words in prop::collection::vec(any::<u32>(), 1..300)) {
        let mut pair = Pair::new(config);
        for word in words {
            pair.step(Op::from_word(word));
        }
        pair.drain();
    }
}

/// Long enough for the 16-bit indices of a split ring to wrap, and for packed rings to wrap at every alignment.
#[test]
fn long_schedules() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as u32
    };
    for features in all_features() {
        for size in if features.packed { [3, 21] } else { [4, 64] } {
            let tables = (size > 4).then_some(3);
            let config = Config { features, size, tables, burst: (BURST, 80), cut: 777 };
            let mut pair = Pair::new(config);
            let chains = if size == 64 { 80_000 } else { 5_000 };
            while pair.serial < chains {
                pair.step(Op::from_word(next()));
                // The random schedule alone leaves both sides asleep most of the time.
                if next() % 16 == 0 {
                    pair.drain();
                    pair.driver_state.asleep = false;
                    pair.device_state.asleep = false;
                }
            }
            pair.drain();
        }
    }
}
