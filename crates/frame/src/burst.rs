//! A burst: up to 64 frames from one source. Sources fill it, the switch reads the heads, sinks read heads and pieces.

mod reader;

use crate::{BURST, Frame, HEAD, HEADROOM, MAX_FRAME, head::OFFLOADED, offload::Offload};
use ringroad_mem::{Hint, Hit, Pieces, Span, Table};
use ringroad_wire::ethernet;
use std::sync::Arc;

/// Capacity of a burst in spans. Sources swap their own list of this size with the burst's ([`Burst::exchange`]).
pub const PIECES: u16 = 512;

/// A burst with more bytes or pieces takes as long as several ordinary ones, so other sources get their turn after it.
const HEAVY_BYTES: u64 = 128 << 10;
/// What each further frame costs that a frame becomes on a link: as much as so many bytes.
const SEGMENT: u64 = 256;
const HEAVY_PIECES: usize = 4 * BURST;

/// Up to [`BURST`] frames from one source. Each worker has one and reuses it.
pub struct Burst {
    /// Pieces of all frames.
    pieces: Pieces,
    pub(crate) frames: [Frame; BURST],
    /// For frames from `singles` on: the index behind the frame's last piece.
    ends: [u16; BURST],
    /// What is left to do to the frames that are marked so.
    pub(crate) offloads: [Offload; BURST],
    /// Whether there are any.
    has_offloads: bool,
    /// Whether frames are added reflected; see [`Burst::reflect`].
    reflects: bool,
    /// See [`Burst::set_spare`].
    spare: bool,
    count: usize,
    /// Number of frames at the start that have one piece each.
    singles: usize,
    /// Bytes in front of each frame in its first piece: the source's header.
    lead: usize,
    /// Upper bound for the length of each frame, in bytes.
    bound: usize,
    /// Total length of all frames, in bytes.
    bytes: u64,
    /// Number of the source's buffers without a frame.
    refused: usize,
    /// See [`Burst::announce`].
    next: [Hint; BURST],
    /// How many of them there are.
    announced: usize,
}

impl Default for Burst {
    fn default() -> Self {
        Burst {
            pieces: Pieces::new(PIECES.into()),
            frames: [Frame::NONE; BURST],
            ends: [0; BURST],
            offloads: [Offload::NONE; BURST],
            has_offloads: false,
            reflects: false,
            spare: false,
            count: 0,
            singles: 0,
            lead: 0,
            bound: MAX_FRAME,
            bytes: 0,
            refused: 0,
            next: [Hint::default(); BURST],
            announced: 0,
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
    /// Longer than the sender may send, or has more pieces than a burst holds.
    Oversize,
}

/// Filling a burst, for sources.
impl Burst {
    /// Starts an empty burst. `bound`: maximum length of a frame in bytes; `lead`: length in bytes of the source's header in
    /// front of each frame in its first piece.
    #[inline]
    pub fn start(&mut self, bound: usize, lead: usize) {
        (self.count, self.singles, self.bytes, self.has_offloads, self.refused) = (0, 0, 0, false, 0);
        (self.bound, self.lead) = (bound.min(MAX_FRAME), lead);
        self.announced = 0;
    }

    /// Starts an empty burst whose frames are pushed by their addresses in `memory`, with a header of [`HEADROOM`] bytes each.
    pub fn start_in(&mut self, memory: &Arc<Table>) {
        self.start(MAX_FRAME, HEADROOM);
        self.pieces.start(memory);
    }

    /// From now on, in this burst and those that follow, the frames that are added are forwarded with their MAC addresses swapped,
    /// or not.
    #[inline]
    pub fn reflect(&mut self, on: bool) {
        self.reflects = on;
    }

    /// Sets whether the worker has time to spare, as it is faster than the driver of its only queue. If so, ports spend some of it on
    /// what makes the driver faster: see `DeviceRing::hand_over` and `demote_used`.
    #[inline]
    pub fn set_spare(&mut self, on: bool) {
        self.spare = on;
    }

    /// Returns whether the worker has time to spare.
    #[inline]
    pub fn has_spare(&self) -> bool {
        self.spare
    }

    /// Names the pieces of the source's next burst. Who copies the frames of this one fetches a line of those with each: their heads are
    /// read in one go, faster than the lines can come from the sender's core.
    #[inline(always)]
    pub fn announce(&mut self, pieces: &[Span<'_>]) {
        self.announced = pieces.len().min(BURST);
        self.next.iter_mut().zip(pieces).for_each(|(hint, &piece)| *hint = Hint::of(piece));
    }

    /// Returns what was announced.
    #[inline(always)]
    pub fn next(&self) -> &[Hint] {
        self.next.get(..self.announced).unwrap_or_default()
    }

    /// Swaps the burst's list of pieces with the source's, which holds the pieces of its frames.
    #[inline]
    pub fn exchange(&mut self, pieces: &mut Pieces) {
        std::mem::swap(&mut self.pieces, pieces);
    }

    /// Adds frames of one piece each, in the order of the list of pieces, and reads their heads; stops at the first `None` or
    /// piece shorter than [`HEAD`]. The source has checked that each is within the bound. Returns the total length of the frames
    /// in bytes, and the bitwise or of the first 8 bytes of all heads: the source's headers.
    #[inline(always)]
    pub fn extend<'a>(&mut self, pieces: impl Iterator<Item = Option<Span<'a>>>) -> (u64, u64) {
        // The loop has no register left for it.
        if self.reflects { self.extend_with::<true>(pieces) } else { self.extend_with::<false>(pieces) }
    }

    #[inline(always)]
    fn extend_with<'a, const REFLECTED: bool>(&mut self, pieces: impl Iterator<Item = Option<Span<'a>>>) -> (u64, u64) {
        let (mut bytes, mut count, mut union) = (0, 0, 0);
        for (place, piece) in self.frames.iter_mut().zip(pieces) {
            let Some(piece) = piece else { break };
            let Some(head) = piece.read_once::<HEAD>() else { break };
            let extent = piece.len();
            if let Some(word) = head.first_chunk() {
                union |= u64::from_le_bytes(*word);
            }
            *place =
                Frame { head, extent: extent as u32, piece: count as u16, head_len: HEAD as u8, reflected: REFLECTED };
            bytes += extent;
            count += 1;
        }
        (self.count, self.singles) = (count, count);
        ((bytes - count * HEADROOM) as u64, union)
    }

    /// Checks the length of a frame, in bytes including the lead. A frame that is to be cut is as long as its longest segment.
    ///
    /// # Errors
    /// [`NotAFrame`] if it is too short or exceeds the bound.
    pub fn check(&self, total: usize, offload: Offload) -> Result<(), NotAFrame> {
        if total < self.lead + ethernet::HEADER {
            return Err(NotAFrame::Runt);
        }
        let len = total - self.lead;
        if offload.longest(len) > self.bound || len > MAX_FRAME {
            return Err(NotAFrame::Oversize);
        }
        Ok(())
    }

    /// Adds a frame of `total` bytes including the lead, which consists of these pieces; the first has index `first` in the list.
    /// Returns the length of the frame in bytes.
    ///
    /// # Errors
    /// As for `check`; [`NotAFrame::Oversize`] also if the burst is full.
    pub fn push(
        &mut self,
        pieces: &[Span<'_>],
        first: usize,
        total: usize,
        offload: Offload,
    ) -> Result<usize, NotAFrame> {
        self.check(total, offload)?;
        let len = total - self.lead;
        let frame = read(pieces, first, self.lead, len, self.reflects);
        self.add(frame, first + pieces.len(), len, offload)
    }

    /// Adds a frame that lies in one buffer of the memory given to `start_in`: its address and its length including the lead.
    ///
    /// # Errors
    /// As for `push`; [`NotAFrame::Oversize`] also if the buffer is not inside the memory.
    pub fn push_at(&mut self, address: u64, total: usize, offload: Offload) -> Result<usize, NotAFrame> {
        self.check(total, offload)?;
        let first = self.pieces.list().len();
        let placed = self.pieces.push(address, total as u32, &mut Hit::default());
        placed.map_err(|_| NotAFrame::Oversize)?;
        let pieces = self.pieces.list().get(first..).unwrap_or_default();
        let len = total - self.lead;
        let (frame, end) = (read(pieces, first, self.lead, len, self.reflects), first + pieces.len());
        self.add(frame, end, len, offload)
    }

    fn add(&mut self, frame: Frame, end: usize, len: usize, offload: Offload) -> Result<usize, NotAFrame> {
        // A burst has at least as many places as its source has buffers.
        let (Some(place), Some(last)) = (self.frames.get_mut(self.count), self.ends.get_mut(self.count)) else {
            return Err(NotAFrame::Oversize);
        };
        (*place, *last) = (frame, end as u16);
        let first = usize::from(frame.piece);
        if (self.singles, first, end) == (self.count, self.count, first + 1) {
            self.singles += 1;
        }
        if !offload.is_none()
            && let Some(known) = self.offloads.get_mut(self.count)
        {
            *known = offload;
            place.head_len |= OFFLOADED;
            self.has_offloads = true;
        }
        self.count += 1;
        Ok(len)
    }

    /// Sets the total length of all frames, in bytes.
    #[inline(always)]
    pub fn weigh(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// Notes that so many more of the source's buffers hold no frame that can be forwarded: they count towards its rate. Each is to be
    /// noted once, even if it comes again because a frame before it was retained.
    #[inline]
    pub fn refuse(&mut self, buffers: usize) {
        self.refused += buffers;
    }

    /// Returns what forwarding a frame costs, in bytes: its length, and 256 for each further frame that it becomes on a link.
    #[inline(never)]
    pub fn work(&self, index: usize) -> u64 {
        let len = self.frames().get(index).map_or(0, |frame| frame.len());
        let segments = if self.has_offloads { self.offload(index).frames(len) as u64 } else { 1 };
        len as u64 + (segments - 1) * SEGMENT
    }

    /// Drops the frames behind the one that takes the total [`work`](Burst::work) above `most`. Returns the index behind the last
    /// remaining piece.
    #[cold]
    pub fn cut(&mut self, most: u64) -> usize {
        let (mut bytes, mut work) = (0, 0);
        let cut = (0..self.count).position(|index| {
            bytes += self.frames().get(index).map_or(0, |frame| frame.len() as u64);
            work += self.work(index);
            work > most
        });
        self.count = cut.map_or(self.count, |last| last + 1);
        (self.singles, self.bytes) = (self.singles.min(self.count), bytes);
        self.count.checked_sub(1).map_or(0, |last| self.range(last).end)
    }

    /// Removes all frames because the source has handled them itself. The pieces stay until the burst ends.
    #[inline]
    pub fn remove_frames(&mut self) {
        (self.count, self.singles) = (0, 0);
    }

    /// Ends the burst and swaps the lists of pieces back; see [`Burst::exchange`].
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

/// Reading a burst, for the switch and for sinks.
impl Burst {
    /// Returns the frames, in the order in which they were sent.
    #[inline(always)]
    pub fn frames(&self) -> &[Frame] {
        self.frames.get(..self.count).unwrap_or_default()
    }

    /// Returns whether any frame has an offload.
    #[inline(always)]
    pub fn has_offloads(&self) -> bool {
        self.has_offloads
    }

    /// Returns what is left to do to a frame.
    #[inline]
    pub fn offload(&self, index: usize) -> Offload {
        match (self.frames().get(index), self.offloads.get(index)) {
            (Some(frame), Some(&offload)) if frame.is_offloaded() => offload,
            _ => Offload::NONE,
        }
    }

    /// Returns the length in bytes of the longest frame that a frame becomes on a link: what an MTU limits.
    #[inline]
    pub fn link_len(&self, index: usize) -> usize {
        self.frames().get(index).map_or(0, |frame| self.offload(index).longest(frame.len()))
    }

    /// Copies bytes of a frame as forwarded, from the position `at` on; returns how many.
    pub fn copy(&self, index: usize, at: usize, target: &mut [u8]) -> usize {
        let Some(frame) = self.frames().get(index) else { return 0 };
        let (done, skip) = copy_head(frame, at, target);
        done + copy_some(self.rest(index), skip, target.get_mut(done..).unwrap_or_default())
    }

    /// Returns the upper bound for the length of each frame, in bytes.
    #[inline(always)]
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Returns the total length of all frames, in bytes.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many of the source's buffers hold no frame; see [`Burst::refuse`].
    #[inline]
    pub fn refused(&self) -> usize {
        self.refused
    }

    /// Returns whether the burst takes as long as several ordinary ones.
    #[inline]
    pub fn is_heavy(&self) -> bool {
        self.bytes > HEAVY_BYTES || self.pieces.list().len() > HEAVY_PIECES
    }

    /// Returns all pieces if each frame has exactly one, behind a header of [`HEADROOM`] bytes, as nearly always.
    #[inline(always)]
    pub fn plain(&self) -> Option<&[Span<'_>]> {
        (self.singles == self.count && self.lead == HEADROOM).then(|| self.pieces.list())
    }

    /// Returns the index of a frame's piece in [`Burst::plain`].
    #[inline(always)]
    pub fn piece(&self, frame: &Frame) -> usize {
        frame.piece.into()
    }

    /// Returns the pieces of a frame behind its head.
    #[inline(always)]
    pub fn rest(&self, index: usize) -> Rest<'_> {
        let pieces = self.pieces.list().get(self.range(index)).unwrap_or_default();
        let head = self.frames.get(index).map_or(0, Frame::consumed);
        Rest { pieces, skip: self.lead + head }
    }

    #[inline(always)]
    fn range(&self, index: usize) -> std::ops::Range<usize> {
        let first = self.frames.get(index).map_or(0, |frame| frame.piece.into());
        let end = if index < self.singles { first + 1 } else { self.ends.get(index).map_or(first, |&end| end.into()) };
        first..end
    }
}

/// Reads the head of a frame of `len` bytes that consists of these pieces.
#[inline(always)]
fn read(pieces: &[Span<'_>], first: usize, lead: usize, len: usize, reflected: bool) -> Frame {
    let whole = pieces.first().filter(|_| lead == HEADROOM).and_then(|piece| piece.read_once::<HEAD>());
    let (head, head_len) = whole.map_or_else(|| gather(pieces, lead, len), |head| (head, HEAD));
    let extent = (HEADROOM + len) as u32;
    Frame { head, extent, piece: first as u16, head_len: head_len as u8, reflected }
}

/// Reads a head that is spread over several pieces, or that is shorter than [`HEAD`]; also returns its length with the headroom.
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

/// Iterator over the pieces of a frame behind its head; see [`Burst::rest`].
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

/// Copies what the head has of a frame from the position `at` on. Returns how many bytes, and where what follows begins, in bytes
/// behind the head.
#[inline(always)]
fn copy_head(frame: &Frame, at: usize, target: &mut [u8]) -> (usize, usize) {
    let (head, len) = frame.head();
    let head = head.get(HEADROOM..len).unwrap_or_default();
    let mut done = 0;
    if let Some(head) = head.get(at..) {
        target.iter_mut().zip(head).for_each(|(place, &byte)| *place = byte);
        done = head.len().min(target.len());
    }
    (done, (at + done).saturating_sub(head.len()))
}

/// Copies bytes that are spread over pieces, behind the first `skip`; returns how many.
pub fn copy_some<'a>(pieces: impl IntoIterator<Item = Span<'a>>, mut skip: usize, target: &mut [u8]) -> usize {
    let mut done = 0;
    for piece in pieces {
        let over = skip.min(piece.len());
        skip -= over;
        done += piece.skip(over).read(target.get_mut(done..).unwrap_or_default());
        if done == target.len() {
            break;
        }
    }
    done
}

/// Writes bytes to pieces, one after the other, as far as there is room; returns how many.
pub fn write_some<'a>(pieces: impl IntoIterator<Item = Span<'a>>, bytes: &[u8]) -> usize {
    pieces.into_iter().fold(0, |done, piece| done + piece.write(bytes.get(done..).unwrap_or_default()))
}

#[cfg(test)]
mod tests;
