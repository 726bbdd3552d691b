//! Inflight tracking for the device end of a split ring: buffers in flight are recorded in the frontend's region
//! (`inflight`). Called by `device.rs` if there is such a region.

use super::Layout;
use crate::{
    Features, Inflight, Journal, JournalKey, Resumed,
    device::{Device, DeviceEnd},
    inflight::{FoundSplit, Resubmits},
};

impl Device<Layout> {
    /// Resumes from the inflight region that a former back end, ours or another, left behind.
    pub(super) fn adopt(
        ring: Layout,
        features: Features,
        base: u16,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
        found: FoundSplit,
    ) -> (Self, Resumed) {
        let mut device = Self::new(ring, features, 0);
        let used = device.next_used;
        let at = |index: usize| used.wrapping_add(index as u16);
        let count = found.heads.len();
        // The former back end had taken this many entries of the available ring, whatever the order in which it returned
        // chains.
        let mut start = at(count);
        let in_order = found.heads.iter().enumerate().all(|(index, &head)| device.entry(at(index)) == head);
        device.track = inflight.adopt_split(&found, device.ring.size, used).map(Box::new);
        if in_order {
            // The entries still in the ring are exactly those in flight: take them from there.
            start = used;
            found.heads.iter().rev().for_each(|&head| device.forget(head));
            journal.start(key, used);
            device.journal = journal;
        } else {
            // Positions cannot describe a ring that is used out of order.
            journal.end();
            device.resubmits = Resubmits::new(found.heads);
        }
        (device.next_available, device.state.seen) = (start, start);
        let resumed = match count {
            0 if base == start => Resumed::Base,
            _ => Resumed::Inflight { resubmitted: count as u32 },
        };
        (device, resumed)
    }
}
