//! Driver and device against each other: programs on both ends, workers that sleep, all ring layouts.
#![cfg(not(loom))]

mod common;

use common::*;
use ringroad_vsock::{Addr, Listener, SeqPacket, Settings, Side, SocketType, Stack, Stream, bits};
use std::{
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

fn settings(direct: bool, poll: Duration) -> Settings {
    Settings { direct, poll, ..Settings::default() }
}

/// All ring layouts, direct and queued sending, with and without polling.
fn setups() -> Vec<Setup> {
    let always = bits::VERSION_1 | bits::VSOCK_F_STREAM | bits::VSOCK_F_SEQPACKET;
    let mut setups = Vec::new();
    for ring in [
        0,
        bits::EVENT_IDX,
        bits::IN_ORDER | bits::EVENT_IDX,
        bits::RING_PACKED,
        bits::RING_PACKED | bits::EVENT_IDX,
        bits::RING_PACKED | bits::IN_ORDER | bits::EVENT_IDX,
    ] {
        for direct in [true, false] {
            for (poll, leads) in [(0, true), (0, false), (50, true)] {
                let settings = settings(direct, Duration::from_micros(poll));
                setups.push(Setup { acked: always | ring, settings, leads, ..Setup::default() });
            }
        }
    }
    setups
}

/// Sends `total` bytes in parts of all sizes, then shuts down sending.
fn send<S: Side>(stream: &Stream<S>, total: u64, seed: u64) {
    let mut stream = stream;
    let mut chunk = vec![0; 100_000];
    let (mut sent, mut step) = (0, 1);
    while sent < total {
        step = (step * 7 + 13) % chunk.len();
        let len = (step as u64 + 1).min(total - sent) as usize;
        pattern(seed, sent, &mut chunk[..len]);
        stream.write_all(&chunk[..len]).unwrap();
        sent += len as u64;
    }
    stream.shutdown(Shutdown::Write);
}

/// Receives `total` bytes and then the end of the stream.
fn receive<S: Side>(stream: &Stream<S>, total: u64, seed: u64) {
    let mut stream = stream;
    let (mut target, mut expected) = (vec![0; 70_000], vec![0; 70_000]);
    let mut received = 0;
    loop {
        let count = stream.read(&mut target).unwrap();
        if count == 0 {
            break;
        }
        pattern(seed, received, &mut expected[..count]);
        assert!(target[..count] == expected[..count], "wrong bytes after offset {received}");
        received += count as u64;
    }
    assert_eq!(received, total);
}

/// Sends `total` bytes one way, then the other way.
fn pour<A: Side, B: Side>(a: &Stream<A>, b: &Stream<B>, total: u64) {
    thread::scope(|scope| {
        scope.spawn(|| send(a, total, 1));
        receive(b, total, 1);
        scope.spawn(|| send(b, total, 2));
        receive(a, total, 2);
    });
}

/// Sends `total` bytes both ways at once.
fn duplex<A: Side, B: Side>(a: &Stream<A>, b: &Stream<B>, total: u64) {
    thread::scope(|scope| {
        scope.spawn(|| send(a, total, 1));
        scope.spawn(|| send(b, total, 2));
        scope.spawn(|| receive(b, total, 1));
        receive(a, total, 2);
    });
}

/// Connects one stack to the other.
fn connect<A: Side, B: Side>(a: &Arc<Stack<A>>, b: &Arc<Stack<B>>, port: u32) -> (Stream<A>, Stream<B>) {
    let listener = Listener::bind(b, port, SocketType::Stream).unwrap();
    let addr = Addr { cid: b.cid(), port };
    let from = Stream::connect(a, addr).unwrap();
    let to = listener.accept_within(Some(Duration::from_secs(5))).unwrap();
    assert_eq!((from.peer_addr(), to.local_addr()), (addr, addr));
    assert_eq!((to.peer_addr(), a.cid()), (from.local_addr(), from.local_addr().cid));
    (from, to)
}

fn eventually(what: &str, mut ready: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if ready() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("timed out after 2 s: {what}");
}

#[test]
fn bytes_arrive_in_order_both_ways_on_every_ring() {
    for setup in setups() {
        for queue_size in [4, 64] {
            let setup = Setup { queue_size, ..setup };
            println!("{setup:?}");
            let pair = Pair::new(setup);
            let (a, b) = connect(&pair.host, &pair.guest, 1000);
            pour(&a, &b, 2_000_000);
            drop((a, b));
            let (a, b) = connect(&pair.guest, &pair.host, 1000);
            pour(&a, &b, 2_000_000);
            drop((a, b));
            let (a, b) = connect(&pair.guest, &pair.host, 1001);
            duplex(&a, &b, 2_000_000);
            drop((a, b));
            eventually("all connections closed", || {
                pair.host.report().connections + pair.guest.report().connections == 0
            });
            pair.assert_whole();
            for ways in [pair.host.report().ways, pair.guest.report().ways] {
                assert_eq!(ways.direct > 0, setup.settings.direct, "{ways:?}");
                assert!(setup.settings.direct || ways.queued > 0, "{ways:?}");
            }
        }
    }
}

#[test]
fn small_buffers_and_little_credit_work() {
    for direct in [true, false] {
        for (receive, buffer) in [(1, 1), (7, 100), (100, 5000), (70_000, 3), (65_536, 1 << 20)] {
            let settings = Settings { buffer, direct, ..Settings::default() };
            let pair = Pair::new(Setup { receive, queue_size: 16, settings, ..Setup::default() });
            let (a, b) = connect(&pair.host, &pair.guest, 1);
            duplex(&a, &b, 3000 * u64::from(buffer.min(20)));
            pair.assert_whole();
        }
    }
}

#[test]
fn messages_keep_their_boundaries() {
    for setup in setups() {
        let pair = Pair::new(setup);
        let listener = Listener::bind(&pair.guest, 9, SocketType::SeqPacket).unwrap();
        let a = SeqPacket::connect(&pair.host, Addr { cid: GUEST, port: 9 }).unwrap();
        let b = listener.accept_messages().unwrap();
        let size = |number: u64| match number % 50 {
            0 => 65_536,
            1 => 0,
            2 => 200_000,
            _ => (number * 7919 % 5000) as usize,
        };
        const COUNT: u64 = 1000;
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut message = vec![0; 200_000];
                for number in 0..COUNT {
                    let message = &mut message[..size(number)];
                    pattern(number, 0, message);
                    a.send(message, number % 3 == 0).unwrap();
                }
                a.shutdown(Shutdown::Write);
            });
            let (mut target, mut expected) = (vec![0; 200_000], vec![0; 200_000]);
            for number in 0..COUNT {
                let expected = &mut expected[..size(number)];
                pattern(number, 0, expected);
                let received = b.receive(&mut target).unwrap();
                assert_eq!(received, Some((expected.len(), number % 3 == 0)), "message {number}");
                assert!(target[..expected.len()] == *expected, "message {number}");
            }
            assert_eq!(b.receive(&mut target).unwrap(), None);
        });
        let error = b.send(&vec![0; 256 * 1024 + 1], false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        pair.assert_whole();
    }
}

#[test]
fn five_hundred_connections_at_once() {
    let pair = Pair::new(Setup::default());
    let listener = Listener::bind(&pair.host, 7, SocketType::Stream).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let streams: Vec<_> = (0..500).map(|_| listener.accept().unwrap()).collect();
            for stream in &streams {
                let mut bytes = [0; 1000];
                (&*stream).read_exact(&mut bytes).unwrap();
                (&*stream).write_all(&bytes).unwrap();
            }
        });
        let addr = Addr { cid: HOST, port: 7 };
        let streams: Vec<_> = (0..500).map(|_| Stream::connect(&pair.guest, addr).unwrap()).collect();
        assert_eq!(pair.guest.report().connections, 500);
        for (index, stream) in streams.iter().enumerate() {
            let mut bytes = [0; 1000];
            pattern(index as u64, 0, &mut bytes);
            (&*stream).write_all(&bytes).unwrap();
        }
        for (index, stream) in streams.iter().enumerate() {
            let (mut bytes, mut expected) = ([0; 1000], [0; 1000]);
            pattern(index as u64, 0, &mut expected);
            (&*stream).read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, expected, "connection {index}");
        }
    });
    eventually("all connections closed", || pair.host.report().connections + pair.guest.report().connections == 0);
    pair.assert_whole();
}

#[test]
fn an_unread_connection_does_not_block_others() {
    for direct in [true, false] {
        let pair = Pair::new(Setup { settings: settings(direct, Duration::ZERO), ..Setup::default() });
        let (a, _b) = connect(&pair.host, &pair.guest, 1);
        a.set_nonblocking(true);
        let mut total = 0;
        let full = loop {
            match (&a).write(&[7; 50_000]) {
                Ok(count) => total += count,
                Err(error) => break error,
            }
        };
        assert_eq!((full.kind(), total), (ErrorKind::WouldBlock, 256 << 10), "the size of the peer's receive buffer");
        let (c, d) = connect(&pair.host, &pair.guest, 2);
        pour(&c, &d, 1_000_000);
        // A late reader still gets everything.
        let mut target = vec![0; total];
        (&_b).read_exact(&mut target).unwrap();
        assert!(target.iter().all(|&byte| byte == 7));
        eventually("write succeeds again", || (&a).write(&[1]).is_ok());
    }
}

#[test]
fn a_program_that_never_blocks_is_woken_for_each_change() {
    let pair = Pair::new(Setup::default());
    let (mut host, mut guest) = connect(&pair.host, &pair.guest, 90);
    let woken = Arc::new(AtomicU64::new(0));
    let counted = woken.clone();
    guest.set_nonblocking(true);
    guest.set_waker(Some(Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed))));
    let mut target = [0; 9];
    assert_eq!(guest.read(&mut target).unwrap_err().kind(), ErrorKind::WouldBlock);
    for (expected, change) in [(b"data".as_slice(), 0), (b"", 1)] {
        let before = woken.load(Ordering::Relaxed);
        if change == 0 {
            host.write_all(b"data").unwrap()
        } else {
            host.shutdown(Shutdown::Write)
        }
        eventually("woken", || woken.load(Ordering::Relaxed) > before);
        let len = guest.read(&mut target).unwrap();
        assert_eq!(&target[..len], expected);
    }
    // Nobody is called any more.
    guest.set_waker(None);
    let before = woken.load(Ordering::Relaxed);
    drop(host);
    eventually("closed", || guest.write(b"x").is_err());
    assert_eq!(woken.load(Ordering::Relaxed), before);
    pair.assert_whole();
}

#[test]
fn each_way_to_end_returns_its_own_error() {
    let pair = Pair::new(Setup::default());
    let addr = Addr { cid: GUEST, port: 5 };
    let refused = Stream::connect(&pair.host, addr).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    // A message listener does not accept streams.
    let listener = Listener::bind(&pair.guest, 5, SocketType::SeqPacket).unwrap();
    assert_eq!(
        Listener::bind(&pair.guest, 5, SocketType::SeqPacket).map(|_| ()).unwrap_err().kind(),
        ErrorKind::AddrInUse
    );
    assert!(Stream::connect(&pair.host, addr).is_err());
    drop(listener);

    // Half closed: the other direction still works.
    let (a, b) = connect(&pair.host, &pair.guest, 5);
    (&a).write_all(b"question").unwrap();
    a.shutdown(Shutdown::Write);
    assert_eq!((&a).write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    let mut all = Vec::new();
    (&b).read_to_end(&mut all).unwrap();
    assert_eq!(all, b"question");
    (&b).write_all(b"answer").unwrap();
    drop(b);
    let mut all = Vec::new();
    (&a).read_to_end(&mut all).unwrap();
    assert_eq!(all, b"answer");

    // After a shutdown of receiving, the sender gets an error.
    let (a, b) = connect(&pair.host, &pair.guest, 5);
    b.shutdown(Shutdown::Read);
    eventually("broken pipe", || (&a).write(b"?").is_err_and(|error| error.kind() == ErrorKind::BrokenPipe));

    // Timeouts.
    a.set_timeout(Some(Duration::from_millis(20)));
    assert_eq!((&a).read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
    a.set_nonblocking(true);
    assert_eq!((&a).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    pair.assert_whole();
}

#[test]
fn a_reset_closes_all_connections_and_new_ones_can_be_opened() {
    let pair = Pair::new(Setup::default());
    let (a, b) = connect(&pair.host, &pair.guest, 5);
    (&b).write_all(b"before").unwrap();
    eventually("data received", || pair.host.connections().iter().any(|connection| connection.unread == 6));
    thread::scope(|scope| {
        let reader = scope.spawn(|| (&b).read(&mut [0]));
        thread::sleep(Duration::from_millis(20));
        pair.guest.reset();
        assert_eq!(reader.join().unwrap().unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
    // The other end learns of it when it sends.
    let _ = (&a).write(b"?");
    let mut before = [0; 6];
    (&a).read_exact(&mut before).unwrap();
    assert_eq!(&before, b"before", "received data can still be read");
    assert_eq!((&a).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let (c, d) = connect(&pair.host, &pair.guest, 5);
    pour(&c, &d, 100_000);
}

#[test]
fn a_peer_that_never_closes_is_reset_after_the_linger_time() {
    let settings = Settings { linger: Duration::from_millis(50), ..Settings::default() };
    let pair = Pair::new(Setup { settings, ..Setup::default() });
    let (a, b) = connect(&pair.host, &pair.guest, 5);
    (&a).write_all(b"unread").unwrap();
    drop(a);
    eventually("connection closed", || pair.host.report().connections == 0);
    let mut all = Vec::new();
    (&b).read_to_end(&mut all).unwrap();
    assert_eq!(all, b"unread");
}

#[test]
fn polling_readers_and_a_waiting_leader_miss_no_packet() {
    // One program is the leader, while others poll with notifications off: when the last of them stops polling, the leader must
    // learn of packets that arrived in between.
    for direct in [false, true] {
        let settings = settings(direct, Duration::from_micros(20));
        let pair = Pair::new(Setup { settings, ..Setup::default() });
        let ends: Vec<_> = (0..4).map(|port| connect(&pair.host, &pair.guest, port)).collect();
        thread::scope(|scope| {
            for (a, b) in &ends {
                scope.spawn(move || pour(a, b, 4_000_000));
            }
        });
        drop(ends);
        eventually("all connections closed", || pair.host.report().connections + pair.guest.report().connections == 0);
        pair.assert_whole();
    }
}
