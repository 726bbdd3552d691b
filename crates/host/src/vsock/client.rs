//! The driver's side: a program as a guest of any vhost-user vsock device.

use super::lines::Lines;
use crate::{
    sys,
    vhost_user::{ConnectError, Handshake, Notifier},
};
use log::Level;
use ringroad_mem::Region;
use ringroad_vsock::{
    Broken, Driver, DriverConfig, DriverEvents, DriverRx, DriverSide, DriverTx, Host, Key, NoRelay, OpenResult, Queue,
    Settings, SocketType, Stack, socket_types,
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
    /// The socket.
    pub socket: PathBuf,
    /// Make the socket and wait for the device, instead of connecting to one.
    pub listen: bool,
    /// For how long to wait for the other side.
    pub patience: Duration,
    /// The feature bits wanted of those that the device offers.
    pub features: u64,
    /// Entries of each queue.
    pub queue_size: u32,
    /// Bytes of payload that a receive buffer holds.
    pub receive: usize,
    /// The context identifier to use where the device does not tell one.
    pub cid: Option<u64>,
    /// How connections behave.
    pub settings: Settings,
    /// When the device goes away, its connections are reset. Wait so long for it to come back, and go on with the same rings and
    /// listeners. `None`: that is the end.
    pub reconnect: Option<Duration>,
}

/// A driver that is connected to a device. Dropped, it disconnects; its connections are reset.
pub struct VsockClient {
    stack: Arc<Stack<DriverSide>>,
    shared: Arc<ClientShared>,
    thread: Option<JoinHandle<()>>,
    /// The feature bits in use.
    acked: u64,
}

struct ClientShared {
    rx: Notifier,
    tx: Notifier,
    event: Notifier,
    wake: EventFd,
    unwait: EventFd,
    stop: AtomicBool,
    lines: Lines,
}

/// What the stack needs; its own handle of the same.
struct Handle(Arc<ClientShared>);

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
        self.0.lines.say(Level::Error, format_args!("vsock driver, {queue:?}: {why}; queue stopped"));
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
    /// Finds a device and agrees on features with it.
    fn negotiate(&self, patience: Duration, features: u64) -> Result<Handshake, ConnectError> {
        let socket = Handshake::open(&self.socket, self.listen, patience)?;
        Handshake::negotiate(socket, &self.socket, features, Protocol::CONFIG, VRINGS as u64)
    }

    /// Connects, negotiates, and starts all queues.
    pub fn connect(&self) -> Result<VsockClient, ConnectError> {
        let mut handshake = self.negotiate(self.patience, self.features)?;
        let told = handshake.config(8)?;
        handshake.accept()?;
        let told = told.and_then(|bytes| Some(u64::from_le_bytes(bytes.first_chunk::<8>().copied()?)));
        let cid = told
            .or(self.cid)
            .ok_or_else(|| io::Error::other("the device does not tell the context identifier (no CONFIG); name one"))?;
        let acked = handshake.acked;
        let config = DriverConfig { acked, queue_size: self.queue_size, receive: self.receive };
        let Driver { region, file, rx, tx, mut events } = Driver::new(config)?;
        handshake.share(&region, &file)?;
        let shared = Arc::new(ClientShared {
            rx: handshake.ring(0, self.queue_size, rx.addresses())?,
            tx: handshake.ring(1, self.queue_size, tx.addresses())?,
            event: handshake.ring(2, events.size(), events.addresses())?,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            unwait: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            stop: AtomicBool::new(false),
            lines: Lines::new(),
        });
        let stack = Arc::new(Stack::new("vsock driver", cid, None, self.settings, Box::new(Handle(shared.clone()))));
        stack.set_link(Some(tx));
        stack.set_inlet(Some(rx));
        handshake.enable(VRINGS)?;
        // Some devices wait for the first kick before they look at a queue at all.
        [&shared.rx, &shared.tx, &shared.event].into_iter().for_each(Notifier::kick);
        stack.set_socket_types(socket_types(acked));
        let _ = events.transport_reset();
        let thread = {
            let (stack, shared) = (stack.clone(), shared.clone());
            let epoll = watch(&shared, &handshake.socket)?;
            let home = Home { connector: self.clone(), region, file, acked };
            thread::Builder::new()
                .name("vsock driver".into())
                .spawn(move || work(&stack, &shared, &epoll, &home, handshake, events))?
        };
        Ok(VsockClient { stack, shared, thread: Some(thread), acked })
    }
}

impl VsockClient {
    /// The guest's end of the device: for sockets of this program.
    pub fn stack(&self) -> &Arc<Stack<DriverSide>> {
        &self.stack
    }

    /// The feature bits in use.
    pub fn acked(&self) -> u64 {
        self.acked
    }
}

/// How long a driver that goes away waits for peers to close what was closed here.
const LINGER: Duration = Duration::from_secs(1);

impl Drop for VsockClient {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.stack.is_running() && self.stack.is_lingering() && start.elapsed() < LINGER {
            thread::sleep(Duration::from_millis(1));
        }
        self.shared.stop.store(true, Ordering::Release);
        let _ = self.shared.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the worker of a driver waits for.
const WAKE: u64 = 0;
const CALL: u64 = 1;
const EVENT: u64 = 2;
const GONE: u64 = 3;

/// Edge-triggered: a program that waits by itself reads the same descriptors, and must find what the worker has seen too.
fn watch(shared: &ClientShared, socket: &UnixStream) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    let fds = [
        (shared.wake.as_raw_fd(), WAKE),
        (shared.rx.call().as_raw_fd(), CALL),
        (shared.tx.call().as_raw_fd(), CALL),
        (shared.event.call().as_raw_fd(), EVENT),
        // It never sends anything that was not asked for; what can be read is the end.
        (socket.as_raw_fd(), GONE),
    ];
    for (fd, data) in fds {
        epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, data))?;
    }
    Ok(epoll)
}

/// What outlives a device, to be handed to the next one.
struct Home {
    connector: VsockConnector,
    region: Arc<Region>,
    file: File,
    acked: u64,
}

impl Home {
    /// Connects to a device and has it go on with the rings where they are.
    fn hand_over(
        &self,
        shared: &ClientShared,
        rx: &DriverRx,
        tx: &DriverTx,
        events: &DriverEvents,
    ) -> Result<Handshake, ConnectError> {
        // Not longer than somebody should wait who wants the end.
        let mut handshake = self.connector.negotiate(PAUSE, self.acked)?;
        if handshake.acked != self.acked {
            let offered = handshake.acked;
            return Err(ConnectError::Changed { offered, lacks: self.acked & !offered });
        }
        handshake.accept()?;
        handshake.share(&self.region, &self.file)?;
        let size = self.connector.queue_size;
        handshake.ring_at(0, size, rx.addresses(), rx.base(), &shared.rx)?;
        handshake.ring_at(1, size, tx.addresses(), tx.base(), &shared.tx)?;
        handshake.ring_at(2, events.size(), events.addresses(), events.base(), &shared.event)?;
        handshake.enable(VRINGS)?;
        [&shared.rx, &shared.tx, &shared.event].into_iter().for_each(Notifier::kick);
        Ok(handshake)
    }

    /// Ends all connections, and goes on with the device that comes in the place of one that has gone. `None`: there is none, or
    /// nobody wants one any more.
    fn recover(
        &self,
        stack: &Stack<DriverSide>,
        shared: &ClientShared,
        events: &mut DriverEvents,
    ) -> Option<Handshake> {
        stack.set_socket_types(&[]);
        let (tx, rx) = (stack.set_link(None), stack.set_inlet(None));
        stack.reset();
        let (patience, tx, rx) = (self.connector.reconnect?, tx?, rx?);
        let start = Instant::now();
        while !shared.stop.load(Ordering::Acquire) {
            match self.hand_over(shared, &rx, &tx, events) {
                Ok(handshake) => {
                    // That all connections are over, we know. Said later, it would end the next ones, too.
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
                        "vsock driver: waited {:.1} s for the device to come back: {error}",
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

/// How long a try to connect may take.
const PAUSE: Duration = Duration::from_millis(50);

/// The worker of a driver: does what programs do not do themselves, until the device is gone for good.
fn work(
    stack: &Stack<DriverSide>,
    shared: &ClientShared,
    epoll: &Epoll,
    home: &Home,
    mut handshake: Handshake,
    mut events: DriverEvents,
) {
    let mut ready = [EpollEvent::default(); 5];
    'running: while !shared.stop.load(Ordering::Acquire) {
        if stack.work() || stack.enable_notification() {
            continue;
        }
        let now = Instant::now();
        let timeout = stack.next_deadline().map_or(-1, |time| {
            // Rounded up: else it would wake just before, again and again.
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
                    shared
                        .lines
                        .say(Level::Info, format_args!("vsock driver: all connections are over, says the device"));
                    stack.reset();
                }
                GONE => {
                    log::info!("vsock driver: the device at {} is gone", handshake.path.display());
                    let Some(next) = home.recover(stack, shared, &mut events) else { break 'running };
                    // The old one leaves the epoll as it is closed.
                    handshake = next;
                    let watched = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, GONE);
                    if let Err(error) = epoll.ctl(ControlOperation::Add, handshake.socket.as_raw_fd(), watched) {
                        log::error!("vsock driver: cannot wait for the end of the device: {error}");
                        break 'running;
                    }
                    // What came meanwhile may have been told to nobody.
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
