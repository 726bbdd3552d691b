//! `ringroad bench`: measures, always in pairs.

mod pvp;

use crate::Outcome;
use serde_json::{Value, json};
use std::fs;

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
}

/// Runs one of them.
pub fn run(args: Args) -> Outcome {
    match args.bench {
        Bench::Pvp(args) => pvp::run(args),
    }
}

/// What machine a figure is from.
fn machine() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    json!({ "cpu": model, "cores": cores, "kernel": kernel.trim() })
}
