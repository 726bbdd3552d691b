use super::*;
use ringroad_mem::{Region, Table};
use ringroad_ring::{BURST, Buffer, Chains, DriverRing, Features, bits};
use std::sync::Arc;

const DELAY: Duration = Duration::from_micros(100);
const SIZE: u32 = 16;

/// A ring whose driver wants to be notified, and its moderation.
struct Rig {
    driver: DriverRing,
    device: DeviceRing,
    memory: Table,
    moderation: Moderation,
}

impl Rig {
    /// The driver has asked for these limits.
    fn new(acked: u64, limits: Coalesce) -> Rig {
        let features = Features::negotiated(acked | bits::VERSION_1);
        let region = Region::private(DriverRing::bytes(features, SIZE).next_multiple_of(4096), 0).unwrap();
        let memory = Table::default().with(region.clone()).unwrap();
        let (driver, at) = DriverRing::start(&region, 0, features, SIZE).unwrap();
        let device = DeviceRing::start(&memory, features, SIZE, at, 0).unwrap();
        let mut moderation = Moderation::new(SIZE);
        moderation.ask(Some(limits));
        Rig { driver, device, memory, moderation }
    }

    /// Uses this many buffers.
    fn consume(&mut self, count: usize) {
        assert_eq!(self.driver.add_single(count, false, |_| Buffer { address: 0, len: 64 }), count);
        self.driver.publish();
        let mut chains = Chains::new(BURST, 64);
        chains.start(&Arc::new(self.memory.clone()));
        assert_eq!(self.device.take(&self.memory, &mut chains, count).unwrap(), count);
        self.device.give(chains.list());
    }

    /// Uses this many buffers of one packet each. Returns whether the driver is notified at once.
    fn work(&mut self, count: usize, bytes: u64) -> bool {
        self.consume(count);
        self.moderation.count(count, bytes, count);
        self.moderation.wants_notification(&mut self.device)
    }

    /// The driver takes what was used and waits for more.
    fn wait(&mut self) {
        self.driver.reclaim(BURST).unwrap();
        assert!(!self.driver.enable_notification());
    }

    fn settle(&mut self, micros: u64) -> Notice {
        self.moderation.settle(&mut self.device, Duration::from_micros(micros))
    }
}

impl Rig {
    /// The driver has not asked for limits.
    fn aging(acked: u64, limits: Coalesce) -> Rig {
        let mut rig = Rig::new(acked, Coalesce::NONE);
        rig.moderation.ask(None);
        rig.moderation.set_default(limits);
        rig
    }
}

const LAYOUTS: [u64; 4] = [0, bits::EVENT_IDX, bits::RING_PACKED, bits::RING_PACKED | bits::EVENT_IDX];

fn at(micros: u64) -> Notice {
    Notice::At(Duration::from_micros(micros))
}

#[test]
fn without_limits_each_burst_is_notified() {
    for acked in LAYOUTS {
        let mut rig = Rig::new(acked, Coalesce::NONE);
        assert_eq!(rig.settle(0), Notice::Not, "nothing was used");
        assert!(rig.work(1, 64));
        assert_eq!(rig.settle(0), Notice::Not, "notified already");
    }
}

#[test]
fn the_time_counts_from_the_first_look_at_what_waits_and_starts_anew_after_each_notification() {
    for acked in LAYOUTS {
        let mut rig = Rig::new(acked, Coalesce::delayed(DELAY));
        assert!(!rig.work(1, 64));
        assert_eq!(rig.settle(1000), at(1100));
        assert!(!rig.work(1, 64));
        assert_eq!([rig.settle(1050), rig.settle(1099)], [at(1100); 2], "the second does not postpone it");
        assert_eq!([rig.settle(1100), rig.settle(1101)], [Notice::Now, Notice::Not]);
        rig.wait();
        assert!(!rig.work(1, 64));
        assert_eq!(rig.settle(5000), at(5100));
        assert_eq!(rig.settle(4999), Notice::Now, "a clock that goes back does not keep it");
    }
}

#[test]
fn packets_bytes_and_half_the_ring_end_it_early() {
    for acked in LAYOUTS {
        let limits = Coalesce { packets: 3, bytes: 1000, delay: DELAY };
        let mut rig = Rig::new(acked, limits);
        assert!(!rig.work(2, 128));
        assert!(rig.work(1, 64), "3 packets");
        rig.wait();
        assert!(!rig.work(1, 999));
        assert!(rig.work(1, 1), "1000 bytes");
        rig.wait();
        assert!(!rig.work(2, 128));
        rig.moderation.ask(Some(Coalesce { packets: 2, ..limits }));
        assert_eq!(rig.settle(0), Notice::Now, "what waits already counts for new limits");
        rig.wait();
        rig.moderation.ask(Some(Coalesce { packets: u32::MAX, bytes: u64::MAX, ..limits }));
        assert!(!rig.work(7, 64));
        assert!(rig.work(1, 64), "half the ring");
        rig.wait();
        assert!(!rig.work(1, 64));
        assert_eq!(rig.settle(0), at(100));
        rig.moderation.urge();
        assert_eq!(rig.settle(0), Notice::Now, "urgent");
        rig.wait();
        assert!(!rig.work(1, 64), "once");
        // Few packets in many buffers.
        rig.moderation.count(0, 0, 7);
        assert_eq!(rig.settle(0), Notice::Now);
    }
}

#[test]
fn a_driver_that_does_not_want_to_be_notified_is_not() {
    for acked in LAYOUTS {
        let mut rig = Rig::new(acked, Coalesce::delayed(DELAY));
        rig.driver.disable_notification();
        assert!(!rig.work(1, 64));
        assert_eq!(rig.settle(0), at(100));
        assert_eq!(rig.settle(100), Notice::Not);
        // It has taken what waited before the time was over, and wants to be notified of the next one only.
        rig.wait();
        assert!(!rig.work(1, 64));
        assert_eq!(rig.settle(200), at(300));
        rig.wait();
        let event = acked & bits::EVENT_IDX != 0;
        assert_eq!(rig.settle(300), if event { Notice::Not } else { Notice::Now }, "{acked:x}");
    }
}

/// What was returned but not published yet is published with the notification that counts it.
#[test]
fn a_notification_is_for_all_that_was_counted() {
    for acked in LAYOUTS {
        let mut rig = Rig::new(acked, Coalesce { packets: 4, bytes: u64::MAX, delay: DELAY });
        assert!(!rig.work(2, 128));
        rig.driver.add_single(2, false, |_| Buffer { address: 0, len: 64 });
        rig.driver.publish();
        let mut chains = Chains::new(BURST, 64);
        chains.start(&Arc::new(rig.memory.clone()));
        assert_eq!(rig.device.take(&rig.memory, &mut chains, 2).unwrap(), 2);
        rig.device.give_deferred(chains.list());
        rig.moderation.count(2, 128, 2);
        assert!(rig.moderation.wants_notification(&mut rig.device));
        assert_eq!(rig.driver.reclaim(BURST).unwrap(), 4);
    }
}

#[test]
fn however_long_the_delay_nothing_overflows() {
    let mut rig = Rig::new(0, Coalesce::delayed(Duration::MAX));
    assert!(!rig.work(1, 64));
    assert_eq!(rig.settle(1), Notice::At(Duration::MAX));
}

/// One that waits for the first of what waits is notified when the time is over, as if there were no generations.
#[test]
fn a_driver_that_waits_is_notified_in_time() {
    for acked in LAYOUTS {
        let mut rig = Rig::aging(acked, Coalesce::delayed(DELAY));
        rig.wait();
        for start in [0, 1000, 2000] {
            assert!(!rig.work(1, 64));
            assert_eq!(rig.settle(start), at(start + 50));
            assert!(!rig.work(1, 64));
            assert_eq!(rig.settle(start + 50), at(start + 100), "{acked:x}: a generation grows old");
            assert!(!rig.work(1, 64));
            assert_eq!(rig.settle(start + 99), at(start + 100));
            assert_eq!([rig.settle(start + 100), rig.settle(start + 101)], [Notice::Now, Notice::Not], "{acked:x}");
            rig.wait();
        }
    }
}

/// With EVENT_IDX it says which ones it has taken; without, only that it wants to be notified.
#[test]
fn a_driver_that_takes_what_is_used_by_itself_is_not_interrupted() {
    for acked in LAYOUTS {
        let says = acked & bits::EVENT_IDX != 0;
        let mut rig = Rig::aging(acked, Coalesce::delayed(DELAY));
        let (mut now, mut due, mut interrupts, mut timers) = (0, u64::MAX, 0, 0);
        // It sends every 40 us: it takes what was used before, and asks to be notified of what is used from now on.
        for _ in 0..1000 {
            now += 40;
            timers += u32::from(due <= now);
            rig.wait();
            assert!(!rig.work(1, 64));
            (due, interrupts) = match rig.settle(now) {
                Notice::Now => (u64::MAX, interrupts + 1),
                Notice::Not => (u64::MAX, interrupts),
                Notice::At(at) => (at.as_micros() as u64, interrupts),
            };
        }
        if !says {
            assert!((150..=400).contains(&interrupts), "{acked:x}: {interrupts}");
            continue;
        }
        // Each 400 us, after the first ones.
        assert!(interrupts == 0 && timers <= 103, "{acked:x}: {interrupts} interrupts, {timers} timers");
        // It stops sending, and waits for the last one. That it does is known after as long; after half the time from then on.
        let mut waited = 0;
        while rig.settle(now + waited) != Notice::Now {
            waited += 1;
        }
        assert!((400..=800).contains(&waited), "{acked:x}: {waited}");
        rig.wait();
        assert!(!rig.work(1, 64));
        assert_eq!(rig.settle(now + 1000), at(now + 1050));
    }
}

/// A sender that waits for buffers has half the ring at most to wait for.
#[test]
fn half_the_ring_is_the_most_that_waits_in_both_generations() {
    for acked in LAYOUTS {
        let mut rig = Rig::aging(acked, Coalesce { packets: u32::MAX, bytes: u64::MAX, delay: DELAY });
        rig.wait();
        let sooner = (0..SIZE / 2 - 1).any(|_| rig.work(1, 64));
        assert!(!sooner && rig.work(1, 64), "{acked:x}");
    }
}

/// What it says is of the oldest ones, wherever they are in the ring.
#[test]
fn a_driver_is_asked_about_the_oldest_ones_only() {
    for acked in LAYOUTS {
        for start in 0..=2 * SIZE as usize {
            for newer in 0..SIZE as usize {
                let mut rig = Rig::new(acked, Coalesce::NONE);
                for _ in 0..start {
                    rig.consume(1);
                    rig.wait();
                }
                rig.device.wants_notification(true);
                // One that the driver has taken, and others that it has not.
                rig.consume(1);
                rig.wait();
                rig.consume(newer);
                let old = rig.device.unsignalled() - newer as u32;
                let expected = acked & bits::EVENT_IDX == 0;
                assert_eq!(rig.device.wants_notification_of(old), expected, "{acked:x} {start} {newer}");
                assert_eq!(rig.device.unsignalled(), if expected { 0 } else { newer as u32 });
                if !expected && newer > 0 {
                    assert!(rig.device.wants_notification_of(1), "{acked:x} {start} {newer}");
                }
            }
        }
    }
}
