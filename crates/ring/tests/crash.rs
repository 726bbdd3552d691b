//! Kills a device at random instructions, many times, and checks that its successor continues correctly: no buffer is lost,
//! none is returned twice, and none is forwarded twice. The device is a separate process running this program, which maps
//! the ring and the journal from its parent's files. With an inflight region instead of the journal the device returns
//! buffers out of order; some may then be forwarded twice, as the region does not record what was forwarded.
#![cfg(not(loom))]

#[allow(dead_code, reason = "shared with other tests")]
mod common;

use common::{GUEST, Memory, all_features};
use ringroad_mem::{Region, Table, Words, sync::AtomicU64};
use ringroad_ring::{
    Addresses, BURST, Buffer, Chains, DeviceRing, DriverRing, Features, IndirectTables, Inflight, Journal, Resumed,
    Used,
};
use std::{
    fs::{File, OpenOptions},
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// Kills per ring.
const KILLS: u32 = 30;
/// Chains that can be sent through one ring, each with its own serial number.
const SERIALS: usize = 4 << 20;
/// Behind the counts of forwarded chains: the process that works on the ring.
const AT_WORK: usize = SERIALS;
/// Bytes of a buffer.
const BUFFER: usize = 32;
/// The longest chain, in buffers.
const LONGEST: usize = 3;

/// Arguments of the device process.
#[derive(Clone, Copy, Debug)]
struct Config {
    features: Features,
    size: u32,
    /// The device reads and forwards (a transmit queue); else it writes (a receive queue).
    transmits: bool,
    /// Use chains of several buffers and indirect tables.
    multi_buffer: bool,
    /// Use an inflight region instead of the journal.
    tracked: bool,
}

fn main() {
    match std::env::var("RINGROAD_CRASH") {
        Ok(arguments) => device(&arguments),
        Err(_) => test(),
    }
}

/// The files that both processes map: the driver's memory, the journal, and the counts of forwarded chains.
struct Files {
    memory: Memory,
    file: File,
    journal: (Arc<Region>, File),
    forwarded: (Arc<Region>, File),
}

fn test() {
    let (mut rings, mut kills, mut recovered, mut finished, mut resubmitted) = (0, 0, 0, 0, 0);
    for features in all_features() {
        for bits in 0..8 {
            let [transmits, multi_buffer, tracked] = [1, 2, 4].map(|bit| bits & bit != 0);
            let size = if features.packed { 21 } else { 32 };
            let outcome = run(Config { features, size, transmits, multi_buffer, tracked });
            resubmitted += outcome.resubmitted;
            rings += 1;
            kills += outcome.kills;
            recovered += outcome.recovered;
            finished += outcome.finished;
        }
    }
    assert!(recovered > 0 && finished > 0, "no device has resumed from its journal");
    assert!(resubmitted > u64::from(kills), "few devices have resumed from the region: {resubmitted} buffers");
    println!(
        "{rings} rings, {kills} kills: {recovered} journals used, {finished} buffers finished, {resubmitted} resubmitted"
    );
    println!("{rings} passed, 0 failed");
}

#[derive(Default)]
struct Outcome {
    kills: u32,
    recovered: u32,
    finished: u64,
    resubmitted: u64,
}

#[expect(clippy::too_many_lines, reason = "one loop over the state of one process")]
fn run(config: Config) -> Outcome {
    let Config { features, size, transmits, multi_buffer, tracked } = config;
    let tables = size as usize * LONGEST * 16;
    let arena = size as usize * LONGEST * BUFFER;
    let start = DriverRing::bytes(features, size);
    let (driver, file) = Region::create(start + arena + tables, GUEST, false).unwrap();
    let memory = Memory::over(features, size, driver, &file);
    let files = Files {
        memory,
        file,
        journal: Region::create(4096, 0, false).unwrap(),
        forwarded: Region::create(8 * (SERIALS + 1), 0, false).unwrap(),
    };
    let mut driver = files.memory.driver();
    if multi_buffer {
        let tables = IndirectTables::new(files.memory.driver.clone(), start + arena, size, LONGEST).unwrap();
        driver.set_indirect(tables);
    }
    let forwarded: Words<AtomicU64> = Words::new(&files.forwarded.0, 0, SERIALS + 1).unwrap();
    let mut guest = Guest {
        config,
        memory: &files.memory,
        driver,
        serial: 0,
        back: 0,
        cells: Vec::new(),
        sent: Default::default(),
    };
    guest.cells = (0..size as usize).rev().collect();
    let mut outcome = Outcome::default();
    for round in 0..=KILLS {
        let last = round == KILLS;
        let mut child = spawn(config, &files, last);
        let time = Duration::from_micros(3000 + u64::from(round * 7919 % 2500));
        let deadline = Instant::now() + Duration::from_secs(20);
        // Some die before they work, or while they resume; an emulated one takes long for it.
        let mut until = (round % 4 == 3).then(|| Instant::now() + time);
        while if last { guest.back < guest.serial } else { until.is_none_or(|until| Instant::now() < until) } {
            assert!(Instant::now() < deadline, "{config:?}: {} of {} chains back", guest.back, guest.serial);
            if until.is_none() && forwarded[AT_WORK].load(Ordering::Relaxed) == u64::from(child.id()) {
                until = Some(Instant::now() + time);
            }
            guest.step(!last);
        }
        outcome.kills += u32::from(!last);
        child.kill().unwrap();
        let out = child.wait_with_output().unwrap();
        let output = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.stderr.is_empty(), "{config:?}: {}", String::from_utf8_lossy(&out.stderr));
        if let Some(count) = output.strip_prefix("recovered ").and_then(|rest| rest.trim().parse::<u64>().ok()) {
            outcome.recovered += 1;
            outcome.finished += count;
        }
        if let Some(count) = output.strip_prefix("resubmitted ").and_then(|rest| rest.trim().parse::<u64>().ok()) {
            outcome.resubmitted += count;
        }
        assert!(!output.contains("lost"), "{config:?}: the position was lost");
    }
    assert_eq!(guest.driver.free(), size as usize);
    if transmits {
        let mut missing = 0;
        for (serial, count) in forwarded.iter().take(guest.serial as usize).enumerate() {
            match count.load(Ordering::Relaxed) {
                0 => missing += 1,
                1 => {}
                2.. if tracked => {}
                count => panic!("{config:?}: chain {serial} of {} was forwarded {count} times", guest.serial),
            }
        }
        // A killed device may have consumed chains without forwarding them; its successor only returns those.
        let limit = if tracked { 0 } else { u64::from(KILLS) * u64::from(size) };
        assert!(missing <= limit, "{config:?}: {missing} of {} not forwarded", guest.serial);
    }
    assert!(guest.serial > u64::from(KILLS), "{config:?}: only {} chains", guest.serial);
    outcome
}

fn spawn(config: Config, files: &Files, patient: bool) -> Child {
    let Config {
        features: Features { packed, indirect, event_idx, in_order },
        size,
        transmits,
        multi_buffer: _,
        tracked,
    } = config;
    let Addresses { descriptor, driver, device } = files.memory.at;
    let paths = [&files.file, &files.journal.1, &files.forwarded.1]
        .map(|file| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
    let bits = [packed, indirect, event_idx, in_order, transmits, patient, tracked]
        .map(|bit| u8::from(bit).to_string())
        .join(" ");
    let user = files.memory.driver.user();
    let arguments = format!("{bits} {size} {user} {descriptor} {driver} {device} {}", paths.join(" "));
    program()
        .env("RINGROAD_CRASH", arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// This program again; by an emulator, if `RINGROAD_RUNNER` is one.
fn program() -> Command {
    let runner = std::env::var("RINGROAD_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace().map(Into::into).chain([std::env::current_exe().unwrap()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    command
}

/// The driver, which outlives its devices.
struct Guest<'a> {
    config: Config,
    memory: &'a Memory,
    driver: DriverRing,
    serial: u64,
    back: u64,
    cells: Vec<usize>,
    /// Cell of each chain in flight, by id.
    sent: std::collections::HashMap<u16, usize>,
}

impl Guest<'_> {
    fn step(&mut self, sends: bool) {
        let Config { transmits, multi_buffer, .. } = self.config;
        while sends && (self.serial as usize) < SERIALS && !self.cells.is_empty() {
            let cell = self.cells[self.cells.len() - 1];
            let address = self.memory.address(cell * LONGEST * BUFFER);
            self.memory.write(address, &self.serial.to_le_bytes());
            let count = if multi_buffer { 1 + (self.serial % LONGEST as u64) as usize } else { 1 };
            let buffers: Vec<_> = (0..count)
                .map(|index| Buffer { address: address + (index * BUFFER) as u64, len: BUFFER as u32 })
                .collect();
            let added = if transmits { self.driver.add(&buffers, &[]) } else { self.driver.add(&[], &buffers) };
            let Ok(id) = added else { break };
            self.cells.pop();
            assert!(self.sent.insert(id, cell).is_none());
            self.serial += 1;
        }
        self.driver.publish();
        let mut used = [Used::default(); 8];
        let count = self.driver.take_used(&mut used).unwrap_or_else(|fault| panic!("{:?}: {fault}", self.config));
        for used in &used[..count] {
            let cell = self.sent.remove(&used.id).expect("returned only once");
            if !transmits && used.len > 0 {
                // The device writes to the buffer the length that it reports.
                let mut reported = [0; 8];
                let offset = (self.memory.address(cell * LONGEST * BUFFER) - GUEST) as usize;
                self.memory.driver.span(offset, 8).unwrap().read(&mut reported);
                assert_eq!(
                    u64::from_le_bytes(reported) >> 32,
                    u64::from(used.len),
                    "{:?}: another buffer's length",
                    self.config
                );
            }
            self.cells.push(cell);
            self.back += 1;
        }
        if count == 0 {
            thread::yield_now();
        }
    }
}

/// The device process: works until it is killed.
#[expect(clippy::too_many_lines, reason = "one loop over the state of one process")]
fn device(arguments: &str) {
    let words: Vec<&str> = arguments.split(' ').collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    let [packed, indirect, event_idx, in_order, transmits, patient, tracked] =
        std::array::from_fn(|index| number(index) == 1);
    let features = Features { packed, indirect, event_idx, in_order };
    let (size, user) = (number(7) as u32, number(8));
    let at = Addresses { descriptor: number(9), driver: number(10), device: number(11) };
    let open = |index: usize| OpenOptions::new().read(true).write(true).open(words[index]).unwrap();
    let map = |file: &File, guest, user| Region::map(file, 0, file.metadata().unwrap().len(), guest, user).unwrap();
    let memory = Arc::new(Table::default().with(map(&open(12), GUEST, user)).unwrap());
    let region = map(&open(13), 0, 0);
    let (journal, inflight) = match tracked {
        true => (Journal::NONE, Inflight::new(&region, 0, size as u16, packed).unwrap()),
        false => (Journal::new(&region, 0), Inflight::NONE),
    };
    let forwarded: Words<AtomicU64> = Words::new(&map(&open(14), 0, 0), 0, SERIALS + 1).unwrap();
    // A frontend that has no state knows no other base.
    let base = features.fresh_base();
    let (mut ring, resumed) = DeviceRing::resume(&memory, features, size, at, base, journal, inflight).unwrap();
    match resumed {
        Resumed::Journal { finished } => println!("recovered {finished}"),
        Resumed::Lost => println!("lost"),
        Resumed::Inflight { resubmitted } => println!("resubmitted {resubmitted}"),
        Resumed::Base | Resumed::UsedIndex => println!("base"),
    }
    forwarded[AT_WORK].store(std::process::id().into(), Ordering::Relaxed);
    let mut burst = Chains::new(BURST, 200);
    let mut random = std::process::id() as usize;
    let mut held = Vec::new();
    loop {
        random = random.wrapping_mul(25_214_903_917).wrapping_add(11);
        burst.start(&memory);
        let count = ring.take(&memory, &mut burst, 1 + (random >> 20) % 20).unwrap();
        if count == 0 {
            // Half a ring stays in flight, if it may be returned out of order.
            let keep = if patient { 0 } else { held.len().min(size as usize / 2) };
            let given: Vec<_> = held.drain(..held.len() - keep).collect();
            ring.give(&given);
            ring.flush();
            if patient {
                thread::yield_now();
            }
            continue;
        }
        if transmits {
            ring.consume();
            for chain in burst.list() {
                let mut serial = [0; 8];
                burst.readable(chain)[0].read(&mut serial);
                forwarded[u64::from_le_bytes(serial) as usize].fetch_add(1, Ordering::Relaxed);
            }
        } else {
            for index in 0..count {
                let chain = burst.list()[index];
                let written = (8 + (random >> 24) + index) as u32 % (chain.writable_len() - 8) + 8;
                burst.writable(&chain)[0].write(&(u64::from(written) << 32).to_le_bytes());
                burst.list_mut()[index].written = written;
            }
        }
        held.extend_from_slice(burst.list());
        let mut given = Vec::new();
        if tracked {
            // Return some of them, newest first unless they must be in order.
            let count = (random >> 34) % (held.len() + 1);
            let from = if in_order { 0 } else { held.len() - count };
            given.extend(held.drain(from..from + count));
            if !in_order {
                given.reverse();
            }
        } else {
            given.append(&mut held);
        }
        if random >> 30 & 1 == 0 {
            ring.give_deferred(&given)
        } else {
            ring.give(&given)
        }
        ring.wants_notification(true);
    }
}
