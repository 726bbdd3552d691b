//! Random frames, tagged or not, between random ports of VLANs: the switch and a simple model of IEEE 802.1Q must agree.

mod common;

use common::*;
use proptest::{prelude::*, sample::select};
use ringroad_ring::BURST;
use ringroad_switch::{Limits, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

const VLANS: [u16; 4] = [1, 2, 20, 4094];
const C_TAG: u16 = 0x8100;
const S_TAG: u16 = 0x88a8;

/// A tag: its EtherType and control information.
type Tag = (u16, u16);

/// How a port is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Access(u16),
    Trunk(BTreeSet<u16>, Option<u16>),
}

impl Kind {
    fn vlans(&self) -> Option<Vlans> {
        let vid = |number: u16| Vid::new(number).unwrap();
        match self {
            Kind::Plain => None,
            Kind::Access(vlan) => Some(Vlans::access(vid(*vlan))),
            Kind::Trunk(all, native) => Some(Vlans::trunk(all.iter().copied().map(vid), native.map(vid))),
        }
    }

    fn untagged(&self) -> Option<u16> {
        match self {
            Kind::Plain => Some(1),
            Kind::Access(vlan) => Some(*vlan),
            Kind::Trunk(_, native) => *native,
        }
    }

    fn has(&self, vlan: u16) -> bool {
        self.untagged() == Some(vlan) || matches!(self, Kind::Trunk(all, _) if all.contains(&vlan))
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    let trunk = (prop::collection::btree_set(select(&VLANS[..]), 1..4), prop::option::of(select(&VLANS[..])));
    prop_oneof![
        1 => Just(Kind::Plain),
        2 => select(&VLANS[..]).prop_map(Kind::Access),
        2 => trunk.prop_map(|(all, native)| Kind::Trunk(all, native)),
    ]
}

fn limits() -> impl Strategy<Value = Limits> {
    prop::bool::weighted(0.2).prop_map(|isolated| Limits { storm: 0, isolated, ..Limits::GUEST })
}

/// A frame, but for its number: addresses, tags, and how much payload.
#[derive(Clone, Debug)]
struct Spec {
    destination: usize,
    source: usize,
    tags: Vec<Tag>,
    len: usize,
}

fn spec() -> impl Strategy<Value = Spec> {
    let control = (select(&[0u16, 1, 2, 3, 20, 4094, 4095][..]), 0..16u16).prop_map(|(vlan, bits)| bits << 12 | vlan);
    let tag = (select(&[C_TAG, C_TAG, C_TAG, S_TAG][..]), control);
    (0..8usize, 0..7usize, prop::collection::vec(tag, 0..3), 0..100usize)
        .prop_map(|(destination, source, tags, len)| Spec { destination, source, tags, len })
}

impl Spec {
    fn addresses(&self) -> (MacAddr, MacAddr) {
        (if self.destination == 7 { MacAddr::BROADCAST } else { mac(self.destination) }, mac(self.source))
    }

    fn bytes(&self, tags: &[Tag], number: u32) -> Bytes {
        let (destination, source) = self.addresses();
        let mut bytes = [destination.0, source.0].concat();
        tags.iter().for_each(|(kind, control)| bytes.extend([kind.to_be_bytes(), control.to_be_bytes()].concat()));
        bytes.extend([0x08, 0x00]);
        bytes.extend(number.to_be_bytes());
        bytes.resize(bytes.len() + self.len, number as u8);
        bytes
    }
}

#[derive(Clone, Debug)]
enum Op {
    Send { from: usize, frames: Vec<Spec> },
    Wait(u32),
    Set { port: usize, kind: Kind },
    Plain,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => (0..6usize, prop::collection::vec(spec(), 1..=BURST)).prop_map(|(from, frames)| Op::Send { from, frames }),
        1 => prop_oneof![0..10u32, AGEING - 2..AGEING + 2].prop_map(Op::Wait),
        3 => (0..6usize, kind()).prop_map(|(port, kind)| Op::Set { port, kind }),
        1 => Just(Op::Plain),
    ]
}

struct Model {
    ports: Vec<(Arc<Fake>, Kind)>,
    /// Where each address of a VLAN is, which port had it first, and when it was heard there.
    seen: HashMap<(u16, MacAddr), (usize, usize, u32)>,
}

/// What each port gets: each frame with its VLAN and whether it was flooded. Of one such kind all are in order.
type Expected = Vec<BTreeMap<(u16, bool), Vec<Bytes>>>;

impl Model {
    fn is_plain(&self) -> bool {
        self.ports.iter().all(|(_, kind)| *kind == Kind::Plain)
    }

    fn set(&mut self, port: usize, kind: Kind) {
        let before = self.is_plain();
        self.ports[port].1 = kind.clone();
        if self.is_plain() != before {
            self.seen.clear();
        } else if !before {
            self.seen.retain(|(vlan, _), (at, ..)| *at != port || kind.has(*vlan));
            let others = self.seen.iter_mut().filter(|((vlan, _), (_, home, _))| *home == port && !kind.has(*vlan));
            others.for_each(|(_, (at, home, _))| *home = *at);
        }
    }

    /// The VLAN of a frame, its priority, and the tags behind its own; `None`: it is not admitted.
    fn admit<'t>(&self, from: usize, tags: &'t [Tag]) -> Option<(u16, u16, &'t [Tag])> {
        if self.is_plain() {
            return Some((0, 0, tags));
        }
        let kind = &self.ports[from].1;
        let (vlan, priority, inner) = match tags {
            [(C_TAG, control), inner @ ..] => (control & 0xfff, control & 0xf000, inner),
            _ => (0, 0, tags),
        };
        let vlan = if vlan == 0 { kind.untagged()? } else { vlan };
        (vlan != 4095 && kind.has(vlan)).then_some((vlan, priority, inner))
    }

    /// The tags with which a frame leaves a port; `None`: it does not.
    fn leave(&self, to: usize, vlan: u16, priority: u16, inner: &[Tag]) -> Option<Vec<Tag>> {
        let kind = &self.ports[to].1;
        if self.is_plain() {
            return Some(inner.to_vec());
        }
        if !kind.has(vlan) {
            return None;
        }
        let shows = matches!(inner, [(C_TAG, _), ..]);
        match kind.untagged() == Some(vlan) {
            true if shows && !matches!(kind, Kind::Trunk(..)) => None,
            true if !shows => Some(inner.to_vec()),
            // Two at most.
            _ if inner.len() > 1 => None,
            _ => Some([&[(C_TAG, priority | vlan)], inner].concat()),
        }
    }

    fn send(&mut self, from: usize, frames: &[(Spec, u32)], now: u32) -> (Expected, usize) {
        let mut expected = vec![BTreeMap::<_, Vec<_>>::new(); self.ports.len()];
        let mut dropped = 0;
        for (spec, number) in frames {
            let Some((vlan, priority, inner)) = self.admit(from, &spec.tags) else {
                dropped += 1;
                continue;
            };
            let (destination, source) = spec.addresses();
            match self.seen.get_mut(&(vlan, source)).filter(|(_, _, seen)| now - *seen < AGEING) {
                Some((at, home, seen)) => {
                    if *at == from || *home == from || now - *seen >= HOLD {
                        (*at, *seen) = (from, now);
                    }
                }
                None => drop(self.seen.insert((vlan, source), (from, from, now))),
            }
            let known = self.seen.get(&(vlan, destination)).filter(|(_, _, seen)| now - seen < AGEING);
            let known = known.map(|(port, ..)| *port);
            let (mut wanted, mut left) = (0, 0);
            for (to, expected) in expected.iter_mut().enumerate() {
                let (port, kind) = &self.ports[to];
                let isolated = to != from && port.limits.isolated && self.ports[from].0.limits.isolated;
                let member = self.is_plain() || kind.has(vlan);
                let goes = known.is_none_or(|known| known == to) && !isolated && member;
                if !goes || to == from && !port.hairpin {
                    continue;
                }
                wanted += 1;
                if let Some(tags) = self.leave(to, vlan, priority, inner) {
                    left += 1;
                    expected.entry((vlan, known.is_none())).or_default().push(spec.bytes(&tags, *number));
                }
            }
            dropped += usize::from(wanted > 0 && left == 0);
        }
        (expected, dropped)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn does_what_the_model_does(
        ports in prop::collection::vec((kind(), limits(), prop::bool::weighted(0.2)), 1..=6),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let fakes = ports.iter().map(|(_, limits, hairpin)| Fake::limited(true, *hairpin, *limits));
        let mut net = Net::made(fakes.collect());
        let plain = net.ports.iter().map(|port| (port.clone(), Kind::Plain));
        let mut model = Model { ports: plain.collect(), seen: HashMap::new() };
        let set = |net: &mut Net, model: &mut Model, port: usize, kind: Kind| {
            net.switch.set_vlans(port as u32, kind.vlans());
            model.set(port, kind);
        };
        for (port, (kind, ..)) in ports.into_iter().enumerate() {
            set(&mut net, &mut model, port, kind);
        }
        let mut number = 0;
        for op in ops {
            let count = net.ports.len();
            match op {
                Op::Send { from, frames } => {
                    let from = from % count;
                    let frames: Vec<_> = frames.into_iter().map(|spec| { number += 1; (spec, number) }).collect();
                    let bytes: Vec<_> = frames.iter().map(|(spec, number)| spec.bytes(&spec.tags, *number)).collect();
                    net.ports[from].dropped.lock().unwrap().clear();
                    let (expected, dropped) = model.send(from, &frames, net.now);
                    let got = net.send(from, &bytes);
                    for (port, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        prop_assert_eq!(got.len(), expected.values().map(Vec::len).sum::<usize>(), "port {}", port);
                        for (kind, expected) in expected {
                            let is_one = |bytes: &&Bytes| expected.contains(bytes);
                            let part: Vec<_> = got.iter().filter(is_one).collect();
                            prop_assert_eq!(part, expected.iter().collect::<Vec<_>>(), "port {}: {:?}", port, kind);
                        }
                    }
                    prop_assert_eq!(net.ports[from].lost(ringroad_switch::Dropped::Vlan), dropped);
                }
                Op::Wait(seconds) => net.now += seconds,
                Op::Set { port, kind } => set(&mut net, &mut model, port % count, kind),
                Op::Plain => (0..count).for_each(|port| set(&mut net, &mut model, port, Kind::Plain)),
            }
            let live = model.seen.values().filter(|(_, _, seen)| net.now - seen < AGEING).count();
            prop_assert_eq!(net.switch.fdb().len(net.now), live);
        }
    }
}
