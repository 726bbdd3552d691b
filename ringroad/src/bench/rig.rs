//! What all benches have in common: devices that are held still while another one is measured, and runs of our driver
//! against them.

use crate::{
    blast::{Ring, features},
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
    process::{Command, Stdio},
    time::Duration,
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
    /// Entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    pub queue_size: u32,
    /// Features that the driver does without: in_order, mrg_rxbuf, event_idx, indirect
    #[arg(long, value_delimiter = ',', value_parser = ["in_order", "mrg_rxbuf", "event_idx", "indirect"])]
    pub without: Vec<String>,
    /// The CPU of the driver
    #[arg(long, default_value_t = 0)]
    pub driver_cpu: usize,
    /// The CPU of the device
    #[arg(long, default_value_t = 1)]
    pub device_cpu: usize,
    /// Write the rows as JSON to a file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The peer of a bench.
#[derive(clap::Args)]
pub struct Peer {
    /// Measure ours alone
    #[arg(long)]
    pub alone: bool,
    /// DPDK's program
    #[arg(long, default_value = "dpdk-testpmd")]
    pub testpmd: String,
}

/// A device that is being measured, or held still.
pub struct Device {
    /// What it is, with its version.
    pub name: String,
    /// Its ports.
    pub sockets: Vec<PathBuf>,
    program: Program,
}

impl Device {
    /// Lets nothing of it run.
    pub fn hold(&self, still: bool) {
        self.program.hold(still);
    }
}

impl Common {
    /// Runs this thread on the driver's CPU. To be called when the devices were started, which would inherit it.
    pub fn pin(&self) -> Result<(), String> {
        pin_current_thread(self.driver_cpu).map_err(|error| format!("--driver-cpu {}: {error}", self.driver_cpu))
    }

    /// Our device with these ports, each given by what it says beside its name and socket. It is held still.
    pub fn ours(&self, folder: &Folder, poll: &str, ports: &[&str]) -> Result<Device, String> {
        let name = format!("ours-{}", poll.replace('"', ""));
        let (config, log) = (folder.file(&format!("{name}.toml")), folder.file(&format!("{name}.log")));
        let mut text = format!("[workers]\ncpus = [{}]\npoll = {poll}\n", self.device_cpu);
        let mut sockets = Vec::new();
        for (number, port) in ports.iter().enumerate() {
            let socket = folder.file(&format!("{name}-{number}.sock"));
            let path = socket.display();
            let _ =
                write!(text, "[[port]]\nname = \"p{number}\"\nkind = \"vhost-user\"\nsocket = \"{path}\"\n{port}\n");
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
        Ok(Device { name: format!("ringroad {}", env!("CARGO_PKG_VERSION")), sockets, program })
    }

    /// DPDK's device with so many ports, if it is installed. It is held still.
    pub fn dpdk(&self, folder: &Folder, peer: &Peer, ports: usize, forward: &str) -> Result<Option<Device>, String> {
        if peer.alone {
            return Ok(None);
        }
        let mut words = peer.testpmd.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or("dpdk-testpmd"));
        // Whatever it answers: that it answers says that it is there.
        if Command::new(command.get_program()).args(words.clone()).arg("--version").output().is_err() {
            eprintln!(
                "{} is not installed (on Debian, scripts/peers dpdk installs it): measuring ours alone",
                peer.testpmd
            );
            return Ok(None);
        }
        hugepages();
        let (sockets, log): (Vec<_>, _) =
            ((0..ports).map(|port| folder.file(&format!("dpdk-{port}.sock"))).collect(), folder.file("dpdk.log"));
        let cpu = self.device_cpu;
        command
            .args(words)
            .args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--main-lcore", "0", "-v", "--no-pci", "--in-memory"])
            .args(["--file-prefix", &format!("ringroad{}", std::process::id()), "-m", "512"]);
        for (number, socket) in sockets.iter().enumerate() {
            command.args(["--vdev", &format!("net_vhost{number},iface={},queues=1", socket.display())]);
        }
        command
            .args(["--", "--nb-cores=1", &format!("--forward-mode={forward}"), "--auto-start"])
            .args(["--stats-period", "3600"])
            .stdout(Stdio::null());
        let mut program = Program::start(&peer.testpmd, &mut command, &log)?;
        for socket in &sockets {
            program.wait_for(socket, Duration::from_secs(20), &log)?;
        }
        // It forwards from a moment after its sockets are there.
        std::thread::sleep(Duration::from_secs(1));
        let said = fs::read_to_string(&log).unwrap_or_default();
        let version = said
            .split("RTE Version: 'DPDK ")
            .nth(1)
            .and_then(|rest| rest.split('\'').next())
            .unwrap_or("of unknown version");
        program.hold(true);
        Ok(Some(Device { name: format!("DPDK {version} net_vhost"), sockets, program }))
    }

    /// Connects our driver to a port.
    pub fn connect(&self, device: &Device, port: usize, ring: Ring, frame: usize) -> Result<Connection, String> {
        let connector = Connector {
            socket: device.sockets[port].clone(),
            listen: false,
            patience: Duration::from_secs(5),
            features: features(ring, &self.without),
            queue_pairs: 1,
            queue_size: self.queue_size,
            frame: frame.max(1518),
            huge: true,
        };
        connector.connect().map_err(|error| format!("{}, {} {frame} B: {error}", device.name, ring.name()))
    }

    /// One run against one port of a device, which is let go for it.
    pub fn run(&self, device: &Device, port: usize, ring: Ring, settings: &Settings) -> Result<Totals, String> {
        device.hold(false);
        let frame = settings.sizes.iter().copied().max().unwrap_or(64);
        let mut connection = self.connect(device, port, ring, frame)?;
        let mut traffic = Traffic::new(settings.clone(), &mut connection.driver);
        let mut run = |seconds: f64| {
            let totals = traffic.run(&mut connection, Duration::from_secs_f64(seconds), |_| {});
            totals.map_err(|error| format!("{}, {} {frame} B: {error}", device.name, ring.name()))
        };
        run(0.2)?;
        let totals = run(self.seconds)?;
        drop(connection);
        device.hold(true);
        if totals.received == 0 {
            return Err(format!("{}, {} {frame} B: no frame came back", device.name, ring.name()));
        }
        Ok(totals)
    }
}

/// Figures of our device and of its peer, measured in turn.
pub struct Pairs {
    ours: Vec<f64>,
    peer: Vec<f64>,
    lines: Vec<f64>,
}

impl Pairs {
    /// Measures both, as often as was asked for, and the line round trip before each pair.
    pub fn measure(
        common: &Common,
        (ours, peer): (&Device, Option<&Device>),
        what: &str,
        one: impl Fn(&Device) -> Result<f64, String>,
    ) -> Result<Pairs, String> {
        let mut pairs = Pairs { ours: Vec::new(), peer: Vec::new(), lines: Vec::new() };
        for pair in 1..=common.pairs {
            progress(&format!("{what}, pair {pair} of {}", common.pairs));
            pairs.lines.push(super::line_round_trip([common.driver_cpu, common.device_cpu])?);
            pairs.ours.push(one(ours)?);
            if let Some(peer) = peer {
                pairs.peer.push(one(peer)?);
            }
        }
        Ok(pairs)
    }

    /// Adds what came out to a row for programs; returns the columns for people.
    pub fn report(&self, row: &mut Value, peer: Option<&str>) -> Vec<String> {
        let mut note = |name: &str, figure: f64| row[name] = json!(figure);
        let (ours, theirs, line) = (Spread::of(&self.ours), Spread::of(&self.peer), Spread::of(&self.lines));
        let mut columns = ours.columns(2).to_vec();
        note("ours", ours.median);
        note("ours_min", ours.min);
        note("ours_max", ours.max);
        note("line_ns", line.median);
        note("line_ns_min", line.min);
        note("line_ns_max", line.max);
        if peer.is_some() {
            let ratios: Vec<f64> = self.ours.iter().zip(&self.peer).map(|(ours, peer)| ours / peer).collect();
            let ratio = Spread::of(&ratios);
            note("peer", theirs.median);
            note("peer_min", theirs.min);
            note("peer_max", theirs.max);
            note("ratio", ratio.median);
            note("min", ratio.min);
            note("max", ratio.max);
            columns.extend(theirs.columns(2));
            columns.extend(ratio.columns(2));
        }
        row["pairs"] = json!(self.ours.len());
        if let Some(name) = peer {
            row["peer_name"] = json!(name);
        }
        columns.extend(line.columns(0));
        columns
    }
}

/// Prints the columns of `Pairs::report`, each behind the name of its cell.
pub fn print(peer: Option<&str>, lines: &[Vec<String>]) {
    match peer {
        Some(name) => {
            println!("peer: {name}");
            print!("{}", table(&["", "ours", "", "peer", "", "ratio", "", "line, ns", ""], lines));
        }
        None => print!("{}", table(&["", "ours", "", "line, ns", ""], lines)),
    }
    println!("{}", super::LINE);
}

/// Says what is being measured, over what was said before.
pub fn progress(what: &str) {
    eprint!("\r{what:70}");
}

/// Nothing is being measured any more.
pub fn finished() {
    eprint!("\r{:70}\r", "");
}

/// DPDK wants hugepages; if there are none and we may, there are some afterwards.
fn hugepages() {
    let path = Path::new("/proc/sys/vm/nr_hugepages");
    let pages: u64 = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    if pages < 512 && fs::write(path, "1024").is_ok() {
        eprintln!("set vm.nr_hugepages to 1024 for DPDK (it was {pages})");
    }
}
