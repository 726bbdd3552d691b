//! Guests with several pairs of queues: which of them they use, and which flows arrive where.

use crate::{LAYOUTS, common::*};
use ringroad_host::vhost_user::{CommandError, Connection, Connector, VhostConfig};
use ringroad_net::{
    Config, Features, bits,
    control::Command,
    rss::{HashTypes, Rss},
};
use ringroad_wire::ethernet::MacAddr;

const PAIRS: u16 = 4;
const OURS: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x77]);

/// Three ports, the first with several pairs.
fn rig(name: &str) -> Rig {
    Rig::with(name, |config| VhostConfig { config: Config { queue_pairs: PAIRS, ..CONFIG }, ..config })
}

fn connect(rig: &Rig, features: u64) -> Connection {
    Connector { queue_pairs: PAIRS, ..rig.connector(features) }.connect().unwrap()
}

fn use_pairs(connection: &mut Connection, pairs: u16) {
    connection.command(&Command::Pairs(pairs), PATIENCE).unwrap();
}

/// UDP from one address to another with these ports.
fn udp(to: MacAddr, from: MacAddr, hosts: [u8; 2], ports: [u16; 2]) -> Vec<u8> {
    let [source, destination] = hosts.map(|host| [10, 0, 0, host]);
    let ip = [0x45, 0, 0, 46, 0, 1, 0, 0, 64, 17, 0, 0];
    let ports = ports.map(u16::to_be_bytes);
    [&to.0[..], &from.0, &[8, 0], &ip, &source, &destination, ports.as_flattened(), &[0, 26, 0, 0], &[7; 18]].concat()
}

/// Another guest sends a frame of each of these flows, by port number, to OURS. Returns at which queue each arrives.
fn arrive(connection: &mut Connection, other: &mut Guest, flows: std::ops::Range<u16>) -> Vec<usize> {
    let mut queues = vec![usize::MAX; flows.len()];
    // Fewer at once than a ring has room for, whichever queue they go to.
    for part in (flows.start..flows.end).collect::<Vec<_>>().chunks(32) {
        for &port in part {
            let frame = udp(OURS, other.mac, [1, 2], [port, 5201]);
            assert!(within(PATIENCE, || other.add_frame(&frame)));
            let _ = other.vrings[1].kick.write(1);
        }
        let arrived = |queues: &[usize]| part.iter().all(|port| queues[usize::from(port - flows.start)] < usize::MAX);
        assert!(within(PATIENCE, || {
            for (index, rx) in connection.driver.rx.iter_mut().enumerate() {
                let count = rx.receive(true, |frame| {
                    let port = frame[0].array(34).map(u16::from_be_bytes).unwrap();
                    let place = &mut queues[usize::from(port - flows.start)];
                    assert_eq!(std::mem::replace(place, index), usize::MAX, "once");
                });
                if count.unwrap() > 0 {
                    connection.rx[index].kick();
                }
            }
            arrived(&queues)
        }));
    }
    queues
}

fn send(connection: &mut Connection, queue: usize, frame: &[u8]) {
    let tx = &mut connection.driver.tx[queue];
    let _ = tx.reclaim().unwrap();
    assert_eq!(tx.add_behind(1, |_, place| place.write(frame)), 1);
    tx.publish();
    connection.tx[queue].kick();
}

#[test]
fn the_driver_uses_as_many_queues_as_it_says() {
    for layout in LAYOUTS {
        let rig = rig(&format!("pairs{layout:x}"));
        let mut other = rig.guest(1, SPLIT);
        let mut connection = connect(&rig, layout | Features::CONTROL.bits());
        assert_ne!(connection.acked & bits::NET_F_MQ, 0);
        send(&mut connection, 0, &udp(MacAddr::BROADCAST, OURS, [2, 1], [1, 1]));
        assert!(within(PATIENCE, || rig.report(1).sent.frames > 0));
        assert_eq!(arrive(&mut connection, &mut other, 1000..1100), [0; 100], "the first queue, if it says nothing");
        use_pairs(&mut connection, PAIRS);
        let spread = arrive(&mut connection, &mut other, 1000..1100);
        (0..4).for_each(|queue| assert!(spread.contains(&queue), "{spread:?}"));
        assert_eq!(arrive(&mut connection, &mut other, 1000..1100), spread, "flows stay where they are");
        // Fewer again, and refused numbers change nothing.
        use_pairs(&mut connection, 2);
        for wrong in [0, PAIRS + 1, u16::MAX] {
            let refused = connection.command(&Command::Pairs(wrong), PATIENCE);
            assert!(matches!(refused, Err(CommandError::Refused)), "{wrong}: {refused:?}");
        }
        let spread = arrive(&mut connection, &mut other, 1000..1100);
        assert!(spread.contains(&0) && spread.contains(&1) && spread.iter().all(|&queue| queue < 2), "{spread:?}");
        assert_eq!(rig.faults(), 0);
    }
}

#[test]
fn flows_return_to_the_queue_that_they_came_from() {
    let rig = rig("steering");
    let mut other = rig.guest(1, SPLIT);
    let mut connection = connect(&rig, PACKED | Features::CONTROL.bits());
    use_pairs(&mut connection, PAIRS);
    let before = arrive_after(&rig, &mut connection, &mut other, 0);
    for turn in 1..4 {
        let after = arrive_after(&rig, &mut connection, &mut other, turn);
        let moved = before.iter().map(|queue| (queue + turn) % 4);
        assert!(after.iter().copied().eq(moved), "{before:?}, {after:?}");
    }
    assert_eq!(rig.faults(), 0);
}

/// Flow i answers from queue i + turn; returns where the next frames of these flows arrive.
fn arrive_after(rig: &Rig, connection: &mut Connection, other: &mut Guest, turn: usize) -> Vec<usize> {
    let sent = rig.report(1).sent.frames;
    for flow in 0..16 {
        send(connection, (flow + turn) % 4, &udp(other.mac, OURS, [2, 1], [5201, 2000 + flow as u16]));
    }
    assert!(within(PATIENCE, || rig.report(1).sent.frames == sent + 16));
    let _ = other.driver.rx[0].receive(false, |_| ());
    arrive(connection, other, 2000..2016)
}

#[test]
fn without_the_feature_the_control_queue_is_behind_the_first_pair() {
    let rig = rig("pairs-not");
    let mut other = rig.guest(1, SPLIT);
    let mut connection =
        rig.connector(SPLIT | (Features::CONTROL - Features::MQ - Features::RSS).bits()).connect().unwrap();
    connection.command(&Command::Address(OURS), PATIENCE).unwrap();
    let refused = connection.command(&Command::Pairs(1), PATIENCE);
    assert!(matches!(refused, Err(CommandError::Refused)), "{refused:?}");
    send(&mut connection, 0, &udp(MacAddr::BROADCAST, OURS, [2, 1], [1, 1]));
    assert!(within(PATIENCE, || rig.report(1).sent.frames > 0));
    assert_eq!(arrive(&mut connection, &mut other, 1000..1008), [0; 8]);
    // A driver without a control queue uses what runs, as QEMU's and DPDK's do.
    drop(connection);
    let mut connection = connect(&rig, SPLIT);
    let spread = arrive(&mut connection, &mut other, 1000..1100);
    (0..4).for_each(|queue| assert!(spread.contains(&queue), "{spread:?}"));
    assert_eq!(rig.faults(), 0);
}

#[test]
fn frames_go_to_the_queues_that_the_driver_says() {
    let rig = rig("rss");
    let mut other = rig.guest(1, SPLIT);
    let mut connection = connect(&rig, SPLIT | Features::CONTROL.bits());
    let types = HashTypes::all();
    let rss = Rss { types, unclassified: 3, table: vec![1, 2, 1, 2], transmit: 4, key: vec![0x5a; 40] };
    let set = |connection: &mut Connection, rss: &Rss| connection.command(&Command::Rss(rss), PATIENCE);
    set(&mut connection, &rss).unwrap();
    let spread = arrive(&mut connection, &mut other, 1000..1100);
    assert!(spread.contains(&1) && spread.contains(&2), "{spread:?}");
    assert!(spread.iter().all(|queue| [1, 2].contains(queue)), "{spread:?}");
    // Frames of no type that is hashed, and of none at all.
    set(&mut connection, &Rss { types: HashTypes::TCPV4, ..rss.clone() }).unwrap();
    assert_eq!(arrive(&mut connection, &mut other, 1000..1010), [3; 10]);
    let before = rig.report(0).sent.frames;
    other.send_to(OURS);
    assert!(within(PATIENCE, || rig.report(0).sent.frames > before));
    assert_eq!(connection.driver.rx[3].receive(true, |_| ()).unwrap(), 1);
    // What is refused changes nothing; the number of pairs ends it.
    let refused = set(&mut connection, &Rss { table: vec![4], ..rss });
    assert!(matches!(refused, Err(CommandError::Refused)), "{refused:?}");
    assert_eq!(arrive(&mut connection, &mut other, 1000..1010), [3; 10]);
    use_pairs(&mut connection, 1);
    assert_eq!(arrive(&mut connection, &mut other, 1000..1010), [0; 10]);
    assert_eq!(rig.faults(), 0);
}
