//! Why an offload is refused: what was expected, and what was found in the sender's description or in the frame's own headers.

use super::kind::{Kind, Support};
use ringroad_wire::ip::IpError;
use thiserror::Error;

/// Why an offload does not apply to its frame. The frame is to be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// The checksum begins in the Ethernet header.
    #[error("expected a checksum from byte 14 or later, found {found}")]
    ChecksumStart {
        /// First byte summed.
        found: u16,
    },
    /// The checksum's field is not at a word of what is summed.
    #[error("expected the checksum at an even offset, found {found}")]
    ChecksumOdd {
        /// Position from the first byte summed.
        found: u16,
    },
    /// The checksum's field is not within the frame.
    #[error("expected the checksum within the frame of {len} bytes, found it at {found}")]
    ChecksumBeyond {
        /// Position of its first byte.
        found: usize,
        /// Length of the frame.
        len: usize,
    },
    /// Segmentation, and the checksum is not that of TCP or UDP.
    #[error("expected the checksum of TCP or UDP, from byte {} at offset {}, found {} and {}",
        expected.0, expected.1, found.0, found.1)]
    ChecksumElsewhere {
        /// By the frame's headers: start and offset.
        expected: (usize, u16),
        /// As claimed.
        found: (u16, u16),
    },
    /// Segmentation without a partial checksum.
    #[error("expected a partial checksum with segmentation, found none")]
    ChecksumMissing,
    /// No such way of segmentation.
    #[error("expected a segmentation type of 1, 3, 4 or 5, found {found}")]
    Type {
        /// As claimed.
        found: u8,
    },
    /// The length of the headers, as claimed, exceeds the frame's.
    #[error("expected headers within the frame of {len} bytes, found a header length of {found}")]
    HeaderLen {
        /// As claimed.
        found: u16,
        /// Length of the frame.
        len: usize,
    },
    /// The sender has not negotiated it.
    #[error("expected one of the negotiated offloads ({negotiated:?}), found {found:?}")]
    NotNegotiated {
        /// What the frame needs.
        found: Support,
        /// What the sender may use.
        negotiated: Support,
    },
    /// The size of the segments is zero or too small.
    #[error("expected segments of {least} bytes or more, found {found}")]
    Size {
        /// As claimed.
        found: u16,
        /// Smallest size.
        least: u16,
    },
    /// Too many segments.
    #[error("expected at most {most} segments, found {found}")]
    Segments {
        /// Number of segments.
        found: usize,
        /// The most that are cut: [`UDP_SEGMENTS`](super::UDP_SEGMENTS) or [`SEGMENTS`](super::SEGMENTS).
        most: usize,
    },
    /// The frame is not of the version of IP claimed.
    #[error("expected headers for {expected:?}, found EtherType {found:#06x}")]
    EtherType {
        /// As claimed.
        expected: Kind,
        /// Behind VLAN tags.
        found: u16,
    },
    /// The frame is not of the protocol claimed.
    #[error("expected headers for {expected:?}, found protocol {found}")]
    Protocol {
        /// As claimed.
        expected: Kind,
        /// By the IP headers.
        found: u8,
    },
    /// The IP headers.
    #[error(transparent)]
    Ip(#[from] IpError),
    /// The length in the IP header is not that of the frame's payload.
    #[error("expected an IP packet of {actual} bytes, found a length of {found}")]
    IpLen {
        /// By the header.
        found: usize,
        /// By the length of the frame.
        actual: usize,
    },
    /// The frame is already a fragment.
    #[error("expected an unfragmented packet, found a fragment")]
    Fragment,
    /// The frame ends within its headers, or they are longer than [`super::HEADERS`].
    #[error("expected headers of at most {found} bytes, found {needed} or more")]
    Headers {
        /// Length of the headers.
        needed: usize,
        /// Length of the frame or of the copy of its first bytes.
        found: usize,
    },
    /// The TCP header's length is less than that of one without options.
    #[error("expected a TCP header of 20 bytes or more, found {found}")]
    TcpHeader {
        /// By the header.
        found: usize,
    },
    /// SYN counts as a byte of the sequence: it cannot be repeated in each segment.
    #[error("expected TCP segmentation without SYN, found flags {found:#04x}")]
    TcpFlags {
        /// In the header.
        found: u8,
    },
    /// IP fragments in a tunnel: there is no such segmentation.
    #[error("expected TCP segments or UDP datagrams in the tunnel, found {found:?}")]
    Tunneled {
        /// As claimed.
        found: Kind,
    },
    /// What is said of a tunnel does not fit the segmentation: of two versions, or with a checksum that is complete or verified, or an
    /// outer checksum without a tunnel.
    #[error(
        "expected the flags of a segmentation in at most one tunnel, found type {gso_type:#04x} and flags {flags:#04x}"
    )]
    TunnelFlags {
        /// As claimed.
        gso_type: u8,
        /// As claimed.
        flags: u8,
    },
    /// The outer UDP header is elsewhere.
    #[error("expected the outer UDP header at {expected}, found {found}")]
    OuterTransport {
        /// By the frame's headers.
        expected: usize,
        /// As claimed.
        found: u16,
    },
    /// The inner IP header overlaps the outer headers.
    #[error("expected the inner IP header at {least} or later, found {found}")]
    InnerNetwork {
        /// Behind the outer headers.
        least: usize,
        /// As claimed.
        found: u16,
    },
    /// An outer UDP checksum that no segment would have.
    #[error("expected no outer checksum, or one to be completed, found {found:#06x}")]
    OuterChecksum {
        /// In the header.
        found: u16,
    },
    /// The length in the UDP header is not that of the packet's payload.
    #[error("expected a UDP datagram of {actual} bytes, found a length of {found}")]
    UdpLen {
        /// By the header.
        found: u16,
        /// By the length of the frame.
        actual: usize,
    },
}
