//! Connections between guests: a packet goes from one guest's ring straight into the other's, with one copy. Called by a
//! [`Stack`] for packets to another CID.
//!
//! The credit that the two guests grant each other does not bound our memory: a receiver can advertise credit and take nothing.
//! So the hub checks what each connection may have in flight. The guest that requested a connection is charged for everything
//! buffered because of it, in both directions ([`Account`]). A sender is given the receiver's credit, but no more than may be
//! buffered here, so that whatever it sends can be carried. When our limit is the smaller of the two, the sender gets a credit
//! update as soon as buffered data has been delivered.

use crate::{
    Account, Addr, Charge, Key, Owner, Payload, Side, Stack,
    account::Opened,
    connection::{Wrong, further},
    send::MAX_PACKET,
    stack::PacketOwner,
    sync::AtomicUsize,
};
use parking_lot::Mutex;
use ringroad_wire::vsock_hdr::{self as wire, Op, VsockHdr};
use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize as Count, Ordering},
    },
};

/// Largest credit passed on for a connection: what may be buffered here if the receiver takes nothing.
const ROOM: u32 = 1 << 20;
/// Maximum number of buffered messages per direction, however short.
const MESSAGES: usize = 1 << 16;

/// A connection between two guests, or of a guest with itself.
struct Pair {
    /// The end that requested the connection, and the other one.
    initiator: Addr,
    responder: Addr,
    kind: u16,
    /// What each end sends: `forward` from the initiator, `backward` from the responder.
    forward: Direction,
    backward: Direction,
    /// The connection is closed; later packets belong to no connection.
    closed: AtomicBool,
    /// The initiator's sub-account for connections with this responder.
    account: Arc<Account>,
    _opened: Opened,
    _slot: RequestSlot,
}

/// State of one direction.
#[derive(Default)]
struct Direction {
    /// The receiver's credit fields, from its last packet.
    buf_alloc: AtomicU32,
    fwd_cnt: AtomicU32,
    /// Bytes sent, modulo 2³².
    tx_cnt: AtomicU32,
    /// Stream position up to which the sender has been told it may send, modulo 2³².
    advertised: AtomicU32,
    /// OP_SHUTDOWN flags passed on so far.
    shut: AtomicU32,
    queued: AtomicUsize,
}

/// One direction of a connection between two guests.
pub(crate) struct Crossing {
    pair: Arc<Pair>,
    /// From the responder to the initiator.
    is_backward: bool,
}

impl Clone for Crossing {
    fn clone(&self) -> Self {
        Crossing { pair: self.pair.clone(), is_backward: self.is_backward }
    }
}

/// The credit a sender may be given.
struct Grant {
    /// The receiver's count of consumed bytes, and the credit beyond it.
    fwd_cnt: u32,
    window: u32,
    /// Stream positions modulo 2³²: up to where the sender may send now, up to what was last advertised to it, and up to where the
    /// receiver alone would let it.
    edge: u32,
    advertised: u32,
    desired: u32,
}

impl Crossing {
    fn from(&self) -> Addr {
        if self.is_backward { self.pair.responder } else { self.pair.initiator }
    }

    fn to(&self) -> Addr {
        if self.is_backward { self.pair.initiator } else { self.pair.responder }
    }

    fn direction(&self) -> &Direction {
        if self.is_backward { &self.pair.backward } else { &self.pair.forward }
    }

    /// Returns the opposite direction.
    fn reverse(&self) -> Crossing {
        Crossing { pair: self.pair.clone(), is_backward: !self.is_backward }
    }

    /// Computes the credit that the sender may be given now.
    fn grant(&self) -> Grant {
        let direction = self.direction();
        let (buf_alloc, fwd_cnt) =
            (direction.buf_alloc.load(Ordering::Acquire), direction.fwd_cnt.load(Ordering::Acquire));
        let allowance = u32::try_from(self.pair.account.allowance()).unwrap_or(ROOM).min(ROOM);
        let delivered = direction.tx_cnt.load(Ordering::Acquire).wrapping_sub(self.waiting());
        // Bytes already delivered occupy none of our memory. The difference is negative if the receiver claims to have consumed
        // more than it was sent.
        let taken = i64::from(delivered.wrapping_sub(fwd_cnt) as i32);
        let window = (taken + i64::from(allowance)).clamp(0, buf_alloc.into()) as u32;
        let desired = fwd_cnt.wrapping_add(buf_alloc);
        let advertised = direction.advertised.load(Ordering::Acquire);
        // Never reduce what was advertised, unless the receiver itself reduces it: the sender may have used it already.
        let mut edge = further(fwd_cnt.wrapping_add(window), advertised);
        if further(edge, desired) == edge {
            edge = desired;
        }
        Grant { fwd_cnt, window: edge.wrapping_sub(fwd_cnt), edge, advertised, desired }
    }

    /// Returns the bytes buffered in our memory.
    fn waiting(&self) -> u32 {
        self.direction().queued.load(crate::sync::Ordering::Relaxed) as u32
    }

    /// Returns whether the sender is, or soon will be, waiting for credit that the receiver has granted and only our memory limit
    /// has held back.
    fn is_due(&self) -> bool {
        let Grant { edge, advertised, desired, .. } = self.grant();
        let gain = edge.wrapping_sub(advertised) as i32;
        if advertised == desired || gain <= 0 {
            return false;
        }
        let allowance = u32::try_from(self.pair.account.allowance()).unwrap_or(ROOM).min(ROOM);
        let believed = advertised.wrapping_sub(self.direction().tx_cnt.load(Ordering::Acquire));
        // A message may need more than half of the largest credit there can be.
        let low = if self.pair.kind == wire::TYPE_STREAM { allowance / 2 } else { allowance }.min(MAX_PACKET as u32);
        (believed as i32) < low as i32 && gain as u32 >= allowance / 4
    }

    fn header(&self, op: Op) -> VsockHdr {
        let (from, to) = (self.from(), self.to());
        VsockHdr {
            src_cid: from.cid,
            dst_cid: to.cid,
            src_port: from.port,
            dst_port: to.port,
            kind: self.pair.kind,
            op: op as u16,
            ..VsockHdr::default()
        }
    }
}

impl Owner for Crossing {
    fn key(&self) -> usize {
        // A `Pair` is aligned, so the lowest bit is free for the direction.
        Arc::as_ptr(&self.pair) as usize | usize::from(self.is_backward)
    }

    fn stamp(&self, header: &mut VsockHdr) {
        // Computed last, so that a packet that was queued carries the current credit of the opposite direction.
        let reverse = self.reverse();
        let grant = reverse.grant();
        reverse.direction().advertised.store(grant.edge, Ordering::Release);
        header.buf_alloc = grant.window;
        header.fwd_cnt = grant.fwd_cnt;
    }

    fn queued(&self) -> &AtomicUsize {
        &self.direction().queued
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        self.pair.account.charge(bytes)
    }

    fn group(&self) -> u64 {
        self.from().cid
    }
}

/// One of the connections that a guest has requested; counted until dropped.
struct RequestSlot(Arc<Count>);

impl RequestSlot {
    /// Returns `None` if the guest has reached the limit.
    fn of(count: &Arc<Count>, limit: usize) -> Option<RequestSlot> {
        let next = |count| (count < limit).then_some(count + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(RequestSlot(count.clone()))
    }
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Member<S: Side> {
    stack: Weak<Stack<S>>,
    groups: Vec<String>,
    requested: Arc<Count>,
    account: Arc<Account>,
    /// Sub-accounts by the other guest's CID; they live as long as there are connections with it.
    parts: HashMap<u64, Weak<Account>>,
    /// What the guest sends, by its port and the destination. Both directions of a connection are registered, each with its
    /// sender.
    crossings: HashMap<(u32, Addr), Crossing>,
}

/// Guests that may connect to each other.
pub struct Hub<S: Side> {
    members: Mutex<HashMap<u64, Member<S>>>,
    /// Maximum number of connections that a guest may have requested.
    limit: usize,
}

/// How to handle a packet from one guest to another.
enum Fate {
    /// No such destination or connection: answer with a reset.
    NoRoute,
    /// Drop it without an answer.
    Drop,
    /// Pass it on.
    Forward(Crossing),
    /// Reset the connection at both ends.
    Reset(Crossing, Wrong),
}

impl<S: Side> Hub<S> {
    /// Creates an empty hub. `connections`: how many connections each guest may have requested, so that none uses up what others
    /// need.
    pub fn new(connections: usize) -> Arc<Hub<S>> {
        Arc::new(Hub { members: Mutex::default(), limit: connections })
    }

    /// Adds a guest, which may connect to all guests that share a group with it. Called again, it replaces the groups and closes
    /// connections with guests that no longer share one.
    pub fn join(self: &Arc<Self>, stack: &Arc<Stack<S>>, groups: Vec<String>) {
        stack.join(self.clone());
        let cid = stack.peer().unwrap_or_default();
        let separated: Vec<_> = {
            let mut members = self.members.lock();
            let known = members.get_mut(&cid).filter(|member| member.stack.as_ptr() == Arc::as_ptr(stack));
            match known {
                Some(member) => member.groups = groups,
                None => {
                    let member = Member {
                        stack: Arc::downgrade(stack),
                        groups,
                        requested: Arc::default(),
                        account: stack.crossings.clone(),
                        parts: HashMap::new(),
                        crossings: HashMap::new(),
                    };
                    members.insert(cid, member);
                }
            }
            let Some(member) = members.get(&cid) else { return };
            let apart = |to: &Addr| members.get(&to.cid).is_none_or(|to| !share_group(&member.groups, &to.groups));
            member.crossings.values().filter(|crossing| apart(&crossing.to())).cloned().collect()
        };
        separated.iter().for_each(|crossing| _ = self.end(crossing));
    }

    /// A guest has disconnected or lost its state: resets its connections at the other ends.
    pub(crate) fn disconnected(&self, cid: u64) {
        let own = match self.members.lock().get_mut(&cid) {
            Some(member) => std::mem::take(&mut member.crossings),
            None => return,
        };
        // Lock once per connection, so that others do not wait for all of them.
        for crossing in own.into_values() {
            if crossing.pair.closed.swap(true, Ordering::AcqRel) {
                continue;
            }
            let (from, to) = (crossing.from(), crossing.to());
            let stack = {
                let mut members = self.members.lock();
                let Some(member) = members.get_mut(&to.cid) else { continue };
                remove(member, &crossing.reverse());
                if to.cid == from.cid { None } else { member.stack.upgrade() }
            };
            if let Some(stack) = stack {
                stack.reset_crossing(crossing);
            }
        }
    }

    /// Carries a packet from one guest to another. Returns `false` if there is no such destination or connection, and the sender
    /// should get a reset.
    pub(crate) fn carry(&self, packet: &VsockHdr, payload: &mut Payload<'_>) -> bool {
        let from = Addr { cid: packet.src_cid, port: packet.src_port };
        let to = Addr { cid: packet.dst_cid, port: packet.dst_port };
        let Some(op) = Op::new(packet.op) else { return false };
        let (fate, stacks) = {
            let mut members = self.members.lock();
            let Some([sender, stack]) = route(&members, from.cid, to.cid) else { return false };
            (self.fate(&mut members, &sender, (from, to), op, packet.kind), [sender, stack])
        };
        let [sender, stack] = stacks;
        let crossing = match fate {
            Fate::NoRoute => return false,
            Fate::Drop => return true,
            Fate::Forward(crossing) => crossing,
            Fate::Reset(crossing, wrong) => {
                self.reset_violator(&crossing, wrong);
                return true;
            }
        };
        let reverse = crossing.reverse();
        reverse.direction().buf_alloc.store(packet.buf_alloc.min(ROOM), Ordering::Release);
        reverse.direction().fwd_cnt.store(packet.fwd_cnt, Ordering::Release);
        let owner = PacketOwner::Crossing(crossing.clone());
        let header = VsockHdr { len: 0, ..*packet };
        let effect = match op {
            Op::Data => {
                let direction = crossing.direction();
                let len = payload.len() as u32;
                let in_flight =
                    direction.tx_cnt.load(Ordering::Relaxed).wrapping_sub(direction.fwd_cnt.load(Ordering::Acquire));
                let credit = direction.buf_alloc.load(Ordering::Acquire).saturating_sub(in_flight);
                // The receiver alone could advertise enough credit to fill our memory.
                let credit = credit.min(ROOM.saturating_sub(crossing.waiting()));
                if len > credit {
                    self.reset_violator(&crossing, Wrong::Credit { len, credit });
                    return true;
                }
                if stack.sender.packets(&owner) >= MESSAGES {
                    self.reset_violator(&crossing, Wrong::Messages { limit: MESSAGES as u32 });
                    return true;
                }
                direction.tx_cnt.fetch_add(len, Ordering::Relaxed);
                let effect = stack.sender.send(&owner, header, payload, ROOM as usize).1;
                if effect.refused {
                    stack.effect(effect);
                    self.reset_violator(&crossing, Wrong::Memory);
                    return true;
                }
                if crossing.is_due() {
                    sender.send_credit_update(&crossing);
                }
                effect
            }
            Op::Shutdown => {
                let flags = packet.flags & (wire::SHUTDOWN_SEND | wire::SHUTDOWN_RECEIVE);
                if flags & !crossing.direction().shut.fetch_or(flags, Ordering::Relaxed) == 0 {
                    // All these directions are shut down already.
                    return true;
                }
                let effect = stack.sender.send(&owner, header, &mut Payload::empty(), 0).1;
                if effect.refused {
                    self.reset_violator(&crossing, Wrong::Memory);
                    return true;
                }
                effect
            }
            Op::Reset => {
                // Data queued for the sender of the reset is of no use any more.
                let _ = sender.sender.forget(&PacketOwner::Crossing(reverse));
                if stack.sender.forget(&owner) {
                    // The destination never saw the request, so it needs no reset either.
                    return true;
                }
                stack.sender.send_control(Some(&owner), header)
            }
            _ => stack.sender.send_control(Some(&owner), header),
        };
        stack.effect(effect);
        true
    }

    /// Decides how to handle a packet, and updates the table of connections.
    fn fate(
        &self,
        members: &mut HashMap<u64, Member<S>>,
        sender: &Arc<Stack<S>>,
        (from, to): (Addr, Addr),
        op: Op,
        kind: u16,
    ) -> Fate {
        let Some(member) = members.get_mut(&from.cid) else { return Fate::NoRoute };
        let there =
            member.crossings.get(&(from.port, to)).filter(|crossing| !crossing.pair.closed.load(Ordering::Acquire));
        match (there.cloned(), op) {
            (Some(crossing), Op::Request) => Fate::Reset(crossing, Wrong::SecondRequest),
            (Some(crossing), Op::Reset) => {
                crossing.pair.closed.store(true, Ordering::Release);
                remove(member, &crossing);
                if let Some(member) = members.get_mut(&to.cid) {
                    remove(member, &crossing.reverse());
                }
                Fate::Forward(crossing)
            }
            (Some(crossing), _) => Fate::Forward(crossing),
            // A port connected to itself would be both ends of one connection.
            (None, Op::Request) if from == to || !sender.may_request() => Fate::NoRoute,
            (None, Op::Request) => {
                let Some(forward) = open(member, from, to, kind, self.limit) else { return Fate::NoRoute };
                let backward = forward.reverse();
                member.crossings.insert((from.port, to), forward.clone());
                if let Some(member) = members.get_mut(&to.cid) {
                    member.crossings.insert((to.port, from), backward);
                }
                Fate::Forward(forward)
            }
            // A reset is never answered.
            (None, Op::Reset) => Fate::Drop,
            (None, _) => Fate::NoRoute,
        }
    }

    /// Resets a connection at both ends because its sender has violated the protocol or used up its memory.
    fn reset_violator(&self, crossing: &Crossing, wrong: Wrong) {
        if let Some(stack) = self.end(crossing) {
            stack.count_wrong(&Key { port: crossing.to().port, peer: crossing.from() }, wrong);
        }
    }

    /// Closes a connection and resets it at both ends. Returns the sender's stack, unless the connection was closed already.
    fn end(&self, crossing: &Crossing) -> Option<Arc<Stack<S>>> {
        if crossing.pair.closed.swap(true, Ordering::AcqRel) {
            return None;
        }
        let ends = [crossing.reverse(), crossing.clone()].map(|crossing| {
            let mut members = self.members.lock();
            if let Some(member) = members.get_mut(&crossing.from().cid) {
                remove(member, &crossing);
            }
            let stack = members.get(&crossing.to().cid).and_then(|member| member.stack.upgrade());
            (crossing, stack)
        });
        let [(_, sender), _] = &ends;
        let sender = sender.clone();
        for (crossing, stack) in ends {
            if let Some(stack) = stack {
                stack.reset_crossing(crossing);
            }
        }
        sender
    }

    /// Buffered data has been delivered: the sender may get more credit.
    pub(crate) fn moved(&self, crossing: &Crossing) {
        if crossing.pair.closed.load(Ordering::Acquire) || !crossing.is_due() {
            return;
        }
        let stack = self.members.lock().get(&crossing.from().cid).and_then(|member| member.stack.upgrade());
        if let Some(stack) = stack {
            stack.send_credit_update(crossing);
        }
    }
}

impl<S: Side> Stack<S> {
    /// Sends the guest that `crossing` leads to a reset for its connection.
    fn reset_crossing(&self, crossing: Crossing) {
        let reset = crossing.header(Op::Reset);
        let owner = PacketOwner::Crossing(crossing);
        if !self.sender.forget(&owner) {
            self.effect(self.sender.send_control(Some(&owner), reset));
        }
    }

    /// Sends the guest that sends on `crossing` a credit update.
    fn send_credit_update(&self, crossing: &Crossing) {
        let reverse = crossing.reverse();
        let update = reverse.header(Op::CreditUpdate);
        self.effect(self.sender.send_control(Some(&PacketOwner::Crossing(reverse)), update));
    }
}

/// Opens a connection that a guest requests. Returns `None` if a limit is reached.
fn open<S: Side>(member: &mut Member<S>, from: Addr, to: Addr, kind: u16, limit: usize) -> Option<Crossing> {
    let slot = RequestSlot::of(&member.requested, limit)?;
    let account = match member.parts.get(&to.cid).and_then(Weak::upgrade) {
        Some(account) => account,
        None => {
            let account = member.account.part();
            // `parts` holds at most one entry per guest ever requested.
            member.parts.insert(to.cid, Arc::downgrade(&account));
            account
        }
    };
    let pair = Pair {
        initiator: from,
        responder: to,
        kind,
        forward: Direction::default(),
        backward: Direction::default(),
        closed: AtomicBool::new(false),
        _opened: account.open()?,
        account,
        _slot: slot,
    };
    Some(Crossing { pair: Arc::new(pair), is_backward: false })
}

/// Removes a connection from its sender's table, unless the entry belongs to a newer connection.
fn remove<S: Side>(member: &mut Member<S>, crossing: &Crossing) {
    let key = (crossing.from().port, crossing.to());
    if member.crossings.get(&key).is_some_and(|there| Arc::ptr_eq(&there.pair, &crossing.pair)) {
        member.crossings.remove(&key);
    }
}

fn share_group(one: &[String], other: &[String]) -> bool {
    one.iter().any(|group| other.contains(group))
}

/// Returns the stacks of both guests if `from` may send to `to` and `to` is running.
fn route<S: Side>(members: &HashMap<u64, Member<S>>, from: u64, to: u64) -> Option<[Arc<Stack<S>>; 2]> {
    let (from, to) = (members.get(&from)?, members.get(&to)?);
    if !share_group(&from.groups, &to.groups) {
        return None;
    }
    Some([from.stack.upgrade()?, to.stack.upgrade()?]).filter(|[_, to]| to.is_running())
}
