//! A guest's vsock device (virtio 1.3, 5.10) behind its vhost-user socket, and the destinations of its connections. The
//! program creates a [`VsockServer`] for each; the worker in `worker.rs` serves them.

use super::{
    HostSide, SocketReport, VsockWorker,
    budget::Budget,
    lines::Lines,
    relay::{HostRelay, Target, Wire},
    shared::{Command, Control, Mailbox, Token},
};
use crate::{
    notes, sys,
    vhost_user::{
        Access, Kick, Limits, Place, Ring, Role, Socket, SocketConfig, SocketError, VhostDevice, Vring, bind,
    },
};
use log::Level;
use parking_lot::Mutex;
use ringroad_mem::Table;
use ringroad_ring::bits;
use ringroad_vsock::{
    Broken, Config, Events, Features, Host, Hub, Key, OpenResult, Queue, RxQueue, Settings, SocketType, Stack, TxQueue,
    Violation, socket_types,
};
use ringroad_wire::vsock_hdr::HOST_CID;
use std::{
    fmt::Arguments,
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Configuration of a guest's vsock device.
#[derive(Clone, Debug)]
pub struct VsockConfig {
    /// Its name in log lines.
    pub name: String,
    /// The guest's context identifier, 3 or more.
    pub cid: u64,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Which side creates that socket.
    pub role: Role,
    /// Path of the Unix socket where programs connect and send "CONNECT <port>"; the guest's connections to port N go to
    /// `<host>_N`.
    pub host: Option<PathBuf>,
    /// TCP addresses for the guest's connections to these ports.
    pub forward: Vec<(u32, SocketAddr)>,
    /// Guests with a group in common may connect to each other.
    pub groups: Vec<String>,
    /// Features to offer.
    pub features: Features,
    /// Settings of its connections.
    pub settings: Settings,
    /// Connects to host sockets a second. Up to as many requests (at most 1024) wait; the rest are refused.
    pub connects: u32,
    /// Bytes that the kernel may buffer for programs that do not read, beyond 8 KiB for each socket.
    pub socket_memory: usize,
    /// Limits of its frontend.
    pub limits: Limits,
    /// Owner and mode of its sockets.
    pub access: Access,
}

impl VsockConfig {
    /// A device without destinations for connections.
    pub fn new(cid: u64, socket: PathBuf) -> VsockConfig {
        VsockConfig {
            name: format!("vsock {cid}"),
            cid,
            socket,
            role: Role::Server,
            host: None,
            forward: Vec::new(),
            groups: Vec::new(),
            features: Features::ALL,
            settings: Settings::default(),
            connects: 5000,
            socket_memory: 64 << 20,
            limits: Limits::default(),
            access: Access::default(),
        }
    }
}

/// Receive, transmit, event (virtio 1.3, 5.10.2).
const VRINGS: usize = 3;
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// A guest, connected or not.
pub(super) struct Guest {
    pub name: String,
    pub cid: u64,
    pub stack: Arc<Stack<HostSide>>,
    pub mail: Arc<Mailbox>,
    pub budget: Arc<Budget>,
    lines: Arc<Lines>,
    routes: Arc<Mutex<Routes>>,
    notifiers: Arc<Notifiers>,
    /// Wakes the thread of its socket to disconnect the frontend.
    attention: EventFd,
    vrings: Mutex<Vrings>,
    /// The memory that each running vring was started with. A separate lock that is never held for long, as the worker takes
    /// it.
    memory: Mutex<[Option<Arc<Table>>; VRINGS]>,
}

/// Sources and destinations of connections with the host; can be changed while the device runs.
struct Routes {
    host: Option<PathBuf>,
    forward: Vec<(u32, SocketAddr)>,
}

/// Control's state of the vrings.
#[derive(Default)]
struct Vrings {
    /// The base at which each was last stopped.
    stopped: [Option<u32>; VRINGS],
    events: Option<Events>,
    /// The driver may have connections that the stack does not know; a transport reset is due.
    stale: bool,
}

/// Notification descriptors in both directions.
struct Notifiers {
    /// The kick descriptor of the transmit queue.
    kick: Mutex<Option<Kick>>,
    unwait: EventFd,
    vrings: [Vring; VRINGS],
}

impl Notifiers {
    fn new() -> io::Result<Notifiers> {
        let unwait = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Notifiers { kick: Mutex::default(), unwait, vrings: Default::default() })
    }

    fn call(&self, vring: usize) {
        self.vrings.get(vring).inspect(|vring| vring.notify());
    }

    fn fail(&self, vring: usize) {
        self.vrings.get(vring).inspect(|vring| vring.fail(None));
    }
}

impl Guest {
    /// Logs an event caused by the guest or a program, within the rate limit.
    pub(super) fn say(&self, level: Level, what: Arguments<'_>) {
        self.lines.say(level, format_args!("{}: {what}", self.name));
    }

    pub(super) fn host_path(&self) -> String {
        self.routes.lock().host.as_deref().unwrap_or(Path::new("")).display().to_string()
    }

    /// Stops the device in any state and disconnects its frontend, after a panic in its code.
    pub(super) fn abandon(&self) {
        self.stack.set_link(None);
        self.stack.set_inlet(None);
        self.stack.reset();
        self.notifiers.vrings.iter().for_each(Vring::signal_err);
        let _ = self.attention.write(1);
    }

    fn set_memory(&self, vring: usize, memory: Option<Arc<Table>>) {
        // The old memory is dropped without the lock, as unmapping may take a while.
        let _before = self.memory.lock().get_mut(vring).and_then(|place| std::mem::replace(place, memory));
    }

    /// Stops the device if the frontend has truncated the guest's memory. Its connections are reset when the frontend is
    /// disconnected.
    pub(super) fn check_memory(&self) {
        let lost = {
            let mut memory = self.memory.lock();
            let lost = memory.iter().flatten().any(|memory| memory.is_lost());
            lost.then(|| std::mem::take(&mut *memory))
        };
        if lost.is_some() {
            self.say(
                Level::Error,
                format_args!("the frontend has truncated the guest's memory; device stopped, frontend disconnected"),
            );
            self.stack.set_link(None);
            self.stack.set_inlet(None);
            self.notifiers.vrings.iter().for_each(Vring::signal_err);
            let _ = self.attention.write(1);
        }
    }

    /// Sends the driver a transport reset event (virtio 1.3, 5.10.6.7), if one is due and the event queue has a buffer.
    fn send_transport_reset(&self) {
        let sent = {
            let mut vrings = self.vrings.lock();
            let Vrings { events: Some(events), stale: stale @ true, .. } = &mut *vrings else { return };
            let sent = events.transport_reset();
            match sent {
                Ok(Some(_)) => *stale = false,
                Ok(None) => {}
                Err(_) => vrings.events = None,
            }
            sent
        };
        match sent {
            Ok(Some(notify)) => {
                self.say(Level::Info, format_args!("transport reset sent to the guest: all its connections are reset"));
                if notify {
                    self.notifiers.call(EVENT);
                }
            }
            Ok(None) => {}
            Err(broken) => {
                self.lines.say(
                    Level::Error,
                    format_args!("{} queue {EVENT}: {broken}; queue stopped, reset the device to continue", self.name),
                );
                self.notifiers.fail(EVENT);
            }
        }
    }
}

/// Connects a guest's stack with its notifications, the worker and host sockets.
struct StackHost {
    name: String,
    mail: Arc<Mailbox>,
    budget: Arc<Budget>,
    lines: Arc<Lines>,
    violations: Lines,
    notifiers: Arc<Notifiers>,
    routes: Arc<Mutex<Routes>>,
}

impl StackHost {
    /// Returns the destination of a connection to a port of the host.
    fn target(&self, port: u32) -> Option<Target> {
        let routes = self.routes.lock();
        if let Some(&(_, address)) = routes.forward.iter().find(|&&(forward, _)| forward == port) {
            return Some(Target::Tcp(address));
        }
        let mut path = routes.host.clone()?.into_os_string();
        path.push(format!("_{port}"));
        Some(Target::Unix(path.into()))
    }

    fn refuse(&self, key: Key) -> OpenResult<HostRelay> {
        let StackHost { name, lines, .. } = self;
        lines.say(
            Level::Warn,
            format_args!(
                "{name}: connection request to port {} refused: too many waiting requests, connects or open sockets",
                key.port
            ),
        );
        OpenResult::Refused
    }
}

impl Host<HostRelay> for StackHost {
    fn notify(&self, queue: Queue) {
        self.notifiers.call(match queue {
            Queue::Out => RX,
            Queue::In => TX,
        });
    }

    fn wake(&self) {
        self.mail.request_work();
    }

    fn broken(&self, queue: Queue, why: Broken) {
        let vring = match queue {
            Queue::Out => RX,
            Queue::In => TX,
        };
        self.lines.say(
            Level::Error,
            format_args!("{} queue {vring}: {why}; queue stopped, reset the device to continue", self.name),
        );
        self.notifiers.fail(vring);
    }

    fn violation(&self, violation: Violation) {
        self.violations.say(Level::Warn, format_args!("{}: {violation}", self.name));
    }

    fn open(&self, key: Key, kind: SocketType) -> OpenResult<HostRelay> {
        if kind != SocketType::Stream {
            return OpenResult::Refused;
        }
        let Some(target) = self.target(key.port) else { return OpenResult::Refused };
        let Some(place) = self.budget.admit_request() else { return self.refuse(key) };
        let wire = Arc::new(Wire::new(&self.mail, place, matches!(target, Target::Tcp(_))));
        let relay = HostRelay { wire: wire.clone(), awaits_ok: false };
        if self.mail.shared.is_worker_thread() {
            // Called while the guest's packets are processed: connected later in its turn, within the limits of the turn.
            self.mail.send(Command::Open(key, wire, Some(target), false));
            return OpenResult::Pending(relay, Instant::now());
        }
        // A thread of this program processes the guest's packets itself: it connects right away, at its own expense.
        self.budget.end_wait();
        if self.budget.connects.take().is_none() {
            self.budget.refuse();
            return self.refuse(key);
        }
        let connected = match wire.connect(&target) {
            Ok(connected) => connected,
            Err(error) => {
                let StackHost { name, lines, .. } = self;
                lines.say(
                    Level::Debug,
                    format_args!("{name}: cannot connect to port {} of the host: {error}", key.port),
                );
                return OpenResult::Refused;
            }
        };
        self.mail.send(Command::Open(key, wire, None, connected));
        if connected { OpenResult::Connected(relay) } else { OpenResult::Pending(relay, Instant::now()) }
    }

    fn room(&self, key: Key) {
        self.mail.send(Command::Room(key));
    }

    fn can_wait(&self) -> bool {
        self.notifiers.kick.lock().is_some()
    }

    fn clear(&self) {
        let _ = self.notifiers.unwait.read();
        if let Some(kick) = &*self.notifiers.kick.lock() {
            kick.clear();
        }
    }

    fn wait(&self, until: Option<Instant>) {
        let Some(kick) = self.notifiers.kick.lock().clone() else { return };
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let _ = sys::wait_readable([Some(kick.as_fd()), Some(sys::borrow(&self.notifiers.unwait))], timeout);
    }

    fn unwait(&self) {
        let _ = self.notifiers.unwait.write(1);
    }
}

/// A running vsock device. Dropped, it disconnects its frontend and removes its sockets.
pub struct VsockServer {
    guest: Arc<Guest>,
    hub: Arc<Hub<HostSide>>,
    socket: Option<Socket>,
    host: Mutex<Option<Place>>,
}

impl VsockServer {
    /// Creates the sockets and adds the device to the worker.
    pub fn start(config: VsockConfig, worker: &VsockWorker) -> Result<VsockServer, SocketError> {
        let name = &*config.name;
        let failed = |error| SocketError::Start { name: name.to_owned(), error };
        let host = config.host.as_deref().map(|path| bind(name, path, config.access)).transpose()?;
        let (listener, host) = host.unzip();
        let mail = Arc::new(Mailbox::new(&worker.shared));
        let budget = Arc::new(Budget::new(&config, worker.shared.total.clone()));
        let lines = Arc::new(Lines::new());
        let notifiers = Arc::new(Notifiers::new().map_err(failed)?);
        let routes = Arc::new(Mutex::new(Routes { host: config.host.clone(), forward: config.forward.clone() }));
        let stack_host = StackHost {
            name: name.to_owned(),
            mail: mail.clone(),
            budget: budget.clone(),
            lines: lines.clone(),
            violations: Lines::of_violations(),
            notifiers: notifiers.clone(),
            routes: routes.clone(),
        };
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let socket_attention = attention.try_clone().map_err(failed)?;
        let stack = Arc::new(Stack::new(HOST_CID, Some(config.cid), config.settings, Box::new(stack_host)));
        if !config.groups.is_empty() {
            worker.hub.join(&stack, config.groups.clone());
        }
        let guest = Arc::new(Guest {
            name: name.to_owned(),
            cid: config.cid,
            stack,
            mail,
            budget,
            lines,
            routes,
            notifiers,
            attention,
            vrings: Mutex::default(),
            memory: Mutex::default(),
        });
        worker.add(guest.clone(), listener).map_err(failed)?;
        let hub = worker.hub.clone();
        let mut server = VsockServer { guest: guest.clone(), hub, socket: None, host: Mutex::new(host) };
        let offer = config.features.bits();
        let device = || Ok(VsockDevice { guest, offer, kicks: Arc::default() });
        let VsockConfig { role, limits, access, .. } = config;
        let at = SocketConfig { name, path: &config.socket, role, limits, access };
        server.socket = Some(Socket::start(at, socket_attention, device)?);
        Ok(server)
    }

    /// Changes the settings that do not concern the guest: connection settings, groups, destinations, limits. The rest of the
    /// configuration is ignored.
    ///
    /// # Errors
    /// Owner or mode of a socket cannot be changed: groups and destinations are as before. Or the socket for programs cannot be
    /// created: the old one stays, everything else is in effect.
    pub fn set(&self, config: &VsockConfig) -> Result<(), SocketError> {
        let Guest { name, mail, stack, routes, budget, .. } = &*self.guest;
        stack.set(config.settings);
        budget.set(config);
        if let Some(socket) = &self.socket {
            socket.set(config.limits, config.access)?;
        }
        if let Some(host) = &*self.host.lock() {
            host.give(name, config.access)?;
        }
        if !config.groups.is_empty() || stack.has_joined() {
            self.hub.join(stack, config.groups.clone());
        }
        routes.lock().forward.clone_from(&config.forward);
        let before = routes.lock().host.clone();
        if before == config.host {
            return Ok(());
        }
        let host = config.host.as_deref().map(|path| bind(name, path, config.access)).transpose()?;
        let (listener, host) = host.unzip();
        routes.lock().host.clone_from(&config.host);
        let (sender, listens) = mpsc::channel();
        mail.shared.control(Control::Listen(mail.guest, listener, sender));
        let _ = listens.recv();
        // The old socket is removed.
        let _before = std::mem::replace(&mut *self.host.lock(), host);
        Ok(())
    }

    /// Returns the host's end of the device, for sockets of this program.
    pub fn stack(&self) -> &Arc<Stack<HostSide>> {
        &self.guest.stack
    }

    /// Returns the usage of its host sockets.
    pub fn sockets(&self) -> SocketReport {
        self.guest.budget.report()
    }
}

impl Drop for VsockServer {
    fn drop(&mut self) {
        let guest = &*self.guest;
        // One by one, then by a transport reset, for connections with other guests and for resets that found no room in the
        // ring.
        guest.stack.close();
        guest.vrings.lock().stale = true;
        guest.send_transport_reset();
        self.socket = None;
        guest.stack.reset();
        let (sender, removed) = mpsc::channel();
        guest.mail.shared.control(Control::Remove(guest.mail.guest, sender));
        let _ = removed.recv();
    }
}

/// The device behind the vhost-user socket.
#[derive(Clone)]
struct VsockDevice {
    guest: Arc<Guest>,
    offer: u64,
    /// The descriptors that the worker watches.
    kicks: Arc<Mutex<[Option<Kick>; VRINGS]>>,
}

/// Returns whether `base` is that of an unused ring, which frontends express in different ways.
fn is_fresh(base: u32, acked: u64) -> bool {
    if acked & bits::RING_PACKED == 0 { base == 0 } else { [0, 0x8000, 0x8000_8000].contains(&base) }
}

impl VhostDevice for VsockDevice {
    fn name(&self) -> &str {
        &self.guest.name
    }

    fn offer(&self) -> u64 {
        self.offer
    }

    fn vrings(&self) -> &[Vring] {
        &self.guest.notifiers.vrings
    }

    fn config(&self) -> Vec<u8> {
        Config { guest_cid: self.guest.cid }.bytes().to_vec()
    }

    fn start(&self, index: usize, ring: Ring) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base, journal, inflight, kick } = ring;
        let guest = &*self.guest;
        let mut vrings = guest.vrings.lock();
        let shared = &guest.mail.shared;
        if let Some(kick) = kick.as_ref().filter(|_| index != EVENT) {
            let watched = shared.watch(kick.as_raw_fd(), Token::Kick(guest.mail.guest));
            watched.map_err(|error| format!("cannot watch the kick descriptor: {error}; expected an eventfd"))?;
        }
        if index == TX {
            guest.notifiers.kick.lock().clone_from(&kick);
        }
        let resumed = vrings.stopped.get(index) == Some(&Some(base));
        if index == TX && !resumed {
            // The driver, or this process, has restarted.
            guest.stack.reset();
        }
        guest.set_memory(index, Some(memory.clone()));
        let started = match index {
            RX => RxQueue::resume(memory, acked, size, addresses, base, journal, inflight).map(|(mut queue, how)| {
                let base = queue.base();
                guest.stack.set_link(Some(queue));
                guest.stack.set_socket_types(socket_types(acked));
                (base, how)
            }),
            TX => TxQueue::resume(memory, acked, size, addresses, base, journal, inflight).map(|(mut queue, how)| {
                let base = queue.base();
                guest.stack.set_inlet(Some(queue));
                (base, how)
            }),
            _ => Events::resume(memory, acked, size, addresses, base, journal, inflight).map(|(mut queue, how)| {
                let base = queue.base();
                vrings.events = Some(queue);
                (base, how)
            }),
        };
        let (started, how) = started.map_err(|error| {
            guest.set_memory(index, None);
            if let Some(kick) = kick.as_ref().filter(|_| index != EVENT) {
                shared.unwatch(kick.as_raw_fd());
            }
            error.to_string()
        })?;
        notes::say(&guest.name, index, base, how);
        if index == TX && !resumed {
            vrings.stale = !is_fresh(started, acked);
        }
        if let Some(place) = self.kicks.lock().get_mut(index) {
            *place = kick.filter(|_| index != EVENT);
        }
        drop(vrings);
        guest.send_transport_reset();
        guest.mail.request_work();
        Ok(started)
    }

    fn stop(&self, index: usize) -> u32 {
        let guest = &*self.guest;
        if let Some(kick) = self.kicks.lock().get_mut(index).and_then(Option::take) {
            guest.mail.shared.unwatch(kick.as_raw_fd());
        }
        if index == TX {
            // Packets sent so far are processed.
            guest.stack.work();
            *guest.notifiers.kick.lock() = None;
            guest.notifiers.unwait.write(1).unwrap_or_default();
        }
        let mut vrings = guest.vrings.lock();
        let base = match index {
            RX => guest.stack.set_link(None).map(|mut queue| queue.stop()),
            TX => guest.stack.set_inlet(None).map(|mut queue| queue.stop()),
            _ => vrings.events.take().map(|mut queue| queue.stop()),
        };
        // A broken queue has no base; it will not be resumed.
        let base = base.unwrap_or_default();
        if let Some(stopped) = vrings.stopped.get_mut(index) {
            *stopped = Some(base);
        }
        drop(vrings);
        // The memory of the other vrings stays: it may still be truncated.
        guest.set_memory(index, None);
        base
    }

    fn reset(&self) {
        self.guest.stack.set_socket_types(&[]);
        self.guest.stack.reset();
        *self.guest.vrings.lock() = Vrings::default();
        let _before = std::mem::take(&mut *self.guest.memory.lock());
    }
}
