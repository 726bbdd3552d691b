//! The way of a burst between ports of VLANs (IEEE 802.1Q, 8.6): each frame belongs to one VLAN, by its tag or by the port that it
//! came from, goes to ports of that VLAN only, and leaves each of them with the tag or without. Called by `forward.rs`.

use crate::{
    Dropped, Fdb, Vid, Vlans,
    decide::{FLOOD, INADMISSIBLE, LOCAL, NOWHERE, Origin, SPOOFED, admits, is_port, locate, receivers},
    delivery::{Delivery, Group, before},
    member::{Member, Members},
    port::Port,
};
use ringroad_frame::{ALL, BURST, Burst, Tag};
use ringroad_wire::ethernet::Addresses;

/// The part of a tag's control information that is the VLAN; the rest is its priority.
const VID: u16 = 0xfff;

/// A frame's VLAN, and the form that the frame has now.
#[derive(Clone, Copy)]
struct Form {
    /// 0: its port does not admit it.
    vlan: u16,
    /// What its tag says, where it has one.
    control: u16,
    tagged: bool,
    /// Behind its tag is another one, which must not be taken for it.
    nested: bool,
}

impl Form {
    const INADMISSIBLE: Form = Form { vlan: 0, control: 0, tagged: false, nested: false };

    /// Returns the form of a frame from a port of these VLANs. A tag without a VLAN gets that of untagged frames.
    fn read(burst: &mut Burst, index: usize, vlans: &Vlans) -> Form {
        let untagged = vlans.untagged().map_or(0, Vid::get);
        match burst.tag(index) {
            (Tag::None, _) => Form { vlan: untagged, control: untagged, tagged: false, nested: false },
            (Tag::Control(control), nested) if control & VID == 0 => {
                let control = control | untagged;
                burst.set_tag(index, control);
                Form { vlan: untagged, control, tagged: true, nested }
            }
            (Tag::Control(control), nested) if vlans.has(control & VID) => {
                Form { vlan: control & VID, control, tagged: true, nested }
            }
            _ => Form::INADMISSIBLE,
        }
    }

    /// Gives the frame the form in which it leaves a port of these VLANs; returns `false` if it does not.
    fn leave(&mut self, burst: &mut Burst, index: usize, vlans: &Vlans) -> bool {
        if !vlans.has(self.vlan) {
            return false;
        }
        let tagged = match vlans.untagged() {
            Some(vlan) if vlan.get() == self.vlan => {
                if self.nested && vlans.is_access() {
                    return false;
                }
                // On a trunk its inner tag would name the VLAN. With both it stays where it is.
                self.nested
            }
            _ => true,
        };
        match (self.tagged, tagged) {
            (true, false) => burst.pop_tag(index),
            (false, true) if !burst.push_tag(index, self.control) => return false,
            _ => {}
        }
        self.tagged = tagged;
        true
    }
}

/// As in `forward.rs`: learns sources, looks up destinations, and puts the frames there, destination by destination.
#[inline(never)]
pub(crate) fn forward<'a, P: Port>(
    ports: &'a Members<P>,
    fdb: &mut Fdb,
    burst: &mut Burst,
    from: &Origin<'_, P>,
    delivery: &mut Delivery<'a, P>,
) {
    let mut forms = [Form::INADMISSIBLE; BURST];
    let mut destinations = [(NOWHERE, 0); BURST];
    let count = burst.frames().len();
    let mut last = None;
    for (index, (form, place)) in forms.iter_mut().zip(&mut destinations).enumerate().take(count) {
        *form = Form::read(burst, index, from.member.vlans());
        let Some(frame) = burst.frames().get(index) else { break };
        let flow = (frame.addresses(), form.vlan);
        let to = match last {
            Some((before, to)) if before == flow => to,
            _ if form.vlan == 0 => INADMISSIBLE,
            _ => {
                let Addresses { source, destination } = Addresses::from_words(flow.0);
                match admits::<P, true>(ports, fdb, form.vlan, source, from) {
                    true => locate::<P, true>(ports, fdb, form.vlan, destination, from),
                    false => SPOOFED,
                }
            }
        };
        last = Some((flow, to));
        // To one port together, whatever their VLANs.
        *place = (to, if to == FLOOD || to == LOCAL { form.vlan } else { 0 });
    }
    let destination = |index: u8| destinations.get(usize::from(index)).copied().unwrap_or((NOWHERE, 0));
    // As in `forward.rs`, what is flooded or dropped comes last.
    let all = Group::of(ALL.get(..count).unwrap_or(&ALL));
    let (single, others) = all.split(|index| is_port(destination(index).0));
    let mut stuck = 0;
    for mut left in [single, others] {
        while let Some(&first) = left.list().first() {
            let (to, vlan) = destination(first);
            let group;
            (group, left) = left.split(|index| destination(index) == (to, vlan));
            let which = before(group.list(), delivery.end);
            if which.is_empty() {
                continue;
            }
            if let Some(Some(member)) = ports.get(to as usize) {
                let leaving = leave(burst, &mut forms, which, member);
                if !leaving.list().is_empty() {
                    delivery.put_waiting(to, from.to(member), burst, leaving.list());
                }
                stuck |= mask(which) & !mask(leaving.list());
            } else if let Some(local) = from.floods(to, which.len()) {
                flood(ports, burst, &mut forms, from, (vlan, local), which, delivery);
            }
        }
    }
    // Those behind frames that wait come again.
    let come = before(ALL.get(..count).unwrap_or(&ALL), delivery.end);
    count_dropped(from, mask(come) & stuck);
}

/// Floods frames of one VLAN: first to ports that they leave without a tag, as a tag that was popped can be pushed again, but not one
/// that was pushed be popped without loss.
fn flood<'a, P: Port>(
    ports: &'a Members<P>,
    burst: &mut Burst,
    forms: &mut [Form; BURST],
    from: &Origin<'_, P>,
    (vlan, local): (u16, bool),
    which: &[u8],
    delivery: &mut Delivery<'a, P>,
) {
    let members = || receivers(ports, from.number, local).filter(|member| member.vlans().has(vlan));
    let which = from.granted(burst, which, members().nth(1).is_some());
    if which.is_empty() || members().next().is_none() {
        return;
    }
    let mut left = 0;
    let is_tagged = |member: &Member<P>| member.vlans().untagged().is_none_or(|untagged| untagged.get() != vlan);
    for tagged in [false, true] {
        for receiver in members().filter(|member| is_tagged(member) == tagged) {
            let leaving = leave(burst, forms, which, receiver);
            if !leaving.list().is_empty() {
                delivery.put_dropping(from.to(receiver), burst, leaving.list());
            }
            left |= mask(leaving.list());
        }
    }
    count_dropped(from, mask(which) & !left);
}

/// Gives frames the form in which they leave a port; returns those that do.
fn leave<P: Port>(burst: &mut Burst, forms: &mut [Form; BURST], which: &[u8], to: &Member<P>) -> Group {
    let mut leaves = [false; BURST];
    for &index in which {
        let index = usize::from(index);
        if let (Some(form), Some(leaves)) = (forms.get_mut(index), leaves.get_mut(index)) {
            *leaves = form.leave(burst, index, to.vlans());
        }
    }
    Group::of(which).split(|index| leaves.get(usize::from(index)).copied().unwrap_or_default()).0
}

/// Returns these indices as bits.
fn mask(which: &[u8]) -> u64 {
    const { assert!(BURST == 64) };
    which.iter().fold(0, |mask, &index| mask | 1 << (index & 63))
}

/// Counts frames that leave no port because of their tags.
fn count_dropped<P: Port>(from: &Origin<'_, P>, which: u64) {
    if which != 0 {
        from.member.dropped(from.queue, Dropped::Vlan, which.count_ones() as usize);
    }
}
