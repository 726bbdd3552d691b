//! The front end of vhost-user: a driver that connects to any vhost-user network device (DPDK's virtio-user). Used by the
//! program's traffic tools; `vsock/client.rs` shares [`RawConnection`].

use super::quirks;
use crate::{socket::connect, sys};
use ringroad_mem::Region;
use ringroad_net::{
    Config, Driver, DriverConfig, DriverError, bits,
    control::{self, Command, DriverControl, Interrupts, StatisticTypes, Statistics},
};
use ringroad_ring::{Addresses, DriverFault, Features};
use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures as Protocol,
        message::{VhostUserConfigFlags, VhostUserHeaderFlag},
    },
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// How to connect a driver.
#[derive(Clone, Debug)]
pub struct Connector {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Create the socket and wait for the device, instead of connecting to one.
    pub listen: bool,
    /// How long to wait for the other side.
    pub patience: Duration,
    /// Feature bits to negotiate, if the device offers them. With VIRTIO_NET_F_GUEST_ANNOUNCE the device is asked to tell when its
    /// configuration space changes: [`Connection::config_changed`]. With VIRTIO_NET_F_HASH_REPORT frames are added by
    /// [`DriverTx::add_behind`](ringroad_net::DriverTx::add_behind).
    pub features: u64,
    /// Number of queue pairs. With a control queue it must be one, or as many as the device has, which must offer VIRTIO_NET_F_MQ
    /// then; the device uses the first one until [`Command::Pairs`](control::Command::Pairs).
    pub queue_pairs: u16,
    /// Entries of each queue.
    pub queue_size: u32,
    /// Bytes of the largest frame that one buffer holds.
    pub frame: usize,
    /// Use hugepages if available.
    pub huge: bool,
}

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
    /// The device has too few queues; or more, and the driver has a control queue, which is behind the last one.
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

/// The notification descriptors of one queue.
#[derive(Debug)]
pub struct Notifier {
    kick: EventFd,
    call: EventFd,
}

impl Notifier {
    fn new() -> io::Result<Notifier> {
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        Ok(Notifier { kick: eventfd()?, call: eventfd()? })
    }

    /// Notifies the device.
    pub fn kick(&self) {
        let _ = self.kick.write(1);
    }

    /// Returns the descriptor that is readable when the device has notified.
    pub(crate) fn call(&self) -> &EventFd {
        &self.call
    }

    /// Waits until the device has notified, or until the timeout, and clears the notification.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait(&self, timeout: Duration) -> io::Result<()> {
        sys::wait_readable([Some(sys::borrow(&self.call))], Some(timeout))?;
        self.clear();
        Ok(())
    }

    /// Clears pending notifications.
    pub fn clear(&self) {
        let _ = self.call.read();
    }
}

/// A driver that is connected to a device. Dropped, it stops the queues and disconnects.
///
/// Memory, rings and buffers outlive the device: after a disconnect, [`Connection::reconnect`] hands them to the next one,
/// and everything in flight continues.
#[derive(Debug)]
pub struct Connection {
    /// Memory and queues.
    pub driver: Driver,
    /// Notifications of the receive queues.
    pub rx: Vec<Notifier>,
    /// Notifications of the transmit queues.
    pub tx: Vec<Notifier>,
    /// Notifications of the control queue.
    control: Option<Notifier>,
    /// The negotiated feature bits.
    pub acked: u64,
    handshake: RawConnection,
    connector: Connector,
    /// The queues were not stopped by [`Connection::stop`].
    running: bool,
}

/// The connection to a device, for a driver of any kind: memory and rings are the caller's. [`Connection`] is a network driver on
/// it.
pub struct RawConnection {
    frontend: Frontend,
    pub(crate) socket: UnixStream,
    pub(crate) path: PathBuf,
    /// The negotiated feature bits.
    pub acked: u64,
    protocol: Protocol,
    /// On which the device says that its configuration space has changed.
    notices: Option<UnixStream>,
}

impl std::fmt::Debug for RawConnection {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RawConnection").field("path", &self.path).field("acked", &self.acked).finish_non_exhaustive()
    }
}

impl RawConnection {
    /// Connects to the device at a socket, waiting up to `patience` for it to listen, and negotiates those of the `wanted`
    /// feature bits that it offers. `vrings`: how many vrings the driver uses.
    ///
    /// # Errors
    /// No device listens there, it does not offer VIRTIO_F_VERSION_1, or it refuses a message.
    pub fn connect(path: &Path, patience: Duration, wanted: u64, vrings: u64) -> Result<RawConnection, ConnectError> {
        let socket = Self::open(path, false, patience)?;
        let connection = Self::negotiate(socket, path, wanted, Protocol::empty(), vrings)?;
        connection.accept()?;
        Ok(connection)
    }

    /// Connects to the device, or waits for it to connect.
    pub(crate) fn open(path: &Path, listen: bool, patience: Duration) -> Result<UnixStream, ConnectError> {
        let start = Instant::now();
        let path = path.to_owned();
        if listen {
            let failed = |error| ConnectError::Listen { path: path.clone(), error };
            let listener = UnixListener::bind(&path).map_err(failed)?;
            let came = sys::wait_readable([Some(listener.as_fd())], Some(patience)).map_err(failed)?;
            let accepted = if came == [true] { listener.accept() } else { Err(io::ErrorKind::TimedOut.into()) };
            let _ = std::fs::remove_file(&path);
            return Ok(accepted.map_err(failed)?.0);
        }
        loop {
            // A full backlog is retried like a device that does not listen yet.
            match connect(&path).and_then(|socket| socket.set_nonblocking(false).map(|()| socket)) {
                Ok(socket) => return Ok(socket),
                Err(error) if start.elapsed() >= patience => return Err(ConnectError::Connect { path, error }),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Negotiates those of the `wanted` features that the device offers, for a device with `vrings` vrings.
    pub(crate) fn negotiate(
        socket: UnixStream,
        path: &Path,
        wanted: u64,
        protocol: Protocol,
        vrings: u64,
    ) -> Result<RawConnection, ConnectError> {
        let refused = |what| refused(path, what);
        let mut frontend = Frontend::from_stream(socket.try_clone()?, vrings);
        frontend.set_owner().map_err(refused("SET_OWNER"))?;
        let offered = frontend.get_features().map_err(refused("GET_FEATURES"))?;
        if offered & bits::VERSION_1 == 0 {
            return Err(ConnectError::Features { offered, missing: "VIRTIO_F_VERSION_1" });
        }
        let acked = offered & (wanted | bits::VERSION_1 | bits::PROTOCOL_FEATURES);
        let mut both = Protocol::empty();
        if acked & bits::PROTOCOL_FEATURES != 0 {
            both = frontend.get_protocol_features().map_err(refused("GET_PROTOCOL_FEATURES"))?
                & (protocol | Protocol::REPLY_ACK);
            frontend.set_protocol_features(both).map_err(refused("SET_PROTOCOL_FEATURES"))?;
            if both.contains(Protocol::REPLY_ACK) {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        let mut notices = None;
        if both.contains(Protocol::CONFIG | Protocol::BACKEND_REQ) {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            frontend.set_backend_request_fd(&theirs).map_err(refused("SET_BACKEND_REQ_FD"))?;
            notices = Some(ours);
        }
        Ok(RawConnection { frontend, socket, path: path.to_owned(), acked, protocol: both, notices })
    }

    /// Sends SET_FEATURES. Must be called before the methods below that set up memory and rings.
    pub(crate) fn accept(&self) -> Result<(), ConnectError> {
        self.frontend.set_features(self.acked).map_err(refused(&self.path, "SET_FEATURES"))
    }

    /// Returns whether the device has disconnected.
    pub(crate) fn is_closed(&self) -> bool {
        // The device sends nothing without a request, so a readable socket means the end.
        !matches!(sys::wait_readable([Some(self.socket.as_fd())], Some(Duration::ZERO)), Ok([false]))
    }

    /// Returns whether the device has said since the last call that its configuration space has changed.
    pub(crate) fn config_changed(&mut self) -> bool {
        const CONFIG_CHANGE: u32 = 2;
        let Some(notices) = &mut self.notices else { return false };
        let (mut changed, mut header) = (false, [[0; 4]; 3]);
        // The device writes whole messages; this kind has no payload, and no other one was negotiated.
        while notices.read_exact(header.as_flattened_mut()).is_ok() {
            changed |= header.map(u32::from_ne_bytes).starts_with(&[CONFIG_CHANGE]);
        }
        changed
    }

    /// Returns whether the device shows its configuration space.
    pub(crate) fn has_config(&self) -> bool {
        self.protocol.contains(Protocol::CONFIG)
    }

    /// Returns the first `len` bytes of the configuration space, or `None` if the device did not offer CONFIG.
    pub(crate) fn config(&mut self, len: usize) -> Result<Option<Vec<u8>>, ConnectError> {
        if !self.has_config() {
            return Ok(None);
        }
        let flags = VhostUserConfigFlags::empty();
        let config = self.frontend.get_config(0, len as u32, flags, &vec![0; len]);
        Ok(Some(config.map_err(refused(&self.path, "GET_CONFIG"))?.1))
    }

    /// Shares the driver's memory with the device.
    ///
    /// # Errors
    /// The device refuses it.
    pub fn share(&self, region: &Region, file: &File) -> Result<(), ConnectError> {
        // The seal keeps the device from truncating the file. Not fatal without it, as the device is usually trusted.
        if let Err(error) = Region::seal(file) {
            log::warn!(
                "{}: cannot seal the driver's memory, so the device can truncate it: {error}",
                self.path.display()
            );
        }
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: region.guest(),
            memory_size: region.len() as u64,
            userspace_addr: region.user(),
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region]).map_err(refused(&self.path, "SET_MEM_TABLE"))?;
        Ok(())
    }

    /// Sets up a vring that has not been used yet, and returns its notification descriptors.
    ///
    /// # Errors
    /// The device refuses it, or the system has no more descriptors.
    pub fn ring(&mut self, index: usize, size: u32, at: Addresses) -> Result<Notifier, ConnectError> {
        let notifier = Notifier::new()?;
        let fresh = Features::negotiated(self.acked).fresh_base();
        self.ring_at(index, size, at, fresh, &notifier)?;
        Ok(notifier)
    }

    /// Sets up a vring that resumes at `base`.
    pub(crate) fn ring_at(
        &mut self,
        index: usize,
        size: u32,
        at: Addresses,
        base: u32,
        notifier: &Notifier,
    ) -> Result<(), ConnectError> {
        let ring = VringConfigData {
            queue_max_size: size as u16,
            queue_size: size as u16,
            flags: 0,
            desc_table_addr: at.descriptor,
            used_ring_addr: at.device,
            avail_ring_addr: at.driver,
            log_addr: None,
        };
        let refused = |what| refused(&self.path, what);
        let frontend = &self.frontend;
        frontend.set_vring_num(index, size as u16).map_err(refused("SET_VRING_NUM"))?;
        match self.acked & bits::RING_PACKED {
            0 => frontend.set_vring_base(index, base as u16),
            _ => quirks::set_vring_base(&self.socket, index as u32, base),
        }
        .map_err(refused("SET_VRING_BASE"))?;
        frontend.set_vring_addr(index, &ring).map_err(refused("SET_VRING_ADDR"))?;
        frontend.set_vring_call(index, &notifier.call).map_err(refused("SET_VRING_CALL"))?;
        frontend.set_vring_kick(index, &notifier.kick).map_err(refused("SET_VRING_KICK"))?;
        Ok(())
    }

    /// Enables vrings that were set up, from 0 on.
    ///
    /// # Errors
    /// The device refuses it.
    pub fn enable(&mut self, vrings: usize) -> Result<(), ConnectError> {
        if self.acked & bits::PROTOCOL_FEATURES != 0 {
            for index in 0..vrings {
                self.frontend.set_vring_enable(index, true).map_err(refused(&self.path, "SET_VRING_ENABLE"))?;
            }
        }
        Ok(())
    }

    /// Stops vrings, after which the device leaves their memory alone. Yields each vring with its base, up to the first one
    /// for which the device does not reply.
    pub fn stop(&self, vrings: usize) -> impl Iterator<Item = (usize, u32)> {
        (0..vrings).map_while(|index| Some((index, self.frontend.get_vring_base(index).ok()?)))
    }
}

fn refused(path: &Path, what: &'static str) -> impl Fn(vhost::Error) -> ConnectError {
    let path = path.to_owned();
    move |error| ConnectError::Refused { path: path.clone(), what, error: error.to_string() }
}

impl Connector {
    /// Connects, negotiates, and starts all queues.
    ///
    /// # Errors
    /// [`ConnectError`]: no device within [`Connector::patience`], it has too few queue pairs, lacks a required feature or refuses
    /// a message; the queue size is invalid, or the system has no memory or descriptors left.
    pub fn connect(&self) -> Result<Connection, ConnectError> {
        // Where the control queue is depends on these: a driver with one pair has it behind that one.
        let many = bits::NET_F_MQ | bits::NET_F_RSS;
        let controls_many = self.queue_pairs > 1 && self.features & bits::NET_F_CTRL_VQ != 0;
        let features = if controls_many { self.features | bits::NET_F_MQ } else { self.features & !many };
        let mut handshake = self.negotiate(self.patience, features)?;
        handshake.accept()?;
        let acked = handshake.acked;
        if acked & bits::NET_F_CTRL_VQ != 0 && controls_many && acked & bits::NET_F_MQ == 0 {
            return Err(ConnectError::Features { offered: acked, missing: "VIRTIO_NET_F_MQ" });
        }
        let (queue_pairs, queue_size, frame, huge) = (self.queue_pairs, self.queue_size, self.frame, self.huge);
        let mut driver = Driver::new(DriverConfig { acked, queue_pairs, queue_size, frame, huge })?;
        let notifiers = || (0..queue_pairs).map(|_| Notifier::new()).collect::<io::Result<Vec<_>>>();
        let (rx, tx) = (notifiers()?, notifiers()?);
        let control = driver.control.is_some().then(Notifier::new).transpose()?;
        set_up(&mut handshake, &driver, queue_size, &rx, &tx, control.as_ref())?;
        driver.rx.iter_mut().for_each(|queue| {
            queue.refill();
        });
        handshake.enable(2 * usize::from(queue_pairs) + usize::from(control.is_some()))?;
        let connector = self.clone();
        let connection = Connection { driver, rx, tx, control, acked, handshake, connector, running: true };
        connection.kick();
        Ok(connection)
    }

    /// Connects to a device, checks its number of queue pairs, and negotiates features.
    fn negotiate(&self, patience: Duration, features: u64) -> Result<RawConnection, ConnectError> {
        let socket = RawConnection::open(&self.socket, self.listen, patience)?;
        if self.queue_pairs > 1 {
            let found = quirks::queue_pairs(&socket).map_err(refused(&self.socket, "GET_QUEUE_NUM"))?;
            let controls = self.features & bits::NET_F_CTRL_VQ != 0;
            if found < self.queue_pairs.into() || controls && found > self.queue_pairs.into() {
                return Err(ConnectError::Queues { found, wanted: self.queue_pairs });
            }
        }
        let vrings = 2 * u64::from(self.queue_pairs) + 1;
        let told = if features & bits::NET_F_GUEST_ANNOUNCE == 0 {
            Protocol::empty()
        } else {
            Protocol::CONFIG | Protocol::BACKEND_REQ
        };
        RawConnection::negotiate(socket, &self.socket, features, Protocol::MQ | told, vrings)
    }
}

/// Shares the driver's memory and sets up all queues at their current positions.
fn set_up(
    handshake: &mut RawConnection,
    driver: &Driver,
    size: u32,
    rx: &[Notifier],
    tx: &[Notifier],
    control: Option<&Notifier>,
) -> Result<(), ConnectError> {
    handshake.share(&driver.region, &driver.file)?;
    if let (Some(queue), Some(notifier)) = (&driver.control, control) {
        handshake.ring_at(rx.len() + tx.len(), queue.size(), queue.addresses(), queue.base(), notifier)?;
    }
    let (rx, tx) = (driver.rx.iter().zip(rx), driver.tx.iter().zip(tx));
    for (pair, ((receive, received), (transmit, sent))) in rx.zip(tx).enumerate() {
        handshake.ring_at(2 * pair, size, receive.addresses(), receive.base(), received)?;
        handshake.ring_at(2 * pair + 1, size, transmit.addresses(), transmit.base(), sent)?;
    }
    Ok(())
}

impl Connection {
    /// Returns whether the device has disconnected.
    pub fn is_closed(&self) -> bool {
        self.handshake.is_closed()
    }

    /// Connects, within `patience`, to the device that replaces one that has disconnected, and hands it the same memory and
    /// rings, each at the base that the driver knows. A device that records ring positions, like this crate's, resumes
    /// exactly where its predecessor was killed; any other processes again what its predecessor had taken but not returned.
    /// Nothing in flight in the driver is lost. Kicks that the old device missed are repeated; notifications that it never
    /// sent are not, so check all queues afterwards.
    ///
    /// # Errors
    /// [`ConnectError::Changed`] at once if the new device lacks a feature in use, [`ConnectError::Queues`] if it has too few
    /// queues. Other errors are retried, as a device may also be killed during the handshake; after `patience` the last one
    /// is returned. The connection is unchanged.
    pub fn reconnect(&mut self, patience: Duration) -> Result<(), ConnectError> {
        let start = Instant::now();
        loop {
            match self.try_reconnect(patience.saturating_sub(start.elapsed())) {
                Ok(()) => return Ok(()),
                Err(error @ (ConnectError::Changed { .. } | ConnectError::Queues { .. })) => return Err(error),
                Err(error) if start.elapsed() >= patience => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn try_reconnect(&mut self, patience: Duration) -> Result<(), ConnectError> {
        let mut handshake = self.connector.negotiate(patience, self.acked)?;
        if handshake.acked != self.acked {
            let offered = handshake.acked;
            return Err(ConnectError::Changed { offered, lacks: self.acked & !offered });
        }
        handshake.accept()?;
        let Connection { driver, rx, tx, control, .. } = &*self;
        set_up(&mut handshake, driver, self.connector.queue_size, rx, tx, control.as_ref())?;
        handshake.enable(rx.len() + tx.len() + usize::from(control.is_some()))?;
        self.handshake = handshake;
        self.running = true;
        self.kick();
        Ok(())
    }

    /// Some devices wait for the first kick before they process a queue.
    fn kick(&self) {
        self.rx.iter().chain(&self.tx).chain(&self.control).for_each(Notifier::kick);
    }

    /// Sends a command on the control queue and waits up to `patience` for its acknowledgement.
    ///
    /// # Errors
    /// [`CommandError`]: there is no control queue, or the device refuses the command or does not answer.
    pub fn command(&mut self, command: &Command<'_>, patience: Duration) -> Result<(), CommandError> {
        let (Some(queue), Some(notifier)) = (&mut self.driver.control, &self.control) else {
            return Err(CommandError::NoQueue);
        };
        if !queue.send(command) {
            return Err(CommandError::Busy);
        }
        notifier.kick();
        let start = Instant::now();
        loop {
            match queue.reply()? {
                Some(control::OK) => return Ok(()),
                Some(_) => return Err(CommandError::Refused),
                None if start.elapsed() >= patience => return Err(CommandError::NoAnswer),
                // The device notifies if it has read that we want to be; a look now and then does not depend on that.
                None => notifier.wait(Duration::from_millis(1))?,
            }
        }
    }

    /// Returns whether the device has said since the last call that its configuration space has changed. It says so once until the
    /// notice is read, that is until this is called.
    pub fn config_changed(&mut self) -> bool {
        self.handshake.config_changed()
    }

    /// Reads the configuration space; `None` if the device does not show it.
    ///
    /// # Errors
    /// The device refuses the message, or has disconnected.
    pub fn config(&mut self) -> Result<Option<Config>, ConnectError> {
        let bytes = self.handshake.config(size_of::<[u8; 24]>())?;
        Ok(bytes.and_then(|bytes| bytes.first_chunk().map(Config::from_bytes)))
    }

    /// Asks the device how long interrupts of a queue may wait. Waits as [`Connection::command`] does.
    ///
    /// # Errors
    /// As for [`Connection::command`].
    pub fn interrupts(&mut self, queue: u16, patience: Duration) -> Result<Interrupts, CommandError> {
        self.command(&Command::AskInterrupts(queue), patience)?;
        self.driver.control.as_ref().and_then(DriverControl::interrupts).ok_or(CommandError::NoQueue)
    }

    /// Asks the device which types of statistics there are. Waits as [`Connection::command`] does.
    ///
    /// # Errors
    /// As for [`Connection::command`].
    pub fn statistic_types(&mut self, patience: Duration) -> Result<StatisticTypes, CommandError> {
        self.command(&Command::AskStatisticTypes, patience)?;
        self.driver.control.as_ref().and_then(DriverControl::statistic_types).ok_or(CommandError::NoQueue)
    }

    /// Asks the device for statistics of these types of the vrings with these indices. Waits as [`Connection::command`] does.
    ///
    /// # Errors
    /// As for [`Connection::command`].
    pub fn statistics(
        &mut self,
        wanted: &[(u16, StatisticTypes)],
        patience: Duration,
    ) -> Result<Vec<Statistics>, CommandError> {
        self.command(&Command::AskStatistics(wanted), patience)?;
        Ok(self.driver.control.as_ref().map(DriverControl::statistics).unwrap_or_default())
    }

    /// Stops all queues. Returns how many buffers the device took and never returned, which should be 0; `None` if it has
    /// disconnected or does not reply. Buffers that it used before it stopped can still be reclaimed and received.
    pub fn stop(&mut self) -> Option<u32> {
        self.running = false;
        let vrings = self.rx.len() + self.tx.len() + usize::from(self.control.is_some());
        let (mut stopped, mut missing) = (0, 0);
        for (vring, base) in self.handshake.stop(vrings) {
            stopped += 1;
            missing += match vring % 2 {
                _ if vring / 2 == self.rx.len() => 0,
                0 => self.driver.rx.get(vring / 2)?.missing(base),
                _ => self.driver.tx.get(vring / 2)?.missing(base),
            };
        }
        (stopped == vrings).then_some(missing)
    }

    /// Waits until the device has notified one queue of a pair or disconnected, or until the timeout.
    ///
    /// # Errors
    /// The kernel refuses to poll; a timeout is no error.
    pub fn wait(&self, pair: usize, timeout: Duration) -> io::Result<()> {
        let fds = [
            self.rx.get(pair).map(|notifier| sys::borrow(&notifier.call)),
            self.tx.get(pair).map(|notifier| sys::borrow(&notifier.call)),
            Some(self.handshake.socket.as_fd()),
        ];
        sys::wait_readable(fds, Some(timeout))?;
        Ok(())
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.handshake.path
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // GET_VRING_BASE lets the device stop its queues before the memory is unmapped.
        if self.running {
            let _ = self.stop();
        }
    }
}
