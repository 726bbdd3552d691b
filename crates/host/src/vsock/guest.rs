//! A guest's vsock device: what is behind its vhost-user socket, and where its connections may lead.

use super::{
    HostSide, VsockWorker,
    relay::{HostRelay, connect_tcp, connect_unix},
    worker::{Command, Shared},
};
use crate::{
    sys,
    vhost_user::{Access, Call, Device, Kick, Limits, Place, Ring, Role, Socket, SocketConfig, SocketError, bind},
};
use parking_lot::Mutex;
use ringroad_mem::Table;
use ringroad_ring::bits;
use ringroad_vsock::{
    Broken, Config, Door, Events, Features, Host, Key, Kind, Queue, RxQueue, Settings, Stack, TxQueue, kinds,
};
use ringroad_wire::vsock_hdr::HOST_CID;
use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// How a guest's vsock device is set up.
#[derive(Clone, Debug)]
pub struct VsockConfig {
    /// Its name in log lines.
    pub name: String,
    /// The guest's context identifier, 3 or more.
    pub cid: u64,
    /// Where the vhost-user socket is.
    pub socket: PathBuf,
    /// Which end of it is ours.
    pub role: Role,
    /// Programs of the host connect there and send "CONNECT <port>"; the guest's connections to port N go to `<host>_N`.
    pub host: Option<PathBuf>,
    /// The guest's connections to these ports go to addresses of the host.
    pub forward: Vec<(u32, SocketAddr)>,
    /// Guests with a group in common may talk to each other.
    pub groups: Vec<String>,
    /// What is offered.
    pub features: Features,
    /// How its connections behave.
    pub settings: Settings,
    /// What its frontend may use up.
    pub limits: Limits,
    /// Who may connect to its sockets.
    pub access: Access,
}

/// Receive, transmit, event.
const VRINGS: usize = 3;
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// A guest, connected or not.
pub(super) struct Guest {
    pub name: String,
    pub number: u32,
    pub cid: u64,
    pub stack: Arc<Stack<HostSide>>,
    host: Option<PathBuf>,
    notifiers: Arc<Notifiers>,
    /// Wakes the thread of its socket: its memory is gone.
    attention: EventFd,
    vrings: Mutex<Vrings>,
    lines: AtomicU32,
}

/// What control knows of the vrings.
#[derive(Default)]
struct Vrings {
    /// Where each was stopped last.
    stopped: [Option<u32>; VRINGS],
    memory: Option<Arc<Table>>,
    events: Option<Events>,
    /// The driver has connections that we know nothing of: it is told that they are over.
    stale: bool,
}

/// Descriptors that tell a guest of something, or us.
struct Notifiers {
    /// The guest has sent something.
    kick: Mutex<Option<Kick>>,
    unwait: EventFd,
    calls: [Mutex<Option<Call>>; VRINGS],
    errs: [Mutex<Option<Call>>; VRINGS],
    faults: [AtomicU32; VRINGS],
}

impl Notifiers {
    fn new() -> io::Result<Notifiers> {
        Ok(Notifiers {
            kick: Mutex::default(),
            unwait: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            calls: Default::default(),
            errs: Default::default(),
            faults: Default::default(),
        })
    }

    fn call(&self, vring: usize) {
        let call = self.calls[vring].lock().clone();
        if let Some(call) = call {
            call.signal();
        }
    }

    fn err(&self, vring: usize) {
        let err = self.errs[vring].lock().clone();
        if let Some(err) = err {
            err.signal();
        }
    }
}

impl Guest {
    pub(super) fn may_log(&self) -> bool {
        // Some for each life of a guest; the counters know the rest.
        self.lines.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lines| lines.checked_sub(1)).is_ok()
    }

    pub(super) fn host_path(&self) -> std::path::Display<'_> {
        self.host.as_deref().unwrap_or(Path::new("")).display()
    }

    /// Stops the device if the frontend has truncated the guest's memory.
    pub(super) fn check_memory(&self) {
        let lost = self.vrings.lock().memory.as_ref().is_some_and(|memory| memory.is_lost());
        if lost {
            log::error!("{}: the frontend has truncated the guest's memory; stopped and disconnected", self.name);
            self.stack.set_link(None);
            self.stack.set_inlet(None);
            self.stack.reset();
            (0..VRINGS).for_each(|vring| self.notifiers.err(vring));
            let _ = self.attention.write(1);
        }
    }

    /// Tells the driver that its connections are over, if it should know and there is a way to.
    fn tell(&self, vrings: &mut Vrings) {
        let Vrings { events: Some(events), stale: stale @ true, .. } = vrings else { return };
        match events.transport_reset() {
            Ok(Some(notify)) => {
                *stale = false;
                log::info!("{}: the guest was told that its connections are over", self.name);
                if notify {
                    self.notifiers.call(EVENT);
                }
            }
            Ok(None) => {}
            Err(broken) => {
                log::error!("{} queue {EVENT}: {broken}; queue stopped", self.name);
                vrings.events = None;
                self.notifiers.err(EVENT);
            }
        }
    }
}

/// What a guest's stack needs of its surroundings.
struct Around {
    name: String,
    number: u32,
    worker: Arc<Shared>,
    notifiers: Arc<Notifiers>,
    host: Option<PathBuf>,
    forward: Vec<(u32, SocketAddr)>,
}

impl Host<HostRelay> for Around {
    fn notify(&self, queue: Queue) {
        self.notifiers.call(match queue {
            Queue::Out => RX,
            Queue::In => TX,
        });
    }

    fn wake(&self) {
        self.worker.send(Command::Work(self.number));
    }

    fn broken(&self, queue: Queue, why: Broken) {
        let vring = match queue {
            Queue::Out => RX,
            Queue::In => TX,
        };
        log::error!("{} queue {vring}: {why}; queue stopped, reset the device to continue", self.name);
        self.notifiers.faults[vring].fetch_add(1, Ordering::Relaxed);
        self.notifiers.err(vring);
    }

    fn open(&self, key: Key, kind: Kind) -> Door<HostRelay> {
        if kind != Kind::Stream {
            return Door::Shut;
        }
        let forward = self.forward.iter().find(|&&(port, _)| port == key.port);
        let opened = match (forward, &self.host) {
            (Some(&(_, address)), _) => connect_tcp(address),
            (None, Some(host)) => {
                let mut path = host.clone().into_os_string();
                path.push(format!("_{}", key.port));
                connect_unix(Path::new(&path)).map(|socket| (socket, true))
            }
            (None, None) => return Door::Shut,
        };
        let (socket, connected) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                log::debug!("{}: no way to port {} of the host: {error}", self.name, key.port);
                return Door::Shut;
            }
        };
        let socket = Arc::new(socket);
        let slot = self.worker.slot();
        self.worker.send(Command::Relay { guest: self.number, slot, key, socket: socket.clone(), connected });
        let relay = HostRelay { socket, slot, guest: self.number, worker: self.worker.clone(), asked: false };
        if connected { Door::Open(relay) } else { Door::Later(relay) }
    }

    fn room(&self, key: Key) {
        self.worker.send(Command::Room(self.number, key));
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

/// A running vsock device. Dropped, it disconnects and removes its sockets.
pub struct VsockServer {
    guest: Arc<Guest>,
    worker: Arc<Shared>,
    socket: Option<Socket>,
    _host: Option<Place>,
}

impl VsockServer {
    /// Makes the sockets and has the worker serve them.
    pub fn start(config: VsockConfig, worker: &VsockWorker) -> Result<VsockServer, SocketError> {
        let name = &*config.name;
        let failed = |error| SocketError::Start { name: name.to_owned(), error };
        let host = config.host.as_deref().map(|path| bind(name, path, config.access)).transpose()?;
        let (listener, host) = host.unzip();
        let number = worker.number();
        let notifiers = Arc::new(Notifiers::new().map_err(failed)?);
        let around = Around {
            name: name.to_owned(),
            number,
            worker: worker.shared.clone(),
            notifiers: notifiers.clone(),
            host: config.host.clone(),
            forward: config.forward.clone(),
        };
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let told = attention.try_clone().map_err(failed)?;
        let stack = Arc::new(Stack::new(name, HOST_CID, Some(config.cid), config.settings, Box::new(around)));
        if !config.groups.is_empty() {
            worker.hub.join(&stack, config.groups.clone());
        }
        let guest = Arc::new(Guest {
            name: name.to_owned(),
            number,
            cid: config.cid,
            stack,
            host: config.host.clone(),
            notifiers,
            attention,
            vrings: Mutex::default(),
            lines: AtomicU32::new(100),
        });
        worker.add(guest.clone(), listener).map_err(failed)?;
        let mut server = VsockServer { guest: guest.clone(), worker: worker.shared.clone(), socket: None, _host: host };
        let device = VsockDevice { guest, worker: worker.shared.clone(), offer: config.features.bits() };
        let VsockConfig { role, limits, access, .. } = config;
        let at = SocketConfig { name, path: &config.socket, role, limits, access };
        server.socket = Some(Socket::start(at, told, || Ok(device))?);
        Ok(server)
    }

    /// The host's end of the device: for sockets of this program.
    pub fn stack(&self) -> &Arc<Stack<HostSide>> {
        &self.guest.stack
    }
}

impl Drop for VsockServer {
    fn drop(&mut self) {
        // Connection by connection, and once more in general, for connections with other guests and if there was no room.
        self.guest.stack.close();
        {
            let mut vrings = self.guest.vrings.lock();
            vrings.stale = true;
            self.guest.tell(&mut vrings);
        }
        self.socket = None;
        let (sender, removed) = mpsc::channel();
        self.worker.send(Command::Remove(self.guest.number, sender));
        let _ = removed.recv();
    }
}

/// The same as what is behind a vhost-user socket.
#[derive(Clone)]
struct VsockDevice {
    guest: Arc<Guest>,
    worker: Arc<Shared>,
    offer: u64,
}

/// Whether a ring that starts there has not been used before. Frontends say it in different ways.
fn is_fresh(base: u32, acked: u64) -> bool {
    if acked & bits::RING_PACKED == 0 { base == 0 } else { [0, 0x8000, 0x8000_8000].contains(&base) }
}

impl Device for VsockDevice {
    fn name(&self) -> &str {
        &self.guest.name
    }

    fn offer(&self) -> u64 {
        self.offer
    }

    fn queue_num(&self) -> u64 {
        1
    }

    fn vrings(&self) -> usize {
        VRINGS
    }

    fn config(&self) -> Vec<u8> {
        Config { guest_cid: self.guest.cid }.bytes().to_vec()
    }

    fn start(&self, index: usize, ring: Ring, kick: Option<&Kick>) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base } = ring;
        let guest = &*self.guest;
        let mut vrings = guest.vrings.lock();
        vrings.memory = Some(memory.clone());
        if let Some(kick) = kick.filter(|_| index != EVENT) {
            let watched = self.worker.watch(guest.number, kick.as_raw_fd());
            watched.map_err(|error| format!("cannot wait for its kick: {error}; expected an eventfd"))?;
        }
        if index == TX {
            *guest.notifiers.kick.lock() = kick.cloned();
        }
        let resumed = vrings.stopped[index] == Some(base);
        if index == TX && !resumed {
            // A new life of the driver, or of this program.
            guest.stack.reset();
            vrings.stale = !is_fresh(base, acked);
        }
        let started = match index {
            RX => RxQueue::start(memory, acked, size, addresses, base).map(|mut queue| {
                let base = queue.base();
                guest.stack.set_link(Some(queue));
                guest.stack.set_kinds(kinds(acked));
                base
            }),
            TX => TxQueue::start(memory, acked, size, addresses, base).map(|mut queue| {
                let base = queue.base();
                guest.stack.set_inlet(Some(queue));
                base
            }),
            _ => Events::start(memory, acked, size, addresses, base).map(|mut queue| {
                let base = queue.base();
                vrings.events = Some(queue);
                base
            }),
        };
        let started = started.map_err(|error| {
            if let Some(kick) = kick {
                self.worker.unwatch(kick.as_raw_fd());
            }
            error.to_string()
        })?;
        guest.notifiers.faults[index].store(0, Ordering::Relaxed);
        guest.tell(&mut vrings);
        drop(vrings);
        guest.notifiers.call(index);
        self.worker.send(Command::Work(guest.number));
        Ok(started)
    }

    fn stop(&self, index: usize, kick: Option<&Kick>) -> u32 {
        let guest = &*self.guest;
        if let Some(kick) = kick.filter(|_| index != EVENT) {
            self.worker.unwatch(kick.as_raw_fd());
        }
        if index == TX {
            // What was sent before is not lost.
            guest.stack.work();
            *guest.notifiers.kick.lock() = None;
            guest.notifiers.unwait.write(1).unwrap_or_default();
        }
        let mut vrings = guest.vrings.lock();
        let base = match index {
            RX => guest.stack.set_link(None).map(|mut queue| queue.base()),
            TX => guest.stack.set_inlet(None).map(|mut queue| queue.base()),
            _ => vrings.events.take().map(|mut queue| queue.base()),
        };
        // One that was broken has none; it will not be resumed.
        let base = base.unwrap_or_default();
        vrings.stopped[index] = Some(base);
        vrings.memory = None;
        base
    }

    fn set_fd(&self, index: usize, call: Option<Call>, err: bool) {
        let notifiers = &self.guest.notifiers;
        if err {
            *notifiers.errs[index].lock() = call;
        } else {
            *notifiers.calls[index].lock() = call;
            notifiers.call(index);
        }
    }

    fn count_fault(&self, index: Option<usize>) {
        if let Some(index) = index {
            self.guest.notifiers.err(index);
        }
    }

    fn signal_err(&self, index: usize) {
        self.guest.notifiers.err(index);
    }

    fn has_fault(&self, index: usize) -> bool {
        self.guest.notifiers.faults[index].load(Ordering::Relaxed) > 0
    }

    fn reset(&self) {
        self.guest.stack.set_kinds(&[]);
        self.guest.stack.reset();
        *self.guest.vrings.lock() = Vrings::default();
    }

    fn forget(&self) {}
}
