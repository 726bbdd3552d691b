//! Driver end of virtio-net: fixed buffers, each used for one direction and one queue for ever. Called by `host`, which
//! connects it to a vhost-user device, and by whoever sends and receives with it.

use crate::features::bits;
use ringroad_mem::{Error as MemoryError, Hit, Pieces, Region, Span, Table};
use ringroad_ring::{Addresses, BURST, Buffer, DriverFault, DriverRing, Features as RingFeatures, SetupError, Used};
use ringroad_wire::vnet_hdr;
use std::{fs::File, sync::Arc};

/// How a driver is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// The feature bits that device and driver have in common.
    pub acked: u64,
    /// Pairs of a receive and a transmit queue.
    pub queue_pairs: u16,
    /// Entries of each queue.
    pub queue_size: u32,
    /// The largest frame, in bytes, that one buffer should hold.
    pub frame: usize,
    /// Hugepages, where there are any.
    pub huge: bool,
}

/// Why a driver cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A ring that is not possible.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

/// How many buffers before its turn one is fetched. Measured: 8 is 8 % slower where lines take long, 16 and 24 are no better.
const LOOK_AHEAD: usize = 12;

/// Guest address of the driver's memory: any but 0, so that a forgotten address is noticed.
const GUEST: u64 = 0x1_0000_0000;

/// A driver's memory and queues.
pub struct Driver {
    /// All of its memory: rings and buffers.
    pub region: Arc<Region>,
    /// The file that it is in, for the device to map.
    pub file: File,
    /// Receive queues; vring 0, 2, 4, …
    pub rx: Vec<DriverRx>,
    /// Transmit queues; vring 1, 3, 5, …
    pub tx: Vec<DriverTx>,
}

impl Driver {
    /// Lays out memory, rings and buffers. The receive queues are filled when they are first published.
    pub fn new(config: DriverConfig) -> Result<Driver, DriverError> {
        let features = RingFeatures::negotiated(config.acked);
        let packed = features.packed;
        let size = config.queue_size;
        if size == 0 || size > ringroad_ring::MAX_SIZE || !packed && !size.is_power_of_two() {
            return Err(SetupError::Size { size, packed }.into());
        }
        let ring = DriverRing::bytes(features, size);
        // An odd number of cache lines: else the first lines of all buffers would compete for the same few cache sets.
        let stride = ((vnet_hdr::SIZE + config.frame).div_ceil(64) | 1) * 64;
        let queue = (ring + size as usize * stride).next_multiple_of(4096);
        let (region, file) = Region::create(2 * queue * config.queue_pairs as usize, GUEST, config.huge)?;
        let memory = Arc::new(Table::default().with(region.clone())?);
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        for index in 0..2 * config.queue_pairs {
            let offset = queue * index as usize;
            let (driver, addresses) = DriverRing::start(&region, offset, features, size)?;
            let queue = Queue {
                ring: driver,
                addresses,
                buffers: Buffers::new(&memory, GUEST + (offset + ring) as u64, stride, size)
                    .ok_or(SetupError::Size { size, packed })?,
                used: [Used::default(); BURST],
            };
            if index % 2 == 0 {
                let mergeable = config.acked & bits::NET_F_MRG_RXBUF != 0;
                rx.push(DriverRx { queue, mergeable, size: size as usize, pieces: Vec::with_capacity(size as usize) });
            } else {
                tx.push(DriverTx { queue, under_way: 0, size: size as usize });
            }
        }
        Ok(Driver { region, file, rx, tx })
    }
}

/// One buffer for each id, in the driver's memory.
struct Buffers {
    spans: Pieces,
    addresses: Box<[u64]>,
    stride: usize,
}

impl Buffers {
    /// Neighbours do not lie in a row: a device's core would recognise that and fetch the next ones, which the driver is just
    /// about to write to. But a burst's share few pages, as each page costs both cores a look into the page tables: by eights,
    /// mixed among themselves.
    fn new(memory: &Arc<Table>, first: u64, stride: usize, size: u32) -> Option<Buffers> {
        let place = |id: u32| if size.is_multiple_of(8) { id & !7 | id.wrapping_mul(3) & 7 } else { id };
        let addresses: Box<[u64]> = (0..size).map(|id| first + u64::from(place(id)) * stride as u64).collect();
        let (mut spans, mut hit) = (Pieces::new(size as usize), Hit::default());
        spans.start(memory);
        addresses.iter().all(|&address| spans.push(address, stride as u32, &mut hit).is_ok()).then_some(())?;
        Some(Buffers { spans, addresses, stride })
    }

    #[inline(always)]
    fn span(&self, id: u16) -> Option<Span<'_>> {
        self.spans.list().get(id as usize).copied()
    }

    #[inline(always)]
    fn buffer(&self, id: u16, len: usize) -> Buffer {
        let address = self.addresses.get(id as usize).copied().unwrap_or_default();
        Buffer { address, len: len as u32 }
    }
}

struct Queue {
    ring: DriverRing,
    addresses: Addresses,
    buffers: Buffers,
    used: [Used; BURST],
}

macro_rules! queue_calls {
    () => {
        /// Where the ring lies.
        pub fn addresses(&self) -> Addresses {
            self.queue.addresses
        }

        /// Where a device that knows nothing of this queue has to go on, as SET_VRING_BASE carries it. Meaningful while no device
        /// works on it.
        pub fn base(&self) -> u32 {
            self.queue.ring.base()
        }

        /// How many buffers a device that has stopped at this base (GET_VRING_BASE) took and never gave back: 0, if none was lost.
        pub fn missing(&self, base: u32) -> u32 {
            self.queue.ring.missing(base)
        }

        /// Whether the device wants to be notified of what was published since the last call.
        #[inline]
        pub fn wants_notification(&mut self) -> bool {
            self.queue.ring.wants_notification()
        }

        /// Asks the device to notify us of the next buffer that it uses. `true`: there is one already.
        pub fn enable_notification(&mut self) -> bool {
            self.queue.ring.enable_notification()
        }

        /// Asks the device not to notify us.
        pub fn disable_notification(&mut self) {
            self.queue.ring.disable_notification()
        }
    };
}

/// A transmit queue of a driver.
pub struct DriverTx {
    queue: Queue,
    under_way: usize,
    size: usize,
}

impl DriverTx {
    queue_calls!();

    /// Takes back buffers that the device has sent, at most a burst; says how many.
    #[inline]
    pub fn reclaim(&mut self) -> Result<usize, DriverFault> {
        let count = self.queue.ring.reclaim(BURST)?;
        self.under_way -= count;
        Ok(count)
    }

    /// How many frames can be sent now.
    #[inline]
    pub fn free(&self) -> usize {
        self.queue.ring.free()
    }

    /// How many frames the device has not given back yet.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Adds up to `count` frames; says how many there was room for. `fill` gets a buffer's id and the place for the frame
    /// in it, where what was there last still stands, and returns the frame's length. The device sees them at `publish`.
    #[inline]
    pub fn add(&mut self, count: usize, mut fill: impl FnMut(u16, Span<'_>) -> usize) -> usize {
        let Queue { ring, buffers, .. } = &mut self.queue;
        let mut added = 0;
        while added < count {
            // First all buffers, then all descriptors: either way stores to lines that have to come from the device's core
            // stand close together, and so wait together.
            let mut lens = [0u32; BURST];
            let ids = ring.next_ids(0, BURST.min(count - added));
            for (index, (&id, len)) in ids.iter().zip(&mut lens).enumerate() {
                if let Some(span) = ids.get(index + LOOK_AHEAD).and_then(|&id| buffers.span(id)) {
                    span.prefetch_write::<1>();
                }
                let Some(span) = buffers.span(id) else { break };
                *len = (vnet_hdr::SIZE + fill(id, span.skip(vnet_hdr::SIZE))).min(buffers.stride) as u32;
            }
            let mut next = lens.iter();
            let run = ring.add_single(ids.len(), false, |id| {
                buffers.buffer(id, next.next().copied().unwrap_or(vnet_hdr::SIZE as u32) as usize)
            });
            if run == 0 {
                break;
            }
            added += run;
        }
        self.under_way += added;
        added
    }

    /// Fetches what adding the next `count` frames will write to, while there is something else to do. `write`: the frames
    /// themselves will be written, too.
    #[inline]
    pub fn prefetch(&self, count: usize, write: bool) {
        let Queue { ring, buffers, .. } = &self.queue;
        ring.prefetch(count);
        if !write {
            return;
        }
        for span in ring.next_ids(0, count.min(LOOK_AHEAD)).iter().filter_map(|&id| buffers.span(id)) {
            span.prefetch_write::<1>();
        }
    }

    /// Shows the device what was added.
    #[inline]
    pub fn publish(&mut self) {
        self.queue.ring.publish();
    }

    /// Writes to each buffer before any of them is sent.
    pub fn prepare(&mut self, mut fill: impl FnMut(u16, Span<'_>)) {
        let mut id = 0;
        while let Some(span) = self.queue.buffers.span(id).filter(|_| (id as usize) < self.size) {
            fill(id, span.skip(vnet_hdr::SIZE));
            id += 1;
        }
    }
}

/// A receive queue of a driver.
pub struct DriverRx {
    queue: Queue,
    mergeable: bool,
    size: usize,
    /// Ids and lengths of the buffers of a frame that is spread over several.
    pieces: Vec<Used>,
}

impl DriverRx {
    queue_calls!();

    /// Makes all free buffers available, but for those of a frame that is not complete.
    #[inline]
    pub fn refill(&mut self) -> usize {
        let Queue { ring, buffers, .. } = &mut self.queue;
        // Free ids come in the order in which they were used, so that those of an incomplete frame are the last.
        let added = ring.add_single(ring.free() - self.pieces.len(), true, |id| buffers.buffer(id, buffers.stride));
        ring.publish();
        added
    }

    /// Receives at most a burst of buffers and makes them available again; says how many buffers that were. `frame` gets
    /// each frame in one piece or, where the device has spread it over several buffers, in several. `read`: it will look at
    /// what is in there.
    #[inline]
    pub fn receive(&mut self, read: bool, mut frame: impl FnMut(&[Span<'_>])) -> Result<usize, DriverFault> {
        let Queue { ring, buffers, used, .. } = &mut self.queue;
        let count = ring.take_used(used)?;
        let (used, spans) = (used.get(..count).unwrap_or_default(), buffers.spans.list());
        // Where frames can be merged, the header of each is looked at in any case.
        let read = read || self.mergeable;
        let prefetch = |index: usize| {
            if read && let Some(span) = used.get(index).and_then(|used| spans.get(used.id as usize)) {
                span.prefetch::<1>();
            }
        };
        (0..LOOK_AHEAD).for_each(prefetch);
        for (index, &used) in used.iter().enumerate() {
            prefetch(index + LOOK_AHEAD);
            let Some(span) = spans.get(used.id as usize) else { continue };
            let span = span.first(used.len as usize);
            if !self.mergeable || self.pieces.is_empty() && num_buffers(span) <= 1 {
                frame(&[span.skip(vnet_hdr::SIZE)]);
            } else {
                merge(&mut self.pieces, used, self.size, spans, &mut frame);
            }
        }
        if count > 0 {
            self.refill();
        }
        Ok(count)
    }
}

/// One more buffer of a frame that is spread over several (5.1.6.4.1). Those of a frame that is not complete stay out until it is:
/// then `frame` gets all of them. `size`: buffers of the ring.
#[inline(never)]
fn merge(pieces: &mut Vec<Used>, used: Used, size: usize, spans: &[Span<'_>], frame: &mut impl FnMut(&[Span<'_>])) {
    pieces.push(used);
    let part = |used: &Used| spans.get(used.id as usize).map(|span| span.first(used.len as usize));
    let Some(first) = pieces.first().and_then(part) else { return };
    // More than the ring has can only be a lie; what has come is all that will.
    if pieces.len() < (num_buffers(first) as usize).min(size) {
        return;
    }
    let rest = pieces.iter().skip(1).filter_map(part);
    let all = std::iter::once(first.skip(vnet_hdr::SIZE)).chain(rest);
    let mut parts = [Span::empty(); BURST];
    match parts.get_mut(..pieces.len()) {
        Some(parts) => {
            parts.iter_mut().zip(all).for_each(|(place, part)| *place = part);
            frame(parts);
        }
        None => frame(&all.collect::<Vec<_>>()),
    }
    pieces.clear();
}

/// The field of a virtio-net header that says how many buffers a frame takes.
#[inline(always)]
fn num_buffers(span: Span<'_>) -> u16 {
    span.array(10).map_or(0, u16::from_le_bytes)
}
