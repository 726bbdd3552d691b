//! Single situations: notifications, in-order batches, two threads, chains that never come back.

use super::*;

/// With EVENT_IDX each sleep costs one notification, however many chains follow.
#[test]
fn one_notification_per_sleep() {
    for features in all_features().filter(|features| features.event_idx) {
        let memory = Memory::new(features, 64, 4096, None);
        let (mut driver, mut device) = (memory.driver(), memory.device());
        let mut burst = Chains::new(64, 64);
        burst.start(&memory.device);
        let buffer = Buffer { address: memory.address(0), len: 8 };
        assert!(!device.enable_notification() && !driver.enable_notification());
        let mut wanted = [0, 0];
        for _ in 0..60 {
            assert_eq!(driver.add_single(1, false, |_| buffer), 1);
            driver.publish();
            wanted[0] += usize::from(driver.wants_notification());
            assert_eq!(device.take(&memory.device, &mut burst, 1), Ok(1));
            device.give(&burst.list()[burst.list().len() - 1..]);
            wanted[1] += usize::from(device.wants_notification(true));
        }
        assert_eq!(wanted, [1, 1], "{features:?}");
        assert!(!driver.wants_notification() && !device.wants_notification(true), "nothing new");
    }
}

/// A side that polls is not notified.
#[test]
fn no_notification_while_polling() {
    for features in all_features() {
        let memory = Memory::new(features, 8, 4096, None);
        let (mut driver, mut device) = (memory.driver(), memory.device());
        let mut burst = Chains::new(1, 1);
        let buffer = Buffer { address: memory.address(0), len: 8 };
        assert!(!device.enable_notification() && !driver.enable_notification());
        for round in 0..1000 {
            assert_eq!(driver.add_single(1, false, |_| buffer), 1);
            driver.publish();
            // Only the first notifications were requested.
            assert_eq!(driver.wants_notification(), round == 0, "{features:?}, round {round}");
            burst.start(&memory.device);
            assert_eq!(device.take(&memory.device, &mut burst, 1), Ok(1));
            device.disable_notification();
            device.give(burst.list());
            assert_eq!(device.wants_notification(true), round == 0, "{features:?}, round {round}");
            assert_eq!(driver.take_used(&mut [Used::default()]), Ok(1));
            driver.disable_notification();
        }
    }
}

/// In order and with nothing to write, the device of a packed ring writes one descriptor for a whole batch (2.8.7).
#[test]
fn in_order_batches_take_one_descriptor() {
    let features = Features { packed: true, in_order: true, ..Features::default() };
    let memory = Memory::new(features, 7, 4096, None);
    let (mut driver, mut device) = (memory.driver(), memory.device());
    let mut burst = Chains::new(BURST, 64);
    let buffer = Buffer { address: memory.address(0), len: 8 };
    let words = |region: &Arc<Region>| {
        let mut bytes = [0; 7 * 16];
        region.span(0, bytes.len()).unwrap().read(&mut bytes);
        bytes
    };
    for round in 0..20 {
        // A batch ends with the chain that reaches the end of the ring.
        let batches = if round * 6 % 7 + 3 >= 7 { 2 } else { 1 };
        let ids = [
            driver.add(&[buffer; 2], &[]).unwrap(),
            driver.add(&[buffer], &[]).unwrap(),
            driver.add(&[buffer; 3], &[]).unwrap(),
        ];
        driver.publish();
        burst.start(&memory.device);
        assert_eq!(device.take(&memory.device, &mut burst, BURST), Ok(3));
        let before = words(&memory.driver);
        device.give(burst.list());
        let changed = before.chunks(16).zip(words(&memory.driver).chunks(16)).filter(|(a, b)| a != b).count();
        assert_eq!(changed, batches);
        let mut used = [Used::default(); 2];
        assert_eq!(driver.take_used(&mut used), Ok(2));
        assert_eq!(used.map(|used| used.id), ids[..2]);
        assert!(driver.enable_notification(), "the rest of the batch is pending");
        assert_eq!(driver.take_used(&mut used), Ok(1));
        assert_eq!(used[0].id, ids[2]);
        assert_eq!(driver.free(), 7);
    }
}

/// The driver must assume that buffers skipped by an in-order device were written in full (2.7.9), so a device must not
/// skip writable ones.
#[test]
fn in_order_batches_have_nothing_writable() {
    let features = Features { packed: true, in_order: true, ..Features::default() };
    let memory = Memory::new(features, 8, 4096, None);
    let (mut driver, mut device) = (memory.driver(), memory.device());
    let mut burst = Chains::new(BURST, 64);
    burst.start(&memory.device);
    driver.add_single(4, true, |_| Buffer { address: memory.address(0), len: 8 });
    driver.publish();
    assert_eq!(device.take(&memory.device, &mut burst, BURST), Ok(4));
    device.give(burst.list());
    for slot in 0..4 {
        let mut flags = [0; 2];
        memory.driver.span(slot * 16 + 14, 2).unwrap().read(&mut flags);
        assert_eq!(u16::from_le_bytes(flags), 0x8080, "slot {slot}");
    }
}

/// A foreign device may skip buffers in order; they count as written in full.
#[test]
fn drivers_accept_in_order_batches() {
    for packed in [false, true] {
        let features = Features { packed, in_order: true, ..Features::default() };
        let memory = Memory::new(features, 8, 4096, None);
        let mut driver = memory.driver();
        let buffer = Buffer { address: memory.address(0), len: 100 };
        for round in 0..40u16 {
            let ids = [
                driver.add(&[buffer], &[buffer]).unwrap(),
                driver.add(&[], &[buffer; 2]).unwrap(),
                driver.add(&[], &[buffer]).unwrap(),
            ];
            driver.publish();
            // Two batches: the first two chains, and the third alone.
            if packed {
                let put = |position: u16, id: u16, len: u32| {
                    let flags: u16 = if (position / 8).is_multiple_of(2) { 0x8082 } else { 2 };
                    let mut bytes = len.to_le_bytes().to_vec();
                    bytes.extend(id.to_le_bytes());
                    bytes.extend(flags.to_le_bytes());
                    memory.write_user(memory.at.descriptor + u64::from(position % 8) * 16 + 8, &bytes);
                };
                put(round * 5 + 4, ids[2], 7);
                put(round * 5, ids[1], 50);
            } else {
                let put = |index: u16, id: u16, len: u32| {
                    let mut bytes = u32::from(id).to_le_bytes().to_vec();
                    bytes.extend(len.to_le_bytes());
                    memory.write_user(memory.at.device + 4 + u64::from(index % 8) * 8, &bytes);
                };
                put(round * 3, ids[1], 50);
                put(round * 3 + 2, ids[2], 7);
                memory.write_user(memory.at.device + 2, &(round * 3 + 3).to_le_bytes());
            }
            let mut used = [Used::default(); 8];
            assert_eq!(driver.take_used(&mut used[..1]), Ok(1));
            assert!(driver.enable_notification());
            assert_eq!(driver.take_used(&mut used[1..]), Ok(2));
            let expected = [(ids[0], 100), (ids[1], 50), (ids[2], 7)].map(|(id, len)| Used { id, len });
            assert_eq!(used[..3], expected, "packed: {packed}, round {round}");
            assert!(!driver.enable_notification());
            assert_eq!(driver.free(), 8);
        }
    }
}

/// A bell that wakes the other thread.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn sleep(&self) {
        let rung = self.rung.lock().unwrap();
        let (mut rung, timeout) =
            self.changed.wait_timeout_while(rung, Duration::from_secs(10), |rung| !*rung).unwrap();
        assert!(!timeout.timed_out(), "never woken up");
        *rung = false;
    }
}

/// On two real threads: nothing is lost or reordered, and no side sleeps forever.
#[test]
fn on_two_threads() {
    const COUNT: u64 = 20_000;
    for features in all_features().filter(|features| !features.indirect) {
        let memory = Memory::new(features, 16, 16 * 8, None);
        let (mut driver, mut device) = (memory.driver(), memory.device());
        let bells = [Bell::default(), Bell::default()];
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut burst = Chains::new(BURST, 64);
                let mut seen = 0;
                while seen < COUNT {
                    burst.start(&memory.device);
                    if device.take(&memory.device, &mut burst, 5).unwrap() == 0 {
                        if !device.enable_notification() {
                            bells[0].sleep();
                        }
                        device.disable_notification();
                        continue;
                    }
                    for chain in burst.list() {
                        let mut bytes = [0; 8];
                        burst.readable(chain)[0].read(&mut bytes);
                        assert_eq!(u64::from_le_bytes(bytes), seen);
                        seen += 1;
                    }
                    device.give(burst.list());
                    if device.wants_notification(true) {
                        bells[1].ring();
                    }
                }
            });
            let (mut sent, mut back) = (0, 0);
            let mut used = [Used::default(); 7];
            while back < COUNT {
                let added = driver.add_single((COUNT - sent).min(6) as usize, false, |id| {
                    let buffer = Buffer { address: memory.address(usize::from(id) * 8), len: 8 };
                    memory.write(buffer.address, &sent.to_le_bytes());
                    sent += 1;
                    buffer
                });
                driver.publish();
                if driver.wants_notification() {
                    bells[0].ring();
                }
                let count = driver.take_used(&mut used).unwrap();
                back += count as u64;
                if count == 0 && added == 0 {
                    if !driver.enable_notification() {
                        bells[1].sleep();
                    }
                    driver.disable_notification();
                }
            }
        });
    }
}

/// Chains that a device took and never returned are counted, wherever in the ring they are.
#[test]
fn missing_chains_are_counted() {
    for features in all_features() {
        let size = 8;
        let memory = Memory::new(features, size, 4096, None);
        let (mut driver, mut device) = (memory.driver(), memory.device_at(memory.driver().base()));
        let mut burst = Chains::new(BURST, 64);
        for round in 0..3 * size {
            let buffer = Buffer { address: memory.address(0), len: 64 };
            for _ in 0..4 {
                driver.add(&[buffer], &[]).unwrap();
            }
            driver.publish();
            burst.start(&memory.device);
            assert_eq!(device.take(&memory.device, &mut burst, 4), Ok(4));
            let (given, kept) = burst.list().split_at(3 - round as usize % 3);
            let (given, kept) = (given.to_vec(), kept.to_vec());
            device.give(&given);
            assert_eq!(driver.missing(device.base()), kept.len() as u32, "{features:?} round {round}");
            device.give(&kept);
            assert_eq!(driver.missing(device.base()), 0, "{features:?} round {round}");
            let mut used = [Used::default(); 8];
            assert_eq!(driver.take_used(&mut used), Ok(4));
            assert_eq!(
                (driver.missing(device.base()), driver.base()),
                (0, device.base()),
                "{features:?} round {round}"
            );
        }
    }
}
