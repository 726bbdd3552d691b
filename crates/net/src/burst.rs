//! Bursts of frames on their way from one port to others, and what a port is to a switch.

use ringroad_mem::{Span, Table};
use ringroad_ring::{BURST, Chain, Chains};
use ringroad_wire::{ethernet, vnet_hdr};
use std::sync::Arc;

/// How much of each frame is copied to private memory, the virtio-net header included: 20 bytes of the frame itself, up
/// to the type of a frame with a VLAN tag. What decides is this copy, and this copy is what is forwarded.
pub const HEAD: usize = 32;

/// The largest frame: what an MTU of 65535 and two VLAN tags make.
pub const MAX_FRAME: usize = ethernet::longest_frame(u16::MAX);

/// Spans that a burst can have. A frame in more pieces is dropped.
pub(crate) const PIECES: u16 = 512;

/// So many lines of a buffer are fetched. What comes after them the CPU foresees by itself.
pub(crate) const FETCH: usize = 2;

/// A frame: its head in private memory, the rest still where the sender has it.
#[derive(Clone, Copy)]
pub struct Frame {
    head: [u8; HEAD],
    /// Bytes of the chain, the virtio-net header included.
    total: u32,
    chain: u16,
    head_len: u8,
    reflected: bool,
}

impl Frame {
    /// Bytes from the destination address to the end of the payload.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.total as usize - vnet_hdr::SIZE
    }

    /// Whether there is nothing in it. A burst has no such frame.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// With the virtio-net header, as it lies in a receive buffer.
    #[inline(always)]
    pub fn total(&self) -> usize {
        self.total as usize
    }

    /// The first bytes of the frame as it came, at least an Ethernet header.
    #[inline(always)]
    pub fn ethernet(&self) -> &[u8] {
        self.head.get(vnet_hdr::SIZE..self.head_len as usize).unwrap_or_default()
    }

    /// Its destination and source address: equal words for frames of one flow.
    #[inline(always)]
    pub fn addresses(&self) -> (u64, u32) {
        const { assert!(vnet_hdr::SIZE == 12 && HEAD >= 24) };
        let [.., a, b, c, d, e, f, g, h, s, t, u, v, _, _, _, _, _, _, _, _] = self.head;
        (u64::from_le_bytes([a, b, c, d, e, f, g, h]), u32::from_le_bytes([s, t, u, v]))
    }

    /// From now on it goes out with its MAC addresses swapped.
    #[inline(always)]
    pub fn reflect(&mut self) {
        // Not in memory: whoever reads the whole head soon after a part of it was written waits for that.
        self.reflected = !self.reflected;
    }

    /// The index of its chain.
    #[inline(always)]
    pub(crate) fn chain(&self) -> usize {
        self.chain.into()
    }

    /// Header and first bytes as they go to the receiver, and how many that are: a header that promises nothing (no
    /// offload is negotiated, so whatever the sender wrote there does not count) and names one buffer.
    pub fn head(&self) -> ([u8; HEAD], usize) {
        let mut head = [0; HEAD];
        head.chunks_exact_mut(8).zip(self.words()).for_each(|(place, word)| place.copy_from_slice(&word));
        (head, self.head_len.into())
    }

    /// The same in parts, when all of `HEAD` is there.
    #[inline(always)]
    pub(crate) fn full_head(&self) -> Option<[[u8; 8]; HEAD / 8]> {
        if self.head_len as usize == HEAD { Some(self.words()) } else { None }
    }

    /// The same in two: the virtio-net header, and what is of the frame itself.
    #[inline(always)]
    pub(crate) fn full_head_apart(&self) -> Option<([u8; vnet_hdr::SIZE], [[u8; 4]; (HEAD - vnet_hdr::SIZE) / 4])> {
        let [a, b, c, d] = self.full_head()?.map(u64::from_le_bytes);
        let half = |word: u64, shift: u32| ((word >> shift) as u32).to_le_bytes();
        let mut header = [0; vnet_hdr::SIZE];
        header[..8].copy_from_slice(&a.to_le_bytes());
        header[8..].copy_from_slice(&half(b, 0));
        Some((header, [half(b, 32), half(c, 0), half(c, 32), half(d, 0), half(d, 32)]))
    }

    /// In parts that stay in registers: what is put together in memory from small parts and then copied as a whole makes
    /// the copy wait for them.
    #[inline(always)]
    fn words(&self) -> [[u8; 8]; HEAD / 8] {
        let &[_, b, c, d] = self.head.as_chunks::<8>().0 else { return [[0; 8]; HEAD / 8] };
        // From byte 12 on the destination, from byte 18 on the source.
        let (mut b, mut c) = (u64::from_le_bytes(b) >> 32, u64::from_le_bytes(c));
        if self.reflected {
            let (destination, source) = (b | (c & 0xffff) << 32, c >> 16);
            b = source & 0xffff_ffff;
            c = source >> 32 | destination << 16;
        }
        // The virtio-net header: zeros, and 1 in num_buffers (5.1.6).
        [0, b << 32 | 1 << 16, c, u64::from_le_bytes(d)].map(u64::to_le_bytes)
    }
}

/// A virtio-net header without offloads, for so many receive buffers (5.1.6).
pub(crate) fn vnet_header(num_buffers: u16) -> [u8; vnet_hdr::SIZE] {
    let [low, high] = num_buffers.to_le_bytes();
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, low, high]
}

/// Up to [`BURST`] frames from one source. One for each worker, reused for ever.
pub struct Burst {
    /// What the frames consist of; a source fills it and gives it back.
    pub chains: Chains,
    frames: [Frame; BURST],
    count: usize,
    /// No frame is longer.
    bound: usize,
    /// Of all frames.
    bytes: u64,
}

/// Bytes and pieces of a burst that takes as long as several of usual frames, so that others have their turn after it.
const HEAVY_BYTES: u64 = 128 << 10;
const HEAVY_PIECES: usize = 4 * BURST;

impl Default for Burst {
    fn default() -> Self {
        let none = Frame { head: [0; HEAD], total: 0, chain: 0, head_len: 0, reflected: false };
        Burst { chains: Chains::new(BURST, PIECES), frames: [none; BURST], count: 0, bound: MAX_FRAME, bytes: 0 }
    }
}

/// Why a chain is no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoFrame {
    /// Shorter than an Ethernet header.
    Runt,
    /// Longer than the sender may send, or in more pieces than a burst holds.
    Oversize,
}

impl Burst {
    /// Empties it, for chains in this memory.
    #[inline]
    pub fn start(&mut self, memory: &Arc<Table>) {
        (self.count, self.bytes) = (0, 0);
        self.bound = MAX_FRAME;
        self.chains.start(memory);
    }

    /// Frames that are longer than so many bytes are not taken from now on.
    #[inline]
    pub(crate) fn limit(&mut self, bound: usize) {
        self.bound = bound.min(MAX_FRAME);
    }

    /// No frame of it has more bytes.
    #[inline(always)]
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// Notes how many bytes all frames have.
    #[inline(always)]
    pub(crate) fn weigh(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// Whether its frames are so long, or in so many pieces, that they take as long as several bursts of usual ones.
    #[inline]
    pub fn is_heavy(&self) -> bool {
        self.bytes > HEAVY_BYTES || self.chains.pieces() > HEAVY_PIECES
    }

    /// Empties it. The memory is kept: what comes next is probably from there too.
    #[inline]
    pub fn finish(&mut self) {
        self.count = 0;
        self.chains.empty();
    }

    /// Empties it and lets the memory go.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
        self.chains.clear();
    }

    /// The frames.
    #[inline(always)]
    pub fn frames(&self) -> &[Frame] {
        self.frames.get(..self.count).unwrap_or_default()
    }

    /// The frames, to change how they go out.
    #[inline(always)]
    pub fn frames_mut(&mut self) -> &mut [Frame] {
        self.frames.get_mut(..self.count).unwrap_or_default()
    }

    /// What comes after a frame's head, piece by piece.
    #[inline(always)]
    pub fn rest(&self, frame: &Frame) -> Rest<'_> {
        let chain = self.chains.list().get(frame.chain as usize);
        let pieces = chain.map_or(&[][..], |chain| self.chains.readable(chain));
        Rest { pieces, skip: frame.head_len.into() }
    }

    /// Adds a frame that lies in the burst's own memory, a buffer of a TAP port. `false`: it is no frame.
    pub fn push_private(&mut self, memory: &Table, address: u64, len: u32) -> bool {
        let index = self.chains.list().len();
        self.chains.push_private(memory, address, len)
            && self.chains.list().get(index).copied().is_some_and(|chain| self.read_frame(index, &chain).is_ok())
    }

    /// Forgets the frames after the first one with which it has more bytes than `most`; says how many chains are left, and
    /// how many bytes their frames have.
    #[cold]
    pub(crate) fn cut(&mut self, most: u64) -> (usize, u64) {
        let (mut bytes, mut count) = (0, 0);
        for frame in self.frames() {
            bytes += frame.len() as u64;
            count += 1;
            if bytes > most {
                break;
            }
        }
        self.count = count;
        (self.frames().last().map_or(0, |frame| frame.chain() + 1), bytes)
    }

    /// Why a chain is no frame, if it is none.
    fn check(&self, chain: &Chain) -> Result<(), NoFrame> {
        let total = chain.readable_len() as usize;
        if total < vnet_hdr::SIZE + ethernet::HEADER {
            return Err(NoFrame::Runt);
        }
        if chain.clipped || total > vnet_hdr::SIZE + self.bound {
            return Err(NoFrame::Oversize);
        }
        Ok(())
    }

    /// How many of the chains are no frames: too short, and too long.
    pub(crate) fn no_frames(&self) -> (u64, u64) {
        let (mut runts, mut oversize) = (0, 0);
        for chain in self.chains.list() {
            match self.check(chain) {
                Ok(()) => {}
                Err(NoFrame::Runt) => runts += 1,
                Err(NoFrame::Oversize) => oversize += 1,
            }
        }
        (runts, oversize)
    }

    /// The fast path: reads the heads of the first chains, as far as nothing is special about them; says how many bytes the
    /// frames have. What comes then is for `read_frame`. `distance`: how many frames ahead of its turn one is fetched.
    #[inline(always)]
    pub(crate) fn read_plain(&mut self, distance: usize) -> u64 {
        let Some((chains, pieces)) = self.chains.plain() else { return 0 };
        let (mut bytes, mut count) = (0, 0);
        let most = (vnet_hdr::SIZE + self.bound) as u32;
        for ((chain, piece), frame) in chains.iter().zip(pieces).zip(&mut self.frames) {
            if let Some(piece) = pieces.get(count + distance) {
                piece.prefetch::<FETCH>();
            }
            if !chain.is_readable(most) {
                break;
            }
            let Some(head) = piece.read_once::<HEAD>() else { break };
            let total = piece.len() as u32;
            *frame = Frame { head, total, chain: count as u16, head_len: HEAD as u8, reflected: false };
            bytes += u64::from(total);
            count += 1;
        }
        self.count = count;
        bytes - (count * vnet_hdr::SIZE) as u64
    }

    /// Reads the head of the chain with this index and makes a frame of it.
    pub(crate) fn read_frame(&mut self, index: usize, chain: &Chain) -> Result<usize, NoFrame> {
        let total = chain.readable_len() as usize;
        self.check(chain)?;
        let pieces = self.chains.readable(chain);
        // There are no more frames than chains.
        let Some(frame) = self.frames.get_mut(self.count) else { return Err(NoFrame::Oversize) };
        match pieces.first().and_then(|piece| piece.read_once::<HEAD>()) {
            Some(head) => (frame.head, frame.head_len) = (head, HEAD as u8),
            None => {
                let (head, len) = gather(pieces);
                (frame.head, frame.head_len) = (head, len as u8);
            }
        }
        (frame.total, frame.chain, frame.reflected) = (total as u32, index as u16, false);
        self.count += 1;
        Ok(total - vnet_hdr::SIZE)
    }
}

/// A head that is cut across pieces, or all of a frame that is shorter.
#[cold]
fn gather(pieces: &[Span<'_>]) -> ([u8; HEAD], usize) {
    let mut head = [0; HEAD];
    let mut len = 0;
    for piece in pieces {
        len += piece.read(head.get_mut(len..).unwrap_or_default());
    }
    (head, len)
}

/// See [`Burst::rest`].
#[derive(Clone)]
pub struct Rest<'a> {
    pieces: &'a [Span<'a>],
    skip: usize,
}

impl<'a> Iterator for Rest<'a> {
    type Item = Span<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Span<'a>> {
        loop {
            let (first, others) = self.pieces.split_first()?;
            self.pieces = others;
            let skip = self.skip.min(first.len());
            self.skip -= skip;
            let rest = first.skip(skip);
            if !rest.is_empty() {
                return Some(rest);
            }
        }
    }
}

/// Where frames come from. The frames of a burst stay the sender's until `done`.
pub trait Source {
    /// Takes up to a burst of frames and says how many chains that were, frames or not: what `done` gives back. 0: there
    /// is nothing now.
    fn take(&mut self, burst: &mut Burst) -> usize;

    /// Gives the buffers of the burst back to the sender, and notifies it where it wants that.
    fn done(&mut self, burst: &mut Burst);

    /// Whether it can `pour`: it does not know what it has before it has read it, and reads best to where it goes.
    fn pours(&self) -> bool {
        false
    }

    /// Reads up to a burst of frames straight into the buffers of the only place that they can go to. Says how many that
    /// were; `None`: that is not possible now, and nothing was read.
    fn pour(&mut self, _sink: &mut impl Sink) -> Option<usize> {
        None
    }
}

/// Where frames go to.
pub trait Sink {
    /// Copies the named frames of a burst to the receiver, and notifies it where it wants that. Says how many it took; the
    /// rest are dropped and counted by the sink.
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize;

    /// Lets a source read up to a burst of frames straight into the receiver's buffers, as [`crate::RxQueue::fill`] says;
    /// says how many that were. `None`: that is not possible now, and nothing was read.
    fn fill(&mut self, _room: usize, _read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Option<usize> {
        None
    }
}
