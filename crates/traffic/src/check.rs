//! Checks received probes: contents, duplicates, losses. Called by driver.rs, per frame.

use crate::{
    probe::{Probe, ProbeError},
    totals::Totals,
};
use ringroad_mem::Span;
use std::time::Instant;

/// Copies a frame to private memory.
pub fn gather<'s>(pieces: &[Span<'_>], scratch: &'s mut Vec<u8>) -> &'s mut [u8] {
    let len = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    if scratch.len() < len {
        scratch.resize(len, 0);
    }
    let mut at = 0;
    for piece in pieces {
        at += scratch.get_mut(at..).map_or(0, |rest| piece.read(rest));
    }
    scratch.get_mut(..at).unwrap_or_default()
}

/// Records the round trip of a frame that carries a time.
#[cold]
pub fn timed(frame: &[u8], start: Instant, totals: &mut Totals) {
    match Probe::read(frame) {
        Ok(probe) => totals.record_round_trip(start, probe.sent_ns),
        Err(_) => totals.errors += 1,
    }
}

/// What a received frame is.
#[derive(PartialEq, Eq)]
pub enum Frame {
    Probe(Probe),
    /// A probe whose fields are damaged.
    Damaged,
    /// Not a probe.
    Foreign,
}

/// Checks every byte of a frame, and that it has not arrived before; counts errors, duplicates and foreign frames.
pub fn verify(frame: &[u8], totals: &mut Totals, seen: &mut Seen) -> Frame {
    match Probe::read(frame) {
        Ok(probe) => {
            let (intact, first) = (probe.verify(frame).is_ok(), seen.is_first(probe.sequence));
            totals.errors += u64::from(!intact || !first);
            totals.duplicates += u64::from(intact && !first);
            Frame::Probe(probe)
        }
        Err(ProbeError::Foreign) => {
            totals.foreign += 1;
            Frame::Foreign
        }
        Err(_) => {
            totals.errors += 1;
            Frame::Damaged
        }
    }
}

/// Frames in flight that were given up, because none had returned for a while.
#[derive(Clone, Copy, Default)]
pub struct Lost {
    pub frames: u64,
    /// Their sequence numbers are below this one.
    pub before: u64,
}

impl Lost {
    /// Notes that a probe was late instead of lost; otherwise each stall would widen the window for good.
    pub fn arrived(&mut self, sequence: u64) {
        if sequence < self.before {
            self.frames = self.frames.saturating_sub(1);
        }
    }
}

/// A bitmap of the last sequence numbers received.
pub struct Seen {
    bits: Vec<u64>,
    highest: u64,
}

impl Default for Seen {
    fn default() -> Self {
        Seen { bits: vec![0; Self::SPAN as usize / 64], highest: 0 }
    }
}

impl Seen {
    /// More than can be in flight in any ring.
    const SPAN: u64 = 1 << 17;

    /// Notes a sequence number. Returns `false` if it was noted before, or is older than any frame in flight.
    fn is_first(&mut self, sequence: u64) -> bool {
        if sequence.saturating_sub(self.highest) >= Self::SPAN {
            // Nothing of the bitmap remains valid. The number is the sender's: stepping up to it may take for ever.
            self.bits.fill(0);
            self.highest = sequence;
        }
        while self.highest < sequence {
            self.highest += 1;
            self.replace(self.highest, false);
        }
        self.highest - sequence < Self::SPAN && !self.replace(sequence, true)
    }

    /// Sets or clears the bit of a number. Returns its previous value.
    fn replace(&mut self, sequence: u64, value: bool) -> bool {
        let (at, bit) = (sequence % Self::SPAN, 1 << (sequence % 64));
        let Some(word) = self.bits.get_mut(at as usize / 64) else { return false };
        let before = *word & bit != 0;
        *word = if value { *word | bit } else { *word & !bit };
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicates_are_noticed() {
        let mut seen = Seen::default();
        for sequence in [0, 1, 5, 3, 4, 2, 200_000, 199_999] {
            assert!(seen.is_first(sequence), "{sequence}");
        }
        for sequence in [0, 5, 199_999, 200_000] {
            assert!(!seen.is_first(sequence), "{sequence}");
        }
    }

    #[test]
    fn a_large_step_takes_no_time() {
        let mut seen = Seen::default();
        assert!(seen.is_first(1) && seen.is_first(u64::MAX) && seen.is_first(u64::MAX - 7));
        assert!(!seen.is_first(u64::MAX) && !seen.is_first(1));
    }
}
