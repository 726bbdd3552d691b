//! Driver end, after FreeBSD's "lem": probe, one ring each way, buffers of its own. It can defer its doorbell: while an interrupt
//! for frames that were sent is on its way, the tail is not written for those that follow, since the interrupt's handler will
//! (`mit_enable`). A virtual machine leaves the processor for each access to a register; this saves most of them.
//!
//! Sans-I/O: registers are reached through a [`Bus`], time is an argument.

mod bus;
mod probe;
mod receive;
mod ring;

pub use bus::Bus;
pub use probe::ProbeError;

use crate::{
    descriptor::{
        RING_UNIT, SIZE,
        tx::{DD, EOP, IDE, IFCS, RS},
    },
    registers::{self as reg, cause, ctrl, rctl, tctl},
};
use receive::Receiver;
use ring::{GUEST, Ring};
use ringroad_mem::{Error as MemoryError, Region, Span};
use ringroad_wire::ethernet::{MacAddr, ZLEN};
use std::{fs::File, sync::Arc};

/// Configuration of a driver. The names are those of FreeBSD's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// Number of transmit descriptors, a multiple of 8.
    pub num_tx_desc: u32,
    /// Number of receive descriptors, a multiple of 8.
    pub num_rx_desc: u32,
    /// Least interval between interrupts, in units of 256 ns; 0: none.
    pub itr: u16,
    /// Delay of transmit interrupts since the last frame and since the first one, in units of 1.024 µs; 0: none.
    pub tx_int_delay: u16,
    /// See `tx_int_delay`.
    pub tx_abs_int_delay: u16,
    /// The same for receive interrupts.
    pub rx_int_delay: u16,
    /// See `rx_int_delay`.
    pub rx_abs_int_delay: u16,
    /// Defers writes to the transmit tail while a transmit interrupt is pending.
    pub mit_enable: bool,
    /// Largest number of frames that wait for it.
    pub mit_frames: u32,
    /// Longest time that they wait for it, in nanoseconds.
    pub mit_time: u64,
    /// Use hugepages if there are any.
    pub huge: bool,
}

impl Default for DriverConfig {
    /// FreeBSD's defaults: 8000 interrupts per second, nothing deferred.
    fn default() -> DriverConfig {
        DriverConfig {
            num_tx_desc: 1024,
            num_rx_desc: 1024,
            itr: 488,
            tx_int_delay: 64,
            tx_abs_int_delay: 64,
            rx_int_delay: 0,
            rx_abs_int_delay: 64,
            mit_enable: false,
            mit_frames: 512,
            mit_time: 1_000_000,
            huge: false,
        }
    }
}

/// Why a driver cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A ring of this size is not possible.
    #[error("expected a ring of 8 to 4096 descriptors, a multiple of 8, found {found}")]
    Size {
        /// As configured.
        found: u32,
    },
    /// Allocating the memory failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Causes that interrupt.
const CAUSES: u32 = cause::TXDW | cause::RXT0 | cause::RXDMT0 | cause::RXO | cause::LSC;

/// A driver's memory and rings, and what it knows of its device.
#[derive(Debug)]
pub struct Driver {
    /// The whole of its memory, to be mapped by the device.
    pub region: Arc<Region>,
    /// The file that backs it.
    pub file: File,
    config: DriverConfig,
    mac: MacAddr,
    tx: Ring,
    rx: Receiver,
    /// Next descriptor to be used, first one that the device has not returned, and the tail as the device knows it.
    next: u32,
    clean: u32,
    written: u32,
    /// Frames that the device does not know of.
    waiting: u32,
    /// An interrupt for frames that were sent is on its way.
    pending: bool,
    /// When the oldest waiting frame was published.
    since: Option<u64>,
}

impl Driver {
    /// Allocates the memory. [`Driver::probe`] and [`Driver::start`] follow.
    ///
    /// # Errors
    /// [`DriverError`] if a ring's size is invalid or the memory cannot be allocated.
    pub fn new(config: DriverConfig) -> Result<Driver, DriverError> {
        for found in [config.num_tx_desc, config.num_rx_desc] {
            if !(8..=4096).contains(&found) || !(found * SIZE).is_multiple_of(RING_UNIT) {
                return Err(DriverError::Size { found });
            }
        }
        let tx_bytes = Ring::bytes(config.num_tx_desc);
        let (region, file) = Region::create(tx_bytes + Ring::bytes(config.num_rx_desc), GUEST, config.huge)?;
        let size = |found| DriverError::Size { found };
        let tx = Ring::new(&region, 0, config.num_tx_desc).ok_or(size(config.num_tx_desc))?;
        let rx = Ring::new(&region, tx_bytes, config.num_rx_desc).ok_or(size(config.num_rx_desc))?;
        let rx = Receiver::new(rx);
        let mac = MacAddr([0; 6]);
        let (next, clean, written, waiting) = (0, 0, 0, 0);
        let (pending, since) = (false, None);
        Ok(Driver { region, file, config, mac, tx, rx, next, clean, written, waiting, pending, since })
    }

    /// Returns the station's address, known after the probe.
    pub fn mac(&self) -> MacAddr {
        self.mac
    }

    /// Sets up rings and moderation, and enables transmitter, receiver and interrupts. The device was probed, or reset.
    pub fn start(&mut self, bus: &mut impl Bus) {
        (self.next, self.clean, self.written, self.waiting) = (0, 0, 0, 0);
        (self.pending, self.since) = (false, None);
        self.rx.prepare();
        bus.write(reg::CTRL, ctrl::FD | ctrl::ASDE | ctrl::SLU);
        self.set_address(bus);
        let rings = [(reg::TDBAL, &self.tx), (reg::RDBAL, &self.rx.ring)];
        for (first, ring) in rings {
            bus.write(first, ring.address() as u32);
            bus.write(first + 4, (ring.address() >> 32) as u32);
            bus.write(first + 8, ring.count * SIZE);
            // Head and tail.
            bus.write(first + 16, 0);
            bus.write(first + 24, 0);
        }
        let DriverConfig { itr, tx_int_delay, tx_abs_int_delay, rx_int_delay, rx_abs_int_delay, .. } = self.config;
        let delays = [
            (reg::TIDV, tx_int_delay),
            (reg::TADV, tx_abs_int_delay),
            (reg::RDTR, rx_int_delay),
            (reg::RADV, rx_abs_int_delay),
        ];
        delays.into_iter().for_each(|(register, units)| bus.write(register, units.into()));
        self.set_itr(bus, itr);
        bus.write(reg::TIPG, 8 | 8 << 10 | 6 << 20);
        bus.write(reg::TCTL, tctl::EN | tctl::PSP | 15 << 4 | 64 << 12);
        bus.write(reg::RCTL, rctl::EN | rctl::BAM | rctl::LPE | rctl::SECRC);
        bus.write(reg::RDT, self.rx.ring.count - 1);
        bus.write(reg::IMS, CAUSES);
    }

    fn set_address(&self, bus: &mut impl Bus) {
        let [a, b, c, d, e, f] = self.mac.0;
        bus.write(reg::RA, u32::from_le_bytes([a, b, c, d]));
        bus.write(reg::RA + 4, u32::from_le_bytes([e, f, 0, 0]) | reg::rah::AV);
    }

    /// Stops the device: transmitter, receiver and interrupts.
    pub fn stop(&mut self, bus: &mut impl Bus) {
        bus.write(reg::IMC, u32::MAX);
        bus.write(reg::RCTL, 0);
        bus.write(reg::TCTL, 0);
        bus.write(reg::CTRL, ctrl::RST);
        (self.waiting, self.pending, self.since) = (0, false, None);
    }

    /// Sets the least interval between interrupts, in units of 256 ns; 0: none.
    pub fn set_itr(&mut self, bus: &mut impl Bus, itr: u16) {
        self.config.itr = itr;
        bus.write(reg::ITR, itr.into());
    }

    /// Sets whether the tail is deferred. What waits already is published by the next call of [`Driver::poll`].
    pub fn set_mit_enable(&mut self, on: bool) {
        self.config.mit_enable = on;
    }

    /// Receives every frame, whatever its address, or not.
    pub fn set_promiscuous(&mut self, bus: &mut impl Bus, on: bool) {
        let bits = if on { rctl::UPE | rctl::MPE } else { 0 };
        bus.write(reg::RCTL, rctl::EN | rctl::BAM | rctl::LPE | rctl::SECRC | bits);
    }

    /// Returns whether there is a link.
    pub fn has_link(&self, bus: &mut impl Bus) -> bool {
        bus.read(reg::STATUS) & reg::status::LU != 0
    }

    /// Returns how many frames can be added now. One descriptor always stays free.
    pub fn free(&self) -> u32 {
        let used =
            if self.next >= self.clean { self.next - self.clean } else { self.tx.count - self.clean + self.next };
        self.tx.count - 1 - used
    }

    /// Returns how many frames are in flight, those that wait included.
    pub fn under_way(&self) -> u32 {
        self.tx.count - 1 - self.free()
    }

    /// Adds up to `count` frames; returns how many there was room for. `fill` is called with the space for a frame, which still has
    /// its last contents, and returns the frame's length in bytes. The device learns of them by `publish`.
    pub fn add(&mut self, count: u32, mut fill: impl FnMut(Span<'_>) -> usize) -> u32 {
        let count = count.min(self.free());
        let delay = if self.config.tx_int_delay > 0 { IDE } else { 0 };
        for _ in 0..count {
            let space = self.tx.buffer(self.next);
            let filled = fill(space).min(space.len());
            let len = filled.max(ZLEN);
            space.skip(filled).first(len - filled).write(&[0; ZLEN]);
            let address = GUEST + self.tx.buffer_at(self.next) as u64;
            self.tx.write(self.next, [address, len as u64 | EOP | IFCS | RS | delay]);
            self.next = self.tx.next(self.next);
        }
        self.waiting += count;
        count
    }

    /// Tells the device of the frames that were added, or defers that. `now`: nanoseconds since any fixed point. If it was
    /// deferred, [`Driver::poll`] says until when.
    pub fn publish(&mut self, bus: &mut impl Bus, now: u64) {
        if self.next == self.written {
            return;
        }
        let since = *self.since.get_or_insert(now);
        let defers = self.config.mit_enable
            && self.pending
            && self.waiting < self.config.mit_frames.min(self.tx.count / 2)
            && now.saturating_sub(since) < self.config.mit_time;
        if !defers {
            self.write_tail(bus);
        }
    }

    fn write_tail(&mut self, bus: &mut impl Bus) {
        bus.write(reg::TDT, self.next);
        (self.written, self.waiting, self.since) = (self.next, 0, None);
        // The last frame asks for its status to be reported.
        self.pending = true;
    }

    /// Publishes frames that have waited long enough. To be called when the returned time has come, `None`: nothing waits.
    pub fn poll(&mut self, bus: &mut impl Bus, now: u64) -> Option<u64> {
        self.publish(bus, now);
        self.since.map(|since| since.saturating_add(self.config.mit_time))
    }

    /// Handles an interrupt: reads and returns its causes, 0 if it was not the device's, and publishes what has waited for it. As
    /// FreeBSD's handler, it masks further ones until [`Driver::unmask`].
    pub fn interrupt(&mut self, bus: &mut impl Bus) -> u32 {
        let causes = bus.read(reg::ICR);
        if causes == 0 {
            return 0;
        }
        bus.write(reg::IMC, u32::MAX);
        if causes & (cause::TXDW | cause::TXQE) != 0 {
            self.pending = false;
            if self.next != self.written && self.since.is_some() {
                self.write_tail(bus);
            }
        }
        causes
    }

    /// The work of an interrupt is done: the device may interrupt again.
    pub fn unmask(&mut self, bus: &mut impl Bus) {
        bus.write(reg::IMS, CAUSES);
    }

    /// Takes back the buffers of frames that were sent; returns how many.
    pub fn reclaim(&mut self) -> u32 {
        let mut count = 0;
        while self.clean != self.written && self.tx.status(self.clean) & DD != 0 {
            self.clean = self.tx.next(self.clean);
            count += 1;
        }
        count
    }

    /// Receives frames and makes their buffers available again; returns the number of frames. `frame` is called with each, as one
    /// span or, if it is spread over several buffers, as several.
    pub fn receive(&mut self, bus: &mut impl Bus, frame: impl FnMut(&[Span<'_>])) -> u32 {
        self.rx.receive(bus, frame)
    }
}
