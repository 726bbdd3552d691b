//! Frame formats, without I/O: Ethernet addresses, the headers of virtio-net and virtio-vsock, and the generator's test frames.
//!
//! Everything takes bytes and gives bytes. No input panics: what is too short or damaged is a `None` or a small error.

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

pub mod ethernet;
pub mod probe;
pub mod vnet_hdr;
pub mod vsock_hdr;
