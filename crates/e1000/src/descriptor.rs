//! Descriptors (8254x Software Developer's Manual, 3.2.3 and 3.3): 16 bytes as two little-endian words. Used by both ends.

/// Size of a descriptor in bytes.
pub const SIZE: u32 = 16;
/// Rings have a multiple of this many bytes.
pub const RING_UNIT: u32 = 128;

/// Transmit descriptors: bits of the second word.
pub mod tx {
    /// End of packet.
    pub const EOP: u64 = 1 << 24;
    /// The device appends the frame check sequence.
    pub const IFCS: u64 = 1 << 25;
    /// Legacy: insert a checksum.
    pub const IC: u64 = 1 << 26;
    /// Context and data: TCP segmentation.
    pub const TSE: u64 = 1 << 26;
    /// Report status.
    pub const RS: u64 = 1 << 27;
    /// Report packet sent.
    pub const RPS: u64 = 1 << 28;
    /// Not a legacy descriptor.
    pub const DEXT: u64 = 1 << 29;
    /// Insert a VLAN tag.
    pub const VLE: u64 = 1 << 30;
    /// The interrupt may be delayed.
    pub const IDE: u64 = 1 << 31;
    /// Type of an extended descriptor.
    pub const DTYP: u64 = 0xf << 20;
    /// Data descriptor; 0 is a context descriptor.
    pub const DTYP_DATA: u64 = 1 << 20;
    /// Context: TCP, not UDP.
    pub const TCP: u64 = 1 << 24;
    /// Context: IPv4, not IPv6.
    pub const IP: u64 = 1 << 25;
    /// Status: done.
    pub const DD: u64 = 1 << 32;
    /// Data: insert the checksum of the IPv4 header.
    pub const IXSM: u64 = 1 << 40;
    /// Data: insert the checksum of TCP or UDP.
    pub const TXSM: u64 = 1 << 41;
    /// Position of the VLAN tag.
    pub const SPECIAL: u32 = 48;
}

/// Receive descriptors: bits of the second word.
pub mod rx {
    /// Done.
    pub const DD: u64 = 1 << 32;
    /// End of packet.
    pub const EOP: u64 = 1 << 33;
    /// The checksums were not looked at.
    pub const IXSM: u64 = 1 << 34;
    /// A VLAN tag was stripped.
    pub const VP: u64 = 1 << 35;
    /// The checksum of TCP or UDP was verified.
    pub const TCPCS: u64 = 1 << 37;
    /// The checksum of the IPv4 header was verified.
    pub const IPCS: u64 = 1 << 38;
    /// The packet passed a filter that is not exact.
    pub const PIF: u64 = 1 << 39;
    /// Position of the VLAN tag.
    pub const SPECIAL: u32 = 48;
}

/// A context descriptor (3.3.6): where the checksums are, and how to cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// First byte of the IP header.
    pub ipcss: u8,
    /// Position of its checksum.
    pub ipcso: u8,
    /// Its last byte; 0: the end of the packet.
    pub ipcse: u16,
    /// First byte of the TCP or UDP header.
    pub tucss: u8,
    /// Position of its checksum.
    pub tucso: u8,
    /// Last byte summed; 0: the end of the packet.
    pub tucse: u16,
    /// Bytes behind the headers.
    pub paylen: u32,
    /// Length of all headers in bytes.
    pub hdrlen: u8,
    /// Payload of each segment in bytes.
    pub mss: u16,
    /// TCP, not UDP.
    pub is_tcp: bool,
    /// IPv4, not IPv6.
    pub is_v4: bool,
}

impl Context {
    /// Reads the two words of a context descriptor.
    pub fn read([first, second]: [u64; 2]) -> Context {
        let [ipcss, ipcso, a, b, tucss, tucso, c, d] = first.to_le_bytes();
        let [_, _, _, _, _, hdrlen, e, f] = second.to_le_bytes();
        Context {
            ipcss,
            ipcso,
            ipcse: u16::from_le_bytes([a, b]),
            tucss,
            tucso,
            tucse: u16::from_le_bytes([c, d]),
            paylen: second as u32 & 0xf_ffff,
            hdrlen,
            mss: u16::from_le_bytes([e, f]),
            is_tcp: second & tx::TCP != 0,
            is_v4: second & tx::IP != 0,
        }
    }

    /// Returns the words of a context descriptor; `commands`: bits such as [`tx::TSE`] and [`tx::RS`].
    pub fn words(&self, commands: u64) -> [u64; 2] {
        let ([a, b], [c, d], [e, f]) = (self.ipcse.to_le_bytes(), self.tucse.to_le_bytes(), self.mss.to_le_bytes());
        let first = u64::from_le_bytes([self.ipcss, self.ipcso, a, b, self.tucss, self.tucso, c, d]);
        let second = u64::from_le_bytes([0, 0, 0, 0, 0, self.hdrlen, e, f]);
        let kind = if self.is_tcp { tx::TCP } else { 0 } | if self.is_v4 { tx::IP } else { 0 };
        [first, second | u64::from(self.paylen & 0xf_ffff) | kind | tx::DEXT | commands]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_read_as_it_is_written() {
        let context = Context {
            ipcss: 14,
            ipcso: 24,
            ipcse: 33,
            tucss: 34,
            tucso: 50,
            tucse: 0x1234,
            paylen: 0xa_bcde,
            hdrlen: 66,
            mss: 1448,
            is_tcp: true,
            is_v4: false,
        };
        let words = context.words(tx::TSE | tx::RS);
        // 3.3.6: the bytes as the manual draws them.
        assert_eq!(words[0].to_le_bytes(), [14, 24, 33, 0, 34, 50, 0x34, 0x12]);
        assert_eq!(words[1].to_le_bytes(), [0xde, 0xbc, 0x0a, 0x2d, 0, 66, 0xa8, 0x05]);
        assert_eq!(Context::read(words), context);
        assert_eq!(words[1] & tx::DTYP, 0);
    }
}
