//! How long the thread of a socket polls for its client's next message before it sleeps.

use std::{
    thread,
    time::{Duration, Instant},
};

/// The shortest time worth polling for: less than it takes to sleep and to be woken.
const LEAST: Duration = Duration::from_micros(10);

/// Who yields and gets the CPU back only after such a time shares it with a thread that is busy.
const SHARED: Duration = Duration::from_micros(100);

/// How long not to poll on a shared CPU; twice as long each time that it still is.
const REST: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(3));

/// Time to poll for a message. A driver's interrupt handler makes several accesses in a row and waits for each that reads: with
/// this thread awake they take less time. The time doubles after a wait that a longer one would have covered, and is halved
/// after a longer wait, down to nothing.
#[derive(Debug, Default)]
pub(super) struct Linger {
    time: Duration,
    rest: Duration,
    /// When the rest is over.
    until: Option<Instant>,
}

impl Linger {
    /// Polls for `most` at most. Returns whether there is something.
    pub(super) fn poll<E>(&mut self, most: Duration, mut ready: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        self.time = self.time.min(most);
        if self.time.is_zero() {
            return Ok(false);
        }
        let start = Instant::now();
        if self.until.is_some_and(|until| start < until) {
            return Ok(false);
        }
        let mut now = start;
        while now - start < self.time {
            if ready()? {
                return Ok(true);
            }
            thread::yield_now();
            let before = std::mem::replace(&mut now, Instant::now());
            // A message that comes while another thread has the CPU waits until that one's slice is over; it would have
            // preempted it for a thread that sleeps.
            if now - before > SHARED {
                self.rest = (2 * self.rest).clamp(REST.0, REST.1);
                self.until = Some(now + self.rest);
                return ready();
            }
        }
        self.rest /= 2;
        Ok(false)
    }

    /// Notes how long the thread has slept after it had polled in vain.
    pub(super) fn slept(&mut self, most: Duration, time: Duration) {
        self.time = if self.time + time <= most { (2 * self.time).clamp(LEAST.min(most), most) } else { self.time / 2 };
        if self.time < LEAST.min(most) {
            self.time = Duration::ZERO;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(100);

    fn micros(linger: &Linger) -> u128 {
        linger.time.as_micros()
    }

    #[test]
    fn grows_while_messages_follow_and_shrinks_to_nothing() {
        let mut linger = Linger::default();
        let short = |linger: &mut Linger| {
            linger.slept(MOST, Duration::from_micros(5));
            micros(linger)
        };
        assert_eq!([(); 5].map(|()| short(&mut linger)), [10, 20, 40, 80, 100]);
        // It has polled for 100 us in vain: even a short sleep after that makes more than `most`.
        assert_eq!(short(&mut linger), 50);
        let long = |linger: &mut Linger| {
            linger.slept(MOST, Duration::from_secs(1));
            micros(linger)
        };
        assert_eq!([(); 4].map(|()| long(&mut linger)), [25, 12, 0, 0]);
    }

    fn of(time: Duration) -> Linger {
        Linger { time, ..Linger::default() }
    }

    #[test]
    fn polls_for_as_long_as_it_may() {
        let (mut linger, mut calls) = (of(MOST), 0);
        let mut never = || {
            calls += 1;
            Ok::<_, ()>(false)
        };
        // Not on a CPU that the tests share.
        assert!((0..1000).any(|_| {
            (linger.until, linger.rest) = (None, Duration::ZERO);
            let start = Instant::now();
            assert_eq!(linger.poll(MOST, &mut never), Ok(false));
            start.elapsed() >= MOST && linger.until.is_none()
        }));
        assert!(calls > 0);
        // Turned off meanwhile.
        assert_eq!(linger.poll(Duration::ZERO, || Ok::<_, ()>(true)), Ok(false));
        assert_eq!(linger.time, Duration::ZERO);
    }

    #[test]
    fn rests_on_a_cpu_that_is_shared() {
        let mut linger = of(MOST);
        let mut busy = || {
            thread::sleep(2 * SHARED);
            Ok::<_, ()>(false)
        };
        let mut rests = Vec::new();
        for _ in 0..8 {
            linger.until = None;
            assert_eq!(linger.poll(MOST, &mut busy), Ok(false));
            rests.push(linger.rest.as_millis());
            assert!(linger.until.is_some_and(|until| until > Instant::now()));
        }
        assert_eq!(rests, [50, 100, 200, 400, 800, 1600, 3000, 3000]);
        // Not even asked, until it is over.
        assert_eq!(linger.poll(MOST, || Err("asked")), Ok(false));
        linger.until = Some(Instant::now());
        assert_eq!(linger.poll(MOST, || Err("asked")), Err("asked"));
    }

    #[test]
    fn ends_with_the_message_and_with_an_error() {
        let mut linger = of(Duration::from_secs(60));
        assert_eq!(linger.poll(Duration::from_secs(60), || Ok::<_, ()>(true)), Ok(true));
        assert_eq!(linger.poll(Duration::from_secs(60), || Err("closed")), Err("closed"));
    }

    #[test]
    fn none_at_all_if_it_is_turned_off() {
        let mut linger = Linger::default();
        for _ in 0..3 {
            linger.slept(Duration::ZERO, Duration::ZERO);
            assert_eq!(linger.time, Duration::ZERO);
        }
    }
}
