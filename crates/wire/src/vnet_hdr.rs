//! The header of every frame in a virtio-net queue (virtio 1.3, 5.1.6): `struct virtio_net_hdr`.
//!
//! Read and written by the device and driver of virtio-net, and by a TAP port whose header size is set to [`SIZE`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U16};

/// Size of the header in bytes. With VIRTIO_F_VERSION_1 `num_buffers` is always present (5.1.6.1).
pub const SIZE: usize = size_of::<VnetHdr>();

/// Size in bytes with VIRTIO_NET_F_HASH_REPORT: the hash of a received frame follows.
pub const HASHED: usize = SIZE + 8;

/// Size in bytes with VIRTIO_NET_F_GUEST_ or HOST_UDP_TUNNEL_GSO (virtio 1.4, 5.1.6.3.1): [`TunnelHdr`] follows the hash, whether or
/// not there is one.
pub const TUNNELED: usize = HASHED + size_of::<TunnelHdr>();

/// `flags`: the checksum from `csum_start` on must still be computed (VIRTIO_NET_HDR_F_NEEDS_CSUM).
pub const F_NEEDS_CSUM: u8 = 1;
/// `flags`: the checksum has been verified (VIRTIO_NET_HDR_F_DATA_VALID).
pub const F_DATA_VALID: u8 = 2;
/// `flags`: the checksum fields carry information about coalesced segments (VIRTIO_NET_HDR_F_RSC_INFO).
pub const F_RSC_INFO: u8 = 4;
/// `flags`: the outer UDP checksum must still be computed, too (VIRTIO_NET_HDR_F_UDP_TUNNEL_CSUM).
pub const F_UDP_TUNNEL_CSUM: u8 = 8;

/// `gso_type`: a single frame, no segmentation (VIRTIO_NET_HDR_GSO_NONE).
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4 segmentation (VIRTIO_NET_HDR_GSO_TCPV4).
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: UDP fragmentation (VIRTIO_NET_HDR_GSO_UDP).
pub const GSO_UDP: u8 = 3;
/// `gso_type`: TCP over IPv6 segmentation (VIRTIO_NET_HDR_GSO_TCPV6).
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: segmentation of UDP into datagrams (VIRTIO_NET_HDR_GSO_UDP_L4).
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type`: flag in addition to the type, the TCP segments have ECN set (VIRTIO_NET_HDR_GSO_ECN).
pub const GSO_ECN: u8 = 0x80;
/// `gso_type`: flag in addition to the type, the packet is in a UDP tunnel over IPv4 (VIRTIO_NET_HDR_GSO_UDP_TUNNEL_IPV4).
pub const GSO_TUNNEL_IPV4: u8 = 0x20;
/// `gso_type`: flag in addition to the type, the packet is in a UDP tunnel over IPv6 (VIRTIO_NET_HDR_GSO_UDP_TUNNEL_IPV6).
pub const GSO_TUNNEL_IPV6: u8 = 0x40;

/// The header, little-endian as on the wire; nothing is validated. The default is that of a plain frame, with `num_buffers` 0 as
/// a driver sends it; a device that fills receive buffers sets `num_buffers` to 1 or more.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct VnetHdr {
    /// Bits `F_…`.
    pub flags: u8,
    /// One of `GSO_…`, optionally with [`GSO_ECN`] and with [`GSO_TUNNEL_IPV4`] or [`GSO_TUNNEL_IPV6`].
    pub gso_type: u8,
    /// Length of the Ethernet, IP and TCP or UDP headers in bytes; a hint.
    pub hdr_len: U16,
    /// Payload bytes in each segment.
    pub gso_size: U16,
    /// Start of the checksummed bytes, in bytes from the start of the frame.
    pub csum_start: U16,
    /// Position of the checksum, in bytes from `csum_start`.
    pub csum_offset: U16,
    /// Number of receive buffers that the frame occupies (VIRTIO_NET_F_MRG_RXBUF), else 1.
    pub num_buffers: U16,
}

/// The end of a header of [`TUNNELED`] bytes: where the headers of a UDP tunnel are. Means nothing without [`GSO_TUNNEL_IPV4`] or
/// [`GSO_TUNNEL_IPV6`].
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct TunnelHdr {
    /// Position of the outer UDP header, in bytes from the start of the frame.
    pub outer_th_offset: U16,
    /// Position of the inner IP header, in bytes from the start of the frame.
    pub inner_nh_offset: U16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_specified_layout() {
        let header = VnetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4 | GSO_ECN,
            hdr_len: U16::new(0x0102),
            gso_size: U16::new(0x0304),
            csum_start: U16::new(0x0506),
            csum_offset: U16::new(0x0708),
            num_buffers: U16::new(0x090a),
        };
        let bytes = [0x01, 0x81, 0x02, 0x01, 0x04, 0x03, 0x06, 0x05, 0x08, 0x07, 0x0a, 0x09];
        assert_eq!(SIZE, 12);
        assert_eq!(header.as_bytes(), bytes);
        assert_eq!(VnetHdr::read_from_bytes(&bytes), Ok(header));
        let tunnel = TunnelHdr { outer_th_offset: U16::new(0x0102), inner_nh_offset: U16::new(0x0304) };
        assert_eq!(tunnel.as_bytes(), [0x02, 0x01, 0x04, 0x03]);
        assert_eq!((HASHED, TUNNELED), (20, 24));
    }

    #[test]
    fn default_is_a_plain_frame() {
        assert_eq!(VnetHdr::default().as_bytes(), [0; SIZE]);
    }
}
