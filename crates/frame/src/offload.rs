//! What is left to do to a frame that its sender did not finish: complete a checksum, cut the frame into segments. Independent of
//! any device; sources make it of their own headers, sinks make theirs of it, and `checksum` and `segment` do the work for
//! receivers that cannot.
//!
//! An [`Offload`] is checked against its frame when it is made, and its fields are private: one that exists is correct for the
//! headers it was made of.

pub mod checksum;
pub mod coalesce;
mod headers;
mod kind;
mod refused;
pub mod segment;
mod tunnel;

pub use kind::{HEADERS, Kind, SEGMENTS, Support, UDP_SEGMENTS};
pub use refused::Refused;
pub use tunnel::{Tunnel, TunnelClaim};

use headers::Headers;
use ringroad_wire::{ethernet, ip, l4};
use std::num::NonZeroU16;
use tunnel::Layers;

/// The checksum of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Complete; the receiver verifies it.
    #[default]
    Complete,
    /// Complete and verified.
    Valid,
    /// To be computed over all bytes from `start` on. The field holds the sum of the pseudo header.
    Partial {
        /// First byte that is summed, in bytes from the start of the frame.
        start: u16,
        /// Position of the checksum, in bytes from `start`.
        offset: u16,
    },
}

/// A frame that is to be cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// How it is to be cut.
    pub kind: Kind,
    /// TCP: CWR is set, which only the first segment keeps (RFC 3168, 6.1.2).
    pub ecn: bool,
    /// Payload of each segment but the last, in bytes; of a fragment: without IP headers.
    pub size: NonZeroU16,
    /// Length of all headers in bytes, with that of TCP or UDP; in a tunnel, with the inner ones.
    pub header_len: u16,
    /// The tunnel that it is in; `kind` and all else is of the packet inside.
    pub tunnel: Option<Tunnel>,
}

/// What is left to do to a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Partial if `gso` is set.
    checksum: Checksum,
    gso: Option<Gso>,
}

const _: () = assert!(size_of::<Offload>() == 16);

/// A segmentation as its sender describes it, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// How the frame is to be cut.
    pub kind: Kind,
    /// CWR is set.
    pub ecn: bool,
    /// Payload of each segment, in bytes.
    pub size: u16,
    /// `start` and `offset` of [`Checksum::Partial`].
    pub checksum: (u16, u16),
}

impl Offload {
    /// Nothing is left to do, and nothing is known.
    pub const NONE: Offload = Offload { checksum: Checksum::Complete, gso: None };

    /// The checksum was verified.
    pub const VALID: Offload = Offload { checksum: Checksum::Valid, gso: None };

    /// Returns whether it is [`Offload::NONE`]: one comparison, as only a frame with a partial checksum has `gso`.
    #[inline(always)]
    pub const fn is_none(self) -> bool {
        matches!(self.checksum, Checksum::Complete)
    }

    /// Returns what is left to do about the checksum.
    #[inline(always)]
    pub const fn checksum(self) -> Checksum {
        self.checksum
    }

    /// Returns how the frame is to be cut, if it is.
    #[inline(always)]
    pub const fn gso(self) -> Option<Gso> {
        self.gso
    }

    /// A checksum to be completed in a frame of `len` bytes.
    ///
    /// # Errors
    /// [`Refused`] if its field is not an aligned word of what is summed, within the frame and behind the Ethernet header.
    pub fn partial(start: u16, offset: u16, len: usize) -> Result<Offload, Refused> {
        let at = usize::from(start) + usize::from(offset);
        if usize::from(start) < ethernet::HEADER {
            return Err(Refused::ChecksumStart { found: start });
        }
        if !offset.is_multiple_of(2) {
            return Err(Refused::ChecksumOdd { found: offset });
        }
        if at + 2 > len {
            return Err(Refused::ChecksumBeyond { found: at, len });
        }
        Ok(Offload { checksum: Checksum::Partial { start, offset }, gso: None })
    }

    /// A segmentation of a frame of `len` bytes that starts with `head`, a private copy of its first [`HEADERS`] bytes or of all.
    /// If the payload fits into one segment, nothing but the checksum is left to do.
    ///
    /// # Errors
    /// [`Refused`] if the claim and the frame's own headers do not agree, or these are damaged.
    pub fn segmented(claim: Claim, head: &[u8], len: usize) -> Result<Offload, Refused> {
        Offload::cut(claim, None, head, len)
    }

    /// The same for a packet in a UDP tunnel: the claim is of the inner one. With an outer checksum there is something left to do even
    /// if the payload fits into one segment.
    ///
    /// # Errors
    /// [`Refused`] also if the outer headers do not agree with the tunnel, or are damaged.
    pub fn tunneled(claim: Claim, tunnel: TunnelClaim, head: &[u8], len: usize) -> Result<Offload, Refused> {
        Offload::cut(claim, Some(tunnel), head, len)
    }

    fn cut(claim: Claim, tunnel: Option<TunnelClaim>, head: &[u8], len: usize) -> Result<Offload, Refused> {
        let Claim { kind, size, checksum: (start, offset), .. } = claim;
        let partial = Offload::partial(start, offset, len)?;
        let size = NonZeroU16::new(kind.whole(size)).filter(|_| size >= kind.least());
        let Some(size) = size else { return Err(Refused::Size { found: claim.size, least: kind.least() }) };
        let (headers, tunnel) = match tunnel {
            Some(claim) => {
                let layers = Layers::read(kind, claim, head, len)?;
                (layers.inner, Some(layers.tunnel(claim.checksum)))
            }
            None => (Headers::read(kind, head, len)?, None),
        };
        let expected = (headers.transport, if kind.is_tcp() { l4::Tcp::CHECKSUM } else { l4::Udp::CHECKSUM });
        if (usize::from(start), offset) != expected {
            return Err(Refused::ChecksumElsewhere { expected, found: (start, offset) });
        }
        let segments = (len - headers.data(kind)).div_ceil(size.get().into());
        if segments <= 1 && !tunnel.is_some_and(|tunnel| tunnel.checksum) {
            return Ok(partial);
        }
        let most = if matches!(kind, Kind::Udp4 | Kind::Udp6) { UDP_SEGMENTS } else { SEGMENTS };
        if segments > most {
            return Err(Refused::Segments { found: segments, most });
        }
        let ecn = kind.is_tcp() && (claim.ecn || headers.tcp_flags & l4::flags::CWR != 0);
        Ok(Offload { gso: Some(Gso { kind, ecn, size, header_len: headers.end as u16, tunnel }), ..partial })
    }

    /// Returns the offload of the frame with `tag` more bytes (or fewer, if it is negative) behind its addresses; `None` if what
    /// it refers to would not lie behind the Ethernet header then.
    pub(crate) fn moved(self, tag: i16) -> Option<Offload> {
        let Checksum::Partial { start, offset } = self.checksum else { return Some(self) };
        let start = start.checked_add_signed(tag).filter(|&start| usize::from(start) >= ethernet::HEADER)?;
        let gso = match self.gso {
            Some(gso) => {
                let tunnel = match gso.tunnel {
                    Some(tunnel) => Some(tunnel.moved(tag)?),
                    None => None,
                };
                Some(Gso { header_len: gso.header_len.checked_add_signed(tag)?, tunnel, ..gso })
            }
            None => None,
        };
        Some(Offload { checksum: Checksum::Partial { start, offset }, gso })
    }

    /// Returns what a port must support to take the frame as it is.
    pub const fn needs(self) -> Support {
        match (self.checksum, self.gso) {
            (Checksum::Partial { .. }, None) => Support::CHECKSUM,
            (_, None) => Support::empty(),
            (_, Some(Gso { kind, ecn, tunnel, .. })) => {
                let kind = if ecn { kind.support().union(Support::ECN) } else { kind.support() };
                match tunnel {
                    Some(tunnel) => kind.union(tunnel.support()),
                    None => kind,
                }
            }
        }
    }

    /// Returns how many frames a frame of `len` bytes becomes on a link.
    pub fn frames(self, len: usize) -> usize {
        let Some(gso) = self.gso else { return 1 };
        let payload = match (gso.kind, self.checksum) {
            // The transport header is part of what is cut.
            (Kind::Fragments4 | Kind::Fragments6, Checksum::Partial { start, .. }) => len.saturating_sub(start.into()),
            _ => len.saturating_sub(gso.header_len.into()),
        };
        payload.div_ceil(gso.size.get().into()).max(1)
    }

    /// Returns the length of the longest frame that a frame of `len` bytes becomes on a link, in bytes: what an MTU limits.
    pub fn longest(self, len: usize) -> usize {
        let Some(gso) = self.gso else { return len };
        let Checksum::Partial { start, .. } = self.checksum else { return len };
        let size = usize::from(gso.size.get());
        match gso.kind {
            Kind::Tcp4 | Kind::Tcp6 | Kind::Udp4 | Kind::Udp6 => usize::from(gso.header_len) + size,
            Kind::Fragments4 => usize::from(start) + size,
            // At most: destination options behind the per-fragment headers are part of the fragments' payload.
            Kind::Fragments6 => usize::from(start) + ip::Fragment::LEN + size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offload(kind: Kind, ecn: bool) -> Offload {
        let gso = Gso { kind, ecn, size: NonZeroU16::new(1000).unwrap(), header_len: 54, tunnel: None };
        Offload { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: Some(gso) }
    }

    #[test]
    fn needs_of_each_kind() {
        assert_eq!(Offload::NONE.needs() | Offload::VALID.needs(), Support::empty());
        assert_eq!(Offload::partial(34, 16, 60).unwrap().needs(), Support::CHECKSUM);
        let kinds = [
            (Kind::Tcp4, Support::TCP4),
            (Kind::Tcp6, Support::TCP6),
            (Kind::Udp4, Support::UDP4),
            (Kind::Udp6, Support::UDP6),
            (Kind::Fragments4, Support::FRAGMENTS),
            (Kind::Fragments6, Support::FRAGMENTS),
        ];
        for (kind, support) in kinds {
            assert_eq!(offload(kind, false).needs(), Support::CHECKSUM | support);
            assert_eq!(offload(kind, true).needs(), Support::CHECKSUM | support | Support::ECN);
        }
    }

    #[test]
    fn longest_frame_on_a_link() {
        assert_eq!(Offload::NONE.longest(60_000), 60_000);
        assert_eq!(offload(Kind::Tcp6, false).longest(60_000), 1054);
        assert_eq!(offload(Kind::Udp4, false).longest(60_000), 1054);
        assert_eq!(offload(Kind::Fragments4, false).longest(60_000), 1034);
        assert_eq!(offload(Kind::Fragments6, false).longest(60_000), 1042);
    }
}
