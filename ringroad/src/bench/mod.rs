//! `ringroad bench`: measures, always in pairs.

mod latency;
mod packed;
mod pvp;
mod rig;
mod switch;

use crate::Outcome;
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
#[command(after_help = "Example:\n  ringroad bench pvp --ring packed --size 64 --json pvp.json")]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// Frames reflected by a device on one core, ours against DPDK's net_vhost with macswap
    Pvp(pvp::Args),
    /// What each switch of a port's tuning is worth: all off, each alone, one after the other added
    Packed(packed::Args),
    /// Frames from guest to guest through two ports, ours against testpmd with two net_vhost ports
    Switch(switch::Args),
    /// The round trip of one frame, polling and event driven, ours against DPDK's net_vhost (which polls)
    Latency(latency::Args),
}

/// Runs one of them.
pub fn run(args: Args) -> Outcome {
    match args.bench {
        Bench::Pvp(args) => pvp::run(args),
        Bench::Packed(args) => packed::run(args),
        Bench::Switch(args) => switch::run(args),
        Bench::Latency(args) => latency::run(args),
    }
}

/// What the last column of a table means.
const LINE: &str =
    "line: a cache line's way from one CPU to the other and back, measured before each pair; rates follow it";

/// How long a cache line takes from one CPU to the other and back, in nanoseconds. Rates follow it, and where CPUs are virtual
/// it can change from minute to minute.
fn line_round_trip(cpus: [usize; 2]) -> Result<f64, String> {
    const TURNS: u64 = 5000;
    #[repr(align(128))]
    struct Line(AtomicU64);
    let (to, fro) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let pin = |cpu: usize| pin_current_thread(cpu).map_err(|error| format!("cannot run on CPU {cpu}: {error}"));
    let wait = |line: &Line, turn: u64| while line.0.load(Ordering::Acquire) < turn {};
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let pinned = pin(cpus[1]);
            for turn in 1..=TURNS {
                wait(&to, turn);
                fro.0.store(turn, Ordering::Release);
            }
            pinned
        });
        let this = scope.spawn(|| {
            let pinned = pin(cpus[0]);
            let mut start = Instant::now();
            for turn in 1..=TURNS {
                if turn == TURNS / 5 {
                    start = Instant::now();
                }
                to.0.store(turn, Ordering::Release);
                wait(&fro, turn);
            }
            pinned.map(|()| start.elapsed().as_nanos() as f64 / (TURNS - TURNS / 5) as f64)
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
