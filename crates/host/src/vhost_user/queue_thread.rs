//! A vring served by a thread of its own: all that a simple device needs ([`QueueThread`]). Used by whoever brings a
//! [`VhostDevice`](super::VhostDevice) of their own; the devices of this crate share a worker instead.

use super::{
    Kick, Limits, Ring, Vring,
    limits::{Lines, say},
};
use crate::sys;
use ringroad_mem::Table;
use ringroad_ring::{BURST, Chains, DeviceRing, Fault};
use std::{
    io,
    os::fd::AsFd,
    sync::Arc,
    thread::{self, JoinHandle},
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Pieces that the chains of a burst can have.
const PIECES: u16 = 512;

/// A running vring. Event driven: the thread sleeps until the driver kicks.
#[derive(Debug)]
pub struct QueueThread {
    stop: EventFd,
    thread: JoinHandle<u32>,
}

impl QueueThread {
    /// Starts a vring of the device `name`, and returns the base at which it starts. `serve` gets the chains of a burst that
    /// the driver has made available, and sets how much of each it has written; they are returned afterwards.
    ///
    /// # Errors
    /// The ring is invalid, the frontend does not kick, or the system has no more threads or descriptors.
    pub fn start(
        name: &str,
        index: usize,
        ring: Ring,
        vring: &Vring,
        serve: impl FnMut(&mut Chains) + Send + 'static,
    ) -> Result<(QueueThread, u32), String> {
        Self::start_with(&Lines::new(name, Limits::default().lines), name, index, ring, vring, serve)
    }

    /// As `start`, with limits on what is logged.
    pub(super) fn start_with(
        lines: &Lines,
        name: &str,
        index: usize,
        ring: Ring,
        vring: &Vring,
        serve: impl FnMut(&mut Chains) + Send + 'static,
    ) -> Result<(QueueThread, u32), String> {
        let kick = ring.kick.clone().ok_or("expected a frontend that kicks, found one that asks for polling")?;
        let memory = ring.memory.clone();
        let (ring, base) = ring.resume(name, index).map_err(|error| error.to_string())?;
        let failed = |error: io::Error| error.to_string();
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let stops = stop.try_clone().map_err(failed)?;
        let (name, lines, vring) = (name.to_owned(), lines.clone(), vring.clone());
        let mut queue = Queue { name: name.clone(), lines, index, ring, memory, kick, stops, vring, serve };
        let thread = thread::Builder::new().name(format!("{name} {index}")).spawn(move || queue.run());
        Ok((QueueThread { stop, thread: thread.map_err(failed)? }, base))
    }

    /// Stops it and returns the base at which it can resume.
    pub fn stop(self) -> u32 {
        let _ = self.stop.write(1);
        self.thread.join().unwrap_or_default()
    }
}

struct Queue<F> {
    name: String,
    lines: Lines,
    index: usize,
    ring: DeviceRing,
    memory: Arc<Table>,
    kick: Kick,
    stops: EventFd,
    vring: Vring,
    serve: F,
}

impl<F: FnMut(&mut Chains)> Queue<F> {
    fn run(&mut self) -> u32 {
        if let Err(fault) = self.try_run() {
            let Queue { name, lines, index, .. } = self;
            say!(lines, Error, "{name} queue {index}: {fault}; queue stopped, reset the device to continue");
            let base = self.ring.base();
            self.vring.fail(Some(base));
        }
        self.ring.base()
    }

    fn try_run(&mut self) -> Result<(), Fault> {
        let mut chains = Chains::new(BURST, PIECES);
        loop {
            chains.start(&self.memory);
            // A frontend that truncates the memory has no chains any more.
            let lost = self.memory.is_lost();
            if !lost && self.ring.take(&self.memory, &mut chains, BURST)? > 0 {
                (self.serve)(&mut chains);
                self.ring.give(chains.list());
                if self.ring.wants_notification(true) {
                    self.vring.notify();
                }
            } else if lost || !self.ring.enable_notification() {
                chains.clear();
                match sys::wait_readable([Some(sys::borrow(&self.stops)), Some(self.kick.as_fd())], None) {
                    Ok([false, _]) => self.kick.clear(),
                    Ok([true, _]) | Err(_) => return Ok(()),
                }
            }
            if matches!(self.stops.read(), Ok(1..)) {
                return Ok(());
            }
        }
    }
}
