//! The interface between a session and the device behind it. Implemented by `net.rs` (a port of the switch), by
//! `vsock/server.rs`, and by programs with devices of their own.

use super::{BackendChannel, Kick, Vring};
use crate::notes;
use ringroad_mem::Table;
use ringroad_ring::{Addresses, DeviceRing, Features, Inflight, Journal, SetupError};
use std::sync::Arc;

/// The setup of a vring, as the frontend has described it.
#[derive(Debug)]
pub struct Ring {
    /// The guest's memory.
    pub memory: Arc<Table>,
    /// The acknowledged feature bits.
    pub acked: u64,
    /// Entries.
    pub size: u32,
    /// Where its areas are.
    pub addresses: Addresses,
    /// Where it starts (SET_VRING_BASE).
    pub base: u32,
    /// Records its position, for after a crash of this process.
    pub journal: Journal,
    /// Tracks buffers in flight, for the next back end.
    pub inflight: Inflight,
    /// Becomes readable when the driver has made buffers available; `None` if the frontend does not kick.
    pub kick: Option<Kick>,
}

impl Ring {
    /// Returns the device end of the ring, and the base at which it starts. `name` and `index` are for the log.
    ///
    /// # Errors
    /// Size, base, addresses or the inflight region are invalid.
    pub fn resume(self, name: &str, index: usize) -> Result<(DeviceRing, u32), SetupError> {
        let Ring { memory, acked, size, addresses, base, journal, inflight, .. } = self;
        let features = Features::negotiated(acked);
        let (mut ring, how) = DeviceRing::resume(&memory, features, size, addresses, base, journal, inflight)?;
        notes::say(name, index, base, how);
        let base = ring.base();
        Ok((ring, base))
    }
}

/// A device: a set of vrings that start and stop. Cheap to clone: each connection has its own handle.
///
/// All calls come from the thread of its socket. Buffers are taken and returned by a thread of the device's own.
pub trait VhostDevice: Clone + Send + 'static {
    /// Returns its name in log lines, such as "port vm1".
    fn name(&self) -> &str;

    /// Returns the feature bits that it offers.
    fn offer(&self) -> u64;

    /// Returns its vrings, always the same.
    fn vrings(&self) -> &[Vring];

    /// Returns the reply to GET_QUEUE_NUM for frontends that do not read the configuration space: the number of queue pairs. The
    /// request (MQ) is offered only if that is more than 1, as User-Mode Linux would take 1 for the number of vrings.
    fn queue_num(&self) -> u64 {
        1
    }

    /// Returns the configuration space.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Returns the channel on which it reports changes of its configuration space; `None` if that never changes.
    fn backend_channel(&self) -> Option<&BackendChannel> {
        None
    }

    /// Starts a vring and returns the base at which it actually starts. Its driver is notified afterwards.
    ///
    /// # Errors
    /// The reason why it cannot start, for the log.
    fn start(&self, index: usize, ring: Ring) -> Result<u32, String>;

    /// Stops a vring, with nothing in flight, and returns the base at which it can resume. When it returns, nothing refers to
    /// the guest's memory any more.
    fn stop(&self, index: usize) -> u32;

    /// Counts a fault of the frontend; of one vring, if given.
    fn count_fault(&self, _index: Option<usize>) {}

    /// The driver starts over, or has disconnected. All vrings are stopped.
    fn reset(&self) {}

    /// The frontend has disconnected.
    fn disconnected(&self) {}
}
