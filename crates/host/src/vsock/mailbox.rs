//! How stacks, sockets and programs' threads reach the vsock worker: a mailbox for each guest, so that a full mailbox delays its own
//! guest only.

use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The worker, as a mailbox needs it.
pub(super) trait Post: Send + Sync {
    /// A guest has mail.
    fn post(&self, guest: u32);

    /// Returns whether the caller is the worker's thread.
    fn is_worker_thread(&self) -> bool;
}

/// Requests `C` from a guest's stack to the worker.
pub(super) struct Mailbox<C> {
    /// The guest's number.
    pub guest: u32,
    worker: Arc<dyn Post>,
    /// The worker knows that there is mail.
    listed: AtomicBool,
    work: AtomicBool,
    commands: Mutex<VecDeque<C>>,
    slots: AtomicU64,
}

impl<C> Mailbox<C> {
    pub(super) fn new(guest: u32, worker: Arc<dyn Post>) -> Self {
        let (listed, work) = (AtomicBool::new(false), AtomicBool::new(false));
        Mailbox { guest, worker, listed, work, commands: Mutex::default(), slots: AtomicU64::new(0) }
    }

    pub(super) fn is_worker_thread(&self) -> bool {
        self.worker.is_worker_thread()
    }

    /// Returns a new number for one of the guest's sockets.
    pub(super) fn slot(&self) -> u64 {
        self.slots.fetch_add(1, Ordering::Relaxed)
    }

    /// Requests a run of the stack's `work`.
    pub(super) fn request_work(&self) {
        self.work.store(true, Ordering::Relaxed);
        self.post();
    }

    pub(super) fn send(&self, command: C) {
        self.commands.lock().push_back(command);
        self.post();
    }

    fn post(&self) {
        if !self.listed.swap(true, Ordering::AcqRel) {
            self.worker.post(self.guest);
        }
    }

    /// Takes up to `most` commands. Returns whether the stack's `work` was requested, and whether there are more commands.
    pub(super) fn take(&self, most: usize, into: &mut VecDeque<C>) -> (bool, bool) {
        // Cleared first: anything added from here on posts the guest again.
        self.listed.swap(false, Ordering::AcqRel);
        let work = self.work.swap(false, Ordering::Relaxed);
        let mut commands = self.commands.lock();
        let count = commands.len().min(most);
        into.extend(commands.drain(..count));
        (work, !commands.is_empty())
    }

    /// Drops all commands.
    pub(super) fn clear(&self) {
        let commands = std::mem::take(&mut *self.commands.lock());
        // Without the lock, as this may close sockets.
        drop(commands);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Posts(Mutex<Vec<u32>>);

    impl Post for Posts {
        fn post(&self, guest: u32) {
            self.0.lock().push(guest);
        }

        fn is_worker_thread(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_mailbox_is_posted_once_and_taken_in_parts() {
        let posts = Arc::new(Posts::default());
        let mail = Mailbox::new(7, posts.clone());
        (0..5).for_each(|slot| mail.send(slot));
        assert_eq!(std::mem::take(&mut *posts.0.lock()), [7]);
        let mut commands = VecDeque::new();
        assert_eq!(mail.take(3, &mut commands), (false, true));
        mail.request_work();
        assert_eq!(std::mem::take(&mut *posts.0.lock()), [7]);
        assert_eq!(mail.take(3, &mut commands), (true, false));
        assert_eq!(commands, [0, 1, 2, 3, 4]);
        assert_eq!(mail.take(3, &mut commands), (false, false));
    }
}
