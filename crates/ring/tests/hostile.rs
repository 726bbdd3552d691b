//! Malformed rings: each end must report exactly the right fault, and must never panic, hang or do more work than the ring
//! has entries.
#![cfg(not(loom))]

#[allow(dead_code, reason = "shared with other tests")]
mod common;
#[path = "hostile/random.rs"]
mod random;
#[path = "hostile/setup.rs"]
mod setup;
#[path = "hostile/used.rs"]
mod used;

use common::{GUEST, Memory, all_features};
use proptest::prelude::*;
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::{
    Addresses, BURST, Buffer, Chain, Chains, DeviceRing, DriverFault, DriverRing, Fault, Features, SetupError, Used,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;

const SIZE: u16 = 8;
const ARENA: usize = 65536;

const SPLIT: Features = Features { packed: false, indirect: true, event_idx: false, in_order: false };
const PACKED: Features = Features { packed: true, ..SPLIT };

/// A ring whose contents a test writes directly.
struct Raw(Memory);

impl Raw {
    fn new(features: Features, size: u16) -> Raw {
        Raw(Memory::new(features, size.into(), ARENA, None))
    }

    /// Writes descriptor `index` of the ring; in a packed ring it is available in the first pass. `tail`: `next` or the id.
    fn descriptor(&self, index: u16, address: u64, len: u32, flags: u16, tail: u16) {
        let at = self.0.at.descriptor + u64::from(index) * 16;
        if self.0.features.packed {
            self.0.write_user(at, &packed_bytes(address, len, flags | AVAILABLE, tail));
        } else {
            self.0.write_user(at, &split_bytes(address, len, flags, tail));
        }
    }

    /// Writes a chain of consecutive descriptors from `index` on; sets NEXT in all but the last.
    fn chain(&self, index: u16, descriptors: &[(u64, u32, u16)]) {
        for (i, &(address, len, flags)) in (0..).zip(descriptors) {
            let more = if i as usize + 1 < descriptors.len() { NEXT } else { 0 };
            let tail = if self.0.features.packed { index } else { index + i + 1 };
            self.descriptor(index + i, address, len, flags | more, tail);
        }
    }

    /// Writes an indirect table at `offset` of the arena; returns its address. Otherwise like `chain`.
    fn table(&self, offset: usize, descriptors: &[(u64, u32, u16)]) -> u64 {
        let address = self.0.address(offset);
        for (i, &(buffer, len, flags)) in (0..).zip(descriptors) {
            let more = i as usize + 1 < descriptors.len();
            let bytes = if self.0.features.packed {
                packed_bytes(buffer, len, flags, 0)
            } else {
                split_bytes(buffer, len, flags | if more { NEXT } else { 0 }, if more { i + 1 } else { 0 })
            };
            self.0.write(address + u64::from(i) * 16, &bytes);
        }
        address
    }

    /// Makes heads available (split only; the descriptors of a packed ring contain that information).
    fn publish(&self, heads: &[u16]) {
        if !self.0.features.packed {
            for (slot, head) in (0..).zip(heads) {
                self.0.write_user(self.0.at.driver + 4 + 2 * slot, &head.to_le_bytes());
            }
            self.index(heads.len() as u16);
        }
    }

    fn index(&self, index: u16) {
        self.0.write_user(self.0.at.driver + 2, &index.to_le_bytes());
    }

    fn data(&self) -> u64 {
        self.0.address(0)
    }
}

fn split_bytes(address: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    (u128::from(address) | u128::from(len) << 64 | u128::from(flags) << 96 | u128::from(next) << 112).to_le_bytes()
}

fn packed_bytes(address: u64, len: u32, flags: u16, id: u16) -> [u8; 16] {
    (u128::from(address) | u128::from(len) << 64 | u128::from(id) << 96 | u128::from(flags) << 112).to_le_bytes()
}

/// Descriptor 0 is a valid chain, descriptor 1 the head of what `write` makes. The valid chain must be taken, then the
/// fault must be reported repeatedly.
#[track_caller]
fn expect(features: Features, write: impl FnOnce(&Raw), fault: Fault, text: &str) {
    let raw = Raw::new(features, SIZE);
    raw.descriptor(0, raw.data(), 77, 0, 0);
    write(&raw);
    raw.publish(&[0, 1]);
    faults_after(&raw, 1, fault, text);
}

/// Expects `good` chains, then the fault.
#[track_caller]
fn faults_after(raw: &Raw, good: usize, fault: Fault, text: &str) {
    let mut ring = vec![0; raw.0.arena];
    raw.0.driver.span(0, ring.len()).unwrap().read(&mut ring);
    let mut device = raw.0.device();
    let mut burst = Chains::new(BURST, 64);
    burst.start(&raw.0.device);
    if good > 0 {
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(good), "chains before the fault");
    }
    // Often enough to fill the burst if a faulty chain left anything behind.
    for _ in 0..70 {
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Err(fault));
        assert!(device.enable_notification(), "must not wait for a faulty driver");
    }
    assert_eq!(burst.list().len(), good);
    if let Some(chain) = burst.list().first() {
        assert_eq!((chain.id, chain.readable_len(), burst.readable(chain).len()), (0, 77, 1));
    }
    device.give(burst.list());
    assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Err(fault));
    // Taken separately, the fault is the same. (Restore the ring, which returning the chains has changed.)
    raw.0.driver.span(0, ring.len()).unwrap().write(&ring);
    if good > 0 {
        let mut device = raw.0.device();
        burst.start(&raw.0.device);
        assert_eq!(device.take(&raw.0.device, &mut burst, 1), Ok(1));
        assert_eq!(device.take(&raw.0.device, &mut burst, 1), Err(fault));
    }
    let got = fault.to_string();
    assert!(got.contains(text), "{got:?} does not contain {text:?}");
}

#[test]
fn addresses_outside_memory() {
    for features in [SPLIT, PACKED] {
        let end = GUEST + Raw::new(features, SIZE).0.driver.len() as u64;
        let cases = [
            (0, 1),
            (0xdead, 100),
            (GUEST - 1, 2),
            (end, 1),
            (end - 1, 2),
            (GUEST, u32::MAX),
            (u64::MAX, 1),
            (u64::MAX, u32::MAX),
            (u64::MAX - 98, 100),
            (u64::MAX - u64::from(u32::MAX) + 1, u32::MAX),
        ];
        for (address, len) in cases {
            let fault = |index| Fault::Outside { index, address, len, regions: 1 };
            let text = format!("at {address:#x} + {len} lies outside guest memory (1 regions)");
            for flags in [0, WRITE] {
                expect(features, |raw| raw.chain(1, &[(address, len, flags)]), fault(1), &text);
                if len == u32::MAX {
                    // Behind another buffer the chain would be too long anyway.
                    continue;
                }
                let chained = |raw: &Raw| raw.chain(1, &[(raw.data(), 1, 0), (address, len, flags)]);
                expect(features, chained, fault(2), &format!("descriptor 2 {text}"));
                let in_table = |raw: &Raw| {
                    let table = raw.table(4096, &[(raw.data(), 1, 0), (address, len, flags)]);
                    raw.descriptor(1, table, 32, INDIRECT, 1);
                };
                expect(features, in_table, fault(1), &format!("descriptor 1 {text}"));
            }
        }
    }
}

#[test]
fn chains_of_more_than_4_gib() {
    const HALF: u32 = 1 << 31;
    for features in [SPLIT, PACKED] {
        // Sparse memory, never touched.
        let raw = Raw(Memory::new(features, SIZE.into(), HALF as usize, None));
        raw.descriptor(0, raw.data(), 77, 0, 0);
        raw.chain(1, &[(raw.data(), HALF, 0), (raw.data(), HALF - 1, WRITE), (raw.data(), 1, WRITE)]);
        raw.publish(&[0, 1]);
        faults_after(&raw, 1, Fault::Length { index: 3 }, "descriptor 3 is longer than 4 GiB");
        let table = raw.table(4096, &[(raw.data(), HALF, 0), (raw.data(), HALF, 0)]);
        raw.descriptor(1, table, 32, INDIRECT, 1);
        faults_after(&raw, 1, Fault::Length { index: 1 }, "descriptor 1 is longer than 4 GiB");
        // One byte less is valid.
        raw.chain(1, &[(raw.data(), HALF, 0), (raw.data(), HALF - 1, WRITE)]);
        let mut burst = Chains::new(BURST, 64);
        burst.start(&raw.0.device);
        assert_eq!(raw.0.device().take(&raw.0.device, &mut burst, 2), Ok(2));
        assert_eq!((burst.list()[1].readable_len(), burst.list()[1].writable_len()), (HALF, HALF - 1));
    }
}

#[test]
fn loops_and_chains_longer_than_the_queue() {
    let text = "loops or has more than 8 descriptors";
    // A descriptor linked to itself, two linked to each other, and one that leads back to the valid chain.
    for nexts in [[1, 1], [2, 1], [2, 2], [0, 0]] {
        let write = |raw: &Raw| {
            raw.descriptor(1, raw.data(), 10, NEXT, nexts[0]);
            raw.descriptor(2, raw.data(), 10, NEXT, nexts[1]);
            if nexts == [0, 0] {
                raw.descriptor(0, raw.data(), 77, NEXT, 1);
            }
        };
        let raw = Raw::new(SPLIT, SIZE);
        write(&raw);
        raw.publish(&[1]);
        let mut device = raw.0.device();
        let mut burst = Chains::new(BURST, 64);
        burst.start(&raw.0.device);
        for _ in 0..3 {
            let fault = device.take(&raw.0.device, &mut burst, BURST).unwrap_err();
            assert!(matches!(fault, Fault::Loop { size: 8, .. }), "{fault:?}");
            assert!(fault.to_string().contains(text));
        }
    }
    // All descriptors of a packed ring in one endless chain; also in a ring of one.
    for size in [1, SIZE] {
        let raw = Raw::new(PACKED, size);
        (0..size).for_each(|index| raw.descriptor(index, raw.data(), 10, NEXT, 3));
        let text = format!("with descriptor 0 loops or has more than {size} descriptors");
        faults_after(&raw, 0, Fault::Loop { index: 0, size }, &text);
    }
    let raw = Raw::new(SPLIT, 1);
    raw.descriptor(0, raw.data(), 10, NEXT, 0);
    raw.publish(&[0]);
    faults_after(&raw, 0, Fault::Loop { index: 0, size: 1 }, "more than 1 descriptors");
    for features in [SPLIT, PACKED] {
        // The longest valid chain has as many descriptors as the queue, directly or in a table.
        for (count, good) in [(8, true), (9, false)] {
            let raw = Raw::new(features, SIZE);
            let table = raw.table(4096, &vec![(raw.data(), 1, 0); count]);
            raw.descriptor(0, table, count as u32 * 16, INDIRECT, 0);
            raw.publish(&[0]);
            if !good {
                faults_after(&raw, 0, Fault::Loop { index: 8, size: 8 }, "descriptor 8 loops or has more than 8");
                continue;
            }
            let mut burst = Chains::new(BURST, 64);
            for _ in 0..2 {
                burst.start(&raw.0.device);
                assert_eq!(raw.0.device().take(&raw.0.device, &mut burst, BURST), Ok(1));
                assert_eq!((burst.list()[0].readable_len(), burst.readable(&burst.list()[0]).len()), (8, 8));
                raw.chain(0, &[(raw.data(), 1, 0); 8]);
            }
        }
    }
    // A loop within an indirect table (split; packed tables have no links).
    let looped = |raw: &Raw| {
        let table = raw.table(4096, &[(raw.data(), 1, NEXT); 2]);
        raw.0.write(table + 16, &split_bytes(raw.data(), 1, NEXT, 1));
        raw.descriptor(1, table, 32, INDIRECT, 0);
    };
    expect(SPLIT, looped, Fault::Loop { index: 1, size: 8 }, "descriptor 1 loops");
}

#[test]
fn indirect_where_not_allowed() {
    for features in [SPLIT, PACKED] {
        let (one, two) = (Fault::Indirect { index: 1 }, Fault::Indirect { index: 2 });
        let good = |raw: &Raw| raw.table(4096, &[(raw.data(), 1, 0)]);
        let with_next = |raw: &Raw| raw.descriptor(1, good(raw), 16, INDIRECT | NEXT, 2);
        expect(features, with_next, one, "descriptor 1 must not be indirect");
        let chained = |raw: &Raw| raw.chain(1, &[(raw.data(), 1, 0), (good(raw), 16, INDIRECT | NEXT)]);
        expect(features, chained, two, "descriptor 2 must not be indirect");
        let nested = |raw: &Raw| {
            let table = raw.table(8192, &[(raw.data(), 1, 0), (raw.data(), 1, 0), (good(raw), 16, INDIRECT)]);
            raw.descriptor(1, table, 48, INDIRECT, 0);
        };
        expect(features, nested, two, "descriptor 2 must not be indirect");
        let plain = Features { indirect: false, ..features };
        expect(plain, |raw| raw.descriptor(1, good(raw), 16, INDIRECT, 1), one, "feature not negotiated");
        expect(plain, |raw| raw.chain(1, &[(raw.data(), 1, 0), (good(raw), 16, INDIRECT)]), two, "descriptor 2");
    }
}

#[test]
fn indirect_tables_of_odd_lengths_and_addresses() {
    for features in [SPLIT, PACKED] {
        for len in [0, 1, 15, 17, 31, 127, u32::MAX] {
            let fault = Fault::IndirectLength { index: 1, len };
            let text = format!("descriptor 1 refers to an indirect table of {len} bytes");
            expect(features, |raw| raw.descriptor(1, raw.data(), len, INDIRECT, 0), fault, &text);
        }
        let end = GUEST + Raw::new(features, SIZE).0.driver.len() as u64;
        for (address, len) in
            [(0xdead_0000, 16), (end, 16), (end - 16, 32), (u64::MAX - 14, 16), (u64::MAX, 32), (GUEST, 0xffff_fff0)]
        {
            let fault = Fault::Outside { index: 1, address, len, regions: 1 };
            let text = format!("descriptor 1 at {address:#x} + {len} lies outside");
            expect(features, |raw| raw.descriptor(1, address, len, INDIRECT, 0), fault, &text);
        }
        // A table may have any alignment.
        let raw = Raw::new(features, SIZE);
        for shift in 0..16 {
            let table = raw.table(4096 + shift, &[(raw.data(), 3, 0), (raw.data(), 4, WRITE)]);
            raw.descriptor(0, table, 32, INDIRECT, 0);
            raw.publish(&[0]);
            let mut burst = Chains::new(BURST, 64);
            burst.start(&raw.0.device);
            assert_eq!(raw.0.device().take(&raw.0.device, &mut burst, BURST), Ok(1));
            assert_eq!((burst.list()[0].readable_len(), burst.list()[0].writable_len()), (3, 4));
        }
    }
    // A table may have more entries than its chain (split only).
    let raw = Raw::new(SPLIT, SIZE);
    let table = raw.table(4096, &[(raw.data(), 3, 0)]);
    raw.descriptor(0, table, 60_000 * 16, INDIRECT, 0);
    raw.publish(&[0]);
    faults_after(
        &raw,
        0,
        Fault::Outside { index: 0, address: table, len: 960_000, regions: 1 },
        "descriptor 0 at 0x100001",
    );
    raw.descriptor(0, table, 3000 * 16, INDIRECT, 0);
    let mut burst = Chains::new(BURST, 64);
    burst.start(&raw.0.device);
    assert_eq!(raw.0.device().take(&raw.0.device, &mut burst, BURST), Ok(1));
}

#[test]
fn buffers_of_length_zero() {
    for features in [SPLIT, PACKED] {
        for flags in [0, WRITE] {
            let fault = |index| Fault::ZeroLength { index };
            expect(features, |raw| raw.chain(1, &[(raw.data(), 0, flags)]), fault(1), "descriptor 1 has length 0");
            let chained = |raw: &Raw| raw.chain(1, &[(raw.data(), 1, 0), (raw.data(), 1, 0), (raw.data(), 0, flags)]);
            expect(features, chained, fault(3), "descriptor 3 has length 0");
            let head = |raw: &Raw| raw.chain(1, &[(raw.data(), 0, flags), (raw.data(), 1, WRITE)]);
            expect(features, head, fault(1), "descriptor 1 has length 0");
            let in_table = |raw: &Raw| {
                let table = raw.table(4096, &[(raw.data(), 1, 0), (raw.data(), 0, flags)]);
                raw.descriptor(1, table, 32, INDIRECT, 0);
            };
            expect(features, in_table, fault(1), "descriptor 1 has length 0");
            // A chain that continues into an unwritten part of the packed ring.
            if features.packed {
                expect(features, |raw| raw.descriptor(1, raw.data(), 1, NEXT | flags, 0), fault(2), "descriptor 2");
            }
        }
    }
}

#[test]
fn readable_after_writable() {
    for features in [SPLIT, PACKED] {
        let order = |raw: &Raw| [(raw.data(), 1, 0), (raw.data(), 1, WRITE), (raw.data(), 1, 0)];
        let text = "is device-readable but follows a device-writable one";
        let direct = |raw: &Raw| raw.chain(1, &order(raw));
        expect(features, direct, Fault::Order { index: 3 }, &format!("descriptor 3 {text}"));
        let in_table = |raw: &Raw| raw.descriptor(1, raw.table(4096, &order(raw)), 48, INDIRECT, 0);
        if features.packed {
            // As DPDK's driver writes them: entries before a readable one are treated as readable.
            assert_eq!(lens(Chains::new(BURST, 64), in_table), (3, 0));
        } else {
            expect(features, in_table, Fault::Order { index: 2 }, &format!("descriptor 2 {text}"));
        }
        let both = |raw: &Raw| {
            let table = raw.table(4096, &[(raw.data(), 1, 0)]);
            raw.chain(1, &[(raw.data(), 1, WRITE), (table, 16, INDIRECT)]);
        };
        expect(features, both, Fault::Order { index: 0 }, &format!("descriptor 0 {text}"));
    }
}

/// Returns the readable and writable bytes of a packed ring's chain, taken into `burst`.
fn lens(mut burst: Chains, write: impl Fn(&Raw)) -> (u32, u32) {
    let raw = Raw::new(PACKED, SIZE);
    write(&raw);
    burst.start(&raw.0.device);
    assert_eq!(raw.0.device_at(0x8001_8001).take(&raw.0.device, &mut burst, 1), Ok(1));
    let chain = burst.list()[0];
    (chain.readable_len(), chain.writable_len())
}

/// DPDK's driver in slot 1 (`virtqueue_enqueue_xmit_packed`): neither the header's flags nor those of entry 1 are written, and both
/// were initialised to WRITE.
#[test]
fn tables_of_a_queue_that_is_only_read() {
    let in_table = |raw: &Raw| {
        let table = raw.table(4096, &[(raw.data(), 12, WRITE), (raw.data(), 60, WRITE)]);
        raw.descriptor(1, table, 32, INDIRECT, 0);
    };
    assert_eq!(lens(Chains::new(BURST, 64), in_table), (0, 72));
    assert_eq!(lens(Chains::new(BURST, 64).read_only(), in_table), (72, 0));
    // In the ring itself the flag counts.
    let direct = |raw: &Raw| raw.chain(1, &[(raw.data(), 12, 0), (raw.data(), 60, WRITE)]);
    assert_eq!(lens(Chains::new(BURST, 64).read_only(), direct), (12, 60));
}

#[test]
fn descriptors_that_do_not_exist() {
    for index in [SIZE, SIZE + 1, 0x7fff, 0x8000, u16::MAX] {
        let fault = Fault::Index { index, size: SIZE };
        let text = format!("descriptor {index} does not exist in a table of 8");
        let raw = Raw::new(SPLIT, SIZE);
        raw.descriptor(0, raw.data(), 77, 0, 0);
        raw.publish(&[0, index]);
        faults_after(&raw, 1, fault, &text);
        expect(SPLIT, |raw| raw.descriptor(1, raw.data(), 1, NEXT, index), fault, &text);
    }
    for next in [2, 3, 0x7fff, u16::MAX] {
        let write = |raw: &Raw| {
            let table = raw.table(4096, &[(raw.data(), 1, 0); 2]);
            raw.0.write(table, &split_bytes(raw.data(), 1, NEXT, next));
            raw.descriptor(1, table, 32, INDIRECT, 0);
        };
        let text = format!("descriptor {next} does not exist in a table of 2");
        expect(SPLIT, write, Fault::Index { index: next, size: 2 }, &text);
    }
}

#[test]
fn available_index_jumps() {
    for index in [SIZE + 1, SIZE + 2, 0x7fff, 0x8000, u16::MAX] {
        let raw = Raw::new(SPLIT, SIZE);
        (0..SIZE).for_each(|at| raw.descriptor(at, raw.data(), 77, 0, 0));
        raw.publish(&[0]);
        raw.index(index);
        let fault = Fault::AvailableJump { index, next: 0, ahead: index, size: SIZE };
        let text = format!("available index {index} is {index} ahead of 0, more than the queue's 8 entries");
        faults_after(&raw, 0, fault, &text);
    }
    // A step backwards is a jump too, and so is a jump after valid chains.
    let raw = Raw::new(SPLIT, SIZE);
    (0..SIZE).for_each(|at| raw.descriptor(at, raw.data(), 77, 0, 0));
    raw.publish(&[0, 1]);
    let (mut device, mut burst) = (raw.0.device(), Chains::new(BURST, 64));
    burst.start(&raw.0.device);
    assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(2));
    for (index, ahead) in [(1, 65535), (0, 65534), (11, 9)] {
        raw.index(index);
        let fault = Fault::AvailableJump { index, next: 2, ahead, size: SIZE };
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Err(fault));
    }
    raw.index(10);
    assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(8), "a full queue");
}

#[test]
fn packed_overruns() {
    for size in [1, 2, 5, SIZE] {
        let raw = Raw::new(PACKED, size);
        (0..size).for_each(|index| raw.descriptor(index, raw.data(), 77, 0, index));
        let (mut device, mut burst) = (raw.0.device(), Chains::new(BURST, 64));
        burst.start(&raw.0.device);
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(size.into()));
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(0));
        // Descriptors of the second pass, although nothing was returned yet.
        raw.0.write_user(raw.0.at.descriptor, &packed_bytes(raw.data(), 77, USED, 0));
        for _ in 0..3 {
            let fault = Fault::Overrun { size };
            assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Err(fault));
            assert!(fault.to_string().contains(&format!("the ring's {size} entries")));
        }
        assert_eq!(burst.list().len(), size as usize);
    }
    // A chain that begins in this pass and continues into descriptors that were not returned.
    let raw = Raw::new(PACKED, SIZE);
    (0..SIZE).for_each(|index| raw.descriptor(index, raw.data(), 77, 0, index));
    let (mut device, mut burst) = (raw.0.device(), Chains::new(BURST, 64));
    burst.start(&raw.0.device);
    assert_eq!(device.take(&raw.0.device, &mut burst, 6), Ok(6));
    raw.descriptor(7, raw.data(), 77, NEXT, 7);
    assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(1));
    assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Err(Fault::Overrun { size: SIZE }));
}

/// All values of the flags of a head and of a second descriptor, in both passes of the ring.
#[test]
fn all_packed_flags() {
    for indirect in [false, true] {
        let raw = Raw::new(Features { indirect, ..PACKED }, SIZE);
        let mut burst = Chains::new(BURST, 64);
        let table = raw.table(4096, &[(raw.data(), 5, 0), (raw.data(), 6, WRITE)]);
        for base in [0x8000_8000, 0x0001_0001] {
            let (slot, wrap) = ((base & 0x7fff) as u16, base & 0x8000 != 0);
            let this_pass = if wrap { AVAILABLE } else { USED };
            let place = |ahead: u16| raw.0.at.descriptor + u64::from(slot + ahead) * 16;
            let check = |burst: &mut Chains, flags: u16, index: u16, before: u32| {
                let mut device = raw.0.device_at(base);
                burst.start(&raw.0.device);
                let got = device.take(&raw.0.device, burst, 1);
                let expected = if flags & INDIRECT != 0 && (!indirect || flags & NEXT != 0) {
                    Err(Fault::Indirect { index })
                } else if flags & INDIRECT != 0 {
                    Ok((5 + before, 6))
                } else if flags & NEXT != 0 {
                    Err(Fault::ZeroLength { index: index + 1 })
                } else if flags & WRITE != 0 {
                    Ok((before, 32))
                } else {
                    Ok((32 + before, 0))
                };
                match expected {
                    Ok((readable, writable)) => {
                        assert_eq!(got, Ok(1), "{flags:#x}");
                        let chain = burst.list()[0];
                        assert_eq!((chain.readable_len(), chain.writable_len(), chain.id), (readable, writable, 9));
                    }
                    Err(fault) => assert_eq!(got, Err(fault), "{flags:#x}"),
                }
            };
            for flags in 0..=u16::MAX {
                raw.0.write_user(place(0), &packed_bytes(table, 32, flags, 9));
                if flags & (AVAILABLE | USED) == this_pass {
                    check(&mut burst, flags, slot, 0);
                } else {
                    let mut device = raw.0.device_at(base);
                    burst.start(&raw.0.device);
                    assert_eq!(device.take(&raw.0.device, &mut burst, 1), Ok(0), "{flags:#x}");
                    assert!(!device.enable_notification());
                }
            }
            raw.0.write_user(place(0), &packed_bytes(raw.data(), 3, this_pass | NEXT, 0));
            for flags in 0..=u16::MAX {
                // In a descriptor that is not a head only NEXT, WRITE and INDIRECT count (2.8.6).
                raw.0.write_user(place(1), &packed_bytes(table, 32, flags, 9));
                check(&mut burst, flags, slot + 1, 3);
            }
            raw.0.write_user(place(0), &[0; 32]);
        }
    }
}

#[test]
fn faults_of_device_types() {
    let writable = Fault::Writable { id: 12 }.to_string();
    assert!(writable.contains("buffer 12 is device-writable in a queue that the device only reads from"));
    let readable = Fault::Readable { id: 13 }.to_string();
    assert!(readable.contains("buffer 13 is device-readable in a queue that the device only writes to"));
    let header = Fault::Header { id: 14, len: 11, needed: 12 }.to_string();
    assert!(header.contains("buffer 14 has 11 bytes, fewer than the header's 12"));
}

#[test]
fn chains_with_more_pieces_than_a_burst_holds() {
    for features in [SPLIT, PACKED] {
        let raw = Raw::new(features, SIZE);
        raw.chain(0, &[(raw.data(), 1, 0)]);
        raw.chain(1, &[(raw.data(), 1, 0), (raw.data(), 2, 0), (raw.data(), 3, WRITE), (raw.data(), 4, WRITE)]);
        raw.chain(5, &[(raw.data(), 1, 0), (raw.data(), 2, WRITE)]);
        raw.publish(&[0, 1, 5]);
        let (mut device, mut burst) = (raw.0.device(), Chains::new(BURST, 3));
        burst.start(&raw.0.device);
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(1), "it must wait for a burst of its own");
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(0));
        device.give(burst.list());
        burst.start(&raw.0.device);
        assert_eq!(device.take(&raw.0.device, &mut burst, 1), Ok(1));
        let chain = burst.list()[0];
        assert!(chain.clipped && burst.readable(&chain).is_empty() && burst.writable(&chain).is_empty());
        assert_eq!((chain.readable_len(), chain.writable_len()), (3, 7));
        // It can be untaken and taken again like any other chain.
        device.untake(&mut burst, 0);
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(2));
        let (chain, after) = (burst.list()[0], burst.list()[1]);
        assert!(chain.clipped && !after.clipped);
        assert_eq!((burst.readable(&after).len(), burst.writable(&after).len()), (1, 1));
        device.give(burst.list());
        burst.start(&raw.0.device);
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(0));
        // A fault in the chain is reported if it comes before the piece that does not fit.
        for (wrong, expected) in [(3, Err(Fault::ZeroLength { index: 3 })), (4, Ok(1))] {
            let raw = Raw::new(features, SIZE);
            let mut chain = [(raw.data(), 1, 0); 5];
            chain[wrong].1 = 0;
            raw.chain(0, &chain);
            raw.publish(&[0]);
            let mut burst = Chains::new(BURST, 3);
            burst.start(&raw.0.device);
            assert_eq!(raw.0.device().take(&raw.0.device, &mut burst, BURST), expected);
        }
    }
}

#[test]
fn a_chain_of_too_many_pieces_is_not_followed_to_its_end() {
    for features in [SPLIT, PACKED] {
        // Entries of length 0 behind the limit: reading one of them would be a fault.
        let raw = Raw::new(features, SIZE);
        let mut entries = vec![(raw.data(), 0, 0); 2000];
        entries[..5].fill((raw.data(), 1, 0));
        let table = raw.table(0, &entries);
        let entry = (table, 2000 * 16, INDIRECT);
        let (mut device, mut burst) = (raw.0.device(), Chains::new(BURST, 4));
        raw.chain(0, &[entry]);
        raw.chain(1, &[entry]);
        raw.publish(&[0, 1]);
        for _ in 0..2 {
            burst.start(&raw.0.device);
            assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(1));
            let chain = burst.list()[0];
            assert!(chain.clipped);
            assert_eq!((chain.readable_len(), chain.slots()), (5, 1));
            device.give(burst.list());
        }
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(0));
    }
}
