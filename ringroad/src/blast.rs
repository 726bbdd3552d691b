//! `ringroad blast`: a virtio-net driver (virtio 1.3, 5.1) that sends, receives or reflects test traffic on a vhost-user device; or
//! the e1000's, on a vfio-user device. Command line and summary; the drivers are in the crate `traffic`. `demo` starts this command,
//! too.

mod lem;

use crate::outcome::Outcome;
use ringroad_host::{cpu_time, vhost_user::Connector};
use ringroad_net::bits;
use ringroad_ring::BURST;
use ringroad_switch::Gather;
use ringroad_text::{count, save, table, time};
use ringroad_traffic::{
    Mode, PLAIN_BURST, Plain, Settings, Totals, Touch, Traffic, gbps,
    options::{DriverKind, LemOptions, Ring, Target, Without, gather, name, pin, seconds},
    probe,
};
use ringroad_wire::ethernet::{Addresses, MacAddr};
use serde_json::json;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::{io, path::PathBuf, process::ExitCode, time::Duration};

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
    target: Target,
    /// What the driver does
    #[arg(long, value_enum, default_value = "tx")]
    mode: Mode,
    /// Which driver; plain takes --size, --no-touch, --queue-size and --without, lem --size, --flows, --rate, --no-touch, --verify,
    /// --queue-size, and options of its own
    #[arg(long, value_enum, default_value = "blast")]
    driver: DriverKind,
    #[command(flatten)]
    lem: LemOptions,
    /// Maximum number of frames sent at once, and at most half of the ring
    #[arg(long, default_value_t = BURST as u16, value_parser = clap::value_parser!(u16).range(1..=BURST as i64))]
    burst: u16,
    /// Frame sizes in bytes, without FCS, used in turn: a list such as 64,1518, or imix (7 × 64, 4 × 594, 1 × 1518)
    #[arg(long, default_value = "64", value_parser = sizes)]
    size: Sizes,
    /// Frames per second, with an optional suffix k, M or G [default: unlimited]
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,
    /// Maximum number of frames in flight [default: unlimited]
    #[arg(long)]
    window: Option<u64>,
    /// Number of flows (UDP source ports), used in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    flows: u16,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=32768))]
    queue_size: u32,
    /// How long to pause after a burst that was not full, while the device is the slower one: auto, off, or a time such as 8us
    #[arg(long, default_value = "auto", value_parser = gather)]
    gather: Gather,
    /// Neither write nor read frame contents: measures the rings alone
    #[arg(long, conflicts_with = "verify")]
    no_touch: bool,
    /// Write and check every byte of every frame
    #[arg(long)]
    verify: bool,
    /// Duration in seconds
    #[arg(long, default_value_t = 10.0, value_parser = seconds)]
    seconds: f64,
    /// Write the result as JSON to FILE (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Frame bytes per receive buffer; larger frames take several buffers [default: the largest of --size, at least 1518]
    #[arg(long, value_name = "BYTES", conflicts_with = "size", value_parser = clap::value_parser!(u16).range(64..))]
    buffer: Option<u16>,
    /// Pin the driver to this CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Sleep when idle, instead of polling
    #[arg(long)]
    event_driven: bool,
    /// If the device disconnects, wait up to SECONDS for it to return and resume, including frames in flight
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "10", value_parser = seconds)]
    reconnect: Option<f64>,
    #[command(flatten)]
    without: Without,
    /// Source MAC address
    #[arg(long, default_value = "02:00:00:00:00:01")]
    source: MacAddr,
    /// Destination MAC address
    #[arg(long, default_value = "02:00:00:00:00:02")]
    destination: MacAddr,
    /// Number of destination addresses, counted up from --destination and used in random order
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20), conflicts_with = "no_touch")]
    destinations: u32,
    /// Number of source addresses, counted up from --source and used in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20), conflicts_with = "no_touch")]
    sources: u32,
    /// Print a line of JSON each second to standard output, for `demo`
    #[arg(long, hide = true)]
    lines: bool,
}

#[derive(Clone, Debug)]
struct Sizes(Vec<usize>);

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

/// Runs the driver for the requested time.
pub fn run(args: Args) -> Outcome {
    if args.driver == DriverKind::Lem {
        if let Some(cpu) = args.cpu {
            pin("--cpu", cpu)?;
        }
        return lem::run(&args);
    }
    if let Some(option) = args.lem.given() {
        return Err(format!("{option} is for --driver lem").into());
    }
    let Target { socket, listen, ring } = &args.target;
    if *ring == Ring::Split && !args.queue_size.is_power_of_two() {
        return Err(format!("--queue-size {}: a split ring needs a power of two", args.queue_size).into());
    }
    if let (DriverKind::Plain, Some(option)) = (args.driver, beyond_plain(&args)) {
        return Err(format!(
            "--driver plain sends at full rate and knows no {option}; leave it out, or use --driver blast"
        )
        .into());
    }
    if let Some(cpu) = args.cpu {
        pin("--cpu", cpu)?;
    }
    let settings = settings(&args);
    let frame = args.buffer.map_or(settings.longest().max(1518), usize::from);
    let connector = Connector {
        listen: *listen,
        patience: Duration::from_secs(if *listen { 60 } else { 1 }),
        ..args.without.connector(socket, *ring, args.queue_size, frame)
    };
    let mut connection = connector.connect()?;
    if *ring == Ring::Packed && connection.acked & bits::RING_PACKED == 0 {
        return Err("the device does not offer VIRTIO_F_RING_PACKED; use --ring split".into());
    }
    stop_on_signals(&settings)?;
    let time = Duration::from_secs_f64(args.seconds);
    let (totals, disconnected) = if args.driver == DriverKind::Plain {
        let mut plain = Plain::new(connection, settings)
            .ok_or_else(|| format!("--driver plain: --queue-size must be more than {PLAIN_BURST}"))?;
        (plain.run(time, second(args.lines))?, plain.is_closed())
    } else {
        let totals = Traffic::new(settings, &mut connection.driver).run(&mut connection, time, second(args.lines))?;
        (totals, connection.is_closed())
    };
    let result = result(&args, &totals);
    if args.lines {
        println!("{result}");
    } else {
        summary(&args, &totals);
    }
    if let Some(file) = &args.json {
        save(file, &result)?;
    }
    if disconnected {
        let advice = if args.reconnect.is_some() { "" } else { "; use --reconnect to wait for it and resume" };
        return Err(format!("the device at {} has disconnected{advice}", socket.display()).into());
    }
    let lost = totals.left.is_some_and(|left| left.under_way > 0 || left.missing != Some(0));
    Ok(if totals.errors > 0 || lost { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Ends the run early at a signal, and the program at the second one.
fn stop_on_signals(settings: &Settings) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag clear and sets it; the second one finds it set and exits.
        flag::register_conditional_shutdown(signal, 1, settings.stop.clone())?;
        flag::register(signal, settings.stop.clone())?;
    }
    Ok(())
}

/// Returns the first option given that the plain driver does not have.
fn beyond_plain(args: &Args) -> Option<&'static str> {
    let given = [
        (args.mode != Mode::Tx, "--mode"),
        (args.rate.is_some(), "--rate"),
        (args.window.is_some(), "--window"),
        (args.burst != BURST as u16, "--burst"),
        (args.verify, "--verify"),
        (args.destinations > 1, "--destinations"),
        (args.sources > 1, "--sources"),
        (args.event_driven, "--event-driven"),
        (args.reconnect.is_some(), "--reconnect"),
    ];
    given.into_iter().find(|(given, _)| *given).map(|(_, option)| option)
}

fn settings(args: &Args) -> Settings {
    Settings {
        mode: args.mode,
        sizes: args.size.0.clone(),
        flows: args.flows,
        rate: args.rate,
        window: args.window,
        touch: match args {
            Args { verify: true, .. } => Touch::All,
            Args { no_touch: true, .. } => Touch::Nothing,
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

/// Returns a function that prints what has happened since its last call, as text or as `lines` of JSON.
fn second(lines: bool) -> impl FnMut(&Totals) {
    let mut before = (0, 0, cpu_time());
    move |totals| {
        let (sent, received, cpu) = (totals.sent - before.0, totals.received - before.1, cpu_time());
        let (busy, second) = ((cpu - before.2).as_secs_f64() * 100.0, totals.time.as_secs());
        before = (totals.sent, totals.received, cpu);
        let errors = totals.errors;
        if lines {
            println!(
                "{}",
                json!({ "second": second, "sent": sent, "received": received, "errors": errors, "cpu_percent": busy })
            );
        } else {
            let [sent, received] = [sent, received].map(|frames| frames as f64 / 1e6);
            println!(
                "{second:>4} s   sent {sent:7.3} Mpps   received {received:7.3} Mpps   errors {errors}   CPU {busy:.0} %"
            );
        }
    }
}

fn result(args: &Args, totals: &Totals) -> serde_json::Value {
    let percentile = |p: f64| (!totals.round_trip.is_empty()).then(|| totals.round_trip.value_at_quantile(p));
    let recovery = (!totals.recovery.is_empty()).then(|| {
        let times = &totals.recovery;
        json!({ "min": times.min(), "p50": times.value_at_quantile(0.5), "max": times.max(), "samples": times.len() })
    });
    json!({
        "blast": name(&args.mode),
        "ring": name(&args.target.ring),
        "queue_size": args.queue_size,
        "sizes": args.size.0,
        "seconds": totals.time.as_secs_f64(),
        "sent": totals.sent,
        "received": totals.received,
        "errors": totals.errors,
        "duplicates": totals.duplicates,
        "foreign": totals.foreign,
        "reconnects": totals.reconnects,
        "recovery_ns": recovery,
        "not_returned": totals.left.map(|left| left.under_way),
        "missing": totals.left.and_then(|left| left.missing),
        "sent_mpps": totals.sent_mpps(),
        "received_mpps": totals.received_mpps(),
        "sent_gbps": gbps(totals.sent_bytes, totals.time),
        "received_gbps": gbps(totals.received_bytes, totals.time),
        "round_trip_ns": { "p50": percentile(0.5), "p99": percentile(0.99), "samples": totals.round_trip.len() },
        "cpu_seconds": cpu_time().as_secs_f64(),
    })
}

fn summary(args: &Args, totals: &Totals) {
    let row = |name: &str, frames: u64, mpps: f64, bytes: u64| {
        vec![name.to_owned(), count(frames), format!("{mpps:.3}"), format!("{:.2}", gbps(bytes, totals.time))]
    };
    let rows = [
        row("sent", totals.sent, totals.sent_mpps(), totals.sent_bytes),
        row("received", totals.received, totals.received_mpps(), totals.received_bytes),
    ];
    print!("\n{}", table(&["", "frames", "Mpps", "Gb/s"], &rows));
    if !totals.round_trip.is_empty() {
        let at = |quantile| time(totals.round_trip.value_at_quantile(quantile));
        println!("round trip  p50 {}  p99 {}  ({} frames timed)", at(0.5), at(0.99), count(totals.round_trip.len()));
    }
    if totals.foreign > 0 {
        println!("foreign frames received: {}", count(totals.foreign));
    }
    if totals.reconnects > 0 {
        println!("reconnects to the device: {}", count(totals.reconnects));
    }
    if !totals.recovery.is_empty() {
        let [min, median, max] =
            [totals.recovery.min(), totals.recovery.value_at_quantile(0.5), totals.recovery.max()].map(time);
        println!("from disconnect to the next frame  min {min}  median {median}  max {max}");
    }
    if let Some(left) = totals.left {
        let missing = left.missing.map_or("unknown".into(), |missing| count(missing.into()));
        println!(
            "at the end  {} frames not returned by the device, {missing} buffers lost by it, {} duplicate frames",
            count(left.under_way as u64),
            count(totals.duplicates)
        );
    }
    println!("payload errors {}{}", totals.errors, if args.verify { "" } else { " (--verify checks every byte)" });
}
