//! Guest to guest: a driver sends into one port, another one receives from a second; one core for the device, one for both
//! drivers. Our switch learns and looks up, and so does OVS; DPDK's testpmd passes frames from one port to the other without a look.

use super::{
    peer::Peers,
    rig::{Common, Device, Pairs, Progress, Rings, Run, Table, finished},
};
use crate::{
    Outcome,
    blast::Ring,
    child::Folder,
    traffic::{Settings, Traffic},
};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

/// Frames from guest to guest through two ports, ours against two ports of a peer
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

/// One run: frames that arrived.
fn measure(common: &Common, device: &Device, rings: Rings, size: usize) -> Result<Run, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}, {} {size} B: {error}", device.name, rings.layout.name());
    device.hold(false);
    let totals = common.pinned(|| {
        let mut from = common.connect(device, 0, rings, size)?;
        let mut to = common.connect(device, 1, rings, size)?;
        // The switch learns where the receiver is.
        let back = Addresses { destination: MacAddr::local(1), source: MacAddr::local(2) };
        let hello = Settings { addresses: back, window: Some(1), ..Settings::flood(size) };
        let mut hello = Traffic::new(hello, &mut to.driver);
        hello.run(&mut to, Duration::from_millis(20), |_| {}).map_err(|error| failed(&error))?;
        let mut traffic = Traffic::new(Settings::flood(size), &mut from.driver);
        let mut run = |seconds: f64| {
            let totals = traffic.run_across(&mut from, &mut to, Duration::from_secs_f64(seconds), |_| {});
            totals.map_err(|error| failed(&error))
        };
        run(0.2)?;
        run(common.seconds)
    })?;
    device.hold(true);
    match totals.received {
        0 => Err(failed(&"no frame arrived")),
        _ => Ok(totals.into()),
    }
}

/// Measures every combination with each peer.
pub fn run(args: Args) -> Outcome {
    let Args { common, queue_size, .. } = &args;
    let peers = args.peer.found()?;
    let folder = Folder::new("switch")?;
    let ours = common.ours(&folder, "ours", "\"unlimited\"", &["", ""])?;
    let cells: Vec<(Ring, usize)> =
        args.ring.iter().flat_map(|&ring| args.size.iter().map(move |&size| (ring, size as usize))).collect();
    let mut progress = Progress::new(peers.len() * cells.len());
    let mut rows = Vec::new();
    for peer in &peers {
        let peer = peer.start(common, &folder, 2, "io")?;
        let mut table = Table::new(peer.as_ref().map(|peer| peer.name.as_str()), ["ours", "peer"], &[]);
        for &(layout, size) in &cells {
            let name = format!("{} {size}", layout.name());
            let one = |device: &Device| measure(common, device, Rings { layout, size: *queue_size }, size);
            let pairs = Pairs::measure(common, &mut progress, (&ours, peer.as_ref()), &name, one)?;
            let row = json!({
                "ring": layout.name(), "size": size, "touch": true, "queue_size": queue_size, "unit": "Mpps",
            });
            rows.push(table.add(name, row, &pairs, Vec::new()));
            common.save("switch", &rows, false)?;
        }
        finished();
        let Common { pairs, seconds, .. } = common;
        println!(
            "guest to guest, Mpps through one device core, one core for both drivers, touch, ring {queue_size}, {pairs} runs of {seconds} s, median and min–max"
        );
        table.print();
    }
    common.save("switch", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}
