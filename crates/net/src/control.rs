//! The control queue (virtio 1.3, 5.1.6.5): what a driver asks of its device besides sending and receiving. The device end
//! ([`Control`]) carries commands out on its own state, from which the caller takes what concerns the receive queues; the driver
//! end ([`DriverControl`]) writes them down ([`Command`]). Threads and notifications are the caller's.

mod command;
mod driver;
mod interrupts;
mod statistics;

pub use command::Command;
pub use driver::DriverControl;
pub use interrupts::Interrupts;
pub use statistics::{StatisticTypes, Statistics};

use crate::{
    features::bits,
    filter::Filter,
    offload,
    rss::{Rss, Wrong},
};
use interrupts::Moderated;
use ringroad_frame::{Snapshot, offload::Support};
use ringroad_wire::ethernet::MacAddr;
use std::sync::Arc;

/// Acknowledgement of a command that was carried out (VIRTIO_NET_OK).
pub const OK: u8 = 0;
/// Acknowledgement of a command that was refused and changed nothing (VIRTIO_NET_ERR).
pub const ERR: u8 = 1;

/// Maximum length of a command in bytes: both MAC tables with over a thousand entries each. Longer ones are refused.
pub const MAX_COMMAND: usize = 16 << 10;

/// Classes and commands by their names in the specification.
mod codes {
    pub const RX: u8 = 0;
    pub const RX_PROMISC: u8 = 0;
    pub const RX_ALLMULTI: u8 = 1;
    pub const RX_ALLUNI: u8 = 2;
    pub const RX_NOMULTI: u8 = 3;
    pub const RX_NOUNI: u8 = 4;
    pub const RX_NOBCAST: u8 = 5;
    pub const MAC: u8 = 1;
    pub const MAC_TABLE_SET: u8 = 0;
    pub const MAC_ADDR_SET: u8 = 1;
    pub const VLAN: u8 = 2;
    pub const VLAN_ADD: u8 = 0;
    pub const VLAN_DEL: u8 = 1;
    pub const ANNOUNCE: u8 = 3;
    pub const ANNOUNCE_ACK: u8 = 0;
    pub const MQ: u8 = 4;
    pub const MQ_VQ_PAIRS_SET: u8 = 0;
    pub const MQ_RSS_CONFIG: u8 = 1;
    pub const MQ_HASH_CONFIG: u8 = 2;
    pub const GUEST_OFFLOADS: u8 = 5;
    pub const GUEST_OFFLOADS_SET: u8 = 0;
    pub const NOTF_COAL: u8 = 6;
    pub const NOTF_COAL_TX_SET: u8 = 0;
    pub const NOTF_COAL_RX_SET: u8 = 1;
    pub const NOTF_COAL_VQ_SET: u8 = 2;
    pub const NOTF_COAL_VQ_GET: u8 = 3;
    pub const STATS: u8 = 8;
    pub const STATS_QUERY: u8 = 0;
    pub const STATS_GET: u8 = 1;
}
use codes::*;

/// The offload bits that a driver that negotiated them can change (5.1.6.5.8).
const GUEST_OFFLOAD_BITS: u64 = bits::NET_F_GUEST_CSUM
    | bits::NET_F_GUEST_TSO4
    | bits::NET_F_GUEST_TSO6
    | bits::NET_F_GUEST_ECN
    | bits::NET_F_GUEST_UFO
    | bits::NET_F_GUEST_UDP_TUNNEL_GSO
    | bits::NET_F_GUEST_UDP_TUNNEL_GSO_CSUM
    | bits::NET_F_GUEST_USO4
    | bits::NET_F_GUEST_USO6;

/// What a command has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Which frames the driver receives: [`Control::filter`].
    Filter,
    /// The driver's address, with it [`Control::filter`].
    Mac,
    /// Which offloads it takes: [`Control::support`].
    Offloads,
    /// How many pairs of queues it uses, and how: [`Control::pairs`], [`Control::rss`].
    Pairs,
    /// Which hashes are reported with received frames: [`Control::hash`].
    Hash,
    /// How long its interrupts may wait: [`Control::interrupts`].
    Interrupts,
    /// The driver has announced itself: VIRTIO_NET_S_ANNOUNCE is to be cleared.
    Announced,
    /// Nothing: the driver has asked for these parameters. A buffer that is too short for them is an error.
    Reply([u8; Interrupts::LEN]),
    /// Nothing: the driver has asked for statistics. A buffer that is too short is filled.
    Statistics(Vec<u8>),
}

/// The receive and transmit queues, as far as commands depend on them.
pub trait Queues {
    /// Returns whether the queue of that index runs.
    fn runs(&self, index: u16) -> bool;
    /// Returns what the queue of that index has counted.
    fn counted(&self, index: u16) -> Snapshot;
}

/// Why a command was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such command, or its feature was not negotiated.
    #[error("command {command} of class {class} is unknown, or its feature was not negotiated")]
    Unknown {
        /// Its class.
        class: u8,
        /// Its number in that class.
        command: u8,
    },
    /// It has too few or too many bytes, or a table in it claims more entries than there are.
    #[error("a command of {len} bytes, which does not match its contents")]
    Length {
        /// Its length.
        len: usize,
    },
    /// The queue of that index does not run, or is the control queue.
    #[error("queue {index} is not a receive or transmit queue that runs")]
    Queue {
        /// Its index.
        index: u16,
    },
    /// There is no queue of that index.
    #[error("there is no queue {index}")]
    NoQueue {
        /// The index.
        index: u16,
    },
    /// A value is not allowed.
    #[error("value {value:#x} is not allowed in command {command} of class {class}")]
    Value {
        /// The command's class.
        class: u8,
        /// Its number in that class.
        command: u8,
        /// The value.
        value: u64,
    },
}

/// Device end: the state that a driver controls. Created when the driver starts over.
#[derive(Clone, Debug)]
pub struct Control {
    acked: u64,
    mac: MacAddr,
    filter: Arc<Filter>,
    support: Support,
    /// Pairs of queues that there are, and that the driver uses.
    pairs: [u16; 2],
    /// How it wants frames distributed among them, if it says that.
    rss: Option<Arc<Rss>>,
    /// What is hashed of frames, for their headers.
    hash: Option<Arc<Rss>>,
    interrupts: Moderated,
    /// Number of commands, and of those that were carried out.
    counted: [u64; 2],
}

impl Control {
    /// The state before the first command, for a driver that acknowledged these feature bits: it receives every frame, so that one
    /// that never sends a command misses nothing, takes all offloads that it negotiated, and uses the first pair of queues.
    /// `pairs`: how many there are.
    pub fn new(acked: u64, mac: MacAddr, pairs: u16) -> Control {
        let (filter, support) = (Arc::new(Filter::everything(mac)), offload::driver_takes(acked));
        Control {
            acked,
            mac,
            filter,
            support,
            pairs: [pairs, 1],
            rss: None,
            hash: None,
            interrupts: Moderated::default(),
            counted: [0; 2],
        }
    }

    /// Returns which frames the driver receives.
    pub fn filter(&self) -> &Arc<Filter> {
        &self.filter
    }

    /// Returns the offloads that the driver takes now.
    pub fn support(&self) -> Support {
        self.support
    }

    /// Returns how many pairs of queues the driver uses, from the first one on.
    pub fn pairs(&self) -> u16 {
        let [_, used] = self.pairs;
        used
    }

    /// Returns which receive queues frames go to. `None`: flows return to the queue whose transmit queue they came from.
    pub fn rss(&self) -> Option<&Arc<Rss>> {
        self.rss.as_ref()
    }

    /// Returns how the hashes are computed that are reported with received frames; `None`: there are none.
    pub fn hash(&self) -> Option<&Arc<Rss>> {
        self.hash.as_ref()
    }

    /// Returns the driver's address.
    pub fn mac(&self) -> MacAddr {
        self.mac
    }

    /// Returns how long interrupts of a queue may wait; `None`: the driver has not said.
    pub fn interrupts(&self, queue: u16) -> Option<Interrupts> {
        self.interrupts.of(queue)
    }

    /// A queue has stopped: what was set for it alone does not count when it starts again.
    pub fn stopped(&mut self, queue: u16) {
        self.interrupts.queues.remove(&queue);
    }

    /// Carries a command out, given as the driver wrote it: class, command and their data, read once. Returns what has changed.
    ///
    /// # Errors
    /// [`Refused`], to be acknowledged with [`ERR`]; nothing has changed.
    pub fn command(&mut self, bytes: &[u8], queues: &impl Queues) -> Result<Change, Refused> {
        let [commands, ok] = self.counted;
        // A command counts itself (5.1.6.5.10).
        self.counted = [commands.wrapping_add(1), ok.wrapping_add(1)];
        self.carry_out(bytes, queues).inspect_err(|_| self.unanswered())
    }

    /// The last command is acknowledged with [`ERR`] after all, as there is no room for its reply.
    pub fn unanswered(&mut self) {
        let [_, ok] = &mut self.counted;
        *ok = ok.wrapping_sub(1);
    }

    fn carry_out(&mut self, bytes: &[u8], queues: &impl Queues) -> Result<Change, Refused> {
        if bytes.len() > MAX_COMMAND {
            return Err(Refused::Length { len: bytes.len() });
        }
        let &[class, command, ref data @ ..] = bytes else { return Err(Refused::Length { len: bytes.len() }) };
        let code = Code { class, command, len: bytes.len() };
        if self.acked & code.feature() == 0 {
            return Err(Refused::Unknown { class, command });
        }
        match (class, command) {
            (RX, _) => self.receive_mode(code, data),
            (MAC, MAC_TABLE_SET) => {
                let (unicast, rest) = table(data).ok_or(code.length())?;
                let (multicast, rest) = table(rest).ok_or(code.length())?;
                if !rest.is_empty() {
                    return Err(code.length());
                }
                Arc::make_mut(&mut self.filter).set_addresses(unicast, multicast);
                Ok(Change::Filter)
            }
            (MAC, MAC_ADDR_SET) => {
                let mac = MacAddr(data.try_into().map_err(|_| code.length())?);
                if mac.is_multicast() || mac.is_zero() {
                    return Err(code.value(mac.to_u64()));
                }
                self.mac = mac;
                Arc::make_mut(&mut self.filter).set_own(mac);
                Ok(Change::Mac)
            }
            (VLAN, _) => {
                let id = u16::from_le_bytes(data.try_into().map_err(|_| code.length())?);
                if !Arc::make_mut(&mut self.filter).set_vlan(id, command == VLAN_ADD) {
                    return Err(code.value(id.into()));
                }
                Ok(Change::Filter)
            }
            (MQ, _) => self.distribute(code, data),
            (NOTF_COAL, _) => self.moderate(code, data, queues),
            (STATS, STATS_QUERY) if data.is_empty() => {
                Ok(Change::Statistics(StatisticTypes::available(self.acked).bits().to_le_bytes().to_vec()))
            }
            (STATS, STATS_GET) => self.statistics(code, data, queues),
            (ANNOUNCE, _) if data.is_empty() => Ok(Change::Announced),
            (STATS | ANNOUNCE, _) => Err(code.length()),
            _ => {
                let offloads = u64::from_le_bytes(data.try_into().map_err(|_| code.length())?);
                if offloads & !(self.acked & GUEST_OFFLOAD_BITS) != 0 {
                    return Err(code.value(offloads));
                }
                self.support = offload::driver_takes(offloads);
                Ok(Change::Offloads)
            }
        }
    }

    /// Sets how many pairs of queues are used, and how. The last command counts (5.1.6.5.5).
    fn distribute(&mut self, code: Code, data: &[u8]) -> Result<Change, Refused> {
        let [there, used] = &mut self.pairs;
        if code.command == MQ_RSS_CONFIG {
            let rss = Arc::new(Rss::from_bytes(data, *there).map_err(|wrong| code.wrong(wrong))?);
            *used = rss.pairs();
            (self.rss, self.hash) = (Some(rss.clone()), Some(rss));
            return Ok(Change::Pairs);
        }
        if code.command == MQ_HASH_CONFIG {
            self.hash = Some(Arc::new(Rss::hash_from_bytes(data).map_err(|wrong| code.wrong(wrong))?));
            return Ok(Change::Hash);
        }
        let wanted = u16::from_le_bytes(data.try_into().map_err(|_| code.length())?);
        if wanted == 0 || wanted > *there {
            return Err(code.value(wanted.into()));
        }
        *used = wanted;
        self.rss = None;
        Ok(Change::Pairs)
    }

    fn moderate(&mut self, code: Code, data: &[u8], queues: &impl Queues) -> Result<Change, Refused> {
        let queue = |&[low, high, _, _]: &[u8; 4]| {
            let index = u16::from_le_bytes([low, high]);
            if queues.runs(index) { Ok(index) } else { Err(Refused::Queue { index }) }
        };
        let limits = |data: &[u8]| {
            let limits = Interrupts::from_bytes(data.try_into().map_err(|_| code.length())?);
            let fits = limits.micros <= Interrupts::LONGEST;
            if fits { Ok(limits) } else { Err(code.value(limits.micros.into())) }
        };
        match code.command {
            NOTF_COAL_VQ_GET => {
                let index = queue(data.try_into().map_err(|_| code.length())?)?;
                return Ok(Change::Reply(self.interrupts(index).unwrap_or_default().bytes()));
            }
            NOTF_COAL_VQ_SET => {
                let (index, data) = data.split_first_chunk().ok_or(code.length())?;
                let limits = limits(data)?;
                self.interrupts.queues.insert(queue(index)?, limits);
            }
            command => self.interrupts.set_all(command == NOTF_COAL_TX_SET, limits(data)?),
        }
        Ok(Change::Interrupts)
    }

    /// Returns statistics of several queues. One that is wrong fails all (5.1.6.5.10).
    fn statistics(&self, code: Code, data: &[u8], queues: &impl Queues) -> Result<Change, Refused> {
        let (entries, rest) = data.as_chunks::<{ statistics::ENTRY }>();
        if !rest.is_empty() {
            return Err(code.length());
        }
        let ([commands, ok], control) = (self.counted, self.control_queue());
        let mut reply = Vec::new();
        for &[low, high, _, _, _, _, _, _, ref wanted @ ..] in entries {
            let (queue, wanted) = (u16::from_le_bytes([low, high]), u64::from_le_bytes(*wanted));
            if queue > control {
                return Err(Refused::NoQueue { index: queue });
            }
            let there = StatisticTypes::available(self.acked) & StatisticTypes::of_queue(queue, control);
            if wanted & !there.bits() != 0 {
                return Err(code.value(wanted));
            }
            for types in StatisticTypes::from_bits_truncate(wanted).iter() {
                match types {
                    StatisticTypes::CVQ => Statistics::of_control(queue, commands, ok),
                    _ => Statistics::of(types, queue, &queues.counted(queue)),
                }
                .write(&mut reply);
            }
        }
        Ok(Change::Statistics(reply))
    }

    /// Returns the index of the control queue (5.1.2).
    fn control_queue(&self) -> u16 {
        let [there, _] = self.pairs;
        if self.acked & (bits::NET_F_MQ | bits::NET_F_RSS) == 0 { 2 } else { 2 * there }
    }

    fn receive_mode(&mut self, code: Code, data: &[u8]) -> Result<Change, Refused> {
        let on = match data {
            [0] => false,
            [1] => true,
            &[value] => return Err(code.value(value.into())),
            _ => return Err(code.length()),
        };
        let filter = Arc::make_mut(&mut self.filter);
        let mode = match code.command {
            RX_PROMISC => &mut filter.promiscuous,
            RX_ALLMULTI => &mut filter.all_multicast,
            RX_ALLUNI => &mut filter.all_unicast,
            RX_NOMULTI => &mut filter.no_multicast,
            RX_NOUNI => &mut filter.no_unicast,
            _ => &mut filter.no_broadcast,
        };
        *mode = on;
        Ok(Change::Filter)
    }
}

/// A command's name, and its length for errors.
#[derive(Clone, Copy)]
struct Code {
    class: u8,
    command: u8,
    len: usize,
}

impl Code {
    /// Returns the feature bit that the command requires; 0 if there is no such command.
    fn feature(self) -> u64 {
        match (self.class, self.command) {
            (RX, RX_PROMISC | RX_ALLMULTI) => bits::NET_F_CTRL_RX,
            (RX, RX_ALLUNI | RX_NOMULTI | RX_NOUNI | RX_NOBCAST) => bits::NET_F_CTRL_RX_EXTRA,
            (MAC, MAC_TABLE_SET) => bits::NET_F_CTRL_RX,
            (MAC, MAC_ADDR_SET) => bits::NET_F_CTRL_MAC_ADDR,
            (VLAN, VLAN_ADD | VLAN_DEL) => bits::NET_F_CTRL_VLAN,
            (ANNOUNCE, ANNOUNCE_ACK) => bits::NET_F_GUEST_ANNOUNCE,
            (MQ, MQ_VQ_PAIRS_SET) => bits::NET_F_MQ,
            (MQ, MQ_RSS_CONFIG) => bits::NET_F_RSS,
            (MQ, MQ_HASH_CONFIG) => bits::NET_F_HASH_REPORT,
            (GUEST_OFFLOADS, GUEST_OFFLOADS_SET) => bits::NET_F_CTRL_GUEST_OFFLOADS,
            (NOTF_COAL, NOTF_COAL_TX_SET | NOTF_COAL_RX_SET) => bits::NET_F_NOTF_COAL,
            (NOTF_COAL, NOTF_COAL_VQ_SET | NOTF_COAL_VQ_GET) => bits::NET_F_VQ_NOTF_COAL,
            (STATS, STATS_QUERY | STATS_GET) => bits::NET_F_DEVICE_STATS,
            _ => 0,
        }
    }

    fn length(self) -> Refused {
        Refused::Length { len: self.len }
    }

    fn wrong(self, wrong: Wrong) -> Refused {
        match wrong {
            Wrong::Length => self.length(),
            Wrong::Value(value) => self.value(value.into()),
        }
    }

    fn value(self, value: u64) -> Refused {
        Refused::Value { class: self.class, command: self.command, value }
    }
}

/// Reads a table of addresses behind their number; also returns what follows it.
fn table(data: &[u8]) -> Option<(impl ExactSizeIterator<Item = MacAddr>, &[u8])> {
    let (count, data) = data.split_first_chunk::<4>()?;
    let len = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(6)?;
    let (entries, rest) = data.split_at_checked(len)?;
    Some((entries.as_chunks::<6>().0.iter().map(|&entry| MacAddr(entry)), rest))
}

#[cfg(test)]
mod tests;
