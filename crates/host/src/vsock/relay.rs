//! Host sockets behind a guest's connections. The connection writes to its socket, the worker (`member.rs`) reads from it.

use super::{
    budget::{Budget, Place, Waiting},
    mailbox::Mailbox,
};
use crate::sys;
use parking_lot::Mutex;
use ringroad_vsock::{Key, Payload, Relay};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::{
    any::Any,
    io,
    net::{Shutdown, SocketAddr},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Send buffer of a socket without a grant, as passed to SO_SNDBUF; the kernel doubles it.
const BASE: usize = 4096;
/// Largest send buffer, as passed to SO_SNDBUF: the usual net.core.wmem_max.
const MOST: usize = 212_992;

/// The device's end of a connection; some have host sockets behind them.
pub type HostSide = ringroad_vsock::DeviceSide<HostRelay>;

/// What a guest's stack and its sockets ask of the worker.
pub(super) type Mail = Mailbox<Command>;

/// A request from a guest's stack to the worker.
pub(super) enum Command {
    /// A connection has room again: read from its host socket.
    Room(Key),
    /// A connection that the guest has requested. Without a target connecting has begun already; `true`: it is connected.
    Open(Key, Arc<Wire>, Option<(Target, Waiting)>, bool),
    /// Writing to a socket failed; `true`: it was reset.
    Failed(u64, bool),
    /// A socket was granted kernel memory.
    Grown(u64),
    /// A connection has ended.
    Close(u64),
    /// Code that used the guest's rings in another guest's turn has panicked: goes on in the guest's own.
    Panicked(Box<dyn Any + Send>),
}

/// A host socket, shared by its connection and the worker.
pub(super) struct Wire {
    /// Its number.
    pub slot: u64,
    /// Empty until connecting begins.
    socket: OnceLock<Socket>,
    tcp: bool,
    /// Its connection has ended; the connection's key may have been reused since.
    ended: AtomicBool,
    /// It is reset when closed: unread data is lost.
    reset: AtomicBool,
    granted: Mutex<Granted>,
    mail: Arc<Mail>,
    place: Place,
}

impl Wire {
    /// Creates one that is not connected yet.
    pub(super) fn new(mail: &Arc<Mail>, place: Place, tcp: bool) -> Wire {
        Wire {
            slot: mail.slot(),
            socket: OnceLock::new(),
            tcp,
            ended: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            granted: Mutex::default(),
            mail: mail.clone(),
            place,
        }
    }

    /// Wraps the socket of a program that has connected.
    pub(super) fn accepted(mail: &Arc<Mail>, place: Place, socket: Socket) -> Wire {
        let wire = Wire::new(mail, place, false);
        let _ = socket.set_send_buffer_size(BASE);
        let _ = wire.socket.set(socket);
        wire
    }

    pub(super) fn socket(&self) -> Option<&Socket> {
        self.socket.get()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.place.0
    }

    /// Connects without blocking. Returns `false` if the connect is still pending.
    pub(super) fn connect(&self, target: &Target) -> io::Result<bool> {
        let (socket, connected) = match target {
            Target::Unix(path) => (connect_unix(path)?, true),
            Target::Tcp(address) => self.connect_tcp(*address)?,
        };
        let _ = self.socket.set(socket);
        Ok(connected)
    }

    fn connect_tcp(&self, address: SocketAddr) -> io::Result<(Socket, bool)> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        let _ = socket.set_tcp_nodelay(true);
        // By default the kernel buffers megabytes in each direction. The receive buffer cannot be changed later.
        let incoming = self.budget().grant(2 * (MOST - BASE));
        self.granted.lock().incoming = incoming;
        let _ = socket.set_recv_buffer_size(BASE + incoming / 2);
        let _ = socket.set_send_buffer_size(BASE);
        match socket.connect(&address.into()) {
            Ok(()) => Ok((socket, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok((socket, false)),
            Err(error) => Err(error),
        }
    }

    /// Called when the socket takes no more data: enlarges its send buffer, if the budget allows. What the kernel does not
    /// buffer is kept in the connection, which costs another copy. Returns whether it was enlarged.
    fn grow(&self) -> bool {
        let Some(socket) = self.socket() else { return false };
        let mut granted = self.granted.lock();
        let now = BASE + granted.outgoing / 2;
        // At least doubled each time, so that the calls pay off.
        let more = if now <= MOST / 2 { self.budget().grant(2 * (MOST - now)) } else { 0 };
        if more < 2 * now {
            self.budget().give_back(more);
            return false;
        }
        let first = granted.outgoing == 0;
        granted.outgoing += more;
        let _ = socket.set_send_buffer_size(now + more / 2);
        if first {
            self.mail.send(Command::Grown(self.slot));
        }
        true
    }

    /// Returns whether the program has not read everything yet. Unread data stays in the kernel and on the guest's budget,
    /// even after the connection has ended.
    pub(super) fn is_unread(&self) -> bool {
        // More than 1: the kernel signals that the last bytes were read while it still counts one, and for TCP it counts the
        // FIN.
        let lost = self.reset.load(Ordering::Acquire);
        !lost && self.socket().is_some_and(|socket| sys::unread(socket.as_fd()).is_ok_and(|unread| unread > 1))
    }

    /// Returns granted memory if the program has read nearly everything; `false` if it has not.
    pub(super) fn shrink(&self) -> bool {
        let Some(socket) = self.socket() else { return true };
        let mut granted = self.granted.lock();
        if sys::unread(socket.as_fd()).is_ok_and(|unread| unread > 2 * BASE) {
            return false;
        }
        let _ = socket.set_send_buffer_size(BASE);
        self.budget().give_back(std::mem::take(&mut granted.outgoing));
        true
    }
}

/// Kernel memory beyond [`BASE`], in bytes of the guest's budget.
#[derive(Default)]
struct Granted {
    incoming: usize,
    outgoing: usize,
}

impl Drop for Wire {
    fn drop(&mut self) {
        let Granted { incoming, outgoing } = std::mem::take(self.granted.get_mut());
        self.budget().give_back(incoming + outgoing);
        // Guarded, as what is unread may hold descriptors, which are closed with it: see `sys::refuse_descriptors`.
        if let Some(socket) = self.socket.take() {
            sys::guard::guarded(|| drop(socket));
        }
    }
}

/// The destination of a connect.
pub(super) enum Target {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A host socket, Unix or TCP, behind a connection.
pub struct HostRelay {
    pub(super) wire: Arc<Wire>,
    /// The program has requested the connection and waits for the "OK" line.
    pub(super) awaits_ok: bool,
}

impl std::fmt::Debug for HostRelay {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("HostRelay").field("awaits_ok", &self.awaits_ok).finish_non_exhaustive()
    }
}

impl Relay for HostRelay {
    fn opened(&mut self, key: Key) {
        if std::mem::take(&mut self.awaits_ok)
            && let Some(socket) = self.wire.socket()
        {
            let line = format!("OK {}\n", key.port);
            // A socket that nothing was written to has room for a line. The worker notices if the program has disconnected.
            let _ = socket.send(line.as_bytes());
        }
    }

    fn deliver(&mut self, payload: &mut Payload<'_>) -> io::Result<()> {
        // Nothing is taken before the socket is connected; the worker drains the connection then.
        let Some(socket) = self.wire.socket() else { return Ok(()) };
        while !payload.is_empty() {
            let private = payload.private();
            let sent = if private.is_empty() {
                sys::send_spans(socket.as_fd(), payload.remaining_spans())
            } else {
                socket.send_with_flags(private, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
            match sent {
                Ok(sent) => payload.skip(sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.wire.grow() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.wire.mail.send(Command::Failed(self.wire.slot, is_reset(socket, error.kind())));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self) {
        if let Some(socket) = self.wire.socket() {
            let _ = socket.shutdown(Shutdown::Write);
        }
    }

    fn close(&mut self, reset: bool) {
        if reset
            && self.wire.tcp
            && let Some(socket) = self.wire.socket()
        {
            // The TCP connection is reset too.
            let _ = SockRef::from(socket).set_linger(Some(std::time::Duration::ZERO));
            self.wire.reset.store(true, Ordering::Release);
        }
        self.wire.ended.store(true, Ordering::Release);
        self.wire.mail.send(Command::Close(self.wire.slot));
    }
}

/// Returns whether an error means that the program has reset its connection. Not for Unix sockets, which report the same
/// error if the program closes its socket with unread data.
pub(super) fn is_reset(socket: &Socket, error: io::ErrorKind) -> bool {
    error == io::ErrorKind::ConnectionReset && socket.domain().is_ok_and(|domain| domain != Domain::UNIX)
}

/// Connects to a Unix socket without blocking; fails if the listener's backlog is full.
fn connect_unix(path: &Path) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    sys::refuse_descriptors(socket.as_fd());
    let _ = socket.set_send_buffer_size(BASE);
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(socket)
}
