//! Round trip of a single frame: the device reflects it, and the driver sends the next one when it has returned. Polling, and event
//! driven on both ends.

use crate::{
    figures::{LINE, LINE_NOTE, RATIO, Spread, extend},
    options::Frames,
    rig::{Device, Rings},
    session::{Rounds, Session},
};
use ringroad_text::table;
use ringroad_traffic::{Settings, Touch, child::Folder};
use serde_json::json;

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
    let mut session = Session::new("latency", common, peers.len() * cells.len());
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
            add(&mut session, &mut lines, common.pairs, (rings, size), &ways, &rounds)?;
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

/// Adds the lines and rows of a cell, one for each way; the first one, ours polling, is compared with the peer's, if there is one.
fn add(
    session: &mut Session<'_>,
    lines: &mut Vec<Vec<String>>,
    pairs: u32,
    (Rings { layout, size: queue_size }, size): (Rings, usize),
    ways: &[Way<'_>],
    rounds: &Rounds<Times>,
) -> Result<(), String> {
    let mean = |way: usize| rounds.of(way, |&[mean, _]| mean);
    for (index, &(way, device, _)) in ways.iter().enumerate() {
        let (means, tail) = (Spread::of(&mean(index)), Spread::of(&rounds.of(index, |&[_, tail]| tail)));
        let mut row = json!({
            "ring": layout.to_string(), "size": size, "mode": way, "device": device.name, "unit": "ns",
            "p99": tail.median, "queue_size": queue_size, "pairs": pairs,
        });
        means.add_to(&mut row, ["mean", "mean_min", "mean_max"]);
        rounds.line.add_to(&mut row, LINE);
        let mut columns = vec![format!("{layout} {size} {way}"), device.name.clone()];
        columns.extend([means.columns(0), tail.columns(0)].concat());
        if let (0, Some((_, peer, _))) = (index, ways.get(2)) {
            let (theirs, ratio) = (mean(2), Spread::of_ratios(&mean(2), &mean(0)));
            let peer_mean = Spread::of(&theirs).median;
            extend(&mut row, json!({ "ours": means.median, "peer": peer_mean, "peer_name": peer.name }));
            ratio.add_to(&mut row, RATIO);
            columns.extend(ratio.columns(2));
        }
        if index + 1 == ways.len() {
            columns.resize(8, String::new());
            columns.extend(rounds.line.columns(0));
        }
        session.push(row)?;
        lines.push(columns);
    }
    Ok(())
}
