//! One memory mapping shared with a peer. Created by the vhost-user session (SET_MEM_TABLE, ADD_MEM_REG), by the vfio-user
//! session (DMA_MAP), by drivers for their own memory, and for files that must outlive the process.

use crate::{
    sigbus::{self, Watch},
    span::Span,
    zeros,
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

/// Errors from mapping a peer's memory and from changing a [`crate::Table`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The region has size 0.
    #[error("memory region at guest address {guest:#x} is empty")]
    Empty {
        /// Guest address of the region.
        guest: u64,
    },
    /// The address range does not fit into 64 bits.
    #[error(
        "memory region at guest address {guest:#x}, user address {user:#x}, offset {offset:#x}: {len:#x} bytes run past the end of the address space"
    )]
    Overflow {
        /// Guest address of the region.
        guest: u64,
        /// Address of the region in the frontend.
        user: u64,
        /// Offset of the region in its file.
        offset: u64,
        /// Size of the region in bytes.
        len: u64,
    },
    /// The file is shorter than the region.
    #[error("memory region at guest address {guest:#x} needs {needed:#x} bytes of its file, which has {size:#x}")]
    BeyondFile {
        /// Guest address of the region.
        guest: u64,
        /// End of the region in its file: offset plus size.
        needed: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The region overlaps another one in guest or user addresses.
    #[error("memory region at guest address {guest:#x} + {len:#x} overlaps the one at {other:#x} + {other_len:#x}")]
    Overlap {
        /// Guest address of the region.
        guest: u64,
        /// Size of the region in bytes.
        len: u64,
        /// Guest address of the other region.
        other: u64,
        /// Size of the other region in bytes.
        other_len: u64,
    },
    /// The table already holds the maximum number of regions.
    #[error("more than {} memory regions", crate::SLOTS)]
    TooMany,
    /// The region to remove does not exist.
    #[error("no memory region at guest address {guest:#x}, user address {user:#x} with {len:#x} bytes")]
    Unknown {
        /// Guest address of the region.
        guest: u64,
        /// Address of the region in the frontend.
        user: u64,
        /// Size of the region in bytes.
        len: u64,
    },
    /// A system call failed.
    #[error("cannot map memory: {0}")]
    Map(#[from] io::Error),
}

/// One mapping, with its guest address and its address in the frontend ("user address").
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    guest: u64,
    user: u64,
    map: usize,
    map_len: usize,
    watch: Option<&'static Watch>,
    /// Device and inode of the file received from the peer.
    identity: (u64, u64),
    /// Nothing written here reaches the peer's file.
    read_only: bool,
}

impl std::fmt::Debug for Region {
    /// Where it is and how long, not what is in it.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Region").field("guest", &self.guest).field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: the mapping belongs to no thread; all access goes through spans and words.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of a peer's file, starting at `offset`. The file may be on hugetlbfs.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::Overflow`], [`Error::BeyondFile`] if the file is too short, [`Error::Map`] if a system
    /// call fails.
    pub fn map(file: &File, offset: u64, len: u64, guest: u64, user: u64) -> Result<Arc<Region>, Error> {
        Self::map_with(file, offset, len, guest, user, libc::MAP_SHARED)
    }

    /// Like [`Region::map`], for memory that the device may only read; the file need not be open for writing. A [`crate::Table`]
    /// finds it with [`crate::Table::readable`] only.
    ///
    /// The mapping is private: its spans stay valid for writes, as all spans are, but what is written never reaches the file. So a
    /// device that writes by mistake neither changes the peer's memory nor ends the process. Until then it shows the file.
    ///
    /// # Errors
    /// As for [`Region::map`].
    pub fn map_read_only(file: &File, offset: u64, len: u64, guest: u64, user: u64) -> Result<Arc<Region>, Error> {
        Self::map_with(file, offset, len, guest, user, libc::MAP_PRIVATE)
    }

    fn map_with(
        file: &File,
        offset: u64,
        len: u64,
        guest: u64,
        user: u64,
        sharing: libc::c_int,
    ) -> Result<Arc<Region>, Error> {
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
        // hugetlbfs reports its page size as the block size and maps whole pages only.
        let page = meta.blksize().max(4096);
        if !page.is_power_of_two() {
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        }
        let from = offset & !(page - 1);
        let map_len = (end - from).next_multiple_of(page) as usize;
        zeros::prepare()?;
        let map = mmap(map_len, sharing | libc::MAP_NORESERVE, file.as_raw_fd(), from)?;
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
            read_only: sharing == libc::MAP_PRIVATE,
        }))
    }

    /// Allocates memory in a new file that can be passed to a peer, as a driver does; on hugepages if `huge` is set and
    /// enough are free. Its user address is its address in this process.
    ///
    /// # Errors
    /// [`Error::Map`] if the system has no memory, address space or descriptor left.
    pub fn create(len: usize, guest: u64, huge: bool) -> Result<(Arc<Region>, File), Error> {
        const HUGE: usize = 2 << 20;
        if huge && let Ok(made) = Self::create_with(len.next_multiple_of(HUGE), guest, libc::MFD_HUGETLB) {
            return Ok(made);
        }
        Self::create_with(len, guest, 0)
    }

    fn create_with(len: usize, guest: u64, flags: libc::c_uint) -> Result<(Arc<Region>, File), Error> {
        // SAFETY: the name is a C string; the call returns a new descriptor or -1.
        let create = |flags| unsafe { libc::memfd_create(c"ringroad".as_ptr(), libc::MFD_CLOEXEC | flags) };
        let mut fd = create(flags | libc::MFD_ALLOW_SEALING);
        if fd < 0 {
            // Linux before 4.16 cannot seal hugepage files.
            fd = create(flags);
        }
        if fd < 0 {
            return Err(io::Error::last_os_error().into());
        }
        // SAFETY: a new descriptor with no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len as u64)?;
        let map_len = len.next_multiple_of(4096);
        let populate = if flags == 0 { 0 } else { libc::MAP_POPULATE };
        let start = mmap(map_len, libc::MAP_SHARED | populate, fd, 0)?;
        // SAFETY: advice about a mapping that this function owns; failure is harmless.
        unsafe { libc::madvise(start.as_ptr().cast(), map_len, libc::MADV_HUGEPAGE) };
        Ok((Arc::new(Region::own(start, len, guest, map_len)), file))
    }

    /// Memory of this process, with its user address.
    fn own(start: NonNull<u8>, len: usize, guest: u64, map_len: usize) -> Region {
        let map = start.as_ptr() as usize;
        let (user, watch, identity) = (map as u64, None, (0, 0));
        Region { start, len, guest, user, map, map_len, watch, identity, read_only: false }
    }

    /// Seals a file from [`Region::create`] so that no peer can ever truncate it.
    ///
    /// # Errors
    /// [`Error::Map`] if the file cannot be sealed (on hugepages: before Linux 4.16) or is sealed already.
    pub fn seal(file: &File) -> Result<(), Error> {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
        // SAFETY: the call accesses no memory.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().into()) }
    }

    /// Allocates private memory that no peer sees, for staging frames.
    ///
    /// # Errors
    /// [`Error::Map`] if the system has no memory or address space left.
    pub fn private(len: usize, guest: u64) -> Result<Arc<Region>, Error> {
        let map_len = len.next_multiple_of(4096);
        let start = mmap(map_len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)?;
        Ok(Arc::new(Region::own(start, len, guest, map_len)))
    }

    /// Returns the `len` bytes at `offset`; `None` unless all of them lie inside the region.
    #[inline(always)]
    pub fn span(&self, offset: usize, len: usize) -> Option<Span<'_>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: bounds checked above; the mapping lives as long as `self`.
        Some(unsafe { Span::new(self.start.add(offset), len) })
    }

    /// Returns the whole region.
    #[inline(always)]
    pub(crate) fn whole(&self) -> Span<'_> {
        // SAFETY: the mapping lives as long as `self`.
        unsafe { Span::new(self.start, self.len) }
    }

    /// First guest address.
    #[inline(always)]
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// First address in the frontend.
    #[inline(always)]
    pub fn user(&self) -> u64 {
        self.user
    }

    /// Size in bytes.
    #[inline(always)]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Device and inode of the peer's file, which distinguish it from other memory at the same addresses. (0, 0) for memory
    /// that did not come from a peer.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Mapped address space in bytes: whole pages of the file system.
    pub fn mapped(&self) -> usize {
        self.map_len
    }

    /// Returns whether it is from [`Region::map_read_only`].
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns whether the peer has truncated the file. From then on the region reads as zeros.
    pub fn is_lost(&self) -> bool {
        self.watch.is_some_and(Watch::is_lost)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(watch) = self.watch
            && watch.release()
            && !zeros::discard(self.map, self.map_len)
        {
            // Addresses are lost, but nothing of this peer shows elsewhere.
            return;
        }
        // SAFETY: exactly the mapping made in a constructor. Spans borrow the region and words hold a reference to it, so
        // none is left.
        unsafe { libc::munmap(self.map as *mut _, self.map_len) };
    }
}

fn mmap(len: usize, flags: libc::c_int, fd: libc::c_int, offset: u64) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel touches no existing one.
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
    fn a_read_only_region_shows_the_file_and_never_changes_it() {
        let file = file(8192);
        let shared = Region::map(&file, 0, 8192, 0, 0).unwrap();
        let reader = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        assert!(Region::map(&reader, 0, 8192, 0, 0).is_err(), "not open for writing");
        let region = Region::map_read_only(&reader, 0, 8192, 0, 0).unwrap();
        assert!(region.is_read_only() && !shared.is_read_only());
        let read = |region: &Region| region.span(4096, 4).unwrap().array::<4>(0).unwrap();
        for bytes in [*b"once", *b"more"] {
            shared.span(4096, 4).unwrap().write(&bytes);
            assert_eq!(read(&region), bytes);
        }
        region.span(4096, 4).unwrap().write(b"lost");
        assert_eq!(read(&shared), *b"more");
        file.set_len(4096).unwrap();
        assert_eq!((read(&shared), shared.is_lost()), ([0; 4], true));
    }

    #[test]
    fn rejects_invalid_regions() {
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
    fn truncation_affects_only_its_own_region() {
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
        assert!(!Region::map(&file, 0, 4096, 0, 0).unwrap().is_lost(), "a reused watch entry must start clean");
    }

    #[test]
    fn a_sealed_file_cannot_be_truncated() {
        let (region, file) = Region::create(8192, 0, false).unwrap();
        Region::seal(&file).unwrap();
        for _ in 0..2 {
            assert!(file.set_len(4096).is_err());
            assert!(Region::seal(&file).is_err(), "the seals themselves are sealed");
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
