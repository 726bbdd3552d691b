//! Interrupts and their moderation, against the registers as the manual describes them.

mod common;

use common::{BUFFERS, Board, board, frame};
use proptest::{collection::vec, prelude::*};
use ringroad_e1000::{
    DELAY_UNIT, DeviceConfig, ITR_UNIT, Interrupts, Mitigation, Settled, Vector,
    descriptor::tx::{EOP, IDE, IFCS, RS},
    driver::Bus,
    event,
    registers::{self as reg, cause, rctl, rdtr},
};

const STANDARD: Mitigation = Mitigation { enabled: false, clamp_itr: false };
const QEMU: Mitigation = Mitigation { enabled: true, clamp_itr: true };

fn started(mitigation: Mitigation) -> Board {
    let mut board = board(DeviceConfig { mitigation, ..DeviceConfig::default() });
    board.start(64, rctl::BAM | rctl::SECRC);
    board.set(BUFFERS, &frame([2; 6], 60, 1));
    board.write(reg::IMS, cause::TXDW | cause::RXT0);
    board
}

impl Board {
    /// A frame each way, which the queues report.
    fn sends(&mut self, first: u32, flags: u64) {
        self.send(first, &[[BUFFERS, 60 | EOP | IFCS | flags]]);
        assert_eq!(self.take().len(), 1);
    }

    fn receives(&mut self) {
        let frames = [(frame(common::BROADCAST, 60, 1), Default::default())];
        assert_eq!(self.put(&frames), 1);
    }

    /// Lets time pass, and settles whenever the interrupts want to.
    fn run(&mut self, until: u64) {
        while let Some(at) = self.at.filter(|&at| at <= until) {
            assert!(at >= self.now, "not in the past");
            self.now = at;
            let before = (self.interrupts.len(), self.at);
            self.settle();
            assert!(self.interrupts.len() > before.0 || self.at > before.1, "settled for nothing at {at}");
        }
        self.now = until;
    }

    fn times(&self) -> Vec<u64> {
        self.interrupts.iter().map(|&(at, _)| at).collect()
    }
}

#[test]
fn causes_and_mask() {
    let mut board = started(Mitigation::default());
    board.write(reg::IMC, u32::MAX);
    board.sends(0, RS);
    assert_eq!((board.times(), board.at), (vec![], None), "all is masked");
    // ICS reads as ICR, without acknowledging.
    assert_eq!([(); 2].map(|()| board.read(reg::ICS)), [cause::TXDW | cause::TXQE; 2]);
    board.write(reg::IMS, cause::TXDW);
    assert_eq!(board.times(), [board.now], "what is pending interrupts when it is unmasked");
    assert_eq!(board.read(reg::IMS), cause::TXDW);
    board.write(reg::IMC, cause::TXDW);
    assert!(!board.interrupter.is_line_asserted());
    board.write(reg::IMS, cause::TXDW);
    assert_eq!(board.times().len(), 2);
    // Writing ones acknowledges these only.
    board.write(reg::ICR, cause::TXDW);
    assert_eq!((board.interrupter.is_line_asserted(), board.read(reg::ICS)), (false, cause::TXQE));
    board.write(reg::ICS, cause::TXDW | 1 << 31 | 1 << 30);
    assert_eq!(board.times().len(), 3);
    // While the line is asserted there is no other interrupt.
    board.write(reg::ICS, cause::TXDW | cause::LSC);
    assert_eq!(board.times().len(), 3);
    assert_eq!([(); 2].map(|()| board.read(reg::ICR)), [cause::TXDW | cause::TXQE | cause::LSC, 0]);
    assert_eq!(board.read(reg::IMC), 0);
}

#[test]
fn descriptors_without_report_do_not_interrupt() {
    let mut board = started(Mitigation::default());
    board.sends(0, 0);
    board.sends(1, IDE);
    assert_eq!((board.times(), board.at, board.read(reg::ICR)), (vec![], None, cause::TXQE));
}

#[test]
fn transmit_delay() {
    let unit = DELAY_UNIT;
    let mut board = started(Mitigation::default());
    board.write(reg::TIDV, 10);
    board.write(reg::TADV, 25);
    let start = board.now;
    // Every frame restarts TIDV; TADV counts from the first one.
    for n in 0..4 {
        board.run(start + n * 8 * unit);
        board.sends(n as u32, RS | IDE);
        assert_eq!(board.at, Some((board.now + 10 * unit).min(start + 25 * unit)));
    }
    board.run(start + 100 * unit);
    assert_eq!(board.times(), [start + 25 * unit]);
    assert_eq!(board.read(reg::ICR), cause::TXDW | cause::TXQE);
    assert_eq!(board.at, None, "nothing runs when idle");
    // One without IDE ends the delay of those before it.
    let second = board.now;
    board.sends(4, RS | IDE);
    board.run(second + 3 * unit);
    board.sends(5, RS);
    assert_eq!((board.times()[1..].to_vec(), board.at), (vec![second + 3 * unit], None));
    board.read(reg::ICR);
    assert_eq!(board.at, None);
    // TADV 0: only TIDV counts. TIDV 0: no delay at all.
    board.write(reg::TADV, 0);
    board.sends(6, RS | IDE);
    assert_eq!(board.at, Some(board.now + 10 * unit));
    board.read(reg::ICR);
    board.write(reg::TIDV, 0);
    board.read(reg::ICR);
    board.sends(7, RS | IDE);
    assert_eq!(board.read(reg::ICR) & cause::TXDW, cause::TXDW);
}

#[test]
fn receive_delay() {
    let unit = DELAY_UNIT;
    let mut board = started(Mitigation::default());
    board.receives();
    assert_eq!(board.times(), [board.now], "RDTR 0: at once");
    board.read(reg::ICR);
    board.write(reg::RDTR, 20);
    board.write(reg::RADV, 30);
    let start = board.now;
    board.receives();
    board.run(start + 15 * unit);
    board.receives();
    // Read before it is due: not yet a cause. Read when it is, though nobody has settled: it is.
    assert_eq!(board.read(reg::ICR), 0);
    board.now = start + 30 * unit;
    assert_eq!(board.read(reg::ICR), cause::RXT0);
    assert_eq!((board.times().len(), board.at), (1, None));
    // FPD ends the delay.
    board.receives();
    board.write(reg::RDTR, 20 | rdtr::FPD);
    assert_eq!((board.times().len(), board.read(reg::RDTR)), (2, 20));
    // With the cause masked nobody has to be called.
    board.read(reg::ICR);
    board.write(reg::IMC, u32::MAX);
    board.receives();
    assert_eq!(board.at, None);
    board.write(reg::IMS, cause::RXT0);
    assert_eq!(board.at, Some(board.now + 20 * unit));
}

#[test]
fn itr() {
    let mut board = started(Mitigation::default());
    board.write(reg::ITR, 195);
    let interval = 195 * ITR_UNIT;
    let start = board.now;
    // The first one at once: nothing is late at low load.
    board.receives();
    assert_eq!((board.times(), board.at), (vec![start], None));
    // Many frames, each acknowledged: one interrupt per interval.
    let mut at = start;
    for n in 0..1000u64 {
        at = start + n * 1000;
        board.run(at);
        if board.interrupter.is_line_asserted() {
            board.read(reg::ICR);
        }
        board.receives();
        let tail = (board.read(reg::RDH) + 63) % 64;
        board.write(reg::RDT, tail);
    }
    let times = board.times();
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] == interval), "{times:?}");
    assert_eq!(times.len() as u64, (at - start) / interval + 1);
    // A new value counts from the last interrupt on.
    board.read(reg::ICR);
    let last = *board.times().last().unwrap();
    board.receives();
    board.write(reg::ITR, 400);
    assert_eq!(board.at, Some(last + 400 * ITR_UNIT));
    board.write(reg::ITR, 0);
    assert_eq!(board.times().last(), Some(&board.now));
}

/// The worker comes late, and the driver takes a while, but the rate is what ITR says: intervals count from when an interrupt was due.
#[test]
fn late_interrupts_do_not_delay_those_behind_them() {
    for (itr, late) in [(195, 0), (195, 20_000), (195, 49_000), (488, 70_000), (39, 9_000)] {
        let mut interrupts = Interrupts::new(Mitigation::default());
        interrupts.set_itr(itr);
        interrupts.unmask(cause::RXT0);
        let interval = u64::from(itr) * ITR_UNIT;
        let (start, mut now) = (1_000_000, 1_000_000);
        let mut times = Vec::new();
        for n in 0..1000u64 {
            // A frame, always before the next interrupt is due.
            interrupts.post(event::RECEIVED, now);
            let at = interrupts.settle(now).at;
            now = at.unwrap_or(now) + n * 7919 % (late + 1);
            assert_eq!(at.is_none(), n == 0, "only the first one is at once");
            if n > 0 {
                assert_eq!(interrupts.settle(now), Settled { raised: true, at: None });
            }
            times.push(now);
            assert_eq!(interrupts.read_icr(now), cause::RXT0);
        }
        let passed = times.last().unwrap() - start;
        assert!(passed.abs_diff(999 * interval) <= late, "{itr}: {passed} ns for 999 intervals");
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] + late >= interval));
    }
}

/// What was missed for long is not made up for, but by one interrupt.
#[test]
fn a_stall_is_followed_by_one_interrupt_more() {
    let mut board = started(Mitigation::default());
    board.write(reg::ITR, 195);
    let interval = 195 * ITR_UNIT;
    board.receives();
    board.read(reg::ICR);
    board.receives();
    // Nobody comes for twenty intervals.
    board.now += 20 * interval;
    board.settle();
    let stalled = board.now;
    for _ in 0..5 {
        board.read(reg::ICR);
        board.receives();
        board.run(board.at.unwrap_or(board.now));
    }
    let times: Vec<_> = board.times()[1..].iter().map(|at| at - stalled).collect();
    assert_eq!(times, [0, 0, interval, 2 * interval, 3 * interval, 4 * interval]);
}

/// A lone frame waits until the interval since the last interrupt is over, and not at all if it is: less than one interval.
#[test]
fn latency_at_low_load_is_within_an_interval() {
    let mut board = started(Mitigation::default());
    board.write(reg::ITR, 195);
    let interval = 195 * ITR_UNIT;
    let mut longest = 0;
    for n in 1..500u64 {
        // From well within the interval to far beyond.
        board.run(board.now + n * n % (3 * interval) + 1000);
        let arrived = board.now;
        let before = board.interrupts.len();
        board.receives();
        board.run(board.at.unwrap_or(arrived));
        assert_eq!((board.interrupts.len(), board.at), (before + 1, None));
        longest = longest.max(board.now - arrived);
        // The driver takes a microsecond.
        board.now += 1000;
        assert_ne!(board.read(reg::ICR) & cause::RXT0, 0);
        let tail = (board.read(reg::RDH) + 63) % 64;
        board.write(reg::RDT, tail);
    }
    assert!((interval / 2..interval).contains(&longest), "{longest}");
}

#[test]
fn without_mitigation_registers_are_only_stored() {
    let mut board = started(STANDARD);
    for (register, value) in [(reg::ITR, 488), (reg::TIDV, 64), (reg::TADV, 64), (reg::RDTR, 64), (reg::RADV, 64)] {
        board.write(register, value);
        assert_eq!(board.read(register), value);
    }
    for n in 0..10 {
        board.sends(n, RS | IDE);
        assert_eq!(board.times().len(), 2 * n as usize + 1);
        board.read(reg::ICR);
        board.receives();
        board.read(reg::ICR);
    }
    assert_eq!((board.times().len(), board.at), (20, None));
}

#[test]
fn the_clamp_of_qemu() {
    let mut board = started(QEMU);
    let start = board.now;
    for itr in [0, 100, 500, 600] {
        board.write(reg::ITR, itr);
        board.receives();
        board.run(board.now + 1_000_000);
        board.read(reg::ICR);
        board.receives();
        board.read(reg::ICR);
        board.receives();
        assert_eq!(board.at, Some(board.now + u64::from(itr.max(500)) * 256), "{itr}");
        board.run(board.now + 1_000_000);
        board.read(reg::ICR);
    }
    assert!(board.times()[0] == start && board.interrupts.iter().all(|&(_, vector)| vector == Vector::Line));
}

#[test]
fn a_masked_cause_that_ends_first_does_not_begin_the_interval() {
    let mut interrupts = Interrupts::new(Mitigation::default());
    interrupts.unmask(cause::TXDW);
    interrupts.set_itr(13);
    interrupts.set_tidv(2);
    interrupts.set_rdtr(1);
    interrupts.post(event::RECEIVED | event::SENT, 1000);
    // RXT0 at 2024 interrupts nobody.
    let raised = 1000 + 2 * DELAY_UNIT;
    assert_eq!(interrupts.settle(1000), Settled { raised: false, at: Some(raised) });
    assert_eq!(interrupts.settle(raised), Settled { raised: true, at: None });
    assert_eq!(interrupts.read_icr(raised), cause::TXDW | cause::RXT0);
    interrupts.post(cause::TXDW, raised + 1);
    assert_eq!(interrupts.settle(raised + 1), Settled { raised: false, at: Some(raised + 13 * ITR_UNIT) });
}

/// Relative and absolute delay, first and last packet.
type Delay = (u64, u64, Option<(u64, u64)>);

/// What the manual says, in steps of one nanosecond's worth of looking at everything.
#[derive(Default)]
struct Model {
    itr: u64,
    /// Transmit, receive.
    delays: [Delay; 2],
    icr: u32,
    ims: u32,
    asserted: bool,
    last: Option<u64>,
    raised: Vec<u64>,
}

impl Model {
    fn tick(&mut self, now: u64) {
        for ((relative, absolute, since), cause) in self.delays.iter_mut().zip([cause::TXDW, cause::RXT0]) {
            let Some((first, last)) = *since else { continue };
            if now >= last + *relative || *absolute > 0 && now >= first + *absolute {
                self.icr |= cause;
                *since = None;
            }
        }
        self.asserted &= self.icr & self.ims != 0;
        if !self.asserted && self.icr & self.ims != 0 && self.last.is_none_or(|last| now >= last + self.itr) {
            self.asserted = true;
            self.last = Some(now);
            self.raised.push(now);
        }
    }

    fn packet(&mut self, which: usize, now: u64) {
        let (relative, _, since) = &mut self.delays[which];
        if *relative == 0 {
            self.icr |= [cause::TXDW, cause::RXT0][which];
            *since = None;
        } else {
            *since = Some((since.map_or(now, |(first, _)| first), now));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Sent,
    SentAtOnce,
    Received,
    Read,
    Mask(u32),
    Unmask(u32),
    Itr(u16),
    Delay(usize, u16, u16),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let causes = prop_oneof![Just(cause::TXDW), Just(cause::RXT0), Just(cause::ALL)];
    prop_oneof![
        3 => Just(Op::Sent),
        1 => Just(Op::SentAtOnce),
        3 => Just(Op::Received),
        3 => Just(Op::Read),
        1 => causes.clone().prop_map(Op::Mask),
        2 => causes.prop_map(Op::Unmask),
        1 => (0..20u16).prop_map(Op::Itr),
        1 => (0..2usize, 0..4u16, 0..6u16).prop_map(|(which, relative, absolute)| Op::Delay(which, relative, absolute)),
        8 => (0..4000u64).prop_map(Op::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// The state machine, called only when it asks for it, interrupts when the model does, which looks at every moment.
    #[test]
    fn as_the_registers_say(ops in vec(op(), 1..60)) {
        let (mut interrupts, mut model) = (Interrupts::new(Mitigation::default()), Model::default());
        let (mut now, mut raised) = (1000, Vec::new());
        for op in ops {
            interrupts.post(0, now);
            match op {
                Op::Sent => interrupts.post(event::SENT, now),
                Op::SentAtOnce => interrupts.post(cause::TXDW, now),
                Op::Received => interrupts.post(event::RECEIVED, now),
                Op::Read => prop_assert_eq!(interrupts.read_icr(now), std::mem::take(&mut model.icr)),
                Op::Mask(causes) => interrupts.mask(causes),
                Op::Unmask(causes) => interrupts.unmask(causes),
                Op::Itr(itr) => interrupts.set_itr(itr),
                Op::Delay(0, relative, absolute) => {
                    interrupts.set_tidv(relative);
                    interrupts.set_tadv(absolute);
                }
                Op::Delay(_, relative, absolute) => {
                    interrupts.set_rdtr(relative);
                    interrupts.set_radv(absolute);
                }
                Op::Pass(_) => {}
            }
            match op {
                Op::Sent => model.packet(0, now),
                Op::SentAtOnce => {
                    model.icr |= cause::TXDW;
                    model.delays[0].2 = None;
                }
                Op::Received => model.packet(1, now),
                Op::Read => model.asserted = false,
                Op::Mask(causes) => model.ims &= !causes,
                Op::Unmask(causes) => model.ims |= causes,
                Op::Itr(itr) => model.itr = u64::from(itr) * ITR_UNIT,
                Op::Delay(which, relative, absolute) => {
                    let delay = &mut model.delays[which];
                    (delay.0, delay.1) = (u64::from(relative) * DELAY_UNIT, u64::from(absolute) * DELAY_UNIT);
                }
                Op::Pass(_) => {}
            }
            model.tick(now);
            let mut settled = interrupts.settle(now);
            raised.extend(settled.raised.then_some(now));
            let Op::Pass(time) = op else { continue };
            let end = now + time;
            while let Settled { at: Some(at), .. } = settled {
                prop_assert!(at > now || settled.raised);
                if at > end {
                    break;
                }
                while now < at {
                    now += 1;
                    model.tick(now);
                }
                settled = interrupts.settle(now);
                raised.extend(settled.raised.then_some(now));
            }
            while now < end {
                now += 1;
                model.tick(now);
            }
            prop_assert_eq!(&raised, &model.raised);
        }
        prop_assert_eq!(raised, model.raised);
    }

    /// Called late, it interrupts no earlier than when called in time, and not less often.
    #[test]
    fn late_by_less_than_an_interval(frames in vec(1..3000u64, 1..200), lates in vec(0..2560u64, 1..20), itr in 10..40u16) {
        let count = |lates: &[u64]| {
            let mut interrupts = Interrupts::new(Mitigation::default());
            interrupts.set_itr(itr);
            interrupts.unmask(cause::RXT0);
            let (mut now, mut due, mut times) = (0, None::<u64>, Vec::new());
            let mut lates = lates.iter().cycle();
            let mut settle = |interrupts: &mut Interrupts, now: u64, due: &mut Option<u64>| {
                let Settled { raised, at } = interrupts.settle(now);
                if raised {
                    interrupts.read_icr(now);
                    times.push(now);
                }
                *due = at.map(|at| at + lates.next().unwrap());
            };
            for gap in &frames {
                let arrives = now + gap;
                while let Some(at) = due.filter(|&at| at <= arrives) {
                    now = at;
                    settle(&mut interrupts, now, &mut due);
                }
                now = arrives;
                interrupts.post(event::RECEIVED, now);
                if due.is_none() {
                    settle(&mut interrupts, now, &mut due);
                }
            }
            times
        };
        let (exact, late) = (count(&[0]), count(&lates));
        let interval = u64::from(itr) * ITR_UNIT;
        // A driver that acknowledges later takes more frames with one interrupt.
        prop_assert!(late.len() <= exact.len());
        let longest = lates.iter().max().unwrap();
        prop_assert!(late.windows(2).all(|pair| pair[1] - pair[0] + longest >= interval));
    }
}
