//! A guest as the worker sees it: its turn, bounded whatever the guest and its programs do, and its host sockets. Called by
//! `worker.rs`.

use super::{
    guest::Guest,
    programs::{LINE, PendingPrograms, parse},
    relay::{Command, HostRelay, Target, Wire, is_reset},
};
use crate::sys;
use log::Level;
use ringroad_vsock::{Addr, Key, MAX_PACKET, SocketType};
use socket2::Socket;
use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    fmt::{Arguments, Display},
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixListener,
    },
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Time limit of a turn, checked between steps; a step in progress, such as the stack's `work`, is completed.
const TURN: Duration = Duration::from_micros(100);
/// Commands of the stack that are handled before and after its work.
const COMMANDS: usize = 128;
/// Sockets served in a turn, and bytes moved.
const SOCKETS: usize = 64;
const BYTES: usize = 512 << 10;
/// Programs accepted, or turned away because they are late, in a turn.
const ACCEPTS: usize = 32;
/// Socket events taken in a turn.
const EVENTS: usize = 64;
/// How long an idle guest's rings are polled while other guests have work.
const QUIET: Duration = Duration::from_micros(100);
/// Interval at which memory that connections no longer need is released.
const SWEEP: Duration = Duration::from_secs(1);
/// Sweeps after the last activity: the first one marks what is idle, the second one releases it.
const SWEEPS: u8 = 2;
/// Sockets whose kernel memory is checked in a sweep.
const SHRINK: usize = 256;
/// Pause after a program could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

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
    opening: VecDeque<u64>,
    programs: PendingPrograms,
    /// Sockets with granted kernel memory.
    grown: VecDeque<u64>,
    commands: Vec<Command>,
    /// There may be commands.
    pub mail: bool,
    /// There may be socket events.
    pub events: bool,
    /// There may be programs to accept.
    pub accepts_pending: bool,
    /// Its rings are polled; the time of the last activity.
    active_since: Option<Instant>,
    /// The stack's `work` was requested, and has not run since: a packet may be in the outbox.
    work_pending: bool,
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

fn is_readable(events: EventSet) -> bool {
    events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR)
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
            commands: Vec::new(),
            mail: true,
            events: false,
            active_since: None,
            work_pending: false,
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
    pub(super) fn end(self) -> Option<UnixListener> {
        self.listener
    }

    /// Starts to poll its rings.
    pub(super) fn activate(&mut self) {
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
        self.active_since.is_some() || self.mail || sockets || waiting
    }

    /// Takes a turn. Returns whether there was anything to do.
    pub(super) fn turn(&mut self, poll: Duration) -> bool {
        let start = Instant::now();
        let until = start + TURN;
        if std::mem::take(&mut self.late) {
            self.tick(start);
        }
        let mut any = self.handle_commands();
        // While commands are left, the guest's packets, which can cause more of them, are not processed.
        if self.active_since.is_some() && !self.mail {
            self.work_pending = false;
            any |= self.guest.stack.work();
            any |= self.handle_commands();
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

    /// Handles commands from its stack. Returns whether there were any.
    fn handle_commands(&mut self) -> bool {
        let mut commands = std::mem::take(&mut self.commands);
        let (work, more) = self.guest.env.mail.take(COMMANDS, &mut commands);
        self.mail = more;
        if work {
            self.work_pending = true;
            self.activate();
        }
        let any = !commands.is_empty();
        for command in commands.drain(..) {
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
            }
        }
        self.commands = commands;
        any
    }

    fn open(&mut self, key: Key, wire: Arc<Wire>, target: Option<Target>, connected: bool) {
        let slot = wire.slot;
        let state = match target {
            Some(target) => {
                self.opening.push_back(slot);
                State::Waiting { key, target }
            }
            None if connected => State::Relay { key },
            None => State::Connecting { key },
        };
        if !matches!(state, State::Waiting { .. }) {
            self.watch(&wire);
        }
        self.slots.insert(key, slot);
        self.entries.insert(slot, Entry { wire, state, hung_up: false, pending: EventSet::empty(), listed: false });
    }

    /// Watches a socket. A socket that cannot be watched is unusable. Returns whether it is watched.
    fn watch(&self, wire: &Wire) -> bool {
        let Some(socket) = wire.socket() else { return false };
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        let added = self.epoll.ctl(ControlOperation::Add, socket.as_raw_fd(), EpollEvent::new(events, wire.slot));
        if let Err(error) = &added {
            self.guest.env.say(Level::Error, format_args!("cannot watch a host socket: {error}"));
        }
        added.is_ok()
    }

    /// Connects sockets that the guest has requested. Returns whether there were any.
    fn connect(&mut self, until: Instant) -> bool {
        let mut any = false;
        while self.connect_at.is_none()
            && let Some(&slot) = self.opening.front()
        {
            let entry = self.entries.get_mut(&slot);
            let Some(Entry { wire, state: state @ State::Waiting { .. }, .. }) = entry else {
                // The request was abandoned.
                self.opening.pop_front();
                self.guest.env.budget.end_wait();
                continue;
            };
            if self.guest.env.budget.connects.take().is_none() {
                self.connect_at = self.guest.env.budget.connects.until();
                break;
            }
            self.opening.pop_front();
            self.guest.env.budget.end_wait();
            any = true;
            let State::Waiting { key, ref target } = *state else { continue };
            let result = wire.connect(target);
            *state = if let Ok(false) = result { State::Connecting { key } } else { State::Relay { key } };
            let wire = wire.clone();
            let there = result.is_ok() && self.watch(&wire);
            match result {
                Ok(false) if there => {}
                Ok(_) => self.complete_connect(&wire, key, there),
                Err(error) => {
                    self.guest
                        .env
                        .say(Level::Debug, format_args!("cannot connect to port {} of the host: {error}", key.port));
                    self.complete_connect(&wire, key, false);
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// Completes a pending connect.
    fn complete_connect(&self, wire: &Wire, key: Key, there: bool) {
        if !wire.has_ended() {
            self.guest.stack.finish_open(key, there);
        }
    }

    /// Takes events of its host sockets.
    fn fetch(&mut self) {
        if !self.events {
            return;
        }
        let mut events = [EpollEvent::default(); EVENTS];
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        // The worker watches this epoll edge-triggered: it is notified again only if all events were taken.
        self.events = count == EVENTS;
        for event in events.iter().take(count) {
            self.list(event.data(), event.event_set());
        }
    }

    fn list(&mut self, slot: u64, events: EventSet) {
        let Some(entry) = self.entries.get_mut(&slot) else { return };
        entry.pending |= events;
        if !std::mem::replace(&mut entry.listed, true) {
            self.ready.push_back(slot);
        }
    }

    /// Serves sockets with events, in order. Returns whether anything was moved.
    fn serve(&mut self, until: Instant) -> bool {
        let (mut any, mut bytes) = (false, 0);
        for _ in 0..self.ready.len().min(SOCKETS) {
            let Some(slot) = self.ready.pop_front() else { break };
            let moved = self.serve_one(slot);
            any |= moved > 0;
            bytes += moved;
            if bytes >= BYTES || Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// Returns roughly how many bytes were moved.
    fn serve_one(&mut self, slot: u64) -> usize {
        let Some(entry) = self.entries.get_mut(&slot) else { return 0 };
        entry.listed = false;
        let events = std::mem::replace(&mut entry.pending, EventSet::empty());
        if let State::Unread = entry.state {
            self.close(slot);
            return 0;
        }
        if entry.wire.has_ended() {
            return 0;
        }
        entry.hung_up |= events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        match entry.state {
            State::Program => {
                self.read_request(slot);
                return 1;
            }
            State::Waiting { .. } | State::Unread => return 0,
            State::Connecting { key } => {
                let there = match entry.wire.socket().map(Socket::take_error) {
                    Some(Ok(None)) if events.contains(EventSet::OUT) => true,
                    Some(Ok(None)) => return 0,
                    _ => false,
                };
                entry.state = State::Relay { key };
                entry.hung_up = false;
                let wire = entry.wire.clone();
                self.complete_connect(&wire, key, there);
            }
            State::Relay { key } => {
                if events.contains(EventSet::OUT) {
                    self.guest.stack.drain(key);
                }
            }
        }
        if is_readable(events) { self.read(slot) } else { 0 }
    }

    /// Reads up to one packet from a socket, straight into the guest's buffers. Returns the number of bytes.
    fn read(&mut self, slot: u64) -> usize {
        let Some(Entry { wire, state: State::Relay { key }, hung_up, .. }) = self.entries.get(&slot) else { return 0 };
        let Some(socket) = wire.socket() else { return 0 };
        let (key, hung_up, stack) = (*key, *hung_up, &self.guest.stack);
        // An error of the socket, as opposed to one of the connection.
        let mut failed = None;
        let mut note = |result: io::Result<usize>| result.inspect_err(|error| failed = Some(error.kind()));
        let note = RefCell::new(&mut note);
        let sent = stack.send_from(
            key,
            MAX_PACKET,
            &mut |spans| note.borrow_mut()(sys::receive_spans(socket.as_fd(), spans)),
            &mut |bytes| note.borrow_mut()(io::Read::read(&mut { socket }, bytes)),
        );
        match (sent, failed) {
            (Ok(Some(count @ 1..)), _) => {
                self.list(slot, EventSet::IN);
                return count;
            }
            (_, Some(io::ErrorKind::Interrupted)) => self.list(slot, EventSet::IN),
            // No credit, no room, or no connection yet: a command follows when that changes. Nothing to read: an event
            // follows.
            (Ok(None), _) | (_, Some(io::ErrorKind::WouldBlock)) => {}
            (Err(error), None) if error.kind() == io::ErrorKind::NotConnected => {}
            (Err(_), None) => {
                if hung_up {
                    // Everything that the program sent before it hung up was read.
                    stack.shut_relay(key, true, Instant::now());
                }
                // The guest receives no more: a program that keeps writing gets an error.
                let _ = socket.shutdown(Shutdown::Read);
            }
            (Err(_), Some(error)) if is_reset(socket, error) => stack.reset_relay(key),
            // The program has sent everything, or has disconnected.
            (Ok(Some(0)), _) | (Err(_), Some(_)) => stack.shut_relay(key, hung_up || failed.is_some(), Instant::now()),
        }
        0
    }

    /// Accepts programs that have connected to its socket. Returns whether there were any.
    fn accept(&mut self, until: Instant) -> bool {
        let mut any = false;
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listener.as_ref().filter(|_| self.accepts_pending && self.accept_at.is_none())
            else {
                break;
            };
            let Some(place) = self.guest.env.budget.admit() else {
                match self.programs.oldest() {
                    Some(slot) => self.turn_away(slot, format_args!("the guest has no sockets left")),
                    None => self.pause(&"the guest has no sockets left"),
                }
                continue;
            };
            let socket = match listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    if error.kind() == io::ErrorKind::WouldBlock {
                        self.accepts_pending = false;
                    } else {
                        self.pause(&error);
                    }
                    break;
                }
            };
            any = true;
            if socket.set_nonblocking(true).is_ok() {
                let process = sys::peer_process(socket.as_fd());
                let wire = Arc::new(Wire::accepted(&self.guest.env.mail, place, Socket::from(socket)));
                self.add_program(wire, process);
            }
            if Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// Adds a program that has connected. One that has sent its line already is served at once; otherwise it may displace
    /// another.
    fn add_program(&mut self, wire: Arc<Wire>, process: i32) {
        if !self.watch(&wire) {
            return;
        }
        let slot = wire.slot;
        let entry = Entry { wire, state: State::Program, hung_up: false, pending: EventSet::empty(), listed: false };
        self.entries.insert(slot, entry);
        self.programs.insert(slot, process, Instant::now());
        self.read_request(slot);
        if let Some(oldest) = self.programs.surplus() {
            self.turn_away(
                oldest,
                format_args!("it has not sent \"CONNECT <port>\", and too many programs are waiting"),
            );
        }
    }

    /// Stops accepting for a while.
    fn pause(&mut self, why: &dyn Display) {
        self.accept_at = Some(Instant::now() + PAUSE);
        let path = self.guest.env.host_path();
        self.guest.env.say(Level::Warn, format_args!("cannot accept a program on {path}: {why}; retrying"));
    }

    /// Reads the CONNECT line of a program, if it has arrived.
    fn read_request(&mut self, slot: u64) {
        let Some(entry) = self.entries.get(&slot) else { return };
        let Some(socket) = entry.wire.socket() else { return };
        let mut line = [0; LINE];
        let (port, len) = match sys::peek(socket.as_fd(), &mut line) {
            Ok(0) => return self.turn_away(slot, format_args!("it disconnected before sending \"CONNECT <port>\"")),
            Ok(len) => {
                let text = line.get(..len).unwrap_or_default();
                match parse(text) {
                    None => return,
                    Some(Ok(found)) => found,
                    Some(Err(expected)) => {
                        let found = String::from_utf8_lossy(text);
                        let found = found.escape_debug();
                        return self.turn_away(slot, format_args!("{expected}, found \"{found}\""));
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => return self.turn_away(slot, format_args!("{error}")),
        };
        let _ = io::Read::read(&mut { socket }, line.get_mut(..len).unwrap_or_default());
        let relay = HostRelay { wire: entry.wire.clone(), awaits_ok: true };
        let peer = Addr { cid: self.guest.cid, port };
        match self.guest.stack.connect_relay(peer, SocketType::Stream, relay, Instant::now()) {
            Ok(key) => {
                self.programs.remove(slot);
                self.slots.insert(key, slot);
                if let Some(entry) = self.entries.get_mut(&slot) {
                    entry.state = State::Relay { key };
                }
                self.activate();
            }
            Err(error) => self.turn_away(slot, format_args!("port {port}: {error}")),
        }
    }

    fn turn_away(&mut self, slot: u64, why: Arguments<'_>) {
        if self.programs.remove(slot) {
            self.entries.remove(&slot);
            self.guest.env.budget.turned_away.fetch_add(1, Ordering::Relaxed);
            let path = self.guest.env.host_path();
            self.guest.env.say(Level::Warn, format_args!("a program on {path} was turned away: {why}"));
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
