//! What a driver can do wrong in a ring, as the device end finds it (virtio 1.3, 2.7 and 2.8).

/// A driver error on a queue, found by the device. Nothing in the queue can be trusted any more: it is unusable until
/// reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The available index is further ahead than the queue has entries (2.7.6).
    #[error("available index {index} is {ahead} ahead of {next}, more than the queue's {size} entries")]
    AvailableJump {
        /// The available index that the driver wrote.
        index: u16,
        /// The index that the device takes next.
        next: u16,
        /// The distance between the two.
        ahead: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// More descriptors are available in a packed ring than it has, so some were made available twice.
    #[error("more descriptors are available than the ring's {size} entries can hold")]
    Overrun {
        /// Entries of the queue.
        size: u16,
    },
    /// The available ring or a `next` field refers to a descriptor that does not exist (2.7.5).
    #[error("descriptor {index} does not exist in a table of {size}")]
    Index {
        /// The index that was used.
        index: u16,
        /// Number of descriptors in the table.
        size: u16,
    },
    /// A descriptor refers to an address outside guest memory.
    #[error("descriptor {index} at {address:#x} + {len} lies outside guest memory ({regions} regions)")]
    Outside {
        /// Index of the descriptor in the ring or table.
        index: u16,
        /// Guest address.
        address: u64,
        /// Length in bytes.
        len: u32,
        /// Number of memory regions.
        regions: u16,
    },
    /// A buffer of length 0.
    #[error("descriptor {index} has length 0")]
    ZeroLength {
        /// Index of the descriptor in the ring or table.
        index: u16,
    },
    /// A chain of more than 2³² − 1 bytes (2.7.5).
    #[error("the descriptor chain with descriptor {index} is longer than 4 GiB")]
    Length {
        /// Index of the descriptor that exceeds the limit.
        index: u16,
    },
    /// A chain with a loop, or longer than the queue (2.7.5.3.1, 2.8.20).
    #[error("the descriptor chain with descriptor {index} loops or has more than {size} descriptors")]
    Loop {
        /// Index of the descriptor that exceeds the limit.
        index: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A readable descriptor after a writable one (2.7.4.2, 2.8.17).
    #[error("descriptor {index} is device-readable but follows a device-writable one")]
    Order {
        /// Index of the descriptor in the ring or table.
        index: u16,
    },
    /// A device-writable descriptor in a queue that the device only reads (transmit queue).
    #[error("the descriptor chain with buffer {id} is device-writable in a queue that the device only reads from")]
    Writable {
        /// The chain's head index or buffer id.
        id: u16,
    },
    /// A device-readable descriptor in a queue that the device only writes (receive queue).
    #[error("the descriptor chain with buffer {id} is device-readable in a queue that the device only writes to")]
    Readable {
        /// The chain's head index or buffer id.
        id: u16,
    },
    /// A chain shorter than the header of the device type.
    #[error("the descriptor chain with buffer {id} has {len} bytes, fewer than the header's {needed}")]
    Header {
        /// The chain's head index or buffer id.
        id: u16,
        /// Length of the chain in bytes.
        len: u32,
        /// Length of the header in bytes.
        needed: u32,
    },
    /// INDIRECT without the feature, inside an indirect table, or together with NEXT (2.7.5.3.1).
    #[error(
        "descriptor {index} must not be indirect (feature not negotiated, inside an indirect table, or together with NEXT)"
    )]
    Indirect {
        /// Index of the descriptor in the ring or table.
        index: u16,
    },
    /// An indirect table that is empty or not a multiple of 16 bytes long (2.7.5.3.2).
    #[error("descriptor {index} refers to an indirect table of {len} bytes, which is not a positive multiple of 16")]
    IndirectLength {
        /// Index of the descriptor in the ring.
        index: u16,
        /// Length of the table in bytes.
        len: u32,
    },
}
