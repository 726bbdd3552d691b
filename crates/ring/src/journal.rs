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

#[cfg(not(loom))]
use ringroad_mem::{
    Region, Words,
    sync::{AtomicU64, Ordering},
};
#[cfg(not(loom))]
use std::sync::{Arc, atomic::compiler_fence};

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
    /// As the inflight region says: so many buffers were in flight and are taken once more.
    Inflight {
        /// How many buffers.
        resubmitted: u32,
    },
    /// A split ring goes on at its used index: what lies between that and the frontend's base was taken and never given back.
    UsedIndex,
    /// The ring was in use, but nothing says where: the driver has to reset the device.
    Lost,
}

/// How far a ring is staged: the position up to which used entries are written, or are about to be, and what a packed ring
/// withholds of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staged {
    /// An index, or slot and wrap counter.
    pub position: u16,
    /// Which of the two words is the one that is withheld.
    pub which: bool,
    /// Used descriptors were written behind the one that is withheld; else it stands for all.
    pub writes: bool,
    /// Each descriptor has been written when it was used, ever since the ring was started.
    pub strict: bool,
}

/// What a former process has noted.
#[cfg(not(loom))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noted {
    /// How far the driver sees what was used.
    pub published: u16,
    pub staged: Staged,
    /// How far what was taken must not be taken again: it was carried on. `None`: nothing is ever carried on before it is given
    /// back.
    pub taken: Option<u16>,
    /// The used descriptor that is withheld, or was last.
    pub word: u64,
    /// `None`: no batch was ever staged.
    pub progress: Option<Progress>,
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

#[cfg(not(loom))]
impl Staged {
    #[inline(always)]
    fn to_word(self) -> u64 {
        let Staged { position, which, writes, strict } = self;
        u64::from(position) | u64::from(which) << 16 | u64::from(writes) << 17 | u64::from(strict) << 18
    }

    fn from_word(word: u64) -> Staged {
        let flag = |bit: u32| word >> bit & 1 != 0;
        Staged { position: word as u16, which: flag(16), writes: flag(17), strict: flag(18) }
    }
}

/// In the word of what was taken: there is such a position.
#[cfg(not(loom))]
const TAKEN: u64 = 1 << 16;

#[cfg(not(loom))]
impl Progress {
    #[inline(always)]
    fn to_word(self) -> u64 {
        let Progress { at, next, singles, batch } = self;
        let flags = u64::from(singles) | 2;
        u64::from(at) | u64::from(next) << 16 | u64::from(batch) << 32 | flags << 48
    }

    /// `None`: no batch was ever staged.
    fn from_word(word: u64) -> Option<Progress> {
        let (at, next, batch) = (word as u16, (word >> 16) as u16, (word >> 32) as u16);
        (word >> 49 & 1 != 0).then_some(Progress { at, next, singles: word >> 48 & 1 != 0, batch })
    }
}

/// Lines of a journal: its key, and what is written all the time. Each queue has its own.
#[cfg(not(loom))]
const LINES: usize = 2;
/// The first word of a journal that is in use.
#[cfg(not(loom))]
const MAGIC: u64 = u64::from_le_bytes(*b"rrjrnl01");

/// Notes of one ring.
#[derive(Default)]
pub struct Journal {
    #[cfg(not(loom))]
    lines: Option<Words<[AtomicU64; 8]>>,
}

impl Journal {
    /// How many bytes it takes.
    pub const BYTES: usize = 128;

    /// No notes: after a crash the frontend's word counts.
    pub const NONE: Journal = Journal {
        #[cfg(not(loom))]
        lines: None,
    };
}

#[cfg(not(loom))]
impl Journal {
    /// The journal with this number in a file of ours.
    pub fn new(region: &Arc<Region>, number: usize) -> Journal {
        Journal { lines: Words::new(region, number.saturating_mul(Self::BYTES), LINES) }
    }

    #[inline(always)]
    fn lines(&self) -> Option<(&[AtomicU64; 8], &[AtomicU64; 8])> {
        let [key, hot] = &**self.lines.as_ref()? else { return None };
        Some((key, hot))
    }

    /// Notes one word. What was noted comes before what is done about it, also where the compiler would rather not.
    #[inline(always)]
    fn note(place: &AtomicU64, word: u64) {
        place.store(word, Ordering::Relaxed);
        compiler_fence(Ordering::Release);
    }

    /// Notes what was published.
    #[inline(always)]
    pub(crate) fn note_published(&self, position: u16) {
        if let Some((_, [published, ..])) = self.lines() {
            Self::note(published, position.into());
        }
    }

    /// Notes what is about to be carried on.
    #[inline(always)]
    pub(crate) fn note_taken(&self, position: u16) {
        if let Some((_, [_, _, taken, ..])) = self.lines() {
            Self::note(taken, u64::from(position) | TAKEN);
        }
    }

    /// Notes what is about to be staged.
    #[inline(always)]
    pub(crate) fn note_staged(&self, next: Staged) {
        if let Some((_, [_, staged, ..])) = self.lines() {
            Self::note(staged, next.to_word());
        }
    }

    /// The same of a packed ring: the used descriptor that is withheld, if it is a new one, in the one of its two places that the
    /// old note does not name; which descriptors are written next; and how far.
    #[inline(always)]
    pub(crate) fn note_batch(&self, word: Option<u64>, next: Progress, staging: Staged) {
        let Some((_, [_, staged, _, progress, first, second, ..])) = self.lines() else { return };
        if let Some(word) = word {
            Self::note(if staging.which { second } else { first }, word);
        }
        Self::note(progress, next.to_word());
        Self::note(staged, staging.to_word());
    }

    /// Notes which used descriptor is written next.
    pub(crate) fn note_progress(&self, next: Progress) {
        if let Some((_, [_, _, _, progress, ..])) = self.lines() {
            Self::note(progress, next.to_word());
        }
    }

    /// What a former process has noted of the ring with this key; `None`: nothing.
    pub(crate) fn read(&self, key: &JournalKey) -> Option<Noted> {
        let (known, hot) = self.lines()?;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [magic, words @ .., _] = known;
        if load(magic) != MAGIC || words.iter().zip(key.0).any(|(known, word)| load(known) != word) {
            return None;
        }
        let [published, staged, taken, progress, first, second, ..] = hot.each_ref().map(load);
        let staged = Staged::from_word(staged);
        Some(Noted {
            published: published as u16,
            staged,
            taken: (taken & TAKEN != 0).then_some(taken as u16),
            word: if staged.which { second } else { first },
            progress: Progress::from_word(progress),
        })
    }

    /// Starts notes about a ring with this key, of which nothing is known yet.
    pub(crate) fn start(&self, key: &JournalKey, position: u16) {
        let Some(([magic, words @ .., _], [_, _, taken, progress, ..])) = self.lines() else { return };
        self.end();
        Self::note(taken, 0);
        Self::note(progress, 0);
        self.note_published(position);
        self.note_staged(Staged { position, strict: true, ..Staged::default() });
        words.iter().zip(key.0).for_each(|(known, word)| Self::note(known, word));
        Self::note(magic, MAGIC);
    }

    /// What was noted means nothing any more: the frontend knows the base, or the ring begins anew.
    pub fn end(&self) {
        if let Some(([magic, ..], _)) = self.lines() {
            Self::note(magic, 0);
        }
    }
}

#[cfg(loom)]
#[allow(clippy::unused_self, reason = "models have no crashes")]
impl Journal {
    pub(crate) fn note_published(&self, _: u16) {}
    pub(crate) fn note_taken(&self, _: u16) {}
    pub(crate) fn note_staged(&self, _: Staged) {}
    pub(crate) fn note_batch(&self, _: Option<u64>, _: Progress, _: Staged) {}
    pub(crate) fn note_progress(&self, _: Progress) {}
}
