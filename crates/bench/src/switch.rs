//! Guest to guest: a driver sends to one port, another one receives from a second port; one core for the device, one for both
//! drivers. Our switch learns and looks up addresses, as does OVS; DPDK's testpmd passes all frames from one port to the other.

use crate::{
    frames::Frames,
    options::Common,
    peer::MANY_ADDRESSES,
    rig::{Device, Rings},
    session::{Run, Session},
};
use ringroad_traffic::{Settings, Traffic, child::Folder};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use serde_json::json;
use std::{
    mem,
    time::{Duration, Instant},
};

/// How long a switch may take from the connection of a port to the first frame: OVS distributes its queues anew.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between looks at whether it forwards, and for frames that teach it addresses.
const STEP: Duration = Duration::from_millis(20);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Numbers of destination addresses, in random order, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [1, 64, 4096],
          value_parser = clap::value_parser!(u32).range(1..=8000))]
    addresses: Vec<u32>,
    #[command(flatten)]
    frames: Frames,
}

/// What a cell measures.
#[derive(Clone, Copy)]
struct Cell {
    rings: Rings,
    size: usize,
    addresses: u32,
}

/// Does one run and counts the frames that arrive.
fn measure(common: &Common, device: &Device, Cell { rings, size, addresses }: Cell) -> Result<Run, String> {
    let what = format!("{} {size} B", rings.layout);
    let totals = common.measure(device, &what, || {
        let mut from = common.connect(device, 0, rings, size)?;
        let mut to = common.connect(device, 1, rings, size)?;
        // One driver sends to the first port and receives from the second one.
        mem::swap(&mut from.driver.rx, &mut to.driver.rx);
        mem::swap(&mut from.rx, &mut to.rx);
        let failed = |error| format!("{}, {what}: {error}", device.name);
        let mut traffic = Traffic::new(Settings { destinations: addresses, ..Settings::flood(size) }, &mut from.driver);
        let start = Instant::now();
        while traffic.run(&mut from, STEP, |_| {}).map_err(failed)?.received == 0 && start.elapsed() < PATIENCE {}
        // Teaches the switch the receiver's addresses.
        let back = Addresses { destination: MacAddr::local(1), source: MacAddr::local(2) };
        let hello =
            Settings { addresses: back, sources: addresses, window: Some(addresses.into()), ..Settings::flood(size) };
        let mut hello = Traffic::new(hello, &mut to.driver);
        hello.run(&mut to, STEP + Duration::from_micros(10) * addresses, |_| {}).map_err(failed)?;
        Ok(move |time| {
            let _to = &to;
            traffic.run(&mut from, time, |_| {})
        })
    })?;
    Ok(totals.into())
}

/// Measures every combination with each peer.
pub fn run(args: &Args) -> Result<(), String> {
    let Args { addresses, frames } = args;
    let Frames { common, peers, .. } = frames;
    let peers = peers.found()?;
    let folder = Folder::new("switch")?;
    let ours = common.ours(&folder, "ours", "unlimited", &[MANY_ADDRESSES; 2])?;
    let cell = |rings: Rings, size: usize, addresses: u32| {
        let Rings { layout, size: queue_size } = rings;
        let ring = layout.to_string();
        let row = json!({
            "ring": ring, "size": size, "touch": true, "queue_size": queue_size, "addresses": addresses, "unit": "Mpps",
        });
        (format!("{ring} {size}, {addresses} MAC"), row, Cell { rings, size, addresses })
    };
    let combinations = frames.cells().into_iter();
    let cells: Vec<_> =
        combinations.flat_map(|(rings, size)| addresses.iter().map(move |&number| cell(rings, size, number))).collect();
    let title = format!(
        "guest to guest, Mpps through one device core, one core for both drivers, touch, ring {}, destination addresses in \
         random order, {}",
        frames.layouts.queue_size,
        common.runs()
    );
    let mut session = Session::new("switch", common, peers.len() * cells.len(), true);
    session.without_missing(&peers)?;
    let devices = peers.iter().map(|peer| peer.start(common, &folder, 2, "io"));
    session.compare(&title, &ours, devices, &cells, |device, &cell| measure(common, device, cell))?;
    session.finish()
}
