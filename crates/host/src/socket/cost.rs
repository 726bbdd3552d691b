//! What writes to the descriptors of a connection cost in CPU time, of which a peer may cause only so much.
//!
//! A write to an eventfd or a socket wakes every waiter, under the wait queue's lock. A frontend can add its descriptor to any
//! number of epoll instances, at 0.14 µs of each write: 600 descriptors suffice for 40 000 waiters. Writes are timed by the wall
//! clock, which is cheap. A slow one may only have been preempted, so the writes after it are timed by the thread's CPU clock.
//! That is no proof either: in a virtual machine, it goes on while the host runs something else. So nobody is disconnected for it.

use crate::sys;
use parking_lot::Mutex;
use std::{
    io,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, Instant},
};

/// Longest time of an ordinary write: a hundred times the usual.
const SLOW: Duration = Duration::from_micros(100);

/// How much more than [`SLOW`] all writes of a connection together may cost those who write them; then they are dear, until
/// nothing is owed.
const CREDIT: Duration = Duration::from_millis(10);
/// How much may be owed for dear ones …
const LIMIT: Duration = Duration::from_millis(100);
/// … and what they may cost in the long run: one part in so many of the time.
const SHARE: u32 = 20;
/// What one slow write counts at most unless the one before it was as slow.
const ONE: Duration = Duration::from_millis(10);

/// How many writes are timed by the CPU clock after a slow one: all vrings of a device have their turn.
const SUSPECT: u32 = 256;

/// What the writes to all descriptors of a socket's peer have cost. It is for the socket, not for the connection: a peer that
/// reconnects owes what it has owed.
#[derive(Default)]
pub(super) struct Cost {
    /// Writes that are still timed by the CPU clock.
    suspect: AtomicU32,
    dear: AtomicBool,
    account: Mutex<Account>,
}

#[derive(Default)]
struct Account {
    /// What slow writes count, less what has been earned up to `at`.
    debt: Duration,
    at: Option<Instant>,
    /// What the last slow write took.
    last: Duration,
    /// CPU time of slow writes since nothing was owed.
    spent: Duration,
}

impl Account {
    fn owe(&mut self, excess: Duration, now: Instant) {
        self.earn(now);
        self.debt += excess.min(self.last.max(ONE));
        self.last = excess;
        self.spent += excess;
    }

    fn earn(&mut self, now: Instant) {
        let earned = self.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at) / SHARE);
        self.debt = self.debt.saturating_sub(earned);
        if self.debt.is_zero() {
            self.spent = Duration::ZERO;
        }
    }
}

impl Cost {
    /// Returns whether writes have cost too much lately.
    #[inline]
    pub(super) fn is_dear(&self) -> bool {
        self.dear.load(Ordering::Relaxed)
    }

    /// Returns until when nothing shall be written, if it is too much even for the thread that writes what is dear. Notices that
    /// nothing is owed any more.
    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        if !self.is_dear() {
            return None;
        }
        let mut account = self.account.lock();
        account.earn(now);
        if account.debt.is_zero() {
            self.dear.store(false, Ordering::Relaxed);
        }
        account.debt.checked_sub(LIMIT).filter(|excess| !excess.is_zero()).map(|excess| now + excess * SHARE)
    }

    /// CPU time of slow writes since nothing was owed.
    pub(super) fn spent(&self) -> Duration {
        self.account.lock().spent
    }

    /// Runs a write and accounts for it.
    #[inline]
    pub(super) fn time(&self, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let suspect = self.suspect.load(Ordering::Relaxed) > 0;
        let cpu = suspect.then(sys::thread_time);
        let start = Instant::now();
        let result = write();
        let took = start.elapsed();
        if suspect || took > SLOW {
            let spent = cpu.map(|start| sys::thread_time().saturating_sub(start));
            self.charge(took, spent);
        }
        result
    }

    /// Accounts for a write that took this long, and this much CPU time if that is known.
    #[cold]
    fn charge(&self, took: Duration, spent: Option<Duration>) {
        if took > SLOW {
            self.suspect.store(SUSPECT, Ordering::Relaxed);
        } else {
            let _ = self.suspect.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        }
        let Some(excess) = spent.and_then(|spent| spent.checked_sub(SLOW)) else { return };
        let mut account = self.account.lock();
        account.owe(excess, Instant::now());
        if account.debt > CREDIT {
            self.dear.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(cost: &Cost, write: impl FnOnce()) {
        let result = cost.time(|| {
            write();
            Ok(())
        });
        assert!(result.is_ok());
    }

    /// Uses the CPU.
    fn work(time: Duration) {
        let start = sys::thread_time();
        while sys::thread_time().saturating_sub(start) < time {}
    }

    #[test]
    fn a_writer_that_is_kept_waiting_costs_nothing() {
        let cost = Cost::default();
        // Preempted, not busy.
        (0..20).for_each(|_| write(&cost, || std::thread::sleep(Duration::from_millis(1))));
        assert_eq!((cost.is_dear(), cost.suspect.load(Ordering::Relaxed)), (false, SUSPECT));
        // An interrupt may strike one of these, too, and what the hypervisor takes counts as the thread's time.
        let trusted = |_: &u32| {
            write(&cost, || ());
            cost.suspect.load(Ordering::Relaxed) == 0
        };
        assert!((0..100 * SUSPECT).find(trusted).is_some_and(|count| count + 1 >= SUSPECT));
        assert!(cost.spent() < Duration::from_millis(2), "of 20 ms: {:?}", cost.spent());
    }

    #[test]
    fn one_that_takes_very_long_says_little() {
        let cost = Cost::default();
        for long in [1, 200, 1] {
            write(&cost, || work(Duration::from_millis(long)));
            (0..10).for_each(|_| write(&cost, || ()));
        }
        let Account { debt, spent, .. } = *cost.account.lock();
        assert!(debt <= ONE + Duration::from_millis(2) && spent > Duration::from_millis(199), "{debt:?} of {spent:?}");
    }

    #[test]
    fn slow_ones_become_dear_and_then_have_to_wait() {
        let (cost, now, mut count) = (Cost::default(), Instant::now, 0);
        while !cost.is_dear() {
            write(&cost, || work(Duration::from_millis(4)));
            // These do not hide it.
            (0..10).for_each(|_| write(&cost, || ()));
            count += 1;
            assert!(count < 10, "never dear");
        }
        assert!(count > 3 && cost.until(now()).is_none(), "{count}");
        while cost.until(now()).is_none() {
            write(&cost, || work(Duration::from_millis(4)));
            count += 1;
            assert!(count < 100, "no limit");
        }
        assert!(count > 20, "{count}");
        // What is owed beyond the limit is at most what the last one took.
        let until = cost.until(now()).unwrap_or_else(now);
        assert!(until <= now() + Duration::from_millis(4) * SHARE, "{:?}", until - now());
        assert!(cost.until(until).is_none() && cost.is_dear());
        assert!(cost.until(until + LIMIT * SHARE).is_none() && !cost.is_dear(), "nothing is owed");
    }
}
