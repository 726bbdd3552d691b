//! DPDK's driver (testpmd, net_virtio_user) on our device, against the same driver on DPDK's device (net_vhost). One core for the
//! driver, one for the device; the driver's own figures count.

use crate::{
    options::{Common, Layouts},
    peer::{self, Peer, Peers},
    rig::Device,
    session::{Run, Session, Table},
};
use ringroad_traffic::{
    child::{Folder, Program},
    options::{Ring, name},
};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

#[derive(clap::Args)]
pub struct Args {
    /// What the driver does, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["flowgen", "txonly", "rxonly"])]
    mode: Vec<Mode>,
    #[command(flatten)]
    layouts: Layouts,
    /// Without and with VIRTIO_NET_F_MRG_RXBUF
    #[arg(long, value_delimiter = ',', default_values = ["0", "1"], value_parser = ["0", "1"])]
    mrg_rxbuf: Vec<String>,
    /// Without and with VIRTIO_F_IN_ORDER
    #[arg(long, value_delimiter = ',', default_values = ["0", "1"], value_parser = ["0", "1"])]
    in_order: Vec<String>,
    /// Without and with its vectorized functions, if it has any for the case
    #[arg(long, value_delimiter = ',', default_values = ["0", "1"], value_parser = ["0", "1"])]
    vectorized: Vec<String>,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peers: Peers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// Send frames that the device reflects
    Flowgen,
    /// Send frames that the device drops
    Txonly,
    /// Receive frames that the device generates
    Rxonly,
}

impl Mode {
    /// Returns the configuration line of our device, and the forwarding mode of DPDK's.
    fn devices(self) -> (&'static str, &'static str) {
        match self {
            Mode::Flowgen => ("mode = \"reflect\"", "macswap"),
            Mode::Txonly => ("mode = \"drop\"", "rxonly"),
            Mode::Rxonly => ("mode = \"generate\"", "txonly"),
        }
    }

    /// Returns those of the driver's functions (receive, transmit) that do the work.
    fn path(self, [rx, tx]: &[String; 2]) -> String {
        match self {
            Mode::Flowgen => format!("{rx} {tx}"),
            Mode::Txonly => tx.clone(),
            Mode::Rxonly => rx.clone(),
        }
    }

    /// Returns the name of the driver's rate that counts.
    fn rate(self) -> &'static str {
        if self == Mode::Txonly { "Tx-pps:" } else { "Rx-pps:" }
    }
}

impl Args {
    /// Returns all combinations of the options, modes apart.
    fn cells(&self) -> Vec<Cell<'_>> {
        let mut cells = Vec::new();
        for &ring in &self.layouts.ring {
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

/// One combination of options, for one mode.
struct Cell<'a> {
    ring: Ring,
    mrg_rxbuf: &'a str,
    in_order: &'a str,
    vectorized: &'a str,
}

impl Cell<'_> {
    fn name(&self, mode: Mode) -> String {
        let Cell { ring, mrg_rxbuf, in_order, vectorized } = self;
        format!("{} {ring} mrg={mrg_rxbuf} in_order={in_order} vec={vectorized}", name(&mode))
    }

    /// Returns why the driver has chosen no vectorized function.
    fn not_vectorized(&self) -> &'static str {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let has = |flag: &str| cpuinfo.split_whitespace().any(|word| word == flag);
        match self.ring {
            Ring::Packed if self.in_order == "1" && !(has("avx512f") && has("avx512bw")) => {
                "the driver's vectorized functions for packed rings need AVX-512, which this CPU does not have"
            }
            _ => "the driver has no vectorized function for this case",
        }
    }
}

/// A driver on a device. Both only run while they are measured.
struct Side<'a> {
    driver: Program,
    device: &'a Device,
    /// The driver's output: its rates, every second.
    output: PathBuf,
    log: PathBuf,
    rate: &'static str,
    /// The functions that it has chosen for receiving and sending.
    paths: [String; 2],
}

impl<'a> Side<'a> {
    /// Starts a driver on a device and waits until it has chosen its functions.
    fn start(
        args: &Args,
        words: &[String],
        folder: &Folder,
        mode: Mode,
        cell: &Cell<'_>,
        (title, device): (&str, &'a Device),
    ) -> Result<Side<'a>, String> {
        let (log, output) = (folder.file(&format!("{title}.log")), folder.file(&format!("{title}.out")));
        let stdout = fs::File::create(&output).map_err(|error| format!("{}: {error}", output.display()))?;
        let packed = u8::from(cell.ring == Ring::Packed);
        let queue_size = args.layouts.queue_size;
        let vdev = format!(
            "net_virtio_user0,path={},queues=1,queue_size={queue_size},packed_vq={packed},mrg_rxbuf={},in_order={},vectorized={}",
            device.socket(0)?.display(),
            cell.mrg_rxbuf,
            cell.in_order,
            cell.vectorized
        );
        let mut command = peer::testpmd(words, args.common.driver_cpu, title);
        command
            .args(["--single-file-segments", "--force-max-simd-bitwidth=512"])
            .args(["--log-level=pmd.net.virtio.init:debug", "--vdev", &vdev])
            .args(["--", "--nb-cores=1", &format!("--forward-mode={}", name(&mode)), "--txpkts=64", "--auto-start"])
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

    /// Ends the driver, and stops the device when it has noticed.
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

    /// Measures the driver's mean rate for a number of seconds. Its first figure includes the time when it was stopped, and does
    /// not count.
    fn measure(&self, seconds: usize) -> Result<Run, String> {
        let before = self.rates().len() + 1;
        self.hold(false);
        let rates = self.wait(before + seconds)?;
        self.hold(true);
        let rates = rates.get(before..).unwrap_or_default();
        let mpps = rates.iter().sum::<f64>() / rates.len() as f64 / 1e6;
        match mpps {
            0.0 => Err(format!("testpmd on {}: no frames", self.device.name)),
            mpps => Ok(Run { mpps, idle: None }),
        }
    }

    /// Returns the rates that the driver has printed so far, in frames per second.
    fn rates(&self) -> Vec<f64> {
        rates(&fs::read_to_string(&self.output).unwrap_or_default(), self.rate)
    }

    /// Waits until it has printed this number of rates.
    fn wait(&self, count: usize) -> Result<Vec<f64>, String> {
        let (start, missing) = (Instant::now(), count.saturating_sub(self.rates().len()));
        loop {
            let rates = self.rates();
            if rates.len() >= count {
                return Ok(rates);
            }
            if start.elapsed() > Duration::from_secs(15 + 2 * missing as u64) {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                return Err(format!("testpmd on {} printed too few rates:\n{log}", self.device.name));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        // The driver asks it to stop its queues when it ends.
        self.device.hold(false);
    }
}

/// Measures every combination with each peer.
pub fn run(args: &Args) -> Result<(), String> {
    let (peers, cells) = (args.peers.found()?, args.cells());
    let mut session = Session::new("driver", &args.common, peers.len() * args.mode.len() * cells.len(), true);
    for peer in &peers {
        for &mode in &args.mode {
            measure(args, peer, mode, &cells, &mut session)?;
        }
    }
    session.finish()
}

/// Measures one mode with one peer.
fn measure(args: &Args, peer: &Peer, mode: Mode, cells: &[Cell<'_>], session: &mut Session<'_>) -> Result<(), String> {
    let Args { common, layouts: Layouts { queue_size, .. }, .. } = args;
    let Peer::Testpmd(words) = peer else { return Err("bench driver needs DPDK: --peer dpdk or forky".into()) };
    let mode_name = name(&mode);
    let folder = Folder::new(&format!("driver-{mode_name}"))?;
    let (line, forward) = mode.devices();
    let ours = common.ours(&folder, "ours", "unlimited", &[line])?;
    let theirs = peer.start(common, &folder, 1, forward)?.ok_or("bench driver needs DPDK")?;
    let seconds = common.seconds.round().max(1.0) as usize;
    let mut table = Table::new(Some(&theirs.name), ["ours", "peer"], &["its Rx path", "its Tx path"]);
    for cell in cells {
        let first = Side::start(args, words, &folder, mode, cell, ("on-ours", &ours))?;
        let (paths, version) = (first.paths.clone(), peer::version(&first.log));
        first.end();
        let name = cell.name(mode);
        let [rx_path, tx_path] = &paths;
        let row = json!({
            "mode": mode_name, "ring": cell.ring.to_string(), "mrg_rxbuf": cell.mrg_rxbuf == "1",
            "in_order": cell.in_order == "1", "vectorized": cell.vectorized == "1", "size": 64, "queue_size": queue_size,
            "unit": "Mpps", "driver": format!("DPDK {version} net_virtio_user"), "rx_path": rx_path, "tx_path": tx_path,
        });
        if cell.vectorized == "1" && !mode.path(&paths).contains("vectorized") {
            session.skip(&name, row, cell.not_vectorized())?;
            continue;
        }
        // A new driver for each run: where its memory happens to be makes a difference of 15 %.
        let one = |&(title, device): &(&str, &Device)| {
            let side = Side::start(args, words, &folder, mode, cell, (title, device))?;
            let run = side.measure(seconds);
            side.end();
            run
        };
        let pairs = session.rounds(&name, &[("on-ours", &ours), ("on-peer", &theirs)], one)?;
        session.push(table.add(&name, row, &pairs, paths))?;
    }
    let title = format!(
        "DPDK's driver, {mode_name}, 64 B, Mpps as it counts them, ring {queue_size}, {} runs of {seconds} s, median and min–max\n\
         vec=1 is SKIPPED if the driver has no vectorized function for the case: it is the same as vec=0",
        common.pairs
    );
    session.print(&title, &table.text());
    Ok(())
}

/// Returns the rates with this name in testpmd's output, without one that is not complete yet.
fn rates(output: &str, name: &str) -> Vec<f64> {
    let rest = output.split(name).skip(1);
    rest.filter_map(|rest| rest.trim_start().split_once(char::is_whitespace)?.0.parse().ok()).collect()
}

/// Returns the function that a driver uses, from its log.
fn path(log: &Path, way: &str) -> String {
    let log = fs::read_to_string(log).unwrap_or_default();
    let end = format!(" {way} path on port 0");
    let line = log.lines().rfind(|line| line.contains(&end)).unwrap_or_default();
    let path = line.split(&end).next().and_then(|line| line.rsplit("using ").next());
    path.unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_testpmd() {
        let output = "  Throughput (since last show)\n  Rx-pps:            0          Rx-bps:            0\n  \
                    Tx-pps:      6532032          Tx-bps:   3135375824\n  Rx-pps:      1525469          Rx-bps: 7\n  Rx-pps:   12";
        assert_eq!(rates(output, "Rx-pps:"), [0.0, 1525469.0], "the last one is incomplete");
        assert_eq!(rates(output, "Tx-pps:"), [6532032.0]);
        assert_eq!(rates("", "Tx-pps:"), [0.0; 0]);
    }
}
