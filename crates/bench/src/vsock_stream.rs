//! Throughput of vsock connections, with direct against queued sending.

use crate::{
    figures::{LINE_NOTE, Spread},
    options::Common,
    session::Session,
    vsock_ends::{PORT, SEED_NOTE, Setup, WAYS, message},
};
use ringroad_text::table;
use ringroad_traffic::{
    child::Folder,
    gbps,
    options::{name, pin, poll},
    vsock::each_read,
};
use ringroad_vsock::{Addr, Listener, Side, SocketType, Stack, Stream};
use serde_json::json;
use std::{
    io::Write,
    net::Shutdown,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sizes of each write in bytes, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 65536, 131_072],
          value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    size: Vec<u64>,
    /// Numbers of simultaneous connections, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4],
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    connections: Vec<u64>,
    /// Directions, as a list [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["to-guest", "to-host"], hide_default_value = true)]
    direction: Vec<Direction>,
    /// How long a waiting program polls the rings before it sleeps, as a list: 0 (event driven), 50us, unlimited
    #[arg(long, value_delimiter = ',', default_values = ["0", "50us"])]
    poll: Vec<String>,
    #[command(flatten)]
    setup: Setup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Direction {
    ToGuest,
    ToHost,
}

/// One combination of options.
struct Load {
    polling: String,
    poll: Duration,
    direction: Direction,
    connections: u64,
    size: u64,
}

impl Args {
    fn loads(&self) -> Result<Vec<Load>, String> {
        let mut loads = Vec::new();
        for polling in &self.poll {
            let poll = poll(polling)?;
            for &direction in &self.direction {
                for &connections in &self.connections {
                    let load = |&size: &u64| Load { polling: polling.clone(), poll, direction, connections, size };
                    loads.extend(self.size.iter().map(load));
                }
            }
        }
        Ok(loads)
    }
}

impl Load {
    /// Measures it on new rings. Returns Gb/s.
    fn measure(&self, setup: &Setup, folder: &Folder, direct: bool) -> Result<f64, String> {
        let ends = setup.connect(folder, direct, self.poll)?;
        let (host, guest) = (ends.server.stack(), ends.client.stack());
        let Common { driver_cpu, device_cpu, seconds, .. } = setup.common;
        let (rate, ways) = match self.direction {
            Direction::ToGuest => (self.run(host, guest, [device_cpu, driver_cpu], seconds)?, host.report().ways),
            Direction::ToHost => (self.run(guest, host, [driver_cpu, device_cpu], seconds)?, guest.report().ways),
        };
        if !direct && ways.direct > 0 {
            return Err(format!("{} packets sent directly, {} queued", ways.direct, ways.queued));
        }
        Ok(rate)
    }

    fn run<A: Side, B: Side>(
        &self,
        from: &Arc<Stack<A>>,
        to: &Arc<Stack<B>>,
        [from_cpu, to_cpu]: [usize; 2],
        seconds: f64,
    ) -> Result<f64, String> {
        let listener = Listener::bind(to, PORT, SocketType::Stream).map_err(message)?;
        let (peer, size) = (Addr { cid: to.cid(), port: PORT }, self.size as usize);
        let received = &AtomicU64::new(0);
        let end = Instant::now() + Duration::from_secs_f64(seconds + 0.2);
        thread::scope(|scope| {
            for _ in 0..self.connections {
                scope.spawn(move || {
                    pin("cannot run on CPU", from_cpu)?;
                    let mut stream = Stream::connect(from, peer).map_err(message)?;
                    let bytes = vec![0x5a; size];
                    while Instant::now() < end {
                        stream.write_all(&bytes).map_err(message)?;
                    }
                    stream.shutdown(Shutdown::Both);
                    Ok::<_, String>(())
                });
            }
            for _ in 0..self.connections {
                let stream = listener.accept_within(Some(Duration::from_secs(5))).map_err(message)?;
                scope.spawn(move || {
                    pin("cannot run on CPU", to_cpu)?;
                    let count = |bytes: &[u8]| {
                        received.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                        Ok(())
                    };
                    each_read(&stream, size.max(64 << 10), count).map_err(message)
                });
            }
            // The start is not measured.
            thread::sleep(Duration::from_millis(150));
            let (before, begun) = (received.load(Ordering::Relaxed), Instant::now());
            thread::sleep(Duration::from_secs_f64(seconds));
            Ok(gbps(received.load(Ordering::Relaxed) - before, begun.elapsed()))
        })
    }

    /// Returns the gain that the original work (the seed) reports. Its programs sleep while they wait.
    fn seed(&self) -> Option<f64> {
        if !self.poll.is_zero() {
            return None;
        }
        let size = [4, 64, 128].iter().position(|&kib| kib == self.size >> 10)?;
        let gains = match self.connections {
            1 => [10.5 / 6.87, 39.4 / 29.3, 39.9 / 29.5],
            2 => [17.8 / 10.5, 47.7 / 32.8, 48.5 / 33.2],
            4 => [16.9 / 12.7, 48.1 / 33.6, 50.5 / 34.2],
            _ => return None,
        };
        gains.get(size).copied()
    }
}

/// Measures every combination.
pub fn run(args: &Args) -> Result<(), String> {
    let (setup, loads) = (&args.setup, args.loads()?);
    let folder = Folder::new("vsock")?;
    let mut session = Session::new("vsock-stream", &setup.common, loads.len(), false);
    let mut lines = Vec::new();
    for load in &loads {
        let Load { polling, direction, connections, size, .. } = load;
        let direction = name(direction);
        let what = format!("{direction}, {connections} × {size} B, poll {polling}");
        let rounds = session.rounds(&what, &WAYS, |&direct| load.measure(setup, &folder, direct))?;
        let [queued, direct] = [0, 1].map(|way| rounds.of(way, |&rate| rate));
        let (rates, ratio) = ([Spread::of(&queued), Spread::of(&direct)], Spread::of_ratios(&direct, &queued));
        let cell = json!({
            "direction": direction, "connections": connections, "size": size, "poll": polling, "unit": "Gb/s",
        });
        let (row, last) = setup.row(cell, rates, ratio, rounds.line(), load.seed());
        let mut columns = vec![format!("poll {polling}, {direction}, {connections} × {} KiB", size >> 10)];
        columns.extend(rates.iter().flat_map(|rate| rate.columns(1)));
        lines.push([columns, last].concat());
        session.push(row)?;
    }
    let Common { pairs, seconds, .. } = setup.common;
    let title = format!(
        "Gb/s of connections × bytes of a write, programs on both ends, one core each, {pairs} pairs of {seconds} s, median and min–max"
    );
    let table = table(&["", "queued", "", "direct", "", "ratio", "", "seed", "line, ns"], &lines);
    session.print(&title, &format!("{table}{LINE_NOTE}\n{SEED_NOTE}\n"));
    session.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(words: &str) -> Args {
        Cli::parse_from(["bench"].into_iter().chain(words.split_whitespace())).args
    }

    #[test]
    fn event_driven_loads_come_before_polled_ones() {
        let loads = args("--size 4096 --connections 1,2 --direction to-host").loads().unwrap();
        let loads: Vec<_> =
            loads.iter().map(|load| (&*load.polling, load.connections, load.seed().is_some())).collect();
        // Only event-driven ones are comparable with the seed.
        assert_eq!(loads, [("0", 1, true), ("0", 2, true), ("50us", 1, false), ("50us", 2, false)]);
        assert_eq!(args("--poll unlimited").loads().unwrap().len(), 18);
        assert!(args("--poll 0,never").loads().is_err());
    }
}
