//! A guest at the worker: its turn, which is bounded whatever the guest and its programs do, and its sockets of the host.

use super::{
    asking::Asking,
    guest::Guest,
    relay::{HostRelay, LINE, Target, Wire, is_reset, parse},
    shared::{Command, add},
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
use vmm_sys_util::epoll::{Epoll, EpollEvent, EventSet};

/// What a turn may take. It ends with what it is at when that is over: one of the steps below, or the stack's `work`.
const TURN: Duration = Duration::from_micros(100);
/// Commands of a guest's stack that are taken up before and after its work.
const COMMANDS: usize = 128;
/// Sockets that are read or written in a turn, and bytes.
const SOCKETS: usize = 64;
const BYTES: usize = 512 << 10;
/// Programs that are accepted in a turn, or turned away as they are late.
const ACCEPTS: usize = 32;
/// Events of its sockets that are taken up in a turn.
const EVENTS: usize = 64;
/// A guest with nothing to do is left alone after this time while others have something.
const QUIET: Duration = Duration::from_micros(100);
/// How often memory is let go that connections do not need any more.
const SWEEP: Duration = Duration::from_secs(1);
/// Sweeps after the last activity: the first one sees what is at rest, the second one lets it go.
const SWEEPS: u8 = 2;
/// Sockets whose kernel memory is looked at in a sweep.
const SHRINK: usize = 256;
/// How long to wait where a program cannot be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// A socket of the host.
struct Entry {
    wire: Arc<Wire>,
    state: State,
    /// The other end is gone altogether.
    gone: bool,
    /// What has happened at it and was not looked at yet.
    pending: EventSet,
    /// It is in the list of those that are looked at in turn.
    listed: bool,
}

enum State {
    /// A program that has not said yet which port it wants.
    Asking,
    /// It is to be connected.
    Waiting { key: Key, target: Target },
    /// It is not known yet whether the socket will be connected.
    Connecting { key: Key },
    /// It belongs to a connection.
    Relay { key: Key },
    /// Its connection is over, and its program has not read all that came before.
    Unread,
}

/// A guest at the worker.
pub(super) struct Member {
    pub guest: Arc<Guest>,
    pub listener: Option<UnixListener>,
    /// Its sockets. One for each guest: events of many sockets of one are not in the way of others' few.
    epoll: Epoll,
    entries: HashMap<u64, Entry>,
    slots: HashMap<Key, u64>,
    /// Sockets at which something has happened, in turn.
    ready: VecDeque<u64>,
    /// Sockets that are to be connected, in turn.
    opening: VecDeque<u64>,
    asking: Asking,
    /// Sockets with more kernel memory than most.
    grown: VecDeque<u64>,
    commands: Vec<Command>,
    /// There may be commands.
    pub mail: bool,
    /// There may be events of sockets.
    pub events: bool,
    /// There may be programs to accept.
    pub pending_accept: bool,
    /// It is being looked at, as it had something to do at this time.
    hot: Option<Instant>,
    /// When the next socket may be connected, if not now.
    connect_at: Option<Instant>,
    /// When the next program may be accepted, if not now.
    accept_at: Option<Instant>,
    swept: Instant,
    sweeps: u8,
    /// When it wants a turn though nothing happens.
    pub due: Option<Instant>,
    /// That time has come.
    pub late: bool,
    /// It is in the list of those that get turns.
    pub listed: bool,
}

fn says_more(events: EventSet) -> bool {
    events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR)
}

impl Member {
    /// `epoll` is for its sockets.
    pub(super) fn new(guest: Arc<Guest>, listener: Option<UnixListener>, epoll: Epoll) -> Member {
        Member {
            guest,
            pending_accept: listener.is_some(),
            listener,
            epoll,
            entries: HashMap::new(),
            slots: HashMap::new(),
            ready: VecDeque::new(),
            opening: VecDeque::new(),
            asking: Asking::default(),
            grown: VecDeque::new(),
            commands: Vec::new(),
            mail: true,
            events: false,
            hot: None,
            connect_at: None,
            accept_at: None,
            swept: Instant::now(),
            sweeps: 0,
            due: None,
            late: false,
            listed: false,
        }
    }

    /// Closes its sockets, and returns the one that programs connect to.
    pub(super) fn end(self) -> Option<UnixListener> {
        self.listener
    }

    /// Looks at its rings from now on.
    pub(super) fn start_polling(&mut self) {
        if self.hot.is_none() {
            self.guest.stack.disable_notification();
        }
        self.hot = Some(Instant::now());
    }

    /// Whether there is something to do without waiting for it.
    pub(super) fn is_busy(&self) -> bool {
        let (accepts, connects) = (self.accept_at.is_none(), self.connect_at.is_none());
        let sockets = self.events || !self.ready.is_empty();
        let waiting = self.pending_accept && accepts || !self.opening.is_empty() && connects;
        self.hot.is_some() || self.mail || sockets || waiting
    }

    /// Does some of what there is to do. Says whether there was anything.
    pub(super) fn turn(&mut self, poll: Duration) -> bool {
        let start = Instant::now();
        let until = start + TURN;
        if std::mem::take(&mut self.late) {
            self.tick(start);
        }
        let mut any = self.obey();
        // A guest whose commands are not taken up yet is not given the opportunity to cause more.
        if self.hot.is_some() && !self.mail {
            any |= self.guest.stack.work();
            any |= self.obey();
        }
        any |= self.connect(until);
        self.fetch();
        any |= self.serve(until);
        any |= self.accept(until);
        if any {
            self.sweeps = SWEEPS;
        }
        if let Some(since) = &mut self.hot {
            if any {
                *since = start;
            } else if start.duration_since(*since) > poll.max(QUIET) && !self.guest.stack.enable_notification() {
                self.hot = None;
            }
        }
        self.due = self.next();
        any
    }

    /// Leaves its rings alone if there was nothing for a while. `false`: not yet.
    pub(super) fn try_idle(&mut self, poll: Duration) -> bool {
        if let Some(since) = self.hot {
            if since.elapsed() < poll || self.guest.stack.enable_notification() {
                return false;
            }
            self.hot = None;
        }
        !self.is_busy()
    }

    fn next(&self) -> Option<Instant> {
        let sweep = (self.sweeps > 0).then(|| self.swept + SWEEP);
        let times = [self.guest.stack.next_deadline(), self.asking.deadline(), self.connect_at, self.accept_at, sweep];
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
            let Some(slot) = self.asking.late(now) else { break };
            self.turn_away(slot, format_args!("it has not sent \"CONNECT <port>\" in time"));
        }
        self.connect_at = self.connect_at.filter(|&time| time > now);
        self.accept_at = self.accept_at.filter(|&time| time > now);
    }

    /// Sockets whose programs have read everything give kernel memory back, if others may want it.
    fn shrink(&mut self) {
        if !self.guest.budget.is_tight() {
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

    /// Takes up what its stack wants. Says whether there was anything.
    fn obey(&mut self) -> bool {
        let mut commands = std::mem::take(&mut self.commands);
        let (work, more) = self.guest.mail.take(COMMANDS, &mut commands);
        self.mail = more;
        if work {
            self.start_polling();
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
                        && !wire.is_over()
                    {
                        let stack = &self.guest.stack;
                        if reset { stack.reset_relay(*key) } else { stack.shut_relay_read(*key) }
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
        self.entries.insert(slot, Entry { wire, state, gone: false, pending: EventSet::empty(), listed: false });
    }

    /// Wants to hear what happens at a socket. If it cannot, nobody can use it.
    fn watch(&self, wire: &Wire) -> bool {
        let Some(socket) = wire.socket() else { return false };
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
        let added = add(&self.epoll, socket.as_raw_fd(), wire.slot, events);
        if let Err(error) = &added {
            self.guest.say(Level::Error, format_args!("cannot wait for a socket of the host: {error}"));
        }
        added.is_ok()
    }

    /// Connects some of the sockets that the guest has asked for. Says whether there were any.
    fn connect(&mut self, until: Instant) -> bool {
        let mut any = false;
        while self.connect_at.is_none()
            && let Some(&slot) = self.opening.front()
        {
            let entry = self.entries.get_mut(&slot);
            let Some(Entry { wire, state: state @ State::Waiting { .. }, .. }) = entry else {
                // It was given up meanwhile.
                self.opening.pop_front();
                self.guest.budget.settled();
                continue;
            };
            if self.guest.budget.connects.take().is_none() {
                self.connect_at = self.guest.budget.connects.until();
                break;
            }
            self.opening.pop_front();
            self.guest.budget.settled();
            any = true;
            let State::Waiting { key, ref target } = *state else { continue };
            let result = wire.connect(target);
            *state = if let Ok(false) = result { State::Connecting { key } } else { State::Relay { key } };
            let wire = wire.clone();
            let there = result.is_ok() && self.watch(&wire);
            match result {
                Ok(false) if there => {}
                Ok(_) => self.finish_open(&wire, key, there),
                Err(error) => {
                    self.guest.say(Level::Debug, format_args!("no way to port {} of the host: {error}", key.port));
                    self.finish_open(&wire, key, false);
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// It is known whether a socket is connected.
    fn finish_open(&self, wire: &Wire, key: Key, there: bool) {
        if !wire.is_over() {
            self.guest.stack.finish_open(key, there);
        }
    }

    /// Takes up some of what has happened at its sockets.
    fn fetch(&mut self) {
        if !self.events {
            return;
        }
        let mut events = [EpollEvent::default(); EVENTS];
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        // Edge-triggered: there will be word of more only if this was all.
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

    /// Looks at sockets at which something has happened, in turn. Says whether there was anything.
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

    /// Says how many bytes were moved, about.
    fn serve_one(&mut self, slot: u64) -> usize {
        let Some(entry) = self.entries.get_mut(&slot) else { return 0 };
        entry.listed = false;
        let events = std::mem::replace(&mut entry.pending, EventSet::empty());
        if let State::Unread = entry.state {
            self.close(slot);
            return 0;
        }
        if entry.wire.is_over() {
            return 0;
        }
        entry.gone |= events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        match entry.state {
            State::Asking => {
                self.ask(slot);
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
                entry.gone = false;
                let wire = entry.wire.clone();
                self.finish_open(&wire, key, there);
            }
            State::Relay { key } => {
                if events.contains(EventSet::OUT) {
                    self.guest.stack.drain(key);
                }
            }
        }
        if says_more(events) { self.read(slot) } else { 0 }
    }

    /// Reads a packet's worth from a socket, straight into its guest's buffers. Says how many bytes.
    fn read(&mut self, slot: u64) -> usize {
        let Some(Entry { wire, state: State::Relay { key }, gone, .. }) = self.entries.get(&slot) else { return 0 };
        let Some(socket) = wire.socket() else { return 0 };
        let (key, gone, stack) = (*key, *gone, &self.guest.stack);
        // An error of the socket, not of the connection.
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
            // No credit, no room, or no connection yet: there will be word of it. Nothing to read: an event.
            (Ok(None), _) | (_, Some(io::ErrorKind::WouldBlock)) => {}
            (Err(error), None) if error.kind() == io::ErrorKind::NotConnected => {}
            (Err(_), None) => {
                if gone {
                    // It had said all before that.
                    stack.shut_relay(key, true);
                }
                // The guest takes no more: a program that goes on writing should know.
                let _ = socket.shutdown(Shutdown::Read);
            }
            (Err(_), Some(error)) if is_reset(socket, error) => stack.reset_relay(key),
            // Its program has said all, or is gone.
            (Ok(Some(0)), _) | (Err(_), Some(_)) => stack.shut_relay(key, gone || failed.is_some()),
        }
        0
    }

    /// Accepts some of the programs that have connected to its socket. Says whether there were any.
    fn accept(&mut self, until: Instant) -> bool {
        let mut any = false;
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listener.as_ref().filter(|_| self.pending_accept && self.accept_at.is_none())
            else {
                break;
            };
            let Some(place) = self.guest.budget.admit() else {
                match self.asking.oldest() {
                    Some(slot) => self.turn_away(slot, format_args!("all of the guest's sockets are in use")),
                    None => self.pause(&"all of the guest's sockets are in use"),
                }
                continue;
            };
            let socket = match listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    if error.kind() == io::ErrorKind::WouldBlock {
                        self.pending_accept = false;
                    } else {
                        self.pause(&error);
                    }
                    break;
                }
            };
            any = true;
            if socket.set_nonblocking(true).is_ok() {
                let process = sys::peer_process(socket.as_fd());
                let wire = Arc::new(Wire::accepted(&self.guest.mail, place, Socket::from(socket)));
                self.welcome(wire, process);
            }
            if Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// A program has connected. Who says at once what it wants is served at once; else it may cost another one its place.
    fn welcome(&mut self, wire: Arc<Wire>, process: i32) {
        if !self.watch(&wire) {
            return;
        }
        let slot = wire.slot;
        let entry = Entry { wire, state: State::Asking, gone: false, pending: EventSet::empty(), listed: false };
        self.entries.insert(slot, entry);
        self.asking.insert(slot, process, Instant::now());
        self.ask(slot);
        if let Some(oldest) = self.asking.surplus() {
            self.turn_away(oldest, format_args!("it was silent for long, and too many others want its place"));
        }
    }

    /// Nobody can be accepted for a while.
    fn pause(&mut self, why: &dyn Display) {
        self.accept_at = Some(Instant::now() + PAUSE);
        let path = self.guest.host_path();
        self.guest.say(Level::Warn, format_args!("cannot accept a program on {path}: {why}; trying again"));
    }

    /// A program that has connected may have said which port it wants.
    fn ask(&mut self, slot: u64) {
        let Some(entry) = self.entries.get(&slot) else { return };
        let Some(socket) = entry.wire.socket() else { return };
        let mut line = [0; LINE];
        let (port, len) = match sys::peek(socket.as_fd(), &mut line) {
            Ok(0) => return self.turn_away(slot, format_args!("it has gone before it said which port it wants")),
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
        let relay = HostRelay { wire: entry.wire.clone(), asked: true };
        let peer = Addr { cid: self.guest.cid, port };
        match self.guest.stack.connect_relay(peer, SocketType::Stream, relay) {
            Ok(key) => {
                self.asking.remove(slot);
                self.slots.insert(key, slot);
                if let Some(entry) = self.entries.get_mut(&slot) {
                    entry.state = State::Relay { key };
                }
                self.start_polling();
            }
            Err(error) => self.turn_away(slot, format_args!("port {port}: {error}")),
        }
    }

    fn turn_away(&mut self, slot: u64, why: Arguments<'_>) {
        if self.asking.remove(slot) {
            self.entries.remove(&slot);
            self.guest.budget.turned_away.fetch_add(1, Ordering::Relaxed);
            let path = self.guest.host_path();
            self.guest.say(Level::Warn, format_args!("a program on {path} was turned away: {why}"));
        }
    }

    fn close(&mut self, slot: u64) {
        let Some(entry) = self.entries.get_mut(&slot) else { return };
        let last = std::mem::replace(&mut entry.state, State::Unread);
        if let State::Waiting { key, .. } | State::Connecting { key } | State::Relay { key } = last
            && self.slots.get(&key) == Some(&slot)
        {
            self.slots.remove(&key);
            // Its program should know, whatever becomes of the socket.
            if entry.wire.is_unread() {
                entry.wire.socket().inspect(|socket| _ = socket.shutdown(Shutdown::Both));
            }
        }
        // There will be word when it has read something.
        if !entry.wire.is_unread() {
            self.entries.remove(&slot);
            // There is a place for somebody who waits.
            self.accept_at = None;
        }
    }
}
