//! Round trips from a program of the host to one of the guest and back, with direct against queued sending.

use crate::{
    figures::{LINE_NOTE, Spread},
    options::Common,
    session::Session,
    vsock_ends::{CID, Ends, PORT, SEED_NOTE, Setup, WAYS, message},
};
use ringroad_text::table;
use ringroad_traffic::{
    child::Folder,
    options::{pin, poll},
    vsock::{each_read, round_trips},
};
use ringroad_vsock::{Addr, Listener, SocketType, Stream};
use serde_json::json;
use std::{io::Write, net::Shutdown, thread, time::Duration};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench vsock-latency                    every size event driven, and polling without limit\n  \
    ringroad bench vsock-latency --poll 0,50us --size 64")]
pub struct Args {
    /// Message sizes in bytes, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096],
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: Vec<u64>,
    /// How long a waiting program polls the rings before it sleeps, as a list: 0 (event driven), 50us, unlimited
    #[arg(long, value_delimiter = ',', default_values = ["0", "unlimited"])]
    poll: Vec<String>,
    #[command(flatten)]
    setup: Setup,
}

/// Round-trip times in microseconds.
struct Times {
    mean: f64,
    p1: f64,
    p99: f64,
}

/// Measures round trips of one size on new rings.
fn ping(setup: &Setup, folder: &Folder, direct: bool, poll: Duration, size: usize) -> Result<Times, String> {
    let ends = setup.connect(folder, direct, poll, setup.programs())?;
    let (host, guest) = (ends.server.stack(), ends.client.stack());
    let Common { driver_cpu, device_cpu, seconds, .. } = setup.common;
    let times = thread::scope(|scope| {
        let listener = Listener::bind(guest, PORT, SocketType::Stream).map_err(message)?;
        let echo = scope.spawn(move || {
            pin("--driver-cpu", driver_cpu)?;
            let stream = listener.accept_within(Some(Duration::from_secs(5))).map_err(message)?;
            each_read(&stream, size, |bytes| (&stream).write_all(bytes)).map_err(message)
        });
        let times = scope.spawn(move || {
            pin("--device-cpu", device_cpu)?;
            let stream = Stream::connect(host, Addr { cid: CID, port: PORT }).map_err(message)?;
            round_trips(&stream, size, Duration::from_millis(100)).map_err(message)?;
            let times = round_trips(&stream, size, Duration::from_secs_f64(seconds)).map_err(message)?;
            stream.shutdown(Shutdown::Write);
            Ok::<_, String>(times)
        });
        let times = times.join().map_err(|_| "the host's program panicked")??;
        echo.join().map_err(|_| "the guest's program panicked")??;
        Ok::<_, String>(times)
    })?;
    check(&ends, direct)?;
    let percentile = |quantile: f64| times.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Times { mean: times.mean() / 1e3, p1: percentile(0.01), p99: percentile(0.99) })
}

/// Checks that packets were sent in the intended way.
fn check(ends: &Ends, direct: bool) -> Result<(), String> {
    for (end, ways) in [("host", ends.server.stack().report().ways), ("guest", ends.client.stack().report().ways)] {
        if direct && ways.direct <= ways.queued || !direct && ways.direct > 0 {
            return Err(format!("{end}: {} packets sent directly, {} queued", ways.direct, ways.queued));
        }
    }
    Ok(())
}

/// Returns the gain that the original work (the seed) reports for a size. Its programs sleep while they wait.
fn seed(size: u64, poll: Duration) -> Option<f64> {
    match size {
        _ if !poll.is_zero() => None,
        64 => Some(16.78 / 13.57),
        512 => Some(17.35 / 14.11),
        4096 => Some(19.87 / 14.96),
        _ => None,
    }
}

/// Measures every combination.
pub fn run(args: &Args) -> Result<(), String> {
    let Args { setup, size: sizes, poll: polls } = args;
    let folder = Folder::new("vsock")?;
    let mut session = Session::new("vsock-latency", &setup.common, polls.len() * sizes.len(), false);
    let mut lines = Vec::new();
    for polling in polls {
        let time = poll(polling)?;
        for &size in sizes {
            let name = format!("{size} B, poll {polling}");
            let rounds = session.rounds(&name, &WAYS, |&direct| ping(setup, &folder, direct, time, size as usize))?;
            let mean = |way: usize| rounds.of(way, |times| times.mean);
            let (means, ratio) = ([0, 1].map(|way| Spread::of(&mean(way))), Spread::of_ratios(&mean(0), &mean(1)));
            let p1 = [0, 1].map(|way| rounds.spread(way, |times| times.p1).median);
            let p99 = [0, 1].map(|way| rounds.spread(way, |times| times.p99).median);
            let cell = json!({
                "size": size, "poll": polling, "unit": "us",
                "before_p1": p1[0], "after_p1": p1[1], "before_p99": p99[0], "after_p99": p99[1],
            });
            let (row, last) = setup.row(cell, means, ratio, rounds.line(), seed(size, time));
            let mut columns = vec![name];
            for ((mean, p1), p99) in means.iter().zip(p1).zip(p99) {
                columns.extend(mean.columns(2));
                columns.extend([p1, p99].map(|time| format!("{time:.2}")));
            }
            lines.push([columns, last].concat());
            session.push(row)?;
        }
    }
    let Common { pairs, seconds, .. } = setup.common;
    let title = format!(
        "round trip host – guest – host in µs, a program and a worker on each end, one core for each end, \
         {pairs} pairs of {seconds} s, median and min–max"
    );
    let header = ["", "queued", "", "p1", "p99", "direct", "", "p1", "p99", "ratio", "", "seed", "line, ns"];
    session.print(&title, &format!("{}{LINE_NOTE}\n{SEED_NOTE}\n", table(&header, &lines)));
    session.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{help, parse};

    #[test]
    fn rows_are_event_driven_and_polled_by_default() {
        assert_eq!(parse::<Args>("").poll, ["0", "unlimited"]);
        assert_eq!(parse::<Args>("--poll 50us").poll, ["50us"]);
        assert!(help::<Args>().contains("ringroad bench vsock-latency --poll 0,50us"));
    }

    #[test]
    fn only_event_driven_rows_have_a_seed() {
        assert_eq!(seed(64, Duration::ZERO), Some(16.78 / 13.57));
        assert_eq!(
            [seed(64, Duration::MAX), seed(64, Duration::from_micros(50)), seed(100, Duration::ZERO)],
            [None; 3]
        );
    }
}
