//! vhost-user (QEMU, docs/interop/vhost-user.rst), back end and front end.
//!
//! [`VhostPort`] is what the switch sees of a guest, `net` makes it a [`Device`]; `session` is one connection's protocol with
//! any device; `descriptor` says what a frontend's descriptors are, `limits` what it may use up; `place` is where a socket is;
//! `server` has the thread that waits for connections; [`Connection`] is the other side: a driver that connects to any vhost-user network device.

mod call;
mod descriptor;
mod device;
mod frontend;
mod inflight;
mod limits;
mod net;
mod place;
mod port;
mod server;
mod session;

pub(crate) use call::Call;
pub(crate) use descriptor::Kick;
pub(crate) use device::{Device, Ring};
pub(crate) use frontend::Handshake;
pub use frontend::{ConnectError, Connection, Connector, Notifier};
pub use limits::{Limits, Rate};
pub use net::{Server, VhostConfig};
pub use place::{Access, SocketError};
pub(crate) use place::{Place, bind};
pub(crate) use port::VhostLease;
pub use port::{VhostPort, VhostSink, VhostSource};
pub use server::Role;
pub(crate) use server::{Socket, SocketConfig};
