//! A guest as a port of the switch: its queues, those that run, behind a gate each. Made by `net.rs`.

mod burst;
mod guest;

use super::Vring;
use crate::{
    deaf::{Deaf, Said},
    gate::Gate,
    port::{PortKind, PortSettings},
    socket::{Lines, say},
};
pub use burst::{VhostLease, VhostSink, VhostSource};
use guest::Guest;
pub(super) use guest::Slot;
use parking_lot::Mutex;
use ringroad_frame::{BURST, Burst, Counters, Flow, offload::Support};
use ringroad_mem::Table;
use ringroad_net::{Coalesce, Notice};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicUsize, Ordering},
    },
    time::Duration,
};
use vmm_sys_util::eventfd::EventFd;

/// A guest as a port, connected or not. Cheap to clone: its device shares it with the worker.
#[derive(Clone, Debug)]
pub struct VhostPort(pub(super) Arc<Guest>);

impl VhostPort {
    pub(super) fn new(name: &str, queue_pairs: u16, attention: EventFd, lines: Lines) -> VhostPort {
        let vrings: Vec<Vring> = (0..=2 * queue_pairs).map(|_| Vring::default()).collect();
        let pairs = vrings.as_chunks::<2>().0;
        VhostPort(Arc::new(Guest {
            name: name.to_owned(),
            rx: pairs.iter().map(|[rx, _]| Slot::new(rx)).collect(),
            tx: pairs.iter().map(|[_, tx]| Slot::new(tx)).collect(),
            vrings,
            rx_counters: (0..queue_pairs).map(|_| Arc::default()).collect(),
            tx_counters: (0..queue_pairs).map(|_| Arc::default()).collect(),
            pairs: AtomicUsize::new(0),
            rss: Mutex::default(),
            takes: AtomicU16::new(0),
            longest: AtomicUsize::new(0),
            attention,
            lines,
            deaf: Mutex::new(vec![Deaf::default(); queue_pairs.into()]),
        }))
    }

    /// Returns the length in bytes of the longest frame to and from the guest. To be applied to a queue that starts within its gate.
    pub(super) fn longest(&self) -> usize {
        self.0.longest.load(Ordering::Relaxed)
    }

    /// Sets that, for all queues. 0: the link is down.
    pub(super) fn limit(&self, longest: usize) {
        self.0.longest.store(longest, Ordering::Relaxed);
        for gate in &self.0.rx {
            gate.enter().queue.iter_mut().for_each(|queue| queue.limit(longest));
        }
        for gate in &self.0.tx {
            gate.enter().queue.iter_mut().for_each(|queue| queue.limit(longest));
        }
    }

    /// Counts a fault of the frontend.
    pub(super) fn count_fault(&self, vring: Option<usize>) {
        let Guest { rx, tx, rx_counters, tx_counters, .. } = &*self.0;
        // Counters have one writer at a time: the holder of the queue's gate.
        fn count<Q>(gate: Option<&Gate<Slot<Q>>>, counters: Option<&Arc<Counters>>) {
            let _slot = gate.map(Gate::enter);
            counters.inspect(|counters| counters.faults.add(1));
        }
        match vring.filter(|vring| vring / 2 < rx.len()) {
            Some(vring) if vring.is_multiple_of(2) => count(rx.get(vring / 2), rx_counters.get(vring / 2)),
            Some(vring) => count(tx.get(vring / 2), tx_counters.get(vring / 2)),
            None => count(tx.first(), tx_counters.first()),
        }
    }
}

impl PortKind for VhostPort {
    type Lease = VhostLease;
    type Source<'a> = VhostSource<'a>;
    type Sink<'a> = VhostSink<'a>;

    fn name(&self) -> &str {
        &self.0.name
    }

    fn received(&self) -> &[Arc<Counters>] {
        &self.0.tx_counters
    }

    fn sent(&self) -> &[Arc<Counters>] {
        &self.0.rx_counters
    }

    fn lease(&self, index: usize) -> Option<VhostLease> {
        self.0.tx.get(index)?.try_lease().map(VhostLease)
    }

    #[inline]
    fn is_wanted(&self, index: usize) -> bool {
        self.0.tx.get(index).is_some_and(Gate::is_wanted)
    }

    #[inline]
    fn source<'a>(&'a self, index: usize, VhostLease(slot): &'a mut VhostLease) -> Option<VhostSource<'a>> {
        let counters = self.0.tx_counters.get(index)?;
        slot.queue.is_some().then_some(VhostSource { slot, counters, port: &self.0, index })
    }

    #[inline]
    fn sink(&self, hint: usize, frames: usize) -> Option<VhostSink<'_>> {
        let port = &*self.0;
        let pairs = port.pairs.load(Ordering::Relaxed);
        // A division takes as long as a frame.
        let index = if hint < pairs { hint } else { hint.checked_rem(pairs).unwrap_or(0) };
        let counters = port.rx_counters.get(index)?;
        let Some(slot) = port.rx.get(index)?.try_enter() else {
            counters.busy.add(frames as u64);
            return None;
        };
        // The guest may have reduced the number meanwhile; that command then waits for this gate.
        if index > 0 && index >= port.pairs.load(Ordering::Relaxed) {
            drop(slot);
            return self.sink(0, frames);
        }
        if slot.queue.is_none() {
            counters.stopped.add(frames as u64);
            return None;
        }
        Some(VhostSink { slot, counters, port, index })
    }

    #[inline]
    fn queues(&self) -> usize {
        self.0.pairs.load(Ordering::Relaxed)
    }

    fn steer(&self, burst: &Burst, which: &[u8], queues: &mut [u8; BURST]) -> bool {
        // While control replaces it, the switch chooses: the worker does not wait.
        let Some(rss) = self.0.rss.try_lock().and_then(|rss| rss.clone()) else { return false };
        for &index in which {
            if let Some(place) = queues.get_mut(usize::from(index)) {
                let flow = Flow::read(burst, index.into());
                *place = u8::try_from(rss.queue(flow.as_ref())).unwrap_or_default();
            }
        }
        true
    }

    fn takes(&self) -> Support {
        Support::from_bits_truncate(self.0.takes.load(Ordering::Relaxed))
    }

    fn settle(&self, now: Duration) -> Option<Duration> {
        fn settle<Q>(gate: &Gate<Slot<Q>>, counters: &Counters, ask: impl Fn(&mut Q) -> Notice) -> Option<Duration> {
            // Control holds the queue: to be tried again.
            let Some(mut slot) = gate.try_enter() else { return Some(Duration::ZERO) };
            match ask(slot.queue.as_mut()?) {
                Notice::At(due) => return Some(due),
                Notice::Not => {}
                Notice::Now => {
                    slot.vring.notify();
                    counters.notifications.add(1);
                }
            }
            None
        }
        let Guest { rx, tx, rx_counters, tx_counters, .. } = &*self.0;
        let rx = rx.iter().zip(rx_counters);
        let tx = tx.iter().zip(tx_counters);
        let rx = rx.filter_map(|(gate, counters)| settle(gate, counters, |queue| queue.settle(now)));
        let tx = tx.filter_map(|(gate, counters)| settle(gate, counters, |queue| queue.settle(now)));
        rx.chain(tx).min()
    }

    fn enable_room(&self) -> bool {
        let mut asked = false;
        for gate in &self.0.rx {
            // Control holds the queue: to be tried again.
            let Some(mut slot) = gate.try_enter() else { return false };
            let kicks = slot.kick.is_some();
            if let Some(queue) = slot.queue.as_mut().filter(|queue| queue.is_short()) {
                if !kicks || queue.enable_notification() {
                    return false;
                }
                asked = true;
            }
        }
        asked
    }

    fn disable_room(&self) {
        for gate in &self.0.rx {
            // Else control holds the queue, which starts without notifications.
            if let Some(mut slot) = gate.try_enter()
                && let Some(queue) = &mut slot.queue
            {
                queue.disable_notification();
            }
        }
    }

    fn enable_notification(&self, index: usize) -> bool {
        let Some(gate) = self.0.tx.get(index) else { return true };
        // Control holds the queue. It wakes the worker if it starts the queue, but may not have stopped it yet.
        let Some(mut slot) = gate.try_enter() else { return false };
        let kicks = slot.kick.is_some();
        !slot.queue.as_mut().is_some_and(|queue| !kicks || queue.enable_notification())
    }

    fn disable_notification(&self, index: usize) {
        if let Some(mut slot) = self.0.tx.get(index).and_then(Gate::try_enter)
            && let Some(queue) = &mut slot.queue
        {
            queue.disable_notification();
        }
    }

    fn tune(&self, settings: &PortSettings) {
        for (gate, sent) in self.0.rx.iter().zip(&self.0.tx_counters) {
            if let Some(queue) = &mut gate.enter().queue {
                queue.tune(settings.tuning);
                queue.acknowledge(settings.interrupt_delay, sent.clone());
            }
        }
        for gate in &self.0.tx {
            if let Some(queue) = &mut gate.enter().queue {
                queue.tune(settings.tuning);
                queue.moderate(Coalesce::delayed(settings.interrupt_delay));
            }
        }
    }

    fn check_memory(&self) -> bool {
        let Guest { name, rx, tx, rx_counters, tx_counters, lines, attention, .. } = &*self.0;
        let (mut lost, mut all) = (false, true);
        for (gate, counters) in tx.iter().zip(tx_counters) {
            stop_lost(gate, counters, &mut lost, &mut all, |queue| queue.memory());
        }
        for (gate, counters) in rx.iter().zip(rx_counters) {
            stop_lost(gate, counters, &mut lost, &mut all, |queue| queue.memory());
        }
        if lost {
            say!(
                lines,
                Error,
                "port {name}: the frontend has truncated the guest's memory; port stopped and disconnected"
            );
            let _ = attention.write(1);
        }
        all
    }

    /// Logs which queues have stopped taking frames, and which take some again.
    fn tick(&self, now: u32) {
        let Guest { name, rx_counters, deaf, .. } = &*self.0;
        for (queue, (deaf, counters)) in deaf.lock().iter_mut().zip(rx_counters).enumerate() {
            let vring = 2 * queue;
            match deaf.look(now, &counters.snapshot()) {
                None => {}
                Some(Said::Deaf { seconds, dropped }) => log::warn!(
                    "port {name} queue {vring}: the guest has taken no frame for {seconds} s, and {dropped} were dropped as \
                     its ring is full; see whether it runs, and whether its interface is up"
                ),
                Some(Said::Recovered { dropped }) => log::info!(
                    "port {name} queue {vring}: the guest takes frames again; {dropped} were dropped meanwhile"
                ),
            }
        }
    }

    /// Stops all queues in whatever state they are, and disconnects the frontend.
    #[cold]
    fn abandon(&self) {
        fn abandon<Q>(gate: &Gate<Slot<Q>>) {
            // If control holds the queue, it is about to learn that the connection has ended.
            let Some(mut slot) = gate.try_enter() else { return };
            if slot.queue.take().is_some() {
                slot.vring.signal_err();
            }
        }
        self.0.rx.iter().for_each(abandon);
        self.0.tx.iter().for_each(abandon);
        let _ = self.0.attention.write(1);
    }
}

/// Stops a queue whose memory is lost. Clears `all` if control holds it, for which the worker does not wait.
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
        // One fault for the port, however many of its queues were in that memory.
        if !std::mem::replace(lost, true) {
            counters.faults.add(1);
        }
        slot.vring.signal_err();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::Limits;
    use std::{sync::mpsc, thread, time::Duration};

    /// A control thread can hold a gate for as long as the scheduler likes: the worker checks memory nevertheless.
    #[test]
    fn the_worker_does_not_wait_for_control_to_check_memory() {
        let attention = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
        let port = VhostPort::new("test", 2, attention, Lines::new("port test", Limits::default().lines));
        assert!(port.check_memory());
        thread::scope(|scope| {
            let _inside = port.0.rx.last().map(Gate::enter);
            let (sender, checked) = mpsc::channel();
            let port = &port;
            scope.spawn(move || sender.send(port.check_memory()));
            assert_eq!(checked.recv_timeout(Duration::from_secs(5)), Ok(false), "later, and at once");
        });
        assert!(port.check_memory());
    }
}
