//! What happens when a peer truncates a file that is mapped here: touching the missing pages raises SIGBUS. The handler
//! puts private zeros in the place of the whole mapping and marks it, so that the access completes; whoever works for
//! that peer sees the mark at its next burst and stops the port (see `Region::is_lost`).

use std::{
    mem::MaybeUninit,
    ptr,
    sync::{
        Once, OnceLock,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
};

/// A mapping that the handler knows. Entries are never freed, only used again: the handler may read the list at any time.
///
/// `state` is the one word that decides: which use of the entry this is, and what it is in. Start and length are written by whoever
/// has claimed the entry (`SETUP`) and published by the store of `LIVE`. The handler reads state, start and length, and then
/// moves the state it has read to `MENDING`: that fails if the entry was released, or used again, in between, so that start and
/// length are of one use, which is alive. While it is `MENDING`, [`Watch::release`] waits, so that the mapping cannot
/// be unmapped, nor its addresses be given to anybody else, before the handler is through.
pub(crate) struct Watch {
    state: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
    next: AtomicPtr<Watch>,
}

/// Nobody's.
const FREE: u64 = 0;
/// Claimed for a mapping, not to be looked at yet.
const SETUP: u64 = 1;
/// A mapping that is there.
const LIVE: u64 = 2;
/// The handler is replacing it.
const MENDING: u64 = 3;
/// The same, replaced by zeros.
const LOST: u64 = 4;
const STATES: u64 = 7;
/// From one use of an entry to the next.
const USE: u64 = 8;

/// What the handler has found.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Not in this mapping.
    Elsewhere,
    /// In this mapping (start, length), which is now the caller's to replace.
    Mine(usize, usize),
    /// In this mapping, which another thread has replaced meanwhile: the access can be tried again.
    Mended,
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
    let entry = entries().find(|entry| entry.claim()).unwrap_or_else(new_entry);
    entry.publish(start, len);
    entry
}

impl Watch {
    pub(crate) fn is_lost(&self) -> bool {
        self.state.load(Ordering::Acquire) & STATES == LOST
    }

    /// To be called before the mapping is unmapped.
    pub(crate) fn release(&self) {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            if state & STATES == MENDING {
                std::hint::spin_loop();
                state = self.state.load(Ordering::Acquire);
                continue;
            }
            // The next use has another number: whoever has read this one's start and length does not mistake it.
            let free = (state & !STATES).wrapping_add(USE) | FREE;
            match self.state.compare_exchange(state, free, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
    }

    /// Takes an entry that is nobody's.
    fn claim(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        state & STATES == FREE
            && self.state.compare_exchange(state, state | SETUP, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Gives an entry that was claimed its mapping.
    fn publish(&self, start: usize, len: usize) {
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        let state = self.state.load(Ordering::Relaxed);
        self.state.store(state & !STATES | LIVE, Ordering::Release);
    }

    /// Whether an address that was touched lies in this mapping; if so, who replaces it.
    fn find(&self, address: usize) -> Found {
        let state = self.state.load(Ordering::Acquire);
        if state & STATES < LIVE {
            return Found::Elsewhere;
        }
        // Of this use or of a later one; of a later one, the state is not the one that was read any more. The mapping that the
        // address lies in is in use by this very thread, so that its entry does not change: an entry that does is not it.
        let (start, len) = (self.start.load(Ordering::Acquire), self.len.load(Ordering::Acquire));
        if address.checked_sub(start).is_none_or(|offset| offset >= len) {
            return Found::Elsewhere;
        }
        let this = state & !STATES;
        // One that is lost already may have been touched before it was, by another thread than the one that has replaced it; or
        // its zeros are broken (a memory error), and there are new ones.
        if state & STATES != MENDING
            && self.state.compare_exchange(state, this | MENDING, Ordering::AcqRel, Ordering::Acquire).is_ok()
        {
            return Found::Mine(start, len);
        }
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & !STATES != this {
                return Found::Elsewhere;
            }
            if state & STATES == LOST {
                return Found::Mended;
            }
            if state & STATES == LIVE {
                // The other one could not replace it; nor will we.
                return Found::Elsewhere;
            }
            std::hint::spin_loop();
        }
    }

    /// After `Found::Mine`.
    fn mended(&self, lost: bool) {
        let this = self.state.load(Ordering::Relaxed) & !STATES;
        self.state.store(this | if lost { LOST } else { LIVE }, Ordering::Release);
    }
}

fn entries() -> impl Iterator<Item = &'static Watch> {
    // SAFETY: entries are leaked boxes, published by a release store and never freed.
    let load = |link: &AtomicPtr<Watch>| unsafe { link.load(Ordering::Acquire).as_ref() };
    std::iter::successors(load(&LIST), move |entry| load(&entry.next))
}

fn new_entry() -> &'static Watch {
    let entry = Box::leak(Box::new(Watch {
        state: AtomicU64::new(SETUP),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
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
        let (start, len) = match entry.find(address) {
            Found::Elsewhere => continue,
            Found::Mended => return,
            Found::Mine(start, len) => (start, len),
        };
        // SAFETY: [start, start + len) is exactly one mapping of ours, which is not unmapped before its entry is released, and
        // that waits for us; MAP_FIXED replaces its pages and nothing else.
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
        let lost = zeros != libc::MAP_FAILED;
        entry.mended(lost);
        if lost {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicBool, thread};

    fn entry() -> Watch {
        Watch {
            state: AtomicU64::new(FREE),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    #[test]
    fn an_entry_is_what_it_is_now() {
        let entry = entry();
        assert_eq!(entry.find(0x1000), Found::Elsewhere);
        assert!(entry.claim() && !entry.claim());
        assert_eq!(entry.find(0), Found::Elsewhere, "claimed, no mapping yet");
        entry.publish(0x1000, 0x2000);
        for outside in [0, 0xfff, 0x3000, usize::MAX] {
            assert_eq!(entry.find(outside), Found::Elsewhere);
        }
        assert_eq!(entry.find(0x2fff), Found::Mine(0x1000, 0x2000));
        entry.mended(true);
        assert!(entry.is_lost());
        entry.release();
        assert_eq!(entry.find(0x2fff), Found::Elsewhere);
        assert!(entry.claim());
        entry.publish(0x8000, 0x1000);
        assert!(!entry.is_lost());
        assert_eq!((entry.find(0x2fff), entry.find(0x8000)), (Found::Elsewhere, Found::Mine(0x8000, 0x1000)));
        entry.mended(false);
        entry.release();
    }

    #[test]
    fn a_release_waits_for_who_replaces_the_mapping() {
        let entry = entry();
        assert!(entry.claim());
        entry.publish(0x1000, 0x1000);
        assert_eq!(entry.find(0x1800), Found::Mine(0x1000, 0x1000));
        let released = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                entry.release();
                released.store(true, Ordering::Release);
            });
            // Another thread that has touched it waits too, until it may try again.
            let other = scope.spawn(|| entry.find(0x1000));
            thread::sleep(std::time::Duration::from_millis(50));
            assert!(!released.load(Ordering::Acquire), "unmapped under the handler");
            assert!(!other.is_finished());
            entry.mended(true);
            assert!(matches!(other.join().unwrap(), Found::Mended | Found::Elsewhere));
        });
    }

    /// One entry that is released and used again all the time, for mappings of different lengths one after the other; what is
    /// found must be one of them whole, and alive until the finder is through.
    #[test]
    fn a_mapping_that_is_found_is_one_that_is_there() {
        let entry = entry();
        // Were it put together from two, it would reach over addresses of others.
        let mappings = [(0x1000, 0x10_0000), (0x20_0000, 0x1000), (0x8_0000, 0x2000)];
        let (live, found) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let finders: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while !ended.load(Ordering::Relaxed) {
                            for address in [0x1000, 0x8_0800, 0x20_0800, 0x2f_0000] {
                                if let Found::Mine(start, len) = entry.find(address) {
                                    assert!(mappings.contains(&(start, len)), "{start:#x}, {len:#x}");
                                    assert_eq!(live.load(Ordering::Acquire), start, "not there any more");
                                    entry.mended(true);
                                    found.fetch_add(1, Ordering::Relaxed);
                                }
                            }
                        }
                    })
                })
                .collect();
            let begin = std::time::Instant::now();
            for round in 0.. {
                // A finder that has panicked leaves the entry as it is: nobody waits for it.
                let done = found.load(Ordering::Relaxed) > 10_000 && round > 100_000;
                if done || begin.elapsed().as_secs() > 20 || finders.iter().any(|finder| finder.is_finished()) {
                    break;
                }
                let (start, len) = mappings[round % 3];
                assert!(entry.claim());
                live.store(start, Ordering::Release);
                entry.publish(start, len);
                entry.release();
                live.store(0, Ordering::Release);
            }
            ended.store(true, Ordering::Relaxed);
            finders.into_iter().for_each(|finder| finder.join().unwrap());
        });
        assert!(found.into_inner() > 100, "never found while it was there");
    }
}
