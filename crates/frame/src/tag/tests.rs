use super::*;
use crate::{Offload, copy_some};
use proptest::prelude::*;
use ringroad_mem::{Region, Table};
use std::sync::Arc;

/// A burst of one frame.
fn burst(frame: &[u8], offload: Offload) -> Burst {
    let memory = Arc::new(Table::default().with(Region::private(128 << 10, 0).unwrap()).unwrap());
    memory.regions()[0].span(HEADROOM, frame.len()).unwrap().write(frame);
    let mut burst = Burst::default();
    burst.start_in(&memory);
    burst.push_at(0, HEADROOM + frame.len(), offload).unwrap();
    burst
}

/// What a receiver gets.
fn forwarded(burst: &Burst) -> Vec<u8> {
    let frame = &burst.frames()[0];
    let (head, len) = frame.head();
    let mut all = head[HEADROOM..len].to_vec();
    assert_eq!(frame.ethernet(), all);
    all.resize(frame.len() + 1, 0);
    let rest = copy_some(burst.rest(0), 0, &mut all[len - HEADROOM..]);
    assert_eq!(len - HEADROOM + rest, frame.len());
    all.pop();
    let mut copy = vec![0; all.len()];
    assert_eq!(burst.copy(0, 0, &mut copy), all.len());
    assert!(copy == all);
    all
}

/// Bytes that tell their place, with an EtherType that is no tag's.
fn plain(len: usize) -> Vec<u8> {
    (0..len).map(|at| at as u8 | 1).collect()
}

fn tagged(len: usize, control: u16) -> Vec<u8> {
    let mut frame = plain(len);
    frame.splice(12..12, [[0x81, 0x00], control.to_be_bytes()].concat());
    frame
}

#[test]
fn frames_with_and_without_a_tag() {
    for control in [0, 0x0fff, 0xe00a, 0xffff] {
        assert_eq!(burst(&tagged(14, control), Offload::NONE).tag(0), (Tag::Control(control), false));
    }
    for kind in [[0x08, 0x00], [0x88, 0xa8], [0x91, 0x00], [0x81, 0x01], [0x00, 0x81]] {
        let frame = [&plain(12)[..], &kind, &[0; 10]].concat();
        assert_eq!(burst(&frame, Offload::NONE).tag(0), (Tag::None, false), "{kind:?}");
    }
    let mut double = tagged(60, 5);
    double.splice(12..12, [0x81, 0x00, 0x00, 0x0a]);
    assert_eq!(burst(&double, Offload::NONE).tag(0), (Tag::Control(10), true));
    double[16] = 0x88;
    double[17] = 0xa8;
    assert_eq!(burst(&double, Offload::NONE).tag(0), (Tag::Control(10), false));
}

#[test]
fn a_tag_that_is_cut_off_is_broken() {
    let whole = tagged(14, 10);
    for len in 14..18 {
        assert_eq!(burst(&whole[..len], Offload::NONE).tag(0), (Tag::Broken, false), "{len} bytes");
    }
    assert_eq!(burst(&whole, Offload::NONE).tag(0), (Tag::Control(10), false));
}

#[test]
fn a_checksum_does_not_begin_in_the_tag() {
    let frame = tagged(60, 10);
    let tag = |start| burst(&frame, Offload::partial(start, 2, frame.len()).unwrap()).tag(0).0;
    assert_eq!([14, 17, 18].map(tag), [Tag::Broken, Tag::Broken, Tag::Control(10)]);
    // Nor is such a tag popped.
    let mut broken = burst(&frame, Offload::partial(14, 2, frame.len()).unwrap());
    broken.pop_tag(0);
    assert_eq!(forwarded(&broken), frame);
    // Unlike that of a frame that is finished.
    assert_eq!(burst(&frame, Offload::VALID).tag(0).0, Tag::Control(10));
}

#[test]
fn work_left_to_do_moves_with_the_payload() {
    let mut burst = burst(&plain(100), Offload::partial(34, 16, 100).unwrap());
    assert!(burst.push_tag(0, 10));
    assert_eq!(burst.offload(0), Offload::partial(38, 16, 104).unwrap());
    burst.pop_tag(0);
    assert_eq!(burst.offload(0), Offload::partial(34, 16, 100).unwrap());
    assert!(burst.frames()[0].is_offloaded());
}

#[test]
fn frames_with_no_room_for_a_tag() {
    let mut two = plain(60);
    two.splice(12..12, [0x88, 0xa8, 0, 5, 0x81, 0x00, 0, 6]);
    for frame in [two, plain(MAX_FRAME - 3)] {
        let mut burst = burst(&frame, Offload::NONE);
        assert!(!burst.push_tag(0, 10));
        assert!(forwarded(&burst) == frame && burst.frames()[0].full_head([0; HEADROOM]).is_some());
    }
    let mut longest = burst(&plain(MAX_FRAME - 4), Offload::NONE);
    assert!(longest.push_tag(0, 10) && forwarded(&longest) == tagged(MAX_FRAME - 4, 10));
    // The end of a burst.
    assert!(!longest.push_tag(64, 10) && longest.tag(64) == (Tag::None, false));
    longest.pop_tag(64);
    longest.set_tag(64, 1);
}

#[test]
fn the_fast_path_sees_heads_that_are_as_they_were_read() {
    let full = |burst: &Burst| burst.frames()[0].full_head([0; HEADROOM]).is_some();
    let mut burst = burst(&tagged(60, 10), Offload::NONE);
    burst.set_tag(0, 11);
    assert!(full(&burst));
    burst.pop_tag(0);
    assert!(!full(&burst));
    assert!(burst.push_tag(0, 12));
    assert!(full(&burst) && forwarded(&burst) == tagged(60, 12));
}

proptest! {
    /// Frames of any length, reflected or not, however often their tag changes.
    #[test]
    fn pushed_popped_and_changed(
        len in prop_oneof![14..50usize, 14..1600usize],
        starts_tagged in any::<bool>(),
        reflected in any::<bool>(),
        steps in prop::collection::vec(prop::option::of(any::<u16>()), 0..8),
    ) {
        let mut control = starts_tagged.then_some(0x2005);
        let expected = |control: Option<u16>| {
            let mut frame = control.map_or_else(|| plain(len), |control| tagged(len, control));
            if reflected {
                ethernet::swap_addresses(&mut frame);
            }
            frame
        };
        let sent = control.map_or_else(|| plain(len), |control| tagged(len, control));
        let mut burst = burst(&sent, Offload::NONE);
        burst.frames[0].reflected = reflected;
        for step in steps {
            match (control, step) {
                (None, Some(new)) => prop_assert!(burst.push_tag(0, new)),
                (Some(_), Some(new)) => burst.set_tag(0, new),
                (Some(_), None) => burst.pop_tag(0),
                (None, None) => {}
            }
            control = step;
            let mut got = forwarded_reflected(&burst);
            got.truncate(burst.frames()[0].len());
            prop_assert!(got == expected(control), "{control:?}");
        }
    }
}

/// As `forwarded`, for frames whose addresses are swapped.
fn forwarded_reflected(burst: &Burst) -> Vec<u8> {
    let mut copy = vec![0; burst.frames()[0].len() + 1];
    let len = burst.copy(0, 0, &mut copy);
    copy.truncate(len);
    copy
}
