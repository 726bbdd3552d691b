//! The thread of a vhost-user socket: accepts a frontend, or connects to one, and serves one connection at a time. Started by
//! the devices in `net.rs` and `vsock/guest.rs`.

use super::{
    Access, Limits, Place, SocketError, bind,
    call::Alarm,
    descriptor::Disposal,
    device::VhostDevice,
    limits::{Lines, say},
    place::connect,
    quirks::{self, CANNOT_REFUSE, Early, explain, is_violation},
    session::{Session, SessionContext},
};
use crate::{Quota, notes::Notes, sys};
use std::{
    io,
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    thread::{self, JoinHandle},
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

/// Interval between attempts to connect.
const RETRY: Duration = Duration::from_millis(250);

/// Interval at which a thread polls a condition that has no event.
const RECHECK: Duration = Duration::from_millis(5);

/// How long dropping a [`Socket`] waits for its thread, which a frontend can delay by a descriptor that is slow to close.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a frontend that made a notification block cannot reconnect: each attempt costs other ports a few milliseconds.
const EXCLUSION: Duration = Duration::from_secs(1);

/// The current connection. A frontend that sends half a message, or does not read replies, blocks the thread; dropping the
/// [`Socket`] shuts the connection down.
type Current = Arc<Mutex<Option<UnixStream>>>;

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
    name: String,
    stop: EventFd,
    current: Current,
    thread: Option<JoinHandle<()>>,
    place: Option<Place>,
    live: Live,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Socket").field("name", &self.name).finish_non_exhaustive()
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
        let alarm = Arc::new(Alarm::new(attention.try_clone().map_err(failed)?));
        let lines = Lines::new(name, limits.lines);
        let connects = Arc::new(limits.connects.quota());
        let limits = Arc::new(parking_lot::Mutex::new(limits));
        let live = Live { limits: limits.clone(), connects: connects.clone(), lines: lines.clone() };
        let device = make().map_err(failed)?;
        // Notes have one writer: they are opened once this process has the socket.
        let notes = Notes::open(name, path, device.vrings().len());
        let context = SessionContext { limits, lines, alarm, disposal: Disposal::default(), notes };
        let current = Current::default();
        let thread = {
            let stop = stop.try_clone().map_err(failed)?;
            let (path, current) = (path.to_owned(), current.clone());
            thread::Builder::new().name(format!("vhost {name}")).stack_size(256 << 10).spawn(move || {
                Thread { device, path, attention, stop, current, listener, context, connects }.run();
            })
        };
        let thread = Some(thread.map_err(failed)?);
        Ok(Socket { name: name.to_owned(), stop, current, thread, place, live })
    }

    /// Changes limits and access. Limits on messages and refusals take effect with the next connection.
    ///
    /// # Errors
    /// Owner or mode cannot be changed; the limits are in effect nevertheless.
    pub(crate) fn set(&self, limits: Limits, access: Access) -> Result<(), SocketError> {
        *self.live.limits.lock() = limits;
        self.live.connects.set(limits.connects.burst, limits.connects.rate);
        self.live.lines.set(limits.lines);
        self.place.as_ref().map_or(Ok(()), |place| place.give(&self.name, access))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        // After `stop`: the thread sees either that or the shutdown of its connection.
        if let Some(stream) = &*lock(&self.current) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let Some(thread) = self.thread.take() else { return };
        let start = Instant::now();
        while !thread.is_finished() && start.elapsed() < STOP_TIMEOUT {
            thread::sleep(Duration::from_micros(200));
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            let waited = STOP_TIMEOUT.as_millis();
            log::error!(
                "{}: the frontend has blocked the port's thread for {waited} ms; not waiting for it any longer",
                self.name
            );
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Thread<D> {
    device: D,
    path: PathBuf,
    attention: EventFd,
    stop: EventFd,
    current: Current,
    listener: Option<UnixListener>,
    context: SessionContext,
    connects: Arc<Quota>,
}

/// How a connection ended.
enum End {
    /// The reason, for the log.
    Closed(String),
    /// A notification to the frontend blocked.
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
            *lock(&self.current) = None;
            self.device.disconnected();
            let mut pause = self.listener.is_none().then_some(RETRY);
            match end {
                Ok(End::Closed(why)) => say!(lines, Info, "{name}: frontend disconnected: {why}"),
                Ok(End::Excluded) => {
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
                && self.stops_within(pause)
            {
                return;
            }
        }
    }

    /// Sleeps for `time`; returns `true` at once if the thread is to stop.
    fn stops_within(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match sys::wait_readable([Some(sys::borrow(&self.stop))], Some(left)) {
                Ok([true]) | Err(_) => return true,
                // poll's timeout is in whole milliseconds.
                Ok([false]) if left < Duration::from_millis(1) => return false,
                Ok([false]) => {}
            }
        }
    }

    /// Waits for a frontend. Returns `None` if the thread is to stop.
    fn next_frontend(&self) -> Option<UnixStream> {
        let mut said = false;
        loop {
            while self.context.disposal.is_busy() {
                if self.stops_within(RECHECK) {
                    return None;
                }
            }
            let connected = match &self.listener {
                Some(listener) => {
                    match sys::wait_readable([Some(sys::borrow(&self.stop)), Some(listener.as_fd())], None) {
                        Ok([false, true]) => {}
                        Ok([false, false]) => continue,
                        Ok([true, _]) => return None,
                        Err(error) => {
                            log::error!("{}: cannot wait for a frontend: {error}; device stopped", self.device.name());
                            return None;
                        }
                    }
                    if !self.may_connect() {
                        return None;
                    }
                    listener.accept().map(|(stream, _)| stream)
                }
                None => connect(&self.path),
            };
            match connected {
                Ok(stream) if stream.set_nonblocking(false).is_ok() => return Some(stream),
                // The frontend has closed its connection already.
                Err(error) if self.listener.is_some() && error.kind() == io::ErrorKind::WouldBlock => continue,
                // Mostly EMFILE: the frontend stays in the backlog, so the listener stays readable; retry after a pause.
                Err(error) if self.listener.is_some() && !std::mem::replace(&mut said, true) => {
                    log::error!("{}: cannot accept a frontend: {error}; retrying", self.device.name());
                }
                _ => {}
            }
            if self.stops_within(RETRY) {
                return None;
            }
        }
    }

    /// Waits until the connection rate allows another one. Returns `false` if the thread is to stop.
    fn may_connect(&self) -> bool {
        while self.connects.take().is_none() {
            let until = self.connects.until().unwrap_or_else(|| Instant::now() + RETRY);
            if self.stops_within(until.saturating_duration_since(Instant::now())) {
                return false;
            }
        }
        true
    }

    /// Serves one connection and returns why it ended.
    fn serve(&self, stream: UnixStream, session: &Arc<Mutex<Session<D>>>) -> End {
        let (socket, current) = match stream.try_clone().and_then(|socket| Ok((socket, stream.try_clone()?))) {
            Ok(both) => both,
            Err(error) => return End::Closed(error.to_string()),
        };
        *lock(&self.current) = Some(current);
        // Both may be left over from the previous connection.
        let _ = self.attention.read();
        let _ = self.context.alarm.take();
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

    /// Waits until the frontend has sent something (`true`) or the caller is to check again.
    fn wait(&self, socket: &UnixStream, idle: &mut Idle) -> Result<bool, End> {
        let now = Instant::now();
        idle.accept = idle.accept.filter(|&until| until > now);
        idle.read = idle.read.filter(|&until| until > now);
        let timeout = [idle.read, idle.accept].into_iter().flatten().min();
        // At least a millisecond: with 0, poll would not sleep at all.
        let timeout = timeout.map(|until| (until - now).max(Duration::from_millis(1)));
        let listener = self.listener.as_ref().filter(|_| idle.accept.is_none());
        let fds = [
            Some(sys::borrow(&self.stop)),
            Some(sys::borrow(&self.attention)),
            Some(socket.as_fd()).filter(|_| idle.read.is_none()),
            listener.map(|listener| listener.as_fd()),
        ];
        match sys::wait_readable(fds, timeout) {
            Ok([true, ..]) => Err(closed("the device is being removed")),
            Ok([_, true, ..]) => {
                let _ = self.attention.read();
                if self.context.alarm.take() {
                    self.device.count_fault(None);
                    return Err(End::Excluded);
                }
                Err(closed("an error has stopped the device (see the line above)"))
            }
            Ok([_, _, true, _]) => Ok(true),
            // Turned away only if the first frontend is still connected, checked after the second one has arrived: a
            // frontend that closes and reconnects, perhaps between the two checks, must find its old connection ended.
            Ok([.., true]) => match sys::wait_readable([Some(socket.as_fd())], Some(Duration::ZERO)) {
                Ok([true]) => Ok(true),
                _ => {
                    idle.accept = self.turn_away();
                    Ok(false)
                }
            },
            Ok(_) => Ok(false),
            Err(error) => Err(End::Closed(error.to_string())),
        }
    }

    /// Turns away a second frontend: the socket has one device. Returns until when further ones stay in the backlog; `None`:
    /// no limit.
    fn turn_away(&self) -> Option<Instant> {
        let listener = self.listener.as_ref()?;
        if self.connects.take().is_none() {
            return self.connects.until().or_else(|| Some(Instant::now() + RETRY));
        }
        match listener.accept() {
            Ok(_) => {
                let name = self.device.name();
                say!(
                    self.context.lines,
                    Warn,
                    "{name}: a second frontend was turned away: the first one is still connected, expected to disconnect first"
                );
                None
            }
            // Not accepted; it is still in the backlog.
            Err(_) => Some(Instant::now() + RETRY),
        }
    }
}

/// Reads a message and carries it out. Fails if that ends the connection.
fn handle<D: VhostDevice>(
    handler: &mut BackendReqHandler<Mutex<Session<D>>>,
    socket: &UnixStream,
    session: &Mutex<Session<D>>,
) -> Result<(), End> {
    match quirks::set_vring_enable(socket, &mut *lock(session)) {
        Ok(true) => return Ok(()),
        Ok(false) => {}
        Err(error) => return Err(End::Closed(error.to_string())),
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
