//! The connections of a stack: how they begin, what they send, when they are given up, how they end.

use super::*;

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
        let _ = self.sender.forget(&Who::Conn(conn.clone()));
    }

    pub(super) fn request(&self, key: Key, kind: Kind, header: &VsockHdr) {
        if !self.may_ask() {
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
        // A socket of the host has no messages.
        if listener.is_none() && kind == Kind::SeqPacket {
            return self.refuse(header);
        }
        let Some(opened) = self.account.open() else { return self.refuse(header) };
        let phase = if listener.is_some() { Phase::Open } else { Phase::Accepting };
        let conn = Arc::new(Conn::new(self.cid, key, kind, self.settings().buffer, phase, opened));
        // What the request says of the peer's room.
        conn.announce(&mut conn.lock(), header);
        if let Some(listener) = listener {
            let mut waiting = listener.waiting.lock();
            if waiting.len() >= self.settings().backlog {
                drop(waiting);
                return self.refuse(header);
            }
            self.table.lock().insert(&conn);
            self.opened(&conn);
            waiting.push_back(conn);
            listener.changed.notify_one();
            return;
        }
        self.table.lock().insert(&conn);
        match self.host.open(key, kind) {
            Door::Open(relay) => {
                {
                    let mut inner = conn.lock();
                    inner.relay = Some(relay);
                    inner.phase = Phase::Open;
                }
                self.opened(&conn);
                self.host.room(key);
            }
            Door::Later(relay) => {
                conn.lock().relay = Some(relay);
                self.give_time(&conn, self.settings().connect);
            }
            Door::Shut => {
                self.remove(&conn);
                self.refuse(header);
            }
        }
    }

    pub(super) fn opened(&self, conn: &Arc<Conn<S::Relay>>) {
        self.counters.opened.fetch_add(1, Ordering::Relaxed);
        self.send_control(conn, Op::Response);
    }

    /// Whether the peer may ask for a connection now.
    pub(crate) fn may_ask(&self) -> bool {
        let may = self.host.admit();
        if !may {
            self.counters.limited.fetch_add(1, Ordering::Relaxed);
        }
        may
    }

    pub(super) fn refuse(&self, header: &VsockHdr) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.answer(header, Op::Reset);
    }

    /// A connection that was opened [`Door::Later`] is there now, or will never be.
    pub fn settle(&self, key: Key, there: bool) {
        let Some(conn) = self.find(key) else { return };
        let mut inner = conn.lock();
        if inner.phase != Phase::Accepting {
            return;
        }
        if there {
            (inner.phase, inner.deadline) = (Phase::Open, None);
            drop(inner);
            self.opened(&conn);
            return self.host.room(key);
        }
        let verdict = conn.end(&mut inner, Over::Refused);
        drop(inner);
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.carry_out(&conn, Verdict { reply: Some(Op::Reset), ..verdict });
    }

    pub(crate) fn find(&self, key: Key) -> Option<Arc<Conn<S::Relay>>> {
        self.table.lock().conns.get(&key).map(|slot| slot.conn.clone())
    }

    /// Something has to happen to a connection until then.
    pub(super) fn give_time(&self, conn: &Arc<Conn<S::Relay>>, time: Duration) {
        let until = Instant::now() + time;
        conn.lock().deadline = Some(until);
        let table = &mut *self.table.lock();
        table.serial += 1;
        let timer = (until, table.serial);
        // One that is over already has none.
        if let Some(slot) = table.conns.get_mut(&conn.key)
            && Arc::ptr_eq(&slot.conn, conn)
        {
            if let Some(old) = slot.timer.replace(timer) {
                table.deadlines.remove(&old);
            }
            table.deadlines.insert(timer, conn.key);
        }
    }

    /// When [`Stack::tick`] should be called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.table.lock().deadlines.first_key_value().map(|(&(time, _), _)| time)
    }

    /// Gives up what has taken too long, so many at once. `true`: there is more, for the next turn.
    pub fn tick(&self, now: Instant) -> bool {
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
            let how = if inner.phase == Phase::Open { Over::Done } else { Over::TimedOut };
            let verdict = conn.end(&mut inner, how);
            drop(inner);
            self.carry_out(conn, Verdict { reply: Some(Op::Reset), ..verdict });
        }
        more
    }

    /// Once a second or so, if anything has happened: lets memory go that connections do not need now, and allows new log
    /// lines. Looks at so many connections at once; at the others the next time.
    pub fn sweep(&self) {
        self.lines.store(LINES, Ordering::Relaxed);
        let mut holders: Vec<_> = {
            let table = &mut *self.table.lock();
            let count = table.holders.len().min(SWEPT);
            table.holders.drain(..count).collect()
        };
        holders.retain(|conn| {
            let Some(conn) = conn.upgrade() else { return false };
            let mut inner = conn.lock();
            if std::mem::replace(&mut inner.resting, true) {
                inner.inbox.rest();
            }
            inner.listed = inner.inbox.has_memory();
            inner.listed
        });
        self.table.lock().holders.extend(holders);
    }

    /// A connection has memory for what nobody has read yet.
    pub(super) fn hold(&self, conn: &Arc<Conn<S::Relay>>) {
        let table = &mut *self.table.lock();
        if table.holders.len() > 2 * table.conns.len() + 1024 {
            // Of connections that are over.
            table.holders.retain(|conn| conn.strong_count() > 0);
        }
        table.holders.push_back(Arc::downgrade(conn));
    }

    /// Asks a peer for a connection; its phase tells what came of it. `relay`: the socket of the host that it is for.
    pub(crate) fn request_connection(
        &self,
        peer: Addr,
        kind: Kind,
        relay: Option<S::Relay>,
    ) -> io::Result<Arc<Conn<S::Relay>>> {
        if !self.is_running() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the other end of the vsock device is not there"));
        }
        if !self.has(kind) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the peer does not have this kind of socket"));
        }
        if relay.is_some() && kind != Kind::Stream {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "a socket of the host carries a stream only"));
        }
        let conn = {
            let mut table = self.table.lock();
            if table.conns.len() >= self.settings().connections {
                let why = format!("there are {} connections already", table.conns.len());
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
            }
            let Some(opened) = self.account.open() else {
                let why = "what may be kept for the peer is in use";
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
            };
            // As there are fewer connections than ports, one is free.
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
        self.give_time(&conn, self.settings().connect);
        self.send_control(&conn, Op::Request);
        // The worker has a new deadline.
        self.host.wake();
        Ok(conn)
    }

    pub(crate) fn add_listener(&self, port: u32, kind: Kind) -> io::Result<Arc<Backlog<S::Relay>>> {
        let mut table = self.table.lock();
        if table.listeners.contains_key(&(port, kind)) {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("port {port} has a listener already")));
        }
        let backlog = Arc::new(Backlog { waiting: Mutex::default(), changed: Condvar::new() });
        table.listeners.insert((port, kind), backlog.clone());
        Ok(backlog)
    }

    pub(crate) fn remove_listener(&self, port: u32, kind: Kind, backlog: &Backlog<S::Relay>) {
        self.table.lock().listeners.remove(&(port, kind));
        let waiting = std::mem::take(&mut *backlog.waiting.lock());
        waiting.iter().for_each(|conn| self.abort(conn));
    }

    /// Ends a connection at once.
    pub(crate) fn abort(&self, conn: &Arc<Conn<S::Relay>>) {
        let verdict = conn.end(&mut conn.lock(), Over::Reset);
        if verdict.over {
            self.carry_out(conn, Verdict { reply: Some(Op::Reset), ..verdict });
        }
    }

    /// We send no more, or receive no more, or neither.
    pub(crate) fn shut(&self, conn: &Arc<Conn<S::Relay>>, sending: bool, receiving: bool) {
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
        let news = sending && !inner.done || receiving && !inner.deaf;
        inner.done |= sending;
        inner.deaf |= receiving;
        let flags =
            if inner.deaf { wire::SHUTDOWN_RECEIVE } else { 0 } | if inner.done { wire::SHUTDOWN_SEND } else { 0 };
        let both = inner.done && inner.deaf;
        if inner.deaf {
            inner.inbox.clear();
        }
        let verdict = conn.maybe_over(&mut inner);
        // Whoever is in the middle of sending gives up now.
        conn.wake(&inner);
        drop(inner);
        if verdict.over {
            return self.carry_out(conn, verdict);
        }
        if news {
            let header = VsockHdr { flags, ..conn.header(Op::Shutdown) };
            let who = Who::Conn(conn.clone());
            let effect = {
                // After what was sent before.
                let _sending = conn.sending.lock();
                self.sender.send(&who, header, &mut Payload::empty(), 0).1
            };
            if both {
                self.give_time(conn, self.settings().linger);
                self.host.wake();
            }
            self.effect(effect);
        }
    }

    /// Sends bytes of a program, as many as there is credit for, of which `room` may wait in the outbox; says how many.
    /// `flags` go with the last of them. The caller holds the connection's `sending`.
    pub(crate) fn send(&self, conn: &Arc<Conn<S::Relay>>, bytes: &[u8], flags: u32, room: usize) -> io::Result<usize> {
        let len = {
            let mut inner = conn.lock();
            self.may_send(&inner)?;
            let len = bytes.len().min(conn.credit(&inner));
            conn.promise(&mut inner, len);
            len
        };
        if len == 0 && !bytes.is_empty() {
            return Ok(0);
        }
        let flags = if len == bytes.len() { flags } else { 0 };
        let header = VsockHdr { flags, ..conn.header(Op::Data) };
        let who = Who::Conn(conn.clone());
        let (sent, effect) =
            self.sender.send(&who, header, &mut Payload::bytes(bytes.get(..len).unwrap_or(bytes)), room);
        if sent < len {
            conn.take_back(&mut conn.lock(), len - sent);
        }
        self.effect(effect);
        Ok(sent)
    }

    /// How many more bytes of a connection may wait in the outbox.
    pub(crate) fn room(&self, conn: &Conn<S::Relay>) -> usize {
        let most = (conn.buf_alloc as usize).max(MAX_PACKET).min(conn.allowance());
        most.saturating_sub(conn.waiting())
    }

    /// Whether one more message may wait in the outbox, however short.
    pub(crate) fn has_room(&self, conn: &Arc<Conn<S::Relay>>) -> bool {
        self.sender.packets(&Who::Conn(conn.clone())) < MESSAGES
    }

    pub(crate) fn may_send(&self, inner: &crate::connection::Inner<S::Relay>) -> io::Result<()> {
        match inner.phase {
            Phase::Closed(over) => Err(over.error()),
            _ if inner.done || inner.peer_deaf => Err(io::ErrorKind::BrokenPipe.into()),
            Phase::Open => Ok(()),
            Phase::Connecting | Phase::Accepting => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{DeviceSide, NoRelay};

    struct Nobody;

    impl Host<NoRelay> for Nobody {
        fn notify(&self, _: Queue) {}

        fn wake(&self) {}

        fn broken(&self, _: Queue, _: Broken) {}

        fn open(&self, _: Key, _: Kind) -> Door<NoRelay> {
            Door::Shut
        }

        fn room(&self, _: Key) {}
    }

    #[test]
    fn ports_begin_anew_where_they_end_and_those_in_use_are_passed_over() {
        let settings = Settings { connections: 8, ..Settings::default() };
        let stack = Stack::<DeviceSide<NoRelay>>::new("guest", 2, Some(3), settings, Box::new(Nobody));
        stack.set_kinds(&[Kind::Stream]);
        let ask =
            |peer| stack.request_connection(Addr { cid: 3, port: peer }, Kind::Stream, None).map(|conn| conn.key.port);
        let last = || stack.table.lock().next_port = u32::MAX - 2;
        let _listener = stack.add_listener(FIRST_PORT, Kind::Stream).unwrap();
        last();
        // The last number is no port, the first one has a listener.
        let ports: Vec<_> = (0..4).map(|_| ask(80).unwrap()).collect();
        assert_eq!(ports, [u32::MAX - 2, u32::MAX - 1, FIRST_PORT + 1, FIRST_PORT + 2]);
        last();
        assert_eq!(ask(80).unwrap(), FIRST_PORT + 3, "all before are in use");
        last();
        assert_eq!(ask(81).unwrap(), u32::MAX - 2, "not for another peer's port");
        assert_eq!((ask(80).unwrap(), ask(80).unwrap()), (FIRST_PORT + 4, FIRST_PORT + 5));
        assert_eq!(
            ask(80).unwrap_err().kind(),
            io::ErrorKind::QuotaExceeded,
            "there are no more connections than that"
        );
    }
}
