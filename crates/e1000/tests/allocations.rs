//! Once they run, neither end allocates anything per frame.

mod common;

use allocation_counter::measure;
use common::{Pool, bare};
use ringroad_e1000::{
    DeviceConfig,
    driver::{Bus, Driver, DriverConfig},
    registers as reg,
};
use ringroad_frame::{ALL, Offload, Sink, Source};
use ringroad_mem::Table;
use std::{hint::black_box, sync::Arc};

fn allocations(len: usize, parts: usize) -> u64 {
    let config = DriverConfig { num_tx_desc: 256, num_rx_desc: 256, ..DriverConfig::default() };
    let mut driver = Driver::new(config).unwrap();
    let memory = Arc::new(Table::default().with(driver.region.clone()).unwrap());
    let mut board = bare(DeviceConfig::default(), Some(memory));
    board.device.config_write(common::COMMAND, &7u16.to_le_bytes(), 0);
    driver.probe(&mut board).unwrap();
    driver.start(&mut board);
    // Longer frames than a buffer holds, some of them.
    let pool = Pool::new(&vec![(common::frame(driver.mac().0, len * parts, 1), Offload::NONE); 16]);
    let mut frames = 0;
    let mut round = || {
        driver.reclaim();
        driver.add(16, |space| space.write(&[7; 2048][..len]));
        driver.publish(&mut board, 0);
        assert_eq!(board.tx.take(&mut board.burst), 16);
        board.tx.done(&mut board.burst);
        assert_eq!(board.rx.put(&pool.burst, &ALL[..16]), 16);
        board.interrupter.settle(0);
        frames += driver.receive(&mut board, |spans| assert_eq!(spans.len(), parts));
        board.read(reg::ICR);
    };
    round();
    let count = measure(|| (0..1000).for_each(|_| round())).count_total;
    assert_eq!(frames, 16 * 1001);
    count
}

#[test]
fn no_allocation_per_frame() {
    assert_eq!([allocations(64, 1), allocations(15, 1), allocations(2048, 3)], [0; 3]);
}

#[test]
fn the_counter_counts() {
    assert_eq!(measure(|| drop(black_box(vec![0u8; 100]))).count_total, 1);
}
