//! What the registers and the queues of a device share. The registers' thread changes the setup under a short lock and counts
//! generations; a queue compares the generation once per burst and copies the setup when it has changed. Tails, heads and events
//! are atomics. Nothing here waits for a copy of frames.

#[cfg(all(test, loom))]
mod model;

use crate::{
    filter::{ADDRESSES, Filter},
    interrupts::{Interrupts, Mitigation},
    statistics::Statistics,
    sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering, fence},
};
use ringroad_frame::Counter;

/// Where the staging memory of the transmit queue lies among the guest's addresses. No descriptor and no ring may name it, and no
/// guest has memory there: the queue refuses a table with such a region.
pub(crate) const STAGING: u64 = 0xffff_ffff_0000_0000;

/// Base and length of a ring as in the registers, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingSetup {
    pub base: u64,
    pub len: u32,
    /// The queue is enabled, the device may access memory, and there is a link.
    pub runs: bool,
}

/// All that the registers tell the queues.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    /// Number of resets.
    pub resets: u32,
    pub tx: RingSetup,
    pub rx: RingSetup,
    pub rctl: u32,
    pub rxcsum: u32,
    /// CTRL.VME: tags are stripped and inserted.
    pub vme: bool,
    pub vet: u16,
    pub filter: Filter,
}

/// Tail and head of a ring. The tail is written by the registers and read by the queue once per burst, the head the other way;
/// each has a cache line of its own.
#[derive(Debug, Default)]
pub(crate) struct Cursors {
    tail: Line<AtomicU32>,
    /// The head, and above it how often it was set by software: a burst in flight at that time does not publish its own.
    head: Line<AtomicU64>,
}

#[repr(align(64))]
#[derive(Debug, Default)]
struct Line<T>(T);

impl Cursors {
    pub fn tail(&self) -> u32 {
        self.tail.0.load(Ordering::Acquire)
    }

    pub fn set_tail(&self, tail: u32) {
        self.tail.0.store(tail, Ordering::Release);
    }

    /// Returns the head and its epoch.
    pub fn head(&self) -> (u32, u32) {
        let word = self.head.0.load(Ordering::Acquire);
        (word as u32, (word >> 32) as u32)
    }

    /// For the registers: sets the head.
    pub fn set_head(&self, head: u32) {
        let next = |word: u64| Some((word >> 32).wrapping_add(1) << 32 | u64::from(head));
        let _ = self.head.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// For the registers: the ring has changed, the head has not.
    pub fn renew(&self) {
        let next = |word: u64| Some((word >> 32).wrapping_add(1) << 32 | word & 0xffff_ffff);
        let _ = self.head.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    /// For the queue: moves the head, unless software has set it meanwhile.
    #[inline]
    pub fn publish(&self, epoch: u32, before: u32, head: u32) {
        let word = |head: u32| u64::from(epoch) << 32 | u64::from(head);
        let _ = self.head.0.compare_exchange(word(before), word(head), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Whether a worker is to be woken when a tail moves.
#[derive(Debug)]
pub struct Bell {
    wanted: AtomicBool,
}

impl Default for Bell {
    /// It is.
    fn default() -> Bell {
        Bell { wanted: AtomicBool::new(true) }
    }
}

impl Bell {
    /// For the registers' thread, after it has stored a tail. Returns whether to wake the worker: once, as many tails may move
    /// before it runs.
    #[inline]
    pub fn ring(&self) -> bool {
        // Pairs with `want`: either the worker sees the tail, or this thread that it wants to be woken.
        fence(Ordering::SeqCst);
        let wanted = self.wanted.load(Ordering::Relaxed);
        if wanted {
            // If the worker has asked again meanwhile: it is woken now.
            self.wanted.store(false, Ordering::Relaxed);
        }
        wanted
    }

    /// For the worker, before it looks at the tail for the last time.
    pub fn want(&self) {
        self.wanted.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// For the worker, which looks at the tail by itself.
    pub fn unwant(&self) {
        self.wanted.store(false, Ordering::Relaxed);
    }
}

/// Which way an interrupt takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// INTA.
    Line,
    /// MSI.
    Message,
}

/// What is to be done about interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Interrupt the driver now, once.
    pub raise: Option<Vector>,
    /// When to ask again if nothing happens before, in nanoseconds of the same clock; `None`: need not.
    pub at: Option<u64>,
}

/// Interrupts, and the way they take.
#[derive(Debug)]
pub(crate) struct Signals {
    pub interrupts: Interrupts,
    /// The line may be asserted, and messages are off.
    pub line: bool,
    pub message: bool,
    /// The line is asserted.
    level: bool,
    /// Number of interrupts.
    raised: u64,
}

impl Signals {
    fn settle(&mut self, now: u64) -> Signal {
        let settled = self.interrupts.settle(now);
        let level = self.line && self.interrupts.is_asserted();
        let rose = level && (settled.raised || !self.level);
        self.level = level;
        let raise = if self.message && settled.raised { Some(Vector::Message) } else { rose.then_some(Vector::Line) };
        self.raised += u64::from(raise.is_some());
        Signal { raise, at: settled.at }
    }
}

/// What both sides share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub setup: Mutex<Setup>,
    generation: AtomicU32,
    pub tx: Cursors,
    pub rx: Cursors,
    /// What the queues have to report to the interrupts.
    events: AtomicU32,
    signals: Mutex<Signals>,
    pub statistics: Statistics,
    pub reads: Counter,
    pub writes: Counter,
}

impl Shared {
    pub fn new(mitigation: Mitigation) -> Shared {
        let interrupts = Interrupts::new(mitigation);
        let signals = Signals { interrupts, line: true, message: false, level: false, raised: 0 };
        Shared {
            setup: Mutex::new(Setup::default()),
            // No queue has seen it yet.
            generation: AtomicU32::new(1),
            tx: Cursors::default(),
            rx: Cursors::default(),
            events: AtomicU32::new(0),
            signals: Mutex::new(signals),
            statistics: Statistics::default(),
            reads: Counter::default(),
            writes: Counter::default(),
        }
    }

    /// Changes the setup.
    pub fn configure(&self, change: impl FnOnce(&mut Setup)) {
        let mut setup = self.setup.lock();
        change(&mut setup);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// For the registers: stops the queues and forgets what they have reported. The registers have their initial values.
    pub fn reset(&self, vet: u16, addresses: &[u32; 2 * ADDRESSES]) {
        // First the queues stop, then their cursors move: see `tail`.
        self.configure(|setup| {
            *setup = Setup { resets: setup.resets.wrapping_add(1), vet, ..Setup::default() };
            setup.filter.set_addresses(addresses);
        });
        for cursors in [&self.tx, &self.rx] {
            cursors.set_tail(0);
            cursors.set_head(0);
        }
        // Whoever saw the queues stop may have seen the old heads.
        self.configure(|_| ());
        self.reset_events();
        self.with_signals(0, |signals| signals.interrupts.reset());
    }

    #[inline(always)]
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// For a queue that knows the setup of this generation: returns the tail that belongs to it, or `None` if the setup has changed.
    #[inline(always)]
    pub fn tail(&self, cursors: &Cursors, generation: u32) -> Option<u32> {
        if generation != self.generation() {
            return None;
        }
        let tail = cursors.tail();
        // A reset stops the queue before it moves the tail.
        (generation == self.generation()).then_some(tail)
    }

    /// Reports events of a queue; [`Shared::settle`] is to be called then.
    #[inline]
    pub fn report(&self, events: u32) {
        self.events.fetch_or(events, Ordering::Release);
    }

    /// Calls `act` with the interrupts, which know all that the queues have reported so far.
    pub fn with_signals<R>(&self, now: u64, act: impl FnOnce(&mut Signals) -> R) -> R {
        let mut signals = self.signals.lock();
        let none = self.events.load(Ordering::Relaxed) == 0;
        let events = if none { 0 } else { self.events.swap(0, Ordering::Acquire) };
        signals.interrupts.post(events, now);
        act(&mut signals)
    }

    pub fn settle(&self, now: u64) -> Signal {
        self.with_signals(now, |signals| signals.settle(now))
    }

    /// Forgets what the queues have reported.
    pub fn reset_events(&self) {
        self.events.store(0, Ordering::Relaxed);
    }

    pub fn level(&self) -> bool {
        let signals = self.signals.lock();
        signals.line && signals.interrupts.is_asserted()
    }

    pub fn asserted(&self) -> bool {
        self.signals.lock().interrupts.is_asserted()
    }

    pub fn raised(&self) -> u64 {
        self.signals.lock().raised
    }
}
