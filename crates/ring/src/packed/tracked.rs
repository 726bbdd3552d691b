//! Inflight tracking for the device end of a packed ring: buffers in flight are recorded in the frontend's region
//! (`inflight`). Called by `device.rs` if there is such a region.

use super::{Layout, Position, device::DeviceState};
use crate::{
    Chain, Features, Inflight, Journal, JournalKey, Resumed,
    chain::Descriptor,
    device::{Device, DeviceEnd},
    inflight::{FoundPacked, Resubmits, Saved},
    layout::RingPosition,
};

impl Device<Layout> {
    /// Resumes from the inflight region that a former back end, ours or another, left behind.
    pub(super) fn adopt(
        ring: Layout,
        features: Features,
        requested: Position,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
        found: FoundPacked,
    ) -> (Self, Resumed) {
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
        let chains = found.chains.clone();
        let count = chains.len() as u32;
        let mut device = Self::at(ring, features, used, used, DeviceState::default());
        device.track = inflight.adopt_packed(found, size).map(Box::new);
        if in_order {
            // The descriptors still in the ring are exactly those in flight: take them from there.
            chains.iter().rev().for_each(|chain| device.forget(chain.id));
            journal.start(key, used.to_bits());
            device.journal = journal;
        } else {
            // Positions cannot describe a ring that is used out of order.
            journal.end();
            device.resubmits = Resubmits::new(chains);
            device.next_available.advance(slots, size);
            device.state.outstanding = slots.into();
        }
        let resumed = match count {
            0 if requested == used => Resumed::Base,
            resubmitted => Resumed::Inflight { resubmitted },
        };
        (device, resumed)
    }

    /// Returns chains to the driver and publishes each one separately: see `inflight::packed`.
    #[cold]
    #[inline(never)]
    pub(super) fn give_tracked(&mut self, chains: &[Chain]) {
        let Some(mut track) = self.track.take() else { return };
        for chain in chains {
            track.begin_return(chain);
            self.stage_batch(std::slice::from_ref(chain));
            self.flush();
            track.end_return(chain);
        }
        self.track = Some(track);
        self.state.expected = chains.len() as u16;
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
