//! The socket of a card: a PCI device for one VMM at a time.

use super::port::{Card, E1000Port};
use crate::{
    port::{Port, PortKind, PortSettings},
    socket::Lines,
    vfio_user::{Access, CONFIG_REGION, Interrupts, Limits, PciRegion, Server, ServerConfig, SocketError, VfioDevice},
    worker::{PortHandle, Worker},
};
use ringroad_e1000::{CONFIG, Device, DeviceConfig, IO_BAR, Mitigation, registers::BAR};
use ringroad_mem::Table;
use ringroad_wire::ethernet::{self, MacAddr};
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Index of the BAR with the registers, and of the one with the window to them.
const REGISTERS: u32 = 0;
const WINDOW: u32 = 2;

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
        let device = Pci { name: name.clone(), card: port.0.clone(), handle: handle.clone() };
        let server = Server::start(at, device)?;
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
        if self.port.0.access(|device, now| device.set_link(up, now)) {
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

/// The device behind the socket.
struct Pci<K: PortKind> {
    name: String,
    card: Arc<Card>,
    handle: Arc<PortHandle<K>>,
}

// Not derived, as that would ask for kinds that can be cloned.
impl<K: PortKind> Clone for Pci<K> {
    fn clone(&self) -> Self {
        Pci { name: self.name.clone(), card: self.card.clone(), handle: self.handle.clone() }
    }
}

impl<K: PortKind> Pci<K> {
    fn access(&self, access: impl FnOnce(&mut Device, u64) -> ringroad_e1000::Effects) {
        if self.card.access(access) {
            self.handle.settle();
        }
    }
}

impl<K: PortKind> VfioDevice for Pci<K> {
    fn name(&self) -> &str {
        &self.name
    }

    fn region(&self, index: u32) -> PciRegion {
        match index {
            REGISTERS => PciRegion::new(BAR),
            WINDOW => PciRegion::new(IO_BAR),
            CONFIG_REGION => PciRegion::new(CONFIG as u64),
            _ => PciRegion::default(),
        }
    }

    fn interrupts(&self) -> &Interrupts {
        &self.card.interrupts
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        self.access(|device, now| match region {
            REGISTERS => device.read(offset, data, now),
            WINDOW => device.io_read(offset, data, now),
            _ => {
                device.config_read(offset, data);
                ringroad_e1000::Effects::empty()
            }
        });
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.access(|device, now| match region {
            REGISTERS => device.write(offset, data, now),
            WINDOW => device.io_write(offset, data, now),
            _ => device.config_write(offset, data, now),
        });
    }

    fn set_memory(&self, memory: Arc<Table>) {
        self.card.set_memory(&memory);
    }

    fn reset(&self) {
        self.access(|device, _| device.reset());
    }

    fn count_fault(&self) {
        self.card.count_fault();
    }

    /// The next client finds a new card: with the registers of the last one, it would use the next guest's memory as soon as that
    /// is mapped.
    fn disconnected(&self) {
        self.access(|device, _| device.renew());
        self.handle.forget();
    }
}
