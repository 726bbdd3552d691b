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
};

/// The token of the mailbox itself.
const WAKE: u64 = u64::MAX;

/// Events taken in one wait.
const EVENTS: usize = 64;

/// The mailbox and the descriptors of a thread. Other threads send it commands and have it watch descriptors; the thread
/// takes both between its rounds.
pub(crate) struct EventLoop<C> {
    epoll: Epoll,
    wake: EventFd,
    /// `None`: the thread has ended and takes no more commands.
    commands: Mutex<Option<Vec<C>>>,
    /// There are commands: what the thread checks in each round.
    pending: AtomicBool,
    thread: OnceLock<ThreadId>,
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
        self.list.iter().take(self.count).map(EpollEvent::data).filter(|&token| token != WAKE)
    }
}

impl<C> EventLoop<C> {
    pub(crate) fn new() -> io::Result<EventLoop<C>> {
        let (epoll, wake) = (Epoll::new()?, EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let commands = Mutex::new(Some(Vec::new()));
        let this = EventLoop { epoll, wake, commands, pending: AtomicBool::new(false), thread: OnceLock::new() };
        this.watch(&this.wake, WAKE)?;
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

    /// Waits for events up to `timeout`; `None`: without a limit. A signal ends the wait without events.
    pub(crate) fn wait(&self, timeout: Option<Duration>, events: &mut Events) {
        events.count = sys::epoll_wait(&self.epoll, timeout, &mut events.list);
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

    /// Rounded to milliseconds, the interrupts of guests would come late.
    #[test]
    fn waits_are_exact() {
        let (events, mut list) = (EventLoop::<()>::new().unwrap(), Events::default());
        let time = Duration::from_micros(200);
        let shortest = (0..50).map(|_| {
            let start = Instant::now();
            events.wait(Some(time), &mut list);
            start.elapsed()
        });
        let shortest = shortest.min().unwrap();
        assert!((time..Duration::from_micros(900)).contains(&shortest), "{shortest:?}");
        events.wake.write(1).unwrap();
        events.wait(Some(Duration::from_secs(60)), &mut list);
        assert_eq!((list.count, list.tokens().count()), (1, 0), "the mailbox");
    }

    /// With the default slack, waits of 50 µs take 100 and more.
    #[test]
    fn waits_of_a_timed_port_have_no_slack() {
        let (events, mut list) = (EventLoop::<()>::new().unwrap(), Events::default());
        let time = Duration::from_micros(50);
        let mut quartile = || {
            let mut waits = [time; 200].map(|time| {
                let start = Instant::now();
                events.wait(Some(time), &mut list);
                start.elapsed()
            });
            waits.sort();
            waits[50]
        };
        let usual = quartile();
        sys::set_exact_timers(true);
        let exact = quartile();
        sys::set_exact_timers(false);
        assert!(exact >= time && exact + Duration::from_micros(20) < usual, "{exact:?} against {usual:?}");
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
