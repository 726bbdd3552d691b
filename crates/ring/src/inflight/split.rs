//! The inflight region of a split ring, `QueueRegionSplit` (vhost-user, "Inflight I/O tracking"): features; version,
//! desc_num, last_batch_head, used_idx; then two words per descriptor: inflight in the lowest byte and next in the highest
//! 16 bits; counter. Called by `split/device.rs` and `split/tracked.rs`.
//!
//! A batch is linked, published in the used ring, then its inflight fields are cleared. If a successor finds the ring's
//! used index ahead of the recorded one, it clears as many chains of the last batch as it is ahead.

use super::{Inflight, VERSION, fields, invalid, is_inflight, join, store};
use crate::{Chain, SetupError};
use ringroad_mem::{
    Words,
    sync::{AtomicU64, Ordering},
};

/// Validated contents of the region.
pub(crate) struct Found {
    /// Heads in flight, in the order in which they were taken.
    pub heads: Vec<u16>,
    /// Heads that were returned but perhaps not cleared, each with the head that it is linked to.
    done: Vec<(u16, u16)>,
    counter: u64,
    /// Number of entries in use.
    entries: u16,
}

/// The region of a running split ring.
pub(crate) struct Split {
    words: Words<AtomicU64>,
    /// Number of entries in use, at least the queue size.
    entries: u16,
    counter: u64,
    last_batch_head: u16,
    /// The last head of the previous batch.
    batch_before: u16,
    used: u16,
    /// Returned, but not published yet.
    batch: Vec<u16>,
}

impl Inflight {
    /// Reads and validates the region of a split ring with these used and available indices; `None` if it holds no state.
    /// (In one function, as each step relies on what those before it have checked.)
    pub(crate) fn read_split(&self, size: u16, used: u16, available: u16) -> Result<Option<Found>, SetupError> {
        let Some([_, control, entries @ ..]) = self.words.as_deref() else { return Ok(None) };
        let [version, count, head, known] = fields(u64::from_le(control.load(Ordering::Relaxed)));
        if version == 0 {
            return Ok(None);
        }
        if version != VERSION {
            return invalid("version", version, VERSION);
        }
        // Each word is read once: the frontend may change it at any time.
        let states: Vec<[u64; 2]> = entries
            .as_chunks::<2>()
            .0
            .iter()
            .take(count.into())
            .map(|state| state.each_ref().map(|word| u64::from_le(word.load(Ordering::Relaxed))))
            .collect();
        let mut inflight = Vec::new();
        for (index, &[state, counter]) in (0..count).zip(&states) {
            if is_inflight(state)? {
                inflight.push((counter, index));
            }
        }
        let batch = used.wrapping_sub(known);
        if inflight.is_empty() && (batch > size || count < size) {
            // A leftover of a previous use of the region, perhaps of a smaller ring, with nothing in flight.
            return Ok(None);
        }
        if count < size || count > self.entries {
            return invalid("number of entries (at least the queue size)", count, self.entries);
        }
        if batch > size {
            return invalid("distance to the ring's used index", batch, size);
        }
        let (mut done, mut at) = (Vec::new(), head);
        let mut in_batch = vec![false; count.into()];
        for _ in 0..batch {
            let (Some(&[state, _]), Some(in_batch)) = (states.get(usize::from(at)), in_batch.get_mut(usize::from(at)))
            else {
                return invalid("head in the last batch", at, count.saturating_sub(1));
            };
            if std::mem::replace(in_batch, true) {
                return invalid("loops in the last batch", 1_u8, 0_u8);
            }
            let next = (state >> 48) as u16;
            done.push((at, next));
            at = next;
        }
        inflight.retain(|&(_, index)| in_batch.get(usize::from(index)) != Some(&true));
        if let Some(&(_, index)) = inflight.iter().find(|&&(_, index)| index >= size) {
            return invalid("head in flight", index, size.saturating_sub(1));
        }
        let ahead = available.wrapping_sub(used);
        if ahead > size || inflight.len() > usize::from(ahead) {
            if inflight.is_empty() {
                return Ok(None);
            }
            return invalid("number of chains in flight", inflight.len() as u64, ahead.min(size));
        }
        inflight.sort_unstable();
        let counter = inflight.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let heads = inflight.into_iter().map(|(_, index)| index).collect();
        Ok(Some(Found { heads, done, counter, entries: count }))
    }

    /// Starts tracking with the state that was found.
    pub(crate) fn adopt_split(self, found: &Found, size: u16, used: u16) -> Option<Split> {
        let mut track = Split::new(self, size, used)?;
        (track.counter, track.entries) = (found.counter, found.entries);
        // Keep them linked, in case this process is killed before the used index is recorded.
        for &(head, next) in &found.done {
            track.clear(head, next);
        }
        track.write_control();
        Some(track)
    }

    /// Starts tracking with nothing in flight.
    pub(crate) fn start_split(self, size: u16, used: u16) -> Option<Split> {
        self.end();
        let track = Split::new(self, size, used)?;
        // Entries that this ring does not use are not touched: the region may be for much larger ones.
        let end = 2 + 2 * usize::from(size);
        track.words.iter().take(end).skip(2).for_each(|word| store(word, 0));
        track.words.clear_from(end);
        if let [features, ..] = &*track.words {
            store(features, 0);
        }
        track.write_control();
        Some(track)
    }
}

impl Split {
    fn new(inflight: Inflight, size: u16, used: u16) -> Option<Split> {
        let Inflight { words: Some(words), entries } = inflight else { return None };
        if entries < size {
            return None;
        }
        let batch = Vec::with_capacity(size.into());
        Some(Split { words, entries: size, counter: 0, last_batch_head: 0, batch_before: 0, used, batch })
    }

    /// Writes version, desc_num, last_batch_head, used_idx.
    fn write_control(&self) {
        if let [_, control, ..] = &*self.words {
            store(control, join([VERSION, self.entries, self.last_batch_head, self.used]));
        }
    }

    fn state(&self, head: u16) -> Option<&[AtomicU64; 2]> {
        self.words.as_chunks().0.get(1 + usize::from(head))
    }

    /// Clears a head's inflight field.
    fn clear(&self, head: u16, next: u16) {
        if let Some([state, _]) = self.state(head) {
            store(state, join([0, 0, 0, next]));
        }
    }

    /// Records chains taken from the ring.
    pub fn take(&mut self, chains: &[Chain]) {
        for chain in chains {
            if let Some([state, counter]) = self.state(chain.id) {
                store(counter, self.counter);
                store(state, 1);
            }
            self.counter = self.counter.wrapping_add(1);
        }
    }

    /// Clears a chain that is in the ring: it will be taken from there.
    pub fn forget(&self, head: u16) {
        self.clear(head, 0);
    }

    /// Adds chains to the next batch.
    pub fn stage(&mut self, chains: &[Chain]) {
        self.batch.extend(chains.iter().map(|chain| chain.id));
    }

    /// Links the batch, before it is published.
    pub fn link(&mut self) {
        self.batch_before = self.last_batch_head;
        for &head in &self.batch {
            if let Some([state, _]) = self.state(head) {
                store(state, join([1, 0, 0, self.last_batch_head]));
            }
            self.last_batch_head = head;
        }
        self.write_control();
    }

    /// Clears the batch after it was published; `used` is the new used index.
    pub fn unlink(&mut self, used: u16) {
        // Keep the heads linked until the used index is recorded.
        let mut next = self.batch_before;
        for &head in &self.batch {
            self.clear(head, next);
            next = head;
        }
        self.batch.clear();
        self.used = used;
        self.write_control();
    }
}
