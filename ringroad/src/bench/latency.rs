//! The round trip of one frame: it is reflected, and the next one goes when it is back. Polling, and event driven on both
//! ends.

use super::rig::{Common, Peer, finished, progress};
use crate::{
    Outcome,
    blast::{Ring, write_json},
    child::Folder,
    report::{Spread, table},
    traffic::{Settings, Touch},
};
use serde_json::json;
use std::process::ExitCode;

/// The round trip of one frame, polling and event driven, ours against DPDK's net_vhost (which polls)
#[derive(clap::Args)]
pub struct Args {
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes without FCS
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peer: Peer,
}

/// Measures every combination.
pub fn run(args: Args) -> Outcome {
    let Args { common, .. } = &args;
    let folder = Folder::new("latency")?;
    let polling = common.ours(&folder, "\"unlimited\"", &["mode = \"reflect\""])?;
    let event = common.ours(&folder, "\"0us\"", &["mode = \"reflect\""])?;
    let peer = common.dpdk(&folder, &args.peer, 1, "macswap")?;
    common.pin()?;
    let mut ways = vec![("poll", &polling, false), ("event", &event, true)];
    ways.extend(peer.iter().map(|peer| ("poll", peer, false)));
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    for &ring in &args.ring {
        for &size in &args.size {
            // Means and 99th percentiles in nanoseconds, way by way.
            let mut figures = vec![(Vec::new(), Vec::new()); ways.len()];
            let mut round_trips = Vec::new();
            for pair in 1..=common.pairs {
                progress(&format!("{} {size} B, round {pair} of {}", ring.name(), common.pairs));
                round_trips.push(super::line_round_trip([common.driver_cpu, common.device_cpu])?);
                for (&(_, device, event_driven), (means, tails)) in ways.iter().zip(&mut figures) {
                    let settings =
                        Settings { touch: Touch::All, window: Some(1), event_driven, ..Settings::flood(size as usize) };
                    let times = common.run(device, 0, ring, &settings)?.round_trip;
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
                    "queue_size": common.queue_size, "pairs": common.pairs,
                    "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
                });
                let mut columns = vec![format!("{} {size} {way}", ring.name()), device.name.clone()];
                columns.extend(mean.columns(0));
                columns.extend(tail.columns(0));
                if let (Some(peer), Some(peer_means), "poll", false) = (&peer, &peer_means, way, means == &figures[2].0)
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
    println!("{}", super::LINE);
    if let Some(file) = &common.json {
        write_json(file, &json!({ "bench": "latency", "machine": super::machine(), "rows": rows }))?;
    }
    Ok(ExitCode::SUCCESS)
}
