//! Receive-side scaling (virtio 1.3, 5.1.6.5.7): the driver says by a Toeplitz hash which receive queue a frame goes to. Set through
//! `control.rs`, applied by the port in `host`. The same hash is reported with received frames (5.1.6.4.4), by `device/rx.rs`.

use bitflags::bitflags;
use ringroad_frame::Flow;
use ringroad_wire::{
    ip::{Version, protocol},
    vnet_hdr,
};

/// Maximum length of a key in bytes: as much as two IPv6 addresses and two ports need.
pub const KEY: usize = 40;
/// Bytes in front of the key's length that mean nothing if hashes are reported only.
const RESERVED: usize = 8;
/// Maximum number of entries of an indirection table.
pub const TABLE: usize = 128;

bitflags! {
    /// What is hashed of which packets (5.1.6.4.3). IPv6 extension headers are skipped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HashTypes: u32 {
        /// Addresses of IPv4.
        const IPV4 = 1;
        /// Addresses and ports of TCP over IPv4.
        const TCPV4 = 1 << 1;
        /// Addresses and ports of UDP over IPv4.
        const UDPV4 = 1 << 2;
        /// Addresses of IPv6.
        const IPV6 = 1 << 3;
        /// Addresses and ports of TCP over IPv6.
        const TCPV6 = 1 << 4;
        /// Addresses and ports of UDP over IPv6.
        const UDPV6 = 1 << 5;
    }
}

/// The hash of a frame, as its header reports it (5.1.6.4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashReport {
    /// The hash.
    pub value: u32,
    /// What was hashed: one type, or none.
    pub types: HashTypes,
}

impl HashReport {
    /// Nothing was hashed.
    pub const NONE: HashReport = HashReport { value: 0, types: HashTypes::empty() };

    /// Bytes in a header.
    pub const LEN: usize = vnet_hdr::HASHED - vnet_hdr::SIZE;

    /// Returns it as in a header: `hash_value`, `hash_report`, padding.
    pub fn bytes(self) -> [u8; Self::LEN] {
        // VIRTIO_NET_HASH_REPORT is 0 for none, 1 for the first type.
        let kind = if self.types.is_empty() { 0 } else { 1 + self.types.bits().trailing_zeros() };
        (u64::from(kind) << 32 | u64::from(self.value)).to_le_bytes()
    }

    /// Returns what these bytes of a header say.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> HashReport {
        let both = u64::from_le_bytes(bytes);
        let kind = u32::from((both >> 32) as u16);
        let types = kind.checked_sub(1).and_then(|bit| 1u32.checked_shl(bit)).and_then(HashTypes::from_bits);
        types.map_or(HashReport::NONE, |types| HashReport { value: both as u32, types })
    }
}

/// What the driver has set (struct virtio_net_rss_config).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rss {
    /// What is hashed.
    pub types: HashTypes,
    /// The receive queue of frames that are not hashed.
    pub unclassified: u16,
    /// Receive queues by the lower bits of the hash: a power of two of them, at most [`TABLE`].
    pub table: Vec<u16>,
    /// How many transmit queues the driver uses.
    pub transmit: u16,
    /// The key, at most [`KEY`] bytes. What is missing counts as zeros.
    pub key: Vec<u8>,
}

/// What is wrong with a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// It is shorter or longer than its contents say.
    Length,
    /// This value is not allowed.
    Value(u32),
}

impl Rss {
    /// Reads what a driver has sent, for a device with this many pairs of queues.
    pub(crate) fn from_bytes(bytes: &[u8], pairs: u16) -> Result<Rss, Wrong> {
        let (types, rest) = bytes.split_first_chunk().ok_or(Wrong::Length)?;
        let (mask, rest) = word(rest)?;
        let (unclassified, rest) = word(rest)?;
        let types = u32::from_le_bytes(*types);
        let types = HashTypes::from_bits(types).ok_or(Wrong::Value(types))?;
        let entries = usize::from(mask) + 1;
        if entries > TABLE || !entries.is_power_of_two() {
            return Err(Wrong::Value(mask.into()));
        }
        let (table, rest) = rest.split_at_checked(2 * entries).ok_or(Wrong::Length)?;
        let table: Vec<u16> = table.as_chunks().0.iter().map(|&entry| u16::from_le_bytes(entry)).collect();
        let (transmit, rest) = word(rest)?;
        let (&len, key) = rest.split_first().ok_or(Wrong::Length)?;
        if usize::from(len) > KEY {
            return Err(Wrong::Value(len.into()));
        }
        // Linux sends one byte more, as it takes the key's place in its structure for the structure's size.
        let key = key.get(..len.into()).ok_or(Wrong::Length)?;
        // The reserved bit of a queue's number counts as part of it.
        if let Some(&wrong) = table.iter().chain([&unclassified]).find(|&&queue| queue >= pairs) {
            return Err(Wrong::Value(wrong.into()));
        }
        if transmit == 0 || transmit > pairs {
            return Err(Wrong::Value(transmit.into()));
        }
        Ok(Rss { types, unclassified, table, transmit, key: key.to_vec() })
    }

    /// Reads what a driver has sent to have hashes reported only (struct virtio_net_hash_config): all frames go to the first queue.
    pub(crate) fn hash_from_bytes(bytes: &[u8]) -> Result<Rss, Wrong> {
        let (types, rest) = bytes.split_first_chunk().ok_or(Wrong::Length)?;
        let (_reserved, rest) = rest.split_first_chunk::<RESERVED>().ok_or(Wrong::Length)?;
        let types = u32::from_le_bytes(*types);
        let types = HashTypes::from_bits(types).ok_or(Wrong::Value(types))?;
        let (&len, key) = rest.split_first().ok_or(Wrong::Length)?;
        if usize::from(len) > KEY {
            return Err(Wrong::Value(len.into()));
        }
        // Linux sends one byte more here, too.
        let key = key.get(..len.into()).ok_or(Wrong::Length)?;
        Ok(Rss { types, unclassified: 0, table: vec![0], transmit: 1, key: key.to_vec() })
    }

    /// Returns its types and key as a driver sends them to have hashes reported only.
    pub fn hash_bytes(&self) -> Vec<u8> {
        [&self.types.bits().to_le_bytes()[..], &[0; RESERVED], &[self.key.len() as u8], &self.key].concat()
    }

    /// Returns it as a driver sends it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.types.bits().to_le_bytes().to_vec();
        let mask = self.table.len().wrapping_sub(1) as u16;
        let words = [mask, self.unclassified].into_iter().chain(self.table.iter().copied()).chain([self.transmit]);
        words.for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.push(self.key.len() as u8);
        bytes.extend(&self.key);
        bytes
    }

    /// Returns how many receive queues are in use, from the first one on.
    pub fn pairs(&self) -> u16 {
        self.table.iter().fold(self.unclassified, |most, &queue| most.max(queue)) + 1
    }

    /// Returns the hash of a flow, `None` if it is of no type that is hashed.
    pub fn hash(&self, flow: &Flow) -> Option<u32> {
        let HashReport { value, types } = self.report(flow);
        (!types.is_empty()).then_some(value)
    }

    /// Returns the hash of a flow, and of which type it is.
    pub fn report(&self, flow: &Flow) -> HashReport {
        let [ip, tcp, udp] = match flow.version {
            Version::V4 => [HashTypes::IPV4, HashTypes::TCPV4, HashTypes::UDPV4],
            Version::V6 => [HashTypes::IPV6, HashTypes::TCPV6, HashTypes::UDPV6],
        };
        let with_ports = match flow.protocol {
            protocol::TCP => self.types & tcp,
            protocol::UDP => self.types & udp,
            _ => HashTypes::empty(),
        };
        let (value, types) = match flow.ports.filter(|_| !with_ports.is_empty()) {
            Some(ports) => (toeplitz(&self.key, flow.addresses().iter().chain(&ports)), with_ports),
            None if self.types.contains(ip) => (toeplitz(&self.key, flow.addresses().iter()), ip),
            None => return HashReport::NONE,
        };
        HashReport { value, types }
    }

    /// Returns the receive queue of a frame of this flow, `None`: of no flow.
    pub fn queue(&self, flow: Option<&Flow>) -> u16 {
        let hash = flow.and_then(|flow| self.hash(flow));
        let entry = hash.and_then(|hash| self.table.get(hash as usize & self.table.len().wrapping_sub(1)));
        entry.copied().unwrap_or(self.unclassified)
    }
}

fn word(bytes: &[u8]) -> Result<(u16, &[u8]), Wrong> {
    let (word, rest) = bytes.split_first_chunk().ok_or(Wrong::Length)?;
    Ok((u16::from_le_bytes(*word), rest))
}

/// The sum, without carry, of the 32 bits of the key from each position on at which the input has a one.
fn toeplitz<'a>(key: &[u8], input: impl Iterator<Item = &'a u8>) -> u32 {
    let mut later = key.iter().copied().chain(std::iter::repeat(0));
    // The 32 bits at the current position, and the 8 behind them.
    let mut window = later.by_ref().take(5).fold(0u64, |window, byte| window << 8 | u64::from(byte));
    let mut hash = 0;
    for &byte in input {
        for bit in 0..8 {
            let one = byte >> (7 - bit) & 1;
            hash ^= (window >> (8 - bit)) as u32 & 0u32.wrapping_sub(one.into());
        }
        window = window << 8 | u64::from(later.next().unwrap_or_default());
    }
    hash
}

#[cfg(test)]
mod tests;
