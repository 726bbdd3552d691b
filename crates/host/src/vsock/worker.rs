//! The thread that serves all vsock devices of a program: moves packets, reads host sockets, runs timers. Guests take turns;
//! `member.rs` is one guest's turn.

use super::{
    budget::Total,
    guest::Guest,
    mailbox::Post,
    member::Member,
    relay::{HostSide, Mail},
};
use crate::{
    event_loop::{Deadlines, EventLoop, Events, pin},
    sys,
};
use log::Level;
use ringroad_switch::panic_message;
use ringroad_vsock::Hub;
use std::{
    collections::{HashMap, VecDeque},
    io,
    os::unix::net::UnixListener,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vmm_sys_util::epoll::Epoll;

/// While there is work, events are polled after this many rounds, or after this time.
const ROUNDS: u32 = 16;
const LOOK: Duration = Duration::from_micros(100);

/// A control request to the worker.
pub(super) enum Control {
    Add(Arc<Guest>, Option<UnixListener>, mpsc::Sender<io::Result<()>>),
    Remove(u32, mpsc::Sender<()>),
    /// Replaces the socket that programs connect to.
    Listen(u32, Option<UnixListener>, mpsc::Sender<()>),
    Configure(Option<usize>, Duration, mpsc::Sender<io::Result<()>>),
    /// Gives a guest a turn in which its packets are processed.
    Turn(u32, mpsc::Sender<()>),
    /// A guest has mail.
    Mail(u32),
    Stop,
}

/// The source of an event, encoded in 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// A guest has kicked.
    Kick(u32),
    /// A program connects to a guest's socket.
    Listener(u32),
    /// An event at a guest's host sockets.
    Sockets(u32),
}

impl Token {
    pub(super) fn to_data(self) -> u64 {
        let (kind, guest) = match self {
            Token::Kick(guest) => (0, guest),
            Token::Listener(guest) => (1, guest),
            Token::Sockets(guest) => (2, guest),
        };
        kind << 32 | u64::from(guest)
    }

    fn from_data(data: u64) -> Token {
        let guest = data as u32;
        match data >> 32 {
            0 => Token::Kick(guest),
            1 => Token::Listener(guest),
            _ => Token::Sockets(guest),
        }
    }
}

impl Post for EventLoop<Control> {
    fn post(&self, guest: u32) {
        self.send(Control::Mail(guest));
    }

    fn is_worker_thread(&self) -> bool {
        self.is_own_thread()
    }
}

/// A running worker for vsock devices.
pub struct VsockWorker {
    pub(super) events: Arc<EventLoop<Control>>,
    pub(super) hub: Arc<Hub<HostSide>>,
    /// The host sockets of all guests.
    pub(super) total: Arc<Total>,
    guests: AtomicU32,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for VsockWorker {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("VsockWorker").field("guests", &self.guests).finish_non_exhaustive()
    }
}

impl VsockWorker {
    /// Starts the thread, pinned to a CPU if given. It polls for `poll` after the last packet before it sleeps.
    /// `connections`: the maximum number of connections with other guests that each guest may request.
    ///
    /// # Errors
    /// The CPU does not exist or is not allowed, or the system has no more threads or descriptors.
    pub fn start(cpu: Option<usize>, poll: Duration, connections: usize) -> io::Result<VsockWorker> {
        let events = Arc::new(EventLoop::new()?);
        let shared = events.clone();
        let thread = events.spawn(
            "vsock",
            move || cpu.map_or(Ok(()), sys::pin_current_thread),
            move || Loop::new(&shared, poll).run(),
        )?;
        let (hub, total) = (Hub::new(connections), Arc::new(Total::new()));
        Ok(VsockWorker { events, hub, total, guests: AtomicU32::new(0), thread: Some(thread) })
    }

    /// Changes CPU (`None`: any) and polling time.
    ///
    /// # Errors
    /// The CPU does not exist or is not allowed; the thread stays where it was.
    pub fn set(&self, cpu: Option<usize>, poll: Duration) -> io::Result<()> {
        self.events.ask(|reply| Control::Configure(cpu, poll, reply))?
    }

    /// Creates the mailbox of a guest.
    pub(super) fn mailbox(&self) -> Mail {
        Mail::new(self.guests.fetch_add(1, Ordering::Relaxed), self.events.clone())
    }

    pub(super) fn add(&self, guest: Arc<Guest>, listener: Option<UnixListener>) -> io::Result<()> {
        self.events.ask(|reply| Control::Add(guest, listener, reply))?
    }
}

impl Drop for VsockWorker {
    fn drop(&mut self) {
        self.events.send(Control::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Loop<'a> {
    events: &'a EventLoop<Control>,
    poll: Duration,
    members: HashMap<u32, Member>,
    /// Guests with something to do, in order.
    turns: VecDeque<u32>,
    /// When guests need a turn without any event.
    deadlines: Deadlines<u32>,
    faults: u64,
}

impl<'a> Loop<'a> {
    fn new(events: &'a EventLoop<Control>, poll: Duration) -> Self {
        Loop {
            events,
            poll,
            members: HashMap::new(),
            turns: VecDeque::new(),
            deadlines: Deadlines::default(),
            faults: ringroad_mem::faults(),
        }
    }

    fn run(mut self) {
        let mut events = Events::default();
        let (mut rounds, mut looked) = (0u32, Instant::now());
        loop {
            if self.events.is_pending() && !self.handle_control() {
                return;
            }
            let mut any = self.round();
            rounds = rounds.wrapping_add(1);
            if any && !rounds.is_multiple_of(ROUNDS) && looked.elapsed() < LOOK {
                continue;
            }
            if ringroad_mem::faults() != self.faults {
                self.faults = ringroad_mem::faults();
                let guests: Vec<u32> = self.members.keys().copied().collect();
                guests.into_iter().for_each(|guest| self.list(guest, |member| member.memory_suspect = true));
                any = true;
            }
            if !any && !self.deactivate() {
                any = true;
            }
            let timeout = if any || self.events.is_pending() {
                Some(Duration::ZERO)
            } else {
                self.deadlines.until(Instant::now())
            };
            self.events.wait(timeout, &mut events);
            events.tokens().for_each(|token| self.event(Token::from_data(token)));
            looked = Instant::now();
            self.wake(looked);
        }
    }

    /// Gives a turn to each guest with something to do. Returns whether there was anything.
    fn round(&mut self) -> bool {
        let mut any = false;
        for _ in 0..self.turns.len() {
            let Some(number) = self.turns.pop_front() else { break };
            let Some(member) = self.members.get_mut(&number) else { continue };
            let before = member.due;
            let poll = self.poll;
            match catch_unwind(AssertUnwindSafe(|| member.turn(poll))) {
                Ok(done) => any |= done,
                Err(payload) => {
                    self.panicked(number, panic_message(&*payload));
                    continue;
                }
            }
            self.deadlines.set(number, before, member.due);
            member.listed = member.is_busy();
            if member.listed {
                self.turns.push_back(number);
            }
        }
        any
    }

    /// Stops polling idle guests. Returns `false` if some still need turns.
    fn deactivate(&mut self) -> bool {
        for _ in 0..self.turns.len() {
            let Some(number) = self.turns.pop_front() else { break };
            let Some(member) = self.members.get_mut(&number) else { continue };
            let poll = self.poll;
            match catch_unwind(AssertUnwindSafe(|| member.deactivate(poll))) {
                Ok(idle) => member.listed = !idle,
                Err(payload) => {
                    self.panicked(number, panic_message(&*payload));
                    continue;
                }
            }
            if member.listed {
                self.turns.push_back(number);
            }
        }
        if !self.turns.is_empty() {
            // Programs just served may be waiting for this CPU.
            thread::yield_now();
        }
        self.turns.is_empty()
    }

    /// Handles a panic in a guest's turn, which affects that guest only: its frontend is disconnected, its sockets are
    /// closed, and it starts over with its next frontend.
    #[cold]
    fn panicked(&mut self, number: u32, message: &str) {
        let Some(member) = self.members.remove(&number) else { return };
        self.deadlines.set(number, member.due, None);
        let guest = member.guest.clone();
        log::error!(
            "{}: stopped by a bug in ringroad: {message}; please report it; a new connection starts it again",
            guest.env.name
        );
        let listener = catch_unwind(AssertUnwindSafe(|| {
            guest.abandon();
            member.end()
        }));
        let listener = listener.ok().flatten();
        if let Some(listener) = &listener {
            self.events.unwatch(listener);
        }
        if let Err(error) = self.add(guest.clone(), listener) {
            log::error!("{}: cannot restart its device: {error}", guest.env.name);
        }
    }

    /// Changes a guest's state after an event and gives it turns.
    fn list(&mut self, guest: u32, what: impl FnOnce(&mut Member)) {
        if let Some(member) = self.members.get_mut(&guest) {
            what(member);
            if !std::mem::replace(&mut member.listed, true) {
                self.turns.push_back(guest);
            }
        }
    }

    /// Gives turns to guests whose deadline has passed.
    fn wake(&mut self, now: Instant) {
        while let Some(guest) = self.deadlines.take(now) {
            self.list(guest, |member| (member.due, member.late) = (None, true));
        }
    }

    fn event(&mut self, token: Token) {
        match token {
            Token::Kick(guest) => self.list(guest, |member| member.kicked = true),
            Token::Listener(guest) => self.list(guest, |member| member.accepts_pending = true),
            Token::Sockets(guest) => self.list(guest, |member| member.events = true),
        }
    }

    /// Handles control requests and mail. Returns `false` to stop.
    fn handle_control(&mut self) -> bool {
        for control in self.events.take() {
            match control {
                Control::Add(guest, listener, reply) => {
                    let _ = reply.send(self.add(guest, listener));
                }
                Control::Remove(number, reply) => {
                    let due = self.members.remove(&number).and_then(|member| member.due);
                    self.deadlines.set(number, due, None);
                    let _ = reply.send(());
                }
                Control::Listen(number, listener, reply) => {
                    self.listen(number, listener);
                    let _ = reply.send(());
                }
                Control::Configure(cpu, poll, reply) => {
                    self.poll = poll;
                    let _ = reply.send(pin(cpu));
                }
                Control::Turn(guest, reply) => self.list(guest, |member| member.request_work(reply)),
                Control::Mail(guest) => self.list(guest, |member| member.mail = true),
                Control::Stop => return false,
            }
        }
        true
    }

    /// Replaces the socket that programs of a guest connect to.
    fn listen(&mut self, guest: u32, listener: Option<UnixListener>) {
        let Some(member) = self.members.get_mut(&guest) else { return };
        let watched =
            listener.as_ref().map_or(Ok(()), |listener| self.events.watch(listener, Token::Listener(guest).to_data()));
        if let Err(error) = watched {
            member.guest.env.say(Level::Error, format_args!("cannot watch the socket for programs: {error}"));
        }
        member.listener = listener;
        self.list(guest, |member| member.accepts_pending = true);
    }

    fn add(&mut self, guest: Arc<Guest>, listener: Option<UnixListener>) -> io::Result<()> {
        let (number, epoll) = (guest.env.mail.guest, Epoll::new()?);
        self.events.watch(&epoll, Token::Sockets(number).to_data())?;
        if let Some(listener) = &listener {
            self.events.watch(listener, Token::Listener(number).to_data())?;
        }
        self.members.insert(number, Member::new(guest, listener, epoll));
        self.list(number, |_| {});
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vsock::{budget::Budget, config::VsockConfig, guest::Env, mailbox::Mailbox};
    use ringroad_vsock::{Addr, Host, Key, OpenResult, SocketType};
    use vmm_sys_util::eventfd::EventFd;

    /// A mailbox that is used by the worker's thread only.
    struct Own;

    impl Post for Own {
        fn post(&self, _: u32) {}

        fn is_worker_thread(&self) -> bool {
            true
        }
    }

    /// A guest that may make one connect a second, and has made it.
    fn guest() -> Arc<Guest> {
        let config = VsockConfig { connects: 1, host: Some("/nowhere".into()), ..VsockConfig::default() };
        let budget = Budget::new(&config, Arc::new(Total::new()));
        let env = Env::new(&config, Arc::new(Mailbox::new(0, Arc::new(Own))), budget).unwrap();
        env.budget.connects.take().unwrap();
        Arc::new(Guest::new(&config, env, EventFd::new(0).unwrap()))
    }

    /// Requests a connection to a host socket. Returns whether the request waits.
    fn request(guest: &Guest, port: u32) -> bool {
        let key = Key { port, peer: Addr { cid: 3, port: 1 } };
        matches!(guest.env.open(key, SocketType::Stream), OpenResult::Pending(..))
    }

    #[test]
    fn a_panic_returns_what_the_guest_had() {
        let (guest, events) = (guest(), EventLoop::new().unwrap());
        let mut worker = Loop::new(&events, Duration::ZERO);
        worker.add(guest.clone(), None).unwrap();
        assert!(request(&guest, 1));
        worker.round();
        assert!(!request(&guest, 2), "there is a place for one");
        worker.panicked(0, "a panic provoked by this test");
        assert_eq!(guest.env.budget.report().open, 0);
        assert!(request(&guest, 3), "the place is free again");
    }

    #[test]
    fn control_that_waits_for_a_turn_is_told_whatever_happens() {
        let (guest, events) = (guest(), EventLoop::new().unwrap());
        let mut worker = Loop::new(&events, Duration::ZERO);
        let turn = |worker: &mut Loop<'_>, what: &dyn Fn(&mut Loop<'_>)| {
            let (reply, told) = mpsc::channel();
            events.send(Control::Turn(0, reply));
            assert!(worker.handle_control());
            what(worker);
            told.try_recv()
        };
        let gone = Err(mpsc::TryRecvError::Disconnected);
        assert_eq!(turn(&mut worker, &|_| {}), gone, "there is no such guest");
        worker.add(guest, None).unwrap();
        assert_eq!(turn(&mut worker, &|_| {}), Err(mpsc::TryRecvError::Empty));
        assert_eq!(turn(&mut worker, &|worker| _ = worker.round()), Ok(()));
        assert_eq!(turn(&mut worker, &|worker| worker.panicked(0, "a panic provoked by this test")), gone);
        assert_eq!(turn(&mut worker, &|worker| _ = worker.round()), Ok(()), "the guest has started over");
        assert_eq!(turn(&mut worker, &|worker| _ = worker.members.remove(&0)), gone);
    }

    #[test]
    fn a_guest_that_is_removed_leaves_no_requests_behind() {
        let (guest, events) = (guest(), EventLoop::new().unwrap());
        let mut worker = Loop::new(&events, Duration::ZERO);
        worker.add(guest.clone(), None).unwrap();
        // The worker has not seen it yet.
        assert!(request(&guest, 1));
        assert_eq!(guest.env.budget.report().open, 1);
        let (reply, removed) = mpsc::channel();
        events.send(Control::Remove(0, reply));
        assert!(worker.handle_control());
        removed.recv().unwrap();
        assert_eq!(guest.env.budget.report().open, 0);
    }

    #[test]
    fn tokens_survive_encoding() {
        for token in [Token::Kick(7), Token::Listener(u32::MAX), Token::Sockets(0), Token::Sockets(9)] {
            assert_eq!(Token::from_data(token.to_data()), token);
        }
    }
}
