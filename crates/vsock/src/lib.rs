//! virtio-vsock (virtio 1.3, 5.10), device and driver end.
//!
//! Both ends are a [`Stack`]: the connections of one end of a device, with sockets for programs of this process ([`Listener`],
//! [`Stream`], [`SeqPacket`]), over the two rings of a [`Side`]. The device's end has more: connections whose other end is a
//! socket of the host ([`Relay`]), and guests that talk to each other ([`Hub`]). What needs the kernel is `host`'s business,
//! which a stack asks through [`Host`].
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod account;
mod payload;
mod send;
mod sync;

#[cfg(not(loom))]
mod connection;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod driver;
#[cfg(not(loom))]
mod features;
#[cfg(not(loom))]
mod hub;
#[cfg(not(loom))]
mod inbox;
#[cfg(not(loom))]
mod socket;
#[cfg(not(loom))]
mod stack;

pub use account::{Account, Charge};
pub use payload::Payload;
pub use send::{Effect, Link, MAX_PACKET, Owner, Sender, Ways};

#[cfg(not(loom))]
pub use {
    connection::{Key, Wrong},
    device::{DeviceSide, Events, RxQueue, TxQueue},
    driver::{Driver, DriverConfig, DriverError, DriverEvents, DriverRx, DriverSide, DriverTx},
    features::{Config, Features, bits, kinds},
    hub::Hub,
    socket::{Listener, SeqPacket, Stream},
    stack::{ConnectionReport, Door, Host, Inlet, NoRelay, Queue, Relay, Report, Settings, Side, Stack, Taken},
};

use ringroad_ring::{DriverFault, Fault};
use ringroad_wire::vsock_hdr::{TYPE_SEQPACKET, TYPE_STREAM};

/// An end of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Addr {
    /// Context identifier: 2 is the host, others are guests.
    pub cid: u64,
    /// Port.
    pub port: u32,
}

impl std::fmt::Display for Addr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.cid, self.port)
    }
}

/// What a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// SOCK_STREAM: bytes.
    Stream,
    /// SOCK_SEQPACKET: messages.
    SeqPacket,
}

impl Kind {
    /// Its number in packets.
    pub fn number(self) -> u16 {
        match self {
            Kind::Stream => TYPE_STREAM,
            Kind::SeqPacket => TYPE_SEQPACKET,
        }
    }

    /// The kind with this number.
    pub fn new(number: u16) -> Option<Kind> {
        match number {
            TYPE_STREAM => Some(Kind::Stream),
            TYPE_SEQPACKET => Some(Kind::SeqPacket),
            _ => None,
        }
    }
}

/// The other end of a ring has broken it. It is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The driver has.
    #[error(transparent)]
    Driver(#[from] Fault),
    /// The device has.
    #[error(transparent)]
    Device(#[from] DriverFault),
}
