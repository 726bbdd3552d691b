//! Feature bits and configuration space of a vsock device (virtio 1.3, 5.10.3, 5.10.4).

/// Feature bits by their names in the specification.
pub mod bits {
    pub use ringroad_ring::bits::*;

    /// Stream sockets are supported.
    pub const VSOCK_F_STREAM: u64 = 1 << 0;
    /// Message (seqpacket) sockets are supported.
    pub const VSOCK_F_SEQPACKET: u64 = 1 << 1;
    /// Stream sockets are supported only if VSOCK_F_STREAM is negotiated as well.
    pub const VSOCK_F_NO_IMPLIED_STREAM: u64 = 1 << 2;
}

use crate::types::SocketType;

/// The optional features that a device offers. Each can be turned off, so that tests can force every path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_VSOCK_F_SEQPACKET.
    pub seqpacket: bool,
}

impl Default for Features {
    /// All of them.
    fn default() -> Features {
        Features::ALL
    }
}

impl Features {
    /// All of them.
    pub const ALL: Features =
        Features { packed: true, in_order: true, event_idx: true, indirect: true, seqpacket: true };

    /// Returns the feature bits, including VERSION_1 and the stream bits, which are always offered.
    pub fn bits(self) -> u64 {
        let set = [
            (self.packed, bits::RING_PACKED),
            (self.in_order, bits::IN_ORDER),
            (self.event_idx, bits::EVENT_IDX),
            (self.indirect, bits::INDIRECT_DESC),
            (self.seqpacket, bits::VSOCK_F_SEQPACKET),
        ];
        let always = bits::VERSION_1 | bits::VSOCK_F_STREAM | bits::VSOCK_F_NO_IMPLIED_STREAM;
        set.iter().fold(always, |all, &(on, bit)| if on { all | bit } else { all })
    }
}

/// Returns the socket types that were negotiated. With none of the three bits, that is streams only (5.10.3).
pub fn socket_types(acked: u64) -> &'static [SocketType] {
    let stream = acked & bits::VSOCK_F_STREAM != 0 || acked & bits::VSOCK_F_NO_IMPLIED_STREAM == 0;
    match (stream, acked & bits::VSOCK_F_SEQPACKET != 0) {
        (true, true) => &[SocketType::Stream, SocketType::SeqPacket],
        (true, false) => &[SocketType::Stream],
        (false, true) => &[SocketType::SeqPacket],
        (false, false) => &[],
    }
}

/// The configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The guest's context identifier.
    pub guest_cid: u64,
}

impl Config {
    /// struct virtio_vsock_config.
    pub fn bytes(&self) -> [u8; 8] {
        self.guest_cid.to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_implied_unless_negotiated_otherwise() {
        assert_eq!(socket_types(0), [SocketType::Stream]);
        assert_eq!(socket_types(bits::VSOCK_F_SEQPACKET), [SocketType::Stream, SocketType::SeqPacket]);
        assert_eq!(socket_types(bits::VSOCK_F_NO_IMPLIED_STREAM | bits::VSOCK_F_SEQPACKET), [SocketType::SeqPacket]);
        assert!(socket_types(bits::VSOCK_F_NO_IMPLIED_STREAM).is_empty());
        let all = Features::ALL.bits();
        assert_eq!(all, 7 | 1 << 28 | 1 << 29 | 1 << 32 | 1 << 34 | 1 << 35);
        assert_eq!(socket_types(all), [SocketType::Stream, SocketType::SeqPacket]);
        assert_eq!(Config { guest_cid: 3 }.bytes(), [3, 0, 0, 0, 0, 0, 0, 0]);
    }
}
