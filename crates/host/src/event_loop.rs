//! What the threads of this crate share that serve descriptors: a mailbox for commands, epoll, a pinned thread, deadlines.
//! Used by `worker.rs` and `vsock/worker.rs`.

use crate::sys;
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    io,
    os::fd::AsRawFd,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle, ThreadId},
    time::{Duration, Instant},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
    timerfd::TimerFd,
};

/// The token of the mailbox itself.
const WAKE: u64 = u64::MAX;
/// The token of the timer.
const TIMER: u64 = WAKE - 1;

/// Events taken in one wait.
const EVENTS: usize = 64;

/// The mailbox and the descriptors of a thread. Other threads send it commands and have it watch descriptors; the thread
/// takes both between its rounds.
pub(crate) struct EventLoop<C> {
    epoll: Epoll,
    wake: EventFd,
    timer: Mutex<Timer>,
    /// `None`: the thread has ended and takes no more commands.
    commands: Mutex<Option<Vec<C>>>,
    /// There are commands: what the thread checks in each round.
    pending: AtomicBool,
    thread: OnceLock<ThreadId>,
}

/// Ends waits. It is left to expire when what it was set for is no longer awaited: setting it is a write to a register of the CPU,
/// which is slow in a virtual machine, and a thread that waits for a while between any two frames would set it each time.
struct Timer {
    fd: TimerFd,
    expires: Option<Instant>,
}

impl Timer {
    /// Returns whether it expires when this time is over, or before that.
    fn set(&mut self, time: Duration) -> bool {
        let now = Instant::now();
        let Some(due) = now.checked_add(time) else { return true };
        if self.expires.is_none_or(|expires| expires <= now || expires > due) {
            self.expires = self.fd.reset(time, None).is_ok().then_some(due);
        }
        self.expires.is_some()
    }
}

/// Tokens of descriptors that have become readable.
pub(crate) struct Events {
    list: [EpollEvent; EVENTS],
    count: usize,
}

impl Default for Events {
    fn default() -> Events {
        Events { list: [EpollEvent::default(); EVENTS], count: 0 }
    }
}

impl Events {
    /// Returns the tokens.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = u64> + use<'_> {
        self.list.iter().take(self.count).map(EpollEvent::data).filter(|&token| token < TIMER)
    }
}

impl<C> EventLoop<C> {
    pub(crate) fn new() -> io::Result<EventLoop<C>> {
        let (epoll, wake) = (Epoll::new()?, EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let (timer, commands) = (Timer { fd: TimerFd::new()?, expires: None }, Mutex::new(Some(Vec::new())));
        let (timer, pending, thread) = (Mutex::new(timer), AtomicBool::new(false), OnceLock::new());
        let this = EventLoop { epoll, wake, timer, commands, pending, thread };
        this.watch(&this.wake, WAKE)?;
        this.watch(&this.timer.lock().fd, TIMER)?;
        Ok(this)
    }

    /// Sends a command. It is dropped if the thread has ended.
    pub(crate) fn send(&self, command: C) {
        if let Some(commands) = &mut *self.commands.lock() {
            commands.push(command);
        }
        self.pending.store(true, Ordering::Release);
        // The thread itself checks its mailbox before it sleeps.
        if !self.is_own_thread() {
            let _ = self.wake.write(1);
        }
    }

    /// Sends a command with a place for the reply, and waits for that.
    ///
    /// # Errors
    /// The thread has ended.
    pub(crate) fn ask<T>(&self, command: impl FnOnce(mpsc::Sender<T>) -> C) -> io::Result<T> {
        let (sender, reply) = mpsc::channel();
        self.send(command(sender));
        reply.recv().map_err(|_| io::Error::other("the thread has ended"))
    }

    /// Returns whether there are commands.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes all commands.
    pub(crate) fn take(&self) -> Vec<C> {
        self.pending.store(false, Ordering::Relaxed);
        self.commands.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns whether the caller is the thread of this loop.
    pub(crate) fn is_own_thread(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    /// Watches a descriptor for input, edge-triggered: each notification is one event, and the descriptor need not be read.
    pub(crate) fn watch(&self, fd: &impl AsRawFd, token: u64) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, token);
        self.epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event)
    }

    /// To be called before the descriptor is closed: the peer may have the same file open, so closing does not end the watch.
    pub(crate) fn unwatch(&self, fd: &impl AsRawFd) {
        let _ = self.epoll.ctl(ControlOperation::Delete, fd.as_raw_fd(), EpollEvent::default());
    }

    /// Waits for events up to `timeout`; `None`: without a limit. May return without events before that; a signal ends it, too.
    pub(crate) fn wait(&self, timeout: Option<Duration>, events: &mut Events) {
        let milliseconds = match timeout {
            None => -1,
            Some(Duration::ZERO) => 0,
            Some(time) if self.timer.lock().set(time) => -1,
            // Rounded up: otherwise it would wake just before a deadline, repeatedly.
            Some(time) => time.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32,
        };
        events.count = self.epoll.wait(milliseconds, &mut events.list).unwrap_or(0);
    }
}

impl<C: Send + 'static> EventLoop<C> {
    /// Starts the thread of this loop. `prepare` runs in it first; its error is returned and ends the thread. Afterwards nobody
    /// waits for a reply that will not come.
    pub(crate) fn spawn(
        self: &std::sync::Arc<Self>,
        name: &str,
        prepare: impl FnOnce() -> io::Result<()> + Send + 'static,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let (started, result) = mpsc::channel();
        let this = self.clone();
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            let _ = this.thread.set(thread::current().id());
            let prepared = prepare();
            let go = prepared.is_ok();
            let _ = started.send(prepared);
            let _ended = Ended(&this);
            if go {
                run();
            }
        })?;
        result.recv().unwrap_or_else(|_| Err(io::Error::other("the thread has ended")))?;
        Ok(thread)
    }
}

/// Refuses commands once the thread has ended, even by a panic.
struct Ended<'a, C>(&'a EventLoop<C>);

impl<C> Drop for Ended<'_, C> {
    fn drop(&mut self) {
        // Dropped without the lock: a command may hold anything.
        let _commands = self.0.commands.lock().take();
    }
}

/// Pins the calling thread to a CPU; `None`: to any that the process may use.
pub(crate) fn pin(cpu: Option<usize>) -> io::Result<()> {
    cpu.map_or_else(sys::unpin_current_thread, sys::pin_current_thread)
}

/// When something is due, each key at one time at most.
pub(crate) struct Deadlines<K>(BTreeSet<(Instant, K)>);

impl<K> Default for Deadlines<K> {
    fn default() -> Self {
        Deadlines(BTreeSet::new())
    }
}

impl<K: Ord + Copy> Deadlines<K> {
    /// Moves the deadline of a key.
    pub(crate) fn set(&mut self, key: K, before: Option<Instant>, due: Option<Instant>) {
        if before != due {
            before.inspect(|&due| _ = self.0.remove(&(due, key)));
            due.inspect(|&due| _ = self.0.insert((due, key)));
        }
    }

    /// Takes the next key whose deadline has passed.
    pub(crate) fn take(&mut self, now: Instant) -> Option<K> {
        let &(due, key) = self.0.first().filter(|(due, _)| *due <= now)?;
        self.0.remove(&(due, key));
        Some(key)
    }

    /// Returns the time until the first deadline.
    pub(crate) fn until(&self, now: Instant) -> Option<Duration> {
        self.0.first().map(|(due, _)| due.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn deadlines_pass_in_order_and_can_be_moved() {
        let start = Instant::now();
        let at = |seconds| Some(start + Duration::from_secs(seconds));
        let mut deadlines = Deadlines::default();
        assert_eq!(deadlines.until(start), None);
        for (key, due) in [(1, 3), (2, 1), (3, 2)] {
            deadlines.set(key, None, at(due));
        }
        deadlines.set(2, at(1), at(4));
        deadlines.set(3, at(2), None);
        assert_eq!(deadlines.until(start), Some(Duration::from_secs(3)));
        assert_eq!(deadlines.take(start), None);
        let later = start + Duration::from_secs(5);
        assert_eq!([deadlines.take(later), deadlines.take(later), deadlines.take(later)], [Some(1), Some(2), None]);
    }

    /// Rounded to milliseconds, or with a thread's timer slack, the interrupts of guests would come late.
    #[test]
    fn waits_are_exact() {
        let (events, mut list) = (EventLoop::<()>::new().unwrap(), Events::default());
        let time = Duration::from_micros(100);
        let mut waits = [time; 200].map(|time| {
            let start = Instant::now();
            events.wait(Some(time), &mut list);
            assert_eq!(list.tokens().count(), 0);
            start.elapsed()
        });
        waits.sort();
        assert!((time..time + Duration::from_micros(45)).contains(&waits[20]), "{waits:?}");
        events.wake.write(1).unwrap();
        events.wait(Some(Duration::from_secs(60)), &mut list);
        assert_eq!((list.count, list.tokens().count()), (1, 0), "the mailbox");
    }

    #[test]
    fn the_timer_is_set_to_the_earliest_time_only() {
        let events = EventLoop::<()>::new().unwrap();
        let set = |micros| {
            let mut timer = events.timer.lock();
            assert!(timer.set(Duration::from_micros(micros)));
            timer.expires
        };
        let (late, early) = (set(100_000_000), set(50_000_000));
        assert!(early < late);
        assert_eq!(set(200_000_000), early, "it expires before that");
        let soon = set(1);
        thread::sleep(Duration::from_micros(100));
        assert!(soon < early && set(300_000_000) > late, "it has expired");
        assert!(events.timer.lock().set(Duration::MAX));
    }

    /// One that was set for a former wait ends a later one once, and no other after that.
    #[test]
    fn an_earlier_timer_is_no_event() {
        let (events, mut list) = (EventLoop::<()>::new().unwrap(), Events::default());
        assert!(events.timer.lock().set(Duration::from_millis(1)));
        let start = Instant::now();
        events.wait(None, &mut list);
        assert_eq!((list.count, list.tokens().count()), (1, 0));
        events.wait(Some(Duration::from_millis(30)), &mut list);
        assert!(start.elapsed() >= Duration::from_millis(31), "{:?}", start.elapsed());
    }

    #[test]
    fn a_command_wakes_the_thread_and_one_to_an_ended_thread_fails() {
        let events = Arc::new(EventLoop::<mpsc::Sender<u32>>::new().unwrap());
        let running = events.clone();
        let thread = events.spawn(
            "test",
            || Ok(()),
            move || {
                let mut list = Events::default();
                while !running.is_pending() {
                    running.wait(None, &mut list);
                }
                assert!(running.is_own_thread());
                running.take().into_iter().for_each(|reply| reply.send(7).unwrap());
            },
        );
        assert_eq!(events.ask(|reply| reply).unwrap(), 7);
        thread.unwrap().join().unwrap();
        assert!(events.ask(|reply| reply).is_err());
        let panicked = Arc::new(EventLoop::<mpsc::Sender<u32>>::new().unwrap());
        let thread = panicked.spawn("test", || Ok(()), || panic!("a panic provoked by this test"));
        // Before its end, or after.
        assert!(panicked.ask(|reply| reply).is_err());
        assert!(thread.unwrap().join().is_err());
        let failed = events.spawn("test", || Err(io::Error::other("no such CPU")), || {});
        assert_eq!(failed.unwrap_err().to_string(), "no such CPU");
    }
}
