//! What a device has taken and not given back, in memory that the frontend keeps (vhost-user, "Inflight I/O tracking"): a successor
//! of any make goes on with it, also where buffers are given back out of order. Written and read by `split::Device` and
//! `packed::Device`.
//!
//! The region is shared: a frontend may write to it at any time. So it is read once, when a ring starts, and checked; from then on it
//! is only written, from private copies.
//!
//! A process that is killed has executed its stores up to some instruction, in program order. Fields that belong together share
//! a word of 64 bits, so that each step is one store.

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

/// The version of the structures; 0: nothing is in there yet.
const VERSION: u16 = 1;
/// A queue's part begins on a line of its own.
const LINE: usize = 64;

/// A queue's part of an inflight region, as the frontend has handed it over.
#[derive(Default)]
pub struct Inflight {
    words: Option<Words<AtomicU64>>,
    /// Entries of the queue, or more.
    entries: u16,
}

impl Inflight {
    /// Nothing is tracked.
    pub const NONE: Inflight = Inflight { words: None, entries: 0 };

    /// How many bytes each queue of up to this size takes in a region.
    pub const fn bytes(packed: bool, queue_size: u16) -> usize {
        let (header, entry) = shape(packed);
        (8 * (header + entry * queue_size as usize)).next_multiple_of(LINE)
    }

    /// The part of the queue with this number; `None`: the region ends before it, or is not aligned to 8 bytes.
    pub fn new(region: &Arc<Region>, vring: usize, queue_size: u16, packed: bool) -> Option<Inflight> {
        let (header, entry) = shape(packed);
        let offset = vring.checked_mul(Self::bytes(packed, queue_size))?;
        let words = Words::new(region, offset, header + entry * usize::from(queue_size))?;
        Some(Inflight { words: Some(words), entries: queue_size })
    }

    /// Whether it has room for a queue of this size, if there is one.
    pub(crate) fn check(&self, size: u16) -> Result<(), SetupError> {
        if self.words.is_some() && self.entries < size {
            return nonsense("queue size", size, self.entries);
        }
        Ok(())
    }

    /// What is in there means nothing any more: the frontend knows the base, or the ring begins anew.
    pub fn end(&self) {
        if let Some([_, control, ..]) = self.words.as_deref() {
            let before = u64::from_le(control.load(Ordering::Relaxed));
            store(control, before & !0xffff);
        }
    }
}

/// Words of the header and of each entry.
const fn shape(packed: bool) -> (usize, usize) {
    if packed { (4, 4) } else { (2, 2) }
}

/// One step: neither it nor what comes before or after it changes places, also where the compiler would rather.
#[inline]
fn store(place: &AtomicU64, word: u64) {
    compiler_fence(Ordering::Release);
    place.store(word.to_le(), Ordering::Relaxed);
    compiler_fence(Ordering::Release);
}

/// Four fields of 16 bits in a word, lowest first.
#[inline]
fn join([a, b, c, d]: [u16; 4]) -> u64 {
    u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48
}

#[inline]
fn fields(word: u64) -> [u16; 4] {
    [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
}

/// What a region says that cannot be.
fn nonsense<T>(what: &'static str, said: impl Into<u64>, most: impl Into<u64>) -> Result<T, SetupError> {
    Err(SetupError::Inflight { what, said: said.into(), most: most.into() })
}

/// Whether an entry's first word says that it is in flight.
fn is_inflight(word: u64) -> Result<bool, SetupError> {
    match word as u8 {
        0 => Ok(false),
        1 => Ok(true),
        other => nonsense("inflight field of an entry", other, 1_u8),
    }
}

/// What is to be taken once more, oldest first.
pub(crate) struct Again<T> {
    list: Vec<T>,
    next: usize,
    /// Chains taken from the ring since.
    fresh: usize,
}

impl<T> Default for Again<T> {
    fn default() -> Self {
        Again { list: Vec::new(), next: 0, fresh: 0 }
    }
}

impl<T: Copy> Again<T> {
    fn new(list: Vec<T>) -> Self {
        Again { list, next: 0, fresh: 0 }
    }

    /// The next one, if there is any left.
    #[inline]
    pub fn peek(&self) -> Option<T> {
        self.list.get(self.next).copied()
    }

    /// It was taken.
    pub fn advance(&mut self) {
        self.next += 1;
    }

    /// So many were taken from the ring, once all of these were.
    #[inline]
    pub fn count(&mut self, fresh: usize, size: u16) {
        if self.list.is_empty() {
            return;
        }
        self.fresh += fresh;
        // As many as a ring has are taken and not given back, at most: nobody can put back one of ours.
        if self.fresh >= usize::from(size) {
            *self = Again::default();
        }
    }

    /// The last `count` chains taken are put back. Says how many of them came from the ring.
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
