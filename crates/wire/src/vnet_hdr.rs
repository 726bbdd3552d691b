//! The header in front of every frame of a virtio-net queue (virtio 1.3, 5.1.6): `struct virtio_net_hdr`.
//!
//! The device and the driver of virtio-net read and write it, and so does a TAP port whose header size is set to
//! [`SIZE`].

/// Bytes of the header. With VIRTIO_F_VERSION_1 `num_buffers` is always there (5.1.6.1).
pub const SIZE: usize = 12;

/// `flags`: the checksum from `csum_start` on is still to be computed (VIRTIO_NET_HDR_F_NEEDS_CSUM).
pub const F_NEEDS_CSUM: u8 = 1;
/// `flags`: the checksum has been checked and is right (VIRTIO_NET_HDR_F_DATA_VALID).
pub const F_DATA_VALID: u8 = 2;
/// `flags`: the checksum fields hold figures of coalesced segments (VIRTIO_NET_HDR_F_RSC_INFO).
pub const F_RSC_INFO: u8 = 4;

/// `gso_type`: one frame, nothing to segment (VIRTIO_NET_HDR_GSO_NONE).
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4 to segment (VIRTIO_NET_HDR_GSO_TCPV4).
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: a UDP datagram to fragment (VIRTIO_NET_HDR_GSO_UDP).
pub const GSO_UDP: u8 = 3;
/// `gso_type`: TCP over IPv6 to segment (VIRTIO_NET_HDR_GSO_TCPV6).
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP to segment into datagrams (VIRTIO_NET_HDR_GSO_UDP_L4).
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type`: bit beside the type, the TCP segments have ECN set (VIRTIO_NET_HDR_GSO_ECN).
pub const GSO_ECN: u8 = 0x80;

/// The header, in the machine's byte order. Its default is that of a plain frame, with `num_buffers` 0 as a driver
/// sends it; a device that fills receive buffers sets it to 1 or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHdr {
    /// Bits `F_…`.
    pub flags: u8,
    /// One of `GSO_…`, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of Ethernet, IP and TCP or UDP header; a hint.
    pub hdr_len: u16,
    /// Bytes of payload in each segment.
    pub gso_size: u16,
    /// Where the checksummed bytes begin, in bytes from the start of the frame.
    pub csum_start: u16,
    /// Where the checksum goes, in bytes from `csum_start`.
    pub csum_offset: u16,
    /// Receive buffers that the frame takes up (VIRTIO_NET_F_MRG_RXBUF), else 1.
    pub num_buffers: u16,
}

impl VnetHdr {
    /// The header as it stands in the queue, little-endian.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; SIZE] {
        let [a, b] = self.hdr_len.to_le_bytes();
        let [c, d] = self.gso_size.to_le_bytes();
        let [e, f] = self.csum_start.to_le_bytes();
        let [g, h] = self.csum_offset.to_le_bytes();
        let [i, j] = self.num_buffers.to_le_bytes();
        [self.flags, self.gso_type, a, b, c, d, e, f, g, h, i, j]
    }

    /// The header that stands in `bytes`. Nothing is checked: whoever acts on a field checks it.
    #[inline]
    pub const fn from_bytes(bytes: &[u8; SIZE]) -> VnetHdr {
        let &[flags, gso_type, a, b, c, d, e, f, g, h, i, j] = bytes;
        VnetHdr {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([a, b]),
            gso_size: u16::from_le_bytes([c, d]),
            csum_start: u16::from_le_bytes([e, f]),
            csum_offset: u16::from_le_bytes([g, h]),
            num_buffers: u16::from_le_bytes([i, j]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_the_specification() {
        let header = VnetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4 | GSO_ECN,
            hdr_len: 0x0102,
            gso_size: 0x0304,
            csum_start: 0x0506,
            csum_offset: 0x0708,
            num_buffers: 0x090a,
        };
        let bytes = [0x01, 0x81, 0x02, 0x01, 0x04, 0x03, 0x06, 0x05, 0x08, 0x07, 0x0a, 0x09];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(VnetHdr::from_bytes(&bytes), header);
    }

    #[test]
    fn plain_frame() {
        assert_eq!(VnetHdr::default().to_bytes(), [0; SIZE]);
        assert_eq!(VnetHdr::from_bytes(&[0; SIZE]), VnetHdr::default());
    }
}
