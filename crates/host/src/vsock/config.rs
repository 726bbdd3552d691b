//! Configuration of a guest's vsock device.

use crate::vhost_user::{Access, Limits, Role};
use ringroad_vsock::{Features, Settings};
use std::{net::SocketAddr, path::PathBuf};

/// Configuration of a guest's vsock device.
#[derive(Clone, Debug)]
pub struct VsockConfig {
    /// Its name in log lines.
    pub name: String,
    /// The guest's context identifier, 3 or more.
    pub cid: u64,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Which side creates that socket.
    pub role: Role,
    /// Path of the Unix socket where programs connect and send `CONNECT <port>`; the guest's connections to port N go to
    /// `<host>_N`.
    pub host: Option<PathBuf>,
    /// TCP addresses for the guest's connections to these ports.
    pub forward: Vec<(u32, SocketAddr)>,
    /// Guests with a group in common may connect to each other.
    pub groups: Vec<String>,
    /// Features to offer.
    pub features: Features,
    /// Settings of its connections.
    pub settings: Settings,
    /// Connects to host sockets a second. Up to as many requests (at most 1024) wait; the rest are refused.
    pub connects: u32,
    /// Bytes that the kernel may buffer for programs that do not read, beyond 8 KiB for each socket.
    pub socket_memory: usize,
    /// Limits of its frontend.
    pub limits: Limits,
    /// Owner and mode of its sockets.
    pub access: Access,
}

impl VsockConfig {
    /// A device for this guest at this socket, otherwise the default.
    pub fn new(cid: u64, socket: PathBuf) -> VsockConfig {
        VsockConfig { name: format!("vsock {cid}"), cid, socket, ..VsockConfig::default() }
    }
}

impl Default for VsockConfig {
    /// A device for guest 3 that offers everything at a socket that it creates, without destinations for connections. Name and
    /// socket are empty.
    fn default() -> VsockConfig {
        VsockConfig {
            name: String::new(),
            cid: 3,
            socket: PathBuf::new(),
            role: Role::Server,
            host: None,
            forward: Vec::new(),
            groups: Vec::new(),
            features: Features::all(),
            settings: Settings::default(),
            connects: 5000,
            socket_memory: 64 << 20,
            limits: Limits::default(),
            access: Access::default(),
        }
    }
}
