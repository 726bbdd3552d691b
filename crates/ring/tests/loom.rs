//! The fences and orderings of both ends, checked by loom in every interleaving and with every value that a load may
//! return. Run with `RUSTFLAGS="--cfg loom" cargo test -p ringroad-ring --test loom --release`.
//!
//! All loads and stores of the rings are loom's. An atomic per buffer, accessed relaxed, stands for the buffer's bytes, so
//! that only the ordering of the ring itself can make them visible.
#![cfg(loom)]

use loom::{
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU32,
            Ordering::{AcqRel, Relaxed},
        },
    },
    thread,
};
use ringroad_mem::{Region, Table};
use ringroad_ring::{Buffer, Chains, DeviceRing, DriverRing, Features, Used, model};
use std::sync::{Arc as StdArc, atomic::AtomicU32 as StdAtomicU32};

const GUEST: u64 = 0x1000;
const SIZE: u16 = 2;

/// Both ends of a fresh ring.
fn ends(features: Features) -> (DriverRing, DeviceRing) {
    model(features, SIZE)
}

/// Memory for the descriptors' addresses; never written.
fn memory() -> StdArc<Table> {
    StdArc::new(Table::default().with(Region::private(4096, GUEST).unwrap()).unwrap())
}

/// The buffer of the `serial`th chain; both address and length are unique.
fn buffer(serial: u32) -> Buffer {
    Buffer { address: GUEST + 64 * u64::from(serial), len: 10 + serial }
}

/// Takes one chain; returns its serial number.
fn take_one(device: &mut DeviceRing, memory: &StdArc<Table>, burst: &mut Chains, writable: bool) -> Option<u32> {
    burst.start(memory);
    if device.take(memory, burst, 1).expect("no fault from a correct driver") == 0 {
        return None;
    }
    let chain = burst.list()[0];
    let spans = if writable { burst.writable(&chain) } else { burst.readable(&chain) };
    assert_eq!(spans.len(), 1);
    let offset = spans[0].as_ptr() as usize - memory.regions()[0].span(0, 1).unwrap().as_ptr() as usize;
    let serial = offset as u32 / 64;
    assert_eq!((spans[0].len(), offset % 64), (10 + serial as usize, 0), "address and length of the same descriptor");
    assert_eq!(chain.readable_len() + chain.writable_len(), 10 + serial);
    Some(serial)
}

fn give_one(device: &mut DeviceRing, burst: &mut Chains, written: u32) {
    burst.list_mut()[0].written = written;
    device.give(burst.list());
}

/// Passes one buffer around before the threads start, so that the ring's memory is not in its initial state.
fn once_around(driver: &mut DriverRing, device: &mut DeviceRing, memory: &StdArc<Table>, burst: &mut Chains) {
    assert_eq!(driver.add_single(1, false, |_| buffer(0)), 1);
    driver.publish();
    driver.wants_notification();
    assert_eq!(take_one(device, memory, burst, false), Some(0));
    give_one(device, burst, 0);
    device.wants_notification(true);
    assert_eq!(driver.take_used(&mut [Used::default()]), Ok(1));
}

fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

fn layouts(event_idx: bool) -> [Features; 2] {
    [false, true].map(|packed| Features { packed, event_idx, ..Features::default() })
}

/// The device takes what the driver wrote: descriptors and the bytes behind them. The driver gets back what the device
/// wrote: ids, lengths, bytes. Uses more buffers than the ring has entries. With IN_ORDER the buffers are readable, so that
/// the device of a packed ring returns them in batches.
fn publish(features: Features) {
    let writable = !features.in_order;
    const CHAINS: u32 = 3;
    let memory = memory();
    let returned = StdArc::new(StdAtomicU32::new(0));
    let returned_in = returned.clone();
    check(Some(4), move || {
        let returned = &returned_in;
        let (mut driver, mut device) = ends(features);
        let bytes = || Arc::new((0..CHAINS).map(|_| AtomicU32::new(0)).collect::<Vec<_>>());
        let (sent, replied) = (bytes(), bytes());
        // Loom explores other orders of dependent accesses, but remembers only the last access to a location, which in a
        // packed ring is mostly by the same thread. All threads access this counter, which synchronises nothing, so that
        // every order of the calls is explored.
        let turn = Arc::new(AtomicU32::new(0));
        let device_thread = {
            let (sent, replied, memory, turn) = (sent.clone(), replied.clone(), memory.clone(), turn.clone());
            thread::spawn(move || {
                let mut burst = Chains::new(4, 8);
                let mut next = 0;
                for _ in 0..CHAINS {
                    turn.fetch_add(1, Relaxed);
                    if let Some(serial) = take_one(&mut device, &memory, &mut burst, writable) {
                        assert_eq!(serial, next);
                        next += 1;
                        assert_eq!(sent[serial as usize].load(Relaxed), 100 + serial, "device sees stale bytes");
                        replied[serial as usize].store(200 + serial, Relaxed);
                        turn.fetch_add(1, Relaxed);
                        give_one(&mut device, &mut burst, if writable { 1 + serial } else { 0 });
                    }
                }
                next
            })
        };
        let (mut next, mut back) = (0, 0);
        let mut serials = [None; SIZE as usize];
        for _ in 0..3 {
            // The first time two at once; in a packed ring the first of them also publishes the second.
            driver.add_single((CHAINS - next) as usize, writable, |id| {
                sent[next as usize].store(100 + next, Relaxed);
                serials[id as usize] = Some(next);
                next += 1;
                buffer(next - 1)
            });
            turn.fetch_add(1, Relaxed);
            driver.publish();
            turn.fetch_add(1, Relaxed);
            let mut used = [Used::default(); 2];
            let count = driver.take_used(&mut used).expect("no fault from a correct device");
            for used in &used[..count] {
                let serial = serials[used.id as usize].take().expect("an id in flight");
                assert_eq!((serial, used.len), (back, if writable { 1 + back } else { 0 }));
                assert_eq!(replied[serial as usize].load(Relaxed), 200 + serial, "driver sees stale bytes");
                back += 1;
            }
        }
        let taken = device_thread.join().unwrap();
        assert!(back <= taken && taken <= next);
        returned.fetch_max(back, Relaxed);
    });
    assert_eq!(returned.load(Relaxed), CHAINS, "no execution returned all chains");
}

#[test]
fn split_publish() {
    publish(layouts(false)[0]);
}

#[test]
fn packed_publish() {
    publish(layouts(false)[1]);
}

#[test]
fn split_publish_in_order() {
    publish(Features { in_order: true, ..layouts(false)[0] });
}

#[test]
fn packed_publish_in_order() {
    publish(Features { in_order: true, ..layouts(false)[1] });
}

/// Notification from one side to the other: stands for an eventfd.
#[derive(Clone)]
struct Bell(Arc<AtomicBool>);

impl Bell {
    fn new() -> Bell {
        Bell(Arc::new(AtomicBool::new(false)))
    }

    fn ring(&self) {
        // Loom orders read-modify-writes with each other, but not with stores.
        self.0.swap(true, AcqRel);
    }

    /// Resets the bell; returns whether it had been rung.
    fn clear(&self) -> bool {
        self.0.swap(false, AcqRel)
    }
}

/// A sleeping device is woken or has nothing to do.
fn device_wakes(features: Features) {
    [1, 2].into_iter().for_each(|rounds| device_wakes_for(features, rounds));
}

/// `rounds`: number of buffers that the driver publishes, one at a time.
fn device_wakes_for(features: Features, rounds: u32) {
    let memory = memory();
    let slept = StdArc::new(StdAtomicU32::new(0));
    let slept_in = slept.clone();
    check(None, move || {
        let (mut driver, mut device) = ends(features);
        let mut burst = Chains::new(4, 8);
        once_around(&mut driver, &mut device, &memory, &mut burst);
        device.disable_notification();
        let bell = Bell::new();
        let device_thread = {
            let (bell, memory) = (bell.clone(), memory.clone());
            thread::spawn(move || {
                let mut taken = 0;
                while taken < rounds {
                    if take_one(&mut device, &memory, &mut burst, false).is_some() {
                        taken += 1;
                    } else if !device.enable_notification() {
                        if !bell.clear() {
                            // Asleep until the bell rings again.
                            break;
                        }
                        device.disable_notification();
                    }
                }
                taken
            })
        };
        for serial in 1..=rounds {
            assert_eq!(driver.add_single(1, false, |_| buffer(serial)), 1);
            driver.publish();
            if driver.wants_notification() {
                bell.ring();
            }
        }
        let taken = device_thread.join().unwrap();
        assert!(taken == rounds || bell.clear(), "the device sleeps with {} buffers pending", rounds - taken);
        slept_in.fetch_or(1 << taken, Relaxed);
    });
    slept_after_each_number(&slept, rounds);
}

/// A sleeping driver is woken or has nothing to do.
fn driver_wakes(features: Features) {
    [1, 2].into_iter().for_each(|rounds| driver_wakes_for(features, rounds));
}

/// `rounds`: number of buffers that the device returns, one at a time.
fn driver_wakes_for(features: Features, rounds: u32) {
    let memory = memory();
    let slept = StdArc::new(StdAtomicU32::new(0));
    let slept_in = slept.clone();
    check(None, move || {
        let (mut driver, mut device) = ends(features);
        let mut burst = Chains::new(4, 8);
        once_around(&mut driver, &mut device, &memory, &mut burst);
        driver.disable_notification();
        assert_eq!(driver.add_single(rounds as usize, false, |id| buffer(1 + u32::from(id))), rounds as usize);
        driver.publish();
        let bell = Bell::new();
        let driver_thread = {
            let bell = bell.clone();
            thread::spawn(move || {
                let mut back = 0;
                while back < rounds {
                    if driver.take_used(&mut [Used::default()]).expect("no fault from a correct device") == 1 {
                        back += 1;
                    } else if !driver.enable_notification() {
                        if !bell.clear() {
                            break;
                        }
                        driver.disable_notification();
                    }
                }
                back
            })
        };
        for _ in 1..=rounds {
            assert!(take_one(&mut device, &memory, &mut burst, false).is_some());
            give_one(&mut device, &mut burst, 0);
            if device.wants_notification(true) {
                bell.ring();
            }
        }
        let back = driver_thread.join().unwrap();
        assert!(back == rounds || bell.clear(), "the driver sleeps with {} used buffers pending", rounds - back);
        slept_in.fetch_or(1 << back, Relaxed);
    });
    slept_after_each_number(&slept, rounds);
}

/// Checks that some execution fell asleep after each possible number of buffers, including none.
fn slept_after_each_number(slept: &StdAtomicU32, rounds: u32) {
    assert_eq!(slept.load(Relaxed), (2 << rounds) - 1, "bits: after how many of {rounds} buffers it has slept");
}

#[test]
fn split_device_wakes() {
    device_wakes(layouts(false)[0]);
}

#[test]
fn split_device_wakes_with_event_idx() {
    device_wakes(layouts(true)[0]);
}

#[test]
fn packed_device_wakes() {
    device_wakes(layouts(false)[1]);
}

#[test]
fn packed_device_wakes_with_event_idx() {
    device_wakes(layouts(true)[1]);
}

#[test]
fn split_driver_wakes() {
    driver_wakes(layouts(false)[0]);
}

#[test]
fn split_driver_wakes_with_event_idx() {
    driver_wakes(layouts(true)[0]);
}

#[test]
fn packed_driver_wakes() {
    driver_wakes(layouts(false)[1]);
}

#[test]
fn packed_driver_wakes_with_event_idx() {
    driver_wakes(layouts(true)[1]);
}
