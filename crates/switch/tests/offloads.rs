//! Frames with work left to do, among ports that take them and ports that do not.

mod common;

use common::{Bytes, Fake, Net, Panics, mac};
use ringroad_frame::offload::{Checksum, Claim, HEADERS, Kind, Offload, Support, checksum};
use ringroad_switch::{Dropped, Limits};
use ringroad_wire::ethernet::MacAddr;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

/// Payload of a segment.
const SIZE: usize = 500;
const TSO: Support = Support::CHECKSUM.union(Support::TCP4);

/// TCP over IPv4, its checksum partial.
fn tcp(destination: MacAddr, source: MacAddr, payload: usize) -> Bytes {
    let mut frame = [destination.0, source.0].concat();
    frame.extend([0x08, 0x00, 0x45, 0]);
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let ip: u32 = frame[14..34].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let ip = !((ip & 0xffff) + (ip >> 16)) as u16;
    frame[24..26].copy_from_slice(&ip.to_be_bytes());
    frame.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0]);
    frame.extend((0x0a00 + 1 + 0x0a00 + 2 + 6 + 20 + payload as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend((0..payload).map(|at| (at * 7 + (at >> 8)) as u8));
    frame
}

/// What the senders leave to others: TCP is to be cut if there is more than a segment.
fn offload(frame: &[u8]) -> Offload {
    if frame[12..14] != [0x08, 0x00] {
        return Offload::NONE;
    }
    let claim = Claim { kind: Kind::Tcp4, ecn: false, size: SIZE as u16, checksum: (34, 16) };
    Offload::segmented(claim, &frame[..frame.len().min(HEADERS)], frame.len()).unwrap()
}

/// Ports that support this each.
fn net(supports: &[Support]) -> Net {
    net_of(supports, Limits::default())
}

fn net_of(supports: &[Support], limits: Limits) -> Net {
    let port = |&support: &Support| {
        let port = Fake::limited(true, false, limits);
        *port.support.lock().unwrap() = support;
        *port.offload.lock().unwrap() = offload;
        port
    };
    Net::made(supports.iter().map(port).collect())
}

fn offloads(port: &Arc<Fake>) -> Vec<Offload> {
    std::mem::take(&mut port.got_offloads.lock().unwrap())
}

/// These are the segments of the frame, complete.
fn assert_segments(whole: &[u8], got: &[Bytes]) {
    let data = &whole[54..];
    assert_eq!(got.len(), data.len().div_ceil(SIZE));
    for (index, (segment, data)) in got.iter().zip(data.chunks(SIZE)).enumerate() {
        assert_eq!((&segment[..14], &segment[54..]), (&whole[..14], data));
        assert_eq!(segment[38..42], (1 + (index * SIZE) as u32).to_be_bytes());
        assert_eq!(checksum::verify(segment), Offload::VALID);
    }
}

#[test]
fn a_frame_is_cut_for_the_port_that_does_not_take_it_whole() {
    let mut net = net(&[TSO, Support::empty()]);
    let there = [tcp(mac(1), mac(0), 1600), tcp(mac(1), mac(0), 300), common::frame(mac(1), mac(0), 7)];
    for known in [false, true] {
        // From the port that has offloads to the one that has none.
        let got = net.send(0, &there);
        assert_eq!((got[0].len(), got[1].len()), (0, 6), "known {known}");
        assert_segments(&there[0], &got[1][..4]);
        assert_segments(&there[1], &got[1][4..5]);
        assert_eq!(got[1][5], there[2]);
        assert!(offloads(&net.ports[1]).iter().all(|offload| offload.is_none()));
        // And back: as it is, whatever the other end takes.
        let back = [tcp(mac(0), mac(1), 1600), tcp(mac(0), mac(1), 300), common::frame(mac(0), mac(1), 7)];
        let got = net.send(1, &back);
        assert!(got[0] == back && got[1].is_empty());
        let expected = back.each_ref().map(|frame| offload(frame));
        assert_eq!(offloads(&net.ports[0]), expected);
        assert!(expected[0].gso().is_some() && expected[1].gso().is_none() && expected[2].is_none());
    }
}

#[test]
fn each_receiver_of_a_flooded_frame_gets_what_it_takes() {
    let mut net = net(&[Support::empty(), TSO, Support::CHECKSUM, Support::empty()]);
    let frames = [common::frame(MacAddr::BROADCAST, mac(0), 3), tcp(MacAddr::BROADCAST, mac(0), 1501)];
    let got = net.send(0, &frames);
    assert!(got[0].is_empty());
    assert!(got[1] == frames);
    assert_eq!(offloads(&net.ports[1]), [Offload::NONE, offload(&frames[1])]);
    for port in [2, 3] {
        assert_eq!((got[port].len(), &got[port][0]), (5, &frames[0]));
        let mut segments = got[port][1..].to_vec();
        for (segment, offload) in segments.iter_mut().zip(&offloads(&net.ports[port])[1..]) {
            let partial = matches!(offload.checksum(), Checksum::Partial { start: 34, offset: 16 });
            assert_eq!((partial, offload.is_none()), (port == 2, port == 3));
            checksum::complete(segment, *offload);
        }
        assert_segments(&frames[1], &segments);
    }
}

#[test]
fn frames_of_one_burst_go_their_ways() {
    let mut net = net(&[TSO, Support::empty(), TSO]);
    for port in 0..3 {
        net.send_one(port, MacAddr::BROADCAST, mac(port));
    }
    net.ports.iter().for_each(|port| drop(offloads(port)));
    let frames: Vec<_> = (0..10).map(|index| tcp(mac(1 + index % 2), mac(0), 900 + index)).collect();
    let got = net.send(0, &frames);
    assert_eq!((got[1].len(), got[2].len()), (10, 5));
    for index in 0..5 {
        assert_segments(&frames[2 * index], &got[1][2 * index..2 * index + 2]);
        assert_eq!(got[2][index], frames[2 * index + 1]);
    }
}

#[test]
fn a_limit_on_flooding_counts_frames_as_they_were_sent() {
    // 64 frames at once.
    let storm = Limits { storm: 200, ..Limits::default() };
    let mut net = net_of(&[TSO, Support::empty(), TSO], storm);
    net.send(0, &vec![common::frame(MacAddr::BROADCAST, mac(0), 1); 62]);
    let frames = [0; 5].map(|_| tcp(MacAddr::BROADCAST, mac(0), 1500));
    let got = net.send(0, &frames);
    assert_eq!((got[1].len(), got[2].len(), net.ports[0].lost(Dropped::Storm)), (6, 2, 3));
}

#[test]
fn frames_that_were_finished_for_a_port_that_panics_go_to_no_other() {
    let mut net = net(&[TSO, Support::empty(), Support::empty()]);
    *net.ports[1].panics.lock().unwrap() = Some(Panics::Put);
    let frames = [tcp(MacAddr::BROADCAST, mac(0), 1500)];
    let got = net.send(0, &frames);
    assert_eq!(net.ports[1].fell.lock().unwrap().len(), 1);
    assert!(got[1].is_empty());
    assert_segments(&frames[0], &got[2]);
    let got = net.send(0, &frames);
    assert_segments(&frames[0], &got[2]);
    assert_eq!(net.ports[0].done.load(Relaxed), 2);
}

#[test]
fn segments_count_as_work() {
    let mut net = net(&[TSO, Support::empty()]);
    let mut is_heavy = |frames: usize| {
        net.ports[0].to_send.lock().unwrap().push_back(vec![tcp(mac(1), mac(0), 1900); frames]);
        net.switch.carry(0, 0, std::time::Duration::ZERO).heavy
    };
    // Four segments each.
    assert_eq!([is_heavy(10), is_heavy(60)], [false, true]);
}

/// The complete segments of a frame, as a sender without offloads sends them.
fn segments(whole: &[u8]) -> Vec<Bytes> {
    let mut net = net(&[TSO, Support::empty()]);
    net.send(0, &[whole.to_vec()]).remove(1)
}

#[test]
fn segments_become_one_frame_for_a_port_that_coalesces() {
    let whole = tcp(mac(1), mac(0), 3 * SIZE);
    let segments = segments(&whole);
    for (takes, coalesces, pours, expected) in [
        (TSO, true, false, 1),
        // Not read straight into its buffers.
        (TSO, true, true, 1),
        (TSO, false, false, 3),
        (Support::empty(), true, false, 3),
    ] {
        let mut net = net(&[Support::empty(), takes]);
        *net.ports[0].offload.lock().unwrap() = |_| Offload::NONE;
        net.ports[0].pours.store(pours, Relaxed);
        net.ports[1].coalesces.store(coalesces, Relaxed);
        let got = net.send(0, &segments).remove(1);
        assert_eq!(got.len(), expected, "{takes:?} {coalesces} {pours}");
        if expected == 1 {
            assert!(got[0][54..] == whole[54..] && got[0][38..42] == whole[38..42]);
            assert_eq!(offloads(&net.ports[1])[0].gso().unwrap().size.get(), SIZE as u16);
        } else {
            assert!(got == segments);
        }
    }
}

#[test]
fn coalesced_frames_wait_as_they_are() {
    let segments = segments(&tcp(mac(1), mac(0), 3 * SIZE));
    let mut net = net_of(&[Support::empty(), TSO], Limits { wait: Duration::from_secs(1), ..Limits::default() });
    *net.ports[0].offload.lock().unwrap() = |_| Offload::NONE;
    net.ports[0].retains.store(true, Relaxed);
    net.ports[1].coalesces.store(true, Relaxed);
    net.send_one(1, mac(0), mac(1));
    net.ports[1].room.store(1, Relaxed);
    net.ports[0].to_send.lock().unwrap().push_back(segments.clone());
    assert_eq!(net.carry(0, 0), 1, "there is no room for all");
    assert!(net.ports[1].got() == segments[..1]);
    net.ports[1].room.store(usize::MAX, Relaxed);
    net.carry(0, 0);
    let rest = net.ports[1].got();
    assert_eq!(rest.len(), 1, "what waited is one frame");
    assert_eq!(rest[0].len(), 54 + 2 * SIZE);
}
