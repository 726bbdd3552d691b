//! Device end of a split virtqueue: takes what is available, gives back what was used.

use super::layout::{ELEMENTS_OF_A_LINE, ENTRIES, FLAGS, INDEX, Layout, NO_NOTIFICATION};
use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Journal, NEXT, Tuning, WRITE,
    chain::{Descriptor, Draft, indirect},
    journal::Staged,
    notify,
};
#[cfg(not(loom))]
use crate::{Inflight, JournalKey, Resumed, SetupError, inflight};
use ringroad_mem::{
    Hit, Table,
    sync::{Ordering, fence},
};

/// Device end of a split virtqueue.
pub struct Device {
    pub(super) ring: Layout,
    mask: u16,
    features: Features,
    pub(super) next_available: u16,
    /// The available index as it was read last: what lies before it need not be asked for again.
    pub(super) seen: u16,
    pub(super) next_used: u16,
    /// How far the driver sees it.
    pub(super) published: u16,
    /// `published` when the driver was last considered for a notification.
    considered: u16,
    /// How far what was taken must not be taken again, if anybody says so.
    consumed: Option<u16>,
    pub(super) journal: Journal,
    /// What is in flight is noted, for a successor of any make.
    #[cfg(not(loom))]
    pub(super) track: Option<Box<inflight::Split>>,
    hit: Hit,
    tuning: Tuning,
}

impl Device {
    /// Starts at `base`, the index of the first entry of the available ring that was not taken yet.
    pub fn new(ring: Layout, features: Features, base: u16) -> Device {
        // What was used is in memory; an entry that a former device took and never gave back is lost to both sides.
        let next_used = u16::from_le(ring.used[INDEX].load(Ordering::Relaxed));
        let mask = ring.size - 1;
        Device {
            ring,
            mask,
            features,
            next_available: base,
            seen: base,
            next_used,
            published: next_used,
            considered: next_used,
            consumed: None,
            journal: Journal::NONE,
            #[cfg(not(loom))]
            track: None,
            hit: Hit::default(),
            tuning: Tuning::default(),
        }
    }

    /// Starts where a former process has left the ring, else at `base`.
    ///
    /// The used index says how many chains were given back. As devices here give back in the order in which they took, it
    /// also says which one comes next, whatever the frontend has made of its base. Only what was consumed and not given back yet
    /// has to be known from a note: taking it again would carry frames twice.
    #[cfg(not(loom))]
    pub fn resume(
        ring: Layout,
        features: Features,
        base: u16,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
    ) -> Result<(Device, Resumed), SetupError> {
        let used = u16::from_le(ring.used[INDEX].load(Ordering::Relaxed));
        let available = u16::from_le(ring.available[INDEX].load(Ordering::Acquire));
        let is_ahead = |of: u16, index: u16| index.wrapping_sub(of) <= ring.size;
        let noted = journal.read(key).filter(|noted| {
            (used == noted.published || used == noted.staged.position)
                && is_ahead(noted.published, noted.staged.position)
                && noted.taken.is_none_or(|taken| taken.wrapping_sub(used) <= available.wrapping_sub(used))
        });
        let plausible = is_ahead(used, available);
        let noted = noted.filter(|_| plausible);
        if noted.is_none()
            && let Some(found) = inflight.read_split(ring.size, used, available)?
        {
            return Ok(Device::adopt(ring, features, base, journal, key, inflight, found));
        }
        let start = if plausible { used } else { base };
        let mut device = Device::new(ring, features, start);
        device.journal = journal;
        let mut finished = 0;
        match noted {
            None => device.journal.start(key, device.next_used),
            Some(noted) => {
                device.consumed = noted.taken;
                device.journal.note_published(used);
                device.journal.note_staged(Staged { position: used, ..Staged::default() });
                finished = noted.taken.map_or(0, |taken| device.finish(taken));
            }
        }
        let resumed = match noted {
            Some(_) if finished > 0 || base != start => Resumed::Noted { finished },
            _ if base == start => Resumed::Base,
            _ => Resumed::UsedIndex,
        };
        device.track = inflight.start_split(device.ring.size, device.next_used).map(Box::new);
        Ok((device, resumed))
    }

    /// Gives all back up to an index without a look at it: a former process has consumed it.
    #[cfg(not(loom))]
    fn finish(&mut self, until: u16) -> u32 {
        let mut finished = 0;
        while self.next_available != until && finished < u32::from(self.ring.size) {
            let chain = Chain::private(self.entry(self.next_available), 1);
            self.next_available = self.next_available.wrapping_add(1);
            self.give(&[chain]);
            finished += 1;
        }
        self.seen = self.next_available;
        finished
    }

    /// Notes that all that was taken so far is about to be carried on: it will be given back, but never taken again.
    #[inline]
    pub fn consume(&mut self) {
        self.consumed = Some(self.next_available);
        self.journal.note_taken(self.next_available);
    }

    /// Turns off what should be off.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
    }

    /// Where to go on after a stop: what `base` was when it started.
    pub fn base(&mut self) -> u16 {
        self.flush();
        self.next_available
    }

    /// How many chains the driver has made available and nobody has taken.
    #[inline(always)]
    pub fn available(&self) -> Result<u16, Fault> {
        // Pairs with the driver's release of the index: the entries and descriptors behind it are there.
        let index = u16::from_le(self.ring.available[INDEX].load(Ordering::Acquire));
        let ahead = index.wrapping_sub(self.next_available);
        if ahead > self.ring.size {
            return Err(Fault::AvailableJump { index, next: self.next_available, ahead, size: self.ring.size });
        }
        Ok(ahead)
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
        let wanted = max.min(chains.room());
        let mut ahead = self.seen.wrapping_sub(self.next_available) as usize;
        if ahead < wanted {
            ahead = self.available()?.into();
            self.seen = self.next_available.wrapping_add(ahead as u16);
        }
        let count = ahead.min(wanted);
        // Where the used entries will go: the driver has read what was there.
        for ahead in (0..if self.tuning.fetches() { count } else { 0 }).step_by(ELEMENTS_OF_A_LINE) {
            let at = self.next_used.wrapping_add(ahead as u16) & self.mask;
            self.ring.elements.prefetch(2 * at as usize, self.tuning.prefetch_write);
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
            let Ok(Descriptor { flags, .. }) = self.descriptor(self.entry(self.next_available)) else { break };
            let writable = flags & WRITE != 0;
            let run = match (writable, self.tuning.translation_cache) {
                (true, true) => self.take_run::<WRITE, true>(chains, max - taken),
                (false, true) => self.take_run::<0, true>(chains, max - taken),
                (true, false) => self.take_run::<WRITE, false>(chains, max - taken),
                (false, false) => self.take_run::<0, false>(chains, max - taken),
            };
            taken += run;
            // It goes on at the start of the ring.
            if run == 0 || self.next_available & self.mask != 0 {
                break;
            }
        }
        taken
    }

    /// The same, up to the end of the ring.
    #[inline(always)]
    fn take_run<const FLAGS: u16, const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize {
        let start = (self.next_available & self.mask) as usize;
        let entries = self.ring.available.get(ENTRIES + start..ENTRIES + self.ring.size as usize).unwrap_or_default();
        let descriptors = self.ring.descriptors.as_chunks::<2>().0;
        let count = max.min(entries.len());
        let buffers = entries[..count].iter().map(|entry| {
            let head = u16::from_le(entry.load(Ordering::Relaxed));
            let [address, word] = descriptors.get(head as usize)?;
            let (address, word) = (address.load(Ordering::Relaxed), u64::from_le(word.load(Ordering::Relaxed)));
            let good = (word >> 32) as u16 & (NEXT | INDIRECT | WRITE) == FLAGS;
            good.then_some((head, u64::from_le(address), word as u32))
        });
        let taken = chains.singles::<CACHE>(self.hit, FLAGS == WRITE, buffers);
        self.next_available = self.next_available.wrapping_add(taken as u16);
        taken
    }

    /// The normal path: a chain of any shape. `false`: it has to wait for the next burst.
    fn take_chain(&mut self, memory: &Table, chains: &mut Chains) -> Result<bool, Fault> {
        let descriptor = self.descriptor(self.entry(self.next_available))?;
        let taken = self.long_chain(memory, chains, descriptor)?;
        self.next_available = self.next_available.wrapping_add(taken.into());
        Ok(taken)
    }

    /// The head in the available ring at an index.
    #[inline(always)]
    pub(super) fn entry(&self, index: u16) -> u16 {
        let slot = (index & self.mask) as usize;
        u16::from_le(self.ring.available[ENTRIES + slot].load(Ordering::Relaxed))
    }

    pub(super) fn long_chain(
        &mut self,
        memory: &Table,
        chains: &mut Chains,
        descriptor: Descriptor,
    ) -> Result<bool, Fault> {
        let mut chain = chains.begin(1);
        chain.id = descriptor.index;
        match self.follow(memory, chains, &mut chain, descriptor) {
            Ok(()) => Ok(chains.end(chain)),
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
        for _ in 0..size {
            if descriptor.flags & INDIRECT != 0 {
                if !self.features.indirect {
                    return Err(Fault::Indirect { index: descriptor.index });
                }
                return indirect(chains, chain, memory, &mut self.hit, descriptor, size, true);
            }
            chains.add(chain, memory, &mut self.hit, descriptor)?;
            // Of one that has too many pieces the head is enough, to give it back.
            if descriptor.flags & NEXT == 0 || chain.clipped {
                return Ok(());
            }
            descriptor = self.descriptor(descriptor.tail)?;
        }
        Err(Fault::Loop { index: descriptor.index, size })
    }

    #[inline(always)]
    pub(super) fn descriptor(&self, index: u16) -> Result<Descriptor, Fault> {
        if index >= self.ring.size {
            return Err(Fault::Index { index, size: self.ring.size });
        }
        let at = 2 * index as usize;
        let address = u64::from_le(self.ring.descriptors[at].load(Ordering::Relaxed));
        let word = u64::from_le(self.ring.descriptors[at + 1].load(Ordering::Relaxed));
        Ok(Descriptor { index, address, len: word as u32, flags: (word >> 32) as u16, tail: (word >> 48) as u16 })
    }

    /// Puts back the last chains taken, all from the `keep`th of the burst on: they were not needed.
    pub fn untake(&mut self, chains: &mut Chains, keep: usize) {
        let unused = chains.list().len().saturating_sub(keep);
        #[cfg(not(loom))]
        let unused = match &mut self.track {
            None => unused,
            Some(track) => track.untake(chains.list().get(keep..).unwrap_or_default()),
        };
        self.next_available = self.next_available.wrapping_sub(unused as u16);
        chains.truncate(keep);
    }

    /// Gives chains back to the driver and publishes them at once.
    #[inline]
    pub fn give(&mut self, chains: &[Chain]) {
        if self.tuning.shadow_used {
            self.stage(chains);
            return self.flush();
        }
        for chain in chains {
            self.stage(std::slice::from_ref(chain));
            self.flush();
        }
    }

    /// The same, but publishes them when a quarter of the ring has come together, at the latest: a driver that has made all
    /// available gets three quarters back at once. Who finds nothing more to take calls `flush`.
    #[inline]
    pub fn give_late(&mut self, chains: &[Chain]) {
        self.stage(chains);
        if !self.tuning.shadow_used || self.next_used.wrapping_sub(self.published) > self.mask / 4 {
            self.flush();
        }
    }

    /// How many elements from the next one on share a cache line.
    #[inline(always)]
    pub fn line(&self) -> usize {
        ELEMENTS_OF_A_LINE - usize::from(self.next_used) % ELEMENTS_OF_A_LINE
    }

    /// Publishes what was given late.
    #[inline]
    pub fn flush(&mut self) {
        if self.published != self.next_used {
            #[cfg(not(loom))]
            if self.track.is_some() {
                return self.publish_tracked();
            }
            self.publish();
        }
    }

    #[inline(always)]
    pub(super) fn publish(&mut self) {
        // Pairs with the driver's acquire of the index: entries and buffers are written before it.
        self.ring.used[INDEX].store(self.next_used.to_le(), Ordering::Release);
        self.published = self.next_used;
        self.journal.note_published(self.next_used);
    }

    #[inline(always)]
    fn stage(&mut self, chains: &[Chain]) {
        #[cfg(not(loom))]
        if let Some(track) = &mut self.track {
            track.stage(chains);
        }
        let mut next = self.next_used;
        let staged = next.wrapping_add(chains.len() as u16);
        // Before the entries are written: see `journal`.
        self.journal.note_staged(Staged { position: staged, ..Staged::default() });
        let elements = self.ring.elements.as_chunks::<2>().0;
        for chain in chains {
            if let Some([id, len]) = elements.get(usize::from(next & self.mask)) {
                id.store(u32::from(chain.id).to_le(), Ordering::Relaxed);
                len.store(chain.written.to_le(), Ordering::Relaxed);
            }
            next = next.wrapping_add(1);
        }
        self.next_used = next;
    }

    /// Whether the driver wants to be notified of what was given since the last `true`, or the last `sure` answer.
    ///
    /// The sure answer costs a full fence. Without it `true` is true, but `false` may be late by what the driver has just
    /// written: who gets it has to ask again before he leaves the queue alone.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        let old = self.considered;
        if old == self.published {
            return false;
        }
        if sure {
            // Pairs with the driver's fence between asking for notifications and looking at the used index again
            // (2.7.7.2): without it both sides sleep. The store of the index must be visible before the load below, on
            // x86 too.
            fence(Ordering::SeqCst);
        }
        let wants = if self.features.event_idx {
            let event = self.ring.available[ENTRIES + self.ring.size as usize].load(Ordering::Relaxed);
            notify::passed(u16::from_le(event), self.published, old)
        } else {
            u16::from_le(self.ring.available[FLAGS].load(Ordering::Relaxed)) & NO_NOTIFICATION == 0
        };
        if wants || sure {
            self.considered = self.published;
        }
        wants
    }

    /// Asks the driver to notify us of the next chain that it makes available. `true`: there is one already, which may
    /// or may not be notified; take it.
    pub fn enable_notification(&mut self) -> bool {
        if self.features.event_idx {
            self.ring.available_event[0].store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.ring.used[FLAGS].store(0, Ordering::Relaxed);
        }
        // Pairs with the driver's fence between publishing the available index and reading what was stored here.
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if self.has_again() {
            return true;
        }
        self.available() != Ok(0)
    }

    /// Asks the driver not to notify us: we look by ourselves.
    pub fn disable_notification(&mut self) {
        // With EVENT_IDX the index that stays behind does it.
        if !self.features.event_idx {
            self.ring.used[FLAGS].store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }
}
