//! How programs wait: by polling the ring, asleep until the stack's worker wakes them, or as the leader, which waits for the
//! notification in the worker's place. Used by `socket.rs` and `listener.rs`.

use crate::{
    side::{Host, Side},
    stack::Stack,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Wake,
    time::Instant,
};

/// The polling phase of a blocking call.
pub(super) struct Polling<'a, S: Side> {
    stack: &'a Stack<S>,
    poller: Option<Poller<'a, S>>,
    pub until: Option<Instant>,
    rounds: u32,
}

impl<'a, S: Side> Polling<'a, S> {
    pub(super) fn new(stack: &'a Stack<S>) -> Self {
        Polling { stack, poller: None, until: None, rounds: 0 }
    }

    /// Called after a poll that found nothing. Returns `true` to poll once more, `false` to sleep.
    pub(super) fn poll_again(&mut self) -> bool {
        let poll = self.stack.settings().poll;
        if poll.is_zero() {
            return false;
        }
        // Reading the clock takes longer than a poll, so it is read every 16th round only.
        self.rounds += 1;
        if self.poller.is_none() {
            self.poller = Some(Poller::new(self.stack));
            self.until = Instant::now().checked_add(poll);
        } else if self.rounds.is_multiple_of(16) && self.until.is_some_and(|until| Instant::now() >= until) {
            return false;
        }
        if self.rounds.is_multiple_of(128) {
            // The peer may be waiting for this CPU.
            std::thread::yield_now();
        }
        std::hint::spin_loop();
        true
    }

    /// Ends polling before sleeping, which turns notifications on again. The caller polls once more, for packets that arrived in
    /// between.
    pub(super) fn end(&mut self) {
        self.poller = None;
    }
}

/// A program that polls the ring. When the last one is dropped, notifications are turned on again.
struct Poller<'a, S: Side>(&'a Stack<S>);

impl<'a, S: Side> Poller<'a, S> {
    fn new(stack: &'a Stack<S>) -> Self {
        stack.start_polling();
        Poller(stack)
    }
}

impl<S: Side> Drop for Poller<'_, S> {
    fn drop(&mut self) {
        self.0.stop_polling();
    }
}

/// A program that waits for packets itself and receives them. When dropped, the worker takes over.
pub(super) struct Leader<'a, S: Side>(&'a Stack<S>);

impl<'a, S: Side> Leader<'a, S> {
    /// Makes the caller the leader. Returns `None` if there is one already, or if none is possible.
    pub(super) fn new(stack: &'a Stack<S>) -> Option<Self> {
        if !stack.host.can_wait() || !stack.take_lead() {
            return None;
        }
        // Discard old notifications before others learn that they have to end the wait.
        stack.host.clear();
        Some(Leader(stack))
    }

    /// Blocks until there are packets, unless there are some already.
    pub(super) fn wait(&self, until: Option<Instant>) {
        if !self.0.enable(true) {
            self.0.host.wait(until);
        }
    }
}

impl<S: Side> Drop for Leader<'_, S> {
    fn drop(&mut self) {
        self.0.leave_lead();
    }
}

/// Wakes the threads of a program that wait for changes of a connection, asleep or as the leader.
pub(super) struct Signal<R> {
    changed: Condvar,
    host: Arc<dyn Host<R>>,
    /// A thread is the leader: a change has to end that wait. Set under the connection's lock, before the wait.
    pub leads: AtomicBool,
    /// Called on every change, for programs that do not use blocking calls; and whether there is one.
    callback: Mutex<Option<Callback>>,
    has_callback: AtomicBool,
}

type Callback = Arc<dyn Fn() + Send + Sync>;

impl<R> Signal<R> {
    pub(super) fn new(host: &Arc<dyn Host<R>>) -> Arc<Self> {
        Arc::new(Signal {
            changed: Condvar::new(),
            host: host.clone(),
            leads: AtomicBool::new(false),
            callback: Mutex::new(None),
            has_callback: AtomicBool::new(false),
        })
    }

    pub(super) fn set_callback(&self, callback: Option<Callback>) {
        let mut place = self.callback.lock();
        self.has_callback.store(callback.is_some(), Ordering::Relaxed);
        *place = callback;
    }

    /// Waits for a change of what `guard` locks. Returns `false` on timeout.
    pub(super) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>, until: Option<Instant>) -> bool {
        wait(&self.changed, guard, until)
    }
}

impl<R: 'static> Wake for Signal<R> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    // The flags are read after a change under the connection's lock, and set before a look at the connection under the same lock:
    // either they are seen here, or the change is seen there.
    fn wake_by_ref(self: &Arc<Self>) {
        self.changed.notify_all();
        if self.leads.load(Ordering::Relaxed) {
            self.host.unwait();
        }
        if self.has_callback.load(Ordering::Relaxed)
            && let Some(callback) = &*self.callback.lock()
        {
            callback();
        }
    }
}

/// Waits until notified. Returns `false` on timeout.
pub(super) fn wait<T>(changed: &Condvar, guard: &mut MutexGuard<'_, T>, until: Option<Instant>) -> bool {
    match until {
        Some(until) => !changed.wait_until(guard, until).timed_out(),
        None => {
            changed.wait(guard);
            true
        }
    }
}
