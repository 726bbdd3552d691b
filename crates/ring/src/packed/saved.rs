//! Chains in flight that are taken again from the frontend's inflight region. Called by `device.rs`.

use crate::{
    Chains, Fault, Features, INDIRECT,
    chain::{Draft, indirect},
    inflight::{Packed, Saved},
};
use ringroad_mem::{Hit, Table};

/// Rebuilds a chain from saved descriptors, which may no longer be in the ring. Returns `false` if it must wait for the next
/// burst.
pub(super) fn take_saved(
    track: &Packed,
    features: Features,
    hit: &mut Hit,
    memory: &Table,
    chains: &mut Chains,
    saved: &Saved,
) -> Result<bool, Fault> {
    let mut chain = chains.begin(saved.slots);
    chain.id = saved.id;
    match follow(track, features, memory, chains, &mut chain, hit, saved) {
        Ok(()) => Ok(chains.end(chain)),
        Err(fault) => {
            chains.abandon(&chain);
            Err(fault)
        }
    }
}

fn follow(
    track: &Packed,
    features: Features,
    memory: &Table,
    chains: &mut Chains,
    chain: &mut Draft,
    hit: &mut Hit,
    saved: &Saved,
) -> Result<(), Fault> {
    let descriptors = track.descriptors(saved);
    for (index, &descriptor) in descriptors.iter().enumerate() {
        if chain.clipped {
            // It can only be returned, or must wait.
            break;
        }
        if descriptor.flags & INDIRECT == 0 {
            chains.add(chain, memory, hit, descriptor)?;
            continue;
        }
        // An indirect table must be the last descriptor of its chain (2.8.7).
        if !features.indirect || index + 1 != descriptors.len() {
            return Err(Fault::Indirect { index: descriptor.index });
        }
        indirect(chains, chain, memory, hit, descriptor, track.size(), false)?;
    }
    Ok(())
}
