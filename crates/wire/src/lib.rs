//! Frame formats, without I/O: Ethernet, IP, TCP and UDP, their checksums, the headers of virtio-net and virtio-vsock. Used by
//! the device and driver crates, by `frame` and by the switch.
//!
//! Everything works on byte slices. No input panics: short or damaged input gives `None` or a small error.

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

pub mod checksum;
pub mod ethernet;
pub mod ip;
pub mod l4;
pub mod vnet_hdr;
pub mod vsock_hdr;
