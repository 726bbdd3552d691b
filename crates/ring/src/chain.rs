//! Descriptor chains as the device end sees them: checked, translated, in bursts. Filled by `split::Device` and
//! `packed::Device`, read by devices.

use crate::{DESCRIPTOR, INDIRECT, NEXT, WRITE};
use ringroad_mem::{Hit, Outside, Pieces, Span, Table};
use std::sync::Arc;

/// How many frames or packets make a burst, at most. Measured: 5 to 11 % more frames of 64 bytes than with 32.
pub const BURST: usize = 64;

/// What a driver can do wrong with a queue. The queue is of no use any more: nothing in it can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The available index went further than there are entries (2.7.6).
    #[error("available index {index} is {ahead} ahead of {next}, more than the queue's {size} entries")]
    AvailableJump {
        /// What the driver wrote.
        index: u16,
        /// What we take next.
        next: u16,
        /// The distance.
        ahead: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// More descriptors are available in a packed ring than it has: some of them twice.
    #[error("more descriptors are available than the ring's {size} entries")]
    Overrun {
        /// Entries of the queue.
        size: u16,
    },
    /// The available ring or a `next` field names a descriptor that does not exist (2.7.5).
    #[error("descriptor {index} does not exist in a table of {size}")]
    Index {
        /// What was named.
        index: u16,
        /// How many there are.
        size: u16,
    },
    /// A descriptor that refers to memory that is not the guest's.
    #[error("descriptor {index} at {address:#x} + {len} lies outside guest memory ({regions} regions)")]
    Outside {
        /// Its index in the ring or table.
        index: u16,
        /// Guest address.
        address: u64,
        /// Bytes.
        len: u32,
        /// How many regions there are.
        regions: u16,
    },
    /// A buffer of no bytes.
    #[error("descriptor {index} has length 0")]
    ZeroLength {
        /// Its index in the ring or table.
        index: u16,
    },
    /// A chain of more than 2³² − 1 bytes (2.7.5).
    #[error("the descriptor chain with descriptor {index} is longer than 4 GiB")]
    Length {
        /// Index of the descriptor that was too much.
        index: u16,
    },
    /// A chain with a loop, or longer than the queue (2.7.5.3.1, 2.8.20).
    #[error("the descriptor chain with descriptor {index} loops or has more than {size} descriptors")]
    Loop {
        /// Index of the descriptor that was too much.
        index: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A readable descriptor after a writable one (2.7.4.2, 2.8.17).
    #[error("descriptor {index} is device-readable but follows a device-writable one")]
    Order {
        /// Its index in the ring or table.
        index: u16,
    },
    /// A device-writable descriptor where the device only reads (transmit queue).
    #[error("the descriptor chain with buffer {id} is device-writable in a queue that the device only reads from")]
    Writable {
        /// The chain's head or buffer id.
        id: u16,
    },
    /// A device-readable descriptor where the device only writes (receive queue).
    #[error("the descriptor chain with buffer {id} is device-readable in a queue that the device only writes to")]
    Readable {
        /// The chain's head or buffer id.
        id: u16,
    },
    /// Less than the header of the device type needs.
    #[error("the descriptor chain with buffer {id} has {len} bytes, fewer than the header's {needed}")]
    Header {
        /// The chain's head or buffer id.
        id: u16,
        /// Bytes that there are.
        len: u32,
        /// Bytes that it needs.
        needed: u32,
    },
    /// INDIRECT without the feature, inside an indirect table, or together with NEXT (2.7.5.3.1).
    #[error(
        "descriptor {index} is indirect where it may not be (not negotiated, inside an indirect table, or with NEXT)"
    )]
    Indirect {
        /// Its index in the ring or table.
        index: u16,
    },
    /// An indirect table that is empty or not a multiple of 16 bytes long (2.7.5.3.2).
    #[error("descriptor {index} refers to an indirect table of {len} bytes, which is not a positive multiple of 16")]
    IndirectLength {
        /// Its index in the ring.
        index: u16,
        /// Bytes of the table.
        len: u32,
    },
}

/// One descriptor, read once.
#[derive(Clone, Copy)]
pub(crate) struct Descriptor {
    pub index: u16,
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    /// Split: `next`. Packed: the buffer id.
    pub tail: u16,
}

/// One descriptor chain that the driver made available.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// Readable and writable length: one word, so that the fast path writes it at once.
    lens: u64,
    /// Index of the first piece, of the first writable one, and of what follows the last; and the slots.
    place: u64,
    /// How many bytes the device has written into it: to be set before it is given back.
    pub written: u32,
    /// Split: index of its first descriptor. Packed: its buffer id. What goes back to the driver.
    pub id: u16,
    /// It has more pieces than a burst can hold; it can only be given back. Its lengths are at least what they say: it was
    /// not followed to its end.
    pub clipped: bool,
}

impl Chain {
    /// A chain that is given back unseen.
    #[cfg(not(loom))]
    pub(crate) fn private(id: u16, slots: u16) -> Chain {
        Chain { id, place: Self::place(slots, [0; 3]), ..Chain::default() }
    }

    #[inline(always)]
    const fn place(slots: u16, [first, middle, end]: [u16; 3]) -> u64 {
        first as u64 | (middle as u64) << 16 | (end as u64) << 32 | (slots as u64) << 48
    }

    /// Bytes for the device to read.
    #[inline(always)]
    pub fn readable_len(&self) -> u32 {
        self.lens as u32
    }

    /// Bytes for the device to write.
    #[inline(always)]
    pub fn writable_len(&self) -> u32 {
        (self.lens >> 32) as u32
    }

    /// Whether it is for the device to read only, and not longer than `most` bytes: one compare for both.
    #[inline(always)]
    pub fn is_readable(&self, most: u32) -> bool {
        self.lens <= u64::from(most)
    }

    /// How many entries it takes in the ring (split: always 1).
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

/// A chain that is being made.
pub(crate) struct Draft {
    pub id: u16,
    pub slots: u16,
    first: usize,
    middle: usize,
    readable_len: u32,
    writable_len: u32,
    /// It has more pieces than there is room for. What comes then is of no use.
    pub clipped: bool,
}

/// A burst of chains and the spans that they consist of. Reused for ever, so that nothing is allocated per packet.
pub struct Chains {
    pieces: Pieces,
    list: Box<[Chain]>,
    len: usize,
    /// There were other chains than those of one piece.
    long: bool,
    /// A chain did not fit beside the others.
    full: bool,
}

impl Chains {
    /// Room for `chains` chains with `pieces` spans altogether.
    pub fn new(chains: usize, pieces: u16) -> Self {
        Chains {
            pieces: Pieces::new(pieces as usize),
            list: vec![Chain::default(); chains].into(),
            len: 0,
            long: false,
            full: false,
        }
    }

    /// Empties the burst for chains of this memory.
    #[inline]
    pub fn start(&mut self, memory: &Arc<Table>) {
        (self.len, self.long, self.full) = (0, false, false);
        self.pieces.start(memory);
    }

    /// Empties the burst.
    #[inline]
    pub fn empty(&mut self) {
        (self.len, self.long, self.full) = (0, false, false);
        self.pieces.truncate(0);
    }

    /// Empties the burst and lets its memory go.
    #[inline]
    pub fn clear(&mut self) {
        (self.len, self.long, self.full) = (0, false, false);
        self.pieces.clear();
    }

    /// The chains, oldest first.
    #[inline(always)]
    pub fn list(&self) -> &[Chain] {
        self.list.get(..self.len).unwrap_or_default()
    }

    /// The chains, to note how much was written to them.
    #[inline(always)]
    pub fn list_mut(&mut self) -> &mut [Chain] {
        self.list.get_mut(..self.len).unwrap_or_default()
    }

    /// All chains and their pieces, if each has just one, as nearly always.
    #[inline(always)]
    pub fn plain(&self) -> Option<(&[Chain], &[Span<'_>])> {
        (!self.long).then(|| (self.list(), self.pieces.list()))
    }

    /// The same, to note how much was written to them.
    #[inline(always)]
    pub fn plain_mut(&mut self) -> Option<(&mut [Chain], &[Span<'_>])> {
        if self.long {
            return None;
        }
        Some((self.list.get_mut(..self.len).unwrap_or_default(), self.pieces.list()))
    }

    /// The first piece of a chain, to be fetched.
    #[inline(always)]
    pub fn first_piece(&self, index: usize) -> Option<Span<'_>> {
        self.pieces.list().get(self.list().get(index)?.first()).copied()
    }

    /// Whether a chain that does not fit waits for the next burst, as there are others.
    #[inline(always)]
    pub(crate) fn is_waiting(&self, draft: &Draft) -> bool {
        draft.clipped && self.len > 0
    }

    /// How many pieces all chains have.
    #[inline(always)]
    pub fn pieces(&self) -> usize {
        self.pieces.list().len()
    }

    /// The list of pieces, for a burst of frames to borrow: until it is back, chains have none.
    #[inline(always)]
    pub fn pieces_mut(&mut self) -> &mut Pieces {
        &mut self.pieces
    }

    /// How many more chains fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.list.len() - self.len
    }

    /// Whether a chain waits that has not fit beside the others, as it has too many pieces.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// What the device reads of a chain.
    #[inline(always)]
    pub fn readable(&self, chain: &Chain) -> &[Span<'_>] {
        self.pieces.list().get(chain.first()..chain.middle()).unwrap_or_default()
    }

    /// What the device writes of a chain.
    #[inline(always)]
    pub fn writable(&self, chain: &Chain) -> &[Span<'_>] {
        self.pieces.list().get(chain.middle()..chain.end()).unwrap_or_default()
    }

    /// What the device writes of `count` chains in a row that have nothing to read.
    pub fn writable_range(&self, first: usize, count: usize) -> &[Span<'_>] {
        let chains = self.list().get(first..first + count).unwrap_or_default();
        let (Some(first), Some(last)) = (chains.first(), chains.last()) else { return &[] };
        self.pieces.list().get(first.middle()..last.end()).unwrap_or_default()
    }

    /// Forgets the chains from the `len`th on.
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

    /// The fast path: adds chains of one buffer each, as nearly all are, all for the device to write or none, given by id,
    /// guest address and length; up to the first `None`, as long as each lies in the region that answered last (without
    /// `CACHE`: in any), and there is room. Says how many it has added; what comes then is for the normal path, right or
    /// wrong.
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
        // Lists of the same length and nothing that ends early: one counter for all of them.
        let places = places.get_mut(..count).unwrap_or_default();
        let pieces = places.iter_mut().zip(buffers).map(|(chain, buffer)| {
            let (id, address, len) = buffer?;
            let lens = if writable { u64::from(len) << 32 } else { len.into() };
            *chain = Chain { lens, place, written: 0, id, clipped: false };
            // All three one further. They are fewer than 2^16: no carry.
            place = place.wrapping_add(Chain::place(0, [1; 3]));
            Some((address, len))
        });
        let added = self.pieces.extend::<CACHE>(hit, pieces);
        self.len += added;
        added
    }

    /// Adds one buffer to the chain that is being made.
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
            Err(Outside::List) => chain.clipped = true,
            Err(Outside::Memory) => {
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

    /// Ends a chain, for which there is room. `false`: it did not fit beside the others and has to wait for the next burst.
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
        self.long |= end != first + 1;
        true
    }

    /// Takes back what `add` did for a chain that turned out to be faulty.
    pub(crate) fn abandon(&mut self, chain: &Draft) {
        self.pieces.truncate(chain.first);
    }
}

/// Follows an indirect table: linked by `next` in a split ring, in sequence in a packed one. It ends where there is no more
/// room for pieces: a table may have more entries than it takes time for.
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
    // Writable entries come last (2.8.17), so that a table with a readable one at its end has none; what says otherwise
    // before it does not count: DPDK's driver marks the virtio-net header of a packed ring's indirect table as writable.
    let last = table.skip((count - 1) * DESCRIPTOR).read_once::<16>().map_or(0, |words| (halves(words).1 >> 48) as u16);
    let ignored = if !linked && last & WRITE == 0 { WRITE } else { 0 };
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
