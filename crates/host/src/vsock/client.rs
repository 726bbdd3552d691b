//! A vsock driver over vhost-user (virtio 1.3, 5.10): lets a program act as a guest of any vhost-user vsock device.

use super::lines::Lines;
use crate::{
    sys,
    vhost_user::{ConnectError, Notifier, RawConnection},
};
use log::Level;
use ringroad_mem::Region;
use ringroad_vsock::{
    Broken, Driver, DriverConfig, DriverEvents, DriverRx, DriverSide, DriverTx, Host, Key, NoRelay, OpenResult, Queue,
    Settings, SocketType, Stack, Violation, socket_types,
};
use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

/// How to connect a vsock driver.
#[derive(Clone, Debug)]
pub struct VsockConnector {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Create the socket and wait for the device, instead of connecting to one.
    pub listen: bool,
    /// How long to wait for the other side.
    pub patience: Duration,
    /// Feature bits to negotiate, if the device offers them.
    pub features: u64,
    /// Entries of each queue.
    pub queue_size: u32,
    /// Payload bytes of a receive buffer.
    pub receive: usize,
    /// The context identifier if the device does not report one.
    pub cid: Option<u64>,
    /// Settings of its connections.
    pub settings: Settings,
    /// How long to wait for the device after a disconnect, which resets all connections; rings and listeners are kept.
    /// `None`: do not reconnect.
    pub reconnect: Option<Duration>,
}

/// A driver that is connected to a device. Dropped, it resets its connections and disconnects.
pub struct VsockClient {
    stack: Arc<Stack<DriverSide>>,
    context: Arc<Context>,
    thread: Option<JoinHandle<()>>,
    /// The negotiated feature bits.
    acked: u64,
}

impl std::fmt::Debug for VsockClient {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("VsockClient").field("stack", &self.stack).field("acked", &self.acked).finish_non_exhaustive()
    }
}

struct Context {
    rx: Notifier,
    tx: Notifier,
    event: Notifier,
    wake: EventFd,
    unwait: EventFd,
    stop: AtomicBool,
    lines: Lines,
    violations: Lines,
}

/// The stack's handle to the context.
struct Handle(Arc<Context>);

impl Host<NoRelay> for Handle {
    fn notify(&self, queue: Queue) {
        match queue {
            Queue::Out => self.0.tx.kick(),
            Queue::In => self.0.rx.kick(),
        }
    }

    fn wake(&self) {
        let _ = self.0.wake.write(1);
    }

    fn broken(&self, queue: Queue, why: Broken) {
        self.0.lines.say(Level::Error, format_args!("vsock driver queue {queue:?}: {why}; queue stopped"));
    }

    fn violation(&self, violation: Violation) {
        self.0.violations.say(Level::Warn, format_args!("vsock driver: {violation}"));
    }

    fn open(&self, _: Key, _: SocketType) -> OpenResult<NoRelay> {
        OpenResult::Refused
    }

    fn room(&self, _: Key) {}

    fn can_wait(&self) -> bool {
        true
    }

    fn clear(&self) {
        self.0.rx.clear();
        let _ = self.0.unwait.read();
    }

    fn wait(&self, until: Option<Instant>) {
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let fds = [Some(sys::borrow(self.0.rx.call())), Some(sys::borrow(&self.0.unwait))];
        let _ = sys::wait_readable(fds, timeout);
    }

    fn unwait(&self) {
        let _ = self.0.unwait.write(1);
    }
}

const VRINGS: usize = 3;

impl VsockConnector {
    /// Connects to a device and negotiates features.
    fn negotiate(&self, patience: Duration, features: u64) -> Result<RawConnection, ConnectError> {
        let socket = RawConnection::open(&self.socket, self.listen, patience)?;
        RawConnection::negotiate(socket, &self.socket, features, Protocol::CONFIG, VRINGS as u64)
    }

    /// Connects, negotiates, and starts all queues.
    ///
    /// # Errors
    /// [`ConnectError`]: no device within [`VsockConnector::patience`], it lacks a required feature, refuses a message or reports
    /// no CID while [`VsockConnector::cid`] is `None`; the queue size is invalid, or the system has no memory, threads or
    /// descriptors left.
    pub fn connect(&self) -> Result<VsockClient, ConnectError> {
        let mut handshake = self.negotiate(self.patience, self.features)?;
        let reported = handshake.config(8)?;
        handshake.accept()?;
        let reported = reported.and_then(|bytes| Some(u64::from_le_bytes(bytes.first_chunk::<8>().copied()?)));
        let cid = reported.or(self.cid).ok_or_else(|| {
            io::Error::other("the device does not report a context identifier (no CONFIG); expected one")
        })?;
        let acked = handshake.acked;
        let config = DriverConfig { acked, queue_size: self.queue_size, receive: self.receive };
        let Driver { region, file, rx, tx, mut events } = Driver::new(config)?;
        handshake.share(&region, &file)?;
        let context = Arc::new(Context {
            rx: handshake.ring(0, self.queue_size, rx.addresses())?,
            tx: handshake.ring(1, self.queue_size, tx.addresses())?,
            event: handshake.ring(2, events.size(), events.addresses())?,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            unwait: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            stop: AtomicBool::new(false),
            lines: Lines::new(),
            violations: Lines::of_violations(),
        });
        let stack = Arc::new(Stack::new(cid, None, self.settings, Box::new(Handle(context.clone()))));
        stack.set_link(Some(tx));
        stack.set_inlet(Some(rx));
        handshake.enable(VRINGS)?;
        // Some devices wait for the first kick before they process a queue.
        [&context.rx, &context.tx, &context.event].into_iter().for_each(Notifier::kick);
        stack.set_socket_types(socket_types(acked));
        let _ = events.transport_reset();
        let thread = {
            let (stack, context) = (stack.clone(), context.clone());
            let epoll = watch(&context, &handshake.socket)?;
            let recovery = Recovery { connector: self.clone(), region, file, acked };
            thread::Builder::new()
                .name("vsock driver".into())
                .spawn(move || work(&stack, &context, &epoll, &recovery, handshake, events))?
        };
        Ok(VsockClient { stack, context, thread: Some(thread), acked })
    }
}

impl VsockClient {
    /// Returns the guest's end of the device, for sockets of this program.
    pub fn stack(&self) -> &Arc<Stack<DriverSide>> {
        &self.stack
    }

    /// Returns the negotiated feature bits.
    pub fn acked(&self) -> u64 {
        self.acked
    }
}

/// How long a driver that is dropped waits for peers to confirm the shutdown of their connections.
const LINGER: Duration = Duration::from_secs(1);

impl Drop for VsockClient {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.stack.is_running() && self.stack.is_lingering() && start.elapsed() < LINGER {
            thread::sleep(Duration::from_millis(1));
        }
        self.context.stop.store(true, Ordering::Release);
        let _ = self.context.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Events that the worker waits for.
const WAKE: u64 = 0;
const CALL: u64 = 1;
const EVENT: u64 = 2;
const DISCONNECTED: u64 = 3;

/// Edge-triggered: a program that waits by itself reads the same descriptors, and must still see events that the worker has
/// seen.
fn watch(context: &Context, socket: &UnixStream) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    let fds = [
        (context.wake.as_raw_fd(), WAKE),
        (context.rx.call().as_raw_fd(), CALL),
        (context.tx.call().as_raw_fd(), CALL),
        (context.event.call().as_raw_fd(), EVENT),
        // The device sends nothing without a request, so a readable socket means that it has disconnected.
        (socket.as_raw_fd(), DISCONNECTED),
    ];
    for (fd, data) in fds {
        epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, data))?;
    }
    Ok(epoll)
}

/// What outlives a device, to be handed to the next one.
struct Recovery {
    connector: VsockConnector,
    region: Arc<Region>,
    file: File,
    acked: u64,
}

impl Recovery {
    /// Connects to a device, which resumes the rings where they are.
    fn hand_over(
        &self,
        context: &Context,
        rx: &DriverRx,
        tx: &DriverTx,
        events: &DriverEvents,
    ) -> Result<RawConnection, ConnectError> {
        // A short timeout, so that dropping the client does not wait long.
        let mut handshake = self.connector.negotiate(PAUSE, self.acked)?;
        if handshake.acked != self.acked {
            let offered = handshake.acked;
            return Err(ConnectError::Changed { offered, lacks: self.acked & !offered });
        }
        handshake.accept()?;
        handshake.share(&self.region, &self.file)?;
        let size = self.connector.queue_size;
        handshake.ring_at(0, size, rx.addresses(), rx.base(), &context.rx)?;
        handshake.ring_at(1, size, tx.addresses(), tx.base(), &context.tx)?;
        handshake.ring_at(2, events.size(), events.addresses(), events.base(), &context.event)?;
        handshake.enable(VRINGS)?;
        [&context.rx, &context.tx, &context.event].into_iter().for_each(Notifier::kick);
        Ok(handshake)
    }

    /// Resets all connections and reconnects to the device that replaces the disconnected one. Returns `None` if there is
    /// none in time, or if the client is being dropped.
    fn recover(
        &self,
        stack: &Stack<DriverSide>,
        context: &Context,
        events: &mut DriverEvents,
    ) -> Option<RawConnection> {
        stack.set_socket_types(&[]);
        let (tx, rx) = (stack.set_link(None), stack.set_inlet(None));
        stack.reset();
        let (patience, tx, rx) = (self.connector.reconnect?, tx?, rx?);
        let start = Instant::now();
        while !context.stop.load(Ordering::Acquire) {
            match self.hand_over(context, &rx, &tx, events) {
                Ok(handshake) => {
                    // The connections are already reset. Handled later, this event would reset the next ones as well.
                    let _ = events.transport_reset();
                    stack.set_link(Some(tx));
                    stack.set_inlet(Some(rx));
                    stack.set_socket_types(socket_types(self.acked));
                    log::info!(
                        "vsock driver: the device at {} is back after {:.1} ms",
                        handshake.path.display(),
                        start.elapsed().as_secs_f64() * 1e3
                    );
                    return Some(handshake);
                }
                Err(error) if start.elapsed() >= patience || matches!(error, ConnectError::Changed { .. }) => {
                    log::error!(
                        "vsock driver: cannot reconnect to the device after {:.1} s: {error}",
                        start.elapsed().as_secs_f64()
                    );
                    return None;
                }
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
        None
    }
}

/// Timeout of one attempt to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// The worker of a driver: does what the programs' own threads leave to it, until the device has disconnected for good.
fn work(
    stack: &Stack<DriverSide>,
    context: &Context,
    epoll: &Epoll,
    recovery: &Recovery,
    mut handshake: RawConnection,
    mut events: DriverEvents,
) {
    let mut ready = [EpollEvent::default(); 5];
    'running: while !context.stop.load(Ordering::Acquire) {
        if stack.work() || stack.enable_notification() {
            continue;
        }
        let now = Instant::now();
        let timeout = stack.next_deadline().map_or(-1, |time| {
            // Rounded up: otherwise it would wake just before the deadline, repeatedly.
            (time.saturating_duration_since(now).as_millis() + 1).min(i32::MAX as u128) as i32
        });
        let count = epoll.wait(timeout, &mut ready).unwrap_or(0);
        let now = Instant::now();
        if stack.next_deadline().is_some_and(|time| time <= now) {
            stack.tick(now);
        }
        for event in ready.iter().take(count) {
            match event.data() {
                EVENT if events.transport_reset().unwrap_or_default() => {
                    context.lines.say(Level::Info, format_args!("vsock driver: the device has reset all connections"));
                    stack.reset();
                }
                DISCONNECTED => {
                    log::info!("vsock driver: the device at {} has disconnected", handshake.path.display());
                    let Some(next) = recovery.recover(stack, context, &mut events) else { break 'running };
                    // The old socket leaves the epoll when it is closed.
                    handshake = next;
                    let watched = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, DISCONNECTED);
                    if let Err(error) = epoll.ctl(ControlOperation::Add, handshake.socket.as_raw_fd(), watched) {
                        log::error!("vsock driver: cannot watch the connection to the device: {error}");
                        break 'running;
                    }
                    // Packets that arrived in between may not have been notified.
                    continue 'running;
                }
                _ => {}
            }
        }
    }
    stack.set_socket_types(&[]);
    handshake.stop(VRINGS).for_each(drop);
    stack.set_link(None);
    stack.set_inlet(None);
    stack.reset();
}
