//! Memory layout of a split virtqueue (virtio 1.3, 2.7.2): its three areas, resolved once when the queue starts. Used by
//! both ends.

use crate::layout::RingPosition;
#[cfg(not(loom))]
use crate::{Addresses, DESCRIPTOR, MAX_SIZE, SetupError};
#[cfg(not(loom))]
use ringroad_mem::{Region, Table};
use ringroad_mem::{
    Words,
    sync::{AtomicU16, AtomicU32, AtomicU64},
};
#[cfg(not(loom))]
use std::sync::Arc;

/// A split virtqueue in memory.
#[cfg_attr(loom, derive(Clone))]
pub struct Layout {
    pub(super) size: u16,
    /// Two words per descriptor: address; length | flags << 32 | next << 48.
    pub(super) descriptors: Words<AtomicU64>,
    /// Flags, index, `size` entries, used_event.
    pub(super) available: Words<AtomicU16>,
    /// Flags, index.
    pub(super) used: Words<AtomicU16>,
    /// Two words per element: id; length.
    pub(super) elements: Words<AtomicU32>,
    /// avail_event.
    pub(super) available_event: Words<AtomicU16>,
}

/// A free-running index of the available or used ring.
impl RingPosition for u16 {
    #[inline(always)]
    fn slot(self, size: u16) -> usize {
        (self & (size - 1)).into()
    }

    #[inline(always)]
    fn advance(&mut self, slots: u16, _size: u16) {
        *self = self.wrapping_add(slots);
    }

    fn back(&mut self, slots: u16, _size: u16) {
        *self = self.wrapping_sub(slots);
    }

    #[inline(always)]
    fn distance(self, to: u16, _size: u16) -> u16 {
        to.wrapping_sub(self)
    }

    #[inline(always)]
    fn to_bits(self) -> u16 {
        self
    }
}

/// Used elements per cache line.
pub(super) const ELEMENTS_PER_LINE: usize = 8;
/// Number of descriptors in a cache line.
pub(super) const DESCRIPTORS_PER_LINE: usize = 4;
/// `available[FLAGS]`, `used[FLAGS]`.
pub(super) const FLAGS: usize = 0;
/// `available[INDEX]`, `used[INDEX]`.
pub(super) const INDEX: usize = 1;
/// `available[ENTRIES + i]`.
pub(super) const ENTRIES: usize = 2;
/// Value of `FLAGS`: the writer wants no notifications (VIRTQ_AVAIL_F_NO_INTERRUPT, VIRTQ_USED_F_NO_NOTIFY).
pub(super) const NO_NOTIFICATION: u16 = 1;

#[cfg(not(loom))]
impl Layout {
    /// Resolves the areas of a driver's ring in its memory.
    ///
    /// # Errors
    /// [`SetupError::Size`] or [`SetupError::Area`].
    pub fn resolve(memory: &Table, size: u32, at: Addresses) -> Result<Layout, SetupError> {
        Self::check_size(size)?;
        let n = size as usize;
        let area = |area, address, len, align| SetupError::Area { area, address, len, align };
        let descriptor = || area("descriptor", at.descriptor, n * DESCRIPTOR, 16);
        let driver = || area("driver", at.driver, 2 * (n + 3), 2);
        let device = || area("device", at.device, 8 * n + 6, 4);
        // 2.7.2: the descriptor table is aligned to 16 bytes. `Words` would accept 8.
        if !at.descriptor.is_multiple_of(16) {
            return Err(descriptor());
        }
        let used: Words<AtomicU32> = memory.user_words(at.device, 2 * n + 1).ok_or_else(device)?;
        let offset = (at.device - used.region().user()) as usize;
        Ok(Layout {
            size: size as u16,
            descriptors: memory.user_words(at.descriptor, 2 * n).ok_or_else(descriptor)?,
            available: memory.user_words(at.driver, n + 3).ok_or_else(driver)?,
            used: Words::new(used.region(), offset, 2).ok_or_else(device)?,
            elements: Words::new(used.region(), offset + 4, 2 * n).ok_or_else(device)?,
            available_event: Words::new(used.region(), offset + 4 + 8 * n, 1).ok_or_else(device)?,
        })
    }

    /// Returns the size in bytes of a ring in a driver's memory.
    pub fn bytes(size: u32) -> usize {
        let n = size as usize;
        (n * DESCRIPTOR).next_multiple_of(128) + (2 * (n + 3)).next_multiple_of(128) + (8 * n + 6).next_multiple_of(128)
    }

    /// Places a ring in a driver's own memory, each area on separate cache lines.
    ///
    /// # Errors
    /// As for `resolve`.
    pub fn place(region: &Arc<Region>, offset: usize, size: u32) -> Result<(Layout, Addresses), SetupError> {
        let n = size as usize;
        let descriptor = region.user() + offset as u64;
        let driver = descriptor + (n * DESCRIPTOR).next_multiple_of(128) as u64;
        let device = driver + (2 * (n + 3)).next_multiple_of(128) as u64;
        let at = Addresses { descriptor, driver, device };
        let memory = Table::default().with(region.clone()).unwrap_or_default();
        Ok((Layout::resolve(&memory, size, at)?, at))
    }

    fn check_size(size: u32) -> Result<(), SetupError> {
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(SetupError::Size { size, packed: false });
        }
        Ok(())
    }
}

#[cfg(loom)]
impl Layout {
    /// Returns a ring of loom's atomics.
    pub fn model(size: u16) -> Layout {
        let n = size as usize;
        Layout {
            size,
            descriptors: Words::model((0..2 * n).map(|_| AtomicU64::new(0)).collect()),
            available: Words::model((0..n + 3).map(|_| AtomicU16::new(0)).collect()),
            used: Words::model((0..2).map(|_| AtomicU16::new(0)).collect()),
            elements: Words::model((0..2 * n).map(|_| AtomicU32::new(0)).collect()),
            available_event: Words::model(vec![AtomicU16::new(0)]),
        }
    }
}
