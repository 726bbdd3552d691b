//! Connections that end, stall, arrive twice or not at all.

use crate::{
    LAYOUTS, NOBODY,
    common::{request::*, *},
};
use ringroad_host::vhost_user::{Access, Role, SocketError, VhostConfig};
use socket2::{Domain, SockAddr, Socket, Type};
use std::{
    fs,
    io::Write,
    os::{
        fd::OwnedFd,
        unix::{
            self,
            fs::MetadataExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

#[test]
fn disconnect_in_the_middle_of_a_message() {
    let rig = Rig::new("middle");
    let mut others = rig.others();
    let whole = message(SET_VRING_NUM, VERSION, 8, &words(&[1, 64]));
    for len in 1..whole.len() {
        let mut guest = rig.guest(0, SPLIT);
        let memory = identity(&guest.driver.file);
        guest.peer.send(&whole[..len], &[]);
        drop(guest);
        assert!(within(PATIENCE, || held(memory) == (0, 0)), "after {len} bytes: {:?}", held(memory));
    }
    logged(&rig.victim(), &["frontend disconnected", "in the middle of a message"]);
    others.work();
    exchange(&mut rig.guest(0, SPLIT), &mut others.0);
}

#[test]
fn reconnects_with_traffic() {
    let rig = Rig::new("reconnects");
    let mut others = rig.others();
    let mut memories = Vec::new();
    for round in 0..50 {
        let mut guest = rig.guest(0, LAYOUTS[round % 2]);
        let memory = identity(&guest.driver.file);
        memories.push(memory);
        exchange(&mut guest, &mut others.0);
        assert!(held(memory).0 > 1, "the driver's mapping, and the device's");
        // It disconnects with its ring full of frames, and with frames in flight to it.
        (0..16).for_each(|_| assert!(guest.add(others.1.mac).is_some()));
        let _ = guest.vrings[1].kick.write(1);
        for _ in 0..8 {
            others.0.send_to(guest.mac);
        }
        let from = guest.mac;
        drop(guest);
        let _ = others.1.received(from);
        if round % 10 == 0 {
            others.work();
        }
    }
    others.work();
    for memory in memories {
        assert!(within(PATIENCE, || held(memory) == (0, 0)), "mappings, descriptors: {:?}", held(memory));
    }
    assert_eq!(rig.faults(), 0, "{:#?}", log_of(&rig.victim()));
}

#[test]
fn a_frontend_that_reconnects_at_once() {
    let rig = Rig::new("atonce");
    for round in 0..500 {
        let mut peer = Peer::connect(&rig.socket(0));
        assert_ne!(peer.ask_u64(GET_FEATURES), 0, "round {round}");
    }
    assert!(!log_of(&rig.victim()).iter().any(|line| line.contains("turned away")));
}

#[test]
fn a_frontend_that_sends_half_a_message() {
    let whole = message(SET_VRING_NUM, VERSION, 8, &words(&[1, 64]));
    for len in [5, 12] {
        let rig = Rig::new(&format!("rest{len}"));
        let mut others = rig.others();
        let mut guest = rig.guest(0, PACKED);
        guest.peer.send(&whole[..len], &[]);
        others.work();
        // Its queues still work.
        exchange(&mut guest, &mut others.0);
        ends_soon(rig);
        assert!(guest.peer.ends());
    }
}

#[test]
fn a_frontend_that_does_not_read() {
    let rig = Rig::new("deaf");
    let mut others = rig.others();
    let mut guest = rig.guest(0, PACKED);
    let socket = guest.peer.0.try_clone().unwrap();
    socket.set_nonblocking(true).unwrap();
    let questions = message(GET_FEATURES, VERSION, 0, &[]).repeat(64);
    let mut last = Instant::now();
    // Both directions are full once no byte has been accepted for a while.
    assert!(within(PATIENCE, || {
        while (&socket).write(&questions).is_ok() {
            last = Instant::now();
        }
        last.elapsed() > Duration::from_millis(100)
    }));
    others.work();
    exchange(&mut guest, &mut others.0);
    ends_soon(rig);
}

#[test]
fn a_second_frontend() {
    let rig = Rig::new("second");
    let mut others = rig.others();
    let mut first = rig.guest(0, SPLIT);
    for _ in 0..3 {
        let mut second = Peer::connect(&rig.socket(0));
        second.send(&message(GET_FEATURES, VERSION, 0, &[]), &[]);
        assert!(second.ends());
        exchange(&mut first, &mut others.0);
    }
    let turned_away = |line: &String| line.contains("WARN") && line.contains("a second frontend was turned away");
    assert_eq!(log_of(&rig.victim()).into_iter().filter(turned_away).count(), 3);
    drop(first);
    exchange(&mut rig.guest(0, SPLIT), &mut others.0);
}

#[test]
fn socket_paths() {
    let rig = Rig::new("paths");
    let start = |name: &str, path: &Path| start_server(config(&format!("paths-{name}"), path), &rig.worker).map(drop);
    let error = start("used", &rig.socket(0)).unwrap_err();
    assert!(matches!(error, SocketError::InUse { .. }), "{error:?}");
    assert!(error.to_string().contains("port paths-used: socket"), "{error}");
    assert!(error.to_string().contains("0.sock is in use by a running program"), "{error}");
    exchange(&mut rig.guest(0, SPLIT), &mut rig.guest(1, SPLIT));

    let stale = rig.folder.file("stale.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let server = start_server(config("paths-stale", &stale), &rig.worker).unwrap();
    logged("paths-stale", &["INFO", "removing the stale socket", "stale.sock"]);
    Peer::connect(&stale).negotiate(SPLIT);
    drop(server);
    assert!(!stale.exists(), "the socket is removed with its server");

    let file = rig.folder.file("file");
    fs::write(&file, "kept").unwrap();
    for path in [&file, &rig.folder.0] {
        let error = start("taken", path).unwrap_err();
        assert!(matches!(error, SocketError::NotASocket { .. }), "{error:?}");
        assert!(error.to_string().contains("exists and is not a socket"), "{error}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    let dangling = rig.folder.file("link");
    unix::fs::symlink("nowhere", &dangling).unwrap();
    assert!(matches!(start("link", &dangling), Err(SocketError::NotASocket { .. })));

    // Nobody can create files on procfs, not even root.
    let long = rig.folder.file(&"x".repeat(120));
    for path in [&rig.folder.file("missing/a.sock"), &file.join("a.sock"), &"/proc/a.sock".into(), &long] {
        let error = start("bind", path).unwrap_err();
        assert!(matches!(error, SocketError::Bind { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("port paths-bind: cannot create socket {}", path.display())));
    }
}

#[test]
fn a_socket_has_its_configured_owner_and_mode_and_is_removed() {
    let (worker, folder) = (worker(), Folder::new("access"));
    let start = |name: &str, access| {
        let path = folder.file(name);
        let server = start_server(VhostConfig { access, ..config(&format!("access-{name}"), &path) }, &worker).unwrap();
        (server, fs::symlink_metadata(path).unwrap())
    };
    let (_server, data) = start("plain", Access::default());
    assert_eq!(data.mode() & 0o7777, 0o600, "whatever the umask");
    let own = (data.uid(), data.gid());
    let access = Access { mode: 0o666, owner: Some(own.0), group: Some(own.1) };
    let (server, data) = start("given", access);
    assert_eq!((data.mode() & 0o7777, data.uid(), data.gid()), (0o666, own.0, own.1));
    if own.0 == 0 {
        let (_server, data) = start("other", Access { mode: 0o640, owner: Some(12345), group: Some(54321) });
        assert_eq!((data.mode() & 0o7777, data.uid(), data.gid()), (0o640, 12345, 54321));
    }
    let _peer = Peer::connect(&folder.file("given"));
    logged("access-given", &["INFO", &format!("frontend connected, process {}, user {}", std::process::id(), own.0)]);
    // A replaced file is not removed.
    fs::remove_file(folder.file("given")).unwrap();
    let _theirs = UnixListener::bind(folder.file("given")).unwrap();
    drop(server);
    assert!(folder.file("given").exists());
}

#[test]
fn a_frontend_whose_backlog_is_full() {
    let (worker, folder) = (worker(), Folder::new("backlog"));
    let path = folder.file("full.sock");
    let full = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    full.bind(&SockAddr::unix(&path).unwrap()).unwrap();
    full.listen(0).unwrap();
    let _waits = UnixStream::connect(&path).unwrap();
    let start = |role| start_server(VhostConfig { role, ..config("backlog", &path) }, &worker);
    let client = start(Role::Client).unwrap();
    thread::sleep(Duration::from_millis(50));
    ends_soon(client);
    // Checking whether a program listens there does not block either.
    let begin = Instant::now();
    assert!(matches!(start(Role::Server).map(drop), Err(SocketError::InUse { .. })));
    assert!(begin.elapsed() < Duration::from_secs(1));
    // Once there is room, it connects.
    let client = start(Role::Client).unwrap();
    thread::sleep(Duration::from_millis(50));
    let listener = UnixListener::from(OwnedFd::from(full));
    listener.set_nonblocking(true).unwrap();
    let mut came = 0;
    assert!(within(PATIENCE, || {
        came += u32::from(listener.accept().is_ok());
        came == 2
    }));
    ends_soon(client);
}

#[test]
fn role_client() {
    let (worker, folder) = (worker(), Folder::new("client"));
    let path = folder.file("qemu.sock");
    let start = |name: &str, path: &Path, role| {
        let config = VhostConfig { role, ..config(name, path) };
        start_server(config, &worker).unwrap()
    };
    let other_path = folder.file("other.sock");
    let _other = start("client-other", &other_path, Role::Server);
    let client = start("client", &path, Role::Client);
    let mut other = Guest::new(Peer::connect(&other_path), SPLIT, 64);
    other.mac = NOBODY;
    other.start_all();
    for round in 0..3 {
        // Attempts in the meantime fail.
        thread::sleep(Duration::from_millis(100));
        let listener = UnixListener::bind(&path).unwrap();
        let mut guest = Guest::new(Peer::accept(&listener), LAYOUTS[round % 2], 64);
        guest.start_all();
        exchange(&mut guest, &mut other);
        fs::remove_file(&path).unwrap();
    }
    // A listener that closes each connection does not keep the daemon busy.
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (start, mut came) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(1) {
        came += u32::from(listener.accept().is_ok());
        thread::sleep(Duration::from_millis(1));
    }
    assert!((1..=8).contains(&came), "{came} connections in a second");
    drop(client);
    assert!(path.exists(), "the listener's socket is not removed");
}
