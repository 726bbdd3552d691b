//! The round trip of one frame: it is reflected, and the next one goes when it is back. Polling, and event driven on both
//! ends.

use super::{
    peer::Peers,
    rig::{Common, Device, Rings, finished, progress},
};
use crate::{
    Outcome,
    blast::Ring,
    child::Folder,
    report::{Spread, table},
    traffic::{Settings, Touch},
};
use serde_json::{Value, json};
use std::process::ExitCode;

/// The round trip of one frame, polling and event driven, ours against a peer's (which polls)
#[derive(clap::Args)]
pub struct Args {
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes without FCS
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    /// Entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: u32,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peer: Peers,
}

/// Measures every combination with each peer.
pub fn run(args: Args) -> Outcome {
    let Args { common, .. } = &args;
    let peers = args.peer.found()?;
    let folder = Folder::new("latency")?;
    let polling = common.ours(&folder, "polling", "\"unlimited\"", &["mode = \"reflect\""])?;
    let event = common.ours(&folder, "event", "\"0us\"", &["mode = \"reflect\""])?;
    let mut rows = Vec::new();
    for peer in &peers {
        let peer = peer.start(common, &folder, 1, "macswap")?;
        measure(&args, [&polling, &event], peer.as_ref(), &mut rows)?;
    }
    common.save("latency", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}

/// A table with one peer.
fn measure(args: &Args, ours: [&Device; 2], peer: Option<&Device>, rows: &mut Vec<Value>) -> Result<(), String> {
    let Args { common, queue_size, .. } = args;
    let mut ways = vec![("poll", ours[0], false), ("event", ours[1], true)];
    ways.extend(peer.iter().map(|&peer| ("poll", peer, false)));
    let mut lines = Vec::new();
    for &ring in &args.ring {
        for &size in &args.size {
            let rings = Rings { layout: ring, size: *queue_size };
            // Means and 99th percentiles in nanoseconds, way by way.
            let mut figures = vec![(Vec::new(), Vec::new()); ways.len()];
            let mut round_trips = Vec::new();
            for pair in 1..=common.pairs {
                progress(&format!("{} {size} B, round {pair} of {}", ring.name(), common.pairs));
                round_trips.push(common.line()?);
                for (&(_, device, event_driven), (means, tails)) in ways.iter().zip(&mut figures) {
                    let settings =
                        Settings { touch: Touch::All, window: Some(1), event_driven, ..Settings::flood(size as usize) };
                    let times = common.run(device, 0, rings, &settings)?.round_trip;
                    means.push(times.mean());
                    tails.push(times.value_at_quantile(0.99) as f64);
                }
            }
            let line = Spread::of(&round_trips);
            let peer_means = figures.get(2).map(|(means, _)| means.clone());
            for (&(way, device, _), (means, tails)) in ways.iter().zip(&figures) {
                let (mean, tail) = (Spread::of(means), Spread::of(tails));
                let mut row = json!({
                    "ring": ring.name(), "size": size, "mode": way, "device": device.name, "unit": "ns",
                    "mean": mean.median, "mean_min": mean.min, "mean_max": mean.max, "p99": tail.median,
                    "queue_size": queue_size, "pairs": common.pairs,
                    "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
                });
                let mut columns = vec![format!("{} {size} {way}", ring.name()), device.name.clone()];
                columns.extend(mean.columns(0));
                columns.extend(tail.columns(0));
                if let (Some(peer), Some(peer_means), "poll", false) = (peer, &peer_means, way, means == &figures[2].0)
                {
                    let ratios: Vec<f64> = means.iter().zip(peer_means).map(|(ours, peer)| peer / ours).collect();
                    let ratio = Spread::of(&ratios);
                    row["ours"] = json!(mean.median);
                    row["peer"] = json!(Spread::of(peer_means).median);
                    row["peer_name"] = json!(peer.name);
                    row["ratio"] = json!(ratio.median);
                    row["min"] = json!(ratio.min);
                    row["max"] = json!(ratio.max);
                    columns.extend(ratio.columns(2));
                }
                rows.push(row);
                lines.push(columns);
            }
            if let Some(columns) = lines.last_mut() {
                columns.resize(8, String::new());
                columns.extend(line.columns(0));
            }
        }
    }
    finished();
    println!(
        "round trip of one frame in ns, one core for the device, one for the driver, {} rounds of {} s, median and min–max",
        common.pairs, common.seconds
    );
    print!("{}", table(&["", "device", "mean", "", "p99", "", "ratio", "", "line, ns", ""], &lines));
    println!("{}\n", super::LINE);
    Ok(())
}
