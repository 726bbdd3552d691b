//! Driver end of a split virtqueue (virtio 1.3, 2.7): what it does not share with a packed one. Called by `driver.rs`.

use super::layout::{ELEMENTS_PER_LINE, ENTRIES, FLAGS, INDEX, Layout, NO_NOTIFICATION};
use crate::{
    Buffer, DriverFault, Features, NEXT, WRITE,
    driver::{Driver, DriverEnd},
    layout::RingPosition,
    notify,
};
use ringroad_mem::sync::Ordering;

/// What is in the ring for an index, as last written. Unchanged contents are not written again, so that the line stays shared.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) struct Written {
    /// The descriptor.
    address: u64,
    word: u64,
    /// The entry of the available ring.
    entry: Option<u16>,
}

/// What only a split ring's driver end keeps.
#[derive(Default)]
pub(crate) struct DriverState {
    /// Used index as last read; no need to read it again before reaching it.
    seen: u16,
    /// Chains in flight.
    outstanding: u16,
}

impl Driver<Layout> {
    /// Starts a fresh ring.
    pub fn new(ring: Layout, features: Features) -> Self {
        Self::at(ring, features, 0, DriverState::default())
    }

    /// Returns how many used chains have not been taken, or [`DriverFault::UsedJump`].
    #[inline(always)]
    fn ahead(&self) -> Result<u16, DriverFault> {
        // Pairs with the device's release store of the index: the elements and buffers before it are visible.
        let index = u16::from_le(self.ring.used[INDEX].load(Ordering::Acquire));
        let (next, outstanding) = (self.next_used, self.state.outstanding);
        let ahead = index.wrapping_sub(next);
        if ahead > outstanding { Err(DriverFault::UsedJump { index, next, ahead, outstanding }) } else { Ok(ahead) }
    }

    /// Returns where a device without state of its own must resume: behind the last used chain, whether taken here or not.
    pub fn base(&self) -> u32 {
        self.next_used.wrapping_add(self.ahead().unwrap_or(0)).into()
    }

    /// Returns how many chains a device that stopped at `base` took and never returned.
    pub fn missing(&self, base: u32) -> u32 {
        (base as u16).wrapping_sub(self.base() as u16).into()
    }
}

impl DriverEnd for Driver<Layout> {
    #[inline(always)]
    fn free(&self) -> usize {
        self.ids.free()
    }

    #[inline(always)]
    fn write(&mut self, nth: usize, buffer: Buffer, flags: u16, more: bool) {
        let (Some(index), next) = (self.ids.next(nth), self.ids.next(nth + 1).filter(|_| more)) else { return };
        let word = match next {
            Some(next) => word(buffer.len, flags | NEXT, next),
            None => word(buffer.len, flags, 0),
        };
        let state = &mut self.states[index as usize];
        state.descriptors = 0;
        if (state.written.address, state.written.word) != (buffer.address, word) {
            (state.written.address, state.written.word) = (buffer.address, word);
            self.ring.descriptors[2 * index as usize].store(buffer.address.to_le(), Ordering::Relaxed);
            self.ring.descriptors[2 * index as usize + 1].store(word.to_le(), Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn end(&mut self, head: u16, descriptors: u16, room: u32) {
        let state = &mut self.states[head as usize];
        (state.descriptors, state.room) = (descriptors, room);
        let slot = self.next_available.slot(self.ring.size);
        if self.states[slot].written.entry != Some(head) {
            self.states[slot].written.entry = Some(head);
            self.ring.available[ENTRIES + slot].store(head.to_le(), Ordering::Relaxed);
        }
        self.ids.advance(descriptors.into());
        self.next_available = self.next_available.wrapping_add(1);
        self.state.outstanding += 1;
    }

    #[inline(always)]
    fn add_run(&mut self, count: usize, writable: bool, mut buffer: impl FnMut(u16) -> Buffer) -> usize {
        let Driver { ring, ids, states, .. } = self;
        let states = &mut states[..];
        let ids = ids.run(0, count);
        let flags = if writable { WRITE } else { 0 };
        let (descriptors, available) = (ring.descriptors.as_chunks::<2>().0, &ring.available[ENTRIES..]);
        let (mut next, mask) = (self.next_available, ring.size - 1);
        for &id in ids {
            let Buffer { address, len } = buffer(id);
            let (word, room) = (word(len, flags, 0), if writable { len } else { 0 });
            let Some(state) = states.get_mut(id as usize) else { break };
            // Write nothing that has not changed, neither in the ring nor in the private state: each store saved leaves
            // more room in the store buffer, so that more of the stores to the ring can wait for their lines in parallel.
            let old = &mut state.written;
            if (old.address, old.word) != (address, word) {
                (old.address, old.word) = (address, word);
                if let Some(descriptor) = descriptors.get(id as usize) {
                    descriptor[0].store(address.to_le(), Ordering::Relaxed);
                    descriptor[1].store(word.to_le(), Ordering::Relaxed);
                }
            }
            if (state.descriptors, state.room) != (1, room) {
                (state.descriptors, state.room) = (1, room);
            }
            let slot = usize::from(next & mask);
            if let Some(state) = states.get_mut(slot).filter(|state| state.written.entry != Some(id)) {
                state.written.entry = Some(id);
                if let Some(entry) = available.get(slot) {
                    entry.store(id.to_le(), Ordering::Relaxed);
                }
            }
            next = next.wrapping_add(1);
        }
        let count = ids.len();
        self.ids.advance(count);
        self.next_available = next;
        self.state.outstanding += count as u16;
        count
    }

    #[inline(always)]
    fn store(&mut self) {
        // Pairs with the device's acquire load of the index: entries, descriptors and buffers are written before it.
        self.ring.available[INDEX].store(self.next_available.to_le(), Ordering::Release);
    }

    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<usize, DriverFault> {
        let mut ahead = self.state.seen.wrapping_sub(self.next_used) as usize;
        if ahead < wanted {
            ahead = self.ahead()?.into();
            self.state.seen = self.next_used.wrapping_add(ahead as u16);
        }
        let count = ahead.min(wanted);
        for ahead in (0..count).step_by(ELEMENTS_PER_LINE) {
            let at = self.next_used.wrapping_add(ahead as u16).slot(self.ring.size);
            self.ring.elements.prefetch(2 * at, false);
        }
        Ok(count)
    }

    #[inline(always)]
    fn used(&self) -> Option<(u32, u32)> {
        let at = 2 * self.next_used.slot(self.ring.size);
        let load = |at: usize| u32::from_le(self.ring.elements[at].load(Ordering::Relaxed));
        Some((load(at), load(at + 1)))
    }

    #[inline(always)]
    fn advance(&mut self, chains: u16, _descriptors: u16) {
        self.next_used = self.next_used.wrapping_add(chains);
        self.state.outstanding -= chains;
    }

    #[inline(always)]
    fn put_back(&mut self, mut id: u16, descriptors: u16) {
        for _ in 0..descriptors {
            self.ids.put_back(id);
            id = (self.states[id as usize].written.word >> 48) as u16;
        }
    }

    #[inline(always)]
    fn reclaim_in_order(&mut self, max: usize) -> Result<usize, DriverFault> {
        if self.batch.is_some() {
            return self.reclaim_each(max);
        }
        // The used index alone is enough.
        let count = usize::from(self.ahead()?).min(max);
        self.advance(count as u16, count as u16);
        self.state.seen = self.next_used;
        self.ids.put_back_oldest(count);
        Ok(count)
    }

    #[inline(always)]
    fn is_requested(&self, unsignalled: u32) -> bool {
        if self.features.event_idx {
            let event = self.ring.available_event[0].load(Ordering::Relaxed);
            notify::need_event(u16::from_le(event), self.published, unsignalled)
        } else {
            u16::from_le(self.ring.used[FLAGS].load(Ordering::Relaxed)) & NO_NOTIFICATION == 0
        }
    }

    fn request(&mut self) {
        if self.features.event_idx {
            let event = ENTRIES + self.ring.size as usize;
            self.ring.available[event].store(self.next_used.to_le(), Ordering::Relaxed);
        } else {
            self.ring.available[FLAGS].store(0, Ordering::Relaxed);
        }
    }

    fn suppress(&mut self) {
        if self.features.event_idx {
            // An index that has just been passed is not reached again for 65536 buffers.
            let event = ENTRIES + self.ring.size as usize;
            self.ring.available[event].store(self.next_used.wrapping_sub(1).to_le(), Ordering::Relaxed);
        } else {
            self.ring.available[FLAGS].store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }

    fn is_used(&self) -> bool {
        self.ahead() != Ok(0)
    }
}

/// Builds the second word of a descriptor.
#[inline(always)]
fn word(len: u32, flags: u16, next: u16) -> u64 {
    u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48
}
