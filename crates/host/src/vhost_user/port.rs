//! A guest as a port of the switch: its queues, where they are running, behind a gate each.

use super::{
    Call,
    limits::{Lines, say},
};
use crate::gate::{Gate, Lease};
use parking_lot::MutexGuard;
use ringroad_frame::{Burst, Counters, Sink, Source};
use ringroad_mem::{Span, Table};
use ringroad_net::{RxQueue, TxQueue};
use ringroad_ring::{Fault, Tuning};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use vmm_sys_util::eventfd::EventFd;

/// A queue and the descriptors that go with it.
pub(crate) struct Slot<Q> {
    pub queue: Option<Q>,
    /// Where to go on when it is started again.
    pub base: u32,
    /// Notifies the driver.
    pub call: Option<Call>,
    /// Tells the frontend that the queue has stopped by a fault.
    pub err: Option<Call>,
    /// The fault that stopped it.
    pub fault: Option<Fault>,
    /// The frontend will not kick: its worker has to look by itself, for ever.
    pub no_kick: bool,
}

impl<Q> Default for Slot<Q> {
    fn default() -> Self {
        Slot { queue: None, base: 0, call: None, err: None, fault: None, no_kick: false }
    }
}

fn signal(call: Option<&Call>) {
    if let Some(call) = call {
        call.signal();
    }
}

impl<Q> Slot<Q> {
    /// Notifies the driver whether it wants that or not: a device that died between giving buffers back and saying so, or
    /// a descriptor that has been replaced, may owe it one.
    pub(crate) fn notify(&self) {
        signal(self.call.as_ref());
    }

    /// Stops the queue for a fault of its driver.
    #[cold]
    fn fail(&mut self, port: &VhostPort, vring: usize, base: Option<u32>, fault: Fault, counters: &Counters) {
        let name = &port.name;
        say!(port.lines, Error, "port {name} queue {vring}: {fault}; queue stopped, reset the device to continue");
        self.base = base.unwrap_or(self.base);
        self.queue = None;
        self.fault = Some(fault);
        counters.faults.add(1);
        signal(self.err.as_ref());
    }
}

/// A guest, connected or not.
pub struct VhostPort {
    name: String,
    pub(crate) rx: Vec<Gate<Slot<RxQueue>>>,
    pub(crate) tx: Vec<Gate<Slot<TxQueue>>>,
    pub(crate) rx_counters: Vec<Arc<Counters>>,
    pub(crate) tx_counters: Vec<Arc<Counters>>,
    /// Pairs of queues of which the receive queue runs: 0 up to this one.
    pub(crate) pairs_running: AtomicUsize,
    /// Wakes the thread of its socket: the worker has found that the guest's memory is gone.
    pub(crate) attention: EventFd,
    pub(super) lines: Lines,
}

impl VhostPort {
    pub(crate) fn new(name: &str, queue_pairs: u16, attention: EventFd, lines: Lines) -> VhostPort {
        VhostPort {
            name: name.to_owned(),
            rx: (0..queue_pairs).map(|_| Gate::default()).collect(),
            tx: (0..queue_pairs).map(|_| Gate::default()).collect(),
            rx_counters: (0..queue_pairs).map(|_| Arc::default()).collect(),
            tx_counters: (0..queue_pairs).map(|_| Arc::default()).collect(),
            pairs_running: AtomicUsize::new(0),
            attention,
            lines,
        }
    }

    /// Its name in the configuration.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn lease(&self, index: usize) -> Option<VhostLease> {
        self.tx.get(index)?.try_lease()
    }

    #[inline]
    pub(crate) fn is_wanted(&self, index: usize) -> bool {
        self.tx.get(index).is_some_and(Gate::is_wanted)
    }

    #[inline]
    pub(crate) fn source<'a>(&'a self, index: usize, slot: &'a mut VhostLease) -> Option<VhostSource<'a>> {
        let counters = self.tx_counters.get(index)?;
        slot.queue.is_some().then_some(VhostSource { slot, counters, port: self, index })
    }

    #[inline]
    pub(crate) fn sink(&self, hint: usize, frames: usize) -> Option<VhostSink<'_>> {
        let pairs = self.pairs_running.load(Ordering::Relaxed);
        // A division takes as long as a frame.
        let index = if hint < pairs { hint } else { hint.checked_rem(pairs).unwrap_or(0) };
        let counters = self.rx_counters.get(index)?;
        let Some(slot) = self.rx.get(index)?.try_enter() else {
            counters.busy.add(frames as u64);
            return None;
        };
        if slot.queue.is_none() {
            counters.stopped.add(frames as u64);
            return None;
        }
        Some(VhostSink { slot, counters, port: self, index })
    }

    /// Has all queues that run do this, one after the other, each between two bursts.
    pub(crate) fn tune(&self, tuning: Tuning) {
        for gate in &self.rx {
            gate.enter().queue.iter_mut().for_each(|queue| queue.tune(tuning));
        }
        for gate in &self.tx {
            gate.enter().queue.iter_mut().for_each(|queue| queue.tune(tuning));
        }
    }

    /// Counts what the frontend has done wrong, and says so on the vring's err descriptor.
    pub(crate) fn count_fault(&self, vring: Option<usize>) {
        // Counters have one writer at a time: whoever is in the queue's gate.
        fn count<Q>(gate: Option<&Gate<Slot<Q>>>, counters: Option<&Arc<Counters>>) -> Option<Call> {
            let slot = gate?.enter();
            counters?.faults.add(1);
            slot.err.clone()
        }
        let err = match vring {
            Some(vring) if vring.is_multiple_of(2) => count(self.rx.get(vring / 2), self.rx_counters.get(vring / 2)),
            Some(vring) => count(self.tx.get(vring / 2), self.tx_counters.get(vring / 2)),
            None => {
                count(self.tx.first(), self.tx_counters.first());
                None
            }
        };
        signal(err.as_ref());
    }

    /// Tells the frontend of a vring that it has stopped.
    pub(crate) fn signal_err(&self, vring: usize) {
        fn err<Q>(gate: Option<&Gate<Slot<Q>>>) -> Option<Call> {
            gate?.enter().err.clone()
        }
        let even = vring.is_multiple_of(2);
        signal(if even { err(self.rx.get(vring / 2)) } else { err(self.tx.get(vring / 2)) }.as_ref());
    }

    /// Whether a fault of the driver has stopped a vring.
    pub(crate) fn has_fault(&self, vring: usize) -> bool {
        fn fault<Q>(gate: Option<&Gate<Slot<Q>>>) -> bool {
            gate.is_some_and(|gate| gate.enter().fault.is_some())
        }
        if vring.is_multiple_of(2) { fault(self.rx.get(vring / 2)) } else { fault(self.tx.get(vring / 2)) }
    }

    /// Notifies the driver of what it was not sure to want to be notified of. `false`: control is in; once more, later.
    pub(crate) fn settle(&self) -> bool {
        fn settle<Q>(gate: &Gate<Slot<Q>>, counters: &Counters, wants: impl Fn(&mut Q) -> bool) -> bool {
            let Some(mut slot) = gate.try_enter() else { return false };
            if slot.queue.as_mut().is_some_and(wants) {
                slot.notify();
                counters.notifications.add(1);
            }
            true
        }
        let mut settled = true;
        for (gate, counters) in self.rx.iter().zip(&self.rx_counters) {
            settled &= settle(gate, counters, |queue| queue.wants_notification(true));
        }
        for (gate, counters) in self.tx.iter().zip(&self.tx_counters) {
            settled &= settle(gate, counters, |queue| queue.wants_notification(true));
        }
        settled
    }

    /// Asks for a notification when the driver sends. `true`: the worker may leave the queue alone until then.
    pub(crate) fn sleep(&self, index: usize) -> bool {
        let Some(gate) = self.tx.get(index) else { return true };
        // Control is in: it will wake the worker itself if it starts something, but has perhaps not taken it away yet.
        let Some(mut slot) = gate.try_enter() else { return false };
        let no_kick = slot.no_kick;
        !slot.queue.as_mut().is_some_and(|queue| no_kick || queue.enable_notification())
    }

    /// Asks for no more notifications: the worker looks by itself.
    pub(crate) fn awake(&self, index: usize) {
        if let Some(mut slot) = self.tx.get(index).and_then(Gate::try_enter)
            && let Some(queue) = &mut slot.queue
        {
            queue.disable_notification();
        }
    }

    /// Stops all queues, in whatever state they are, and has the frontend disconnected: our own code has panicked in one.
    #[cold]
    pub(crate) fn abandon(&self) {
        fn abandon<Q>(gate: &Gate<Slot<Q>>) {
            // Control is in: it finds the connection at its end next.
            let Some(mut slot) = gate.try_enter() else { return };
            if slot.queue.take().is_some() {
                signal(slot.err.as_ref());
            }
        }
        self.rx.iter().for_each(abandon);
        self.tx.iter().for_each(abandon);
        let _ = self.attention.write(1);
    }

    /// Stops all queues if the frontend has truncated the guest's memory. `false`: control is in at one of them, where nobody
    /// waits for it; once more, later.
    pub(crate) fn check_memory(&self) -> bool {
        let (mut lost, mut all) = (false, true);
        for (gate, counters) in self.tx.iter().zip(&self.tx_counters) {
            stop_lost(gate, counters, &mut lost, &mut all, |queue| queue.memory());
        }
        for (gate, counters) in self.rx.iter().zip(&self.rx_counters) {
            stop_lost(gate, counters, &mut lost, &mut all, |queue| queue.memory());
        }
        if lost {
            let name = &self.name;
            say!(
                self.lines,
                Error,
                "port {name}: the frontend has truncated the guest's memory; port stopped and disconnected"
            );
            let _ = self.attention.write(1);
        }
        all
    }
}

fn stop_lost<Q>(
    gate: &Gate<Slot<Q>>,
    counters: &Counters,
    lost: &mut bool,
    all: &mut bool,
    memory: impl Fn(&Q) -> &Arc<Table>,
) {
    let Some(mut slot) = gate.try_enter() else {
        *all = false;
        return;
    };
    if slot.queue.as_ref().is_some_and(|queue| memory(queue).is_lost()) {
        slot.queue = None;
        // One fault for the port, however many of its queues lay there.
        if !std::mem::replace(lost, true) {
            counters.faults.add(1);
        }
        signal(slot.err.as_ref());
    }
}

/// Exclusive use of a guest's transmit queue.
pub(crate) type VhostLease = Lease<Slot<TxQueue>>;

/// The same for one burst.
pub struct VhostSource<'a> {
    slot: &'a mut Slot<TxQueue>,
    counters: &'a Counters,
    port: &'a VhostPort,
    index: usize,
}

impl VhostSource<'_> {
    /// Notifies the driver of what it has got back, if it surely wants that.
    #[inline]
    fn notify(&mut self) {
        if self.slot.queue.as_mut().is_some_and(|queue| queue.wants_notification(false)) {
            self.slot.notify();
            self.counters.notifications.add(1);
        }
    }
}

impl Source for VhostSource<'_> {
    #[inline]
    fn take(&mut self, burst: &mut Burst) -> usize {
        let Some(queue) = &mut self.slot.queue else { return 0 };
        match queue.take(burst) {
            // What was given back late is published now.
            Ok(0) => {
                self.notify();
                0
            }
            Ok(taken) => taken,
            // Not the driver's fault: what it wrote is gone. The worker stops the port at its next look at memory.
            Err(_) if queue.memory().is_lost() => {
                burst.clear();
                0
            }
            Err(fault) => {
                let base = queue.base();
                self.slot.fail(self.port, 2 * self.index + 1, Some(base), fault, self.counters);
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
}

/// Exclusive use of a guest's receive queue for one burst.
pub struct VhostSink<'a> {
    slot: MutexGuard<'a, Slot<RxQueue>>,
    counters: &'a Counters,
    port: &'a VhostPort,
    index: usize,
}

impl VhostSink<'_> {
    /// Notifies the driver of what its queue has got, or stops the queue. `lost`: frames that were to go there.
    #[inline]
    fn settle<T>(&mut self, result: Result<T, Fault>, lost: usize) -> Option<T> {
        let slot = &mut *self.slot;
        let queue = slot.queue.as_mut()?;
        let counters = self.counters;
        match result {
            Ok(done) => {
                if queue.wants_notification(false) {
                    slot.notify();
                    counters.notifications.add(1);
                }
                return Some(done);
            }
            // Not the driver's fault: what it wrote is gone. The worker stops the port at its next look at memory.
            Err(_) if queue.memory().is_lost() => {}
            Err(fault) => {
                let base = queue.base();
                slot.fail(self.port, 2 * self.index, Some(base), fault, counters);
            }
        }
        counters.stopped.add(lost as u64);
        None
    }
}

impl Sink for VhostSink<'_> {
    #[inline]
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let Some(queue) = &mut self.slot.queue else { return 0 };
        let result = queue.put(burst, which);
        self.settle(result, which.len()).unwrap_or(0)
    }

    fn fill(&mut self, room: usize, read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Option<usize> {
        let result = self.slot.queue.as_mut()?.fill(room, read);
        self.settle(result, 0).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::Limits;
    use std::{sync::mpsc, thread, time::Duration};

    /// A control thread can be in a gate for as long as the scheduler likes: the worker looks at memory all the same.
    #[test]
    fn nobody_waits_for_control_to_look_at_memory() {
        let attention = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
        let port = VhostPort::new("test", 2, attention, Lines::new("port test", Limits::default().lines));
        assert!(port.check_memory());
        thread::scope(|scope| {
            let _inside = port.rx.last().map(Gate::enter);
            let (sender, looked) = mpsc::channel();
            let port = &port;
            scope.spawn(move || sender.send(port.check_memory()));
            assert_eq!(looked.recv_timeout(Duration::from_secs(5)), Ok(false), "later, and at once");
        });
        assert!(port.check_memory());
    }
}
