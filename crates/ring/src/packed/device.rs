//! Device end of a packed virtqueue (virtio 1.3, 2.8): what it does not share with a split one. Called by `device.rs`.

use super::{
    layout::{AVAILABLE, Base, Layout, Position, USED, available_flags, used_flags, word},
    recover,
};
use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Inflight, Journal, JournalKey, NEXT, Resumed, SetupError, WRITE,
    chain::Descriptor,
    device::{Device, DeviceEnd},
    inflight::Saved,
    journal::{Frontend, Progress, Staged},
    layout::RingPosition,
    notify::Event,
};
use ringroad_mem::{Table, sync::Ordering};

/// The deferred head: a batch of used descriptors stays invisible to the driver until this one, its first, is written.
#[derive(Clone, Copy)]
struct Deferred {
    /// Its slot, its flags without WRITE, and its second word.
    slot: u16,
    flags: u16,
    word: u64,
    /// The chains behind it have used descriptors of their own; else it stands for all of them.
    per_chain: bool,
    /// Its word is in the second of the journal's two places.
    second_word: bool,
}

/// What only a packed ring's device end keeps.
#[derive(Default)]
pub(crate) struct DeviceState {
    /// Descriptors taken and not returned.
    pub outstanding: u32,
    /// Descriptors of the last burst, as an estimate of how many lines to prefetch.
    pub expected: u16,
    /// The last chains were device-writable, so this is a receive queue.
    receives: bool,
    /// Head of the batch that is returned but not published yet.
    deferred: Option<Deferred>,
    /// The last deferred head is in the second of the journal's two places.
    second_word: bool,
    /// Some descriptor was not written when it was used.
    skipped: bool,
    /// Descriptors ahead that the frontend has used itself.
    foreign: Option<recover::Foreign>,
}

impl Device<Layout> {
    /// Starts at `base`.
    pub fn new(ring: Layout, features: Features, base: Base) -> Self {
        let start = base.position(&ring);
        Self::at(ring, features, start, start, DeviceState::default())
    }

    /// Starts where a former process left the ring, else at `base`.
    ///
    /// # Errors
    /// [`SetupError::Inflight`] if the inflight region is invalid.
    pub fn resume(
        ring: Layout,
        features: Features,
        base: Base,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
    ) -> Result<(Self, Resumed), SetupError> {
        let requested = base.position(&ring);
        let found = recover::find(&ring, &journal, key);
        if found.is_none()
            && let Some(found) = inflight.read_packed(&ring)?
        {
            return Ok(Self::adopt(ring, features, requested, journal, key, inflight, found));
        }
        let mut device = Self::new(ring, features, base);
        device.journal = journal;
        let Some(found) = found else {
            device.journal.start(key, device.next_used.to_bits());
            let lost = recover::is_in_use(&device.ring, requested);
            device.track = inflight.start_packed(device.ring.size, device.next_used).map(Box::new);
            return Ok((device, if lost { Resumed::Lost } else { Resumed::Base }));
        };
        let size = device.ring.size;
        (device.published, device.next_used) = (found.published, found.staged);
        device.next_available = found.staged;
        if found.published != found.staged {
            let Position { slot, wrap } = found.published;
            let (flags, word) = (used_flags(wrap), found.word);
            let (per_chain, second_word) = (found.per_chain, found.second_word);
            device.state.deferred = Some(Deferred { slot, flags, word, per_chain, second_word });
        }
        (device.state.second_word, device.state.skipped) = (found.second_word, !found.all_written);
        // Record only what is really staged, and what turned out to be published.
        device.journal.record_staged(device.staged());
        device.journal.record_published(device.published.to_bits());
        let finished = device.finish(found.taken.unwrap_or(found.staged));
        device.state.foreign = recover::foreign(&device.ring, found.frontend, requested, device.next_available);
        let from = device.state.foreign.map_or(requested, |run| run.from).to_bits();
        device.journal.record_frontend(Frontend { base: requested.to_bits(), from });
        let resumed = if finished > 0 || device.next_available != requested {
            Resumed::Journal { finished }
        } else {
            Resumed::Base
        };
        device.track = inflight.start_packed(size, device.next_used).map(Box::new);
        Ok((device, resumed))
    }

    /// Returns all chains up to a position without reading them, as a former process has consumed them, and publishes them.
    fn finish(&mut self, until: Position) -> u32 {
        let mut finished = 0;
        while self.next_available != until && finished < u32::from(self.ring.size) {
            let Some((id, slots)) = recover::chain(&self.ring, self.next_available) else { break };
            self.next_available.advance(slots, self.ring.size);
            self.state.outstanding += u32::from(slots);
            self.stage_batch(&[Chain::private(id, slots)]);
            finished += 1;
        }
        self.flush();
        finished
    }

    #[inline(always)]
    fn staged(&self) -> Staged {
        Staged {
            position: self.next_used.to_bits(),
            second_word: self.state.second_word,
            per_chain: self.state.deferred.is_some_and(|deferred| deferred.per_chain),
            all_written: !self.state.skipped,
        }
    }

    /// Returns the second word of the descriptor at a position, if it is available in that pass.
    #[inline(always)]
    fn word_at(&self, at: Position) -> Option<u64> {
        // Pairs with the driver's release store of this word: the address and the chain's other descriptors are visible.
        let word = u64::from_le(self.ring.descriptors[2 * at.slot as usize + 1].load(Ordering::Acquire));
        ((word >> 48) as u16 & (AVAILABLE | USED) == available_flags(at.wrap)).then_some(word)
    }

    #[inline(always)]
    fn descriptor(&self, slot: u16, word: u64) -> Descriptor {
        let address = u64::from_le(self.ring.descriptors[2 * slot as usize].load(Ordering::Relaxed));
        Descriptor { index: slot, address, len: word as u32, flags: (word >> 48) as u16, tail: (word >> 32) as u16 }
    }

    /// Called where no chain is available: passes the descriptors that the frontend has used itself, if this is where they
    /// begin and everything before them was returned. Returns whether a chain is available now.
    #[inline]
    fn passed_foreign(&mut self) -> bool {
        if let Some(recover::Foreign { from, to }) = self.state.foreign
            && from == self.next_available
        {
            self.flush();
            if self.state.outstanding > 0 {
                return false;
            }
            (self.state.foreign, self.state.skipped) = (None, false);
            (self.next_available, self.next_used, self.published) = (to, to, to);
            self.journal.restart(to.to_bits());
            return self.is_available();
        }
        false
    }

    #[inline(always)]
    pub(super) fn stage_batch(&mut self, chains: &[Chain]) {
        let (mut slots, mut writable) = (0, 0);
        for chain in chains {
            slots += chain.slots();
            writable |= chain.writable_len();
        }
        // A batch of readable chains does not cross the ring's end, unless a single chain does. The last published
        // descriptor is then of the same pass as the next position, which distinguishes this ring from a fresh one
        // (`recover.rs`). Writable chains stay together, as they may hold one frame, which drivers expect to see all at
        // once (5.1.6.4.1).
        if self.next_used.slot == 0 {
            self.flush();
        }
        if writable == 0 && u32::from(self.next_used.slot) + u32::from(slots) > self.ring.size.into() {
            return self.stage_at_end(chains, slots, writable);
        }
        self.stage_run(chains, slots, writable);
    }

    /// Stages a batch that crosses the ring's end in two parts.
    #[cold]
    fn stage_at_end(&mut self, chains: &[Chain], slots: u16, writable: u32) {
        let (mut end, mut before) = (self.next_used.slot, 0);
        let crosses = chains.iter().position(|chain| {
            end += chain.slots();
            before += chain.slots();
            end >= self.ring.size
        });
        match crosses.map(|last| chains.split_at(last + 1)) {
            Some((first, rest)) if !rest.is_empty() => {
                self.stage_run(first, before, writable);
                self.flush();
                self.stage_run(rest, slots - before, writable);
            }
            _ => self.stage_run(chains, slots, writable),
        }
    }

    #[inline(always)]
    fn stage_run(&mut self, chains: &[Chain], slots: u16, writable: u32) {
        let Some((first, rest)) = chains.split_first() else { return };
        let size = self.ring.size;
        // In order and without lengths to report, one descriptor with the last id stands for all (2.8.7). With writable
        // chains the driver would have to assume that they were written in full (2.7.9).
        let per_chain = !self.features.in_order || writable > 0;
        self.state.receives = writable > 0;
        if self.state.deferred.is_some_and(|deferred| deferred.per_chain != per_chain) {
            self.flush();
        }
        let count = chains.len();
        let start = self.next_used;
        self.next_used.advance(slots, size);
        // A new deferred head, or a change to the current one, is recorded before the ring is written: see `journal`.
        let is_new = self.state.deferred.is_none();
        let deferred = match self.state.deferred {
            Some(deferred) if per_chain => deferred,
            Some(deferred) => {
                let word = used(deferred.flags, rest.last().unwrap_or(first));
                Deferred { word, second_word: !deferred.second_word, ..deferred }
            }
            None => {
                let flags = used_flags(start.wrap);
                let word = used(flags, if per_chain { first } else { rest.last().unwrap_or(first) });
                Deferred { slot: start.slot, flags, word, per_chain, second_word: !self.state.second_word }
            }
        };
        // The first descriptor of the batch is deferred; when a batch is continued, all of its new descriptors are written
        // now.
        let (mut at, chains) = (start, if is_new { rest } else { chains });
        if is_new {
            at.advance(first.slots(), size);
        }
        let straight = self.ring.pairs().get(at.slot as usize..at.slot as usize + chains.len());
        let straight = straight.filter(|_| slots as usize == chains.len() + usize::from(is_new));
        self.state.skipped |= !per_chain || usize::from(slots) != count;
        (self.state.second_word, self.state.deferred) = (deferred.second_word, Some(deferred));
        let batch = self.published.to_bits();
        let progress = Progress { at: at.to_bits(), next: at.to_bits(), singles: straight.is_some(), batch };
        self.journal.record_batch((is_new || !per_chain).then_some(deferred.word), progress, self.staged());
        if per_chain {
            if let Some(run) = straight {
                // Fast path: one descriptor each, not crossing the ring's end.
                let flags = used_flags(at.wrap);
                run.iter().zip(chains).for_each(|([_, word], chain)| word.store(used(flags, chain), Ordering::Relaxed));
            } else {
                self.write_each(chains, at);
            }
        }
        self.state.outstanding -= u32::from(slots);
        self.state.expected = slots;
    }

    /// See `DeviceRing::demote_used`.
    #[cold]
    #[inline(never)]
    pub fn demote_used(&self, most: usize) {
        let (mut from, count) = (self.published, most.min(self.ring.size.into()) as u16);
        from.back(count, self.ring.size);
        self.ring.demote(from.slot, count);
    }

    /// Normal path: writes the used descriptors of chains of any length, from a position on.
    fn write_each(&self, chains: &[Chain], mut at: Position) {
        let batch = self.published.to_bits();
        for chain in chains {
            let mut next = at;
            next.advance(chain.slots(), self.ring.size);
            let progress = Progress { at: at.to_bits(), next: next.to_bits(), singles: false, batch };
            self.journal.record_progress(progress);
            if let Some([_, word]) = self.ring.pairs().get(at.slot as usize) {
                word.store(used(used_flags(at.wrap), chain), Ordering::Relaxed);
            }
            at = next;
        }
    }
}

impl DeviceEnd<Layout> for Device<Layout> {
    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<usize, Fault> {
        if wanted == 0 || !self.is_available() && !self.passed_foreign() {
            return Ok(0);
        }
        let expected = if self.tuning.fetches() { self.state.expected.min(wanted as u16) } else { 0 };
        let for_write = self.state.receives && self.tuning.prefetch_write;
        self.ring.prefetch(self.next_available.slot, expected, for_write);
        if self.state.receives {
            // Prefetch also what follows, for the next burst: receive buffers were made available long ago. But only up to
            // a quarter of the ring: beyond that the driver may be refilling right now, as it may anywhere in a transmit
            // queue.
            let mut next = self.next_available;
            next.advance(expected, self.ring.size);
            let more = expected.min((self.ring.size / 4).saturating_sub(self.state.outstanding as u16 + expected));
            self.ring.prefetch(next.slot, more, for_write);
        }
        Ok(wanted)
    }

    #[inline(always)]
    fn next_flags(&self) -> Option<u16> {
        self.word_at(self.next_available).map(|word| (word >> 48) as u16)
    }

    #[inline(always)]
    fn take_run<const FLAGS: u16, const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize {
        const MASK: u16 = AVAILABLE | USED | NEXT | INDIRECT | WRITE;
        let Position { slot, wrap } = self.next_available;
        let expected = available_flags(wrap) | FLAGS;
        let room = u32::from(self.ring.size).saturating_sub(self.state.outstanding) as usize;
        let descriptors = self.ring.pairs().get(slot as usize..).unwrap_or_default();
        let count = max.min(room).min(descriptors.len());
        let buffers = descriptors[..count].iter().map(|[address, word]| {
            // Pairs with the driver's release store of this word, as in `word_at`.
            let word = u64::from_le(word.load(Ordering::Acquire));
            let buffer = || ((word >> 32) as u16, u64::from_le(address.load(Ordering::Relaxed)), word as u32);
            ((word >> 48) as u16 & MASK == expected).then(buffer)
        });
        let taken = chains.singles::<CACHE>(self.hit, FLAGS == WRITE, buffers);
        self.advance(taken as u16);
        taken
    }

    #[inline(always)]
    fn head(&self) -> Result<Option<Descriptor>, Fault> {
        Ok(self.word_at(self.next_available).map(|word| self.descriptor(self.next_available.slot, word)))
    }

    #[inline(always)]
    fn following(&self, descriptor: &Descriptor) -> Result<Descriptor, Fault> {
        let next = descriptor.index + 1;
        let slot = if next == self.ring.size { 0 } else { next };
        let word = u64::from_le(self.ring.descriptors[2 * slot as usize + 1].load(Ordering::Relaxed));
        Ok(self.descriptor(slot, word))
    }

    #[inline(always)]
    fn check(&self, slots: u16) -> Result<(), Fault> {
        let size = self.ring.size;
        if self.state.outstanding + u32::from(slots) > size.into() { Err(Fault::Overrun { size }) } else { Ok(()) }
    }

    #[inline(always)]
    fn advance(&mut self, slots: u16) {
        self.next_available.advance(slots, self.ring.size);
        self.state.outstanding += u32::from(slots);
    }

    fn back(&mut self, slots: u16) {
        self.next_available.back(slots, self.ring.size);
        self.state.outstanding -= u32::from(slots);
    }

    #[inline(always)]
    fn stage(&mut self, chains: &[Chain]) {
        if self.track.is_some() {
            return self.give_tracked(chains);
        }
        self.stage_batch(chains);
    }

    fn expect(&mut self, chains: usize) {
        self.state.expected = chains as u16;
    }

    #[inline(always)]
    fn publish(&mut self) {
        if let Some(Deferred { slot, word, .. }) = self.state.deferred.take() {
            // Pairs with the driver's acquire load of this word: the buffers and the used descriptors behind it are
            // written.
            self.ring.descriptors[2 * slot as usize + 1].store(word, Ordering::Release);
        }
    }

    #[inline(always)]
    fn is_requested(&self, newer: u32) -> bool {
        let (mut next, size) = (self.published, self.ring.size);
        if newer > 0 {
            // More than the ring holds: the driver has made those available again that are older.
            if newer >= u32::from(size) {
                return false;
            }
            next.back(newer as u16, size);
        }
        let event = Event::from_word(self.ring.driver_event[0].load(Ordering::Relaxed));
        event.wanted(next.slot, next.wrap, self.unsignalled - newer, size)
    }

    fn request(&mut self) {
        self.passed_foreign();
        let Position { slot, wrap } = self.next_available;
        let event = if self.features.event_idx { Event::at(slot, wrap) } else { Event::ENABLED };
        self.ring.device_event[0].store(event.to_word(), Ordering::Relaxed);
    }

    fn suppress(&mut self) {
        self.ring.device_event[0].store(Event::DISABLED.to_word(), Ordering::Relaxed);
    }

    #[inline(always)]
    fn is_available(&self) -> bool {
        self.word_at(self.next_available).is_some()
    }

    fn base(&self) -> u32 {
        Base::new(self.next_available, self.next_used).0
    }

    fn take_saved(&mut self, memory: &Table, chains: &mut Chains, saved: Saved) -> Result<bool, Fault> {
        let Some(track) = &self.track else { return Ok(false) };
        super::saved::take_saved(track, self.features, &mut self.hit, memory, chains, &saved)
    }

    fn unread(saved: Saved) -> Chain {
        Chain::private(saved.id, saved.slots)
    }

    fn record(&mut self, chains: &[Chain]) {
        let (size, mut first) = (self.ring.size, self.next_available);
        chains.iter().for_each(|chain| first.back(chain.slots(), size));
        self.track.iter_mut().for_each(|track| track.take(&self.ring, first, chains));
    }

    fn forget(&mut self, id: u16) {
        self.track.iter_mut().for_each(|track| track.forget(id));
    }
}

/// Builds the second word of a used descriptor.
#[inline(always)]
fn used(flags: u16, chain: &Chain) -> u64 {
    // 2.8.8: WRITE marks the length as valid.
    word(chain.written, chain.id, flags | if chain.written > 0 { WRITE } else { 0 })
}
