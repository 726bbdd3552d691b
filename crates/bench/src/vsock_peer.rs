//! Our vsock device against rust-vmm's, with the same driver (ours) and the same program of the host behind Unix sockets. Guest
//! to guest, our device connects two guests ring to ring: against a relay program of the host, and rust-vmm's sibling groups.

use crate::{
    figures::{RATIO, Spread, extend},
    options::Common,
    peer::{command, in_chroot, words},
    rig::{Device, on},
    session::{Rounds, Session},
    vsock_ends::{CID, message},
};
use ringroad_host::vsock::{VsockClient, VsockConnector};
use ringroad_text::table;
use ringroad_traffic::{
    child::{Folder, Program},
    gbps,
    options::{Ring, pin, poll},
    vsock::{RECEIVE, connector, each_read, layout, round_trips},
};
use ringroad_vsock::{Addr, Listener, MAX_PACKET, Settings, SocketType, Stream};
use serde_json::{Value, json};
use std::{
    cell::RefCell,
    fmt,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench vsock-peer                       every case event driven, and polling for 50us\n  \
    ringroad bench vsock-peer --poll 0              event driven alone\n  \
    ringroad bench vsock-peer --poll 0,unlimited --device-poll 50us")]
pub struct Args {
    /// Message sizes of the round trips in bytes, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096],
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: Vec<u64>,
    /// Size of each write to a stream in bytes
    #[arg(long, default_value_t = 65536, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    write: u64,
    /// How long the driver's programs poll the rings before they sleep, as a list: 0, 50us, unlimited. Each value is measured
    /// with the value of --device-poll at the same place [default: as --device-poll, or 0,50us]
    #[arg(long, value_delimiter = ',')]
    poll: Vec<String>,
    /// How long our device polls, as a list of equal length, or one value for all; the peer has no such setting [default: as
    /// --poll]
    #[arg(long, value_delimiter = ',')]
    device_poll: Vec<String>,
    /// Command of the peer [default: vhost-device-vsock, from the chroot of scripts/peers forky if it is set up]
    #[arg(long)]
    vhost_device_vsock: Option<String>,
    /// Measure ringroad alone
    #[arg(long)]
    alone: bool,
    /// Ring layout, if the device offers it: rows contain the negotiated one
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    #[command(flatten)]
    common: Common,
}

/// How long the driver's programs (`poll`) and our device poll before they sleep.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Polling {
    poll: String,
    device_poll: String,
}

impl fmt::Display for Polling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.poll, &*self.device_poll) {
            ("0", "0") => f.write_str("event driven"),
            (poll, device_poll) => write!(f, "poll {poll}, device poll {device_poll}"),
        }
    }
}

/// A device, and the host's programs of its guest. It has a second guest, whose socket is the second one.
struct Vsock {
    device: Device,
    host: PathBuf,
    /// Whether it is rust-vmm's.
    is_peer: bool,
    /// How long the driver's programs poll.
    poll: Duration,
    /// What the host's program has received from the guest.
    count: Count,
}

/// A device, and where the guest's program connects to.
type Way<'a> = (&'a Vsock, Addr);

/// Bytes received.
type Count = Arc<AtomicU64>;

/// Result of one run.
#[derive(Clone, Copy)]
struct Figure {
    /// Microseconds or Gb/s.
    value: f64,
    /// The negotiated layout.
    ring: Ring,
}

/// rust-vmm's device, which is installed.
struct Peer {
    words: Vec<String>,
    name: String,
}

/// What is measured.
struct Case {
    name: String,
    unit: &'static str,
    fields: Value,
}

/// Port of the host's echo server.
const ECHO: u32 = 7;
/// Port of the host's program that counts what it receives.
const SINK: u32 = 8;
/// Port of the guest's program that counts what it receives.
const GUEST: u32 = 9;
/// Port of the host's program that relays to the other guest.
const RELAY: u32 = 10;
/// CID of the other guest.
const SIBLING: u64 = CID + 1;
/// How long to wait for a device, or for progress of a connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// Payload bytes of the driver's receive buffers for siblings of rust-vmm's device. It passes packets on as they are, and loses
/// those that do not fit.
const PEER_RECEIVE: usize = MAX_PACKET;
/// The program of rust-vmm's device.
const PEER: &str = "vhost-device-vsock";

impl Vsock {
    /// Starts the host's programs for the guest of a device.
    fn new(device: Device, host: PathBuf, polling: &Polling) -> Result<Vsock, String> {
        let count = Count::default();
        serve(&host, ECHO, |stream| each_read(&stream, 64 << 10, |bytes| (&stream).write_all(bytes)))?;
        let received = count.clone();
        serve(&host, SINK, move |stream| each_read(&stream, 64 << 10, |bytes| add(&received, bytes)))?;
        Ok(Vsock { device, host, is_peer: false, poll: poll(&polling.poll)?, count })
    }
}

/// Returns the option of rust-vmm's device for a guest, whose siblings are the other guests of its group.
fn vm(cid: u64, socket: &Path, host: &Path) -> String {
    format!("guest-cid={cid},socket={},uds-path={},groups=g", socket.display(), host.display())
}

/// Counts received bytes.
fn add(count: &Count, bytes: &[u8]) -> io::Result<()> {
    count.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(())
}

/// Runs a program of the host that serves a guest's connections to a port, each in a thread.
fn serve(
    host: &Path,
    port: u32,
    program: impl Fn(UnixStream) -> io::Result<()> + Clone + Send + 'static,
) -> Result<(), String> {
    let mut path = host.as_os_str().to_owned();
    path.push(format!("_{port}"));
    let listener = UnixListener::bind(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let program = program.clone();
            thread::spawn(move || program(stream));
        }
    });
    Ok(())
}

/// Connects a program of the host to a guest.
fn connect(host: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(host)?;
    stream.write_all(format!("CONNECT {GUEST}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::with_capacity(1, &stream).read_line(&mut line)?;
    Ok(stream)
}

impl Args {
    /// Returns the settings to measure.
    fn pollings(&self) -> Result<Vec<Polling>, String> {
        let both = ["0", "50us"].map(str::to_owned);
        let (polls, device_polls) = match (&*self.poll, &*self.device_poll) {
            ([], []) => (&both[..], &both[..]),
            ([], given) | (given, []) => (given, given),
            given => given,
        };
        let count = polls.len().max(device_polls.len());
        if [polls, device_polls].iter().any(|list| list.len() != count && list.len() != 1) {
            return Err(format!(
                "--poll and --device-poll: expected lists of equal length, or one value for all, found {} and {} values",
                polls.len(),
                device_polls.len()
            ));
        }
        polls.iter().chain(device_polls).try_for_each(|text| poll(text).map(drop))?;
        let pairs = polls.iter().cycle().zip(device_polls.iter().cycle()).take(count);
        Ok(pairs.map(|(poll, device_poll)| Polling { poll: poll.clone(), device_poll: device_poll.clone() }).collect())
    }

    /// Starts our device with two guests, and a program that relays from the first one to the second one, as guests need that are
    /// not connected ring to ring.
    fn ours(&self, folder: &Folder, polling: &Polling) -> Result<Vsock, String> {
        let guest = |cid: u64, name: &str| {
            let [socket, host] = ["sock", "host"].map(|kind| folder.file(&format!("{name}.{kind}")));
            let section = format!(
                "[[vsock]]\ncid = {cid}\nsocket = \"{}\"\nhost = \"{}\"\ngroups = [\"g\"]\n",
                socket.display(),
                host.display()
            );
            (section, socket, host)
        };
        let (first, socket, host) = guest(CID, "ours");
        let (second, sibling, sibling_host) = guest(SIBLING, "sibling");
        let workers = format!("[workers]\ncpus = [{}]\npoll = \"{}\"\n", self.common.device_cpu, polling.device_poll);
        let sockets = vec![socket, sibling, host.clone(), sibling_host.clone()];
        let device = Device::ours(folder, "ours", &(workers + &first + &second), sockets)?;
        serve(&host, RELAY, move |from| {
            let mut to = connect(&sibling_host)?;
            each_read(from, 64 << 10, |bytes| to.write_all(bytes))
        })?;
        Vsock::new(device, host, polling)
    }

    /// Returns rust-vmm's device, or `None` if it is not requested. If it is not installed, adds a row to `session`.
    fn find(&self, session: &mut Session<'_>) -> Result<Option<Peer>, String> {
        if self.alone {
            return Ok(None);
        }
        let words = match &self.vhost_device_vsock {
            Some(line) => words(line),
            None => in_chroot(PEER).unwrap_or_else(|_| vec![PEER.into()]),
        };
        let Ok(version) = command(&words).arg("--version").output() else {
            let reason = format!("{PEER} is not installed (scripts/peers forky installs it)");
            session.without("peer", json!({ "peer": null }), &reason)?;
            return Ok(None);
        };
        let name = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        Ok(Some(Peer { words, name }))
    }

    /// Starts rust-vmm's device.
    fn peer(&self, folder: &Folder, Peer { words, name }: &Peer, polling: &Polling) -> Result<Vsock, String> {
        let log = folder.file("peer.log");
        let file = |guest: &str, kind: &str| folder.file(&format!("{guest}.{kind}"));
        let guests =
            [(CID, "peer"), (SIBLING, "peer-sibling")].map(|(cid, name)| (cid, file(name, "sock"), file(name, "host")));
        let mut line = Command::new("taskset");
        line.arg("-c").arg(self.common.device_cpu.to_string()).args(words).stdout(Stdio::null());
        guests.iter().for_each(|(cid, socket, host)| {
            line.arg("--vm").arg(vm(*cid, socket, host));
        });
        let mut program = Program::start(PEER, &mut line, &log)?;
        for path in guests.iter().flat_map(|(_, socket, host)| [socket, host]) {
            program.wait_for(path, PATIENCE, &log)?;
        }
        program.hold(true);
        let [(_, socket, host), (_, sibling, _)] = guests;
        let device = Device { name: name.clone(), sockets: vec![socket, sibling], programs: vec![program] };
        Ok(Vsock { is_peer: true, ..Vsock::new(device, host, polling)? })
    }

    /// Connects our driver to a device as one of its guests, the first one being 0, with receive buffers of this size.
    fn connect(&self, vsock: &Vsock, guest: usize, receive: usize, cpu: usize) -> Result<VsockClient, String> {
        let settings = Settings { poll: vsock.poll, ..Settings::default() };
        let connector = connector(vsock.device.socket(guest)?, self.ring, settings);
        let connector = VsockConnector { cid: Some(CID + guest as u64), receive, ..connector };
        let start = Instant::now();
        let client = loop {
            match on("cannot run on CPU", cpu, || connector.connect().map_err(|error| error.to_string())) {
                // vhost-device-vsock creates a new socket for each frontend; until then, connections are reset.
                Err(_) if start.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(50)),
                result => break result?,
            }
        };
        while !client.stack().is_running() && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(client)
    }

    /// Runs `work`, which measures, with our driver on a device, on the driver's CPU while the device is awake.
    fn with(
        &self,
        vsock: &Vsock,
        receive: usize,
        work: impl FnOnce(&VsockClient) -> Result<f64, String> + Send,
    ) -> Result<Figure, String> {
        let device = &vsock.device;
        device.awake(|| {
            let client = self.connect(vsock, 0, receive, self.common.driver_cpu)?;
            let value =
                self.common.on_driver_cpu(|| work(&client)).map_err(|error| format!("{}: {error}", device.name))?;
            Ok(Figure { value, ring: layout(client.acked()) })
        })
    }

    /// Measures round trips to the host's echo server: their mean in microseconds.
    fn round_trip(&self, vsock: &Vsock, to: Addr, size: u64) -> Result<Figure, String> {
        self.with(vsock, RECEIVE, |client| {
            let stream = Stream::connect(client.stack(), to).map_err(message)?;
            let times = |seconds| round_trips(&stream, size as usize, Duration::from_secs_f64(seconds));
            times(0.1).and_then(|_| times(self.common.seconds)).map(|times| times.mean() / 1e3).map_err(message)
        })
    }

    /// Returns the rate in Gb/s by which `count` grows while `step` is repeated.
    fn rate(&self, count: &AtomicU64, mut step: impl FnMut() -> io::Result<()>) -> Result<f64, String> {
        let mut repeat = |time: Duration| -> Result<f64, String> {
            let (before, start) = (count.load(Ordering::Relaxed), Instant::now());
            while start.elapsed() < time {
                step().map_err(message)?;
            }
            Ok(gbps(count.load(Ordering::Relaxed) - before, start.elapsed()))
        };
        repeat(Duration::from_millis(200))?;
        match repeat(Duration::from_secs_f64(self.common.seconds))? {
            0.0 => Err("no data arrived".into()),
            rate => Ok(rate),
        }
    }

    /// Returns the case of a stream in a direction.
    fn stream(&self, direction: &str) -> Case {
        let fields = json!({ "direction": direction, "size": self.write });
        Case { name: format!("stream {direction}"), unit: "Gb/s", fields }
    }

    /// Measures a stream from the guest to `to`, which grows `count`.
    fn send(&self, client: &VsockClient, to: Addr, count: &Count) -> Result<f64, String> {
        let bytes = vec![0x5a; self.write as usize];
        let mut stream = Stream::connect(client.stack(), to).map_err(message)?;
        stream.set_timeout(Some(PATIENCE));
        self.rate(count, || stream.write_all(&bytes))
    }

    /// Measures a stream to the host.
    fn to_host(&self, vsock: &Vsock, to: Addr) -> Result<Figure, String> {
        self.with(vsock, RECEIVE, |client| self.send(client, to, &vsock.count))
    }

    /// Measures a stream from the host.
    fn to_guest(&self, vsock: &Vsock) -> Result<Figure, String> {
        let (host, size) = (&vsock.host, self.write as usize);
        self.with(vsock, RECEIVE, |client| {
            let listener = Listener::bind(client.stack(), GUEST, SocketType::Stream).map_err(message)?;
            let (host, cpu) = (host.clone(), self.common.device_cpu);
            let program = thread::spawn(move || {
                pin("--device-cpu", cpu).map_err(io::Error::other)?;
                let (mut stream, bytes) = (connect(&host)?, vec![0x5a; size]);
                // Until the guest closes the connection.
                while stream.write_all(&bytes).is_ok() {}
                io::Result::Ok(())
            });
            let mut stream = listener.accept_within(Some(PATIENCE)).map_err(message)?;
            stream.set_timeout(Some(PATIENCE));
            let (count, mut buffer) = (Count::default(), vec![0; size.max(64 << 10)]);
            let rate = self.rate(&count, || {
                count.fetch_add(stream.read(&mut buffer)? as u64, Ordering::Relaxed);
                Ok(())
            });
            drop(stream);
            let _ = program.join();
            rate
        })
    }

    /// Measures a stream from one guest of a device to the other: to the guest itself, or to our device's relay.
    fn to_sibling(&self, vsock: &Vsock, to: Addr) -> Result<Figure, String> {
        let receive = if vsock.is_peer { PEER_RECEIVE } else { RECEIVE };
        self.with(vsock, receive, |client| {
            // The other guest is on the CPU of the host.
            let cpu = self.common.device_cpu;
            let other = self.connect(vsock, 1, receive, cpu)?;
            let listener = Listener::bind(other.stack(), GUEST, SocketType::Stream).map_err(message)?;
            let count = Count::default();
            let received = count.clone();
            let reader = thread::spawn(move || {
                pin("--device-cpu", cpu).map_err(io::Error::other)?;
                let stream = listener.accept_within(Some(PATIENCE))?;
                // A device that loses the connection may not tell the other end.
                stream.set_timeout(Some(PATIENCE));
                each_read(&stream, 64 << 10, |bytes| add(&received, bytes))
            });
            let rate = self.send(client, to, &count);
            let _ = reader.join();
            rate
        })
    }
}

/// The cases of one setting: their rows, and the lines of its table.
struct Group<'a, 's> {
    args: &'a Args,
    polling: &'a Polling,
    session: &'a mut Session<'s>,
    lines: Vec<Vec<String>>,
}

impl Group<'_, '_> {
    /// Measures all cases on our device, and on the peer's if there is one.
    fn run(&mut self, ours: &Vsock, peer: Option<&Vsock>) -> Result<(), String> {
        let args = self.args;
        let other = peer.map_or("", |peer| &peer.device.name);
        let devices = |port: u32| -> Vec<Way<'_>> {
            [ours].into_iter().chain(peer).map(|vsock| (vsock, Addr { cid: 2, port })).collect()
        };
        for &size in &args.size {
            let fields = json!({ "direction": "there-and-back", "size": size });
            let case = Case { name: format!("round trip {size} B"), unit: "us", fields };
            self.compare(&case, &devices(ECHO), other, |&(vsock, to)| args.round_trip(vsock, to, size))?;
        }
        self.compare(&args.stream("to-host"), &devices(SINK), other, |&(vsock, to)| args.to_host(vsock, to))?;
        self.compare(&args.stream("to-guest"), &devices(GUEST), other, |&(vsock, _)| args.to_guest(vsock))?;
        let (mut case, direct) = (args.stream("to-sibling"), Addr { cid: SIBLING, port: GUEST });
        let one = |&(vsock, to): &Way<'_>| args.to_sibling(vsock, to);
        let relay = (ours, Addr { cid: 2, port: RELAY });
        self.compare(&case, &[(ours, direct), relay], "a program between Unix sockets", one)?;
        match peer {
            Some(peer) => {
                extend(&mut case.fields, json!({ "receive": RECEIVE, "peer_receive": PEER_RECEIVE }));
                self.compare(&case, &[(ours, direct), (peer, direct)], &format!("{other}, sibling groups"), one)
            }
            None => Ok(()),
        }
    }

    /// Measures a case in two ways, ours and that of `other`, or in ours alone. If rust-vmm's device fails, for example because
    /// it loses the connection, the row is skipped with its error as the reason.
    fn compare(
        &mut self,
        case: &Case,
        ways: &[Way<'_>],
        other: &str,
        one: impl Fn(&Way<'_>) -> Result<Figure, String>,
    ) -> Result<(), String> {
        let (name, failure) = (format!("{}, {}", self.polling, case.name), RefCell::new(None));
        let rounds = self.session.rounds(&name, ways, |way| {
            one(way).inspect_err(|error| {
                if way.0.is_peer {
                    failure.replace(Some(error.clone()));
                }
            })
        });
        if let Some(reason) = failure.into_inner() {
            let mut row = self.row(case);
            extend(&mut row, json!({ "peer_name": other }));
            return self.session.skip(&format!("{name}, {other}"), row, &reason);
        }
        let (row, columns) = self.results(case, other, &rounds?);
        self.lines.push(columns);
        self.session.push(row)
    }

    /// Returns the part of a case's row that does not depend on results.
    fn row(&self, case: &Case) -> Value {
        let Polling { poll, device_poll } = self.polling;
        let mut row = json!({ "unit": case.unit, "poll": poll, "device_poll": device_poll });
        extend(&mut row, case.fields.clone());
        row
    }

    /// Returns a case's row and its line of the table.
    fn results(&self, case: &Case, other: &str, rounds: &Rounds<Figure>) -> (Value, Vec<String>) {
        let [ours, theirs] = [0, 1].map(|way| rounds.of(way, |figure| figure.value));
        let [ring, peer_ring] = [0, 1].map(|way| rounds.first(way).map(|figure| figure.ring.to_string()));
        let (mine, ring) = (Spread::of(&ours), ring.unwrap_or_default());
        let mut row = self.row(case);
        let fields = json!({ "pairs": ours.len(), "ring": ring, "line_ns": rounds.line().median });
        extend(&mut row, fields);
        mine.add_to(&mut row, ["ours", "ours_min", "ours_max"]);
        let mut columns = vec![format!("{}, {}", case.name, case.unit)];
        columns.extend(mine.columns(1));
        if let Some(peer_ring) = peer_ring {
            // A ratio above 1 is a gain, of times, too.
            let (above, below) = if case.unit == "us" { (&theirs, &ours) } else { (&ours, &theirs) };
            let (peer, ratio) = (Spread::of(&theirs), Spread::of_ratios(above, below));
            extend(&mut row, json!({ "peer": peer.median, "peer_name": other, "peer_ring": peer_ring }));
            ratio.add_to(&mut row, RATIO);
            columns.extend([peer.columns(1), ratio.columns(2)].concat());
            columns.push(if ring == peer_ring { ring } else { format!("{ring} / {peer_ring}") });
            columns.push(other.to_owned());
        }
        (row, columns)
    }
}

/// Measures all cases with each setting.
pub fn run(args: &Args) -> Result<(), String> {
    let (common, pollings) = (&args.common, args.pollings()?);
    // The guest has a CPU to itself. Devices and programs of the host share the other one, which threads inherit.
    pin("--device-cpu", common.device_cpu)?;
    let cases = args.size.len() + 3 + usize::from(!args.alone);
    let mut session = Session::new("vsock-peer", common, pollings.len() * cases, false);
    let found = args.find(&mut session)?;
    for polling in &pollings {
        let folder = Folder::new("vsock")?;
        let ours = args.ours(&folder, polling)?;
        let peer = found.as_ref().map(|peer| args.peer(&folder, peer, polling)).transpose()?;
        let mut group = Group { args, polling, session: &mut session, lines: Vec::new() };
        group.run(&ours, peer.as_ref())?;
        let lines = group.lines;
        let Common { driver_cpu, device_cpu, pairs, seconds, .. } = common;
        let title = format!(
            "vsock, {polling}: our driver on CPU {driver_cpu}, devices and the host's programs on CPU {device_cpu}, \
             {pairs} pairs of {seconds} s, median and min–max"
        );
        let table = table(&["", "ours", "", "peer", "", "ratio", "", "rings", ""], &lines);
        session.print(&title, &format!("{table}{NOTES}\n\n"));
    }
    session.finish()
}

/// Notes under each table.
const NOTES: &str = "rings: the negotiated layout; with ours / with the peer, if they differ\n\
    sibling groups: the driver's receive buffers have 64 KiB instead of 16, because the peer loses packets that do not fit";

#[cfg(test)]
mod tests;
