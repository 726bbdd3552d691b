//! Device end of a packed virtqueue: takes what is available, gives back what was used.

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
use crate::{Inflight, JournalKey, Resumed, SetupError, inflight};
use ringroad_mem::{
    Hit, Table,
    sync::{Ordering, fence},
};

/// Used descriptors that the driver does not see yet: the first one is missing.
#[derive(Clone, Copy)]
struct Late {
    /// Where it belongs, its flags without WRITE, and its second word.
    slot: u16,
    flags: u16,
    word: u64,
    /// How many descriptors the driver gets back with it.
    slots: u16,
    /// The others were written; else it stands for all.
    writes: bool,
    /// In which of the journal's two places its word is.
    which: bool,
}

/// Device end of a packed virtqueue.
pub struct Device {
    pub(super) ring: Layout,
    pub(super) features: Features,
    pub(super) next_available: Position,
    next_used: Position,
    /// How far the driver sees it.
    published: Position,
    /// Descriptors taken and not given back.
    pub(super) outstanding: u32,
    /// Descriptors given back since the driver was last considered for a notification.
    since: u32,
    /// How many descriptors the last burst had: how many lines are worth fetching at once.
    pub(super) expected: u16,
    /// The last chains were for us to write to: a receive queue.
    receives: bool,
    /// Given back, but not published yet.
    late: Option<Late>,
    /// In which of its two places the journal has the last descriptor that was withheld.
    which: bool,
    /// How far what was taken must not be taken again, if anybody says so.
    consumed: Option<Position>,
    /// Each descriptor was written when it was used, so far.
    strict: bool,
    pub(super) journal: Journal,
    /// What is in flight is noted, for a successor of any make.
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

    /// The same at a position.
    pub(super) fn at(ring: Layout, features: Features, start: Position) -> Device {
        Device {
            ring,
            features,
            next_available: start,
            next_used: start,
            published: start,
            outstanding: 0,
            since: 0,
            expected: 0,
            receives: false,
            late: None,
            which: false,
            consumed: None,
            strict: true,
            journal: Journal::NONE,
            #[cfg(not(loom))]
            track: None,
            hit: Hit::default(),
            tuning: Tuning::default(),
        }
    }

    /// Starts where a former process has left the ring, else at `base`.
    #[cfg(not(loom))]
    pub fn resume(
        ring: Layout,
        features: Features,
        base: Base,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
    ) -> Result<(Device, Resumed), SetupError> {
        let said = base.position(&ring);
        let found = recover::find(&ring, &journal, key);
        if found.is_none()
            && let Some(found) = inflight.read_packed(&ring)?
        {
            return Ok(Device::adopt(ring, features, said, journal, key, inflight, found));
        }
        let mut device = Device::new(ring, features, base);
        device.journal = journal;
        let Some(found) = found else {
            device.journal.start(key, device.next_used.to_bits());
            let lost = recover::is_in_use(&device.ring, said);
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
            device.late = Some(Late { slot, flags, word: found.word, slots, writes: found.writes, which: found.which });
        }
        (device.which, device.strict) = (found.which, found.strict);
        device.consumed = found.taken;
        // What is not staged after all is not noted as such, and what was published is.
        device.journal.note_staged(device.staged());
        device.journal.note_published(device.published.to_bits());
        let finished = device.finish(found.taken.unwrap_or(found.staged));
        let resumed =
            if finished > 0 || device.next_available != said { Resumed::Noted { finished } } else { Resumed::Base };
        device.track = inflight.start_packed(size, device.next_used).map(Box::new);
        Ok((device, resumed))
    }

    /// Gives all back up to a position without a look at it, a former process has consumed it, and publishes that.
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

    /// Notes that all that was taken so far is about to be carried on: it will be given back, but never taken again.
    #[inline]
    pub fn consume(&mut self) {
        self.consumed = Some(self.next_available);
        self.journal.note_taken(self.next_available.to_bits());
    }

    #[inline(always)]
    fn staged(&self) -> Staged {
        Staged {
            position: self.next_used.to_bits(),
            which: self.which,
            writes: self.late.is_some_and(|late| late.writes),
            strict: self.strict,
        }
    }

    /// Turns off what should be off.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
    }

    /// Where to go on after a stop.
    pub fn base(&mut self) -> Base {
        self.flush();
        Base::new(self.next_available, self.next_used)
    }

    /// Whether there is a chain that nobody has taken.
    #[inline(always)]
    pub fn is_available(&self) -> bool {
        self.head(self.next_available).is_some()
    }

    /// The second word of the descriptor at a position, if it is available in that pass.
    #[inline(always)]
    fn head(&self, at: Position) -> Option<u64> {
        // Pairs with the driver's release of this word: the address, and the chain's other descriptors, are there.
        let word = u64::from_le(self.ring.descriptors[2 * at.slot as usize + 1].load(Ordering::Acquire));
        ((word >> 48) as u16 & (AVAILABLE | USED) == available_flags(at.wrap)).then_some(word)
    }

    #[inline(always)]
    fn descriptor(&self, slot: u16, word: u64) -> Descriptor {
        let address = u64::from_le(self.ring.descriptors[2 * slot as usize].load(Ordering::Relaxed));
        Descriptor { index: slot, address, len: word as u32, flags: (word >> 48) as u16, tail: (word >> 32) as u16 }
    }

    /// Takes up to `max` chains and adds them to `chains`; says how many. A fault is reported when it comes first;
    /// chains before it are good.
    #[inline]
    pub fn take(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        #[cfg(not(loom))]
        if self.track.is_some() {
            return self.take_tracked(memory, chains, max);
        }
        self.take_fresh(memory, chains, max)
    }

    /// The same from the ring only, and not noted.
    #[inline]
    pub(super) fn take_fresh(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        let count = max.min(chains.room());
        if count == 0 || !self.is_available() {
            return Ok(0);
        }
        let expected = if self.tuning.fetches() { self.expected.min(count as u16) } else { 0 };
        let writes = self.receives && self.tuning.prefetch_write;
        self.ring.prefetch(self.next_available.slot, expected, writes);
        if self.receives {
            // And what comes after them, for the next burst: receive buffers were made available long ago. But for a quarter of
            // the ring only: beyond, the driver may be just about to refill, as in a transmit queue in any case.
            let mut next = self.next_available;
            next.advance(expected, self.ring.size);
            let more = expected.min((self.ring.size / 4).saturating_sub(self.outstanding as u16 + expected));
            self.ring.prefetch(next.slot, more, writes);
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

    /// The fast path: chains of one buffer, all for us to write or none.
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
            // It goes on at the start of the ring.
            if run == 0 || self.next_available.slot != 0 {
                break;
            }
        }
        taken
    }

    /// The same, up to the end of the ring.
    #[inline(always)]
    fn take_run<const FLAGS: u16, const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize {
        const MASK: u16 = AVAILABLE | USED | NEXT | INDIRECT | WRITE;
        let Position { slot, wrap } = self.next_available;
        let expected = available_flags(wrap) | FLAGS;
        let room = u32::from(self.ring.size).saturating_sub(self.outstanding) as usize;
        let descriptors = self.ring.pairs().get(slot as usize..).unwrap_or_default();
        let count = max.min(room).min(descriptors.len());
        let buffers = descriptors[..count].iter().map(|[address, word]| {
            // Pairs with the driver's release of this word, as in `head`.
            let word = u64::from_le(word.load(Ordering::Acquire));
            let buffer = || ((word >> 32) as u16, u64::from_le(address.load(Ordering::Relaxed)), word as u32);
            ((word >> 48) as u16 & MASK == expected).then(buffer)
        });
        let taken = chains.singles::<CACHE>(self.hit, FLAGS == WRITE, buffers);
        self.next_available.advance(taken as u16, self.ring.size);
        self.outstanding += taken as u32;
        taken
    }

    /// The normal path: a chain of any shape. `false`: there is none, or it has to wait for the next burst.
    fn take_chain(&mut self, memory: &Table, chains: &mut Chains) -> Result<bool, Fault> {
        let Some(word) = self.head(self.next_available) else { return Ok(false) };
        let slots = self.long_chain(memory, chains, self.descriptor(self.next_available.slot, word))?;
        self.next_available.advance(slots, self.ring.size);
        self.outstanding += u32::from(slots);
        Ok(slots > 0)
    }

    /// Says how many descriptors the chain has; 0: it has to wait for the next burst.
    fn long_chain(&mut self, memory: &Table, chains: &mut Chains, descriptor: Descriptor) -> Result<u16, Fault> {
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
            // Of one that has too many pieces only the last descriptor counts, to give it back; not even that one if it is for
            // the next burst.
            if !chain.clipped {
                chains.add(chain, memory, &mut self.hit, descriptor)?;
            }
            if descriptor.flags & NEXT == 0 || chains.is_waiting(chain) {
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

    /// Puts back the last chains taken, all from the `keep`th of the burst on: they were not needed.
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

    /// Gives chains back to the driver and publishes them at once, the first one last: a driver that sees it sees all.
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

    /// The same, but publishes them when a quarter of the ring has come together, at the latest: a driver that has made all
    /// available gets three quarters back at once. Who finds nothing more to take calls `flush`.
    #[inline]
    pub fn give_late(&mut self, chains: &[Chain]) {
        if !self.tuning.shadow_used || self.is_tracked() {
            return self.give(chains);
        }
        self.stage(chains);
        if self.late.is_some_and(|late| late.slots >= self.ring.size / 4) {
            self.flush();
        }
    }

    /// How many descriptors from the next one on share a cache line.
    #[inline(always)]
    pub fn line(&self) -> usize {
        (LINE - self.next_used.slot % LINE).into()
    }

    /// Publishes what was given late.
    #[inline]
    pub fn flush(&mut self) {
        if let Some(Late { slot, word, slots, .. }) = self.late.take() {
            // Pairs with the driver's acquire of this word: the buffers, and the used descriptors after it, are written.
            self.ring.descriptors[2 * slot as usize + 1].store(word, Ordering::Release);
            self.published = self.next_used;
            self.since = self.since.saturating_add(slots.into());
            self.journal.note_published(self.next_used.to_bits());
        }
    }

    #[inline(always)]
    pub(super) fn stage(&mut self, chains: &[Chain]) {
        let (mut slots, mut writable) = (0, 0);
        for chain in chains {
            slots += chain.slots();
            writable |= chain.writable_len();
        }
        // A batch of what was only read does not go beyond the ring's end, as far as no chain does: what was published last is then of
        // the same pass as what comes next, which tells this ring from a fresh one (`recover.rs`). Buffers that were written to
        // stay together, as a frame may lie in several, which drivers want to see all at once (5.1.6.4.1).
        if self.next_used.slot == 0 {
            self.flush();
        }
        if writable == 0 && u32::from(self.next_used.slot) + u32::from(slots) > self.ring.size.into() {
            return self.stage_at_end(chains, slots, writable);
        }
        self.stage_run(chains, slots, writable);
    }

    /// The same across the ring's end.
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
        // In order and with no lengths to tell, one descriptor with the last id stands for all (2.8.7). Of writable ones the
        // driver would have to believe that they were written in full (2.7.9).
        let writes = !self.features.in_order || writable > 0;
        self.receives = writable > 0;
        if self.late.is_some_and(|late| late.writes != writes) {
            self.flush();
        }
        let count = chains.len();
        let start = self.next_used;
        self.next_used.advance(slots, size);
        // What comes next is withheld, or changes what is: noted before, see `journal`.
        let is_new = self.late.is_none();
        let late = match self.late {
            Some(late) if writes => Late { slots: late.slots + slots, ..late },
            Some(late) => {
                let word = used(late.flags, rest.last().unwrap_or(first));
                Late { slots: late.slots + slots, word, which: !late.which, ..late }
            }
            None => {
                let flags = used_flags(start.wrap);
                let word = used(flags, if writes { first } else { rest.last().unwrap_or(first) });
                Late { slot: start.slot, flags, word, slots, writes, which: !self.which }
            }
        };
        // The first descriptor of all is withheld; of a batch that goes on, all are written now.
        let (mut at, chains) = (start, if is_new { rest } else { chains });
        if is_new {
            at.advance(first.slots(), size);
        }
        let descriptors = self.ring.pairs();
        let straight = descriptors.get(at.slot as usize..at.slot as usize + chains.len());
        let straight = straight.filter(|_| slots as usize == chains.len() + usize::from(is_new));
        self.strict &= writes && usize::from(slots) == count;
        (self.which, self.late) = (late.which, Some(late));
        let batch = self.published.to_bits();
        let progress = Progress { at: at.to_bits(), next: at.to_bits(), singles: straight.is_some(), batch };
        self.journal.note_batch((is_new || !writes).then_some(late.word), progress, self.staged());
        if writes {
            if let Some(run) = straight {
                // The fast path: one descriptor each, none of them behind the end of the ring.
                let flags = used_flags(at.wrap);
                run.iter().zip(chains).for_each(|([_, word], chain)| word.store(used(flags, chain), Ordering::Relaxed));
            } else {
                for chain in chains {
                    let mut next = at;
                    next.advance(chain.slots(), size);
                    self.journal.note_progress(Progress {
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

    /// Whether the driver wants to be notified of what was given since the last `true`, or the last `sure` answer.
    ///
    /// The sure answer costs a full fence. Without it `true` is true, but `false` may be late by what the driver has just
    /// written: who gets it has to ask again before he leaves the queue alone.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        if self.since == 0 {
            return false;
        }
        if sure {
            // Pairs with the driver's fence between writing its event structure and looking at the ring again
            // (2.8.21.3.1): without it both sides sleep. The used descriptors must be visible before the load below, on
            // x86 too.
            fence(Ordering::SeqCst);
        }
        let event = Event::from_word(self.ring.driver_event[0].load(Ordering::Relaxed));
        let wants = event.wanted(self.published.slot, self.published.wrap, self.since, self.ring.size);
        if wants || sure {
            self.since = 0;
        }
        wants
    }

    /// Asks the driver to notify us of the next chain that it makes available. `true`: there is one already, which may
    /// or may not be notified; take it.
    pub fn enable_notification(&mut self) -> bool {
        let event = if self.features.event_idx {
            Event::at(self.next_available.slot, self.next_available.wrap)
        } else {
            Event::ENABLED
        };
        self.ring.device_event[0].store(event.to_word(), Ordering::Relaxed);
        // Pairs with the driver's fence between publishing descriptors and reading what was stored here.
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if self.has_again() {
            return true;
        }
        self.is_available()
    }

    /// Asks the driver not to notify us: we look by ourselves.
    pub fn disable_notification(&mut self) {
        self.ring.device_event[0].store(Event::DISABLED.to_word(), Ordering::Relaxed);
    }
}

/// The second word of a used descriptor.
#[inline(always)]
fn used(flags: u16, chain: &Chain) -> u64 {
    // 2.8.8: WRITE tells that the length is valid.
    word(chain.written, chain.id, flags | if chain.written > 0 { WRITE } else { 0 })
}
