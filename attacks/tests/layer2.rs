//! What one port can do to its neighbours with frames alone.

use ringroad_attacks::{
    be_nice,
    daemon::Daemon,
    frontend::{features, wait},
    net::{BROADCAST, BUFFER, HEADER, MAC, MRG_RXBUF, NetPort, RX, TX, frame},
    ring::Part,
    scene::Scene,
};
use std::{
    cell::Cell,
    thread,
    time::{Duration, Instant},
};

/// Sends frames as fast as the device takes them, until a time. Returns how many went.
fn send(port: &mut NetPort, mut frames: impl FnMut() -> Option<Vec<u8>>, until: Instant) -> u64 {
    let mut sent = 0;
    while Instant::now() < until {
        port.reclaim();
        let before = sent;
        let mut over = false;
        while port.device.rings[TX].next_id().is_some() {
            let Some(frame) = frames() else {
                over = true;
                break;
            };
            port.put(&frame);
            sent += 1;
        }
        port.flush();
        if over {
            return sent;
        }
        port.receive(0, |_, _| {});
        if sent == before {
            wait(&port.device.calls[TX], Duration::from_millis(1));
        }
    }
    sent
}

/// The address of a port, as its frontend is told.
fn address(daemon: &Daemon, name: &str) -> [u8; 6] {
    NetPort::prepare(&daemon.socket(name), MAC, 4 << 20).expect("a port").mac
}

/// Before: the victim's traffic followed whoever had used its address last: 39 940 of its frames came to the thief.
#[test]
fn a_neighbours_address_as_the_source() {
    let mut scene = Scene::new(|config| config.port("a1"));
    let stolen = scene.attack(2.5, |daemon, until| {
        let mut port = NetPort::connect(&daemon.socket("a1"), false).expect("a port");
        // Made of the ports' names, the victims' addresses are no secret.
        let victims = ["v1", "v2"].map(derived);
        let mut stolen = 0;
        while Instant::now() < until {
            for victim in victims {
                port.reclaim();
                port.put(&frame(BROADCAST, victim, b"it is me"));
                port.put(&frame(victims[0], victim, b"it is me"));
            }
            port.flush();
            wait(&port.device.calls[RX], Duration::from_micros(200));
            port.receive(22, |bytes, _| stolen += u64::from(bytes.get(14..22) == Some(b"ringroad")));
        }
        stolen
    });
    println!("{stolen} stolen frames");
    scene.check(stolen == 0, format!("{stolen} frames of the victims came to the thief"));
    scene.finish();
}

/// The address that a port gets by default: locally administered, from its name (FNV-1a).
fn derived(name: &str) -> [u8; 6] {
    let hash = name.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let [a, b, c, d] = hash.to_be_bytes();
    [2, 0, a, b, c, d]
}

/// What `derived` says is what the device says.
#[test]
fn addresses_are_derived_from_names() {
    let mut daemon = Daemon::start(|config| config.port("v1"));
    let mac = address(&daemon, "v1");
    println!("{mac:x?} {:x?}", derived("v1"));
    assert_eq!(mac[2..], derived("v1")[2..], "the tests of stolen addresses steal the wrong one");
    assert_eq!(mac, derived("v1"));
    daemon.terminate(Duration::from_secs(1));
}

/// Before: 4096 addresses of one guest filled the table; who aged out was never learned again, and flooded to everyone for ever.
#[test]
fn one_guest_that_fills_the_table() {
    let mut scene = Scene::new(|config| {
        config.top("[switch]\nageing = \"2s\"");
        ["a1", "b1", "b2", "w1"].iter().for_each(|name| config.port(name));
    });
    let seen = scene.attack(6.0, |daemon, until| {
        let start = Instant::now();
        let mut thief = NetPort::connect(&daemon.socket("a1"), false).expect("a port");
        let mut ports = ["b1", "b2", "w1"].map(|name| NetPort::connect(&daemon.socket(name), true).expect("a port"));
        let hello = |port: &mut NetPort| {
            port.put(&frame(BROADCAST, port.mac, b"hello"));
            port.flush();
        };
        ports.iter_mut().for_each(hello);
        let serial = std::cell::Cell::new(0u32);
        let mut flood = |end: Instant| {
            send(
                &mut thief,
                || {
                    serial.set((serial.get() + 1) % 100_000);
                    let [a, b, c, d] = serial.get().to_be_bytes();
                    Some(frame(derived("b1"), [2, 0xee, a, b, c, d], b"who"))
                },
                end,
            )
        };
        // All neighbours are silent for longer than an address is remembered.
        flood(start + Duration::from_millis(3500));
        // One speaks up. What another sends to it then is not for everybody.
        let to = ports[1].mac;
        hello(&mut ports[1]);
        flood(Instant::now() + Duration::from_millis(300));
        hello(&mut ports[1]);
        thread::sleep(Duration::from_millis(50));
        ports.iter_mut().for_each(|port| _ = port.receive(0, |_, _| {}));
        let (mut seen, mut came) = (0, 0);
        for _ in 0..100 {
            let from = ports[0].mac;
            ports[0].reclaim();
            ports[0].put(&frame(to, from, b"for b2"));
            ports[0].flush();
            flood(Instant::now() + Duration::from_millis(2));
            ports[2].receive(20, |bytes, _| seen += u64::from(bytes.get(14..20) == Some(b"for b2")));
            ports[1].receive(20, |bytes, _| came += u64::from(bytes.get(14..20) == Some(b"for b2")));
        }
        thread::sleep(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(100)));
        ports[2].receive(20, |bytes, _| seen += u64::from(bytes.get(14..20) == Some(b"for b2")));
        ports[1].receive(20, |bytes, _| came += u64::from(bytes.get(14..20) == Some(b"for b2")));
        (seen, came)
    });
    println!("to the neighbour {}, to everybody else {}", seen.1, seen.0);
    scene.check(seen.1 >= 90, format!("{} of 100 frames came", seen.1));
    scene.check(seen.0 <= 10, format!("{} of 100 frames for one neighbour were flooded to others", seen.0));
    scene.finish();
}

/// Before: every broadcast was copied to everybody, as fast as it came.
#[test]
fn a_storm_of_broadcasts() {
    let mut scene = Scene::new(|config| ["a1", "a2", "w1"].iter().for_each(|name| config.port(name)));
    let (sent, came) = scene.attack(2.5, |daemon, until| {
        let mut watcher = NetPort::connect(&daemon.socket("w1"), true).expect("a port");
        let storm = |name: &'static str| {
            let path = daemon.socket(name);
            move || {
                be_nice();
                let mut port = NetPort::connect(&path, false).expect("a port");
                let mac = port.mac;
                send(&mut port, || Some(frame(BROADCAST, mac, &[0x55; 1000])), until)
            }
        };
        let threads = ["a1", "a2"].map(|name| thread::spawn(storm(name)));
        let mut came = 0;
        while Instant::now() < until {
            wait(&watcher.device.calls[RX], Duration::from_millis(5));
            came += watcher.receive(0, |_, _| {}) as u64;
        }
        (threads.into_iter().map(|thread| thread.join().unwrap_or(0)).sum::<u64>(), came)
    });
    println!("{sent} broadcasts, {came} came to a watcher");
    scene.check(sent > 1000, "there was no storm");
    scene.check(came < 60_000, format!("{came} broadcasts of {sent} came to one port in 2.5 s"));
    scene.finish();
}

/// Before: 64 KiB broadcasts went through ports whose MTU is 1500.
#[test]
fn frames_longer_than_the_mtu() {
    let mut scene = Scene::new(|config| ["a1", "w1"].iter().for_each(|name| config.port_with(name, "mtu = 1500")));
    let lengths = scene.attack(1.0, |daemon, _| {
        let mut port = NetPort::connect(&daemon.socket("a1"), false).expect("a port");
        let wanted = MAC | MRG_RXBUF | features::RING_PACKED;
        let mut watcher = NetPort::connect_with(&daemon.socket("w1"), wanted, 4 << 20).expect("a port");
        let mac = port.mac;
        let mut lengths = Vec::new();
        // 14 bytes of header; with a VLAN tag 4 more are no fault.
        for len in [100usize, 1514, 2000, 9014, 65_000] {
            let at = NetPort::FREE;
            let mut bytes = vec![0; HEADER];
            bytes.extend_from_slice(&frame(BROADCAST, mac, &vec![0x77; len - 14]));
            port.device.mem.write(at, &bytes);
            port.reclaim();
            port.device.rings[TX].add(&[Part { at, len: bytes.len() as u32, flags: 0 }]);
            port.device.go(TX);
            thread::sleep(Duration::from_millis(50));
            let mut pieces = 0;
            // One frame may fill several buffers.
            watcher.receive(0, |_, _| pieces += 1);
            lengths.push((len, pieces));
        }
        lengths
    });
    println!("lengths and buffers: {lengths:?}");
    for (len, pieces) in lengths {
        let should = len <= 1518;
        scene.check((pieces > 0) == should, format!("a frame of {len} bytes came in {pieces} buffers of {BUFFER}"));
    }
    scene.finish();
}

/// Frames of bridges and switches to each other (01-80-C2-00-00-0x). Before: they reached other ports, and the TAP.
#[test]
fn link_local_frames() {
    let interface = format!("rra{}", std::process::id());
    // One daemon can have it.
    let tap = Cell::new(Some(interface.clone()));
    let mut scene = Scene::new(move |config| {
        ["a1", "w1"].iter().for_each(|name| config.port(name));
        if let Some(interface) = tap.take() {
            config.tap("uplink", &interface);
        }
    });
    // Frames that the kernel has received from the daemon.
    let count = || {
        let path = format!("/sys/class/net/{interface}/statistics/rx_packets");
        std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok()).expect("a TAP interface")
    };
    let up = std::process::Command::new("ip").args(["link", "set", &interface, "up"]).status();
    assert!(up.is_ok_and(|status| status.success()), "this test needs root and iproute2");
    let seen = scene.attack(1.0, |daemon, _| {
        let mut port = NetPort::connect(&daemon.socket("a1"), false).expect("a port");
        let mut watcher = NetPort::connect(&daemon.socket("w1"), true).expect("a port");
        let mac = port.mac;
        let before = count();
        for last in 0..16 {
            port.put(&frame([1, 0x80, 0xc2, 0, 0, last], mac, b"bridge"));
        }
        port.put(&frame(BROADCAST, mac, b"normal"));
        port.flush();
        thread::sleep(Duration::from_millis(100));
        let tap = count() - before;
        let (mut local, mut normal) = (Vec::new(), 0);
        watcher.receive(20, |bytes, _| match bytes.get(14..20) {
            Some(b"bridge") => local.push(bytes[5]),
            Some(b"normal") => normal += 1,
            _ => {}
        });
        (local, normal, tap)
    });
    scene.check(seen.0.is_empty(), format!("link-local frames reached another port: {:x?}", seen.0));
    // The victims' own broadcasts, if there are any, are few.
    scene.check((1..8).contains(&seen.2), format!("{} frames reached the TAP, expected the normal one", seen.2));
    scene.check(seen.1 == 1, "the frame after them did not");
    scene.finish();
}
