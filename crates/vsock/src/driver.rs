//! The driver end of virtio-vsock (virtio 1.3, 5.10): allocates the memory and lays out the three virtqueues and their buffers in
//! it. Used by a [`crate::Stack`], and by `host`, which connects it to a vhost-user device.

use crate::{
    payload::Payload,
    send::Link,
    side::{Inlet, NoRelay, Side, Taken},
    types::{Broken, MAX_PACKET},
};
use ringroad_mem::{Error as MemoryError, Region, Span};
use ringroad_ring::{Addresses, Buffer, DriverRing, Features, SetupError, Used};
use ringroad_wire::vsock_hdr::{self as wire, VsockHdr};
use std::{fs::File, io, num::NonZeroUsize, sync::Arc};

/// The driver end of a device.
#[derive(Debug)]
pub struct DriverSide;

impl Side for DriverSide {
    type Link = DriverTx;
    type Inlet = DriverRx;
    type Relay = NoRelay;
}

/// Configuration of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// The negotiated feature bits.
    pub acked: u64,
    /// Number of entries in the receive and transmit queues.
    pub queue_size: u32,
    /// Payload bytes that each receive buffer holds.
    pub receive: usize,
}

impl Default for DriverConfig {
    /// No optional feature, queues with 256 entries, receive buffers of 4 KiB.
    fn default() -> DriverConfig {
        DriverConfig { acked: crate::Features::REQUIRED.bits(), queue_size: 256, receive: 4096 }
    }
}

/// Why a driver cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// Allocating the memory failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The ring layout is invalid.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

/// Guest address of the driver's memory. Not 0, so that an address left uninitialized is noticed.
const GUEST: u64 = 0x1_0000_0000;
/// Size in bytes of a small transmit buffer: header and payload.
const SMALL: usize = 4096;
/// Number of large transmit buffers, for packets that do not fit into a small one. Few enough to stay in the caches.
const LARGE: usize = 16;
/// Used chains reclaimed in one go.
const BURST: usize = 32;
/// Number of buffers in the event queue.
const EVENTS: u32 = 4;

/// A driver's memory and its queues: receive, transmit, event.
#[derive(Debug)]
pub struct Driver {
    /// The whole of its memory: rings and buffers.
    pub region: Arc<Region>,
    /// The file that backs the memory, for the device to map.
    pub file: File,
    /// Vring 0, with all its buffers available.
    pub rx: DriverRx,
    /// Vring 1.
    pub tx: DriverTx,
    /// Vring 2, with all its buffers available.
    pub events: DriverEvents,
}

/// A queue's ring and the memory of its buffers.
struct Queue {
    ring: DriverRing,
    at: Addresses,
    region: Arc<Region>,
    offset: usize,
    used: [Used; BURST],
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Queue").field("ring", &self.ring).field("addresses", &self.at).finish_non_exhaustive()
    }
}

impl Queue {
    fn new(region: &Arc<Region>, offset: usize, size: u32, acked: u64) -> Result<Queue, SetupError> {
        let (ring, at) = DriverRing::start(region, offset, Features::negotiated(acked), size)?;
        let offset = offset + ring_bytes(size, acked);
        Ok(Queue { ring, at, region: region.clone(), offset, used: [Used::default(); BURST] })
    }

    /// A range of the queue's buffer memory.
    fn span(&self, offset: usize, len: usize) -> Span<'_> {
        self.region.span(self.offset + offset, len).unwrap_or(Span::empty())
    }

    fn buffer(&self, offset: usize, len: usize) -> Buffer {
        Buffer { address: GUEST + (self.offset + offset) as u64, len: len as u32 }
    }
}

fn ring_bytes(size: u32, acked: u64) -> usize {
    DriverRing::bytes(Features::negotiated(acked), size).next_multiple_of(4096)
}

/// Distance between buffers in bytes: an odd number of cache lines, so that the first lines of all buffers do not compete for the
/// same few cache sets.
fn stride(len: usize) -> usize {
    (len.div_ceil(64) | 1) * 64
}

impl Driver {
    /// Allocates the memory, lays out rings and buffers, and makes all receive and event buffers available.
    ///
    /// # Errors
    /// [`DriverError`] if the queue size is invalid or the memory cannot be allocated.
    pub fn new(config: DriverConfig) -> Result<Driver, DriverError> {
        let DriverConfig { acked, queue_size: size, receive } = config;
        let packed = Features::negotiated(acked).packed;
        if size == 0 || size > ringroad_ring::MAX_SIZE || !packed && !size.is_power_of_two() {
            return Err(SetupError::Size { size, packed }.into());
        }
        let rx_stride = stride(wire::SIZE + receive);
        let large_stride = stride(wire::SIZE + MAX_PACKET);
        let ring = ring_bytes(size, acked);
        let tx_offset = (ring + size as usize * rx_stride).next_multiple_of(4096);
        let event_offset = (tx_offset + ring + size as usize * SMALL + LARGE * large_stride).next_multiple_of(4096);
        let len = event_offset + ring_bytes(EVENTS, acked) + 4096;
        let (region, file) = Region::create(len, GUEST, false)?;
        let rx = Queue::new(&region, 0, size, acked)?;
        let tx = Queue::new(&region, tx_offset, size, acked)?;
        let events = Queue::new(&region, event_offset, EVENTS, acked)?;
        let mut rx = DriverRx { queue: rx, stride: rx_stride, len: wire::SIZE + receive };
        rx.post(size as usize);
        let small = (0..size).map(|index| index as usize * SMALL).collect();
        let large = (0..LARGE).map(|index| size as usize * SMALL + index * large_stride).collect();
        let reserve = (size as usize / 16).min(8);
        let (held, first_large) = (vec![0; size as usize], size as usize * SMALL);
        let mut tx = DriverTx { queue: tx, small, large, held, first_large, reserve, awaiting: false };
        tx.queue.ring.disable_notification();
        let mut events = DriverEvents { queue: events };
        events.post(EVENTS as usize);
        Ok(Driver { region, file, rx, tx, events })
    }
}

macro_rules! addresses {
    () => {
        /// Returns the addresses of the ring.
        pub fn addresses(&self) -> Addresses {
            self.queue.at
        }

        /// Returns the ring position at which a device with no state of its own has to continue, as SET_VRING_BASE carries it.
        pub fn base(&self) -> u32 {
            self.queue.ring.base()
        }
    };
}

/// A driver's receive queue.
#[derive(Debug)]
pub struct DriverRx {
    queue: Queue,
    stride: usize,
    len: usize,
}

impl DriverRx {
    addresses!();

    /// Makes `count` buffers available.
    fn post(&mut self, count: usize) {
        let Queue { ring, offset, .. } = &mut self.queue;
        let (stride, len) = (self.stride, self.len as u32);
        let first = GUEST + *offset as u64;
        ring.add_single(count, true, |id| Buffer { address: first + u64::from(id) * stride as u64, len });
        ring.publish();
    }
}

impl Inlet for DriverRx {
    fn take(&mut self, mut each: impl FnMut(VsockHdr, Payload<'_>)) -> Result<Taken, Broken> {
        let mut used = self.queue.used;
        let count = self.queue.ring.take_used(&mut used)?;
        let mut bytes = 0usize;
        for used in used.iter().take(count) {
            let buffer = [self.queue.span((used.id as usize).saturating_mul(self.stride), used.len as usize)];
            let mut payload = Payload::spans(&buffer);
            // A packet without a complete header is dropped: it has no sender to answer.
            if let Some(header) = payload.read_once::<{ wire::SIZE }>() {
                bytes = bytes.saturating_add(payload.len());
                each(VsockHdr::from_bytes(&header), payload);
            }
        }
        if count > 0 {
            self.post(count);
        }
        Ok(Taken { packets: count, bytes })
    }

    fn wants_notification(&mut self) -> bool {
        self.queue.ring.wants_notification()
    }

    fn enable_notification(&mut self) -> bool {
        self.queue.ring.enable_notification()
    }

    fn disable_notification(&mut self) {
        self.queue.ring.disable_notification();
    }
}

/// A driver's transmit queue.
pub struct DriverTx {
    queue: Queue,
    /// Offsets of the free buffers. Used as a stack: the last buffer freed is still in the caches.
    small: Vec<usize>,
    large: Vec<usize>,
    /// Offset of the buffer that each descriptor id carries.
    held: Vec<usize>,
    first_large: usize,
    /// Descriptors that data packets leave free for control packets.
    reserve: usize,
    /// The device was asked to notify when it has used a buffer.
    awaiting: bool,
}

impl std::fmt::Debug for DriverTx {
    /// With the numbers of free buffers.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("DriverTx")
            .field("queue", &self.queue)
            .field("small", &self.small.len())
            .field("large", &self.large.len())
            .finish_non_exhaustive()
    }
}

impl DriverTx {
    addresses!();

    /// Reclaims the buffers that the device has used.
    fn reclaim(&mut self) -> Result<(), Broken> {
        loop {
            let mut used = self.queue.used;
            let count = self.queue.ring.take_used(&mut used)?;
            for used in used.iter().take(count) {
                let Some(&at) = self.held.get(used.id as usize) else { continue };
                if at < self.first_large { &mut self.small } else { &mut self.large }.push(at);
            }
            if count > 0 && std::mem::take(&mut self.awaiting) {
                self.queue.ring.disable_notification();
            }
            if count < BURST {
                return Ok(());
            }
        }
    }

    fn pick(&mut self, payload: usize) -> Option<usize> {
        let small = if payload <= SMALL - wire::SIZE { self.small.pop() } else { None };
        small.or_else(|| self.large.pop()).or_else(|| self.small.pop())
    }

    /// Returns the buffer of the next packet, and the largest payload it holds.
    fn next(&self) -> Option<(usize, usize)> {
        let large = self.large.last().map(|&at| (at, MAX_PACKET));
        large.or_else(|| self.small.last().map(|&at| (at, SMALL - wire::SIZE)))
    }

    fn add(&mut self, at: usize, len: usize) {
        let buffer = self.queue.buffer(at, wire::SIZE + len);
        let held = &mut self.held;
        self.queue.ring.add_single(1, false, |id| {
            if let Some(held) = held.get_mut(id as usize) {
                *held = at;
            }
            buffer
        });
    }
}

impl Link for DriverTx {
    fn room(&mut self, control: bool) -> Result<Option<NonZeroUsize>, Broken> {
        let reserve = if control { 0 } else { self.reserve };
        if self.queue.ring.free() <= reserve || self.large.is_empty() {
            self.reclaim()?;
        }
        if self.queue.ring.free() <= reserve {
            return Ok(None);
        }
        Ok(self.next().and_then(|(_, room)| NonZeroUsize::new(room)))
    }

    fn put(&mut self, header: &VsockHdr, payload: &mut Payload<'_>) {
        let len = header.len as usize;
        let Some(at) = self.pick(len) else { return };
        let target = self.queue.span(at, wire::SIZE + len);
        target.write(&header.to_bytes());
        payload.copy_to(target.skip(wire::SIZE));
        self.add(at, len);
    }

    fn fill(
        &mut self,
        header: VsockHdr,
        stamp: &mut dyn FnMut(&mut VsockHdr),
        most: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> io::Result<usize>,
    ) -> Result<Option<(u64, io::Result<usize>)>, Broken> {
        let Some(room) = self.room(false)? else { return Ok(None) };
        let Some((at, _)) = self.next() else { return Ok(None) };
        let target = self.queue.span(at, wire::SIZE + room.get().min(most));
        let result = read(&[target.skip(wire::SIZE)]);
        let len = *result.as_ref().unwrap_or(&0);
        if len == 0 {
            return Ok(Some((0, result)));
        }
        let mut header = VsockHdr { len: len as u32, ..header };
        stamp(&mut header);
        target.write(&header.to_bytes());
        if at < self.first_large {
            self.small.pop()
        } else {
            self.large.pop()
        };
        self.add(at, len);
        Ok(Some((1, result)))
    }

    fn publish(&mut self) -> bool {
        self.queue.ring.publish();
        self.queue.ring.wants_notification()
    }

    fn await_room(&mut self) -> bool {
        self.awaiting = true;
        self.queue.ring.enable_notification()
    }
}

/// A driver's event queue.
#[derive(Debug)]
pub struct DriverEvents {
    queue: Queue,
}

impl DriverEvents {
    addresses!();

    fn post(&mut self, count: usize) {
        let Queue { ring, offset, .. } = &mut self.queue;
        let first = GUEST + *offset as u64;
        ring.add_single(count, true, |id| Buffer { address: first + u64::from(id) * 64, len: 4 });
        ring.publish();
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u32 {
        EVENTS
    }

    /// Returns whether the device has reported that all connections are closed (VIRTIO_VSOCK_EVENT_TRANSPORT_RESET).
    ///
    /// # Errors
    /// [`Broken`] if the device has returned a buffer that is not in flight, or more of them than are.
    pub fn transport_reset(&mut self) -> Result<bool, Broken> {
        self.look(EVENTS)
    }

    fn look(&mut self, rounds: u32) -> Result<bool, Broken> {
        let mut used = self.queue.used;
        let count = self.queue.ring.take_used(&mut used)?;
        let mut reset = false;
        for used in used.iter().take(count) {
            let event = self.queue.span((used.id as usize).saturating_mul(64), used.len as usize);
            reset |= event.array::<4>(0) == Some([0; 4]);
        }
        if count > 0 {
            self.post(count);
        }
        // Asks to be notified of the next event. Events that arrived in the meantime are handled at most as often as there are
        // buffers: the device must not keep this loop going.
        if !self.queue.ring.enable_notification() || count == 0 || rounds == 0 {
            return Ok(reset);
        }
        Ok(reset | self.look(rounds - 1)?)
    }
}
