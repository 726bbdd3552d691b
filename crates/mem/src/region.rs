//! One mapping of memory that is shared with a peer.

use crate::{
    sigbus::{self, Watch},
    span::Span,
};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::MetadataExt,
    },
    ptr::{self, NonNull},
    sync::Arc,
};

/// What is wrong with memory that a peer wants us to map.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Size 0.
    #[error("memory region at guest address {guest:#x} is empty")]
    Empty {
        /// Its guest address.
        guest: u64,
    },
    /// An address range that does not fit into 64 bits.
    #[error(
        "memory region at guest address {guest:#x}, user address {user:#x}, offset {offset:#x}: {len:#x} bytes run past the end of the address space"
    )]
    Overflow {
        /// Its guest address.
        guest: u64,
        /// Its address in the frontend.
        user: u64,
        /// Its offset in the file.
        offset: u64,
        /// Its size.
        len: u64,
    },
    /// The file is shorter than the region.
    #[error("memory region at guest address {guest:#x} needs {needed:#x} bytes of its file, which has {size:#x}")]
    BeyondFile {
        /// Its guest address.
        guest: u64,
        /// Offset and size of the region, added.
        needed: u64,
        /// Size of the file.
        size: u64,
    },
    /// Shares guest or user addresses with another region.
    #[error("memory region at guest address {guest:#x} + {len:#x} overlaps the one at {other:#x} + {other_len:#x}")]
    Overlap {
        /// Its guest address.
        guest: u64,
        /// Its size.
        len: u64,
        /// The other one's guest address.
        other: u64,
        /// The other one's size.
        other_len: u64,
    },
    /// One more than a table holds.
    #[error("more than {} memory regions", crate::SLOTS)]
    TooMany,
    /// Removal of a region that is not there.
    #[error("no memory region at guest address {guest:#x}, user address {user:#x} with {len:#x} bytes")]
    Unknown {
        /// Its guest address.
        guest: u64,
        /// Its address in the frontend.
        user: u64,
        /// Its size.
        len: u64,
    },
    /// The kernel refused.
    #[error("cannot map memory: {0}")]
    Map(#[from] io::Error),
}

/// One mapping, known by its guest address and by the address that it has in the frontend ("user address").
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    guest: u64,
    user: u64,
    map: usize,
    map_len: usize,
    watch: Option<&'static Watch>,
    /// Device and inode of the file that a peer has handed over.
    identity: (u64, u64),
}

// SAFETY: the mapping belongs to no thread; all access goes through spans and words.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of a peer's file from `offset` on. The file must have them, hugepages or not.
    pub fn map(file: &File, offset: u64, len: u64, guest: u64, user: u64) -> Result<Arc<Region>, Error> {
        if len == 0 {
            return Err(Error::Empty { guest });
        }
        let overflow = Error::Overflow { guest, user, offset, len };
        let Some(end) = offset.checked_add(len).filter(|&end| end <= i64::MAX as u64) else { return Err(overflow) };
        if guest.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(overflow);
        }
        let meta = file.metadata()?;
        let identity = (meta.dev(), meta.ino());
        if end > meta.size() {
            return Err(Error::BeyondFile { guest, needed: end, size: meta.size() });
        }
        // Hugetlbfs reports its page size as the block size, and maps whole pages only.
        let page = meta.blksize().max(4096);
        if !page.is_power_of_two() {
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        }
        let from = offset & !(page - 1);
        let map_len = (end - from).next_multiple_of(page) as usize;
        let map = mmap(map_len, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd(), from)?;
        // SAFETY: offset - from < page <= map_len.
        let start = unsafe { map.add((offset - from) as usize) };
        let (map, len) = (map.as_ptr() as usize, len as usize);
        Ok(Arc::new(Region {
            start,
            len,
            guest,
            user,
            map,
            map_len,
            watch: Some(sigbus::watch(map, map_len)),
            identity,
        }))
    }

    /// Memory of our own that can be handed to a peer by its file, as a driver does; on hugepages if `huge` and if there
    /// are any free. Its user address is where it is mapped here.
    pub fn create(len: usize, guest: u64, huge: bool) -> Result<(Arc<Region>, File), Error> {
        const HUGE: usize = 2 << 20;
        if huge && let Ok(made) = Self::create_with(len.next_multiple_of(HUGE), guest, libc::MFD_HUGETLB) {
            return Ok(made);
        }
        Self::create_with(len, guest, 0)
    }

    fn create_with(len: usize, guest: u64, flags: libc::c_uint) -> Result<(Arc<Region>, File), Error> {
        // SAFETY: the name is a C string; a new descriptor or -1 comes back.
        let create = |flags| unsafe { libc::memfd_create(c"ringroad".as_ptr(), libc::MFD_CLOEXEC | flags) };
        let mut fd = create(flags | libc::MFD_ALLOW_SEALING);
        if fd < 0 {
            // Hugepages cannot be sealed before Linux 4.16.
            fd = create(flags);
        }
        if fd < 0 {
            return Err(io::Error::last_os_error().into());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len as u64)?;
        let map_len = len.next_multiple_of(4096);
        let populate = if flags == 0 { 0 } else { libc::MAP_POPULATE };
        let start = mmap(map_len, libc::MAP_SHARED | populate, fd, 0)?;
        // SAFETY: advice about a mapping of ours; nothing follows from its failing.
        unsafe { libc::madvise(start.as_ptr().cast(), map_len, libc::MADV_HUGEPAGE) };
        let map = start.as_ptr() as usize;
        Ok((
            Arc::new(Region { start, len, guest, user: map as u64, map, map_len, watch: None, identity: (0, 0) }),
            file,
        ))
    }

    /// Keeps a file of [`Region::create`] from being truncated by whom it is handed to, for ever.
    pub fn seal(file: &File) -> Result<(), Error> {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
        // SAFETY: no memory is involved.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().into()) }
    }

    /// Memory that no peer sees, for staging frames.
    pub fn private(len: usize, guest: u64) -> Result<Arc<Region>, Error> {
        let map_len = len.next_multiple_of(4096);
        let start = mmap(map_len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)?;
        let map = start.as_ptr() as usize;
        Ok(Arc::new(Region { start, len, guest, user: map as u64, map, map_len, watch: None, identity: (0, 0) }))
    }

    /// The bytes from `offset` on; `None` unless they all lie inside.
    #[inline(always)]
    pub fn span(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: checked above; the mapping lives as long as `self`.
        Some(unsafe { Span::new(self.start.add(offset), len) })
    }

    /// All of it.
    #[inline(always)]
    pub(crate) fn whole(&self) -> Span<'_> {
        // SAFETY: the mapping lives as long as `self`.
        unsafe { Span::new(self.start, self.len) }
    }

    /// Its first guest address.
    #[inline(always)]
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// Its first address in the frontend.
    #[inline(always)]
    pub fn user(&self) -> u64 {
        self.user
    }

    /// Its size in bytes.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Device and inode of its file, if it is a peer's: what tells it from other memory at the same addresses.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// The address space that it takes up, in bytes: whole pages of its file system.
    pub fn mapped(&self) -> usize {
        self.map_len
    }

    /// Whether the peer has truncated its file under us. What is read from here on are zeros.
    pub fn is_lost(&self) -> bool {
        self.watch.is_some_and(Watch::is_lost)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(watch) = self.watch {
            watch.release();
        }
        // SAFETY: exactly the mapping made in a constructor; spans borrow the region and words hold it, so none is left.
        unsafe { libc::munmap(self.map as *mut _, self.map_len) };
    }
}

fn mmap(len: usize, flags: libc::c_int, fd: libc::c_int, offset: u64) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no existing one.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, offset as libc::off_t) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap returned null"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    fn file(len: u64) -> File {
        let (_, file) = Region::create(len as usize, 0, false).unwrap();
        file
    }

    #[test]
    fn maps_at_any_offset() {
        let file = file(16384);
        let whole = Region::map(&file, 0, 16384, 0, 0).unwrap();
        let part = Region::map(&file, 5000, 100, 0x10_0000, 0x7000_0000).unwrap();
        part.span(0, 100).unwrap().write(b"abc");
        let mut out = [0; 3];
        whole.span(5000, 3).unwrap().read(&mut out);
        assert_eq!(&out, b"abc");
        assert!(part.span(100, 0).is_some() && part.span(100, 1).is_none() && part.span(101, 0).is_none());
        assert!(part.span(1, usize::MAX).is_none());
    }

    #[test]
    fn refuses_lies() {
        let file = file(4096);
        assert!(matches!(Region::map(&file, 0, 0, 0, 0), Err(Error::Empty { .. })));
        assert!(matches!(Region::map(&file, 0, 4097, 0, 0), Err(Error::BeyondFile { .. })));
        assert!(matches!(Region::map(&file, 4096, 1, 0, 0), Err(Error::BeyondFile { .. })));
        assert!(matches!(Region::map(&file, u64::MAX, 2, 0, 0), Err(Error::Overflow { .. })));
        assert!(matches!(Region::map(&file, 0, 4096, u64::MAX, 0), Err(Error::Overflow { .. })));
        assert!(matches!(Region::map(&file, 0, 4096, 0, u64::MAX - 4094), Err(Error::Overflow { .. })));
        let null = OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
        assert!(Region::map(&null, 0, 4096, 0, 0).is_err());
    }

    #[test]
    fn truncation_costs_the_region_only() {
        let (file, other) = (file(16384), file(4096));
        let region = Region::map(&file, 0, 16384, 0, 0).unwrap();
        let neighbour = Region::map(&other, 0, 4096, 0, 0).unwrap();
        region.span(0, 1).unwrap().write(&[7]);
        neighbour.span(0, 1).unwrap().write(&[9]);
        let before = faults();
        file.set_len(4096).unwrap();
        let mut byte = [1];
        region.span(8192, 1).unwrap().read(&mut byte);
        assert_eq!(byte, [0]);
        assert!(region.is_lost() && !neighbour.is_lost());
        assert!(faults() > before);
        region.span(16383, 1).unwrap().write(&[1]);
        neighbour.span(0, 1).unwrap().read(&mut byte);
        assert_eq!(byte, [9]);
        drop(region);
        assert!(!Region::map(&file, 0, 4096, 0, 0).unwrap().is_lost(), "a used entry starts clean");
    }

    #[test]
    fn a_file_that_is_sealed_stays_as_long_as_it_is() {
        let (region, file) = Region::create(8192, 0, false).unwrap();
        Region::seal(&file).unwrap();
        for _ in 0..2 {
            assert!(file.set_len(4096).is_err());
            assert!(Region::seal(&file).is_err(), "nor can the seal be changed");
        }
        region.span(8191, 1).unwrap().write(&[1]);
        assert!(!region.is_lost());
        let peer = Region::map(&file, 0, 8192, 0, 0).unwrap();
        let mut byte = [0];
        peer.span(8191, 1).unwrap().read(&mut byte);
        assert_eq!(byte, [1]);
    }

    use crate::faults;
}
