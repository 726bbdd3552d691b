//! Device end of a split virtqueue (virtio 1.3, 2.7): what it does not share with a packed one. Called by `device.rs`.

use super::layout::{DESCRIPTORS_PER_LINE, ELEMENTS_PER_LINE, ENTRIES, FLAGS, INDEX, Layout, NO_NOTIFICATION};
use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Inflight, Journal, JournalKey, NEXT, Resumed, SetupError, WRITE,
    chain::Descriptor,
    device::{Device, DeviceEnd},
    journal::Staged,
    layout::RingPosition,
    notify,
};
use ringroad_mem::{Table, sync::Ordering};

/// What only a split ring's device end keeps.
pub(crate) struct DeviceState {
    /// Available index as last read; no need to read it again before reaching it.
    pub seen: u16,
}

impl Device<Layout> {
    /// Starts at `base`, the index of the first available entry that has not been taken.
    pub fn new(ring: Layout, features: Features, base: u16) -> Self {
        // The used index is in memory. Entries that a former device took and never returned are lost to both sides.
        let used = u16::from_le(ring.used[INDEX].load(Ordering::Relaxed));
        Self::at(ring, features, base, used, DeviceState { seen: base })
    }

    /// Starts where a former process left the ring, else at `base`.
    ///
    /// The used index counts the chains returned. As devices here return chains in the order in which they took them, it is
    /// also the index of the next chain to take, whatever base the frontend sends. Only chains that were consumed but not
    /// yet returned must be known from the journal, since taking them again would forward frames twice.
    ///
    /// # Errors
    /// [`SetupError::Inflight`] if the inflight region is invalid.
    pub fn resume(
        ring: Layout,
        features: Features,
        base: u16,
        journal: Journal,
        key: &JournalKey,
        inflight: Inflight,
    ) -> Result<(Self, Resumed), SetupError> {
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
            return Ok(Self::adopt(ring, features, base, journal, key, inflight, found));
        }
        let start = if plausible { used } else { base };
        let mut device = Self::new(ring, features, start);
        device.journal = journal;
        let mut finished = 0;
        match record {
            None => device.journal.start(key, device.next_used),
            Some(record) => {
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
    fn finish(&mut self, until: u16) -> u32 {
        let mut finished = 0;
        while self.next_available != until && finished < u32::from(self.ring.size) {
            let chain = Chain::private(self.entry(self.next_available), 1);
            self.next_available = self.next_available.wrapping_add(1);
            self.stage(&[chain]);
            self.flush();
            finished += 1;
        }
        self.state.seen = self.next_available;
        finished
    }

    /// Returns how many available chains have not been taken, or [`Fault::AvailableJump`].
    #[inline(always)]
    fn available(&self) -> Result<u16, Fault> {
        // Pairs with the driver's release store of the index: the entries and descriptors before it are visible.
        let index = u16::from_le(self.ring.available[INDEX].load(Ordering::Acquire));
        let ahead = index.wrapping_sub(self.next_available);
        if ahead > self.ring.size {
            return Err(Fault::AvailableJump { index, next: self.next_available, ahead, size: self.ring.size });
        }
        Ok(ahead)
    }

    /// Returns the head at an index of the available ring.
    #[inline(always)]
    pub(super) fn entry(&self, index: u16) -> u16 {
        u16::from_le(self.ring.available[ENTRIES + index.slot(self.ring.size)].load(Ordering::Relaxed))
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

    #[inline(always)]
    fn store_index(&mut self) {
        // Pairs with the driver's acquire load of the index: elements and buffers are written before it.
        self.ring.used[INDEX].store(self.next_used.to_le(), Ordering::Release);
    }

    /// See `DeviceRing::hand_over`. Whatever the driver has written there, a prefetch accesses nothing.
    #[cold]
    #[inline(never)]
    pub fn hand_over(&self, most: usize) {
        let size = usize::from(self.ring.size);
        let available = u16::from_le(self.ring.available[INDEX].load(Ordering::Relaxed));
        let count = usize::from(available.wrapping_sub(self.next_available)).min(most).min(size);
        let entries = self.ring.available.get(ENTRIES..ENTRIES + size).unwrap_or_default();
        let (before, from) = entries.split_at_checked(self.next_available.slot(self.ring.size)).unwrap_or_default();
        let mut line = usize::MAX;
        for entry in from.iter().chain(before).take(count) {
            let head = usize::from(u16::from_le(entry.load(Ordering::Relaxed)));
            if std::mem::replace(&mut line, head / DESCRIPTORS_PER_LINE) != head / DESCRIPTORS_PER_LINE {
                self.ring.descriptors.prefetch(2 * head, true);
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn publish_tracked(&mut self) {
        self.track.iter_mut().for_each(|track| track.link());
        self.store_index();
        self.track.iter_mut().for_each(|track| track.unlink(self.next_used));
    }
}

impl DeviceEnd<Layout> for Device<Layout> {
    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<usize, Fault> {
        let mut ahead = self.state.seen.wrapping_sub(self.next_available) as usize;
        if ahead < wanted {
            ahead = self.available()?.into();
            self.state.seen = self.next_available.wrapping_add(ahead as u16);
        }
        let count = ahead.min(wanted);
        // Prefetch the used elements to be written next: the driver has read their old contents.
        for ahead in (0..if self.tuning.fetches() { count } else { 0 }).step_by(ELEMENTS_PER_LINE) {
            let at = self.next_used.wrapping_add(ahead as u16).slot(self.ring.size);
            self.ring.elements.prefetch(2 * at, self.tuning.prefetch_write);
        }
        Ok(count)
    }

    #[inline(always)]
    fn next_flags(&self) -> Option<u16> {
        self.descriptor(self.entry(self.next_available)).ok().map(|descriptor| descriptor.flags)
    }

    #[inline(always)]
    fn take_run<const FLAGS: u16, const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize {
        let start = self.next_available.slot(self.ring.size);
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

    #[inline(always)]
    fn head(&self) -> Result<Option<Descriptor>, Fault> {
        self.descriptor(self.entry(self.next_available)).map(Some)
    }

    #[inline(always)]
    fn following(&self, descriptor: &Descriptor) -> Result<Descriptor, Fault> {
        self.descriptor(descriptor.tail)
    }

    /// The available index was checked.
    #[inline(always)]
    fn check(&self, _slots: u16) -> Result<(), Fault> {
        Ok(())
    }

    #[inline(always)]
    fn advance(&mut self, slots: u16) {
        self.next_available = self.next_available.wrapping_add(slots);
    }

    #[inline(always)]
    fn back(&mut self, slots: u16) {
        self.next_available = self.next_available.wrapping_sub(slots);
    }

    #[inline(always)]
    fn stage(&mut self, chains: &[Chain]) {
        if let Some(track) = &mut self.track {
            track.stage(chains);
        }
        let (mut next, size) = (self.next_used, self.ring.size);
        let staged = next.wrapping_add(chains.len() as u16);
        // Recorded before the elements are written: see `journal`.
        self.journal.record_staged(Staged { position: staged, ..Staged::default() });
        let elements = self.ring.elements.as_chunks::<2>().0;
        for chain in chains {
            if let Some([id, len]) = elements.get(next.slot(size)) {
                id.store(u32::from(chain.id).to_le(), Ordering::Relaxed);
                len.store(chain.written.to_le(), Ordering::Relaxed);
            }
            next = next.wrapping_add(1);
        }
        self.next_used = next;
    }

    #[inline(always)]
    fn publish(&mut self) {
        if self.track.is_some() {
            return self.publish_tracked();
        }
        self.store_index();
    }

    #[inline(always)]
    fn is_requested(&self, newer: u32) -> bool {
        if self.features.event_idx {
            let event = self.ring.available[ENTRIES + self.ring.size as usize].load(Ordering::Relaxed);
            notify::need_event(u16::from_le(event), self.published.wrapping_sub(newer as u16), self.unsignalled - newer)
        } else {
            u16::from_le(self.ring.available[FLAGS].load(Ordering::Relaxed)) & NO_NOTIFICATION == 0
        }
    }

    fn request(&mut self) {
        if self.features.event_idx {
            self.ring.available_event[0].store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.ring.used[FLAGS].store(0, Ordering::Relaxed);
        }
    }

    fn suppress(&mut self) {
        // With EVENT_IDX the stale event index already suppresses notifications.
        if !self.features.event_idx {
            self.ring.used[FLAGS].store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }

    fn is_available(&self) -> bool {
        self.available() != Ok(0)
    }

    fn base(&self) -> u32 {
        self.next_available.into()
    }

    fn take_saved(&mut self, memory: &Table, chains: &mut Chains, head: u16) -> Result<bool, Fault> {
        let head = self.descriptor(head)?;
        Ok(self.read_chain(memory, chains, head)? > 0)
    }

    fn unread(head: u16) -> Chain {
        Chain::private(head, 1)
    }

    fn record(&mut self, chains: &[Chain]) {
        self.track.iter_mut().for_each(|track| track.take(chains));
    }

    fn forget(&mut self, id: u16) {
        self.track.iter_mut().for_each(|track| track.forget(id));
    }
}
