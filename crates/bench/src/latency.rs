//! Round trip of a single frame: the device reflects it, and the driver sends the next one when it has returned. Polling, and
//! event driven on both ends.

use crate::{
    figures::{LINE, LINE_NOTE, RATIO, Spread, extend},
    frames::Frames,
    rig::{Device, Rings},
    session::{Rounds, Session},
};
use ringroad_text::table;
use ringroad_traffic::{Settings, Touch, child::Folder};
use serde_json::{Value, json};

/// How a round trip is measured: its name, the device, and whether the driver is event driven.
type Way<'a> = (&'static str, &'a Device, bool);

/// Mean and 99th percentile in nanoseconds.
type Times = [f64; 2];

/// Measures every combination with each peer.
pub fn run(args: &Frames) -> Result<(), String> {
    let Frames { common, peers, .. } = args;
    let (peers, cells) = (peers.found()?, args.cells());
    let folder = Folder::new("latency")?;
    let polling = common.ours(&folder, "polling", "unlimited", &["mode = \"reflect\""])?;
    let event = common.ours(&folder, "event", "0us", &["mode = \"reflect\""])?;
    let mut session = Session::new("latency", common, peers.len() * cells.len(), false);
    session.without_missing(&peers)?;
    for peer in &peers {
        let peer = peer.start(common, &folder, 1, "macswap")?;
        let mut ways: Vec<Way<'_>> = vec![("poll", &polling, false), ("event", &event, true)];
        ways.extend(peer.iter().map(|peer| ("poll", peer, false)));
        let mut lines = Vec::new();
        for &(rings, size) in &cells {
            let rounds =
                session.rounds(&format!("{} {size} B", rings.layout), &ways, |&(_, device, event_driven)| {
                    let flood = Settings::flood(size);
                    let settings = Settings { touch: Touch::All, window: Some(1), event_driven, ..flood };
                    let times = common.run(device, 0, rings, &settings)?.round_trip;
                    Ok([times.mean(), times.value_at_quantile(0.99) as f64])
                })?;
            for (columns, row) in results(common.pairs, (rings, size), &ways, &rounds) {
                session.push(row)?;
                lines.push(columns);
            }
        }
        let title = format!(
            "round trip of one frame in ns, one core for the device, one for the driver, {} rounds of {} s, median and min–max",
            common.pairs, common.seconds
        );
        let table = table(&["", "device", "mean", "", "p99", "", "ratio", "", "line, ns", ""], &lines);
        session.print(&title, &format!("{table}{LINE_NOTE}\n\n"));
    }
    session.finish()
}

/// Returns a cell's lines and JSON rows, one for each way. The first way, ours polling, is compared with the third one, the peer's.
fn results(
    pairs: u32,
    (Rings { layout, size: queue_size }, size): (Rings, usize),
    ways: &[Way<'_>],
    rounds: &Rounds<Times>,
) -> Vec<(Vec<String>, Value)> {
    let means = |way: usize| rounds.of(way, |&[mean, _]| mean);
    let result = |(index, &(way, device, _)): (usize, &Way<'_>)| {
        let (mean, tail) = (Spread::of(&means(index)), rounds.spread(index, |&[_, tail]| tail));
        let mut row = json!({
            "ring": layout.to_string(), "size": size, "mode": way, "device": device.name, "unit": "ns",
            "p99": tail.median, "queue_size": queue_size, "pairs": pairs,
        });
        mean.add_to(&mut row, ["mean", "mean_min", "mean_max"]);
        rounds.line().add_to(&mut row, LINE);
        let mut columns = vec![format!("{layout} {size} {way}"), device.name.clone()];
        columns.extend([mean.columns(0), tail.columns(0)].concat());
        if let (0, Some((_, peer, _))) = (index, ways.get(2)) {
            let ratio = Spread::of_ratios(&means(2), &means(0));
            let theirs = Spread::of(&means(2)).median;
            extend(&mut row, json!({ "ours": mean.median, "peer": theirs, "peer_name": peer.name }));
            ratio.add_to(&mut row, RATIO);
            columns.extend(ratio.columns(2));
        }
        if index + 1 == ways.len() {
            columns.resize(8, String::new());
            columns.extend(rounds.line().columns(0));
        }
        (columns, row)
    };
    ways.iter().enumerate().map(result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringroad_traffic::options::Ring;

    #[test]
    fn only_our_polling_device_is_compared() {
        let device = |name: &str| Device { name: name.into(), sockets: Vec::new(), programs: Vec::new() };
        let (ours, peer) = (device("ours"), device("other"));
        let ways = [("poll", &ours, false), ("event", &ours, true), ("poll", &peer, false)];
        let rounds = Rounds::new(vec![vec![[100.0, 200.0]], vec![[100.0, 900.0]], vec![[150.0, 300.0]]]);
        let rings = Rings { layout: Ring::Split, size: 256 };
        for count in [2, 3] {
            let results = results(1, (rings, 64), &ways[..count], &rounds);
            let ratio = |index: usize| results[index].1["ratio"].as_f64();
            assert_eq!((ratio(0), ratio(1)), ((count == 3).then_some(1.5), None), "{count}");
            assert_eq!(results[1].1["p99"], 900.0);
            assert_eq!(results[count - 1].0.len(), 10, "the last line has the line's columns");
        }
    }
}
