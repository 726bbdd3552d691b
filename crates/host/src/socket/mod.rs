//! What the Unix sockets of all protocols need against their peers: `place` creates them, `limits` bounds what a peer may use,
//! `descriptor` validates the descriptors that it sends, `call` notifies it without blocking, `peer` and `cost` bound what that may
//! cost, `door` lets one in at a time, `serving` ends the thread that serves it. Used by `vhost_user`, `vfio_user` and `vsock`.

mod call;
mod cost;
mod descriptor;
mod door;
mod limits;
mod peer;
mod place;
mod serving;

pub(crate) use call::Call;
pub use descriptor::Kick;
pub(crate) use descriptor::{CallFd, ChannelFd, Disposal, MemoryFile, Refused};
pub(crate) use door::{Door, RETRY};
pub use limits::{Limits, Rate};
pub(crate) use limits::{Lines, say};
pub(crate) use peer::{EXCLUSION, Peer};
pub use place::{Access, SocketError};
pub(crate) use place::{Place, bind, connect};
pub(crate) use serving::{Current, Serving, close};
