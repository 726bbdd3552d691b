use super::*;
use std::slice;

const ALL: u64 = bits::NET_F_CTRL_RX
    | bits::NET_F_CTRL_RX_EXTRA
    | bits::NET_F_CTRL_VLAN
    | bits::NET_F_CTRL_MAC_ADDR
    | bits::NET_F_CTRL_GUEST_OFFLOADS
    | bits::NET_F_GUEST_CSUM
    | bits::NET_F_GUEST_TSO4
    | bits::NET_F_GUEST_TSO6;
const OWN: MacAddr = MacAddr::local(1);
const OTHER: MacAddr = MacAddr::local(2);
const GROUP: MacAddr = MacAddr([0x33, 0x33, 0, 0, 0, 1]);

fn passes(control: &Control, to: MacAddr) -> bool {
    control.filter().passes(&[&to.0[..], &[0; 54]].concat())
}

/// As Linux does when an interface goes up.
fn up() -> Control {
    let mut control = Control::new(ALL, OWN);
    assert!(passes(&control, OTHER) && control.filter().passes_all(), "no command yet: every frame");
    assert_eq!(control.command(&Command::Promiscuous(false).bytes()), Ok(Change::Filter));
    assert_eq!(control.command(&Command::AllMulticast(false).bytes()), Ok(Change::Filter));
    assert_eq!(control.command(&Command::Addresses(&[], &[GROUP]).bytes()), Ok(Change::Filter));
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
    ];
    for (command, feature, change) in commands {
        let bytes = command.bytes();
        assert_eq!(Control::new(ALL, OWN).command(&bytes), Ok(change), "{command:?}");
        let (class, number) = (bytes[0], bytes[1]);
        let unknown = Err(Refused::Unknown { class, command: number });
        assert_eq!(Control::new(ALL & !feature, OWN).command(&bytes), unknown, "{command:?}");
        // One byte less or more is not this command.
        for wrong in [&bytes[..bytes.len() - 1], &[&bytes[..], &[0]].concat()] {
            let mut control = up();
            let (before, refused) = (control.clone(), Err(Refused::Length { len: wrong.len() }));
            assert_eq!(control.command(wrong), refused, "{command:?}");
            assert_eq!((control.filter(), control.mac()), (before.filter(), before.mac()), "nothing has changed");
        }
    }
}

#[test]
fn receive_modes_and_tables_decide_what_passes() {
    let mut control = up();
    assert!(passes(&control, OWN) && !passes(&control, OTHER) && passes(&control, GROUP));
    control.command(&Command::Addresses(&[OTHER], &[]).bytes()).unwrap();
    assert!(passes(&control, OTHER) && !passes(&control, GROUP), "a table replaces the one before");
    control.command(&Command::Address(MacAddr::local(3)).bytes()).unwrap();
    assert_eq!(control.mac(), MacAddr::local(3));
    assert!(!passes(&control, OWN) && passes(&control, MacAddr::local(3)));
    control.command(&Command::Promiscuous(true).bytes()).unwrap();
    assert!(passes(&control, GROUP));
}

#[test]
fn offloads_can_be_turned_off_and_on_but_none_that_was_not_negotiated() {
    let mut control = Control::new(ALL, OWN);
    let all = control.support();
    assert!(all.contains(Support::TCP4 | Support::CHECKSUM));
    control.command(&Command::Offloads(bits::NET_F_GUEST_CSUM).bytes()).unwrap();
    assert_eq!(control.support(), Support::CHECKSUM | Support::VALID);
    let refused = control.command(&Command::Offloads(bits::NET_F_GUEST_UFO).bytes());
    assert_eq!(refused, Err(Refused::Value { class: 5, command: 0, value: bits::NET_F_GUEST_UFO }));
    assert_eq!(control.support(), Support::CHECKSUM | Support::VALID);
    control.command(&Command::Offloads(ALL & GUEST_OFFLOAD_BITS).bytes()).unwrap();
    assert_eq!(control.support(), all);
    // Segmentation requires the checksum.
    control.command(&Command::Offloads(bits::NET_F_GUEST_TSO4).bytes()).unwrap();
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
        let refused = control.command(&bytes).expect_err("refused");
        assert!(!refused.to_string().is_empty());
        assert_eq!((control.filter(), control.mac()), (before.filter(), before.mac()), "{bytes:?}");
    }
}
