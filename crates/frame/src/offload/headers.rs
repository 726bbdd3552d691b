//! The headers of a frame to be segmented or coalesced, read from a private copy and checked against the frame's length.

use super::{
    kind::{HEADERS, Kind},
    refused::Refused,
};
use ringroad_wire::{
    checksum::Sum,
    ethernet,
    ip::{ETHERTYPE_V4, ETHERTYPE_V6, Ipv4, Packet, Version, protocol},
    l4::{Tcp, Udp, flags},
};
use zerocopy::{FromBytes, IntoBytes, KnownLayout, Unaligned};

/// Where the headers of a frame are, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headers {
    /// The IP header.
    pub network: usize,
    pub ip: Packet,
    /// The TCP or UDP header.
    pub transport: usize,
    /// What follows that header.
    pub end: usize,
    /// Flags of TCP, 0 for UDP.
    pub tcp_flags: u8,
}

impl Headers {
    /// Reads the headers of a frame of `len` bytes that starts with `head`, as segmentation of this kind requires them.
    pub fn read(kind: Kind, head: &[u8], len: usize) -> Result<Headers, Refused> {
        let head = head.get(..len.min(HEADERS)).unwrap_or(head);
        let beyond = |needed| Refused::Headers { needed, found: head.len() };
        let (ethertype, network) = ethernet::payload(head).ok_or(beyond(ethernet::HEADER))?;
        if version(ethertype) != Some(kind.version()) {
            return Err(Refused::EtherType { expected: kind, found: ethertype });
        }
        Headers::read_at(kind, network, head, len)
    }

    /// The same, of the IP packet that begins at `network` and ends with the frame.
    pub fn read_at(kind: Kind, network: usize, head: &[u8], len: usize) -> Result<Headers, Refused> {
        let head = head.get(..len.min(HEADERS)).unwrap_or(head);
        let beyond = |needed| Refused::Headers { needed, found: head.len() };
        let ip = Packet::read(kind.version(), head.get(network..).unwrap_or_default())?;
        if ip.protocol != if kind.is_tcp() { protocol::TCP } else { protocol::UDP } {
            return Err(Refused::Protocol { expected: kind, found: ip.protocol });
        }
        if ip.is_fragment {
            return Err(Refused::Fragment);
        }
        if ip.total_len != len - network {
            return Err(Refused::IpLen { found: ip.total_len, actual: len - network });
        }
        let transport = network + ip.header_len;
        let rest = head.get(transport..).unwrap_or_default();
        let (own_len, tcp_flags) = if kind.is_tcp() {
            let (tcp, _) = Tcp::ref_from_prefix(rest).map_err(|_| beyond(transport + Tcp::LEN))?;
            (checked_tcp(tcp)?, tcp.flags)
        } else {
            let (udp, _) = Udp::ref_from_prefix(rest).map_err(|_| beyond(transport + Udp::LEN))?;
            if usize::from(udp.length.get()) != len - transport {
                return Err(Refused::UdpLen { found: udp.length.get(), actual: len - transport });
            }
            (Udp::LEN, 0)
        };
        if rest.len() < own_len {
            return Err(beyond(transport + own_len));
        }
        Ok(Headers { network, ip, transport, end: transport + own_len, tcp_flags })
    }

    /// Returns where the data begins that is divided among the segments.
    pub fn data(&self, kind: Kind) -> usize {
        if kind.is_fragments() { self.network + self.ip.per_fragment_len } else { self.end }
    }
}

/// Returns the version of IP that an EtherType stands for.
pub(super) fn version(ethertype: u16) -> Option<Version> {
    match ethertype {
        ETHERTYPE_V4 => Some(Version::V4),
        ETHERTYPE_V6 => Some(Version::V6),
        _ => None,
    }
}

/// Changes an IPv4 header, given with its options, and computes its checksum. `None` if it is too short.
pub(super) fn change_v4(header: &mut [u8], change: impl FnOnce(&mut Ipv4)) -> Option<()> {
    let (ip, _) = Ipv4::mut_from_prefix(header).ok()?;
    change(ip);
    ip.checksum.set(0);
    let mut sum = Sum::default();
    sum.add(header);
    let (ip, _) = Ipv4::mut_from_prefix(header).ok()?;
    ip.checksum.set(sum.checksum());
    Some(())
}

/// Returns the header at this position.
pub(super) fn header_mut<T: FromBytes + IntoBytes + KnownLayout + Unaligned>(
    frame: &mut [u8],
    at: usize,
) -> Option<&mut T> {
    T::mut_from_prefix(frame.get_mut(at..)?).ok().map(|(header, _)| header)
}

/// Returns the length of the TCP header.
fn checked_tcp(tcp: &Tcp) -> Result<usize, Refused> {
    let found = tcp.header_len();
    if found < Tcp::LEN {
        return Err(Refused::TcpHeader { found });
    }
    if tcp.flags & flags::SYN != 0 {
        return Err(Refused::TcpFlags { found: tcp.flags });
    }
    Ok(found)
}
