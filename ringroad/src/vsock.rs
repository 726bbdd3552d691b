//! `ringroad vsock`: a driver of our own on any vhost-user vsock device, ours or another's, for the command line.

use crate::{
    Outcome,
    blast::{Ring, seconds, write_json},
    report::{count, time},
};
use clap::Subcommand;
use hdrhistogram::Histogram;
use ringroad_host::{
    pin_current_thread,
    vsock::{VsockClient, VsockConnector},
};
use ringroad_vsock::{Addr, DriverSide, Features, Listener, SeqPacket, Settings, SocketType, Stream, bits};
use serde_json::json;
use std::{
    io::{self, Read, Write},
    net::Shutdown,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

/// Be a guest of a vhost-user vsock device, ours or another's
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad vsock cat /run/ringroad/vm1.vsock 2:1024      standard input and output to port 1024 of the host\n  \
    ringroad vsock cat /run/ringroad/vm1.vsock --accept 52 wait for a connection to port 52 of ours\n  \
    ringroad vsock echo /run/ringroad/vm1.vsock 7          send everything back that comes to port 7\n  \
    ringroad vsock bench /run/ringroad/vm1.vsock 2:7       round trips and throughput with an echo at port 7 of the host")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Standard input and output to a connection, like socat
    Cat(Cat),
    /// Send back what comes, on any number of connections, until ended
    Echo(Echo),
    /// Measure round trips and throughput with something that echoes
    Bench(Bench),
}

/// How the driver is set up.
#[derive(clap::Args, Clone)]
pub struct Common {
    /// The socket of the device
    socket: PathBuf,
    /// Make the socket and wait for the device, instead of connecting to one
    #[arg(long)]
    listen: bool,
    /// The layout of the rings
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    /// Entries of each ring
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=32768))]
    queue_size: u32,
    /// Which way packets go
    #[arg(long, value_parser = ["direct", "queued"], default_value = "direct")]
    send: String,
    /// For how long to look at the rings before sleeping: 0, 50us, unlimited
    #[arg(long, default_value = "0", value_parser = poll)]
    poll: Duration,
    /// Bytes to keep for each connection
    #[arg(long, default_value_t = 256 << 10, value_parser = clap::value_parser!(u32).range(4096..))]
    buffer: u32,
    /// Our context identifier, where the device does not tell one
    #[arg(long)]
    cid: Option<u64>,
    /// When the device goes away, wait for it to come back, so many seconds at most; connections are reset, what listens goes on
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "10", value_parser = seconds)]
    reconnect: Option<f64>,
    /// Messages (SOCK_SEQPACKET) instead of bytes
    #[arg(long)]
    seqpacket: bool,
}

#[derive(clap::Args)]
struct Cat {
    #[command(flatten)]
    common: Common,
    /// Where to connect to, as CID:PORT; 2 is the host
    #[arg(value_parser = addr, required_unless_present = "accept")]
    peer: Option<Addr>,
    /// Wait for a connection to this port of ours instead
    #[arg(long, value_name = "PORT", conflicts_with = "peer")]
    accept: Option<u32>,
}

#[derive(clap::Args)]
struct Echo {
    #[command(flatten)]
    common: Common,
    /// The port
    port: u32,
}

#[derive(clap::Args)]
struct Bench {
    #[command(flatten)]
    common: Common,
    /// Where something echoes, as CID:PORT; 2 is the host
    #[arg(value_parser = addr)]
    peer: Addr,
    /// Bytes of a round trip
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096])]
    size: Vec<usize>,
    /// Bytes of each write when it is throughput that is measured
    #[arg(long, default_value_t = 65536)]
    write: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Run on one CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Write the result as JSON to a file (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn addr(text: &str) -> Result<Addr, String> {
    let wrong = || format!("expected CID:PORT such as 2:1024, found {text}");
    let (cid, port) = text.split_once(':').ok_or_else(wrong)?;
    Ok(Addr { cid: cid.parse().map_err(|_| wrong())?, port: port.parse().map_err(|_| wrong())? })
}

/// "0", "50us", "3ms", "unlimited".
pub fn poll(text: &str) -> Result<Duration, String> {
    let number = |unit: &str| text.strip_suffix(unit).and_then(|digits| digits.parse::<u64>().ok());
    match text {
        "0" => Ok(Duration::ZERO),
        "unlimited" => Ok(Duration::MAX),
        _ => number("us")
            .map(Duration::from_micros)
            .or_else(|| number("ms").map(Duration::from_millis))
            .ok_or_else(|| format!("expected 0, a number of us or ms, or unlimited, found {text}")),
    }
}

/// Connects our driver.
impl Common {
    fn connect(&self) -> Result<VsockClient, Box<dyn std::error::Error>> {
        let features = Features { packed: self.ring == Ring::Packed, ..Features::ALL };
        let connector = VsockConnector {
            socket: self.socket.clone(),
            listen: self.listen,
            patience: Duration::from_secs(5),
            features: features.bits(),
            queue_size: self.queue_size,
            receive: RECEIVE,
            cid: self.cid,
            settings: Settings {
                direct: self.send == "direct",
                poll: self.poll,
                buffer: self.buffer,
                ..Settings::default()
            },
            reconnect: self.reconnect.map(Duration::from_secs_f64),
        };
        let client = connector.connect()?;
        if client.acked() & bits::RING_PACKED == 0 && self.ring == Ring::Packed {
            log::info!("the device has no packed rings; split ones are used");
        }
        Ok(client)
    }
}

/// Bytes of payload that a receive buffer of the driver holds.
pub const RECEIVE: usize = 16 << 10;

/// Does what was asked for.
pub fn run(args: Args) -> Outcome {
    match args.command {
        Command::Cat(args) => cat(&args),
        Command::Echo(args) => echo(&args),
        Command::Bench(args) => bench(&args),
    }
}

fn cat(args: &Cat) -> Outcome {
    let client = args.common.connect()?;
    let stack = client.stack();
    let kind = if args.common.seqpacket { SocketType::SeqPacket } else { SocketType::Stream };
    let listener = args.accept.map(|port| Listener::bind(stack, port, kind)).transpose()?;
    let connect = |error: io::Error| match args.peer {
        Some(peer) => format!("cannot connect to {peer}: {error}"),
        None => error.to_string(),
    };
    match kind {
        SocketType::Stream => {
            let stream = match (&listener, args.peer) {
                (Some(listener), _) => listener.accept()?,
                (None, peer) => Stream::connect(stack, peer.unwrap_or_default()).map_err(connect)?,
            };
            let input = stream.clone();
            thread::spawn(move || {
                let _ = io::copy(&mut io::stdin().lock(), &mut &input);
                input.shutdown(Shutdown::Write);
            });
            io::copy(&mut &stream, &mut io::stdout().lock())?;
        }
        SocketType::SeqPacket => {
            let socket = match (&listener, args.peer) {
                (Some(listener), _) => listener.accept_messages()?,
                (None, peer) => SeqPacket::connect(stack, peer.unwrap_or_default()).map_err(connect)?,
            };
            let input = socket.clone();
            thread::spawn(move || {
                // A line is a message.
                for line in io::stdin().lines().map_while(Result::ok) {
                    if input.send(line.as_bytes(), true).is_err() {
                        break;
                    }
                }
                input.shutdown(Shutdown::Write);
            });
            let mut message = vec![0; args.common.buffer as usize];
            while let Some((len, _)) = socket.receive(&mut message)? {
                let mut stdout = io::stdout().lock();
                stdout.write_all(&message[..len.min(message.len())])?;
                stdout.write_all(b"\n")?;
                stdout.flush()?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn echo(args: &Echo) -> Outcome {
    let client = args.common.connect()?;
    let stack = client.stack();
    let kind = if args.common.seqpacket { SocketType::SeqPacket } else { SocketType::Stream };
    let listener = Listener::bind(stack, args.port, kind)?;
    eprintln!("echo at {}:{}", stack.cid(), args.port);
    let size = args.common.buffer as usize;
    loop {
        match kind {
            SocketType::Stream => {
                let stream = listener.accept()?;
                thread::spawn(move || echo_bytes(&stream));
            }
            SocketType::SeqPacket => {
                let socket = listener.accept_messages()?;
                thread::spawn(move || {
                    let mut message = vec![0; size];
                    while let Ok(Some((len, record))) = socket.receive(&mut message) {
                        if socket.send(&message[..len.min(size)], record).is_err() {
                            break;
                        }
                    }
                });
            }
        }
    }
}

/// Sends back what comes, until the other end is done.
fn echo_bytes(stream: &Stream<DriverSide>) {
    let mut stream = stream;
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
    stream.shutdown(Shutdown::Write);
}

fn bench(args: &Bench) -> Outcome {
    if let Some(cpu) = args.cpu {
        pin_current_thread(cpu).map_err(|error| format!("--cpu {cpu}: {error}"))?;
    }
    let client = args.common.connect()?;
    let duration = Duration::from_secs_f64(args.seconds);
    let connect = || {
        Stream::connect(client.stack(), args.peer).map_err(|error| format!("cannot connect to {}: {error}", args.peer))
    };
    let mut rows = Vec::new();
    for &size in &args.size {
        let times = round_trips(&connect()?, size, duration)?;
        let at = |quantile| time(times.value_at_quantile(quantile));
        let mean = time(times.mean() as u64);
        let trips = count(times.len());
        println!("{size} B: {trips} round trips, mean {mean}, p1 {}, p50 {}, p99 {}", at(0.01), at(0.5), at(0.99));
        rows.push(json!({ "size": size, "round_trips": times.len(), "mean": times.mean(), "unit": "ns",
            "p1": times.value_at_quantile(0.01), "p50": times.value_at_quantile(0.5),
            "p99": times.value_at_quantile(0.99) }));
    }
    let stream = connect()?;
    let (there, back) = (stream.clone(), stream);
    let write = args.write;
    let start = Instant::now();
    let sender = thread::spawn(move || {
        let bytes = vec![0x5a; write];
        while start.elapsed() < duration {
            (&there).write_all(&bytes)?;
        }
        there.shutdown(Shutdown::Write);
        io::Result::Ok(())
    });
    let (mut buffer, mut total) = (vec![0; 256 << 10], 0u64);
    loop {
        match (&back).read(&mut buffer)? {
            0 => break,
            got => total += got as u64,
        }
    }
    sender.join().map_err(|_| "the sender has ended")??;
    let rate = total as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e9;
    println!("writes of {write} B: {rate:.2} Gb/s there and back");
    rows.push(json!({ "write": write, "gbps": rate }));
    let ways = client.stack().report().ways;
    println!("packets sent: {} direct, {} queued", count(ways.direct), count(ways.queued));
    if let Some(file) = &args.json {
        write_json(file, &json!({ "rows": rows, "direct": ways.direct, "queued": ways.queued }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Times round trips of so many bytes, in nanoseconds.
pub fn round_trips<S: Read + Write>(stream: S, size: usize, duration: Duration) -> io::Result<Histogram<u64>> {
    let mut stream = stream;
    let mut times = Histogram::new(3).map_err(io::Error::other)?;
    let (out, mut back) = (vec![0xa5; size], vec![0; size]);
    let start = Instant::now();
    let mut sent = start;
    while sent.duration_since(start) < duration {
        stream.write_all(&out)?;
        stream.read_exact(&mut back)?;
        let now = Instant::now();
        times.record(now.duration_since(sent).as_nanos() as u64).map_err(io::Error::other)?;
        sent = now;
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_and_how_long() {
        assert_eq!(addr("2:1024"), Ok(Addr { cid: 2, port: 1024 }));
        for wrong in ["", "2", "2:", ":1", "2:x", "-1:1", "2:4294967296"] {
            assert!(addr(wrong).unwrap_err().contains("expected CID:PORT"), "{wrong}");
        }
        assert_eq!(poll("0"), Ok(Duration::ZERO));
        assert_eq!(poll("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(poll("unlimited"), Ok(Duration::MAX));
        assert!(poll("5").is_err());
    }
}
