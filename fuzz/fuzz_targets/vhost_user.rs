//! The vhost-user back end against a frontend that sends anything: whole messages with any content and descriptors, and
//! messages that are not whole.
#![no_main]

use ringroad_host::{
    PortSettings, Worker, WorkerConfig,
    vhost_user::{Access, Limits, Rate, Role, Server, VhostConfig, VhostPort},
};
use ringroad_mem::Region;
use ringroad_net::{Config, Features};
use ringroad_switch::Gather;
use ringroad_traffic::ports::{Measured, Mode};
use ringroad_wire::ethernet::MacAddr;
use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, LazyLock},
    time::Duration,
};
use vmm_sys_util::{eventfd::EventFd, sock_ctrl_msg::ScmSocket};

struct Target {
    socket: PathBuf,
    region: Arc<Region>,
    memory: File,
    event: EventFd,
    _server: Server<Measured<VhostPort>>,
    _worker: Worker<Measured<VhostPort>>,
}

/// Limits on how often something happens would have the fuzzer wait.
const MUCH: Rate = Rate { burst: 1_000_000, rate: 1_000_000 };

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let socket = std::env::temp_dir().join(format!("ringroad-fuzz-{}.sock", std::process::id()));
    let worker =
        Worker::start(WorkerConfig { cpu: None, addresses: 64, ageing: 300, hold: 2, gather: Gather::Auto, turn: 4 })
            .unwrap();
    let config = VhostConfig {
        name: "fuzz".into(),
        socket: socket.clone(),
        role: Role::Server,
        features: Features::all(),
        config: Config { mac: MacAddr::local(1), queue_pairs: 2, speed: Some(10_000), ..Config::default() },
        settings: PortSettings { limits: Default::default(), ..PortSettings::default() },
        frontend: Limits { connects: MUCH, messages: MUCH, refusals: MUCH, ..Limits::default() },
        access: Access::default(),
    };
    let server = Server::start(config, &worker, |guest| Measured::new(guest, Mode::Reflect)).unwrap();
    let (region, memory) = Region::create(65536, 0x10000, false).unwrap();
    Target { socket, region, memory, event: EventFd::new(libc_nonblock()).unwrap(), _server: server, _worker: worker }
});

fn libc_nonblock() -> i32 {
    vmm_sys_util::eventfd::EFD_NONBLOCK
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let words = [request, flags, payload.len() as u32];
    words.iter().flat_map(|word| word.to_le_bytes()).chain(payload.iter().copied()).collect()
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let target = &*TARGET;
    let Ok(stream) = UnixStream::connect(&target.socket) else { return };
    let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
    let _ = stream.set_write_timeout(Some(Duration::from_millis(20)));
    let mut input = data;
    let mut take = |n: usize| {
        let (head, rest) = input.split_at(n.min(input.len()));
        input = rest;
        let mut out = head.to_vec();
        out.resize(n, 0);
        out
    };
    let user = target.region.user();
    // Most inputs should get somewhere: a ring may be set up well before the rest of the input comes.
    let start = take(1)[0];
    if start & 1 == 1 {
        let features = Features::all().bits() | 1 << 30;
        let send = |request: u32, payload: &[u64], fds: &[RawFd]| {
            let payload: Vec<u8> = payload.iter().flat_map(|word| word.to_le_bytes()).collect();
            let _ = stream.send_with_fds(&[&message(request, 1, &payload)[..]], fds);
        };
        send(16, &[1 | 8 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15], &[]);
        send(2, &[if start & 2 == 2 { features } else { features & !(1 << 34) }], &[]);
        send(5, &[1, 0x10000, 65536, user, 0], &[target.memory.as_raw_fd()]);
        for vring in 0..2u64 {
            let at = user + vring * 16384;
            send(8, &[vring | 64 << 32], &[]);
            send(10, &[vring], &[]);
            send(9, &[vring, at, at + 8192, at + 4096, 0], &[]);
            send(13, &[vring], &[target.event.as_raw_fd()]);
            send(12, &[vring], &[target.event.as_raw_fd()]);
            send(18, &[vring | 1 << 32], &[]);
        }
    }
    for _ in 0..32 {
        let head = take(4);
        let request = u32::from(head[0] % 45);
        let flags = if head[1] & 7 == 0 { u32::from(head[1]) } else { 1 | u32::from(head[1] & 8) };
        let mut payload = take(usize::from(head[2]) % 64);
        // Addresses that mean something.
        if head[3] & 1 == 1 && payload.len() >= 24 {
            let offset = u64::from_le_bytes(payload[8..16].try_into().unwrap()) % 65536;
            payload[8..16].copy_from_slice(&(user + offset).to_le_bytes());
        }
        let mut bytes = message(request, flags, &payload);
        if head[3] & 2 == 2 {
            bytes.truncate(bytes.len() / 2);
        }
        let fds = [target.memory.as_raw_fd(), target.event.as_raw_fd()];
        let fds = match head[3] >> 2 & 7 {
            0 | 1 => &fds[..0],
            2 | 3 => &fds[..1],
            4 | 5 => &fds[1..],
            _ => &fds[..],
        };
        if stream.send_with_fds(&[&bytes[..]], fds).is_err() {
            break;
        }
        // What the rings say changes too.
        let at = u16::from_le_bytes([head[0], head[1]]) as usize % 65000;
        if let Some(span) = target.region.span(at, 16) {
            span.write(&take(8));
        }
        let _ = target.event.write(1);
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    // Until the back end has closed its end: then it has dealt with all of it. It has to, soon.
    let mut rest = Vec::new();
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    match (&stream).take(1 << 20).read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the back end has not closed a connection that its frontend closed: {error}"),
    }
    let _ = (&stream).flush();
});
