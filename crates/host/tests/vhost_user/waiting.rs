//! Frames for a guest without room wait in the ring of their sender, on a worker that sleeps meanwhile.

use crate::{LAYOUTS, common::*};
use ringroad_switch::Limits;
use ringroad_wire::ethernet::MacAddr;
use std::time::{Duration, Instant};

/// Sets for how long frames to a port wait.
fn set_wait(rig: &Rig, port: usize, wait: Duration) {
    let handle = rig.servers[port].handle();
    let settings = handle.port().settings();
    handle.set(ringroad_host::PortSettings { limits: Limits { wait, ..settings.limits }, ..settings });
}

/// Fills the receive ring of `to` with frames from `from`, and adds `more` frames behind those. Returns the sequence numbers of
/// all of them.
fn fill(rig: &Rig, from: &mut Guest, to: MacAddr, port: usize, more: usize) -> Vec<u64> {
    let before = rig.report(port).sent.frames;
    let mut sent: Vec<u64> = (0..64).map(|_| from.send_to(to)).collect();
    assert!(within(PATIENCE, || rig.report(port).sent.frames == before + 64), "{:?}", rig.report(port).sent);
    sent.extend((0..more).map(|_| from.send_to(to)));
    sent
}

/// Receives frames and kicks as the device asks.
fn receive_all(guest: &mut Guest, from: MacAddr, count: usize) -> Vec<u64> {
    let mut got = Vec::new();
    within(PATIENCE, || {
        got.extend(guest.received(from));
        if guest.driver.rx[0].wants_notification() {
            guest.vrings[0].kick.write(1).unwrap();
        }
        got.len() >= count
    });
    got
}

#[test]
fn they_go_on_at_the_kick_of_the_receiver() {
    let rig = Rig::new("waits-kick");
    for layout in LAYOUTS {
        let (mut a, mut b) = (rig.guest(1, layout), rig.guest(2, layout));
        exchange(&mut a, &mut b);
        set_wait(&rig, 2, Duration::from_secs(4));
        for _ in 0..20 {
            let sent = fill(&rig, &mut a, b.mac, 2, 30);
            // Long enough for the worker to go to sleep.
            std::thread::sleep(Duration::from_millis(5));
            let begun = Instant::now();
            assert_eq!(receive_all(&mut b, a.mac, sent.len()), sent);
            assert!(begun.elapsed() < Duration::from_secs(3), "not when the wait is over: {:?}", begun.elapsed());
        }
        let report = rig.report(2).sent;
        assert_eq!((report.full, report.stopped), (0, 0));
    }
}

#[test]
fn they_wait_for_a_limited_time_and_no_other_guest_waits() {
    let rig = Rig::new("waits");
    for layout in LAYOUTS {
        let (mut victim, mut a, mut b) = (rig.guest(0, layout), rig.guest(1, layout), rig.guest(2, layout));
        exchange(&mut a, &mut b);
        exchange(&mut a, &mut victim);
        set_wait(&rig, 0, Duration::from_secs(1));
        let before = rig.report(0).sent.full;
        fill(&rig, &mut a, victim.mac, 0, 0);
        let begun = Instant::now();
        let late = [a.send_to(victim.mac), a.send_to(b.mac)];
        // Meanwhile others talk.
        for _ in 0..10 {
            let sequence = b.send_to(a.mac);
            assert!(a.receives(b.mac, sequence));
        }
        assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
        assert!(b.receives(a.mac, late[1]));
        let waited = begun.elapsed();
        assert!((800..4000).contains(&waited.as_millis()), "{waited:?}");
        // It is known now: nothing waits for it any more.
        let begun = Instant::now();
        for _ in 0..10 {
            a.send_to(victim.mac);
            let sequence = a.send_to(b.mac);
            assert!(b.receives(a.mac, sequence));
        }
        assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
        assert!(within(PATIENCE, || rig.report(0).sent.full == before + 11), "{:?}", rig.report(0).sent);
        assert_eq!(receive_all(&mut victim, a.mac, 64).len(), 64);
    }
}

/// Round trips of a flow between two guests, the sender of which has frames for a third one in front of each.
fn round_trips(from: &mut Guest, to: &mut Guest, full: MacAddr, count: usize) -> Vec<Duration> {
    let trip = |_| {
        let begun = Instant::now();
        (0..4).for_each(|_| _ = from.send_to(full));
        let sequence = from.send_to(to.mac);
        assert!(to.receives(from.mac, sequence));
        let sequence = to.send_to(from.mac);
        assert!(from.receives(to.mac, sequence));
        begun.elapsed()
    };
    (0..count).map(trip).collect()
}

#[test]
fn a_receiver_that_never_refills_costs_other_flows_the_wait_once() {
    const WAIT: Duration = Duration::from_millis(200);
    let rig = Rig::new("waits-other");
    for layout in LAYOUTS {
        let (mut victim, mut a, mut b) = (rig.guest(0, layout), rig.guest(1, layout), rig.guest(2, layout));
        exchange(&mut a, &mut b);
        exchange(&mut a, &mut victim);
        set_wait(&rig, 0, WAIT);
        for _ in 0..2 {
            fill(&rig, &mut a, victim.mac, 0, 0);
            let mut trips = round_trips(&mut a, &mut b, victim.mac, 100);
            trips.sort_unstable();
            let [last, longest] = [trips[98], trips[99]];
            // For a machine that is busy, half as much again.
            assert!(longest >= WAIT && longest < WAIT * 3 / 2 && last < WAIT / 2, "{last:?}, {longest:?}");
            // It takes frames again, and stops once more.
            assert_eq!(receive_all(&mut victim, a.mac, 64).len(), 64);
        }
    }
}

#[test]
fn they_do_not_wait_for_a_guest_that_stops() {
    let rig = Rig::new("waits-stop");
    let mut a = rig.guest(1, LAYOUTS[0]);
    let mut b = rig.guest(2, LAYOUTS[1]);
    for _ in 0..5 {
        let mut victim = rig.guest(0, LAYOUTS[1]);
        exchange(&mut a, &mut victim);
        set_wait(&rig, 0, Duration::from_secs(4));
        fill(&rig, &mut a, victim.mac, 0, 20);
        let last = a.send_to(b.mac);
        std::thread::sleep(Duration::from_millis(5));
        let begun = Instant::now();
        drop(victim);
        assert!(b.receives(a.mac, last));
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }
}
