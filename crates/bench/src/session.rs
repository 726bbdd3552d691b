//! A running bench: pairs of runs, or rounds of several variants; its tables, its JSON rows and its progress on standard error.

use crate::{
    figures::{LINE, LINE_NOTE, RATIO, Spread, extend, line_round_trip},
    interrupt,
    options::Common,
    peer::Peer,
    rig::Device,
};
use ringroad_text::{save, table};
use ringroad_traffic::Totals;
use serde_json::{Value, json};
use std::{fs, ops::RangeInclusive, path::Path, time::Instant};

/// A running bench.
pub struct Session<'a> {
    bench: &'static str,
    common: &'a Common,
    rows: Vec<Value>,
    start: Instant,
    cells: usize,
    /// Rounds measured, of the `pairs` of each cell.
    done: usize,
    steady: bool,
}

/// Maximum change of the cache-line round trip within a pair: its maximum divided by its minimum.
const STEADY: f64 = 1.5;

impl<'a> Session<'a> {
    /// Starts a bench of this number of cells. `steady`: whether its rounds must be.
    pub fn new(bench: &'static str, common: &'a Common, cells: usize, steady: bool) -> Session<'a> {
        Session { bench, common, rows: Vec::new(), start: Instant::now(), cells, done: 0, steady }
    }

    /// Leaves a cell out that is not possible.
    pub fn leave_out(&mut self) {
        self.cells -= 1;
    }

    /// The last cell was one that had been measured before.
    pub fn repeated(&mut self) {
        self.done -= self.common.pairs as usize;
    }

    /// Leaves a cell out: prints that, and adds its row with the reason as `skipped`.
    pub fn skip(&mut self, name: &str, row: Value, reason: &str) -> Result<(), String> {
        self.cells -= 1;
        self.without(name, row, reason)
    }

    /// Prints that something is not measured, and adds a row with the reason as `skipped`.
    pub fn without(&mut self, what: &str, mut row: Value, reason: &str) -> Result<(), String> {
        clear();
        println!("SKIPPED {what}: {reason}");
        extend(&mut row, json!({ "skipped": reason }));
        self.push(row)
    }

    /// Prints which peers are missing.
    pub fn without_missing(&mut self, peers: &[Peer]) -> Result<(), String> {
        let missing = |peer: &Peer| if let Peer::Missing(reason) = peer { Some(reason.clone()) } else { None };
        peers.iter().filter_map(missing).try_for_each(|reason| self.without("peer", json!({ "peer": null }), &reason))
    }

    fn line(&self) -> Result<f64, String> {
        line_round_trip([self.common.driver_cpu, self.common.device_cpu])
    }

    /// Shows which cell is being measured, its pair, how many pairs there are in all, and an estimate of the remaining time.
    fn show(&self, what: &str, pairs: usize) {
        let (wanted, done) = (self.common.pairs as usize, self.done);
        let all = self.cells * wanted;
        let left = match self.start.elapsed().as_secs_f64() * all.saturating_sub(done) as f64 / done as f64 {
            left if done == 0 || left.is_nan() => String::new(),
            left if left < 90.0 => format!(", {left:.0} s left"),
            left => format!(", {:.0} min left", left / 60.0),
        };
        let text = format!("{what}, pair {}/{wanted}, {}/{all} in all{left}", pairs + 1, done + 1);
        eprint!("\r{text:79}");
    }

    /// Measures several variants in turn, in every other round in reverse order, as often as pairs are requested, and the
    /// cache-line round trip before each round. Where rounds must be steady, it is also measured after each run, and a round during
    /// which it changes is discarded and repeated; after five and twice as many repetitions as there are pairs, unsteady rounds
    /// are kept.
    pub fn rounds<V, T>(
        &mut self,
        what: &str,
        variants: &[V],
        one: impl Fn(&V) -> Result<T, String>,
    ) -> Result<Rounds<T>, String> {
        self.rounds_if(what, variants, |_| true, one)
    }

    /// As [`Session::rounds`]; rounds with a run that is not usable are discarded and repeated, too.
    pub fn rounds_if<V, T>(
        &mut self,
        what: &str,
        variants: &[V],
        usable: impl Fn(&T) -> bool,
        one: impl Fn(&V) -> Result<T, String>,
    ) -> Result<Rounds<T>, String> {
        let mut rounds = Rounds::new(variants.iter().map(|_| Vec::new()).collect());
        self.repeat(self.common.pairs as usize, &mut rounds, what, variants, usable, one)?;
        Ok(rounds)
    }

    /// As [`Session::rounds`], until there are so many in all.
    pub fn rounds_until<V, T>(
        &mut self,
        wanted: usize,
        rounds: &mut Rounds<T>,
        what: &str,
        variants: &[V],
        one: impl Fn(&V) -> Result<T, String>,
    ) -> Result<(), String> {
        self.repeat(wanted, rounds, what, variants, |_| true, one)
    }

    fn repeat<V, T>(
        &mut self,
        wanted: usize,
        rounds: &mut Rounds<T>,
        what: &str,
        variants: &[V],
        usable: impl Fn(&T) -> bool,
        one: impl Fn(&V) -> Result<T, String>,
    ) -> Result<(), String> {
        while rounds.count < wanted {
            self.show(what, rounds.count);
            let (mut figures, mut lines) = (Vec::new(), vec![self.line()?]);
            let is_reverse = (rounds.count + rounds.discarded) % 2 == 1;
            for index in 0..variants.len() {
                let index = if is_reverse { variants.len() - 1 - index } else { index };
                let Some(variant) = variants.get(index) else { continue };
                interrupt::check()?;
                figures.push(one(variant)?);
                if self.steady {
                    lines.push(self.line()?);
                }
            }
            if is_reverse {
                figures.reverse();
            }
            if !is_steady(&lines) || !figures.iter().all(&usable) {
                if rounds.discarded < 2 * wanted + 5 {
                    rounds.discarded += 1;
                    continue;
                }
                rounds.unsteady += 1;
            }
            rounds.push(figures, lines);
            self.done += 1;
        }
        Ok(())
    }

    /// Measures cells, each with a name and a JSON row, against the devices of several peers, and prints a table for each peer.
    pub fn compare<C>(
        &mut self,
        title: &str,
        ours: &Device,
        peers: impl Iterator<Item = Result<Option<Device>, String>>,
        cells: &[(String, Value, C)],
        one: impl Fn(&Device, &C) -> Result<Run, String>,
    ) -> Result<(), String> {
        for peer in peers {
            let peer = peer?;
            let mut table = Table::new(peer.as_ref().map(|peer| peer.name.as_str()), ["ours", "peer"], &[]);
            for (name, row, cell) in cells {
                let devices: Vec<_> = [ours].into_iter().chain(&peer).collect();
                let pairs = self.rounds(name, &devices, |device| one(device, cell))?;
                let row = table.add(name, row.clone(), &pairs, []);
                self.push(row)?;
            }
            self.print(title, &table.text());
        }
        Ok(())
    }

    /// Adds a JSON row and saves all rows so far: a long bench that fails late keeps them.
    pub fn push(&mut self, row: Value) -> Result<(), String> {
        self.rows.push(row);
        self.save(false)
    }

    /// Returns the rows so far.
    #[cfg(test)]
    pub fn rows(&self) -> &[Value] {
        &self.rows
    }

    /// Prints a table under its title.
    pub fn print(&self, title: &str, table: &str) {
        clear();
        print!("{title}\n{table}");
    }

    /// Saves all rows. Standard output gets them only here.
    pub fn finish(self) -> Result<(), String> {
        self.save(true)
    }

    fn save(&self, last: bool) -> Result<(), String> {
        match &self.common.json {
            Some(file) if last || file != Path::new("-") => {
                save(file, &json!({ "bench": self.bench, "machine": machine(), "rows": self.rows }))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        clear();
    }
}

/// Clears the line that shows the progress.
fn clear() {
    eprint!("\r{:79}\r", "");
}

/// Returns the machine that figures are from.
fn machine() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // All CPUs, not those of this thread, which may be pinned.
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    json!({ "cpu": model, "cores": cores, "kernel": kernel.trim() })
}

/// Figures of several variants, by variant and round.
#[derive(Clone)]
pub struct Rounds<T> {
    figures: Vec<Vec<T>>,
    /// The cache-line round trips of each round.
    lines: Vec<Vec<f64>>,
    count: usize,
    discarded: usize,
    unsteady: usize,
}

impl<T> Rounds<T> {
    /// Starts from these figures, which are usually empty.
    pub fn new(figures: Vec<Vec<T>>) -> Rounds<T> {
        Rounds { figures, lines: Vec::new(), count: 0, discarded: 0, unsteady: 0 }
    }

    /// Adds a round: a figure of each variant.
    fn push(&mut self, figures: Vec<T>, lines: Vec<f64>) {
        self.figures.iter_mut().zip(figures).for_each(|(all, figure)| all.push(figure));
        self.lines.push(lines);
        self.count += 1;
    }

    /// Adds rounds of the same variants that were measured later.
    pub fn append(&mut self, later: Rounds<T>) {
        self.figures.iter_mut().zip(later.figures).for_each(|(all, figures)| all.extend(figures));
        self.lines.extend(later.lines);
        self.count += later.count;
        self.discarded += later.discarded;
        self.unsteady += later.unsteady;
    }

    /// Returns the median cache-line round trip of each round.
    pub fn medians(&self) -> Vec<f64> {
        self.lines.iter().map(|lines| Spread::of(lines).median).collect()
    }

    /// Returns the rounds whose cache-line round trip was in this range; the others count as discarded.
    pub fn within(&self, range: &RangeInclusive<f64>) -> Rounds<T>
    where
        T: Copy,
    {
        let keep: Vec<bool> = self.medians().iter().map(|line| range.contains(line)).collect();
        fn kept<F: Clone>(all: &[F], keep: &[bool]) -> Vec<F> {
            all.iter().zip(keep).filter(|(_, keep)| **keep).map(|(figure, _)| figure.clone()).collect()
        }
        let figures = self.figures.iter().map(|figures| kept(figures, &keep)).collect();
        let lines = kept(&self.lines, &keep);
        let (count, discarded) = (lines.len(), self.discarded + self.count - lines.len());
        Rounds { figures, lines, count, discarded, unsteady: self.unsteady }
    }

    /// Returns one figure of each round of a variant; none, if there is no such variant.
    pub fn of(&self, variant: usize, figure: impl Fn(&T) -> f64) -> Vec<f64> {
        self.figures.get(variant).map_or_else(Vec::new, |rounds| rounds.iter().map(figure).collect())
    }

    /// Returns the first round's figures of a variant.
    pub fn first(&self, variant: usize) -> Option<&T> {
        self.figures.get(variant)?.first()
    }

    /// Returns the first variant of these rounds beside one of others, which were not measured at the same time.
    pub fn beside(&self, other: &Rounds<T>, variant: usize) -> Rounds<T>
    where
        T: Copy,
    {
        let of = |rounds: &Rounds<T>, variant: usize| rounds.figures.get(variant).cloned().unwrap_or_default();
        let mut figures = vec![of(self, 0)];
        if variant > 0 {
            figures.push(of(other, variant));
        }
        let lines = [&self.lines[..], &other.lines].concat();
        Rounds { figures, lines, count: self.count, discarded: 0, unsteady: 0 }
    }

    /// Returns how many rounds were discarded and repeated, and how many were kept that should have been.
    pub fn repeated(&self) -> [usize; 2] {
        [self.discarded, self.unsteady]
    }

    /// Returns the spread of a figure of a variant.
    pub fn spread(&self, variant: usize, figure: impl Fn(&T) -> f64) -> Spread {
        Spread::of(&self.of(variant, figure))
    }

    /// Returns the cache-line round trip.
    pub fn line(&self) -> Spread {
        Spread::of(&self.lines.concat())
    }
}

/// Result of one run.
#[derive(Clone, Copy)]
pub struct Run {
    /// Millions of frames per second.
    pub mpps: f64,
    /// Empty rounds of the driver in percent, if it is ours.
    pub idle: Option<f64>,
}

impl From<Totals> for Run {
    fn from(totals: Totals) -> Run {
        Run { mpps: totals.received_mpps(), idle: Some(totals.idle()) }
    }
}

impl Rounds<Run> {
    /// Returns the rates of a device in millions of frames per second.
    pub fn rates(&self, device: usize) -> Vec<f64> {
        self.of(device, |run| run.mpps)
    }

    /// Returns the empty rounds of our driver on a device in percent; `None` if the driver is another one.
    fn idle(&self, device: usize) -> Option<f64> {
        let idle: Vec<f64> = self.figures.get(device)?.iter().filter_map(|run| run.idle).collect();
        (!idle.is_empty()).then(|| Spread::of(&idle).median)
    }

    /// Returns the driver's empty rounds in percent, for a table: with our device, and with the peer's.
    pub fn idle_columns(&self) -> impl Iterator<Item = String> {
        [0, 1].into_iter().filter_map(|device| Some(format!("{:.0}", self.idle(device)?)))
    }
}

fn is_steady(lines: &[f64]) -> bool {
    let spread = Spread::of(lines);
    spread.max <= STEADY * spread.min
}

/// Returns the range of cache-line round trips, no wider than [`STEADY`], in which each of several measurements has the most
/// rounds, and how many the one with the fewest has there. They are given by the lines of their rounds.
pub fn common_range(all: &[Vec<f64>]) -> (RangeInclusive<f64>, usize) {
    let count = |range: &RangeInclusive<f64>| {
        all.iter().map(|lines| lines.iter().filter(|&line| range.contains(line)).count()).min().unwrap_or(0)
    };
    let ranges = all.iter().flatten().map(|&line| line..=line * STEADY);
    let counted = ranges.map(|range| (count(&range), range)).max_by_key(|(count, _)| *count);
    counted.map_or((0.0..=f64::MAX, 0), |(count, range)| (range, count))
}

/// A table of pairs, one line per cell.
pub struct Table {
    peer: Option<String>,
    names: [&'static str; 2],
    more: &'static [&'static str],
    lines: Vec<Vec<String>>,
    discarded: usize,
    unsteady: usize,
}

impl Table {
    /// Creates an empty one. `names` are the headers of the two that are compared, `more` those of further columns.
    pub fn new(peer: Option<&str>, names: [&'static str; 2], more: &'static [&'static str]) -> Table {
        Table { peer: peer.map(str::to_owned), names, more, lines: Vec::new(), discarded: 0, unsteady: 0 }
    }

    /// Adds a cell. Returns its JSON row: `row` and the results.
    pub fn add(
        &mut self,
        name: &str,
        mut row: Value,
        pairs: &Rounds<Run>,
        more: impl IntoIterator<Item = String>,
    ) -> Value {
        let (rates, line) = (pairs.rates(0), pairs.line());
        let ours = Spread::of(&rates);
        let mut columns = vec![name.to_owned()];
        columns.extend(ours.columns(2));
        ours.add_to(&mut row, ["ours", "ours_min", "ours_max"]);
        for (device, key) in ["driver_idle", "peer_driver_idle"].into_iter().enumerate() {
            if let Some(idle) = pairs.idle(device) {
                extend(&mut row, json!({ key: idle }));
            }
        }
        let &Rounds { count, discarded, unsteady, .. } = pairs;
        extend(&mut row, json!({ "pairs": count, "discarded": discarded, "unsteady": unsteady }));
        if let Some(name) = &self.peer {
            let (peer, ratio) = (Spread::of(&pairs.rates(1)), Spread::of_ratios(&rates, &pairs.rates(1)));
            extend(&mut row, json!({ "peer_name": name }));
            peer.add_to(&mut row, ["peer", "peer_min", "peer_max"]);
            ratio.add_to(&mut row, RATIO);
            columns.extend([peer.columns(2), ratio.columns(2)].concat());
        }
        line.add_to(&mut row, LINE);
        columns.extend(line.columns(0));
        columns.extend(more);
        self.discarded += discarded;
        self.unsteady += unsteady;
        self.lines.push(columns);
        row
    }

    /// Formats it, with the peer's name above and notes below.
    pub fn text(&self) -> String {
        let [ours, peer] = self.names;
        let (mut title, mut header) = (String::new(), vec!["", ours, ""]);
        if let Some(name) = &self.peer {
            title = format!("{peer}: {name}\n");
            header.extend([peer, "", "ratio", ""]);
        }
        header.extend(["line, ns", ""]);
        header.extend(self.more);
        let (table, Table { discarded, unsteady, .. }) = (table(&header, &self.lines), self);
        format!(
            "{title}{table}{LINE_NOTE}\n\
             {discarded} pairs discarded and repeated, because the line changed by more than a factor of {STEADY} within them; \
             {unsteady} kept in spite of it\n\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_steady_while_its_line_is() {
        assert!(is_steady(&[100.0, 149.0, 120.0]) && is_steady(&[480.0]));
        assert!(!is_steady(&[100.0, 151.0, 120.0]) && !is_steady(&[500.0, 110.0]));
    }

    #[test]
    fn rounds_in_a_common_range_are_compared() {
        let all = [vec![100.0, 480.0, 110.0, 500.0], vec![470.0, 120.0, 490.0, 510.0]];
        assert_eq!(common_range(&all), (470.0..=705.0, 2));
        assert_eq!(common_range(&[vec![100.0], vec![480.0]]).1, 0);
        assert_eq!(common_range(&[]).1, 0);
        let mut rounds = Rounds::new(vec![Vec::new(), Vec::new()]);
        for (index, &line) in all[0].iter().enumerate() {
            rounds.push(vec![index, 10 * index], vec![line, line + 1.0]);
        }
        rounds.append(rounds.clone());
        let kept = rounds.within(&(470.0..=705.0));
        assert_eq!((kept.count, kept.discarded), (4, 4));
        assert_eq!(kept.of(1, |&figure| figure as f64), [10.0, 30.0, 10.0, 30.0]);
        assert_eq!(kept.medians(), [480.5, 500.5, 480.5, 500.5]);
    }

    #[test]
    fn rounds_with_a_run_that_is_not_usable_are_repeated() {
        use std::cell::Cell;
        let common: Common = crate::testing::parse("--pairs 3");
        let mut session = Session::new("bench", &common, 1, false);
        let runs = Cell::new(0);
        let one = |_: &()| {
            runs.set(runs.get() + 1);
            Ok(f64::from(runs.get()))
        };
        let rounds = session.rounds_if("cell", &[(), ()], |&run| run != 3.0, one).unwrap();
        assert_eq!((rounds.of(0, |&run| run), rounds.repeated()), (vec![1.0, 5.0, 8.0], [1, 0]));
        // Three and so many repetitions, and it is taken as it is.
        runs.set(0);
        let rounds = session.rounds_if("cell", &[(), ()], |_| false, one).unwrap();
        assert_eq!((runs.get(), rounds.repeated()), (2 * (2 * 3 + 5 + 3), [11, 3]));
    }

    #[test]
    fn skipped_cells_have_a_reason() {
        let common: Common = crate::testing::parse("");
        let mut session = Session::new("bench", &common, 2, true);
        session.skip("packed vec=1", json!({ "ring": "packed" }), "this CPU has no AVX-512").unwrap();
        session.without_missing(&[Peer::None, Peer::Missing("no DPDK".into())]).unwrap();
        assert_eq!(session.cells, 1);
        let skipped = json!({ "ring": "packed", "skipped": "this CPU has no AVX-512" });
        assert_eq!(session.rows, [skipped, json!({ "peer": null, "skipped": "no DPDK" })]);
    }

    #[test]
    fn rows_contain_results_and_discarded_pairs() {
        let run = |mpps| Run { mpps, idle: Some(10.0) };
        let figures = vec![vec![run(4.0), run(6.0), run(9.0)], vec![run(2.0), run(2.0), run(3.0)]];
        let pairs = Rounds { figures, lines: vec![vec![100.0; 3]; 3], count: 3, discarded: 4, unsteady: 1 };
        let mut table = Table::new(Some("other"), ["ours", "peer"], &["more"]);
        let row = table.add("cell", json!({ "ring": "split" }), &pairs, ["x".to_owned()]);
        for (key, value) in [("ours", 6.0), ("peer", 2.0), ("ratio", 3.0), ("min", 2.0), ("driver_idle", 10.0)] {
            assert_eq!(row[key].as_f64(), Some(value), "{key}");
        }
        assert_eq!((&row["discarded"], &row["unsteady"], &row["pairs"]), (&json!(4), &json!(1), &json!(3)));
        assert_eq!((&row["peer_name"], &row["ring"]), (&json!("other"), &json!("split")));
        let text = table.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "peer: other");
        assert_eq!(lines[1], "      ours             peer             ratio             line, ns           more");
        assert_eq!(lines[2], "cell  6.00  4.00–9.00  2.00  2.00–3.00   3.00  2.00–3.00       100  100–100     x");
    }
}
