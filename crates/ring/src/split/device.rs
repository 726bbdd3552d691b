//! Device end of a split virtqueue (virtio 1.3, 2.7): takes available chains and returns used ones. Called through
//! `DeviceRing`.

use super::layout::{ELEMENTS_PER_LINE, ENTRIES, FLAGS, INDEX, Layout, NO_NOTIFICATION};
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
    /// Available index as last read; no need to read it again before reaching it.
    pub(super) seen: u16,
    pub(super) next_used: u16,
    /// The used index that the driver sees.
    pub(super) published: u16,
    /// `published` at the last decision whether to notify the driver.
    signalled: u16,
    /// Chains up to this index were consumed and must not be taken again; `None` if `consume` is not used.
    consumed: Option<u16>,
    pub(super) journal: Journal,
    /// Records what is in flight in the frontend's inflight region, for any back end that succeeds this one.
    #[cfg(not(loom))]
    pub(super) track: Option<Box<inflight::Split>>,
    hit: Hit,
    tuning: Tuning,
}

impl Device {
    /// Starts at `base`, the index of the first available entry that has not been taken.
    pub fn new(ring: Layout, features: Features, base: u16) -> Device {
        // The used index is in memory. Entries that a former device took and never returned are lost to both sides.
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
            signalled: next_used,
            consumed: None,
            journal: Journal::NONE,
            #[cfg(not(loom))]
            track: None,
            hit: Hit::default(),
            tuning: Tuning::default(),
        }
    }

    /// Starts where a former process left the ring, else at `base`.
    ///
    /// The used index counts the chains returned. As devices here return chains in the order in which they took them, it is
    /// also the index of the next chain to take, whatever base the frontend sends. Only chains that were consumed but not
    /// yet returned must be known from the journal, since taking them again would forward frames twice.
    ///
    /// # Errors
    /// [`SetupError::Inflight`] if the inflight region is invalid.
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
        let record = journal.read(key).filter(|record| {
            (used == record.published || used == record.staged.position)
                && is_ahead(record.published, record.staged.position)
                && record.taken.is_none_or(|taken| taken.wrapping_sub(used) <= available.wrapping_sub(used))
        });
        let plausible = is_ahead(used, available);
        let record = record.filter(|_| plausible);
        if record.is_none()
            && let Some(found) = inflight.read_split(ring.size, used, available)?
        {
            return Ok(Device::adopt(ring, features, base, journal, key, inflight, found));
        }
        let start = if plausible { used } else { base };
        let mut device = Device::new(ring, features, start);
        device.journal = journal;
        let mut finished = 0;
        match record {
            None => device.journal.start(key, device.next_used),
            Some(record) => {
                device.consumed = record.taken;
                device.journal.record_published(used);
                device.journal.record_staged(Staged { position: used, ..Staged::default() });
                finished = record.taken.map_or(0, |taken| device.finish(taken));
            }
        }
        let resumed = match record {
            Some(_) if finished > 0 || base != start => Resumed::Journal { finished },
            _ if base == start => Resumed::Base,
            _ => Resumed::UsedIndex,
        };
        device.track = inflight.start_split(device.ring.size, device.next_used).map(Box::new);
        Ok((device, resumed))
    }

    /// Returns all chains up to an index without reading them, as a former process has consumed them.
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

    /// Records that everything taken so far is about to be forwarded: it will be returned, but never taken again.
    #[inline]
    pub fn consume(&mut self) {
        self.consumed = Some(self.next_available);
        self.journal.record_taken(self.next_available);
    }

    /// Sets which optimisations are used.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
    }

    /// Publishes deferred chains and returns the base to resume at after a stop.
    pub fn base(&mut self) -> u16 {
        self.flush();
        self.next_available
    }

    /// Returns how many available chains have not been taken.
    ///
    /// # Errors
    /// [`Fault::AvailableJump`] if the available index is out of range.
    #[inline(always)]
    pub fn available(&self) -> Result<u16, Fault> {
        // Pairs with the driver's release store of the index: the entries and descriptors before it are visible.
        let index = u16::from_le(self.ring.available[INDEX].load(Ordering::Acquire));
        let ahead = index.wrapping_sub(self.next_available);
        if ahead > self.ring.size {
            return Err(Fault::AvailableJump { index, next: self.next_available, ahead, size: self.ring.size });
        }
        Ok(ahead)
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
        let wanted = max.min(chains.room());
        let mut ahead = self.seen.wrapping_sub(self.next_available) as usize;
        if ahead < wanted {
            ahead = self.available()?.into();
            self.seen = self.next_available.wrapping_add(ahead as u16);
        }
        let count = ahead.min(wanted);
        // Prefetch the used elements to be written next: the driver has read their old contents.
        for ahead in (0..if self.tuning.fetches() { count } else { 0 }).step_by(ELEMENTS_PER_LINE) {
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

    /// Fast path: single-buffer chains, all writable or all readable.
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
            // Continue at the start of the ring.
            if run == 0 || self.next_available & self.mask != 0 {
                break;
            }
        }
        taken
    }

    /// As `take_singles`, up to the end of the ring.
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

    /// Normal path: a chain of any shape. Returns `false` if it must wait for the next burst.
    fn take_chain(&mut self, memory: &Table, chains: &mut Chains) -> Result<bool, Fault> {
        let descriptor = self.descriptor(self.entry(self.next_available))?;
        let taken = self.read_chain(memory, chains, descriptor)?;
        self.next_available = self.next_available.wrapping_add(taken.into());
        Ok(taken)
    }

    /// Returns the head at an index of the available ring.
    #[inline(always)]
    pub(super) fn entry(&self, index: u16) -> u16 {
        let slot = (index & self.mask) as usize;
        u16::from_le(self.ring.available[ENTRIES + slot].load(Ordering::Relaxed))
    }

    pub(super) fn read_chain(
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
            // A chain with too many pieces can only be returned, for which its head is enough.
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

    /// Undoes the taking of the last chains, which were not needed: all from index `keep` of the burst on.
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

    /// Returns chains to the driver and publishes them at once.
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

    /// Returns chains to the driver but publishes them only when a quarter of the ring is deferred: a driver that has made
    /// the whole ring available gets three quarters of it back promptly. The caller must call `flush` when it finds no more
    /// to take.
    #[inline]
    pub fn give_deferred(&mut self, chains: &[Chain]) {
        self.stage(chains);
        if !self.tuning.shadow_used || self.next_used.wrapping_sub(self.published) > self.mask / 4 {
            self.flush();
        }
    }

    /// Returns how many used elements, from the next one on, share a cache line.
    #[inline(always)]
    pub fn left_in_line(&self) -> usize {
        ELEMENTS_PER_LINE - usize::from(self.next_used) % ELEMENTS_PER_LINE
    }

    /// Publishes deferred chains.
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
        // Pairs with the driver's acquire load of the index: elements and buffers are written before it.
        self.ring.used[INDEX].store(self.next_used.to_le(), Ordering::Release);
        self.published = self.next_used;
        self.journal.record_published(self.next_used);
    }

    #[inline(always)]
    fn stage(&mut self, chains: &[Chain]) {
        #[cfg(not(loom))]
        if let Some(track) = &mut self.track {
            track.stage(chains);
        }
        let mut next = self.next_used;
        let staged = next.wrapping_add(chains.len() as u16);
        // Recorded before the elements are written: see `journal`.
        self.journal.record_staged(Staged { position: staged, ..Staged::default() });
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

    /// Returns whether the driver wants to be notified of chains published since the last `true`, or the last `sure`
    /// answer.
    ///
    /// A sure answer costs a full fence. Without the fence `true` is reliable, but `false` may miss a request that the
    /// driver has just written: the caller must check again before going idle.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        let old = self.signalled;
        if old == self.published {
            return false;
        }
        if sure {
            // Pairs with the driver's fence between requesting notifications and re-reading the used index (2.7.7.2):
            // without it both sides may sleep. The store of the index must be visible before the load below, on x86 too.
            fence(Ordering::SeqCst);
        }
        let wants = if self.features.event_idx {
            let event = self.ring.available[ENTRIES + self.ring.size as usize].load(Ordering::Relaxed);
            notify::need_event(u16::from_le(event), self.published, old)
        } else {
            u16::from_le(self.ring.available[FLAGS].load(Ordering::Relaxed)) & NO_NOTIFICATION == 0
        };
        if wants || sure {
            self.signalled = self.published;
        }
        wants
    }

    /// Asks the driver to notify us of the next chain that it makes available. Returns `true` if a chain is available
    /// already; the caller must take it, as the driver may or may not send a notification for it.
    pub fn enable_notification(&mut self) -> bool {
        if self.features.event_idx {
            self.ring.available_event[0].store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.ring.used[FLAGS].store(0, Ordering::Relaxed);
        }
        // Pairs with the driver's fence between publishing the available index and reading the value stored here.
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if self.has_resubmits() {
            return true;
        }
        self.available() != Ok(0)
    }

    /// Asks the driver not to notify us, because we poll.
    pub fn disable_notification(&mut self) {
        // With EVENT_IDX the stale event index already suppresses notifications.
        if !self.features.event_idx {
            self.ring.used[FLAGS].store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }
}
