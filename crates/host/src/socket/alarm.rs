//! Limits the CPU time that notifying a peer may cost. The threads that write to the peer's descriptors raise the alarm; the thread
//! of its socket takes it and disconnects the peer.
//!
//! A write to an eventfd or a socket wakes every waiter, under the wait queue's lock. A frontend can add its descriptor to any
//! number of epoll instances, at 0.14 µs of each write: 600 descriptors suffice for 40 000 waiters. Writes are timed by the wall
//! clock, which is cheap. A slow one may only have been preempted, so the writes after it are timed by the thread's CPU clock.

use crate::sys;
use parking_lot::Mutex;
use std::{
    fmt, io,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::EventFd;

/// Longest time of an ordinary write: a hundred times the usual.
const SLOW: Duration = Duration::from_micros(100);

/// So many writes in a row that take longer than [`LONG`] raise the alarm. One is no proof: in a virtual machine, the CPU clock goes
/// on while the host runs something else.
const ROW: u32 = 8;
const LONG: Duration = Duration::from_millis(1);

/// How much more than [`SLOW`] all writes of a connection together may take at once if quick ones are among them …
const CREDIT: Duration = Duration::from_millis(50);
/// … and in the long run: one part in so many of the time.
const SHARE: u32 = 50;
/// What one of them counts at most.
const ONE: Duration = Duration::from_millis(10);

/// A peer whose writes were slow cannot reconnect for so many times what they took.
const PENALTY: u32 = 200;

/// How many writes are timed by the CPU clock after a slow one: all vrings of a device have their turn.
const SUSPECT: u32 = 256;

/// How long a peer that made a write block cannot reconnect: each attempt costs other ports a few milliseconds.
const EXCLUSION: Duration = Duration::from_secs(1);

/// What a peer has done with the descriptor of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Misuse {
    /// A write blocked.
    Blocked,
    /// Writes took so much CPU time.
    Slow(Duration),
}

impl Misuse {
    /// Returns how long the peer cannot reconnect.
    pub(crate) fn exclusion(self) -> Duration {
        match self {
            Misuse::Blocked => EXCLUSION,
            Misuse::Slow(spent) => EXCLUSION.max(spent * PENALTY),
        }
    }
}

impl fmt::Display for Misuse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Misuse::Blocked => {
                write!(out, "blocked (counter full and O_NONBLOCK cleared), expected one that does not block")?;
            }
            Misuse::Slow(spent) => {
                write!(out, "took {spent:.1?} of CPU time, expected microseconds: how many epoll instances watch it?")?;
            }
        }
        let exclusion = Duration::from_millis(self.exclusion().as_millis() as u64);
        write!(out, "; no new connection for {exclusion:?}")
    }
}

/// What notifications of a socket's peer have cost; one for all its descriptors.
pub(crate) struct Alarm {
    /// The peer is not notified any more.
    raised: AtomicBool,
    /// Writes that are still timed by the CPU clock.
    suspect: AtomicU32,
    cost: Mutex<Cost>,
    attention: EventFd,
}

#[derive(Default)]
struct Cost {
    misuse: Option<Misuse>,
    /// Long writes since the last one that was not.
    row: u32,
    /// What slow writes count, less what has been earned up to `at`.
    debt: Duration,
    at: Option<Instant>,
    /// CPU time of slow writes since there was no debt.
    spent: Duration,
}

impl Cost {
    fn owe(&mut self, excess: Duration, now: Instant) {
        let earned = self.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at) / SHARE);
        self.debt = self.debt.saturating_sub(earned);
        if self.debt.is_zero() {
            self.spent = Duration::ZERO;
        }
        self.debt += excess.min(ONE);
        self.spent += excess;
    }
}

impl Alarm {
    /// `attention` wakes the socket's thread.
    pub(crate) fn new(attention: EventFd) -> Alarm {
        let (raised, suspect) = (AtomicBool::new(false), AtomicU32::new(0));
        Alarm { raised, suspect, cost: Mutex::default(), attention }
    }

    /// Writes to a descriptor of the peer, unless the alarm is raised.
    #[inline]
    pub(super) fn guard(&self, write: impl FnOnce() -> io::Result<()>) {
        if self.raised.load(Ordering::Relaxed) {
            return;
        }
        let suspect = self.suspect.load(Ordering::Relaxed) > 0;
        let cpu = suspect.then(sys::thread_time);
        let start = Instant::now();
        let result = write();
        let took = start.elapsed();
        if suspect || took > SLOW {
            let spent = cpu.map(|start| sys::thread_time().saturating_sub(start));
            self.charge(took, spent);
        }
        if result.is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            self.raise(&mut self.cost.lock(), Misuse::Blocked);
        }
    }

    /// Accounts for a write that took this long, and this much CPU time if that is known.
    #[cold]
    fn charge(&self, took: Duration, spent: Option<Duration>) {
        if took > SLOW {
            self.suspect.store(SUSPECT, Ordering::Relaxed);
        } else {
            let _ = self.suspect.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        }
        let Some(spent) = spent else { return };
        let mut cost = self.cost.lock();
        cost.row = if spent > LONG { cost.row + 1 } else { 0 };
        let Some(excess) = spent.checked_sub(SLOW) else { return };
        cost.owe(excess, Instant::now());
        if cost.row >= ROW || cost.debt > CREDIT {
            let spent = cost.spent;
            self.raise(&mut cost, Misuse::Slow(spent));
        }
    }

    fn raise(&self, cost: &mut Cost, misuse: Misuse) {
        cost.misuse.get_or_insert(misuse);
        self.raised.store(true, Ordering::Release);
        let _ = self.attention.write(1);
    }

    /// Returns why the alarm was raised, if it was since the last call. It stays raised.
    pub(crate) fn take(&self) -> Option<Misuse> {
        if !self.raised.load(Ordering::Acquire) {
            return None;
        }
        self.cost.lock().misuse.take()
    }

    /// A new connection. What the peer owes stays.
    pub(crate) fn reset(&self) {
        let mut cost = self.cost.lock();
        (cost.misuse, cost.row) = (None, 0);
        self.raised.store(false, Ordering::Release);
        // May be left over from the connection before.
        let _ = self.attention.read();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        socket::{Call, CallFd},
        sys,
    };
    use std::{os::fd::OwnedFd, sync::Arc};
    use vmm_sys_util::{
        epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
        eventfd::EFD_NONBLOCK,
    };

    fn alarm() -> Arc<Alarm> {
        sys::guard::start().unwrap();
        Arc::new(Alarm::new(EventFd::new(EFD_NONBLOCK).unwrap()))
    }

    fn call(eventfd: &EventFd, alarm: &Arc<Alarm>) -> Call {
        let fd = CallFd::new(sys::duplicate(eventfd).unwrap()).unwrap_or_else(|refused| panic!("{refused}"));
        Call::new(fd, alarm.clone())
    }

    fn full() -> EventFd {
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        eventfd.write(u64::MAX - 1).unwrap();
        eventfd
    }

    #[test]
    fn of_all_descriptors_of_a_connection_one_blocks_once() {
        let (alarm, eventfds) = (alarm(), [(); 100].map(|()| full()));
        let calls = eventfds.each_ref().map(|eventfd| call(eventfd, &alarm));
        // Full, but non-blocking: no alarm.
        calls.iter().for_each(Call::signal);
        assert_eq!(alarm.take(), None);
        eventfds.iter().for_each(|eventfd| sys::set_blocking(sys::borrow(eventfd)));
        let start = Instant::now();
        (0..10).for_each(|_| calls.iter().for_each(Call::signal));
        // A second's tick of the guard may be late; a hundred are not.
        assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
        assert_eq!((alarm.take(), alarm.take()), (Some(Misuse::Blocked), None));
        calls.iter().for_each(Call::signal);
        assert_eq!(alarm.take(), None, "it stays raised until the next connection");
        assert_eq!(alarm.attention.read().unwrap(), 1);
        alarm.reset();
        calls[7].signal();
        assert_eq!(alarm.take(), Some(Misuse::Blocked));
    }

    #[test]
    fn a_descriptor_that_thousands_watch_is_written_to_a_few_times() {
        let (alarm, eventfd) = (alarm(), EventFd::new(EFD_NONBLOCK).unwrap());
        let copies: Vec<OwnedFd> = (0..200).map(|_| sys::duplicate(&eventfd).unwrap().into()).collect();
        let crowd: Vec<Epoll> = (0..200).map(|_| Epoll::new().unwrap()).collect();
        for (epoll, copy) in crowd.iter().flat_map(|epoll| copies.iter().map(move |copy| (epoll, copy))) {
            let event = EpollEvent::new(EventSet::IN, 0);
            epoll.ctl(ControlOperation::Add, std::os::fd::AsRawFd::as_raw_fd(copy), event).unwrap();
        }
        let call = call(&eventfd, &alarm);
        (0..100).for_each(|_| call.signal());
        let written = eventfd.read().unwrap();
        assert!(written < 16, "{written} writes");
        let Some(Misuse::Slow(spent)) = alarm.take() else { panic!("no alarm after {written} writes") };
        assert!(spent > 4 * LONG && Misuse::Slow(spent).exclusion() >= PENALTY * spent, "{spent:?}");
        // The next connection is timed from its first write on.
        alarm.reset();
        (0..100).for_each(|_| call.signal());
        let again = eventfd.read().unwrap();
        assert!(again < written, "{again} writes, {written} before");
        assert!(alarm.take().is_some());
    }

    #[test]
    fn a_writer_that_is_kept_waiting_raises_nothing() {
        let alarm = alarm();
        for _ in 0..20 {
            // Preempted, not busy.
            alarm.guard(|| {
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            });
        }
        assert_eq!((alarm.take(), alarm.suspect.load(Ordering::Relaxed)), (None, SUSPECT));
        (0..SUSPECT * 2).for_each(|_| alarm.guard(|| Ok(())));
        assert_eq!((alarm.cost.lock().debt, alarm.suspect.load(Ordering::Relaxed)), (Duration::ZERO, 0));
    }

    /// A write that uses the CPU.
    fn slow(time: Duration) -> io::Result<()> {
        let start = sys::thread_time();
        while sys::thread_time().saturating_sub(start) < time {}
        Ok(())
    }

    #[test]
    fn what_happens_now_and_then_raises_nothing() {
        let alarm = alarm();
        for long in [20, 200, 20] {
            alarm.guard(|| slow(Duration::from_millis(long)));
            (0..10).for_each(|_| alarm.guard(|| Ok(())));
        }
        assert_eq!(alarm.take(), None);
        // Each of three that are known counts 10 ms, and a little was earned.
        let Cost { debt, spent, .. } = *alarm.cost.lock();
        assert!(debt <= 2 * ONE && spent > Duration::from_millis(200), "{debt:?} of {spent:?}");
    }

    #[test]
    fn quick_writes_in_between_do_not_hide_slow_ones() {
        let (alarm, mut count) = (alarm(), 0);
        while alarm.take().is_none() {
            alarm.guard(|| slow(Duration::from_millis(12)));
            alarm.guard(|| Ok(()));
            count += 1;
            assert!(count < 20, "no alarm");
        }
        assert!(count > 4, "{count}");
    }
}
