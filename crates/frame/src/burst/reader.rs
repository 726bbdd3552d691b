//! Reads a frame part by part, for whoever cuts it: a frame may have hundreds of pieces and become more than a thousand segments, and
//! to look for each of them from the first piece on would be their product.

use super::{Burst, Rest, copy_head};
use crate::Frame;

/// Reads bytes of a frame as forwarded. It goes on where it is: as long as the positions ascend, each piece is visited once. A
/// position before that of the last read starts over.
#[derive(Debug)]
pub struct Reader<'a> {
    frame: &'a Frame,
    /// What is behind the head, from its start and from here on.
    start: Rest<'a>,
    rest: Rest<'a>,
    /// Where `rest` begins, in bytes behind the head.
    at: usize,
}

impl Burst {
    /// Returns a reader of a frame; `None` if there is no such frame.
    pub fn reader(&self, index: usize) -> Option<Reader<'_>> {
        let (frame, start) = (self.frames().get(index)?, self.rest(index));
        Some(Reader { frame, rest: start.clone(), start, at: 0 })
    }
}

impl Reader<'_> {
    /// Copies bytes from the position `at` on; returns how many.
    pub fn copy(&mut self, at: usize, target: &mut [u8]) -> usize {
        let (done, behind) = copy_head(self.frame, at, target);
        if behind < self.at {
            (self.rest, self.at) = (self.start.clone(), 0);
        }
        self.rest.pass(behind - self.at);
        let copied = self.rest.read(target.get_mut(done..).unwrap_or_default());
        self.at = behind + copied;
        done + copied
    }
}

impl Rest<'_> {
    /// Moves on by so many bytes.
    fn pass(&mut self, bytes: usize) {
        self.skip += bytes;
    }

    /// Copies bytes from here on and moves behind them; returns how many.
    fn read(&mut self, target: &mut [u8]) -> usize {
        let mut done = 0;
        while done < target.len()
            && let Some((first, others)) = self.pieces.split_first()
        {
            let copied = first.skip(self.skip.min(first.len())).read(target.get_mut(done..).unwrap_or_default());
            done += copied;
            self.skip += copied;
            if self.skip >= first.len() {
                self.skip -= first.len();
                self.pieces = others;
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HEADROOM, MAX_FRAME, Offload};
    use proptest::{collection::vec, prelude::*};
    use ringroad_mem::{Hit, Pieces, Region, Table};
    use std::sync::Arc;

    const LEN: usize = 4000;

    /// A burst with a short frame, and one of `LEN` bytes in pieces of these lengths and one with what is left.
    fn burst(lens: &[usize]) -> Burst {
        let region = Region::private(8192, 0).unwrap();
        let bytes: Vec<u8> = (0..8192).map(|at| (at % 251) as u8).collect();
        region.span(0, bytes.len()).unwrap().write(&bytes);
        let (mut burst, mut list) = (Burst::default(), Pieces::new(300));
        list.start(&Arc::new(Table::default().with(region).unwrap()));
        burst.start(MAX_FRAME, HEADROOM);
        let (mut at, mut hit) = (0, Hit::default());
        for (len, lens) in [(60, &[][..]), (LEN, lens)] {
            let (first, mut left) = (list.list().len(), HEADROOM + len);
            for &piece in lens.iter().chain([&usize::MAX]) {
                let piece = piece.min(left);
                left -= piece;
                list.push(at, piece as u32, &mut hit).unwrap();
                at += piece as u64;
            }
            let pieces = list.list().get(first..).unwrap();
            burst.push(pieces, first, HEADROOM + len, Offload::NONE).unwrap();
        }
        burst.exchange(&mut list);
        burst
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        /// Any pieces, also empty ones; any reads, in any order, also of nothing and beyond the end.
        #[test]
        fn reads_what_a_copy_of_the_whole_has(
            lens in vec(prop_oneof![0..3usize, 0..40usize, 0..600usize], 0..200),
            reads in vec((0..LEN + 50, prop_oneof![0..50usize, 0..LEN]), 1..40),
        ) {
            let burst = burst(&lens);
            let mut whole = vec![0; LEN];
            prop_assert_eq!(burst.copy(1, 0, &mut whole), LEN);
            prop_assert!(burst.reader(2).is_none());
            let mut reader = burst.reader(1).unwrap();
            for (at, len) in reads {
                let (mut target, expected) = (vec![0; len], whole.get(at..).unwrap_or_default());
                let expected = &expected[..len.min(expected.len())];
                let copied = reader.copy(at, &mut target);
                prop_assert_eq!(&target[..copied], expected, "{} bytes at {}", len, at);
            }
        }

        /// As a segmenter reads: each piece is left behind for good.
        #[test]
        fn visits_each_piece_once_if_positions_ascend(
            lens in vec(0..40usize, 0..200),
            reads in vec((0..30usize, 0..60usize), 1..100),
        ) {
            let burst = burst(&lens);
            let mut reader = burst.reader(1).unwrap();
            let (mut at, mut left) = (0, reader.rest.pieces.len());
            for (gap, len) in reads {
                at += gap;
                at += reader.copy(at, &mut vec![0; len]);
                let now = reader.rest.pieces.len();
                prop_assert!(now <= left, "{} pieces ahead, {} before", now, left);
                left = now;
            }
        }
    }
}
