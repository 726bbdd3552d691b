//! Records the position of a ring's device end in memory that outlives the process, so that a successor continues there
//! after a crash. Written by `split::Device` and `packed::Device`, read when they start.
//!
//! Little state is needed, because devices here return buffers in the order in which they took them: three positions, and
//! the deferred head descriptor of a packed ring. Each is a plain store to memory that nobody else writes. A killed process
//! has executed its stores up to some instruction, in program order. So every step records what it is about to do before it
//! does it, and a successor compares record and ring to see how far the step got:
//!
//! 1. Stage: `progress` and the deferred word, then `staged` with the new position, then all used entries but the deferred one.
//! 2. Publish: the deferred descriptor (packed) or the used index (split), then `published` with the new position.
//!
//! The ring may not be the recorded one: the guest may have rebooted and its memory may have been reallocated. So a record
//! has a key, the identity of the memory and the location of the ring in it, and it is used only where it agrees with the
//! ring.

use ringroad_mem::{
    Region, Words,
    sync::{AtomicU64, Ordering},
};
use std::sync::{Arc, atomic::compiler_fence};

/// Identifies the ring of a record: the memory's file (device, inode), the ring's three areas in it, its size and layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalKey(pub [u64; 6]);

/// How the position of a started ring was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// At the base from the frontend.
    Base,
    /// From the journal of a former process, which differs from the frontend's base or has buffers to finish.
    Journal {
        /// Buffers that the former process had consumed and that are returned now.
        finished: u32,
    },
    /// From the inflight region: buffers that were in flight are taken once more.
    Inflight {
        /// Number of these buffers.
        resubmitted: u32,
    },
    /// A split ring continues at its used index: chains between it and the frontend's base were taken and never returned.
    UsedIndex,
    /// The ring was in use but its position is unknown: the driver must reset the device.
    Lost,
}

/// How far a ring is staged: the position up to which used entries are written or about to be written, and what a packed
/// ring defers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staged {
    /// Split: an index. Packed: slot and wrap counter.
    pub position: u16,
    /// The deferred descriptor's word is in the second of the journal's two places, else in the first.
    pub second_word: bool,
    /// The chains behind the deferred head have used descriptors of their own; else the head stands for all of them.
    pub per_chain: bool,
    /// Since the ring was started, each descriptor was written when it was used.
    pub all_written: bool,
}

/// What a former process has recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// Position up to which the driver sees used entries.
    pub published: u16,
    pub staged: Staged,
    /// Position up to which chains were consumed and must not be taken again. `None`: chains are always returned before
    /// they are consumed.
    pub taken: Option<u16>,
    /// Second word of the deferred head descriptor, current or last.
    pub word: u64,
    /// `None`: no batch was ever staged.
    pub progress: Option<Progress>,
    /// The frontend's bases.
    pub frontend: Frontend,
}

/// What the frontend has said about a packed ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frontend {
    /// Its last base.
    pub base: u16,
    /// Position from which the frontend used descriptors itself, up to its base, while no device was connected. Equal to
    /// the base if it used none, or the device has passed them.
    pub from: u16,
}

/// How far the used descriptors of a packed ring are written, and where the deferred batch begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Everything before this position is written.
    pub at: u16,
    /// Position of the next chain, if the one at `at` is written too.
    pub next: u16,
    /// From `at` on, all chains have one descriptor.
    pub singles: bool,
    /// Start of the last batch.
    pub batch: u16,
}

impl Staged {
    #[inline(always)]
    fn to_word(self) -> u64 {
        let Staged { position, second_word, per_chain, all_written } = self;
        u64::from(position) | u64::from(second_word) << 16 | u64::from(per_chain) << 17 | u64::from(all_written) << 18
    }

    fn from_word(word: u64) -> Staged {
        let flag = |bit: u32| word >> bit & 1 != 0;
        Staged { position: word as u16, second_word: flag(16), per_chain: flag(17), all_written: flag(18) }
    }
}

impl Frontend {
    fn to_word(self) -> u64 {
        u64::from(self.base) | u64::from(self.from) << 16
    }

    fn from_word(word: u64) -> Frontend {
        Frontend { base: word as u16, from: (word >> 16) as u16 }
    }
}

/// Flag in the `taken` word: it holds a position.
const TAKEN: u64 = 1 << 16;

impl Progress {
    #[inline(always)]
    fn to_word(self) -> u64 {
        let Progress { at, next, singles, batch } = self;
        let flags = u64::from(singles) | 2;
        u64::from(at) | u64::from(next) << 16 | u64::from(batch) << 32 | flags << 48
    }

    /// Returns `None` if no batch was ever staged.
    fn from_word(word: u64) -> Option<Progress> {
        let (at, next, batch) = (word as u16, (word >> 16) as u16, (word >> 32) as u16);
        (word >> 49 & 1 != 0).then_some(Progress { at, next, singles: word >> 48 & 1 != 0, batch })
    }
}

/// Cache lines of a journal: the key, and the words that change all the time. Each queue has its own.
const LINES: usize = 2;
/// First word of a valid journal.
const MAGIC: u64 = u64::from_le_bytes(*b"rrjrnl02");

/// The journal of one ring.
#[derive(Debug, Default)]
pub struct Journal {
    lines: Option<Words<[AtomicU64; 8]>>,
}

impl Journal {
    /// Size in bytes.
    pub const BYTES: usize = 128;

    /// No journal: after a crash only the frontend's base is known.
    pub const NONE: Journal = Journal { lines: None };
}

impl Journal {
    /// Returns the journal with this number in a file of the process.
    #[cfg(not(loom))]
    pub fn new(region: &Arc<Region>, number: usize) -> Journal {
        Journal { lines: Words::new(region, number.saturating_mul(Self::BYTES), LINES) }
    }

    #[inline(always)]
    fn lines(&self) -> Option<(&[AtomicU64; 8], &[AtomicU64; 8])> {
        let [key, hot] = &**self.lines.as_ref()? else { return None };
        Some((key, hot))
    }

    /// Records one word. The compiler fence keeps the record before the action that it announces.
    #[inline(always)]
    fn record(place: &AtomicU64, word: u64) {
        place.store(word, Ordering::Relaxed);
        compiler_fence(Ordering::Release);
    }

    /// Records what was published.
    #[inline(always)]
    pub(crate) fn record_published(&self, position: u16) {
        if let Some((_, [published, ..])) = self.lines() {
            Self::record(published, position.into());
        }
    }

    /// Records what is about to be consumed.
    #[inline(always)]
    pub(crate) fn record_taken(&self, position: u16) {
        if let Some((_, [_, _, taken, ..])) = self.lines() {
            Self::record(taken, u64::from(position) | TAKEN);
        }
    }

    /// Records what is about to be staged.
    #[inline(always)]
    pub(crate) fn record_staged(&self, next: Staged) {
        if let Some((_, [_, staged, ..])) = self.lines() {
            Self::record(staged, next.to_word());
        }
    }

    /// Records what a packed ring is about to stage: the deferred head's word, if it is new, in the one of its two places
    /// that the previous record does not use; which descriptors are written next; and the staged position.
    #[inline(always)]
    pub(crate) fn record_batch(&self, word: Option<u64>, next: Progress, staging: Staged) {
        let Some((_, [_, staged, _, progress, first, second, ..])) = self.lines() else { return };
        if let Some(word) = word {
            Self::record(if staging.second_word { second } else { first }, word);
        }
        Self::record(progress, next.to_word());
        Self::record(staged, staging.to_word());
    }

    /// Records which used descriptor is written next.
    pub(crate) fn record_progress(&self, next: Progress) {
        if let Some((_, [_, _, _, progress, ..])) = self.lines() {
            Self::record(progress, next.to_word());
        }
    }

    /// Records the frontend's bases.
    pub(crate) fn record_frontend(&self, frontend: Frontend) {
        if let Some((_, [_, _, _, _, _, _, word, ..])) = self.lines() {
            Self::record(word, frontend.to_word());
        }
    }

    /// Returns what a former process recorded about the ring with this key; `None` if there is no record of it.
    pub(crate) fn read(&self, key: &JournalKey) -> Option<Record> {
        let (known, hot) = self.lines()?;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [magic, words @ .., _] = known;
        if load(magic) != MAGIC || words.iter().zip(key.0).any(|(known, word)| load(known) != word) {
            return None;
        }
        let [published, staged, taken, progress, first, second, frontend, ..] = hot.each_ref().map(load);
        let staged = Staged::from_word(staged);
        Some(Record {
            published: published as u16,
            staged,
            taken: (taken & TAKEN != 0).then_some(taken as u16),
            word: if staged.second_word { second } else { first },
            progress: Progress::from_word(progress),
            frontend: Frontend::from_word(frontend),
        })
    }

    /// Starts a new record for the ring with this key.
    pub(crate) fn start(&self, key: &JournalKey, position: u16) {
        let Some(([_, words @ .., _], _)) = self.lines() else { return };
        self.end();
        words.iter().zip(key.0).for_each(|(known, word)| Self::record(known, word));
        self.restart(position);
    }

    /// Starts a new record for the same ring, at another position.
    pub(crate) fn restart(&self, position: u16) {
        let Some(([magic, ..], [_, _, taken, progress, ..])) = self.lines() else { return };
        self.end();
        Self::record(taken, 0);
        Self::record(progress, 0);
        self.record_published(position);
        self.record_staged(Staged { position, all_written: true, ..Staged::default() });
        self.record_frontend(Frontend { base: position, from: position });
        Self::record(magic, MAGIC);
    }

    /// Invalidates the record: the frontend knows the base, or the ring starts anew.
    pub fn end(&self) {
        if let Some(([magic, ..], _)) = self.lines() {
            Self::record(magic, 0);
        }
    }
}
