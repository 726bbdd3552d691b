//! Limits for what a port may do to the others: number and choice of addresses, rate of flooded frames. Enforced by `forward.rs`.

use crate::Rate;
use ringroad_wire::ethernet::MacAddr;
use std::time::Duration;

/// Limits for what a port may do to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of addresses learned from the port.
    pub addresses: u32,
    /// The port's own address: frames to it go to this port only, and no other port can use it as source.
    pub own: Option<MacAddr>,
    /// The port may use no source address but its own.
    pub fixed: bool,
    /// Maximum rate, in frames per second, of frames that go to more than one port: broadcast, multicast, unknown addresses. 0:
    /// no limit.
    pub storm: u32,
    /// Forward frames to link-local addresses (IEEE 802.1Q, table 8-1) from and to this port, which bridges do not do.
    pub link_local: bool,
    /// Frames from an isolated port go to no other isolated port.
    pub isolated: bool,
    /// How fast frames are taken from it.
    pub rate: Rate,
    /// How long frames to this port alone wait at their sender when the port has no room for them, before they are dropped. Zero:
    /// they are dropped at once.
    pub wait: Duration,
}

impl Limits {
    /// Defaults for a guest.
    pub const GUEST: Limits = Limits {
        addresses: 256,
        own: None,
        fixed: false,
        storm: 10_000,
        link_local: false,
        isolated: false,
        rate: Rate::NONE,
        wait: Duration::from_millis(5),
    };
    /// Defaults for a port with a whole network behind it.
    pub const NETWORK: Limits = Limits { addresses: 4096, ..Limits::GUEST };
}

impl Default for Limits {
    /// As for a guest.
    fn default() -> Limits {
        Limits::GUEST
    }
}

/// Why the switch drops a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// The port exceeds its rate of flooded frames.
    Storm,
    /// The port may not use the source address.
    Spoofed,
    /// The destination is a link-local address.
    LinkLocal,
    /// Both ports are isolated, or the frame came from a port that others are mirrored to.
    Isolated,
    /// The port does not admit the frame's VLAN, or the tag is invalid or one too many.
    Vlan,
}

/// What becomes of an address of one port that another port uses as source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It has moved to the claimant.
    Moved,
    /// It stays where it is, because frames came from there a moment ago. The claimant's frames are forwarded.
    Held,
    /// It is the other port's own address. The claimant's frames are dropped.
    Owned,
}

/// Token bucket for a port's flooded frames.
#[derive(Clone, Copy)]
pub(crate) struct Storm {
    tokens: u64,
    /// Tokens taken that were not there; then there are no others.
    debt: u64,
    filled: Duration,
}

impl Default for Storm {
    fn default() -> Storm {
        // Full, whatever the rate.
        Storm { tokens: u64::MAX, debt: 0, filled: Duration::ZERO }
    }
}

impl Storm {
    /// Returns how many of `wanted` frames may go, at `rate` frames per second. The bucket holds the frames of 10 ms, at least
    /// 64.
    pub(crate) fn take(&mut self, wanted: usize, rate: u32, now: Duration) -> usize {
        if rate == 0 {
            return wanted;
        }
        const SECOND: u128 = 1_000_000_000;
        let most = u64::from(rate / 100).max(64);
        let passed = now.saturating_sub(self.filled);
        let due = passed.as_nanos().saturating_mul(rate.into()) / SECOND;
        let paid = due.min(self.debt.into());
        self.debt -= paid as u64;
        if (due - paid).saturating_add(self.tokens.into()) >= most.into() {
            (self.tokens, self.filled) = (most, now);
        } else {
            self.tokens += (due - paid) as u64;
            // Not `now`: fractions of a token count later.
            self.filled += Duration::from_nanos((due * SECOND / u128::from(rate)) as u64);
        }
        let granted = self.tokens.min(wanted as u64);
        self.tokens -= granted;
        granted as usize
    }

    /// Takes tokens that need not be there, for the further frames that granted ones become: the next frames wait for them, for a
    /// second at most.
    pub(crate) fn owe(&mut self, frames: usize, rate: u32) {
        if rate > 0 {
            let owed = (frames as u64).saturating_sub(self.tokens);
            self.tokens = self.tokens.saturating_sub(frames as u64);
            self.debt = self.debt.saturating_add(owed).min(rate.into());
        }
    }
}

/// Rate limit for reporting a port's claims: a few at once, then one a minute.
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

    /// Returns whether a claim may be reported now; `now` in seconds.
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
    fn what_frames_become_is_paid_later() {
        let (mut storm, start) = (Storm::default(), Duration::from_secs(1));
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(storm.take(1, 20_000, at(0)), 1);
        // 199 are left of 200, and 20 come each millisecond.
        storm.owe(1399, 20_000);
        assert_eq!([0, 30, 60].map(|ms| storm.take(64, 20_000, at(ms))), [0, 0, 0]);
        assert_eq!(storm.take(64, 20_000, at(61)), 20);
        // Never for longer than a second.
        (0..1000).for_each(|_| storm.owe(1_000_000, 20_000));
        assert_eq!([1060, 1062].map(|ms| storm.take(64, 20_000, at(ms))), [0, 20]);
        // Without a limit nothing is owed.
        storm.owe(1000, 0);
        assert_eq!(storm.take(64, 0, at(1062)), 64);
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
