//! A receive queue whose buffers are cut to the size of the frames that arrive, as Linux's virtio-net does with mergeable buffers
//! (seed 004). Frames are handed over as a burst, where they lie. Used by the port in `host` that drives a device.

use super::{
    DriverError, DriverTx, GUEST, Queue, check_size,
    fragments::{Fragment, Fragments},
};
use crate::{features::bits, offload};
use ringroad_frame::{BURST, Burst, Counters, MAX_FRAME, NotAFrame, PIECES, offload::Support};
use ringroad_mem::{Hit, Pieces, Region, Table};
use ringroad_ring::{Addresses, Buffer, DriverFault, DriverRing, Features as RingFeatures, SetupError, Used};
use ringroad_wire::{ethernet, vnet_hdr};
use std::{collections::VecDeque, fs::File, ops::Range, sync::Arc};

/// How long receive buffers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sizing {
    /// As long as a frame of the MTU with its header, rounded up to cache lines.
    Mtu,
    /// A page.
    Page,
    /// As long as frames were on average lately: between the two.
    #[default]
    Auto,
}

/// A burst that has more bytes is long enough.
const MOST_BYTES: u64 = 256 << 10;

/// Size of a page in bytes.
pub const PAGE: usize = 4096;

/// The moving average of lengths: each new one counts for 1/64, as with Linux.
#[derive(Clone, Copy, Debug)]
struct Average {
    /// The average times 2^`SCALE`.
    scaled: u64,
}

impl Average {
    const WEIGHT: u32 = 6;
    const SCALE: u32 = 12;

    fn new(len: usize) -> Average {
        Average { scaled: (len as u64) << Self::SCALE }
    }

    fn add(&mut self, len: usize) {
        let len = (len as u64) << Self::SCALE;
        self.scaled = self.scaled - (self.scaled >> Self::WEIGHT) + (len >> Self::WEIGHT);
    }

    fn get(self) -> usize {
        (self.scaled >> Self::SCALE) as usize
    }
}

/// What received frames have cost in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Frames received.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Buffers that they were in.
    pub buffers: u64,
    /// Bytes of these buffers, whether used or not ("truesize").
    pub truesize: u64,
}

/// Driver end of a receive queue whose buffers have the size that a [`Sizing`] gives them.
pub struct SizedRx {
    ring: DriverRing,
    addresses: Addresses,
    memory: Arc<Table>,
    /// Where the blocks begin in the driver's memory.
    base: usize,
    fragments: Fragments,
    /// The buffer of each id that is available or in use.
    places: Box<[Fragment]>,
    sizing: Sizing,
    /// The shortest buffer.
    least: usize,
    average: Average,
    support: Support,
    mergeable: bool,
    /// Used buffers that are not part of a burst yet: those of an incomplete frame, and those that the last burst had no room for.
    /// A buffer of length 0 is one that was given back when its frame was dropped.
    ahead: VecDeque<Used>,
    /// The buffers of the current burst, and for each of its frames the index behind its last one.
    taken: Vec<Used>,
    ends: Vec<usize>,
    pieces: Pieces,
    held: Held,
}

impl std::fmt::Debug for SizedRx {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("SizedRx").field("ring", &self.ring).field("sizing", &self.sizing).finish_non_exhaustive()
    }
}

impl SizedRx {
    /// Bytes of memory of a queue.
    pub(super) fn bytes(features: RingFeatures, size: u32) -> usize {
        Self::offset(features, size) + Fragments::bytes(size as usize)
    }

    fn offset(features: RingFeatures, size: u32) -> usize {
        DriverRing::bytes(features, size).next_multiple_of(PAGE)
    }

    /// Lays a queue out at an offset in the driver's memory.
    pub(super) fn new(
        region: &Arc<Region>,
        memory: &Arc<Table>,
        offset: usize,
        config: &SizedConfig,
    ) -> Result<SizedRx, SetupError> {
        let &SizedConfig { acked, queue_size: size, mtu, sizing } = config;
        let features = RingFeatures::negotiated(acked);
        let (ring, addresses) = DriverRing::start(region, offset, features, size)?;
        let mergeable = acked & bits::NET_F_MRG_RXBUF != 0;
        let least = (vnet_hdr::SIZE + ethernet::longest_frame(mtu)).next_multiple_of(64);
        let least = if mergeable { least.min(PAGE) } else { least };
        let mut queue = SizedRx {
            ring,
            addresses,
            memory: memory.clone(),
            base: offset + Self::offset(features, size),
            fragments: Fragments::new(size as usize),
            places: vec![Fragment::default(); size as usize].into(),
            sizing,
            least,
            average: Average::new(least),
            support: offload::driver_takes(acked),
            mergeable,
            ahead: VecDeque::with_capacity(size as usize),
            taken: Vec::with_capacity(size as usize),
            ends: Vec::with_capacity(BURST),
            pieces: Pieces::new(PIECES.into()),
            held: Held::default(),
        };
        queue.refill();
        Ok(queue)
    }

    /// Returns the addresses of the ring's areas.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the offloads that received frames may have.
    pub fn support(&self) -> Support {
        self.support
    }

    /// Returns what received frames have cost so far.
    pub fn held(&self) -> Held {
        self.held
    }

    /// Returns the length in bytes of the buffers that are made available now.
    pub fn buffer_len(&self) -> usize {
        let most = self.least.max(PAGE);
        match self.sizing {
            Sizing::Mtu => self.least,
            Sizing::Page => most,
            Sizing::Auto => self.average.get().clamp(self.least, most).next_multiple_of(64),
        }
    }

    /// Makes all free buffers available, except those whose frames were not handed over yet.
    fn refill(&mut self) {
        let len = self.buffer_len();
        let SizedRx { ring, fragments, places, base, ahead, .. } = self;
        // Ids become free in the order in which they were used, so those ahead are the last.
        ring.add_single(ring.free() - ahead.len(), true, |id| {
            let fragment = fragments.cut(len).unwrap_or_default();
            if let Some(place) = places.get_mut(usize::from(id)) {
                *place = fragment;
            }
            Buffer { address: GUEST + (*base + fragment.at) as u64, len: fragment.len as u32 }
        });
        ring.publish();
    }

    fn place(&self, used: Used) -> Fragment {
        self.places.get(usize::from(used.id)).copied().unwrap_or_default()
    }

    /// Returns how many buffers the next frame is in, if all of them are there.
    fn next_frame(&mut self) -> Result<Option<usize>, DriverFault> {
        let mut wanted = 1;
        loop {
            if let Some(&first) = self.ahead.front() {
                wanted = self.buffers(first);
                if self.ahead.len() >= wanted {
                    return Ok(Some(wanted));
                }
            }
            let mut used = [Used::default(); BURST];
            let count = self.ring.take_used(&mut used)?;
            if count == 0 {
                return Ok(None);
            }
            self.ahead.extend(used.get(..count).unwrap_or_default());
            debug_assert!(wanted <= self.places.len());
        }
    }

    /// Returns how many buffers a frame is in by its header in this one. No frame has more than the ring, whatever it claims.
    fn buffers(&self, first: Used) -> usize {
        let place = self.place(first);
        if !self.mergeable || place.len == 0 {
            return 1;
        }
        let region = self.memory.regions().first();
        let header = region.and_then(|region| region.span(self.base + place.at, first.len as usize)?.array(10));
        usize::from(header.map_or(1, u16::from_le_bytes)).clamp(1, self.places.len())
    }

    /// Takes up to a burst of frames. Returns the number of buffers, which [`SizedRx::done`] makes available again.
    ///
    /// # Errors
    /// The device's [`DriverFault`], if it comes first; then the queue is unusable.
    pub fn take(&mut self, burst: &mut Burst, counters: &Counters) -> Result<usize, DriverFault> {
        burst.start(MAX_FRAME, vnet_hdr::SIZE);
        self.pieces.start(&self.memory);
        let mut bytes = 0;
        while burst.frames().len() < BURST && bytes <= MOST_BYTES && self.taken.len() <= 4 * BURST {
            let count = match self.next_frame() {
                Ok(Some(count)) => count,
                Ok(None) => break,
                Err(fault) if self.taken.is_empty() => return Err(fault),
                // It is reported by the next burst.
                Err(_) => break,
            };
            if self.pieces.room() < count && !self.taken.is_empty() {
                break;
            }
            let why = match self.take_frame(burst, count) {
                Ok(len) => {
                    bytes += len as u64;
                    continue;
                }
                Err(Dropped::Silently) => continue,
                Err(Dropped::Offload) => &counters.offload,
                Err(Dropped::NotAFrame(NotAFrame::Runt)) => &counters.runt,
                Err(Dropped::NotAFrame(NotAFrame::Oversize)) => &counters.oversize,
            };
            why.add(1);
            burst.refuse(1);
        }
        burst.weigh(bytes);
        burst.exchange(&mut self.pieces);
        Ok(self.taken.len())
    }

    /// Adds the next frame, in this many buffers, to the burst; returns its length in bytes.
    fn take_frame(&mut self, burst: &mut Burst, count: usize) -> Result<usize, Dropped> {
        let start = self.taken.len();
        self.taken.extend(self.ahead.drain(..count));
        let buffers = self.taken.get(start..).unwrap_or_default();
        if buffers.first().is_none_or(|&first| self.place(first).len == 0) {
            return Err(Dropped::Silently);
        }
        let first = self.pieces.list().len();
        // Of a buffer that was given back nothing is left, whatever the header in front of it says now.
        let places = &self.places;
        let place = |used: &Used| places.get(usize::from(used.id)).copied().unwrap_or_default();
        let written = |used: &Used| (used.len as usize).min(place(used).len);
        let total = buffers.iter().map(written).sum();
        // Adjacent buffers are one piece.
        let mut run = 0..0;
        let mut fits = true;
        for used in buffers {
            let at = self.base + place(used).at;
            if run.end != at {
                fits &= push(&mut self.pieces, &run);
                run = at..at;
            }
            run.end += written(used);
        }
        fits &= push(&mut self.pieces, &run);
        let pieces = self.pieces.list().get(first..).unwrap_or_default();
        let added = if fits {
            let offload = offload::read_pieces(pieces, total, self.support).map_err(|_| Dropped::Offload);
            offload.and_then(|offload| burst.push(pieces, first, total, offload).map_err(Dropped::NotAFrame))
        } else {
            Err(Dropped::NotAFrame(NotAFrame::Oversize))
        };
        match added {
            Ok(_) => self.ends.push(self.taken.len()),
            // Its buffers may be used again; their ids only in their turn.
            Err(_) => (start..self.taken.len()).for_each(|index| self.give(index)),
        }
        added
    }

    /// Gives the memory of a taken buffer back.
    fn give(&mut self, index: usize) {
        if let Some(used) = self.taken.get(index)
            && let Some(place) = self.places.get_mut(usize::from(used.id))
        {
            self.fragments.give(std::mem::take(place));
        }
    }

    /// Counts the first `frames` frames of the burst.
    fn count(&mut self, burst: &Burst, frames: usize, counters: &Counters) {
        let mut start = 0;
        let frames = burst.frames().get(..frames).unwrap_or(burst.frames());
        for (frame, &end) in frames.iter().zip(&self.ends) {
            // A frame's buffers are the last ones before its end: what was dropped before it has none.
            let buffers = self.taken.get(start..end).unwrap_or_default();
            let places = buffers.iter().map(|&used| self.place(used).len).filter(|&len| len > 0);
            let (count, truesize) = places.fold((0, 0), |(count, sum), len| (count + 1, sum + len as u64));
            self.held.buffers += count;
            self.held.truesize += truesize;
            self.average.add(frame.extent());
            start = end;
        }
        let bytes = frames.iter().map(|frame| frame.len() as u64).sum();
        self.held.frames += frames.len() as u64;
        self.held.bytes += bytes;
        counters.frames.add(frames.len() as u64);
        counters.bytes.add(bytes);
        counters.bursts.add(1);
    }

    /// Makes the burst's buffers available again.
    pub fn done(&mut self, burst: &mut Burst, counters: &Counters) {
        self.count(burst, burst.frames().len(), counters);
        self.end(burst);
    }

    /// Like `done`, but the frames from index `first` on come again with the next burst.
    pub fn retain(&mut self, burst: &mut Burst, first: usize, counters: &Counters) {
        self.count(burst, first, counters);
        let start = first.checked_sub(1).and_then(|last| self.ends.get(last)).map_or(0, |&end| end);
        for used in self.taken.drain(start.min(self.taken.len())..).rev() {
            self.ahead.push_front(used);
        }
        self.end(burst);
    }

    /// Ends a burst for which there were no buffers.
    pub fn abandon(&mut self, burst: &mut Burst) {
        burst.finish(&mut self.pieces);
        self.pieces.clear();
    }

    fn end(&mut self, burst: &mut Burst) {
        burst.finish(&mut self.pieces);
        self.pieces.clear();
        (0..self.taken.len()).for_each(|index| self.give(index));
        self.taken.clear();
        self.ends.clear();
        self.refill();
    }

    /// Returns whether the device wants to be notified of what was published since the last call.
    pub fn wants_notification(&mut self) -> bool {
        self.ring.wants_notification()
    }

    /// Asks the device to notify us of the next buffer that it uses. Returns `true` if there is a frame, or may be, already.
    pub fn enable_notification(&mut self) -> bool {
        let there = self.ring.enable_notification();
        there || self.ahead.front().is_some_and(|&first| self.ahead.len() >= self.buffers(first))
    }

    /// Asks the device not to notify us.
    pub fn disable_notification(&mut self) {
        self.ring.disable_notification();
    }
}

/// Why a frame was dropped.
enum Dropped {
    /// It was dropped and counted before.
    Silently,
    /// Its offload was not negotiated or does not fit.
    Offload,
    NotAFrame(NotAFrame),
}

/// Adds a part of the driver's memory to a list of pieces; returns whether there was room.
fn push(pieces: &mut Pieces, part: &Range<usize>) -> bool {
    part.is_empty() || pieces.push(GUEST + part.start as u64, part.len() as u32, &mut Hit::default()).is_ok()
}

/// How a [`SizedDriver`] is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizedConfig {
    /// The negotiated feature bits. Without VIRTIO_NET_F_MRG_RXBUF no received frame may be longer than the MTU allows.
    pub acked: u64,
    /// Number of entries of each queue.
    pub queue_size: u32,
    /// The MTU, at most 16384.
    pub mtu: u16,
    /// How long receive buffers are.
    pub sizing: Sizing,
}

/// A driver for real traffic, with one pair of queues: receive buffers of adaptive size, and transmit buffers for the longest frames.
#[derive(Debug)]
pub struct SizedDriver {
    /// The whole of its memory: rings and buffers.
    pub region: Arc<Region>,
    /// The file that backs the memory, for the device to map.
    pub file: File,
    /// The receive queue: vring 0.
    pub rx: SizedRx,
    /// The transmit queue: vring 1.
    pub tx: DriverTx,
}

impl SizedDriver {
    /// Longest MTU.
    pub const MTU: u16 = 16384;

    /// Allocates the memory, lays out rings and buffers, and makes the receive buffers available.
    ///
    /// # Errors
    /// [`DriverError`] if the queue size is invalid or the memory cannot be allocated.
    pub fn new(config: SizedConfig) -> Result<SizedDriver, DriverError> {
        let config = SizedConfig { mtu: config.mtu.min(Self::MTU), ..config };
        let features = RingFeatures::negotiated(config.acked);
        check_size(config.queue_size, features.packed)?;
        let receive = SizedRx::bytes(features, config.queue_size).next_multiple_of(PAGE);
        let lens = [vnet_hdr::SIZE, MAX_FRAME];
        let transmit = Queue::bytes(features, config.queue_size, lens);
        let (region, file) = Region::create((receive + transmit).next_multiple_of(PAGE), GUEST, false)?;
        let memory = Arc::new(Table::default().with(region.clone())?);
        let rx = SizedRx::new(&region, &memory, 0, &config)?;
        let queue = Queue::new(&region, &memory, receive, features, config.queue_size, lens, 0)?;
        Ok(SizedDriver { region, file, rx, tx: DriverTx::new(queue, config.queue_size) })
    }
}

#[cfg(test)]
mod tests;
