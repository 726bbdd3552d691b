//! A ring of descriptors in the driver's memory, with a buffer for each.

use crate::descriptor::SIZE;
use ringroad_mem::{
    Region, Span, Words,
    sync::{AtomicU64, Ordering},
};
use std::sync::Arc;

/// Guest address of the driver's memory. Not 0, so that an address left uninitialized is noticed.
pub(super) const GUEST: u64 = 0x1_0000_0000;
/// Size of each buffer.
pub(super) const BUFFER: usize = 2048;
/// A ring and a buffer for each of its descriptors, in the driver's memory.
#[derive(Debug)]
pub(super) struct Ring {
    region: Arc<Region>,
    words: Words<AtomicU64>,
    /// Offset of ring and buffers in the region.
    offset: usize,
    pub count: u32,
}

impl Ring {
    pub fn bytes(count: u32) -> usize {
        Ring::buffers(count) + count as usize * BUFFER
    }

    /// Offset of the buffers behind the ring's start.
    pub fn buffers(count: u32) -> usize {
        ((count * SIZE) as usize).next_multiple_of(4096)
    }

    pub fn new(region: &Arc<Region>, offset: usize, count: u32) -> Option<Ring> {
        let words = Words::new(region, offset, 2 * count as usize)?;
        Some(Ring { region: region.clone(), words, offset, count })
    }

    pub fn address(&self) -> u64 {
        GUEST + self.offset as u64
    }

    pub fn next(&self, index: u32) -> u32 {
        if index + 1 == self.count { 0 } else { index + 1 }
    }

    pub fn buffer_at(&self, index: u32) -> usize {
        self.offset + Ring::buffers(self.count) + index as usize * BUFFER
    }

    pub fn buffer(&self, index: u32) -> Span<'_> {
        self.region.span(self.buffer_at(index), BUFFER).unwrap_or(Span::empty())
    }

    pub fn status(&self, index: u32) -> u64 {
        self.words.get(2 * index as usize + 1).map_or(0, |word| word.load(Ordering::Acquire))
    }

    pub fn write(&self, index: u32, words: [u64; 2]) {
        let place = self.words.get(2 * index as usize..).unwrap_or_default();
        place.iter().zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }
}
