//! What all benches have in common: devices that are held still while another one is measured, runs of our driver against
//! them, pairs of such runs, and tables of those.

use crate::{
    blast::{Ring, features, write_json},
    child::{Folder, Program, ourselves},
    report::{Spread, table},
    traffic::{Settings, Totals, Traffic},
};
use ringroad_host::{
    pin_current_thread,
    vhost_user::{Connection, Connector},
};
use serde_json::{Value, json};
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

/// What every bench can be told.
#[derive(clap::Args)]
pub struct Common {
    /// Pairs of runs, one after the other in turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pairs: u32,
    /// Seconds of each run
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Features that the driver does without: in_order, mrg_rxbuf, event_idx, indirect
    #[arg(long, value_delimiter = ',', value_parser = ["in_order", "mrg_rxbuf", "event_idx", "indirect"])]
    pub without: Vec<String>,
    /// The CPU of the driver
    #[arg(long, default_value_t = 0)]
    pub driver_cpu: usize,
    /// The CPU of the device
    #[arg(long, default_value_t = 1)]
    pub device_cpu: usize,
    /// For how long our device leaves a queue alone whose driver is slower: auto, off, 8us (`workers.gather`)
    #[arg(long, default_value = "auto")]
    pub gather: String,
    /// How many full bursts our device carries from a queue before others have their turn (`workers.turn`)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub turn: u64,
    /// Write the rows as JSON to a file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The rings of a driver.
#[derive(Clone, Copy)]
pub struct Rings {
    /// How they are laid out.
    pub layout: Ring,
    /// Entries of each.
    pub size: u32,
}

/// A device that is being measured, or held still.
pub struct Device {
    /// What it is, with its version.
    pub name: String,
    /// Its ports.
    pub sockets: Vec<PathBuf>,
    /// Its processes; they end in this order.
    pub programs: Vec<Program>,
}

impl Device {
    /// Lets nothing of it run.
    pub fn hold(&self, still: bool) {
        self.programs.iter().for_each(|program| program.hold(still));
    }
}

impl Common {
    /// Does something on the driver's CPU, in a thread of its own: what is started by others does not inherit that.
    pub fn pinned<T: Send>(&self, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
        let cpu = self.driver_cpu;
        let pinned =
            || pin_current_thread(cpu).map_err(|error| format!("--driver-cpu {cpu}: {error}")).and_then(|()| work());
        thread::scope(|scope| scope.spawn(pinned).join().map_err(|_| "the driver's thread has ended".to_owned())?)
    }

    /// Our device with these ports, each given by what it says beside its name and socket. It is held still. `name` sets it
    /// apart from others of the folder.
    pub fn ours(&self, folder: &Folder, name: &str, poll: &str, ports: &[&str]) -> Result<Device, String> {
        let (config, log) = (folder.file(&format!("{name}.toml")), folder.file(&format!("{name}.log")));
        let Common { device_cpu, gather, turn, .. } = self;
        let mut text =
            format!("[workers]\ncpus = [{device_cpu}]\npoll = {poll}\ngather = \"{gather}\"\nturn = {turn}\n");
        let mut sockets = Vec::new();
        for (number, port) in ports.iter().enumerate() {
            let socket = folder.file(&format!("{name}-{number}.sock"));
            let path = socket.display();
            let _ = write!(
                text,
                "[[port]]\nname = \"p{number}\"\nkind = \"vhost-user\"\nsocket = \"{path}\"\nmtu = 65535\n{port}\n"
            );
            sockets.push(socket);
        }
        fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
        let mut command = ourselves()?;
        command.arg("serve").arg("-c").arg(&config).stdout(Stdio::null());
        let mut program = Program::start("our device", &mut command, &log)?;
        for socket in &sockets {
            program.wait_for(socket, Duration::from_secs(5), &log)?;
        }
        program.hold(true);
        Ok(Device { name: format!("ringroad {}", env!("CARGO_PKG_VERSION")), sockets, programs: vec![program] })
    }

    /// Connects our driver to a port.
    pub fn connect(&self, device: &Device, port: usize, rings: Rings, frame: usize) -> Result<Connection, String> {
        let connector = Connector {
            socket: device.sockets[port].clone(),
            listen: false,
            patience: Duration::from_secs(5),
            features: features(rings.layout, &self.without),
            queue_pairs: 1,
            queue_size: rings.size,
            frame: frame.max(1518),
            huge: true,
        };
        connector.connect().map_err(|error| format!("{}, {} {frame} B: {error}", device.name, rings.layout.name()))
    }

    /// One run against one port of a device, which is let go for it.
    pub fn run(&self, device: &Device, port: usize, rings: Rings, settings: &Settings) -> Result<Totals, String> {
        let frame = settings.sizes.iter().copied().max().unwrap_or(64);
        let failed = |what: &dyn std::fmt::Display| {
            format!("{}, {} {frame} B, ring {}: {what}", device.name, rings.layout.name(), rings.size)
        };
        device.hold(false);
        let totals = self.pinned(|| {
            let mut connection = self.connect(device, port, rings, frame)?;
            let mut traffic = Traffic::new(settings.clone(), &mut connection.driver);
            let mut run = |seconds: f64| {
                let totals = traffic.run(&mut connection, Duration::from_secs_f64(seconds), |_| {});
                totals.map_err(|error| failed(&error))
            };
            run(0.2)?;
            run(self.seconds)
        })?;
        device.hold(true);
        match totals.received {
            0 => Err(failed(&"no frame came back")),
            _ => Ok(totals),
        }
    }

    /// How long a cache line takes between the CPUs of driver and device, and back, in nanoseconds.
    pub fn line(&self) -> Result<f64, String> {
        super::line_round_trip([self.driver_cpu, self.device_cpu])
    }

    /// Writes all rows so far to the file that was asked for. To be called after each cell: a long run that fails late has
    /// not been for nothing. Standard output gets them when it is the `last` call.
    pub fn save(&self, bench: &str, rows: &[Value], last: bool) -> Result<(), String> {
        match &self.json {
            Some(file) if last || file != Path::new("-") => {
                write_json(file, &json!({ "bench": bench, "machine": super::machine(), "rows": rows }))
            }
            _ => Ok(()),
        }
    }
}

/// What one run gave.
#[derive(Clone, Copy)]
pub struct Run {
    /// Millions of frames per second.
    pub mpps: f64,
    /// Empty rounds of the driver in percent, if it is ours.
    pub idle: Option<f64>,
}

impl From<Totals> for Run {
    fn from(totals: Totals) -> Run {
        Run { mpps: totals.received_mpps(), idle: Some(totals.idle()) }
    }
}

/// Figures of our device and of its peer, measured in turn.
#[derive(Default)]
pub struct Pairs {
    ours: Vec<Run>,
    peer: Vec<Run>,
    lines: Vec<f64>,
    discarded: usize,
    unsteady: usize,
}

/// How far the line may change within a pair: the largest of its round trips, divided by the smallest.
const STEADY: f64 = 1.5;

impl Pairs {
    /// Measures both, as often as was asked for, and the line round trip before and after each run. A pair in which that
    /// changes is thrown away and measured again; after twice as many extra attempts as there are pairs, and five, it takes
    /// what comes.
    pub fn measure<D>(
        common: &Common,
        progress: &mut Progress,
        (ours, peer): (&D, Option<&D>),
        what: &str,
        one: impl Fn(&D) -> Result<Run, String>,
    ) -> Result<Pairs, String> {
        let wanted = common.pairs as usize;
        let mut pairs = Pairs::default();
        while pairs.ours.len() < wanted {
            progress.say(what, pairs.ours.len(), wanted);
            let mut lines = vec![common.line()?];
            let first = one(ours)?;
            lines.push(common.line()?);
            let second = match peer {
                Some(peer) => Some(one(peer)?),
                None => None,
            };
            if peer.is_some() {
                lines.push(common.line()?);
            }
            if !steady(&lines) {
                if pairs.discarded < 2 * wanted + 5 {
                    pairs.discarded += 1;
                    continue;
                }
                pairs.unsteady += 1;
            }
            pairs.ours.push(first);
            pairs.peer.extend(second);
            pairs.lines.extend(lines);
        }
        progress.done += 1;
        Ok(pairs)
    }

    /// Millions of frames per second of our device.
    pub fn rate(&self) -> Spread {
        rates(&self.ours)
    }

    /// Empty rounds of the driver in percent, for a table: with our device, and with the peer's.
    pub fn idle(&self) -> Vec<String> {
        [&self.ours, &self.peer].into_iter().filter_map(|runs| Some(format!("{:.0}", idle(runs)?.median))).collect()
    }
}

fn steady(lines: &[f64]) -> bool {
    let spread = Spread::of(lines);
    spread.max <= STEADY * spread.min
}

fn rates(runs: &[Run]) -> Spread {
    Spread::of(&runs.iter().map(|run| run.mpps).collect::<Vec<_>>())
}

fn idle(runs: &[Run]) -> Option<Spread> {
    let idle: Vec<f64> = runs.iter().filter_map(|run| run.idle).collect();
    (!idle.is_empty()).then(|| Spread::of(&idle))
}

/// A table of pairs, a cell of a bench in each line.
pub struct Table {
    peer: Option<String>,
    names: [&'static str; 2],
    more: &'static [&'static str],
    lines: Vec<Vec<String>>,
    discarded: usize,
    unsteady: usize,
}

impl Table {
    /// An empty one. `names` are those of the two that are compared, `more` those of further columns.
    pub fn new(peer: Option<&str>, names: [&'static str; 2], more: &'static [&'static str]) -> Table {
        Table { peer: peer.map(str::to_owned), names, more, lines: Vec::new(), discarded: 0, unsteady: 0 }
    }

    /// Adds a cell; returns its row for programs, which is `row` with what came out.
    pub fn add(&mut self, name: String, mut row: Value, pairs: &Pairs, more: Vec<String>) -> Value {
        let (ours, theirs, line) = (rates(&pairs.ours), rates(&pairs.peer), Spread::of(&pairs.lines));
        let mut columns = vec![name];
        columns.extend(ours.columns(2));
        spread(&mut row, ["ours", "ours_min", "ours_max"], ours);
        if let Some(peer) = &self.peer {
            let ratios: Vec<f64> =
                pairs.ours.iter().zip(&pairs.peer).map(|(ours, peer)| ours.mpps / peer.mpps).collect();
            let ratio = Spread::of(&ratios);
            row["peer_name"] = json!(peer);
            spread(&mut row, ["peer", "peer_min", "peer_max"], theirs);
            spread(&mut row, ["ratio", "min", "max"], ratio);
            columns.extend(theirs.columns(2));
            columns.extend(ratio.columns(2));
        }
        spread(&mut row, ["line_ns", "line_ns_min", "line_ns_max"], line);
        columns.extend(line.columns(0));
        for (key, runs) in [("driver_idle", &pairs.ours), ("peer_driver_idle", &pairs.peer)] {
            if let Some(idle) = idle(runs) {
                row[key] = json!(idle.median);
            }
        }
        row["pairs"] = json!(pairs.ours.len());
        row["discarded"] = json!(pairs.discarded);
        row["unsteady"] = json!(pairs.unsteady);
        self.discarded += pairs.discarded;
        self.unsteady += pairs.unsteady;
        columns.extend(more);
        self.lines.push(columns);
        row
    }

    /// Prints it.
    pub fn print(&self) {
        let mut header = vec!["", self.names[0], ""];
        if let Some(name) = &self.peer {
            println!("{}: {name}", self.names[1]);
            header.extend([self.names[1], "", "ratio", ""]);
        }
        header.extend(["line, ns", ""]);
        header.extend(self.more);
        print!("{}", table(&header, &self.lines));
        println!("{}", super::LINE);
        println!(
            "{} pairs thrown away and measured again, as the line changed by more than {STEADY} within them; {} taken although it did\n",
            self.discarded, self.unsteady
        );
    }
}

fn spread(row: &mut Value, keys: [&str; 3], spread: Spread) {
    for (key, figure) in keys.into_iter().zip([spread.median, spread.min, spread.max]) {
        row[key] = json!(figure);
    }
}

/// How far a bench has come.
pub struct Progress {
    start: Instant,
    cells: usize,
    done: usize,
}

impl Progress {
    /// Of so many cells.
    pub fn new(cells: usize) -> Progress {
        Progress { start: Instant::now(), cells, done: 0 }
    }

    /// A cell of them is left out.
    pub fn skip(&mut self) {
        self.cells -= 1;
    }

    /// Says which cell is being measured, how many pairs of it there are, and how long the rest may take.
    fn say(&self, what: &str, pairs: usize, wanted: usize) {
        let done = self.done as f64 + pairs as f64 / wanted as f64;
        let left = self.start.elapsed().as_secs_f64() * (self.cells as f64 - done) / done;
        let left = match left {
            left if done == 0.0 || left.is_nan() => String::new(),
            left if left < 90.0 => format!(", {left:.0} s left"),
            left => format!(", {:.0} min left", left / 60.0),
        };
        let (cell, pair) = (self.done + 1, pairs + 1);
        progress(&format!("{what}, cell {cell}/{}, pair {pair}/{wanted}{left}", self.cells));
    }
}

/// Says what is being measured, over what was said before.
pub fn progress(what: &str) {
    eprint!("\r{what:79}");
}

/// Nothing is being measured any more.
pub fn finished() {
    eprint!("\r{:79}\r", "");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_steady_while_its_line_is() {
        assert!(steady(&[100.0, 149.0, 120.0]) && steady(&[480.0]));
        assert!(!steady(&[100.0, 151.0, 120.0]) && !steady(&[500.0, 110.0]));
    }

    #[test]
    fn rows_say_what_was_thrown_away() {
        let run = |mpps| Run { mpps, idle: Some(10.0) };
        let pairs = Pairs {
            ours: vec![run(4.0), run(6.0), run(9.0)],
            peer: vec![run(2.0), run(2.0), run(3.0)],
            lines: vec![100.0; 9],
            discarded: 4,
            unsteady: 1,
        };
        let mut table = Table::new(Some("other"), ["ours", "peer"], &[]);
        let row = table.add("cell".into(), json!({ "ring": "split" }), &pairs, Vec::new());
        for (key, value) in [("ours", 6.0), ("peer", 2.0), ("ratio", 3.0), ("min", 2.0), ("driver_idle", 10.0)] {
            assert_eq!(row[key].as_f64(), Some(value), "{key}");
        }
        assert_eq!((&row["discarded"], &row["unsteady"], &row["pairs"]), (&json!(4), &json!(1), &json!(3)));
        assert_eq!(row["peer_name"], "other");
    }
}
