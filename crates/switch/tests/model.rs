//! Random frames between ports: the switch and a simple model of it must agree.

mod common;

use common::*;
use proptest::prelude::*;
use ringroad_ring::BURST;
use ringroad_switch::Limits;
use ringroad_wire::ethernet::MacAddr;
use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
};

/// What is done to a switch. Ports are modulo their number, addresses are small.
#[derive(Clone, Debug)]
enum Op {
    Send { from: usize, frames: Vec<(usize, usize)> },
    Wait(u32),
    Stop { port: usize, stop: bool },
    Replace { port: usize, flooded: bool, hairpin: bool },
}

fn kind() -> impl Strategy<Value = (bool, bool)> {
    (prop::bool::weighted(0.8), prop::bool::weighted(0.3))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => (0..8usize, prop::collection::vec((0..12usize, 0..12usize), 1..=BURST))
            .prop_map(|(from, frames)| Op::Send { from, frames }),
        2 => prop_oneof![0..10u32, AGEING - 2..AGEING + 2].prop_map(Op::Wait),
        1 => (0..8usize, any::<bool>()).prop_map(|(port, stop)| Op::Stop { port, stop }),
        1 => (0..8usize, kind()).prop_map(|(port, (flooded, hairpin))| Op::Replace { port, flooded, hairpin }),
    ]
}

/// A port that floods as much as it likes: hundreds of frames of these tests go out at one point in time.
fn fake(flooded: bool, hairpin: bool) -> Arc<Fake> {
    Fake::limited(flooded, hairpin, Limits { storm: 0, ..Limits::GUEST })
}

/// A few guests, and two groups.
fn some_mac(number: usize) -> MacAddr {
    match number {
        10 => GROUP,
        11 => MacAddr::BROADCAST,
        _ => mac(number),
    }
}

/// What each port gets, and whether it was flooded.
type Expected = Vec<Vec<(Bytes, bool)>>;

/// A switch that is plain and slow.
#[derive(Default)]
struct Model {
    /// Where each address is, which port had it first, and when it was heard there.
    seen: HashMap<MacAddr, (usize, usize, u32)>,
}

impl Model {
    fn send(&mut self, ports: &[Arc<Fake>], from: usize, frames: &[(MacAddr, MacAddr, Bytes)], now: u32) -> Expected {
        let mut expected = vec![Vec::new(); ports.len()];
        for (destination, source, bytes) in frames {
            if !source.is_multicast() {
                match self.seen.get_mut(source).filter(|(_, _, seen)| now - *seen < AGEING) {
                    Some((at, home, seen)) => {
                        if *at == from || *home == from || now - *seen >= HOLD {
                            (*at, *seen) = (from, now);
                        }
                    }
                    None => {
                        self.seen.insert(*source, (from, from, now));
                    }
                }
            }
            let known = self.seen.get(destination).filter(|(_, _, seen)| now - seen < AGEING).map(|(port, ..)| *port);
            for (number, port) in ports.iter().enumerate() {
                let wanted = known.map_or(port.flooded, |known| known == number);
                if wanted && (number != from || port.hairpin) {
                    expected[number].push((bytes.clone(), known.is_none()));
                }
            }
        }
        expected
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn does_what_the_model_does(
        kinds in prop::collection::vec(kind(), 1..=8),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut net = Net::made(kinds.into_iter().map(|(flooded, hairpin)| fake(flooded, hairpin)).collect());
        let mut model = Model::default();
        let mut number = 0;
        for op in ops {
            let count = net.ports.len();
            match op {
                Op::Send { from, frames } => {
                    let from = from % count;
                    let frames: Vec<_> = frames
                        .into_iter()
                        .map(|(destination, source)| {
                            number += 1;
                            let (destination, source) = (some_mac(destination), some_mac(source));
                            (destination, source, frame(destination, source, number))
                        })
                        .collect();
                    let missed: Vec<_> = net.ports.iter().map(|port| port.missed.swap(0, Relaxed)).collect();
                    prop_assert!(missed.iter().all(|&missed| missed == 0), "counted twice");
                    let expected = model.send(&net.ports, from, &frames, net.now);
                    let bytes: Vec<_> = frames.into_iter().map(|(_, _, bytes)| bytes).collect();
                    let got = net.send(from, &bytes);
                    for ((port, got), expected) in net.ports.iter().zip(got).zip(expected) {
                        if !port.running.load(Relaxed) {
                            prop_assert_eq!((got.len(), port.missed.swap(0, Relaxed)), (0, expected.len()));
                            continue;
                        }
                        // In order among those for this port, and among those for all.
                        let part = |flooded: bool| -> Vec<&Bytes> {
                            expected.iter().filter(|(_, all)| *all == flooded).map(|(bytes, _)| bytes).collect()
                        };
                        let (all, own) = (part(true), part(false));
                        let is_flooded = |bytes: &&Bytes| all.contains(bytes);
                        prop_assert_eq!(got.iter().filter(is_flooded).collect::<Vec<_>>(), all.clone());
                        prop_assert_eq!(got.iter().filter(|bytes| !is_flooded(bytes)).collect::<Vec<_>>(), own);
                    }
                }
                Op::Wait(seconds) => net.now += seconds,
                Op::Stop { port, stop } => net.ports[port % count].stop(stop),
                Op::Replace { port, flooded, hairpin } => {
                    let port = port % count;
                    prop_assert!(net.switch.remove(port as u32).is_some());
                    net.ports[port] = fake(flooded, hairpin);
                    prop_assert_eq!(net.switch.add(net.ports[port].clone()), port as u32);
                    model.seen.retain(|_, (at, ..)| *at != port);
                    for (at, home, _) in model.seen.values_mut().filter(|(_, home, _)| *home == port) {
                        *home = *at;
                    }
                }
            }
            let live = model.seen.values().filter(|(_, _, seen)| net.now - seen < AGEING).count();
            prop_assert_eq!(net.switch.fdb().len(net.now), live);
        }
    }
}
