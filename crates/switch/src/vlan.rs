//! The VLANs that a port belongs to (IEEE 802.1Q, 6.9 and 8.8). Set by whoever adds ports, applied by `tagged.rs`.

use std::fmt;

/// The identifier of a VLAN, 1 to 4094: 0 and 4095 are none (IEEE 802.1Q, table 9-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vid(u16);

impl Vid {
    /// The VLAN of ports that have none, among others that have (IEEE 802.1Q, table 9-2: the default PVID).
    pub const DEFAULT: Vid = Vid(1);

    /// Returns the VLAN of this number; `None` if there is none.
    pub const fn new(number: u16) -> Option<Vid> {
        match number {
            1..=4094 => Some(Vid(number)),
            _ => None,
        }
    }

    /// Returns its number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// The VLANs that a port belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Vlans {
    /// A bit for each VLAN, the untagged one included.
    members: [u64; 64],
    /// The VLAN of frames without a tag, in both directions; `None`: they are not admitted.
    untagged: Option<Vid>,
    access: bool,
}

impl Vlans {
    /// An access port of [`Vid::DEFAULT`]: what ports without VLANs are among others that have some.
    pub const DEFAULT: Vlans = Vlans::access(Vid::DEFAULT);

    /// An access port: all its frames are of one VLAN, and leave it without a tag.
    pub const fn access(vlan: Vid) -> Vlans {
        Vlans { members: with([0; 64], vlan), untagged: Some(vlan), access: true }
    }

    /// A trunk: its frames are tagged, but those of the native VLAN, which it also belongs to.
    pub fn trunk(vlans: impl IntoIterator<Item = Vid>, native: Option<Vid>) -> Vlans {
        let members = vlans.into_iter().chain(native).fold([0; 64], with);
        Vlans { members, untagged: native, access: false }
    }

    /// A trunk of all VLANs.
    pub fn all(native: Option<Vid>) -> Vlans {
        Vlans::trunk((1..=4094).filter_map(Vid::new), native)
    }

    /// Returns whether the port belongs to the VLAN of this number.
    #[inline]
    pub fn has(&self, vlan: u16) -> bool {
        self.members.get(usize::from(vlan >> 6)).is_some_and(|word| word >> (vlan & 63) & 1 == 1)
    }

    /// Returns the VLAN of frames without a tag.
    pub fn untagged(&self) -> Option<Vid> {
        self.untagged
    }

    /// Returns whether it is an access port.
    pub fn is_access(&self) -> bool {
        self.access
    }
}

/// Adds a VLAN to a set.
const fn with(mut members: [u64; 64], Vid(vlan): Vid) -> [u64; 64] {
    let mut word = 0;
    let mut rest = members.as_mut_slice();
    while let Some((first, others)) = rest.split_first_mut() {
        if word == vlan >> 6 {
            *first |= 1 << (vlan & 63);
        }
        (rest, word) = (others, word + 1);
    }
    members
}

impl fmt::Debug for Vlans {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = || (0..4096).filter(|&vlan| self.has(vlan));
        let mut text = out.debug_struct(if self.access { "Access" } else { "Trunk" });
        // A list of all of them tells nobody anything.
        let text = text.field("count", &members().count()).field("first", &members().next());
        text.field("untagged", &self.untagged.map(Vid::get)).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(vlans: &Vlans) -> Vec<u16> {
        (0..=u16::MAX).filter(|&vlan| vlans.has(vlan)).collect()
    }

    #[test]
    fn numbers_of_vlans() {
        assert_eq!(
            [0, 1, 4094, 4095, 4096, u16::MAX].map(|number| Vid::new(number).map(Vid::get)),
            [None, Some(1), Some(4094), None, None, None]
        );
    }

    #[test]
    fn members_of_each_kind_of_port() {
        let vid = |number| Vid::new(number).unwrap();
        let access = Vlans::access(vid(64));
        assert_eq!((members(&access), access.untagged(), access.is_access()), (vec![64], Some(vid(64)), true));
        let trunk = Vlans::trunk([63, 4094, 63].map(vid), Some(vid(1)));
        assert_eq!((members(&trunk), trunk.untagged(), trunk.is_access()), (vec![1, 63, 4094], Some(vid(1)), false));
        assert_eq!(members(&Vlans::all(None)), (1..=4094).collect::<Vec<_>>());
        assert_eq!((Vlans::all(None).untagged(), Vlans::DEFAULT), (None, Vlans::access(vid(1))));
        assert_ne!(Vlans::trunk([vid(1)], Some(vid(1))), Vlans::DEFAULT, "one may send tagged, the other not");
    }
}
