//! What moderated interrupts cost a lone frame: a card that reflects it, and the next one when it has returned.

use super::drive::drive;
use crate::{
    figures::{Spread, extend},
    options::Common,
    rig::Device,
    session::{Rounds, Session},
};
use ringroad_text::table;
use ringroad_traffic::{
    Settings, Touch,
    options::{AccessKind, LemOptions, name},
};
use serde_json::json;

/// Time between frames in microseconds; 0: the next one follows at once, so that its interrupt waits for the interval.
const GAPS: [u32; 2] = [1000, 0];

/// Median and 99th percentile of round trips in microseconds.
type Times = [f64; 2];

/// A frame every so many microseconds, and whether interrupts are moderated.
type Way = (u32, bool);

/// Two cards that reflect, without moderation and with it, and how they are driven.
pub struct Lone<'a> {
    pub devices: &'a [Device; 2],
    pub accesses: AccessKind,
    pub itr: u16,
    pub queue_size: u32,
    pub size: u16,
    pub poll: &'a str,
    pub common: &'a Common,
}

/// Measures each way in turn, and adds the rows.
pub fn run(lone: &Lone<'_>, session: &mut Session<'_>) -> Result<(), String> {
    let ways: Vec<Way> = GAPS.iter().flat_map(|&gap| [(gap, false), (gap, true)]).collect();
    let rounds = session.rounds("e1000 lone frame", &ways, |&way| measure(lone, way))?;
    let mut lines = Vec::new();
    for index in 0..ways.len() {
        lines.push(add(lone, session, &rounds, &ways, index)?);
    }
    let Lone { size, itr, poll, common, .. } = lone;
    let title = format!(
        "e1000, round trip of one frame of {size} B in us, interval of interrupts {} us, worker polls for {poll}, {}",
        interval(*itr),
        common.runs()
    );
    session.print(&title, &format!("{}{NOTE}", table(&["", "device", "p50", "", "p99", "", "longer", ""], &lines)));
    Ok(())
}

/// Explains the table.
const NOTE: &str =
    "longer: p99 of the mitigated device less that of the standard one; it should be less than an interval\n\n";

/// Returns the interval in microseconds that a value of ITR asks for.
pub fn interval(itr: u16) -> f64 {
    f64::from(itr) * 0.256
}

fn measure(lone: &Lone<'_>, (gap, mitigation): Way) -> Result<Times, String> {
    let &Lone { devices: [standard, mitigated], accesses, itr, queue_size, size, common, .. } = lone;
    let device = if mitigation { mitigated } else { standard };
    let options = LemOptions { mit: false, itr, accesses, busy: false };
    let rate = (gap > 0).then(|| 1e6 / f64::from(gap));
    let settings = Settings { touch: Touch::All, window: Some(1), rate, ..Settings::flood(size.into()) };
    let totals = drive((device, common), "round trip of one frame", options, queue_size, settings)?.totals;
    if totals.received == 0 || totals.received != totals.sent || totals.errors > 0 {
        let (sent, received) = (totals.sent, totals.received);
        return Err(format!("round trip of one frame: {sent} were sent, {received} have returned"));
    }
    Ok([0.5, 0.99].map(|quantile| totals.round_trip.value_at_quantile(quantile) as f64 / 1e3))
}

/// Adds the JSON row of a way; returns its line of the table.
fn add(
    lone: &Lone<'_>,
    session: &mut Session<'_>,
    rounds: &Rounds<Times>,
    ways: &[Way],
    index: usize,
) -> Result<Vec<String>, String> {
    let Some(&(gap, mitigation)) = ways.get(index) else { return Err(format!("there is no way {index}")) };
    let (median, tail) = (rounds.spread(index, |&[median, _]| median), rounds.spread(index, |&[_, tail]| tail));
    let Lone { accesses, size, queue_size, itr, poll, common, .. } = lone;
    let device = if mitigation { "mitigated device" } else { "standard device" };
    let mut row = json!({
        "policy": format!("{device}, lone frame"), "gap_us": gap, "size": size, "queue_size": queue_size, "itr": itr,
        "interval_us": interval(*itr), "poll": poll, "unit": "us", "pairs": common.pairs, "seconds": common.seconds,
        "accesses": name(accesses),
    });
    median.add_to(&mut row, ["p50", "p50_min", "p50_max"]);
    tail.add_to(&mut row, ["p99", "p99_min", "p99_max"]);
    let load = if gap > 0 { format!("one every {gap} us") } else { "one after the other".to_owned() };
    let mut line = vec![load, device.to_owned()];
    line.extend([median.columns(1), tail.columns(1)].concat());
    if mitigation && index > 0 {
        let (before, after) = (rounds.of(index - 1, |&[_, tail]| tail), rounds.of(index, |&[_, tail]| tail));
        let longer = Spread::of(&after.iter().zip(before).map(|(after, before)| after - before).collect::<Vec<_>>());
        longer.add_to(&mut row, ["longer", "longer_min", "longer_max"]);
        line.extend(longer.columns(1));
    }
    line.resize(8, String::new());
    extend(&mut row, json!({ "line_ns": rounds.line().median }));
    session.push(row)?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        common: Common,
    }

    #[test]
    fn the_mitigated_device_is_compared_with_the_standard_one() {
        let Cli { common } = Cli::parse_from(["bench"]);
        let device = || Device { name: "ours".into(), sockets: Vec::new(), programs: Vec::new() };
        let (devices, accesses) = ([device(), device()], AccessKind::Posted);
        let lone = Lone { devices: &devices, accesses, itr: 488, queue_size: 64, size: 64, poll: "0", common: &common };
        let mut session = Session::new("lem", &common, 1, false);
        let rounds = Rounds::new(vec![vec![[60.0, 90.0], [70.0, 90.0]], vec![[61.0, 160.0], [65.0, 170.0]]]);
        let ways = [(1000, false), (1000, true)];
        let lines = [0, 1].map(|index| add(&lone, &mut session, &rounds, &ways, index).unwrap());
        assert_eq!(lines[0][6..], ["", ""]);
        assert_eq!(lines[1][..2], ["one every 1000 us", "mitigated device"]);
        assert_eq!(lines[1][6..], ["75.0", "70.0–80.0"]);
        let [standard, mitigated] = [0, 1].map(|index| &session.rows()[index]);
        assert!(standard.get("longer").is_none());
        assert_eq!((mitigated["longer"].as_f64(), mitigated["p99"].as_f64()), (Some(75.0), Some(165.0)));
        assert_eq!(mitigated["interval_us"].as_f64(), Some(124.928));
    }
}
