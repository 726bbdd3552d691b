//! Ethernet frames in transit between ports: the [`Burst`] that carries them, the [`Source`] that fills it, the [`Sink`] that
//! empties it, and the [`Counters`] of both.
//!
//! This crate is independent of any device. A virtio-net queue, a TAP interface or an e1000 fills bursts and takes frames out of
//! them; the switch moves bursts between ports. Reading order: `port`, `burst`, `head`, `offload`.
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

mod burst;
mod counters;
mod flow;
mod head;
pub mod offload;
mod port;
mod software;
mod tag;

pub use burst::{Burst, NotAFrame, PIECES, Rest, copy_some, write_some};
pub use counters::{Counter, Counters, Snapshot};
pub use flow::{Flow, acknowledges};
pub use head::{Frame, HEAD, HEADROOM};
pub use offload::Offload;
pub use port::{Poured, Sink, Source};
pub use software::Software;
pub use tag::{Heads, Tag};

use ringroad_wire::{ethernet, ip::Ipv6};

/// Maximum number of frames in a burst.
pub const BURST: usize = 64;

/// The indices of all frames of a full burst.
pub const ALL: [u8; BURST] = {
    let mut all = [0; BURST];
    let (mut rest, mut index) = (all.as_mut_slice(), 0);
    while let Some((place, after)) = rest.split_first_mut() {
        *place = index;
        (rest, index) = (after, index + 1);
    }
    all
};

/// Length in bytes of the longest frame: an IPv6 packet with a payload of 65535 bytes (5.1.6.3.1), and two VLAN tags.
pub const MAX_FRAME: usize = ethernet::longest_frame(u16::MAX) + Ipv6::LEN;
