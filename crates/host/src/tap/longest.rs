//! The longest frame of an interface.

use crate::{quota::Quota, sys};
use ringroad_wire::ethernet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The longest frame that an interface has. Its MTU may change at any time: we ask again when a frame is longer than it says.
#[derive(Debug)]
pub(super) struct Longest {
    interface: String,
    bytes: AtomicUsize,
    /// Each time it is asked is a system call; longer frames can come all the time.
    asks: Quota,
}

impl Longest {
    pub fn new(interface: &str) -> Longest {
        let bytes = AtomicUsize::new(ethernet::longest_frame(1500));
        Longest { interface: interface.to_owned(), bytes, asks: Quota::new(2, 1) }
    }

    pub fn get(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    #[cold]
    pub fn ask(&self) {
        if self.asks.take().is_some() {
            let mtu = sys::mtu(&self.interface).ok().and_then(|mtu| u16::try_from(mtu).ok());
            self.bytes.store(ethernet::longest_frame(mtu.unwrap_or(1500)), Ordering::Relaxed);
        }
    }
}
