//! Guest to guest: a driver sends into one port, another one receives from a second; one core for the device, one for both
//! drivers. Our switch learns and looks up; DPDK's testpmd passes frames from one port to the other without a look.

use super::rig::{Common, Device, Pairs, Peer, finished, print};
use crate::{
    Outcome,
    blast::{Ring, write_json},
    child::Folder,
    traffic::{Settings, Touch, Traffic},
};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use serde_json::json;
use std::{process::ExitCode, time::Duration};

/// Frames from guest to guest through two ports, ours against testpmd with two net_vhost ports
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

/// One run: millions of frames per second that arrived.
fn measure(common: &Common, device: &Device, ring: Ring, size: usize) -> Result<f64, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}, {} {size} B: {error}", device.name, ring.name());
    device.hold(false);
    let mut from = common.connect(device, 0, ring, size)?;
    let mut to = common.connect(device, 1, ring, size)?;
    // The switch learns where the receiver is.
    let back = Addresses { destination: MacAddr::local(1), source: MacAddr::local(2) };
    let hello = Settings { addresses: back, window: Some(1), ..Settings::flood(size) };
    let mut hello = Traffic::new(hello, &mut to.driver);
    hello.run(&mut to, Duration::from_millis(20), |_| {}).map_err(|error| failed(&error))?;
    let mut traffic = Traffic::new(Settings { touch: Touch::Word, ..Settings::flood(size) }, &mut from.driver);
    let mut run = |seconds: f64| {
        let totals = traffic.run_across(&mut from, &mut to, Duration::from_secs_f64(seconds), |_| {});
        totals.map_err(|error| failed(&error))
    };
    run(0.2)?;
    let totals = run(common.seconds)?;
    drop((from, to));
    device.hold(true);
    if totals.received == 0 {
        return Err(failed(&"no frame arrived"));
    }
    Ok(totals.received_mpps())
}

/// Measures every combination.
pub fn run(args: Args) -> Outcome {
    let Args { common, .. } = &args;
    let folder = Folder::new("switch")?;
    let ours = common.ours(&folder, "\"unlimited\"", &["", ""])?;
    let peer = common.dpdk(&folder, &args.peer, 2, "io")?;
    let peer_name = peer.as_ref().map(|peer| format!("{}, two ports, io", peer.name));
    common.pin()?;
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    for &ring in &args.ring {
        for &size in &args.size {
            let size = size as usize;
            let what = format!("{} {size} B", ring.name());
            let one = |device: &Device| measure(common, device, ring, size);
            let pairs = Pairs::measure(common, (&ours, peer.as_ref()), &what, one)?;
            let mut row = json!({
                "ring": ring.name(), "size": size, "touch": true, "queue_size": common.queue_size, "unit": "Mpps",
            });
            let mut columns = vec![format!("{} {size}", ring.name())];
            columns.extend(pairs.report(&mut row, peer_name.as_deref()));
            rows.push(row);
            lines.push(columns);
        }
    }
    finished();
    let Common { queue_size, pairs, seconds, .. } = common;
    println!(
        "guest to guest, Mpps through one device core, one core for both drivers, touch, ring {queue_size}, {pairs} runs of {seconds} s, median and min–max"
    );
    print(peer_name.as_deref(), &lines);
    if let Some(file) = &common.json {
        write_json(file, &json!({ "bench": "switch", "machine": super::machine(), "rows": rows }))?;
    }
    Ok(ExitCode::SUCCESS)
}
