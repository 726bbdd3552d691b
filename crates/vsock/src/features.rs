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
use bitflags::bitflags;

bitflags! {
    /// The features that a device offers. Optional ones can be turned off, so that tests can force every path.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// VIRTIO_F_VERSION_1, without which no driver is served.
        const VERSION_1 = bits::VERSION_1;
        /// VIRTIO_VSOCK_F_STREAM.
        const STREAM = bits::VSOCK_F_STREAM;
        /// VIRTIO_VSOCK_F_NO_IMPLIED_STREAM.
        const NO_IMPLIED_STREAM = bits::VSOCK_F_NO_IMPLIED_STREAM;
        /// VIRTIO_F_RING_PACKED.
        const PACKED = bits::RING_PACKED;
        /// VIRTIO_F_IN_ORDER.
        const IN_ORDER = bits::IN_ORDER;
        /// VIRTIO_F_EVENT_IDX.
        const EVENT_IDX = bits::EVENT_IDX;
        /// VIRTIO_F_INDIRECT_DESC.
        const INDIRECT = bits::INDIRECT_DESC;
        /// VIRTIO_VSOCK_F_SEQPACKET.
        const SEQPACKET = bits::VSOCK_F_SEQPACKET;
    }
}

impl Features {
    /// Those that cannot be turned off.
    pub const REQUIRED: Features = Features::VERSION_1.union(Features::STREAM).union(Features::NO_IMPLIED_STREAM);

    /// Returns all of them, for rings of one layout.
    pub fn layout(packed: bool) -> Features {
        if packed { Features::all() } else { Features::all() - Features::PACKED }
    }
}

impl Default for Features {
    /// All of them.
    fn default() -> Features {
        Features::all()
    }
}

/// Returns the socket types that were negotiated. With none of the three bits, that is streams only (5.10.3).
pub fn socket_types(acked: u64) -> &'static [SocketType] {
    let acked = Features::from_bits_truncate(acked);
    let stream = acked.contains(Features::STREAM) || !acked.contains(Features::NO_IMPLIED_STREAM);
    match (stream, acked.contains(Features::SEQPACKET)) {
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

impl Default for Config {
    /// The first identifier that a guest can have.
    fn default() -> Config {
        Config { guest_cid: 3 }
    }
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
        let all = Features::all().bits();
        assert_eq!(all, 7 | 1 << 28 | 1 << 29 | 1 << 32 | 1 << 34 | 1 << 35);
        assert_eq!(socket_types(all), [SocketType::Stream, SocketType::SeqPacket]);
        assert_eq!(Config { guest_cid: 3 }.bytes(), [3, 0, 0, 0, 0, 0, 0, 0]);
    }
}
