//! How a vhost-user port is set up. Read by `net.rs`.

use super::{Access, server::Role};
use crate::port::PortSettings;
use ringroad_net::{Config, Features};
use std::path::PathBuf;

/// Maximum number of queue pairs of a port: messages name a vring by 8 bits, and one more is the control queue.
pub const MAX_PAIRS: u16 = 127;

/// How a vhost-user port is set up.
#[derive(Clone, Debug)]
pub struct VhostConfig {
    /// Its name in the configuration.
    pub name: String,
    /// Path of the socket.
    pub socket: PathBuf,
    /// Which side creates the socket.
    pub role: Role,
    /// The features that are offered.
    pub features: Features,
    /// The configuration space. The number of queue pairs is at least 1 and at most [`MAX_PAIRS`].
    pub config: Config,
    /// How the port behaves.
    pub settings: PortSettings,
    /// Limits of its frontend.
    pub frontend: super::Limits,
    /// Who may connect to the socket, as a server.
    pub access: Access,
}

impl VhostConfig {
    /// A port with this name at this socket, otherwise the default.
    pub fn new(name: &str, socket: impl Into<PathBuf>) -> VhostConfig {
        VhostConfig { name: name.to_owned(), socket: socket.into(), ..VhostConfig::default() }
    }
}

impl Default for VhostConfig {
    /// A port with one queue pair that offers everything but offloads at a socket that it creates. Name and socket are empty.
    fn default() -> VhostConfig {
        VhostConfig {
            name: String::new(),
            socket: PathBuf::new(),
            role: Role::Server,
            features: Features::default(),
            config: Config::default(),
            settings: PortSettings::default(),
            frontend: super::Limits::default(),
            access: Access::default(),
        }
    }
}
