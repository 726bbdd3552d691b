//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624). Called by `frame`, which completes, verifies and
//! adjusts the checksums of IP, TCP and UDP.
//!
//! Numbers are 16-bit words in host order, as they are read from the wire with big-endian types.

/// Returns the ones' complement sum of two words. To subtract, add the complement.
#[inline]
pub const fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + carry as u16
}

/// Returns a checksum after the word `old` of the data has become `new` (RFC 1624, equation 3).
#[inline]
pub const fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !add(add(!checksum, !old), new)
}

/// The ones' complement sum of bytes that are added slice by slice. The slices may have any lengths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    sum: u16,
    /// Whether the number of bytes so far is odd: the next byte is the low half of a word.
    odd: bool,
}

impl Sum {
    /// Adds the bytes that follow those added before.
    #[inline]
    pub fn add(&mut self, bytes: &[u8]) {
        let sum = sum(bytes);
        self.sum = add(self.sum, if self.odd { sum.swap_bytes() } else { sum });
        self.odd ^= bytes.len() % 2 == 1;
    }

    /// Adds one word, which may stand anywhere at an even position.
    #[inline]
    pub fn add_word(&mut self, word: u16) {
        self.sum = add(self.sum, word);
    }

    /// Returns the sum: 0xffff if the bytes include their valid checksum.
    #[inline]
    pub fn get(self) -> u16 {
        self.sum
    }

    /// Returns the checksum, which is the complement of the sum.
    #[inline]
    pub fn checksum(self) -> u16 {
        !self.sum
    }
}

/// Returns the ones' complement sum of the bytes; zeros fill up the last word.
///
/// The sum does not depend on the size of the words and, but for the order of its two bytes, not on their byte order (RFC 1071,
/// 2): so it adds words of eight bytes, in four independent sums.
fn sum(bytes: &[u8]) -> u16 {
    let (blocks, rest) = bytes.as_chunks::<32>();
    let mut sums = [0u128; 4];
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block.as_chunks::<8>().0) {
            *sum += u128::from(u64::from_ne_bytes(*word));
        }
    }
    let (words, last) = rest.as_chunks::<2>();
    let words = words.iter().map(|&word| u128::from(u16::from_ne_bytes(word))).sum::<u128>();
    let last = last.first().map_or(0, |&last| u16::from_ne_bytes([last, 0]).into());
    fold(sums.iter().sum::<u128>() + words + last)
}

/// Returns a sum of words in native byte order as one word in host order.
fn fold(sum: u128) -> u16 {
    let sum = (sum >> 64) as u64 as u128 + u128::from(sum as u64);
    let sum = (sum >> 32) + u128::from(sum as u32);
    let sum = (sum >> 32) as u64 + u64::from(sum as u32);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    u16::from_be(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Word by word, as RFC 1071 defines it.
    fn plain(bytes: &[u8]) -> u16 {
        bytes.chunks(2).fold(0, |sum, word| add(sum, u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)])))
    }

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn example_of_rfc_1071() {
        let mut sum = Sum::default();
        sum.add(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!((sum.get(), sum.checksum()), (0xddf2, 0x220d));
    }

    #[test]
    fn example_of_rfc_1624() {
        // Section 4: HC = 0xDD2F, m = 0x5555, m' = 0x3285, HC' = 0x0000.
        assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
    }

    #[test]
    fn any_length_at_any_alignment() {
        let bytes = noise(300);
        for start in 0..8 {
            for end in start..bytes.len() {
                assert_eq!(sum(&bytes[start..end]), plain(&bytes[start..end]), "{start}..{end}");
            }
        }
    }

    #[test]
    fn carries_of_the_longest_frame() {
        for (byte, len) in [(0xff, 65557), (0xff, 65556), (0, 65557), (0x80, 64), (0xff, 1)] {
            let bytes = vec![byte; len];
            assert_eq!(sum(&bytes), plain(&bytes), "{len} bytes {byte:#x}");
        }
        let bytes = noise(65557);
        assert_eq!(sum(&bytes), plain(&bytes));
    }

    #[test]
    fn slices_of_odd_lengths() {
        let bytes = noise(211);
        for first in 0..40 {
            for second in first..60 {
                let mut sum = Sum::default();
                sum.add(&bytes[..first]);
                sum.add(&bytes[first..second]);
                sum.add(&bytes[second..]);
                assert_eq!(sum.get(), plain(&bytes), "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn update_is_a_new_checksum() {
        let mut bytes = noise(40);
        for at in (0..40).step_by(2) {
            let before = !plain(&bytes);
            let old = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
            for new in [0, 1, 0xffff, 0xfffe, old, !old, 0x1234] {
                let mut changed = bytes.clone();
                changed[at..at + 2].copy_from_slice(&new.to_be_bytes());
                // 0 and 0xffff are the same number in ones' complement; a sum of data is 0 only if all of it is.
                assert_eq!(update(before, old, new), !plain(&changed), "{old:#x} to {new:#x} at {at}");
            }
            bytes[at] ^= 0x5a;
        }
    }

    #[test]
    fn a_word_is_added_like_its_bytes() {
        let (mut bytes, mut word) = (Sum::default(), Sum::default());
        bytes.add(&[0xab, 0xcd]);
        word.add_word(0xabcd);
        assert_eq!(bytes.get(), word.get());
    }
}
