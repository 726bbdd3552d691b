//! Coalesces TCP segments for a receiver (GRO): fewer and longer frames, for guests to which each frame costs more than a copy.
//! The switch calls it for ports that ask for it; what may become one frame is decided by `offload/coalesce.rs`.

use super::Software;
use crate::{
    BURST, Burst, HEADROOM, Offload, Sink,
    offload::{HEADERS, Support},
};
use ringroad_mem::Span;
use ringroad_wire::ethernet;

/// The receivers that it is for.
const SEGMENTED: Support = Support::TCP4.union(Support::TCP6);

/// Length in bytes of a frame for which [`Sink::has_room`] speaks.
const ORDINARY: usize = ethernet::longest_frame(1500);

impl Software {
    /// Puts the frames with these indices; TCP segments that follow one another become one frame, if the receiver takes such.
    /// Otherwise as [`Software::put_finished`].
    #[cold]
    pub fn put_coalesced(
        software: &mut Option<Software>,
        sink: &mut impl Sink,
        burst: &Burst,
        which: &[u8],
    ) -> (usize, usize) {
        if let Some(software) = Software::allocated(software)
            && software.plans(sink, burst, which)
        {
            return software.put_groups(sink, burst, which);
        }
        Software::put_finished(software, sink, burst, which)
    }

    /// The same, as [`Software::offer_finished`]: frames are coalesced only if there is room for all of them as they are.
    #[cold]
    pub fn offer_coalesced(
        software: &mut Option<Software>,
        sink: &mut impl Sink,
        burst: &Burst,
        which: &[u8],
    ) -> (usize, usize) {
        let len = |index: u8| burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
        let frames = which.iter().map(|&index| len(index).div_ceil(ORDINARY)).sum();
        if sink.has_room(frames)
            && let Some(software) = Software::allocated(software)
            && software.plans(sink, burst, which)
        {
            return (which.len(), software.put_groups(sink, burst, which).1);
        }
        Software::offer_finished(software, sink, burst, which)
    }

    /// Plans what becomes one frame; returns whether anything does.
    fn plans(&mut self, sink: &impl Sink, burst: &Burst, which: &[u8]) -> bool {
        let support = sink.support();
        // What would be cut again at once is better left as it is.
        if which.len() < 2 || !support.intersects(SEGMENTED) || sink.cuts() {
            return false;
        }
        let coalescing = self.coalescing.get_or_insert_default();
        coalescing.plan(burst, which, support, &mut self.scratch)
    }

    /// Puts the groups of the plan, in the order of their first frames. Returns as [`Software::put`].
    fn put_groups(&mut self, sink: &mut impl Sink, burst: &Burst, which: &[u8]) -> (usize, usize) {
        let Some(coalescing) = self.coalescing.take() else { return self.put(sink, burst, which) };
        let (mut accepted, mut work) = (0, 0);
        let (mut single, mut singles) = ([0; BURST], 0);
        self.start();
        for group in coalescing.plan.groups() {
            let mut header = [0; HEADERS];
            let merged = coalescing.header(group, &mut header);
            if merged.is_some() || singles == BURST {
                let (put, done) = self.put_singles(sink, burst, single.get_mut(..singles).unwrap_or_default());
                (accepted, work, singles) = (accepted + put, work + done, 0);
            }
            let members = coalescing.plan.members(group).filter_map(|member| which.get(member).copied());
            match merged.and_then(|(end, offload)| Some((header.get(..end)?, offload))) {
                Some((header, offload)) => {
                    accepted += self.merge(sink, burst, group.len(), header, offload, members);
                    work += 1;
                }
                None => members.zip(single.iter_mut().skip(singles)).for_each(|(index, place)| {
                    *place = index;
                    singles += 1;
                }),
            }
        }
        let (put, done) = self.put_singles(sink, burst, single.get_mut(..singles).unwrap_or_default());
        accepted += put + self.flush(sink);
        self.coalescing = Some(coalescing);
        (accepted, work + done)
    }

    /// Puts frames that stay as they are, behind those that were merged before.
    fn put_singles(&mut self, sink: &mut impl Sink, burst: &Burst, which: &mut [u8]) -> (usize, usize) {
        if which.is_empty() {
            return (0, 0);
        }
        // Groups are in the order of their first frames.
        which.sort_unstable();
        let before = self.flush(sink);
        let (accepted, work) = self.put(sink, burst, which);
        (before + accepted, work)
    }

    /// Adds a frame of `len` bytes: a header, and what follows the headers of these frames, which are as long. Returns how many
    /// frames were accepted to make room for it.
    fn merge(
        &mut self,
        sink: &mut impl Sink,
        burst: &Burst,
        len: usize,
        header: &[u8],
        offload: Offload,
        members: impl Iterator<Item = u8>,
    ) -> usize {
        let accepted = self.make_room(sink, HEADROOM + len);
        let place = self.pool.regions().first().and_then(|region| region.span(self.used + HEADROOM, len));
        if let Some(place) = place {
            place.write(header);
            let mut rest = place.skip(header.len());
            members.for_each(|index| rest = copy_behind(burst, index.into(), header.len(), rest));
            self.push(HEADROOM + len, offload);
        }
        accepted
    }
}

/// Copies what a frame has behind its first `skip` bytes, which are more than its head. Returns the rest of the target.
fn copy_behind<'a>(burst: &Burst, index: usize, skip: usize, mut target: Span<'a>) -> Span<'a> {
    let head = burst.frames().get(index).map_or(0, |frame| frame.ethernet().len());
    let mut skip = skip.saturating_sub(head);
    for piece in burst.rest(index) {
        let over = skip.min(piece.len());
        skip -= over;
        target = target.skip(piece.skip(over).copy_to(target));
    }
    target
}

#[cfg(test)]
mod tests;
