//! A guest as the worker sees it: its turn, bounded whatever the guest and its programs do. Its host sockets are in
//! `member/sockets.rs`, programs that connect in `member/accept.rs`. Called by `worker.rs`.

mod accept;
mod sockets;

use super::{
    budget::Waiting,
    guest::Guest,
    programs::PendingPrograms,
    relay::{Command, Target, Wire},
};
use ringroad_vsock::Key;
use std::{
    collections::{HashMap, VecDeque},
    net::Shutdown,
    os::unix::net::UnixListener,
    panic::resume_unwind,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use vmm_sys_util::epoll::{Epoll, EventSet};

/// Time limit of a turn, checked between steps; a step in progress, such as the stack's `work`, is completed.
const TURN: Duration = Duration::from_micros(100);
/// Commands of the stack that are handled before and after its work, at most.
const COMMANDS: usize = 128;
/// Programs accepted, or turned away because they are late, in a turn.
const ACCEPTS: usize = 32;
/// How long an idle guest's rings are polled while other guests have work.
const QUIET: Duration = Duration::from_micros(100);
/// Interval at which memory that connections no longer need is released.
const SWEEP: Duration = Duration::from_secs(1);
/// Sweeps after the last activity: the first one marks what is idle, the second one releases it.
const SWEEPS: u8 = 2;
/// Sockets whose kernel memory is checked in a sweep.
const SHRINK: usize = 256;

/// A host socket.
struct Entry {
    wire: Arc<Wire>,
    state: State,
    /// The program has hung up.
    hung_up: bool,
    /// Events that were not handled yet.
    pending: EventSet,
    /// It is in the list of ready sockets.
    listed: bool,
}

enum State {
    /// A program that has not sent its CONNECT line yet.
    Program,
    /// Waiting to be connected.
    Waiting { key: Key, target: Target },
    /// The connect is pending.
    Connecting { key: Key },
    /// Relays a connection.
    Relay { key: Key },
    /// The connection has ended, but the program has not read everything.
    Unread,
}

/// A guest of the worker.
pub(super) struct Member {
    pub guest: Arc<Guest>,
    pub listener: Option<UnixListener>,
    /// The epoll of its host sockets. One per guest, so that one guest's many events do not delay another's.
    epoll: Epoll,
    entries: HashMap<u64, Entry>,
    slots: HashMap<Key, u64>,
    /// Sockets with events to handle, in order.
    ready: VecDeque<u64>,
    /// Sockets to connect, in order.
    opening: VecDeque<(u64, Waiting)>,
    programs: PendingPrograms,
    /// Sockets with granted kernel memory.
    grown: VecDeque<u64>,
    commands: VecDeque<Command>,
    /// There may be commands.
    pub mail: bool,
    /// The guest has kicked, or control wants its packets processed.
    pub kicked: bool,
    /// The frontend of some guest has truncated memory.
    pub memory_suspect: bool,
    /// There may be socket events.
    pub events: bool,
    /// There may be programs to accept.
    pub accepts_pending: bool,
    /// Its rings are polled; the time of the last activity.
    active_since: Option<Instant>,
    /// The stack's `work` was requested, and has not run since: a packet may be in the outbox.
    work_pending: bool,
    /// Told when it has run.
    waiting_control: Option<mpsc::Sender<()>>,
    /// When the next socket may be connected, if not now.
    connect_at: Option<Instant>,
    /// When the next program may be accepted, if not now.
    accept_at: Option<Instant>,
    swept: Instant,
    sweeps: u8,
    /// When it needs a turn without any event.
    pub due: Option<Instant>,
    /// That time has passed.
    pub late: bool,
    /// It is in the list of guests with turns.
    pub listed: bool,
}

impl Member {
    /// `epoll` is for its host sockets.
    pub(super) fn new(guest: Arc<Guest>, listener: Option<UnixListener>, epoll: Epoll) -> Member {
        Member {
            guest,
            accepts_pending: listener.is_some(),
            listener,
            epoll,
            entries: HashMap::new(),
            slots: HashMap::new(),
            ready: VecDeque::new(),
            opening: VecDeque::new(),
            programs: PendingPrograms::default(),
            grown: VecDeque::new(),
            commands: VecDeque::new(),
            mail: true,
            kicked: false,
            memory_suspect: false,
            events: false,
            active_since: None,
            work_pending: false,
            waiting_control: None,
            connect_at: None,
            accept_at: None,
            swept: Instant::now(),
            sweeps: 0,
            due: None,
            late: false,
            listed: false,
        }
    }

    /// Closes its host sockets and returns the one that programs connect to.
    pub(super) fn end(mut self) -> Option<UnixListener> {
        self.listener.take()
    }

    /// Runs the stack's `work` in the next turn, then notifies `control`.
    pub(super) fn request_work(&mut self, control: mpsc::Sender<()>) {
        self.waiting_control = Some(control);
        (self.kicked, self.work_pending) = (true, true);
    }

    /// Starts to poll its rings.
    fn activate(&mut self) {
        if self.active_since.is_none() {
            self.guest.stack.disable_notification();
        }
        self.active_since = Some(Instant::now());
    }

    /// Returns whether it needs a turn without waiting for an event.
    pub(super) fn is_busy(&self) -> bool {
        let (accepts, connects) = (self.accept_at.is_none(), self.connect_at.is_none());
        let sockets = self.events || !self.ready.is_empty();
        let waiting = self.accepts_pending && accepts || !self.opening.is_empty() && connects;
        self.active_since.is_some() || self.kicked || self.mail || sockets || waiting
    }

    /// Takes a turn. Returns whether there was anything to do.
    pub(super) fn turn(&mut self, poll: Duration) -> bool {
        let start = Instant::now();
        let until = start + TURN;
        // Here and not when it happens: whatever uses the guest's rings is part of its turn, where a panic stops it alone.
        if std::mem::take(&mut self.memory_suspect) {
            self.guest.check_memory();
        }
        if std::mem::take(&mut self.kicked) {
            self.activate();
        }
        if std::mem::take(&mut self.late) {
            self.tick(start);
        }
        let mut any = self.handle_commands(until);
        // While commands are left, the guest's packets, which can cause more of them, are not processed.
        if self.active_since.is_some() && !self.mail {
            self.work_pending = false;
            any |= self.guest.stack.work_at(start);
            self.waiting_control.take().inspect(|control| _ = control.send(()));
            any |= self.handle_commands(until);
        }
        any |= self.connect(until);
        self.fetch();
        any |= self.serve(until);
        any |= self.accept(until);
        if any {
            self.sweeps = SWEEPS;
        }
        if let Some(since) = &mut self.active_since {
            if any || self.work_pending {
                *since = start;
            } else if start.duration_since(*since) > poll.max(QUIET) && !self.guest.stack.enable_notification() {
                self.active_since = None;
            }
        }
        self.due = self.next();
        any
    }

    /// Stops polling its rings if it has been idle for long enough. Returns `false` if it still needs turns.
    pub(super) fn deactivate(&mut self, poll: Duration) -> bool {
        if let Some(since) = self.active_since {
            // A request that arrived while the stack was at work waits for the next turn: no event repeats it.
            if self.work_pending || since.elapsed() < poll || self.guest.stack.enable_notification() {
                return false;
            }
            self.active_since = None;
        }
        !self.is_busy()
    }

    fn next(&self) -> Option<Instant> {
        let sweep = (self.sweeps > 0).then(|| self.swept + SWEEP);
        let times =
            [self.guest.stack.next_deadline(), self.programs.deadline(), self.connect_at, self.accept_at, sweep];
        times.into_iter().flatten().min()
    }

    fn tick(&mut self, now: Instant) {
        let stack = &self.guest.stack;
        if stack.next_deadline().is_some_and(|time| time <= now) {
            stack.tick(now);
        }
        if now.duration_since(self.swept) >= SWEEP {
            self.swept = now;
            self.sweeps = self.sweeps.saturating_sub(1);
            stack.sweep();
            self.shrink();
        }
        for _ in 0..ACCEPTS {
            let Some(slot) = self.programs.late(now) else { break };
            self.turn_away(slot, format_args!("it has not sent \"CONNECT <port>\" in time"));
        }
        self.connect_at = self.connect_at.filter(|&time| time > now);
        self.accept_at = self.accept_at.filter(|&time| time > now);
    }

    /// Returns granted kernel memory of sockets whose programs have read everything, if memory is scarce.
    fn shrink(&mut self) {
        if !self.guest.env.budget.is_tight() {
            return;
        }
        for _ in 0..self.grown.len().min(SHRINK) {
            let Some(slot) = self.grown.pop_front() else { break };
            if self.entries.get(&slot).is_some_and(|entry| !entry.wire.shrink()) {
                self.grown.push_back(slot);
            }
        }
        self.sweeps = self.sweeps.max(u8::from(!self.grown.is_empty()));
    }

    /// Handles commands from its stack, one at least. Returns whether there were any.
    fn handle_commands(&mut self, until: Instant) -> bool {
        let room = COMMANDS.saturating_sub(self.commands.len());
        let (work, more) = self.guest.env.mail.take(room, &mut self.commands);
        if work {
            self.work_pending = true;
            self.activate();
        }
        let mut any = false;
        while let Some(command) = self.commands.pop_front() {
            any = true;
            match command {
                Command::Room(key) => {
                    if let Some(&slot) = self.slots.get(&key) {
                        self.list(slot, EventSet::IN);
                    }
                }
                Command::Open(key, wire, target, connected) => self.open(key, wire, target, connected),
                Command::Failed(slot, reset) => {
                    if let Some(Entry { state: State::Relay { key }, wire, .. }) = self.entries.get(&slot)
                        && !wire.has_ended()
                    {
                        let stack = &self.guest.stack;
                        if reset { stack.reset_relay(*key) } else { stack.shut_relay_read(*key, Instant::now()) }
                    }
                }
                Command::Grown(slot) => self.grown.push_back(slot),
                Command::Close(slot) => self.close(slot),
                Command::Panicked(payload) => resume_unwind(payload),
            }
            // Each may be several system calls, and a guest can end thousands of connections at once.
            if Instant::now() >= until {
                break;
            }
        }
        self.mail = more || !self.commands.is_empty();
        any
    }

    fn list(&mut self, slot: u64, events: EventSet) {
        let Some(entry) = self.entries.get_mut(&slot) else { return };
        entry.pending |= events;
        if !std::mem::replace(&mut entry.listed, true) {
            self.ready.push_back(slot);
        }
    }

    fn close(&mut self, slot: u64) {
        let Some(entry) = self.entries.get_mut(&slot) else { return };
        let last = std::mem::replace(&mut entry.state, State::Unread);
        if let State::Waiting { key, .. } | State::Connecting { key } | State::Relay { key } = last
            && self.slots.get(&key) == Some(&slot)
        {
            self.slots.remove(&key);
            // So that the program notices although the socket stays open until it has read everything.
            if entry.wire.is_unread() {
                entry.wire.socket().inspect(|socket| _ = socket.shutdown(Shutdown::Both));
            }
        }
        // If unread, an event follows when the program has read.
        if !entry.wire.is_unread() {
            self.entries.remove(&slot);
            // A socket is free: programs waiting in the backlog can be accepted.
            self.accept_at = None;
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Pending commands hold socket places, and references back to this mailbox: without this, neither would be freed.
        self.guest.env.mail.clear();
    }
}
