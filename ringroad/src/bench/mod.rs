//! `ringroad bench`: measures, always in pairs.

mod curves;
mod driver;
mod latency;
mod packed;
mod peer;
mod pvp;
mod rig;
mod switch;
mod vsock;
mod vsock_peer;

use crate::{Outcome, report::Spread};
use ringroad_host::pin_current_thread;
use serde_json::{Value, json};
use std::{
    fs,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Instant,
};

/// Measure
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench pvp --ring packed --size 64 --json pvp.json\n  \
    ringroad bench pvp --all --peer dpdk,forky,ovs   the whole matrix, a table for each peer\n  \
    ringroad bench curves --curve ports              one worker with 1 to 32 ports\n  \
    ringroad bench driver --ring packed --mode txonly")]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// Frames reflected by a device on one core, ours against a peer's
    Pvp(pvp::Args),
    /// What each switch of a port's tuning is worth: all off, each alone, one after the other added
    Packed(packed::Args),
    /// Frames from guest to guest through two ports, ours against two ports of a peer
    Switch(switch::Args),
    /// The round trip of one frame, polling and event driven, ours against a peer's (which polls)
    Latency(latency::Args),
    /// What a frame costs by the driver's burst, and by the number of ports that one worker serves
    Curves(curves::Args),
    /// DPDK's own driver on our device, against the same driver on DPDK's
    Driver(driver::Args),
    /// Round trips of a vsock connection: packets that their senders put into the ring against packets that a worker does
    VsockLatency(vsock::Latency),
    /// Throughput of vsock connections, the same way
    VsockStream(vsock::Streams),
    /// Our vsock device against rust-vmm's with the same driver and host program; guest to guest against a program between sockets
    VsockPeer(vsock_peer::Args),
}

/// Runs one of them.
pub fn run(args: Args) -> Outcome {
    let outcome = match args.bench {
        Bench::Pvp(args) => pvp::run(args),
        Bench::Packed(args) => packed::run(args),
        Bench::Switch(args) => switch::run(args),
        Bench::Latency(args) => latency::run(args),
        Bench::Curves(args) => curves::run(args),
        Bench::Driver(args) => driver::run(args),
        Bench::VsockLatency(args) => vsock::latency(args),
        Bench::VsockStream(args) => vsock::streams(args),
        Bench::VsockPeer(args) => vsock_peer::run(args),
    };
    if outcome.is_err() {
        rig::finished();
    }
    outcome
}

/// What the last column of a table means.
const LINE: &str = "line: a cache line's way from one CPU to the other and back; rates follow it";

/// How long a cache line takes from one CPU to the other and back, in nanoseconds. Rates follow it, and where CPUs are virtual
/// it can change from minute to minute.
fn line_round_trip(cpus: [usize; 2]) -> Result<f64, String> {
    // The first part warms up; the middle one of the others counts, so that an interruption does not.
    const PARTS: u64 = 6;
    const TURNS: u64 = 1000;
    #[repr(align(128))]
    struct Line(AtomicU64);
    let (to, fro) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let pin = |cpu: usize| pin_current_thread(cpu).map_err(|error| format!("cannot run on CPU {cpu}: {error}"));
    let wait = |line: &Line, turn: u64| while line.0.load(Ordering::Acquire) < turn {};
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let pinned = pin(cpus[1]);
            for turn in 1..=PARTS * TURNS {
                wait(&to, turn);
                fro.0.store(turn, Ordering::Release);
            }
            pinned
        });
        let this = scope.spawn(|| {
            let pinned = pin(cpus[0]);
            let part = |part: u64| {
                let start = Instant::now();
                for turn in part * TURNS + 1..=(part + 1) * TURNS {
                    to.0.store(turn, Ordering::Release);
                    wait(&fro, turn);
                }
                start.elapsed().as_nanos() as f64 / TURNS as f64
            };
            let parts: Vec<f64> = (0..PARTS).map(part).skip(1).collect();
            pinned.map(|()| Spread::of(&parts).median)
        });
        let ended = |_| "a measuring thread has ended".to_owned();
        other.join().map_err(ended)??;
        this.join().map_err(ended)?
    })
}

/// What machine a figure is from.
fn machine() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // Not what this thread may use: it is pinned.
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    json!({ "cpu": model, "cores": cores, "kernel": kernel.trim() })
}
