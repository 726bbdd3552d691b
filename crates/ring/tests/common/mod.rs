//! A ring in a driver's memory, and the device's own mapping of that memory. Shared by the tests of this crate.

use ringroad_mem::{Region, Table};
use ringroad_ring::{Addresses, DeviceRing, DriverRing, Features};
use std::sync::Arc;

/// Guest address of the driver's memory.
pub const GUEST: u64 = 0x1_0000_0000;

/// The driver's memory: a ring followed by an arena.
pub struct Memory {
    pub driver: Arc<Region>,
    pub device: Arc<Table>,
    pub at: Addresses,
    pub features: Features,
    pub size: u32,
    /// Offset of the arena.
    pub arena: usize,
}

impl Memory {
    /// With `cut`, the device maps the file as two regions, which meet `cut` bytes into the arena.
    pub fn new(features: Features, size: u32, arena: usize, cut: Option<usize>) -> Memory {
        let start = DriverRing::bytes(features, size);
        let (driver, file) = Region::create(start + arena, GUEST, false).unwrap();
        let (_, at) = DriverRing::start(&driver, 0, features, size).unwrap();
        let end = driver.len() as u64;
        let cut = cut.map(|cut| (start + cut) as u64).unwrap_or(end);
        let mut device = Table::default();
        for (from, to) in [(0, cut), (cut, end)] {
            if from < to {
                let region = Region::map(&file, from, to - from, GUEST + from, driver.user() + from).unwrap();
                device = device.with(region).unwrap();
            }
        }
        Memory { driver, device: Arc::new(device), at, features, size, arena: start }
    }

    /// Places the ring at the start of existing memory, which the device maps as one region.
    pub fn over(features: Features, size: u32, driver: Arc<Region>, file: &std::fs::File) -> Memory {
        let (_, at) = DriverRing::start(&driver, 0, features, size).unwrap();
        let arena = DriverRing::bytes(features, size);
        let region = Region::map(file, 0, driver.len() as u64, GUEST, driver.user()).unwrap();
        let device = Arc::new(Table::default().with(region).unwrap());
        Memory { driver, device, at, features, size, arena }
    }

    /// Returns a driver end for the ring, whose memory must be zeroed.
    pub fn driver(&self) -> DriverRing {
        DriverRing::start(&self.driver, 0, self.features, self.size).unwrap().0
    }

    /// Returns a device end for a fresh ring.
    pub fn device(&self) -> DeviceRing {
        self.device_at(self.features.fresh_base())
    }

    /// Returns a device end that resumes at `base`.
    pub fn device_at(&self, base: u32) -> DeviceRing {
        DeviceRing::start(&self.device, self.features, self.size, self.at, base).unwrap()
    }

    /// Returns the guest address of a byte of the arena.
    pub fn address(&self, offset: usize) -> u64 {
        GUEST + (self.arena + offset) as u64
    }

    /// Writes as the driver, at a guest address.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        assert_eq!(self.driver.span((address - GUEST) as usize, bytes.len()).unwrap().write(bytes), bytes.len());
    }

    /// Writes as the driver, at a user address, which is how rings are addressed.
    pub fn write_user(&self, user: u64, bytes: &[u8]) {
        self.write(user - self.driver.user() + GUEST, bytes);
    }
}

/// Returns all combinations of layout and features.
pub fn all_features() -> impl Iterator<Item = Features> {
    (0..16).map(|bits| Features {
        packed: bits & 1 != 0,
        indirect: bits & 2 != 0,
        event_idx: bits & 4 != 0,
        in_order: bits & 8 != 0,
    })
}
