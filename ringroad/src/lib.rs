//! ringroad as a library: a switch for virtual machines, its devices and their drivers, in one process.
//!
//! - [`Worker`] is the thread that forwards frames between ports. Guests are ports by [`vhost_user::Server`], interfaces of the
//!   host by [`TapPort`]; [`PortKind`] is for ports of your own, and [`ports!`] makes several kinds one.
//! - [`vhost_user::VhostDevice`] is for vhost-user devices of your own, on the rings of [`ring`]; [`vhost_user::Socket`] runs one.
//! - [`vhost_user::Connection`] drives a virtio-net device, [`vhost_user::RawConnection`] any vhost-user device.
//! - [`vfio_user::VfioDevice`] is for PCI devices of your own; [`vfio_user::Server`] serves one, [`vfio_user::Client`] drives any.
//! - [`host::vsock`] serves and drives virtio-vsock devices.
//!
//! The crates behind these are re-exported whole: [`mem`], [`wire`], [`frame`], [`ring`], [`net`], [`vsock`], [`switch`], [`host`].
//! The package's `examples` show each of these in at most 60 lines.

#![forbid(unsafe_code)]

pub use ringroad_frame as frame;
pub use ringroad_host as host;
pub use ringroad_mem as mem;
pub use ringroad_net as net;
pub use ringroad_ring as ring;
pub use ringroad_switch as switch;
pub use ringroad_vsock as vsock;
pub use ringroad_wire as wire;

pub use ringroad_host::{
    Port, PortHandle, PortKind, PortReport, PortSettings, TapPort, Worker, WorkerConfig, ports, vfio_user, vhost_user,
};
