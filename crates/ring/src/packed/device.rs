//! Device end of a packed virtqueue (virtio 1.3, 2.8): takes available chains and returns used ones. Called through
//! `DeviceRing`.

use super::layout::{Base, Layout, Position, available_flags, used_flags, word};
#[cfg(not(loom))]
use super::recover;
use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Journal, NEXT, Tuning, WRITE,
    chain::{Descriptor, Draft, indirect},
    journal::{Progress, Staged},
    notify::Event,
    packed::layout::{AVAILABLE, LINE, USED},
};
#[cfg(not(loom))]
use crate::{Inflight, JournalKey, Resumed, SetupError, inflight, journal::Frontend};
use ringroad_mem::{
    Hit, Table,
    sync::{Ordering, fence},
};

/// The deferred head: a batch of used descriptors stays invisible to the driver until this one, its first, is written.
#[derive(Clone, Copy)]
struct Deferred {
    /// Its slot, its flags without WRITE, and its second word.
    slot: u16,
    flags: u16,
    word: u64,
    /// Descriptors that the driver gets back with it.
    slots: u16,
    /// The chains behind it have used descriptors of their own; else it stands for all of them.
    per_chain: bool,
    /// Its word is in the second of the journal's two places.
    second_word: bool,
}

/// Device end of a packed virtqueue.
pub struct Device {
    pub(super) ring: Layout,
    pub(super) features: Features,
    pub(super) next_available: Position,
    next_used: Position,
    /// Position up to which the driver sees used descriptors.
    published: Position,
    /// Descriptors taken and not returned.
    pub(super) outstanding: u32,
    /// Descriptors published since the last decision whether to notify the driver.
    unsignalled: u32,
    /// Descriptors of the last burst, as an estimate of how many lines to prefetch.
    pub(super) expected: u16,
    /// The last chains were device-writable, so this is a receive queue.
    receives: bool,
    /// Head of the batch that is returned but not published yet.
    deferred: Option<Deferred>,
    /// The last deferred head is in the second of the journal's two places.
    second_word: bool,
    /// Chains up to this position were consumed and must not be taken again; `None` if `consume` is not used.
    consumed: Option<Position>,
    /// Each descriptor was written when it was used, so far.
    all_written: bool,
    /// Descriptors ahead that the frontend has used itself.
    #[cfg(not(loom))]
    foreign: Option<recover::Foreign>,
    pub(super) journal: Journal,
    /// Records what is in flight in the frontend's inflight region, for any back end that succeeds this one.
    #[cfg(not(loom))]
    pub(super) track: Option<Box<inflight::Packed>>,
    pub(super) hit: Hit,
    tuning: Tuning,
}

impl Device {
    /// Starts at `base`.
    pub fn new(ring: Layout, features: Features, base: Base) -> Device {
        let start = base.position(&ring);
        Self::at(ring, features, start)
    }

    /// Starts at a position.
    pub(super) fn at(ring: Layout, features: Features, start: Position) -> Device {
        Device {
            ring,
            features,
            next_available: start,
            next_used: start,
            published: start,
            outstanding: 0,
            unsignalled: 0,
            expected: 0,
            receives: false,
            deferred: None,
            second_word: false,
            consumed: None,
            all_written: true,
            #[cfg(not(loom))]
            foreign: None,
            journal: Journal::NONE,
            #[cfg(not(loom))]
            track: None,
            hit: Hit::default(),
            tuning: Tuning::default(),
        }
    }

    /// Starts where a former process left the ring, else at `base`.
    ///
    /// # Errors
    /// [`SetupError::Inflight`] if the inflight region is invalid.
    #[cfg(not(loom))]
    pub fn resume(
        ring: Layout,
        features: Features,
        base: Base,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
    ) -> Result<(Device, Resumed), SetupError> {
        let requested = base.position(&ring);
        let found = recover::find(&ring, &journal, key);
        if found.is_none()
            && let Some(found) = inflight.read_packed(&ring)?
        {
            return Ok(Device::adopt(ring, features, requested, journal, key, inflight, found));
        }
        let mut device = Device::new(ring, features, base);
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
            let slots = found.published.distance(found.staged, size);
            let Position { slot, wrap } = found.published;
            let flags = used_flags(wrap);
            device.deferred = Some(Deferred {
                slot,
                flags,
                word: found.word,
                slots,
                per_chain: found.per_chain,
                second_word: found.second_word,
            });
        }
        (device.second_word, device.all_written) = (found.second_word, found.all_written);
        device.consumed = found.taken;
        // Record only what is really staged, and what turned out to be published.
        device.journal.record_staged(device.staged());
        device.journal.record_published(device.published.to_bits());
        let finished = device.finish(found.taken.unwrap_or(found.staged));
        device.foreign = recover::foreign(&device.ring, found.frontend, requested, device.next_available);
        let from = device.foreign.map_or(requested, |run| run.from).to_bits();
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
    #[cfg(not(loom))]
    fn finish(&mut self, until: Position) -> u32 {
        let mut finished = 0;
        while self.next_available != until && finished < u32::from(self.ring.size) {
            let Some((id, slots)) = recover::chain(&self.ring, self.next_available) else { break };
            self.next_available.advance(slots, self.ring.size);
            self.outstanding += u32::from(slots);
            self.stage(&[Chain::private(id, slots)]);
            finished += 1;
        }
        self.flush();
        finished
    }

    /// Records that everything taken so far is about to be forwarded: it will be returned, but never taken again.
    #[inline]
    pub fn consume(&mut self) {
        self.consumed = Some(self.next_available);
        self.journal.record_taken(self.next_available.to_bits());
    }

    #[inline(always)]
    fn staged(&self) -> Staged {
        Staged {
            position: self.next_used.to_bits(),
            second_word: self.second_word,
            per_chain: self.deferred.is_some_and(|deferred| deferred.per_chain),
            all_written: self.all_written,
        }
    }

    /// Sets which optimisations are used.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
    }

    /// Publishes deferred chains and returns the base to resume at after a stop.
    pub fn base(&mut self) -> Base {
        self.flush();
        Base::new(self.next_available, self.next_used)
    }

    /// Returns whether there is an available chain that has not been taken.
    #[inline(always)]
    pub fn is_available(&self) -> bool {
        self.head(self.next_available).is_some()
    }

    /// Returns the second word of the descriptor at a position, if it is available in that pass.
    #[inline(always)]
    fn head(&self, at: Position) -> Option<u64> {
        // Pairs with the driver's release store of this word: the address and the chain's other descriptors are visible.
        let word = u64::from_le(self.ring.descriptors[2 * at.slot as usize + 1].load(Ordering::Acquire));
        ((word >> 48) as u16 & (AVAILABLE | USED) == available_flags(at.wrap)).then_some(word)
    }

    #[inline(always)]
    fn descriptor(&self, slot: u16, word: u64) -> Descriptor {
        let address = u64::from_le(self.ring.descriptors[2 * slot as usize].load(Ordering::Relaxed));
        Descriptor { index: slot, address, len: word as u32, flags: (word >> 48) as u16, tail: (word >> 32) as u16 }
    }

    /// Takes up to `max` chains and appends them to `chains`; returns how many.
    ///
    /// # Errors
    /// The [`Fault`] if the next chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        #[cfg(not(loom))]
        if self.track.is_some() {
            return self.take_tracked(memory, chains, max);
        }
        self.take_fresh(memory, chains, max)
    }

    /// Takes from the ring only and records nothing in the inflight region.
    #[inline]
    pub(super) fn take_fresh(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        let count = max.min(chains.room());
        if count == 0 || !self.is_available() && !self.passed_foreign() {
            return Ok(0);
        }
        let expected = if self.tuning.fetches() { self.expected.min(count as u16) } else { 0 };
        let for_write = self.receives && self.tuning.prefetch_write;
        self.ring.prefetch(self.next_available.slot, expected, for_write);
        if self.receives {
            // Prefetch also what follows, for the next burst: receive buffers were made available long ago. But only up to
            // a quarter of the ring: beyond that the driver may be refilling right now, as it may anywhere in a transmit
            // queue.
            let mut next = self.next_available;
            next.advance(expected, self.ring.size);
            let more = expected.min((self.ring.size / 4).saturating_sub(self.outstanding as u16 + expected));
            self.ring.prefetch(next.slot, more, for_write);
        }
        let mut taken = 0;
        while taken < count {
            if self.tuning.fast_path {
                taken += self.take_singles(chains, count - taken);
                if taken == count {
                    break;
                }
            }
            if !self.tuning.translation_cache {
                self.hit = Hit::NONE;
            }
            match self.take_chain(memory, chains) {
                Ok(true) => taken += 1,
                Ok(false) => break,
                Err(_) if taken > 0 => break,
                Err(fault) => return Err(fault),
            }
        }
        Ok(taken)
    }

    /// Called where no chain is available: passes the descriptors that the frontend has used itself, if this is where they
    /// begin and everything before them was returned. Returns whether a chain is available now.
    #[inline]
    fn passed_foreign(&mut self) -> bool {
        #[cfg(not(loom))]
        if let Some(recover::Foreign { from, to }) = self.foreign
            && from == self.next_available
        {
            self.flush();
            if self.outstanding > 0 {
                return false;
            }
            (self.foreign, self.consumed, self.all_written) = (None, None, true);
            (self.next_available, self.next_used, self.published) = (to, to, to);
            self.journal.restart(to.to_bits());
            return self.is_available();
        }
        false
    }

    /// Fast path: single-buffer chains, all writable or all readable.
    #[inline(always)]
    fn take_singles(&mut self, chains: &mut Chains, max: usize) -> usize {
        let mut taken = 0;
        while taken < max {
            let Some(word) = self.head(self.next_available) else { break };
            let writable = (word >> 48) as u16 & WRITE != 0;
            let run = match (writable, self.tuning.translation_cache) {
                (true, true) => self.take_run::<WRITE, true>(chains, max - taken),
                (false, true) => self.take_run::<0, true>(chains, max - taken),
                (true, false) => self.take_run::<WRITE, false>(chains, max - taken),
                (false, false) => self.take_run::<0, false>(chains, max - taken),
            };
            taken += run;
            // Continue at the start of the ring.
            if run == 0 || self.next_available.slot != 0 {
                break;
            }
        }
        taken
    }

    /// As `take_singles`, up to the end of the ring.
    #[inline(always)]
    fn take_run<const FLAGS: u16, const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize {
        const MASK: u16 = AVAILABLE | USED | NEXT | INDIRECT | WRITE;
        let Position { slot, wrap } = self.next_available;
        let expected = available_flags(wrap) | FLAGS;
        let room = u32::from(self.ring.size).saturating_sub(self.outstanding) as usize;
        let descriptors = self.ring.pairs().get(slot as usize..).unwrap_or_default();
        let count = max.min(room).min(descriptors.len());
        let buffers = descriptors[..count].iter().map(|[address, word]| {
            // Pairs with the driver's release store of this word, as in `head`.
            let word = u64::from_le(word.load(Ordering::Acquire));
            let buffer = || ((word >> 32) as u16, u64::from_le(address.load(Ordering::Relaxed)), word as u32);
            ((word >> 48) as u16 & MASK == expected).then(buffer)
        });
        let taken = chains.singles::<CACHE>(self.hit, FLAGS == WRITE, buffers);
        self.next_available.advance(taken as u16, self.ring.size);
        self.outstanding += taken as u32;
        taken
    }

    /// Normal path: a chain of any shape. Returns `false` if there is none or it must wait for the next burst.
    fn take_chain(&mut self, memory: &Table, chains: &mut Chains) -> Result<bool, Fault> {
        let Some(word) = self.head(self.next_available) else { return Ok(false) };
        let slots = self.read_chain(memory, chains, self.descriptor(self.next_available.slot, word))?;
        self.next_available.advance(slots, self.ring.size);
        self.outstanding += u32::from(slots);
        Ok(slots > 0)
    }

    /// Reads a chain; returns how many descriptors it has, or 0 if it must wait for the next burst.
    fn read_chain(&mut self, memory: &Table, chains: &mut Chains, descriptor: Descriptor) -> Result<u16, Fault> {
        let mut chain = chains.begin(1);
        let followed = self.follow(memory, chains, &mut chain, descriptor);
        let size = self.ring.size;
        let followed = followed.and_then(|()| match self.outstanding + u32::from(chain.slots) > size.into() {
            true => Err(Fault::Overrun { size }),
            false => Ok(()),
        });
        match followed {
            Ok(()) => {
                let slots = chain.slots;
                Ok(if chains.end(chain) { slots } else { 0 })
            }
            Err(fault) => {
                chains.abandon(&chain);
                Err(fault)
            }
        }
    }

    fn follow(
        &mut self,
        memory: &Table,
        chains: &mut Chains,
        chain: &mut Draft,
        mut descriptor: Descriptor,
    ) -> Result<(), Fault> {
        let size = self.ring.size;
        let mut at = self.next_available;
        for slots in 1..=size {
            chain.slots = slots;
            // The id is in the chain's last descriptor (2.8.6).
            chain.id = descriptor.tail;
            if descriptor.flags & INDIRECT != 0 {
                if !self.features.indirect {
                    return Err(Fault::Indirect { index: descriptor.index });
                }
                return indirect(chains, chain, memory, &mut self.hit, descriptor, size, false);
            }
            // A chain with too many pieces can only be returned, for which its last descriptor is needed; not even that if
            // it must wait for the next burst.
            if !chain.clipped {
                chains.add(chain, memory, &mut self.hit, descriptor)?;
            }
            if descriptor.flags & NEXT == 0 || chains.must_wait(chain) {
                return Ok(());
            }
            at.advance(1, size);
            let word = u64::from_le(self.ring.descriptors[2 * at.slot as usize + 1].load(Ordering::Relaxed));
            descriptor = self.descriptor(at.slot, word);
        }
        Err(Fault::Loop { index: descriptor.index, size })
    }

    #[inline(always)]
    fn is_tracked(&self) -> bool {
        #[cfg(not(loom))]
        return self.track.is_some();
        #[cfg(loom)]
        false
    }

    /// Undoes the taking of the last chains, which were not needed: all from index `keep` of the burst on.
    pub fn untake(&mut self, chains: &mut Chains, keep: usize) {
        #[cfg(not(loom))]
        let keep_fresh = self.untake_tracked(chains, keep);
        #[cfg(loom)]
        let keep_fresh = keep;
        for chain in chains.list().iter().skip(keep_fresh) {
            self.next_available.back(chain.slots(), self.ring.size);
            self.outstanding -= u32::from(chain.slots());
        }
        chains.truncate(keep);
    }

    /// Returns chains to the driver and publishes them at once, the first one last: a driver that sees it sees all.
    #[inline]
    pub fn give(&mut self, chains: &[Chain]) {
        if self.tuning.shadow_used && !self.is_tracked() {
            self.stage(chains);
            return self.flush();
        }
        #[cfg(not(loom))]
        if self.track.is_some() {
            return self.give_tracked(chains);
        }
        for chain in chains {
            self.stage(std::slice::from_ref(chain));
            self.flush();
        }
        self.expected = chains.len() as u16;
    }

    /// Returns chains to the driver but publishes them only when a quarter of the ring is deferred: a driver that has made
    /// the whole ring available gets three quarters of it back promptly. The caller must call `flush` when it finds no more
    /// to take.
    #[inline]
    pub fn give_deferred(&mut self, chains: &[Chain]) {
        if !self.tuning.shadow_used || self.is_tracked() {
            return self.give(chains);
        }
        self.stage(chains);
        if self.deferred.is_some_and(|deferred| deferred.slots >= self.ring.size / 4) {
            self.flush();
        }
    }

    /// Returns how many descriptors, from the next one on, share a cache line.
    #[inline(always)]
    pub fn left_in_line(&self) -> usize {
        (LINE - self.next_used.slot % LINE).into()
    }

    /// Publishes deferred chains.
    #[inline]
    pub fn flush(&mut self) {
        if let Some(Deferred { slot, word, slots, .. }) = self.deferred.take() {
            // Pairs with the driver's acquire load of this word: the buffers and the used descriptors behind it are
            // written.
            self.ring.descriptors[2 * slot as usize + 1].store(word, Ordering::Release);
            self.published = self.next_used;
            self.unsignalled = self.unsignalled.saturating_add(slots.into());
            self.journal.record_published(self.next_used.to_bits());
        }
    }

    #[inline(always)]
    pub(super) fn stage(&mut self, chains: &[Chain]) {
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
        self.receives = writable > 0;
        if self.deferred.is_some_and(|deferred| deferred.per_chain != per_chain) {
            self.flush();
        }
        let count = chains.len();
        let start = self.next_used;
        self.next_used.advance(slots, size);
        // A new deferred head, or a change to the current one, is recorded before the ring is written: see `journal`.
        let is_new = self.deferred.is_none();
        let deferred = match self.deferred {
            Some(deferred) if per_chain => Deferred { slots: deferred.slots + slots, ..deferred },
            Some(deferred) => {
                let word = used(deferred.flags, rest.last().unwrap_or(first));
                Deferred { slots: deferred.slots + slots, word, second_word: !deferred.second_word, ..deferred }
            }
            None => {
                let flags = used_flags(start.wrap);
                let word = used(flags, if per_chain { first } else { rest.last().unwrap_or(first) });
                Deferred { slot: start.slot, flags, word, slots, per_chain, second_word: !self.second_word }
            }
        };
        // The first descriptor of the batch is deferred; when a batch is continued, all of its new descriptors are written
        // now.
        let (mut at, chains) = (start, if is_new { rest } else { chains });
        if is_new {
            at.advance(first.slots(), size);
        }
        let descriptors = self.ring.pairs();
        let straight = descriptors.get(at.slot as usize..at.slot as usize + chains.len());
        let straight = straight.filter(|_| slots as usize == chains.len() + usize::from(is_new));
        self.all_written &= per_chain && usize::from(slots) == count;
        (self.second_word, self.deferred) = (deferred.second_word, Some(deferred));
        let batch = self.published.to_bits();
        let progress = Progress { at: at.to_bits(), next: at.to_bits(), singles: straight.is_some(), batch };
        self.journal.record_batch((is_new || !per_chain).then_some(deferred.word), progress, self.staged());
        if per_chain {
            if let Some(run) = straight {
                // Fast path: one descriptor each, not crossing the ring's end.
                let flags = used_flags(at.wrap);
                run.iter().zip(chains).for_each(|([_, word], chain)| word.store(used(flags, chain), Ordering::Relaxed));
            } else {
                for chain in chains {
                    let mut next = at;
                    next.advance(chain.slots(), size);
                    self.journal.record_progress(Progress {
                        at: at.to_bits(),
                        next: next.to_bits(),
                        singles: false,
                        batch,
                    });
                    if let Some([_, word]) = descriptors.get(at.slot as usize) {
                        word.store(used(used_flags(at.wrap), chain), Ordering::Relaxed);
                    }
                    at = next;
                }
            }
        }
        self.outstanding -= u32::from(slots);
        self.expected = slots;
    }

    /// Returns whether the driver wants to be notified of chains published since the last `true`, or the last `sure`
    /// answer.
    ///
    /// A sure answer costs a full fence. Without the fence `true` is reliable, but `false` may miss a request that the
    /// driver has just written: the caller must check again before going idle.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        if self.unsignalled == 0 {
            return false;
        }
        if sure {
            // Pairs with the driver's fence between writing its event structure and re-reading the ring (2.8.21.3.1):
            // without it both sides may sleep. The used descriptors must be visible before the load below, on x86 too.
            fence(Ordering::SeqCst);
        }
        let event = Event::from_word(self.ring.driver_event[0].load(Ordering::Relaxed));
        let wants = event.wanted(self.published.slot, self.published.wrap, self.unsignalled, self.ring.size);
        if wants || sure {
            self.unsignalled = 0;
        }
        wants
    }

    /// Asks the driver to notify us of the next chain that it makes available. Returns `true` if a chain is available
    /// already; the caller must take it, as the driver may or may not send a notification for it.
    pub fn enable_notification(&mut self) -> bool {
        self.passed_foreign();
        let event = if self.features.event_idx {
            Event::at(self.next_available.slot, self.next_available.wrap)
        } else {
            Event::ENABLED
        };
        self.ring.device_event[0].store(event.to_word(), Ordering::Relaxed);
        // Pairs with the driver's fence between publishing descriptors and reading the value stored here.
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if self.has_resubmits() {
            return true;
        }
        self.is_available()
    }

    /// Asks the driver not to notify us, because we poll.
    pub fn disable_notification(&mut self) {
        self.ring.device_event[0].store(Event::DISABLED.to_word(), Ordering::Relaxed);
    }
}

/// Builds the second word of a used descriptor.
#[inline(always)]
fn used(flags: u16, chain: &Chain) -> u64 {
    // 2.8.8: WRITE marks the length as valid.
    word(chain.written, chain.id, flags | if chain.written > 0 { WRITE } else { 0 })
}
