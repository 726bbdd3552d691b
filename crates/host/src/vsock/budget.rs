//! Per-guest budgets for the host sockets behind its connections: file descriptors, connects, kernel memory. One guest cannot
//! use up what the others need.

use super::config::VsockConfig;
use crate::{Quota, sys};
use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

/// Maximum burst of connects.
const BURST: u32 = 1024;

/// The sockets of all guests of a worker.
pub(super) struct Total {
    open: AtomicUsize,
    most: usize,
}

impl Total {
    /// Three quarters of the files that this process may have open; the rest is for ports, memory and new guests.
    pub(super) fn new() -> Total {
        Total::of(sys::file_limit() / 4 * 3)
    }

    fn of(most: usize) -> Total {
        Total { open: AtomicUsize::new(0), most }
    }
}

/// Usage of a guest's host sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketReport {
    /// Open sockets, including those of programs that have not sent a port yet and those waiting to be connected.
    pub open: usize,
    /// Bytes that the kernel may buffer for programs that do not read, beyond the 8 KiB of each socket.
    pub buffers: usize,
    /// Connection requests of the guest that were refused because its connects or sockets were used up.
    pub refused: u64,
    /// Programs that were turned away before they had a connection.
    pub turned_away: u64,
}

/// The budget of one guest.
pub(super) struct Budget {
    total: Arc<Total>,
    open: AtomicUsize,
    /// Requests waiting to be connected.
    waiting: AtomicUsize,
    /// Maximum number of waiting requests.
    most_waiting: AtomicUsize,
    buffers: AtomicUsize,
    most_buffers: AtomicUsize,
    /// Rate of connects.
    pub connects: Quota,
    refused: AtomicU64,
    pub turned_away: AtomicU64,
}

impl Budget {
    pub(super) fn new(config: &VsockConfig, total: Arc<Total>) -> Budget {
        let burst = config.connects.clamp(1, BURST);
        Budget {
            total,
            open: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            // At most those of one second: a refusal is better for the guest than a late reply.
            most_waiting: AtomicUsize::new(burst as usize),
            buffers: AtomicUsize::new(0),
            most_buffers: AtomicUsize::new(config.socket_memory),
            connects: Quota::new(burst, config.connects.max(1)),
            refused: AtomicU64::new(0),
            turned_away: AtomicU64::new(0),
        }
    }

    /// Sets the limits. Grants already made are kept.
    pub(super) fn set(&self, config: &VsockConfig) {
        let burst = config.connects.clamp(1, BURST);
        self.connects.set(burst, config.connects.max(1));
        self.most_waiting.store(burst as usize, Ordering::Relaxed);
        self.most_buffers.store(config.socket_memory, Ordering::Relaxed);
    }

    pub(super) fn report(&self) -> SocketReport {
        SocketReport {
            open: self.open.load(Ordering::Relaxed),
            buffers: self.buffers.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            turned_away: self.turned_away.load(Ordering::Relaxed),
        }
    }

    /// Reserves a place for one more socket, if the guest has fewer than remain free: n greedy guests leave at least one
    /// place in n + 1 free, and a guest without sockets gets one while any are free.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Place> {
        let Total { open: all, most } = &*self.total;
        let own = self.open.load(Ordering::Relaxed);
        let more = |all: usize| (own < most.saturating_sub(all)).then_some(all + 1);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        self.open.fetch_add(1, Ordering::Relaxed);
        Some(Place(self.clone()))
    }

    /// Reserves a place for a request to be connected, and one among those that wait; otherwise counts it as refused.
    pub(super) fn admit_request(self: &Arc<Self>) -> Option<(Place, Waiting)> {
        let place = (self.waiting.load(Ordering::Relaxed) < self.most_waiting.load(Ordering::Relaxed))
            .then(|| self.admit())
            .flatten();
        let Some(place) = place else {
            self.refuse();
            return None;
        };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Some((place, Waiting(self.clone())))
    }

    pub(super) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Grants kernel memory for one socket: up to `wanted` bytes, but at most a quarter of what is left, so that later
    /// sockets get some too.
    pub(super) fn grant(&self, wanted: usize) -> usize {
        let most = self.most_buffers.load(Ordering::Relaxed);
        let share = |granted: usize| wanted.min(most.saturating_sub(granted) / 4) & !4095;
        let more = |granted: usize| Some(granted + share(granted));
        self.buffers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_or(0, share)
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.buffers.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns whether more than half of the memory is granted, so that unused grants should be returned.
    pub(super) fn is_tight(&self) -> bool {
        self.buffers.load(Ordering::Relaxed) > self.most_buffers.load(Ordering::Relaxed) / 2
    }
}

/// A reserved place for a socket, released on drop.
pub(super) struct Place(pub Arc<Budget>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.0.total.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that waits to be connected; counted until dropped.
pub(super) struct Waiting(Arc<Budget>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budgets(most: usize, guests: usize) -> Vec<Arc<Budget>> {
        let total = Arc::new(Total::of(most));
        let config = VsockConfig { connects: 10, socket_memory: 1 << 20, ..VsockConfig::new(3, "/nowhere".into()) };
        (0..guests).map(|_| Arc::new(Budget::new(&config, total.clone()))).collect()
    }

    #[test]
    fn a_greedy_guest_leaves_places_for_others() {
        let guests = budgets(1200, 3);
        let all = |guest: &Arc<Budget>| std::iter::from_fn(|| guest.admit()).collect::<Vec<_>>();
        let first = all(&guests[0]);
        assert_eq!(first.len(), 600);
        let second = all(&guests[1]);
        assert_eq!(second.len(), 300);
        let third = all(&guests[2]);
        assert_eq!(third.len(), 150);
        // The guest that had most gets no more until it has fewer than are left.
        assert!(guests[0].admit().is_none());
        drop(first);
        assert_eq!(guests[0].report().open, 0);
        assert_eq!(all(&guests[2]).len(), 300, "as many as are left when it has 450");
        drop((second, third));
        assert_eq!(guests[0].total.open.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn grants_stay_within_the_budget_and_leave_some_for_later() {
        let guest = &budgets(10, 1)[0];
        assert_eq!(guest.grant(100 << 10), 100 << 10);
        assert!(!guest.is_tight());
        let mut sum = 100 << 10;
        for _ in 0..1000 {
            let granted = guest.grant(1 << 30);
            assert!(granted <= ((1 << 20) - sum) / 4);
            sum += granted;
        }
        assert!(guest.is_tight() && sum > 1 << 19 && sum <= 1 << 20, "{sum}");
        assert_eq!(guest.report().buffers, sum);
        guest.give_back(sum);
        assert_eq!(guest.report().buffers, 0);
    }

    #[test]
    fn waiting_requests_are_limited_and_refusals_counted() {
        let guest = &budgets(1000, 1)[0];
        let mut requests: Vec<_> = (0..15).filter_map(|_| guest.admit_request()).collect();
        assert_eq!(requests.len(), 10);
        assert_eq!(guest.report(), SocketReport { open: 10, refused: 5, ..SocketReport::default() });
        // Connected: it keeps its socket.
        let (_place, waiting) = requests.pop().unwrap();
        drop(waiting);
        assert!(guest.admit_request().is_some());
    }
}
