//! The transmit queue (8254x Software Developer's Manual, 3.3 to 3.6): the driver sends, we take. Called by a worker, under a lock
//! that the registers' thread waits for when memory or ring are about to change.

mod frame;

use crate::{
    descriptor::Context,
    descriptor::tx::{DD, DEXT, DTYP, DTYP_DATA, EOP, IC, IDE, IFCS, IXSM, RPS, RS, TXSM, VLE},
    fault::Fault,
    interrupts::event,
    registers::cause,
    ring::Ring,
    shared::{STAGING, Shared},
    statistics::Tally,
};
use ringroad_frame::{BURST, Burst, Counters, HEADROOM, MAX_FRAME, PIECES, Source};
use ringroad_mem::{Error as MemoryError, Hit, Pieces, Region, Table, sync::Ordering};
use std::sync::Arc;

/// Limit for a burst of frames, in bytes: the sender's next frames wait for its next turn.
const BURST_BYTES: u64 = 256 << 10;
/// Descriptors after which a burst has no more frames.
const BURST_DESCRIPTORS: u32 = 512;
/// Descriptors of one frame, contexts included, that are looked at: more are no frame.
const FRAME_DESCRIPTORS: u32 = 1024;
/// Buffers of one frame. Linux' driver needs 341 for 64 KiB in segments of 48 bytes.
const FRAME_PARTS: usize = 480;
/// Longest frame of the fast path, so that a burst of them is within [`BURST_BYTES`].
const PLAIN: u64 = BURST_BYTES / BURST as u64;

/// Buffers whose first lines are prefetched, ahead of reading the frames.
const LOOK_AHEAD: usize = 8;

/// Staging memory of one frame in bytes: the gap in front of the frame, and its headers with a VLAN tag more.
const SLOT: usize = 320;

/// A buffer of a frame.
#[derive(Clone, Copy, Debug)]
struct Part {
    address: u64,
    len: u32,
    /// Index of its descriptor.
    index: u32,
}

/// What the descriptors before a frame have set.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// For segmentation.
    segment: Context,
    /// For checksums only.
    checksum: Context,
    /// Descriptors up to the next end of packet are part of a frame that was dropped.
    skipping: bool,
}

/// Where a frame begins.
#[derive(Clone, Copy, Debug, Default)]
struct Start {
    /// Descriptors of the burst before it.
    used: u32,
    /// Entries of `reports` before it.
    reports: usize,
    state: State,
}

/// Transmit queue of a device.
#[derive(Debug)]
pub struct TxQueue {
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    ring: Ring,
    generation: u32,
    resets: u32,
    vme: bool,
    vet: u16,
    /// The guest's regions, and the staging memory.
    memory: Option<Arc<Table>>,
    staging: Arc<Region>,
    pieces: Pieces,
    hit: Hit,
    limit: usize,
    fault: Option<Fault>,
    /// Whether the fault was not yet reported.
    news: bool,
    state: State,
    /// Descriptors of the burst, and of those the first ones that are a frame each.
    used: u32,
    plain: usize,
    /// These.
    descriptors: [[u64; 2]; BURST],
    /// Where each of the other frames begins.
    starts: [Start; BURST],
    /// State before the burst.
    before: State,
    /// Descriptors behind the plain ones that are to be written back: index and second word.
    reports: Vec<(u32, u64)>,
    /// Buffers of the frame in progress.
    parts: Vec<Part>,
    /// Number of descriptors, of those to be taken next, whose drops were counted before they were put back.
    counted: u32,
    tail: u32,
    /// Generation of the setup and tail with which there was nothing to take though there are descriptors: a frame without its end.
    incomplete: Option<(u32, u32)>,
}

/// Returns the length of the frame if the descriptor is all of it, and nothing is left to do.
#[inline(always)]
fn plain(word: u64) -> Option<u64> {
    let bare = word & (EOP | IFCS | IC | VLE) == EOP | IFCS;
    let legacy = word & DEXT == 0;
    let data = word & (DEXT | DTYP | IXSM | TXSM) == DEXT | DTYP_DATA;
    let len = if legacy { word & 0xffff } else { word & 0xf_ffff };
    (bare && (legacy || data) && len <= PLAIN && len >= (ringroad_frame::HEAD - HEADROOM) as u64).then_some(len)
}

/// Counts a frame as the frames that it becomes on the link. Returns its own length in bytes.
#[cold]
fn count(tally: &mut Tally, burst: &Burst, index: usize) -> u64 {
    let Some(frame) = burst.frames().get(index) else { return 0 };
    let (offload, len) = (burst.offload(index), frame.len());
    let count = offload.frames(len);
    let headers = offload.gso().map_or(0, |gso| usize::from(gso.header_len));
    let bytes = len + (count - 1) * headers;
    tally.add(frame.addresses().0, offload.longest(len).min(len), count as u64, bytes as u64);
    len as u64
}

/// Returns the number of the guest's own regions.
fn regions(memory: &Table) -> usize {
    memory.regions().len().saturating_sub(1)
}

impl TxQueue {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<TxQueue, MemoryError> {
        Ok(TxQueue {
            shared,
            counters: Arc::default(),
            ring: Ring::default(),
            generation: 0,
            resets: 0,
            vme: false,
            vet: 0,
            memory: None,
            staging: Region::private(BURST * SLOT, STAGING)?,
            pieces: Pieces::new(PIECES.into()),
            hit: Hit::default(),
            limit: MAX_FRAME,
            fault: None,
            news: false,
            state: State::default(),
            used: 0,
            plain: 0,
            descriptors: [[0; 2]; BURST],
            starts: [Start::default(); BURST],
            before: State::default(),
            reports: Vec::with_capacity((BURST_DESCRIPTORS + FRAME_DESCRIPTORS) as usize),
            parts: Vec::with_capacity(FRAME_PARTS),
            counted: 0,
            tail: 0,
            incomplete: None,
        })
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Sets the maximum length of a frame, in bytes from the destination address to the end of the payload. Longer frames are
    /// dropped and counted.
    pub fn limit(&mut self, frame: usize) {
        self.limit = frame;
    }

    /// Sets the memory that descriptors name; `None`: the device has no access to any. No burst may be in flight. When this
    /// returns, the queue does not hold the former memory any more.
    ///
    /// # Errors
    /// [`MemoryError::Overlap`] if a region lies where the device has memory of its own, in the uppermost 4 GiB; then the queue
    /// has no memory.
    pub fn set_memory(&mut self, memory: Option<Arc<Table>>) -> Result<(), MemoryError> {
        // An old hit could name the staging memory, which is the last region.
        (self.memory, self.hit) = (None, Hit::default());
        self.pieces.clear();
        self.ring.release();
        // The setup is to be applied again.
        self.generation = self.shared.generation().wrapping_sub(1);
        let with_staging = |memory: Arc<Table>| memory.with_own(self.staging.clone()).map(Arc::new);
        let memory = memory.filter(|memory| !memory.regions().is_empty());
        self.memory = memory.map(with_staging).transpose()?;
        Ok(())
    }

    /// Applies what the registers say; see [`crate::Effects::QUIESCE`]. No burst may be in flight.
    pub fn quiesce(&mut self) {
        self.refresh();
    }

    /// Returns the memory that descriptors name, with the device's own.
    pub fn memory(&self) -> Option<&Arc<Table>> {
        self.memory.as_ref()
    }

    /// Returns whether there is nothing to take.
    pub fn is_idle(&mut self) -> bool {
        self.available() == 0 || self.incomplete == Some((self.generation, self.tail))
    }

    /// Returns why the queue has stopped, once.
    pub fn take_fault(&mut self) -> Option<Fault> {
        self.fault.filter(|_| std::mem::take(&mut self.news))
    }

    fn refresh(&mut self) {
        self.incomplete = None;
        // Read before the setup: if it changes meanwhile, it is applied once more.
        self.generation = self.shared.generation();
        let setup = self.shared.setup.lock();
        (self.vme, self.vet) = (setup.vme, setup.vet);
        let reset = setup.resets != self.resets;
        self.resets = setup.resets;
        let ring = setup.tx;
        drop(setup);
        if reset {
            (self.fault, self.state, self.counted) = (None, State::default(), 0);
        }
        self.ring.set(ring, &self.shared.tx, self.memory.as_deref());
    }

    /// Returns how many descriptors there are.
    #[inline]
    fn available(&mut self) -> u32 {
        self.tail = loop {
            match self.shared.tail(&self.shared.tx, self.generation) {
                Some(tail) => break tail,
                None => self.refresh(),
            }
        };
        if self.fault.is_some() {
            return 0;
        }
        let Some(memory) = &self.memory else { return 0 };
        let available = self.ring.available(self.tail);
        if available > 0
            && let Err(fault) = self.ring.check(regions(memory))
        {
            self.stop(fault);
            return 0;
        }
        available
    }

    #[cold]
    fn stop(&mut self, fault: Fault) {
        (self.fault, self.news) = (Some(fault), true);
        self.counters.faults.add(1);
    }

    /// Fast path: frames of one descriptor each, up to the first other one. Returns their total length in bytes.
    #[inline(always)]
    fn take_plain(&mut self, burst: &mut Burst, available: u32) -> u64 {
        let run = self.ring.run(0, available.min(BURST as u32));
        for (place, [first, second]) in self.descriptors.iter_mut().zip(run) {
            *place = [first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)];
        }
        let most = self.limit as u64;
        // Each piece has the bytes in front of the frame too: the place of the receiver's header, which nobody reads.
        let lead = HEADROOM as u64;
        let pieces = self.descriptors.get(..run.len()).unwrap_or_default().iter().map(|&[address, word]| {
            let len = plain(word).filter(|&len| len <= most)?;
            Some((address.wrapping_sub(lead), (len + lead) as u32))
        });
        self.pieces.extend::<true>(self.hit, pieces);
        let pieces = self.pieces.list();
        pieces.iter().take(LOOK_AHEAD).for_each(|piece| piece.prefetch::<2>());
        let (bytes, _) = burst.extend(pieces.iter().enumerate().map(|(index, &piece)| {
            if let Some(later) = pieces.get(index + LOOK_AHEAD) {
                later.prefetch::<2>();
            }
            Some(piece)
        }));
        self.plain = pieces.len();
        self.used = self.plain as u32;
        bytes
    }

    /// Ends a burst of which the first `frames` frames were delivered: they have `used` descriptors, and so many entries of
    /// `reports`.
    #[inline(always)]
    fn complete(&mut self, burst: &Burst, frames: usize, used: u32, reports: usize) {
        let mut tally = Tally::default();
        for frame in burst.frames().iter().take(frames.min(self.plain)) {
            tally.add(frame.addresses().0, frame.len(), 1, frame.len() as u64);
        }
        let mut bytes = tally.bytes;
        for index in self.plain..frames {
            bytes += count(&mut tally, burst, index);
        }
        // RS and IDE of a descriptor are next to each other.
        let (mut delayed, mut at_once) = (0, 0);
        let mut note = |word: u64| {
            delayed |= word & IDE;
            at_once |= !word & IDE;
        };
        for (ahead, &[_, word]) in self.descriptors.iter().take(self.plain.min(used as usize)).enumerate() {
            if word & (RS | RPS) != 0 {
                note(word);
                self.ring.write_back(self.ring.index(ahead as u32), word | DD);
            }
        }
        for &(index, word) in self.reports.iter().take(reports) {
            note(word);
            self.ring.write_back(index, word | DD);
        }
        self.ring.advance(used, &self.shared.tx);
        let empty = self.ring.available(self.tail) == 0;
        let flag = |set: bool, event: u32| if set { event } else { 0 };
        let sent = flag(at_once != 0, cause::TXDW) | flag(delayed != 0, event::SENT);
        self.shared.report(sent | flag(empty, cause::TXQE));
        tally.transmitted(&self.shared.statistics);
        self.counters.frames.add(frames as u64);
        self.counters.bytes.add(bytes);
        self.counters.bursts.add(1);
    }
}

impl Source for TxQueue {
    /// Takes up to a burst of frames.
    ///
    /// Plain frames of 64 bytes, each in one descriptor: 16 bytes of descriptor are read and, when they are sent, 8 of them written,
    /// a quarter of a cache line each way; 32 bytes are read around the start of the frame, one or two lines, of which the sink
    /// reads the rest. Nothing is copied but these 32 bytes. Twelve branches, by the source, that nearly always go the same way:
    /// five for what the descriptor says, three for where its piece is and whether it has a head, one to prefetch; when it is sent,
    /// one for its destination and two to report.
    fn take(&mut self, burst: &mut Burst) -> usize {
        burst.start(self.limit, HEADROOM);
        let available = self.available();
        (self.used, self.plain) = (0, 0);
        let Some(memory) = self.memory.as_ref().filter(|_| available > 0) else { return 0 };
        self.pieces.start(memory);
        self.reports.clear();
        self.before = self.state;
        let mut bytes = if self.state.skipping { 0 } else { self.take_plain(burst, available) };
        if self.used < available && burst.frames().len() < BURST {
            bytes = self.take_rest(burst, available, bytes);
        }
        if self.used == 0 {
            // Until the tail moves. The burst must not keep the memory meanwhile.
            self.incomplete = Some((self.generation, self.tail));
            self.pieces.clear();
            return 0;
        }
        burst.weigh(bytes);
        burst.exchange(&mut self.pieces);
        self.used as usize
    }

    fn done(&mut self, burst: &mut Burst) {
        self.complete(burst, burst.frames().len(), self.used, self.reports.len());
        self.counted = self.counted.saturating_sub(self.used);
        burst.finish(&mut self.pieces);
        self.pieces.truncate(0);
    }

    fn retains(&self) -> bool {
        true
    }

    #[cold]
    fn retain(&mut self, burst: &mut Burst, first: usize) {
        let frames = burst.frames().len();
        if first >= frames {
            return self.done(burst);
        }
        let plain = Start { used: first as u32, reports: 0, state: self.before };
        let start = if first < self.plain { plain } else { self.starts.get(first).copied().unwrap_or(plain) };
        self.complete(burst, first, start.used, start.reports);
        self.state = start.state;
        self.counted = self.counted.max(self.used) - start.used;
        burst.finish(&mut self.pieces);
        self.pieces.truncate(0);
    }
}
