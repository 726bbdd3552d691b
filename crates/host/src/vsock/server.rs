//! A guest's vsock device (virtio 1.3, 5.10) behind its vhost-user socket. The program creates a [`VsockServer`] for each guest.

use super::{
    budget::{Budget, SocketReport},
    config::VsockConfig,
    guest::{EVENT, Env, Guest, RX, TX, VRINGS, Vrings},
    relay::HostSide,
    worker::{Control, Token, VsockWorker},
};
use crate::{
    event_loop::EventLoop,
    notes,
    socket::{Place, bind},
    sys,
    vhost_user::{Kick, Ring, Socket, SocketConfig, SocketError, VhostDevice, Vring},
};
use parking_lot::Mutex;
use ringroad_ring::bits;
use ringroad_vsock::{Config, Events, Hub, RxQueue, Stack, TxQueue, socket_types};
use std::{
    os::{fd::AsFd, unix::net::UnixListener},
    sync::Arc,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Turns in which resets are sent to a guest whose device is removed.
const LAST_TURNS: usize = 64;

/// A running vsock device. Dropped, it disconnects its frontend and removes its sockets.
pub struct VsockServer {
    guest: Arc<Guest>,
    hub: Arc<Hub<HostSide>>,
    events: Arc<EventLoop<Control>>,
    socket: Option<Socket>,
    host: Mutex<Option<Place>>,
}

impl std::fmt::Debug for VsockServer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("VsockServer").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl VsockServer {
    /// Creates the sockets and adds the device to the worker.
    ///
    /// # Errors
    /// A socket cannot be created or its owner and mode not be set, or the system has no more threads or descriptors.
    pub fn start(config: VsockConfig, worker: &VsockWorker) -> Result<VsockServer, SocketError> {
        let name = &*config.name;
        let failed = |error| SocketError::Start { name: name.to_owned(), error };
        let (listener, host) = listen(&config)?.unzip();
        let budget = Budget::new(&config, worker.total.clone());
        let env = Env::new(&config, Arc::new(worker.mailbox()), budget).map_err(failed)?;
        let attention = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let guest = Arc::new(Guest::new(&config, env, attention.try_clone().map_err(failed)?));
        if !config.groups.is_empty() {
            worker.hub.join(&guest.stack, config.groups.clone());
        }
        worker.add(guest.clone(), listener).map_err(failed)?;
        let (hub, events) = (worker.hub.clone(), worker.events.clone());
        let mut server =
            VsockServer { guest: guest.clone(), hub, events: events.clone(), socket: None, host: Mutex::new(host) };
        let offer = config.features.bits();
        let device = || Ok(VsockDevice { guest, events, offer, kicks: Arc::default() });
        let VsockConfig { role, limits, access, .. } = config;
        let at = SocketConfig { name, path: &config.socket, role, limits, access };
        server.socket = Some(Socket::start(at, attention, device)?);
        Ok(server)
    }

    /// Changes the settings that do not concern the guest: connection settings, groups, destinations, limits. The rest of the
    /// configuration is ignored.
    ///
    /// # Errors
    /// Owner or mode of a socket cannot be changed: groups and destinations are as before. Or the socket for programs cannot be
    /// created: the old one stays, everything else is in effect.
    pub fn set(&self, config: &VsockConfig) -> Result<(), SocketError> {
        let stack = &self.guest.stack;
        let Env { name, mail, routes, budget, .. } = &*self.guest.env;
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
        let (listener, host) = listen(config)?.unzip();
        routes.lock().host.clone_from(&config.host);
        let _ = self.events.ask(|reply| Control::Listen(mail.guest, listener, reply));
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
        self.guest.env.budget.report()
    }
}

impl Drop for VsockServer {
    fn drop(&mut self) {
        let guest = &*self.guest;
        // One by one, then by a transport reset, for connections with other guests and for resets that found no room in the
        // ring.
        guest.stack.close();
        for _ in 0..LAST_TURNS {
            let before = guest.stack.report().ways.queued;
            if !guest.stack.is_waiting()
                || !take_turn(&self.events, guest)
                || guest.stack.report().ways.queued == before
            {
                break;
            }
        }
        guest.vrings.lock().stale = true;
        guest.send_transport_reset();
        self.socket = None;
        guest.stack.reset();
        let _ = self.events.ask(|reply| Control::Remove(guest.env.mail.guest, reply));
    }
}

/// Creates the socket that programs connect to, if there is to be one.
fn listen(config: &VsockConfig) -> Result<Option<(UnixListener, Place)>, SocketError> {
    let Some(path) = &config.host else { return Ok(None) };
    let (listener, place) = bind(&config.name, path, config.access)?;
    sys::refuse_descriptors(listener.as_fd());
    Ok(Some((listener, place)))
}

/// Has the worker process packets of a guest, as many as fit into a turn, and waits for that. The caller's thread does not do it
/// itself: the worker, and with it all other guests, would wait for the same locks. Returns `false` if there was no turn: the
/// worker has ended, or a bug has stopped the device.
fn take_turn(events: &EventLoop<Control>, guest: &Guest) -> bool {
    events.ask(|reply| Control::Turn(guest.env.mail.guest, reply)).is_ok()
}

/// The device behind the vhost-user socket.
#[derive(Clone)]
struct VsockDevice {
    guest: Arc<Guest>,
    events: Arc<EventLoop<Control>>,
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
        &self.guest.env.name
    }

    fn offer(&self) -> u64 {
        self.offer
    }

    fn vrings(&self) -> &[Vring] {
        &self.guest.env.notifiers.vrings
    }

    fn config(&self) -> Vec<u8> {
        Config { guest_cid: self.guest.cid }.bytes().to_vec()
    }

    fn start(&self, index: usize, ring: Ring) -> Result<u32, String> {
        let Ring { memory, acked, size, addresses, base, journal, inflight, kick } = ring;
        let guest = &*self.guest;
        let mut vrings = guest.vrings.lock();
        if let Some(kick) = kick.as_ref().filter(|_| index != EVENT) {
            let watched = self.events.watch(kick, Token::Kick(guest.env.mail.guest).to_data());
            watched.map_err(|error| format!("cannot watch the kick descriptor: {error}; expected an eventfd"))?;
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
                self.events.unwatch(kick);
            }
            error.to_string()
        })?;
        notes::say(&guest.env.name, index, base, how);
        if index == TX && !resumed {
            vrings.stale = !is_fresh(started, acked);
        }
        if guest.is_started() {
            // Not before: the start of the transmit queue resets the connections that another guest has requested by then.
            guest.stack.set_socket_types(socket_types(acked));
        }
        if index == TX {
            guest.env.notifiers.kick.lock().clone_from(&kick);
        }
        if let Some(place) = self.kicks.lock().get_mut(index) {
            *place = kick.filter(|_| index != EVENT);
        }
        drop(vrings);
        guest.send_transport_reset();
        guest.env.mail.request_work();
        Ok(started)
    }

    fn stop(&self, index: usize) -> u32 {
        let guest = &*self.guest;
        if let Some(kick) = self.kicks.lock().get_mut(index).and_then(Option::take) {
            self.events.unwatch(&kick);
        }
        if index == TX {
            // Packets sent so far are processed, as many as fit into a turn. What is left stays in the ring.
            take_turn(&self.events, guest);
            *guest.env.notifiers.kick.lock() = None;
            guest.env.notifiers.unwait.write(1).unwrap_or_default();
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
