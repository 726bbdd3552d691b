//! Guests that talk to each other: a packet of one goes from its ring straight into the other's, with one copy. What each
//! connection may have under way is checked here, as the guests' word alone would let one fill our memory.
//!
//! Who asks for a connection pays for all that waits in our memory because of it, in both directions ([`Account`]). A guest is
//! told of as much room at the other end as there is, and no more than may wait here: so much can always be carried. Where that
//! is the smaller of the two, it is told of more as soon as what waited has gone.

use crate::{
    Account, Addr, Charge, Key, Owner, Payload, Side, Stack,
    account::Opened,
    connection::{Wrong, further},
    send::MAX_PACKET,
    stack::Who,
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

/// Room that a guest is believed to have for a connection, at most: what may wait in our memory if it does not take it.
const ROOM: u32 = 1 << 20;
/// Messages that wait in our memory, at most, however short they are.
const MESSAGES: usize = 1 << 16;

/// A connection between two guests, or of a guest with itself.
struct Pair {
    /// Who has asked, and who was asked.
    asker: Addr,
    asked: Addr,
    kind: u16,
    /// What each of them sends.
    forth: Way,
    back: Way,
    /// It has ended: what comes now belongs to no connection.
    over: AtomicBool,
    /// What of the asker's memory is for the other guest.
    account: Arc<Account>,
    _opened: Opened,
    _ticket: Ticket,
}

/// What one end sends to the other.
#[derive(Default)]
struct Way {
    /// What the receiver of it says of its room.
    buf_alloc: AtomicU32,
    fwd_cnt: AtomicU32,
    /// Bytes sent.
    tx_cnt: AtomicU32,
    /// Up to where the sender was told that it may send, modulo 2³².
    told: AtomicU32,
    /// Flags of OP_SHUTDOWN that were passed on.
    shut: AtomicU32,
    queued: AtomicUsize,
}

/// One direction of a connection between two guests.
pub(crate) struct Crossing {
    pair: Arc<Pair>,
    /// From who was asked to who has asked.
    is_back: bool,
}

impl Clone for Crossing {
    fn clone(&self) -> Self {
        Crossing { pair: self.pair.clone(), is_back: self.is_back }
    }
}

/// What a sender may be told of its room.
struct Grant {
    /// The receiver's count of what it has taken, and the room beyond that.
    fwd_cnt: u32,
    window: u32,
    /// Up to where that is, where the sender believes it to be, and where it would be but for our memory.
    edge: u32,
    told: u32,
    desired: u32,
}

impl Crossing {
    fn from(&self) -> Addr {
        if self.is_back { self.pair.asked } else { self.pair.asker }
    }

    fn to(&self) -> Addr {
        if self.is_back { self.pair.asker } else { self.pair.asked }
    }

    fn way(&self) -> &Way {
        if self.is_back { &self.pair.back } else { &self.pair.forth }
    }

    /// The other direction.
    fn reverse(&self) -> Crossing {
        Crossing { pair: self.pair.clone(), is_back: !self.is_back }
    }

    /// What its sender may be told now.
    fn grant(&self) -> Grant {
        let way = self.way();
        let (buf_alloc, fwd_cnt) = (way.buf_alloc.load(Ordering::Acquire), way.fwd_cnt.load(Ordering::Acquire));
        let allowance = u32::try_from(self.pair.account.allowance()).unwrap_or(ROOM).min(ROOM);
        let gone = way.tx_cnt.load(Ordering::Acquire).wrapping_sub(self.waiting());
        // What has gone to the receiver counts as nothing here; it may say that it has taken what was never sent.
        let taken = i64::from(gone.wrapping_sub(fwd_cnt) as i32);
        let window = (taken + i64::from(allowance)).clamp(0, buf_alloc.into()) as u32;
        let desired = fwd_cnt.wrapping_add(buf_alloc);
        let told = way.told.load(Ordering::Acquire);
        // Never less than before, unless it is the receiver who says so: the sender may have used it already.
        let mut edge = further(fwd_cnt.wrapping_add(window), told);
        if further(edge, desired) == edge {
            edge = desired;
        }
        Grant { fwd_cnt, window: edge.wrapping_sub(fwd_cnt), edge, told, desired }
    }

    /// Bytes of it that wait in our memory.
    fn waiting(&self) -> u32 {
        self.way().queued.load(crate::sync::Ordering::Relaxed) as u32
    }

    /// Whether its sender waits, or soon will, for room that is there and that only our memory has kept from it.
    fn is_due(&self) -> bool {
        let Grant { edge, told, desired, .. } = self.grant();
        let gain = edge.wrapping_sub(told) as i32;
        if told == desired || gain <= 0 {
            return false;
        }
        let allowance = u32::try_from(self.pair.account.allowance()).unwrap_or(ROOM).min(ROOM);
        let believed = told.wrapping_sub(self.way().tx_cnt.load(Ordering::Acquire));
        // A message may need more room than half of what there can be.
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
        // There are no objects at odd addresses.
        Arc::as_ptr(&self.pair) as usize | usize::from(self.is_back)
    }

    fn stamp(&self, header: &mut VsockHdr) {
        // The last word about the other direction, also in packets that waited.
        let reverse = self.reverse();
        let grant = reverse.grant();
        reverse.way().told.store(grant.edge, Ordering::Release);
        header.buf_alloc = grant.window;
        header.fwd_cnt = grant.fwd_cnt;
    }

    fn queued(&self) -> &AtomicUsize {
        &self.way().queued
    }

    fn charge(&self, bytes: usize) -> Option<Charge> {
        self.pair.account.charge(bytes)
    }

    fn group(&self) -> u64 {
        self.from().cid
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

struct Member<S: Side> {
    stack: Weak<Stack<S>>,
    groups: Vec<String>,
    asked: Arc<Count>,
    account: Arc<Account>,
    /// What of it is for each other guest, as long as there are connections.
    parts: HashMap<u64, Weak<Account>>,
    /// What it sends, by its port and where it goes: both directions of each connection are in their senders' lists.
    crossings: HashMap<(u32, Addr), Crossing>,
}

/// The guests that may talk to each other.
pub struct Hub<S: Side> {
    members: Mutex<HashMap<u64, Member<S>>>,
    /// Connections that each guest may ask others for at once.
    limit: usize,
}

/// What becomes of a packet from one guest to another.
enum Fate {
    /// There is no way there, and its sender should hear of it.
    None,
    /// It needs no answer.
    Nothing,
    /// It goes on.
    Goes(Crossing),
    /// It ends this connection, for both.
    Cut(Crossing, Wrong),
}

impl<S: Side> Hub<S> {
    /// Nobody yet. `connections`: how many each guest may ask others for at once, so that none uses up what others need.
    pub fn new(connections: usize) -> Arc<Hub<S>> {
        Arc::new(Hub { members: Mutex::default(), limit: connections })
    }

    /// A guest that may talk to all with which it has a group in common. Called again, it is in these groups instead; its
    /// connections with guests that it has nothing in common with any more are over.
    pub fn join(self: &Arc<Self>, stack: &Arc<Stack<S>>, groups: Vec<String>) {
        stack.join(self.clone());
        let cid = stack.peer().unwrap_or_default();
        let over: Vec<_> = {
            let mut members = self.members.lock();
            let known = members.get_mut(&cid).filter(|member| member.stack.as_ptr() == Arc::as_ptr(stack));
            match known {
                Some(member) => member.groups = groups,
                None => {
                    let member = Member {
                        stack: Arc::downgrade(stack),
                        groups,
                        asked: Arc::default(),
                        account: stack.crossings.clone(),
                        parts: HashMap::new(),
                        crossings: HashMap::new(),
                    };
                    members.insert(cid, member);
                }
            }
            let Some(member) = members.get(&cid) else { return };
            let apart = |to: &Addr| members.get(&to.cid).is_none_or(|to| !have_common(&member.groups, &to.groups));
            member.crossings.values().filter(|crossing| apart(&crossing.to())).cloned().collect()
        };
        over.iter().for_each(|crossing| _ = self.end(crossing));
    }

    /// A guest is gone, or has lost its state: others hear that their connections with it are over.
    pub(crate) fn left(&self, cid: u64) {
        let own = match self.members.lock().get_mut(&cid) {
            Some(member) => std::mem::take(&mut member.crossings),
            None => return,
        };
        // One by one, so that others need not wait for all of them.
        for crossing in own.into_values() {
            if crossing.pair.over.swap(true, Ordering::AcqRel) {
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

    /// Carries a packet from one guest to another. `false`: it has no way there, and its sender should hear of it.
    pub(crate) fn carry(&self, packet: &VsockHdr, payload: &mut Payload<'_>) -> bool {
        let from = Addr { cid: packet.src_cid, port: packet.src_port };
        let to = Addr { cid: packet.dst_cid, port: packet.dst_port };
        let Some(op) = Op::new(packet.op) else { return false };
        let (fate, stacks) = {
            let mut members = self.members.lock();
            let Some([sender, stack]) = way(&members, from.cid, to.cid) else { return false };
            (self.fate(&mut members, &sender, (from, to), op, packet.kind), [sender, stack])
        };
        let [sender, stack] = stacks;
        let crossing = match fate {
            Fate::None => return false,
            Fate::Nothing => return true,
            Fate::Goes(crossing) => crossing,
            Fate::Cut(crossing, wrong) => {
                self.cut(&crossing, wrong);
                return true;
            }
        };
        let reverse = crossing.reverse();
        reverse.way().buf_alloc.store(packet.buf_alloc.min(ROOM), Ordering::Release);
        reverse.way().fwd_cnt.store(packet.fwd_cnt, Ordering::Release);
        let who = Who::Crossing(crossing.clone());
        let header = VsockHdr { len: 0, ..*packet };
        let effect = match op {
            Op::Data => {
                let way = crossing.way();
                let len = payload.len() as u32;
                let under_way = way.tx_cnt.load(Ordering::Relaxed).wrapping_sub(way.fwd_cnt.load(Ordering::Acquire));
                let credit = way.buf_alloc.load(Ordering::Acquire).saturating_sub(under_way);
                // The receiver's word alone would let the two of them fill our memory.
                let credit = credit.min(ROOM.saturating_sub(crossing.waiting()));
                if len > credit {
                    self.cut(&crossing, Wrong::Credit { len, credit });
                    return true;
                }
                if stack.sender.packets(&who) >= MESSAGES {
                    self.cut(&crossing, Wrong::Messages { limit: MESSAGES as u32 });
                    return true;
                }
                way.tx_cnt.fetch_add(len, Ordering::Relaxed);
                let effect = stack.sender.send(&who, header, payload, ROOM as usize).1;
                if effect.refused {
                    stack.effect(effect);
                    self.cut(&crossing, Wrong::Memory);
                    return true;
                }
                if crossing.is_due() {
                    sender.tell(&crossing);
                }
                effect
            }
            Op::Shutdown => {
                let flags = packet.flags & (wire::SHUTDOWN_SEND | wire::SHUTDOWN_RECEIVE);
                if flags & !crossing.way().shut.fetch_or(flags, Ordering::Relaxed) == 0 {
                    // Nothing new.
                    return true;
                }
                let effect = stack.sender.send(&who, header, &mut Payload::empty(), 0).1;
                if effect.refused {
                    self.cut(&crossing, Wrong::Memory);
                    return true;
                }
                effect
            }
            Op::Reset => {
                // What was on its way to the sender is of no use any more.
                let _ = sender.sender.forget(&Who::Crossing(reverse));
                if stack.sender.forget(&who) {
                    // Who has not heard of the connection need not hear of its end.
                    return true;
                }
                stack.sender.send_control(Some(&who), header)
            }
            _ => stack.sender.send_control(Some(&who), header),
        };
        stack.effect(effect);
        true
    }

    /// What is to be done with a packet, as the connections are now.
    fn fate(
        &self,
        members: &mut HashMap<u64, Member<S>>,
        sender: &Arc<Stack<S>>,
        (from, to): (Addr, Addr),
        op: Op,
        kind: u16,
    ) -> Fate {
        let Some(member) = members.get_mut(&from.cid) else { return Fate::None };
        let there =
            member.crossings.get(&(from.port, to)).filter(|crossing| !crossing.pair.over.load(Ordering::Acquire));
        match (there.cloned(), op) {
            (Some(crossing), Op::Request) => Fate::Cut(crossing, Wrong::SecondRequest),
            (Some(crossing), Op::Reset) => {
                crossing.pair.over.store(true, Ordering::Release);
                remove(member, &crossing);
                if let Some(member) = members.get_mut(&to.cid) {
                    remove(member, &crossing.reverse());
                }
                Fate::Goes(crossing)
            }
            (Some(crossing), _) => Fate::Goes(crossing),
            // A port that is connected with itself would be both ends in one.
            (None, Op::Request) if from == to || !sender.may_ask() => Fate::None,
            (None, Op::Request) => {
                let Some(forth) = open(member, from, to, kind, self.limit) else { return Fate::None };
                let back = forth.reverse();
                member.crossings.insert((from.port, to), forth.clone());
                if let Some(member) = members.get_mut(&to.cid) {
                    member.crossings.insert((to.port, from), back);
                }
                Fate::Goes(forth)
            }
            // The last word about a connection that is not there any more needs no answer.
            (None, Op::Reset) => Fate::Nothing,
            (None, _) => Fate::None,
        }
    }

    /// Ends a connection whose sender has broken its rules, or has no more memory, for both.
    fn cut(&self, crossing: &Crossing, wrong: Wrong) {
        if let Some(stack) = self.end(crossing) {
            stack.count_wrong(&Key { port: crossing.to().port, peer: crossing.from() }, wrong);
        }
    }

    /// Ends a connection for both; returns its sender, unless it was over already.
    fn end(&self, crossing: &Crossing) -> Option<Arc<Stack<S>>> {
        if crossing.pair.over.swap(true, Ordering::AcqRel) {
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

    /// Something that waited has gone to its receiver: its sender may perhaps send more.
    pub(crate) fn moved(&self, crossing: &Crossing) {
        if crossing.pair.over.load(Ordering::Acquire) || !crossing.is_due() {
            return;
        }
        let stack = self.members.lock().get(&crossing.from().cid).and_then(|member| member.stack.upgrade());
        if let Some(stack) = stack {
            stack.tell(crossing);
        }
    }
}

impl<S: Side> Stack<S> {
    /// Tells the guest that its connection with another one is over: `crossing` leads to it.
    fn reset_crossing(&self, crossing: Crossing) {
        let reset = crossing.header(Op::Reset);
        let who = Who::Crossing(crossing);
        if !self.sender.forget(&who) {
            self.effect(self.sender.send_control(Some(&who), reset));
        }
    }

    /// Tells the guest, who sends on this crossing, how much room there is.
    fn tell(&self, crossing: &Crossing) {
        let reverse = crossing.reverse();
        let update = reverse.header(Op::CreditUpdate);
        self.effect(self.sender.send_control(Some(&Who::Crossing(reverse)), update));
    }
}

/// A connection that a guest asks for; `None`: it may have no more of them.
fn open<S: Side>(member: &mut Member<S>, from: Addr, to: Addr, kind: u16, limit: usize) -> Option<Crossing> {
    let ticket = Ticket::of(&member.asked, limit)?;
    let account = match member.parts.get(&to.cid).and_then(Weak::upgrade) {
        Some(account) => account,
        None => {
            let account = member.account.part();
            // There are as many as guests that it has ever asked.
            member.parts.insert(to.cid, Arc::downgrade(&account));
            account
        }
    };
    let pair = Pair {
        asker: from,
        asked: to,
        kind,
        forth: Way::default(),
        back: Way::default(),
        over: AtomicBool::new(false),
        _opened: account.open()?,
        account,
        _ticket: ticket,
    };
    Some(Crossing { pair: Arc::new(pair), is_back: false })
}

/// Removes a connection from its sender's list, if it is there and not another one by now.
fn remove<S: Side>(member: &mut Member<S>, crossing: &Crossing) {
    let key = (crossing.from().port, crossing.to());
    if member.crossings.get(&key).is_some_and(|there| Arc::ptr_eq(&there.pair, &crossing.pair)) {
        member.crossings.remove(&key);
    }
}

fn have_common(one: &[String], other: &[String]) -> bool {
    one.iter().any(|group| other.contains(group))
}

/// Two guests, if `from` may talk to `to` and that one runs.
fn way<S: Side>(members: &HashMap<u64, Member<S>>, from: u64, to: u64) -> Option<[Arc<Stack<S>>; 2]> {
    let (from, to) = (members.get(&from)?, members.get(&to)?);
    if !have_common(&from.groups, &to.groups) {
        return None;
    }
    Some([from.stack.upgrade()?, to.stack.upgrade()?]).filter(|[_, to]| to.is_running())
}
