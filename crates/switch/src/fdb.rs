//! The forwarding table: which address was last seen at which port. Called for each frame by `forward.rs`.

use ringroad_wire::ethernet::MacAddr;
use std::hash::{BuildHasher, RandomState};

/// Entries of a bucket: 16 bytes each, one cache line together.
const WAYS: usize = 4;

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Entry {
    /// The address with bit 48 set; 0: empty.
    key: u64,
    port: u32,
    /// Seconds since the table was made.
    seen: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Bucket([Entry; WAYS]);

/// A table of a fixed size, buckets of four. An entry that nobody confirms for `ageing` seconds is as good as none. Where
/// a bucket is full of live entries, a new address is not learned (its frames are flooded): somebody who invents
/// addresses cannot push others' out.
pub struct Fdb {
    buckets: Box<[Bucket]>,
    shift: u32,
    /// Unpredictable, so that nobody can choose addresses that fall into one bucket.
    seeds: (u64, u64),
    ageing: u32,
    /// Addresses that there was no room for.
    pub refused: u64,
}

impl Fdb {
    /// A table for `entries` addresses, rounded up to a power of two, at least 4.
    pub fn new(entries: usize, ageing: u32) -> Fdb {
        let buckets = entries.div_ceil(WAYS).next_power_of_two().max(1);
        let shift = 64 - buckets.trailing_zeros();
        let random = RandomState::new();
        let seeds = (random.hash_one(0u8), random.hash_one(1u8) | 1);
        Fdb { buckets: vec![Bucket::default(); buckets].into(), shift, seeds, ageing, refused: 0 }
    }

    #[inline(always)]
    fn index(&self, key: u64) -> usize {
        // A product alone keeps equal distances equal: with an unlucky factor, addresses that were given out in sequence
        // would fall into one bucket. Its high bits, which depend on all bits of the key, make the second one irregular.
        let mixed = (key ^ self.seeds.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(self.seeds.1);
        mixed.checked_shr(self.shift).unwrap_or(0) as usize
    }

    #[inline(always)]
    fn key(address: MacAddr) -> u64 {
        address.to_u64() | 1 << 48
    }

    /// The port at which an address was seen.
    #[inline(always)]
    pub fn lookup(&self, address: MacAddr, now: u32) -> Option<u32> {
        let key = Self::key(address);
        let bucket = self.buckets.get(self.index(key))?;
        bucket
            .0
            .iter()
            .find(|entry| entry.key == key && now.wrapping_sub(entry.seen) < self.ageing)
            .map(|entry| entry.port)
    }

    /// Notes that an address was seen at a port now.
    #[inline(always)]
    pub fn learn(&mut self, address: MacAddr, port: u32, now: u32) {
        let key = Self::key(address);
        let index = self.index(key);
        let Some(bucket) = self.buckets.get_mut(index) else { return };
        if let Some(entry) = bucket.0.iter_mut().find(|entry| entry.key == key) {
            // Written only where it changes, so that the line stays clean.
            if entry.port != port || entry.seen != now {
                (entry.port, entry.seen) = (port, now);
            }
            return;
        }
        let free = |entry: &&mut Entry| entry.key == 0 || now.wrapping_sub(entry.seen) >= self.ageing;
        match bucket.0.iter_mut().find(free) {
            Some(entry) => *entry = Entry { key, port, seen: now },
            None => self.refused += 1,
        }
    }

    /// From now on it has room for so many addresses, and they age so fast. What it knows stays, as far as there is room.
    pub fn set(&mut self, entries: usize, ageing: u32) {
        self.ageing = ageing;
        let mut other = Fdb::new(entries, ageing);
        if other.buckets.len() == self.buckets.len() {
            return;
        }
        other.refused = self.refused;
        for entry in self.buckets.iter().flat_map(|bucket| &bucket.0).filter(|entry| entry.key != 0) {
            let index = other.index(entry.key);
            let bucket = other.buckets.get_mut(index);
            if let Some(free) = bucket.and_then(|bucket| bucket.0.iter_mut().find(|entry| entry.key == 0)) {
                *free = *entry;
            }
        }
        *self = other;
    }

    /// Forgets what was seen at a port.
    pub fn forget(&mut self, port: u32) {
        for entry in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.0) {
            if entry.port == port {
                *entry = Entry::default();
            }
        }
    }

    /// How many addresses it knows.
    pub fn len(&self, now: u32) -> usize {
        let live = |entry: &&Entry| entry.key != 0 && now.wrapping_sub(entry.seen) < self.ageing;
        self.buckets.iter().flat_map(|bucket| &bucket.0).filter(live).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learns_moves_ages_and_forgets() {
        let mut fdb = Fdb::new(64, 300);
        let (a, b) = (MacAddr::local(1), MacAddr::local(2));
        assert_eq!(fdb.lookup(a, 0), None);
        fdb.learn(a, 3, 10);
        fdb.learn(b, 4, 10);
        assert_eq!((fdb.lookup(a, 309), fdb.lookup(a, 310)), (Some(3), None));
        fdb.learn(a, 5, 200);
        assert_eq!((fdb.lookup(a, 499), fdb.lookup(b, 11)), (Some(5), Some(4)));
        fdb.forget(5);
        assert_eq!((fdb.lookup(a, 200), fdb.lookup(b, 200)), (None, Some(4)));
        assert_eq!(MacAddr([0; 6]).to_u64(), 0);
        assert_eq!(fdb.lookup(MacAddr([0; 6]), 0), None, "an empty entry is no address");
    }

    #[test]
    fn is_bounded_and_an_attacker_pushes_nobody_out() {
        for entries in [1, 4, 100, 4096] {
            let mut fdb = Fdb::new(entries, 300);
            let friend = MacAddr::local(0xff_ffff);
            fdb.learn(friend, 1, 0);
            for i in 0..100_000 {
                fdb.learn(MacAddr::local(i), 2, 1);
            }
            assert_eq!(fdb.lookup(friend, 2), Some(1));
            assert!(fdb.len(2) <= entries.next_power_of_two().max(4));
            assert!(fdb.refused > 90_000);
            // Once they have aged, there is room again.
            fdb.learn(MacAddr::local(0xee_eeee), 3, 301);
            assert_eq!(fdb.lookup(MacAddr::local(0xee_eeee), 301), Some(3));
        }
    }

    #[test]
    fn keeps_what_it_knows_when_it_is_changed() {
        let mut fdb = Fdb::new(4096, 300);
        (0..100).for_each(|i| fdb.learn(MacAddr::local(i), i, i));
        fdb.set(4096, 150);
        assert_eq!((fdb.len(99), fdb.lookup(MacAddr::local(7), 157)), (100, None));
        fdb.set(1 << 16, 300);
        for i in 0..100 {
            assert_eq!(fdb.lookup(MacAddr::local(i), 100), Some(i));
            assert_eq!(fdb.lookup(MacAddr::local(i), i + 300), None, "it is as old as it was");
        }
        fdb.set(16, 300);
        assert!((4..=16).contains(&fdb.len(100)), "{}", fdb.len(100));
    }

    #[test]
    fn spreads() {
        let mut fdb = Fdb::new(4096, 300);
        for i in 0..1024 {
            fdb.learn(MacAddr::local(i), 1, 0);
        }
        assert!(fdb.len(0) > 900, "{}", fdb.len(0));
    }

    #[test]
    fn addresses_in_sequence_find_room_whatever_the_seeds() {
        for _ in 0..2000 {
            let mut fdb = Fdb::new(4096, 300);
            for byte in 0..6 {
                let address = |number| {
                    let mut address = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
                    address[byte] = number;
                    MacAddr(address)
                };
                (0..12).for_each(|number| fdb.learn(address(number), 1, 0));
                assert_eq!((fdb.len(0), fdb.refused), (12, 0), "byte {byte}, seeds {:x?}", fdb.seeds);
                fdb.forget(1);
            }
        }
    }
}
