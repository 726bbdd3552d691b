//! A frame's private head: its first bytes, copied once, so that the sender cannot change what was decided on.

use crate::BURST;
use ringroad_wire::ethernet;

/// Bytes before the frame in its private head. The receiver's header goes there (virtio-net's has just this size), so that header
/// and head are written together, from registers.
pub const HEADROOM: usize = 12;

/// Bytes of the private head: the headroom and 20 bytes of the frame, up to the type of a frame with a VLAN tag. Decisions are
/// made on this copy, and this copy is what is forwarded.
pub const HEAD: usize = 32;

const _: () = assert!(BURST <= u8::MAX as usize && HEAD >= HEADROOM + ethernet::HEADER);

/// A frame: its head in private memory, the rest still in the sender's.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub(crate) head: [u8; HEAD],
    /// Bytes of the frame and the headroom.
    pub(crate) extent: u32,
    /// Index of its first piece in the burst.
    pub(crate) piece: u16,
    /// Bytes of the head in use, the headroom included.
    pub(crate) head_len: u8,
    pub(crate) reflected: bool,
}

impl Frame {
    pub(crate) const NONE: Frame = Frame { head: [0; HEAD], extent: 0, piece: 0, head_len: 0, reflected: false };

    /// Bytes from the destination address to the end of the payload.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.extent as usize - HEADROOM
    }

    /// Whether it has no bytes. A burst has no such frame.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// [`Frame::len`] and the headroom: what it takes of a buffer behind a header of [`HEADROOM`] bytes.
    #[inline(always)]
    pub fn extent(&self) -> usize {
        self.extent as usize
    }

    /// The first bytes of the frame as the sender wrote them, at least an Ethernet header.
    #[inline(always)]
    pub fn ethernet(&self) -> &[u8] {
        self.head.get(HEADROOM..self.head_len as usize).unwrap_or_default()
    }

    /// Destination and source address: equal words for frames of one flow.
    #[inline(always)]
    pub fn addresses(&self) -> (u64, u32) {
        const { assert!(HEADROOM == 12 && HEAD == 32) };
        // In words that do not cross the 16-byte stores that the head was written with; from single bytes the compiler would
        // assemble them one by one.
        let &[_, b, c, _] = self.head.as_chunks::<8>().0 else { return (0, 0) };
        let (b, c) = (u64::from_le_bytes(b), u64::from_le_bytes(c));
        (b >> 32 | c << 32, (c >> 32) as u32)
    }

    /// Swaps the MAC addresses of the frame as it is forwarded.
    #[inline(always)]
    pub fn reflect(&mut self) {
        // Not in the head itself: a load of the whole head soon after a store to a part of it would stall.
        self.reflected = !self.reflected;
    }

    /// Headroom and head as they are forwarded, with zeros in the headroom, and how many bytes they have.
    pub fn head(&self) -> ([u8; HEAD], usize) {
        let mut head = [0; HEAD];
        head.chunks_exact_mut(8).zip(self.words([0; HEADROOM])).for_each(|(place, word)| place.copy_from_slice(&word));
        (head, self.head_len.into())
    }

    /// A header in the headroom and the head as it is forwarded, in parts that stay in registers; `None` if the frame is shorter
    /// than [`HEAD`].
    #[inline(always)]
    pub fn full_head(&self, header: [u8; HEADROOM]) -> Option<[[u8; 8]; HEAD / 8]> {
        if self.head_len as usize == HEAD { Some(self.words(header)) } else { None }
    }

    /// The head as it is forwarded without headroom, in parts that stay in registers; `None` if the frame is shorter.
    #[inline(always)]
    pub fn full_head_apart(&self) -> Option<[[u8; 4]; (HEAD - HEADROOM) / 4]> {
        let [_, b, c, d] = self.full_head([0; HEADROOM])?.map(u64::from_le_bytes);
        let half = |word: u64, shift: u32| ((word >> shift) as u32).to_le_bytes();
        Some([half(b, 32), half(c, 0), half(c, 32), half(d, 0), half(d, 32)])
    }

    /// In words: a head that is assembled in memory from smaller stores and then copied with wider loads would stall.
    #[inline(always)]
    fn words(&self, header: [u8; HEADROOM]) -> [[u8; 8]; HEAD / 8] {
        let &[_, b, c, d] = self.head.as_chunks::<8>().0 else { return [[0; 8]; HEAD / 8] };
        // The destination begins at byte 12, the source at byte 18.
        let (mut b, mut c) = (u64::from_le_bytes(b) >> 32, u64::from_le_bytes(c));
        if self.reflected {
            let (destination, source) = (b | (c & 0xffff) << 32, c >> 16);
            b = source & 0xffff_ffff;
            c = source >> 32 | destination << 16;
        }
        let [e, f, g, h, i, j, k, l, m, n, o, p] = header;
        let (first, second) = (u64::from_le_bytes([e, f, g, h, i, j, k, l]), u32::from_le_bytes([m, n, o, p]));
        [first, b << 32 | u64::from(second), c, u64::from_le_bytes(d)].map(u64::to_le_bytes)
    }
}
