//! A vhost-user network device as a port: this process is its driver. Frames that the switch forwards to it go to the device, frames
//! from the device to the switch. One queue each way, each behind a gate; `ringroad attach` puts a TAP interface beside it.

use super::{ConnectError, RawConnection, frontend::Notifier};
use crate::{
    gate::{Gate, Lease},
    port::PortKind,
};
use parking_lot::{Mutex, MutexGuard};
use ringroad_frame::{Burst, Counters, Sink, Source, offload::Support};
use ringroad_net::{DriverTx, Features, Held, SizedConfig, SizedDriver, SizedRx, Sizing, bits, offload};
use ringroad_wire::ethernet;
use std::{
    fs::File,
    os::fd::BorrowedFd,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;

/// How to drive a device.
#[derive(Clone, Debug)]
pub struct Attach {
    /// The port's name in logs and counters.
    pub name: String,
    /// Path of the device's socket.
    pub socket: PathBuf,
    /// How long to wait for the device to listen.
    pub patience: Duration,
    /// The features to negotiate, if the device offers them. The control queue is left out, and of the configuration space all but
    /// the link's state.
    pub features: Features,
    /// Number of entries of each queue.
    pub queue_size: u32,
    /// The MTU; longer frames are dropped.
    pub mtu: u16,
    /// How long receive buffers are.
    pub sizing: Sizing,
}

impl Default for Attach {
    /// Everything that the device offers, rings of 256, an MTU of 1500, buffers sized by what arrives; no path.
    fn default() -> Attach {
        Attach {
            name: "device".into(),
            socket: PathBuf::new(),
            patience: Duration::from_secs(1),
            features: Features::all() - Features::CONTROL,
            queue_size: 256,
            mtu: 1500,
            sizing: Sizing::Auto,
        }
    }
}

/// A queue of the driver, unless its device has broken a rule, and its notifications.
#[derive(Debug)]
struct Driven<Q> {
    queue: Option<Q>,
    notifier: Notifier,
}

/// What both directions share.
struct Shared {
    name: String,
    /// What the device takes.
    takes: Support,
    longest: usize,
    counters: [Vec<Arc<Counters>>; 2],
    /// The device has broken a rule of its rings.
    failed: AtomicBool,
    /// The last frame found no room.
    short: AtomicBool,
    /// The negotiated feature bits.
    acked: u64,
    /// Whether the link was up when the device was asked last.
    link: AtomicBool,
    /// Used by control only.
    connection: Mutex<RawConnection>,
    // The device has mapped it.
    _memory: File,
}

/// A port whose frames go to a vhost-user network device and come from it.
pub struct AttachedPort {
    shared: Arc<Shared>,
    receive: Gate<Driven<SizedRx>>,
    transmit: Gate<Driven<DriverTx>>,
    /// The receive queue's notification, to wait for frames; the transmit queue's, to wait for room.
    calls: [vmm_sys_util::eventfd::EventFd; 2],
}

impl std::fmt::Debug for AttachedPort {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AttachedPort").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

/// The features with which received frames may be longer than the MTU: they need buffers that are merged.
pub const LONG_FRAMES: Features = Features::GUEST_TSO4
    .union(Features::GUEST_TSO6)
    .union(Features::GUEST_UFO)
    .union(Features::GUEST_USO4)
    .union(Features::GUEST_USO6);

impl AttachedPort {
    /// Connects to a device, negotiates features, and starts one pair of queues.
    ///
    /// # Errors
    /// [`ConnectError`]: no device within [`Attach::patience`], it lacks a required feature or refuses a message; the queue size is
    /// invalid, or the system has no memory or descriptors left.
    pub fn connect(config: &Attach) -> Result<AttachedPort, ConnectError> {
        let Attach { name, socket: path, patience, features, queue_size, mtu, sizing } = config.clone();
        let socket = RawConnection::open(&path, false, patience)?;
        // Those about the configuration space oblige who reads it: the interface has its own address and MTU.
        let space = Features::MAC | Features::MTU | Features::SPEED_DUPLEX;
        let wanted = (features - Features::CONTROL - space).consistent().bits();
        let told = Protocol::CONFIG | Protocol::BACKEND_REQ;
        let mut connection = RawConnection::negotiate(socket, &path, wanted, told, 2)?;
        let offered = Features::from_bits_truncate(connection.acked);
        let mut never = if offered.contains(Features::MRG_RXBUF) { Features::empty() } else { LONG_FRAMES };
        never.set(Features::STATUS, !connection.has_config());
        let acked = (offered - never).consistent().bits();
        connection.acked = acked | connection.acked & bits::PROTOCOL_FEATURES;
        connection.accept()?;
        let driver = SizedDriver::new(SizedConfig { acked, queue_size, mtu, sizing })?;
        let SizedDriver { region, file, rx, mut tx } = driver;
        connection.share(&region, &file)?;
        let received = connection.ring(0, queue_size, rx.addresses())?;
        let sent = connection.ring(1, queue_size, tx.addresses())?;
        // Sent frames are reclaimed when the next ones are sent.
        tx.disable_notification();
        connection.enable(2)?;
        let link = acked & bits::NET_F_STATUS == 0 || is_up(&mut connection)?;
        let calls = [received.call().try_clone()?, sent.call().try_clone()?];
        let shared = Shared {
            name,
            takes: offload::driver_sends(acked),
            longest: ethernet::longest_frame(mtu),
            counters: [vec![Arc::default()], vec![Arc::default()]],
            failed: AtomicBool::new(false),
            short: AtomicBool::new(false),
            acked: connection.acked,
            link: AtomicBool::new(link),
            connection: Mutex::new(connection),
            _memory: file,
        };
        shared.kick(&received);
        Ok(AttachedPort {
            shared: Arc::new(shared),
            receive: Gate::new(Driven { queue: Some(rx), notifier: received }),
            transmit: Gate::new(Driven { queue: Some(tx), notifier: sent }),
            calls,
        })
    }

    /// Returns the negotiated feature bits.
    pub fn acked(&self) -> u64 {
        self.shared.acked
    }

    /// Returns whether the link is up, as the device has said last: it is asked again after it has said that its configuration space has
    /// changed. Without VIRTIO_NET_F_STATUS it is up (virtio 1.3, 5.1.4.2). To be called by control now and then.
    pub fn link(&self) -> bool {
        let mut connection = self.shared.connection.lock();
        if self.shared.acked & bits::NET_F_STATUS != 0 && connection.config_changed() {
            match is_up(&mut connection) {
                Ok(up) => self.shared.link.store(up, Ordering::Relaxed),
                // Once: such a device could have a line logged each time.
                Err(error) if !self.shared.failed.swap(true, Ordering::Relaxed) => {
                    log::error!(
                        "port {}: cannot read the link's state: {error}; the device is not used any more",
                        self.shared.name
                    );
                }
                Err(_) => {}
            }
        }
        self.shared.link.load(Ordering::Relaxed)
    }

    /// Returns whether the device has disconnected, or has broken a rule of its rings, which is in the log.
    pub fn is_closed(&self) -> bool {
        self.shared.failed.load(Ordering::Relaxed) || self.shared.connection.lock().is_closed()
    }

    /// Returns what received frames have cost in memory so far, and the length in bytes of the buffers that are made available now.
    pub fn held(&self) -> (Held, usize) {
        let receive = self.receive.enter();
        receive.queue.as_ref().map_or_else(Default::default, |queue| (queue.held(), queue.buffer_len()))
    }
}

impl Drop for AttachedPort {
    /// Stops the device's queues, so that it leaves the memory alone.
    fn drop(&mut self) {
        let connection = self.shared.connection.lock();
        if !connection.is_closed() {
            connection.stop(2).for_each(drop);
        }
    }
}

/// Reads the status in the configuration space (virtio 1.3, 5.1.4): whether the link is up. Without a configuration space it is.
fn is_up(connection: &mut RawConnection) -> Result<bool, ConnectError> {
    const STATUS: usize = 6;
    const LINK_UP: u8 = 1;
    let space = connection.config(STATUS + size_of::<u16>())?;
    Ok(space.is_none_or(|space| space.get(STATUS).is_none_or(|status| status & LINK_UP != 0)))
}

impl Shared {
    /// Notifies the device. One that makes that block is not used any more.
    fn kick(&self, notifier: &Notifier) {
        notifier.kick();
        if notifier.is_spoilt() && !self.failed.swap(true, Ordering::Relaxed) {
            log::error!(
                "port {}: a write to a kick descriptor blocked (counter full and O_NONBLOCK cleared), expected a device that \
                 leaves both alone; it is not used any more",
                self.name
            );
        }
    }

    /// The device has broken a rule.
    #[cold]
    fn fail(&self, fault: &ringroad_ring::DriverFault) {
        log::error!("port {}: {fault}; the device is not used any more", self.name);
        self.failed.store(true, Ordering::Relaxed);
    }
}

impl PortKind for AttachedPort {
    type Lease = AttachedLease;
    type Source<'a> = AttachedSource<'a>;
    type Sink<'a> = AttachedSink<'a>;

    fn name(&self) -> &str {
        &self.shared.name
    }

    fn received(&self) -> &[Arc<Counters>] {
        &self.shared.counters[0]
    }

    fn sent(&self) -> &[Arc<Counters>] {
        &self.shared.counters[1]
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let [received, _] = &self.calls;
        vec![crate::sys::borrow(received)]
    }

    fn lease(&self, _queue: usize) -> Option<AttachedLease> {
        self.receive.try_lease().map(AttachedLease)
    }

    fn is_wanted(&self, _queue: usize) -> bool {
        self.receive.is_wanted()
    }

    fn source<'a>(&'a self, _queue: usize, AttachedLease(driven): &'a mut AttachedLease) -> Option<AttachedSource<'a>> {
        driven.queue.is_some().then_some(AttachedSource { driven, shared: &self.shared })
    }

    fn sink(&self, _hint: usize, frames: usize) -> Option<AttachedSink<'_>> {
        let counters = self.shared.counters[1].first()?;
        let Some(driven) = self.transmit.try_enter() else {
            counters.busy.add(frames as u64);
            return None;
        };
        if driven.queue.is_none() {
            counters.stopped.add(frames as u64);
            return None;
        }
        Some(AttachedSink { driven, counters, shared: &self.shared })
    }

    fn takes(&self) -> Support {
        self.shared.takes
    }

    fn room_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let [_, sent] = &self.calls;
        vec![crate::sys::borrow(sent)]
    }

    /// After a panic in this code the device is not used any more.
    fn abandon(&self) {
        self.shared.failed.store(true, Ordering::Relaxed);
    }

    fn enable_room(&self) -> bool {
        if !self.shared.short.load(Ordering::Relaxed) {
            return false;
        }
        // Only the worker holds it for longer than a moment.
        let Some(mut driven) = self.transmit.try_enter() else { return false };
        driven.queue.as_mut().is_some_and(|queue| !queue.enable_notification())
    }

    fn disable_room(&self) {
        if let Some(mut driven) = self.transmit.try_enter()
            && let Some(queue) = &mut driven.queue
        {
            queue.disable_notification();
        }
    }

    fn enable_notification(&self, _queue: usize) -> bool {
        let Some(mut driven) = self.receive.try_enter() else { return false };
        driven.queue.as_mut().is_none_or(|queue| !queue.enable_notification())
    }

    fn disable_notification(&self, _queue: usize) {
        if let Some(mut driven) = self.receive.try_enter()
            && let Some(queue) = &mut driven.queue
        {
            queue.disable_notification();
        }
    }
}

/// Exclusive use of the receive queue, from burst to burst.
pub struct AttachedLease(Lease<Driven<SizedRx>>);

impl std::fmt::Debug for AttachedLease {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("AttachedLease").field(&*self.0).finish()
    }
}

/// The same for one burst.
pub struct AttachedSource<'a> {
    driven: &'a mut Driven<SizedRx>,
    shared: &'a Shared,
}

impl std::fmt::Debug for AttachedSource<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AttachedSource").field("driven", &self.driven).finish_non_exhaustive()
    }
}

impl AttachedSource<'_> {
    /// Ends a burst, and notifies the device of free buffers if it wants that.
    fn end(&mut self, end: impl FnOnce(&mut SizedRx, &Counters)) {
        let (Some(queue), Some(counters)) = (&mut self.driven.queue, self.shared.counters[0].first()) else { return };
        end(queue, counters);
        if queue.wants_notification() {
            self.shared.kick(&self.driven.notifier);
            counters.notifications.add(1);
        }
    }
}

impl Source for AttachedSource<'_> {
    fn take(&mut self, burst: &mut Burst) -> usize {
        let (Some(queue), Some(counters)) = (&mut self.driven.queue, self.shared.counters[0].first()) else { return 0 };
        match queue.take(burst, counters) {
            Ok(0) => {
                queue.abandon(burst);
                0
            }
            Ok(taken) => taken,
            Err(fault) => {
                self.shared.fail(&fault);
                self.driven.queue = None;
                burst.clear();
                0
            }
        }
    }

    fn done(&mut self, burst: &mut Burst) {
        self.end(|queue, counters| queue.done(burst, counters));
    }

    fn retains(&self) -> bool {
        true
    }

    fn retain(&mut self, burst: &mut Burst, first: usize) {
        self.end(|queue, counters| queue.retain(burst, first, counters));
    }
}

/// Exclusive use of the transmit queue for one burst.
pub struct AttachedSink<'a> {
    driven: MutexGuard<'a, Driven<DriverTx>>,
    counters: &'a Counters,
    shared: &'a Shared,
}

impl std::fmt::Debug for AttachedSink<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AttachedSink").field("driven", &*self.driven).finish_non_exhaustive()
    }
}

impl AttachedSink<'_> {
    /// Sends as many of these frames as there is room for; returns how many were handled, that is sent or dropped as too long, and
    /// how many were sent.
    fn send(&mut self, burst: &Burst, which: &[u8]) -> (usize, usize) {
        let Driven { queue: slot, notifier } = &mut *self.driven;
        let Some(queue) = slot else { return (which.len(), 0) };
        if let Err(fault) = reclaim(queue) {
            self.shared.fail(&fault);
            *slot = None;
            self.counters.stopped.add(which.len() as u64);
            return (which.len(), 0);
        }
        let (mut handled, mut sent, mut bytes) = (0, 0, 0);
        for index in which {
            if burst.link_len(usize::from(*index)) > self.shared.longest {
                self.counters.oversize.add(1);
            } else if queue.put(burst, &[*index], self.shared.takes) == 0 {
                break;
            } else {
                sent += 1;
                bytes += burst.frames().get(usize::from(*index)).map_or(0, |frame| frame.len() as u64);
            }
            handled += 1;
        }
        queue.publish();
        if queue.wants_notification() {
            self.shared.kick(notifier);
            self.counters.notifications.add(1);
        }
        self.counters.frames.add(sent as u64);
        self.counters.bytes.add(bytes);
        self.counters.bursts.add(1);
        self.shared.short.store(handled < which.len(), Ordering::Relaxed);
        (handled, sent)
    }
}

/// Takes back all frames that the device has sent.
fn reclaim(queue: &mut DriverTx) -> Result<(), ringroad_ring::DriverFault> {
    while queue.reclaim()? > 0 {}
    Ok(())
}

impl Sink for AttachedSink<'_> {
    fn support(&self) -> Support {
        self.shared.takes
    }

    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        let (handled, sent) = self.send(burst, which);
        self.counters.full.add((which.len() - handled) as u64);
        sent
    }

    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.send(burst, which).0
    }

    fn has_room(&mut self, frames: usize) -> bool {
        let Some(queue) = &mut self.driven.queue else { return true };
        // A fault is found again by the next frame.
        let _ = reclaim(queue);
        // No more than it can have: a frame may be cut into more segments than the ring has entries.
        let room = queue.free() >= frames.min(queue.size() / 2);
        self.shared.short.store(!room, Ordering::Relaxed);
        room
    }
}
