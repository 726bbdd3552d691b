//! How fast frames are taken from a port: what is beyond its rate stays with the sender. Used by `forward.rs`.

use std::time::Duration;

/// The most that a port may send. What it offers beyond that waits in its own queues: nothing is dropped. A buffer that holds no valid
/// frame counts as the shortest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bits per second, from the destination address to the end of the payload; 0: no limit.
    pub bits: u64,
    /// Frames per second; 0: no limit. A frame that is still to be segmented counts as one.
    pub frames: u64,
    /// What was not used during this time may be used later.
    pub burst: Duration,
}

impl Rate {
    /// No limit.
    pub const NONE: Rate = Rate { bits: 0, frames: 0, burst: Duration::from_millis(10) };

    /// Returns whether there is no limit.
    #[inline(always)]
    pub fn is_none(&self) -> bool {
        self.bits == 0 && self.frames == 0
    }
}

impl Default for Rate {
    fn default() -> Rate {
        Rate::NONE
    }
}

/// Two token buckets, for bits and for frames: each is the time at which what was taken is paid for. A frame is taken as soon as
/// everything before it is paid for, however long it is, and is paid for by the time until the next one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    paid: [Duration; 2],
}

impl Pace {
    /// Returns when the next burst may be taken, if not `now`.
    pub fn next(&self, now: Duration) -> Option<Duration> {
        let [bits, frames] = self.paid;
        let next = bits.max(frames);
        (next > now).then_some(next)
    }

    /// So many bytes and frames were taken.
    pub fn take(&mut self, rate: &Rate, bytes: u64, frames: usize, now: Duration) {
        let taken = [(bytes.saturating_mul(8), rate.bits), (frames as u64, rate.frames)];
        for (paid, (count, per_second)) in self.paid.iter_mut().zip(taken) {
            let nanos = (u128::from(count) * 1_000_000_000).checked_div(per_second.into()).unwrap_or(0);
            let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            *paid = (*paid).max(now.saturating_sub(rate.burst)).saturating_add(cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { bits: 8_000_000, frames: 10_000, burst: Duration::from_millis(10) };

    /// Takes bursts of `frames` frames of `len` bytes for a second as fast as allowed; returns frames and bytes.
    fn second(frames: usize, len: u64) -> (u64, u64) {
        let (mut pace, mut now, mut taken) = (Pace::default(), Duration::from_secs(5), 0);
        while now < Duration::from_secs(6) {
            if let Some(next) = pace.next(now) {
                now = next;
                continue;
            }
            pace.take(&RATE, frames as u64 * len, frames, now);
            taken += frames as u64;
        }
        (taken, taken * len)
    }

    #[test]
    fn the_smaller_limit_holds_whatever_the_bursts() {
        for burst in [1, 7, 64] {
            let (frames, _) = second(burst, 60);
            assert!((10_000..10_200).contains(&frames), "{frames}");
            let (_, bytes) = second(burst, 1500);
            assert!((1_000_000..1_110_000).contains(&bytes), "{bytes}");
        }
        // A burst that costs more than the bucket holds passes, and is paid for.
        let (frames, bytes) = second(64, 65_000);
        assert_eq!((frames, bytes), (64, 4_160_000));
    }

    #[test]
    fn unused_time_counts_up_to_the_burst() {
        let mut pace = Pace::default();
        let now = Duration::from_secs(100);
        let count = std::iter::from_fn(|| pace.next(now).is_none().then(|| pace.take(&RATE, 0, 1, now)));
        assert_eq!(count.count(), 101, "10 ms at 10 000 a second, and the one that is paid for afterwards");
        assert!(pace.next(now).is_some_and(|next| next <= now + Duration::from_micros(100)));
        // Extreme values do no harm.
        pace.take(&Rate { bits: 1, ..RATE }, u64::MAX, usize::MAX, now);
        pace.take(&Rate { bits: 1, ..RATE }, u64::MAX, usize::MAX, Duration::MAX);
        assert!(pace.next(now).is_some());
        assert!(Rate::default().is_none() && !RATE.is_none());
    }
}
