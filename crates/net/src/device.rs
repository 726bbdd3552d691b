//! Device end of virtio-net (virtio 1.3, 5.1.6): transmit queues, which frames come from, and receive queues, which frames go to.
//! Called by `host`, which provides memory, sockets and notifications.

use ringroad_frame::{
    Counters, HEADROOM,
    offload::{Checksum, Offload, Support},
};
use ringroad_ring::BURST;
use ringroad_wire::vnet_hdr;

// The header takes the place of a frame's headroom; a burst of frames is one burst of chains.
const _: () = assert!(vnet_hdr::SIZE == HEADROOM && ringroad_frame::BURST == BURST);

/// Cache lines of a buffer that are prefetched. The hardware prefetcher fetches those behind them.
const FETCH: usize = 2;

macro_rules! queue_calls {
    () => {
        /// Starts the queue with the feature bits that the driver has acknowledged, at the base from SET_VRING_BASE.
        ///
        /// # Errors
        /// [`SetupError`] if size, base or addresses are invalid.
        pub fn start(
            memory: Arc<Table>,
            acked: u64,
            size: u32,
            at: Addresses,
            base: u32,
            counters: Arc<Counters>,
        ) -> Result<Self, SetupError> {
            Ok(Self::resume(memory, acked, size, at, base, counters, Journal::NONE, Inflight::NONE)?.0)
        }

        /// Sets the maximum length of a frame, in bytes from the destination address to the end of the payload. Longer frames are
        /// dropped and counted. 0: the link is down, all frames are dropped and counted as `stopped`.
        pub fn limit(&mut self, frame: usize) {
            self.limit = frame;
        }

        /// Sets how long used buffers may wait for their notification if the driver has not said; without, not at all.
        pub fn moderate(&mut self, limits: Coalesce) {
            self.moderation.set_default(limits);
        }

        /// Sets for how long the driver wants them to wait. [`Self::settle`] is to be called then.
        pub fn interrupts(&mut self, limits: Option<Interrupts>) {
            self.moderation.ask(limits.map(Interrupts::limits));
        }

        /// Sets which optimisations are used.
        pub fn tune(&mut self, tuning: Tuning) {
            // Fast paths know one length of headers.
            self.tuning = Tuning { fast_path: tuning.fast_path && self.header == vnet_hdr::SIZE, ..tuning };
            self.ring.tune(tuning);
        }
    };
}

/// Counts what is left to do to a frame of `len` bytes. `support`: what its receiver takes.
#[inline(never)]
fn count_offload(counters: &Counters, offload: Offload, support: Support, len: usize) {
    match offload.checksum() {
        Checksum::Complete => {}
        Checksum::Valid => counters.valid.add(support.contains(Support::VALID).into()),
        Checksum::Partial { .. } => counters.partial.add(1),
    }
    if offload.gso().is_some() {
        counters.gso.add(1);
        counters.gso_bytes.add(len as u64);
    }
}

mod rx;
mod tx;

pub use rx::RxQueue;
pub use tx::TxQueue;
