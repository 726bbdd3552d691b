//! Leaving a queue alone for some microseconds, so that its driver writes undisturbed and frames come many at once.
//!
//! A worker that is faster than the driver looks at each line of the ring while the driver is still writing to it, and takes
//! frames as they come, one by one: each look costs the driver a line. A driver that is left alone sends more. But one that waits
//! for its frames to come back only waits longer. Which of the two it is can only be measured: so under load, now and then, each
//! of a few pauses is tried in turn, and the shortest of the best ones holds for a while.

use ringroad_frame::BURST;
use std::time::{Duration, Instant};

/// For how long a queue is left alone after a burst that was not full, while it is all that its worker has to look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gather {
    /// Not at all.
    Off,
    /// Always for this long.
    For(Duration),
    /// For as long as brings the most frames, up to 10 µs: found by trying.
    #[default]
    Auto,
}

const fn us(count: u64) -> Duration {
    Duration::from_micros(count)
}

/// What is tried.
const PAUSES: [Duration; 6] = [Duration::ZERO, us(2), us(4), us(6), us(8), us(10)];
/// How long each of them is tried, and how often.
const EPOCH: Duration = us(500);
const TRIALS: usize = 8;
/// How long a pause that was found to be best holds.
const HOLD: Duration = Duration::from_millis(500);
/// When none was better, the next trials are later and later.
const WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A stretch of time.
#[derive(Clone, Copy, Default)]
struct Count {
    frames: u64,
    bursts: u64,
    time: Duration,
}

impl Count {
    /// Frames a nanosecond.
    fn rate(&self) -> f64 {
        self.frames as f64 / self.time.as_nanos().max(1) as f64
    }

    /// A frame a microsecond, and no gaps: else there is nothing to gain.
    fn is_load(&self) -> bool {
        self.time < 4 * EPOCH && self.rate() > 1e-3
    }

    /// The worker is faster than the driver.
    fn is_sparse(&self) -> bool {
        self.frames < self.bursts * (BURST as u64 * 3 / 4)
    }
}

/// What a pause has brought each time that it was tried, frames a nanosecond.
#[derive(Clone, Copy, Default)]
struct Tries {
    rates: [f64; TRIALS],
    len: usize,
}

impl Tries {
    fn add(&mut self, rate: f64) {
        if let Some(place) = self.rates.get_mut(self.len) {
            *place = rate;
            self.len += 1;
        }
    }

    /// The median: now and then the CPU is somebody else's for a while, and this says nothing about the pause.
    fn rate(&self) -> f64 {
        let mut rates = self.rates;
        let rates = rates.get_mut(..self.len).unwrap_or_default();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or_default()
    }
}

#[allow(clippy::large_enum_variant, reason = "one per worker, and nothing is allocated while frames come")]
enum State {
    /// `rate` is what the pause has promised. `doubted`: the last look has found much less.
    Holding { until: Option<Instant>, rate: f64, doubted: bool },
    /// Those up to `most`, up and down and up again. `doubted`: the last one has brought so little that it is tried once more.
    Trying { trial: usize, most: usize, doubted: bool, tries: [Tries; PAUSES.len()] },
}

/// Finds the pause for one queue.
pub(crate) struct Pauses {
    how: Gather,
    /// Index of the pause that is made now.
    which: usize,
    start: Option<Instant>,
    count: Count,
    state: State,
    wait: Duration,
}

impl Pauses {
    pub(crate) fn new(how: Gather) -> Pauses {
        let state = State::Holding { until: None, rate: 0.0, doubted: false };
        Pauses { how, which: 0, start: None, count: Count::default(), state, wait: WAIT }
    }

    /// Says for how long to leave the queue alone after a burst of so many frames.
    #[inline]
    pub(crate) fn after(&mut self, frames: usize, now: impl Fn() -> Instant) -> Duration {
        match self.how {
            Gather::Off => return Duration::ZERO,
            Gather::For(pause) => return if frames < BURST { pause } else { Duration::ZERO },
            Gather::Auto => {}
        }
        self.count.frames += frames as u64;
        self.count.bursts += 1;
        // The clock costs as much as a frame.
        if self.which > 0 || self.count.bursts.is_multiple_of(16) {
            self.look(now());
        }
        if frames < BURST { PAUSES.get(self.which).copied().unwrap_or_default() } else { Duration::ZERO }
    }

    fn look(&mut self, now: Instant) {
        let start = *self.start.get_or_insert(now);
        let time = now.saturating_duration_since(start);
        if time < EPOCH {
            return;
        }
        let count = Count { time, ..self.count };
        (self.start, self.count) = (Some(now), Count::default());
        match &mut self.state {
            _ if !count.is_load() => self.hold(0, None, 0.0),
            State::Holding { until, rate, doubted } => {
                let bad = self.which > 0 && count.rate() < 0.75 * *rate;
                let broken = std::mem::replace(doubted, bad) && bad;
                let over = until.is_none_or(|until| until <= now);
                if broken {
                    self.hold(0, None, 0.0);
                } else if over && (self.which > 0 || count.is_sparse()) {
                    self.state =
                        State::Trying { trial: 0, most: PAUSES.len() - 1, doubted: false, tries: Default::default() };
                    self.which = 0;
                }
            }
            State::Trying { trial, most, doubted, tries } => {
                if let Some(tries) = tries.get_mut(self.which) {
                    tries.add(count.rate());
                }
                let [without, ..] = tries;
                let bad = count.rate() < 0.9 * without.rate();
                if bad && self.which > 0 && !*doubted {
                    *doubted = true;
                    return;
                }
                if bad && *doubted {
                    // Longer ones will not be better.
                    *most = self.which - 1;
                    self.which = *most;
                    *trial |= 1;
                } else if trial.is_multiple_of(2) && self.which < *most {
                    self.which += 1;
                } else if !trial.is_multiple_of(2) && self.which > 0 {
                    self.which -= 1;
                } else {
                    *trial += 1;
                }
                *doubted = false;
                if *trial >= TRIALS || *most == 0 {
                    let (rates, most) = (tries.map(|tries| tries.rate()), *most);
                    self.decide(rates.get(..=most).unwrap_or_default(), now);
                }
            }
        }
    }

    fn decide(&mut self, rates: &[f64], now: Instant) {
        let best = rates.iter().copied().fold(0.0, f64::max);
        // Frames come later for it, and rates vary by themselves, by a hundredth.
        let found = rates.iter().copied().enumerate().find(|&(_, rate)| rate >= 0.99 * best);
        let (which, rate) = found.unwrap_or_default();
        if which > 0 {
            self.wait = WAIT;
            self.hold(which, Some(now + HOLD), rate);
        } else {
            self.hold(0, Some(now + self.wait), 0.0);
            self.wait = (2 * self.wait).min(LONGEST_WAIT);
        }
    }

    fn hold(&mut self, which: usize, until: Option<Instant>, rate: f64) {
        self.which = which;
        self.state = State::Holding { until, rate, doubted: false };
    }
}

#[cfg(test)]
mod tests;
