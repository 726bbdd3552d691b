//! `QueueRegionSplit`: features; version, desc_num, last_batch_head, used_idx; then two words for each descriptor: inflight in the
//! lowest byte and next in the highest 16 bits; counter.
//!
//! A batch is linked, published in the used ring, and struck off. Whoever finds a used index that the region does not know of strikes
//! off as many as it is ahead.

use super::{Again, Inflight, VERSION, fields, is_inflight, join, nonsense, store};
use crate::{Chain, SetupError};
use ringroad_mem::{
    Words,
    sync::{AtomicU64, Ordering},
};

/// What a region says about a split ring, checked.
pub(crate) struct Found {
    /// Heads in flight, in the order in which they were taken.
    pub heads: Vec<u16>,
    /// Heads that are given back, though they may not be struck off, and what each is linked to.
    done: Vec<(u16, u16)>,
    counter: u64,
}

/// The region of a split ring that runs.
pub(crate) struct Split {
    words: Words<AtomicU64>,
    entries: u16,
    size: u16,
    counter: u64,
    last_batch_head: u16,
    /// The head of the batch before.
    batch_before: u16,
    used: u16,
    /// Given back, but not published yet.
    batch: Vec<u16>,
    /// In flight when the ring started.
    pub again: Again<u16>,
}

impl Inflight {
    /// What it says about a split ring with this used index and available index; `None`: nothing.
    pub(crate) fn read_split(&self, size: u16, used: u16, available: u16) -> Result<Option<Found>, SetupError> {
        let Some([_, control, entries @ ..]) = self.words.as_deref() else { return Ok(None) };
        let [version, count, head, known] = fields(u64::from_le(control.load(Ordering::Relaxed)));
        if version == 0 {
            return Ok(None);
        }
        if version != VERSION {
            return nonsense("version", version, VERSION);
        }
        if count < size || count > self.entries {
            return nonsense("number of entries", count, self.entries);
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
        if inflight.is_empty() && batch > size {
            // It was left by a ring of another life, and nothing hangs on it.
            return Ok(None);
        }
        if batch > size {
            return nonsense("distance to the used index", batch, size);
        }
        let mut done = Vec::new();
        let mut struck = vec![false; count.into()];
        let mut at = head;
        for _ in 0..batch {
            let (Some(&[state, _]), Some(struck)) = (states.get(usize::from(at)), struck.get_mut(usize::from(at)))
            else {
                return nonsense("entry in the last batch", at, count.saturating_sub(1));
            };
            if std::mem::replace(struck, true) {
                return nonsense("last batch has a loop; its length", done.len() as u64, batch);
            }
            let next = (state >> 48) as u16;
            done.push((at, next));
            at = next;
        }
        inflight.retain(|&(_, index)| struck.get(usize::from(index)) != Some(&true));
        if let Some(&(_, index)) = inflight.iter().find(|&&(_, index)| index >= size) {
            return nonsense("buffer in flight", index, size.saturating_sub(1));
        }
        let ahead = available.wrapping_sub(used);
        if ahead > size || inflight.len() > usize::from(ahead) {
            if inflight.is_empty() {
                return Ok(None);
            }
            return nonsense("number of buffers in flight", inflight.len() as u64, ahead.min(size));
        }
        inflight.sort_unstable();
        let counter = inflight.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok(Some(Found { heads: inflight.into_iter().map(|(_, index)| index).collect(), done, counter }))
    }

    /// Goes on with what was found.
    pub(crate) fn adopt_split(self, found: Found, size: u16, used: u16) -> Option<Split> {
        let Found { heads, done, counter } = found;
        let mut track = Split::new(self, size, used)?;
        track.counter = counter;
        // Still linked, in case that this process is killed before the used index is noted.
        for (head, next) in done {
            track.strike(head, next);
        }
        track.note();
        track.again = Again::new(heads);
        Some(track)
    }

    /// Begins with nothing in flight.
    pub(crate) fn start_split(self, size: u16, used: u16) -> Option<Split> {
        self.end();
        let track = Split::new(self, size, used)?;
        track.words.iter().skip(2).for_each(|word| store(word, 0));
        if let [features, ..] = &*track.words {
            store(features, 0);
        }
        track.note();
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
        Some(Split {
            words,
            entries,
            size,
            counter: 0,
            last_batch_head: 0,
            batch_before: 0,
            used,
            batch,
            again: Again::default(),
        })
    }

    /// version, desc_num, last_batch_head, used_idx.
    fn note(&self) {
        if let [_, control, ..] = &*self.words {
            store(control, join([VERSION, self.entries, self.last_batch_head, self.used]));
        }
    }

    fn state(&self, head: u16) -> Option<&[AtomicU64; 2]> {
        self.words.as_chunks().0.get(1 + usize::from(head))
    }

    /// It is not in flight any more.
    fn strike(&self, head: u16, next: u16) {
        if let Some([state, _]) = self.state(head) {
            store(state, join([0, 0, 0, next]));
        }
    }

    /// These were taken from the ring.
    pub fn take(&mut self, chains: &[Chain]) {
        for chain in chains {
            if let Some([state, counter]) = self.state(chain.id) {
                store(counter, self.counter);
                store(state, 1);
            }
            self.counter = self.counter.wrapping_add(1);
        }
        self.again.count(chains.len(), self.size);
    }

    /// These are put back, the last of all that were taken; says how many of them belong into the ring.
    pub fn untake(&mut self, chains: &[Chain]) -> usize {
        let fresh = self.again.untake(chains.len());
        // The newest first: what is left is what comes first in the ring.
        chains.iter().rev().take(fresh).for_each(|chain| self.strike(chain.id, 0));
        fresh
    }

    /// All that is in flight stands in the ring in that order: it is taken from there.
    pub fn forget(&mut self) {
        let again = std::mem::take(&mut self.again);
        again.list.iter().rev().for_each(|&head| self.strike(head, 0));
    }

    /// These will be published with the next batch.
    pub fn stage(&mut self, chains: &[Chain]) {
        self.batch.extend(chains.iter().map(|chain| chain.id));
    }

    /// The batch is about to be published.
    pub fn link(&mut self) {
        self.batch_before = self.last_batch_head;
        for &head in &self.batch {
            if let Some([state, _]) = self.state(head) {
                store(state, join([1, 0, 0, self.last_batch_head]));
            }
            self.last_batch_head = head;
        }
        self.note();
    }

    /// It was published: this is the used index now.
    pub fn unlink(&mut self, used: u16) {
        // Still linked, until the used index is noted.
        let mut next = self.batch_before;
        for &head in &self.batch {
            self.strike(head, next);
            next = head;
        }
        self.batch.clear();
        self.used = used;
        self.note();
    }
}
