//! What a peer can do wrong on one connection. Returned by `connection.rs` and `hub.rs`, counted and reported by a `Stack`.

/// A protocol violation by the peer; the connection is reset.
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
}
