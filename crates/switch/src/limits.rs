//! What a port may do to the others: how many addresses, which ones, how much to everybody. `forward.rs` holds each port to it.

use ringroad_wire::ethernet::MacAddr;
use std::time::Duration;

/// What a port may do to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How many addresses are learned of it.
    pub addresses: u32,
    /// The address that is the port's own: frames for it go there and nowhere else, and nobody else can send with it.
    pub own: Option<MacAddr>,
    /// All its frames must come from its own address.
    pub fixed: bool,
    /// How many frames a second it may send to more than one port: broadcast, multicast, and to unknown addresses. 0: as many
    /// as it likes.
    pub storm: u32,
    /// Whether frames to link-local addresses (IEEE 802.1Q, table 8-1), which no bridge forwards, go in and out here.
    pub link_local: bool,
}

impl Limits {
    /// Those of a guest, unless told otherwise.
    pub const GUEST: Limits = Limits { addresses: 256, own: None, fixed: false, storm: 10_000, link_local: false };
    /// Those of a port with a whole network behind it.
    pub const NETWORK: Limits = Limits { addresses: 4096, ..Limits::GUEST };
}

impl Default for Limits {
    /// Those of a guest.
    fn default() -> Limits {
        Limits::GUEST
    }
}

/// Why the switch drops a frame, or does not learn its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// More frames to everybody than the port may send.
    Storm,
    /// It came from an address that the port may not use.
    Spoofed,
    /// To a link-local address.
    LinkLocal,
}

/// A port uses an address that is, or was, another one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It has moved.
    Moved,
    /// It stays where it is, as frames came from there a moment ago. Those of the claimant are forwarded.
    Held,
    /// It is the other port's own. The claimant's frames are dropped.
    Owned,
}

/// Frames to everybody that a port may send now.
#[derive(Clone, Copy)]
pub(crate) struct Storm {
    tokens: u64,
    filled: Duration,
}

impl Default for Storm {
    fn default() -> Storm {
        // As many as there may be at once.
        Storm { tokens: u64::MAX, filled: Duration::ZERO }
    }
}

impl Storm {
    /// How many of `wanted` frames may go; `rate` a second, and those of 10 ms or 64 at once.
    pub(crate) fn take(&mut self, wanted: usize, rate: u32, now: Duration) -> usize {
        if rate == 0 {
            return wanted;
        }
        const SECOND: u128 = 1_000_000_000;
        let most = u64::from(rate / 100).max(64);
        let passed = now.saturating_sub(self.filled);
        let due = passed.as_nanos().saturating_mul(rate.into()) / SECOND;
        if due.saturating_add(self.tokens.into()) >= most.into() {
            (self.tokens, self.filled) = (most, now);
        } else {
            self.tokens += due as u64;
            // Not `now`: what is less than a token counts later.
            self.filled += Duration::from_nanos((due * SECOND / u128::from(rate)) as u64);
        }
        let granted = self.tokens.min(wanted as u64);
        self.tokens -= granted;
        granted as usize
    }
}

/// How often a port's claims are told of: a few at once, then one a minute.
#[derive(Clone, Copy)]
pub(crate) struct Notices {
    left: u32,
    since: u32,
}

impl Notices {
    const BURST: u32 = 4;
    const EVERY: u32 = 60;

    pub(crate) fn new() -> Notices {
        Notices { left: Self::BURST, since: 0 }
    }

    /// Whether one may be told of now, in seconds.
    pub(crate) fn take(&mut self, now: u32) -> bool {
        let due = now.saturating_sub(self.since) / Self::EVERY;
        self.since += due * Self::EVERY;
        self.left = self.left.saturating_add(due).min(Self::BURST);
        let granted = self.left > 0;
        self.left -= u32::from(granted);
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_frames_a_second_whatever_the_steps() {
        for step in [1, 7, 100, 3333] {
            let mut storm = Storm::default();
            let steps = 2_000_000 / step;
            let at = |step_no: u64| Duration::from_secs(5) + Duration::from_micros(step_no * step);
            let granted: usize = (0..steps).map(|number| storm.take(1000, 20_000, at(number))).sum();
            assert!((39_900..=40_300).contains(&granted), "{granted} in 2 s, each {step} µs");
        }
        let mut storm = Storm::default();
        let now = Duration::from_secs(1);
        assert_eq!([1000, 1000].map(|wanted| storm.take(wanted, 20_000, now)), [200, 0]);
        assert_eq!(storm.take(1000, 0, now), 1000);
        // A clock that stands still or goes back brings nothing.
        assert_eq!(storm.take(1, 20_000, Duration::ZERO), 0);
        assert_eq!(Storm::default().take(usize::MAX, u32::MAX, Duration::MAX), u32::MAX as usize / 100);
    }

    #[test]
    fn a_few_notices_and_then_one_a_minute() {
        let mut notices = Notices::new();
        assert_eq!((0..50).filter(|_| notices.take(7)).count(), 4);
        assert_eq!((7..60).filter(|&now| notices.take(now)).count(), 0);
        assert_eq!((60..3660).filter(|&now| notices.take(now)).count(), 60);
        assert_eq!((0..50).filter(|_| notices.take(1_000_000)).count(), 4);
    }
}
