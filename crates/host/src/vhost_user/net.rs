//! A guest's network device as what is behind a vhost-user socket: its queues go to the gates of a port of the switch.

use super::{
    Call,
    device::{Device, Ring},
    port::{Slot, VhostPort},
    server::{Role, Socket, SocketError},
};
use crate::{
    gate::Gate,
    port::{Kind, Port},
    worker::{PortHandle, Worker},
};
use ringroad_net::{Config, Features, RxQueue, TxQueue};
use ringroad_ring::{SetupError, Tuning};
use ringroad_switch::{Limits, Mode, Poll};
use ringroad_wire::ethernet;
use std::{
    fs::File,
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
}

/// A running vhost-user port. Dropped, it disconnects, removes its socket, and leaves the switch.
pub struct Server {
    port: Arc<Port>,
    _socket: Socket,
}

impl Server {
    /// Makes the socket (as a server), adds the port to the worker's switch, and starts its thread.
    pub fn start(config: VhostConfig, worker: &Worker) -> Result<Server, SocketError> {
        let name = format!("port {}", config.name);
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let failed = |error| SocketError::Start { name: name.clone(), error };
        let attention = eventfd().map_err(failed)?;
        let told = attention.try_clone().map_err(failed)?;
        let vhost = VhostPort::new(&config.name, config.config.queue_pairs, attention);
        let port = Port::vhost(vhost, config.mode, config.hairpin, config.poll);
        let port = Arc::new(port.with_limits(config.limits));
        let socket = Socket::start(&name, &config.socket, config.role, told, || {
            let VhostConfig { features, config, tuning, .. } = config.clone();
            let running = Arc::new(Mutex::new(vec![false; config.queue_pairs.into()]));
            let handle = Arc::new(worker.add(port.clone())?);
            Ok(NetDevice { name: name.clone(), handle, offer: features, config, tuning, running })
        })?;
        Ok(Server { port, _socket: socket })
    }

    /// What the switch sees.
    pub fn port(&self) -> &Arc<Port> {
        &self.port
    }
}

/// A port of the switch as a device.
#[derive(Clone)]
struct NetDevice {
    name: String,
    handle: Arc<PortHandle>,
    offer: Features,
    config: Config,
    tuning: Tuning,
    /// Which receive queues run.
    running: Arc<Mutex<Vec<bool>>>,
}

impl NetDevice {
    fn port(&self) -> &VhostPort {
        match &self.handle.port().kind {
            Kind::Vhost(port) => port,
            Kind::Tap(_) => unreachable!("it is made for a vhost-user port"),
        }
    }

    fn count_pairs(&self, pair: usize, runs: bool) {
        let mut running = self.running.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        running[pair] = runs;
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

    fn start(&self, index: usize, ring: Ring, kick: Option<&File>) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base } = ring;
        let tuning = self.tuning;
        let longest = ethernet::longest_frame(self.config.mtu);
        let port = self.port();
        let pair = index / 2;
        if index.is_multiple_of(2) {
            let counters = port.rx_counters[pair].clone();
            let start = |base| {
                let mut queue = RxQueue::start(memory, acked, size, addresses, base, counters)?;
                queue.tune(tuning);
                queue.limit(longest);
                Ok(queue)
            };
            let started = start_slot(&port.rx[pair], base, start, RxQueue::base).map_err(|error| error.to_string())?;
            self.count_pairs(pair, true);
            return Ok(started);
        }
        let counters = port.tx_counters[pair].clone();
        port.tx[pair].enter().no_kick = kick.is_none();
        let start = |base| {
            let mut queue = TxQueue::start(memory, acked, size, addresses, base, counters)?;
            queue.tune(tuning);
            queue.limit(longest);
            Ok(queue)
        };
        let started = start_slot(&port.tx[pair], base, start, TxQueue::base).map_err(|error| error.to_string())?;
        if let Some(kick) = kick
            && let Err(error) = self.handle.watch(pair as u16, kick.as_raw_fd())
        {
            stop_slot(&port.tx[pair], TxQueue::base);
            return Err(format!("cannot wait for its kick: {error}; expected an eventfd"));
        }
        self.handle.wake(pair as u16);
        Ok(started)
    }

    fn stop(&self, index: usize, kick: Option<&File>) -> u32 {
        let pair = index / 2;
        if index.is_multiple_of(2) {
            let base = stop_slot(&self.port().rx[pair], RxQueue::base);
            self.count_pairs(pair, false);
            return base;
        }
        if let Some(kick) = kick {
            self.handle.unwatch(kick);
        }
        self.handle.rest(pair as u16);
        stop_slot(&self.port().tx[pair], TxQueue::base)
    }

    fn set_fd(&self, index: usize, call: Option<Call>, err: bool) {
        let port = self.port();
        if index.is_multiple_of(2) {
            set_slot_fd(&port.rx[index / 2], call, err);
        } else {
            set_slot_fd(&port.tx[index / 2], call, err);
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
    slot.base = started_at(&mut queue);
    slot.queue = Some(queue);
    slot.fault = None;
    slot.notify();
    Ok(slot.base)
}

fn stop_slot<Q>(gate: &Gate<Slot<Q>>, base: impl Fn(&mut Q) -> u32) -> u32 {
    let mut slot = gate.enter();
    if let Some(mut queue) = slot.queue.take() {
        slot.base = base(&mut queue);
    }
    slot.base
}

fn set_slot_fd<Q>(gate: &Gate<Slot<Q>>, call: Option<Call>, err: bool) {
    let mut slot = gate.enter();
    if err {
        slot.err = call;
        return;
    }
    slot.call = call;
    if slot.queue.is_some() {
        slot.notify();
    }
}
