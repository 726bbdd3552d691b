//! vhost-user (QEMU, docs/interop/vhost-user.rst), back end and front end.
//!
//! [`VhostPort`] is what the switch sees of a guest; `session` is one connection's protocol; `server` has the thread that
//! waits for connections; [`Connection`] is the other side: a driver that connects to any vhost-user network device.

mod frontend;
mod port;
mod server;
mod session;

pub use frontend::{ConnectError, Connection, Connector, Notifier};
pub(crate) use port::VhostLease;
pub use port::{VhostPort, VhostSink, VhostSource};
pub use server::{Role, Server, SocketError, VhostConfig};
