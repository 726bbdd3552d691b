//! vhost-user (QEMU, docs/interop/vhost-user.rst), back end and front end.
//!
//! [`VhostPort`] is what the switch sees of a guest, `net` makes it a [`Device`]; `session` is one connection's protocol with
//! any device; `server` has the thread that waits for connections; [`Connection`] is the other side: a driver that connects to any vhost-user network device.

mod call;
mod device;
mod frontend;
mod net;
mod port;
mod server;
mod session;

pub(crate) use call::Call;
pub(crate) use device::{Device, Ring};
pub(crate) use frontend::Handshake;
pub use frontend::{ConnectError, Connection, Connector, Notifier};
pub use net::{Server, VhostConfig};
pub(crate) use port::VhostLease;
pub use port::{VhostPort, VhostSink, VhostSource};
pub use server::{Role, SocketError};
pub(crate) use server::{Socket, bind};
