use super::*;
use ringroad_frame::offload::UDP_SEGMENTS;
use ringroad_wire::{
    ip::IpError,
    vnet_hdr::{F_RSC_INFO, SIZE},
};
use zerocopy::{FromBytes, IntoBytes};

const ALL: Support = Support::all();

/// TCP over IPv4 behind a VLAN tag: the TCP header begins at byte 38.
fn tcp4(payload: usize) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend([0x81, 0x00, 0, 5, 0x08, 0x00, 0x45, 0]);
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.extend(vec![0xab; payload]);
    frame
}

/// UDP over IPv6, with a destination options header: the UDP header begins at byte 62.
fn udp6(payload: usize) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
    frame.extend((16 + payload as u16).to_be_bytes());
    frame.extend([60, 64]);
    frame.extend([1; 32]);
    frame.extend([17, 0, 1, 4, 0, 0, 0, 0]);
    frame.extend([0, 80, 0, 81]);
    frame.extend((8 + payload as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(vec![0xab; payload]);
    frame
}

fn header(gso_type: u8, size: u16, start: u16, offset: u16) -> VnetHdr {
    VnetHdr {
        flags: F_NEEDS_CSUM,
        gso_type,
        gso_size: size.into(),
        csum_start: start.into(),
        csum_offset: offset.into(),
        ..VnetHdr::default()
    }
}

fn tso() -> VnetHdr {
    header(GSO_TCPV4, 1000, 38, 16)
}

/// Reads the header of this frame.
fn refused(header: VnetHdr, frame: &[u8]) -> Refused {
    read(&header, frame, frame.len(), ALL).unwrap_err()
}

/// The frame with these bytes changed.
fn changed(mut frame: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    frame[at..at + bytes.len()].copy_from_slice(bytes);
    frame
}

#[test]
fn headers_both_ways() {
    let (tcp, udp) = (tcp4(3000), udp6(3000));
    let cases = [
        (tso(), &tcp, Support::CHECKSUM | Support::TCP4, 58),
        (header(GSO_TCPV4 | GSO_ECN, 8, 38, 16), &tcp, Support::CHECKSUM | Support::TCP4 | Support::ECN, 58),
        (header(GSO_UDP, 1000, 62, 6), &udp, Support::CHECKSUM | Support::FRAGMENTS, 70),
        (header(GSO_UDP_L4, 1001, 62, 6), &udp, Support::CHECKSUM | Support::UDP6, 70),
        (header(GSO_NONE, 0, 38, 16), &tcp, Support::CHECKSUM, 0),
    ];
    for (header, frame, needs, hdr_len) in cases {
        // What is said about the length of the headers is not believed.
        for claimed in [0, 1, 20, 500] {
            let header = VnetHdr { hdr_len: claimed.into(), ..header };
            let offload = read(&header, frame, frame.len(), needs).unwrap();
            assert_eq!(offload.needs(), needs);
            let expected = VnetHdr { hdr_len: hdr_len.into(), num_buffers: 3.into(), ..header };
            assert_eq!(write(offload, needs, 3), expected);
        }
        for missing in needs.iter() {
            let error = read(&header, frame, frame.len(), ALL - missing).unwrap_err();
            assert!(
                matches!(error, Refused::NotNegotiated { negotiated, .. } if negotiated == ALL - missing),
                "{error}"
            );
        }
    }
}

/// TCP over IPv4 in a tunnel over IPv6: UDP at byte 54, 8 bytes of VXLAN, the inner headers at 70, 84 and 104.
fn vxlan(payload: usize) -> Vec<u8> {
    let inner = [&[0; 12][..], &tcp4(payload)[16..]].concat();
    let udp = 16 + inner.len() as u16;
    let mut frame = vec![0; 12];
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
    frame.extend(udp.to_be_bytes());
    frame.extend([17, 64]);
    frame.extend([1; 32]);
    frame.extend([0, 80, 0x12, 0xb5]);
    frame.extend(udp.to_be_bytes());
    frame.extend([0, 0, 8, 0, 0, 0, 0, 0, 1, 0]);
    frame.extend(inner);
    frame
}

fn tunnel(outer: u16, inner: u16) -> TunnelHdr {
    TunnelHdr { outer_th_offset: outer.into(), inner_nh_offset: inner.into() }
}

const TUNNELS: [u8; 2] = [GSO_TUNNEL_IPV4, GSO_TUNNEL_IPV6];

/// Reads the header of this frame, with a tunnel.
fn read_vxlan(header: VnetHdr, frame: &[u8], support: Support) -> Result<Offload, Refused> {
    read_tunneled(&header, tunnel(54, 84), frame, frame.len(), support)
}

#[test]
fn tunnels_both_ways() {
    let frame = vxlan(3000);
    let needs = Support::CHECKSUM | Support::TCP4 | Support::TUNNEL;
    for checksum in [0, F_UDP_TUNNEL_CSUM] {
        let needs = if checksum == 0 { needs } else { needs | Support::TUNNEL_CHECKSUM };
        // Either version: the frame says both.
        for version in TUNNELS {
            let right = header(GSO_TCPV4 | version, 1000, 104, 16);
            let right = VnetHdr { flags: right.flags | checksum, ..right };
            let offload = read_vxlan(right, &frame, needs).unwrap();
            assert_eq!(offload.needs(), needs);
            let gso_type = GSO_TCPV4 | GSO_TUNNEL_IPV6;
            let expected = VnetHdr { gso_type, hdr_len: 124.into(), num_buffers: 3.into(), ..right };
            assert_eq!(write(offload, needs, 3), expected, "the outer version is written, as by Linux");
            assert_eq!(write_tunnel(offload), tunnel(54, 84));
            for missing in needs.iter() {
                let error = read_vxlan(right, &frame, ALL - missing).unwrap_err();
                assert!(matches!(error, Refused::NotNegotiated { negotiated, .. } if negotiated == ALL - missing));
            }
        }
    }
    assert_eq!(write_tunnel(Offload::NONE), TunnelHdr::default());
    let plain = Offload::segmented(
        Claim { kind: Kind::Tcp4, ecn: false, size: 8, checksum: (38, 16) },
        &tcp4(100)[..],
        58 + 100,
    );
    assert_eq!(write_tunnel(plain.unwrap()), TunnelHdr::default());
}

#[test]
fn tunnels_of_udp() {
    // What is inside says which version.
    let mut frame = vxlan(3000);
    frame[84 + 9] = 17;
    let len = frame.len() - 104;
    frame[108..110].copy_from_slice(&(len as u16).to_be_bytes());
    let offload = read_vxlan(header(GSO_UDP_L4 | GSO_TUNNEL_IPV6, 1000, 104, 6), &frame, ALL).unwrap();
    assert_eq!(offload.gso().map(|gso| gso.kind), Some(Kind::Udp4));
}

#[test]
fn flags_that_contradict_a_tunnel() {
    let frame = vxlan(3000);
    let refused = |header: VnetHdr| read_vxlan(header, &frame, ALL).unwrap_err();
    let right = header(GSO_TCPV4 | GSO_TUNNEL_IPV6, 1000, 104, 16);
    for (flags, gso_type) in [
        (F_NEEDS_CSUM, GSO_TCPV4 | GSO_TUNNEL_IPV4 | GSO_TUNNEL_IPV6),
        (F_NEEDS_CSUM | F_DATA_VALID, right.gso_type),
        (F_DATA_VALID, right.gso_type),
        (F_NEEDS_CSUM | F_UDP_TUNNEL_CSUM, GSO_TCPV4),
        (F_NEEDS_CSUM | F_UDP_TUNNEL_CSUM, GSO_NONE),
        (F_UDP_TUNNEL_CSUM, GSO_NONE),
    ] {
        assert_eq!(refused(VnetHdr { flags, gso_type, ..right }), Refused::TunnelFlags { gso_type, flags });
    }
    assert_eq!(refused(VnetHdr { flags: 0, ..right }), Refused::ChecksumMissing);
    for gso_type in [GSO_NONE, 2, 6].map(|gso_type| gso_type | GSO_TUNNEL_IPV4) {
        assert_eq!(refused(VnetHdr { gso_type, ..right }), Refused::Type { found: gso_type });
    }
    let fragments = VnetHdr { gso_type: GSO_UDP | GSO_TUNNEL_IPV6, ..right };
    assert_eq!(refused(fragments), Refused::Tunneled { found: Kind::Fragments4 });
    // A header without room for it.
    assert_eq!(read(&right, &frame, frame.len(), ALL), Err(Refused::Type { found: right.gso_type }));
    // Both checksums were verified.
    let verified = VnetHdr { flags: F_DATA_VALID | F_UDP_TUNNEL_CSUM, ..VnetHdr::default() };
    assert_eq!(read_vxlan(verified, &frame, ALL), Ok(Offload::VALID));
    // Without tunnels negotiated, the flag has no meaning.
    let plain = VnetHdr { flags: F_UDP_TUNNEL_CSUM, ..VnetHdr::default() };
    assert_eq!(read(&plain, &frame, frame.len(), ALL - Support::TUNNELS), Ok(Offload::NONE));
}

#[test]
fn tunnels_of_features() {
    let (gso, csum) = (bits::NET_F_HOST_UDP_TUNNEL_GSO, bits::NET_F_HOST_UDP_TUNNEL_GSO_CSUM);
    let [guest_gso, guest_csum] = [bits::NET_F_GUEST_UDP_TUNNEL_GSO, bits::NET_F_GUEST_UDP_TUNNEL_GSO_CSUM];
    let (sends, takes) = (bits::NET_F_CSUM, bits::NET_F_GUEST_CSUM);
    assert_eq!(driver_sends(sends | gso), Support::CHECKSUM | Support::TUNNEL);
    assert_eq!(driver_sends(sends | gso | csum), Support::CHECKSUM | Support::TUNNELS);
    assert_eq!(driver_sends(sends | csum | guest_gso | guest_csum), Support::CHECKSUM, "requires the other");
    assert_eq!(driver_sends(gso | csum), Support::empty());
    let valid = Support::CHECKSUM | Support::VALID;
    assert_eq!(driver_takes(takes | guest_gso | guest_csum), valid | Support::TUNNELS);
    assert_eq!(driver_takes(takes | guest_csum | gso | csum), valid);
}

#[test]
fn nothing_to_do() {
    // Fields without their flags mean nothing, as do unknown flags.
    let noise = VnetHdr { flags: 0, ..header(GSO_NONE, 7, 0xffff, 0xffff) };
    for flags in [0, F_RSC_INFO, 0x80, F_DATA_VALID] {
        let header = VnetHdr { flags, ..noise };
        assert_eq!(read(&header, &[], 60, ALL - Support::VALID), Ok(Offload::NONE));
    }
    assert!(Offload::NONE.is_none() && !Offload::VALID.is_none());
    assert_eq!(write(Offload::NONE, ALL, 1).as_bytes(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
}

#[test]
fn verified_checksums() {
    let header = VnetHdr { flags: F_DATA_VALID, ..VnetHdr::default() };
    assert_eq!(read(&header, &[], 60, ALL), Ok(Offload::VALID));
    assert_eq!(write(Offload::VALID, ALL, 0), header);
    assert_eq!(write(Offload::VALID, Support::empty(), 0), VnetHdr::default());
    // A partial checksum is not a valid one.
    let both = VnetHdr { flags: F_DATA_VALID | F_NEEDS_CSUM, ..self::header(GSO_NONE, 0, 38, 16) };
    let offload = read(&both, &[], 60, ALL).unwrap();
    assert_eq!(offload.checksum(), Checksum::Partial { start: 38, offset: 16 });
}

#[test]
fn checksums_out_of_range() {
    let read = |start, offset| read(&header(GSO_NONE, 0, start, offset), &[], 60, ALL);
    assert!(read(14, 0).is_ok() && read(44, 14).is_ok() && read(41, 16).is_ok());
    assert_eq!(read(13, 0), Err(Refused::ChecksumStart { found: 13 }));
    assert_eq!(read(44, 16), Err(Refused::ChecksumBeyond { found: 60, len: 60 }));
    assert_eq!(read(43, 16), Err(Refused::ChecksumBeyond { found: 59, len: 60 }));
    assert_eq!(read(0xffff, 0xfffe), Err(Refused::ChecksumBeyond { found: 0x1fffd, len: 60 }));
    assert_eq!(read(34, 17), Err(Refused::ChecksumOdd { found: 17 }));
    let negotiated = Support::empty();
    let error = super::read(&header(GSO_NONE, 0, 38, 16), &[], 60, negotiated).unwrap_err();
    assert_eq!(error, Refused::NotNegotiated { found: Support::CHECKSUM, negotiated });
    assert_eq!(
        refused(header(GSO_NONE, 0, 60, 2), &[0; 60]).to_string(),
        "expected the checksum within the frame of 60 bytes, found it at 62"
    );
}

#[test]
fn segmentation_that_contradicts_its_header() {
    let frame = tcp4(3000);
    assert_eq!(refused(VnetHdr { flags: 0, ..tso() }, &frame), Refused::ChecksumMissing);
    assert_eq!(refused(header(GSO_TCPV4, 0, 38, 16), &frame), Refused::Size { found: 0, least: 8 });
    assert_eq!(refused(header(GSO_TCPV4, 7, 38, 16), &frame), Refused::Size { found: 7, least: 8 });
    assert_eq!(refused(header(GSO_UDP, 7, 62, 6), &udp6(3000)), Refused::Size { found: 7, least: 8 });
    assert_eq!(refused(header(GSO_UDP_L4, 0, 62, 6), &udp6(3000)), Refused::Size { found: 0, least: 1 });
    let segments = header(GSO_UDP_L4, 10, 62, 6);
    assert!(read(&segments, &udp6(1280), 70 + 1280, ALL).is_ok());
    assert_eq!(refused(segments, &udp6(1281)), Refused::Segments { found: UDP_SEGMENTS + 1, most: UDP_SEGMENTS });
    for gso_type in [2, 6, 0x7f, GSO_ECN, 0x20 | GSO_TCPV4, 0x40 | GSO_UDP_L4] {
        assert_eq!(refused(header(gso_type, 1000, 38, 16), &frame), Refused::Type { found: gso_type });
    }
    let expected = (38, 16);
    assert_eq!(
        refused(header(GSO_TCPV4, 1000, 40, 16), &frame),
        Refused::ChecksumElsewhere { expected, found: (40, 16) }
    );
    assert_eq!(
        refused(header(GSO_TCPV4, 1000, 38, 6), &frame),
        Refused::ChecksumElsewhere { expected, found: (38, 6) }
    );
    let len = frame.len();
    let hdr_len = VnetHdr { hdr_len: (len as u16 + 1).into(), ..tso() };
    assert_eq!(refused(hdr_len, &frame), Refused::HeaderLen { found: len as u16 + 1, len });
}

#[test]
fn segmentation_of_other_frames() {
    let (tcp, udp) = (tcp4(3000), udp6(3000));
    assert_eq!(
        refused(header(GSO_TCPV6, 1000, 38, 16), &tcp),
        Refused::EtherType { expected: Kind::Tcp6, found: 0x0800 }
    );
    assert_eq!(refused(header(GSO_TCPV6, 1000, 62, 16), &udp), Refused::Protocol { expected: Kind::Tcp6, found: 17 });
    assert_eq!(refused(header(GSO_UDP_L4, 1000, 38, 6), &tcp), Refused::Protocol { expected: Kind::Udp4, found: 6 });
    assert_eq!(refused(header(GSO_UDP, 1000, 38, 6), &tcp), Refused::Protocol { expected: Kind::Fragments4, found: 6 });
    let arp = changed(tcp.clone(), 16, &[0x08, 0x06]);
    let error = refused(tso(), &arp);
    assert_eq!(error, Refused::EtherType { expected: Kind::Tcp4, found: 0x0806 });
    assert_eq!(error.to_string(), "expected headers for Tcp4, found EtherType 0x0806");
    let fragment = changed(tcp.clone(), 24, &[0x20, 0]);
    assert_eq!(refused(tso(), &fragment), Refused::Fragment);
    let version = changed(tcp, 18, &[0x65]);
    assert_eq!(refused(tso(), &version), IpError::Version { expected: 4, found: 6 }.into());
}

#[test]
fn headers_that_lie() {
    let (tcp, udp) = (tcp4(3000), udp6(3000));
    for (wrong, found) in [([0x0b, 0xe1], 0x0be1), ([0x0b, 0xdf], 0x0bdf), ([0, 0], 0), ([0xff, 0xff], 0xffff)] {
        assert_eq!(refused(tso(), &changed(tcp.clone(), 20, &wrong)), Refused::IpLen { found, actual: 3040 });
    }
    let jumbo = changed(udp.clone(), 18, &[0, 0]);
    assert_eq!(refused(header(GSO_UDP_L4, 1000, 62, 6), &jumbo), Refused::IpLen { found: 40, actual: 3056 });
    let length = changed(udp.clone(), 66, &[0, 8]);
    for gso_type in [GSO_UDP, GSO_UDP_L4] {
        let error = refused(header(gso_type, 1000, 62, 6), &length);
        assert_eq!(error, Refused::UdpLen { found: 8, actual: 3008 });
    }
    assert_eq!(refused(tso(), &changed(tcp.clone(), 50, &[0x40])), Refused::TcpHeader { found: 16 });
    assert_eq!(refused(tso(), &changed(tcp.clone(), 51, &[0x12])), Refused::TcpFlags { found: 0x12 });
    assert_eq!(refused(tso(), &changed(tcp.clone(), 18, &[0x44])), IpError::HeaderLen { found: 16 }.into());
    // Options that lead out of the frame.
    let short = changed(changed(tcp4(8), 50, &[0xf0]), 51, &[0x10]);
    assert_eq!(refused(header(GSO_TCPV4, 8, 38, 16), &short), Refused::Headers { needed: 98, found: 66 });
    // Extension headers without end: they point behind the frame, or there are too many.
    let beyond = changed(udp.clone(), 55, &[0xff]);
    let error = refused(header(GSO_UDP_L4, 1000, 62, 6), &beyond);
    assert_eq!(error, IpError::Truncated { needed: 40 + 2048, found: 256 - 14 }.into());
    let mut chain = udp.clone();
    for at in (54..54 + 8 * 20).step_by(8) {
        chain[at..at + 8].copy_from_slice(&[60, 0, 1, 4, 0, 0, 0, 0]);
    }
    assert_eq!(refused(header(GSO_UDP_L4, 1000, 62, 6), &chain), IpError::Extensions.into());
}

#[test]
fn frames_cut_within_their_headers() {
    for (frame, header) in [(tcp4(8), header(GSO_TCPV4, 8, 38, 16)), (udp6(8), header(GSO_UDP_L4, 1, 62, 6))] {
        for len in 0..frame.len() - 8 {
            let error = refused(header, &frame[..len]);
            let expected = matches!(
                error,
                Refused::ChecksumBeyond { .. }
                    | Refused::Headers { .. }
                    | Refused::Ip(IpError::Truncated { .. })
                    | Refused::IpLen { .. }
            );
            assert!(expected, "{len} bytes: {error}");
        }
    }
}

#[test]
fn only_a_copy_of_the_headers_is_needed() {
    let frame = tcp4(3000);
    assert!(read(&tso(), &frame[..58], frame.len(), ALL).is_ok());
    assert_eq!(read(&tso(), &frame[..57], frame.len(), ALL), Err(Refused::Headers { needed: 58, found: 57 }));
}

#[test]
fn what_fits_into_one_segment_is_not_segmented() {
    let frame = tcp4(1000);
    let offload = read(&tso(), &frame, frame.len(), ALL).unwrap();
    assert_eq!((offload.gso(), offload.needs()), (None, Support::CHECKSUM));
    let frame = tcp4(1001);
    assert!(read(&tso(), &frame, frame.len(), ALL).unwrap().gso().is_some());
}

#[test]
fn features_of_a_driver() {
    let (sends, takes) = (1u64, 2u64);
    assert_eq!(driver_sends(u64::MAX), ALL - Support::VALID);
    assert_eq!(driver_takes(u64::MAX), ALL);
    assert_eq!((driver_sends(!sends), driver_takes(!takes)), (Support::empty(), Support::empty()));
    let cases = [
        (11, Support::TCP4),
        (12, Support::TCP6),
        (13, Support::ECN),
        (14, Support::FRAGMENTS),
        (56, Support::UDP4 | Support::UDP6),
    ];
    for (bit, support) in cases {
        assert_eq!(driver_sends(sends | 1 << bit), Support::CHECKSUM | support);
        assert_eq!(driver_takes(takes | 1 << bit), Support::CHECKSUM | Support::VALID);
    }
    let cases = [
        (7, Support::TCP4),
        (8, Support::TCP6),
        (9, Support::ECN),
        (10, Support::FRAGMENTS),
        (54, Support::UDP4),
        (55, Support::UDP6),
    ];
    for (bit, support) in cases {
        assert_eq!(driver_takes(takes | 1 << bit), Support::CHECKSUM | Support::VALID | support);
        assert_eq!(driver_sends(sends | 1 << bit), Support::CHECKSUM);
    }
}

#[test]
fn any_header_is_answered() {
    let (frame, tunneled) = (tcp4(200), vxlan(200));
    for word in 0..=u16::MAX {
        let [flags, gso_type] = word.to_le_bytes();
        let mut bytes = [0; SIZE];
        bytes[..2].copy_from_slice(&[flags, gso_type]);
        let plain = VnetHdr::read_from_bytes(&bytes).unwrap();
        let result = read(&plain, &frame, frame.len(), ALL - Support::TUNNELS);
        // Nothing but flags: no segment size, no checksum in the frame.
        let expected = flags & F_NEEDS_CSUM == 0 && gso_type == 0;
        assert_eq!(result.is_ok(), expected, "{plain:?}: {result:?}");
        let result = read_vxlan(plain, &tunneled, ALL);
        let both = flags & F_UDP_TUNNEL_CSUM == 0 || flags & F_DATA_VALID != 0;
        assert_eq!(result.is_ok(), expected && both, "{plain:?}: {result:?}");
    }
}
