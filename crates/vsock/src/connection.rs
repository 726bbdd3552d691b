//! One connection: who may send how much (credit), who has said that he sends or receives no more, and what has come. A state
//! machine over packets; `stack.rs` finds the connection for a packet and sends what it answers.

use crate::{Addr, Host, Kind, Owner, Payload, Relay, inbox::Inbox, send::MAX_PACKET, sync::AtomicUsize};
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

/// Which connection of a stack: unique among those alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Our port.
    pub port: u32,
    /// The other end.
    pub peer: Addr,
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// We have asked, and wait for an answer.
    Connecting,
    /// The peer has asked, and our end is not there yet.
    Accepting,
    /// Both ends are there.
    Open,
    /// It is over, and in no table any more.
    Closed(Over),
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// Both ends have said that they are done.
    Done,
    /// Nobody listens there, or has room.
    Refused,
    /// The peer, or the transport, has ended it without a word.
    Reset,
    /// No answer.
    TimedOut,
}

impl Over {
    pub(crate) fn error(self) -> io::Error {
        io::Error::from(match self {
            Over::Done => io::ErrorKind::BrokenPipe,
            Over::Refused => io::ErrorKind::ConnectionRefused,
            Over::Reset => io::ErrorKind::ConnectionReset,
            Over::TimedOut => io::ErrorKind::TimedOut,
        })
    }
}

/// What a reader in the middle of receiving wants: bytes of a connection, straight to where they belong.
pub(crate) struct Wanted<'a> {
    pub key: Key,
    pub target: &'a mut [u8],
    pub got: usize,
}

/// What is to be done after a packet, outside of the connection's lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub(crate) struct Verdict {
    /// Sent back.
    pub reply: Option<Op>,
    /// The connection leaves the table.
    pub over: bool,
    /// Why it was reset, if the peer has done something wrong.
    pub wrong: Option<Wrong>,
    /// The relay may go on sending.
    pub room: bool,
}

impl Verdict {
    fn reply(op: Op) -> Verdict {
        Verdict { reply: Some(op), ..Verdict::default() }
    }

    fn wrong(wrong: Wrong) -> Verdict {
        Verdict { reply: Some(Op::Reset), over: true, wrong: Some(wrong), room: false }
    }
}

/// What a peer can do wrong with a connection, which is reset for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// OP_REQUEST where there is a connection already.
    #[error("a second request on a live connection")]
    SecondRequest,
    /// OP_RESPONSE that nobody has asked for.
    #[error("a response without a request")]
    Response,
    /// Anything but an answer to a request.
    #[error("operation {op} before the connection was accepted")]
    Early {
        /// What came.
        op: u16,
    },
    /// OP_RW after OP_SHUTDOWN said that there would be none.
    #[error("{len} bytes after a shutdown of sending")]
    AfterShutdown {
        /// What came.
        len: u32,
    },
    /// More bytes under way than this end has room for.
    #[error("{len} bytes beyond its credit of {credit}")]
    Credit {
        /// What came.
        len: u32,
        /// What it could have sent.
        credit: u32,
    },
    /// More messages than there may be bytes.
    #[error("more than {limit} messages that nobody has read")]
    Messages {
        /// How many there may be.
        limit: u32,
    },
    /// A type that the connection does not have.
    #[error("a packet of type {kind} for a connection of another one")]
    Type {
        /// What came.
        kind: u16,
    },
    /// Less payload than the header says.
    #[error("{there} bytes of payload where the header says {len}")]
    Short {
        /// What the header says.
        len: u32,
        /// What there is.
        there: usize,
    },
    /// An operation that there is not.
    #[error("unknown operation {op}")]
    Operation {
        /// What came.
        op: u16,
    },
}

/// What of a connection changes from packet to packet, behind one lock.
pub(crate) struct Inner<R> {
    pub phase: Phase,
    /// Bytes sent, or promised to be, modulo 2³².
    pub tx_cnt: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    /// Bytes received.
    rx_cnt: u32,
    /// The peer will send no more.
    pub peer_done: bool,
    /// The peer will receive no more.
    pub peer_deaf: bool,
    /// We send no more.
    pub done: bool,
    /// We receive no more.
    pub deaf: bool,
    pub inbox: Inbox,
    /// The socket of the host behind it, if it is not one of this process.
    pub relay: Option<R>,
    /// When to give up: waiting for an answer, or for the peer to close too.
    pub deadline: Option<Instant>,
    /// Told of every change, for a program that does not wait in calls.
    pub waker: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Its program waits for packets itself: who has news for it ends that.
    pub leading: Option<Arc<dyn Host<R>>>,
    /// Nothing was read since the last tick.
    pub resting: bool,
}

/// A connection.
pub(crate) struct Conn<R> {
    pub key: Key,
    pub kind: Kind,
    pub cid: u64,
    /// Bytes that we keep at most.
    pub buf_alloc: u32,
    /// Bytes that were received and passed on.
    fwd_cnt: AtomicU32,
    /// What the peer knows of it.
    reported: AtomicU32,
    queued: AtomicUsize,
    /// Who sends: packets of two threads do not mix.
    pub sending: Mutex<()>,
    inner: Mutex<Inner<R>>,
    changed: Condvar,
    sent: AtomicU64,
    received: AtomicU64,
}

impl<R> Owner for Arc<Conn<R>> {
    fn key(&self) -> usize {
        Arc::as_ptr(self) as usize
    }

    fn stamp(&self, header: &mut VsockHdr) {
        // The order of stamps is that of packets in the ring: both happen under its lock.
        let fwd_cnt = self.fwd_cnt.load(Ordering::Acquire);
        self.reported.store(fwd_cnt, Ordering::Release);
        header.fwd_cnt = fwd_cnt;
        header.buf_alloc = self.buf_alloc;
    }

    fn queued(&self) -> &AtomicUsize {
        &self.queued
    }
}

impl<R: Relay> Conn<R> {
    pub(crate) fn new(cid: u64, key: Key, kind: Kind, buf_alloc: u32, phase: Phase) -> Self {
        Conn {
            key,
            kind,
            cid,
            buf_alloc,
            fwd_cnt: AtomicU32::new(0),
            reported: AtomicU32::new(0),
            queued: AtomicUsize::new(0),
            sending: Mutex::new(()),
            inner: Mutex::new(Inner {
                phase,
                tx_cnt: 0,
                peer_buf_alloc: 0,
                peer_fwd_cnt: 0,
                rx_cnt: 0,
                peer_done: false,
                peer_deaf: false,
                done: false,
                deaf: false,
                inbox: Inbox::default(),
                relay: None,
                deadline: None,
                waker: None,
                leading: None,
                resting: true,
            }),
            changed: Condvar::new(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner<R>> {
        self.inner.lock()
    }

    /// Waits for a change, until a time. `false`: that is over.
    pub(crate) fn wait(&self, inner: &mut MutexGuard<'_, Inner<R>>, until: Option<Instant>) -> bool {
        match until {
            Some(until) => !self.changed.wait_until(inner, until).timed_out(),
            None => {
                self.changed.wait(inner);
                true
            }
        }
    }

    /// Somebody may be waiting for what has just changed.
    pub(crate) fn wake(&self, inner: &Inner<R>) {
        self.changed.notify_all();
        if let Some(host) = &inner.leading {
            host.unwait();
        }
        if let Some(waker) = &inner.waker {
            waker();
        }
    }

    /// A header to its peer.
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

    /// Bytes sent and received so far.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// How many bytes of it wait in the outbox.
    pub(crate) fn waiting(&self) -> usize {
        self.queued.load(crate::sync::Ordering::Relaxed)
    }

    /// How much may be sent now.
    pub(crate) fn credit(&self, inner: &Inner<R>) -> usize {
        let under_way = inner.tx_cnt.wrapping_sub(inner.peer_fwd_cnt);
        inner.peer_buf_alloc.saturating_sub(under_way) as usize
    }

    /// The largest message that the peer can ever take.
    pub(crate) fn largest(&self, inner: &Inner<R>) -> usize {
        inner.peer_buf_alloc as usize
    }

    /// So much will be sent.
    pub(crate) fn promise(&self, inner: &mut Inner<R>, count: usize) {
        inner.tx_cnt = inner.tx_cnt.wrapping_add(count as u32);
        self.sent.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// So much of it will not.
    pub(crate) fn take_back(&self, inner: &mut Inner<R>, count: usize) {
        inner.tx_cnt = inner.tx_cnt.wrapping_sub(count as u32);
        self.sent.fetch_sub(count as u64, Ordering::Relaxed);
    }

    /// What was received is passed on: there is room for as much again. Says whether the peer should be told.
    pub(crate) fn consumed(&self, inner: &Inner<R>, count: usize) -> bool {
        self.fwd_cnt.fetch_add(count as u32, Ordering::AcqRel);
        self.update_due(inner)
    }

    /// Whether the peer should be told of room: it believes that there is little, and either there is much more, or nobody
    /// here will read before more comes.
    fn update_due(&self, inner: &Inner<R>) -> bool {
        let reported = self.reported.load(Ordering::Acquire);
        let unreported = self.fwd_cnt.load(Ordering::Acquire).wrapping_sub(reported);
        let believed = self.buf_alloc.saturating_sub(inner.rx_cnt.wrapping_sub(reported));
        let low = (MAX_PACKET as u32).min(self.buf_alloc / 2);
        let readable = match self.kind {
            Kind::Stream => inner.inbox.unread() > 0,
            Kind::SeqPacket => inner.inbox.messages() > 0,
        };
        // It may be of a connection that is over: the ports may be another one's by now.
        inner.phase == Phase::Open
            && unreported > 0
            && (unreported >= self.buf_alloc / 2 || believed < low && (unreported >= low / 2 || !readable))
    }

    /// The peer says how much room it has.
    pub(crate) fn announce(&self, inner: &mut Inner<R>, header: &VsockHdr) {
        inner.peer_buf_alloc = header.buf_alloc;
        inner.peer_fwd_cnt = header.fwd_cnt;
    }

    /// Receives a packet that was found to be for this connection.
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
            (Phase::Connecting, Op::Reset) => self.end(inner, Over::Refused),
            (Phase::Accepting | Phase::Open, Op::Reset) => {
                let orderly = inner.peer_done && inner.peer_deaf || inner.done && inner.deaf;
                self.end(inner, if orderly { Over::Done } else { Over::Reset })
            }
            (_, Op::Request) => self.fail(inner, Wrong::SecondRequest),
            (_, Op::Response) => self.fail(inner, Wrong::Response),
            (Phase::Connecting | Phase::Accepting, op) => self.fail(inner, Wrong::Early { op: op as u16 }),
            (Phase::Open, Op::Data) => self.data(inner, header, payload, wanted),
            (Phase::Open, Op::Shutdown) => {
                inner.peer_done |= header.flags & wire::SHUTDOWN_SEND != 0;
                inner.peer_deaf |= header.flags & wire::SHUTDOWN_RECEIVE != 0;
                self.maybe_over(inner)
            }
            (Phase::Open, Op::CreditRequest) => Verdict::reply(Op::CreditUpdate),
            (Phase::Open, Op::CreditUpdate) => Verdict::default(),
        };
        // A reader that is served on the spot need not be woken, nor need anybody for a mere update that changes nothing.
        if room || op != Op::CreditUpdate && op != Op::CreditRequest {
            self.wake(inner);
        }
        // Programs of this process were woken already.
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
        if inner.peer_done {
            return self.fail(inner, Wrong::AfterShutdown { len });
        }
        let kept = inner.rx_cnt.wrapping_sub(self.fwd_cnt.load(Ordering::Acquire));
        let credit = self.buf_alloc.saturating_sub(kept);
        if len > credit {
            return self.fail(inner, Wrong::Credit { len, credit });
        }
        if inner.inbox.messages() >= self.buf_alloc as usize {
            return self.fail(inner, Wrong::Messages { limit: self.buf_alloc });
        }
        inner.rx_cnt = inner.rx_cnt.wrapping_add(len);
        self.received.fetch_add(len.into(), Ordering::Relaxed);
        inner.resting = false;
        let mut passed = 0;
        if inner.deaf {
            // Nobody will read it.
            passed = payload.len();
        } else if self.kind == Kind::SeqPacket {
            inner.inbox.push(payload);
            if header.flags & wire::SEQ_EOM != 0 {
                inner.inbox.end_message(header.flags & wire::SEQ_EOR != 0);
            }
        } else {
            if inner.inbox.unread() == 0 {
                passed = self.pass(inner, payload, wanted);
            }
            inner.inbox.push(payload);
        }
        let due = self.consumed(inner, passed);
        Verdict { reply: due.then_some(Op::CreditUpdate), ..Verdict::default() }
    }

    /// Passes bytes on to who waits for them, without keeping them. Says how many.
    fn pass(&self, inner: &mut Inner<R>, payload: &mut Payload<'_>, wanted: Option<&mut Wanted<'_>>) -> usize {
        let before = payload.len();
        if let Some(relay) = &mut inner.relay {
            if relay.deliver(payload).is_err() {
                // Its program reads no more. What it does not take is lost, as with any socket; the host tells the peer.
                payload.skip(payload.len());
            }
        } else if let Some(wanted) = wanted.filter(|wanted| wanted.key == self.key) {
            wanted.got += payload.read(&mut wanted.target[wanted.got..]);
        }
        before - payload.len()
    }

    /// The relay can take more: what was kept goes there. Says what is to be done.
    pub(crate) fn drain(&self, inner: &mut Inner<R>) -> Verdict {
        let mut passed = 0;
        let Inner { inbox, relay: Some(relay), .. } = inner else { return Verdict::default() };
        while inbox.unread() > 0 {
            let front = inbox.front();
            let mut payload = Payload::bytes(front);
            let gone = relay.deliver(&mut payload).is_err();
            let count = if gone { front.len() } else { front.len() - payload.len() };
            inbox.consume(count);
            passed += count;
            if count == 0 {
                break;
            }
        }
        let due = self.consumed(inner, passed);
        let verdict = self.maybe_over(inner);
        Verdict { reply: verdict.reply.or(due.then_some(Op::CreditUpdate)), ..verdict }
    }

    /// Both ends are done: a reset is the last word (5.10.6.5), said by who hears of it last.
    pub(crate) fn maybe_over(&self, inner: &mut Inner<R>) -> Verdict {
        if inner.phase != Phase::Open || !(inner.peer_done && inner.peer_deaf) {
            if inner.peer_done
                && inner.inbox.is_empty()
                && let Some(relay) = &mut inner.relay
            {
                relay.finish();
            }
            return Verdict::default();
        }
        if !inner.inbox.is_empty() && !inner.deaf {
            return Verdict::default();
        }
        Verdict { reply: Some(Op::Reset), ..self.end(inner, Over::Done) }
    }

    /// Ends it.
    pub(crate) fn end(&self, inner: &mut Inner<R>, how: Over) -> Verdict {
        if let Phase::Closed(_) = inner.phase {
            return Verdict::default();
        }
        inner.phase = Phase::Closed(how);
        inner.deadline = None;
        // What came before may still be read by a program; a relay gets what it takes at once.
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
            relay.close(how != Over::Done);
        }
        self.wake(inner);
        Verdict { over: true, ..Verdict::default() }
    }

    fn fail(&self, inner: &mut Inner<R>, wrong: Wrong) -> Verdict {
        let _ = self.end(inner, Over::Reset);
        Verdict::wrong(wrong)
    }
}
