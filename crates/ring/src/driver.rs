//! Driver end of a virtqueue (virtio 1.3, 2.7 and 2.8): makes buffers available, takes used ones. What both layouts share;
//! `split/driver.rs` and `packed/driver.rs` supply the rest ([`DriverEnd`]). Called through `DriverRing`, which has the docs.

use crate::{
    BURST, DESCRIPTOR, Features, INDIRECT, NEXT, WRITE,
    ids::Ids,
    layout::{RingLayout, RingPosition},
};
use ringroad_mem::{
    Region,
    sync::{Ordering, fence},
};
use std::sync::Arc;

/// A buffer that the driver makes available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub address: u64,
    /// Length in bytes, more than 0.
    pub len: u32,
}

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The id that [`DriverRing::add`](crate::DriverRing::add) returned.
    pub id: u16,
    /// Bytes written by the device, never more than the size of the chain's writable buffers.
    pub len: u32,
}

/// Too few free descriptors, or the chain is empty or longer than the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for the descriptor chain")]
pub struct Full;

/// A device error on a queue, found by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverFault {
    /// The used index is further ahead than there are chains in flight (2.7.8).
    #[error("used index {index} is {ahead} ahead of {next}, with only {outstanding} chains in flight")]
    UsedJump {
        /// The used index that the device wrote.
        index: u16,
        /// The index that the driver takes next.
        next: u16,
        /// The distance between the two.
        ahead: u16,
        /// Chains in flight.
        outstanding: u16,
    },
    /// The device returned a chain that is not in flight.
    #[error("the device returned buffer {id}, which is not in flight")]
    Id {
        /// The id that the device wrote.
        id: u32,
    },
    /// The device reports more bytes written than the chain can hold.
    #[error("the device reported {len} bytes written to buffer {id}, expected at most {room}")]
    Length {
        /// Id of the buffer.
        id: u16,
        /// The length that the device wrote.
        len: u32,
        /// Size of the chain's writable buffers.
        room: u32,
    },
}

/// Returns the length that the device reports as written. If the chain has no writable buffers, the field is meaningless
/// (2.8.7): DPDK's devices leave there what the driver wrote.
#[inline(always)]
pub(crate) fn written(id: u16, len: u32, room: u32) -> Result<u32, DriverFault> {
    match room {
        0 => Ok(0),
        _ if len > room => Err(DriverFault::Length { id, len, room }),
        _ => Ok(len),
    }
}

/// Private state of an id. What is in the ring may be overwritten by the device.
#[derive(Clone, Copy, Default)]
pub(crate) struct State<W> {
    /// Descriptors of the chain in flight with this id; 0 if there is none. With IN_ORDER the value stays after the chain has
    /// returned, until the id is used again.
    pub descriptors: u16,
    /// Bytes that the device may write.
    pub room: u32,
    pub written: W,
}

/// Driver end of a virtqueue.
pub(crate) struct Driver<L: RingLayout> {
    pub ring: L,
    pub features: Features,
    pub states: Box<[State<L::Written>]>,
    pub ids: Ids,
    /// Where the next chain goes.
    pub next_available: L::Position,
    /// Position up to which the device sees chains.
    pub published: L::Position,
    /// Slots published since the last decision whether to notify the device.
    pub unsignalled: u32,
    /// The next used entry to take.
    pub next_used: L::Position,
    pub state: L::DriverState,
    /// Chains in flight with more than one descriptor.
    multi_descriptor: u16,
    /// Within an in-order batch: the chain that ends it.
    pub batch: Option<Used>,
    pub fast_path: bool,
    /// Where chains of more than one buffer go.
    pub tables: Option<IndirectTables>,
}

/// What differs between the layouts.
pub(crate) trait DriverEnd {
    fn free(&self) -> usize;

    /// Prefetches the lines that adding chains will write to.
    fn prefetch(&self, _count: usize) {}

    /// Writes the `nth` descriptor of the next chain; `more`: another one follows.
    fn write(&mut self, nth: usize, buffer: Buffer, flags: u16, more: bool);

    /// Completes a chain of so many descriptors.
    fn end(&mut self, id: u16, descriptors: u16, room: u32);

    /// Fast path: adds single-buffer chains as long as their ids and descriptors are contiguous.
    fn add_run(&mut self, count: usize, writable: bool, buffer: impl FnMut(u16) -> Buffer) -> usize;

    /// Makes what was added visible to the device.
    fn store(&mut self);

    /// Returns how many chains, up to `wanted`, may be used, and prefetches the lines of the ring that they take.
    fn look(&mut self, wanted: usize) -> Result<usize, DriverFault>;

    /// Reads the id and the length of the next used entry, if there is one.
    fn used(&self) -> Option<(u32, u32)>;

    /// Moves past used chains.
    fn advance(&mut self, chains: u16, descriptors: u16);

    /// Frees the ids of a chain.
    fn put_back(&mut self, id: u16, descriptors: u16);

    /// `reclaim`, in order and with one descriptor for each chain.
    fn reclaim_in_order(&mut self, max: usize) -> Result<usize, DriverFault>;

    /// Reads whether the device wants to be notified of these slots, which were published last.
    fn is_requested(&self, unsignalled: u32) -> bool;

    /// Writes the request to be notified of the next used chain.
    fn request(&mut self);

    /// Withdraws it.
    fn suppress(&mut self);

    /// Returns whether there is a used chain, valid or not.
    fn is_used(&self) -> bool;
}

impl<L: RingLayout> Driver<L> {
    /// Returns the driver end of a fresh ring, with nothing available or used. The ring's memory must be zeroed.
    pub fn at(ring: L, features: Features, start: L::Position, state: L::DriverState) -> Self {
        let size = ring.size();
        Driver {
            ring,
            features,
            states: vec![State::default(); size.into()].into(),
            ids: Ids::new(size),
            next_available: start,
            published: start,
            unsignalled: 0,
            next_used: start,
            state,
            multi_descriptor: 0,
            batch: None,
            fast_path: true,
            tables: None,
        }
    }
}

impl<L: RingLayout> Driver<L>
where
    Self: DriverEnd,
{
    #[inline(always)]
    pub fn next_id(&self, ahead: usize) -> Option<u16> {
        self.ids.next(ahead).filter(|_| ahead < self.free())
    }

    #[inline(always)]
    pub fn next_ids(&self, ahead: usize, count: usize) -> &[u16] {
        self.ids.run(ahead, count.min(self.free().saturating_sub(ahead)))
    }

    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> Result<u16, Full> {
        let count = readable.len() + writable.len();
        let chain = || readable.iter().map(|&buffer| (buffer, 0)).chain(writable.iter().map(|&buffer| (buffer, WRITE)));
        let room = writable.iter().fold(0, |sum: u32, buffer| sum.saturating_add(buffer.len));
        let id = self.next_id(0).ok_or(Full)?;
        if count > 1
            && let Some(table) = self.tables.as_ref().and_then(|t| t.write(id, count, chain(), L::LINKED))
        {
            self.write(0, table, INDIRECT, false);
            self.end(id, 1, room);
            return Ok(id);
        }
        if count == 0 || count > self.free() {
            return Err(Full);
        }
        for (nth, (buffer, flags)) in chain().enumerate() {
            self.write(nth, buffer, flags, nth + 1 < count);
        }
        self.end(id, count as u16, room);
        self.multi_descriptor += u16::from(count > 1);
        Ok(id)
    }

    #[inline]
    pub fn add_single(&mut self, count: usize, writable: bool, mut buffer: impl FnMut(u16) -> Buffer) -> usize {
        let mut added = 0;
        while added < count {
            let run = self.add_run(count - added, writable, &mut buffer);
            if run == 0 {
                break;
            }
            added += run;
        }
        added
    }

    #[inline]
    pub fn publish(&mut self) {
        if self.published != self.next_available {
            self.store();
            let slots = self.published.distance(self.next_available, self.ring.size());
            self.unsignalled = self.unsignalled.saturating_add(slots.into());
            self.published = self.next_available;
        }
    }

    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, DriverFault> {
        let max = self.look(out.len())?;
        let mut count = 0;
        while let Some(rest) = out.get_mut(count..max).filter(|rest| !rest.is_empty()) {
            let taken = if self.fast_path && self.batch.is_none() { self.take_singles(rest) } else { 0 };
            count += taken;
            let Some(place) = rest.get_mut(taken) else { break };
            match self.take_chain() {
                Ok(Some(used)) => *place = used,
                Err(fault) if count == 0 => return Err(fault),
                _ => break,
            }
            count += 1;
        }
        Ok(count)
    }

    /// Fast path: single-descriptor chains, in order or not, with one used entry each, up to the end of the ring or, in order, of
    /// the circular list of ids. Anything unexpected, valid or not, is left to the normal path. Not inlined: its loop needs all
    /// registers.
    #[inline(never)]
    fn take_singles(&mut self, out: &mut [Used]) -> usize {
        let (bits, entries) = self.ring.used_run(self.next_used);
        let states = &mut self.states[..];
        let mut count = 0;
        if self.features.in_order {
            for ((out, &id), entry) in out.iter_mut().zip(self.ids.oldest_run(BURST)).zip(entries) {
                let (tag, len) = L::load(entry);
                let Some(&State { descriptors: 1, room, .. }) = states.get(id as usize) else { break };
                if tag != bits | u32::from(id) {
                    break;
                }
                let Ok(len) = written(id, len, room) else { break };
                *out = Used { id, len };
                count += 1;
            }
            self.ids.put_back_oldest(count);
        } else {
            for (out, entry) in out.iter_mut().zip(entries) {
                let (tag, len) = L::load(entry);
                let Some(state) = states.get_mut((tag ^ bits) as usize) else { break };
                let id = tag as u16;
                let Ok(len) = written(id, len, state.room) else { break };
                if state.descriptors != 1 {
                    break;
                }
                state.descriptors = 0;
                self.ids.put_back(id);
                *out = Used { id, len };
                count += 1;
            }
        }
        self.advance(count as u16, count as u16);
        count
    }

    /// Normal path: takes the next used chain, if there is one.
    #[inline(always)]
    fn take_chain(&mut self) -> Result<Option<Used>, DriverFault> {
        let in_order = self.features.in_order;
        let mut used = match self.batch {
            Some(end) => end,
            None => {
                let Some((id, len)) = self.used() else { return Ok(None) };
                let in_flight =
                    |state: &&State<_>| state.descriptors > 0 && (!in_order || self.ids.is_in_flight(id as usize));
                let state = self.states.get(id as usize).filter(in_flight).ok_or(DriverFault::Id { id })?;
                let id = id as u16;
                Used { id, len: written(id, len, state.room)? }
            }
        };
        if in_order {
            // Return the oldest chain first, up to the one that the entry names. That one is in flight, so it will be
            // reached. Those before it count as written in full (2.7.9).
            let end = used;
            let oldest = self.ids.oldest().ok_or(DriverFault::Id { id: end.id.into() })?;
            self.batch = (oldest != end.id).then_some(end);
            if oldest != end.id {
                used = Used { id: oldest, len: self.states[oldest as usize].room };
            }
        }
        let state = &mut self.states[used.id as usize];
        let descriptors = state.descriptors;
        if !in_order {
            state.descriptors = 0;
        }
        self.put_back(used.id, descriptors);
        self.advance(1, descriptors);
        self.multi_descriptor -= u16::from(descriptors > 1);
        Ok(Some(used))
    }

    #[inline]
    pub fn reclaim(&mut self, max: usize) -> Result<usize, DriverFault> {
        if !self.fast_path || !self.features.in_order || self.multi_descriptor > 0 {
            return self.reclaim_each(max);
        }
        self.reclaim_in_order(max)
    }

    /// Takes up to `max` chains one by one.
    pub fn reclaim_each(&mut self, max: usize) -> Result<usize, DriverFault> {
        let mut used = [Used::default(); BURST];
        self.take_used(&mut used[..max.min(BURST)])
    }

    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        let unsignalled = std::mem::take(&mut self.unsignalled);
        if unsignalled == 0 {
            return false;
        }
        // Pairs with the device's fence between requesting notifications and re-reading the ring (2.7.10.1, 2.8.21.3.1):
        // without it both sides may sleep.
        fence(Ordering::SeqCst);
        self.is_requested(unsignalled)
    }

    pub fn enable_notification(&mut self) -> bool {
        self.request();
        // Pairs with the device's fence between publishing used entries and reading the request.
        fence(Ordering::SeqCst);
        self.batch.is_some() || self.is_used()
    }
}

/// Indirect descriptor tables in the driver's memory, one per id, so that a chain takes one descriptor of the ring.
#[derive(Debug)]
pub struct IndirectTables {
    region: Arc<Region>,
    offset: usize,
    entries: usize,
}

impl IndirectTables {
    /// Places tables of `entries` descriptors, for a ring of `size`, at `offset` of the driver's memory; `None` unless the
    /// region has `size * entries * 16` bytes there.
    pub fn new(region: Arc<Region>, offset: usize, size: u32, entries: usize) -> Option<Self> {
        region.span(offset, size as usize * entries * DESCRIPTOR)?;
        // A chain may not be longer than the queue, also in an indirect table (2.7.5.3.1).
        let entries = entries.min(size as usize);
        Some(IndirectTables { region, offset, entries })
    }

    /// Writes the table of `id` and returns the buffer for the ring's descriptor; `None` if the chain does not fit.
    /// `linked`: with `next` fields, as split rings need them.
    pub(crate) fn write(
        &self,
        id: u16,
        count: usize,
        chain: impl Iterator<Item = (Buffer, u16)>,
        linked: bool,
    ) -> Option<Buffer> {
        if count == 0 || count > self.entries {
            return None;
        }
        let at = self.offset + id as usize * self.entries * DESCRIPTOR;
        for (i, (buffer, flags)) in chain.enumerate() {
            let more = linked && i + 1 < count;
            let next = if more { i as u64 + 1 } else { 0 };
            let flags = u64::from(flags | if more { NEXT } else { 0 });
            let word = u64::from(buffer.len) | if linked { flags << 32 | next << 48 } else { flags << 48 };
            let bytes = (u128::from(buffer.address) | u128::from(word) << 64).to_le_bytes();
            self.region.span(at + i * DESCRIPTOR, DESCRIPTOR)?.write(&bytes);
        }
        Some(Buffer { address: self.region.guest() + at as u64, len: (count * DESCRIPTOR) as u32 })
    }
}
