//! Packets in UDP tunnels: an outer frame of UDP, whose payload is a tunnel's header and an inner frame. Used by the property tests and
//! by the fuzz target `segment`.

use crate::reference::{Spec, coalesced, segments};
use ringroad_frame::{
    BURST, Offload,
    offload::{
        Checksum, Claim, HEADERS, Refused, Support, TunnelClaim, checksum,
        segment::{Checksums, Segmenter},
    },
};

const FIN_PSH: u8 = 9;
const CWR: u8 = 128;

/// A frame in a tunnel, to be segmented.
#[derive(Clone, Debug)]
pub struct Tunneled {
    /// Of UDP; its payload is not used.
    pub outer: Spec,
    /// The tunnel's header: 8 bytes of VXLAN, 8 or more of GENEVE.
    pub shim: Vec<u8>,
    pub inner: Spec,
    /// Whether there is an outer checksum.
    pub checksum: bool,
}

impl Tunneled {
    /// Where the inner frame begins.
    fn base(&self) -> usize {
        self.outer.end() + self.shim.len()
    }

    /// Length of all headers.
    pub fn end(&self) -> usize {
        self.base() + self.inner.end()
    }

    /// The outer frame of segment number `index`.
    fn around(&self, inner: Vec<u8>, index: usize) -> Spec {
        let payload = [self.shim.clone(), inner].concat();
        Spec { payload, id: self.outer.id.wrapping_add(index as u16), ..self.outer.clone() }
    }

    /// Without an outer checksum, if it has none.
    fn stripped(&self, mut frame: Vec<u8>) -> Vec<u8> {
        if !self.checksum {
            let at = self.outer.transport() + 6;
            frame[at..at + 2].fill(0);
        }
        frame
    }

    /// The frame with partial checksums.
    pub fn frame(&self) -> Vec<u8> {
        self.stripped(self.around(self.inner.frame(), 0).frame())
    }

    pub fn claim(&self) -> Claim {
        let claim = self.inner.claim();
        Claim { checksum: (claim.checksum.0 + self.base() as u16, claim.checksum.1), ..claim }
    }

    pub fn tunnel(&self) -> TunnelClaim {
        let inner_network = (self.base() + self.inner.network()) as u16;
        TunnelClaim { outer_transport: self.outer.transport() as u16, inner_network, checksum: self.checksum }
    }

    /// Segment number `index` of `count`, built from scratch.
    fn segment(&self, index: usize, count: usize) -> Vec<u8> {
        let (inner, size) = (&self.inner, usize::from(self.inner.size));
        let dropped = if index + 1 < count { FIN_PSH } else { 0 } | if index > 0 { CWR } else { 0 };
        let inner = Spec {
            payload: inner.payload.chunks(size).nth(index).unwrap_or_default().to_vec(),
            seq: inner.seq.wrapping_add((index * size) as u32),
            id: inner.id.wrapping_add(index as u16),
            flags: inner.flags & !dropped,
            ..inner.clone()
        };
        self.stripped(self.around(inner.complete(), index).complete())
    }
}

fn head(frame: &[u8]) -> &[u8] {
    &frame[..frame.len().min(HEADERS)]
}

/// Segments the frame and checks each segment against one that is built from scratch, then coalesces what is inside.
pub fn check(tunneled: &Tunneled) {
    let frame = tunneled.frame();
    let offload =
        Offload::tunneled(tunneled.claim(), tunneled.tunnel(), head(&frame), frame.len()).expect("a correct frame");
    let count = tunneled.inner.payload.chunks(tunneled.inner.size.into()).len().max(1);
    let Some(gso) = offload.gso() else {
        assert!(count == 1 && !tunneled.checksum);
        let mut frame = frame;
        checksum::complete(&mut frame, offload);
        assert_eq!(frame, tunneled.segment(0, 1));
        return;
    };
    assert_eq!((usize::from(gso.header_len), offload.frames(frame.len())), (tunneled.end(), count));
    assert!(offload.needs().contains(if tunneled.checksum { Support::TUNNELS } else { Support::TUNNEL }));
    let complete = segments(&frame, gso, Checksums::Complete);
    assert_eq!(complete.len(), count);
    for (index, (segment, left)) in complete.iter().enumerate() {
        assert!(left.is_none() && segment.len() <= offload.longest(frame.len()));
        assert_eq!(*segment, tunneled.segment(index, count), "segment {index}");
        if tunneled.checksum {
            assert_eq!(checksum::verify(segment), Offload::VALID, "the outer checksum of segment {index}");
        }
    }
    for ((mut partial, left), (complete, _)) in segments(&frame, gso, Checksums::Partial).into_iter().zip(&complete) {
        let (start, offset) = tunneled.claim().checksum;
        assert_eq!((left.checksum(), left.gso()), (Checksum::Partial { start, offset }, None));
        checksum::complete(&mut partial, left);
        assert_eq!(partial, *complete);
    }
    let inner: Vec<_> = complete.into_iter().map(|(segment, _)| segment[tunneled.base()..].to_vec()).collect();
    assert!(inner.iter().all(|inner| checksum::verify(inner) == Offload::VALID));
    if tunneled.inner.kind.is_tcp() && (2..=BURST).contains(&count) {
        let inner: Vec<_> = inner.into_iter().map(|inner| (inner, Offload::VALID)).collect();
        let merged = coalesced(&inner, Support::all());
        assert_eq!(merged.len(), 1);
        assert_eq!(merged[0].0, tunneled.inner.frame());
    }
}

/// Whatever a sender claims of whatever frame: refused, or cut into frames that hold all of its data.
pub fn survive(frame: &[u8], claim: Claim, tunnel: TunnelClaim) {
    let Ok(offload) = Offload::tunneled(claim, tunnel, head(frame), frame.len()) else { return };
    let Some(gso) = offload.gso() else {
        checksum::complete(&mut frame.to_vec(), offload);
        return;
    };
    // A VLAN tag may be missing from both.
    let known = gso.tunnel.unwrap().claim();
    let distance = (known.outer_transport - tunnel.outer_transport, known.inner_network - tunnel.inner_network);
    assert!(distance == (0, 0) || distance == (4, 4) && matches!(frame[12..14], [0x81, 0x00] | [0x88, 0xa8]));
    assert_eq!(known.checksum, tunnel.checksum);
    for checksums in [Checksums::Complete, Checksums::Partial] {
        let parts = segments(frame, gso, checksums);
        assert_eq!(parts.len(), offload.frames(frame.len()));
        let total = parts.iter().map(|(part, _)| part.len() - usize::from(gso.header_len)).sum::<usize>();
        assert_eq!(total, frame.len() - usize::from(gso.header_len));
        assert!(parts.iter().all(|(part, _)| part.len() <= offload.longest(frame.len())));
    }
}

/// Headers that changed after they were checked: refused, or cut as before.
pub fn change(tunneled: &Tunneled, at: usize, value: u8) {
    let mut frame = tunneled.frame();
    let claimed = Offload::tunneled(tunneled.claim(), tunneled.tunnel(), head(&frame), frame.len());
    let Some(gso) = claimed.ok().and_then(Offload::gso) else { return };
    if let Some(byte) = frame.get_mut(at) {
        *byte = value;
    }
    let again: Result<_, Refused> = Segmenter::new(gso, head(&frame), frame.len(), Checksums::Complete, 0);
    if let Ok(segmenter) = again {
        assert!(segmenter.longest() <= frame.len());
    }
}
