//! Everything that touches the kernel: both ends of vhost-user and vfio-user sockets, TAP interfaces, threads, epoll.
//!
//! `unsafe` code is confined to `sys`.
#![deny(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod capture;
mod deaf;
pub mod e1000;
mod event_loop;
mod gate;
mod notes;
mod port;
mod quota;
pub mod sandbox;
mod socket;
#[allow(unsafe_code, reason = "one of the two places with unsafe code, `mem` being the other: system calls")]
mod sys;
mod tap;
pub mod vfio_user;
pub mod vhost_user;
pub mod vsock;
mod worker;

pub use capture::{Capture, CaptureConfig, make_capture};
pub use port::{INTERRUPT_DELAY, Port, PortKind, PortReport, PortSettings};
pub use quota::Quota;
pub use sys::{
    Signal, cpu_time, group_id, is_writable, keep_freed_memory, pin_current_thread, raise_file_limit, signal, user_id,
};
pub use tap::{TapError, TapLease, TapPort, TapSink, TapSource};
pub use worker::{PortHandle, Worker, WorkerConfig};

/// What [`ports!`] needs, wherever it is used.
#[doc(hidden)]
pub mod embed {
    pub use crate::{PortKind, PortSettings};
    pub use ringroad_frame::{BURST, Burst, Counters, Poured, Sink, Source, offload::Support};
    pub use ringroad_mem::Span;
    pub use std::{os::fd::BorrowedFd, sync::Arc, time::Duration};
}
