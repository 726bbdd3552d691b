//! Guest memory: regions, checked spans, and the atomics that rings live in.
//!
//! A peer hands over files; a [`Region`] maps one of them, a [`Table`] holds all of a port's regions and turns guest
//! addresses into [`Span`]s: pointer and checked length in one type, good for copying and for nothing else. Rings are
//! resolved once into [`Words`], slices of atomics. Memory that a peer truncates under us is replaced by zeros and
//! marked (`sigbus.rs`), so that it costs that peer's port and not the process.
//!
//! This is one of the two rooms in which `unsafe` may stand; the other is `host/sys`.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod copy;
mod region;
mod sigbus;
mod span;
pub mod sync;
mod table;
mod words;

pub use region::{Error, Region};
pub use sigbus::faults;
pub use span::{Pieces, Span};
pub use table::{Hit, Outside, SLOTS, Table};
pub use words::{Word, Words};
