//! What a port may do to the others: addresses, floods, link-local frames, long bursts, panics.

mod common;

use common::*;
use ringroad_ring::BURST;
use ringroad_switch::{Claim, Dropped, Limits, Rate, Wait};
use ringroad_wire::ethernet::MacAddr;
use std::{sync::atomic::Ordering::Relaxed, time::Duration};

const NONE: [usize; 0] = [];

/// Ports that may do what is usual, and one more.
fn limits(changes: impl Fn(&mut Limits)) -> Limits {
    let mut limits = Limits::default();
    changes(&mut limits);
    limits
}

#[test]
fn an_address_in_use_is_not_taken_by_who_sends_with_it() {
    let mut net = Net::new(4);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    // Port 2 sends with the address of port 1, again and again, while port 1 is heard now and then.
    for now in 0..100 {
        net.now = now;
        net.send_one(1, mac(9), mac(1));
        assert_eq!(net.send_one(2, MacAddr::BROADCAST, mac(1)), [0, 1, 3]);
        assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    }
    let claims = std::mem::take(&mut *net.ports[2].claims.lock().unwrap());
    assert_eq!(claims.len(), 100);
    assert!(claims.iter().all(|&(address, claim, _)| (address, claim) == (mac(1), Claim::Held)));
    assert_eq!(claims.iter().filter(|(_, _, tell)| *tell).count(), 5, "a few, and one a minute");
    // It waits until port 1 is silent: that one has it back as soon as it speaks.
    net.now += HOLD;
    net.send_one(2, MacAddr::BROADCAST, mac(1));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [2]);
    net.send_one(1, mac(9), mac(1));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
}

#[test]
fn a_ports_own_address_is_nobody_elses() {
    let own = limits(|limits| limits.own = Some(mac(1)));
    let mut net = Net::limited(&[Limits::default(), own, Limits::default(), own]);
    assert_eq!(*net.ports[3].claims.lock().unwrap(), [(mac(1), Claim::Owned, true)], "two ports with one address");
    for now in [0, 1000, 100_000] {
        net.now = now;
        assert_eq!(net.send_one(0, mac(1), mac(0)), [1], "known before it has sent anything");
        assert_eq!(net.send_one(2, mac(0), mac(1)), NONE);
        assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
        net.switch.forget(1);
    }
    assert_eq!(net.ports[2].lost(Dropped::Spoofed), 3);
    // It may have others, which are not its own.
    assert_eq!(net.send_one(1, mac(0), mac(7)), [0]);
    // When the port is gone, so is its claim.
    net.switch.remove(1);
    assert_eq!(net.send_one(2, mac(0), mac(1)), [0]);
}

#[test]
fn a_fixed_port_sends_from_its_own_address_only() {
    let fixed = limits(|limits| (limits.fixed, limits.own) = (true, Some(mac(1))));
    let nameless = limits(|limits| limits.fixed = true);
    let mut net = Net::limited(&[Limits::default(), fixed, nameless]);
    let frames = [mac(1), mac(2), mac(1), GROUP, mac(0)].map(|source| frame(MacAddr::BROADCAST, source, 0));
    let good = vec![frames[0].clone(), frames[2].clone()];
    assert_eq!(net.send(1, &frames), [good.clone(), vec![], good]);
    assert_eq!(net.ports[1].lost(Dropped::Spoofed), 3);
    assert_eq!(net.send_one(2, mac(1), mac(2)), NONE);
    assert_eq!(net.switch.fdb().len(0), 1);
    // Other limits hold from now on.
    net.switch.limit(1, Limits::default());
    assert_eq!(net.send_one(1, MacAddr::BROADCAST, mac(2)), [0, 2]);
}

/// A source is looked up once for consecutive frames of it: what it may applies to each, and to no other's.
#[test]
fn consecutive_frames_of_one_source_to_several_destinations() {
    let fixed = limits(|limits| (limits.fixed, limits.own) = (true, Some(mac(1))));
    let mut net = Net::limited(&[Limits::default(), fixed, Limits::default()]);
    net.send_one(0, MacAddr::BROADCAST, mac(0));
    net.send_one(2, MacAddr::BROADCAST, mac(2));
    let [good, bad] = [mac(1), mac(7)];
    let frames = [(0, good), (2, good), (0, bad), (2, bad), (2, good), (0, bad), (0, good)]
        .map(|(to, source)| frame(mac(to), source, 0));
    let [to_0, to_2] = [[0, 6], [1, 4]].map(|which| which.map(|index: usize| frames[index].clone()).to_vec());
    assert_eq!(net.send(1, &frames), [to_0, vec![], to_2]);
    assert_eq!(net.ports[1].lost(Dropped::Spoofed), 3);
    assert_eq!(net.switch.fdb().len(0), 3, "the refused source is not learned");
}

#[test]
fn a_port_that_invents_addresses_takes_nobody_elses_room() {
    let mut net = Net::new(4);
    // As many addresses as there are frames, for a while.
    for round in 0..2000 {
        let frames: Vec<_> = (0..BURST).map(|number| frame(mac(9), mac(1000 + round * BURST + number), 0)).collect();
        net.now = round as u32 / 500;
        net.send(3, &frames);
    }
    assert!(net.switch.fdb().len(3) <= 256, "{}", net.switch.fdb().len(3));
    assert!(net.ports[3].crowded.load(Relaxed) >= 2000 * BURST - 256);
    // The others are learned as ever, and nobody sees what is for them.
    for port in 0..3 {
        net.send_one(port, MacAddr::BROADCAST, mac(port));
    }
    for port in 0..3 {
        assert_eq!(net.send_one((port + 1) % 3, mac(port), mac((port + 1) % 3)), [port]);
    }
}

#[test]
fn so_many_frames_to_everybody_and_no_more() {
    let few = limits(|limits| limits.storm = 1000);
    let none = limits(|limits| limits.storm = 0);
    let mut net = Net::limited(&[few, none, Limits::default()]);
    net.send_one(2, MacAddr::BROADCAST, mac(2));
    let second = |net: &mut Net, from: usize, destination| -> usize {
        net.now += 1;
        let frames: Vec<_> = (0..BURST).map(|number| frame(destination, mac(from), number)).collect();
        (0..50).map(|_| net.send(from, &frames)[2].len()).sum()
    };
    for destination in [MacAddr::BROADCAST, GROUP, mac(77)] {
        assert_eq!(second(&mut net, 0, destination), BURST, "the clock stands still within a second: a burst's worth");
        assert_eq!(second(&mut net, 1, destination), 50 * BURST);
    }
    assert_eq!(net.ports[0].lost(Dropped::Storm), 3 * 49 * BURST);
    assert_eq!(net.ports[1].lost(Dropped::Storm), 0);
    // What is addressed to somebody is no storm; nor is what goes to one port only.
    assert_eq!(second(&mut net, 0, mac(2)), 50 * BURST);
    net.switch.remove(1);
    assert_eq!(second(&mut net, 0, MacAddr::BROADCAST), 50 * BURST);
}

#[test]
fn link_local_frames_go_where_both_ends_let_them() {
    let open = limits(|limits| limits.link_local = true);
    let mut net = Net::limited(&[Limits::default(), open, open, Limits::default()]);
    for last in 0..=0x10 {
        let group = MacAddr([0x01, 0x80, 0xc2, 0, 0, last]);
        let (shut, open) = if last < 0x10 { (vec![], vec![2]) } else { (vec![1, 2, 3], vec![0, 2, 3]) };
        assert_eq!(net.send_one(0, group, mac(0)), shut, "{group}");
        assert_eq!(net.send_one(1, group, mac(1)), open, "{group}");
    }
    assert_eq!([0, 1].map(|port| net.ports[port].lost(Dropped::LinkLocal)), [16, 0]);
}

#[test]
fn a_burst_that_goes_to_many_ports_is_heavy() {
    for (ports, heavy) in [(3, false), (4, false), (5, true)] {
        let mut net = Net::new(ports);
        let frames: Vec<_> = (0..BURST).map(|number| frame(MacAddr::BROADCAST, mac(0), number)).collect();
        net.ports[0].to_send.lock().unwrap().push_back(frames);
        let work = net.switch.carry(0, 0, Duration::ZERO);
        assert_eq!((work.frames, work.heavy), (BURST, heavy), "{ports} ports");
    }
}

#[test]
fn a_panic_of_a_port_is_that_ports_end() {
    for place in [Panics::Lease, Panics::Take, Panics::Done, Panics::Put, Panics::Settle, Panics::Drop, Panics::Always]
    {
        let mut net = Net::new(4);
        (0..4).for_each(|port| drop(net.send_one(port, MacAddr::BROADCAST, mac(port))));
        net.switch.settle(Duration::ZERO);
        *net.ports[3].panics.lock().unwrap() = Some(place);
        // It sends and is sent to; the others do not notice.
        let done = net.ports[0].done.load(Relaxed);
        for round in 0..10 {
            net.ports[3].to_send.lock().unwrap().push_back(vec![frame(mac(0), mac(3), round)]);
            net.carry(3, 0);
            net.ports[0].got();
            net.switch.settle(Duration::ZERO);
            assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
            let mut flooded = net.send_one(0, MacAddr::BROADCAST, mac(0));
            flooded.retain(|&port| port < 3);
            assert_eq!(flooded, [1, 2]);
            net.switch.settle(Duration::ZERO);
        }
        assert_eq!(net.ports[0].done.load(Relaxed) - done, 20, "who sent to it has its buffers back");
        let fell = std::mem::take(&mut *net.ports[3].fell.lock().unwrap());
        assert!(fell.len() == 1 && fell[0].starts_with("a bug at "), "{place:?}: {fell:?}");
        assert!(!net.ports[3].leased.load(Relaxed));
        assert!((0..3).all(|port| net.ports[port].fell.lock().unwrap().is_empty()));
        // It takes no part until it begins anew.
        let puts = net.ports[3].sinks.load(Relaxed);
        net.send_one(0, mac(3), mac(0));
        assert_eq!((net.carry(3, 0), net.ports[3].sinks.load(Relaxed)), (0, puts));
        *net.ports[3].panics.lock().unwrap() = None;
        net.ports[3].to_send.lock().unwrap().clear();
        net.switch.forget(3);
        assert_eq!(net.send_one(3, mac(0), mac(3)), [0]);
        assert_eq!(net.send_one(0, mac(3), mac(0)), [3]);
    }
}

#[test]
fn isolated_ports_reach_only_others() {
    let apart = limits(|limits| limits.isolated = true);
    let mut net = Net::limited(&[apart, apart, limits(|_| {})]);
    // Before the addresses are known, and afterwards.
    assert_eq!(net.send_one(0, MacAddr::BROADCAST, mac(0)), [2]);
    assert_eq!(net.send_one(1, MacAddr::BROADCAST, mac(1)), [2]);
    assert_eq!(net.send_one(2, MacAddr::BROADCAST, mac(2)), [0, 1]);
    assert_eq!(net.send_one(0, mac(1), mac(0)), NONE);
    assert_eq!(net.ports[0].lost(Dropped::Isolated), 1);
    assert_eq!(net.send_one(0, mac(2), mac(0)), [2]);
    assert_eq!(net.send_one(2, mac(0), mac(2)), [0]);
    // One of them not any more.
    net.switch.limit(1, limits(|_| {}));
    assert_eq!(net.send_one(0, mac(1), mac(0)), [1]);
    assert_eq!(net.send_one(1, mac(0), mac(1)), [0]);
    assert_eq!(net.ports[1].lost(Dropped::Isolated), 0);
}

#[test]
fn two_isolated_ports_have_nowhere_to_send() {
    let apart = limits(|limits| limits.isolated = true);
    let mut net = Net::limited(&[apart, apart]);
    for pours in [false, true] {
        net.ports[0].pours.store(pours, Relaxed);
        assert_eq!(net.send_one(0, MacAddr::BROADCAST, mac(0)), NONE);
        assert_eq!(net.send_one(0, mac(1), mac(0)), NONE);
    }
}

#[test]
fn what_is_beyond_the_rate_stays_with_the_sender() {
    let rate = Rate { bits: 0, frames: 1000, burst: Duration::from_millis(4) };
    let mut net = Net::limited(&[limits(|limits| limits.rate = rate), limits(|_| {}), limits(|_| {})]);
    net.send_one(1, MacAddr::BROADCAST, mac(1));
    for pours in [false, true] {
        net.ports[0].pours.store(pours, Relaxed);
        net.ports[0].retains.store(true, Relaxed);
        let start = Duration::from_secs(if pours { 20 } else { 10 });
        let frames: Vec<_> = (0..3).map(|number| frame(mac(1), mac(0), number)).collect();
        for _ in 0..4 {
            net.ports[0].to_send.lock().unwrap().push_back(frames.clone());
        }
        let carry = |net: &mut Net, now| (net.switch.carry(0, 0, now).frames, net.switch.take_waiting());
        // Five of twelve frames: four were saved up, and the next one is paid for afterwards.
        let at = |micros: u64| start + Duration::from_micros(micros);
        let wait = |micros| Some(Wait { port: None, until: at(micros) });
        assert_eq!(carry(&mut net, start), (3, None));
        assert_eq!(carry(&mut net, start), (2, wait(1000)), "the third one stays");
        assert_eq!(carry(&mut net, start), (0, wait(1000)));
        assert_eq!(carry(&mut net, at(999)), (0, wait(1000)));
        assert_eq!(carry(&mut net, at(1000)), (1, None));
        assert_eq!(carry(&mut net, at(3000)), (2, wait(4000)));
        assert_eq!(carry(&mut net, at(10_000)), (1, None));
        assert_eq!(carry(&mut net, at(10_000)), (3, None));
        assert_eq!(net.ports[1].got().len(), 12, "none was dropped");
        // Another port is not concerned, and a limit that is lifted counts at once.
        assert_eq!(net.send_one(2, mac(1), mac(2)), [1]);
    }
    // A rate that changes begins without debt.
    for rate in [Rate { frames: 1, ..rate }, Rate { frames: 1000, ..rate }, Rate::NONE] {
        net.switch.limit(0, limits(|limits| limits.rate = rate));
        net.ports[0].to_send.lock().unwrap().push_back(vec![frame(mac(1), mac(0), 1)]);
        assert_eq!(net.switch.carry(0, 0, Duration::from_secs(20)).frames, 1);
    }
}

#[test]
fn buffers_without_a_frame_count_towards_the_rate_as_the_shortest_frames() {
    let burst = Duration::from_millis(4);
    // 1000 a second, by their number or by the bits of a frame of 14 bytes.
    for rate in [Rate { bits: 0, frames: 1000, burst }, Rate { bits: 1000 * 8 * 14, frames: 0, burst }] {
        let mut net = Net::limited(&[limits(|limits| limits.rate = rate), limits(|_| {})]);
        net.ports[0].retains.store(true, Relaxed);
        net.send_one(1, MacAddr::BROADCAST, mac(1));
        let mut taken = 0;
        for micros in (0..1_000_000).step_by(500) {
            net.ports[0].refused.store(8, Relaxed);
            taken += net.switch.carry(0, 0, Duration::from_secs(1) + Duration::from_micros(micros)).frames;
        }
        assert!((990..=1020).contains(&taken), "{taken} at {rate:?}");
        // Beside frames, and while frames stay with the sender.
        let at = |millis: u64| Duration::from_secs(9) + Duration::from_millis(millis);
        let carry = |net: &mut Net, millis| (net.switch.carry(0, 0, at(millis)).frames, net.switch.take_waiting());
        let shortest = frame(mac(1), mac(0), 0);
        net.ports[0].to_send.lock().unwrap().push_back(vec![shortest; 7]);
        net.ports[0].refused.store(10, Relaxed);
        assert_eq!(carry(&mut net, 0), (5, Some(Wait { port: None, until: at(1) })));
        assert_eq!(carry(&mut net, 1), (0, Some(Wait { port: None, until: at(11) })), "the ten are paid for first");
        assert_eq!(carry(&mut net, 11), (1, Some(Wait { port: None, until: at(12) })));
        assert_eq!(carry(&mut net, 12), (1, None));
        assert_eq!(net.ports[1].got().len(), 7);
    }
}

#[test]
fn the_queues_of_a_port_take_turns_at_its_rate() {
    let rate = Rate { bits: 0, frames: 1000, burst: Duration::from_millis(1) };
    let mut net = Net::limited(&[limits(|limits| limits.rate = rate), limits(|_| {})]);
    net.ports[0].queues.store(2, Relaxed);
    let mut served = [0; 2];
    for micros in (0..100_000).step_by(100) {
        // Both are polled, always in the same order, and both always have frames.
        for (queue, served) in served.iter_mut().enumerate() {
            net.ports[0].to_send.lock().unwrap().push_back(vec![frame(mac(1), mac(0), 1)]);
            let now = Duration::from_secs(1) + Duration::from_micros(micros);
            *served += net.switch.carry(0, queue, now).frames;
            net.ports[0].to_send.lock().unwrap().clear();
            // The ports of these tests have one lease.
            net.switch.settle(now);
        }
    }
    assert!(served.iter().all(|frames| (45..=56).contains(frames)), "{served:?}");
}
