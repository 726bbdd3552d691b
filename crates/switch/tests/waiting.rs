//! Back-pressure: frames to a port without room wait at their sender, for a limited time.

mod common;

use common::{Bytes, Fake, GROUP, Net, frame, mac};
use proptest::prelude::*;
use ringroad_switch::{Dropped, Limits, Vid, Vlans, Wait};
use ringroad_wire::ethernet::MacAddr;
use std::{collections::HashMap, sync::atomic::Ordering::Relaxed, time::Duration};

const WAIT: Duration = Duration::from_millis(5);

fn net(ports: usize) -> Net {
    let mut net = Net::new(ports);
    // All addresses are known.
    for port in 0..ports {
        net.send_one(port, GROUP, mac(port));
    }
    net.ports.iter().for_each(|port| port.retains.store(true, Relaxed));
    net
}

/// Frames from port 0 to port `to`, with these numbers.
fn frames(to: usize, numbers: std::ops::Range<usize>) -> Vec<Bytes> {
    numbers.map(|number| frame(mac(to), mac(0), number * 37)).collect()
}

fn push(port: &Fake, frames: &[Bytes]) {
    port.to_send.lock().unwrap().push_back(frames.to_vec());
}

/// Carries a burst of port 0 at this time; returns how many frames were done, and what the others wait for.
fn carry(net: &mut Net, now: Duration) -> (usize, Option<Wait>) {
    let work = net.switch.carry(0, 0, now);
    (work.frames, net.switch.take_waiting())
}

#[test]
fn frames_wait_for_room_and_arrive_once_and_in_order() {
    let mut net = net(3);
    let sent = frames(1, 0..10);
    net.ports[1].room.store(4, Relaxed);
    push(&net.ports[0], &sent);
    let second = Duration::from_secs(1);
    let wait = Some(Wait { port: Some(1), until: second + WAIT });
    assert_eq!(carry(&mut net, second), (4, wait));
    assert_eq!(net.ports[1].got(), sent[..4]);
    // Still none: the wait began with the first look.
    assert_eq!(carry(&mut net, second + WAIT / 2), (0, wait));
    net.ports[1].room.store(usize::MAX, Relaxed);
    assert_eq!(carry(&mut net, second + WAIT / 2), (6, None));
    assert_eq!(net.ports[1].got(), sent[4..]);
    assert_eq!(net.ports[1].full.load(Relaxed), 0);
    assert_eq!(net.ports[0].done.load(Relaxed), 1 + 10);
}

#[test]
fn the_wait_is_bounded_and_begins_again_only_after_a_frame_was_accepted() {
    let mut net = net(3);
    let start = Duration::from_secs(1);
    net.ports[1].room.store(0, Relaxed);
    push(&net.ports[0], &[frames(1, 0..3), frames(2, 3..5)].concat());
    assert_eq!(carry(&mut net, start), (0, Some(Wait { port: Some(1), until: start + WAIT })));
    assert!(net.ports[2].got().is_empty(), "what is behind waits, too");
    assert_eq!(carry(&mut net, start + WAIT), (5, None));
    assert_eq!((net.ports[1].full.load(Relaxed), net.ports[2].got().len()), (3, 2));
    // It takes nothing: further frames do not wait.
    push(&net.ports[0], &[frames(1, 5..6), frames(2, 6..7)].concat());
    assert_eq!(carry(&mut net, start + WAIT), (2, None));
    assert_eq!((net.ports[1].full.load(Relaxed), net.ports[2].got().len()), (4, 1));
    // It takes some: they wait again, for as long as it has earned, a fiftieth of the wait for each frame.
    net.ports[1].room.store(1, Relaxed);
    push(&net.ports[0], &frames(1, 7..8));
    push(&net.ports[0], &frames(1, 8..9));
    assert_eq!(carry(&mut net, 2 * start), (1, None));
    assert_eq!(carry(&mut net, 2 * start), (0, Some(Wait { port: Some(1), until: 2 * start + WAIT / 50 })));
    // A reload to "drop" ends the wait.
    net.switch.limit(1, Limits { wait: Duration::ZERO, ..Limits::default() });
    assert_eq!(carry(&mut net, 2 * start), (1, None));
    assert_eq!(net.ports[1].full.load(Relaxed), 5);
}

/// Sends frames to ports 1 and 2 in turn for a second, of which port 1 gets room for `some` each `interval`. Returns how many arrived
/// at each, and how many were dropped for lack of room.
fn beside_a_slow_one(interval: Duration, some: usize) -> ([usize; 2], usize) {
    let mut net = net(3);
    net.ports[1].room.store(0, Relaxed);
    let (start, step) = (Duration::from_secs(1), Duration::from_micros(20));
    let (mut next, mut arrived) = (start, [0; 2]);
    for tick in 0..50_000 {
        let now = start + tick * step;
        if now >= next {
            next += interval;
            net.ports[1].room.fetch_add(some, Relaxed);
        }
        if net.ports[0].to_send.lock().unwrap().is_empty() {
            push(&net.ports[0], &[frames(1, 0..1), frames(2, 1..2)].concat());
        }
        carry(&mut net, now);
        for (count, port) in arrived.iter_mut().zip(&net.ports[1..]) {
            *count += port.got().len();
        }
    }
    (arrived, net.ports[1].full.load(Relaxed))
}

/// Floods port 1, which always has room for `some` frames more after 20 us, with frames of this length for a second, from a port whose
/// sender notices that they wait or not. Returns how often they did, and how many frames were dropped.
fn flooded(len: usize, some: usize, notices: bool) -> (usize, usize) {
    let mut net = net(3);
    net.ports[0].heedless.store(!notices, Relaxed);
    net.ports[1].room.store(0, Relaxed);
    let mut one = frame(mac(1), mac(0), 0);
    one.resize(len, 0);
    let burst = vec![one; 32];
    let mut waited = 0;
    for tick in 0..50_000 {
        net.ports[1].room.store(some, Relaxed);
        if net.ports[0].to_send.lock().unwrap().is_empty() {
            push(&net.ports[0], &burst);
        }
        waited += usize::from(carry(&mut net, Duration::from_secs(1) + tick * Duration::from_micros(20)).1.is_some());
        net.ports[1].got();
    }
    (waited, net.ports[1].full.load(Relaxed))
}

#[test]
fn a_flood_of_short_frames_waits_only_if_its_sender_notices() {
    // 400 000 frames a second are taken, of 1.6 million.
    assert_eq!(flooded(64, 8, true), (37_500, 0));
    let (waited, dropped) = flooded(64, 8, false);
    assert!(waited <= 250 && dropped > 1_100_000, "for limits.wait, once: {waited} and {dropped}");
    // Segments of a TCP connection: 50 000 frames a second.
    assert_eq!([true, false].map(|notices| flooded(1514, 1, notices)), [(48_438, 0); 2]);
    assert_eq!(flooded(600, 2, false), (46_875, 0));
}

#[test]
fn after_a_flood_of_short_frames_they_wait_again() {
    let mut net = net(3);
    net.ports[0].heedless.store(true, Relaxed);
    net.ports[1].room.store(0, Relaxed);
    let one = frames(1, 0..1);
    let mut carry_at = |room: usize, micros: u64| {
        net.ports[1].room.store(room, Relaxed);
        if net.ports[0].to_send.lock().unwrap().is_empty() {
            push(&net.ports[0], &one);
        }
        carry(&mut net, Duration::from_secs(1) + Duration::from_micros(micros)).1.is_some()
    };
    assert_eq!([0, 4999, 5000].map(|micros| carry_at(0, micros)), [true, true, false]);
    // While it drops some now and then, nothing waits.
    assert_eq!([6, 60, 120, 180].map(|ms| [carry_at(1, 1000 * ms), carry_at(0, 1000 * ms + 1)]), [[false; 2]; 4]);
    // It has had room for 100 ms.
    assert_eq!([200, 279].map(|ms| [carry_at(1, 1000 * ms), carry_at(1, 1000 * ms + 1)]), [[false; 2]; 2]);
    assert!(!carry_at(1, 280_001) && carry_at(0, 290_000) && carry_at(0, 294_999) && !carry_at(0, 295_000));
}

#[test]
fn a_receiver_that_takes_one_now_and_then_does_not_stop_its_senders() {
    // Each frame that it takes is one within the wait.
    let (arrived, dropped) = beside_a_slow_one(WAIT * 9 / 10, 1);
    assert!((200..=230).contains(&arrived[0]), "{arrived:?}, {dropped} dropped");
    assert!(arrived[1] > 45_000 && dropped > 40_000, "{arrived:?}, {dropped} dropped");
    // One that is slow but always takes some is waited for, whatever it takes at once.
    for (interval, some) in [(80, 1), (4000, 60)] {
        let (arrived, dropped) = beside_a_slow_one(Duration::from_micros(interval), some);
        assert_eq!(dropped, 0, "{some} each {interval} us: {arrived:?}");
        assert!(arrived[0] > 10_000, "{some} each {interval} us: {arrived:?}");
    }
}

#[test]
fn what_is_flooded_or_cannot_be_kept_is_dropped() {
    let mut net = net(3);
    net.ports[1].room.store(0, Relaxed);
    push(&net.ports[0], &[frame(GROUP, mac(0), 7)]);
    assert_eq!(carry(&mut net, WAIT), (1, None));
    assert_eq!((net.ports[1].full.load(Relaxed), net.ports[2].got().len()), (1, 1));
    net.ports[0].retains.store(false, Relaxed);
    push(&net.ports[0], &frames(1, 0..2));
    assert_eq!(carry(&mut net, WAIT), (2, None));
    assert_eq!(net.ports[1].full.load(Relaxed), 3);
    // A port that is not running refuses nothing: what is meant for it is dropped.
    net.ports[0].retains.store(true, Relaxed);
    net.ports[1].stop(true);
    push(&net.ports[0], &frames(1, 0..2));
    assert_eq!(carry(&mut net, WAIT), (2, None));
    assert_eq!(net.ports[1].missed.load(Relaxed), 2);
}

#[test]
fn a_source_that_pours_waits_without_limit() {
    let mut net = net(2);
    net.ports[0].pours.store(true, Relaxed);
    net.ports[1].room.store(0, Relaxed);
    push(&net.ports[0], &frames(1, 0..3));
    for second in 1..9 {
        let now = Duration::from_secs(second);
        assert_eq!(carry(&mut net, now), (0, Some(Wait { port: Some(1), until: now + Duration::from_secs(1) })));
    }
    net.ports[1].room.store(9, Relaxed);
    assert_eq!(carry(&mut net, Duration::from_secs(9)), (3, None));
    assert_eq!(net.ports[1].full.load(Relaxed), 0);
    // Told to drop, it reads and drops.
    net.switch.limit(1, Limits { wait: Duration::ZERO, ..Limits::default() });
    net.ports[1].room.store(0, Relaxed);
    push(&net.ports[0], &frames(1, 0..3));
    assert_eq!(carry(&mut net, Duration::from_secs(9)), (3, None));
    assert_eq!(net.ports[1].full.load(Relaxed), 3);
}

#[test]
fn what_is_dropped_behind_frames_that_wait_is_counted_once() {
    let vlans = Vlans::trunk([1, 2].map(|vlan| Vid::new(vlan).unwrap()), Vid::new(1));
    for vlans in [None, Some(vlans)] {
        let mut net = net(4);
        let start = Duration::from_secs(1);
        let limits = Limits { own: Some(mac(0)), fixed: true, isolated: true, storm: 1, ..Limits::default() };
        net.switch.limit(0, limits);
        net.switch.limit(3, Limits { isolated: true, ..Limits::default() });
        net.switch.set_vlans(0, vlans);
        (1..4).for_each(|port| drop(net.send_one(port, GROUP, mac(port))));
        // They take what a port may flood at once.
        net.ports[0].retains.store(false, Relaxed);
        push(&net.ports[0], &vec![frame(GROUP, mac(0), 0); 64]);
        assert_eq!(carry(&mut net, start), (64, None));
        net.ports[0].retains.store(true, Relaxed);
        net.ports[1].room.store(0, Relaxed);
        let link_local = MacAddr([1, 0x80, 0xc2, 0, 0, 1]);
        let mut foreign = frame(mac(2), mac(0), 60);
        foreign.splice(12..12, [0x81, 0, 0, 3]);
        let mut nested = frame(mac(2), mac(0), 60);
        nested.splice(12..12, [0x81, 0, 0, 1, 0x81, 0, 0, 1]);
        let (to, from) = ([mac(2), mac(3), link_local, GROUP], [mac(9), mac(0), mac(0), mac(0)]);
        let mut dropped: Vec<_> = to.into_iter().zip(from).map(|(to, from)| frame(to, from, 0)).collect();
        if vlans.is_some() {
            dropped.extend([foreign, nested]);
        }
        // In front of the frame that waits, and behind it.
        push(&net.ports[0], &[&dropped[..], &frames(1, 0..1), &dropped].concat());
        let wait = Some(Wait { port: Some(1), until: start + WAIT });
        let count = dropped.len();
        for (now, expected) in
            [(start, (count, wait)), (start + WAIT / 2, (0, wait)), (start + WAIT, (count + 1, None))]
        {
            assert_eq!(carry(&mut net, now), expected);
        }
        let lost = [Dropped::Spoofed, Dropped::Isolated, Dropped::LinkLocal, Dropped::Storm, Dropped::Vlan];
        let tags = if vlans.is_some() { 4 } else { 0 };
        assert_eq!(lost.map(|why| net.ports[0].lost(why)), [2, 2, 2, 2, tags], "{vlans:?}");
        assert_eq!(net.ports[1].full.load(Relaxed), 1);
    }
}

/// One step: destinations of a burst, if the last one is done; new room of ports 1 and 2; milliseconds that pass.
type Step = (Vec<usize>, [Option<usize>; 2], u64);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let room = || prop::option::of(0..12usize);
    prop::collection::vec((prop::collection::vec(1..4usize, 0..20), [room(), room()], 0..3u64), 1..40)
}

proptest! {
    /// Whatever the mix of destinations and their room: no frame arrives twice, each arrives or is counted, those to one
    /// destination stay in order, and those to a port that always has room all arrive.
    #[test]
    fn any_mix_arrives_once_and_in_order(steps in steps()) {
        let mut net = net(4);
        let (mut sent, mut meant) = (HashMap::<Bytes, usize>::new(), [0; 4]);
        let mut got: [Vec<usize>; 4] = Default::default();
        let mut now = Duration::from_secs(1);
        net.ports[1..3].iter().for_each(|port| port.room.store(0, Relaxed));
        for (burst, room, passed) in steps {
            if !burst.is_empty() && net.ports[0].to_send.lock().unwrap().is_empty() {
                let burst: Vec<Bytes> = burst
                    .into_iter()
                    .map(|to| {
                        let bytes = [frame(mac(to), mac(0), 37), sent.len().to_le_bytes().to_vec()].concat();
                        sent.insert(bytes.clone(), sent.len());
                        meant[to] += 1;
                        bytes
                    })
                    .collect();
                push(&net.ports[0], &burst);
            }
            for (port, room) in net.ports[1..3].iter().zip(room) {
                room.inspect(|&room| port.room.store(room, Relaxed));
            }
            now += Duration::from_millis(passed);
            carry(&mut net, now);
            for (port, got) in net.ports.iter().zip(&mut got) {
                got.extend(port.got().iter().map(|bytes| sent[bytes]));
            }
        }
        net.ports.iter().for_each(|port| port.room.store(usize::MAX, Relaxed));
        while carry(&mut net, now).0 > 0 {}
        for (port, got) in net.ports.iter().zip(&mut got) {
            got.extend(port.got().iter().map(|bytes| sent[bytes]));
        }
        for to in 1..4 {
            prop_assert!(got[to].is_sorted_by(|a, b| a < b), "{:?}", got[to]);
            prop_assert_eq!(got[to].len() + net.ports[to].full.load(Relaxed), meant[to]);
        }
        prop_assert_eq!(net.ports[3].full.load(Relaxed), 0);
    }
}
