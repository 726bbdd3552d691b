//! How other threads reach the vsock worker: a list of control requests, and a mailbox for each guest, so that a full mailbox
//! delays its own guest only.

use super::{
    budget::Total,
    guest::Guest,
    relay::{Target, Wire},
};
use parking_lot::Mutex;
use ringroad_vsock::Key;
use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixListener,
    },
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, ThreadId},
    time::Duration,
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

/// A control request to the worker.
pub(super) enum Control {
    Add(Arc<Guest>, Option<UnixListener>, mpsc::Sender<io::Result<()>>),
    Remove(u32, mpsc::Sender<()>),
    /// Replaces the socket that programs connect to.
    Listen(u32, Option<UnixListener>, mpsc::Sender<()>),
    Configure(Option<usize>, Duration, mpsc::Sender<io::Result<()>>),
    Stop,
}

/// A request from a guest's stack to the worker.
pub(super) enum Command {
    /// A connection has room again: read from its host socket.
    Room(Key),
    /// A connection that the guest has requested. Target `None`: connecting has begun already; `true`: it is connected.
    Open(Key, Arc<Wire>, Option<Target>, bool),
    /// Writing to a socket failed; `true`: it was reset.
    Failed(u64, bool),
    /// A socket was granted kernel memory.
    Grown(u64),
    /// A connection has ended.
    Close(u64),
}

/// The worker's state that other threads use.
pub(super) struct Shared {
    /// Kicks, listeners, and the epoll descriptors of the guests' sockets.
    epoll: Epoll,
    wake: EventFd,
    thread: OnceLock<ThreadId>,
    /// `None`: the worker has ended and takes no more requests.
    control: Mutex<Option<Vec<Control>>>,
    /// Guests with something in their mailboxes.
    posts: Mutex<Vec<u32>>,
    pending: AtomicBool,
    guests: AtomicU32,
    slots: AtomicU64,
    pub total: Arc<Total>,
}

/// The source of an event, encoded in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Wake,
    /// A guest has kicked.
    Kick(u32),
    /// A program connects to a guest's socket.
    Listener(u32),
    /// An event at a guest's host sockets.
    Sockets(u32),
}

impl Token {
    fn to_data(self) -> u64 {
        let (kind, guest) = match self {
            Token::Wake => (0, 0),
            Token::Kick(guest) => (1, guest),
            Token::Listener(guest) => (2, guest),
            Token::Sockets(guest) => (3, guest),
        };
        kind << 32 | u64::from(guest)
    }

    pub(super) fn from_data(data: u64) -> Token {
        let guest = data as u32;
        match data >> 32 {
            0 => Token::Wake,
            1 => Token::Kick(guest),
            2 => Token::Listener(guest),
            _ => Token::Sockets(guest),
        }
    }
}

/// Adds a descriptor, edge-triggered, so that it need not be read.
pub(super) fn add(epoll: &Epoll, fd: RawFd, data: u64, events: EventSet) -> io::Result<()> {
    epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events | EventSet::EDGE_TRIGGERED, data))
}

impl Shared {
    pub(super) fn new() -> io::Result<Shared> {
        let shared = Shared {
            epoll: Epoll::new()?,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            thread: OnceLock::new(),
            control: Mutex::new(Some(Vec::new())),
            posts: Mutex::default(),
            pending: AtomicBool::new(false),
            guests: AtomicU32::new(0),
            slots: AtomicU64::new(0),
            total: Arc::new(Total::new()),
        };
        shared.watch(shared.wake.as_raw_fd(), Token::Wake)?;
        Ok(shared)
    }

    /// Makes the calling thread the worker's.
    pub(super) fn set_worker_thread(&self) {
        let _ = self.thread.set(thread::current().id());
    }

    pub(super) fn is_worker_thread(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    pub(super) fn control(&self, control: Control) {
        if let Some(list) = &mut *self.control.lock() {
            list.push(control);
        }
        self.notify();
    }

    /// The worker has ended: callers that wait for a reply return.
    pub(super) fn end(&self) {
        *self.control.lock() = None;
    }

    fn notify(&self) {
        self.pending.store(true, Ordering::Release);
        // The worker itself checks the lists before it sleeps.
        if !self.is_worker_thread() {
            let _ = self.wake.write(1);
        }
    }

    /// Returns whether there are requests or posted guests.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes the control requests and the guests with mail.
    pub(super) fn take(&self) -> (Vec<Control>, Vec<u32>) {
        self.pending.store(false, Ordering::Relaxed);
        let control = self.control.lock().as_mut().map(std::mem::take).unwrap_or_default();
        (control, std::mem::take(&mut *self.posts.lock()))
    }

    /// Returns a new guest number.
    pub(super) fn number(&self) -> u32 {
        self.guests.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a new socket number.
    pub(super) fn slot(&self) -> u64 {
        self.slots.fetch_add(1, Ordering::Relaxed)
    }

    /// Watches a descriptor for input.
    pub(super) fn watch(&self, fd: RawFd, token: Token) -> io::Result<()> {
        add(&self.epoll, fd, token.to_data(), EventSet::IN)
    }

    pub(super) fn unwatch(&self, fd: RawFd) {
        let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }

    /// Waits for events, up to `timeout` milliseconds; -1: without a limit.
    pub(super) fn wait(&self, timeout: i32, events: &mut [EpollEvent]) -> usize {
        self.epoll.wait(timeout, events).unwrap_or(0)
    }
}

/// Requests from a guest's stack to the worker.
pub(super) struct Mailbox {
    pub guest: u32,
    pub shared: Arc<Shared>,
    /// The guest is in the worker's list of posts.
    listed: AtomicBool,
    work: AtomicBool,
    commands: Mutex<VecDeque<Command>>,
}

impl Mailbox {
    pub(super) fn new(shared: &Arc<Shared>) -> Mailbox {
        Mailbox {
            guest: shared.number(),
            shared: shared.clone(),
            listed: AtomicBool::new(false),
            work: AtomicBool::new(false),
            commands: Mutex::default(),
        }
    }

    /// Requests a run of the stack's `work`.
    pub(super) fn request_work(&self) {
        self.work.store(true, Ordering::Relaxed);
        self.post();
    }

    pub(super) fn send(&self, command: Command) {
        self.commands.lock().push_back(command);
        self.post();
    }

    fn post(&self) {
        if !self.listed.swap(true, Ordering::AcqRel) {
            self.shared.posts.lock().push(self.guest);
            self.shared.notify();
        }
    }

    /// Takes up to `most` commands. Returns whether the stack's `work` was requested, and whether there are more commands.
    pub(super) fn take(&self, most: usize, into: &mut Vec<Command>) -> (bool, bool) {
        // Cleared first: anything added from here on posts the guest again.
        self.listed.swap(false, Ordering::AcqRel);
        let work = self.work.swap(false, Ordering::Relaxed);
        let mut commands = self.commands.lock();
        let count = commands.len().min(most);
        into.extend(commands.drain(..count));
        (work, !commands.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_encoding() {
        for token in [Token::Wake, Token::Kick(7), Token::Listener(u32::MAX), Token::Sockets(0), Token::Sockets(9)] {
            assert_eq!(Token::from_data(token.to_data()), token);
        }
    }

    #[test]
    fn a_mailbox_is_posted_once_and_taken_in_parts() {
        let shared = Arc::new(Shared::new().unwrap());
        let mail = Mailbox::new(&shared);
        (0..5).for_each(|slot| mail.send(Command::Close(slot)));
        assert!(shared.is_pending());
        assert_eq!(shared.take().1, [mail.guest]);
        let mut commands = Vec::new();
        assert_eq!(mail.take(3, &mut commands), (false, true));
        mail.request_work();
        assert_eq!(shared.take().1, [mail.guest]);
        assert_eq!(mail.take(3, &mut commands), (true, false));
        let slots = commands.iter().map(|command| if let Command::Close(slot) = command { *slot } else { 9 });
        assert!(slots.eq(0..5));
        assert_eq!(mail.take(3, &mut commands), (false, false));
    }
}
