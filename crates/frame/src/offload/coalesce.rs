//! Plans which frames of a burst are coalesced (GRO): consecutive segments of a TCP flow become one frame of up to 64 KiB. The
//! rules are those of Linux (`tcp_gro_receive`, `inet_gro_receive`): cutting the frame again gives the same segments.
//!
//! Only headers are looked at, in private copies. The plan does not allocate; a worker has one and reuses it.

use super::{
    Checksum, Claim, Kind, Offload, Refused, Support,
    headers::{Headers, change_v4, header_mut, version},
};
use crate::BURST;
use ringroad_wire::{
    checksum::Sum,
    ethernet,
    ip::{Ipv4, Ipv6, Packet, Version, protocol},
    l4::{Tcp, flags},
};
use std::ops::Range;
use zerocopy::FromBytes;

/// Groups that a frame is compared with: flows that may alternate.
const FLOWS: usize = 8;

/// Largest IP packet, in bytes.
const MAX_PACKET: usize = u16::MAX as usize;

/// What the plan needs to know of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The frame's first [`super::HEADERS`] bytes, or all.
    pub bytes: &'a [u8],
    /// Length of the frame, in bytes.
    pub len: usize,
    /// Only frames whose checksum is valid or partial are coalesced.
    pub offload: Offload,
}

/// A frame, or several that become one.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    first: u8,
    last: u8,
    count: u8,
    /// Total length in bytes.
    len: usize,
    /// The first frame, if it is of TCP.
    tcp: Option<TcpFrame>,
    /// What the next frame must have; no other is added if `None`.
    next: Option<Next>,
    /// FIN and PSH of the last frame.
    ending: u8,
}

/// What the next frame of a group must have.
#[derive(Clone, Copy, Debug)]
struct Next {
    seq: u32,
    /// Identification of the last frame.
    id: u16,
    /// By which it grows, once there are two frames.
    step: Option<u16>,
}

/// A frame of TCP.
#[derive(Clone, Copy, Debug)]
struct TcpFrame {
    kind: Kind,
    headers: Headers,
    /// Data in bytes.
    data: usize,
    seq: u32,
    /// Of IPv4.
    id: u16,
    /// Of IPv4: identifications need not differ (RFC 6864).
    is_atomic: bool,
    /// Other frames may be added.
    is_mergeable: bool,
}

/// The groups of a burst.
#[derive(Debug)]
pub struct Plan {
    groups: [Group; BURST],
    count: usize,
    /// Groups before this one are not added to.
    oldest: usize,
    /// For each frame, the next one of its group.
    next: [u8; BURST],
}

impl Default for Plan {
    fn default() -> Plan {
        let none = Group { first: 0, last: 0, count: 0, len: 0, tcp: None, next: None, ending: 0 };
        Plan { groups: [none; BURST], count: 0, oldest: 0, next: [0; BURST] }
    }
}

impl Group {
    /// Returns whether it consists of several frames.
    pub fn is_merged(&self) -> bool {
        self.count > 1
    }

    /// Returns the total length, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes; never true for groups of a plan.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Plan {
    /// Groups these frames, at most [`BURST`], for a receiver with this `support` that takes frames of up to `longest` bytes.
    pub fn make(&mut self, frames: &[Head<'_>], support: Support, longest: usize) {
        (self.count, self.oldest) = (0, 0);
        for (index, frame) in frames.iter().enumerate().take(BURST) {
            let tcp = TcpFrame::read(frame, support);
            if tcp.is_err() {
                // It may be of any flow. Nothing overtakes it.
                self.oldest = self.count;
            }
            let tcp = tcp.unwrap_or_default();
            if !tcp.is_some_and(|tcp| self.extend(frames, index, &tcp, longest)) {
                self.begin(index, frame, tcp);
            }
        }
    }

    /// Returns the groups, in the order of their first frames.
    pub fn groups(&self) -> &[Group] {
        self.groups.get(..self.count).unwrap_or_default()
    }

    /// Returns the indices of a group's frames. All but the first contribute only what follows the header.
    pub fn members(&self, group: &Group) -> impl Iterator<Item = usize> {
        let mut index = group.first;
        (0..group.count).map(move |_| {
            let this = usize::from(index);
            index = self.next.get(this).copied().unwrap_or_default();
            this
        })
    }

    /// Writes the header of a merged group to `out`, which has room for [`super::HEADERS`] bytes. Returns its length in bytes,
    /// and what is left to do to the frame. `None` if the group is one frame, which stays as it is.
    pub fn header(&self, group: &Group, frames: &[Head<'_>], out: &mut [u8]) -> Option<(usize, Offload)> {
        let first = group.tcp.filter(|_| group.is_merged())?;
        let Headers { network, ip, transport, end, .. } = first.headers;
        let out = out.get_mut(..end)?;
        out.copy_from_slice(frames.get(usize::from(group.first))?.bytes.get(..end)?);
        let packet = group.len - network;
        match ip.version {
            Version::V4 => change_v4(out.get_mut(network..transport)?, |ip| ip.total_len.set(packet as u16))?,
            Version::V6 => header_mut::<Ipv6>(out, network)?.payload_len.set((packet - Ipv6::LEN) as u16),
        }
        let pseudo = ip.pseudo_header(out.get(network..)?, group.len - transport)?;
        let tcp: &mut Tcp = header_mut(out, transport)?;
        tcp.flags |= group.ending;
        tcp.checksum.set(pseudo);
        let checksum = (transport as u16, Tcp::CHECKSUM);
        let claim = Claim { kind: first.kind, ecn: false, size: first.data as u16, checksum };
        Some((end, Offload::segmented(claim, out, group.len).ok()?))
    }

    /// Adds a frame to the last group of its flow, if it continues it.
    fn extend(&mut self, frames: &[Head<'_>], index: usize, tcp: &TcpFrame, longest: usize) -> bool {
        let Plan { groups, count, oldest, next } = self;
        let bytes = |index: usize| frames.get(index).map_or(&[][..], |frame| frame.bytes);
        let groups = groups.get_mut(*oldest..*count).unwrap_or_default();
        let found = groups.iter_mut().rev().take(FLOWS).find_map(|group| {
            let first = group.tcp?;
            let head = bytes(group.first.into());
            tcp.is_same_flow(bytes(index), &first, head).then_some((group, first, head))
        });
        let Some((group, first, head)) = found else { return false };
        let Some(expected) = group.next else { return false };
        let flags = tcp.headers.tcp_flags;
        let step = tcp.id.wrapping_sub(expected.id);
        let continues = tcp.is_mergeable
            && tcp.seq == expected.seq
            && tcp.data <= first.data
            && flags & flags::CWR == 0
            && tcp.is_alike(bytes(index), &first, head)
            && group.len + tcp.data <= longest.min(first.headers.network + MAX_PACKET)
            && match expected.step {
                _ if first.headers.ip.version == Version::V6 => true,
                None => step == 1 || (step == 0 && first.is_atomic),
                Some(before) => step == before,
            };
        // Should it not, it begins a new group, and later frames of the flow are compared with that one.
        if continues {
            if let Some(next) = next.get_mut(usize::from(group.last)) {
                *next = index as u8;
            }
            group.last = index as u8;
            group.count += 1;
            group.len += tcp.data;
            group.ending = flags & (flags::FIN | flags::PSH);
            group.next = tcp.next(first.data, Some(step));
        }
        continues
    }

    fn begin(&mut self, index: usize, frame: &Head<'_>, tcp: Option<TcpFrame>) {
        if let Some(group) = self.groups.get_mut(self.count) {
            let first = tcp.filter(|tcp| tcp.is_mergeable && tcp.data >= tcp.kind.least().into());
            let next = first.and_then(|first| first.next(first.data, None));
            let index = index as u8;
            *group = Group { first: index, last: index, count: 1, len: frame.len, tcp, next, ending: 0 };
            self.count += 1;
        }
    }
}

impl TcpFrame {
    /// Reads the headers of a frame; `None` if it is not of TCP.
    fn read(frame: &Head<'_>, support: Support) -> Result<Option<TcpFrame>, Refused> {
        let Head { bytes, len, offload } = *frame;
        let Some((ethertype, _)) = ethernet::payload(bytes) else { return Ok(None) };
        let kind = match version(ethertype) {
            Some(Version::V4) => Kind::Tcp4,
            Some(Version::V6) => Kind::Tcp6,
            None => return Ok(None),
        };
        let headers = match Headers::read(kind, bytes, len) {
            Err(Refused::EtherType { .. } | Refused::Protocol { .. }) => return Ok(None),
            headers => headers?,
        };
        let Headers { network, ip, transport, end, tcp_flags } = headers;
        let short = Refused::Headers { needed: end, found: bytes.len() };
        let (tcp, _) = Tcp::ref_from_prefix(bytes.get(transport..).unwrap_or_default()).map_err(|_| short)?;
        let packet = bytes.get(network..transport).unwrap_or_default();
        let (id, is_atomic, is_intact) = match (ip.version, Ipv4::ref_from_prefix(packet)) {
            (Version::V4, Ok((ip, _))) => {
                let mut sum = Sum::default();
                sum.add(packet);
                (ip.id.get(), ip.fragment.get() & Ipv4::DF != 0, sum.get() == 0xffff)
            }
            _ => (0, false, !ip.is_routed),
        };
        let is_checked = match offload.checksum() {
            Checksum::Complete => false,
            Checksum::Valid => true,
            Checksum::Partial { start, offset } => (usize::from(start), offset) == (transport, Tcp::CHECKSUM),
        };
        let mut needs = kind.support();
        needs.set(Support::ECN, tcp_flags & flags::CWR != 0);
        let is_mergeable = is_intact
            && is_checked
            && offload.gso().is_none()
            && support.contains(needs)
            && len > end
            && tcp_flags & (flags::RST | flags::URG | flags::ACK) == flags::ACK;
        let (data, seq) = (len - end, tcp.seq.get());
        Ok(Some(TcpFrame { kind, headers, data, seq, id, is_atomic, is_mergeable }))
    }

    /// Returns what must follow this segment in a group with segments of `size` bytes: nothing follows a shorter one, FIN or PSH.
    fn next(&self, size: usize, step: Option<u16>) -> Option<Next> {
        let is_last = self.data < size || self.headers.tcp_flags & (flags::FIN | flags::PSH) != 0;
        let seq = self.seq.wrapping_add(self.data as u32);
        (!is_last).then_some(Next { seq, id: self.id, step })
    }

    /// Returns whether both frames have the same addresses and ports. The lengths of their IP headers may differ.
    fn is_same_flow(&self, bytes: &[u8], other: &TcpFrame, others: &[u8]) -> bool {
        let Headers { network, transport, .. } = self.headers;
        let addresses = if self.kind == Kind::Tcp4 { 12..20 } else { 8..40 };
        self.kind == other.kind
            && equal(bytes, others, 0..network)
            && equal(bytes, others, network + addresses.start..network + addresses.end)
            && equal(
                bytes.get(transport..).unwrap_or_default(),
                others.get(other.headers.transport..).unwrap_or_default(),
                0..4,
            )
    }

    /// Returns whether both frames have the same headers, apart from what differs among the segments of a frame: lengths,
    /// identification, checksums, sequence number, and the flags FIN, PSH and CWR.
    fn is_alike(&self, bytes: &[u8], other: &TcpFrame, others: &[u8]) -> bool {
        let (Headers { network, transport, end, .. }, theirs) = (self.headers, other.headers);
        let same = |range| equal(bytes, others, range);
        let network_alike = if self.kind == Kind::Tcp4 {
            same(0..network + 2) && same(network + 6..network + 10) && same(network + 12..transport + 4)
        } else {
            same(0..network + 4) && same(network + 6..transport + 4)
        };
        let differing = self.headers.tcp_flags ^ theirs.tcp_flags;
        (transport, end) == (theirs.transport, theirs.end)
            && network_alike
            && differing & !(flags::FIN | flags::PSH | flags::CWR) == 0
            && same(transport + 8..transport + 13)
            && same(transport + 14..transport + 16)
            && same(transport + 18..end)
    }
}

/// Returns whether a frame that begins like this is of TCP: its checksum is worth verifying, so that it can be coalesced.
pub fn is_tcp(head: &[u8]) -> bool {
    let Some((ethertype, network)) = ethernet::payload(head) else { return false };
    let Some(version) = version(ethertype) else { return false };
    Packet::read(version, head.get(network..).unwrap_or_default()).is_ok_and(|packet| packet.protocol == protocol::TCP)
}

/// Returns whether these bytes of both are there and the same.
fn equal(bytes: &[u8], others: &[u8], range: Range<usize>) -> bool {
    bytes.get(range.clone()).is_some_and(|bytes| others.get(range) == Some(bytes))
}
