//! `soak --ports 64 --vsocks 4 --seconds 3600`: ports and vsock devices whose frontends come and go, break their rings, truncate their
//! memory and are killed in the middle, at random, beside victims. Every minute, and at the end, the daemon's memory,
//! descriptors and threads have to be what they were, and the victims have to have gone on.

#![forbid(unsafe_code)]

use ringroad_attacks::{
    Random, be_nice,
    daemon::Daemon,
    frontend::{Frontend, request::LAST, signal},
    net::{BROADCAST, NetPort, TX, frame},
    victim::Victim,
    vsock::{Header, VsockGuest, op},
};
use std::{
    io::{Read, Write},
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long it runs before what there is counts as normal: allocators and caches have to fill.
const WARM: Duration = Duration::from_secs(20);
/// How often it is judged.
const PERIOD: Duration = Duration::from_secs(60);
/// By how much the daemon's own memory may differ from what it was when warm.
const SLACK: u64 = 32 << 20;
/// How long a vsock connection may wait for its end.
const LINGER: Duration = Duration::from_secs(15);
/// Descriptors more or less: frontends that are there just now.
const FDS_OF_A_FRONTEND: u64 = 16;

/// One life of a port's frontend.
fn port(path: &Path, random: &mut Random) {
    let Ok(mut port) = NetPort::connect(path, random.below(2) == 0) else { return };
    let mac = port.mac;
    let frames = frame(BROADCAST, mac, b"soak");
    for _ in 0..random.below(50) {
        port.reclaim();
        for _ in 0..random.below(16) {
            port.put(&frames);
        }
        port.flush();
        port.receive(0, |_, _| {});
        match random.below(60) {
            0 => _ = port.device.mem.file().set_len(random.below(4) * 0x8000),
            1 | 2 => {
                let ring = &port.device.rings[random.below(2) as usize];
                let area = [ring.desc, ring.driver, ring.device][random.below(3) as usize];
                let mut bytes = vec![0; 1 + random.below(24) as usize];
                random.fill(&mut bytes);
                ring.mem.write(area + random.below(u64::from(ring.size) * 16), &bytes);
                signal(&port.device.kicks[TX]);
            }
            3 => {
                let mut payload = vec![0; random.below(50) as usize];
                random.fill(&mut payload);
                let _ = port.device.frontend.send(random.below(u64::from(LAST) + 2) as u32, 1 << 3, &payload, &[]);
            }
            // Gone in the middle of something.
            4 => return,
            _ => {}
        }
        thread::sleep(Duration::from_millis(random.below(20)));
    }
}

/// One life of a vsock guest, with connections to itself, to others and to the host.
fn guest(path: &Path, random: &mut Random) {
    let Ok(mut guest) = VsockGuest::connect(path, false, 64, 256) else { return };
    guest.give(64);
    let until = Instant::now() + Duration::from_millis(200 + random.below(1000));
    let mut port = 0;
    while Instant::now() < until {
        let to = [guest.cid, 2, 2000, 2001][random.below(4) as usize];
        port += 1;
        let there = Header { kind: 1 + random.below(2) as u16, ..guest.header(port, (to, 5), op::REQUEST) };
        let rest = [op::RESPONSE, op::RW, op::RW, op::CREDIT_REQUEST, op::SHUTDOWN, op::RST];
        let mut headers = vec![there];
        for _ in 0..random.below(20) {
            headers.push(Header { op: rest[random.below(6) as usize], flags: random.below(4) as u32, ..there });
        }
        guest.flood(random.below(2000) as u32, &mut headers.into_iter(), until);
        let count = guest.received(|_, _| {});
        if random.below(10) > 0 {
            guest.give(count);
        }
        if random.below(100) == 0 {
            let _ = guest.device.mem.file().set_len(0x8000);
        }
        thread::sleep(Duration::from_millis(random.below(10)));
    }
}

/// A program of the host that connects to a guest that may not be there.
fn program(path: &Path, random: &mut Random) {
    let Ok(mut stream) = ringroad_attacks::frontend::connect(path, Duration::from_millis(100)) else { return };
    let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
    let _ = stream.set_write_timeout(Some(Duration::from_millis(50)));
    let line = [&b"CONNECT 5\n"[..], b"CONN", b"nonsense\n", b"CONNECT 7\nhello"][random.below(4) as usize];
    let _ = stream.write_all(line);
    let _ = stream.read(&mut [0; 64]);
}

fn argument(name: &str, default: u64) -> u64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    let Some(_) = arguments.next() else { return default };
    arguments.next().and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("expected a number after {name}"))
}

/// What the attackers' threads share with `main`.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    pause: AtomicBool,
    /// Attackers at work.
    busy: AtomicU64,
    lives: AtomicU64,
}

fn start(ports: u64, vsocks: u64) -> Daemon {
    Daemon::start(|config| {
        ["v1", "v2"].iter().for_each(|name| config.port(name));
        (0..ports).for_each(|index| config.port(&format!("p{index}")));
        config.vsock("ve", 1000, "");
        (0..vsocks).for_each(|index| config.vsock(&format!("s{index}"), 2000 + index, "groups = [\"soak\"]"));
    })
}

/// Starts the attackers. Each thread is several frontends in turn: the daemon is to be busy, not this program.
fn attack(daemon: &Daemon, ports: u64, vsocks: u64, shared: &Arc<Shared>) -> Vec<JoinHandle<()>> {
    let start = |worker: u64| {
        let shared = shared.clone();
        let names: Vec<_> = (0..ports).filter(|index| index % 8 == worker).map(|index| format!("p{index}")).collect();
        let sockets: Vec<_> = names.iter().map(|name| daemon.socket(name)).collect();
        let serve = format!("s{}", worker % vsocks.max(1));
        let (socket, host) = (daemon.socket(&serve), daemon.host(&serve));
        thread::spawn(move || {
            be_nice();
            let mut random = Random::new(worker * 77 + 1);
            while !shared.stop.load(Ordering::Relaxed) {
                if shared.pause.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
                shared.busy.fetch_add(1, Ordering::SeqCst);
                match worker {
                    0..8 if !sockets.is_empty() => match random.below(10) {
                        0 => _ = Frontend::connect(&sockets[random.below(sockets.len() as u64) as usize]),
                        _ => port(&sockets[random.below(sockets.len() as u64) as usize], &mut random),
                    },
                    _ if vsocks == 0 => {}
                    8..10 => guest(&socket, &mut random),
                    _ => program(&host, &mut random),
                }
                shared.busy.fetch_sub(1, Ordering::SeqCst);
                shared.lives.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(random.below(20)));
            }
        })
    };
    (0..12).map(start).collect()
}

/// Pauses the attackers, so that what is left has leaked. Waits until the daemon has at most this many descriptors: closed
/// vsock connections linger.
fn settle(daemon: &Daemon, shared: &Shared, most: u64) {
    shared.pause.store(true, Ordering::SeqCst);
    let patience = Instant::now() + Duration::from_secs(10);
    while shared.busy.load(Ordering::SeqCst) > 0 && Instant::now() < patience {
        thread::sleep(Duration::from_millis(10));
    }
    thread::sleep(Duration::from_millis(500));
    let patience = Instant::now() + LINGER;
    while daemon.fds() > most && Instant::now() < patience {
        thread::sleep(Duration::from_millis(100));
    }
}

/// Stops the daemon, which is to take no longer than a second.
fn ends_in_time(daemon: &mut Daemon) -> bool {
    let took = daemon.terminate(Duration::from_secs(5));
    println!("SIGTERM: {took:?}");
    let ends = took.is_some_and(|took| took <= Duration::from_secs(1));
    if !ends {
        println!("FAILED: SIGTERM did not end it in 1 s");
    }
    ends
}

fn main() -> ExitCode {
    let (ports, vsocks, seconds) = (argument("--ports", 64), argument("--vsocks", 4), argument("--seconds", 3600));
    let mut daemon = start(ports, vsocks);
    let idle = (daemon.fds(), daemon.threads());
    let net = Victim::net(&daemon, "v1", "v2", true).expect("victims connect");
    let echo = Victim::echo(&daemon, "ve", false).expect("an echo connects");
    let shared = Arc::<Shared>::default();
    let threads = attack(&daemon, ports, vsocks, &shared);
    let start = Instant::now();
    let end = start + Duration::from_secs(seconds);
    thread::sleep(WARM.min(end.saturating_duration_since(start) / 2));
    net.figures();
    echo.figures();
    let warm = daemon.memory();
    let mut failures = 0;
    println!("idle: {} descriptors, {} threads; warm: {} KiB", idle.0, idle.1, warm >> 10);
    loop {
        let judged = (Instant::now() + PERIOD).min(end);
        while Instant::now() < judged && daemon.is_alive() {
            thread::sleep(Duration::from_millis(200));
        }
        let over = Instant::now() >= end;
        let (frames, echoes) = (net.figures(), echo.figures());
        // The two victims' and the echo's frontends, and the echo's program, are still there.
        let most = idle.0 + 4 * FDS_OF_A_FRONTEND;
        settle(&daemon, &shared, most);
        let (memory, fds, threads) = (daemon.memory(), daemon.fds(), daemon.threads());
        let alive = daemon.is_alive();
        println!(
            "{:>5} s: {} lives, frames {frames}, echo {echoes}; {} KiB, {fds} descriptors, {threads} threads, log {} KiB",
            start.elapsed().as_secs(),
            shared.lives.load(Ordering::Relaxed),
            memory >> 10,
            daemon.logged() >> 10
        );
        let mut check = |holds: bool, what: &str| {
            if !holds {
                println!("FAILED: {what}");
                failures += 1;
            }
        };
        check(alive, "the daemon ended");
        check(memory <= warm + SLACK, "its memory grew");
        check(fds <= most, "its descriptors leaked");
        check(threads <= idle.1 + 2, "its threads leaked");
        check(frames.rate >= 8000.0, "the victims' frames did not go on");
        check(frames.disorder == 0, "frames came twice or out of order");
        check(echoes.rate >= 400.0, "the echo did not go on");
        if over || !alive {
            if !alive {
                println!("{}\n{}", daemon.end(), daemon.log());
            }
            break;
        }
        net.figures();
        echo.figures();
        shared.pause.store(false, Ordering::SeqCst);
    }
    shared.stop.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|thread| _ = thread.join());
    if ends_in_time(&mut daemon) && failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
