//! The front end of vhost-user: a driver that connects to any vhost-user network device (DPDK's virtio-user). Used by the
//! program's traffic tools; `vsock/client.rs` shares [`RawConnection`].

mod error;
mod raw;

use super::quirks;
use crate::sys;
pub use error::{CommandError, ConnectError};
pub use raw::{Notifier, RawConnection};
use raw::{in_time, refused};
use ringroad_net::{
    Config, Driver, DriverConfig, bits,
    control::{self, Command, DriverControl, Interrupts, StatisticTypes, Statistics},
};
use std::{
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;

/// How to connect a driver.
#[derive(Clone, Debug)]
pub struct Connector {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Create the socket and wait for the device, instead of connecting to one.
    pub listen: bool,
    /// How long to wait for the other side.
    pub patience: Duration,
    /// Feature bits to negotiate, if the device offers them. With VIRTIO_NET_F_GUEST_ANNOUNCE the device is asked to report
    /// changes of its configuration space: [`Connection::config_changed`]. With VIRTIO_NET_F_HASH_REPORT frames are added by
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

impl Connector {
    /// Connects, negotiates, and starts all queues.
    ///
    /// # Errors
    /// [`ConnectError`]: no device within [`Connector::patience`], it has too few queue pairs, lacks a required feature or refuses
    /// a message; the queue size is invalid, or the system has no memory or descriptors left.
    pub fn connect(&self) -> Result<Connection, ConnectError> {
        // These decide where the control queue is: for a driver with one pair, it is behind that pair.
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
            let found =
                in_time(&socket, || quirks::queue_pairs(&socket)).map_err(refused(&self.socket, "GET_QUEUE_NUM"))?;
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
                // The device notifies only if it has seen that we asked for it: polling now and then does not depend on that.
                None => notifier.wait(Duration::from_millis(1))?,
            }
        }
    }

    /// Returns whether the device has reported a change of its configuration space since the last call. It sends one report until
    /// that is read, that is until this is called.
    pub fn config_changed(&mut self) -> bool {
        self.handshake.config_changed()
    }

    /// Reads the configuration space; `None` if the device does not offer CONFIG.
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
            self.rx.get(pair).map(|notifier| sys::borrow(notifier.call())),
            self.tx.get(pair).map(|notifier| sys::borrow(notifier.call())),
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
