//! A guest that breaks every rule, packet by packet and descriptor by descriptor, against a device's stack: each violation gets
//! exactly the expected answer, and another connection of the same device keeps working without loss. Also a device that breaks
//! the rules against a driver's stack. Single-threaded, and nothing sleeps.

mod common;

use common::{
    GUEST, HOST, TestHost, pattern,
    raw::{
        BASE, BOTH, FIRST_PORT, GOOD, Good, Guest, PACKED, PORT, Packet, SPLIT, Shape, Side, base, env, guests,
        is_reset, listener, reset_of,
    },
};
use proptest::prelude::*;
use ringroad_mem::{Region, Span, Table};
use ringroad_ring::{Addresses, Buffer, DriverFault, Fault};
use ringroad_vsock::{
    Addr, Broken, Driver, DriverConfig, DriverSide, Hub, Inlet, Link, Listener, MAX_PACKET, Payload, Queue, RxQueue,
    SeqPacket, Settings, SocketType, Stack, Stream, TxQueue, bits, socket_types,
};
use ringroad_wire::vsock_hdr::{Op, SEQ_EOM, SHUTDOWN_SEND, SIZE, TYPE_SEQPACKET, TYPE_STREAM, VsockHdr};
use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    sync::Arc,
    time::{Duration, Instant},
};

// --- headers ----------------------------------------------------------------------------------------------------------

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

// --- payloads ---------------------------------------------------------------------------------------------------------

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

// --- descriptors ------------------------------------------------------------------------------------------------------

/// Checks that the transmit queue stops with this fault: packets before the bad chain are received, those after it are not.
fn stops_receiving(acked: u64, bytes: usize, cuts: &[usize], writable: u32, fault: impl Fn(u16) -> Fault) {
    let mut guest = Guest::new(Shape { acked, queue_size: 2048, ..Shape::default() });
    let listener = listener(&guest);
    let stream = guest.connect(&listener, 5, PORT);
    guest.check();
    guest.send(guest.data(5, PORT, 6), b"before");
    // All chains so far had one descriptor each, so this is the id of the next chain.
    let id = guest.tx.next_id(0).unwrap();
    guest.send_chain(&vec![0; bytes], cuts, writable);
    guest.send(guest.data(5, PORT, 5), b"after");
    let packets = guest.receive();
    assert_eq!(packets, []);
    assert_eq!(*guest.env.broken.lock(), [(Queue::In, Broken::Driver(fault(id)))]);
    assert_eq!(guest.host.report().faults, 1);
    let mut target = [0; 20];
    assert_eq!((&stream).read(&mut target).unwrap(), 6);
    assert_eq!(&target[..6], b"before");
    // The other direction still works.
    for _ in 0..100 {
        (&stream).write_all(b"still there").unwrap();
        assert_eq!(guest.receive().len(), 1);
    }
    // After a reset it works again.
    guest.host.reset();
    assert_eq!((&stream).read(&mut target).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(guest.host.report().connections, 0);
}

#[test]
fn an_invalid_chain_stops_the_transmit_queue() {
    let needed = SIZE as u32;
    for acked in [SPLIT, PACKED] {
        for len in [1, 43] {
            stops_receiving(acked, len as usize, &[], 0, |id| Fault::Header { id, len, needed });
        }
        stops_receiving(acked, 40, &[10, 10, 10], 0, |id| Fault::Header { id, len: 40, needed });
        stops_receiving(acked, 0, &[], 100, |id| Fault::Writable { id });
        stops_receiving(acked, 44, &[], 1, |id| Fault::Writable { id });
        stops_receiving(acked, 20, &[7], 44, |id| Fault::Writable { id });
        // More pieces than a packet of 64 KiB needs in the worst case.
        stops_receiving(acked, 1100, &[1; 1100], 0, |id| Fault::Loop { index: id, size: 1024 });
    }
}

/// Checks that the receive queue stops with this fault when it reaches the bad buffer: all buffers before it are used, for data
/// or for answers.
fn stops_sending(acked: u64, data: bool, spoil: impl Fn(&mut Guest), fault: impl Fn(u16) -> Fault) {
    for before in [2, 3, 5, 8, 9, 40] {
        let buffers = vec![vec![1000]; before];
        let mut guest = Guest::new(Shape { acked, queue_size: 2048, buffers, ..Shape::default() });
        let listener = listener(&guest);
        let stream = guest.connect(&listener, 5, PORT);
        // Buffers made available again are queued behind the bad one.
        let id = guest.rx.next_id(0).unwrap();
        spoil(&mut guest);
        let mut packets = 0;
        for _ in 0..100 {
            if data {
                let _ = (&stream).write(&[1; 956]);
            } else {
                guest.send(guest.header(Op::CreditRequest, 5, PORT), &[]);
            }
            guest.host.work();
            packets += guest.take().len();
        }
        assert_eq!(packets, before);
        assert_eq!(*guest.env.broken.lock(), [(Queue::Out, Broken::Driver(fault(id)))]);
        assert_eq!(guest.host.report().faults, 1);
        // The transmit queue still works.
        guest.send(guest.data(5, PORT, 5), b"hello");
        guest.host.work();
        let mut target = [0; 9];
        assert_eq!((&stream).read(&mut target).unwrap(), 5);
        assert!(guest.take().is_empty());
    }
}

#[test]
fn an_invalid_receive_buffer_stops_the_receive_queue() {
    let needed = SIZE as u32 + 1;
    for acked in [SPLIT, PACKED] {
        for len in [1, 43, 44] {
            stops_sending(acked, false, |guest| guest.post(&[len]), |id| Fault::Header { id, len, needed });
        }
        stops_sending(acked, false, |guest| guest.post(&[20, 24]), |id| Fault::Header { id, len: 44, needed });
        let readable = |guest: &mut Guest| {
            let there = [Buffer { address: BASE, len: 100 }];
            guest.rx.add(&there, &there).unwrap();
            guest.rx.publish();
        };
        stops_sending(acked, false, readable, |id| Fault::Readable { id });
        stops_sending(acked, false, |guest| guest.post(&[1; 1100]), |id| Fault::Loop { index: id, size: 1024 });
        // Here the ring itself is broken: buffers ahead are not reserved for control packets, since the queue will stop.
        let outside = |guest: &mut Guest| {
            guest.rx.add(&[], &[Buffer { address: 0xdead, len: 100 }]).unwrap();
            guest.rx.publish();
        };
        for data in [false, true] {
            // A descriptor's index is its chain's id as long as all are used in order.
            let fault = |index| Fault::Outside { index, address: 0xdead, len: 100, regions: 1 };
            stops_sending(acked, data, outside, fault);
        }
    }
}

#[test]
fn receive_buffers_of_very_many_descriptors_are_used() {
    for acked in [SPLIT, PACKED] {
        for pieces in [17, 40, 113, 300, 600, 1024] {
            let buffers = vec![vec![20; pieces]; 8192 / pieces.max(64)];
            let room = 20 * pieces - SIZE;
            let mut guest = Guest::new(Shape { acked, queue_size: 16384, buffers, ..Shape::default() });
            let listener = listener(&guest);
            let stream = guest.connect(&listener, 5, PORT);
            let (mut sent, mut received) = (0, 0);
            let mut bytes = vec![0; 100_000];
            while received < 2_000_000 {
                pattern(7, sent, &mut bytes);
                sent += (&stream).write(&bytes).unwrap_or(0) as u64;
                for Packet { header, payload } in guest.receive() {
                    assert_eq!(header.op, Op::Data as u16);
                    assert!(payload.len() <= room);
                    let mut expected = vec![0; payload.len()];
                    pattern(7, received, &mut expected);
                    assert!(payload == expected);
                    received += payload.len() as u64;
                }
                guest.send(VsockHdr { fwd_cnt: received as u32, ..guest.header(Op::CreditUpdate, 5, PORT) }, &[]);
            }
            assert_eq!(guest.check(), []);
        }
    }
}

// --- a guest without receive buffers ----------------------------------------------------------------------------------

/// Makes buffers available at last; returns how many packets the device had queued, by port and operation.
fn kept(guest: &mut Guest, lens: &[u32]) -> HashMap<(u32, u16), usize> {
    for _ in 0..32 {
        guest.post(lens);
    }
    let mut kept = HashMap::new();
    for packet in guest.receive() {
        *kept.entry((packet.header.dst_port, packet.header.op)).or_default() += 1;
    }
    kept
}

/// Returns a guest whose receive buffers are used up, with two connections including the well-behaved one.
fn without_buffers(acked: u64) -> (Guest, Listener<Side>, Stream<Side>) {
    let shape = Shape { acked, buffers: vec![vec![200]; 2], ..Shape::default() };
    let mut guest = Guest::new(shape);
    let listener = listener(&guest);
    let stream = guest.connect(&listener, 5, PORT);
    // Use up the buffers.
    for _ in 0..2 {
        guest.send(guest.header(Op::CreditRequest, 5, PORT), &[]);
    }
    guest.host.work();
    assert!(!guest.host.is_waiting());
    (guest, listener, stream)
}

#[test]
fn queued_answers_are_limited() {
    const COUNT: u32 = 100_000;
    let (reset, update) = (Op::Reset as u16, Op::CreditUpdate as u16);
    for acked in [SPLIT, PACKED] {
        // Packets of no connection.
        let (mut guest, _listener, _stream) = without_buffers(acked);
        for port in 0..COUNT {
            guest.send(guest.header(Op::CreditRequest, 100_000 + port, 6), &[]);
        }
        guest.host.work();
        let report = guest.host.report();
        assert_eq!(report.ways.dropped, u64::from(COUNT) - 1024);
        let kept = kept(&mut guest, &[4096]);
        let resets: usize = kept.values().sum();
        assert_eq!(resets, 1024 + 2);
        assert!((100_000..101_024).all(|port| kept.get(&(port, reset)) == Some(&1)), "the first answers are kept");
        assert_eq!(guest.check(), []);

        // An open connection: one answer with the latest credit replaces all others.
        let (mut guest, _listener, stream) = without_buffers(acked);
        for _ in 0..COUNT {
            guest.send(guest.header(Op::CreditRequest, 5, PORT), &[]);
        }
        guest.send(guest.data(5, PORT, 1000), &[1; 1000]);
        guest.host.work();
        assert_eq!((&stream).read(&mut [0; 2000]).unwrap(), 1000);
        for _ in 0..4 {
            guest.post(&[4096]);
        }
        let last = guest.receive().pop().unwrap().header;
        assert_eq!((last.op, last.fwd_cnt), (update, 1000));
        assert_eq!(guest.check(), []);

        // Connections that are opened and reset at once.
        let (mut guest, listener, _stream) = without_buffers(acked);
        for port in 0..COUNT {
            guest.send(guest.header(Op::Request, 100_000 + port % 7, PORT), &[]);
            guest.send(guest.header(Op::Reset, 100_000 + port % 7, PORT), &[]);
            if port % 500 == 0 {
                guest.host.work();
                while listener.accept_within(Some(Duration::ZERO)).is_ok() {}
            }
        }
        guest.host.work();
        assert_eq!(guest.host.report().connections, 2);
        assert_eq!(self::kept(&mut guest, &[4096]), HashMap::from([((5, update), 2)]));
        assert_eq!(guest.check(), []);

        // Connections that the device has to reset.
        let (mut guest, listener, _stream) = without_buffers(acked);
        for port in 0..COUNT {
            guest.send(guest.header(Op::Request, 100_000 + port % 7, PORT), &[]);
            guest.send(guest.header(Op::Response, 100_000 + port % 7, PORT), &[]);
            if port % 500 == 0 {
                guest.host.work();
                while listener.accept_within(Some(Duration::ZERO)).is_ok() {}
            }
        }
        guest.host.work();
        assert_eq!(guest.host.report().connections, 2);
        assert_eq!(guest.host.report().wrong, u64::from(COUNT));
        let resets: usize = self::kept(&mut guest, &[4096]).values().sum();
        assert_eq!(resets, 2 + (1 << 16));
        assert_eq!(guest.check(), []);
    }
}

#[test]
fn queued_data_is_limited() {
    for acked in [SPLIT, PACKED] {
        for buffer in [1, 1000, 256 << 10] {
            for chunk in [1, 1000, MAX_PACKET, 1 << 20] {
                let settings = Settings { buffer, ..Settings::default() };
                let mut guest = Guest::bare(Shape { acked, settings, ..Shape::default() });
                let listener = listener(&guest);
                // The largest credit a header can express.
                let request = VsockHdr { buf_alloc: u32::MAX, ..guest.header(Op::Request, 5, PORT) };
                guest.exchange(request, &[]);
                let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
                stream.set_nonblocking(true);
                let mut bytes = vec![0; chunk];
                let mut sent = 0;
                let error = loop {
                    pattern(8, sent, &mut bytes);
                    match (&stream).write(&bytes) {
                        Ok(count) => sent += count as u64,
                        Err(error) => break error,
                    }
                };
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                let report = guest.host.connections()[0];
                assert_eq!(report.sent, sent);
                assert_eq!(report.queued, (buffer as usize).max(MAX_PACKET), "the limit of the outbox");
                // All of it arrives once there are buffers again.
                let mut received = 0;
                for Packet { payload, .. } in guest.receive() {
                    let mut expected = vec![0; payload.len()];
                    pattern(8, received, &mut expected);
                    assert!(payload == expected);
                    received += payload.len() as u64;
                }
                assert_eq!(received, sent);
                assert!((&stream).write(&bytes).unwrap() > 0);
            }
        }
    }
}

// --- credit -----------------------------------------------------------------------------------------------------------

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

// --- limits -----------------------------------------------------------------------------------------------------------

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

// --- between guests ---------------------------------------------------------------------------------------------------

const OTHER: u64 = 4;

/// Creates two guests in these groups.
fn siblings(acked: u64, groups: [&str; 2], connections: usize) -> (Arc<Hub<Side>>, Guest, Guest) {
    let hub = Hub::new(connections);
    let [a, b] = [(GUEST, groups[0]), (OTHER, groups[1])].map(|(cid, groups)| {
        let guest = Guest::new(Shape { cid, acked, ..Shape::default() });
        hub.join(&guest.host, groups.split_whitespace().map(str::to_owned).collect());
        guest
    });
    (hub, a, b)
}

/// Returns a header from a port of one guest to a port of the other.
fn across(from: (&Guest, u32), op: Op, to: (&Guest, u32)) -> VsockHdr {
    VsockHdr { dst_cid: to.0.cid, ..from.0.header(op, from.1, to.1) }
}

fn bare(header: VsockHdr) -> Packet {
    Packet { header, payload: vec![] }
}

/// Connects port 5 of `a` with port 6 of `b`.
#[track_caller]
fn connect_guests(a: &mut Guest, b: &mut Guest, kind: u16) {
    let request = VsockHdr { kind, ..across((a, 5), Op::Request, (b, 6)) };
    assert_eq!(a.exchange(request, &[]), []);
    assert_eq!(b.receive(), [bare(request)]);
    let response = VsockHdr { kind, ..across((b, 6), Op::Response, (a, 5)) };
    assert_eq!(b.exchange(response, &[]), []);
    assert_eq!(a.receive(), [bare(response)]);
}

/// Checks that both ends were reset exactly once, and that the connection is unknown to the hub.
#[track_caller]
fn both_reset(a: &mut Guest, b: &mut Guest, kind: u16) {
    let resets = [((&*b, 6), (&*a, 5)), ((&*a, 5), (&*b, 6))].map(|(from, to)| reset_of(across(to, Op::Data, from)));
    let resets = resets.map(|reset| bare(VsockHdr { kind, ..reset.header }));
    assert_eq!((a.receive(), b.receive()), (vec![resets[0].clone()], vec![resets[1].clone()]));
    for (from, to) in [(5, 6), (6, 5)] {
        let (a, b) = if from == 5 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
        let late = across((a, from), Op::CreditUpdate, (b, to));
        assert_eq!(a.exchange(late, &[]), [reset_of(late)]);
        assert_eq!(a.exchange(VsockHdr { op: Op::Reset as u16, ..late }, &[]), []);
        assert_eq!(b.receive(), []);
        assert_eq!((a.check(), b.check()), (vec![], vec![]));
    }
}

#[test]
fn guests_without_a_common_group_cannot_connect() {
    for groups in [["", ""], ["x", "y"], ["x", ""], ["a b", "c d"]] {
        let (_hub, mut a, mut b) = siblings(SPLIT, groups, 10);
        for op in 0..9 {
            let header = VsockHdr { op, ..across((&a, 5), Op::Request, (&b, 6)) };
            let expected: Vec<_> = (op != Op::Reset as u16).then(|| reset_of(header)).into_iter().collect();
            assert_eq!(a.exchange(header, b"x"), expected);
            assert_eq!(b.receive(), []);
        }
        assert_eq!((a.check(), b.check()), (vec![], vec![]));
    }
}

#[test]
fn a_guest_cannot_forge_packets_of_another_one() {
    let (_hub, mut a, mut b) = siblings(SPLIT, ["x", "x"], 10);
    connect_guests(&mut a, &mut b, TYPE_STREAM);
    // To the sender itself, to a CID that does not exist, with a forged source, and to a connection that does not exist.
    let forged = VsockHdr { src_cid: OTHER, dst_cid: OTHER, ..across((&a, 5), Op::Data, (&b, 6)) };
    let headers = [
        VsockHdr { dst_cid: GUEST, ..forged },
        VsockHdr { src_cid: GUEST, dst_cid: GUEST, ..forged },
        VsockHdr { src_cid: GUEST, dst_cid: 5, ..forged },
        forged,
        across((&a, 5), Op::Data, (&b, 7)),
        across((&a, 5), Op::Response, (&b, 7)),
        VsockHdr { op: 0, ..across((&a, 5), Op::Data, (&b, 6)) },
        // The payload is shorter than the header says.
        VsockHdr { len: 2, ..across((&a, 5), Op::Data, (&b, 6)) },
        VsockHdr { len: u32::MAX, ..across((&a, 5), Op::Data, (&b, 6)) },
    ];
    for header in headers {
        assert_eq!(a.exchange(header, b"x"), [reset_of(header)], "{header:?}");
        assert_eq!(b.receive(), []);
    }
    // The connection still works.
    let data = VsockHdr { len: 1, ..across((&a, 5), Op::Data, (&b, 6)) };
    assert_eq!(a.exchange(data, b"x"), []);
    assert_eq!(b.receive(), [Packet { header: data, payload: b"x".to_vec() }]);
    assert_eq!((a.check(), b.check()), (vec![], vec![]));
}

#[test]
fn exceeding_the_credit_of_another_guest_resets_the_connection() {
    for acked in [SPLIT, PACKED] {
        for kind in [TYPE_STREAM, TYPE_SEQPACKET] {
            let (_hub, mut a, mut b) = siblings(acked, ["x y", "z y"], 10);
            let data = VsockHdr { kind, ..across((&a, 5), Op::Data, (&b, 6)) };
            for (announced, credit) in [((1000, 0), 1000), ((0, 0), 0), ((1000, 1), 0), ((u32::MAX, 0), 1 << 20)] {
                connect_guests(&mut a, &mut b, kind);
                let (buf_alloc, fwd_cnt) = announced;
                let update = VsockHdr { kind, buf_alloc, fwd_cnt, ..across((&b, 6), Op::CreditUpdate, (&a, 5)) };
                assert_eq!(b.exchange(update, &[]), []);
                let buf_alloc = buf_alloc.min(1 << 20);
                assert_eq!(a.receive(), [bare(VsockHdr { buf_alloc, ..update })]);
                if credit > 0 {
                    assert_eq!(a.exchange(VsockHdr { len: credit, ..data }, &vec![7; credit as usize]), []);
                    let got: usize = b.receive().iter().map(|packet| packet.payload.len()).sum();
                    assert_eq!(got, credit as usize);
                }
                a.send(VsockHdr { len: 1, ..data }, &[1]);
                both_reset(&mut a, &mut b, kind);
            }
            assert_eq!((a.host.report().wrong, b.host.report().wrong), (4 + 4, 4));
        }
    }
}

#[test]
fn a_second_request_resets_a_connection_between_guests() {
    let (_hub, mut a, mut b) = siblings(SPLIT, ["x", "x"], 10);
    for _ in 0..2 {
        connect_guests(&mut a, &mut b, TYPE_STREAM);
        a.send(across((&a, 5), Op::Request, (&b, 6)), &[]);
        both_reset(&mut a, &mut b, TYPE_STREAM);
        // The same from the other end.
        connect_guests(&mut a, &mut b, TYPE_STREAM);
        b.send(across((&b, 6), Op::Request, (&a, 5)), &[]);
        b.host.work();
        both_reset(&mut a, &mut b, TYPE_STREAM);
    }
}

#[test]
fn the_reset_of_a_guest_resets_its_connections_at_others() {
    for kind in [TYPE_STREAM, TYPE_SEQPACKET] {
        let (_hub, mut a, mut b) = siblings(PACKED, ["x", "x"], 10);
        connect_guests(&mut a, &mut b, kind);
        // Data it has not received yet is lost.
        for _ in 0..100 {
            let data = VsockHdr { kind, len: 1000, ..across((&b, 6), Op::Data, (&a, 5)) };
            b.send(data, &[0; 1000]);
        }
        b.host.work();
        a.host.reset();
        a.take();
        assert_eq!(a.receive(), []);
        let reset = reset_of(across((&b, 6), Op::Data, (&a, 5)));
        assert_eq!(b.receive(), [bare(VsockHdr { kind, ..reset.header })]);
        assert_eq!(b.check(), []);
        connect_guests(&mut a, &mut b, kind);
    }
}

#[test]
fn queued_packets_between_guests_arrive_in_order() {
    for acked in [SPLIT, PACKED] {
        for kind in [TYPE_STREAM, TYPE_SEQPACKET] {
            let (_hub, mut a, mut b) = siblings(acked, ["x", "x"], 10);
            connect_guests(&mut a, &mut b, kind);
            let mut bytes = vec![0; 100 * 2000];
            pattern(9, 0, &mut bytes);
            for part in bytes.chunks(2000) {
                let data = VsockHdr { kind, len: 2000, flags: SEQ_EOM, ..across((&a, 5), Op::Data, (&b, 6)) };
                a.send(data, part);
                a.host.work();
            }
            let end = VsockHdr { kind, flags: BOTH, ..across((&a, 5), Op::Shutdown, (&b, 6)) };
            assert_eq!(a.exchange(end, &[]), []);
            assert!(b.host.is_waiting());
            let mut packets = b.receive();
            assert_eq!(packets.pop(), Some(bare(end)));
            assert!(packets.iter().flat_map(|packet| &packet.payload).eq(&bytes));
            if kind == TYPE_SEQPACKET {
                // A message may be split; only the last part carries the flag.
                let mut len = 0;
                for Packet { header, payload } in packets {
                    len += payload.len();
                    assert_eq!(header.flags, if len == 2000 { SEQ_EOM } else { 0 });
                    len %= 2000;
                }
            }
            assert_eq!((a.check(), b.check()), (vec![], vec![]));
        }
    }
}

#[test]
fn two_guests_together_cannot_exhaust_memory() {
    let (reset, many) = (Op::Reset as u16, 200_000);
    for kind in [TYPE_STREAM, TYPE_SEQPACKET] {
        // One guest takes nothing, and claims to have consumed everything.
        for len in [1, 1000, 60_000] {
            let (_hub, mut a, mut b) = siblings(SPLIT, ["x", "x"], 10);
            connect_guests(&mut a, &mut b, kind);
            let (mut sent, mut resets) = (0u32, 0);
            while resets == 0 {
                let data = VsockHdr { kind, flags: SEQ_EOM, len, ..across((&a, 5), Op::Data, (&b, 6)) };
                a.send(data, &vec![0; len as usize]);
                a.host.work();
                sent += len;
                let update =
                    VsockHdr { kind, buf_alloc: u32::MAX, fwd_cnt: sent, ..across((&b, 6), Op::CreditUpdate, (&a, 5)) };
                b.send(update, &[]);
                b.host.work();
                resets = a.take().iter().filter(|packet| packet.header.op == reset).count();
                // What fits into the buffers, what may be queued, and the packet beyond that.
                assert!(sent <= 32 * 4096 + (1 << 20) + len, "{sent} bytes");
            }
            let packets = b.receive();
            assert_eq!(
                packets.iter().filter(|packet| packet.header.op == reset).count(),
                2,
                "one for the violation, one for the update after it"
            );
            a.receive();
            assert_eq!((a.check(), b.check()), (vec![], vec![]));
        }
        // Packets without data.
        let (_hub, mut a, mut b) = siblings(SPLIT, ["x", "x"], 10);
        connect_guests(&mut a, &mut b, kind);
        let ops = [Op::CreditRequest, Op::CreditUpdate, Op::Shutdown, Op::Response];
        for number in 0..many {
            let op = ops[number % 4];
            a.send(VsockHdr { kind, flags: number as u32, ..across((&a, 5), op, (&b, 6)) }, &[]);
        }
        assert_eq!(a.receive(), []);
        let count = b.receive().len();
        assert!((32..32 + 6).contains(&count), "{count}");
        for _ in 0..many {
            a.send(VsockHdr { kind, flags: SEQ_EOM, ..across((&a, 5), Op::Data, (&b, 6)) }, &[]);
        }
        a.receive();
        let count = b.receive().len();
        assert!(count <= 65536 + 32, "{count}");
        assert_eq!((a.check(), b.check()), (vec![], vec![]));
    }
    // Connections that are opened and reset at once.
    let (_hub, mut a, mut b) = siblings(SPLIT, ["x", "x"], 10);
    for _ in 0..many {
        a.send(across((&a, 5), Op::Request, (&b, 6)), &[]);
        a.send(across((&a, 5), Op::Reset, (&b, 6)), &[]);
    }
    assert_eq!(a.receive(), []);
    let count = b.receive().len();
    assert!(count <= 65536 + 32, "{count}");
    assert_eq!((a.check(), b.check()), (vec![], vec![]));
    connect_guests(&mut a, &mut b, TYPE_STREAM);
}

#[test]
fn the_connections_a_guest_requests_from_others_are_limited() {
    let (_hub, mut a, mut b) = siblings(SPLIT, ["x", "x"], 3);
    for port in 0..5 {
        let request = across((&a, port), Op::Request, (&b, 6));
        let expected: Vec<_> = (port >= 3).then(|| reset_of(request)).into_iter().collect();
        assert_eq!(a.exchange(request, &[]), expected);
    }
    assert_eq!(b.receive().len(), 3);
    // Connections requested by the other guest are counted separately.
    for port in 0..3 {
        assert_eq!(b.exchange(across((&b, 20 + port), Op::Request, (&a, 5)), &[]), []);
    }
    assert_eq!(a.receive().len(), 3);
    assert_eq!(b.exchange(across((&b, 6), Op::Reset, (&a, 1)), &[]), []);
    assert_eq!(
        a.receive(),
        [bare(across((&b, 6), Op::Reset, (&a, 1)))].map(|mut packet| {
            packet.header.buf_alloc = 0;
            packet
        })
    );
    assert_eq!(a.exchange(across((&a, 9), Op::Request, (&b, 6)), &[]), []);
    assert_eq!((a.check(), b.receive().len()), (vec![], 1));
}

// --- a hostile device -------------------------------------------------------------------------------------------------

/// A device that obeys no rules, with the memory of its driver, whose stack is well-behaved.
struct HostileDevice {
    guest: Arc<common::GuestStack>,
    env: TestHost,
    region: Arc<Region>,
    /// Addresses of the driver's rings.
    at: [Addresses; 2],
    rx: RxQueue,
    tx: TxQueue,
}

impl HostileDevice {
    fn new(acked: u64) -> HostileDevice {
        let config = DriverConfig { acked, queue_size: 64, receive: 4096 };
        let Driver { region, file, rx, tx, .. } = Driver::new(config).unwrap();
        let mapped = Region::map(&file, 0, region.len() as u64, region.guest(), region.user()).unwrap();
        let memory = Arc::new(Table::default().with(mapped).unwrap());
        let at = [rx.addresses(), tx.addresses()];
        let env = env();
        let guest = Arc::new(Stack::<DriverSide>::new(GUEST, None, Settings::default(), Box::new(env.clone())));
        guest.set_link(Some(tx));
        guest.set_inlet(Some(rx));
        guest.set_socket_types(socket_types(acked));
        let rx = RxQueue::start(memory.clone(), acked, 64, at[0], base(acked)).unwrap();
        let tx = TxQueue::start(memory, acked, 64, at[1], base(acked)).unwrap();
        HostileDevice { guest, env, region, at, rx, tx }
    }

    fn exchange(&mut self, header: VsockHdr, payload: &[u8]) -> Vec<Packet> {
        assert!(self.rx.room(true).unwrap().unwrap().get() >= payload.len());
        self.rx.put(&header, &mut Payload::bytes(payload));
        self.rx.publish();
        self.guest.work();
        let mut packets = Vec::new();
        let mut each = |mut header: VsockHdr, mut payload: Payload<'_>| {
            if header.op == Op::Reset as u16 {
                (header.buf_alloc, header.fwd_cnt) = (0, 0);
            }
            let len = payload.len();
            packets.push(Packet { header, payload: payload.take(len) });
        };
        while self.tx.take(&mut each).unwrap().packets > 0 {}
        packets
    }

    fn header(&self, op: Op) -> VsockHdr {
        VsockHdr {
            src_cid: HOST,
            dst_cid: GUEST,
            src_port: 5,
            dst_port: PORT,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc: 1000,
            ..VsockHdr::default()
        }
    }

    /// Writes to the rings.
    fn write(&self, user: u64, bytes: &[u8]) {
        self.region.span((user - self.region.user()) as usize, bytes.len()).unwrap().write(bytes);
    }

    /// Marks a buffer as used (split ring).
    fn used(&self, queue: usize, index: u16, id: u32, len: u32) {
        let at = self.at[queue].device;
        self.write(at + 4 + 8 * u64::from(index), &[id.to_le_bytes(), len.to_le_bytes()].concat());
        self.write(at + 2, &(index + 1).to_le_bytes());
    }
}

#[test]
fn a_driver_answers_invalid_packets_the_same_way() {
    for acked in [SPLIT, PACKED] {
        let mut device = HostileDevice::new(acked);
        let listener = Listener::bind(&device.guest, PORT, SocketType::Stream).unwrap();
        let (request, plain) = (device.header(Op::Request), device.header(Op::CreditRequest));
        let mut bad = Vec::new();
        bad.extend([0, 8, 65535].map(|op| VsockHdr { op, ..plain }));
        bad.extend([0, 2, 3].map(|kind| VsockHdr { kind, ..plain }));
        bad.extend([Op::Request, Op::Response].map(|op| VsockHdr { op: op as u16, ..plain }));
        for header in bad {
            assert_eq!(device.exchange(request, &[])[0].header.op, Op::Response as u16);
            let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
            let reset = reset_of(plain);
            assert_eq!(device.exchange(header, &[]), [reset], "{header:?}");
            assert_eq!((&stream).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
        for dst_cid in [0, 2, 4, u64::MAX] {
            let header = VsockHdr { dst_cid, ..plain };
            assert_eq!(device.exchange(header, &[]), [reset_of(header)]);
        }
        assert_eq!(device.guest.report().connections, 0);
        assert_eq!(*device.env.broken.lock(), []);
    }
}

#[test]
fn a_driver_skips_packets_without_a_header() {
    let device = HostileDevice::new(SPLIT);
    for index in 0..44 {
        device.used(0, index, u32::from(index), index.into());
    }
    device.guest.work();
    assert_eq!((device.guest.report().received, device.guest.report().wrong), (44, 0));
    assert_eq!(device.guest.report().ways.direct, 0, "no answers may be sent");
    assert_eq!(*device.env.broken.lock(), []);
}

#[test]
fn a_driver_rejects_a_payload_shorter_than_its_header_says() {
    let mut device = HostileDevice::new(SPLIT);
    let listener = Listener::bind(&device.guest, PORT, SocketType::Stream).unwrap();
    device.exchange(device.header(Op::Request), &[]);
    let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
    // The header is written by hand into the second buffer, and claims 10 bytes more than there are.
    let data = VsockHdr { len: 15, ..device.header(Op::Data) };
    let (mut address, mut len) = ([0; 8], 0);
    let descriptor = device.at[0].descriptor - device.region.user() + 16;
    device.region.span(descriptor as usize, 8).unwrap().read(&mut address);
    let at = u64::from_le_bytes(address) - device.region.guest();
    for bytes in [&data.to_bytes()[..], b"there"] {
        device.region.span(at as usize + len, bytes.len()).unwrap().write(bytes);
        len += bytes.len();
    }
    device.used(0, 1, 1, len as u32);
    device.guest.work();
    assert_eq!((&stream).read(&mut [0; 20]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert_eq!(device.guest.report().wrong, 1);
    assert_eq!(*device.env.broken.lock(), []);
}

#[test]
fn a_device_that_returns_invalid_used_buffers_is_stopped() {
    let room = 4096 + SIZE as u32;
    let (jump, outstanding) = (DriverFault::UsedJump { index: 101, next: 0, ahead: 101, outstanding: 64 }, 64);
    let lies = [
        (0, 64, SIZE as u32, DriverFault::Id { id: 64 }),
        (0, u32::MAX, SIZE as u32, DriverFault::Id { id: u32::MAX }),
        (0, 3, room + 1, DriverFault::Length { id: 3, len: room + 1, room }),
        (0, 3, u32::MAX, DriverFault::Length { id: 3, len: u32::MAX, room }),
        (100, 0, SIZE as u32, jump),
    ];
    for (index, id, len, fault) in lies {
        let device = HostileDevice::new(SPLIT);
        device.used(0, index, id, len);
        device.guest.work();
        assert_eq!(*device.env.broken.lock(), [(Queue::In, Broken::Device(fault))]);
        assert_eq!(device.guest.report().faults, 1);
    }
    // The transmit queue is polled when it has run out of room. Its first buffer has been used already.
    let lies = [(1, 64, DriverFault::Id { id: 64 }), (1, 0, DriverFault::Id { id: 0 }), (100, 0, jump)];
    for (index, id, fault) in lies {
        let mut device = HostileDevice::new(SPLIT);
        let listener = Listener::bind(&device.guest, PORT, SocketType::Stream).unwrap();
        device.exchange(VsockHdr { buf_alloc: u32::MAX, ..device.header(Op::Request) }, &[]);
        let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
        stream.set_nonblocking(true);
        device.used(1, index, id, 0);
        for _ in 0..200 {
            let _ = (&stream).write(&[0; 100]);
            device.guest.work();
        }
        let broken = device.env.broken.lock().clone();
        let [(Queue::Out, Broken::Device(mut got))] = broken[..] else { panic!("{broken:?}") };
        if let DriverFault::UsedJump { outstanding: under_way, .. } = &mut got {
            // Some are reserved for control packets.
            assert!((60..=64).contains(under_way));
            *under_way = outstanding;
        }
        assert_eq!(got, fault);
        assert_eq!(device.guest.report().faults, 1);
        // The receive queue still works.
        let data = VsockHdr { len: 5, ..device.header(Op::Data) };
        device.rx.put(&data, &mut Payload::bytes(b"hello"));
        device.rx.publish();
        device.guest.work();
        assert_eq!((&stream).read(&mut [0; 9]).unwrap(), 5);
    }
}

// --- random steps -----------------------------------------------------------------------------------------------------

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
