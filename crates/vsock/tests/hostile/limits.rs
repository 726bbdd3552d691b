//! A guest that goes to its limits: credit, connections, resets.

use crate::common::{
    GUEST,
    raw::{BOTH, Guest, PACKED, PORT, Packet, SPLIT, Shape, guests, is_reset, listener},
};
use ringroad_vsock::{Addr, Listener, Settings, SocketType, Stream};
use ringroad_wire::vsock_hdr::{Op, TYPE_SEQPACKET, VsockHdr};
use std::{
    io::{ErrorKind, Read, Write},
    time::{Duration, Instant},
};

#[test]
fn no_data_is_sent_without_credit() {
    for mut guest in guests() {
        let listener = listener(&guest);
        let cases = [(0, 0), (0, u32::MAX), (0, 1), (1000, 1), (1000, 1 << 31), (u32::MAX, 1)];
        for (buf_alloc, fwd_cnt) in cases {
            let stream = guest.connect(&listener, 5, PORT);
            let update = VsockHdr { buf_alloc, fwd_cnt, ..guest.header(Op::CreditUpdate, 5, PORT) };
            assert_eq!(guest.exchange(update, &[]), []);
            let credit = guest.host.connections().iter().find(|one| one.key.port == PORT).unwrap().credit;
            // A fwd_cnt ahead of what was sent counts as 2³² behind.
            let expected = buf_alloc.saturating_sub(0u32.wrapping_sub(fwd_cnt)) as usize;
            assert_eq!(credit, expected, "{buf_alloc}, {fwd_cnt}");
            let result = (&stream).write(&[1; 100]);
            if expected == 0 {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::WouldBlock);
                assert_eq!(guest.receive(), []);
            } else {
                assert_eq!(result.unwrap(), expected.min(100));
                assert_eq!(guest.receive().len(), 1);
            }
            assert_eq!(guest.check(), []);
            // The peer may change its credit.
            assert_eq!(guest.exchange(VsockHdr { buf_alloc: 300, fwd_cnt: 0, ..update }, &[]), []);
            assert_eq!((&stream).write(&[1; 100]).unwrap(), 100);
            assert_eq!(guest.receive().len(), 1);
            // Less credit than is in flight already.
            assert_eq!(guest.exchange(VsockHdr { buf_alloc: 50, fwd_cnt: 0, ..update }, &[]), []);
            assert_eq!((&stream).write(&[1; 100]).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert_eq!(guest.exchange(guest.header(Op::Reset, 5, PORT), &[]), []);
            is_reset(&stream);
        }
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (1, 0));
    }
}

#[test]
fn a_message_needs_credit_for_all_of_it() {
    let mut guest = Guest::new(Shape::default());
    let listener = Listener::bind(&guest.host, PORT, SocketType::SeqPacket).unwrap();
    let request = VsockHdr { kind: TYPE_SEQPACKET, buf_alloc: 0, ..guest.header(Op::Request, 5, PORT) };
    guest.exchange(request, &[]);
    let program = listener.accept_messages_within(Some(Duration::ZERO)).unwrap();
    program.set_nonblocking(true);
    assert_eq!(program.send(b"m", false).unwrap_err().kind(), ErrorKind::InvalidInput);
    program.send(b"", false).unwrap();
    assert_eq!(guest.receive().len(), 1);
    // However much credit the peer has, only a limited amount is queued.
    let update = VsockHdr { op: Op::CreditUpdate as u16, buf_alloc: u32::MAX, ..request };
    guest.exchange(update, &[]);
    assert_eq!(program.send(&vec![0; (256 << 10) + 1], false).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(guest.receive(), []);
    program.send(&[3; 10_000], true).unwrap();
    let parts = guest.receive();
    assert_eq!(
        parts.iter().map(|part| (part.payload.len(), part.header.flags)).collect::<Vec<_>>(),
        [(4096, 0), (4096, 0), (10_000 - 2 * 4096, 3)]
    );
    assert_eq!(guest.check(), []);
}

#[test]
fn connections_beyond_the_limits_are_refused() {
    for acked in [SPLIT, PACKED] {
        let settings = Settings { backlog: 3, connections: 6, ..Settings::default() };
        let mut guest = Guest::new(Shape { acked, settings, ..Shape::default() });
        let listener = listener(&guest);
        let mut answers = |from, op| {
            let expected = guest.answer(op, from, PORT);
            assert_eq!(guest.exchange(guest.header(Op::Request, from, PORT), &[]), [expected], "{from}");
            guest.host.report()
        };
        let streams: Vec<_> = (0..3).map(|from| answers(from, Op::Response)).collect();
        assert_eq!(streams.last().unwrap().connections, 4);
        // The backlog is full.
        let report = answers(3, Op::Reset);
        assert_eq!((report.connections, report.refused, report.opened), (4, 1, 4));
        let mut streams: Vec<_> = (0..3).map(|_| listener.accept_within(Some(Duration::ZERO)).unwrap()).collect();
        answers(3, Op::Response);
        assert_eq!(answers(4, Op::Response).connections, 6);
        // The limit for all connections.
        assert_eq!(answers(5, Op::Reset).refused, 2);
        let error = Stream::connect(&guest.host, Addr { cid: GUEST, port: 80 }).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::QuotaExceeded);
        assert_eq!(guest.check(), []);
        // One is closed, another takes its place.
        let closed = streams.remove(0);
        assert_eq!(guest.exchange(guest.header(Op::Reset, 0, PORT), &[]), []);
        is_reset(&closed);
        assert_eq!(guest.exchange(guest.header(Op::Request, 5, PORT), &[]), [guest.answer(Op::Response, 5, PORT)]);
        // Dropping a listener resets the connections in its backlog.
        drop(listener);
        let resets = [3, 4, 5].map(|from| guest.answer(Op::Reset, from, PORT));
        assert_eq!(guest.receive(), resets);
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (3, 0));
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn ten_thousand_connections_reset_at_once_leave_no_state() {
    for mut guest in guests() {
        let listener = listener(&guest);
        for number in 0..10_000 {
            let from = 10_000 + number;
            if number % 2 == 0 {
                let stream = guest.connect(&listener, from, PORT);
                assert_eq!(guest.exchange(guest.header(Op::Reset, from, PORT), &[]), []);
                is_reset(&stream);
            } else {
                guest.send(guest.header(Op::Request, from, PORT), &[]);
                guest.send(guest.header(Op::Reset, from, PORT), &[]);
                assert_eq!(guest.receive(), [guest.answer(Op::Response, from, PORT)]);
                // It can still be accepted, as with any socket.
                is_reset(&listener.accept_within(Some(Duration::ZERO)).unwrap());
            }
        }
        let report = guest.host.report();
        assert_eq!((report.connections, report.opened, report.refused, report.wrong), (1, 10_001, 0, 0));
        assert_eq!(guest.host.next_deadline(), None);
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn connections_closed_by_programs_at_once_leave_no_state() {
    let settings = Settings { memory: 16 << 30, ..Settings::default() };
    let mut guest = Guest::new(Shape { settings, ..Shape::default() });
    let listener = listener(&guest);
    for from in 0..10_000 {
        let stream = guest.connect(&listener, from, PORT);
        drop(stream);
        let end = Packet {
            header: VsockHdr { flags: BOTH, ..guest.answer(Op::Shutdown, from, PORT).header },
            payload: vec![],
        };
        assert_eq!(guest.receive(), [end]);
        if from % 2 == 0 {
            // The guest never closes its end: only the deadline ends the connection.
            continue;
        }
        let end = VsockHdr { flags: BOTH, ..guest.header(Op::Shutdown, from, PORT) };
        assert_eq!(guest.exchange(end, &[]), [guest.answer(Op::Reset, from, PORT)]);
    }
    assert_eq!(guest.host.report().connections, 5001);
    guest.host.tick(Instant::now());
    assert_eq!(guest.host.report().connections, 5001);
    let mut turns = 1;
    while guest.host.tick(Instant::now() + Duration::from_secs(60)) {
        turns += 1;
    }
    assert_eq!(turns, 5000 / 256 + 1, "closed connections per tick");
    assert_eq!(guest.host.report().connections, 1);
    assert_eq!(guest.host.next_deadline(), None);
    let mut ports: Vec<_> = guest
        .receive()
        .into_iter()
        .map(|packet| {
            assert_eq!(packet.header.op, Op::Reset as u16);
            packet.header.dst_port
        })
        .collect();
    ports.sort_unstable();
    assert!(ports.into_iter().eq((0..10_000).step_by(2)));
    assert_eq!(guest.check(), []);
}

#[test]
fn a_reset_of_the_guest_under_load() {
    for mut guest in guests() {
        let listener = listener(&guest);
        let streams: Vec<_> = (0..20).map(|from| guest.connect(&listener, from, PORT)).collect();
        for (from, stream) in (0..).zip(&streams) {
            guest.send(guest.data(from, PORT, 1000), &[from as u8; 1000]);
            // More than there are buffers for.
            let _ = (&*stream).write(&[0; 50_000]);
        }
        guest.host.work();
        assert!(guest.host.is_waiting());
        guest.host.reset();
        assert!(!guest.host.is_waiting());
        assert_eq!((guest.host.report().connections, guest.host.next_deadline()), (0, None));
        for (number, stream) in (0..).zip(&streams) {
            let mut target = [0; 1000];
            (&*stream).read_exact(&mut target).unwrap();
            assert_eq!(target, [number; 1000], "received data can still be read");
            is_reset(stream);
        }
        assert_eq!(
            (&guest.good.take().unwrap().program).read(&mut [0]).unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
        guest.take();
        drop(streams);
        assert_eq!(guest.receive(), [], "no resets for connections the guest does not know");
        // The guest has lost its state and may use the same ports.
        let stream = guest.connect(&listener, 0, PORT);
        assert_eq!(guest.exchange(guest.data(0, PORT, 3), b"new"), []);
        let mut target = [0; 9];
        assert_eq!((&stream).read(&mut target).unwrap(), 3);
        assert_eq!(guest.exchange(guest.data(1, PORT, 3), b"old"), [guest.answer(Op::Reset, 1, PORT)]);
        assert_eq!(*guest.env.broken.lock(), []);
    }
}
