//! Our vsock device against rust-vmm's, each with the same driver (ours) and the same program of the host on its Unix
//! sockets; and two guests of ours, from ring to ring, against the way through a program that copies between such sockets.

use super::{
    peer::cache,
    rig::{Common, finished, progress},
};
use crate::{
    Outcome,
    blast::Ring,
    child::{Folder, Program, ourselves},
    report::{Spread, table},
    vsock::{RECEIVE, poll, round_trips},
};
use ringroad_host::{
    pin_current_thread,
    vsock::{VsockClient, VsockConnector},
};
use ringroad_vsock::{Addr, Features, Listener, Settings, SocketType, Stream};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Our vsock device against rust-vmm's with the same driver and host program; guest to guest against a program that copies between Unix sockets
#[derive(clap::Args)]
pub struct Args {
    /// Bytes of a round trip
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096],
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size: Vec<u64>,
    /// Bytes of each write of a stream
    #[arg(long, default_value_t = 65536, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    write: u64,
    /// For how long the driver's programs look at the rings before sleeping: 0, 50us, unlimited
    #[arg(long, default_value = "50us")]
    poll: String,
    /// The same of our device; the other one has no such setting
    #[arg(long, default_value = "50us")]
    device_poll: String,
    /// The peer's command [default: vhost-device-vsock, in the chroot of scripts/peers forky if it is there]
    #[arg(long)]
    vhost_device_vsock: Option<String>,
    /// Ours alone
    #[arg(long)]
    alone: bool,
    /// The layout of the rings, where the device has it
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    #[command(flatten)]
    common: Common,
}

/// A device with its sockets, held still unless it is measured.
struct MeasuredDevice {
    name: String,
    program: Program,
    socket: PathBuf,
    host: PathBuf,
    /// A second guest of the same device, if it has one, and where programs connect to it.
    sibling: Option<(PathBuf, PathBuf)>,
}

/// Ports of the host's programs: one that echoes, one that counts.
const ECHO: u32 = 7;
const SINK: u32 = 8;
/// One that copies to the other guest.
const RELAY: u32 = 10;
/// Port of the guest's program that counts.
const GUEST: u32 = 9;

/// What the programs have received.
type Count = Arc<AtomicU64>;

/// Does something in a thread on a CPU.
fn on<T: Send>(cpu: usize, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    let pinned =
        || pin_current_thread(cpu).map_err(|error| format!("cannot run on CPU {cpu}: {error}")).and_then(|()| work());
    thread::scope(|scope| scope.spawn(pinned).join().map_err(|_| "a thread has ended".to_owned())?)
}

fn io(error: std::io::Error) -> String {
    error.to_string()
}

impl Args {
    fn ours(&self, folder: &Folder) -> Result<MeasuredDevice, String> {
        poll(&self.device_poll)?;
        let file = |name: &str| folder.file(name);
        let (socket, host) = (file("ours.sock"), file("ours.host"));
        let (sibling, sibling_host) = (file("sibling.sock"), file("sibling.host"));
        let text = format!(
            "[workers]\ncpus = [{}]\npoll = \"{}\"\n[[vsock]]\ncid = 3\nsocket = \"{}\"\nhost = \"{}\"\ngroups = [\"g\"]\n\
             [[vsock]]\ncid = 4\nsocket = \"{}\"\nhost = \"{}\"\ngroups = [\"g\"]\n",
            self.common.device_cpu,
            self.device_poll,
            socket.display(),
            host.display(),
            sibling.display(),
            sibling_host.display()
        );
        let (config, log) = (file("ours.toml"), file("ours.log"));
        fs::write(&config, text).map_err(io)?;
        let mut command = ourselves()?;
        command.arg("serve").arg("-c").arg(&config).stdout(Stdio::null());
        let mut program = Program::start("our device", &mut command, &log)?;
        for path in [&socket, &host, &sibling, &sibling_host] {
            program.wait_for(path, Duration::from_secs(5), &log)?;
        }
        program.hold(true);
        let name = format!("ringroad {}", env!("CARGO_PKG_VERSION"));
        Ok(MeasuredDevice { name, program, socket, host, sibling: Some((sibling, sibling_host)) })
    }

    /// rust-vmm's device, if it is there.
    fn peer(&self, folder: &Folder) -> Result<Option<MeasuredDevice>, String> {
        if self.alone {
            return Ok(None);
        }
        let chroot = cache().join("forky");
        let words: Vec<String> = match &self.vhost_device_vsock {
            Some(command) => command.split_whitespace().map(str::to_owned).collect(),
            None if chroot.join("usr/bin/vhost-device-vsock").exists() && chroot.join("proc/self/exe").exists() => {
                vec!["chroot".into(), chroot.display().to_string(), "vhost-device-vsock".into()]
            }
            None => vec!["vhost-device-vsock".into()],
        };
        let command = |words: &[String]| {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            command
        };
        let Ok(version) = command(&words).arg("--version").output() else {
            eprintln!("vhost-device-vsock is not there (scripts/peers forky installs it): measuring ours alone");
            return Ok(None);
        };
        let name = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        let (socket, host, log) = (folder.file("peer.sock"), folder.file("peer.host"), folder.file("peer.log"));
        let vm = format!("guest-cid=3,socket={},uds-path={}", socket.display(), host.display());
        let mut line = Command::new("taskset");
        line.arg("-c").arg(self.common.device_cpu.to_string()).args(&words).arg("--vm").arg(vm).stdout(Stdio::null());
        let mut program = Program::start("vhost-device-vsock", &mut line, &log)?;
        for path in [&socket, &host] {
            program.wait_for(path, Duration::from_secs(5), &log)?;
        }
        program.hold(true);
        Ok(Some(MeasuredDevice { name, program, socket, host, sibling: None }))
    }

    /// Our driver on a device.
    fn connect(&self, socket: &Path, cpu: usize) -> Result<VsockClient, String> {
        let connector = VsockConnector {
            socket: socket.to_owned(),
            listen: false,
            patience: Duration::from_secs(5),
            features: Features::layout(self.ring == Ring::Packed).bits(),
            queue_size: 128,
            receive: RECEIVE,
            cid: Some(3),
            settings: Settings { poll: poll(&self.poll)?, ..Settings::default() },
            reconnect: None,
        };
        let start = Instant::now();
        let client = loop {
            match on(cpu, || connector.connect().map_err(|error| error.to_string())) {
                // vhost-device-vsock makes a new socket for each frontend, and resets who comes before.
                Err(_) if start.elapsed() < Duration::from_secs(5) => thread::sleep(Duration::from_millis(50)),
                result => break result?,
            }
        };
        while !client.stack().is_running() && start.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(client)
    }

    /// Does something with a device, which is let go for it, on the driver's CPU.
    fn with<T: Send>(
        &self,
        device: &MeasuredDevice,
        work: impl FnOnce(&VsockClient) -> Result<T, String> + Send,
    ) -> Result<T, String> {
        device.program.hold(false);
        let client = self.connect(&device.socket, self.common.driver_cpu)?;
        let result = self.common.pinned(|| work(&client)).map_err(|error| format!("{}: {error}", device.name));
        drop(client);
        device.program.hold(true);
        result
    }

    /// Round trips through the host's program that echoes, in microseconds: mean, 1st and 99th percentile.
    fn round_trip(&self, device: &MeasuredDevice, size: u64) -> Result<[f64; 3], String> {
        self.with(device, |client| {
            let stream = Stream::connect(client.stack(), Addr { cid: 2, port: ECHO }).map_err(io)?;
            round_trips(&stream, size as usize, Duration::from_secs_f64(0.1)).map_err(io)?;
            let times =
                round_trips(&stream, size as usize, Duration::from_secs_f64(self.common.seconds)).map_err(io)?;
            let us = |ns: f64| ns / 1e3;
            Ok([us(times.mean()), us(times.value_at_quantile(0.01) as f64), us(times.value_at_quantile(0.99) as f64)])
        })
    }

    /// Gb/s that `count` grows by while `send` sends.
    fn rate(&self, count: &AtomicU64, mut send: impl FnMut() -> Result<(), String>) -> Result<f64, String> {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(200) {
            send()?;
        }
        let (before, begun) = (count.load(Ordering::Relaxed), Instant::now());
        while begun.elapsed() < Duration::from_secs_f64(self.common.seconds) {
            send()?;
        }
        Ok((count.load(Ordering::Relaxed) - before) as f64 * 8.0 / begun.elapsed().as_secs_f64() / 1e9)
    }

    /// A stream to the host's program that counts.
    fn to_host(&self, device: &MeasuredDevice, count: &Count) -> Result<f64, String> {
        let bytes = vec![0x5a; self.write as usize];
        self.with(device, |client| {
            let mut stream = Stream::connect(client.stack(), Addr { cid: 2, port: SINK }).map_err(io)?;
            stream.set_timeout(Some(Duration::from_secs(5)));
            self.rate(count, || stream.write_all(&bytes).map_err(io))
        })
    }

    /// A stream from the host's program.
    fn to_guest(&self, device: &MeasuredDevice) -> Result<f64, String> {
        let size = self.write as usize;
        self.with(device, |client| {
            let listener = Listener::bind(client.stack(), GUEST, SocketType::Stream).map_err(io)?;
            let host = device.host.clone();
            let cpu = self.common.device_cpu;
            let program = thread::spawn(move || {
                pin_current_thread(cpu)?;
                source(&host, size)
            });
            let mut stream = listener.accept_within(Some(Duration::from_secs(5))).map_err(io)?;
            stream.set_timeout(Some(Duration::from_secs(5)));
            let count = AtomicU64::new(0);
            let mut buffer = vec![0; size.max(64 << 10)];
            let rate = self.rate(&count, || {
                count.fetch_add(stream.read(&mut buffer).map_err(io)? as u64, Ordering::Relaxed);
                Ok(())
            });
            drop(stream);
            let _ = program.join();
            rate
        })
    }

    /// A stream from one guest to another one of the same device, from ring to ring or through the program that copies.
    fn to_sibling(&self, device: &MeasuredDevice, to: Addr) -> Result<f64, String> {
        let Some((sibling, _)) = &device.sibling else { return Err("there is no second guest".into()) };
        let bytes = vec![0x5a; self.write as usize];
        self.with(device, |client| {
            // It has the other CPU, together with the host.
            let cpu = self.common.device_cpu;
            let other = self.connect(sibling, cpu)?;
            let listener = Listener::bind(other.stack(), GUEST, SocketType::Stream).map_err(io)?;
            let count = Count::default();
            let reader = {
                let count = count.clone();
                thread::spawn(move || {
                    pin_current_thread(cpu)?;
                    let mut stream = listener.accept_within(Some(Duration::from_secs(5)))?;
                    let mut buffer = vec![0; 64 << 10];
                    while let got @ 1.. = stream.read(&mut buffer)? {
                        count.fetch_add(got as u64, Ordering::Relaxed);
                    }
                    std::io::Result::Ok(())
                })
            };
            let mut stream = Stream::connect(client.stack(), to).map_err(io)?;
            stream.set_timeout(Some(Duration::from_secs(5)));
            let rate = self.rate(&count, || stream.write_all(&bytes).map_err(io));
            drop(stream);
            let _ = reader.join();
            rate
        })
    }
}

/// The host's program: echoes at one socket, counts at another.
fn host_program(host: &Path, count: &Count) -> Result<(), String> {
    let listen = |port: u32| {
        let mut path = host.as_os_str().to_owned();
        path.push(format!("_{port}"));
        UnixListener::bind(&path).map_err(|error| format!("{}: {error}", Path::new(&path).display()))
    };
    let (echo, sink) = (listen(ECHO)?, listen(SINK)?);
    thread::spawn(move || {
        for mut stream in echo.incoming().flatten() {
            thread::spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(got @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..got]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    let count = count.clone();
    thread::spawn(move || {
        for mut stream in sink.incoming().flatten() {
            let count = count.clone();
            thread::spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(got @ 1..) = stream.read(&mut buffer) {
                    count.fetch_add(got as u64, Ordering::Relaxed);
                }
            });
        }
    });
    Ok(())
}

/// The host's program that copies from a guest to a port of another one, as guests have to that are not siblings.
fn relay_program(host: &Path, sibling: &Path) -> Result<(), String> {
    let mut path = host.as_os_str().to_owned();
    path.push(format!("_{RELAY}"));
    let listener = UnixListener::bind(&path).map_err(io)?;
    let sibling = sibling.to_owned();
    thread::spawn(move || {
        for mut from in listener.incoming().flatten() {
            let Ok(mut to) = connect(&sibling) else { continue };
            let mut buffer = vec![0; 64 << 10];
            while let Ok(got @ 1..) = from.read(&mut buffer) {
                if to.write_all(&buffer[..got]).is_err() {
                    break;
                }
            }
        }
    });
    Ok(())
}

/// The host's program asks for a guest's port.
fn connect(host: &Path) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(host)?;
    stream.write_all(format!("CONNECT {GUEST}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::with_capacity(1, &stream).read_line(&mut line)?;
    Ok(stream)
}

/// The host's program that sends, until the guest wants no more.
fn source(host: &Path, size: usize) -> std::io::Result<()> {
    let mut stream = connect(host)?;
    let bytes = vec![0x5a; size];
    loop {
        stream.write_all(&bytes)?;
    }
}

/// `ringroad bench vsock-peer`.
pub fn run(args: Args) -> Outcome {
    let common = &args.common;
    // The guest has a CPU to itself; all of the host, devices and programs, the other one. Threads inherit it.
    pin_current_thread(common.device_cpu).map_err(|error| format!("--device-cpu {}: {error}", common.device_cpu))?;
    let folder = Folder::new("vsock")?;
    let ours = args.ours(&folder)?;
    let peer = args.peer(&folder)?;
    let counts = [Count::default(), Count::default()];
    let devices: Vec<&MeasuredDevice> = std::iter::once(&ours).chain(&peer).collect();
    for (device, count) in devices.iter().zip(&counts) {
        host_program(&device.host, count)?;
    }
    if let Some((_, sibling)) = &ours.sibling {
        relay_program(&ours.host, sibling)?;
    }
    let (mut rows, mut lines): (Vec<Value>, Vec<Vec<String>>) = (Vec::new(), Vec::new());
    let mut add = |case: String, unit: &str, fields: Value, figures: [Vec<f64>; 2], other: &str, lines_ns: &[f64]| {
        let [ours, theirs] = &figures;
        // More is better: of times the peer's by ours.
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| if unit == "us" { b / a } else { a / b }).collect();
        let (mine, line) = (Spread::of(ours), Spread::of(lines_ns));
        let mut row = json!({ "unit": unit, "ours": mine.median, "ours_min": mine.min, "ours_max": mine.max,
            "pairs": common.pairs, "poll": args.poll, "device_poll": args.device_poll, "ring": args.ring.name(),
            "line_ns": line.median });
        if let (Some(row), Some(fields)) = (row.as_object_mut(), fields.as_object()) {
            row.extend(fields.clone());
        }
        let mut columns = vec![format!("{case}, {unit}")];
        columns.extend(mine.columns(1));
        if !theirs.is_empty() {
            let (peer, ratio) = (Spread::of(theirs), Spread::of(&ratios));
            row["peer"] = json!(peer.median);
            row["peer_name"] = json!(other);
            row["ratio"] = json!(ratio.median);
            row["min"] = json!(ratio.min);
            row["max"] = json!(ratio.max);
            columns.extend(peer.columns(1));
            columns.extend(ratio.columns(2));
            columns.push(other.to_owned());
        }
        rows.push(row);
        lines.push(columns);
    };
    let peer_name = peer.as_ref().map_or("", |peer| &peer.name).to_owned();
    for &size in &args.size {
        let mut figures = [Vec::new(), Vec::new()];
        let mut line = Vec::new();
        for pair in 1..=common.pairs {
            progress(&format!("round trips of {size} B, pair {pair} of {}", common.pairs));
            line.push(common.line()?);
            for (device, figures) in devices.iter().zip(&mut figures) {
                figures.push(args.round_trip(device, size)?[0]);
            }
        }
        let fields = json!({ "direction": "there-and-back", "size": size });
        add(format!("round trip {size} B"), "us", fields, figures, &peer_name, &line);
    }
    for direction in ["to-host", "to-guest"] {
        let mut figures = [Vec::new(), Vec::new()];
        let mut line = Vec::new();
        for pair in 1..=common.pairs {
            progress(&format!("stream {direction}, pair {pair} of {}", common.pairs));
            line.push(common.line()?);
            for ((device, figures), count) in devices.iter().zip(&mut figures).zip(&counts) {
                figures.push(match direction {
                    "to-host" => args.to_host(device, count)?,
                    _ => args.to_guest(device)?,
                });
            }
        }
        let fields = json!({ "direction": direction, "size": args.write });
        add(format!("stream {direction}"), "Gb/s", fields, figures, &peer_name, &line);
    }
    let mut figures = [Vec::new(), Vec::new()];
    let mut line = Vec::new();
    for pair in 1..=common.pairs {
        progress(&format!("stream to a sibling, pair {pair} of {}", common.pairs));
        line.push(common.line()?);
        figures[0].push(args.to_sibling(&ours, Addr { cid: 4, port: GUEST })?);
        figures[1].push(args.to_sibling(&ours, Addr { cid: 2, port: RELAY })?);
    }
    let fields = json!({ "direction": "to-sibling", "size": args.write });
    add("stream to a sibling".into(), "Gb/s", fields, figures, "a program between Unix sockets", &line);
    finished();
    println!(
        "vsock with our driver on CPU {}, devices and the host's programs on CPU {}, {} pairs of {} s, median and min–max",
        common.driver_cpu, common.device_cpu, common.pairs, common.seconds
    );
    print!("{}", table(&["", "ours", "", "peer", "", "ratio", "", ""], &lines));
    common.save("vsock-peer", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}
