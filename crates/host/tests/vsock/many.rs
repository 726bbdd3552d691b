//! Many connections, one after the other and at once: none leaves anything behind.

use super::*;
use std::sync::atomic::AtomicBool;

/// Open descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs something that opens and closes connections while nothing else runs; there must be as many descriptors afterwards.
fn leaves_nothing(run: impl FnOnce(&Rig)) {
    let _alone = COMPANY.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let rig = Rig::alone(Vec::new());
    rig.all_is_well();
    rig.nothing_is_left();
    // The last test may still be closing some.
    let mut before = descriptors();
    soon("nobody else opens or closes any", || {
        thread::sleep(Duration::from_millis(100));
        before == std::mem::replace(&mut before, descriptors())
    });
    run(&rig);
    rig.nothing_is_left();
    soon(&format!("{before} descriptors as before"), || descriptors() == before);
    rig.all_is_well();
}

/// Serves connections of a port until told to stop: each echoes a byte.
fn echo(listener: &Listener<DriverSide>, stop: &AtomicBool) -> usize {
    let mut served = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut guest) = listener.accept_within(Some(Duration::from_millis(50))) else { continue };
        served += 1;
        let mut byte = [0];
        // Some go without a word.
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
                                // Nobody listens; a line that is wrong.
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
fn more_programs_at_once_than_may_ask() {
    leaves_nothing(|rig| {
        // None of these has said yet what it wants; who comes later is served at once all the same, in the place of one that
        // came before.
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
