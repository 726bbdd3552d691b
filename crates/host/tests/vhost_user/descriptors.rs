//! Descriptors of the wrong kind, or that a frontend changes after sending them.

use crate::{
    LAYOUTS,
    common::{request::*, *},
};
use std::{
    fs::{File, OpenOptions},
    net::TcpListener,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::{UnixDatagram, UnixStream},
    },
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::{
    epoll::Epoll,
    eventfd::{EFD_CLOEXEC, EventFd},
    sock_ctrl_msg::ScmSocket,
    timerfd::TimerFd,
};

/// An eventfd with a full counter, in blocking mode.
fn full() -> EventFd {
    let eventfd = EventFd::new(EFD_CLOEXEC).unwrap();
    eventfd.write(u64::MAX - 1).unwrap();
    eventfd
}

#[test]
fn a_call_descriptor_that_blocks_the_worker() {
    let rig = Rig::new("waits");
    let mut others = rig.others();
    for (round, acked) in LAYOUTS.into_iter().enumerate() {
        for index in 0..2 {
            let mut guest = rig.guest(0, acked);
            exchange(&mut guest, &mut others.0);
            let eventfd = full();
            guest.peer.ok(SET_VRING_CALL, &longs(&[index]), &[eventfd.as_raw_fd()]);
            set_blocking(&eventfd);
            // The worker notifies it while the other guests exchange frames.
            let start = Instant::now();
            if index == 0 {
                others.0.send_to(guest.mac);
            } else {
                guest.send_to(others.0.mac);
            }
            others.work();
            assert!(guest.peer.ends(), "round {round}, queue {index}: {:#?}", log_of(&rig.victim()));
            assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
            rig.expect_faults(2 * round as u64 + index + 1);
            logged(&rig.victim(), &["ERROR", "a call or err descriptor blocked", "no new connection for 1s"]);
            let from = guest.mac;
            drop(guest);
            let _ = others.0.received(from);
        }
    }
    // It may reconnect later.
    exchange(&mut rig.guest(0, SPLIT), &mut others.0);
}

#[test]
fn descriptors_that_block_control() {
    for request in [SET_VRING_CALL, SET_VRING_ERR] {
        let rig = Rig::new(&format!("control{request}"));
        let mut others = rig.others();
        let mut guest = rig.guest(0, SPLIT);
        exchange(&mut guest, &mut others.0);
        let eventfd = full();
        guest.peer.ok(request, &longs(&[1]), &[eventfd.as_raw_fd()]);
        set_blocking(&eventfd);
        // The socket's thread notifies: when a ring starts, when a message is refused.
        if request == SET_VRING_CALL {
            let kick = guest.vrings[1].kick.as_raw_fd();
            guest.peer.send(&message(SET_VRING_KICK, VERSION, 8, &longs(&[1])), &[kick]);
        } else {
            guest.peer.send(&message(SET_VRING_NUM, VERSION, 8, &words(&[1, 0])), &[]);
        }
        others.work();
        assert!(guest.peer.ends());
        ends_soon(rig);
    }
}

/// A socket whose last close also closes a lingering one, which nobody has read.
fn slow_to_close() -> (UnixStream, TcpListener) {
    let ((socket, listener), (from, unread)) = (lingering(), UnixStream::pair().unwrap());
    from.send_with_fd(&b"x"[..], socket.as_raw_fd()).unwrap();
    (unread, listener)
}

#[test]
fn a_connection_that_is_slow_to_close() {
    let rig = Rig::new("unread");
    // A frontend that does not read its replies blocks the thread of its socket, and its last message is not read.
    let mut peer = Peer::connect(&rig.socket(0));
    let messages = message(GET_FEATURES, VERSION, 0, &[]);
    (0..400).for_each(|_| peer.send(&messages, &[]));
    let (socket, _listener) = lingering();
    peer.send(&messages, &[socket.as_raw_fd()]);
    thread::sleep(Duration::from_millis(50));
    drop(socket);
    let start = Instant::now();
    drop(peer);
    exchange(&mut rig.guest(0, SPLIT), &mut rig.others().0);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    ends_soon(rig);
}

#[test]
fn a_call_descriptor_that_is_slow_to_close() {
    let rig = Rig::new("slowclose");
    let mut guest = rig.guest(0, SPLIT);
    let (call, _listener) = slow_to_close();
    for request in [SET_VRING_CALL, SET_VRING_ERR] {
        guest.peer.ok(request, &longs(&[1]), &[call.as_raw_fd()]);
    }
    drop(call);
    // Whoever has it last closes it: the socket's thread, or the worker if it notifies the driver just then.
    let start = Instant::now();
    for request in [SET_VRING_CALL, SET_VRING_ERR] {
        guest.peer.ok(request, &longs(&[1]), &[eventfd().as_raw_fd()]);
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    exchange(&mut guest, &mut rig.others().0);
}

#[test]
fn a_daemon_stops_though_all_frontends_block_it() {
    let rig = Rig::new("allwait");
    let mut guests: Vec<_> = (0..3).map(|port| rig.guest(port, SPLIT)).collect();
    let eventfd = full();
    for guest in &mut guests {
        for (index, request) in [(0, SET_VRING_CALL), (0, SET_VRING_ERR), (1, SET_VRING_CALL), (1, SET_VRING_ERR)] {
            guest.peer.ok(request, &longs(&[index]), &[eventfd.as_raw_fd()]);
        }
    }
    set_blocking(&eventfd);
    let nobody = crate::NOBODY;
    for guest in &mut guests {
        guest.send_to(nobody);
    }
    ends_soon(rig);
}

#[test]
fn kick_descriptors_that_are_not_eventfds() {
    let rig = Rig::new("kinds");
    let mut others = rig.others();
    let mut guest = rig.guest(0, PACKED);
    let (pipe, _end) = std::io::pipe().unwrap();
    let (stream, _end) = UnixStream::pair().unwrap();
    let (datagram, _end) = UnixDatagram::pair().unwrap();
    let (epoll, timer) = (Epoll::new().unwrap(), TimerFd::new().unwrap());
    let kinds: [(&str, File, bool); 9] = [
        ("pipe:[", OwnedFd::from(pipe).into(), false),
        ("socket:[", OwnedFd::from(stream).into(), true),
        ("socket:[", OwnedFd::from(datagram).into(), false),
        ("socket:[", OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap()).into(), false),
        ("anon_inode:[eventpoll]", file_of(&epoll), false),
        ("anon_inode:[timerfd]", file_of(&timer), false),
        ("/dev/ptmx", OpenOptions::new().read(true).write(true).open("/dev/ptmx").unwrap(), false),
        ("/dev/zero", File::open("/dev/zero").unwrap(), false),
        ("/memfd:ringroad", memory(4096), false),
    ];
    for (name, file, is_call) in &kinds {
        let fd = [file.as_raw_fd()];
        guest.peer.refused(SET_VRING_KICK, &longs(&[1]), &fd);
        assert!(guest.vrings[1].failed(), "{name}");
        logged(&rig.victim(), &["ERROR", &format!("queue 1: the kick descriptor is {name}"), "expected an eventfd"]);
        for (request, what) in [(SET_VRING_CALL, "call"), (SET_VRING_ERR, "err")] {
            assert_eq!(guest.peer.obeys(request, &longs(&[0]), &fd), *is_call, "{name}");
            if !is_call {
                let line = format!("queue 0: the {what} descriptor is {name}");
                logged(&rig.victim(), &["ERROR", &line, "expected an eventfd or a Unix stream socket"]);
            }
        }
    }
    // Another attempt succeeds.
    for (index, vring) in guest.vrings.iter().enumerate() {
        let index = longs(&[index as u64]);
        guest.peer.ok(SET_VRING_CALL, &index, &[vring.call.as_raw_fd()]);
        guest.peer.ok(SET_VRING_KICK, &index, &[vring.kick.as_raw_fd()]);
    }
    exchange(&mut guest, &mut others.0);
}
