//! Connections that end, stall, or arrive twice.

use crate::rig::*;
use std::{
    io::Write,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

/// Drops a rig, which must take half a second at most.
#[track_caller]
fn stops(rig: Rig) {
    let start = Instant::now();
    ends_soon(rig);
    assert!(start.elapsed() < Duration::from_millis(1200), "{:?}, for two servers", start.elapsed());
}

#[test]
fn reconnects() {
    let rig = Rig::new("reconnects");
    let file = memory(0x1000);
    let own = held(identity(&file));
    for round in 1..=50 {
        let mut peer = rig.client(0);
        assert_eq!(peer.get(0x100), u64::from(round > 1) * 0x1234_5678, "registers are kept");
        peer.ask(DMA_MAP, &dma_map(3, 0, 0, 0x1000), &[file.as_raw_fd()]).unwrap();
        assert_eq!(peer.dma(0), DONE);
        peer.works();
        drop(peer);
    }
    rig.disconnected(50);
    assert_eq!((held(identity(&file)), rig.faults()), (own, 0));
    assert!(!log_of(&rig.victim()).iter().any(|line| line.contains("turned away")));
}

#[test]
fn a_client_killed_at_any_moment() {
    let rig = Rig::new("killed");
    let file = memory(0x1000);
    let own = held(identity(&file));
    let map = message(1, DMA_MAP, 0, &dma_map(3, 0, 0x1000, 0x1000));
    let register = message(2, REGION_WRITE, 0, &write(0x100, &[7; 8]));
    let read = message(3, REGION_READ, 0, &access(0, 0x100, 8));
    let all = [map, register, read].concat();
    for len in 0..=all.len() {
        let mut peer = rig.client(0);
        peer.send(&all[..len], &[file.as_raw_fd()][..usize::from(len > 0)]);
        drop(peer);
        rig.disconnected(len as u64 + 1);
        assert!(within(PATIENCE, || held(identity(&file)) == own), "after {len} bytes: {:?}", held(identity(&file)));
    }
    logged(&rig.victim(), &["INFO", "client disconnected", "in the middle of a message"]);
    assert_eq!(rig.faults(), 0);
    rig.client(0).works();
}

#[test]
fn half_a_message_and_then_silence() {
    let whole = message(1, REGION_WRITE, 0, &write(0x100, &[7; 8]));
    for len in [1, 15, 16, 17, 39] {
        let rig = Rig::new(&format!("half{len}"));
        let mut other = rig.client(1);
        let mut peer = rig.client(0);
        peer.send(&whole[..len], &[]);
        assert!(peer.is_open());
        other.works();
        stops(rig);
        assert!(peer.ends());
    }
}

#[test]
fn a_message_in_pieces() {
    let rig = Rig::new("pieces");
    let mut peer = rig.client(0);
    let file = memory(0x1000);
    // The descriptor comes with any byte of it.
    for at in [0, 5, 16, 30] {
        let map = message(9, DMA_MAP, 0, &dma_map(3, 0, at << 20, 0x1000));
        for (index, byte) in map.iter().enumerate() {
            peer.send(&[*byte], &[file.as_raw_fd()][..usize::from(index as u64 == at)]);
        }
        assert_eq!(peer.answer(9, DMA_MAP).unwrap(), Ok(vec![]));
        assert_eq!(peer.dma(at << 20), DONE);
    }
}

#[test]
fn descriptors_reach_their_message() {
    let rig = Rig::new("whose");
    let mut peer = rig.client(0);
    let files = [memory(0x1000), memory(0x1000)];
    let post = message(1, REGION_WRITE, NO_REPLY, &write(0x100, &[7; 8]));
    // Without waiting, so that the server reads some of them at once.
    for round in 0..200u64 {
        peer.send(&post.repeat(round as usize % 5), &[]);
        let map = message(2, DMA_MAP, 0, &dma_map(3, 0, round << 20, 0x1000));
        // Whole, or in two parts.
        let (first, rest) = map.split_at(if round % 3 == 0 { map.len() } else { round as usize % 48 + 1 });
        peer.send(first, &[files[round as usize % 2].as_raw_fd()]);
        peer.send(rest, &[]);
        peer.send(&post.repeat(round as usize % 3), &[]);
        peer.send(&message(3, REGION_WRITE, NO_REPLY, &[access(0, 0, 4096), vec![1; 4096]].concat()), &[]);
    }
    for round in 0..200 {
        assert_eq!(peer.answer(2, DMA_MAP).unwrap(), Ok(vec![]), "{round}");
    }
    assert_eq!((peer.dma(199 << 20), rig.faults()), (DONE, 0));
    // Several messages at once, one of which has it.
    let maps = [1 << 40, 1 << 41].map(|address| message(4, DMA_MAP, 0, &dma_map(3, 0, address, 0x1000)));
    let question = message(4, GET_INFO, 0, &[0; 16]);
    peer.send(&maps[0], &[]);
    peer.send(&[&post[..], &maps[1], &question, &post, &question].concat(), &[files[0].as_raw_fd()]);
    for command in [DMA_MAP, DMA_MAP, GET_INFO, GET_INFO] {
        assert!(peer.answer(4, command).unwrap().is_ok());
    }
    assert_eq!([peer.dma(1 << 40), peer.dma(1 << 41)], [READ_FAULT, DONE]);
}

#[test]
fn a_client_that_does_not_read() {
    let rig = Rig::new("noread");
    let mut other = rig.client(1);
    let peer = rig.client(0);
    peer.stream.set_nonblocking(true).unwrap();
    let questions = message(1, REGION_READ, 0, &access(0, 0, 4096)).repeat(64);
    let mut last = Instant::now();
    // Both directions are full once no byte has been accepted for a while.
    assert!(within(2 * PATIENCE, || {
        while (&peer.stream).write(&questions).is_ok() {
            last = Instant::now();
        }
        last.elapsed() > Duration::from_millis(100)
    }));
    other.works();
    stops(rig);
}

#[test]
fn a_client_that_never_stops_sending() {
    let rig = Rig::new("floods");
    let peer = rig.client(0);
    let writes = message(1, REGION_WRITE, NO_REPLY, &write(0x100, &[7; 8])).repeat(100);
    let stream = peer.stream.try_clone().unwrap();
    let flood = std::thread::spawn(move || while (&stream).write_all(&writes).is_ok() {});
    rig.client(1).works();
    stops(rig);
    flood.join().unwrap();
}

#[test]
fn two_clients_at_once() {
    let rig = Rig::new("two");
    let mut first = rig.client(0);
    first.works();
    let mut second = rig.peer();
    assert!(second.ends());
    logged(&rig.victim(), &["WARN", "a second client was turned away"]);
    first.works();
    drop(first);
    rig.disconnected(1);
    rig.client(0).works();
}

#[test]
fn several_devices() {
    let rig = Rig::new("several");
    let mut peers = [rig.client(0), rig.client(1)];
    for (index, peer) in peers.iter_mut().enumerate() {
        peer.set(0x200, index as u64 + 5);
    }
    for (index, peer) in peers.iter_mut().enumerate() {
        assert_eq!(peer.get(0x200), index as u64 + 5);
    }
    let file = memory(0x1000);
    peers[0].ask(DMA_MAP, &dma_map(3, 0, 0, 0x1000), &[file.as_raw_fd()]).unwrap();
    assert_eq!([peers[0].dma(0), peers[1].dma(0)], [DONE, READ_FAULT]);
}

#[test]
fn a_dropped_server_disconnects_and_removes_its_socket() {
    let rig = Rig::new("dropped");
    let (mut peer, path) = (rig.client(0), rig.socket(0));
    assert!(path.exists());
    stops(rig);
    assert!(peer.ends() && !path.exists());
}

#[test]
fn a_panic_ends_only_its_connection() {
    let rig = Rig::new("panics");
    let mut other = rig.client(1);
    let mut peer = rig.client(0);
    peer.send(&message(1, REGION_WRITE, 0, &write(PANIC, &[0; 8])), &[]);
    assert!(peer.ends());
    logged(&rig.victim(), &["ERROR", "a panic in its session, a bug in ringroad"]);
    rig.disconnected(1);
    other.works();
    rig.client(0).works();
}

/// CPU time so far of this process's threads with such a name.
fn cpu_time(name: &str) -> Duration {
    let of = |task: &Path| {
        let read = |file: &str| std::fs::read_to_string(task.join(file)).ok();
        let time = read("schedstat").filter(|_| read("comm").is_some_and(|comm| comm.trim_end() == name))?;
        Some(Duration::from_nanos(time.split_whitespace().next()?.parse().ok()?))
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.filter_map(|task| of(&task.unwrap().path())).sum()
}

#[test]
fn polls_while_messages_follow_each_other_and_not_at_rest() {
    let rig = Rig::new("lingers");
    let mut peer = rig.client(0);
    // The kernel keeps 15 bytes of `vfio port lingers0`.
    let used = || cpu_time("vfio port linge");
    let after = |peer: &mut Peer, pause: Duration| {
        peer.works();
        let before = used();
        std::thread::sleep(pause);
        used() - before
    };
    // Half of the time that it may poll: another message may come.
    let mut most = Duration::ZERO;
    assert!(
        within(PATIENCE, || {
            (0..50).for_each(|_| peer.works());
            most = most.max(after(&mut peer, POLL / 2));
            most > POLL / 4
        }),
        "polled for {most:?} at most"
    );
    // None has come: it polls for less and less, and then no more.
    (0..20).for_each(|_| _ = after(&mut peer, 3 * POLL));
    let rest = after(&mut peer, 50 * POLL);
    assert!(rest < POLL / 4, "{rest:?} at rest");
    peer.works();
}

#[test]
fn rates() {
    let few = ringroad_host::vfio_user::Rate { burst: 10, rate: 20 };
    let rig = Rig::with("rates", ringroad_host::vfio_user::Limits { messages: few, refusals: few, ..GENEROUS });
    // Commands wait, register accesses do not.
    let mut peer = rig.client(0);
    let start = Instant::now();
    (0..20).for_each(|_| assert!(peer.ask(GET_INFO, &[0; 16], &[]).is_ok()));
    assert!(start.elapsed() > Duration::from_millis(300), "{:?}", start.elapsed());
    let start = Instant::now();
    (0..200).for_each(|_| peer.works());
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    // Too much nonsense ends the connection.
    assert!((0..100).any(|_| {
        peer.send(&message(1, REGION_READ, NO_REPLY, &access(9, 0, 8)).repeat(20), &[]);
        !peer.is_open()
    }));
    logged(&rig.victim(), &["ERROR", "`limits.refusals`", "disconnected"]);
    assert!(rig.seen().disconnects.load(Relaxed) > 0);
    // And a stop does not wait for the rate.
    let stream = UnixStream::connect(rig.socket(0)).unwrap();
    (&stream).write_all(&message(1, VERSION, 0, &[0; 4])).unwrap();
    (&stream).write_all(&message(1, GET_INFO, 0, &[0; 16]).repeat(100)).unwrap();
    stops(rig);
}
