//! Cost curves of our device alone: by the number of frames that the driver sends at once, and by the number of ports that one
//! worker serves.

use crate::{
    figures::Spread,
    options::{Common, Layouts},
    rig::{Device, Rings},
    session::{Run, Session, Table},
};
use ringroad_ring::BURST;
use ringroad_traffic::{Settings, Traffic, child::Folder, options::Ring};
use ringroad_wire::vnet_hdr;
use serde_json::json;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which curves, as a list [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["burst", "ports"], hide_default_value = true)]
    curve: Vec<Curve>,
    #[command(flatten)]
    layouts: Layouts,
    /// Numbers of frames that the driver sends at once, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64],
          value_parser = clap::value_parser!(u64).range(1..=BURST as u64))]
    burst: Vec<u64>,
    /// Numbers of ports of one worker, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32],
          value_parser = clap::value_parser!(u64).range(1..=64))]
    ports: Vec<u64>,
    /// Frame size in bytes, without FCS
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: u64,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Curve {
    /// By the number of frames that the driver sends at once
    Burst,
    /// By the number of ports that one worker serves
    Ports,
}

const IDLE: &str =
    "driver idle: rounds in which the driver waited for the device, in percent of all (an empty round is shorter)";

/// Measures the requested curves.
pub fn run(args: &Args) -> Result<(), String> {
    let cells = |curve: &Curve| match curve {
        Curve::Burst => args.burst.len(),
        Curve::Ports => args.ports.len(),
    };
    let cells = args.curve.iter().map(cells).sum::<usize>() * args.layouts.ring.len();
    let mut session = Session::new("curves", &args.common, cells, true);
    for curve in &args.curve {
        match curve {
            Curve::Burst => bursts(args, &mut session)?,
            Curve::Ports => ports(args, &mut session)?,
        }
    }
    session.finish()
}

/// By the driver's burst.
fn bursts(args: &Args, session: &mut Session<'_>) -> Result<(), String> {
    let Args { common, size, layouts: Layouts { ring, queue_size }, .. } = args;
    let folder = Folder::new("curves")?;
    let ours = common.ours(&folder, "ours", "unlimited", &["mode = \"reflect\""])?;
    let mut table = Table::new(None, ["Mpps", ""], &["ns/frame", "driver idle, %"]);
    for &layout in ring {
        for &burst in &args.burst {
            let name = format!("{layout} burst {burst}");
            let settings = Settings { burst: burst as usize, ..Settings::flood(*size as usize) };
            let rings = Rings { layout, size: *queue_size };
            let one = |device: &&Device| Ok(common.run(device, 0, rings, &settings)?.into());
            let pairs = session.rounds(&name, &[&ours], one)?;
            let cost = 1e3 / Spread::of(&pairs.rates(0)).median;
            let row = json!({
                "curve": "burst", "ring": layout.to_string(), "size": size, "touch": true, "queue_size": queue_size,
                "burst": burst, "unit": "Mpps", "ns_per_frame": cost,
            });
            let more = std::iter::once(format!("{cost:.1}")).chain(pairs.idle_columns());
            session.push(table.add(&name, row, &pairs, more))?;
        }
    }
    let Common { pairs, seconds, .. } = common;
    let title = format!(
        "by the frames that the driver sends at once (it receives up to {BURST}), {size} B, touch, ring {queue_size}, {pairs} runs of {seconds} s"
    );
    session.print(&format!("{title}\n{IDLE}"), &table.text());
    Ok(())
}

/// By the number of ports: one worker serves them all, one driver works on them in turn; in pairs with one port.
fn ports(args: &Args, session: &mut Session<'_>) -> Result<(), String> {
    let Args { common, size, layouts: Layouts { ring, queue_size }, .. } = args;
    let folder = Folder::new("curves")?;
    let start =
        |name: &str, ports: u64| common.ours(&folder, name, "unlimited", &vec!["mode = \"reflect\""; ports as usize]);
    let single = start("one", 1)?;
    let peer = format!("{}, one port", single.name);
    let mut table = Table::new(Some(&peer), ["all ports", "one port"], &["KiB", "driver idle, %", "one port, %"]);
    for &ports in &args.ports {
        let many = start(&format!("of-{ports}"), ports)?;
        for &layout in ring {
            let rings = Rings { layout, size: *queue_size };
            let name = format!("{layout} {ports} ports");
            let one = |device: &&Device| in_turn(common, device, rings, *size as usize);
            let pairs = session.rounds(&name, &[&many, &single], one)?;
            let touched = ports as usize * touched(rings, *size as usize) / 1024;
            let row = json!({
                "curve": "ports", "ring": layout.to_string(), "size": size, "touch": true, "queue_size": queue_size,
                "ports": ports, "unit": "Mpps", "touched_kib": touched,
            });
            let more = std::iter::once(touched.to_string()).chain(pairs.idle_columns());
            session.push(table.add(&name, row, &pairs, more))?;
        }
    }
    let Common { pairs, seconds, .. } = common;
    let title = format!(
        "by the ports that one worker serves, Mpps of all of them each way, {size} B, touch, ring {queue_size}, {pairs} pairs of {seconds} s\n\
         KiB: rings and buffers that driver and device cycle through; beyond a core's own cache they cost more\n\
         (--queue-size 32 keeps those of 32 ports small). {IDLE}"
    );
    session.print(&title, &table.text());
    Ok(())
}

/// Does one run: a driver on each port of a device, all on one CPU, one round each in turn.
fn in_turn(common: &Common, device: &Device, rings: Rings, size: usize) -> Result<Run, String> {
    let ports = device.sockets.len();
    let totals = common.measure(device, &format!("{ports} ports"), || {
        let mut each = Vec::new();
        for port in 0..ports {
            let mut connection = common.connect(device, port, rings, size)?;
            each.push((Traffic::new(Settings::flood(size), &mut connection.driver), connection));
        }
        Ok(move |time| Traffic::run_in_turn(&mut each, time))
    })?;
    Ok(totals.into())
}

/// Returns the bytes of a port's two rings and their buffers that frames of a size touch: whole cache lines, and descriptors with
/// their ring entries.
fn touched(rings: Rings, size: usize) -> usize {
    let descriptor = match rings.layout {
        Ring::Split => 16 + 2 + 8,
        Ring::Packed => 16,
    };
    2 * rings.size as usize * ((vnet_hdr::SIZE + size).next_multiple_of(64) + descriptor)
}
