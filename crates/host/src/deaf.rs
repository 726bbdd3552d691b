//! Whether a guest takes what is sent to it. The worker looks at each receive queue's counters once a second, and says once
//! if a guest has taken nothing for a while although there was something: its ring is full, and all else is dropped.

use ringroad_frame::Snapshot;

/// Seconds without a frame taken, while some were dropped as the ring was full.
const PATIENCE: u32 = 10;
/// Seconds before the same is said again of a queue that has recovered.
const AGAIN: u32 = 60;

/// What is to be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Nothing was taken for so many seconds, and so many frames dropped.
    Deaf { seconds: u32, dropped: u64 },
    /// Frames are taken again; so many were dropped.
    Recovered { dropped: u64 },
}

/// What was seen of one queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deaf {
    frames: u64,
    full: u64,
    /// Since when there are drops and nothing else, in seconds, and how many there were before.
    since: Option<(u32, u64)>,
    said: bool,
    /// When it was last said.
    last: Option<u32>,
}

impl Deaf {
    /// A look at the counters; `now` in seconds.
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
    fn a_queue_that_takes_nothing_is_told_of_once_and_when_it_takes_something() {
        let mut deaf = Deaf::default();
        let mut at = |now, frames, full| deaf.look(now, &Snapshot { frames, full, ..Snapshot::default() });
        // Some drops under load are nothing to tell of.
        assert!((0..100).all(|now| at(now, 10 * u64::from(now + 1), u64::from(now)).is_none()));
        let mut said: Vec<_> = (100..200).filter_map(|now| at(now, 1000, u64::from(now))).collect();
        assert_eq!(said, [Said::Deaf { seconds: 10, dropped: 11 }]);
        assert_eq!(at(200, 1001, 199), Some(Said::Recovered { dropped: 100 }));
        assert_eq!(at(201, 1002, 199), None);
        // It does the same again and again: once a minute.
        said.clear();
        for now in 201..801 {
            said.extend(at(now, 2000 + u64::from(now / 20), u64::from(now)));
        }
        let deaf = said.iter().filter(|said| matches!(said, Said::Deaf { .. })).count();
        assert!((9..=10).contains(&deaf) && said.len() <= 2 * deaf, "{said:?}");
    }

    #[test]
    fn a_queue_that_nobody_sends_to_is_not_deaf() {
        let mut deaf = Deaf::default();
        let mut at = |now, frames, full| deaf.look(now, &Snapshot { frames, full, ..Snapshot::default() });
        assert_eq!(at(0, 5, 5), None);
        assert!((1..100).all(|now| at(now, 5, 5).is_none()));
        assert_eq!(at(100, 5, 6), None);
        // Drops that are far apart count together.
        assert_eq!(at(150, 5, 7), Some(Said::Deaf { seconds: 50, dropped: 2 }));
    }
}
