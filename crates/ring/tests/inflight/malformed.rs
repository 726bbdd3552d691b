//! Malformed inflight regions: each is rejected with a message that names the invalid value, and no contents whatsoever make a
//! device panic, hang, or take more chains than the ring has.

use super::{BURST, Bytes, Chains, DeviceRing, Features, Ours, Random, Resumed, Rig, SetupError, all_features};
use proptest::prelude::*;

const SPLIT: Features = Features { packed: false, indirect: true, event_idx: false, in_order: false };
const PACKED: Features = Features { packed: true, ..SPLIT };

/// Returns a ring whose device has died with chains in flight, out of order; the region records them.
fn left(features: Features, seed: u64) -> Rig {
    let (mut rig, mut random) = (Rig::new(features, 16, true), Random(seed));
    let mut device = Ours::new(rig.resume().unwrap().0);
    for _ in 0..6 {
        rig.add(3);
        device.take(&mut rig, &mut random);
        device.give(false, &mut random);
        rig.collect();
    }
    while device.held.len() < 3 {
        rig.add(3);
        device.take(&mut rig, &mut random);
    }
    // Not the oldest, so that the ring alone is not enough.
    let (newest, _) = device.held.pop().unwrap();
    device.ring.give(&[newest]);
    rig.died();
    rig
}

fn entry(features: Features, index: usize) -> usize {
    if features.packed { 32 + 32 * index } else { 16 + 16 * index }
}

/// Returns the entries in flight.
fn in_flight(rig: &Rig) -> Vec<usize> {
    let features = rig.memory.features;
    (0..16).filter(|&index| rig.bytes().u8(entry(features, index)) == 1).collect()
}

/// Returns the error for a region with this change.
#[track_caller]
fn rejection(features: Features, change: impl FnOnce(&Rig, &Bytes)) -> String {
    let rig = left(features, 3);
    let (_, before) = rig.resume().unwrap();
    assert!(matches!(before, Resumed::Inflight { resubmitted: 2.. }), "{before:?}");
    change(&rig, &rig.bytes());
    match rig.resume() {
        Err(error @ SetupError::Inflight { .. }) => error.to_string(),
        other => panic!("not rejected: {:?}", other.map(|(_, resumed)| resumed)),
    }
}

#[test]
fn invalid_values_are_rejected() {
    let check = |what: &str, features, change: &dyn Fn(&Rig, &Bytes)| {
        let error = rejection(features, change);
        assert!(error.contains(what), "{what}: {error}");
    };
    for features in [SPLIT, PACKED] {
        check("version", features, &|_, region| region.set_u16(8, 2));
        check("number of entries", features, &|_, region| region.set_u16(10, 15));
        check("number of entries", features, &|_, region| region.set_u16(10, 17));
        check("`inflight` field", features, &|_, region| region.set_u8(entry(features, 5), 7));
    }
    // All entries in flight, with the same counter.
    check("number of chains in flight", SPLIT, &|_, region| {
        for index in 0..16 {
            region.set_u64(16 + 16 * index, 1);
            region.set_u64(24 + 16 * index, 5);
        }
    });
    check("distance to the ring's used index", SPLIT, &|_, region| region.set_u16(14, region.u16(14).wrapping_sub(17)));
    check("loops in the last batch", SPLIT, &|_, region| {
        region.set_u16(14, region.u16(14).wrapping_sub(2));
        region.set_u16(12, 3);
        region.set_u16(entry(SPLIT, 3) + 6, 3);
    });
    check("head in the last batch:", SPLIT, &|_, region| {
        region.set_u16(14, region.u16(14).wrapping_sub(1));
        region.set_u16(12, 16);
    });
    check("used index", PACKED, &|_, region| region.set_u16(18, 16));
    check("wrap counter", PACKED, &|_, region| region.set_u8(21, 2));
    check("loops in the free list", PACKED, &|_, region| {
        let free = region.u16(14);
        region.set_u16(entry(PACKED, free.into()) + 2, free);
    });
    check("descriptors in flight", PACKED, &|rig, region| {
        region.set_u16(entry(PACKED, in_flight(rig)[0]) + 6, 17);
    });
    check("descriptors in flight", PACKED, &|rig, region| {
        region.set_u16(entry(PACKED, in_flight(rig)[0]) + 6, 0);
    });
    check("last entry does not match", PACKED, &|rig, region| {
        region.set_u16(entry(PACKED, in_flight(rig)[0]) + 4, 99);
    });
    check("entries shared by chains", PACKED, &|rig, region| {
        let chains = in_flight(rig);
        region.set_u16(entry(PACKED, chains[0]) + 6, 2);
        region.set_u16(entry(PACKED, chains[0]) + 4, chains[0] as u16);
        region.set_u16(entry(PACKED, chains[0]) + 2, chains[0] as u16);
    });
    check("same buffer id", PACKED, &|rig, region| {
        let chains = in_flight(rig);
        let last = |index: usize| usize::from(region.u16(entry(PACKED, chains[index]) + 4));
        region.set_u16(entry(PACKED, last(0)) + 16, region.u16(entry(PACKED, last(1)) + 16));
    });
}

#[test]
fn a_region_for_smaller_queues_is_rejected() {
    for features in [SPLIT, PACKED] {
        let rig = Rig::new(features, 16, false);
        let inflight = ringroad_ring::Inflight::new(&rig.region, 0, 8, features.packed).unwrap();
        let memory = &rig.memory;
        let resumed =
            DeviceRing::resume(&memory.device, features, 16, memory.at, 0, ringroad_ring::Journal::NONE, inflight);
        let error = resumed.err().unwrap().to_string();
        assert!(error.contains("queue size: expected at most 8, found 16"), "{error}");
    }
}

#[test]
fn leftovers_of_a_previous_boot_are_ignored() {
    for features in [SPLIT, PACKED] {
        let (mut rig, mut random) = (Rig::new(features, 16, false), Random(1));
        let mut device = Ours::new(rig.resume().unwrap().0);
        for _ in 0..40 {
            rig.add(8);
            device.take(&mut rig, &mut random);
            device.give(false, &mut random);
            device.ring.flush();
            rig.collect();
        }
        let all: Vec<_> = device.held.drain(..).map(|(chain, _)| chain).collect();
        device.ring.give(&all);
        device.ring.flush();
        // The guest reboots; the region is kept.
        let before = rig.bytes();
        let region = rig.region.clone();
        let mut rig = Rig { region, ..Rig::new(features, 16, false) };
        assert!(before.u16(8) == 1 && before.u16(14) > 16 || features.packed);
        rig.add(3);
        let (ring, resumed) = rig.resume().unwrap();
        assert_eq!(resumed, Resumed::Base);
        let mut device = Ours::new(ring);
        while device.held.len() < 3 {
            device.take(&mut rig, &mut random);
        }
    }
}

/// Uses the ring until it fails.
fn exercise(ring: DeviceRing, rig: &Rig, random: &mut Random) {
    let (mut ring, mut held) = (ring, Vec::new());
    let mut burst = Chains::new(BURST, 200);
    let mut taken = 0;
    for _ in 0..40 {
        burst.start(&rig.memory.device);
        let Ok(count) = ring.take(&rig.memory.device, &mut burst, 1 + random.below(8)) else { break };
        taken += count;
        let keep = random.below(count + 1);
        ring.untake(&mut burst, keep);
        taken -= count - keep;
        held.extend_from_slice(burst.list());
        let list: Vec<_> = (0..random.below(4).min(held.len())).map(|_| held.remove(0)).collect();
        ring.give_deferred(&list);
    }
    ring.flush();
    ring.return_resubmits();
    // The driver adds nothing, so every chain was in flight or available from the start.
    assert!(taken <= 2 * 16, "{taken} chains taken from a ring of 16");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn arbitrary_contents_are_harmless(
        bits in 0_usize..16,
        seed in any::<u64>(),
        bytes in proptest::collection::vec((0_usize..300, any::<u8>()), 1..24),
        small in any::<bool>(),
        all in any::<bool>(),
        mut random in any::<u64>().prop_map(Random),
    ) {
        let features = Features { in_order: false, ..all_features().nth(bits).unwrap() };
        let rig = left(features, seed);
        let region = rig.bytes();
        if all {
            // Arbitrary bytes, except in version and number of entries.
            let len = if features.packed { 32 + 32 * 16 } else { 16 + 16 * 16 };
            for at in (0..len).filter(|at| !(8..12).contains(at)) {
                let byte = if small { random.below(20) as u8 } else { random.below(256) as u8 };
                region.set_u8(at, byte);
            }
            for index in 0..16 {
                region.set_u8(entry(features, index), random.below(2) as u8);
            }
        } else {
            for (at, byte) in bytes {
                region.set_u8(at % if features.packed { 544 } else { 272 }, if small { byte % 17 } else { byte });
            }
        }
        if let Ok((ring, _)) = rig.resume() {
            exercise(ring, &rig, &mut random);
        }
        // Resume once more from what that run has left.
        if let Ok((ring, _)) = rig.resume() {
            exercise(ring, &rig, &mut random);
        }
    }

    /// The region is never read while a ring runs.
    #[test]
    fn changes_to_the_region_while_a_ring_runs_are_ignored(bits in 0_usize..16, seed in any::<u64>()) {
        let features = Features { in_order: false, ..all_features().nth(bits).unwrap() };
        let (mut rig, mut random) = (left(features, seed), Random(seed));
        let mut device = Ours::new(rig.resume().unwrap().0);
        let region = rig.bytes();
        for _ in 0..60 {
            let at = random.below(272);
            region.set_u8(at, random.below(256) as u8);
            rig.add(2);
            device.take(&mut rig, &mut random);
            device.give(false, &mut random);
            rig.collect();
        }
        let held: Vec<_> = device.held.drain(..).map(|(chain, _)| chain).collect();
        device.ring.give(&held);
        device.ring.flush();
        rig.collect();
    }
}
