//! Descriptor chains and receive buffers that are invalid, and a guest that has no receive buffers.

use crate::common::{
    pattern,
    raw::{BASE, Guest, PACKED, PORT, Packet, SPLIT, Shape, Side, listener},
};
use ringroad_ring::{Buffer, Fault};
use ringroad_vsock::{Broken, Listener, MAX_PACKET, Queue, Settings, Stream};
use ringroad_wire::vsock_hdr::{Op, SIZE, VsockHdr};
use std::{
    collections::HashMap,
    io::{ErrorKind, Read, Write},
    time::Duration,
};

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

/// Requests connections from a few ports, in turn, each followed at once by this packet; accepts what is there now and then.
fn request_then(guest: &mut Guest, listener: &Listener<Side>, count: u32, then: Op) {
    for port in 0..count {
        guest.send(guest.header(Op::Request, 100_000 + port % 7, PORT), &[]);
        guest.send(guest.header(then, 100_000 + port % 7, PORT), &[]);
        if port % 500 == 0 {
            guest.host.work();
            while listener.accept_within(Some(Duration::ZERO)).is_ok() {}
        }
    }
    guest.host.work();
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
        request_then(&mut guest, &listener, COUNT, Op::Reset);
        assert_eq!(guest.host.report().connections, 2);
        assert_eq!(self::kept(&mut guest, &[4096]), HashMap::from([((5, update), 2)]));
        assert_eq!(guest.check(), []);

        // Connections that the device has to reset.
        let (mut guest, listener, _stream) = without_buffers(acked);
        request_then(&mut guest, &listener, COUNT, Op::Response);
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
