//! Where the device end of a ring is, noted in memory that outlives this process, so that its successor goes on there after
//! a crash. Written by `split::Device` and `packed::Device`, read when they start.
//!
//! What is needed is little, as devices here give buffers back in the order in which they took them: three positions, and the
//! used descriptor that a packed ring still withholds. Each is a plain store to memory that nobody else writes. A process that is
//! killed has executed its stores up to some instruction, in program order; so every step notes what it is about to
//! do before it does it, and a successor compares note and ring to see how far that went:
//!
//! 1. `progress` and `word`, then `state` with the new staged position, then the used entries, all but the one that is withheld;
//! 2. the withheld one (packed) or the used index (split), which publishes them; then `state` with the new published position.
//!
//! The ring may not be the one that the note is about: the guest may have rebooted meanwhile, and memory be handed out anew.
//! So a note has a key, the identity of the memory and where the ring lies in it, and is believed only where the ring agrees.

use ringroad_mem::sync::{Ordering, fence};
#[cfg(not(loom))]
use ringroad_mem::{Region, Words, sync::AtomicU64};
#[cfg(not(loom))]
use std::sync::Arc;

/// What a note is about: the memory's file (device, inode), the ring's three areas in it, and its size and layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalKey(pub [u64; 6]);

/// How a ring that was started has found its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// As the frontend said.
    Base,
    /// As the note of a former process says; the frontend said something else. `finished`: that many buffers were taken by it and
    /// are given back now.
    Noted {
        /// How many buffers.
        finished: u32,
    },
    /// A split ring goes on at its used index: what lies between that and the frontend's base was taken and never given back.
    UsedIndex,
    /// The ring was in use, but nothing says where: the driver has to reset the device.
    Lost,
}

/// Three positions, as 16 bits each: an index, or slot and wrap counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Positions {
    /// How far the driver sees what was used.
    pub published: u16,
    /// How far used entries are written, or are about to be.
    pub staged: u16,
    /// How far what was taken must not be taken again: it was carried on.
    pub taken: u16,
    /// Whether anything is ever carried on before it is given back; else `taken` says nothing.
    pub consumes: bool,
    /// Which of the two words is the one that is withheld.
    pub which: bool,
    /// Packed: used descriptors were written behind the one that is withheld; else it stands for all.
    pub writes: bool,
    /// Packed: each descriptor has been written when it was used, ever since the ring was started.
    pub strict: bool,
}

/// How far the used descriptors of a packed ring are written, and which one was withheld last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// All before this chain are written.
    pub at: u16,
    /// If this one is written too: where the next one is.
    pub next: u16,
    /// From `at` on all chains have one descriptor.
    pub singles: bool,
    /// Where the last batch begins.
    pub batch: u16,
}

/// Words of a journal; each queue has this many. A cache line with the key, and one that is written.
#[cfg(not(loom))]
const WORDS: usize = 16;
#[cfg(not(loom))]
const STATE: usize = 8;
#[cfg(not(loom))]
const WORD: [usize; 2] = [9, 10];
#[cfg(not(loom))]
const PROGRESS: usize = 11;
/// The first word of a journal that is in use.
#[cfg(not(loom))]
const MAGIC: u64 = u64::from_le_bytes(*b"rrjrnl01");

/// Notes of one ring.
#[derive(Default)]
pub struct Journal {
    #[cfg(not(loom))]
    words: Option<Words<AtomicU64>>,
}

impl Journal {
    /// How many bytes it takes.
    pub const BYTES: usize = 128;

    /// No notes: after a crash the frontend's word counts.
    pub const NONE: Journal = Journal {
        #[cfg(not(loom))]
        words: None,
    };
}

#[cfg(not(loom))]
impl Journal {
    /// The journal with this number in a file of ours.
    pub fn new(region: &Arc<Region>, number: usize) -> Journal {
        Journal { words: Words::new(region, number.saturating_mul(Self::BYTES), WORDS) }
    }

    #[inline(always)]
    fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.words.as_ref().and_then(|words| words.get(index)) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn load(&self, index: usize) -> u64 {
        self.words.as_ref().and_then(|words| words.get(index)).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Notes the positions.
    #[inline(always)]
    pub(crate) fn note(&self, Positions { published, staged, taken, consumes, which, writes, strict }: Positions) {
        let flags = u64::from(which) | u64::from(writes) << 1 | u64::from(consumes) << 2 | u64::from(strict) << 3;
        self.store(STATE, u64::from(published) | u64::from(staged) << 16 | u64::from(taken) << 32 | flags << 48);
        // What was noted comes before what is done about it, also where the compiler would rather not.
        std::sync::atomic::compiler_fence(Ordering::Release);
    }

    /// Notes the used descriptor that is withheld, in one of two places, so that the other one stays true until `note`.
    #[inline(always)]
    pub(crate) fn note_word(&self, which: bool, word: u64) {
        self.store(WORD[usize::from(which)], word);
        std::sync::atomic::compiler_fence(Ordering::Release);
    }

    /// Notes which used descriptors are written next.
    #[inline(always)]
    pub(crate) fn note_progress(&self, Progress { at, next, singles, batch }: Progress) {
        let flags = u64::from(singles) | 2;
        self.store(PROGRESS, u64::from(at) | u64::from(next) << 16 | u64::from(batch) << 32 | flags << 48);
        std::sync::atomic::compiler_fence(Ordering::Release);
    }

    /// What a former process has noted of the ring with this key; `None`: nothing.
    pub(crate) fn read(&self, key: &JournalKey) -> Option<(Positions, [u64; 2], Option<Progress>)> {
        let known = self.load(0) == MAGIC && (1..).zip(key.0).all(|(index, word)| self.load(index) == word);
        if !known {
            return None;
        }
        let half = |word: u64, at: u32| (word >> at) as u16;
        let (state, progress) = (self.load(STATE), self.load(PROGRESS));
        let positions = Positions {
            published: half(state, 0),
            staged: half(state, 16),
            taken: half(state, 32),
            which: state >> 48 & 1 != 0,
            writes: state >> 49 & 1 != 0,
            consumes: state >> 50 & 1 != 0,
            strict: state >> 51 & 1 != 0,
        };
        let progress = (progress >> 49 & 1 != 0).then(|| Progress {
            at: half(progress, 0),
            next: half(progress, 16),
            singles: progress >> 48 & 1 != 0,
            batch: half(progress, 32),
        });
        Some((positions, WORD.map(|index| self.load(index)), progress))
    }

    /// Starts notes about a ring with this key.
    pub(crate) fn start(&self, key: &JournalKey, positions: Positions) {
        self.store(0, 0);
        fence(Ordering::SeqCst);
        self.note(positions);
        self.store(PROGRESS, 0);
        (1..).zip(key.0).for_each(|(index, word)| self.store(index, word));
        fence(Ordering::SeqCst);
        self.store(0, MAGIC);
    }

    /// The ring has stopped in an orderly way: from now on its base is the frontend's to keep.
    pub fn end(&self) {
        self.store(0, 0);
    }
}

#[cfg(loom)]
impl Journal {
    /// Models have no crashes.
    pub(crate) fn note(&self, _: Positions) {}

    /// Nor this.
    pub(crate) fn note_word(&self, _: bool, _: u64) {}

    /// Nor this.
    pub(crate) fn note_progress(&self, _: Progress) {}
}
