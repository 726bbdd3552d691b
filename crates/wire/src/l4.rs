//! Headers of TCP (RFC 9293, 3.1) and UDP (RFC 768). Read and written by `frame`, which segments and coalesces frames.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    big_endian::{U16, U32},
};

/// Flags of a TCP header, [`Tcp::flags`].
pub mod flags {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// Start of a connection; counts as a byte of the sequence.
    pub const SYN: u8 = 2;
    /// Connection reset.
    pub const RST: u8 = 4;
    /// The data goes to the application at once.
    pub const PSH: u8 = 8;
    /// `ack` is valid.
    pub const ACK: u8 = 16;
    /// `urgent` is valid.
    pub const URG: u8 = 32;
    /// The sender has seen congestion (RFC 3168).
    pub const ECE: u8 = 64;
    /// The sender has reduced its window (RFC 3168).
    pub const CWR: u8 = 128;
}

/// The first 20 bytes of a TCP header; options may follow.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct Tcp {
    /// Port of the sender.
    pub source: U16,
    /// Port of the receiver.
    pub destination: U16,
    /// Position of the first byte of data.
    pub seq: U32,
    /// The next position expected.
    pub ack: U32,
    /// Length of the header in words of four bytes, in the high half; the low half is reserved.
    pub data_offset: u8,
    /// Bits of [`flags`].
    pub flags: u8,
    /// Receive window.
    pub window: U16,
    /// Checksum of pseudo header, header and data.
    pub checksum: U16,
    /// Position of urgent data.
    pub urgent: U16,
}

impl Tcp {
    /// Length of a header without options, in bytes.
    pub const LEN: usize = size_of::<Tcp>();
    /// Position of the checksum in the header.
    pub const CHECKSUM: u16 = 16;

    /// Returns the length of the header with its options in bytes, as it claims: less than [`Tcp::LEN`] is invalid.
    #[inline]
    pub fn header_len(&self) -> usize {
        usize::from(self.data_offset >> 4) * 4
    }
}

/// A UDP header.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, Unaligned)]
#[repr(C)]
pub struct Udp {
    /// Port of the sender.
    pub source: U16,
    /// Port of the receiver.
    pub destination: U16,
    /// Length of header and data, in bytes.
    pub length: U16,
    /// Checksum of pseudo header, header and data; 0 for none.
    pub checksum: U16,
}

impl Udp {
    /// Length of the header, in bytes.
    pub const LEN: usize = size_of::<Udp>();
    /// Position of the checksum in the header.
    pub const CHECKSUM: u16 = 6;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_layout() {
        let bytes: Vec<u8> = (1..=20).collect();
        let tcp = Tcp::read_from_bytes(&bytes).unwrap();
        assert_eq!((tcp.source.get(), tcp.destination.get()), (0x0102, 0x0304));
        assert_eq!((tcp.seq.get(), tcp.ack.get()), (0x0506_0708, 0x090a_0b0c));
        assert_eq!((tcp.data_offset, tcp.flags, tcp.window.get()), (13, 14, 0x0f10));
        assert_eq!((tcp.checksum.get(), tcp.urgent.get()), (0x1112, 0x1314));
        assert_eq!(bytes[usize::from(Tcp::CHECKSUM)], 0x11);
        assert_eq!(Tcp { data_offset: 0xf3, ..tcp }.header_len(), 60);
    }

    #[test]
    fn udp_layout() {
        let bytes: Vec<u8> = (1..=8).collect();
        let udp = Udp::read_from_bytes(&bytes).unwrap();
        assert_eq!((udp.source.get(), udp.destination.get()), (0x0102, 0x0304));
        assert_eq!((udp.length.get(), udp.checksum.get()), (0x0506, 0x0708));
        assert_eq!(bytes[usize::from(Udp::CHECKSUM)], 7);
    }
}
