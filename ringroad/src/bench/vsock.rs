//! Both ends of a vsock device in one process, each on a CPU of its own: round trips and streams, with packets that their
//! senders put into the ring (direct) against packets that a worker puts there (queued).

use super::rig::{Common, finished, progress};
use crate::{
    Outcome,
    blast::Ring,
    child::Folder,
    report::{Spread, table},
    vsock::{RECEIVE, poll, round_trips},
};
use hdrhistogram::Histogram;
use ringroad_host::{
    pin_current_thread,
    vsock::{HostSide, VsockClient, VsockConfig, VsockConnector, VsockServer, VsockWorker},
};
use ringroad_vsock::{Addr, DriverSide, Features, Listener, Settings, Side, SocketType, Stack, Stream};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    net::Shutdown,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Round trips from a program of the host to one of the guest and back, direct against queued
#[derive(clap::Args)]
pub struct Latency {
    /// Bytes there and back
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096],
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: Vec<u64>,
    /// For how long who waits looks at the rings before sleeping: 0, 50us, unlimited
    #[arg(long, value_delimiter = ',', default_values = ["unlimited"])]
    poll: Vec<String>,
    #[command(flatten)]
    setup: Setup,
}

/// Streams, direct against queued
#[derive(clap::Args)]
pub struct Streams {
    /// Bytes of each write
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 65536, 131_072],
          value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    size: Vec<u64>,
    /// Connections at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    connections: Vec<u64>,
    /// Which way they go [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["to-guest", "to-host"], hide_default_value = true)]
    direction: Vec<Direction>,
    /// For how long who waits looks at the rings before sleeping: 0, 50us, unlimited
    #[arg(long, default_value = "50us")]
    poll: String,
    #[command(flatten)]
    setup: Setup,
}

#[derive(clap::Args)]
struct Setup {
    /// The layout of the rings
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    /// Entries of each ring
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=32768))]
    queue_size: u32,
    /// Bytes that each end keeps for a connection
    #[arg(long, default_value_t = 256 << 10, value_parser = clap::value_parser!(u32).range(4096..))]
    buffer: u32,
    /// Bytes of payload that a receive buffer of the driver holds
    #[arg(long, default_value_t = RECEIVE, hide = true)]
    receive: usize,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Direction {
    ToGuest,
    ToHost,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Direction::ToGuest => "to-guest",
            Direction::ToHost => "to-host",
        }
    }
}

/// The guest.
const CID: u64 = 3;
const PORT: u32 = 7;

/// Both ends, connected.
struct Both {
    // Dropped in this order.
    client: VsockClient,
    server: VsockServer,
    _worker: VsockWorker,
}

impl Setup {
    fn both(&self, folder: &Folder, direct: bool, poll: Duration) -> Result<Both, String> {
        let settings = Settings { direct, poll, buffer: self.buffer, ..Settings::default() };
        let socket = folder.file("vsock.sock");
        // The worker sleeps unless it is needed: who waits looks for himself.
        let worker = VsockWorker::start(Some(self.common.device_cpu), Duration::ZERO, 1024)
            .map_err(|error| format!("--device-cpu {}: {error}", self.common.device_cpu))?;
        let server = VsockServer::start(
            VsockConfig { name: "bench".into(), settings, ..VsockConfig::new(CID, socket.clone()) },
            &worker,
        )
        .map_err(|error| error.to_string())?;
        let connector = VsockConnector {
            socket,
            listen: false,
            patience: Duration::from_secs(5),
            features: Features::layout(self.ring == Ring::Packed).bits(),
            queue_size: self.queue_size,
            receive: self.receive,
            cid: None,
            settings,
            reconnect: None,
        };
        // Its worker inherits the CPU.
        let client = self.common.pinned(|| connector.connect().map_err(|error| error.to_string()))?;
        let start = Instant::now();
        while !server.stack().is_running() {
            if start.elapsed() > Duration::from_secs(5) {
                return Err("the device does not run".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Both { client, server, _worker: worker })
    }
}

/// Does something on a CPU.
fn on<T>(cpu: usize, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    pin_current_thread(cpu).map_err(|error| format!("cannot run on CPU {cpu}: {error}"))?;
    work()
}

fn io(error: std::io::Error) -> String {
    error.to_string()
}

/// Round trips of one size on new rings.
fn ping(setup: &Setup, folder: &Folder, direct: bool, poll: Duration, size: usize) -> Result<Histogram<u64>, String> {
    let both = setup.both(folder, direct, poll)?;
    let (host, guest) = (both.server.stack(), both.client.stack());
    let Common { driver_cpu, device_cpu, seconds, .. } = setup.common;
    let times = thread::scope(|scope| {
        let listener = Listener::bind(guest, PORT, SocketType::Stream).map_err(io)?;
        let echo = scope.spawn(move || {
            on(driver_cpu, || {
                let mut stream = listener.accept_within(Some(Duration::from_secs(5))).map_err(io)?;
                let mut buffer = vec![0; size];
                loop {
                    match stream.read(&mut buffer).map_err(io)? {
                        0 => return Ok(()),
                        count => stream.write_all(&buffer[..count]).map_err(io)?,
                    }
                }
            })
        });
        let times = scope.spawn(move || {
            on(device_cpu, || {
                let stream = Stream::connect(host, Addr { cid: CID, port: PORT }).map_err(io)?;
                round_trips(&stream, size, Duration::from_secs_f64(0.1)).map_err(io)?;
                let times = round_trips(&stream, size, Duration::from_secs_f64(seconds)).map_err(io)?;
                stream.shutdown(Shutdown::Write);
                Ok(times)
            })
        });
        let times = times.join().map_err(|_| "the host's program has ended")??;
        echo.join().map_err(|_| "the guest's program has ended")??;
        Ok::<_, String>(times)
    })?;
    check(host, guest, direct)?;
    Ok(times)
}

/// Packets went the way that they should.
fn check(host: &Stack<HostSide>, guest: &Stack<DriverSide>, direct: bool) -> Result<(), String> {
    for (end, ways) in [("host", host.report().ways), ("guest", guest.report().ways)] {
        if direct && ways.direct <= ways.queued || !direct && ways.direct > 0 {
            return Err(format!("{end}: {} packets went directly, {} queued", ways.direct, ways.queued));
        }
    }
    Ok(())
}

/// The seed's gain, for its sizes.
fn seed_latency(size: u64) -> Option<f64> {
    match size {
        64 => Some(16.78 / 13.57),
        512 => Some(17.35 / 14.11),
        4096 => Some(19.87 / 14.96),
        _ => None,
    }
}

/// `ringroad bench vsock-latency`.
pub fn latency(args: Latency) -> Outcome {
    let Latency { setup, size: sizes, poll: polls } = &args;
    let common = &setup.common;
    let folder = Folder::new("vsock")?;
    let (mut rows, mut lines): (Vec<Value>, Vec<Vec<String>>) = (Vec::new(), Vec::new());
    for polling in polls {
        let time = poll(polling)?;
        for &size in sizes {
            // Way by way: means, 1st and 99th percentiles.
            let mut figures = [[Vec::new(), Vec::new(), Vec::new()], [Vec::new(), Vec::new(), Vec::new()]];
            let mut round_trips = Vec::new();
            for pair in 1..=common.pairs {
                progress(&format!("{size} B, poll {polling}, pair {pair} of {}", common.pairs));
                round_trips.push(common.line()?);
                for (direct, figures) in [false, true].into_iter().zip(&mut figures) {
                    let times = ping(setup, &folder, direct, time, size as usize)?;
                    figures[0].push(times.mean() / 1e3);
                    figures[1].push(times.value_at_quantile(0.01) as f64 / 1e3);
                    figures[2].push(times.value_at_quantile(0.99) as f64 / 1e3);
                }
            }
            let [queued, direct] = &figures;
            let ratios: Vec<f64> = queued[0].iter().zip(&direct[0]).map(|(queued, direct)| queued / direct).collect();
            let ratio = Spread::of(&ratios);
            let spread = |figures: &[Vec<f64>; 3]| std::array::from_fn::<_, 3, _>(|index| Spread::of(&figures[index]));
            let ([queued, queued_1, queued_99], [direct, direct_1, direct_99]) = (spread(queued), spread(direct));
            let line = Spread::of(&round_trips);
            let mut row = json!({
                "ring": setup.ring.name(), "queue_size": setup.queue_size, "size": size, "poll": polling, "unit": "us",
                "before": queued.median, "after": direct.median, "ratio": ratio.median, "min": ratio.min, "max": ratio.max,
                "before_p1": queued_1.median, "after_p1": direct_1.median,
                "before_p99": queued_99.median, "after_p99": direct_99.median,
                "pairs": common.pairs, "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
            });
            if let Some(seed) = seed_latency(size) {
                row["seed_ratio"] = json!(seed);
            }
            rows.push(row);
            let mut columns = vec![format!("{size} B, poll {polling}")];
            for (mean, p1, p99) in [(queued, queued_1, queued_99), (direct, direct_1, direct_99)] {
                columns.extend(mean.columns(2));
                columns.extend([format!("{:.2}", p1.median), format!("{:.2}", p99.median)]);
            }
            columns.extend(ratio.columns(2));
            columns.push(seed_latency(size).map_or(String::new(), |seed| format!("{seed:.2}")));
            columns.push(format!("{:.0}", line.median));
            lines.push(columns);
            common.save("vsock-latency", &rows, false)?;
        }
    }
    finished();
    println!(
        "round trip host – guest – host in µs, a program on each end, one core each, {} pairs of {} s, median and min–max",
        common.pairs, common.seconds
    );
    let header = ["", "queued", "", "p1", "p99", "direct", "", "p1", "p99", "ratio", "", "seed", "line, ns"];
    print!("{}", table(&header, &lines));
    println!("{}", super::LINE);
    common.save("vsock-latency", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}

/// Gigabits per second of so many connections on new rings.
fn pour(
    setup: &Setup,
    folder: &Folder,
    direct: bool,
    poll: Duration,
    direction: Direction,
    connections: u64,
    size: usize,
) -> Result<f64, String> {
    let both = setup.both(folder, direct, poll)?;
    let (host, guest) = (both.server.stack(), both.client.stack());
    let Common { driver_cpu, device_cpu, seconds, .. } = setup.common;
    let rate = match direction {
        Direction::ToGuest => run(host, guest, [device_cpu, driver_cpu], connections, size, seconds)?,
        Direction::ToHost => run(guest, host, [driver_cpu, device_cpu], connections, size, seconds)?,
    };
    let ways = match direction {
        Direction::ToGuest => host.report().ways,
        Direction::ToHost => guest.report().ways,
    };
    if !direct && ways.direct > 0 {
        return Err(format!("{} packets went directly, {} queued", ways.direct, ways.queued));
    }
    Ok(rate)
}

fn run<A: Side, B: Side>(
    from: &Arc<Stack<A>>,
    to: &Arc<Stack<B>>,
    [from_cpu, to_cpu]: [usize; 2],
    connections: u64,
    size: usize,
    seconds: f64,
) -> Result<f64, String> {
    let listener = Listener::bind(to, PORT, SocketType::Stream).map_err(io)?;
    let received = AtomicU64::new(0);
    let received = &received;
    let peer = Addr { cid: to.cid(), port: PORT };
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(seconds + 0.2);
    thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(move || {
                on(from_cpu, || {
                    let mut stream = Stream::connect(from, peer).map_err(io)?;
                    let bytes = vec![0x5a; size];
                    while Instant::now() < end {
                        stream.write_all(&bytes).map_err(io)?;
                    }
                    stream.shutdown(Shutdown::Both);
                    Ok(())
                })
            });
        }
        for _ in 0..connections {
            let mut stream = listener.accept_within(Some(Duration::from_secs(5))).map_err(io)?;
            scope.spawn(move || {
                on(to_cpu, || {
                    let mut buffer = vec![0; size.max(64 << 10)];
                    loop {
                        match stream.read(&mut buffer).map_err(io)? {
                            0 => return Ok(()),
                            count => received.fetch_add(count as u64, Ordering::Relaxed),
                        };
                    }
                })
            });
        }
        // What starting up takes does not count.
        thread::sleep(Duration::from_millis(150));
        let (before, begun) = (received.load(Ordering::Relaxed), Instant::now());
        thread::sleep(Duration::from_secs_f64(seconds));
        let bytes = received.load(Ordering::Relaxed) - before;
        Ok(bytes as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e9)
    })
}

/// The seed's gain, for its sizes and numbers of connections.
fn seed_stream(connections: u64, size: u64) -> Option<f64> {
    match (connections, size >> 10) {
        (1, 4) => Some(10.5 / 6.87),
        (1, 64) => Some(39.4 / 29.3),
        (1, 128) => Some(39.9 / 29.5),
        (2, 4) => Some(17.8 / 10.5),
        (2, 64) => Some(47.7 / 32.8),
        (2, 128) => Some(48.5 / 33.2),
        (4, 4) => Some(16.9 / 12.7),
        (4, 64) => Some(48.1 / 33.6),
        (4, 128) => Some(50.5 / 34.2),
        _ => None,
    }
}

/// `ringroad bench vsock-stream`.
pub fn streams(args: Streams) -> Outcome {
    let Streams { setup, size: sizes, connections: counts, direction: directions, poll: polling } = &args;
    let common = &setup.common;
    let time = poll(polling)?;
    let folder = Folder::new("vsock")?;
    let (mut rows, mut lines): (Vec<Value>, Vec<Vec<String>>) = (Vec::new(), Vec::new());
    for &direction in directions {
        for &connections in counts {
            for &size in sizes {
                let mut figures = [Vec::new(), Vec::new()];
                let mut round_trips = Vec::new();
                let way = direction.name();
                for pair in 1..=common.pairs {
                    progress(&format!("{way}, {connections} × {size} B, pair {pair} of {}", common.pairs));
                    round_trips.push(common.line()?);
                    for (direct, figures) in [false, true].into_iter().zip(&mut figures) {
                        figures.push(pour(setup, &folder, direct, time, direction, connections, size as usize)?);
                    }
                }
                let ratios: Vec<f64> =
                    figures[1].iter().zip(&figures[0]).map(|(after, before)| after / before).collect();
                let (before, after) = (Spread::of(&figures[0]), Spread::of(&figures[1]));
                let (ratio, line) = (Spread::of(&ratios), Spread::of(&round_trips));
                let mut row = json!({
                    "ring": setup.ring.name(), "queue_size": setup.queue_size, "direction": way,
                    "connections": connections, "size": size, "poll": polling, "unit": "Gb/s",
                    "before": before.median, "after": after.median,
                    "ratio": ratio.median, "min": ratio.min, "max": ratio.max, "pairs": common.pairs,
                    "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
                });
                let seed = seed_stream(connections, size);
                if let Some(seed) = seed {
                    row["seed_ratio"] = json!(seed);
                }
                rows.push(row);
                let mut columns = vec![format!("{way}, {connections} × {} KiB", size >> 10)];
                columns.extend(before.columns(1));
                columns.extend(after.columns(1));
                columns.extend(ratio.columns(2));
                columns.push(seed.map_or(String::new(), |seed| format!("{seed:.2}")));
                columns.push(format!("{:.0}", line.median));
                lines.push(columns);
                common.save("vsock-stream", &rows, false)?;
            }
        }
    }
    finished();
    println!(
        "Gb/s of connections × bytes of a write, programs on both ends, one core each, {} pairs of {} s, median and min–max",
        common.pairs, common.seconds
    );
    print!("{}", table(&["", "queued", "", "direct", "", "ratio", "", "seed", "line, ns"], &lines));
    println!("{}", super::LINE);
    common.save("vsock-stream", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}
