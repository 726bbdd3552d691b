//! Copies frames into the driver's buffers: on the fast path, in which each is in one piece and fits one buffer, and any other way.

use super::{Refusal, RxQueue, header};
use crate::{device::FETCH, offload, rss::HashReport};
use ringroad_frame::{ALL, Burst, Flow, Frame, HEAD, HEADROOM, Rest};
use ringroad_mem::{Hint, Span};
use ringroad_ring::{BURST, Chain, Fault};
use ringroad_wire::vnet_hdr;
use std::ops::Range;
use zerocopy::IntoBytes;

/// Prefetches the first lines of a buffer to be written. `apart`: the line with the virtio-net header is only read.
#[inline(always)]
fn fetch_target<const WRITE: bool>(target: Span<'_>, apart: bool) {
    match (WRITE, apart) {
        (true, true) => {
            target.prefetch::<1>();
            target.skip(vnet_hdr::SIZE).prefetch_write::<1>();
        }
        (true, false) => target.prefetch_write::<FETCH>(),
        (false, _) => target.prefetch::<FETCH>(),
    }
}

/// Copies frames until one is not in one piece or does not fit; returns how many were copied. `later`: the buffers to prefetch
/// meanwhile; `next`: what the source will read after this burst. `APART`: the virtio-net header has a cache line of its own, as in
/// DPDK's drivers; as it hardly ever changes, that line is only read. `WRITE`, `SMALL`: `Tuning::prefetch_write`, `Tuning::small_copy`.
#[inline(always)]
fn place_part<'b, const APART: bool, const WRITE: bool, const SMALL: bool>(
    frames: impl ExactSizeIterator<Item = Option<(&'b Frame, Span<'b>)>>,
    chains: &mut [Chain],
    targets: &[Span<'_>],
    later: &[Span<'_>],
    next: &[Hint],
) -> usize {
    let mut count = 0;
    for ((frame, chain), &target) in frames.zip(chains).zip(targets) {
        // Buffers that lie at equal distances are not prefetched in that order: the CPU's own prefetcher would recognise it, continue,
        // and take lines from the driver that it is still reading. The last of an odd number is left out.
        if let Some(&later) = later.get(count ^ 1) {
            fetch_target::<WRITE>(later, APART);
        }
        if let Some(next) = next.get(count) {
            next.fetch();
        }
        let Some((frame, source)) = frame else { break };
        let total = frame.extent();
        if target.len() < total || chain.readable_len() > 0 {
            break;
        }
        let copied = if APART {
            let Some(rest) = frame.full_head_apart() else { break };
            let (source, after) = (source.skip(vnet_hdr::SIZE), target.skip(vnet_hdr::SIZE));
            target.update(const { header(1) }) && source.copy_under(rest, after, total - vnet_hdr::SIZE, SMALL)
        } else {
            let Some(head) = frame.full_head(const { header(1) }) else { break };
            source.copy_under(head, target, total, SMALL)
        };
        if !copied {
            break;
        }
        chain.written = total as u32;
        count += 1;
    }
    count
}

impl RxQueue {
    /// Prefetches the first buffer of a chain to be written.
    #[inline(always)]
    pub(super) fn prefetch<const WRITE: bool>(&self, index: usize) {
        if let Some(piece) = self.chains.first_piece(index) {
            fetch_target::<WRITE>(piece, piece.ends_line(vnet_hdr::SIZE));
        }
    }

    /// Fast path: copies the first frames, until one is not in one piece or does not fit into one buffer; that one is left to
    /// `place`. Returns how many were copied and their total length in bytes.
    #[inline(always)]
    pub(super) fn place_plain<const WRITE: bool>(&mut self, burst: &Burst, which: &[u8]) -> (usize, u64) {
        let frames = burst.frames();
        let Some(sources) = burst.plain() else { return (0, 0) };
        if sources.len() == frames.len() && which.len() == frames.len() {
            // Each piece is a frame, and all frames go here.
            debug_assert_eq!(ALL.get(..frames.len()), Some(which));
            return self.place_all::<WRITE, _>(which.len(), burst.next(), |part| {
                let sources = sources.get(part.clone()).unwrap_or_default();
                let frames = frames.get(part).unwrap_or_default();
                frames.iter().zip(sources).map(|(frame, &source)| Some((frame, source)))
            });
        }
        self.place_all::<WRITE, _>(which.len(), burst.next(), |part| {
            which.get(part).unwrap_or_default().iter().map(|&index| {
                let frame = frames.get(index as usize)?;
                Some((frame, *sources.get(burst.piece(frame))?))
            })
        })
    }

    /// As `place_plain`, for `count` frames, which `frames` returns part by part. Not inlined: its loop needs all registers.
    #[inline(never)]
    fn place_all<'b, const WRITE: bool, F>(
        &mut self,
        count: usize,
        next: &[Hint],
        frames: impl Fn(Range<usize>) -> F,
    ) -> (usize, u64)
    where
        F: ExactSizeIterator<Item = Option<(&'b Frame, Span<'b>)>>,
    {
        let (distance, small) = (self.tuning.distance(), self.tuning.small_copy);
        let Some((chains, targets)) = self.chains.plain_mut() else { return (0, 0) };
        let most = count.min(chains.len()).min(targets.len());
        let (Some(chains), Some(targets)) = (chains.get_mut(..most), targets.get(..most)) else { return (0, 0) };
        // The alignment of the first buffer is nearly always that of the others. If not, the result is the same.
        let apart = targets.first().is_some_and(|target| target.ends_line(vnet_hdr::SIZE));
        let mut done = 0;
        while done < most {
            // With a full burst we are behind, and the driver takes more at once the fewer parts there are. Else it waits for
            // us, and gets the first line of the ring as soon as possible.
            let part = if count == BURST { most } else { (done + self.ring.left_in_line()).min(most) };
            let (chains, frames) = (chains.get_mut(done..part).unwrap_or_default(), frames(done..part));
            let later = targets.get(done + distance..).unwrap_or_default();
            let next = next.get(done..).unwrap_or_default();
            let targets = targets.get(done..part).unwrap_or_default();
            let placed = match (small, apart) {
                (true, false) => place_part::<false, WRITE, true>(frames, chains, targets, later, next),
                (true, true) => place_part::<true, WRITE, true>(frames, chains, targets, later, next),
                (false, false) => place_part::<false, WRITE, false>(frames, chains, targets, later, next),
                (false, true) => place_part::<true, WRITE, false>(frames, chains, targets, later, next),
            };
            done += placed;
            if done < part || done == most {
                break;
            }
            self.ring.give(chains);
            self.given = done;
        }
        let placed = chains.get(..done).unwrap_or_default();
        let bytes: u64 = placed.iter().map(|chain| u64::from(chain.written)).sum();
        (done, bytes - (done * vnet_hdr::SIZE) as u64)
    }

    /// Normal path: copies one frame into as many chains of any shape as it needs, from `first` on; returns how many.
    pub(super) fn place(&mut self, burst: &Burst, index: u8, first: usize) -> Result<usize, Refusal> {
        let Some(frame) = burst.frames().get(usize::from(index)) else { return Err(Refusal::Full) };
        // Reserve first, then copy: buffers that are not returned must stay untouched.
        let count = self.reserve(first, frame.extent() + self.header - HEADROOM)?;
        let (mut head, head_len) = frame.head();
        let offload = burst.offload(index.into());
        if let Some(headroom) = head.first_chunk_mut::<HEADROOM>() {
            *headroom = offload::bytes(offload, self.support, count as u16);
        }
        let mut long;
        let head = if self.header == vnet_hdr::SIZE {
            head.get(..head_len).unwrap_or_default()
        } else {
            long = [0; HEAD + vnet_hdr::TUNNELED - HEADROOM];
            let (start, rest) = head.split_at(HEADROOM);
            let hash = self.reported(burst, index);
            let end = offload::write_tunnel(offload);
            let tunnel = if self.header == vnet_hdr::TUNNELED { end.as_bytes() } else { &[] };
            let bytes = start.iter().chain(&hash).chain(tunnel).chain(rest);
            long.iter_mut().zip(bytes).for_each(|(place, &byte)| *place = byte);
            long.get(..head_len + self.header - HEADROOM).unwrap_or_default()
        };
        let mut source = Pieces { head, rest: burst.rest(index.into()), current: None };
        for index in first..first + count {
            let Some(&chain) = self.chains.list().get(index) else { break };
            let written = self.chains.writable(&chain).iter().map(|&target| source.fill(target)).sum::<usize>();
            if let Some(chain) = self.chains.list_mut().get_mut(index) {
                chain.written = written as u32;
            }
        }
        Ok(count)
    }

    /// Returns what the header of a frame says of its hash.
    fn reported(&self, burst: &Burst, index: u8) -> [u8; HashReport::LEN] {
        let flow = self.hash.as_ref().and_then(|hash| Some((hash, Flow::read(burst, index.into())?)));
        flow.map_or(HashReport::NONE, |(hash, flow)| hash.report(&flow)).bytes()
    }

    /// Takes chains until those from `first` on have room for `total` bytes; returns how many these are.
    pub(super) fn reserve(&mut self, first: usize, total: usize) -> Result<usize, Refusal> {
        let (mut count, mut room) = (0, 0);
        while room < total {
            if count > 0 && !self.mergeable {
                return Err(Refusal::Oversize);
            }
            if first + count == self.chains.list().len() {
                match self.ring.take(&self.memory, &mut self.chains, 1) {
                    Ok(0) if first > 0 => return Err(Refusal::Crowded),
                    Ok(0) if self.chains.room() == 0 => return Err(Refusal::Oversize),
                    Ok(0) => {
                        self.found_short(count);
                        return Err(Refusal::Full);
                    }
                    Ok(_) => {}
                    Err(fault) => return Err(Refusal::Fault(fault)),
                }
            }
            let Some(&chain) = self.chains.list().get(first + count) else { return Err(Refusal::Full) };
            let (id, len, needed) = (chain.id, chain.writable_len(), self.header as u32);
            if chain.readable_len() > 0 {
                return Err(Refusal::Fault(Fault::Readable { id }));
            }
            if len < needed {
                return Err(Refusal::Fault(Fault::Header { id, len, needed }));
            }
            if chain.clipped {
                return Err(Refusal::Oversize);
            }
            room += len as usize;
            count += 1;
        }
        Ok(count)
    }
}

/// A frame as a stream of bytes: its private head, then the sender's pieces.
struct Pieces<'a> {
    head: &'a [u8],
    rest: Rest<'a>,
    current: Option<Span<'a>>,
}

impl Pieces<'_> {
    /// Copies as much as the target holds; returns the number of bytes.
    fn fill(&mut self, mut target: Span<'_>) -> usize {
        let head = target.write(self.head);
        self.head = self.head.get(head..).unwrap_or_default();
        target = target.skip(head);
        let mut done = head;
        while !target.is_empty() {
            let Some(piece) = self.current.take().or_else(|| self.rest.next()) else { break };
            let copied = piece.copy_to(target);
            target = target.skip(copied);
            done += copied;
            self.current = Some(piece.skip(copied)).filter(|rest| !rest.is_empty());
        }
        done
    }
}
