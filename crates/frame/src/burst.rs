//! Up to 64 frames of one source on their way. Sources fill a burst, the switch reads heads, sinks read heads and pieces.

use crate::{BURST, Frame, HEAD, HEADROOM, MAX_FRAME};
use ringroad_mem::{Hit, Pieces, Span, Table};
use ringroad_wire::ethernet;
use std::sync::Arc;

/// Spans that a burst can have. Sources exchange their own list of this size with the burst's ([`Burst::exchange`]).
pub const PIECES: u16 = 512;

/// Bytes and pieces of a burst that takes as long as several usual ones: other sources get their turn after it.
const HEAVY_BYTES: u64 = 128 << 10;
const HEAVY_PIECES: usize = 4 * BURST;

/// Up to [`BURST`] frames from one source. Each worker has one and reuses it.
pub struct Burst {
    /// What the frames consist of.
    pieces: Pieces,
    frames: [Frame; BURST],
    /// For frames from `singles` on: the index behind its last piece.
    ends: [u16; BURST],
    count: usize,
    /// So many frames at the start have one piece each.
    singles: usize,
    /// Bytes before each frame in its first piece: a header of the source's.
    lead: usize,
    /// No frame is longer, in bytes.
    bound: usize,
    /// Bytes of all frames.
    bytes: u64,
}

impl Default for Burst {
    fn default() -> Self {
        Burst {
            pieces: Pieces::new(PIECES.into()),
            frames: [Frame::NONE; BURST],
            ends: [0; BURST],
            count: 0,
            singles: 0,
            lead: 0,
            bound: MAX_FRAME,
            bytes: 0,
        }
    }
}

impl std::fmt::Debug for Burst {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Burst").field("frames", &self.frames()).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Why a buffer holds no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAFrame {
    /// Shorter than an Ethernet header.
    Runt,
    /// Longer than the sender may send, or in more pieces than a burst holds.
    Oversize,
}

/// For sources: how a burst is filled.
impl Burst {
    /// Starts a burst without frames. `bound`: no frame has more bytes; `lead`: bytes of a header of the source's before each frame
    /// in its first piece.
    #[inline]
    pub fn start(&mut self, bound: usize, lead: usize) {
        (self.count, self.singles, self.bytes) = (0, 0, 0);
        (self.bound, self.lead) = (bound.min(MAX_FRAME), lead);
    }

    /// Starts one whose frames will be pushed by their addresses in this memory, with a header of [`HEADROOM`] bytes each.
    pub fn start_in(&mut self, memory: &Arc<Table>) {
        self.start(MAX_FRAME, HEADROOM);
        self.pieces.start(memory);
    }

    /// Exchanges the burst's list of pieces for that in which the source has put those of its frames.
    #[inline]
    pub fn exchange(&mut self, pieces: &mut Pieces) {
        std::mem::swap(&mut self.pieces, pieces);
    }

    /// Adds frames of one piece each, the next ones in the list: head and bytes with the headroom; up to the first `None`. Returns how
    /// many bytes the frames have. The source has checked that each is at least [`HEAD`] bytes long with the headroom, and within
    /// the bound.
    #[inline(always)]
    pub fn extend(&mut self, frames: impl Iterator<Item = Option<([u8; HEAD], u32)>>) -> u64 {
        let (mut bytes, mut count) = (0, 0);
        for (place, frame) in self.frames.iter_mut().zip(frames) {
            let Some((head, extent)) = frame else { break };
            *place = Frame { head, extent, piece: count as u16, head_len: HEAD as u8, reflected: false };
            bytes += u64::from(extent);
            count += 1;
        }
        (self.count, self.singles) = (count, count);
        bytes - (count * HEADROOM) as u64
    }

    /// Checks the length of a frame, in bytes with the lead.
    pub fn check(&self, total: usize) -> Result<(), NotAFrame> {
        if total < self.lead + ethernet::HEADER {
            return Err(NotAFrame::Runt);
        }
        if total > self.lead + self.bound {
            return Err(NotAFrame::Oversize);
        }
        Ok(())
    }

    /// Adds a frame of `total` bytes with the lead, which lies in these pieces; the first of them has index `first` in the list.
    /// Returns the bytes of the frame.
    pub fn push(&mut self, pieces: &[Span<'_>], first: usize, total: usize) -> Result<usize, NotAFrame> {
        self.check(total)?;
        let len = total - self.lead;
        let frame = read(pieces, first, self.lead, len);
        self.add(frame, first + pieces.len(), len)
    }

    /// Adds a frame in one buffer of the memory that the burst was started in: its address there and its bytes with the lead.
    pub fn push_at(&mut self, address: u64, total: usize) -> Result<usize, NotAFrame> {
        self.check(total)?;
        let first = self.pieces.list().len();
        let placed = self.pieces.push(address, total as u32, &mut Hit::default());
        placed.map_err(|_| NotAFrame::Oversize)?;
        let pieces = self.pieces.list().get(first..).unwrap_or_default();
        let len = total - self.lead;
        let (frame, end) = (read(pieces, first, self.lead, len), first + pieces.len());
        self.add(frame, end, len)
    }

    fn add(&mut self, frame: Frame, end: usize, len: usize) -> Result<usize, NotAFrame> {
        // There are no more frames than buffers in a burst.
        let (Some(place), Some(last)) = (self.frames.get_mut(self.count), self.ends.get_mut(self.count)) else {
            return Err(NotAFrame::Oversize);
        };
        (*place, *last) = (frame, end as u16);
        self.count += 1;
        Ok(len)
    }

    /// Records how many bytes all frames have.
    #[inline(always)]
    pub fn weigh(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// Drops the frames behind the first one with which the burst has more bytes than `most`. Returns the index behind its last
    /// piece.
    #[cold]
    pub fn cut(&mut self, most: u64) -> usize {
        let mut bytes = 0;
        let cut = self.frames().iter().position(|frame| {
            bytes += frame.len() as u64;
            bytes > most
        });
        self.count = cut.map_or(self.count, |last| last + 1);
        (self.singles, self.bytes) = (self.singles.min(self.count), bytes);
        self.count.checked_sub(1).map_or(0, |last| self.range(last).end)
    }

    /// Removes all frames, as the source has dealt with them itself. The pieces stay until the burst ends.
    #[inline]
    pub fn remove_frames(&mut self) {
        self.count = 0;
    }

    /// Ends the burst and gives the list of pieces back that [`Burst::exchange`] has taken.
    #[inline]
    pub fn finish(&mut self, pieces: &mut Pieces) {
        self.count = 0;
        self.exchange(pieces);
    }

    /// Ends the burst and releases its memory.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.pieces.clear();
    }
}

/// For the switch and for sinks.
impl Burst {
    /// The frames, in the order in which they were sent.
    #[inline(always)]
    pub fn frames(&self) -> &[Frame] {
        self.frames.get(..self.count).unwrap_or_default()
    }

    /// The frames, to change how they are forwarded.
    #[inline(always)]
    pub fn frames_mut(&mut self) -> &mut [Frame] {
        self.frames.get_mut(..self.count).unwrap_or_default()
    }

    /// No frame of it has more bytes.
    #[inline(always)]
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Bytes of all frames.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it takes as long as several usual bursts.
    #[inline]
    pub fn is_heavy(&self) -> bool {
        self.bytes > HEAVY_BYTES || self.pieces.list().len() > HEAVY_PIECES
    }

    /// All pieces, if each frame has one, behind a header of [`HEADROOM`] bytes, as nearly always.
    #[inline(always)]
    pub fn plain(&self) -> Option<&[Span<'_>]> {
        (self.singles == self.count && self.lead == HEADROOM).then(|| self.pieces.list())
    }

    /// The index of a frame's piece in [`Burst::plain`].
    #[inline(always)]
    pub fn piece(&self, frame: &Frame) -> usize {
        frame.piece.into()
    }

    /// The pieces of a frame behind its head.
    #[inline(always)]
    pub fn rest(&self, index: usize) -> Rest<'_> {
        let pieces = self.pieces.list().get(self.range(index)).unwrap_or_default();
        let head = self.frames.get(index).map_or(0, |frame| usize::from(frame.head_len).saturating_sub(HEADROOM));
        Rest { pieces, skip: self.lead + head }
    }

    #[inline(always)]
    fn range(&self, index: usize) -> std::ops::Range<usize> {
        let first = self.frames.get(index).map_or(0, |frame| frame.piece.into());
        let end = if index < self.singles { first + 1 } else { self.ends.get(index).map_or(first, |&end| end.into()) };
        first..end
    }
}

/// A frame of `len` bytes in these pieces.
#[inline(always)]
fn read(pieces: &[Span<'_>], first: usize, lead: usize, len: usize) -> Frame {
    let whole = pieces.first().filter(|_| lead == HEADROOM).and_then(|piece| piece.read_once::<HEAD>());
    let (head, head_len) = whole.map_or_else(|| gather(pieces, lead, len), |head| (head, HEAD));
    let extent = (HEADROOM + len) as u32;
    Frame { head, extent, piece: first as u16, head_len: head_len as u8, reflected: false }
}

/// The head of a frame whose first bytes are cut across pieces, or that is shorter than a head, and its length with the headroom.
#[cold]
fn gather(pieces: &[Span<'_>], mut lead: usize, len: usize) -> ([u8; HEAD], usize) {
    let mut head = [0; HEAD];
    let end = HEAD.min(HEADROOM + len);
    let mut at = HEADROOM;
    for piece in pieces {
        let skip = lead.min(piece.len());
        lead -= skip;
        at += piece.skip(skip).read(head.get_mut(at..end).unwrap_or_default());
    }
    (head, at)
}

/// See [`Burst::rest`].
#[derive(Clone, Debug)]
pub struct Rest<'a> {
    pieces: &'a [Span<'a>],
    skip: usize,
}

impl<'a> Iterator for Rest<'a> {
    type Item = Span<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Span<'a>> {
        loop {
            let (first, others) = self.pieces.split_first()?;
            self.pieces = others;
            let skip = self.skip.min(first.len());
            self.skip -= skip;
            let rest = first.skip(skip);
            if !rest.is_empty() {
                return Some(rest);
            }
        }
    }
}

#[cfg(test)]
mod tests;
