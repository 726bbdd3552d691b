//! DPDK's own driver (testpmd, net_virtio_user) on our device, against the same driver on DPDK's device (net_vhost). One core
//! for the driver, one for the device; the figures are those of the driver.

use super::{
    peer::{self, Peer, Peers},
    rig::{Common, Device, Pairs, Progress, Run, Table, finished},
};
use crate::{
    Outcome,
    blast::Ring,
    child::{Folder, Program},
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

/// DPDK's own driver on our device, against the same driver on DPDK's
#[derive(clap::Args)]
pub struct Args {
    /// What the driver does
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["flowgen", "txonly", "rxonly"])]
    mode: Vec<Mode>,
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Without and with VIRTIO_NET_F_MRG_RXBUF
    #[arg(long, value_delimiter = ',', default_values = ["0", "1"], value_parser = ["0", "1"])]
    mrg_rxbuf: Vec<String>,
    /// Without and with VIRTIO_F_IN_ORDER
    #[arg(long, value_delimiter = ',', default_values = ["0", "1"], value_parser = ["0", "1"])]
    in_order: Vec<String>,
    /// Without and with its vectorized functions, where it has any
    #[arg(long, value_delimiter = ',', default_values = ["0", "1"], value_parser = ["0", "1"])]
    vectorized: Vec<String>,
    /// Entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: u32,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peer: Peers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// Sends; the device sends back
    Flowgen,
    /// Sends; the device drops
    Txonly,
    /// Receives what the device generates
    Rxonly,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Flowgen => "flowgen",
            Mode::Txonly => "txonly",
            Mode::Rxonly => "rxonly",
        }
    }

    /// What our device does then, and DPDK's.
    fn devices(self) -> (&'static str, &'static str) {
        match self {
            Mode::Flowgen => ("mode = \"reflect\"", "macswap"),
            Mode::Txonly => ("mode = \"drop\"", "rxonly"),
            Mode::Rxonly => ("mode = \"generate\"", "txonly"),
        }
    }

    /// Which of the driver's functions, for receiving and sending, do the work.
    fn path(self, [rx, tx]: &[String; 2]) -> String {
        match self {
            Mode::Flowgen => format!("{rx} {tx}"),
            Mode::Txonly => tx.clone(),
            Mode::Rxonly => rx.clone(),
        }
    }

    /// Which of the driver's rates counts.
    fn rate(self) -> &'static str {
        if self == Mode::Txonly { "Tx-pps:" } else { "Rx-pps:" }
    }
}

impl Args {
    /// All combinations of what was asked for, but for the modes.
    fn cells(&self) -> Vec<Cell<'_>> {
        let mut cells = Vec::new();
        for &ring in &self.ring {
            for mrg_rxbuf in &self.mrg_rxbuf {
                for in_order in &self.in_order {
                    cells.extend(self.vectorized.iter().map(|vectorized| Cell {
                        ring,
                        mrg_rxbuf,
                        in_order,
                        vectorized,
                    }));
                }
            }
        }
        cells
    }
}

/// What is measured at once, for one mode.
struct Cell<'a> {
    ring: Ring,
    mrg_rxbuf: &'a str,
    in_order: &'a str,
    vectorized: &'a str,
}

impl Cell<'_> {
    fn name(&self, mode: Mode) -> String {
        let Cell { ring, mrg_rxbuf, in_order, vectorized } = self;
        format!("{} {} mrg={mrg_rxbuf} in_order={in_order} vec={vectorized}", mode.name(), ring.name())
    }
}

/// A driver on a device, both held still but while they are measured.
struct Side<'a> {
    driver: Program,
    device: &'a Device,
    /// What the driver prints: its rates, every second.
    output: PathBuf,
    log: PathBuf,
    rate: &'static str,
    /// The functions that it has chosen, for receiving and sending.
    paths: [String; 2],
}

impl<'a> Side<'a> {
    /// Starts a driver on a device and waits until it has made its choice.
    fn start(
        args: &Args,
        words: &[String],
        folder: &Folder,
        mode: Mode,
        cell: &Cell<'_>,
        (name, device): (&str, &'a Device),
    ) -> Result<Side<'a>, String> {
        let (log, output) = (folder.file(&format!("{name}.log")), folder.file(&format!("{name}.out")));
        let stdout = fs::File::create(&output).map_err(|error| format!("{}: {error}", output.display()))?;
        let packed = u8::from(cell.ring == Ring::Packed);
        let queue_size = args.queue_size;
        let vdev = format!(
            "net_virtio_user0,path={},queues=1,queue_size={queue_size},packed_vq={packed},mrg_rxbuf={},in_order={},vectorized={}",
            device.sockets[0].display(),
            cell.mrg_rxbuf,
            cell.in_order,
            cell.vectorized
        );
        let mut command = peer::testpmd(words, args.common.driver_cpu, name);
        command
            .args(["--single-file-segments", "--force-max-simd-bitwidth=512"])
            .args(["--log-level=pmd.net.virtio.init:debug", "--vdev", &vdev])
            .args(["--", "--nb-cores=1", &format!("--forward-mode={}", mode.name()), "--txpkts=64", "--auto-start"])
            .args([&format!("--rxd={queue_size}"), &format!("--txd={queue_size}")])
            .args(["--no-flush-rx", "--stats-period", "1"])
            .stdout(stdout);
        device.hold(false);
        let driver = Program::start(&words.join(" "), &mut command, &log)?;
        let mut side = Side { driver, device, output, log, rate: mode.rate(), paths: Default::default() };
        side.wait(1)?;
        side.paths = ["Rx", "Tx"].map(|way| path(&side.log, way));
        side.hold(true);
        Ok(side)
    }

    /// Ends the driver, and holds the device still when it has noticed.
    fn end(self) {
        let device = self.device;
        drop(self);
        thread::sleep(Duration::from_millis(200));
        device.hold(true);
    }

    fn hold(&self, still: bool) {
        self.device.hold(still);
        self.driver.hold(still);
    }

    /// The driver's mean rate over so many seconds. Its first figure covers the time when it was held still, too, and does
    /// not count.
    fn measure(&self, seconds: usize) -> Result<Run, String> {
        let before = self.rates().len() + 1;
        self.hold(false);
        let rates = self.wait(before + seconds)?;
        self.hold(true);
        let rates = &rates[before..];
        let mpps = rates.iter().sum::<f64>() / rates.len() as f64 / 1e6;
        match mpps {
            0.0 => Err(format!("testpmd on {}: no frames", self.device.name)),
            mpps => Ok(Run { mpps, idle: None }),
        }
    }

    /// The rates that the driver has printed so far, in frames per second.
    fn rates(&self) -> Vec<f64> {
        rates(&fs::read_to_string(&self.output).unwrap_or_default(), self.rate)
    }

    /// Waits until it has printed so many.
    fn wait(&self, count: usize) -> Result<Vec<f64>, String> {
        let (start, missing) = (Instant::now(), count.saturating_sub(self.rates().len()));
        loop {
            let rates = self.rates();
            if rates.len() >= count {
                return Ok(rates);
            }
            if start.elapsed() > Duration::from_secs(15 + 2 * missing as u64) {
                let said = fs::read_to_string(&self.log).unwrap_or_default();
                return Err(format!("testpmd on {} does not say how fast it is:\n{said}", self.device.name));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        // The driver, which ends now, asks it to stop its queues.
        self.device.hold(false);
    }
}

/// Measures every combination with each peer.
pub fn run(args: Args) -> Outcome {
    let Args { common, .. } = &args;
    let (peers, cells) = (args.peer.found()?, args.cells());
    let mut progress = Progress::new(peers.len() * args.mode.len() * cells.len());
    let mut rows = Vec::new();
    for peer in &peers {
        for &mode in &args.mode {
            measure(&args, peer, mode, &cells, &mut progress, &mut rows)?;
        }
    }
    common.save("driver", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}

/// A table of one mode with one peer.
fn measure(
    args: &Args,
    peer: &Peer,
    mode: Mode,
    cells: &[Cell<'_>],
    progress: &mut Progress,
    rows: &mut Vec<Value>,
) -> Result<(), String> {
    let Args { common, queue_size, .. } = args;
    let Peer::Testpmd(words) = peer else { return Err("bench driver needs DPDK: --peer dpdk or forky".into()) };
    let folder = Folder::new(&format!("driver-{}", mode.name()))?;
    let (what_ours, what_theirs) = mode.devices();
    let ours = common.ours(&folder, "ours", "\"unlimited\"", &[what_ours])?;
    let Some(theirs) = peer.start(common, &folder, 1, what_theirs)? else { return Ok(()) };
    let seconds = common.seconds.round().max(1.0) as usize;
    let mut table = Table::new(Some(&theirs.name), ["ours", "peer"], &["its Rx path", "its Tx path"]);
    for cell in cells {
        let probe = Side::start(args, words, &folder, mode, cell, ("on-ours", &ours))?;
        let (paths, version) = (probe.paths.clone(), peer::version(&probe.log));
        probe.end();
        if cell.vectorized == "1" && !mode.path(&paths).contains("vectorized") {
            progress.skip();
            continue;
        }
        let name = cell.name(mode);
        // A driver anew for each run: where its memory happens to lie is worth 15 %.
        let one = |&(name, device): &(&str, &Device)| {
            let side = Side::start(args, words, &folder, mode, cell, (name, device))?;
            let run = side.measure(seconds);
            side.end();
            run
        };
        let pairs = Pairs::measure(common, progress, (&("on-ours", &ours), Some(&("on-peer", &theirs))), &name, one)?;
        let row = json!({
            "mode": mode.name(), "ring": cell.ring.name(), "mrg_rxbuf": cell.mrg_rxbuf == "1",
            "in_order": cell.in_order == "1", "vectorized": cell.vectorized == "1", "size": 64, "queue_size": queue_size,
            "unit": "Mpps", "driver": format!("DPDK {version} net_virtio_user"), "rx_path": paths[0], "tx_path": paths[1],
        });
        rows.push(table.add(name, row, &pairs, paths.to_vec()));
        common.save("driver", rows, false)?;
    }
    finished();
    println!(
        "DPDK's driver, {}, 64 B, Mpps that it counts, ring {queue_size}, {} runs of {seconds} s, median and min–max",
        mode.name(),
        common.pairs
    );
    println!("vec=1 where the driver has no vectorized function for it: left out, as it is the same as vec=0");
    table.print();
    Ok(())
}

/// The rates of a name in what testpmd prints; one that is not complete yet is not one.
fn rates(output: &str, name: &str) -> Vec<f64> {
    let rest = output.split(name).skip(1);
    rest.filter_map(|rest| rest.trim_start().split_once(char::is_whitespace)?.0.parse().ok()).collect()
}

/// The function that a driver's log says it uses.
fn path(log: &Path, way: &str) -> String {
    let said = fs::read_to_string(log).unwrap_or_default();
    let end = format!(" {way} path on port 0");
    let line = said.lines().rfind(|line| line.contains(&end)).unwrap_or_default();
    let path = line.split(&end).next().and_then(|line| line.rsplit("using ").next());
    path.unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_testpmd() {
        let said = "  Throughput (since last show)\n  Rx-pps:            0          Rx-bps:            0\n  \
                    Tx-pps:      6532032          Tx-bps:   3135375824\n  Rx-pps:      1525469          Rx-bps: 7\n  Rx-pps:   12";
        assert_eq!(rates(said, "Rx-pps:"), [0.0, 1525469.0], "the last one is not complete");
        assert_eq!(rates(said, "Tx-pps:"), [6532032.0]);
        assert_eq!(rates("", "Tx-pps:"), [0.0; 0]);
    }
}
