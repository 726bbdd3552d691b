//! Why a driver cannot be connected, and why its commands fail.

use ringroad_net::{DriverError, control};
use ringroad_ring::DriverFault;
use std::{io, path::PathBuf};

/// Why a driver cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No device listens on the socket.
    #[error("cannot connect to {path}: {error}; is a vhost-user device listening there?")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The error from the kernel.
        error: io::Error,
    },
    /// The socket cannot be created, or no device connected in time.
    #[error("no device connected to {path}: {error}")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The error from the kernel.
        error: io::Error,
    },
    /// The device lacks a required feature.
    #[error("the device offers features {offered:#x}, expected {missing} among them")]
    Features {
        /// The offered features.
        offered: u64,
        /// The name of the missing feature.
        missing: &'static str,
    },
    /// The device has too few queue pairs; or more than the driver, which has a control queue: that is behind the last pair.
    #[error("the device has {found} queue pairs, expected {wanted}")]
    Queues {
        /// Queue pairs of the device.
        found: u64,
        /// Queue pairs of the driver.
        wanted: u16,
    },
    /// A reconnected device lacks features of the running rings.
    #[error(
        "the reconnected device offers features {offered:#x} and lacks {lacks:#x}, which the rings use; \
        start it with the same features as before, or open a new connection"
    )]
    Changed {
        /// The offered features.
        offered: u64,
        /// The features in use that are missing.
        lacks: u64,
    },
    /// The device refused a message or closed the connection.
    #[error("the device at {path} did not accept {what}: {error}")]
    Refused {
        /// Path of the socket.
        path: PathBuf,
        /// The message.
        what: &'static str,
        /// The error from the `vhost` crate.
        error: String,
    },
    /// The rings or their memory cannot be created.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The same for a vsock driver.
    #[error(transparent)]
    Vsock(#[from] ringroad_vsock::DriverError),
    /// An eventfd or a socket operation failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a command on the control queue failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// VIRTIO_NET_F_CTRL_VQ was not negotiated.
    #[error("the device has no control queue")]
    NoQueue,
    /// The last command was not answered, or this one is too long.
    #[error("an earlier command is in flight, or this one is longer than {} bytes", control::MAX_COMMAND)]
    Busy,
    /// The device answers VIRTIO_NET_ERR.
    #[error("the device refuses the command")]
    Refused,
    /// The device does not answer in time.
    #[error("the device does not answer")]
    NoAnswer,
    /// The device broke a rule of the ring.
    #[error(transparent)]
    Fault(#[from] DriverFault),
    /// The kernel refuses to wait.
    #[error(transparent)]
    Io(#[from] io::Error),
}
