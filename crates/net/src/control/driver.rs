//! Driver end of the control queue: one command at a time. Created by `driver.rs` with the other queues.

use super::{Command, Interrupts, MAX_COMMAND, StatisticTypes, Statistics};
use ringroad_mem::Region;
use ringroad_ring::{Addresses, Buffer, DriverFault, DriverRing, Features, SetupError};
use std::sync::Arc;

/// Entries of the ring: there is never more than one command in flight, in two descriptors.
const SIZE: u32 = 4;
/// The longest reply, with the acknowledgement: statistics of about thirty queues.
const REPLY: usize = 4096;

/// A control queue.
#[derive(Debug)]
pub struct DriverControl {
    ring: DriverRing,
    addresses: Addresses,
    region: Arc<Region>,
    /// Offset in the region of the command's bytes, which the acknowledgement and the rest of the reply follow.
    buffer: usize,
    /// Room for the reply to the last command, with the acknowledgement.
    room: usize,
    in_flight: bool,
}

impl DriverControl {
    /// Bytes of memory that it takes.
    pub(crate) fn bytes(features: Features) -> usize {
        (DriverRing::bytes(features, SIZE) + MAX_COMMAND + REPLY).next_multiple_of(4096)
    }

    /// Lays it out at an offset in the driver's memory.
    pub(crate) fn new(region: &Arc<Region>, offset: usize, features: Features) -> Result<DriverControl, SetupError> {
        let (ring, addresses) = DriverRing::start(region, offset, features, SIZE)?;
        let buffer = offset + DriverRing::bytes(features, SIZE);
        Ok(DriverControl { ring, addresses, region: region.clone(), buffer, room: 0, in_flight: false })
    }

    /// Returns the number of entries of its ring.
    pub fn size(&self) -> u32 {
        SIZE
    }

    /// Returns the addresses of the ring's areas.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns where a device without state of its own must resume, in the format of SET_VRING_BASE.
    pub fn base(&self) -> u32 {
        self.ring.base()
    }

    /// Makes a command available to the device, which is to be notified. Returns `false` if one is in flight, or if it is longer
    /// than [`MAX_COMMAND`] or its reply than 4096 bytes.
    pub fn send(&mut self, command: &Command<'_>) -> bool {
        let bytes = command.bytes();
        let place = |offset: usize, len: usize| {
            let span = self.region.span(offset, len)?;
            Some((span, Buffer { address: self.region.guest() + offset as u64, len: len as u32 }))
        };
        let (Some((readable, sent)), Some((writable, ack))) =
            (place(self.buffer, bytes.len()), place(self.buffer + MAX_COMMAND, command.reply_len()))
        else {
            return false;
        };
        if self.in_flight || bytes.len() > MAX_COMMAND || command.reply_len() > REPLY {
            return false;
        }
        readable.write(&bytes);
        // What the device does not write is not a reply to an earlier command.
        self.room = command.reply_len();
        writable.write(&vec![0; self.room]);
        writable.write(&[super::ERR]);
        self.in_flight = self.ring.add(&[sent], &[ack]).is_ok();
        self.ring.publish();
        self.in_flight
    }

    /// Returns the acknowledgement of the command in flight, [`OK`](super::OK) or [`ERR`](super::ERR); `None` if there is none yet.
    ///
    /// # Errors
    /// The device's [`DriverFault`].
    pub fn reply(&mut self) -> Result<Option<u8>, DriverFault> {
        if self.ring.reclaim(1)? == 0 {
            return Ok(None);
        }
        self.in_flight = false;
        let ack = self.region.span(self.buffer + MAX_COMMAND, 1).and_then(|span| span.array::<1>(0));
        Ok(ack.map(|[ack]| ack))
    }

    /// Returns what followed the acknowledgement of a [`Command::AskInterrupts`] that was carried out.
    pub fn interrupts(&self) -> Option<Interrupts> {
        self.result().first_chunk().copied().map(Interrupts::from_bytes)
    }

    /// Returns what followed the acknowledgement of a [`Command::AskStatisticTypes`] that was carried out, as far as it is known here.
    pub fn statistic_types(&self) -> Option<StatisticTypes> {
        let types = self.result().first_chunk().copied().map(u64::from_le_bytes);
        types.map(StatisticTypes::from_bits_truncate)
    }

    /// Returns what followed the acknowledgement of a [`Command::AskStatistics`] that was carried out, up to what is not valid.
    pub fn statistics(&self) -> Vec<Statistics> {
        Statistics::read(&self.result())
    }

    /// Returns the room behind the acknowledgement, as the device has filled it.
    fn result(&self) -> Vec<u8> {
        let mut result = vec![0; self.room.saturating_sub(1)];
        if let Some(span) = self.region.span(self.buffer + MAX_COMMAND + 1, result.len()) {
            span.read(&mut result);
        }
        result
    }
}
