//! A guest's network device as what is behind a vhost-user socket: its queues go to the gates of a port of the switch.

use super::{
    Access, Call, Kick, SocketError,
    device::{Device, Ring},
    limits::Lines,
    port::{Slot, VhostPort},
    server::{Role, Socket, SocketConfig},
};
use crate::{
    gate::Gate,
    notes::{self, Notes},
    port::{Kind, Port, PortSettings},
    worker::{PortHandle, Worker},
};
use ringroad_net::{Config, Features, RxQueue, TxQueue, bits};
use ringroad_ring::{Inflight, SetupError, Tuning};
use ringroad_switch::{Limits, Mode, Poll};
use ringroad_wire::ethernet;
use std::{
    os::fd::AsRawFd,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::Ordering},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// How a vhost-user port is set up.
#[derive(Clone, Debug)]
pub struct VhostConfig {
    /// Its name in the configuration.
    pub name: String,
    /// Where the socket is.
    pub socket: PathBuf,
    /// Which end of it is ours.
    pub role: Role,
    /// What is offered.
    pub features: Features,
    /// What the driver reads in the configuration space.
    pub config: Config,
    /// What becomes of its frames.
    pub mode: Mode,
    /// Whether frames may go back out of it.
    pub hairpin: bool,
    /// For how long its worker polls it.
    pub poll: Poll,
    /// What it may do to other ports.
    pub limits: Limits,
    /// What is turned off, for measuring.
    pub tuning: Tuning,
    /// What its frontend may use up.
    pub frontend: super::Limits,
    /// Who may connect to the socket, as a server.
    pub access: Access,
}

/// A running vhost-user port. Dropped, it disconnects, removes its socket, and leaves the switch.
pub struct Server {
    // Dropped before the port leaves the switch.
    socket: Socket,
    handle: Arc<PortHandle>,
}

impl Server {
    /// Makes the socket (as a server), adds the port to the worker's switch, and starts its thread.
    pub fn start(config: VhostConfig, worker: &Worker) -> Result<Server, SocketError> {
        let name = format!("port {}", config.name);
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let failed = |error| SocketError::Start { name: name.clone(), error };
        let attention = eventfd().map_err(failed)?;
        let told = attention.try_clone().map_err(failed)?;
        let lines = Lines::new(&name, config.frontend.lines);
        let vhost = VhostPort::new(&config.name, config.config.queue_pairs, attention, lines);
        let VhostConfig { mode, hairpin, poll, tuning, limits, role, frontend, access, .. } = config;
        let port = Arc::new(Port::vhost(vhost, PortSettings { mode, hairpin, poll, tuning, limits }));
        let path = config.socket.clone();
        let mut added = None;
        let at = SocketConfig { name: &name, path: &config.socket, role, limits: frontend, access };
        let socket = Socket::start(at, told, || {
            let VhostConfig { features, config, .. } = config.clone();
            let running = Arc::new(Mutex::new(vec![false; config.queue_pairs.into()]));
            let notes = Notes::open(&name, &path, 2 * usize::from(config.queue_pairs));
            let handle = added.insert(Arc::new(worker.add(port)?)).clone();
            Ok(NetDevice { name: name.clone(), handle, offer: features, config, running, notes })
        })?;
        let none = || SocketError::Start { name: name.clone(), error: std::io::ErrorKind::NotFound.into() };
        Ok(Server { socket, handle: added.ok_or_else(none)? })
    }

    /// What the switch sees.
    pub fn port(&self) -> &Arc<Port> {
        self.handle.port()
    }

    /// Has the port behave like this; its guest does not notice.
    pub fn set(&self, settings: PortSettings) {
        self.handle.set(settings);
    }

    /// Has its frontends held to other limits, and others connect.
    ///
    /// # Errors
    /// The socket's owner or permissions cannot be changed; the limits are.
    pub fn set_frontend(&self, limits: super::Limits, access: Access) -> Result<(), SocketError> {
        if let Kind::Vhost(port) = &self.handle.port().kind {
            port.lines.set(limits.lines);
        }
        self.socket.set(limits, access)
    }
}

/// A port of the switch as a device.
#[derive(Clone)]
struct NetDevice {
    name: String,
    handle: Arc<PortHandle>,
    offer: Features,
    config: Config,
    /// Which receive queues run.
    running: Arc<Mutex<Vec<bool>>>,
    notes: Notes,
}

impl NetDevice {
    #[expect(clippy::unreachable, reason = "its port is made as one of a guest in `Server::start`, and never changes")]
    fn port(&self) -> &VhostPort {
        match &self.handle.port().kind {
            Kind::Vhost(port) => port,
            Kind::Tap(_) => unreachable!("it is made for a vhost-user port"),
        }
    }

    fn count_pairs(&self, pair: usize, runs: bool) {
        let mut running = self.running.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(running) = running.get_mut(pair) {
            *running = runs;
        }
        let pairs = running.iter().take_while(|&&runs| runs).count();
        self.port().pairs_running.store(pairs, Ordering::Relaxed);
    }
}

impl Device for NetDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn offer(&self) -> u64 {
        self.offer.bits()
    }

    fn queue_num(&self) -> u64 {
        self.config.queue_pairs.into()
    }

    fn vrings(&self) -> usize {
        2 * usize::from(self.config.queue_pairs)
    }

    fn config(&self) -> Vec<u8> {
        self.config.bytes().to_vec()
    }

    fn start(&self, index: usize, ring: Ring, kick: Option<&Kick>) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base, inflight } = ring;
        // Asked for within the gate: whoever changes it meanwhile tunes the queue afterwards.
        let tuning = || self.handle.port().settings().tuning;
        let longest = ethernet::longest_frame(self.config.mtu);
        let port = self.port();
        let pair = index / 2;
        let journal = self.notes.journal(index);
        let missing = || format!("there is no pair {pair} of queues");
        if index.is_multiple_of(2) {
            // A packed ring that is tracked publishes chain by chain, and the buffers of one frame must come together.
            let apart = acked & bits::RING_PACKED != 0 && acked & bits::NET_F_MRG_RXBUF != 0;
            let tracked = if apart { Inflight::NONE } else { inflight };
            let (gate, counters) = port.rx.get(pair).zip(port.rx_counters.get(pair).cloned()).ok_or_else(missing)?;
            let start = |base| {
                let (mut queue, resumed) =
                    RxQueue::resume(memory, acked, size, addresses, base, counters, journal, tracked)?;
                notes::say(&self.name, index, base, resumed);
                queue.tune(tuning());
                queue.limit(longest);
                Ok(queue)
            };
            let started = start_slot(gate, base, start, RxQueue::base).map_err(|error| error.to_string())?;
            self.count_pairs(pair, true);
            return Ok(started);
        }
        let (gate, counters) = port.tx.get(pair).zip(port.tx_counters.get(pair).cloned()).ok_or_else(missing)?;
        gate.enter().no_kick = kick.is_none();
        let start = |base| {
            let (mut queue, resumed) =
                TxQueue::resume(memory, acked, size, addresses, base, counters, journal, inflight)?;
            notes::say(&self.name, index, base, resumed);
            queue.tune(tuning());
            queue.limit(longest);
            Ok(queue)
        };
        let started = start_slot(gate, base, start, TxQueue::base).map_err(|error| error.to_string())?;
        if let Some(kick) = kick
            && let Err(error) = self.handle.watch(pair as u16, kick.as_raw_fd())
        {
            stop_slot(gate, TxQueue::stop);
            return Err(format!("cannot wait for its kick: {error}"));
        }
        self.handle.wake(pair as u16);
        Ok(started)
    }

    fn stop(&self, index: usize, kick: Option<&Kick>) -> u32 {
        let pair = index / 2;
        if index.is_multiple_of(2) {
            let base = self.port().rx.get(pair).map_or(0, |gate| stop_slot(gate, RxQueue::stop));
            self.count_pairs(pair, false);
            return base;
        }
        if let Some(kick) = kick {
            self.handle.unwatch(kick);
        }
        self.handle.rest(pair as u16);
        self.port().tx.get(pair).map_or(0, |gate| stop_slot(gate, TxQueue::stop))
    }

    fn end_notes(&self, index: usize) {
        self.notes.journal(index).end();
    }

    fn set_fd(&self, index: usize, call: Option<Call>, err: bool) {
        let port = self.port();
        if index.is_multiple_of(2) {
            set_slot_fd(port.rx.get(index / 2), call, err);
        } else {
            set_slot_fd(port.tx.get(index / 2), call, err);
        }
    }

    fn count_fault(&self, index: Option<usize>) {
        self.port().count_fault(index);
    }

    fn signal_err(&self, index: usize) {
        self.port().signal_err(index);
    }

    fn has_fault(&self, index: usize) -> bool {
        self.port().has_fault(index)
    }

    fn reset(&self) {}

    fn forget(&self) {
        self.handle.forget();
    }
}

fn start_slot<Q>(
    gate: &Gate<Slot<Q>>,
    base: u32,
    start: impl FnOnce(u32) -> Result<Q, SetupError>,
    started_at: impl Fn(&mut Q) -> u32,
) -> Result<u32, SetupError> {
    let mut slot = gate.enter();
    slot.base = base;
    let mut queue = start(base)?;
    let base = started_at(&mut queue);
    slot.base = base;
    slot.queue = Some(queue);
    slot.fault = None;
    let call = slot.call.clone();
    // Whatever that takes, the queue's worker does not find the gate shut.
    drop(slot);
    if let Some(call) = call {
        call.signal();
    }
    Ok(base)
}

fn stop_slot<Q>(gate: &Gate<Slot<Q>>, base: impl Fn(&mut Q) -> u32) -> u32 {
    let mut slot = gate.enter();
    if let Some(mut queue) = slot.queue.take() {
        slot.base = base(&mut queue);
    }
    slot.base
}

fn set_slot_fd<Q>(gate: Option<&Gate<Slot<Q>>>, call: Option<Call>, err: bool) {
    let Some(gate) = gate else { return };
    let mut slot = gate.enter();
    let old = std::mem::replace(if err { &mut slot.err } else { &mut slot.call }, call);
    let notify = if !err && slot.queue.is_some() { slot.call.clone() } else { None };
    drop(slot);
    drop(old);
    if let Some(call) = notify {
        call.signal();
    }
}
