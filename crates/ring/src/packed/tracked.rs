//! Inflight tracking for the device end of a packed ring: buffers in flight are recorded in the frontend's region
//! (`inflight`). Called by `device.rs` if there is such a region.

use super::{Device, Layout, Position};
use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Inflight, Journal, JournalKey, Resumed,
    chain::{Descriptor, Draft, indirect},
    inflight::{FoundPacked, Packed, Saved},
};
use ringroad_mem::{Hit, Table};

impl Device {
    /// Resumes from the inflight region that a former back end, ours or another, left behind.
    pub(super) fn adopt(
        ring: Layout,
        features: Features,
        requested: Position,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
        found: FoundPacked,
    ) -> (Device, Resumed) {
        let (used, slots, size) = (found.used, found.slots, ring.size());
        // A batch whose first descriptor was never written: hide the other used descriptors from the driver until their
        // turn.
        let mut at = used;
        let mut untouched = true;
        for _ in 0..slots {
            untouched &= !ring.restore_available(at);
            at.advance(1, size);
        }
        let mut next = used;
        let in_order = untouched
            && found.chains.iter().all(|chain| matches_ring(&ring, &mut next, chain, found.descriptors(chain)));
        let count = found.chains.len() as u32;
        let mut track = inflight.adopt_packed(found, size);
        let mut device = Device::at(ring, features, used);
        if in_order {
            // The descriptors still in the ring are exactly those in flight: take them from there.
            track.iter_mut().for_each(Packed::forget);
            journal.start(key, used.to_bits());
            device.journal = journal;
        } else {
            // Positions cannot describe a ring that is used out of order.
            journal.end();
            device.next_available.advance(slots, size);
            device.outstanding = slots.into();
        }
        device.track = track.map(Box::new);
        let resumed = match count {
            0 if requested == used => Resumed::Base,
            resubmitted => Resumed::Inflight { resubmitted },
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
            && let Some(saved) = self.track.as_ref().and_then(|track| track.resubmits.peek())
        {
            match self.take_saved(memory, chains, &saved) {
                Ok(true) => taken += 1,
                Ok(false) => return Ok(taken),
                Err(_) if taken > 0 => return Ok(taken),
                Err(fault) => return Err(fault),
            }
            self.track.iter_mut().for_each(|track| track.resubmits.advance());
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

    /// Rebuilds a chain from saved descriptors, which may no longer be in the ring. Returns `false` if it must wait for the
    /// next burst.
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

    /// Undoes the taking of chains in the region. Returns the index in the burst from which on they must be put back in the
    /// ring.
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

    /// Returns whether chains that were in flight have not been taken again yet.
    pub(super) fn has_resubmits(&self) -> bool {
        self.track.as_ref().is_some_and(|track| track.resubmits.peek().is_some())
    }

    /// Returns chains to the driver and publishes each one separately: see `inflight::packed`.
    #[cold]
    #[inline(never)]
    pub(super) fn give_tracked(&mut self, chains: &[Chain]) {
        let Some(mut track) = self.track.take() else { return };
        for chain in chains {
            track.begin_return(chain);
            self.stage(std::slice::from_ref(chain));
            self.flush();
            track.end_return(chain);
        }
        self.track = Some(track);
        self.expected = chains.len() as u16;
    }

    /// Returns, unused, the chains that were in flight and have not been taken again.
    pub(crate) fn return_resubmits(&mut self) {
        while let Some(saved) = self.track.as_mut().and_then(|track| {
            let saved = track.resubmits.peek()?;
            track.resubmits.advance();
            Some(saved)
        }) {
            self.give_tracked(&[Chain::private(saved.id, saved.slots)]);
        }
    }
}

/// Returns whether the ring still holds a chain in flight, at this position, as it was taken; advances the position past
/// it.
fn matches_ring(ring: &Layout, at: &mut Position, chain: &Saved, descriptors: &[Descriptor]) -> bool {
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
            // It can only be returned, or must wait.
            break;
        }
        if descriptor.flags & INDIRECT == 0 {
            chains.add(chain, memory, hit, descriptor)?;
            continue;
        }
        // An indirect table must be the last descriptor of its chain (2.8.7).
        if !features.indirect || index + 1 != descriptors.len() {
            return Err(Fault::Indirect { index: descriptor.index });
        }
        indirect(chains, chain, memory, hit, descriptor, track.size(), false)?;
    }
    Ok(())
}
