//! Which frames a driver receives: by destination address and VLAN (virtio 1.3, 5.1.6.5.1 to 5.1.6.5.3). Set by `control.rs`,
//! applied by `device/rx.rs`.

use ringroad_wire::ethernet::MacAddr;

/// Addresses that a table holds. With more, all frames of that kind are received.
const TABLE: usize = 256;
/// Number of VLANs.
const VLANS: usize = 4096;
/// EtherType of a VLAN tag.
const TAG: [u8; 2] = [0x81, 0x00];

/// Which frames a driver receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    own: MacAddr,
    /// Every frame.
    pub(crate) promiscuous: bool,
    pub(crate) all_multicast: bool,
    pub(crate) all_unicast: bool,
    /// None but broadcast.
    pub(crate) no_multicast: bool,
    pub(crate) no_unicast: bool,
    pub(crate) no_broadcast: bool,
    unicast: Addresses,
    multicast: Addresses,
    /// Frames of these VLANs; `None`: of all.
    vlans: Option<Box<[u64; VLANS / 64]>>,
}

impl Filter {
    /// Lets every frame pass.
    pub fn everything(own: MacAddr) -> Filter {
        Filter {
            own,
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: Addresses::default(),
            multicast: Addresses::default(),
            vlans: None,
        }
    }

    pub(crate) fn set_own(&mut self, own: MacAddr) {
        self.own = own;
    }

    pub(crate) fn set_addresses(
        &mut self,
        unicast: impl ExactSizeIterator<Item = MacAddr>,
        multicast: impl ExactSizeIterator<Item = MacAddr>,
    ) {
        (self.unicast, self.multicast) = (Addresses::new(unicast), Addresses::new(multicast));
    }

    /// Adds or removes a VLAN; returns `false` if there is none of that number. From the first command on, frames of all other VLANs
    /// are filtered out; frames without a VLAN (untagged, or tagged with 0) never are.
    pub(crate) fn set_vlan(&mut self, id: u16, on: bool) -> bool {
        if usize::from(id) >= VLANS {
            return false;
        }
        let vlans = self.vlans.get_or_insert_with(|| Box::new([0; VLANS / 64]));
        let Some(word) = vlans.get_mut(usize::from(id) / 64) else { return false };
        let bit = 1 << (id % 64);
        *word = if on { *word | bit } else { *word & !bit };
        true
    }

    /// Returns whether every frame passes.
    pub fn passes_all(&self) -> bool {
        self.promiscuous
    }

    /// Returns whether a frame passes that starts with these bytes; 16 are enough.
    pub fn passes(&self, head: &[u8]) -> bool {
        let Some((&destination, rest)) = head.split_first_chunk::<6>() else { return false };
        self.promiscuous || self.has_vlan(rest.get(6..)) && self.has_address(MacAddr(destination))
    }

    fn has_vlan(&self, from_type: Option<&[u8]>) -> bool {
        let (Some(vlans), Some(&[a, b, c, d, ..])) = (&self.vlans, from_type) else { return true };
        let id = u16::from_be_bytes([c, d]) & 0xfff;
        [a, b] != TAG || id == 0 || vlans.get(usize::from(id) / 64).is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    fn has_address(&self, address: MacAddr) -> bool {
        if address == MacAddr::BROADCAST {
            !self.no_broadcast
        } else if address.is_multicast() {
            !self.no_multicast && (self.all_multicast || self.multicast.has(address))
        } else {
            !self.no_unicast && (self.all_unicast || address == self.own || self.unicast.has(address))
        }
    }
}

/// A set of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Addresses {
    /// Sorted.
    list: Vec<u64>,
    /// There were too many: every address is in the set.
    all: bool,
}

impl Addresses {
    fn new(addresses: impl ExactSizeIterator<Item = MacAddr>) -> Addresses {
        if addresses.len() > TABLE {
            return Addresses { list: Vec::new(), all: true };
        }
        let mut list: Vec<u64> = addresses.map(MacAddr::to_u64).collect();
        list.sort_unstable();
        Addresses { list, all: false }
    }

    fn has(&self, address: MacAddr) -> bool {
        self.all || self.list.binary_search(&address.to_u64()).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MacAddr = MacAddr::local(1);
    const GROUP: MacAddr = MacAddr([0x01, 0, 0x5e, 0, 0, 1]);

    fn frame(destination: MacAddr, tag: Option<u16>) -> Vec<u8> {
        let tag = tag.map_or(vec![0x08, 0x00], |id| [&TAG[..], &id.to_be_bytes(), &[0x08, 0x00]].concat());
        [&destination.0[..], &[2; 6], &tag, &[0; 46]].concat()
    }

    fn filter(change: impl Fn(&mut Filter)) -> Filter {
        let mut filter = Filter { promiscuous: false, ..Filter::everything(OWN) };
        change(&mut filter);
        filter
    }

    /// Which pass of: own address, another, broadcast, a group.
    fn passing(filter: &Filter) -> [bool; 4] {
        [OWN, MacAddr::local(2), MacAddr::BROADCAST, GROUP].map(|to| filter.passes(&frame(to, None)))
    }

    #[test]
    fn modes() {
        assert_eq!(passing(&Filter::everything(OWN)), [true; 4]);
        assert_eq!(passing(&filter(|_| {})), [true, false, true, false]);
        assert_eq!(passing(&filter(|filter| filter.all_multicast = true)), [true, false, true, true]);
        assert_eq!(passing(&filter(|filter| filter.all_unicast = true)), [true, true, true, false]);
        assert_eq!(passing(&filter(|filter| filter.no_broadcast = true)), [true, false, false, false]);
        assert_eq!(passing(&filter(|filter| filter.no_unicast = true)), [false, false, true, false]);
        let quiet = filter(|filter| (filter.all_multicast, filter.no_multicast) = (true, true));
        assert_eq!(passing(&quiet), [true, false, true, false]);
    }

    #[test]
    fn tables_of_addresses() {
        let one = |address| filter(|filter| filter.set_addresses([address].into_iter(), [GROUP].into_iter()));
        assert_eq!(passing(&one(MacAddr::local(2))), [true; 4]);
        assert_eq!(passing(&one(MacAddr::local(3))), [true, false, true, true]);
        let many: Vec<_> = (10..11 + TABLE as u32).map(MacAddr::local).collect();
        let list = |len: usize| filter(|filter| filter.set_addresses(many[..len].iter().copied(), [].into_iter()));
        assert_eq!(passing(&list(TABLE)), [true, false, true, false]);
        assert_eq!(passing(&list(TABLE + 1)), [true, true, true, false], "too many for the table: all");
        assert!(list(TABLE).passes(&frame(many[TABLE - 1], None)));
        let moved = filter(|filter| filter.set_own(MacAddr::local(2)));
        assert_eq!(passing(&moved), [false, true, true, false]);
    }

    #[test]
    fn vlans() {
        let tagged = |filter: &Filter, id| filter.passes(&frame(OWN, Some(id)));
        assert!(tagged(&filter(|_| {}), 5), "no filter before the first command");
        let two = filter(|filter| assert!(filter.set_vlan(5, true) && filter.set_vlan(4095, true)));
        for (id, passes) in [(0, true), (5, true), (0x2005, true), (6, false), (4095, true), (64, false)] {
            assert_eq!(tagged(&two, id), passes, "{id}");
        }
        assert!(two.passes(&frame(OWN, None)) && !two.passes(&frame(MacAddr::local(2), Some(5))));
        let none = filter(|filter| assert!(filter.set_vlan(5, true) && filter.set_vlan(5, false)));
        assert!(!tagged(&none, 5) && !filter(|_| {}).clone().set_vlan(4096, true));
    }

    #[test]
    fn short_frames() {
        let one = filter(|filter| assert!(filter.set_vlan(5, true)));
        assert!(!one.passes(&[]) && !one.passes(&OWN.0[..5]), "not even an address");
        assert!(one.passes(&frame(OWN, Some(6))[..14]), "the tag is beyond what there is");
    }
}
