//! Who is notified: the peer of a socket and its descriptors. The worker writes to them. If that becomes dear (`cost`), the
//! socket's thread does it instead, so that the peer delays its own notifications only.

use super::{cost::Cost, descriptor::CallFd};
use crate::sys;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use vmm_sys_util::{
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
    timerfd::TimerFd,
};

/// How long a peer that made a write block cannot reconnect: each attempt costs other ports a few milliseconds.
pub(crate) const EXCLUSION: Duration = Duration::from_secs(1);

/// How long an unread socket waits for a second write, or twice as long: longer than User-Mode Linux takes to read it, shorter than
/// its tick of 10 ms.
pub(super) const PATIENCE: Duration = Duration::from_millis(1);
/// How many times an unread socket is written to again. Each wait is twice as long as the one before, together 1 s.
const REMINDERS: u32 = 10;

/// [`Target::watch`]: the timer is not set.
const REST: u8 = 0;
/// The timer is set, and nothing was written since.
const WATCHED: u8 = 1;
/// Something was written since. The timer is not set for each notification: that is a system call, and in a virtual machine an
/// exit.
const AGAIN: u8 = 2;

/// Whom a socket's thread serves, as those see it who notify it; one for all its connections.
pub(crate) struct Peer {
    /// It made a write block, and is not notified any more.
    blocked: AtomicBool,
    cost: Cost,
    /// Descriptors that the socket's thread is to write to, each once.
    late: Mutex<VecDeque<Arc<Target>>>,
    /// Nobody has been told that notifications are dear.
    quiet: AtomicBool,
    attention: EventFd,
}

/// What writes have cost.
pub(crate) struct Complaint(Duration);

impl fmt::Display for Complaint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Complaint(spent) = self;
        write!(
            out,
            "took {spent:.1?} of CPU time lately, expected microseconds each (does the host lack CPU time, or do thousands of epoll \
             instances watch one?); the port's own thread writes to them for a while, for a twentieth of the time"
        )
    }
}

/// A descriptor that is written to.
pub(super) struct Target {
    pub(super) fd: CallFd,
    /// For those that may need a second write.
    pub(super) timer: Option<Mutex<TimerFd>>,
    watch: AtomicU8,
    /// How many times it was written to again since the last notification.
    reminders: AtomicU32,
    /// Whose it is.
    peer: Arc<Peer>,
    /// It is among [`Peer::late`].
    is_late: AtomicBool,
}

impl Peer {
    /// # Errors
    /// The system has no more descriptors.
    pub(crate) fn new() -> io::Result<Peer> {
        let (blocked, quiet) = (AtomicBool::new(false), AtomicBool::new(true));
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Peer { blocked, cost: Cost::default(), late: Mutex::default(), quiet, attention })
    }

    /// Becomes readable when there is something to do for the socket's thread: [`Peer::attend`].
    pub(crate) fn attention(&self) -> BorrowedFd<'_> {
        crate::sys::borrow(&self.attention)
    }

    /// Writes what others have left to the socket's thread. Returns when to call it again, if not before there is attention.
    pub(crate) fn attend(&self) -> Option<Instant> {
        let _ = self.attention.read();
        // Each at most once: what becomes late meanwhile is written next time.
        let count = self.late.lock().len();
        for _ in 0..count {
            if let Some(until) = self.cost.until(Instant::now()) {
                return Some(until);
            }
            let Some(target) = self.late.lock().pop_front() else { break };
            // Before the write: a notification from now on needs another one.
            target.is_late.swap(false, Ordering::AcqRel);
            target.write_now();
        }
        if !self.late.lock().is_empty() {
            let _ = self.attention.write(1);
        }
        None
    }

    /// Returns whether it made a write block: its connection is to end.
    pub(crate) fn has_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// Returns what is to be logged if writes have become dear; once for each connection.
    pub(crate) fn complaint(&self) -> Option<Complaint> {
        (self.cost.is_dear() && self.quiet.swap(false, Ordering::Relaxed)).then(|| Complaint(self.cost.spent()))
    }

    /// A connection begins or has ended. What is owed stays.
    pub(crate) fn reset(&self) {
        // Closed without the lock.
        let _late = std::mem::take(&mut *self.late.lock());
        self.quiet.store(true, Ordering::Relaxed);
        self.blocked.store(false, Ordering::Release);
        // May be left over from the connection before.
        let _ = self.attention.read();
    }
}

impl Target {
    pub(super) fn new(fd: CallFd, timer: Option<TimerFd>, peer: Arc<Peer>) -> Arc<Target> {
        Arc::new(Target {
            fd,
            timer: timer.map(Mutex::new),
            watch: AtomicU8::new(REST),
            reminders: AtomicU32::new(0),
            peer,
            is_late: AtomicBool::new(false),
        })
    }

    /// Notifies the peer, or has the socket's thread do it.
    #[inline]
    pub(super) fn write(self: &Arc<Self>) {
        if self.peer.cost.is_dear() { self.leave() } else { self.write_now() }
    }

    /// Notifies the peer, and sees to it that the timer is set.
    #[inline]
    fn write_now(&self) {
        self.notify();
        if self.timer.is_some() {
            self.watch();
        }
    }

    fn watch(&self) {
        // Behind the write: if the clock's thread has seen the socket read before it, the thread finds this, or is found.
        let mut state = self.watch.load(Ordering::Acquire);
        while state != AGAIN {
            match self.watch.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(REST) => return self.wait(PATIENCE),
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        // Waits that have become long are for what was unread before.
        if self.reminders.load(Ordering::Relaxed) > 0 && self.reminders.swap(0, Ordering::Relaxed) > 0 {
            self.wait(PATIENCE);
        }
    }

    /// The timer has expired: notifies a peer again that has not read what was written that long ago. It may miss that too, so the
    /// timer is set again.
    pub(super) fn expired(&self, is_unread: impl FnOnce() -> bool) {
        let change = |from, to| self.watch.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if change(AGAIN, WATCHED) {
            return self.wait(PATIENCE);
        }
        if is_unread() {
            let count = self.reminders.fetch_add(1, Ordering::Relaxed) + 1;
            if count <= REMINDERS {
                self.notify();
                return self.wait(PATIENCE * (1 << count));
            }
        }
        self.reminders.store(0, Ordering::Relaxed);
        if !change(WATCHED, REST) {
            self.watch.store(WATCHED, Ordering::Release);
            self.wait(PATIENCE);
        }
    }

    fn wait(&self, time: Duration) {
        if let Some(timer) = &self.timer {
            let _ = timer.lock().reset(time, None);
        }
    }

    #[inline]
    fn notify(&self) {
        let Target { peer, fd, .. } = self;
        if peer.has_blocked() {
            return;
        }
        sys::woken();
        if peer.cost.time(|| fd.add_one()).is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            peer.blocked.store(true, Ordering::Release);
            let _ = peer.attention.write(1);
        }
    }

    /// Leaves a write to the socket's thread.
    #[cold]
    fn leave(self: &Arc<Self>) {
        // Acquires and releases: if it is late already, the write is still to come and happens after what came before this.
        if self.is_late.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut late = self.peer.late.lock();
        late.push_back(self.clone());
        if late.len() == 1 {
            drop(late);
            let _ = self.peer.attention.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{socket::Call, sys};
    use std::os::fd::OwnedFd;
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

    fn peer() -> Arc<Peer> {
        sys::guard::start().unwrap();
        Arc::new(Peer::new().unwrap())
    }

    fn eventfd() -> EventFd {
        EventFd::new(EFD_NONBLOCK).unwrap()
    }

    fn call(eventfd: &EventFd, peer: &Arc<Peer>) -> Call {
        let fd = CallFd::new(sys::duplicate(eventfd).unwrap()).unwrap_or_else(|refused| panic!("{refused}"));
        Call::new(fd, peer)
    }

    #[test]
    fn of_all_descriptors_of_a_connection_one_blocks_once() {
        let full = || {
            let eventfd = eventfd();
            eventfd.write(u64::MAX - 1).unwrap();
            eventfd
        };
        let (peer, eventfds) = (peer(), [(); 100].map(|()| full()));
        let calls = eventfds.each_ref().map(|eventfd| call(eventfd, &peer));
        // Full, but non-blocking.
        calls.iter().for_each(Call::signal);
        assert!(!peer.has_blocked());
        eventfds.iter().for_each(|eventfd| sys::set_blocking(sys::borrow(eventfd)));
        let start = Instant::now();
        (0..10).for_each(|_| calls.iter().for_each(Call::signal));
        // A second's tick of the guard may be late; a hundred are not.
        assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
        assert!(peer.has_blocked());
        assert_eq!(peer.attention.read().unwrap(), 1);
        peer.reset();
        assert!(!peer.has_blocked());
        calls[7].signal();
        assert!(peer.has_blocked());
    }

    #[test]
    fn a_descriptor_that_thousands_watch_is_left_to_the_thread_of_its_socket() {
        let (peer, eventfd) = (peer(), eventfd());
        let copies: Vec<OwnedFd> = (0..200).map(|_| sys::duplicate(&eventfd).unwrap().into()).collect();
        let crowd: Vec<Epoll> = (0..200).map(|_| Epoll::new().unwrap()).collect();
        for (epoll, copy) in crowd.iter().flat_map(|epoll| copies.iter().map(move |copy| (epoll, copy))) {
            let event = EpollEvent::new(EventSet::IN, 0);
            epoll.ctl(ControlOperation::Add, std::os::fd::AsRawFd::as_raw_fd(copy), event).unwrap();
        }
        let call = call(&eventfd, &peer);
        (0..100).for_each(|_| call.signal());
        let written = eventfd.read().unwrap();
        assert!(written < 50, "{written} writes");
        let complaint = peer.complaint().unwrap_or_else(|| panic!("none after {written} writes")).to_string();
        assert!(complaint.contains("of CPU time lately") && peer.complaint().is_none(), "{complaint}");
        // All later notifications are one.
        assert_eq!((peer.attention.read().unwrap(), peer.late.lock().len()), (1, 1));
        assert_eq!(peer.attend(), None);
        assert_eq!((eventfd.read().unwrap(), peer.late.lock().len()), (1, 0));
        // Also for the next connection. In the long run there are pauses.
        peer.reset();
        let mut written = 0;
        let until = loop {
            call.signal();
            assert!(written < 1000, "no pause");
            match peer.attend() {
                Some(until) => break until,
                None => written += eventfd.read().unwrap(),
            }
        };
        assert!(written > 1 && until > Instant::now() && peer.late.lock().len() == 1);
        // Nothing is lost.
        std::thread::sleep(until - Instant::now());
        assert_eq!(peer.attend(), None);
        assert_eq!(eventfd.read().unwrap(), 1);
        assert!(peer.complaint().is_some(), "each connection is told");
    }

    #[test]
    fn what_is_late_when_a_connection_ends_is_forgotten() {
        let (peer, eventfd) = (peer(), eventfd());
        let call = call(&eventfd, &peer);
        let target = call.target();
        target.leave();
        target.leave();
        assert_eq!((peer.attention.read().unwrap(), peer.late.lock().len()), (1, 1));
        peer.reset();
        assert_eq!((peer.attend(), eventfd.read().is_err()), (None, true));
        assert_eq!(Arc::strong_count(&target), 2, "closed with the call");
    }
}
