//! `ringroad attach`: the driver of any vhost-user network device, with a TAP interface in place of a guest's network stack. A switch
//! with two ports: the device and the interface.

use crate::outcome::Outcome;
use clap::ValueEnum;
use ringroad_host::{
    Port, PortSettings, TapPort, Worker, WorkerConfig,
    vhost_user::{Attach, AttachedPort, LONG_FRAMES},
};
use ringroad_net::{Held, SizedDriver, Sizing};
use ringroad_switch::{Limits, Poll};
use ringroad_text::save;
use serde_json::{Value, json};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

ringroad_host::ports! {
    /// What this command connects.
    enum Ends {
        /// The device.
        Device(AttachedPort),
        /// The interface.
        Tap(TapPort),
    }
}

/// How long receive buffers are.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Buffers {
    /// A frame of the MTU
    Mtu,
    /// A page
    Page,
    /// The average length of recent frames, between the two
    Auto,
}

/// Put any vhost-user network device behind a TAP interface, as its driver
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad attach /run/ringroad/vm1.sock --tap rr1               the host itself takes the place of the guest vm1\n  \
    ringroad attach /run/ringroad/vm1.sock --tap rr1 --buffers page --every 1\n\n\
    Needs CAP_NET_ADMIN, or an interface that was prepared for the user. Then give the interface an address. It has no carrier while\n\
    the device's link is down. SIGINT (Ctrl-C) or SIGTERM ends it; it also ends, with an error, when the device disconnects.")]
pub struct Args {
    /// Path of the device's Unix socket
    socket: PathBuf,
    /// Name of the TAP interface, created if it does not exist
    #[arg(long)]
    tap: String,
    /// MTU of the interface, and the largest payload of a frame
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u16).range(68..=i64::from(SizedDriver::MTU)))]
    mtu: u16,
    /// How long receive buffers are
    #[arg(long, value_enum, default_value = "auto")]
    buffers: Buffers,
    /// Receive no frame that is longer than the MTU: the device cuts them
    #[arg(long)]
    no_long_frames: bool,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(4..=32768))]
    queue_size: u32,
    /// How long to poll before sleeping: 0, a time such as 50us, or unlimited
    #[arg(long, default_value = "0", value_parser = ringroad_traffic::options::poll)]
    poll: Duration,
    /// Pin the worker to this CPU
    #[arg(long)]
    cpu: Option<usize>,
    /// Print a line of JSON every SECONDS: frames, bytes, and the memory that their buffers took
    #[arg(long, value_name = "SECONDS", value_parser = ringroad_traffic::options::seconds)]
    every: Option<f64>,
    /// Write the figures as JSON to FILE at the end (- for standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How often it is checked whether the device is still connected.
const LOOK: Duration = Duration::from_millis(100);

/// Runs until a signal, or until the device is gone.
pub fn run(args: Args) -> Outcome {
    let sizing = match args.buffers {
        Buffers::Mtu => Sizing::Mtu,
        Buffers::Page => Sizing::Page,
        Buffers::Auto => Sizing::Auto,
    };
    let (socket, queue_size, mtu) = (args.socket.clone(), args.queue_size, args.mtu);
    let mut attach = Attach { socket, queue_size, mtu, sizing, ..Attach::default() };
    attach.features.set(LONG_FRAMES, !args.no_long_frames);
    let device = AttachedPort::connect(&attach)?;
    let tap = TapPort::open("tap", &args.tap, 1, Some(mtu))?;
    let worker = Worker::<Ends>::start(WorkerConfig { cpu: args.cpu, ..WorkerConfig::default() })?;
    let limits = Limits { link_local: true, storm: 0, ..Limits::NETWORK };
    let settings = PortSettings { poll: Poll::For(args.poll), limits, ..PortSettings::default() };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, 1, stop.clone())?;
        flag::register(signal, stop.clone())?;
    }
    let tap = worker.add(Port::new(Ends::Tap(tap), settings))?;
    let handle = worker.add(Port::new(Ends::Device(device), settings))?;
    let (Ends::Device(device), Ends::Tap(interface)) = (handle.port().kind(), tap.port().kind()) else {
        return Err("the ports are not a device and an interface".into());
    };
    // The interface may send what the device takes.
    handle.offloads_changed();
    eprintln!("ringroad: {} is behind {}; Ctrl-C ends it", args.socket.display(), args.tap);
    let start = Instant::now();
    let figures = || {
        let (held, buffer) = device.held();
        let sent = handle.port().report().sent;
        figures(start.elapsed(), held, buffer, [sent.frames, sent.bytes])
    };
    let every = args.every.map(Duration::from_secs_f64);
    let (mut next, mut link) = (start, true);
    while !stop.load(Ordering::Relaxed) && !device.is_closed() {
        if every.is_some_and(|_| Instant::now() >= next) {
            println!("{}", figures());
            next += every.unwrap_or_default();
        }
        if device.link() != link {
            link = !link;
            pass_on(link, interface, &args);
        }
        thread::sleep(every.map_or(LOOK, |every| LOOK.min(every)));
    }
    if let Some(file) = &args.json {
        save(file, &figures())?;
    }
    let closed = device.is_closed();
    drop(tap);
    if closed && !stop.load(Ordering::Relaxed) {
        return Err(format!("the device at {} has disconnected", args.socket.display()).into());
    }
    Ok(std::process::ExitCode::SUCCESS)
}

/// Gives the interface a carrier as long as the device's link is up.
fn pass_on(link: bool, interface: &TapPort, args: &Args) {
    let (socket, tap) = (args.socket.display(), &args.tap);
    match interface.set_carrier(link) {
        Ok(()) if link => eprintln!("ringroad: the link of {socket} is up, and {tap} has a carrier again"),
        Ok(()) => eprintln!("ringroad: the link of {socket} is down, and {tap} has no carrier"),
        Err(error) => eprintln!("ringroad: cannot set the carrier of {tap} to that of {socket}: {error}"),
    }
}

/// The figures so far. `truesize`: bytes of all buffers that received frames were in, used or not.
fn figures(time: Duration, held: Held, buffer: usize, [sent, sent_bytes]: [u64; 2]) -> Value {
    let Held { frames, bytes, buffers, truesize } = held;
    let overhead = if bytes > 0 { truesize as f64 / bytes as f64 } else { 0.0 };
    json!({
        "seconds": time.as_secs_f64(),
        "received": { "frames": frames, "bytes": bytes, "buffers": buffers, "truesize": truesize },
        "truesize_per_byte": overhead,
        "buffer": buffer,
        "sent": { "frames": sent, "bytes": sent_bytes },
    })
}
