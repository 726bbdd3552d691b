//! IPv4 (RFC 791) and IPv6 (RFC 8200) headers, with the extension headers of IPv6. Read and written by `frame`, which segments
//! and coalesces frames.

use crate::checksum::Sum;
use thiserror::Error;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    big_endian::{U16, U32},
};

/// EtherType of IPv4.
pub const ETHERTYPE_V4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_V6: u16 = 0x86dd;

/// Protocol numbers: `protocol` of IPv4, `next_header` of IPv6.
pub mod protocol {
    /// Hop-by-hop options of IPv6, only directly behind the IPv6 header.
    pub const HOP_BY_HOP: u8 = 0;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// Routing header of IPv6.
    pub const ROUTING: u8 = 43;
    /// Fragment header of IPv6.
    pub const FRAGMENT: u8 = 44;
    /// Destination options of IPv6.
    pub const DESTINATION: u8 = 60;
}

/// Extension headers that are followed. Senders use one or two.
pub const MAX_EXTENSIONS: usize = 8;

/// The first 20 bytes of an IPv4 header; options may follow.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct Ipv4 {
    /// 4 in the high half; length of the header in words of four bytes in the low half.
    pub version_ihl: u8,
    /// Differentiated services and ECN.
    pub tos: u8,
    /// Length of header and payload, in bytes.
    pub total_len: U16,
    /// Identification of the fragments of a packet.
    pub id: U16,
    /// [`Ipv4::DF`], [`Ipv4::MF`]; position of this fragment in units of eight bytes.
    pub fragment: U16,
    /// Time to live.
    pub ttl: u8,
    /// What follows the header, of [`protocol`].
    pub protocol: u8,
    /// Checksum of the header.
    pub checksum: U16,
    /// Address of the sender.
    pub source: [u8; 4],
    /// Address of the receiver.
    pub destination: [u8; 4],
}

impl Ipv4 {
    /// Length of a header without options, in bytes.
    pub const LEN: usize = size_of::<Ipv4>();
    /// `fragment`: don't fragment.
    pub const DF: u16 = 1 << 14;
    /// `fragment`: more fragments follow.
    pub const MF: u16 = 1 << 13;
    /// `fragment`: the bits of the position.
    pub const OFFSET: u16 = Ipv4::MF - 1;
}

/// An IPv6 header.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct Ipv6 {
    /// 6 in the highest four bits, traffic class, flow label.
    pub flow: U32,
    /// Length of all that follows this header, in bytes.
    pub payload_len: U16,
    /// What follows the header, of [`protocol`].
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Address of the sender.
    pub source: [u8; 16],
    /// Address of the receiver.
    pub destination: [u8; 16],
}

impl Ipv6 {
    /// Length of the header, in bytes.
    pub const LEN: usize = size_of::<Ipv6>();
}

/// The fragment header of IPv6 (RFC 8200, 4.5).
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct Fragment {
    /// What follows the header, of [`protocol`].
    pub next_header: u8,
    /// Zero.
    pub reserved: u8,
    /// Position in bytes, a multiple of eight; bit 0: more fragments follow.
    pub offset: U16,
    /// Identification of the fragments of a packet.
    pub id: U32,
}

impl Fragment {
    /// Length of the header, in bytes.
    pub const LEN: usize = size_of::<Fragment>();
}

/// Version of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Why the headers of a packet cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IpError {
    /// The headers are longer than the packet, or than what is known of it.
    #[error("expected IP headers of at most {found} bytes, found {needed} or more")]
    Truncated {
        /// Bytes that the headers need at least.
        needed: usize,
        /// Bytes given.
        found: usize,
    },
    /// The EtherType promised another version.
    #[error("expected IP version {expected}, found {found}")]
    Version {
        /// By the EtherType.
        expected: u8,
        /// In the header.
        found: u8,
    },
    /// An IPv4 header shorter than [`Ipv4::LEN`].
    #[error("expected an IPv4 header of 20 bytes or more, found {found}")]
    HeaderLen {
        /// By the header.
        found: usize,
    },
    /// More than [`MAX_EXTENSIONS`].
    #[error("expected at most {MAX_EXTENSIONS} IPv6 extension headers, found more")]
    Extensions,
}

/// The parsed headers of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Version.
    pub version: Version,
    /// Protocol behind the headers. That of an extension header if one is in the wrong place or of an unknown kind.
    pub protocol: u8,
    /// Length of the headers in bytes, with options and extension headers: where the protocol's own header begins.
    pub header_len: usize,
    /// Length of the headers that each fragment repeats, in bytes (RFC 8200, 4.5: the per-fragment headers).
    pub per_fragment_len: usize,
    /// Position of the field that names what follows the per-fragment headers.
    pub next_header_at: usize,
    /// Length of the packet in bytes, by its header.
    pub total_len: usize,
    /// The packet is a fragment, or has a fragment header.
    pub is_fragment: bool,
    /// A routing header holds the final destination, to which checksums apply (RFC 8200, 8.1).
    pub is_routed: bool,
}

impl Packet {
    /// Reads the headers of the packet that starts with `head`, which holds at least all headers.
    ///
    /// # Errors
    /// [`IpError`] if that is impossible. The length of the packet is not checked.
    pub fn read(version: Version, head: &[u8]) -> Result<Packet, IpError> {
        match version {
            Version::V4 => Packet::read_v4(head),
            Version::V6 => Packet::read_v6(head),
        }
    }

    fn read_v4(head: &[u8]) -> Result<Packet, IpError> {
        let ip: &Ipv4 = prefix(head, 0)?;
        check_version(4, ip.version_ihl)?;
        let header_len = usize::from(ip.version_ihl & 15) * 4;
        if header_len < Ipv4::LEN {
            return Err(IpError::HeaderLen { found: header_len });
        }
        if head.len() < header_len {
            return Err(IpError::Truncated { needed: header_len, found: head.len() });
        }
        Ok(Packet {
            version: Version::V4,
            protocol: ip.protocol,
            header_len,
            per_fragment_len: header_len,
            next_header_at: std::mem::offset_of!(Ipv4, protocol),
            total_len: ip.total_len.get().into(),
            is_fragment: ip.fragment.get() & (Ipv4::MF | Ipv4::OFFSET) != 0,
            is_routed: false,
        })
    }

    /// The per-fragment headers end behind the last hop-by-hop or routing header, and behind destination options only if they
    /// precede a routing header.
    fn read_v6(head: &[u8]) -> Result<Packet, IpError> {
        let ip: &Ipv6 = prefix(head, 0)?;
        check_version(6, (ip.flow.get() >> 24) as u8)?;
        let mut packet = Packet {
            version: Version::V6,
            protocol: ip.next_header,
            header_len: Ipv6::LEN,
            per_fragment_len: Ipv6::LEN,
            next_header_at: std::mem::offset_of!(Ipv6, next_header),
            total_len: Ipv6::LEN + usize::from(ip.payload_len.get()),
            is_fragment: false,
            is_routed: false,
        };
        for _ in 0..=MAX_EXTENSIONS {
            let (kind, at) = (packet.protocol, packet.header_len);
            match kind {
                protocol::HOP_BY_HOP if at == Ipv6::LEN => {}
                protocol::ROUTING | protocol::DESTINATION | protocol::FRAGMENT => {}
                _ => return Ok(packet),
            }
            // All of them have eight bytes or more.
            let &[next, extra, offset_high, last, ..] = prefix::<[u8; 8]>(head, at)?;
            let len = if kind == protocol::FRAGMENT { Fragment::LEN } else { (usize::from(extra) + 1) * 8 };
            if head.len() < at + len {
                return Err(IpError::Truncated { needed: at + len, found: head.len() });
            }
            (packet.protocol, packet.header_len) = (next, at + len);
            if matches!(kind, protocol::HOP_BY_HOP | protocol::ROUTING) {
                (packet.per_fragment_len, packet.next_header_at) = (at + len, at);
            }
            // The fourth byte of a routing header counts the segments left.
            packet.is_routed |= kind == protocol::ROUTING && last != 0;
            if kind == protocol::FRAGMENT {
                packet.is_fragment = true;
                // Behind the header of a later fragment is no header, but data.
                if offset_high != 0 || last & !7 != 0 {
                    return Ok(packet);
                }
            }
        }
        Err(IpError::Extensions)
    }

    /// Returns the sum of the pseudo header of TCP or UDP with this length in bytes (RFC 9293, 3.1; RFC 8200, 8.1), for the
    /// packet that starts with `head`. `None` for a routed packet, and if `head` is too short.
    pub fn pseudo_header(&self, head: &[u8], len: usize) -> Option<u16> {
        let mut sum = Sum::default();
        sum.add(match self.version {
            Version::V4 => head.get(12..20)?,
            Version::V6 => head.get(8..40)?,
        });
        sum.add_word(self.protocol.into());
        sum.add_word(u16::try_from(len).ok()?);
        (!self.is_routed).then(|| sum.get())
    }
}

fn check_version(expected: u8, first: u8) -> Result<(), IpError> {
    let found = first >> 4;
    if found == expected { Ok(()) } else { Err(IpError::Version { expected, found }) }
}

/// Returns the header at this position.
fn prefix<T: FromBytes + Immutable + KnownLayout + Unaligned>(head: &[u8], at: usize) -> Result<&T, IpError> {
    let header = head.get(at..).and_then(|rest| T::ref_from_prefix(rest).ok());
    header.map(|(header, _)| header).ok_or(IpError::Truncated { needed: at + size_of::<T>(), found: head.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Ipv4 = Ipv4 {
        version_ihl: 0x45,
        tos: 0,
        total_len: U16::new(1500),
        id: U16::new(7),
        fragment: U16::new(Ipv4::DF),
        ttl: 64,
        protocol: protocol::TCP,
        checksum: U16::new(0),
        source: [10, 0, 0, 1],
        destination: [10, 0, 0, 2],
    };

    fn v4(header: Ipv4, options: usize) -> Vec<u8> {
        [header.as_bytes(), &vec![1; options]].concat()
    }

    /// An IPv6 header and the extension headers of these kinds, with these numbers of extra words.
    fn v6(extensions: &[(u8, u8)], last: u8) -> Vec<u8> {
        let kinds = extensions.iter().map(|&(kind, _)| kind).chain([last]);
        let mut bytes = vec![0x60, 0, 0, 0, 0x01, 0x02, 0, 64];
        bytes.extend((0..32).map(|byte| byte + 1));
        let mut kinds = kinds;
        bytes[6] = kinds.next().unwrap();
        for (&(_, extra), next) in extensions.iter().zip(kinds) {
            bytes.extend([next, extra]);
            bytes.extend(vec![0; 6 + 8 * usize::from(extra)]);
        }
        bytes
    }

    #[test]
    fn ipv4_headers() {
        for options in [0, 4, 40] {
            let version_ihl = 0x45 + options / 4;
            let packet = Packet::read(Version::V4, &v4(Ipv4 { version_ihl, ..V4 }, options.into())).unwrap();
            assert_eq!((packet.header_len, packet.total_len), (20 + usize::from(options), 1500));
            assert_eq!((packet.protocol, packet.is_fragment, packet.next_header_at), (6, false, 9));
        }
        for (fragment, expected) in
            [(0, false), (Ipv4::DF, false), (Ipv4::MF, true), (1, true), (0x1fff, true), (0x8000, false)]
        {
            let head = v4(Ipv4 { fragment: U16::new(fragment), ..V4 }, 0);
            assert_eq!(Packet::read(Version::V4, &head).unwrap().is_fragment, expected);
        }
    }

    #[test]
    fn damaged_ipv4_headers() {
        let read = |version_ihl, len| Packet::read(Version::V4, &v4(Ipv4 { version_ihl, ..V4 }, 40)[..len]);
        for len in 0..20 {
            assert_eq!(read(0x45, len), Err(IpError::Truncated { needed: 20, found: len }));
        }
        assert_eq!(read(0x4f, 59), Err(IpError::Truncated { needed: 60, found: 59 }));
        assert_eq!(read(0x44, 60), Err(IpError::HeaderLen { found: 16 }));
        assert_eq!(read(0x65, 60), Err(IpError::Version { expected: 4, found: 6 }));
    }

    #[test]
    fn ipv6_extension_headers() {
        use protocol::{DESTINATION, FRAGMENT, HOP_BY_HOP, ROUTING, TCP};
        // Extensions, all headers, per-fragment headers, position of the field that names what follows those.
        type Case = (&'static [(u8, u8)], [usize; 3]);
        let cases: [Case; 7] = [
            (&[], [40, 40, 6]),
            (&[(HOP_BY_HOP, 0)], [48, 48, 40]),
            (&[(DESTINATION, 2)], [64, 40, 6]),
            (&[(HOP_BY_HOP, 1), (DESTINATION, 0), (ROUTING, 0), (DESTINATION, 0)], [80, 72, 64]),
            (&[(DESTINATION, 0), (ROUTING, 1)], [64, 64, 48]),
            (&[(FRAGMENT, 9)], [48, 40, 6]),
            (&[(DESTINATION, 0); MAX_EXTENSIONS], [104, 40, 6]),
        ];
        for (extensions, [header_len, per_fragment_len, next_header_at]) in cases {
            let head = v6(extensions, TCP);
            let head = &head[..header_len.min(head.len())];
            let packet = Packet::read(Version::V6, head).unwrap();
            assert_eq!((packet.header_len, packet.protocol), (header_len, TCP), "{extensions:?}");
            assert_eq!((packet.per_fragment_len, packet.next_header_at), (per_fragment_len, next_header_at));
            assert_eq!((packet.total_len, packet.is_routed), (40 + 0x102, false));
            assert_eq!(packet.is_fragment, extensions.contains(&(FRAGMENT, 9)));
            for len in 0..header_len {
                assert!(
                    matches!(Packet::read(Version::V6, &head[..len]), Err(IpError::Truncated { found, .. }) if found == len)
                );
            }
        }
    }

    #[test]
    fn a_chain_of_extension_headers_ends() {
        let head = v6(&[(protocol::DESTINATION, 0); MAX_EXTENSIONS + 1], protocol::TCP);
        assert_eq!(Packet::read(Version::V6, &head), Err(IpError::Extensions));
    }

    #[test]
    fn what_is_no_extension_header_ends_the_chain() {
        // Hop-by-hop options elsewhere, authentication, no next header.
        for kind in [protocol::HOP_BY_HOP, 51, 59] {
            let packet =
                Packet::read(Version::V6, &v6(&[(protocol::DESTINATION, 0), (kind, 0)], protocol::TCP)).unwrap();
            assert_eq!((packet.header_len, packet.protocol), (48, kind));
        }
        let mut later = v6(&[(protocol::FRAGMENT, 0)], protocol::DESTINATION);
        later[43] = 8;
        let packet = Packet::read(Version::V6, &later).unwrap();
        assert_eq!((packet.header_len, packet.protocol, packet.is_fragment), (48, protocol::DESTINATION, true));
    }

    #[test]
    fn pseudo_headers() {
        let head = v4(V4, 0);
        let packet = Packet::read(Version::V4, &head).unwrap();
        assert_eq!(packet.pseudo_header(&head, 1480), Some(0x0a00 + 1 + 0x0a00 + 2 + 6 + 1480));
        assert_eq!(packet.pseudo_header(&head[..19], 1480), None);
        assert_eq!(packet.pseudo_header(&head, 65536), None);
        let mut head = v6(&[(protocol::ROUTING, 0)], protocol::UDP);
        let packet = Packet::read(Version::V6, &head).unwrap();
        let words =
            head[8..40].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum::<u32>() + 17 + 8;
        assert_eq!(packet.pseudo_header(&head, 8), Some((words + (words >> 16)) as u16));
        head[43] = 1;
        let packet = Packet::read(Version::V6, &head).unwrap();
        assert!(packet.is_routed);
        assert_eq!(packet.pseudo_header(&head, 8), None);
    }
}
