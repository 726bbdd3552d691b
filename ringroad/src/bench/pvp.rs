//! PvP: a driver sends frames through one port, the device swaps their MAC addresses and sends them back. One core for
//! the driver, one for the device; the same light driver drives our device and DPDK's, in turn.

use crate::{
    Outcome,
    blast::{Ring, features, write_json},
    child::{Folder, Program, ourselves},
    report::{Spread, table},
    traffic::{Mode, Settings, Touch, Traffic},
};
use ringroad_host::{pin_current_thread, vhost_user::Connector};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

/// Frames reflected by a device on one core, ours against DPDK's net_vhost with macswap
#[derive(clap::Args)]
pub struct Args {
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes without FCS
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    /// Entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: u32,
    /// Leave the payload alone: the cost of the rings
    #[arg(long)]
    no_touch: bool,
    /// Pairs of runs, ours and the peer's in turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// Seconds of each run
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Features that the driver does without: in_order, mrg_rxbuf, event_idx, indirect
    #[arg(long, value_delimiter = ',', value_parser = ["in_order", "mrg_rxbuf", "event_idx", "indirect"])]
    without: Vec<String>,
    /// The CPU of the driver
    #[arg(long, default_value_t = 0)]
    driver_cpu: usize,
    /// The CPU of the device
    #[arg(long, default_value_t = 1)]
    device_cpu: usize,
    /// Measure ours alone
    #[arg(long)]
    alone: bool,
    /// DPDK's program
    #[arg(long, default_value = "dpdk-testpmd")]
    testpmd: String,
    /// Write the rows as JSON to a file (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A device that is being measured, or held still.
struct Device {
    name: String,
    program: Program,
    socket: PathBuf,
}

/// One combination.
#[derive(Clone, Copy)]
struct Cell {
    ring: Ring,
    size: usize,
}

/// Measures every combination.
pub fn run(args: Args) -> Outcome {
    let folder = Folder::new("pvp")?;
    let ours = our_device(&args, &folder)?;
    let peer = if args.alone { None } else { dpdk(&args, &folder)? };
    // After the devices were started, which would inherit it.
    pin_current_thread(args.driver_cpu).map_err(|error| format!("--driver-cpu {}: {error}", args.driver_cpu))?;
    ours.program.hold(true);
    if let Some(peer) = &peer {
        peer.program.hold(true);
    }
    let mut rows = Vec::new();
    let mut lines = Vec::new();
    let cells: Vec<Cell> = args
        .ring
        .iter()
        .flat_map(|&ring| args.size.iter().map(move |&size| Cell { ring, size: size as usize }))
        .collect();
    for (number, &cell) in cells.iter().enumerate() {
        let (mut our_figures, mut peer_figures, mut round_trips) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..args.pairs {
            round_trips.push(super::line_round_trip([args.driver_cpu, args.device_cpu])?);
            eprint!(
                "\r{} {} B ({} of {}), pair {} of {}   ",
                cell.ring.name(),
                cell.size,
                number + 1,
                cells.len(),
                pair + 1,
                args.pairs
            );
            our_figures.push(measure(&args, &ours, cell)?);
            if let Some(peer) = &peer {
                peer_figures.push(measure(&args, peer, cell)?);
            }
        }
        let ratios: Vec<f64> = our_figures.iter().zip(&peer_figures).map(|(ours, peer)| ours / peer).collect();
        let (a, b, r) = (Spread::of(&our_figures), Spread::of(&peer_figures), Spread::of(&ratios));
        let line = Spread::of(&round_trips);
        let mut row = json!({
            "ring": cell.ring.name(), "size": cell.size, "touch": !args.no_touch, "queue_size": args.queue_size,
            "unit": "Mpps", "ours": a.median, "ours_min": a.min, "ours_max": a.max, "pairs": args.pairs,
            "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
        });
        let mut columns = vec![
            format!("{} {}", cell.ring.name(), cell.size),
            format!("{:.2}", a.median),
            format!("{:.2}–{:.2}", a.min, a.max),
        ];
        if let Some(peer) = &peer {
            row["peer"] = json!(b.median);
            row["peer_min"] = json!(b.min);
            row["peer_max"] = json!(b.max);
            row["peer_name"] = json!(peer.name);
            row["ratio"] = json!(r.median);
            row["min"] = json!(r.min);
            row["max"] = json!(r.max);
            columns.extend([
                format!("{:.2}", b.median),
                format!("{:.2}–{:.2}", b.min, b.max),
                format!("{:.2}", r.median),
                format!("{:.2}–{:.2}", r.min, r.max),
            ]);
        }
        columns.push(format!("{:.0} {:.0}–{:.0}", line.median, line.min, line.max));
        rows.push(row);
        lines.push(columns);
    }
    eprint!("\r{:60}\r", "");
    let touch = if args.no_touch { "notouch" } else { "touch" };
    let seconds = args.seconds;
    println!(
        "PvP, Mpps each way through one device core, {touch}, ring {}, {} runs of {seconds} s, median and min–max",
        args.queue_size, args.pairs
    );
    match &peer {
        Some(peer) => {
            println!("peer: {}", peer.name);
            print!("{}", table(&["", "ours", "", "peer", "", "ratio", "", "line, ns"], &lines));
        }
        None => print!("{}", table(&["", "ours", "", "line, ns"], &lines)),
    }
    println!("line: a cache line's way from one CPU to the other and back, measured before each pair; rates follow it");
    if let Some(file) = &args.json {
        write_json(file, &json!({ "bench": "pvp", "machine": super::machine(), "rows": rows }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One run against one device, which is let go for it: millions of frames per second that came back.
fn measure(args: &Args, device: &Device, cell: Cell) -> Result<f64, String> {
    device.program.hold(false);
    let connector = Connector {
        socket: device.socket.clone(),
        listen: false,
        patience: Duration::from_secs(5),
        features: features(cell.ring, &args.without),
        queue_pairs: 1,
        queue_size: args.queue_size,
        frame: cell.size.max(1518),
        huge: true,
    };
    let explain = |error: String| format!("{}, {} {} B: {error}", device.name, cell.ring.name(), cell.size);
    let mut connection = connector.connect().map_err(|error| explain(error.to_string()))?;
    let settings = Settings {
        mode: Mode::Tx,
        sizes: vec![cell.size],
        flows: 1,
        rate: None,
        window: None,
        touch: if args.no_touch { Touch::Nothing } else { Touch::Word },
        addresses: Addresses { destination: MacAddr::local(2), source: MacAddr::local(1) },
        event_driven: false,
    };
    let mut traffic = Traffic::new(settings, &mut connection.driver);
    let mut run = |seconds: f64| {
        let totals = traffic.run(&mut connection, Duration::from_secs_f64(seconds), |_| {});
        totals.map_err(|error| explain(error.to_string()))
    };
    run(0.2)?;
    let totals = run(args.seconds)?;
    drop(connection);
    device.program.hold(true);
    if totals.received == 0 {
        return Err(explain("no frame came back".into()));
    }
    Ok(totals.received_mpps())
}

fn our_device(args: &Args, folder: &Folder) -> Result<Device, String> {
    let (socket, config, log) = (folder.file("ours.sock"), folder.file("ours.toml"), folder.file("ours.log"));
    let text = format!(
        "[workers]\ncpus = [{}]\npoll = \"unlimited\"\n[[port]]\nname = \"pvp\"\nkind = \"vhost-user\"\nsocket = \"{}\"\nmode = \"reflect\"\n",
        args.device_cpu,
        socket.display()
    );
    fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
    let mut command = ourselves()?;
    command.arg("serve").arg("-c").arg(&config).stdout(Stdio::null());
    let mut program = Program::start("our device", &mut command, &log)?;
    program.wait_for(&socket, Duration::from_secs(5), &log)?;
    Ok(Device { name: format!("ringroad {}", env!("CARGO_PKG_VERSION")), program, socket })
}

/// DPDK's device, if it is installed.
fn dpdk(args: &Args, folder: &Folder) -> Result<Option<Device>, String> {
    let mut words = args.testpmd.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("dpdk-testpmd"));
    // Whatever it answers: that it answers says that it is there.
    if Command::new(command.get_program()).args(words.clone()).arg("--version").output().is_err() {
        eprintln!(
            "{} is not installed (on Debian, scripts/peers dpdk installs it): measuring ours alone",
            args.testpmd
        );
        return Ok(None);
    }
    hugepages();
    let (socket, log) = (folder.file("dpdk.sock"), folder.file("dpdk.log"));
    let cpu = args.device_cpu;
    command
        .args(words)
        .args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--main-lcore", "0", "-v", "--no-pci", "--in-memory"])
        .args(["--file-prefix", &format!("ringroad{}", std::process::id()), "-m", "512"])
        .args(["--vdev", &format!("net_vhost0,iface={},queues=1", socket.display()), "--"])
        .args(["--nb-cores=1", "--forward-mode=macswap", "--auto-start", "--stats-period", "3600"])
        .stdout(Stdio::null());
    let mut program = Program::start(&args.testpmd, &mut command, &log)?;
    program.wait_for(&socket, Duration::from_secs(20), &log)?;
    // It forwards from a moment after its socket is there.
    std::thread::sleep(Duration::from_secs(1));
    let said = fs::read_to_string(&log).unwrap_or_default();
    let version = said
        .split("RTE Version: 'DPDK ")
        .nth(1)
        .and_then(|rest| rest.split('\'').next())
        .unwrap_or("of unknown version");
    Ok(Some(Device { name: format!("DPDK {version} net_vhost"), program, socket }))
}

/// DPDK wants hugepages; if there are none and we may, there are some afterwards.
fn hugepages() {
    let path = Path::new("/proc/sys/vm/nr_hugepages");
    let pages: u64 = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    if pages < 512 && fs::write(path, "1024").is_ok() {
        eprintln!("set vm.nr_hugepages to 1024 for DPDK (it was {pages})");
    }
}
