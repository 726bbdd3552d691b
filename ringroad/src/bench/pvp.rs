//! PvP: a driver sends frames through one port, the device swaps their MAC addresses and sends them back. One core for
//! the driver, one for the device; the same light driver drives our device and DPDK's, in turn.

use super::rig::{Common, Device, Pairs, Peer, finished, print};
use crate::{
    Outcome,
    blast::{Ring, write_json},
    child::Folder,
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
    let peer_name = peer.as_ref().map(|peer| peer.name.as_str());
    common.pin()?;
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    let cells: Vec<(Ring, usize)> =
        args.ring.iter().flat_map(|&ring| args.size.iter().map(move |&size| (ring, size as usize))).collect();
    for (number, &(ring, size)) in cells.iter().enumerate() {
        let touch = if args.no_touch { Touch::Nothing } else { Touch::Word };
        let settings = Settings { touch, ..Settings::flood(size) };
        let what = format!("{} {size} B ({} of {})", ring.name(), number + 1, cells.len());
        let one = |device: &Device| Ok(common.run(device, 0, ring, &settings)?.received_mpps());
        let pairs = Pairs::measure(common, (&ours, peer.as_ref()), &what, one)?;
        let mut row = json!({
            "ring": ring.name(), "size": size, "touch": !args.no_touch, "queue_size": common.queue_size, "unit": "Mpps",
        });
        let mut columns = vec![format!("{} {size}", ring.name())];
        columns.extend(pairs.report(&mut row, peer_name));
        rows.push(row);
        lines.push(columns);
    }
    finished();
    let touch = if args.no_touch { "notouch" } else { "touch" };
    let Common { queue_size, pairs, seconds, .. } = common;
    println!(
        "PvP, Mpps each way through one device core, {touch}, ring {queue_size}, {pairs} runs of {seconds} s, median and min–max"
    );
    print(peer_name, &lines);
    if let Some(file) = &common.json {
        write_json(file, &json!({ "bench": "pvp", "machine": super::machine(), "rows": rows }))?;
    }
    Ok(ExitCode::SUCCESS)
}
