//! Where a frame goes: learns its source, looks up its destination, applies the port's limits. Used by `forward.rs`, and by
//! `tagged.rs` between ports of VLANs.

use crate::{
    Claim, Dropped, Fdb, Learned,
    delivery::To,
    member::{Member, Members},
    port::Port,
};
use ringroad_frame::{Burst, Flow};
use ringroad_wire::ethernet::MacAddr;
use std::time::Duration;

/// The source of a burst.
pub(crate) struct Origin<'a, P: Port> {
    pub number: u32,
    pub queue: usize,
    pub member: &'a Member<P>,
    /// See [`Switch`](crate::Switch).
    pub poured: bool,
    pub now: Duration,
}

impl<P: Port> Origin<'_, P> {
    /// Remembers which queue the flows of these frames came from, for the way back.
    #[inline(never)]
    pub fn note_flows(&self, burst: &Burst) {
        let steering = &self.member.steering;
        let flows = (0..burst.frames().len()).filter_map(|index| Flow::read(burst, index));
        flows.for_each(|flow| steering.note(&flow, self.queue));
    }

    /// Returns a port as the destination of these frames.
    #[inline(always)]
    pub fn to<'b>(&self, member: &'b Member<P>) -> To<'b, P> {
        To { member, hint: self.number as usize + self.queue, queue: 0 }
    }

    /// Returns `Some` if frames that are to go to no single port are flooded: whether to those ports only that forward link-local
    /// frames. All others are dropped and counted.
    pub fn floods(&self, to: u32, frames: usize) -> Option<bool> {
        let why = match to {
            FLOOD => return Some(false),
            LOCAL => return Some(true),
            SPOOFED => Dropped::Spoofed,
            FILTERED => Dropped::LinkLocal,
            ISOLATED => Dropped::Isolated,
            INADMISSIBLE => Dropped::Vlan,
            // Nowhere, or to a port that was removed.
            _ => return None,
        };
        self.member.dropped(self.queue, why, frames);
        None
    }

    /// Returns those of the frames that the port may flood now, counted as what they become on a link. `several`: to more than one
    /// port; one costs no more than a frame addressed to it.
    pub fn granted<'w>(&self, burst: &Burst, which: &'w [u8], several: bool) -> &'w [u8] {
        if !several {
            return which;
        }
        let (mut storm, rate) = (self.member.storm.get(), self.member.limits.storm);
        let granted = storm.take(which.len(), rate, self.now);
        if granted < which.len() {
            self.member.dropped(self.queue, Dropped::Storm, which.len() - granted);
        }
        let which = which.get(..granted).unwrap_or_default();
        if burst.has_offloads() {
            let more = |&index: &u8| {
                let len = burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len());
                burst.offload(index.into()).frames(len) - 1
            };
            storm.owe(which.iter().map(more).sum(), rate);
        }
        self.member.storm.set(storm);
        which
    }
}

/// Returns the ports to which a frame from one of them is flooded.
pub(crate) fn receivers<P: Port>(ports: &Members<P>, from: u32, link_local: bool) -> impl Iterator<Item = &Member<P>> {
    let isolated = is_isolated(ports, from);
    ports.iter().enumerate().filter_map(move |(number, member)| {
        let member = member.as_ref()?;
        let wanted = member.port.is_flooded()
            && !member.is_mirror
            && (number as u32 != from || member.port.hairpin())
            && (!link_local || member.limits.link_local)
            && (!isolated || !member.limits.isolated || number as u32 == from);
        wanted.then_some(member)
    })
}

/// Instead of a port's number: the frame is flooded.
pub(crate) const FLOOD: u32 = u32::MAX;
/// It is flooded to the ports that forward link-local frames.
pub(crate) const LOCAL: u32 = FLOOD - 1;
/// It is dropped: the port may not use the source address.
pub(crate) const SPOOFED: u32 = FLOOD - 2;
/// It is dropped: the port does not forward link-local frames.
pub(crate) const FILTERED: u32 = FLOOD - 3;
/// It is ignored: its destination is at the port that it came from.
pub(crate) const NOWHERE: u32 = FLOOD - 4;
/// It is dropped: both ports are isolated.
pub(crate) const ISOLATED: u32 = FLOOD - 5;
/// It is dropped: the port does not admit its VLAN.
pub(crate) const INADMISSIBLE: u32 = FLOOD - 6;

/// Returns whether a destination is a port, and none of these.
#[inline(always)]
pub(crate) fn is_port(to: u32) -> bool {
    to < INADMISSIBLE
}

/// Learns the source of frames; returns whether the port may use it. `VLANS`: in this VLAN; else `vlan` is 0.
#[inline(always)]
pub(crate) fn admits<P: Port, const VLANS: bool>(
    ports: &Members<P>,
    fdb: &mut Fdb,
    vlan: u16,
    source: MacAddr,
    from: &Origin<'_, P>,
) -> bool {
    let limits = &from.member.limits;
    if limits.fixed && Some(source) != limits.own {
        return false;
    }
    if source.is_multicast() {
        return true;
    }
    let learned = match VLANS {
        true => learn(ports, fdb, vlan, source, from),
        false => fdb.learn(source, from.number, from.now.as_secs() as u32),
    };
    learned == Learned::Known || !is_refused(ports, source, learned, from)
}

/// Looks up the destination of frames from an admitted source. `VLANS`: as for [`admits`].
#[inline(always)]
pub(crate) fn locate<P: Port, const VLANS: bool>(
    ports: &Members<P>,
    fdb: &Fdb,
    vlan: u16,
    destination: MacAddr,
    from: &Origin<'_, P>,
) -> u32 {
    let now = from.now.as_secs() as u32;
    let limits = &from.member.limits;
    if !destination.is_multicast() {
        let at = match VLANS {
            true => lookup(ports, fdb, vlan, destination, now),
            false => fdb.lookup(destination, now),
        };
        return match at {
            None => FLOOD,
            Some(at) if limits.isolated && at != from.number && is_isolated(ports, at) => ISOLATED,
            Some(at) if at != from.number || from.member.port.hairpin() => at,
            // The table may have missed that it moved.
            Some(_) if from.poured => FLOOD,
            Some(_) => NOWHERE,
        };
    }
    match (destination.is_link_local(), limits.link_local) {
        (false, _) => FLOOD,
        (true, true) => LOCAL,
        (true, false) => FILTERED,
    }
}

/// As [`Fdb::learn`], in a VLAN.
fn learn<P: Port>(ports: &Members<P>, fdb: &mut Fdb, vlan: u16, address: MacAddr, from: &Origin<'_, P>) -> Learned {
    match fdb.owner(address) {
        Some(owner) if owner == from.number => Learned::Known,
        Some(owner) if is_member(ports, owner, vlan) => Learned::Owned(owner),
        _ => fdb.learn_in(vlan, address, from.number, from.now.as_secs() as u32),
    }
}

/// As [`Fdb::lookup`], in a VLAN.
fn lookup<P: Port>(ports: &Members<P>, fdb: &Fdb, vlan: u16, address: MacAddr, now: u32) -> Option<u32> {
    let owner = fdb.owner(address).filter(|&owner| is_member(ports, owner, vlan));
    owner.or_else(|| fdb.lookup_in(vlan, address, now))
}

fn is_member<P: Port>(ports: &Members<P>, number: u32, vlan: u16) -> bool {
    ports.get(number as usize).and_then(Option::as_ref).is_some_and(|member| member.vlans().has(vlan))
}

#[cold]
fn is_isolated<P: Port>(ports: &Members<P>, number: u32) -> bool {
    ports.get(number as usize).and_then(Option::as_ref).is_some_and(|member| member.limits.isolated)
}

/// Reports to the port that an address was not simply learned. Returns whether its frames are dropped.
#[cold]
fn is_refused<P: Port>(ports: &Members<P>, address: MacAddr, learned: Learned, from: &Origin<'_, P>) -> bool {
    let (claim, at) = match learned {
        Learned::Known => return false,
        Learned::Crowded => {
            from.member.port.crowded(from.queue);
            return false;
        }
        Learned::Moved(at) => (Claim::Moved, at),
        Learned::Held(at) => (Claim::Held, at),
        Learned::Owned(at) => (Claim::Owned, at),
    };
    if let Some(Some(other)) = ports.get(at as usize) {
        let mut notices = from.member.notices.get();
        let report = notices.take(from.now.as_secs() as u32);
        from.member.notices.set(notices);
        from.member.port.claimed(from.queue, address, claim, &other.port, report);
    }
    claim == Claim::Owned
}
