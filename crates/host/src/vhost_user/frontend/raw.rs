//! The protocol from the front end's side, for a driver of any kind, and the notification descriptors of its queues.

use super::error::ConnectError;
use crate::{socket::connect, sys, vhost_user::quirks};
use ringroad_mem::Region;
use ringroad_ring::{Addresses, Features, bits};
use std::{
    fs::File,
    io::{self, Read},
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
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

/// How long a device may take to answer. Longer than any takes to map memory or to stop a queue.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reports of the device that are read at a time.
const REPORTS: usize = 64;

/// The notification descriptors of one queue.
#[derive(Debug)]
pub struct Notifier {
    kick: EventFd,
    call: EventFd,
    /// A kick blocked: it is not written to again.
    spoilt: AtomicBool,
}

impl Notifier {
    pub(super) fn new() -> io::Result<Notifier> {
        sys::guard::start()?;
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        Ok(Notifier { kick: eventfd()?, call: eventfd()?, spoilt: AtomicBool::new(false) })
    }

    /// Notifies the device, unless that has blocked once: see [`Notifier::is_spoilt`].
    pub fn kick(&self) {
        if self.is_spoilt() {
            return;
        }
        if sys::guard::add_one(sys::borrow(&self.kick)).is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
            self.spoilt.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a notification blocked, which only a misbehaving device causes (it fills the counter and clears
    /// O_NONBLOCK). It is not notified any more.
    pub fn is_spoilt(&self) -> bool {
        self.spoilt.load(Ordering::Relaxed)
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

    /// Clears pending notifications. Never blocks, whatever the device does to the descriptor.
    pub fn clear(&self) {
        sys::guard::drain(sys::borrow(&self.call));
    }
}

/// The connection to a device, for a driver of any kind: memory and rings are the caller's.
/// [`Connection`](crate::vhost_user::Connection) is a network driver on it.
pub struct RawConnection {
    frontend: Frontend,
    pub(crate) socket: UnixStream,
    pub(crate) path: PathBuf,
    /// The negotiated feature bits.
    pub acked: u64,
    protocol: Protocol,
    /// Channel for reports that the configuration space has changed.
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
                Err(_) => thread::sleep(Duration::from_millis(10)),
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
        let patient = socket.try_clone()?;
        in_time(&patient, || Self::try_negotiate(socket, path, wanted, protocol, vrings))
    }

    fn try_negotiate(
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
        in_time(&self.socket, || self.frontend.set_features(self.acked)).map_err(refused(&self.path, "SET_FEATURES"))
    }

    /// Returns whether the device has disconnected.
    pub(crate) fn is_closed(&self) -> bool {
        // The device sends nothing without a request, so a readable socket means that it has disconnected.
        !matches!(sys::wait_readable([Some(self.socket.as_fd())], Some(Duration::ZERO)), Ok([false]))
    }

    /// Returns whether the device has reported a change of its configuration space since the last call.
    pub(crate) fn config_changed(&mut self) -> bool {
        const CONFIG_CHANGE: u32 = 2;
        let Some(notices) = &mut self.notices else { return false };
        let (mut changed, mut header) = (false, [[0; 4]; 3]);
        // The device writes whole messages; this kind has no payload, and no other one was negotiated. One that never stops has
        // the others read by the next call.
        for _ in 0..REPORTS {
            if notices.read_exact(header.as_flattened_mut()).is_err() {
                break;
            }
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
        let config = in_time(&self.socket, || self.frontend.get_config(0, len as u32, flags, &vec![0; len]));
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
        in_time(&self.socket, || self.frontend.set_mem_table(&[region]))
            .map_err(refused(&self.path, "SET_MEM_TABLE"))?;
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
        in_time(&self.socket, || self.try_ring_at(index, &ring, base, notifier))
    }

    fn try_ring_at(
        &self,
        index: usize,
        ring: &VringConfigData,
        base: u32,
        notifier: &Notifier,
    ) -> Result<(), ConnectError> {
        let refused = |what| refused(&self.path, what);
        let (frontend, size) = (&self.frontend, ring.queue_size);
        frontend.set_vring_num(index, size).map_err(refused("SET_VRING_NUM"))?;
        match self.acked & bits::RING_PACKED {
            0 => frontend.set_vring_base(index, base as u16),
            _ => quirks::set_vring_base(&self.socket, index as u32, base),
        }
        .map_err(refused("SET_VRING_BASE"))?;
        frontend.set_vring_addr(index, ring).map_err(refused("SET_VRING_ADDR"))?;
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
                let enabled = in_time(&self.socket, || self.frontend.set_vring_enable(index, true));
                enabled.map_err(refused(&self.path, "SET_VRING_ENABLE"))?;
            }
        }
        Ok(())
    }

    /// Stops vrings, after which the device leaves their memory alone. Yields each vring with its base, up to the first one
    /// for which the device does not reply.
    pub fn stop(&self, vrings: usize) -> impl Iterator<Item = (usize, u32)> {
        let stop = |index| in_time(&self.socket, || self.frontend.get_vring_base(index)).ok();
        (0..vrings).map_while(move |index| Some((index, stop(index)?)))
    }
}

/// Sends requests to the device at a socket, and waits for its answers. A device that takes longer than [`PATIENCE`] is
/// disconnected, so that they fail: the `vhost` crate goes on waiting after a timeout of the socket.
pub(super) fn in_time<T>(socket: &UnixStream, requests: impl FnOnce() -> T) -> T {
    let (done, is_done) = mpsc::channel::<()>();
    let watch = move || {
        if is_done.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    };
    thread::scope(|scope| {
        // Without a thread left, it is waited for.
        let _ = thread::Builder::new().name("patience".into()).stack_size(64 << 10).spawn_scoped(scope, watch);
        let result = requests();
        drop(done);
        result
    })
}

pub(super) fn refused(path: &Path, what: &'static str) -> impl Fn(vhost::Error) -> ConnectError {
    let path = path.to_owned();
    move |error| ConnectError::Refused { path: path.clone(), what, error: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_device_that_reports_without_end_is_read_in_parts() {
        let (socket, _device) = UnixStream::pair().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let frontend = Frontend::from_stream(socket.try_clone().unwrap(), 2);
        let (path, protocol, notices) = (PathBuf::new(), Protocol::empty(), Some(ours));
        let mut connection = RawConnection { frontend, socket, path, acked: 0, protocol, notices };
        let report = [2, 1, 0_u32].map(u32::to_ne_bytes);
        theirs.write_all(&report.as_flattened().repeat(2 * REPORTS + 1)).unwrap();
        let changed: Vec<bool> = (0..4).map(|_| connection.config_changed()).collect();
        assert_eq!(changed, [true, true, true, false]);
    }
}
