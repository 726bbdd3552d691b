//! The other side of vhost-user: a driver that connects to a network device, ours or another's (what DPDK calls
//! virtio-user).

use crate::sys;
use ringroad_net::{Driver, DriverConfig, DriverError, bits};
use std::{
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures as Protocol, message::VhostUserHeaderFlag},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// How to connect a driver.
#[derive(Clone, Debug)]
pub struct Connector {
    /// The socket.
    pub socket: PathBuf,
    /// Make the socket and wait for the device, instead of connecting to one.
    pub listen: bool,
    /// For how long to wait for the other side.
    pub patience: Duration,
    /// The feature bits wanted of those that the device offers.
    pub features: u64,
    /// Pairs of queues.
    pub queue_pairs: u16,
    /// Entries of each queue.
    pub queue_size: u32,
    /// The largest frame that one buffer should hold.
    pub frame: usize,
    /// Hugepages, where there are any.
    pub huge: bool,
}

/// Why a driver cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody there.
    #[error("cannot connect to {path}: {error}; is a vhost-user device listening there?")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// The socket cannot be made, or nobody came.
    #[error("no device connected to {path}: {error}")]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// It lacks what the caller insists on.
    #[error("the device offers features {offered:#x}, which lack {missing}")]
    Features {
        /// What it offers.
        offered: u64,
        /// What is missing, by name.
        missing: &'static str,
    },
    /// It has fewer queues than wanted.
    #[error("the device has {found} pairs of queues, fewer than the {wanted} wanted")]
    Queues {
        /// What it has.
        found: u64,
        /// What was asked for.
        wanted: u16,
    },
    /// It did not like a message, or went away.
    #[error("the device at {path} did not accept {what}: {error}")]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Which message.
        what: &'static str,
        /// How the `vhost` crate puts it.
        error: String,
    },
    /// No memory, or no such ring.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No eventfd.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Notifications of one queue.
pub struct Notifier {
    kick: EventFd,
    call: EventFd,
}

impl Notifier {
    /// Tells the device that there is something.
    pub fn kick(&self) {
        let _ = self.kick.write(1);
    }

    /// Forgets notifications that have come.
    pub fn clear(&self) {
        let _ = self.call.read();
    }
}

/// A driver that is connected to a device. Dropped, it disconnects.
pub struct Connection {
    /// Memory and queues.
    pub driver: Driver,
    /// Notifications, one for each receive queue.
    pub rx: Vec<Notifier>,
    /// Notifications, one for each transmit queue.
    pub tx: Vec<Notifier>,
    /// The feature bits in use.
    pub acked: u64,
    frontend: Frontend,
    socket: UnixStream,
    path: PathBuf,
}

impl Connector {
    /// Connects, negotiates, and starts all queues.
    pub fn connect(&self) -> Result<Connection, ConnectError> {
        let socket = self.open()?;
        let path = self.socket.clone();
        let refused = |what: &'static str| {
            let path = path.clone();
            move |error: vhost::Error| ConnectError::Refused { path, what, error: error.to_string() }
        };
        if self.queue_pairs > 1 {
            let found = queue_pairs(&socket).map_err(refused("GET_QUEUE_NUM"))?;
            if found < self.queue_pairs.into() {
                return Err(ConnectError::Queues { found, wanted: self.queue_pairs });
            }
        }
        let mut frontend = Frontend::from_stream(socket.try_clone()?, 2 * u64::from(self.queue_pairs));
        frontend.set_owner().map_err(refused("SET_OWNER"))?;
        let offered = frontend.get_features().map_err(refused("GET_FEATURES"))?;
        if offered & bits::VERSION_1 == 0 {
            return Err(ConnectError::Features { offered, missing: "VIRTIO_F_VERSION_1" });
        }
        let acked = offered & (self.features | bits::VERSION_1 | bits::PROTOCOL_FEATURES);
        if acked & bits::PROTOCOL_FEATURES != 0 {
            let wanted = Protocol::MQ | Protocol::REPLY_ACK;
            let protocol = frontend.get_protocol_features().map_err(refused("GET_PROTOCOL_FEATURES"))? & wanted;
            frontend.set_protocol_features(protocol).map_err(refused("SET_PROTOCOL_FEATURES"))?;
            if protocol.contains(Protocol::REPLY_ACK) {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        frontend.set_features(acked).map_err(refused("SET_FEATURES"))?;

        let (queue_pairs, queue_size, frame, huge) = (self.queue_pairs, self.queue_size, self.frame, self.huge);
        let driver = Driver::new(DriverConfig { acked, queue_pairs, queue_size, frame, huge })?;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: driver.region.guest(),
            memory_size: driver.region.len() as u64,
            userspace_addr: driver.region.user(),
            mmap_offset: 0,
            mmap_handle: driver.file.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).map_err(refused("SET_MEM_TABLE"))?;
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        for index in 0..2 * queue_pairs as usize {
            let at = match index % 2 {
                0 => driver.rx[index / 2].addresses(),
                _ => driver.tx[index / 2].addresses(),
            };
            let ring = VringConfigData {
                queue_max_size: queue_size as u16,
                queue_size: queue_size as u16,
                flags: 0,
                desc_table_addr: at.descriptor,
                used_ring_addr: at.device,
                avail_ring_addr: at.driver,
                log_addr: None,
            };
            let notifier = Notifier { kick: eventfd()?, call: eventfd()? };
            frontend.set_vring_num(index, queue_size as u16).map_err(refused("SET_VRING_NUM"))?;
            self.set_vring_base(&frontend, &socket, index, acked).map_err(refused("SET_VRING_BASE"))?;
            frontend.set_vring_addr(index, &ring).map_err(refused("SET_VRING_ADDR"))?;
            frontend.set_vring_call(index, &notifier.call).map_err(refused("SET_VRING_CALL"))?;
            frontend.set_vring_kick(index, &notifier.kick).map_err(refused("SET_VRING_KICK"))?;
            if index % 2 == 0 { &mut rx } else { &mut tx }.push(notifier);
        }
        let mut connection = Connection { driver, rx, tx, acked, frontend, socket, path: self.socket.clone() };
        for queue in &mut connection.driver.rx {
            queue.refill();
        }
        if acked & bits::PROTOCOL_FEATURES != 0 {
            for index in 0..2 * queue_pairs as usize {
                connection.frontend.set_vring_enable(index, true).map_err(refused("SET_VRING_ENABLE"))?;
            }
        }
        // Some devices wait for the first kick before they look at a queue at all.
        connection.rx.iter().chain(&connection.tx).for_each(Notifier::kick);
        Ok(connection)
    }

    fn open(&self) -> Result<UnixStream, ConnectError> {
        let start = Instant::now();
        let path = self.socket.clone();
        if self.listen {
            let failed = |error| ConnectError::Listen { path: path.clone(), error };
            let listener = UnixListener::bind(&self.socket).map_err(failed)?;
            let came = sys::wait_readable([Some(listener.as_fd())], Some(self.patience)).map_err(failed)?;
            let accepted = if came[0] { listener.accept() } else { Err(io::ErrorKind::TimedOut.into()) };
            let _ = std::fs::remove_file(&self.socket);
            return Ok(accepted.map_err(failed)?.0);
        }
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(socket) => return Ok(socket),
                Err(error) if start.elapsed() >= self.patience => return Err(ConnectError::Connect { path, error }),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// The `vhost` crate carries 16 bits of a base; a packed ring has 32 (both positions with their wrap counters).
    fn set_vring_base(&self, frontend: &Frontend, socket: &UnixStream, index: usize, acked: u64) -> vhost::Result<()> {
        if acked & bits::RING_PACKED == 0 {
            return frontend.set_vring_base(index, 0);
        }
        const SET_VRING_BASE: u32 = 10;
        const VERSION: u32 = 1;
        let words = [SET_VRING_BASE, VERSION, 8, index as u32, ringroad_ring::packed::Base::FRESH.0];
        let message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        // No reply was asked for; messages of the crate before and after it are sent by this thread too.
        let mut socket = socket;
        socket.write_all(&message).map_err(broken)
    }
}

fn broken(error: io::Error) -> vhost::Error {
    vhost::Error::VhostUserProtocol(vhost::vhost_user::Error::SocketBroken(error))
}

/// How many pairs of queues the device has. Asked through a front end of its own: the `vhost` crate takes the answer as the
/// number of vrings that it may talk about, while devices answer in pairs.
fn queue_pairs(socket: &UnixStream) -> vhost::Result<u64> {
    let mut frontend = Frontend::from_stream(socket.try_clone().map_err(broken)?, 2);
    if frontend.get_features()? & bits::PROTOCOL_FEATURES == 0 {
        return Ok(1);
    }
    let protocol = frontend.get_protocol_features()? & Protocol::MQ;
    if protocol.is_empty() {
        return Ok(1);
    }
    frontend.set_protocol_features(protocol)?;
    frontend.get_queue_num()
}

impl Connection {
    /// Whether the device has gone.
    pub fn is_closed(&self) -> bool {
        // It never sends anything that was not asked for; what can be read is the end.
        !matches!(sys::wait_readable([Some(self.socket.as_fd())], Some(Duration::ZERO)), Ok([false]))
    }

    /// Waits until the device has used something of a pair of queues, or has gone, or the time is over.
    pub fn wait(&self, pair: usize, timeout: Duration) -> io::Result<()> {
        let fds = [
            self.rx.get(pair).map(|notifier| sys::borrow(&notifier.call)),
            self.tx.get(pair).map(|notifier| sys::borrow(&notifier.call)),
            Some(self.socket.as_fd()),
        ];
        sys::wait_readable(fds, Some(timeout))?;
        Ok(())
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A device that takes GET_VRING_BASE as the end of a queue is given the chance to stop before its memory goes.
        for index in 0..self.rx.len() + self.tx.len() {
            if self.frontend.get_vring_base(index).is_err() {
                break;
            }
        }
    }
}
