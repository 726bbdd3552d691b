//! The limits of a frontend: address space, the log, connections, the time of others.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_host::{
    PortSettings,
    vhost_user::{Limits, Rate},
};
use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::{fd::AsRawFd, unix::net::UnixStream},
    thread,
    time::{Duration, Instant},
};

/// Creates a sparse file, which uses no memory.
fn sparse(len: u64) -> File {
    let path = std::path::Path::new("/dev/shm").join(format!("ringroad-sparse-{}-{len}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(len).unwrap();
    file
}

#[test]
fn address_space() {
    const TIB: u64 = 1 << 40;
    let rig = Rig::with_limits("space", Limits { mapped: TIB, ..GENEROUS });
    let mut others = rig.others();
    let mut guest = rig.guest(0, SPLIT);
    let mut faults = 0;
    for bits in (40..=46).rev() {
        let file = sparse(1 << bits);
        let fd = [file.as_raw_fd()];
        let region = [1 << 47, 1 << bits, 1 << 47, 0];
        guest.peer.refused(ADD_MEM_REG, &mem_reg(region), &fd);
        let both = [guest.driver.file.as_raw_fd(), fd[0]];
        guest.peer.refused(SET_MEM_TABLE, &mem_table(&[guest.region(), region]), &both);
        faults += 2;
        rig.expect_faults(faults);
        let said =
            format!("a memory region of {:#x} bytes in addition to {:#x}", 1u64 << bits, guest.driver.region.len());
        logged(&rig.victim(), &["ERROR", &said, "expected 0x10000000000 at most in all (`limits.mapped`)"]);
    }
    // Exactly the limit, in pieces, and not a page more.
    let file = sparse(TIB);
    let fd = [file.as_raw_fd()];
    let piece = |index: u64| [(index + 1) << 41, TIB / 4, (index + 1) << 41, 0];
    for index in 0..3 {
        guest.peer.ok(ADD_MEM_REG, &mem_reg(piece(index)), &fd);
    }
    guest.peer.refused(ADD_MEM_REG, &mem_reg(piece(3)), &fd);
    let [at, _, user, _] = piece(3);
    let rest = TIB / 4 - guest.driver.region.mapped() as u64;
    guest.peer.ok(ADD_MEM_REG, &mem_reg([at, rest, user, 0]), &fd);
    guest.peer.refused(ADD_MEM_REG, &mem_reg([1 << 46, 1, 1 << 46, 0]), &fd);
    exchange(&mut guest, &mut others.0);
    // Address space is returned and can be used again.
    guest.peer.ok(REM_MEM_REG, &mem_reg(piece(0)), &[]);
    guest.peer.ok(ADD_MEM_REG, &mem_reg(piece(0)), &fd);
    others.work();
    drop(guest);
    exchange(&mut rig.guest(0, PACKED), &mut others.0);
}

#[test]
fn regions() {
    let rig = Rig::with_limits("slots8", Limits { regions: 8, ..GENEROUS });
    let mut others = rig.others();
    let mut guest = rig.guest(0, PACKED);
    assert_eq!(guest.peer.ask_u64(GET_MAX_MEM_SLOTS), 8);
    let file = memory(4096);
    let fd = [file.as_raw_fd()];
    let region = |slot: u64| [slot << 20, 4096, slot << 20, 0];
    (1..8).for_each(|slot| guest.peer.ok(ADD_MEM_REG, &mem_reg(region(slot)), &fd));
    guest.peer.refused(ADD_MEM_REG, &mem_reg(region(8)), &fd);
    logged(&rig.victim(), &["ERROR", "more than 8 memory regions, the limit (`limits.regions`)"]);
    exchange(&mut guest, &mut others.0);
}

#[test]
fn a_flood_of_refused_messages() {
    let refusals = Rate { burst: 100, rate: 100 };
    let rig = Rig::with_limits("refusals", Limits { refusals, connects: GENEROUS.connects, ..Limits::default() });
    let mut others = rig.others();
    let wrong = message(SET_VRING_NUM, VERSION, 8, &words(&[1, 0])).repeat(64);
    let (begin, mut ended, mut sent) = (Instant::now(), 0, 0);
    while begin.elapsed() < Duration::from_secs(2) {
        let mut peer = rig.peer(SPLIT);
        while peer.0.write_all(&wrong).is_ok() {
            sent += 64;
        }
        ended += 1;
        others.work();
    }
    // Each connection ends, and the log stays readable.
    assert!(ended > 3 && sent > 0, "{ended} connections, {sent} messages");
    let lines = log_of(&rig.victim()).into_iter().filter(|line| !line.starts_with("DEBUG")).count();
    assert!((20..30).contains(&lines), "{lines} lines for {ended} connections");
    thread::sleep(Duration::from_millis(1100));
    drop(rig.peer(SPLIT));
    logged(&rig.victim(), &["WARN", " more lines suppressed"]);
}

#[test]
fn refusals_end_the_connection() {
    let refusals = Rate { burst: 10, rate: 1 };
    let rig = Rig::with_limits("often", Limits { refusals, ..GENEROUS });
    let mut peer = rig.peer(SPLIT);
    for _ in 0..10 {
        peer.refused(SET_VRING_NUM, &words(&[1, 0]), &[]);
    }
    peer.send(&message(SET_VRING_NUM, VERSION, 8, &words(&[1, 0])), &[]);
    assert!(peer.ends());
    logged(&rig.victim(), &["ERROR", "more refused messages than `limits.refusals` allows", "disconnected"]);
    rig.others().work();
}

#[test]
fn messages_beyond_the_rate_wait() {
    let messages = Rate { burst: 50, rate: 200 };
    let rig = Rig::with_limits("pace", Limits { messages, ..GENEROUS });
    let mut others = rig.others();
    let mut peer = Peer::connect(&rig.socket(0));
    let begin = Instant::now();
    (0..150).for_each(|_| assert_ne!(peer.ask_u64(GET_FEATURES), 0));
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(490), "{took:?} for 150 messages at 200/s after 50 at once");
    // A flood of messages does not keep the port from stopping.
    peer.0.write_all(&message(GET_FEATURES, VERSION, 0, &[]).repeat(1000)).unwrap();
    others.work();
    let begin = Instant::now();
    ends_soon(rig);
    assert!(begin.elapsed() < Duration::from_secs(1));
}

#[test]
fn connections_beyond_the_rate_wait() {
    let connects = Rate { burst: 10, rate: 20 };
    let rig = Rig::with_limits("connects", Limits { connects, ..GENEROUS });
    let mut others = rig.others();
    let begin = Instant::now();
    let mut served = 0;
    while begin.elapsed() < Duration::from_secs(2) {
        let mut peer = Peer::connect(&rig.socket(0));
        served += u32::from(peer.ask_u64(GET_FEATURES) != 0);
    }
    assert!((30..=60).contains(&served), "{served} connections in 2 s, expected 10 and then 20/s");
    // The same for connections that are turned away because there is one already.
    let mut guest = rig.guest(0, SPLIT);
    let before = log_of(&rig.victim()).len();
    let crowd: Vec<_> = (0..60).map(|_| UnixStream::connect(rig.socket(0)).unwrap()).collect();
    thread::sleep(Duration::from_secs(1));
    exchange(&mut guest, &mut others.0);
    let lines = log_of(&rig.victim()).split_off(before);
    let turned = lines.iter().filter(|line| line.contains("turned away")).count();
    assert!((10..=40).contains(&turned), "{turned} turned away in a second");
    drop(crowd);
    ends_soon(rig);
}

#[test]
fn buffers_without_a_frame_count_towards_the_rate() {
    let rig = Rig::new("empty");
    let mut others = rig.others();
    let handle = rig.servers[0].handle();
    let settings = handle.port().settings();
    let rate = ringroad_switch::Rate { bits: 0, frames: 1000, burst: Duration::from_millis(10) };
    handle.set(PortSettings { limits: ringroad_switch::Limits { rate, ..settings.limits }, ..settings });
    for acked in LAYOUTS {
        let mut guest = rig.guest(0, acked);
        let (before, begin) = (rig.report(0).received, Instant::now());
        while begin.elapsed() < Duration::from_secs(1) {
            // Too short for an Ethernet header.
            while guest.add_frame(&[0; 8]) {}
            guest.vrings[1].kick.write(1).unwrap();
            thread::sleep(Duration::from_micros(200));
        }
        let (took, now) = (begin.elapsed().as_millis() as u64, rig.report(0).received);
        let runts = now.runt - before.runt;
        assert!((500..=took + 100).contains(&runts), "{runts} in {took} ms");
        assert_eq!(now.frames, before.frames, "they are no frames");
        // What is behind them is taken when they are paid for.
        exchange(&mut guest, &mut others.0);
    }
}

#[test]
fn features_and_sizes_of_running_rings() {
    let rig = Rig::new("running");
    let mut others = rig.others();
    for acked in LAYOUTS {
        let mut guest = rig.guest(0, acked);
        exchange(&mut guest, &mut others.0);
        let before = rig.faults();
        // Repeating the same values is allowed, as QEMU does when it migrates.
        guest.peer.ok(SET_FEATURES, &longs(&[acked]), &[]);
        guest.peer.ok(SET_VRING_NUM, &words(&[1, 64]), &[]);
        guest.peer.refused(SET_FEATURES, &longs(&[acked ^ ringroad_net::bits::RING_PACKED]), &[]);
        logged(
            &rig.victim(),
            &["ERROR", "features 0x", " while queue 0 runs with 0x", "expected GET_VRING_BASE first"],
        );
        guest.peer.refused(SET_VRING_NUM, &words(&[1, 32]), &[]);
        logged(&rig.victim(), &["ERROR", "queue 1: size 32 while it runs with 64", "expected GET_VRING_BASE first"]);
        assert!(guest.vrings[1].failed());
        rig.expect_faults(before + 2);
        exchange(&mut guest, &mut others.0);
        // Stopped, they may change.
        (0..2).for_each(|index| assert!(guest.peer.get_base(index) != u32::MAX));
        let mut guest = guest.again_with(acked ^ ringroad_net::bits::RING_PACKED);
        exchange(&mut guest, &mut others.0);
    }
}
