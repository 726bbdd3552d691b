//! Frames whose sender left work to the receiver: the driver gets what would come from a link.

mod common;

use common::{Board, GUEST, Pool, RX_RING, SIZE, board, frame, received};
use proptest::prelude::*;
use ringroad_e1000::{
    DeviceConfig,
    descriptor::rx::{DD, EOP, IPCS, IXSM, SPECIAL, TCPCS, VP},
    driver::Bus,
    registers::{self as reg, ctrl, rctl, rxcsum, statistics},
};
use ringroad_frame::{
    ALL, Offload, Sink,
    offload::{Claim, HEADERS, Kind, checksum},
};
use ringroad_wire::ethernet::MacAddr;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const TUNNEL_FREE: [Kind; 6] = [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6, Kind::Fragments4, Kind::Fragments6];

fn started(count: u32, bits: u32) -> Board {
    let mut board = board(DeviceConfig { mac: MacAddr(MAC), ..DeviceConfig::default() });
    board.start(count, bits | rctl::SECRC);
    board.write(reg::RXCSUM, rxcsum::IPOFL | rxcsum::TUOFL);
    board
}

fn is_v4(kind: Kind) -> bool {
    matches!(kind, Kind::Tcp4 | Kind::Udp4 | Kind::Fragments4)
}

/// A frame with this much data, its checksum left to the receiver. Also returns where it starts and its field.
fn unfinished(kind: Kind, data: usize, tag: Option<u16>) -> (Vec<u8>, (u16, u16)) {
    let payload: Vec<u8> = (0..data).map(|at| (at * 7 + (at >> 8)) as u8).collect();
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], MAC);
    let builder = if is_v4(kind) {
        builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
    } else {
        builder.ipv6([0xfd; 16], [0xfe; 16], 64)
    };
    let mut bytes = Vec::new();
    let network = if is_v4(kind) { 20 } else { 40 };
    let header = match kind {
        Kind::Tcp4 | Kind::Tcp6 => {
            builder.tcp(80, 81, 1000, 100).psh().ack(5).write(&mut bytes, &payload).unwrap();
            20
        }
        _ => {
            builder.udp(80, 81).write(&mut bytes, &payload).unwrap();
            8
        }
    };
    let mut start = 14 + network;
    assert_eq!(bytes.len(), start + header + data);
    // What is summed besides the pseudo header is taken out again.
    let field = if header == 20 { 16 } else { 6 };
    bytes[start + field..start + field + 2].fill(0);
    let addresses = if is_v4(kind) { 8 } else { 32 };
    let words = bytes[start - addresses..start].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum = words.sum::<u32>() + if header == 20 { 6 } else { 17 } + (header + data) as u32;
    let sum = (sum & 0xffff) + (sum >> 16);
    let pseudo = ((sum & 0xffff) + (sum >> 16)) as u16;
    bytes[start + field..start + field + 2].copy_from_slice(&pseudo.to_be_bytes());
    if let Some(tag) = tag {
        bytes.splice(12..12, [[0x81, 0], tag.to_be_bytes()].concat());
        start += 4;
    }
    (bytes, (start as u16, field as u16))
}

/// The same, to be cut into segments with this much data.
fn whole(kind: Kind, data: usize, size: u16, tag: Option<u16>) -> (Vec<u8>, Offload) {
    let (bytes, checksum) = unfinished(kind, data, tag);
    let claim = Claim { kind, ecn: false, size, checksum };
    let offload = Offload::segmented(claim, &bytes[..bytes.len().min(HEADERS)], bytes.len()).unwrap();
    (bytes, offload)
}

/// A complete checksum, by `etherparse`.
fn assert_finished(kind: Kind, found: &[u8]) {
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};
    let packet = SlicedPacket::from_ethernet(found).unwrap();
    if let Some(NetSlice::Ipv4(ip)) = &packet.net {
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum());
    }
    match packet.transport {
        Some(TransportSlice::Tcp(_) | TransportSlice::Udp(_)) => {
            assert_eq!(checksum::verify(found), Offload::VALID, "{kind:?}");
        }
        _ => assert!(kind.is_fragments(), "{kind:?}"),
    }
}

/// The data of a frame that begins with these many bytes of headers.
fn data(found: &[u8], headers: usize) -> &[u8] {
    &found[headers..]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn segments_are_those_of_a_link(
        kind in prop::sample::select(TUNNEL_FREE.to_vec()),
        len in 1..20_000usize,
        size in 300..1400u16,
        tag in prop::option::of(1..4095u16),
        strips: bool,
        buffer in prop::sample::select(vec![(2048, 0), (1024, 1), (512, 2), (256, 3)]),
    ) {
        let (bytes, offload) = whole(kind, len, size, tag);
        let mut board = started(256, buffer.1 << rctl::BSIZE);
        if strips {
            board.write(reg::CTRL, ctrl::SLU | ctrl::VME);
        }
        let before = frame(MAC, 60, 1);
        prop_assert_eq!(board.put(&[(before.clone(), Offload::NONE), (bytes.clone(), offload), (before.clone(), Offload::NONE)]), 3);
        let (frames, _) = received(&board, 0, 256, buffer.0);
        let count = frames.len() - 2;
        prop_assert_eq!(count, offload.frames(bytes.len()));
        prop_assert_eq!(&frames[0].0, &before);
        prop_assert_eq!(&frames[count + 1].0, &before);
        let stripped = tag.filter(|_| strips);
        let tags = usize::from(tag.is_some() && stripped.is_none()) * 4;
        let mut sum = Vec::new();
        for (found, word) in &frames[1..=count] {
            // Short ones are padded.
            let network = 14 + tags;
            let v4 = is_v4(kind);
            let total = if v4 {
                network + usize::from(u16::from_be_bytes([found[network + 2], found[network + 3]]))
            } else {
                network + 40 + usize::from(u16::from_be_bytes([found[network + 4], found[network + 5]]))
            };
            prop_assert_eq!(found.len(), total.max(if stripped.is_some() { 56 } else { 60 }));
            assert_finished(kind, &found[..total]);
            let fragment = count > 1 && kind.is_fragments();
            let known = if fragment { IXSM } else if v4 { IPCS | TCPCS } else { TCPCS };
            let tagged = stripped.map_or(0, |tag| VP | u64::from(tag) << SPECIAL);
            prop_assert_eq!(*word, DD | EOP | known | tagged);
            let transport = network + if v4 { 20 } else { 40 };
            let headers = match kind {
                Kind::Tcp4 | Kind::Tcp6 => transport + 20,
                Kind::Udp4 | Kind::Udp6 => transport + 8,
                _ if !fragment => transport + 8,
                _ if v4 => transport,
                _ => transport + 8,
            };
            sum.extend_from_slice(data(&found[..total], headers));
        }
        let sent = &bytes[bytes.len() - len..];
        // The first fragment has the UDP header, too.
        prop_assert!(sum.ends_with(sent) && sum.len() - len <= 8, "other data");
        prop_assert_eq!(board.read(statistics::GPRC) as usize, frames.len());
        prop_assert_eq!(board.rx.counters().snapshot().frames as usize, frames.len());
    }
}

#[test]
fn a_checksum_is_completed_and_known_to_be_valid() {
    for kind in [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6] {
        for len in [0, 1, 18, 1400] {
            let (bytes, (start, offset)) = unfinished(kind, len, None);
            let offload = Offload::partial(start, offset, bytes.len()).unwrap();
            let mut board = started(8, 0);
            assert_eq!(board.put(&[(bytes.clone(), offload)]), 1);
            let (frames, _) = received(&board, 0, 8, 2048);
            let [(found, word)] = &frames[..] else { panic!("{} frames", frames.len()) };
            assert_finished(kind, &found[..bytes.len()]);
            assert_eq!(*word, DD | EOP | if is_v4(kind) { IPCS | TCPCS } else { TCPCS });
            assert_eq!(found[bytes.len() - len..bytes.len()], bytes[bytes.len() - len..]);
        }
    }
}

#[test]
fn a_frame_waits_until_there_is_room_for_all_of_it() {
    let mut board = started(32, 0);
    let frames = [whole(Kind::Tcp4, 10_000, 1000, None), whole(Kind::Tcp4, 20_000, 1000, None)];
    assert!(board.rx.cuts() && board.rx.has_room(1));
    let all = [frames[0].clone(), frames[0].clone(), frames[0].clone(), frames[0].clone(), frames[1].clone()];
    assert_eq!(board.offer(&all), 3, "31 descriptors");
    assert!(!board.rx.has_room(1));
    board.write(reg::RDT, 7);
    assert!(!board.rx.has_room(1), "9 are fewer than 10");
    board.write(reg::RDT, 8);
    assert!(board.rx.has_room(1));
    assert_eq!(board.offer(&all[3..]), 1);
    // One that needs more than half of the ring gets that, and then the rest.
    board.write(reg::RDT, 23);
    assert_eq!(board.offer(&all[4..]), 0);
    assert_eq!(board.rx.counters().snapshot().frames, 40);
    board.write(reg::RDT, 24);
    assert_eq!(board.offer(&all[4..]), 0);
    assert_eq!(board.rx.counters().snapshot().frames, 40 + 16);
    assert!(!board.rx.has_room(1));
    board.write(reg::RDT, 28);
    assert!(board.rx.has_room(1));
    assert_eq!((board.offer(&all[4..]), board.read(statistics::MPC)), (1, 0));
    assert_eq!(board.rx.counters().snapshot().frames, 40 + 20);
    assert_eq!(board.rx.counters().snapshot().full, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Boot loaders, which keep one buffer, or eight: they get all segments once and in order, however many at a time, also if two senders
    /// take turns.
    #[test]
    fn a_driver_with_few_buffers_gets_all(
        kind in prop::sample::select(TUNNEL_FREE.to_vec()),
        len in 1..8000usize,
        keeps in 1..12u32,
        turns in prop::collection::vec(0..3usize, 500),
    ) {
        let mut sources = [vec![whole(kind, len, 1000, None)], vec![whole(Kind::Tcp4, 9000, 1001, None)]];
        let mut all = started(256, 0);
        let mut expected = sources.clone().map(|frames| {
            let before = all.read(reg::RDH);
            assert_eq!(all.put(&frames), 1);
            received(&all, before, 256, 2048).0.into_iter().map(|(frame, _)| frame).collect::<Vec<_>>()
        });
        let mut board = started(64, 0);
        board.write(reg::RCTL, 0);
        board.write(reg::RDT, keeps);
        board.write(reg::RCTL, rctl::EN | rctl::SECRC);
        let between = frame(MAC, 70, 2);
        let (mut found, mut next) = (Vec::new(), 0);
        for turn in turns {
            match sources.get_mut(turn) {
                Some(frames) if !frames.is_empty() && board.offer(frames) == 1 => frames.clear(),
                Some(_) => {}
                None => _ = board.put(&[(between.clone(), Offload::NONE)]),
            }
            let (frames, end) = received(&board, next, 64, 2048);
            found.extend(frames.into_iter().map(|(frame, _)| frame).filter(|found| *found != between));
            next = end;
            // What the driver sets up meanwhile is no reason to start over.
            board.write(reg::MTA, turn as u32);
            board.write(reg::RDT, (next + keeps) % 64);
        }
        prop_assert!(sources.iter().all(Vec::is_empty));
        // Those of IPv6 are numbered at random, all of a datagram alike.
        let ident = |frame: &[u8]| frame.get(58..62).filter(|_| kind == Kind::Fragments6 && frame[20] == 44).map(<[u8]>::to_vec);
        let mut idents: Vec<_> = found.iter().filter_map(|frame| ident(frame)).collect();
        idents.dedup();
        prop_assert!(idents.len() <= 1, "{:x?}", idents);
        let plain = |frame: &mut Vec<u8>| {
            if ident(frame).is_some() {
                frame[58..62].fill(0);
            }
        };
        found.iter_mut().chain(expected.iter_mut().flatten()).for_each(plain);
        for expected in &expected {
            let these: Vec<_> = found.iter().filter(|&frame| expected.contains(frame)).collect();
            prop_assert!(these.into_iter().eq(expected), "other segments, or in another order");
        }
        prop_assert_eq!(found.len(), expected.concat().len());
    }
}

#[test]
fn a_frame_that_is_dropped_meanwhile_is_not_gone_on_with() {
    let mut board = started(64, 0);
    board.write(reg::RCTL, 0);
    board.write(reg::RDT, 4);
    board.write(reg::RCTL, rctl::EN | rctl::SECRC);
    let frames = [whole(Kind::Tcp4, 10_000, 1000, None)];
    assert_eq!((board.offer(&frames), board.rx.counters().snapshot().frames), (0, 4));
    // Waited for too long: what there is room for, and no more.
    board.write(reg::RDT, 7);
    assert_eq!((board.put(&frames), board.rx.counters().snapshot().frames), (0, 7));
    assert_eq!(board.rx.counters().snapshot().full, 1);
    board.write(reg::RDT, 20);
    assert_eq!(
        (board.offer(&frames), board.rx.counters().snapshot().frames),
        (1, 17),
        "sent again, from its beginning"
    );
}

#[test]
fn without_waiting_what_has_no_room_is_dropped() {
    let mut board = started(16, 0);
    let frames = [whole(Kind::Tcp4, 20_000, 1000, None), (frame(MAC, 60, 1), Offload::NONE)];
    assert_eq!(board.put(&frames), 0);
    assert_eq!(board.rx.counters().snapshot().frames, 15);
    assert_eq!(board.rx.counters().snapshot().full, 2);
}

#[test]
fn what_the_driver_does_not_receive_is_dropped() {
    // Segments longer than the link's frames, and than the longest ones of this card.
    for (bits, size) in [(0, 1465), (rctl::LPE, 16_400)] {
        let mut board = started(64, bits);
        assert_eq!(board.put(&[whole(Kind::Tcp4, 40_000, size, None)]), 0);
        assert_eq!(board.rx.counters().snapshot().oversize, 1);
        assert_eq!(board.put(&[whole(Kind::Tcp4, 40_000, 1464, None)]), 1);
    }
    let mut board = started(64, 0);
    let (mut bytes, offload) = whole(Kind::Udp6, 4000, 1000, None);
    bytes[0] = 2;
    assert_eq!(board.put(&[(bytes, offload)]), 0);
    assert_eq!(board.rx.counters().snapshot().filtered, 1);
    assert_eq!(board.read(statistics::GPRC), 0);
}

#[test]
fn headers_that_change_behind_their_check_are_not_believed() {
    let mut board = started(64, 0);
    let frames = [whole(Kind::Tcp4, 4000, 1000, None), (frame(MAC, 60, 1), Offload::NONE)];
    // A TCP header without end, another protocol, a fragment.
    for (at, byte) in [(46, 0), (23, 17), (20, 0x20)] {
        let pool = Pool::new(&frames);
        pool.write(0, at, &[byte]);
        assert_eq!(board.rx.put(&pool.burst, &ALL[..2]), 1, "the other one is received");
    }
    assert_eq!(board.rx.counters().snapshot().offload, 3);
    assert_eq!(board.rx.counters().snapshot().frames, 3);
}

#[test]
fn a_buffer_outside_memory_ends_the_frame() {
    let mut board = started(64, 0);
    board.set_word(RX_RING + 32, GUEST + SIZE as u64 - 100);
    assert_eq!(board.put(&[whole(Kind::Tcp4, 4000, 1000, None), (frame(MAC, 60, 1), Offload::NONE)]), 0);
    assert_eq!(received(&board, 0, 64, 2048).0.len(), 2, "what comes before is received");
    let text = board.rx.take_fault().unwrap().to_string();
    assert!(text.starts_with("descriptor 2 at "), "{text}");
    assert_eq!(board.rx.counters().snapshot().stopped, 2);
}
