//! What a driver of test traffic counts.

use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// Returns a rate in Gb/s.
pub fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / time.as_secs_f64() / 1e9
}

/// Counters of one run.
#[derive(Clone, Debug)]
pub struct Totals {
    /// Frames sent and taken by the device.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames received.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames with damaged contents (with [`Touch::All`](crate::Touch::All)), and duplicates.
    pub errors: u64,
    /// Frames that arrived twice.
    pub duplicates: u64,
    /// Frames that are not probes, such as a guest's neighbour discovery.
    pub foreign: u64,
    /// How often the device returned after it had disconnected.
    pub reconnects: u64,
    /// Time from each disconnect to the next frame received, in nanoseconds.
    pub recovery: Histogram<u64>,
    /// What the device has not returned at the end; only known with [`Settings::reconnect`](crate::Settings::reconnect).
    pub left: Option<Left>,
    /// Round-trip times of frames that returned, in nanoseconds.
    pub round_trip: Histogram<u64>,
    /// Rounds of the driver: each looks at both queues once.
    pub rounds: u64,
    /// Rounds that found neither a frame to receive nor room to send.
    pub empty_rounds: u64,
    /// Duration of the run.
    pub time: Duration,
}

/// What a device has not returned at the end: nothing, if none of its processes has lost anything.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Frames sent that it has not returned within a second.
    pub under_way: usize,
    /// Buffers of both queues that it had taken when it stopped and never returned; `None`: it does not report its position.
    pub missing: Option<u32>,
}

impl Default for Totals {
    #[expect(clippy::expect_used, reason = "the bounds are constants that the histogram accepts")]
    fn default() -> Totals {
        // Three significant digits, up to a minute.
        let times = || Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid bounds");
        Totals {
            sent: 0,
            sent_bytes: 0,
            received: 0,
            received_bytes: 0,
            errors: 0,
            duplicates: 0,
            foreign: 0,
            reconnects: 0,
            recovery: times(),
            left: None,
            round_trip: times(),
            rounds: 0,
            empty_rounds: 0,
            time: Duration::ZERO,
        }
    }
}

impl Totals {
    /// Returns the frames received per second, in millions.
    pub fn received_mpps(&self) -> f64 {
        self.received as f64 / self.time.as_secs_f64() / 1e6
    }

    /// Returns the frames sent per second, in millions.
    pub fn sent_mpps(&self) -> f64 {
        self.sent as f64 / self.time.as_secs_f64() / 1e6
    }

    /// Returns the rounds in which the driver waited for the device, in percent of all rounds. This is not a share of time: an
    /// empty round is shorter than others.
    pub fn idle(&self) -> f64 {
        self.empty_rounds as f64 * 100.0 / self.rounds.max(1) as f64
    }

    /// Returns how many frames have been sent and not received.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }

    /// Records the round trip of a frame sent `sent_ns` after `start`.
    pub(crate) fn record_round_trip(&mut self, start: Instant, sent_ns: u64) {
        let _ = self.round_trip.record((start.elapsed().as_nanos() as u64).saturating_sub(sent_ns));
    }

    /// Adds the frames, bytes, errors and rounds of another connection in the same run.
    pub(crate) fn add(&mut self, other: &Totals) {
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.errors += other.errors;
        self.rounds += other.rounds;
        self.empty_rounds += other.empty_rounds;
    }
}
