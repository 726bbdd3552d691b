//! Driver against device.

mod common;

use common::{Board, Pool, bare, contents};
use proptest::{collection::vec, prelude::*};
use ringroad_e1000::{
    DeviceConfig,
    driver::{Bus, Driver, DriverConfig},
    registers::{CTRL, IMS, cause, ctrl, rctl, statistics},
};
use ringroad_frame::{ALL, Offload, Sink, Source};
use ringroad_mem::Table;
use ringroad_wire::ethernet::MacAddr;
use std::{collections::VecDeque, sync::Arc};

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
    assert_eq!(board.read(IMS), 0, "masked");
    driver.unmask(&mut board);
    assert_ne!(board.read(IMS), 0);
    assert_eq!(driver.interrupt(&mut board), 0);
}

#[derive(Clone, Debug)]
enum Op {
    /// Frames of these lengths from the driver.
    Send(Vec<usize>),
    /// A burst from the driver; so many of its frames are delivered.
    Take(usize),
    Reclaim,
    /// Frames to the driver; with back-pressure or without.
    Put(Vec<usize>, bool),
    Receive,
    Interrupt,
    Pass(u64),
    /// The driver resets the device, whether or not a burst is in flight.
    Reset(bool),
    /// The same memory, mapped anew.
    Remap,
    Promiscuous(bool),
    Mitigate(bool),
}

fn op() -> impl Strategy<Value = Op> {
    let sizes = || vec(prop_oneof![3 => 60..=64usize, 2 => 60..=1514usize, 1 => 1515..=2048usize], 1..20);
    let any_size = prop_oneof![3 => 60..=64usize, 2 => 14..=1514usize, 1 => 1515..=16380usize];
    prop_oneof![
        6 => sizes().prop_map(Op::Send),
        6 => (0..70usize).prop_map(Op::Take),
        4 => Just(Op::Reclaim),
        6 => (vec(any_size, 1..20), any::<bool>()).prop_map(|(sizes, wait)| Op::Put(sizes, wait)),
        5 => Just(Op::Receive),
        3 => Just(Op::Interrupt),
        3 => (0..2_000_000u64).prop_map(Op::Pass),
        1 => any::<bool>().prop_map(Op::Reset),
        1 => Just(Op::Remap),
        1 => any::<bool>().prop_map(Op::Promiscuous),
        1 => any::<bool>().prop_map(Op::Mitigate),
    ]
}

/// What must come out at either end.
struct Model {
    to_wire: VecDeque<Vec<u8>>,
    to_driver: VecDeque<Vec<u8>>,
    seed: u8,
}

impl Model {
    fn frames(&mut self, to: [u8; 6], sizes: &[usize]) -> Vec<Vec<u8>> {
        let frame = |&len: &usize| {
            self.seed = self.seed.wrapping_add(1);
            common::frame(to, len, self.seed)
        };
        sizes.iter().map(frame).collect()
    }

    fn take(&mut self, board: &mut Board, delivered: usize) {
        if board.tx.take(&mut board.burst) == 0 {
            return;
        }
        let frames = contents(&board.burst);
        let delivered = delivered.min(frames.len());
        for (frame, offload) in &frames[..delivered] {
            assert_eq!((frame, *offload), (&self.to_wire.pop_front().unwrap(), Offload::NONE));
        }
        for ((frame, _), expected) in frames[delivered..].iter().zip(&self.to_wire) {
            assert_eq!(frame, expected);
        }
        board.tx.retain(&mut board.burst, delivered);
        board.settle();
    }

    fn put(&mut self, board: &mut Board, frames: Vec<Vec<u8>>, wait: bool) {
        let all: Vec<_> = frames.iter().map(|frame| (frame.clone(), Offload::NONE)).collect();
        let pool = Pool::new(&all);
        let which = &ALL[..all.len()];
        let accepted = if wait { board.rx.offer(&pool.burst, which) } else { board.rx.put(&pool.burst, which) };
        board.settle();
        let full = board.rx.counters().snapshot().full;
        // Without back-pressure a shorter frame may still fit behind one that did not; with it, none is skipped.
        if accepted == all.len() || wait || frames.iter().all(|frame| frame.len() == frames[0].len()) {
            self.to_driver.extend(frames.into_iter().take(accepted));
        } else {
            assert!(full > 0);
            self.to_driver.extend(frames);
        }
    }

    fn receive(&mut self, driver: &mut Driver, board: &mut Board) {
        driver.receive(board, |parts| {
            let mut bytes = Vec::new();
            parts.iter().for_each(|part| part.append_to(&mut bytes));
            // Frames for which there was no room are missing, nothing else: order and contents stay.
            loop {
                let mut expected = self.to_driver.pop_front().expect("a frame that was sent");
                expected.resize(expected.len().max(60), 0);
                if expected == bytes {
                    break;
                }
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_schedules(ops in vec(op(), 1..120), mit_enable in any::<bool>(), itr in 0..1000u16) {
        let config = DriverConfig { mit_enable, itr, mit_frames: 8, ..small() };
        let (mut driver, mut board) = pair(config, DeviceConfig::default());
        let mac = driver.mac().0;
        let mut model = Model { to_wire: VecDeque::new(), to_driver: VecDeque::new(), seed: 0 };
        for op in ops {
            match op {
                Op::Send(sizes) => {
                    let frames = model.frames([2, 0, 0, 0, 0, 9], &sizes);
                    let mut next = frames.iter();
                    let added = driver.add(frames.len() as u32, |space| space.write(next.next().unwrap()));
                    model.to_wire.extend(frames.into_iter().take(added as usize));
                    let now = board.now;
                    driver.publish(&mut board, now);
                }
                Op::Take(delivered) => model.take(&mut board, delivered),
                Op::Reclaim => _ = driver.reclaim(),
                Op::Put(sizes, wait) => {
                    let frames = model.frames(mac, &sizes);
                    model.put(&mut board, frames, wait);
                }
                Op::Receive => model.receive(&mut driver, &mut board),
                Op::Interrupt => {
                    driver.interrupt(&mut board);
                    driver.unmask(&mut board);
                }
                Op::Pass(time) => {
                    board.now += time;
                    board.settle();
                    let now = board.now;
                    driver.poll(&mut board, now);
                }
                Op::Reset(busy) => {
                    let taken = busy && board.tx.take(&mut board.burst) > 0;
                    let effects = board.device.write(CTRL.into(), &ctrl::RST.to_le_bytes(), board.now);
                    // The host waits for the burst before it goes on.
                    if taken {
                        board.tx.done(&mut board.burst);
                    }
                    board.act(effects);
                    driver.stop(&mut board);
                    driver.start(&mut board);
                    model.to_wire.clear();
                    model.to_driver.clear();
                }
                Op::Remap => {
                    board.tx.set_memory(None).unwrap();
                    board.rx.set_memory(None);
                    prop_assert_eq!(board.tx.take(&mut board.burst), 0);
                    board.tx.set_memory(Some(board.memory.clone())).unwrap();
                    board.rx.set_memory(Some(board.memory.clone()));
                }
                Op::Promiscuous(on) => driver.set_promiscuous(&mut board, on),
                Op::Mitigate(on) => driver.set_mit_enable(on),
            }
            prop_assert!(board.tx.take_fault().is_none() && board.rx.take_fault().is_none());
        }
        // Whatever has happened, all of it arrives in the end.
        board.now += 1_000_000_000;
        let now = board.now;
        driver.poll(&mut board, now);
        for _ in 0..3 {
            model.take(&mut board, 64);
            model.receive(&mut driver, &mut board);
        }
        prop_assert!(model.to_wire.is_empty());
        driver.reclaim();
        prop_assert_eq!(driver.under_way(), 0);
        // And the receiver still receives.
        let frames = model.frames(mac, &[60; 5]);
        model.to_driver.clear();
        model.put(&mut board, frames, true);
        model.receive(&mut driver, &mut board);
        prop_assert!(model.to_driver.is_empty());
    }
}

/// Linux's driver does not have the device strip the frame check sequence.
#[test]
fn frame_check_sequences_count() {
    let (mut driver, mut board) = pair(small(), DeviceConfig::default());
    board.write(ringroad_e1000::registers::RCTL, rctl::EN);
    let sent = common::frame(driver.mac().0, 100, 1);
    assert_eq!(board.put(&[(sent.clone(), Offload::NONE)]), 1);
    let mut lens = Vec::new();
    driver.receive(&mut board, |parts| lens.push(parts[0].len()));
    assert_eq!(lens, [104]);
}
