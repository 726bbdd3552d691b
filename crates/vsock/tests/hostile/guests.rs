//! A guest against another one.

use crate::common::{
    GUEST, pattern,
    raw::{BOTH, Guest, PACKED, Packet, SPLIT, Shape, Side, reset_of},
};
use ringroad_vsock::Hub;
use ringroad_wire::vsock_hdr::{Op, SEQ_EOM, TYPE_SEQPACKET, TYPE_STREAM, VsockHdr};
use std::sync::Arc;

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
