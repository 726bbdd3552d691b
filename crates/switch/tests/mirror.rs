//! Ports whose frames are copied to another port, or captured.

mod common;

use common::*;
use ringroad_frame::offload::{Offload, Support};
use ringroad_switch::{Direction, Dropped, Limits, Mirror, Rate, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use std::{sync::atomic::Ordering::Relaxed, time::Duration};

const BOTH: Mirror = Mirror { port: Some(2), captures: false, from: true, to: true };

/// Four ports that know each other; frames of port 0 are copied to port 2.
fn net(mirror: Mirror) -> Net {
    let mut net = Net::new(4);
    for port in [0, 1, 3] {
        net.send_one(port, MacAddr::BROADCAST, mac(port));
    }
    net.switch.set_mirror(0, mirror);
    net
}

fn numbered(to: usize, from: usize, count: usize) -> Vec<Bytes> {
    (0..count).map(|number| frame(mac(to), mac(from), number)).collect()
}

#[test]
fn frames_from_and_to_a_port_are_copied() {
    for (mirror, from, to) in [
        (BOTH, true, true),
        (Mirror { to: false, ..BOTH }, true, false),
        (Mirror { from: false, ..BOTH }, false, true),
        (Mirror { from: false, to: false, ..BOTH }, false, false),
        (Mirror { port: Some(0), ..BOTH }, false, false),
        (Mirror { port: Some(7), ..BOTH }, false, false),
    ] {
        let mut net = net(mirror);
        let (there, back, others) = (numbered(1, 0, 20), numbered(0, 1, 30), numbered(3, 1, 5));
        let copy = |wanted: bool, frames: &[Bytes]| if wanted { frames.to_vec() } else { vec![] };
        assert_eq!(net.send(0, &there), [vec![], there.clone(), copy(from, &there), vec![]], "{mirror:?}");
        assert_eq!(net.send(1, &back), [back.clone(), vec![], copy(to, &back), vec![]]);
        assert_eq!(net.send(1, &others), [vec![], vec![], vec![], others.clone()]);
        // What is flooded goes there as a copy only, if it does.
        let flooded = [frame(MacAddr::BROADCAST, mac(3), 1)];
        let is_mirror = !mirror.is_none() && mirror.port == Some(2);
        assert_eq!(net.send(3, &flooded)[2].len(), usize::from(to || !is_mirror), "{mirror:?}");
        let flooded = [frame(MacAddr::BROADCAST, mac(0), 1)];
        assert_eq!(net.send(0, &flooded)[2].len(), usize::from(from || !is_mirror));
    }
}

#[test]
fn a_port_that_gets_copies_has_no_other_traffic() {
    let limits = [0, 0, 1, 0].map(|own| Limits { own: (own == 1).then_some(mac(9)), ..Limits::GUEST });
    let mut net = Net::limited(&limits);
    net.send_one(2, MacAddr::BROADCAST, mac(2));
    net.switch.set_mirror(0, Mirror { to: false, ..BOTH });
    for to in [2, 9] {
        let frames = numbered(to, 1, 3);
        assert!(net.send(1, &frames)[2].is_empty(), "its own address, and one that was learned");
    }
    net.send(2, &numbered(1, 2, 3));
    net.send(2, &[frame(MacAddr::BROADCAST, mac(2), 1)]);
    assert_eq!((net.ports[2].lost(Dropped::Isolated), net.ports[1].got().len()), (4, 0));
    // It is a port like others afterwards.
    net.switch.set_mirror(0, Mirror::default());
    assert_eq!(net.send_one(2, MacAddr::BROADCAST, mac(2)), [0, 1, 3]);
    assert_eq!(net.send_one(1, mac(2), mac(1)), [2]);
}

#[test]
fn copies_are_dropped_for_lack_of_room_and_wait_for_nobody() {
    let mut net = net(BOTH);
    net.ports.iter().for_each(|port| port.retains.store(true, Relaxed));
    net.ports[2].room.store(10, Relaxed);
    let frames = numbered(1, 0, 64);
    let got = net.send(0, &frames);
    assert_eq!((&got[1], &got[2][..]), (&frames, &frames[..10]));
    assert_eq!((net.ports[2].full.load(Relaxed), net.switch.take_waiting()), (54, None));
    net.ports[2].stop(true);
    assert_eq!(net.send(0, &frames)[1], frames);
    assert_eq!(net.ports[2].missed.load(Relaxed), 64);
}

#[test]
fn frames_that_wait_are_copied_once() {
    for mirrored in [0, 1] {
        let mut net = net(Mirror::default());
        net.switch.set_mirror(mirrored, BOTH);
        net.ports[0].retains.store(true, Relaxed);
        // Whether there is room is known after the first burst.
        net.send(0, &numbered(1, 0, 1));
        let frames = numbered(1, 0, 30);
        net.ports[0].to_send.lock().unwrap().push_back(frames.clone());
        let mut copies = Vec::new();
        for room in [7, 0, 0, 20, 100] {
            net.ports[1].room.store(room, Relaxed);
            net.carry(0, 0);
            copies.extend(net.ports[2].got());
        }
        assert_eq!((net.ports[1].got(), copies), (frames.clone(), frames), "port {mirrored}");
    }
}

/// What waits is the sender's: it may be another frame, or none, when it comes again.
#[test]
fn frames_that_wait_are_copied_as_they_leave() {
    let pass = Vid::new(10).unwrap();
    for vlans in [None, Some(Vlans::access(pass))] {
        let mut net = net(Mirror::default());
        net.switch.set_vlans(0, vlans);
        net.switch.set_vlans(1, vlans.map(|_| Vlans::all(None)));
        // Its address is learned anew in the VLAN.
        let mut tagged = frame(MacAddr::BROADCAST, mac(1), 60);
        tagged.splice(12..12, [0x81, 0, 0, 10]);
        net.send(1, &[tagged]);
        net.ports[0].retains.store(true, Relaxed);
        // Whether there is room is known after the first burst.
        net.send(0, &numbered(1, 0, 1));
        net.switch.set_mirror(0, Mirror { to: false, ..BOTH });
        net.ports[0].to_send.lock().unwrap().push_back(numbered(1, 0, 30));
        net.ports[1].room.store(10, Relaxed);
        net.carry(0, 0);
        let others: Vec<Bytes> = (0..20).map(|number| frame(mac(1), mac(0), 100 + number)).collect();
        *net.ports[0].to_send.lock().unwrap() = [others.clone()].into();
        net.ports[1].room.store(100, Relaxed);
        net.carry(0, 0);
        let left = [&numbered(1, 0, 30)[..10], &others].concat();
        assert!(net.ports[2].got() == left, "copies of what has left");
        // A sender that starts again has its first frames copied.
        net.ports[1].room.store(0, Relaxed);
        net.ports[0].to_send.lock().unwrap().push_back(numbered(1, 0, 5));
        net.carry(0, 0);
        net.ports[0].to_send.lock().unwrap().clear();
        net.switch.forget(0);
        net.ports[1].room.store(100, Relaxed);
        net.ports[0].to_send.lock().unwrap().push_back(numbered(3, 0, 5));
        net.carry(0, 0);
        assert!(net.ports[2].got() == numbered(3, 0, 5), "no copies of the first frames of a new sender");
    }
}

#[test]
fn what_a_mirror_sends_beyond_its_rate_is_counted_once() {
    let rate = Rate { bits: 0, frames: 1000, burst: Duration::from_millis(4) };
    let limited = Limits { rate, ..Limits::GUEST };
    let mut net = Net::limited(&[Limits::GUEST, Limits::GUEST, limited]);
    net.switch.set_mirror(0, BOTH);
    net.ports[2].retains.store(true, Relaxed);
    net.ports[2].to_send.lock().unwrap().push_back(numbered(1, 2, 30));
    let mut dropped = 0;
    for _ in 0..3 {
        dropped += net.carry(2, 0);
    }
    assert!((1..30).contains(&dropped), "{dropped} frames of 30 within the rate");
    assert_eq!(net.ports[2].lost(Dropped::Isolated), dropped);
}

#[test]
fn copies_have_the_tag_that_the_frame_has_at_the_port() {
    let vlans = [Vlans::access(Vid::new(10).unwrap()), Vlans::all(None)];
    for (mirrored, tagged) in [(0, false), (1, true)] {
        let mut net = net(Mirror::default());
        net.switch.set_vlans(0, Some(vlans[0]));
        net.switch.set_vlans(1, Some(vlans[1]));
        net.switch.set_mirror(mirrored, BOTH);
        let bare = frame(MacAddr::BROADCAST, mac(0), 60);
        let mut with = bare.clone();
        with.splice(12..12, [0x81, 0, 0, 10]);
        let expected = [if tagged { with.clone() } else { bare.clone() }];
        assert_eq!(net.send(0, &[bare])[2], expected);
        assert_eq!(net.send(1, &[with])[2], expected);
    }
}

#[test]
fn copies_are_finished_for_a_port_that_takes_no_offloads() {
    let mut net = net(BOTH);
    for port in [0, 1] {
        *net.ports[port].support.lock().unwrap() = Support::all();
        *net.ports[port].offload.lock().unwrap() = |frame| Offload::partial(14, 2, frame.len()).unwrap();
    }
    let mut frame = frame(mac(1), mac(0), 3);
    let left = Offload::partial(14, 2, frame.len()).unwrap();
    let got = net.send(0, std::slice::from_ref(&frame));
    assert_eq!(got[1], [frame.clone()]);
    ringroad_frame::offload::checksum::complete(&mut frame, left);
    assert_eq!(got[2], [frame]);
}

#[test]
fn a_mirror_that_is_broken_or_gone_disturbs_nobody() {
    let mut net = net(BOTH);
    *net.ports[2].panics.lock().unwrap() = Some(Panics::Put);
    let frames = numbered(1, 0, 5);
    assert_eq!(net.send(0, &frames)[1], frames);
    assert_eq!(net.ports[2].fell.lock().unwrap().len(), 1);
    assert_eq!(net.send(0, &frames)[1], frames);
    net.switch.remove(2).unwrap();
    assert_eq!(net.send(0, &frames)[1], frames);
    // Whoever gets its number gets nothing of it.
    net.ports[2] = Fake::new(true, false);
    assert_eq!(net.switch.add(net.ports[2].clone()), 2);
    assert!(net.send(0, &frames)[2].is_empty());
    assert_eq!(net.send_one(2, mac(1), mac(2)), [1]);
}

#[test]
fn mirrored_ports_pour_nothing() {
    let mut net = Net::new(3);
    net.switch.remove(1).unwrap();
    net.ports[0].pours.store(true, Relaxed);
    net.switch.set_mirror(0, BOTH);
    let frames = numbered(9, 0, 3);
    assert_eq!(net.send(0, &frames), [vec![], vec![], frames]);
    assert_eq!(net.ports[0].poured.load(Relaxed), 0);
}

#[test]
fn captures_see_both_directions() {
    let mut net = net(Mirror { port: None, captures: true, from: true, to: true });
    let (there, back) = (numbered(1, 0, 3), numbered(0, 1, 2));
    net.send(0, &there);
    net.send(1, &back);
    let expected = there.into_iter().map(|frame| (Direction::From, frame));
    let expected = expected.chain(back.into_iter().map(|frame| (Direction::To, frame)));
    assert_eq!(*net.ports[0].captured.lock().unwrap(), expected.collect::<Vec<_>>());
    assert_eq!(net.send_one(2, MacAddr::BROADCAST, mac(2)), [0, 1, 3], "no port gets copies");
}
