//! vhost-user (QEMU, docs/interop/vhost-user.rst), back end and front end.
//!
//! Back end: `server` runs the thread of a socket, which accepts frontends; `session` is the protocol of one connection with any
//! [`VhostDevice`], `session/messages.rs` what each message does; `net` is the network device; [`VhostPort`] is its port in the
//! switch. `backend` reports changes to the frontend, `inflight` keeps the inflight region, `quirks` has the workarounds for the
//! `vhost` crate. What protects against a frontend's socket and descriptors is in `crate::socket`.
//!
//! Front end: [`Connection`], a driver that connects to any vhost-user network device, for test traffic; [`AttachedPort`], one
//! for real traffic, as a port of the switch.

mod attached;
mod backend;
mod config;
mod device;
mod frontend;
mod inflight;
mod net;
mod port;
mod queue_thread;
mod quirks;
mod server;
mod session;
mod status;
mod vring;

pub use crate::socket::{Access, Kick, Limits, Rate, SocketError};
pub use attached::{Attach, AttachedLease, AttachedPort, AttachedSink, AttachedSource, LONG_FRAMES};
pub use backend::BackendChannel;
pub use config::{MAX_PAIRS, VhostConfig};
pub use device::{Ring, VhostDevice};
pub use frontend::{CommandError, ConnectError, Connection, Connector, Notifier, RawConnection};
pub use net::Server;
pub use port::{VhostLease, VhostPort, VhostSink, VhostSource};
pub use queue_thread::QueueThread;
pub use server::{Role, Socket, SocketConfig};
pub use vring::Vring;
