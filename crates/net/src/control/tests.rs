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
    | bits::NET_F_GUEST_CSUM
    | bits::NET_F_GUEST_TSO4
    | bits::NET_F_GUEST_TSO6;
const OWN: MacAddr = MacAddr::local(1);
const OTHER: MacAddr = MacAddr::local(2);
const GROUP: MacAddr = MacAddr([0x33, 0x33, 0, 0, 0, 1]);

const SOME: Interrupts = Interrupts { packets: 7, micros: 80 };

/// Two of four receive queues.
fn rss() -> Rss {
    Rss { types: HashTypes::all(), unclassified: 0, table: vec![0, 1], transmit: 2, key: vec![7; 40] }
}

/// Queues 0 to 3 run.
fn runs(queue: u16) -> bool {
    queue < 4
}

fn passes(control: &Control, to: MacAddr) -> bool {
    control.filter().passes(&[&to.0[..], &[0; 54]].concat())
}

/// As Linux does when an interface goes up.
fn up() -> Control {
    let mut control = Control::new(ALL, OWN, 4);
    assert!(passes(&control, OTHER) && control.filter().passes_all(), "no command yet: every frame");
    assert_eq!(control.command(&Command::Promiscuous(false).bytes(), runs), Ok(Change::Filter));
    assert_eq!(control.command(&Command::AllMulticast(false).bytes(), runs), Ok(Change::Filter));
    assert_eq!(control.command(&Command::Addresses(&[], &[GROUP]).bytes(), runs), Ok(Change::Filter));
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
        (Command::TransmitInterrupts(SOME), bits::NET_F_NOTF_COAL, Change::Interrupts),
        (Command::ReceiveInterrupts(SOME), bits::NET_F_NOTF_COAL, Change::Interrupts),
        (Command::QueueInterrupts(1, SOME), bits::NET_F_VQ_NOTF_COAL, Change::Interrupts),
        (Command::AskInterrupts(1), bits::NET_F_VQ_NOTF_COAL, Change::Reply([0; 8])),
    ];
    for (command, feature, change) in commands {
        let bytes = command.bytes();
        assert_eq!(Control::new(ALL, OWN, 4).command(&bytes, runs), Ok(change), "{command:?}");
        let (class, number) = (bytes[0], bytes[1]);
        let unknown = Err(Refused::Unknown { class, command: number });
        assert_eq!(Control::new(ALL & !feature, OWN, 4).command(&bytes, runs), unknown, "{command:?}");
        // One byte less or more is not this command.
        let longer = [&bytes[..], &[0]].concat();
        // A longer RSS configuration is what Linux sends.
        let longer = Some(&longer[..]).filter(|_| !matches!(command, Command::Rss(_)));
        for wrong in std::iter::once(&bytes[..bytes.len() - 1]).chain(longer) {
            let mut control = up();
            let (before, refused) = (control.clone(), Err(Refused::Length { len: wrong.len() }));
            assert_eq!(control.command(wrong, runs), refused, "{command:?}");
            assert_eq!((control.filter(), control.mac()), (before.filter(), before.mac()), "nothing has changed");
        }
    }
}

#[test]
fn receive_modes_and_tables_decide_what_passes() {
    let mut control = up();
    assert!(passes(&control, OWN) && !passes(&control, OTHER) && passes(&control, GROUP));
    control.command(&Command::Addresses(&[OTHER], &[]).bytes(), runs).unwrap();
    assert!(passes(&control, OTHER) && !passes(&control, GROUP), "a table replaces the one before");
    control.command(&Command::Address(MacAddr::local(3)).bytes(), runs).unwrap();
    assert_eq!(control.mac(), MacAddr::local(3));
    assert!(!passes(&control, OWN) && passes(&control, MacAddr::local(3)));
    control.command(&Command::Promiscuous(true).bytes(), runs).unwrap();
    assert!(passes(&control, GROUP));
}

#[test]
fn offloads_can_be_turned_off_and_on_but_none_that_was_not_negotiated() {
    let mut control = Control::new(ALL, OWN, 4);
    let all = control.support();
    assert!(all.contains(Support::TCP4 | Support::CHECKSUM));
    control.command(&Command::Offloads(bits::NET_F_GUEST_CSUM).bytes(), runs).unwrap();
    assert_eq!(control.support(), Support::CHECKSUM | Support::VALID);
    let refused = control.command(&Command::Offloads(bits::NET_F_GUEST_UFO).bytes(), runs);
    assert_eq!(refused, Err(Refused::Value { class: 5, command: 0, value: bits::NET_F_GUEST_UFO }));
    assert_eq!(control.support(), Support::CHECKSUM | Support::VALID);
    control.command(&Command::Offloads(ALL & GUEST_OFFLOAD_BITS).bytes(), runs).unwrap();
    assert_eq!(control.support(), all);
    // Segmentation requires the checksum.
    control.command(&Command::Offloads(bits::NET_F_GUEST_TSO4).bytes(), runs).unwrap();
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
        let refused = control.command(&bytes, runs).expect_err("refused");
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
        assert_eq!(control.command(&command.bytes(), runs), Ok(Change::Interrupts), "{command:?}");
        of(&control)
    };
    // The example of 5.1.6.5.9.
    assert_eq!(set(Command::ReceiveInterrupts(SOME)), [Some(SOME), None, Some(SOME), None]);
    assert_eq!(set(Command::QueueInterrupts(0, more)), [Some(more), None, Some(SOME), None]);
    assert_eq!(set(Command::QueueInterrupts(1, more)), [Some(more), Some(more), Some(SOME), None]);
    assert_eq!(set(Command::TransmitInterrupts(SOME)), [Some(more), Some(SOME), Some(SOME), Some(SOME)]);
    let ask = |control: &mut Control, queue| control.command(&Command::AskInterrupts(queue).bytes(), runs);
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
        assert_eq!(control.command(&command.bytes(), runs), Err(why), "{command:?}");
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
    assert_eq!(control.command(&Command::Pairs(3).bytes(), runs), Ok(Change::Pairs));
    for value in [0, 5, 0x8000, u16::MAX] {
        let refused = Err(Refused::Value { class: 4, command: 0, value: value.into() });
        assert_eq!(control.command(&Command::Pairs(value).bytes(), runs), refused);
        assert_eq!(control.pairs(), 3);
    }
}

#[test]
fn the_last_way_to_distribute_frames_counts() {
    let mut control = Control::new(ALL, OWN, 4);
    assert_eq!(control.rss(), None);
    assert_eq!(control.command(&Command::Rss(&rss()).bytes(), runs), Ok(Change::Pairs));
    assert_eq!((control.pairs(), control.rss().map(|known| **known == rss())), (2, Some(true)));
    let wrong = Rss { table: vec![4], ..rss() };
    let refused = Err(Refused::Value { class: 4, command: 1, value: 4 });
    assert_eq!(control.command(&Command::Rss(&wrong).bytes(), runs), refused);
    assert_eq!((control.pairs(), control.rss().is_some()), (2, true));
    assert_eq!(control.command(&Command::Pairs(3).bytes(), runs), Ok(Change::Pairs));
    assert_eq!((control.pairs(), control.rss()), (3, None));
}
