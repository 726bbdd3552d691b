//! A split ring whose buffers in flight are noted in a region of the frontend's (`inflight`). Called by `device.rs` where there is one.

use super::{Device, Layout};
use crate::{
    Chain, Chains, Fault, Features, Inflight, Journal, JournalKey, Resumed,
    inflight::{FoundSplit, Split},
};
use ringroad_mem::Table;

impl Device {
    /// Goes on with what a former process, of whatever make, has noted in the region.
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
        // Of what the driver has made available so much was taken, in whatever order it came back.
        let mut start = at(count);
        let in_order = found.heads.iter().enumerate().all(|(index, &head)| device.entry(at(index)) == head);
        let mut track = inflight.adopt_split(found, device.ring.size, used);
        if in_order {
            // It stands there still, and nothing else does.
            start = used;
            track.iter_mut().for_each(Split::forget);
            journal.start(key, used);
            device.journal = journal;
        } else {
            // Positions do not tell where a ring out of order is.
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

    /// Takes what was in flight first, then from the ring.
    #[cold]
    #[inline(never)]
    pub(super) fn take_tracked(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        let wanted = max.min(chains.room());
        let mut taken = 0;
        while taken < wanted
            && let Some(head) = self.track.as_ref().and_then(|track| track.again.peek())
        {
            match self.descriptor(head).and_then(|descriptor| self.long_chain(memory, chains, descriptor)) {
                Ok(true) => taken += 1,
                Ok(false) => return Ok(taken),
                Err(_) if taken > 0 => return Ok(taken),
                Err(fault) => return Err(fault),
            }
            self.track.iter_mut().for_each(|track| track.again.advance());
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

    /// Whether something that was in flight waits to be taken.
    pub(super) fn has_again(&self) -> bool {
        self.track.as_ref().is_some_and(|track| track.again.peek().is_some())
    }

    /// Publishes what was given late.
    #[cold]
    #[inline(never)]
    pub(super) fn publish_tracked(&mut self) {
        let Some(mut track) = self.track.take() else { return };
        track.link();
        self.publish();
        track.unlink(self.published);
        self.track = Some(track);
    }

    /// What was in flight and is not taken yet goes back empty.
    pub(crate) fn settle(&mut self) {
        while let Some(head) = self.track.as_mut().and_then(|track| {
            let head = track.again.peek()?;
            track.again.advance();
            Some(head)
        }) {
            self.give_late(&[Chain::private(head, 1)]);
        }
        self.flush();
    }
}
