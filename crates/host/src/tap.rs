//! TAP ports: interfaces of the host.

mod header;
mod longest;

use crate::{
    gate::{Gate, Lease},
    port::{PortKind, PortSettings},
    sys,
};
use header::{LONG_HEAD, begin, described};
use longest::Longest;
use parking_lot::MutexGuard;
use ringroad_frame::{
    BURST, Burst, Counters, HEADROOM, MAX_FRAME, NotAFrame, Poured, Sink, Source,
    offload::{Offload, Support},
};
use ringroad_mem::{Region, Span, Table};
use ringroad_net::offload;
use ringroad_wire::{
    ethernet::{self, MacAddr},
    vnet_hdr,
};
use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

/// Why there is no TAP port.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel has no TUN/TAP driver, or it is not visible here.
    #[error(
        "TAP interface {name}: /dev/net/tun does not exist; load the module (modprobe tun) or pass the device to the container"
    )]
    NoDevice {
        /// The interface.
        name: String,
    },
    /// The driver's device must not be opened, which most systems allow to everybody.
    #[error(
        "TAP interface {name}: not permitted to open /dev/net/tun; run as root, or let the administrator allow it: chmod 666 /dev/net/tun (which interfaces a user may open is still up to the kernel)"
    )]
    Device {
        /// The interface.
        name: String,
    },
    /// Making an interface, or opening somebody else's, is not allowed.
    #[error(
        "TAP interface {name}: not permitted; run as root or with CAP_NET_ADMIN, or let the administrator prepare it: ip tuntap add {name} mode tap vnet_hdr user {user}"
    )]
    Permission {
        /// The interface.
        name: String,
        /// Who we are.
        user: String,
    },
    /// Somebody else has it open.
    #[error("TAP interface {name} is in use by another program")]
    Busy {
        /// The interface.
        name: String,
    },
    /// Anything else.
    #[error("TAP interface {name}: {error}")]
    Other {
        /// The interface.
        name: String,
        /// What the kernel says.
        error: io::Error,
    },
}

// The header that the kernel puts before each frame takes the place of the headroom, or what is behind it in a longer one.
const _: () = assert!(vnet_hdr::SIZE == HEADROOM && vnet_hdr::TUNNELED >= 2 * HEADROOM);

/// Where the kernel's driver is.
const DEVICE: &str = "/dev/net/tun";

/// Room for one frame.
const BUFFER: usize = (vnet_hdr::TUNNELED + MAX_FRAME).next_multiple_of(4096);

/// Where frames of one queue come from.
#[derive(Debug)]
struct Queue {
    file: File,
    /// Frames that came from the interface, one buffer each.
    pool: Arc<Table>,
    /// Buffer of each frame of the last burst, its length, and what is left to do to it.
    frames: Vec<(u64, usize, Offload)>,
    /// Whether these frames were not delivered and come again.
    retained: bool,
}

/// A TAP interface as a port.
pub struct TapPort {
    name: String,
    interface: String,
    /// The queues' two directions, each with a gate of its own: of a hairpin both are in use at once.
    sources: Vec<Gate<Queue>>,
    sinks: Vec<Gate<File>>,
    /// Descriptors of the queues, to wait for frames.
    files: Vec<File>,
    longest: Longest,
    /// Length in bytes of the header before each frame: [`vnet_hdr::SIZE`], or [`vnet_hdr::TUNNELED`].
    header: usize,
    /// Whether frames to link-local addresses are read; else they are dropped.
    link_local: AtomicBool,
    /// The offloads that frames from the interface may have, as the bits of [`Support`].
    offloads: AtomicU16,
    received: Vec<Arc<Counters>>,
    sent: Vec<Arc<Counters>>,
}

impl std::fmt::Debug for TapPort {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("TapPort")
            .field("name", &self.name)
            .field("interface", &self.interface)
            .finish_non_exhaustive()
    }
}

impl TapPort {
    /// Opens or makes the interface and brings it up.
    ///
    /// # Errors
    /// [`TapError`]: there is no TUN/TAP driver, the process has no permission, another program uses the interface, or the kernel
    /// refuses its name, number of queues or MTU.
    pub fn open(port: &str, interface: &str, queues: u16, mtu: Option<u16>) -> Result<TapPort, TapError> {
        let name = interface;
        let explain = |error: io::Error| explain(name, error, Driver::find());
        let mut tap = TapPort {
            name: port.to_owned(),
            interface: interface.to_owned(),
            sources: Vec::new(),
            sinks: Vec::new(),
            files: Vec::new(),
            longest: Longest::new(interface),
            header: vnet_hdr::SIZE,
            link_local: AtomicBool::new(false),
            offloads: AtomicU16::new(0),
            received: Vec::new(),
            sent: Vec::new(),
        };
        for _ in 0..queues {
            let file = sys::open_tap(name, queues > 1).map_err(explain)?;
            let region = Region::private(BURST * BUFFER, 0).map_err(|error| explain(io::Error::other(error)))?;
            let pool = Table::default().with(region).map_err(|error| explain(io::Error::other(error)))?;
            tap.files.push(file.try_clone().map_err(explain)?);
            tap.sinks.push(Gate::new(file.try_clone().map_err(explain)?));
            let frames = Vec::with_capacity(BURST);
            tap.sources.push(Gate::new(Queue { file, pool: Arc::new(pool), frames, retained: false }));
            tap.received.push(Arc::default());
            tap.sent.push(Arc::default());
        }
        match sys::set_link(name, mtu) {
            // An interface that was prepared for us is brought up by whoever prepared it.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                log::warn!(
                    "port {port}: not permitted to bring the TAP interface up; do it with: ip link set {name} up"
                );
            }
            result => result.map_err(explain)?,
        }
        tap.longest.ask();
        Ok(tap)
    }

    /// Lets frames in UDP tunnels pass uncut between this interface and other ports that take them, before it becomes a port. All
    /// frames have longer headers then, and none are read straight into a guest's buffers. Returns whether the kernel knows them
    /// (Linux 6.17).
    ///
    /// # Errors
    /// [`TapError`]: the kernel refuses the headers.
    pub fn use_tunnels(&mut self) -> Result<bool, TapError> {
        // One descriptor stands for the interface.
        let Some(file) = self.files.first() else { return Ok(false) };
        let set = |len| sys::set_tap_header(file, len).map_err(|error| explain(&self.interface, error, Driver::There));
        let knows = set(vnet_hdr::TUNNELED)?;
        if !knows {
            set(vnet_hdr::SIZE)?;
        }
        self.header = if knows { vnet_hdr::TUNNELED } else { vnet_hdr::SIZE };
        Ok(knows)
    }

    /// Changes the interface's MTU. Its queues notice at the first frame that is longer than before.
    ///
    /// # Errors
    /// The interface no longer exists or does not allow this MTU.
    pub fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        sys::set_mtu(&self.interface, mtu)
    }

    /// Sets whether the interface has a carrier, as it has from the start. Without one the host sends nothing to it.
    ///
    /// # Errors
    /// The interface no longer exists, or the kernel has no such request (before 5.0).
    pub fn set_carrier(&self, up: bool) -> io::Result<()> {
        self.files.first().map_or(Ok(()), |file| sys::set_carrier(file, up))
    }
}

impl PortKind for TapPort {
    type Lease = TapLease;
    type Source<'a> = TapSource<'a>;
    type Sink<'a> = TapSink<'a>;

    fn name(&self) -> &str {
        &self.name
    }

    fn received(&self) -> &[Arc<Counters>] {
        &self.received
    }

    fn sent(&self) -> &[Arc<Counters>] {
        &self.sent
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().map(File::as_fd).collect()
    }

    fn lease(&self, index: usize) -> Option<TapLease> {
        self.sources.get(index)?.try_lease().map(TapLease)
    }

    fn source<'a>(&'a self, index: usize, TapLease(queue): &'a mut TapLease) -> Option<TapSource<'a>> {
        let link_local = self.link_local.load(Ordering::Relaxed);
        let cuts = Support::from_bits_truncate(self.offloads.load(Ordering::Relaxed)).intersects(CUT);
        let (counters, header) = (self.received.get(index)?, self.header);
        Some(TapSource { queue, counters, longest: &self.longest, header, link_local, cuts })
    }

    fn sink(&self, hint: usize, frames: usize) -> Option<TapSink<'_>> {
        let index = hint % self.sinks.len().max(1);
        let counters = self.sent.get(index)?;
        match self.sinks.get(index)?.try_enter() {
            Some(file) => Some(TapSink { file, counters, longest: &self.longest, header: self.header }),
            None => {
                counters.busy.add(frames as u64);
                None
            }
        }
    }

    fn takes(&self) -> Support {
        described(self.header)
    }

    fn others_take(&self, support: Support) {
        let support = support & described(self.header);
        if self.offloads.swap(support.bits(), Ordering::Relaxed) == support.bits() {
            return;
        }
        // One descriptor stands for the interface.
        if let Some(file) = self.files.first()
            && let Err(error) = sys::set_tap_offloads(file, support)
        {
            log::warn!("port {}: cannot set the offloads of TAP interface {}: {error}", self.name, self.interface);
        }
    }

    fn set(&self, settings: &PortSettings) {
        self.link_local.store(settings.limits.link_local, Ordering::Relaxed);
    }

    #[inline]
    fn weight(&self) -> usize {
        // A system call for each frame.
        8
    }
}

/// Whether there is a TUN/TAP driver here that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    Missing,
    Forbidden,
    There,
}

impl Driver {
    fn find() -> Driver {
        match OpenOptions::new().read(true).write(true).open(DEVICE) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Driver::Forbidden,
            Err(_) if !Path::new(DEVICE).exists() => Driver::Missing,
            _ => Driver::There,
        }
    }
}

/// What an error of the kernel means for an interface.
fn explain(name: &str, error: io::Error, driver: Driver) -> TapError {
    let name = name.to_owned();
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) if driver == Driver::Missing => TapError::NoDevice { name },
        Some(libc::EPERM | libc::EACCES) if driver == Driver::Forbidden => TapError::Device { name },
        Some(libc::EPERM | libc::EACCES) => {
            TapError::Permission { name, user: std::env::var("USER").unwrap_or_else(|_| "NAME".into()) }
        }
        Some(libc::EBUSY) => TapError::Busy { name },
        _ => TapError::Other { name, error },
    }
}

/// Exclusive use of one queue that frames come from.
pub struct TapLease(Lease<Queue>);

impl std::fmt::Debug for TapLease {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("TapLease").field(&*self.0).finish()
    }
}

/// The same for one burst.
#[derive(Debug)]
pub struct TapSource<'a> {
    queue: &'a mut Queue,
    counters: &'a Counters,
    longest: &'a Longest,
    header: usize,
    link_local: bool,
    /// Frames may be as long as the longest packet, to be cut.
    cuts: bool,
}

/// Whether the frame that begins with a virtio-net header in these pieces is for a link-local address.
fn is_link_local(pieces: &[Span<'_>]) -> bool {
    let mut head = [0; vnet_hdr::SIZE + 6];
    let mut left = &mut head[..];
    for piece in pieces {
        let read = piece.read(left);
        left = left.get_mut(read..).unwrap_or_default();
        if left.is_empty() {
            break;
        }
    }
    head.last_chunk().is_some_and(|&destination| MacAddr(destination).is_link_local())
}

/// The offloads with which frames are longer than the MTU.
const CUT: Support = Support::all().difference(Support::CHECKSUM.union(Support::VALID));

impl Source for TapSource<'_> {
    fn take(&mut self, burst: &mut Burst) -> usize {
        let header = self.header;
        let Queue { file, pool, frames, retained } = &mut *self.queue;
        burst.start_in(pool);
        // The end of a longer header is a frame's headroom.
        let before = header - HEADROOM;
        if std::mem::take(retained) {
            for &(address, len, offload) in &*frames {
                // They were valid before, and nobody else writes to them.
                let _ = burst.push_at(address + before as u64, len - before, offload);
            }
            return burst.frames().len();
        }
        frames.clear();
        let mut taken = 0;
        for index in 0..BURST {
            let buffer = pool.regions().first().and_then(|region| region.span(index * BUFFER, BUFFER));
            let Some(buffer) = buffer else { break };
            // Nothing there (EAGAIN), or the interface is down or gone: it becomes readable when that changes.
            let Ok(len) = sys::read_message(file.as_fd(), &[buffer], &[]) else { break };
            taken += 1;
            let address = (index * BUFFER) as u64;
            let len = len.max(header);
            let offload = match offload::read_behind(&[buffer], header, len, described(header)) {
                Ok(offload) => offload,
                Err(_) => {
                    self.counters.offload.add(1);
                    continue;
                }
            };
            match burst.push_at(address + before as u64, len - before, offload) {
                Ok(_) => frames.push((address, len, offload)),
                Err(NotAFrame::Runt) => self.counters.runt.add(1),
                Err(NotAFrame::Oversize) => self.counters.oversize.add(1),
            }
        }
        burst.refuse(taken - burst.frames().len());
        if taken > 0 {
            let bytes: usize = burst.frames().iter().map(|frame| frame.len()).sum();
            self.counters.frames.add(burst.frames().len() as u64);
            self.counters.bytes.add(bytes as u64);
            self.counters.bursts.add(1);
        }
        taken
    }

    fn done(&mut self, burst: &mut Burst) {
        burst.clear();
    }

    fn retains(&self) -> bool {
        true
    }

    /// The kernel parts a frame from its socket when it queues it (`skb_orphan` in `tun_net_xmit`). TCP notices the delay.
    fn notices(&self) -> bool {
        false
    }

    /// They stay in their buffers; meanwhile nothing is read, and the kernel's own queue fills.
    fn retain(&mut self, burst: &mut Burst, first: usize) {
        self.queue.frames.drain(..first.min(self.queue.frames.len()));
        self.queue.retained = true;
        burst.clear();
    }

    fn pours(&self) -> bool {
        // A guest's header is the shorter one.
        !self.queue.retained && self.header == vnet_hdr::SIZE
    }

    fn pour(&mut self, sink: &mut impl Sink) -> Poured {
        let Queue { file, pool, .. } = &*self.queue;
        let Some(overflow) = pool.regions().first().and_then(|region| region.span(0, BUFFER)) else {
            return Poured::Unable;
        };
        let room = vnet_hdr::SIZE + if self.cuts { MAX_FRAME } else { self.longest.get() };
        let (mut frames, mut bytes, mut longest, mut filtered) = (0, 0, 0, 0);
        let mut too_many = false;
        let poured = sink.fill(room, &mut |target| {
            // More pieces than a system call takes: the other way, through a buffer of ours.
            too_many = target.len() >= sys::IOVECS;
            if too_many {
                return None;
            }
            let mut len = sys::read_message(file.as_fd(), target, &[overflow]).ok()?;
            // What should not be forwarded is written over by the next one.
            while !self.link_local && len >= vnet_hdr::SIZE + ethernet::HEADER && is_link_local(target) {
                filtered += 1;
                if filtered as usize >= BURST {
                    return None;
                }
                len = sys::read_message(file.as_fd(), target, &[overflow]).ok()?;
            }
            frames += 1;
            bytes += len.saturating_sub(vnet_hdr::SIZE);
            longest = longest.max(len);
            Some(len)
        });
        self.counters.link_local.add(filtered);
        if !matches!(poured, Poured::Frames(_)) {
            return poured;
        }
        self.counters.frames.add(frames);
        self.counters.bytes.add(bytes as u64);
        self.counters.bursts.add(u64::from(frames > 0));
        if longest > room {
            self.longest.ask();
        }
        // Full of what was dropped, there may be more.
        if frames > 0 || !too_many { Poured::Frames((frames + filtered) as usize) } else { Poured::Unable }
    }
}

/// Exclusive use of one queue that frames go to.
#[derive(Debug)]
pub struct TapSink<'a> {
    file: MutexGuard<'a, File>,
    counters: &'a Counters,
    longest: &'a Longest,
    header: usize,
}

impl Sink for TapSink<'_> {
    /// The kernel takes all of them from any program, whatever it offers to others.
    fn support(&self) -> Support {
        described(self.header)
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let file: BorrowedFd<'_> = self.file.as_fd();
        let counters = self.counters;
        let (mut frames, mut bytes) = (0, 0);
        for &index in which {
            let Some(frame) = burst.frames().get(usize::from(index)) else { continue };
            // The kernel would take what is longer than its own MTU.
            let on_link = burst.link_len(index.into());
            if on_link > self.longest.get() {
                self.longest.ask();
                if on_link > self.longest.get() {
                    counters.oversize.add(1);
                    continue;
                }
            }
            let (mut head, head_len) = frame.head();
            let mut long = [0; LONG_HEAD];
            let head = begin(&mut head, head_len, burst.offload(index.into()), self.header, &mut long);
            match sys::write_message(file, head, burst.rest(index.into())) {
                Ok(_) => {
                    frames += 1;
                    bytes += frame.len();
                }
                Err(None) => counters.oversize.add(1),
                Err(Some(error)) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS) => counters.full.add(1),
                    Some(libc::EINVAL | libc::EMSGSIZE) => counters.oversize.add(1),
                    _ => counters.stopped.add(1),
                },
            }
        }
        counters.frames.add(frames as u64);
        counters.bytes.add(bytes as u64);
        counters.bursts.add(1);
        frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let said = |errno, driver| explain("rr0", io::Error::from_raw_os_error(errno), driver).to_string();
        let [missing, there] = [Driver::Missing, Driver::There];
        assert!(
            said(libc::ENOENT, missing).contains("rr0: /dev/net/tun does not exist; load the module (modprobe tun)")
        );
        for errno in [libc::EPERM, libc::EACCES] {
            assert!(said(errno, there).contains("rr0: not permitted; run as root or with CAP_NET_ADMIN"));
        }
        assert!(
            said(libc::EACCES, Driver::Forbidden).contains("rr0: not permitted to open /dev/net/tun; run as root, or")
        );
        assert!(said(libc::EBUSY, there).contains("rr0 is in use by another program"));
        assert!(said(libc::EINVAL, there).contains("rr0: Invalid argument"));
        assert!(said(libc::ENODEV, there).contains("rr0: No such device"), "the driver is there, the interface is not");
    }
}
