//! A quiet Linux guest beside one that the host floods: pings alone and beside the flood. What the flood costs others is to be the
//! switch's doing: the quiet guest and the pings have their CPU before what sends and receives the flood (SCHED_FIFO). An idle policy
//! for the flood would not do: where the kernel groups tasks by sessions (sched(7), autogroup), it counts within a session only.

use crate::{
    figures::{Spread, extend},
    lab::{Lab, add_network, command, enter, serve},
    options::Common,
    rig::on,
    session::{Rounds, Session},
};
use clap::ValueEnum;
use ringroad_text::table;
use ringroad_traffic::child::{Folder, Program};
use serde_json::{Value, json};
use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench flood --json flood.json    all, in about four minutes; needs root, busybox and scripts/peers all\n  \
    ringroad bench flood --way apart --poll 50us")]
pub struct Args {
    /// How the flood comes, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["apart", "drops", "shared", "queues"])]
    way: Vec<Way>,
    /// How long our switch polls before it sleeps (`workers.poll`)
    #[arg(long, default_value = "auto")]
    poll: String,
    /// Folder of the program `guests`
    #[arg(long, default_value = "scripts")]
    scripts: PathBuf,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    /// By an interface of its own
    Apart,
    /// By the interface of the pings, to a port that drops what it has no room for (`full = "drop"`)
    Drops,
    /// By the interface of the pings, whose queue stands still while the flooded port has no room
    Shared,
    /// The same, with an interface of eight queues, among which the host distributes its flows
    Queues,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Apart => "by an interface of its own",
            Way::Drops => "by the same interface, full = \"drop\"",
            Way::Shared => "by the same interface",
            Way::Queues => "by the same interface, of 8 queues",
        }
    }

    /// Returns the address of the quiet guest that is pinged.
    fn pinged(self) -> &'static str {
        match self {
            Way::Apart | Way::Drops | Way::Shared => "10.94.0.2",
            Way::Queues => "10.94.2.2",
        }
    }

    /// Returns where the flood is sent to: the discard port of the flooded guest.
    fn target(self) -> SocketAddr {
        let address = match self {
            Way::Apart => [10, 94, 1, 3],
            Way::Drops | Way::Shared => [10, 94, 0, 3],
            Way::Queues => [10, 94, 2, 3],
        };
        (address, 9).into()
    }
}

/// The result of one run.
#[derive(Clone, Copy, Default)]
struct Run {
    /// Of all pings, in microseconds; one that is lost takes [`LOST`].
    p50: f64,
    p99: f64,
    longest: f64,
    /// Share of the pings that were lost.
    lost: f64,
    /// Datagrams a second that the flood's sender sent, and that the flooded guest received.
    sent: f64,
    received: f64,
    /// Of all CPUs' time, what another machine had of the physical ones.
    stolen: f64,
}

/// How long an answer is waited for, in microseconds.
const LOST: f64 = 1e6;
/// The greatest share of the CPUs' time that may be stolen in a run. It is stolen in pieces of up to 15 ms, in which all pings wait:
/// with a hundredth of the time, the 99th percentile would be that of the pieces.
const STOLEN: f64 = 0.0025;
/// Seconds between two pings.
const EVERY: f64 = 0.002;

/// The switch and its guests: `quiet` and `flooded`.
struct Bed<'a> {
    lab: Lab,
    common: &'a Common,
    switch: Program,
    config: String,
    file: PathBuf,
}

impl<'a> Bed<'a> {
    fn new(args: &'a Args, folder: &Folder) -> Result<Bed<'a>, String> {
        let common = &args.common;
        let mut lab = Lab::new(args.scripts.clone(), "uml", folder)?;
        let sockets = ["quiet", "flooded"].map(|name| folder.file(&format!("{name}.sock")));
        let mut config = format!("[workers]\ncpus = [{}]\npoll = \"{}\"\n", common.device_cpu, args.poll);
        for (name, queues) in [("host", 1), ("flood", 1), ("queues", 8)] {
            config +=
                &format!("[[port]]\nname = \"{name}\"\nkind = \"tap\"\ninterface = \"rr-{name}\"\nqueues = {queues}\n");
        }
        // The flooded one is last: a line behind it is for its port.
        for (name, socket) in ["quiet", "flooded"].iter().zip(&sockets) {
            let socket = socket.display();
            config += &format!("[[port]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n");
        }
        let switch = serve(folder, "flood", &config, &sockets)?;
        // Several interfaces on one switch: each answers for its own address only.
        for (setting, value) in [("arp_ignore", "1"), ("arp_announce", "2")] {
            let file = format!("/proc/sys/net/ipv4/conf/all/{setting}");
            fs::write(&file, value).map_err(|error| format!("cannot write {file}: {error}"))?;
        }
        add_network("rr-host", "10.94.0", "cubic")?;
        add_network("rr-flood", "10.94.1", "cubic")?;
        add_network("rr-queues", "10.94.2", "cubic")?;
        let socket = |number: usize| sockets.get(number).map(|path| path.display().to_string()).unwrap_or_default();
        eprintln!("booting the quiet guest");
        lab.boot("uml", "quiet", &socket(0), "10.94.0.2", common.driver_cpu)?;
        eprintln!("booting the guest that is flooded");
        lab.boot("uml", "flooded", &socket(1), "10.94.1.3", common.driver_cpu)?;
        lab.run("quiet", 5.0, "ip addr add 10.94.2.2/24 dev eth0")?;
        let addresses = "ip addr add 10.94.0.3/24 dev eth0; ip addr add 10.94.2.3/24 dev eth0";
        lab.run("flooded", 5.0, &format!("{addresses}; nc -u -l -p 9 >/dev/null 2>&1 &"))?;
        lab.prefer("quiet")?;
        Ok(Bed { lab, common, switch, config, file: folder.file("flood.toml") })
    }

    /// Returns the datagrams that the flooded guest has received.
    fn received(&self) -> Result<f64, String> {
        let text = self.lab.run("flooded", 20.0, "cat /sys/class/net/eth0/statistics/rx_packets")?;
        text.trim().parse().map_err(|_| format!("expected the number of packets, found {text:?}"))
    }

    /// Measures pings of the quiet guest, alone or beside the flood.
    fn measure(&self, way: Way, flooded: bool) -> Result<Run, String> {
        let (stop, before, begun) = (AtomicBool::new(false), self.received()?, Instant::now());
        let jiffies = Jiffies::now()?;
        let cpu = self.common.driver_cpu;
        let (times, sent, seconds) = thread::scope(|scope| {
            let sender = flooded.then(|| scope.spawn(|| send(way.target(), cpu, &stop)));
            let times = on("--driver-cpu", cpu, || pings(way.pinged(), self.common.seconds));
            stop.store(true, Ordering::Relaxed);
            let seconds = begun.elapsed().as_secs_f64();
            let sent = sender.map_or(Ok(0), |sender| sender.join().unwrap_or_else(|_| Err("a thread panicked".into())));
            (times, sent, seconds)
        });
        let stolen = Jiffies::now()?.stolen_since(&jiffies);
        let (times, sent, received) = (times?, sent? as f64, self.received()? - before);
        let at = |share: f64| quantile(&times, share);
        let lost = times.iter().filter(|&&time| time == LOST).count() as f64 / times.len().max(1) as f64;
        let (sent, received) = (sent / seconds, received / seconds);
        Ok(Run { p50: at(0.5), p99: at(0.99), longest: at(1.0), lost, sent, received, stolen })
    }

    /// Has the flooded port wait or drop.
    fn set(&self, way: Way) -> Result<(), String> {
        let full = if way == Way::Drops { "drop" } else { "wait" };
        let config = format!("{}full = \"{full}\"\n", self.config);
        fs::write(&self.file, config).map_err(|error| format!("{}: {error}", self.file.display()))?;
        self.switch.reload();
        thread::sleep(Duration::from_millis(200));
        Ok(())
    }
}

/// Time of all CPUs since the start of the system, in whatever unit.
struct Jiffies {
    all: f64,
    stolen: f64,
}

impl Jiffies {
    /// Reads `/proc/stat`.
    fn now() -> Result<Jiffies, String> {
        let text = fs::read_to_string("/proc/stat").map_err(|error| format!("/proc/stat: {error}"))?;
        Jiffies::parse(&text)
            .ok_or_else(|| format!("/proc/stat: expected \"cpu\" and eight numbers, found {text:.80?}"))
    }

    /// proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal; what guests had is in the first two.
    fn parse(text: &str) -> Option<Jiffies> {
        let numbers = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let times: Vec<f64> = numbers.take(8).map(|number| number.parse().ok()).collect::<Option<_>>()?;
        Some(Jiffies { all: times.iter().sum(), stolen: *times.get(7)? })
    }

    fn stolen_since(&self, before: &Jiffies) -> f64 {
        (self.stolen - before.stolen) / (self.all - before.all).max(1.0)
    }
}

/// Pings an address for a time. Returns how long each answer took, in microseconds.
fn pings(address: &str, seconds: f64) -> Result<Vec<f64>, String> {
    let count = (seconds / EVERY) as usize;
    let words =
        ["--fifo", "1", "busybox", "ping", "-c", &count.to_string(), "-i", &EVERY.to_string(), "-W", "1", address];
    Ok(times(&command("chrt", &words)?, count))
}

/// Returns the times that `ping` has printed for `count` pings, in microseconds.
fn times(text: &str, count: usize) -> Vec<f64> {
    let time = |line: &str| line.split_once(" time=")?.1.split(' ').next()?.parse::<f64>().ok();
    let mut times: Vec<f64> = text.lines().filter_map(time).map(|ms| 1000.0 * ms).collect();
    times.resize(count.max(times.len()), LOST);
    times
}

/// Sends frames of 64 bytes as fast as it can until it is to stop; returns how many.
fn send(to: SocketAddr, cpu: usize, stop: &AtomicBool) -> Result<u64, String> {
    let failed = |error: std::io::Error| format!("the flood to {to}: {error}");
    on("--driver-cpu", cpu, || {
        let socket = UdpSocket::bind("0.0.0.0:0").map_err(failed)?;
        let mut sent = 0;
        while !stop.load(Ordering::Relaxed) {
            // 14 bytes of Ethernet, 20 of IPv4, 8 of UDP, and these. What the interface has no room for is lost.
            sent += u64::from(socket.send_to(&[0; 22], to).is_ok());
        }
        Ok(sent)
    })
}

/// Returns a quantile of times, without interpolation; of none, it is zero.
fn quantile(times: &[f64], share: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (sorted.len() as f64 * share) as usize;
    sorted.get(index).or(sorted.last()).copied().unwrap_or_default()
}

/// Returns the JSON row of one way, and its line of the table. The first variant is alone, the second one beside the flood.
fn report(args: &Args, way: Way, rounds: &Rounds<Run>) -> (Value, Vec<String>) {
    let spread = |variant: usize, of: fn(&Run) -> f64| rounds.spread(variant, of);
    let [alone, beside] = [0, 1].map(|variant| rounds.of(variant, |run| run.p99));
    // How much longer it takes: less is better.
    let ratio = Spread::of_ratios(&beside, &alone);
    let mut row = json!({
        "way": way.name(), "unit": "us", "poll": args.poll, "pairs": args.common.pairs,
        "p50_alone": spread(0, |run| run.p50).median, "p50_beside": spread(1, |run| run.p50).median,
        "longest_alone": spread(0, |run| run.longest).max, "longest_beside": spread(1, |run| run.longest).max,
        "lost_alone": spread(0, |run| run.lost).max, "lost_beside": spread(1, |run| run.lost).max,
        "stolen_alone": spread(0, |run| run.stolen).median, "stolen_beside": spread(1, |run| run.stolen).median,
        "flood_sent": spread(1, |run| run.sent).median, "flood_received": spread(1, |run| run.received).median,
    });
    let (alone, beside) = (Spread::of(&alone), Spread::of(&beside));
    alone.add_to(&mut row, ["p99_alone", "p99_alone_min", "p99_alone_max"]);
    beside.add_to(&mut row, ["p99_beside", "p99_beside_min", "p99_beside_max"]);
    ratio.add_to(&mut row, ["ratio", "min", "max"]);
    let [discarded, unsteady] = rounds.repeated();
    extend(&mut row, json!({ "at_most": 2.0, "discarded": discarded, "unsteady": unsteady }));
    let median = |variant: usize, of: fn(&Run) -> f64| format!("{:.0}", spread(variant, of).median);
    let mut line = vec![way.name().to_owned(), median(0, |run| run.p50), median(1, |run| run.p50)];
    line.extend([alone.columns(0), beside.columns(0), ratio.columns(2)].concat());
    line.extend([0, 1].map(|variant| format!("{:.0}", spread(variant, |run| run.longest).max)));
    line.push(format!("{:.2} %", 100.0 * spread(1, |run| run.lost).max));
    line.extend([0, 1].map(|variant| format!("{:.1} %", 100.0 * spread(variant, |run| run.stolen).median)));
    line.extend([discarded, unsteady].map(|count| count.to_string()));
    line.extend([median(1, |run| run.sent), median(1, |run| run.received)]);
    (row, line)
}

/// Measures every way.
pub fn run(args: &Args) -> Result<(), String> {
    if let Some(status) = enter()? {
        return if status.success() { Ok(()) } else { Err(format!("the bench in its network namespace: {status}")) };
    }
    command("chrt", &["--version"])?;
    let folder = Folder::new("flood")?;
    let mut session = Session::new("flood", &args.common, args.way.len(), false);
    let bed = Bed::new(args, &folder)?;
    let mut lines = Vec::new();
    for &way in &args.way {
        bed.set(way)?;
        let quiet = |run: &Run| run.stolen <= STOLEN;
        let rounds = session.rounds_if(way.name(), &[false, true], quiet, |&flooded| bed.measure(way, flooded))?;
        let (row, line) = report(args, way, &rounds);
        session.push(row)?;
        lines.push(line);
    }
    let title = format!(
        "ping of a quiet UML guest in us, alone and beside a flood of UDP 64 B from the host to another guest; {}",
        args.common.runs()
    );
    let header = [
        "the flood comes",
        "p50 alone",
        "beside",
        "p99 alone",
        "",
        "p99 beside",
        "",
        "ratio",
        "",
        "longest alone",
        "beside",
        "lost",
        "stolen alone",
        "beside",
        "discarded",
        "kept",
        "flood sent/s",
        "received/s",
    ];
    session.print(&title, &table(&header, &lines));
    println!(
        "stolen: time that the hypervisor gave to other machines while a CPU of this one had work; pings wait that long, too\n\
         discarded: pairs repeated because more than {:.2} % was stolen in one of them; kept: in spite of it",
        100.0 * STOLEN
    );
    session.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        let times: Vec<f64> = (0..200).rev().map(f64::from).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| quantile(&times, share)), [0.0, 100.0, 198.0, 199.0]);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn pings_that_are_lost_take_as_long_as_they_were_waited_for() {
        let text = "PING 10.94.0.2 (10.94.0.2): 56 data bytes\n64 bytes from 10.94.0.2: seq=0 ttl=64 time=0.125 ms\n\
                    64 bytes from 10.94.0.2: seq=2 ttl=64 time=12.500 ms\n\n3 packets transmitted";
        assert_eq!(times(text, 3), [125.0, 12_500.0, LOST]);
    }

    #[test]
    fn the_ratio_is_of_the_p99_beside_the_flood_to_that_alone() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let args = Line::parse_from(["flood"]).args;
        let run = |p99: f64| Run { p99, ..Run::default() };
        let rounds = Rounds::new(vec![vec![run(100.0), run(200.0)], vec![run(150.0), run(500.0)]]);
        let (row, line) = report(&args, Way::Apart, &rounds);
        assert_eq!(
            (row["ratio"].as_f64(), row["min"].as_f64(), row["max"].as_f64()),
            (Some(2.0), Some(1.5), Some(2.5))
        );
        assert_eq!((row["p99_alone"].as_f64(), row["p99_beside"].as_f64()), (Some(150.0), Some(325.0)));
        assert_eq!(line.len(), 18, "a column for each title");
    }

    #[test]
    fn time_that_was_stolen() {
        let [before, after] = ["cpu  100 0 50 800 10 0 10 30 0 0\ncpu0 1", "cpu  150 0 50 840 10 0 10 40 5 0\n"]
            .map(|text| Jiffies::parse(text).unwrap());
        assert_eq!(after.stolen_since(&before), 0.1);
        assert_eq!(before.stolen_since(&before), 0.0, "no time has passed");
        assert!(
            ["", "cpu0 1 2 3", "cpu  1 2 3 4 5 6 7", "cpu  1 2 3 4 5 6 7 x"]
                .iter()
                .all(|text| Jiffies::parse(text).is_none())
        );
    }

    #[test]
    fn the_flood_goes_to_one_guest_by_either_interface() {
        let [apart, drops, shared, queues] = [Way::Apart, Way::Drops, Way::Shared, Way::Queues].map(Way::target);
        assert!(apart != shared && drops == shared && queues != shared);
        assert_eq!([apart, shared, queues].map(|to| to.port()), [9; 3]);
    }
}
