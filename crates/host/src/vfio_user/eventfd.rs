//! The driver's end of an interrupt.

use crate::sys;
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Receives an interrupt: for [`Client::set_interrupts`](super::Client::set_interrupts).
#[derive(Debug)]
pub struct InterruptFd(EventFd);

impl InterruptFd {
    /// Creates one.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub fn new() -> io::Result<InterruptFd> {
        EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(InterruptFd)
    }

    /// Returns whether the interrupt has been signalled since the last call.
    #[inline]
    pub fn take(&self) -> bool {
        sys::guard::drain(self.as_fd())
    }

    /// Sleeps until the interrupt is signalled, for whole milliseconds of `timeout` at most; then as [`InterruptFd::take`].
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        sys::wait_readable([Some(sys::borrow(&self.0))], Some(timeout))?;
        Ok(self.take())
    }
}

impl AsFd for InterruptFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        sys::borrow(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    /// The device shares the descriptor: it can take the interrupt itself, and clear O_NONBLOCK.
    #[test]
    fn does_not_block_whatever_the_device_does_to_it() {
        let interrupt = InterruptFd::new().unwrap();
        interrupt.0.write(3).unwrap();
        assert!(interrupt.take() && !interrupt.take());
        sys::set_blocking(interrupt.as_fd());
        let (done, wait) = mpsc::channel();
        thread::spawn(move || done.send((interrupt.take(), interrupt.wait(Duration::from_millis(1)).unwrap())));
        assert_eq!(wait.recv_timeout(Duration::from_secs(5)), Ok((false, false)));
    }
}
