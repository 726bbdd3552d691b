//! Rings and memory that change while they are used. All of this was survived before, and is to be.

use ringroad_attacks::{
    Random, be_nice,
    frontend::signal,
    net::{BROADCAST, NetPort, RX, TX, frame},
    scene::Scene,
    vsock::VsockGuest,
};
use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Connects, sends, and truncates the memory while the device is at it, again and again. Returns how many times.
fn truncate(path: &Path, packed: bool, until: Instant) -> u64 {
    let (mut random, mut times) = (Random::new(11), 0);
    while Instant::now() < until {
        let Ok(mut port) = NetPort::connect(path, packed) else { continue };
        let mac = port.mac;
        for _ in 0..1 + random.below(20) {
            port.reclaim();
            while port.put(&frame(BROADCAST, mac, b"truncated soon")) {}
            port.flush();
        }
        let file = port.device.mem.file();
        let _ = file.set_len(random.below(3) * 0x8000);
        signal(&port.device.kicks[TX]);
        thread::sleep(Duration::from_micros(random.below(300)));
        let _ = port.device.mem.file().set_len(4 << 20);
        signal(&port.device.kicks[TX]);
        times += 1;
    }
    times
}

#[test]
fn memory_that_is_truncated() {
    let mut scene = Scene::new(|config| {
        ["a1", "a2"].iter().for_each(|name| config.port(name));
        config.vsock("va", 1001, "");
    });
    let times = scene.attack(3.0, |daemon, until| {
        let attack = |path: PathBuf, packed| {
            thread::spawn(move || {
                be_nice();
                truncate(&path, packed, until)
            })
        };
        let others = [attack(daemon.socket("a1"), false), attack(daemon.socket("a2"), true)];
        let (mut random, mut times) = (Random::new(5), 0);
        while Instant::now() < until {
            let Ok(mut guest) = VsockGuest::connect(&daemon.socket("va"), random.below(2) == 0, 64, 128) else {
                continue;
            };
            guest.give(64);
            let request = guest.header(1, (2, 99), ringroad_attacks::vsock::op::REQUEST);
            for _ in 0..random.below(10) {
                guest.send(request, &[]);
            }
            let _ = guest.device.mem.file().set_len(random.below(3) * 0x8000);
            guest.device.kicks.iter().for_each(signal);
            thread::sleep(Duration::from_micros(random.below(500)));
            times += 1;
        }
        times + others.into_iter().map(|thread| thread.join().unwrap_or(0)).sum::<u64>()
    });
    println!("{times} times");
    scene.check(times > 100, "hardly anything was truncated");
    scene.finish();
}

/// Rewrites a port's rings at random while it sends. Returns how many times.
fn rewrite(path: &Path, packed: bool, seed: u64, until: Instant) -> u64 {
    let (mut random, mut times) = (Random::new(seed), 0);
    while Instant::now() < until {
        let Ok(mut port) = NetPort::connect(path, packed) else { continue };
        let mac = port.mac;
        // A broken queue stays broken: a new life after a while.
        for _ in 0..20 {
            port.reclaim();
            while port.put(&frame(BROADCAST, mac, b"rewritten")) {}
            port.flush();
            for _ in 0..random.below(30) {
                let ring = &port.device.rings[random.below(2) as usize];
                let area = [ring.desc, ring.driver, ring.device][random.below(3) as usize];
                let mut bytes = vec![0; 1 + random.below(24) as usize];
                random.fill(&mut bytes);
                ring.mem.write(area + random.below(u64::from(ring.size) * 16), &bytes);
            }
            signal(&port.device.kicks[TX]);
            signal(&port.device.kicks[RX]);
            times += 1;
        }
    }
    times
}

#[test]
fn rings_that_are_rewritten() {
    let mut scene = Scene::new(|config| ["a1", "a2"].iter().for_each(|name| config.port(name)));
    let times = scene.attack(3.0, |daemon, until| {
        let path = daemon.socket("a1");
        let other = thread::spawn(move || {
            be_nice();
            rewrite(&path, false, 1, until)
        });
        rewrite(&daemon.socket("a2"), true, 2, until) + other.join().unwrap_or(0)
    });
    println!("{times} rounds");
    scene.check(times > 100, "hardly anything was rewritten");
    scene.finish();
}

#[test]
fn a_thousand_frontends() {
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.vsock("va", 1001, "");
    });
    let (threads, fds) = (scene.daemon.threads(), scene.daemon.fds());
    let count = scene.attack(4.0, |daemon, until| {
        let mut count = 0;
        while count < 1000 && Instant::now() < until {
            let _ = NetPort::connect(&daemon.socket("a1"), count % 2 == 0);
            if count % 4 == 0 {
                let _ = VsockGuest::connect(&daemon.socket("va"), count % 8 == 0, 64, 64);
            }
            count += 1;
        }
        count
    });
    thread::sleep(Duration::from_millis(300));
    println!("{count} frontends");
    let now = (scene.daemon.threads(), scene.daemon.fds());
    scene.check(now.0 <= threads, format!("{} threads, before {threads}", now.0));
    scene.check(now.1 <= fds, format!("{} descriptors, before {fds}", now.1));
    scene.finish();
}
