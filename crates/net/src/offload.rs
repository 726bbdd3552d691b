//! Offloads in the header of a virtio-net frame (virtio 1.3, 5.1.6): [`read`] checks what the other end asks for, once, against
//! the frame and the negotiated features; [`write()`] describes an offload to the other end. Called by both ends of a queue, and
//! by TAP ports, whose header is the same.

use crate::features::bits;
use ringroad_frame::{
    copy_some,
    offload::{Checksum, Claim, Gso, HEADERS, Kind, Offload, Refused, Support, TunnelClaim},
};
use ringroad_mem::Span;
use ringroad_wire::{
    ethernet,
    ip::{ETHERTYPE_V6, Version},
    vnet_hdr::{
        self, F_DATA_VALID, F_NEEDS_CSUM, F_UDP_TUNNEL_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_TUNNEL_IPV4,
        GSO_TUNNEL_IPV6, GSO_UDP, GSO_UDP_L4, TunnelHdr, VnetHdr,
    },
};
use zerocopy::IntoBytes;

/// `gso_type`: the packet is in a UDP tunnel. The specification lets the inner version of IP choose the flag, Linux the outer one; the
/// frame says both anyway.
const TUNNEL: u8 = GSO_TUNNEL_IPV4 | GSO_TUNNEL_IPV6;

/// Returns the length in bytes of the header of all frames, in both directions, for a driver that acknowledged these feature bits
/// (virtio 1.4, 5.1.6.3.1).
pub fn header_len(acked: u64) -> usize {
    let tunnels = bits::NET_F_GUEST_UDP_TUNNEL_GSO | bits::NET_F_HOST_UDP_TUNNEL_GSO;
    match (acked & tunnels != 0, acked & bits::NET_F_HASH_REPORT != 0) {
        (true, _) => vnet_hdr::TUNNELED,
        (false, true) => vnet_hdr::HASHED,
        (false, false) => vnet_hdr::SIZE,
    }
}

/// Returns what a driver that acknowledged these feature bits may send.
pub fn driver_sends(acked: u64) -> Support {
    let udp = Support::UDP4.union(Support::UDP6);
    support(
        acked,
        bits::NET_F_CSUM,
        &[
            (bits::NET_F_HOST_TSO4, Support::TCP4),
            (bits::NET_F_HOST_TSO6, Support::TCP6),
            (bits::NET_F_HOST_ECN, Support::ECN),
            (bits::NET_F_HOST_UFO, Support::FRAGMENTS),
            (bits::NET_F_HOST_USO, udp),
            (bits::NET_F_HOST_UDP_TUNNEL_GSO, Support::TUNNEL),
            (bits::NET_F_HOST_UDP_TUNNEL_GSO | bits::NET_F_HOST_UDP_TUNNEL_GSO_CSUM, Support::TUNNEL_CHECKSUM),
        ],
    )
}

/// Returns what a driver that acknowledged these feature bits takes.
pub fn driver_takes(acked: u64) -> Support {
    support(
        acked,
        bits::NET_F_GUEST_CSUM,
        &[
            (bits::NET_F_GUEST_CSUM, Support::VALID),
            (bits::NET_F_GUEST_TSO4, Support::TCP4),
            (bits::NET_F_GUEST_TSO6, Support::TCP6),
            (bits::NET_F_GUEST_ECN, Support::ECN),
            (bits::NET_F_GUEST_UFO, Support::FRAGMENTS),
            (bits::NET_F_GUEST_USO4, Support::UDP4),
            (bits::NET_F_GUEST_USO6, Support::UDP6),
            (bits::NET_F_GUEST_UDP_TUNNEL_GSO, Support::TUNNEL),
            (bits::NET_F_GUEST_UDP_TUNNEL_GSO | bits::NET_F_GUEST_UDP_TUNNEL_GSO_CSUM, Support::TUNNEL_CHECKSUM),
        ],
    )
}

/// All others require the checksum's feature bit (5.1.3.1).
fn support(acked: u64, checksum: u64, others: &[(u64, Support)]) -> Support {
    let others = others.iter().filter(|(bits, _)| acked & bits == *bits).map(|&(_, support)| support);
    if acked & checksum == 0 { Support::empty() } else { others.fold(Support::CHECKSUM, Support::union) }
}

/// Reads the header of a frame of `len` bytes that starts with `head`: a private copy of its first
/// [`HEADERS`] bytes, or of all. `support`: what its sender may use.
///
/// For a frame without offloads this is one comparison of the header's first two bytes; `head` is not looked at. Flags without a
/// meaning for `support` are ignored, as are the fields that belong to flags that are not set (5.1.6.2.2, 5.1.6.4.2). `hdr_len`
/// is a hint: the frame's own headers decide, and only a value beyond the frame is refused.
///
/// # Errors
/// [`Refused`]; the frame is to be dropped.
#[inline(always)]
pub fn read(header: &VnetHdr, head: &[u8], len: usize, support: Support) -> Result<Offload, Refused> {
    if u16::from_ne_bytes([header.flags, header.gso_type]) == 0 {
        return Ok(Offload::NONE);
    }
    check(header, None, head, len, support)
}

/// As [`read`], of a header of [`vnet_hdr::TUNNELED`] bytes.
///
/// # Errors
/// As for [`read`].
pub fn read_tunneled(
    header: &VnetHdr,
    tunnel: TunnelHdr,
    head: &[u8],
    len: usize,
    support: Support,
) -> Result<Offload, Refused> {
    check(header, Some(tunnel), head, len, support)
}

/// As [`read`], of a frame of `total` bytes with its header, which is spread over these pieces.
///
/// # Errors
/// As for [`read`].
#[inline]
pub fn read_pieces(pieces: &[Span<'_>], total: usize, support: Support) -> Result<Offload, Refused> {
    read_behind(pieces, vnet_hdr::SIZE, total, support)
}

/// As [`read_pieces`], of a frame behind a header of `lead` bytes; what it says of a hash means nothing here.
///
/// # Errors
/// As for [`read`].
pub fn read_behind(pieces: &[Span<'_>], lead: usize, total: usize, support: Support) -> Result<Offload, Refused> {
    let mut header = VnetHdr::default();
    let read = copy_some(pieces.iter().copied(), 0, header.as_mut_bytes());
    if read < vnet_hdr::SIZE || (header.flags, header.gso_type) == (0, 0) {
        return Ok(Offload::NONE);
    }
    let mut head = [0; HEADERS];
    let frame = total.saturating_sub(lead);
    let len = copy_some(pieces.iter().copied(), lead, &mut head).min(frame);
    let tunnel = (lead == vnet_hdr::TUNNELED).then(|| {
        let mut tunnel = TunnelHdr::default();
        copy_some(pieces.iter().copied(), vnet_hdr::HASHED, tunnel.as_mut_bytes());
        tunnel
    });
    check(&header, tunnel, head.get(..len).unwrap_or_default(), frame, support)
}

#[inline(never)]
fn check(
    header: &VnetHdr,
    tunnel: Option<TunnelHdr>,
    head: &[u8],
    len: usize,
    support: Support,
) -> Result<Offload, Refused> {
    let (start, offset) = (header.csum_start.get(), header.csum_offset.get());
    let negotiated = |found: Support| {
        if support.contains(found) { Ok(()) } else { Err(Refused::NotNegotiated { found, negotiated: support }) }
    };
    let tunnel = tunnel_of(header, tunnel, support)?;
    if header.gso_type != GSO_NONE {
        let kind = kind(header.gso_type, tunnel, head)?;
        let ecn = header.gso_type & GSO_ECN != 0;
        negotiated(if ecn { kind.support() | Support::ECN } else { kind.support() })?;
        if header.flags & F_NEEDS_CSUM == 0 {
            return Err(Refused::ChecksumMissing);
        }
        if usize::from(header.hdr_len.get()) > len {
            return Err(Refused::HeaderLen { found: header.hdr_len.get(), len });
        }
        let claim = Claim { kind, ecn, size: header.gso_size.get(), checksum: (start, offset) };
        return match tunnel {
            Some(tunnel) => Offload::tunneled(claim, tunnel, head, len),
            None => Offload::segmented(claim, head, len),
        };
    }
    if header.flags & F_NEEDS_CSUM != 0 {
        negotiated(Support::CHECKSUM)?;
        return Offload::partial(start, offset, len);
    }
    let valid = header.flags & F_DATA_VALID != 0 && support.contains(Support::VALID);
    Ok(if valid { Offload::VALID } else { Offload::NONE })
}

/// Returns the tunnel that a header describes, if there is one and the sender may use it (virtio 1.4, 5.1.6.2).
fn tunnel_of(header: &VnetHdr, tunnel: Option<TunnelHdr>, support: Support) -> Result<Option<TunnelClaim>, Refused> {
    let VnetHdr { flags, gso_type, .. } = *header;
    let (is_tunneled, checksum) = (gso_type & TUNNEL != 0, flags & F_UDP_TUNNEL_CSUM != 0);
    let contradicts = Err(Refused::TunnelFlags { gso_type, flags });
    if !is_tunneled {
        // Beside F_DATA_VALID it means that the inner checksum was verified as well.
        let verified = flags & (F_NEEDS_CSUM | F_DATA_VALID) == F_DATA_VALID && support.contains(Support::VALID);
        let is_flag = checksum && support.contains(Support::TUNNEL_CHECKSUM);
        return if is_flag && !verified { contradicts } else { Ok(None) };
    }
    let found = if checksum { Support::TUNNELS } else { Support::TUNNEL };
    if !support.contains(found) {
        return Err(Refused::NotNegotiated { found, negotiated: support });
    }
    let Some(tunnel) = tunnel else { return Err(Refused::Type { found: gso_type }) };
    if gso_type & TUNNEL == TUNNEL || flags & F_DATA_VALID != 0 {
        return contradicts;
    }
    let (outer_transport, inner_network) = (tunnel.outer_th_offset.get(), tunnel.inner_nh_offset.get());
    Ok(Some(TunnelClaim { outer_transport, inner_network, checksum }))
}

/// Returns the kind of a `gso_type`. The types of UDP do not tell the version of IP: the frame does.
fn kind(gso_type: u8, tunnel: Option<TunnelClaim>, head: &[u8]) -> Result<Kind, Refused> {
    let v6 = || match tunnel {
        Some(tunnel) => head.get(usize::from(tunnel.inner_network)).is_some_and(|version| version >> 4 == 6),
        None => ethernet::payload(head).is_some_and(|(ethertype, _)| ethertype == ETHERTYPE_V6),
    };
    let of_packet = if tunnel.is_some() { gso_type & !TUNNEL } else { gso_type };
    match of_packet & !GSO_ECN {
        GSO_TCPV4 => Ok(Kind::Tcp4),
        GSO_TCPV6 => Ok(Kind::Tcp6),
        GSO_UDP => Ok(if v6() { Kind::Fragments6 } else { Kind::Fragments4 }),
        GSO_UDP_L4 => Ok(if v6() { Kind::Udp6 } else { Kind::Udp4 }),
        _ => Err(Refused::Type { found: gso_type }),
    }
}

/// Returns the header for a receiver with this `support`, which must contain [`Offload::needs`].
#[inline]
pub fn write(offload: Offload, support: Support, num_buffers: u16) -> VnetHdr {
    let mut header = VnetHdr { num_buffers: num_buffers.into(), ..VnetHdr::default() };
    match offload.checksum() {
        Checksum::Complete => {}
        Checksum::Valid if support.contains(Support::VALID) => header.flags = F_DATA_VALID,
        Checksum::Valid => {}
        Checksum::Partial { start, offset } => {
            header.flags = F_NEEDS_CSUM;
            (header.csum_start, header.csum_offset) = (start.into(), offset.into());
        }
    }
    if let Some(Gso { kind, ecn, size, header_len, tunnel }) = offload.gso() {
        let gso_type = match kind {
            Kind::Tcp4 => GSO_TCPV4,
            Kind::Tcp6 => GSO_TCPV6,
            Kind::Udp4 | Kind::Udp6 => GSO_UDP_L4,
            Kind::Fragments4 | Kind::Fragments6 => GSO_UDP,
        };
        header.gso_type = if ecn { gso_type | GSO_ECN } else { gso_type };
        (header.gso_size, header.hdr_len) = (size.get().into(), header_len.into());
        if let Some(tunnel) = tunnel {
            header.gso_type |= if tunnel.outer == Version::V4 { GSO_TUNNEL_IPV4 } else { GSO_TUNNEL_IPV6 };
            header.flags |= if tunnel.checksum { F_UDP_TUNNEL_CSUM } else { 0 };
        }
    }
    header
}

/// As [`write()`], as bytes.
pub fn bytes(offload: Offload, support: Support, num_buffers: u16) -> [u8; vnet_hdr::SIZE] {
    zerocopy::transmute!(write(offload, support, num_buffers))
}

/// Returns the end of a header of [`vnet_hdr::TUNNELED`] bytes, which begins with that of [`write()`].
pub fn write_tunnel(offload: Offload) -> TunnelHdr {
    let tunnel = offload.gso().and_then(|gso| gso.tunnel).map(|tunnel| tunnel.claim());
    tunnel.map_or_else(TunnelHdr::default, |tunnel| TunnelHdr {
        outer_th_offset: tunnel.outer_transport.into(),
        inner_nh_offset: tunnel.inner_network.into(),
    })
}

#[cfg(test)]
mod tests;
