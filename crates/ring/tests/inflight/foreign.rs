//! A foreign back end: implements inflight tracking step by step and byte by byte as the vhost-user specification describes
//! it ("Inflight I/O tracking"), without using any code of this crate. It can stop while returning buffers.

use crate::common::Memory;
use ringroad_mem::Region;
use std::sync::Arc;

/// Where it stops while returning a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Never,
    /// The batch is linked, but the driver does not see it.
    BeforePublish,
    /// The driver sees the batch, but the region still has it in flight.
    AfterPublish,
    /// Only the first chain of the batch is cleared.
    HalfCleared,
}

/// Integers in shared memory.
#[derive(Clone)]
pub struct Bytes(Arc<Region>, usize);

impl Bytes {
    pub fn new(region: &Arc<Region>, offset: usize) -> Bytes {
        Bytes(region.clone(), offset)
    }
    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        assert_eq!(self.0.span(self.1 + at, N).unwrap().read(&mut bytes), N);
        bytes
    }
    fn put(&self, at: usize, bytes: &[u8]) {
        assert_eq!(self.0.span(self.1 + at, bytes.len()).unwrap().write(bytes), bytes.len());
    }
    pub fn u8(&self, at: usize) -> u8 {
        self.get::<1>(at)[0]
    }
    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.get(at))
    }
    pub fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.get(at))
    }
    pub fn set_u8(&self, at: usize, value: u8) {
        self.put(at, &[value]);
    }
    pub fn set_u16(&self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }
    pub fn set_u32(&self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }
    pub fn set_u64(&self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }
}

const NEXT: u16 = 1;

/// QueueRegionSplit and DescStateSplit.
pub struct Split {
    size: u16,
    region: Bytes,
    available: Bytes,
    used: Bytes,
    counter: u64,
    last_available: u16,
}

impl Split {
    fn desc(head: u16) -> usize {
        16 + 16 * usize::from(head)
    }

    /// Connects; also returns the heads that it resubmits, in order.
    pub fn connect(memory: &Memory, region: &Bytes, most: u16) -> (Split, Vec<u16>) {
        let area = |at: u64| Bytes::new(&memory.driver, (at - memory.driver.user()) as usize);
        let (available, used) = (area(memory.at.driver), area(memory.at.device));
        let size = memory.size as u16;
        let index = used.u16(2);
        if region.u16(8) == 0 {
            region.set_u16(8, 1);
            region.set_u16(10, most);
            region.set_u16(14, index);
        }
        let entries = region.u16(10);
        assert_eq!((region.u64(0), region.u16(8)), (0, 1), "features, version");
        assert!((size..=most).contains(&entries), "desc_num: {entries}");
        let known = region.u16(14);
        if known != index {
            let mut head = region.u16(12);
            for _ in 0..index.wrapping_sub(known) {
                region.set_u8(Self::desc(head), 0);
                head = region.u16(Self::desc(head) + 6);
            }
            region.set_u16(14, index);
        }
        let mut inflight: Vec<(u64, u16)> = (0..entries)
            .filter(|&head| region.u8(Self::desc(head)) == 1)
            .map(|head| (region.u64(Self::desc(head) + 8), head))
            .collect();
        inflight.sort_unstable();
        let counter = inflight.last().map_or(0, |last| last.0 + 1);
        let heads: Vec<u16> = inflight.into_iter().map(|(_, head)| head).collect();
        let last_available = index.wrapping_add(heads.len() as u16);
        (Split { size, region: region.clone(), available, used, counter, last_available }, heads)
    }

    pub fn take(&mut self) -> Option<u16> {
        if self.available.u16(2) == self.last_available {
            return None;
        }
        let head = self.available.u16(4 + 2 * usize::from(self.last_available % self.size));
        self.last_available = self.last_available.wrapping_add(1);
        self.region.set_u64(Self::desc(head) + 8, self.counter);
        self.counter += 1;
        self.region.set_u8(Self::desc(head), 1);
        Some(head)
    }

    pub fn give(&mut self, heads: &[u16], stop: Stop) {
        let mut index = self.used.u16(2);
        for &head in heads {
            self.region.set_u16(Self::desc(head) + 6, self.region.u16(12));
            self.region.set_u16(12, head);
            let element = 4 + 8 * usize::from(index % self.size);
            self.used.set_u32(element, head.into());
            self.used.set_u32(element + 4, 0);
            index = index.wrapping_add(1);
        }
        if stop == Stop::BeforePublish {
            return;
        }
        self.used.set_u16(2, index);
        if stop == Stop::AfterPublish {
            return;
        }
        for &head in heads {
            self.region.set_u8(Self::desc(head), 0);
            if stop == Stop::HalfCleared {
                return;
            }
        }
        self.region.set_u16(14, index);
    }
}

/// QueueRegionPacked and DescStatePacked.
pub struct Packed {
    size: u16,
    region: Bytes,
    ring: Bytes,
    counter: u64,
    available: (u16, bool),
}

impl Packed {
    fn desc(entry: u16) -> usize {
        32 + 32 * usize::from(entry)
    }

    fn flags(&self, (slot, _): (u16, bool)) -> u16 {
        self.ring.u16(16 * usize::from(slot) + 14)
    }

    fn available_flags(wrap: bool) -> u16 {
        if wrap { 1 << 7 } else { 1 << 15 }
    }

    fn advance((slot, wrap): (u16, bool), count: u16, size: u16) -> (u16, bool) {
        let next = slot + count;
        if next >= size { (next - size, !wrap) } else { (next, wrap) }
    }

    /// Connects; also returns the chains that it resubmits, in order, by entry and buffer id.
    pub fn connect(memory: &Memory, region: &Bytes, most: u16) -> (Packed, Vec<(u16, u16)>) {
        let offset = (memory.at.descriptor - memory.driver.user()) as usize;
        let (size, ring) = (memory.size as u16, Bytes::new(&memory.driver, offset));
        if region.u16(8) == 0 {
            region.set_u16(8, 1);
            region.set_u16(10, most);
            region.set_u8(20, 1);
            region.set_u8(21, 1);
            (0..most).for_each(|entry| region.set_u16(Self::desc(entry) + 2, entry + 1));
        }
        let entries = region.u16(10);
        assert_eq!((region.u64(0), region.u16(8)), (0, 1), "features, version");
        assert!((size..=most).contains(&entries), "desc_num: {entries}");
        let mut this = Packed { size, region: region.clone(), ring, counter: 0, available: (0, true) };
        let old = (region.u16(18), region.u8(21) == 1);
        if region.u16(16) != region.u16(18) {
            let flags = this.flags(old) & (1 << 7 | 1 << 15);
            if flags != Self::available_flags(old.1) {
                this.commit();
            }
        }
        region.set_u16(12, region.u16(14));
        region.set_u16(16, region.u16(18));
        region.set_u8(20, region.u8(21));
        let (mut entry, mut free) = (region.u16(12), 0);
        while entry < entries && free < entries {
            region.set_u8(Self::desc(entry), 0);
            entry = region.u16(Self::desc(entry) + 2);
            free += 1;
        }
        let mut inflight: Vec<(u64, u16)> = (0..entries)
            .filter(|&entry| region.u8(Self::desc(entry)) == 1)
            .map(|entry| (region.u64(Self::desc(entry) + 8), entry))
            .collect();
        inflight.sort_unstable();
        this.counter = inflight.last().map_or(0, |last| last.0 + 1);
        let slots: u16 = inflight.iter().map(|&(_, entry)| region.u16(Self::desc(entry) + 6)).sum();
        // Entries that only this back end counts may be neither.
        assert!(free + slots == entries || free + slots == size, "each entry is free or in flight");
        this.available = Self::advance((region.u16(16), region.u8(20) == 1), slots, size);
        let id = |entry: u16| region.u16(Self::desc(region.u16(Self::desc(entry) + 4)) + 16);
        let chains = inflight.into_iter().map(|(_, entry)| (entry, id(entry))).collect();
        (this, chains)
    }

    /// Sets the old fields to the new ones.
    fn commit(&self) {
        self.region.set_u16(14, self.region.u16(12));
        self.region.set_u16(18, self.region.u16(16));
        self.region.set_u8(21, self.region.u8(20));
    }

    /// Takes a chain; returns its entry and buffer id.
    pub fn take(&mut self) -> Option<(u16, u16)> {
        let flags = self.flags(self.available);
        if flags & (1 << 7 | 1 << 15) != Self::available_flags(self.available.1) {
            return None;
        }
        let region = &self.region;
        let head = region.u16(14);
        region.set_u16(Self::desc(head) + 6, 0);
        region.set_u64(Self::desc(head) + 8, self.counter);
        self.counter += 1;
        region.set_u8(Self::desc(head), 1);
        loop {
            let slot = 16 * usize::from(self.available.0);
            let (flags, id) = (self.flags(self.available), self.ring.u16(slot + 12));
            let is_last = flags & NEXT == 0;
            let free = region.u16(12);
            if is_last {
                region.set_u16(Self::desc(head) + 4, free);
            }
            region.set_u16(Self::desc(head) + 6, region.u16(Self::desc(head) + 6) + 1);
            region.set_u64(Self::desc(free) + 24, self.ring.u64(slot));
            region.set_u64(Self::desc(free) + 16, {
                let word = self.ring.u64(slot + 8);
                u64::from(id) | u64::from(flags) << 16 | word << 32
            });
            region.set_u16(12, region.u16(Self::desc(free) + 2));
            self.available = Self::advance(self.available, 1, self.size);
            if is_last {
                region.set_u16(14, region.u16(12));
                return Some((head, id));
            }
        }
    }

    /// Returns a batch: the first used descriptor is written last.
    pub fn give(&mut self, chains: &[(u16, u16)], stop: Stop) {
        let region = &self.region;
        let first = (region.u16(16), region.u8(20) == 1);
        let mut at = first;
        let write = |(slot, wrap): (u16, bool), id: u16| {
            let place = 16 * usize::from(slot);
            self.ring.set_u32(place + 8, 0);
            self.ring.set_u16(place + 12, id);
            self.ring.set_u16(place + 14, if wrap { 1 << 7 | 1 << 15 } else { 0 });
        };
        for &(entry, id) in chains {
            let last = region.u16(Self::desc(entry) + 4);
            region.set_u16(Self::desc(last) + 2, region.u16(12));
            region.set_u16(12, entry);
            if at != first {
                write(at, id);
            }
            at = Self::advance(at, region.u16(Self::desc(entry) + 6), self.size);
        }
        region.set_u16(16, at.0);
        region.set_u8(20, at.1.into());
        if stop == Stop::BeforePublish {
            return;
        }
        write(first, chains[0].1);
        if stop == Stop::AfterPublish {
            return;
        }
        for &(entry, _) in chains {
            region.set_u8(Self::desc(entry), 0);
            if stop == Stop::HalfCleared {
                return;
            }
        }
        self.commit();
    }
}
