//! The header of every packet in the receive and transmit queues of a vsock device (virtio 1.3, 5.10.6): `struct
//! virtio_vsock_hdr`.
//!
//! Read and written by the device and driver of virtio-vsock. Fields are not validated here; the receiver does that.

use zerocopy::{
    FromBytes, IntoBytes,
    little_endian::{U16, U32, U64},
    transmute,
};

/// Size of the header in bytes.
pub const SIZE: usize = size_of::<Wire>();

/// Context identifier (CID) of the host (5.10.4).
pub const HOST_CID: u64 = 2;
/// Wildcard: any port or, as the low 32 bits of a CID, any CID.
pub const ANY: u32 = u32::MAX;

/// `kind`: an ordered byte stream without message boundaries (VIRTIO_VSOCK_TYPE_STREAM).
pub const TYPE_STREAM: u16 = 1;
/// `kind`: ordered messages (VIRTIO_VSOCK_TYPE_SEQPACKET).
pub const TYPE_SEQPACKET: u16 = 2;

/// `flags` of OP_SHUTDOWN: the sender will not receive any more (VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE).
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// `flags` of OP_SHUTDOWN: the sender will not send any more (VIRTIO_VSOCK_SHUTDOWN_F_SEND).
pub const SHUTDOWN_SEND: u32 = 2;
/// `flags` of OP_RW on seqpacket connections: the last packet of a message (VIRTIO_VSOCK_SEQ_EOM).
pub const SEQ_EOM: u32 = 1;
/// `flags` of OP_RW on seqpacket connections: the sender marked the message with MSG_EOR (VIRTIO_VSOCK_SEQ_EOR).
pub const SEQ_EOR: u32 = 2;

/// Operation of a packet (`enum virtio_vsock_op`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Op {
    /// VIRTIO_VSOCK_OP_REQUEST: asks for a connection.
    Request = 1,
    /// VIRTIO_VSOCK_OP_RESPONSE: accepts a connection.
    Response = 2,
    /// VIRTIO_VSOCK_OP_RST: refuses a connection or closes it at once.
    Reset = 3,
    /// VIRTIO_VSOCK_OP_SHUTDOWN: closes one or both directions, see `flags`.
    Shutdown = 4,
    /// VIRTIO_VSOCK_OP_RW: carries payload.
    Data = 5,
    /// VIRTIO_VSOCK_OP_CREDIT_UPDATE: advertises the sender's buffer space.
    CreditUpdate = 6,
    /// VIRTIO_VSOCK_OP_CREDIT_REQUEST: asks the receiver for a credit update.
    CreditRequest = 7,
}

impl Op {
    /// Returns the operation with this number; `None` if there is none.
    #[inline]
    pub fn new(number: u16) -> Option<Op> {
        const ALL: [Op; 7] =
            [Op::Request, Op::Response, Op::Reset, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest];
        ALL.get(usize::from(number).wrapping_sub(1)).copied()
    }
}

/// The header in host byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VsockHdr {
    /// CID of the sender.
    pub src_cid: u64,
    /// CID of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Payload length in bytes.
    pub len: u32,
    /// One of `TYPE_…`.
    pub kind: u16,
    /// An [`Op`], not validated.
    pub op: u16,
    /// Meaning depends on the operation and the socket type.
    pub flags: u32,
    /// Size of the sender's receive buffer for this connection, in bytes (5.10.6.3).
    pub buf_alloc: u32,
    /// Payload bytes that the sender has received and consumed, modulo 2³².
    pub fwd_cnt: u32,
}

/// The header in its wire format, little-endian.
#[derive(FromBytes, IntoBytes)]
#[repr(C)]
struct Wire {
    src_cid: U64,
    dst_cid: U64,
    src_port: U32,
    dst_port: U32,
    len: U32,
    kind: U16,
    op: U16,
    flags: U32,
    buf_alloc: U32,
    fwd_cnt: U32,
}

impl VsockHdr {
    /// Returns the header in its wire format, little-endian.
    #[inline]
    pub fn to_bytes(&self) -> [u8; SIZE] {
        transmute!(Wire {
            src_cid: self.src_cid.into(),
            dst_cid: self.dst_cid.into(),
            src_port: self.src_port.into(),
            dst_port: self.dst_port.into(),
            len: self.len.into(),
            kind: self.kind.into(),
            op: self.op.into(),
            flags: self.flags.into(),
            buf_alloc: self.buf_alloc.into(),
            fwd_cnt: self.fwd_cnt.into(),
        })
    }

    /// Parses a header from its wire format.
    #[inline]
    pub fn from_bytes(bytes: &[u8; SIZE]) -> VsockHdr {
        let wire: Wire = transmute!(*bytes);
        VsockHdr {
            src_cid: wire.src_cid.get(),
            dst_cid: wire.dst_cid.get(),
            src_port: wire.src_port.get(),
            dst_port: wire.dst_port.get(),
            len: wire.len.get(),
            kind: wire.kind.get(),
            op: wire.op.get(),
            flags: wire.flags.get(),
            buf_alloc: wire.buf_alloc.get(),
            fwd_cnt: wire.fwd_cnt.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_specified_layout() {
        let header = VsockHdr {
            src_cid: 0x0102_0304_0506_0708,
            dst_cid: 2,
            src_port: 0x1112_1314,
            dst_port: 1024,
            len: 64,
            kind: TYPE_SEQPACKET,
            op: Op::Data as u16,
            flags: SEQ_EOM | SEQ_EOR,
            buf_alloc: 0x4_0000,
            fwd_cnt: 0xffff_fff0,
        };
        let bytes = header.to_bytes();
        assert_eq!(SIZE, 44);
        assert_eq!(bytes[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[8..16], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..24], [0x14, 0x13, 0x12, 0x11, 0, 4, 0, 0]);
        assert_eq!(bytes[24..36], [64, 0, 0, 0, 2, 0, 5, 0, 3, 0, 0, 0]);
        assert_eq!(bytes[36..], [0, 0, 4, 0, 0xf0, 0xff, 0xff, 0xff]);
        assert_eq!(VsockHdr::from_bytes(&bytes), header);
    }

    #[test]
    fn operations_are_1_to_7() {
        for number in 1..=7 {
            assert_eq!(Op::new(number).map(|op| op as u16), Some(number));
        }
        for number in [0, 8, 255, 256, u16::MAX] {
            assert_eq!(Op::new(number), None);
        }
    }
}
