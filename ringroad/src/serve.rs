//! `ringroad serve`: runs a switch as a configuration file describes it.

mod vsock;

use self::vsock::Vsocks;
use crate::{Outcome, config, report};
use ringroad_host::{
    Port, PortHandle, PortReport, Tap, Worker, WorkerConfig,
    vhost_user::{Server, VhostConfig},
};
use ringroad_net::{Config, Snapshot};
use ringroad_switch::Poll;
use ringroad_wire::ethernet::MacAddr;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1},
    iterator::Signals,
};
use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

/// Run a switch as a configuration file describes it
#[derive(clap::Args)]
#[command(after_help = "Example configuration:\n  \
    [[port]]\n  name = \"vm1\"\n  kind = \"vhost-user\"\n  socket = \"/tmp/vm1.sock\"\n\n  \
    [[port]]\n  name = \"host\"\n  kind = \"tap\"\n  interface = \"rr0\"\n\n  \
    [[vsock]]\n  cid = 3\n  socket = \"/tmp/vm1.vsock\"\n  host = \"/tmp/vm1.host\"\n\n\
    SIGUSR1 prints the counters, SIGHUP reads the file again, SIGTERM and SIGINT end it.")]
pub struct Args {
    /// The configuration file
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Print the counters of all ports every so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    stats: Option<u64>,
    /// Write the counters of all ports as JSON to a file at the end
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Read the configuration, say whether it is right, and end
    #[arg(long)]
    check: bool,
}

/// Runs until it is told to stop.
pub fn run(args: Args) -> Outcome {
    let config = config::Config::load(&args.config)?;
    if args.check {
        println!("{}: {}, right", args.config.display(), summary(config.ports.len(), config.vsocks.len()));
        return Ok(ExitCode::SUCCESS);
    }
    ringroad_host::raise_file_limit();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGHUP])?;
    let worker = start_worker(&config)?;
    let mut ports = Vec::new();
    for port in &config.ports {
        ports.push(Running::start(port, &config, &worker)?);
    }
    let vsock = Arc::new(Mutex::new(Vsocks::start(&config)?));
    log::info!("{}, ready", summary(config.ports.len(), config.vsocks.len()));
    let ports = Arc::new(Mutex::new(ports));
    if let Some(seconds) = args.stats {
        let (ports, vsock) = (ports.clone(), vsock.clone());
        thread::Builder::new().name("stats".into()).spawn(move || {
            loop {
                thread::sleep(Duration::from_secs(seconds));
                print_counters(&lock(&ports), &lock(&vsock), false);
            }
        })?;
    }
    for signal in signals.forever() {
        match signal {
            SIGUSR1 => print_counters(&lock(&ports), &lock(&vsock), true),
            SIGHUP => reload(&args, &config, &mut lock(&ports), &mut lock(&vsock), &worker),
            _ => break,
        }
    }
    log::info!("stopping");
    let (mut ports, mut vsock) = (lock(&ports), lock(&vsock));
    print_counters(&ports, &vsock, false);
    if let Some(file) = &args.json {
        let ports: Vec<_> = ports.iter().map(|running| json(&running.report())).collect();
        crate::blast::write_json(file, &serde_json::json!({ "ports": ports, "vsock": vsock.json() }))?;
    }
    ports.clear();
    vsock.devices.clear();
    Ok(ExitCode::SUCCESS)
}

/// Prints what has happened so far; `all`: connection by connection too.
fn print_counters(ports: &[Running], vsock: &Vsocks, all: bool) {
    let mut text = String::new();
    if !ports.is_empty() {
        text += &port_table(ports);
    }
    if !vsock.devices.is_empty() {
        text += &vsock.table();
        if all {
            text += &vsock.connections();
        }
    }
    // Nobody listening any more is no reason to stop.
    let _ = io::stdout().write_all(text.as_bytes());
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn summary(ports: usize, vsocks: usize) -> String {
    match (ports, vsocks) {
        (ports, 0) => format!("{ports} ports"),
        (0, vsocks) => format!("{vsocks} vsock devices"),
        (ports, vsocks) => format!("{ports} ports, {vsocks} vsock devices"),
    }
}

fn start_worker(config: &config::Config) -> Result<Worker, Box<dyn std::error::Error>> {
    let cpu = config.workers.cpus.first().copied();
    let (addresses, ageing) = (config.switch.entries, config.switch.ageing.as_secs() as u32);
    let hold = config.switch.move_after.as_secs() as u32;
    let config::Workers { gather, turn, .. } = config.workers;
    Worker::start(WorkerConfig { cpu, addresses, ageing, hold, gather, turn }).map_err(|error| match cpu {
        Some(cpu) => format!("cannot run a worker on CPU {cpu} (key `workers.cpus`): {error}").into(),
        None => format!("cannot start a worker: {error}").into(),
    })
}

/// A port that works. Dropped, it is gone.
struct Running {
    config: config::Port,
    poll: Poll,
    kind: Kind,
}

enum Kind {
    Vhost(Server),
    Tap(PortHandle),
}

impl Running {
    fn start(
        port: &config::Port,
        config: &config::Config,
        worker: &Worker,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let (mode, poll) = (port.mode, port.poll.unwrap_or(config.workers.poll));
        let kind = match &port.kind {
            config::Kind::VhostUser { socket, role, features, queues, mac, tuning } => {
                let vhost = VhostConfig {
                    name: port.name.clone(),
                    socket: socket.clone(),
                    role: *role,
                    features: *features,
                    config: Config {
                        mac: mac.unwrap_or_else(|| MacAddr::local(hash(&port.name))),
                        link_up: true,
                        queue_pairs: *queues,
                        mtu: port.mtu.unwrap_or(1500),
                    },
                    mode,
                    hairpin: port.hairpin,
                    poll,
                    limits: port.limits,
                    tuning: *tuning,
                };
                Kind::Vhost(Server::start(vhost, worker)?)
            }
            config::Kind::Tap { interface, queues } => {
                let tap = Tap::open(&port.name, interface, *queues, port.mtu)?;
                Kind::Tap(worker.add(Arc::new(Port::tap(tap, mode, port.hairpin, poll).with_limits(port.limits)))?)
            }
        };
        Ok(Running { config: port.clone(), poll, kind })
    }

    fn report(&self) -> PortReport {
        match &self.kind {
            Kind::Vhost(server) => server.port().report(),
            Kind::Tap(handle) => handle.port().report(),
        }
    }
}

/// A number that is the same for a name each time, so that a guest keeps its address (FNV-1a).
fn hash(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Reads the configuration again: ports that are not in it any more, or differ, go; new ones come; the others do not
/// notice. `before` is what the program was started with.
fn reload(args: &Args, before: &config::Config, ports: &mut Vec<Running>, vsock: &mut Vsocks, worker: &Worker) {
    let config = match config::Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return log::error!("{error}; everything stays as it is"),
    };
    if config.switch != before.switch || config.workers.cpus != before.workers.cpus {
        log::warn!("changes of [switch] and `workers.cpus` take effect when ringroad is started again");
    }
    let poll = |port: &config::Port| port.poll.unwrap_or(config.workers.poll);
    ports.retain(|running| config.ports.iter().any(|port| *port == running.config && poll(port) == running.poll));
    for port in &config.ports {
        if !ports.iter().any(|running| running.config.name == port.name) {
            match Running::start(port, &config, worker) {
                Ok(running) => ports.push(running),
                Err(error) => log::error!("{error}"),
            }
        }
    }
    vsock.reload(&config);
    log::info!("configuration read again: {}", summary(ports.len(), vsock.devices.len()));
}

fn json(report: &PortReport) -> serde_json::Value {
    let side = |snapshot: &Snapshot| {
        let mut side: serde_json::Map<_, _> =
            snapshot.named().map(|(name, value)| (name.into(), value.into())).collect();
        side.insert("dropped".into(), snapshot.dropped().into());
        side
    };
    serde_json::json!({ "name": report.name, "from": side(&report.received), "to": side(&report.sent) })
}

fn port_table(ports: &[Running]) -> String {
    let header = [
        "port",
        "from: frames",
        "bytes",
        "lost",
        "to: frames",
        "bytes",
        "dropped: full",
        "oversize",
        "stopped",
        "faults",
        "notified",
        "storm",
        "spoofed",
        "claimed",
        "panics",
    ];
    let rows: Vec<Vec<String>> = ports
        .iter()
        .map(Running::report)
        .map(|PortReport { name, received, sent }| {
            let numbers = [
                received.frames,
                received.bytes,
                received.dropped(),
                sent.frames,
                sent.bytes,
                sent.full,
                sent.oversize,
                sent.stopped + sent.busy,
                received.faults + sent.faults,
                received.notifications + sent.notifications,
                received.storm,
                received.spoofed,
                received.claimed,
                received.panics,
            ];
            std::iter::once(name).chain(numbers.into_iter().map(report::count)).collect()
        })
        .collect();
    report::table(&header, &rows)
}
