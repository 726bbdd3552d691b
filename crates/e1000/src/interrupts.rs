//! Interrupts and their moderation (8254x Software Developer's Manual, 3.2.7, 3.4 and 13.4.17 to 13.4.21), a state machine over
//! time. Both sides of the device report causes; whoever has the clock asks when the line is to be raised.

use crate::registers::cause;

/// Unit of ITR in nanoseconds.
pub const ITR_UNIT: u64 = 256;
/// Unit of TIDV, TADV, RDTR and RADV in nanoseconds.
pub const DELAY_UNIT: u64 = 1024;
/// Smallest interval that QEMU's device uses, in units of ITR.
const QEMU_LEAST: u64 = 500;

/// How interrupts are moderated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mitigation {
    /// ITR, TIDV, TADV, RDTR and RADV have an effect; if not, they are only stored.
    pub enabled: bool,
    /// ITR is never less than 500 (128 µs), as in QEMU's device.
    pub clamp_itr: bool,
}

impl Default for Mitigation {
    /// As the registers say.
    fn default() -> Mitigation {
        Mitigation { enabled: true, clamp_itr: false }
    }
}

/// What has happened in the queues, besides bits of [`cause`].
pub mod event {
    /// A descriptor was written back whose interrupt may be delayed.
    pub const SENT: u32 = 1 << 30;
    /// A frame was received.
    pub const RECEIVED: u32 = 1 << 31;
}

/// A pair of timers: the delay since the last packet, and the longest delay since the first one.
#[derive(Clone, Copy, Debug, Default)]
struct Delay {
    /// In units of [`DELAY_UNIT`]; 0: none.
    relative: u16,
    absolute: u16,
    /// First and last packet since the timers last ran out; `None`: they do not run.
    since: Option<(u64, u64)>,
}

impl Delay {
    fn restart(&mut self, now: u64) {
        let first = self.since.map_or(now, |(first, _)| first);
        self.since = Some((first, now.max(first)));
    }

    /// When the first of the two runs out.
    fn due(&self) -> Option<u64> {
        let (first, last) = self.since?;
        let after = |start: u64, units: u16| start.saturating_add(u64::from(units) * DELAY_UNIT);
        let relative = after(last, self.relative);
        Some(if self.absolute == 0 { relative } else { relative.min(after(first, self.absolute)) })
    }
}

/// Result of [`Interrupts::settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The interrupt was asserted just now: raise the line, or send the message.
    pub raised: bool,
    /// When to settle again if nothing happens before, in nanoseconds; `None`: need not.
    pub at: Option<u64>,
}

/// Causes, mask and moderation of one device. Times are in nanoseconds since any fixed point. Calls without a time happen at that of
/// the last call with one; [`Interrupts::post`] of nothing lets time pass.
///
/// Whoever has the clock may come late. The part would have interrupted in time, so intervals count from when an interrupt was due:
/// one that is late does not delay those behind it.
#[derive(Clone, Debug, Default)]
pub struct Interrupts {
    mitigation: Mitigation,
    icr: u32,
    ims: u32,
    itr: u16,
    transmit: Delay,
    receive: Delay,
    /// Time of the last call with one.
    now: u64,
    /// Since when a cause has been pending that is not masked, without the interrupt being asserted.
    since: Option<u64>,
    /// When the interrupt was due that was asserted last.
    last: Option<u64>,
    asserted: bool,
}

impl Interrupts {
    /// Returns a device's interrupts after reset.
    pub fn new(mitigation: Mitigation) -> Interrupts {
        Interrupts { mitigation, ..Interrupts::default() }
    }

    /// Resets all but the configuration.
    pub fn reset(&mut self) {
        *self = Interrupts::new(self.mitigation);
    }

    /// Adds what has happened: bits of [`cause`] and [`event`].
    pub fn post(&mut self, events: u32, now: u64) {
        // What is due does not start again.
        let now = self.expire(now);
        let mut causes = events & cause::ALL;
        if events & event::SENT != 0 {
            causes |= self.delayed(now, cause::TXDW, |interrupts| &mut interrupts.transmit);
        }
        if events & event::RECEIVED != 0 {
            causes |= self.delayed(now, cause::RXT0, |interrupts| &mut interrupts.receive);
        }
        self.set(causes, now);
    }

    /// Starts the timers of a cause; returns the cause if there is no delay.
    fn delayed(&mut self, now: u64, cause: u32, delay: impl Fn(&mut Interrupts) -> &mut Delay) -> u32 {
        let enabled = self.mitigation.enabled;
        let delay = delay(self);
        if !enabled || delay.relative == 0 {
            return cause;
        }
        delay.restart(now);
        0
    }

    /// Sets causes, as of this time. Timers for the same cause stop: there is nothing left to delay.
    fn set(&mut self, causes: u32, at: u64) {
        self.icr |= causes;
        if causes & cause::TXDW != 0 {
            self.transmit.since = None;
        }
        if causes & cause::RXT0 != 0 {
            self.receive.since = None;
        }
        self.note(at);
    }

    /// Causes, mask or line have changed at this time.
    fn note(&mut self, at: u64) {
        let waits = self.is_pending() && !self.asserted;
        self.since = if waits { Some(self.since.map_or(at, |since| since.min(at))) } else { None };
    }

    /// Lets time pass: sets what has become due, as of when it was. Returns the time, which is that of a thread ahead of the caller's,
    /// if there was one.
    fn expire(&mut self, now: u64) -> u64 {
        let before = self.now;
        self.now = now.max(before);
        let now = self.now;
        // A delay that was made shorter meanwhile ended then at the earliest.
        let due = |delay: &Delay| delay.due().filter(|&due| due <= now).map(|due| due.max(before));
        let mut ended = [(due(&self.transmit), cause::TXDW), (due(&self.receive), cause::RXT0)];
        // In their order: at the time of one that is masked, the other one was not yet pending.
        ended.sort_unstable();
        for (due, cause) in ended {
            if let Some(due) = due {
                self.set(cause, due);
            }
        }
        now
    }

    /// Returns whether a cause is pending that is not masked.
    fn is_pending(&self) -> bool {
        self.icr & self.ims != 0
    }

    /// Causes that are gone or masked no longer assert the interrupt.
    fn release(&mut self) {
        self.asserted &= self.is_pending();
        self.note(self.now);
    }

    /// Asserts the interrupt if it is time.
    pub fn settle(&mut self, now: u64) -> Settled {
        let now = self.expire(now);
        self.release();
        if self.asserted {
            return Settled { raised: false, at: None };
        }
        let Some(since) = self.since else {
            let due = |delay: &Delay, cause: u32| delay.due().filter(|_| self.ims & cause != 0);
            let (transmit, receive) = (due(&self.transmit, cause::TXDW), due(&self.receive, cause::RXT0));
            // Never before the interval is over: asked then, it would only say so.
            let at = transmit.into_iter().chain(receive).min().map(|due| due.max(self.earliest()));
            return Settled { raised: false, at };
        };
        let due = self.earliest().max(since);
        if now < due {
            return Settled { raised: false, at: Some(due) };
        }
        (self.asserted, self.since, self.last) = (true, None, Some(due));
        Settled { raised: true, at: None }
    }

    /// When the interrupt may next be asserted.
    fn earliest(&self) -> u64 {
        self.last.map_or(0, |last| last.saturating_add(self.interval()))
    }

    /// Returns the least interval between interrupts in nanoseconds.
    pub fn interval(&self) -> u64 {
        if !self.mitigation.enabled {
            return 0;
        }
        let least = if self.mitigation.clamp_itr { QEMU_LEAST } else { 0 };
        u64::from(self.itr).max(least) * ITR_UNIT
    }

    /// Returns whether the interrupt is asserted.
    pub fn is_asserted(&self) -> bool {
        self.asserted
    }

    /// Reads ICR, which acknowledges all causes.
    pub fn read_icr(&mut self, now: u64) -> u32 {
        self.expire(now);
        (self.asserted, self.since) = (false, None);
        std::mem::take(&mut self.icr)
    }

    /// Returns the causes without acknowledging them (a read of ICS).
    pub fn causes(&mut self, now: u64) -> u32 {
        self.expire(now);
        self.icr
    }

    /// Writes ICR: acknowledges these causes.
    pub fn acknowledge(&mut self, causes: u32, now: u64) {
        self.expire(now);
        self.icr &= !causes;
        self.release();
    }

    /// Returns the mask.
    pub fn ims(&self) -> u32 {
        self.ims
    }

    /// Writes IMS: these causes interrupt.
    pub fn unmask(&mut self, causes: u32) {
        self.ims |= causes & cause::ALL;
        self.note(self.now);
    }

    /// Writes IMC: these causes do not.
    pub fn mask(&mut self, causes: u32) {
        self.ims &= !causes;
        self.release();
    }

    /// Writes ITR. It applies from the last interrupt on.
    pub fn set_itr(&mut self, itr: u16) {
        self.itr = itr;
        // What is due by that is due now, not before.
        self.since = self.since.map(|_| self.now);
    }

    /// Writes TIDV.
    pub fn set_tidv(&mut self, tidv: u16) {
        self.transmit.relative = tidv;
    }

    /// Writes TADV.
    pub fn set_tadv(&mut self, tadv: u16) {
        self.transmit.absolute = tadv;
    }

    /// Writes RDTR.
    pub fn set_rdtr(&mut self, rdtr: u16) {
        self.receive.relative = rdtr;
    }

    /// Writes RADV.
    pub fn set_radv(&mut self, radv: u16) {
        self.receive.absolute = radv;
    }

    /// Ends the receive delay (RDTR.FPD).
    pub fn flush(&mut self) {
        if self.receive.since.is_some() {
            self.set(cause::RXT0, self.now);
        }
    }
}
