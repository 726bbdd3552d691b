//! What tests with both ends of a queue share.
#![allow(dead_code, reason = "each of them uses a part")]

use ringroad_frame::Counters;
use ringroad_mem::{Region, Table};
use ringroad_net::{Driver, DriverConfig, RxQueue, TxQueue, bits};
use ringroad_ring::{Features, Inflight, Journal};
use std::sync::Arc;

/// Feature bits: VERSION_1 and those that are wanted.
pub fn acked(wanted: &[(bool, u64)]) -> u64 {
    wanted.iter().filter(|(on, _)| *on).fold(bits::VERSION_1, |all, (_, bit)| all | bit)
}

/// Where a fresh ring starts.
pub fn base(acked: u64) -> u32 {
    Features::negotiated(acked).fresh_base()
}

/// A driver with one pair of queues.
pub fn driver(acked: u64, queue_size: u32, frame: usize) -> Driver {
    Driver::new(DriverConfig { acked, queue_pairs: 1, queue_size, frame, huge: false }).unwrap()
}

/// The device's own mapping of a driver's memory.
pub fn table(driver: &Driver) -> Arc<Table> {
    let region = &driver.region;
    let mapped = Region::map(&driver.file, 0, region.len() as u64, region.guest(), region.user()).unwrap();
    Arc::new(Table::default().with(mapped).unwrap())
}

/// A journal that nobody else will read.
pub fn journal() -> Journal {
    Journal::new(&Region::private(4096, 0).unwrap(), 0)
}

/// The device end of a driver's transmit queue.
pub fn tx(driver: &Driver, acked: u64, size: u32) -> (TxQueue, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let at = driver.tx[0].addresses();
    (
        TxQueue::resume(table(driver), acked, size, at, base(acked), counters.clone(), journal(), Inflight::NONE)
            .unwrap()
            .0,
        counters,
    )
}

/// The device end of a driver's receive queue.
pub fn rx(driver: &Driver, acked: u64, size: u32) -> (RxQueue, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let at = driver.rx[0].addresses();
    (
        RxQueue::resume(table(driver), acked, size, at, base(acked), counters.clone(), journal(), Inflight::NONE)
            .unwrap()
            .0,
        counters,
    )
}
