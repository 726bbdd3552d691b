//! The interface between a session and the device behind it. Implemented by `net.rs`, a port of the switch, and
//! `vsock/guest.rs`.

use super::{Call, Kick};
use ringroad_mem::Table;
use ringroad_ring::{Addresses, Inflight};
use std::sync::Arc;

/// The setup of a vring, as the frontend has described it.
pub(crate) struct Ring {
    pub memory: Arc<Table>,
    /// The acknowledged feature bits.
    pub acked: u64,
    pub size: u32,
    pub addresses: Addresses,
    pub base: u32,
    /// Tracks buffers in flight, for the next back end.
    pub inflight: Inflight,
}

/// A device: a set of vrings that start and stop. Cheap to clone: each connection has its own handle.
pub(crate) trait Device: Clone + Send + 'static {
    /// Returns its name in log lines, such as "port vm1".
    fn name(&self) -> &str;

    /// Returns the feature bits that it offers.
    fn offer(&self) -> u64;

    /// Returns the reply to GET_QUEUE_NUM, offered only if it is more than 1. It counts pairs for QEMU and DPDK but vrings
    /// for User-Mode Linux, which fails if the reply is 1.
    fn queue_num(&self) -> u64;

    /// Returns the number of vrings.
    fn vrings(&self) -> usize;

    /// Returns the configuration space.
    fn config(&self) -> Vec<u8>;

    /// Starts a vring and returns the base at which it actually starts, or the reason why it cannot start. `kick`: `None` if
    /// the frontend does not kick.
    fn start(&self, index: usize, ring: Ring, kick: Option<&Kick>) -> Result<u32, String>;

    /// Stops a vring, with nothing in flight, and returns the base at which it can resume.
    fn stop(&self, index: usize, kick: Option<&Kick>) -> u32;

    /// Clears the recorded position of a stopped vring: the frontend knows it, or the driver starts over.
    fn end_notes(&self, index: usize);

    /// Sets the call or err descriptor of a vring. If the queue runs, the driver is notified once, as a notification to the
    /// previous descriptor may have been missed.
    fn set_fd(&self, index: usize, call: Option<Call>, err: bool);

    /// Counts a fault of the frontend, and signals the vring's err descriptor.
    fn count_fault(&self, index: Option<usize>);

    /// Signals the err descriptor of a vring.
    fn signal_err(&self, index: usize);

    /// Returns whether a driver's fault has stopped a vring.
    fn has_fault(&self, index: usize) -> bool;

    /// The driver starts over, or has disconnected. All vrings are stopped.
    fn reset(&self);

    /// The frontend has disconnected.
    fn forget(&self);
}
