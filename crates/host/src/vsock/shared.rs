//! How the vsock worker is reached from any thread: a list for what control wants, and a mailbox for each guest, so that one
//! that is full of news holds up its own guest only.

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

/// What control wants of the worker.
pub(super) enum Control {
    Add(Arc<Guest>, Option<UnixListener>, mpsc::Sender<io::Result<()>>),
    Remove(u32, mpsc::Sender<()>),
    /// Programs connect there from now on.
    Listen(u32, Option<UnixListener>, mpsc::Sender<()>),
    Configure(Option<usize>, Duration, mpsc::Sender<io::Result<()>>),
    Stop,
}

/// What a guest's stack has to tell the worker.
pub(super) enum Command {
    /// A connection can be sent to again.
    Room(Key),
    /// A connection that the guest has asked for; `None`: it is connected, or being connected, already.
    Open(Key, Arc<Wire>, Option<Target>, bool),
    /// A socket takes no more; `true`: it was reset.
    Failed(u64, bool),
    /// The kernel keeps more for a socket than for most.
    Grown(u64),
    /// A connection is over.
    Close(u64),
}

/// What is needed to reach the worker from any thread.
pub(super) struct Shared {
    /// Kicks, and what says that a guest's sockets have something.
    epoll: Epoll,
    wake: EventFd,
    thread: OnceLock<ThreadId>,
    /// `None`: the worker has ended, and hears nothing any more.
    control: Mutex<Option<Vec<Control>>>,
    /// Guests with something in their mailboxes.
    posts: Mutex<Vec<u32>>,
    pending: AtomicBool,
    guests: AtomicU32,
    slots: AtomicU64,
    pub total: Arc<Total>,
}

/// What an event is about, as 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Wake,
    /// A guest has kicked.
    Kick(u32),
    /// A program connects to a guest's socket.
    Listener(u32),
    /// Sockets of a guest.
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

/// Adds a descriptor, edge-triggered, so that nobody need read it.
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

    /// The calling thread is the worker's from now on.
    pub(super) fn belongs_here(&self) {
        let _ = self.thread.set(thread::current().id());
    }

    pub(super) fn is_here(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    pub(super) fn control(&self, control: Control) {
        if let Some(list) = &mut *self.control.lock() {
            list.push(control);
        }
        self.notify();
    }

    /// The worker has ended: whoever waits for an answer waits no more.
    pub(super) fn end(&self) {
        *self.control.lock() = None;
    }

    fn notify(&self) {
        self.pending.store(true, Ordering::Release);
        // The worker itself looks at the lists before it sleeps.
        if !self.is_here() {
            let _ = self.wake.write(1);
        }
    }

    /// Whether there is news for the worker.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// The news there is.
    pub(super) fn take(&self) -> (Vec<Control>, Vec<u32>) {
        self.pending.store(false, Ordering::Relaxed);
        let control = self.control.lock().as_mut().map(std::mem::take).unwrap_or_default();
        (control, std::mem::take(&mut *self.posts.lock()))
    }

    /// A number for a guest.
    pub(super) fn number(&self) -> u32 {
        self.guests.fetch_add(1, Ordering::Relaxed)
    }

    /// A number for a socket.
    pub(super) fn slot(&self) -> u64 {
        self.slots.fetch_add(1, Ordering::Relaxed)
    }

    /// From now on the worker hears when there is something to read.
    pub(super) fn watch(&self, fd: RawFd, token: Token) -> io::Result<()> {
        add(&self.epoll, fd, token.to_data(), EventSet::IN)
    }

    pub(super) fn unwatch(&self, fd: RawFd) {
        let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }

    /// Waits for events, so many milliseconds; -1: for ever.
    pub(super) fn wait(&self, timeout: i32, events: &mut [EpollEvent]) -> usize {
        self.epoll.wait(timeout, events).unwrap_or(0)
    }
}

/// What a guest's stack wants of the worker.
pub(super) struct Mailbox {
    pub guest: u32,
    pub shared: Arc<Shared>,
    /// The worker knows that there is something.
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

    /// There is something to do at the guest's stack.
    pub(super) fn work(&self) {
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

    /// Takes up to `most` commands. Says whether there is work too, and whether there are more commands.
    pub(super) fn take(&self, most: usize, into: &mut Vec<Command>) -> (bool, bool) {
        // First: who adds something from now on says so again.
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
    fn tokens_come_back_as_they_were() {
        for token in [Token::Wake, Token::Kick(7), Token::Listener(u32::MAX), Token::Sockets(0), Token::Sockets(9)] {
            assert_eq!(Token::from_data(token.to_data()), token);
        }
    }

    #[test]
    fn a_mailbox_is_posted_once_and_emptied_in_parts() {
        let shared = Arc::new(Shared::new().unwrap());
        let mail = Mailbox::new(&shared);
        (0..5).for_each(|slot| mail.send(Command::Close(slot)));
        assert!(shared.is_pending());
        assert_eq!(shared.take().1, [mail.guest]);
        let mut commands = Vec::new();
        assert_eq!(mail.take(3, &mut commands), (false, true));
        mail.work();
        assert_eq!(shared.take().1, [mail.guest]);
        assert_eq!(mail.take(3, &mut commands), (true, false));
        let slots = commands.iter().map(|command| if let Command::Close(slot) = command { *slot } else { 9 });
        assert!(slots.eq(0..5));
        assert_eq!(mail.take(3, &mut commands), (false, false));
    }
}
