//! What a driver can do wrong so that its queue cannot go on. On a bus it would be a master abort.

/// Why a queue has stopped. It starts again after a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The ring is not in memory, or not in one region.
    #[error(
        "ring at {address:#x} + {len} lies outside guest memory ({regions} regions); the driver must reset the device"
    )]
    Ring {
        /// By the registers.
        address: u64,
        /// In bytes.
        len: u32,
        /// Number of regions that the guest has.
        regions: usize,
    },
    /// A buffer is not in memory.
    #[error(
        "descriptor {index} at {address:#x} + {len} lies outside guest memory ({regions} regions); the driver must reset the device"
    )]
    Buffer {
        /// Index of its descriptor.
        index: u32,
        /// By the descriptor.
        address: u64,
        /// In bytes.
        len: u32,
        /// Number of regions that the guest has.
        regions: usize,
    },
}
