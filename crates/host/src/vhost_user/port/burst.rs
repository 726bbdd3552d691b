//! A guest's queues during one burst: where frames come from, and where they go to.

use super::guest::{Guest, Slot};
use crate::gate::Lease;
use parking_lot::MutexGuard;
use ringroad_frame::{Burst, Counters, Poured, Sink, Source, offload::Support};
use ringroad_mem::Span;
use ringroad_net::{RxQueue, TxQueue};
use ringroad_ring::Fault;

/// Exclusive use of a guest's transmit queue, from burst to burst.
pub struct VhostLease(pub(super) Lease<Slot<TxQueue>>);

impl std::fmt::Debug for VhostLease {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("VhostLease").field(&*self.0).finish()
    }
}

/// The same for one burst.
#[derive(Debug)]
pub struct VhostSource<'a> {
    pub(super) slot: &'a mut Slot<TxQueue>,
    pub(super) counters: &'a Counters,
    pub(super) port: &'a Guest,
    pub(super) index: usize,
}

impl VhostSource<'_> {
    /// Notifies the driver of returned buffers, if it certainly wants that.
    #[inline(always)]
    fn notify(&mut self) {
        if self.slot.queue.as_mut().is_some_and(|queue| queue.wants_notification()) {
            self.slot.vring.notify();
            self.counters.notifications.add(1);
        }
    }
}

impl Source for VhostSource<'_> {
    #[inline]
    fn take(&mut self, burst: &mut Burst) -> usize {
        let Some(queue) = &mut self.slot.queue else { return 0 };
        match queue.take(burst) {
            // Deferred returns were published now.
            Ok(0) => {
                self.notify();
                0
            }
            Ok(taken) => taken,
            // Not the driver's fault: its memory is lost. The worker stops the port when it checks memory next.
            Err(_) if queue.memory().is_lost() => {
                burst.clear();
                0
            }
            Err(fault) => {
                let base = queue.base();
                self.slot.fail(self.port, 2 * self.index + 1, base, fault, self.counters);
                burst.clear();
                0
            }
        }
    }

    #[inline]
    fn done(&mut self, burst: &mut Burst) {
        let Some(queue) = &mut self.slot.queue else { return };
        queue.done(burst);
        self.notify();
    }

    #[inline]
    fn retains(&self) -> bool {
        true
    }

    #[cold]
    fn retain(&mut self, burst: &mut Burst, first: usize) {
        let Some(queue) = &mut self.slot.queue else { return };
        queue.retain(burst, first);
        self.notify();
    }
}

/// Exclusive use of a guest's receive queue for one burst.
#[derive(Debug)]
pub struct VhostSink<'a> {
    pub(super) slot: MutexGuard<'a, Slot<RxQueue>>,
    pub(super) counters: &'a Counters,
    pub(super) port: &'a Guest,
    pub(super) index: usize,
}

impl VhostSink<'_> {
    /// Notifies the driver of received frames, or stops the queue. `lost`: frames that are dropped then.
    #[inline(always)]
    fn finish<T>(&mut self, result: Result<T, Fault>, lost: usize) -> Option<T> {
        let slot = &mut *self.slot;
        let queue = slot.queue.as_mut()?;
        let counters = self.counters;
        match result {
            Ok(done) => {
                if queue.wants_notification() {
                    slot.vring.notify();
                    counters.notifications.add(1);
                }
                return Some(done);
            }
            // Not the driver's fault: its memory is lost. The worker stops the port when it checks memory next.
            Err(_) if queue.memory().is_lost() => {}
            Err(fault) => {
                let base = queue.base();
                slot.fail(self.port, 2 * self.index, base, fault, counters);
            }
        }
        counters.stopped.add(lost as u64);
        None
    }
}

impl Sink for VhostSink<'_> {
    #[inline]
    fn support(&self) -> Support {
        self.slot.queue.as_ref().map_or(Support::empty(), RxQueue::support)
    }

    #[inline]
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let Some(queue) = &mut self.slot.queue else { return 0 };
        let result = queue.put(burst, which);
        self.finish(result, which.len()).unwrap_or(0)
    }

    #[inline]
    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let Some(queue) = &mut self.slot.queue else { return which.len() };
        let result = queue.offer(burst, which);
        self.finish(result, which.len()).unwrap_or(which.len())
    }

    fn has_room(&mut self, frames: usize) -> bool {
        self.slot.queue.as_mut().is_none_or(|queue| queue.has_room(frames))
    }

    fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Poured {
        let Some(queue) = &mut self.slot.queue else { return Poured::Unable };
        let result = queue.fill(room, read);
        self.finish(result, 0).unwrap_or(Poured::Unable)
    }
}
