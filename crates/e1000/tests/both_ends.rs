//! Driver against device.

mod common;

use common::{Board, bare};
use ringroad_e1000::{
    DeviceConfig,
    driver::{Bus, Driver, DriverConfig},
    registers::{cause, statistics},
};
use ringroad_frame::Offload;
use ringroad_mem::Table;
use ringroad_wire::ethernet::MacAddr;
use std::sync::Arc;

fn pair(config: DriverConfig, device: DeviceConfig) -> (Driver, Board) {
    let mut driver = Driver::new(config).unwrap();
    let memory = Arc::new(Table::default().with(driver.region.clone()).unwrap());
    let mut board = bare(device, Some(memory));
    board.device.config_write(common::COMMAND, &7u16.to_le_bytes(), 0);
    assert_eq!(driver.probe(&mut board), Ok(device.mac));
    driver.start(&mut board);
    assert!(driver.has_link(&mut board));
    (driver, board)
}

fn small() -> DriverConfig {
    DriverConfig { num_tx_desc: 64, num_rx_desc: 64, ..DriverConfig::default() }
}

#[test]
fn frames_both_ways() {
    let mac = MacAddr([0x52, 0x54, 0, 1, 2, 3]);
    let (mut driver, mut board) = pair(small(), DeviceConfig { mac, ..DeviceConfig::default() });
    for round in 0..50u8 {
        let lens = [60, 61, 64, 1000, 1514, 2000];
        let sent: Vec<_> = lens.iter().map(|&len| common::frame([2, 0, 0, 0, 0, 9], len, round)).collect();
        let mut frames = sent.iter();
        assert_eq!(driver.add(6, |space| space.write(frames.next().unwrap())), 6);
        let now = board.now;
        driver.publish(&mut board, now);
        let taken: Vec<_> = board.take_all().into_iter().map(|(frame, offload)| (frame, offload.is_none())).collect();
        assert_eq!(taken, sent.iter().map(|frame| (frame.clone(), true)).collect::<Vec<_>>());
        assert_eq!(driver.reclaim(), 6);
        let sent: Vec<_> = lens.iter().map(|&len| (common::frame(mac.0, len, round), Offload::NONE)).collect();
        assert_eq!(board.put(&sent), 6);
        let mut received = Vec::new();
        let count = driver.receive(&mut board, |parts| {
            let mut bytes = Vec::new();
            parts.iter().for_each(|part| part.append_to(&mut bytes));
            received.push((bytes, Offload::NONE));
        });
        assert_eq!((count, &received), (6, &sent));
    }
    assert_eq!(board.read(statistics::GPTC), 300);
    assert_eq!(board.read(statistics::GPRC), 300);
    assert_eq!(board.read(statistics::GPRC), 0);
    let causes = driver.interrupt(&mut board);
    assert_ne!(causes & cause::RXT0, 0);
    assert_eq!(driver.interrupt(&mut board), 0);
}
