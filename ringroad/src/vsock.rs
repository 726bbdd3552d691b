//! `ringroad vsock`: a vsock driver (virtio 1.3, 5.10) for the command line: acts as the guest of any vhost-user vsock device.

use crate::outcome::Outcome;
use clap::Subcommand;
use ringroad_host::vsock::{VsockClient, VsockConnector};
use ringroad_text::{count, save, time};
use ringroad_traffic::{
    options::{Ring, Target, pin, poll, seconds},
    vsock::{connector, each_read, round_trips, throughput},
};
use ringroad_vsock::{Addr, Listener, SeqPacket, Settings, SocketType, Stream, bits};
use serde_json::json;
use std::{
    io::{self, Write},
    net::Shutdown,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::Duration,
};

/// Act as the guest of any vhost-user vsock device: cat, echo server, benchmark
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad vsock cat /run/ringroad/vm1.vsock 2:1024        connect stdin and stdout to port 1024 of the host (CID 2)\n  \
    ringroad vsock cat /run/ringroad/vm1.vsock --accept 52   listen on port 52 of this guest, take one connection\n  \
    ringroad vsock echo /run/ringroad/vm1.vsock 7            run an echo server on port 7\n  \
    ringroad vsock bench /run/ringroad/vm1.vsock 2:7         round trips and throughput to an echo server on host port 7")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Connect standard input and output to a vsock connection, like socat
    Cat(Cat),
    /// Run an echo server for any number of connections, until interrupted
    Echo(Echo),
    /// Measure round trips and throughput against an echo server
    Bench(Bench),
}

/// Options of the driver.
#[derive(clap::Args, Clone)]
struct Common {
    #[command(flatten)]
    target: Target,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=32768))]
    queue_size: u32,
    /// Send packets directly from the calling thread, or queue them for the worker
    #[arg(long, value_parser = ["direct", "queued"], default_value = "direct")]
    send: String,
    /// How long to poll the rings before sleeping: 0, 50us, 1ms, unlimited
    #[arg(long, default_value = "0", value_parser = poll)]
    poll: Duration,
    /// Receive buffer of each connection, in bytes
    #[arg(long, default_value_t = 256 << 10, value_parser = clap::value_parser!(u32).range(4096..))]
    buffer: u32,
    /// CID of this guest, if the device does not provide one
    #[arg(long)]
    cid: Option<u64>,
    /// If the device disconnects, wait up to SECONDS for it to return: connections are reset, listeners are kept
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "10", value_parser = seconds)]
    reconnect: Option<f64>,
    /// Use message sockets (SOCK_SEQPACKET) instead of streams; `cat` sends each line as a message
    #[arg(long)]
    seqpacket: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Example:\n  ringroad vsock cat /run/ringroad/vm1.vsock 2:1024")]
struct Cat {
    #[command(flatten)]
    common: Common,
    /// Address to connect to, as CID:PORT; CID 2 is the host
    #[arg(value_parser = addr, required_unless_present = "accept")]
    peer: Option<Addr>,
    /// Listen on PORT of this guest and take one connection, instead of connecting
    #[arg(long, value_name = "PORT", conflicts_with = "peer")]
    accept: Option<u32>,
}

#[derive(clap::Args)]
#[command(after_help = "Example:\n  ringroad vsock echo /run/ringroad/vm1.vsock 7")]
struct Echo {
    #[command(flatten)]
    common: Common,
    /// Port to listen on
    port: u32,
}

#[derive(clap::Args)]
#[command(after_help = "Example:\n  ringroad vsock bench /run/ringroad/vm1.vsock 2:7 --size 64,4096 --poll 50us")]
struct Bench {
    #[command(flatten)]
    common: Common,
    /// Address of an echo server, as CID:PORT; CID 2 is the host
    #[arg(value_parser = addr)]
    peer: Addr,
    /// Message sizes of the round trips, in bytes
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096])]
    size: Vec<usize>,
    /// Size of each write of the throughput measurement, in bytes
    #[arg(long, default_value_t = 65536)]
    write: usize,
    /// Duration of each measurement in seconds
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Pin the driver to this CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Write the result as JSON to FILE (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn addr(text: &str) -> Result<Addr, String> {
    let wrong = || format!("expected CID:PORT such as 2:1024, found {text}");
    let (cid, port) = text.split_once(':').ok_or_else(wrong)?;
    Ok(Addr { cid: cid.parse().map_err(|_| wrong())?, port: port.parse().map_err(|_| wrong())? })
}

impl Common {
    /// Connects the driver to the device.
    fn connect(&self) -> Result<VsockClient, Box<dyn std::error::Error>> {
        let Target { socket, listen, ring } = &self.target;
        let settings =
            Settings { direct: self.send == "direct", poll: self.poll, buffer: self.buffer, ..Settings::default() };
        let connector = VsockConnector {
            listen: *listen,
            queue_size: self.queue_size,
            cid: self.cid,
            reconnect: self.reconnect.map(Duration::from_secs_f64),
            ..connector(socket, *ring, settings)
        };
        let client = connector.connect()?;
        if client.acked() & bits::RING_PACKED == 0 && *ring == Ring::Packed {
            log::info!("the device does not offer packed rings; using split rings");
        }
        Ok(client)
    }

    fn kind(&self) -> SocketType {
        if self.seqpacket { SocketType::SeqPacket } else { SocketType::Stream }
    }
}

/// Runs the subcommand.
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
    let kind = args.common.kind();
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
            // Our input may still be open: the peer gets an orderly end, not a reset.
            stream.shutdown(Shutdown::Both);
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
            socket.shutdown(Shutdown::Both);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn echo(args: &Echo) -> Outcome {
    let client = args.common.connect()?;
    let stack = client.stack();
    let kind = args.common.kind();
    let listener = Listener::bind(stack, args.port, kind)?;
    eprintln!("echo server listening on {}:{}", stack.cid(), args.port);
    let size = args.common.buffer as usize;
    loop {
        match kind {
            SocketType::Stream => {
                let stream = listener.accept()?;
                thread::spawn(move || {
                    if each_read(&stream, 64 << 10, |bytes| (&stream).write_all(bytes)).is_ok() {
                        stream.shutdown(Shutdown::Write);
                    }
                });
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

fn bench(args: &Bench) -> Outcome {
    if let Some(cpu) = args.cpu {
        pin("--cpu", cpu)?;
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
    let write = args.write;
    let rate = throughput(connect()?, write, duration)?;
    println!("writes of {write} B: {rate:.2} Gb/s round trip");
    rows.push(json!({ "write": write, "gbps": rate }));
    let ways = client.stack().report().ways;
    println!("packets sent: {} direct, {} queued", count(ways.direct), count(ways.queued));
    if let Some(file) = &args.json {
        save(file, &json!({ "rows": rows, "direct": ways.direct, "queued": ways.queued }))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(addr("2:1024"), Ok(Addr { cid: 2, port: 1024 }));
        for wrong in ["", "2", "2:", ":1", "2:x", "-1:1", "2:4294967296"] {
            assert!(addr(wrong).unwrap_err().contains("expected CID:PORT"), "{wrong}");
        }
    }
}
