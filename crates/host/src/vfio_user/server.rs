//! The thread of a vfio-user socket: accepts clients and serves one connection at a time.

use super::{
    VfioDevice,
    connection::{Connection, End},
    lending::{Client, Lending},
    messages::{NO_REPLY, command, send},
    session::{Session, SessionContext, is_quick},
};
use crate::{
    Quota,
    socket::{
        Access, Current, Disposal, Door, EXCLUSION, Limits, Lines, Peer, Place, Serving, SocketError, bind, close, say,
    },
    sys,
};
use parking_lot::Mutex;
use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Interval at which a thread polls a condition that has no event.
const RECHECK: Duration = Duration::from_millis(5);

/// After so many messages without a wait, other events have their turn.
const TURN: u32 = 64;

/// Configuration of a socket and of what its clients may do.
#[derive(Clone, Copy, Debug)]
pub struct ServerConfig<'a> {
    /// Name in log lines.
    pub name: &'a str,
    /// Where it is.
    pub path: &'a Path,
    /// Limits of its clients. Register accesses are not limited by `messages`: they are what a device is for, and cost nobody
    /// else's time, or that of a turn of the device's queue.
    pub limits: Limits,
    /// Who may connect.
    pub access: Access,
    /// How long the thread polls for the client's next message before it sleeps, at most.
    pub poll: Duration,
}

impl<'a> ServerConfig<'a> {
    /// A socket with this name and path, for this user only, with the default limits.
    pub fn new(name: &'a str, path: &'a Path) -> ServerConfig<'a> {
        ServerConfig { name, path, ..ServerConfig::default() }
    }
}

impl Default for ServerConfig<'_> {
    /// A socket for this user only, with the default limits, whose thread does not poll. Name and path are empty.
    fn default() -> Self {
        let (limits, access) = (Limits::default(), Access::default());
        ServerConfig { name: "", path: Path::new(""), limits, access, poll: Duration::ZERO }
    }
}

/// Quick writes of a client before it is lent.
const WRITES: u32 = 16;

/// A socket with a PCI device behind it, and the thread that serves it. Dropped, it disconnects the client and removes the socket.
pub struct Server {
    serving: Serving,
    place: Place,
    limits: Arc<Mutex<Limits>>,
    connects: Arc<Quota>,
    lines: Lines,
    set_poll: Box<dyn Fn(Duration) + Send + Sync>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Server").field("name", &self.serving.name).finish_non_exhaustive()
    }
}

impl Server {
    /// Serves a device at a socket.
    ///
    /// # Errors
    /// The socket cannot be created or its owner and mode not be set, or the system has no more threads or descriptors.
    pub fn start<D: VfioDevice>(config: ServerConfig<'_>, device: D) -> Result<Server, SocketError> {
        let lending = Lending::new(|_, _, _| false);
        let lending = lending.map_err(|error| SocketError::Start { name: config.name.to_owned(), error })?;
        Server::start_with(config, device, Arc::new(lending))
    }

    /// The same, for a device whose queues another thread polls: its client is lent to that thread.
    pub(crate) fn start_with<D: VfioDevice>(
        config: ServerConfig<'_>,
        device: D,
        lending: Arc<Lending<D>>,
    ) -> Result<Server, SocketError> {
        let ServerConfig { name, path, limits, access, poll } = config;
        let failed = |error: io::Error| SocketError::Start { name: name.to_owned(), error };
        let (listener, place) = bind(name, path, access)?;
        sys::guard::start().map_err(failed)?;
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let peer = Arc::new(Peer::new().map_err(failed)?);
        let (lines, connects) = (Lines::new(name, limits.lines), Arc::new(limits.connects.quota()));
        let limits = Arc::new(Mutex::new(limits));
        let context =
            SessionContext { limits: limits.clone(), lines: lines.clone(), peer, disposal: Disposal::default() };
        let current = Current::default();
        lending.set_poll(poll);
        let thread = {
            let (stop, name) = (stop.try_clone().map_err(failed)?, device.name().to_owned());
            let (path, listener, peer) = (path.to_owned(), Some(listener), "client");
            let door = Door { name, peer, listener, path, stop, connects: connects.clone(), lines: lines.clone() };
            let thread = Thread { device, current: current.clone(), door, context, lending: lending.clone() };
            thread::Builder::new()
                .name(format!("vfio {name}", name = config.name))
                .stack_size(256 << 10)
                .spawn(move || thread.run())
        };
        let thread = Some(thread.map_err(failed)?);
        let serving = Serving { name: name.to_owned(), peer: "client", stop, current, thread };
        let set_poll = Box::new(move |time| lending.set_poll(time));
        Ok(Server { serving, place, limits, connects, lines, set_poll })
    }

    /// Changes [`ServerConfig::poll`].
    pub fn set_poll(&self, time: Duration) {
        (self.set_poll)(time);
    }

    /// Changes limits and access. Limits on messages and refusals take effect with the next connection.
    ///
    /// # Errors
    /// Owner or mode cannot be changed; the limits are in effect nevertheless.
    pub fn set(&self, limits: Limits, access: Access) -> Result<(), SocketError> {
        *self.limits.lock() = limits;
        self.connects.set(limits.connects.burst, limits.connects.rate);
        self.lines.set(limits.lines);
        self.place.give(&self.serving.name, access)
    }
}

struct Thread<D: VfioDevice> {
    device: D,
    current: Current,
    door: Door,
    context: SessionContext,
    lending: Arc<Lending<D>>,
}

impl<D: VfioDevice> Thread<D> {
    fn run(&self) {
        let (name, lines) = (self.device.name(), &self.context.lines);
        while let Some(stream) = self.next_client() {
            match sys::peer_of(stream.as_fd()) {
                Some((process, user)) => say!(lines, Info, "{name}: client connected, process {process}, user {user}"),
                None => say!(lines, Info, "{name}: client connected"),
            }
            let session = Session::new(self.device.clone(), self.context.clone());
            let connection = Connection::new(stream, self.context.limits.lock().messages.quota());
            let mut client = Some(Box::new(Client::new(connection, session)));
            // A panic is a bug in ringroad; a client that triggers one loses its own connection and nothing else.
            let end = catch_unwind(AssertUnwindSafe(|| self.serve(&mut client)));
            // Takes the memory from the device. Not within the call above: a panic during unwinding aborts the process.
            let stopped = catch_unwind(AssertUnwindSafe(|| {
                self.release(client.or_else(|| self.lending.recall()));
                self.device.disconnected();
            }));
            close(&self.current);
            // Also of a client that has left since.
            let end = end.map(|end| if self.context.peer.has_blocked() { End::Excluded } else { end });
            self.context.peer.reset();
            let excluded = matches!(end, Ok(End::Excluded));
            self.say(end);
            if stopped.is_err() {
                log::error!(
                    "{name}: a panic while the device was stopped, a bug in ringroad; please report it; its socket is closed"
                );
                return;
            }
            if excluded && self.door.stops_within(EXCLUSION) {
                return;
            }
        }
    }

    /// Waits for a client. Returns `None` if the thread is to stop.
    fn next_client(&self) -> Option<UnixStream> {
        while self.context.disposal.is_busy() {
            if self.door.stops_within(RECHECK) {
                return None;
            }
        }
        self.door.next()
    }

    /// Logs and counts how a connection ended.
    fn say(&self, end: thread::Result<End>) {
        let (name, lines) = (self.device.name(), &self.context.lines);
        if !matches!(end, Ok(End::Closed(_))) {
            self.device.count_fault();
        }
        match end {
            Ok(End::Closed(why)) => say!(lines, Info, "{name}: client disconnected: {why}"),
            Ok(End::Violation(why)) => say!(lines, Error, "{name}: {why}; disconnected"),
            Ok(End::Excluded) => say!(
                lines,
                Error,
                "{name}: client disconnected: a write to the descriptor of an interrupt blocked (counter full and O_NONBLOCK \
                 cleared), expected one that does not block; no new connection for {EXCLUSION:?}"
            ),
            Err(_) => say!(
                lines,
                Error,
                "{name}: client disconnected: a panic in its session, a bug in ringroad; please report it"
            ),
        }
    }

    /// Serves one connection and returns why it ended. Where the client is then: here, or still lent.
    fn serve(&self, client: &mut Option<Box<Client<D>>>) -> End {
        let stream = client.as_ref().map(|client| client.connection.stream.try_clone());
        match stream.transpose() {
            Ok(stream) => *self.current.lock() = stream,
            Err(error) => return error.into(),
        }
        self.context.peer.reset();
        while let Some(own) = client {
            if let Err(end) = self.serve_own(own) {
                return end;
            }
            if let Some(own) = client.take() {
                self.lending.lend(own);
            }
            if let Err(end) = self.wait_lent() {
                return end;
            }
            *client = self.lending.recall();
        }
        removed()
    }

    /// Carries out commands until the client is to be lent, or the connection ends.
    fn serve_own(&self, client: &mut Client<D>) -> Result<(), End> {
        if client.called {
            resume_unwind(Box::new("a panic of the thread that polls the queues"));
        }
        if let Some(end) = client.end.take() {
            return Err(end);
        }
        if std::mem::take(&mut client.unsent) {
            send(client.connection.stream.as_fd(), &client.connection.reply, &[])?;
        }
        // `stop` may have been set before `current`; and the other thread, if it had the client, has polled already.
        let (mut waits, mut turn, mut writes) = (true, TURN, 0);
        loop {
            let most = self.lending.poll();
            turn += 1;
            if waits && turn < TURN {
                let Client { poller, connection, .. } = client;
                waits = !poller.poll(most, || connection.read_more())?;
            }
            if waits || turn >= TURN {
                turn = 0;
                let start = Instant::now();
                waits = !self.wait(&mut client.connection)?;
                client.poller.slept(most, start.elapsed());
            }
            if !waits {
                waits = !self.serve_one(client, &mut writes)?;
            }
            if writes >= WRITES {
                writes = 0;
                // While another client is being turned away, this thread has to look.
                if self.lending.is_open()
                    && client.connection.accept.is_none()
                    && client.poller.is_on(most, Instant::now())
                {
                    return Ok(());
                }
            }
        }
    }

    /// Waits until the lent client is to be recalled.
    fn wait_lent(&self) -> Result<(), End> {
        let listener = || self.door.listener.as_ref().map(|listener| listener.as_fd());
        loop {
            let timeout = self.attend()?.map(until);
            let (stop, back) = (sys::borrow(&self.door.stop), sys::borrow(self.lending.back()));
            match sys::wait_readable(
                [Some(stop), Some(self.context.peer.attention()), Some(back), listener()],
                timeout,
            )? {
                [true, ..] => return Err(removed()),
                [_, _, false, false] => {}
                _ => return Ok(()),
            }
        }
    }

    /// Takes the device from a client that has gone.
    fn release(&self, client: Option<Box<Client<D>>>) {
        let Some(client) = client else { return };
        let Client { connection, session, .. } = *client;
        // Of a message that did not get through.
        self.context.disposal.close(connection.into_files());
        drop(session);
    }

    /// Signals the interrupts that others have left to this thread. Returns when to do it again.
    fn attend(&self) -> Result<Option<Instant>, End> {
        let SessionContext { peer, lines, .. } = &self.context;
        let late = peer.attend();
        if let Some(complaint) = peer.complaint() {
            say!(lines, Warn, "{}: signalling interrupts {complaint}", self.device.name());
        }
        if peer.has_blocked() { Err(End::Excluded) } else { Ok(late) }
    }

    /// Waits until the client has sent something (`true`) or the caller is to check again.
    fn wait(&self, connection: &mut Connection) -> Result<bool, End> {
        let now = Instant::now();
        connection.accept = connection.accept.filter(|&until| until > now);
        let late = self.attend()?;
        let timeout = [connection.accept, late].into_iter().flatten().min().map(until);
        let more = connection.has_more();
        let timeout = if more { Some(Duration::ZERO) } else { timeout };
        let fds = [
            Some(sys::borrow(&self.door.stop)),
            Some(self.context.peer.attention()),
            Some(connection.stream.as_fd()),
            self.door.listener.as_ref().filter(|_| connection.accept.is_none()).map(|listener| listener.as_fd()),
        ];
        match sys::wait_readable(fds, timeout)? {
            [true, ..] => Err(removed()),
            [_, true, ..] => Ok(false),
            [_, _, readable, _] if readable || more => Ok(true),
            // Turned away only if the first client is still connected, checked after the second one has arrived: a client
            // that closes and reconnects, perhaps between the two checks, must find its old connection ended.
            [.., true] => match sys::wait_readable([Some(connection.stream.as_fd())], Some(Duration::ZERO))? {
                [true] => Ok(true),
                _ => {
                    connection.accept = self.door.turn_away();
                    Ok(false)
                }
            },
            _ => Ok(false),
        }
    }

    /// Reads a command, carries it out and replies. Returns `false` if the next one is to be waited for. `writes`: counts
    /// quick ones.
    fn serve_one(&self, client: &mut Client<D>, writes: &mut u32) -> Result<bool, End> {
        let Client { connection, session, .. } = client;
        let Some(header) = connection.take()? else { return Ok(false) };
        self.hold_back(connection, header.command)?;
        let Connection { stream, payload, files, reply, .. } = connection;
        let result = session.handle(&header, payload, files, reply);
        if header.flags & NO_REPLY == 0 {
            send(stream.as_fd(), reply, &[])?;
        }
        if header.command != command::REGION_READ && is_quick(&header, payload, self.lending.quick()) {
            *writes += 1;
        }
        result.map_err(End::Violation)?;
        while self.context.disposal.is_busy() {
            if self.door.stops_within(RECHECK) {
                return Err(removed());
            }
        }
        // A client that gets a reply has waited for it: nothing more is there yet.
        Ok(header.flags & NO_REPLY != 0 || connection.has_more())
    }

    /// Waits until the client may send another command, unless it is a register access.
    fn hold_back(&self, connection: &Connection, command: u16) -> Result<(), End> {
        if matches!(command, command::REGION_READ | command::REGION_WRITE | command::REGION_WRITE_MULTI) {
            return Ok(());
        }
        while connection.messages.take().is_none() {
            let until = connection.messages.until().unwrap_or_else(|| Instant::now() + RECHECK);
            if self.door.stops_within(until.saturating_duration_since(Instant::now())) {
                return Err(removed());
            }
        }
        Ok(())
    }
}

/// Returns the time until then; at least a millisecond: with 0, poll would not sleep at all.
fn until(then: Instant) -> Duration {
    then.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn removed() -> End {
    End::Closed("the device is being removed".to_owned())
}
