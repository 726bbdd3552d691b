//! Programs that disconnect, half-close or do not read, at any point.

use super::*;
use std::{io::ErrorKind, net::Shutdown};

/// Checks the result of sending to an end that does not read any more.
#[track_caller]
fn assert_unread<T>(sent: io::Result<T>) {
    let kind = sent.err().map(|error| error.kind());
    assert!(matches!(kind, Some(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)), "nobody reads that: {kind:?}");
}

#[test]
fn data_arrives_intact_both_ways_whichever_side_connects() {
    let rig = Rig::new();
    let (first_program, first_guest) = rig.to_guest(1);
    let (second_guest, second_program) = rig.to_host(2);
    const TOTAL: usize = 48 << 20;
    for (program, guest) in [(&first_program, &first_guest), (&second_program, &second_guest)] {
        thread::scope(|scope| {
            // Both directions at once.
            scope.spawn(|| {
                send(program, TOTAL).unwrap();
                program.shutdown(Shutdown::Write).unwrap();
            });
            scope.spawn(|| {
                send(guest, TOTAL).unwrap();
                guest.shutdown(Shutdown::Write);
            });
            scope.spawn(|| assert_eq!(receive(program).unwrap(), TOTAL));
            assert_eq!(receive(guest).unwrap(), TOTAL);
        });
    }
    drop((first_program, first_guest, second_program, second_guest));
    rig.expect_no_connections();
}

#[test]
fn a_program_that_disconnects_before_the_ok() {
    let rig = Rig::new();
    let listener = rig.listen(1);
    for round in 0..200 {
        // No line, half a line, a line for a port with a listener, one for a port without.
        let lines = [&b""[..], b"CONN", b"CONNECT 1\n", b"CONNECT 2\n", b"CONNECT 1\nlast words"];
        let mut program = rig.program();
        let line = lines[round % lines.len()];
        program.write_all(line).unwrap();
        drop(program);
        if line.starts_with(b"CONNECT 1\n") {
            let guest = accept(&listener);
            let mut got = Vec::new();
            // "OK" was written to a socket that was closed already: a reset or the end of the stream.
            match (&guest).read_to_end(&mut got) {
                Ok(_) => assert_eq!(got, line[10..]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            }
        }
    }
    rig.expect_no_connections();
    rig.expect_service();
}

#[test]
fn a_program_that_disconnects_after_the_ok() {
    let rig = Rig::new();
    let (program, guest) = rig.to_guest(1);
    drop(program);
    assert_eq!(at_once(|| (&guest).read(&mut [0; 8])).unwrap(), 0);
    assert_unread(at_once(|| send(&guest, 1 << 30)));
    drop(guest);
    rig.expect_no_connections();
}

#[test]
fn a_program_that_disconnects_during_a_transfer() {
    let rig = Rig::new();
    // What it has sent arrives, though the guest begins to read only after the disconnect.
    for (port, total) in [(1, 1), (2, 100_000), (3, 3 << 20)] {
        let (program, guest) = rig.to_guest(port);
        let sender = thread::spawn(move || send(&program, total));
        thread::sleep(Duration::from_millis(20));
        assert_eq!(receive(&guest).unwrap(), total);
        sender.join().unwrap().unwrap();
    }
    // What it has not read is lost, and the guest gets an error.
    let (program, guest) = rig.to_guest(4);
    let sender = thread::spawn(move || send(&guest, 1 << 30));
    (&program).read_exact(&mut vec![0; 1 << 20]).unwrap();
    drop(program);
    assert_unread(at_once(|| sender.join().unwrap()));
    rig.expect_no_connections();
}

#[test]
fn a_guest_that_disconnects_during_a_transfer() {
    let rig = Rig::new();
    for (port, total) in [(1, 1), (2, 100_000), (3, 3 << 20)] {
        let (program, guest) = rig.to_guest(port);
        let sender = thread::spawn(move || send(&guest, total));
        thread::sleep(Duration::from_millis(20));
        assert_eq!(receive(&program).unwrap(), total);
        sender.join().unwrap().unwrap();
    }
    let (program, guest) = rig.to_guest(4);
    let sender = thread::spawn(move || send(&program, 1 << 30));
    (&guest).read_exact(&mut vec![0; 1 << 20]).unwrap();
    drop(guest);
    assert_unread(at_once(|| sender.join().unwrap()));
    rig.expect_no_connections();
}

#[test]
fn one_direction_may_end_before_the_other() {
    let rig = Rig::new();
    for port in 0..4 {
        let (program, guest) = if port < 2 {
            rig.to_guest(port)
        } else {
            let (guest, program) = rig.to_host(port);
            (program, guest)
        };
        if port % 2 == 0 {
            program.shutdown(Shutdown::Write).unwrap();
            assert_eq!(receive(&guest).unwrap(), 0);
            thread::scope(|scope| {
                scope.spawn(|| {
                    send(&guest, 1 << 20).unwrap();
                    guest.shutdown(Shutdown::Write);
                });
                assert_eq!(receive(&program).unwrap(), 1 << 20);
            });
        } else {
            guest.shutdown(Shutdown::Write);
            assert_eq!(receive(&program).unwrap(), 0);
            thread::scope(|scope| {
                scope.spawn(|| {
                    send(&program, 1 << 20).unwrap();
                    program.shutdown(Shutdown::Write).unwrap();
                });
                assert_eq!(receive(&guest).unwrap(), 1 << 20);
            });
        }
    }
    rig.expect_no_connections();
}

#[test]
fn shutting_down_reading_ends_the_peers_writes() {
    let rig = Rig::new();
    let (program, guest) = rig.to_guest(1);
    program.shutdown(Shutdown::Read).unwrap();
    assert_unread(at_once(|| send(&guest, 1 << 30)));
    drop((program, guest));

    let (program, guest) = rig.to_guest(2);
    guest.shutdown(Shutdown::Read);
    assert_unread(at_once(|| send(&program, 1 << 30)));
    drop((program, guest));
    rig.expect_no_connections();
}

/// Writes until it would block for `patience`. Returns the number of bytes.
fn fill(mut write: impl FnMut(&[u8]) -> io::Result<usize>) -> usize {
    let mut total = 0;
    loop {
        let chunk: Vec<u8> = (total..total + 10_000).map(known).collect();
        match write(&chunk) {
            Ok(count) => total += count,
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{error}");
                return total;
            }
        }
        assert!(total < 64 << 20, "nobody reads, but data is accepted without end");
    }
}

#[test]
fn an_end_that_does_not_read_delays_no_other() {
    let rig = Rig::new();
    let (slow_program, guest) = rig.to_guest(1);
    let (program, slow_guest) = rig.to_guest(2);
    let wait = Duration::from_millis(300);
    guest.set_timeout(Some(wait));
    program.set_write_timeout(Some(wait)).unwrap();
    let to_program = fill(|bytes| (&guest).write(bytes));
    let to_guest = fill(|bytes| (&program).write(bytes));
    // At least the size of a connection's buffer.
    assert!(to_program >= 256 << 10 && to_guest >= 256 << 10, "{to_program}, {to_guest}");
    for port in 10..30 {
        let (program, guest) = rig.to_guest(port);
        at_once(|| exchange(&program, &guest));
    }
    // All of it is still there.
    guest.set_timeout(Some(PATIENCE));
    guest.shutdown(Shutdown::Write);
    program.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive(&slow_program).unwrap(), to_program);
    assert_eq!(receive(&slow_guest).unwrap(), to_guest);
    drop((program, guest, slow_program, slow_guest));
    rig.expect_no_connections();
}

/// A request for work that arrives while the worker is at work must not be forgotten: nothing else sends that packet.
#[test]
fn queued_packets_are_never_left_in_the_outbox() {
    for poll in [Duration::ZERO, Duration::from_micros(50)] {
        let rig = Rig::new();
        let queued = Settings { direct: false, poll, ..Settings::default() };
        rig.host().set(queued);
        rig.guest().set(queued);
        let listener = rig.listen(1);
        let mut program = Stream::connect(rig.host(), Addr { cid: CID, port: 1 }).unwrap();
        program.set_timeout(Some(PATIENCE));
        let mut guest = accept(&listener);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut byte = [0];
                while guest.read(&mut byte).unwrap() == 1 {
                    guest.write_all(&byte).unwrap();
                }
            });
            for round in 0..20_000_u32 {
                let byte = [round as u8];
                program.write_all(&byte).unwrap();
                let mut answer = [0];
                program
                    .read_exact(&mut answer)
                    .unwrap_or_else(|error| panic!("round {round}, polling {poll:?}: {error}"));
                assert_eq!(answer, byte);
            }
            program.shutdown(Shutdown::Write);
        });
    }
}
