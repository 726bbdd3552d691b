//! Driver end of a packed virtqueue (virtio 1.3, 2.8): what it does not share with a split one. Called by `driver.rs`.

use super::layout::{AVAILABLE, Base, LINE, Layout, Position, USED, available_flags, used_flags, word};
use crate::{
    Buffer, DriverFault, Features, NEXT, Used, WRITE,
    driver::{Driver, DriverEnd, State, written},
    layout::RingPosition,
    notify::Event,
};
use ringroad_mem::sync::Ordering;

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

/// What only a packed ring's driver end keeps.
pub(crate) struct DriverState {
    free_slots: u16,
    held: Held,
}

impl Driver<Layout> {
    /// Starts a fresh ring.
    pub fn new(ring: Layout, features: Features) -> Self {
        let state = DriverState { free_slots: ring.size, held: Held::default() };
        Self::at(ring, features, Position::START, state)
    }

    #[inline(always)]
    fn store_words(&self, slot: u16, words: [u64; 2], ordering: Ordering) {
        self.ring.descriptors[2 * slot as usize].store(words[0], Ordering::Relaxed);
        self.ring.descriptors[2 * slot as usize + 1].store(words[1], ordering);
    }

    /// Returns the id and length of the descriptor at a position, if it was used in that pass.
    #[inline(always)]
    fn used_at(&self, at: Position) -> Option<(u16, u32)> {
        // Pairs with the device's release store of this word: the buffers and the used descriptors behind it are visible.
        let word = u64::from_le(self.ring.descriptors[2 * at.slot as usize + 1].load(Ordering::Acquire));
        let is_used = (word >> 48) as u16 & (AVAILABLE | USED) == used_flags(at.wrap);
        is_used.then_some(((word >> 32) as u16, word as u32))
    }

    /// Returns the next used descriptor.
    #[inline(always)]
    fn next_used(&self) -> Option<(u16, u32)> {
        // If nothing is in flight, a descriptor may look used from the previous pass.
        self.used_at(self.next_used).filter(|_| self.state.free_slots < self.ring.size)
    }

    /// Returns where a device without state of its own must resume: behind the last used chain, whether taken here or not.
    pub fn base(&self) -> u32 {
        let size = self.ring.size;
        let (mut at, mut chains, mut left) = (self.next_used, 0, size - self.state.free_slots);
        let mut batch = self.batch.map(|end| end.id);
        // The device's last writes may be garbage: never go beyond the slots in flight.
        while left > 0 {
            let Some(id) = batch.take().or_else(|| self.used_at(at).map(|(id, _)| id)) else { break };
            // In order, an id stands for all chains up to its own.
            let end = if self.features.in_order { self.ids.count_up_to(id.into()) } else { chains + 1 };
            if end <= chains {
                break;
            }
            while chains < end {
                let id = if self.features.in_order { self.ids.in_flight(chains).unwrap_or(id) } else { id };
                let slots = self.states.get(usize::from(id)).map_or(0, |state| state.descriptors);
                if slots == 0 || slots > left {
                    return Base::new(at, at).0;
                }
                at.advance(slots, size);
                left -= slots;
                chains += 1;
            }
        }
        Base::new(at, at).0
    }

    /// Returns how many slots a device that stopped at `base` took and never returned.
    pub fn missing(&self, base: u32) -> u32 {
        let size = self.ring.size;
        // Both formats of the reply carry the available half.
        let (given, taken) = (Position::from_bits(self.base() as u16, size), Position::from_bits(base as u16, size));
        given.distance(taken, size).into()
    }
}

impl DriverEnd for Driver<Layout> {
    #[inline(always)]
    fn free(&self) -> usize {
        self.state.free_slots.into()
    }

    #[inline]
    fn prefetch(&self, count: usize) {
        self.ring.prefetch(self.next_available.slot, count.min(self.free()) as u16, true);
    }

    /// Writes the descriptor, or holds it back until `store`.
    #[inline(always)]
    fn write(&mut self, _nth: usize, buffer: Buffer, flags: u16, more: bool) {
        let Some(id) = self.ids.next(0) else { return };
        let Position { slot, wrap } = self.next_available;
        let flags = flags | available_flags(wrap) | if more { NEXT } else { 0 };
        let words = [buffer.address.to_le(), word(buffer.len, id, flags)];
        if !self.state.held.hold(slot, words) {
            self.store_words(slot, words, Ordering::Relaxed);
        }
        self.next_available.advance(1, self.ring.size);
    }

    #[inline(always)]
    fn end(&mut self, id: u16, descriptors: u16, room: u32) {
        self.ids.advance(1);
        self.states[id as usize] = State { descriptors, room, written: () };
        self.state.free_slots -= descriptors;
    }

    /// Up to the end of the ring or to the held line.
    #[inline(always)]
    fn add_run(&mut self, count: usize, writable: bool, mut buffer: impl FnMut(u16) -> Buffer) -> usize {
        let Driver { ring, ids, states, state: DriverState { held, free_slots, .. }, .. } = self;
        let Position { slot, wrap } = self.next_available;
        let flags = available_flags(wrap) | if writable { WRITE } else { 0 };
        let descriptors = ring.pairs().get(slot.into()..).unwrap_or_default();
        let ids = ids.run(0, count.min((*free_slots).into()).min(descriptors.len()).min(held.before(slot)));
        let mut add = |id: u16| {
            let Buffer { address, len } = buffer(id);
            // Each store saved leaves more room in the store buffer for those to the ring, which wait for their lines in
            // parallel.
            let room = if writable { len } else { 0 };
            if let Some(state) =
                states.get_mut(id as usize).filter(|state| (state.descriptors, state.room) != (1, room))
            {
                (state.descriptors, state.room) = (1, room);
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
        self.state.free_slots -= count as u16;
        count
    }

    #[inline(always)]
    fn store(&mut self) {
        let Held { first, mask, words } = self.state.held;
        let (line, first) = (first - first % LINE, first % LINE);
        for place in (0..LINE).filter(|&place| place != first && mask & 1 << place != 0) {
            self.store_words(line + place, words[place as usize], Ordering::Relaxed);
        }
        // Pairs with the device's acquire load of the second word: all other descriptors, and the buffers, are written
        // before it.
        self.store_words(line + first, words[first as usize], Ordering::Release);
        self.state.held.mask = 0;
    }

    /// Without a prefetch of the lines behind the first: a device that writes them one by one would lose each while it writes.
    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<usize, DriverFault> {
        Ok(wanted.min((self.ring.size - self.state.free_slots).into()))
    }

    #[inline(always)]
    fn used(&self) -> Option<(u32, u32)> {
        self.next_used().map(|(id, len)| (id.into(), len))
    }

    #[inline(always)]
    fn advance(&mut self, _chains: u16, descriptors: u16) {
        self.next_used.advance(descriptors, self.ring.size);
        self.state.free_slots += descriptors;
    }

    #[inline(always)]
    fn put_back(&mut self, id: u16, _descriptors: u16) {
        self.ids.put_back(id);
    }

    /// The last id of a batch determines how many chains it has.
    #[inline(always)]
    fn reclaim_in_order(&mut self, max: usize) -> Result<usize, DriverFault> {
        let mut all = 0;
        while all < max {
            let end = match self.batch {
                Some(end) => end,
                None => {
                    let Some((id, len)) = self.next_used() else { break };
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
            self.advance(count as u16, count as u16);
            self.ids.put_back_oldest(count);
            all += count;
        }
        Ok(all)
    }

    #[inline(always)]
    fn is_requested(&self, unsignalled: u32) -> bool {
        let event = Event::from_word(self.ring.device_event[0].load(Ordering::Relaxed));
        event.wanted(self.published.slot, self.published.wrap, unsignalled, self.ring.size)
    }

    fn request(&mut self) {
        let Position { slot, wrap } = self.next_used;
        let event = if self.features.event_idx { Event::at(slot, wrap) } else { Event::ENABLED };
        self.ring.driver_event[0].store(event.to_word(), Ordering::Relaxed);
    }

    fn suppress(&mut self) {
        self.ring.driver_event[0].store(Event::DISABLED.to_word(), Ordering::Relaxed);
    }

    fn is_used(&self) -> bool {
        self.next_used().is_some()
    }
}
