//! What a driver of test traffic does.

use ringroad_ring::BURST;
use ringroad_switch::Gather;
use ringroad_wire::ethernet::{Addresses, MacAddr};
use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

/// What a driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Send, and count the frames that return
    Tx,
    /// Receive only
    Rx,
    /// Send received frames back, with the MAC addresses swapped
    Reflect,
}

/// How much of each frame a driver touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Nothing: measures the rings alone.
    Nothing,
    /// Writes 4 bytes of the payload of each frame sent; does not read what it receives, as testpmd's flowgen.
    Sent,
    /// Writes 4 bytes of the payload of each frame sent, reads 4 bytes of each frame received.
    Word,
    /// Writes and checks every byte.
    All,
}

impl Touch {
    /// Returns whether frames are written before they are sent.
    #[inline(always)]
    pub(crate) fn writes(self) -> bool {
        self != Touch::Nothing
    }

    /// Returns whether received frames are read.
    #[inline(always)]
    pub(crate) fn reads(self) -> bool {
        matches!(self, Touch::Word | Touch::All)
    }
}

/// What to send and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the driver does.
    pub mode: Mode,
    /// Frame sizes in bytes, without FCS, used in turn.
    pub sizes: Vec<usize>,
    /// Number of flows (UDP source ports), used in turn.
    pub flows: u16,
    /// Frames per second; `None`: unlimited.
    pub rate: Option<f64>,
    /// Maximum number of frames in flight, from sending to return; `None`: unlimited.
    pub window: Option<u64>,
    /// How much of each frame is touched.
    pub touch: Touch,
    /// The addresses in the frames; the first ones if there are several.
    pub addresses: Addresses,
    /// Number of destination addresses, which count up from the first one and are used in random order.
    pub destinations: u32,
    /// Number of source addresses, which count up from the first one and are used in turn.
    pub sources: u32,
    /// Sleeps when idle, instead of polling.
    pub event_driven: bool,
    /// Maximum number of frames sent at once: 1 to [`BURST`], and never more than half of the ring.
    pub burst: usize,
    /// How long not to poll after a burst that was not full. A driver that is faster than the device reads each line of the ring
    /// while the device still writes it.
    pub gather: Gather,
    /// If the device disconnects: how long to wait for it to return, then resume. `None`: stop.
    pub reconnect: Option<Duration>,
    /// Stops it early.
    pub stop: Arc<AtomicBool>,
}

impl Default for Settings {
    /// Sends 64-byte frames of one flow at full rate, polling, until its time is over.
    fn default() -> Settings {
        Settings {
            mode: Mode::Tx,
            sizes: vec![64],
            flows: 1,
            rate: None,
            window: None,
            touch: Touch::Word,
            addresses: Addresses { destination: MacAddr::local(2), source: MacAddr::local(1) },
            destinations: 1,
            sources: 1,
            event_driven: false,
            burst: BURST,
            gather: Gather::Auto,
            reconnect: None,
            stop: Arc::default(),
        }
    }
}

impl Settings {
    /// Sends frames of one size at full rate, polling.
    pub fn flood(size: usize) -> Settings {
        Settings { sizes: vec![size], ..Settings::default() }
    }

    /// Returns the size of the frame with this index.
    #[inline(always)]
    pub(crate) fn size(&self, index: u64) -> usize {
        match self.sizes[..] {
            [size] => size,
            _ => self.sizes.get(index as usize % self.sizes.len().max(1)).copied().unwrap_or(0),
        }
    }

    /// Returns the size of all frames, if they have only one.
    #[inline(always)]
    pub(crate) fn single_size(&self) -> Option<usize> {
        match self.sizes[..] {
            [size] => Some(size),
            _ => None,
        }
    }

    /// Returns the addresses of the frame with this sequence number.
    #[inline(always)]
    pub(crate) fn addresses(&self, sequence: u64) -> Addresses {
        Addresses { destination: self.destination(sequence), source: self.source(sequence) }
    }

    /// Returns the destination address of the frame with this sequence number. Only its lower four bytes differ.
    #[inline(always)]
    pub(crate) fn destination(&self, sequence: u64) -> MacAddr {
        // A multiplicative hash: each address comes equally often, in an order that no switch can predict.
        let hash = sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let random = (hash * u64::from(self.destinations)) >> 32;
        self.addresses.destination.plus(random as u32)
    }

    /// Returns the source address of the frame with this sequence number. Only its lower four bytes differ.
    #[inline(always)]
    pub(crate) fn source(&self, sequence: u64) -> MacAddr {
        // Without a division, which takes longer than all the rest, if there is only one.
        let in_turn = if self.sources > 1 { sequence % u64::from(self.sources) } else { 0 };
        self.addresses.source.plus(in_turn as u32)
    }

    /// Returns whether frames have different addresses.
    #[inline(always)]
    pub(crate) fn has_many_addresses(&self) -> bool {
        self.destinations > 1 || self.sources > 1
    }

    /// Returns the largest size.
    pub fn longest(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(64)
    }
}
