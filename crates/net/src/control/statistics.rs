//! Statistics of the device, as the driver reads them (virtio 1.3, 5.1.6.5.10). Both ends: what there is, and its bytes.

use crate::features::bits;
use bitflags::bitflags;
use ringroad_frame::Snapshot;

bitflags! {
    /// Types of statistics (VIRTIO_NET_STATS_TYPE): those that are counted here. Not among them: `TX_GSO`, as frames are cut for each
    /// receiver, after they have left their queue; and both of the speed, as frames beyond a port's rate wait and are not dropped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct StatisticTypes: u64 {
        /// VIRTIO_NET_STATS_TYPE_RX_BASIC.
        const RX_BASIC = 1;
        /// VIRTIO_NET_STATS_TYPE_RX_CSUM.
        const RX_CSUM = 1 << 1;
        /// VIRTIO_NET_STATS_TYPE_RX_GSO.
        const RX_GSO = 1 << 2;
        /// VIRTIO_NET_STATS_TYPE_TX_BASIC.
        const TX_BASIC = 1 << 16;
        /// VIRTIO_NET_STATS_TYPE_TX_CSUM.
        const TX_CSUM = 1 << 17;
        /// VIRTIO_NET_STATS_TYPE_CVQ.
        const CVQ = 1 << 32;
    }
}

/// Bytes of a header in a reply (struct virtio_net_stats_reply_hdr).
const HEADER: usize = 8;
/// Bytes of an entry in a request.
pub(super) const ENTRY: usize = 16;

impl StatisticTypes {
    /// Those of receive queues.
    const RX: StatisticTypes = StatisticTypes::RX_BASIC.union(StatisticTypes::RX_CSUM).union(StatisticTypes::RX_GSO);
    /// Those of transmit queues.
    const TX: StatisticTypes = StatisticTypes::TX_BASIC.union(StatisticTypes::TX_CSUM);

    /// Returns those that a driver that acknowledged these feature bits can obtain.
    pub(super) fn available(acked: u64) -> StatisticTypes {
        let mut types = StatisticTypes::all();
        let without = |features: u64| acked & features == 0;
        let tso = bits::NET_F_GUEST_TSO4 | bits::NET_F_GUEST_TSO6;
        types.set(StatisticTypes::RX_CSUM, !without(bits::NET_F_GUEST_CSUM));
        types.set(StatisticTypes::RX_GSO, !without(tso));
        types.set(StatisticTypes::TX_CSUM, !without(bits::NET_F_CSUM));
        types
    }

    /// Returns those of the queue with this index. `control`: the index of the control queue.
    pub(super) fn of_queue(queue: u16, control: u16) -> StatisticTypes {
        match queue {
            _ if queue == control => StatisticTypes::CVQ,
            _ if queue > control => StatisticTypes::empty(),
            _ if queue.is_multiple_of(2) => StatisticTypes::RX,
            _ => StatisticTypes::TX,
        }
    }

    /// Returns the names of one type's counters, in the order of the specification's structure.
    fn names(self) -> &'static [&'static str] {
        match self {
            StatisticTypes::RX_BASIC => {
                &["rx_notifications", "rx_packets", "rx_bytes", "rx_interrupts", "rx_drops", "rx_drop_overruns"]
            }
            StatisticTypes::RX_CSUM => &["rx_csum_valid", "rx_needs_csum", "rx_csum_none", "rx_csum_bad"],
            StatisticTypes::RX_GSO => {
                &["rx_gso_packets", "rx_gso_bytes", "rx_gso_packets_coalesced", "rx_gso_bytes_coalesced"]
            }
            StatisticTypes::TX_BASIC => {
                &["tx_notifications", "tx_packets", "tx_bytes", "tx_interrupts", "tx_drops", "tx_drop_malformed"]
            }
            StatisticTypes::TX_CSUM => &["tx_csum_none", "tx_needs_csum"],
            StatisticTypes::CVQ => &["command_num", "ok_num"],
            _ => &[],
        }
    }

    /// Returns the number of bytes that they take in a reply.
    pub(super) fn reply_len(self) -> usize {
        self.iter().map(|one| HEADER + 8 * one.names().len()).sum()
    }
}

/// The statistics of one type of one queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// Which.
    pub types: StatisticTypes,
    /// The index of the queue.
    pub queue: u16,
    values: Vec<u64>,
}

impl Statistics {
    /// Returns the counters with their names in the specification.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.types.names().iter().copied().zip(self.values.iter().copied())
    }

    /// Returns the counter of this name in the specification.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.named().find_map(|(known, value)| (known == name).then_some(value))
    }

    /// Returns one type of a receive or transmit queue's statistics. What was dropped by the switch is counted with the queue that it
    /// came from; frames that wait for their receiver are not dropped.
    pub(super) fn of(types: StatisticTypes, queue: u16, counted: &Snapshot) -> Statistics {
        let Snapshot { frames, bytes, kicks, notifications, partial, valid, gso, gso_bytes, .. } = *counted;
        let basic = |other| vec![kicks, frames, bytes, notifications, counted.dropped(), other];
        let values = match types {
            StatisticTypes::RX_BASIC => basic(counted.full),
            // No checksum is verified here, so none is found to be wrong.
            StatisticTypes::RX_CSUM => vec![valid, partial, frames.saturating_sub(valid + partial), 0],
            // Frames are not coalesced.
            StatisticTypes::RX_GSO => vec![gso, gso_bytes, 0, 0],
            StatisticTypes::TX_BASIC => basic(counted.runt + counted.offload),
            StatisticTypes::TX_CSUM => vec![frames.saturating_sub(partial), partial],
            _ => Vec::new(),
        };
        Statistics { types, queue, values }
    }

    /// Returns the control queue's: the commands, and those that were carried out.
    pub(super) fn of_control(queue: u16, commands: u64, ok: u64) -> Statistics {
        Statistics { types: StatisticTypes::CVQ, queue, values: vec![commands, ok] }
    }

    /// Appends them to a reply.
    pub(super) fn write(&self, reply: &mut Vec<u8>) {
        let size = HEADER + 8 * self.values.len();
        reply.extend([self.types.bits().trailing_zeros() as u8, 0]);
        [self.queue, 0, size as u16].iter().for_each(|half| reply.extend(half.to_le_bytes()));
        self.values.iter().for_each(|value| reply.extend(value.to_le_bytes()));
    }

    /// Reads a reply up to the first statistics that are cut short or not of a known type.
    pub(super) fn read(mut reply: &[u8]) -> Vec<Statistics> {
        let mut all = Vec::new();
        while let Some((&[kind, _, q0, q1, _, _, s0, s1], _)) = reply.split_first_chunk::<HEADER>() {
            let types = StatisticTypes::from_bits_truncate(1u64.checked_shl(kind.into()).unwrap_or_default());
            let size = usize::from(u16::from_le_bytes([s0, s1]));
            let expected = HEADER + 8 * types.names().len();
            let Some((this, rest)) = reply.split_at_checked(size) else { break };
            if types.is_empty() || size != expected {
                break;
            }
            let words = this.get(HEADER..).unwrap_or_default().as_chunks::<8>().0;
            let values = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
            all.push(Statistics { types, queue: u16::from_le_bytes([q0, q1]), values });
            reply = rest;
        }
        all
    }
}
