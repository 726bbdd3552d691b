//! An emulated network card, Intel's 82540EM, as a port: its registers behind a vfio-user socket, its queues served by the worker.
//! The card itself is the crate `e1000`; `card.rs` is what the
//! threads share, `port.rs` what the worker sees, `server.rs` the socket.

mod card;
mod port;
mod server;

pub use port::{E1000Lease, E1000Port, E1000Sink, E1000Source};
pub use ringroad_e1000::{Exits, Mitigation};
pub use server::{ACCESS_POLL, E1000Config, E1000Server};
