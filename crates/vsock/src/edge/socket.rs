//! Sockets for programs of this process, on either end of a device. The interface follows `std::net`, with message sockets in
//! addition.
//!
//! A blocking call first polls the ring itself ([`Settings::poll`](crate::Settings::poll)), which saves the notification and the
//! wake-up by the worker, then sleeps until the stack's worker wakes it, or waits for the notification itself if no other thread
//! does.

use super::wait::{Leader, Polling, Signal};
use crate::{
    connection::{CloseReason, Conn, Inner, Phase, Verdict, Wanted},
    side::Side,
    stack::Stack,
    types::{Addr, SocketType},
};
use parking_lot::Mutex;
use ringroad_wire::vsock_hdr::{self as wire, Op};
use std::{
    io::{self, Read, Write},
    net::Shutdown,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    time::{Duration, Instant},
};

/// What both socket types share.
pub(super) struct Socket<S: Side> {
    stack: Arc<Stack<S>>,
    conn: Arc<Conn<S::Relay>>,
    signal: Arc<Signal<S::Relay>>,
    nonblocking: AtomicBool,
    timeout: Mutex<Option<Duration>>,
}

impl<S: Side> std::fmt::Debug for Socket<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Socket")
            .field("port", &self.conn.key.port)
            .field("peer", &self.conn.key.peer)
            .finish_non_exhaustive()
    }
}

impl<S: Side> Drop for Socket<S> {
    fn drop(&mut self) {
        self.stack.shut(&self.conn, true, true, Instant::now());
    }
}

impl<S: Side> Socket<S> {
    pub(super) fn new(stack: Arc<Stack<S>>, conn: Arc<Conn<S::Relay>>) -> Arc<Self> {
        let signal = Signal::new(&stack.host);
        conn.set_waker(Waker::from(signal.clone()));
        Arc::new(Socket { stack, conn, signal, nonblocking: AtomicBool::new(false), timeout: Mutex::new(None) })
    }

    fn connect(stack: &Arc<Stack<S>>, peer: Addr, kind: SocketType) -> io::Result<Arc<Self>> {
        let conn = stack.request_connection(peer, kind, None, Instant::now())?;
        let socket = Socket::new(stack.clone(), conn);
        socket.wait(None, |inner| match inner.phase {
            Phase::Connecting | Phase::Accepting => None,
            Phase::Open => Some(Ok(())),
            Phase::Closed(over) => Some(Err(over.error())),
        })?;
        Ok(socket)
    }

    /// Blocks until `ready` returns a result, polling the ring meanwhile. Payload that arrives for this connection goes straight
    /// to `wanted` if possible.
    fn wait<T>(
        &self,
        mut wanted: Option<&mut Wanted<'_>>,
        mut ready: impl FnMut(&mut Inner<S::Relay>) -> Option<io::Result<T>>,
    ) -> io::Result<T> {
        let mut polling = Polling::new(&self.stack);
        let until = self.timeout.lock().map(|timeout| Instant::now() + timeout);
        let mut asleep = false;
        loop {
            if let Some(answer) = ready(&mut self.conn.lock()) {
                return answer;
            }
            if self.pump(&mut wanted) {
                // The caller checks `wanted.got`.
                return Err(io::ErrorKind::Interrupted.into());
            }
            if !asleep && !self.nonblocking.load(Ordering::Relaxed) && polling.poll_again() {
                continue;
            }
            asleep = true;
            polling.end();
            let leader = Leader::new(&self.stack);
            let mut inner = self.conn.lock();
            if let Some(answer) = ready(&mut inner) {
                return answer;
            }
            if self.nonblocking.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let Some(leader) = leader else {
                self.signal.wait(&mut inner, until);
                continue;
            };
            self.signal.leads.store(true, Ordering::Relaxed);
            drop(inner);
            leader.wait(until);
            self.signal.leads.store(false, Ordering::Relaxed);
            // Take what is there before the worker takes over the ring again.
            self.pump(&mut wanted);
        }
    }

    /// Receives all packets, or until some payload has gone to `wanted`. Returns whether any has.
    fn pump(&self, wanted: &mut Option<&mut Wanted<'_>>) -> bool {
        loop {
            let received = self.stack.pump(wanted.as_deref_mut());
            let got = wanted.as_ref().is_some_and(|wanted| wanted.got > 0);
            if got || received == 0 {
                return got;
            }
        }
    }

    /// Returns `Some(Ok(0))` at the end of the stream.
    fn at_end(inner: &Inner<S::Relay>) -> Option<io::Result<usize>> {
        match inner.phase {
            Phase::Closed(CloseReason::Done) => Some(Ok(0)),
            Phase::Closed(over) => Some(Err(over.error())),
            _ if inner.recv_shut || inner.peer_send_shut => Some(Ok(0)),
            Phase::Open => None,
            Phase::Connecting | Phase::Accepting => Some(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    /// Called after something was read: decides whether the peer gets a credit update, or a reset because the connection is done.
    fn consumed(&self, inner: &mut Inner<S::Relay>, count: usize) -> Verdict {
        let due = self.conn.consumed(inner, count);
        let mut verdict = self.conn.close_if_done(inner);
        if due && verdict.reply.is_none() {
            verdict.reply = Some(Op::CreditUpdate);
        }
        verdict
    }

    fn read(&self, target: &mut [u8]) -> io::Result<usize> {
        if target.is_empty() {
            return Ok(0);
        }
        // Take buffered bytes from the inbox. Bytes that arrive while we poll go straight to the target.
        if self.conn.kind == SocketType::Stream && !self.nonblocking.load(Ordering::Relaxed) {
            let mut wanted = Wanted { key: self.conn.key, target: &mut *target, got: 0 };
            let result = self.wait(Some(&mut wanted), |inner| {
                if inner.inbox.unread() > 0 { Some(Ok(None)) } else { Self::at_end(inner).map(|end| end.map(Some)) }
            });
            let got = wanted.got;
            match result {
                _ if got > 0 => return Ok(got),
                Ok(None) => {}
                Ok(Some(end)) => return Ok(end),
                Err(error) => return Err(error),
            }
        }
        let mut verdict = None;
        let read = self.wait(None, |inner| {
            if inner.inbox.unread() > 0 {
                let count = inner.inbox.read(target);
                verdict = Some(self.consumed(inner, count));
                return Some(Ok(count));
            }
            Self::at_end(inner)
        })?;
        if let Some(verdict) = verdict {
            self.stack.carry_out(&self.conn, verdict);
        }
        Ok(read)
    }

    fn receive(&self, target: &mut [u8]) -> io::Result<Option<(usize, bool)>> {
        let mut verdict = None;
        let message = self.wait(None, |inner| {
            if let Some((len, record)) = inner.inbox.read_message(target) {
                verdict = Some(self.consumed(inner, len));
                return Some(Ok(Some((len, record))));
            }
            Self::at_end(inner).map(|end| end.map(|_| None))
        })?;
        if let Some(verdict) = verdict {
            self.stack.carry_out(&self.conn, verdict);
        }
        Ok(message)
    }

    /// Sends at least one byte, unless `bytes` is empty. The caller holds the connection's `sending` lock.
    fn send(&self, bytes: &[u8], flags: u32) -> io::Result<usize> {
        let mut asked = false;
        let polls = !self.stack.settings().poll.is_zero();
        let mut polling = Polling::new(&self.stack);
        loop {
            // While polling, wait for room in the ring rather than queue the packet for the worker.
            let poll_first =
                polls && self.stack.sender.is_direct() && polling.until.is_none_or(|until| Instant::now() < until);
            let room = if poll_first { 0 } else { self.stack.room(&self.conn) };
            // An empty message occupies the outbox too.
            let may = self.conn.kind == SocketType::Stream || self.stack.has_room(&self.conn);
            if may {
                let sent = self.stack.send(&self.conn, bytes, flags, room)?;
                if sent > 0 || bytes.is_empty() {
                    return Ok(sent);
                }
            }
            if self.stack.pump(None) > 0 {
                continue;
            }
            if self.nonblocking.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            if polling.poll_again() {
                continue;
            }
            polling.end();
            let mut inner = self.conn.lock();
            inner.may_send()?;
            if !may && !self.stack.has_room(&self.conn) {
                // Wait until some messages have left the outbox.
            } else if inner.credit.available() > 0 || bytes.is_empty() {
                if poll_first || !may || self.stack.room(&self.conn) > 0 {
                    continue;
                }
            } else if !std::mem::replace(&mut asked, true) {
                // The peer's credit update may have been lost, for example when it was reset.
                drop(inner);
                self.stack.send_control(&self.conn, Op::CreditRequest);
                continue;
            }
            let until = self.timeout.lock().map(|timeout| Instant::now() + timeout);
            if !self.signal.wait(&mut inner, until) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    fn shutdown(&self, how: Shutdown) {
        let (sending, receiving) = match how {
            Shutdown::Write => (true, false),
            Shutdown::Read => (false, true),
            Shutdown::Both => (true, true),
        };
        self.stack.shut(&self.conn, sending, receiving, Instant::now());
    }
}

macro_rules! socket_calls {
    () => {
        /// Returns the address of the other end.
        pub fn peer_addr(&self) -> Addr {
            self.0.conn.key.peer
        }

        /// Returns the address of this end.
        pub fn local_addr(&self) -> Addr {
            Addr { cid: self.0.conn.cid, port: self.0.conn.key.port }
        }

        /// Shuts down sending, receiving or both. What was sent before still arrives.
        pub fn shutdown(&self, how: Shutdown) {
            self.0.shutdown(how);
        }

        /// Sets whether calls that cannot proceed return [`io::ErrorKind::WouldBlock`] instead of blocking.
        pub fn set_nonblocking(&self, nonblocking: bool) {
            self.0.nonblocking.store(nonblocking, Ordering::Relaxed);
        }

        /// Sets how long a call blocks at most; `None`: without limit.
        pub fn set_timeout(&self, timeout: Option<Duration>) {
            *self.0.timeout.lock() = timeout;
        }

        /// Sets a function that is called whenever the socket's state may have changed, from any thread and with locks held. For
        /// programs that wait for several events at once: it can write to an eventfd, for example.
        pub fn set_waker(&self, waker: Option<Arc<dyn Fn() + Send + Sync>>) {
            self.0.signal.set_callback(waker);
        }
    };
}

/// A connected stream socket. Clones share the socket; dropping the last one closes it.
pub struct Stream<S: Side>(pub(super) Arc<Socket<S>>);

impl<S: Side> std::fmt::Debug for Stream<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Stream").field(&self.0).finish()
    }
}

impl<S: Side> Clone for Stream<S> {
    fn clone(&self) -> Self {
        Stream(self.0.clone())
    }
}

impl<S: Side> Stream<S> {
    socket_calls!();

    /// Connects to a peer's port.
    ///
    /// # Errors
    /// `NotConnected` if the device is not running, `Unsupported` if streams were not negotiated, `QuotaExceeded` if the limit
    /// of connections or memory is reached, `ConnectionRefused`, `ConnectionReset` or `TimedOut` if the peer refuses, resets
    /// or does not reply.
    pub fn connect(stack: &Arc<Stack<S>>, peer: Addr) -> io::Result<Stream<S>> {
        Socket::connect(stack, peer, SocketType::Stream).map(Stream)
    }
}

impl<S: Side> Read for &Stream<S> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.0.read(target)
    }
}

impl<S: Side> Read for Stream<S> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.0.read(target)
    }
}

impl<S: Side> Write for &Stream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let _sending = self.0.conn.sending.lock();
        self.0.send(bytes, 0)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<S: Side> Write for Stream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connected message socket. Clones share the socket; dropping the last one closes it.
pub struct SeqPacket<S: Side>(pub(super) Arc<Socket<S>>);

impl<S: Side> std::fmt::Debug for SeqPacket<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("SeqPacket").field(&self.0).finish()
    }
}

impl<S: Side> Clone for SeqPacket<S> {
    fn clone(&self) -> Self {
        SeqPacket(self.0.clone())
    }
}

impl<S: Side> SeqPacket<S> {
    socket_calls!();

    /// Connects to a peer's port.
    ///
    /// # Errors
    /// As for [`Stream::connect`]; `Unsupported` if messages were not negotiated.
    pub fn connect(stack: &Arc<Stack<S>>, peer: Addr) -> io::Result<SeqPacket<S>> {
        Socket::connect(stack, peer, SocketType::SeqPacket).map(SeqPacket)
    }

    /// Sends a whole message; `record`: it ends a record (MSG_EOR).
    ///
    /// # Errors
    /// `InvalidInput` if the message is longer than the peer can take, `WouldBlock` if it does not fit now and the socket is
    /// nonblocking, `TimedOut`, `BrokenPipe` after a shutdown, `ConnectionReset`.
    pub fn send(&self, message: &[u8], record: bool) -> io::Result<()> {
        let socket = &self.0;
        let _sending = socket.conn.sending.lock();
        {
            let inner = socket.conn.lock();
            inner.may_send()?;
            let (largest, credit) = (inner.credit.largest(), inner.credit.available());
            if message.len() > largest {
                let why = format!("message of {} bytes exceeds the peer's limit of {largest}", message.len());
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
            // A message that was sent in part could not be taken back.
            let room = socket.stack.room(&socket.conn);
            if socket.nonblocking.load(Ordering::Relaxed)
                && (message.len() > credit || message.len() > room || !socket.stack.has_room(&socket.conn))
            {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        let flags = wire::SEQ_EOM | if record { wire::SEQ_EOR } else { 0 };
        let mut left = message;
        loop {
            left = left.get(socket.send(left, flags)?..).unwrap_or_default();
            if left.is_empty() {
                return Ok(());
            }
        }
    }

    /// Receives a message. Returns its length, which may exceed the target (the excess is discarded), and whether it ends a
    /// record. Returns `None` when there will be no more messages.
    ///
    /// # Errors
    /// `WouldBlock` if there is no message and the socket is nonblocking, `TimedOut`, `ConnectionReset`.
    pub fn receive(&self, target: &mut [u8]) -> io::Result<Option<(usize, bool)>> {
        self.0.receive(target)
    }
}
