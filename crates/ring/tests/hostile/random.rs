//! Both ends on random memory, and on memory that changes or is truncated while they use it.

use super::*;

/// Contents of a ring: random bytes, and nearly valid descriptors, which get further.
#[derive(Clone, Debug)]
enum Spoil {
    Bytes(usize, Vec<u8>),
    Descriptor { slot: usize, address: u32, len: u32, flags: u16, tail: u16 },
    Word(usize, u16),
}

fn spoil() -> impl Strategy<Value = Spoil> {
    let len = prop_oneof![Just(0), 1..200u32, (1..9u32).prop_map(|n| n * 16), any::<u32>()];
    let flags = prop_oneof![4 => 0..8u16, 1 => any::<u16>()];
    let marks = prop_oneof![Just(AVAILABLE), Just(USED), Just(AVAILABLE | USED), Just(0)];
    prop_oneof![
        1 => (any::<usize>(), prop::collection::vec(any::<u8>(), 1..64)).prop_map(|(at, bytes)| Spoil::Bytes(at, bytes)),
        6 => (any::<usize>(), any::<u32>(), len, flags, marks, 0..9u16).prop_map(|(slot, address, len, flags, marks, tail)| {
            Spoil::Descriptor { slot, address, len, flags: flags | marks, tail }
        }),
        3 => (any::<usize>(), prop_oneof![0..20u16, any::<u16>()]).prop_map(|(at, word)| Spoil::Word(at, word)),
    ]
}

impl Spoil {
    fn apply(&self, memory: &Memory) {
        let ring = memory.arena;
        let put = |at: usize, bytes: &[u8]| {
            memory.driver.span(at, ring - at).unwrap().write(bytes);
        };
        match self {
            Spoil::Bytes(at, bytes) => put(at % ring, bytes),
            &Spoil::Descriptor { slot, address, len, flags, tail } => {
                // Sometimes inside the ring itself, so that tables and descriptors share memory.
                let address = GUEST + u64::from(address) % (memory.driver.len() as u64 + 64);
                let at = slot % memory.size as usize * 16;
                let bytes = if memory.features.packed {
                    packed_bytes(address, len, flags, tail)
                } else {
                    split_bytes(address, len, flags, tail)
                };
                put(at, &bytes);
            }
            Spoil::Word(at, word) => {
                // Flags and indices of the driver and device areas, and the entries behind them.
                let area = if at % 2 == 0 { memory.at.driver } else { memory.at.device };
                let within = (at >> 1) % (if memory.features.packed { 2 } else { 3 + memory.size as usize });
                memory.write_user(area + 2 * within as u64, &word.to_le_bytes());
            }
        }
    }
}

fn any_features() -> impl Strategy<Value = Features> {
    prop::sample::select(all_features().collect::<Vec<_>>())
}

/// A ring with these features, filled with `fill`.
fn noise(features: Features, size: u32, fill: &[u8]) -> Memory {
    let size = if features.packed { size } else { size.next_power_of_two() };
    let memory = Memory::new(features, size, 4096, None);
    let bytes: Vec<u8> = fill.iter().copied().cycle().take(memory.arena).collect();
    memory.driver.span(0, memory.arena).unwrap().write(&bytes);
    memory
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn device_on_random_memory(
        features in any_features(),
        size in 1..=40u32,
        fill in prop_oneof![Just(vec![0]), prop::collection::vec(any::<u8>(), 1..100)],
        base in any::<u32>(),
        fresh in any::<bool>(),
        steps in prop::collection::vec((spoil(), 0..8u8, any::<u8>()), 1..120),
    ) {
        let memory = noise(features, size, &fill);
        let base = if fresh { 0x8000_8000 } else { base };
        let device = DeviceRing::start(&memory.device, features, memory.size, memory.at, base);
        let Ok(mut device) = device else { return Ok(()) };
        let mut burst = Chains::new(16, 24);
        burst.start(&memory.device);
        let mut held: Vec<Chain> = Vec::new();
        for (spoil, what, count) in steps {
            spoil.apply(&memory);
            let count = count as usize;
            match what {
                0..=2 => {
                    let before = burst.list().len();
                    let room = burst.room().min(count);
                    let taken = device.take(&memory.device, &mut burst, count);
                    let new = burst.list().len() - before;
                    prop_assert_eq!(new, taken.unwrap_or(0));
                    prop_assert!(new <= room);
                    let mut pieces = 0;
                    for chain in burst.list() {
                        let (readable, writable) = (burst.readable(chain), burst.writable(chain));
                        pieces += readable.len() + writable.len();
                        if !chain.clipped {
                            prop_assert_eq!(readable.iter().map(|s| s.len()).sum::<usize>(), chain.readable_len() as usize);
                            prop_assert_eq!(writable.iter().map(|s| s.len()).sum::<usize>(), chain.writable_len() as usize);
                        }
                        writable.iter().for_each(|span| { span.write(&[0xaa]); });
                    }
                    prop_assert!(pieces <= 24);
                }
                3 => device.untake(&mut burst, count % 17),
                4 => {
                    held.extend_from_slice(burst.list());
                    burst.start(&memory.device);
                    let count = if features.in_order { count.min(held.len()) } else { held.len() };
                    device.give(&held[..count]);
                    held.drain(..count);
                }
                5 => { device.wants_notification(true); }
                6 => { device.enable_notification(); }
                _ => device.disable_notification(),
            }
        }
        // A device can start again at the base that it reports, without the chains that it took and did not return.
        if DeviceRing::start(&memory.device, features, memory.size, memory.at, device.base()).is_err() {
            prop_assert!(false, "its own base {:#x}", device.base());
        }
    }

    #[test]
    fn driver_on_random_memory(
        features in any_features(),
        size in 1..=40u32,
        fill in prop_oneof![Just(vec![0]), prop::collection::vec(any::<u8>(), 1..100)],
        steps in prop::collection::vec((spoil(), 0..8u8, any::<u8>()), 1..120),
    ) {
        let memory = noise(features, size, &fill);
        let mut driver = memory.driver();
        let mut in_flight = std::collections::HashMap::new();
        let buffer = Buffer { address: memory.address(0), len: 100 };
        for (spoil, what, count) in steps {
            spoil.apply(&memory);
            let count = count as usize;
            match what {
                0 => {
                    let writable = count % 4;
                    if let Ok(id) = driver.add(&[buffer; 3][..count / 4 % 4], &[buffer; 3][..writable.min(3)]) {
                        prop_assert!(in_flight.insert(id, 100 * writable.min(3) as u32).is_none());
                    }
                }
                1 => {
                    driver.add_single(count % 9, true, |id| {
                        assert!(in_flight.insert(id, 100).is_none());
                        buffer
                    });
                }
                2 => driver.publish(),
                3 | 4 => {
                    let mut out = vec![Used::default(); count % 50];
                    let taken = driver.take_used(&mut out).unwrap_or(0);
                    for used in &out[..taken] {
                        // Whatever the device writes, an id returns only if it was in flight, and no length exceeds its
                        // buffers.
                        let room = in_flight.remove(&used.id);
                        prop_assert!(room.is_some_and(|room| used.len <= room), "{:?} of {:?}", used, room);
                    }
                }
                5 => { driver.wants_notification(); }
                6 => { driver.enable_notification(); }
                _ => driver.disable_notification(),
            }
            prop_assert!(driver.free() <= memory.size as usize && driver.free() + in_flight.len() <= memory.size as usize);
        }
    }
}

/// A driver rewrites its descriptors while the device reads them: the result must be a fault or a consistent chain, as no
/// value that a decision depends on is read twice.
#[test]
fn descriptors_that_change_while_being_read() {
    for features in [SPLIT, PACKED] {
        let raw = Raw::new(features, SIZE);
        let stop = AtomicBool::new(false);
        let end = Instant::now() + Duration::from_secs(10);
        thread::scope(|scope| {
            scope.spawn(|| {
                let table = raw.table(4096, &[(raw.data(), 5, 0), (raw.data(), 6, WRITE)]);
                for round in 0..usize::MAX {
                    if stop.load(Ordering::Relaxed) || Instant::now() > end {
                        break;
                    }
                    let (len, flags) = [(7, 0), (1 << 20, 0), (8, WRITE), (9, NEXT), (32, INDIRECT)][round % 5];
                    let address = if flags == INDIRECT { table } else { raw.data() + round as u64 % 512 };
                    raw.descriptor((round % 3) as u16, address, len, flags, ((round + 1) % 11) as u16);
                    raw.0.write(table + 8, &u32::to_le_bytes(5 + (round % 3) as u32 * 70_000));
                    raw.publish(&[0, 1, 2]);
                }
            });
            let mut burst = Chains::new(BURST, 64);
            let (mut chains, mut faults) = (0, 0);
            while (chains < 50_000 || faults < 50_000) && Instant::now() < end {
                burst.start(&raw.0.device);
                match raw.0.device().take(&raw.0.device, &mut burst, BURST) {
                    Ok(_) => chains += burst.list().len(),
                    Err(_) => faults += 1,
                }
                for chain in burst.list() {
                    let len = |spans: &[Span<'_>]| spans.iter().map(|span| span.len()).sum::<usize>();
                    assert_eq!(len(burst.readable(chain)), chain.readable_len() as usize);
                    assert_eq!(len(burst.writable(chain)), chain.writable_len() as usize);
                    assert!(chain.readable_len() + chain.writable_len() > 0);
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(chains > 100 && faults > 100, "{chains} chains, {faults} faults");
        });
    }
}

/// Memory truncated by the peer reads as zeros, which both ends must survive.
#[test]
fn rings_in_truncated_memory() {
    for features in [SPLIT, PACKED] {
        let (driver, file) = Region::create(1 << 16, GUEST, false).unwrap();
        let (_, at) = DriverRing::start(&driver, 0, features, 8).unwrap();
        let region = Region::map(&file, 0, 1 << 16, GUEST, driver.user()).unwrap();
        let memory = Arc::new(Table::default().with(region.clone()).unwrap());
        let mut device = DeviceRing::start(&memory, features, 8, at, features.fresh_base()).unwrap();
        drop(driver);
        file.set_len(0).unwrap();
        let mut burst = Chains::new(BURST, 64);
        burst.start(&memory);
        assert_eq!(device.take(&memory, &mut burst, BURST), Ok(0));
        device.give(burst.list());
        assert!(!device.enable_notification() && !device.wants_notification(true));
        assert!(region.is_lost());
    }
}
