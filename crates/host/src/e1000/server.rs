//! The socket of a card: a PCI device for one VMM at a time.

use super::{card::Pci, port::E1000Port};
use crate::{
    port::{Port, PortKind, PortSettings},
    socket::Lines,
    vfio_user::{Access, Interrupts, Limits, Server, ServerConfig, SocketError},
    worker::{PortHandle, Worker},
};
use ringroad_e1000::{Device, DeviceConfig, Mitigation};
use ringroad_wire::ethernet::{self, MacAddr};
use std::{path::PathBuf, sync::Arc, time::Duration};

/// How a card is set up.
#[derive(Clone, Debug)]
pub struct E1000Config {
    /// Its name in the configuration.
    pub name: String,
    /// Path of the socket.
    pub socket: PathBuf,
    /// The address in its EEPROM.
    pub mac: MacAddr,
    /// The MTU; longer frames are dropped.
    pub mtu: u16,
    /// How its interrupts are moderated.
    pub mitigation: Mitigation,
    /// Whether it has a link at first.
    pub link_up: bool,
    /// How the port behaves.
    pub settings: PortSettings,
    /// Limits of its client.
    pub client: Limits,
    /// Who may connect to the socket.
    pub access: Access,
    /// How long the thread that serves the driver's accesses polls for the next one before it sleeps, at most. It adapts: a
    /// quiet card's does not poll.
    pub access_poll: Duration,
}

/// The default of [`E1000Config::access_poll`].
pub const ACCESS_POLL: Duration = Duration::from_micros(400);

impl Default for E1000Config {
    /// A card with an MTU of 1500 and interrupts moderated as the registers say. Name and socket are empty.
    fn default() -> E1000Config {
        E1000Config {
            name: String::new(),
            socket: PathBuf::new(),
            mac: MacAddr::local(1),
            mtu: 1500,
            mitigation: Mitigation::default(),
            link_up: true,
            settings: PortSettings::default(),
            client: Limits::default(),
            access: Access::default(),
            access_poll: ACCESS_POLL,
        }
    }
}

/// A running card. Dropped, it disconnects, removes its socket, and leaves the switch.
pub struct E1000Server<K: PortKind> {
    // Dropped before the port leaves the switch.
    server: Server,
    handle: Arc<PortHandle<K>>,
    port: E1000Port,
}

impl<K: PortKind> std::fmt::Debug for E1000Server<K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("E1000Server").field("server", &self.server).finish_non_exhaustive()
    }
}

impl<K: PortKind> E1000Server<K> {
    /// Creates the socket, adds the port to the worker's switch, and starts the socket's thread. `kind` makes a card's port one of
    /// the worker's kinds.
    ///
    /// # Errors
    /// The socket cannot be created or its owner and mode not be set, or the system has no more memory, threads or descriptors.
    pub fn start(
        config: E1000Config,
        worker: &Worker<K>,
        kind: impl FnOnce(E1000Port) -> K,
    ) -> Result<Self, SocketError> {
        let name = format!("port {}", config.name);
        let failed = |error| SocketError::Start { name: name.clone(), error };
        let device = DeviceConfig { mac: config.mac, mitigation: config.mitigation, up: config.link_up };
        let card = Device::new(device).map_err(|error| failed(std::io::Error::other(error)))?;
        let interrupts = Interrupts::new(true, 1, 0);
        let lines = Lines::new(&name, config.client.lines);
        let port = E1000Port::new(&config.name, card, interrupts, lines).map_err(failed)?;
        port.0.limit(ethernet::longest_frame(config.mtu));
        let handle = Arc::new(worker.add(Port::new(kind(port.clone()), config.settings)).map_err(failed)?);
        let at = ServerConfig {
            name: &name,
            path: &config.socket,
            limits: config.client,
            access: config.access,
            poll: config.access_poll,
        };
        let device = Pci::new(port.0.clone(), handle.clone());
        let server = Server::start_with(at, device, port.0.lending.clone())?;
        Ok(E1000Server { server, handle, port })
    }

    /// Returns the port's place in the worker's switch.
    pub fn handle(&self) -> &PortHandle<K> {
        &self.handle
    }

    /// Returns the port.
    pub fn port(&self) -> &E1000Port {
        &self.port
    }

    /// Changes the MTU.
    pub fn set_mtu(&self, mtu: u16) {
        self.port.0.limit(ethernet::longest_frame(mtu));
    }

    /// Sets whether the card has a link.
    pub fn set_link(&self, up: bool) {
        if self.port.0.control(|device, now| device.set_link(up, now)) {
            self.handle.settle();
        }
        if !up {
            self.handle.forget();
        }
    }

    /// Changes [`E1000Config::access_poll`].
    pub fn set_access_poll(&self, time: Duration) {
        self.server.set_poll(time);
    }

    /// Changes the limits of its clients, and who may connect.
    ///
    /// # Errors
    /// The socket's owner or mode cannot be changed; the limits are in effect.
    pub fn set_client(&self, limits: Limits, access: Access) -> Result<(), SocketError> {
        self.port.0.lines.set(limits.lines);
        self.server.set(limits, access)
    }
}
