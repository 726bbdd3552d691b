//! Tests of the state machine of a connection.

use super::*;
use crate::{
    credit::STARTS,
    side::NoRelay,
    types::{Addr, MAX_PACKET},
};
use proptest::prelude::*;

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
    inner.credit.advance_to(count);
    inner.received = count.into();
    conn.window.advance_to(count);
}

/// Delivers a packet from the peer, which advertises the same credit as before.
fn receive<R: Relay>(conn: &Conn<R>, op: Op, flags: u32, bytes: &[u8]) -> Verdict {
    let mut inner = conn.lock();
    let header = VsockHdr { len: bytes.len() as u32, flags, ..inner.credit.last_update() };
    let verdict = conn.receive(&mut inner, op, &header, &mut Payload::bytes(bytes), None);
    assert!(verdict.wake || verdict == Verdict::default() || op == Op::CreditUpdate || op == Op::CreditRequest);
    Verdict { wake: false, ..verdict }
}

/// Returns the verdict on a violation.
fn reset_with(wrong: Wrong) -> Verdict {
    Verdict { wake: false, ..Verdict::wrong(wrong) }
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
    assert_eq!(header.buf_alloc, conn.window.size());
    header.fwd_cnt
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
        assert_eq!(conn.lock().received, u64::from(start) + 2000);
    }
}

#[test]
fn empty_messages_are_limited() {
    let conn = conn_of::<NoRelay>(SocketType::SeqPacket, 4, Phase::Open);
    for _ in 0..4 {
        assert_eq!(receive(&conn, Op::Data, wire::SEQ_EOM, &[]), Verdict::default());
    }
    assert_eq!(receive(&conn, Op::Data, wire::SEQ_EOM, &[]), reset_with(Wrong::Messages { limit: 4 }));
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
            let kept = sent.wrapping_sub(conn.window.consumed());
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
    let early = |op| reset_with(Wrong::Early { op: op as u16 });
    let second = reset_with(Wrong::SecondRequest);
    let response = reset_with(Wrong::Response);
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
        let update = |buf_alloc, fwd_cnt| {
            let header = VsockHdr { buf_alloc, fwd_cnt, ..VsockHdr::default() };
            let verdict = conn.receive(&mut conn.lock(), Op::CreditUpdate, &header, &mut Payload::empty(), None);
            (verdict.room, verdict.wake)
        };
        assert_eq!(update(0, 0), (false, false));
        assert_eq!(update(100, 0), (socket, true));
        assert_eq!(update(200, 0), (false, false), "there was credit before");
        conn.lock().credit.reserve(200);
        assert_eq!(update(200, 0), (false, false));
        assert_eq!(update(200, 1), (socket, true));
    }
}

const BOTH: u32 = wire::SHUTDOWN_SEND | wire::SHUTDOWN_RECEIVE;

fn shutdown<R: Relay>(conn: &Conn<R>, flags: u32) -> Verdict {
    receive(conn, Op::Shutdown, flags, &[])
}

fn done() -> Verdict {
    Verdict { reply: Some(Op::Reset), closed: true, ..Verdict::default() }
}

/// Closes the connection if it is done, as after a read.
fn close_if_done<R: Relay>(conn: &Conn<R>) -> Verdict {
    let verdict = conn.close_if_done(&mut conn.lock());
    assert_eq!(verdict.wake, verdict.closed);
    Verdict { wake: false, ..verdict }
}

/// Lets the relay take what is buffered.
fn drain<R: Relay>(conn: &Conn<R>) -> Verdict {
    Verdict { wake: false, ..conn.drain(&mut conn.lock()) }
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
    assert_eq!(data(&conn, 3), reset_with(Wrong::AfterShutdown { len: 3 }));
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
        assert_eq!(close_if_done(&conn), Verdict::default(), "the reset is sent once");

        // Something is unread.
        let conn = self::conn(1000);
        let _ = data(&conn, 10);
        parts.iter().for_each(|&flags| assert_eq!(shutdown(&conn, flags), Verdict::default()));
        read(&conn, 9);
        assert_eq!(close_if_done(&conn), Verdict::default());
        read(&conn, 1);
        assert_eq!(close_if_done(&conn), done());

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
    assert_eq!(close_if_done(&conn), done());
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
    assert_eq!(drain(&conn), Verdict::default());
    assert!(!socket.lock().finished);
    socket.lock().takes = 500;
    assert_eq!(drain(&conn), Verdict::default());
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
    assert_eq!(drain(&conn), Verdict::default());
    socket.lock().takes = 400;
    assert_eq!(drain(&conn), Verdict::reply(Op::CreditUpdate));
    assert_eq!(stamped(&conn), 500);
    // The final reset replaces the credit update.
    assert_eq!(shutdown(&conn, BOTH), Verdict::default());
    socket.lock().takes = 1000;
    assert_eq!(drain(&conn), done());
    assert_eq!(socket.lock().closed, Some(false));
}

#[test]
fn bytes_for_a_disconnected_relay_are_discarded() {
    let (conn, socket) = relayed(Phase::Open, 0);
    assert_eq!(data(&conn, 600), Verdict::default());
    socket.lock().disconnected = true;
    assert_eq!(drain(&conn), Verdict::reply(Op::CreditUpdate));
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
