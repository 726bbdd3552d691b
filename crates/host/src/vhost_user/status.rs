//! What changes in the configuration space of a network device while it runs: the status field (virtio 1.3, 5.1.4). Used by
//! `net.rs`.

use super::BackendChannel;
use ringroad_net::bits;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state of a port's link, and whether its driver is to announce itself.
#[derive(Debug)]
pub(super) struct Status {
    up: AtomicBool,
    /// VIRTIO_NET_S_ANNOUNCE.
    announce: AtomicBool,
    /// It is to announce itself once it has seen that the link is up: what Linux sends before that is lost.
    due: AtomicBool,
    /// The switch has forgotten where the driver's addresses are since its queues ran last.
    apart: AtomicBool,
    /// Reports changes to the frontend.
    pub channel: BackendChannel,
}

impl Status {
    pub fn new(up: bool) -> Status {
        let flag = AtomicBool::new;
        let (announce, due, channel) = (flag(false), flag(false), BackendChannel::default());
        Status { up: flag(up), announce, due, apart: flag(true), channel }
    }

    /// Returns whether the link is up.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Returns whether the driver is to announce itself.
    pub fn announces(&self) -> bool {
        self.announce.load(Ordering::Relaxed)
    }

    /// Sets the state of the link; returns whether it has changed. Then the frontend must be notified, once it is in effect.
    pub fn set_link(&self, up: bool) -> bool {
        let changed = self.up.swap(up, Ordering::Relaxed) != up;
        if changed {
            self.due.store(up, Ordering::Relaxed);
        }
        changed
    }

    /// The driver has read the status. `acked`: its feature bits.
    pub fn seen(&self, acked: u64) {
        if self.is_up() && self.due.swap(false, Ordering::Relaxed) {
            self.ask(acked);
        }
    }

    /// Asks a driver that has negotiated it to announce itself.
    fn ask(&self, acked: u64) {
        if acked & bits::NET_F_GUEST_ANNOUNCE != 0 {
            self.announce.store(true, Ordering::Relaxed);
            self.channel.config_changed();
        }
    }

    /// Queues of the driver run. `fresh`: it has just started. One that has been running while its device was away announces itself.
    pub fn runs(&self, acked: u64, fresh: bool) {
        if self.apart.swap(false, Ordering::Relaxed) && !fresh {
            self.ask(acked);
        }
    }

    /// The driver has announced itself, or starts over.
    pub fn announced(&self) {
        self.announce.store(false, Ordering::Relaxed);
    }

    /// The frontend has disconnected.
    pub fn disconnected(&self) {
        self.announced();
        self.apart.store(true, Ordering::Relaxed);
        self.due.store(false, Ordering::Relaxed);
    }
}
