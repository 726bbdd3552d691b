//! The memory table of a port: translates guest addresses to [`Span`]s. Built by the sessions of vhost-user and vfio-user, used
//! by the rings.

use crate::{Error, Region, Span};
#[cfg(not(loom))]
use crate::{Word, Words};
use std::sync::Arc;

/// Maximum number of regions: what vhost-user frontends expect (QEMU's own limit for memory slots is 509).
pub const SLOTS: usize = 509;

/// The regions of a port, sorted by guest address. A table is immutable: adding or removing a region makes a new table, and
/// users of the old one finish with it undisturbed.
#[derive(Clone, Debug, Default)]
pub struct Table {
    regions: Vec<Arc<Region>>,
    /// Apart, so that a lookup for writing cannot find them.
    read_only: Vec<Arc<Region>>,
}

/// Cache of the region that matched last. Each user of a table keeps its own; most tables have one or two regions, so it
/// nearly always matches again.
#[derive(Clone, Copy, Default, Debug)]
pub struct Hit(usize);

impl Hit {
    /// No region cached: every lookup searches the table.
    pub const NONE: Hit = Hit(usize::MAX);
}

/// Why a range of guest addresses could not be added to a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// Not all of it is mapped.
    Unmapped,
    /// The list is full.
    Full,
}

fn is_apart(a: u64, a_len: u64, b: u64, b_len: u64) -> bool {
    a + a_len <= b || b + b_len <= a
}

impl Table {
    /// Returns this table with one more region.
    ///
    /// # Errors
    /// [`Error::TooMany`], or [`Error::Overlap`] if it overlaps another region in guest or user addresses.
    pub fn with(&self, region: Arc<Region>) -> Result<Table, Error> {
        if self.regions.len() + self.read_only.len() >= SLOTS {
            return Err(Error::TooMany);
        }
        let (user, len) = (region.user(), region.len() as u64);
        for other in self.all() {
            let (guest, other_len) = (region.guest(), other.len() as u64);
            if !is_apart(user, len, other.user(), other_len) {
                return Err(Error::Overlap { guest, len, other: other.guest(), other_len });
            }
        }
        self.with_own(region)
    }

    /// Returns this table with one more region, of this process's own: its peer knows nothing of it, neither at which address it is
    /// here, which is compared with nothing, nor that it takes a place.
    ///
    /// # Errors
    /// [`Error::Overlap`] if it overlaps another region in guest addresses.
    pub fn with_own(&self, region: Arc<Region>) -> Result<Table, Error> {
        let (guest, len) = (region.guest(), region.len() as u64);
        for other in self.all() {
            let other_len = other.len() as u64;
            if !is_apart(guest, len, other.guest(), other_len) {
                return Err(Error::Overlap { guest, len, other: other.guest(), other_len });
            }
        }
        let mut table = self.clone();
        let regions = if region.is_read_only() { &mut table.read_only } else { &mut table.regions };
        regions.insert(regions.partition_point(|r| r.guest() < guest), region);
        Ok(table)
    }

    /// Returns this table without the region that has these addresses and this size.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such region.
    pub fn without(&self, guest: u64, user: u64, len: u64) -> Result<Table, Error> {
        let is = |r: &&Arc<Region>| r.guest() == guest && r.user() == user && r.len() as u64 == len;
        if !self.all().any(|r| is(&r)) {
            return Err(Error::Unknown { guest, user, len });
        }
        let mut table = self.clone();
        table.regions.retain(|r| !is(&r));
        table.read_only.retain(|r| !is(&r));
        Ok(table)
    }

    /// Returns the regions that may be written, sorted by guest address.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Returns all regions: those that may be written, then those that may not.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.regions.iter().chain(&self.read_only)
    }

    /// Returns whether a peer has truncated the file of any region.
    pub fn is_lost(&self) -> bool {
        self.all().any(|r| r.is_lost())
    }

    /// Translates a guest address; `None` unless the whole range lies in one region that may be written. Tries the region in
    /// `hit` first and updates it.
    #[inline(always)]
    pub fn span(&self, address: u64, len: usize, hit: &mut Hit) -> Option<Span<'_>> {
        if let Some(region) = self.regions.get(hit.0)
            && let Some(offset) = address.checked_sub(region.guest())
            && let Some(span) = region.span(offset as usize, len)
        {
            return Some(span);
        }
        let (index, region) = self.find(address)?;
        let span = region.span((address - region.guest()) as usize, len)?;
        *hit = Hit(index);
        Some(span)
    }

    /// Like [`Table::span`], for reading: the region may be read-only ([`Region::map_read_only`]).
    #[inline]
    pub fn readable(&self, address: u64, len: usize, hit: &mut Hit) -> Option<Span<'_>> {
        self.span(address, len, hit).or_else(|| {
            let (_, region) = find(&self.read_only, address)?;
            region.span((address - region.guest()) as usize, len)
        })
    }

    /// Returns the cached region.
    #[inline(always)]
    pub(crate) fn last(&self, hit: Hit) -> Option<&Region> {
        self.regions.get(hit.0).map(|region| &**region)
    }

    /// Translates a guest address without the cache.
    #[inline]
    pub fn search(&self, address: u64, len: usize) -> Option<Span<'_>> {
        let (_, region) = self.find(address)?;
        region.span((address - region.guest()) as usize, len)
    }

    /// Translates as much of the range as lies in one region.
    pub(crate) fn longest(&self, address: u64, len: usize, hit: &mut Hit) -> Result<Span<'_>, PushError> {
        let (index, region) = self.find(address).ok_or(PushError::Unmapped)?;
        let offset = (address - region.guest()) as usize;
        *hit = Hit(index);
        region.span(offset, len.min(region.len() - offset)).ok_or(PushError::Unmapped)
    }

    fn find(&self, address: u64) -> Option<(usize, &Arc<Region>)> {
        find(&self.regions, address)
    }

    /// Returns the `len` words at a frontend address, which is how vhost-user addresses rings; `None` if they do not all
    /// lie in one region or are misaligned.
    #[cfg(not(loom))]
    pub fn user_words<T: Word>(&self, address: u64, len: usize) -> Option<Words<T>> {
        let inside = |r: &&Arc<Region>| address.checked_sub(r.user()).is_some_and(|o| o < r.len() as u64);
        let region = self.regions.iter().find(inside)?;
        Words::new(region, (address - region.user()) as usize, len)
    }

    /// Device and inode of the file that backs a frontend address.
    pub fn user_identity(&self, address: u64) -> Option<(u64, u64)> {
        let inside = |r: &&Arc<Region>| address.checked_sub(r.user()).is_some_and(|o| o < r.len() as u64);
        self.regions.iter().find(inside).map(|region| region.identity())
    }

    /// Returns the `len` words at a guest address; `None` as for [`Table::user_words`].
    #[cfg(not(loom))]
    pub fn guest_words<T: Word>(&self, address: u64, len: usize) -> Option<Words<T>> {
        let (_, region) = self.find(address)?;
        Words::new(region, (address - region.guest()) as usize, len)
    }
}

/// Returns the region with a guest address, and its index.
#[inline]
fn find(regions: &[Arc<Region>], address: u64) -> Option<(usize, &Arc<Region>)> {
    let index = regions.partition_point(|r| r.guest() <= address).checked_sub(1)?;
    let region = regions.get(index)?;
    (address - region.guest() < region.len() as u64).then_some((index, region))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU16;

    fn file_region(guest: u64, user: u64, len: usize) -> Arc<Region> {
        let (_, file) = Region::create(len, 0, false).unwrap();
        Region::map(&file, 0, len as u64, guest, user).unwrap()
    }

    #[test]
    fn finds_by_guest_and_user_address() {
        let table = Table::default().with(file_region(0x9000, 0x1_0000, 4096)).unwrap();
        let table = table.with(file_region(0x1000, 0x5_0000, 8192)).unwrap();
        let mut hit = Hit::default();
        assert!(table.span(0x1000, 8192, &mut hit).is_some());
        assert!(table.span(0x1000, 8193, &mut hit).is_none());
        assert!(table.span(0x9fff, 1, &mut hit).is_some());
        assert!(table.span(0x9fff, 2, &mut hit).is_none());
        assert!(table.span(0xfff, 1, &mut hit).is_none());
        assert!(table.span(0x3000, 1, &mut hit).is_none());
        assert!(table.span(u64::MAX, 1, &mut hit).is_none());
        assert!(table.user_words::<AtomicU16>(0x1_0000, 2048).is_some());
        assert!(table.user_words::<AtomicU16>(0x1_0000, 2049).is_none());
        assert!(table.user_words::<AtomicU16>(0x1_0001, 1).is_none(), "misaligned");
        assert!(table.user_words::<AtomicU16>(0x1000, 1).is_none(), "a guest address is not a user address");
        assert!(table.user_words::<AtomicU16>(0x1_0000, usize::MAX).is_none());
        assert!(table.guest_words::<AtomicU16>(0x2ffe, 1).is_some());
    }

    #[test]
    fn adds_and_removes() {
        let one = Table::default().with(file_region(0x1000, 0x1_0000, 4096)).unwrap();
        for (guest, user) in [(0x1000, 0x9_0000), (0x1fff, 0x9_0000), (0x9000, 0x1_0fff), (0x1, 0x9_0000)] {
            assert!(matches!(one.with(file_region(guest, user, 4096)), Err(Error::Overlap { .. })), "{guest:#x}");
        }
        let two = one.with(file_region(0x2000, 0x1_1000, 4096)).unwrap();
        assert!(matches!(two.without(0x2000, 0x1_1000, 4095), Err(Error::Unknown { .. })));
        let back = two.without(0x1000, 0x1_0000, 4096).unwrap();
        assert_eq!((back.regions().len(), two.regions().len()), (1, 2));
        // A stale cache entry must not match the wrong region.
        let mut hit = Hit(1);
        assert!(back.span(0x1000, 1, &mut hit).is_none());
        assert!(back.span(0x2000, 1, &mut hit).is_some());
    }

    #[test]
    fn read_only_regions_are_found_for_reading_only() {
        let (_, file) = Region::create(4096, 0, false).unwrap();
        let read_only = |guest| Region::map_read_only(&file, 0, 4096, guest, guest).unwrap();
        let table = Table::default().with(file_region(0x1000, 0x1000, 4096)).unwrap();
        let table = table.with(read_only(0x2000)).unwrap();
        assert!(matches!(table.with(read_only(0x1800)), Err(Error::Overlap { .. })));
        assert!(matches!(table.with(file_region(0x2fff, 0x9000, 4096)), Err(Error::Overlap { .. })));
        let mut hit = Hit::default();
        for (address, len, write, read) in [
            (0x1000, 4096, true, true),
            (0x2000, 4096, false, true),
            (0x1fff, 2, false, false),
            (0x3000, 1, false, false),
        ] {
            assert_eq!(table.span(address, len, &mut hit).is_some(), write, "{address:#x}");
            assert_eq!(table.readable(address, len, &mut hit).is_some(), read, "{address:#x}");
        }
        assert!(table.guest_words::<AtomicU16>(0x2000, 1).is_none() && table.search(0x2000, 1).is_none());
        assert_eq!((table.regions().len(), table.all().count()), (1, 2));
        let table = table.without(0x2000, 0x2000, 4096).unwrap();
        assert!(table.readable(0x2000, 1, &mut hit).is_none());
    }

    #[test]
    fn holds_509() {
        let mut table = Table::default();
        for i in 0..SLOTS as u64 {
            table = table.with(file_region(i << 20, i << 24, 4096)).unwrap();
        }
        assert!(matches!(table.with(file_region(1 << 40, 1 << 44, 4096)), Err(Error::TooMany)));
        // One of our own takes none of the places, and its address here is nobody's business.
        assert!(table.with_own(file_region(1 << 40, 1 << 24, 4096)).is_ok());
        assert!(matches!(table.with_own(file_region(1 << 20, 1 << 44, 4096)), Err(Error::Overlap { .. })));
        let mut hit = Hit::default();
        assert!((0..SLOTS as u64).all(|i| table.span(i << 20, 4096, &mut hit).is_some()));
    }
}
