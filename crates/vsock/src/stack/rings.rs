//! How a stack uses its rings, and who serves them: the worker, programs that poll, or one program that waits for packets in the
//! worker's place (the leader). How programs wait is in `edge/wait.rs`.

use super::{BURSTS, HELD, Held, Incoming, PacketOwner, Slot, Stack, TAKEN};
use crate::{
    connection::{CloseReason, Wanted},
    send::Effect,
    side::{Inlet, Queue, Side, Taken},
    types::SocketType,
};
use parking_lot::MutexGuard;
use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

impl<S: Side> Stack<S> {
    /// Sets or removes the ring that carries packets to the peer. Connections survive and continue with the next ring, unless
    /// [`Stack::reset`] ends them.
    pub fn set_link(&self, link: Option<S::Link>) -> Option<S::Link> {
        self.sender.replace(link)
    }

    /// Sets or removes the ring that carries packets from the peer.
    pub fn set_inlet(&self, inlet: Option<S::Inlet>) -> Option<S::Inlet> {
        let mut incoming = self.incoming.lock();
        let owed = incoming.release();
        let before = std::mem::replace(&mut incoming.inlet, inlet);
        self.end_take(incoming, owed);
        before
    }

    /// Sets the negotiated socket types; with none, nothing can be connected.
    pub fn set_socket_types(&self, types: &[SocketType]) {
        self.socket_types.store(types.iter().fold(0, |all, kind| all | 1 << kind.number()), Ordering::Release);
    }

    pub(super) fn has(&self, kind: SocketType) -> bool {
        self.socket_types.load(Ordering::Acquire) & 1 << kind.number() != 0
    }

    /// Returns whether connections can be opened.
    pub fn is_running(&self) -> bool {
        self.socket_types.load(Ordering::Acquire) != 0
    }

    /// The peer has disconnected or lost its state: closes all connections.
    pub fn reset(&self) {
        // Take the table's contents under the lock, and close the connections after releasing it.
        let (conns, deadlines) = {
            let mut table = self.table.lock();
            (std::mem::take(&mut table.conns), std::mem::take(&mut table.deadlines))
        };
        drop(deadlines);
        for Slot { conn, .. } in conns.into_values() {
            let _ = conn.end(&mut conn.lock(), CloseReason::Reset);
            conn.wake();
        }
        self.sender.clear();
        self.leave_hub();
    }

    /// This end is shutting down: resets all connections and allows no new ones. Resets for which there is no room wait for
    /// [`Stack::work`].
    pub fn close(&self) {
        self.set_socket_types(&[]);
        let conns: Vec<_> = self.table.lock().conns.values().map(|slot| slot.conn.clone()).collect();
        conns.iter().for_each(|conn| self.abort(conn));
    }

    /// Returns whether connections closed at this end still wait for the peer to close them.
    pub fn is_lingering(&self) -> bool {
        let conns: Vec<_> = self.table.lock().conns.values().map(|slot| slot.conn.clone()).collect();
        conns.iter().any(|conn| {
            let inner = conn.lock();
            inner.send_shut && inner.recv_shut
        })
    }

    /// Called by the worker when it is woken: receives and sends some packets. Returns whether there were any.
    pub fn work(&self) -> bool {
        self.serve(None)
    }

    /// As `work`, for a worker that keeps [`Stack::next_deadline`]: the peer may be notified of returned buffers as late as
    /// [`Settings::interrupt_delay`](crate::Settings) says.
    pub fn work_at(&self, now: Instant) -> bool {
        self.serve(Some(now))
    }

    fn serve(&self, now: Option<Instant>) -> bool {
        let mut any = false;
        if !self.led.load(Ordering::SeqCst) {
            // Bounded, so that other peers are served too.
            let mut bytes = 0;
            for _ in 0..BURSTS {
                let taken = self.take(self.incoming.lock(), None, now);
                any |= taken.packets > 0;
                bytes += taken.bytes;
                if taken.packets == 0 || bytes >= TAKEN {
                    break;
                }
            }
        }
        any | self.flush()
    }

    /// Turns notifications on. Returns `true` if packets have arrived already.
    pub fn enable_notification(&self) -> bool {
        self.enable(false)
    }

    /// Turns notifications on, for the worker or for a leader. Returns `true` if packets have arrived already; then they stay off.
    /// Does nothing for the worker if there is a leader.
    pub(crate) fn enable(&self, for_leader: bool) -> bool {
        let mut incoming = self.incoming.lock();
        // Under the lock: a leader that comes later turns notifications on after this has turned them off.
        if self.led.load(Ordering::SeqCst) != for_leader {
            return false;
        }
        let Incoming { inlet: Some(inlet), pollers: 0, .. } = &mut *incoming else { return false };
        if !inlet.enable_notification() {
            return false;
        }
        inlet.disable_notification();
        true
    }

    /// Turns notifications off: the worker polls.
    pub fn disable_notification(&self) {
        let mut incoming = self.incoming.lock();
        // A leader turns notifications on under the same lock.
        if !self.led.load(Ordering::SeqCst)
            && let Some(inlet) = &mut incoming.inlet
        {
            inlet.disable_notification();
        }
    }

    /// Moves a limited number of packets from the outbox to the ring. Returns whether any were moved, or more could be.
    pub fn flush(&self) -> bool {
        if !self.sender.is_waiting() {
            return false;
        }
        let mut effect = self.sender.flush(|owner| match owner {
            PacketOwner::Conn(conn) => {
                let relay = conn.lock().relay.is_some();
                // After the lock: a program that has just found no room under it waits by now.
                conn.wake();
                if relay {
                    self.host.room(conn.key);
                }
            }
            PacketOwner::Crossing(crossing) => self.moved(&crossing),
        });
        let moved = effect.notify || effect.more;
        effect.wake = false;
        self.effect(effect);
        moved
    }

    /// Returns whether packets wait in the outbox.
    pub fn is_waiting(&self) -> bool {
        self.sender.is_waiting()
    }

    /// Polls the ring, unless another thread is using it. Returns the number of packets received.
    pub(crate) fn pump(&self, wanted: Option<&mut Wanted<'_>>) -> usize {
        self.incoming.try_lock().map_or(0, |incoming| self.take(incoming, wanted, None).packets)
    }

    /// Makes a program the leader, which receives packets in the worker's place. Returns `false` if there is one already.
    pub(crate) fn take_lead(&self) -> bool {
        self.led.compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// There is no leader any more: the worker takes over.
    pub(crate) fn leave_lead(&self) {
        // Either the worker sees the store, or `enable` below finds the packets that it has left alone. If there is the next leader
        // already, it finds them.
        self.led.store(false, Ordering::SeqCst);
        if self.enable(false) {
            self.host.wake();
        }
    }

    /// Adds a program that polls the ring, which turns notifications off.
    pub(crate) fn start_polling(&self) {
        let mut incoming = self.incoming.lock();
        incoming.pollers += 1;
        if incoming.pollers == 1
            && let Some(inlet) = &mut incoming.inlet
        {
            inlet.disable_notification();
        }
    }

    /// Removes a program that polls the ring. Without any, notifications are turned on again.
    pub(crate) fn stop_polling(&self) {
        let more = {
            let mut incoming = self.incoming.lock();
            incoming.pollers -= 1;
            incoming.pollers == 0 && incoming.inlet.as_mut().is_some_and(Inlet::enable_notification)
        };
        if more {
            // The worker receives packets that arrived in between. A leader has had no notification of them either.
            self.host.wake();
            if self.led.load(Ordering::SeqCst) {
                self.host.unwait();
            }
        }
    }

    /// Takes a burst of packets. `now`: the notification of their buffers may wait.
    fn take(
        &self,
        mut incoming: MutexGuard<'_, Incoming<S::Inlet>>,
        mut wanted: Option<&mut Wanted<'_>>,
        now: Option<Instant>,
    ) -> Taken {
        let Some(inlet) = &mut incoming.inlet else { return Taken::default() };
        match inlet.take(|header, payload| self.receive(&header, payload, wanted.as_deref_mut())) {
            Ok(taken) => {
                self.counters.received.fetch_add(taken.packets as u64, Ordering::Relaxed);
                if taken.packets > 0 {
                    let delay = now.map(|now| (now, self.settings.read().interrupt_delay));
                    let owed = !incoming.defer(taken, delay) && incoming.release();
                    self.end_take(incoming, owed);
                }
                taken
            }
            Err(broken) => {
                (incoming.inlet, incoming.held) = (None, Held::default());
                drop(incoming);
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                self.host.broken(Queue::In, broken);
                Taken::default()
            }
        }
    }

    /// Unlocks the ring, then notifies the peer if it is owed that: a write to the descriptor of a hostile peer may block for a
    /// moment, and other threads use the ring.
    fn end_take(&self, incoming: MutexGuard<'_, Incoming<S::Inlet>>, owed: bool) {
        drop(incoming);
        if owed {
            self.host.notify(Queue::In);
        }
    }

    /// Notifies the peer of returned buffers that have waited long enough.
    pub(super) fn settle(&self, now: Instant) {
        let mut incoming = self.incoming.lock();
        let owed = incoming.held.due.is_some_and(|due| due <= now) && incoming.release();
        self.end_take(incoming, owed);
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

impl<I: Inlet> Incoming<I> {
    /// Counts packets whose buffers were returned. Returns whether the notification waits for more of them. `delay`: the time,
    /// and how long it may wait; `None`: it may not.
    fn defer(&mut self, taken: Taken, delay: Option<(Instant, Duration)>) -> bool {
        let Incoming { inlet, held, .. } = self;
        held.packets += taken.packets;
        held.bytes = held.bytes.saturating_add(taken.bytes);
        let Some((now, delay)) = delay else { return false };
        let room = inlet.as_ref().is_some_and(|inlet| held.packets < inlet.patience()) && held.bytes < HELD;
        if !room || delay.is_zero() {
            return false;
        }
        held.due.get_or_insert(now + delay);
        true
    }

    /// Ends the wait for more packets. Returns whether the peer is to be notified of all buffers returned to it.
    fn release(&mut self) -> bool {
        let Held { packets, .. } = std::mem::take(&mut self.held);
        packets > 0 && self.inlet.as_mut().is_some_and(Inlet::wants_notification)
    }
}
