//! A packed ring whose buffers in flight are noted in a region of the frontend's (`inflight`). Called by `device.rs` where there is
//! one.

use super::{Device, Layout, Position};
use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Inflight, Journal, JournalKey, Resumed,
    chain::{Descriptor, Draft, indirect},
    inflight::{FoundPacked, Packed, Saved},
};
use ringroad_mem::{Hit, Table};

impl Device {
    /// Goes on with what a former process, of whatever make, has noted in the region.
    pub(super) fn adopt(
        ring: Layout,
        features: Features,
        said: Position,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
        found: FoundPacked,
    ) -> (Device, Resumed) {
        let (used, slots, size) = (found.used, found.slots, ring.size());
        // A batch of which the first descriptor was never written: the driver must not see the others before their turn.
        let mut at = used;
        let mut as_made = true;
        for _ in 0..slots {
            as_made &= !ring.unuse(at);
            at.advance(1, size);
        }
        let mut next = used;
        let in_order =
            as_made && found.chains.iter().all(|chain| stands(&ring, &mut next, chain, found.descriptors(chain)));
        let count = found.chains.len() as u32;
        let mut track = inflight.adopt_packed(found, size);
        let mut device = Device::at(ring, features, used);
        if in_order {
            // It stands there still, and nothing else does.
            track.iter_mut().for_each(Packed::forget);
            journal.start(key, used.to_bits());
            device.journal = journal;
        } else {
            // Positions do not tell where a ring out of order is.
            journal.end();
            device.next_available.advance(slots, size);
            device.outstanding = slots.into();
        }
        device.track = track.map(Box::new);
        let resumed = match count {
            0 if said == used => Resumed::Base,
            resubmitted => Resumed::Inflight { resubmitted },
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
            && let Some(saved) = self.track.as_ref().and_then(|track| track.again.peek())
        {
            match self.take_saved(memory, chains, &saved) {
                Ok(true) => taken += 1,
                Ok(false) => return Ok(taken),
                Err(_) if taken > 0 => return Ok(taken),
                Err(fault) => return Err(fault),
            }
            self.track.iter_mut().for_each(|track| track.again.advance());
        }
        let (before, at) = (chains.list().len(), self.next_available);
        match self.take_fresh(memory, chains, wanted - taken) {
            Ok(fresh) => {
                if let Some(track) = &mut self.track {
                    track.take(&self.ring, at, chains.list().get(before..).unwrap_or_default());
                }
                Ok(taken + fresh)
            }
            Err(_) if taken > 0 => Ok(taken),
            Err(fault) => Err(fault),
        }
    }

    /// Makes a chain of descriptors that may not be in the ring any more. `false`: it has to wait for the next burst.
    fn take_saved(&mut self, memory: &Table, chains: &mut Chains, saved: &Saved) -> Result<bool, Fault> {
        let mut chain = chains.begin(saved.slots);
        chain.id = saved.id;
        let Some(track) = &self.track else { return Ok(false) };
        match follow(track, self.features, memory, chains, &mut chain, &mut self.hit, saved) {
            Ok(()) => Ok(chains.end(chain)),
            Err(fault) => {
                chains.abandon(&chain);
                Err(fault)
            }
        }
    }

    /// Puts back in the region what will be put back in the ring. Says from which chain of the burst on they belong there.
    #[inline]
    pub(super) fn untake_tracked(&mut self, chains: &Chains, keep: usize) -> usize {
        match &mut self.track {
            None => keep,
            Some(track) => {
                let fresh = track.untake(chains.list().get(keep..).unwrap_or_default());
                chains.list().len().saturating_sub(fresh)
            }
        }
    }

    /// Whether something that was in flight waits to be taken.
    pub(super) fn has_again(&self) -> bool {
        self.track.as_ref().is_some_and(|track| track.again.peek().is_some())
    }

    /// Gives chains back, each published for itself: see `inflight::packed`.
    #[cold]
    #[inline(never)]
    pub(super) fn give_tracked(&mut self, chains: &[Chain]) {
        let Some(mut track) = self.track.take() else { return };
        for chain in chains {
            track.begin(chain);
            self.stage(std::slice::from_ref(chain));
            self.flush();
            track.end(chain);
        }
        self.track = Some(track);
        self.expected = chains.len() as u16;
    }

    /// What was in flight and is not taken yet goes back empty.
    pub(crate) fn settle(&mut self) {
        while let Some(saved) = self.track.as_mut().and_then(|track| {
            let saved = track.again.peek()?;
            track.again.advance();
            Some(saved)
        }) {
            self.give_tracked(&[Chain::private(saved.id, saved.slots)]);
        }
    }
}

/// Whether a chain in flight stands in the ring at a position as it was taken; moves the position behind it.
fn stands(ring: &Layout, at: &mut Position, chain: &Saved, descriptors: &[Descriptor]) -> bool {
    descriptors.iter().enumerate().all(|(index, saved)| {
        let (address, word) = ring.words(*at);
        let is_available = ring.is_available(*at);
        at.advance(1, ring.size());
        let last = index + 1 == descriptors.len();
        is_available
            && (address, word as u32, (word >> 48) as u16) == (saved.address, saved.len, saved.flags)
            && (!last || (word >> 32) as u16 == chain.id)
    })
}

fn follow(
    track: &Packed,
    features: Features,
    memory: &Table,
    chains: &mut Chains,
    chain: &mut Draft,
    hit: &mut Hit,
    saved: &Saved,
) -> Result<(), Fault> {
    let descriptors = track.descriptors(saved);
    for (index, &descriptor) in descriptors.iter().enumerate() {
        if chain.clipped {
            // It can only be given back, or has to wait.
            break;
        }
        if descriptor.flags & INDIRECT == 0 {
            chains.add(chain, memory, hit, descriptor)?;
            continue;
        }
        // A table is all that is left of a chain (2.8.7).
        if !features.indirect || index + 1 != descriptors.len() {
            return Err(Fault::Indirect { index: descriptor.index });
        }
        indirect(chains, chain, memory, hit, descriptor, track.size(), false)?;
    }
    Ok(())
}
