//! Driver end of virtio-net (virtio 1.3, 5.1.6): each queue has fixed buffers of its own. Created by `host`, which connects it to
//! a vhost-user device; used by the traffic tools.

mod buffers;
mod fragments;
mod sized;

pub use sized::{Held, PAGE, SizedConfig, SizedDriver, SizedRx, Sizing};

use crate::{
    control::DriverControl,
    features::{Features, bits},
    offload,
    rss::HashReport,
};
use buffers::Buffers;
use ringroad_frame::{Burst, offload::Support};
use ringroad_mem::{Error as MemoryError, Region, Span, Table};
use ringroad_ring::{Addresses, BURST, DriverFault, DriverRing, Features as RingFeatures, SetupError, Used};
use ringroad_wire::vnet_hdr;
use std::{fs::File, sync::Arc};
use zerocopy::IntoBytes;

/// Configuration of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// The negotiated feature bits.
    pub acked: u64,
    /// Number of pairs of a receive and a transmit queue.
    pub queue_pairs: u16,
    /// Number of entries of each queue.
    pub queue_size: u32,
    /// Length in bytes of the longest frame that one buffer holds.
    pub frame: usize,
    /// Use hugepages if there are any.
    pub huge: bool,
}

impl Default for DriverConfig {
    /// No optional feature, one pair of queues with 256 entries, buffers for Ethernet frames of up to 1518 bytes.
    fn default() -> DriverConfig {
        let acked = Features::REQUIRED.bits();
        DriverConfig { acked, queue_pairs: 1, queue_size: 256, frame: 1518, huge: false }
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

/// How many buffers ahead to prefetch. Measured: 8 is 8 % slower where lines take long to arrive, 16 and 24 are no better.
const LOOK_AHEAD: usize = 12;

/// Guest address of the driver's memory. Not 0, so that an address left uninitialized is noticed.
const GUEST: u64 = 0x1_0000_0000;

/// A driver's memory and queues.
#[derive(Debug)]
pub struct Driver {
    /// The whole of its memory: rings and buffers.
    pub region: Arc<Region>,
    /// The file that backs the memory, for the device to map.
    pub file: File,
    /// Receive queues: vrings 0, 2, 4, …
    pub rx: Vec<DriverRx>,
    /// Transmit queues: vrings 1, 3, 5, …
    pub tx: Vec<DriverTx>,
    /// The control queue, the vring behind those, if it was negotiated.
    pub control: Option<DriverControl>,
}

impl Driver {
    /// Allocates the memory and lays out rings and buffers. [`DriverRx::refill`] makes the receive buffers available.
    ///
    /// # Errors
    /// [`DriverError`] if the queue size is invalid or the memory cannot be allocated.
    pub fn new(config: DriverConfig) -> Result<Driver, DriverError> {
        let features = RingFeatures::negotiated(config.acked);
        let packed = features.packed;
        let size = config.queue_size;
        check_size(size, packed)?;
        let header = offload::header_len(config.acked);
        let lens = [header, config.frame];
        let queue = Queue::bytes(features, size, lens);
        let queues = 2 * queue * config.queue_pairs as usize;
        let controls = config.acked & bits::NET_F_CTRL_VQ != 0;
        let bytes = queues + if controls { DriverControl::bytes(features) } else { 0 };
        let (region, file) = Region::create(bytes, GUEST, config.huge)?;
        let memory = Arc::new(Table::default().with(region.clone())?);
        let (mut rx, mut tx) = (Vec::new(), Vec::new());
        for index in 0..2 * config.queue_pairs {
            let lead = if index % 2 == 0 { 0 } else { header - vnet_hdr::SIZE };
            let queue = Queue::new(&region, &memory, queue * index as usize, features, size, lens, lead)?;
            if index % 2 == 0 {
                let mergeable = config.acked & bits::NET_F_MRG_RXBUF != 0;
                rx.push(DriverRx { queue, mergeable, size: size as usize, pieces: Vec::with_capacity(size as usize) });
            } else {
                tx.push(DriverTx::new(queue, size));
            }
        }
        let control = controls.then(|| DriverControl::new(&region, queues, features)).transpose()?;
        Ok(Driver { region, file, rx, tx, control })
    }
}

struct Queue {
    ring: DriverRing,
    addresses: Addresses,
    buffers: Buffers,
    used: [Used; BURST],
    /// Length in bytes of the header in front of each frame.
    header: usize,
}

impl Queue {
    /// Bytes of memory of a queue with this many buffers for a header and a frame of these lengths: an odd number of half pages. So
    /// buffers with the same index of two successive queues, receive and transmit, lie half a page apart in their pages. A device that
    /// reflects copies from one to the other: with equal low 12 bits of address, each load would be taken to depend on an earlier store.
    fn bytes(features: RingFeatures, size: u32, lens: [usize; 2]) -> usize {
        const PAGE: usize = 4096;
        (DriverRing::bytes(features, size) + size as usize * Self::stride(lens)).next_multiple_of(PAGE) + PAGE / 2
    }

    /// Returns the length of each buffer: an odd number of cache lines, so that the first lines of all buffers do not compete for
    /// the same few cache sets.
    fn stride([header, frame]: [usize; 2]) -> usize {
        ((header + frame).div_ceil(64) | 1) * 64
    }

    /// Lays a queue out at an offset in the driver's memory.
    fn new(
        region: &Arc<Region>,
        memory: &Arc<Table>,
        offset: usize,
        features: RingFeatures,
        size: u32,
        lens: [usize; 2],
        lead: usize,
    ) -> Result<Queue, SetupError> {
        let [header, _] = lens;
        let (ring, addresses) = DriverRing::start(region, offset, features, size)?;
        let first = GUEST + (offset + DriverRing::bytes(features, size)) as u64;
        let buffers = Buffers::new(memory, first, Self::stride(lens), size, lead);
        let buffers = buffers.ok_or(SetupError::Size { size, packed: features.packed })?;
        Ok(Queue { ring, addresses, buffers, used: [Used::default(); BURST], header })
    }
}

/// Checks a number of entries.
fn check_size(size: u32, packed: bool) -> Result<(), SetupError> {
    let valid = size > 0 && size <= ringroad_ring::MAX_SIZE && (packed || size.is_power_of_two());
    if valid { Ok(()) } else { Err(SetupError::Size { size, packed }) }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Queue").field("ring", &self.ring).field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

macro_rules! queue_calls {
    () => {
        /// Returns the addresses of the ring's areas.
        pub fn addresses(&self) -> Addresses {
            self.queue.addresses
        }

        /// Returns where a device without state of its own must resume, in the format of SET_VRING_BASE. Only meaningful while no
        /// device works on the queue.
        pub fn base(&self) -> u32 {
            self.queue.ring.base()
        }

        /// Returns how many buffers a device that stopped at this base (from GET_VRING_BASE) took and never returned.
        pub fn missing(&self, base: u32) -> u32 {
            self.queue.ring.missing(base)
        }

        /// Returns whether the device wants to be notified of what was published since the last call.
        #[inline]
        pub fn wants_notification(&mut self) -> bool {
            self.queue.ring.wants_notification()
        }

        /// Asks the device to notify us of the next buffer that it uses. Returns `true` if there is one already.
        pub fn enable_notification(&mut self) -> bool {
            self.queue.ring.enable_notification()
        }

        /// Asks the device not to notify us.
        pub fn disable_notification(&mut self) {
            self.queue.ring.disable_notification()
        }

        /// Returns the guest address of a buffer; `None` if there is none with this id. For drivers with ring code of their own.
        pub fn buffer(&self, id: u16) -> Option<u64> {
            self.queue.buffers.addresses.get(usize::from(id)).copied()
        }

        /// Returns the length of each buffer in bytes, virtio-net header included.
        pub fn buffer_len(&self) -> usize {
            self.queue.buffers.stride
        }
    };
}

/// Driver end of a transmit queue.
#[derive(Debug)]
pub struct DriverTx {
    queue: Queue,
    under_way: usize,
    size: usize,
    /// See [`DriverTx::set_writes`].
    writes: bool,
}

impl DriverTx {
    queue_calls!();

    fn new(queue: Queue, size: u32) -> DriverTx {
        DriverTx { queue, under_way: 0, size: size as usize, writes: true }
    }

    /// Adds these frames of a burst, with what is left to do to them, which `support` must contain; returns how many there was room
    /// for. The device sees them after `publish`.
    pub fn put(&mut self, burst: &Burst, which: &[u8], support: Support) -> usize {
        let Queue { ring, buffers, header: header_len, .. } = &mut self.queue;
        let mut added = 0;
        for &index in which {
            let Some(frame) = burst.frames().get(usize::from(index)) else { break };
            let Some(&id) = ring.next_ids(0, 1).first() else { break };
            let Some(span) = buffers.span(id) else { break };
            let (mut head, len) = frame.head();
            let offload = burst.offload(index.into());
            if let Some(headroom) = head.first_chunk_mut::<{ vnet_hdr::SIZE }>() {
                *headroom = offload::bytes(offload, support, 0);
            }
            let mut head = head.get(..len).unwrap_or_default();
            let mut place = span;
            if let Some(lead) = buffers.lead(id) {
                // The rest of the header, a hash of zeros and the tunnel, is between what the head begins with and the frame.
                let (header, frame) = head.split_at_checked(vnet_hdr::SIZE).unwrap_or_default();
                let written = lead.write(header);
                place = place.skip(place.write(header.get(written..).unwrap_or_default()));
                place = place.skip(place.write(&[0; HashReport::LEN]));
                if *header_len == vnet_hdr::TUNNELED {
                    place = place.skip(place.write(offload::write_tunnel(offload).as_bytes()));
                }
                head = frame;
            }
            place = place.skip(place.write(head));
            burst.rest(index.into()).for_each(|piece| place = place.skip(piece.copy_to(place)));
            let total = span.len() - place.len();
            if ring.add_single(1, false, |id| buffers.buffer(id, buffers.lead + total)) == 0 {
                break;
            }
            added += 1;
        }
        self.under_way += added;
        added
    }

    /// Takes back up to a burst of buffers that the device has sent; returns how many.
    ///
    /// # Errors
    /// The device's [`DriverFault`].
    #[inline]
    pub fn reclaim(&mut self) -> Result<usize, DriverFault> {
        let count = self.queue.ring.reclaim(BURST)?;
        self.under_way -= count;
        Ok(count)
    }

    /// Returns how many frames can be added now.
    #[inline]
    pub fn free(&self) -> usize {
        self.queue.ring.free()
    }

    /// Returns the number of entries of the ring.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns how many frames are in flight.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Adds up to `count` frames; returns how many there was room for. `fill` is called with a buffer's id and its space for the
    /// frame, which still has its last contents, and returns the frame's length in bytes. The device sees the frames after
    /// `publish`. Not with VIRTIO_NET_F_HASH_REPORT or UDP tunnels, with which headers are longer: then
    /// [`DriverTx::add_behind`] is to be used.
    #[inline]
    pub fn add(&mut self, count: usize, mut fill: impl FnMut(u16, Span<'_>) -> usize) -> usize {
        debug_assert!(self.queue.buffers.lead == 0, "add_behind");
        let Queue { ring, buffers, .. } = &mut self.queue;
        // No index is a whole burst ahead.
        let ahead = if self.writes { LOOK_AHEAD } else { BURST };
        let mut added = 0;
        while added < count {
            // First all buffers, then all descriptors: stores to cache lines that must come from the device's core are then close
            // together in the instruction stream, and their misses overlap.
            let mut lens = [0u32; BURST];
            let ids = ring.next_ids(0, BURST.min(count - added));
            for (index, (&id, len)) in ids.iter().zip(&mut lens).enumerate() {
                if let Some(span) = ids.get(index + ahead).and_then(|&id| buffers.span(id)) {
                    span.prefetch_write::<1>();
                }
                let Some(span) = buffers.span(id) else { break };
                *len = (vnet_hdr::SIZE + fill(id, span.skip(vnet_hdr::SIZE))).min(buffers.room) as u32;
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

    /// As `add`, whatever the length of headers. Slower: in `add`, even a look at that length costs a tenth of the instructions of
    /// a frame.
    pub fn add_behind(&mut self, count: usize, mut fill: impl FnMut(u16, Span<'_>) -> usize) -> usize {
        let Queue { ring, buffers, .. } = &mut self.queue;
        let mut added = 0;
        while added < count {
            let Some(&id) = ring.next_ids(0, 1).first() else { break };
            let Some(span) = buffers.span(id) else { break };
            let len = (vnet_hdr::SIZE + fill(id, span.skip(vnet_hdr::SIZE))).min(buffers.room);
            added += ring.add_single(1, false, |id| buffers.buffer(id, buffers.lead + len));
        }
        self.under_way += added;
        added
    }

    /// Prefetches what adding the next `count` frames will write to.
    #[inline]
    pub fn prefetch(&self, count: usize) {
        let Queue { ring, buffers, .. } = &self.queue;
        ring.prefetch(count);
        if !self.writes {
            return;
        }
        for span in ring.next_ids(0, count.min(LOOK_AHEAD)).iter().filter_map(|&id| buffers.span(id)) {
            span.prefetch_write::<1>();
        }
    }

    /// Sets whether frames are written before they are sent, as nearly always. If not, their buffers are not prefetched: a line
    /// that is fetched for writing is taken from the device.
    pub fn set_writes(&mut self, writes: bool) {
        self.writes = writes;
    }

    /// Makes all added frames available to the device.
    #[inline]
    pub fn publish(&mut self) {
        self.queue.ring.publish();
    }

    /// Calls `fill` for each buffer, with its id and its space for a frame, before any is sent.
    pub fn prepare(&mut self, mut fill: impl FnMut(u16, Span<'_>)) {
        let mut id = 0;
        while let Some(span) = self.queue.buffers.span(id).filter(|_| (id as usize) < self.size) {
            fill(id, span.skip(vnet_hdr::SIZE));
            id += 1;
        }
    }
}

/// Driver end of a receive queue.
#[derive(Debug)]
pub struct DriverRx {
    queue: Queue,
    mergeable: bool,
    size: usize,
    /// Ids and lengths of the buffers received so far of a frame that is spread over several.
    pieces: Vec<Used>,
}

impl DriverRx {
    queue_calls!();

    /// Makes all free buffers available, except those of an incomplete frame; returns how many.
    #[inline]
    pub fn refill(&mut self) -> usize {
        let Queue { ring, buffers, .. } = &mut self.queue;
        // Ids become free in the order in which they were used, so those of an incomplete frame are the last.
        let added = ring.add_single(ring.free() - self.pieces.len(), true, |id| buffers.buffer(id, buffers.stride));
        ring.publish();
        added
    }

    /// Receives up to a burst of buffers and makes them available again; returns the number of buffers. `frame` is called with
    /// each frame, as one span or, if the device has spread it over several buffers, as several. `read`: it reads the frame. If not,
    /// nothing of it is read here either, and each buffer counts as a frame.
    ///
    /// # Errors
    /// The device's [`DriverFault`].
    #[inline]
    pub fn receive(&mut self, read: bool, mut frame: impl FnMut(&[Span<'_>])) -> Result<usize, DriverFault> {
        match self.queue.header {
            vnet_hdr::SIZE => self.receive_behind::<{ vnet_hdr::SIZE }>(read, |_, parts| frame(parts)),
            vnet_hdr::HASHED => self.receive_behind::<{ vnet_hdr::HASHED }>(read, |_, parts| frame(parts)),
            _ => self.receive_behind::<{ vnet_hdr::TUNNELED }>(read, |_, parts| frame(parts)),
        }
    }

    /// As `receive`, reading all frames, with the hash that the device reports of each; none if that was not negotiated.
    ///
    /// # Errors
    /// As for `receive`.
    pub fn receive_hashed(&mut self, mut frame: impl FnMut(HashReport, &[Span<'_>])) -> Result<usize, DriverFault> {
        let report = |first: Span<'_>| first.array(vnet_hdr::SIZE).map_or(HashReport::NONE, HashReport::from_bytes);
        match self.queue.header {
            vnet_hdr::SIZE => self.receive(true, |parts| frame(HashReport::NONE, parts)),
            vnet_hdr::HASHED => {
                self.receive_behind::<{ vnet_hdr::HASHED }>(true, |first, parts| frame(report(first), parts))
            }
            _ => self.receive_behind::<{ vnet_hdr::TUNNELED }>(true, |first, parts| frame(report(first), parts)),
        }
    }

    /// `HEADER`: the length of the header. `frame` gets the first span with it, and all spans without.
    #[inline(always)]
    fn receive_behind<const HEADER: usize>(
        &mut self,
        read: bool,
        mut frame: impl FnMut(Span<'_>, &[Span<'_>]),
    ) -> Result<usize, DriverFault> {
        if !read {
            self.pieces.clear();
        }
        let Queue { ring, buffers, used, .. } = &mut self.queue;
        let count = ring.take_used(used)?;
        let (used, spans) = (used.get(..count).unwrap_or_default(), buffers.spans.list());
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
            if !read || !self.mergeable || self.pieces.is_empty() && num_buffers(span) <= 1 {
                frame(span, &[span.skip(HEADER)]);
            } else {
                merge::<HEADER>(&mut self.pieces, used, self.size, spans, &mut frame);
            }
        }
        if count > 0 {
            self.refill();
        }
        Ok(count)
    }
}

/// Adds one more buffer of a frame that is spread over several (5.1.6.4.1). When the frame is complete, `frame` is called with
/// all of them. `size`: number of buffers of the ring.
#[inline(never)]
fn merge<const HEADER: usize>(
    pieces: &mut Vec<Used>,
    used: Used,
    size: usize,
    spans: &[Span<'_>],
    frame: &mut impl FnMut(Span<'_>, &[Span<'_>]),
) {
    pieces.push(used);
    let part = |used: &Used| spans.get(used.id as usize).map(|span| span.first(used.len as usize));
    let Some(first) = pieces.first().and_then(part) else { return };
    // No frame has more buffers than the ring, whatever its header claims.
    if pieces.len() < (num_buffers(first) as usize).min(size) {
        return;
    }
    let rest = pieces.iter().skip(1).filter_map(part);
    let all = std::iter::once(first.skip(HEADER)).chain(rest);
    let mut parts = [Span::empty(); BURST];
    match parts.get_mut(..pieces.len()) {
        Some(parts) => {
            parts.iter_mut().zip(all).for_each(|(place, part)| *place = part);
            frame(first, parts);
        }
        None => frame(first, &all.collect::<Vec<_>>()),
    }
    pieces.clear();
}

/// Returns `num_buffers` of a virtio-net header: the number of buffers that the frame is spread over.
#[inline(always)]
fn num_buffers(span: Span<'_>) -> u16 {
    span.array(10).map_or(0, u16::from_le_bytes)
}
