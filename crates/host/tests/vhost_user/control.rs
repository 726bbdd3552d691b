//! Commands on the control queue: what the guest receives afterwards, and what the device refuses.

use crate::{LAYOUTS, NOBODY, common::*};
use ringroad_frame::{Flow, offload::Support};
use ringroad_host::{
    PortKind,
    vhost_user::{CommandError, Connection},
};
use ringroad_net::{
    Features, bits,
    control::{Command, StatisticTypes},
    rss::{HashReport, HashTypes, Rss},
};
use ringroad_wire::ethernet::MacAddr;
use std::time::Duration;

const OURS: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x77]);
const GROUP: MacAddr = MacAddr([0x33, 0x33, 0, 0, 0, 7]);

fn command(connection: &mut Connection, command: Command<'_>) {
    connection.command(&command, PATIENCE).unwrap_or_else(|error| panic!("{command:?}: {error}"));
}

/// Receives frames until nothing is expected any more: frames that were sent before one to OURS, which is received, too. Returns to
/// which addresses they were sent.
fn received(connection: &mut Connection, from: &mut Guest) -> Vec<MacAddr> {
    from.send_to(OURS);
    let mut all = Vec::new();
    assert!(within(PATIENCE, || {
        let receive = connection.driver.rx[0].receive(true, |frame| all.push(MacAddr(frame[0].array(0).unwrap())));
        receive.unwrap();
        connection.rx[0].kick();
        all.last() == Some(&OURS)
    }));
    all.pop();
    all
}

#[test]
fn the_guest_receives_what_it_has_asked_for() {
    let all = [NOBODY, MacAddr::BROADCAST, GROUP];
    for layout in LAYOUTS {
        let rig = Rig::new(&format!("control{layout:x}"));
        let mut other = rig.guest(1, SPLIT);
        let mut connection = rig.connector(layout | Features::CONTROL.bits()).connect().unwrap();
        let offered = Features::CONTROL - Features::MQ - Features::RSS;
        assert_eq!(connection.acked & Features::CONTROL.bits(), offered.bits(), "there is one pair of queues");
        let mut passing = |connection: &mut Connection| {
            for to in all {
                other.send_to(to);
            }
            received(connection, &mut other)
        };
        assert_eq!(passing(&mut connection), all, "no command yet");
        command(&mut connection, Command::Address(OURS));
        command(&mut connection, Command::Promiscuous(false));
        assert_eq!(passing(&mut connection), [MacAddr::BROADCAST]);
        assert_eq!(rig.report(0).sent.filtered, 2);
        command(&mut connection, Command::Addresses(&[NOBODY], &[GROUP]));
        assert_eq!(passing(&mut connection), all);
        command(&mut connection, Command::NoBroadcast(true));
        assert_eq!(passing(&mut connection), [NOBODY, GROUP]);
        command(&mut connection, Command::Promiscuous(true));
        assert_eq!(passing(&mut connection), all);
        // The next driver starts over.
        command(&mut connection, Command::Promiscuous(false));
        drop(connection);
        let mut connection = rig.connector(layout | Features::CONTROL.bits()).connect().unwrap();
        assert_eq!(passing(&mut connection), all);
        assert_eq!((rig.faults(), rig.report(0).sent.dropped()), (0, 0));
    }
}

#[test]
fn offloads_change_while_it_runs() {
    let rig = Rig::new("control-offloads");
    let offloads = bits::NET_F_GUEST_CSUM | bits::NET_F_GUEST_TSO4;
    let mut connection = rig.connector(PACKED | Features::CONTROL.bits() | offloads).connect().unwrap();
    let takes = || rig.servers[0].handle().port().kind().takes();
    assert_eq!(takes(), Support::CHECKSUM | Support::VALID | Support::TCP4);
    command(&mut connection, Command::Offloads(0));
    assert_eq!(takes(), Support::empty());
    command(&mut connection, Command::Offloads(bits::NET_F_GUEST_CSUM));
    assert_eq!(takes(), Support::CHECKSUM | Support::VALID);
    let refused = connection.command(&Command::Offloads(bits::NET_F_GUEST_UFO), PATIENCE);
    assert!(matches!(refused, Err(CommandError::Refused)), "{refused:?}");
    assert_eq!(takes(), Support::CHECKSUM | Support::VALID);
    logged(&rig.victim(), &["refused a command on the control queue", "value 0x400"]);
    assert_eq!(connection.stop(), Some(0));
    assert_eq!(takes(), Support::empty());
}

#[test]
fn commands_that_are_refused_or_come_too_fast() {
    let rig = Rig::new("control-refused");
    let mut connection = rig.connector(SPLIT | bits::NET_F_CTRL_VQ | bits::NET_F_CTRL_MAC_ADDR).connect().unwrap();
    for wrong in [Command::Promiscuous(true), Command::AddVlan(1), Command::Address(GROUP)] {
        let refused = connection.command(&wrong, PATIENCE);
        assert!(matches!(refused, Err(CommandError::Refused)), "{wrong:?}: {refused:?}");
    }
    let many = vec![OURS; 3000];
    let long = connection.command(&Command::Addresses(&many, &[]), PATIENCE);
    assert!(matches!(long, Err(CommandError::Busy)), "longer than a command may be");
    // Two hundred in a row take at least the time of the pauses in between, and harm nobody.
    let (start, mut others) = (std::time::Instant::now(), rig.others());
    for _ in 0..200 {
        command(&mut connection, Command::Address(OURS));
    }
    assert!(start.elapsed() > Duration::from_millis(150), "{:?}", start.elapsed());
    others.work();
    let mut without = {
        drop(connection);
        rig.connector(SPLIT).connect().unwrap()
    };
    assert!(matches!(without.command(&Command::Address(OURS), PATIENCE), Err(CommandError::NoQueue)));
    assert_eq!(rig.faults(), 0);
}

#[test]
fn the_guest_reads_what_was_counted() {
    use StatisticTypes as Types;
    for layout in LAYOUTS {
        let rig = Rig::new(&format!("control-statistics{layout:x}"));
        let mut other = rig.guest(1, SPLIT);
        let offloads = bits::NET_F_CSUM | bits::NET_F_GUEST_CSUM;
        let mut connection = rig.connector(layout | Features::CONTROL.bits() | offloads).connect().unwrap();
        let types = Types::all() - Types::RX_GSO;
        assert_eq!(connection.statistic_types(PATIENCE).unwrap(), types);
        for _ in 0..7 {
            other.send_to(NOBODY);
        }
        received(&mut connection, &mut other);
        let wanted = [(0, Types::RX_BASIC | Types::RX_CSUM), (1, Types::TX_BASIC | Types::TX_CSUM), (2, Types::CVQ)];
        let all = connection.statistics(&wanted, PATIENCE).unwrap();
        let [receive, checksums, transmit, _, control] = &all[..] else { panic!("{all:?}") };
        let report = rig.report(0).sent;
        assert_eq!(receive.get("rx_packets"), Some(8));
        assert_eq!(receive.get("rx_bytes"), Some(report.bytes));
        assert_eq!((receive.get("rx_drops"), checksums.get("rx_csum_none")), (Some(0), Some(8)));
        assert!(receive.get("rx_interrupts").is_some_and(|count| count > 0 && count <= 8));
        assert_eq!(transmit.get("tx_packets"), Some(0));
        assert!(transmit.get("tx_notifications").is_some_and(|count| count > 0), "the kick when it connected");
        assert_eq!((control.get("command_num"), control.get("ok_num")), (Some(2), Some(2)));
        for wrong in [(3, Types::CVQ), (0, Types::TX_BASIC), (0, Types::RX_GSO)] {
            let refused = connection.statistics(&[wrong], PATIENCE);
            assert!(matches!(refused, Err(CommandError::Refused)), "{wrong:?}: {refused:?}");
        }
        let all = connection.statistics(&[(2, Types::CVQ)], PATIENCE).unwrap();
        assert_eq!((all[0].get("command_num"), all[0].get("ok_num")), (Some(6), Some(3)));
        assert_eq!(rig.faults(), 0);
    }
}

#[test]
fn the_hash_of_a_frame_is_in_its_header() {
    let features = bits::NET_F_CTRL_VQ | bits::NET_F_HASH_REPORT;
    for layout in LAYOUTS {
        let rig = Rig::new(&format!("control-hash{layout:x}"));
        let mut other = rig.guest(1, SPLIT);
        let mut connection = rig.connector(layout | features).connect().unwrap();
        assert_eq!(connection.acked & features, features);
        let ip = [8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9, 0, 26, 0, 0];
        let udp = [&OURS.0[..], &other.mac.0, &ip, &[5; 18]].concat();
        let other_kind = [&OURS.0[..], &other.mac.0, &[0x88, 0xb6], &[6; 46]].concat();
        let mut report = |connection: &mut Connection, frame: &[u8]| {
            assert!(other.add_frame(frame));
            let _ = other.vrings[1].kick.write(1);
            let mut found = None;
            let receive = |connection: &mut Connection, found: &mut Option<HashReport>| {
                let received = connection.driver.rx[0].receive_hashed(|report, parts| {
                    let mut bytes = vec![0; parts[0].len()];
                    parts[0].read(&mut bytes);
                    assert_eq!(bytes, frame);
                    *found = Some(report);
                });
                received.unwrap();
            };
            within(PATIENCE, || {
                receive(connection, &mut found);
                found.is_some()
            });
            found.expect("a frame")
        };
        assert_eq!(report(&mut connection, &udp), HashReport::NONE, "no command yet");
        let key = (1..=40).collect::<Vec<u8>>();
        let mut rss = Rss { types: HashTypes::all(), unclassified: 0, table: vec![0], transmit: 1, key };
        let flow = Flow::parse(&udp).unwrap();
        for types in [HashTypes::all(), HashTypes::IPV4] {
            rss.types = types;
            command(&mut connection, Command::Hash(&rss));
            let found = report(&mut connection, &udp);
            assert_eq!(found, rss.report(&flow));
            assert_eq!(found.types, types & if types.is_all() { HashTypes::UDPV4 } else { HashTypes::IPV4 });
            assert_eq!(report(&mut connection, &other_kind), HashReport::NONE);
        }
        // The header of sent frames is as long.
        let frame = [&other.mac.0[..], &OURS.0, &[0x88, 0xb5], &9u64.to_be_bytes(), &[7; 42]].concat();
        assert_eq!(connection.driver.tx[0].add_behind(1, |_, place| place.write(&frame)), 1);
        connection.driver.tx[0].publish();
        connection.tx[0].kick();
        assert!(other.receives(OURS, 9));
        assert_eq!((rig.faults(), rig.report(0).sent.dropped(), rig.report(0).received.dropped()), (0, 0, 0));
    }
}
