//! Host programs that connect to a guest: accepted, and turned away if they send no valid CONNECT line.

use super::{ACCEPTS, Entry, Member, State};
use crate::{
    sys,
    vsock::{
        programs::{LINE, parse},
        relay::{HostRelay, Wire},
    },
};
use log::Level;
use ringroad_vsock::{Addr, SocketType};
use socket2::Socket;
use std::{
    fmt::{Arguments, Display},
    io,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use vmm_sys_util::epoll::EventSet;

/// Pause after a program could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

impl Member {
    /// Accepts programs that have connected to its socket. Returns whether there were any.
    pub(super) fn accept(&mut self, until: Instant) -> bool {
        let mut any = false;
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listener.as_ref().filter(|_| self.accepts_pending && self.accept_at.is_none())
            else {
                break;
            };
            let Some(place) = self.guest.env.budget.admit() else {
                match self.programs.oldest() {
                    Some(slot) => self.turn_away(slot, format_args!("the guest has no sockets left")),
                    None => self.pause(&"the guest has no sockets left"),
                }
                continue;
            };
            let socket = match listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    if error.kind() == io::ErrorKind::WouldBlock {
                        self.accepts_pending = false;
                    } else {
                        self.pause(&error);
                    }
                    break;
                }
            };
            any = true;
            if socket.set_nonblocking(true).is_ok() {
                let process = sys::peer_process(socket.as_fd());
                let wire = Arc::new(Wire::accepted(&self.guest.env.mail, place, Socket::from(socket)));
                self.add_program(wire, process);
            }
            if Instant::now() >= until {
                break;
            }
        }
        any
    }

    /// Adds a program that has connected. One that has sent its line already is served at once; otherwise it may displace
    /// another.
    fn add_program(&mut self, wire: Arc<Wire>, process: i32) {
        if !self.watch(&wire) {
            return;
        }
        let slot = wire.slot;
        let entry = Entry { wire, state: State::Program, hung_up: false, pending: EventSet::empty(), listed: false };
        self.entries.insert(slot, entry);
        self.programs.insert(slot, process, Instant::now());
        self.read_request(slot);
        if let Some(oldest) = self.programs.surplus() {
            self.turn_away(
                oldest,
                format_args!("it has not sent \"CONNECT <port>\", and too many programs are waiting"),
            );
        }
    }

    /// Stops accepting for a while.
    fn pause(&mut self, why: &dyn Display) {
        self.accept_at = Some(Instant::now() + PAUSE);
        let path = self.guest.env.host_path();
        self.guest.env.say(Level::Warn, format_args!("cannot accept a program on {path}: {why}; retrying"));
    }

    /// Reads the CONNECT line of a program, if it has arrived.
    pub(super) fn read_request(&mut self, slot: u64) {
        let Some(entry) = self.entries.get(&slot) else { return };
        let Some(socket) = entry.wire.socket() else { return };
        let mut line = [0; LINE];
        let (port, len) = match sys::peek(socket.as_fd(), &mut line) {
            Ok(0) => return self.turn_away(slot, format_args!("it disconnected before sending \"CONNECT <port>\"")),
            Ok(len) => {
                let text = line.get(..len).unwrap_or_default();
                match parse(text) {
                    None => return,
                    Some(Ok(found)) => found,
                    Some(Err(expected)) => {
                        let found = String::from_utf8_lossy(text);
                        let found = found.escape_debug();
                        return self.turn_away(slot, format_args!("{expected}, found \"{found}\""));
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => return self.turn_away(slot, format_args!("{error}")),
        };
        let _ = sys::receive(socket.as_fd(), line.get_mut(..len).unwrap_or_default());
        let relay = HostRelay { wire: entry.wire.clone(), awaits_ok: true };
        let peer = Addr { cid: self.guest.cid, port };
        match self.guest.stack.connect_relay(peer, SocketType::Stream, relay, Instant::now()) {
            Ok(key) => {
                self.programs.remove(slot);
                self.slots.insert(key, slot);
                if let Some(entry) = self.entries.get_mut(&slot) {
                    entry.state = State::Relay { key };
                }
                self.activate();
            }
            Err(error) => self.turn_away(slot, format_args!("port {port}: {error}")),
        }
    }

    pub(super) fn turn_away(&mut self, slot: u64, why: Arguments<'_>) {
        if self.programs.remove(slot) {
            self.entries.remove(&slot);
            self.guest.env.budget.turned_away.fetch_add(1, Ordering::Relaxed);
            let path = self.guest.env.host_path();
            self.guest.env.say(Level::Warn, format_args!("a program on {path} was turned away: {why}"));
        }
    }
}
