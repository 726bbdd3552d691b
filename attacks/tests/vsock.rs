//! What a vsock guest can do with packets and its rings.

use ringroad_attacks::{
    daemon::Daemon,
    frontend::signal,
    scene::{BUDGET, Scene},
    vsock::{HOST, Header, RX, SEQPACKET, TX, VsockGuest, op},
};
use std::{
    io::Read,
    os::unix::net::UnixListener,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// The attacker's, and a second guest of the same group.
const CID: u64 = 1001;
const OTHER: u64 = 1002;

/// A scene with an attacker `va` in a group, with another guest `vb`.
fn grouped() -> Scene {
    Scene::new(|config| {
        config.vsock("va", CID, "groups = [\"lab\"]");
        config.vsock("vb", OTHER, "groups = [\"lab\"]");
    })
}

/// A guest with a receive ring of 64, of which 40 are filled with buffers of 45 bytes.
fn small(daemon: &Daemon, packed: bool) -> VsockGuest {
    let mut guest = VsockGuest::connect(&daemon.socket("va"), packed, 64, 45).expect("a guest");
    guest.give(40);
    guest
}

/// Waits until the device has used so many receive buffers in all.
fn used(guest: &mut VsockGuest, total: &mut usize, wanted: usize) {
    let end = Instant::now() + Duration::from_secs(1);
    while *total < wanted && Instant::now() < end {
        *total += guest.received(|_, _| {});
        thread::sleep(Duration::from_millis(1));
    }
}

/// Spoils what comes after the receive buffers that were used: an available index that jumps (split), or descriptors that the
/// device has already looked at (packed).
fn spoil(guest: &VsockGuest) {
    let ring = &guest.device.rings[RX];
    if ring.packed {
        for slot in 36..40u64 {
            // Length 0.
            guest.device.mem.write(ring.desc + 16 * slot + 8, &[0; 4]);
        }
    } else {
        ring.put_index(ring.next.wrapping_add(1000));
    }
}

fn to_itself(packed: bool) {
    let mut scene = grouped();
    scene.attack(1.0, |daemon, _| {
        let (mut guest, mut total) = (small(daemon, packed), 0);
        let (there, back) = ((CID, 2), (CID, 1));
        let request = guest.header(1, there, op::REQUEST);
        guest.send(request, &[]);
        let response = guest.header(2, back, op::RESPONSE);
        guest.send(response, &[]);
        used(&mut guest, &mut total, 2);
        for count in 3..=36 {
            let update = guest.header(1, there, op::CREDIT_UPDATE);
            guest.send(update, &[]);
            used(&mut guest, &mut total, count);
        }
        spoil(&guest);
        let byte = guest.header(1, there, op::RW);
        guest.send(byte, b"x");
        thread::sleep(Duration::from_millis(200));
    });
    scene.finish();
}

/// Before: SIGABRT, an index out of an empty list.
#[test]
fn a_receive_ring_that_breaks_between_two_looks() {
    to_itself(false);
}

/// Before: SIGABRT, the same.
#[test]
fn a_packed_receive_ring_that_breaks_between_two_looks() {
    to_itself(true);
}

fn from_the_host(packed: bool) {
    let mut scene = Scene::new(|config| config.vsock("va", CID, ""));
    scene.attack(1.0, |daemon, _| {
        let service = UnixListener::bind(daemon.service("va", 5)).expect("a service");
        let (mut guest, mut total) = (small(daemon, packed), 0);
        // Without any credit for the host: it has nothing to read its socket for.
        let header = |guest: &VsockGuest, op| Header { buf_alloc: 0, ..guest.header(1, (HOST, 5), op) };
        let request = header(&guest, op::REQUEST);
        guest.send(request, &[]);
        let accepted = service.accept().expect("the device connects").0;
        used(&mut guest, &mut total, 1);
        for count in 2..=36 {
            // Each is answered with how much room there is.
            let ask = header(&guest, op::CREDIT_REQUEST);
            guest.send(ask, &[]);
            used(&mut guest, &mut total, count);
        }
        spoil(&guest);
        drop(accepted);
        thread::sleep(Duration::from_millis(50));
        // Nobody takes it any more: which the guest is to be told.
        let byte = header(&guest, op::RW);
        guest.send(byte, b"x");
        thread::sleep(Duration::from_millis(200));
    });
    scene.finish();
}

/// Before: SIGABRT; no group is needed.
#[test]
fn a_receive_ring_that_breaks_before_a_service_closes() {
    from_the_host(false);
}

/// Before: SIGABRT.
#[test]
fn a_packed_receive_ring_that_breaks_before_a_service_closes() {
    from_the_host(true);
}

/// Far more than the budget: nothing is left to see.
fn enough(daemon: &Daemon) -> bool {
    daemon.peak_so_far() > BUDGET * 3 / 2
}

/// Connections from `CID` to a guest, or to itself, with credit on both ends: a request from a port and the answer to it.
fn opened(guest: &VsockGuest, to: u64, kind: u16, port: u32) -> [Header; 2] {
    let there = Header { kind, ..guest.header(port, (to, port + (1 << 24)), op::REQUEST) };
    let back = Header { buf_alloc: 1 << 20, ..there.answer(op::RESPONSE) };
    [there, back]
}

/// Before: 1 MiB of packets in each direction of each connection: 2 GiB in 1.8 s.
#[test]
fn connections_to_itself_that_are_filled() {
    let mut scene = grouped();
    scene.attack(2.5, |daemon, until| {
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 64, 64).expect("a guest");
        for port in (0..16_000).step_by(64) {
            if Instant::now() >= until || enough(daemon) {
                break;
            }
            let ports = || port..port + 64;
            let open: Vec<_> = ports().flat_map(|port| opened(&guest, CID, 1, port)).collect();
            guest.flood(0, &mut open.iter().copied(), until);
            let data = open.iter().flat_map(|header| {
                let data = Header { op: op::RW, buf_alloc: 1 << 20, ..*header };
                std::iter::repeat_n(data, 16)
            });
            guest.flood(1 << 16, &mut data.into_iter(), until);
        }
    });
    scene.finish();
}

/// Before: each connection to the same port overwrote its own ticket: 2 074 000 at once instead of 16 384, 517 MiB.
#[test]
fn requests_to_itself_from_one_port_to_the_same() {
    let mut scene = grouped();
    let sent = scene.attack(6.0, |daemon, until| {
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 64, 64).expect("a guest");
        let header = guest.header(0, (CID, 0), op::REQUEST);
        let mut requests = (0..4_000_000).take_while(|_| !enough(daemon)).map(|port| Header {
            src_port: port,
            dst_port: port,
            ..header
        });
        guest.flood(0, &mut requests, until)
    });
    println!("{sent} requests");
    scene.finish();
}

/// Empty messages cost no credit. Before: 65 536 of them for each connection waited in the outbox.
#[test]
fn empty_messages_to_itself() {
    empty_messages(CID);
}

/// The same to another guest, which takes nothing.
#[test]
fn empty_messages_to_a_guest_that_is_deaf() {
    empty_messages(OTHER);
}

fn empty_messages(to: u64) {
    let mut scene = grouped();
    let sent = scene.attack(6.0, |daemon, until| {
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 64, 64).expect("a guest");
        let mut other = VsockGuest::connect(&daemon.socket("vb"), false, 64, 64).expect("a guest");
        let mut sent = 0;
        for port in 0..16_000 {
            if Instant::now() >= until || enough(daemon) {
                break;
            }
            let [there, back] = opened(&guest, to, SEQPACKET, port);
            guest.flood(0, &mut [there].into_iter(), until);
            if to == CID { &mut guest } else { &mut other }.flood(0, &mut [back].into_iter(), until);
            let message = Header { op: op::RW, flags: 1, ..there };
            sent += guest.flood(0, &mut std::iter::repeat_n(message, 60_000), until);
        }
        sent
    });
    println!("{sent} messages");
    scene.finish();
}

/// Each flow that ended walked all the others. Before: 100 000 of them took 13 s of CPU, and the other guest's echo timed out.
#[test]
fn flows_in_the_outbox_that_end() {
    flows(100_000, true);
}

/// As many as the limit allows. Before: the echo stalled for 350 to 500 ms.
#[test]
fn flows_within_the_limit_that_end() {
    flows(16_000, false);
}

fn flows(count: u32, same: bool) {
    let mut scene = grouped();
    scene.attack(4.0, |daemon, until| {
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 1024, 64).expect("a guest");
        let header = |port: u32| {
            let to = if same { port } else { port + (1 << 24) };
            guest.header(port, (CID, to), op::REQUEST)
        };
        let open = (0..count).map(header).flat_map(|there| {
            let back = if same { op::CREDIT_UPDATE } else { op::RESPONSE };
            [there, Header { buf_alloc: 1 << 20, ..there.answer(back) }]
        });
        let open: Vec<_> = open.collect();
        let data: Vec<_> = open.iter().step_by(2).map(|there| Header { op: op::RW, ..*there }).collect();
        // Everything waits …
        guest.flood(0, &mut open.iter().copied(), until);
        guest.flood(1, &mut data.iter().copied(), until);
        // … half of it is reset …
        let reset: Vec<_> = data.iter().step_by(2).map(|there| Header { op: op::RST, ..*there }).collect();
        guest.flood(0, &mut reset.iter().copied(), Instant::now() + Duration::from_millis(1500));
        // … and half of it goes.
        guest.give(1024);
        while Instant::now() < until {
            let count = guest.received(|_, _| {});
            guest.give(count);
            if count == 0 {
                thread::sleep(Duration::from_micros(200));
            }
        }
    });
    scene.finish();
}

/// Each request costs a socket and a connect. Before: as many of them as a guest likes, before any other guest's packet.
#[test]
fn requests_to_ports_of_the_host() {
    let mut scene = Scene::new(|config| config.vsock("va", CID, ""));
    let done = AtomicBool::new(false);
    let accepted = AtomicU64::new(0);
    let sent = scene.attack(2.5, |daemon, until| {
        let service = UnixListener::bind(daemon.service("va", 5)).expect("a service");
        service.set_nonblocking(true).expect("a listener");
        thread::scope(|scope| {
            scope.spawn(|| {
                ringroad_attacks::be_nice();
                while !done.load(Ordering::Relaxed) {
                    match service.accept() {
                        Ok(_) => _ = accepted.fetch_add(1, Ordering::Relaxed),
                        Err(_) => thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
            let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 1024, 64).expect("a guest");
            guest.give(1024);
            let header = guest.header(0, (HOST, 0), op::REQUEST);
            // A service that accepts, and ports where nobody is.
            let mut requests = (0u32..).map(|port| Header { src_port: port, dst_port: 5 + port % 2, ..header });
            let mut sent = 0;
            while Instant::now() < until {
                sent += guest.flood(0, &mut requests.by_ref().take(256), until);
                let count = guest.received(|_, _| {});
                guest.give(count);
            }
            done.store(true, Ordering::Relaxed);
            sent
        })
    });
    println!("{sent} requests, {} accepted", accepted.load(Ordering::Relaxed));
    scene.finish();
}

/// Connections whose services read nothing. Before: each kept 256 KiB of what the guest sent: 1.6 GiB for 10 000.
#[test]
fn connections_to_services_that_do_not_read() {
    const COUNT: u32 = 4096;
    let mut scene = Scene::new(|config| config.vsock("va", CID, ""));
    let held = scene.attack(5.0, |daemon, until| {
        let service = UnixListener::bind(daemon.service("va", 5)).expect("a service");
        service.set_nonblocking(true).expect("a listener");
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 1024, 64).expect("a guest");
        guest.give(1024);
        let mut held = Vec::new();
        for port in (0..COUNT).step_by(64) {
            if Instant::now() >= until || enough(daemon) {
                break;
            }
            let open: Vec<_> = (port..port + 64).map(|port| guest.header(port, (HOST, 5), op::REQUEST)).collect();
            guest.flood(0, &mut open.iter().copied(), until);
            let end = Instant::now() + Duration::from_millis(50);
            let before = held.len();
            while held.len() < before + open.len() && Instant::now() < end {
                held.extend(service.accept().ok());
            }
            // What the kernel's buffer takes, and what is left of its credit.
            let data = open.iter().map(|header| Header { op: op::RW, ..*header });
            let data = data.flat_map(|header| std::iter::repeat_n(header, 19));
            guest.flood(32 << 10, &mut data.into_iter(), until);
            let count = guest.received(|_, _| {});
            guest.give(count);
        }
        held
    });
    println!("{} connections", held.len());
    drop(held);
    scene.finish();
}

/// Bytes of all kinds in place of packets, in both layouts. Survived before, and is to be.
#[test]
fn random_packets() {
    let mut scene = grouped();
    scene.attack(2.0, |daemon, until| {
        let mut random = ringroad_attacks::Random::new(7);
        while Instant::now() < until {
            let Ok(mut guest) = VsockGuest::connect(&daemon.socket("va"), false, 64, 128) else { continue };
            guest.give(64);
            let end = Instant::now() + Duration::from_millis(300);
            let cids = [CID, OTHER, HOST, 1000, 0, u64::MAX];
            let mut any = || {
                let mut pick = |from: &[u64]| from[random.below(from.len() as u64) as usize];
                let (cid, to) = (pick(&[CID, CID, CID, HOST]), pick(&cids));
                let port = [0, 1, 2, 7, 1 << 24, u32::MAX as u64];
                Header {
                    src_cid: cid,
                    dst_cid: to,
                    src_port: pick(&port) as u32,
                    dst_port: pick(&port) as u32,
                    len: 0,
                    kind: pick(&[1, 1, 2, 2, 0, 3]) as u16,
                    op: pick(&[0, 1, 1, 2, 2, 3, 4, 5, 5, 5, 6, 7, 8]) as u16,
                    flags: pick(&[0, 1, 2, 3, u64::from(u32::MAX)]) as u32,
                    buf_alloc: pick(&[0, 1, 1 << 16, u64::from(u32::MAX)]) as u32,
                    fwd_cnt: pick(&[0, 1, 1 << 31, u64::from(u32::MAX)]) as u32,
                }
            };
            while Instant::now() < end {
                let packets: Vec<_> = (0..256).map(|_| any()).collect();
                guest.flood(packets[0].fwd_cnt.min(1000), &mut packets.into_iter(), end);
                let count = guest.received(|_, _| {});
                guest.give(count);
                signal(&guest.device.kicks[TX]);
            }
        }
    });
    scene.finish();
}

/// A program of the host is told of the end of its connection, whatever the guest does: used by the tests above as a probe that
/// the device still serves programs.
#[test]
fn a_guest_that_is_gone_ends_its_connections() {
    let mut scene = Scene::new(|config| config.vsock("va", CID, ""));
    let ended = scene.attack(1.0, |daemon, _| {
        let service = UnixListener::bind(daemon.service("va", 5)).expect("a service");
        let mut guest = VsockGuest::connect(&daemon.socket("va"), false, 64, 64).expect("a guest");
        guest.give(64);
        let request = guest.header(1, (HOST, 5), op::REQUEST);
        guest.send(request, &[]);
        let mut accepted = service.accept().expect("the device connects").0;
        accepted.set_read_timeout(Some(Duration::from_secs(2))).expect("a timeout");
        drop(guest);
        accepted.read(&mut [0; 1]).is_ok_and(|count| count == 0)
    });
    scene.check(ended, "a connection outlived its guest");
    scene.finish();
}
