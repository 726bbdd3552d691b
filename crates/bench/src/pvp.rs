//! PvP: a driver sends frames to one port, the device swaps their MAC addresses and sends them back. One core for the driver, one
//! for the device. Several drivers run on our device and on the peer's in turn, since a driver can favour one device; what counts
//! is each device with the driver that is best for it.

use crate::{
    figures::{Spread, extend},
    options::Common,
    peer::Peers,
    rig::{Device, Rings},
    session::{Rounds, Run, Session, Table, common_range},
    testpmd::{self, Testpmd},
};
use ringroad_net::Features;
use ringroad_traffic::{
    self as traffic, Plain, Settings, Traffic,
    child::Folder,
    options::{Ring, name},
};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ring layouts, as a list [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes in bytes, without FCS, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    /// Whether the driver touches the payload
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["touch"])]
    touch: Vec<Touch>,
    /// Short for --touch notouch
    #[arg(long, conflicts_with = "touch")]
    no_touch: bool,
    /// Numbers of entries of each ring, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [256],
          value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: Vec<u32>,
    /// Drivers, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["blast", "blast-no-read", "plain", "testpmd", "testpmd64"])]
    driver: Vec<Driver>,
    /// The whole matrix: both layouts, six sizes from 64 to 1518, touch and notouch, rings of 256 and 1024
    #[arg(long, conflicts_with_all = ["ring", "size", "touch", "no_touch", "queue_size"])]
    all: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peers: Peers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Driver {
    /// `ringroad blast`
    Blast,
    /// `ringroad blast --no-read`, which writes frames and does not read those received, as flowgen does; not with notouch
    BlastNoRead,
    /// `ringroad blast --driver plain`: simple, with ring code of its own
    Plain,
    /// DPDK's: testpmd with net_virtio_user in flowgen mode, which builds each frame; not with notouch
    Testpmd,
    /// The same with bursts of 64 instead of 32
    Testpmd64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Touch {
    /// Write 4 bytes of each frame sent, read 4 bytes of each frame received
    Touch,
    /// Leave it alone: measures the rings
    Notouch,
}

impl Driver {
    /// Returns whether it reads what it receives, with touch.
    fn reads(self) -> bool {
        matches!(self, Driver::Blast | Driver::Plain)
    }
}

/// One combination of options.
struct Cell {
    rings: Rings,
    size: usize,
    touch: Touch,
}

impl Cell {
    /// Returns its name in tables, which leaves defaults out.
    fn name(&self) -> String {
        let notouch = if self.touch == Touch::Notouch { " notouch" } else { "" };
        let ring = if self.rings.size == 256 { String::new() } else { format!(" ring {}", self.rings.size) };
        format!("{} {}{notouch}{ring}", self.rings.layout, self.size)
    }

    fn row(&self) -> Value {
        json!({
            "ring": self.rings.layout.to_string(), "size": self.size, "touch": self.touch == Touch::Touch,
            "queue_size": self.rings.size, "unit": "Mpps",
        })
    }

    fn settings(&self, driver: Driver) -> Settings {
        let touch = match self.touch {
            Touch::Notouch => traffic::Touch::Nothing,
            Touch::Touch if driver == Driver::BlastNoRead => traffic::Touch::Sent,
            Touch::Touch => traffic::Touch::Word,
        };
        Settings { touch, ..Settings::flood(self.size) }
    }
}

impl Args {
    /// Returns all combinations of the options.
    fn cells(&self) -> Vec<Cell> {
        let (mut layouts, mut sizes) = (self.ring.clone(), self.size.clone());
        let (mut touches, mut queue_sizes) = (self.touch.clone(), self.queue_size.clone());
        if self.no_touch {
            touches = vec![Touch::Notouch];
        }
        if self.all {
            (layouts, sizes) = (vec![Ring::Split, Ring::Packed], vec![64, 128, 256, 512, 1024, 1518]);
            (touches, queue_sizes) = (vec![Touch::Touch, Touch::Notouch], vec![256, 1024]);
        }
        let mut cells = Vec::new();
        for &layout in &layouts {
            for &queue_size in &queue_sizes {
                for &touch in &touches {
                    let rings = Rings { layout, size: queue_size };
                    cells.extend(sizes.iter().map(|&size| Cell { rings, size: size as usize, touch }));
                }
            }
        }
        cells
    }
}

/// One driver on one device.
struct Variant<'a> {
    driver: Driver,
    device: &'a Device,
    /// Distinguishes its files.
    title: &'static str,
    /// The feature bits that the driver negotiated with the device in its last run.
    acked: AtomicU64,
}

/// What was measured with one driver.
struct Measured<'a> {
    driver: Driver,
    title: String,
    variants: Vec<Variant<'a>>,
    rounds: Rounds<Run>,
}

/// How often drivers are measured again if their cache-line round trips differ.
const PASSES: usize = 8;

/// What all cells of a peer share.
struct Bench<'a> {
    common: &'a Common,
    folder: &'a Folder,
    /// Our device, and the peer's if there is one.
    devices: Vec<(&'static str, &'a Device)>,
    /// Words of the testpmd command.
    words: Option<Vec<String>>,
}

impl Bench<'_> {
    /// Does one run of one of our drivers.
    fn run(&self, cell: &Cell, variant: &Variant<'_>) -> Result<Run, String> {
        let Bench { common, .. } = self;
        let (settings, frame) = (cell.settings(variant.driver), cell.size);
        let what = format!("{} {frame} B, ring {}", cell.rings.layout, cell.rings.size);
        let connect = || {
            let connection = common.connect(variant.device, 0, cell.rings, frame)?;
            variant.acked.store(connection.acked, Ordering::Relaxed);
            Ok::<_, String>(connection)
        };
        if variant.driver == Driver::Plain {
            let start = || {
                let mut plain =
                    Plain::new(connect()?, settings).ok_or("--driver plain needs a --queue-size above 32")?;
                Ok(move |time| plain.run(time, |_| {}))
            };
            return common.measure(variant.device, &what, start).map(Run::from);
        }
        let start = || {
            let mut connection = connect()?;
            let mut traffic = Traffic::new(settings, &mut connection.driver);
            Ok(move |time| traffic.run(&mut connection, time, |_| {}))
        };
        common.measure(variant.device, &what, start).map(Run::from)
    }

    /// Measures one driver on the devices in turn.
    fn pairs(
        &self,
        session: &mut Session<'_>,
        title: &str,
        cell: &Cell,
        variants: &[Variant<'_>],
    ) -> Result<Rounds<Run>, String> {
        let burst = match variants.first().map(|variant| variant.driver) {
            Some(Driver::Testpmd) => 32,
            Some(Driver::Testpmd64) => 64,
            _ => return session.rounds(title, variants, |variant| self.run(cell, variant)),
        };
        let options = testpmd::Options {
            words: self.words.as_deref().unwrap_or_default(),
            cpu: self.common.driver_cpu,
            mode: "flowgen",
            ring: cell.rings.layout,
            queue_size: cell.rings.size,
            size: cell.size,
            burst,
            mrg_rxbuf: false,
            in_order: true,
            vectorized: true,
        };
        let seconds = self.common.seconds.round().max(1.0) as usize;
        session.rounds(title, variants, |variant| {
            let driver = Testpmd::start(&options, self.folder, (variant.title, variant.device))?;
            variant.acked.store(driver.features(), Ordering::Relaxed);
            driver.measure_once(seconds)
        })
    }

    /// Measures a cell with all drivers, one after the other, and adds a line for each and one for the best to the table.
    fn measure(
        &self,
        session: &mut Session<'_>,
        table: &mut Table,
        drivers: &[Driver],
        cell: &Cell,
    ) -> Result<(), String> {
        let mut all = Vec::new();
        for &driver in drivers {
            if !self.is_possible(driver, cell) {
                session.leave_out();
                continue;
            }
            let variant = |&(title, device)| Variant { driver, device, title, acked: AtomicU64::new(0) };
            let variants: Vec<_> = self.devices.iter().map(variant).collect();
            let title = format!("{} {}", cell.name(), name(&driver));
            let rounds = self.pairs(session, &title, cell, &variants)?;
            all.push(Measured { driver, title, variants, rounds });
        }
        self.make_comparable(session, cell, &mut all)?;
        for Measured { driver, title, variants, rounds } in &all {
            let acked =
                |variant: Option<&Variant<'_>>| variant.map_or(0, |variant| variant.acked.load(Ordering::Relaxed));
            let [bits, peer_bits] = [variants.first(), variants.last()].map(acked);
            let mut row = cell.row();
            extend(&mut row, json!({ "driver": name(driver), "features": features(bits) }));
            if variants.len() > 1 {
                extend(&mut row, json!({ "peer_features": features(peer_bits) }));
            }
            let difference = if bits == peer_bits { String::new() } else { different(bits, peer_bits) };
            session.push(table.add(title, row, rounds, [difference]))?;
        }
        self.compare_best(session, table, cell, "best", all.iter())?;
        if all.iter().any(|measured| !measured.driver.reads()) {
            let reading = all.iter().filter(|measured| measured.driver.reads());
            self.compare_best(session, table, cell, "best reading", reading)?;
        }
        self.devices.iter().try_for_each(|(_, device)| self.verify(device, cell))
    }

    /// Adds a line for each device with the best of these drivers for it.
    fn compare_best<'m>(
        &self,
        session: &mut Session<'_>,
        table: &mut Table,
        cell: &Cell,
        title: &str,
        drivers: impl Iterator<Item = &'m Measured<'m>> + Clone,
    ) -> Result<(), String> {
        let last = self.devices.len() - 1;
        let best = |device: usize| {
            let median = |measured: &Measured<'_>| Spread::of(&measured.rounds.rates(device)).median;
            drivers.clone().max_by(|a, b| median(a).total_cmp(&median(b)))
        };
        let (Some(ours), Some(peer)) = (best(0), best(last)) else { return Ok(()) };
        let mut row = cell.row();
        let mut both = name(&ours.driver);
        extend(&mut row, json!({ "driver": title, "ours_driver": both }));
        if last > 0 {
            extend(&mut row, json!({ "peer_driver": name(&peer.driver) }));
            both = format!("{both}, {}", name(&peer.driver));
        }
        let pairs = ours.rounds.beside(&peer.rounds, last);
        session.push(table.add(&format!("{} {title}", cell.name()), row, &pairs, [both]))
    }

    /// Measures drivers again until each has enough pairs in one range of cache-line round trips, and leaves those.
    fn make_comparable(&self, session: &mut Session<'_>, cell: &Cell, all: &mut [Measured<'_>]) -> Result<(), String> {
        let wanted = self.common.pairs as usize;
        for _ in 0..PASSES {
            let lines: Vec<_> = all.iter().map(|driver| driver.rounds.medians()).collect();
            let (range, count) = common_range(&lines);
            if count >= wanted {
                all.iter_mut().for_each(|driver| driver.rounds = driver.rounds.within(&range));
                return Ok(());
            }
            for driver in all.iter_mut().filter(|driver| driver.rounds.within(&range).medians().len() < wanted) {
                let title = format!("{} again", driver.title);
                let later = self.pairs(session, &title, cell, &driver.variants)?;
                session.repeated();
                driver.rounds.append(later);
            }
        }
        println!("{}: in no range of cache-line round trips {wanted} pairs of each driver", cell.name());
        Ok(())
    }

    /// Returns whether a driver can do the work of a cell.
    fn is_possible(&self, driver: Driver, cell: &Cell) -> bool {
        match driver {
            Driver::Testpmd | Driver::Testpmd64 => self.words.is_some() && cell.touch == Touch::Touch,
            Driver::BlastNoRead => cell.touch == Touch::Touch,
            Driver::Blast | Driver::Plain => true,
        }
    }

    /// Sends frames for a short time and checks every byte of those that return.
    fn verify(&self, device: &Device, cell: &Cell) -> Result<(), String> {
        let settings = Settings { touch: traffic::Touch::All, window: Some(128), ..cell.settings(Driver::Blast) };
        let common = Common { seconds: 0.05, ..self.common.clone() };
        let totals = common.run(device, 0, cell.rings, &settings)?;
        match totals.errors {
            0 => Ok(()),
            errors => Err(format!("{}, {}: {errors} of {} frames damaged", device.name, cell.name(), totals.received)),
        }
    }
}

/// Returns the names of feature bits, or their numbers.
fn features(bits: u64) -> Vec<String> {
    let known = Features::from_bits_truncate(bits);
    let unknown = (0..64).filter(|bit| bits & !known.bits() & 1 << bit != 0).map(|bit| format!("bit {bit}"));
    known.iter_names().map(|(name, _)| name.to_lowercase()).chain(unknown).collect()
}

/// Describes how negotiated features differ.
fn different(ours: u64, peer: u64) -> String {
    let only = |bits: u64, other: u64| features(bits & !other).join(" ");
    let parts = [("ours", only(ours, peer)), ("peer", only(peer, ours))];
    let parts = parts.iter().filter(|(_, names)| !names.is_empty());
    parts.map(|(side, names)| format!("{side} +{names}")).collect::<Vec<_>>().join(", ")
}

/// Measures every combination with each peer.
pub fn run(args: &Args) -> Result<(), String> {
    let Args { common, peers, driver: drivers, .. } = args;
    let found = peers.found()?;
    let cells = args.cells();
    let folder = Folder::new("pvp")?;
    let ours = common.ours(&folder, "ours", "unlimited", &["mode = \"reflect\""])?;
    let title = format!(
        "PvP, Mpps each way through one device core, touch and ring 256 unless stated otherwise, {}\n\
         best: each device with the driver that is best for it (ours, peer's), all drivers at similar cache-line round trips; \
         best reading: of those that read what they receive",
        common.runs()
    );
    let mut session = Session::new("pvp", common, found.len() * cells.len() * drivers.len(), true);
    session.without_missing(&found)?;
    for peer in &found {
        let device = peer.start(common, &folder, 1, "macswap")?;
        let devices = [("on-ours", &ours)].into_iter().chain(device.iter().map(|peer| ("on-peer", peer))).collect();
        let bench = Bench { common, folder: &folder, devices, words: peers.driver(peer) };
        let mut table =
            Table::new(device.as_ref().map(|peer| peer.name.as_str()), ["ours", "peer"], &["driver, features"]);
        for cell in &cells {
            bench.measure(&mut session, &mut table, drivers, cell)?;
        }
        session.print(&title, &table.text());
    }
    session.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{parse, try_parse};

    fn names(line: &str) -> Vec<String> {
        parse::<Args>(line).cells().iter().map(Cell::name).collect()
    }

    #[test]
    fn cells() {
        assert_eq!(names("--ring packed"), ["packed 64", "packed 256", "packed 1518"]);
        assert_eq!(names("--ring split --size 64 --no-touch"), ["split 64 notouch"]);
        assert_eq!(
            names("--ring split --size 64 --touch touch,notouch --queue-size 256,1024"),
            ["split 64", "split 64 notouch", "split 64 ring 1024", "split 64 notouch ring 1024"]
        );
        assert_eq!(names("--all").len(), 2 * 6 * 2 * 2);
        assert!(try_parse::<Args>("--all --size 64").is_err());
        assert!(try_parse::<Args>("--no-touch --touch touch").is_err());
    }
}
