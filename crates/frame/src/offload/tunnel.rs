//! UDP tunnels around packets that are to be cut (VXLAN, GENEVE, or any other): each segment gets the outer headers. What is between
//! the outer UDP header and the inner IP header is not looked at; it is repeated as it is.

use super::{
    headers::Headers,
    kind::{Kind, Support},
    refused::Refused,
};
use ringroad_wire::{
    ethernet,
    ip::{ETHERTYPE_V6, Version},
    l4::Udp,
};
use zerocopy::FromBytes;

/// A UDP tunnel around a packet that is to be cut. All headers are within [`super::HEADERS`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Version of the outer IP header.
    pub outer: Version,
    /// Position of the outer UDP header, in bytes from the start of the frame.
    pub outer_transport: u8,
    /// Position of the inner IP header, in bytes from the start of the frame.
    pub inner_network: u8,
    /// The outer UDP checksum is to be completed, too; its field holds the sum of the pseudo header. If not, it is zero: there is none.
    pub checksum: bool,
}

/// A tunnel as the sender of its frame describes it, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelClaim {
    /// Position of the outer UDP header, in bytes from the start of the frame.
    pub outer_transport: u16,
    /// Position of the inner IP header, in bytes from the start of the frame.
    pub inner_network: u16,
    /// The outer UDP checksum is to be completed.
    pub checksum: bool,
}

/// The headers of a tunneled frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layers {
    pub outer: Headers,
    pub inner: Headers,
}

impl Layers {
    /// Reads the headers of a frame of `len` bytes that starts with `head`, as segmentation of this kind in this tunnel requires
    /// them.
    pub fn read(kind: Kind, claim: TunnelClaim, head: &[u8], len: usize) -> Result<Layers, Refused> {
        if kind.is_fragments() {
            return Err(Refused::Tunneled { found: kind });
        }
        let v6 = ethernet::payload(head).is_some_and(|(ethertype, _)| ethertype == ETHERTYPE_V6);
        let outer = Headers::read(if v6 { Kind::Udp6 } else { Kind::Udp4 }, head, len)?;
        let TunnelClaim { outer_transport, inner_network, checksum } = claim.behind_tag(&outer);
        if usize::from(outer_transport) != outer.transport {
            return Err(Refused::OuterTransport { expected: outer.transport, found: outer_transport });
        }
        if usize::from(inner_network) < outer.end {
            return Err(Refused::InnerNetwork { least: outer.end, found: inner_network });
        }
        let udp = Udp::ref_from_prefix(head.get(outer.transport..).unwrap_or_default());
        // It would have to be that of each segment.
        if let Some(found) = udp.ok().map(|(udp, _)| udp.checksum.get())
            && !checksum
            && found != 0
        {
            return Err(Refused::OuterChecksum { found });
        }
        let inner = Headers::read_at(kind, inner_network.into(), head, len)?;
        Ok(Layers { outer, inner })
    }

    /// Returns the tunnel.
    pub fn tunnel(&self, checksum: bool) -> Tunnel {
        let Layers { outer, inner } = self;
        // Both positions are within a head of 256 bytes.
        let (outer_transport, inner_network) = (outer.transport as u8, inner.network as u8);
        Tunnel { outer: outer.ip.version, outer_transport, inner_network, checksum }
    }
}

impl TunnelClaim {
    /// Linux does not count the VLAN tag that it puts into a frame for a TAP interface (`tun_vnet.h`, 6.17).
    fn behind_tag(self, outer: &Headers) -> TunnelClaim {
        const TAG: u16 = ethernet::TAG as u16;
        let TunnelClaim { outer_transport, inner_network, checksum } = self;
        match (outer_transport.checked_add(TAG), inner_network.checked_add(TAG)) {
            (Some(transport), Some(inner_network))
                if outer.network > ethernet::HEADER && usize::from(transport) == outer.transport =>
            {
                TunnelClaim { outer_transport: transport, inner_network, checksum }
            }
            _ => self,
        }
    }
}

impl Tunnel {
    /// Returns what a port must support to take it, besides what is inside.
    pub const fn support(self) -> Support {
        if self.checksum { Support::TUNNELS } else { Support::TUNNEL }
    }

    /// Returns it as its sender describes it.
    pub const fn claim(self) -> TunnelClaim {
        let Tunnel { outer_transport, inner_network, checksum, .. } = self;
        TunnelClaim { outer_transport: outer_transport as u16, inner_network: inner_network as u16, checksum }
    }

    /// Returns it with `tag` more bytes (or fewer) in front; `None` if it would be out of reach then.
    pub(super) fn moved(self, tag: i16) -> Option<Tunnel> {
        let moved = |at: u8| i16::from(at).checked_add(tag).and_then(|at| u8::try_from(at).ok());
        let (outer_transport, inner_network) = (moved(self.outer_transport)?, moved(self.inner_network)?);
        Some(Tunnel { outer_transport, inner_network, ..self })
    }
}
