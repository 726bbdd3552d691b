//! Pauses between polls of a queue, some microseconds long, so that its driver writes undisturbed and frames arrive in larger
//! bursts. Used by `schedule.rs`.
//!
//! A worker that is faster than the driver reads each cache line of the ring while the driver still writes to it, and takes
//! frames one by one: each poll costs the driver a cache miss. Left alone, the driver sends more. But a driver that waits for its
//! frames to be returned only waits longer. Which case applies can only be measured: so under load, now and then, a few pauses
//! are tried in turn, and the shortest of the best ones is used for a while.

use ringroad_frame::BURST;
use std::time::{Duration, Instant};

/// How long not to poll a queue after a burst that was not full, while it is the only one that its worker polls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gather {
    /// Not at all.
    Off,
    /// Always for this long.
    For(Duration),
    /// As long as gives the highest rate, up to 10 µs; found by trying.
    #[default]
    Auto,
}

const fn us(count: u64) -> Duration {
    Duration::from_micros(count)
}

/// Pauses to try.
const PAUSES: [Duration; 6] = [Duration::ZERO, us(2), us(4), us(6), us(8), us(10)];
/// How long each pause is tried, and how often.
const EPOCH: Duration = us(500);
const TRIALS: usize = 8;
/// How long the best pause is used before the next trials.
const HOLD: Duration = Duration::from_millis(500);
/// If no pause was better than none, the time to the next trials doubles from `WAIT` to `LONGEST_WAIT`.
const WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Frames and bursts in a stretch of time.
#[derive(Clone, Copy, Default)]
struct Count {
    frames: u64,
    bursts: u64,
    time: Duration,
}

impl Count {
    /// Returns the rate in frames per nanosecond.
    fn rate(&self) -> f64 {
        self.frames as f64 / self.time.as_nanos().max(1) as f64
    }

    /// Returns whether the queue is under load: more than a frame per microsecond, without gaps. Else there is nothing to gain.
    fn is_load(&self) -> bool {
        self.time < 4 * EPOCH && self.rate() > 1e-3
    }

    /// Returns whether the worker is faster than the driver.
    fn is_sparse(&self) -> bool {
        self.frames < self.bursts * (BURST as u64 * 3 / 4)
    }
}

/// Rates that a pause has given, in frames per nanosecond.
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

    /// Returns the median, to ignore the times when this thread did not have the CPU.
    fn rate(&self) -> f64 {
        let mut rates = self.rates;
        let rates = rates.get_mut(..self.len).unwrap_or_default();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or_default()
    }
}

#[allow(clippy::large_enum_variant, reason = "one per worker, and nothing is allocated on the data path")]
enum State {
    /// Uses one pause. `rate`: what it gave in the trials. `doubted`: the last measurement was far below that.
    Holding { until: Option<Instant>, rate: f64, doubted: bool },
    /// Tries the pauses up to `most`, in rising and falling order by turns. `doubted`: the last one gave so little that it is
    /// tried once more.
    Trying { trial: usize, most: usize, doubted: bool, tries: [Tries; PAUSES.len()] },
}

/// Finds the pause for one queue. Used by workers, and by drivers of test traffic: they poll, too.
pub struct Pauses {
    how: Gather,
    /// Index of the current pause.
    which: usize,
    start: Option<Instant>,
    count: Count,
    state: State,
    wait: Duration,
}

impl std::fmt::Debug for Pauses {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Pauses").field("which", &self.which).field("wait", &self.wait).finish_non_exhaustive()
    }
}

impl Pauses {
    /// Creates it for a queue.
    pub fn new(how: Gather) -> Pauses {
        let state = State::Holding { until: None, rate: 0.0, doubted: false };
        Pauses { how, which: 0, start: None, count: Count::default(), state, wait: WAIT }
    }

    /// Returns how long to leave the queue alone after a burst of `frames` frames.
    #[inline]
    pub fn after(&mut self, frames: usize, now: impl Fn() -> Instant) -> Duration {
        match self.how {
            Gather::Off => return Duration::ZERO,
            Gather::For(pause) => return if frames < BURST { pause } else { Duration::ZERO },
            Gather::Auto => {}
        }
        self.count.frames += frames as u64;
        self.count.bursts += 1;
        // Reading the clock costs as much as a frame.
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
                    // Longer pauses will not be better.
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
        // A pause delays frames, and rates vary by 1 % anyway: take the shortest pause within that.
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
