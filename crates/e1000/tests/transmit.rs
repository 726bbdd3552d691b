//! The transmit queue, with descriptors written by hand: what drivers write, and what none should.

mod common;

use common::{BUFFERS, Board, GUEST, SIZE, TX_RING, board, frame};
use etherparse::{Ipv4HeaderSlice, NetSlice, SlicedPacket, TransportSlice};
use ringroad_e1000::{
    DeviceConfig, Effects,
    descriptor::{
        Context,
        tx::{DD, DEXT, DTYP_DATA, EOP, IC, IDE, IFCS, IXSM, RS, SPECIAL, TSE, TXSM, VLE},
    },
    driver::Bus,
    registers::{self as reg, cause, ctrl, statistics, tctl},
};
use ringroad_frame::{
    Offload, Source,
    offload::{Checksum, HEADERS, Kind, checksum, segment::Checksums, segment::Segmenter},
};
use ringroad_mem::Region;
use std::sync::Arc;

const PLAIN: u64 = EOP | IFCS | RS;
const DATA: u64 = DEXT | DTYP_DATA | IFCS;
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 9];

fn started() -> Board {
    let mut board = board(DeviceConfig::default());
    board.start(64, 0);
    board
}

/// Where the n-th buffer of a test is.
fn at(n: usize) -> u64 {
    BUFFERS + n as u64 * 0x1_0000
}

#[test]
fn frames_of_one_and_of_several_descriptors() {
    let mut board = started();
    let sent: Vec<_> = [60, 14, 15, 19, 20, 1514, 4096, 4097, 9000].map(|len| frame(OTHER, len, len as u8)).into();
    let mut descriptors = Vec::new();
    for (n, frame) in sent.iter().enumerate() {
        board.set(at(n), frame);
        // The last ones in pieces, one of them empty.
        let cuts = if n < 5 { vec![] } else { vec![1, 9, 9, 700] };
        let mut from = 0;
        for cut in cuts {
            descriptors.push([at(n) + from, (cut - from) | IFCS]);
            from = cut;
        }
        descriptors.push([at(n) + from, (frame.len() as u64 - from) | PLAIN]);
    }
    board.send(0, &descriptors);
    assert!(board.effects.contains(Effects::TRANSMIT));
    let taken = board.take_all();
    assert_eq!(taken, sent.into_iter().map(|frame| (frame, Offload::NONE)).collect::<Vec<_>>());
    for (index, &[_, word]) in (0..).zip(&descriptors) {
        // What asks for a report gets it, nothing else is touched.
        assert_eq!(board.tx_status(index), if word & RS != 0 { word | DD } else { word });
    }
    assert_eq!(board.read(reg::TDH), descriptors.len() as u32);
    assert_eq!(board.read(reg::ICR), cause::TXDW | cause::TXQE);
    assert_eq!(board.read(statistics::GPTC), 9);
    // With their frame check sequences: 64; 18, 19, 23, 24; 1518; the long ones.
    let sizes: Vec<_> = (0..6).map(|size| board.read(statistics::PTC64 + 4 * size)).collect();
    assert_eq!(sizes, [5, 0, 0, 0, 0, 4]);
}

#[test]
fn frames_at_the_very_start_and_end_of_memory() {
    let mut board = started();
    let sent = frame(OTHER, 100, 1);
    let places = [GUEST + SIZE as u64 - 100, GUEST + SIZE as u64 - 300];
    places.iter().for_each(|&place| board.set(place, &sent));
    board.send(0, &places.map(|place| [place, 100 | PLAIN]));
    assert_eq!(board.take_all(), vec![(sent, Offload::NONE); 2]);
    // There is nothing in front of the first byte of memory, where the fast path would look.
    let mut board = started();
    let ring = TX_RING + 0x8000;
    for (register, value) in [(reg::TDBAL, ring as u32), (reg::TDLEN, 1024)] {
        board.write(register, value);
    }
    let sent = frame(OTHER, 100, 2);
    board.set(GUEST, &sent);
    board.set_word(ring, GUEST);
    board.set_word(ring + 8, 100 | PLAIN);
    board.write(reg::TDT, 1);
    assert_eq!(board.take_all(), vec![(sent, Offload::NONE)]);
}

#[test]
fn retained_frames_come_again_with_their_contexts() {
    let mut board = started();
    let (tcp, len) = (tcp4(100), 154);
    let plain = frame(OTHER, 80, 3);
    board.set(at(0), &plain);
    board.set(at(1), &tcp);
    let context = Context { tucss: 34, tucso: 50, ..Context::default() };
    let other = Context { tucss: 14, tucso: 18, ..Context::default() };
    let descriptors = [
        [at(0), 80 | PLAIN],
        context.words(RS),
        [at(1), len | DATA | EOP | RS | TXSM],
        [at(1), len | DATA | EOP | RS | TXSM],
        // Too short for a frame: dropped, and counted once.
        [at(1), 4 | PLAIN],
        other.words(0),
        [at(1), len | DATA | EOP | RS | TXSM],
        [at(0), 80 | PLAIN],
    ];
    board.send(0, &descriptors);
    let expected = [Offload::NONE, partial(34, 16), partial(34, 16), partial(14, 4), Offload::NONE];
    let mut refused = 0;
    // Frames that are delivered, and the descriptor at which the next one then begins.
    for (delivered, head) in [(0, 0), (1, 1), (0, 1), (1, 3), (0, 3), (1, 5), (0, 5), (1, 7), (1, 8)] {
        assert!(board.tx.take(&mut board.burst) > 0);
        refused += board.burst.refused();
        let offloads: Vec<_> = common::contents(&board.burst).into_iter().map(|(_, offload)| offload).collect();
        assert_eq!(offloads, expected[expected.len() - offloads.len()..]);
        board.tx.retain(&mut board.burst, delivered);
        assert_eq!(board.read(reg::TDH), head);
        let reported = (0..8).filter(|&index| board.tx_status(index) & DD != 0).count();
        // All but one descriptor ask for a report.
        assert_eq!(reported, if head > 5 { head as usize - 1 } else { head as usize });
    }
    assert_eq!((board.tx.counters().snapshot().runt, refused), (1, 1));
    assert_eq!((board.tx.counters().snapshot().frames, board.read(statistics::GPTC)), (5, 5));
}

fn partial(start: u16, offset: u16) -> Offload {
    Offload::partial(start, offset, 100).unwrap()
}

/// An Ethernet, IPv4 and TCP frame as a driver prepares it for segmentation: no lengths, no checksums, but the pseudo header's sum
/// without the length.
fn tcp4(payload: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..payload).map(|at| (at * 3) as u8).collect();
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], OTHER)
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .tcp(1000, 2000, 12345, 8000)
        .ack(77)
        .psh();
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &payload).unwrap();
    bytes
}

fn tcp6(payload: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..payload).map(|at| (at * 5) as u8).collect();
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], OTHER)
        .ipv6([0x20; 16], [0x30; 16], 64)
        .tcp(1000, 2000, 12345, 8000)
        .ack(77);
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &payload).unwrap();
    bytes
}

/// Ones' complement sum, word by word.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let mut sum = words.sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// What Linux' driver leaves to the device.
fn prepare(frame: &mut [u8], v6: bool) {
    if v6 {
        frame[18..20].fill(0);
        let pseudo = sum(&[&frame[22..54], &[0, 6]].concat());
        frame[70..72].copy_from_slice(&pseudo.to_be_bytes());
    } else {
        frame[16..18].fill(0);
        frame[24..26].fill(0);
        let pseudo = sum(&[&frame[26..34], &[0, 6]].concat());
        frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
    }
}

fn context(v6: bool, payload: usize, mss: u16) -> Context {
    let tucss = if v6 { 54 } else { 34 };
    Context {
        ipcss: 14,
        ipcso: 24,
        ipcse: if v6 { 0 } else { 33 },
        tucss,
        tucso: tucss + 16,
        tucse: 0,
        paylen: payload as u32,
        hdrlen: tucss + 20,
        mss,
        is_tcp: true,
        is_v4: !v6,
    }
}

/// Checks each frame with an independent implementation; returns all payloads.
fn check_tcp(frames: &[Vec<u8>], mss: usize) -> Vec<u8> {
    let mut data = Vec::new();
    for (index, frame) in frames.iter().enumerate() {
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        let Some(TransportSlice::Tcp(ref tcp)) = packet.transport else { panic!("{frame:x?}") };
        assert_eq!(tcp.sequence_number() as usize, 12345 + data.len());
        assert!(tcp.payload().len() == mss || index + 1 == frames.len());
        let network = if packet.vlan().is_some() { 18 } else { 14 };
        let expected = match packet.net.unwrap() {
            NetSlice::Ipv4(ip) => {
                let header = Ipv4HeaderSlice::from_slice(&frame[network..]).unwrap();
                assert_eq!(header.header_checksum(), header.to_header().calc_header_checksum());
                assert_eq!(usize::from(header.total_len()), frame.len() - network);
                tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination()).unwrap()
            }
            NetSlice::Ipv6(ip) => {
                assert_eq!(usize::from(ip.header().payload_length()), frame.len() - network - 40);
                tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()).unwrap()
            }
            NetSlice::Arp(_) => panic!(),
        };
        assert_eq!(tcp.checksum(), expected);
        data.extend(tcp.payload());
    }
    data
}

/// Cuts a frame, or completes its checksum: what goes over a link.
fn on_link((mut frame, offload): (Vec<u8>, Offload)) -> Vec<Vec<u8>> {
    let Some(gso) = offload.gso() else {
        checksum::complete(&mut frame, offload);
        return vec![frame];
    };
    let head = &frame[..frame.len().min(HEADERS)];
    let mut segments = Segmenter::new(gso, head, frame.len(), Checksums::Complete, 0).unwrap();
    let mut place = vec![0; 70_000];
    let mut all = Vec::new();
    while let Some(segment) =
        segments.next(&mut place, |at, target| target.copy_from_slice(&frame[at..at + target.len()]))
    {
        all.push(place[..segment.len].to_vec());
    }
    all
}

#[test]
fn segmentation() {
    for (v6, payload, mss, tagged, cuts) in [
        (false, 10_000, 1448, false, vec![]),
        (false, 10_000, 1448, true, vec![54]),
        (false, 60_000, 536, false, vec![20, 54, 1000, 5000]),
        (true, 10_000, 1428, false, vec![30]),
        (true, 3000, 1428, true, vec![74, 75]),
        // All in one segment: nothing to cut.
        (false, 500, 1448, false, vec![54]),
        (true, 500, 1448, true, vec![]),
    ] {
        let mut board = started();
        let mut frame = if v6 { tcp6(payload) } else { tcp4(payload) };
        let original = frame.clone();
        prepare(&mut frame, v6);
        board.set(at(0), &frame);
        if tagged {
            board.write(reg::CTRL, ctrl::SLU | ctrl::VME);
        }
        let vlan = if tagged { VLE | 0x6123 << SPECIAL } else { 0 };
        let options = if v6 { TXSM } else { IXSM | TXSM };
        let mut descriptors = vec![context(v6, payload, mss).words(TSE)];
        let mut from = 0;
        for cut in cuts.into_iter().chain([frame.len()]) {
            let last = if cut == frame.len() { EOP | RS } else { 0 };
            descriptors.push([at(0) + from as u64, (cut - from) as u64 | DATA | TSE | options | vlan | last]);
            from = cut;
        }
        board.send(0, &descriptors);
        let mut taken = board.take_all();
        assert_eq!(taken.len(), 1, "{v6} {payload} {mss} {tagged}");
        let (whole, offload) = taken.pop().unwrap();
        let segments = payload.div_ceil(mss.into());
        assert_eq!(
            offload.gso().map(|gso| gso.kind),
            (segments > 1).then_some(if v6 { Kind::Tcp6 } else { Kind::Tcp4 })
        );
        if tagged {
            assert_eq!(whole[12..16], [0x81, 0x00, 0x61, 0x23]);
        }
        let frames = on_link((whole, offload));
        assert_eq!(frames.len(), segments);
        assert_eq!(check_tcp(&frames, mss.into()), original[if v6 { 74 } else { 54 }..]);
        assert_eq!((board.read(statistics::GPTC) as usize, board.read(statistics::TSCTC)), (segments, 1));
        let octets = frames.iter().map(|frame| frame.len() + 4).sum::<usize>();
        assert_eq!(board.read(statistics::GOTCL) as usize, octets);
    }
}

#[test]
fn checksums_of_both_headers() {
    for tagged in [false, true] {
        let mut board = started();
        let original = tcp4(333);
        let mut frame = original.clone();
        frame[24..26].fill(0);
        let pseudo = sum(&[&frame[26..34], &[0, 6], &(333u16 + 20).to_be_bytes()].concat());
        frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
        board.set(at(0), &frame);
        board.write(reg::CTRL, ctrl::SLU | if tagged { ctrl::VME } else { 0 });
        let len = frame.len() as u64;
        let vlan = if tagged { VLE | 5 << SPECIAL } else { 0 };
        let whole = context(false, 0, 0);
        // The sum ends at a byte that is the frame's last one, or before it: then nobody else can complete it.
        let exact = Context { tucse: len as u16 - 1, ..whole };
        board.send(0, &[whole.words(0), [at(0), len | DATA | EOP | IXSM | TXSM | vlan]]);
        let sent = board.take_all();
        board.send(2, &[exact.words(0), [at(0), len | DATA | EOP | IXSM | TXSM | vlan]]);
        let again = board.take_all();
        assert_eq!(sent, again);
        assert!(matches!(sent[0].1.checksum(), Checksum::Partial { .. }));
        let frames = on_link(sent[0].clone());
        assert_eq!(check_tcp(&frames, 333), original[54..]);
        let short = Context { tucse: 60, ..whole };
        board.send(4, &[short.words(0), [at(0), len | DATA | EOP | TXSM]]);
        let (mut expected, (taken, offload)) = (frame.clone(), board.take_all().pop().unwrap());
        let checksum = !sum(&frame[34..61]);
        expected[50..52].copy_from_slice(&checksum.to_be_bytes());
        assert_eq!((taken, offload), (expected, Offload::NONE));
    }
}

#[test]
fn a_checksum_by_a_legacy_descriptor() {
    let mut board = started();
    let sent = frame(OTHER, 100, 1);
    board.set(at(0), &sent);
    // CSO 30, CSS 20; then a field in front of the sum, which cannot travel and is filled in at once; then one behind the end.
    let insert = |cso: u64, css: u64| [at(0), 100 | PLAIN | IC | cso << 16 | css << 40];
    board.send(0, &[insert(30, 20), insert(16, 20), insert(99, 20)]);
    let mut filled = sent.clone();
    filled[16..18].copy_from_slice(&(!sum(&sent[20..])).to_be_bytes());
    let expected = [(sent.clone(), partial(20, 10)), (filled, Offload::NONE), (sent, Offload::NONE)];
    assert_eq!(board.take_all(), expected);
}

#[test]
fn tags_and_frame_check_sequences() {
    let mut board = started();
    let sent = frame(OTHER, 64, 1);
    board.set(at(0), &sent);
    board.send(0, &[[at(0), 64 | PLAIN | VLE | 7 << SPECIAL], [at(0), 64 | EOP | RS]]);
    // Without VME there is no tag; without IFCS the last four bytes are the frame check sequence.
    assert_eq!(board.take_all(), [(sent.clone(), Offload::NONE), (sent[..60].to_vec(), Offload::NONE)]);
    board.write(reg::CTRL, ctrl::SLU | ctrl::VME);
    board.write(reg::VET, 0x88a8);
    board.send(2, &[[at(0), 20 | IFCS], [at(0) + 20, 44 | PLAIN | VLE | 7 << SPECIAL]]);
    let tagged = [&sent[..12], &[0x88, 0xa8, 0, 7], &sent[12..]].concat();
    assert_eq!(board.take_all(), [(tagged, Offload::NONE)]);
}

#[test]
fn what_cannot_be_cut_is_dropped() {
    let mut frame = tcp4(5000);
    prepare(&mut frame, false);
    let good = context(false, 5000, 1448);
    let bad = [
        Context { mss: 0, ..good },
        Context { mss: 7, ..good },
        Context { hdrlen: 255, ..good },
        Context { hdrlen: 20, ..good },
        Context { ipcss: 200, ..good },
        Context { tucss: 250, tucso: 255, ..good },
        Context { tucso: 10, ..good },
        Context { is_v4: false, ..good },
        Context { is_tcp: false, ..good },
        Context::default(),
    ];
    let mut board = started();
    board.set(at(0), &frame);
    let len = frame.len() as u64;
    for (n, context) in (0..).zip(bad) {
        let first = (3 * n) % 63;
        board.send(
            first,
            &[context.words(TSE), [at(0), 30 | DATA | TSE], [at(0) + 30, (len - 30) | DATA | TSE | EOP | RS]],
        );
        assert_eq!(board.take_all(), [], "{context:?}");
        assert_eq!(board.tx.counters().snapshot().offload, u64::from(n) + 1, "{context:?}");
        assert_ne!(board.tx_status(first + 2) & DD, 0, "the driver gets its buffers back");
    }
    // Header longer than the frame.
    board.send(30, &[good.words(TSE), [at(0), 40 | DATA | TSE | EOP | RS]]);
    assert_eq!(board.take_all(), []);
    assert_eq!(board.tx.counters().snapshot().offload, 11);
    // The queue goes on.
    board.send(32, &[[at(0), 100 | PLAIN]]);
    assert_eq!(board.take_all().len(), 1);
    assert!(board.tx.take_fault().is_none());
}

#[test]
fn descriptors_that_never_end() {
    let mut board = started();
    // Contexts only.
    board.send(0, &[Context::default().words(RS); 63]);
    assert_eq!(board.take_all(), []);
    assert_eq!(board.read(reg::TDH), 63);
    assert_ne!(board.tx_status(62) & DD, 0);
    // A frame without end, which fills the ring.
    board.write(reg::TDH, 0);
    board.send(0, &[[at(0), 100 | IFCS | RS]; 63]);
    assert_eq!(board.take_all(), []);
    assert_eq!((board.read(reg::TDH), board.tx.counters().snapshot().oversize), (63, 1));
    // Up to its end it is no frame; what follows is.
    board.send(63, &[[at(0), 100 | PLAIN]]);
    board.write(reg::TDT, 0);
    assert_eq!(board.take_all(), []);
    board.send(0, &[[at(0), 100 | PLAIN]]);
    assert_eq!(board.take_all().len(), 1);
    // Half a frame waits for its other half: there is nothing to do until the tail moves, and nobody keeps the memory for it.
    board.send(1, &[[at(0), 50 | IFCS]]);
    assert!(!board.tx.is_idle());
    assert_eq!(board.take_all(), []);
    assert!(board.tx.is_idle());
    assert_eq!((board.read(reg::TDH), Arc::strong_count(board.tx.memory().unwrap())), (1, 1));
    board.send(2, &[[at(0) + 50, 50 | PLAIN]]);
    assert!(!board.tx.is_idle());
    assert_eq!(board.take_all(), [(board.get(at(0), 100), Offload::NONE)]);
}

#[test]
fn frames_that_are_dropped_after_they_were_read_are_work_too() {
    let mut board = started();
    board.tx.limit(1522);
    // To the end of the longest frame there is, which nobody may send.
    let context = Context { tucss: 34, tucso: 50, tucse: u16::MAX, ..Context::default() };
    let mut descriptors = vec![context.words(0)];
    descriptors.extend([[at(0), 65_000 | DATA | EOP | RS | TXSM]; 60]);
    board.send(0, &descriptors);
    assert_eq!(board.take(), []);
    // 256 KiB, and the one that was more.
    assert_eq!(board.read(reg::TDH), 1 + 5);
    assert_eq!(board.take_all(), []);
    let counters = board.tx.counters().snapshot();
    assert_eq!((board.read(reg::TDH), counters.oversize + counters.offload), (61, 60));
}

#[test]
fn what_is_too_long_or_too_short_is_dropped() {
    let mut board = started();
    board.set(at(0), &frame(OTHER, 60_000, 1));
    board.send(0, &[[at(0), 13 | PLAIN], [at(0), PLAIN], [at(0), 17 | EOP | RS]]);
    assert_eq!(board.take_all(), []);
    assert_eq!(board.tx.counters().snapshot().runt, 3);
    board.send(3, &[[at(0), 40_000 | DATA], [at(0), 40_000 | DATA | EOP | RS], [at(0), 0xf_ffff | DATA | EOP | RS]]);
    assert_eq!(board.take_all(), []);
    board.tx.limit(1522);
    board.send(6, &[[at(0), 1523 | PLAIN], [at(0), 1522 | PLAIN]]);
    assert_eq!(board.take_all().len(), 1);
    assert_eq!(board.tx.counters().snapshot().oversize, 3);
    assert_eq!(board.read(reg::TDH), 8);
}

#[test]
fn a_fault_stops_the_queue_until_reset() {
    for address in [0x7f00_0000_0000, GUEST + SIZE as u64 - 99, 0, u64::MAX - 10, 0xffff_ffff_0000_0000] {
        let mut board = started();
        board.set(at(0), &frame(OTHER, 100, 1));
        board.send(0, &[[at(0), 100 | PLAIN], [address, 100 | PLAIN], [at(0), 100 | PLAIN]]);
        assert_eq!(board.take_all().len(), 1, "what comes before is sent");
        let text = board.tx.take_fault().unwrap().to_string();
        let expected = format!("descriptor 1 at {address:#x} + 100 lies outside guest memory (1 regions)");
        assert!(text.starts_with(&expected), "{text}");
        assert_eq!((board.tx.take_fault(), board.tx.counters().snapshot().faults), (None, 1));
        assert_eq!(board.read(reg::TDH), 1);
        board.write(reg::TCTL, 0);
        board.write(reg::TCTL, tctl::EN);
        assert_eq!(board.take_all(), [], "only a reset helps");
        board.write(reg::CTRL, ctrl::RST);
        board.start(64, 0);
        board.send(0, &[[at(0), 100 | PLAIN]]);
        assert_eq!(board.take_all().len(), 1);
    }
}

#[test]
fn rings_that_are_none() {
    // Outside memory, half outside, of no length, longer than memory.
    for (base, len) in
        [(0x7f00_0000_0000, 1024), (GUEST + SIZE as u64 - 512, 1024), (TX_RING, 0xf_ff80), (u64::MAX, 128)]
    {
        let mut board = started();
        for (register, value) in [(reg::TDBAL, base as u32), (reg::TDBAH, (base >> 32) as u32), (reg::TDLEN, len)] {
            board.write(register, value);
        }
        board.write(reg::TDT, 1);
        let fits = base == TX_RING;
        board.take_all();
        assert_eq!(board.tx.take_fault().is_some(), !fits, "{base:#x} + {len}");
    }
    // The device's own memory is none of the guest's, whatever the guest has.
    for regions in [0, 1] {
        let mut board = started();
        let own = 0xffff_ffff_0000_0000u64;
        let memory = if regions == 0 { Default::default() } else { board.memory.clone() };
        board.tx.set_memory(Some(memory)).unwrap();
        for (register, value) in [(reg::TDBAL, 0), (reg::TDBAH, (own >> 32) as u32), (reg::TDT, 1)] {
            board.write(register, value);
        }
        assert_eq!(board.take_all(), []);
        assert_eq!(board.tx.take_fault().is_some(), regions == 1);
    }
    // Length 0, and not a multiple of 128: the low bits are not stored.
    let mut board = started();
    board.write(reg::TDLEN, 0);
    board.write(reg::TDT, 5);
    assert_eq!(board.take_all(), []);
    board.write(reg::TDLEN, 1024 + 127);
    assert_eq!(board.read(reg::TDLEN), 1024);
    // Tail and head beyond the ring.
    for (head, tail) in [(0, 64), (0, 0xffff), (64, 0), (0xffff, 1)] {
        board.write(reg::TDH, head);
        board.write(reg::TDT, tail);
        assert_eq!(board.take_all(), []);
    }
    board.write(reg::TDH, 0);
    board.set(at(0), &frame(OTHER, 100, 1));
    board.send(0, &[[at(0), 100 | PLAIN]]);
    assert_eq!(board.take_all().len(), 1);
    assert!(board.tx.take_fault().is_none());
}

#[test]
fn nothing_moves_without_permission() {
    let mut board = started();
    board.set(at(0), &frame(OTHER, 100, 1));
    type Switch = fn(&mut Board, bool) -> Effects;
    let switches: [Switch; 4] = [
        |board, on| board.device.config_write(common::COMMAND, &[if on { 7 } else { 3 }, 0], 0),
        |board, on| board.device.write(reg::TCTL.into(), &(if on { tctl::EN } else { 0 }).to_le_bytes(), 0),
        |board, on| board.device.set_link(on, 0),
        // D3 and D0.
        |board, on| board.device.config_write(0xe0, &[if on { 0 } else { 3 }], 0),
    ];
    for (n, switch) in switches.into_iter().enumerate() {
        assert!(switch(&mut board, false).contains(Effects::QUIESCE));
        board.send(n as u32, &[[at(0), 100 | PLAIN]]);
        assert_eq!(board.take_all(), []);
        let effects = switch(&mut board, true);
        if n < 3 {
            assert!(effects.contains(Effects::TRANSMIT));
            assert_eq!(board.take_all().len(), 1);
        } else {
            assert!(effects.contains(Effects::QUIESCE), "waking up is a reset");
            assert_eq!((board.take_all(), board.read(reg::TDT)), (vec![], 0));
        }
    }
    let mut board = started();
    board.set(at(0), &frame(OTHER, 100, 1));
    board.send(0, &[[at(0), 100 | PLAIN]]);
    let memory = board.memory.clone();
    board.tx.set_memory(None).unwrap();
    assert_eq!(board.take_all(), []);
    board.tx.set_memory(Some(memory)).unwrap();
    assert_eq!(board.take_all().len(), 1);
}

#[test]
fn a_reset_in_mid_burst() {
    let mut board = started();
    board.set(at(0), &frame(OTHER, 100, 1));
    board.send(0, &[[at(0), 100 | PLAIN | IDE]; 10]);
    assert_eq!(board.tx.take(&mut board.burst), 10);
    // The host calls `quiesce` only when the burst is over.
    let effects = board.device.write(reg::CTRL.into(), &ctrl::RST.to_le_bytes(), 0);
    assert!(effects.contains(Effects::QUIESCE));
    board.tx.done(&mut board.burst);
    board.act(effects);
    assert_eq!((board.read(reg::TDH), board.read(reg::TDT)), (0, 0), "the burst does not move the head any more");
    board.start(64, 0);
    board.send(0, &[[at(0), 100 | PLAIN]; 3]);
    assert_eq!(board.take_all().len(), 3);
    assert_eq!(board.read(reg::TDH), 3);
}

#[test]
fn memory_is_released() {
    let mut board = started();
    board.set(at(0), &frame(OTHER, 100, 1));
    board.send(0, &[[at(0), 100 | PLAIN]]);
    assert_eq!(board.take().len(), 1);
    let region = board.memory.regions()[0].clone();
    board.tx.set_memory(None).unwrap();
    board.rx.set_memory(None);
    board.memory = Default::default();
    assert_eq!(Arc::strong_count(&region), 1);
}

#[test]
fn the_cache_of_a_former_memory_names_nothing() {
    let mut board = started();
    let high = 0x10_0000_0000;
    let region = Region::private(4096, high).unwrap();
    let table = Arc::new(board.memory.with(region.clone()).unwrap());
    region.span(0, 100).unwrap().write(&frame(OTHER, 100, 1));
    board.tx.set_memory(Some(table)).unwrap();
    board.send(0, &[[high, 100 | PLAIN]]);
    assert_eq!(board.take_all().len(), 1);
    board.tx.set_memory(Some(board.memory.clone())).unwrap();
    // In the place of that region is now the device's own.
    board.send(1, &[[0xffff_ffff_0000_0000 + 12, 100 | PLAIN]]);
    assert_eq!(board.take_all(), []);
    assert!(board.tx.take_fault().is_some());
    // A guest's region that overlaps it is refused.
    let table = board.memory.with(Region::private(4096, 0xffff_ffff_0000_1000).unwrap()).unwrap();
    assert!(board.tx.set_memory(Some(Arc::new(table))).is_err());
    assert_eq!(board.take_all(), []);
}
