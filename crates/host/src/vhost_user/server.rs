//! The thread of a vhost-user socket: waits for a frontend, or for a socket to connect to, and lives with one connection at a
//! time.

use super::{
    Access, Limits, Place, SocketError, bind,
    call::Alarm,
    descriptor::Disposal,
    device::Device,
    limits::{Lines, say},
    place::connect,
    session::{Session, Surroundings, explain, is_violation},
};
use crate::{Quota, sys};
use std::{
    io::{self, Read, Write},
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
use vhost::vhost_user::{BackendReqHandler, VhostUserBackendReqHandlerMut};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Which end of the socket is ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// We make the socket, frontends connect to it.
    #[default]
    Server,
    /// The frontend makes it, we connect, again and again until it is there.
    Client,
}

/// Flags of a message's header.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;

/// How often a client tries.
const RETRY: Duration = Duration::from_millis(250);

/// How often a thread looks again at what has no event.
const MOMENT: Duration = Duration::from_millis(5);

/// For how long the end of a port waits for its thread, which a frontend can hold up by a descriptor that takes long to close.
const FAREWELL: Duration = Duration::from_millis(500);

/// For how long a frontend is kept out that has tried to make us wait: each time costs the others a few milliseconds.
const BANISHMENT: Duration = Duration::from_secs(1);

/// Why a connection ends whose frontend cannot be told that a message was refused.
const CANNOT_REFUSE: &str = "a message was refused, and there is no REPLY_ACK to tell it by";

/// The connection there is. A frontend that sends half a message, or does not read replies, holds up the port's thread;
/// who ends the port shuts it down.
type Current = Arc<Mutex<Option<UnixStream>>>;

/// Where a socket is, and what its frontends may do.
pub(crate) struct SocketConfig<'a> {
    /// Its name in log lines.
    pub name: &'a str,
    pub path: &'a Path,
    pub role: Role,
    pub limits: Limits,
    pub access: Access,
}

/// A socket with a device behind it, and the thread that serves it. Dropped, it disconnects and is removed.
pub(crate) struct Socket {
    name: String,
    stop: EventFd,
    current: Current,
    thread: Option<JoinHandle<()>>,
    place: Option<Place>,
    live: Live,
}

/// What of its limits is in use.
struct Live {
    limits: Arc<parking_lot::Mutex<Limits>>,
    connects: Arc<Quota>,
    lines: Lines,
}

impl Socket {
    /// Makes the socket (as a server) and starts its thread. `make` brings the device, which takes longer than to see that
    /// there can be no socket. `attention`: the device's word that its memory is gone.
    pub(crate) fn start<D: Device>(
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
        let around = Surroundings { limits, lines, alarm, disposal: Disposal::default() };
        let device = make().map_err(failed)?;
        let current = Current::default();
        let thread = {
            let stop = stop.try_clone().map_err(failed)?;
            let (path, current) = (path.to_owned(), current.clone());
            thread::Builder::new().name(format!("vhost {name}")).stack_size(256 << 10).spawn(move || {
                Thread { device, path, attention, stop, current, listener, around, connects }.run();
            })
        };
        let thread = Some(thread.map_err(failed)?);
        Ok(Socket { name: name.to_owned(), stop, current, thread, place, live })
    }

    /// Has it behave like this from now on; how many messages and refusals there may be, from the next connection on.
    ///
    /// # Errors
    /// Its owner or permissions cannot be changed; the limits are.
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
        // After `stop`: the thread sees either that, or the end of the connection.
        if let Some(stream) = &*lock(&self.current) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let Some(thread) = self.thread.take() else { return };
        let start = Instant::now();
        while !thread.is_finished() && start.elapsed() < FAREWELL {
            thread::sleep(Duration::from_micros(200));
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            let waited = FAREWELL.as_millis();
            log::error!("{}: its frontend has held up its thread for {waited} ms; left behind", self.name);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Obeys SET_VRING_ENABLE where the `vhost` crate would not: QEMU sends it as soon as there are protocol features, but the
/// crate wants to have seen SET_FEATURES; and DPDK's driver, as the server, disables its vrings before all else when a device
/// has come back. `false`: something else comes next.
fn set_vring_enable<D: Device>(mut socket: &UnixStream, session: &Mutex<Session<D>>) -> io::Result<bool> {
    const REQUEST: u32 = 18;
    const NEED_REPLY: u32 = 1 << 3;
    let mut session = lock(session);
    if !session.is_early(false) {
        return Ok(false);
    }
    // Request, flags, size of what follows; vring, 0 or 1.
    let mut message = [[0; 4]; 5];
    let len = sys::peek(socket.as_fd(), message.as_flattened_mut())?;
    let [request, flags, size, vring, enable] = message.map(u32::from_ne_bytes);
    if len < size_of_val(&message) || request != REQUEST || flags & !NEED_REPLY != VERSION || size != 8 || enable > 1 {
        return Ok(false);
    }
    if !session.is_early(enable == 1) {
        return Ok(false);
    }
    socket.read_exact(message.as_flattened_mut())?;
    let refused = session.set_vring_enable(vring, enable == 1).is_err();
    session.refused = false;
    if refused && !session.can_refuse() {
        return Err(io::Error::other(CANNOT_REFUSE));
    }
    if session.can_refuse() && flags & NEED_REPLY != 0 {
        let words = [REQUEST, VERSION | REPLY, 8, refused.into(), 0];
        socket.write_all(words.map(u32::to_ne_bytes).as_flattened())?;
    }
    Ok(true)
}

struct Thread<D> {
    device: D,
    path: PathBuf,
    attention: EventFd,
    stop: EventFd,
    current: Current,
    listener: Option<UnixListener>,
    around: Surroundings,
    connects: Arc<Quota>,
}

/// How a connection has ended.
enum End {
    /// Why, for the log.
    Over(String),
    /// It has tried to make others wait.
    Banished,
}

impl<D: Device> Thread<D> {
    fn run(&self) {
        let (name, lines) = (self.device.name(), &self.around.lines);
        while let Some(stream) = self.next_frontend() {
            match sys::peer_of(stream.as_fd()) {
                Some((process, user)) => {
                    say!(lines, Info, "{name}: frontend connected, process {process}, user {user}")
                }
                None => say!(lines, Info, "{name}: frontend connected"),
            }
            let session = Arc::new(Mutex::new(Session::new(self.device.clone(), self.around.clone())));
            // A panic is a mistake of ours, and a frontend that finds one may end its own port's connection by it, no more.
            let end = catch_unwind(AssertUnwindSafe(|| self.serve(stream, &session)));
            // Stops what runs. Not within the above: a panic while a panic is on its way ends the process.
            let stopped = catch_unwind(AssertUnwindSafe(|| drop(session)));
            *lock(&self.current) = None;
            self.device.forget();
            let mut pause = self.listener.is_none().then_some(RETRY);
            match end {
                Ok(End::Over(why)) => say!(lines, Info, "{name}: frontend gone: {why}"),
                Ok(End::Banished) => {
                    pause = Some(BANISHMENT);
                    say!(
                        lines,
                        Error,
                        "{name}: frontend gone: writing to a call or err descriptor waits (its counter is full and O_NONBLOCK \
                         was cleared), expected one that does not; disconnected, and kept out for {BANISHMENT:?}"
                    );
                }
                Err(_) => {
                    self.device.count_fault(None);
                    say!(lines, Error, "{name}: frontend gone: a panic, which is a bug of ringroad; disconnected")
                }
            }
            if stopped.is_err() {
                log::error!("{name}: a panic while it was stopped, which is a bug of ringroad; device stopped");
                return;
            }
            // A peer that closes each connection at once must not keep us busy.
            if let Some(pause) = pause
                && self.stops_within(pause)
            {
                return;
            }
        }
    }

    /// Waits; `true` if it is to stop.
    fn stops_within(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match sys::wait_readable([Some(sys::borrow(&self.stop))], Some(left)) {
                Ok([true]) | Err(_) => return true,
                // Poll takes whole milliseconds.
                Ok([false]) if left < Duration::from_millis(1) => return false,
                Ok([false]) => {}
            }
        }
    }

    /// Waits for a frontend. `None`: to stop.
    fn next_frontend(&self) -> Option<UnixStream> {
        let mut said = false;
        loop {
            while self.around.disposal.is_busy() {
                if self.stops_within(MOMENT) {
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
                            log::error!("{}: {error}; device stopped", self.device.name());
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
                // Gone again.
                Err(error) if self.listener.is_some() && error.kind() == io::ErrorKind::WouldBlock => continue,
                // Out of descriptors, mostly: the frontend stays in the queue, and is no event to wait for.
                Err(error) if self.listener.is_some() && !std::mem::replace(&mut said, true) => {
                    log::error!("{}: cannot accept a frontend: {error}; trying again", self.device.name());
                }
                _ => {}
            }
            if self.stops_within(RETRY) {
                return None;
            }
        }
    }

    /// Waits until one more connection may be accepted. `false`: to stop.
    fn may_connect(&self) -> bool {
        while self.connects.take().is_none() {
            let until = self.connects.until().unwrap_or_else(|| Instant::now() + RETRY);
            if self.stops_within(until.saturating_duration_since(Instant::now())) {
                return false;
            }
        }
        true
    }

    /// One connection, to its end. Says why it ended.
    fn serve(&self, stream: UnixStream, session: &Arc<Mutex<Session<D>>>) -> End {
        let over = |why: &str| End::Over(why.into());
        let (socket, current) = match stream.try_clone().and_then(|socket| Ok((socket, stream.try_clone()?))) {
            Ok(both) => both,
            Err(error) => return End::Over(error.to_string()),
        };
        *lock(&self.current) = Some(current);
        // Both are from the last one.
        let _ = self.attention.read();
        let _ = self.around.alarm.take();
        let messages = self.around.limits.lock().messages.quota();
        // Up to when a second frontend is left in the queue, and messages in the socket.
        let (mut deaf_to_others, mut deaf) = (None::<Instant>, None::<Instant>);
        let mut handler = BackendReqHandler::from_stream(stream, session.clone());
        loop {
            let now = Instant::now();
            deaf_to_others = deaf_to_others.filter(|&until| until > now);
            deaf = deaf.filter(|&until| until > now);
            let timeout = [deaf, deaf_to_others].into_iter().flatten().min();
            // No shorter than a millisecond: poll would not wait at all.
            let timeout = timeout.map(|until| (until - now).max(Duration::from_millis(1)));
            let listener = self.listener.as_ref().filter(|_| deaf_to_others.is_none());
            let fds = [
                Some(sys::borrow(&self.stop)),
                Some(sys::borrow(&self.attention)),
                Some(socket.as_fd()).filter(|_| deaf.is_none()),
                listener.map(|listener| listener.as_fd()),
            ];
            match sys::wait_readable(fds, timeout) {
                Ok([true, ..]) => return over("the device is going down"),
                Ok([_, true, ..]) => {
                    let _ = self.attention.read();
                    if self.around.alarm.take() {
                        self.device.count_fault(None);
                        return End::Banished;
                    }
                    return over("its memory is gone");
                }
                Ok([_, _, true, _]) => {}
                // Only when the first one is still there, seen after the second one: a frontend that closes and connects
                // again, perhaps while we look from one to the other, must find its old connection ended.
                Ok([.., true]) => match sys::wait_readable([Some(socket.as_fd())], Some(Duration::ZERO)) {
                    Ok([true]) => {}
                    _ => {
                        deaf_to_others = self.turn_away();
                        continue;
                    }
                },
                Ok(_) => continue,
                Err(error) => return End::Over(error.to_string()),
            }
            if self.around.disposal.is_busy() {
                deaf = Some(Instant::now() + MOMENT);
                continue;
            }
            if messages.take().is_none() {
                deaf = messages.until();
                continue;
            }
            match set_vring_enable(&socket, session) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return End::Over(error.to_string()),
            }
            // The `vhost` crate answers some refusals by itself, and says nothing of them here.
            lock(session).refused = false;
            let result = handler.handle_request();
            let mut session = lock(session);
            if session.exhausted {
                session.violated("more messages that cannot be obeyed than there is a reason for");
                return over("it was refused too often");
            }
            if let Err(error) = result {
                match std::mem::take(&mut session.refused) {
                    true if session.can_refuse() => {}
                    true => return over(CANNOT_REFUSE),
                    false if is_violation(&error) => {
                        session.violated(explain(&error));
                        return over("it does not keep to the protocol");
                    }
                    false => return End::Over(explain(&error)),
                }
            }
        }
    }

    /// A second frontend while there is one: the socket has one device behind it. Up to when the next one is left in the queue.
    fn turn_away(&self) -> Option<Instant> {
        let listener = self.listener.as_ref()?;
        if self.connects.take().is_none() {
            return self.connects.until().or_else(|| Some(Instant::now() + RETRY));
        }
        match listener.accept() {
            Ok(_) => {
                let name = self.device.name();
                say!(
                    self.around.lines,
                    Warn,
                    "{name}: a second frontend was turned away; the first one is still connected"
                );
                None
            }
            // It could not be accepted, and is still in the queue.
            Err(_) => Some(Instant::now() + RETRY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::{Call, Kick, Ring};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A device that panics the first time that it is asked what it offers.
    #[derive(Clone, Default)]
    struct Broken {
        asked: Arc<AtomicU32>,
        faults: Arc<AtomicU32>,
    }

    impl Device for Broken {
        fn name(&self) -> &str {
            "broken"
        }
        fn offer(&self) -> u64 {
            assert!(self.asked.fetch_add(1, Ordering::Relaxed) > 0, "a panic that this test provokes");
            1 << 32
        }
        fn queue_num(&self) -> u64 {
            1
        }
        fn vrings(&self) -> usize {
            1
        }
        fn config(&self) -> Vec<u8> {
            Vec::new()
        }
        fn start(&self, _index: usize, _ring: Ring, _kick: Option<&Kick>) -> Result<u32, String> {
            Ok(0)
        }
        fn stop(&self, _index: usize, _kick: Option<&Kick>) -> u32 {
            0
        }
        fn end_notes(&self, _index: usize) {}
        fn set_fd(&self, _index: usize, _call: Option<Call>, _err: bool) {}
        fn count_fault(&self, _index: Option<usize>) {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
        fn signal_err(&self, _index: usize) {}
        fn has_fault(&self, _index: usize) -> bool {
            false
        }
        fn reset(&self) {}
        fn forget(&self) {}
    }

    #[test]
    fn a_panic_costs_the_connection() {
        let path = std::env::temp_dir().join(format!("ringroad-panic-{}", std::process::id()));
        let (limits, access, role) = (Limits::default(), Access::default(), Role::Server);
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
        let device = Broken::default();
        let config = SocketConfig { name: "broken", path: &path, role, limits, access };
        let _socket = Socket::start(config, attention, || Ok(device.clone())).unwrap();
        let ask = || {
            let mut peer = UnixStream::connect(&path).unwrap();
            peer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            peer.write_all([1u32, VERSION, 0].map(u32::to_ne_bytes).as_flattened()).unwrap();
            let mut answer = Vec::new();
            // To the end, or eight bytes after the header.
            let _ = peer.take(20).read_to_end(&mut answer);
            answer.len()
        };
        assert_eq!(ask(), 0);
        assert_eq!(ask(), 20, "the next frontend is served");
        assert_eq!(device.faults.load(Ordering::Relaxed), 1);
    }
}
