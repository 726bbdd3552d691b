//! Addresses and types that all files of the crate use.

use ringroad_ring::{DriverFault, Fault};
use ringroad_wire::vsock_hdr::{TYPE_SEQPACKET, TYPE_STREAM};

/// Largest payload of a packet in bytes.
pub const MAX_PACKET: usize = 64 << 10;

/// Address of one end of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Addr {
    /// Context identifier: 2 is the host, larger ones are guests.
    pub cid: u64,
    /// Port.
    pub port: u32,
}

impl std::fmt::Display for Addr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.cid, self.port)
    }
}

/// Identifies a connection of a stack; unique among those in existence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The local port.
    pub port: u32,
    /// The peer's address.
    pub peer: Addr,
}

/// Type of a socket: what a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SocketType {
    /// SOCK_STREAM: a byte stream.
    Stream,
    /// SOCK_SEQPACKET: messages.
    SeqPacket,
}

impl SocketType {
    /// Returns the type's number in packet headers.
    pub fn number(self) -> u16 {
        match self {
            SocketType::Stream => TYPE_STREAM,
            SocketType::SeqPacket => TYPE_SEQPACKET,
        }
    }

    /// Returns the type with this number.
    pub fn new(number: u16) -> Option<SocketType> {
        match number {
            TYPE_STREAM => Some(SocketType::Stream),
            TYPE_SEQPACKET => Some(SocketType::SeqPacket),
            _ => None,
        }
    }
}

/// The other end of the device broke a ring, which is no longer used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The driver broke it.
    #[error(transparent)]
    Driver(#[from] Fault),
    /// The device broke it.
    #[error(transparent)]
    Device(#[from] DriverFault),
}
