//! The configuration file of `ringroad serve -c FILE`: read once, validated in full, turned into plain structs.
//!
//! `serve` calls [`Config::load`] at start and for each reload. The structs are read with serde; table.rs adds line and key to
//! each error, value.rs has the rules of single values.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod barred;
mod check;
mod error;
mod file;
mod frontend;
mod mirror;
mod port;
mod sandbox;
mod table;
mod taken;
mod value;
mod vsock;

pub use barred::{barred, barred_forwards, folder, gives_away};
pub use check::{Finding, check, vsock_owner};
pub use error::{ConfigError, Places};
pub use file::{Config, Log, SwitchConfig, Workers};
pub use frontend::Frontend;
pub use port::{E1000Card, Kind, Port, Tap, VhostUser};
pub use sandbox::Sandbox;
pub use vsock::Vsock;

#[cfg(test)]
mod tests;
