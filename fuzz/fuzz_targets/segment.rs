//! Segmentation and coalescing. Frames that are correct: each segment is the one that is built from scratch, with the checksums of an
//! independent implementation, and all of them are coalesced or reassembled to the frame. Any other frames with any virtio-net
//! header: no panic, and no data lost from a frame that is accepted.
#![no_main]

mod input;
#[path = "../../crates/frame/tests/offload/reference.rs"]
mod reference;
#[path = "../../crates/frame/tests/offload/tunnels.rs"]
mod tunnels;

use input::Input;
use reference::{Spec, check, coalesced, segments, survive};
use ringroad_frame::{
    BURST, Offload,
    offload::{Claim, HEADERS, Kind, Support, TunnelClaim, checksum, segment::Checksums},
};
use ringroad_net::offload::{read_tunneled, write, write_tunnel};
use ringroad_wire::vnet_hdr::{TunnelHdr, VnetHdr};
use tunnels::Tunneled;

const KINDS: [Kind; 6] = [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6, Kind::Fragments4, Kind::Fragments6];

impl Input<'_> {
    fn kind(&mut self) -> Kind {
        KINDS[usize::from(self.byte()) % KINDS.len()]
    }

    /// A correct frame, of at most 128 segments.
    fn spec(&mut self) -> Spec {
        let kind = self.kind();
        self.spec_of(kind)
    }

    /// A correct frame in a tunnel, if its headers fit.
    fn tunneled(&mut self) -> Option<Tunneled> {
        let shape = self.byte();
        let outer = self.spec_of([Kind::Udp4, Kind::Udp6][usize::from(shape & 1)]);
        let inner = self.spec_of(KINDS[usize::from(shape >> 1 & 3)]);
        let shim = (0..shape >> 3).map(|_| self.byte()).collect();
        let mut tunneled = Tunneled { outer, shim, inner, checksum: self.byte() & 1 == 1 };
        let most = 65535usize.checked_sub(tunneled.end())?;
        tunneled.inner.payload.truncate(most);
        (tunneled.end() <= HEADERS).then_some(tunneled)
    }

    fn spec_of(&mut self, kind: Kind) -> Spec {
        let shape = self.byte();
        let (tags, ip_options) = (usize::from(shape % 3), usize::from(shape / 3 % 11));
        let extensions = [(); 4].map(|()| self.byte()).map(|byte| (byte & 1 == 1).then_some(byte >> 1 & 1));
        let (tcp_options, flags) = (usize::from(self.byte() % 11), 16 | self.byte() & 0xc9);
        let (seq, id, flow, df) = (u32::from_le_bytes(self.take()), self.word(), self.byte(), self.byte() & 1 == 1);
        let mut spec = Spec {
            kind,
            tags,
            ip_options,
            extensions,
            tcp_options,
            flags,
            seq,
            id,
            df,
            flow,
            size: 0,
            payload: Vec::new(),
        };
        let most = 65535 - (spec.end() - 14 - 4 * tags);
        let len = (self.number() as usize).clamp(1, most);
        spec.size = (len.div_ceil(128).max(8) + usize::from(self.byte())).min(65535) as u16;
        let step = self.byte() | 1;
        spec.payload = (0..len).map(|index| (index as u8).wrapping_mul(step) ^ (index >> 8) as u8).collect();
        spec
    }

    /// A frame with anything changed.
    fn damaged(&mut self) -> (Vec<u8>, Spec) {
        let spec = self.spec();
        let mut frame = spec.frame();
        for _ in 0..self.byte() % 4 {
            let (at, value) = (self.number() as usize, self.byte());
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        if self.byte() & 1 == 1 {
            frame.truncate(self.number() as usize);
        }
        (frame, spec)
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    match input.byte() % 6 {
        0 => check(&input.spec()),
        4 => input.tunneled().iter().for_each(tunnels::check),
        5 => {
            let Some(tunneled) = input.tunneled() else { return };
            let (mut frame, mut claim, mut tunnel) = (tunneled.frame(), tunneled.claim(), tunneled.tunnel());
            for _ in 0..input.byte() % 4 {
                let (at, value) = (usize::from(input.byte()), input.byte());
                tunnels::change(&tunneled, at, value);
                if let Some(byte) = frame.get_mut(at) {
                    *byte = value;
                }
            }
            match input.byte() % 8 {
                0 => frame.truncate(input.number() as usize),
                1 => tunnel.outer_transport = input.byte().into(),
                2 => tunnel.inner_network = input.byte().into(),
                3 => tunnel = TunnelClaim { checksum: !tunnel.checksum, ..tunnel },
                4 => claim.checksum = (input.word(), input.word()),
                5 => (claim.kind, claim.size) = (input.kind(), input.word()),
                _ => {}
            }
            tunnels::survive(&frame, claim, tunnel);
        }
        1 => {
            let (frame, spec) = input.damaged();
            let right = spec.claim();
            let size = if input.byte() & 1 == 1 { input.word() } else { right.size };
            let checksum = if input.byte() & 1 == 1 { (input.word(), input.word()) } else { right.checksum };
            let kind = if input.byte() & 1 == 1 { input.kind() } else { right.kind };
            survive(&frame, Claim { kind, ecn: input.byte() & 1 == 1, size, checksum });
        }
        2 => headers(&mut input),
        _ => burst(&mut input),
    }
});

/// Any header before any bytes. What is accepted is described the same way again.
fn headers(input: &mut Input) {
    let header = VnetHdr {
        flags: input.byte(),
        gso_type: input.byte(),
        hdr_len: input.word().into(),
        gso_size: input.word().into(),
        csum_start: input.word().into(),
        csum_offset: input.word().into(),
        num_buffers: input.word().into(),
    };
    let tunnel = TunnelHdr { outer_th_offset: input.word().into(), inner_nh_offset: input.word().into() };
    let support = Support::from_bits_truncate(input.word());
    let frame = match input.byte() % 3 {
        0 => input.0.to_vec(),
        1 => input.damaged().0,
        _ => input.tunneled().map_or_else(Vec::new, |tunneled| tunneled.frame()),
    };
    let head = &frame[..frame.len().min(HEADERS)];
    let Ok(offload) = read_tunneled(&header, tunnel, head, frame.len(), support) else { return };
    let needs = offload.needs();
    // Congestion may be in the TCP header only.
    assert!((support | Support::ECN).contains(needs));
    let again = write(offload, support | needs, 1);
    let tunnel = write_tunnel(offload);
    assert_eq!(read_tunneled(&again, tunnel, head, frame.len(), support | needs), Ok(offload));
    if let Some(gso) = offload.gso() {
        segments(&frame, gso, Checksums::Complete);
    }
}

/// Frames of some flows, some damaged: what is coalesced becomes the same frames again.
fn burst(input: &mut Input) {
    let support = Support::from_bits_truncate(input.word());
    let mut frames = Vec::new();
    while !input.is_empty() && frames.len() < BURST {
        let (frame, spec) = input.damaged();
        match Offload::segmented(spec.claim(), &frame[..frame.len().min(HEADERS)], frame.len()).map(Offload::gso) {
            Ok(Some(gso)) => {
                frames.extend(segments(&frame, gso, Checksums::Complete).into_iter().map(|(part, _)| part))
            }
            _ => frames.push(frame),
        }
    }
    frames.truncate(BURST);
    let frames: Vec<_> =
        frames.into_iter().map(|frame| (checksum::verify(&frame), frame)).map(|(a, b)| (b, a)).collect();
    let mut seen = 0;
    for (frame, offload, members) in coalesced(&frames, support) {
        seen += members.len();
        if members.len() > 1 {
            assert!(support.contains(offload.needs()));
            let parts = segments(&frame, offload.gso().unwrap(), Checksums::Complete);
            assert!(parts.iter().map(|(part, _)| part).eq(members.iter().map(|&index| &frames[index].0)));
        }
    }
    assert_eq!(seen, frames.len());
}
