//! Statistics registers (8254x Software Developer's Manual, 13.7): 32 bits that stick at their maximum, some pairs of 64 bits,
//! all cleared when read. The queues count upwards and never clear; the registers remember what was read last. So neither side
//! waits for the other.

use crate::registers::statistics::*;
use ringroad_frame::Counter;

const COUNT: usize = ((END - FIRST) / 4) as usize;

/// Low halves of the 64-bit pairs.
const PAIRS: [u32; 4] = [GORCL, GOTCL, TORL, TOTL];

/// What the queues have counted. Each register is counted by one queue.
#[derive(Debug)]
pub(crate) struct Statistics([Counter; COUNT]);

impl Default for Statistics {
    fn default() -> Statistics {
        Statistics(std::array::from_fn(|_| Counter::default()))
    }
}

impl Statistics {
    /// Adds to a register, or to a pair by its low half.
    #[inline(always)]
    pub fn add(&self, register: u32, n: u64) {
        if let Some(counter) = self.counter(register) {
            counter.add(n);
        }
    }

    #[inline(always)]
    fn counter(&self, register: u32) -> Option<&Counter> {
        self.0.get((register.wrapping_sub(FIRST) / 4) as usize)
    }

    fn total(&self, register: u32) -> u64 {
        self.counter(register).map_or(0, Counter::get)
    }
}

/// The registers as software reads them.
#[derive(Debug)]
pub(crate) struct Readings {
    /// Totals when the registers were last cleared.
    cleared: [u64; COUNT],
    /// Totals of the pairs when their low halves were read, for the reads of the high halves.
    latched: [Option<u64>; PAIRS.len()],
}

impl Default for Readings {
    fn default() -> Readings {
        Readings { cleared: [0; COUNT], latched: [None; PAIRS.len()] }
    }
}

impl Readings {
    /// Reads and clears a register.
    pub fn read(&mut self, register: u32, statistics: &Statistics) -> u32 {
        for (&pair, latched) in PAIRS.iter().zip(&mut self.latched) {
            if register != pair && register != pair + 4 {
                continue;
            }
            let Some(cleared) = self.cleared.get_mut(((pair - FIRST) / 4) as usize) else { return 0 };
            if register == pair {
                let total = statistics.total(pair);
                *latched = Some(total);
                return (total - *cleared) as u32;
            }
            let total = latched.take().unwrap_or_else(|| statistics.total(pair));
            let value = total - *cleared;
            *cleared = total;
            return (value >> 32) as u32;
        }
        let total = statistics.total(register);
        let Some(cleared) = self.cleared.get_mut((register.wrapping_sub(FIRST) / 4) as usize) else { return 0 };
        let value = total - *cleared;
        *cleared = total;
        u32::try_from(value).unwrap_or(u32::MAX)
    }

    /// Clears all registers, as a reset does.
    pub fn clear(&mut self, statistics: &Statistics) {
        for (cleared, counter) in self.cleared.iter_mut().zip(&statistics.0) {
            *cleared = counter.get();
        }
        self.latched = [None; PAIRS.len()];
    }
}

/// Frames of one burst, by length and destination.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub frames: u64,
    /// Without frame check sequences.
    pub bytes: u64,
    sizes: [u64; 6],
    broadcast: u64,
    multicast: u64,
}

/// Length of the frame check sequence in bytes.
pub(crate) const FCS: usize = 4;

impl Tally {
    /// Adds `count` frames with a total length of `bytes`, each of `len` bytes or, the last one, less. `destination`: the first
    /// word of the frame, of which the upper two bytes are ignored.
    #[inline(always)]
    pub fn add(&mut self, destination: u64, len: usize, count: u64, bytes: u64) {
        self.frames += count;
        self.bytes += bytes;
        let len = len + FCS;
        let size = [64, 127, 255, 511, 1023].map(|bound| usize::from(len > bound)).iter().sum::<usize>();
        if let Some(size) = self.sizes.get_mut(size) {
            *size += count;
        }
        if destination & 1 != 0 {
            let broadcast = destination & ADDRESS == ADDRESS;
            self.broadcast += if broadcast { count } else { 0 };
            self.multicast += if broadcast { 0 } else { count };
        }
    }

    pub fn transmitted(&self, statistics: &Statistics) {
        let octets = self.bytes + self.frames * FCS as u64;
        for (register, n) in [(GPTC, self.frames), (TPT, self.frames), (GOTCL, octets), (TOTL, octets)] {
            statistics.add(register, n);
        }
        self.add_kinds(statistics, PTC64, BPTC, MPTC);
    }

    pub fn received(&self, statistics: &Statistics) {
        let octets = self.bytes + self.frames * FCS as u64;
        for (register, n) in [(GPRC, self.frames), (TPR, self.frames), (GORCL, octets), (TORL, octets)] {
            statistics.add(register, n);
        }
        self.add_kinds(statistics, PRC64, BPRC, MPRC);
    }

    fn add_kinds(&self, statistics: &Statistics, sizes: u32, broadcast: u32, multicast: u32) {
        for (index, &n) in self.sizes.iter().enumerate() {
            statistics.add(sizes + 4 * index as u32, n);
        }
        statistics.add(broadcast, self.broadcast);
        statistics.add(multicast, self.multicast);
    }
}

/// The bytes of a destination address in the first word of a frame.
pub(crate) const ADDRESS: u64 = 0xffff_ffff_ffff;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleared_when_read() {
        let (statistics, mut readings) = (Statistics::default(), Readings::default());
        statistics.add(MPC, 3);
        assert_eq!([(); 2].map(|()| readings.read(MPC, &statistics)), [3, 0]);
        statistics.add(MPC, 1 << 40);
        assert_eq!([(); 2].map(|()| readings.read(MPC, &statistics)), [u32::MAX, 0], "they stick at the maximum");
        statistics.add(MPC, 5);
        readings.clear(&statistics);
        assert_eq!(readings.read(MPC, &statistics), 0);
    }

    #[test]
    fn a_pair_is_read_as_one_number() {
        let (statistics, mut readings) = (Statistics::default(), Readings::default());
        statistics.add(GORCL, 0x1_0000_0002);
        assert_eq!(readings.read(GORCL, &statistics), 2);
        // Counted between the two reads: part of the next pair, not lost.
        statistics.add(GORCL, 7);
        assert_eq!(readings.read(GORCH, &statistics), 1);
        assert_eq!((readings.read(GORCL, &statistics), readings.read(GORCH, &statistics)), (7, 0));
        statistics.add(TOTL, 3 << 32);
        assert_eq!(readings.read(TOTH, &statistics), 3, "the high half alone");
        assert_eq!((readings.read(TOTL, &statistics), readings.read(TOTH, &statistics)), (0, 0));
    }
}
