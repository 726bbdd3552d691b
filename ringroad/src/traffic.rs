//! Test traffic through a driver of our own: what `blast`, `demo` and `bench` have in common.

use hdrhistogram::Histogram;
use ringroad_host::vhost_user::{Connection, Notifier};
use ringroad_mem::Span;
use ringroad_net::{Driver, DriverRx, DriverTx};
use ringroad_ring::{BURST, DriverFault};
use ringroad_wire::{
    ethernet::{self, Addresses, MacAddr},
    probe::{Probe, ProbeError},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// What a driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Sends, and counts what comes back
    Tx,
    /// Receives only
    Rx,
    /// Sends back what it receives, with the MAC addresses swapped
    Reflect,
}

/// How much of each frame a driver touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Nothing: the cost of the rings alone.
    Nothing,
    /// Writes 4 bytes of the payload before each frame is sent, reads 4 bytes of each that is received.
    Word,
    /// Writes all of it, checks all of it.
    All,
}

/// What to send and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the driver does.
    pub mode: Mode,
    /// Frame sizes in turn, in bytes, without FCS.
    pub sizes: Vec<usize>,
    /// How many flows (UDP source ports) in turn.
    pub flows: u16,
    /// Frames per second; `None`: as many as go.
    pub rate: Option<f64>,
    /// Frames under way at most, from sending to coming back; `None`: as many as go.
    pub window: Option<u64>,
    /// How much of each frame is touched.
    pub touch: Touch,
    /// The addresses in the frames.
    pub addresses: Addresses,
    /// Sleeps when there is nothing to do, instead of polling.
    pub event_driven: bool,
    /// Frames sent at once, at most: 1 to [`BURST`], and never more than half of the ring.
    pub burst: usize,
    /// When the device goes away, wait so long for it to come back, and go on. `None`: that is the end.
    pub reconnect: Option<Duration>,
    /// Ends it before its time is over.
    pub stop: Arc<AtomicBool>,
}

impl Settings {
    /// As many frames of one size as go, polling.
    pub fn flood(size: usize) -> Settings {
        Settings {
            mode: Mode::Tx,
            sizes: vec![size],
            flows: 1,
            rate: None,
            window: None,
            touch: Touch::Word,
            addresses: Addresses { destination: MacAddr::local(2), source: MacAddr::local(1) },
            event_driven: false,
            burst: BURST,
            reconnect: None,
            stop: Arc::default(),
        }
    }
}

/// What happened so far.
#[derive(Clone, Debug)]
pub struct Totals {
    /// Frames sent, which the device has taken.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames received.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames whose content was not what was sent (with [`Touch::All`]), or that came twice.
    pub errors: u64,
    /// Those of them that came twice.
    pub duplicates: u64,
    /// Frames that are not ours.
    pub foreign: u64,
    /// How often the device came back.
    pub reconnects: u64,
    /// How long each time from its loss to the next frame received, in nanoseconds.
    pub recovery: Histogram<u64>,
    /// What was left at the end, where the device may come back.
    pub left: Option<Left>,
    /// Round trips of frames that came back, in nanoseconds.
    pub round_trip: Histogram<u64>,
    /// Rounds of the driver: each looks at both queues once.
    pub rounds: u64,
    /// Those that found nothing to receive and no room to send.
    pub empty_rounds: u64,
    /// How long it took.
    pub time: Duration,
}

/// What a device has not given back when all was over: nothing, if none of its predecessors has lost anything.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Frames sent that it has not taken in a second, or taken and not given back.
    pub under_way: usize,
    /// Buffers of both queues that it had taken when it stopped and has never given back; `None`: it does not say.
    pub missing: Option<u32>,
}

impl Totals {
    fn new() -> Totals {
        // Three digits up to a minute: always possible.
        let times = || Histogram::new_with_bounds(1, 60_000_000_000, 3).unwrap_or_else(|_| unreachable!());
        Totals {
            sent: 0,
            sent_bytes: 0,
            received: 0,
            received_bytes: 0,
            errors: 0,
            duplicates: 0,
            foreign: 0,
            reconnects: 0,
            recovery: times(),
            left: None,
            round_trip: times(),
            rounds: 0,
            empty_rounds: 0,
            time: Duration::ZERO,
        }
    }

    /// Frames received per second, in millions.
    pub fn received_mpps(&self) -> f64 {
        self.received as f64 / self.time.as_secs_f64() / 1e6
    }

    /// Frames sent per second, in millions.
    pub fn sent_mpps(&self) -> f64 {
        self.sent as f64 / self.time.as_secs_f64() / 1e6
    }

    /// Rounds in which the driver waited for the device, in percent of all. Of rounds, not of time: an empty one is shorter.
    pub fn idle(&self) -> f64 {
        self.empty_rounds as f64 * 100.0 / self.rounds.max(1) as f64
    }
}

/// Where the word of [`Touch::Word`] is in a frame: the upper half of the probe's sequence number.
const WORD: usize = 42;
/// A word that no plain frame has: this one carries a time.
const TIMED: [u8; 4] = [0xff; 4];
/// One frame in so many carries a time.
const SAMPLE: u64 = 1024;
/// Rounds between looks at the clock.
const ROUNDS: u64 = 32;
/// How often to look whether the device is still there, if it may come back: a system call each.
const LOOK: Duration = Duration::from_millis(1);
/// How long a device may take at the end to give back what it has.
const LAST: Duration = Duration::from_secs(1);
/// When nothing has come for this long, nothing more will.
const QUIET: Duration = Duration::from_millis(50);
/// A window that has not moved for this long has lost its frames.
const LOST: Duration = Duration::from_millis(100);

/// One pair of queues at work.
pub struct Traffic {
    settings: Settings,
    start: Instant,
    totals: Totals,
    scratch: Vec<u8>,
    next: u64,
    /// Sequence numbers that have come back, as a bitmap over the last of them (with [`Touch::All`]).
    seen: Seen,
    lost: Lost,
    /// Frames sent at once: as the settings say, half of a small ring.
    burst: usize,
    /// When the device was lost from which nothing has come since it is back, and how many frames had come by then.
    recovering: Option<(Instant, u64)>,
}

impl Traffic {
    /// Fills the buffers of the connection's first pair of queues.
    pub fn new(settings: Settings, driver: &mut Driver) -> Traffic {
        let longest = settings.sizes.iter().copied().max().unwrap_or(64);
        let mut scratch = vec![0; longest];
        if let Some(tx) = driver.tx.first_mut() {
            tx.prepare(|id, place| {
                let size = size_of(&settings, id.into());
                let probe = Probe { flow: id % settings.flows, sequence: 0, sent_ns: 0 };
                if probe.write(&settings.addresses, &mut scratch[..size]).is_ok() {
                    place.write(&scratch[..size]);
                }
            });
        }
        let (start, most) = (Instant::now(), settings.burst.clamp(1, BURST));
        Traffic {
            settings,
            start,
            totals: Totals::new(),
            scratch,
            next: 0,
            seen: Seen::default(),
            lost: Lost::default(),
            burst: driver.tx.first().map_or(1, |tx| tx.free().div_ceil(2)).clamp(1, most),
            recovering: None,
        }
    }

    /// Works until the time is over or the device has gone for good; calls `tick` every second.
    pub fn run(
        &mut self,
        connection: &mut Connection,
        time: Duration,
        mut tick: impl FnMut(&Totals),
    ) -> Result<Totals, DriverFault> {
        self.start = Instant::now();
        loop {
            let (mut rx, mut tx) = match (connection.driver.rx.pop(), connection.driver.tx.pop()) {
                (Some(rx), Some(tx)) => (rx, tx),
                _ => return Ok(self.totals.clone()),
            };
            let mut ends = Ends { rx: &mut rx, tx: &mut tx, from: connection, to: connection };
            let result = self.run_queues(&mut ends, time, &mut tick);
            connection.driver.rx.push(rx);
            connection.driver.tx.push(tx);
            result?;
            if self.start.elapsed() >= time || self.is_stopped() || !self.recover(connection) {
                break;
            }
        }
        if self.settings.reconnect.is_some() {
            self.totals.left = Some(self.finish(connection)?);
        }
        Ok(std::mem::replace(&mut self.totals, Totals::new()))
    }

    fn is_stopped(&self) -> bool {
        self.settings.stop.load(Ordering::Relaxed)
    }

    /// Waits for the device to come back; `false`: it does not.
    fn recover(&mut self, connection: &mut Connection) -> bool {
        let Some(patience) = self.settings.reconnect else { return false };
        let since = Instant::now();
        log::info!("the device at {} has gone; waiting for it to come back", connection.path().display());
        if let Err(error) = connection.reconnect(patience) {
            log::error!("waited {:.1} s for the device to come back: {error}", since.elapsed().as_secs_f64());
            return false;
        }
        self.totals.reconnects += 1;
        // Frames that it had taken may be lost. They are not waited for.
        self.lost = Lost { frames: self.totals.sent.saturating_sub(self.totals.received), before: self.next };
        self.recovering.get_or_insert((since, self.totals.received));
        true
    }

    /// Sends no more, takes back what was sent, and stops the queues.
    fn finish(&mut self, connection: &mut Connection) -> Result<Left, DriverFault> {
        let (start, mut last) = (Instant::now(), Instant::now());
        let mut left = Left { under_way: 0, missing: None };
        for stopped in [false, true] {
            if stopped {
                left.missing = connection.stop();
            }
            while let (Some(rx), Some(tx)) = (connection.driver.rx.first_mut(), connection.driver.tx.first_mut()) {
                let back = tx.reclaim()?;
                let came = if self.settings.mode == Mode::Tx { self.receive(rx)? } else { rx.receive(false, |_| ())? };
                if back + came > 0 {
                    last = Instant::now();
                    continue;
                }
                left.under_way = tx.under_way();
                // Frames still come to a port that others send to.
                let done = left.under_way == 0 && last.elapsed() > QUIET || start.elapsed() > LAST;
                if stopped || done || connection.is_closed() {
                    break;
                }
                kick(true, connection.tx.first());
                kick(true, connection.rx.first());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(left)
    }

    /// The same with frames that are sent on one connection and received on another.
    pub fn run_across(
        &mut self,
        from: &mut Connection,
        to: &mut Connection,
        time: Duration,
        mut tick: impl FnMut(&Totals),
    ) -> Result<Totals, DriverFault> {
        let (mut rx, mut tx) = match (to.driver.rx.pop(), from.driver.tx.pop()) {
            (Some(rx), Some(tx)) => (rx, tx),
            _ => return Ok(self.totals.clone()),
        };
        self.start = Instant::now();
        let mut ends = Ends { rx: &mut rx, tx: &mut tx, from, to };
        let result = self.run_queues(&mut ends, time, &mut tick);
        to.driver.rx.push(rx);
        from.driver.tx.push(tx);
        result.map(|()| std::mem::replace(&mut self.totals, Totals::new()))
    }

    /// The same on several connections in turn, a round on each, polling: the totals of all of them, without round trips.
    pub fn run_in_turn(each: &mut [(Traffic, Connection)], time: Duration) -> Result<Totals, DriverFault> {
        let start = Instant::now();
        for (traffic, connection) in each.iter_mut() {
            (traffic.start, traffic.totals) = (start, Totals::new());
            connection.driver.rx.iter_mut().for_each(DriverRx::disable_notification);
            connection.driver.tx.iter_mut().for_each(DriverTx::disable_notification);
        }
        for round in 0u64.. {
            if round % ROUNDS == 0 && start.elapsed() >= time {
                break;
            }
            for (traffic, Connection { driver, rx: received, tx: sent, .. }) in each.iter_mut() {
                let (Some(rx), Some(tx)) = (driver.rx.first_mut(), driver.tx.first_mut()) else { continue };
                let worked = traffic.round(rx, tx, u64::MAX)?;
                if worked == 0 || round % ROUNDS == 0 {
                    kick(tx.wants_notification(), sent.first());
                    kick(rx.wants_notification(), received.first());
                }
            }
        }
        let mut all = Totals { time: start.elapsed(), ..Totals::new() };
        for Traffic { totals, .. } in each.iter().map(|(traffic, _)| traffic) {
            all.sent += totals.sent;
            all.sent_bytes += totals.sent_bytes;
            all.received += totals.received;
            all.received_bytes += totals.received_bytes;
            all.errors += totals.errors;
            all.rounds += totals.rounds;
            all.empty_rounds += totals.empty_rounds;
        }
        Ok(all)
    }

    fn run_queues(
        &mut self,
        ends: &mut Ends<'_>,
        time: Duration,
        tick: &mut impl FnMut(&Totals),
    ) -> Result<(), DriverFault> {
        let Ends { rx, tx, from, to } = ends;
        // After a reconnection the time goes on.
        let begun = self.start.elapsed();
        let mut next_tick = Duration::from_secs(begun.as_secs() + 1);
        let mut next_look = begun + LOOK;
        let mut allowed = u64::MAX;
        let mut moved = (self.start + begun, self.totals.received);
        rx.disable_notification();
        tx.disable_notification();
        for round in 0u64.. {
            if round % ROUNDS == 0 || self.settings.event_driven {
                let now = self.start.elapsed();
                self.totals.time = now;
                if now >= next_tick {
                    next_tick += Duration::from_secs(1);
                    tick(&self.totals);
                    if from.is_closed() || to.is_closed() {
                        break;
                    }
                }
                if now >= time || self.is_stopped() {
                    break;
                }
                if self.settings.reconnect.is_some() && now >= next_look {
                    next_look = now + LOOK;
                    if from.is_closed() || to.is_closed() {
                        break;
                    }
                }
                if let Some((since, before)) = self.recovering
                    && self.totals.received > before
                {
                    let time = since.elapsed();
                    log::info!("frames again, {:.1} ms after the device was lost", time.as_secs_f64() * 1e3);
                    let _ = self.totals.recovery.record(time.as_nanos() as u64);
                    self.recovering = None;
                }
                if let Some(rate) = self.settings.rate {
                    allowed = (now.as_secs_f64() * rate) as u64;
                }
                if moved.1 != self.totals.received {
                    moved = (self.start + now, self.totals.received);
                } else if (self.start + now).duration_since(moved.0) > LOST {
                    self.lost =
                        Lost { frames: self.totals.sent.saturating_sub(self.totals.received), before: self.next };
                    // One more window, then patience again.
                    moved.0 = self.start + now;
                }
            }
            let worked = self.round(rx, tx, allowed)?;
            // Asking costs a full fence. A device that polls does not care; one that sleeps is woken when there is nothing
            // else to do, or soon.
            if worked == 0 || round % ROUNDS == 0 || self.settings.event_driven {
                kick(tx.wants_notification(), from.tx.first());
                kick(rx.wants_notification(), to.rx.first());
            }
            if worked == 0 {
                if self.settings.event_driven {
                    self.sleep(to, rx, tx, time, allowed);
                } else {
                    std::hint::spin_loop();
                }
            }
        }
        self.totals.time = self.start.elapsed();
        Ok(())
    }

    /// One round on a pair of queues: takes back, receives, sends while fewer than `allowed` frames were sent. Says how much
    /// it found to do.
    #[inline(always)]
    fn round(&mut self, rx: &mut DriverRx, tx: &mut DriverTx, allowed: u64) -> Result<usize, DriverFault> {
        // Looking at what the device is about to write takes the line from it: only when there is need.
        while tx.free() < self.burst && tx.reclaim()? > 0 {}
        if tx.free() >= self.burst {
            tx.prefetch(self.burst, self.settings.touch != Touch::Nothing);
        }
        let mut worked = 0;
        match self.settings.mode {
            Mode::Tx => {
                let mut room = allowed.saturating_sub(self.totals.sent);
                if let Some(window) = self.settings.window {
                    let under_way = self.totals.sent.saturating_sub(self.totals.received + self.lost.frames);
                    room = room.min(window.saturating_sub(under_way));
                }
                // Before sending: until then, what was just fetched has arrived.
                worked += self.receive(rx)?;
                // In whole bursts, as far as the device has given back so many.
                if tx.free() >= self.burst {
                    worked += self.send(tx, room.min(self.burst as u64) as usize);
                }
            }
            Mode::Rx => worked += self.receive(rx)?,
            Mode::Reflect => worked += self.reflect(rx, tx)?,
        }
        self.totals.rounds += 1;
        self.totals.empty_rounds += u64::from(worked == 0);
        Ok(worked)
    }

    fn sleep(&self, connection: &Connection, rx: &mut DriverRx, tx: &mut DriverTx, time: Duration, allowed: u64) {
        let rx_has = rx.enable_notification();
        // Only somebody who has more to send waits for room.
        let tx_has = self.settings.mode == Mode::Tx && tx.free() < self.burst && tx.enable_notification();
        if !rx_has && !tx_has {
            let mut limit = time.saturating_sub(self.start.elapsed()).min(LOST);
            if self.settings.rate.is_some() && allowed != u64::MAX {
                limit = limit.min(Duration::from_millis(1));
            }
            let _ = connection.wait(0, limit);
            connection.rx.iter().chain(&connection.tx).for_each(|notifier| notifier.clear());
        }
        rx.disable_notification();
        tx.disable_notification();
    }

    /// Sends up to `count` frames.
    #[inline]
    fn send(&mut self, tx: &mut DriverTx, count: usize) -> usize {
        let Traffic { settings, scratch, start, .. } = self;
        let (mut bytes, mut next) = (0, self.next);
        let added = tx.add(count, |id, place| {
            let size = match settings.touch {
                Touch::Nothing => size_of(settings, id.into()),
                Touch::Word => {
                    let size = size_of(settings, id.into());
                    if next % SAMPLE == 0 {
                        let probe = Probe {
                            flow: id % settings.flows,
                            sequence: 0xffff_ffff << 32 | next,
                            sent_ns: start.elapsed().as_nanos() as u64,
                        };
                        let _ = probe.write(&settings.addresses, &mut scratch[..size]);
                        place.write(&scratch[..size]);
                    } else {
                        place.skip(WORD).write(&(next as u32 & 0x7fff_ffff).to_be_bytes());
                    }
                    size
                }
                Touch::All => {
                    let size = size_of(settings, next);
                    let flow = (next % u64::from(settings.flows)) as u16;
                    let probe = Probe { flow, sequence: next, sent_ns: start.elapsed().as_nanos() as u64 };
                    let _ = probe.write(&settings.addresses, &mut scratch[..size]);
                    place.write(&scratch[..size]);
                    size
                }
            };
            next += 1;
            bytes += size;
            size
        });
        tx.publish();
        self.next = next;
        self.totals.sent += added as u64;
        self.totals.sent_bytes += bytes as u64;
        added
    }

    /// Receives a burst.
    #[inline]
    fn receive(&mut self, rx: &mut DriverRx) -> Result<usize, DriverFault> {
        let Traffic { settings, scratch, start, totals, seen, lost, .. } = self;
        let (mut frames, mut bytes) = (0, 0);
        let result = rx.receive(settings.touch != Touch::Nothing, |pieces| {
            match settings.touch {
                Touch::Nothing => {}
                Touch::Word => {
                    if pieces[0].array(WORD) == Some(TIMED) {
                        timed(pieces, scratch, start, totals);
                    }
                }
                Touch::All if check(pieces, scratch, start, totals, seen, lost) => {}
                // Neighbour discovery and the like of a guest or of the host.
                Touch::All => return totals.foreign += 1,
            }
            frames += 1;
            bytes += match pieces {
                [piece] => piece.len() as u64,
                pieces => pieces.iter().map(|piece| piece.len() as u64).sum(),
            };
        });
        totals.received += frames;
        totals.received_bytes += bytes;
        result
    }

    /// Sends back what comes, with the addresses swapped. What there is no room for is lost here, and missing there.
    fn reflect(&mut self, rx: &mut DriverRx, tx: &mut DriverTx) -> Result<usize, DriverFault> {
        let Traffic { settings, totals, scratch, seen, .. } = self;
        let count = rx.receive(true, |pieces| {
            let bytes = pieces.iter().map(|piece| piece.len()).sum::<usize>();
            totals.received += 1;
            totals.received_bytes += bytes as u64;
            let frame = gather(pieces, scratch);
            if settings.touch == Touch::All && verify(frame, totals, seen) == Err(Foreign) {
                totals.foreign += 1;
            }
            ethernet::swap_addresses(frame);
            let added = tx.add(1, |_, place| place.write(frame));
            totals.sent += added as u64;
            totals.sent_bytes += (added * bytes) as u64;
        })?;
        tx.publish();
        Ok(count)
    }
}

/// The queues that frames are sent and received on, and their connections: usually the same one.
struct Ends<'a> {
    rx: &'a mut DriverRx,
    tx: &'a mut DriverTx,
    from: &'a Connection,
    to: &'a Connection,
}

fn kick(wanted: bool, notifier: Option<&Notifier>) {
    if wanted && let Some(notifier) = notifier {
        notifier.kick();
    }
}

#[inline(always)]
fn size_of(settings: &Settings, index: u64) -> usize {
    match settings.sizes[..] {
        [size] => size,
        _ => settings.sizes[index as usize % settings.sizes.len()],
    }
}

/// A frame in private memory.
fn gather<'s>(pieces: &[Span<'_>], scratch: &'s mut Vec<u8>) -> &'s mut [u8] {
    let len = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    if scratch.len() < len {
        scratch.resize(len, 0);
    }
    let mut at = 0;
    for piece in pieces {
        at += piece.read(&mut scratch[at..]);
    }
    &mut scratch[..at]
}

#[cold]
fn timed(pieces: &[Span<'_>], scratch: &mut Vec<u8>, start: &Instant, totals: &mut Totals) {
    match Probe::read(gather(pieces, scratch)) {
        Ok(probe) => {
            let _ = totals.round_trip.record((start.elapsed().as_nanos() as u64).saturating_sub(probe.sent_ns));
        }
        Err(_) => totals.errors += 1,
    }
}

/// Checks a frame; `false`: it is none of ours.
fn check(
    pieces: &[Span<'_>],
    scratch: &mut Vec<u8>,
    start: &Instant,
    totals: &mut Totals,
    seen: &mut Seen,
    lost: &mut Lost,
) -> bool {
    match verify(gather(pieces, scratch), totals, seen) {
        Ok(Some(probe)) => {
            if probe.sequence < lost.before {
                // Only late; otherwise each standstill would widen the window for good.
                lost.frames = lost.frames.saturating_sub(1);
            }
            let _ = totals.round_trip.record((start.elapsed().as_nanos() as u64).saturating_sub(probe.sent_ns));
            true
        }
        Ok(None) => true,
        Err(Foreign) => false,
    }
}

/// A frame that is none of ours.
#[derive(PartialEq, Eq)]
struct Foreign;

/// Checks every byte of a frame, and that it has not come before. `None`: its numbers are damaged.
fn verify(frame: &[u8], totals: &mut Totals, seen: &mut Seen) -> Result<Option<Probe>, Foreign> {
    match Probe::read(frame) {
        Ok(probe) => {
            let (whole, first) = (probe.verify(frame).is_ok(), seen.first_time(probe.sequence));
            totals.errors += u64::from(!whole || !first);
            totals.duplicates += u64::from(whole && !first);
            Ok(Some(probe))
        }
        Err(ProbeError::Foreign) => Err(Foreign),
        Err(_) => {
            totals.errors += 1;
            Ok(None)
        }
    }
}

/// Frames of a window that were given up, as nothing came back for a while.
#[derive(Clone, Copy, Default)]
struct Lost {
    frames: u64,
    /// They have sequence numbers below this one.
    before: u64,
}

/// The last sequence numbers that have come: one bit each.
struct Seen {
    bits: Vec<u64>,
    highest: u64,
}

impl Default for Seen {
    fn default() -> Self {
        Seen { bits: vec![0; Self::SPAN as usize / 64], highest: 0 }
    }
}

impl Seen {
    /// More than can be under way in any ring.
    const SPAN: u64 = 1 << 17;

    /// Notes a number; `false`: it has been here before, or is older than anything that could be under way.
    fn first_time(&mut self, sequence: u64) -> bool {
        while self.highest < sequence {
            self.highest += 1;
            let at = self.highest % Self::SPAN;
            self.bits[at as usize / 64] &= !(1 << (at % 64));
        }
        if self.highest - sequence >= Self::SPAN {
            return false;
        }
        let at = sequence % Self::SPAN;
        let (word, bit) = (&mut self.bits[at as usize / 64], 1 << (at % 64));
        let first = *word & bit == 0;
        *word |= bit;
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicates_are_noticed() {
        let mut seen = Seen::default();
        for sequence in [0, 1, 5, 3, 4, 2, 200_000, 199_999] {
            assert!(seen.first_time(sequence), "{sequence}");
        }
        for sequence in [0, 5, 199_999, 200_000] {
            assert!(!seen.first_time(sequence), "{sequence}");
        }
    }
}
