//! What a stack does with its rings, and who looks at them: the worker, programs that poll, one that waits.

use super::*;

impl<S: Side> Stack<S> {
    /// Starts or stops the ring that packets go to. Connections go on when there is one again, unless [`Stack::reset`] ends
    /// them.
    pub fn set_link(&self, link: Option<S::Link>) -> Option<S::Link> {
        self.sender.replace(link)
    }

    /// Starts or stops the ring that packets come from.
    pub fn set_inlet(&self, inlet: Option<S::Inlet>) -> Option<S::Inlet> {
        let mut incoming = self.incoming.lock();
        std::mem::replace(&mut incoming.inlet, inlet)
    }

    /// Kinds of sockets that were negotiated; none: nothing can be connected.
    pub fn set_kinds(&self, kinds: &[Kind]) {
        self.kinds.store(kinds.iter().fold(0, |all, kind| all | 1 << kind.number()), Ordering::Release);
    }

    pub(super) fn has(&self, kind: Kind) -> bool {
        self.kinds.load(Ordering::Acquire) & 1 << kind.number() != 0
    }

    /// Whether peers can be connected to.
    pub fn is_running(&self) -> bool {
        self.kinds.load(Ordering::Acquire) != 0
    }

    /// The peer is gone, or has lost its state: all connections are over.
    pub fn reset(&self) {
        // In one step; what takes time is done when the table is free again.
        let (conns, deadlines) = {
            let mut table = self.table.lock();
            (std::mem::take(&mut table.conns), std::mem::take(&mut table.deadlines))
        };
        drop(deadlines);
        for Slot { conn, .. } in conns.into_values() {
            let _ = conn.end(&mut conn.lock(), Over::Reset);
        }
        self.sender.clear();
        if let Some(hub) = self.hub.get() {
            hub.left(self.peer.unwrap_or_default());
        }
    }

    /// This end goes away: peers hear that all connections are over, and there are no new ones.
    pub fn close(&self) {
        self.set_kinds(&[]);
        let conns: Vec<_> = self.table.lock().conns.values().map(|slot| slot.conn.clone()).collect();
        conns.iter().for_each(|conn| self.abort(conn));
        // As long as there is room, but not for ever.
        let _ = (0..LAST_TURNS).find(|_| !self.flush());
    }

    /// Whether connections that are closed at this end wait for the peer to close them too.
    pub fn is_lingering(&self) -> bool {
        let conns: Vec<_> = self.table.lock().conns.values().map(|slot| slot.conn.clone()).collect();
        conns.iter().any(|conn| {
            let inner = conn.lock();
            inner.done && inner.deaf
        })
    }

    /// Does what there is to do: packets that came, packets that wait. For the worker, when it is woken. Says whether it
    /// found anything.
    pub fn work(&self) -> bool {
        let mut any = false;
        if !self.led.load(Ordering::SeqCst) {
            let mut incoming = self.incoming.lock();
            // Not all that a peer may send: others want to be served too.
            let mut bytes = 0;
            for _ in 0..BURSTS {
                let taken = self.take(&mut incoming, None);
                any |= taken.packets > 0;
                bytes += taken.bytes;
                if taken.packets == 0 || bytes >= TAKEN {
                    break;
                }
            }
        }
        any | self.flush()
    }

    /// Turns notifications on. `true`: there is more to do already.
    pub fn rest(&self) -> bool {
        !self.led.load(Ordering::SeqCst) && self.enable()
    }

    pub(crate) fn enable(&self) -> bool {
        let mut incoming = self.incoming.lock();
        let Incoming { inlet: Some(inlet), pollers: 0 } = &mut *incoming else { return false };
        if !inlet.enable_notification() {
            return false;
        }
        inlet.disable_notification();
        true
    }

    /// Turns notifications off: the worker looks by itself.
    pub fn awake(&self) {
        let mut incoming = self.incoming.lock();
        // A program that waits by itself turns them on under the same lock.
        if !self.led.load(Ordering::SeqCst)
            && let Some(inlet) = &mut incoming.inlet
        {
            inlet.disable_notification();
        }
    }

    /// Moves what waits in the outbox, so much at once. Says whether there was anything, or is more.
    pub fn flush(&self) -> bool {
        if !self.sender.is_waiting() {
            return false;
        }
        let mut effect = self.sender.flush(|who| match who {
            Who::Conn(conn) => {
                let inner = conn.lock();
                conn.wake(&inner);
                let relay = inner.relay.is_some();
                drop(inner);
                if relay {
                    self.host.room(conn.key);
                }
            }
            Who::Crossing(crossing) => {
                if let Some(hub) = self.hub.get() {
                    hub.moved(&crossing);
                }
            }
        });
        let moved = effect.notify || effect.more;
        effect.wake = false;
        self.effect(effect);
        moved
    }

    /// Whether packets wait for room.
    pub fn is_waiting(&self) -> bool {
        self.sender.is_waiting()
    }

    /// Looks at the ring, if nobody else does. Says how many packets there were.
    pub(crate) fn pump(&self, wanted: Option<&mut Wanted<'_>>) -> usize {
        self.incoming.try_lock().map_or(0, |mut incoming| self.take(&mut incoming, wanted).packets)
    }

    /// A program will wait for packets itself, if no other one does.
    pub(crate) fn lead(&self) -> Option<Leader<'_, S>> {
        if !self.host.can_wait() {
            return None;
        }
        self.led.compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed).ok()?;
        // Before anybody is told to end the wait.
        self.host.clear();
        Some(Leader(self))
    }

    /// A program will look at the ring by itself for a while: no notifications.
    pub(crate) fn poll(&self) -> Poller<'_, S> {
        let mut incoming = self.incoming.lock();
        incoming.pollers += 1;
        if incoming.pollers == 1
            && let Some(inlet) = &mut incoming.inlet
        {
            inlet.disable_notification();
        }
        Poller(self)
    }

    pub(super) fn take(&self, incoming: &mut Incoming<S::Inlet>, mut wanted: Option<&mut Wanted<'_>>) -> Taken {
        let Some(inlet) = &mut incoming.inlet else { return Taken::default() };
        match inlet.take(|header, payload| self.receive(&header, payload, wanted.as_deref_mut())) {
            Ok(taken) => {
                if taken.notify {
                    self.host.notify(Queue::In);
                }
                self.counters.received.fetch_add(taken.packets as u64, Ordering::Relaxed);
                taken
            }
            Err(broken) => {
                incoming.inlet = None;
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                self.host.broken(Queue::In, broken);
                Taken::default()
            }
        }
    }

    pub(crate) fn effect(&self, effect: Effect) {
        let Effect { notify, wake, broken, .. } = effect;
        if notify {
            self.host.notify(Queue::Out);
        }
        if let Some(broken) = broken {
            self.sender.replace(None);
            self.counters.faults.fetch_add(1, Ordering::Relaxed);
            self.host.broken(Queue::Out, broken);
        } else if wake {
            self.host.wake();
        }
    }
}

/// A program that waits for packets itself, and takes them. When it stops, the worker does.
pub(crate) struct Leader<'a, S: Side>(&'a Stack<S>);

impl<S: Side> Leader<'_, S> {
    /// Waits, unless there is a packet already.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        if !self.0.enable() {
            self.0.host.wait(until);
        }
    }
}

impl<S: Side> Drop for Leader<'_, S> {
    fn drop(&mut self) {
        // The worker has seen this, or what it has left alone is seen here.
        self.0.led.store(false, Ordering::SeqCst);
        if self.0.enable() {
            self.0.host.wake();
        }
    }
}

/// A program that looks at the ring by itself. When the last one stops, notifications are on again.
pub(crate) struct Poller<'a, S: Side>(&'a Stack<S>);

impl<S: Side> Drop for Poller<'_, S> {
    fn drop(&mut self) {
        let more = {
            let mut incoming = self.0.incoming.lock();
            incoming.pollers -= 1;
            incoming.pollers == 0 && incoming.inlet.as_mut().is_some_and(Inlet::enable_notification)
        };
        if more {
            // The worker takes what came in between; or who waits in its place, without a notification so far.
            self.0.host.wake();
            if self.0.led.load(Ordering::SeqCst) {
                self.0.host.unwait();
            }
        }
    }
}
