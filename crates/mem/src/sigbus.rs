//! What happens when a peer truncates a file that is mapped here: touching the missing pages raises SIGBUS. The handler
//! puts private zeros in the place of the whole mapping and marks it, so that the access completes; whoever works for
//! that peer sees the mark at its next burst and stops the port (see `Region::is_lost`).

use std::{
    mem::MaybeUninit,
    ptr,
    sync::{
        Once, OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
};

/// A mapping that the handler knows. Entries are never freed, only used again: the handler may read the list at any time.
pub(crate) struct Watch {
    start: AtomicUsize,
    len: AtomicUsize,
    taken: AtomicBool,
    lost: AtomicBool,
    next: AtomicPtr<Watch>,
}

static LIST: AtomicPtr<Watch> = AtomicPtr::new(ptr::null_mut());
static FAULTS: AtomicU64 = AtomicU64::new(0);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// How many mappings have been lost so far, in the whole process: one load tells a worker that it need not look further.
#[inline(always)]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// Watches a mapping until [`Watch::release`].
pub(crate) fn watch(start: usize, len: usize) -> &'static Watch {
    install();
    let entry = free_entry().unwrap_or_else(new_entry);
    entry.lost.store(false, Ordering::Relaxed);
    entry.len.store(len, Ordering::Relaxed);
    entry.start.store(start, Ordering::Release);
    entry
}

impl Watch {
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// To be called before the mapping is unmapped.
    pub(crate) fn release(&self) {
        self.start.store(0, Ordering::Release);
        self.taken.store(false, Ordering::Release);
    }
}

fn entries() -> impl Iterator<Item = &'static Watch> {
    // SAFETY: entries are leaked boxes, published by a release store and never freed.
    let load = |link: &AtomicPtr<Watch>| unsafe { link.load(Ordering::Acquire).as_ref() };
    std::iter::successors(load(&LIST), move |entry| load(&entry.next))
}

fn free_entry() -> Option<&'static Watch> {
    entries().find(|entry| !entry.taken.swap(true, Ordering::AcqRel))
}

fn new_entry() -> &'static Watch {
    let entry = Box::leak(Box::new(Watch {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        taken: AtomicBool::new(true),
        lost: AtomicBool::new(false),
        next: AtomicPtr::new(ptr::null_mut()),
    }));
    let mut head = LIST.load(Ordering::Acquire);
    loop {
        entry.next.store(head, Ordering::Relaxed);
        match LIST.compare_exchange(head, entry, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return entry,
            Err(now) => head = now,
        }
    }
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `action` is fully initialised before it is used; the handler has the signature that SA_SIGINFO asks
        // for and uses only atomics, mmap and sigaction.
        unsafe {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigemptyset(&mut action.sa_mask);
            let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
            if libc::sigaction(libc::SIGBUS, &action, previous.as_mut_ptr()) == 0 {
                let _ = PREVIOUS.set(previous.assume_init());
            }
        }
    });
}

extern "C" fn handler(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let address = unsafe { (*info).si_addr() } as usize;
    for entry in entries() {
        let start = entry.start.load(Ordering::Acquire);
        let len = entry.len.load(Ordering::Relaxed);
        if start == 0 || address < start || address - start >= len {
            continue;
        }
        // SAFETY: [start, start + len) is exactly one mapping of ours, which is in use (it was touched just now) and so
        // cannot be unmapped meanwhile; MAP_FIXED replaces its pages and nothing else.
        let zeros = unsafe {
            libc::mmap(
                start as *mut _,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if zeros != libc::MAP_FAILED {
            entry.lost.store(true, Ordering::Release);
            FAULTS.fetch_add(1, Ordering::Relaxed);
            return;
        }
    }
    // Not ours: let the access fault again under the disposition that was there before.
    // SAFETY: restoring a disposition that sigaction returned, or the default one.
    unsafe {
        match PREVIOUS.get() {
            Some(previous) => libc::sigaction(libc::SIGBUS, previous, ptr::null_mut()),
            None => libc::signal(libc::SIGBUS, libc::SIG_DFL) as libc::c_int,
        };
    }
}
