//! Who may use a queue: its worker for a burst, or control for as long as it takes to change something.

use std::sync::{
    Mutex, MutexGuard, TryLockError,
    atomic::{AtomicU32, Ordering},
};

/// A value that a worker tries to enter once per burst and that control waits for. The worker never waits: while control
/// wants in or is in, there is nothing for it.
#[derive(Default)]
pub(crate) struct Gate<T> {
    wanted: AtomicU32,
    value: Mutex<T>,
}

impl<T> Gate<T> {
    pub(crate) fn new(value: T) -> Self {
        Gate { wanted: AtomicU32::new(0), value: Mutex::new(value) }
    }

    /// For the worker: in at once, or not at all.
    #[inline(always)]
    pub(crate) fn try_enter(&self) -> Option<MutexGuard<'_, T>> {
        // A mutex is not fair: without this a busy worker would take it again and again before control gets it.
        if self.wanted.load(Ordering::Relaxed) > 0 {
            return None;
        }
        match self.value.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// For control: waits until the worker's burst is over.
    pub(crate) fn enter(&self) -> MutexGuard<'_, T> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let guard = self.value.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread, time::Instant};

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
