//! Where the buffers of a driver's queue lie. Used by `driver.rs`.

use ringroad_mem::{Hit, Pieces, Span, Table};
use ringroad_ring::Buffer;
use std::sync::Arc;

/// Where the buffers of a group lie, in units of their length, in the order in which they are used.
const ORDER: [u32; 8] = [0, 5, 1, 7, 2, 4, 3, 6];

/// One buffer for each id, in the driver's memory.
pub(super) struct Buffers {
    /// Without their first `lead` bytes.
    pub spans: Pieces,
    /// These bytes, if there are any.
    leads: Pieces,
    pub addresses: Box<[u64]>,
    /// Length of each.
    pub stride: usize,
    /// The same without the lead.
    pub room: usize,
    pub lead: usize,
}

impl Buffers {
    /// Buffers that are used one after the other lie at unequal distances: a prefetcher of the device's core would recognise equal
    /// ones, even two in a row, and take lines of the next buffers, which the driver is about to write to or has not read yet. But the
    /// buffers of a burst share few pages, as each page costs both cores a page-table walk: buffers are permuted within groups of
    /// eight.
    ///
    /// `lead`: how much of a longer header is in front of the spans, so that frames lie at the same place in each.
    pub fn new(memory: &Arc<Table>, first: u64, stride: usize, size: u32, lead: usize) -> Option<Buffers> {
        let place = |id: u32| {
            let within = ORDER.get(id as usize % ORDER.len()).copied().unwrap_or_default();
            if size.is_multiple_of(ORDER.len() as u32) { id - id % ORDER.len() as u32 + within } else { id }
        };
        let addresses: Box<[u64]> = (0..size).map(|id| first + u64::from(place(id)) * stride as u64).collect();
        let room = stride.checked_sub(lead)?;
        let pieces = |at: usize, len: usize| {
            let (mut pieces, mut hit) = (Pieces::new(size as usize), Hit::default());
            pieces.start(memory);
            let mut push = |&address: &u64| pieces.push(address + at as u64, len as u32, &mut hit).is_ok();
            addresses.iter().all(&mut push).then_some(pieces)
        };
        let leads = if lead == 0 { Pieces::new(0) } else { pieces(0, lead)? };
        let spans = pieces(lead, room)?;
        Some(Buffers { spans, leads, addresses, stride, room, lead })
    }

    #[inline(always)]
    pub fn span(&self, id: u16) -> Option<Span<'_>> {
        self.spans.list().get(id as usize).copied()
    }

    /// Returns what is in front of a buffer's span.
    pub fn lead(&self, id: u16) -> Option<Span<'_>> {
        self.leads.list().get(id as usize).copied()
    }

    /// Returns the first `len` bytes of a buffer.
    #[inline(always)]
    pub fn buffer(&self, id: u16, len: usize) -> Buffer {
        let address = self.addresses.get(id as usize).copied().unwrap_or_default();
        Buffer { address, len: len as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::ORDER;

    #[test]
    fn no_two_distances_in_a_row_are_equal() {
        let places: Vec<i32> = (0..16).map(|id| 8 * (id / 8) + ORDER[id as usize % 8] as i32).collect();
        let distances: Vec<i32> = places.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(distances.windows(2).all(|pair| pair[0] != pair[1]), "{distances:?}");
        let mut group = ORDER;
        group.sort_unstable();
        assert_eq!(group, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
