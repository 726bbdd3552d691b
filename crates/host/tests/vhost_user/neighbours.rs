//! What a guest can do to other ports: their addresses, the forwarding table, their share of time.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use ringroad_switch::{Limits, Port};
use ringroad_wire::ethernet::MacAddr;
use std::{
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

/// Sends a frame of `len` bytes, at least 64, with a kick.
fn send(guest: &mut Guest, to: MacAddr, from: MacAddr, len: usize) {
    let mut frame = [&to.0[..], &from.0, &[0x88, 0xb5], &u64::MAX.to_be_bytes(), &[7; 42]].concat();
    frame.resize(len, 7);
    let tx = &mut guest.driver.tx[0];
    let _ = tx.reclaim().unwrap();
    assert_eq!(tx.add(1, |_, place| place.write(&frame)), 1);
    tx.publish();
    let _ = guest.vrings[1].kick.write(1);
}

/// Waits until port 0 has sent or lost `frames` frames.
#[track_caller]
fn seen(rig: &Rig, frames: u64) {
    let count = || {
        let from = rig.report(0).received;
        from.frames + from.oversize
    };
    assert!(within(PATIENCE, || count() >= frames), "{} of {frames}", count());
}

#[test]
fn frames_with_a_neighbours_address_do_not_take_its_traffic() {
    for acked in LAYOUTS {
        let rig = Rig::new(&format!("thief-{acked:x}"));
        let mut others = rig.others();
        others.work();
        let mut thief = rig.guest(0, acked);
        let victims = [others.0.mac, others.1.mac];
        for number in 1..=500 {
            send(&mut thief, MacAddr::BROADCAST, victims[number % 2], 64);
            seen(&rig, number as u64);
            if number % 10 == 0 {
                others.work();
            }
        }
        assert!(thief.received(victims[0]).is_empty() && thief.received(victims[1]).is_empty());
        let from = rig.report(0).received;
        // On a fast machine some exceed the storm limit of 10 000/s.
        assert_eq!((from.claimed, from.spoofed, from.dropped() - from.storm), (500, 0, 0));
        let line = logged(&rig.victim(), &["WARN", &victims[0].to_string(), "is in use at port", "QEMU", "mac="]);
        assert!(line.contains(&rig.victim().replace("-0", "-1")), "{line}");
        assert!(log_of(&rig.victim()).iter().filter(|line| line.contains("WARN")).count() <= 5);
    }
}

#[test]
fn a_ports_own_address_is_learned_at_once_and_stays() {
    let (worker, folder) = (worker(), Folder::new("own"));
    let own = MacAddr::local(77);
    let start = |name: &str, limits| {
        let config = config(&format!("own-{name}"), &folder.file(name));
        start_server(
            ringroad_host::vhost_user::VhostConfig {
                settings: ringroad_host::PortSettings { limits, ..config.settings },
                ..config
            },
            &worker,
        )
        .unwrap()
    };
    let fixed = Limits { own: Some(own), fixed: true, ..Limits::GUEST };
    let servers = [start("a", fixed), start("b", Limits::GUEST), start("c", Limits::GUEST)];
    let guest = |name: &str, mac| {
        let mut guest = Guest::new(Peer::connect(&folder.file(name)), SPLIT, 64);
        guest.mac = mac;
        guest.start_all();
        guest
    };
    let (mut a, mut b, mut c) = (guest("a", own), guest("b", MacAddr::local(2)), guest("c", MacAddr::local(3)));
    // It has not sent anything yet, and its frames go to no other port.
    let sequence = b.send_to(own);
    assert!(a.receives(b.mac, sequence));
    assert!(c.received(b.mac).is_empty());
    exchange(&mut a, &mut b);
    send(&mut c, MacAddr::BROADCAST, own, 64);
    assert!(within(PATIENCE, || servers[2].handle().port().report().received.spoofed == 1));
    send(&mut a, MacAddr::BROADCAST, c.mac, 64);
    assert!(within(PATIENCE, || servers[0].handle().port().report().received.spoofed == 1));
    exchange(&mut a, &mut b);
    assert!(c.received(b.mac).is_empty() && b.received(c.mac).is_empty());
    logged("own-c", &["WARN", &own.to_string(), "is the `mac` of port own-a"]);
    logged("own-a", &["WARN", "source address that it may not use", "`spoofed`"]);
}

#[test]
fn long_and_link_local_frames_are_not_forwarded() {
    let (worker, folder) = (worker(), Folder::new("long"));
    let start = |name: &str, mtu| {
        let mut config = config(&format!("long-{name}"), &folder.file(name));
        config.config.mtu = mtu;
        start_server(config, &worker).unwrap()
    };
    let servers = [start("short", 100), start("long", 1400)];
    let guest = |name: &str, mac| {
        let mut guest = Guest::new(Peer::connect(&folder.file(name)), PACKED, 64);
        guest.mac = MacAddr::local(mac);
        guest.start_all();
        guest
    };
    let (mut short, mut long) = (guest("short", 1), guest("long", 2));
    // An MTU of 100 and two VLAN tags: 122 bytes.
    for len in [122, 123, 1500] {
        send(&mut short, MacAddr::BROADCAST, MacAddr::local(9), len);
        send(&mut long, MacAddr::BROADCAST, MacAddr::local(8), len);
    }
    for last in [0, 15] {
        send(&mut short, MacAddr([1, 0x80, 0xc2, 0, 0, last]), MacAddr::local(1), 64);
    }
    exchange(&mut short, &mut long);
    let reports = servers.each_ref().map(|server| server.handle().port().report());
    let counts = |index: usize| {
        let report = &reports[index];
        (report.received.oversize, report.sent.oversize, report.received.link_local)
    };
    assert_eq!((counts(0), counts(1)), ((2, 1, 2), (1, 0, 0)));
    // Six that were exchanged, and the one that fits.
    assert_eq!(reports.map(|report| report.sent.frames), [4, 4]);
}

#[test]
fn broadcasts_are_limited_to_the_storm_rate() {
    let rig = Rig::new("storm");
    let mut others = rig.others();
    let mut noisy = rig.guest(0, SPLIT);
    let start = Instant::now();
    for number in 1..=4000 {
        send(&mut noisy, MacAddr::BROADCAST, MacAddr::local(1), 64);
        if number % 32 == 0 {
            seen(&rig, number);
        }
        if number % 500 == 0 {
            others.0.received(noisy.mac);
            others.1.received(noisy.mac);
            others.work();
        }
    }
    seen(&rig, 4000);
    let most = 200 + (start.elapsed().as_secs_f64() * 10_000.0) as u64;
    let report = rig.report(0).received;
    assert!(4000 - report.storm <= most, "{} of at most {most} in {:?}", 4000 - report.storm, start.elapsed());
}

/// A transmit queue whose chains are all indirect tables of 32768 descriptors, the largest possible.
struct Tables {
    guest: Guest,
    /// User addresses of the parts of the rings.
    available: u64,
    used: u64,
}

impl Tables {
    const SIZE: u32 = 32768;

    fn new(rig: &Rig) -> Tables {
        // The rings are placed where an ordinary driver has buffers.
        let mut guest = Guest::new(Peer::connect(&rig.socket(0)), SPLIT | 1 << 28, 1024);
        guest.set_memory();
        let end = guest.driver.region.user() + guest.driver.region.len() as u64;
        let size = u64::from(Self::SIZE);
        let table = end - 16 * size - 4096;
        let descriptors = table - 16 * size;
        let available = descriptors - 2 * size - 4096;
        let used = available - 8 * size - 4096;
        let to_guest = guest.driver.region.guest().wrapping_sub(guest.driver.region.user());
        let entry = |address: u64, len: u32, flags: u16, next: u16| {
            [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
        };
        let last = Self::SIZE - 1;
        for index in 0..Self::SIZE {
            let next = if index < last { (1, index as u16 + 1) } else { (0, 0) };
            guest.poke(table + 16 * u64::from(index), &entry(to_guest.wrapping_add(end - 64), 1, next.0, next.1));
        }
        guest.poke(descriptors, &entry(to_guest.wrapping_add(table), 16 * Self::SIZE, 4, 0));
        guest.poke(available, &vec![0; 4 + 2 * size as usize]);
        guest.poke(used, &vec![0; 4 + 8 * size as usize]);
        let peer = &mut guest.peer;
        peer.ok(SET_VRING_NUM, &words(&[1, Self::SIZE]), &[]);
        peer.ok(SET_VRING_BASE, &words(&[1, 0]), &[]);
        peer.ok(SET_VRING_ADDR, &longs(&[1, descriptors, used, available, 0]), &[]);
        peer.ok(SET_VRING_ERR, &longs(&[1]), &[guest.vrings[1].err.as_raw_fd()]);
        peer.ok(SET_VRING_KICK, &longs(&[1]), &[guest.vrings[1].kick.as_raw_fd()]);
        peer.ok(SET_VRING_ENABLE, &words(&[1, 1]), &[]);
        Tables { guest, available, used }
    }

    /// Returns how many chains were returned.
    fn done(&self) -> u16 {
        let offset = (self.used + 2 - self.guest.driver.region.user()) as usize;
        u16::from_le_bytes(self.guest.driver.region.span(offset, 2).unwrap().array(0).unwrap())
    }

    /// Returns whether all chains made available were returned.
    fn is_idle(&self) -> bool {
        let offset = (self.available + 2 - self.guest.driver.region.user()) as usize;
        let index = self.guest.driver.region.span(offset, 2).unwrap().array(0).unwrap();
        self.done() == u16::from_le_bytes(index)
    }

    /// Makes a full ring of chains available.
    fn arm(&self) {
        let index = self.done().wrapping_add(Self::SIZE as u16);
        self.guest.poke(self.available + 2, &index.to_le_bytes());
        let _ = self.guest.vrings[1].kick.write(1);
    }
}

/// 32768 chains of 32768 descriptors are over a thousand million: processing all of them takes minutes.
#[test]
fn huge_chains_do_not_starve_other_ports() {
    let rig = Rig::new("tables");
    let mut others = rig.others();
    others.work();
    let tables = Tables::new(&rig);
    let start = Instant::now();
    tables.arm();
    while !tables.is_idle() {
        others.work();
        assert!(start.elapsed() < Duration::from_secs(30), "{} of {} are done", tables.done(), Tables::SIZE);
    }
    others.work();
    let from = rig.report(0).received;
    assert_eq!((from.oversize, from.frames, rig.faults()), (Tables::SIZE.into(), 0, 0));
}

#[test]
fn a_guest_that_takes_no_frames_is_reported() {
    let rig = Rig::new("deaf");
    let mut others = rig.others();
    let mut deaf = rig.guest(0, SPLIT);
    let (name, start) = (rig.victim(), Instant::now());
    deaf.send_to(others.0.mac);
    while !log_of(&name).iter().any(|line| line.contains("has taken no frame for")) {
        assert!(start.elapsed() < Duration::from_secs(30), "{:#?}", log_of(&name));
        for _ in 0..64 {
            others.0.send_to(deaf.mac);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(start.elapsed() > Duration::from_secs(9));
    let line = logged(&name, &["WARN", "queue 0", "were dropped as its ring is full"]);
    assert_eq!(log_of(&name).iter().filter(|other| **other == line).count(), 1);
    // It takes frames again.
    assert!(!deaf.received(others.0.mac).is_empty());
    deaf.driver.rx[0].refill();
    let again = |lines: Vec<String>| lines.iter().any(|line| line.contains("the guest takes frames again"));
    assert!(within(PATIENCE, || {
        let sequence = others.0.send_to(deaf.mac);
        assert!(deaf.receives(others.0.mac, sequence));
        again(log_of(&name))
    }));
}

/// A real panic cannot, hopefully, be provoked from outside: the test calls the function that the switch calls after one.
#[test]
fn a_panic_ends_the_connection_of_one_port() {
    let rig = Rig::new("panic");
    let mut others = rig.others();
    for round in 1..=3 {
        let mut guest = rig.guest(0, LAYOUTS[round % 2]);
        exchange(&mut guest, &mut others.0);
        rig.servers[0].handle().port().panicked("index out of bounds");
        assert!(guest.peer.ends());
        assert!(guest.vrings.iter().all(Vring::failed));
        others.work();
        assert!(within(PATIENCE, || rig.report(0).received.panics == round as u64));
    }
    logged(&rig.victim(), &["ERROR", "stopped by a bug in ringroad: index out of bounds", "report"]);
}
