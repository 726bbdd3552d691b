//! A frame with a private copy of its first bytes, read once: the sender cannot change what the forwarding decision was based on.
//! Filled by sources through `burst`, read by the switch and by sinks.

use crate::BURST;
use ringroad_wire::ethernet;

/// Bytes in front of the frame in its private head, for the receiver's header (the size of virtio-net's), so that header and head
/// are written together, from registers.
pub const HEADROOM: usize = 12;

/// Size of the private head: the headroom and 20 bytes of the frame, up to the EtherType behind a VLAN tag. Decisions are based
/// on this copy, and this copy is what is forwarded.
pub const HEAD: usize = 32;

/// Length of the shortest head that has a VLAN tag, and the EtherType behind it.
pub(crate) const TAGGED: usize = HEADROOM + ethernet::HEADER + ethernet::TAG;

// What is left of the longest head without its tag is shorter than the shortest one with a tag.
const _: () = assert!(HEAD - ethernet::TAG < TAGGED && HEAD < RETAGGED as usize);
const _: () = assert!(BURST <= u8::MAX as usize && HEAD >= HEADROOM + ethernet::HEADER);

/// Flag in `head_len`: the burst has an offload for the frame. With it a head is never just [`HEAD`] bytes long, so that fast paths,
/// which compare with that, leave the frame to others.
pub(crate) const OFFLOADED: u8 = 0x80;

/// Flag in `head_len`: a VLAN tag was pushed or popped, so the head ends elsewhere than the bytes that it was read from. Fast paths
/// leave such a frame to others, too.
pub(crate) const RETAGGED: u8 = 0x40;

/// A frame: its head in private memory, the rest still in the sender's buffers.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub(crate) head: [u8; HEAD],
    /// Length of the frame plus headroom, in bytes.
    pub(crate) extent: u32,
    /// Index of its first piece in the burst.
    pub(crate) piece: u16,
    /// Bytes of the head in use, including the headroom; and [`OFFLOADED`], [`RETAGGED`].
    pub(crate) head_len: u8,
    /// Its addresses are forwarded swapped. Not in the head itself: a wide load of the head soon after a store to a part of it
    /// would stall.
    pub(crate) reflected: bool,
}

impl Frame {
    pub(crate) const NONE: Frame = Frame { head: [0; HEAD], extent: 0, piece: 0, head_len: 0, reflected: false };

    /// Returns the length in bytes, from the destination address to the end of the payload.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.extent as usize - HEADROOM
    }

    /// Returns the bytes of the head in use, including the headroom.
    #[inline(always)]
    pub(crate) fn head_len(&self) -> usize {
        usize::from(self.head_len & !(OFFLOADED | RETAGGED))
    }

    /// Returns how many of the sender's bytes the head stands for, without headroom.
    #[inline(always)]
    pub(crate) fn consumed(&self) -> usize {
        if self.head_len & RETAGGED == 0 { self.head_len().saturating_sub(HEADROOM) } else { self.consumed_retagged() }
    }

    /// A head that a tag was pushed into has at least [`TAGGED`] bytes, one that lost a tag always less.
    #[cold]
    fn consumed_retagged(&self) -> usize {
        let len = self.head_len().saturating_sub(HEADROOM);
        if self.head_len() >= TAGGED { len.saturating_sub(ethernet::TAG) } else { len + ethernet::TAG }
    }

    /// Returns whether the burst has an offload for the frame.
    #[inline(always)]
    pub(crate) fn is_offloaded(&self) -> bool {
        self.head_len & OFFLOADED != 0
    }

    /// Returns whether the frame has no bytes; never true for frames of a burst.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns [`Frame::len`] plus the headroom: the space that the frame needs in a buffer with a header of [`HEADROOM`] bytes.
    #[inline(always)]
    pub fn extent(&self) -> usize {
        self.extent as usize
    }

    /// Returns the first bytes of the frame as the sender wrote them, at least an Ethernet header.
    #[inline(always)]
    pub fn ethernet(&self) -> &[u8] {
        self.head.get(HEADROOM..self.head_len()).unwrap_or_default()
    }

    /// Returns destination and source address packed into words, which are equal for frames of one flow.
    #[inline(always)]
    pub fn addresses(&self) -> (u64, u32) {
        const { assert!(HEADROOM == 12 && HEAD == 32) };
        // Loads that lie within the 16-byte stores that wrote the head. Given single bytes, the compiler would assemble the words
        // byte by byte.
        let &[_, b, c, _] = self.head.as_chunks::<8>().0 else { return (0, 0) };
        let (b, c) = (u64::from_le_bytes(b), u64::from_le_bytes(c));
        (b >> 32 | c << 32, (c >> 32) as u32)
    }

    /// Returns headroom and head as forwarded, with zeros in the headroom, and their length in bytes.
    pub fn head(&self) -> ([u8; HEAD], usize) {
        let mut head = [0; HEAD];
        head.chunks_exact_mut(8).zip(self.words([0; HEADROOM])).for_each(|(place, word)| place.copy_from_slice(&word));
        (head, self.head_len())
    }

    /// Returns `header` and the head as forwarded, in parts that fit into registers; `None` if the frame is shorter than [`HEAD`]
    /// or has an offload.
    #[inline(always)]
    pub fn full_head(&self, header: [u8; HEADROOM]) -> Option<[[u8; 8]; HEAD / 8]> {
        if self.head_len as usize == HEAD { Some(self.words(header)) } else { None }
    }

    /// Returns the head as forwarded without headroom, in parts that fit into registers; `None` as for
    /// `full_head`.
    #[inline(always)]
    pub fn full_head_apart(&self) -> Option<[[u8; 4]; (HEAD - HEADROOM) / 4]> {
        let [_, b, c, d] = self.full_head([0; HEADROOM])?.map(u64::from_le_bytes);
        let half = |word: u64, shift: u32| ((word >> shift) as u32).to_le_bytes();
        Some([half(b, 32), half(c, 0), half(c, 32), half(d, 0), half(d, 32)])
    }

    /// As words: a head assembled in memory from smaller stores and then copied with wider loads would stall.
    #[inline(always)]
    fn words(&self, header: [u8; HEADROOM]) -> [[u8; 8]; HEAD / 8] {
        let &[_, b, c, d] = self.head.as_chunks::<8>().0 else { return [[0; 8]; HEAD / 8] };
        // The destination address begins at byte 12, the source address at byte 18.
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
