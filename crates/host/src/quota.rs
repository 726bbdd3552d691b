//! How often something may happen that a guest or a frontend can provoke: log lines, connects, requests. A token bucket for
//! each guest and each kind of event, so that none uses up what others need.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// A token bucket: `burst` events at once, `rate` a second in the long run.
#[derive(Debug)]
pub struct Quota {
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    rate: u32,
    burst: u32,
    /// Events that may happen now.
    tokens: u32,
    /// Up to when tokens were added.
    filled: Instant,
    /// Events refused since the last one that was granted.
    refused: u64,
}

impl Quota {
    /// `burst` events at once, then `rate` a second. A rate of 0: no more after the burst.
    pub fn new(burst: u32, rate: u32) -> Quota {
        let bucket = Bucket { rate, burst, tokens: burst, filled: Instant::now(), refused: 0 };
        Quota { bucket: Mutex::new(bucket) }
    }

    /// From now on `burst` events at once and `rate` a second.
    pub fn set(&self, burst: u32, rate: u32) {
        let bucket = &mut *self.bucket.lock();
        (bucket.rate, bucket.burst, bucket.tokens) = (rate, burst, bucket.tokens.min(burst));
    }

    /// Takes a token. `Some`: the event may happen; the number says how many were refused since the last one that could.
    /// `None`: it may not.
    pub fn take(&self) -> Option<u64> {
        self.take_at(Instant::now())
    }

    /// When there will be a token; `None`: there is one, or there will never be.
    pub fn until(&self) -> Option<Instant> {
        let bucket = self.bucket.lock();
        (bucket.tokens == 0 && bucket.rate > 0).then(|| bucket.filled + bucket.interval())
    }

    fn take_at(&self, now: Instant) -> Option<u64> {
        let mut bucket = self.bucket.lock();
        if bucket.rate > 0 {
            let interval = bucket.interval();
            let due = now.saturating_duration_since(bucket.filled).as_nanos() / interval.as_nanos().max(1);
            let due = u32::try_from(due).unwrap_or(u32::MAX);
            let room = bucket.burst.saturating_sub(bucket.tokens);
            if due >= room {
                (bucket.tokens, bucket.filled) = (bucket.burst, now);
            } else {
                bucket.tokens += due;
                bucket.filled += interval * due;
            }
        }
        match bucket.tokens.checked_sub(1) {
            Some(left) => {
                bucket.tokens = left;
                Some(std::mem::take(&mut bucket.refused))
            }
            None => {
                bucket.refused = bucket.refused.saturating_add(1);
                None
            }
        }
    }
}

impl Bucket {
    fn interval(&self) -> Duration {
        Duration::from_secs(1) / self.rate.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_so_many_a_second() {
        let quota = Quota::new(3, 10);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!([0, 0, 0, 0, 50].map(|ms| quota.take_at(at(ms))), [Some(0), Some(0), Some(0), None, None]);
        assert_eq!(quota.until(), Some(quota.bucket.lock().filled + Duration::from_millis(100)));
        assert_eq!([150, 150].map(|ms| quota.take_at(at(ms))), [Some(2), None]);
        let granted = (0..100_000).filter(|&ms| quota.take_at(at(200 + ms)).is_some()).count();
        assert!((1000..=1003).contains(&granted), "{granted} in 100 s");
        assert_eq!(
            [999_999, 999_999, 999_999, 999_999].map(|ms| quota.take_at(at(ms)).is_some()),
            [true, true, true, false]
        );
    }

    #[test]
    fn without_a_rate_there_is_the_burst_alone() {
        let quota = Quota::new(1, 0);
        assert_eq!(quota.take(), Some(0));
        assert_eq!(quota.take_at(Instant::now() + Duration::from_secs(3600)), None);
        assert_eq!(quota.until(), None);
    }
}
