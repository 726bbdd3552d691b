//! Virtqueues (virtio 1.3, 2.7 and 2.8): split and packed, device end and driver end. Used by the device and driver crates.
//!
//! Both ends work in bursts: take or add many chains, publish once. The device end turns the driver's descriptors into
//! [`Chain`]s of bounds-checked spans and reads each descriptor once. A driver error becomes a [`Fault`], after which the
//! queue is unusable until it is reset. Each end has a split and a packed type behind one enum ([`DeviceRing`],
//! [`DriverRing`]), matched once per burst.
#![forbid(unsafe_code)]
// A model's rings are not in guest memory and outlive no process.
#![cfg_attr(loom, allow(dead_code, unused_imports))]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo
    )
)]

mod chain;
mod device;
#[cfg_attr(
    not(test),
    expect(clippy::indexing_slicing, reason = "ids of chains in flight, as the lists of states and ids have them")
)]
mod driver;
mod fault;
#[cfg_attr(
    not(test),
    expect(clippy::indexing_slicing, reason = "indices into its own list, bounded by `wrap` and by `free`")
)]
mod ids;
mod inflight;
mod journal;
mod layout;
mod notify;
#[cfg_attr(
    not(test),
    expect(
        clippy::indexing_slicing,
        reason = "slots are masked by, wrapped at, or compared with the queue size for which the ring's areas were resolved"
    )
)]
mod packed;
mod rings;
#[cfg_attr(
    not(test),
    expect(
        clippy::indexing_slicing,
        reason = "slots are masked by, wrapped at, or compared with the queue size for which the ring's areas were resolved"
    )
)]
mod split;
mod tuning;
mod types;

pub use chain::{BURST, Chain, Chains};
pub use driver::{Buffer, DriverFault, Full, IndirectTables, Used};
pub use fault::Fault;
pub use inflight::Inflight;
pub use journal::{Journal, JournalKey, Resumed};
#[cfg(loom)]
pub use rings::model;
pub use rings::{DeviceRing, DriverRing};
pub use tuning::Tuning;
pub use types::{Addresses, Features, MAX_SIZE, SetupError, bits};
pub(crate) use types::{DESCRIPTOR, INDIRECT, NEXT, WRITE};
