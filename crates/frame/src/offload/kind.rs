//! The ways of segmentation, what ports support of them, and their limits.

use bitflags::bitflags;
use ringroad_wire::ip::Version;

/// Headers are examined in a private copy of at most this length in bytes: Ethernet, two VLAN tags, and 234 bytes of IP and TCP.
pub const HEADERS: usize = 256;

/// Number of segments that a UDP frame may be cut into (as in Linux).
pub const UDP_SEGMENTS: usize = 128;

/// Number of segments or fragments that any other frame may be cut into: 64 KiB in segments of 48 bytes.
pub const SEGMENTS: usize = 1366;

/// Smallest segment size of TCP, in bytes: Linux' minimum of 48 for a connection less 40 bytes of options. It bounds the work and
/// the memory that one frame causes.
const TCP_LEAST: u16 = 8;

bitflags! {
    /// The offloads that a port takes frames with, or sends frames with.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Support: u16 {
        /// [`Checksum::Partial`]; all that follow require it.
        const CHECKSUM = 1;
        /// [`Kind::Tcp4`].
        const TCP4 = 1 << 1;
        /// [`Kind::Tcp6`].
        const TCP6 = 1 << 2;
        /// TCP frames with CWR set ([`Gso::ecn`]).
        const ECN = 1 << 3;
        /// [`Kind::Udp4`].
        const UDP4 = 1 << 4;
        /// [`Kind::Udp6`].
        const UDP6 = 1 << 5;
        /// [`Kind::Fragments4`] and [`Kind::Fragments6`].
        const FRAGMENTS = 1 << 6;
        /// [`Checksum::Valid`]: which may be withheld from a port, and ignored from one.
        const VALID = 1 << 7;
        /// [`Gso::tunnel`](super::Gso::tunnel), around whichever kinds of TCP and UDP are there, too.
        const TUNNEL = 1 << 8;
        /// Tunnels whose outer checksum is to be completed; requires TUNNEL.
        const TUNNEL_CHECKSUM = 1 << 9;
    }
}

impl Support {
    /// Tunnels with and without outer checksums.
    pub const TUNNELS: Support = Support::TUNNEL.union(Support::TUNNEL_CHECKSUM);
}

/// How a frame is to be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// TCP segments over IPv4 (TSO).
    Tcp4,
    /// TCP segments over IPv6 (TSO).
    Tcp6,
    /// UDP datagrams over IPv4 (USO).
    Udp4,
    /// UDP datagrams over IPv6 (USO).
    Udp6,
    /// IPv4 fragments of one UDP datagram (UFO).
    Fragments4,
    /// IPv6 fragments of one UDP datagram (UFO).
    Fragments6,
}

impl Kind {
    /// Returns what a port must support to take frames of this kind.
    pub const fn support(self) -> Support {
        let kind = match self {
            Kind::Tcp4 => Support::TCP4,
            Kind::Tcp6 => Support::TCP6,
            Kind::Udp4 => Support::UDP4,
            Kind::Udp6 => Support::UDP6,
            Kind::Fragments4 | Kind::Fragments6 => Support::FRAGMENTS,
        };
        kind.union(Support::CHECKSUM)
    }

    /// Returns whether the segments are TCP's.
    pub const fn is_tcp(self) -> bool {
        matches!(self, Kind::Tcp4 | Kind::Tcp6)
    }

    /// Returns whether the segments are IP fragments.
    pub const fn is_fragments(self) -> bool {
        matches!(self, Kind::Fragments4 | Kind::Fragments6)
    }

    pub(super) const fn version(self) -> Version {
        match self {
            Kind::Tcp4 | Kind::Udp4 | Kind::Fragments4 => Version::V4,
            Kind::Tcp6 | Kind::Udp6 | Kind::Fragments6 => Version::V6,
        }
    }

    /// Smallest payload of a segment, in bytes.
    pub(super) const fn least(self) -> u16 {
        match self {
            Kind::Tcp4 | Kind::Tcp6 => TCP_LEAST,
            Kind::Udp4 | Kind::Udp6 => 1,
            Kind::Fragments4 | Kind::Fragments6 => 8,
        }
    }

    /// Rounds down a segment's payload: positions of fragments count in units of eight bytes.
    pub(super) const fn whole(self, size: u16) -> u16 {
        if self.is_fragments() { size & !7 } else { size }
    }
}
