//! Frames that a source reads straight into the driver's buffers, before it can see them.

use super::{FRAME_BUFFERS, Outcome, Refusal, RxQueue, TAG, TAG_AT, WRITES};
use crate::{
    descriptor::rx::{DD, EOP, PIF, SPECIAL, VP},
    filter::Match,
};
use ringroad_frame::{BURST, HEADROOM, Poured, copy_some, offload::Checksum};
use ringroad_mem::Span;
use ringroad_wire::{
    ethernet::{self, ZLEN},
    vnet_hdr::{F_DATA_VALID, F_NEEDS_CSUM, GSO_NONE},
};

/// Most pieces that a frame is read into, with that of its virtio-net header.
const PARTS: usize = 32;

/// What was read.
struct Received {
    destination: u64,
    /// Bytes of the frame, and of what the driver gets of it.
    len: usize,
    placed: usize,
    /// Bits of the last descriptor.
    status: u64,
}

/// Why a frame that was read is dropped.
enum Dropped {
    Runt,
    Oversize,
    Filtered,
    /// It has work left to do that this driver cannot.
    Offload,
}

impl RxQueue {
    /// See [`ringroad_frame::Sink::fill`].
    pub(super) fn pour(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Poured {
        let available = self.available();
        if !self.runs || self.fault.is_some() {
            return Poured::Unable;
        }
        (self.used, self.pending, self.short) = (0, 0, 0);
        let room = room.saturating_sub(HEADROOM).max(ZLEN);
        let mut outcome = Outcome::default();
        let (mut reads, mut refused) = (0, None);
        while reads < BURST {
            if self.pending + FRAME_BUFFERS > WRITES {
                self.write_back();
            }
            let first = (self.used, self.pending);
            match self.reserve(room, available) {
                Ok(()) if self.targets.list().len() < PARTS => {}
                // With most of its ring available, the driver may never have room for the longest frame: shorter ones fit.
                Err(Refusal::Full) if available < self.ring.count() / 2 => {
                    refused = Some(Poured::Full);
                    break;
                }
                // The other way, which looks only at the buffers that a frame needs.
                _ => {
                    (self.used, self.pending) = first;
                    refused = Some(Poured::Unable);
                    break;
                }
            }
            let found = self.read(read).map(|len| self.look(len, room));
            match found {
                Some(Ok(received)) => {
                    self.take_of(first, &received);
                    outcome.tally.add(received.destination, received.len, 1, received.len as u64);
                }
                other => {
                    (self.used, self.pending) = first;
                    let Some(Err(dropped)) = other else { break };
                    self.count_dropped(&dropped, &mut outcome);
                }
            }
            reads += 1;
        }
        if reads == 0 {
            return refused.unwrap_or(Poured::Frames(0));
        }
        self.publish(available, &outcome);
        Poured::Frames(outcome.tally.frames as usize)
    }

    fn count_dropped(&self, dropped: &Dropped, outcome: &mut Outcome) {
        match dropped {
            Dropped::Runt => self.counters.runt.add(1),
            Dropped::Offload => self.counters.offload.add(1),
            Dropped::Oversize => outcome.oversize += 1,
            Dropped::Filtered => outcome.filtered += 1,
        }
    }

    /// Reads a frame into the buffers that were reserved; returns its length, with that of its header.
    fn read(&self, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Option<usize> {
        let mut parts = [Span::empty(); PARTS];
        let targets = self.targets.list();
        let header = self.header.span(0, HEADROOM)?;
        let sources = std::iter::once(header).chain(targets.iter().copied());
        parts.iter_mut().zip(sources).for_each(|(place, span)| *place = span);
        read(parts.get(..=targets.len())?)
    }

    /// Looks at a frame that was read, and makes of it what the driver gets. It lies in the driver's memory, which may change
    /// meanwhile: then the driver deceives itself. `room`: bytes of the buffers.
    fn look(&self, len: usize, room: usize) -> Result<Received, Dropped> {
        let Some(len) = len.checked_sub(HEADROOM).filter(|&len| len >= ethernet::HEADER) else {
            return Err(Dropped::Runt);
        };
        let [flags, gso_type] = self.header.span(0, HEADROOM).and_then(|span| span.array(0)).unwrap_or_default();
        if flags & F_NEEDS_CSUM != 0 || gso_type != GSO_NONE {
            return Err(Dropped::Offload);
        }
        let targets = self.targets.list();
        let copy = |head: &mut [u8]| copy_some(targets.iter().copied(), 0, head).min(len);
        let mut head = [0; TAG_AT + TAG];
        let copied = copy(&mut head);
        let head = head.get(..copied).unwrap_or_default();
        let checksum = if flags & F_DATA_VALID != 0 { Checksum::Valid } else { Checksum::Complete };
        let mut status = EOP | self.checksums(checksum, copy);
        let destination = head.first_chunk().map_or(0, |&word| u64::from_le_bytes(word));
        match self.filter.find(destination) {
            Match::No => return Err(Dropped::Filtered),
            Match::Inexact => status |= PIF,
            Match::Exact => {}
        }
        let tag = self.tag(head);
        if tag.is_some_and(|tag| !self.filter.passes_vlan(tag)) {
            return Err(Dropped::Filtered);
        }
        if len > self.longest.min(room) {
            return Err(Dropped::Oversize);
        }
        if let Some(missing) = ZLEN.checked_sub(len) {
            write_at(targets, len, [0; ZLEN].get(..missing).unwrap_or_default());
        }
        let mut placed = len.max(ZLEN);
        if let Some(tag) = tag.filter(|_| self.vme) {
            status |= VP | u64::from(tag) << SPECIAL;
            close(targets, TAG_AT, TAG, placed);
            placed -= TAG;
        }
        Ok(Received { destination, len, placed, status })
    }

    /// Of the descriptors that were reserved from `first` on (how many are used, and pending), uses those that the frame needs.
    fn take_of(&mut self, first: (u32, usize), received: &Received) {
        let (used, pending) = first;
        let (mut left, mut count) = (received.placed + self.fcs, 0);
        for word in self.words.get_mut(pending..self.pending).unwrap_or_default() {
            let size = left.min((*word & 0xffff) as usize);
            *word = size as u64 | DD;
            left -= size;
            count += 1;
            if left == 0 {
                *word |= received.status;
                break;
            }
        }
        (self.used, self.pending) = (used + count, pending + count as usize);
    }
}

/// Writes bytes at a position.
fn write_at(pieces: &[Span<'_>], mut at: usize, mut bytes: &[u8]) {
    for piece in pieces {
        let over = at.min(piece.len());
        at -= over;
        bytes = bytes.get(piece.skip(over).write(bytes)..).unwrap_or_default();
    }
}

/// Moves what follows `gap` bytes at a position there, in `len` bytes altogether.
fn close(pieces: &[Span<'_>], mut at: usize, gap: usize, len: usize) {
    let mut chunk = [0; 512];
    while at + gap < len {
        let count = (len - gap - at).min(chunk.len());
        let Some(part) = chunk.get_mut(..count) else { return };
        copy_some(pieces.iter().copied(), at + gap, part);
        write_at(pieces, at, part);
        at += count;
    }
}
