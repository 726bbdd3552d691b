//! A guest that changes its rings after the device has read them: at most one fault is reported, and the stack keeps working.
#![cfg(not(loom))]

mod common;

use common::{
    GUEST,
    raw::{Guest, PACKED, PORT, SPLIT, Shape, Side, listener},
};
use ringroad_ring::Fault;
use ringroad_vsock::{Broken, Hub, Link, Listener, Payload, Queue, RxQueue, Stream};
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{io::Write, time::Duration};

/// Number of receive buffers. All but those reserved for control packets are used before the ring is changed.
const BUFFERS: usize = 40;
const USED: usize = 36;
/// Offset of the available index in a split ring of 64 entries. A descriptor is at 16 times its index in both layouts.
const AVAILABLE: usize = 64 * 16 + 2;

fn guest(acked: u64) -> Guest {
    Guest::bare(Shape { acked, buffers: vec![vec![45]; BUFFERS], ..Shape::default() })
}

/// Changes the receive ring; returns the fault this is reported as, if any.
type Spoil = fn(&Guest) -> Option<Fault>;

fn jump(guest: &Guest) -> Option<Fault> {
    let span = guest.region.span(AVAILABLE, 2).unwrap();
    let index = u16::from_le_bytes(span.array(0).unwrap()).wrapping_add(1000);
    span.write(&index.to_le_bytes());
    Some(Fault::AvailableJump { index, next: USED as u16, ahead: 1000 + (BUFFERS - USED) as u16, size: 64 })
}

/// Moves the available index back: withdraws the chains already taken.
fn move_back(guest: &Guest) -> Option<Fault> {
    let span = guest.region.span(AVAILABLE, 2).unwrap();
    span.write(&(USED as u16).to_le_bytes());
    None
}

/// Points descriptors already taken outside the guest's memory.
fn outside(guest: &Guest) -> Option<Fault> {
    for index in USED..BUFFERS {
        guest.region.span(index * 16, 8).unwrap().write(&0xdead_u64.to_le_bytes());
    }
    Some(Fault::Outside { index: USED as u16, address: 0xdead, len: 45, regions: 1 })
}

/// Sets the length of descriptors already taken to zero.
fn empty(guest: &Guest) -> Option<Fault> {
    for index in USED..BUFFERS {
        guest.region.span(index * 16 + 8, 4).unwrap().write(&[0; 4]);
    }
    Some(Fault::ZeroLength { index: USED as u16 })
}

/// Makes descriptors already taken unavailable.
fn unavailable(guest: &Guest) -> Option<Fault> {
    for index in USED..BUFFERS {
        guest.region.span(index * 16 + 14, 2).unwrap().write(&[0; 2]);
    }
    None
}

const SPOILS: [(u64, Spoil); 7] = [
    (SPLIT, jump),
    (SPLIT, move_back),
    (SPLIT, outside),
    (SPLIT, empty),
    (PACKED, outside),
    (PACKED, empty),
    (PACKED, unavailable),
];

/// Checks that the ring is unaffected or was stopped by the expected fault, and that the device still receives packets and can be
/// reset.
#[track_caller]
fn keeps_working(guest: &mut Guest, listener: &Listener<Side>, fault: Option<Fault>) {
    let expected: Vec<_> = fault.map(|fault| (Queue::Out, Broken::Driver(fault))).into_iter().collect();
    assert_eq!(*guest.env.broken.lock(), expected);
    guest.send(guest.header(Op::Request, 99, PORT), &[]);
    guest.host.work();
    let mut accepted = 0;
    while listener.accept_within(Some(Duration::ZERO)).is_ok() {
        accepted += 1;
    }
    assert_eq!(accepted, 1);
    guest.host.reset();
    assert_eq!(guest.host.report().connections, 0);
}

fn accept(guest: &mut Guest, listener: &Listener<Side>) -> Stream<Side> {
    guest.send(guest.header(Op::Request, 5, PORT), &[]);
    guest.host.work();
    let stream = listener.accept_within(Some(Duration::ZERO)).unwrap();
    stream.set_nonblocking(true);
    stream
}

#[test]
fn rings_changed_after_being_read_cause_at_most_one_fault() {
    for (acked, spoil) in SPOILS {
        let mut guest = guest(acked);
        let listener = listener(&guest);
        let stream = accept(&mut guest, &listener);
        // The response used the first buffer.
        for _ in 1..USED {
            guest.send(guest.header(Op::CreditRequest, 5, PORT), &[]);
            guest.host.work();
        }
        let fault = spoil(&guest);
        let _ = (&stream).write(&[1]);
        guest.host.work();
        keeps_working(&mut guest, &listener, fault);
    }
}

#[test]
fn rings_changed_under_packets_of_a_guest_to_itself_cause_at_most_one_fault() {
    for (acked, spoil) in SPOILS {
        let mut guest = guest(acked);
        let listener = listener(&guest);
        let hub = Hub::new(100);
        hub.join(&guest.host, vec!["x".into()]);
        let own = |op, from, to| VsockHdr { dst_cid: GUEST, ..guest.header(op, from, to) };
        let packets =
            [own(Op::Request, 5, 6), own(Op::Response, 6, 5), own(Op::CreditUpdate, 5, 6), own(Op::Data, 5, 6)];
        let [request, response, update, data] = packets;
        guest.send(request, &[]);
        guest.send(response, &[]);
        for _ in 2..USED {
            guest.send(update, &[]);
            guest.host.work();
        }
        let fault = spoil(&guest);
        guest.send(VsockHdr { len: 1, ..data }, &[1]);
        guest.host.work();
        keeps_working(&mut guest, &listener, fault);
    }
}

/// The same for a host socket that is read straight into receive buffers.
#[test]
fn rings_changed_before_being_filled_cause_at_most_one_fault() {
    for (acked, spoil) in SPOILS {
        let guest = guest(acked);
        let mut queue: RxQueue = guest.host.set_link(None).unwrap();
        let (stamp, mut reads) = (&mut |_: &mut VsockHdr| {}, 0);
        for _ in 0..USED {
            assert!(queue.room(true).unwrap().is_some());
            queue.put(&VsockHdr::default(), &mut Payload::empty());
            queue.publish();
        }
        let fault = spoil(&guest);
        let filled = queue.fill(VsockHdr::default(), stamp, 1000, &mut |spans| {
            reads += spans.iter().map(|span| span.len()).sum::<usize>();
            Ok(1)
        });
        match (filled, fault) {
            (Err(broken), Some(fault)) => assert_eq!(broken, Broken::Driver(fault)),
            (Ok(None), None) => {}
            other => panic!("{:?}", other.0.map(|some| some.map(|(packets, _)| packets))),
        }
        assert_eq!(reads, 0);
        queue.base();
    }
}
