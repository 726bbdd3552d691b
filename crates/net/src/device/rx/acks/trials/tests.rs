use super::*;

/// A driver over time.
struct Driver<F> {
    trials: Trials,
    now: Duration,
    sent: u64,
    /// What it sends in a time, if acknowledgements wait or not, in Mb/s.
    sends: F,
}

impl<F: FnMut(bool, Duration) -> u64> Driver<F> {
    fn new(sends: F) -> Self {
        Driver { trials: Trials::default(), now: ms(7), sent: 1 << 40, sends }
    }

    /// Lets it run; returns what part of the time acknowledgements waited, and its rate in Mb/s.
    fn run(&mut self, time: Duration) -> (f64, f64) {
        let (start, before, mut waited) = (self.now, self.sent, Duration::ZERO);
        while self.now < start + time {
            let tick = Duration::from_micros(170);
            let waits = self.trials.wait();
            self.now += tick;
            self.sent += (self.sends)(waits, self.now) * tick.as_micros() as u64 / 8;
            if waits {
                waited += tick;
                self.trials.note();
            }
            self.trials.look(self.now, self.sent);
        }
        let passed = (self.now - start).as_secs_f64();
        (waited.as_secs_f64() / passed, (self.sent - before) as f64 * 8e-6 / passed)
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// Rates that differ by 20 % from one time to the next, an eighth of them far lower: a thread did not have its CPU.
fn noisy(rate: u64, now: Duration) -> u64 {
    let stretch = now.as_millis() as u64 / 7;
    let dice = stretch.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    if dice.is_multiple_of(8) { rate / 2 } else { rate * (90 + dice % 20) / 100 }
}

#[test]
fn acknowledgements_wait_if_the_driver_sends_more() {
    let mut driver = Driver::new(|waits, _| if waits { 2000 } else { 1500 });
    driver.run(SECOND / 2);
    let (waited, rate) = driver.run(30 * SECOND);
    assert!(waited > 0.97 && rate > 1980.0, "{waited}, {rate}");
}

#[test]
fn and_do_not_if_it_waits_for_them() {
    for with in [0, 100, 500, 1200, 1500, 1540] {
        let mut driver = Driver::new(|waits, _| if waits { with } else { 1500 });
        let (_, first) = driver.run(SECOND);
        let (waited, rate) = driver.run(30 * SECOND);
        assert!(waited < 0.02 && rate > 1470.0 && first > 1300.0, "{with}: {waited}, {rate}, {first}");
    }
}

#[test]
fn a_rate_that_rises_or_falls_is_not_mistaken_for_a_gain() {
    for with in [80, 100] {
        for falls in [false, true] {
            let mut driver = Driver::new(|waits, now| {
                let time = now.as_millis() as u64;
                let rate = if falls { 10_000_u64.saturating_sub(10 * time) } else { 500 + 20 * time };
                if waits { rate * with / 100 } else { rate }
            });
            let (waited, _) = driver.run(SECOND * 9 / 10);
            assert!(waited < 0.2, "{with}, {falls}: {waited}");
        }
    }
}

#[test]
fn nor_is_noise() {
    let mut driver = Driver::new(|waits, now| noisy(if waits { 2200 } else { 1500 }, now));
    let (waited, _) = driver.run(20 * SECOND);
    assert!(waited > 0.8, "{waited}");
    let mut driver = Driver::new(|waits, now| noisy(if waits { 1000 } else { 1500 }, now));
    let (waited, _) = driver.run(20 * SECOND);
    assert!(waited < 0.1, "{waited}");
}

#[test]
fn a_driver_that_begins_to_wait_is_noticed_soon() {
    let small = std::cell::Cell::new(false);
    let mut driver = Driver::new(|waits, _| match (waits, small.get()) {
        (false, _) => 1500,
        (true, false) => 2000,
        (true, true) => 700,
    });
    driver.run(20 * SECOND);
    assert!(driver.trials.wait());
    small.set(true);
    let (waited, rate) = driver.run(SECOND);
    assert!(waited < 0.15 && rate > 1380.0, "{waited}, {rate}");
}

#[test]
fn each_result_stands_longer_than_the_same_before_it() {
    let better = std::cell::Cell::new(false);
    let mut driver = Driver::new(|waits, _| if waits == better.get() { 2000 } else { 1500 });
    driver.run(30 * SECOND);
    better.set(true);
    assert_eq!((driver.trials.last, driver.trials.hold), (Some(false), LONGEST_HOLD));
    let mut steps = 0;
    while driver.trials.last == Some(false) {
        driver.run(STRETCH);
        steps += 1;
        assert!(steps < 1000);
    }
    assert!(driver.trials.wait());
    assert_eq!(driver.trials.hold, HOLD);
}

#[test]
fn a_sender_with_pauses_is_not_tried_in_each_of_its_bursts() {
    // It sends for 60 ms, then nothing for 50.
    let mut driver = Driver::new(|waits, now| match (now.as_millis() % 110 < 60, waits) {
        (false, _) => 0,
        (true, false) => 1500,
        (true, true) => 750,
    });
    let (waited, _) = driver.run(20 * SECOND);
    assert!(waited < 0.12, "{waited}");
}

#[test]
fn a_trial_in_which_none_has_waited_says_nothing() {
    let mut trials = Trials::default();
    let mut waited = 0;
    for time in 0..1000 {
        // They would seem to gain.
        let sent = (0..=time).map(|_| if trials.wait() { 200_000 } else { 100_000 }).sum();
        waited += u64::from(trials.wait());
        trials.look(ms(time), sent);
        if let State::Holding { .. } = trials.state {
            assert!(!trials.wait());
        }
    }
    assert!((10..200).contains(&waited), "{waited}");
}

#[test]
fn without_load_and_after_a_gap_nothing_waits() {
    let mut driver = Driver::new(|waits, _| if waits { 200 } else { 100 });
    assert_eq!(driver.run(SECOND).0, 0.0);
    let mut trials = Trials::won();
    trials.look(ms(1), 0);
    trials.look(ms(11) - Duration::from_nanos(1), LOAD);
    assert!(trials.wait());
    trials.look(ms(11), LOAD);
    assert!(trials.wait(), "a whole stretch");
    trials.look(ms(51), 5 * LOAD);
    assert!(!trials.wait(), "a gap");
    let mut trials = Trials::won();
    trials.look(ms(1), 0);
    trials.look(ms(11), LOAD - 1);
    assert!(!trials.wait(), "no load");
    // Another clock: its first trial is not before long.
    let mut trials = Trials::won();
    trials.look(ms(100_000), 0);
    trials.look(ms(3), 5 * LOAD);
    assert!(!trials.wait());
    trials.look(ms(13), 6 * LOAD);
    assert!(!trials.wait());
    trials.look(ms(23), 7 * LOAD);
    assert!(trials.wait(), "the second step of a trial");
}
