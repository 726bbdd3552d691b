//! Does for a receiver what it cannot do itself: completes checksums, cuts frames into segments. Called by whoever puts frames
//! with an offload that may not be among [`Sink::support`]. The opposite is in `software/coalesced.rs`.

mod coalesced;
mod groups;

use crate::{
    ALL, BURST, Burst, HEADROOM, MAX_FRAME, Sink,
    offload::{
        HEADERS, Offload, Support, checksum,
        segment::{Checksums, Segmenter},
    },
};
use groups::Coalescing;
use ringroad_mem::{Region, Table};
use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

/// Memory for finished frames in bytes: a burst of 1518 bytes each, or the longest one.
const ROOM: usize = 128 << 10;
const _: () = assert!(ROOM >= HEADROOM + MAX_FRAME);

/// Finished frames start at multiples of this.
const ALIGN: usize = 64;

/// Finishes frames in memory of its own, from where they are put to the receiver in bursts.
pub struct Software {
    pool: Arc<Table>,
    burst: Burst,
    scratch: Box<[u8]>,
    /// Bytes of the pool in use.
    used: usize,
    /// Identification of the next frame's IPv6 fragments.
    ident: u32,
    /// For receivers that want segments as one frame.
    coalescing: Option<Box<Coalescing>>,
}

impl std::fmt::Debug for Software {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Software").field("used", &self.used).finish_non_exhaustive()
    }
}

impl Software {
    /// Allocates its memory, 200 KiB. `None` if there is none.
    pub fn new() -> Option<Software> {
        // Seeded by the system.
        let ident = RandomState::new().hash_one(0) as u32;
        let region = Region::private(ROOM, 0).ok()?;
        let pool = Arc::new(Table::default().with(region).ok()?);
        let mut software = Software {
            pool,
            burst: Burst::default(),
            scratch: vec![0; MAX_FRAME].into(),
            used: 0,
            ident,
            coalescing: None,
        };
        software.start();
        Some(software)
    }

    fn allocated(software: &mut Option<Software>) -> Option<&mut Software> {
        if software.is_none() {
            *software = Software::new();
        }
        software.as_mut()
    }

    /// Puts the frames with these indices, and does before what their receiver cannot do itself, with `software`, which is
    /// allocated when it is first needed. Returns as [`Software::put`].
    #[cold]
    pub fn put_finished(
        software: &mut Option<Software>,
        sink: &mut impl Sink,
        burst: &Burst,
        which: &[u8],
    ) -> (usize, usize) {
        if takes_all(sink, burst, which) {
            return (sink.put(burst, which), work(sink, burst, which));
        }
        Software::allocated(software).map_or((0, 0), |software| software.put(sink, burst, which))
    }

    /// Like `put_finished`, but stops at the first frame for which the receiver has no room now. Returns how many frames of `which`
    /// were handled, and how many were put in all, as a measure of work.
    #[cold]
    pub fn offer_finished(
        software: &mut Option<Software>,
        sink: &mut impl Sink,
        burst: &Burst,
        which: &[u8],
    ) -> (usize, usize) {
        if takes_all(sink, burst, which) {
            let handled = sink.offer(burst, which);
            return (handled, work(sink, burst, which.get(..handled).unwrap_or_default()));
        }
        Software::allocated(software).map_or((which.len(), 0), |software| software.offer(sink, burst, which))
    }

    /// Puts the frames with these indices, finished where the receiver requires it, in order, up to the first one for which there
    /// is no room. Returns as [`Software::offer_finished`].
    pub fn offer(&mut self, sink: &mut impl Sink, burst: &Burst, which: &[u8]) -> (usize, usize) {
        let support = sink.support();
        let (mut work, mut start, mut staged) = (0, 0, 0);
        self.start();
        for (at, &index) in which.iter().enumerate() {
            let offload = burst.offload(index.into());
            if support.contains(offload.needs()) {
                continue;
            }
            let before = which.get(start..at).unwrap_or_default();
            if !before.is_empty() {
                self.flush(sink);
                let handled = sink.offer(burst, before);
                work += handled;
                if handled < before.len() {
                    return (start + handled, work);
                }
                staged = 0;
            }
            start = at;
            let len = burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
            let frames = offload.frames(len);
            if !sink.has_room(staged + frames) {
                self.flush(sink);
                return (at, work);
            }
            start += 1;
            work += self.finish(sink, support, burst, index.into(), offload).1;
            staged += frames;
        }
        self.flush(sink);
        let rest = which.get(start..).unwrap_or_default();
        let handled = if rest.is_empty() { 0 } else { sink.offer(burst, rest) };
        (start + handled, work + handled)
    }

    /// Puts the frames with these indices, finished where the receiver requires it, in order. Returns how many frames were
    /// accepted as they are or made, and how many were put in all, as a measure of work. Of a frame that is to be cut only the
    /// beginning is made if there is no room for the rest; the receiver drops and counts what was made of it.
    pub fn put(&mut self, sink: &mut impl Sink, burst: &Burst, which: &[u8]) -> (usize, usize) {
        let support = sink.support();
        let (mut accepted, mut work, mut start) = (0, 0, 0);
        // A panic of another receiver may have left frames that were meant for it.
        self.start();
        for (at, &index) in which.iter().enumerate() {
            let offload = burst.offload(index.into());
            if support.contains(offload.needs()) {
                continue;
            }
            let before = which.get(start..at).unwrap_or_default();
            if !before.is_empty() {
                accepted += self.flush(sink) + sink.put(burst, before);
                work += before.len();
            }
            start = at + 1;
            let (put, made) = self.finish(sink, support, burst, index.into(), offload);
            accepted += put;
            work += made;
        }
        accepted += self.flush(sink);
        let rest = which.get(start..).unwrap_or_default();
        if !rest.is_empty() {
            accepted += sink.put(burst, rest);
        }
        (accepted, work + rest.len())
    }

    /// Finishes one frame. Returns how many frames were accepted meanwhile, and how many were made.
    fn finish(
        &mut self,
        sink: &mut impl Sink,
        support: Support,
        burst: &Burst,
        index: usize,
        offload: Offload,
    ) -> (usize, usize) {
        let len = burst.frames().get(index).map_or(0, |frame| frame.len());
        let Some(gso) = offload.gso() else {
            let Some(frame) = self.scratch.get_mut(..len) else { return (0, 0) };
            burst.copy(index, 0, frame);
            checksum::complete(frame, offload);
            return (self.stage(sink, len, Offload::NONE), 1);
        };
        let mut head = [0; HEADERS];
        let read = burst.copy(index, 0, &mut head);
        let checksums = if support.contains(Support::CHECKSUM) { Checksums::Partial } else { Checksums::Complete };
        self.ident = self.ident.wrapping_add(1);
        // The sender may have changed the headers since they were checked; then the frame is dropped.
        let head = head.get(..read).unwrap_or_default();
        let Ok(mut segments) = Segmenter::new(gso, head, len, checksums, self.ident) else { return (0, 0) };
        let Some(mut reader) = burst.reader(index) else { return (0, 0) };
        let (mut accepted, mut made) = (0, 0);
        while let Some(segment) = segments.next(&mut self.scratch, |at, target| _ = reader.copy(at, target)) {
            accepted += self.stage(sink, segment.len, segment.offload);
            made += 1;
            // Asked with the first one, and again when others were put. If there is none for it, neither is there for those behind it.
            let staged = self.burst.frames().len();
            if (made == 1 || staged == 1) && !sink.has_room(staged) {
                break;
            }
        }
        (accepted, made)
    }

    /// Adds the first `len` bytes of the scratch memory as a frame; if there is no more room, first puts all frames so far. Returns
    /// how many of those were accepted.
    fn stage(&mut self, sink: &mut impl Sink, len: usize, offload: Offload) -> usize {
        let accepted = self.make_room(sink, HEADROOM + len);
        let place = self.pool.regions().first().and_then(|region| region.span(self.used + HEADROOM, len));
        if let (Some(place), Some(frame)) = (place, self.scratch.get(..len)) {
            place.write(frame);
            self.push(HEADROOM + len, offload);
        }
        accepted
    }

    /// Puts all frames so far if there is no room for another one of `total` bytes with its headroom; returns how many were accepted.
    fn make_room(&mut self, sink: &mut impl Sink, total: usize) -> usize {
        let full = self.burst.frames().len() == BURST || self.used + total > ROOM;
        if full { self.flush(sink) } else { 0 }
    }

    /// Adds the frame of `total` bytes that was written behind the others.
    fn push(&mut self, total: usize, offload: Offload) {
        if self.burst.push_at(self.used as u64, total, offload).is_ok() {
            self.used = (self.used + total).next_multiple_of(ALIGN);
        }
    }

    /// Puts all finished frames.
    fn flush(&mut self, sink: &mut impl Sink) -> usize {
        let count = self.burst.frames().len();
        if count == 0 {
            return 0;
        }
        let bytes = self.burst.frames().iter().map(|frame| frame.len() as u64).sum();
        self.burst.weigh(bytes);
        let accepted = sink.put(&self.burst, ALL.get(..count).unwrap_or(&ALL));
        self.start();
        accepted
    }

    fn start(&mut self) {
        self.burst.clear();
        self.burst.start_in(&self.pool);
        self.used = 0;
    }
}

/// Returns how many frames a receiver makes of these.
fn work(sink: &impl Sink, burst: &Burst, which: &[u8]) -> usize {
    if !sink.cuts() {
        return which.len();
    }
    let frames = which.iter().filter_map(|&index| Some((index, burst.frames().get(usize::from(index))?)));
    frames.map(|(index, frame)| burst.offload(index.into()).frames(frame.len())).sum()
}

/// Returns whether a receiver takes these frames as they are.
fn takes_all(sink: &impl Sink, burst: &Burst, which: &[u8]) -> bool {
    let support = sink.support();
    which.iter().all(|&index| support.contains(burst.offload(index.into()).needs()))
}

#[cfg(test)]
mod tests;
