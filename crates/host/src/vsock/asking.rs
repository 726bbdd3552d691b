//! Programs that have connected to a guest's socket and have not said yet which port they want. There is room for some; who
//! comes then takes the place of one that has been silent for long, of the process that has the most of them.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};

/// How long a program has to send its line "CONNECT".
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Programs that have not sent it yet, for each guest, at most.
const MOST: usize = 256;

/// The programs of one guest's socket, by the numbers of their sockets, which grow.
#[derive(Default)]
pub(super) struct Asking {
    programs: HashMap<u64, i32>,
    /// In the order of their deadlines; those that do not ask any more are passed over.
    deadlines: VecDeque<(Instant, u64)>,
    by_process: HashMap<i32, BTreeSet<u64>>,
    /// How many programs a process has, and its oldest one.
    most: BTreeSet<(usize, Reverse<u64>, i32)>,
}

impl Asking {
    fn rank(process: i32, slots: &BTreeSet<u64>) -> Option<(usize, Reverse<u64>, i32)> {
        slots.first().map(|&oldest| (slots.len(), Reverse(oldest), process))
    }

    fn change(&mut self, process: i32, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let slots = self.by_process.entry(process).or_default();
        if let Some(rank) = Asking::rank(process, slots) {
            self.most.remove(&rank);
        }
        change(slots);
        match Asking::rank(process, slots) {
            Some(rank) => _ = self.most.insert(rank),
            None => _ = self.by_process.remove(&process),
        }
    }

    /// A program of a process has connected.
    pub(super) fn insert(&mut self, slot: u64, process: i32, now: Instant) {
        self.programs.insert(slot, process);
        self.deadlines.push_back((now + PATIENCE, slot));
        self.change(process, |slots| _ = slots.insert(slot));
    }

    /// It has said what it wants, or is gone. Says whether it was there.
    pub(super) fn remove(&mut self, slot: u64) -> bool {
        let Some(process) = self.programs.remove(&slot) else { return false };
        self.change(process, |slots| _ = slots.remove(&slot));
        if self.deadlines.len() > 2 * MOST {
            let programs = &self.programs;
            self.deadlines.retain(|(_, slot)| programs.contains_key(slot));
        }
        true
    }

    /// Who has to go if there are too many.
    pub(super) fn surplus(&self) -> Option<u64> {
        (self.programs.len() > MOST).then(|| self.oldest()).flatten()
    }

    /// Who has to go first.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.most.last().map(|&(_, Reverse(oldest), _)| oldest)
    }

    /// When [`Asking::late`] should be asked next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadlines.front().map(|&(until, _)| until)
    }

    /// One that has not said in time what it wants.
    pub(super) fn late(&mut self, now: Instant) -> Option<u64> {
        while let Some(&(until, slot)) = self.deadlines.front()
            && (until <= now || !self.programs.contains_key(&slot))
        {
            self.deadlines.pop_front();
            if self.programs.contains_key(&slot) {
                return Some(slot);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_with_the_most_makes_room_its_oldest_first() {
        let (mut asking, now) = (Asking::default(), Instant::now());
        asking.insert(0, 7, now);
        for slot in 1..=MOST as u64 {
            assert_eq!(asking.surplus(), None);
            asking.insert(slot, 8, now);
        }
        for slot in 1..1000 {
            assert_eq!(asking.surplus(), Some(slot), "not the honest one, though it came first");
            assert!(asking.remove(slot) && !asking.remove(slot));
            asking.insert(MOST as u64 + slot, 8, now);
        }
        assert!(asking.deadlines.len() <= 2 * MOST + 1);
    }

    #[test]
    fn of_processes_with_one_each_the_oldest_makes_room() {
        let (mut asking, now) = (Asking::default(), Instant::now());
        (0..=MOST as u64).for_each(|slot| asking.insert(slot, 1000 - slot as i32, now));
        assert_eq!(asking.surplus(), Some(0));
        asking.remove(0);
        assert_eq!(asking.surplus(), None);
        assert_eq!(asking.oldest(), Some(1));
    }

    #[test]
    fn who_is_late_is_said_once_in_order() {
        let (mut asking, now) = (Asking::default(), Instant::now());
        let at = |ms| now + Duration::from_millis(ms);
        (0..4).for_each(|slot| asking.insert(slot, 1, at(slot)));
        asking.remove(0);
        asking.remove(2);
        let late = now + PATIENCE;
        assert_eq!(asking.late(at(5)), None);
        let mut all = |now| std::iter::from_fn(|| asking.late(now).inspect(|&slot| _ = asking.remove(slot))).collect();
        let first: Vec<_> = all(late + Duration::from_millis(2));
        let rest: Vec<_> = all(late + Duration::from_secs(9));
        assert_eq!((first, rest), (vec![1], vec![3]));
        assert_eq!(asking.deadline(), None);
        assert!(asking.by_process.is_empty() && asking.most.is_empty() && asking.programs.is_empty());
    }
}
