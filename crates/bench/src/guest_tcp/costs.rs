//! What a packet costs that a guest sends or receives: interrupts, accesses to registers, CPU time.

use crate::session::Rounds;
use serde_json::{Value, json};

/// Sums so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// That the guest has sent or received.
    pub packets: f64,
    /// Costs, in the order of [`NAMES`]; NaN: not known.
    pub costs: [f64; NAMES.len()],
}

/// Costs of a packet, in JSON rows: `guest_us` is the CPU time of the guest's process (QEMU) in microseconds, `switch_us` that of
/// our switch, polling included.
pub const NAMES: [&str; 5] =
    ["interrupts_per_packet", "reads_per_packet", "writes_per_packet", "guest_us_per_packet", "switch_us_per_packet"];

/// Column titles of [`Medians::columns`].
pub const HEADER: [&str; 8] =
    ["", "interrupts", "peer's", "register reads", "writes", "guest's CPU us", "peer's", "switch's CPU us"];

/// Costs per packet; NaN: not known.
pub type Costs = [f64; NAMES.len()];

/// Returns the costs of a packet between two counts.
pub fn per_packet(before: &Counts, after: &Counts) -> Costs {
    let packets = after.packets - before.packets;
    let mut costs = after.costs;
    for (cost, before) in costs.iter_mut().zip(before.costs) {
        *cost = if packets > 0.0 { (*cost - before) / packets } else { f64::NAN };
    }
    costs
}

/// Returns numbers of register reads and writes of the only card in what the switch prints on SIGUSR1.
pub fn exits(report: &str) -> Option<[f64; 2]> {
    let (_, table) = report.rsplit_once("interrupts\n")?;
    let (_, numbers) = table.lines().next()?.split_once('|')?;
    // Columns are two spaces apart; within a number, groups of digits are one space apart.
    let number = |text: &str| text.replace(' ', "").parse().ok();
    let numbers: Vec<f64> = numbers.split("  ").filter(|text| !text.trim().is_empty()).filter_map(number).collect();
    numbers.first_chunk().copied()
}

/// Returns a median of each side's runs; `None`: not known.
fn median<T>(rounds: &Rounds<T>, side: usize, cost: impl Fn(&T) -> f64) -> Option<f64> {
    Some(rounds.spread(side, cost).median).filter(|median| median.is_finite())
}

/// Medians of one way: ours and the peer's, in the order of [`NAMES`].
pub struct Medians([[Option<f64>; NAMES.len()]; 2]);

impl Medians {
    pub fn new<T>(rounds: &Rounds<T>, costs: impl Fn(&T) -> Option<Costs>) -> Medians {
        let of = |side, cost: usize| {
            median(rounds, side, |run| costs(run).and_then(|costs| costs.get(cost).copied()).unwrap_or(f64::NAN))
        };
        Medians([0, 1].map(|side| std::array::from_fn(|cost| of(side, cost))))
    }

    /// Returns the fields of a JSON row; those of the peer, which has no switch of ours, with `peer_` before their names.
    pub fn json(&self) -> Value {
        let [ours, peer] = &self.0;
        let ours = NAMES.iter().zip(ours).map(|(name, cost)| ((*name).to_owned(), json!(cost)));
        let peer = NAMES.iter().zip(peer).map(|(name, cost)| (format!("peer_{name}"), json!(cost)));
        Value::Object(ours.chain(peer.filter(|(_, cost)| !cost.is_null())).collect())
    }

    /// Returns the interrupts of both sides, for the first table.
    pub fn interrupts(&self) -> [String; 2] {
        self.0.map(|[interrupts, ..]| text(interrupts, 4))
    }

    /// Returns a line of the table with [`HEADER`].
    pub fn columns(&self) -> Vec<String> {
        let [[ours, reads, writes, guest, switch], [theirs, _, _, peer, _]] = self.0;
        let exact = [ours, theirs, reads, writes].map(|cost| text(cost, 4));
        exact.into_iter().chain([guest, peer, switch].map(|cost| text(cost, 2))).collect()
    }
}

fn text(cost: Option<f64>, digits: usize) -> String {
    cost.map_or("–".to_owned(), |cost| format!("{cost:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_what_was_sent_and_received() {
        let counts = |packets, interrupts| Counts { packets, costs: [interrupts, f64::NAN, 0.0, 10.0, 10.0] };
        let costs = per_packet(&counts(100.0, 10.0), &counts(140.0, 30.0));
        assert_eq!((costs[0], costs[1].is_nan(), costs[2]), (0.5, true, 0.0));
        assert!(per_packet(&counts(100.0, 10.0), &counts(100.0, 30.0)).iter().all(|cost| cost.is_nan()));
    }

    #[test]
    fn exits_of_a_card() {
        let table = "      |  frames\nvm0   |       1\n       |  exits\ne1000  |  reads  writes  interrupts\n\
                     vm0    |  1 234  56 789           1\n";
        assert_eq!(exits(table), Some([1234.0, 56_789.0]));
        assert_eq!(exits("port  |  frames\n"), None);
    }
}
