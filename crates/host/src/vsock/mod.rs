//! vsock devices and drivers, with what they need of the kernel: notifications, threads, sockets of the host.
//!
//! [`VsockServer`] is a guest's device behind a vhost-user socket; all of them are served by one [`VsockWorker`], guest by
//! guest in turns (`member.rs`), which also relays between guests and sockets of the host (`relay.rs`), within each guest's
//! budget (`budget.rs`). [`VsockClient`] is the other side: a driver that connects to any vhost-user vsock device.
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

mod asking;
mod budget;
mod client;
mod guest;
mod lines;
mod member;
mod relay;
mod shared;
mod worker;

pub use budget::SocketReport;
pub use client::{VsockClient, VsockConnector};
pub use guest::{VsockConfig, VsockServer};
pub use relay::HostRelay;
pub use worker::VsockWorker;

/// The device's end of a connection, with sockets of the host behind some of them.
pub type HostSide = ringroad_vsock::DeviceSide<HostRelay>;
