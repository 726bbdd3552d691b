//! Driver end of a split virtqueue (virtio 1.3, 2.7): makes buffers available and takes used ones. Called through
//! `DriverRing`.

use super::layout::{ELEMENTS_PER_LINE, ENTRIES, FLAGS, INDEX, Layout, NO_NOTIFICATION};
use crate::{
    BURST, Buffer, DriverFault, Features, Full, NEXT, Used, WRITE,
    driver::{Ids, written},
    notify,
};
#[cfg(not(loom))]
use crate::{INDIRECT, driver::IndirectTables};
use ringroad_mem::sync::{Ordering, fence};

/// Private state of a descriptor. The copy in the ring may be overwritten by the device.
#[derive(Clone, Copy, Default)]
struct State {
    /// Contents as last written; unchanged contents are not written again, so that the line stays shared.
    address: u64,
    word: u64,
    /// The available ring entry of this index as last written.
    entry: Option<u16>,
    /// Number of descriptors of the chain that starts here; 0 if no chain in flight does. With IN_ORDER the value stays
    /// after the chain has returned, until the descriptor is used again.
    chain: u16,
    /// Bytes that the device may write.
    room: u32,
}

/// Driver end of a split virtqueue.
pub struct Driver {
    ring: Layout,
    mask: u16,
    features: Features,
    states: Box<[State]>,
    ids: Ids,
    next_available: u16,
    published: u16,
    /// `published` at the last decision whether to notify the device.
    signalled: u16,
    next_used: u16,
    /// Used index as last read; no need to read it again before reaching it.
    seen: u16,
    outstanding: u16,
    /// Chains in flight with more than one descriptor.
    multi_descriptor: u16,
    /// Within an in-order batch: the chain that ends it.
    batch: Option<Used>,
    fast_path: bool,
    #[cfg(not(loom))]
    tables: Option<IndirectTables>,
}

impl Driver {
    /// Returns the driver end of a fresh ring, with nothing available or used. The ring's memory must be zeroed.
    pub fn new(ring: Layout, features: Features) -> Driver {
        let (mask, size) = (ring.size - 1, ring.size);
        Driver {
            mask,
            features,
            states: vec![State::default(); size.into()].into(),
            ids: Ids::new(size),
            next_available: 0,
            published: 0,
            signalled: 0,
            next_used: 0,
            seen: 0,
            outstanding: 0,
            multi_descriptor: 0,
            batch: None,
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
        self.ids.free()
    }

    /// Returns the id of the single-buffer chain to be added after `ahead` others.
    #[inline(always)]
    pub fn next_id(&self, ahead: usize) -> Option<u16> {
        self.ids.next(ahead)
    }

    /// Returns ids of the single-buffer chains to be added after `ahead` others: up to `count`, possibly fewer.
    #[inline(always)]
    pub fn next_ids(&self, ahead: usize, count: usize) -> &[u16] {
        self.ids.run(ahead, count)
    }

    /// Does nothing: descriptors that do not change are not written.
    #[inline]
    pub fn prefetch(&self, _count: usize) {}

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
        let head = self.ids.next(0).ok_or(Full)?;
        #[cfg(not(loom))]
        if count > 1
            && let Some(table) = self.tables.as_ref().and_then(|t| t.write(head, chain(), true))
        {
            self.descriptor(head, table, INDIRECT, 0);
            self.started(head, 1, writable);
            return Ok(head);
        }
        if count == 0 || count > self.ids.free() {
            return Err(Full);
        }
        for (i, (buffer, flags)) in chain().enumerate() {
            let Some(index) = self.ids.next(i) else { return Err(Full) };
            match self.ids.next(i + 1) {
                Some(next) if i + 1 < count => self.descriptor(index, buffer, flags | NEXT, next),
                _ => self.descriptor(index, buffer, flags, 0),
            }
            self.states[index as usize].chain = 0;
        }
        self.started(head, count as u16, writable);
        Ok(head)
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

    /// As `add_single`, for contiguous ids.
    #[inline(always)]
    fn add_run(&mut self, count: usize, writable: bool, mut buffer: impl FnMut(u16) -> Buffer) -> usize {
        let Driver { ring, ids, states, mask, .. } = self;
        let ids = ids.run(0, count);
        let flags = if writable { WRITE } else { 0 };
        let (descriptors, available) = (ring.descriptors.as_chunks::<2>().0, &ring.available[ENTRIES..]);
        let mut next = self.next_available;
        for &id in ids {
            let Buffer { address, len } = buffer(id);
            let (word, room) = (word(len, flags, 0), if writable { len } else { 0 });
            let Some(state) = states.get_mut(id as usize) else { break };
            // Write nothing that has not changed, neither in the ring nor in the private state: each store saved leaves
            // more room in the store buffer, so that more of the stores to the ring can wait for their lines in parallel.
            if (state.address, state.word) != (address, word) {
                (state.address, state.word) = (address, word);
                if let Some(descriptor) = descriptors.get(id as usize) {
                    descriptor[0].store(address.to_le(), Ordering::Relaxed);
                    descriptor[1].store(word.to_le(), Ordering::Relaxed);
                }
            }
            if (state.chain, state.room) != (1, room) {
                (state.chain, state.room) = (1, room);
            }
            let slot = (next & *mask) as usize;
            if let Some(state) = states.get_mut(slot).filter(|state| state.entry != Some(id)) {
                state.entry = Some(id);
                if let Some(entry) = available.get(slot) {
                    entry.store(id.to_le(), Ordering::Relaxed);
                }
            }
            next = next.wrapping_add(1);
        }
        let count = ids.len();
        self.ids.advance(count);
        self.next_available = next;
        self.outstanding += count as u16;
        count
    }

    #[inline(always)]
    fn descriptor(&mut self, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let word = word(buffer.len, flags, next);
        let state = &mut self.states[index as usize];
        if (state.address, state.word) != (buffer.address, word) {
            (state.address, state.word) = (buffer.address, word);
            self.ring.descriptors[2 * index as usize].store(buffer.address.to_le(), Ordering::Relaxed);
            self.ring.descriptors[2 * index as usize + 1].store(word.to_le(), Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn started(&mut self, head: u16, descriptors: u16, writable: &[Buffer]) {
        let room = writable.iter().fold(0, |sum: u32, buffer| sum.saturating_add(buffer.len));
        self.available(self.next_available, head, descriptors, room);
        self.ids.advance(descriptors.into());
        self.next_available = self.next_available.wrapping_add(1);
        self.outstanding += 1;
        self.multi_descriptor += u16::from(descriptors > 1);
    }

    /// Puts the chain that starts at `head` into the available ring at this index.
    #[inline(always)]
    fn available(&mut self, index: u16, head: u16, descriptors: u16, room: u32) {
        let state = &mut self.states[head as usize];
        if (state.chain, state.room) != (descriptors, room) {
            (state.chain, state.room) = (descriptors, room);
        }
        let slot = (index & self.mask) as usize;
        if self.states[slot].entry != Some(head) {
            self.states[slot].entry = Some(head);
            self.ring.available[ENTRIES + slot].store(head.to_le(), Ordering::Relaxed);
        }
    }

    /// Makes all added chains available to the device.
    #[inline]
    pub fn publish(&mut self) {
        if self.published != self.next_available {
            self.published = self.next_available;
            // Pairs with the device's acquire load of the index: entries, descriptors and buffers are written before it.
            self.ring.available[INDEX].store(self.published.to_le(), Ordering::Release);
        }
    }

    #[inline(always)]
    fn used(&self) -> Result<u16, DriverFault> {
        // Pairs with the device's release store of the index: the elements and buffers before it are visible.
        let index = u16::from_le(self.ring.used[INDEX].load(Ordering::Acquire));
        let ahead = index.wrapping_sub(self.next_used);
        if ahead > self.outstanding {
            let (next, outstanding) = (self.next_used, self.outstanding);
            return Err(DriverFault::UsedJump { index, next, ahead, outstanding });
        }
        Ok(ahead)
    }

    /// Takes up to `out.len()` chains that the device has used; returns how many.
    ///
    /// # Errors
    /// The [`DriverFault`] if the next used chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, DriverFault> {
        let mut ahead = self.seen.wrapping_sub(self.next_used) as usize;
        if ahead < out.len() {
            ahead = self.used()?.into();
            self.seen = self.next_used.wrapping_add(ahead as u16);
        }
        let count = ahead.min(out.len());
        for ahead in (0..count).step_by(ELEMENTS_PER_LINE) {
            let at = self.next_used.wrapping_add(ahead as u16) & self.mask;
            self.ring.elements.prefetch(2 * at as usize, false);
        }
        let fast = self.take_singles(&mut out[..count]);
        for (taken, out) in out[..count].iter_mut().enumerate().skip(fast) {
            let used = match self.next() {
                Ok(used) => used,
                Err(fault) if taken == 0 => return Err(fault),
                Err(_) => return Ok(taken),
            };
            let state = &mut self.states[used.id as usize];
            let (mut index, descriptors) = (used.id, state.chain);
            if !self.features.in_order {
                state.chain = 0;
            }
            for _ in 0..descriptors {
                self.ids.put_back(index);
                index = (self.states[index as usize].word >> 48) as u16;
            }
            self.next_used = self.next_used.wrapping_add(1);
            self.outstanding -= 1;
            self.multi_descriptor -= u16::from(descriptors > 1);
            *out = used;
        }
        Ok(count)
    }

    /// Fast path: single-descriptor chains, in order or not, with one used element each.
    #[inline(always)]
    fn take_singles(&mut self, out: &mut [Used]) -> usize {
        if !self.fast_path || self.batch.is_some() {
            return 0;
        }
        if self.features.in_order {
            return self.take_in_order(out);
        }
        let Driver { ring, ids, states, mask, .. } = self;
        let elements = ring.elements.as_chunks::<2>().0;
        let mut next = self.next_used;
        let mut count = 0;
        for out in out {
            let Some([id, len]) = elements.get((next & *mask) as usize) else { break };
            let (id, len) = (u32::from_le(id.load(Ordering::Relaxed)), u32::from_le(len.load(Ordering::Relaxed)));
            let Some(state) = states.get_mut(id as usize) else { break };
            let id = id as u16;
            let Ok(len) = written(id, len, state.room) else { break };
            if state.chain != 1 {
                break;
            }
            state.chain = 0;
            ids.put_back(id);
            *out = Used { id, len };
            next = next.wrapping_add(1);
            count += 1;
        }
        self.next_used = next;
        self.outstanding -= count as u16;
        count
    }

    /// The in-order case, up to the end of the ring or of the circular id list.
    #[inline(always)]
    fn take_in_order(&mut self, out: &mut [Used]) -> usize {
        let elements = self.ring.elements.as_chunks::<2>().0;
        let elements = elements.get((self.next_used & self.mask) as usize..).unwrap_or_default();
        let mut count = 0;
        for ((out, &id), [used, len]) in out.iter_mut().zip(self.ids.oldest_run(BURST)).zip(elements) {
            let (used, len) = (u32::from_le(used.load(Ordering::Relaxed)), u32::from_le(len.load(Ordering::Relaxed)));
            let Some(&State { chain: 1, room, .. }) = self.states.get(id as usize) else { break };
            // Anything unexpected, valid or not, is left to the normal path.
            if used != id.into() {
                break;
            }
            let Ok(len) = written(id, len, room) else { break };
            *out = Used { id, len };
            count += 1;
        }
        self.next_used = self.next_used.wrapping_add(count as u16);
        self.outstanding -= count as u16;
        self.ids.put_back_oldest(count);
        count
    }

    /// Takes up to `max` chains, for callers that do not need their ids; returns how many.
    ///
    /// # Errors
    /// As for `take_used`.
    #[inline]
    pub fn reclaim(&mut self, max: usize) -> Result<usize, DriverFault> {
        if !self.fast_path || !self.features.in_order || self.multi_descriptor > 0 || self.batch.is_some() {
            let mut used = [Used::default(); BURST];
            return self.take_used(&mut used[..max.min(BURST)]);
        }
        // In order and one descriptor each: the used index alone is enough.
        let count = usize::from(self.used()?).min(max);
        self.next_used = self.next_used.wrapping_add(count as u16);
        self.seen = self.next_used;
        self.outstanding -= count as u16;
        self.ids.put_back_oldest(count);
        Ok(count)
    }

    /// Takes the next used chain.
    #[inline(always)]
    fn next(&mut self) -> Result<Used, DriverFault> {
        let end = match self.batch {
            Some(end) => end,
            None => {
                let at = 2 * (self.next_used & self.mask) as usize;
                let id = u32::from_le(self.ring.elements[at].load(Ordering::Relaxed));
                let len = u32::from_le(self.ring.elements[at + 1].load(Ordering::Relaxed));
                let in_flight =
                    |state: &&State| state.chain > 0 && (!self.features.in_order || self.ids.is_in_flight(id as usize));
                let state = self.states.get(id as usize).filter(in_flight);
                let Some(state) = state else { return Err(DriverFault::Id { id }) };
                let id = id as u16;
                Used { id, len: written(id, len, state.room)? }
            }
        };
        if self.features.in_order {
            // Return the oldest chain first, up to the one named by the element. That one is in flight, so it will be
            // reached. Those before it count as written in full (2.7.9).
            let Some(id) = self.ids.oldest() else { return Err(DriverFault::Id { id: end.id.into() }) };
            let last = id == end.id;
            if !last || self.batch.is_some() {
                self.batch = (!last).then_some(end);
            }
            if !last {
                return Ok(Used { id, len: self.states[id as usize].room });
            }
        }
        Ok(end)
    }

    /// Returns whether the device wants to be notified of what was published since the last call.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        let old = std::mem::replace(&mut self.signalled, self.published);
        if old == self.published {
            return false;
        }
        // Pairs with the device's fence between requesting notifications and re-reading the available index (2.7.10.1):
        // without it both sides may sleep.
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let event = self.ring.available_event[0].load(Ordering::Relaxed);
            notify::need_event(u16::from_le(event), self.published, old)
        } else {
            u16::from_le(self.ring.used[FLAGS].load(Ordering::Relaxed)) & NO_NOTIFICATION == 0
        }
    }

    /// Asks the device to notify us of the next chain that it uses. Returns `true` if a used chain is there already.
    pub fn enable_notification(&mut self) -> bool {
        if self.features.event_idx {
            let event = ENTRIES + self.ring.size as usize;
            self.ring.available[event].store(self.next_used.to_le(), Ordering::Relaxed);
        } else {
            self.ring.available[FLAGS].store(0, Ordering::Relaxed);
        }
        // Pairs with the device's fence between publishing the used index and reading the value stored here.
        fence(Ordering::SeqCst);
        self.used() != Ok(0)
    }

    /// Asks the device not to notify us, because we poll.
    pub fn disable_notification(&mut self) {
        if self.features.event_idx {
            // An index that has just been passed is not reached again for 65536 buffers.
            let event = ENTRIES + self.ring.size as usize;
            self.ring.available[event].store(self.next_used.wrapping_sub(1).to_le(), Ordering::Relaxed);
        } else {
            self.ring.available[FLAGS].store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }
}

#[cfg(not(loom))]
impl Driver {
    /// Returns where a device without state of its own must resume: behind the last used chain, whether taken here or not.
    pub fn base(&self) -> u16 {
        self.next_used.wrapping_add(self.used().unwrap_or(0))
    }
}

/// Builds the second word of a descriptor.
#[inline(always)]
fn word(len: u32, flags: u16, next: u16) -> u64 {
    u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48
}
