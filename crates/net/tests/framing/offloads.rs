//! Frames with work left to do, between queues that have negotiated offloads and queues that have not, and headers that are wrong.

use super::*;
use ringroad_frame::{
    HEADROOM,
    offload::{Checksum, Claim, Kind, Offload, Support, TunnelClaim},
};
use ringroad_mem::Span;
use ringroad_net::{Driver, DriverConfig};
use ringroad_wire::vnet_hdr::{
    F_DATA_VALID, F_UDP_TUNNEL_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_TUNNEL_IPV4, GSO_UDP, GSO_UDP_L4,
    VnetHdr,
};
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::IntoBytes;

const SENDS: u64 = bits::NET_F_CSUM
    | bits::NET_F_HOST_TSO4
    | bits::NET_F_HOST_TSO6
    | bits::NET_F_HOST_ECN
    | bits::NET_F_HOST_UFO
    | bits::NET_F_HOST_USO;
const TAKES: u64 = bits::NET_F_GUEST_CSUM | bits::NET_F_GUEST_TSO4 | bits::NET_F_GUEST_TSO6;

/// A TCP frame with so many bytes of payload; the TCP header begins at byte 34 or 54.
fn tcp(v6: bool, seed: usize, payload: usize) -> Vec<u8> {
    let mut bytes = vec![2; 12];
    if v6 {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend((20 + payload as u16).to_be_bytes());
        bytes.extend([6, 64]);
        bytes.extend([1; 32]);
    } else {
        bytes.extend([0x08, 0x00, 0x45, 0]);
        bytes.extend((40 + payload as u16).to_be_bytes());
        bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    }
    bytes.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    bytes.extend(frame(seed, payload));
    bytes
}

fn header(gso_type: u8, size: u16, start: u16) -> VnetHdr {
    VnetHdr {
        flags: F_NEEDS_CSUM,
        gso_type,
        gso_size: size.into(),
        csum_start: start.into(),
        csum_offset: 16.into(),
        ..VnetHdr::default()
    }
}

fn with(header: VnetHdr, frame: &[u8]) -> Vec<u8> {
    [header.as_bytes(), frame].concat()
}

/// What a driver sends, and the header with which it arrives, without the number of buffers.
fn cases() -> Vec<(VnetHdr, Vec<u8>, VnetHdr)> {
    let tso = |gso_type, size, start: u16| {
        let sent = header(gso_type, size, start);
        (sent, VnetHdr { hdr_len: (start + 20).into(), ..sent })
    };
    let (v4, v4_got) = tso(GSO_TCPV4, 1448, 34);
    let (v6, v6_got) = tso(GSO_TCPV6, 1428, 54);
    let checksum = header(GSO_NONE, 0, 34);
    vec![
        (VnetHdr::default(), frame(1, 60), VnetHdr::default()),
        (checksum, tcp(false, 2, 500), checksum),
        // A claim about the headers, and a size without a segmentation, mean nothing.
        (VnetHdr { hdr_len: 7.into(), gso_size: 9.into(), ..checksum }, tcp(false, 3, 500), checksum),
        (v4, tcp(false, 4, 20_000), v4_got),
        (VnetHdr { flags: F_DATA_VALID, ..VnetHdr::default() }, frame(5, 70), VnetHdr::default()),
        (VnetHdr { hdr_len: 60.into(), ..v6 }, tcp(true, 6, 30_000), v6_got),
        // One segment.
        (v4, tcp(false, 7, 1448), checksum),
        (VnetHdr::default(), frame(8, 1514), VnetHdr::default()),
    ]
}

/// Reads what was put into these buffers: a frame with its header.
fn take_frame(guest: &mut Guest, offered: &mut VecDeque<Vec<Buffer>>) -> Vec<u8> {
    let (mut all, mut left) = (Vec::new(), 1);
    while left > 0 {
        let mut used = [Used::default()];
        assert_eq!(guest.ring.take_used(&mut used), Ok(1));
        let buffers = offered.pop_front().unwrap();
        let mut bytes = guest.read(&buffers);
        bytes.truncate(used[0].len as usize);
        if all.is_empty() {
            left = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
        }
        all.extend(bytes);
        left -= 1;
    }
    all
}

/// Many small buffers for a driver that merges, else a few large ones.
fn offer(guest: &mut Guest, merge: bool) -> VecDeque<Vec<Buffer>> {
    let (count, lens) = if merge { (100, &[1000, 526][..]) } else { (10, &[1000, 64_562][..]) };
    (0..count).map(|_| guest.offer(lens, 0)).collect()
}

#[test]
fn frames_arrive_with_what_is_left_to_do() {
    let mut burst = Burst::default();
    for layout in all_layouts() {
        for merge in [0, bits::NET_F_MRG_RXBUF] {
            for (tuning, pieces) in [(Tuning::default(), false), (Tuning::NONE, false), (Tuning::default(), true)] {
                let mut from = Guest::new(layout | SENDS, 64, 8, 1 << 20, Some(40_000));
                let mut to = Guest::new(layout | TAKES | merge, 256, 8, 1 << 20, Some(5000));
                let ((mut tx, sent), (mut rx, got)) = (from.tx(), to.rx());
                tx.tune(tuning);
                rx.tune(tuning);
                assert_eq!(rx.support(), Support::CHECKSUM | Support::VALID | Support::TCP4 | Support::TCP6);
                let mut offered = offer(&mut to, merge > 0);
                for (header, frame, _) in cases() {
                    let bytes = with(header, &frame);
                    let lens = if pieces { vec![5, 7, 13, 30, bytes.len() - 55] } else { vec![bytes.len()] };
                    let buffers = from.buffers(&lens, &bytes);
                    from.ring.add(&buffers, &[]).unwrap();
                }
                from.ring.publish();
                let count = cases().len();
                assert_eq!(tx.take(&mut burst), Ok(count));
                assert!(burst.has_offloads());
                assert!(burst.plain().is_none() || !pieces);
                for (index, (_, frame, header)) in cases().into_iter().enumerate() {
                    let offload = burst.offload(index);
                    let checksum = Checksum::Partial { start: header.csum_start.get(), offset: 16 };
                    let partial = header.flags & F_NEEDS_CSUM != 0;
                    assert_eq!(offload.checksum(), if partial { checksum } else { Checksum::Complete });
                    let gso = offload.gso().map(|gso| (gso.kind, gso.size.get(), gso.header_len));
                    let kind = if index == 3 { Kind::Tcp4 } else { Kind::Tcp6 };
                    let expected = (kind, header.gso_size.get(), header.hdr_len.get());
                    assert_eq!(gso, (header.gso_type != GSO_NONE).then_some(expected), "frame {index}");
                    assert_eq!(burst.frames()[index].len(), frame.len());
                }
                let all: Vec<u8> = (0..count as u8).collect();
                assert_eq!(rx.put(&burst, &all), Ok(count));
                tx.done(&mut burst);
                for (index, (_, frame, header)) in cases().into_iter().enumerate() {
                    let taken = take_frame(&mut to, &mut offered);
                    let buffers = if merge > 0 { (HEADER + frame.len()).div_ceil(1526) } else { 1 };
                    let expected = VnetHdr { num_buffers: (buffers as u16).into(), ..header };
                    assert!(taken == with(expected, &frame), "frame {index}: {:?}", &taken[..HEADER]);
                }
                let bytes: u64 = cases().iter().map(|(_, frame, _)| frame.len() as u64).sum();
                for snapshot in [sent.snapshot(), got.snapshot()] {
                    assert_eq!((snapshot.frames, snapshot.bytes, snapshot.dropped()), (count as u64, bytes, 0));
                }
            }
        }
    }
}

const SENDS_TUNNELS: u64 = bits::NET_F_HOST_UDP_TUNNEL_GSO | bits::NET_F_HOST_UDP_TUNNEL_GSO_CSUM;
const TAKES_TUNNELS: u64 = bits::NET_F_GUEST_UDP_TUNNEL_GSO | bits::NET_F_GUEST_UDP_TUNNEL_GSO_CSUM;

/// VXLAN over IPv4: UDP at byte 34, the inner IP and TCP headers at 64 and 84.
fn vxlan(payload: usize) -> Vec<u8> {
    let inner = tcp(false, 1, payload);
    let len = 16 + inner.len() as u16;
    let mut bytes = vec![2; 12];
    bytes.extend([0x08, 0x00, 0x45, 0]);
    bytes.extend((20 + len).to_be_bytes());
    bytes.extend([0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 80, 0x12, 0xb5]);
    bytes.extend(len.to_be_bytes());
    bytes.extend([0, 0, 8, 0, 0, 0, 0, 0, 1, 0]);
    bytes.extend(inner);
    bytes
}

/// A header of 24 bytes.
fn long(header: VnetHdr, hash: u8, outer: u16, inner: u16) -> Vec<u8> {
    [header.as_bytes(), &[hash; 8], &outer.to_le_bytes(), &inner.to_le_bytes()].concat()
}

#[test]
fn tunnels_arrive_whole() {
    let sent = VnetHdr { flags: F_NEEDS_CSUM | F_UDP_TUNNEL_CSUM, ..header(GSO_TCPV4 | GSO_TUNNEL_IPV4, 1448, 84) };
    let got = VnetHdr { hdr_len: 104.into(), num_buffers: 1.into(), ..sent };
    let none = VnetHdr { num_buffers: 1.into(), ..VnetHdr::default() };
    let mut burst = Burst::default();
    for layout in all_layouts() {
        // One way is enough for both to have the longer header.
        for (hash, other) in [(0, 0), (bits::NET_F_HASH_REPORT, 0), (0, SENDS_TUNNELS)] {
            let mut from = Guest::plain(layout | hash | SENDS | SENDS_TUNNELS);
            let mut to = Guest::plain(layout | hash | TAKES | TAKES_TUNNELS | other);
            let ((mut tx, sends), (mut rx, takes)) = (from.tx(), to.rx());
            let mut offered: VecDeque<_> = (0..3).map(|_| to.offer(&[10, 30_000], 0)).collect();
            let (tunneled, plain) = (vxlan(20_000), frame(2, 60));
            // What a driver writes into the hash means nothing, as do positions without a tunnel.
            from.send(&[long(sent, 7, 34, 64), tunneled.clone()].concat());
            from.send(&[long(VnetHdr::default(), 7, 1, 2), plain.clone()].concat());
            from.send(&[long(sent, 7, 34, 62), tunneled.clone()].concat());
            assert_eq!(tx.take(&mut burst), Ok(3));
            assert_eq!((burst.frames().len(), sends.snapshot().offload), (2, 1));
            assert!(rx.support().contains(burst.offload(0).needs()));
            assert_eq!(rx.put(&burst, &[0, 1]), Ok(2));
            tx.done(&mut burst);
            assert!(take_frame(&mut to, &mut offered) == [long(got, 0, 34, 64), tunneled.clone()].concat());
            assert!(take_frame(&mut to, &mut offered) == [long(none, 0, 0, 0), plain].concat());
            assert_eq!((takes.snapshot().gso, takes.snapshot().gso_bytes), (1, tunneled.len() as u64));
        }
        // Without the feature the header is the shorter one, and what it says of a tunnel was not negotiated.
        refused(layout | SENDS, &[(sent, vxlan(3000)), (VnetHdr { flags: F_NEEDS_CSUM, ..sent }, vxlan(3000))]);
    }
}

#[test]
fn a_driver_sends_tunnels() {
    let memory = Arc::new(Table::default().with(Region::private(64 << 10, 0).unwrap()).unwrap());
    let bytes = vxlan(20_000);
    memory.regions()[0].span(HEADROOM, bytes.len()).unwrap().write(&bytes);
    let claim = Claim { kind: Kind::Tcp4, ecn: false, size: 1000, checksum: (84, 16) };
    let tunnel = TunnelClaim { outer_transport: 34, inner_network: 64, checksum: true };
    let offload = Offload::tunneled(claim, tunnel, &bytes, bytes.len()).unwrap();
    for layout in all_layouts() {
        let acked = layout | SENDS | SENDS_TUNNELS;
        let config = DriverConfig { acked, frame: 30_000, queue_size: 16, ..DriverConfig::default() };
        let mut driver = Driver::new(config).unwrap();
        let device = Arc::new(Table::default().with(driver.region.clone()).unwrap());
        let at = driver.tx[0].addresses();
        let mut queue = TxQueue::start(device, acked, 16, at, common::base(acked), Arc::default()).unwrap();
        let mut burst = Burst::default();
        burst.start_in(&memory);
        burst.push_at(0, HEADROOM + bytes.len(), offload).unwrap();
        burst.push_at(0, HEADROOM + 60, Offload::NONE).unwrap();
        assert_eq!(driver.tx[0].put(&burst, &[0, 1], Support::all()), 2);
        driver.tx[0].publish();
        let mut taken = Burst::default();
        assert_eq!(queue.take(&mut taken), Ok(2));
        assert_eq!((taken.offload(0), taken.offload(1)), (offload, Offload::NONE));
        let mut copy = vec![0; bytes.len()];
        assert_eq!(taken.copy(0, 0, &mut copy), bytes.len());
        assert!(copy == bytes);
        queue.done(&mut taken);
    }
}

/// Sends each between good frames, in one piece and in several; expects that it is dropped, counted, and nothing else.
fn refused(acked: u64, bad: &[(VnetHdr, Vec<u8>)]) {
    for tuning in [Tuning::default(), Tuning::NONE] {
        let mut guest = Guest::plain(acked);
        let (mut tx, counters) = guest.tx();
        tx.tune(tuning);
        let mut burst = Burst::default();
        for (index, (header, bytes)) in bad.iter().enumerate() {
            let sent = with(*header, bytes);
            for cut in [sent.len(), 1, HEADER, HEADER + 13] {
                let before = counters.snapshot();
                guest.send(&[&NOISE[..], &frame(1, 60)].concat());
                let lens = [cut, sent.len() - cut].into_iter().filter(|&len| len > 0).collect::<Vec<_>>();
                let buffers = guest.buffers(&lens, &sent);
                guest.ring.add(&buffers, &[]).unwrap();
                guest.send(&[&NOISE[..], &frame(2, 70)].concat());
                assert_eq!(tx.take(&mut burst), Ok(3));
                let lens: Vec<_> = burst.frames().iter().map(|frame| frame.len()).collect();
                assert_eq!(lens, [60, 70], "header {index}: {header:?}");
                assert!(!burst.has_offloads());
                tx.done(&mut burst);
                tx.settle(Duration::ZERO);
                assert_eq!(guest.ring.take_used(&mut [Used::default(); 8]), Ok(3));
                let after = counters.snapshot();
                assert_eq!((after.frames, after.bytes), (before.frames + 2, before.bytes + 130));
                assert_eq!((after.offload, after.dropped()), (before.offload + 1, before.dropped() + 1));
                guest.next = guest.next.min(500_000);
            }
        }
    }
}

#[test]
fn what_was_not_negotiated_is_dropped() {
    let (v4, v6) = (tcp(false, 1, 3000), tcp(true, 1, 3000));
    let [checksum, tso4, tso6] = [header(GSO_NONE, 0, 34), header(GSO_TCPV4, 1448, 34), header(GSO_TCPV6, 1428, 54)];
    let ecn = header(GSO_TCPV4 | GSO_ECN, 1448, 34);
    let all = [(checksum, v4.clone()), (tso4, v4.clone()), (tso6, v6.clone()), (ecn, v4.clone())];
    for layout in all_layouts() {
        // What a driver takes says nothing about what it sends; and nothing is possible without the checksum.
        for acked in [0, TAKES, SENDS & !bits::NET_F_CSUM] {
            refused(layout | acked, &all);
        }
        refused(layout | bits::NET_F_CSUM, &all[1..]);
        refused(layout | bits::NET_F_CSUM | bits::NET_F_HOST_TSO4, &all[2..]);
        refused(layout | bits::NET_F_CSUM | bits::NET_F_HOST_TSO6, &[all[1].clone(), all[3].clone()]);
        refused(layout | SENDS & !bits::NET_F_HOST_ECN, &all[3..]);
    }
}

#[test]
fn headers_that_are_wrong_are_dropped() {
    let (v4, v6) = (tcp(false, 1, 3000), tcp(true, 1, 3000));
    let tso = header(GSO_TCPV4, 1448, 34);
    let changed = |at: usize, byte| {
        let mut frame = v4.clone();
        frame[at] = byte;
        frame
    };
    let of_v4 = [
        // The size of segments.
        header(GSO_TCPV4, 0, 34),
        header(GSO_TCPV4, 7, 34),
        // Where the checksum begins: in the Ethernet header, behind the frame, elsewhere than TCP.
        header(GSO_NONE, 0, 0),
        header(GSO_NONE, 0, 13),
        header(GSO_NONE, 0, v4.len() as u16 - 17),
        header(GSO_NONE, 0, 0xffff),
        header(GSO_TCPV4, 1448, 36),
        // Where it is.
        VnetHdr { csum_offset: 17.into(), ..header(GSO_NONE, 0, 34) },
        VnetHdr { csum_offset: 0xffff.into(), ..header(GSO_NONE, 0, 34) },
        VnetHdr { csum_offset: 0xfffe.into(), ..header(GSO_NONE, 0, 34) },
        VnetHdr { csum_offset: 6.into(), ..tso },
        // What it is.
        VnetHdr { flags: 0, ..tso },
        VnetHdr { flags: F_DATA_VALID, ..tso },
        header(2, 1448, 34),
        header(0x7f, 1448, 34),
        header(0xff, 1448, 34),
        header(GSO_ECN, 1448, 34),
        header(GSO_TCPV6, 1448, 34),
        VnetHdr { csum_offset: 6.into(), ..header(GSO_UDP, 1448, 34) },
        VnetHdr { csum_offset: 6.into(), ..header(GSO_UDP_L4, 1448, 34) },
        VnetHdr { hdr_len: 0xffff.into(), ..tso },
        VnetHdr { flags: 0xff, gso_type: 0xff, hdr_len: 0xffff.into(), ..header(0, 0xffff, 0xffff) },
    ];
    let mut all: Vec<_> = of_v4.into_iter().map(|header| (header, v4.clone())).collect();
    all.push((header(GSO_TCPV4, 1448, 54), v6));
    // Headers of the frame: version, length of IP, total length, fragment, protocol, length of TCP, SYN.
    let frames = [(14, 0x65), (14, 0x44), (16, 0), (17, 0), (20, 0x20), (23, 17), (46, 0x40), (47, 0x12)];
    all.extend(frames.map(|(at, byte)| (tso, changed(at, byte))));
    // Frames that end within their headers.
    all.extend([14, 33, 53].map(|len| (tso, v4[..len].to_vec())));
    all.extend([14, 33, 51].map(|len| (header(GSO_NONE, 0, 34), v4[..len].to_vec())));
    for layout in all_layouts() {
        refused(layout | SENDS, &all);
    }
}

#[test]
fn an_mtu_limits_segments() {
    for layout in all_layouts() {
        for tuning in [Tuning::default(), Tuning::NONE] {
            let mut from = Guest::plain(layout | SENDS);
            let mut to = Guest::plain(layout | TAKES);
            let ((mut tx, sent), (mut rx, got)) = (from.tx(), to.rx());
            tx.tune(tuning);
            rx.tune(tuning);
            tx.limit(1514);
            rx.limit(1014);
            let mut offered: VecDeque<_> = (0..4).map(|_| to.offer(&[30_000], 0)).collect();
            let (v4, v6) = (tcp(false, 1, 20_000), tcp(true, 1, 20_000));
            // On a link 1514, 1515, 1514, 1515, 1014 and 1015 bytes long; and one that is not cut.
            let frames = [(1460, &v4), (1461, &v4), (1440, &v6), (1441, &v6), (960, &v4), (961, &v4)];
            for (size, bytes) in frames {
                let is_v6 = std::ptr::eq(bytes, &v6);
                let (gso_type, start) = if is_v6 { (GSO_TCPV6, 54) } else { (GSO_TCPV4, 34) };
                from.send(&with(header(gso_type, size, start), bytes));
            }
            from.send(&with(header(GSO_NONE, 0, 34), &v4));
            let mut burst = Burst::default();
            assert_eq!(tx.take(&mut burst), Ok(7));
            let lens = [0, 1, 2, 3].map(|index| burst.link_len(index));
            assert_eq!((burst.frames().len(), lens), (4, [1514, 1514, 1014, 1015]));
            assert_eq!((sent.snapshot().frames, sent.snapshot().oversize, sent.snapshot().offload), (4, 3, 0));
            assert_eq!(rx.put(&burst, &[0, 1, 2, 3]), Ok(1));
            tx.done(&mut burst);
            assert_eq!((got.snapshot().frames, got.snapshot().oversize), (1, 3));
            let expected = VnetHdr { hdr_len: 54.into(), num_buffers: 1.into(), ..header(GSO_TCPV4, 960, 34) };
            assert!(take_frame(&mut to, &mut offered) == with(expected, &v4));
            // What is read straight into the buffers, too.
            let mut reads =
                [(960, &v4), (961, &v4)].map(|(size, bytes)| with(header(GSO_TCPV4, size, 34), bytes)).into_iter();
            let filled = rx.fill(HEADER + 20_100, &mut |spans| reads.next().map(|bytes| spread(spans, &bytes)));
            assert_eq!((filled, got.snapshot().oversize), (Ok(Poured::Frames(1)), 4));
            assert!(take_frame(&mut to, &mut offered) == with(expected, &v4));
        }
    }
}

/// Writes bytes to spans; returns how many there were.
fn spread(spans: &[Span<'_>], bytes: &[u8]) -> usize {
    let mut left = bytes;
    spans.iter().for_each(|span| left = &left[span.write(left)..]);
    bytes.len()
}

#[test]
fn frames_are_read_with_their_headers() {
    let tso6 = header(GSO_TCPV6, 1428, 54);
    let valid = VnetHdr { flags: F_DATA_VALID, ..VnetHdr::default() };
    let not_negotiated = VnetHdr { csum_offset: 6.into(), ..header(GSO_UDP_L4, 100, 34) };
    // What a TAP interface may write, and the header that the driver gets.
    let mut reads: Vec<_> = cases().into_iter().map(|(header, frame, got)| (header, frame, Some(got))).collect();
    reads[4] = (valid, frame(5, 70), Some(valid));
    reads.extend([
        (not_negotiated, tcp(false, 1, 3000), None),
        (header(GSO_TCPV4, 0, 34), tcp(false, 1, 3000), None),
        (header(GSO_NONE, 0, 13), tcp(false, 1, 3000), None),
        (tso6, tcp(false, 1, 3000), None),
        (VnetHdr::default(), frame(9, 99), Some(VnetHdr::default())),
    ]);
    for layout in all_layouts() {
        for merge in [0, bits::NET_F_MRG_RXBUF] {
            let mut to = Guest::new(layout | TAKES | merge, 256, 8, 1 << 20, Some(5000));
            let (mut rx, counters) = to.rx();
            let mut offered = offer(&mut to, merge > 0);
            let mut source = reads.iter();
            let filled = rx.fill(HEADER + 40_000, &mut |spans| {
                let (header, frame, _) = source.next()?;
                Some(spread(spans, &with(*header, frame)))
            });
            let good = reads.iter().filter(|(.., got)| got.is_some()).count();
            assert_eq!(filled, Ok(Poured::Frames(good)));
            assert_eq!((counters.snapshot().offload, counters.snapshot().dropped()), (4, 4));
            for (index, (_, frame, header)) in reads.iter().enumerate() {
                let Some(header) = header else { continue };
                let taken = take_frame(&mut to, &mut offered);
                let buffers = if merge > 0 { (HEADER + frame.len()).div_ceil(1526) } else { 1 };
                let expected = VnetHdr { num_buffers: (buffers as u16).into(), ..*header };
                assert!(taken == with(expected, frame), "frame {index}: {:?}", &taken[..HEADER]);
            }
            // A driver that negotiated no offloads gets a header without them.
            let mut to = Guest::plain(layout | merge);
            let (mut rx, counters) = to.rx();
            let mut offered: VecDeque<_> = (0..3).map(|_| to.offer(&[2048], 0)).collect();
            let mut source = [(valid, frame(1, 60)), (header(GSO_NONE, 0, 34), tcp(false, 1, 100))].into_iter();
            let filled =
                rx.fill(2000, &mut |spans| source.next().map(|(header, frame)| spread(spans, &with(header, &frame))));
            assert_eq!((filled, counters.snapshot().offload), (Ok(Poured::Frames(1)), 1));
            assert!(take_frame(&mut to, &mut offered) == received(&frame(1, 60), 1));
        }
    }
}

/// A guest that rewrites its headers while they are looked at, in bursts that are too long: what was read first counts, and only
/// that.
#[test]
fn a_buffer_is_a_frame_or_refused_whatever_becomes_of_its_header() {
    const ROUNDS: u64 = 2000;
    for layout in all_layouts() {
        let mut from = Guest::plain(layout);
        let (mut tx, sent) = from.tx();
        // A type of segmentation that there is not, every now and then.
        let short: Vec<_> = (0..20).map(|_| from.buffers(&[HEADER + 60], &[0; HEADER + 60])).collect();
        let long: Vec<_> = (0..5).map(|_| from.buffers(&[HEADER + 60_000], &[0; HEADER])).collect();
        let types: Vec<usize> = short.iter().map(|buffers| (buffers[0].address - GUEST) as usize + 1).collect();
        let (region, stop) = (from.region.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let rewriter = std::thread::spawn(move || {
            for value in [0x7f, 0].into_iter().cycle().take_while(|_| !stopped.load(Ordering::Relaxed)) {
                types.iter().for_each(|&at| _ = region.span(at, 1).unwrap().write(&[value]));
            }
        });
        let (mut burst, mut refused) = (Burst::default(), 0);
        let count = short.len() + long.len();
        for _ in 0..ROUNDS {
            for buffers in short.iter().chain(&long) {
                from.ring.add(buffers, &[]).unwrap();
            }
            from.ring.publish();
            assert_eq!(tx.take(&mut burst), Ok(count));
            assert_eq!(burst.frames().len() + burst.refused(), count, "frames and refused buffers");
            refused += burst.refused() as u64;
            tx.done(&mut burst);
            tx.settle(Duration::ZERO);
            assert_eq!(from.ring.take_used(&mut [Used::default(); 64]), Ok(count));
        }
        stop.store(true, Ordering::Relaxed);
        rewriter.join().unwrap();
        let sent = sent.snapshot();
        assert_eq!((sent.frames + sent.offload, sent.offload), (ROUNDS * count as u64, refused));
    }
}
