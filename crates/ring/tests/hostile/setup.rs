//! Sizes, addresses and bases that a ring cannot have.

use super::*;

#[test]
fn invalid_queue_sizes() {
    let memory = Table::default();
    let at = Addresses::default();
    for size in [0, 3, 5, 6, 100, 32769, 65535, 65536, 1 << 31, u32::MAX] {
        let error = DeviceRing::start(&memory, SPLIT, size, at, 0).err().unwrap();
        assert_eq!(error, SetupError::Size { size, packed: false });
        assert!(error.to_string().contains(&format!("invalid queue size {size}: expected a power of two")));
    }
    for size in [0, 32769, 65535, 65536, 1 << 31, u32::MAX] {
        let error = DeviceRing::start(&memory, PACKED, size, at, 0).err().unwrap();
        assert_eq!(error, SetupError::Size { size, packed: true });
        assert!(error.to_string().contains(&format!("invalid queue size {size}: expected 1 to 32768")));
    }
}

#[test]
fn areas_outside_memory() {
    for features in [SPLIT, PACKED] {
        for size in [1, SIZE, 32768] {
            let memory = Memory::new(features, size.into(), 64, None);
            let (start, end) = (memory.driver.user(), memory.driver.user() + memory.driver.len() as u64);
            let n = u64::from(size);
            let areas: [(&str, u64, u64); 3] = if features.packed {
                [("descriptor", 16 * n, 16), ("driver", 4, 4), ("device", 4, 4)]
            } else {
                [("descriptor", 16 * n, 16), ("driver", 2 * n + 6, 2), ("device", 8 * n + 6, 4)]
            };
            for (area, len, align) in areas {
                let with = |address: u64| {
                    let mut at = memory.at;
                    match area {
                        "descriptor" => at.descriptor = address,
                        "driver" => at.driver = address,
                        _ => at.device = address,
                    }
                    DeviceRing::start(&memory.device, features, size.into(), at, 0).err()
                };
                let last = (end - len) & !(align - 1);
                assert_eq!(with(start), None, "{area}");
                assert_eq!(with(last), None, "{area}");
                let misaligned = (1..align).map(|shift| start + shift);
                // GUEST is the ring's guest address, but rings are addressed by user address.
                let outside = [0, start - align, last + align, end, GUEST, u64::MAX, u64::MAX - 15, !(len - 1) & !15];
                for address in misaligned.chain(outside) {
                    let error = SetupError::Area { area, address, len: len as usize, align: align as usize };
                    assert_eq!(with(address), Some(error));
                    let text = format!("the {area} area at {address:#x} ({len} bytes)");
                    assert!(error.to_string().contains(&text));
                }
            }
        }
    }
}

/// User addresses are contiguous across the regions, but an area must lie within one of them.
#[test]
fn areas_that_cross_regions() {
    for features in [SPLIT, PACKED] {
        let memory = Memory::new(features, 64, 8192, Some(2048));
        let border = memory.device.regions()[1].user();
        for (area, at) in [
            ("descriptor", Addresses { descriptor: (border & !15) - 512, ..memory.at }),
            ("driver", Addresses { driver: border - 2, ..memory.at }),
            ("device", Addresses { device: border - 2, ..memory.at }),
        ] {
            let error = DeviceRing::start(&memory.device, features, 64, at, 0).err();
            assert!(matches!(error, Some(SetupError::Area { area: name, .. }) if name == area), "{area}: {error:?}");
        }
    }
}

#[test]
fn packed_bases_outside_the_ring() {
    let memory = Memory::new(PACKED, 5, 64, None);
    let start = |base| DeviceRing::start(&memory.device, PACKED, 5, memory.at, base).err();
    for base in [0x8005_8000, 0x8000_8005, 0x0005_0000, 0x0000_7fff, 0x7fff_0000, u32::MAX] {
        let error = SetupError::Base { base, size: 5 };
        assert_eq!(start(base), Some(error));
        assert!(error.to_string().contains(&format!("base {base:#x} lies outside a ring of 5 entries")));
    }
    for base in [0, 0x8000, 0x8000_8000, 0x8004_8004, 0x0004_0004, 0x8002_8004] {
        assert_eq!(start(base), None);
    }
}

#[test]
fn split_bases_have_sixteen_bits() {
    let memory = Memory::new(SPLIT, 8, 64, None);
    let start = |base| DeviceRing::start(&memory.device, SPLIT, 8, memory.at, base).err();
    assert_eq!(start(0x1_0000), Some(SetupError::Base { base: 0x1_0000, size: 8 }));
    assert_eq!((start(0), start(0xffff)), (None, None));
}

/// The bases that frontends send for a fresh ring, and the ones that our own device leaves.
#[test]
fn packed_bases() {
    for base in [0, 0x8000, 0x8000_8000, 0x8000_0000] {
        let raw = Raw::new(PACKED, 5);
        raw.descriptor(0, raw.data(), 77, 0, 3);
        let mut burst = Chains::new(BURST, 64);
        burst.start(&raw.0.device);
        let mut device = raw.0.device_at(base);
        assert_eq!(device.take(&raw.0.device, &mut burst, BURST), Ok(1), "{base:#x}");
        assert_eq!(device.base(), 0x8000_8001, "one taken");
        device.give(burst.list());
        assert_eq!(device.base(), 0x8001_8001);
    }
}
