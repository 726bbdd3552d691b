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
    num::NonZero,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench vsock-stream                      every load event driven, and polling for 50us\n  \
    ringroad bench vsock-stream --worker-cpus 2,3    the workers not on the CPUs of the programs (0 and 1)\n  \
    ringroad bench vsock-stream --poll 0 --size 65536 --connections 1,2")]
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
    /// CPUs of the host's and of the guest's worker, which send what is queued [default: those below 4 that run no program, if
    /// there are four CPUs; else the CPUs of the programs, which the rows and the table then report]
    #[arg(long, value_name = "HOST,GUEST", value_parser = cpus)]
    worker_cpus: Option<[usize; 2]>,
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

/// Parses two CPUs.
fn cpus(text: &str) -> Result<[usize; 2], String> {
    let pair = text.split_once(',').and_then(|(host, guest)| Some([host.parse().ok()?, guest.parse().ok()?]));
    pair.ok_or_else(|| format!("expected two CPUs, as in 2,3, found {text}"))
}

/// A ratio is quotable if the queued rate of several connections is at least this part of that of one connection.
const HEALTHY: f64 = 0.9;

/// Returns whether the queued rate with several connections is healthy, compared with that of one connection; `None` for one
/// connection, and if that was not measured.
fn is_healthy(connections: u64, queued: f64, one: Option<f64>) -> Option<bool> {
    one.filter(|_| connections > 1).map(|one| queued >= HEALTHY * one)
}

/// Returns the mark of a ratio that must not be quoted.
fn mark(connections: u64, healthy: Option<bool>) -> &'static str {
    match healthy {
        Some(false) => " *",
        None if connections > 1 => " ?",
        _ => "",
    }
}

/// Returns the notes under the table.
fn notes(shared: bool, lines: &[Vec<String>]) -> String {
    let is_marked = |mark: &str| lines.iter().flatten().any(|column| column.ends_with(mark));
    let mut notes = format!("{LINE_NOTE}\n{SEED_NOTE}\n");
    if shared {
        notes +=
            "a queued sender shares its CPU with its worker: it waits for the CPU, which direct sending does not\n";
    }
    if is_marked(" *") {
        notes +=
            "*: unhealthy baseline, do not quote the ratio: the queued rate is below 0.9 of that of one connection\n";
    }
    if is_marked(" ?") {
        notes += "?: unknown baseline, do not quote the ratio: one connection (--connections 1) was not measured\n";
    }
    notes
}

impl Args {
    /// Returns the workers' CPUs on a machine with a number of CPUs, and whether programs run on one of them.
    fn workers(&self, cpus: usize) -> ([usize; 2], bool) {
        let programs = self.setup.programs();
        let mut free = (0..4).filter(|cpu| cpus >= 4 && !programs.contains(cpu));
        let workers = match (self.worker_cpus, free.next(), free.next()) {
            (Some(workers), ..) => workers,
            (None, Some(host), Some(guest)) => [host, guest],
            _ => programs,
        };
        (workers, workers.iter().any(|cpu| programs.contains(cpu)))
    }

    /// Returns all combinations. Loads of one connection come before those of several, which are compared with them.
    fn loads(&self) -> Result<Vec<Load>, String> {
        let (mut loads, mut numbers) = (Vec::new(), self.connections.clone());
        numbers.sort_unstable();
        for polling in &self.poll {
            let poll = poll(polling)?;
            for &direction in &self.direction {
                for &connections in &numbers {
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
    fn measure(&self, setup: &Setup, folder: &Folder, direct: bool, workers: [usize; 2]) -> Result<f64, String> {
        let ends = setup.connect(folder, direct, self.poll, workers)?;
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
            match received.load(Ordering::Relaxed) - before {
                0 => Err("no data arrived".into()),
                bytes => Ok(gbps(bytes, begun.elapsed())),
            }
        })
    }

    /// Whether it differs from another one in nothing but the number of connections, which is one there.
    fn is_single_of(&self, other: &Load) -> bool {
        let key = |load: &Load| (load.poll, load.direction, load.size);
        self.connections == 1 && key(self) == key(other)
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
    let (workers, shared) = args.workers(thread::available_parallelism().map_or(1, NonZero::get));
    let folder = Folder::new("vsock")?;
    let mut session = Session::new("vsock-stream", &setup.common, loads.len(), false);
    let (mut lines, mut singles) = (Vec::new(), Vec::new());
    for load in &loads {
        let Load { polling, direction, connections, size, .. } = load;
        let direction = name(direction);
        let what = format!("{direction}, {connections} × {size} B, poll {polling}");
        let rounds = session.rounds(&what, &WAYS, |&direct| load.measure(setup, &folder, direct, workers))?;
        let [queued, direct] = [0, 1].map(|way| rounds.of(way, |&rate| rate));
        let (rates, ratio) = ([Spread::of(&queued), Spread::of(&direct)], Spread::of_ratios(&direct, &queued));
        let [median, _] = rates.map(|rate| rate.median);
        singles.extend((*connections == 1).then_some((load, median)));
        let one = singles.iter().find(|(single, _)| single.is_single_of(load)).map(|&(_, rate)| rate);
        let healthy = is_healthy(*connections, median, one);
        let cell = json!({
            "direction": direction, "connections": connections, "size": size, "poll": polling, "unit": "Gb/s",
            "worker_cpus": workers, "shared_cpu": shared, "healthy": healthy,
        });
        let (row, mut last) = setup.row(cell, rates, ratio, rounds.line(), load.seed());
        let mut columns = vec![format!("poll {polling}, {direction}, {connections} × {} KiB", size >> 10)];
        columns.extend(rates.iter().flat_map(|rate| rate.columns(1)));
        if let Some(ratio) = last.first_mut() {
            ratio.push_str(mark(*connections, healthy));
        }
        lines.push([columns, last].concat());
        session.push(row)?;
    }
    let Common { pairs, seconds, .. } = setup.common;
    let ([host, guest], [host_worker, guest_worker]) = (setup.programs(), workers);
    let title = format!(
        "Gb/s of connections × bytes of a write; host: program on CPU {host}, worker on {host_worker}; guest: program on \
         CPU {guest}, worker on {guest_worker}; {pairs} pairs of {seconds} s, median and min–max"
    );
    let table = table(&["", "queued", "", "direct", "", "ratio", "", "seed", "line, ns"], &lines);
    session.print(&title, &(table + &notes(shared, &lines)));
    session.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{help, parse, try_parse};

    fn args(words: &str) -> Args {
        parse(words)
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

    #[test]
    fn one_connection_is_measured_before_several() {
        let loads = args("--size 4096,65536 --connections 4,1 --poll 0 --direction to-host,to-guest").loads().unwrap();
        assert_eq!(loads.iter().map(|load| load.connections).collect::<Vec<_>>(), [1, 1, 4, 4, 1, 1, 4, 4]);
        let singles: Vec<_> =
            loads.iter().map(|load| loads.iter().position(|other| other.is_single_of(load)).unwrap()).collect();
        assert_eq!(singles, [0, 1, 0, 1, 4, 5, 4, 5]);
    }

    #[test]
    fn workers_have_cpus_of_their_own_if_there_are_four() {
        assert_eq!(args("").workers(4), ([2, 3], false));
        assert_eq!(args("--driver-cpu 2 --device-cpu 3").workers(8), ([0, 1], false));
        // The host's program is on the device's CPU.
        assert_eq!([2, 3].map(|cpus| args("").workers(cpus)), [([1, 0], true); 2]);
        assert_eq!(args("--worker-cpus 2,3").workers(2), ([2, 3], false));
        assert_eq!(args("--worker-cpus 2,1").workers(8), ([2, 1], true));
        for wrong in ["2", "2,3,4", "2,x", "-1,2", ""] {
            assert!(try_parse::<Args>(&format!("--worker-cpus={wrong}")).is_err(), "{wrong}");
        }
        assert!(help::<Args>().contains("ringroad bench vsock-stream --worker-cpus 2,3"));
    }

    #[test]
    fn unhealthy_baselines_are_marked() {
        let marks = |connections, queued, one| {
            let healthy = is_healthy(connections, queued, one);
            (healthy, mark(connections, healthy))
        };
        assert_eq!(marks(2, 10.9, Some(19.0)), (Some(false), " *"));
        assert_eq!(marks(2, 17.2, Some(19.0)), (Some(true), ""));
        assert_eq!(marks(4, 9.0, Some(10.0)), (Some(true), ""));
        assert_eq!(marks(4, 8.9, Some(10.0)), (Some(false), " *"));
        assert_eq!(marks(4, 8.9, None), (None, " ?"));
        assert_eq!(marks(1, 10.0, Some(10.0)), (None, ""));
    }

    #[test]
    fn notes_explain_what_the_table_shows() {
        let line = |ratio: &str| vec!["to-guest".to_owned(), ratio.to_owned(), "95".to_owned()];
        let plain = notes(false, &[line("1.20")]);
        assert!(!plain.contains("shares its CPU") && !plain.contains("baseline"), "{plain}");
        let all = notes(true, &[line("6.38 *"), line("1.20"), line("2.00 ?")]);
        for part in ["shares its CPU with its worker", "*: unhealthy", "?: unknown", "seed: "] {
            assert!(all.contains(part), "{part}: {all}");
        }
    }
}
