//! Cost curves of our device: by the number of frames that the driver sends at once, and by the number of ports that one
//! worker serves. Nobody else's is needed for them.

use super::rig::{Common, Device, Pairs, Progress, Rings, Run, Table, finished};
use crate::{
    Outcome,
    blast::Ring,
    child::Folder,
    traffic::{Settings, Traffic},
};
use ringroad_ring::BURST;
use ringroad_wire::vnet_hdr;
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

/// What a frame costs by the driver's burst, and by the number of ports that one worker serves
#[derive(clap::Args)]
pub struct Args {
    /// Which curves [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["burst", "ports"], hide_default_value = true)]
    curve: Vec<Curve>,
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frames that the driver sends at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64],
          value_parser = clap::value_parser!(u64).range(1..=BURST as u64))]
    burst: Vec<u64>,
    /// Ports of one worker
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32],
          value_parser = clap::value_parser!(u64).range(1..=64))]
    ports: Vec<u64>,
    /// Frame size without FCS
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: u64,
    /// Entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: u32,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Curve {
    /// By the frames that the driver sends at once
    Burst,
    /// By the ports that one worker serves
    Ports,
}

const IDLE: &str = "driver idle: rounds in which it waited for the device, in percent of all (an empty one is shorter)";

/// Measures the curves that were asked for.
pub fn run(args: Args) -> Outcome {
    let mut rows = Vec::new();
    for curve in &args.curve {
        match curve {
            Curve::Burst => bursts(&args, &mut rows)?,
            Curve::Ports => ports(&args, &mut rows)?,
        }
    }
    args.common.save("curves", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}

/// By the driver's burst, ours alone.
fn bursts(args: &Args, rows: &mut Vec<Value>) -> Result<(), String> {
    let Args { common, size, queue_size, .. } = args;
    let folder = Folder::new("curves")?;
    let ours = common.ours(&folder, "ours", "\"unlimited\"", &["mode = \"reflect\""])?;
    let mut progress = Progress::new(args.ring.len() * args.burst.len());
    let mut table = Table::new(None, ["Mpps", ""], &["ns/frame", "driver idle, %"]);
    for &layout in &args.ring {
        for &burst in &args.burst {
            let name = format!("{} burst {burst}", layout.name());
            let settings = Settings { burst: burst as usize, ..Settings::flood(*size as usize) };
            let rings = Rings { layout, size: *queue_size };
            let one = |device: &Device| Ok(common.run(device, 0, rings, &settings)?.into());
            let pairs = Pairs::measure(common, &mut progress, (&ours, None), &name, one)?;
            let cost = 1e3 / pairs.rate().median;
            let row = json!({
                "curve": "burst", "ring": layout.name(), "size": size, "touch": true, "queue_size": queue_size,
                "burst": burst, "unit": "Mpps", "ns_per_frame": cost,
            });
            let more = [vec![format!("{cost:.1}")], pairs.idle()].concat();
            rows.push(table.add(name, row, &pairs, more));
            common.save("curves", rows, false)?;
        }
    }
    finished();
    let Common { pairs, seconds, .. } = common;
    println!(
        "by the frames that the driver sends at once (it receives up to {BURST}), {size} B, touch, ring {queue_size}, {pairs} runs of {seconds} s"
    );
    println!("{IDLE}");
    table.print();
    Ok(())
}

/// By the number of ports: one worker serves them all, one driver works through them; in pairs with one port.
fn ports(args: &Args, rows: &mut Vec<Value>) -> Result<(), String> {
    let Args { common, size, queue_size, .. } = args;
    let folder = Folder::new("curves")?;
    let start = |name: &str, ports: u64| {
        common.ours(&folder, name, "\"unlimited\"", &vec!["mode = \"reflect\""; ports as usize])
    };
    let alone = start("one", 1)?;
    let mut progress = Progress::new(args.ring.len() * args.ports.len());
    let mut table = Table::new(
        Some(&format!("{}, one port", alone.name)),
        ["all ports", "one port"],
        &["KiB", "driver idle, %", "one port, %"],
    );
    for &ports in &args.ports {
        let many = start(&format!("of-{ports}"), ports)?;
        for &layout in &args.ring {
            let rings = Rings { layout, size: *queue_size };
            let name = format!("{} {ports} ports", layout.name());
            let one = |device: &Device| in_turn(common, device, rings, *size as usize);
            let pairs = Pairs::measure(common, &mut progress, (&many, Some(&alone)), &name, one)?;
            let touched = ports as usize * touched(rings, *size as usize) / 1024;
            let row = json!({
                "curve": "ports", "ring": layout.name(), "size": size, "touch": true, "queue_size": queue_size,
                "ports": ports, "unit": "Mpps", "touched_kib": touched,
            });
            let more = [vec![touched.to_string()], pairs.idle()].concat();
            rows.push(table.add(name, row, &pairs, more));
            common.save("curves", rows, false)?;
        }
    }
    finished();
    let Common { pairs, seconds, .. } = common;
    println!(
        "by the ports that one worker serves, Mpps of all of them each way, {size} B, touch, ring {queue_size}, {pairs} pairs of {seconds} s"
    );
    println!(
        "KiB: rings and frames that driver and device go round and round; beyond a core's own cache they cost more"
    );
    println!("(--queue-size 32 keeps those of 32 ports small). {IDLE}");
    table.print();
    Ok(())
}

/// One run: a driver on each port of a device, all on one CPU, a round on each in turn.
fn in_turn(common: &Common, device: &Device, rings: Rings, size: usize) -> Result<Run, String> {
    device.hold(false);
    let totals = common.pinned(|| {
        let mut each = Vec::new();
        for port in 0..device.sockets.len() {
            let mut connection = common.connect(device, port, rings, size)?;
            each.push((Traffic::new(Settings::flood(size), &mut connection.driver), connection));
        }
        let mut run = |seconds: f64| Traffic::run_in_turn(&mut each, Duration::from_secs_f64(seconds));
        run(0.2).and_then(|_| run(common.seconds)).map_err(|error| format!("{}: {error}", device.name))
    })?;
    device.hold(true);
    match totals.received {
        0 => Err(format!("{}, {} ports: no frame came back", device.name, device.sockets.len())),
        _ => Ok(totals.into()),
    }
}

/// Bytes of a port's two rings and of their buffers that frames of a size touch: whole cache lines, and descriptors with
/// what tells of them.
fn touched(rings: Rings, size: usize) -> usize {
    let descriptor = match rings.layout {
        Ring::Split => 16 + 2 + 8,
        Ring::Packed => 16,
    };
    2 * rings.size as usize * ((vnet_hdr::SIZE + size).next_multiple_of(64) + descriptor)
}
