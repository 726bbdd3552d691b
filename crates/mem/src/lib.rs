//! Guest memory: mapped regions, bounds-checked spans, and the atomics that virtqueues are made of.
//!
//! A frontend shares memory as files. A [`Region`] maps one of them; a [`Table`] holds all regions of a port and translates
//! guest addresses to [`Span`]s. A span is a pointer with its checked length and supports copying only. Rings are resolved
//! once, when a queue starts, to [`Words`], slices of atomics. If a peer truncates a mapped file, the mapping is replaced
//! by zeros and marked (`sigbus.rs`): that peer's port stops, the process does not.
//!
//! `unsafe` is allowed only in this crate and in `host/sys`.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod copy;
mod hint;
mod pieces;
mod region;
mod sigbus;
mod span;
pub mod sync;
mod table;
mod words;
mod zeros;

pub use copy::reads_take_lines;
pub use hint::Hint;
pub use pieces::Pieces;
pub use region::{Error, Region};
pub use sigbus::faults;
pub use span::Span;
pub use table::{Hit, PushError, SLOTS, Table};
pub use words::{Word, Words};
