//! The receive queue (8254x Software Developer's Manual, 3.2): we put, the driver receives. Called by a worker, under a lock that
//! the registers' thread waits for when memory or ring are about to change.

mod cut;
mod place;

use crate::{
    descriptor::rx::{DD, EOP, IXSM},
    fault::Fault,
    filter::{Filter, Match},
    interrupts::event,
    registers::{
        cause, rctl, rxcsum,
        statistics::{MPC, RNBC, ROC},
    },
    ring::Ring,
    shared::Shared,
    statistics::{FCS, Tally},
};
use ringroad_frame::{
    BURST, Burst, Counters, Frame, HEADROOM, MAX_FRAME, Sink,
    offload::{Gso, HEADERS, Support},
};
use ringroad_mem::{Error as MemoryError, Hit, Pieces, Span, Table, sync::Ordering};
use ringroad_wire::ethernet;
use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

/// Longest frame without long packets (RCTL.LPE), and with, in bytes without frame check sequence (3.2.2).
const LONGEST: usize = 1522 - FCS;
const LONGEST_LPE: usize = 16384 - FCS;

/// Descriptors that are written back together.
const WRITES: usize = 256;
/// Buffers of one frame: 64 of 256 bytes, and some descriptors without any.
const FRAME_BUFFERS: usize = 128;
/// Capacity in spans of a list of buffers.
const SPANS: usize = 512;
/// Buffers whose first lines are prefetched, ahead of writing to them.
const LOOK_AHEAD: usize = 8;

/// Frames that are cut at the same time, each from another sender. More than these start over when they are offered again.
const BEGUN: usize = 8;

/// Position of a VLAN tag, and its size.
const TAG_AT: usize = 12;
const TAG: usize = 4;

/// Receive queue of a device.
#[derive(Debug)]
pub struct RxQueue {
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    ring: Ring,
    generation: u32,
    resets: u32,
    runs: bool,
    filter: Filter,
    rxcsum: u32,
    vme: bool,
    vet: u16,
    /// Size of each buffer, longest frame, bytes that count for the frame check sequence.
    buffer: usize,
    longest: usize,
    fcs: usize,
    /// Position of the threshold: the ring's size divided by this power of two.
    threshold: u32,
    memory: Option<Arc<Table>>,
    targets: Pieces,
    hit: Hit,
    limit: usize,
    fault: Option<Fault>,
    news: bool,
    /// One frame that was cut or completed. Its checksum is computed here: in the driver's memory others could change it meanwhile.
    scratch: Box<[u8]>,
    /// Identification of the next frame's IPv6 fragments.
    ident: u32,
    /// Frames of which the driver has got a part.
    begun: Vec<Begun>,
    /// Most descriptors that the driver has made available at once: some keep few.
    most: u32,
    /// The last frame for which there were too few descriptors needs so many, at least; 0: there was none.
    short: u32,
    /// Descriptors used since the head was published, and the second words of those that were not yet written back.
    used: u32,
    words: [u64; WRITES],
    pending: usize,
}

/// A frame that is being cut, with its first segments placed. The rest waits for room, and the frame at its sender.
#[derive(Clone, Copy, Debug)]
struct Begun {
    /// By which it is known again: its headers, its length, and how it is cut.
    head: [u8; HEADERS],
    len: usize,
    gso: Gso,
    /// Identification of its IPv6 fragments.
    ident: u32,
    /// How many segments are placed.
    segments: usize,
}

/// Why a frame is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// Too few buffers are available now.
    Full,
    /// The same, after a part of what it was cut into was placed: the rest is dropped.
    Cut,
    /// It is longer than what the driver receives.
    Oversize,
    /// Its sender has changed the headers since they were checked.
    Offload,
    /// The driver does not want it.
    Filtered,
    /// The driver named a buffer outside its memory.
    Fault(Fault),
}

/// What became of the frames of a call.
#[derive(Default)]
struct Outcome {
    tally: Tally,
    /// Frames of which the driver gets all.
    accepted: usize,
    /// Frames not yet handled, as there is no room for the first of them.
    left: usize,
    full: u64,
    oversize: u64,
    filtered: u64,
    offload: u64,
    stopped: u64,
}

impl RxQueue {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<RxQueue, MemoryError> {
        Ok(RxQueue {
            shared,
            counters: Arc::default(),
            ring: Ring::default(),
            generation: 0,
            resets: 0,
            runs: false,
            filter: Filter::default(),
            rxcsum: 0,
            vme: false,
            vet: 0,
            buffer: 0,
            longest: 0,
            fcs: 0,
            threshold: 1,
            memory: None,
            targets: Pieces::new(SPANS),
            hit: Hit::default(),
            limit: MAX_FRAME,
            fault: None,
            news: false,
            scratch: vec![0; LONGEST_LPE].into(),
            // Seeded by the system.
            ident: RandomState::new().hash_one(0) as u32,
            begun: Vec::with_capacity(BEGUN),
            most: 0,
            short: 0,
            used: 0,
            words: [0; WRITES],
            pending: 0,
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
        self.generation = self.shared.generation().wrapping_sub(1);
    }

    /// Sets the memory that descriptors name; `None`: the device has no access to any, and drops all frames. When this returns, the
    /// queue does not hold the former memory any more.
    pub fn set_memory(&mut self, memory: Option<Arc<Table>>) {
        self.targets.clear();
        self.begun.clear();
        self.ring.release();
        // The setup is to be applied again.
        self.generation = self.shared.generation().wrapping_sub(1);
        self.memory = memory;
    }

    /// Applies what the registers say; see [`crate::Effects::QUIESCE`].
    pub fn quiesce(&mut self) {
        self.refresh();
    }

    /// Returns why the queue has stopped, once.
    pub fn take_fault(&mut self) -> Option<Fault> {
        self.fault.filter(|_| std::mem::take(&mut self.news))
    }

    fn refresh(&mut self) {
        // Read before the setup: if it changes meanwhile, it is applied once more.
        self.generation = self.shared.generation();
        let setup = self.shared.setup.lock();
        let (bits, ring) = (setup.rctl, setup.rx);
        (self.rxcsum, self.vme, self.vet) = (setup.rxcsum, setup.vme, setup.vet);
        self.filter.clone_from(&setup.filter);
        let reset = setup.resets != self.resets;
        self.resets = setup.resets;
        drop(setup);
        (self.most, self.short) = (0, 0);
        if reset {
            self.fault = None;
            self.begun.clear();
        }
        let size = 2048 >> (bits >> rctl::BSIZE & 3);
        // 16384, 8192 and 4096; 32768 would be reserved.
        self.buffer = if bits & rctl::BSEX != 0 { (16 * size).min(16384) } else { size };
        self.longest = if bits & (rctl::LPE | rctl::SBP) != 0 { LONGEST_LPE } else { LONGEST }.min(self.limit);
        self.fcs = if bits & rctl::SECRC != 0 { 0 } else { FCS };
        self.threshold = 1 + (bits >> rctl::RDMTS & 3).min(2);
        self.runs = ring.runs && self.memory.is_some();
        self.ring.set(ring, &self.shared.rx, self.memory.as_deref());
    }

    /// Returns how many descriptors there are.
    #[inline]
    fn available(&mut self) -> u32 {
        let tail = loop {
            match self.shared.tail(&self.shared.rx, self.generation) {
                Some(tail) => break tail,
                None => self.refresh(),
            }
        };
        if !self.runs || self.fault.is_some() {
            return 0;
        }
        // Without memory at all there is no VMM.
        let available = if self.memory.is_some() { self.ring.available(tail) } else { 0 };
        self.most = self.most.max(available);
        if available > 0
            && let Err(fault) = self.ring.check(self.memory.as_ref().map_or(0, |memory| memory.regions().len()))
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

    /// Puts frames into buffers and publishes these. `wait`: stops at the first frame for which there are too few.
    #[inline(always)]
    fn deliver(&mut self, burst: &Burst, which: &[u8], wait: bool) -> Outcome {
        let available = self.available();
        let mut outcome = Outcome::default();
        if !self.runs || self.fault.is_some() {
            outcome.stopped = which.len() as u64;
            self.counters.stopped.add(outcome.stopped);
            return outcome;
        }
        (self.used, self.pending, self.short) = (0, 0, 0);
        let mut done = 0;
        while done < which.len() && self.used < available {
            let placed = self.place_plain(burst, which.get(done..).unwrap_or_default(), available, &mut outcome.tally);
            done += placed;
            outcome.accepted += placed;
            // Once more only behind the end of the ring.
            if placed == 0 || self.ring.index(self.used) != 0 {
                break;
            }
        }
        if done < which.len() {
            self.place_rest(burst, which.get(done..).unwrap_or_default(), available, wait, &mut outcome);
        }
        self.publish(available, &outcome);
        outcome
    }

    /// Fast path: frames of one piece that fit into one buffer, up to the first other one or the end of the ring; returns how
    /// many.
    #[inline(always)]
    fn place_plain(&mut self, burst: &Burst, which: &[u8], available: u32, tally: &mut Tally) -> usize {
        let (Some(sources), Some(memory)) = (burst.plain(), &self.memory) else { return 0 };
        let room = (available - self.used).min(which.len() as u32).min((WRITES - self.pending) as u32);
        let run = self.ring.run(self.used, room);
        self.targets.start(memory);
        let size = self.buffer as u32;
        let addresses = run.iter().map(|[address, _]| Some(address.load(Ordering::Relaxed)));
        let addresses = addresses.map(|address| address.filter(|&address| address != 0).map(|address| (address, size)));
        self.targets.extend::<true>(self.hit, addresses);
        let targets = self.targets.list();
        targets.iter().take(LOOK_AHEAD).for_each(|target| target.prefetch_write::<2>());
        let words = self.words.get_mut(self.pending..).unwrap_or_default();
        // Shorter ones are padded.
        let lens = ethernet::ZLEN..=self.longest.min(self.buffer - self.fcs);
        let tagged = self.vme || self.filter.has_vlans();
        let mut placed = 0;
        for ((&index, &target), word) in which.iter().zip(targets).zip(words) {
            // Not at equal distances, which the CPU's own prefetcher would recognise: it would take the driver's lines.
            if let Some(later) = targets.get((placed ^ 1) + LOOK_AHEAD) {
                later.prefetch_write::<2>();
            }
            let Some((frame, source)) = plain(burst, sources, index) else { break };
            let Some(head) = frame.full_head_apart() else { break };
            let [[a, b, c, d], [e, f, ..], _, [g, h, ..], _] = head;
            let destination = u64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
            let len = frame.len();
            if !lens.contains(&len)
                || self.filter.find(destination) != Match::Exact
                || tagged && u16::from_be_bytes([g, h]) == self.vet
                || !source.skip(HEADROOM).copy_under(head, target, len, true)
            {
                break;
            }
            *word = (len + self.fcs) as u64 | DD | EOP | IXSM;
            tally.add(destination, len, 1, len as u64);
            placed += 1;
        }
        self.pending += placed;
        self.used += placed as u32;
        placed
    }

    /// Writes back what is pending, in order.
    #[inline(always)]
    fn write_back(&mut self) {
        let first = self.used - self.pending as u32;
        // The first one last: the driver, which looks at them in order, finds all of them or none, and is not told that its ring is empty
        // while we fill it.
        for (ahead, &word) in (first..self.used).zip(self.words.iter().take(self.pending)).rev() {
            self.ring.write_back(self.ring.index(ahead), word);
        }
        self.pending = 0;
    }

    /// Publishes the frames and reports what happened. `available`: number of descriptors before.
    #[inline(always)]
    fn publish(&mut self, available: u32, outcome: &Outcome) {
        self.write_back();
        if self.used > 0 {
            self.ring.advance(self.used, &self.shared.rx);
        }
        let threshold = self.ring.count() >> self.threshold;
        let low = available > threshold && available - self.used <= threshold;
        let flag = |set: bool, event: u32| if set { event } else { 0 };
        let events = flag(outcome.tally.frames > 0, event::RECEIVED)
            | flag(low, cause::RXDMT0)
            | flag(outcome.full > 0, cause::RXO);
        if events != 0 {
            self.shared.report(events);
        }
        let (statistics, counters) = (&self.shared.statistics, &self.counters);
        outcome.tally.received(statistics);
        for (register, n) in [(MPC, outcome.full), (RNBC, outcome.full), (ROC, outcome.oversize)] {
            statistics.add(register, n);
        }
        counters.frames.add(outcome.tally.frames);
        counters.bytes.add(outcome.tally.bytes);
        counters.full.add(outcome.full);
        counters.oversize.add(outcome.oversize);
        counters.filtered.add(outcome.filtered);
        counters.offload.add(outcome.offload);
        counters.stopped.add(outcome.stopped);
        counters.bursts.add(1);
    }

    /// Normal path: places the frames one by one.
    #[cold]
    fn place_rest(&mut self, burst: &Burst, which: &[u8], available: u32, wait: bool, outcome: &mut Outcome) {
        for (done, &index) in which.iter().enumerate() {
            let left = which.len() - done;
            match self.place_any(burst, index, available, wait, &mut outcome.tally) {
                Ok(()) => outcome.accepted += 1,
                Err(Refusal::Full) if wait => {
                    outcome.left = left;
                    return;
                }
                Err(Refusal::Full | Refusal::Cut) => outcome.full += 1,
                Err(Refusal::Oversize) => outcome.oversize += 1,
                Err(Refusal::Filtered) => outcome.filtered += 1,
                Err(Refusal::Offload) => outcome.offload += 1,
                Err(Refusal::Fault(fault)) => {
                    outcome.stopped += left as u64;
                    self.stop(fault);
                    return;
                }
            }
        }
    }
}

/// Returns a frame of one piece, with that piece.
#[inline(always)]
fn plain<'b>(burst: &'b Burst, sources: &[Span<'b>], index: u8) -> Option<(&'b Frame, Span<'b>)> {
    let frame = burst.frames().get(usize::from(index))?;
    Some((frame, *sources.get(burst.piece(frame))?))
}

impl Sink for RxQueue {
    /// All: what the driver cannot take, the queue does itself on the way into the driver's buffers. Verified checksums are reported only
    /// if the driver has enabled that in RXCSUM.
    fn support(&self) -> Support {
        let reports = self.rxcsum & (rxcsum::IPOFL | rxcsum::TUOFL) != 0;
        if reports { Support::all() } else { Support::all().difference(Support::VALID) }
    }

    fn cuts(&self) -> bool {
        true
    }

    /// Copies frames to the driver.
    ///
    /// Plain frames of 64 bytes, each in one descriptor: of a quarter of a cache line of descriptor 8 bytes are read and 8 written;
    /// one line of the buffer is written, and one or two of the sender's are read. One copy: 20 bytes from the private head, in
    /// five stores, the other 44 from the sender. Fourteen branches, by the source, that nearly always go the same way: three for
    /// the buffer, three for the frame and its head, two for its length, three for its destination and tag, one for the copy, two
    /// to write back.
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.deliver(burst, which, false).accepted
    }

    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        which.len() - self.deliver(burst, which, true).left
    }

    fn has_room(&mut self, frames: usize) -> bool {
        let available = self.available();
        let wanted = (frames as u32).min(self.ring.count() / 2).max(1).max(self.short);
        // A queue that has stopped drops what it is given.
        !self.runs || self.fault.is_some() || available >= wanted
    }
}

const _: () = assert!(WRITES >= BURST && WRITES >= FRAME_BUFFERS);
