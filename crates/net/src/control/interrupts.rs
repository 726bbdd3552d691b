//! How long interrupts may wait, as the driver sets it (virtio 1.3, 5.1.6.5.9).

use crate::moderation::Coalesce;
use std::{collections::BTreeMap, time::Duration};

/// How long interrupts of a queue may wait (struct virtio_net_ctrl_coal): until one of these limits is reached. If one is zero, they
/// do not wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interrupts {
    /// Number of packets.
    pub packets: u32,
    /// Time in microseconds since the first of them.
    pub micros: u32,
}

impl Interrupts {
    /// The longest time that is accepted, in microseconds: a second. A driver that asks for more means something else.
    pub const LONGEST: u32 = 1_000_000;

    /// Bytes in a command.
    pub const LEN: usize = 8;

    /// Returns them as in a command.
    pub fn bytes(self) -> [u8; Self::LEN] {
        let both = u64::from(self.packets) | u64::from(self.micros) << 32;
        both.to_le_bytes()
    }

    /// Returns what these bytes of a command say.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Interrupts {
        let both = u64::from_le_bytes(bytes);
        Interrupts { packets: both as u32, micros: (both >> 32) as u32 }
    }

    /// Returns them as a queue applies them.
    pub fn limits(self) -> Coalesce {
        if self.packets == 0 {
            return Coalesce::NONE;
        }
        Coalesce { packets: self.packets, bytes: u64::MAX, delay: Duration::from_micros(self.micros.into()) }
    }
}

/// What the driver has set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Moderated {
    /// For all receive queues, and for all transmit queues.
    all: [Option<Interrupts>; 2],
    /// For single queues since, by index. Only queues that run get here.
    pub queues: BTreeMap<u16, Interrupts>,
}

impl Moderated {
    pub fn of(&self, queue: u16) -> Option<Interrupts> {
        let [receive, transmit] = self.all;
        let all = if queue.is_multiple_of(2) { receive } else { transmit };
        self.queues.get(&queue).copied().or(all)
    }

    /// Sets what counts for all receive or all transmit queues. The last command counts, whether it was for one or for all.
    pub fn set_all(&mut self, transmit: bool, limits: Interrupts) {
        self.queues.retain(|index, _| index.is_multiple_of(2) == transmit);
        let [receive, sent] = &mut self.all;
        *(if transmit { sent } else { receive }) = Some(limits);
    }
}
