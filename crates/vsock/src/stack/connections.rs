//! The connections of a stack: opening, sending, timeouts, closing.

use super::{Backlog, DUE, FIRST_PORT, MESSAGES, PacketOwner, SWEPT, Slot, Stack, Table};
use crate::{
    connection::{CloseReason, Conn, Phase, Verdict},
    payload::Payload,
    side::{OpenResult, Side},
    types::{Addr, Key, MAX_PACKET, SocketType},
};
use parking_lot::Mutex;
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
    task::Waker,
    time::Instant,
};

impl<R> Table<R> {
    fn insert(&mut self, conn: &Arc<Conn<R>>) {
        self.conns.insert(conn.key, Slot { conn: conn.clone(), timer: None });
    }
}

impl<S: Side> Stack<S> {
    pub(super) fn remove(&self, conn: &Arc<Conn<S::Relay>>) {
        {
            let mut table = self.table.lock();
            if table.conns.get(&conn.key).is_some_and(|there| Arc::ptr_eq(&there.conn, conn))
                && let Some(Slot { timer: Some(timer), .. }) = table.conns.remove(&conn.key)
            {
                table.deadlines.remove(&timer);
            }
        }
        let _ = self.sender.forget(&PacketOwner::Conn(conn.clone()));
    }

    pub(super) fn request(&self, key: Key, kind: SocketType, header: &VsockHdr) {
        if !self.admits_request() {
            return self.refuse(header);
        }
        let listener = {
            let table = self.table.lock();
            if table.conns.len() >= self.settings().connections {
                drop(table);
                return self.refuse(header);
            }
            table.listeners.get(&(key.port, kind)).cloned()
        };
        // Host sockets carry streams only.
        if listener.is_none() && kind == SocketType::SeqPacket {
            return self.refuse(header);
        }
        let Some(opened) = self.account.open() else { return self.refuse(header) };
        let phase = if listener.is_some() { Phase::Open } else { Phase::Accepting };
        let conn = Arc::new(Conn::new(self.cid, key, kind, self.settings().buffer, phase, opened));
        // The request carries the peer's credit.
        conn.lock().credit.update(header);
        if let Some(listener) = listener {
            let mut waiting = listener.waiting.lock();
            if waiting.len() >= self.settings().backlog {
                drop(waiting);
                return self.refuse(header);
            }
            self.table.lock().insert(&conn);
            self.opened(&conn);
            waiting.push_back(conn);
            drop(waiting);
            return listener.waker.wake_by_ref();
        }
        self.table.lock().insert(&conn);
        match self.host.open(key, kind) {
            OpenResult::Connected(relay) => {
                {
                    let mut inner = conn.lock();
                    inner.relay = Some(relay);
                    inner.phase = Phase::Open;
                }
                self.opened(&conn);
                self.host.room(key);
            }
            OpenResult::Pending(relay, now) => {
                conn.lock().relay = Some(relay);
                self.set_deadline(&conn, now + self.settings().connect);
            }
            OpenResult::Refused => {
                self.remove(&conn);
                self.refuse(header);
            }
        }
    }

    pub(super) fn opened(&self, conn: &Arc<Conn<S::Relay>>) {
        self.counters.opened.fetch_add(1, Ordering::Relaxed);
        self.send_control(conn, Op::Response);
    }

    pub(super) fn refuse(&self, header: &VsockHdr) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.answer(header, Op::Reset);
    }

    /// Completes an [`OpenResult::Pending`]: the connection is accepted if `connected`, else refused.
    pub fn finish_open(&self, key: Key, connected: bool) {
        let Some(conn) = self.find(key) else { return };
        let mut inner = conn.lock();
        if inner.phase != Phase::Accepting {
            return;
        }
        if connected {
            (inner.phase, inner.deadline) = (Phase::Open, None);
            drop(inner);
            self.opened(&conn);
            return self.host.room(key);
        }
        let verdict = conn.end(&mut inner, CloseReason::Refused);
        drop(inner);
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.carry_out(&conn, Verdict { reply: Some(Op::Reset), ..verdict });
    }

    pub(crate) fn find(&self, key: Key) -> Option<Arc<Conn<S::Relay>>> {
        self.table.lock().conns.get(&key).map(|slot| slot.conn.clone())
    }

    /// Sets a connection's deadline; an earlier one is replaced.
    fn set_deadline(&self, conn: &Arc<Conn<S::Relay>>, until: Instant) {
        conn.lock().deadline = Some(until);
        let table = &mut *self.table.lock();
        table.serial += 1;
        let timer = (until, table.serial);
        // Skip a connection that has left the table.
        if let Some(slot) = table.conns.get_mut(&conn.key)
            && Arc::ptr_eq(&slot.conn, conn)
        {
            if let Some(old) = slot.timer.replace(timer) {
                table.deadlines.remove(&old);
            }
            table.deadlines.insert(timer, conn.key);
        }
    }

    /// Returns when [`Stack::tick`] should be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        let held = self.incoming.lock().held.due;
        let first = self.table.lock().deadlines.first_key_value().map(|(&(time, _), _)| time);
        [held, first].into_iter().flatten().min()
    }

    /// Closes connections whose deadline has passed, up to a limit per call. Returns `true` if more are due.
    pub fn tick(&self, now: Instant) -> bool {
        self.settle(now);
        let mut due = Vec::new();
        let more = {
            let table = &mut *self.table.lock();
            loop {
                match table.deadlines.first_entry() {
                    Some(entry) if entry.key().0 > now => break false,
                    Some(_) if due.len() >= DUE => break true,
                    Some(entry) => {
                        if let Some(slot) = table.conns.get_mut(&entry.remove()) {
                            slot.timer = None;
                            due.push(slot.conn.clone());
                        }
                    }
                    None => break false,
                }
            }
        };
        for conn in &due {
            let mut inner = conn.lock();
            if inner.deadline.is_none_or(|deadline| deadline > now) {
                continue;
            }
            let how = if inner.phase == Phase::Open { CloseReason::Done } else { CloseReason::TimedOut };
            let verdict = conn.end(&mut inner, how);
            drop(inner);
            self.carry_out(conn, Verdict { reply: Some(Op::Reset), ..verdict });
        }
        more
    }

    /// To be called about once a second while there is activity: releases memory of idle connections.
    /// Checks a limited number of connections per call, the others in later calls.
    pub fn sweep(&self) {
        let mut holders: Vec<_> = {
            let table = &mut *self.table.lock();
            let count = table.holders.len().min(SWEPT);
            table.holders.drain(..count).collect()
        };
        holders.retain(|conn| {
            let Some(conn) = conn.upgrade() else { return false };
            let mut inner = conn.lock();
            if std::mem::replace(&mut inner.idle, true) {
                inner.inbox.release_unused();
            }
            inner.listed = inner.inbox.has_memory();
            inner.listed
        });
        self.table.lock().holders.extend(holders);
    }

    /// Registers a connection whose inbox holds memory, for [`Stack::sweep`].
    pub(super) fn hold(&self, conn: &Arc<Conn<S::Relay>>) {
        let table = &mut *self.table.lock();
        if table.holders.len() > 2 * table.conns.len() + 1024 {
            // Drop entries of closed connections.
            table.holders.retain(|conn| conn.strong_count() > 0);
        }
        table.holders.push_back(Arc::downgrade(conn));
    }

    /// Sends a connection request to a peer; the connection's phase shows the outcome. `relay`: the host socket that requested
    /// it, if any.
    pub(crate) fn request_connection(
        &self,
        peer: Addr,
        kind: SocketType,
        relay: Option<S::Relay>,
        now: Instant,
    ) -> io::Result<Arc<Conn<S::Relay>>> {
        if !self.is_running() {
            return Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "the other end of the vsock device is not connected",
            ));
        }
        if !self.has(kind) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this socket type was not negotiated with the peer",
            ));
        }
        if relay.is_some() && kind != SocketType::Stream {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "host sockets support streams only"));
        }
        let conn = {
            let mut table = self.table.lock();
            if table.conns.len() >= self.settings().connections {
                let why = format!("limit of {} connections reached", table.conns.len());
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
            }
            let Some(opened) = self.account.open() else {
                let why = "memory limit for the peer reached";
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
            };
            // There are fewer connections than ports, so one is free.
            let port = loop {
                let port = table.next_port;
                table.next_port = if port >= u32::MAX - 1 { FIRST_PORT } else { port + 1 };
                let key = Key { port, peer };
                if !table.conns.contains_key(&key) && !table.listeners.keys().any(|&(taken, _)| taken == port) {
                    break port;
                }
            };
            let key = Key { port, peer };
            let conn = Arc::new(Conn::new(self.cid, key, kind, self.settings().buffer, Phase::Connecting, opened));
            conn.lock().relay = relay;
            table.insert(&conn);
            conn
        };
        self.counters.opened.fetch_add(1, Ordering::Relaxed);
        self.set_deadline(&conn, now + self.settings().connect);
        self.send_control(&conn, Op::Request);
        // The worker has to take the new deadline into account.
        self.host.wake();
        Ok(conn)
    }

    /// Adds a listener, which `waker` wakes for each connection to accept.
    pub(crate) fn add_listener(&self, port: u32, kind: SocketType, waker: Waker) -> io::Result<Arc<Backlog<S::Relay>>> {
        let mut table = self.table.lock();
        if table.listeners.contains_key(&(port, kind)) {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("port {port} already has a listener")));
        }
        let backlog = Arc::new(Backlog { waiting: Mutex::default(), waker });
        table.listeners.insert((port, kind), backlog.clone());
        Ok(backlog)
    }

    pub(crate) fn remove_listener(&self, port: u32, kind: SocketType, backlog: &Backlog<S::Relay>) {
        self.table.lock().listeners.remove(&(port, kind));
        let waiting = std::mem::take(&mut *backlog.waiting.lock());
        waiting.iter().for_each(|conn| self.abort(conn));
    }

    /// Closes a connection at once with a reset.
    pub(crate) fn abort(&self, conn: &Arc<Conn<S::Relay>>) {
        let verdict = conn.end(&mut conn.lock(), CloseReason::Reset);
        if verdict.closed {
            self.carry_out(conn, Verdict { reply: Some(Op::Reset), ..verdict });
        }
    }

    /// Shuts down sending, receiving or both.
    pub(crate) fn shut(&self, conn: &Arc<Conn<S::Relay>>, sending: bool, receiving: bool, now: Instant) {
        let mut inner = conn.lock();
        match inner.phase {
            Phase::Open => {}
            Phase::Closed(_) => return,
            Phase::Connecting | Phase::Accepting => {
                drop(inner);
                if sending && receiving {
                    self.abort(conn);
                }
                return;
            }
        }
        let news = sending && !inner.send_shut || receiving && !inner.recv_shut;
        inner.send_shut |= sending;
        inner.recv_shut |= receiving;
        let flags = if inner.recv_shut { wire::SHUTDOWN_RECEIVE } else { 0 }
            | if inner.send_shut { wire::SHUTDOWN_SEND } else { 0 };
        let both = inner.send_shut && inner.recv_shut;
        if inner.recv_shut {
            inner.inbox.clear();
        }
        let verdict = conn.close_if_done(&mut inner);
        drop(inner);
        // A blocked sender gives up.
        conn.wake();
        if verdict.closed {
            return self.carry_out(conn, verdict);
        }
        if news {
            let header = VsockHdr { flags, ..conn.header(Op::Shutdown) };
            let owner = PacketOwner::Conn(conn.clone());
            let effect = {
                // The shutdown follows all data sent before.
                let _sending = conn.sending.lock();
                self.sender.send(&owner, header, &mut Payload::empty(), 0).1
            };
            if both {
                self.set_deadline(conn, now + self.settings().linger);
                self.host.wake();
            }
            self.effect(effect);
        }
    }

    /// Sends bytes of a program, within the credit that there is; up to `room` of them may wait in the outbox. Returns how many were
    /// accepted. `flags` go with the last byte. The caller holds the connection's `sending` lock.
    pub(crate) fn send(&self, conn: &Arc<Conn<S::Relay>>, bytes: &[u8], flags: u32, room: usize) -> io::Result<usize> {
        let len = {
            let mut inner = conn.lock();
            inner.may_send()?;
            let len = bytes.len().min(inner.credit.available());
            inner.credit.reserve(len);
            len
        };
        if len == 0 && !bytes.is_empty() {
            return Ok(0);
        }
        let flags = if len == bytes.len() { flags } else { 0 };
        let header = VsockHdr { flags, ..conn.header(Op::Data) };
        let owner = PacketOwner::Conn(conn.clone());
        let (sent, effect) =
            self.sender.send(&owner, header, &mut Payload::bytes(bytes.get(..len).unwrap_or(bytes)), room);
        if sent < len {
            conn.lock().credit.give_back(len - sent);
        }
        self.effect(effect);
        Ok(sent)
    }

    /// Returns how many more bytes of a connection may wait in the outbox.
    pub(crate) fn room(&self, conn: &Conn<S::Relay>) -> usize {
        let most = (conn.window.size() as usize).max(MAX_PACKET).min(conn.allowance());
        most.saturating_sub(conn.waiting())
    }

    /// Returns whether one more message may wait in the outbox, however short.
    pub(crate) fn has_room(&self, conn: &Arc<Conn<S::Relay>>) -> bool {
        self.sender.packets(&PacketOwner::Conn(conn.clone())) < MESSAGES
    }
}
