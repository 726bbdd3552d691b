//! What can be turned off to see what it is worth.

/// Each of them is on by default. What a queue does is the same without; only how long it takes changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Chains of one buffer are taken, read, copied and taken back in plain loops.
    pub fast_path: bool,
    /// The used descriptors of a burst are published together, the first one last; else one after the other.
    pub shadow_used: bool,
    /// How many frames before its turn the first lines of a buffer are fetched, and whether descriptors are; 0: neither.
    pub prefetch: u16,
    /// What will be written is fetched for writing; else as if it were to be read.
    pub prefetch_write: bool,
    /// The region that answered last is asked first.
    pub translation_cache: bool,
    /// Up to 256 bytes are copied by inline 16-byte moves; else all is left to the platform's `memmove`.
    pub small_copy: bool,
}

impl Tuning {
    /// All off.
    pub const NONE: Tuning = Tuning {
        fast_path: false,
        shadow_used: false,
        prefetch: 0,
        prefetch_write: false,
        translation_cache: false,
        small_copy: false,
    };

    /// Whether anything is fetched before its turn.
    #[inline(always)]
    pub fn fetches(&self) -> bool {
        self.prefetch > 0
    }

    /// How many indices ahead of its turn something is fetched: past the end of any list, if nothing is.
    #[inline(always)]
    pub fn distance(&self) -> usize {
        if self.prefetch > 0 { self.prefetch.into() } else { usize::MAX / 2 }
    }
}

impl Default for Tuning {
    /// All on. Eight frames are long enough before for a line to come from another core, and not so many at once that the
    /// CPU drops some: it has room for 24 requests on what we measured.
    fn default() -> Tuning {
        Tuning {
            fast_path: true,
            shadow_used: true,
            prefetch: 8,
            prefetch_write: true,
            translation_cache: true,
            small_copy: true,
        }
    }
}
