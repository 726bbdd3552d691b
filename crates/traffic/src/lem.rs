//! The e1000's driver ("lem") as a source and sink of test traffic, over vfio-user. It works as in a guest: the stack hands it one
//! frame at a time, and its interrupt handler cleans the rings and receives.
//!
//! A guest is interrupted wherever it is, at the latest when it comes back from an access to a register. This driver looks for an
//! interrupt after each access, and after [`BURST`] frames without one; with nothing to do, it sleeps until there is one, unless it is
//! to be busy.

mod card;

use crate::{
    Mode, Settings, Totals, Touch,
    check::{Frame, Seen, gather, verify},
    driver::{WORD, put},
    options::LemOptions,
    probe::Probe,
    totals::Left,
};
use card::Card;
pub use card::LemError;
use ringroad_e1000::{
    driver::{Bus, Driver, DriverConfig},
    registers::{STATUS, statistics::GPTC},
};
use ringroad_host::vfio_user::Accesses;
use ringroad_mem::{Span, sync::Ordering};
use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Frames from one look at the clock to the next.
const BURST: u32 = 32;
/// Longest sleep, after which the device is asked whether it is still there.
const WATCHDOG: Duration = Duration::from_secs(1);
/// How long the device may take at the end to return what it has.
const LAST: Duration = Duration::from_secs(1);
/// If no frame arrives for this long at the end, none is expected any more.
const QUIET: Duration = Duration::from_millis(20);
/// Frames that are received before there is a look at the clock.
const RECEIVED: u64 = 4096;

/// What the driver counts.
#[derive(Clone, Debug, Default)]
pub struct LemTotals {
    /// Frames.
    pub totals: Totals,
    /// Accesses to registers: what would be exits of a virtual machine.
    pub accesses: Accesses,
    /// Interrupts that the handler has had.
    pub interrupts: u64,
    /// Frames that the card says it has transmitted. One that drops or reflects them for a test (the key `mode` of a port) does
    /// not count them.
    pub transmitted: u64,
}

impl LemTotals {
    /// Returns reads, writes and interrupts per frame, sent or received.
    pub fn per_frame(&self) -> [f64; 3] {
        let Accesses { reads, writes, posted } = self.accesses;
        let frames = (self.totals.sent + self.totals.received).max(1) as f64;
        [reads, writes + posted, self.interrupts].map(|count| count as f64 / frames)
    }
}

/// The driver and its card.
#[derive(Debug)]
pub struct Lem {
    card: Card,
    driver: Driver,
    settings: Settings,
    traffic: State,
    /// Number of transmit descriptors.
    ring: u32,
    /// It does not sleep.
    busy: bool,
    interrupts: u64,
}

/// What the driver's frames are made from, and what they are checked against.
struct State {
    start: Instant,
    totals: Totals,
    /// Frames added so far, over all runs.
    next: u64,
    scratch: Vec<u8>,
    seen: Seen,
}

impl std::fmt::Debug for State {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("State").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Lem {
    /// Connects to a card and starts it. Of the settings, sizes, rate, window, flows, addresses, touch, and the modes without reflection
    /// count. `ring`: number of descriptors each way, a multiple of 8.
    ///
    /// # Errors
    /// [`LemError`] if nobody serves the socket, or it is not such a card.
    pub fn connect(path: &Path, options: LemOptions, ring: u32, settings: Settings) -> Result<Lem, LemError> {
        let config = DriverConfig { num_tx_desc: ring, num_rx_desc: ring, ..DriverConfig::default() };
        let config = DriverConfig { itr: options.itr, mit_enable: options.mit, huge: true, ..config };
        let mut driver = Driver::new(config)?;
        let mut card = Card::connect(path, options.accesses, &driver.region, &driver.file)?;
        let probed = driver.probe(&mut card);
        card.check()?;
        probed?;
        driver.start(&mut card);
        // What is reflected has the settings' addresses.
        driver.set_promiscuous(&mut card, true);
        card.check()?;
        let scratch = vec![0; settings.longest()];
        let start = Instant::now();
        let traffic = State { start, totals: Totals::default(), next: 0, scratch, seen: Seen::default() };
        Ok(Lem { card, driver, settings, traffic, ring, busy: options.busy, interrupts: 0 })
    }

    /// Sends and receives until the time is over or it is stopped, then waits for what is under way. Calls `tick` every second.
    ///
    /// # Errors
    /// The connection is over.
    pub fn run(&mut self, time: Duration, mut tick: impl FnMut(&Totals)) -> Result<LemTotals, LemError> {
        // Reading clears it.
        self.card.read(GPTC);
        let (before, interrupts, start) = (self.card.accesses(), self.interrupts, Instant::now());
        self.traffic.totals = Totals::default();
        let mut next_tick = Duration::from_secs(1);
        loop {
            let elapsed = start.elapsed();
            self.traffic.totals.time = elapsed;
            if elapsed >= time || self.settings.stop.load(Ordering::Relaxed) {
                break;
            }
            if elapsed >= next_tick {
                next_tick += Duration::from_secs(1);
                tick(&self.traffic.totals);
            }
            let (due, next) = self.due(elapsed);
            let sent = self.send(due);
            if !self.take_interrupt() && sent == 0 {
                self.sleep(next.min(time - elapsed).min(next_tick.saturating_sub(elapsed)))?;
            }
            self.card.check()?;
        }
        self.finish(start)?;
        let now = self.card.accesses();
        let accesses = Accesses {
            reads: now.reads - before.reads,
            writes: now.writes - before.writes,
            posted: now.posted - before.posted,
        };
        let (totals, interrupts) = (self.traffic.totals.clone(), self.interrupts - interrupts);
        let transmitted = self.card.read(GPTC).into();
        self.card.check()?;
        Ok(LemTotals { totals, accesses, interrupts, transmitted })
    }

    /// Returns how many frames may be sent now, and how long it is until the next one.
    fn due(&self, elapsed: Duration) -> (u32, Duration) {
        let window = self.settings.window.map(|window| window.saturating_sub(self.traffic.totals.in_flight()));
        let open = window.map_or(BURST, |open| open.min(BURST.into()) as u32);
        match (self.settings.mode, self.settings.rate) {
            (Mode::Tx, _) if open == 0 => (0, WATCHDOG),
            (Mode::Tx, None) => (open, WATCHDOG),
            (Mode::Tx, Some(rate)) => {
                let (sent, now) = (self.traffic.totals.sent as f64, elapsed.as_secs_f64());
                let due = (now * rate - sent).clamp(0.0, open.into()) as u32;
                (due, Duration::from_secs_f64(((sent + 1.0) / rate - now).clamp(0.0, 1.0)))
            }
            _ => (0, WATCHDOG),
        }
    }

    /// Hands the driver so many frames, one by one; returns how many it took.
    fn send(&mut self, most: u32) -> u32 {
        // As FreeBSD's driver does: with few descriptors left, it does not wait for its interrupt.
        if most > 0 && self.driver.free() <= self.ring / 8 {
            self.driver.reclaim();
        }
        let mut sent = 0;
        while sent < most {
            let Lem { driver, traffic, settings, ring, .. } = self;
            let slot = traffic.next % u64::from(*ring);
            if driver.add(1, |space| traffic.fill(settings, slot, space)) == 0 {
                break;
            }
            let now = traffic.now();
            self.driver.publish(&mut self.card, now);
            if self.card.was_accessed() {
                self.take_interrupt();
            }
            sent += 1;
        }
        sent
    }

    /// Handles the interrupt, if there is one.
    #[inline]
    fn take_interrupt(&mut self) -> bool {
        let taken = self.card.interrupt.take();
        if taken {
            self.handle();
        }
        taken
    }

    /// The interrupt's handler.
    fn handle(&mut self) {
        self.interrupts += 1;
        self.driver.interrupt(&mut self.card);
        self.driver.reclaim();
        let Lem { driver, traffic, settings, .. } = self;
        let before = traffic.totals.received;
        while driver.receive(&mut self.card, |parts| traffic.receive(settings, parts)) > 0 {
            if traffic.totals.received - before >= RECEIVED {
                break;
            }
        }
        driver.unmask(&mut self.card);
    }

    /// Sleeps until the interrupt, for this long at most, and less if frames wait to be published.
    fn sleep(&mut self, longest: Duration) -> Result<(), LemError> {
        let now = self.traffic.now();
        let deadline = self.driver.poll(&mut self.card, now);
        let deadline = deadline.map_or(Duration::MAX, |at| Duration::from_nanos(at.saturating_sub(now)));
        let most = longest.min(deadline);
        let interrupted =
            if self.busy { self.look(most) } else { self.card.interrupt.wait(most).map_err(LemError::Interrupt)? };
        if interrupted {
            self.handle();
        } else if longest >= WATCHDOG {
            self.card.read(STATUS);
        }
        // What the rest of the ring is waiting for may have no interrupt: the driver looks for itself.
        self.driver.reclaim();
        Ok(())
    }

    /// Looks for the interrupt until it is there, or for this long. Others that need the CPU, as the thread that serves accesses to
    /// registers, get it in between.
    fn look(&self, longest: Duration) -> bool {
        let start = Instant::now();
        loop {
            if self.card.interrupt.take() {
                return true;
            }
            if start.elapsed() >= longest {
                return false;
            }
            thread::yield_now();
        }
    }

    /// Waits until the device has returned all frames, and for those that come back.
    fn finish(&mut self, start: Instant) -> Result<(), LemError> {
        let end = Instant::now();
        while self.driver.under_way() > 0 && end.elapsed() < LAST {
            self.sleep(Duration::from_millis(1))?;
            self.card.check()?;
        }
        self.traffic.totals.time = start.elapsed();
        let under_way = self.driver.under_way() as usize;
        self.traffic.totals.sent -= under_way as u64;
        self.traffic.totals.left = Some(Left { under_way, missing: Some(0) });
        loop {
            let Totals { sent, received, .. } = self.traffic.totals;
            if received == 0 || received >= sent {
                return Ok(());
            }
            self.sleep(QUIET)?;
            self.card.check()?;
            if self.traffic.totals.received == received {
                return Ok(());
            }
        }
    }
}

impl Drop for Lem {
    fn drop(&mut self) {
        self.driver.stop(&mut self.card);
    }
}

impl State {
    /// Returns the time since the start, in nanoseconds.
    #[inline]
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Writes the next frame to the buffer of a descriptor; returns its length.
    #[inline]
    fn fill(&mut self, settings: &Settings, slot: u64, space: Span<'_>) -> usize {
        let (size, sequence) = (settings.size(slot), self.next);
        let flow = (sequence % u64::from(settings.flows)) as u16;
        if settings.touch == Touch::All {
            put(&Probe { flow, sequence, sent_ns: self.now() }, settings, size, &mut self.scratch, space);
        } else if slot == sequence {
            // The first frame of this buffer. It keeps its contents.
            put(&Probe { flow, sequence: 0, sent_ns: 0 }, settings, size, &mut self.scratch, space);
        }
        if matches!(settings.touch, Touch::Word | Touch::Sent) {
            space.skip(WORD).write(&(sequence as u32 & 0x7fff_ffff).to_be_bytes());
        }
        self.next += 1;
        self.totals.sent += 1;
        self.totals.sent_bytes += size as u64;
        size
    }

    #[inline]
    fn receive(&mut self, settings: &Settings, parts: &[Span<'_>]) {
        let State { start, totals, scratch, seen, .. } = self;
        match settings.touch {
            Touch::Nothing | Touch::Sent => {}
            Touch::Word => {
                std::hint::black_box(parts.first().and_then(|part| part.array::<4>(WORD)));
            }
            Touch::All => match verify(gather(parts, scratch), totals, seen) {
                Frame::Probe(probe) => totals.record_round_trip(*start, probe.sent_ns),
                Frame::Damaged => {}
                Frame::Foreign => return,
            },
        }
        totals.received += 1;
        totals.received_bytes += parts.iter().map(|part| part.len() as u64).sum::<u64>();
    }
}
