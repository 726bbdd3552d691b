//! The queues of a card as a port of the switch. Made by `server.rs`.

use super::card::Card;
use crate::{
    gate::Lease,
    port::{PortKind, PortSettings},
    socket::{Lines, say},
    vfio_user::Interrupts,
};
use parking_lot::MutexGuard;
use ringroad_e1000::{Device, Exits, RxQueue, TxQueue};
use ringroad_frame::{Burst, Counters, Sink, Source, offload::Support};
use std::{
    io,
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// A card as a port. Cheap to clone: its registers share it with the worker.
#[derive(Clone)]
pub struct E1000Port(pub(super) Arc<Card>);

impl std::fmt::Debug for E1000Port {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("E1000Port").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl E1000Port {
    pub(super) fn new(
        name: &str,
        parts: (Device, TxQueue, RxQueue),
        interrupts: Interrupts,
        lines: Lines,
    ) -> io::Result<E1000Port> {
        Ok(E1000Port(Arc::new(Card::new(name, parts, interrupts, lines)?)))
    }
}

impl PortKind for E1000Port {
    type Lease = E1000Lease;
    type Source<'a> = E1000Source<'a>;
    type Sink<'a> = E1000Sink<'a>;

    fn name(&self) -> &str {
        &self.0.name
    }

    fn received(&self) -> &[Arc<Counters>] {
        &self.0.counters[0]
    }

    fn sent(&self) -> &[Arc<Counters>] {
        &self.0.counters[1]
    }

    fn lease(&self, _queue: usize) -> Option<E1000Lease> {
        self.0.tx.try_lease().map(E1000Lease)
    }

    fn is_wanted(&self, _queue: usize) -> bool {
        self.0.tx.is_wanted()
    }

    fn source<'a>(&'a self, _queue: usize, E1000Lease(queue): &'a mut E1000Lease) -> Option<E1000Source<'a>> {
        Some(E1000Source { queue, card: &self.0 })
    }

    fn sink(&self, _hint: usize, frames: usize) -> Option<E1000Sink<'_>> {
        let Some(queue) = self.0.rx.try_enter() else {
            self.0.counters[1].first().inspect(|counters| counters.busy.add(frames as u64));
            return None;
        };
        Some(E1000Sink { queue, card: &self.0 })
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![crate::sys::borrow(&self.0.transmit.eventfd)]
    }

    fn room_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![crate::sys::borrow(&self.0.room.eventfd)]
    }

    fn settle(&self, now: Duration) -> Option<Duration> {
        // Before it looks, under the lock of the interrupts: an access that this misses takes that lock later, and then tells it.
        self.0.told.store(false, Ordering::Relaxed);
        self.0.settle().map(|after| now + after)
    }

    /// The driver's: ITR and the delays.
    fn is_timed(&self) -> bool {
        true
    }

    fn enable_room(&self) -> bool {
        let card = &*self.0;
        if !card.short.load(Ordering::Relaxed) {
            return false;
        }
        card.room.bell.want();
        // Control holds the queue: to be tried again.
        let Some(mut queue) = card.rx.try_enter() else { return false };
        !queue.has_room(1)
    }

    fn disable_room(&self) {
        self.0.room.bell.unwant();
    }

    fn enable_notification(&self, _queue: usize) -> bool {
        if !self.0.lending.close() {
            return false;
        }
        self.0.transmit.bell.want();
        // Control holds the queue. It wakes the worker when it has changed something, but may not have done so yet.
        self.0.tx.try_enter().is_some_and(|mut queue| queue.is_idle())
    }

    fn disable_notification(&self, _queue: usize) {
        self.0.transmit.bell.unwant();
    }

    fn stop_polling(&self, _queue: usize) {
        self.0.lending.withdraw();
    }

    fn exits(&self) -> Option<Exits> {
        Some(self.0.interrupter.exits())
    }

    /// All of them: one frame of 64 KiB costs its source, and the host's stack behind a TAP interface, less than the 45 that the queue
    /// cuts it into, and the driver gets those in one burst.
    fn takes(&self) -> Support {
        Support::all()
    }

    fn set(&self, _settings: &PortSettings) {}

    fn check_memory(&self) -> bool {
        let Card { name, tx, rx, lines, .. } = &*self.0;
        let (Some(mut tx), Some(mut rx)) = (tx.try_enter(), rx.try_enter()) else { return false };
        if tx.memory().is_some_and(|memory| memory.is_lost()) {
            // Without memory nothing can fail.
            let _ = tx.set_memory(None);
            rx.set_memory(None);
            tx.counters().faults.add(1);
            say!(
                lines,
                Error,
                "port {name}: the client has truncated the guest's memory; the card has no memory until it maps some"
            );
        }
        true
    }

    /// Leaves the guest's memory alone after a panic, until its client maps it again.
    #[cold]
    fn abandon(&self) {
        self.0.lending.withdraw();
        if let Some(mut tx) = self.0.tx.try_enter() {
            let _ = tx.set_memory(None);
        }
        if let Some(mut rx) = self.0.rx.try_enter() {
            rx.set_memory(None);
        }
    }
}

/// Exclusive use of the transmit queue, from burst to burst.
pub struct E1000Lease(Lease<TxQueue>);

impl std::fmt::Debug for E1000Lease {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("E1000Lease").field(&*self.0).finish()
    }
}

/// The same for one burst.
pub struct E1000Source<'a> {
    queue: &'a mut TxQueue,
    card: &'a Card,
}

impl std::fmt::Debug for E1000Source<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("E1000Source").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl Source for E1000Source<'_> {
    fn take(&mut self, burst: &mut Burst) -> usize {
        self.card.lending.serve();
        let taken = self.queue.take(burst);
        if let Some(fault) = self.queue.take_fault() {
            self.card.tell("transmit", fault);
        }
        taken
    }

    fn done(&mut self, burst: &mut Burst) {
        self.queue.done(burst);
    }

    fn retains(&self) -> bool {
        true
    }

    #[cold]
    fn retain(&mut self, burst: &mut Burst, first: usize) {
        self.queue.retain(burst, first);
    }
}

/// Exclusive use of the receive queue for one burst.
pub struct E1000Sink<'a> {
    queue: MutexGuard<'a, RxQueue>,
    card: &'a Card,
}

impl std::fmt::Debug for E1000Sink<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("E1000Sink").field("queue", &*self.queue).finish_non_exhaustive()
    }
}

impl E1000Sink<'_> {
    fn end(&mut self, short: bool) {
        self.card.short.store(short, Ordering::Relaxed);
        if let Some(fault) = self.queue.take_fault() {
            self.card.tell("receive", fault);
        }
    }
}

impl Sink for E1000Sink<'_> {
    fn support(&self) -> Support {
        self.queue.support()
    }

    fn cuts(&self) -> bool {
        self.queue.cuts()
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let accepted = self.queue.put(burst, which);
        self.end(accepted < which.len());
        accepted
    }

    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let handled = self.queue.offer(burst, which);
        self.end(handled < which.len());
        handled
    }

    fn has_room(&mut self, frames: usize) -> bool {
        let room = self.queue.has_room(frames);
        self.card.short.store(!room, Ordering::Relaxed);
        room
    }
}
