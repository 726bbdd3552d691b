//! Inflight tracking (vhost-user, "Inflight I/O tracking"): records taken and not yet returned buffers in memory that the
//! frontend keeps, so that any back end can resume after a crash, also where buffers are returned out of order. Written and
//! read by `split::Device` and `packed::Device`.
//!
//! The region is shared, so a frontend may write to it at any time. It is read and validated once, when a ring starts;
//! after that it is only written, from private copies.
//!
//! A killed process has executed its stores up to some instruction, in program order. Fields that belong together share a
//! 64-bit word, so that each step is one store.

mod packed;
mod split;

pub(crate) use packed::{Found as FoundPacked, Packed, Saved};
pub(crate) use split::{Found as FoundSplit, Split};

use crate::SetupError;
use ringroad_mem::{
    Region, Words,
    sync::{AtomicU64, Ordering},
};
use std::sync::{Arc, atomic::compiler_fence};

/// Version of the structures; 0 in an unused region.
const VERSION: u16 = 1;
/// Each queue's part starts at a cache line.
const LINE: usize = 64;

/// A queue's part of the inflight region from the frontend.
#[derive(Debug, Default)]
pub struct Inflight {
    words: Option<Words<AtomicU64>>,
    /// Number of entries that it has room for, at least the queue size.
    entries: u16,
}

impl Inflight {
    /// No tracking.
    pub const NONE: Inflight = Inflight { words: None, entries: 0 };

    /// Returns the size in bytes of a queue's part, for queues up to this size.
    pub const fn bytes(packed: bool, queue_size: u16) -> usize {
        let (header, entry) = shape(packed);
        (8 * (header + entry * queue_size as usize)).next_multiple_of(LINE)
    }

    /// Returns the part of a queue; `None` if the region ends before it or is not aligned to 8 bytes.
    #[cfg(not(loom))]
    pub fn new(region: &Arc<Region>, vring: usize, queue_size: u16, packed: bool) -> Option<Inflight> {
        let (header, entry) = shape(packed);
        let offset = vring.checked_mul(Self::bytes(packed, queue_size))?;
        let words = Words::new(region, offset, header + entry * usize::from(queue_size))?;
        Some(Inflight { words: Some(words), entries: queue_size })
    }

    /// Checks that the part, if there is one, has room for a queue of this size.
    pub(crate) fn check(&self, size: u16) -> Result<(), SetupError> {
        if self.words.is_some() && self.entries < size {
            return invalid("queue size", size, self.entries);
        }
        Ok(())
    }

    /// Invalidates the part: the frontend knows the base, or the ring starts anew.
    pub fn end(&self) {
        if let Some([_, control, ..]) = self.words.as_deref() {
            let before = u64::from_le(control.load(Ordering::Relaxed));
            store(control, before & !0xffff);
        }
    }
}

/// Returns the number of words of the header and of each entry.
const fn shape(packed: bool) -> (usize, usize) {
    if packed { (4, 4) } else { (2, 2) }
}

/// Stores one word. The compiler fences keep steps in program order.
#[inline]
fn store(place: &AtomicU64, word: u64) {
    compiler_fence(Ordering::Release);
    place.store(word.to_le(), Ordering::Relaxed);
    compiler_fence(Ordering::Release);
}

/// Packs four 16-bit fields into a word, lowest first.
#[inline]
fn join([a, b, c, d]: [u16; 4]) -> u64 {
    u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48
}

#[inline]
fn fields(word: u64) -> [u16; 4] {
    [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
}

/// Returns the error for an invalid value in the region.
fn invalid<T>(what: &'static str, found: impl Into<u64>, max: impl Into<u64>) -> Result<T, SetupError> {
    Err(SetupError::Inflight { what, found: found.into(), max: max.into() })
}

/// Decodes an entry's `inflight` field from its first word.
fn is_inflight(word: u64) -> Result<bool, SetupError> {
    match word as u8 {
        0 => Ok(false),
        1 => Ok(true),
        other => invalid("`inflight` field of an entry", other, 1_u8),
    }
}

/// Chains to be resubmitted, that is taken once more, oldest first.
pub(crate) struct Resubmits<T> {
    list: Vec<T>,
    next: usize,
    /// Chains taken from the ring since.
    fresh: usize,
}

impl<T> Default for Resubmits<T> {
    fn default() -> Self {
        Resubmits { list: Vec::new(), next: 0, fresh: 0 }
    }
}

impl<T: Copy> Resubmits<T> {
    pub fn new(list: Vec<T>) -> Self {
        Resubmits { list, next: 0, fresh: 0 }
    }

    /// Returns the next chain, if any is left.
    #[inline]
    pub fn peek(&self) -> Option<T> {
        self.list.get(self.next).copied()
    }

    /// Marks the next chain as taken.
    pub fn advance(&mut self) {
        self.next += 1;
    }

    /// Counts chains taken from the ring after all of these were taken.
    #[inline]
    pub fn count(&mut self, fresh: usize, size: u16) {
        if self.list.is_empty() {
            return;
        }
        self.fresh += fresh;
        // At most a ring's size of chains is outstanding: resubmitted chains can no longer be untaken.
        if self.fresh >= usize::from(size) {
            *self = Resubmits::default();
        }
    }

    /// Undoes the taking of the last `count` chains. Returns how many of them came from the ring.
    pub fn untake(&mut self, count: usize) -> usize {
        if self.list.is_empty() {
            return count;
        }
        let fresh = count.min(self.fresh);
        self.fresh -= fresh;
        self.next = self.next.saturating_sub(count - fresh);
        fresh
    }
}
