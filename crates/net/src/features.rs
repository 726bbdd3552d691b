//! Feature bits and the configuration space of a network device (virtio 1.3, 5.1.3, 5.1.4 and 6).

use ringroad_wire::ethernet::MacAddr;

/// Feature bits by their names in the specification.
pub mod bits {
    pub use ringroad_ring::bits::*;

    /// The maximum MTU is in the configuration space.
    pub const NET_F_MTU: u64 = 1 << 3;
    /// The MAC address is in the configuration space.
    pub const NET_F_MAC: u64 = 1 << 5;
    /// A frame may be spread over several receive buffers.
    pub const NET_F_MRG_RXBUF: u64 = 1 << 15;
    /// The link status is in the configuration space.
    pub const NET_F_STATUS: u64 = 1 << 16;
}

/// Which optional features a port offers. Each can be turned off, so that every path can be forced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
    /// VIRTIO_NET_F_MRG_RXBUF.
    pub mrg_rxbuf: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_NET_F_MAC.
    pub mac: bool,
    /// VIRTIO_NET_F_STATUS.
    pub status: bool,
    /// VIRTIO_NET_F_MTU.
    pub mtu: bool,
}

impl Default for Features {
    /// All of them.
    fn default() -> Features {
        Features::ALL
    }
}

impl Features {
    /// All that there are.
    pub const ALL: Features = Features {
        packed: true,
        in_order: true,
        mrg_rxbuf: true,
        event_idx: true,
        indirect: true,
        mac: true,
        status: true,
        mtu: true,
    };

    /// As feature bits, with VERSION_1, without which nothing goes.
    pub fn bits(self) -> u64 {
        let set = [
            (self.packed, bits::RING_PACKED),
            (self.in_order, bits::IN_ORDER),
            (self.mrg_rxbuf, bits::NET_F_MRG_RXBUF),
            (self.event_idx, bits::EVENT_IDX),
            (self.indirect, bits::INDIRECT_DESC),
            (self.mac, bits::NET_F_MAC),
            (self.status, bits::NET_F_STATUS),
            (self.mtu, bits::NET_F_MTU),
        ];
        set.iter().fold(bits::VERSION_1, |all, &(on, bit)| if on { all | bit } else { all })
    }
}

/// The configuration space of a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The driver's address.
    pub mac: MacAddr,
    /// Whether the link is up.
    pub link_up: bool,
    /// Pairs of a receive and a transmit queue.
    pub queue_pairs: u16,
    /// The largest payload of a frame.
    pub mtu: u16,
}

impl Config {
    /// struct virtio_net_config up to and with `mtu`.
    pub fn bytes(&self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..6].copy_from_slice(&self.mac.0);
        bytes[6..8].copy_from_slice(&u16::from(self.link_up).to_le_bytes());
        bytes[8..10].copy_from_slice(&self.queue_pairs.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.mtu.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_may_not_be_acknowledged() {
        let offered = Features { packed: false, ..Features::ALL };
        let all = offered.bits();
        assert_eq!(all, 1 << 3 | 1 << 5 | 1 << 15 | 1 << 16 | 1 << 28 | 1 << 29 | 1 << 32 | 1 << 35);
        for good in [all, bits::VERSION_1, all | bits::PROTOCOL_FEATURES] {
            assert_eq!(offered.check(good), Ok(()));
        }
        assert_eq!(offered.check(all | bits::RING_PACKED | 1), Err(bits::RING_PACKED | 1));
        assert_eq!(offered.check(bits::NET_F_MAC), Err(bits::VERSION_1));
    }

    #[test]
    fn configuration_space_of_the_specification() {
        let config = Config { mac: MacAddr([1, 2, 3, 4, 5, 6]), link_up: true, queue_pairs: 0x0708, mtu: 0x090a };
        assert_eq!(config.bytes(), [1, 2, 3, 4, 5, 6, 1, 0, 0x08, 0x07, 0x0a, 0x09]);
        assert_eq!(Config { link_up: false, ..config }.bytes()[6..8], [0, 0]);
    }
}
