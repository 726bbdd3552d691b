//! What a vring has beside its queue: the descriptors that notify its driver, and how it stopped. Set by the session,
//! used by the device, on any thread.

use crate::socket::Call;
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

/// The notification side of a vring. Cheap to clone; all clones are the same vring.
#[derive(Clone, Default)]
pub struct Vring(Arc<State>);

#[derive(Default)]
struct State {
    // No lock is held while a descriptor is written to, so that a thread that wants the lock never waits for a frontend.
    call: Mutex<Option<Call>>,
    err: Mutex<Option<Call>>,
    fault: AtomicBool,
    base: AtomicU32,
}

fn signal(place: &Mutex<Option<Call>>) {
    let call = place.lock().clone();
    if let Some(call) = call {
        call.signal();
    }
}

impl Vring {
    /// Notifies the driver (SET_VRING_CALL).
    #[inline]
    pub fn notify(&self) {
        signal(&self.0.call);
    }

    /// Tells the frontend of an error (SET_VRING_ERR).
    pub fn signal_err(&self) {
        signal(&self.0.err);
    }

    /// Marks the vring as stopped by a fault of its driver, and tells the frontend. `base`: where it can resume, if known.
    #[cold]
    pub fn fail(&self, base: Option<u32>) {
        base.inspect(|&base| self.0.base.store(base, Ordering::Relaxed));
        self.0.fault.store(true, Ordering::Release);
        self.signal_err();
    }

    /// Returns whether a fault of its driver has stopped the vring.
    pub fn has_fault(&self) -> bool {
        self.0.fault.load(Ordering::Acquire)
    }

    /// Returns the base at which the vring was started, or which [`Vring::fail`] recorded.
    pub fn base(&self) -> u32 {
        self.0.base.load(Ordering::Relaxed)
    }

    /// Prepares for a start.
    pub(super) fn begin(&self, base: u32) {
        self.0.base.store(base, Ordering::Relaxed);
        self.0.fault.store(false, Ordering::Release);
    }

    /// Replaces a descriptor.
    pub(super) fn set_fd(&self, call: Option<Call>, err: bool) {
        let place = if err { &self.0.err } else { &self.0.call };
        let before = std::mem::replace(&mut *place.lock(), call);
        // Without the lock.
        before.into_iter().for_each(Call::retire);
    }
}

impl std::fmt::Debug for Vring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vring").field("fault", &self.has_fault()).field("base", &self.base()).finish()
    }
}
