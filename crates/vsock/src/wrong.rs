//! What a peer can do wrong with a packet. Returned by `connection.rs` and `hub.rs`; a `Stack` counts it and reports it to its host.

use crate::types::Addr;
use std::fmt;

/// A protocol violation by the peer; its connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// OP_REQUEST for an existing connection.
    #[error("request for a connection that is open already")]
    SecondRequest,
    /// OP_RESPONSE without a request.
    #[error("response without a request")]
    Response,
    /// A packet other than the response or a reset before the connection was accepted.
    #[error("operation {op} before the connection was accepted")]
    Early {
        /// The operation received.
        op: u16,
    },
    /// OP_RW after OP_SHUTDOWN with VIRTIO_VSOCK_SHUTDOWN_F_SEND.
    #[error("{len} bytes after the peer has shut down sending")]
    AfterShutdown {
        /// Bytes received.
        len: u32,
    },
    /// More bytes than the peer has credit for.
    #[error("{len} bytes exceed the credit of {credit}")]
    Credit {
        /// Bytes received.
        len: u32,
        /// Bytes it had credit for.
        credit: u32,
    },
    /// More unread messages than the receive buffer has bytes.
    #[error("more than {limit} unread messages")]
    Messages {
        /// The maximum number.
        limit: u32,
    },
    /// The guest's memory limit is reached.
    #[error("the memory limit of the guest is reached")]
    Memory,
    /// The packet's type is unknown, was not negotiated, or is not the connection's.
    #[error("type {kind} does not match the connection, or was not negotiated")]
    Type {
        /// The type received.
        kind: u16,
    },
    /// The payload is shorter than the header says.
    #[error("payload of {actual} bytes, the header says {len}")]
    Short {
        /// Length in the header.
        len: u32,
        /// Actual length.
        actual: usize,
    },
    /// Unknown operation.
    #[error("unknown operation {op}")]
    Operation {
        /// The operation received.
        op: u16,
    },
    /// The source CID is not the peer's.
    #[error("source CID {cid} is not the peer's")]
    Source {
        /// The source CID.
        cid: u64,
    },
    /// The packet is for a guest that the peer may not send to, or for no connection with it.
    #[error("no route or no connection to CID {cid}")]
    Route {
        /// The destination CID.
        cid: u64,
    },
}

/// A packet that violated the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Where it came from.
    pub from: Addr,
    /// Its destination.
    pub to: Addr,
    /// It belonged to a connection, which is reset.
    pub connected: bool,
    /// What was wrong.
    pub wrong: Wrong,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { from, to, connected, wrong } = self;
        match connected {
            true => write!(f, "{from} to port {}: {wrong}; connection reset", to.port),
            false => write!(f, "packet from {from} to {to}: {wrong}; answered with a reset"),
        }
    }
}
