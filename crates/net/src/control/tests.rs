use super::*;
use crate::{moderation::Coalesce, rss::HashTypes};
use std::{slice, time::Duration};

const ALL: u64 = bits::NET_F_CTRL_RX
    | bits::NET_F_CTRL_RX_EXTRA
    | bits::NET_F_CTRL_VLAN
    | bits::NET_F_CTRL_MAC_ADDR
    | bits::NET_F_CTRL_GUEST_OFFLOADS
    | bits::NET_F_MQ
    | bits::NET_F_RSS
    | bits::NET_F_NOTF_COAL
    | bits::NET_F_VQ_NOTF_COAL
    | bits::NET_F_HASH_REPORT
    | bits::NET_F_GUEST_ANNOUNCE
    | bits::NET_F_DEVICE_STATS
    | bits::NET_F_CSUM
    | bits::NET_F_GUEST_CSUM
    | bits::NET_F_GUEST_TSO4
    | bits::NET_F_GUEST_TSO6;
const OWN: MacAddr = MacAddr::local(1);
const OTHER: MacAddr = MacAddr::local(2);
const GROUP: MacAddr = MacAddr([0x33, 0x33, 0, 0, 0, 1]);

const ALL_TYPES: StatisticTypes = StatisticTypes::all();

/// The reply with the statistics of a control queue.
fn cvq(queue: u8, commands: u8, ok: u8) -> Vec<u8> {
    let mut reply = vec![0; 24];
    (reply[0], reply[2], reply[6], reply[8], reply[16]) = (32, queue, 24, commands, ok);
    reply
}

const SOME: Interrupts = Interrupts { packets: 7, micros: 80 };

/// Two of four receive queues.
fn rss() -> Rss {
    Rss { types: HashTypes::all(), unclassified: 0, table: vec![0, 1], transmit: 2, key: vec![7; 40] }
}

/// Queues 0 to 3 run. Each has counted its own frames.
struct Four;

impl Queues for Four {
    fn runs(&self, index: u16) -> bool {
        index < 4
    }

    fn counted(&self, index: u16) -> Snapshot {
        let frames = 100 + u64::from(index);
        let dropped = Snapshot { full: 3, runt: 4, storm: 5, ..Snapshot::default() };
        Snapshot {
            frames,
            bytes: 9,
            kicks: 8,
            notifications: 7,
            partial: 6,
            valid: 2,
            gso: 1,
            gso_bytes: 5000,
            ..dropped
        }
    }
}

fn passes(control: &Control, to: MacAddr) -> bool {
    control.filter().passes(&[&to.0[..], &[0; 54]].concat())
}

/// As Linux does when an interface goes up.
fn up() -> Control {
    let mut control = Control::new(ALL, OWN, 4);
    assert!(passes(&control, OTHER) && control.filter().passes_all(), "no command yet: every frame");
    assert_eq!(control.command(&Command::Promiscuous(false).bytes(), &Four), Ok(Change::Filter));
    assert_eq!(control.command(&Command::AllMulticast(false).bytes(), &Four), Ok(Change::Filter));
    assert_eq!(control.command(&Command::Addresses(&[], &[GROUP]).bytes(), &Four), Ok(Change::Filter));
    control
}

#[test]
fn every_command_is_understood_and_needs_its_feature() {
    let commands = [
        (Command::Promiscuous(true), bits::NET_F_CTRL_RX, Change::Filter),
        (Command::AllMulticast(true), bits::NET_F_CTRL_RX, Change::Filter),
        (Command::AllUnicast(true), bits::NET_F_CTRL_RX_EXTRA, Change::Filter),
        (Command::NoMulticast(true), bits::NET_F_CTRL_RX_EXTRA, Change::Filter),
        (Command::NoUnicast(true), bits::NET_F_CTRL_RX_EXTRA, Change::Filter),
        (Command::NoBroadcast(true), bits::NET_F_CTRL_RX_EXTRA, Change::Filter),
        (Command::Addresses(&[OTHER], &[GROUP]), bits::NET_F_CTRL_RX, Change::Filter),
        (Command::Address(OTHER), bits::NET_F_CTRL_MAC_ADDR, Change::Mac),
        (Command::AddVlan(5), bits::NET_F_CTRL_VLAN, Change::Filter),
        (Command::RemoveVlan(5), bits::NET_F_CTRL_VLAN, Change::Filter),
        (Command::Offloads(0), bits::NET_F_CTRL_GUEST_OFFLOADS, Change::Offloads),
        (Command::Pairs(4), bits::NET_F_MQ, Change::Pairs),
        (Command::Rss(&rss()), bits::NET_F_RSS, Change::Pairs),
        (Command::Hash(&rss()), bits::NET_F_HASH_REPORT, Change::Hash),
        (Command::TransmitInterrupts(SOME), bits::NET_F_NOTF_COAL, Change::Interrupts),
        (Command::ReceiveInterrupts(SOME), bits::NET_F_NOTF_COAL, Change::Interrupts),
        (Command::QueueInterrupts(1, SOME), bits::NET_F_VQ_NOTF_COAL, Change::Interrupts),
        (Command::Announced, bits::NET_F_GUEST_ANNOUNCE, Change::Announced),
        (Command::AskInterrupts(1), bits::NET_F_VQ_NOTF_COAL, Change::Reply([0; 8])),
        (
            Command::AskStatisticTypes,
            bits::NET_F_DEVICE_STATS,
            Change::Statistics(ALL_TYPES.bits().to_le_bytes().into()),
        ),
        (
            Command::AskStatistics(&[(8, StatisticTypes::CVQ)]),
            bits::NET_F_DEVICE_STATS,
            Change::Statistics(cvq(8, 1, 1)),
        ),
    ];
    for (command, feature, change) in commands {
        let bytes = command.bytes();
        assert_eq!(Control::new(ALL, OWN, 4).command(&bytes, &Four), Ok(change), "{command:?}");
        let (class, number) = (bytes[0], bytes[1]);
        let unknown = Err(Refused::Unknown { class, command: number });
        assert_eq!(Control::new(ALL & !feature, OWN, 4).command(&bytes, &Four), unknown, "{command:?}");
        // One byte less or more is not this command.
        let longer = [&bytes[..], &[0]].concat();
        // A longer RSS configuration is what Linux sends.
        let longer = Some(&longer[..]).filter(|_| !matches!(command, Command::Rss(_) | Command::Hash(_)));
        for wrong in std::iter::once(&bytes[..bytes.len() - 1]).chain(longer) {
            let mut control = up();
            let (before, refused) = (control.clone(), Err(Refused::Length { len: wrong.len() }));
            assert_eq!(control.command(wrong, &Four), refused, "{command:?}");
            assert_eq!((control.filter(), control.mac()), (before.filter(), before.mac()), "nothing has changed");
        }
    }
}

#[test]
fn receive_modes_and_tables_decide_what_passes() {
    let mut control = up();
    assert!(passes(&control, OWN) && !passes(&control, OTHER) && passes(&control, GROUP));
    control.command(&Command::Addresses(&[OTHER], &[]).bytes(), &Four).unwrap();
    assert!(passes(&control, OTHER) && !passes(&control, GROUP), "a table replaces the one before");
    control.command(&Command::Address(MacAddr::local(3)).bytes(), &Four).unwrap();
    assert_eq!(control.mac(), MacAddr::local(3));
    assert!(!passes(&control, OWN) && passes(&control, MacAddr::local(3)));
    control.command(&Command::Promiscuous(true).bytes(), &Four).unwrap();
    assert!(passes(&control, GROUP));
}

#[test]
fn offloads_can_be_turned_off_and_on_but_none_that_was_not_negotiated() {
    let mut control = Control::new(ALL, OWN, 4);
    let all = control.support();
    assert!(all.contains(Support::TCP4 | Support::CHECKSUM));
    control.command(&Command::Offloads(bits::NET_F_GUEST_CSUM).bytes(), &Four).unwrap();
    assert_eq!(control.support(), Support::CHECKSUM | Support::VALID);
    let refused = control.command(&Command::Offloads(bits::NET_F_GUEST_UFO).bytes(), &Four);
    assert_eq!(refused, Err(Refused::Value { class: 5, command: 0, value: bits::NET_F_GUEST_UFO }));
    assert_eq!(control.support(), Support::CHECKSUM | Support::VALID);
    control.command(&Command::Offloads(ALL & GUEST_OFFLOAD_BITS).bytes(), &Four).unwrap();
    assert_eq!(control.support(), all);
    // Segmentation requires the checksum.
    control.command(&Command::Offloads(bits::NET_F_GUEST_TSO4).bytes(), &Four).unwrap();
    assert_eq!(control.support(), Support::empty());
}

#[test]
fn wrong_values_are_refused() {
    let table = |unicast: u32, multicast: u32| {
        let mut bytes = Command::Addresses(slice::from_ref(&OTHER), &[]).bytes();
        bytes[2..6].copy_from_slice(&unicast.to_le_bytes());
        bytes[12..16].copy_from_slice(&multicast.to_le_bytes());
        bytes
    };
    let lying = [(2, 0), (u32::MAX, 0), (1, 1), (1, u32::MAX), (0, 0)];
    let wrong = lying.iter().map(|&(unicast, multicast)| table(unicast, multicast)).chain([
        Command::Address(GROUP).bytes(),
        Command::Address(MacAddr([0; 6])).bytes(),
        Command::AddVlan(4096).bytes(),
        vec![RX, RX_PROMISC, 2],
        vec![RX, 6, 1],
        vec![VLAN, 2, 1, 0],
        vec![6, 0, 0, 0],
        vec![RX],
        vec![],
    ]);
    for bytes in wrong {
        let mut control = up();
        let before = control.clone();
        let refused = control.command(&bytes, &Four).expect_err("refused");
        assert!(!refused.to_string().is_empty());
        assert_eq!((control.filter(), control.mac()), (before.filter(), before.mac()), "{bytes:?}");
    }
}

#[test]
fn interrupts_of_one_queue_and_of_all_the_last_command_counts() {
    let mut control = Control::new(ALL, OWN, 4);
    let more = Interrupts { packets: 9, ..SOME };
    let of = |control: &Control| std::array::from_fn(|queue| control.interrupts(queue as u16));
    let mut set = |command: Command<'_>| {
        assert_eq!(control.command(&command.bytes(), &Four), Ok(Change::Interrupts), "{command:?}");
        of(&control)
    };
    // The example of 5.1.6.5.9.
    assert_eq!(set(Command::ReceiveInterrupts(SOME)), [Some(SOME), None, Some(SOME), None]);
    assert_eq!(set(Command::QueueInterrupts(0, more)), [Some(more), None, Some(SOME), None]);
    assert_eq!(set(Command::QueueInterrupts(1, more)), [Some(more), Some(more), Some(SOME), None]);
    assert_eq!(set(Command::TransmitInterrupts(SOME)), [Some(more), Some(SOME), Some(SOME), Some(SOME)]);
    let ask = |control: &mut Control, queue| control.command(&Command::AskInterrupts(queue).bytes(), &Four);
    assert_eq!(ask(&mut control, 0), Ok(Change::Reply(more.bytes())));
    assert_eq!(ask(&mut control, 3), Ok(Change::Reply(SOME.bytes())));
    assert_eq!(Interrupts::from_bytes(more.bytes()), more);
    assert_eq!(more.bytes(), [9, 0, 0, 0, 80, 0, 0, 0], "max_packets, max_usecs");
    // Started again, a queue has what was set for all.
    control.stopped(0);
    assert_eq!(of(&control), [Some(SOME); 4]);
}

#[test]
fn interrupts_that_cannot_be_set() {
    let mut control = Control::new(ALL, OWN, 4);
    let mut refuse = |command: Command<'_>, why| {
        assert_eq!(control.command(&command.bytes(), &Four), Err(why), "{command:?}");
        assert!((0..9).all(|queue| control.interrupts(queue).is_none()), "nothing has changed");
    };
    for queue in [4, u16::MAX] {
        refuse(Command::QueueInterrupts(queue, SOME), Refused::Queue { index: queue });
        refuse(Command::AskInterrupts(queue), Refused::Queue { index: queue });
    }
    let value = |command, micros: u32| Refused::Value { class: 6, command, value: micros.into() };
    for micros in [1_000_001, u32::MAX] {
        let long = Interrupts { micros, ..SOME };
        refuse(Command::TransmitInterrupts(long), value(0, micros));
        refuse(Command::ReceiveInterrupts(long), value(1, micros));
        refuse(Command::QueueInterrupts(0, long), value(2, micros));
    }
    // If one limit is zero, each packet is notified.
    assert_eq!(Interrupts { packets: 0, micros: 5 }.limits(), Coalesce::NONE);
    assert!(Interrupts { packets: 5, micros: 0 }.limits().delay.is_zero());
    assert_eq!(SOME.limits(), Coalesce { packets: 7, bytes: u64::MAX, delay: Duration::from_micros(80) });
}

#[test]
fn the_number_of_pairs_is_one_until_it_is_set_and_never_more_than_there_are() {
    let mut control = Control::new(ALL, OWN, 4);
    assert_eq!(control.pairs(), 1);
    assert_eq!(control.command(&Command::Pairs(3).bytes(), &Four), Ok(Change::Pairs));
    for value in [0, 5, 0x8000, u16::MAX] {
        let refused = Err(Refused::Value { class: 4, command: 0, value: value.into() });
        assert_eq!(control.command(&Command::Pairs(value).bytes(), &Four), refused);
        assert_eq!(control.pairs(), 3);
    }
}

#[test]
fn the_last_way_to_distribute_frames_counts() {
    let mut control = Control::new(ALL, OWN, 4);
    assert_eq!(control.rss(), None);
    assert_eq!(control.command(&Command::Rss(&rss()).bytes(), &Four), Ok(Change::Pairs));
    assert_eq!((control.pairs(), control.rss().map(|known| **known == rss())), (2, Some(true)));
    let wrong = Rss { table: vec![4], ..rss() };
    let refused = Err(Refused::Value { class: 4, command: 1, value: 4 });
    assert_eq!(control.command(&Command::Rss(&wrong).bytes(), &Four), refused);
    assert_eq!((control.pairs(), control.rss().is_some()), (2, true));
    assert_eq!(control.command(&Command::Pairs(3).bytes(), &Four), Ok(Change::Pairs));
    assert_eq!((control.pairs(), control.rss()), (3, None));
}

#[test]
fn hashes_are_reported_as_the_last_command_says() {
    let mut control = Control::new(ALL, OWN, 4);
    assert_eq!(control.hash(), None);
    let other = Rss { types: HashTypes::TCPV4, key: vec![3; 8], ..rss() };
    assert_eq!(control.command(&Command::Hash(&other).bytes(), &Four), Ok(Change::Hash));
    let known = |control: &Control| control.hash().map(|hash| (hash.types, hash.key.clone()));
    assert_eq!(known(&control), Some((other.types, other.key)));
    assert_eq!((control.pairs(), control.rss()), (1, None), "frames are not distributed by it");
    control.command(&Command::Rss(&rss()).bytes(), &Four).unwrap();
    assert_eq!(known(&control), Some((rss().types, rss().key)));
    let wrong = |types, key: usize| Rss { types: HashTypes::from_bits_retain(types), key: vec![0; key], ..rss() };
    for (wrong, value) in [(wrong(1 << 6, 40), 1 << 6), (wrong(1, 41), 41)] {
        let refused = Err(Refused::Value { class: 4, command: 2, value });
        assert_eq!(control.command(&Command::Hash(&wrong).bytes(), &Four), refused);
        assert_eq!(known(&control), Some((rss().types, rss().key)));
    }
}

#[test]
fn statistics_of_each_queue() {
    use StatisticTypes as Types;
    let mut control = Control::new(ALL, OWN, 4);
    let mut ask = |wanted: &[(u16, Types)]| match control.command(&Command::AskStatistics(wanted).bytes(), &Four) {
        Ok(Change::Statistics(reply)) => {
            assert_eq!(reply.len() + 1, Command::AskStatistics(wanted).reply_len());
            Statistics::read(&reply)
        }
        other => panic!("{other:?}"),
    };
    let values = |all: &[Statistics]| -> Vec<(u16, Types, Vec<u64>)> {
        all.iter().map(|one| (one.queue, one.types, one.named().map(|(_, value)| value).collect())).collect()
    };
    let receive = ask(&[(2, Types::RX_BASIC | Types::RX_CSUM | Types::RX_GSO)]);
    let expected = [
        (2, Types::RX_BASIC, vec![8, 102, 9, 7, 12, 3]),
        (2, Types::RX_CSUM, vec![2, 6, 94, 0]),
        (2, Types::RX_GSO, vec![1, 5000, 0, 0]),
    ];
    assert_eq!(values(&receive), expected);
    assert_eq!((receive[0].get("rx_drop_overruns"), receive[0].get("tx_drops")), (Some(3), None));
    let several =
        ask(&[(1, Types::TX_BASIC | Types::TX_CSUM), (8, Types::CVQ), (0, Types::empty()), (3, Types::TX_CSUM)]);
    let expected = [
        (1, Types::TX_BASIC, vec![8, 101, 9, 7, 12, 4]),
        (1, Types::TX_CSUM, vec![95, 6]),
        (8, Types::CVQ, vec![2, 2]),
        (3, Types::TX_CSUM, vec![97, 6]),
    ];
    assert_eq!(values(&several), expected);
    assert_eq!(ask(&[]), []);
    // What was cut short, or is not known, ends the list.
    let mut reply = [cvq(8, 1, 1), cvq(8, 2, 2)].concat();
    assert_eq!(Statistics::read(&reply).len(), 2);
    assert_eq!(Statistics::read(&reply[..47]).len(), 1);
    for (at, value) in [(24, 33), (24, 255), (30, 0), (30, 32)] {
        let before = std::mem::replace(&mut reply[at], value);
        assert_eq!(Statistics::read(&reply).len(), 1, "{at}");
        reply[at] = before;
    }
}

#[test]
fn statistics_that_cannot_be_obtained() {
    use StatisticTypes as Types;
    let request = |queue: u16, types: u64| [&[8, 1][..], &queue.to_le_bytes(), &[0; 6], &types.to_le_bytes()].concat();
    let value = |value| Refused::Value { class: 8, command: 1, value };
    for (queue, types, why) in [
        (9, 0, Refused::NoQueue { index: 9 }),
        (u16::MAX, 1, Refused::NoQueue { index: u16::MAX }),
        (0, 1 << 3, value(1 << 3)),
        (0, 1 << 63 | 1, value(1 << 63 | 1)),
        (0, Types::TX_BASIC.bits(), value(1 << 16)),
        (1, Types::RX_BASIC.bits(), value(1)),
        (1, 1 << 18, value(1 << 18)),
        (7, Types::CVQ.bits(), value(1 << 32)),
        (8, Types::RX_BASIC.bits(), value(1)),
    ] {
        let mut control = Control::new(ALL, OWN, 4);
        assert_eq!(control.command(&request(queue, types), &Four), Err(why));
        // One that is wrong fails all.
        let both = [request(0, 1), request(queue, types)[2..].to_vec()].concat();
        assert_eq!(control.command(&both, &Four), Err(why));
        let ask = Command::AskStatistics(&[(8, Types::CVQ)]).bytes();
        assert_eq!(control.command(&ask, &Four), Ok(Change::Statistics(cvq(8, 3, 1))), "two commands have failed");
    }
    // Without a feature, its statistics are not there; the control queue of one pair is queue 2.
    let types = |acked| match Control::new(acked, OWN, 1).command(&[8, 0], &Four) {
        Ok(Change::Statistics(types)) => Types::from_bits_retain(u64::from_le_bytes(types.try_into().unwrap())),
        other => panic!("{other:?}"),
    };
    let basic = Types::RX_BASIC | Types::TX_BASIC | Types::CVQ;
    assert_eq!(types(bits::NET_F_DEVICE_STATS), basic);
    assert_eq!(types(bits::NET_F_DEVICE_STATS | bits::NET_F_CSUM), basic | Types::TX_CSUM);
    let mut control = Control::new(bits::NET_F_DEVICE_STATS, OWN, 4);
    assert_eq!(control.command(&request(0, 2), &Four), Err(value(2)));
    assert_eq!(control.command(&request(2, 1 << 32), &Four), Ok(Change::Statistics(cvq(2, 2, 1))));
    assert_eq!(control.command(&request(3, 1 << 16), &Four), Err(Refused::NoQueue { index: 3 }));
}
