//! What surrounds a stack: its rings, the host sockets behind its connections, notifications and threads. `device.rs` and
//! `driver.rs` implement [`Side`], `host` implements [`Host`] and [`Relay`].

use crate::{
    payload::Payload,
    send::Link,
    types::{Broken, Key, SocketType},
    wrong::Violation,
};
use ringroad_wire::vsock_hdr::VsockHdr;
use std::{any::Any, io, panic::resume_unwind, time::Instant};

/// The types of one end of a device: its two rings, and the host sockets its connections can use.
pub trait Side: Send + Sync + Sized + 'static {
    /// The ring that carries packets to the peer.
    type Link: Link + Send;
    /// The ring that carries packets from the peer.
    type Inlet: Inlet + Send;
    /// A host socket.
    type Relay: Relay;
}

/// What [`Inlet::take`] took from the ring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Taken {
    /// Packets, valid or not.
    pub packets: usize,
    /// Bytes of payload.
    pub bytes: usize,
}

/// The ring that carries packets from the peer.
pub trait Inlet {
    /// Takes a burst of packets, calls `each` with the header and payload of each, then returns the buffers to the peer.
    ///
    /// # Errors
    /// [`Broken`] if the peer has broken the ring. Packets before that may have been passed to `each`.
    fn take(&mut self, each: impl FnMut(VsockHdr, Payload<'_>)) -> Result<Taken, Broken>;

    /// Returns whether the peer wants to be notified of buffers that were returned to it since the last call.
    fn wants_notification(&mut self) -> bool;

    /// Returns how many packets' buffers may wait until the peer is notified of them ([`Settings::interrupt_delay`](crate::Settings)).
    fn patience(&self) -> usize {
        0
    }

    /// Asks the peer to notify us of packets. Returns `true` if packets are available already.
    fn enable_notification(&mut self) -> bool;

    /// Asks the peer not to notify us: the caller polls.
    fn disable_notification(&mut self);
}

/// The host socket behind a connection.
pub trait Relay: Send + 'static {
    /// The peer has accepted the connection.
    fn opened(&mut self, key: Key);

    /// Passes on as much as the socket takes without blocking. On error the socket will never take more, and
    /// [`Stack::shut_relay_read`](crate::Stack::shut_relay_read) or [`Stack::reset_relay`](crate::Stack::reset_relay) is called soon.
    ///
    /// # Errors
    /// The error of the host socket. That it takes no more now is none.
    fn deliver(&mut self, payload: &mut Payload<'_>) -> io::Result<()>;

    /// The peer sends no more.
    fn finish(&mut self);

    /// The connection is closed; `reset`: abnormally.
    fn close(&mut self, reset: bool);
}

/// For ends without host sockets.
#[derive(Debug)]
pub enum NoRelay {}

impl Relay for NoRelay {
    fn opened(&mut self, _: Key) {
        match *self {}
    }

    fn deliver(&mut self, _: &mut Payload<'_>) -> io::Result<()> {
        match *self {}
    }

    fn finish(&mut self) {
        match *self {}
    }

    fn close(&mut self, _: bool) {
        match *self {}
    }
}

/// One of the two rings of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Carries packets to the peer.
    Out,
    /// Carries packets from the peer.
    In,
}

/// Result of [`Host::open`]: whether there is a host socket for a peer's request.
#[derive(Debug)]
pub enum OpenResult<R> {
    /// Connected; the request is accepted at once.
    Connected(R),
    /// Connecting since this time; [`Stack::finish_open`](crate::Stack::finish_open) reports the result.
    Pending(R, Instant),
    /// No such destination; the request is refused.
    Refused,
}

/// What a stack needs from its environment. Called without any ring lock held, but possibly with a connection's lock held.
pub trait Host<R>: Send + Sync {
    /// Notifies the peer of a queue.
    fn notify(&self, queue: Queue);

    /// [`Stack::work`](crate::Stack::work) has something to do.
    fn wake(&self);

    /// The peer has broken the ring of a queue, which is no longer used.
    fn broken(&self, queue: Queue, why: Broken);

    /// The peer has violated the protocol. Happens as often as the peer likes.
    fn violation(&self, _violation: Violation) {}

    /// Code that sends to this peer on behalf of another one has panicked. The rings are not to be used any more; calls may go
    /// on until they are taken away. Default: the panic goes on, in the turn of that other one.
    fn panicked(&self, payload: Box<dyn Any + Send>) {
        resume_unwind(payload)
    }

    /// The peer requests a connection to a port without a listener in this process.
    fn open(&self, key: Key, kind: SocketType) -> OpenResult<R>;

    /// A connection with a relay can send again.
    fn room(&self, key: Key);

    /// Returns whether a request of the peer may be processed now. If not, it is answered with a reset and counted
    /// ([`Report::limited`](crate::Report::limited)) before any work is done for it. Meant for rate limits. Called with locks held, so it must only
    /// decide.
    fn admit(&self) -> bool {
        true
    }

    /// Returns whether [`Host::wait`] is available now.
    fn can_wait(&self) -> bool {
        false
    }

    /// Discards pending notifications of packets, and pending calls of [`Host::unwait`].
    fn clear(&self) {}

    /// Blocks until the peer notifies us of packets, [`Host::unwait`] has been called since [`Host::clear`], or the deadline has
    /// passed. A thread that waits for a packet calls this in place of the worker, which saves the wake-up from worker to thread.
    fn wait(&self, _until: Option<Instant>) {}

    /// Ends a call of [`Host::wait`].
    fn unwait(&self) {}
}
