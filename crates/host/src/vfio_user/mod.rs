//! vfio-user (QEMU, docs/interop/vfio-user.rst), server and client.
//!
//! Server: [`Server`] runs the thread of a socket and serves a [`VfioDevice`], a PCI device, to a VMM; `session` is the protocol of
//! one connection, `memory` what the client has mapped, [`Interrupts`] what it wants to be told, `version` what both sides can do,
//! `messages` their form. `lending` has another thread serve a client for a while. What protects against a client's socket and descriptors is in `crate::socket`.
//!
//! Client: [`Client`] drives any vfio-user device, for drivers in this process and for tests; [`InterruptFd`] receives its interrupts.

mod client;
mod connection;
mod device;
mod eventfd;
mod interrupts;
mod lending;
mod memory;
mod messages;
mod poller;
mod refusal;
mod server;
mod session;
mod version;

pub use crate::socket::{Access, Limits, Rate, SocketError};
pub use client::{Accesses, Client, ClientError, DeviceInfo};
pub use device::{CONFIG_REGION, PciRegion, VfioDevice};
pub use eventfd::InterruptFd;
pub use interrupts::{InterruptKind, Interrupts};
pub(crate) use lending::Lending;
pub use server::{Server, ServerConfig};
