//! The lem driver's deferred doorbell: no frame is ever stuck, whatever happens when, and doorbells are saved.

mod common;

use common::{Board, bare};
use proptest::{collection::vec, prelude::*};
use ringroad_e1000::{
    DeviceConfig, Effects, Exits, Mitigation,
    descriptor::rx::{DD, EOP},
    driver::{Bus, Driver, DriverConfig},
    registers::{self as reg, cause},
};
use ringroad_mem::Table;
use ringroad_wire::ethernet::MacAddr;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// Driver, device and time. Nothing is looked at unless somebody was told to.
struct World {
    driver: Driver,
    board: Board,
    /// When the driver wants to be called.
    deadline: Option<u64>,
    /// Interrupts that the driver has handled.
    handled: usize,
    /// When each frame was published that the device has not taken.
    waiting: VecDeque<u64>,
    /// Longest time from publishing to taking.
    latency: u64,
    /// The worker takes what there is as soon as it is kicked. Then `latency` is the time that the driver has deferred.
    prompt: bool,
    sent: u32,
    taken: u32,
    reclaimed: u32,
}

const MIT_TIME: u64 = 30_000;

fn config(mit_enable: bool) -> DriverConfig {
    let rings = DriverConfig { num_tx_desc: 16, num_rx_desc: 8, ..DriverConfig::default() };
    DriverConfig { itr: 0, mit_enable, mit_frames: 5, mit_time: MIT_TIME, ..rings }
}

impl World {
    fn new(config: DriverConfig, mitigation: Mitigation) -> World {
        let mut driver = Driver::new(config).unwrap();
        let memory = Arc::new(Table::default().with(driver.region.clone()).unwrap());
        let mut board = bare(DeviceConfig { mitigation, ..DeviceConfig::default() }, Some(memory));
        board.device.config_write(common::COMMAND, &7u16.to_le_bytes(), 0);
        driver.probe(&mut board).unwrap();
        driver.start(&mut board);
        let mut world = World {
            driver,
            board,
            deadline: None,
            handled: 0,
            waiting: VecDeque::new(),
            latency: 0,
            prompt: false,
            sent: 0,
            taken: 0,
            reclaimed: 0,
        };
        world.restart();
        world
    }

    /// A fresh start, by a reset.
    fn restart(&mut self) {
        self.driver.stop(&mut self.board);
        self.driver.start(&mut self.board);
        // The interrupt about the link.
        self.driver.interrupt(&mut self.board);
        self.driver.unmask(&mut self.board);
        self.board.interrupts.clear();
        (self.board.effects, self.deadline, self.handled) = (Effects::empty(), None, 0);
        self.waiting.clear();
        (self.latency, self.sent, self.taken, self.reclaimed) = (0, 0, 0, 0);
    }

    fn send(&mut self, count: u32) {
        let mut next = self.sent;
        let added = self.driver.add(count, |space| {
            next += 1;
            space.write(&(next - 1).to_le_bytes().repeat(16))
        });
        let now = self.board.now;
        self.sent += added;
        self.waiting.extend((0..added).map(|_| now));
        self.driver.publish(&mut self.board, now);
        self.poll();
    }

    fn poll(&mut self) {
        let now = self.board.now;
        self.deadline = self.driver.poll(&mut self.board, now);
        if self.prompt {
            self.carry();
        }
    }

    /// The worker, if it was kicked. A kick that comes meanwhile is not lost.
    fn carry(&mut self) {
        if !self.board.effects.contains(Effects::TRANSMIT) {
            return;
        }
        self.board.effects.remove(Effects::TRANSMIT);
        for (frame, _) in self.board.take_all() {
            assert_eq!(frame[..4], self.taken.to_le_bytes(), "in order");
            self.taken += 1;
            let published = self.waiting.pop_front().unwrap();
            self.latency = self.latency.max(self.board.now - published);
        }
    }

    /// The driver's handler, if it was interrupted.
    fn handle(&mut self) {
        if self.handled < self.board.interrupts.len() {
            self.handled = self.board.interrupts.len();
            let causes = self.driver.interrupt(&mut self.board);
            assert_ne!(causes & (cause::TXDW | cause::RXT0 | cause::LSC), 0);
            self.reclaimed += self.driver.reclaim();
            self.driver.unmask(&mut self.board);
            self.poll();
        }
    }

    /// Lets time pass; timers run when they are due.
    fn pass(&mut self, time: u64) {
        let end = self.board.now + time;
        while let Some(at) = self.board.at.into_iter().chain(self.deadline).min().filter(|&at| at <= end) {
            self.board.now = self.board.now.max(at);
            if self.board.at == Some(at) {
                self.board.settle();
            } else {
                self.poll();
            }
        }
        self.board.now = end;
    }

    /// Nobody sends any more: everything must come to an end by itself.
    fn drain(&mut self) {
        for step in 0.. {
            assert!(step < 1000, "it never ends");
            self.carry();
            self.handle();
            if self.board.effects.contains(Effects::TRANSMIT) {
                continue;
            }
            let Some(at) = self.board.at.into_iter().chain(self.deadline).min() else { break };
            let wait = at.saturating_sub(self.board.now);
            self.pass(wait);
        }
        assert_eq!((self.taken, self.waiting.len()), (self.sent, 0), "a frame is stuck");
        self.reclaimed += self.driver.reclaim();
        assert_eq!(self.reclaimed, self.sent, "a buffer is stuck");
        assert_eq!((self.driver.under_way(), self.deadline), (0, None));
    }
}

/// All schedules of a few steps: send, carry, interrupt, let time pass. After each the driver stops sending.
#[test]
fn no_frame_is_stuck_at_any_point() {
    const STEPS: u32 = 7;
    const OPS: u32 = 5;
    for (tidv, tadv, itr, prompt) in [(0, 0, 0, false), (3, 8, 0, false), (64, 64, 0, true), (20, 0, 100, true)] {
        let config = DriverConfig { tx_int_delay: tidv, tx_abs_int_delay: tadv, itr, ..config(true) };
        let mut world = World::new(config, Mitigation::default());
        world.prompt = prompt;
        for schedule in 0..OPS.pow(STEPS) {
            world.restart();
            let mut left = schedule;
            for _ in 0..STEPS {
                match left % OPS {
                    0 => world.send(1),
                    1 => world.carry(),
                    2 => world.handle(),
                    3 => world.pass(MIT_TIME / 3),
                    _ => world.send(4),
                }
                left /= OPS;
            }
            world.drain();
            assert!(!prompt || world.latency <= MIT_TIME, "{schedule}: {}", world.latency);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Send(u32),
    Carry,
    Handle,
    Pass(u64),
    Set(bool),
    Itr(u16),
    /// A frame comes in: an interrupt that is not about frames sent.
    Receive,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1..12u32).prop_map(Op::Send),
        4 => Just(Op::Carry),
        3 => Just(Op::Handle),
        5 => (0..2 * MIT_TIME).prop_map(Op::Pass),
        1 => any::<bool>().prop_map(Op::Set),
        1 => (0..500u16).prop_map(Op::Itr),
        2 => Just(Op::Receive),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Longer schedules, settings that change, frames the other way, any of the devices.
    #[test]
    fn no_frame_is_stuck(
        ops in vec(op(), 1..80),
        (enabled, clamp_itr) in any::<(bool, bool)>(),
        delays in (0..70u16, 0..70u16, 0..70u16, 0..70u16),
    ) {
        let (tx_int_delay, tx_abs_int_delay, rx_int_delay, rx_abs_int_delay) = delays;
        let delays = DriverConfig { tx_int_delay, tx_abs_int_delay, rx_int_delay, rx_abs_int_delay, ..config(true) };
        let mut world = World::new(delays, Mitigation { enabled, clamp_itr });
        let frame = (common::frame(common::BROADCAST, 60, 1), Default::default());
        let mut received = 0;
        for op in ops {
            match op {
                Op::Send(count) => world.send(count),
                Op::Carry => world.carry(),
                Op::Handle => world.handle(),
                Op::Pass(time) => world.pass(time),
                Op::Set(on) => {
                    world.driver.set_mit_enable(on);
                    world.poll();
                }
                Op::Itr(itr) => world.driver.set_itr(&mut world.board, itr),
                Op::Receive => {
                    received += world.board.put(std::slice::from_ref(&frame));
                    world.driver.receive(&mut world.board, |_| received -= 1);
                }
            }
        }
        world.drain();
        prop_assert_eq!(received, 0);
    }
}

/// Accesses for many frames, sent in pairs as they come, one pair every 5 µs.
fn exits(driver: DriverConfig, mitigation: Mitigation) -> Exits {
    let mut world = World::new(driver, mitigation);
    let before = world.board.interrupter.exits();
    for _ in 0..5000 {
        world.send(2);
        world.carry();
        world.pass(5000);
        world.handle();
    }
    assert_eq!(world.sent, 10_000);
    world.drain();
    // Deferred frames wait for the next interrupt, not for the driver's own limit.
    assert!(world.latency < 2 * 125_000, "{}", world.latency);
    let after = world.board.interrupter.exits();
    Exits {
        reads: after.reads - before.reads,
        writes: after.writes - before.writes,
        interrupts: after.interrupts - before.interrupts,
    }
}

#[test]
fn deferring_saves_doorbells_and_mitigation_interrupts() {
    let rings = DriverConfig { num_tx_desc: 256, itr: 488, mit_frames: 512, mit_time: 1_000_000, ..config(false) };
    let standard = exits(rings, Mitigation { enabled: false, clamp_itr: false });
    // Each interrupt costs a read of ICR, and writes of IMC and IMS.
    assert_eq!(standard, Exits { reads: 5000, writes: 15_000, interrupts: 5000 });
    let mitigated = exits(rings, Mitigation::default());
    assert_eq!(mitigated.writes, 5000 + 2 * mitigated.interrupts);
    // 25 ms at one interrupt every 125 µs.
    assert!((195..=202).contains(&mitigated.interrupts), "{mitigated:?}");
    let deferring = exits(DriverConfig { mit_enable: true, ..rings }, Mitigation::default());
    assert!(deferring.writes <= 630 && deferring.interrupts <= 210 && deferring.reads <= 210, "{deferring:?}");
}

#[test]
fn off_by_default_and_harmless_without_mitigation() {
    assert!(!DriverConfig::default().mit_enable);
    // A device that interrupts at once flushes at once.
    let mut world = World::new(config(true), Mitigation { enabled: false, clamp_itr: false });
    for n in 0..100 {
        world.send(1);
        world.carry();
        world.handle();
        assert_eq!(world.taken, n + 1);
    }
}

#[test]
fn the_ring_fills_and_empties() {
    let mut world = World::new(config(true), Mitigation::default());
    assert_eq!(world.driver.free(), 15);
    world.send(100);
    assert_eq!((world.sent, world.driver.free()), (15, 0));
    world.drain();
    assert_eq!(world.driver.free(), 15);
}

/// Registers that answer anything.
struct Strange(Vec<u32>, usize);

impl Bus for Strange {
    fn read(&mut self, _register: u32) -> u32 {
        self.1 += 1;
        self.0[self.1 % self.0.len()]
    }

    fn write(&mut self, _register: u32, _value: u32) {}
}

#[test]
fn what_is_no_82540em_is_refused() {
    let refused = |values: Vec<u32>| {
        let mut driver = Driver::new(config(false)).unwrap();
        driver.probe(&mut Strange(values, 0)).unwrap_err().to_string()
    };
    assert!(refused(vec![0]).starts_with("expected a grant for the EEPROM in EECD, found 0x0"));
    assert!(refused(vec![u32::MAX]).starts_with("expected an EEPROM checksum of 0xbaba, found 0xffc0"));
    assert!(refused((0..977).map(|n| 0x9e37_79b9u32.wrapping_mul(n)).collect()).contains("expected"));
    // Another PHY, and none.
    struct Other(Board, u32);
    impl Bus for Other {
        fn read(&mut self, register: u32) -> u32 {
            if register == reg::MDIC { self.1 } else { self.0.read(register) }
        }
        fn write(&mut self, register: u32, value: u32) {
            self.0.write(register, value);
        }
    }
    for (mdic, text) in [
        (0x1000_0000, "expected PHY 0x01410c20, found 0x00000000"),
        (0x5000_0000, "expected an answer of PHY register 2"),
    ] {
        let mut driver = Driver::new(config(false)).unwrap();
        let board = bare(DeviceConfig { mac: MacAddr([2; 6]), ..DeviceConfig::default() }, None);
        assert!(driver.probe(&mut Other(board, mdic)).unwrap_err().to_string().starts_with(text));
    }
    for num_tx_desc in [0, 1, 7, 12, 4104, u32::MAX] {
        let text = Driver::new(DriverConfig { num_tx_desc, ..config(false) }).unwrap_err().to_string();
        assert_eq!(text, format!("expected a ring of 8 to 4096 descriptors, a multiple of 8, found {num_tx_desc}"));
    }
}

/// Registers that hold what was written last.
#[derive(Default)]
struct Words(HashMap<u32, u32>);

impl Bus for Words {
    fn read(&mut self, register: u32) -> u32 {
        self.0.get(&register).copied().unwrap_or_default()
    }

    fn write(&mut self, register: u32, value: u32) {
        self.0.insert(register, value);
    }
}

/// The device writes descriptors back again as soon as the driver has reused them, nearly all of them without the end of a frame:
/// a call goes round the ring once.
#[test]
fn a_device_does_not_keep_the_driver_busy() {
    const RING: usize = 4096;
    let mut driver = Driver::new(DriverConfig { num_rx_desc: RING as u32, ..config(false) }).unwrap();
    let mut bus = Words::default();
    driver.start(&mut bus);
    let region = driver.region.clone();
    let ring = u64::from(bus.read(reg::RDBAL)) | u64::from(bus.read(reg::RDBAH)) << 32;
    let write_back = || {
        for index in 0..RING {
            let end = if index % (RING / 2) == RING / 2 - 1 { EOP } else { 0 };
            let place = region.span((ring - region.guest()) as usize + 16 * index + 8, 8).unwrap();
            place.write(&(DD | end | 64).to_le_bytes());
        }
    };
    write_back();
    for _ in 0..3 {
        let mut frames = 0;
        driver.receive(&mut bus, |_| {
            frames += 1;
            write_back();
        });
        assert_eq!(frames, 2);
    }
}
