//! Driver end of a packed virtqueue (virtio 1.3, 2.8): makes buffers available and takes used ones. Called through
//! `DriverRing`.

#[cfg(not(loom))]
use super::layout::Base;
use super::layout::{AVAILABLE, LINE, Layout, Position, USED, available_flags, used_flags, word};
use crate::{
    BURST, Buffer, DriverFault, Features, Full, NEXT, Used, WRITE,
    driver::{Ids, written},
    notify::Event,
};
#[cfg(not(loom))]
use crate::{INDIRECT, driver::IndirectTables};
use ringroad_mem::sync::{Ordering, fence};

/// Private state of a buffer id.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct State {
    /// Ring slots that the chain takes. Without IN_ORDER 0 means that the id is free.
    slots: u16,
    /// Bytes that the device may write.
    room: u32,
}

/// The unpublished descriptors in the cache line of the first unpublished one. The device polls that line, and each poll
/// moves the line to its cache; so the whole line is written last and at once.
#[derive(Clone, Copy, Default)]
struct Held {
    /// Slot of the first unpublished descriptor.
    first: u16,
    /// Bit mask of the line's descriptors that are held; 0 if there is nothing to publish.
    mask: u8,
    /// Both words of each descriptor.
    words: [[u64; 2]; LINE as usize],
}

impl Held {
    /// Returns how many descriptors, from this slot on, belong to that line.
    #[inline(always)]
    fn room(&self, slot: u16) -> usize {
        if self.mask == 0 || (slot ^ self.first) < LINE { (LINE - slot % LINE).into() } else { 0 }
    }

    /// Returns how many descriptors, from this slot on, come before that line.
    #[inline(always)]
    fn before(&self, slot: u16) -> usize {
        let line = self.first - self.first % LINE;
        if self.mask > 0 && slot < line { (line - slot).into() } else { usize::MAX }
    }

    /// Holds a descriptor back if it belongs to that line; returns whether it does.
    #[inline(always)]
    fn hold(&mut self, slot: u16, words: [u64; 2]) -> bool {
        if self.mask == 0 {
            self.first = slot;
        } else if (slot ^ self.first) >= LINE {
            return false;
        }
        let place = slot % LINE;
        self.mask |= 1 << place;
        self.words[place as usize] = words;
        true
    }
}

/// Driver end of a packed virtqueue.
pub struct Driver {
    ring: Layout,
    features: Features,
    states: Box<[State]>,
    ids: Ids,
    free_slots: u16,
    next_available: Position,
    held: Held,
    /// `next_available` at the last `publish`.
    published: Position,
    /// Descriptors published since the last decision whether to notify the device.
    unsignalled: u32,
    added: u32,
    /// Chains in flight with more than one descriptor.
    multi_descriptor: u16,
    next_used: Position,
    /// Within an in-order batch: the chain that ends it.
    batch: Option<Used>,
    /// Number of chains taken last, as an estimate of how many lines to prefetch.
    expected: u16,
    fast_path: bool,
    #[cfg(not(loom))]
    tables: Option<IndirectTables>,
}

impl Driver {
    /// Returns the driver end of a fresh ring, with nothing available or used. The ring's memory must be zeroed.
    pub fn new(ring: Layout, features: Features) -> Driver {
        let size = ring.size;
        Driver {
            features,
            states: vec![State::default(); size.into()].into(),
            ids: Ids::new(size),
            free_slots: size,
            next_available: Position::START,
            held: Held::default(),
            published: Position::START,
            unsignalled: 0,
            added: 0,
            multi_descriptor: 0,
            next_used: Position::START,
            batch: None,
            expected: 0,
            fast_path: true,
            ring,
            #[cfg(not(loom))]
            tables: None,
        }
    }

    /// From now on places each chain of more than one buffer in an indirect table, if INDIRECT_DESC was negotiated.
    #[cfg(not(loom))]
    pub fn set_indirect(&mut self, tables: IndirectTables) {
        self.tables = self.features.indirect.then_some(tables);
    }

    /// Turns the fast path of taking used chains on or off, for measurements. (For adding, `add_single` is the fast path
    /// and `add` the normal one.)
    pub fn set_fast_path(&mut self, on: bool) {
        self.fast_path = on;
    }

    /// Returns how many descriptors are free.
    #[inline(always)]
    pub fn free(&self) -> usize {
        self.free_slots.into()
    }

    /// Returns the id of the single-buffer chain to be added after `ahead` others.
    #[inline(always)]
    pub fn next_id(&self, ahead: usize) -> Option<u16> {
        self.ids.next(ahead).filter(|_| ahead < self.free_slots.into())
    }

    /// Returns ids of the single-buffer chains to be added after `ahead` others: up to `count`, possibly fewer.
    #[inline(always)]
    pub fn next_ids(&self, ahead: usize, count: usize) -> &[u16] {
        self.ids.run(ahead, count.min(usize::from(self.free_slots).saturating_sub(ahead)))
    }

    /// Prefetches the lines of the next `count` descriptors for writing.
    #[inline]
    pub fn prefetch(&self, count: usize) {
        self.ring.prefetch(self.next_available.slot, count.min(self.free_slots.into()) as u16, true);
    }

    /// Adds a chain; returns its id.
    ///
    /// # Errors
    /// [`Full`] if there are too few free descriptors, or the chain is empty or longer than the queue.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> Result<u16, Full> {
        let count = readable.len() + writable.len();
        let chain = || {
            (0..count)
                .map(|i| if i < readable.len() { (readable[i], 0) } else { (writable[i - readable.len()], WRITE) })
        };
        let room = writable.iter().fold(0, |sum: u32, buffer| sum.saturating_add(buffer.len));
        let id = self.ids.next(0).filter(|_| self.free_slots > 0).ok_or(Full)?;
        #[cfg(not(loom))]
        if count > 1
            && let Some(table) = self.tables.as_ref().and_then(|t| t.write(id, chain(), false))
        {
            self.descriptor(id, table, INDIRECT);
            self.started(id, 1, room);
            return Ok(id);
        }
        if count == 0 || count > self.free_slots.into() {
            return Err(Full);
        }
        for (i, (buffer, flags)) in chain().enumerate() {
            self.descriptor(id, buffer, flags | if i + 1 < count { NEXT } else { 0 });
        }
        self.started(id, count as u16, room);
        Ok(id)
    }

    /// Adds up to `count` single-buffer chains; returns how many were added.
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

    /// As `add_single`, for contiguous ids, up to the end of the ring or to the held line.
    #[inline(always)]
    fn add_run(&mut self, count: usize, writable: bool, mut buffer: impl FnMut(u16) -> Buffer) -> usize {
        let Driver { ring, ids, held, .. } = self;
        let states = &mut self.states[..];
        let Position { slot, wrap } = self.next_available;
        let flags = available_flags(wrap) | if writable { WRITE } else { 0 };
        let descriptors = ring.pairs().get(slot.into()..).unwrap_or_default();
        let ids = ids.run(0, count.min(self.free_slots.into()).min(descriptors.len()).min(held.before(slot)));
        let mut add = |id: u16| {
            let Buffer { address, len } = buffer(id);
            // Each store saved leaves more room in the store buffer for those to the ring, which wait for their lines in
            // parallel.
            let state = State { slots: 1, room: if writable { len } else { 0 } };
            if let Some(place) = states.get_mut(id as usize).filter(|place| **place != state) {
                *place = state;
            }
            [address.to_le(), word(len, id, flags)]
        };
        let kept = held.room(slot).min(ids.len());
        for (slot, &id) in (slot..).zip(&ids[..kept]) {
            held.hold(slot, add(id));
        }
        for (&id, descriptor) in ids.iter().zip(descriptors).skip(kept) {
            let words = add(id);
            descriptor[0].store(words[0], Ordering::Relaxed);
            descriptor[1].store(words[1], Ordering::Relaxed);
        }
        let count = ids.len();
        self.next_available.advance(count as u16, self.ring.size);
        self.ids.advance(count);
        self.free_slots -= count as u16;
        self.added += count as u32;
        count
    }

    /// Writes the next descriptor, or holds it back until `publish`.
    #[inline(always)]
    fn descriptor(&mut self, id: u16, buffer: Buffer, flags: u16) {
        let Position { slot, wrap } = self.next_available;
        let words = [buffer.address.to_le(), word(buffer.len, id, flags | available_flags(wrap))];
        if !self.held.hold(slot, words) {
            self.store(slot, words, Ordering::Relaxed);
        }
        self.next_available.advance(1, self.ring.size);
    }

    #[inline(always)]
    fn store(&self, slot: u16, words: [u64; 2], ordering: Ordering) {
        self.ring.descriptors[2 * slot as usize].store(words[0], Ordering::Relaxed);
        self.ring.descriptors[2 * slot as usize + 1].store(words[1], ordering);
    }

    #[inline(always)]
    fn started(&mut self, id: u16, slots: u16, room: u32) {
        self.ids.advance(1);
        self.states[id as usize] = State { slots, room };
        self.free_slots -= slots;
        self.added += u32::from(slots);
        self.multi_descriptor += u16::from(slots > 1);
    }

    /// Makes all added chains available to the device.
    #[inline]
    pub fn publish(&mut self) {
        let Held { first, mask, words } = self.held;
        if mask == 0 {
            return;
        }
        let (line, first) = (first - first % LINE, first % LINE);
        for place in (0..LINE).filter(|&place| place != first && mask & 1 << place != 0) {
            self.store(line + place, words[place as usize], Ordering::Relaxed);
        }
        // Pairs with the device's acquire load of the second word: all other descriptors, and the buffers, are written
        // before it.
        self.store(line + first, words[first as usize], Ordering::Release);
        self.held.mask = 0;
        self.published = self.next_available;
        self.unsignalled = self.unsignalled.saturating_add(std::mem::take(&mut self.added));
    }

    /// Returns the second word of the descriptor at `next_used`, if it was used in this pass.
    #[inline(always)]
    fn used(&self) -> Option<u64> {
        let Position { slot, wrap } = self.next_used;
        // Pairs with the device's release store of this word: the buffers and the used descriptors behind it are visible.
        let word = u64::from_le(self.ring.descriptors[2 * slot as usize + 1].load(Ordering::Acquire));
        let flags = (word >> 48) as u16 & (AVAILABLE | USED);
        // If nothing is in flight, a descriptor may look used from the previous pass.
        (flags == used_flags(wrap) && self.free_slots < self.ring.size).then_some(word)
    }

    /// Takes up to `out.len()` chains that the device has used; returns how many.
    ///
    /// # Errors
    /// The [`DriverFault`] if the next used chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, DriverFault> {
        let mut count = 0;
        while let Some(rest) = out.get_mut(count..).filter(|rest| !rest.is_empty()) {
            let taken = self.take_singles(rest, count == 0);
            count += taken;
            let Some(place) = rest.get_mut(taken) else { break };
            let used = match self.next() {
                Ok(Some(used)) => used,
                Err(fault) if count == 0 => return Err(fault),
                _ => break,
            };
            let state = &mut self.states[used.id as usize];
            let slots = state.slots;
            if !self.features.in_order {
                state.slots = 0;
            }
            self.next_used.advance(slots, self.ring.size);
            self.free_slots += slots;
            self.multi_descriptor -= u16::from(slots > 1);
            self.ids.put_back(used.id);
            *place = used;
            count += 1;
        }
        if count > 0 {
            self.expected = count as u16;
        }
        Ok(count)
    }

    /// Fast path: single-descriptor chains, in order or not, with one used descriptor each.
    #[inline(always)]
    fn take_singles(&mut self, out: &mut [Used], fetch: bool) -> usize {
        if !self.fast_path || self.batch.is_some() {
            return 0;
        }
        if fetch && self.used().is_some() {
            // Available descriptors will be written to these lines next.
            self.ring.prefetch(self.next_used.slot, self.expected, true);
        }
        if self.features.in_order {
            return self.take_in_order(out);
        }
        let Driver { ring, ids, states, .. } = self;
        let Position { mut slot, mut wrap } = self.next_used;
        let mut flags = used_flags(wrap);
        let descriptors = ring.pairs();
        // Descriptors beyond those in flight may look used from the previous pass.
        let max = out.len().min(usize::from(ring.size - self.free_slots));
        let mut count = 0;
        for out in out.iter_mut().take(max) {
            let Some([_, word]) = descriptors.get(slot as usize) else { break };
            // Pairs with the device's release store of this word, as in `used`.
            let word = u64::from_le(word.load(Ordering::Acquire));
            if (word >> 48) as u16 & (AVAILABLE | USED) != flags {
                break;
            }
            let (id, len) = ((word >> 32) as u16, word as u32);
            let Some(state) = states.get_mut(id as usize) else { break };
            let Ok(len) = written(id, len, state.room) else { break };
            if state.slots != 1 {
                break;
            }
            state.slots = 0;
            ids.put_back(id);
            *out = Used { id, len };
            count += 1;
            slot += 1;
            if slot == ring.size {
                slot = 0;
                wrap = !wrap;
                flags ^= AVAILABLE | USED;
            }
        }
        self.next_used = Position { slot, wrap };
        self.free_slots += count as u16;
        count
    }

    /// The in-order case, up to the end of the ring or of the circular id list.
    #[inline(always)]
    fn take_in_order(&mut self, out: &mut [Used]) -> usize {
        let Position { slot, wrap } = self.next_used;
        let flags = u32::from(used_flags(wrap)) << 16;
        let descriptors = self.ring.pairs().get(slot as usize..).unwrap_or_default();
        let states = &self.states[..];
        let mut count = 0;
        for ((out, &id), [_, word]) in out.iter_mut().zip(self.ids.oldest_run(BURST)).zip(descriptors) {
            // Pairs with the device's release store of this word, as in `used`.
            let word = u64::from_le(word.load(Ordering::Acquire));
            let Some(&State { slots: 1, room }) = states.get(id as usize) else { break };
            // Anything unexpected, valid or not, is left to the normal path.
            if (word >> 32) as u32 & (u32::from(AVAILABLE | USED) << 16 | 0xffff) != flags | u32::from(id) {
                break;
            }
            let Ok(len) = written(id, word as u32, room) else { break };
            *out = Used { id, len };
            count += 1;
        }
        self.next_used.advance(count as u16, self.ring.size);
        self.free_slots += count as u16;
        self.ids.put_back_oldest(count);
        count
    }

    /// Takes up to `max` chains, for callers that do not need their ids; returns how many.
    ///
    /// # Errors
    /// As for `take_used`.
    #[inline]
    pub fn reclaim(&mut self, max: usize) -> Result<usize, DriverFault> {
        if !self.fast_path || !self.features.in_order || self.multi_descriptor > 0 {
            let mut used = [Used::default(); BURST];
            return self.take_used(&mut used[..max.min(BURST)]);
        }
        // In order and one descriptor each: the last id of a batch determines how many chains it has.
        let mut all = 0;
        while all < max {
            let end = match self.batch {
                Some(end) => end,
                None => {
                    let Some(word) = self.used() else { break };
                    let (id, len) = ((word >> 32) as u16, word as u32);
                    let room = self.states.get(id as usize).map_or(0, |state| state.room);
                    match written(id, len, room) {
                        Ok(len) if self.ids.is_in_flight(id.into()) => Used { id, len },
                        _ if all > 0 => break,
                        Ok(_) => return Err(DriverFault::Id { id: id.into() }),
                        Err(fault) => return Err(fault),
                    }
                }
            };
            let whole = self.ids.count_up_to(end.id.into());
            let count = whole.min(max - all);
            self.batch = (count < whole).then_some(end);
            self.next_used.advance(count as u16, self.ring.size);
            self.free_slots += count as u16;
            self.ids.put_back_oldest(count);
            all += count;
        }
        Ok(all)
    }

    /// Takes the next used chain, if there is one.
    #[inline(always)]
    fn next(&mut self) -> Result<Option<Used>, DriverFault> {
        let end = match self.batch {
            Some(end) => end,
            None => {
                let Some(word) = self.used() else { return Ok(None) };
                let (id, len) = ((word >> 32) as u16, word as u32);
                let in_flight = |state: &&State| {
                    if self.features.in_order { self.ids.is_in_flight(id.into()) } else { state.slots > 0 }
                };
                let state = self.states.get(id as usize).filter(in_flight);
                let Some(state) = state else { return Err(DriverFault::Id { id: id.into() }) };
                Used { id, len: written(id, len, state.room)? }
            }
        };
        if self.features.in_order {
            // Return the oldest chain first, up to the one named by the descriptor. That one is in flight, so it will be
            // reached. Those before it count as written in full (2.7.9).
            let Some(id) = self.ids.oldest() else { return Err(DriverFault::Id { id: end.id.into() }) };
            let last = id == end.id;
            if !last || self.batch.is_some() {
                self.batch = (!last).then_some(end);
            }
            if !last {
                return Ok(Some(Used { id, len: self.states[id as usize].room }));
            }
        }
        Ok(Some(end))
    }

    /// Returns whether the device wants to be notified of what was published since the last call.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        let unsignalled = std::mem::take(&mut self.unsignalled);
        if unsignalled == 0 {
            return false;
        }
        // Pairs with the device's fence between writing its event structure and re-reading the ring (2.8.21.3.1): without
        // it both sides may sleep.
        fence(Ordering::SeqCst);
        let event = Event::from_word(self.ring.device_event[0].load(Ordering::Relaxed));
        event.wanted(self.published.slot, self.published.wrap, unsignalled, self.ring.size)
    }

    /// Asks the device to notify us of the next chain that it uses. Returns `true` if a used chain is there already.
    pub fn enable_notification(&mut self) -> bool {
        let event =
            if self.features.event_idx { Event::at(self.next_used.slot, self.next_used.wrap) } else { Event::ENABLED };
        self.ring.driver_event[0].store(event.to_word(), Ordering::Relaxed);
        // Pairs with the device's fence between publishing used descriptors and reading the value stored here.
        fence(Ordering::SeqCst);
        self.batch.is_some() || self.used().is_some()
    }

    /// Asks the device not to notify us, because we poll.
    pub fn disable_notification(&mut self) {
        self.ring.driver_event[0].store(Event::DISABLED.to_word(), Ordering::Relaxed);
    }

    /// Returns where a device without state of its own must resume: behind the last used chain, whether taken here or not.
    #[cfg(not(loom))]
    pub fn base(&self) -> Base {
        let size = self.ring.size;
        let (mut at, mut chains, mut left) = (self.next_used, 0, size - self.free_slots);
        let mut batch = self.batch.map(|end| end.id);
        // The device's last writes may be garbage: never go beyond the slots in flight.
        while left > 0 {
            let Some(id) = batch.take().or_else(|| self.used_at(at)) else { break };
            // In order, an id stands for all chains up to its own.
            let end = if self.features.in_order { self.ids.count_up_to(id.into()) } else { chains + 1 };
            if end <= chains {
                break;
            }
            while chains < end {
                let id = if self.features.in_order { self.ids.in_flight(chains).unwrap_or(id) } else { id };
                let slots = self.states.get(usize::from(id)).map_or(0, |state| state.slots);
                if slots == 0 || slots > left {
                    return Base::new(at, at);
                }
                at.advance(slots, size);
                left -= slots;
                chains += 1;
            }
        }
        Base::new(at, at)
    }

    /// Returns how many slots a device that stopped at `base` took and never returned.
    #[cfg(not(loom))]
    pub(crate) fn missing(&self, base: u32) -> u32 {
        let size = self.ring.size;
        // Both formats of the reply carry the available half.
        let (given, taken) = (Position::from_bits(self.base().0 as u16, size), Position::from_bits(base as u16, size));
        given.distance(taken, size).into()
    }

    /// Returns the id of the descriptor at a position, if it was used in that pass.
    #[cfg(not(loom))]
    fn used_at(&self, at: Position) -> Option<u16> {
        // Pairs with the device's release store of this word, as in `used`.
        let word = u64::from_le(self.ring.pairs().get(usize::from(at.slot))?[1].load(Ordering::Acquire));
        ((word >> 48) as u16 & (AVAILABLE | USED) == used_flags(at.wrap)).then_some((word >> 32) as u16)
    }
}
