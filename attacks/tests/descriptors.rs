//! Descriptors that a frontend sends and that are not what they should be.

use ringroad_attacks::{
    Random,
    daemon::Daemon,
    frontend::{Frontend, event, request::*, signal},
    fuse::{self, Fuse},
    net::{BROADCAST, MAC, NetPort, RX, TX, frame},
    ring::{Part, USER},
    scene::Scene,
    vsock::{self, VsockGuest, op},
};
use rustix::{
    event::epoll,
    fs::{OFlags, fcntl_setfl},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Pid, PidfdFlags, pidfd_open},
    time::{TimerfdClockId, TimerfdFlags, timerfd_create},
};
use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Descriptors that block whoever writes to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Full {
    Eventfd,
    Pipe,
    Stream,
    Datagram,
}

impl Full {
    /// One that is not full yet, and its other end.
    fn make(self) -> (OwnedFd, Option<OwnedFd>) {
        let pair = |kind| {
            let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("two sockets");
            (pair.0, Some(pair.1))
        };
        match self {
            Full::Eventfd => (event(), None),
            Full::Pipe => {
                let (read, write) = rustix::pipe::pipe().expect("a pipe");
                (write, Some(read))
            }
            Full::Stream => pair(SocketType::STREAM),
            Full::Datagram => pair(SocketType::DGRAM),
        }
    }

    /// Fills it, and has it block.
    fn fill(self, fd: &OwnedFd) {
        let _ = fcntl_setfl(fd, OFlags::NONBLOCK);
        match self {
            // A counter that has no room for one more.
            Full::Eventfd => {
                let _ = rustix::io::read(fd, &mut [0; 8]);
                let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
            }
            _ => {
                let block = vec![0; if self == Full::Datagram { 8 } else { 4096 }];
                while rustix::io::write(fd, &block).is_ok() {}
                while rustix::io::write(fd, &[0; 8]).is_ok() {}
            }
        }
        let _ = fcntl_setfl(fd, OFlags::empty());
    }
}

/// Has a port notify by a descriptor that blocks, again and again: frames there and back, new descriptors while queues run.
fn notify(path: &Path, kind: Full, packed: bool, until: Instant) {
    let (fd, _other) = kind.make();
    while Instant::now() < until {
        let Ok(mut port) = NetPort::connect(path, packed) else { return };
        for queue in [RX, TX] {
            let _ = port.device.frontend.fd(SET_VRING_ERR, queue, fd.as_fd());
            let _ = port.device.frontend.fd(SET_VRING_CALL, queue, fd.as_fd());
        }
        kind.fill(&fd);
        let mut random = Random::new(1);
        let end = Instant::now() + Duration::from_millis(400);
        while Instant::now() < end.min(until) {
            port.reclaim();
            let frame = frame(BROADCAST, port.mac, b"notify");
            while port.put(&frame) {}
            port.flush();
            port.receive(0, |_, _| {});
            // O_NONBLOCK belongs to the file that both have open: it goes whenever the frontend likes.
            let _ = fcntl_setfl(&fd, OFlags::empty());
            thread::sleep(Duration::from_micros(random.below(2000)));
        }
        // A broken ring is told by the err descriptor.
        port.device.rings[TX].packed = false;
        port.device.rings[TX].put_index(0x7000);
        signal(&port.device.kicks[TX]);
        // And what is set anew is written to at once, by the thread that answers messages.
        let _ = port.device.frontend.fd(SET_VRING_CALL, RX, fd.as_fd());
        let _ = port.device.frontend.fd(SET_VRING_CALL, TX, fd.as_fd());
    }
}

/// The same with a vsock device.
fn notify_vsock(daemon: &Daemon, kind: Full, until: Instant) {
    let (fd, _other) = kind.make();
    let Ok(mut guest) = VsockGuest::connect(&daemon.socket("va"), false, 64, 128) else { return };
    guest.give(64);
    for queue in [vsock::RX, vsock::TX, 2] {
        let _ = guest.device.frontend.fd(SET_VRING_ERR, queue, fd.as_fd());
        let _ = guest.device.frontend.fd(SET_VRING_CALL, queue, fd.as_fd());
    }
    kind.fill(&fd);
    while Instant::now() < until {
        // Reset by the device, as nobody listens there.
        let request = guest.header(1, (vsock::HOST, 99), op::REQUEST);
        guest.send(request, &[]);
        let count = guest.received(|_, _| {});
        guest.give(count);
        thread::sleep(Duration::from_millis(5));
    }
}

fn full(kind: Full, packed: bool) {
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.port("a2");
        config.vsock("va", 1001, "");
    });
    scene.attack(2.5, |daemon, until| {
        thread::scope(|scope| {
            scope.spawn(|| notify_vsock(daemon, kind, until));
            scope.spawn(|| notify(&daemon.socket("a1"), kind, packed, until));
            notify(&daemon.socket("a2"), kind, !packed, until);
        });
    });
    scene.finish();
}

/// Before: the worker blocked in write(2). 0 frames/s, new frontends got no answer, SIGTERM did not end the daemon.
#[test]
fn a_call_eventfd_that_is_full_and_blocks() {
    full(Full::Eventfd, false);
}

/// Before: as above.
#[test]
fn a_call_that_is_a_full_pipe() {
    full(Full::Pipe, false);
}

/// Before: as above. User-Mode Linux sends sockets, so that these may be taken.
#[test]
fn a_call_that_is_a_full_socket() {
    full(Full::Stream, true);
    full(Full::Datagram, false);
}

/// Has so many epoll instances watch a descriptor that a write to it runs 30 000 functions with a lock held: 4 ms of CPU.
fn crowd(fd: &OwnedFd) -> (Vec<OwnedFd>, Vec<OwnedFd>) {
    let copies: Vec<OwnedFd> = (0..60).map(|_| fd.try_clone().expect("a copy")).collect();
    let crowd: Vec<OwnedFd> =
        (0..500).map(|_| epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll instance")).collect();
    for (epoll, copy) in crowd.iter().flat_map(|epoll| copies.iter().map(move |copy| (epoll, copy))) {
        epoll::add(epoll, copy, epoll::EventData::new_u64(0), epoll::EventFlags::IN).expect("a watch");
    }
    (copies, crowd)
}

/// Before: each notification cost the worker 4 ms and more, and the victim waited for it: p50 33 µs -> 479 µs, p99 0.2 ms -> 11 ms.
/// Since then its port's own thread does it: 37 µs and 0.8 ms, as when another daemon is attacked beside it.
#[test]
fn a_call_that_thousands_watch() {
    let fd = event();
    let _crowd = crowd(&fd);
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.vsock("va", 1001, "");
    });
    scene.attack(8.0, |daemon, until| {
        while Instant::now() < until {
            let Ok(mut port) = NetPort::connect(&daemon.socket("a1"), false) else { return };
            for queue in [RX, TX] {
                let _ = port.device.frontend.fd(SET_VRING_CALL, queue, fd.as_fd());
            }
            let end = Instant::now() + Duration::from_millis(400);
            while Instant::now() < end.min(until) {
                port.reclaim();
                let frame = frame(BROADCAST, port.mac, b"crowd");
                port.put(&frame);
                port.flush();
                port.receive(0, |_, _| {});
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    scene.finish();
}

/// Before: control blocked where it signals err, and with it SIGTERM.
#[test]
fn an_err_that_is_full_and_blocks() {
    for kind in [Full::Eventfd, Full::Pipe, Full::Stream] {
        let mut scene = Scene::new(|config| config.port("a1"));
        scene.attack(1.5, |daemon, until| {
            let (fd, _other) = kind.make();
            while Instant::now() < until {
                let Ok(mut port) = NetPort::connect(&daemon.socket("a1"), false) else { return };
                for queue in [RX, TX] {
                    let _ = port.device.frontend.fd(SET_VRING_ERR, queue, fd.as_fd());
                }
                kind.fill(&fd);
                // Found by the worker …
                port.put(&frame(BROADCAST, port.mac, b"err"));
                port.flush();
                port.device.rings[TX].put_index(0x7000);
                signal(&port.device.kicks[TX]);
                thread::sleep(Duration::from_millis(20));
                // … and by control.
                let _ = port.device.frontend.vring(SET_VRING_NUM, RX, 0);
                let _ = port.device.frontend.send(99, 0, &[0; 8], &[]);
                thread::sleep(Duration::from_millis(20));
            }
        });
        scene.finish();
    }
}

/// Whether a queue can be started with a descriptor as its kick.
fn takes(port: &NetPort, queue: usize, kick: BorrowedFd<'_>) -> bool {
    let frontend = &port.device.frontend;
    port.device.prepare(queue).is_ok()
        && frontend.fd(SET_VRING_KICK, queue, kick).is_ok()
        && frontend.vring(SET_VRING_ENABLE, queue, 1).is_ok()
}

/// Before: all of these but the regular file were taken, for network ports and vsock devices.
#[test]
fn a_kick_that_is_no_eventfd_is_refused() {
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.vsock("va", 1001, "");
    });
    let regular = scene.daemon.dir().join("regular");
    let open = |path: &Path| OwnedFd::from(File::options().read(true).write(true).open(path).expect("a file"));
    File::create(&regular).expect("a file");
    let stream = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    let own = Pid::from_raw(std::process::id() as i32).expect("a process");
    let kinds: Vec<(&str, OwnedFd)> = vec![
        ("the reading end of a pipe", read),
        ("the writing end of a pipe", write),
        ("a socket", stream.0),
        ("a timerfd", timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).expect("a timerfd")),
        ("an epoll descriptor", epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll descriptor")),
        ("a terminal", open(Path::new("/dev/ptmx"))),
        ("a pidfd", pidfd_open(own, PidfdFlags::empty()).expect("a pidfd")),
        ("a regular file", open(&regular)),
        ("/dev/null", open(Path::new("/dev/null"))),
    ];
    for (name, fd) in &kinds {
        let port = NetPort::prepare(&scene.daemon.socket("a1"), MAC, 4 << 20).expect("a port");
        scene.check(!takes(&port, TX, fd.as_fd()), format!("{name} was taken as the kick of a network port"));
        drop(port);
        // The frontend may put it right.
        let port = NetPort::prepare(&scene.daemon.socket("a1"), MAC, 4 << 20);
        let eventfd = event();
        let right = port.as_ref().is_ok_and(|port| takes(port, TX, eventfd.as_fd()));
        scene.check(right, format!("after {name} an eventfd was not taken"));
        let guest = VsockGuest::connect(&scene.daemon.socket("va"), false, 64, 128).expect("a guest");
        let frontend = &guest.device.frontend;
        let taken = frontend.send(GET_VRING_BASE, 0, [1u32, 0].map(u32::to_ne_bytes).as_flattened(), &[]).is_ok()
            && frontend.receive().is_ok()
            && frontend.fd(SET_VRING_KICK, vsock::TX, fd.as_fd()).is_ok();
        scene.check(!taken, format!("{name} was taken as the kick of a vsock device"));
    }
    drop(stream.1);
    scene.finish();
}

/// Before: epoll_wait of the worker waited for the file system's answer; no port moved a frame, SIGTERM did not end the daemon.
#[test]
fn a_kick_from_a_file_system_that_does_not_answer() {
    kick_from_fuse(false);
}

/// Before: the same with the thread of all vsock devices. Echoes stopped.
#[test]
fn a_vsock_kick_from_a_file_system_that_does_not_answer() {
    kick_from_fuse(true);
}

fn kick_from_fuse(vsock: bool) {
    let mut scene = Scene::new(|config| {
        config.port("a1");
        config.vsock("va", 1001, "");
    });
    let fuse =
        Fuse::mount(&scene.daemon.dir().join("fuse")).expect("this test mounts FUSE: it needs root and /dev/fuse");
    let file = fuse.open().expect("a file");
    let kept = scene.attack(2.0, |daemon, _| {
        let kick = |frontend: &Frontend| {
            let _ = frontend.vring(SET_VRING_ENABLE, TX, 1);
            // The answer may never come.
            let _ = frontend.send(SET_VRING_KICK, 0, &(TX as u64).to_ne_bytes(), &[file.as_fd()]);
            thread::sleep(Duration::from_millis(50));
        };
        // They stay connected.
        if vsock {
            let guest = VsockGuest::connect(&daemon.socket("va"), false, 64, 128).ok()?;
            kick(&guest.device.frontend);
            Some((None, Some(guest)))
        } else {
            let port = NetPort::prepare(&daemon.socket("a1"), MAC, 4 << 20).ok()?;
            port.device.prepare(TX).ok()?;
            kick(&port.device.frontend);
            Some((Some(port), None))
        }
    });
    finish_with(scene, fuse);
    drop(kept);
}

/// Before: the thread of the port waited in fstat(2), and SIGTERM for that thread.
#[test]
fn memory_from_a_file_system_that_does_not_answer() {
    memory_from_fuse(true);
}

/// Before: the worker waited in a page fault; no port moved a frame, SIGTERM did not end the daemon.
#[test]
fn a_page_fault_in_a_file_system_that_does_not_answer() {
    memory_from_fuse(false);
}

fn memory_from_fuse(deaf_at_once: bool) {
    let mut scene = Scene::new(|config| config.port("a1"));
    let dir = scene.daemon.dir().join("fuse");
    let fuse = Fuse::mount(&dir).expect("this test mounts FUSE: it needs root and /dev/fuse");
    let file = fuse.open().expect("a file");
    let kept = scene.attack(2.0, |daemon, _| {
        let mut port = NetPort::connect(&daemon.socket("a1"), false).ok()?;
        let _ = port.device.frontend.fd(SET_VRING_ERR, RX, file.as_fd());
        if deaf_at_once {
            fuse.go_deaf();
        }
        // Beside the memory in which the rings lie.
        let guest = 1u64 << 32;
        let _ = port.device.frontend.add_region(file.as_fd(), guest, fuse::SIZE, USER + guest, 0);
        fuse.go_deaf();
        // A frame whose payload is there.
        let header = NetPort::FREE;
        let frame = frame(BROADCAST, port.mac, b"slow");
        port.device.mem.write(header, &[&[0; 12][..], &frame].concat());
        let parts = [
            Part { at: header, len: 12 + frame.len() as u32, flags: 0 },
            Part { at: guest + 4096, len: 1000, flags: 0 },
        ];
        port.device.rings[TX].add(&parts);
        port.device.go(TX);
        Some(port)
    });
    finish_with(scene, fuse);
    drop(kept);
}

/// What waits for the file system must not be waited for by anybody else; only then is it let go.
fn finish_with(mut scene: Scene, fuse: Fuse) {
    let took = {
        if let Err(why) = ringroad_attacks::victim::exchange(&scene.daemon, "f1", "f2x", 100, Duration::from_secs(2)) {
            scene.check(false, why);
        }
        scene.daemon.terminate(Duration::from_secs(4))
    };
    scene.check(took.is_some_and(|took| took.as_secs() < 1), format!("SIGTERM ended the daemon in {took:?}"));
    drop(fuse);
    scene.daemon.signal(rustix::process::Signal::KILL);
    scene.daemon.wait(Duration::from_secs(5));
    scene.finish();
}
