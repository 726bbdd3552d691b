//! `QueueRegionPacked`: features; version, desc_num, free_head, old_free_head; used_idx, old_used_idx, and two bytes with
//! the wrap counters; padding. Then four words for each entry: inflight in the lowest byte, next, last, num; counter; id, flags, len
//! of a descriptor; its address.
//!
//! The entries of a chain are linked, from its head on, and so are the free ones. A chain is taken when `old_free_head` has moved
//! behind it. It is given back in three steps: linked to the free ones and `used_idx` moved on; published in the ring; struck off, and the
//! old fields moved on too. Whoever finds them different asks the ring whether it was published.
//!
//! Each chain is published for itself. Used descriptors behind one that is withheld would be seen too early if a successor gives
//! others back in their place.

use super::{Again, Inflight, VERSION, fields, is_inflight, join, nonsense, store};
use crate::{
    Chain, SetupError,
    chain::Descriptor,
    packed::{Layout, Position},
};
use ringroad_mem::{
    Words,
    sync::{AtomicU64, Ordering},
};

/// A chain in flight whose descriptors may not be in the ring any more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved {
    /// The buffer id.
    pub id: u16,
    /// How many descriptors it has.
    pub slots: u16,
    /// Where they begin in the list of all.
    first: usize,
    entry: u16,
}

/// What a region says about a packed ring, checked.
pub(crate) struct Found {
    /// Where the next used descriptor goes.
    pub used: Position,
    /// Chains in flight, in the order in which they were taken.
    pub chains: Vec<Saved>,
    /// How many descriptors they have altogether.
    pub slots: u16,
    descriptors: Vec<Descriptor>,
    /// What was begun is finished; else it is undone.
    commit: bool,
    /// Of each entry: next, last, num.
    links: Vec<[u16; 3]>,
    free: Vec<u16>,
    /// Entries that are neither free nor in flight.
    lost: Vec<u16>,
    counter: u64,
}

/// The region of a packed ring that runs.
pub(crate) struct Packed {
    words: Words<AtomicU64>,
    entries: u16,
    size: u16,
    counter: u64,
    free_head: u16,
    old_free_head: u16,
    used: Position,
    old_used: Position,
    /// Of each entry: next, last, num.
    links: Box<[[u16; 3]]>,
    /// By buffer id: one more than the first entry of the chain in flight that has it.
    by_id: Box<[u16]>,
    /// The driver has done what the structure has no room for: an id twice in flight. It gets nothing back after a crash.
    broken: bool,
    /// In flight when the ring started.
    pub again: Again<Saved>,
    descriptors: Vec<Descriptor>,
}

/// Of an entry: the words of its state and of its descriptor.
type Entry = [AtomicU64; 4];

impl Found {
    /// The descriptors of a chain.
    pub fn descriptors(&self, chain: &Saved) -> &[Descriptor] {
        chain.of(&self.descriptors)
    }
}

impl Saved {
    fn of<'a>(&self, all: &'a [Descriptor]) -> &'a [Descriptor] {
        all.get(self.first..self.first + usize::from(self.slots)).unwrap_or_default()
    }
}

impl Inflight {
    /// What it says about a packed ring; `None`: nothing.
    pub(crate) fn read_packed(&self, ring: &Layout) -> Result<Option<Found>, SetupError> {
        let Some([_, control, indices, _, rest @ ..]) = self.words.as_deref() else { return Ok(None) };
        let size = ring.size();
        let load = |word: &AtomicU64| u64::from_le(word.load(Ordering::Relaxed));
        let [version, count, free_head, old_free_head] = fields(load(control));
        if version == 0 {
            return Ok(None);
        }
        if version != VERSION {
            return nonsense("version", version, VERSION);
        }
        if count < size || count > self.entries {
            return nonsense("number of entries", count, self.entries);
        }
        let [used, old_used, wraps, _] = fields(load(indices));
        let position = |index: u16, wrap: u16| match (index < size, wrap) {
            (true, 0 | 1) => Ok(Position { slot: index, wrap: wrap == 1 }),
            (true, _) => nonsense("wrap counter", wrap, 1_u8),
            _ => nonsense("used index", index, size.saturating_sub(1)),
        };
        let (used, old_used) = (position(used, wraps & 0xff)?, position(old_used, wraps >> 8)?);
        // Published, if the descriptor there is not as the driver made it available.
        let commit = used != old_used && !ring.is_available(old_used);
        let (used, free_head) = if commit { (used, free_head) } else { (old_used, old_free_head) };

        // Each word is read once: the frontend may change it at any time.
        let entries: Vec<[u64; 4]> =
            rest.as_chunks::<4>().0.iter().take(count.into()).map(|entry| entry.each_ref().map(load)).collect();
        let links: Vec<[u16; 3]> =
            entries.iter().map(|&[state, ..]| fields(state)).map(|[_, rest @ ..]| rest).collect();
        let next = |entry: u16| links.get(usize::from(entry)).map(|&[next, ..]| next);
        let mut known = vec![false; count.into()];
        // Whether an entry was not met before.
        let mut meet = |entry: u16| known.get_mut(usize::from(entry)).map(|known| !std::mem::replace(known, true));

        let mut free = Vec::new();
        let mut at = free_head;
        // The list ends outside.
        while let Some(following) = next(at) {
            if free.len() == usize::from(count) {
                break;
            }
            if meet(at) != Some(true) {
                return nonsense("list of free entries has a loop; its length", free.len() as u64, count);
            }
            free.push(at);
            at = following;
        }
        let mut heads = Vec::new();
        for (index, &[state, counter, ..]) in (0..count).zip(&entries) {
            if is_inflight(state)? {
                heads.push((counter, index));
            }
        }
        let mut is_free = vec![false; count.into()];
        for &entry in &free {
            if let Some(is_free) = is_free.get_mut(usize::from(entry)) {
                *is_free = true;
            }
        }
        heads.retain(|&(_, index)| is_free.get(usize::from(index)) == Some(&false));
        heads.sort_unstable();

        let (mut chains, mut descriptors, mut slots) = (Vec::new(), Vec::new(), 0_u16);
        let mut ids = std::collections::HashSet::new();
        for &(_, entry) in &heads {
            let Some(&[_, last, num]) = links.get(usize::from(entry)) else { continue };
            if num == 0 || num > size - slots {
                return nonsense("number of descriptors in flight", num, size - slots);
            }
            let (first, mut at) = (descriptors.len(), entry);
            for step in 1..=num {
                let Some(&[_, _, word, address]) = entries.get(usize::from(at)) else {
                    return nonsense("entry of a chain", at, count.saturating_sub(1));
                };
                if meet(at) != Some(true) {
                    return nonsense("chains in flight share an entry; their descriptors", slots, size);
                }
                let [id, flags, ..] = fields(word);
                let index = step - 1;
                descriptors.push(Descriptor { index, address, len: (word >> 32) as u32, flags, tail: id });
                if step == num {
                    if at != last {
                        return nonsense("last entry of a chain", last, at);
                    }
                    if !ids.insert(id) {
                        return nonsense("buffer id that is twice in flight", id, id);
                    }
                    chains.push(Saved { id, slots: num, first, entry });
                } else {
                    at = next(at).unwrap_or(count);
                }
            }
            slots += num;
        }
        let counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        if chains.is_empty() && used != Position::START && ring.is_fresh() {
            // It was left by a ring of another life, and nothing hangs on it.
            return Ok(None);
        }
        let lost = (0..count).filter(|&entry| known.get(usize::from(entry)) == Some(&false)).collect();
        Ok(Some(Found { used, chains, slots, descriptors, commit, links, free, lost, counter }))
    }

    /// Goes on with what was found.
    pub(crate) fn adopt_packed(self, found: Found, size: u16) -> Option<Packed> {
        let Found { used, chains, descriptors, commit, links, free, lost, counter, .. } = found;
        let mut track = Packed::new(self, size, used)?;
        track.counter = counter;
        let (count, entries) = (links.len() as u16, track.entries);
        track.links.iter_mut().zip(links).for_each(|(link, known)| *link = known);
        // The region may have more entries than were in use.
        (count..entries).for_each(|entry| track.set(entry, false, [entries, 0, 0]));
        // What was begun is finished or undone, and looks the same to whoever comes if this process is killed meanwhile.
        let free_head = free.first().copied().unwrap_or(entries);
        (track.free_head, track.old_free_head) = (free_head, free_head);
        if commit {
            track.note_free();
            track.note_used();
        } else {
            track.note_used();
            track.note_free();
        }
        for (index, &entry) in free.iter().enumerate() {
            // The list ends outside.
            let next = free.get(index + 1).copied().unwrap_or(entries);
            track.set(entry, false, [next, 0, 0]);
        }
        for entry in lost.into_iter().chain(count..entries) {
            track.put(entry, entry, false);
        }
        for chain in &chains {
            track.learn(chain.id, chain.entry);
        }
        (track.again, track.descriptors) = (Again::new(chains), descriptors);
        Some(track)
    }

    /// Begins with nothing in flight.
    pub(crate) fn start_packed(self, size: u16, used: Position) -> Option<Packed> {
        self.end();
        let mut track = Packed::new(self, size, used)?;
        track.words.iter().enumerate().filter(|&(index, _)| index != 1).for_each(|(_, word)| store(word, 0));
        for entry in 0..track.entries {
            track.set(entry, false, [entry + 1, 0, 0]);
        }
        track.note_used();
        track.note_free();
        Some(track)
    }
}

impl Packed {
    fn new(inflight: Inflight, size: u16, used: Position) -> Option<Packed> {
        let Inflight { words: Some(words), entries } = inflight else { return None };
        if entries < size {
            return None;
        }
        Some(Packed {
            words,
            entries,
            size,
            counter: 0,
            free_head: 0,
            old_free_head: 0,
            used,
            old_used: used,
            links: vec![[entries, 0, 0]; entries.into()].into(),
            by_id: vec![0; 1 << 16].into(),
            broken: false,
            again: Again::default(),
            descriptors: Vec::new(),
        })
    }

    /// version, desc_num, free_head, old_free_head.
    fn note_free(&self) {
        if let [_, control, ..] = &*self.words {
            store(control, join([VERSION, self.entries, self.free_head, self.old_free_head]));
        }
    }

    /// used_idx, old_used_idx and their wrap counters.
    fn note_used(&self) {
        if let [_, _, indices, ..] = &*self.words {
            let wraps = u16::from(self.used.wrap) | u16::from(self.old_used.wrap) << 8;
            store(indices, join([self.used.slot, self.old_used.slot, wraps, 0]));
        }
    }

    fn entry(&self, entry: u16) -> Option<&Entry> {
        self.words.as_chunks().0.get(1 + usize::from(entry))
    }

    /// Writes an entry's state.
    fn set(&mut self, entry: u16, inflight: bool, link: [u16; 3]) {
        if let Some(known) = self.links.get_mut(usize::from(entry)) {
            *known = link;
        }
        if let Some([state, ..]) = self.entry(entry) {
            let [next, last, num] = link;
            store(state, join([inflight.into(), next, last, num]));
        }
    }

    fn link(&self, entry: u16) -> [u16; 3] {
        self.links.get(usize::from(entry)).copied().unwrap_or([self.entries, 0, 0])
    }

    fn learn(&mut self, id: u16, entry: u16) {
        if let Some(known) = self.by_id.get_mut(usize::from(id)) {
            self.broken |= *known != 0;
            *known = entry + 1;
        }
    }

    /// The first entry of the chain in flight that has this id.
    fn find(&self, id: u16) -> Option<u16> {
        self.by_id.get(usize::from(id)).copied().unwrap_or(0).checked_sub(1)
    }

    /// Puts the entries of a chain to the free ones. If it is in flight it is so until that is done.
    fn put(&mut self, head: u16, last: u16, inflight: bool) {
        let [_, last_of_last, num] = self.link(last);
        self.set(last, inflight && head == last, [self.free_head, last_of_last, num]);
        (self.free_head, self.old_free_head) = (head, head);
        self.note_free();
        let [next, ..] = self.link(head);
        self.set(head, false, [next, 0, 0]);
    }

    /// A driver that has an id twice in flight is not kept track of.
    fn give_up(&mut self) {
        self.broken = true;
        if let [_, control, ..] = &*self.words {
            store(control, 0);
        }
    }

    /// These were taken from the ring, the first of them at this position.
    pub fn take(&mut self, ring: &Layout, mut at: Position, chains: &[Chain]) {
        self.again.count(chains.len(), self.size);
        for chain in chains {
            if self.broken || self.find(chain.id).is_some() {
                return self.give_up();
            }
            let (head, mut entry, mut last) = (self.free_head, self.free_head, self.free_head);
            for slot in 1..=chain.slots() {
                let Some([_, _, second, first]) = self.entry(entry) else { return self.give_up() };
                let (address, word) = ring.words(at);
                let (len, [_, _, id, flags]) = (word as u32, fields(word));
                // What the driver gets back is what was read before.
                let id = if slot == chain.slots() { chain.id } else { id };
                store(second, u64::from(id) | u64::from(flags) << 16 | u64::from(len) << 32);
                store(first, address);
                at.advance(1, self.size);
                last = entry;
                let [next, ..] = self.link(entry);
                entry = next;
            }
            if let Some([_, counter, ..]) = self.entry(head) {
                store(counter, self.counter);
            }
            self.counter = self.counter.wrapping_add(1);
            let [next, ..] = self.link(head);
            self.set(head, true, [next, last, chain.slots()]);
            self.learn(chain.id, head);
            // Before this the entries are free ones, whatever they say.
            (self.free_head, self.old_free_head) = (entry, entry);
            self.note_free();
        }
    }

    /// These are put back, the last of all that were taken; says how many of them belong into the ring.
    pub fn untake(&mut self, chains: &[Chain]) -> usize {
        let fresh = self.again.untake(chains.len());
        // The newest first: what is left is what comes first in the ring.
        for chain in chains.iter().rev().take(fresh) {
            self.drop_chain(chain.id);
        }
        fresh
    }

    /// All that is in flight stands in the ring in that order: it is taken from there.
    pub fn forget(&mut self) {
        let again = std::mem::take(&mut self.again);
        for chain in again.list.iter().rev() {
            self.drop_chain(chain.id);
        }
        self.descriptors = Vec::new();
    }

    fn drop_chain(&mut self, id: u16) {
        if self.broken {
            return;
        }
        let Some(head) = self.find(id) else { return self.give_up() };
        let [_, last, _] = self.link(head);
        self.put(head, last, true);
        self.forget_id(id);
    }

    fn forget_id(&mut self, id: u16) {
        if let Some(known) = self.by_id.get_mut(usize::from(id)) {
            *known = 0;
        }
    }

    /// A chain is about to be published.
    pub fn begin(&mut self, chain: &Chain) {
        if self.broken {
            return;
        }
        let Some(head) = self.find(chain.id) else { return self.give_up() };
        let [_, last, _] = self.link(head);
        let [_, last_of_last, num] = self.link(last);
        self.set(last, last == head, [self.free_head, last_of_last, num]);
        self.free_head = head;
        self.note_free();
        self.used.advance(chain.slots(), self.size);
        self.note_used();
    }

    /// It was published.
    pub fn end(&mut self, chain: &Chain) {
        let Some(head) = self.find(chain.id).filter(|_| !self.broken) else { return };
        self.set(head, false, self.link(head));
        self.forget_id(chain.id);
        self.old_free_head = self.free_head;
        self.note_free();
        self.old_used = self.used;
        self.note_used();
    }

    /// Entries of the ring.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The descriptors of a chain in flight.
    pub fn descriptors(&self, chain: &Saved) -> &[Descriptor] {
        chain.of(&self.descriptors)
    }
}
