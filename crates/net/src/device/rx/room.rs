//! Waiting for receive buffers, on behalf of senders whose frames found too few.

use super::{RX_CHAINS, RxQueue};

impl RxQueue {
    /// Returns whether there are buffers for this many more frames, if each takes one, or at least half the ring.
    pub fn has_room(&mut self, frames: usize) -> bool {
        let wanted = frames.min(self.size / 2).min(RX_CHAINS);
        let wants = self.want::<false>(wanted);
        let there = self.chains.list().len();
        if wants.is_ok() && there < wanted {
            self.found_short(there);
        }
        // The next `put` reports a fault.
        wants.is_err() || there >= wanted
    }

    /// A frame has found too few buffers, of which there are this many.
    #[cold]
    pub(super) fn found_short(&mut self, there: usize) {
        self.short = Some(there);
        self.moderation.urge();
    }

    /// Returns whether a frame found too few buffers since the driver was last asked to notify.
    pub fn is_short(&self) -> bool {
        self.short.is_some()
    }

    /// Asks the driver to notify us of new buffers. Returns `true` if there are already more than when a frame found too few.
    #[cold]
    pub fn enable_notification(&mut self) -> bool {
        let short = self.short.take().unwrap_or(0);
        if self.chains.list().is_empty() {
            self.chains.start(&self.memory);
        }
        // A fault is reported by the next `put`.
        let taken = self.ring.take(&self.memory, &mut self.chains, RX_CHAINS);
        if taken.is_err() || self.chains.list().len() > short {
            return true;
        }
        if self.ring.enable_notification() {
            self.ring.disable_notification();
            return true;
        }
        false
    }

    /// Asks the driver not to notify us.
    pub fn disable_notification(&mut self) {
        self.ring.disable_notification();
    }
}
