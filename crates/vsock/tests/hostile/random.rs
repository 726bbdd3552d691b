//! Random steps of a guest that obeys no rules, and of programs.

use crate::common::{
    GUEST, HOST,
    raw::{FIRST_PORT, GOOD, Good, Guest, PACKED, PORT, Packet, SPLIT, Shape, Side},
};
use proptest::prelude::*;
use ringroad_vsock::{Addr, Listener, MAX_PACKET, SeqPacket, Settings, SocketType, Stream};
use ringroad_wire::vsock_hdr::{Op, TYPE_SEQPACKET, TYPE_STREAM, VsockHdr};
use std::{
    io::{ErrorKind, Read, Write},
    time::{Duration, Instant},
};

const MESSAGES: u32 = 1001;

/// A step of a guest or a program. Socket numbers count from the oldest one, modulo their number.
#[derive(Clone, Debug)]
enum Step {
    /// A packet from the guest with `there` bytes of payload, in descriptors of `cut` bytes.
    Send {
        header: VsockHdr,
        there: usize,
        cut: usize,
    },
    /// The guest takes packets and makes the buffers available again.
    Take,
    /// The device's worker runs.
    Work,
    Accept,
    /// A program connects to a port that answers with this operation.
    Connect {
        port: u32,
        kind: SocketType,
        op: u16,
    },
    Write(usize, usize),
    Read(usize, usize),
    Shut(usize, bool, bool),
    Close(usize),
    /// Time passes, in milliseconds.
    Tick(u64),
    Sweep,
    Reset,
}

fn headers() -> impl Strategy<Value = VsockHdr> {
    let cids = || prop_oneof![6 => Just(0), 1 => any::<u64>(), 1 => 0..5u64];
    let from = prop_oneof![20 => 0..4u32, 1 => any::<u32>()];
    let to = prop_oneof![
        10 => Just(PORT),
        10 => Just(MESSAGES),
        10 => FIRST_PORT..FIRST_PORT + 6,
        1 => any::<u32>()
    ];
    let kind = prop_oneof![10 => Just(TYPE_STREAM), 6 => Just(TYPE_SEQPACKET), 1 => any::<u16>()];
    let op = prop_oneof![
        6 => Just(Op::Request as u16),
        12 => Just(Op::Data as u16),
        10 => 2..8u16,
        1 => any::<u16>()
    ];
    let len = prop_oneof![3 => Just(0), 6 => 1..5000u32, 1 => any::<u32>()];
    let flags = prop_oneof![8 => 0..4u32, 1 => any::<u32>()];
    let credit = || prop_oneof![4 => Just(0), 4 => 0..20_000u32, 1 => Just(u32::MAX), 1 => any::<u32>()];
    (cids(), cids(), from, to, kind, op, (len, flags, credit(), credit())).prop_map(
        |(src_cid, dst_cid, src_port, dst_port, kind, op, (len, flags, buf_alloc, fwd_cnt))| {
            // 0 stands for the correct CID.
            let src_cid = if src_cid == 0 { GUEST } else { src_cid };
            let dst_cid = if dst_cid == 0 { HOST } else { dst_cid };
            VsockHdr { src_cid, dst_cid, src_port, dst_port, len, kind, op, flags, buf_alloc, fwd_cnt }
        },
    )
}

fn steps() -> impl Strategy<Value = Step> {
    let there = prop_oneof![6 => Just(None), 1 => (0..6000usize).prop_map(Some)];
    let cut = prop_oneof![4 => Just(70_000), 1 => 1000..5000usize, 1 => 8..60usize];
    let socket = || 0..8usize;
    prop_oneof![
        30 => (headers(), there, cut).prop_map(|(header, there, cut)| {
            let there = there.unwrap_or((header.len as usize).min(6000));
            Step::Send { header, there, cut }
        }),
        6 => Just(Step::Take),
        8 => Just(Step::Work),
        6 => Just(Step::Accept),
        4 => (0..4u32, any::<bool>(), prop_oneof![8 => Just(2), 1 => 1..8u16]).prop_map(|(port, stream, op)| {
            Step::Connect { port, kind: if stream { SocketType::Stream } else { SocketType::SeqPacket }, op }
        }),
        8 => (socket(), 0..20_000usize).prop_map(|(socket, len)| Step::Write(socket, len)),
        8 => (socket(), 0..20_000usize).prop_map(|(socket, len)| Step::Read(socket, len)),
        2 => (socket(), any::<bool>(), any::<bool>()).prop_map(|(socket, r, w)| Step::Shut(socket, r, w)),
        2 => socket().prop_map(Step::Close),
        1 => (0..20_000u64).prop_map(Step::Tick),
        1 => Just(Step::Sweep),
        1 => prop_oneof![5 => Just(Step::Sweep), 1 => Just(Step::Reset)],
    ]
}

enum Program {
    Stream(Stream<Side>),
    Messages(SeqPacket<Side>),
}

/// Checks that a failed call returned one of the expected errors.
fn check_error(result: std::io::Result<usize>) {
    use ErrorKind::*;
    if let Err(error) = result {
        let known = [WouldBlock, ConnectionReset, ConnectionRefused, TimedOut, BrokenPipe, InvalidInput, QuotaExceeded];
        assert!(known.contains(&error.kind()), "{error:?}");
    }
}

#[expect(clippy::too_many_lines, reason = "one arm per kind of step")]
fn step(guest: &mut Guest, listeners: &[Listener<Side>; 2], programs: &mut Vec<Program>, next: &mut u32, step: Step) {
    let which = |programs: &Vec<Program>, number: usize| number.checked_rem(programs.len());
    match step {
        Step::Send { header, there, cut } => {
            let bytes = [&header.to_bytes()[..], &vec![5; there]].concat();
            let cuts = vec![cut; bytes.len().div_ceil(cut).min(30)];
            guest.send_chain(&bytes, &cuts, 0);
        }
        Step::Take => drop(guest.take()),
        Step::Work => drop(guest.host.work()),
        Step::Accept => {
            let stream = listeners[0].accept_within(Some(Duration::ZERO)).map(Program::Stream);
            let messages = listeners[1].accept_messages_within(Some(Duration::ZERO)).map(Program::Messages);
            for program in [stream, messages].into_iter().flatten() {
                match &program {
                    Program::Stream(stream) => stream.set_nonblocking(true),
                    Program::Messages(messages) => messages.set_nonblocking(true),
                }
                programs.push(program);
            }
        }
        Step::Connect { port, kind, op } => {
            if guest.host.report().connections >= 6 {
                return;
            }
            // The answer is put into the ring before the request is sent, so that nobody has to wait. It comes too late only if
            // earlier packets in the ring have already ended the connection, which ends the wait as well.
            guest.host.work();
            let answer = VsockHdr { kind: kind.number(), op, ..guest.header(Op::Request, port, *next) };
            guest.send(answer, &[]);
            let peer = Addr { cid: GUEST, port };
            let result = match kind {
                SocketType::Stream => Stream::connect(&guest.host, peer).map(Program::Stream),
                SocketType::SeqPacket => SeqPacket::connect(&guest.host, peer).map(Program::Messages),
            };
            *next += 1;
            match result {
                Ok(program) => {
                    assert_eq!(op, Op::Response as u16);
                    match &program {
                        Program::Stream(stream) => stream.set_nonblocking(true),
                        Program::Messages(messages) => messages.set_nonblocking(true),
                    }
                    programs.push(program);
                }
                Err(error) => {
                    assert_ne!(op, Op::Response as u16, "{error}");
                    check_error(Err(error));
                }
            }
        }
        Step::Write(number, len) => match which(programs, number).map(|index| &programs[index]) {
            Some(Program::Stream(stream)) => check_error((&*stream).write(&vec![1; len])),
            Some(Program::Messages(messages)) => check_error(messages.send(&vec![1; len], len % 2 == 0).map(|()| 0)),
            None => {}
        },
        Step::Read(number, len) => match which(programs, number).map(|index| &programs[index]) {
            Some(Program::Stream(stream)) => check_error((&*stream).read(&mut vec![0; len])),
            Some(Program::Messages(messages)) => check_error(messages.receive(&mut vec![0; len]).map(|_| 0)),
            None => {}
        },
        Step::Shut(number, receiving, sending) => {
            let how = match (receiving, sending) {
                (true, true) => std::net::Shutdown::Both,
                (true, false) => std::net::Shutdown::Read,
                _ => std::net::Shutdown::Write,
            };
            match which(programs, number).map(|index| &programs[index]) {
                Some(Program::Stream(stream)) => stream.shutdown(how),
                Some(Program::Messages(messages)) => messages.shutdown(how),
                None => {}
            }
        }
        Step::Close(number) => {
            if let Some(index) = which(programs, number) {
                drop(programs.remove(index));
            }
        }
        Step::Tick(time) => drop(guest.host.tick(Instant::now() + Duration::from_millis(time))),
        Step::Sweep => guest.host.sweep(),
        Step::Reset => guest.host.reset(),
    }
}

fn run_steps(acked: u64, direct: bool, steps: Vec<Step>) {
    let settings = Settings { direct, buffer: 8192, connections: 8, backlog: 3, ..Settings::default() };
    let buffers = vec![vec![1000, 500]; 16];
    let mut guest = Guest::bare(Shape { acked, buffers, settings, ..Shape::default() });
    let listeners = [(PORT, SocketType::Stream), (MESSAGES, SocketType::SeqPacket)]
        .map(|(port, kind)| Listener::bind(&guest.host, port, kind).unwrap());
    let (mut programs, mut next) = (Vec::new(), FIRST_PORT);
    for step in steps {
        self::step(&mut guest, &listeners, &mut programs, &mut next, step);
        for connection in guest.host.connections() {
            assert!(connection.unread <= 8192 && connection.queued <= MAX_PACKET, "{connection:?}");
        }
        assert!(guest.host.report().connections <= 8);
        assert_eq!(*guest.env.broken.lock(), []);
    }
    guest.receive();
    assert!(!guest.host.is_waiting());
    // Finally a new connection must work without loss, whatever state the others are in.
    drop(programs);
    guest.host.tick(Instant::now() + Duration::from_secs(60));
    guest.receive();
    let fresh = Listener::bind(&guest.host, GOOD, SocketType::Stream).unwrap();
    let backlogs = guest.host.report().connections;
    assert!(backlogs <= 6, "connections in the backlogs: {backlogs}");
    let request = guest.header(Op::Request, GOOD, GOOD);
    let answers = guest.exchange(request, &[]);
    let [Packet { header, .. }] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!((header.op, header.buf_alloc), (Op::Response as u16, 8192));
    let program = fresh.accept_within(Some(Duration::ZERO)).unwrap();
    program.set_nonblocking(true);
    guest.good = Some(Good { program, sent: 0, received: 0 });
    for _ in 0..5 {
        assert_eq!(guest.check(), []);
    }
    drop((listeners, fresh, guest.good.take()));
    guest.host.tick(Instant::now() + Duration::from_secs(60));
    guest.receive();
    assert_eq!(guest.host.report().connections, 0);
    assert_eq!(guest.host.next_deadline(), None);
    assert!(!guest.host.is_waiting());
    assert_eq!(*guest.env.broken.lock(), []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_steps_never_break_the_device(
        packed in any::<bool>(),
        direct in any::<bool>(),
        steps in proptest::collection::vec(steps(), 1..200),
    ) {
        run_steps(if packed { PACKED } else { SPLIT }, direct, steps);
    }
}
