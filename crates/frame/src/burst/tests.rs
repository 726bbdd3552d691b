use super::*;
use ringroad_mem::Region;

const PAGE: usize = 4096;

/// Memory of bytes that tell their place.
fn memory() -> Arc<Table> {
    let region = Region::private(2 * PAGE, 0).unwrap();
    let bytes: Vec<u8> = (0..2 * PAGE).map(|at| (at % 251) as u8).collect();
    region.span(0, bytes.len()).unwrap().write(&bytes);
    Arc::new(Table::default().with(region).unwrap())
}

fn bytes(at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(|at| (at % 251) as u8).collect()
}

/// A frame as a receiver gets it: headroom, head and rest.
fn forwarded(burst: &Burst, index: usize) -> Vec<u8> {
    let (head, len) = burst.frames()[index].head();
    let mut all = head[..len].to_vec();
    for piece in burst.rest(index) {
        let at = all.len();
        all.resize(at + piece.len(), 0);
        piece.read(&mut all[at..]);
    }
    all
}

/// Cuts `len` bytes at `at` into pieces of these lengths, the last one as long as is left.
fn pieces<'m>(memory: &'m Table, mut at: usize, len: usize, lengths: &[usize]) -> Vec<Span<'m>> {
    let end = at + len;
    let mut list = Vec::new();
    for &length in lengths.iter().chain([&usize::MAX]) {
        let length = length.min(end - at);
        list.extend(memory.regions()[0].span(at, length));
        at += length;
    }
    list.retain(|piece| !piece.is_empty());
    list
}

#[test]
fn a_frame_is_forwarded_as_it_was_sent_however_it_is_cut() {
    let memory = memory();
    for lead in [0, HEADROOM, 16] {
        for len in [14, 19, 20, 21, 60, 1514] {
            for cuts in [&[][..], &[1], &[lead], &[lead + 13, 1], &[5, 5, 5, 5, 5, 5, 5], &[lead + 20]] {
                let (mut list, cut) = (Pieces::new(16), pieces(&memory, 100, lead + len, cuts));
                list.start(&memory);
                let mut at = 100;
                for piece in &cut {
                    list.push(at, piece.len() as u32, &mut Hit::default()).unwrap();
                    at += piece.len() as u64;
                }
                let mut burst = Burst::default();
                burst.start(MAX_FRAME, lead);
                assert_eq!(burst.push(&cut, 0, lead + len, Offload::NONE), Ok(len));
                burst.exchange(&mut list);
                let expected = [vec![0; HEADROOM], bytes(100 + lead, len)].concat();
                assert_eq!(forwarded(&burst, 0), expected, "lead {lead}, {len} bytes, cut {cuts:?}");
                assert_eq!(burst.frames()[0].len(), len);
                assert_eq!(burst.frames()[0].ethernet(), &expected[HEADROOM..HEAD.min(HEADROOM + len)]);
                let plain = cut.len() == 1 && lead == HEADROOM;
                assert_eq!(burst.plain().map(<[_]>::len), plain.then_some(1));
            }
        }
    }
}

#[test]
fn frames_of_one_piece_are_plain() {
    let memory = memory();
    let (mut burst, mut list) = (Burst::default(), Pieces::new(16));
    list.start(&memory);
    burst.start(1514, HEADROOM);
    for at in [0, 200] {
        list.push(at, 112, &mut Hit::default()).unwrap();
    }
    let heads = [bytes(0, 8), bytes(200, 8)].map(|head| u64::from_le_bytes(head.try_into().unwrap()));
    assert_eq!(burst.extend(list.list().iter().copied().map(Some)), (200, heads[0] | heads[1]));
    burst.exchange(&mut list);
    assert_eq!(burst.plain().map(<[_]>::len), Some(2));
    for (index, at) in [0, 200].into_iter().enumerate() {
        assert_eq!(burst.piece(&burst.frames()[index]), index);
        assert_eq!(forwarded(&burst, index), [vec![0; HEADROOM], bytes(at + HEADROOM, 100)].concat());
    }
    burst.finish(&mut list);
    assert!(burst.frames().is_empty() && list.list().len() == 2, "the source has its list back");
}

#[test]
fn frames_that_are_added_one_by_one_are_plain_if_all_are_in_one_piece() {
    let memory = memory();
    let mut burst = Burst::default();
    burst.start_in(&memory);
    for count in 1..=BURST {
        let offload = if count % 2 == 0 { Offload::partial(14, 0, 60).unwrap() } else { Offload::NONE };
        assert_eq!(burst.push_at(200, HEADROOM + 60, offload), Ok(60));
        assert_eq!(burst.plain().map(<[_]>::len), Some(count));
        assert_eq!(burst.piece(&burst.frames()[count - 1]), count - 1);
    }
    // Frames of one piece behind one of two, or behind a buffer that holds no frame, are not where `plain` would have them.
    for first in [&[12, 60][..], &[5]] {
        let (mut burst, mut list) = (Burst::default(), Pieces::new(16));
        list.start(&memory);
        burst.start(1514, HEADROOM);
        for &len in first.iter().chain(&[112]) {
            list.push(100, len, &mut Hit::default()).unwrap();
        }
        let total: u32 = first.iter().sum();
        let pieces = list.list().to_vec();
        let added = burst.push(&pieces[..first.len()], 0, total as usize, Offload::NONE);
        assert_eq!(added, if total == 72 { Ok(60) } else { Err(NotAFrame::Runt) });
        assert_eq!(burst.push(&pieces[first.len()..], first.len(), 112, Offload::NONE), Ok(100));
        burst.exchange(&mut list);
        assert!(burst.plain().is_none());
        assert_eq!(forwarded(&burst, burst.frames().len() - 1)[HEADROOM..], bytes(100 + HEADROOM, 100));
    }
}

#[test]
fn frames_of_one_piece_end_at_one_that_is_refused_or_too_short() {
    let memory = memory();
    let (mut burst, mut list) = (Burst::default(), Pieces::new(16));
    list.start(&memory);
    burst.start(1514, HEADROOM);
    for (at, len) in [(0, 112), (200, HEAD as u32 - 1), (400, 112)] {
        list.push(at, len, &mut Hit::default()).unwrap();
    }
    assert_eq!(burst.extend(list.list().iter().copied().map(Some)).0, 100);
    assert_eq!(burst.frames().len(), 1);
    assert_eq!(burst.extend(std::iter::once(None)), (0, 0));
    assert!(burst.frames().is_empty());
}

#[test]
fn addresses_are_swapped_in_what_is_forwarded_only() {
    let memory = memory();
    let mut burst = Burst::default();
    burst.start_in(&memory);
    burst.reflect(true);
    burst.push_at(0, HEADROOM + 100, Offload::NONE).unwrap();
    let sent = bytes(HEADROOM, 100);
    let expected = [&[0; HEADROOM][..], &sent[6..12], &sent[..6], &sent[12..]].concat();
    assert_eq!(forwarded(&burst, 0), expected);
    assert_eq!(burst.frames()[0].ethernet(), &sent[..20]);
    let header: [u8; HEADROOM] = std::array::from_fn(|index| index as u8 + 1);
    let whole = burst.frames()[0].full_head(header).unwrap().concat();
    assert_eq!(whole, [&header[..], &expected[HEADROOM..HEAD]].concat());
    assert_eq!(burst.frames()[0].full_head_apart().unwrap().concat(), &expected[HEADROOM..HEAD]);
}

#[test]
fn what_is_no_frame_is_said() {
    let memory = memory();
    let mut burst = Burst::default();
    burst.start_in(&memory);
    assert_eq!(burst.push_at(0, HEADROOM + 13, Offload::NONE), Err(NotAFrame::Runt));
    assert_eq!(burst.push_at(0, HEADROOM + MAX_FRAME + 1, Offload::NONE), Err(NotAFrame::Oversize));
    assert_eq!(
        burst.push_at(2 * PAGE as u64 - 50, HEADROOM + 60, Offload::NONE),
        Err(NotAFrame::Oversize),
        "not inside"
    );
    for _ in 0..BURST {
        assert_eq!(burst.push_at(0, HEADROOM + 60, Offload::NONE), Ok(60));
    }
    assert_eq!(burst.push_at(0, HEADROOM + 60, Offload::NONE), Err(NotAFrame::Oversize), "no room");
    burst.start(100, 0);
    assert_eq!([burst.check(100, Offload::NONE), burst.check(101, Offload::NONE)], [Ok(()), Err(NotAFrame::Oversize)]);
}

#[test]
fn a_burst_is_cut_behind_the_frame_that_is_too_much() {
    let memory = memory();
    let mut burst = Burst::default();
    burst.start_in(&memory);
    for _ in 0..4 {
        burst.push_at(0, HEADROOM + 100, Offload::NONE).unwrap();
    }
    assert_eq!((burst.cut(250), burst.frames().len(), burst.bytes()), (3, 3, 300));
    assert_eq!((burst.cut(300), burst.frames().len(), burst.bytes()), (3, 3, 300));
    burst.clear();
    assert_eq!(burst.cut(1), 0);
}

/// Copying from any position is the same as reading the frame, however it is cut, and with its addresses swapped.
#[test]
fn bytes_of_a_frame_from_any_position() {
    let memory = memory();
    for (lead, len) in [(HEADROOM, 14), (HEADROOM, 20), (HEADROOM, 21), (0, 33), (16, 120)] {
        for cuts in [&[][..], &[1], &[lead + 13, 1], &[5; 12], &[lead + 20], &[lead + 19, 2, 3, 1, 1, 40]] {
            let (mut list, cut) = (Pieces::new(16), pieces(&memory, 100, lead + len, cuts));
            list.start(&memory);
            let mut at = 100;
            for piece in &cut {
                list.push(at, piece.len() as u32, &mut Hit::default()).unwrap();
                at += piece.len() as u64;
            }
            let mut burst = Burst::default();
            for reflected in [false, true] {
                burst.start(MAX_FRAME, lead);
                burst.reflect(reflected);
                burst.push(&cut, 0, lead + len, Offload::partial(14, 0, 60).unwrap()).unwrap();
                burst.exchange(&mut list);
                let whole = forwarded(&burst, 0).split_off(HEADROOM);
                for at in 0..len + 3 {
                    for most in [0, 1, 5, len, len + 9] {
                        let mut target = vec![0xee; most];
                        let expected = &whole[at.min(len)..(at + most).min(len).max(at.min(len))];
                        assert_eq!(burst.copy(0, at, &mut target), expected.len(), "{len} bytes, cut {cuts:?}, {at}");
                        let (copied, rest) = target.split_at(expected.len());
                        assert!(copied == expected && rest.iter().all(|&byte| byte == 0xee), "{cuts:?}, {at}, {most}");
                    }
                }
                assert!(!reflected || whole[..6] == bytes(100 + lead, len)[6..12]);
                burst.exchange(&mut list);
            }
            burst.exchange(&mut list);
            assert_eq!(burst.copy(1, 0, &mut [0; 9]), 0, "no such frame");
        }
    }
}

/// An MTU limits what a frame becomes, a frame that is not cut as it is; and marks are gone with their burst.
#[test]
fn lengths_on_a_link() {
    use crate::offload::{Claim, Kind};
    let region = Region::private(8 * PAGE, 0).unwrap();
    // TCP over IPv4 with 10000 bytes of data.
    let mut head = vec![0; 12];
    head.extend([0x08, 0x00, 0x45, 0, 0x27, 0x38, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    head.extend([0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0]);
    region.span(HEADROOM, head.len()).unwrap().write(&head);
    let memory = Arc::new(Table::default().with(region).unwrap());
    let segmented = |size| {
        let claim = Claim { kind: Kind::Tcp4, ecn: false, size, checksum: (34, 16) };
        Offload::segmented(claim, &head, 10_054).unwrap()
    };
    let mut burst = Burst::default();
    burst.start_in(&memory);
    assert!(!burst.has_offloads());
    for offload in [Offload::NONE, segmented(1460), Offload::VALID, segmented(1461)] {
        assert_eq!(burst.push_at(0, HEADROOM + 10_054, offload), Ok(10_054));
    }
    assert!(burst.has_offloads());
    assert_eq!([0, 1, 2, 3, 4].map(|index| burst.link_len(index)), [10_054, 1514, 10_054, 1515, 0]);
    assert_eq!([0, 1, 2, 3].map(|index| burst.offload(index).needs().bits()), [0, 3, 0, 3]);
    assert!(burst.frames().iter().all(|frame| frame.len() == 10_054 && frame.ethernet() == &head[..20]));
    burst.start(1514, HEADROOM);
    let check = |offload| burst.check(HEADROOM + 10_054, offload);
    assert_eq!([check(segmented(1460)), check(segmented(1461))], [Ok(()), Err(NotAFrame::Oversize)]);
    assert_eq!(check(Offload::VALID), Err(NotAFrame::Oversize));
    burst.clear();
    burst.start_in(&memory);
    burst.push_at(0, HEADROOM + 60, Offload::NONE).unwrap();
    assert!(!burst.has_offloads() && burst.offload(0).is_none() && burst.offload(1).is_none());
}

#[test]
fn what_is_announced_is_for_one_burst() {
    let region = Region::private(4096, 0).unwrap();
    let pieces: Vec<_> = (0..BURST + 1).map(|index| region.span(32 * index, 32).unwrap()).collect();
    let mut burst = Burst::default();
    assert!(burst.next().is_empty());
    burst.announce(&pieces[..3]);
    assert_eq!(burst.next().len(), 3);
    burst.announce(&pieces);
    assert_eq!(burst.next().len(), BURST);
    burst.start(1500, 0);
    assert!(burst.next().is_empty());
}
