//! Driver end of the control queue: commands as bytes. Sent by `driver.rs`.

use super::{Interrupts, StatisticTypes, codes::*};
use crate::rss::Rss;
use ringroad_wire::ethernet::MacAddr;

/// Driver end: a command to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Receive every frame, or not.
    Promiscuous(bool),
    /// Receive all multicast frames.
    AllMulticast(bool),
    /// Receive all unicast frames.
    AllUnicast(bool),
    /// Receive no multicast frame, other than broadcast.
    NoMulticast(bool),
    /// Receive no unicast frame.
    NoUnicast(bool),
    /// Receive no broadcast frame.
    NoBroadcast(bool),
    /// Receive frames to these unicast and these multicast addresses, in addition to the driver's own.
    Addresses(&'a [MacAddr], &'a [MacAddr]),
    /// Change the driver's own address.
    Address(MacAddr),
    /// Receive frames of a VLAN.
    AddVlan(u16),
    /// Receive them no more.
    RemoveVlan(u16),
    /// Take these offloads, as bits of the features GUEST_*.
    Offloads(u64),
    /// Use this many pairs of queues.
    Pairs(u16),
    /// Distribute frames among receive queues by their hash.
    Rss(&'a Rss),
    /// Report the hashes of received frames, by its types and key.
    Hash(&'a Rss),
    /// Delay interrupts of all transmit queues.
    TransmitInterrupts(Interrupts),
    /// Delay interrupts of all receive queues.
    ReceiveInterrupts(Interrupts),
    /// Delay interrupts of the queue with this index.
    QueueInterrupts(u16, Interrupts),
    /// Return how long those may wait, as [`Interrupts::from_bytes`] reads it.
    AskInterrupts(u16),
    /// The driver has announced itself, as the status field asked for.
    Announced,
    /// Return which types of statistics there are: see [`DriverControl::statistic_types`](super::DriverControl::statistic_types).
    AskStatisticTypes,
    /// Return statistics of these types of the queues with these indices: see [`DriverControl::statistics`](super::DriverControl::statistics).
    AskStatistics(&'a [(u16, StatisticTypes)]),
}

impl Command<'_> {
    /// Returns the length of the reply in bytes, with the acknowledgement.
    pub fn reply_len(&self) -> usize {
        1 + match self {
            Command::AskInterrupts(_) => Interrupts::LEN,
            Command::AskStatisticTypes => size_of::<StatisticTypes>(),
            Command::AskStatistics(wanted) => wanted.iter().map(|(_, types)| types.reply_len()).sum(),
            _ => 0,
        }
    }

    /// Returns the command as the device reads it.
    pub fn bytes(&self) -> Vec<u8> {
        let switch = |command, on| vec![RX, command, u8::from(on)];
        match *self {
            Command::Promiscuous(on) => switch(RX_PROMISC, on),
            Command::AllMulticast(on) => switch(RX_ALLMULTI, on),
            Command::AllUnicast(on) => switch(RX_ALLUNI, on),
            Command::NoMulticast(on) => switch(RX_NOMULTI, on),
            Command::NoUnicast(on) => switch(RX_NOUNI, on),
            Command::NoBroadcast(on) => switch(RX_NOBCAST, on),
            Command::Addresses(unicast, multicast) => {
                let mut bytes = vec![MAC, MAC_TABLE_SET];
                for table in [unicast, multicast] {
                    bytes.extend((table.len() as u32).to_le_bytes());
                    table.iter().for_each(|address| bytes.extend(address.0));
                }
                bytes
            }
            Command::Address(address) => [&[MAC, MAC_ADDR_SET][..], &address.0].concat(),
            Command::AddVlan(id) => [&[VLAN, VLAN_ADD][..], &id.to_le_bytes()].concat(),
            Command::RemoveVlan(id) => [&[VLAN, VLAN_DEL][..], &id.to_le_bytes()].concat(),
            Command::Pairs(pairs) => [&[MQ, MQ_VQ_PAIRS_SET][..], &pairs.to_le_bytes()].concat(),
            Command::Rss(rss) => [&[MQ, MQ_RSS_CONFIG][..], &rss.bytes()].concat(),
            Command::Hash(rss) => [&[MQ, MQ_HASH_CONFIG][..], &rss.hash_bytes()].concat(),
            Command::TransmitInterrupts(limits) => [&[NOTF_COAL, NOTF_COAL_TX_SET][..], &limits.bytes()].concat(),
            Command::ReceiveInterrupts(limits) => [&[NOTF_COAL, NOTF_COAL_RX_SET][..], &limits.bytes()].concat(),
            Command::QueueInterrupts(index, limits) => {
                [&[NOTF_COAL, NOTF_COAL_VQ_SET][..], &index.to_le_bytes(), &[0; 2], &limits.bytes()].concat()
            }
            Command::AskInterrupts(index) => {
                [&[NOTF_COAL, NOTF_COAL_VQ_GET][..], &index.to_le_bytes(), &[0; 2]].concat()
            }
            Command::Announced => vec![ANNOUNCE, ANNOUNCE_ACK],
            Command::AskStatisticTypes => vec![STATS, STATS_QUERY],
            Command::AskStatistics(wanted) => {
                let mut bytes = vec![STATS, STATS_GET];
                for (queue, types) in wanted {
                    bytes.extend(queue.to_le_bytes());
                    bytes.extend([0; 6]);
                    bytes.extend(types.bits().to_le_bytes());
                }
                bytes
            }
            Command::Offloads(bits) => [&[GUEST_OFFLOADS, GUEST_OFFLOADS_SET][..], &bits.to_le_bytes()].concat(),
        }
    }
}
