//! Memory layout of a packed virtqueue (virtio 1.3, 2.8.1): its three areas, resolved once when the queue starts, positions
//! in the ring, and vhost-user's base format. Used by both ends.

use crate::layout::RingPosition;
use ringroad_mem::{
    Words,
    sync::{AtomicU32, AtomicU64, Ordering},
};
#[cfg(not(loom))]
use {
    crate::{Addresses, DESCRIPTOR, MAX_SIZE, SetupError},
    ringroad_mem::{Region, Table},
    std::sync::Arc,
};

/// A packed virtqueue in memory.
#[cfg_attr(loom, derive(Clone))]
pub struct Layout {
    pub(super) size: u16,
    /// Two words per descriptor: address; length | id << 32 | flags << 48. Writing the second word publishes the
    /// descriptor, as it contains the flags that the other side polls.
    pub(super) descriptors: Words<AtomicU64>,
    /// Written by the driver.
    pub(super) driver_event: Words<AtomicU32>,
    /// Written by the device.
    pub(super) device_event: Words<AtomicU32>,
}

/// Descriptor flag VIRTQ_DESC_F_AVAIL: its value shows in which pass the descriptor was made available (2.8.1).
pub(super) const AVAILABLE: u16 = 1 << 7;
/// Descriptor flag VIRTQ_DESC_F_USED: its value shows in which pass the descriptor was used.
pub(super) const USED: u16 = 1 << 15;

/// Returns AVAILABLE and USED as an available descriptor has them in a pass.
#[inline(always)]
pub(super) fn available_flags(wrap: bool) -> u16 {
    if wrap { AVAILABLE } else { USED }
}

/// Returns AVAILABLE and USED as a used descriptor has them in a pass.
#[inline(always)]
pub(super) fn used_flags(wrap: bool) -> u16 {
    if wrap { AVAILABLE | USED } else { 0 }
}

/// Builds the second word of a descriptor.
#[inline(always)]
pub(super) fn word(len: u32, id: u16, flags: u16) -> u64 {
    (u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48).to_le()
}

/// A slot of a packed ring with the wrap counter of the current pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub slot: u16,
    pub wrap: bool,
}

impl Position {
    pub(crate) const START: Position = Position { slot: 0, wrap: true };

    pub(super) fn from_bits(bits: u16, size: u16) -> Position {
        Position { slot: (bits & 0x7fff) % size, wrap: bits & 0x8000 != 0 }
    }
}

impl RingPosition for Position {
    #[inline(always)]
    fn slot(self, _size: u16) -> usize {
        self.slot.into()
    }

    #[inline(always)]
    fn advance(&mut self, slots: u16, size: u16) {
        // Both are at most 32768: no overflow.
        let next = self.slot + slots;
        let over = next >= size;
        self.slot = if over { next - size } else { next };
        self.wrap ^= over;
    }

    fn back(&mut self, slots: u16, size: u16) {
        let under = self.slot < slots;
        self.slot = if under { self.slot + size - slots } else { self.slot - slots };
        self.wrap ^= under;
    }

    #[inline(always)]
    fn distance(self, to: Position, size: u16) -> u16 {
        if self.wrap == to.wrap { to.slot.wrapping_sub(self.slot) } else { (size - self.slot).wrapping_add(to.slot) }
    }

    #[inline(always)]
    fn to_bits(self) -> u16 {
        self.slot | u16::from(self.wrap) << 15
    }
}

/// Base of a packed ring in vhost-user's format: bits 0–14 are the slot of the next available descriptor, bit 15 its wrap
/// counter; bits 16–30 and 31 are the same for the next used descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base(pub u32);

impl Base {
    pub(super) fn new(available: Position, used: Position) -> Base {
        Base(u32::from(available.to_bits()) | u32::from(used.to_bits()) << 16)
    }

    /// Returns where to start. Devices here stop between bursts, with both positions equal. If another device left the
    /// ring, the next used position counts, as chains between the two were taken and never returned.
    ///
    /// Some frontends carry only the available half (DPDK: 0x8000 for a fresh ring), some nothing at all (User-Mode Linux:
    /// 0 for a fresh ring). 0 is also the base of a ring at the start of an even pass, so the ring itself must decide. In a
    /// fresh ring nothing was used, and available descriptors have a clear USED bit. At the start of an even pass some
    /// descriptor has it set, as used in the previous pass or as available in this one. That need not be the first
    /// descriptor: the previous pass may have begun in the middle of a chain, or of a batch that was used in order.
    pub(super) fn position(self, ring: &Layout) -> Position {
        let (available, used) = (self.0 as u16, (self.0 >> 16) as u16);
        if self.0 == 0 {
            return Position { slot: 0, wrap: !ring.was_used() };
        }
        Position::from_bits(if used == 0 { available } else { used }, ring.size)
    }
}

/// Descriptors per cache line.
pub(super) const LINE: u16 = 4;

impl Layout {
    /// Returns the descriptors, two words each.
    #[inline(always)]
    pub(super) fn pairs(&self) -> &[[AtomicU64; 2]] {
        self.descriptors.as_chunks().0
    }

    /// Returns the number of entries.
    #[inline(always)]
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Returns whether some descriptor has its USED bit set; in a fresh ring none has.
    pub(crate) fn was_used(&self) -> bool {
        self.pairs().iter().any(|[_, word]| (u64::from_le(word.load(Ordering::Acquire)) >> 48) as u16 & USED != 0)
    }

    /// Prefetches the lines of `expected` descriptors from a slot on.
    #[inline(always)]
    pub(super) fn prefetch(&self, slot: u16, expected: u16, write: bool) {
        let straight = expected.min(self.size.saturating_sub(slot));
        self.descriptors.prefetch_run(2 * slot as usize, 2 * straight as usize, write);
        self.descriptors.prefetch_run(0, 2 * (expected - straight) as usize, write);
    }

    /// Demotes the cache lines of the descriptors of `count` slots. Of a line that they begin in the middle of, the end is left out.
    pub(super) fn demote(&self, slot: u16, count: u16) {
        let straight = count.min(self.size.saturating_sub(slot));
        self.descriptors.demote_run(2 * slot as usize, 2 * straight as usize);
        self.descriptors.demote_run(0, 2 * (count - straight) as usize);
    }

    /// Returns whether the ring was certainly never used: it begins with descriptors available in the first pass, and all
    /// others are zero. A used ring can look the same only if it is full.
    pub(crate) fn is_fresh(&self) -> bool {
        let load = |word: &AtomicU64| u64::from_le(word.load(Ordering::Acquire));
        let mut all = self.pairs().iter().map(|[address, word]| (load(address), load(word)));
        let is_made = |&(_, word): &(u64, u64)| (word >> 48) as u16 & (AVAILABLE | USED) == AVAILABLE;
        all.by_ref().find(|pair| !is_made(pair)) == Some((0, 0)) && all.all(|pair| pair == (0, 0))
    }

    /// Returns the address and second word of the descriptor at a position.
    pub(crate) fn words(&self, at: Position) -> (u64, u64) {
        self.pairs().get(usize::from(at.slot)).map_or((0, 0), |[address, word]| {
            let word = u64::from_le(word.load(Ordering::Acquire));
            (u64::from_le(address.load(Ordering::Relaxed)), word)
        })
    }

    /// Returns whether the descriptor at a position is available in that pass.
    pub(crate) fn is_available(&self, at: Position) -> bool {
        (self.words(at).1 >> 48) as u16 & (AVAILABLE | USED) == available_flags(at.wrap)
    }

    /// Makes the descriptor at a position available again if it is marked as used in that pass. Returns whether it was.
    pub(super) fn restore_available(&self, at: Position) -> bool {
        let (_, second) = self.words(at);
        let flags = (second >> 48) as u16;
        let looks_used = flags & (AVAILABLE | USED) == used_flags(at.wrap);
        if let Some([_, place]) = self.pairs().get(usize::from(at.slot)).filter(|_| looks_used) {
            let flags = flags & !(AVAILABLE | USED) | available_flags(at.wrap);
            place.store(word(second as u32, (second >> 32) as u16, flags), Ordering::Relaxed);
        }
        looks_used
    }
}

#[cfg(not(loom))]
impl Layout {
    /// Resolves the areas of a driver's ring in its memory.
    ///
    /// # Errors
    /// [`SetupError::Size`] or [`SetupError::Area`].
    pub fn resolve(memory: &Table, size: u32, at: Addresses) -> Result<Layout, SetupError> {
        if size == 0 || size > MAX_SIZE {
            return Err(SetupError::Size { size, packed: true });
        }
        let area = |area, address, len, align| SetupError::Area { area, address, len, align };
        let descriptor = area("descriptor", at.descriptor, size as usize * DESCRIPTOR, 16);
        // 2.8.10: the descriptor ring is aligned to 16 bytes. `Words` would accept 8.
        if !at.descriptor.is_multiple_of(16) {
            return Err(descriptor);
        }
        Ok(Layout {
            size: size as u16,
            descriptors: memory.user_words(at.descriptor, 2 * size as usize).ok_or(descriptor)?,
            driver_event: memory.user_words(at.driver, 1).ok_or(area("driver", at.driver, 4, 4))?,
            device_event: memory.user_words(at.device, 1).ok_or(area("device", at.device, 4, 4))?,
        })
    }

    /// Returns the size in bytes of a ring in a driver's memory.
    pub fn bytes(size: u32) -> usize {
        (size as usize * DESCRIPTOR).next_multiple_of(128) + 256
    }

    /// Places a ring in a driver's own memory, each area on separate cache lines.
    ///
    /// # Errors
    /// As for `resolve`.
    pub fn place(region: &Arc<Region>, offset: usize, size: u32) -> Result<(Layout, Addresses), SetupError> {
        let descriptor = region.user() + offset as u64;
        let driver = descriptor + (size as usize * DESCRIPTOR).next_multiple_of(128) as u64;
        let at = Addresses { descriptor, driver, device: driver + 128 };
        let memory = Table::default().with(region.clone()).unwrap_or_default();
        Ok((Layout::resolve(&memory, size, at)?, at))
    }
}

#[cfg(loom)]
impl Layout {
    /// Returns a ring of loom's atomics.
    pub fn model(size: u16) -> Layout {
        Layout {
            size,
            descriptors: Words::model((0..2 * size).map(|_| AtomicU64::new(0)).collect()),
            driver_event: Words::model(vec![AtomicU32::new(0)]),
            device_event: Words::model(vec![AtomicU32::new(0)]),
        }
    }
}
