//! Connections whose end is a socket of the host: what `host` does with them.

use super::*;

impl<S: Side> Stack<S> {
    /// Connects a socket of the host to a peer. [`Relay::finish`] and [`Relay::close`] tell its fate, and [`Host::room`] when it
    /// is connected.
    pub fn connect_relay(&self, peer: Addr, kind: Kind, relay: S::Relay) -> io::Result<Key> {
        Ok(self.request_connection(peer, kind, Some(relay))?.key)
    }

    /// Whether a connection is there, both ends.
    pub fn is_open(&self, key: Key) -> bool {
        self.find(key).is_some_and(|conn| conn.lock().phase == Phase::Open)
    }

    /// Sends what `read` gets from a connection's relay straight into the peer's buffers, up to `most` bytes. `read` is called
    /// once at most, with room for at least a byte. `Ok(None)`: not now, there is no credit or no room; [`Host::room`] tells
    /// when. `Ok(Some(0))`: `read` said that there is no more.
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
            self.may_send(&inner)?;
            let room = self.room(&conn);
            let len = most.min(conn.credit(&inner)).min(room);
            conn.promise(&mut inner, len);
            len
        };
        if len == 0 {
            return Ok(None);
        }
        let who = Who::Conn(conn.clone());
        let (result, effect) = self.sender.fill(&who, conn.header(Op::Data), len, read, copy);
        let sent = result.as_ref().map_or(0, |&sent| sent.unwrap_or(0));
        if sent < len {
            conn.take_back(&mut conn.lock(), len - sent);
        }
        self.effect(effect);
        result
    }

    /// A relay can take more now.
    pub fn drain(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            let verdict = conn.drain(&mut conn.lock());
            self.carry_out(&conn, verdict);
        }
    }

    /// A relay's program sends no more, or is gone altogether.
    pub fn shut_relay(&self, key: Key, gone: bool) {
        if let Some(conn) = self.find(key) {
            self.shut(&conn, true, gone);
        }
    }

    /// A relay's program reads no more: the peer is told.
    pub fn deafen_relay(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            self.shut(&conn, false, true);
        }
    }

    /// A relay's socket was reset.
    pub fn reset_relay(&self, key: Key) {
        if let Some(conn) = self.find(key) {
            self.abort(&conn);
        }
    }
}
