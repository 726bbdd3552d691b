//! Which frames belong together: addresses and ports, from which a device computes a hash of its own kind. Used by `switch` and
//! `net` to choose among a port's queues. And which of them only acknowledge others.

use crate::Burst;
use ringroad_wire::{
    ethernet,
    ip::{self, Packet, Version, protocol},
    l4::{Tcp, flags},
};
use zerocopy::FromBytes;

/// Bytes of a frame that are looked at: two VLAN tags, IPv6 with a few extension headers, ports.
const LOOK: usize = 128;

/// The flow of an IP packet, as its headers have it: in network byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Version of IP.
    pub version: Version,
    /// The protocol behind the IP headers.
    pub protocol: u8,
    /// Source and destination address, of which IPv4 uses the first 8 bytes.
    addresses: [u8; 32],
    /// Source and destination port of TCP and UDP; `None` for fragments, which would differ in that from each other.
    pub ports: Option<[u8; 4]>,
}

impl Flow {
    /// Reads the flow of a frame. `None` if it is not IP.
    pub fn read(burst: &Burst, index: usize) -> Option<Flow> {
        let mut head = [0; LOOK];
        let len = burst.copy(index, 0, &mut head);
        Flow::parse(head.get(..len)?)
    }

    /// Reads the flow of the frame that starts with these bytes.
    pub fn parse(frame: &[u8]) -> Option<Flow> {
        let (ethertype, at) = ethernet::payload(frame)?;
        let (version, first, len) = match ethertype {
            ip::ETHERTYPE_V4 => (Version::V4, 12, 8),
            ip::ETHERTYPE_V6 => (Version::V6, 8, 32),
            _ => return None,
        };
        let bytes = frame.get(at..)?;
        let mut addresses = [0; 32];
        addresses.get_mut(..len)?.copy_from_slice(bytes.get(first..first + len)?);
        // Of headers that are too long, or wrong, the addresses are known nevertheless.
        let Ok(packet) = Packet::read(version, bytes) else {
            return Some(Flow { version, protocol: protocol::HOP_BY_HOP, addresses, ports: None });
        };
        let has_ports = matches!(packet.protocol, protocol::TCP | protocol::UDP) && !packet.is_fragment;
        let ports = bytes.get(packet.header_len..).and_then(|rest| rest.first_chunk()).copied();
        Some(Flow { version, protocol: packet.protocol, addresses, ports: ports.filter(|_| has_ports) })
    }

    /// Returns source and destination address.
    pub fn addresses(&self) -> &[u8] {
        let len = if self.version == Version::V4 { 8 } else { 32 };
        self.addresses.get(..len).unwrap_or_default()
    }

    /// Returns a hash that is the same in both directions, and that nobody can foresee who does not know `seed`.
    pub fn hash(&self, seed: u64) -> u32 {
        let (source, destination) = self.addresses().split_at(self.addresses().len() / 2);
        let mut mixed = mix(seed, self.protocol.into());
        for (source, destination) in source.as_chunks::<4>().0.iter().zip(destination.as_chunks::<4>().0) {
            mixed = mix(mixed, both(u32::from_be_bytes(*source), u32::from_be_bytes(*destination)));
        }
        if let Some([a, b, c, d]) = self.ports {
            mixed = mix(mixed, both(u16::from_be_bytes([a, b]).into(), u16::from_be_bytes([c, d]).into()));
        }
        // Once more: the upper bits of a product say little of the upper bits of its factor.
        (mix(mixed, 0) >> 32) as u32
    }
}

/// How the options of a TCP header begin that has timestamps alone, aligned as all senders do (RFC 7323, appendix A). Others may be
/// SACK blocks (RFC 2018), which report a loss.
const TIMESTAMPS: [u8; 4] = [1, 1, 8, 10];
const WITH_TIMESTAMPS: usize = Tcp::LEN + 12;

/// Returns whether the frame that starts with these bytes is a TCP segment that only acknowledges: without data, and without flags
/// or options that its receiver should see at once.
pub fn acknowledges(frame: &[u8]) -> bool {
    let packet = || {
        let (ethertype, at) = ethernet::payload(frame)?;
        let version = match ethertype {
            ip::ETHERTYPE_V4 => Version::V4,
            ip::ETHERTYPE_V6 => Version::V6,
            _ => return None,
        };
        let bytes = frame.get(at..)?;
        let packet = Packet::read(version, bytes).ok()?;
        let (tcp, options) = Tcp::read_from_prefix(bytes.get(packet.header_len..)?).ok()?;
        let plain = match tcp.header_len() {
            Tcp::LEN => true,
            WITH_TIMESTAMPS => options.starts_with(&TIMESTAMPS),
            _ => false,
        };
        plain.then_some((packet, tcp))
    };
    packet().is_some_and(|(packet, tcp)| {
        packet.protocol == protocol::TCP
            && !packet.is_fragment
            && tcp.flags == flags::ACK
            && packet.total_len == packet.header_len + tcp.header_len()
    })
}

/// Returns what two numbers have in common, whichever comes first.
fn both(one: u32, other: u32) -> u64 {
    u64::from(one.min(other)) << 32 | u64::from(one.max(other))
}

fn mix(state: u64, value: u64) -> u64 {
    let mixed = (state ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(frame: &[u8], seed: u64) -> Option<u32> {
        Flow::parse(frame).map(|flow| flow.hash(seed))
    }

    /// A frame with these bytes behind the EtherType.
    fn frame(tags: usize, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let tag = [0x81, 0, 0, 7].repeat(tags);
        [&[2; 12][..], &tag, &ethertype.to_be_bytes(), payload].concat()
    }

    fn v4(source: [u8; 4], destination: [u8; 4], kind: u8, fragment: u8, ports: [u16; 2]) -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 40, 0, 1, fragment, 0, 64, kind, 0, 0];
        bytes.extend([source, destination].concat());
        ports.iter().for_each(|port| bytes.extend(port.to_be_bytes()));
        frame(0, ip::ETHERTYPE_V4, &bytes)
    }

    #[test]
    fn both_directions_are_one_flow_and_ports_tell_flows_apart() {
        let (a, b) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let flow = |ports| hash(&v4(a, b, protocol::TCP, 0, ports), 7).unwrap();
        let back = hash(&v4(b, a, protocol::TCP, 0, [80, 1234]), 7).unwrap();
        assert_eq!(flow([1234, 80]), back);
        let mut seen: Vec<u32> = (0..1000).map(|port| flow([port, 5201])).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 1000);
        assert_ne!(flow([1234, 80]), hash(&v4(a, b, protocol::UDP, 0, [1234, 80]), 7).unwrap());
        assert_ne!(flow([1234, 80]), hash(&v4(a, b, protocol::TCP, 0, [1234, 80]), 8).unwrap(), "by the seed");
        // Four queues get about the same number of flows.
        let mut queues = [0; 4];
        (0..4000).for_each(|port| queues[flow([port, 5201]) as usize >> 30] += 1);
        assert!(queues.iter().all(|count| (850..1150).contains(count)), "{queues:?}");
        for first in (0..4000).step_by(40) {
            let used = (first..first + 40).fold(0, |used, port| used | 1 << (flow([port, 5201]) >> 30));
            assert_eq!(used, 0b1111, "40 consecutive ports from {first} on");
        }
    }

    #[test]
    fn fragments_go_by_their_addresses_and_other_frames_by_nothing() {
        let (a, b) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let of = |fragment, ports| hash(&v4(a, b, protocol::UDP, fragment, ports), 7).unwrap();
        assert_eq!(of(0x20, [1, 2]), of(0x20, [3, 4]));
        let icmp = |ports| hash(&v4(a, b, 1, 0, ports), 7).unwrap();
        assert_eq!(icmp([1, 2]), icmp([3, 4]));
        assert_eq!(hash(&frame(0, 0x0806, &[0; 28]), 7), None);
        // Cut short at any byte, with and without tags.
        let whole = v4(a, b, protocol::TCP, 0, [1, 2]);
        let tagged = frame(2, ip::ETHERTYPE_V4, &whole[14..]);
        assert_eq!(hash(&tagged, 7), hash(&whole, 7));
        assert!((0..34).all(|len| hash(&whole[..len], 7).is_none()));
        (34..whole.len()).for_each(|len| assert!(hash(&whole[..len], 7).is_some()));
    }

    #[test]
    fn ipv6_behind_extension_headers() {
        let packet = |extension: &[u8], next: u8, ports: [u16; 2]| {
            let mut bytes = vec![0x60, 0, 0, 0, 0, 40, next, 64];
            bytes.extend([[0xfd; 16], [0xfe; 16]].concat());
            bytes.extend(extension);
            ports.iter().for_each(|port| bytes.extend(port.to_be_bytes()));
            let frame = frame(0, ip::ETHERTYPE_V6, &bytes);
            hash(&frame[..frame.len().min(LOOK)], 7).unwrap()
        };
        let options = [protocol::TCP, 0, 1, 4, 0, 0, 0, 0];
        assert_eq!(packet(&[], protocol::TCP, [5, 6]), packet(&options, protocol::DESTINATION, [5, 6]));
        assert_ne!(packet(&[], protocol::TCP, [5, 6]), packet(&[], protocol::TCP, [5, 7]));
        // Behind headers that are longer than what is looked at, nothing is known.
        let long = [&[protocol::TCP, 13][..], &[0; 110]].concat();
        assert_eq!(packet(&long, protocol::DESTINATION, [5, 6]), packet(&long, protocol::DESTINATION, [5, 7]));
    }

    /// A TCP segment with these options, and so much data.
    fn segment(version: Version, tags: usize, flags: u8, options: &[u8], data: usize) -> Vec<u8> {
        let start = [(20 + options.len() as u8) << 2, flags, 0, 0, 0, 0, 0, 0];
        let tcp = [&[0; 12][..], &start, options, &vec![0; data]].concat();
        let len = (tcp.len() as u16).to_be_bytes();
        match version {
            Version::V4 => {
                let total = (tcp.len() as u16 + 20).to_be_bytes();
                let ip = [&[0x45, 0], &total[..], &[0, 1, 0x40, 0, 64, protocol::TCP, 0, 0], &[1; 8]].concat();
                frame(tags, ip::ETHERTYPE_V4, &[ip, tcp].concat())
            }
            Version::V6 => {
                let ip = [&[0x60, 0, 0, 0], &len[..], &[protocol::TCP, 64], &[1; 32]].concat();
                frame(tags, ip::ETHERTYPE_V6, &[ip, tcp].concat())
            }
        }
    }

    #[test]
    fn acknowledgements_have_no_data_and_nothing_urgent() {
        let times = [&[1, 1, 8, 10][..], &[7; 8]].concat();
        let sack = [&[1, 1, 5, 10][..], &[7; 8]].concat();
        for version in [Version::V4, Version::V6] {
            for tags in 0..=2 {
                let is = |flags, options: &[u8], data| acknowledges(&segment(version, tags, flags, options, data));
                assert!(is(flags::ACK, &[], 0) && is(flags::ACK, &times, 0), "{version:?}, {tags} tags");
                assert!(!is(flags::ACK, &[], 1) && !is(flags::ACK, &times, 1), "data");
                assert!(!is(flags::ACK, &sack, 0) && !is(flags::ACK, &[&times[..], &sack].concat(), 0));
                for other in [flags::SYN, flags::FIN, flags::RST, flags::PSH, flags::URG, flags::ECE, flags::CWR] {
                    assert!(!is(flags::ACK | other, &times, 0) && !is(other, &times, 0));
                }
                // Padded, as on Ethernet, and cut short.
                let whole = segment(version, tags, flags::ACK, &[], 0);
                assert!(acknowledges(&[&whole[..], &[0; 6]].concat()));
                assert!((0..whole.len()).all(|len| !acknowledges(&whole[..len])));
            }
        }
        // Of another protocol, a fragment, of another EtherType.
        let mut other = segment(Version::V4, 0, flags::ACK, &[], 0);
        other[23] = protocol::UDP;
        assert!(!acknowledges(&other));
        let mut fragment = segment(Version::V4, 0, flags::ACK, &[], 0);
        fragment[20] = 0x20;
        assert!(!acknowledges(&fragment));
        let mut strange = segment(Version::V4, 0, flags::ACK, &[], 0);
        strange[13] = 6;
        assert!(!acknowledges(&strange));
    }
}
