//! Lists of spans that keep their memory mapped. Used by the chains of a ring and by bursts.

use crate::{
    span::Span,
    table::{Hit, PushError, Table},
};
use std::sync::Arc;

/// A list of spans of one [`Table`], which it keeps alive while the list is in use. Allocates only when it is created.
pub struct Pieces {
    memory: Option<Arc<Table>>,
    // 'static only inside this type: every accessor shortens the lifetime to that of a borrow of `self`, and the list is
    // emptied before `memory` is released.
    list: Box<[Span<'static>]>,
    len: usize,
}

impl std::fmt::Debug for Pieces {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Pieces").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Pieces {
    /// Returns an empty list with room for `limit` pieces.
    pub fn new(limit: usize) -> Self {
        Pieces { memory: None, list: vec![Span::empty(); limit].into(), len: 0 }
    }

    /// Empties the list and makes `memory` the table that it refers to.
    #[inline]
    pub fn start(&mut self, memory: &Arc<Table>) {
        self.len = 0;
        match &self.memory {
            Some(held) if Arc::ptr_eq(held, memory) => {}
            _ => self.memory = Some(memory.clone()),
        }
    }

    /// Empties the list and releases its memory table.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
        self.memory = None;
    }

    /// Adds the memory at a guest address: usually one piece, more where the range crosses from one region into an adjacent
    /// one.
    ///
    /// # Errors
    /// [`PushError`] if part of the range is unmapped or the list is full; nothing is added then.
    #[inline(always)]
    pub fn push(&mut self, address: u64, len: u32, hit: &mut Hit) -> Result<(), PushError> {
        let Some(memory) = &self.memory else { return Err(PushError::Unmapped) };
        let Some(place) = self.list.get_mut(self.len) else { return Err(PushError::Full) };
        match memory.span(address, len as usize, hit) {
            Some(span) => {
                // SAFETY: `memory` lives at least until the list is emptied, and spans leave this type only with the
                // lifetime of a borrow of it.
                *place = unsafe { span.detach() };
                self.len += 1;
                Ok(())
            }
            None => self.push_crossing(address, len, hit),
        }
    }

    /// Fast path of `push`: adds guest addresses and lengths until the first `None`, an empty or unmapped piece, or a full
    /// list. With `CACHE` each must lie in the region that `hit` names, without it each is looked up among all regions.
    /// Returns the number of pieces added.
    #[inline(always)]
    pub fn extend<const CACHE: bool>(
        &mut self,
        hit: Hit,
        pieces: impl ExactSizeIterator<Item = Option<(u64, u32)>>,
    ) -> usize {
        let Some(memory) = &self.memory else { return 0 };
        let Some(region) = memory.last(if CACHE { hit } else { Hit::default() }) else { return 0 };
        let (guest, whole) = (region.guest(), region.whole());
        let mut added = 0;
        let room = self.list.get_mut(self.len..).unwrap_or_default();
        let count = room.len().min(pieces.len());
        for (place, piece) in room.get_mut(..count).unwrap_or_default().iter_mut().zip(pieces) {
            let Some((address, len)) = piece else { break };
            let span = if CACHE {
                whole.part(address.wrapping_sub(guest), len)
            } else {
                memory.search(address, len as usize).filter(|span| !span.is_empty())
            };
            let Some(span) = span else { break };
            // SAFETY: as in `push`.
            *place = unsafe { span.detach() };
            added += 1;
        }
        self.len += added;
        added
    }

    #[cold]
    fn push_crossing(&mut self, mut address: u64, len: u32, hit: &mut Hit) -> Result<(), PushError> {
        let Some(memory) = &self.memory else { return Err(PushError::Unmapped) };
        let before = self.len;
        let mut left = len as usize;
        while left > 0 {
            let place = self.list.get_mut(self.len).ok_or(PushError::Full);
            match place.and_then(|place| Ok((place, memory.longest(address, left, hit)?))) {
                Ok((place, span)) => {
                    // SAFETY: as in `push`.
                    *place = unsafe { span.detach() };
                    self.len += 1;
                    left -= span.len();
                    // Cannot wrap: the span lies within a region, which ends below 2^64.
                    address += span.len() as u64;
                }
                Err(error) => {
                    self.len = before;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Returns the pieces.
    #[inline(always)]
    pub fn list(&self) -> &[Span<'_>] {
        self.list.get(..self.len).unwrap_or_default()
    }

    /// Removes all pieces from index `len` on.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Returns how many more pieces fit.
    #[inline]
    pub fn room(&self) -> usize {
        self.list.len() - self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    #[test]
    fn a_range_across_two_regions_becomes_two_pieces() {
        let table = Table::default().with(Region::private(8192, 0x1000).unwrap()).unwrap();
        let memory = Arc::new(table.with(Region::private(4096, 0x3000).unwrap()).unwrap());
        let (mut pieces, mut hit) = (Pieces::new(4), Hit::default());
        pieces.start(&memory);
        pieces.push(0x2ff0, 64, &mut hit).unwrap();
        assert_eq!(pieces.list().iter().map(|s| s.len()).collect::<Vec<_>>(), [16, 48]);
        assert_eq!(pieces.push(0x3ff0, 64, &mut hit), Err(PushError::Unmapped));
        assert_eq!(pieces.push(u64::MAX - 4, 64, &mut hit), Err(PushError::Unmapped));
        assert_eq!(pieces.list().len(), 2, "a failed push must add nothing");
        pieces.push(0x1000, 1, &mut hit).unwrap();
        assert_eq!(pieces.push(0x2ff0, 64, &mut hit), Err(PushError::Full));
        pieces.push(0x1000, 1, &mut hit).unwrap();
        assert_eq!(pieces.push(0x1000, 1, &mut hit), Err(PushError::Full));
        pieces.clear();
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
