//! Who may use a queue: its worker for a burst, or control for as long as it takes to change something.

use parking_lot::{ArcMutexGuard, Mutex, MutexGuard, RawMutex};
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// A value that a worker tries to enter and that control waits for. The worker never waits: while control wants in or is in,
/// there is nothing for it.
#[derive(Default)]
pub(crate) struct Gate<T> {
    wanted: AtomicU32,
    value: Arc<Mutex<T>>,
}

/// What a worker keeps from burst to burst, as long as nobody else wants in.
pub(crate) type Lease<T> = ArcMutexGuard<RawMutex, T>;

impl<T> Gate<T> {
    pub(crate) fn new(value: T) -> Self {
        Gate { wanted: AtomicU32::new(0), value: Arc::new(Mutex::new(value)) }
    }

    /// For the worker: in at once, or not at all.
    #[inline(always)]
    pub(crate) fn try_enter(&self) -> Option<MutexGuard<'_, T>> {
        // A mutex is not fair: without this a busy worker would take it again and again before control gets it.
        if self.is_wanted() { None } else { self.value.try_lock() }
    }

    /// The same, to be kept.
    pub(crate) fn try_lease(&self) -> Option<Lease<T>> {
        if self.is_wanted() { None } else { self.value.try_lock_arc() }
    }

    /// Whether control wants in: whoever has a lease lets it go now.
    #[inline(always)]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > 0
    }

    /// For control: waits until the worker's burst is over.
    pub(crate) fn enter(&self) -> MutexGuard<'_, T> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let guard = self.value.lock();
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread, time::Instant};

    #[test]
    fn control_gets_in_beside_a_worker_that_keeps_it() {
        let gate = Arc::new(Gate::<u64>::default());
        let worker = {
            let gate = gate.clone();
            thread::spawn(move || {
                let mut kept: Option<Lease<u64>> = None;
                let mut leases = 0;
                loop {
                    let Some(mut lease) = kept.take().filter(|_| !gate.is_wanted()).or_else(|| {
                        leases += 1;
                        gate.try_lease()
                    }) else {
                        continue;
                    };
                    if *lease >= 1 << 32 {
                        return leases;
                    }
                    *lease += 1;
                    assert!(gate.try_enter().is_none(), "in twice");
                    kept = Some(lease);
                }
            })
        };
        for _ in 0..100 {
            let _in = gate.enter();
        }
        *gate.enter() = 1 << 32;
        assert!(worker.join().unwrap() > 0);
    }

    #[test]
    fn control_gets_in_beside_a_busy_worker() {
        let gate = Arc::new(Gate::<u64>::default());
        let worker = {
            let gate = gate.clone();
            thread::spawn(move || {
                let mut done = false;
                while !done {
                    if let Some(mut value) = gate.try_enter() {
                        done = *value >= 1 << 32;
                        *value += 1;
                    }
                }
            })
        };
        let start = Instant::now();
        for _ in 0..100 {
            let _in = gate.enter();
        }
        *gate.enter() = 1 << 32;
        worker.join().unwrap();
        assert!(start.elapsed().as_secs() < 10);
    }
}
