//! Feature bits and the configuration space of a network device (virtio 1.3, 5.1.3, 5.1.4 and 6).

use crate::rss::{self, HashTypes};
use bitflags::bitflags;
use ringroad_wire::ethernet::MacAddr;

/// Feature bits by their names in the specification.
pub mod bits {
    pub use ringroad_ring::bits::*;

    /// The driver may send partial checksums.
    pub const NET_F_CSUM: u64 = 1;
    /// The driver takes partial checksums.
    pub const NET_F_GUEST_CSUM: u64 = 1 << 1;
    /// The driver may change which offloads it takes while it runs.
    pub const NET_F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// The maximum MTU is in the configuration space.
    pub const NET_F_MTU: u64 = 1 << 3;
    /// The MAC address is in the configuration space.
    pub const NET_F_MAC: u64 = 1 << 5;
    /// The driver takes TCP over IPv4 to be segmented.
    pub const NET_F_GUEST_TSO4: u64 = 1 << 7;
    /// The driver takes TCP over IPv6 to be segmented.
    pub const NET_F_GUEST_TSO6: u64 = 1 << 8;
    /// The driver takes TCP with ECN to be segmented.
    pub const NET_F_GUEST_ECN: u64 = 1 << 9;
    /// The driver takes UDP to be fragmented.
    pub const NET_F_GUEST_UFO: u64 = 1 << 10;
    /// The driver may send TCP over IPv4 to be segmented.
    pub const NET_F_HOST_TSO4: u64 = 1 << 11;
    /// The driver may send TCP over IPv6 to be segmented.
    pub const NET_F_HOST_TSO6: u64 = 1 << 12;
    /// The driver may send TCP with ECN to be segmented.
    pub const NET_F_HOST_ECN: u64 = 1 << 13;
    /// The driver may send UDP to be fragmented.
    pub const NET_F_HOST_UFO: u64 = 1 << 14;
    /// A frame may be spread over several receive buffers.
    pub const NET_F_MRG_RXBUF: u64 = 1 << 15;
    /// The link status is in the configuration space.
    pub const NET_F_STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const NET_F_CTRL_VQ: u64 = 1 << 17;
    /// The driver chooses which addresses it receives frames to.
    pub const NET_F_CTRL_RX: u64 = 1 << 18;
    /// The driver chooses which VLANs it receives frames of.
    pub const NET_F_CTRL_VLAN: u64 = 1 << 19;
    /// The driver turns kinds of addresses on and off.
    pub const NET_F_CTRL_RX_EXTRA: u64 = 1 << 20;
    /// The driver announces itself to the network when the device asks for it.
    pub const NET_F_GUEST_ANNOUNCE: u64 = 1 << 21;
    /// The driver may use several pairs of queues.
    pub const NET_F_MQ: u64 = 1 << 22;
    /// The driver may change its address.
    pub const NET_F_CTRL_MAC_ADDR: u64 = 1 << 23;
    /// The driver takes packets in UDP tunnels to be segmented: bit 65. Those above 63 are kept in the unused bits from 46 on, as the
    /// specification does among the guest offloads (virtio 1.4, 5.1.6.5.8); vhost-user cannot negotiate them.
    pub const NET_F_GUEST_UDP_TUNNEL_GSO: u64 = 1 << 46;
    /// The driver takes them with an outer checksum to be completed: bit 66.
    pub const NET_F_GUEST_UDP_TUNNEL_GSO_CSUM: u64 = 1 << 47;
    /// The driver may send packets in UDP tunnels to be segmented: bit 67.
    pub const NET_F_HOST_UDP_TUNNEL_GSO: u64 = 1 << 48;
    /// The driver may send them with an outer checksum to be completed: bit 68.
    pub const NET_F_HOST_UDP_TUNNEL_GSO_CSUM: u64 = 1 << 49;
    /// The driver reads the device's statistics.
    pub const NET_F_DEVICE_STATS: u64 = 1 << 50;
    /// The driver sets for how long interrupts of one queue may wait.
    pub const NET_F_VQ_NOTF_COAL: u64 = 1 << 52;
    /// The driver sets for how long interrupts of all receive or transmit queues may wait.
    pub const NET_F_NOTF_COAL: u64 = 1 << 53;
    /// The driver takes UDP over IPv4 to be segmented.
    pub const NET_F_GUEST_USO4: u64 = 1 << 54;
    /// The driver takes UDP over IPv6 to be segmented.
    pub const NET_F_GUEST_USO6: u64 = 1 << 55;
    /// The driver may send UDP to be segmented.
    pub const NET_F_HOST_USO: u64 = 1 << 56;
    /// The hash of a received frame is in its header, which is longer.
    pub const NET_F_HASH_REPORT: u64 = 1 << 57;
    /// The driver says by a hash which receive queue frames go to.
    pub const NET_F_RSS: u64 = 1 << 60;
    /// Speed and duplex mode are in the configuration space.
    pub const NET_F_SPEED_DUPLEX: u64 = 1 << 63;
}

bitflags! {
    /// The features that a port offers. Optional ones can be turned off, so that every path can be forced.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// VIRTIO_F_VERSION_1, without which no driver is served.
        const VERSION_1 = bits::VERSION_1;
        /// VIRTIO_F_RING_PACKED.
        const PACKED = bits::RING_PACKED;
        /// VIRTIO_F_IN_ORDER.
        const IN_ORDER = bits::IN_ORDER;
        /// VIRTIO_NET_F_MRG_RXBUF.
        const MRG_RXBUF = bits::NET_F_MRG_RXBUF;
        /// VIRTIO_F_EVENT_IDX.
        const EVENT_IDX = bits::EVENT_IDX;
        /// VIRTIO_F_INDIRECT_DESC.
        const INDIRECT = bits::INDIRECT_DESC;
        /// VIRTIO_NET_F_CSUM.
        const CSUM = bits::NET_F_CSUM;
        /// VIRTIO_NET_F_GUEST_CSUM.
        const GUEST_CSUM = bits::NET_F_GUEST_CSUM;
        /// VIRTIO_NET_F_GUEST_TSO4.
        const GUEST_TSO4 = bits::NET_F_GUEST_TSO4;
        /// VIRTIO_NET_F_GUEST_TSO6.
        const GUEST_TSO6 = bits::NET_F_GUEST_TSO6;
        /// VIRTIO_NET_F_GUEST_ECN.
        const GUEST_ECN = bits::NET_F_GUEST_ECN;
        /// VIRTIO_NET_F_GUEST_UFO.
        const GUEST_UFO = bits::NET_F_GUEST_UFO;
        /// VIRTIO_NET_F_GUEST_USO4.
        const GUEST_USO4 = bits::NET_F_GUEST_USO4;
        /// VIRTIO_NET_F_GUEST_USO6.
        const GUEST_USO6 = bits::NET_F_GUEST_USO6;
        /// VIRTIO_NET_F_HOST_TSO4.
        const HOST_TSO4 = bits::NET_F_HOST_TSO4;
        /// VIRTIO_NET_F_HOST_TSO6.
        const HOST_TSO6 = bits::NET_F_HOST_TSO6;
        /// VIRTIO_NET_F_HOST_ECN.
        const HOST_ECN = bits::NET_F_HOST_ECN;
        /// VIRTIO_NET_F_HOST_UFO.
        const HOST_UFO = bits::NET_F_HOST_UFO;
        /// VIRTIO_NET_F_HOST_USO.
        const HOST_USO = bits::NET_F_HOST_USO;
        /// VIRTIO_NET_F_CTRL_VQ.
        const CTRL_VQ = bits::NET_F_CTRL_VQ;
        /// VIRTIO_NET_F_CTRL_RX.
        const CTRL_RX = bits::NET_F_CTRL_RX;
        /// VIRTIO_NET_F_CTRL_RX_EXTRA.
        const CTRL_RX_EXTRA = bits::NET_F_CTRL_RX_EXTRA;
        /// VIRTIO_NET_F_CTRL_VLAN.
        const CTRL_VLAN = bits::NET_F_CTRL_VLAN;
        /// VIRTIO_NET_F_MQ.
        const MQ = bits::NET_F_MQ;
        /// VIRTIO_NET_F_RSS.
        const RSS = bits::NET_F_RSS;
        /// VIRTIO_NET_F_CTRL_MAC_ADDR.
        const CTRL_MAC_ADDR = bits::NET_F_CTRL_MAC_ADDR;
        /// VIRTIO_NET_F_CTRL_GUEST_OFFLOADS.
        const CTRL_GUEST_OFFLOADS = bits::NET_F_CTRL_GUEST_OFFLOADS;
        /// VIRTIO_NET_F_HASH_REPORT.
        const HASH_REPORT = bits::NET_F_HASH_REPORT;
        /// VIRTIO_NET_F_GUEST_ANNOUNCE.
        const GUEST_ANNOUNCE = bits::NET_F_GUEST_ANNOUNCE;
        /// VIRTIO_NET_F_DEVICE_STATS.
        const DEVICE_STATS = bits::NET_F_DEVICE_STATS;
        /// VIRTIO_NET_F_VQ_NOTF_COAL.
        const VQ_NOTF_COAL = bits::NET_F_VQ_NOTF_COAL;
        /// VIRTIO_NET_F_NOTF_COAL.
        const NOTF_COAL = bits::NET_F_NOTF_COAL;
        /// VIRTIO_NET_F_MAC.
        const MAC = bits::NET_F_MAC;
        /// VIRTIO_NET_F_STATUS.
        const STATUS = bits::NET_F_STATUS;
        /// VIRTIO_NET_F_MTU.
        const MTU = bits::NET_F_MTU;
        /// VIRTIO_NET_F_SPEED_DUPLEX.
        const SPEED_DUPLEX = bits::NET_F_SPEED_DUPLEX;
    }
}

impl Features {
    /// Those that cannot be turned off.
    pub const REQUIRED: Features = Features::VERSION_1;

    /// The offloads: which frames with work left to do the driver may send (those without GUEST) and takes (GUEST).
    pub const OFFLOADS: Features = Features::CSUM
        .union(Features::GUEST_CSUM)
        .union(Features::GUEST_TSO4)
        .union(Features::GUEST_TSO6)
        .union(Features::GUEST_ECN)
        .union(Features::GUEST_UFO)
        .union(Features::GUEST_USO4)
        .union(Features::GUEST_USO6)
        .union(Features::HOST_TSO4)
        .union(Features::HOST_TSO6)
        .union(Features::HOST_ECN)
        .union(Features::HOST_UFO)
        .union(Features::HOST_USO);

    /// The control queue and its commands.
    pub const CONTROL: Features = Features::CTRL_VQ
        .union(Features::CTRL_RX)
        .union(Features::CTRL_RX_EXTRA)
        .union(Features::CTRL_VLAN)
        .union(Features::MQ)
        .union(Features::RSS)
        .union(Features::CTRL_MAC_ADDR)
        .union(Features::CTRL_GUEST_OFFLOADS)
        .union(Features::HASH_REPORT)
        .union(Features::GUEST_ANNOUNCE)
        .union(Features::DEVICE_STATS)
        .union(Features::VQ_NOTF_COAL)
        .union(Features::NOTF_COAL);

    /// Returns these without the ones that require one that is missing (5.1.3.1).
    pub fn consistent(self) -> Features {
        let tso = Features::HOST_TSO4 | Features::HOST_TSO6;
        let guest_tso = Features::GUEST_TSO4 | Features::GUEST_TSO6;
        let checksum = tso | Features::HOST_UFO | Features::HOST_USO;
        let guest_usos = Features::GUEST_USO4 | Features::GUEST_USO6;
        let guest_checksum = guest_tso | Features::GUEST_UFO | guest_usos;
        // In this order: what requires segmentation requires its checksums, too.
        let rules = [
            (checksum, Features::CSUM),
            (guest_checksum, Features::GUEST_CSUM),
            (Features::HOST_ECN, tso),
            (Features::GUEST_ECN, guest_tso),
            (Features::CONTROL, Features::CTRL_VQ),
            // The device asks for it in the status field.
            (Features::GUEST_ANNOUNCE, Features::STATUS),
        ];
        rules.into_iter().fold(self, |all, (of, needs)| if all.intersects(needs) { all } else { all - of })
    }

    /// Returns what our driver negotiates for rings of one layout: all but the offloads and the control queue.
    pub fn layout(packed: bool) -> Features {
        let all = Features::all() - Features::OFFLOADS - Features::CONTROL;
        if packed { all } else { all - Features::PACKED }
    }
}

impl Default for Features {
    /// All but HASH_REPORT: with its longer header frames take the normal path, and each costs a hash.
    fn default() -> Features {
        Features::all() - Features::HASH_REPORT
    }
}

/// VIRTIO_NET_S_LINK_UP and VIRTIO_NET_S_ANNOUNCE.
const LINK_UP: u16 = 1;
const ANNOUNCE: u16 = 2;

/// The configuration space of a network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The driver's address.
    pub mac: MacAddr,
    /// Whether the link is up.
    pub link_up: bool,
    /// Whether the driver is to announce itself to the network.
    pub announce: bool,
    /// Pairs of a receive and a transmit queue.
    pub queue_pairs: u16,
    /// The largest payload of a frame.
    pub mtu: u16,
    /// The link's speed in Mb/s; `None`: unknown.
    pub speed: Option<u32>,
}

impl Default for Config {
    /// A local address, link up, nothing to announce, one queue pair, an MTU of 1500 bytes, of unknown speed.
    fn default() -> Config {
        Config { mac: MacAddr::local(1), link_up: true, announce: false, queue_pairs: 1, mtu: 1500, speed: None }
    }
}

impl Config {
    /// struct virtio_net_config up to and with `supported_hash_types`.
    pub fn bytes(&self) -> [u8; 24] {
        // A speed and a duplex mode of all ones are unknown; 1 is full duplex.
        let (speed, duplex) = self.speed.map_or((u32::MAX, u8::MAX), |speed| (speed, 1));
        let mut bytes = [0; 24];
        bytes[..6].copy_from_slice(&self.mac.0);
        let flag = |on, bit: u16| if on { bit } else { 0 };
        let status = flag(self.link_up, LINK_UP) | flag(self.announce, ANNOUNCE);
        bytes[6..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.queue_pairs.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.mtu.to_le_bytes());
        bytes[12..16].copy_from_slice(&speed.to_le_bytes());
        bytes[16..18].copy_from_slice(&[duplex, rss::KEY as u8]);
        bytes[18..20].copy_from_slice(&(rss::TABLE as u16).to_le_bytes());
        bytes[20..].copy_from_slice(&HashTypes::all().bits().to_le_bytes());
        bytes
    }

    /// Reads a device's configuration space, up to and with `speed`.
    pub fn from_bytes(bytes: &[u8; 24]) -> Config {
        let [m0, m1, m2, m3, m4, m5, s0, s1, q0, q1, t0, t1, v0, v1, v2, v3, ..] = *bytes;
        let (status, speed) = (u16::from_le_bytes([s0, s1]), u32::from_le_bytes([v0, v1, v2, v3]));
        Config {
            mac: MacAddr([m0, m1, m2, m3, m4, m5]),
            link_up: status & LINK_UP != 0,
            announce: status & ANNOUNCE != 0,
            queue_pairs: u16::from_le_bytes([q0, q1]),
            mtu: u16::from_le_bytes([t0, t1]),
            speed: (speed != u32::MAX).then_some(speed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_the_specification() {
        let basic = 1 << 63 | 1 << 3 | 1 << 5 | 1 << 15 | 1 << 16 | 1 << 28 | 1 << 29 | 1 << 32 | 1 << 34 | 1 << 35;
        let offloads = 0b11 | 0xff << 7 | 0b111 << 54;
        let control = 1 << 2 | 0b11111 << 17 | 0b11 << 22 | 1 << 50 | 0b11 << 52 | 1 << 57 | 1 << 60;
        assert_eq!(Features::all().bits(), basic | offloads | control);
        assert_eq!(Features::CONTROL.bits(), control);
        assert_eq!(Features::OFFLOADS.bits(), offloads);
        assert_eq!(Features::layout(true).bits(), basic);
        assert_eq!(Features::all().consistent(), Features::all());
        let receiving = Features::GUEST_CSUM | Features::GUEST_TSO4 | Features::GUEST_ECN;
        let sending = Features::HOST_TSO6 | Features::HOST_ECN | Features::HOST_USO;
        assert_eq!((receiving | sending).consistent(), receiving);
        assert_eq!((sending | Features::CSUM).consistent(), sending | Features::CSUM);
        assert_eq!((receiving - Features::GUEST_TSO4).consistent(), Features::GUEST_CSUM);
        assert_eq!((Features::all() - Features::CTRL_VQ).consistent(), Features::all() - Features::CONTROL);
        let silent = Features::all() - Features::STATUS;
        assert_eq!(silent.consistent(), silent - Features::GUEST_ANNOUNCE);
        assert_eq!(Features::REQUIRED.bits(), 1 << 32);
    }

    #[test]
    fn configuration_space_of_the_specification() {
        let config = Config {
            mac: MacAddr([1, 2, 3, 4, 5, 6]),
            link_up: true,
            announce: false,
            queue_pairs: 0x0708,
            mtu: 0x090a,
            speed: Some(10_000),
        };
        let bytes = [1, 2, 3, 4, 5, 6, 1, 0, 0x08, 0x07, 0x0a, 0x09, 0x10, 0x27, 0, 0, 1, 40, 128, 0, 0x3f, 0, 0, 0];
        assert_eq!(config.bytes(), bytes);
        assert_eq!(Config { speed: None, ..config }.bytes()[12..17], [0xff; 5]);
        assert_eq!(Config { link_up: false, ..config }.bytes()[6..8], [0, 0]);
        assert_eq!(Config { announce: true, ..config }.bytes()[6..8], [3, 0]);
        for config in [config, Config { announce: true, ..config }, Config { link_up: false, speed: None, ..config }] {
            assert_eq!(Config::from_bytes(&config.bytes()), config);
        }
    }
}
