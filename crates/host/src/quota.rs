//! Rate limits for events that a guest or a frontend can trigger: log lines, connects, requests. One token bucket per guest
//! and kind of event, so that none exhausts what the others need.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// A token bucket: a burst of `burst` events, then `rate` events a second.
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
    /// Time up to which tokens were added.
    filled: Instant,
    /// Events refused since the last one that was granted.
    refused: u64,
}

impl Quota {
    /// Creates a bucket of `burst` tokens that refills at `rate` a second. With a rate of 0 it never refills.
    pub fn new(burst: u32, rate: u32) -> Quota {
        let bucket = Bucket { rate, burst, tokens: burst, filled: Instant::now(), refused: 0 };
        Quota { bucket: Mutex::new(bucket) }
    }

    /// Changes the limits; tokens beyond the new burst are lost.
    pub fn set(&self, burst: u32, rate: u32) {
        let bucket = &mut *self.bucket.lock();
        (bucket.rate, bucket.burst, bucket.tokens) = (rate, burst, bucket.tokens.min(burst));
    }

    /// Takes a token. Returns the number of events refused since the last one granted, or `None` if this event is refused.
    pub fn take(&self) -> Option<u64> {
        self.take_at(Instant::now())
    }

    /// Returns when the next token is due; `None` if there is one now or there will never be one.
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
    fn a_burst_then_the_rate() {
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
    fn a_rate_of_zero_grants_only_the_burst() {
        let quota = Quota::new(1, 0);
        assert_eq!(quota.take(), Some(0));
        assert_eq!(quota.take_at(Instant::now() + Duration::from_secs(3600)), None);
        assert_eq!(quota.until(), None);
    }
}
