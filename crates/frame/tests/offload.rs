//! Property tests of `offload`: what is cut is put together again, by an independent implementation and by `coalesce`.

#[path = "offload/examples.rs"]
mod examples;
#[path = "offload/reference.rs"]
mod reference;
#[path = "offload/tags.rs"]
mod tags;
#[path = "offload/tunnel_examples.rs"]
mod tunnel_examples;
#[path = "offload/tunnels.rs"]
mod tunnels;

use proptest::{collection::vec, option, prelude::*, sample::select};
use reference::{Spec, check, coalesced, segments, survive};
use ringroad_frame::{
    BURST, Offload,
    offload::{Claim, HEADERS, Kind, Support, TunnelClaim, checksum, segment::Checksums},
};
use ringroad_wire::ethernet;
use tunnels::Tunneled;

const KINDS: [Kind; 6] = [Kind::Tcp4, Kind::Tcp6, Kind::Udp4, Kind::Udp6, Kind::Fragments4, Kind::Fragments6];
const ACK: u8 = 16;

/// Frames of this kind, with up to so many bytes of payload, and 128 segments at most.
fn spec(kind: Kind, longest: usize) -> impl Strategy<Value = Spec> {
    let link = (0..=2usize, 0..=10usize, [(); 4].map(|()| option::of(0..=1u8)));
    let tcp = (0..=10usize, any::<u8>(), any::<u32>());
    let payload = (0..=longest, any::<u64>(), 1..=128usize, 0..1000usize);
    (link, tcp, any::<u16>(), any::<bool>(), any::<u8>(), payload).prop_map(
        move |(link, tcp, id, df, flow, payload)| {
            let (tags, ip_options, extensions) = link;
            let (tcp_options, flags, seq) = tcp;
            let (len, seed, segments, extra) = payload;
            let size = (len.div_ceil(segments) + extra).clamp(8, 65535) as u16;
            let payload = (0..len as u64).map(|index| (index.wrapping_mul(seed | 1) >> 16) as u8).collect();
            // No SYN, no RST, no URG.
            let flags = ACK | flags & 0xc9;
            Spec { kind, tags, ip_options, extensions, tcp_options, flags, seq, id, df, flow, size, payload }
        },
    )
}

fn any_spec(longest: usize) -> impl Strategy<Value = Spec> {
    select(&KINDS[..]).prop_flat_map(move |kind| spec(kind, longest))
}

/// Frames in UDP tunnels whose headers fit into the private copy, with up to so many bytes of payload.
fn tunneled(longest: usize) -> impl Strategy<Value = Tunneled> {
    let outer = select(&[Kind::Udp4, Kind::Udp6][..]).prop_flat_map(|kind| spec(kind, 1));
    let inner = select(&KINDS[..4]).prop_flat_map(move |kind| spec(kind, longest));
    let shim = prop_oneof![Just(8), (2..=18usize).prop_map(|words| 4 * words), 0..60usize];
    (outer, shim, inner, any::<bool>(), any::<u8>()).prop_map(|(mut outer, shim, mut inner, checksum, seed)| {
        let shim: Vec<_> = (0..shim as u8).map(|index| index.wrapping_mul(seed)).collect();
        // Most frames would not fit with all that is possible.
        let options = outer.extensions.iter_mut().chain(&mut inner.extensions);
        options.enumerate().filter(|(index, _)| seed as usize % 8 != *index).for_each(|(_, option)| *option = None);
        (outer.ip_options, inner.tags) = (outer.ip_options % 4, inner.tags % 2);
        Tunneled { outer, shim, inner, checksum }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Each segment of a tunneled frame is the frame that its sender would have sent.
    #[test]
    fn tunneled_segments(tunneled in tunneled(5000)) {
        prop_assume!(tunneled.end() <= HEADERS);
        tunnels::check(&tunneled);
    }

    /// Tunnels with anything changed, or cut anywhere.
    #[test]
    fn damaged_tunnels(
        tunneled in tunneled(600),
        changes in vec((0..260usize, any::<u8>()), 0..4),
        cut in option::of(0..300usize),
        other in select(&KINDS[..]),
        claim in (any::<u16>(), any::<u16>(), any::<u16>(), 0..300u16, 0..300u16, any::<u8>()),
    ) {
        let mut frame = tunneled.frame();
        for &(at, value) in &changes {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
            tunnels::change(&tunneled, at, value);
        }
        frame.truncate(cut.unwrap_or(frame.len()));
        let (right, tunnel) = (tunneled.claim(), tunneled.tunnel());
        // Mostly right.
        let pick = |bit: u8, right: u16, wrong: u16| if claim.5 == bit { wrong } else { right };
        let checksum = (pick(0, right.checksum.0, claim.0), pick(1, right.checksum.1, claim.1));
        let kind = if claim.5 == 3 { other } else { right.kind };
        let claimed = Claim { kind, ecn: false, size: pick(2, right.size, claim.2), checksum };
        let outer_transport = pick(4, tunnel.outer_transport, claim.3);
        let inner_network = pick(5, tunnel.inner_network, claim.4);
        let checksum = tunnel.checksum != (claim.5 == 6);
        tunnels::survive(&frame, claimed, TunnelClaim { outer_transport, inner_network, checksum });
    }

    /// Each segment is the frame that its sender would have sent, and all of them are the frame that was cut.
    #[test]
    fn segments_are_put_together_again(spec in any_spec(5000)) {
        check(&spec);
    }

    /// A VLAN tag is pushed onto a frame that is to be cut, or popped.
    #[test]
    fn with_a_tag_more_or_less(spec in any_spec(3000), support in any::<u16>()) {
        tags::check(&spec, Support::from_bits_truncate(support));
    }

    /// Headers of any kind with anything changed, or cut anywhere.
    #[test]
    fn damaged_frames(
        spec in any_spec(600),
        changes in vec((0..160usize, any::<u8>()), 0..4),
        cut in option::of(0..300usize),
        other in select(&KINDS[..]),
        as_is in any::<bool>(),
        claim in (any::<u16>(), any::<u16>(), any::<u16>(), 0..8u8),
    ) {
        let mut frame = spec.frame();
        for (at, value) in changes {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        frame.truncate(cut.unwrap_or(frame.len()));
        let right = spec.claim();
        let pick = |bit: u8, right: u16, wrong: u16| if claim.3 >> bit & 1 == 1 { wrong } else { right };
        let checksum = (pick(0, right.checksum.0, claim.0), pick(1, right.checksum.1, claim.1));
        let size = pick(2, right.size, claim.2);
        survive(&frame, Claim { kind: if as_is { spec.kind } else { other }, ecn: false, size, checksum });
        checksum::verify(&frame);
        coalesced(&[(frame.clone(), Offload::VALID), (frame, Offload::VALID)], Support::all());
    }

    /// Flows whose frames alternate: the receiver sees the frames of each in the order in which they were sent, and cutting what was
    /// coalesced gives these frames again.
    #[test]
    fn coalescing_keeps_order_and_content(
        specs in vec(prop_oneof![spec(Kind::Tcp4, 2000), spec(Kind::Tcp6, 2000), spec(Kind::Udp4, 400)], 1..12),
        order in vec(any::<u8>(), BURST),
        odd in vec((0..BURST, 0..80usize, any::<u8>()), 0..3),
        support in any::<u16>(),
    ) {
        let mut flows: Vec<_> = specs
            .iter()
            .map(|spec| {
                let frame = spec.frame();
                let whole = Offload::segmented(spec.claim(), &frame[..frame.len().min(HEADERS)], frame.len()).unwrap();
                let mut frames = whole.gso().map_or_else(Vec::new, |gso| segments(&frame, gso, Checksums::Complete));
                frames.reverse();
                frames
            })
            .collect();
        let mut burst = Vec::new();
        for pick in order {
            let left: Vec<_> = (0..flows.len()).filter(|&flow| !flows[flow].is_empty()).collect();
            let Some(&flow) = left.get(usize::from(pick) % left.len().max(1)) else { break };
            burst.push((flows[flow].pop().unwrap().0, Offload::VALID));
        }
        for (index, at, value) in odd {
            let Some((frame, offload)) = burst.get_mut(index) else { continue };
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
            repair(frame);
            *offload = checksum::verify(frame);
        }
        let support = Support::from_bits_truncate(support | 1);
        let groups = coalesced(&burst, support);
        let mut seen: Vec<_> = groups.iter().flat_map(|(_, _, members)| members.clone()).collect();
        let flow = |index: usize| flow_of(&burst[index].0);
        for (later, &index) in seen.iter().enumerate() {
            for &before in &seen[..later] {
                prop_assert!(before < index || flow(before).is_none() || flow(before) != flow(index), "{before} {index}");
            }
        }
        for (frame, offload, members) in &groups {
            prop_assert!(support.contains(offload.needs()) || members.len() == 1);
            if let Some(gso) = offload.gso() {
                let parts = segments(frame, gso, Checksums::Complete);
                prop_assert_eq!(parts.len(), members.len());
                for ((part, _), &index) in parts.iter().zip(members) {
                    prop_assert_eq!(part, &burst[index].0);
                }
            }
        }
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..burst.len()), "each frame is in one group");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Frames of up to 64 KiB.
    #[test]
    fn long_frames(spec in any_spec(65000)) {
        // Not longer than an IP packet can be.
        let spec = Spec { payload: spec.payload[..spec.payload.len().min(65535 - (spec.end() - 14))].to_vec(), ..spec };
        check(&spec);
    }

    #[test]
    fn long_tunneled_frames(tunneled in tunneled(65000)) {
        prop_assume!(tunneled.end() <= HEADERS);
        let mut tunneled = tunneled;
        tunneled.inner.payload.truncate(65535 - (tunneled.end() - 14));
        tunnels::check(&tunneled);
    }
}

/// Gives a frame valid checksums, if it still is one.
fn repair(frame: &mut [u8]) -> Option<()> {
    let (_, network) = ethernet::payload(frame)?;
    if let Ok(ip) = etherparse::Ipv4HeaderSlice::from_slice(&frame[network..]) {
        let checksum = ip.to_header().calc_header_checksum();
        frame[network + 10..network + 12].copy_from_slice(&checksum.to_be_bytes());
    }
    let at = match etherparse::SlicedPacket::from_ethernet(frame).ok()?.transport {
        // Not if there is something behind the packet.
        Some(etherparse::TransportSlice::Tcp(ref tcp))
            if tcp.slice().as_ptr_range().end == frame.as_ptr_range().end =>
        {
            frame.len() - tcp.slice().len()
        }
        _ => return None,
    };
    let checksum = reference::checksum_of(frame, at, true);
    frame[at + 16..at + 18].copy_from_slice(&checksum.to_be_bytes());
    Some(())
}

/// Addresses and ports, if the frame is intact TCP.
fn flow_of(frame: &[u8]) -> Option<Vec<u8>> {
    let sliced = etherparse::SlicedPacket::from_ethernet(frame).ok()?;
    let Some(etherparse::TransportSlice::Tcp(tcp)) = sliced.transport else { return None };
    let ports = [tcp.source_port(), tcp.destination_port()].map(u16::to_be_bytes).concat();
    let addresses = match sliced.net? {
        etherparse::NetSlice::Ipv4(ip) => [ip.header().source(), ip.header().destination()].concat(),
        etherparse::NetSlice::Ipv6(ip) => [ip.header().source(), ip.header().destination()].concat(),
        etherparse::NetSlice::Arp(_) => return None,
    };
    Some([frame[..14].to_vec(), addresses, ports].concat())
}
