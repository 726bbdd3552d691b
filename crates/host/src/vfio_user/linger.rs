//! How long the thread of a socket polls for its client's next message before it sleeps.

use std::{
    thread,
    time::{Duration, Instant},
};

/// The shortest time worth polling for: less than it takes to sleep and to be woken.
const LEAST: Duration = Duration::from_micros(10);

/// Time to poll for a message. A driver's interrupt handler makes several accesses in a row and waits for each that reads: with
/// this thread awake they take less time. The time doubles after a wait that a longer one would have covered, and is halved
/// after a longer wait, down to nothing.
#[derive(Debug, Default)]
pub(super) struct Linger {
    time: Duration,
}

impl Linger {
    /// Polls for `most` at most. Returns whether there is something.
    pub(super) fn poll<E>(&mut self, most: Duration, mut ready: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        self.time = self.time.min(most);
        let start = Instant::now();
        while start.elapsed() < self.time {
            if ready()? {
                return Ok(true);
            }
            // A worker may share this CPU. The price: a message that arrives meanwhile waits until that thread's slice is over; a
            // thread that sleeps preempts it at once.
            thread::yield_now();
        }
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

    #[test]
    fn polls_for_as_long_as_it_may() {
        let (mut linger, mut calls) = (Linger { time: MOST }, 0);
        let mut never = || {
            calls += 1;
            Ok::<_, ()>(false)
        };
        let start = Instant::now();
        assert_eq!(linger.poll(MOST, &mut never), Ok(false));
        assert!(start.elapsed() >= MOST);
        // Turned off meanwhile.
        assert_eq!(linger.poll(Duration::ZERO, || Ok::<_, ()>(true)), Ok(false));
        assert_eq!(linger.time, Duration::ZERO);
        assert!(calls > 0);
    }

    #[test]
    fn ends_with_the_message_and_with_an_error() {
        let mut linger = Linger { time: Duration::from_secs(60) };
        let mut left = 3;
        let ready = || {
            left -= 1;
            Ok::<_, ()>(left == 0)
        };
        assert_eq!(linger.poll(Duration::from_secs(60), ready), Ok(true));
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
