//! A guest's network device behind its vhost-user socket: starts and stops the queues of a [`VhostPort`].

use super::{
    Access, BackendChannel, QueueThread, Ring, SocketError, VhostDevice, Vring,
    config::{MAX_PAIRS, VhostConfig},
    port::{Slot, VhostPort},
    server::{Socket, SocketConfig},
    status::Status,
};
use crate::{
    gate::Gate,
    notes,
    port::{Port, PortKind},
    socket::{Lines, say},
    worker::{PortHandle, Worker},
};
use ringroad_frame::{Snapshot, copy_some, offload::Support, write_some};
use ringroad_net::{
    Coalesce, Config, Features, RxQueue, TxQueue, bits,
    control::{self, Change, Control, Queues},
    rss::Rss,
};
use ringroad_ring::{Chains, Features as RingFeatures, Inflight};
use ringroad_wire::ethernet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A running vhost-user port. Dropped, it disconnects, removes its socket, and leaves the switch.
pub struct Server<K: PortKind> {
    // Dropped before the port leaves the switch.
    socket: Socket,
    handle: Arc<PortHandle<K>>,
    lines: Lines,
    status: Arc<Status>,
    guest: VhostPort,
    /// Length of the longest frame while the link is up, in bytes.
    longest: usize,
}

impl<K: PortKind> std::fmt::Debug for Server<K> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Server").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl<K: PortKind> Server<K> {
    /// Creates the socket (as a server), adds the port to the worker's switch, and starts its thread. `kind` makes a guest's
    /// port one of the worker's kinds.
    ///
    /// # Errors
    /// The socket cannot be created or its owner and mode not be set, or the system has no more threads or descriptors.
    pub fn start(
        config: VhostConfig,
        worker: &Worker<K>,
        kind: impl FnOnce(VhostPort) -> K,
    ) -> Result<Self, SocketError> {
        let name = format!("port {}", config.name);
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let failed = |error| SocketError::Start { name: name.clone(), error };
        let attention = eventfd().map_err(failed)?;
        let raised = attention.try_clone().map_err(failed)?;
        let VhostConfig { role, frontend, access, settings, features, config: mut space, .. } = config;
        space.queue_pairs = space.queue_pairs.clamp(1, MAX_PAIRS);
        let lines = Lines::new(&name, frontend.lines);
        let vhost = VhostPort::new(&config.name, space.queue_pairs, attention, lines.clone());
        let (guest, longest) = (vhost.clone(), ethernet::longest_frame(space.mtu));
        guest.limit(if space.link_up { longest } else { 0 });
        let mut added = None;
        let status = Arc::new(Status::new(space.link_up));
        let at = SocketConfig { name: &name, path: &config.socket, role, limits: frontend, access };
        let socket = Socket::start(at, raised, || {
            let running = Arc::new(Mutex::new(vec![false; 2 * usize::from(space.queue_pairs)]));
            let handle = Arc::new(worker.add(Port::new(kind(vhost.clone()), settings))?);
            added = Some(handle.clone());
            let (name, offer, config, control) = (name.clone(), features, space, Arc::default());
            Ok(NetDevice { name, port: vhost, handle, offer, config, running, control, status: status.clone() })
        })?;
        let none = || SocketError::Start { name: name.clone(), error: std::io::ErrorKind::NotFound.into() };
        Ok(Server { socket, handle: added.ok_or_else(none)?, lines, status, guest, longest })
    }

    /// Returns the port's place in the worker's switch.
    pub fn handle(&self) -> &PortHandle<K> {
        &self.handle
    }

    /// Sets whether the link is up: if not, all frames from and to the guest are dropped. Its driver is notified if its
    /// frontend takes reports about the configuration space, and asked to announce itself when the link is up again if it has
    /// negotiated that.
    pub fn set_link(&self, up: bool) {
        if !self.status.set_link(up) {
            return;
        }
        self.guest.limit(if up { self.longest } else { 0 });
        if !up {
            self.handle.forget();
        }
        // Frames that wait for room in its queues are dropped now.
        self.handle.room();
        self.status.channel.config_changed();
    }

    /// Changes the limits of its frontends, and who may connect.
    ///
    /// # Errors
    /// The socket's owner or mode cannot be changed; the limits are in effect.
    pub fn set_frontend(&self, limits: super::Limits, access: Access) -> Result<(), SocketError> {
        self.lines.set(limits.lines);
        self.socket.set(limits, access)
    }
}

/// The device behind the socket.
struct NetDevice<K: PortKind> {
    name: String,
    port: VhostPort,
    handle: Arc<PortHandle<K>>,
    offer: Features,
    config: Config,
    /// Which receive and transmit queues run, by vring.
    running: Arc<Mutex<Vec<bool>>>,
    control: Arc<Mutex<Controlled>>,
    status: Arc<Status>,
}

/// The control queue.
#[derive(Default)]
struct Controlled {
    /// What the driver has asked for; `None`: it has no control queue, or has not started it.
    state: Option<Control>,
    /// The feature bits that the driver has acknowledged.
    acked: u64,
    /// The queue that runs, and its vring.
    queue: Option<(usize, QueueThread)>,
}

// Not derived, as that would require kinds that are `Clone`.
impl<K: PortKind> Clone for NetDevice<K> {
    fn clone(&self) -> Self {
        let NetDevice { name, port, handle, offer, config, running, control, status } = self;
        let (name, port, handle) = (name.clone(), port.clone(), handle.clone());
        let (running, control, status) = (running.clone(), control.clone(), status.clone());
        NetDevice { name, port, handle, offer: *offer, config: *config, running, control, status }
    }
}

impl<K: PortKind> NetDevice<K> {
    /// Sets which offloads the guest takes, and tells the other ports.
    fn set_takes(&self, support: Support) {
        if self.port.0.takes.swap(support.bits(), Ordering::Relaxed) != support.bits() {
            self.handle.offloads_changed();
        }
    }

    fn running(&self) -> MutexGuard<'_, Vec<bool>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a queue that has started or stopped; returns how many receive queues run, from the first one on.
    fn count_queue(&self, vring: usize, runs: bool) -> usize {
        let mut controlled = self.controlled();
        if let Some(running) = self.running().get_mut(vring) {
            *running = runs;
        }
        if let Some(control) = controlled.state.as_mut().filter(|_| !runs) {
            // Settings of this queue alone end with it.
            control.stopped(vring as u16);
        }
        self.set_pairs(&controlled)
    }

    /// Sets how many receive queues flows are distributed among: those that run and that the driver uses. Returns how many run.
    fn set_pairs(&self, controlled: &Controlled) -> usize {
        let running = self.running().iter().step_by(2).take_while(|&&runs| runs).count();
        // Without a control queue the driver uses what its frontend enables; with one, the first pair before its first command.
        let used = match &controlled.state {
            Some(control) => control.pairs().into(),
            None if controlled.acked & bits::NET_F_CTRL_VQ != 0 => 1,
            None => usize::MAX,
        };
        let rss = controlled.state.as_ref().and_then(Control::rss);
        let unchanged = |known: &Option<Arc<Rss>>| known.as_ref().map(Arc::as_ptr) == rss.map(Arc::as_ptr);
        let mut known = self.port.0.rss.lock();
        let old = if unchanged(&known) { None } else { std::mem::replace(&mut *known, rss.cloned()) };
        // Freed outside the lock, which the worker tries.
        drop(known);
        drop(old);
        self.port.0.pairs.store(running.min(used), Ordering::Relaxed);
        running
    }

    /// Returns whether a vring is the control queue of a driver that acknowledged these features (5.1.2).
    fn is_control(&self, index: usize, acked: u64) -> bool {
        let many = acked & (bits::NET_F_MQ | bits::NET_F_RSS) != 0;
        let pairs = if many { self.port.0.rx.len() } else { 1 };
        acked & bits::NET_F_CTRL_VQ != 0 && index == 2 * pairs
    }

    fn start_rx(&self, pair: usize, ring: Ring) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base, journal, inflight, kick } = ring;
        // A packed ring that is tracked publishes chain by chain, and the buffers of one frame must appear together.
        let apart = acked & bits::RING_PACKED != 0 && acked & bits::NET_F_MRG_RXBUF != 0;
        let tracked = if apart { Inflight::NONE } else { inflight };
        let (gate, counters) = self.queue(&self.port.0.rx, self.port.sent(), pair)?;
        let mut slot = gate.enter();
        let resumed = RxQueue::resume(memory, acked, size, addresses, base, counters, journal, tracked);
        let (mut queue, resumed) = resumed.map_err(|error| error.to_string())?;
        notes::say(&self.name, 2 * pair, base, resumed);
        // Within the gate: a change of the tuning meanwhile is applied to the queue afterwards.
        let settings = self.handle.port().settings();
        queue.tune(settings.tuning);
        if let Some(sent) = self.port.received().get(pair) {
            queue.acknowledge(settings.interrupt_delay, sent.clone());
        }
        queue.limit(self.port.longest());
        if let Some(control) = &self.controlled().state {
            queue.control(control.filter(), control.support());
            queue.report(control.hash());
            queue.interrupts(control.interrupts(2 * pair as u16));
        }
        let (base, takes) = (queue.base(), queue.support());
        if let Some(kick) = &kick
            && let Err(error) = self.handle.watch_room(pair as u16, kick)
        {
            return Err(format!("cannot watch the kick descriptor: {error}"));
        }
        (slot.queue, slot.kick) = (Some(queue), kick);
        drop(slot);
        self.handle.room();
        self.count_queue(2 * pair, true);
        self.set_takes(takes);
        Ok(base)
    }

    fn start_tx(&self, pair: usize, ring: Ring) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base, journal, inflight, kick } = ring;
        let (gate, counters) = self.queue(&self.port.0.tx, self.port.received(), pair)?;
        let mut slot = gate.enter();
        let resumed = TxQueue::resume(memory, acked, size, addresses, base, counters, journal, inflight);
        let (mut queue, resumed) = resumed.map_err(|error| error.to_string())?;
        notes::say(&self.name, 2 * pair + 1, base, resumed);
        let settings = self.handle.port().settings();
        queue.tune(settings.tuning);
        queue.moderate(Coalesce::delayed(settings.interrupt_delay));
        if let Some(control) = &self.controlled().state {
            queue.interrupts(control.interrupts(2 * pair as u16 + 1));
        }
        queue.limit(self.port.longest());
        let base = queue.base();
        if let Some(kick) = &kick
            && let Err(error) = self.handle.watch(pair as u16, kick)
        {
            return Err(format!("cannot watch the kick descriptor: {error}"));
        }
        (slot.queue, slot.kick) = (Some(queue), kick);
        drop(slot);
        self.count_queue(2 * pair + 1, true);
        self.handle.start(pair as u16);
        if pair == 0 {
            self.status.runs(acked, base == RingFeatures::negotiated(acked).fresh_base());
        }
        Ok(base)
    }

    fn controlled(&self) -> MutexGuard<'_, Controlled> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_control(&self, index: usize, ring: Ring) -> Result<u32, String> {
        let mut controlled = self.controlled();
        controlled.state = Some(Control::new(ring.acked, self.config.mac, self.config.queue_pairs));
        self.set_pairs(&controlled);
        drop(controlled);
        self.apply();
        let vring = self.port.0.vrings.get(index).ok_or_else(|| format!("no queue {index}"))?;
        let (device, lines) = (self.clone(), &self.port.0.lines);
        let serve = move |chains: &mut Chains| device.serve(chains);
        let (queue, base) = QueueThread::start_limited(&self.name, index, ring, vring, lines, serve)?;
        self.controlled().queue = Some((index, queue));
        Ok(base)
    }

    /// Carries out a burst of commands (5.1.6.5). They take effect before they are acknowledged, and together: a change of the
    /// offloads concerns the worker and every other port.
    fn serve(&self, chains: &mut Chains) {
        let mut sooner = false;
        for index in 0..chains.list().len() {
            let Some(&chain) = chains.list().get(index) else { break };
            let mut bytes = vec![0; (chain.readable_len() as usize).min(control::MAX_COMMAND + 1)];
            let len = copy_some(chains.readable(&chain).iter().copied(), 0, &mut bytes);
            let done = self.command(bytes.get(..len).unwrap_or_default());
            sooner |= done == Some(Change::Interrupts);
            let reply = self.reply(done, chain.writable_len() as usize);
            let written = write_some(chains.writable(&chain).iter().copied(), &reply);
            if let Some(chain) = chains.list_mut().get_mut(index) {
                chain.written = written as u32;
            }
        }
        self.apply();
        if sooner {
            self.handle.settle();
        }
    }

    /// Returns the reply to a command that was carried out, or refused, for a buffer with this room.
    fn reply(&self, done: Option<Change>, room: usize) -> Vec<u8> {
        match done {
            Some(Change::Reply(parameters)) if parameters.len() < room => [&[control::OK][..], &parameters].concat(),
            Some(Change::Reply(_)) => {
                self.controlled().state.iter_mut().for_each(Control::unanswered);
                vec![control::ERR]
            }
            Some(Change::Statistics(statistics)) => [&[control::OK][..], &statistics].concat(),
            Some(_) => vec![control::OK],
            None => vec![control::ERR],
        }
    }

    /// Carries out a command; returns what has changed, or `None` if it is refused.
    fn command(&self, bytes: &[u8]) -> Option<Change> {
        let done = match &mut self.controlled().state {
            Some(control) => control.command(bytes, self).map(|change| (change, control.mac())),
            None => return None,
        };
        match done {
            Ok((change, mac)) => {
                if change == Change::Pairs {
                    self.set_pairs(&self.controlled());
                }
                if change == Change::Announced {
                    self.status.announced();
                }
                if change == Change::Mac {
                    say!(self.port.0.lines, Info, "{}: the guest has changed its address to {mac}", self.name);
                }
                Some(change)
            }
            Err(refused) => {
                say!(self.port.0.lines, Warn, "{}: refused a command on the control queue: {refused}", self.name);
                None
            }
        }
    }

    /// Applies what the driver has asked for to the queues that run.
    fn apply(&self) {
        // A copy: queues that start have entered their gates when they look at it.
        let Some(control) = self.controlled().state.clone() else { return };
        let mut runs = false;
        for (gate, vring) in self.port.0.rx.iter().zip((0..).step_by(2)) {
            if let Some(queue) = &mut gate.enter().queue {
                queue.control(control.filter(), control.support());
                queue.report(control.hash());
                queue.interrupts(control.interrupts(vring));
                runs = true;
            }
        }
        for (gate, vring) in self.port.0.tx.iter().zip((1..).step_by(2)) {
            if let Some(queue) = &mut gate.enter().queue {
                queue.interrupts(control.interrupts(vring));
            }
        }
        if runs {
            self.set_takes(control.support());
        }
    }

    fn queue<'a, Q, C: Clone>(
        &self,
        gates: &'a [Gate<Slot<Q>>],
        counters: &[C],
        pair: usize,
    ) -> Result<(&'a Gate<Slot<Q>>, C), String> {
        gates.get(pair).zip(counters.get(pair).cloned()).ok_or_else(|| format!("no queue pair {pair}"))
    }
}

/// Takes a queue out of its slot and returns the base at which it can resume. Its driver is notified, in case that was waiting.
fn stop<Q>(slot: &mut Slot<Q>, base: impl Fn(&mut Q) -> u32) -> u32 {
    let Some(mut queue) = slot.queue.take() else { return slot.vring.base() };
    let base = base(&mut queue);
    slot.vring.notify();
    base
}

impl<K: PortKind> Queues for NetDevice<K> {
    fn runs(&self, index: u16) -> bool {
        self.running().get(usize::from(index)).copied().unwrap_or_default()
    }

    fn counted(&self, index: u16) -> Snapshot {
        let (pair, port) = (usize::from(index / 2), &self.port.0);
        let counters = if index.is_multiple_of(2) { &port.rx_counters } else { &port.tx_counters };
        counters.get(pair).map_or_else(Snapshot::default, |counters| counters.snapshot())
    }
}

impl<K: PortKind> VhostDevice for NetDevice<K> {
    fn name(&self) -> &str {
        &self.name
    }

    fn offer(&self) -> u64 {
        // A guest that must keep its source address cannot change it.
        let fixed = self.handle.port().settings().limits.fixed;
        let mut never = if fixed { Features::CTRL_MAC_ADDR } else { Features::empty() };
        never.set(Features::MQ | Features::RSS, self.config.queue_pairs == 1);
        never.set(Features::SPEED_DUPLEX, self.config.speed.is_none());
        (self.offer - never).bits()
    }

    fn queue_num(&self) -> u64 {
        self.config.queue_pairs.into()
    }

    fn vrings(&self) -> &[Vring] {
        &self.port.0.vrings
    }

    fn config(&self) -> Vec<u8> {
        let mac = self.controlled().state.as_ref().map_or(self.config.mac, Control::mac);
        let (link_up, announce) = (self.status.is_up(), self.status.announces());
        self.status.seen(self.controlled().acked);
        Config { mac, link_up, announce, ..self.config }.bytes().to_vec()
    }

    fn backend_channel(&self) -> Option<&BackendChannel> {
        Some(&self.status.channel)
    }

    fn start(&self, index: usize, ring: Ring) -> Result<u32, String> {
        let pair = index / 2;
        let mut controlled = self.controlled();
        controlled.acked = ring.acked;
        if ring.acked & bits::NET_F_CTRL_VQ == 0 {
            controlled.state = None;
        }
        drop(controlled);
        match index % 2 {
            _ if self.is_control(index, ring.acked) => self.start_control(index, ring),
            0 => self.start_rx(pair, ring),
            _ => self.start_tx(pair, ring),
        }
    }

    fn stop(&self, index: usize) -> u32 {
        let (pair, port) = (index / 2, &self.port.0);
        // Not stopped within the lock, for which the queue's thread may wait.
        let control = self.controlled().queue.take_if(|(control, _)| *control == index);
        if let Some((_, queue)) = control {
            return queue.stop();
        }
        if index.is_multiple_of(2) {
            let base = port.rx.get(pair).map_or(0, |gate| {
                let mut slot = gate.enter();
                if let Some(kick) = slot.kick.take() {
                    self.handle.unwatch(&kick);
                }
                stop(&mut slot, RxQueue::stop)
            });
            self.handle.room();
            if self.count_queue(index, false) == 0 {
                self.set_takes(Support::empty());
            }
            return base;
        }
        let Some(gate) = port.tx.get(pair) else { return 0 };
        let mut slot = gate.enter();
        if let Some(kick) = slot.kick.take() {
            self.handle.unwatch(&kick);
        }
        self.handle.stop(pair as u16);
        let base = stop(&mut slot, TxQueue::stop);
        drop(slot);
        self.count_queue(index, false);
        base
    }

    fn count_fault(&self, index: Option<usize>) {
        self.port.count_fault(index);
    }

    fn reset(&self) {
        let mut controlled = self.controlled();
        (controlled.state, controlled.acked) = (None, 0);
        drop(controlled);
        self.status.announced();
    }

    fn disconnected(&self) {
        self.status.disconnected();
        self.handle.forget();
    }
}
