//! Everything that touches the kernel: both ends of vhost-user sockets, TAP interfaces, threads, epoll.
//!
//! `unsafe` code is confined to `sys`.
#![deny(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod deaf;
mod gate;
mod notes;
mod port;
mod quota;
pub mod sandbox;
#[allow(unsafe_code, reason = "one of the two places with unsafe code, `mem` being the other: system calls")]
mod sys;
mod tap;
pub mod vhost_user;
pub mod vsock;
mod worker;

pub use port::{Port, PortReport, PortSettings};
pub use quota::Quota;
pub use sys::{
    Signal, cpu_time, group_id, is_writable, keep_freed_memory, pin_current_thread, raise_file_limit, signal, user_id,
};
pub use tap::{Tap, TapError};
pub use worker::{PortHandle, Worker, WorkerConfig};
