//! A guest's host sockets: connected when it requests that, watched, and served in turn.

use super::{Entry, Member, State};
use crate::{
    sys,
    vsock::{
        budget::Waiting,
        relay::{Target, Wire, is_reset},
    },
};
use log::Level;
use ringroad_vsock::{Key, MAX_PACKET};
use socket2::Socket;
use std::{
    cell::RefCell,
    io,
    net::Shutdown,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::Instant,
};
use vmm_sys_util::epoll::{ControlOperation, EpollEvent, EventSet};

/// Sockets served in a turn, and bytes moved.
const SOCKETS: usize = 64;
const BYTES: usize = 512 << 10;
/// Socket events taken in a turn.
const EVENTS: usize = 64;

fn is_readable(events: EventSet) -> bool {
    events.intersects(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR)
}

impl Member {
    pub(super) fn open(&mut self, key: Key, wire: Arc<Wire>, target: Option<(Target, Waiting)>, connected: bool) {
        let slot = wire.slot;
        let state = match target {
            Some((target, waiting)) => {
                self.opening.push_back((slot, waiting));
                State::Waiting { key, target }
            }
            None if connected => State::Relay { key },
            None => State::Connecting { key },
        };
        if !matches!(state, State::Waiting { .. }) {
            self.watch(&wire);
        }
        self.slots.insert(key, slot);
        self.entries.insert(slot, Entry { wire, state, hung_up: false, pending: EventSet::empty(), listed: false });
    }

    /// Watches a socket. A socket that cannot be watched is unusable. Returns whether it is watched.
    pub(super) fn watch(&self, wire: &Wire) -> bool {
        let Some(socket) = wire.socket() else { return false };
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        let added = self.epoll.ctl(ControlOperation::Add, socket.as_raw_fd(), EpollEvent::new(events, wire.slot));
        if let Err(error) = &added {
            self.guest.env.say(Level::Error, format_args!("cannot watch a host socket: {error}"));
        }
        added.is_ok()
    }

    /// Connects sockets that the guest has requested. Returns whether there were any.
    pub(super) fn connect(&mut self, until: Instant) -> bool {
        let mut any = false;
        while self.connect_at.is_none()
            && let Some(&(slot, _)) = self.opening.front()
        {
            let entry = self.entries.get_mut(&slot);
            let Some(Entry { wire, state: state @ State::Waiting { .. }, .. }) = entry else {
                // The request was abandoned.
                self.opening.pop_front();
                continue;
            };
            if self.guest.env.budget.connects.take().is_none() {
                self.connect_at = self.guest.env.budget.connects.until();
                break;
            }
            self.opening.pop_front();
            any = true;
            let State::Waiting { key, ref target } = *state else { continue };
            let result = wire.connect(target);
            *state = if let Ok(false) = result { State::Connecting { key } } else { State::Relay { key } };
            let wire = wire.clone();
            let there = result.is_ok() && self.watch(&wire);
            match result {
                Ok(false) if there => {}
                Ok(_) => self.complete_connect(&wire, key, there),
                Err(error) => {
                    self.guest
                        .env
                        .say(Level::Debug, format_args!("cannot connect to port {} of the host: {error}", key.port));
                    self.complete_connect(&wire, key, false);
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// Completes a pending connect.
    fn complete_connect(&self, wire: &Wire, key: Key, there: bool) {
        if !wire.has_ended() {
            self.guest.stack.finish_open(key, there);
        }
    }

    /// Takes events of its host sockets.
    pub(super) fn fetch(&mut self) {
        if !self.events {
            return;
        }
        let mut events = [EpollEvent::default(); EVENTS];
        let count = self.epoll.wait(0, &mut events).unwrap_or(0);
        // The worker watches this epoll edge-triggered: it is notified again only if all events were taken.
        self.events = count == EVENTS;
        for event in events.iter().take(count) {
            self.list(event.data(), event.event_set());
        }
    }

    /// Serves sockets with events, in order. Returns whether anything was moved.
    pub(super) fn serve(&mut self, until: Instant) -> bool {
        let (mut any, mut bytes) = (false, 0);
        for _ in 0..self.ready.len().min(SOCKETS) {
            let Some(slot) = self.ready.pop_front() else { break };
            let moved = self.serve_one(slot);
            any |= moved > 0;
            bytes += moved;
            if bytes >= BYTES || Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// Returns roughly how many bytes were moved.
    fn serve_one(&mut self, slot: u64) -> usize {
        let Some(entry) = self.entries.get_mut(&slot) else { return 0 };
        entry.listed = false;
        let events = std::mem::replace(&mut entry.pending, EventSet::empty());
        if let State::Unread = entry.state {
            self.close(slot);
            return 0;
        }
        if entry.wire.has_ended() {
            return 0;
        }
        entry.hung_up |= events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        match entry.state {
            State::Program => {
                self.read_request(slot);
                return 1;
            }
            State::Waiting { .. } | State::Unread => return 0,
            State::Connecting { key } => {
                let there = match entry.wire.socket().map(Socket::take_error) {
                    Some(Ok(None)) if events.contains(EventSet::OUT) => true,
                    Some(Ok(None)) => return 0,
                    _ => false,
                };
                entry.state = State::Relay { key };
                entry.hung_up = false;
                let wire = entry.wire.clone();
                self.complete_connect(&wire, key, there);
            }
            State::Relay { key } => {
                if events.contains(EventSet::OUT) {
                    self.guest.stack.drain(key);
                }
            }
        }
        if is_readable(events) { self.read(slot) } else { 0 }
    }

    /// Reads up to one packet from a socket, straight into the guest's buffers. Returns the number of bytes.
    fn read(&mut self, slot: u64) -> usize {
        let Some(Entry { wire, state: State::Relay { key }, hung_up, .. }) = self.entries.get(&slot) else { return 0 };
        let Some(socket) = wire.socket() else { return 0 };
        let (key, hung_up, stack) = (*key, *hung_up, &self.guest.stack);
        // An error of the socket, as opposed to one of the connection.
        let mut failed = None;
        let mut note = |result: io::Result<usize>| result.inspect_err(|error| failed = Some(error.kind()));
        let note = RefCell::new(&mut note);
        let sent = stack.send_from(
            key,
            MAX_PACKET,
            &mut |spans| note.borrow_mut()(sys::receive_spans(socket.as_fd(), spans)),
            &mut |bytes| note.borrow_mut()(sys::receive(socket.as_fd(), bytes)),
        );
        match (sent, failed) {
            (Ok(Some(count @ 1..)), _) => {
                self.list(slot, EventSet::IN);
                return count;
            }
            (_, Some(io::ErrorKind::Interrupted)) => self.list(slot, EventSet::IN),
            // No credit, no room, or no connection yet: a command follows when that changes. Nothing to read: an event
            // follows.
            (Ok(None), _) | (_, Some(io::ErrorKind::WouldBlock)) => {}
            (Err(error), None) if error.kind() == io::ErrorKind::NotConnected => {}
            (Err(_), None) => {
                if hung_up {
                    // Everything that the program sent before it hung up was read.
                    stack.shut_relay(key, true, Instant::now());
                }
                // The guest receives no more: a program that keeps writing gets an error.
                let _ = socket.shutdown(Shutdown::Read);
            }
            (Err(_), Some(error)) if is_reset(socket, error) => stack.reset_relay(key),
            // The program has sent everything, or has disconnected.
            (Ok(Some(0)), _) | (Err(_), Some(_)) => stack.shut_relay(key, hung_up || failed.is_some(), Instant::now()),
        }
        0
    }
}
