//! One connection: who may send how much (credit), who has said that he sends or receives no more, and what has come. A state
//! machine over packets; `stack.rs` finds the connection for a packet and sends what it answers.

use crate::{
    Account, Addr, Charge, Host, Kind, Owner, Payload, Relay,
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
    /// More than its guest may have in our memory, all in all.
    #[error("more than may be kept for its guest, which is in use for others that nobody reads")]
    Memory,
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
    /// Nothing has come since it was looked at last.
    pub resting: bool,
    /// It is among those that are looked at.
    pub listed: bool,
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
    /// Up to where the peer knows that it may send, modulo 2³².
    told: AtomicU32,
    queued: AtomicUsize,
    /// Who sends: packets of two threads do not mix.
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
        // The order of stamps is that of packets in the ring: both happen under its lock.
        let fwd_cnt = self.fwd_cnt.load(Ordering::Acquire);
        let edge = further(fwd_cnt.wrapping_add(self.window()), self.told.load(Ordering::Acquire));
        self.told.store(edge, Ordering::Release);
        header.fwd_cnt = fwd_cnt;
        header.buf_alloc = edge.wrapping_sub(fwd_cnt);
    }

    fn queued(&self) -> &AtomicUsize {
        &self.queued
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        // `Stack::room` has seen that it is not too much.
        Some(self.account.charge_anyway(bytes))
    }
}

/// What is further on of two places in a stream, modulo 2³².
pub(crate) fn further(one: u32, other: u32) -> u32 {
    if other.wrapping_sub(one) as i32 > 0 { other } else { one }
}

impl<R> Conn<R> {
    /// How many bytes may be kept of what is received: as much as the connection may have, and its guest for each.
    fn window(&self) -> u32 {
        self.buf_alloc.min(u32::try_from(self.account.allowance()).unwrap_or(u32::MAX))
    }

    /// How many bytes that are sent may wait.
    pub(crate) fn allowance(&self) -> usize {
        self.account.allowance()
    }
}

impl<R: Relay> Conn<R> {
    pub(crate) fn new(cid: u64, key: Key, kind: Kind, buf_alloc: u32, phase: Phase, opened: Opened) -> Self {
        let account = opened.account().cloned().unwrap_or_else(|| Account::new(usize::MAX, 1));
        // What its first packet tells the peer.
        let window = buf_alloc.min(u32::try_from(account.allowance()).unwrap_or(u32::MAX));
        Conn {
            key,
            kind,
            cid,
            buf_alloc,
            fwd_cnt: AtomicU32::new(0),
            told: AtomicU32::new(window),
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
                inbox: Inbox::new(&account),
                relay: None,
                deadline: None,
                waker: None,
                leading: None,
                resting: true,
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
        let (told, window) = (self.told.load(Ordering::Acquire), self.window());
        let edge = self.fwd_cnt.load(Ordering::Acquire).wrapping_add(window);
        // It may have been told of more than there would be now.
        let gain = u32::try_from(edge.wrapping_sub(told) as i32).unwrap_or(0);
        let believed = told.wrapping_sub(inner.rx_cnt);
        let low = (MAX_PACKET as u32).min(window / 2);
        let readable = match self.kind {
            Kind::Stream => inner.inbox.unread() > 0,
            Kind::SeqPacket => inner.inbox.messages() > 0,
        };
        // It may be of a connection that is over: the ports may be another one's by now.
        inner.phase == Phase::Open
            && gain > 0
            && (gain >= window / 2 || believed < low && (gain >= low / 2 || !readable))
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
        // What it was told, or could be told by now.
        let now = self.fwd_cnt.load(Ordering::Acquire).wrapping_add(self.window());
        let credit = further(self.told.load(Ordering::Acquire), now).wrapping_sub(inner.rx_cnt);
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
        let kept = if inner.deaf {
            // Nobody will read it.
            passed = payload.len();
            Ok(())
        } else if self.kind == Kind::SeqPacket {
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

    /// Passes bytes on to who waits for them, without keeping them. Says how many.
    fn pass(&self, inner: &mut Inner<R>, payload: &mut Payload<'_>, wanted: Option<&mut Wanted<'_>>) -> usize {
        let before = payload.len();
        if let Some(relay) = &mut inner.relay {
            if relay.deliver(payload).is_err() {
                // Its program reads no more. What it does not take is lost, as with any socket; the host tells the peer.
                payload.skip(payload.len());
            }
        } else if let Some(wanted) = wanted.filter(|wanted| wanted.key == self.key) {
            wanted.got += payload.read(wanted.target.get_mut(wanted.got..).unwrap_or_default());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoRelay;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicUsize as Count;

    const HEAP: u32 = 256 << 10;

    fn conn_of<R: Relay>(kind: Kind, buf_alloc: u32, phase: Phase) -> Arc<Conn<R>> {
        let key = Key { port: 5000, peer: Addr { cid: 3, port: 6000 } };
        let opened = Account::new(1 << 40, 1).open().unwrap();
        Arc::new(Conn::new(2, key, kind, buf_alloc, phase, opened))
    }

    fn conn(buf_alloc: u32) -> Arc<Conn<NoRelay>> {
        conn_of(Kind::Stream, buf_alloc, Phase::Open)
    }

    /// Both directions have carried so much already.
    fn begin_at<R: Relay>(conn: &Conn<R>, count: u32) {
        let mut inner = conn.lock();
        (inner.tx_cnt, inner.peer_fwd_cnt, inner.rx_cnt) = (count, count, count);
        conn.fwd_cnt.store(count, Ordering::Relaxed);
        conn.told.store(count.wrapping_add(conn.buf_alloc), Ordering::Relaxed);
    }

    /// A packet from the peer, which has all the room that it said before.
    fn receive<R: Relay>(conn: &Conn<R>, op: Op, flags: u32, bytes: &[u8]) -> Verdict {
        let mut inner = conn.lock();
        let (buf_alloc, fwd_cnt) = (inner.peer_buf_alloc, inner.peer_fwd_cnt);
        let header = VsockHdr { len: bytes.len() as u32, flags, buf_alloc, fwd_cnt, ..VsockHdr::default() };
        conn.receive(&mut inner, op, &header, &mut Payload::bytes(bytes), None)
    }

    fn data<R: Relay>(conn: &Conn<R>, len: usize) -> Verdict {
        receive(conn, Op::Data, 0, &vec![7; len])
    }

    /// A program reads. Says whether the peer should be told.
    fn read<R: Relay>(conn: &Conn<R>, len: usize) -> bool {
        let mut inner = conn.lock();
        let count = inner.inbox.read(&mut vec![0; len]);
        assert_eq!(count, len);
        conn.consumed(&inner, count)
    }

    /// A packet tells the peer of room; the count in it.
    fn tell<R>(conn: &Arc<Conn<R>>) -> u32 {
        let mut header = VsockHdr::default();
        conn.stamp(&mut header);
        assert_eq!(header.buf_alloc, conn.buf_alloc);
        header.fwd_cnt
    }

    const STARTS: [u32; 7] = [0, 1, 1 << 31, u32::MAX - 150, u32::MAX - 99, u32::MAX - 1, u32::MAX];

    #[test]
    fn credit_goes_beyond_the_end_of_the_counters() {
        for start in STARTS {
            let conn = conn(1000);
            begin_at(&conn, start);
            let mut inner = conn.lock();
            let announce = |inner: &mut _, buf_alloc, sent: u32| {
                let fwd_cnt = start.wrapping_add(sent);
                conn.announce(inner, &VsockHdr { buf_alloc, fwd_cnt, ..VsockHdr::default() });
            };
            assert_eq!(conn.credit(&inner), 0, "nothing was announced");
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
            // Less room than there was, even less than is under way; then more.
            announce(&mut inner, 50, 30);
            assert_eq!(conn.credit(&inner), 0);
            announce(&mut inner, u32::MAX, 30);
            assert_eq!(conn.credit(&inner), u32::MAX as usize - 70);
            announce(&mut inner, 100, 100);
            assert_eq!(conn.credit(&inner), 100);
            // It has received more than was sent, it says.
            announce(&mut inner, 100, 101);
            assert_eq!(conn.credit(&inner), 0);
            assert_eq!(conn.traffic(), (100, 0));
        }
    }

    #[test]
    fn the_peers_credit_goes_beyond_the_end_of_the_counters() {
        for start in STARTS {
            let open = || {
                let conn = conn(1000);
                begin_at(&conn, start);
                assert_eq!(data(&conn, 100).wrong, None);
                assert_eq!(data(&conn, 800).wrong, None);
                conn
            };
            assert_eq!(data(&open(), 101).wrong, Some(Wrong::Credit { len: 101, credit: 100 }));
            let conn = open();
            assert_eq!(data(&conn, 100).wrong, None);
            read(&conn, 1000);
            assert_eq!(tell(&conn), start.wrapping_add(1000));
            assert_eq!(data(&conn, 1000).wrong, None);
            assert_eq!(data(&conn, 1).wrong, Some(Wrong::Credit { len: 1, credit: 0 }));
            assert_eq!(conn.lock().phase, Phase::Closed(Over::Reset));
            assert_eq!(conn.lock().inbox.unread(), 1000, "what came before may still be read");
            assert_eq!(conn.traffic(), (0, 2000));
        }
    }

    #[test]
    fn an_empty_message_counts_though_it_has_no_bytes() {
        let conn = conn_of::<NoRelay>(Kind::SeqPacket, 4, Phase::Open);
        for _ in 0..4 {
            assert_eq!(receive(&conn, Op::Data, wire::SEQ_EOM, &[]), Verdict::default());
        }
        assert_eq!(receive(&conn, Op::Data, wire::SEQ_EOM, &[]), Verdict::wrong(Wrong::Messages { limit: 4 }));
    }

    /// A peer that sends and is read at once is told of room twice per buffer, not for each packet.
    #[test]
    fn small_reads_do_not_each_tell_of_room() {
        for start in STARTS {
            let conn = conn(HEAP);
            begin_at(&conn, start);
            let mut updates = 0;
            for _ in 0..20 * HEAP / 100 {
                assert_eq!(data(&conn, 100), Verdict::default());
                if read(&conn, 100) {
                    updates += 1;
                    tell(&conn);
                }
            }
            assert_eq!(updates, 20 * 2 - 1, "from {start} on");
        }
    }

    #[test]
    fn room_is_told_when_the_peer_believes_that_there_is_little() {
        let conn = conn(HEAP);
        let low = MAX_PACKET;
        // So little is left that it may soon have to wait.
        let _ = data(&conn, HEAP as usize - low + 1);
        // Somebody here reads, and goes on reading: not for each few bytes.
        assert!(!read(&conn, low / 2 - 1));
        assert!(read(&conn, 1));
        tell(&conn);
        assert!(!read(&conn, 1000), "it knows of more again");

        // The last byte: nobody here reads before more comes.
        let conn = self::conn(HEAP);
        let _ = data(&conn, HEAP as usize - low + 1);
        read(&conn, HEAP as usize - low);
        tell(&conn);
        assert!(!read(&conn, 1), "there is plenty");
        let conn = self::conn(100);
        let _ = data(&conn, 51);
        assert!(!read(&conn, 24));
        assert!(read(&conn, 27));
        // It is told once, whatever carries that.
        tell(&conn);
        assert!(!conn.consumed(&conn.lock(), 0));
        // A question is always answered.
        assert_eq!(receive(&conn, Op::CreditRequest, 0, &[]), Verdict::reply(Op::CreditUpdate));
    }

    proptest! {
        /// Nobody waits for ever: a peer that believes that it must not send has left something to read here.
        #[test]
        fn no_peer_is_left_without_credit(
            message in any::<bool>(),
            buf_alloc in prop_oneof![1..40u32, Just(4096), Just(HEAP)],
            start in prop_oneof![Just(0), Just(u32::MAX), any::<u32>()],
            steps in proptest::collection::vec((0..4u8, any::<u32>()), 1..300),
        ) {
            let kind = if message { Kind::SeqPacket } else { Kind::Stream };
            let conn = conn_of::<NoRelay>(kind, buf_alloc, Phase::Open);
            begin_at(&conn, start);
            let (mut sent, mut told, mut partial) = (start, start, 0);
            for (step, size) in steps {
                let credit = buf_alloc - sent.wrapping_sub(told);
                let due = match step {
                    0 | 1 if credit > 0 => {
                        // Often all of it.
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
                    // Another packet happens to go there.
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
                    told = tell(&conn);
                }
                let inner = conn.lock();
                let readable = if message { inner.inbox.messages() } else { inner.inbox.unread() } > 0;
                let kept = sent.wrapping_sub(conn.fwd_cnt.load(Ordering::Relaxed));
                prop_assert_eq!(kept as usize, inner.inbox.unread());
                prop_assert!(sent != told.wrapping_add(buf_alloc) || readable || kept == buf_alloc);
            }
        }
    }

    #[test]
    fn each_operation_in_each_phase() {
        const OPS: [Op; 7] =
            [Op::Request, Op::Response, Op::Reset, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest];
        let over = Verdict { over: true, ..Verdict::default() };
        let early = |op| Verdict::wrong(Wrong::Early { op: op as u16 });
        let second = Verdict::wrong(Wrong::SecondRequest);
        let response = Verdict::wrong(Wrong::Response);
        let nothing = Verdict::default();
        let (shutdown, data) = (early(Op::Shutdown), early(Op::Data));
        let (update, request) = (early(Op::CreditUpdate), early(Op::CreditRequest));
        let answer = Verdict::reply(Op::CreditUpdate);
        let (open, reset) = (Phase::Open, Phase::Closed(Over::Reset));
        let refused = Phase::Closed(Over::Refused);
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
        let closed = [Over::Done, Over::Refused, Over::Reset, Over::TimedOut].map(Phase::Closed);
        let closed = closed.map(|phase| (phase, [nothing; 7], [phase; 7]));
        for (phase, verdicts, after) in rows.into_iter().chain(closed) {
            for ((op, verdict), after) in OPS.into_iter().zip(verdicts).zip(after) {
                let conn = conn_of::<NoRelay>(Kind::Stream, 1000, phase);
                assert_eq!(receive(&conn, op, 0, &[1]), verdict, "{op:?} when {phase:?}");
                assert_eq!(conn.lock().phase, after, "{op:?} when {phase:?}");
                if verdict.wrong.is_some() {
                    assert_eq!((verdict.reply, verdict.over), (Some(Op::Reset), true));
                }
                let kept = (op == Op::Data && phase == open) as usize;
                assert_eq!(conn.lock().inbox.unread(), kept, "{op:?} when {phase:?}");
            }
        }
    }

    #[test]
    fn who_waits_for_room_is_told_when_there_is_some() {
        // A program is woken, the worker told of a socket that it may read from again.
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
            assert_eq!(update(200, 0), (false, 0), "there was room before");
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
        Verdict { reply: Some(Op::Reset), over: true, ..Verdict::default() }
    }

    #[test]
    fn a_peer_that_sends_no_more_still_receives() {
        let conn = conn(1000);
        let _ = data(&conn, 10);
        assert_eq!(shutdown(&conn, wire::SHUTDOWN_SEND), Verdict::default());
        assert_eq!(shutdown(&conn, 0), Verdict::default(), "what was said is not taken back");
        {
            let inner = conn.lock();
            assert_eq!((inner.phase, inner.peer_done, inner.peer_deaf), (Phase::Open, true, false));
            assert_eq!(inner.inbox.unread(), 10);
        }
        assert_eq!(receive(&conn, Op::CreditRequest, 0, &[]), Verdict::reply(Op::CreditUpdate));
        assert_eq!(data(&conn, 3), Verdict::wrong(Wrong::AfterShutdown { len: 3 }));
    }

    #[test]
    fn a_peer_that_receives_no_more_still_sends() {
        let conn = conn(1000);
        assert_eq!(shutdown(&conn, wire::SHUTDOWN_RECEIVE), Verdict::default());
        assert_eq!(data(&conn, 3), Verdict::default());
        let inner = conn.lock();
        assert_eq!((inner.phase, inner.peer_done, inner.peer_deaf), (Phase::Open, false, true));
        assert_eq!(inner.inbox.unread(), 3);
    }

    #[test]
    fn a_peer_that_is_done_hears_the_last_word_when_all_is_read() {
        for parts in [&[BOTH][..], &[wire::SHUTDOWN_SEND, wire::SHUTDOWN_RECEIVE], &[wire::SHUTDOWN_RECEIVE, BOTH]] {
            // Nothing is left to read.
            let conn = conn(1000);
            let (last, first) = parts.split_last().unwrap();
            first.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
            assert_eq!(shutdown(&conn, *last), done());
            assert_eq!(conn.lock().phase, Phase::Closed(Over::Done));
            assert_eq!(conn.maybe_over(&mut conn.lock()), Verdict::default(), "it is said once");

            // Something is.
            let conn = self::conn(1000);
            let _ = data(&conn, 10);
            parts.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
            read(&conn, 9);
            assert_eq!(conn.maybe_over(&mut conn.lock()), Verdict::default());
            read(&conn, 1);
            assert_eq!(conn.maybe_over(&mut conn.lock()), done());

            // Something is, but nobody will.
            let conn = self::conn(1000);
            let _ = data(&conn, 10);
            conn.lock().deaf = true;
            first.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
            assert_eq!(shutdown(&conn, *last), done());
        }
        // An empty message is something too.
        let conn = conn_of::<NoRelay>(Kind::SeqPacket, 1000, Phase::Open);
        let _ = receive(&conn, Op::Data, wire::SEQ_EOM, &[]);
        assert_eq!(shutdown(&conn, BOTH), Verdict::default());
        assert_eq!(conn.lock().inbox.read_message(&mut []), Some((0, false)));
        assert_eq!(conn.maybe_over(&mut conn.lock()), done());
    }

    #[test]
    fn a_reset_is_in_order_when_either_end_was_done() {
        let ended = |prepare: &dyn Fn(&Arc<Conn<NoRelay>>)| {
            let conn = conn(1000);
            let _ = data(&conn, 5);
            prepare(&conn);
            assert_eq!(receive(&conn, Op::Reset, 0, &[]), Verdict { over: true, ..Verdict::default() });
            let inner = conn.lock();
            assert_eq!(inner.inbox.unread(), 5, "what came before may still be read");
            inner.phase
        };
        let (done, reset) = (Phase::Closed(Over::Done), Phase::Closed(Over::Reset));
        let ours = |done, deaf| move |conn: &Arc<Conn<NoRelay>>| (conn.lock().done, conn.lock().deaf) = (done, deaf);
        assert_eq!(ended(&|_| {}), reset);
        assert_eq!(ended(&|conn| assert!(!shutdown(conn, BOTH).over)), done);
        assert_eq!(ended(&|conn| assert!(!shutdown(conn, wire::SHUTDOWN_SEND).over)), reset);
        assert_eq!(ended(&|conn| assert!(!shutdown(conn, wire::SHUTDOWN_RECEIVE).over)), reset);
        assert_eq!(ended(&ours(true, true)), done);
        assert_eq!(ended(&ours(true, false)), reset);
        assert_eq!(ended(&ours(false, true)), reset);
    }

    #[test]
    fn an_end_that_receives_no_more_gives_the_room_back() {
        let conn = conn(1000);
        conn.lock().deaf = true;
        assert_eq!(data(&conn, 499), Verdict::default());
        assert_eq!(data(&conn, 1), Verdict::reply(Op::CreditUpdate));
        assert_eq!(tell(&conn), 500);
        assert_eq!(conn.lock().inbox.unread(), 0);
    }

    /// A socket of the host that takes so many bytes at once, and what it was told.
    #[derive(Default)]
    struct Socket {
        takes: usize,
        gone: bool,
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
            if socket.gone {
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
        let conn = conn_of(Kind::Stream, 1000, phase);
        let socket = Arc::new(Mutex::new(Socket { takes, ..Socket::default() }));
        conn.lock().relay = Some(socket.clone());
        (conn, socket)
    }

    #[test]
    fn a_socket_gets_the_end_after_all_bytes() {
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
    fn a_socket_that_takes_more_lets_the_peer_go_on() {
        let (conn, socket) = relayed(Phase::Open, 0);
        assert_eq!(data(&conn, 1000), Verdict::default());
        socket.lock().takes = 100;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::default());
        socket.lock().takes = 400;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::reply(Op::CreditUpdate));
        assert_eq!(tell(&conn), 500);
        // The end is the last word, in place of news of room.
        assert_eq!(shutdown(&conn, BOTH), Verdict::default());
        socket.lock().takes = 1000;
        assert_eq!(conn.drain(&mut conn.lock()), done());
        assert_eq!(socket.lock().closed, Some(false));
    }

    #[test]
    fn bytes_for_a_socket_that_is_gone_are_lost() {
        let (conn, socket) = relayed(Phase::Open, 0);
        assert_eq!(data(&conn, 600), Verdict::default());
        socket.lock().gone = true;
        assert_eq!(conn.drain(&mut conn.lock()), Verdict::reply(Op::CreditUpdate));
        assert_eq!(tell(&conn), 600);
        assert_eq!(data(&conn, 600), Verdict::reply(Op::CreditUpdate));
        assert_eq!((conn.lock().inbox.unread(), socket.lock().got), (0, 0));
        assert_eq!(receive(&conn, Op::Reset, 0, &[]), Verdict { over: true, ..Verdict::default() });
        assert_eq!(socket.lock().closed, Some(true));
    }

    #[test]
    fn a_socket_hears_that_it_is_connected_or_not() {
        let (conn, socket) = relayed(Phase::Connecting, 0);
        conn.lock().deadline = Some(Instant::now());
        assert!(receive(&conn, Op::Response, 0, &[]).room);
        assert_eq!(socket.lock().opened, 1);
        assert_eq!(socket.lock().closed, None);
        assert_eq!(conn.lock().deadline, None);
        let (conn, socket) = relayed(Phase::Connecting, 0);
        assert!(receive(&conn, Op::Reset, 0, &[]).over);
        assert_eq!(socket.lock().opened, 0);
        assert_eq!(socket.lock().closed, Some(true));
    }
}
