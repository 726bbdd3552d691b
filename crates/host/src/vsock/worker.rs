//! The thread that serves all vsock devices of a program: moves packets, reads the sockets of the host, keeps time.

use super::{
    HostSide,
    guest::Guest,
    relay::{HostRelay, LINE, enlarge, is_reset, parse},
};
use crate::sys;
use parking_lot::Mutex;
use ringroad_vsock::{Addr, Hub, Key, Kind, MAX_PACKET};
use socket2::Socket;
use std::{
    collections::{HashMap, VecDeque},
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::net::UnixListener,
    },
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle, ThreadId},
    time::{Duration, Instant},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

/// How long a program has to send its line "CONNECT".
const PATIENCE: Duration = Duration::from_secs(5);
/// Programs that have not sent it yet, for each guest, at most. Others wait to be accepted.
const ASKING: usize = 256;
/// How often memory is let go that connections do not need any more.
const SWEEP: Duration = Duration::from_secs(1);

pub(super) enum Command {
    Add(Arc<Guest>, Option<UnixListener>, mpsc::Sender<()>),
    Remove(u32, mpsc::Sender<()>),
    /// Programs connect there from now on.
    Listen(u32, Option<UnixListener>, mpsc::Sender<()>),
    Configure(Option<usize>, Duration, mpsc::Sender<io::Result<()>>),
    /// There is something to do at a guest's stack.
    Work(u32),
    /// A connection can be sent to again.
    Room(u32, Key),
    /// A socket for a connection that a guest has asked for.
    Relay {
        guest: u32,
        slot: u64,
        key: Key,
        socket: Arc<Socket>,
        connected: bool,
    },
    /// A socket takes no more; `true`: it was reset.
    Failed(u64, bool),
    /// A connection is over.
    Close(u64),
    Stop,
}

/// What is needed to reach the worker from any thread.
pub(super) struct Shared {
    epoll: Epoll,
    wake: EventFd,
    thread: OnceLock<ThreadId>,
    commands: Mutex<Vec<Command>>,
    pending: AtomicBool,
    guests: AtomicU32,
    slots: AtomicU64,
}

/// What an event is about, as 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Wake,
    /// A guest has kicked.
    Kick(u32),
    /// A program connects to a guest's socket.
    Listener(u32),
    /// A socket with this number.
    Slot(u64),
}

impl Token {
    const KIND: u32 = 60;

    fn to_data(self) -> u64 {
        match self {
            Token::Wake => 0,
            Token::Kick(guest) => 1 << Self::KIND | u64::from(guest),
            Token::Listener(guest) => 2 << Self::KIND | u64::from(guest),
            Token::Slot(slot) => 3 << Self::KIND | slot,
        }
    }

    fn from_data(data: u64) -> Token {
        match data >> Self::KIND {
            0 => Token::Wake,
            1 => Token::Kick(data as u32),
            2 => Token::Listener(data as u32),
            _ => Token::Slot(data & ((1 << Self::KIND) - 1)),
        }
    }
}

impl Shared {
    pub(super) fn send(&self, command: Command) {
        self.commands.lock().push(command);
        self.pending.store(true, Ordering::Release);
        // The worker itself looks at the list before it sleeps.
        if self.thread.get() != Some(&thread::current().id()) {
            let _ = self.wake.write(1);
        }
    }

    /// A number for a socket.
    pub(super) fn slot(&self) -> u64 {
        self.slots.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn close(&self, _guest: u32, slot: u64) {
        self.send(Command::Close(slot));
    }

    /// From now on a readable descriptor is a guest's kick. Edge-triggered, so that nobody need read it.
    pub(super) fn watch(&self, guest: u32, fd: RawFd) -> io::Result<()> {
        self.add(fd, Token::Kick(guest), EventSet::IN)
    }

    pub(super) fn unwatch(&self, fd: RawFd) {
        let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }

    fn add(&self, fd: RawFd, token: Token, events: EventSet) -> io::Result<()> {
        let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token.to_data());
        self.epoll.ctl(ControlOperation::Add, fd, event)
    }
}

/// A running worker for vsock devices.
pub struct VsockWorker {
    pub(super) shared: Arc<Shared>,
    pub(super) hub: Arc<Hub<HostSide>>,
    thread: Option<JoinHandle<()>>,
}

impl VsockWorker {
    /// Starts the thread, on a CPU or any. It looks for `poll` after the last packet before it sleeps. `connections`: how many
    /// each guest may have with others that it has asked for.
    pub fn start(cpu: Option<usize>, poll: Duration, connections: usize) -> io::Result<VsockWorker> {
        let shared = Arc::new(Shared {
            epoll: Epoll::new()?,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            thread: OnceLock::new(),
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            guests: AtomicU32::new(0),
            slots: AtomicU64::new(0),
        });
        shared.add(shared.wake.as_raw_fd(), Token::Wake, EventSet::IN)?;
        let (started, result) = mpsc::channel();
        let thread = {
            let shared = shared.clone();
            thread::Builder::new().name("vsock".into()).spawn(move || {
                let _ = shared.thread.set(thread::current().id());
                let pinned = cpu.map_or(Ok(()), sys::pin_current_thread);
                let go = pinned.is_ok();
                let _ = started.send(pinned);
                if go {
                    Loop::new(&shared, poll).run();
                }
            })?
        };
        result.recv().unwrap_or_else(|_| Err(io::Error::other("the vsock worker has ended")))?;
        Ok(VsockWorker { shared, hub: Hub::new(connections), thread: Some(thread) })
    }

    /// Has it run on another CPU, or any, and look for `poll` after the last packet.
    ///
    /// # Errors
    /// The CPU is not there or not allowed; it stays where it was.
    pub fn set(&self, cpu: Option<usize>, poll: Duration) -> io::Result<()> {
        let (sender, done) = mpsc::channel();
        self.shared.send(Command::Configure(cpu, poll, sender));
        done.recv().unwrap_or_else(|_| Err(io::Error::other("the vsock worker has ended")))
    }

    /// A number for a guest.
    pub(super) fn number(&self) -> u32 {
        self.shared.guests.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn add(&self, guest: Arc<Guest>, listener: Option<UnixListener>) -> io::Result<()> {
        let (sender, added) = mpsc::channel();
        self.shared.send(Command::Add(guest, listener, sender));
        added.recv().map_err(|_| io::Error::other("the vsock worker has ended"))
    }
}

impl Drop for VsockWorker {
    fn drop(&mut self) {
        self.shared.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A guest at the worker.
struct Member {
    guest: Arc<Guest>,
    listener: Option<UnixListener>,
    /// Programs that have not said yet which port they want.
    asking: usize,
    /// There may be programs to accept.
    knocking: bool,
    /// It is being looked at, as it had something to do at this time.
    hot: Option<Instant>,
}

/// A socket of the host.
struct Entry {
    guest: u32,
    socket: Arc<Socket>,
    state: State,
    /// The other end is gone altogether.
    gone: bool,
    /// It is in the list of those that may be read.
    listed: bool,
}

enum State {
    /// A program that has not said yet which port it wants.
    Asking { until: Instant },
    /// It is not known yet whether the socket will be connected.
    Connecting { key: Key },
    /// It belongs to a connection.
    Relay { key: Key },
}

struct Loop<'a> {
    shared: &'a Arc<Shared>,
    poll: Duration,
    members: HashMap<u32, Member>,
    entries: HashMap<u64, Entry>,
    slots: HashMap<(u32, Key), u64>,
    /// Sockets that may have something to read, in turn.
    ready: VecDeque<u64>,
    faults: u64,
    swept: Instant,
}

impl<'a> Loop<'a> {
    fn new(shared: &'a Arc<Shared>, poll: Duration) -> Self {
        Loop {
            shared,
            poll,
            members: HashMap::new(),
            entries: HashMap::new(),
            slots: HashMap::new(),
            ready: VecDeque::new(),
            faults: ringroad_mem::faults(),
            swept: Instant::now(),
        }
    }

    fn run(mut self) {
        let mut events = [EpollEvent::default(); 64];
        let mut rounds = 0u32;
        loop {
            if self.shared.pending.load(Ordering::Acquire) && !self.obey() {
                return;
            }
            let mut any = self.work();
            any |= self.read();
            rounds = rounds.wrapping_add(1);
            if any && !rounds.is_multiple_of(16) {
                continue;
            }
            if ringroad_mem::faults() != self.faults {
                self.faults = ringroad_mem::faults();
                self.members.values().for_each(|member| member.guest.check_memory());
            }
            if !any && !self.rest() {
                any = true;
            }
            let timeout = if any || self.shared.pending.load(Ordering::Acquire) { 0 } else { self.timeout() };
            let count = self.shared.epoll.wait(timeout, &mut events).unwrap_or(0);
            for event in events.iter().take(count) {
                self.event(Token::from_data(event.data()), event.event_set());
            }
            if timeout != 0 || rounds.is_multiple_of(1024) {
                self.tick();
            }
        }
    }

    /// Does the work of guests that have some. Says whether there was any.
    fn work(&mut self) -> bool {
        let mut any = false;
        for member in self.members.values_mut() {
            if member.hot.is_some() && member.guest.stack.work() {
                member.hot = Some(Instant::now());
                any = true;
            }
        }
        any
    }

    /// Leaves guests alone that had nothing to do for a while. `false`: not all of them.
    fn rest(&mut self) -> bool {
        let mut all = true;
        for member in self.members.values_mut() {
            let Some(since) = member.hot else { continue };
            if since.elapsed() < self.poll || member.guest.stack.rest() {
                all = false;
            } else {
                member.hot = None;
            }
        }
        if !all {
            // Programs of the host that it has just served may be waiting for this CPU.
            thread::yield_now();
        }
        all && self.ready.is_empty()
    }

    fn heat(&mut self, guest: u32) {
        if let Some(member) = self.members.get_mut(&guest) {
            if member.hot.is_none() {
                member.guest.stack.awake();
            }
            member.hot = Some(Instant::now());
        }
    }

    /// Milliseconds to sleep.
    fn timeout(&self) -> i32 {
        let guests = self.members.values().filter_map(|member| member.guest.stack.next_deadline());
        let asking = self.entries.values().filter_map(|entry| match entry.state {
            State::Asking { until } => Some(until),
            _ => None,
        });
        let Some(next) = guests.chain(asking).min() else { return -1 };
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up: else it would wake just before, again and again.
        (left.as_millis() + 1).min(i32::MAX as u128) as i32
    }

    fn tick(&mut self) {
        let now = Instant::now();
        for member in self.members.values() {
            if member.guest.stack.next_deadline().is_some_and(|time| time <= now) {
                member.guest.stack.tick(now);
            }
        }
        let late = |entry: &Entry| matches!(entry.state, State::Asking { until } if until <= now);
        let late: Vec<u64> = self.entries.iter().filter(|(_, entry)| late(entry)).map(|(&slot, _)| slot).collect();
        for slot in late {
            self.turn_away(slot, "it has not sent \"CONNECT <port>\" in time");
        }
        if now.duration_since(self.swept) >= SWEEP {
            self.swept = now;
            self.members.values().for_each(|member| member.guest.stack.sweep());
        }
    }

    fn event(&mut self, token: Token, events: EventSet) {
        match token {
            Token::Wake => {}
            Token::Kick(guest) => self.heat(guest),
            Token::Listener(guest) => self.accept(guest),
            Token::Slot(slot) => self.socket_event(slot, events),
        }
    }

    fn socket_event(&mut self, slot: u64, events: EventSet) {
        let Some(entry) = self.entries.get_mut(&slot) else { return };
        entry.gone |= events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        match entry.state {
            State::Asking { .. } => return self.ask(slot),
            State::Connecting { key } => {
                let guest = entry.guest;
                let there = match entry.socket.take_error() {
                    Ok(None) if events.contains(EventSet::OUT) => true,
                    Ok(None) => return,
                    _ => false,
                };
                entry.state = State::Relay { key };
                entry.gone = false;
                if let Some(member) = self.members.get(&guest) {
                    member.guest.stack.settle(key, there);
                }
            }
            State::Relay { key } => {
                let guest = entry.guest;
                if events.contains(EventSet::OUT)
                    && let Some(member) = self.members.get(&guest)
                {
                    member.guest.stack.drain(key);
                }
            }
        }
        if events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR) {
            self.list(slot);
        }
    }

    fn list(&mut self, slot: u64) {
        if let Some(entry) = self.entries.get_mut(&slot)
            && !std::mem::replace(&mut entry.listed, true)
        {
            self.ready.push_back(slot);
        }
    }

    /// Reads each socket that may have something, a packet's worth, straight into its guest's buffers. Says whether there was
    /// anything.
    fn read(&mut self) -> bool {
        let mut any = false;
        for _ in 0..self.ready.len() {
            let Some(slot) = self.ready.pop_front() else { break };
            let Some(entry) = self.entries.get_mut(&slot) else { continue };
            let State::Relay { key } = entry.state else {
                entry.listed = false;
                continue;
            };
            let Some(member) = self.members.get(&entry.guest) else { continue };
            let (socket, stack) = (&*entry.socket, &member.guest.stack);
            // An error of the socket, not of the connection.
            let mut failed = None;
            let mut note = |result: io::Result<usize>| result.inspect_err(|error| failed = Some(error.kind()));
            let note = std::cell::RefCell::new(&mut note);
            let sent = stack.send_from(
                key,
                MAX_PACKET,
                &mut |spans| note.borrow_mut()(sys::receive_spans(socket.as_fd(), spans)),
                &mut |bytes| note.borrow_mut()(io::Read::read(&mut { socket }, bytes)),
            );
            match (sent, failed) {
                (Ok(Some(1..)), _) | (_, Some(io::ErrorKind::Interrupted)) => {
                    any = true;
                    self.ready.push_back(slot);
                    continue;
                }
                // No credit, no room, or no connection yet: there will be word of it. Nothing to read: an event.
                (Ok(None), _) | (_, Some(io::ErrorKind::WouldBlock)) => {}
                (Err(error), None) if error.kind() == io::ErrorKind::NotConnected => {}
                (Err(_), None) => {
                    if entry.gone {
                        // It had said all before that.
                        stack.shut_relay(key, true);
                    }
                    // The guest takes no more: a program that goes on writing should know.
                    let _ = socket.shutdown(Shutdown::Read);
                }
                (Err(_), Some(error)) if is_reset(socket, error) => stack.reset_relay(key),
                // Its program has said all, or is gone.
                (Ok(Some(0)), _) | (Err(_), Some(_)) => stack.shut_relay(key, entry.gone || failed.is_some()),
            }
            entry.listed = false;
        }
        any
    }

    /// Programs connect to this socket of a guest from now on; the one before, if there was one, is closed.
    fn listen(&mut self, guest: u32, listener: Option<UnixListener>) {
        let Some(member) = self.members.get_mut(&guest) else { return };
        let watched = listener
            .as_ref()
            .map_or(Ok(()), |listener| self.shared.add(listener.as_raw_fd(), Token::Listener(guest), EventSet::IN));
        if let Err(error) = watched {
            log::error!("{}: cannot wait for programs: {error}", member.guest.name);
        }
        member.listener = listener;
        self.accept(guest);
    }

    fn accept(&mut self, guest: u32) {
        let Some(member) = self.members.get_mut(&guest) else { return };
        let Some(listener) = &member.listener else { return };
        loop {
            if member.asking >= ASKING {
                member.knocking = true;
                return;
            }
            let socket = match listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    member.knocking = error.kind() != io::ErrorKind::WouldBlock;
                    if member.knocking {
                        log::warn!("{}: cannot accept a program: {error}", member.guest.name);
                    }
                    return;
                }
            };
            if socket.set_nonblocking(true).is_err() {
                continue;
            }
            let slot = self.shared.slot();
            let socket = Arc::new(Socket::from(socket));
            enlarge(&socket);
            let state = State::Asking { until: Instant::now() + PATIENCE };
            let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
            if self.shared.add(socket.as_raw_fd(), Token::Slot(slot), events).is_ok() {
                member.asking += 1;
                self.entries.insert(slot, Entry { guest, socket, state, gone: false, listed: false });
            }
        }
    }

    /// A program that has connected may have said which port it wants.
    fn ask(&mut self, slot: u64) {
        let Some(entry) = self.entries.get(&slot) else { return };
        let mut line = [0; LINE];
        let (port, len) = match sys::peek(entry.socket.as_fd(), &mut line) {
            Ok(0) => return self.turn_away(slot, "it has gone before it said which port it wants"),
            Ok(len) => match parse(&line[..len]) {
                None => return,
                Some(Ok(found)) => found,
                Some(Err(expected)) => {
                    let found = String::from_utf8_lossy(&line[..len]).escape_debug().to_string();
                    return self.turn_away(slot, &format!("{expected}, found \"{found}\""));
                }
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => return self.turn_away(slot, &error.to_string()),
        };
        let _ = io::Read::read(&mut &*entry.socket, &mut line[..len]);
        let (guest, socket) = (entry.guest, entry.socket.clone());
        let Some(member) = self.members.get_mut(&guest) else { return };
        let relay = HostRelay { socket, slot, guest, worker: self.shared.clone(), asked: true };
        let peer = Addr { cid: member.guest.cid, port };
        match member.guest.stack.connect_relay(peer, Kind::Stream, relay) {
            Ok(key) => {
                member.asking -= 1;
                self.slots.insert((guest, key), slot);
                if let Some(entry) = self.entries.get_mut(&slot) {
                    entry.state = State::Relay { key };
                }
                self.heat(guest);
                self.knock(guest);
            }
            Err(error) => self.turn_away(slot, &format!("port {port}: {error}")),
        }
    }

    /// Somebody who waits to be accepted can be now.
    fn knock(&mut self, guest: u32) {
        if let Some(member) = self.members.get_mut(&guest)
            && std::mem::take(&mut member.knocking)
        {
            self.accept(guest);
        }
    }

    fn turn_away(&mut self, slot: u64, why: &str) {
        let Some(entry) = self.entries.remove(&slot) else { return };
        let Some(member) = self.members.get_mut(&entry.guest) else { return };
        if member.guest.may_log() {
            log::warn!("{}: a program on {} was turned away: {why}", member.guest.name, member.guest.host_path());
        }
        member.asking -= 1;
        self.knock(entry.guest);
    }

    fn close(&mut self, slot: u64) {
        let Some(entry) = self.entries.remove(&slot) else { return };
        if let State::Relay { key } | State::Connecting { key } = entry.state {
            self.slots.remove(&(entry.guest, key));
        }
        self.shared.unwatch(entry.socket.as_raw_fd());
        self.knock(entry.guest);
    }

    /// Takes up what others want. `false`: to stop.
    fn obey(&mut self) -> bool {
        self.shared.pending.store(false, Ordering::Relaxed);
        let commands = std::mem::take(&mut *self.shared.commands.lock());
        for command in commands {
            match command {
                Command::Add(guest, listener, reply) => {
                    let number = guest.number;
                    let member = Member { guest, listener: None, asking: 0, knocking: false, hot: None };
                    self.members.insert(number, member);
                    self.listen(number, listener);
                    let _ = reply.send(());
                }
                Command::Listen(number, listener, reply) => {
                    self.listen(number, listener);
                    let _ = reply.send(());
                }
                Command::Configure(cpu, poll, reply) => {
                    self.poll = poll;
                    let _ = reply.send(cpu.map_or_else(sys::unpin_current_thread, sys::pin_current_thread));
                }
                Command::Remove(number, reply) => {
                    if let Some(member) = self.members.remove(&number) {
                        member.guest.stack.reset();
                    }
                    self.entries.retain(|_, entry| entry.guest != number);
                    self.slots.retain(|&(guest, _), _| guest != number);
                    let _ = reply.send(());
                }
                Command::Work(guest) => self.heat(guest),
                Command::Room(guest, key) => {
                    if let Some(&slot) = self.slots.get(&(guest, key)) {
                        self.list(slot);
                    }
                }
                Command::Relay { guest, slot, key, socket, connected } => {
                    let state = if connected { State::Relay { key } } else { State::Connecting { key } };
                    let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
                    if let Err(error) = self.shared.add(socket.as_raw_fd(), Token::Slot(slot), events) {
                        log::error!("vsock: cannot wait for a socket of the host: {error}");
                    }
                    self.slots.insert((guest, key), slot);
                    self.entries.insert(slot, Entry { guest, socket, state, gone: false, listed: false });
                }
                Command::Failed(slot, reset) => {
                    if let Some(&Entry { guest, state: State::Relay { key }, .. }) = self.entries.get(&slot)
                        && let Some(member) = self.members.get(&guest)
                    {
                        let stack = &member.guest.stack;
                        if reset { stack.reset_relay(key) } else { stack.deafen_relay(key) }
                    }
                }
                Command::Close(slot) => self.close(slot),
                Command::Stop => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Token;

    #[test]
    fn tokens_come_back_as_they_were() {
        for token in
            [Token::Wake, Token::Kick(7), Token::Listener(u32::MAX), Token::Slot(0), Token::Slot((1 << 60) - 1)]
        {
            assert_eq!(Token::from_data(token.to_data()), token);
        }
    }
}
