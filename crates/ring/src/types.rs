//! What both ends and both layouts share: features, addresses, errors, numbers of the specification.

/// Negotiated features that affect the rings, named as in the specification (virtio 1.3, 6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// VIRTIO_F_RING_PACKED: the packed layout.
    pub packed: bool,
    /// VIRTIO_F_INDIRECT_DESC: descriptors may refer to indirect descriptor tables.
    pub indirect: bool,
    /// VIRTIO_F_EVENT_IDX: notifications are requested from an index on, not just turned on or off.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER: the device uses buffers in the order in which they were made available.
    pub in_order: bool,
}

/// Feature bits common to all device types, named as in the specification (6), and one of vhost-user.
pub mod bits {
    /// Indirect descriptor tables.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notification by event index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user protocol features are supported (not a virtio feature).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.0 or later.
    pub const VERSION_1: u64 = 1 << 32;
    /// The packed layout.
    pub const RING_PACKED: u64 = 1 << 34;
    /// Buffers are used in the order in which they were made available.
    pub const IN_ORDER: u64 = 1 << 35;
}

impl Features {
    /// Returns the base of a fresh ring, in the format of vhost-user's SET_VRING_BASE.
    pub fn fresh_base(self) -> u32 {
        if self.packed { FRESH } else { 0 }
    }

    /// Selects the features that affect the rings from the negotiated bits.
    pub fn negotiated(acked: u64) -> Features {
        Features {
            packed: acked & bits::RING_PACKED != 0,
            indirect: acked & bits::INDIRECT_DESC != 0,
            event_idx: acked & bits::EVENT_IDX != 0,
            in_order: acked & bits::IN_ORDER != 0,
        }
    }
}

/// Frontend addresses of a ring's three areas, as SET_VRING_ADDR carries them.
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
    /// Queue size not allowed. Split: a power of two up to 32768. Packed: 1 to 32768.
    #[error("invalid queue size {size}: {}", if *packed { "expected 1 to 32768" } else { "expected a power of two up to 32768" })]
    Size {
        /// The requested size.
        size: u32,
        /// Whether the packed layout was requested.
        packed: bool,
    },
    /// The base lies outside the ring.
    #[error("base {base:#x} lies outside a ring of {size} entries")]
    Base {
        /// The base as SET_VRING_BASE carried it.
        base: u32,
        /// Entries of the ring.
        size: u32,
    },
    /// The inflight region contains invalid data.
    #[error(
        "invalid inflight region: {what}: expected at most {max}, found {found}; hand back the GET_INFLIGHT_FD region unchanged"
    )]
    Inflight {
        /// The invalid field or what it refers to.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The highest valid value.
        max: u64,
    },
    /// One of the ring's areas is not mapped or misaligned.
    #[error(
        "the {area} area at {address:#x} ({len} bytes) does not lie in one memory region or is not aligned to {align} bytes"
    )]
    Area {
        /// "descriptor", "driver" or "device".
        area: &'static str,
        /// Frontend address of the area.
        address: u64,
        /// Length in bytes.
        len: usize,
        /// Required alignment in bytes.
        align: usize,
    },
}

/// The largest queue size (virtio 1.3, 2.7 and 2.8.10.1).
pub const MAX_SIZE: u32 = 32768;

/// Descriptor flag VIRTQ_DESC_F_NEXT: the chain continues.
pub(crate) const NEXT: u16 = 1;
/// Descriptor flag VIRTQ_DESC_F_WRITE: the device writes to this buffer.
pub(crate) const WRITE: u16 = 2;
/// Descriptor flag VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
pub(crate) const INDIRECT: u16 = 4;
/// Size of a descriptor in bytes, in both layouts.
pub(crate) const DESCRIPTOR: usize = 16;
/// Base of an unused packed ring: both positions at slot 0, both wrap counters set.
pub(crate) const FRESH: u32 = 0x8000_8000;
