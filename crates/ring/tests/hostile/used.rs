//! A driver end with a device that breaks the rules.

use super::*;

/// Returns a driver with four chains of 100 writable bytes in flight: ids 0 to 3 (packed) or 0, 2, 4, 6 (split).
fn in_flight(features: Features) -> (Memory, DriverRing) {
    let memory = Memory::new(features, SIZE.into(), ARENA, None);
    let mut driver = memory.driver();
    let buffer = Buffer { address: memory.address(0), len: 50 };
    for id in 0..4 {
        // Chains of two descriptors: the heads are 0, 2, 4, 6 in a split ring.
        let head = if features.packed { id } else { 2 * id };
        assert_eq!(driver.add(&[], &[buffer; 2]), Ok(head));
    }
    driver.publish();
    (memory, driver)
}

/// Marks a chain as used, as a device does: the `at`th one, each of two descriptors.
fn put_used(memory: &Memory, at: u16, id: u32, len: u32) {
    if memory.features.packed {
        let slot = memory.at.descriptor + 2 * u64::from(at) * 16 + 8;
        let word = u64::from(len) | u64::from(id as u16) << 32 | u64::from(AVAILABLE | USED | WRITE) << 48;
        memory.write_user(slot, &word.to_le_bytes());
    } else {
        let entry = u64::from(id) | u64::from(len) << 32;
        memory.write_user(memory.at.device + 4 + 8 * u64::from(at), &entry.to_le_bytes());
        memory.write_user(memory.at.device + 2, &(at + 1).to_le_bytes());
    }
}

#[track_caller]
fn expect_driver(memory: &Memory, driver: &mut DriverRing, good: &[Used], fault: DriverFault, text: &str) {
    let mut out = [Used::default(); 16];
    if !good.is_empty() {
        assert_eq!(driver.take_used(&mut out), Ok(good.len()), "chains before the fault");
        assert_eq!(&out[..good.len()], good);
    }
    for _ in 0..3 {
        assert_eq!(driver.take_used(&mut out), Err(fault));
        assert!(driver.enable_notification());
    }
    assert_eq!(driver.free(), 2 * good.len(), "{:?}", memory.features);
    assert!(fault.to_string().contains(text), "{fault}");
}

#[test]
fn used_ids_that_are_not_in_flight() {
    for features in [SPLIT, PACKED].into_iter().chain([SPLIT, PACKED].map(|f| Features { in_order: true, ..f })) {
        let ids: [u32; 4] = if features.packed { [0, 1, 2, 3] } else { [0, 2, 4, 6] };
        let mut bad = vec![5, 7, 8, 9, 0x7fff, 0x8000, 0xffff];
        // Descriptors in the middle of a chain are not heads; split ids have 32 bits.
        bad.extend(if features.packed { vec![4, 6] } else { vec![1, 3, 0x1_0000, 0x8000_0000, u32::MAX] });
        for id in bad {
            let (memory, mut driver) = in_flight(features);
            put_used(&memory, 0, ids[0], 100);
            put_used(&memory, 1, id, 0);
            let good = [Used { id: ids[0] as u16, len: 100 }];
            let text = format!("returned buffer {id}, which is not in flight");
            expect_driver(&memory, &mut driver, &good, DriverFault::Id { id }, &text);
        }
        // The same id twice.
        let (memory, mut driver) = in_flight(features);
        put_used(&memory, 0, ids[0], 1);
        put_used(&memory, 1, ids[1], 2);
        put_used(&memory, 2, ids[1], 2);
        let good = [(ids[0], 1), (ids[1], 2)].map(|(id, len)| Used { id: id as u16, len });
        let text = format!("returned buffer {}", ids[1]);
        expect_driver(&memory, &mut driver, &good, DriverFault::Id { id: ids[1] }, &text);
    }
}

#[test]
fn used_lengths_beyond_the_buffers() {
    for features in [SPLIT, PACKED] {
        let id: u16 = if features.packed { 1 } else { 2 };
        for len in [101, 1 << 16, 1 << 31, u32::MAX] {
            let (memory, mut driver) = in_flight(features);
            put_used(&memory, 0, 0, 100);
            put_used(&memory, 1, id.into(), len);
            let fault = DriverFault::Length { id, len, room: 100 };
            let text = format!("reported {len} bytes written to buffer {id}, expected at most 100");
            expect_driver(&memory, &mut driver, &[Used { id: 0, len: 100 }], fault, &text);
        }
        // If a chain has no writable buffers, its length is ignored.
        let memory = Memory::new(features, SIZE.into(), ARENA, None);
        let mut driver = memory.driver();
        driver.add_single(1, false, |_| Buffer { address: memory.address(0), len: 50 });
        driver.publish();
        put_used(&memory, 0, 0, 1);
        let mut used = [Used { id: 9, len: 9 }];
        assert_eq!(driver.take_used(&mut used), Ok(1));
        assert_eq!(used, [Used { id: 0, len: 0 }]);
    }
}

#[test]
fn used_index_jumps() {
    for index in [5, 6, 8, 9, 0x7fff, 0x8000, 0xffff] {
        let (memory, mut driver) = in_flight(SPLIT);
        put_used(&memory, 0, 0, 0);
        memory.write_user(memory.at.device + 2, &u16::to_le_bytes(index));
        let fault = DriverFault::UsedJump { index, next: 0, ahead: index, outstanding: 4 };
        let text = format!("used index {index} is {index} ahead of 0, with only 4 chains in flight");
        expect_driver(&memory, &mut driver, &[], fault, &text);
    }
    let (memory, mut driver) = in_flight(SPLIT);
    put_used(&memory, 0, 2, 0);
    put_used(&memory, 1, 0, 0);
    assert_eq!(driver.take_used(&mut [Used::default(); 16]), Ok(2));
    for (index, ahead) in [(1, 65535), (5, 3)] {
        memory.write_user(memory.at.device + 2, &u16::to_le_bytes(index));
        let fault = DriverFault::UsedJump { index, next: 2, ahead, outstanding: 2 };
        assert_eq!(driver.take_used(&mut [Used::default(); 16]), Err(fault));
    }
}

/// A packed driver with nothing in flight ignores descriptors that look used.
#[test]
fn packed_used_descriptors_with_nothing_in_flight() {
    for size in [1, 4] {
        let memory = Memory::new(PACKED, size, ARENA, None);
        let mut driver = memory.driver();
        let mut out = [Used::default(); 4];
        for slot in 0..size as u16 {
            for flags in [0, USED, AVAILABLE, USED | AVAILABLE] {
                memory.write_user(memory.at.descriptor + 16 * u64::from(slot), &packed_bytes(0, 0, flags, slot));
                assert_eq!(driver.take_used(&mut out), Ok(0));
                assert!(!driver.enable_notification());
            }
        }
        assert_eq!(driver.free(), size as usize);
    }
}
