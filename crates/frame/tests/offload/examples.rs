//! One rule each.

use crate::reference::{Spec, coalesced, segments};
use ringroad_frame::{
    Offload,
    offload::{
        HEADERS, Kind, Refused, Support,
        coalesce::{Group, Head, Plan},
        segment::{Checksums, Segmenter},
    },
};

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;
const URG: u8 = 32;
const ECE: u8 = 64;
const CWR: u8 = 128;

fn spec(kind: Kind, len: usize) -> Spec {
    Spec {
        kind,
        tags: 1,
        ip_options: 0,
        extensions: [None; 4],
        tcp_options: 3,
        flags: ACK,
        seq: 0xffff_ff00,
        id: 0xffff,
        df: true,
        flow: 7,
        size: 100,
        payload: (0..len).map(|index| index as u8).collect(),
    }
}

fn offload(spec: &Spec) -> Offload {
    let frame = spec.frame();
    Offload::segmented(spec.claim(), &frame, frame.len()).unwrap()
}

/// The segments of a frame, as verified.
fn cut(spec: &Spec) -> Vec<(Vec<u8>, Offload)> {
    let parts = segments(&spec.frame(), offload(spec).gso().unwrap(), Checksums::Complete);
    parts.into_iter().map(|(part, _)| (part, Offload::VALID)).collect()
}

/// How many frames became one, for each frame that remains.
fn counts(frames: &[(Vec<u8>, Offload)]) -> Vec<usize> {
    coalesced(frames, Support::all()).into_iter().map(|(_, _, members)| members.len()).collect()
}

#[test]
fn flags_of_tcp() {
    let spec = Spec { flags: ACK | PSH | FIN | CWR | ECE, ..spec(Kind::Tcp4, 250) };
    let flags: Vec<_> = cut(&spec).iter().map(|(part, _)| part[spec.transport() + 13]).collect();
    assert_eq!(flags, [ACK | CWR | ECE, ACK | ECE, ACK | PSH | FIN | ECE]);
}

#[test]
fn segmenter_needs_room() {
    let spec = spec(Kind::Tcp6, 250);
    let frame = spec.frame();
    let gso = offload(&spec).gso().unwrap();
    let mut segmenter = Segmenter::new(gso, &frame, frame.len(), Checksums::Complete, 0).unwrap();
    assert_eq!((segmenter.longest(), segmenter.remaining()), (spec.end() + 100, 3));
    let mut out = vec![0; segmenter.longest()];
    assert_eq!(segmenter.next(&mut out[1..], |_, _| panic!("nothing is read")), None);
    assert_eq!(segmenter.remaining(), 3);
    let mut copy = |at: usize, part: &mut [u8]| part.copy_from_slice(&frame[at..at + part.len()]);
    let lens: Vec<_> = std::iter::from_fn(|| segmenter.next(&mut out, &mut copy)).map(|part| part.len).collect();
    assert_eq!(lens, [spec.end() + 100, spec.end() + 100, spec.end() + 50]);
    assert_eq!((segmenter.remaining(), segmenter.next(&mut out, &mut copy)), (0, None));
}

#[test]
fn segmenter_checks_the_frame() {
    let gso = offload(&spec(Kind::Tcp4, 250)).gso().unwrap();
    let other = spec(Kind::Tcp6, 250).frame();
    let error = Segmenter::new(gso, &other, other.len(), Checksums::Complete, 0).unwrap_err();
    assert_eq!(error, Refused::EtherType { expected: Kind::Tcp4, found: 0x86dd });
}

#[test]
fn headers_beyond_the_private_copy() {
    let long = Spec { extensions: [Some(9), None, None, Some(9)], tcp_options: 10, ..spec(Kind::Tcp6, 250) };
    assert!(long.end() > HEADERS);
    let frame = long.frame();
    let error = Offload::segmented(long.claim(), &frame, frame.len()).unwrap_err();
    assert_eq!(error, Refused::Headers { needed: long.end(), found: HEADERS });
}

#[test]
fn size_of_fragments_is_rounded_down() {
    let spec = Spec { size: 15, ..spec(Kind::Fragments4, 16) };
    let gso = offload(&spec).gso().unwrap();
    assert_eq!(gso.size.get(), 8);
    let lens: Vec<_> = cut(&spec).iter().map(|(part, _)| part.len() - spec.transport()).collect();
    assert_eq!(lens, [8, 8, 8]);
}

#[test]
fn a_last_short_segment_ends_a_frame() {
    let mut frames = cut(&spec(Kind::Tcp4, 250));
    let next = Spec { seq: 0xffff_ff00u32.wrapping_add(250), id: 2, ..spec(Kind::Tcp4, 300) };
    frames.extend(cut(&next));
    assert_eq!(counts(&frames), [3, 3]);
    // Without it, the second frame continues the first.
    let mut frames = cut(&spec(Kind::Tcp4, 200));
    frames.extend(cut(&Spec { seq: 0xffff_ff00u32.wrapping_add(200), id: 1, ..spec(Kind::Tcp4, 300) }));
    assert_eq!(counts(&frames), [5]);
    for flag in [PSH, FIN] {
        let mut frames = cut(&Spec { flags: ACK | flag, ..spec(Kind::Tcp4, 200) });
        frames.extend(cut(&Spec { seq: 0xffff_ff00u32.wrapping_add(200), id: 1, ..spec(Kind::Tcp4, 300) }));
        assert_eq!(counts(&frames), [2, 3]);
    }
}

/// The second of two segments that would be coalesced, changed.
fn second(change: impl Fn(&mut Spec)) -> Vec<usize> {
    let first = Spec { payload: vec![1; 100], ..spec(Kind::Tcp4, 0) };
    let mut second = Spec { seq: first.seq.wrapping_add(100), id: 0, ..first.clone() };
    change(&mut second);
    let frame =
        |spec: &Spec| (spec.frame(), Offload::partial(spec.claim().checksum.0, 16, spec.frame().len()).unwrap());
    counts(&[frame(&first), frame(&second)])
}

#[test]
fn what_is_coalesced() {
    let merged = [2];
    assert_eq!(second(|_| {}), merged);
    assert_eq!(second(|spec| spec.id = 0xffff), merged, "the same identification, with DF");
    assert_eq!(second(|spec| spec.flags |= PSH), merged);
    assert_eq!(second(|spec| spec.flags |= FIN), merged);
    assert_eq!(second(|spec| spec.payload.truncate(1)), merged);
    let apart = [1, 1];
    assert_eq!(second(|spec| spec.seq += 1), apart);
    assert_eq!(second(|spec| spec.seq -= 100), apart);
    assert_eq!(second(|spec| spec.id = 1), apart);
    assert_eq!(second(|spec| spec.df = false), apart);
    assert_eq!(second(|spec| spec.flow = 8), apart);
    assert_eq!(second(|spec| spec.tags = 0), apart);
    assert_eq!(second(|spec| spec.ip_options = 1), apart);
    assert_eq!(second(|spec| spec.tcp_options = 4), apart);
    assert_eq!(second(|spec| spec.payload.push(1)), apart, "longer");
    assert_eq!(second(|spec| spec.payload.clear()), apart, "no data");
    for flag in [SYN, RST, URG, ECE, CWR] {
        assert_eq!(second(|spec| spec.flags |= flag), apart, "flags {flag:#x}");
    }
    assert_eq!(second(|spec| spec.flags = PSH), apart, "no ACK");
}

#[test]
fn other_headers_are_not_coalesced() {
    let first = Spec { payload: vec![1; 100], ..spec(Kind::Tcp4, 0) };
    let second = Spec { seq: first.seq.wrapping_add(100), id: 0, ..first.clone() };
    let partial = Offload::partial(first.claim().checksum.0, 16, 200).unwrap();
    let transport = first.transport();
    // Acknowledgement, window, urgent pointer, an option: only the TCP header, so that IPv4's checksum stays valid.
    for at in [8, 12, 14, 18, 20, 31].map(|at| transport + at) {
        let mut frame = second.frame();
        frame[at] ^= 1;
        assert_eq!(counts(&[(first.frame(), partial), (frame, partial)]), [1, 1], "byte {at}");
    }
    // A damaged IPv4 header, in either.
    let mut damaged = second.frame();
    damaged[26] ^= 1;
    assert_eq!(counts(&[(first.frame(), partial), (damaged, partial)]), [1, 1]);
    // Checksums that are not known to be valid, or not TCP's.
    let elsewhere = Offload::partial(first.claim().checksum.0, 14, 200).unwrap();
    for other in [Offload::NONE, elsewhere] {
        assert_eq!(counts(&[(first.frame(), partial), (second.frame(), other)]), [1, 1]);
        assert_eq!(counts(&[(first.frame(), other), (second.frame(), partial)]), [1, 1]);
    }
    assert_eq!(counts(&[(first.frame(), partial), (second.frame(), Offload::VALID)]), [2]);
}

/// Consecutive frames of `len` bytes of data.
fn consecutive<const N: usize>(first: &Spec, len: usize) -> [Spec; N] {
    std::array::from_fn(|index| Spec {
        seq: first.seq.wrapping_add((index * len) as u32),
        id: first.id.wrapping_add(index as u16),
        payload: vec![1; len],
        ..first.clone()
    })
}

/// The frame with a partial checksum.
fn partial(spec: &Spec) -> (Vec<u8>, Offload) {
    let frame = spec.frame();
    let offload = Offload::partial(spec.claim().checksum.0, 16, frame.len()).unwrap();
    (frame, offload)
}

#[test]
fn identifications_grow_evenly() {
    let frames = consecutive::<4>(&spec(Kind::Tcp4, 0), 100);
    let with = |ids: [u16; 4]| {
        let specs = frames.iter().zip(ids).map(|(frame, id)| Spec { id, ..frame.clone() });
        counts(&specs.map(|spec| partial(&spec)).collect::<Vec<_>>())
    };
    assert_eq!(with([5, 6, 7, 8]), [4]);
    assert_eq!(with([5, 5, 5, 5]), [4]);
    assert_eq!(with([5, 5, 6, 7]), [2, 2]);
    assert_eq!(with([5, 6, 6, 7]), [2, 2]);
    assert_eq!(with([5, 7, 9, 11]), [1, 1, 1, 1]);
}

#[test]
fn longest_frame_of_a_receiver() {
    let frames = consecutive::<3>(&spec(Kind::Tcp4, 0), 100).map(|spec| partial(&spec));
    let heads = frames.each_ref().map(|(frame, offload)| Head { bytes: frame, len: frame.len(), offload: *offload });
    let mut plan = Plan::default();
    let one = frames[0].0.len();
    for (longest, expected) in [(one + 200, vec![one + 200]), (one + 199, vec![one + 100, one])] {
        plan.make(&heads, Support::all(), longest);
        assert_eq!(plan.groups().iter().map(Group::len).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn segments_that_would_be_refused() {
    let frames = |len| consecutive::<2>(&spec(Kind::Tcp6, 0), len).map(|spec| partial(&spec));
    assert_eq!(counts(&frames(8)), [2]);
    assert_eq!(counts(&frames(7)), [1, 1]);
}

#[test]
fn frames_to_be_segmented_stay_as_they_are() {
    let [first, second, third] = consecutive(&spec(Kind::Tcp4, 0), 200);
    let whole = (second.frame(), offload(&second));
    assert!(whole.1.gso().is_some());
    assert_eq!(counts(&[partial(&first), whole, partial(&third)]), [1, 1, 1]);
}

#[test]
fn routed_packets_are_not_coalesced() {
    let routing = Spec { extensions: [None, None, Some(0), None], ..spec(Kind::Tcp6, 0) };
    let mut frames = consecutive::<2>(&routing, 100).map(|spec| partial(&spec));
    assert_eq!(counts(&frames), [2]);
    for (frame, _) in &mut frames {
        // One segment left.
        frame[routing.transport() - 8 + 3] = 1;
    }
    assert_eq!(counts(&frames), [1, 1]);
}

#[test]
fn flows_that_alternate() {
    for (flows, merged) in [(8, true), (9, false)] {
        let flow = |flow| consecutive::<2>(&Spec { flow, ..spec(Kind::Tcp4, 0) }, 100);
        let frames = (0..2).flat_map(|index| (0..flows).map(move |number| partial(&flow(number)[index])));
        let count = if merged { vec![2; flows.into()] } else { vec![1; 2 * usize::from(flows)] };
        assert_eq!(counts(&frames.collect::<Vec<_>>()), count);
    }
}

#[test]
fn without_df_identifications_differ() {
    let first = Spec { payload: vec![1; 100], df: false, ..spec(Kind::Tcp4, 0) };
    let second = Spec { seq: first.seq.wrapping_add(100), ..first.clone() };
    let partial = Offload::partial(first.claim().checksum.0, 16, 200).unwrap();
    assert_eq!(counts(&[(first.frame(), partial), (second.frame(), partial)]), [1, 1]);
    let second = Spec { id: 0, ..second };
    assert_eq!(counts(&[(first.frame(), partial), (second.frame(), partial)]), [2]);
}

#[test]
fn a_receiver_gets_only_what_it_supports() {
    let ecn = Spec { flags: ACK | CWR, ..spec(Kind::Tcp4, 300) };
    for (spec, missing) in [
        (spec(Kind::Tcp4, 300), Support::TCP4),
        (spec(Kind::Tcp6, 300), Support::TCP6),
        (spec(Kind::Tcp6, 300), Support::CHECKSUM),
        (ecn, Support::ECN),
    ] {
        let frames = cut(&spec);
        let merged = |support| coalesced(&frames, support).len();
        assert_eq!(merged(Support::all()), 1);
        assert!(merged(Support::all() - missing) > 1, "without {missing:?}");
    }
}

#[test]
fn longest_packet() {
    // 65535 bytes of IP, of which 52 are headers.
    let long = |len| Spec { size: 1400, ..spec(Kind::Tcp4, len) };
    let mut frames = cut(&long(65535 - 52));
    assert_eq!(counts(&frames), [frames.len()]);
    let last = frames.len() - 1;
    let end = Spec {
        seq: 0xffff_ff00u32.wrapping_add(1400 * last as u32),
        id: 0xffffu16.wrapping_add(last as u16),
        payload: vec![1; 65535 - 52 - 1400 * last + 1],
        ..long(0)
    };
    let partial = Offload::partial(end.claim().checksum.0, 16, end.frame().len()).unwrap();
    frames[last] = (end.frame(), partial);
    assert_eq!(counts(&frames), [last, 1]);
}

#[test]
fn nothing_overtakes_a_frame_of_its_flow() {
    let frames = cut(&spec(Kind::Tcp4, 300));
    let acknowledgement = Spec { payload: vec![], ..spec(Kind::Tcp4, 0) }.frame();
    let mut burst = frames.clone();
    burst.insert(1, (acknowledgement.clone(), Offload::VALID));
    assert_eq!(counts(&burst), [1, 1, 2]);
    // Padded, it is not readable: it might be of any flow.
    burst[1].0.extend([0; 4]);
    assert_eq!(counts(&burst), [1, 1, 2]);
    // One of another flow, or of another protocol, may be overtaken.
    for other in [Spec { flow: 9, ..spec(Kind::Tcp4, 0) }, spec(Kind::Udp4, 100)] {
        burst[1].0 = other.frame();
        assert_eq!(counts(&burst), [3, 1]);
    }
}
