//! Ports of VLANs: who gets which frames, in which form, and what is dropped.

mod common;

use common::*;
use ringroad_frame::offload::{Checksum, Offload, Support};
use ringroad_switch::{Dropped, Limits, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use std::sync::{Arc, atomic::Ordering::Relaxed};

fn vid(number: u16) -> Vid {
    Vid::new(number).unwrap()
}

fn access(number: u16) -> Option<Vlans> {
    Some(Vlans::access(vid(number)))
}

fn trunk(numbers: &[u16], native: Option<u16>) -> Option<Vlans> {
    Some(Vlans::trunk(numbers.iter().copied().map(vid), native.map(vid)))
}

fn net(vlans: &[Option<Vlans>]) -> Net {
    let mut net = Net::new(vlans.len());
    for (number, &vlans) in vlans.iter().enumerate() {
        net.switch.set_vlans(number as u32, vlans);
    }
    net
}

/// A frame with these tags: their EtherType and control information.
fn tagged(destination: MacAddr, source: MacAddr, tags: &[(u16, u16)]) -> Bytes {
    let mut bytes = [destination.0, source.0].concat();
    for (kind, control) in tags {
        bytes.extend([kind.to_be_bytes(), control.to_be_bytes()].concat());
    }
    bytes.extend([0x08, 0x00]);
    bytes.extend((0..60).map(|at| at as u8));
    bytes
}

const C: u16 = 0x8100;
const ALL: MacAddr = MacAddr::BROADCAST;

fn plain(number: usize) -> Bytes {
    tagged(ALL, mac(number), &[])
}

fn with(number: usize, control: u16) -> Bytes {
    tagged(ALL, mac(number), &[(C, control)])
}

/// A frame of each port, one after the other: what the ports get.
fn send(net: &mut Net, from: usize, frame: &Bytes) -> Vec<Option<Bytes>> {
    let got = net.send(from, std::slice::from_ref(frame));
    got.into_iter().map(|frames| frames.into_iter().next()).collect()
}

fn lost(net: &Net, port: usize) -> usize {
    net.ports[port].lost(Dropped::Vlan)
}

#[test]
fn frames_stay_in_their_vlan_and_have_a_tag_on_trunks() {
    let mut net = net(&[access(10), access(10), access(20), trunk(&[10, 20], None), trunk(&[20], Some(10)), None]);
    let got = send(&mut net, 0, &plain(0));
    assert_eq!(got, [None, Some(plain(0)), None, Some(with(0, 10)), Some(plain(0)), None]);
    // With a priority, which lasts as long as there is a tag; the VLAN of its own is as good as none.
    for control in [0xe000, 0x7000, 10, 0xf00a] {
        let frame = with(0, control);
        let there = with(0, control | 10);
        assert_eq!(send(&mut net, 0, &frame), [None, Some(plain(0)), None, Some(there), Some(plain(0)), None]);
    }
    assert_eq!(lost(&net, 0), 0);
    let got = send(&mut net, 3, &with(3, 0x6014));
    assert_eq!(got, [None, None, Some(plain(3)), None, Some(with(3, 0x6014)), None]);
    let got = send(&mut net, 4, &plain(4));
    assert_eq!(got, [Some(plain(4)), Some(plain(4)), None, Some(with(4, 10)), None, None]);
    // To an address that is known, too.
    let answer = tagged(mac(3), mac(2), &[]);
    let got = send(&mut net, 2, &answer);
    assert_eq!(got, [None, None, None, Some(tagged(mac(3), mac(2), &[(C, 20)])), None, None]);
}

#[test]
fn what_a_port_does_not_admit_is_dropped_and_counted() {
    let mut net = net(&[access(10), access(20), trunk(&[10, 20], None), Some(Vlans::all(Some(vid(1))))]);
    let none = vec![None; 4];
    for (number, control) in [20, 1, 0xfff, 0xffff, 0xe014].into_iter().enumerate() {
        assert_eq!(send(&mut net, 0, &with(0, control)), none, "{control:x}");
        assert_eq!(lost(&net, 0), number + 1);
    }
    // A trunk without a native VLAN has no place for these.
    for frame in [plain(2), with(2, 0), with(2, 0xe000), with(2, 30)] {
        assert_eq!(send(&mut net, 2, &frame), none);
    }
    assert_eq!(lost(&net, 2), 4);
    assert_eq!(send(&mut net, 3, &with(3, 0xfff)), none, "all VLANs, but that is none");
    // Cut off within the tag.
    for len in 14..18 {
        assert_eq!(send(&mut net, 0, &with(0, 10)[..len].to_vec()), none);
    }
    assert_eq!((lost(&net, 0), net.switch.fdb().len(0)), (9, 0), "nothing was learned of them");
    let short = with(0, 10)[..18].to_vec();
    assert_eq!(send(&mut net, 0, &short)[3], Some(short));
}

#[test]
fn an_inner_tag_never_becomes_the_outer_one() {
    let vlans = [access(10), access(10), trunk(&[20], Some(10)), trunk(&[10, 20], None), access(20)];
    let mut net = net(&vlans);
    for outer in [10, 0] {
        let frame = tagged(ALL, mac(0), &[(C, outer), (C, 20)]);
        let whole = Some(tagged(ALL, mac(0), &[(C, 10), (C, 20)]));
        // Without its outer tag it would be one of VLAN 20 where it goes next.
        assert_eq!(send(&mut net, 0, &frame), [None, None, whole.clone(), whole, None], "{outer}");
    }
    assert_eq!(lost(&net, 0), 0, "some have left");
    let to_access = tagged(mac(1), mac(3), &[(C, 10), (C, 20)]);
    send(&mut net, 1, &plain(1));
    assert_eq!(send(&mut net, 3, &to_access), vec![None; 5]);
    assert_eq!(lost(&net, 3), 1);
    // A provider's tag is payload, but three tags are one too many.
    let service = |number, tags: &[(u16, u16)]| tagged(ALL, mac(number), &[&[(0x88a8, 20)], tags].concat());
    let pushed = tagged(ALL, mac(0), &[(C, 10), (0x88a8, 20)]);
    let got = send(&mut net, 0, &service(0, &[]));
    assert_eq!(got, [None, Some(service(0, &[])), Some(service(0, &[])), Some(pushed), None]);
    let got = send(&mut net, 0, &service(0, &[(C, 20)]));
    assert_eq!(got, [None, Some(service(0, &[(C, 20)])), Some(service(0, &[(C, 20)])), None, None]);
}

#[test]
fn an_address_may_be_at_a_port_in_each_vlan() {
    let mut net = net(&[access(10), access(20), trunk(&[10, 20], None), access(10), access(20)]);
    send(&mut net, 0, &plain(7));
    send(&mut net, 1, &plain(7));
    let to = |control| tagged(mac(7), mac(2), &[(C, control)]);
    let bare = Some(tagged(mac(7), mac(2), &[]));
    assert_eq!(send(&mut net, 2, &to(10)), [bare.clone(), None, None, None, None]);
    assert_eq!(send(&mut net, 2, &to(20)), [None, bare, None, None, None]);
    assert!(net.ports.iter().all(|port| port.claims.lock().unwrap().is_empty()));
    assert_eq!(net.switch.fdb().len(0), 4);
}

#[test]
fn a_ports_own_address_is_its_own_in_its_vlans_only() {
    let own = Limits { own: Some(mac(0)), fixed: true, ..Limits::GUEST };
    let mut net = Net::limited(&[own, Limits::GUEST, Limits::GUEST, Limits::GUEST]);
    for (number, vlans) in [access(10), access(10), access(20), access(20)].into_iter().enumerate() {
        net.switch.set_vlans(number as u32, vlans);
    }
    // Known from the start, also where another one has used it before.
    let to_own = |from| tagged(mac(0), mac(from), &[]);
    assert_eq!(send(&mut net, 1, &to_own(1)), [Some(to_own(1)), None, None, None]);
    send(&mut net, 1, &plain(0));
    assert_eq!(net.ports[1].lost(Dropped::Spoofed), 1);
    send(&mut net, 2, &plain(0));
    assert_eq!(net.ports[2].lost(Dropped::Spoofed), 0, "somebody else in VLAN 20");
    assert_eq!(send(&mut net, 3, &to_own(3)), [None, None, Some(to_own(3)), None]);
    // It sends from no other address, in whatever VLAN.
    send(&mut net, 0, &plain(9));
    assert_eq!(net.ports[0].lost(Dropped::Spoofed), 1);
    net.switch.set_vlans(0, access(20));
    assert_eq!(send(&mut net, 3, &to_own(3)), [Some(to_own(3)), None, None, None], "it goes before what was learned");
}

#[test]
fn limits_hold_within_a_vlan() {
    let isolated = Limits { isolated: true, ..Limits::GUEST };
    let local = Limits { link_local: true, ..Limits::GUEST };
    let mut net = Net::limited(&[isolated, isolated, local, local, Limits { storm: 200, ..Limits::GUEST }]);
    let vlans = [access(10), access(10), access(10), access(20), trunk(&[10, 20], None)];
    vlans.into_iter().enumerate().for_each(|(number, vlans)| net.switch.set_vlans(number as u32, vlans));
    assert_eq!(send(&mut net, 0, &plain(0)), [None, None, Some(plain(0)), None, Some(with(0, 10))]);
    send(&mut net, 1, &plain(1));
    send(&mut net, 0, &tagged(mac(1), mac(0), &[]));
    assert_eq!(net.ports[0].lost(Dropped::Isolated), 1);
    let bridge = MacAddr([0x01, 0x80, 0xc2, 0, 0, 0x0e]);
    assert_eq!(send(&mut net, 2, &tagged(bridge, mac(2), &[])), vec![None; 5], "the other one is in another VLAN");
    net.switch.set_vlans(3, access(10));
    assert_eq!(send(&mut net, 2, &tagged(bridge, mac(2), &[]))[3], Some(tagged(bridge, mac(2), &[])));
    // To several ports of a VLAN only does it count as a storm.
    net.switch.set_vlans(3, access(20));
    let burst: Vec<_> = (0..64).map(|_| with(4, 20)).collect();
    (0..3).for_each(|_| assert_eq!(net.send(4, &burst)[3].len(), 64));
    let burst: Vec<_> = (0..64).map(|_| with(4, 10)).collect();
    assert_eq!([0, 1].map(|_| net.send(4, &burst)[2].len()), [64, 0]);
    assert_eq!((net.ports[4].lost(Dropped::Storm), lost(&net, 4)), (64, 0));
}

#[test]
fn hairpins_send_frames_of_a_vlan_back() {
    let mut net = Net::of(vec![(true, true), (true, false)]);
    net.switch.set_vlans(0, trunk(&[10, 20], None));
    assert_eq!(send(&mut net, 0, &with(0, 10)), [Some(with(0, 10)), None]);
    assert_eq!(
        send(&mut net, 0, &tagged(mac(0), mac(1), &[(C, 10)])),
        [Some(tagged(mac(0), mac(1), &[(C, 10)])), None]
    );
}

#[test]
fn without_vlans_tags_are_payload_and_with_one_other_ports_are_vlan_1() {
    let mut net = net(&[None, None, None]);
    for frame in [with(0, 10), with(0, 0xfff), tagged(ALL, mac(0), &[(C, 0)])] {
        assert_eq!(send(&mut net, 0, &frame), [None, Some(frame.clone()), Some(frame)]);
    }
    assert_eq!(net.switch.fdb().len(0), 1);
    net.switch.set_vlans(2, access(10));
    assert_eq!(net.switch.fdb().len(0), 0, "learned anew");
    assert_eq!(send(&mut net, 0, &plain(0)), [None, Some(plain(0)), None]);
    assert_eq!(send(&mut net, 0, &with(0, 1)), [None, Some(plain(0)), None]);
    assert_eq!(send(&mut net, 0, &with(0, 10)), vec![None; 3]);
    assert_eq!(lost(&net, 0), 1);
    net.switch.set_vlans(2, access(1));
    assert_eq!(send(&mut net, 0, &plain(0)), [None, Some(plain(0)), Some(plain(0))]);
    // The last one with VLANs goes.
    net.switch.remove(2).unwrap();
    assert_eq!(net.switch.fdb().len(0), 0);
    assert_eq!(send(&mut net, 0, &with(0, 10))[1], Some(with(0, 10)));
}

#[test]
fn addresses_of_vlans_that_a_port_has_left_are_forgotten() {
    let mut net = net(&[trunk(&[10, 20], None), access(10), access(20), access(10)]);
    send(&mut net, 0, &with(7, 10));
    send(&mut net, 0, &with(7, 20));
    let to = |from| tagged(mac(7), mac(from), &[]);
    assert_eq!(send(&mut net, 1, &to(1)).iter().flatten().count(), 1);
    net.switch.set_vlans(0, trunk(&[20], None));
    assert_eq!(send(&mut net, 1, &to(1)), [None, None, None, Some(to(1))]);
    assert_eq!(send(&mut net, 2, &to(2)), [Some(tagged(mac(7), mac(2), &[(C, 20)])), None, None, None]);
    assert_eq!(net.switch.fdb().len(0), 3);
}

#[test]
fn nothing_is_poured_where_there_are_vlans() {
    let mut net = net(&[None, access(1)]);
    net.ports[0].pours.store(true, Relaxed);
    assert_eq!(send(&mut net, 0, &with(0, 1)), [None, Some(plain(0))]);
    assert_eq!(net.ports[0].poured.load(Relaxed), 0);
    net.switch.set_vlans(1, None);
    net.ports[0].to_send.lock().unwrap().push_back(vec![with(0, 1)]);
    net.carry(0, 0);
    assert_eq!((net.ports[1].got(), net.ports[0].poured.load(Relaxed)), (vec![with(0, 1)], 1));
}

#[test]
fn frames_that_wait_come_again_as_they_were() {
    let mut net = net(&[access(10), trunk(&[10], None)]);
    net.ports[0].retains.store(true, Relaxed);
    send(&mut net, 1, &with(1, 10));
    // The first time, whether there is room is not known.
    send(&mut net, 0, &tagged(mac(1), mac(0), &[]));
    net.ports[1].room.store(1, Relaxed);
    let frames = [with(0, 20), tagged(mac(1), mac(0), &[]), with(0, 0xfff), tagged(mac(1), mac(0), &[(C, 0xe000)])];
    net.ports[0].to_send.lock().unwrap().push_back(frames.to_vec());
    assert_eq!(net.carry(0, 0), 3);
    assert_eq!(net.ports[1].got(), [tagged(mac(1), mac(0), &[(C, 10)])]);
    assert_eq!(*net.ports[0].to_send.lock().unwrap(), [vec![frames[3].clone()]]);
    net.ports[1].room.store(1, Relaxed);
    assert_eq!(net.carry(0, 0), 1);
    assert_eq!(net.ports[1].got(), [tagged(mac(1), mac(0), &[(C, 0xe00a)])]);
}

#[test]
fn offloads_know_where_the_payload_has_gone() {
    let mut net = net(&[access(10), trunk(&[10], None), access(10)]);
    for port in &net.ports {
        *port.support.lock().unwrap() = Support::all();
        *port.offload.lock().unwrap() = |frame| {
            let start = if frame[12..14] == [0x81, 0x00] { 38 } else { 34 };
            Offload::partial(start, 16, frame.len()).unwrap()
        };
    }
    let starts = |net: &Net, port: usize| -> Vec<u16> {
        let got: Vec<_> = std::mem::take(&mut *net.ports[port].got_offloads.lock().unwrap());
        let start = |offload: &Offload| match offload.checksum() {
            Checksum::Partial { start, .. } => start,
            other => panic!("{other:?}"),
        };
        got.iter().map(start).collect()
    };
    assert_eq!(send(&mut net, 0, &plain(0)), [None, Some(with(0, 10)), Some(plain(0))]);
    assert_eq!([1, 2].map(|port| starts(&net, port)), [[38], [34]]);
    assert_eq!(send(&mut net, 1, &with(1, 10)), [Some(plain(1)), None, Some(plain(1))]);
    assert_eq!([0, 2].map(|port| starts(&net, port)), [[34], [34]]);
    assert_eq!(send(&mut net, 0, &with(0, 0)), [None, Some(with(0, 10)), Some(plain(0))]);
    assert_eq!([1, 2].map(|port| starts(&net, port)), [[38], [34]]);
    // A sender that claims to sum its tag.
    *net.ports[0].offload.lock().unwrap() = |frame| Offload::partial(14, 0, frame.len()).unwrap();
    assert_eq!(send(&mut net, 0, &with(0, 10)), vec![None; 3]);
    assert_eq!(lost(&net, 0), 1);
}

#[test]
fn a_port_that_is_added_has_its_vlans() {
    let mut net = net(&[access(10)]);
    let port = Fake::of_vlans(trunk(&[10], None));
    net.ports.push(port.clone());
    assert_eq!(net.switch.add(port.clone()), 1);
    assert_eq!(send(&mut net, 0, &plain(0)), [None, Some(with(0, 10))]);
    assert!(Arc::ptr_eq(&net.switch.remove(1).unwrap(), &port));
}
