//! What replaces a mapping whose file a peer has truncated. Called by `sigbus.rs`, also in its signal handler, so it must not
//! fail where memory is accounted strictly (`vm.overcommit_memory=2`, RLIMIT_DATA): there a private writable mapping counts in
//! full, used or not, and one as large as a guest is refused.
//!
//! A shared mapping of a file counts only the pages that are touched. So all replacements are mappings of one empty memfd, each
//! at the offset that equals its address: no two have a page in common, and its pages are freed before its addresses can be
//! reused. No guest ever finds there what was written for another. If even a page that is touched cannot be had, one takes its
//! place that was set aside before.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd},
    ptr,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Size of the file in bytes: beyond all addresses.
const SIZE: u64 = 1 << 60;
/// Pages that are set aside. A port stops at the burst in which it loses memory, and touches few pages until then.
const SPARES: usize = 256;

static FILE: OnceLock<File> = OnceLock::new();
/// Addresses of the pages set aside; 0: none.
static SPARE: [AtomicUsize; SPARES] = [const { AtomicUsize::new(0) }; SPARES];

/// Must succeed before a peer's file is mapped: creates the file, and sets pages aside in place of those that were used.
pub(crate) fn prepare() -> io::Result<()> {
    static LOCK: Mutex<()> = Mutex::new(());
    let _one = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if FILE.get().is_none() {
        let _ = FILE.set(create()?);
    }
    for spare in SPARE.iter().filter(|spare| spare.load(Ordering::Relaxed) == 0) {
        spare.store(new_page().ok_or_else(io::Error::last_os_error)?, Ordering::Release);
    }
    Ok(())
}

fn create() -> io::Result<File> {
    // SAFETY: the name is a C string; the call returns a new descriptor or -1.
    let fd = unsafe { libc::memfd_create(c"ringroad zeros".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor with no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to `limit` only.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
    // With a limit on the size of files (a signal that ends the process), it stays empty, and all pages are single ones.
    if known && limit.rlim_cur >= SIZE {
        file.set_len(SIZE)?;
    }
    Ok(file)
}

/// Maps zeros over a whole mapping of this process. Calls nothing that a signal handler may not call.
pub(crate) fn replace(start: usize, len: usize) -> bool {
    let Some(file) = FILE.get() else { return false };
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE);
    // SAFETY: the caller has this mapping, and none but its peer's pages are replaced.
    let zeros = unsafe { libc::mmap(start as *mut _, len, protection, flags, file.as_raw_fd(), start as libc::off_t) };
    zeros != libc::MAP_FAILED
}

/// Maps a private page of zeros over the one at an address in a mapping that was replaced. Calls nothing that a signal handler may
/// not call.
pub(crate) fn replace_page(address: usize) -> bool {
    let spare = || SPARE.iter().map(|spare| spare.swap(0, Ordering::AcqRel)).find(|&page| page != 0);
    let Some(page) = new_page().or_else(spare) else { return false };
    let (len, flags) = (page_size(), libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    let place = address / len * len;
    // Moving a page counts nothing, and the place is never unmapped in between.
    // SAFETY: `page` is a page that nobody uses, and `place` is one of the caller's mapping.
    unsafe { libc::mremap(page as *mut _, len, len, flags, place as *mut libc::c_void) != libc::MAP_FAILED }
}

/// Frees the pages of a replaced mapping, so that what replaces others at these addresses later is zeros, too. If that fails, the
/// addresses must not be reused.
pub(crate) fn discard(start: usize, len: usize) -> bool {
    // Again over the whole of it: single pages split the mapping.
    // SAFETY: the mapping is the caller's, whose pages are no longer used.
    replace(start, len) && unsafe { libc::madvise(start as *mut _, len, libc::MADV_REMOVE) } == 0
}

fn new_page() -> Option<usize> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address chosen by the kernel touches no existing one.
    let page = unsafe { libc::mmap(ptr::null_mut(), page_size(), protection, flags, -1, 0) };
    (page != libc::MAP_FAILED).then_some(page as usize)
}

fn page_size() -> usize {
    // SAFETY: the call accesses no memory.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;
    use std::process::Command;

    const PAGE: u64 = 4096;

    /// Runs a test in a process of its own, as it changes what the whole process has. Returns whether this is that process.
    #[track_caller]
    fn alone(test: &str) -> bool {
        const CHILD: &str = "RINGROAD_TEST_ALONE";
        if std::env::var_os(CHILD).is_some() {
            return true;
        }
        // By an emulator, if `RINGROAD_RUNNER` is one.
        let runner = std::env::var("RINGROAD_RUNNER").unwrap_or_default();
        let program = std::env::current_exe().unwrap().into_os_string();
        let mut words = runner.split_whitespace().map(Into::into).chain([program]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words);
        let name = format!("zeros::tests::{test}");
        let output = command.args(["--exact", &name, "--test-threads=1"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
        false
    }

    /// Calls `attempt` while the process has no private memory left. It must not allocate.
    fn without_memory<T>(attempt: impl FnOnce() -> T) -> T {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes to `limit` only.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_DATA, &mut limit) }, 0);
        // Linux does not enforce a limit of 0.
        let none = libc::rlimit { rlim_cur: PAGE, ..limit };
        // SAFETY: limits what mmap and brk may do.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &none) }, 0);
        let refused = new_page().is_none();
        let result = attempt();
        // SAFETY: as above.
        unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) };
        assert!(refused, "private memory was not refused");
        result
    }

    /// Returns a region of these pages whose file has been truncated to nothing.
    fn lost(pages: u64) -> std::sync::Arc<Region> {
        let (_, file) = Region::create((pages * PAGE) as usize, 0, false).unwrap();
        let region = Region::map(&file, 0, pages * PAGE, 0, 0).unwrap();
        file.set_len(0).unwrap();
        region
    }

    /// Reads a byte of each page, writes it, and reads it again.
    fn touch(region: &Region, pages: u64) -> bool {
        (0..pages).all(|page| {
            let span = region.span((page * PAGE) as usize + 8, 1).unwrap();
            let mut byte = [1];
            span.read(&mut byte);
            let before = byte[0];
            span.write(&[7]);
            span.read(&mut byte);
            (before, byte[0]) == (0, 7)
        })
    }

    #[test]
    fn a_truncation_is_survived_without_private_memory() {
        if alone("a_truncation_is_survived_without_private_memory") {
            let region = lost(1 << 16);
            assert!(without_memory(|| touch(&region, 100)));
            assert!(region.is_lost());
        }
    }

    #[test]
    fn a_truncation_is_survived_without_shared_memory() {
        if alone("a_truncation_is_survived_without_shared_memory") {
            prepare().unwrap();
            // As if the system had no page for it.
            FILE.get().unwrap().set_len(0).unwrap();
            let first = lost(1000);
            assert!(touch(&first, 1000) && touch(&lost(1000), 1000));
            // Nor a private one, other than those set aside, twice.
            for _ in 0..2 {
                let region = lost(1000);
                let pages = SPARES as u64 - 1;
                assert!(without_memory(|| touch(&region, pages)));
                // A word across two such pages.
                let word = region.span(2 * PAGE as usize - 4, 8).unwrap();
                word.write(&[9; 8]);
                assert_eq!(word.array::<8>(0), Some([9; 8]));
                assert!(region.is_lost());
            }
            assert!(!touch(&first, 1), "what was written before is kept");
        }
    }

    #[test]
    fn what_replaces_a_mapping_is_never_seen_in_another() {
        if alone("what_replaces_a_mapping_is_never_seen_in_another") {
            let (one, two) = (lost(100), lost(100));
            assert!(touch(&one, 100) && touch(&two, 100));
            let at = |region: &Region| region.span(0, 1).unwrap().as_ptr().addr();
            let places = [at(&one), at(&two)];
            let blocks = || std::os::unix::fs::MetadataExt::blocks(&FILE.get().unwrap().metadata().unwrap());
            assert_eq!(blocks() * 512, 200 * PAGE);
            drop((one, two));
            assert_eq!(blocks(), 0, "pages must be freed");
            let next = lost(100);
            assert!(places.contains(&at(&next)), "expected the kernel to use the addresses again");
            assert!(touch(&next, 100));
        }
    }
}
