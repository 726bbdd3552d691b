//! Connections between guests: sends what the hub decides.

use super::{PacketOwner, Stack};
use crate::{
    credit::ROOM,
    crossing::Crossing,
    hub::{End, Fate, Hub},
    payload::Payload,
    side::Side,
    types::Key,
    wrong::Wrong,
};
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
};

/// Maximum number of buffered messages per direction, however short.
const MESSAGES: usize = 1 << 16;

impl<S: Side> Hub<Stack<S>> {
    /// Adds a guest, which may connect to all guests that share a group with it. Called again, it replaces the groups and closes
    /// connections with guests that no longer share one.
    pub fn join(self: &Arc<Self>, stack: &Arc<Stack<S>>, groups: Vec<String>) {
        let _ = stack.hub.set(self.clone());
        let separated = self.insert(stack.peer.unwrap_or_default(), stack, &stack.crossings, groups);
        separated.iter().for_each(|crossing| _ = self.reset(crossing));
    }

    /// Closes a connection and resets it at both ends. Returns the sender's stack, unless the connection was closed already.
    fn reset(&self, crossing: &Crossing) -> Option<Arc<Stack<S>>> {
        let ends = self.close(crossing)?;
        let [(_, sender), _] = &ends;
        let sender = sender.clone();
        for (crossing, stack) in ends {
            if let Some(stack) = stack {
                stack.alone(|| stack.reset_crossing(crossing));
            }
        }
        sender
    }

    /// Resets a connection at both ends because its sender has violated the protocol or used up its memory.
    fn reset_violator(&self, crossing: &Crossing, wrong: Wrong) {
        if let Some(stack) = self.reset(crossing) {
            stack.count_wrong(&Key { port: crossing.to().port, peer: crossing.from() }, wrong);
        }
    }
}

impl<S: Side> End for Stack<S> {
    fn is_running(&self) -> bool {
        Stack::is_running(self)
    }

    fn may_request(&self) -> bool {
        self.admits_request()
    }
}

impl<S: Side> Stack<S> {
    /// Returns whether the stack was ever added to a [`Hub`](crate::Hub).
    pub fn has_joined(&self) -> bool {
        self.hub.get().is_some()
    }

    /// Returns whether the peer may request a connection now; counts the request as limited if not.
    pub(super) fn admits_request(&self) -> bool {
        let may = self.host.admit();
        if !may {
            self.counters.limited.fetch_add(1, Ordering::Relaxed);
        }
        may
    }

    /// The peer has disconnected or lost its state: resets its connections at the other ends.
    pub(super) fn leave_hub(&self) {
        if let Some(hub) = self.hub.get() {
            let closed = hub.close_all(self.peer.unwrap_or_default());
            closed.for_each(|(stack, crossing)| _ = stack.alone(|| stack.reset_crossing(crossing)));
        }
    }

    /// Sends a packet of the peer to another guest. Returns `false` if there is no such destination or connection, and the peer
    /// should get a reset.
    pub(super) fn forward(&self, packet: &VsockHdr, payload: &mut Payload<'_>) -> bool {
        let Some(hub) = self.hub.get() else { return false };
        let Some(op) = Op::new(packet.op) else { return false };
        let sent = match hub.decide(packet, op) {
            Fate::NoRoute => return false,
            Fate::Drop => Ok(()),
            Fate::Reset(crossing, wrong) => Err((crossing, wrong)),
            Fate::Forward { crossing, from, to } => {
                crossing.opposite().update(packet);
                let sent = to.alone(|| to.send_crossing(&from, &crossing, op, packet, payload));
                sent.unwrap_or(Ok(())).map_err(|wrong| (crossing, wrong))
            }
        };
        if let Err((crossing, wrong)) = sent {
            hub.reset_violator(&crossing, wrong);
        }
        true
    }

    /// Does something with this stack's rings in the turn of another guest. A panic is this guest's: that one's turn goes on.
    /// Returns `None` after one.
    fn alone<T>(&self, what: impl FnOnce() -> T) -> Option<T> {
        // What it leaves behind is given up with this stack's rings.
        catch_unwind(AssertUnwindSafe(what)).map_err(|payload| self.host.panicked(payload)).ok()
    }

    /// Sends a packet to the peer that comes from the guest of `sender`.
    fn send_crossing(
        &self,
        sender: &Stack<S>,
        crossing: &Crossing,
        op: Op,
        packet: &VsockHdr,
        payload: &mut Payload<'_>,
    ) -> Result<(), Wrong> {
        let owner = PacketOwner::Crossing(crossing.clone());
        let header = VsockHdr { len: 0, ..*packet };
        let effect = match op {
            Op::Data => {
                let len = payload.len() as u32;
                let credit = crossing.credit().available();
                if len > credit {
                    return Err(Wrong::Credit { len, credit });
                }
                if self.sender.packets(&owner) >= MESSAGES {
                    return Err(Wrong::Messages { limit: MESSAGES as u32 });
                }
                crossing.credit().send(len);
                self.sender.send(&owner, header, payload, ROOM as usize).1
            }
            Op::Shutdown => {
                if !crossing.shut(packet.flags & (wire::SHUTDOWN_SEND | wire::SHUTDOWN_RECEIVE)) {
                    return Ok(());
                }
                self.sender.send(&owner, header, &mut Payload::empty(), 0).1
            }
            Op::Reset => {
                // Data queued for the sender of the reset is of no use any more.
                sender.alone(|| sender.sender.forget(&PacketOwner::Crossing(crossing.reverse())));
                if self.sender.forget(&owner) {
                    // The destination never saw the request, so it needs no reset either.
                    return Ok(());
                }
                self.sender.send_control(Some(&owner), header)
            }
            _ => self.sender.send_control(Some(&owner), header),
        };
        let refused = effect.refused;
        if op == Op::Data && !refused && crossing.is_due() {
            sender.alone(|| sender.send_credit_update(crossing));
        }
        self.effect(effect);
        if refused { Err(Wrong::Memory) } else { Ok(()) }
    }

    /// Buffered data has been delivered: the sender may get more credit.
    pub(super) fn moved(&self, crossing: &Crossing) {
        if crossing.is_closed() || !crossing.is_due() {
            return;
        }
        let stack = self.hub.get().and_then(|hub| hub.end(crossing.from().cid));
        if let Some(stack) = stack {
            stack.alone(|| stack.send_credit_update(crossing));
        }
    }

    /// Sends the peer, which `crossing` leads to, a reset for its connection.
    fn reset_crossing(&self, crossing: Crossing) {
        let reset = crossing.header(Op::Reset);
        let owner = PacketOwner::Crossing(crossing);
        if !self.sender.forget(&owner) {
            self.effect(self.sender.send_control(Some(&owner), reset));
        }
    }

    /// Sends the peer, which sends on `crossing`, a credit update.
    fn send_credit_update(&self, crossing: &Crossing) {
        let reverse = crossing.reverse();
        let update = reverse.header(Op::CreditUpdate);
        self.effect(self.sender.send_control(Some(&PacketOwner::Crossing(reverse)), update));
    }
}
