//! Many connections, in sequence and at once: none leaves anything behind.

use super::*;
use std::sync::atomic::AtomicBool;

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs a function that opens and closes connections, while no other test runs, and checks that the number of descriptors is
/// the same afterwards.
fn leaves_nothing(run: impl FnOnce(&Rig)) {
    let _alone = DESCRIPTORS.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let rig = Rig::alone(Vec::new());
    rig.expect_service();
    rig.expect_no_connections();
    // The previous test may still be closing some.
    let mut before = descriptors();
    soon("nobody else opens or closes any", || {
        thread::sleep(Duration::from_millis(100));
        before == std::mem::replace(&mut before, descriptors())
    });
    run(&rig);
    rig.expect_no_connections();
    soon(&format!("{before} descriptors as before"), || descriptors() == before);
    rig.expect_service();
}

/// Serves connections on a port until `stop` is set: each echoes a byte. Returns their number.
fn echo(listener: &Listener<DriverSide>, stop: &AtomicBool) -> usize {
    let mut served = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut guest) = listener.accept_within(Some(Duration::from_millis(50))) else { continue };
        served += 1;
        let mut byte = [0];
        // Some disconnect without sending anything.
        if let Ok(1) = guest.read(&mut byte) {
            let _ = guest.write_all(&byte);
        }
    }
    served
}

#[test]
fn thousands_of_connections_each_second() {
    leaves_nothing(|rig| {
        let (stop, listener) = (AtomicBool::new(false), rig.listen(1));
        let start = Instant::now();
        const EACH: usize = 10_000;
        thread::scope(|scope| {
            let server = scope.spawn(|| echo(&listener, &stop));
            let programs: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        for number in 0..EACH {
                            match number % 10 {
                                // A port without a listener; an invalid line.
                                0 => assert!(rig.ask(2).is_none()),
                                1 => {
                                    let mut program = rig.program();
                                    program.write_all(b"CONNECT x\n").unwrap();
                                    turned_away(&mut program);
                                }
                                2 => drop(rig.ask(1).unwrap()),
                                _ => {
                                    let mut program = rig.ask(1).unwrap();
                                    program.write_all(b"x").unwrap();
                                    program.read_exact(&mut [0]).unwrap();
                                }
                            }
                        }
                    })
                })
                .collect();
            let results: Vec<_> = programs.into_iter().map(|program| program.join()).collect();
            stop.store(true, Ordering::Relaxed);
            results.into_iter().for_each(|result| result.unwrap());
            assert_eq!(server.join().unwrap(), 3 * EACH / 10 * 8);
        });
        let seconds = start.elapsed().as_secs_f64();
        println!("{} connections, {:.0} each second", 3 * EACH, 3.0 * EACH as f64 / seconds);
    });
}

#[test]
fn thousands_of_connections_of_the_guest() {
    leaves_nothing(|rig| {
        let listener = rig.listen_on_host(1);
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..5000 {
                    let (mut program, _) = listener.accept().unwrap();
                    let mut byte = [0];
                    if let Ok(1) = program.read(&mut byte) {
                        program.write_all(&byte).unwrap();
                    }
                }
            });
            for number in 0..10_000 {
                if number % 2 == 0 {
                    assert!(rig.dial(2).is_err());
                    continue;
                }
                let mut guest = rig.dial(1).unwrap();
                if number % 5 > 0 {
                    guest.write_all(b"x").unwrap();
                    guest.read_exact(&mut [0]).unwrap();
                }
            }
        });
    });
}

#[test]
fn more_pending_programs_than_the_limit() {
    leaves_nothing(|rig| {
        // None of these has sent its line. A later program is still served at once, in place of the oldest of them.
        let silent: Vec<_> = (0..300).filter_map(|_| UnixStream::connect(rig.folder.0.join("host")).ok()).collect();
        assert_eq!(silent.len(), 300);
        let listener = rig.listen(1);
        let program = at_once(|| rig.ask(1)).unwrap();
        exchange(&program, &accept(&listener));
        assert_eq!(rig.server.sockets().turned_away, 300 - 256);
        drop((silent, program));
    });
}

#[test]
fn hundreds_at_once() {
    leaves_nothing(|rig| {
        let listener = rig.listen(1);
        let mut pairs: Vec<(UnixStream, Guest)> = (0..400).map(|_| (rig.ask(1).unwrap(), accept(&listener))).collect();
        for (program, guest) in &mut pairs {
            exchange(&*program, guest);
        }
        assert_eq!(rig.host().report().connections, pairs.len());
    });
}
