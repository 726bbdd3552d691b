//! The daemon itself: its end, its log, its sockets.

use ringroad_attacks::{
    Random,
    daemon::{Daemon, Stderr},
    frontend::{Frontend, features, request::*, signal},
    net::{BROADCAST, NetPort, TX, frame},
    scene::Scene,
};
use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with},
    process::Signal,
};
use std::{
    fs,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// How much may be said in some seconds, however much is wrong.
const LOG: u64 = 1 << 20;

/// A socket that listens and whose queue is full: who connects to it waits.
fn full(path: &Path) -> Vec<OwnedFd> {
    let address = SocketAddrUnix::new(path).expect("a path");
    let make = |flags| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
    let listener = make(SocketFlags::CLOEXEC);
    bind(&listener, &address).expect("a name");
    listen(&listener, 0).expect("a queue");
    let mut held = vec![listener];
    loop {
        let client = make(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        if connect(&client, &address).is_err() {
            return held;
        }
        held.push(client);
    }
}

/// Before: connect(2) waited for room in the queue, and SIGTERM for it, for ever.
#[test]
fn sigterm_while_a_client_connects_to_a_full_socket() {
    let mut held = Vec::new();
    let mut scene = Scene::new(|config| config.port_with("c1", "role = \"client\""));
    // It tries again and again, and finds this now.
    held.extend(full(&scene.daemon.socket("c1")));
    scene.attack(1.5, |_, _| ());
    scene.finish();
}

/// Before: reading the configuration again removed the port and waited for its thread, for ever.
#[test]
fn sighup_while_a_client_connects_to_a_full_socket() {
    let mut scene = Scene::new(|config| config.port_with("c1", "role = \"client\""));
    let held = full(&scene.daemon.socket("c1"));
    scene.attack(2.0, |daemon, _| {
        thread::sleep(Duration::from_millis(600));
        daemon.configure(|config| {
            ["v1", "v2", "f1", "f2x", "new"].iter().for_each(|name| config.port(name));
            config.vsock("ve", 1000, "");
        });
        daemon.signal(Signal::HUP);
    });
    let there = scene.daemon.listens("new", Duration::from_secs(1));
    scene.check(there, "a port that SIGHUP should add is not there after 1 s");
    scene.finish();
    drop(held);
}

/// Refused messages, one after the other, without waiting for answers.
fn refused(daemon: &Daemon, until: Instant) -> u64 {
    let mut count = 0;
    while Instant::now() < until {
        let Ok(frontend) = Frontend::connect(&daemon.socket("a1")) else { break };
        if frontend.negotiate(0).is_err() {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        while Instant::now() < until {
            // A vring that there is not, a size that there cannot be, features that nobody offered.
            let bad = [
                (SET_VRING_NUM, [1000u32, 1]),
                (SET_VRING_NUM, [0, 3]),
                (SET_FEATURES, [u32::MAX, u32::MAX]),
                (SET_VRING_BASE, [77, 1]),
            ];
            let failed = bad.iter().any(|&(request, words)| {
                let sent = frontend.send(request, 1 << 3, words.map(u32::to_ne_bytes).as_flattened(), &[]);
                sent.is_err() || frontend.receive().is_err()
            });
            if failed {
                break;
            }
            count += bad.len() as u64;
        }
    }
    count
}

/// Connects and goes.
fn connects(daemon: &Daemon, until: Instant) -> u64 {
    let mut count = 0;
    while Instant::now() < until {
        // Some say nothing, some say nonsense.
        if let Ok(frontend) = Frontend::connect(&daemon.socket("a2")) {
            if count % 2 == 0 {
                let _ = frontend.send(GET_FEATURES, 3, &[0; 7], &[]);
            }
            count += 1;
        }
    }
    count
}

/// Before: 769 050 lines, 72 MiB, in 4 s for as many messages, 124 854 lines in 2 s for as many connects.
#[test]
fn messages_and_connects_that_are_logged() {
    let mut scene = Scene::new(|config| ["a1", "a2"].iter().for_each(|name| config.port(name)));
    let before = scene.daemon.logged();
    let count = scene.attack(3.0, |daemon, until| {
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                ringroad_attacks::be_nice();
                connects(daemon, until)
            });
            (refused(daemon, until), other.join().unwrap_or(0))
        })
    });
    let logged = scene.daemon.logged() - before;
    println!("{} refused messages, {} connects: {} KiB of log", count.0, count.1, logged >> 10);
    scene.check(logged <= LOG, format!("{} KiB of log for {count:?} messages and connects", logged >> 10));
    scene.finish();
}

/// Before: rings that broke were logged by the worker, which waited for the pipe; no port moved a frame.
#[test]
fn a_log_that_nobody_reads() {
    let mut scene = Scene::with(Stderr::Pipe, |config| ["a1", "a2", "a3"].iter().for_each(|name| config.port(name)));
    scene.attack(3.0, |daemon, until| {
        thread::scope(|scope| {
            scope.spawn(|| connects(daemon, until));
            scope.spawn(|| refused(daemon, until));
            while Instant::now() < until {
                let Ok(mut port) = NetPort::connect(&daemon.socket("a3"), false) else { continue };
                port.put(&frame(BROADCAST, port.mac, b"broken"));
                port.flush();
                port.device.rings[TX].put_index(0x7000);
                signal(&port.device.kicks[TX]);
                thread::sleep(Duration::from_millis(5));
            }
        });
    });
    scene.finish();
}

/// 1000 frontends that come and go, with queues and without; messages of all kinds in any order. Survived before, and is to be.
#[test]
fn messages_in_any_order() {
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.vsock("va", 1001, "");
    });
    let count = scene.attack(3.0, |daemon, until| {
        let mut random = Random::new(3);
        let mut count = 0;
        while Instant::now() < until {
            let name = if random.below(2) == 0 { "a1" } else { "va" };
            if random.below(2) == 0 {
                let _ = NetPort::connect(&daemon.socket(name), random.below(2) == 0);
                count += 1;
                continue;
            }
            let Ok(frontend) = Frontend::connect(&daemon.socket(name)) else { continue };
            let _ = frontend.stream().set_read_timeout(Some(Duration::from_millis(200)));
            let _ = frontend.negotiate(features::RING_PACKED * random.below(2));
            for _ in 0..random.below(200) {
                let request = random.below(u64::from(LAST) + 2) as u32;
                let mut payload = vec![0; [0, 8, 8, 8, 8, 12, 40, 40, 200][random.below(9) as usize]];
                if random.below(4) == 0 {
                    random.fill(&mut payload);
                } else {
                    payload.chunks_mut(4).for_each(|word| word[0] = random.below(4) as u8);
                }
                if frontend.send(request, 1 << 3, &payload, &[]).is_err() {
                    break;
                }
                count += 1;
            }
        }
        count
    });
    println!("{count} messages and frontends");
    scene.finish();
}

/// Before: at its end the daemon unlinked whatever was at the path of its socket.
#[test]
fn a_socket_in_the_place_of_ours_stays() {
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.vsock("va", 1001, "");
    });
    let paths = [scene.daemon.socket("a1"), scene.daemon.socket("va"), scene.daemon.host("va")];
    let others: Vec<_> = paths
        .iter()
        .map(|path| {
            fs::remove_file(path).expect("its socket was there");
            UnixListener::bind(path).expect("another one")
        })
        .collect();
    scene.attack(0.5, |_, _| ());
    let own = scene.daemon.socket("v1");
    let took = scene.daemon.terminate(Duration::from_secs(2));
    scene.check(took.is_some(), "SIGTERM did not end the daemon");
    for path in &paths {
        let name = path.file_name().unwrap_or_default().display().to_string();
        scene.check(path.exists(), format!("{name}, which is somebody else's, was unlinked"));
    }
    scene.check(!own.exists(), "the daemon's own socket stayed");
    drop(others);
    scene.finish();
}
