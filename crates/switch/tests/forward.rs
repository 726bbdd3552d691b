//! A switch between ports of memory: which port gets which frames, in which order, and how often.

mod common;

use common::*;
use ringroad_ring::BURST;
use ringroad_switch::Claim;
use ringroad_wire::ethernet::MacAddr;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

#[test]
fn learns_by_source_and_follows_moves() {
    let mut net = Net::new(4);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2, 3], "unknown: everywhere but back");
    assert_eq!(net.send_one(1, mac(0), mac(1)), [0]);
    assert_eq!(net.send_one(2, mac(1), mac(2)), [1]);
    assert_eq!(net.switch.fdb().len(0), 3);
    // The first one moves.
    net.now += HOLD;
    assert_eq!(net.send_one(3, mac(2), mac(0)), [2]);
    assert_eq!(*net.ports[3].claims.lock().unwrap(), [(mac(0), Claim::Moved, true)]);
    assert_eq!(net.send_one(1, mac(0), mac(1)), [3]);
    assert_eq!(net.switch.fdb().len(net.now), 3);
}

#[test]
fn moves_within_a_burst() {
    let mut net = Net::new(3);
    net.send_one(1, mac(0), mac(1));
    net.now += HOLD;
    // 1 is at port 1, then, by the second frame, at port 0, where the third one would go back to.
    let frames = [frame(mac(1), mac(0), 1), frame(mac(9), mac(1), 2), frame(mac(1), mac(0), 3)];
    let got = net.send(0, &frames);
    assert_eq!(got, [vec![], frames[..2].to_vec(), frames[1..2].to_vec()]);
}

#[test]
fn an_address_that_nobody_confirms_ages() {
    let mut net = Net::new(3);
    net.send_one(1, mac(0), mac(1));
    net.now = AGEING - 1;
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    net.now = AGEING;
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2]);
    // As destination it is not confirmed, as source it is.
    assert_eq!(net.send_one(1, mac(9), mac(1)), [0, 2]);
    net.now = 2 * AGEING - 1;
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
}

#[test]
fn broadcast_and_multicast_go_everywhere_but_back() {
    let mut net = Net::new(4);
    for destination in [MacAddr::BROADCAST, GROUP, MacAddr([0x33, 0x33, 0, 0, 0, 1])] {
        assert_eq!(net.send_one(2, destination, mac(2)), [0, 1, 3]);
    }
}

#[test]
fn a_multicast_source_is_never_learned() {
    let mut net = Net::new(3);
    for source in [GROUP, MacAddr::BROADCAST] {
        assert_eq!(net.send_one(1, mac(9), source), [0, 2]);
        assert_eq!(net.send_one(0, source, mac(0)), [1, 2]);
    }
    assert_eq!(net.switch.fdb().len(0), 1);
}

#[test]
fn no_frame_goes_back_unless_the_port_is_a_hairpin() {
    for hairpin in [false, true] {
        let mut net = Net::of(vec![(true, hairpin), (true, false)]);
        net.send_one(0, mac(9), mac(0));
        // Two guests behind one port.
        assert_eq!(net.send_one(0, mac(0), mac(1)), if hairpin { vec![0] } else { vec![] });
        assert_eq!(net.send_one(0, MacAddr::BROADCAST, mac(0)), if hairpin { vec![0, 1] } else { vec![1] });
        assert_eq!(net.send_one(1, MacAddr::BROADCAST, mac(5)), [0]);
    }
}

#[test]
fn frames_with_a_vlan_tag_are_not_touched() {
    let mut net = Net::new(3);
    net.send_one(1, mac(0), mac(1));
    for len in [18, 19, 20, 21, 60, 1522] {
        for tag in [&[0x81, 0x00, 0x6f, 0xff][..], &[0x88, 0xa8, 0x00, 0x02, 0x81, 0x00, 0x00, 0x03]] {
            let mut tagged = [&mac(1).0[..], &mac(0).0, tag].concat();
            tagged.resize(len.max(tagged.len()), 0x5a);
            assert_eq!(net.send(0, std::slice::from_ref(&tagged)), [vec![], vec![tagged], vec![]]);
        }
    }
}

#[test]
fn each_of_many_destinations_gets_its_frame() {
    let mut net = Net::new(BURST + 1);
    for port in 1..=BURST {
        net.send_one(port, MacAddr::BROADCAST, mac(port));
    }
    let frames: Vec<_> = (1..=BURST).rev().map(|port| frame(mac(port), mac(0), port)).collect();
    let got = net.send(0, &frames);
    assert_eq!(got[0], Vec::<Bytes>::new());
    for (port, frame) in (1..=BURST).zip(frames.iter().rev()) {
        assert_eq!(got[port], std::slice::from_ref(frame), "port {port}");
    }
}

#[test]
fn frames_to_one_destination_stay_in_order() {
    let mut net = Net::new(4);
    (1..3).for_each(|port| drop(net.send_one(port, mac(0), mac(port))));
    // To 1, to 2, to nobody known, to 1 again, and so on.
    let frames: Vec<_> = (0..BURST).map(|number| frame(mac([1, 2, 9, 1][number % 4]), mac(0), number)).collect();
    let got = net.send(0, &frames);
    let to = |wanted: usize| frames.iter().filter(|frame| frame[..6] == mac(wanted).0).cloned().collect::<Vec<_>>();
    let only =
        |port: usize, wanted| got[port].iter().filter(|frame| frame[..6] == mac(wanted).0).cloned().collect::<Vec<_>>();
    assert_eq!((only(1, 1), only(2, 2)), (to(1), to(2)));
    for port in 1..4 {
        assert_eq!(only(port, 9), to(9), "port {port}");
    }
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [0, BURST / 2 + BURST / 4, BURST / 2, BURST / 4]);
}

#[test]
fn flooded_frames_skip_a_port_that_does_not_take_them() {
    let mut net = Net::of(vec![(true, false), (false, false), (true, false)]);
    assert_eq!(net.send_one(0, MacAddr::BROADCAST, mac(0)), [2]);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [2]);
}

#[test]
fn a_burst_takes_one_lock_and_its_source_is_kept() {
    let mut net = Net::new(3);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    let locks = |net: &Net| net.ports.iter().map(|port| port.leases.load(Relaxed) + port.sinks.load(Relaxed)).sum();
    let before: usize = locks(&net);
    let frames: Vec<_> = (0..BURST).map(|number| frame(mac(1), mac(0), number)).collect();
    (0..100).for_each(|_| drop(net.send(0, &frames)));
    assert_eq!(locks(&net) - before, 1 + 100, "one for the lease, and one for each burst's destination");
    let (held, leases) = (|net: &Net| net.ports[0].leased.load(Relaxed), net.ports[0].leases.load(Relaxed));
    assert!(held(&net));
    // Whoever wants it gets it at the next look.
    net.ports[0].wanted.store(true, Relaxed);
    assert_eq!(net.carry(0, 0), 0);
    assert!(!held(&net));
    net.ports[0].wanted.store(false, Relaxed);
    // Nor is it kept when there is nothing, when the worker settles, or releases what it has.
    net.send(0, &frames);
    assert!(held(&net));
    assert_eq!(net.carry(0, 0), 0);
    assert!(!held(&net));
    net.send(0, &frames);
    net.switch.settle(Duration::ZERO);
    assert!(!held(&net));
    net.send(0, &frames);
    net.switch.release();
    assert!(!held(&net));
    assert_eq!(net.ports[0].leases.load(Relaxed), leases + 3);
}

#[test]
fn what_a_removed_port_had_is_forgotten() {
    let mut net = Net::new(4);
    (0..3).for_each(|port| drop(net.send_one(port, MacAddr::BROADCAST, mac(port))));
    assert!(Arc::ptr_eq(&net.switch.remove(1).unwrap(), &net.ports[1]));
    assert!(net.switch.remove(1).is_none() && net.switch.remove(99).is_none());
    assert_eq!(net.send_one(0, mac(1), mac(0)), [2, 3]);
    assert_eq!(net.send_one(0, mac(2), mac(0)), [2]);
    assert_eq!(net.carry(1, 0), 0);
    assert_eq!(Arc::strong_count(&net.ports[1]), 1);
    // Its number is free for another one, which gets nothing of its frames.
    net.ports[1] = Fake::new(true, false);
    assert_eq!(net.switch.add(net.ports[1].clone()), 1);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2, 3]);
    assert_eq!(net.send_one(1, mac(2), mac(7)), [2]);
}

#[test]
fn what_was_learned_of_a_port_can_be_forgotten() {
    let mut net = Net::new(3);
    (0..2).for_each(|port| drop(net.send_one(port, MacAddr::BROADCAST, mac(port))));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    net.switch.forget(1);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1, 2]);
}

#[test]
fn ports_of_a_burst_are_settled_once() {
    let mut net = Net::new(3);
    let settled = |net: &Net| net.ports.iter().map(|port| port.settled.load(Relaxed)).collect::<Vec<_>>();
    let now = Duration::ZERO;
    assert_eq!(net.switch.settle(now), None);
    assert_eq!(settled(&net), [0, 0, 0], "nothing has happened");
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    net.send_one(0, mac(1), mac(0));
    assert_eq!([net.switch.settle(now), net.switch.settle(now)], [None; 2]);
    assert_eq!(settled(&net), [1, 1, 1]);
    // Where it came from and where it went to; again, until it can be done.
    net.send_one(0, mac(1), mac(0));
    net.ports[1].stop(true);
    assert_eq!([net.switch.settle(now), net.switch.settle(now)], [Some(now); 2]);
    net.ports[1].stop(false);
    assert_eq!(net.switch.settle(now), None);
    assert_eq!(settled(&net), [2, 4, 1]);
}

#[test]
fn notifications_wait_until_they_are_due_and_longer_ones_do_not_keep_shorter_ones() {
    let mut net = Net::new(3);
    let settled = |net: &Net| net.ports.iter().map(|port| port.settled.load(Relaxed)).collect::<Vec<_>>();
    let at = Duration::from_millis;
    net.ports[0].due.store(20, Relaxed);
    net.ports[1].due.store(10, Relaxed);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    assert_eq!(net.switch.settle(at(1)), Some(at(10)));
    assert_eq!(net.switch.settle(at(9)), Some(at(10)));
    assert_eq!(settled(&net), [1, 1, 1], "not asked before it is time");
    assert_eq!(net.switch.settle(at(10)), Some(at(20)));
    assert_eq!(settled(&net), [1, 2, 1]);
    // Frames that come meanwhile do not postpone it.
    net.send_one(0, mac(1), mac(0));
    assert_eq!(net.switch.settle(at(15)), Some(at(20)));
    assert_eq!(net.switch.settle(at(21)), None);
}

/// A guest's timer does not wait until the worker has nothing to do, and looks at no clock when none runs.
#[test]
fn timed_ports_are_settled_after_each_burst_and_when_they_are_due() {
    let mut net = Net::new(3);
    let settled = |net: &Net| net.ports.iter().map(|port| port.settled.load(Relaxed)).collect::<Vec<_>>();
    let never = || -> Duration { panic!("no timer runs") };
    let at = |millis| move || Duration::from_millis(millis);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    assert!(!net.switch.is_timed());
    net.switch.settle_timed(never);
    assert_eq!((net.switch.settle(Duration::ZERO), settled(&net)), (None, vec![1; 3]));
    net.ports[1].timed.store(true, Relaxed);
    net.switch.remove(1);
    assert_eq!(net.switch.add(net.ports[1].clone()), 1);
    assert!(net.switch.is_timed());
    net.switch.settle_timed(never);
    net.ports[1].due.store(10, Relaxed);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    (1..10).for_each(|millis| net.switch.settle_timed(at(millis)));
    assert_eq!(settled(&net), [1, 2, 1], "once after the burst");
    // Bursts of others do not put it off.
    net.send_one(2, mac(0), mac(2));
    net.switch.settle_timed(at(10));
    assert_eq!(settled(&net), [1, 3, 1]);
    net.switch.settle_timed(never);
    // A change from outside.
    net.switch.reopen(1);
    net.switch.settle_timed(at(11));
    assert_eq!(settled(&net), [1, 4, 1]);
    net.switch.remove(1);
    assert!(!net.switch.is_timed());
}

#[test]
fn a_port_that_cannot_take_frames_keeps_nobody_else_from_them() {
    let mut net = Net::new(4);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    net.ports[1].stop(true);
    let frames = [frame(mac(1), mac(0), 1), frame(mac(9), mac(0), 2), frame(mac(1), mac(0), 3)];
    let flooded = frames[1..2].to_vec();
    assert_eq!(net.send(0, &frames), [vec![], vec![], flooded.clone(), flooded]);
    assert_eq!(net.ports[1].missed.load(Relaxed), 3);
    // Still known, not flooded instead.
    assert_eq!(net.send_one(0, mac(1), mac(0)), [] as [usize; 0]);
    net.ports[1].stop(false);
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    assert_eq!(net.ports[1].missed.load(Relaxed), 4);
}

#[test]
fn nothing_comes_from_where_there_is_nothing() {
    let mut net = Net::new(2);
    assert_eq!(net.carry(0, 0), 0);
    assert_eq!(net.carry(0, 1), 0, "no such queue");
    assert_eq!(net.carry(2, 0), 0, "no such port");
    assert!(net.ports.iter().all(|port| port.got().is_empty()));
}

#[test]
fn frames_are_poured_only_where_all_go_to_one_port() {
    let plain = (true, false);
    let cases = [
        (vec![plain, plain], true),
        (vec![plain], false),
        (vec![plain, plain, plain], false),
        (vec![plain, (true, true)], false),
        (vec![(true, true), plain], false),
        (vec![plain, (false, false)], false),
        (vec![(false, false), plain], false),
    ];
    for (ports, expected) in cases {
        let mut net = Net::of(ports.clone());
        net.ports[0].pours.store(true, Relaxed);
        net.send(0, &[frame(mac(1), mac(0), 0)]);
        assert_eq!(net.ports[0].poured.load(Relaxed) == 1, expected, "{ports:?}");
    }
    let mut net = Net::new(2);
    net.ports[0].pours.store(true, Relaxed);
    let frames: Vec<_> = (0..BURST).map(|number| frame(mac(number % 3), mac(0), number)).collect();
    assert_eq!(net.send(0, &frames), [vec![], frames.clone()]);
    // A port that is not running: the usual way, which counts them.
    net.ports[1].stop(true);
    assert_eq!(net.send(0, &frames), vec![Vec::<Bytes>::new(); 2]);
    assert_eq!((net.ports[0].poured.load(Relaxed), net.ports[1].missed.load(Relaxed)), (1, BURST));
}

#[test]
fn an_address_that_moves_to_a_port_that_pours_can_be_reached_there() {
    let mut net = Net::new(2);
    net.ports[0].pours.store(true, Relaxed);
    assert_eq!(net.send_one(1, mac(9), mac(7)), [0]);
    assert_eq!(net.send_one(0, mac(1), mac(7)), [1]);
    assert_eq!(net.send_one(1, mac(7), mac(1)), [0]);
    // A third port finds nothing stale.
    net.ports.push(Fake::new(true, false));
    assert_eq!(net.switch.add(net.ports[2].clone()), 2);
    assert_eq!(net.send_one(2, mac(7), mac(2)), [0, 1]);
    assert_eq!(net.send_one(0, mac(2), mac(7)), [2]);
    assert_eq!(net.send_one(1, mac(7), mac(1)), [0]);
    assert_eq!(net.ports[0].poured.load(Relaxed), 1);
}
