//! Guests that talk to each other: a packet of one goes from its ring straight into the other's, with one copy. What each
//! connection may have under way is checked here, as the guests' word alone would let one fill our memory.

use crate::{Addr, Key, Owner, Payload, Side, Stack, connection::Wrong, stack::Who, sync::AtomicUsize};
use parking_lot::Mutex;
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicUsize as Count, Ordering},
    },
};

/// Room that a guest is believed to have for a connection, at most: what may wait in our memory if it does not take it.
const ROOM: u32 = 1 << 20;
/// Messages that wait in our memory, at most, however short they are.
const MESSAGES: usize = 1 << 16;

/// One direction of a connection between two guests.
pub(crate) struct Crossing {
    /// What its sender says of its room for the other direction. Packets of this direction tell the other guest.
    buf_alloc: AtomicU32,
    fwd_cnt: AtomicU32,
    /// Bytes sent.
    tx_cnt: AtomicU32,
    /// Flags of OP_SHUTDOWN that were passed on.
    shut: AtomicU32,
    queued: AtomicUsize,
    kind: u16,
}

impl Crossing {
    fn new(kind: u16) -> Arc<Crossing> {
        Arc::new(Crossing {
            buf_alloc: AtomicU32::new(0),
            fwd_cnt: AtomicU32::new(0),
            tx_cnt: AtomicU32::new(0),
            shut: AtomicU32::new(0),
            queued: AtomicUsize::new(0),
            kind,
        })
    }
}

/// One of the connections that a guest has asked for and that are not over.
struct Ticket(Arc<Count>);

impl Ticket {
    /// None: the guest has as many as it may have.
    fn of(count: &Arc<Count>, limit: usize) -> Option<Ticket> {
        let next = |count| (count < limit).then_some(count + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(Ticket(count.clone()))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Owner for Arc<Crossing> {
    fn key(&self) -> usize {
        Arc::as_ptr(self) as usize
    }

    fn stamp(&self, header: &mut VsockHdr) {
        // The last word, also in packets that waited.
        header.buf_alloc = self.buf_alloc.load(Ordering::Acquire);
        header.fwd_cnt = self.fwd_cnt.load(Ordering::Acquire);
    }

    fn queued(&self) -> &AtomicUsize {
        &self.queued
    }
}

struct Member<S: Side> {
    stack: Weak<Stack<S>>,
    groups: Vec<String>,
    asked: Arc<Count>,
}

struct Members<S: Side> {
    guests: HashMap<u64, Member<S>>,
    /// By sender and receiver.
    crossings: HashMap<(Addr, Addr), Entry>,
}

/// A direction of a connection; in that of its asker, the ticket.
type Entry = (Arc<Crossing>, Option<Ticket>);

/// The guests that may talk to each other.
pub struct Hub<S: Side> {
    members: Mutex<Members<S>>,
    /// Connections that each guest may ask others for at once.
    limit: usize,
}

impl<S: Side> Hub<S> {
    /// Nobody yet. `connections`: how many each guest may ask others for at once, so that none uses up what others need.
    pub fn new(connections: usize) -> Arc<Hub<S>> {
        let members = Mutex::new(Members { guests: HashMap::new(), crossings: HashMap::new() });
        Arc::new(Hub { members, limit: connections })
    }

    /// A guest that may talk to all with which it has a group in common. Called again, it is in these groups instead; its
    /// connections with guests that it has nothing in common with any more are over.
    pub fn join(self: &Arc<Self>, stack: &Arc<Stack<S>>, groups: Vec<String>) {
        stack.join(self.clone());
        let cid = stack.peer().unwrap_or_default();
        let over: Vec<_> = {
            let mut members = self.members.lock();
            let known = members.guests.get_mut(&cid).filter(|member| member.stack.as_ptr() == Arc::as_ptr(stack));
            match known {
                Some(member) => member.groups = groups,
                None => {
                    let member = Member { stack: Arc::downgrade(stack), groups, asked: Arc::default() };
                    members.guests.insert(cid, member);
                }
            }
            let Members { guests, crossings } = &mut *members;
            let apart = |from: &Addr, to: &Addr| match (guests.get(&from.cid), guests.get(&to.cid)) {
                (Some(from), Some(to)) => !from.groups.iter().any(|group| to.groups.contains(group)),
                _ => true,
            };
            let over = crossings.extract_if(|(from, to), _| (from.cid == cid || to.cid == cid) && apart(from, to));
            let over: Vec<_> = over.collect();
            over.into_iter()
                .filter_map(|((from, to), (crossing, _))| Some((from, to, crossing, members.stack(to.cid)?)))
                .collect()
        };
        for (from, to, crossing, stack) in over {
            stack.reset_crossing(crossing, from, to);
        }
    }

    /// A guest is gone, or has lost its state: others hear that their connections with it are over.
    pub(crate) fn left(&self, cid: u64) {
        let over: Vec<_> = {
            let mut members = self.members.lock();
            let over: Vec<_> = members.crossings.extract_if(|(from, to), _| from.cid == cid || to.cid == cid).collect();
            over.into_iter()
                .filter(|((from, _), _)| from.cid == cid)
                .filter_map(|((from, to), (crossing, _))| Some((from, to, crossing, members.stack(to.cid)?)))
                .collect()
        };
        for (from, to, crossing, stack) in over {
            stack.reset_crossing(crossing, from, to);
        }
    }

    /// Carries a packet from one guest to another. `false`: it has no way there, and its sender should hear of it.
    pub(crate) fn carry(&self, packet: &VsockHdr, payload: &mut Payload<'_>) -> bool {
        let from = Addr { cid: packet.src_cid, port: packet.src_port };
        let to = Addr { cid: packet.dst_cid, port: packet.dst_port };
        let Some(op) = Op::new(packet.op) else { return false };
        let mut members = self.members.lock();
        let Some(stack) = members.way(from.cid, to.cid) else { return false };
        if !stack.is_running() {
            return false;
        }
        if op == Op::Request {
            if members.crossings.contains_key(&(from, to)) {
                drop(members);
                self.cut(from, to, Wrong::SecondRequest);
                return true;
            }
            let ticket = members.guests.get(&from.cid).and_then(|guest| Ticket::of(&guest.asked, self.limit));
            if ticket.is_none() {
                return false;
            }
            members.crossings.insert((from, to), (Crossing::new(packet.kind), ticket));
            members.crossings.insert((to, from), (Crossing::new(packet.kind), None));
        }
        let (Some(crossing), Some(back)) = (members.crossing(from, to), members.crossing(to, from)) else {
            // The last word about a connection that is not there any more needs no answer.
            return op == Op::Reset;
        };
        if op == Op::Reset {
            members.crossings.remove(&(from, to));
            members.crossings.remove(&(to, from));
        }
        drop(members);
        crossing.buf_alloc.store(packet.buf_alloc.min(ROOM), Ordering::Release);
        crossing.fwd_cnt.store(packet.fwd_cnt, Ordering::Release);
        let who = Who::Crossing(crossing.clone());
        let header = VsockHdr { len: 0, ..*packet };
        let effect = match op {
            Op::Data => {
                let len = payload.len() as u32;
                let under_way =
                    crossing.tx_cnt.load(Ordering::Relaxed).wrapping_sub(back.fwd_cnt.load(Ordering::Acquire));
                let credit = back.buf_alloc.load(Ordering::Acquire).saturating_sub(under_way);
                // The receiver's word alone would let the two of them fill our memory.
                let room = ROOM.saturating_sub(crossing.queued.load(crate::sync::Ordering::Relaxed) as u32);
                if len > credit.min(room) {
                    self.cut(from, to, Wrong::Credit { len, credit: credit.min(room) });
                    return true;
                }
                if stack.sender.packets(&who) >= MESSAGES {
                    self.cut(from, to, Wrong::Messages { limit: MESSAGES as u32 });
                    return true;
                }
                crossing.tx_cnt.fetch_add(len, Ordering::Relaxed);
                stack.sender.send(&who, header, payload, ROOM as usize).1
            }
            Op::Shutdown => {
                let flags = packet.flags & (wire::SHUTDOWN_SEND | wire::SHUTDOWN_RECEIVE);
                if flags & !crossing.shut.fetch_or(flags, Ordering::Relaxed) == 0 {
                    // Nothing new.
                    return true;
                }
                stack.sender.send(&who, header, &mut Payload::empty(), 0).1
            }
            _ => {
                if op == Op::Reset {
                    stack.sender.forget(&who);
                }
                stack.sender.send_control(Some(&who), header)
            }
        };
        stack.effect(effect);
        true
    }

    /// Ends a connection whose sender has broken its rules, for both.
    fn cut(&self, from: Addr, to: Addr, wrong: Wrong) {
        let (ends, crossings) = {
            let mut members = self.members.lock();
            let crossings = [members.crossings.remove(&(from, to)), members.crossings.remove(&(to, from))];
            ([(to, from, members.stack(from.cid)), (from, to, members.stack(to.cid))], crossings)
        };
        if let Some(stack) = &ends[0].2 {
            stack.count_wrong(&Key { port: to.port, peer: from }, wrong);
        }
        for ((from, to, stack), crossing) in ends.into_iter().zip(crossings.into_iter().rev()) {
            if let (Some(stack), Some((crossing, _))) = (stack, crossing) {
                stack.reset_crossing(crossing, from, to);
            }
        }
    }
}

impl<S: Side> Stack<S> {
    /// Tells the guest that its connection with another one is over.
    fn reset_crossing(&self, crossing: Arc<Crossing>, from: Addr, to: Addr) {
        let reset = VsockHdr { kind: crossing.kind, ..header(from, to, Op::Reset) };
        let who = Who::Crossing(crossing);
        self.sender.forget(&who);
        self.effect(self.sender.send_control(Some(&who), reset));
    }
}

fn header(from: Addr, to: Addr, op: Op) -> VsockHdr {
    VsockHdr {
        src_cid: from.cid,
        dst_cid: to.cid,
        src_port: from.port,
        dst_port: to.port,
        op: op as u16,
        ..VsockHdr::default()
    }
}

impl<S: Side> Members<S> {
    fn stack(&self, cid: u64) -> Option<Arc<Stack<S>>> {
        self.guests.get(&cid)?.stack.upgrade()
    }

    fn crossing(&self, from: Addr, to: Addr) -> Option<Arc<Crossing>> {
        self.crossings.get(&(from, to)).map(|(crossing, _)| crossing.clone())
    }

    /// The guest `to`, if `from` may talk to it.
    fn way(&self, from: u64, to: u64) -> Option<Arc<Stack<S>>> {
        let (from, to) = (self.guests.get(&from)?, self.guests.get(&to)?);
        let common = from.groups.iter().any(|group| to.groups.contains(group));
        if common { to.stack.upgrade() } else { None }
    }
}
