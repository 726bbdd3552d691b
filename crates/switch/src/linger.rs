//! Adaptive polling: how long a thread polls for the next message or frame before it sleeps. The time follows how quickly they
//! arrive, and is zero on a CPU that another thread needs.

use std::time::{Duration, Instant};

/// The shortest time worth polling for: less than it takes to sleep and to be woken.
const LEAST: Duration = Duration::from_micros(10);

/// A yield that takes longer than this means that another thread is using the CPU.
const SHARED: Duration = Duration::from_micros(100);

/// How long not to poll on a shared CPU; twice as long each time that it still is.
const REST: Duration = Duration::from_millis(50);

/// The time to poll for the next one. It doubles after a wait that a longer time would have covered, and is halved after a longer
/// wait, down to nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linger {
    time: Duration,
}

impl Linger {
    /// Polls for this long from the start.
    pub fn new(time: Duration) -> Linger {
        Linger { time }
    }

    /// Returns how long to poll: `most` at most.
    #[inline]
    pub fn time(&self, most: Duration) -> Duration {
        self.time.min(most)
    }

    /// Notes how long the wait was, polling and sleeping together, that polling alone did not cover.
    pub fn waited(&mut self, most: Duration, wait: Duration) {
        let least = LEAST.min(most);
        let time = if wait <= most { (2 * self.time(most)).clamp(least, most) } else { self.time(most) / 2 };
        self.time = if time < least { Duration::ZERO } else { time };
    }
}

/// Whether another thread needs this CPU. A frame that arrives while that thread runs waits until its time slice is over; a sleeping
/// thread would have preempted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// How long the last rest was, if nothing has spoken against polling since.
    time: Duration,
    longest: Duration,
    /// When the rest is over.
    until: Option<Instant>,
}

impl Rest {
    /// Rests for `longest` at most.
    pub fn new(longest: Duration) -> Rest {
        Rest { time: Duration::ZERO, longest, until: None }
    }

    /// Returns whether not to poll at this time.
    #[inline]
    pub fn is_on(&self, now: impl FnOnce() -> Instant) -> bool {
        self.until.is_some_and(|until| now() < until)
    }

    /// The thread has yielded and got its CPU back at `now`, after `took`. Returns whether it is to rest.
    pub fn yielded(&mut self, now: Instant, took: Duration) -> bool {
        if took > SHARED {
            self.time = (2 * self.time).max(REST).min(self.longest);
            self.until = Some(now + self.time);
        }
        took > SHARED
    }

    /// It has polled for its whole time, and nobody else needed the CPU.
    pub fn polled(&mut self) {
        self.time /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);

    #[test]
    fn grows_while_messages_follow_and_shrinks_to_nothing() {
        let mut linger = Linger::default();
        let mut after = |wait| {
            linger.waited(MOST, Duration::from_micros(wait));
            linger.time(MOST).as_micros()
        };
        assert_eq!([5, 15, 25, 45, 85, 100].map(&mut after), [10, 20, 40, 80, 100, 100]);
        assert_eq!([101, 1_000_000, 101, 101, 101].map(&mut after), [50, 25, 12, 0, 0]);
    }

    #[test]
    fn none_at_all_if_it_is_turned_off() {
        let mut linger = Linger::new(MOST);
        assert_eq!(linger.time(Duration::ZERO), Duration::ZERO);
        for _ in 0..3 {
            linger.waited(Duration::ZERO, Duration::ZERO);
            assert_eq!(linger, Linger::default());
        }
    }

    #[test]
    fn rests_on_a_cpu_that_is_shared() {
        let (mut rest, start) = (Rest::new(Duration::from_secs(3)), Instant::now());
        assert!(!rest.is_on(|| start) && !rest.yielded(start, SHARED) && !rest.is_on(|| start));
        for millis in [50, 100, 200, 400, 800, 1600, 3000, 3000] {
            assert!(rest.yielded(start, 2 * SHARED));
            let after = |time| start + Duration::from_millis(time);
            assert!(rest.is_on(|| after(millis - 1)) && !rest.is_on(|| after(millis)));
        }
        (0..5).for_each(|_| rest.polled());
        assert!(rest.yielded(start, 2 * SHARED) && !rest.is_on(|| start + Duration::from_millis(188)));
    }
}
