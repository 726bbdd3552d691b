//! Interrupt moderation: a driver is not notified of each used buffer, but when enough have gathered or some time has passed, as
//! VIRTIO_NET_F_NOTF_COAL specifies (virtio 1.3, 5.1.6.5.9). A state machine over time; `device/` counts, `host` has the clock.

use ringroad_ring::DeviceRing;
use std::time::Duration;

/// How long used buffers may wait for their notification: until the first of these limits is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalesce {
    /// Number of packets (`max_packets`).
    pub packets: u32,
    /// Their length in bytes.
    pub bytes: u64,
    /// Time since the first of them (`max_usecs`). Zero: they do not wait.
    pub delay: Duration,
}

impl Coalesce {
    /// Each burst is notified.
    pub const NONE: Coalesce = Coalesce { packets: 0, bytes: 0, delay: Duration::ZERO };

    /// Limits by time, for a driver that has not set any of its own. Ended early by as many bytes as a frame can have: a sender
    /// of long ones may wait for their buffers.
    pub const fn delayed(delay: Duration) -> Coalesce {
        Coalesce { packets: u32::MAX, bytes: 64 << 10, delay }
    }
}

/// Whether to notify a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Notify it.
    Now,
    /// It does not want to be notified, or there is nothing new.
    Not,
    /// Ask again at this time.
    At(Duration),
}

/// The moderation of one queue.
///
/// A driver that has asked for limits gets what it has asked for. For others, used buffers wait in two generations: when the limits
/// are reached, the newer ones become the older ones, and the driver is notified only if it waits for those that were the older ones
/// until then. A driver with EVENT_IDX that takes used buffers on other occasions, as Linux does whenever it sends or receives,
/// says so by the event index that it writes then, and is not interrupted for them.
#[derive(Debug)]
pub(crate) struct Moderation {
    /// Those that count: of a generation, or of all that waits.
    limits: Coalesce,
    /// Those of a driver that has set none.
    default: Coalesce,
    asked: Option<Coalesce>,
    /// Used buffers that may wait at most: half the ring, so that a driver that waits for them does not run out.
    half: usize,
    /// Packets, bytes and buffers since the limits were last reached.
    packets: u32,
    bytes: u64,
    buffers: usize,
    /// The driver is to be notified whatever the limits: it is short of buffers.
    urgent: bool,
    /// When [`Moderation::settle`] was first called since.
    since: Option<Duration>,
    /// The size of the older generation, in what the ring counts as unsignalled.
    older: u32,
    /// How many times in a row the driver did not wait for an older generation.
    unwanted: u32,
}

/// How many times the life of a generation is doubled for a driver that does not wait for it: its timer costs the worker more
/// than the rest of the work for a frame.
const DOUBLINGS: u32 = 3;

impl Moderation {
    /// Notifies at once, for a ring with this number of entries.
    pub fn new(size: u32) -> Moderation {
        let (limits, default) = (Coalesce::NONE, Coalesce::NONE);
        let (half, urgent) = (size as usize / 2, false);
        let (packets, bytes, buffers, since, older, unwanted) = (0, 0, 0, None, 0, 0);
        Moderation { limits, default, asked: None, half, packets, bytes, buffers, urgent, since, older, unwanted }
    }

    /// Sets the limits for a driver that sets none. They apply to what waits already.
    pub fn set_default(&mut self, limits: Coalesce) {
        self.default = limits;
        self.choose();
    }

    /// Sets the limits that the driver has asked for, if it has; as `set_default`.
    pub fn ask(&mut self, limits: Option<Coalesce>) {
        self.asked = limits;
        self.choose();
    }

    fn choose(&mut self) {
        let Coalesce { packets, bytes, delay } = self.default;
        self.limits =
            self.asked.unwrap_or(Coalesce { packets: packets.div_ceil(2), bytes: bytes / 2, delay: delay / 2 });
    }

    /// Counts used buffers, and the packets in them.
    #[inline(always)]
    pub fn count(&mut self, packets: usize, bytes: u64, buffers: usize) {
        self.packets = self.packets.saturating_add(packets as u32);
        self.bytes = self.bytes.saturating_add(bytes);
        self.buffers = self.buffers.saturating_add(buffers);
    }

    /// The driver has too few buffers left: the next decision does not wait.
    #[cold]
    pub fn urge(&mut self) {
        self.urgent = true;
    }

    /// Returns whether the driver has set limits.
    #[inline(always)]
    pub fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Returns whether the driver is short of buffers.
    #[inline(always)]
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    #[inline(always)]
    fn holds(&self) -> bool {
        let Coalesce { packets, bytes, delay } = self.limits;
        let most = if self.asked.is_some() { self.half } else { self.half / 2 };
        let room = self.packets < packets && self.bytes < bytes && self.buffers < most;
        !delay.is_zero() && room && !self.urgent
    }

    /// Returns whether a driver certainly wants to be notified now. `false` is not final: [`Moderation::settle`] must be called
    /// before going idle.
    #[inline(always)]
    pub fn wants_notification(&mut self, ring: &mut DeviceRing) -> bool {
        if self.holds() {
            return false;
        }
        if self.ages() {
            return self.age(ring);
        }
        let wants = ring.wants_notification(false);
        if wants {
            self.notified(ring);
        }
        wants
    }

    /// Returns whether used buffers wait in generations.
    #[inline(always)]
    fn ages(&self) -> bool {
        !self.limits.delay.is_zero() && self.asked.is_none() && !self.urgent
    }

    /// The limits are reached: a new generation begins. Returns whether to notify the driver.
    #[inline(never)]
    fn age(&mut self, ring: &mut DeviceRing) -> bool {
        ring.flush();
        let wants = ring.wants_notification_of(self.older);
        self.unwanted = if wants { 0 } else { (self.unwanted + u32::from(self.older > 0)).min(DOUBLINGS) };
        self.restart();
        self.older = ring.unsignalled();
        wants
    }

    /// Decides about what is published. `now`: time since any fixed point.
    pub fn settle(&mut self, ring: &mut DeviceRing, now: Duration) -> Notice {
        if ring.unsignalled() == 0 {
            self.restart();
            return Notice::Not;
        }
        if self.holds() {
            let since = *self.since.get_or_insert(now);
            let due = since.saturating_add(self.delay());
            // Else it is due, or `since` was another clock's.
            if (since..due).contains(&now) {
                return Notice::At(due);
            }
        }
        if !self.ages() {
            self.restart();
            return if ring.wants_notification(true) { Notice::Now } else { Notice::Not };
        }
        if self.age(ring) {
            return Notice::Now;
        }
        if ring.unsignalled() == 0 {
            return Notice::Not;
        }
        self.since = Some(now);
        Notice::At(now.saturating_add(self.delay()))
    }

    fn delay(&self) -> Duration {
        if self.asked.is_some() { self.limits.delay } else { self.limits.delay.saturating_mul(1 << self.unwanted) }
    }

    /// The driver is about to be notified, so everything that was counted is published first.
    #[inline]
    fn notified(&mut self, ring: &mut DeviceRing) {
        if !self.limits.delay.is_zero() {
            ring.flush();
        }
        self.restart();
    }

    fn restart(&mut self) {
        (self.packets, self.bytes, self.buffers, self.urgent, self.since, self.older) = (0, 0, 0, false, None, 0);
    }
}

#[cfg(test)]
mod tests;
