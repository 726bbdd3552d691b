//! vsock devices and drivers, with what they need of the kernel: notifications, threads, sockets of the host.
//!
//! [`VsockServer`] is a guest's device behind a vhost-user socket; all of them are served by one [`VsockWorker`], which also
//! relays between guests and sockets of the host (`relay.rs`). [`VsockClient`] is the other side: a driver that connects to
//! any vhost-user vsock device.

mod client;
mod guest;
mod relay;
mod worker;

pub use client::{VsockClient, VsockConnector};
pub use guest::{VsockConfig, VsockServer};
pub use relay::HostRelay;
pub use worker::VsockWorker;

/// The device's end of a connection, with sockets of the host behind some of them.
pub type HostSide = ringroad_vsock::DeviceSide<HostRelay>;
