//! Counters of a queue. One thread at a time counts, any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter that one thread at a time increments and any thread reads: a plain load and store, no locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        if n > 0 {
            self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        }
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one queue of a port, in one direction.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter),* }

        /// A snapshot of [`Counters`].
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Snapshot { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            /// Returns the current values.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.get()),* }
            }
        }

        impl Snapshot {
            /// Returns the counters with their names.
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
    /// Frames carried.
    frames,
    /// Bytes of these frames, from the destination address to the end of the payload.
    bytes,
    /// Frames dropped because the receiver had no buffers available.
    full,
    /// Frames dropped because they exceed the port's MTU or the receiver's buffers, or have more pieces than a burst holds.
    oversize,
    /// Frames dropped because they are shorter than an Ethernet header.
    runt,
    /// Frames dropped because their offload was not negotiated or does not fit the frame.
    offload,
    /// Flooded frames dropped beyond the sending port's limit.
    storm,
    /// Frames dropped because the port may not use their source address.
    spoofed,
    /// Frames dropped because their destination is a link-local address, which is not forwarded.
    link_local,
    /// Frames dropped because they came from an isolated port and went to another one.
    isolated,
    /// Frames dropped because of their VLAN: the port they came from is not a member of it, or their tag is invalid or in excess.
    vlan,
    /// Frames with a source address of another port: the address has moved, or was not learned. Not drops.
    claimed,
    /// Frames whose source address was not learned because there was no room in the forwarding table. Not drops.
    crowded,
    /// Frames from or to the port that its capture lacks: the file has its size, or is written too slowly. Not drops.
    uncaptured,
    /// Frames that the driver did not want, as it has chosen other addresses or VLANs. Not drops.
    filtered,
    /// Frames dropped because the queue was not running.
    stopped,
    /// Frames dropped because control was reconfiguring the queue.
    busy,
    /// Driver faults, each of which stopped the queue.
    faults,
    /// Panics in our own code, each of which stopped the port: bugs.
    panics,
    /// Notifications sent to the driver.
    notifications,
    /// Notifications received: by the driver, or for frames from an interface. None while the queue is polled.
    kicks,
    /// Frames whose checksum is to be completed by the receiver.
    partial,
    /// Frames to the driver whose checksum was verified before.
    valid,
    /// Frames that are to be segmented by the receiver.
    gso,
    /// Bytes of these.
    gso_bytes,
    /// Bursts.
    bursts,
}

impl Snapshot {
    /// Returns the number of frames dropped, for any reason.
    pub fn dropped(&self) -> u64 {
        let switched = self.storm + self.spoofed + self.link_local + self.isolated + self.vlan;
        self.full + self.oversize + self.runt + self.offload + self.stopped + self.busy + switched
    }
}
