//! Whether a driver sends more if its acknowledgements wait: it is tried, with and without in turn, and the better one is kept for a
//! while. Nothing else tells: a driver that would send on and one whose window is used up pause alike. Used by `acks.rs`.

use std::time::Duration;

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// How long one of both is tried at a time.
const STRETCH: Duration = ms(10);

/// Bytes that are sent in such a time, at least, if there is load. Without load there is nothing to gain.
const LOAD: u64 = 256 << 10;

/// Whether acknowledgements wait, stretch by stretch. In this order a rate that rises or falls does so for both.
const ORDER: [bool; 8] = [false, true, true, false, false, true, true, false];

/// How many times as much the driver must send if they wait.
const GAIN: f64 = 1.03;

/// If it sends so little, in proportion, in the first half of a trial, there is no second half.
const LOSS: f64 = 0.6;

/// So many stretches in a row with a quarter less than the trial gave, and there is another one. Rates vary by that much: an emulated
/// guest shares its CPU with what emulates its devices.
const DOUBTS: u32 = 4;

/// How long the result of a trial stands: the first time, and at most. It doubles each time that the result is the same.
const HOLD: Duration = ms(250);
const LONGEST_HOLD: Duration = ms(8000);

/// Rates in bytes per nanosecond.
#[derive(Clone, Copy, Debug)]
enum State {
    /// `rate`: what the trial gave. `doubts`: so many stretches in a row were far below that.
    Holding { until: Option<Duration>, rate: f64, doubts: u32 },
    /// `step`: index into `ORDER`.
    Trying { step: usize, rates: [f64; ORDER.len()] },
}

const NEW: State = State::Holding { until: None, rate: 0.0, doubts: 0 };

/// The trials of one queue.
#[derive(Debug)]
pub(super) struct Trials {
    waits: bool,
    /// When the current stretch began, and what had been sent by then.
    start: Option<(Duration, u64)>,
    state: State,
    hold: Duration,
    /// The last result.
    last: Option<bool>,
    /// Some acknowledgement has waited since the trial began: else it has tried nothing.
    has_waited: bool,
}

impl Default for Trials {
    fn default() -> Trials {
        Trials { waits: false, start: None, state: NEW, hold: HOLD, last: None, has_waited: false }
    }
}

impl Trials {
    /// It has been found that the driver sends more if they wait.
    #[cfg(test)]
    pub fn won() -> Trials {
        let state = State::Holding { until: Some(Duration::MAX), rate: 0.0, doubts: 0 };
        Trials { waits: true, state, ..Trials::default() }
    }

    /// Returns whether acknowledgements wait at present.
    #[inline(always)]
    pub fn wait(&self) -> bool {
        self.waits
    }

    /// Notes that some do.
    pub fn note(&mut self) {
        self.has_waited = true;
    }

    /// Looks at the bytes that were sent until `now`.
    #[inline]
    pub fn look(&mut self, now: Duration, sent: u64) {
        let (start, before) = *self.start.get_or_insert((now, sent));
        // Else it is still the same stretch.
        if !(start..start + STRETCH).contains(&now) {
            self.start = Some((now, sent));
            self.stretch(now, now.saturating_sub(start), sent.wrapping_sub(before));
        }
    }

    /// A stretch is over, which was this long.
    #[inline(never)]
    fn stretch(&mut self, now: Duration, time: Duration, bytes: u64) {
        if time < STRETCH {
            // Another clock, in which no time of this one means anything.
            *self = Trials { start: self.start, ..Trials::default() };
            return;
        }
        let rate = bytes as f64 / time.as_nanos() as f64;
        let (loaded, gap) = (bytes >= LOAD, time >= 4 * STRETCH);
        match self.state {
            // Little may be what waiting leaves.
            State::Trying { step, rates } if !gap && (loaded || self.waits) => self.tried(step, rates, rate, now),
            State::Trying { .. } => self.rest(now),
            State::Holding { .. } if self.waits && (gap || !loaded) => self.rest(now),
            State::Holding { until, rate: expected, doubts } if loaded && !gap => {
                let doubts = if self.waits && rate < 0.75 * expected { doubts + 1 } else { 0 };
                self.state = State::Holding { until, rate: expected, doubts };
                if doubts >= DOUBTS || until.is_none_or(|until| until <= now) {
                    self.has_waited = false;
                    self.begin(0, [0.0; ORDER.len()]);
                }
            }
            State::Holding { .. } => {}
        }
    }

    /// A step of a trial has given this rate.
    fn tried(&mut self, step: usize, mut rates: [f64; ORDER.len()], rate: f64, now: Duration) {
        if let Some(place) = rates.get_mut(step) {
            *place = rate;
        }
        let [without, with] = [false, true].map(|waits| typical(waits, rates.get(..=step).unwrap_or_default()));
        let half = step + 1 == ORDER.len() / 2;
        if step + 1 == ORDER.len() || half && (with < LOSS * without || !self.has_waited) {
            self.decide(with > GAIN * without && self.has_waited, with, now);
        } else {
            self.begin(step + 1, rates);
        }
    }

    fn begin(&mut self, step: usize, rates: [f64; ORDER.len()]) {
        self.waits = ORDER.get(step).copied().unwrap_or_default();
        self.state = State::Trying { step, rates };
    }

    fn decide(&mut self, waits: bool, rate: f64, now: Duration) {
        self.hold = if self.last.replace(waits) == Some(waits) { (2 * self.hold).min(LONGEST_HOLD) } else { HOLD };
        self.waits = waits;
        self.state = State::Holding { until: Some(now + self.hold), rate, doubts: 0 };
    }

    /// The load is over, or acknowledgements that wait have ended it: they do not, for a while.
    fn rest(&mut self, now: Duration) {
        self.waits = false;
        self.state = State::Holding { until: Some(now + HOLD), rate: 0.0, doubts: 0 };
    }
}

/// Returns the typical rate of the stretches with or without waiting: the mean without the highest and the lowest, if there are
/// enough, to ignore the times when a thread did not have its CPU.
fn typical(waits: bool, rates: &[f64]) -> f64 {
    let mut list = [0.0; ORDER.len()];
    let mut count = 0;
    for (place, (_, &rate)) in list.iter_mut().zip(ORDER.iter().zip(rates).filter(|&(&order, _)| order == waits)) {
        *place = rate;
        count += 1;
    }
    let list = list.get_mut(..count).unwrap_or_default();
    list.sort_by(f64::total_cmp);
    let middle = if count > 2 { list.get(1..count - 1) } else { list.get(..) }.unwrap_or_default();
    middle.iter().sum::<f64>() / middle.len().max(1) as f64
}

#[cfg(test)]
mod tests;
