//! The queues of a card as a port of the switch. Made by `server.rs`.

use crate::{
    gate::{Gate, Lease},
    port::{PortKind, PortSettings},
    socket::{Lines, say},
    vfio_user::{InterruptKind, Interrupts},
};
use parking_lot::{Mutex, MutexGuard};
use ringroad_e1000::{Bell, Device, Effects, Exits, Interrupter, RxQueue, TxQueue, Vector};
use ringroad_frame::{Burst, Counters, Poured, Sink, Source, offload::Support};
use ringroad_mem::{Span, Table};
use std::{
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Wakes the worker when a tail has moved, if it asked for that.
#[derive(Debug)]
struct Kick {
    eventfd: EventFd,
    bell: Bell,
}

impl Kick {
    fn new() -> io::Result<Kick> {
        Ok(Kick { eventfd: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?, bell: Bell::default() })
    }

    /// For the registers' thread, after it has stored a tail.
    #[inline]
    fn tail_moved(&self) {
        if self.bell.ring() {
            let _ = self.eventfd.write(1);
        }
    }
}

/// A card as a port. Cheap to clone: its registers share it with the worker.
#[derive(Clone)]
pub struct E1000Port(pub(super) Arc<Card>);

/// A card. The thread of its socket has the registers, the worker the queues.
pub(super) struct Card {
    pub name: String,
    registers: Mutex<Device>,
    tx: Gate<TxQueue>,
    rx: Gate<RxQueue>,
    interrupter: Interrupter,
    pub interrupts: Interrupts,
    /// Of its clock.
    start: Instant,
    /// Counters of frames from the guest, and of those to it.
    counters: [Vec<Arc<Counters>>; 2],
    transmit: Kick,
    room: Kick,
    /// A frame found no room, and none has found any since.
    short: AtomicBool,
    /// The worker was told to settle, and has not done so yet.
    told: AtomicBool,
    pub lines: Lines,
}

impl std::fmt::Debug for E1000Port {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("E1000Port").field("name", &self.0.name).finish_non_exhaustive()
    }
}

impl E1000Port {
    /// Returns accesses to registers and interrupts so far, which cost a virtual machine an exit each.
    pub fn exits(&self) -> Exits {
        self.0.interrupter.exits()
    }

    pub(super) fn new(
        name: &str,
        (device, tx, rx): (Device, TxQueue, RxQueue),
        interrupts: Interrupts,
        lines: Lines,
    ) -> io::Result<E1000Port> {
        let counters = [vec![tx.counters().clone()], vec![rx.counters().clone()]];
        Ok(E1000Port(Arc::new(Card {
            name: name.to_owned(),
            interrupter: device.interrupter(),
            registers: Mutex::new(device),
            tx: Gate::new(tx),
            rx: Gate::new(rx),
            interrupts,
            start: Instant::now(),
            counters,
            transmit: Kick::new()?,
            room: Kick::new()?,
            short: AtomicBool::new(false),
            told: AtomicBool::new(false),
            lines,
        })))
    }
}

impl Card {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// For the socket's thread: an access to the registers, and what follows from it. Returns whether the worker must be told that
    /// an interrupt waits for a timer; not more often than it looks at it.
    pub fn access(&self, access: impl FnOnce(&mut Device, u64) -> Effects) -> bool {
        let effects = access(&mut self.registers.lock(), self.now());
        if effects.contains(Effects::QUIESCE) {
            self.tx.enter().quiesce();
            self.rx.enter().quiesce();
            // A queue that has stopped keeps nobody waiting.
            self.room.tail_moved();
        }
        if effects.contains(Effects::TRANSMIT) {
            self.transmit.tail_moved();
        }
        if effects.contains(Effects::RECEIVE) {
            self.room.tail_moved();
        }
        if !effects.contains(Effects::INTERRUPT) {
            return false;
        }
        let after = self.settle();
        self.tell_line();
        after.is_some() && !self.told.swap(true, Ordering::Relaxed)
    }

    /// Interrupts the driver if it is time. Returns after how long to ask again.
    pub fn settle(&self) -> Option<Duration> {
        let now = self.now();
        let signal = self.interrupter.settle(now);
        match signal.raise {
            Some(Vector::Message) => {
                self.interrupts.signal(InterruptKind::Msi, 0);
            }
            Some(Vector::Line) => self.tell_line(),
            None => {}
        }
        signal.at.map(|at| Duration::from_nanos(at.saturating_sub(now)))
    }

    /// Asserts or deasserts the pin. It rises in either thread, and falls in the socket's.
    fn tell_line(&self) {
        loop {
            let asserted = self.interrupter.is_line_asserted();
            self.interrupts.set_line(asserted);
            // The last one to change the level must be the last one to tell it.
            if self.interrupter.is_line_asserted() == asserted {
                return;
            }
        }
    }

    /// For control: replaces the memory, once the bursts that use it are over.
    pub fn set_memory(&self, memory: &Arc<Table>) {
        let memory = Some(memory).filter(|memory| !memory.regions().is_empty());
        // Both or none: truncation is looked for in the memory of one.
        let set = self.tx.enter().set_memory(memory.cloned());
        if let Err(error) = &set {
            say!(self.lines, Error, "port {}: {error}; the card has no memory", self.name);
        }
        self.rx.enter().set_memory(memory.filter(|_| set.is_ok()).cloned());
        // There may be descriptors that could not be read before.
        self.transmit.tail_moved();
        self.room.tail_moved();
    }

    /// Sets the longest frame, in bytes.
    pub fn limit(&self, frame: usize) {
        self.tx.enter().limit(frame);
        self.rx.enter().limit(frame);
    }

    /// Counts a fault of the client.
    pub fn count_fault(&self) {
        // Counters have one writer at a time.
        let _queue = self.tx.enter();
        if let Some(counters) = self.counters[0].first() {
            counters.faults.add(1);
        }
    }

    /// A queue has stopped for a fault of its driver.
    #[cold]
    fn tell(&self, queue: &str, fault: ringroad_e1000::Fault) {
        say!(self.lines, Error, "port {} {queue} queue: {fault}", self.name);
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
        self.0.transmit.bell.want();
        // Control holds the queue. It wakes the worker when it has changed something, but may not have done so yet.
        self.0.tx.try_enter().is_some_and(|mut queue| queue.is_idle())
    }

    fn disable_notification(&self, _queue: usize) {
        self.0.transmit.bell.unwant();
    }

    fn takes(&self) -> Support {
        Support::VALID
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

    fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Poured {
        let poured = self.queue.fill(room, read);
        self.end(poured == Poured::Full);
        poured
    }
}
