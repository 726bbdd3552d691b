//! Establishing connections in both directions: CONNECT lines, host sockets that exist or not, TCP, a device that restarts.

use super::*;
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::{
    io::ErrorKind,
    net::{Shutdown, TcpListener},
};

#[test]
fn an_invalid_line_ends_only_its_own_program() {
    let rig = Rig::new();
    let (other, guest) = rig.to_guest(1);
    for line in [
        &b"\n"[..],
        b"\r\n",
        b"CONNECT\n",
        b"CONNECT \n",
        b"CONNECT x\n",
        b"CONNECT -1\n",
        b"CONNECT 1 \n",
        b"CONNECT 4294967296\n",
        b"CONNECT\t1\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"CONNECT 00000000000001\n",
        b"\0\0\0\0\n",
        b"\xff\xfe\n",
        &[b'C'; 20],
        &[b'C'; 100_000],
    ] {
        let mut program = rig.program();
        let _ = program.write_all(line);
        turned_away(&mut program);
    }
    assert_eq!(rig.host().report().connections, 1);
    exchange(&other, &guest);
    drop((other, guest));
    rig.expect_no_connections();
}

#[test]
fn a_line_may_arrive_in_pieces_and_with_data_after_it() {
    let rig = Rig::new();
    let listener = rig.listen(77);
    for (pieces, rest) in [
        (&[&b"CONNECT 77\nhello"[..]][..], &b"hello"[..]),
        (&[b"C", b"ONNECT ", b"7", b"7", b"\n"], b""),
        (&[b"connect 77\r", b"\n", b"rest"], b"rest"),
        (&[b"CONNECT 0000000077\nA long line with zeros before the port"], b"A long line with zeros before the port"),
    ] {
        let mut program = rig.program();
        for piece in pieces {
            program.write_all(piece).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        let guest = accept(&listener);
        let mut got = vec![0; rest.len()];
        (&guest).read_exact(&mut got).unwrap();
        assert_eq!(got, rest);
        let mut ok = [0; 3];
        program.read_exact(&mut ok).unwrap();
        assert_eq!(&ok, b"OK ");
    }
    rig.expect_no_connections();
}

#[test]
fn an_incomplete_line_times_out_after_two_seconds() {
    let rig = Rig::new();
    let start = Instant::now();
    let mut programs: Vec<_> =
        [&b""[..], b"CONNECT 4", b"CONNECT 1\r"].into_iter().map(|line| (rig.program(), line)).collect();
    for (program, line) in &mut programs {
        program.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        program.write_all(line).unwrap();
    }
    rig.expect_service();
    for (program, line) in &mut programs {
        turned_away_at_last(program);
        let after = start.elapsed();
        assert!(after > Duration::from_millis(1900) && after < Duration::from_secs(5), "{line:?}: after {after:?}");
    }
    rig.expect_service();
    rig.expect_no_connections();
}

#[test]
fn sending_a_line_slowly_does_not_extend_the_timeout() {
    let rig = Rig::new();
    let (mut program, start) = (rig.program(), Instant::now());
    for byte in b"CONNECT 000000000".iter().cycle() {
        if program.write_all(&[*byte]).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(700));
        assert!(start.elapsed() < Duration::from_secs(5), "the timeout was extended");
    }
}

#[test]
fn guest_ports_without_a_listener() {
    let rig = Rig::new();
    for port in [0, 1, 1024, u32::MAX - 1, u32::MAX] {
        assert!(at_once(|| rig.ask(port)).is_none(), "port {port}");
    }
    drop(rig.listen(5));
    assert!(rig.ask(5).is_none(), "the listener was closed");
    rig.expect_service();
    rig.expect_no_connections();
}

#[test]
fn host_sockets_that_are_missing_closed_or_full() {
    let rig = Rig::new();
    let refused = |port: u32| {
        let error = at_once(|| rig.dial(port)).err().unwrap_or_else(|| panic!("port {port}: connected"));
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "port {port}: {error}");
    };
    // No socket; one without a listener; a regular file.
    refused(1);
    drop(rig.listen_on_host(2));
    assert!(rig.path(2).exists());
    refused(2);
    fs::write(rig.path(3), "a file").unwrap();
    refused(3);
    // One with a full backlog.
    let full = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    full.bind(&SockAddr::unix(rig.path(4)).unwrap()).unwrap();
    full.listen(0).unwrap();
    let waiting = rig.dial(4).unwrap();
    refused(4);
    refused(4);
    let (first, _) = full.accept().unwrap();
    exchange(&first, &waiting);
    let again = rig.dial(4).unwrap();
    exchange(full.accept().unwrap().0, &again);
    drop((first, waiting, again));
    rig.expect_no_connections();
}

#[test]
fn tcp_connected_refused_and_reset() {
    let _shared = share_descriptors();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = listener.local_addr().unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rig = Rig::alone(vec![(1, there), (2, gone)]);

    let guest = rig.dial(1).unwrap();
    let (program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    exchange(&program, &guest);
    guest.shutdown(Shutdown::Write);
    // The guard of slow writes interrupts a thread of this process now and then: that is no end of the stream.
    assert_eq!((&program).read_to_end(&mut Vec::new()).unwrap(), 0);
    (&program).write_all(b"last").unwrap();
    drop(program);
    let mut last = String::new();
    (&guest).read_to_string(&mut last).unwrap();
    assert_eq!(last, "last");

    let error = at_once(|| rig.dial(2)).expect_err("nobody listens there");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);

    // A reset is passed on as a reset, in either direction.
    let guest = rig.dial(1).unwrap();
    let (program, _) = listener.accept().unwrap();
    exchange(&program, &guest);
    SockRef::from(&program).set_linger(Some(Duration::ZERO)).unwrap();
    drop(program);
    let error = at_once(|| (&guest).read(&mut [0; 8])).expect_err("reset, not the end");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    drop(guest);
    rig.expect_no_connections();

    let guest = rig.dial(1).unwrap();
    let (program, _) = listener.accept().unwrap();
    exchange(&program, &guest);
    let Rig { client, server, .. } = rig;
    drop(client);
    let error = at_once(|| (&program).read(&mut [0; 8])).expect_err("reset, not the end");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    drop((guest, server));
}

#[test]
fn a_device_that_restarts() {
    let rig = Rig::new();
    let (mut program, guest) = rig.to_guest(1);
    let (full, stuck) = rig.to_guest(2);
    let reader = thread::spawn(move || (&guest).read(&mut [0; 8]).map_err(|error| error.kind()));
    let writer = thread::spawn(move || send(&stuck, 1 << 30).map_err(|error| error.kind()));
    thread::sleep(Duration::from_millis(200));
    assert!(!reader.is_finished() && !writer.is_finished(), "both wait");
    let Rig { client, server, worker, folder, config, _shared } = rig;
    at_once(|| drop(server));
    assert_eq!(at_once(|| reader.join().unwrap()), Err(ErrorKind::ConnectionReset));
    assert_eq!(at_once(|| writer.join().unwrap()), Err(ErrorKind::ConnectionReset));
    assert_eq!(program.read(&mut [0; 8]).unwrap(), 0);
    receive(&full).unwrap();
    soon("the guest knows", || !client.stack().is_running());
    let error = Stream::connect(client.stack(), Addr { cid: 2, port: 1 }).expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::NotConnected);
    assert!(!config.host.as_ref().unwrap().exists() && !config.socket.exists(), "its sockets must be removed");
    drop(client);

    let server = VsockServer::start(config.clone(), &worker).unwrap();
    // No guest has connected yet.
    let mut early = UnixStream::connect(config.host.as_ref().unwrap()).unwrap();
    early.set_read_timeout(Some(PATIENCE)).unwrap();
    early.write_all(b"CONNECT 1\n").unwrap();
    assert_eq!(early.read(&mut [0; 8]).unwrap(), 0, "there is no guest");
    let rig = Rig { client: driver(&config.socket), server, worker, folder, config, _shared };
    soon("the device runs", || rig.host().is_running());
    rig.expect_service();
    rig.expect_no_connections();
}

#[test]
fn a_guest_that_reconnects() {
    let rig = Rig::new();
    let (mut program, _guest) = rig.to_guest(1);
    let (_other, mut waiting) = rig.to_host(2);
    let Rig { client, server, worker, folder, config, _shared } = rig;
    at_once(|| drop(client));
    for program in [&mut program, &mut waiting] {
        assert_eq!(at_once(|| program.read(&mut [0; 8])).unwrap(), 0);
    }
    soon("no connections at the host", || server.stack().report().connections == 0);
    let rig = Rig { client: driver(&config.socket), server, worker, folder, config, _shared };
    soon("the device runs", || rig.host().is_running());
    rig.expect_service();
}

#[test]
fn a_device_may_outlive_its_worker() {
    let rig = Rig::new();
    let _connected = rig.to_guest(1);
    let Rig { client, server, worker, folder: _folder, .. } = rig;
    at_once(|| drop(worker));
    at_once(|| drop(server));
    drop(client);
}
