//! Test traffic, for `ringroad blast`, `demo`, `vsock` and `bench`: probe frames, the virtio-net driver that sends, receives and
//! reflects them, the e1000's, programs at the ends of vsock connections, child processes, and the command-line options that these share.
//!
//! `ringroad serve` uses nothing of it but `ports`, for the key `mode` of a port.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod check;
pub mod child;
mod driver;
mod lem;
pub mod options;
mod plain;
pub mod ports;
pub mod probe;
mod settings;
mod totals;
pub mod vsock;

pub use driver::Traffic;
pub use lem::{Lem, LemError, LemTotals};
pub use plain::{PLAIN_BURST, Plain};
pub use settings::{Mode, Settings, Touch};
pub use totals::{Left, Totals, gbps};
