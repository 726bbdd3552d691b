//! The switch: which frame goes where, and who does the work.
//!
//! [`Switch`] carries bursts from one port's queue to others; what a port is, it knows by the trait [`Port`] alone.
//! [`Schedule`] says which queues to look at and when to sleep; the loop that asks it, with the clock and epoll, is in
//! `host`. A queue belongs to exactly one worker, and so does a `Switch`.
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

mod fdb;
mod forward;
mod gather;
mod limits;
mod schedule;

pub use fdb::{Fdb, Learned};
pub use forward::{Port, Switch, panic_message};
pub use gather::Gather;
pub use limits::{Claim, Dropped, Limits};
pub use schedule::{Poll, Schedule, Work};
