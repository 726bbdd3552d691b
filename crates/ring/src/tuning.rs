//! Switches that turn off single optimisations, to measure what each is worth. Set by the benchmarks.

/// All optimisations are on by default. Turning one off changes only how long the work takes, not the behaviour of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Handle single-buffer chains in plain loops: take, read, copy, reclaim.
    pub fast_path: bool,
    /// Publish the used descriptors of a burst together, the first one last; else one by one.
    pub shadow_used: bool,
    /// How many frames ahead the first lines of a buffer are prefetched; 0 turns off all prefetching, descriptors included.
    pub prefetch: u16,
    /// Prefetch lines that will be written for writing; else for reading.
    pub prefetch_write: bool,
    /// Try the memory region that matched last before searching the table.
    pub translation_cache: bool,
    /// Copy up to 256 bytes with inline 16-byte moves; else always call the platform's `memmove`.
    pub small_copy: bool,
}

impl Tuning {
    /// Everything off.
    pub const NONE: Tuning = Tuning {
        fast_path: false,
        shadow_used: false,
        prefetch: 0,
        prefetch_write: false,
        translation_cache: false,
        small_copy: false,
    };

    /// Returns whether anything is prefetched.
    #[inline(always)]
    pub fn fetches(&self) -> bool {
        self.prefetch > 0
    }

    /// Returns how many indices ahead to prefetch; past the end of any list if prefetching is off.
    #[inline(always)]
    pub fn distance(&self) -> usize {
        if self.prefetch > 0 { self.prefetch.into() } else { usize::MAX / 2 }
    }
}

impl Default for Tuning {
    /// Everything on. Eight frames ahead is enough for a line to arrive from another core, and few enough that the CPU
    /// drops no prefetch: the CPUs that we measured can have 24 misses outstanding.
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
