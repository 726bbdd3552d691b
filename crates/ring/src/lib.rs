//! Virtqueues (virtio 1.3, 2.7 and 2.8), split and packed, device and driver end.
//!
//! Both ends work in bursts: take or add many, publish once. The device end turns what the driver wrote into [`Chain`]s of
//! checked spans, each descriptor read once; what is wrong becomes a [`Fault`] and the queue is of no use until it is
//! reset. The layouts are two types behind one enum ([`DeviceRing`], [`DriverRing`]), chosen once per burst.
#![forbid(unsafe_code)]
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
    expect(
        clippy::indexing_slicing,
        reason = "places in its own list of ids, which `wrap` keeps inside; at most `free` of them"
    )
)]
mod driver;
#[cfg(not(loom))]
mod inflight;
mod journal;
mod notify;
#[cfg_attr(
    not(test),
    expect(
        clippy::indexing_slicing,
        reason = "slots are masked by, wrapped at, or compared with the size for which a ring's areas were resolved whole"
    )
)]
pub mod packed;
#[cfg_attr(
    not(test),
    expect(
        clippy::indexing_slicing,
        reason = "slots are masked by, wrapped at, or compared with the size for which a ring's areas were resolved whole"
    )
)]
pub mod split;
mod tuning;

pub use chain::{BURST, Chain, Chains, Fault};
pub use device::DeviceRing;
#[cfg(not(loom))]
pub use driver::IndirectTables;
pub use driver::{Buffer, DriverFault, DriverRing, Full, Used};
#[cfg(not(loom))]
pub use inflight::Inflight;
pub use journal::{Journal, JournalKey, Resumed};
pub use tuning::Tuning;

/// What of a ring's behaviour was negotiated. The names are those of the feature bits (virtio 1.3, 6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// VIRTIO_F_RING_PACKED: the packed layout.
    pub packed: bool,
    /// VIRTIO_F_INDIRECT_DESC: descriptors may refer to tables of descriptors.
    pub indirect: bool,
    /// VIRTIO_F_EVENT_IDX: notifications are wanted from a certain index on, not just on or off.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER: the device uses buffers in the order in which they were made available.
    pub in_order: bool,
}

/// Feature bits that all device types share, by their names in the specification (6), and the one of vhost-user.
pub mod bits {
    /// Descriptors may refer to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications from an index on.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user: there are protocol features (not a virtio feature).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.0 or later.
    pub const VERSION_1: u64 = 1 << 32;
    /// The packed layout.
    pub const RING_PACKED: u64 = 1 << 34;
    /// Buffers are used in the order in which they were made available.
    pub const IN_ORDER: u64 = 1 << 35;
}

impl Features {
    /// What of negotiated feature bits concerns the rings.
    pub fn negotiated(acked: u64) -> Features {
        Features {
            packed: acked & bits::RING_PACKED != 0,
            indirect: acked & bits::INDIRECT_DESC != 0,
            event_idx: acked & bits::EVENT_IDX != 0,
            in_order: acked & bits::IN_ORDER != 0,
        }
    }
}

/// Where a ring lies, as the frontend's addresses: what SET_VRING_ADDR carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Descriptor table or descriptor ring ("descriptor area").
    pub descriptor: u64,
    /// Available ring or driver event suppression structure ("driver area").
    pub driver: u64,
    /// Used ring or device event suppression structure ("device area").
    pub device: u64,
}

/// Why a ring cannot be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Split: a power of two up to 32768. Packed: anything from 1 to 32768.
    #[error("queue size {size} is not possible: {}", if *packed { "expected 1 to 32768" } else { "expected a power of two up to 32768" })]
    Size {
        /// What was asked for.
        size: u32,
        /// In which layout.
        packed: bool,
    },
    /// A position to start at that the ring does not have.
    #[error("base {base:#x} lies outside a ring of {size} entries")]
    Base {
        /// As SET_VRING_BASE carried it.
        base: u32,
        /// Entries of the ring.
        size: u32,
    },
    /// An inflight region that says what cannot be.
    #[error(
        "the {what} in the inflight region is {said}, expected {most} at most; hand over what GET_INFLIGHT_FD answered"
    )]
    Inflight {
        /// Which field, or what it leads to.
        what: &'static str,
        /// As it stands there.
        said: u64,
        /// What was possible.
        most: u64,
    },
    /// One of its three areas.
    #[error("the {area} area at {address:#x} ({len} bytes, aligned to {align}) does not lie in one memory region")]
    Area {
        /// "descriptor", "driver" or "device".
        area: &'static str,
        /// Where it should be.
        address: u64,
        /// Its length in bytes.
        len: usize,
        /// Its alignment in bytes.
        align: usize,
    },
}

/// The largest queue there is (virtio 1.3, 2.7 and 2.8.10.1).
pub const MAX_SIZE: u32 = 32768;

/// A descriptor flag: the chain goes on.
pub(crate) const NEXT: u16 = 1;
/// A descriptor flag: the device writes to this buffer.
pub(crate) const WRITE: u16 = 2;
/// A descriptor flag: the buffer is a table of descriptors.
pub(crate) const INDIRECT: u16 = 4;
/// Bytes of a descriptor, in both layouts.
pub(crate) const DESCRIPTOR: usize = 16;
