//! vsock devices and drivers (virtio 1.3, 5.10) with what they need from the kernel: notifications, threads, host sockets.
//!
//! [`VsockServer`] is a guest's device behind a vhost-user socket. One [`VsockWorker`] serves all of them, guest by guest in
//! turns (`member.rs`), and relays between guests and host sockets (`relay.rs`) within each guest's budget (`budget.rs`).
//! [`VsockClient`] is the front end: a driver that connects to any vhost-user vsock device.
//!
//! In reading order, each importing only those before it: `config.rs`, `lines.rs`, `mailbox.rs`, `programs.rs`, `budget.rs`,
//! `relay.rs`, `guest.rs`, `member.rs`, `worker.rs`, `server.rs`; and `client.rs`.
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
mod config;
mod guest;
mod lines;
mod mailbox;
mod member;
mod programs;
mod relay;
mod server;
mod worker;

pub use budget::SocketReport;
pub use client::{VsockClient, VsockConnector};
pub use config::VsockConfig;
pub use relay::{HostRelay, HostSide};
pub use server::VsockServer;
pub use worker::VsockWorker;
