//! A vring with its own thread: all that a simple device needs ([`QueueThread`]). Used by programs with a
//! [`VhostDevice`](super::VhostDevice) of their own, and by `net.rs` for the control queue.

use super::{Kick, Limits, Ring, Vring};
use crate::{
    socket::{Lines, say},
    sys,
};
use ringroad_mem::Table;
use ringroad_ring::{BURST, Chains, DeviceRing, Fault};
use std::{
    io,
    os::fd::AsRawFd,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

/// Pieces that the chains of a burst can have.
const PIECES: u16 = 512;

/// Pauses of a thread that must not use up a CPU, whatever its driver does: between two bursts at least this long, and this many
/// times as long as the last burst took, up to the limit.
const REST: Duration = Duration::from_millis(1);
const REST_SHARE: u32 = 9;
const LONGEST_REST: Duration = Duration::from_millis(100);

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
        let lines = Lines::new(name, Limits::default().lines);
        Queue::start((name, index), ring, vring, lines, false, serve)
    }

    /// Like `start`, for a queue that needs to serve only a command now and then: the thread uses a tenth of a CPU at most, and logs
    /// within the limit of `lines`.
    pub(super) fn start_limited(
        name: &str,
        index: usize,
        ring: Ring,
        vring: &Vring,
        lines: &Lines,
        serve: impl FnMut(&mut Chains) + Send + 'static,
    ) -> Result<(QueueThread, u32), String> {
        Queue::start((name, index), ring, vring, lines.clone(), true, serve)
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
    /// Wakes when the driver kicks or the thread is to end. Edge-triggered: a kick need not be read, which would clear only a part of
    /// a semaphore.
    events: Epoll,
    stops: EventFd,
    /// Watched as long as the thread runs.
    _kick: Kick,
    vring: Vring,
    rests: bool,
    serve: F,
}

impl<F: FnMut(&mut Chains) + Send + 'static> Queue<F> {
    fn start(
        (name, index): (&str, usize),
        ring: Ring,
        vring: &Vring,
        lines: Lines,
        rests: bool,
        serve: F,
    ) -> Result<(QueueThread, u32), String> {
        let kick = ring.kick.clone().ok_or("expected a frontend that kicks, found one that asks for polling")?;
        let memory = ring.memory.clone();
        let (ring, base) = ring.resume(name, index).map_err(|error| error.to_string())?;
        let failed = |error: io::Error| error.to_string();
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(failed)?;
        let (stops, events) = (stop.try_clone().map_err(failed)?, Epoll::new().map_err(failed)?);
        for fd in [kick.as_raw_fd(), stops.as_raw_fd()] {
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
            events.ctl(ControlOperation::Add, fd, event).map_err(failed)?;
        }
        let (name, vring) = (name.to_owned(), vring.clone());
        let builder = thread::Builder::new().name(format!("{name} {index}"));
        let mut queue = Queue { name, lines, index, ring, memory, events, stops, _kick: kick, vring, rests, serve };
        let thread = builder.spawn(move || queue.run());
        Ok((QueueThread { stop, thread: thread.map_err(failed)? }, base))
    }

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
        let mut next = Instant::now();
        while !self.ends_before(next) {
            let start = Instant::now();
            chains.start(&self.memory);
            // A frontend that has truncated the memory gets no more chains served.
            let lost = self.memory.is_lost();
            let taken = if lost { 0 } else { self.ring.take(&self.memory, &mut chains, BURST)? };
            if taken > 0 {
                (self.serve)(&mut chains);
                self.ring.give(chains.list());
                if self.ring.wants_notification(true) {
                    self.vring.notify();
                }
            }
            let sleeps = taken == 0 && (lost || !self.ring.enable_notification());
            if self.rests {
                let rest = (start.elapsed() * REST_SHARE).clamp(REST, LONGEST_REST);
                next = Instant::now() + rest;
            }
            if sleeps {
                chains.clear();
                match self.events.wait(-1, &mut [EpollEvent::default()]) {
                    Err(error) if error.kind() != io::ErrorKind::Interrupted => return Ok(()),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Waits until this time, unless the thread is to end; returns whether it is.
    fn ends_before(&self, next: Instant) -> bool {
        // Rounded up to milliseconds, as the kernel rounds down.
        let left = next.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000) as u64;
        !matches!(sys::wait_readable([Some(sys::borrow(&self.stops))], Some(Duration::from_millis(left))), Ok([false]))
    }
}
