//! The packets that wait for the worker because they could not be sent directly. Used by `send.rs`, which keeps an [`Outbox`]
//! under a lock.
//!
//! Connections are served by deficit round robin, counted in bytes: first by group (the guest), then by connection. Control
//! packets (all but data and shutdown) come before all data.

use crate::{
    account::{Charge, FLOW, PACKET},
    sync::AtomicUsize,
    types::MAX_PACKET,
};
use ringroad_wire::vsock_hdr::{Op, TYPE_STREAM, VsockHdr};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Bytes a connection may send per turn.
const QUANTUM: usize = MAX_PACKET;

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

/// The queued packets of one owner.
struct Flow<O> {
    owner: O,
    packets: VecDeque<Packet>,
    deficit: usize,
    /// Position among the turns of its group.
    place: u64,
}

/// The flows of owners that share a turn: key by position.
struct Group {
    turns: BTreeMap<u64, usize>,
    deficit: usize,
    /// Position among the groups.
    place: u64,
}

/// The packets that wait for the worker. Positions are increasing numbers: the lowest is served next, and entries can be removed
/// without a search.
pub(crate) struct Outbox<O> {
    control: BTreeMap<u64, (Option<O>, VsockHdr)>,
    unowned: usize,
    /// Position in `control` by owner and operation. One packet of each operation is enough, as its credit fields are filled in
    /// when it is sent.
    pending: HashMap<(usize, u16), u64>,
    flows: HashMap<usize, Flow<O>>,
    groups: HashMap<u64, Group>,
    turns: BTreeMap<u64, u64>,
    place: u64,
}

/// The next packet to move.
pub(crate) enum Turn<O> {
    Control { place: u64, owner: Option<O>, header: VsockHdr },
    Data { owner: O, packet: Packet, allowance: usize },
}

impl<O: Owner> Outbox<O> {
    pub(crate) fn new() -> Self {
        Outbox {
            control: BTreeMap::new(),
            unowned: 0,
            pending: HashMap::new(),
            flows: HashMap::new(),
            groups: HashMap::new(),
            turns: BTreeMap::new(),
            place: 0,
        }
    }

    /// Returns a position behind all others.
    fn last(&mut self) -> u64 {
        self.place += 1;
        self.place
    }

    /// Adds a data packet. Returns `false` if it was merged with the packet before it: small packets of a stream are merged,
    /// because their number has no limit of its own.
    pub(crate) fn push(&mut self, owner: &O, mut packet: Packet) -> bool {
        let key = owner.key();
        let place = self.last();
        let Some(flow) = self.flows.get_mut(&key) else {
            let group = self.groups.entry(owner.group()).or_insert_with(|| {
                self.turns.insert(place, owner.group());
                Group { turns: BTreeMap::new(), deficit: 0, place }
            });
            group.turns.insert(place, key);
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

    /// Adds a control packet. Returns the number of packets dropped as an error: 0 if the same operation is queued already, 1 if
    /// the limit is reached.
    pub(crate) fn push_control(&mut self, owner: Option<&O>, header: VsockHdr, limit: usize) -> Result<(), u64> {
        let place = self.last();
        match owner {
            Some(owner) => {
                let key = (owner.key(), header.op);
                if self.pending.contains_key(&key) {
                    return Err(0);
                }
                self.pending.insert(key, place);
            }
            None if self.unowned >= limit => return Err(1),
            None => self.unowned += 1,
        }
        self.control.insert(place, (owner.cloned(), header));
        Ok(())
    }

    /// Puts a control packet back at its old position, ahead of all others. Returns `false` if the same operation has been queued
    /// in the meantime.
    pub(crate) fn push_back(&mut self, place: u64, owner: Option<O>, header: VsockHdr) -> bool {
        match &owner {
            Some(owner) => {
                let key = (owner.key(), header.op);
                if self.pending.contains_key(&key) {
                    return false;
                }
                self.pending.insert(key, place);
            }
            None => self.unowned += 1,
        }
        self.control.insert(place, (owner, header));
        true
    }

    pub(crate) fn next(&mut self) -> Option<Turn<O>> {
        if let Some((place, (owner, header))) = self.control.pop_first() {
            match &owner {
                Some(owner) => drop(self.pending.remove(&(owner.key(), header.op))),
                None => self.unowned = self.unowned.saturating_sub(1),
            }
            return Some(Turn::Control { place, owner, header });
        }
        let group = self.groups.get_mut(self.turns.first_key_value()?.1)?;
        if group.deficit == 0 {
            group.deficit = QUANTUM;
        }
        let flow = self.flows.get_mut(group.turns.first_key_value()?.1)?;
        if flow.deficit == 0 {
            flow.deficit = QUANTUM;
        }
        let packet = flow.packets.pop_front()?;
        Some(Turn::Data { owner: flow.owner.clone(), packet, allowance: flow.deficit.min(group.deficit) })
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
        if let Some(group) = self.groups.get_mut(&owner.group()) {
            if is_done && !is_empty {
                group.turns.remove(&flow.place);
                group.turns.insert(last, key);
                flow.place = last;
            }
            group.deficit = group.deficit.saturating_sub(used);
            if group.deficit == 0 {
                self.turns.remove(&group.place);
                self.turns.insert(last, owner.group());
                group.place = last;
            }
        }
        if is_empty {
            self.remove(owner);
        }
        over
    }

    /// Removes an owner's data packets; returns how many.
    fn remove(&mut self, owner: &O) -> usize {
        let Some(flow) = self.flows.remove(&owner.key()) else { return 0 };
        if let Some(group) = self.groups.get_mut(&owner.group()) {
            group.turns.remove(&flow.place);
            if group.turns.is_empty() {
                self.turns.remove(&group.place);
                self.groups.remove(&owner.group());
            }
        }
        flow.packets.len()
    }

    /// Removes all packets of an owner but resets. Returns how many, and whether its request was among them.
    pub(crate) fn forget(&mut self, owner: &O) -> (usize, bool) {
        let (mut count, mut requested) = (self.remove(owner), false);
        for op in 0..=Op::CreditRequest as u16 {
            if let Some(place) = self.pending.remove(&(owner.key(), op)) {
                self.control.remove(&place);
                requested |= op == Op::Request as u16;
                count += 1;
            }
        }
        (count, requested)
    }

    /// Returns the number of data packets of an owner.
    pub(crate) fn packets_of(&self, owner: &O) -> usize {
        self.flows.get(&owner.key()).map_or(0, |flow| flow.packets.len())
    }
}
