//! Our vsock device against rust-vmm's, with the same driver (ours) and the same program of the host behind Unix sockets; and two
//! guests of our device, connected ring to ring, against a connection through a relay program of the host.

use crate::{
    figures::{RATIO, Spread, extend},
    options::Common,
    peer::{command, in_chroot, words},
    rig::{Device, on},
    session::{Rounds, Session},
    vsock_ends::message,
};
use ringroad_host::vsock::{VsockClient, VsockConnector};
use ringroad_text::table;
use ringroad_traffic::{
    child::{Folder, Program},
    gbps,
    options::{Ring, pin, poll},
    vsock::{connector, each_read, round_trips},
};
use ringroad_vsock::{Addr, Listener, Settings, SocketType, Stream};
use serde_json::{Value, json};
use std::{
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
pub struct Args {
    /// Message sizes of the round trips in bytes, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096],
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: Vec<u64>,
    /// Size of each write to a stream in bytes
    #[arg(long, default_value_t = 65536, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    write: u64,
    /// How long the driver's programs poll the rings before they sleep: 0, 50us, unlimited
    #[arg(long, default_value = "50us")]
    poll: String,
    /// How long our device polls; the peer has no such setting
    #[arg(long, default_value = "50us")]
    device_poll: String,
    /// Command of the peer [default: vhost-device-vsock, from the chroot of scripts/peers forky if it is set up]
    #[arg(long)]
    vhost_device_vsock: Option<String>,
    /// Measure ringroad alone
    #[arg(long)]
    alone: bool,
    /// Ring layout, if the device offers it
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    #[command(flatten)]
    common: Common,
}

/// A device, and the host's programs of its guest. Our device has a second guest, whose socket is the second one.
struct Vsock {
    device: Device,
    host: PathBuf,
    /// What the host's program has received from the guest.
    count: Count,
}

/// Bytes received.
type Count = Arc<AtomicU64>;

/// Port of the host's echo server.
const ECHO: u32 = 7;
/// Port of the host's program that counts what it receives.
const SINK: u32 = 8;
/// Port of the guest's program that counts what it receives.
const GUEST: u32 = 9;
/// Port of the host's program that relays to the other guest.
const RELAY: u32 = 10;
/// CID of the other guest.
const SIBLING: u64 = 4;

impl Vsock {
    /// Starts the host's programs for the guest of a device.
    fn new(device: Device, host: PathBuf) -> Result<Vsock, String> {
        let count = Count::default();
        serve(&host, ECHO, |stream| each_read(&stream, 64 << 10, |bytes| (&stream).write_all(bytes)))?;
        let received = count.clone();
        serve(&host, SINK, move |stream| each_read(&stream, 64 << 10, |bytes| add(&received, bytes)))?;
        Ok(Vsock { device, host, count })
    }
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
    /// Starts our device with two guests, and a program that relays from the first one to the second one, as guests need that are
    /// not connected ring to ring.
    fn ours(&self, folder: &Folder) -> Result<Vsock, String> {
        poll(&self.device_poll)?;
        let guest = |cid: u64, name: &str| {
            let [socket, host] = ["sock", "host"].map(|kind| folder.file(&format!("{name}.{kind}")));
            let section = format!(
                "[[vsock]]\ncid = {cid}\nsocket = \"{}\"\nhost = \"{}\"\ngroups = [\"g\"]\n",
                socket.display(),
                host.display()
            );
            (section, socket, host)
        };
        let (first, socket, host) = guest(3, "ours");
        let (second, sibling, sibling_host) = guest(SIBLING, "sibling");
        let workers = format!("[workers]\ncpus = [{}]\npoll = \"{}\"\n", self.common.device_cpu, self.device_poll);
        let sockets = vec![socket, sibling, host.clone(), sibling_host.clone()];
        let device = Device::ours(folder, "ours", &(workers + &first + &second), sockets)?;
        serve(&host, RELAY, move |from| {
            let mut to = connect(&sibling_host)?;
            each_read(from, 64 << 10, |bytes| to.write_all(bytes))
        })?;
        Vsock::new(device, host)
    }

    /// Starts rust-vmm's device, if it is installed; if not, adds a row to `session`.
    fn peer(&self, folder: &Folder, session: &mut Session<'_>) -> Result<Option<Vsock>, String> {
        if self.alone {
            return Ok(None);
        }
        let program = "vhost-device-vsock";
        let words = match &self.vhost_device_vsock {
            Some(line) => words(line),
            None => in_chroot(program).unwrap_or_else(|_| vec![program.into()]),
        };
        let Ok(version) = command(&words).arg("--version").output() else {
            let reason = format!("{program} is not installed (scripts/peers forky installs it)");
            session.without("peer", json!({ "peer": null }), &reason)?;
            return Ok(None);
        };
        let name = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        let (socket, host, log) = (folder.file("peer.sock"), folder.file("peer.host"), folder.file("peer.log"));
        let vm = format!("guest-cid=3,socket={},uds-path={}", socket.display(), host.display());
        let mut line = Command::new("taskset");
        line.arg("-c").arg(self.common.device_cpu.to_string()).args(&words).arg("--vm").arg(vm).stdout(Stdio::null());
        let mut program = Program::start(program, &mut line, &log)?;
        for path in [&socket, &host] {
            program.wait_for(path, Duration::from_secs(5), &log)?;
        }
        program.hold(true);
        Vsock::new(Device { name, sockets: vec![socket], programs: vec![program] }, host).map(Some)
    }

    /// Connects our driver to a device.
    fn connect(&self, socket: &Path, cpu: usize) -> Result<VsockClient, String> {
        let settings = Settings { poll: poll(&self.poll)?, ..Settings::default() };
        let connector = VsockConnector { cid: Some(3), ..connector(socket, self.ring, settings) };
        let start = Instant::now();
        let client = loop {
            match on("cannot run on CPU", cpu, || connector.connect().map_err(|error| error.to_string())) {
                // vhost-device-vsock creates a new socket for each frontend; until then, connections are reset.
                Err(_) if start.elapsed() < Duration::from_secs(5) => thread::sleep(Duration::from_millis(50)),
                result => break result?,
            }
        };
        while !client.stack().is_running() && start.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(client)
    }

    /// Runs `work` with our driver on a device, on the driver's CPU while the device is awake.
    fn with<T: Send>(
        &self,
        device: &Device,
        work: impl FnOnce(&VsockClient) -> Result<T, String> + Send,
    ) -> Result<T, String> {
        device.awake(|| {
            let client = self.connect(device.socket(0)?, self.common.driver_cpu)?;
            self.common.on_driver_cpu(|| work(&client)).map_err(|error| format!("{}: {error}", device.name))
        })
    }

    /// Measures round trips to the host's echo server: their mean in microseconds.
    fn round_trip(&self, vsock: &Vsock, size: u64) -> Result<f64, String> {
        self.with(&vsock.device, |client| {
            let stream = Stream::connect(client.stack(), Addr { cid: 2, port: ECHO }).map_err(message)?;
            let times = |seconds| round_trips(&stream, size as usize, Duration::from_secs_f64(seconds));
            times(0.1).and_then(|_| times(self.common.seconds)).map(|times| times.mean() / 1e3).map_err(message)
        })
    }

    /// Returns the rate in Gb/s by which `count` grows while `step` is repeated.
    fn rate(&self, count: &AtomicU64, mut step: impl FnMut() -> io::Result<()>) -> Result<f64, String> {
        let mut repeat = |time: Duration| {
            let (before, start) = (count.load(Ordering::Relaxed), Instant::now());
            while start.elapsed() < time {
                step().map_err(message)?;
            }
            Ok(gbps(count.load(Ordering::Relaxed) - before, start.elapsed()))
        };
        repeat(Duration::from_millis(200)).and_then(|_: f64| repeat(Duration::from_secs_f64(self.common.seconds)))
    }

    /// Measures a stream from the guest to `to`, which grows `count`.
    fn send(&self, client: &VsockClient, to: Addr, count: &Count) -> Result<f64, String> {
        let bytes = vec![0x5a; self.write as usize];
        let mut stream = Stream::connect(client.stack(), to).map_err(message)?;
        stream.set_timeout(Some(Duration::from_secs(5)));
        self.rate(count, || stream.write_all(&bytes))
    }

    /// Measures a stream to the host.
    fn to_host(&self, vsock: &Vsock) -> Result<f64, String> {
        let to = Addr { cid: 2, port: SINK };
        self.with(&vsock.device, |client| self.send(client, to, &vsock.count))
    }

    /// Measures a stream from the host.
    fn to_guest(&self, Vsock { device, host, .. }: &Vsock) -> Result<f64, String> {
        let size = self.write as usize;
        self.with(device, |client| {
            let listener = Listener::bind(client.stack(), GUEST, SocketType::Stream).map_err(message)?;
            let (host, cpu) = (host.clone(), self.common.device_cpu);
            let program = thread::spawn(move || {
                pin("--device-cpu", cpu).map_err(io::Error::other)?;
                let (mut stream, bytes) = (connect(&host)?, vec![0x5a; size]);
                // Until the guest closes the connection.
                while stream.write_all(&bytes).is_ok() {}
                io::Result::Ok(())
            });
            let mut stream = listener.accept_within(Some(Duration::from_secs(5))).map_err(message)?;
            stream.set_timeout(Some(Duration::from_secs(5)));
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

    /// Measures a stream from one guest of our device to the other: to the guest itself, or to the relay.
    fn to_sibling(&self, device: &Device, to: Addr) -> Result<f64, String> {
        self.with(device, |client| {
            // The other guest is on the CPU of the host.
            let cpu = self.common.device_cpu;
            let other = self.connect(device.socket(1)?, cpu)?;
            let listener = Listener::bind(other.stack(), GUEST, SocketType::Stream).map_err(message)?;
            let count = Count::default();
            let received = count.clone();
            let reader = thread::spawn(move || {
                pin("--device-cpu", cpu).map_err(io::Error::other)?;
                let stream = listener.accept_within(Some(Duration::from_secs(5)))?;
                each_read(&stream, 64 << 10, |bytes| add(&received, bytes))
            });
            let rate = self.send(client, to, &count);
            let _ = reader.join();
            rate
        })
    }

    /// Adds a case to the rows and lines: its name, its fields, and the figures of ours and of `other`.
    fn add(
        &self,
        session: &mut Session<'_>,
        lines: &mut Vec<Vec<String>>,
        (case, unit, fields): (String, &str, Value),
        other: &str,
        rounds: &Rounds<f64>,
    ) -> Result<(), String> {
        let [ours, theirs] = [0, 1].map(|device| rounds.of(device, |&figure| figure));
        let mine = Spread::of(&ours);
        let mut row = json!({
            "unit": unit, "pairs": self.common.pairs, "poll": self.poll, "device_poll": self.device_poll,
            "ring": self.ring.to_string(), "line_ns": rounds.line().median,
        });
        extend(&mut row, fields);
        mine.add_to(&mut row, ["ours", "ours_min", "ours_max"]);
        let mut columns = vec![format!("{case}, {unit}")];
        columns.extend(mine.columns(1));
        if !theirs.is_empty() {
            // A ratio above 1 is a gain, of times, too.
            let (above, below) = if unit == "us" { (&theirs, &ours) } else { (&ours, &theirs) };
            let (peer, ratio) = (Spread::of(&theirs), Spread::of_ratios(above, below));
            extend(&mut row, json!({ "peer": peer.median, "peer_name": other }));
            ratio.add_to(&mut row, RATIO);
            columns.extend([peer.columns(1), ratio.columns(2)].concat());
            columns.push(other.to_owned());
        }
        lines.push(columns);
        session.push(row)
    }
}

/// Measures all cases.
pub fn run(args: &Args) -> Result<(), String> {
    let common = &args.common;
    // The guest has a CPU to itself. Devices and programs of the host share the other one, which threads inherit.
    pin("--device-cpu", common.device_cpu)?;
    let folder = Folder::new("vsock")?;
    let mut session = Session::new("vsock-peer", common, args.size.len() + 3, false);
    let devices: Vec<Vsock> =
        [Some(args.ours(&folder)?), args.peer(&folder, &mut session)?].into_iter().flatten().collect();
    let (ours, peer) = (devices.first().ok_or("no device")?, devices.get(1).map_or("", |peer| &peer.device.name));
    let lines = &mut Vec::new();
    for &size in &args.size {
        let rounds =
            session.rounds(&format!("round trips of {size} B"), &devices, |vsock| args.round_trip(vsock, size))?;
        let fields = json!({ "direction": "there-and-back", "size": size });
        args.add(&mut session, lines, (format!("round trip {size} B"), "us", fields), peer, &rounds)?;
    }
    let fields = |direction: &str| json!({ "direction": direction, "size": args.write });
    let rounds = session.rounds("stream to-host", &devices, |vsock| args.to_host(vsock))?;
    args.add(&mut session, lines, ("stream to-host".into(), "Gb/s", fields("to-host")), peer, &rounds)?;
    let rounds = session.rounds("stream to-guest", &devices, |vsock| args.to_guest(vsock))?;
    args.add(&mut session, lines, ("stream to-guest".into(), "Gb/s", fields("to-guest")), peer, &rounds)?;
    let ways = [Addr { cid: SIBLING, port: GUEST }, Addr { cid: 2, port: RELAY }];
    let rounds = session.rounds("stream to a sibling", &ways, |&to| args.to_sibling(&ours.device, to))?;
    let case = ("stream to a sibling".into(), "Gb/s", fields("to-sibling"));
    args.add(&mut session, lines, case, "a program between Unix sockets", &rounds)?;
    let Common { driver_cpu, device_cpu, pairs, seconds, .. } = common;
    let title = format!(
        "vsock with our driver on CPU {driver_cpu}, devices and the host's programs on CPU {device_cpu}, {pairs} pairs of {seconds} s, median and min–max"
    );
    session.print(&title, &table(&["", "ours", "", "peer", "", "ratio", "", ""], lines));
    session.finish()
}
