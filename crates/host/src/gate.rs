//! Exclusive access to a queue: a worker tries to take it for a burst, control blocks until it has it. Used by the port's
//! queues.

use parking_lot::{ArcMutexGuard, Mutex, MutexGuard, RawMutex};
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// A lock that a worker only tries and control waits for. The worker never blocks: while control holds or waits for the lock,
/// the worker's attempts fail.
#[derive(Default)]
pub(crate) struct Gate<T> {
    wanted: AtomicU32,
    value: Arc<Mutex<T>>,
}

/// A guard that a worker keeps from burst to burst until control asks for the lock.
pub(crate) type Lease<T> = ArcMutexGuard<RawMutex, T>;

impl<T> Gate<T> {
    pub(crate) fn new(value: T) -> Self {
        Gate { wanted: AtomicU32::new(0), value: Arc::new(Mutex::new(value)) }
    }

    /// For the worker: takes the lock if it is free and control does not want it.
    #[inline(always)]
    pub(crate) fn try_enter(&self) -> Option<MutexGuard<'_, T>> {
        // A mutex is not fair: without this check a busy worker would retake it before control gets its turn.
        if self.is_wanted() { None } else { self.value.try_lock() }
    }

    /// Like `try_enter`, but returns a guard that outlives the borrow.
    pub(crate) fn try_lease(&self) -> Option<Lease<T>> {
        if self.is_wanted() { None } else { self.value.try_lock_arc() }
    }

    /// Returns whether control is waiting; the holder of a lease must release it now.
    #[inline(always)]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > 0
    }

    /// For control: waits for the end of the worker's burst and takes the lock.
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
    fn control_enters_while_a_worker_holds_a_lease() {
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
                    assert!(gate.try_enter().is_none(), "two holders at once");
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
    fn control_enters_while_a_worker_keeps_retrying() {
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
