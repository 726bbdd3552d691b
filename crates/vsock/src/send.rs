//! Sending packets to a peer, directly or queued. Direct: the sending thread writes the packet to the virtqueue itself. Queued:
//! it leaves the packet in an outbox, and the worker moves it to the ring. Called by a `Stack`.
//!
//! Direct is faster. It is possible when the outbox is empty, the ring has room, and no other thread holds the ring (its lock is
//! only tried). Everything else is queued, which keeps the packets of a connection in order: a packet could overtake another one
//! only while that one is in the outbox, and then nothing is sent directly; and moving packets out of the outbox requires the
//! ring's lock.
//!
//! The outbox serves guests, and the connections of each, by deficit round robin, counted in bytes. Control packets (all but data
//! and shutdown) are sent before the data of their guest and have ring descriptors reserved for them. When there is no room for
//! data, some of them overtake it, but only so many that the data gets its turn.

use crate::{
    account::{FLOW, PACKET},
    outbox::{Control, Outbox, Owner, Packet, Turn},
    payload::Payload,
    sync::{AtomicUsize, Mutex, Ordering},
    types::{Broken, MAX_PACKET},
};
use ringroad_mem::Span;
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::{
    io,
    num::NonZeroUsize,
    ops::DerefMut,
    sync::atomic::{AtomicBool, AtomicU64},
};

/// Bytes that each packet counts in addition to its payload.
const OVERHEAD: usize = 64;
/// Bytes after which packets are published, even if more follow.
const PUBLISH: usize = 32 << 10;
/// Packets that a sender writes to the ring directly, or that a connection sends per turn: receive buffers may be tiny.
const PACKETS: usize = 128;
/// What the worker moves in one go; then it serves other stacks.
const FLUSH_PACKETS: usize = 512;
const FLUSH_BYTES: usize = 1 << 20;

/// The ring that carries packets to the peer.
pub trait Link {
    /// Returns how many payload bytes the next buffer holds, `None` if there is no buffer. With `control` unset, some buffers are
    /// left for control packets.
    ///
    /// # Errors
    /// [`Broken`] if the peer has broken the ring.
    fn room(&mut self, control: bool) -> Result<Option<NonZeroUsize>, Broken>;

    /// Writes a packet into the next buffer: the header and the next `header.len` bytes. The caller has just learned from `room`
    /// that the buffer exists and is large enough.
    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>);

    /// Lets `read` write up to `most` bytes of payload straight into buffers, as packets with this header, completed by `stamp`.
    /// Some buffers are left for control packets. `read` is called at most once, with room for at least one byte, and returns how
    /// much it has written. Returns the number of packets and the result of `read`, or `None` if there is no buffer and `read`
    /// was not called.
    ///
    /// # Errors
    /// [`Broken`] if the peer has broken the ring. An error of `read` is part of the result.
    fn fill(
        &mut self,
        header: VsockHdr,
        stamp: &mut dyn FnMut(&mut VsockHdr),
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken>;

    /// Publishes what was put. Returns whether the peer wants to be notified.
    fn publish(&mut self) -> bool;

    /// Asks the peer to notify us when buffers become available. Returns `true` if there are some already.
    fn await_room(&mut self) -> bool;
}

/// What the caller has to do after a call, without holding any lock.
#[derive(Debug, Default)]
#[must_use]
pub struct Effect {
    /// The peer wants to be notified.
    pub notify: bool,
    /// Wake the worker: packets were queued.
    pub wake: bool,
    /// More packets could be moved, but the limit per call was reached.
    pub more: bool,
    /// The memory limit is reached; the connection should be closed.
    pub refused: bool,
    /// The peer has broken the ring.
    pub broken: Option<Broken>,
}

impl Effect {
    fn or_notify(&mut self, notify: bool) {
        self.notify |= notify;
    }
}

/// How packets were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// Written to the ring by the sender.
    pub direct: u64,
    /// Moved to the ring by the worker.
    pub queued: u64,
    /// Answers dropped because too many were waiting.
    pub dropped: u64,
}

/// What `place` wrote to the ring.
#[derive(Default)]
struct Placed {
    packets: u64,
    bytes: usize,
    all: bool,
    notify: bool,
}

/// Writes a payload to the ring, split into as many packets as needed, until `most` bytes or [`PACKETS`] are reached or the ring
/// is full.
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
            // The packets written so far are valid.
            Err(_) if placed.packets > 0 => break,
            Err(broken) => return Err(broken),
        };
        let len = payload.len().min(room).min(MAX_PACKET).min((most - placed.bytes).max(1));
        let last = len == payload.len();
        // The flags of a data packet mark the end of a message, so only the last part carries them.
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

/// The sending side of a stack.
pub struct Sender<L, O> {
    /// `None` while the queue is not running.
    link: Mutex<Option<L>>,
    outbox: Mutex<Outbox<O>>,
    /// Packets in the outbox, and those the worker has taken out and not written to the ring yet.
    waiting: AtomicUsize,
    direct: AtomicBool,
    went_direct: AtomicU64,
    went_queued: AtomicU64,
    dropped: AtomicU64,
}

impl<L, O> std::fmt::Debug for Sender<L, O> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Sender").field("waiting", &self.waiting).field("direct", &self.direct).finish_non_exhaustive()
    }
}

impl<L: Link, O: Owner> Sender<L, O> {
    /// Creates a sender without a ring. `direct`: whether sending threads may use the ring themselves.
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

    /// Replaces the ring when the queue starts, stops or breaks. Queued packets are kept.
    pub fn replace(&self, link: Option<L>) -> Option<L> {
        std::mem::replace(&mut *self.link.lock(), link)
    }

    /// Sets whether sending threads may use the ring themselves.
    pub fn set_direct(&self, direct: bool) {
        self.direct.store(direct, std::sync::atomic::Ordering::Relaxed);
    }

    /// Returns whether sending threads may use the ring themselves.
    pub fn is_direct(&self) -> bool {
        self.direct.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Returns whether packets wait for the worker.
    pub fn is_waiting(&self) -> bool {
        // Pairs with the Release increments in `queue` and `send_control`: earlier packets of the same connection are seen.
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Locks the ring for a direct send. Returns `None` if another thread holds it or packets are queued.
    fn free(&self) -> Option<impl DerefMut<Target = Option<L>> + '_> {
        if !self.is_direct() || self.is_waiting() {
            return None;
        }
        let guard = self.link.try_lock()?;
        // Check again under the lock: only now can no packet be in the worker's hands.
        if self.is_waiting() { None } else { Some(guard) }
    }

    /// Returns how packets were sent so far.
    pub fn ways(&self) -> Ways {
        use std::sync::atomic::Ordering::Relaxed;
        Ways {
            direct: self.went_direct.load(Relaxed),
            queued: self.went_queued.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
        }
    }

    /// Sends a packet in order with its owner's other packets: data, or a shutdown (no payload). Up to `room` bytes may wait in
    /// the outbox. Returns how many bytes were sent or queued, possibly fewer than there are, or 0 if there is no room.
    ///
    /// The order is kept if the calls for one owner do not overlap.
    pub fn send(&self, owner: &O, header: VsockHdr, payload: &mut Payload<'_>, room: usize) -> (usize, Effect) {
        let whole = payload.len();
        let mut effect = Effect::default();
        if let Some(mut guard) = self.free()
            && let Some(link) = &mut *guard
        {
            match place(link, Some(owner), header, payload, usize::MAX, false) {
                Ok(placed) => {
                    self.went_direct.fetch_add(placed.packets, std::sync::atomic::Ordering::Relaxed);
                    effect.or_notify(placed.notify);
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

    /// Adds a packet to the outbox.
    fn queue(&self, owner: &O, packet: Packet) {
        owner.queued().fetch_add(packet.data.len(), Ordering::Relaxed);
        let mut outbox = self.outbox.lock();
        let packets = usize::from(outbox.push(owner, packet));
        self.waiting.fetch_add(packets, Ordering::Release);
    }

    /// Sends up to `most` bytes that are read on demand: straight into the ring by `read`, or into the outbox by `copy`. Returns
    /// how many that were, or `None` if nothing could be read because there is no room.
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
                // Fall through to the outbox: the worker waits for room on behalf of queued packets.
                Ok(None) => {}
                Ok(Some((packets, result))) => {
                    if packets > 0 {
                        self.went_direct.fetch_add(packets, std::sync::atomic::Ordering::Relaxed);
                        effect.or_notify(link.publish());
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
                // The packet may wait for a long time.
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

    /// Sends a control packet, ahead of the queued data of its group. `owner` unset: an answer to a packet of no connection.
    pub fn send_control(&self, owner: Option<&O>, header: VsockHdr) -> Effect {
        let mut effect = Effect::default();
        if let Some(mut guard) = self.free()
            && let Some(link) = &mut *guard
        {
            match place(link, owner, header, &mut Payload::empty(), 0, true) {
                Ok(placed) => {
                    self.went_direct.fetch_add(placed.packets, std::sync::atomic::Ordering::Relaxed);
                    effect.or_notify(placed.notify);
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
        let group = owner.map(Owner::group);
        // A reset is not tied to its connection, which is about to be removed.
        let owner = owner.filter(|_| header.op != Op::Reset as u16);
        let mut outbox = self.outbox.lock();
        match outbox.push_control(owner, group, header) {
            Ok(()) => {
                self.waiting.fetch_add(1, Ordering::Release);
                effect.wake = true;
            }
            Err(dropped) => drop(self.dropped.fetch_add(dropped, std::sync::atomic::Ordering::Relaxed)),
        }
        effect
    }

    /// Called by the worker: moves queued packets to the ring while there is room. `moved` is called afterwards, without locks
    /// held, with each owner that got data into the ring. If packets still wait, the peer will notify us of room, unless
    /// `Effect::more` is set.
    pub fn flush(&self, mut moved: impl FnMut(O)) -> Effect {
        let mut effect = Effect::default();
        if !self.is_waiting() {
            return effect;
        }
        let mut guard = self.link.lock();
        let Some(link) = &mut *guard else { return effect };
        let mut owners: Vec<O> = Vec::new();
        let (mut packets, mut bytes, mut has_room) = (0, 0, true);
        loop {
            let Some(turn) = self.outbox.lock().next(has_room) else {
                // Data may have been given room in the meantime.
                has_room = !has_room && link.await_room();
                if has_room { continue } else { break }
            };
            let result = match &turn {
                Turn::Control { packet: Control { owner, header, .. }, .. } => {
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
                    // The packet goes back to the outbox and waits like the others.
                    (Placed::default(), None)
                }
            };
            effect.or_notify(placed.notify);
            self.went_queued.fetch_add(placed.packets, std::sync::atomic::Ordering::Relaxed);
            if let Some(owner) = owner {
                owner.queued().fetch_sub(placed.bytes, Ordering::Relaxed);
                if placed.packets > 0 && owners.last().is_none_or(|last| last.key() != owner.key()) {
                    owners.push(owner.clone());
                }
            }
            if placed.packets == 0 {
                has_room = matches!(turn, Turn::Control { .. });
            }
            let is_full = placed.packets == 0 && has_room;
            self.end_turn(turn, &placed);
            if effect.broken.is_some() || is_full && !link.await_room() {
                break;
            }
            // Count attempts that found no room as well: a peer could withdraw and offer the same buffer forever.
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

    /// Returns what is left of a packet to the outbox.
    fn end_turn(&self, turn: Turn<O>, placed: &Placed) {
        match turn {
            Turn::Control { packet, overtakes } => {
                let mut outbox = self.outbox.lock();
                if placed.all {
                    outbox.sent(packet.group, overtakes);
                }
                if placed.all || !outbox.push_back(packet) {
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
    }

    /// Drops an owner's queued packets because its connection is closed. Returns whether its request was among them, in which
    /// case the peer has never seen the connection.
    pub fn forget(&self, owner: &O) -> bool {
        if !self.is_waiting() {
            return false;
        }
        let mut outbox = self.outbox.lock();
        let (count, unseen) = outbox.forget(owner);
        self.waiting.fetch_sub(count, Ordering::Release);
        unseen
    }

    /// Returns the number of an owner's queued data packets.
    pub fn packets(&self, owner: &O) -> usize {
        if !self.is_waiting() {
            return 0;
        }
        self.outbox.lock().packets_of(owner)
    }

    /// Drops all queued packets, when the peer has lost its state.
    pub fn clear(&self) {
        // With the ring locked, the worker has no packet in its hands, unless a panic took it from them: nothing waits now.
        let link = self.link.lock();
        let old = {
            let mut outbox = self.outbox.lock();
            self.waiting.store(0, Ordering::Release);
            std::mem::replace(&mut *outbox, Outbox::new())
        };
        // Free the packets after releasing the ring, as there may be many.
        drop(link);
        drop(old);
    }
}
