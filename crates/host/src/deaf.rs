//! Detects guests that stop receiving. The worker passes in each receive queue's counters once a second; a queue that has
//! taken no frame for [`PATIENCE`] seconds while frames were dropped because its ring was full is reported once.

use ringroad_frame::Snapshot;

/// Seconds without a received frame, while frames were dropped on a full ring, before the queue is reported.
const PATIENCE: u32 = 10;
/// Minimum seconds between two reports for a queue that recovered in between.
const AGAIN: u32 = 60;

/// What to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// No frame was taken for `seconds`, and `dropped` frames were dropped.
    Deaf { seconds: u32, dropped: u64 },
    /// Frames are taken again, after `dropped` were dropped.
    Recovered { dropped: u64 },
}

/// State of one queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deaf {
    frames: u64,
    full: u64,
    /// When the drops began, in seconds, and the drop counter before the first one. `None`: frames are being taken.
    since: Option<(u32, u64)>,
    said: bool,
    /// When it was last reported, in seconds.
    last: Option<u32>,
}

impl Deaf {
    /// Compares the counters with those of the previous call and returns what to log; `now` in seconds.
    pub(crate) fn look(&mut self, now: u32, counters: &Snapshot) -> Option<Said> {
        let (frames, full) = (counters.frames, counters.full);
        let (took, dropped) = (frames != self.frames, full != self.full);
        let before = std::mem::replace(&mut self.full, full);
        self.frames = frames;
        if took {
            let (_, start) = self.since.take()?;
            return std::mem::take(&mut self.said).then_some(Said::Recovered { dropped: full - start });
        }
        if !dropped {
            return None;
        }
        let (since, start) = *self.since.get_or_insert((now, before));
        let seconds = now.saturating_sub(since);
        let quiet = self.last.is_some_and(|last| now.saturating_sub(last) < AGAIN);
        if self.said || quiet || seconds < PATIENCE {
            return None;
        }
        (self.said, self.last) = (true, Some(now));
        Some(Said::Deaf { seconds, dropped: full - start })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stalled_queue_is_reported_once_and_again_when_it_recovers() {
        let mut deaf = Deaf::default();
        let mut at = |now, frames, full| deaf.look(now, &Snapshot { frames, full, ..Snapshot::default() });
        // Some drops under load are not reported.
        assert!((0..100).all(|now| at(now, 10 * u64::from(now + 1), u64::from(now)).is_none()));
        let mut said: Vec<_> = (100..200).filter_map(|now| at(now, 1000, u64::from(now))).collect();
        assert_eq!(said, [Said::Deaf { seconds: 10, dropped: 11 }]);
        assert_eq!(at(200, 1001, 199), Some(Said::Recovered { dropped: 100 }));
        assert_eq!(at(201, 1002, 199), None);
        // A queue that stalls again and again is reported once a minute.
        said.clear();
        for now in 201..801 {
            said.extend(at(now, 2000 + u64::from(now / 20), u64::from(now)));
        }
        let deaf = said.iter().filter(|said| matches!(said, Said::Deaf { .. })).count();
        assert!((9..=10).contains(&deaf) && said.len() <= 2 * deaf, "{said:?}");
    }

    #[test]
    fn an_idle_queue_is_not_reported() {
        let mut deaf = Deaf::default();
        let mut at = |now, frames, full| deaf.look(now, &Snapshot { frames, full, ..Snapshot::default() });
        assert_eq!(at(0, 5, 5), None);
        assert!((1..100).all(|now| at(now, 5, 5).is_none()));
        assert_eq!(at(100, 5, 6), None);
        // Drops far apart in time still count as one stall.
        assert_eq!(at(150, 5, 7), Some(Said::Deaf { seconds: 50, dropped: 2 }));
    }
}
