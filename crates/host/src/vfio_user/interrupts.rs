//! The interrupts of a device. Set up by the session (DEVICE_SET_IRQS), raised by the device, on any thread.

use crate::socket::Call;
use parking_lot::Mutex;
use std::sync::Arc;

/// A kind of interrupt; its number is the index in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptKind {
    /// The interrupt pin, a level. The client masks it each time it is signalled, and unmasks it when the guest has had it.
    Intx = 0,
    /// Message-signalled interrupts.
    Msi = 1,
    /// Those with a table of their own.
    Msix = 2,
}

impl InterruptKind {
    /// Number of kinds.
    pub(super) const COUNT: u32 = 3;

    /// Returns the kind with this index.
    pub(super) fn new(index: u32) -> Option<InterruptKind> {
        [InterruptKind::Intx, InterruptKind::Msi, InterruptKind::Msix].get(index as usize).copied()
    }
}

/// The interrupts of a device. Cheap to clone; all clones are the same.
#[derive(Clone, Default)]
pub struct Interrupts(Arc<State>);

#[derive(Default)]
struct State {
    // No lock is held while a descriptor is written to, so that a thread that wants the lock never waits for a client.
    vectors: [Vec<Mutex<Option<Call>>>; InterruptKind::COUNT as usize],
    line: Mutex<Line>,
}

/// The interrupt pin.
#[derive(Default)]
struct Line {
    asserted: bool,
    masked: bool,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = self.0.vectors.each_ref().map(Vec::len);
        out.debug_struct("Interrupts").field("counts", &counts).finish_non_exhaustive()
    }
}

impl Interrupts {
    /// A device with an interrupt pin, or without, and so many message-signalled interrupts: at most 32 of MSI, 2048 of MSI-X.
    pub fn new(intx: bool, msi: usize, msix: usize) -> Interrupts {
        let vectors = [usize::from(intx), msi.min(32), msix.min(2048)];
        let vectors = vectors.map(|count| (0..count).map(|_| Mutex::default()).collect());
        Interrupts(Arc::new(State { vectors, line: Mutex::default() }))
    }

    /// Asserts or deasserts the interrupt pin. Returns whether the client was signalled: only if it is asserted and not masked,
    /// which it then is.
    pub fn set_line(&self, asserted: bool) -> bool {
        self.0.line.lock().asserted = asserted;
        self.look()
    }

    /// Signals a message-signalled interrupt. Returns `false` if the client has not enabled it.
    #[inline]
    pub fn signal(&self, kind: InterruptKind, index: usize) -> bool {
        let call = self.vector(kind, index).and_then(|vector| vector.lock().clone());
        call.inspect(Call::signal).is_some()
    }

    /// Returns whether the client has enabled an interrupt, that is, has sent a descriptor for it.
    pub fn is_enabled(&self, kind: InterruptKind, index: usize) -> bool {
        self.vector(kind, index).is_some_and(|vector| vector.lock().is_some())
    }

    /// Number of interrupts of a kind.
    pub fn count(&self, kind: InterruptKind) -> usize {
        self.0.vectors.get(kind as usize).map_or(0, Vec::len)
    }

    fn vector(&self, kind: InterruptKind, index: usize) -> Option<&Mutex<Option<Call>>> {
        self.0.vectors.get(kind as usize)?.get(index)
    }

    /// Signals the pin if it is asserted and not masked, and masks it.
    fn look(&self) -> bool {
        let mut line = self.0.line.lock();
        if !line.asserted || line.masked || !self.is_enabled(InterruptKind::Intx, 0) {
            return false;
        }
        line.masked = true;
        drop(line);
        self.signal(InterruptKind::Intx, 0)
    }

    /// Sets or removes the descriptor of an interrupt. A pin that gets one is not masked.
    pub(super) fn assign(&self, kind: InterruptKind, index: usize, call: Option<Call>) {
        let Some(vector) = self.vector(kind, index) else { return };
        let before = std::mem::replace(&mut *vector.lock(), call);
        // Without the lock.
        before.into_iter().for_each(Call::retire);
        if kind == InterruptKind::Intx {
            self.mask(false);
        }
    }

    /// Removes the descriptors of all interrupts of a kind.
    pub(super) fn disable(&self, kind: InterruptKind) {
        (0..self.count(kind)).for_each(|index| self.assign(kind, index, None));
    }

    /// Masks or unmasks the pin. One that is still asserted is signalled when it is unmasked.
    pub(super) fn mask(&self, masked: bool) {
        self.0.line.lock().masked = masked;
        self.look();
    }

    /// The client has disconnected.
    pub(super) fn clear(&self) {
        [InterruptKind::Intx, InterruptKind::Msi, InterruptKind::Msix].into_iter().for_each(|kind| self.disable(kind));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        socket::{CallFd, Peer},
        sys,
    };
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    fn eventfd() -> (EventFd, Option<Call>) {
        sys::guard::start().unwrap();
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        let fd = CallFd::new(sys::duplicate(&eventfd).unwrap()).unwrap_or_else(|refused| panic!("{refused}"));
        (eventfd, Some(Call::new(fd, &Arc::new(Peer::new().unwrap()))))
    }

    #[test]
    fn the_pin_is_a_level_that_masks_itself() {
        let interrupts = Interrupts::new(true, 0, 0);
        let (eventfd, call) = eventfd();
        assert!(!interrupts.set_line(true), "nobody to signal");
        interrupts.assign(InterruptKind::Intx, 0, call);
        assert_eq!(eventfd.read().unwrap(), 1, "asserted before");
        assert!(!interrupts.set_line(true) && !interrupts.set_line(false) && !interrupts.set_line(true), "masked");
        interrupts.mask(false);
        assert_eq!(eventfd.read().unwrap(), 1, "still asserted");
        interrupts.set_line(false);
        interrupts.mask(false);
        assert!(eventfd.read().is_err());
        assert!(interrupts.set_line(true));
        assert_eq!(eventfd.read().unwrap(), 1);
        interrupts.mask(false);
        interrupts.mask(true);
        interrupts.set_line(false);
        assert!(!interrupts.set_line(true), "masked by the client");
    }

    #[test]
    fn messages_reach_those_that_enabled_them() {
        let interrupts = Interrupts::new(false, 2, 0);
        let (eventfd, call) = eventfd();
        interrupts.assign(InterruptKind::Msi, 1, call);
        assert!(interrupts.signal(InterruptKind::Msi, 1) && interrupts.signal(InterruptKind::Msi, 1));
        assert_eq!(eventfd.read().unwrap(), 2);
        assert!(!interrupts.signal(InterruptKind::Msi, 0) && !interrupts.signal(InterruptKind::Msi, 2));
        assert!(!interrupts.signal(InterruptKind::Msix, 0) && !interrupts.set_line(true));
        interrupts.clear();
        assert!(!interrupts.is_enabled(InterruptKind::Msi, 1));
    }
}
