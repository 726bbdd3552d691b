//! The packets that wait for the worker because they could not be sent directly. Used by `send.rs`, which keeps an [`Outbox`]
//! under a lock.
//!
//! Connections are served by deficit round robin, counted in bytes: first by group (the guest), then by connection. Control
//! packets (all but data and shutdown) come before the data of their group, and count as part of its turn: a guest that opens and
//! resets connections as fast as it can holds up nobody else's data.

use crate::{
    account::{Charge, FLOW, PACKET},
    sync::AtomicUsize,
    types::MAX_PACKET,
};
use ringroad_wire::vsock_hdr::{Op, TYPE_STREAM, VsockHdr};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Bytes a connection may send per turn.
const QUANTUM: usize = MAX_PACKET;
/// Bytes that a control packet counts: it takes a receive buffer, which holds 4 KiB with the usual drivers.
const CONTROL: usize = 4 << 10;
/// Control packets that may overtake the data of another group for which there is no room, until that group's turn ends.
const OVERTAKING: usize = QUANTUM / CONTROL;
/// Answers to packets of no connection that may wait. Answers beyond that are dropped.
const UNOWNED: usize = 1024;
/// Resets of connections that may wait: a peer that takes nothing while one connection after another is reset misses the later
/// resets. A group that has less than its share of them may add more.
const RESETS: usize = 1 << 16;

/// The owner of packets: a connection.
pub trait Owner: Clone {
    /// Identifies the owner among all that exist.
    fn key(&self) -> usize;

    /// Completes a header just before it is written to the ring, so that an older credit value never follows a newer one.
    fn stamp(&self, header: &mut VsockHdr);

    /// Number of its bytes in the outbox.
    fn queued(&self) -> &AtomicUsize;

    /// Charges memory for a packet to be queued. Returns `None` if the limit is reached.
    fn charge(&self, _bytes: usize) -> Option<Charge> {
        Some(Charge::none())
    }

    /// The group that the owner belongs to. Owners of one group share one turn.
    fn group(&self) -> u64 {
        0
    }
}

/// A data packet in the outbox.
pub(crate) struct Packet {
    pub header: VsockHdr,
    pub data: Vec<u8>,
    /// Bytes of it already sent.
    pub done: usize,
    pub charge: Charge,
}

/// A control packet in the outbox.
pub(crate) struct Control<O> {
    pub owner: Option<O>,
    pub header: VsockHdr,
    pub group: GroupId,
    place: u64,
}

/// The queued packets of one owner.
struct Flow<O> {
    owner: O,
    packets: VecDeque<Packet>,
    deficit: usize,
    /// Position among the turns of its group.
    place: u64,
}

/// Identifies a group. `None`: answers to packets of no connection, which the peer itself has caused.
pub(crate) type GroupId = Option<u64>;

/// Packets that share a turn.
struct Group<O> {
    /// Control packets by position.
    control: BTreeMap<u64, (Option<O>, VsockHdr)>,
    /// How many of them have no owner.
    unowned: usize,
    /// The flows with data: key by position.
    turns: BTreeMap<u64, usize>,
    deficit: usize,
    /// Position among the groups.
    place: u64,
}

/// The packets that wait for the worker. Positions are increasing numbers: the lowest is served next, and entries can be removed
/// without a search.
pub(crate) struct Outbox<O> {
    /// Position among the control packets of a group by owner and operation. One packet of each operation is enough, as its credit
    /// fields are filled in when it is sent.
    pending: HashMap<(usize, u16), u64>,
    flows: HashMap<usize, Flow<O>>,
    groups: HashMap<GroupId, Group<O>>,
    turns: BTreeMap<u64, GroupId>,
    /// Resets in all groups.
    resets: usize,
    /// Control packets that have overtaken data since a group's turn with data ended.
    overtaken: usize,
    place: u64,
}

/// The next packet to move.
pub(crate) enum Turn<O> {
    Control { packet: Control<O>, overtakes: bool },
    Data { owner: O, packet: Packet, allowance: usize },
}

impl<O: Owner> Outbox<O> {
    pub(crate) fn new() -> Self {
        Outbox {
            pending: HashMap::new(),
            flows: HashMap::new(),
            groups: HashMap::new(),
            turns: BTreeMap::new(),
            resets: 0,
            overtaken: 0,
            place: 0,
        }
    }

    /// Returns a position behind all others.
    fn last(&mut self) -> u64 {
        self.place += 1;
        self.place
    }

    /// Returns a group; a new one gets the last turn.
    fn group(&mut self, id: GroupId) -> &mut Group<O> {
        let place = self.last();
        self.groups.entry(id).or_insert_with(|| {
            self.turns.insert(place, id);
            Group { control: BTreeMap::new(), unowned: 0, turns: BTreeMap::new(), deficit: 0, place }
        })
    }

    /// Adds a data packet. Returns `false` if it was merged with the packet before it: small packets of a stream are merged,
    /// because their number has no limit of its own.
    pub(crate) fn push(&mut self, owner: &O, mut packet: Packet) -> bool {
        let key = owner.key();
        let place = self.last();
        let Some(flow) = self.flows.get_mut(&key) else {
            self.group(Some(owner.group())).turns.insert(place, key);
            let flow = Flow { owner: owner.clone(), packets: VecDeque::from([packet]), deficit: 0, place };
            self.flows.insert(key, flow);
            return true;
        };
        let data = |header: &VsockHdr| header.kind == TYPE_STREAM && header.op == Op::Data as u16;
        if let Some(last) = flow.packets.back_mut()
            && data(&last.header)
            && data(&packet.header)
            && last.data.len() + packet.data.len() <= MAX_PACKET
        {
            last.data.extend_from_slice(&packet.data);
            packet.charge.shrink(PACKET + FLOW);
            last.charge.absorb(packet.charge);
            return false;
        }
        packet.charge.shrink(FLOW);
        flow.packets.push_back(packet);
        true
    }

    /// Adds a control packet to a group. Returns the number of packets dropped as an error: 0 if the same operation is queued
    /// already, 1 if the limit is reached.
    pub(crate) fn push_control(&mut self, owner: Option<&O>, group: GroupId, header: VsockHdr) -> Result<(), u64> {
        match owner {
            Some(owner) if self.pending.contains_key(&(owner.key(), header.op)) => return Err(0),
            None if self.is_full(group) => return Err(1),
            _ => {}
        }
        let place = self.last();
        self.insert(Control { owner: owner.cloned(), header, group, place });
        Ok(())
    }

    /// Returns whether a group may add no more packets without an owner.
    fn is_full(&self, id: GroupId) -> bool {
        let waiting = self.groups.get(&id).map_or(0, |group| group.unowned);
        match id {
            None => waiting >= UNOWNED,
            Some(_) => self.resets >= RESETS && waiting >= RESETS / self.groups.len().max(1),
        }
    }

    fn insert(&mut self, packet: Control<O>) {
        let Control { owner, header, group: id, place } = packet;
        match &owner {
            Some(owner) => drop(self.pending.insert((owner.key(), header.op), place)),
            None => self.resets += usize::from(id.is_some()),
        }
        let group = self.group(id);
        group.unowned += usize::from(owner.is_none());
        group.control.insert(place, (owner, header));
    }

    /// Returns the group whose turn it is. `has_room` unset: there is no room for data, so it is a group with control packets that
    /// may overtake.
    fn turn(&self, has_room: bool) -> Option<GroupId> {
        if has_room {
            return self.turns.first_key_value().map(|(_, &id)| id);
        }
        let has_control = |id: &&GroupId| self.groups.get(*id).is_some_and(|group| !group.control.is_empty());
        self.turns.values().find(has_control).copied().filter(|_| self.overtaken < OVERTAKING)
    }

    /// Takes out the next packet. `has_room` unset: there is no room for data; only control packets are taken.
    pub(crate) fn next(&mut self, has_room: bool) -> Option<Turn<O>> {
        let id = self.turn(has_room)?;
        let group = self.groups.get_mut(&id)?;
        if group.deficit == 0 {
            group.deficit = QUANTUM;
        }
        if let Some((place, (owner, header))) = group.control.pop_first() {
            match &owner {
                Some(owner) => drop(self.pending.remove(&(owner.key(), header.op))),
                None => {
                    group.unowned = group.unowned.saturating_sub(1);
                    self.resets = self.resets.saturating_sub(usize::from(id.is_some()));
                }
            }
            return Some(Turn::Control { packet: Control { owner, header, group: id, place }, overtakes: !has_room });
        }
        let flow = self.flows.get_mut(group.turns.first_key_value()?.1)?;
        if flow.deficit == 0 {
            flow.deficit = QUANTUM;
        }
        let packet = flow.packets.pop_front()?;
        Some(Turn::Data { owner: flow.owner.clone(), packet, allowance: flow.deficit.min(group.deficit) })
    }

    /// A control packet was sent.
    pub(crate) fn sent(&mut self, group: GroupId, overtakes: bool) {
        self.overtaken += usize::from(overtakes);
        self.spend(group, CONTROL);
    }

    /// Puts a control packet back at its old position, ahead of the others of its group. Returns `false` if the same operation has
    /// been queued in the meantime.
    pub(crate) fn push_back(&mut self, packet: Control<O>) -> bool {
        let id = packet.group;
        let pending = |owner: &O| self.pending.contains_key(&(owner.key(), packet.header.op));
        let is_last = !packet.owner.as_ref().is_some_and(pending);
        if is_last {
            self.insert(packet);
        }
        self.remove_empty(id);
        is_last
    }

    /// Counts what a group has sent. Returns whether its turn has ended.
    fn spend(&mut self, id: GroupId, used: usize) -> bool {
        let last = self.last();
        let Some(group) = self.groups.get_mut(&id) else { return true };
        group.deficit = group.deficit.saturating_sub(used);
        let is_done = group.deficit == 0;
        if is_done {
            self.turns.remove(&group.place);
            self.turns.insert(last, id);
            group.place = last;
        }
        self.remove_empty(id) || is_done
    }

    /// Removes a group that has no packets. Returns whether it did.
    fn remove_empty(&mut self, id: GroupId) -> bool {
        let Some(group) = self.groups.get(&id).filter(|group| group.control.is_empty() && group.turns.is_empty())
        else {
            return false;
        };
        self.turns.remove(&group.place);
        self.groups.remove(&id);
        true
    }

    /// Ends a packet's turn; `left` is the packet if it was not sent completely. Returns whether the packet is done with.
    pub(crate) fn moved(&mut self, owner: &O, used: usize, left: Option<Packet>) -> bool {
        let (key, last) = (owner.key(), self.last());
        let Some(flow) = self.flows.get_mut(&key) else {
            // The owner was removed in the meantime, with all its packets but this one.
            return true;
        };
        let over = left.is_none();
        flow.deficit = flow.deficit.saturating_sub(used);
        left.into_iter().for_each(|packet| flow.packets.push_front(packet));
        let (is_empty, is_done) = (flow.packets.is_empty(), flow.deficit == 0);
        let id = Some(owner.group());
        if is_done
            && !is_empty
            && let Some(group) = self.groups.get_mut(&id)
        {
            group.turns.remove(&flow.place);
            group.turns.insert(last, key);
            flow.place = last;
        }
        let is_over = self.spend(id, used);
        if is_empty {
            self.remove(owner);
        }
        if is_over || is_empty {
            self.overtaken = 0;
        }
        over
    }

    /// Removes an owner's data packets; returns how many.
    fn remove(&mut self, owner: &O) -> usize {
        let Some(flow) = self.flows.remove(&owner.key()) else { return 0 };
        let id = Some(owner.group());
        if let Some(group) = self.groups.get_mut(&id) {
            group.turns.remove(&flow.place);
        }
        self.remove_empty(id);
        flow.packets.len()
    }

    /// Removes all packets of an owner but resets. Returns how many, and whether its request was among them.
    pub(crate) fn forget(&mut self, owner: &O) -> (usize, bool) {
        let (mut count, mut requested) = (self.remove(owner), false);
        let id = Some(owner.group());
        for op in 0..=Op::CreditRequest as u16 {
            if let Some(place) = self.pending.remove(&(owner.key(), op)) {
                self.groups.get_mut(&id).map(|group| group.control.remove(&place));
                requested |= op == Op::Request as u16;
                count += 1;
            }
        }
        self.remove_empty(id);
        (count, requested)
    }

    /// Returns the number of data packets of an owner.
    pub(crate) fn packets_of(&self, owner: &O) -> usize {
        self.flows.get(&owner.key()).map_or(0, |flow| flow.packets.len())
    }
}
