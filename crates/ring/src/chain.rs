//! Descriptor chains as seen by the device end: validated, translated, in bursts (virtio 1.3, 2.7.5 and 2.8.5). Filled by
//! `split::Device` and `packed::Device`, read by the device crates.

use crate::{DESCRIPTOR, Fault, INDIRECT, NEXT, WRITE};
use ringroad_mem::{Hit, Pieces, PushError, Span, Table};
use std::sync::Arc;

/// Maximum number of frames or packets in a burst. Measured: 5 to 11 % more 64-byte frames than with 32.
pub const BURST: usize = 64;

/// A private copy of a descriptor, read once.
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    pub index: u16,
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    /// Split: `next`. Packed: the buffer id.
    pub tail: u16,
}

/// A descriptor chain that the driver made available.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// Readable length (low half) and writable length: one word, so that the fast path sets both with one store.
    lens: u64,
    /// Four 16-bit fields: index of the first piece, of the first writable piece, of the end, and the number of ring slots.
    place: u64,
    /// Bytes that the device has written to the chain; must be set before the chain is returned.
    pub written: u32,
    /// Split: index of the first descriptor. Packed: buffer id. Identifies the chain when it is returned.
    pub id: u16,
    /// The chain has more pieces than a burst can hold and can only be returned. Its lengths are lower bounds, as it was
    /// not followed to its end.
    pub clipped: bool,
}

impl Chain {
    /// A chain without pieces, to be returned unread.
    pub(crate) fn private(id: u16, slots: u16) -> Chain {
        Chain { id, place: Self::place(slots, [0; 3]), ..Chain::default() }
    }

    #[inline(always)]
    const fn place(slots: u16, [first, middle, end]: [u16; 3]) -> u64 {
        first as u64 | (middle as u64) << 16 | (end as u64) << 32 | (slots as u64) << 48
    }

    /// Bytes that the device may read.
    #[inline(always)]
    pub fn readable_len(&self) -> u32 {
        self.lens as u32
    }

    /// Bytes that the device may write.
    #[inline(always)]
    pub fn writable_len(&self) -> u32 {
        (self.lens >> 32) as u32
    }

    /// Returns whether the chain is device-readable only and not longer than `max` bytes, with one compare.
    #[inline(always)]
    pub fn is_readable(&self, max: u32) -> bool {
        self.lens <= u64::from(max)
    }

    /// Returns how many ring entries the chain takes (split: always 1).
    #[inline(always)]
    pub fn slots(&self) -> u16 {
        (self.place >> 48) as u16
    }

    /// The index of its first piece among those of the burst.
    #[inline(always)]
    pub fn first(&self) -> usize {
        self.place as u16 as usize
    }

    #[inline(always)]
    fn middle(&self) -> usize {
        (self.place >> 16) as u16 as usize
    }

    #[inline(always)]
    fn end(&self) -> usize {
        (self.place >> 32) as u16 as usize
    }
}

/// A chain under construction.
pub(crate) struct Draft {
    pub id: u16,
    pub slots: u16,
    first: usize,
    middle: usize,
    readable_len: u32,
    writable_len: u32,
    /// The chain has more pieces than there is room for; the rest is ignored.
    pub clipped: bool,
}

/// A burst of chains and the spans that they consist of. Reused for every burst, so that nothing is allocated per packet.
pub struct Chains {
    pieces: Pieces,
    list: Box<[Chain]>,
    len: usize,
    /// Some chain has no piece or more than one.
    multi_piece: bool,
    /// A chain did not fit in addition to the others.
    full: bool,
    /// They are of a queue that the device only reads from.
    read_only: bool,
}

impl std::fmt::Debug for Chains {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Chains").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Chains {
    /// Returns an empty burst with room for `chains` chains of `pieces` spans in total.
    pub fn new(chains: usize, pieces: u16) -> Self {
        Chains {
            pieces: Pieces::new(pieces as usize),
            list: vec![Chain::default(); chains].into(),
            len: 0,
            multi_piece: false,
            full: false,
            read_only: false,
        }
    }

    /// For a queue that the device only reads from: entries of a packed ring's indirect table are readable whatever their WRITE
    /// flags say, because DPDK's driver leaves them set. In the ring, and in a split ring's tables, the flags count.
    pub fn read_only(self) -> Self {
        Chains { read_only: true, ..self }
    }

    /// Empties the burst and sets the memory table of the next chains.
    #[inline]
    pub fn start(&mut self, memory: &Arc<Table>) {
        (self.len, self.multi_piece, self.full) = (0, false, false);
        self.pieces.start(memory);
    }

    /// Empties the burst.
    #[inline]
    pub fn empty(&mut self) {
        (self.len, self.multi_piece, self.full) = (0, false, false);
        self.pieces.truncate(0);
    }

    /// Empties the burst and releases its memory table.
    #[inline]
    pub fn clear(&mut self) {
        (self.len, self.multi_piece, self.full) = (0, false, false);
        self.pieces.clear();
    }

    /// Returns the chains, oldest first.
    #[inline(always)]
    pub fn list(&self) -> &[Chain] {
        self.list.get(..self.len).unwrap_or_default()
    }

    /// Returns the chains, to set how many bytes were written.
    #[inline(always)]
    pub fn list_mut(&mut self) -> &mut [Chain] {
        self.list.get_mut(..self.len).unwrap_or_default()
    }

    /// Returns all chains and their pieces if each chain has exactly one piece, as nearly always.
    #[inline(always)]
    pub fn plain(&self) -> Option<(&[Chain], &[Span<'_>])> {
        (!self.multi_piece).then(|| (self.list(), self.pieces.list()))
    }

    /// Like `plain`, to set how many bytes were written.
    #[inline(always)]
    pub fn plain_mut(&mut self) -> Option<(&mut [Chain], &[Span<'_>])> {
        if self.multi_piece {
            return None;
        }
        Some((self.list.get_mut(..self.len).unwrap_or_default(), self.pieces.list()))
    }

    /// Returns the first piece of a chain, to prefetch it.
    #[inline(always)]
    pub fn first_piece(&self, index: usize) -> Option<Span<'_>> {
        self.pieces.list().get(self.list().get(index)?.first()).copied()
    }

    /// Returns whether a chain that does not fit must wait for the next burst: only if the burst has other chains.
    #[inline(always)]
    pub(crate) fn must_wait(&self, draft: &Draft) -> bool {
        draft.clipped && self.len > 0
    }

    /// Returns the number of pieces of all chains.
    #[inline(always)]
    pub fn pieces(&self) -> usize {
        self.pieces.list().len()
    }

    /// The list of pieces, for a burst of frames to borrow: until it is back, chains have none.
    #[inline(always)]
    pub fn pieces_mut(&mut self) -> &mut Pieces {
        &mut self.pieces
    }

    /// Returns how many more chains fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.list.len() - self.len
    }

    /// Returns whether a chain with too many pieces to fit in addition to the others was left for the next burst.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Returns the pieces of a chain that the device may read.
    #[inline(always)]
    pub fn readable(&self, chain: &Chain) -> &[Span<'_>] {
        self.pieces.list().get(chain.first()..chain.middle()).unwrap_or_default()
    }

    /// Returns the pieces of a chain that the device may write.
    #[inline(always)]
    pub fn writable(&self, chain: &Chain) -> &[Span<'_>] {
        self.pieces.list().get(chain.middle()..chain.end()).unwrap_or_default()
    }

    /// Returns the writable pieces of `count` consecutive chains that have nothing to read.
    pub fn writable_range(&self, first: usize, count: usize) -> &[Span<'_>] {
        let chains = self.list().get(first..first + count).unwrap_or_default();
        let (Some(first), Some(last)) = (chains.first(), chains.last()) else { return &[] };
        self.pieces.list().get(first.middle()..last.end()).unwrap_or_default()
    }

    /// Drops the chains from index `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        if let Some(chain) = self.list().get(len) {
            self.pieces.truncate(chain.first());
            self.len = len;
        }
    }

    pub(crate) fn begin(&self, slots: u16) -> Draft {
        let first = self.pieces.list().len();
        Draft { id: 0, slots, first, middle: first, readable_len: 0, writable_len: 0, clipped: false }
    }

    /// Fast path: adds single-buffer chains, all writable or all readable, given by id, guest address and length. Stops at
    /// the first `None`, at a buffer outside the region that matched last (without `CACHE`: outside all regions), or when
    /// there is no room. Returns how many were added; the normal path handles what follows, valid or not.
    #[inline(always)]
    pub(crate) fn singles<const CACHE: bool>(
        &mut self,
        hit: Hit,
        writable: bool,
        buffers: impl ExactSizeIterator<Item = Option<(u16, u64, u32)>>,
    ) -> usize {
        let before = self.pieces.list().len() as u16;
        let mut place = Chain::place(1, [before, before + u16::from(!writable), before + 1]);
        let places = self.list.get_mut(self.len..).unwrap_or_default();
        let count = places.len().min(buffers.len());
        // Equal lengths and no early end: one loop counter for all iterators.
        let places = places.get_mut(..count).unwrap_or_default();
        let pieces = places.iter_mut().zip(buffers).map(|(chain, buffer)| {
            let (id, address, len) = buffer?;
            let lens = if writable { u64::from(len) << 32 } else { len.into() };
            *chain = Chain { lens, place, written: 0, id, clipped: false };
            // Adds 1 to all three indices. They stay below 2^16: no carry.
            place = place.wrapping_add(Chain::place(0, [1; 3]));
            Some((address, len))
        });
        let added = self.pieces.extend::<CACHE>(hit, pieces);
        self.len += added;
        added
    }

    /// Adds one buffer to a chain under construction.
    #[inline(always)]
    pub(crate) fn add(
        &mut self,
        chain: &mut Draft,
        memory: &Table,
        hit: &mut Hit,
        descriptor: Descriptor,
    ) -> Result<(), Fault> {
        let Descriptor { index, address, len, flags, .. } = descriptor;
        if len == 0 {
            return Err(Fault::ZeroLength { index });
        }
        let writable = flags & WRITE != 0;
        if !writable && chain.writable_len > 0 {
            return Err(Fault::Order { index });
        }
        let total = (chain.readable_len + chain.writable_len).checked_add(len).ok_or(Fault::Length { index })?;
        match self.pieces.push(address, len, hit) {
            Ok(()) => {}
            Err(PushError::Full) => chain.clipped = true,
            Err(PushError::Unmapped) => {
                return Err(Fault::Outside { index, address, len, regions: memory.regions().len() as u16 });
            }
        }
        if writable {
            chain.writable_len = total - chain.readable_len;
        } else {
            chain.readable_len = total;
            chain.middle = self.pieces.list().len();
        }
        Ok(())
    }

    /// Completes a chain; the caller has checked that there is room for it. Returns `false` if it does not fit in addition
    /// to the others and must wait for the next burst.
    pub(crate) fn end(&mut self, draft: Draft) -> bool {
        let Draft { id, slots, first, middle, readable_len, writable_len, clipped } = draft;
        if clipped {
            self.pieces.truncate(first);
            if self.len > 0 {
                self.full = true;
                return false;
            }
        }
        let end = self.pieces.list().len();
        let Some(place) = self.list.get_mut(self.len) else { return false };
        *place = Chain {
            lens: u64::from(readable_len) | u64::from(writable_len) << 32,
            place: Chain::place(slots, [first, middle.min(end), end].map(|index| index as u16)),
            written: 0,
            id,
            clipped,
        };
        self.len += 1;
        self.multi_piece |= end != first + 1;
        true
    }

    /// Removes the pieces of a chain that turned out to be faulty.
    pub(crate) fn abandon(&mut self, chain: &Draft) {
        self.pieces.truncate(chain.first);
    }
}

/// Follows an indirect table: linked by `next` in a split ring, sequential in a packed one. Stops when there is no room for
/// more pieces, so that a table with many entries costs no more time than that.
pub(crate) fn indirect(
    chains: &mut Chains,
    chain: &mut Draft,
    memory: &Table,
    hit: &mut Hit,
    descriptor: Descriptor,
    size: u16,
    linked: bool,
) -> Result<(), Fault> {
    let Descriptor { index, address, len, flags, .. } = descriptor;
    if flags & NEXT != 0 {
        return Err(Fault::Indirect { index });
    }
    if len == 0 || !(len as usize).is_multiple_of(DESCRIPTOR) {
        return Err(Fault::IndirectLength { index, len });
    }
    let count = len as usize / DESCRIPTOR;
    let outside = Fault::Outside { index, address, len, regions: memory.regions().len() as u16 };
    let table = memory.span(address, len as usize, hit).ok_or(outside)?;
    // DPDK's driver marks the virtio-net header in a packed ring's indirect table as writable, and also the entry whose index is
    // that of the table's descriptor in the ring. Writable entries come last (2.8.17), so a table whose last entry is readable has
    // none, whatever the other entries say.
    let last =
        || table.skip((count - 1) * DESCRIPTOR).read_once::<16>().map_or(0, |words| (halves(words).1 >> 48) as u16);
    let readable = !linked && (chains.read_only || last() & WRITE == 0);
    let ignored = if readable { WRITE } else { 0 };
    let mut at = 0;
    for taken in 0.. {
        if taken >= size {
            return Err(Fault::Loop { index: at as u16, size });
        }
        let Some(words) = table.skip(at * DESCRIPTOR).read_once::<16>() else { return Err(outside) };
        let (address, word) = halves(words);
        let (len, flags, next) =
            (word as u32, if linked { word >> 32 } else { word >> 48 } as u16, (word >> 48) as u16);
        if flags & INDIRECT != 0 {
            return Err(Fault::Indirect { index: at as u16 });
        }
        let flags = flags & !ignored;
        chains.add(chain, memory, hit, Descriptor { index: at as u16, address, len, flags, tail: next })?;
        if chain.clipped {
            return Ok(());
        }
        if linked {
            if flags & NEXT == 0 {
                return Ok(());
            }
            if next as usize >= count {
                return Err(Fault::Index { index: next, size: count.min(u16::MAX as usize) as u16 });
            }
            at = next as usize;
        } else {
            at += 1;
            if at == count {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn halves(bytes: [u8; 16]) -> (u64, u64) {
    let value = u128::from_le_bytes(bytes);
    (value as u64, (value >> 64) as u64)
}
