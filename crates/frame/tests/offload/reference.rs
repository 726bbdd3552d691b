//! Frames built from scratch, with checksums by `etherparse`, and what segmentation and coalescing must make of them. Used by the
//! property tests and by the fuzz target `segment`.

use etherparse::{Ipv4HeaderSlice, Ipv6FragmentHeaderSlice, NetSlice, SlicedPacket, TcpSlice, UdpSlice};
use ringroad_frame::{
    BURST, Offload,
    offload::{
        Checksum, Claim, Gso, HEADERS, Kind, Support, checksum,
        coalesce::{Head, Plan},
        segment::{Checksums, Segmenter},
    },
};

const FIN_PSH: u8 = 9;
const CWR: u8 = 128;
const IDENT: u32 = 0x1234_5678;

/// A frame to be segmented.
#[derive(Clone, Debug)]
pub struct Spec {
    pub kind: Kind,
    pub tags: usize,
    /// Words of IPv4 options, 0 to 10.
    pub ip_options: usize,
    /// Extension headers of IPv6, in this order: hop-by-hop, destination, routing, destination; and their extra words.
    pub extensions: [Option<u8>; 4],
    /// Words of TCP options, 0 to 10.
    pub tcp_options: usize,
    pub flags: u8,
    pub seq: u32,
    pub id: u16,
    pub df: bool,
    /// Anything in addresses and ports.
    pub flow: u8,
    pub size: u16,
    pub payload: Vec<u8>,
}

impl Spec {
    fn is_v4(&self) -> bool {
        matches!(self.kind, Kind::Tcp4 | Kind::Udp4 | Kind::Fragments4)
    }

    pub fn network(&self) -> usize {
        14 + 4 * self.tags
    }

    /// Lengths of the extension headers.
    fn extension_lens(&self) -> impl Iterator<Item = usize> {
        self.extensions.into_iter().flatten().map(|extra| 8 + 8 * usize::from(extra))
    }

    pub fn transport(&self) -> usize {
        let ip = if self.is_v4() { 20 + 4 * self.ip_options } else { 40 + self.extension_lens().sum::<usize>() };
        self.network() + ip
    }

    pub fn end(&self) -> usize {
        self.transport() + if self.kind.is_tcp() { 20 + 4 * self.tcp_options } else { 8 }
    }

    pub fn claim(&self) -> Claim {
        let offset = if self.kind.is_tcp() { 16 } else { 6 };
        Claim { kind: self.kind, ecn: false, size: self.size, checksum: (self.transport() as u16, offset) }
    }

    /// The frame with a partial checksum.
    pub fn frame(&self) -> Vec<u8> {
        let mut frame = vec![self.flow; 12];
        for tag in [0x88a8u16, 0x8100].into_iter().skip(2 - self.tags) {
            frame.extend(tag.to_be_bytes());
            frame.extend([0x20, self.flow]);
        }
        let l4_len = (self.end() - self.transport() + self.payload.len()) as u16;
        let protocol = if self.kind.is_tcp() { 6 } else { 17 };
        if self.is_v4() {
            self.ipv4(&mut frame, protocol, l4_len)
        } else {
            self.ipv6(&mut frame, protocol, l4_len)
        }
        let at = self.network();
        let addresses = if self.is_v4() { at + 12..at + 20 } else { at + 8..at + 40 };
        let pseudo = frame[addresses].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum::<u32>();
        let pseudo = pseudo + u32::from(protocol) + u32::from(l4_len);
        let pseudo = (pseudo & 0xffff) + (pseudo >> 16);
        let pseudo = ((pseudo & 0xffff) + (pseudo >> 16)) as u16;
        frame.extend([0x30, self.flow, 0x40, 0x41]);
        if self.kind.is_tcp() {
            frame.extend(self.seq.to_be_bytes());
            frame.extend([1, 2, 3, 4, 0x50 + (self.tcp_options as u8) * 16, self.flags, 5, 6]);
            frame.extend(pseudo.to_be_bytes());
            frame.extend([0, 0]);
            frame.extend((0..4 * self.tcp_options).map(|index| index as u8));
        } else {
            frame.extend(l4_len.to_be_bytes());
            frame.extend(pseudo.to_be_bytes());
        }
        frame.extend(&self.payload);
        frame
    }

    fn ipv4(&self, frame: &mut Vec<u8>, protocol: u8, l4_len: u16) {
        let (options, at) = (4 * self.ip_options, frame.len() + 2);
        frame.extend([0x08, 0x00, 0x45 + self.ip_options as u8, 3]);
        frame.extend((20 + options as u16 + l4_len).to_be_bytes());
        frame.extend(self.id.to_be_bytes());
        frame.extend([if self.df { 0x40 } else { 0 }, 0, 64, protocol, 0, 0]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, self.flow]);
        frame.extend(vec![1; options]);
        let checksum = Ipv4HeaderSlice::from_slice(&frame[at..]).unwrap().to_header().calc_header_checksum();
        frame[at + 10..at + 12].copy_from_slice(&checksum.to_be_bytes());
    }

    fn ipv6(&self, frame: &mut Vec<u8>, protocol: u8, l4_len: u16) {
        let kinds = [0, 60, 43, 60].into_iter().zip(self.extensions).filter_map(|(kind, there)| there.map(|_| kind));
        let mut kinds = kinds.chain([protocol]);
        frame.extend([0x86, 0xdd, 0x60, 0x12, 0x34, 0x56]);
        frame.extend((self.extension_lens().sum::<usize>() as u16 + l4_len).to_be_bytes());
        frame.extend([kinds.next().unwrap(), 64]);
        frame.extend((0..32).map(|byte| byte ^ self.flow));
        for len in self.extension_lens() {
            frame.extend([kinds.next().unwrap(), (len / 8 - 1) as u8]);
            // Padding of one option; no segments left in a routing header.
            frame.extend([1, 0]);
            frame.extend(vec![0; len - 4]);
        }
    }

    /// The frame with its checksum.
    pub fn complete(&self) -> Vec<u8> {
        let mut frame = self.frame();
        let checksum = checksum_of(&frame, self.transport(), self.kind.is_tcp());
        let at = self.transport() + usize::from(self.claim().checksum.1);
        frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        frame
    }
}

/// The checksum of a TCP segment or UDP datagram. 0 and 0xffff are the same number; the latter is right for both protocols.
pub fn checksum_of(frame: &[u8], transport: usize, tcp: bool) -> u16 {
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let rest = &frame[transport..];
    let checksum = match sliced.net.unwrap() {
        NetSlice::Ipv4(ip) => {
            let (source, destination) = (ip.header().source(), ip.header().destination());
            assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
            if tcp {
                TcpSlice::from_slice(rest).unwrap().calc_checksum_ipv4(source, destination).unwrap()
            } else {
                let udp = UdpSlice::from_slice(rest).unwrap();
                udp.to_header().calc_checksum_ipv4_raw(source, destination, udp.payload()).unwrap()
            }
        }
        NetSlice::Ipv6(ip) => {
            let (source, destination) = (ip.header().source(), ip.header().destination());
            if tcp {
                TcpSlice::from_slice(rest).unwrap().calc_checksum_ipv6(source, destination).unwrap()
            } else {
                let udp = UdpSlice::from_slice(rest).unwrap();
                udp.to_header().calc_checksum_ipv6_raw(source, destination, udp.payload()).unwrap()
            }
        }
        NetSlice::Arp(_) => unreachable!(),
    };
    if checksum == 0 { 0xffff } else { checksum }
}

/// All segments of a frame, with what is left to do to each.
pub fn segments(frame: &[u8], gso: Gso, checksums: Checksums) -> Vec<(Vec<u8>, Offload)> {
    let head = &frame[..frame.len().min(HEADERS)];
    let mut segmenter = Segmenter::new(gso, head, frame.len(), checksums, IDENT).unwrap();
    let (mut out, mut segments) = (vec![0; segmenter.longest()], Vec::new());
    let count = segmenter.remaining();
    let (mut behind, mut again) = (0, 0);
    while let Some(segment) = segmenter.next(&mut out, |at, part| {
        assert!(at >= usize::from(gso.header_len), "headers come from the private copy");
        again += usize::from(at < behind);
        behind = at + part.len();
        part.copy_from_slice(&frame[at..at + part.len()])
    }) {
        segments.push((out[..segment.len].to_vec(), segment.offload));
        assert_eq!(segmenter.remaining(), count - segments.len());
    }
    assert_eq!(segments.len(), count);
    // A datagram's sum comes first.
    assert_eq!(again, usize::from(gso.kind.is_fragments()), "read in order");
    segments
}

/// Segments the frame and checks each segment against one that is built from scratch, then coalesces them again.
pub fn check(spec: &Spec) {
    let frame = spec.frame();
    let offload = Offload::segmented(spec.claim(), &frame[..frame.len().min(HEADERS)], frame.len()).unwrap();
    let Some(gso) = offload.gso() else {
        let mut frame = frame;
        checksum::complete(&mut frame, offload);
        assert_eq!(frame, spec.complete());
        assert_eq!(checksum::verify(&frame), Offload::VALID);
        return;
    };
    assert_eq!(usize::from(gso.header_len), spec.end());
    assert_eq!(gso.ecn, spec.kind.is_tcp() && spec.flags & CWR != 0);
    let complete = segments(&frame, gso, Checksums::Complete);
    assert!(complete.iter().all(|(segment, rest)| rest.is_none() && segment.len() <= offload.longest(frame.len())));
    let partial = segments(&frame, gso, Checksums::Partial);
    for ((complete, _), (mut partial, rest)) in complete.iter().zip(partial.clone()) {
        assert_eq!(rest.is_none(), spec.kind.is_fragments());
        checksum::complete(&mut partial, rest);
        assert_eq!(*complete, partial);
    }
    if spec.kind.is_fragments() {
        reassemble(spec, &complete);
        return;
    }
    let last = complete.len() - 1;
    for (index, ((segment, _), payload)) in complete.iter().zip(spec.payload.chunks(spec.size.into())).enumerate() {
        let dropped = if index < last { FIN_PSH } else { 0 } | if index > 0 { CWR } else { 0 };
        let expected = Spec {
            payload: payload.to_vec(),
            seq: spec.seq.wrapping_add((index * usize::from(spec.size)) as u32),
            id: spec.id.wrapping_add(index as u16),
            flags: spec.flags & !dropped,
            ..spec.clone()
        };
        assert_eq!(*segment, expected.complete(), "segment {index}");
        assert_eq!(checksum::verify(segment), Offload::VALID);
    }
    assert_eq!(complete.len(), spec.payload.chunks(spec.size.into()).len());
    // A last segment that is not shorter ends the group as well if PSH or FIN says so, or if there are no more frames.
    if spec.kind.is_tcp() && complete.len() <= BURST {
        let verified: Vec<_> = complete.into_iter().map(|(segment, _)| (segment, Offload::VALID)).collect();
        for frames in [verified, partial] {
            let merged = coalesced(&frames, Support::all());
            assert_eq!(merged.len(), 1);
            assert_eq!(merged[0], (frame.clone(), offload, (0..frames.len()).collect()));
        }
    }
}

/// The frame that fragments make, which must be the whole datagram.
fn reassemble(spec: &Spec, fragments: &[(Vec<u8>, Offload)]) {
    let expected = spec.complete();
    let network = spec.network();
    // Destination options behind the last hop-by-hop or routing header are part of what is fragmented.
    let per_fragment = [0, 2].into_iter().rev().find(|&index| spec.extensions[index].is_some());
    let behind = spec.extensions.iter().skip(per_fragment.map_or(0, |last| last + 1)).flatten();
    let behind: usize = behind.map(|&extra| 8 + 8 * usize::from(extra)).sum();
    let data = if spec.is_v4() { spec.transport() } else { spec.transport() - behind };
    let (mut whole, mut more) = (expected[..data].to_vec(), true);
    for (fragment, _) in fragments {
        assert!(more, "a fragment behind the last one");
        let (offset, rest) = if spec.is_v4() {
            let ip = Ipv4HeaderSlice::from_slice(&fragment[network..]).unwrap();
            assert_eq!(ip.header_checksum(), ip.to_header().calc_header_checksum());
            assert_eq!(usize::from(ip.total_len()), fragment.len() - network);
            assert_eq!((ip.identification(), ip.dont_fragment(), ip.protocol().0), (spec.id, false, 17));
            more = ip.more_fragments();
            (ip.fragments_offset().byte_offset(), data)
        } else {
            let length = u16::from_be_bytes([fragment[network + 4], fragment[network + 5]]);
            assert_eq!(usize::from(length), fragment.len() - network - 40);
            let header = Ipv6FragmentHeaderSlice::from_slice(&fragment[data..]).unwrap();
            assert_eq!(header.identification(), IDENT);
            more = header.more_fragments();
            // Without the fragment header, apart from the length, the headers are those of the whole.
            let mut headers = fragment[..data].to_vec();
            headers[network + 4..network + 6].copy_from_slice(&expected[network + 4..network + 6]);
            let differing: Vec<_> = (0..data).filter(|&index| headers[index] != expected[index]).collect();
            assert_eq!(differing.len(), 1);
            assert_eq!((headers[differing[0]], expected[differing[0]]), (44, header.next_header().0));
            (header.fragment_offset().byte_offset(), data + 8)
        };
        assert_eq!(usize::from(offset), whole.len() - data);
        assert!(fragment.len() - rest <= spec.size.into());
        whole.extend(&fragment[rest..]);
    }
    assert!(!more);
    assert_eq!(whole, expected);
}

/// The frames of a plan for these frames, each with what is left to do to it, and the indices it was made of.
pub fn coalesced(frames: &[(Vec<u8>, Offload)], support: Support) -> Vec<(Vec<u8>, Offload, Vec<usize>)> {
    let heads: Vec<_> = frames
        .iter()
        .map(|(frame, offload)| Head { bytes: &frame[..frame.len().min(HEADERS)], len: frame.len(), offload: *offload })
        .collect();
    let mut plan = Plan::default();
    plan.make(&heads, support, 65557);
    let groups = plan.groups().iter().map(|group| {
        let members: Vec<_> = plan.members(group).collect();
        let mut header = [0; HEADERS];
        let (frame, offload) = match plan.header(group, &heads, &mut header) {
            Some((len, offload)) => {
                let data = members.iter().flat_map(|&index| &frames[index].0[len..]);
                (header[..len].iter().chain(data).copied().collect(), offload)
            }
            None => frames[members[0]].clone(),
        };
        assert_eq!((group.len(), group.is_merged()), (frame.len(), members.len() > 1));
        (frame, offload, members)
    });
    groups.collect()
}

/// Whatever a sender claims of whatever frame: refused, or cut into frames that hold all of its data.
pub fn survive(frame: &[u8], claim: Claim) {
    let head = &frame[..frame.len().min(HEADERS)];
    let Ok(offload) = Offload::segmented(claim, head, frame.len()) else { return };
    let Checksum::Partial { start, .. } = offload.checksum() else { panic!("{offload:?}") };
    match offload.gso() {
        Some(gso) => {
            let parts = segments(frame, gso, Checksums::Complete);
            assert!(parts.len() > 1);
            let total = parts.iter().map(|(part, _)| part.len()).sum::<usize>();
            assert!(total >= frame.len() + parts.len() - 1);
            assert!(parts.iter().all(|(part, _)| part.len() <= offload.longest(frame.len())));
        }
        None => {
            let mut frame = frame.to_vec();
            checksum::complete(&mut frame, offload);
            assert!(usize::from(start) < frame.len());
        }
    }
}
