//! What there is only so much of: address space, the worker's time, memory for programs of the host.

use ringroad_attacks::{
    daemon::Daemon,
    frontend::{connect, features},
    net::{BROADCAST, MAC, NetPort, RX, TX, frame},
    ring::{INDIRECT, Part, Ring, descriptor},
    scene::{BUDGET, Scene},
    vsock::{Header, VsockGuest, op},
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::{
    fs::File,
    io::{ErrorKind, Write},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Adds sparse files to a port's memory, the largest that are taken. Returns the bytes that were.
fn take_addresses(port: &NetPort, until: Instant) -> u64 {
    let (mut guest, mut total) = (1u64 << 40, 0);
    let mut size = 1u64 << 46;
    while size >= 1 << 12 && Instant::now() < until {
        let file = File::from(memfd_create("sparse", MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(size).expect("a sparse file");
        match port.device.frontend.add_region(file.as_fd(), guest, size, (1 << 62) + guest, 0) {
            Ok(()) => {
                guest += size;
                total += size;
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => size /= 2,
            Err(error) => {
                println!("{size:#x}: {error}");
                break;
            }
        }
    }
    total
}

/// Before: 128 TiB in 80 regions. Nobody else could map anything, and soon an allocation failed, which ended the daemon.
#[test]
fn sparse_memory_that_takes_all_addresses() {
    let mut scene = Scene::new(|config| ["a1", "a2", "a3"].iter().for_each(|name| config.port(name)));
    let held = scene.attack(2.5, |daemon, until| {
        let ports = ["a1", "a2", "a3"].map(|name| NetPort::connect(&daemon.socket(name), false));
        let taken = ports.iter().flatten().map(|port| take_addresses(port, until) >> 30);
        println!("GiB of addresses: {:?}", taken.collect::<Vec<_>>());
        // They stay.
        ports
    });
    scene.finish();
    drop(held);
}

/// Sends chains that are indirect tables of so many descriptors of one byte each, from a queue of so many entries.
fn long_tables(path: &Path, entries: u16, table: u64, until: Instant) -> u64 {
    let port = NetPort::prepare(path, MAC | features::INDIRECT_DESC, 32 << 20);
    let Ok(mut port) = port else { return 0 };
    let mem = port.device.mem.clone();
    port.device.rings[TX] = Ring::at(&mem, false, entries, [8 << 20, 10 << 20, 12 << 20]);
    let at = 16 << 20;
    // The header is one piece: a frame of one byte pieces follows.
    mem.write(24 << 20, &[&[0; 12][..], &frame(BROADCAST, port.mac, b"pieces")].concat());
    let piece = |index: u64| match index {
        0 => (24 << 20, 12 + 60),
        index => ((25 << 20) + index % 4096, 1),
    };
    let mut bytes = Vec::new();
    for index in 0..table {
        let (address, len) = piece(index);
        let more = index + 1 < table;
        bytes.extend_from_slice(&descriptor(address, len, u16::from(more), (index + 1) as u16));
    }
    mem.write(at, &bytes);
    port.refill();
    if port.device.start(RX).is_err() || port.device.start(TX).is_err() {
        return 0;
    }
    port.storm(&[Part { at, len: bytes.len() as u32, flags: INDIRECT }], until)
}

fn tables(entries: u16, table: u64) {
    const ATTACKERS: [&str; 4] = ["a1", "a2", "a3", "a4"];
    let mut scene = Scene::new(|config| ATTACKERS.iter().for_each(|name| config.port(name)));
    let sent: u64 = scene.attack(2.5, |daemon, until| {
        let storm = |name| {
            let path = daemon.socket(name);
            move || {
                ringroad_attacks::be_nice();
                long_tables(&path, entries, table, until)
            }
        };
        let threads: Vec<_> = ATTACKERS.into_iter().map(|name| thread::spawn(storm(name))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0)).sum()
    });
    println!("{sent} chains of {table} descriptors");
    scene.finish();
}

/// Before: 2192 of 10 000 frames/s, p50 3.2 ms instead of 40 µs.
#[test]
fn chains_that_are_long_tables() {
    tables(32768, 32768);
}

/// The same within what a usual queue allows. Survived before, and is to be.
#[test]
fn chains_that_are_tables_as_long_as_the_queue() {
    tables(1024, 1000);
}

/// Before: 256 lines were waited for at once, 5 s each; an honest program was heard after more than 6 s.
#[test]
fn half_finished_connect_lines() {
    let mut scene = Scene::new(|config| config.vsock("va", 1001, ""));
    let waited = scene.attack(6.0, |daemon, until| {
        let done = AtomicBool::new(false);
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 128, 4096).expect("a guest");
        guest.give(128);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut echo = ringroad_attacks::victim::Echo::default();
                while !done.load(Ordering::Relaxed) {
                    echo.serve(&mut guest);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let flood = scope.spawn(|| {
                ringroad_attacks::be_nice();
                half_lines(daemon, &done)
            });
            thread::sleep(Duration::from_millis(1500));
            let mut waited = Vec::new();
            while Instant::now() + Duration::from_secs(1) < until {
                let start = Instant::now();
                let result = heard(daemon, Duration::from_secs(3));
                waited.push((start.elapsed(), result));
                thread::sleep(Duration::from_millis(200));
            }
            done.store(true, Ordering::Relaxed);
            println!("{} half lines", flood.join().unwrap_or(0));
            waited
        })
    });
    for (took, result) in &waited {
        let good = result.is_ok() && *took < Duration::from_millis(500);
        scene.check(good, format!("an honest program was heard after {took:?}: {result:?}"));
    }
    scene.check(!waited.is_empty(), "nobody asked");
    scene.finish();
}

/// An honest program connects and has its answer.
fn heard(daemon: &Daemon, patience: Duration) -> Result<(), ErrorKind> {
    daemon.connect("va", 7, patience).map(|_| ()).map_err(|error| error.kind())
}

/// Connects 10 000 times and sends half a line; those that are closed are replaced.
fn half_lines(daemon: &Daemon, done: &AtomicBool) -> usize {
    let mut held = std::collections::VecDeque::new();
    let mut made = 0;
    while !done.load(Ordering::Relaxed) {
        let Ok(mut stream) = connect(&daemon.host("va"), Duration::from_millis(1)) else { continue };
        let _ = stream.write(b"CONNEC");
        made += 1;
        held.push_back(stream);
        if held.len() > 10_000 {
            held.pop_front();
        }
        if made > 10_000 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    made
}

/// Programs that send to a guest, which has said that it has room for all and takes nothing. Before: 1.6 GiB for 10 000 of them.
#[test]
fn programs_that_send_to_a_guest_that_does_not_take() {
    let mut scene = Scene::new(|config| config.vsock("va", 1001, ""));
    let held = scene.attack(5.0, |daemon, until| {
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 256, 64).expect("a guest");
        guest.give(256);
        let mut held: Vec<UnixStream> = Vec::new();
        while held.len() < 4000 && Instant::now() < until && daemon.peak_so_far() < BUDGET * 3 / 2 {
            let mut fresh = Vec::new();
            for _ in 0..64 {
                let Ok(mut stream) = connect(&daemon.host("va"), Duration::from_millis(50)) else { break };
                let _ = stream.write_all(b"CONNECT 9\n");
                let _ = stream.set_nonblocking(true);
                fresh.push(stream);
            }
            let end = Instant::now() + Duration::from_millis(200);
            let mut answered = 0;
            while answered < fresh.len() && Instant::now() < end {
                let mut answers = Vec::new();
                let count = guest.received(|header, _| {
                    if header.op == op::REQUEST {
                        answers.push(Header { buf_alloc: u32::MAX >> 1, ..header.answer(op::RESPONSE) });
                    }
                });
                // Buffers enough for requests; whatever else comes finds them taken.
                guest.give(count);
                answered += answers.len();
                guest.flood(0, &mut answers.into_iter(), until);
                thread::sleep(Duration::from_millis(1));
            }
            let block = [0; 1 << 16];
            for stream in fresh.iter().chain(&held) {
                let mut stream = stream;
                while stream.write(&block).is_ok_and(|count| count > 0) {}
            }
            held.append(&mut fresh);
        }
        println!("{} programs", held.len());
        held
    });
    held.iter().for_each(|stream| _ = stream.shutdown(Shutdown::Both));
    scene.finish();
}
