//! Connections with a host socket at this end; called by `host`.

use super::{PacketOwner, Stack};
use crate::{
    connection::Phase,
    side::Side,
    types::{Addr, Key, SocketType},
};
use ringroad_mem::Span;
use ringroad_wire::vsock_hdr::Op;
use std::{io, time::Instant};

impl<S: Side> Stack<S> {
    /// Requests a connection to a peer for a host socket. [`Host::room`](crate::Host::room) reports that it is connected, [`Relay::finish`](crate::Relay::finish) and
    /// [`Relay::close`](crate::Relay::close) report its end.
    ///
    /// # Errors
    /// `NotConnected` if the device is not running, `Unsupported` unless `kind` is stream and was negotiated, `QuotaExceeded` if
    /// the limit of connections or memory is reached.
    pub fn connect_relay(&self, peer: Addr, kind: SocketType, relay: S::Relay, now: Instant) -> io::Result<Key> {
        Ok(self.request_connection(peer, kind, Some(relay), now)?.key)
    }

    /// Returns whether a connection is open at both ends.
    pub fn is_open(&self, key: Key) -> bool {
        self.find(key).is_some_and(|conn| conn.lock().phase == Phase::Open)
    }

    /// Sends data of a relay straight into the peer's buffers, up to `most` bytes, by calling `read` at most once, with room for
    /// at least one byte. Returns `Ok(None)` if there is no credit or no room now ([`Host::room`](crate::Host::room) reports when there is), and
    /// `Ok(Some(0))` at the end of the data. If the ring cannot be used directly, `copy` reads the data into the outbox instead.
    ///
    /// # Errors
    /// `ConnectionReset` if there is no such connection, `BrokenPipe` if it was shut down, and what `read` or `copy` returns.
    pub fn send_from(
        &self,
        key: Key,
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
        copy: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<usize>> {
        let Some(conn) = self.find(key) else { return Err(io::ErrorKind::ConnectionReset.into()) };
        let _sending = conn.sending.lock();
        let len = {
            let mut inner = conn.lock();
            inner.may_send()?;
            let len = most.min(inner.credit.available()).min(self.room(&conn));
            inner.credit.reserve(len);
            len
        };
        if len == 0 {
            return Ok(None);
        }
        let owner = PacketOwner::Conn(conn.clone());
        let (result, effect) = self.sender.fill(&owner, conn.header(Op::Data), len, read, copy);
        let sent = result.as_ref().map_or(0, |&sent| sent.unwrap_or(0));
        if sent < len {
            conn.lock().credit.give_back(len - sent);
        }
        self.effect(effect);
        result
    }

    /// A relay can take more data now.
    pub fn drain(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            let verdict = conn.drain(&mut conn.lock());
            self.carry_out(&conn, verdict);
        }
    }

    /// A relay's program has shut down sending; `closed`: it has closed its socket.
    pub fn shut_relay(&self, key: Key, closed: bool, now: Instant) {
        if let Some(conn) = self.find(key) {
            self.shut(&conn, true, closed, now);
        }
    }

    /// A relay's program reads no more: sends the peer a shutdown.
    pub fn shut_relay_read(&self, key: Key, now: Instant) {
        if let Some(conn) = self.find(key) {
            self.shut(&conn, false, true, now);
        }
    }

    /// A relay's socket was reset.
    pub fn reset_relay(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            self.abort(&conn);
        }
    }
}
