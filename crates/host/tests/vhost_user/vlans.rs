//! VLANs between guests' rings: tags are pushed and popped on the way, ports change while their queues run, and a guest's own filter
//! applies to what is delivered.

use crate::{LAYOUTS, common::*};
use ringroad_host::{PortSettings, vhost_user::Connection};
use ringroad_net::{Features, control::Command};
use ringroad_switch::{Limits, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::Instant,
};

fn vid(number: u16) -> Vid {
    Vid::new(number).unwrap()
}

fn set(rig: &Rig, port: usize, vlans: Option<Vlans>) {
    let handle = rig.servers[port].handle();
    handle.set(PortSettings { vlans, ..handle.port().settings() });
}

/// A frame of a test, whose payload is its number.
fn frame(tag: Option<u16>, number: u8, len: usize) -> Vec<u8> {
    let tag = tag.map_or_else(Vec::new, |control| [[0x81, 0x00], control.to_be_bytes()].concat());
    [&MacAddr::BROADCAST.0[..], &MacAddr::local(9).0, &tag, &[0x88, 0xb5], &vec![number; len]].concat()
}

fn send(guest: &mut Guest, frame: &[u8]) {
    let tx = &mut guest.driver.tx[0];
    let _ = tx.reclaim().unwrap();
    assert_eq!(tx.add(1, |_, place| place.write(frame)), 1);
    tx.publish();
    let _ = guest.vrings[1].kick.write(1);
}

/// Receives frames up to the one with this number.
fn received(connection: &mut Connection, last: u8) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    assert!(within(PATIENCE, || {
        let receive = connection.driver.rx[0].receive(true, |pieces| {
            let mut bytes = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
            let mut at = 0;
            pieces.iter().for_each(|piece| at += piece.read(&mut bytes[at..]));
            all.push(bytes);
        });
        receive.unwrap();
        connection.rx[0].kick();
        all.last().is_some_and(|frame| frame.last() == Some(&last))
    }));
    all
}

#[test]
fn guests_of_vlans() {
    for layout in LAYOUTS {
        let rig = Rig::new(&format!("vlans{layout:x}"));
        let mut other = rig.guest(1, SPLIT);
        let mut connection = rig.connector(layout | Features::CONTROL.bits()).connect().unwrap();
        // Short, long, and a mixed burst, in which the frame's place in the receiver's buffers changes.
        for len in [4, 46, 1400] {
            set(&rig, 0, Some(Vlans::access(vid(10))));
            set(&rig, 1, Some(Vlans::trunk([10, 20].map(vid), None)));
            send(&mut other, &frame(Some(20), 1, len));
            send(&mut other, &frame(None, 2, len));
            send(&mut other, &frame(Some(0xe00a), 3, len));
            assert_eq!(received(&mut connection, 3), [frame(None, 3, len)]);
            // Its port changes while it runs.
            set(&rig, 0, Some(Vlans::trunk([10, 20].map(vid), Some(vid(20)))));
            send(&mut other, &frame(Some(20), 4, len));
            send(&mut other, &frame(Some(0xe00a), 5, len));
            assert_eq!(received(&mut connection, 5), [frame(None, 4, len), frame(Some(0xe00a), 5, len)]);
            set(&rig, 1, Some(Vlans::access(vid(10))));
            send(&mut other, &frame(None, 6, len));
            assert_eq!(received(&mut connection, 6), [frame(Some(10), 6, len)]);
            (0..2).for_each(|port| set(&rig, port, None));
            send(&mut other, &frame(Some(0x0fff), 7, len));
            assert_eq!(received(&mut connection, 7), [frame(Some(0x0fff), 7, len)]);
        }
        assert_eq!((rig.report(1).received.vlan, rig.report(1).received.dropped(), rig.faults()), (3, 3, 0));
        logged(&format!("vlans{layout:x}-1"), &["WARN", "counted as `vlan`", "`trunk`"]);
    }
}

#[test]
fn ports_that_swap_their_vlans_never_share_one() {
    let rig = Rig::new("vlans-swap");
    let (mut sender, mut other) = (rig.guest(0, SPLIT), rig.guest(1, PACKED));
    let handles = [0, 1].map(|port| rig.servers[port].handle());
    let set = |vlans: [u16; 2], isolated: [bool; 2]| {
        let change = |port: usize| {
            let settings = handles[port].port().settings();
            let limits = Limits { isolated: isolated[port], storm: 0, ..settings.limits };
            (handles[port], PortSettings { vlans: Some(Vlans::access(vid(vlans[port]))), limits, ..settings })
        };
        rig.worker.set_ports(&[0, 1].map(change));
    };
    set([10, 20], [false; 2]);
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                sent.fetch_add(sender.add_frame(&frame(None, 1, 46)).into(), Relaxed);
                let _ = sender.vrings[1].kick.write(1);
            }
        });
        let start = Instant::now();
        for _ in (0..500).chain((500..).take_while(|_| sent.load(Relaxed) < 2000 && start.elapsed() < PATIENCE)) {
            set([20, 10], [false; 2]);
            set([10, 20], [false; 2]);
            // In one VLAN they are isolated from each other.
            set([10, 10], [true; 2]);
            set([20, 10], [false; 2]);
        }
        stop.store(true, Relaxed);
    });
    let sent = sent.into_inner();
    assert!(sent >= 2000, "{sent}");
    assert!(within(PATIENCE, || rig.report(0).received.frames == sent));
    assert_eq!(other.received(MacAddr::local(9)), [0; 0]);
    assert_eq!(rig.report(1).sent.frames, 0);
    set([10, 10], [false; 2]);
    let sequence = sender.send_to(other.mac);
    assert!(other.receives(sender.mac, sequence));
}

#[test]
fn the_guests_own_filter_sees_what_leaves_its_port() {
    let rig = Rig::new("vlans-filter");
    let mut other = rig.guest(1, SPLIT);
    let mut connection = rig.connector(PACKED | Features::CONTROL.bits()).connect().unwrap();
    set(&rig, 1, Some(Vlans::trunk([10, 20].map(vid), None)));
    set(&rig, 0, Some(Vlans::access(vid(10))));
    for command in [Command::Promiscuous(false), Command::AddVlan(20)] {
        connection.command(&command, PATIENCE).unwrap();
    }
    // Of VLAN 10, but that is none of the guest's business: it has no tag any more.
    send(&mut other, &frame(Some(10), 1, 46));
    assert_eq!(received(&mut connection, 1), [frame(None, 1, 46)]);
    assert_eq!(rig.report(0).sent.filtered, 0);
    // On a trunk it is.
    set(&rig, 0, Some(Vlans::trunk([10, 20].map(vid), None)));
    send(&mut other, &frame(Some(10), 2, 46));
    send(&mut other, &frame(Some(20), 3, 46));
    assert_eq!(received(&mut connection, 3), [frame(Some(20), 3, 46)]);
    assert_eq!(rig.report(0).sent.filtered, 1);
}
