//! A guest's vsock device as its worker and its stack see it: state, notifications, destinations of connections. Created by
//! `server.rs`, which controls it; served by `member.rs`.

use super::{
    budget::Budget,
    config::VsockConfig,
    lines::Lines,
    relay::{Command, HostRelay, HostSide, Mail, Target, Wire},
};
use crate::{
    sys,
    vhost_user::{Kick, Vring},
};
use log::Level;
use parking_lot::Mutex;
use ringroad_mem::Table;
use ringroad_vsock::{Broken, Events, Host, Key, OpenResult, Queue, SocketType, Stack, Violation};
use ringroad_wire::vsock_hdr::HOST_CID;
use std::{
    any::Any,
    fmt::Arguments,
    io,
    net::SocketAddr,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Receive, transmit, event (virtio 1.3, 5.10.2).
pub(super) const VRINGS: usize = 3;
pub(super) const RX: usize = 0;
pub(super) const TX: usize = 1;
pub(super) const EVENT: usize = 2;

/// A guest, connected or not.
pub(super) struct Guest {
    pub cid: u64,
    pub stack: Arc<Stack<HostSide>>,
    pub env: Arc<Env>,
    /// Wakes the thread of its socket to disconnect the frontend.
    attention: EventFd,
    pub vrings: Mutex<Vrings>,
    /// The memory that each running vring was started with. A separate lock that is never held for long, as the worker takes
    /// it.
    pub memory: Mutex<[Option<Arc<Table>>; VRINGS]>,
}

/// What surrounds the stack of a guest.
pub(super) struct Env {
    pub name: String,
    pub mail: Arc<Mail>,
    pub budget: Arc<Budget>,
    pub lines: Lines,
    violations: Lines,
    pub notifiers: Notifiers,
    pub routes: Mutex<Routes>,
}

/// Sources and destinations of connections with the host; can be changed while the device runs.
pub(super) struct Routes {
    pub host: Option<PathBuf>,
    pub forward: Vec<(u32, SocketAddr)>,
}

/// Control's state of the vrings.
#[derive(Default)]
pub(super) struct Vrings {
    /// The base at which each was last stopped.
    pub stopped: [Option<u32>; VRINGS],
    pub events: Option<Events>,
    /// The driver may have connections that the stack does not know; a transport reset is due.
    pub stale: bool,
}

/// Notification descriptors in both directions.
pub(super) struct Notifiers {
    /// The kick descriptor of the transmit queue.
    pub kick: Mutex<Option<Kick>>,
    pub unwait: EventFd,
    pub vrings: [Vring; VRINGS],
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

impl Env {
    pub(super) fn new(config: &VsockConfig, mail: Arc<Mail>, budget: Budget) -> io::Result<Env> {
        Ok(Env {
            name: config.name.clone(),
            mail,
            budget: Arc::new(budget),
            lines: Lines::new(),
            violations: Lines::of_violations(),
            notifiers: Notifiers::new()?,
            routes: Mutex::new(Routes { host: config.host.clone(), forward: config.forward.clone() }),
        })
    }

    /// Logs an event caused by the guest or a program, within the rate limit.
    pub(super) fn say(&self, level: Level, what: Arguments<'_>) {
        self.lines.say(level, format_args!("{}: {what}", self.name));
    }

    pub(super) fn host_path(&self) -> String {
        self.routes.lock().host.as_deref().unwrap_or(Path::new("")).display().to_string()
    }

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
        self.say(
            Level::Warn,
            format_args!(
                "connection request to port {} refused: too many waiting requests, connects or open sockets",
                key.port
            ),
        );
        OpenResult::Refused
    }
}

impl Guest {
    /// `attention` wakes the thread of its socket to disconnect the frontend.
    pub(super) fn new(config: &VsockConfig, env: Env, attention: EventFd) -> Guest {
        let env = Arc::new(env);
        Guest {
            cid: config.cid,
            stack: Arc::new(Stack::new(HOST_CID, Some(config.cid), config.settings, Box::new(env.clone()))),
            env,
            attention,
            vrings: Mutex::default(),
            memory: Mutex::default(),
        }
    }

    /// Stops the device in any state and disconnects its frontend, after a panic in its code.
    pub(super) fn abandon(&self) {
        self.stack.set_link(None);
        self.stack.set_inlet(None);
        self.stack.reset();
        self.env.notifiers.vrings.iter().for_each(Vring::signal_err);
        let _ = self.attention.write(1);
    }

    pub(super) fn set_memory(&self, vring: usize, memory: Option<Arc<Table>>) {
        // The old memory is dropped without the lock, as unmapping may take a while.
        let _before = self.memory.lock().get_mut(vring).and_then(|place| std::mem::replace(place, memory));
    }

    /// Returns whether both queues for packets have been started.
    pub(super) fn is_started(&self) -> bool {
        let memory = self.memory.lock();
        [RX, TX].into_iter().all(|vring| memory.get(vring).is_some_and(Option::is_some))
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
            self.env.say(
                Level::Error,
                format_args!("the frontend has truncated the guest's memory; device stopped, frontend disconnected"),
            );
            self.stack.set_link(None);
            self.stack.set_inlet(None);
            self.env.notifiers.vrings.iter().for_each(Vring::signal_err);
            let _ = self.attention.write(1);
        }
    }

    /// Sends the driver a transport reset event (virtio 1.3, 5.10.6.7), if one is due and the event queue has a buffer.
    pub(super) fn send_transport_reset(&self) {
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
                self.env
                    .say(Level::Info, format_args!("transport reset sent to the guest: all its connections are reset"));
                if notify {
                    self.env.notifiers.call(EVENT);
                }
            }
            Ok(None) => {}
            Err(broken) => {
                self.env.lines.say(
                    Level::Error,
                    format_args!(
                        "{} queue {EVENT}: {broken}; queue stopped, reset the device to continue",
                        self.env.name
                    ),
                );
                self.env.notifiers.fail(EVENT);
            }
        }
    }
}

/// Connects a guest's stack with its notifications, the worker and host sockets.
impl Host<HostRelay> for Arc<Env> {
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

    fn panicked(&self, payload: Box<dyn Any + Send>) {
        self.mail.send(Command::Panicked(payload));
    }

    fn violation(&self, violation: Violation) {
        self.violations.say(Level::Warn, format_args!("{}: {violation}", self.name));
    }

    fn open(&self, key: Key, kind: SocketType) -> OpenResult<HostRelay> {
        if kind != SocketType::Stream {
            return OpenResult::Refused;
        }
        let Some(target) = self.target(key.port) else { return OpenResult::Refused };
        let Some((place, waiting)) = self.budget.admit_request() else { return self.refuse(key) };
        let wire = Arc::new(Wire::new(&self.mail, place, matches!(target, Target::Tcp(_))));
        let relay = HostRelay { wire: wire.clone(), awaits_ok: false };
        if self.mail.is_worker_thread() {
            // Called while the guest's packets are processed: connected later in its turn, within the limits of the turn.
            self.mail.send(Command::Open(key, wire, Some((target, waiting)), false));
            return OpenResult::Pending(relay, Instant::now());
        }
        // A thread of this program processes the guest's packets itself: it connects right away, at its own expense.
        drop(waiting);
        if self.budget.connects.take().is_none() {
            self.budget.refuse();
            return self.refuse(key);
        }
        let connected = match wire.connect(&target) {
            Ok(connected) => connected,
            Err(error) => {
                self.say(Level::Debug, format_args!("cannot connect to port {} of the host: {error}", key.port));
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
