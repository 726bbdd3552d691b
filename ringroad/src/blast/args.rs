//! The command line of `ringroad blast`.

use ringroad_ring::BURST;
use ringroad_switch::Gather;
use ringroad_traffic::{
    Mode, Settings, Touch,
    options::{DriverKind, LemOptions, Target, Without, gather, seconds},
    probe,
};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use std::{path::PathBuf, time::Duration};

/// Generate, receive or reflect test traffic on any vhost-user network device, or on an e1000
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad blast /run/ringroad/vm2.sock --mode reflect --seconds 60    reflect frames on one port, in another terminal\n  \
    ringroad blast /run/ringroad/vm1.sock                                send 64-byte frames for 10 s, count what returns\n  \
    ringroad blast /run/ringroad/vm1.sock --size imix --verify           mixed sizes, every byte written and checked\n  \
    ringroad blast /run/ringroad/vm1.sock --rate 1M --window 128         limit the rate and the frames in flight\n  \
    ringroad blast /run/ringroad/old.sock --driver lem --mit             drive a port of kind e1000, with few register accesses\n\n\
    The device can be a port of `ringroad serve` or of any other vhost-user back end. The first SIGINT (Ctrl-C) or SIGTERM\n\
    stops it early, with its summary; the second one at once.")]
pub struct Args {
    #[command(flatten)]
    pub target: Target,
    /// What the driver does
    #[arg(long, value_enum, default_value = "tx")]
    pub mode: Mode,
    /// Which driver; plain takes --size, --no-touch, --queue-size and --without, lem --size, --flows, --rate, --no-touch, --verify,
    /// --queue-size, and options of its own
    #[arg(long, value_enum, default_value = "blast")]
    pub driver: DriverKind,
    #[command(flatten)]
    pub lem: LemOptions,
    /// Maximum number of frames sent at once, and at most half of the ring
    #[arg(long, default_value_t = BURST as u16, value_parser = clap::value_parser!(u16).range(1..=BURST as i64))]
    pub burst: u16,
    /// Frame sizes in bytes, without FCS, used in turn: a list such as 64,1518, or imix (7 × 64, 4 × 594, 1 × 1518)
    #[arg(long, default_value = "64", value_parser = sizes)]
    pub size: Sizes,
    /// Frames per second, with an optional suffix k, M or G [default: unlimited]
    #[arg(long, value_parser = rate)]
    pub rate: Option<f64>,
    /// Maximum number of frames in flight [default: unlimited]
    #[arg(long)]
    pub window: Option<u64>,
    /// Number of flows (UDP source ports), used in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub flows: u16,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=32768))]
    pub queue_size: u32,
    /// How long to pause after a burst that was not full, while the device is the slower one: auto, off, or a time such as 8us
    #[arg(long, default_value = "auto", value_parser = gather)]
    pub gather: Gather,
    /// Neither write nor read frame contents: measures the rings alone
    #[arg(long, conflicts_with = "verify")]
    pub no_touch: bool,
    /// Write frames, but do not read those received, as testpmd's flowgen
    #[arg(long, conflicts_with_all = ["no_touch", "verify"])]
    pub no_read: bool,
    /// Write and check every byte of every frame
    #[arg(long)]
    pub verify: bool,
    /// Duration in seconds
    #[arg(long, default_value_t = 10.0, value_parser = seconds)]
    pub seconds: f64,
    /// Write the result as JSON to FILE (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Frame bytes per receive buffer; larger frames take several buffers [default: the largest of --size, at least 1518]
    #[arg(long, value_name = "BYTES", conflicts_with = "size", value_parser = clap::value_parser!(u16).range(64..))]
    pub buffer: Option<u16>,
    /// Pin the driver to this CPU
    #[arg(long)]
    pub cpu: Option<usize>,
    /// Sleep when idle, instead of polling
    #[arg(long)]
    pub event_driven: bool,
    /// If the device disconnects, wait up to SECONDS for it to return and resume, including frames in flight
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "10", value_parser = seconds)]
    pub reconnect: Option<f64>,
    #[command(flatten)]
    pub without: Without,
    /// Source MAC address
    #[arg(long, default_value = "02:00:00:00:00:01")]
    pub source: MacAddr,
    /// Destination MAC address
    #[arg(long, default_value = "02:00:00:00:00:02")]
    pub destination: MacAddr,
    /// Number of destination addresses, counted up from --destination and used in random order
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20), conflicts_with = "no_touch")]
    pub destinations: u32,
    /// Number of source addresses, counted up from --source and used in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20), conflicts_with = "no_touch")]
    pub sources: u32,
    /// Print a line of JSON each second to standard output, for `demo`
    #[arg(long, hide = true)]
    pub lines: bool,
}

#[derive(Clone, Debug)]
pub struct Sizes(pub Vec<usize>);

fn sizes(text: &str) -> Result<Sizes, String> {
    if text == "imix" {
        return Ok(Sizes([vec![64; 7], vec![594; 4], vec![1518]].concat()));
    }
    let size = |part: &str| match part.trim().parse::<usize>() {
        Ok(size) if (probe::MIN_SIZE..=probe::MAX_SIZE).contains(&size) => Ok(size),
        _ => Err(format!("expected sizes of {} to {}, or imix, found {part}", probe::MIN_SIZE, probe::MAX_SIZE)),
    };
    text.split(',').map(size).collect::<Result<_, _>>().map(Sizes)
}

fn rate(text: &str) -> Result<f64, String> {
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let factor = match unit {
        "" => 1.0,
        "k" | "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        _ => return Err(format!("expected a number with k, M or G, found {text}")),
    };
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number * factor),
        _ => Err(format!("expected a number of frames per second, such as 1.5M, found {text}")),
    }
}

/// Returns what the driver is to do.
pub fn settings(args: &Args) -> Settings {
    Settings {
        mode: args.mode,
        sizes: args.size.0.clone(),
        flows: args.flows,
        rate: args.rate,
        window: args.window,
        touch: match args {
            Args { verify: true, .. } => Touch::All,
            Args { no_touch: true, .. } => Touch::Nothing,
            Args { no_read: true, .. } => Touch::Sent,
            _ => Touch::Word,
        },
        addresses: Addresses { destination: args.destination, source: args.source },
        destinations: args.destinations,
        sources: args.sources,
        event_driven: args.event_driven,
        burst: args.burst.into(),
        gather: args.gather,
        reconnect: args.reconnect.map(Duration::from_secs_f64),
        ..Settings::default()
    }
}
