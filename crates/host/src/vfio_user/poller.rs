//! How long the thread of a socket polls for its client's next message before it sleeps. A driver's interrupt handler makes several
//! accesses in a row and waits for each that reads: with this thread awake they take less time.

use ringroad_switch::{Linger, Rest};
use std::{
    thread,
    time::{Duration, Instant},
};

/// How long not to poll at most because another thread needs the CPU.
const REST: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(super) struct Poller {
    linger: Linger,
    rest: Rest,
}

impl Default for Poller {
    fn default() -> Poller {
        Poller { linger: Linger::default(), rest: Rest::new(REST) }
    }
}

impl Poller {
    /// Polls for `most` at most. Returns whether there is something.
    pub(super) fn poll<E>(&mut self, most: Duration, mut ready: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        let time = self.linger.time(most);
        if time.is_zero() {
            return Ok(false);
        }
        let start = Instant::now();
        if self.rest.is_on(|| start) {
            return Ok(false);
        }
        let mut now = start;
        while now - start < time {
            if ready()? {
                return Ok(true);
            }
            thread::yield_now();
            let before = std::mem::replace(&mut now, Instant::now());
            if self.rest.yielded(now, now - before) {
                return ready();
            }
        }
        self.rest.polled();
        Ok(false)
    }

    /// For a thread that polls something else, too: returns whether to go on after this time, and looks at `last` and `now`.
    pub(super) fn goes_on(&mut self, most: Duration, idle: Duration, [last, now]: [Instant; 2]) -> bool {
        // Between them it may have yielded, or had more to do than this.
        if !self.is_on(most, now) || self.rest.yielded(now, now.saturating_duration_since(last)) {
            return false;
        }
        let goes_on = idle < self.linger.time(most);
        if !goes_on {
            self.rest.polled();
        }
        goes_on
    }

    /// Returns whether polling pays now: messages follow each other, and nobody else needs the CPU.
    pub(super) fn is_on(&self, most: Duration, now: Instant) -> bool {
        !self.linger.time(most).is_zero() && !self.rest.is_on(|| now)
    }

    /// Notes how long the thread has slept after it had polled in vain.
    pub(super) fn slept(&mut self, most: Duration, time: Duration) {
        self.linger.waited(most, self.linger.time(most) + time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);

    fn of(time: Duration) -> Poller {
        Poller { linger: Linger::new(time), ..Poller::default() }
    }

    #[test]
    fn a_sleep_counts_with_the_polling_before_it() {
        let mut poller = Poller::default();
        let mut short = || {
            poller.slept(MOST, Duration::from_micros(5));
            poller.linger.time(MOST).as_micros()
        };
        // It has polled for 100 us in vain: even a short sleep after that makes more than `most`.
        assert_eq!([(); 6].map(|()| short()), [10, 20, 40, 80, 100, 50]);
    }

    #[test]
    fn polls_for_as_long_as_it_may() {
        let (mut poller, mut calls) = (of(MOST), 0);
        let mut never = || {
            calls += 1;
            Ok::<_, ()>(false)
        };
        // Not on a CPU that the tests share.
        assert!((0..1000).any(|_| {
            poller.rest = Rest::new(REST);
            let start = Instant::now();
            assert_eq!(poller.poll(MOST, &mut never), Ok(false));
            start.elapsed() >= MOST && !poller.rest.is_on(Instant::now)
        }));
        assert!(calls > 0);
        // Turned off meanwhile.
        assert_eq!(poller.poll(Duration::ZERO, || Ok::<_, ()>(true)), Ok(false));
    }

    #[test]
    fn rests_on_a_cpu_that_is_shared() {
        let mut poller = of(MOST);
        let mut busy = || {
            thread::sleep(2 * MOST);
            Ok::<_, ()>(false)
        };
        assert_eq!(poller.poll(MOST, &mut busy), Ok(false));
        assert!(poller.rest.is_on(Instant::now));
        // Not even asked, until it is over.
        assert_eq!(poller.poll(MOST, || Err("asked")), Ok(false));
        poller.rest = Rest::new(REST);
        assert_eq!(poller.poll(MOST, || Err("asked")), Err("asked"));
    }

    #[test]
    fn ends_with_the_message_and_with_an_error() {
        let mut poller = of(Duration::from_secs(60));
        assert_eq!(poller.poll(Duration::from_secs(60), || Ok::<_, ()>(true)), Ok(true));
        assert_eq!(poller.poll(Duration::from_secs(60), || Err("closed")), Err("closed"));
    }
}
