//! Frames on their way between ports: what a [`Burst`] of them is, where they come from ([`Source`]), where they go ([`Sink`]), and
//! how they are counted ([`Counters`]).
//!
//! Nothing in here knows a device. A virtio-net queue, a TAP interface or an e1000 fills a burst and takes frames out of one; the
//! switch moves bursts between them. Reading order: `port`, `burst`, `head`.
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
mod head;
mod port;

pub use burst::{Burst, NotAFrame, PIECES, Rest};
pub use counters::{Counter, Counters, Snapshot};
pub use head::{Frame, HEAD, HEADROOM};
pub use port::{Sink, Source};

use ringroad_wire::ethernet;

/// Frames in a burst, at most.
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

/// Bytes of the longest frame: an MTU of 65535 and two VLAN tags.
pub const MAX_FRAME: usize = ethernet::longest_frame(u16::MAX);
