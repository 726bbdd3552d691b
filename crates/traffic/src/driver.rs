//! The virtio-net driver that sends, receives and reflects test frames: over one connection ([`Traffic::run`]) or over several in
//! turn ([`Traffic::run_in_turn`]).

use crate::{
    check::{Frame, Lost, Seen, gather, timed, verify},
    probe::Probe,
    settings::{Mode, Settings, Touch},
    totals::{Left, Totals},
};
use ringroad_host::vhost_user::{Connection, Notifier};
use ringroad_mem::Span;
use ringroad_net::{Driver, DriverRx, DriverTx};
use ringroad_ring::{BURST, DriverFault};
use ringroad_switch::{Gather, Pauses};
use ringroad_wire::ethernet;
use std::{
    mem,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

/// Offset of the word of [`Touch::Word`] in a frame: the upper half of the probe's sequence number.
pub(crate) const WORD: usize = 42;
/// The word of a frame that carries a time; other frames never have it.
const TIMED: [u8; 4] = [0xff; 4];
/// One frame in this many carries a time.
const SAMPLE: u64 = 1024;
/// Rounds between looks at the clock.
const ROUNDS: u64 = 32;
/// Interval of the checks for a disconnected device if the driver may reconnect; each check is a system call.
const CHECK: Duration = Duration::from_millis(1);
/// How long a device may take at the end to return what it has.
const LAST: Duration = Duration::from_secs(1);
/// If no frame arrives for this long at the end, none is expected any more.
const QUIET: Duration = Duration::from_millis(50);
/// If no frame of the window returns for this long, the window's frames are considered lost.
const LOST: Duration = Duration::from_millis(100);

/// A driver of one pair of queues.
pub struct Traffic {
    settings: Settings,
    start: Instant,
    totals: Totals,
    scratch: Vec<u8>,
    next: u64,
    /// Sequence numbers received (with [`Touch::All`]).
    seen: Seen,
    lost: Lost,
    /// Frames sent at once: [`Settings::burst`], or half of a small ring.
    burst: usize,
    /// Since the last reconnect, until a frame arrives: when the device disconnected, and the frames received by then.
    recovering: Option<(Instant, u64)>,
}

impl std::fmt::Debug for Traffic {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Traffic")
            .field("settings", &self.settings)
            .field("totals", &self.totals)
            .finish_non_exhaustive()
    }
}

/// State of [`Traffic::look`] from one look at the clock to the next.
struct Pace {
    next_tick: Duration,
    next_check: Duration,
    /// Total number of frames that may have been sent by now.
    allowed: u64,
    /// When frames were last received, and the total then.
    moved: (Duration, u64),
}

impl Traffic {
    /// Creates a driver and fills the transmit buffers of the first pair of queues.
    pub fn new(settings: Settings, driver: &mut Driver) -> Traffic {
        let mut scratch = vec![0; settings.longest()];
        driver.tx.iter_mut().for_each(|tx| tx.set_writes(settings.touch.writes()));
        if let Some(tx) = driver.tx.first_mut() {
            tx.prepare(|id, place| {
                let probe = Probe { flow: id % settings.flows, sequence: 0, sent_ns: 0 };
                put(&probe, &settings, settings.size(id.into()), &mut scratch, place);
            });
        }
        let most = settings.burst.clamp(1, BURST);
        Traffic {
            settings,
            start: Instant::now(),
            totals: Totals::default(),
            scratch,
            next: 0,
            seen: Seen::default(),
            lost: Lost::default(),
            burst: driver.tx.first().map_or(1, |tx| tx.free().div_ceil(2)).clamp(1, most),
            recovering: None,
        }
    }

    /// Runs until the time is over, it is stopped, or the device has disconnected for good. Calls `tick` every second. To receive
    /// from another connection, exchange receive queues and their notifiers with it.
    ///
    /// # Errors
    /// The device broke a rule of the rings.
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
            let result = self.run_queues(connection, (&mut rx, &mut tx), time, &mut tick);
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
        Ok(mem::take(&mut self.totals))
    }

    fn is_stopped(&self) -> bool {
        self.settings.stop.load(Ordering::Relaxed)
    }

    /// Waits for the device to return. Returns whether it has.
    fn recover(&mut self, connection: &mut Connection) -> bool {
        let Some(patience) = self.settings.reconnect else { return false };
        let since = Instant::now();
        log::info!("the device at {} has disconnected; waiting for it to return", connection.path().display());
        if let Err(error) = connection.reconnect(patience) {
            log::error!("the device did not return within {:.1} s: {error}", since.elapsed().as_secs_f64());
            return false;
        }
        self.totals.reconnects += 1;
        // Frames that it had taken may be lost: do not wait for them.
        self.give_up();
        self.recovering.get_or_insert((since, self.totals.received));
        true
    }

    /// Considers all frames in flight lost.
    fn give_up(&mut self) {
        self.lost = Lost { frames: self.totals.in_flight(), before: self.next };
    }

    /// Stops sending, reclaims what was sent, and stops the queues.
    fn finish(&mut self, connection: &mut Connection) -> Result<Left, DriverFault> {
        let (start, mut last) = (Instant::now(), Instant::now());
        let mut left = Left { under_way: 0, missing: None };
        for stopped in [false, true] {
            if stopped {
                left.missing = connection.stop();
            }
            while let (Some(rx), Some(tx)) = (connection.driver.rx.first_mut(), connection.driver.tx.first_mut()) {
                let reclaimed = tx.reclaim()?;
                let received =
                    if self.settings.mode == Mode::Tx { self.receive(rx)? } else { rx.receive(false, |_| ())? };
                if reclaimed + received > 0 {
                    last = Instant::now();
                    continue;
                }
                left.under_way = tx.under_way();
                // A port that others send to continues to receive frames.
                let done = left.under_way == 0 && last.elapsed() > QUIET || start.elapsed() > LAST;
                if stopped || done || connection.is_closed() {
                    break;
                }
                kick(true, connection.tx.first());
                kick(true, connection.rx.first());
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(left)
    }

    /// Runs several drivers in turn, one round each, polling. Returns their totals without round trips.
    ///
    /// # Errors
    /// A device broke a rule of the rings.
    pub fn run_in_turn(each: &mut [(Traffic, Connection)], time: Duration) -> Result<Totals, DriverFault> {
        let start = Instant::now();
        for (traffic, connection) in each.iter_mut() {
            (traffic.start, traffic.totals) = (start, Totals::default());
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
        let mut all = Totals { time: start.elapsed(), ..Totals::default() };
        each.iter().for_each(|(traffic, _)| all.add(&traffic.totals));
        Ok(all)
    }

    fn run_queues(
        &mut self,
        connection: &Connection,
        (rx, tx): (&mut DriverRx, &mut DriverTx),
        time: Duration,
        tick: &mut impl FnMut(&Totals),
    ) -> Result<(), DriverFault> {
        // After a reconnect, the time continues.
        let begun = self.start.elapsed();
        let mut pace = Pace {
            next_tick: Duration::from_secs(begun.as_secs() + 1),
            next_check: begun + CHECK,
            allowed: u64::MAX,
            moved: (begun, self.totals.received),
        };
        // With a given rate, or asleep, it is slower than the device.
        let gathers = self.settings.rate.is_none() && !self.settings.event_driven;
        let mut pauses = Pauses::new(if gathers { self.settings.gather } else { Gather::Off });
        rx.disable_notification();
        tx.disable_notification();
        for round in 0u64.. {
            if (round % ROUNDS == 0 || self.settings.event_driven) && !self.look(&mut pace, connection, time, tick) {
                break;
            }
            let received = self.totals.received;
            let worked = self.round(rx, tx, pace.allowed)?;
            let pause = pauses.after((self.totals.received - received) as usize, Instant::now);
            // Asking costs a full fence. A polling device does not need to be notified; one that sleeps is notified when there
            // is nothing else to do, or soon.
            if worked == 0 || round % ROUNDS == 0 || self.settings.event_driven {
                kick(tx.wants_notification(), connection.tx.first());
                kick(rx.wants_notification(), connection.rx.first());
            }
            if worked == 0 {
                if self.settings.event_driven {
                    self.sleep(connection, rx, tx, time, pace.allowed);
                } else {
                    std::hint::spin_loop();
                }
            }
            if !pause.is_zero() {
                let start = Instant::now();
                while start.elapsed() < pause {
                    std::hint::spin_loop();
                }
            }
        }
        self.totals.time = self.start.elapsed();
        Ok(())
    }

    /// Looks at the clock: reports, notices lost frames and a disconnected device, sets the pace. Returns whether to continue.
    fn look(
        &mut self,
        pace: &mut Pace,
        connection: &Connection,
        time: Duration,
        tick: &mut impl FnMut(&Totals),
    ) -> bool {
        let now = self.start.elapsed();
        self.totals.time = now;
        let ticks = now >= pace.next_tick;
        if ticks {
            pace.next_tick += Duration::from_secs(1);
            tick(&self.totals);
        }
        let checks = self.settings.reconnect.is_some() && now >= pace.next_check;
        if checks {
            pace.next_check = now + CHECK;
        }
        if now >= time || self.is_stopped() || (ticks || checks) && connection.is_closed() {
            return false;
        }
        if let Some((since, before)) = self.recovering
            && self.totals.received > before
        {
            let time = since.elapsed();
            log::info!("receiving frames again, {:.1} ms after the disconnect", time.as_secs_f64() * 1e3);
            let _ = self.totals.recovery.record(time.as_nanos() as u64);
            self.recovering = None;
        }
        if let Some(rate) = self.settings.rate {
            pace.allowed = (now.as_secs_f64() * rate) as u64;
        }
        if pace.moved.1 != self.totals.received {
            pace.moved = (now, self.totals.received);
        } else if now - pace.moved.0 > LOST {
            self.give_up();
            // The next window gets its time, too.
            pace.moved.0 = now;
        }
        true
    }

    /// Does one round on a pair of queues: reclaims, receives, and sends as long as fewer than `allowed` frames were sent in
    /// total. Returns how many frames it moved.
    #[inline(always)]
    fn round(&mut self, rx: &mut DriverRx, tx: &mut DriverTx, allowed: u64) -> Result<usize, DriverFault> {
        // Reading a descriptor that the device is about to write takes the cache line from it: only if room is needed.
        while tx.free() < self.burst && tx.reclaim()? > 0 {}
        if tx.free() >= self.burst {
            tx.prefetch(self.burst);
        }
        let mut worked = 0;
        match self.settings.mode {
            Mode::Tx => {
                let mut room = allowed.saturating_sub(self.totals.sent);
                if let Some(window) = self.settings.window {
                    let in_flight = self.totals.sent.saturating_sub(self.totals.received + self.lost.frames);
                    room = room.min(window.saturating_sub(in_flight));
                }
                // Before sending: what was just prefetched arrives meanwhile.
                worked += self.receive(rx)?;
                // In whole bursts, once the device has returned enough buffers.
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
        let rx_ready = rx.enable_notification();
        // Only a sender with more to send waits for room.
        let tx_ready = self.settings.mode == Mode::Tx && tx.free() < self.burst && tx.enable_notification();
        if !rx_ready && !tx_ready {
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
        let mut added = 0;
        while added < count {
            let left = count - added;
            let run = match (self.settings.touch, self.settings.single_size()) {
                // Up to the next one with a time.
                (Touch::Word, Some(size)) if !self.next.is_multiple_of(SAMPLE) => {
                    self.send_words(tx, left.min((SAMPLE - self.next % SAMPLE) as usize), size)
                }
                (Touch::Word, Some(_)) => self.send_any(tx, 1),
                (Touch::Sent, Some(size)) => self.send_words(tx, left, size),
                _ => self.send_any(tx, left),
            };
            if run == 0 {
                break;
            }
            added += run;
        }
        tx.publish();
        added
    }

    /// Sends up to `count` frames of this size without a time. There is little between the stores to the frames: each waits for a
    /// line that the device has read, and as many wait at the same time as the store queue holds.
    #[inline]
    fn send_words(&mut self, tx: &mut DriverTx, count: usize, size: usize) -> usize {
        let (settings, mut next) = (&self.settings, self.next);
        let mut fill = |place: Span<'_>, many_addresses: bool| {
            touch(settings, many_addresses, next, place);
            next += 1;
            size
        };
        // Two loops: the common one has no branch.
        let added = match settings.has_many_addresses() {
            true => tx.add(count, |_, place| fill(place, true)),
            false => tx.add(count, |_, place| fill(place, false)),
        };
        self.next = next;
        self.totals.sent += added as u64;
        self.totals.sent_bytes += (added * size) as u64;
        added
    }

    /// Sends up to `count` frames.
    fn send_any(&mut self, tx: &mut DriverTx, count: usize) -> usize {
        let Traffic { settings, scratch, start, .. } = self;
        let (mut bytes, mut next) = (0, self.next);
        let many_addresses = settings.has_many_addresses();
        let sent_ns = || start.elapsed().as_nanos() as u64;
        let added = tx.add(count, |id, place| {
            let size = settings.size(if settings.touch == Touch::All { next } else { id.into() });
            match settings.touch {
                Touch::Nothing => {}
                Touch::Word if next.is_multiple_of(SAMPLE) => {
                    let sequence = 0xffff_ffff << 32 | next;
                    let probe = Probe { flow: id % settings.flows, sequence, sent_ns: sent_ns() };
                    put(&probe, settings, size, scratch, place);
                }
                Touch::Word | Touch::Sent => touch(settings, many_addresses, next, place),
                Touch::All => {
                    let flow = (next % u64::from(settings.flows)) as u16;
                    let probe = Probe { flow, sequence: next, sent_ns: sent_ns() };
                    put(&probe, settings, size, scratch, place);
                }
            };
            next += 1;
            bytes += size;
            size
        });
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
        let result = rx.receive(settings.touch.reads(), |pieces| {
            match settings.touch {
                Touch::Nothing | Touch::Sent => {}
                Touch::Word => {
                    if pieces.first().and_then(|piece| piece.array(WORD)) == Some(TIMED) {
                        timed(gather(pieces, scratch), *start, totals);
                    }
                }
                Touch::All => match verify(gather(pieces, scratch), totals, seen) {
                    Frame::Probe(probe) => {
                        lost.arrived(probe.sequence);
                        totals.record_round_trip(*start, probe.sent_ns);
                    }
                    Frame::Damaged => {}
                    Frame::Foreign => return,
                },
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

    /// Sends received frames back, with the addresses swapped. Frames that find no room are dropped; the sender misses them.
    fn reflect(&mut self, rx: &mut DriverRx, tx: &mut DriverTx) -> Result<usize, DriverFault> {
        let Traffic { settings, totals, scratch, seen, .. } = self;
        let count = rx.receive(true, |pieces| {
            let frame = gather(pieces, scratch);
            totals.received += 1;
            totals.received_bytes += frame.len() as u64;
            if settings.touch == Touch::All {
                verify(frame, totals, seen);
            }
            ethernet::swap_addresses(frame);
            let added = tx.add(1, |_, place| place.write(frame));
            totals.sent += added as u64;
            totals.sent_bytes += (added * frame.len()) as u64;
        })?;
        tx.publish();
        Ok(count)
    }
}

fn kick(wanted: bool, notifier: Option<&Notifier>) {
    if wanted && let Some(notifier) = notifier {
        notifier.kick();
    }
}

/// Writes to a frame what differs from the last one in its buffer.
#[inline(always)]
fn touch(settings: &Settings, many_addresses: bool, sequence: u64, place: Span<'_>) {
    if many_addresses {
        let [_, _, destination @ ..] = settings.destination(sequence).0;
        place.skip(2).write(&destination);
        if settings.sources > 1 {
            let [_, _, source @ ..] = settings.source(sequence).0;
            place.skip(8).write(&source);
        }
    }
    place.skip(WORD).write(&(sequence as u32 & 0x7fff_ffff).to_be_bytes());
}

/// Writes a whole probe of `size` bytes to a transmit buffer.
pub(crate) fn put(probe: &Probe, settings: &Settings, size: usize, scratch: &mut [u8], place: Span<'_>) {
    if let Some(frame) = scratch.get_mut(..size)
        && probe.write(&settings.addresses(probe.sequence), frame).is_ok()
    {
        place.write(frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringroad_mem::Region;

    #[test]
    fn what_is_written_of_a_frame_makes_its_addresses() {
        let base = Settings { destinations: 70_000, sources: 300, ..Settings::flood(64) };
        for settings in [base.clone(), Settings { sources: 1, ..base.clone() }, Settings { destinations: 1, ..base }] {
            let (region, mut scratch) = (Region::private(4096, 0).unwrap(), vec![0; 64]);
            let place = region.span(0, 64).unwrap();
            put(&Probe { flow: 0, sequence: 0, sent_ns: 0 }, &settings, 64, &mut scratch, place);
            for sequence in (0..100_000).step_by(997) {
                touch(&settings, settings.has_many_addresses(), sequence, place);
                let head = place.array::<14>(0).unwrap();
                assert_eq!(ethernet::Addresses::read(&head), Some(settings.addresses(sequence)), "{sequence}");
                assert_eq!(place.array(WORD), Some((sequence as u32).to_be_bytes()));
            }
        }
    }
}
