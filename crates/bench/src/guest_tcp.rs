//! TCP and UDP of real Linux guests through ringroad, against the same guests without it: User-Mode Linux on its own vector driver,
//! QEMU on its own tap netdev, also with its own e1000, guest to guest over a Linux bridge.

mod costs;

use crate::{
    figures::{RATIO, Spread, extend},
    lab::{Lab, add_network, add_tap, command, enter, iperf3_report, iperf3_server, round_trips, serve},
    options::Common,
    rig::on,
    session::{Rounds, Session},
};
use clap::ValueEnum;
use costs::{Costs, Counts, Medians, per_packet};
use ringroad_text::table;
use ringroad_traffic::child::{Folder, Program, cpu_time};
use serde_json::{Value, json};
use std::{fmt, net::SocketAddr, path::PathBuf, thread, time::Duration};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench guest-tcp --json guest-tcp.json          all, in about ten minutes; needs root and scripts/peers all\n  \
    ringroad bench guest-tcp --guest uml --way out,in\n  \
    ringroad bench guest-tcp --way round-trip --poll 50us   our switch polls for 50 µs before it sleeps\n  \
    ringroad bench guest-tcp --way out --window 64K         senders that wait for their acknowledgements\n  \
    ringroad bench guest-tcp --guest e1000                  needs scripts/peers e1000")]
pub struct Args {
    /// Guests, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["uml", "qemu"])]
    guest: Vec<Guest>,
    /// What is measured, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["out", "in", "between", "udp", "round-trip"])]
    way: Vec<Way>,
    /// How long our switch polls before it sleeps (`workers.poll`)
    #[arg(long, default_value = "auto")]
    poll: String,
    /// How long the interrupt for sent frames, or for acknowledgements, may wait (`port.interrupt_delay`); an e1000's driver sets that itself
    #[arg(long, default_value = "300us")]
    interrupt_delay: String,
    /// How long the thread that serves an e1000's registers polls for the next access (`port.access_poll`)
    #[arg(long, default_value = "400us")]
    access_poll: String,
    /// How our e1000's interrupts are moderated (`port.mitigation`): true, false, or clamped, as QEMU's are
    #[arg(long, default_value = "true")]
    mitigation: String,
    /// TCP congestion control of what the host sends; the guests have their kernels' default, cubic
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// Window of each TCP connection, `iperf3 -w`, as 32K or 1M; without, the kernels choose
    #[arg(long, value_name = "SIZE")]
    window: Option<String>,
    /// How often the guests boot; the pairs are shared among the boots
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    boots: u32,
    /// CPU of our switch's worker, if not that of the device: that of the guest, for example, where QEMU's own devices work
    #[arg(long, value_name = "CPU")]
    worker_cpu: Option<usize>,
    /// Folder of the program `guests`
    #[arg(long, default_value = "scripts")]
    scripts: PathBuf,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Guest {
    /// Linux 7 under User-Mode Linux
    Uml,
    /// Linux 6.1 under QEMU, without KVM
    Qemu,
    /// The same with an emulated network card, driven by the guest's e1000 driver
    E1000,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    /// TCP from the guest to the host
    Out,
    /// TCP from the host to the guest
    In,
    /// TCP from one guest to another
    Between,
    /// UDP from the guest to the host, frames of 64 bytes
    Udp,
    /// Round trip of one byte over TCP, host to guest and back
    RoundTrip,
}

impl Guest {
    fn name(self) -> &'static str {
        match self {
            Guest::Uml => "uml",
            Guest::Qemu => "qemu",
            Guest::E1000 => "e1000",
        }
    }

    fn peer(self) -> &'static str {
        match self {
            Guest::Uml => "UML's vector TAP (depth=128, gro=1)",
            Guest::Qemu => "QEMU's tap netdev",
            Guest::E1000 => "QEMU's own e1000 on its tap netdev",
        }
    }

    /// Returns what the lines of its device in /proc/interrupts contain; `None`: the peer's device has others.
    fn interrupt(self) -> Option<&'static str> {
        match self {
            Guest::Uml => None,
            Guest::Qemu => Some("virtio"),
            Guest::E1000 => Some("eth0"),
        }
    }
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Out => "guest to host",
            Way::In => "host to guest",
            Way::Between => "guest to guest",
            Way::Udp => "UDP 64 B from the guest",
            Way::RoundTrip => "TCP round trip, p50",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Way::Out | Way::In | Way::Between => "Gb/s",
            Way::Udp => "frames/s",
            Way::RoundTrip => "us",
        }
    }

    fn digits(self) -> usize {
        match self {
            Way::Udp => 0,
            Way::RoundTrip => 1,
            _ => 2,
        }
    }
}

/// Whose way a guest is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Peer,
}

const SIDES: [Side; 2] = [Side::Ours, Side::Peer];

impl fmt::Display for Side {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Side::Ours => "ours",
            Side::Peer => "peer",
        })
    }
}

/// The result of one run.
#[derive(Clone, Copy)]
struct Run {
    figure: f64,
    /// TCP segments sent again.
    retransmits: f64,
    /// What each packet has cost, if the guest counts interrupts.
    costs: Option<Costs>,
}

impl Run {
    fn new(figure: f64, retransmits: f64) -> Run {
        Run { figure, retransmits, costs: None }
    }
}

/// The guests of one kind, of both sides, and what serves ours.
struct Bed<'a> {
    lab: Lab,
    guest: Guest,
    args: &'a Args,
    folder: &'a Folder,
    programs: Vec<Program>,
}

/// The network of the host's interface and one guest, or of two guests: those of all kinds are there at once.
fn network(guest: Guest, side: Side, pair: bool) -> String {
    format!("10.{}.{}", 91 + usize::from(side == Side::Peer), 2 * guest as usize + usize::from(pair))
}

fn guest_name(side: Side, number: usize) -> String {
    format!("{side}{number}")
}

impl<'a> Bed<'a> {
    /// Adds the peer's interfaces.
    fn new(args: &'a Args, guest: Guest, folder: &'a Folder) -> Result<Bed<'a>, String> {
        let lab = Lab::new(args.scripts.clone(), guest.name(), folder)?;
        let bed = Bed { lab, guest, args, folder, programs: Vec::new() };
        if bed.has_host() {
            let interface = bed.peer_interface(0);
            add_tap(&interface)?;
            add_network(&interface, &network(guest, Side::Peer, false), &args.congestion)?;
        }
        if bed.has_pair() {
            let bridge = format!("br-{}", guest.name());
            command("ip", &["link", "add", &bridge, "type", "bridge", "forward_delay", "0"])?;
            command("ip", &["link", "set", &bridge, "up"])?;
            for number in [1, 2] {
                let interface = bed.peer_interface(number);
                add_tap(&interface)?;
                command("ip", &["link", "set", &interface, "master", &bridge])?;
            }
        }
        Ok(bed)
    }

    /// Tells whether guest 0, which is connected to the host, is needed.
    fn has_host(&self) -> bool {
        self.args.way.iter().any(|&way| way != Way::Between)
    }

    /// Tells whether guests 1 and 2, which are connected to each other, are needed.
    fn has_pair(&self) -> bool {
        self.args.way.contains(&Way::Between)
    }

    fn socket(&self, number: usize) -> PathBuf {
        self.folder.file(&format!("{}-{number}.sock", self.guest.name()))
    }

    fn peer_interface(&self, number: usize) -> String {
        format!("t{number}-{}", self.guest.name())
    }

    /// Returns the `[[port]]` section of a guest of ours.
    fn port(&self, number: usize) -> String {
        let Args { access_poll, interrupt_delay, mitigation, .. } = self.args;
        // An emulated guest may not run for longer than the default; QEMU's own devices wait for it without limit.
        let limits = if self.guest == Guest::Uml { "" } else { "limits = { wait = \"100ms\" }\n" };
        let kind = match self.guest {
            Guest::E1000 => {
                let mitigation = if mitigation == "clamped" { "\"clamped\"" } else { mitigation };
                format!("kind = \"e1000\"\naccess_poll = \"{access_poll}\"\nmitigation = {mitigation}\n")
            }
            _ => format!("kind = \"vhost-user\"\ninterrupt_delay = \"{interrupt_delay}\"\n"),
        };
        format!("[[port]]\nname = \"vm{number}\"\nsocket = \"{}\"\n{kind}{limits}", self.socket(number).display())
    }

    /// Ends the guests and our switches, and starts them anew.
    fn boot(&mut self) -> Result<(), String> {
        self.lab.stop()?;
        self.programs.clear();
        let (guest, common) = (self.guest.name(), &self.args.common);
        let worker = self.args.worker_cpu.unwrap_or(common.device_cpu);
        let workers = format!("[workers]\ncpus = [{worker}]\npoll = \"{}\"\n", self.args.poll);
        let mut numbers = Vec::new();
        if self.has_host() {
            let interface = format!("rr-{guest}");
            let tap = format!("[[port]]\nname = \"host\"\nkind = \"tap\"\ninterface = \"{interface}\"\n");
            let config = workers.clone() + &self.port(0) + &tap;
            self.programs.push(serve(self.folder, &format!("{guest}-host"), &config, &[self.socket(0)])?);
            add_network(&interface, &network(self.guest, Side::Ours, false), &self.args.congestion)?;
            numbers.push(0);
        }
        if self.has_pair() {
            let (config, sockets) = (workers + &self.port(1) + &self.port(2), [1, 2].map(|number| self.socket(number)));
            self.programs.push(serve(self.folder, &format!("{guest}-pair"), &config, &sockets)?);
            numbers.extend([1, 2]);
        }
        for side in SIDES {
            for &number in &numbers {
                let place = match side {
                    Side::Ours => self.socket(number).display().to_string(),
                    Side::Peer => format!("tap:{}", self.peer_interface(number)),
                };
                // One core for the guest and one for the rest; of two guests, a core each.
                let cpu = if number == 2 { common.device_cpu } else { common.driver_cpu };
                let address = format!("{}.{}", network(self.guest, side, number > 0), 2 + number);
                eprint!("\r{:79}", format!("booting {guest} guest {number} ({side})"));
                self.lab.boot(guest, &guest_name(side, number), &place, &address, cpu)?;
            }
        }
        Ok(())
    }

    /// Returns the packets that a guest has sent and received so far, and what they have cost.
    fn counts(&self, (way, side): (Way, Side), interrupt: &str) -> Result<Counts, String> {
        let guest = guest_name(side, usize::from(way == Way::Between));
        // A card's driver reads its counters every two seconds, or for ethtool.
        let command = format!(
            "ethtool -S eth0 >/dev/null 2>&1; awk '/{interrupt}/ {{ n += $2 }} END {{ print n + 0 }}' /proc/interrupts; \
             cd /sys/class/net/eth0/statistics; awk '{{ n += $1 }} END {{ print n }}' tx_packets rx_packets"
        );
        let text = self.lab.run(&guest, 5.0, &command)?;
        let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let &[interrupts, packets] = numbers.as_slice() else {
            return Err(format!("expected interrupts and packets of {guest}, found {text:?}"));
        };
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let time = micros(cpu_time(self.lab.process(&guest)?));
        // Of two switches, the second one has the pair; two cards have one table.
        let ours = (side == Side::Ours).then(|| self.programs.get(usize::from(way == Way::Between && self.has_host())));
        let Some(switch) = ours.flatten() else {
            return Ok(Counts { packets, costs: [interrupts, f64::NAN, f64::NAN, time, f64::NAN] });
        };
        let exits = (way != Way::Between).then(|| switch.counters()).transpose()?;
        let [reads, writes] = exits.and_then(|report| costs::exits(&report)).unwrap_or([f64::NAN; 2]);
        Ok(Counts { packets, costs: [interrupts, reads, writes, time, micros(switch.cpu_time())] })
    }

    /// Measures one way of one side, and what its packets cost.
    fn measure(&self, way: Way, side: Side) -> Result<Run, String> {
        let Some(interrupt) = self.guest.interrupt() else { return self.transfer(way, side) };
        let before = self.counts((way, side), interrupt)?;
        let run = self.transfer(way, side)?;
        let after = self.counts((way, side), interrupt)?;
        Ok(Run { costs: Some(per_packet(&before, &after)), ..run })
    }

    fn transfer(&self, way: Way, side: Side) -> Result<Run, String> {
        // A port of its own for each test: the last one's may be in TIME_WAIT.
        const PORT: u16 = 5201;
        let (seconds, host) = (self.args.common.seconds, format!("{}.1", network(self.guest, side, false)));
        let time = format!("-t {} -O 1 -J", seconds.max(1.0).ceil());
        let window = self.args.window.as_ref().map(|size| format!("-w {size}")).unwrap_or_default();
        let run = |guest: usize, command: &str| {
            iperf3_report(&self.lab.run(&guest_name(side, guest), seconds + 2.0, command)?)
        };
        match way {
            Way::Out | Way::In => {
                let _server = iperf3_server(self.args.common.device_cpu, PORT)?;
                let reverse = if way == Way::In { "-R" } else { "" };
                tcp(&run(0, &format!("iperf3 -c {host} -p {PORT} {time} {window} {reverse}"))?)
            }
            Way::Between => {
                let other = format!("{}.4", network(self.guest, side, true));
                self.lab.run(&guest_name(side, 2), 5.0, &format!("iperf3 -s -1 -D -p {PORT}"))?;
                thread::sleep(Duration::from_millis(300));
                tcp(&run(1, &format!("iperf3 -c {other} -p {PORT} {time} {window}"))?)
            }
            Way::Udp => {
                let _server = iperf3_server(self.args.common.device_cpu, PORT)?;
                // 14 bytes of Ethernet, 20 of IPv4, 8 of UDP, and these.
                udp(&run(0, &format!("iperf3 -u -b 0 -l 22 -c {host} -p {PORT} {time}"))?)
            }
            Way::RoundTrip => {
                let guest = guest_name(side, 0);
                self.lab.run(&guest, 5.0, "nc -l -p 7 -e cat >/dev/null 2>&1 & sleep 0.2")?;
                let to = format!("{}.2:7", network(self.guest, side, false)).parse::<SocketAddr>();
                let to = to.map_err(|error| error.to_string())?;
                let times = on("--device-cpu", self.args.common.device_cpu, || {
                    round_trips(to, Duration::from_secs_f64(seconds))
                })?;
                Ok(Run::new(Spread::of(&times).median, 0.0))
            }
        }
    }
}

fn number(report: &Value, path: &str) -> Result<f64, String> {
    let missing = || format!("iperf3's report has no {path}: {report}");
    report.pointer(path).and_then(Value::as_f64).ok_or_else(missing)
}

/// Returns the throughput that the receiver reports in Gb/s, and the sender's retransmitted segments.
fn tcp(report: &Value) -> Result<Run, String> {
    let figure = number(report, "/end/sum_received/bits_per_second")? / 1e9;
    Ok(Run::new(figure, number(report, "/end/sum_sent/retransmits").unwrap_or(0.0)))
}

/// Returns the received datagrams per second.
fn udp(report: &Value) -> Result<Run, String> {
    let sum = |key: &str| number(report, &format!("/end/sum/{key}"));
    Ok(Run::new((sum("packets")? - sum("lost_packets")?) / sum("seconds")?, 0.0))
}

/// Returns the JSON row of one way, and its columns of both tables behind the name.
fn report(args: &Args, guest: Guest, way: Way, rounds: &Rounds<Run>) -> (Value, Vec<String>, Vec<String>) {
    let figures = [0, 1].map(|side| rounds.of(side, |run| run.figure));
    let [ours, peer] = [0, 1].map(|side| rounds.spread(side, |run| run.figure));
    let again = [0, 1].map(|side| rounds.spread(side, |run| run.retransmits).median);
    let [mine, theirs] = &figures;
    // More is always better.
    let ratio = if way == Way::RoundTrip { Spread::of_ratios(theirs, mine) } else { Spread::of_ratios(mine, theirs) };
    let costs = Medians::new(rounds, |run| run.costs);
    let of = |card: bool, key| (card == (guest == Guest::E1000)).then_some(key);
    let (delay, access_poll) = (of(false, &args.interrupt_delay), of(true, &args.access_poll));
    let mitigation = of(true, &args.mitigation);
    let mut row = json!({
        "guest": guest.name(), "way": way.name(), "unit": way.unit(), "poll": args.poll,
        "interrupt_delay": delay, "access_poll": access_poll, "mitigation": mitigation, "congestion": args.congestion,
        "window": args.window, "worker_cpu": args.worker_cpu.unwrap_or(args.common.device_cpu),
        "peer_name": guest.peer(),
        "retransmits": again[0], "peer_retransmits": again[1],
    });
    ours.add_to(&mut row, ["ours", "ours_min", "ours_max"]);
    peer.add_to(&mut row, ["peer", "peer_min", "peer_max"]);
    ratio.add_to(&mut row, RATIO);
    extend(&mut row, costs.json());
    extend(&mut row, json!({ "pairs": args.common.pairs, "boots": args.boots.min(args.common.pairs) }));
    let mut columns = [ours.columns(way.digits()), peer.columns(way.digits()), ratio.columns(2)].concat();
    columns.extend(again.map(|again| format!("{again:.0}")));
    columns.extend(costs.interrupts());
    columns.push(way.unit().to_owned());
    (row, columns, costs.columns())
}

/// Explains the second table.
const NOTE: &str = "\
register reads, writes: of an e1000 of ours; each is a message to the switch, and a read waits for the reply. QEMU's card has no such\n\
counter, but the same driver, which makes as many accesses for each interrupt, and for each packet that it sends or receives.\n\
guest's CPU: of QEMU's process, which includes QEMU's own device. switch's CPU: of ours, polling included\n\n";

/// Measures every combination.
pub fn run(args: &Args) -> Result<(), String> {
    if let Some(status) = enter()? {
        return if status.success() { Ok(()) } else { Err(format!("the bench in its network namespace: {status}")) };
    }
    let folder = Folder::new("guest-tcp")?;
    let Common { pairs, seconds, .. } = args.common;
    let mut session = Session::new("guest-tcp", &args.common, args.guest.len() * args.way.len(), false);
    for &guest in &args.guest {
        let mut bed = Bed::new(args, guest, &folder)?;
        let name = |way: Way| format!("{} {}", guest.name(), way.name());
        let mut all: Vec<_> = args.way.iter().map(|&way| (way, Rounds::new(vec![Vec::new(); SIDES.len()]))).collect();
        // The same guest, booted again, can be half as fast, on either side.
        let boots = args.boots.min(pairs);
        for boot in 1..=boots {
            bed.boot()?;
            for (way, rounds) in &mut all {
                let until = (pairs * boot / boots) as usize;
                session.rounds_until(until, rounds, &name(*way), &SIDES, |&side| bed.measure(*way, side))?;
            }
        }
        let (mut lines, mut costs) = (Vec::new(), Vec::new());
        for (way, rounds) in all {
            let (row, columns, of_a_packet) = report(args, guest, way, &rounds);
            session.push(row)?;
            lines.push([vec![name(way)], columns].concat());
            costs.push([vec![name(way)], of_a_packet].concat());
        }
        let title = format!(
            "{}, our switch polls for {}, peer: {}; {pairs} pairs of {seconds} s in {boots} boots, median and min–max",
            guest.name(),
            args.poll,
            guest.peer()
        );
        let header = [
            "",
            "ours",
            "",
            "peer",
            "",
            "ratio",
            "",
            "retransmits",
            "peer's",
            "interrupts per packet",
            "peer's",
            "unit",
        ];
        session.print(&title, &table(&header, &lines));
        if guest.interrupt().is_some() {
            let title = format!("{}, per packet that the guest has sent or received, medians", guest.name());
            session.print(&title, &format!("{}{NOTE}", table(&costs::HEADER, &costs)));
        }
    }
    session.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_report() {
        let report = json!({ "end": {
            "sum_received": { "bits_per_second": 12.5e9 }, "sum_sent": { "retransmits": 3 },
            "sum": { "packets": 1000, "lost_packets": 100, "seconds": 3.0 },
        } });
        let run = tcp(&report).unwrap();
        assert_eq!((run.figure, run.retransmits), (12.5, 3.0));
        assert_eq!(udp(&report).unwrap().figure, 300.0);
        assert!(tcp(&json!({})).err().unwrap().contains("no /end/sum_received/bits_per_second"));
    }

    #[test]
    fn guests_of_all_kinds_sides_and_places_have_addresses_of_their_own() {
        let guests = [Guest::Uml, Guest::Qemu, Guest::E1000];
        let all = guests
            .map(|guest| SIDES.map(|side| [false, true].map(|pair| network(guest, side, pair))).concat())
            .concat();
        assert_eq!(all.iter().collect::<std::collections::HashSet<_>>().len(), 12);
    }
}
