//! vsock devices and drivers (virtio 1.3, 5.10) with what they need from the kernel: notifications, threads, host sockets.
//!
//! [`VsockServer`] is a guest's device behind a vhost-user socket. One [`VsockWorker`] serves all of them, guest by guest in
//! turns (`member.rs`), and relays between guests and host sockets (`relay.rs`) within each guest's budget (`budget.rs`).
//! [`VsockClient`] is the front end: a driver that connects to any vhost-user vsock device.
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

mod budget;
mod client;
mod guest;
mod lines;
mod member;
mod programs;
mod relay;
mod shared;
mod worker;

pub use budget::SocketReport;
pub use client::{VsockClient, VsockConnector};
pub use guest::{VsockConfig, VsockServer};
pub use relay::HostRelay;
pub use worker::VsockWorker;

/// The device's end of a connection; some have host sockets behind them.
pub type HostSide = ringroad_vsock::DeviceSide<HostRelay>;
