//! What a session needs of the device behind it. There are two: `net.rs`, a port of the switch, and vsock.

use super::{Call, Kick};
use ringroad_mem::Table;
use ringroad_ring::{Addresses, Inflight};
use std::sync::Arc;

/// A vring as its frontend has described it.
pub(crate) struct Ring {
    pub memory: Arc<Table>,
    /// The feature bits that the driver has acknowledged.
    pub acked: u64,
    pub size: u32,
    pub addresses: Addresses,
    pub base: u32,
    /// Where its buffers in flight are noted for a successor of any make.
    pub inflight: Inflight,
}

/// A device: vrings that start and stop. Cheap to clone: each connection has its own handle.
pub(crate) trait Device: Clone + Send + 'static {
    /// Its name in log lines: "port vm1".
    fn name(&self) -> &str;

    /// The feature bits that it offers.
    fn offer(&self) -> u64;

    /// The answer to GET_QUEUE_NUM, offered only if it is more than 1. It counts pairs for QEMU and DPDK but vrings for
    /// User-Mode Linux, which gives up when it is told 1.
    fn queue_num(&self) -> u64;

    /// How many vrings it has.
    fn vrings(&self) -> usize;

    /// The configuration space.
    fn config(&self) -> Vec<u8>;

    /// Starts a vring, or says why it cannot. `kick`: none, if the frontend will not kick. Returns the base that it really
    /// starts at.
    fn start(&self, index: usize, ring: Ring, kick: Option<&Kick>) -> Result<u32, String>;

    /// Stops a vring, with nothing in flight; returns the base where it can go on.
    fn stop(&self, index: usize, kick: Option<&Kick>) -> u32;

    /// The frontend knows where a vring that has stopped is, or begins anew: notes of it mean nothing any more.
    fn end_notes(&self, index: usize);

    /// Sets a vring's call or err descriptor. A queue that runs notifies its driver once: the one that is replaced may have
    /// owed it that.
    fn set_fd(&self, index: usize, call: Option<Call>, err: bool);

    /// Counts what the frontend has done wrong, and says so on the vring's err descriptor.
    fn count_fault(&self, index: Option<usize>);

    /// Tells the frontend of a vring that it has stopped.
    fn signal_err(&self, index: usize);

    /// Whether a fault of the driver has stopped a vring.
    fn has_fault(&self, index: usize) -> bool;

    /// The driver begins anew, or is gone. All vrings are stopped.
    fn reset(&self);

    /// The frontend is gone.
    fn forget(&self);
}
