//! TCP's acknowledgements, for which a driver is not interrupted as long as it goes on sending, if it sends more that way: an interrupt
//! costs it more than they do, in a virtual machine with emulated interrupts as much as a frame of 64 KiB. Used by `rx.rs`.

mod trials;

use ringroad_frame::{Burst, Counters, acknowledges, copy_some};
use ringroad_mem::Span;
use std::{sync::Arc, time::Duration};
use trials::Trials;

/// Bytes that a driver sends between two interrupts, at least, so that acknowledgements wait: half of the longest frame. One that asks
/// and waits for replies sends less.
const BULK: u64 = 32 << 10;

/// Acknowledgements that wait, at most; and at most a quarter of the ring.
const MOST: u64 = 32;

/// Length of the longest acknowledgement in bytes: Ethernet with two tags, IPv6, TCP with timestamps.
const LONGEST: u64 = 14 + 8 + 40 + 32;

/// How long a driver may pause, at least, before it counts as one that waits: a timer for less is of no use.
const LEAST: Duration = Duration::from_micros(20);

/// What a receive queue knows about what its driver sends, and of what has been put there since it was last notified.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// How long acknowledgements may wait. Zero: not at all.
    delay: Duration,
    /// What the driver sends.
    sent: Option<Arc<Counters>>,
    /// Something else has been put there, or too much.
    others: bool,
    /// Acknowledgements that have been put there.
    waiting: u64,
    /// How many may be.
    most: u64,
    /// Bytes sent when the driver was last notified.
    before: u64,
    /// Since when acknowledgements wait.
    since: Option<Duration>,
    /// Bytes sent at the last look, and when they had become more.
    seen: (u64, Duration),
    /// How long the driver takes to send `BULK`, on average, but no more than `delay`.
    pace: Duration,
    trials: Trials,
}

impl Acks {
    /// For a ring with this number of entries.
    pub fn new(size: u32) -> Acks {
        Acks { most: MOST.min(u64::from(size) / 4), ..Acks::default() }
    }

    /// Sets how long acknowledgements may wait, and where to see what the driver sends.
    pub fn set(&mut self, delay: Duration, sent: Arc<Counters>) {
        let bytes = sent.bytes.get();
        if self.sent.replace(sent).is_none() {
            (self.before, self.seen) = (bytes, (bytes, Duration::ZERO));
        }
        self.delay = delay;
    }

    /// Bytes sent so far.
    fn sent(&self) -> u64 {
        self.sent.as_ref().map_or(0, |sent| sent.bytes.get())
    }

    /// Notes frames that are put there. `are`: whether all of them are acknowledgements.
    #[inline(always)]
    pub fn note(&mut self, frames: u64, bytes: u64, are: impl FnOnce() -> bool) {
        if !self.others && frames > 0 {
            self.waiting += frames;
            self.others = !self.trials.wait() || self.waiting > self.most || bytes > frames * LONGEST || !are();
        }
    }

    /// Returns whether all that waits is acknowledgements, for a driver that sends a lot, and more if they wait.
    #[inline(always)]
    pub fn wait(&self) -> bool {
        !self.others && self.trials.wait() && !self.delay.is_zero() && self.sent().wrapping_sub(self.before) >= BULK
    }

    /// The driver is notified.
    #[inline]
    pub fn notified(&mut self) {
        (self.others, self.waiting, self.since, self.before) = (false, 0, None, self.sent());
    }

    /// Nothing waits: the driver has taken it, or looks for itself.
    pub fn taken(&mut self) {
        (self.others, self.waiting, self.since) = (false, 0, None);
    }

    /// Returns until when acknowledgements may wait, if there is time left.
    pub fn until(&mut self, now: Duration) -> Option<Duration> {
        self.look(now);
        if !self.wait() {
            return None;
        }
        let since = *self.since.get_or_insert(now);
        let (_, last) = self.seen;
        // Two of the longest frames.
        let pause = (4 * self.pace).clamp(LEAST.min(self.delay), self.delay);
        let until = since.saturating_add(self.delay).min(last.max(since).saturating_add(pause));
        // Else it is over, or `since` was another clock's.
        let left = (since..until).contains(&now);
        if left {
            self.trials.note();
        }
        left.then_some(until)
    }

    /// Looks at what the driver has sent.
    fn look(&mut self, now: Duration) {
        if self.delay.is_zero() {
            return;
        }
        let (sent, (seen, last)) = (self.sent(), self.seen);
        self.trials.look(now, sent);
        let time = now.saturating_sub(last).min(self.delay).as_nanos() as u64;
        if let Some(pace) = time.saturating_mul(BULK).checked_div(sent.wrapping_sub(seen)) {
            let pace = Duration::from_nanos(pace).min(self.delay);
            (self.pace, self.seen) = ((3 * self.pace + pace) / 4, (sent, now));
        }
    }
}

/// Returns whether these frames of a burst are acknowledgements.
#[cold]
pub(super) fn all(burst: &Burst, which: &[u8]) -> bool {
    which.iter().all(|&index| {
        let mut frame = [0; LONGEST as usize];
        let len = burst.copy(index.into(), 0, &mut frame);
        acknowledges(frame.get(..len).unwrap_or_default())
    })
}

/// Returns whether the frame in these pieces is one, which has `len` bytes with a header of `skip`.
#[cold]
pub(super) fn is_one(pieces: &[Span<'_>], skip: usize, len: usize) -> bool {
    let mut frame = [0; LONGEST as usize];
    let there = copy_some(pieces.iter().copied(), skip, &mut frame);
    acknowledges(frame.get(..there.min(len.saturating_sub(skip))).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_micros(300);

    struct Rig {
        acks: Acks,
        sent: Arc<Counters>,
    }

    impl Rig {
        fn new() -> Rig {
            let (mut acks, sent) = (Acks::new(256), Arc::new(Counters::default()));
            sent.bytes.add(1 << 40);
            acks.set(DELAY, sent.clone());
            acks.trials = Trials::won();
            Rig { acks, sent }
        }

        /// The driver sends a frame of 64 KiB each 100 us for a while, and is notified at the end.
        fn bulk() -> Rig {
            let mut rig = Rig::new();
            for time in (0..=2000).step_by(100) {
                rig.sends(64 << 10);
                rig.until(time);
            }
            rig.acks.notified();
            rig
        }

        fn sends(&self, bytes: u64) {
            self.sent.bytes.add(bytes);
        }

        fn put(&mut self, frames: u64, len: u64, are: bool) -> bool {
            self.acks.note(frames, frames * len, || are);
            self.acks.wait()
        }

        fn until(&mut self, micros: u64) -> Option<u128> {
            self.acks.until(Duration::from_micros(micros)).map(|until| until.as_micros())
        }
    }

    #[test]
    fn wait_if_the_driver_sends_a_lot() {
        let mut rig = Rig::new();
        assert!(!rig.put(1, 66, true), "it has sent nothing");
        rig.sends(BULK - 1);
        assert!(!rig.put(1, 66, true));
        rig.sends(1);
        assert!(rig.put(1, 66, true) && rig.put(MOST - 3, 66, true) && rig.put(0, 0, false));
        assert!(!rig.put(1, 66, true), "too many");
        // Until it is notified, and again.
        rig.acks.notified();
        assert!(!rig.put(1, 66, true));
        rig.sends(BULK);
        assert!(rig.put(1, 66, true));
        // Until the end of moderation.
        rig.acks.set(Duration::ZERO, rig.sent.clone());
        assert!(!rig.put(1, 66, true));
        // Not in a short ring.
        let mut rig = Rig::new();
        rig.acks.most = Acks::new(16).most;
        rig.sends(BULK);
        assert!(rig.put(4, 66, true) && !rig.put(1, 66, true));
        // Not if the driver sends as much without.
        let mut rig = Rig::new();
        rig.acks.trials = Trials::default();
        rig.sends(BULK);
        assert!(!rig.put(1, 66, true));
    }

    #[test]
    fn other_frames_do_not_wait_nor_what_is_behind_them() {
        for (frames, len, are) in [(1, 66, false), (MOST, 66, true), (1, LONGEST + 1, true)] {
            let mut rig = Rig::new();
            rig.sends(BULK);
            assert!(rig.put(1, 66, true) && !rig.put(frames, len, are) && !rig.put(1, 66, true));
            // Nothing waits any more.
            rig.acks.taken();
            assert!(rig.put(1, 66, true));
        }
    }

    #[test]
    fn no_longer_than_the_delay_nor_than_the_driver_goes_on() {
        let mut rig = Rig::bulk();
        assert_eq!(rig.until(2050), None, "nothing sent since");
        rig.sends(64 << 10);
        // It may pause for as long as two frames take.
        assert!(rig.put(1, 66, true));
        let first = rig.until(2100).unwrap();
        assert!((2290..=2310).contains(&first), "{first}");
        // The driver goes on.
        rig.sends(64 << 10);
        assert_eq!(rig.until(2250), Some(2400), "the delay");
        assert_eq!((rig.until(2399), rig.until(2400)), (Some(2400), None));
        // It does not.
        let mut rig = Rig::bulk();
        rig.sends(64 << 10);
        assert!(rig.put(1, 66, true));
        // In whole microseconds.
        let first = rig.until(2100).unwrap() as u64;
        assert_eq!((rig.until(first - 1).is_some(), rig.until(first + 1)), (true, None));
        // Another clock.
        let mut rig = Rig::bulk();
        rig.sends(64 << 10);
        assert!(rig.until(2100).is_some() && rig.until(7).is_none());
    }

    #[test]
    fn a_quick_sender_may_pause_for_a_short_time_only() {
        let mut rig = Rig::new();
        for time in 0..2000 {
            rig.sends(64 << 10);
            rig.until(time);
        }
        rig.acks.notified();
        rig.sends(64 << 10);
        assert_eq!(rig.until(2000), Some(2000 + LEAST.as_micros()));
    }
}
