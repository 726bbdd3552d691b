//! Listeners of programs of this process.

use super::{
    socket::{SeqPacket, Socket, Stream},
    wait::{Polling, wait},
};
use crate::{
    side::Side,
    stack::{Backlog, Stack},
    types::SocketType,
};
use parking_lot::Condvar;
use std::{
    io,
    sync::Arc,
    task::{Wake, Waker},
    time::{Duration, Instant},
};

/// Wakes one of the threads that wait for a connection.
struct Arrival(Condvar);

impl Wake for Arrival {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.notify_one();
    }
}

/// A socket that accepts connections.
pub struct Listener<S: Side> {
    stack: Arc<Stack<S>>,
    backlog: Arc<Backlog<S::Relay>>,
    arrival: Arc<Arrival>,
    port: u32,
    kind: SocketType,
}

impl<S: Side> std::fmt::Debug for Listener<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Listener").field("port", &self.port).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl<S: Side> Listener<S> {
    /// Listens on a local port.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if the port has a listener of this kind already.
    pub fn bind(stack: &Arc<Stack<S>>, port: u32, kind: SocketType) -> io::Result<Listener<S>> {
        let arrival = Arc::new(Arrival(Condvar::new()));
        let backlog = stack.add_listener(port, kind, Waker::from(arrival.clone()))?;
        Ok(Listener { stack: stack.clone(), backlog, arrival, port, kind })
    }

    /// Waits for a connection, up to `timeout`.
    fn next(&self, timeout: Option<Duration>) -> io::Result<Arc<Socket<S>>> {
        let mut polling = Polling::new(&self.stack);
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut asleep = false;
        loop {
            if let Some(conn) = self.backlog.waiting.lock().pop_front() {
                return Ok(Socket::new(self.stack.clone(), conn));
            }
            if self.stack.pump(None) > 0 || !asleep && polling.poll_again() {
                continue;
            }
            asleep = true;
            polling.end();
            let mut waiting = self.backlog.waiting.lock();
            if !waiting.is_empty() {
                continue;
            }
            if !wait(&self.arrival.0, &mut waiting, until) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Accepts a stream connection; blocks until there is one.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the listener is for messages.
    pub fn accept(&self) -> io::Result<Stream<S>> {
        self.accept_within(None)
    }

    /// Like [`Listener::accept`], but waits at most `timeout`.
    ///
    /// # Errors
    /// As for [`Listener::accept`], and [`io::ErrorKind::TimedOut`].
    pub fn accept_within(&self, timeout: Option<Duration>) -> io::Result<Stream<S>> {
        self.check(SocketType::Stream)?;
        self.next(timeout).map(Stream)
    }

    /// Accepts a message connection; blocks until there is one.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the listener is for streams.
    pub fn accept_messages(&self) -> io::Result<SeqPacket<S>> {
        self.accept_messages_within(None)
    }

    /// Like [`Listener::accept_messages`], but waits at most `timeout`.
    ///
    /// # Errors
    /// As for [`Listener::accept_messages`], and [`io::ErrorKind::TimedOut`].
    pub fn accept_messages_within(&self, timeout: Option<Duration>) -> io::Result<SeqPacket<S>> {
        self.check(SocketType::SeqPacket)?;
        self.next(timeout).map(SeqPacket)
    }

    fn check(&self, kind: SocketType) -> io::Result<()> {
        if kind == self.kind {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("this listener accepts {:?} connections only", self.kind),
        ))
    }
}

impl<S: Side> Drop for Listener<S> {
    fn drop(&mut self) {
        self.stack.remove_listener(self.port, self.kind, &self.backlog);
    }
}
