//! Frames whose VLAN tag was pushed or popped on their way, with work left to do.

use super::reference::{self, Spec, segments};
use ringroad_frame::{
    ALL, Burst, HEADROOM, Offload, Sink, Software, Tag,
    offload::{Claim, HEADERS, Kind, Support, segment::Checksums},
};
use ringroad_mem::{Region, Table};
use std::sync::Arc;

/// A receiver that keeps what it gets.
pub struct Recorder {
    pub support: Support,
    pub got: Vec<(Vec<u8>, Offload)>,
}

impl Sink for Recorder {
    fn support(&self) -> Support {
        self.support
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        for index in which.iter().map(|&index| usize::from(index)) {
            let frame = &burst.frames()[index];
            let (head, len) = frame.head();
            let mut bytes = head[HEADROOM..len].to_vec();
            for piece in burst.rest(index) {
                let at = bytes.len();
                bytes.resize(at + piece.len(), 0);
                piece.read(&mut bytes[at..]);
            }
            assert_eq!(bytes.len(), frame.len());
            self.got.push((bytes, burst.offload(index)));
        }
        which.len()
    }
}

fn whole(spec: &Spec) -> (Vec<u8>, Offload) {
    let frame = spec.frame();
    let claim: Claim = spec.claim();
    let offload = Offload::segmented(claim, &frame[..frame.len().min(HEADERS)], frame.len()).unwrap();
    (frame, offload)
}

/// Pops the frame's tag, or pushes one: it is then the frame that its sender would have built so, also when it is cut.
pub fn check(spec: &Spec, support: Support) {
    let (frame, offload) = whole(spec);
    let memory = Arc::new(Table::default().with(Region::private(128 << 10, 0).unwrap()).unwrap());
    let place = memory.regions()[0].span(HEADROOM, frame.len()).unwrap();
    assert_eq!(place.write(&frame), frame.len());
    let mut burst = Burst::default();
    burst.start_in(&memory);
    burst.push_at(0, HEADROOM + frame.len(), offload).unwrap();
    let control = u16::from_be_bytes([0x20, spec.flow]);
    let other = match spec.tags {
        0 => {
            assert_eq!(burst.tag(0), (Tag::None, false));
            assert!(burst.push_tag(0, control));
            Spec { tags: 1, ..spec.clone() }
        }
        1 => {
            assert_eq!(burst.tag(0), (Tag::Control(control), false));
            burst.pop_tag(0);
            Spec { tags: 0, ..spec.clone() }
        }
        _ => {
            assert_eq!(burst.tag(0), (Tag::None, false), "the outer one is a provider's");
            assert!(!burst.push_tag(0, control), "a third one");
            spec.clone()
        }
    };
    let (expected, left) = whole(&other);
    assert_eq!((burst.offload(0), burst.link_len(0)), (left, left.longest(expected.len())));
    reference::check(&other);
    let mut sink = Recorder { support, got: Vec::new() };
    Software::new().unwrap().put(&mut sink, &burst, &ALL[..1]);
    if support.contains(left.needs()) {
        assert_eq!(sink.got, [(expected, left)]);
        return;
    }
    match left.gso() {
        // Their identification is drawn by lot.
        Some(gso) if gso.kind == Kind::Fragments6 => assert!(sink.got.len() > 1),
        Some(gso) => {
            let checksums = [Checksums::Complete, Checksums::Partial][usize::from(support.contains(Support::CHECKSUM))];
            assert_eq!(sink.got, segments(&expected, gso, checksums));
        }
        None => {
            let mut complete = expected;
            ringroad_frame::offload::checksum::complete(&mut complete, left);
            assert_eq!(sink.got, [(complete, Offload::NONE)]);
        }
    }
}
