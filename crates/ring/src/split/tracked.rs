//! Inflight tracking for the device end of a split ring: buffers in flight are recorded in the frontend's region
//! (`inflight`). Called by `device.rs` if there is such a region.

use super::{Device, Layout};
use crate::{
    Chain, Chains, Fault, Features, Inflight, Journal, JournalKey, Resumed,
    inflight::{FoundSplit, Split},
};
use ringroad_mem::Table;

impl Device {
    /// Resumes from the inflight region that a former back end, ours or another, left behind.
    pub(super) fn adopt(
        ring: Layout,
        features: Features,
        base: u16,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
        found: FoundSplit,
    ) -> (Device, Resumed) {
        let mut device = Device::new(ring, features, 0);
        let used = device.next_used;
        let at = |index: usize| used.wrapping_add(index as u16);
        let count = found.heads.len();
        // The former back end had taken this many entries of the available ring, whatever the order in which it returned
        // chains.
        let mut start = at(count);
        let in_order = found.heads.iter().enumerate().all(|(index, &head)| device.entry(at(index)) == head);
        let mut track = inflight.adopt_split(found, device.ring.size, used);
        if in_order {
            // The entries still in the ring are exactly those in flight: take them from there.
            start = used;
            track.iter_mut().for_each(Split::forget);
            journal.start(key, used);
            device.journal = journal;
        } else {
            // Positions cannot describe a ring that is used out of order.
            journal.end();
        }
        (device.next_available, device.seen) = (start, start);
        device.track = track.map(Box::new);
        let resumed = match count {
            0 if base == start => Resumed::Base,
            _ => Resumed::Inflight { resubmitted: count as u32 },
        };
        (device, resumed)
    }

    /// Takes the chains that were in flight first, then from the ring.
    #[cold]
    #[inline(never)]
    pub(super) fn take_tracked(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        let wanted = max.min(chains.room());
        let mut taken = 0;
        while taken < wanted
            && let Some(head) = self.track.as_ref().and_then(|track| track.resubmits.peek())
        {
            match self.descriptor(head).and_then(|descriptor| self.read_chain(memory, chains, descriptor)) {
                Ok(true) => taken += 1,
                Ok(false) => return Ok(taken),
                Err(_) if taken > 0 => return Ok(taken),
                Err(fault) => return Err(fault),
            }
            self.track.iter_mut().for_each(|track| track.resubmits.advance());
        }
        let before = chains.list().len();
        match self.take_fresh(memory, chains, wanted - taken) {
            Ok(fresh) => {
                if let Some(track) = &mut self.track {
                    track.take(chains.list().get(before..).unwrap_or_default());
                }
                Ok(taken + fresh)
            }
            Err(_) if taken > 0 => Ok(taken),
            Err(fault) => Err(fault),
        }
    }

    /// Returns whether chains that were in flight have not been taken again yet.
    pub(super) fn has_resubmits(&self) -> bool {
        self.track.as_ref().is_some_and(|track| track.resubmits.peek().is_some())
    }

    /// Publishes deferred chains.
    #[cold]
    #[inline(never)]
    pub(super) fn publish_tracked(&mut self) {
        let Some(mut track) = self.track.take() else { return };
        track.link();
        self.publish();
        track.unlink(self.published);
        self.track = Some(track);
    }

    /// Returns, unused, the chains that were in flight and have not been taken again.
    pub(crate) fn return_resubmits(&mut self) {
        while let Some(head) = self.track.as_mut().and_then(|track| {
            let head = track.resubmits.peek()?;
            track.resubmits.advance();
            Some(head)
        }) {
            self.give_deferred(&[Chain::private(head, 1)]);
        }
        self.flush();
    }
}
