//! Buffers of any size, cut one after the other from larger blocks, so that those of one frame are mostly adjacent. Used by
//! `sized.rs`.

use std::ops::Range;

/// Size of a block in bytes: as Linux's page fragments.
pub(super) const BLOCK: usize = 32 << 10;

/// A buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fragment {
    /// Its position in bytes.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
}

/// Blocks, and how many fragments of each are in use.
#[derive(Debug)]
pub(super) struct Fragments {
    used: Box<[u32]>,
    /// Blocks without fragments. The one that was in use last is taken first: its lines may still be in the cache.
    free: Vec<u32>,
    /// The block that fragments are cut from, and the part of it that is left.
    current: Option<(u32, Range<usize>)>,
}

impl Fragments {
    /// Blocks for so many fragments at once, whichever of them are in use longest.
    pub fn new(fragments: usize) -> Fragments {
        // Each keeps one block from being used again, and one more is being cut.
        let blocks = fragments + 1;
        Fragments { used: vec![0; blocks].into(), free: (0..blocks as u32).rev().collect(), current: None }
    }

    /// Returns the bytes of all blocks.
    pub fn bytes(fragments: usize) -> usize {
        (fragments + 1) * BLOCK
    }

    /// Cuts a fragment of `len` bytes; of a few more, if the block would have less than that left. `None` if more are in use than
    /// there are blocks for, or if it is longer than a block.
    pub fn cut(&mut self, len: usize) -> Option<Fragment> {
        if len == 0 || len > BLOCK {
            return None;
        }
        if self.current.as_ref().is_none_or(|(_, left)| left.len() < len) {
            self.close();
            let block = self.free.pop()?;
            self.current = Some((block, 0..BLOCK));
        }
        let (block, left) = self.current.as_mut()?;
        let take = if left.len() < 2 * len { left.len() } else { len };
        let fragment = Fragment { at: *block as usize * BLOCK + left.start, len: take };
        left.start += take;
        *self.used.get_mut(*block as usize)? += 1;
        Some(fragment)
    }

    /// Gives a fragment back.
    pub fn give(&mut self, fragment: Fragment) {
        let block = (fragment.at / BLOCK) as u32;
        if fragment.len == 0 {
            return;
        }
        let Some(used) = self.used.get_mut(block as usize).filter(|used| **used > 0) else { return };
        *used -= 1;
        let cut = self.current.as_ref().is_some_and(|&(current, _)| current == block);
        if *used == 0 && !cut {
            self.free.push(block);
        }
    }

    /// Nothing more is cut from the current block.
    fn close(&mut self) {
        if let Some((block, _)) = self.current.take()
            && self.used.get(block as usize) == Some(&0)
        {
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fragments_of_a_block_are_adjacent_and_fill_it() {
        let mut fragments = Fragments::new(8);
        let cut: Vec<_> = (0..8).map(|_| fragments.cut(5000).unwrap()).collect();
        for pair in cut[..6].windows(2) {
            assert_eq!(pair[0].at + pair[0].len, pair[1].at);
        }
        assert_eq!(cut[..6].iter().map(|fragment| fragment.len).sum::<usize>(), BLOCK);
        assert_eq!(cut[5].len, BLOCK - 5 * 5000, "the last one takes the rest");
        assert_eq!(cut[6].at % BLOCK, 0);
        // The block that was given back last is the next one.
        cut[..6].iter().for_each(|&fragment| fragments.give(fragment));
        (0..4).for_each(|_| assert!(fragments.cut(5000).is_some()));
        assert_eq!(fragments.cut(5000).unwrap().at, cut[0].at);
        assert_eq!((fragments.cut(0), fragments.cut(BLOCK + 1)), (None, None));
    }

    proptest! {
        #[test]
        fn they_never_overlap_and_there_are_always_enough(
            steps in prop::collection::vec((1..=4096usize, any::<prop::sample::Index>()), 1..500),
            most in 1..40usize,
        ) {
            let mut fragments = Fragments::new(most);
            let mut held: Vec<Fragment> = Vec::new();
            for (len, victim) in steps {
                if held.len() == most {
                    // In any order, as a device may use them.
                    fragments.give(held.swap_remove(victim.index(most)));
                }
                let new = fragments.cut(len).expect("there is a block");
                prop_assert!(new.len >= len && new.at + new.len <= Fragments::bytes(most));
                prop_assert_eq!(new.at / BLOCK, (new.at + new.len - 1) / BLOCK);
                let apart = |other: &Fragment| new.at + new.len <= other.at || other.at + other.len <= new.at;
                prop_assert!(held.iter().all(apart), "{:?} of {:?}", new, held);
                held.push(new);
            }
        }
    }
}
