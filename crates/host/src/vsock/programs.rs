//! Programs that have connected to a guest's Unix socket but have not sent their CONNECT line yet. Their number is bounded:
//! beyond it, the oldest program of the process that has the most of them is turned away. Used by `member.rs`.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};

/// How long a program has to send its CONNECT line.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of such programs per guest.
const MOST: usize = 256;

/// The longest CONNECT line: "CONNECT 4294967295\r\n".
pub(super) const LINE: usize = 20;

/// Parses a line `CONNECT <port>`, as Firecracker defines it. Returns the port and the length of the line, or `None` if the
/// line is incomplete.
pub(super) fn parse(line: &[u8]) -> Option<Result<(u32, usize), &'static str>> {
    const EXPECTED: &str = "expected \"CONNECT <port>\" and a line feed";
    let Some(end) = line.iter().position(|&byte| byte == b'\n') else {
        return (line.len() >= LINE).then_some(Err(EXPECTED));
    };
    let text = line.get(..end).unwrap_or_default();
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    let port = text.strip_prefix(b"CONNECT ").or_else(|| text.strip_prefix(b"connect "));
    let digits = port.filter(|port| !port.is_empty() && port.iter().all(u8::is_ascii_digit));
    let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    Some(number.map(|port| (port, end + 1)).ok_or(EXPECTED))
}

/// The pending programs of one guest, by the numbers of their sockets, which increase.
#[derive(Default)]
pub(super) struct PendingPrograms {
    programs: HashMap<u64, i32>,
    /// In the order of their deadlines; entries of programs that are no longer pending are skipped.
    deadlines: VecDeque<(Instant, u64)>,
    by_process: HashMap<i32, BTreeSet<u64>>,
    /// The number of programs of each process, and the oldest of them.
    most: BTreeSet<(usize, Reverse<u64>, i32)>,
}

impl PendingPrograms {
    fn rank(process: i32, slots: &BTreeSet<u64>) -> Option<(usize, Reverse<u64>, i32)> {
        slots.first().map(|&oldest| (slots.len(), Reverse(oldest), process))
    }

    fn change(&mut self, process: i32, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let slots = self.by_process.entry(process).or_default();
        if let Some(rank) = PendingPrograms::rank(process, slots) {
            self.most.remove(&rank);
        }
        change(slots);
        match PendingPrograms::rank(process, slots) {
            Some(rank) => _ = self.most.insert(rank),
            None => _ = self.by_process.remove(&process),
        }
    }

    /// Adds a program that has connected, of process `process`.
    pub(super) fn insert(&mut self, slot: u64, process: i32, now: Instant) {
        self.programs.insert(slot, process);
        self.deadlines.push_back((now + PATIENCE, slot));
        self.change(process, |slots| _ = slots.insert(slot));
    }

    /// Removes a program that has sent its line or disconnected. Returns whether it was pending.
    pub(super) fn remove(&mut self, slot: u64) -> bool {
        let Some(process) = self.programs.remove(&slot) else { return false };
        self.change(process, |slots| _ = slots.remove(&slot));
        if self.deadlines.len() > 2 * MOST {
            let programs = &self.programs;
            self.deadlines.retain(|(_, slot)| programs.contains_key(slot));
        }
        true
    }

    /// Returns the program to turn away if there are too many.
    pub(super) fn surplus(&self) -> Option<u64> {
        (self.programs.len() > MOST).then(|| self.oldest()).flatten()
    }

    /// Returns the next program to turn away.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.most.last().map(|&(_, Reverse(oldest), _)| oldest)
    }

    /// Returns when to call [`PendingPrograms::late`] next.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadlines.front().map(|&(until, _)| until)
    }

    /// Returns a program whose deadline has passed.
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
    fn the_oldest_program_of_the_process_with_the_most_is_evicted() {
        let (mut pending, now) = (PendingPrograms::default(), Instant::now());
        pending.insert(0, 7, now);
        for slot in 1..=MOST as u64 {
            assert_eq!(pending.surplus(), None);
            pending.insert(slot, 8, now);
        }
        for slot in 1..1000 {
            assert_eq!(pending.surplus(), Some(slot), "not the single program of process 7, though it is the oldest");
            assert!(pending.remove(slot) && !pending.remove(slot));
            pending.insert(MOST as u64 + slot, 8, now);
        }
        assert!(pending.deadlines.len() <= 2 * MOST + 1);
    }

    #[test]
    fn among_processes_with_one_program_each_the_oldest_is_evicted() {
        let (mut pending, now) = (PendingPrograms::default(), Instant::now());
        (0..=MOST as u64).for_each(|slot| pending.insert(slot, 1000 - slot as i32, now));
        assert_eq!(pending.surplus(), Some(0));
        pending.remove(0);
        assert_eq!(pending.surplus(), None);
        assert_eq!(pending.oldest(), Some(1));
    }

    #[test]
    fn late_programs_are_returned_once_in_order() {
        let (mut pending, now) = (PendingPrograms::default(), Instant::now());
        let at = |ms| now + Duration::from_millis(ms);
        (0..4).for_each(|slot| pending.insert(slot, 1, at(slot)));
        pending.remove(0);
        pending.remove(2);
        let late = now + PATIENCE;
        assert_eq!(pending.late(at(5)), None);
        let mut all =
            |now| std::iter::from_fn(|| pending.late(now).inspect(|&slot| _ = pending.remove(slot))).collect();
        let first: Vec<_> = all(late + Duration::from_millis(2));
        let rest: Vec<_> = all(late + Duration::from_secs(9));
        assert_eq!((first, rest), (vec![1], vec![3]));
        assert_eq!(pending.deadline(), None);
        assert!(pending.by_process.is_empty() && pending.most.is_empty() && pending.programs.is_empty());
    }

    #[test]
    fn connect_lines_are_parsed() {
        assert_eq!(parse(b"CONNECT 1024\n"), Some(Ok((1024, 13))));
        assert_eq!(parse(b"CONNECT 4294967295\r\n"), Some(Ok((u32::MAX, 20))));
        assert_eq!(parse(b"CONNECT 1\nhello"), Some(Ok((1, 10))), "what follows is the program's data");
        for unfinished in [&b""[..], b"CONN", b"CONNECT 42949672951"] {
            assert_eq!(parse(unfinished), None);
        }
        for wrong in [
            &b"\n"[..],
            b"CONNECT\n",
            b"CONNECT \n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"CONNECT 4294967296\n",
            b"CONNECT 1 \n",
            b"GET / HTTP/1.1\r\n",
            b"xxxxxxxxxxxxxxxxxxxx",
        ] {
            assert!(matches!(parse(wrong), Some(Err(_))), "{wrong:?}");
        }
    }
}
