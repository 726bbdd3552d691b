//! The inflight region of a packed ring, `QueueRegionPacked` (vhost-user, "Inflight I/O tracking"): features; version,
//! desc_num, free_head, old_free_head; used_idx, old_used_idx, and two bytes with the wrap counters; padding. Then four
//! words per entry: inflight in the lowest byte, next, last, num; counter; id, flags, len of a descriptor; its address.
//! Called by `packed/device.rs` and `packed/tracked.rs`.
//!
//! The entries of a chain are linked, starting at its head, and so are the free entries. A chain is taken by moving
//! `old_free_head` past it. It is returned in three steps: (1) link it to the free list and advance `used_idx`; (2) publish
//! it in the ring; (3) clear its inflight field and advance the old fields. If a successor finds that the old fields
//! differ, it looks at the ring to see whether the chain was published.
//!
//! Each chain is published separately. If a batch had a deferred head and a successor returned other chains in its place,
//! the driver would see the used descriptors behind it too early.

use super::{Inflight, VERSION, fields, invalid, is_inflight, join, store};
use crate::{
    Chain, SetupError,
    chain::Descriptor,
    layout::RingPosition,
    packed::{Layout, Position},
};
use ringroad_mem::{
    Words,
    sync::{AtomicU64, Ordering},
};

/// A chain in flight whose descriptors may no longer be in the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved {
    /// The buffer id.
    pub id: u16,
    /// Number of descriptors.
    pub slots: u16,
    /// Index of its first descriptor in the common list.
    first: usize,
    entry: u16,
}

/// Validated contents of the region.
pub(crate) struct Found {
    /// Where the next used descriptor goes.
    pub used: Position,
    /// Chains in flight, in the order in which they were taken.
    pub chains: Vec<Saved>,
    /// Number of descriptors of all chains.
    pub slots: u16,
    descriptors: Vec<Descriptor>,
    /// The interrupted return is completed; else it is undone.
    commit: bool,
    /// Per entry: next, last, num.
    links: Vec<[u16; 3]>,
    free: Vec<u16>,
    /// Entries that are neither free nor in flight.
    unlinked: Vec<u16>,
    counter: u64,
}

/// The region of a running packed ring.
pub(crate) struct Packed {
    words: Words<AtomicU64>,
    /// Number of entries in use, at least the queue size.
    entries: u16,
    /// Ends the free list: an index that is out of range, also for a back end that counts all entries of the region.
    end: u16,
    size: u16,
    counter: u64,
    free_head: u16,
    old_free_head: u16,
    used: Position,
    old_used: Position,
    /// Per entry: next, last, num.
    links: Box<[[u16; 3]]>,
    /// By buffer id: 1 + the first entry of the chain in flight with that id; 0 if there is none.
    by_id: Box<[u16]>,
    /// The driver has an id in flight twice, which the structures cannot express. Its buffers are not recovered after a
    /// crash.
    broken: bool,
    /// Descriptors of the chains that were in flight when the ring started.
    descriptors: Vec<Descriptor>,
}

/// State words and descriptor words of an entry.
type Entry = [AtomicU64; 4];

impl Found {
    /// Returns the descriptors of a chain.
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
    /// Reads and validates the region of a packed ring; `None` if it holds no state.
    #[expect(clippy::too_many_lines, reason = "each step relies on what those before it have checked")]
    pub(crate) fn read_packed(&self, ring: &Layout) -> Result<Option<Found>, SetupError> {
        let Some([_, control, indices, _, rest @ ..]) = self.words.as_deref() else { return Ok(None) };
        let size = ring.size();
        let load = |word: &AtomicU64| u64::from_le(word.load(Ordering::Relaxed));
        let [version, count, free_head, old_free_head] = fields(load(control));
        if version == 0 {
            return Ok(None);
        }
        if version != VERSION {
            return invalid("version", version, VERSION);
        }
        if count > self.entries {
            return invalid("number of entries (at least the queue size)", count, self.entries);
        }
        let [used, old_used, wraps, _] = fields(load(indices));
        let position = |index: u16, wrap: u16| match (index < size, wrap) {
            (true, 0 | 1) => Ok(Position { slot: index, wrap: wrap == 1 }),
            (true, _) => invalid("wrap counter", wrap, 1_u8),
            _ => invalid("used index", index, size.saturating_sub(1)),
        };
        let (used, old_used) = (position(used, wraps & 0xff)?, position(old_used, wraps >> 8)?);
        // The chain was published if its descriptor is no longer as the driver made it available.
        let commit = used != old_used && !ring.is_available(old_used);
        let (used, free_head) = if commit { (used, free_head) } else { (old_used, old_free_head) };

        // Each word is read once: the frontend may change it at any time.
        let entries: Vec<[u64; 4]> =
            rest.as_chunks::<4>().0.iter().take(count.into()).map(|entry| entry.each_ref().map(load)).collect();
        let links: Vec<[u16; 3]> =
            entries.iter().map(|&[state, ..]| fields(state)).map(|[_, rest @ ..]| rest).collect();
        let next = |entry: u16| links.get(usize::from(entry)).map(|&[next, ..]| next);
        let mut known = vec![false; count.into()];
        // Marks an entry as visited; returns whether it was unvisited before.
        let mut visit = |entry: u16| known.get_mut(usize::from(entry)).map(|known| !std::mem::replace(known, true));

        let mut free = Vec::new();
        let mut at = free_head;
        // The free list ends with an index that is out of range.
        while let Some(following) = next(at) {
            if free.len() == usize::from(count) {
                break;
            }
            if visit(at) != Some(true) {
                return invalid("loops in the free list", 1_u8, 0_u8);
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
        if count < size {
            // Of a smaller ring: a leftover, unless something is in flight.
            return match heads.is_empty() {
                true => Ok(None),
                false => invalid("number of entries (at least the queue size)", count, self.entries),
            };
        }

        let (mut chains, mut descriptors, mut slots) = (Vec::new(), Vec::new(), 0_u16);
        let mut ids = std::collections::HashSet::new();
        for &(_, entry) in &heads {
            let Some(&[_, last, num]) = links.get(usize::from(entry)) else { continue };
            if num == 0 || num > size - slots {
                return invalid("number of descriptors in flight", num, size - slots);
            }
            let (first, mut at) = (descriptors.len(), entry);
            for step in 1..=num {
                let Some(&[_, _, word, address]) = entries.get(usize::from(at)) else {
                    return invalid("entry index in a chain", at, count.saturating_sub(1));
                };
                if visit(at) != Some(true) {
                    return invalid("entries shared by chains in flight", 1_u8, 0_u8);
                }
                let [id, flags, ..] = fields(word);
                let index = step - 1;
                descriptors.push(Descriptor { index, address, len: (word >> 32) as u32, flags, tail: id });
                if step == num {
                    if at != last {
                        return invalid("chains whose last entry does not match their links", 1_u8, 0_u8);
                    }
                    if !ids.insert(id) {
                        return invalid("chains in flight with the same buffer id", 2_u8, 1_u8);
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
            // A leftover of a previous use of the region, with nothing in flight.
            return Ok(None);
        }
        let unlinked = (0..count).filter(|&entry| known.get(usize::from(entry)) == Some(&false)).collect();
        Ok(Some(Found { used, chains, slots, descriptors, commit, links, free, unlinked, counter }))
    }

    /// Starts tracking with the state that was found.
    pub(crate) fn adopt_packed(self, found: Found, size: u16) -> Option<Packed> {
        let Found { used, chains, descriptors, commit, links, free, unlinked, counter, .. } = found;
        // The region may have more entries than are used: those stay unused.
        let mut track = Packed::new(self, links.len() as u16, size, used)?;
        (track.counter, track.links) = (counter, links.into());
        // Complete or undo the interrupted return in such an order that a crash meanwhile leaves an equivalent state.
        let end = track.end;
        let free_head = free.first().copied().unwrap_or(end);
        (track.free_head, track.old_free_head) = (free_head, free_head);
        if commit {
            track.write_control();
            track.write_used();
        } else {
            track.write_used();
            track.write_control();
        }
        for (index, &entry) in free.iter().enumerate() {
            // The free list ends with an index that is out of range.
            let next = free.get(index + 1).copied().unwrap_or(end);
            track.set(entry, false, [next, 0, 0]);
        }
        for entry in unlinked {
            track.free_entries(entry, entry, false);
        }
        for chain in &chains {
            track.map_id(chain.id, chain.entry);
        }
        track.descriptors = descriptors;
        Some(track)
    }

    /// Starts tracking with nothing in flight.
    pub(crate) fn start_packed(self, size: u16, used: Position) -> Option<Packed> {
        self.end();
        let mut track = Packed::new(self, size, size, used)?;
        // Entries that this ring does not use are not touched: the region may be for much larger ones.
        let behind = 4 + 4 * usize::from(size);
        let words = track.words.iter().take(behind).enumerate();
        words.filter(|&(index, _)| index != 1).for_each(|(_, word)| store(word, 0));
        track.words.clear_from(behind);
        for entry in 0..size {
            let next = if entry + 1 < size { entry + 1 } else { track.end };
            track.set(entry, false, [next, 0, 0]);
        }
        track.write_used();
        track.write_control();
        Some(track)
    }
}

impl Packed {
    fn new(inflight: Inflight, entries: u16, size: u16, used: Position) -> Option<Packed> {
        let Inflight { words: Some(words), entries: end } = inflight else { return None };
        if end < entries || entries < size {
            return None;
        }
        Some(Packed {
            words,
            entries,
            end,
            size,
            counter: 0,
            free_head: 0,
            old_free_head: 0,
            used,
            old_used: used,
            links: vec![[end, 0, 0]; entries.into()].into(),
            by_id: vec![0; 1 << 16].into(),
            broken: false,
            descriptors: Vec::new(),
        })
    }

    /// Writes version, desc_num, free_head, old_free_head.
    fn write_control(&self) {
        if let [_, control, ..] = &*self.words {
            store(control, join([VERSION, self.entries, self.free_head, self.old_free_head]));
        }
    }

    /// Writes used_idx, old_used_idx and their wrap counters.
    fn write_used(&self) {
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
        self.links.get(usize::from(entry)).copied().unwrap_or([self.end, 0, 0])
    }

    fn map_id(&mut self, id: u16, entry: u16) {
        if let Some(known) = self.by_id.get_mut(usize::from(id)) {
            self.broken |= *known != 0;
            *known = entry + 1;
        }
    }

    /// Returns the first entry of the chain in flight with this id.
    fn find(&self, id: u16) -> Option<u16> {
        self.by_id.get(usize::from(id)).copied().unwrap_or(0).checked_sub(1)
    }

    /// Links the entries of a chain to the free list. If it is in flight, it stays so until that is done.
    fn free_entries(&mut self, head: u16, last: u16, inflight: bool) {
        let [_, last_of_last, num] = self.link(last);
        self.set(last, inflight && head == last, [self.free_head, last_of_last, num]);
        (self.free_head, self.old_free_head) = (head, head);
        self.write_control();
        let [next, ..] = self.link(head);
        self.set(head, false, [next, 0, 0]);
    }

    /// Stops tracking: the driver has an id in flight twice.
    fn give_up(&mut self) {
        self.broken = true;
        if let [_, control, ..] = &*self.words {
            store(control, 0);
        }
    }

    /// Records chains taken from the ring, the first of them at this position.
    pub fn take(&mut self, ring: &Layout, mut at: Position, chains: &[Chain]) {
        for chain in chains {
            if self.broken || self.find(chain.id).is_some() {
                return self.give_up();
            }
            let (head, mut entry, mut last) = (self.free_head, self.free_head, self.free_head);
            for slot in 1..=chain.slots() {
                let Some([_, _, second, first]) = self.entry(entry) else { return self.give_up() };
                let (address, word) = ring.words(at);
                let (len, [_, _, id, flags]) = (word as u32, fields(word));
                // Record the id that was read when the chain was taken: it will be returned with that one.
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
            self.map_id(chain.id, head);
            // Until this store the entries count as free, whatever they contain.
            (self.free_head, self.old_free_head) = (entry, entry);
            self.write_control();
        }
    }

    /// Frees the entries of a chain that is in the ring: it will be taken from there.
    pub fn forget(&mut self, id: u16) {
        if self.broken {
            return;
        }
        let Some(head) = self.find(id) else { return self.give_up() };
        let [_, last, _] = self.link(head);
        self.free_entries(head, last, true);
        self.unmap_id(id);
    }

    fn unmap_id(&mut self, id: u16) {
        if let Some(known) = self.by_id.get_mut(usize::from(id)) {
            *known = 0;
        }
    }

    /// Step 1 of returning a chain, before it is published.
    pub fn begin_return(&mut self, chain: &Chain) {
        if self.broken {
            return;
        }
        let Some(head) = self.find(chain.id) else { return self.give_up() };
        let [_, last, _] = self.link(head);
        let [_, last_of_last, num] = self.link(last);
        self.set(last, last == head, [self.free_head, last_of_last, num]);
        self.free_head = head;
        self.write_control();
        self.used.advance(chain.slots(), self.size);
        self.write_used();
    }

    /// Step 3 of returning a chain, after it was published.
    pub fn end_return(&mut self, chain: &Chain) {
        let Some(head) = self.find(chain.id).filter(|_| !self.broken) else { return };
        self.set(head, false, self.link(head));
        self.unmap_id(chain.id);
        self.old_free_head = self.free_head;
        self.write_control();
        self.old_used = self.used;
        self.write_used();
    }

    /// Returns the number of entries of the ring.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the descriptors of a chain in flight.
    pub fn descriptors(&self, chain: &Saved) -> &[Descriptor] {
        chain.of(&self.descriptors)
    }
}
