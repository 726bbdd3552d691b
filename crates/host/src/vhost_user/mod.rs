//! vhost-user (QEMU, docs/interop/vhost-user.rst), back end and front end.
//!
//! Back end: `server` runs the thread of a socket, which accepts frontends; `session` is the protocol of one connection with
//! any [`VhostDevice`]; `net` is the network device; [`VhostPort`] is its port in the switch. `descriptor` validates the
//! descriptors that a frontend sends, `limits` bounds what it may use, `place` creates sockets, `call` notifies the driver,
//! `inflight` keeps the inflight region, `quirks` has the workarounds for the `vhost` crate.
//!
//! Front end: [`Connection`], a driver that connects to any vhost-user network device, for test traffic; [`AttachedPort`], one for real
//! traffic, as a port of the switch.

mod attached;
mod call;
mod descriptor;
mod device;
mod frontend;
mod inflight;
mod limits;
mod net;
mod place;
mod port;
mod queue_thread;
mod quirks;
mod server;
mod session;
mod vring;

pub use attached::{Attach, AttachedLease, AttachedPort, AttachedSink, AttachedSource, LONG_FRAMES};
pub(crate) use call::Call;
pub use descriptor::Kick;
pub use device::{Ring, VhostDevice};
pub use frontend::{CommandError, ConnectError, Connection, Connector, Notifier, RawConnection};
pub use limits::{Limits, Rate};
pub use net::{MAX_PAIRS, Server, VhostConfig};
pub use place::{Access, SocketError};
pub(crate) use place::{Place, bind};
pub use port::{VhostLease, VhostPort, VhostSink, VhostSource};
pub use queue_thread::QueueThread;
pub use server::{Role, Socket, SocketConfig};
pub use vring::Vring;
