//! Packets that a guest must not send: invalid headers, and payloads that do not match them.

use crate::common::{
    GUEST, HOST, pattern,
    raw::{BOTH, FIRST_PORT, Guest, PACKED, PORT, Packet, SPLIT, Shape, guests, is_reset, listener, reset_of},
};
use ringroad_mem::Span;
use ringroad_vsock::{Addr, Listener, MAX_PACKET, SeqPacket, SocketType, Stream, bits};
use ringroad_wire::vsock_hdr::{Op, SEQ_EOM, SHUTDOWN_SEND, SIZE, TYPE_SEQPACKET, VsockHdr};
use std::{
    io::{ErrorKind, Read, Write},
    time::Duration,
};

#[test]
fn an_invalid_packet_is_answered_with_one_reset() {
    for mut guest in guests() {
        let plain = guest.header(Op::CreditRequest, 5, 6);
        let mut bad = Vec::new();
        bad.extend([0, 8, 65535].map(|op| VsockHdr { op, ..plain }));
        bad.extend([0, 3, 65535].map(|kind| VsockHdr { kind, ..plain }));
        bad.extend([0, 1, HOST, 4, u64::MAX].map(|src_cid| VsockHdr { src_cid, ..plain }));
        bad.extend([0, 1, GUEST, 4, u64::MAX].map(|dst_cid| VsockHdr { dst_cid, ..plain }));
        for header in &bad {
            assert_eq!(guest.exchange(*header, b"something"), [reset_of(*header)], "{header:?}");
            // A reset is never answered with a reset.
            if header.op == plain.op {
                let reset = VsockHdr { op: Op::Reset as u16, ..*header };
                assert_eq!(guest.exchange(reset, b"something"), [], "{reset:?}");
            }
            assert_eq!(guest.check(), []);
        }
        assert_eq!(guest.host.report().wrong, 2 * bad.len() as u64 - 3);
        assert_eq!(guest.host.report().connections, 1);
    }
}

#[test]
fn an_open_connection_is_reset_by_the_first_invalid_packet() {
    for mut guest in guests() {
        let listener = listener(&guest);
        let plain = guest.header(Op::CreditRequest, 5, PORT);
        let mut bad = Vec::new();
        bad.extend([0, 8, 65535].map(|op| VsockHdr { op, ..plain }));
        bad.extend([0, TYPE_SEQPACKET, 3].map(|kind| VsockHdr { kind, ..plain }));
        // A second request, and a response without a request.
        bad.extend([Op::Request, Op::Response].map(|op| VsockHdr { op: op as u16, ..plain }));
        for (number, &header) in (1..).zip(&bad) {
            let stream = guest.connect(&listener, 5, PORT);
            assert_eq!(guest.exchange(header, &[]), [guest.answer(Op::Reset, 5, PORT)], "{header:?}");
            is_reset(&stream);
            assert_eq!(guest.check(), []);
            let report = guest.host.report();
            assert_eq!((report.wrong, report.connections), (number, 1));
        }
        // A reset of the wrong type closes the connection as well, and is not answered.
        for kind in [0, TYPE_SEQPACKET] {
            let stream = guest.connect(&listener, 5, PORT);
            let reset = VsockHdr { kind, ..guest.header(Op::Reset, 5, PORT) };
            assert_eq!(guest.exchange(reset, &[]), []);
            is_reset(&stream);
            assert_eq!(guest.check(), []);
        }
        assert_eq!(guest.host.report().connections, 1);
    }
}

#[test]
fn seqpacket_is_refused_unless_negotiated() {
    let acked = bits::VERSION_1 | bits::VSOCK_F_STREAM;
    let mut guest = Guest::new(Shape { acked, ..Shape::default() });
    let _listener = Listener::bind(&guest.host, PORT, SocketType::SeqPacket).unwrap();
    let request = VsockHdr { kind: TYPE_SEQPACKET, ..guest.header(Op::Request, 5, PORT) };
    assert_eq!(guest.exchange(request, &[]), [reset_of(request)]);
    assert_eq!(guest.check(), []);
    let error = SeqPacket::connect(&guest.host, Addr { cid: GUEST, port: 1 }).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn requests_to_a_port_without_a_listener_are_refused() {
    for mut guest in guests() {
        let _messages = Listener::bind(&guest.host, PORT, SocketType::SeqPacket).unwrap();
        for port in [0, 1, PORT, u32::MAX] {
            let request = guest.header(Op::Request, 5, port);
            assert_eq!(guest.exchange(request, &[]), [reset_of(request)]);
        }
        let report = guest.host.report();
        assert_eq!((report.refused, report.wrong, report.connections), (4, 0, 1));
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn each_packet_of_an_unknown_connection_is_answered_with_one_reset() {
    use Op::*;
    for mut guest in guests() {
        let _listener = listener(&guest);
        for op in [Response, Shutdown, Data, CreditUpdate, CreditRequest] {
            for len in [0, 4, 5, u32::MAX] {
                let header = VsockHdr { len, ..guest.header(op, 5, PORT) };
                assert_eq!(guest.exchange(header, b"data"), [reset_of(header)]);
            }
        }
        let reset = guest.header(Reset, 5, PORT);
        assert_eq!(guest.exchange(reset, &[]), []);
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (1, 0));
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn an_unexpected_answer_ends_a_request() {
    use Op::*;
    for mut guest in guests() {
        let peer = Addr { cid: GUEST, port: 80 };
        let ops = [Request, Shutdown, Data, CreditUpdate, CreditRequest, Reset];
        for (number, op) in (0..).zip(ops) {
            // The packet is in the ring before the request is sent.
            let port = FIRST_PORT + number;
            guest.send(guest.header(op, 80, port), &[]);
            let error = Stream::connect(&guest.host, peer).map(|_| ()).unwrap_err();
            let refused = op == Reset;
            let kind = if refused { ErrorKind::ConnectionRefused } else { ErrorKind::ConnectionReset };
            assert_eq!(error.kind(), kind, "{op:?}");
            let request = Packet {
                header: VsockHdr { op: Request as u16, ..guest.answer(Response, 80, port).header },
                payload: vec![],
            };
            let mut expected = vec![request];
            expected.extend((!refused).then(|| guest.answer(Reset, 80, port)));
            assert_eq!(guest.receive(), expected, "{op:?}");
            assert_eq!(guest.check(), []);
        }
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (1, 5));
    }
}

#[test]
fn a_payload_shorter_than_its_header_says_resets_the_connection() {
    for mut guest in guests() {
        let listener = listener(&guest);
        for (there, len) in [(0, 1), (4, 5), (3000, 3001), (10, 1 << 20), (0, u32::MAX), (4096, u32::MAX)] {
            let stream = guest.connect(&listener, 5, PORT);
            let header = VsockHdr { len, ..guest.data(5, PORT, 0) };
            assert_eq!(guest.exchange(header, &vec![1; there]), [guest.answer(Op::Reset, 5, PORT)]);
            is_reset(&stream);
            assert_eq!(guest.check(), []);
        }
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (1, 6));
    }
}

#[test]
fn bytes_after_the_payload_are_ignored() {
    for mut guest in guests() {
        let listener = listener(&guest);
        let stream = guest.connect(&listener, 5, PORT);
        for (len, there) in [(0, 9), (1, 2), (5, 4000), (1000, MAX_PACKET)] {
            let mut bytes = vec![0; there];
            pattern(3, 0, &mut bytes);
            assert_eq!(guest.exchange(guest.data(5, PORT, len), &bytes), []);
            let mut target = vec![0; there];
            let result = (&stream).read(&mut target);
            if len == 0 {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::WouldBlock);
            } else {
                assert_eq!(result.unwrap(), len);
                assert!(target[..len] == bytes[..len]);
            }
            // Packets of other operations may carry a payload; it is ignored.
            let header = VsockHdr { len: there as u32 + 1, ..guest.header(Op::CreditUpdate, 5, PORT) };
            assert_eq!(guest.exchange(header, &bytes), []);
        }
        assert_eq!(guest.host.report().wrong, 0);
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn exceeding_the_credit_resets_the_connection_and_earlier_data_can_be_read() {
    for mut guest in guests() {
        let listener = listener(&guest);
        let stream = guest.connect(&listener, 5, PORT);
        let mut bytes = vec![0; 256 << 10];
        pattern(4, 0, &mut bytes);
        for part in bytes.chunks(MAX_PACKET) {
            assert_eq!(guest.exchange(guest.data(5, PORT, part.len()), part), []);
        }
        assert_eq!(guest.check(), []);
        assert_eq!(guest.exchange(guest.data(5, PORT, 1), &[1]), [guest.answer(Op::Reset, 5, PORT)]);
        let mut target = vec![0; bytes.len()];
        (&stream).read_exact(&mut target).unwrap();
        assert!(target == bytes);
        is_reset(&stream);
        assert_eq!(guest.check(), []);
        // All in one packet.
        let stream = guest.connect(&listener, 6, PORT);
        let bytes = vec![0; (256 << 10) + 1];
        assert_eq!(guest.exchange(guest.data(6, PORT, bytes.len()), &bytes), [guest.answer(Op::Reset, 6, PORT)]);
        is_reset(&stream);
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (1, 2));
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn a_million_empty_packets_take_no_memory() {
    let mut guest = Guest::new(Shape::default());
    let listener = listener(&guest);
    let stream = guest.connect(&listener, 5, PORT);
    for _ in 0..1_000_000 {
        guest.send(guest.data(5, PORT, 0), &[]);
    }
    assert_eq!(guest.receive(), []);
    assert_eq!((&stream).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let report = guest.host.report();
    assert_eq!((report.received, report.wrong), (1_000_002, 0));
    assert_eq!(guest.check(), []);

    // There may be no more unread messages than the buffer has bytes.
    let messages = Listener::bind(&guest.host, PORT, SocketType::SeqPacket).unwrap();
    guest.exchange(VsockHdr { kind: TYPE_SEQPACKET, ..guest.header(Op::Request, 6, PORT) }, &[]);
    let program = messages.accept_messages_within(Some(Duration::ZERO)).unwrap();
    let empty = VsockHdr { kind: TYPE_SEQPACKET, flags: SEQ_EOM, ..guest.data(6, PORT, 0) };
    let limit = guest.host_buffer();
    for _ in 0..limit {
        guest.send(empty, &[]);
    }
    assert_eq!(guest.receive(), []);
    assert_eq!(guest.check(), []);
    let reset = Packet {
        header: VsockHdr { kind: TYPE_SEQPACKET, ..guest.answer(Op::Reset, 6, PORT).header },
        payload: vec![],
    };
    assert_eq!(guest.exchange(empty, &[]), [reset]);
    for _ in 0..limit {
        assert_eq!(program.receive(&mut []).unwrap(), Some((0, false)));
    }
    assert_eq!(program.receive(&mut []).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(guest.host.report().wrong, 1);
    assert_eq!(guest.check(), []);
}

#[test]
fn data_after_a_shutdown_resets_the_connection() {
    for mut guest in guests() {
        let listener = listener(&guest);
        for len in [0, 1, 4000] {
            let stream = guest.connect(&listener, 5, PORT);
            let end = VsockHdr { flags: SHUTDOWN_SEND, ..guest.header(Op::Shutdown, 5, PORT) };
            assert_eq!(guest.exchange(end, &[]), []);
            assert_eq!((&stream).read(&mut [0]).unwrap(), 0);
            // A repeated shutdown, or one with unknown flags only, has no effect.
            assert_eq!(guest.exchange(end, &[]), []);
            assert_eq!(guest.exchange(VsockHdr { flags: !BOTH, ..end }, &[]), []);
            assert_eq!((&stream).write(b"answer").unwrap(), 6);
            assert_eq!(guest.receive().len(), 1);
            let header = guest.data(5, PORT, len);
            assert_eq!(guest.exchange(header, &vec![0; len]), [guest.answer(Op::Reset, 5, PORT)]);
            is_reset(&stream);
            assert_eq!(guest.check(), []);
        }
        assert_eq!((guest.host.report().connections, guest.host.report().wrong), (1, 3));
    }
}

#[test]
fn headers_and_payloads_may_be_split_anywhere() {
    for mut guest in guests() {
        let listener = listener(&guest);
        let stream = guest.connect(&listener, 5, PORT);
        let mut sent = 0;
        let cuts = [
            vec![1],
            vec![43],
            vec![44],
            vec![45],
            vec![8, 36],
            vec![20, 20, 10],
            vec![1; 44],
            vec![1; 60],
            // The way Linux sends a large packet: the header, then pages.
            [&[44][..], &[4096; 16]].concat(),
            [&[44, 100][..], &[4096; 15]].concat(),
        ];
        for cuts in &cuts {
            for len in [0, 1, 100, 5000, MAX_PACKET, 200_000] {
                let mut bytes = vec![0; len];
                pattern(5, sent, &mut bytes);
                let header = VsockHdr { len: len as u32, ..guest.data(5, PORT, 0) };
                guest.send_chain(&[&header.to_bytes(), &bytes[..]].concat(), cuts, 0);
                for packet in guest.receive() {
                    assert_eq!(packet.header.op, Op::CreditUpdate as u16);
                }
                if len > 0 {
                    let mut target = vec![0; len];
                    (&stream).read_exact(&mut target).unwrap();
                    assert!(target == bytes, "{len} bytes, cut at {cuts:?}");
                }
                sent += len as u64;
            }
        }
        guest.receive();
        assert_eq!(guest.check(), []);
        assert_eq!(guest.host.report().wrong, 0);
    }
}

#[test]
fn receive_buffers_may_be_split_anywhere() {
    for acked in [SPLIT, PACKED] {
        let cuts =
            [vec![45], vec![44, 1], vec![1; 45], vec![1; 50], vec![20, 20, 20, 20], vec![44, 4096], vec![70_000]];
        for lens in cuts {
            let most: u32 = (lens.iter().sum::<u32>() - SIZE as u32).min(MAX_PACKET as u32);
            let buffers = vec![lens; 12];
            let mut guest = Guest::new(Shape { acked, buffers, queue_size: 1024, ..Shape::default() });
            let listener = listener(&guest);
            let stream = guest.connect(&listener, 5, PORT);
            let mut bytes = vec![0; 3 * most as usize + 1];
            pattern(6, 0, &mut bytes);
            assert_eq!((&stream).write(&bytes).unwrap(), bytes.len());
            let packets = guest.receive();
            assert_eq!(packets.iter().map(|packet| packet.header.len).collect::<Vec<_>>(), [most, most, most, 1]);
            assert!(packets.iter().flat_map(|packet| &packet.payload).eq(&bytes));
            // The same bytes, read by the host from elsewhere.
            let key = guest.host.connections().iter().find(|one| one.key.port == PORT).unwrap().key;
            let mut left = &bytes[..];
            let read = &mut |spans: &[Span<'_>]| {
                let before = left.len();
                for span in spans {
                    left = &left[span.write(left)..];
                }
                Ok(before - left.len())
            };
            let most = bytes.len();
            let count = guest.host.send_from(key, most, read, &mut |_| unreachable!("there is room")).unwrap().unwrap();
            let got: Vec<_> = guest.receive().into_iter().flat_map(|packet| packet.payload).collect();
            assert!(count > 0 && got == bytes[..count], "{count} and {}", got.len());
            assert_eq!(guest.check(), []);
        }
    }
}
