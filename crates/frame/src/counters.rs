//! What happened at a queue. One side counts, anybody may read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A count that one thread at a time increases and any thread reads: a plain load and store, no locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        if n > 0 {
            self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        }
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What happened at one queue of a port, in one direction.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter),* }

        /// [`Counters`] at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Snapshot { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            /// Their values now.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.get()),* }
            }
        }

        impl Snapshot {
            /// Each counter with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }

        impl std::ops::AddAssign for Snapshot {
            fn add_assign(&mut self, other: Snapshot) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Frames that passed.
    frames,
    /// Their bytes, from the destination address to the end of the payload.
    bytes,
    /// Frames for which the receiver had no buffers.
    full,
    /// Frames longer than the port's MTU allows or than the receiver's buffers, or in more pieces than a burst holds.
    oversize,
    /// Frames too short to have addresses.
    runt,
    /// Frames to everybody beyond the limit of the port that they came from.
    storm,
    /// Frames with a source address that the port may not use.
    spoofed,
    /// Frames to link-local addresses, which are not forwarded.
    link_local,
    /// Frames with a source address that was, or is, another port's: it has moved, or was not learned.
    claimed,
    /// Frames with a source address that there was no room for in the forwarding table: it was not learned.
    crowded,
    /// Frames that came while the queue was not running.
    stopped,
    /// Frames that came while control was at work on the queue.
    busy,
    /// Faults of the driver, each of which stopped the queue.
    faults,
    /// Panics of our own code, each of which stopped the port: bugs.
    panics,
    /// Notifications sent to the driver.
    notifications,
    /// Bursts.
    bursts,
}

impl Snapshot {
    /// Frames that did not arrive, whatever the reason.
    pub fn dropped(&self) -> u64 {
        let switched = self.storm + self.spoofed + self.link_local;
        self.full + self.oversize + self.runt + self.stopped + self.busy + switched
    }
}
