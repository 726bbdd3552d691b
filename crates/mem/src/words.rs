//! Rings as slices of atomics. Resolved by `Table` when a queue starts, used by both ends of a ring.

use crate::sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};

#[cfg(not(loom))]
use crate::{Region, copy};
#[cfg(not(loom))]
use std::{ptr::NonNull, sync::Arc};

/// The integers that rings consist of.
pub trait Word: sealed::Sealed {}
impl Word for AtomicU16 {}
impl Word for AtomicU32 {}
impl Word for AtomicU64 {}
/// A cache line of words, for access by pattern without bounds checks.
impl Word for [AtomicU64; 8] {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::sync::AtomicU16 {}
    impl Sealed for crate::sync::AtomicU32 {}
    impl Sealed for crate::sync::AtomicU64 {}
    impl Sealed for [crate::sync::AtomicU64; 8] {}
}

/// An array of atomics in shared memory. Keeps its region mapped.
#[cfg(not(loom))]
pub struct Words<T: Word> {
    start: NonNull<T>,
    len: usize,
    region: Arc<Region>,
}

impl<T: Word> std::fmt::Debug for Words<T> {
    /// How many words, not their values.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Words").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(not(loom))]
impl<T: Word> Words<T> {
    /// Returns the `len` words at byte `offset` of the region; `None` if they are not all inside or are misaligned.
    pub fn new(region: &Arc<Region>, offset: usize, len: usize) -> Option<Self> {
        let size = len.checked_mul(size_of::<T>())?;
        let span = region.span(offset, size)?;
        let start = NonNull::new(span.as_ptr().cast::<T>())?;
        start.is_aligned().then(|| Words { start, len, region: region.clone() })
    }

    /// Prefetches the cache line of a word, for reading or for writing.
    #[inline(always)]
    pub fn prefetch(&self, index: usize, write: bool) {
        self.prefetch_run(index, 1, write);
    }

    /// Prefetches the cache lines of `count` words, where `index` is the first word of its line.
    #[inline(always)]
    pub fn prefetch_run(&self, index: usize, count: usize, write: bool) {
        let start = self.start.as_ptr().wrapping_add(index).cast::<u8>().cast_const();
        let lines = (0..count * size_of::<T>()).step_by(64).map(|at| start.wrapping_add(at));
        if write { lines.for_each(copy::prefetch_write) } else { lines.for_each(copy::prefetch) }
    }

    /// As [`Span::demote`](crate::Span::demote), for the cache lines of `count` words, where `index` is the first word of its line.
    #[inline(always)]
    pub fn demote_run(&self, index: usize, count: usize) {
        let start = self.start.as_ptr().wrapping_add(index).cast::<u8>().cast_const();
        (0..count * size_of::<T>()).step_by(64).for_each(|at| copy::demote(start.wrapping_add(at)));
    }

    /// Returns the region that contains the words.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

#[cfg(not(loom))]
impl Words<AtomicU64> {
    /// Zeroes the words from index `first` on. Whole pages of a memory file are freed, not written: they are not allocated
    /// until something else is stored in them.
    pub fn clear_from(&self, first: usize) {
        const PAGE: usize = 4096;
        let words = self.get(first..).unwrap_or_default();
        let range = words.as_ptr_range();
        let (start, end) = (range.start.addr(), range.end.addr());
        let (from, to) = (start.next_multiple_of(PAGE), end / PAGE * PAGE);
        // SAFETY: the pages lie within the words, which `self.region` keeps mapped; zeros are a valid value.
        let freed = from < to && unsafe { libc::madvise(from as *mut _, to - from, libc::MADV_REMOVE) } == 0;
        // Other memory, as on hugepages or after a truncation, is written.
        let kept = if freed { from..to } else { start..start };
        let zero = |words: Option<&[AtomicU64]>| {
            words.into_iter().flatten().for_each(|word| word.store(0, Ordering::Relaxed));
        };
        zero(words.get(..(kept.start - start) / size_of::<AtomicU64>()));
        zero(words.get((kept.end - start) / size_of::<AtomicU64>()..));
    }
}

#[cfg(not(loom))]
impl<T: Word> std::ops::Deref for Words<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: `new` checked bounds and alignment within a region that `self.region` keeps mapped; the elements are
        // atomics, for which a concurrent writer, here or in another process, is no data race, and any bit pattern is a
        // valid value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

// SAFETY: only a shared slice of atomics and a reference count.
#[cfg(not(loom))]
unsafe impl<T: Word> Send for Words<T> {}
// SAFETY: as above.
#[cfg(not(loom))]
unsafe impl<T: Word> Sync for Words<T> {}

#[cfg(loom)]
impl Words<AtomicU64> {
    /// Zeroes the words from index `first` on.
    pub fn clear_from(&self, first: usize) {
        self.iter().skip(first).for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// Under loom: an array of loom's atomics, shared by its clones.
#[cfg(loom)]
pub struct Words<T: Word>(std::sync::Arc<Vec<T>>);

#[cfg(loom)]
impl<T: Word> Clone for Words<T> {
    fn clone(&self) -> Self {
        Words(self.0.clone())
    }
}

#[cfg(loom)]
impl<T: Word> Words<T> {
    /// No-op: a model has no caches.
    pub fn prefetch(&self, _index: usize, _write: bool) {}

    /// No-op.
    pub fn prefetch_run(&self, _index: usize, _count: usize, _write: bool) {}

    /// No-op.
    pub fn demote_run(&self, _index: usize, _count: usize) {}

    /// Returns an array for a model.
    pub fn model(words: Vec<T>) -> Self {
        Words(std::sync::Arc::new(words))
    }
}

#[cfg(loom)]
impl<T: Word> std::ops::Deref for Words<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{fs::File, os::unix::fs::MetadataExt};

    const PAGE: usize = 4096;

    fn values(words: &Words<AtomicU64>) -> Vec<u64> {
        words.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn clearing_frees_whole_pages_and_nothing_beside_the_words() {
        let path = format!("/dev/shm/ringroad-words-{}", std::process::id());
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(8 * PAGE as u64).unwrap();
        let region = Region::map(&file, 0, 8 * PAGE as u64, 0, 0).unwrap();
        let all: Words<AtomicU64> = Words::new(&region, 0, PAGE).unwrap();
        // From the middle of page 1 to the middle of page 5.
        let part: Words<AtomicU64> = Words::new(&region, PAGE + 800, (4 * PAGE) / 8).unwrap();
        let pages = || file.metadata().unwrap().blocks() as usize * 512 / PAGE;
        for (first, freed) in [(0, 3), (3, 3), (4 * PAGE / 8 - 8, 0), (PAGE, 0), (usize::MAX, 0)] {
            all.iter().for_each(|word| word.store(7, Ordering::Relaxed));
            assert_eq!(pages(), 8);
            part.clear_from(first);
            assert_eq!(pages(), 8 - freed, "from word {first}");
            let begin = (PAGE + 800) / 8;
            let clear = begin.saturating_add(first)..begin + part.len();
            let expected: Vec<u64> = (0..all.len()).map(|at| if clear.contains(&at) { 0 } else { 7 }).collect();
            assert!(values(&all) == expected, "from word {first}");
        }
        // A private mapping has no pages of the file to free.
        all.iter().for_each(|word| word.store(7, Ordering::Relaxed));
        let copy = Region::map_read_only(&file, 0, 8 * PAGE as u64, 0, 0).unwrap();
        let words: Words<AtomicU64> = Words::new(&copy, 0, PAGE).unwrap();
        words.clear_from(PAGE / 2);
        assert!(values(&words)[PAGE / 2..].iter().all(|&word| word == 0));
        assert!(values(&words)[..PAGE / 2].iter().all(|&word| word == 7));
    }
}
