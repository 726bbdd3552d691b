//! Statistics of figures, and the cache-line round trip that rates depend on.

use ringroad_traffic::options::pin;
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Instant,
};

/// Median, minimum and maximum of some figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The minimum.
    pub min: f64,
    /// The median.
    pub median: f64,
    /// The maximum.
    pub max: f64,
}

impl Spread {
    /// Computes the spread of at least one figure; of none, it is zero.
    pub fn of(figures: &[f64]) -> Spread {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
        let n = sorted.len();
        let median = if n.is_multiple_of(2) && n > 0 { (at(n / 2 - 1) + at(n / 2)) / 2.0 } else { at(n / 2) };
        Spread { min: at(0), median, max: at(n.saturating_sub(1)) }
    }

    /// Computes the spread of the quotients `above[n] / below[n]`.
    pub fn of_ratios(above: &[f64], below: &[f64]) -> Spread {
        Spread::of(&above.iter().zip(below).map(|(above, below)| above / below).collect::<Vec<_>>())
    }

    /// Returns the median and the range, for two columns of a table.
    pub fn columns(&self, digits: usize) -> [String; 2] {
        [format!("{:.digits$}", self.median), format!("{:.digits$}–{:.digits$}", self.min, self.max)]
    }

    /// Adds median, minimum and maximum to a JSON row.
    pub fn add_to(&self, row: &mut Value, keys: [&str; 3]) {
        let [median, min, max] = keys;
        extend(row, json!({ median: self.median, min: self.min, max: self.max }));
    }
}

/// Adds fields to a JSON row.
pub fn extend(row: &mut Value, fields: Value) {
    if let (Value::Object(row), Value::Object(fields)) = (row, fields) {
        row.extend(fields);
    }
}

/// Keys of a ratio in a JSON row.
pub const RATIO: [&str; 3] = ["ratio", "min", "max"];
/// Keys of the cache-line round trip in a JSON row.
pub const LINE: [&str; 3] = ["line_ns", "line_ns_min", "line_ns_max"];
/// Explains the column of the cache-line round trip.
pub const LINE_NOTE: &str = "line: round trip of a cache line between the two CPUs; rates depend on it";

/// Measures the round trip of a cache line between two CPUs, in nanoseconds. Rates depend on it, and on virtual CPUs it can
/// change from minute to minute.
pub fn line_round_trip(cpus: [usize; 2]) -> Result<f64, String> {
    // The first part is a warm-up. The median of the others counts, so that an interruption does not matter.
    const PARTS: u64 = 6;
    const TURNS: u64 = 1000;
    #[repr(align(128))]
    struct Line(AtomicU64);
    let (to, fro) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let pin = |cpu: usize| pin("cannot run on CPU", cpu);
    let wait = |line: &Line, turn: u64| while line.0.load(Ordering::Acquire) < turn {};
    let [near, far] = cpus;
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let pinned = pin(far);
            for turn in 1..=PARTS * TURNS {
                wait(&to, turn);
                fro.0.store(turn, Ordering::Release);
            }
            pinned
        });
        let this = scope.spawn(|| {
            let pinned = pin(near);
            let part = |part: u64| {
                let start = Instant::now();
                for turn in part * TURNS + 1..=(part + 1) * TURNS {
                    to.0.store(turn, Ordering::Release);
                    wait(&fro, turn);
                }
                start.elapsed().as_nanos() as f64 / TURNS as f64
            };
            let parts: Vec<f64> = (0..PARTS).map(part).skip(1).collect();
            pinned.map(|()| Spread::of(&parts).median)
        });
        let panicked = |_| "a measuring thread panicked".to_owned();
        other.join().map_err(panicked)??;
        this.join().map_err(panicked)?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { min: 1.0, median: 2.0, max: 3.0 });
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Spread::of_ratios(&[4.0, 9.0], &[2.0, 3.0]), Spread { min: 2.0, median: 2.5, max: 3.0 });
        let mut row = json!({ "ratio": 1 });
        Spread::of(&[2.0]).add_to(&mut row, RATIO);
        assert_eq!(row, json!({ "ratio": 2.0, "min": 2.0, "max": 2.0 }));
    }
}
