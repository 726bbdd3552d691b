//! The thread of a vhost-user socket: waits for a frontend, or for a socket to connect to, and lives with one connection at a
//! time.

use super::{
    device::Device,
    session::{Session, explain, is_violation},
};
use crate::sys;
use std::{
    fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::{
            fs::FileTypeExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    thread::{self, JoinHandle},
    time::Duration,
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

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A program answers there.
    #[error("{name}: socket {path} is in use by a running program; stop that or choose another path")]
    InUse {
        /// Whose it would be.
        name: String,
        /// The socket.
        path: PathBuf,
    },
    /// Something else has that name.
    #[error("{name}: {path} exists and is not a socket; remove it or choose another path")]
    NotASocket {
        /// Whose it would be.
        name: String,
        /// The path.
        path: PathBuf,
    },
    /// The directory is missing, not writable, …
    #[error("{name}: cannot make socket {path}: {error}")]
    Bind {
        /// Whose it would be.
        name: String,
        /// The socket.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// No thread, no eventfd.
    #[error("{name}: {error}")]
    Start {
        /// Whose it would be.
        name: String,
        /// What the kernel says.
        error: io::Error,
    },
}

/// Flags of a message's header.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;

/// How often a client tries.
const RETRY: Duration = Duration::from_millis(250);

/// Why a connection ends whose frontend cannot be told that a message was refused.
const CANNOT_REFUSE: &str = "a message was refused, and there is no REPLY_ACK to tell it by";

/// The connection there is. A frontend that sends half a message, or does not read replies, holds up the port's thread;
/// who ends the port shuts it down.
type Current = Arc<Mutex<Option<UnixStream>>>;

/// A socket with a device behind it, and the thread that serves it. Dropped, it disconnects and is removed.
pub(crate) struct Socket {
    stop: EventFd,
    current: Current,
    thread: Option<JoinHandle<()>>,
    path: Option<PathBuf>,
}

impl Socket {
    /// Makes the socket (as a server) and starts its thread. `make` brings the device, which takes longer than to see that
    /// there can be no socket. `attention`: the device's word that its memory is gone.
    pub(crate) fn start<D: Device>(
        name: &str,
        path: &Path,
        role: Role,
        attention: EventFd,
        make: impl FnOnce() -> io::Result<D>,
    ) -> Result<Socket, SocketError> {
        let failed = |error: io::Error| SocketError::Start { name: name.to_owned(), error };
        let listener = match role {
            Role::Server => Some(bind(name, path)?),
            Role::Client => None,
        };
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let device = make().map_err(failed)?;
        let made = listener.is_some().then(|| path.to_owned());
        let current = Current::default();
        let thread = {
            let stop = stop.try_clone().map_err(failed)?;
            let (path, current) = (path.to_owned(), current.clone());
            thread::Builder::new().name(format!("vhost {name}")).stack_size(256 << 10).spawn(move || {
                Thread { device, path, attention, stop, current, listener }.run();
            })
        };
        Ok(Socket { stop, current, thread: Some(thread.map_err(failed)?), path: made })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        // After `stop`: the thread sees either that, or the end of the connection.
        if let Some(stream) = &*lock(&self.current) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Makes a listening socket. One that a dead program has left is removed.
pub(crate) fn bind(name: &str, path: &Path) -> Result<UnixListener, SocketError> {
    let (name, path) = (name.to_owned(), path.to_owned());
    if let Ok(metadata) = fs::symlink_metadata(&path) {
        if !metadata.file_type().is_socket() {
            return Err(SocketError::NotASocket { name, path });
        }
        match UnixStream::connect(&path) {
            Ok(_) => return Err(SocketError::InUse { name, path }),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                log::info!("{name}: removing the stale socket {}", path.display());
                if let Err(error) = fs::remove_file(&path) {
                    return Err(SocketError::Bind { name, path, error });
                }
            }
            Err(error) => return Err(SocketError::Bind { name, path, error }),
        }
    }
    match UnixListener::bind(&path).and_then(|listener| listener.set_nonblocking(true).map(|()| listener)) {
        Ok(listener) => Ok(listener),
        Err(error) => Err(SocketError::Bind { name, path, error }),
    }
}

/// Obeys SET_VRING_ENABLE where the `vhost` crate would not: QEMU sends it as soon as there are protocol features, but the
/// crate wants to have seen SET_FEATURES. `false`: something else comes next.
fn set_vring_enable<D: Device>(mut socket: &UnixStream, session: &Mutex<Session<D>>) -> io::Result<bool> {
    const REQUEST: u32 = 18;
    const NEED_REPLY: u32 = 1 << 3;
    let mut session = lock(session);
    if !session.is_early() {
        return Ok(false);
    }
    // Request, flags, size of what follows; vring, 0 or 1.
    let mut message = [0; 20];
    let len = sys::peek(socket.as_fd(), &mut message)?;
    let word = |index: usize| u32::from_ne_bytes(std::array::from_fn(|byte| message[4 * index + byte]));
    let (flags, vring, enable) = (word(1), word(3), word(4));
    if len < message.len() || word(0) != REQUEST || flags & !NEED_REPLY != VERSION || word(2) != 8 || enable > 1 {
        return Ok(false);
    }
    socket.read_exact(&mut message)?;
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
}

impl<D: Device> Thread<D> {
    fn run(&self) {
        while let Some(stream) = self.next_frontend() {
            log::info!("{}: frontend connected", self.device.name());
            let why = self.serve(stream);
            *lock(&self.current) = None;
            self.device.forget();
            log::info!("{}: frontend gone: {why}", self.device.name());
            // A peer that closes each connection at once must not keep us busy.
            if self.listener.is_none()
                && matches!(sys::wait_readable([Some(sys::borrow(&self.stop))], Some(RETRY)), Ok([true]))
            {
                return;
            }
        }
    }

    /// Waits for a frontend. `None`: to stop.
    fn next_frontend(&self) -> Option<UnixStream> {
        let mut said = false;
        loop {
            let connected = match &self.listener {
                Some(listener) => listener.accept().map(|(stream, _)| stream),
                None => UnixStream::connect(&self.path),
            };
            let mut listener = self.listener.as_ref().map(|listener| listener.as_fd());
            match connected {
                Ok(stream) if stream.set_nonblocking(false).is_ok() => return Some(stream),
                // Out of descriptors, mostly: the frontend stays in the queue, and is no event to wait for.
                Err(error) if listener.is_some() && error.kind() != io::ErrorKind::WouldBlock => {
                    listener = None;
                    if !std::mem::replace(&mut said, true) {
                        log::error!("{}: cannot accept a frontend: {error}; trying again", self.device.name());
                    }
                }
                _ => {}
            }
            let timeout = listener.is_none().then_some(RETRY);
            match sys::wait_readable([Some(sys::borrow(&self.stop)), listener], timeout) {
                Ok([false, _]) => {}
                Ok([true, _]) => return None,
                Err(error) => {
                    log::error!("{}: {error}; device stopped", self.device.name());
                    return None;
                }
            }
        }
    }

    /// One connection, to its end. Says why it ended.
    fn serve(&self, stream: UnixStream) -> String {
        let session = Arc::new(Mutex::new(Session::new(self.device.clone())));
        let socket = match stream.try_clone().and_then(|socket| Ok((socket, stream.try_clone()?))) {
            Ok((socket, current)) => {
                *lock(&self.current) = Some(current);
                socket
            }
            Err(error) => return error.to_string(),
        };
        let _ = self.attention.read();
        let mut handler = BackendReqHandler::from_stream(stream, session.clone());
        loop {
            let listener = self.listener.as_ref().map(|listener| listener.as_fd());
            let fds =
                [Some(sys::borrow(&self.stop)), Some(sys::borrow(&self.attention)), Some(socket.as_fd()), listener];
            match sys::wait_readable(fds, None) {
                Ok([true, ..]) => return "the device is going down".into(),
                Ok([_, true, ..]) => return "its memory is gone".into(),
                Ok([_, _, true, _]) => {}
                // Only when the first one is still there, seen after the second one: a frontend that closes and connects
                // again, perhaps while we look from one to the other, must find its old connection ended.
                Ok([.., true]) => match sys::wait_readable([Some(socket.as_fd())], Some(Duration::ZERO)) {
                    Ok([true]) => {}
                    _ => {
                        if !self.turn_away() {
                            let _ =
                                sys::wait_readable([Some(sys::borrow(&self.stop)), Some(socket.as_fd())], Some(RETRY));
                        }
                        continue;
                    }
                },
                Ok(_) => continue,
                Err(error) => return error.to_string(),
            }
            match set_vring_enable(&socket, &session) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => return error.to_string(),
            }
            // The `vhost` crate answers some refusals by itself, and says nothing of them here.
            lock(&session).refused = false;
            if let Err(error) = handler.handle_request() {
                let mut session = lock(&session);
                match std::mem::take(&mut session.refused) {
                    true if session.can_refuse() => {}
                    true => return CANNOT_REFUSE.into(),
                    false if is_violation(&error) => {
                        session.violated(explain(&error));
                        return "it does not keep to the protocol".into();
                    }
                    false => return explain(&error),
                }
            }
        }
    }

    /// A second frontend while there is one: the socket has one device behind it. `false`: it could not be accepted, and
    /// is still in the queue.
    fn turn_away(&self) -> bool {
        let Some(listener) = &self.listener else { return true };
        let accepted = listener.accept();
        if accepted.is_ok() {
            log::warn!("{}: a second frontend was turned away; the first one is still connected", self.device.name());
        }
        accepted.is_ok()
    }
}
