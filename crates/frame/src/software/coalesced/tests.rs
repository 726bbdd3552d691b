use super::*;
use crate::{
    ALL,
    offload::Kind,
    software::tests::{Recorder, Small, all, burst, plain, tcp},
};

type Frames = Vec<(Vec<u8>, Offload)>;

const TCP: Support = Support::CHECKSUM.union(SEGMENTED);

/// What a receiver gets that takes nothing but whole frames.
fn cut(frames: &[(Vec<u8>, Offload)]) -> Frames {
    let (burst, _memory) = burst(frames);
    let mut sink = Recorder::new(Support::empty());
    Software::new().unwrap().put(&mut sink, &burst, all(frames));
    sink.got
}

fn coalesced(frames: &[(Vec<u8>, Offload)], support: Support) -> Frames {
    let (burst, _memory) = burst(frames);
    let mut sink = Recorder::new(support);
    let mut software = None;
    let (accepted, work) = Software::put_coalesced(&mut software, &mut sink, &burst, all(frames));
    assert_eq!((accepted, work), (sink.got.len(), sink.got.len()));
    sink.got
}

/// Segments of four flows.
fn flows() -> Vec<Frames> {
    [(Kind::Tcp4, false), (Kind::Tcp4, true), (Kind::Tcp6, false), (Kind::Tcp6, true)]
        .into_iter()
        .enumerate()
        .map(|(seed, (kind, vlan))| cut(&[tcp(kind, vlan, seed, 14_000, 1400)]))
        .collect()
}

/// One frame of each in turn.
fn in_turn(flows: &[Frames]) -> Frames {
    (0..flows[0].len()).flat_map(|index| flows.iter().map(move |flow| flow[index].clone())).collect()
}

#[test]
fn flows_become_frames_that_cut_into_the_same_segments() {
    let flows = flows();
    let frames = in_turn(&flows);
    assert_eq!(frames.len(), 40);
    let got = coalesced(&frames, TCP);
    assert_eq!(got.len(), 4, "one of each flow");
    assert!(got.iter().all(|(frame, offload)| frame.len() > 14_000 && offload.gso().is_some()));
    assert!(cut(&got) == flows.concat());
}

#[test]
fn what_the_sender_left_to_do_is_enough() {
    // Segments with partial checksums, as for a receiver that completes them.
    let whole = [tcp(Kind::Tcp4, false, 1, 10_000, 1000)];
    let (from, _memory) = burst(&whole);
    let mut sink = Recorder::new(Support::CHECKSUM);
    Software::new().unwrap().put(&mut sink, &from, &[0]);
    assert!(sink.got.iter().all(|(_, offload)| !offload.is_none()));
    let got = coalesced(&sink.got, TCP);
    assert_eq!(got.len(), 1);
    assert!(cut(&got) == cut(&whole));
}

#[test]
fn receivers_get_what_they_take() {
    let frames = in_turn(&flows());
    for support in [Support::empty(), Support::CHECKSUM] {
        assert!(coalesced(&frames, support) == frames, "{support:?}");
    }
    let got = coalesced(&frames, Support::CHECKSUM | Support::TCP6);
    let (v4, v6): (Frames, Frames) = got.into_iter().partition(|(_, offload)| offload.gso().is_none());
    assert_eq!(v4.len(), 20, "those over IPv4 as they are");
    // Those between them use up what a frame is compared with.
    assert!(v6.len() < 10 && cut(&v6).len() == 20);
    assert_eq!(coalesced(&frames[..1], TCP), &frames[..1]);
}

#[test]
fn what_the_receiver_would_cut_again_is_left_alone() {
    let frames = flows().concat();
    let (burst, _memory) = burst(&frames);
    let mut sink = Recorder { cuts: true, ..Recorder::new(Support::all()) };
    Software::put_coalesced(&mut None, &mut sink, &burst, all(&frames));
    assert!(sink.got == frames);
}

#[test]
fn damaged_and_other_frames_stay_as_they_are_and_in_order() {
    let mut frames = cut(&[tcp(Kind::Tcp4, false, 1, 10_000, 1000)]);
    frames[4].0[500] ^= 1;
    frames.insert(7, plain(3, 60));
    let got = coalesced(&frames, TCP);
    let lens: Vec<usize> = got.iter().map(|(frame, _)| frame.len()).collect();
    assert_eq!(lens, [4054, 1054, 5054, 60]);
    assert!(got[1] == frames[4]);
    // The other frame is of another flow.
    let other = frames.remove(7);
    frames.push(other);
    assert!(cut(&got) == frames);
}

#[test]
fn offered_frames_are_coalesced_if_there_is_room_for_all() {
    let frames = in_turn(&flows());
    let (from, _memory) = burst(&frames);
    for (room, expected) in [(40, 4), (39, 39), (1, 1), (0, 0)] {
        let mut sink = Small(Recorder { room, ..Recorder::new(TCP) });
        let (handled, _) = Software::offer_coalesced(&mut None, &mut sink, &from, all(&frames));
        assert_eq!((handled, sink.0.got.len()), (room, expected));
    }
}

#[test]
fn only_the_frames_that_are_meant() {
    let flows = flows();
    let frames = in_turn(&flows);
    let (from, _memory) = burst(&frames);
    let which: Vec<u8> = (0..40).filter(|index| index % 4 == 2).collect();
    let mut sink = Recorder::new(TCP);
    assert_eq!(Software::put_coalesced(&mut None, &mut sink, &from, &which), (1, 1));
    assert!(cut(&sink.got) == flows[2]);
    assert!(which.len() < ALL.len());
}
