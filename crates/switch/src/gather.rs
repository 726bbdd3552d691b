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
    /// As long as gives the highest rate, up to 14 µs; found by trying.
    #[default]
    Auto,
}

const fn us(count: u64) -> Duration {
    Duration::from_micros(count)
}

/// Pauses to try.
const PAUSES: [Duration; 8] = [Duration::ZERO, us(2), us(4), us(6), us(8), us(10), us(12), us(14)];
/// How long each pause is tried, and how often.
const EPOCH: Duration = us(500);
const TRIALS: usize = 8;
/// An epoch of this length was interrupted: the host of a VM takes a CPU away now and then, ours or the driver's.
const GAP: Duration = us(2000);
/// After this time without frames, or so many poor epochs one after the other, the load is another one.
const SILENCE: Duration = Duration::from_millis(100);
const POOR: u32 = 4;
/// How long the best pause is used before the next trials. They compare it with the next shorter and the next longer one, which cost
/// hardly anything; all are tried again after so many of these.
const HOLD: Duration = Duration::from_millis(500);
const NEAR: u32 = 16;
/// A pause delays frames: one is used only if no shorter one reaches this part of the highest rate. Medians of trials vary by
/// about as much on a quiet host.
const ENOUGH: f64 = 0.995;
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

    /// Returns whether the queue is under load: more than a frame per microsecond. Else there is nothing to gain.
    fn is_load(&self) -> bool {
        self.rate() > 1e-3
    }

    /// Returns whether this thread had the CPU all the time, so that the rate says something about the pause.
    fn is_whole(&self) -> bool {
        self.time < GAP
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
    /// Uses one pause. `rate`: what it gave in the trials.
    Holding { until: Option<Instant>, rate: f64 },
    /// Tries the pauses from `least` to `most`, in rising and falling order by turns. `doubted`: the last one gave so little that it
    /// is tried once more.
    Trying { trial: usize, least: usize, most: usize, doubted: bool, tries: [Tries; PAUSES.len()] },
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
    /// Trials near the current pause since all were tried.
    near: u32,
    /// Epochs one after the other that said nothing, or that the current pause is wrong.
    poor: u32,
}

impl std::fmt::Debug for Pauses {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Pauses").field("which", &self.which).field("wait", &self.wait).finish_non_exhaustive()
    }
}

impl Pauses {
    /// Creates it for a queue.
    pub fn new(how: Gather) -> Pauses {
        let state = State::Holding { until: None, rate: 0.0 };
        Pauses { how, which: 0, start: None, count: Count::default(), state, wait: WAIT, near: 0, poor: 0 }
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

    /// Returns whether there is a pause, also for a trial: then whoever polls is faster than the other end.
    #[inline]
    pub fn is_on(&self) -> bool {
        match self.how {
            Gather::Off => false,
            Gather::For(pause) => !pause.is_zero(),
            Gather::Auto => self.which > 0,
        }
    }

    fn look(&mut self, now: Instant) {
        let start = *self.start.get_or_insert(now);
        let time = now.saturating_duration_since(start);
        if time < EPOCH {
            return;
        }
        let count = Count { time, ..self.count };
        (self.start, self.count) = (Some(now), Count::default());
        let is_poor = !count.is_load() || !count.is_whole() || count.rate() < 0.75 * self.expected();
        self.poor = if is_poor { self.poor + 1 } else { 0 };
        if count.time >= SILENCE || self.poor >= POOR {
            self.hold(0, None, 0.0);
        }
        match &mut self.state {
            _ if is_poor => {}
            State::Holding { until, .. } => {
                let over = until.is_none_or(|until| until <= now);
                if over && (self.which > 0 || count.is_sparse()) {
                    self.explore();
                }
            }
            State::Trying { trial, least, most, doubted, tries } => {
                if let Some(tries) = tries.get_mut(self.which) {
                    tries.add(count.rate());
                }
                let bad = tries.get(*least).is_some_and(|shortest| count.rate() < 0.95 * shortest.rate());
                if bad && self.which > *least && !*doubted {
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
                } else if !trial.is_multiple_of(2) && self.which > *least {
                    self.which -= 1;
                } else {
                    *trial += 1;
                }
                *doubted = false;
                if *trial >= TRIALS || most == least {
                    let (rates, tried) = (tries.map(|tries| tries.rate()), *least..=*most);
                    self.decide(rates.into_iter().enumerate().filter(|(which, _)| tried.contains(which)), now);
                }
            }
        }
    }

    /// Returns the rate that the current pause should give, if it was tried.
    fn expected(&self) -> f64 {
        match self.state {
            State::Holding { rate, .. } => rate,
            State::Trying { .. } => 0.0,
        }
    }

    /// Starts trials: near the current pause if there is one, now and then all.
    fn explore(&mut self) {
        let all = self.which == 0 || self.near >= NEAR;
        let (least, most) =
            if all { (0, PAUSES.len() - 1) } else { (self.which - 1, (self.which + 1).min(PAUSES.len() - 1)) };
        self.near = if all { 0 } else { self.near + 1 };
        self.which = least;
        self.state = State::Trying { trial: 0, least, most, doubted: false, tries: Default::default() };
    }

    /// Uses the best of these pauses, of which the shortest comes first.
    fn decide(&mut self, mut rates: impl Iterator<Item = (usize, f64)> + Clone, now: Instant) {
        let best = rates.clone().map(|(_, rate)| rate).fold(0.0, f64::max);
        let (which, rate) = rates.find(|&(_, rate)| rate >= ENOUGH * best).unwrap_or_default();
        if which > 0 {
            self.wait = WAIT;
            self.hold(which, Some(now + HOLD), rate);
        } else {
            self.hold(0, Some(now + self.wait), 0.0);
            self.wait = (2 * self.wait).min(LONGEST_WAIT);
        }
    }

    fn hold(&mut self, which: usize, until: Option<Instant>, rate: f64) {
        (self.which, self.poor) = (which, 0);
        self.state = State::Holding { until, rate };
    }
}

#[cfg(test)]
mod tests;
