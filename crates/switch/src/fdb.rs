//! The forwarding table: at which port each address was last seen, by VLAN. Called by `forward.rs` for each flow of a burst.

use ringroad_wire::ethernet::MacAddr;
use std::hash::{BuildHasher, RandomState};

/// Entries of a bucket: 16 bytes each, one cache line together.
const WAYS: usize = 4;
/// The table grows up to this many entries, so that there is room for the addresses that all ports may have.
const MOST: usize = 1 << 20;
/// Value of `Entry::home`: the address is the port's own by configuration and never moves.
const OWN: u16 = u16::MAX;
/// Default for the seconds of silence after which an address may move.
const HOLD: u32 = 2;
/// Where the VLAN is in an entry's key, which is 0 as long as ports have no VLANs, and for ports' own addresses.
const VLAN: u32 = 49;
/// Buckets that are searched for aged addresses if a port has no room for a new one.
const SWEEP: usize = 4;

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Entry {
    /// The address with bit 48 set, and from bit 49 on the VLAN; 0 if the entry is empty.
    key: u64,
    port: u16,
    /// The port that had it first, which gets it back as soon as it sends; or [`OWN`].
    home: u16,
    /// When it was last seen, in seconds since the table was created.
    seen: u32,
}

impl Entry {
    #[inline(always)]
    fn is_live(&self, now: u32, ageing: u32) -> bool {
        self.key != 0 && (now.wrapping_sub(self.seen) < ageing || self.home == OWN)
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Bucket([Entry; WAYS]);

/// Number of addresses that a port has in the table, and its limit.
#[derive(Clone, Copy)]
struct Share {
    used: u32,
    limit: u32,
}

impl Share {
    /// Returns whether a larger part of this share is used than of another one if that had one address more.
    fn is_fuller(self, other: Share) -> bool {
        u64::from(self.used) * u64::from(other.limit) > (u64::from(other.used) + 1) * u64::from(self.limit)
    }
}

/// What became of an address seen at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// It is at this port, as before or from now on.
    Known,
    /// It has moved here from the given port.
    Moved(u32),
    /// It stays at the given port, which used it a moment ago.
    Held(u32),
    /// It stays at the given port, whose own address it is.
    Owned(u32),
    /// It was not learned: the port has reached its limit, or the bucket is full of addresses of ports that use less of theirs.
    Crowded,
}

/// A hash table with buckets of four entries. An entry that is not refreshed for `ageing` seconds counts as empty.
///
/// The table is shared by ports that do not trust each other. An address stays at its port until that has been silent for
/// `hold` seconds, and returns to the port that had it first as soon as that sends; a port's own address never moves. Each port
/// has a share of the table. If a bucket is full of live entries, a port that has used less of its share replaces an entry of
/// the port that has used most: a port that invents addresses can neither evict those of others nor keep them from being
/// learned.
pub struct Fdb {
    buckets: Box<[Bucket]>,
    /// What a hash is shifted by for a bucket's index, besides one bit: up to 63.
    shift: u32,
    /// Random, so that nobody can choose addresses that fall into one bucket.
    seeds: (u64, u64),
    ageing: u32,
    hold: u32,
    shares: Vec<Share>,
    /// The next bucket to be searched for aged addresses.
    cursor: usize,
}

impl std::fmt::Debug for Fdb {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Fdb")
            .field("entries", &(self.buckets.len() * WAYS))
            .field("ageing", &self.ageing)
            .field("hold", &self.hold)
            .finish_non_exhaustive()
    }
}

impl Fdb {
    /// Creates a table for `entries` addresses, rounded up to a power of two, at least 4, with an ageing time in seconds.
    pub fn new(entries: usize, ageing: u32) -> Fdb {
        let buckets = entries.min(MOST).div_ceil(WAYS).next_power_of_two().max(1);
        let shift = 63 - buckets.trailing_zeros();
        let random = RandomState::new();
        let seeds = (random.hash_one(0u8), random.hash_one(1u8) | 1);
        let buckets = vec![Bucket::default(); buckets].into();
        Fdb { buckets, shift, seeds, ageing, hold: HOLD, shares: Vec::new(), cursor: 0 }
    }

    /// Sets the seconds of silence after which an address may move to another port. 0: it moves at once.
    pub fn with_hold(self, seconds: u32) -> Fdb {
        Fdb { hold: seconds, ..self }
    }

    #[inline(always)]
    fn index(&self, key: u64) -> usize {
        // One multiplication keeps equal distances equal: with an unlucky factor, consecutive addresses would fall into one
        // bucket. Mixing in its high bits, which depend on all bits of the key, makes the second product irregular.
        let mixed = (key ^ self.seeds.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(self.seeds.1);
        (mixed >> 1).wrapping_shr(self.shift) as usize
    }

    #[inline(always)]
    fn key(address: MacAddr, vlan: u16) -> u64 {
        // In wire order, as frames have it.
        let [a, b, c, d, e, f] = address.0;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) | 1 << 48 | (vlan as u64) << VLAN
    }

    /// Returns the port at which an address was last seen; `now` in seconds since the table was created.
    #[inline(always)]
    pub fn lookup(&self, address: MacAddr, now: u32) -> Option<u32> {
        self.lookup_in(0, address, now)
    }

    /// Returns the port whose own address it is, in whatever VLAN.
    pub fn owner(&self, address: MacAddr) -> Option<u32> {
        let key = Self::key(address, 0);
        let found = self.buckets.get(self.index(key))?.0.iter().find(|entry| entry.key == key)?;
        (found.home == OWN).then_some(found.port.into())
    }

    /// Returns the port at which an address was last seen in a VLAN; see [`Fdb::owner`] for ports' own addresses.
    #[inline(always)]
    pub fn lookup_in(&self, vlan: u16, address: MacAddr, now: u32) -> Option<u32> {
        let key = Self::key(address, vlan);
        let [first, second, others @ ..] = &self.buckets.get(self.index(key))?.0;
        // Which of the first two is chosen without a branch, as it cannot be predicted. Few are behind them.
        let likely = std::hint::select_unpredictable(second.key == key, second, first);
        let found = if likely.key == key { likely } else { others.iter().find(|entry| entry.key == key)? };
        found.is_live(now, self.ageing).then_some(found.port.into())
    }

    /// Records that an address was seen at a port now, if it may be there.
    #[inline(always)]
    pub fn learn(&mut self, address: MacAddr, port: u32, now: u32) -> Learned {
        self.learn_in(0, address, port, now)
    }

    /// Records that an address was seen at a port in a VLAN now, if it may be there.
    #[inline(always)]
    pub fn learn_in(&mut self, vlan: u16, address: MacAddr, port: u32, now: u32) -> Learned {
        let key = Self::key(address, vlan);
        let index = self.index(key);
        let Some(bucket) = self.buckets.get_mut(index) else { return Learned::Crowded };
        match bucket.0.iter_mut().find(|entry| entry.key == key) {
            Some(entry) if u32::from(entry.port) == port => {
                // Written only when it changes, so that the line stays clean.
                if entry.seen != now {
                    // It had aged, so no port has an older claim.
                    if !entry.is_live(now, self.ageing) {
                        entry.home = entry.port;
                    }
                    entry.seen = now;
                }
                Learned::Known
            }
            Some(_) => self.claim(key, port, now),
            None => self.insert(key, port, now),
        }
    }

    /// Changes the number of entries (at least what the ports' limits need), ageing and hold time. Addresses are kept if there is
    /// room.
    pub fn set(&mut self, entries: usize, ageing: u32, hold: u32) {
        (self.ageing, self.hold) = (ageing, hold);
        let mut other = Fdb::new(entries.max(self.wanted()), ageing).with_hold(hold);
        if other.buckets.len() == self.buckets.len() {
            return;
        }
        other.seeds = self.seeds;
        other.shares = self.shares.iter().map(|share| Share { used: 0, limit: share.limit }).collect();
        let entries = || self.buckets.iter().flat_map(|bucket| bucket.0).filter(|entry| entry.key != 0);
        // Ports' own addresses come first: they always have room.
        for entry in entries().filter(|entry| entry.home == OWN) {
            while !other.place(entry) && other.buckets.len() * WAYS < MOST {
                other.grow();
            }
        }
        for entry in entries().filter(|entry| entry.home != OWN) {
            if other.place(entry) {
                other.uses(entry.port.into(), 1);
            }
        }
        *self = other;
    }

    /// Puts an entry into its bucket. Returns `false` if that is full.
    fn place(&mut self, entry: Entry) -> bool {
        let index = self.index(entry.key);
        let bucket = self.buckets.get_mut(index);
        let free = bucket.and_then(|bucket| bucket.0.iter_mut().find(|place| place.key == 0));
        free.map(|place| *place = entry).is_some()
    }

    /// Returns the number of entries that the ports' limits need: twice their sum.
    fn wanted(&self) -> usize {
        let limits = self.shares.iter().map(|share| share.limit).filter(|&limit| limit < u32::MAX);
        limits.fold(0, |sum: usize, limit| sum.saturating_add(limit as usize)).saturating_mul(2).min(MOST)
    }

    /// A port uses an address that is at another one.
    #[cold]
    fn claim(&mut self, key: u64, port: u32, now: u32) -> Learned {
        let (ageing, hold, index) = (self.ageing, self.hold, self.index(key));
        let Ok(number) = u16::try_from(port) else { return Learned::Crowded };
        let claimant = self.share(port);
        let Some(entry) = self.buckets.get_mut(index).and_then(|bucket| bucket.0.iter_mut().find(|e| e.key == key))
        else {
            return Learned::Crowded;
        };
        let at = u32::from(entry.port);
        let live = entry.is_live(now, ageing);
        if live && entry.home == OWN {
            return Learned::Owned(at);
        }
        if live && entry.home != number && now.wrapping_sub(entry.seen) < hold {
            return Learned::Held(at);
        }
        if claimant.used >= claimant.limit {
            return Learned::Crowded;
        }
        *entry = Entry { key, port: number, home: if live { entry.home } else { number }, seen: now };
        self.uses(at, -1);
        self.uses(port, 1);
        if live { Learned::Moved(at) } else { Learned::Known }
    }

    /// Inserts a new address.
    #[cold]
    fn insert(&mut self, key: u64, port: u32, now: u32) -> Learned {
        let Ok(number) = u16::try_from(port) else { return Learned::Crowded };
        if self.share(port).used >= self.share(port).limit {
            self.sweep(now);
        }
        let share = self.share(port);
        if share.used >= share.limit {
            return Learned::Crowded;
        }
        let entry = Entry { key, port: number, home: number, seen: now };
        match self.make_room(key, now, |victim| victim.is_fuller(share)) {
            Some(place) => *place = entry,
            None => return Learned::Crowded,
        }
        self.uses(port, 1);
        Learned::Known
    }

    /// Returns a place for an address: an empty one, one that has aged, or one of the port that has used most of its share, if
    /// `yields` returns `true` for that share.
    fn make_room(&mut self, key: u64, now: u32, yields: impl Fn(Share) -> bool) -> Option<&mut Entry> {
        let index = self.index(key);
        let (ageing, bucket) = (self.ageing, *self.buckets.get(index)?);
        let entries = || bucket.0.iter().enumerate();
        let way = match entries().find(|(_, entry)| !entry.is_live(now, ageing)) {
            Some((way, _)) => way,
            None => {
                let share = |entry: &Entry| self.share(entry.port.into());
                let mut fullest: Option<(usize, Share)> = None;
                for (way, entry) in entries().filter(|(_, entry)| entry.home != OWN) {
                    let share = share(entry);
                    if fullest.is_none_or(|(_, most)| {
                        u64::from(share.used) * u64::from(most.limit) > u64::from(most.used) * u64::from(share.limit)
                    }) {
                        fullest = Some((way, share));
                    }
                }
                fullest.filter(|&(_, share)| yields(share))?.0
            }
        };
        let old = *bucket.0.get(way)?;
        if old.key != 0 && old.home != OWN {
            self.uses(old.port.into(), -1);
        }
        self.buckets.get_mut(index)?.0.get_mut(way)
    }

    /// Removes aged addresses, a few buckets at a time, so that an address without room costs little.
    fn sweep(&mut self, now: u32) {
        for _ in 0..SWEEP.min(self.buckets.len()) {
            self.cursor = if self.cursor + 1 < self.buckets.len() { self.cursor + 1 } else { 0 };
            let Some(bucket) = self.buckets.get_mut(self.cursor) else { return };
            let ageing = self.ageing;
            let mut freed = [None; WAYS];
            for (entry, freed) in bucket.0.iter_mut().zip(&mut freed) {
                if entry.key != 0 && !entry.is_live(now, ageing) {
                    *freed = Some(entry.port);
                    *entry = Entry::default();
                }
            }
            freed.into_iter().flatten().for_each(|port| self.uses(port.into(), -1));
        }
    }

    fn share(&self, port: u32) -> Share {
        self.shares.get(port as usize).copied().unwrap_or(Share { used: 0, limit: u32::MAX })
    }

    fn uses(&mut self, port: u32, more: i32) {
        if let Some(share) = self.share_mut(port) {
            share.used = share.used.saturating_add_signed(more);
        }
    }

    fn share_mut(&mut self, port: u32) -> Option<&mut Share> {
        let port = usize::from(u16::try_from(port).ok()?);
        if self.shares.len() <= port {
            self.shares.resize(port + 1, Share { used: 0, limit: u32::MAX });
        }
        self.shares.get_mut(port)
    }

    /// Sets how many addresses may be learned from a port, and its own address. The table grows to twice the sum of all limits,
    /// up to 2^20 entries.
    ///
    /// # Errors
    /// The other port whose own address it is; it stays there.
    pub fn admit(&mut self, port: u32, limit: u32, own: Option<MacAddr>) -> Result<(), u32> {
        if let Some(share) = self.share_mut(port) {
            share.limit = limit.max(1);
        }
        while self.buckets.len() * WAYS < self.wanted() {
            self.grow();
        }
        for entry in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.0) {
            if entry.home == OWN && u32::from(entry.port) == port {
                *entry = Entry::default();
            }
        }
        own.map_or(Ok(()), |address| self.own(address, port))
    }

    fn own(&mut self, address: MacAddr, port: u32) -> Result<(), u32> {
        let key = Self::key(address, 0);
        let Ok(number) = u16::try_from(port) else { return Ok(()) };
        let index = self.index(key);
        let bucket = self.buckets.get_mut(index);
        if let Some(entry) = bucket.and_then(|bucket| bucket.0.iter_mut().find(|entry| entry.key == key)) {
            let old = *entry;
            if old.home == OWN {
                return Err(old.port.into());
            }
            *entry = Entry { key, port: number, home: OWN, seen: 0 };
            self.uses(old.port.into(), -1);
            return Ok(());
        }
        loop {
            if let Some(place) = self.make_room(key, 0, |_| true) {
                *place = Entry { key, port: number, home: OWN, seen: 0 };
                return Ok(());
            }
            // The bucket is full of ports' own addresses.
            if self.buckets.len() * WAYS >= MOST {
                return Ok(());
            }
            self.grow();
        }
    }

    /// Doubles the number of buckets. Each is divided in two by the next bit of its addresses' indices.
    fn grow(&mut self) {
        let old = std::mem::take(&mut self.buckets);
        self.buckets = vec![Bucket::default(); old.len() * 2].into();
        self.shift -= 1;
        for entry in old.iter().flat_map(|bucket| bucket.0).filter(|entry| entry.key != 0) {
            let index = self.index(entry.key);
            let bucket = self.buckets.get_mut(index);
            if let Some(place) = bucket.and_then(|bucket| bucket.0.iter_mut().find(|place| place.key == 0)) {
                *place = entry;
            }
        }
    }

    /// Removes the addresses learned from a port. Its own address stays.
    pub fn forget(&mut self, port: u32) {
        for entry in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.0).filter(|entry| entry.home != OWN) {
            if u32::from(entry.port) == port {
                *entry = Entry::default();
            } else if u32::from(entry.home) == port {
                entry.home = entry.port;
            }
        }
        if let Some(share) = self.share_mut(port) {
            share.used = 0;
        }
    }

    /// Removes the addresses learned from a port in other VLANs than these.
    pub fn forget_vlans(&mut self, port: u32, keep: impl Fn(u16) -> bool) {
        let mut forgotten = 0;
        for entry in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.0).filter(|entry| entry.home != OWN) {
            if entry.key == 0 || keep((entry.key >> VLAN) as u16) {
                continue;
            }
            if u32::from(entry.port) == port {
                *entry = Entry::default();
                forgotten -= 1;
            } else if u32::from(entry.home) == port {
                entry.home = entry.port;
            }
        }
        self.uses(port, forgotten);
    }

    /// Removes a port's addresses, including its own.
    pub fn remove(&mut self, port: u32) {
        self.forget(port);
        let _ = self.admit(port, u32::MAX, None);
    }

    /// Returns the number of live addresses.
    pub fn len(&self, now: u32) -> usize {
        self.buckets.iter().flat_map(|bucket| &bucket.0).filter(|entry| entry.is_live(now, self.ageing)).count()
    }

    /// Returns the number of entries.
    pub fn capacity(&self) -> usize {
        self.buckets.len() * WAYS
    }
}

#[cfg(test)]
mod tests;
