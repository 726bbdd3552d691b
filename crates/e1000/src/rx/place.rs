//! Normal path of reception: frames in several pieces or buffers, short ones, with VLAN tags, with checksums that were verified.

use super::{FRAME_BUFFERS, Refusal, RxQueue, TAG, TAG_AT, WRITES};
use crate::{
    descriptor::rx::{DD, EOP, IPCS, IXSM, PIF, SPECIAL, TCPCS, VP},
    fault::Fault,
    filter::Match,
    registers::rxcsum,
    statistics::Tally,
};
use ringroad_frame::{Burst, HEADROOM, Rest, offload::Checksum};
use ringroad_mem::{PushError, Span};
use ringroad_wire::{
    checksum::Sum,
    ethernet::{self, ZLEN},
    ip::{ETHERTYPE_V4, Ipv4},
};

impl RxQueue {
    /// Copies one frame into as many buffers as it needs.
    pub(super) fn place(&mut self, burst: &Burst, index: u8, available: u32, tally: &mut Tally) -> Result<(), Refusal> {
        let Some(frame) = burst.frames().get(usize::from(index)) else { return Err(Refusal::Filtered) };
        let (head, head_len) = frame.head();
        let head = head.get(HEADROOM..head_len).unwrap_or_default();
        let checksum = burst.offload(index.into()).checksum();
        let status = self.checksums(checksum, |head| burst.copy(index.into(), 0, head));
        self.place_as((head, Some(burst.rest(index.into()))), frame.len(), status, available, tally)
    }

    /// Copies a frame of `len` bytes, which begins so, into as many buffers as it needs. `status`: checksum status bits.
    pub(super) fn place_as(
        &mut self,
        (head, rest): (&[u8], Option<Rest<'_>>),
        len: usize,
        status: u64,
        available: u32,
        tally: &mut Tally,
    ) -> Result<(), Refusal> {
        let destination = head.first_chunk().map_or(0, |&word| u64::from_le_bytes(word));
        let mut status = EOP | status;
        match self.filter.find(destination) {
            Match::No => return Err(Refusal::Filtered),
            Match::Inexact => status |= PIF,
            Match::Exact => {}
        }
        let tag = self.tag(head);
        if tag.is_some_and(|tag| !self.filter.passes_vlan(tag)) {
            return Err(Refusal::Filtered);
        }
        if len > self.longest {
            return Err(Refusal::Oversize);
        }
        let strip = tag.filter(|_| self.vme);
        if let Some(tag) = strip {
            status |= VP | u64::from(tag) << SPECIAL;
        }
        // On a link there is nothing shorter.
        let placed = len.max(ZLEN) - if strip.is_some() { TAG } else { 0 };
        self.reserve(placed, available)?;
        let behind = if strip.is_some() { TAG_AT + TAG } else { TAG_AT };
        let heads = [head.get(..TAG_AT), head.get(behind..)].map(|part| part.unwrap_or_default());
        let mut source = Stream { heads, rest, current: Span::empty() };
        self.targets.list().iter().for_each(|&target| source.fill(target));
        if let Some(last) = self.words.get_mut(self.pending.wrapping_sub(1)) {
            *last |= status;
        }
        tally.add(destination, len, 1, len as u64);
        Ok(())
    }

    /// Returns the tag of the frame that begins so.
    fn tag(&self, head: &[u8]) -> Option<u16> {
        let &[a, b, c, d] = head.get(TAG_AT..)?.first_chunk()?;
        (u16::from_be_bytes([a, b]) == self.vet).then_some(u16::from_be_bytes([c, d]))
    }

    /// Resolves the buffers of a frame of `len` bytes, and prepares the words to be written back.
    fn reserve(&mut self, len: usize, available: u32) -> Result<(), Refusal> {
        if self.pending + FRAME_BUFFERS > WRITES {
            self.write_back();
        }
        let Some(memory) = &self.memory else { return Err(Refusal::Full) };
        self.targets.start(memory);
        // Bytes of the frame that are left, and with its frame check sequence: those are counted, but not written.
        let (mut left, mut total) = (len, len + self.fcs);
        let (mut used, mut pending) = (self.used, self.pending);
        while total > 0 {
            if used == available || pending - self.pending == FRAME_BUFFERS {
                // Those that there are do not suffice.
                self.short = available - self.used + 1;
                return Err(Refusal::Full);
            }
            let Some([address, _]) = self.ring.read(used) else { return Err(Refusal::Full) };
            // A descriptor without a buffer is skipped (3.2.3).
            let size = if address == 0 { 0 } else { total.min(self.buffer) };
            let part = left.min(size);
            if part > 0 {
                self.targets.push(address, part as u32, &mut self.hit).map_err(|error| match error {
                    PushError::Full => Refusal::Oversize,
                    PushError::Unmapped => Refusal::Fault(Fault::Buffer {
                        index: self.ring.index(used),
                        address,
                        len: part as u32,
                        regions: memory.regions().len(),
                    }),
                })?;
            }
            if let Some(word) = self.words.get_mut(pending) {
                *word = size as u64 | DD;
            }
            (left, total) = (left - part, total - size);
            (used, pending) = (used + 1, pending + 1);
        }
        (self.used, self.pending) = (used, pending);
        Ok(())
    }

    /// Returns the checksum status bits of a frame: set only if its checksums are known to be valid. `copy` copies its
    /// first bytes and returns how many.
    pub(super) fn checksums(&self, checksum: Checksum, copy: impl FnOnce(&mut [u8]) -> usize) -> u64 {
        if checksum != Checksum::Valid {
            return IXSM;
        }
        let transport = if self.rxcsum & rxcsum::TUOFL != 0 { TCPCS } else { 0 };
        let network = if self.rxcsum & rxcsum::IPOFL != 0 && has_valid_ipv4(copy) { IPCS } else { 0 };
        if transport | network == 0 { IXSM } else { transport | network }
    }
}

/// Returns whether a frame has an IPv4 header with a valid checksum.
fn has_valid_ipv4(copy: impl FnOnce(&mut [u8]) -> usize) -> bool {
    let mut head = [0; ethernet::HEADER + ethernet::TAGS + 60];
    let len = copy(&mut head);
    let head = head.get(..len).unwrap_or_default();
    let Some((ETHERTYPE_V4, network)) = ethernet::payload(head) else { return false };
    let header = head.get(network..).unwrap_or_default();
    let len = header.first().map_or(0, |&first| usize::from(first & 15) * 4);
    let Some(header) = header.get(..len).filter(|header| header.len() >= Ipv4::LEN) else { return false };
    let mut sum = Sum::default();
    sum.add(header);
    sum.get() == 0xffff
}

/// A frame as a stream of bytes: its private head, with or without its tag, then the sender's pieces; zeros behind its end.
struct Stream<'a> {
    heads: [&'a [u8]; 2],
    rest: Option<Rest<'a>>,
    current: Span<'a>,
}

impl Stream<'_> {
    fn fill(&mut self, mut target: Span<'_>) {
        for head in &mut self.heads {
            let written = target.write(head);
            *head = head.get(written..).unwrap_or_default();
            target = target.skip(written);
        }
        while !target.is_empty() {
            if self.current.is_empty() {
                let Some(piece) = self.rest.as_mut().and_then(Iterator::next) else { break };
                self.current = piece;
            }
            let copied = self.current.copy_to(target);
            self.current = self.current.skip(copied);
            target = target.skip(copied);
        }
        while !target.is_empty() {
            target = target.skip(target.write(&[0; ZLEN]));
        }
    }
}
