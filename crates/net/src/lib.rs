//! virtio-net (virtio 1.3, 5.1): device end ([`RxQueue`], [`TxQueue`]) and driver end ([`Driver`]).
//!
//! Both are state machines over rings and bytes. Sockets, threads and clocks are in `host`.
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

pub mod control;
mod device;
mod driver;
mod features;
mod filter;
mod moderation;
pub mod offload;
pub mod rss;

pub use device::{RxQueue, TxQueue};
pub use driver::{
    Driver, DriverConfig, DriverError, DriverRx, DriverTx, Held, PAGE, SizedConfig, SizedDriver, SizedRx, Sizing,
};
pub use features::{Config, Features, bits};
pub use filter::Filter;
pub use moderation::{Coalesce, Notice};
