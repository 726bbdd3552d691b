//! Command-line options that benches share.

use ringroad_traffic::options::{Ring, Without};
use std::path::PathBuf;

/// Options of every bench.
#[derive(clap::Args, Clone, Debug)]
pub struct Common {
    /// Number of pairs of runs, which take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pairs: u32,
    /// Duration of each run in seconds
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    #[command(flatten)]
    pub without: Without,
    /// CPU of the driver
    #[arg(long, default_value_t = 0)]
    pub driver_cpu: usize,
    /// CPU of the device
    #[arg(long, default_value_t = 1)]
    pub device_cpu: usize,
    /// How long our device pauses for a slower driver to fill its queue: auto, off, 8us (`workers.gather`)
    #[arg(long, default_value = "auto")]
    pub gather: String,
    /// Full bursts that our device takes from a queue before it serves the next one (`workers.turn`)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub turn: u64,
    /// Write the rows as JSON to FILE (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Common {
    /// Returns the part of a table's title that says how its figures were measured.
    pub fn runs(&self) -> String {
        format!("{} runs of {} s, median and min–max", self.pairs, self.seconds)
    }
}

/// Rings of the benches that measure both layouts with one size.
#[derive(Debug, clap::Args)]
pub struct Layouts {
    /// Ring layouts, as a list [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    pub ring: Vec<Ring>,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    pub queue_size: u32,
}
