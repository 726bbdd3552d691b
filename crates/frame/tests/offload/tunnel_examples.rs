//! UDP tunnels, one rule each.

use crate::{
    reference::{Spec, segments},
    tags::Recorder,
    tunnels::{Tunneled, check},
};
use ringroad_frame::{
    ALL, Burst, HEADROOM, Offload, Software,
    offload::{Claim, HEADERS, Kind, Refused, Support, Tunnel, TunnelClaim, segment::Checksums},
};
use ringroad_mem::{Region, Table};
use ringroad_wire::ip::{IpError, Version};
use std::sync::Arc;

fn spec(kind: Kind, len: usize) -> Spec {
    Spec {
        kind,
        tags: 0,
        ip_options: 0,
        extensions: [None; 4],
        tcp_options: 0,
        flags: 16,
        seq: 1,
        id: 0xffff,
        df: true,
        flow: 7,
        size: 1000,
        payload: (0..len).map(|index| ((index * 7) >> 3) as u8).collect(),
    }
}

/// VXLAN: 8 bytes of header.
fn vxlan(outer: Kind, inner: Kind, checksum: bool) -> Tunneled {
    Tunneled { outer: spec(outer, 0), shim: vec![8, 0, 0, 0, 0, 0, 42, 0], inner: spec(inner, 2500), checksum }
}

fn offload(tunneled: &Tunneled, claim: Claim, tunnel: TunnelClaim) -> Result<Offload, Refused> {
    let frame = tunneled.frame();
    Offload::tunneled(claim, tunnel, &frame[..frame.len().min(HEADERS)], frame.len())
}

fn right(tunneled: &Tunneled) -> Offload {
    offload(tunneled, tunneled.claim(), tunneled.tunnel()).unwrap()
}

/// The packet of the specification's example (virtio 1.4, 5.1.6.2), which is wrong about two positions: the outer UDP header begins
/// at 34, behind 14 and 20 bytes, not at 42, and 14 + 20 + 8 + 8 + 14 is 64.
#[test]
fn positions_of_the_specification() {
    let geneve = Tunneled { shim: vec![0; 8], ..vxlan(Kind::Udp4, Kind::Tcp4, false) };
    assert_eq!(geneve.claim().checksum, (84, 16));
    let tunnel = TunnelClaim { outer_transport: 34, inner_network: 64, checksum: false };
    assert_eq!(geneve.tunnel(), tunnel);
    let gso = right(&geneve).gso().unwrap();
    let known = Tunnel { outer: Version::V4, outer_transport: 34, inner_network: 64, checksum: false };
    assert_eq!((gso.tunnel, gso.header_len, known.claim()), (Some(known), 104, tunnel));
}

#[test]
fn versions_inside_and_outside() {
    let inside = [(Kind::Tcp4, Support::TCP4), (Kind::Tcp6, Support::TCP6), (Kind::Udp4, Support::UDP4)];
    for outer in [Kind::Udp4, Kind::Udp6] {
        for (inner, kind) in inside.into_iter().chain([(Kind::Udp6, Support::UDP6)]) {
            for (checksum, tunnel) in [(false, Support::TUNNEL), (true, Support::TUNNELS)] {
                for shim in [0, 8, 16, 76] {
                    let tunneled = Tunneled { shim: vec![3; shim], ..vxlan(outer, inner, checksum) };
                    check(&tunneled);
                    assert_eq!(right(&tunneled).needs(), Support::CHECKSUM | kind | tunnel);
                }
            }
        }
    }
}

/// With an outer checksum there is something to do to a single segment, too; without, only the inner checksum.
#[test]
fn a_single_segment() {
    for checksum in [false, true] {
        let mut tunneled = vxlan(Kind::Udp4, Kind::Tcp4, checksum);
        tunneled.inner.payload.truncate(1000);
        check(&tunneled);
        let needs = right(&tunneled).needs();
        assert_eq!(needs.contains(Support::TUNNELS), checksum);
        assert!(needs.contains(Support::CHECKSUM));
    }
}

/// Headers alone, such as an acknowledgement, are a frame too.
#[test]
fn no_data() {
    for inner in [Kind::Tcp4, Kind::Udp6] {
        for checksum in [false, true] {
            let mut tunneled = vxlan(Kind::Udp4, inner, checksum);
            tunneled.inner.payload.clear();
            check(&tunneled);
            assert_eq!(right(&tunneled).gso().is_some(), checksum);
        }
    }
}

/// A tunnel's header of an odd length: the inner checksum begins in the middle of a word of the outer one.
#[test]
fn odd_positions() {
    for shim in [1, 7, 9] {
        check(&Tunneled { shim: vec![0xa5; shim], ..vxlan(Kind::Udp6, Kind::Tcp4, true) });
    }
}

#[test]
fn identifications_of_both_headers() {
    let tunneled = vxlan(Kind::Udp4, Kind::Tcp4, false);
    let parts = segments(&tunneled.frame(), right(&tunneled).gso().unwrap(), Checksums::Complete);
    let ids: Vec<_> = parts.iter().map(|(part, _)| [&part[18..20], &part[68..70]].concat()).collect();
    assert_eq!(ids, [[0xff; 4], [0; 4], [0, 1, 0, 1]]);
}

#[test]
fn tunnels_that_are_refused() {
    let tunneled = vxlan(Kind::Udp4, Kind::Tcp4, true);
    let (claim, tunnel) = (tunneled.claim(), tunneled.tunnel());
    let refused = |claim, tunnel| offload(&tunneled, claim, tunnel).unwrap_err();
    for found in [0, 33, 35, 38, 0xffff] {
        let tunnel = TunnelClaim { outer_transport: found, ..tunnel };
        assert_eq!(refused(claim, tunnel), Refused::OuterTransport { expected: 34, found });
    }
    for found in [0, 34, 41] {
        let tunnel = TunnelClaim { inner_network: found, ..tunnel };
        assert_eq!(refused(claim, tunnel), Refused::InnerNetwork { least: 42, found });
    }
    // In the inner Ethernet header; behind the private copy.
    let inner_network = |inner_network| refused(claim, TunnelClaim { inner_network, ..tunnel });
    assert_eq!(inner_network(50), Refused::Ip(IpError::Version { expected: 4, found: 0 }));
    assert!(matches!(inner_network(0xffff), Refused::Ip(IpError::Truncated { .. })));
    for kind in [Kind::Fragments4, Kind::Fragments6] {
        assert_eq!(refused(Claim { kind, ..claim }, tunnel), Refused::Tunneled { found: kind });
    }
    let kind = Kind::Udp4;
    assert_eq!(refused(Claim { kind, ..claim }, tunnel), Refused::Protocol { expected: kind, found: 6 });
    // The outer checksum.
    let expected = (84, 16);
    let outer = Claim { checksum: (34, 6), ..claim };
    assert_eq!(refused(outer, tunnel), Refused::ChecksumElsewhere { expected, found: (34, 6) });
    let none = TunnelClaim { checksum: false, ..tunnel };
    let found = u16::from_be_bytes(*tunneled.frame()[40..].first_chunk().unwrap());
    assert_eq!(refused(claim, none), Refused::OuterChecksum { found });
    assert_eq!(
        refused(claim, none).to_string(),
        format!("expected no outer checksum, or one to be completed, found {found:#06x}")
    );
}

/// Linux does not count a tag that it puts into a frame.
#[test]
fn positions_without_the_tag() {
    let mut tunneled = vxlan(Kind::Udp4, Kind::Tcp4, true);
    for tags in 0..=2 {
        tunneled.outer.tags = tags;
        let TunnelClaim { outer_transport, inner_network, checksum } = tunneled.tunnel();
        let claim = TunnelClaim { outer_transport: outer_transport - 4, inner_network: inner_network - 4, checksum };
        let taken = offload(&tunneled, tunneled.claim(), claim);
        assert_eq!(taken.ok(), (tags > 0).then(|| right(&tunneled)), "{tags} tags");
        // Of both or of none.
        assert!(offload(&tunneled, tunneled.claim(), TunnelClaim { inner_network, ..claim }).is_err());
    }
}

#[test]
fn outer_headers_that_are_refused() {
    let tunneled = vxlan(Kind::Udp4, Kind::Tcp4, false);
    let refused = |at: usize, bytes: &[u8]| {
        let mut frame = tunneled.frame();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        Offload::tunneled(tunneled.claim(), tunneled.tunnel(), &frame[..HEADERS], frame.len()).unwrap_err()
    };
    let expected = Kind::Udp4;
    assert_eq!(refused(12, &[0x08, 0x06]), Refused::EtherType { expected, found: 0x0806 });
    assert_eq!(refused(23, &[6]), Refused::Protocol { expected, found: 6 });
    assert_eq!(refused(20, &[0x20, 0]), Refused::Fragment);
    let actual = tunneled.frame().len();
    assert_eq!(refused(16, &[0, 99]), Refused::IpLen { found: 99, actual: actual - 14 });
    assert_eq!(refused(38, &[0, 99]), Refused::UdpLen { found: 99, actual: actual - 34 });
    assert_eq!(refused(66, &[0, 99]), Refused::IpLen { found: 99, actual: actual - 64 });
}

#[test]
fn headers_beyond_the_private_copy() {
    let mut tunneled = Tunneled { shim: vec![0; 256 - 42 - 54], ..vxlan(Kind::Udp4, Kind::Tcp4, true) };
    assert_eq!(tunneled.end(), HEADERS);
    check(&tunneled);
    tunneled.shim.extend([0; 4]);
    let error = offload(&tunneled, tunneled.claim(), tunneled.tunnel()).unwrap_err();
    assert_eq!(error, Refused::Headers { needed: 260, found: HEADERS });
}

/// A burst of this frame, in memory of its own.
fn burst_of(tunneled: &Tunneled) -> Burst {
    let memory = Arc::new(Table::default().with(Region::private(8192, 0).unwrap()).unwrap());
    let frame = tunneled.frame();
    memory.regions()[0].span(HEADROOM, frame.len()).unwrap().write(&frame);
    let mut burst = Burst::default();
    burst.start_in(&memory);
    burst.push_at(0, HEADROOM + frame.len(), right(tunneled)).unwrap();
    burst
}

#[test]
fn a_receiver_gets_only_what_it_takes() {
    let tunneled = vxlan(Kind::Udp6, Kind::Tcp4, true);
    let (frame, gso) = (tunneled.frame(), right(&tunneled).gso().unwrap());
    let whole = Support::CHECKSUM | Support::TCP4 | Support::TUNNELS;
    for support in [Support::all(), whole, whole - Support::TUNNEL_CHECKSUM, whole - Support::TCP4, Support::empty()] {
        let mut sink = Recorder { support, got: Vec::new() };
        let (accepted, _) = Software::new().unwrap().put(&mut sink, &burst_of(&tunneled), &ALL[..1]);
        let expected = if support.contains(whole) {
            vec![(frame.clone(), right(&tunneled))]
        } else {
            let partial = support.contains(Support::CHECKSUM);
            segments(&frame, gso, if partial { Checksums::Partial } else { Checksums::Complete })
        };
        assert_eq!((sink.got, accepted), (expected.clone(), expected.len()));
    }
}

/// Where the headers are changes with a VLAN tag.
#[test]
fn a_tag_is_pushed_and_popped() {
    let tunneled = vxlan(Kind::Udp4, Kind::Tcp6, true);
    let tagged = Tunneled { outer: Spec { tags: 1, ..tunneled.outer.clone() }, ..tunneled.clone() };
    for (from, to) in [(&tunneled, &tagged), (&tagged, &tunneled)] {
        let mut burst = burst_of(from);
        if to.outer.tags == 1 {
            assert!(burst.push_tag(0, 0x2007));
        } else {
            burst.pop_tag(0);
        }
        assert_eq!(burst.offload(0), right(to));
    }
}
