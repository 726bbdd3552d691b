//! One connection: credit in both directions, shutdown state and received data. A state machine over packets: `stack/packets.rs`
//! finds the connection of a packet, calls it, and sends what it replies. Connection states and operations: virtio 1.3, 5.10.6.3
//! to 5.10.6.6.

use crate::{
    Account, Addr, Charge, Host, Owner, Payload, Relay, SocketType,
    account::Opened,
    inbox::{Full, Inbox},
    send::MAX_PACKET,
    sync::AtomicUsize,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Instant,
};

/// Identifies a connection of a stack; unique among those in existence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The local port.
    pub port: u32,
    /// The peer's address.
    pub peer: Addr,
}

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
}

impl Verdict {
    fn reply(op: Op) -> Verdict {
        Verdict { reply: Some(op), ..Verdict::default() }
    }

    fn wrong(wrong: Wrong) -> Verdict {
        Verdict { reply: Some(Op::Reset), closed: true, wrong: Some(wrong), room: false }
    }
}

/// A protocol violation by the peer; the connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// OP_REQUEST for an existing connection.
    #[error("request for a connection that is open already")]
    SecondRequest,
    /// OP_RESPONSE without a request.
    #[error("response without a request")]
    Response,
    /// A packet other than the response or a reset before the connection was accepted.
    #[error("operation {op} before the connection was accepted")]
    Early {
        /// The operation received.
        op: u16,
    },
    /// OP_RW after OP_SHUTDOWN with VIRTIO_VSOCK_SHUTDOWN_F_SEND.
    #[error("{len} bytes after the peer has shut down sending")]
    AfterShutdown {
        /// Bytes received.
        len: u32,
    },
    /// More bytes than the peer has credit for.
    #[error("{len} bytes exceed the credit of {credit}")]
    Credit {
        /// Bytes received.
        len: u32,
        /// Bytes it had credit for.
        credit: u32,
    },
    /// More unread messages than the receive buffer has bytes.
    #[error("more than {limit} unread messages")]
    Messages {
        /// The maximum number.
        limit: u32,
    },
    /// The guest's memory limit is reached.
    #[error("the memory limit of the guest is reached")]
    Memory,
    /// The packet's type is unknown, was not negotiated, or is not the connection's.
    #[error("type {kind} does not match the connection, or was not negotiated")]
    Type {
        /// The type received.
        kind: u16,
    },
    /// The payload is shorter than the header says.
    #[error("payload of {actual} bytes, the header says {len}")]
    Short {
        /// Length in the header.
        len: u32,
        /// Actual length.
        actual: usize,
    },
    /// Unknown operation.
    #[error("unknown operation {op}")]
    Operation {
        /// The operation received.
        op: u16,
    },
}

/// The mutable state of a connection, under one lock.
pub(crate) struct Inner<R> {
    pub phase: Phase,
    /// Bytes sent or about to be sent, modulo 2³².
    pub tx_cnt: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    /// Bytes received, modulo 2³².
    rx_cnt: u32,
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
    /// Called on every change, for programs that do not use blocking calls.
    pub waker: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Set while the program is the leader and waits for packets itself: a change has to end that wait.
    pub leading: Option<Arc<dyn Host<R>>>,
    /// No data since the last sweep.
    pub idle: bool,
    /// The connection is registered for the next sweep.
    pub listed: bool,
}

/// A connection.
pub(crate) struct Conn<R> {
    pub key: Key,
    pub kind: SocketType,
    pub cid: u64,
    /// Size of the receive buffer in bytes.
    pub buf_alloc: u32,
    /// Bytes received and consumed, modulo 2³².
    fwd_cnt: AtomicU32,
    /// Stream position up to which the peer has been told it may send, modulo 2³².
    advertised: AtomicU32,
    queued: AtomicUsize,
    /// Held while sending, so that packets of two threads do not interleave.
    pub sending: Mutex<()>,
    inner: Mutex<Inner<R>>,
    changed: Condvar,
    sent: AtomicU64,
    received: AtomicU64,
    account: Arc<Account>,
    _opened: Opened,
}

impl<R> Owner for Arc<Conn<R>> {
    fn key(&self) -> usize {
        Arc::as_ptr(self) as usize
    }

    fn stamp(&self, header: &mut VsockHdr) {
        // Stamps are in the order of packets in the ring: both happen under the ring's lock.
        let fwd_cnt = self.fwd_cnt.load(Ordering::Acquire);
        let edge = further(fwd_cnt.wrapping_add(self.window()), self.advertised.load(Ordering::Acquire));
        self.advertised.store(edge, Ordering::Release);
        header.fwd_cnt = fwd_cnt;
        header.buf_alloc = edge.wrapping_sub(fwd_cnt);
    }

    fn queued(&self) -> &AtomicUsize {
        &self.queued
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        // `Stack::room` has checked the limit.
        Some(self.account.charge_anyway(bytes))
    }
}

/// Returns the later of two stream positions, modulo 2³².
pub(crate) fn further(one: u32, other: u32) -> u32 {
    if other.wrapping_sub(one) as i32 > 0 { other } else { one }
}

impl<R> Conn<R> {
    /// Returns the receive window in bytes: the buffer size, or the share of the guest's memory if that is smaller.
    fn window(&self) -> u32 {
        self.buf_alloc.min(u32::try_from(self.account.allowance()).unwrap_or(u32::MAX))
    }

    /// Returns how many bytes of sent data may wait in the outbox.
    pub(crate) fn allowance(&self) -> usize {
        self.account.allowance()
    }
}

impl<R: Relay> Conn<R> {
    pub(crate) fn new(cid: u64, key: Key, kind: SocketType, buf_alloc: u32, phase: Phase, opened: Opened) -> Self {
        let account = opened.account().cloned().unwrap_or_else(|| Account::new(usize::MAX, 1));
        // The credit that the first packet carries.
        let window = buf_alloc.min(u32::try_from(account.allowance()).unwrap_or(u32::MAX));
        Conn {
            key,
            kind,
            cid,
            buf_alloc,
            fwd_cnt: AtomicU32::new(0),
            advertised: AtomicU32::new(window),
            queued: AtomicUsize::new(0),
            sending: Mutex::new(()),
            inner: Mutex::new(Inner {
                phase,
                tx_cnt: 0,
                peer_buf_alloc: 0,
                peer_fwd_cnt: 0,
                rx_cnt: 0,
                peer_send_shut: false,
                peer_recv_shut: false,
                send_shut: false,
                recv_shut: false,
                inbox: Inbox::new(&account),
                relay: None,
                deadline: None,
                waker: None,
                leading: None,
                idle: true,
                listed: false,
            }),
            changed: Condvar::new(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            account,
            _opened: opened,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner<R>> {
        self.inner.lock()
    }

    /// Waits for a change until the given time. Returns `false` on timeout.
    pub(crate) fn wait(&self, inner: &mut MutexGuard<'_, Inner<R>>, until: Option<Instant>) -> bool {
        match until {
            Some(until) => !self.changed.wait_until(inner, until).timed_out(),
            None => {
                self.changed.wait(inner);
                true
            }
        }
    }

    /// Wakes everyone who may be waiting for a change.
    pub(crate) fn wake(&self, inner: &Inner<R>) {
        self.changed.notify_all();
        if let Some(host) = &inner.leading {
            host.unwait();
        }
        if let Some(waker) = &inner.waker {
            waker();
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

    /// Returns the total bytes sent and received.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Returns the number of bytes in the outbox.
    pub(crate) fn waiting(&self) -> usize {
        self.queued.load(crate::sync::Ordering::Relaxed)
    }

    /// Returns how many bytes may be sent now.
    pub(crate) fn credit(&self, inner: &Inner<R>) -> usize {
        let in_flight = inner.tx_cnt.wrapping_sub(inner.peer_fwd_cnt);
        inner.peer_buf_alloc.saturating_sub(in_flight) as usize
    }

    /// Returns the size of the largest message the peer can take.
    pub(crate) fn largest(&self, inner: &Inner<R>) -> usize {
        inner.peer_buf_alloc as usize
    }

    /// Reserves credit for `count` bytes about to be sent.
    pub(crate) fn promise(&self, inner: &mut Inner<R>, count: usize) {
        inner.tx_cnt = inner.tx_cnt.wrapping_add(count as u32);
        self.sent.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Returns reserved credit that was not used.
    pub(crate) fn take_back(&self, inner: &mut Inner<R>, count: usize) {
        inner.tx_cnt = inner.tx_cnt.wrapping_sub(count as u32);
        self.sent.fetch_sub(count as u64, Ordering::Relaxed);
    }

    /// Records that received bytes have been consumed, which frees buffer space. Returns whether the peer should get a credit
    /// update.
    pub(crate) fn consumed(&self, inner: &Inner<R>, count: usize) -> bool {
        self.fwd_cnt.fetch_add(count as u32, Ordering::AcqRel);
        self.update_due(inner)
    }

    /// Returns whether the peer should get a credit update: either half of the window has become free; or the peer's credit is
    /// low, and some space has become free or there is nothing left to read, so that the reader is about to block.
    fn update_due(&self, inner: &Inner<R>) -> bool {
        let (advertised, window) = (self.advertised.load(Ordering::Acquire), self.window());
        let edge = self.fwd_cnt.load(Ordering::Acquire).wrapping_add(window);
        // Negative if the window has shrunk since.
        let gain = u32::try_from(edge.wrapping_sub(advertised) as i32).unwrap_or(0);
        let believed = advertised.wrapping_sub(inner.rx_cnt);
        let low = (MAX_PACKET as u32).min(window / 2);
        let readable = match self.kind {
            SocketType::Stream => inner.inbox.unread() > 0,
            SocketType::SeqPacket => inner.inbox.messages() > 0,
        };
        // After the connection is closed, another one may be using its ports.
        inner.phase == Phase::Open
            && gain > 0
            && (gain >= window / 2 || believed < low && (gain >= low / 2 || !readable))
    }

    /// Records the credit fields of a packet from the peer.
    pub(crate) fn announce(&self, inner: &mut Inner<R>, header: &VsockHdr) {
        inner.peer_buf_alloc = header.buf_alloc;
        inner.peer_fwd_cnt = header.fwd_cnt;
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
        let before = self.credit(inner);
        self.announce(inner, header);
        let room = before == 0 && self.credit(inner) > 0;
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
        // A reader that is served directly need not be woken, nor anyone for a credit update that changes nothing.
        if room || op != Op::CreditUpdate && op != Op::CreditRequest {
            self.wake(inner);
        }
        // Programs of this process have been woken already.
        Verdict { room: (room || verdict.room) && inner.relay.is_some(), ..verdict }
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
        // Up to what the peer was told, or to the current window if that is further.
        let now = self.fwd_cnt.load(Ordering::Acquire).wrapping_add(self.window());
        let credit = further(self.advertised.load(Ordering::Acquire), now).wrapping_sub(inner.rx_cnt);
        if len > credit {
            return self.fail(inner, Wrong::Credit { len, credit });
        }
        if inner.inbox.messages() >= self.buf_alloc as usize {
            return self.fail(inner, Wrong::Messages { limit: self.buf_alloc });
        }
        inner.rx_cnt = inner.rx_cnt.wrapping_add(len);
        self.received.fetch_add(len.into(), Ordering::Relaxed);
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
        self.wake(inner);
        Verdict { closed: true, ..Verdict::default() }
    }

    fn fail(&self, inner: &mut Inner<R>, wrong: Wrong) -> Verdict {
        let _ = self.end(inner, CloseReason::Reset);
        Verdict::wrong(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoRelay;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicUsize as Count;

    const HEAP: u32 = 256 << 10;

    fn conn_of<R: Relay>(kind: SocketType, buf_alloc: u32, phase: Phase) -> Arc<Conn<R>> {
        let key = Key { port: 5000, peer: Addr { cid: 3, port: 6000 } };
        let opened = Account::new(1 << 40, 1).open().unwrap();
        Arc::new(Conn::new(2, key, kind, buf_alloc, phase, opened))
    }

    fn conn(buf_alloc: u32) -> Arc<Conn<NoRelay>> {
        conn_of(SocketType::Stream, buf_alloc, Phase::Open)
    }

    /// Moves both directions' counters forward to `count`.
    fn advance_to<R: Relay>(conn: &Conn<R>, count: u32) {
        let mut inner = conn.lock();
        (inner.tx_cnt, inner.peer_fwd_cnt, inner.rx_cnt) = (count, count, count);
        conn.fwd_cnt.store(count, Ordering::Relaxed);
        conn.advertised.store(count.wrapping_add(conn.buf_alloc), Ordering::Relaxed);
    }

    /// Delivers a packet from the peer, which advertises the same credit as before.
    fn receive<R: Relay>(conn: &Conn<R>, op: Op, flags: u32, bytes: &[u8]) -> Verdict {
        let mut inner = conn.lock();
        let (buf_alloc, fwd_cnt) = (inner.peer_buf_alloc, inner.peer_fwd_cnt);
        let header = VsockHdr { len: bytes.len() as u32, flags, buf_alloc, fwd_cnt, ..VsockHdr::default() };
        conn.receive(&mut inner, op, &header, &mut Payload::bytes(bytes), None)
    }

    fn data<R: Relay>(conn: &Conn<R>, len: usize) -> Verdict {
        receive(conn, Op::Data, 0, &vec![7; len])
    }

    /// A program reads. Returns whether the peer should get a credit update.
    fn read<R: Relay>(conn: &Conn<R>, len: usize) -> bool {
        let mut inner = conn.lock();
        let count = inner.inbox.read(&mut vec![0; len]);
        assert_eq!(count, len);
        conn.consumed(&inner, count)
    }

    /// Stamps a packet to the peer; returns its fwd_cnt.
    fn stamped<R>(conn: &Arc<Conn<R>>) -> u32 {
        let mut header = VsockHdr::default();
        conn.stamp(&mut header);
        assert_eq!(header.buf_alloc, conn.buf_alloc);
        header.fwd_cnt
    }

    const STARTS: [u32; 7] = [0, 1, 1 << 31, u32::MAX - 150, u32::MAX - 99, u32::MAX - 1, u32::MAX];

    #[test]
    fn credit_survives_counter_wraparound() {
        for start in STARTS {
            let conn = conn(1000);
            advance_to(&conn, start);
            let mut inner = conn.lock();
            let announce = |inner: &mut _, buf_alloc, sent: u32| {
                let fwd_cnt = start.wrapping_add(sent);
                conn.announce(inner, &VsockHdr { buf_alloc, fwd_cnt, ..VsockHdr::default() });
            };
            assert_eq!(conn.credit(&inner), 0, "no credit advertised yet");
            announce(&mut inner, 100, 0);
            assert_eq!((conn.credit(&inner), conn.largest(&inner)), (100, 100));
            conn.promise(&mut inner, 60);
            assert_eq!(conn.credit(&inner), 40);
            conn.take_back(&mut inner, 10);
            assert_eq!(conn.credit(&inner), 50);
            conn.promise(&mut inner, 50);
            assert_eq!(conn.credit(&inner), 0);
            announce(&mut inner, 100, 30);
            assert_eq!(conn.credit(&inner), 30);
            // Less credit than before, even less than is in flight; then more.
            announce(&mut inner, 50, 30);
            assert_eq!(conn.credit(&inner), 0);
            announce(&mut inner, u32::MAX, 30);
            assert_eq!(conn.credit(&inner), u32::MAX as usize - 70);
            announce(&mut inner, 100, 100);
            assert_eq!(conn.credit(&inner), 100);
            // The peer claims to have received more than was sent.
            announce(&mut inner, 100, 101);
            assert_eq!(conn.credit(&inner), 0);
            assert_eq!(conn.traffic(), (100, 0));
        }
    }

    #[test]
    fn the_peers_credit_survives_counter_wraparound() {
        for start in STARTS {
            let open = || {
                let conn = conn(1000);
                advance_to(&conn, start);
                assert_eq!(data(&conn, 100).wrong, None);
                assert_eq!(data(&conn, 800).wrong, None);
                conn
            };
            assert_eq!(data(&open(), 101).wrong, Some(Wrong::Credit { len: 101, credit: 100 }));
            let conn = open();
            assert_eq!(data(&conn, 100).wrong, None);
            read(&conn, 1000);
            assert_eq!(stamped(&conn), start.wrapping_add(1000));
            assert_eq!(data(&conn, 1000).wrong, None);
            assert_eq!(data(&conn, 1).wrong, Some(Wrong::Credit { len: 1, credit: 0 }));
            assert_eq!(conn.lock().phase, Phase::Closed(CloseReason::Reset));
            assert_eq!(conn.lock().inbox.unread(), 1000, "received data can still be read");
            assert_eq!(conn.traffic(), (0, 2000));
        }
    }

    #[test]
    fn empty_messages_are_limited() {
        let conn = conn_of::<NoRelay>(SocketType::SeqPacket, 4, Phase::Open);
        for _ in 0..4 {
            assert_eq!(receive(&conn, Op::Data, wire::SEQ_EOM, &[]), Verdict::default());
        }
        assert_eq!(receive(&conn, Op::Data, wire::SEQ_EOM, &[]), Verdict::wrong(Wrong::Messages { limit: 4 }));
    }

    /// A peer whose data are read at once gets two credit updates per buffer, not one per packet.
    #[test]
    fn small_reads_do_not_each_send_a_credit_update() {
        for start in STARTS {
            let conn = conn(HEAP);
            advance_to(&conn, start);
            let mut updates = 0;
            for _ in 0..20 * HEAP / 100 {
                assert_eq!(data(&conn, 100), Verdict::default());
                if read(&conn, 100) {
                    updates += 1;
                    stamped(&conn);
                }
            }
            assert_eq!(updates, 20 * 2 - 1, "starting at {start}");
        }
    }

    #[test]
    fn a_credit_update_is_sent_when_the_peers_credit_is_low() {
        let conn = conn(HEAP);
        let low = MAX_PACKET;
        // The credit left is so low that the peer may soon have to wait.
        let _ = data(&conn, HEAP as usize - low + 1);
        // The reader is active: no update for every few bytes.
        assert!(!read(&conn, low / 2 - 1));
        assert!(read(&conn, 1));
        stamped(&conn);
        assert!(!read(&conn, 1000), "the peer has credit again");

        // The last byte: the reader is about to block.
        let conn = self::conn(HEAP);
        let _ = data(&conn, HEAP as usize - low + 1);
        read(&conn, HEAP as usize - low);
        stamped(&conn);
        assert!(!read(&conn, 1), "plenty of credit");
        let conn = self::conn(100);
        let _ = data(&conn, 51);
        assert!(!read(&conn, 24));
        assert!(read(&conn, 27));
        // One update is enough, whichever packet carries it.
        stamped(&conn);
        assert!(!conn.consumed(&conn.lock(), 0));
        // A credit request is always answered.
        assert_eq!(receive(&conn, Op::CreditRequest, 0, &[]), Verdict::reply(Op::CreditUpdate));
    }

    proptest! {
        /// No deadlock: whenever the peer believes it has no credit, there is something to read here.
        #[test]
        fn a_peer_never_runs_out_of_credit_for_good(
            message in any::<bool>(),
            buf_alloc in prop_oneof![1..40u32, Just(4096), Just(HEAP)],
            start in prop_oneof![Just(0), Just(u32::MAX), any::<u32>()],
            steps in proptest::collection::vec((0..4u8, any::<u32>()), 1..300),
        ) {
            let kind = if message { SocketType::SeqPacket } else { SocketType::Stream };
            let conn = conn_of::<NoRelay>(kind, buf_alloc, Phase::Open);
            advance_to(&conn, start);
            let (mut sent, mut advertised, mut partial) = (start, start, 0);
            for (step, size) in steps {
                let credit = buf_alloc - sent.wrapping_sub(advertised);
                let due = match step {
                    0 | 1 if credit > 0 => {
                        // Often all of the credit.
                        let len = if size % 3 == 0 { credit } else { (1 + size % credit).min(1 + size % 999) };
                        sent = sent.wrapping_add(len);
                        partial += len;
                        // No message is longer than the buffer.
                        let end = size % 2 == 0 || partial == buf_alloc;
                        let flags = if message && end { wire::SEQ_EOM } else { 0 };
                        if end {
                            partial = 0;
                        }
                        let verdict = receive(&conn, Op::Data, flags, &vec![0; len as usize]);
                        prop_assert_eq!(verdict.wrong, None);
                        verdict.reply == Some(Op::CreditUpdate)
                    }
                    // Some other packet to the peer carries the update.
                    3 if size % 8 == 0 => true,
                    _ => {
                        let mut inner = conn.lock();
                        let count = if message {
                            inner.inbox.read_message(&mut []).map_or(0, |(len, _)| len)
                        } else {
                            inner.inbox.read(&mut vec![0; size as usize % 5000])
                        };
                        conn.consumed(&inner, count)
                    }
                };
                if due {
                    advertised = stamped(&conn);
                }
                let inner = conn.lock();
                let readable = if message { inner.inbox.messages() } else { inner.inbox.unread() } > 0;
                let kept = sent.wrapping_sub(conn.fwd_cnt.load(Ordering::Relaxed));
                prop_assert_eq!(kept as usize, inner.inbox.unread());
                prop_assert!(sent != advertised.wrapping_add(buf_alloc) || readable || kept == buf_alloc);
            }
        }
    }

    #[test]
    fn each_operation_in_each_phase() {
        const OPS: [Op; 7] =
            [Op::Request, Op::Response, Op::Reset, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest];
        let over = Verdict { closed: true, ..Verdict::default() };
        let early = |op| Verdict::wrong(Wrong::Early { op: op as u16 });
        let second = Verdict::wrong(Wrong::SecondRequest);
        let response = Verdict::wrong(Wrong::Response);
        let nothing = Verdict::default();
        let (shutdown, data) = (early(Op::Shutdown), early(Op::Data));
        let (update, request) = (early(Op::CreditUpdate), early(Op::CreditRequest));
        let answer = Verdict::reply(Op::CreditUpdate);
        let (open, reset) = (Phase::Open, Phase::Closed(CloseReason::Reset));
        let refused = Phase::Closed(CloseReason::Refused);
        let rows = [
            (
                Phase::Connecting,
                [second, nothing, over, shutdown, data, update, request],
                [reset, open, refused, reset, reset, reset, reset],
            ),
            (Phase::Accepting, [second, response, over, shutdown, data, update, request], [reset; 7]),
            (
                open,
                [second, response, over, nothing, nothing, nothing, answer],
                [reset, reset, reset, open, open, open, open],
            ),
        ];
        let closed =
            [CloseReason::Done, CloseReason::Refused, CloseReason::Reset, CloseReason::TimedOut].map(Phase::Closed);
        let closed = closed.map(|phase| (phase, [nothing; 7], [phase; 7]));
        for (phase, verdicts, after) in rows.into_iter().chain(closed) {
            for ((op, verdict), after) in OPS.into_iter().zip(verdicts).zip(after) {
                let conn = conn_of::<NoRelay>(SocketType::Stream, 1000, phase);
                assert_eq!(receive(&conn, op, 0, &[1]), verdict, "{op:?} in phase {phase:?}");
                assert_eq!(conn.lock().phase, after, "{op:?} in phase {phase:?}");
                if verdict.wrong.is_some() {
                    assert_eq!((verdict.reply, verdict.closed), (Some(Op::Reset), true));
                }
                let kept = (op == Op::Data && phase == open) as usize;
                assert_eq!(conn.lock().inbox.unread(), kept, "{op:?} in phase {phase:?}");
            }
        }
    }

    #[test]
    fn new_credit_wakes_the_sender() {
        // A program is woken; for a relay, the worker is told that it can read the socket again.
        for socket in [false, true] {
            let (conn, _socket) = relayed(Phase::Open, 0);
            if !socket {
                conn.lock().relay = None;
            }
            let count = Arc::new(Count::new(0));
            let counted = count.clone();
            conn.lock().waker = Some(Arc::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
            }));
            let update = |buf_alloc, fwd_cnt| {
                let header = VsockHdr { buf_alloc, fwd_cnt, ..VsockHdr::default() };
                let verdict = conn.receive(&mut conn.lock(), Op::CreditUpdate, &header, &mut Payload::empty(), None);
                (verdict.room, count.swap(0, Ordering::Relaxed))
            };
            assert_eq!(update(0, 0), (false, 0));
            assert_eq!(update(100, 0), (socket, 1));
            assert_eq!(update(200, 0), (false, 0), "there was credit before");
            conn.promise(&mut conn.lock(), 200);
            assert_eq!(update(200, 0), (false, 0));
            assert_eq!(update(200, 1), (socket, 1));
            let _ = data(&conn, 1);
            assert_eq!(count.swap(0, Ordering::Relaxed), 1);
        }
    }

    const BOTH: u32 = wire::SHUTDOWN_SEND | wire::SHUTDOWN_RECEIVE;

    fn shutdown<R: Relay>(conn: &Conn<R>, flags: u32) -> Verdict {
        receive(conn, Op::Shutdown, flags, &[])
    }

    fn done() -> Verdict {
        Verdict { reply: Some(Op::Reset), closed: true, ..Verdict::default() }
    }

    #[test]
    fn a_peer_that_has_shut_down_sending_still_receives() {
        let conn = conn(1000);
        let _ = data(&conn, 10);
        assert_eq!(shutdown(&conn, wire::SHUTDOWN_SEND), Verdict::default());
        assert_eq!(shutdown(&conn, 0), Verdict::default(), "a shutdown is not revoked");
        {
            let inner = conn.lock();
            assert_eq!((inner.phase, inner.peer_send_shut, inner.peer_recv_shut), (Phase::Open, true, false));
            assert_eq!(inner.inbox.unread(), 10);
        }
        assert_eq!(receive(&conn, Op::CreditRequest, 0, &[]), Verdict::reply(Op::CreditUpdate));
        assert_eq!(data(&conn, 3), Verdict::wrong(Wrong::AfterShutdown { len: 3 }));
    }

    #[test]
    fn a_peer_that_has_shut_down_receiving_still_sends() {
        let conn = conn(1000);
        assert_eq!(shutdown(&conn, wire::SHUTDOWN_RECEIVE), Verdict::default());
        assert_eq!(data(&conn, 3), Verdict::default());
        let inner = conn.lock();
        assert_eq!((inner.phase, inner.peer_send_shut, inner.peer_recv_shut), (Phase::Open, false, true));
        assert_eq!(inner.inbox.unread(), 3);
    }

    #[test]
    fn the_final_reset_is_sent_when_everything_is_read() {
        for parts in [&[BOTH][..], &[wire::SHUTDOWN_SEND, wire::SHUTDOWN_RECEIVE], &[wire::SHUTDOWN_RECEIVE, BOTH]] {
            // Everything has been read.
            let conn = conn(1000);
            let (last, first) = parts.split_last().unwrap();
            first.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
            assert_eq!(shutdown(&conn, *last), done());
            assert_eq!(conn.lock().phase, Phase::Closed(CloseReason::Done));
            assert_eq!(conn.close_if_done(&mut conn.lock()), Verdict::default(), "the reset is sent once");

            // Something is unread.
            let conn = self::conn(1000);
            let _ = data(&conn, 10);
            parts.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
            read(&conn, 9);
            assert_eq!(conn.close_if_done(&mut conn.lock()), Verdict::default());
            read(&conn, 1);
            assert_eq!(conn.close_if_done(&mut conn.lock()), done());

            // Something is unread, but receiving is shut down.
            let conn = self::conn(1000);
            let _ = data(&conn, 10);
            conn.lock().recv_shut = true;
            first.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
            assert_eq!(shutdown(&conn, *last), done());
        }
        // An unread empty message counts as well.
        let conn = conn_of::<NoRelay>(SocketType::SeqPacket, 1000, Phase::Open);
        let _ = receive(&conn, Op::Data, wire::SEQ_EOM, &[]);
        assert_eq!(shutdown(&conn, BOTH), Verdict::default());
        assert_eq!(conn.lock().inbox.read_message(&mut []), Some((0, false)));
        assert_eq!(conn.close_if_done(&mut conn.lock()), done());
    }

    #[test]
    fn a_reset_is_orderly_when_either_end_has_shut_down() {
        let ended = |prepare: &dyn Fn(&Arc<Conn<NoRelay>>)| {
            let conn = conn(1000);
            let _ = data(&conn, 5);
            prepare(&conn);
            assert_eq!(receive(&conn, Op::Reset, 0, &[]), Verdict { closed: true, ..Verdict::default() });
            let inner = conn.lock();
            assert_eq!(inner.inbox.unread(), 5, "received data can still be read");
            inner.phase
        };
        let (done, reset) = (Phase::Closed(CloseReason::Done), Phase::Closed(CloseReason::Reset));
        let shut =
            |send, recv| move |conn: &Arc<Conn<NoRelay>>| (conn.lock().send_shut, conn.lock().recv_shut) = (send, recv);
        assert_eq!(ended(&|_| {}), reset);
        assert_eq!(ended(&|conn| assert!(!shutdown(conn, BOTH).closed)), done);
        assert_eq!(ended(&|conn| assert!(!shutdown(conn, wire::SHUTDOWN_SEND).closed)), reset);
        assert_eq!(ended(&|conn| assert!(!shutdown(conn, wire::SHUTDOWN_RECEIVE).closed)), reset);
        assert_eq!(ended(&shut(true, true)), done);
        assert_eq!(ended(&shut(true, false)), reset);
        assert_eq!(ended(&shut(false, true)), reset);
    }

    #[test]
    fn an_end_that_has_shut_down_receiving_returns_credit() {
        let conn = conn(1000);
        conn.lock().recv_shut = true;
        assert_eq!(data(&conn, 499), Verdict::default());
        assert_eq!(data(&conn, 1), Verdict::reply(Op::CreditUpdate));
        assert_eq!(stamped(&conn), 500);
        assert_eq!(conn.lock().inbox.unread(), 0);
    }

    /// A host socket that takes a limited number of bytes, and records the calls.
    #[derive(Default)]
    struct Socket {
        takes: usize,
        disconnected: bool,
        opened: usize,
        got: usize,
        finished: bool,
        closed: Option<bool>,
    }

    type Shared = Arc<Mutex<Socket>>;

    impl Relay for Shared {
        fn opened(&mut self, _: Key) {
            self.lock().opened += 1;
        }

        fn deliver(&mut self, payload: &mut Payload<'_>) -> io::Result<()> {
            let mut socket = self.lock();
            if socket.disconnected {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let count = payload.take(socket.takes).len();
            socket.takes -= count;
            socket.got += count;
            Ok(())
        }

        fn finish(&mut self) {
            self.lock().finished = true;
        }

        fn close(&mut self, reset: bool) {
            self.lock().closed = Some(reset);
        }
    }

    fn relayed(phase: Phase, takes: usize) -> (Arc<Conn<Shared>>, Shared) {
        let conn = conn_of(SocketType::Stream, 1000, phase);
        let socket = Arc::new(Mutex::new(Socket { takes, ..Socket::default() }));
        conn.lock().relay = Some(socket.clone());
        (conn, socket)
    }

    #[test]
    fn a_relay_sees_the_end_after_all_bytes() {
        let (conn, socket) = relayed(Phase::Open, 100);
        assert_eq!(data(&conn, 300), Verdict::default());
        assert_eq!((socket.lock().got, conn.lock().inbox.unread()), (100, 200));
        let _ = shutdown(&conn, wire::SHUTDOWN_SEND);
        assert!(!socket.lock().finished);
        socket.lock().takes = 150;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::default());
        assert!(!socket.lock().finished);
        socket.lock().takes = 500;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::default());
        assert_eq!(socket.lock().got, 300);
        assert!(socket.lock().finished);
        assert_eq!(socket.lock().closed, None);
        assert_eq!(shutdown(&conn, wire::SHUTDOWN_RECEIVE), done());
        assert_eq!(socket.lock().closed, Some(false));
        assert!(conn.lock().relay.is_none());
    }

    #[test]
    fn a_relay_that_takes_more_gives_the_peer_credit() {
        let (conn, socket) = relayed(Phase::Open, 0);
        assert_eq!(data(&conn, 1000), Verdict::default());
        socket.lock().takes = 100;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::default());
        socket.lock().takes = 400;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::reply(Op::CreditUpdate));
        assert_eq!(stamped(&conn), 500);
        // The final reset replaces the credit update.
        assert_eq!(shutdown(&conn, BOTH), Verdict::default());
        socket.lock().takes = 1000;
        assert_eq!(conn.drain(&mut conn.lock()), done());
        assert_eq!(socket.lock().closed, Some(false));
    }

    #[test]
    fn bytes_for_a_disconnected_relay_are_discarded() {
        let (conn, socket) = relayed(Phase::Open, 0);
        assert_eq!(data(&conn, 600), Verdict::default());
        socket.lock().disconnected = true;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::reply(Op::CreditUpdate));
        assert_eq!(stamped(&conn), 600);
        assert_eq!(data(&conn, 600), Verdict::reply(Op::CreditUpdate));
        assert_eq!((conn.lock().inbox.unread(), socket.lock().got), (0, 0));
        assert_eq!(receive(&conn, Op::Reset, 0, &[]), Verdict { closed: true, ..Verdict::default() });
        assert_eq!(socket.lock().closed, Some(true));
    }

    #[test]
    fn a_relay_is_notified_of_the_outcome_of_a_request() {
        let (conn, socket) = relayed(Phase::Connecting, 0);
        conn.lock().deadline = Some(Instant::now());
        assert!(receive(&conn, Op::Response, 0, &[]).room);
        assert_eq!(socket.lock().opened, 1);
        assert_eq!(socket.lock().closed, None);
        assert_eq!(conn.lock().deadline, None);
        let (conn, socket) = relayed(Phase::Connecting, 0);
        assert!(receive(&conn, Op::Reset, 0, &[]).closed);
        assert_eq!(socket.lock().opened, 0);
        assert_eq!(socket.lock().closed, Some(true));
    }
}
