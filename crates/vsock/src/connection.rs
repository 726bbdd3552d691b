//! One connection: credit in both directions, shutdown state and received data. A state machine over packets: `stack/packets.rs`
//! finds the connection of a packet, calls it, and sends what it replies. Connection states and operations: virtio 1.3, 5.10.6.3
//! to 5.10.6.6.

use crate::{
    account::{Account, Charge, Opened},
    credit::{ReceiveCredit, SendCredit},
    inbox::{Full, Inbox},
    outbox::Owner,
    payload::Payload,
    side::Relay,
    sync::{AtomicUsize, Ordering},
    types::{Key, SocketType},
    wrong::Wrong,
};
use parking_lot::{Mutex, MutexGuard};
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    io,
    sync::{Arc, OnceLock},
    task::Waker,
    time::Instant,
};

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A request was sent; waiting for the response.
    Connecting,
    /// A request was received; the host socket is still connecting.
    Accepting,
    /// Established.
    Open,
    /// Closed, and removed from all tables.
    Closed(CloseReason),
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// Both ends have shut down both directions.
    Done,
    /// There is no listener, or a limit is reached.
    Refused,
    /// The peer or the transport reset the connection.
    Reset,
    /// The peer did not respond in time.
    TimedOut,
}

impl CloseReason {
    pub(crate) fn error(self) -> io::Error {
        io::Error::from(match self {
            CloseReason::Done => io::ErrorKind::BrokenPipe,
            CloseReason::Refused => io::ErrorKind::ConnectionRefused,
            CloseReason::Reset => io::ErrorKind::ConnectionReset,
            CloseReason::TimedOut => io::ErrorKind::TimedOut,
        })
    }
}

/// The target of a blocked `read` call, so that payload can be copied straight into it.
pub(crate) struct Wanted<'a> {
    pub key: Key,
    pub target: &'a mut [u8],
    pub got: usize,
}

/// Actions to perform after a packet, once the connection's lock is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub(crate) struct Verdict {
    /// Packet to send to the peer.
    pub reply: Option<Op>,
    /// Remove the connection from the table.
    pub closed: bool,
    /// The protocol violation that the connection was reset for.
    pub wrong: Option<Wrong>,
    /// The relay can send again.
    pub room: bool,
    /// Wake the program that waits for a change of the connection.
    pub wake: bool,
}

impl Verdict {
    fn reply(op: Op) -> Verdict {
        Verdict { reply: Some(op), ..Verdict::default() }
    }

    /// The connection is reset because of a violation.
    pub(crate) fn wrong(wrong: Wrong) -> Verdict {
        Verdict { reply: Some(Op::Reset), closed: true, wrong: Some(wrong), room: false, wake: true }
    }
}

/// The mutable state of a connection, under one lock.
pub(crate) struct Inner<R> {
    pub phase: Phase,
    /// What this end may send.
    pub credit: SendCredit,
    /// Total bytes received.
    pub received: u64,
    /// The peer has shut down sending.
    pub peer_send_shut: bool,
    /// The peer has shut down receiving.
    pub peer_recv_shut: bool,
    /// This end has shut down sending.
    pub send_shut: bool,
    /// This end has shut down receiving.
    pub recv_shut: bool,
    pub inbox: Inbox,
    /// The host socket, for connections that have one.
    pub relay: Option<R>,
    /// When to give up waiting for the response, or for the peer to close.
    pub deadline: Option<Instant>,
    /// No data since the last sweep.
    pub idle: bool,
    /// The connection is registered for the next sweep.
    pub listed: bool,
}

impl<R> Inner<R> {
    /// Returns an error if nothing can be sent.
    pub(crate) fn may_send(&self) -> io::Result<()> {
        match self.phase {
            Phase::Closed(over) => Err(over.error()),
            _ if self.send_shut || self.peer_recv_shut => Err(io::ErrorKind::BrokenPipe.into()),
            Phase::Open => Ok(()),
            Phase::Connecting | Phase::Accepting => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

/// A connection.
pub(crate) struct Conn<R> {
    pub key: Key,
    pub kind: SocketType,
    pub cid: u64,
    /// What the peer may send.
    pub window: ReceiveCredit,
    queued: AtomicUsize,
    /// Held while sending, so that packets of two threads do not interleave.
    pub sending: Mutex<()>,
    inner: Mutex<Inner<R>>,
    /// The program that waits for changes, if the connection has one.
    waker: OnceLock<Waker>,
    account: Arc<Account>,
    _opened: Opened,
}

impl<R> Owner for Arc<Conn<R>> {
    fn key(&self) -> usize {
        Arc::as_ptr(self) as usize
    }

    fn stamp(&self, header: &mut VsockHdr) {
        self.window.stamp(header);
    }

    fn queued(&self) -> &AtomicUsize {
        &self.queued
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        // `Stack::room` has checked the limit.
        Some(self.account.charge_anyway(bytes))
    }
}

impl<R: Relay> Conn<R> {
    pub(crate) fn new(cid: u64, key: Key, kind: SocketType, buf_alloc: u32, phase: Phase, opened: Opened) -> Self {
        let account = opened.account().cloned().unwrap_or_else(|| Account::new(usize::MAX, 1));
        Conn {
            key,
            kind,
            cid,
            window: ReceiveCredit::new(buf_alloc, account.clone()),
            queued: AtomicUsize::new(0),
            sending: Mutex::new(()),
            inner: Mutex::new(Inner {
                phase,
                credit: SendCredit::default(),
                received: 0,
                peer_send_shut: false,
                peer_recv_shut: false,
                send_shut: false,
                recv_shut: false,
                inbox: Inbox::new(&account),
                relay: None,
                deadline: None,
                idle: true,
                listed: false,
            }),
            waker: OnceLock::new(),
            account,
            _opened: opened,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner<R>> {
        self.inner.lock()
    }

    /// Sets the program that waits for changes; can be set once.
    pub(crate) fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// Wakes the program that waits for changes. Called after the change, which was made under the connection's lock, so that a
    /// program that has just seen the old state under the lock is not missed.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
    }

    /// Returns a packet header addressed to the peer.
    pub(crate) fn header(&self, op: Op) -> VsockHdr {
        VsockHdr {
            src_cid: self.cid,
            dst_cid: self.key.peer.cid,
            src_port: self.key.port,
            dst_port: self.key.peer.port,
            kind: self.kind.number(),
            op: op as u16,
            ..VsockHdr::default()
        }
    }

    /// Returns the number of bytes in the outbox.
    pub(crate) fn waiting(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of sent data may wait in the outbox.
    pub(crate) fn allowance(&self) -> usize {
        self.account.allowance()
    }

    /// Records that received bytes have been consumed. Returns whether the peer should get a credit update.
    pub(crate) fn consumed(&self, inner: &Inner<R>, count: usize) -> bool {
        self.window.consume(count);
        let readable = match self.kind {
            SocketType::Stream => inner.inbox.unread() > 0,
            SocketType::SeqPacket => inner.inbox.messages() > 0,
        };
        // After the connection is closed, another one may be using its ports.
        inner.phase == Phase::Open && self.window.is_due(inner.received, readable)
    }

    /// Handles a packet for this connection.
    pub(crate) fn receive(
        &self,
        inner: &mut Inner<R>,
        op: Op,
        header: &VsockHdr,
        payload: &mut Payload<'_>,
        wanted: Option<&mut Wanted<'_>>,
    ) -> Verdict {
        let before = inner.credit.available();
        inner.credit.update(header);
        let room = before == 0 && inner.credit.available() > 0;
        let verdict = match (inner.phase, op) {
            (Phase::Closed(_), _) => return Verdict::default(),
            (Phase::Connecting, Op::Response) => {
                (inner.phase, inner.deadline) = (Phase::Open, None);
                if let Some(relay) = &mut inner.relay {
                    relay.opened(self.key);
                }
                Verdict { room: true, ..Verdict::default() }
            }
            (Phase::Connecting, Op::Reset) => self.end(inner, CloseReason::Refused),
            (Phase::Accepting | Phase::Open, Op::Reset) => {
                let orderly = inner.peer_send_shut && inner.peer_recv_shut || inner.send_shut && inner.recv_shut;
                self.end(inner, if orderly { CloseReason::Done } else { CloseReason::Reset })
            }
            (_, Op::Request) => self.fail(inner, Wrong::SecondRequest),
            (_, Op::Response) => self.fail(inner, Wrong::Response),
            (Phase::Connecting | Phase::Accepting, op) => self.fail(inner, Wrong::Early { op: op as u16 }),
            (Phase::Open, Op::Data) => self.data(inner, header, payload, wanted),
            (Phase::Open, Op::Shutdown) => {
                inner.peer_send_shut |= header.flags & wire::SHUTDOWN_SEND != 0;
                inner.peer_recv_shut |= header.flags & wire::SHUTDOWN_RECEIVE != 0;
                self.close_if_done(inner)
            }
            (Phase::Open, Op::CreditRequest) => Verdict::reply(Op::CreditUpdate),
            (Phase::Open, Op::CreditUpdate) => Verdict::default(),
        };
        // A credit update that changes nothing wakes nobody.
        let wake = verdict.wake || room || op != Op::CreditUpdate && op != Op::CreditRequest;
        // For a program, being woken is enough.
        Verdict { room: (room || verdict.room) && inner.relay.is_some(), wake, ..verdict }
    }

    fn data(
        &self,
        inner: &mut Inner<R>,
        header: &VsockHdr,
        payload: &mut Payload<'_>,
        wanted: Option<&mut Wanted<'_>>,
    ) -> Verdict {
        let len = header.len;
        if inner.peer_send_shut {
            return self.fail(inner, Wrong::AfterShutdown { len });
        }
        let credit = self.window.available(inner.received);
        if len > credit {
            return self.fail(inner, Wrong::Credit { len, credit });
        }
        if inner.inbox.messages() >= self.window.size() as usize {
            return self.fail(inner, Wrong::Messages { limit: self.window.size() });
        }
        inner.received += u64::from(len);
        inner.idle = false;
        let mut passed = 0;
        let kept = if inner.recv_shut {
            // This end has shut down receiving: discard the data.
            passed = payload.len();
            Ok(())
        } else if self.kind == SocketType::SeqPacket {
            let ends = header.flags & wire::SEQ_EOM != 0;
            let mut push = |inbox: &mut Inbox| -> Result<(), Full> {
                inbox.push(payload)?;
                if ends { inbox.end_message(header.flags & wire::SEQ_EOR != 0) } else { Ok(()) }
            };
            push(&mut inner.inbox)
        } else {
            if inner.inbox.unread() == 0 {
                passed = self.pass(inner, payload, wanted);
            }
            inner.inbox.push(payload)
        };
        if kept.is_err() {
            return self.fail(inner, Wrong::Memory);
        }
        let due = self.consumed(inner, passed);
        Verdict { reply: due.then_some(Op::CreditUpdate), ..Verdict::default() }
    }

    /// Passes bytes to a waiting reader or the relay without buffering them. Returns how many.
    fn pass(&self, inner: &mut Inner<R>, payload: &mut Payload<'_>, wanted: Option<&mut Wanted<'_>>) -> usize {
        let before = payload.len();
        if let Some(relay) = &mut inner.relay {
            if relay.deliver(payload).is_err() {
                // The relay's program reads no more. What it does not take is lost, as with any socket; `host` tells the peer.
                payload.skip(payload.len());
            }
        } else if let Some(wanted) = wanted.filter(|wanted| wanted.key == self.key) {
            wanted.got += payload.read(wanted.target.get_mut(wanted.got..).unwrap_or_default());
        }
        before - payload.len()
    }

    /// Passes buffered data on to the relay, which can take more. Returns the actions to perform.
    pub(crate) fn drain(&self, inner: &mut Inner<R>) -> Verdict {
        let mut passed = 0;
        let Inner { inbox, relay: Some(relay), .. } = inner else { return Verdict::default() };
        while inbox.unread() > 0 {
            let front = inbox.front();
            let mut payload = Payload::bytes(front);
            let failed = relay.deliver(&mut payload).is_err();
            let count = if failed { front.len() } else { front.len() - payload.len() };
            inbox.consume(count);
            passed += count;
            if count == 0 {
                break;
            }
        }
        let due = self.consumed(inner, passed);
        let verdict = self.close_if_done(inner);
        Verdict { reply: verdict.reply.or(due.then_some(Op::CreditUpdate)), ..verdict }
    }

    /// Closes the connection with a reset (5.10.6.5) if the peer has shut down both directions and nothing is left to read.
    /// Otherwise passes the end of the peer's data on to the relay once everything before it is delivered.
    pub(crate) fn close_if_done(&self, inner: &mut Inner<R>) -> Verdict {
        if inner.phase != Phase::Open || !(inner.peer_send_shut && inner.peer_recv_shut) {
            if inner.peer_send_shut
                && inner.inbox.is_empty()
                && let Some(relay) = &mut inner.relay
            {
                relay.finish();
            }
            return Verdict::default();
        }
        if !inner.inbox.is_empty() && !inner.recv_shut {
            return Verdict::default();
        }
        Verdict { reply: Some(Op::Reset), ..self.end(inner, CloseReason::Done) }
    }

    /// Closes the connection.
    pub(crate) fn end(&self, inner: &mut Inner<R>, how: CloseReason) -> Verdict {
        if let Phase::Closed(_) = inner.phase {
            return Verdict::default();
        }
        inner.phase = Phase::Closed(how);
        inner.deadline = None;
        // A program may still read what was received before; a relay gets what it takes at once.
        if let Some(mut relay) = inner.relay.take() {
            while inner.inbox.unread() > 0 {
                let front = inner.inbox.front();
                let mut payload = Payload::bytes(front);
                let _ = relay.deliver(&mut payload);
                let count = front.len() - payload.len();
                inner.inbox.consume(count);
                if count == 0 {
                    break;
                }
            }
            relay.close(how != CloseReason::Done);
        }
        Verdict { closed: true, wake: true, ..Verdict::default() }
    }

    fn fail(&self, inner: &mut Inner<R>, wrong: Wrong) -> Verdict {
        let _ = self.end(inner, CloseReason::Reset);
        Verdict::wrong(wrong)
    }
}

#[cfg(test)]
mod tests;
