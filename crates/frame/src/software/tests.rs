use super::*;
use crate::offload::{Checksum, Claim, Kind, Refused, SEGMENTS};
use etherparse::{Ipv4HeaderSlice, NetSlice, SlicedPacket, TransportSlice};

const CSUM: Support = Support::CHECKSUM;

/// A receiver that keeps what it gets.
pub(in crate::software) struct Recorder {
    pub support: Support,
    pub cuts: bool,
    /// It drops what is more.
    pub room: usize,
    pub got: Vec<(Vec<u8>, Offload)>,
    /// Number of frames of each call.
    pub calls: Vec<usize>,
}

impl Recorder {
    pub fn new(support: Support) -> Recorder {
        Recorder { support, cuts: false, room: usize::MAX, got: Vec::new(), calls: Vec::new() }
    }
}

impl Sink for Recorder {
    fn support(&self) -> Support {
        self.support
    }

    fn cuts(&self) -> bool {
        self.cuts
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        assert!(!which.is_empty() && which.is_sorted_by(|a, b| a < b), "{which:?}");
        self.calls.push(which.len());
        let accepted = which.len().min(self.room);
        self.room -= accepted;
        for &index in &which[..accepted] {
            let offload = burst.offload(index.into());
            assert!(self.support.contains(offload.needs()), "{offload:?}");
            self.got.push((forwarded(burst, index.into()), offload));
        }
        accepted
    }
}

/// A frame as sinks copy it: the head, then what follows. `Burst::copy` must agree.
fn forwarded(burst: &Burst, index: usize) -> Vec<u8> {
    let (head, len) = burst.frames()[index].head();
    let mut all = head[HEADROOM..len].to_vec();
    for piece in burst.rest(index) {
        let at = all.len();
        all.resize(at + piece.len(), 0);
        piece.read(&mut all[at..]);
    }
    let mut copy = vec![0; all.len() + 1];
    assert_eq!(burst.copy(index, 0, &mut copy), all.len());
    assert!(copy[..all.len()] == all);
    all
}

/// A TCP frame to be finished, and what is left to do to it. `size`: payload of a segment; 0: only the checksum.
pub(in crate::software) fn tcp(kind: Kind, vlan: bool, seed: usize, payload: usize, size: u16) -> (Vec<u8>, Offload) {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if vlan {
        frame.extend([0x81, 0x00, 0x20, 5]);
    }
    if kind == Kind::Tcp4 {
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend((40 + payload as u16).to_be_bytes());
        frame.extend([0, seed as u8, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let ip = frame.len() - 20;
        let checksum = Ipv4HeaderSlice::from_slice(&frame[ip..]).unwrap().to_header().calc_header_checksum();
        frame[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((20 + payload as u16).to_be_bytes());
        frame.extend([6, 64]);
        frame.extend([[0xfd; 16], [0xfe; 16]].concat());
    }
    let start = frame.len();
    let addresses = if kind == Kind::Tcp4 { 8 } else { 32 };
    let sum: u32 = frame[start - addresses..].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let sum = sum + 6 + 20 + payload as u32;
    let sum = (sum & 0xffff) + (sum >> 16);
    let pseudo = ((sum & 0xffff) + (sum >> 16)) as u16;
    // PSH, FIN and ACK.
    frame.extend([0, 80, 0, 81, 0, 0, seed as u8, 1, 0, 0, 0, 2, 0x50, 0x19, 1, 0]);
    frame.extend(pseudo.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend((0..payload).map(|at| (at * (2 * seed + 1) + (at >> 8)) as u8));
    let offload = if size == 0 {
        Offload::partial(start as u16, 16, frame.len())
    } else {
        let claim = Claim { kind, ecn: false, size, checksum: (start as u16, 16) };
        Offload::segmented(claim, &frame[..frame.len().min(HEADERS)], frame.len())
    };
    (frame, offload.unwrap())
}

/// A frame that is not looked into.
pub(in crate::software) fn plain(seed: usize, len: usize) -> (Vec<u8>, Offload) {
    ((0..len).map(|at| (at * 7 + seed) as u8).collect(), Offload::NONE)
}

/// A burst of these frames, in memory of its own.
pub(in crate::software) fn burst(frames: &[(Vec<u8>, Offload)]) -> (Burst, Arc<Table>) {
    let len = frames.iter().map(|(frame, _)| HEADROOM + frame.len() + 3).sum();
    let memory = Arc::new(Table::default().with(Region::private(len, 0).unwrap()).unwrap());
    let mut burst = Burst::default();
    burst.start_in(&memory);
    let mut at = 0;
    for (frame, offload) in frames {
        memory.regions()[0].span(at + HEADROOM, frame.len()).unwrap().write(frame);
        assert_eq!(burst.push_at(at as u64, HEADROOM + frame.len(), *offload), Ok(frame.len()));
        at += HEADROOM + frame.len() + 3;
    }
    (burst, memory)
}

pub(in crate::software) fn all(frames: &[(Vec<u8>, Offload)]) -> &'static [u8] {
    &ALL[..frames.len()]
}

/// The frames that a frame becomes, by `etherparse`: segments that a peer accepts, and that make up the frame again.
fn check_segments(whole: &[u8], size: usize, got: &[(Vec<u8>, Offload)]) {
    let tcp_of = |frame: &[u8]| {
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        if let Some(NetSlice::Ipv4(ip)) = &packet.net {
            let header = ip.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
        }
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else { panic!("no TCP") };
        (tcp.sequence_number(), tcp.psh(), tcp.fin(), tcp.payload().to_vec())
    };
    let (first, .., payload) = tcp_of(whole);
    assert_eq!(got.len(), payload.len().div_ceil(size));
    for (index, (frame, offload)) in got.iter().enumerate() {
        let expected = &payload[index * size..payload.len().min((index + 1) * size)];
        let (seq, psh, fin, data) = tcp_of(frame);
        let last = index + 1 == got.len();
        assert_eq!((seq, psh, fin), (first + (index * size) as u32, last, last));
        assert!(data == expected, "segment {index} has other data");
        let mut complete = frame.clone();
        if !offload.is_none() {
            assert!(matches!(offload.checksum(), Checksum::Partial { .. }) && offload.gso().is_none());
            assert_eq!(checksum::verify(frame), Offload::NONE);
            checksum::complete(&mut complete, *offload);
        }
        assert_eq!(checksum::verify(&complete), Offload::VALID, "segment {index}");
    }
}

/// Plain frames between all that there is to finish.
fn mixed() -> Vec<(Vec<u8>, Offload)> {
    vec![
        plain(1, 60),
        plain(2, 1514),
        tcp(Kind::Tcp4, false, 3, 1000, 0),
        plain(4, 14),
        tcp(Kind::Tcp4, false, 5, 20_000, 1448),
        tcp(Kind::Tcp6, true, 6, 30_000, 1428),
        plain(7, 1000),
        (plain(8, 70).0, Offload::VALID),
        tcp(Kind::Tcp6, false, 9, 1, 0),
    ]
}

#[test]
fn each_receiver_gets_what_it_can_take_in_order() {
    let frames = mixed();
    let mut software = Software::new().unwrap();
    let all_tcp = CSUM | Support::TCP4 | Support::TCP6;
    for support in [Support::empty(), CSUM, CSUM | Support::TCP4, CSUM | Support::TCP6, all_tcp, Support::all()] {
        let (burst, _memory) = burst(&frames);
        let mut sink = Recorder::new(support);
        let (accepted, work) = software.put(&mut sink, &burst, all(&frames));
        assert_eq!((accepted, work), (sink.got.len(), sink.got.len()));
        let mut got = &sink.got[..];
        for (frame, offload) in &frames {
            let gso = offload.gso().filter(|_| !support.contains(offload.needs()));
            let size = gso.map(|gso| usize::from(gso.size.get()));
            let head = usize::from(gso.map_or(0, |gso| gso.header_len));
            let count = size.map_or(1, |size| (frame.len() - head).div_ceil(size));
            let (mine, rest) = got.split_at(count);
            got = rest;
            if let Some(size) = size {
                check_segments(frame, size, mine);
                assert!(mine.iter().all(|(_, offload)| offload.is_none() != support.contains(CSUM)));
            } else if support.contains(offload.needs()) {
                assert!(mine[0] == (frame.clone(), *offload), "not as it was");
            } else {
                let mut complete = frame.clone();
                checksum::complete(&mut complete, *offload);
                assert!(mine[0] == (complete, Offload::NONE));
                assert_eq!(checksum::verify(&mine[0].0), Offload::VALID);
            }
        }
        assert!(got.is_empty());
        let untouched = support == Support::all() || support == all_tcp;
        assert_eq!(sink.calls == [frames.len()], untouched, "{:?}", sink.calls);
    }
}

#[test]
fn only_the_frames_that_are_meant() {
    let frames = mixed();
    let mut software = Software::new().unwrap();
    let (burst, _memory) = burst(&frames);
    for which in [&[][..], &[0], &[2], &[4], &[1, 2, 7], &[0, 4, 6], &[5, 8]] {
        let mut sink = Recorder::new(Support::empty());
        let segments = |index: &u8| match frames[usize::from(*index)].1.gso() {
            Some(gso) => {
                (frames[usize::from(*index)].0.len() - usize::from(gso.header_len)).div_ceil(gso.size.get().into())
            }
            None => 1,
        };
        let expected: usize = which.iter().map(segments).sum();
        assert_eq!(software.put(&mut sink, &burst, which), (expected, expected));
        assert_eq!(sink.got.len(), expected);
    }
}

#[test]
fn what_a_receiver_has_no_room_for_is_not_counted_as_accepted() {
    let frames = mixed();
    let (burst, _memory) = burst(&frames);
    let mut software = Software::new().unwrap();
    let mut whole = Recorder::new(Support::empty());
    let (_, work) = software.put(&mut whole, &burst, all(&frames));
    for room in [0, 1, 3, 5, 20, work - 1, work] {
        let mut sink = Recorder { room, ..Recorder::new(Support::empty()) };
        assert_eq!(software.put(&mut sink, &burst, all(&frames)), (room, work), "the work is the same");
        assert!(sink.got == whole.got[..room]);
    }
}

#[test]
fn headers_changed_after_they_were_checked() {
    let frames = [plain(1, 60), tcp(Kind::Tcp4, false, 2, 5000, 1448), plain(3, 60)];
    let at = 2 * HEADROOM + 60 + 3;
    let mut software = Software::new().unwrap();
    // EtherType, version and length of IP, total length, fragment, protocol, length of TCP.
    for (place, value) in [(12, 0x86), (14, 0x44), (14, 0x65), (16, 0), (17, 0), (20, 0x20), (23, 17), (46, 0x40)] {
        let (burst, memory) = burst(&frames);
        memory.regions()[0].span(at + place, 1).unwrap().write(&[value]);
        let mut sink = Recorder::new(Support::empty());
        let put = software.put(&mut sink, &burst, all(&frames));
        // Its first 20 bytes are a private copy.
        if place < 20 {
            assert_eq!(put, (6, 6));
            check_segments(&frames[1].0, 1448, &sink.got[1..5]);
        } else {
            assert_eq!(put, (2, 2), "byte {place}");
            assert!(sink.got == [frames[0].clone(), frames[2].clone()]);
        }
    }
    // A longer TCP header is in order: the segments have less data, and none is longer than before.
    let (burst, memory) = burst(&frames);
    memory.regions()[0].span(at + 46, 1).unwrap().write(&[0xf0]);
    let mut sink = Recorder::new(Support::empty());
    software.put(&mut sink, &burst, all(&frames));
    let bytes: usize = sink.got[1..sink.got.len() - 1].iter().map(|(frame, _)| frame.len() - 94).sum();
    assert_eq!(bytes, 5000 - 40);
}

#[test]
fn the_longest_frame_in_the_smallest_segments() {
    let payload = usize::from(u16::MAX) - 40;
    let frames = [tcp(Kind::Tcp4, true, 1, payload, 48)];
    let (burst, _memory) = burst(&frames);
    let mut sink = Recorder::new(Support::empty());
    let count = payload.div_ceil(48);
    assert_eq!(Software::new().unwrap().put(&mut sink, &burst, &[0]), (count, count));
    check_segments(&frames[0].0, 48, &sink.got);
    // In smaller ones it would be too many.
    let (frame, claim) = (&frames[0].0, Claim { kind: Kind::Tcp4, ecn: false, size: 47, checksum: (38, 16) });
    let refused = Offload::segmented(claim, &frame[..HEADERS], frame.len()).unwrap_err();
    assert_eq!(refused, Refused::Segments { found: payload.div_ceil(47), most: SEGMENTS });
    assert!(sink.calls.iter().rev().skip(1).all(|&frames| frames == BURST), "{:?}", sink.calls);
}

#[test]
fn the_longest_frames_fill_the_memory_one_by_one() {
    let payload = usize::from(u16::MAX) - 20;
    let frames = [0; 4].map(|_| tcp(Kind::Tcp6, true, 1, payload, 0));
    let (burst, _memory) = burst(&frames);
    let mut sink = Recorder::new(Support::empty());
    assert_eq!(Software::new().unwrap().put(&mut sink, &burst, all(&frames)), (4, 4));
    assert!(sink.got.iter().all(|(frame, _)| checksum::verify(frame) == Offload::VALID));
    assert_eq!(sink.got.len(), 4);
}

/// A receiver whose code panics.
struct Broken;

impl Sink for Broken {
    fn put(&mut self, _: &Burst, _: &[u8]) -> usize {
        panic!("a bug");
    }
}

#[test]
fn frames_of_a_receiver_that_panicked_go_to_no_other() {
    let frames = [tcp(Kind::Tcp4, false, 1, 5000, 1448)];
    let (burst, _memory) = burst(&frames);
    let mut software = Software::new().unwrap();
    let put = std::panic::AssertUnwindSafe(|| software.put(&mut Broken, &burst, &[0]));
    assert!(std::panic::catch_unwind(put).is_err());
    let mut sink = Recorder::new(Support::empty());
    let (accepted, _) = software.put(&mut sink, &burst, &[0]);
    assert_eq!(accepted, 4);
    check_segments(&frames[0].0, 1448, &sink.got);
}

/// A receiver that refuses what it has no room for, and says so beforehand.
pub(in crate::software) struct Small(pub Recorder);

impl Sink for Small {
    fn support(&self) -> Support {
        self.0.support
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.0.put(burst, which)
    }

    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let fits = which.len().min(self.0.room);
        if fits == 0 { 0 } else { self.0.put(burst, &which[..fits]) }
    }

    fn has_room(&mut self, frames: usize) -> bool {
        self.0.room >= frames
    }
}

/// Frames for a receiver without room cost no more than it takes to find that out.
#[test]
fn nothing_is_cut_for_a_receiver_that_is_full() {
    let long = || tcp(Kind::Tcp4, false, 1, usize::from(u16::MAX) - 40, 48);
    let frames = [plain(1, 60), long(), tcp(Kind::Tcp6, false, 2, 100, 0), long(), long()];
    let (burst, _memory) = burst(&frames);
    let mut software = Software::new().unwrap();
    let mut whole = Recorder::new(Support::empty());
    let (made, _) = software.put(&mut whole, &burst, all(&frames));
    assert_eq!(made, 2 + 3 * 1365);
    for room in [0, 1, 2, 10, 63, 64, 65, 66, 1000, 1367, 1368, made - 1, made] {
        let mut sink = Small(Recorder { room, ..Recorder::new(Support::empty()) });
        let (accepted, work) = software.put(&mut sink, &burst, all(&frames));
        assert_eq!(accepted, room, "all that there is room for");
        assert!(sink.0.got == whole.got[..room]);
        // A burst that is partly in vain, and the first segment of each other frame.
        assert!(work <= made.min(room + BURST + frames.len()), "{work} frames made for a room of {room}");
    }
}

/// Offered frames arrive whole or not at all: none is cut into segments of which some find no room.
#[test]
fn what_is_offered_waits_whole() {
    // One frame as it is, two checksums, six segments, one as it is, three segments.
    let frames = [
        plain(1, 60),
        tcp(Kind::Tcp4, false, 1, 100, 0),
        tcp(Kind::Tcp6, true, 2, 200, 0),
        tcp(Kind::Tcp4, false, 3, 5500, 1000),
    ]
    .into_iter()
    .chain([plain(4, 90), tcp(Kind::Tcp6, false, 5, 2001, 1000)])
    .collect::<Vec<_>>();
    let becomes = [1, 1, 1, 6, 1, 3];
    for ((frame, offload), count) in frames.iter().zip(becomes) {
        assert_eq!(offload.frames(frame.len()), count);
    }
    let (burst, _memory) = burst(&frames);
    let mut software = Software::new().unwrap();
    for room in 0..=13 {
        let mut sink = Small(Recorder { room, ..Recorder::new(Support::empty()) });
        let (handled, work) = software.offer(&mut sink, &burst, all(&frames));
        let expected = (0..=frames.len()).rfind(|&count| becomes[..count].iter().sum::<usize>() <= room).unwrap();
        let made: usize = becomes[..expected].iter().sum();
        assert_eq!((handled, sink.0.got.len(), work), (expected, made, made), "room {room}");
    }
}

#[test]
fn frames_that_the_receiver_cuts_are_as_much_work_as_their_segments() {
    let frames = [plain(1, 60), tcp(Kind::Tcp4, false, 3, 10_000, 1000), tcp(Kind::Tcp4, false, 5, 1000, 0)];
    let (burst, _memory) = burst(&frames);
    for (cuts, work) in [(false, 3), (true, 12)] {
        let mut sink = Recorder { cuts, ..Recorder::new(Support::all()) };
        assert_eq!(Software::put_finished(&mut None, &mut sink, &burst, all(&frames)), (3, work));
        assert_eq!(Software::offer_finished(&mut None, &mut sink, &burst, all(&frames)), (3, work));
        assert!(sink.got == [&frames[..], &frames[..]].concat(), "as they are");
    }
}
