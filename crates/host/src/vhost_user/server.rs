//! The thread of a vhost-user socket: accepts a frontend, or connects to one, and serves one connection at a time. Started by
//! the devices in `net.rs` and `vsock/guest.rs`.

use super::{
    device::VhostDevice,
    inflight::LastUsed,
    quirks::{self, CANNOT_REFUSE, Early, explain, is_violation},
    session::{Session, SessionContext},
};
use crate::{
    Quota,
    notes::Notes,
    socket::{
        Access, Current, Disposal, Door, EXCLUSION, Limits, Lines, Peer, Place, RETRY, Serving, SocketError, bind,
        close, say,
    },
    sys,
};
use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};
use vhost::vhost_user::BackendReqHandler;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Which side creates the socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// This side creates the socket and listens; frontends connect.
    #[default]
    Server,
    /// The frontend creates the socket and listens; this side retries until it can connect.
    Client,
}

/// What peers are called in log lines.
const PEER: &str = "frontend";

/// Interval at which a thread polls a condition that has no event.
const RECHECK: Duration = Duration::from_millis(5);

/// Configuration of a socket and of what its frontends may do.
#[derive(Clone, Copy, Debug)]
pub struct SocketConfig<'a> {
    /// Name in log lines.
    pub name: &'a str,
    /// Where it is.
    pub path: &'a Path,
    /// Which side creates it.
    pub role: Role,
    /// Limits of its frontends.
    pub limits: Limits,
    /// Who may connect, as a server.
    pub access: Access,
}

impl<'a> SocketConfig<'a> {
    /// A socket with this name and path, otherwise the default.
    pub fn new(name: &'a str, path: &'a Path) -> SocketConfig<'a> {
        SocketConfig { name, path, ..SocketConfig::default() }
    }
}

impl Default for SocketConfig<'_> {
    /// A socket that this side creates, for this user only, with the default limits. Name and path are empty.
    fn default() -> Self {
        let (limits, access) = (Limits::default(), Access::default());
        SocketConfig { name: "", path: Path::new(""), role: Role::Server, limits, access }
    }
}

/// A socket with a device behind it, and the thread that serves it. Dropped, it disconnects the frontend and removes the
/// socket.
pub struct Socket {
    serving: Serving,
    place: Option<Place>,
    live: Live,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Socket").field("name", &self.serving.name).finish_non_exhaustive()
    }
}

/// The limits that can be changed while the thread runs.
struct Live {
    limits: Arc<parking_lot::Mutex<Limits>>,
    connects: Arc<Quota>,
    lines: Lines,
}

impl Socket {
    /// Serves a device at a socket.
    ///
    /// # Errors
    /// The socket cannot be created or its owner and mode not be set, or the system has no more threads or descriptors.
    pub fn serve<D: VhostDevice>(config: SocketConfig<'_>, device: D) -> Result<Socket, SocketError> {
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let failed = |error| SocketError::Start { name: config.name.to_owned(), error };
        Self::start(config, attention.map_err(failed)?, || Ok(device))
    }

    /// Creates the socket (as a server) and starts its thread. `make` creates the device; it is called once the socket
    /// exists, as it is slow compared with failing to create one. `attention` is signalled by the device to have its frontend
    /// disconnected.
    pub(crate) fn start<D: VhostDevice>(
        config: SocketConfig<'_>,
        attention: EventFd,
        make: impl FnOnce() -> io::Result<D>,
    ) -> Result<Socket, SocketError> {
        let SocketConfig { name, path, role, limits, access } = config;
        let failed = |error: io::Error| SocketError::Start { name: name.to_owned(), error };
        let (listener, place) = match role {
            Role::Server => Some(bind(name, path, access)?),
            Role::Client => None,
        }
        .unzip();
        sys::guard::start().map_err(failed)?;
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let peer = Arc::new(Peer::new().map_err(failed)?);
        let lines = Lines::new(name, limits.lines);
        let connects = Arc::new(limits.connects.quota());
        let limits = Arc::new(parking_lot::Mutex::new(limits));
        let live = Live { limits: limits.clone(), connects: connects.clone(), lines: lines.clone() };
        let device = make().map_err(failed)?;
        // Notes have one writer: they are opened once this process has the socket.
        let notes = Notes::open(name, path, device.vrings().len());
        let context =
            SessionContext { limits, lines, peer, disposal: Disposal::default(), notes, inflight: LastUsed::default() };
        let current = Current::default();
        let thread = {
            let stop = stop.try_clone().map_err(failed)?;
            let (name, path, lines) = (device.name().to_owned(), path.to_owned(), context.lines.clone());
            let door = Door { name, peer: PEER, listener, path, stop, connects, lines };
            let thread = Thread { device, attention, current: current.clone(), door, context };
            let builder = thread::Builder::new().name(format!("vhost {}", config.name)).stack_size(256 << 10);
            builder.spawn(move || thread.run())
        };
        let thread = Some(thread.map_err(failed)?);
        let serving = Serving { name: name.to_owned(), peer: PEER, stop, current, thread };
        Ok(Socket { serving, place, live })
    }

    /// Changes limits and access. Limits on messages and refusals take effect with the next connection.
    ///
    /// # Errors
    /// Owner or mode cannot be changed; the limits are in effect nevertheless.
    pub(crate) fn set(&self, limits: Limits, access: Access) -> Result<(), SocketError> {
        *self.live.limits.lock() = limits;
        self.live.connects.set(limits.connects.burst, limits.connects.rate);
        self.live.lines.set(limits.lines);
        self.place.as_ref().map_or(Ok(()), |place| place.give(&self.serving.name, access))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Thread<D> {
    device: D,
    attention: EventFd,
    current: Current,
    door: Door,
    context: SessionContext,
}

/// How a connection ended.
enum End {
    /// The reason, for the log.
    Closed(String),
    /// Notifying the frontend blocked.
    Excluded,
}

fn closed(why: &str) -> End {
    End::Closed(why.into())
}

/// Until when the listener and the connection are not polled.
#[derive(Default)]
struct Idle {
    accept: Option<Instant>,
    read: Option<Instant>,
}

impl<D: VhostDevice> Thread<D> {
    fn run(&self) {
        let (name, lines) = (self.device.name(), &self.context.lines);
        while let Some(stream) = self.next_frontend() {
            match sys::peer_of(stream.as_fd()) {
                Some((process, user)) => {
                    say!(lines, Info, "{name}: frontend connected, process {process}, user {user}")
                }
                None => say!(lines, Info, "{name}: frontend connected"),
            }
            let session = Arc::new(Mutex::new(Session::new(self.device.clone(), self.context.clone())));
            // A panic is a bug in ringroad; a frontend that triggers one loses its own connection and nothing else.
            let end = catch_unwind(AssertUnwindSafe(|| self.serve(stream, &session)));
            // Stops the queues. Not within the call above: a panic during unwinding aborts the process.
            let stopped = catch_unwind(AssertUnwindSafe(|| drop(session)));
            close(&self.current);
            self.device.disconnected();
            // Also of a frontend that has left since.
            let end = end.map(|end| if self.context.peer.has_blocked() { End::Excluded } else { end });
            self.context.peer.reset();
            let mut pause = self.door.listener.is_none().then_some(RETRY);
            match end {
                Ok(End::Closed(why)) => say!(lines, Info, "{name}: frontend disconnected: {why}"),
                Ok(End::Excluded) => {
                    self.device.count_fault(None);
                    pause = Some(EXCLUSION);
                    say!(
                        lines,
                        Error,
                        "{name}: frontend disconnected: a write to a call or err descriptor blocked (counter full and O_NONBLOCK \
                         cleared), expected one that does not block; no new connection for {EXCLUSION:?}"
                    );
                }
                Err(_) => {
                    self.device.count_fault(None);
                    say!(
                        lines,
                        Error,
                        "{name}: frontend disconnected: a panic in its session, a bug in ringroad; please report it"
                    )
                }
            }
            if stopped.is_err() {
                log::error!(
                    "{name}: a panic while the device was stopped, a bug in ringroad; please report it; its socket is closed"
                );
                return;
            }
            // A peer that closes each connection at once must not cause a busy loop.
            if let Some(pause) = pause
                && self.door.stops_within(pause)
            {
                return;
            }
        }
    }

    /// Waits for a frontend. Returns `None` if the thread is to stop.
    fn next_frontend(&self) -> Option<UnixStream> {
        while self.context.disposal.is_busy() {
            if self.door.stops_within(RECHECK) {
                return None;
            }
        }
        self.door.next()
    }

    /// Serves one connection and returns why it ended.
    fn serve(&self, stream: UnixStream, session: &Arc<Mutex<Session<D>>>) -> End {
        let (socket, current) = match stream.try_clone().and_then(|socket| Ok((socket, stream.try_clone()?))) {
            Ok(both) => both,
            Err(error) => return End::Closed(error.to_string()),
        };
        *self.current.lock() = Some(current);
        self.context.peer.reset();
        let messages = self.context.limits.lock().messages.quota();
        let mut idle = Idle::default();
        let mut handler = BackendReqHandler::from_stream(stream, session.clone());
        loop {
            match self.wait(&socket, &mut idle) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(end) => return end,
            }
            if self.context.disposal.is_busy() {
                idle.read = Some(Instant::now() + RECHECK);
                continue;
            }
            if messages.take().is_none() {
                idle.read = messages.until();
                continue;
            }
            if let Err(end) = handle(&mut handler, &socket, session) {
                return end;
            }
        }
    }

    /// Sends the notifications that others have left to this thread. Returns when to do it again.
    fn attend(&self) -> Result<Option<Instant>, End> {
        let SessionContext { peer, lines, .. } = &self.context;
        let late = peer.attend();
        if let Some(complaint) = peer.complaint() {
            say!(lines, Warn, "{}: writes to call and err descriptors {complaint}", self.device.name());
        }
        if peer.has_blocked() { Err(End::Excluded) } else { Ok(late) }
    }

    /// Waits until the frontend has sent something (`true`) or the caller is to check again.
    fn wait(&self, socket: &UnixStream, idle: &mut Idle) -> Result<bool, End> {
        let now = Instant::now();
        idle.accept = idle.accept.filter(|&until| until > now);
        idle.read = idle.read.filter(|&until| until > now);
        let late = self.attend()?;
        let timeout = [idle.read, idle.accept, late].into_iter().flatten().min();
        // At least a millisecond: with 0, poll would not sleep at all.
        let timeout = timeout.map(|until| until.saturating_duration_since(now).max(Duration::from_millis(1)));
        let listener = self.door.listener.as_ref().filter(|_| idle.accept.is_none());
        let fds = [
            Some(sys::borrow(&self.door.stop)),
            Some(sys::borrow(&self.attention)),
            Some(self.context.peer.attention()),
            Some(socket.as_fd()).filter(|_| idle.read.is_none()),
            listener.map(|listener| listener.as_fd()),
        ];
        match sys::wait_readable(fds, timeout) {
            Ok([true, ..]) => Err(closed("the device is being removed")),
            Ok([_, true, ..]) => {
                let _ = self.attention.read();
                Err(closed("an error has stopped the device (see the line above)"))
            }
            Ok([_, _, true, ..]) => Ok(false),
            Ok([_, _, _, true, _]) => Ok(true),
            // Turned away only if the first frontend is still connected, checked after the second one has arrived: a
            // frontend that closes and reconnects, perhaps between the two checks, must find its old connection ended.
            Ok([.., true]) => match sys::wait_readable([Some(socket.as_fd())], Some(Duration::ZERO)) {
                Ok([true]) => Ok(true),
                _ => {
                    idle.accept = self.door.turn_away();
                    Ok(false)
                }
            },
            Ok(_) => Ok(false),
            Err(error) => Err(End::Closed(error.to_string())),
        }
    }
}

/// Reads a message and carries it out. Fails if that ends the connection.
fn handle<D: VhostDevice>(
    handler: &mut BackendReqHandler<Mutex<Session<D>>>,
    socket: &UnixStream,
    session: &Mutex<Session<D>>,
) -> Result<(), End> {
    for quirk in [quirks::set_vring_enable, quirks::set_backend_req_fd] {
        match quirk(socket, &mut *lock(session)) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => return Err(End::Closed(error.to_string())),
        }
    }
    // The `vhost` crate refuses some messages by itself, without a call to the session.
    lock(session).refused = false;
    let result = handler.handle_request();
    let mut session = lock(session);
    if session.exhausted {
        session.violated("more refused messages than `limits.refusals` allows");
        return Err(closed("too many refused messages"));
    }
    let Err(error) = result else { return Ok(()) };
    match std::mem::take(&mut session.refused) {
        true if session.can_refuse() => Ok(()),
        true => Err(closed(CANNOT_REFUSE)),
        false if is_violation(&error) => {
            session.violated(explain(&error));
            Err(closed("protocol violation"))
        }
        false => Err(End::Closed(explain(&error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::{Ring, Vring};
    use std::io::{Read, Write};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A device that panics when its features are asked for the first time.
    #[derive(Clone, Default)]
    struct Broken {
        asked: Arc<AtomicU32>,
        faults: Arc<AtomicU32>,
        vring: Vring,
    }

    impl VhostDevice for Broken {
        fn name(&self) -> &str {
            "broken"
        }
        fn offer(&self) -> u64 {
            assert!(self.asked.fetch_add(1, Ordering::Relaxed) > 0, "a panic provoked by this test");
            1 << 32
        }
        fn vrings(&self) -> &[Vring] {
            std::slice::from_ref(&self.vring)
        }
        fn start(&self, _index: usize, _ring: Ring) -> Result<u32, String> {
            Ok(0)
        }
        fn stop(&self, _index: usize) -> u32 {
            0
        }
        fn count_fault(&self, _index: Option<usize>) {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_panic_ends_only_its_connection() {
        let path = std::env::temp_dir().join(format!("ringroad-panic-{}", std::process::id()));
        let (limits, access, role) = (Limits::default(), Access::default(), Role::Server);
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
        let device = Broken::default();
        let config = SocketConfig { name: "broken", path: &path, role, limits, access };
        let _socket = Socket::start(config, attention, || Ok(device.clone())).unwrap();
        let ask = || {
            let mut peer = UnixStream::connect(&path).unwrap();
            peer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            peer.write_all([1u32, 1, 0].map(u32::to_ne_bytes).as_flattened()).unwrap();
            let mut answer = Vec::new();
            // Until the end, or eight bytes after the header.
            let _ = peer.take(20).read_to_end(&mut answer);
            answer.len()
        };
        assert_eq!(ask(), 0);
        assert_eq!(ask(), 20, "the next frontend is served");
        assert_eq!(device.faults.load(Ordering::Relaxed), 1);
    }
}
