//! The switch: forwarding of frames between ports, and scheduling of the queues that a worker serves.
//!
//! [`Switch`] carries bursts from a port's queue to other ports, which it sees through the trait [`Port`] only. [`Schedule`]
//! decides which queues to poll and when to sleep; the loop around it, with clock and epoll, is in `host`. Each queue, like each
//! `Switch`, belongs to exactly one worker.
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

mod decide;
mod delivery;
mod fdb;
mod forward;
mod gather;
mod limits;
mod linger;
mod member;
mod mirror;
mod pace;
mod port;
mod schedule;
mod steering;
mod tagged;
mod vlan;

pub use delivery::Wait;
pub use fdb::{Fdb, Learned};
pub use forward::Switch;
pub use gather::{Gather, Pauses};
pub use limits::{Claim, Dropped, Limits};
pub use linger::{Linger, Rest};
pub use mirror::{Direction, Mirror};
pub use pace::Rate;
pub use port::{Port, panic_message};
pub use schedule::{Poll, Schedule, Turn, Work};
pub use vlan::{Vid, Vlans};
