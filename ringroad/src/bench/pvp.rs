//! PvP: a driver sends frames through one port, the device swaps their MAC addresses and sends them back. One core for
//! the driver, one for the device; the same light driver drives our device and DPDK's, in turn.

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

/// Frames reflected by a device on one core, ours against DPDK's net_vhost with macswap
#[derive(clap::Args)]
pub struct Args {
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes without FCS
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    /// Leave the payload alone: the cost of the rings
    #[arg(long)]
    no_touch: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peer: Peer,
}

/// Measures every combination.
pub fn run(args: Args) -> Outcome {
    let Args { common, .. } = &args;
    let folder = Folder::new("pvp")?;
    let ours = common.ours(&folder, "\"unlimited\"", &["mode = \"reflect\""])?;
    let peer = common.dpdk(&folder, &args.peer, 1, "macswap")?;
    common.pin()?;
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    let cells: Vec<(Ring, usize)> =
        args.ring.iter().flat_map(|&ring| args.size.iter().map(move |&size| (ring, size as usize))).collect();
    for (number, &(ring, size)) in cells.iter().enumerate() {
        let touch = if args.no_touch { Touch::Nothing } else { Touch::Word };
        let settings = Settings { touch, ..Settings::flood(size) };
        let (mut our_figures, mut peer_figures, mut round_trips) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 1..=common.pairs {
            let (name, of, pairs) = (ring.name(), cells.len(), common.pairs);
            progress(&format!("{name} {size} B ({} of {of}), pair {pair} of {pairs}", number + 1));
            round_trips.push(super::line_round_trip([common.driver_cpu, common.device_cpu])?);
            our_figures.push(common.run(&ours, 0, ring, &settings)?.received_mpps());
            if let Some(peer) = &peer {
                peer_figures.push(common.run(peer, 0, ring, &settings)?.received_mpps());
            }
        }
        let ratios: Vec<f64> = our_figures.iter().zip(&peer_figures).map(|(ours, peer)| ours / peer).collect();
        let (a, b, r) = (Spread::of(&our_figures), Spread::of(&peer_figures), Spread::of(&ratios));
        let line = Spread::of(&round_trips);
        let mut row = json!({
            "ring": ring.name(), "size": size, "touch": !args.no_touch, "queue_size": common.queue_size,
            "unit": "Mpps", "ours": a.median, "ours_min": a.min, "ours_max": a.max, "pairs": common.pairs,
            "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
        });
        let mut columns = vec![format!("{} {size}", ring.name())];
        columns.extend(a.columns(2));
        if let Some(peer) = &peer {
            row["peer"] = json!(b.median);
            row["peer_min"] = json!(b.min);
            row["peer_max"] = json!(b.max);
            row["peer_name"] = json!(peer.name);
            row["ratio"] = json!(r.median);
            row["min"] = json!(r.min);
            row["max"] = json!(r.max);
            columns.extend(b.columns(2));
            columns.extend(r.columns(2));
        }
        columns.extend(line.columns(0));
        rows.push(row);
        lines.push(columns);
    }
    finished();
    let touch = if args.no_touch { "notouch" } else { "touch" };
    let Common { queue_size, pairs, seconds, .. } = common;
    println!(
        "PvP, Mpps each way through one device core, {touch}, ring {queue_size}, {pairs} runs of {seconds} s, median and min–max"
    );
    match &peer {
        Some(peer) => {
            println!("peer: {}", peer.name);
            print!("{}", table(&["", "ours", "", "peer", "", "ratio", "", "line, ns", ""], &lines));
        }
        None => print!("{}", table(&["", "ours", "", "line, ns", ""], &lines)),
    }
    println!("{}", super::LINE);
    if let Some(file) = &common.json {
        write_json(file, &json!({ "bench": "pvp", "machine": super::machine(), "rows": rows }))?;
    }
    Ok(ExitCode::SUCCESS)
}
