//! A frontend that uses descriptors itself while no device is connected, as QEMU does when it drops what a guest transmits
//! while the link is down: at an index of its own, not where the killed device was. The successor must pass them.
#![cfg(not(loom))]

#[allow(dead_code, reason = "shared with other tests")]
mod common;

use common::Memory;
use ringroad_mem::Region;
use ringroad_ring::{BURST, Buffer, Chains, DeviceRing, DriverRing, Features, Inflight, Journal, Used};
use std::sync::Arc;

const SIZE: u32 = 16;
const FEATURES: Features = Features { packed: true, indirect: false, event_idx: true, in_order: false };

struct Rig {
    memory: Memory,
    driver: DriverRing,
    journal: Arc<Region>,
    /// Where the frontend believes the ring to be: slot and wrap counter.
    frontend: (u16, bool),
    sent: u32,
    back: u32,
}

impl Rig {
    fn new() -> Rig {
        let memory = Memory::new(FEATURES, SIZE, 4096, None);
        let driver = memory.driver();
        let journal = Region::create(4096, 0, false).unwrap().0;
        Rig { memory, driver, journal, frontend: (0, true), sent: 0, back: 0 }
    }

    fn base(&self) -> u32 {
        let half = u32::from(self.frontend.0) | u32::from(self.frontend.1) << 15;
        half | half << 16
    }

    /// A device that starts where its journal says.
    fn device(&self) -> DeviceRing {
        let Memory { device, features, size, at, .. } = &self.memory;
        let journal = Journal::new(&self.journal, 0);
        DeviceRing::resume(device, *features, *size, *at, self.base(), journal, Inflight::NONE).unwrap().0
    }

    /// Makes chains of this many descriptors available.
    fn send(&mut self, chains: u32, descriptors: u32) {
        for _ in 0..chains {
            let buffers: Vec<_> = (0..descriptors)
                .map(|index| Buffer { address: self.memory.address(64 * index as usize), len: 64 })
                .collect();
            self.driver.add(&buffers, &[]).unwrap();
            self.sent += 1;
        }
        self.driver.publish();
    }

    /// The driver takes back what is used.
    fn collect(&mut self) {
        let mut used = [Used::default(); SIZE as usize];
        self.back += self.driver.take_used(&mut used).unwrap() as u32;
    }

    /// The device takes, forwards and returns up to this many chains.
    fn carry(&mut self, device: &mut DeviceRing, max: usize) -> usize {
        let mut burst = Chains::new(BURST, 64);
        burst.start(&self.memory.device);
        let count = device.take(&self.memory.device, &mut burst, max).unwrap();
        device.consume();
        device.give(burst.list());
        self.collect();
        count
    }

    /// The frontend uses a chain at its own position, if the descriptor there looks available to it; as QEMU does.
    fn drop_one(&mut self) -> bool {
        let (slot, wrap) = self.frontend;
        let flags = |slot: u16| {
            let mut bytes = [0; 16];
            let at = self.memory.at.descriptor + 16 * u64::from(slot) - self.memory.driver.user();
            self.memory.driver.span(at as usize, 16).unwrap().read(&mut bytes);
            (at, u16::from_le_bytes([bytes[14], bytes[15]]), bytes)
        };
        let (at, first, mut bytes) = flags(slot);
        if (first >> 7 & 1 != 0) != wrap || (first >> 15 != 0) == wrap {
            return false;
        }
        let mut slots = 1;
        while flags(slot + slots - 1).1 & 1 != 0 {
            slots += 1;
        }
        // The buffer id is that of the chain's last descriptor.
        let (_, _, last) = flags(slot + slots - 1);
        bytes[12..14].copy_from_slice(&last[12..14]);
        bytes[14..].copy_from_slice(&if wrap { 0x8080_u16 } else { 0 }.to_le_bytes());
        self.memory.driver.span(at as usize, 16).unwrap().write(&bytes);
        self.frontend.0 += slots;
        true
    }

    /// Everything that was sent comes back, and the ring goes on for several passes.
    fn goes_on(&mut self, device: &mut DeviceRing) {
        for round in 0..5 * SIZE {
            while self.carry(device, 3) > 0 {}
            device.enable_notification();
            while self.carry(device, 3) > 0 {}
            assert_eq!(self.back, self.sent, "round {round}: buffers are lost");
            self.send(1 + round % 3, 1 + round % 2);
        }
    }
}

/// A device that has carried chains up to the end of the second pass and is killed while more are available, up to slot 4 of
/// the third one, which has the wrap counter of the first.
fn killed_before_the_start(descriptors: u32) -> Rig {
    let mut rig = Rig::new();
    let mut device = rig.device();
    for _ in 0..2 * SIZE / 2 - 1 {
        rig.send(1, 2);
        rig.carry(&mut device, 1);
    }
    drop(device);
    rig.send(1, 2);
    rig.send(4 / descriptors, descriptors);
    assert_eq!(rig.back, SIZE - 1);
    rig
}

#[test]
fn descriptors_that_the_frontend_used_are_passed() {
    for descriptors in [1, 2, 4] {
        for dropped in 1..=4 / descriptors {
            let mut rig = killed_before_the_start(descriptors);
            (0..dropped).for_each(|_| assert!(rig.drop_one()));
            let mut device = rig.device();
            rig.goes_on(&mut device);
        }
    }
}

#[test]
fn they_are_passed_by_a_device_that_only_asks_for_notifications() {
    let mut rig = killed_before_the_start(1);
    (0..4).for_each(|_| assert!(rig.drop_one()));
    let mut device = rig.device();
    assert_eq!(rig.carry(&mut device, 1), 1);
    assert!(!device.enable_notification());
    assert_eq!(rig.back, rig.sent);
    rig.send(1, 1);
    assert_eq!(rig.carry(&mut device, 3), 1, "it waits behind the frontend's descriptors");
}

#[test]
fn they_are_known_after_another_kill() {
    let mut rig = killed_before_the_start(1);
    assert!(rig.drop_one());
    drop(rig.device());
    // Killed before it got there; the frontend goes on where it was.
    assert!(rig.drop_one());
    let mut device = rig.device();
    rig.goes_on(&mut device);
}

#[test]
fn they_are_forgotten_once_passed() {
    let mut rig = killed_before_the_start(1);
    assert!(rig.drop_one());
    for _ in 0..3 * SIZE {
        let mut device = rig.device();
        while rig.carry(&mut device, 3) > 0 {}
        assert_eq!(rig.back, rig.sent);
        rig.send(1, 1);
    }
}

#[test]
fn they_may_be_where_the_device_is() {
    let mut rig = Rig::new();
    rig.device();
    rig.send(3, 1);
    assert!(rig.drop_one() && rig.drop_one());
    let mut device = rig.device();
    rig.goes_on(&mut device);
}

#[test]
fn a_base_that_lies_is_of_no_use() {
    // No descriptor there was used: the device believes the ring.
    for slot in 0..SIZE as u16 {
        for wrap in [false, true] {
            let mut rig = killed_before_the_start(1);
            rig.frontend = (slot, wrap);
            let mut device = rig.device();
            rig.goes_on(&mut device);
        }
    }
}
