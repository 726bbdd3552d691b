//! A guest's queues and what its device, the worker and control share of them.

use crate::{
    deaf::Deaf,
    gate::Gate,
    socket::{Lines, say},
    vhost_user::{Kick, Vring},
};
use parking_lot::Mutex;
use ringroad_frame::Counters;
use ringroad_net::{RxQueue, TxQueue, rss::Rss};
use ringroad_ring::Fault;
use std::sync::{
    Arc,
    atomic::{AtomicU16, AtomicUsize},
};
use vmm_sys_util::eventfd::EventFd;

/// A queue, if it runs, and its vring.
#[derive(Debug, Default)]
pub(in crate::vhost_user) struct Slot<Q> {
    pub queue: Option<Q>,
    pub vring: Vring,
    /// Watched by the worker; `None`: the frontend does not kick, and the worker polls forever.
    pub kick: Option<Kick>,
}

impl<Q> Slot<Q> {
    pub(super) fn new(vring: &Vring) -> Gate<Slot<Q>> {
        Gate::new(Slot { queue: None, vring: vring.clone(), kick: None })
    }

    /// Stops the queue for a fault of its driver.
    #[cold]
    pub(super) fn fail(&mut self, port: &Guest, vring: usize, base: u32, fault: Fault, counters: &Counters) {
        let name = &port.name;
        say!(port.lines, Error, "port {name} queue {vring}: {fault}; queue stopped, reset the device to continue");
        self.queue = None;
        counters.faults.add(1);
        self.vring.fail(Some(base));
    }
}

/// The queues of a guest. Receive queue 0 has vring 0, transmit queue 0 has vring 1, and so on. There is one more vring than these: the
/// control queue has the last one, or vring 2 of a driver without VIRTIO_NET_F_MQ.
pub(in crate::vhost_user) struct Guest {
    pub name: String,
    pub vrings: Vec<Vring>,
    pub rx: Vec<Gate<Slot<RxQueue>>>,
    pub tx: Vec<Gate<Slot<TxQueue>>>,
    pub rx_counters: Vec<Arc<Counters>>,
    pub tx_counters: Vec<Arc<Counters>>,
    /// Receive queues that run and that the driver uses, from queue 0 on without a gap.
    pub pairs: AtomicUsize,
    /// How frames are distributed among them, if the driver has set that (VIRTIO_NET_F_RSS).
    pub rss: Mutex<Option<Arc<Rss>>>,
    /// The offloads that the running receive queues take, as the bits of [`Support`](ringroad_frame::offload::Support).
    pub takes: AtomicU16,
    /// Length in bytes of the longest frame to and from it; 0 while its link is down.
    pub longest: AtomicUsize,
    /// Wakes the thread of the socket: the worker has found that the guest's memory is lost.
    pub attention: EventFd,
    pub lines: Lines,
    /// Which receive queues have stopped taking frames.
    pub deaf: Mutex<Vec<Deaf>>,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Guest").field("name", &self.name).finish_non_exhaustive()
    }
}
