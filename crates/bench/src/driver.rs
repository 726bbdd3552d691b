//! DPDK's driver (testpmd, net_virtio_user) on our device, against the same driver on DPDK's device (net_vhost). One core for the
//! driver, one for the device; the driver's own figures count.

use crate::{
    options::{Common, Layouts},
    peer::{self, Peer, Peers},
    rig::Device,
    session::{Session, Table},
    testpmd::{Options, Testpmd},
};
use ringroad_traffic::{
    child::Folder,
    options::{Ring, name},
};
use serde_json::json;
use std::fs;

#[derive(Debug, clap::Args)]
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
    /// Frames that the driver sends or receives at once
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u8).range(1..))]
    burst: u8,
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

    /// Returns how the work of both devices differs, for the table.
    fn note(self) -> &'static str {
        match self {
            Mode::Flowgen => "both devices swap the MAC addresses of each frame",
            Mode::Txonly => {
                "different work: our device takes frames and returns them unread, DPDK's copies each into an mbuf"
            }
            Mode::Rxonly => {
                "different work: our device copies frames of one prepared burst, DPDK's builds each packet in an mbuf"
            }
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
        let options = Options {
            words,
            cpu: common.driver_cpu,
            mode: &mode_name,
            ring: cell.ring,
            queue_size: *queue_size,
            size: 64,
            burst: args.burst,
            mrg_rxbuf: cell.mrg_rxbuf == "1",
            in_order: cell.in_order == "1",
            vectorized: cell.vectorized == "1",
        };
        let first = Testpmd::start(&options, &folder, ("on-ours", &ours))?;
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
        let one = |&(title, device): &(&str, &Device)| {
            Testpmd::start(&options, &folder, (title, device))?.measure_once(seconds)
        };
        let pairs = session.rounds(&name, &[("on-ours", &ours), ("on-peer", &theirs)], one)?;
        session.push(table.add(&name, row, &pairs, paths))?;
    }
    let title = format!(
        "DPDK's driver, {mode_name}, 64 B, Mpps as it counts them, ring {queue_size}, {} runs of {seconds} s, median and min–max\n\
         {}\n\
         vec=1 is SKIPPED if the driver has no vectorized function for the case: it is the same as vec=0",
        common.pairs,
        mode.note()
    );
    session.print(&title, &table.text());
    Ok(())
}
