//! Sending, in either of two ways. Directly: who has something to send puts it into the virtqueue himself. Queued: he leaves
//! it in an outbox, and a worker moves it.
//!
//! Directly is faster, and possible when nothing waits in the outbox, the ring has room and nobody else is at the ring (its
//! lock is only tried). All else is queued, so that packets of a connection keep their order: a packet can overtake another
//! one only while that one is in the outbox, and then nothing goes directly; and who moves packets has the ring's lock.
//!
//! The outbox serves connections in turn, by bytes (deficit round robin); what answers a peer or tells it of room goes before
//! all data and has descriptors of its own, so that it is never starved.

use crate::{
    Broken, Payload,
    account::{Charge, FLOW, PACKET},
    sync::{AtomicUsize, Mutex, Ordering},
};
use ringroad_mem::Span;
use ringroad_wire::vsock_hdr::{Op, TYPE_STREAM, VsockHdr};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    num::NonZeroUsize,
    ops::DerefMut,
    sync::atomic::{AtomicBool, AtomicU64},
};

/// The largest payload of a packet.
pub const MAX_PACKET: usize = 64 << 10;
/// What a connection may move before it is another one's turn.
const QUANTUM: usize = MAX_PACKET;
/// What a packet counts beside its payload.
const OVERHEAD: usize = 64;
/// After so many bytes the peer is shown what is there, though there is more.
const PUBLISH: usize = 32 << 10;
/// Answers to packets of no connection that may wait at once. A peer that provokes more gets no answer to the rest.
const UNOWNED: usize = 1024;
/// Together with resets of connections: a peer that takes nothing and has us reset one after the other hears no more of it.
const RESETS: usize = 1 << 16;
/// What a sender puts into the ring by itself, and what a connection moves in one turn, at most: buffers may be very small.
const PACKETS: usize = 128;
/// What the worker moves at once: others want to be served too.
const FLUSH_PACKETS: usize = 512;
const FLUSH_BYTES: usize = 1 << 20;

/// The ring that packets go to.
pub trait Link {
    /// How many bytes of payload the next buffer holds; `None`: there is no buffer. Data leave some for control.
    fn room(&mut self, control: bool) -> Result<Option<NonZeroUsize>, Broken>;

    /// Writes a packet into the next buffer, of which `room` has just said that it is there and has room for it: the header and
    /// the next `header.len` bytes.
    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>);

    /// Lets `read` write a payload of up to `most` bytes straight into the buffers of packets with this header, which `stamp`
    /// completes, leaving some for control. `read` is called once at most, with room for at least a byte, and says how much
    /// it has written. `None`: there is no buffer, and it was not called. Else the number of packets, and its answer.
    fn fill(
        &mut self,
        header: VsockHdr,
        stamp: &mut dyn FnMut(&mut VsockHdr),
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken>;

    /// Shows the peer what was put. Says whether it wants to be notified.
    fn publish(&mut self) -> bool;

    /// Asks the peer to notify us when there are buffers again. `true`: there are.
    fn await_room(&mut self) -> bool;
}

/// What packets belong to.
pub trait Owner: Clone {
    /// Tells it from all others that are alive.
    fn key(&self) -> usize;

    /// Completes a header at the last moment: room told earlier must not be told later.
    fn stamp(&self, header: &mut VsockHdr);

    /// How many bytes of it are in the outbox.
    fn queued(&self) -> &AtomicUsize;

    /// Takes memory for what is to wait; `None`: it may have no more.
    fn charge(&self, _bytes: usize) -> Option<Charge> {
        Some(Charge::none())
    }

    /// Whose it is. Those of one group share its turns.
    fn group(&self) -> u64 {
        0
    }
}

/// What is to be done after a call, without any lock.
#[derive(Debug, Default)]
#[must_use]
pub struct Effect {
    /// The peer wants to be notified.
    pub notify: bool,
    /// The worker has something to move.
    pub wake: bool,
    /// The worker could go on moving, but others want their turn.
    pub more: bool,
    /// There was no memory for what would have to wait: its connection should end.
    pub refused: bool,
    /// The peer has broken the ring.
    pub broken: Option<Broken>,
}

impl Effect {
    fn and(&mut self, notify: bool) {
        self.notify |= notify;
    }
}

/// Which way packets went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// Packets that their sender put into the ring.
    pub direct: u64,
    /// Packets that the worker did.
    pub queued: u64,
    /// Answers that were not sent, as too many waited.
    pub dropped: u64,
}

/// A packet in the outbox.
struct Packet {
    header: VsockHdr,
    data: Vec<u8>,
    /// How much of it has been sent.
    done: usize,
    charge: Charge,
}

/// Packets of one owner.
struct Flow<O> {
    owner: O,
    packets: VecDeque<Packet>,
    deficit: usize,
    /// Its place among those of its group.
    place: u64,
}

/// Owners that share their turns: places and keys of their flows.
struct Group {
    turns: BTreeMap<u64, usize>,
    deficit: usize,
    /// Its place among the groups.
    place: u64,
}

/// What waits for the worker. Places are numbers that go up: the lowest one is next, and what is over is found and removed
/// without looking at others.
struct Outbox<O> {
    control: BTreeMap<u64, (Option<O>, VsockHdr)>,
    unowned: usize,
    /// Owners and operations in `control`, and their places: one of each says it all, as it is completed at the last moment.
    pending: HashMap<(usize, u16), u64>,
    flows: HashMap<usize, Flow<O>>,
    groups: HashMap<u64, Group>,
    turns: BTreeMap<u64, u64>,
    place: u64,
    /// Packets of all flows.
    packets: usize,
}

/// What is to be moved next.
enum Turn<O> {
    Control { place: u64, owner: Option<O>, header: VsockHdr },
    Data { owner: O, packet: Packet, allowance: usize },
}

impl<O: Owner> Outbox<O> {
    fn new() -> Self {
        Outbox {
            control: BTreeMap::new(),
            unowned: 0,
            pending: HashMap::new(),
            flows: HashMap::new(),
            groups: HashMap::new(),
            turns: BTreeMap::new(),
            place: 0,
            packets: 0,
        }
    }

    /// The place behind all others.
    fn last(&mut self) -> u64 {
        self.place += 1;
        self.place
    }

    /// Adds a packet. Says whether it is one of its own: small ones of a stream are joined, as their number has no limit.
    fn push(&mut self, owner: &O, mut packet: Packet) -> bool {
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
            self.packets += 1;
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
        self.packets += 1;
        true
    }

    /// Adds a packet without payload. `None`: it says nothing new, or there are too many; how many were dropped.
    fn push_control(&mut self, owner: Option<&O>, header: VsockHdr, limit: usize) -> Result<(), u64> {
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

    /// Brings a packet without payload back to its place, which is before all others. `false`: another one has come meanwhile.
    fn push_back(&mut self, place: u64, owner: Option<O>, header: VsockHdr) -> bool {
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

    fn next(&mut self) -> Option<Turn<O>> {
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

    /// A packet's turn has come and gone, with what is left of it, if anything. Says whether the packet is over.
    fn moved(&mut self, owner: &O, used: usize, left: Option<Packet>) -> bool {
        let (key, last) = (owner.key(), self.last());
        // It may have been forgotten meanwhile.
        let Some(flow) = self.flows.get_mut(&key) else { return true };
        let over = left.is_none();
        flow.deficit = flow.deficit.saturating_sub(used);
        match left {
            Some(packet) => flow.packets.push_front(packet),
            None => self.packets = self.packets.saturating_sub(1),
        }
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

    /// Removes an owner's packets; says how many.
    fn remove(&mut self, owner: &O) -> usize {
        let Some(flow) = self.flows.remove(&owner.key()) else { return 0 };
        if let Some(group) = self.groups.get_mut(&owner.group()) {
            group.turns.remove(&flow.place);
            if group.turns.is_empty() {
                self.turns.remove(&group.place);
                self.groups.remove(&owner.group());
            }
        }
        self.packets = self.packets.saturating_sub(flow.packets.len());
        flow.packets.len()
    }
}

/// What has become of a packet or several.
#[derive(Default)]
struct Placed {
    packets: u64,
    bytes: usize,
    all: bool,
    notify: bool,
}

/// Puts a payload into a ring, in as many packets as it takes, up to `most` bytes and [`PACKETS`], while there is room.
fn place<L: Link, O: Owner>(
    link: &mut L,
    owner: Option<&O>,
    header: VsockHdr,
    payload: &mut Payload<'_>,
    most: usize,
    control: bool,
) -> Result<Placed, Broken> {
    let mut placed = Placed::default();
    let mut since = 0;
    while placed.packets < PACKETS as u64 && (placed.bytes < most || placed.packets == 0) {
        let room = match link.room(control) {
            Ok(Some(room)) => room.get(),
            Ok(None) => break,
            // What is there already is good.
            Err(_) if placed.packets > 0 => break,
            Err(broken) => return Err(broken),
        };
        let len = payload.len().min(room).min(MAX_PACKET).min((most - placed.bytes).max(1));
        let last = len == payload.len();
        // Flags of data say that a message ends.
        let mut header = VsockHdr { len: len as u32, flags: if last { header.flags } else { 0 }, ..header };
        if let Some(owner) = owner {
            owner.stamp(&mut header);
        }
        link.put(&header, payload);
        placed.packets += 1;
        placed.bytes += len;
        since += len;
        if last {
            placed.all = true;
            break;
        }
        if since >= PUBLISH {
            placed.notify |= link.publish();
            since = 0;
        }
    }
    if placed.packets > 0 {
        placed.notify |= link.publish();
    }
    Ok(placed)
}

/// The way to a peer.
pub struct Sender<L, O> {
    /// `None`: the queue does not run.
    link: Mutex<Option<L>>,
    outbox: Mutex<Outbox<O>>,
    /// Packets in the outbox, and those that the worker has taken out of it and not put into the ring yet.
    waiting: AtomicUsize,
    direct: AtomicBool,
    went_direct: AtomicU64,
    went_queued: AtomicU64,
    dropped: AtomicU64,
}

impl<L: Link, O: Owner> Sender<L, O> {
    /// `direct`: whether senders may use the ring themselves.
    pub fn new(direct: bool) -> Self {
        Sender {
            link: Mutex::new(None),
            outbox: Mutex::new(Outbox::new()),
            waiting: AtomicUsize::new(0),
            direct: AtomicBool::new(direct),
            went_direct: AtomicU64::new(0),
            went_queued: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Exchanges the ring, which starts, stops or has broken. What waits goes on waiting.
    pub fn replace(&self, link: Option<L>) -> Option<L> {
        std::mem::replace(&mut *self.link.lock(), link)
    }

    /// Whether senders may use the ring themselves from now on.
    pub fn set_direct(&self, direct: bool) {
        self.direct.store(direct, std::sync::atomic::Ordering::Relaxed);
    }

    /// Whether packets go straight to the ring where that is possible.
    pub fn is_direct(&self) -> bool {
        self.direct.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Whether something waits for the worker.
    pub fn is_waiting(&self) -> bool {
        // Pairs with the release of whoever counts up: a packet of the same connection is seen here.
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// The ring, if a sender may use it now: nobody else is at it, and nothing waits to go before.
    fn free(&self) -> Option<impl DerefMut<Target = Option<L>> + '_> {
        if !self.is_direct() || self.is_waiting() {
            return None;
        }
        let guard = self.link.try_lock()?;
        // Only now is it certain: nobody moves anything while the ring is ours.
        if self.is_waiting() { None } else { Some(guard) }
    }

    /// Which way packets went so far.
    pub fn ways(&self) -> Ways {
        use std::sync::atomic::Ordering::Relaxed;
        Ways {
            direct: self.went_direct.load(Relaxed),
            queued: self.went_queued.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
        }
    }

    /// Sends a packet in the order of its owner's: data, or the end of them (no payload). At most `room` bytes of it may wait
    /// in the outbox. Says how many bytes were sent or wait: perhaps not all, and of those, 0 if there is no room.
    ///
    /// Packets of one owner keep their order if it calls this for one after the other.
    pub fn send(&self, owner: &O, header: VsockHdr, payload: &mut Payload<'_>, room: usize) -> (usize, Effect) {
        let whole = payload.len();
        let mut effect = Effect::default();
        if let Some(mut guard) = self.free()
            && let Some(link) = &mut *guard
        {
            match place(link, Some(owner), header, payload, usize::MAX, false) {
                Ok(placed) => {
                    self.went_direct.fetch_add(placed.packets, std::sync::atomic::Ordering::Relaxed);
                    effect.and(placed.notify);
                    if placed.all {
                        return (whole, effect);
                    }
                }
                Err(broken) => {
                    effect.broken = Some(broken);
                    return (whole, effect);
                }
            }
        }
        let left = payload.len();
        let len = left.min(room);
        if len > 0 || whole == 0 {
            let flags = if len == left { header.flags } else { 0 };
            let Some(charge) = owner.charge(len.saturating_add(PACKET + FLOW)) else {
                effect.refused = true;
                return (whole - left, effect);
            };
            self.queue(
                owner,
                Packet { header: VsockHdr { flags, ..header }, data: payload.take(len), done: 0, charge },
            );
            effect.wake = true;
        }
        (whole - payload.len(), effect)
    }

    /// Has the worker move a packet.
    fn queue(&self, owner: &O, packet: Packet) {
        owner.queued().fetch_add(packet.data.len(), Ordering::Relaxed);
        let mut outbox = self.outbox.lock();
        let packets = usize::from(outbox.push(owner, packet));
        self.waiting.fetch_add(packets, Ordering::Release);
    }

    /// Sends up to `most` bytes that are still to be read from somewhere: straight into the ring by `read`, or into the outbox
    /// by `copy`. Says how many that were; `None`: it could not read now, as there is no room.
    pub fn fill(
        &self,
        owner: &O,
        header: VsockHdr,
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
        copy: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> (io::Result<Option<usize>>, Effect) {
        let mut effect = Effect::default();
        if let Some(mut guard) = self.free()
            && let Some(link) = &mut *guard
        {
            match link.fill(header, &mut |header| owner.stamp(header), most, read) {
                // The worker tells when there is room: a packet in the outbox has it wait for that.
                Ok(None) => {}
                Ok(Some((packets, result))) => {
                    if packets > 0 {
                        self.went_direct.fetch_add(packets, std::sync::atomic::Ordering::Relaxed);
                        effect.and(link.publish());
                    }
                    return (result.map(Some), effect);
                }
                Err(broken) => {
                    effect.broken = Some(broken);
                    return (Ok(None), effect);
                }
            }
        }
        let mut data = vec![0; most.min(MAX_PACKET)];
        match copy(&mut data) {
            Ok(0) => (Ok(Some(0)), effect),
            Ok(len) => {
                data.truncate(len);
                // It may wait for long.
                data.shrink_to_fit();
                let Some(charge) = owner.charge(len.saturating_add(PACKET + FLOW)) else {
                    effect.refused = true;
                    return (Ok(None), effect);
                };
                self.queue(owner, Packet { header, data, done: 0, charge });
                effect.wake = true;
                (Ok(Some(len)), effect)
            }
            Err(error) => (Err(error), effect),
        }
    }

    /// Sends a packet without payload whose place among the others does not matter, before them.
    pub fn send_control(&self, owner: Option<&O>, header: VsockHdr) -> Effect {
        let mut effect = Effect::default();
        if let Some(mut guard) = self.free()
            && let Some(link) = &mut *guard
        {
            match place(link, owner, header, &mut Payload::empty(), 0, true) {
                Ok(placed) => {
                    self.went_direct.fetch_add(placed.packets, std::sync::atomic::Ordering::Relaxed);
                    effect.and(placed.notify);
                    if placed.all {
                        return effect;
                    }
                }
                Err(broken) => {
                    effect.broken = Some(broken);
                    return effect;
                }
            }
        }
        let limit = if owner.is_none() { UNOWNED } else { RESETS };
        // A reset is all that is left of its connection.
        let owner = owner.filter(|_| header.op != Op::Reset as u16);
        let mut outbox = self.outbox.lock();
        match outbox.push_control(owner, header, limit) {
            Ok(()) => {
                self.waiting.fetch_add(1, Ordering::Release);
                effect.wake = true;
            }
            Err(dropped) => drop(self.dropped.fetch_add(dropped, std::sync::atomic::Ordering::Relaxed)),
        }
        effect
    }

    /// For the worker: moves what waits to the ring, as far as it has room; `moved` gets each owner of whom something has gone
    /// there, when all locks are free. If something still waits, the peer will notify us of room, unless the effect says that
    /// there is more to move at once.
    pub fn flush(&self, mut moved: impl FnMut(O)) -> Effect {
        let mut effect = Effect::default();
        if !self.is_waiting() {
            return effect;
        }
        let mut guard = self.link.lock();
        let Some(link) = &mut *guard else { return effect };
        let mut owners: Vec<O> = Vec::new();
        let (mut packets, mut bytes) = (0, 0);
        while let Some(turn) = { self.outbox.lock().next() } {
            let result = match &turn {
                Turn::Control { owner, header, .. } => {
                    place(link, owner.as_ref(), *header, &mut Payload::empty(), 0, true).map(|placed| (placed, None))
                }
                Turn::Data { owner, packet, allowance } => {
                    let mut payload = Payload::bytes(&packet.data);
                    payload.skip(packet.done);
                    place(link, Some(owner), packet.header, &mut payload, *allowance, false)
                        .map(|placed| (placed, Some(owner)))
                }
            };
            let (placed, owner) = match result {
                Ok(result) => result,
                Err(broken) => {
                    effect.broken = Some(broken);
                    // It goes back, and waits with all the rest.
                    (Placed::default(), None)
                }
            };
            effect.and(placed.notify);
            self.went_queued.fetch_add(placed.packets, std::sync::atomic::Ordering::Relaxed);
            if let Some(owner) = owner {
                owner.queued().fetch_sub(placed.bytes, Ordering::Relaxed);
                if placed.packets > 0 && owners.last().is_none_or(|last| last.key() != owner.key()) {
                    owners.push(owner.clone());
                }
            }
            let nothing = placed.packets == 0;
            match turn {
                Turn::Control { place, owner, header } => {
                    if placed.all || !self.outbox.lock().push_back(place, owner, header) {
                        self.waiting.fetch_sub(1, Ordering::Release);
                    }
                }
                Turn::Data { owner, mut packet, .. } => {
                    packet.done += placed.bytes;
                    let left = (!placed.all).then_some(packet);
                    let used = placed.bytes + OVERHEAD * placed.packets as usize;
                    let mut outbox = self.outbox.lock();
                    if outbox.moved(&owner, used, left) {
                        self.waiting.fetch_sub(1, Ordering::Release);
                    }
                }
            }
            if nothing && (effect.broken.is_some() || !link.await_room()) {
                break;
            }
            // What finds no room counts as well: a peer may take back what it has just offered, again and again.
            packets += (placed.packets as usize).max(1);
            bytes += placed.bytes;
            if packets >= FLUSH_PACKETS || bytes >= FLUSH_BYTES {
                effect.more = self.is_waiting();
                break;
            }
        }
        drop(guard);
        owners.into_iter().for_each(&mut moved);
        effect
    }

    /// Drops what waits of an owner: its connection is over. Says whether the peer has not even seen the request for it.
    pub fn forget(&self, owner: &O) -> bool {
        if !self.is_waiting() {
            return false;
        }
        let mut outbox = self.outbox.lock();
        let key = owner.key();
        let mut count = outbox.remove(owner);
        let mut unseen = false;
        for op in 0..=Op::CreditRequest as u16 {
            if let Some(place) = outbox.pending.remove(&(key, op)) {
                outbox.control.remove(&place);
                unseen |= op == Op::Request as u16;
                count += 1;
            }
        }
        self.waiting.fetch_sub(count, Ordering::Release);
        unseen
    }

    /// How many packets of an owner wait, beside those without payload that go before all.
    pub fn packets(&self, owner: &O) -> usize {
        if !self.is_waiting() {
            return 0;
        }
        self.outbox.lock().flows.get(&owner.key()).map_or(0, |flow| flow.packets.len())
    }

    /// Drops all that waits: the peer would not know what it is about.
    pub fn clear(&self) {
        // Nobody moves anything meanwhile.
        let link = self.link.lock();
        let old = {
            let mut outbox = self.outbox.lock();
            let old = std::mem::replace(&mut *outbox, Outbox::new());
            self.waiting.fetch_sub(old.control.len() + old.packets, Ordering::Release);
            old
        };
        // There may be much of it, and others want the ring.
        drop(link);
        drop(old);
    }
}
