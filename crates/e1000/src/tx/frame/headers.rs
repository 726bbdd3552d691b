//! The headers of a frame in private memory: checksums and lengths are filled in, a VLAN tag is inserted, as the part does while
//! it sends (8254x Software Developer's Manual, 3.5 and 3.6).

use crate::descriptor::Context;
use ringroad_frame::{
    Offload, copy_some,
    offload::{Claim, HEADERS, Kind},
};
use ringroad_mem::Span;
use ringroad_wire::checksum::{Sum, add};

/// Size of a VLAN tag in bytes, and where it goes.
const TAG: usize = 4;
const TAG_AT: usize = 12;

/// What is left to do to a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// EtherType and tag to be inserted.
    pub tag: Option<(u16, u16)>,
    /// Where the checksums are, and whether the frame is to be cut.
    pub context: Option<(Context, bool)>,
    /// The checksum of the IP header is to be inserted.
    pub ip: bool,
    /// The checksum of TCP or UDP, or another one, is to be inserted.
    pub transport: bool,
}

impl Work {
    /// Returns the offload if there is nothing else to do: the checksum goes to the end of the frame, and whoever receives it can
    /// complete it.
    pub fn offload_only(&self, len: usize) -> Option<Offload> {
        match self.context {
            Some((context, false)) if self.tag.is_none() && !self.ip && self.transport => partial(&context, len, 0),
            _ => None,
        }
    }
}

/// Returns a checksum as an offload; `None` if it cannot be one. `shift`: what was inserted in front, in bytes.
fn partial(context: &Context, len: usize, shift: usize) -> Option<Offload> {
    let to_end = context.tucse == 0 || usize::from(context.tucse) + 1 == len;
    let offset = u16::from(context.tucso).checked_sub(context.tucss.into()).filter(|_| to_end)?;
    Offload::partial(u16::from(context.tucss) + shift as u16, offset, len + shift).ok()
}

/// The first bytes of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headers {
    bytes: [u8; HEADERS + TAG],
    /// Bytes in use, and how many of them were inserted.
    len: usize,
    grown: usize,
}

impl Headers {
    /// Copies the headers of a frame of `len` bytes that begins in the first of these pieces, behind the gap.
    pub fn read(pieces: &[Span<'_>], len: usize) -> Headers {
        let mut headers = Headers { bytes: [0; HEADERS + TAG], len: len.min(HEADERS), grown: 0 };
        let gap = ringroad_frame::HEADROOM;
        copy_some(pieces.iter().copied(), gap, headers.bytes.get_mut(..headers.len).unwrap_or_default());
        headers
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// Returns how many bytes of the frame they replace.
    pub fn taken(&self) -> usize {
        self.len - self.grown
    }

    /// Returns by how many bytes the frame has grown.
    pub fn grown(&self) -> usize {
        self.grown
    }

    fn word(&self, at: usize) -> Option<u16> {
        self.bytes().get(at..)?.first_chunk().map(|&word| u16::from_be_bytes(word))
    }

    /// Writes a word; nothing if it is not within the headers.
    fn set_word(&mut self, at: usize, word: u16) -> Option<()> {
        let len = self.len;
        let place = self.bytes.get_mut(..len)?.get_mut(at..)?.first_chunk_mut()?;
        *place = word.to_be_bytes();
        Some(())
    }

    /// Does all there is to do to a frame of `len` bytes in these pieces, behind the gap. Returns what is left to others; `None` if
    /// it is not a frame that can be cut.
    pub fn finish(&mut self, work: &Work, len: usize, pieces: &[Span<'_>]) -> Option<Offload> {
        let Some((context, segment)) = work.context else {
            self.insert(work.tag);
            return Some(Offload::NONE);
        };
        if segment {
            self.set_lengths(&context, len)?;
        }
        let shift = if work.tag.is_some() { TAG } else { 0 };
        let offload = if work.transport { partial(&context, len, shift) } else { Some(Offload::NONE) };
        if offload.is_none() {
            self.sum(pieces, len, (context.tucss.into(), context.tucse), context.tucso.into(), true);
        }
        if work.ip {
            self.sum(pieces, len, (context.ipcss.into(), context.ipcse), context.ipcso.into(), false);
        }
        self.insert(work.tag);
        if !segment {
            return Some(offload.unwrap_or_default());
        }
        let kind = match (context.is_tcp, context.is_v4) {
            (true, true) => Kind::Tcp4,
            (true, false) => Kind::Tcp6,
            (false, true) => Kind::Udp4,
            (false, false) => Kind::Udp6,
        };
        let offset = u16::from(context.tucso.checked_sub(context.tucss)?);
        let checksum = (u16::from(context.tucss) + shift as u16, offset);
        let claim = Claim { kind, ecn: false, size: context.mss, checksum };
        let head = self.bytes();
        let offload = Offload::segmented(claim, head.get(..HEADERS).unwrap_or(head), len + shift).ok()?;
        // The driver and the frame must agree where the headers end.
        let header_len = usize::from(context.hdrlen) + shift;
        offload.gso().is_none_or(|gso| usize::from(gso.header_len) == header_len).then_some(offload)
    }

    /// Before segmentation: the driver leaves the lengths to the device, in the IP header, in that of UDP, and in the sum of the
    /// pseudo header.
    fn set_lengths(&mut self, context: &Context, len: usize) -> Option<()> {
        let (network, transport) = (usize::from(context.ipcss), usize::from(context.tucss));
        if context.mss == 0 || usize::from(context.hdrlen) > len {
            return None;
        }
        // Behind an IPv6 header; with an IPv4 header.
        let (at, from) = if context.is_v4 { (network + 2, network) } else { (network + 4, network + 40) };
        let length = |from: usize| len.checked_sub(from).and_then(|len| u16::try_from(len).ok());
        self.set_word(at, length(from)?)?;
        if !context.is_tcp {
            self.set_word(transport + 4, length(transport)?)?;
        }
        let at = usize::from(context.tucso);
        let pseudo = self.word(at)?;
        self.set_word(at, add(pseudo, length(transport)?))
    }

    /// Inserts a checksum: of the bytes from `start` to `last` (0: to the end), at `at`. Beyond the frame nothing is inserted.
    fn sum(&mut self, pieces: &[Span<'_>], len: usize, (start, last): (usize, u16), at: usize, nonzero: bool) {
        let end = if last == 0 { len } else { len.min(usize::from(last) + 1) };
        if start >= end || at + 2 > len {
            return;
        }
        let mut sum = Sum::default();
        sum.add(self.bytes().get(start..end.min(self.len)).unwrap_or_default());
        let mut chunk = [0; 1024];
        let mut from = start.max(self.len);
        while from < end {
            let count = chunk.len().min(end - from);
            let Some(part) = chunk.get_mut(..count) else { return };
            copy_some(pieces.iter().copied(), ringroad_frame::HEADROOM + from, part);
            sum.add(part);
            from += count;
        }
        let checksum = sum.checksum();
        // UDP: zero stands for none.
        let _ = self.set_word(at, if checksum == 0 && nonzero { 0xffff } else { checksum });
    }

    fn insert(&mut self, tag: Option<(u16, u16)>) {
        let Some((ethertype, tag)) = tag else { return };
        if self.len + TAG > self.bytes.len() || self.len < TAG_AT {
            return;
        }
        self.bytes.copy_within(TAG_AT..self.len, TAG_AT + TAG);
        (self.len, self.grown) = (self.len + TAG, TAG);
        let _ = self.set_word(TAG_AT, ethertype).and(self.set_word(TAG_AT + 2, tag));
    }
}
