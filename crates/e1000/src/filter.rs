//! Which frames are received (8254x Software Developer's Manual, 3.2.1 and 13.5): by destination address and VLAN. Made of the
//! registers when they change, applied by the receive queue.

use crate::{
    registers::{rah, rctl},
    statistics::ADDRESS,
};

/// Number of receive addresses.
pub(crate) const ADDRESSES: usize = 16;
/// Words of the multicast table and of the VLAN table.
pub(crate) const TABLE: usize = 128;

/// Bits of the destination address that index the multicast table, by RCTL.MO: the position of the lowest one.
const OFFSETS: [u32; 4] = [36, 35, 34, 32];

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    /// It is not received.
    No,
    /// It is for this station.
    Exact,
    /// It has passed the multicast table, which several addresses share.
    Inexact,
}

/// Which frames are received.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    rctl: u32,
    /// Valid addresses, as numbers whose lowest byte is the first one on the wire.
    addresses: [u64; ADDRESSES],
    count: usize,
    multicast: [u32; TABLE],
    vlans: [u32; TABLE],
}

impl Default for Filter {
    /// Nothing is received.
    fn default() -> Filter {
        Filter { rctl: 0, addresses: [0; ADDRESSES], count: 0, multicast: [0; TABLE], vlans: [0; TABLE] }
    }
}

impl Filter {
    /// Sets the bits of RCTL.
    pub fn set_rctl(&mut self, rctl: u32) {
        self.rctl = rctl;
    }

    /// Sets the receive addresses: pairs of words, as in the registers.
    pub fn set_addresses(&mut self, words: &[u32]) {
        self.count = 0;
        for &[low, high] in words.as_chunks::<2>().0 {
            if high & rah::AV != 0
                && let Some(place) = self.addresses.get_mut(self.count)
            {
                *place = u64::from(low) | u64::from(high & 0xffff) << 32;
                self.count += 1;
            }
        }
    }

    /// Sets a word of the multicast table.
    pub fn set_multicast(&mut self, index: usize, word: u32) {
        if let Some(place) = self.multicast.get_mut(index) {
            *place = word;
        }
    }

    /// Sets a word of the VLAN table.
    pub fn set_vlans(&mut self, index: usize, word: u32) {
        if let Some(place) = self.vlans.get_mut(index) {
            *place = word;
        }
    }

    /// Returns whether VLANs are filtered.
    #[inline(always)]
    pub fn has_vlans(&self) -> bool {
        self.rctl & rctl::VFE != 0
    }

    /// Returns whether frames with this tag are received.
    pub fn passes_vlan(&self, tag: u16) -> bool {
        !self.has_vlans() || bit(&self.vlans, u64::from(tag & 0xfff))
    }

    /// Looks up a destination address: the first word of a frame, of which the upper two bytes are ignored.
    #[inline(always)]
    pub fn find(&self, word: u64) -> Match {
        let address = word & ADDRESS;
        if self.addresses.first().is_some_and(|&own| own == address) && self.count > 0 {
            return Match::Exact;
        }
        self.find_other(address)
    }

    fn find_other(&self, address: u64) -> Match {
        let has = |bits: u32| self.rctl & bits != 0;
        let is_multicast = address & 1 != 0;
        let accepted = if address == ADDRESS {
            has(rctl::BAM | rctl::MPE)
        } else {
            has(if is_multicast { rctl::MPE } else { rctl::UPE })
        };
        if accepted || self.addresses.iter().take(self.count).any(|&own| own == address) {
            return Match::Exact;
        }
        let offset = OFFSETS.get((self.rctl >> rctl::MO & 3) as usize).copied().unwrap_or(36);
        if is_multicast && bit(&self.multicast, address >> offset & 0xfff) { Match::Inexact } else { Match::No }
    }
}

fn bit(table: &[u32; TABLE], index: u64) -> bool {
    table.get((index / 32) as usize).is_some_and(|word| word >> (index % 32) & 1 != 0)
}
