//! SIGBUS handling: a peer can truncate a file that is mapped here, and touching the missing pages then raises SIGBUS. The
//! handler replaces the whole mapping with zeros (`zeros.rs`) and marks it, so that the access completes. The worker sees the
//! mark at its next burst and stops the port (`Region::is_lost`). Called by `region.rs`.

use crate::zeros;
use std::{
    mem::MaybeUninit,
    ptr,
    sync::{
        Once, OnceLock,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
};

/// A mapping known to the handler. Entries are reused but never freed, because the handler may walk the list at any time.
///
/// `state` holds a generation number (which use of the entry this is) and one of the states below. Start and length are
/// written by the thread that claimed the entry (`SETUP`) and published by the store of `LIVE`. The handler reads state,
/// start and length, then changes the state that it has read to `REPLACING` by compare-exchange. That fails if the entry
/// was released or reused in between, so start and length belong to one generation, which is live. [`Watch::release`] waits
/// while the state is `REPLACING`, so the mapping cannot be unmapped, nor its addresses reused, before the handler is done.
pub(crate) struct Watch {
    state: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
    next: AtomicPtr<Watch>,
}

/// Unused.
const FREE: u64 = 0;
/// Claimed for a mapping; start and length are not valid yet.
const SETUP: u64 = 1;
/// Watches a mapping.
const LIVE: u64 = 2;
/// A handler is replacing the mapping.
const REPLACING: u64 = 3;
/// The mapping was replaced by zeros.
const LOST: u64 = 4;
const STATES: u64 = 7;
/// Increment of the generation number.
const USE: u64 = 8;

/// Result of looking up a fault address in an entry.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// The address is not in this mapping.
    Elsewhere,
    /// The address is in this mapping, and the caller must replace it, or the page if the mapping was replaced before.
    Claimed { start: usize, len: usize, lost: bool },
    /// The address is in this mapping, which another thread has just replaced: retry the access.
    Replaced,
}

static LIST: AtomicPtr<Watch> = AtomicPtr::new(ptr::null_mut());
static FAULTS: AtomicU64 = AtomicU64::new(0);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Returns how many mappings have been lost so far in the whole process. A worker checks this one counter and looks at its
/// ports only when it has changed.
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

    /// Must be called before the mapping is unmapped. Waits for a handler that is replacing it. Returns whether it was
    /// replaced.
    pub(crate) fn release(&self) -> bool {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            if state & STATES == REPLACING {
                std::hint::spin_loop();
                state = self.state.load(Ordering::Acquire);
                continue;
            }
            // The new generation number makes the compare-exchange of a handler fail that has read this start and length.
            let free = (state & !STATES).wrapping_add(USE) | FREE;
            match self.state.compare_exchange(state, free, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return state & STATES == LOST,
                Err(now) => state = now,
            }
        }
    }

    /// Claims an unused entry.
    fn claim(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        state & STATES == FREE
            && self.state.compare_exchange(state, state | SETUP, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Sets the mapping of a claimed entry and makes it live.
    fn publish(&self, start: usize, len: usize) {
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        let state = self.state.load(Ordering::Relaxed);
        self.state.store(state & !STATES | LIVE, Ordering::Release);
    }

    /// Looks up a fault address; if it lies in this mapping, decides which thread replaces the mapping.
    fn find(&self, address: usize) -> Found {
        let state = self.state.load(Ordering::Acquire);
        if state & STATES < LIVE {
            return Found::Elsewhere;
        }
        // These may belong to this generation or to a later one; if later, `state` has changed and the exchange below
        // fails. The mapping that contains the fault address is in use by this very thread, so its entry cannot change: an
        // entry that changes is not the right one.
        let (start, len) = (self.start.load(Ordering::Acquire), self.len.load(Ordering::Acquire));
        if address.checked_sub(start).is_none_or(|offset| offset >= len) {
            return Found::Elsewhere;
        }
        let this = state & !STATES;
        // The state may already be `LOST`: another thread touched the page before the mapping was replaced, or this page of
        // zeros cannot be had or is broken (a memory error).
        if state & STATES != REPLACING
            && self.state.compare_exchange(state, this | REPLACING, Ordering::AcqRel, Ordering::Acquire).is_ok()
        {
            return Found::Claimed { start, len, lost: state & STATES == LOST };
        }
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & !STATES != this {
                return Found::Elsewhere;
            }
            if state & STATES == LOST {
                return Found::Replaced;
            }
            if state & STATES == LIVE {
                // The other thread failed to replace it; retrying here would fail too.
                return Found::Elsewhere;
            }
            std::hint::spin_loop();
        }
    }

    /// Ends the replacement that `Found::Claimed` began. `lost`: the mapping was replaced by zeros.
    fn finish(&self, lost: bool) {
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
        // SAFETY: `action` is fully initialised before use; the handler has the signature that SA_SIGINFO requires and uses
        // only atomics, mmap, mremap, sysconf and sigaction.
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
        let (start, len, lost) = match entry.find(address) {
            Found::Elsewhere => continue,
            Found::Replaced => return,
            Found::Claimed { start, len, lost } => (start, len, lost),
        };
        // [start, start + len) is exactly one mapping, which is not unmapped before its entry is released, and the release
        // waits for this handler.
        let replaced = if lost { zeros::replace_page(address) } else { zeros::replace(start, len) };
        entry.finish(replaced);
        if replaced {
            FAULTS.fetch_add(u64::from(!lost), Ordering::Relaxed);
            return;
        }
    }
    // Not one of our mappings: restore the previous disposition and let the access fault again.
    // SAFETY: restores a disposition that sigaction returned, or the default one.
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

    fn claimed(start: usize, len: usize, lost: bool) -> Found {
        Found::Claimed { start, len, lost }
    }

    #[test]
    fn a_reused_entry_matches_only_its_current_mapping() {
        let entry = entry();
        assert_eq!(entry.find(0x1000), Found::Elsewhere);
        assert!(entry.claim() && !entry.claim());
        assert_eq!(entry.find(0), Found::Elsewhere, "claimed, but no mapping yet");
        entry.publish(0x1000, 0x2000);
        for outside in [0, 0xfff, 0x3000, usize::MAX] {
            assert_eq!(entry.find(outside), Found::Elsewhere);
        }
        assert_eq!(entry.find(0x2fff), claimed(0x1000, 0x2000, false));
        entry.finish(true);
        assert!(entry.is_lost());
        assert_eq!(entry.find(0x1000), claimed(0x1000, 0x2000, true));
        entry.finish(true);
        assert!(entry.release());
        assert_eq!(entry.find(0x2fff), Found::Elsewhere);
        assert!(entry.claim());
        entry.publish(0x8000, 0x1000);
        assert!(!entry.is_lost());
        assert_eq!((entry.find(0x2fff), entry.find(0x8000)), (Found::Elsewhere, claimed(0x8000, 0x1000, false)));
        entry.finish(false);
        assert!(!entry.release());
    }

    #[test]
    fn release_waits_until_the_mapping_is_replaced() {
        let entry = entry();
        assert!(entry.claim());
        entry.publish(0x1000, 0x1000);
        assert_eq!(entry.find(0x1800), claimed(0x1000, 0x1000, false));
        let released = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                entry.release();
                released.store(true, Ordering::Release);
            });
            // Another thread that has touched the mapping waits too, until it can retry.
            let other = scope.spawn(|| entry.find(0x1000));
            thread::sleep(std::time::Duration::from_millis(50));
            assert!(!released.load(Ordering::Acquire), "released while the handler was replacing the mapping");
            assert!(!other.is_finished());
            entry.finish(true);
            assert!(matches!(other.join().unwrap(), Found::Replaced | Found::Elsewhere));
        });
    }

    /// Reuses one entry continuously for mappings of different lengths. Every lookup must return one whole mapping, and
    /// that mapping must stay live until the lookup is finished.
    #[test]
    fn a_lookup_never_mixes_two_generations() {
        let entry = entry();
        // Start of one and length of another would cover foreign addresses.
        let mappings = [(0x1000, 0x10_0000), (0x20_0000, 0x1000), (0x8_0000, 0x2000)];
        let (live, found) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let finders: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while !ended.load(Ordering::Relaxed) {
                            for address in [0x1000, 0x8_0800, 0x20_0800, 0x2f_0000] {
                                if let Found::Claimed { start, len, .. } = entry.find(address) {
                                    assert!(mappings.contains(&(start, len)), "{start:#x}, {len:#x}");
                                    assert_eq!(live.load(Ordering::Acquire), start, "the mapping is no longer live");
                                    entry.finish(true);
                                    found.fetch_add(1, Ordering::Relaxed);
                                }
                            }
                        }
                    })
                })
                .collect();
            let begin = std::time::Instant::now();
            for round in 0.. {
                // A finder that has panicked leaves the entry in `REPLACING`; do not wait for it.
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
        assert!(found.into_inner() > 100, "no lookup ever hit a live mapping");
    }
}
