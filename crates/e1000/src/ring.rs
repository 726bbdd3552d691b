//! A ring of descriptors in guest memory, as its queue sees it: resolved once when the registers change.

use crate::{
    descriptor::SIZE,
    fault::Fault,
    shared::{Cursors, RingSetup, STAGING},
};
use ringroad_mem::{
    Table, Words,
    sync::{AtomicU64, Ordering},
};

/// The descriptors from the head to the tail belong to the device.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    words: Option<Words<AtomicU64>>,
    /// As configured; `count` is 0 if the queue does not run.
    setup: RingSetup,
    count: u32,
    head: u32,
    epoch: u32,
}

#[cfg(not(loom))]
fn words(memory: &Table, base: u64, count: usize) -> Option<Words<AtomicU64>> {
    memory.guest_words(base, count)
}

/// A model has no rings in memory.
#[cfg(loom)]
fn words(_: &Table, _: u64, _: usize) -> Option<Words<AtomicU64>> {
    None
}

impl Ring {
    /// Applies a changed setup. A ring outside memory is a fault only when it is used; the device's own is none of the guest's.
    pub fn set(&mut self, setup: RingSetup, cursors: &Cursors, memory: Option<&Table>) {
        let count = if setup.runs { setup.len / SIZE } else { 0 };
        if (setup, count) != (self.setup, self.count) || self.words.is_none() {
            let inside = setup.base.checked_add(setup.len.into()).is_some_and(|end| end <= STAGING);
            let memory = memory.filter(|_| count > 0 && inside);
            self.words = memory.and_then(|memory| words(memory, setup.base, 2 * count as usize));
        }
        (self.setup, self.count) = (setup, count);
        (self.head, self.epoch) = cursors.head();
    }

    /// Releases the memory.
    pub fn release(&mut self) {
        (self.words, self.count) = (None, 0);
    }

    /// Returns how many descriptors there are. A head or tail beyond the ring leaves none.
    #[inline(always)]
    pub fn available(&self, tail: u32) -> u32 {
        let (head, count) = (self.head, self.count);
        if tail >= count || head >= count {
            return 0;
        }
        if tail >= head { tail - head } else { count - head + tail }
    }

    /// Returns the number of descriptors of the ring.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Returns the index of a descriptor: `ahead` of the head, by less than the ring.
    #[inline(always)]
    pub fn index(&self, ahead: u32) -> u32 {
        let index = self.head + ahead;
        if index >= self.count { index - self.count } else { index }
    }

    /// Returns up to `count` descriptors from the head on, as far as they lie one behind the other: two words each.
    #[inline(always)]
    pub fn run(&self, ahead: u32, count: u32) -> &[[AtomicU64; 2]] {
        let Some(words) = &self.words else { return &[] };
        let first = self.index(ahead) as usize;
        let end = first + (count as usize).min(self.count as usize - first);
        words.as_chunks::<2>().0.get(first..end).unwrap_or_default()
    }

    /// Reads a descriptor, once.
    #[inline]
    pub fn read(&self, ahead: u32) -> Option<[u64; 2]> {
        let [first, second] = self.run(ahead, 1).first()?;
        Some([first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)])
    }

    /// Writes the second word of the descriptor with this index, behind everything that was written before.
    #[inline(always)]
    pub fn write_back(&self, index: u32, word: u64) {
        let words = self.words.as_ref().map_or(&[][..], |words| words);
        if let Some(place) = words.get(2 * index as usize + 1) {
            place.store(word, Ordering::Release);
        }
    }

    /// Moves the head.
    #[inline]
    pub fn advance(&mut self, used: u32, cursors: &Cursors) {
        let (before, head) = (self.head, self.index(used));
        self.head = head;
        cursors.publish(self.epoch, before, head);
    }

    /// Returns the fault if the ring does not lie in memory, which has so many regions.
    pub fn check(&self, regions: usize) -> Result<(), Fault> {
        if self.words.is_some() {
            return Ok(());
        }
        Err(Fault::Ring { address: self.setup.base, len: self.setup.len, regions })
    }
}
