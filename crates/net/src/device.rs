//! Device end of virtio-net: transmit queues, which frames come from, and receive queues, which they go to. Called by
//! `host`, which has their memory, sockets and notifications.

use crate::features::bits;
use ringroad_frame::{ALL, Burst, Counters, Frame, HEAD, HEADROOM, MAX_FRAME, NotAFrame, PIECES, Rest};
use ringroad_mem::{Span, Table};
use ringroad_ring::{
    Addresses, BURST, Chain, Chains, DeviceRing, Fault, Features as RingFeatures, Inflight, Journal, Resumed,
    SetupError, Tuning,
};
use ringroad_wire::{ethernet, vnet_hdr};
use std::{ops::Range, sync::Arc};

// The header takes the place of a frame's headroom; a burst of frames is one of chains.
const _: () = assert!(vnet_hdr::SIZE == HEADROOM && ringroad_frame::BURST == BURST);

/// Cache lines of a buffer that are prefetched. The CPU foresees those behind them by itself.
const FETCH: usize = 2;

/// A virtio-net header without offloads, for so many receive buffers (5.1.6).
const fn header(num_buffers: u16) -> [u8; vnet_hdr::SIZE] {
    let [low, high] = num_buffers.to_le_bytes();
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, low, high]
}

/// Chains that one burst of receive buffers can have, so that a large frame may be merged from many small ones.
const RX_CHAINS: usize = 256;
/// Spans of them.
const RX_PIECES: u16 = 1024;

/// Bytes of a burst of frames: with those that come after them the sender waits for its next turn.
const BURST_BYTES: u64 = 256 << 10;
/// Pieces of receive buffers that a burst may use or look at. What has not found room by then is dropped: a receiver whose
/// buffers are in so many pieces would cost the others' time.
const BURST_PIECES: usize = 2048;

/// A transmit queue: the driver sends, we take.
pub struct TxQueue {
    ring: DeviceRing,
    memory: Arc<Table>,
    /// Of the burst that is on its way. Their pieces are the burst's until it is done.
    chains: Chains,
    /// Taken for the next burst, so that what it needs can come while this one is carried.
    ahead: Chains,
    /// How many that are at most: fewer than a burst after frames that were long.
    batch: usize,
    /// Bytes of the longest frame that the driver may send.
    limit: usize,
    tuning: Tuning,
    counters: Arc<Counters>,
}

impl TxQueue {
    /// Starts it with the feature bits that the driver has acknowledged.
    pub fn start(
        memory: Arc<Table>,
        acked: u64,
        size: u32,
        at: Addresses,
        base: u32,
        counters: Arc<Counters>,
    ) -> Result<Self, SetupError> {
        Ok(Self::resume(memory, acked, size, at, base, counters, Journal::NONE, Inflight::NONE)?.0)
    }

    /// The same, where a former process has left it, if the journal or the inflight region knows of it.
    #[expect(clippy::too_many_arguments, reason = "what a frontend says of a ring, and two places to note it")]
    pub fn resume(
        memory: Arc<Table>,
        acked: u64,
        size: u32,
        at: Addresses,
        base: u32,
        counters: Arc<Counters>,
        journal: Journal,
        inflight: Inflight,
    ) -> Result<(Self, Resumed), SetupError> {
        let (ring, resumed) =
            DeviceRing::resume(&memory, RingFeatures::negotiated(acked), size, at, base, journal, inflight)?;
        let (chains, ahead) = (Chains::new(BURST, PIECES), Chains::new(BURST, PIECES));
        let (batch, limit, tuning) = (BURST, MAX_FRAME, Tuning::default());
        Ok((TxQueue { ring, memory, chains, ahead, batch, limit, tuning, counters }, resumed))
    }

    /// Frames with more bytes, from the destination address to the end of the payload, are dropped and counted.
    pub fn limit(&mut self, frame: usize) {
        self.limit = frame;
    }

    /// Turns off what should be off.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
        self.ring.tune(tuning);
    }

    /// Takes up to a burst of chains and reads the heads of their frames. Says how many chains there are to be given back
    /// by [`TxQueue::done`]. After a fault the queue is of no use.
    #[inline]
    pub fn take(&mut self, burst: &mut Burst) -> Result<usize, Fault> {
        burst.start(self.limit, vnet_hdr::SIZE);
        std::mem::swap(&mut self.chains, &mut self.ahead);
        if self.chains.list().is_empty() {
            self.chains.start(&self.memory);
        }
        match Self::fetch(&mut self.ring, &self.memory, &mut self.chains, &self.tuning, self.batch) {
            Ok(()) if !self.chains.list().is_empty() => {}
            // The memory may be gone before there is another burst.
            nothing => {
                self.chains.clear();
                self.ring.flush();
                return nothing.map(|()| 0);
            }
        }
        let taken = self.chains.list().len();
        let mut bytes = if self.tuning.fast_path { self.read_plain(burst) } else { 0 };
        let (mut runts, mut oversize, distance) = (0, 0, self.tuning.distance());
        for index in burst.frames().len()..taken {
            let Some(&chain) = self.chains.list().get(index) else { break };
            if chain.writable_len() > 0 || chain.readable_len() < vnet_hdr::SIZE as u32 {
                // What came before it is good; at the next burst it comes first.
                self.ring.untake(&mut self.chains, index);
                if index == 0 {
                    self.chains.clear();
                    self.ring.flush();
                    return Err(fault(&chain));
                }
                break;
            }
            prefetch(&self.chains, index + distance);
            match self.read_frame(burst, &chain) {
                Ok(len) => bytes += len as u64,
                Err(NotAFrame::Runt) => runts += 1,
                Err(NotAFrame::Oversize) => oversize += 1,
            }
        }
        if bytes > BURST_BYTES {
            (bytes, runts, oversize) = self.shorten(burst);
        } else if self.batch < BURST {
            self.batch = (2 * self.batch).min(BURST);
        }
        burst.weigh(bytes);
        burst.exchange(self.chains.pieces_mut());
        // Whatever becomes of this process now, these frames go out once at most.
        self.ring.consume();
        // A fault in there is the next burst's.
        self.ahead.start(&self.memory);
        if self.tuning.fetches() {
            let _ = Self::fetch(&mut self.ring, &self.memory, &mut self.ahead, &self.tuning, self.batch);
        }
        self.counters.frames.add(burst.frames().len() as u64);
        self.counters.bytes.add(bytes);
        self.counters.runt.add(runts);
        self.counters.oversize.add(oversize);
        self.counters.bursts.add(1);
        Ok(self.chains.list().len())
    }

    /// The fast path: reads the heads of the first chains, as far as nothing is special about them. Returns how many bytes the frames
    /// have. The rest is for `read_frame`.
    #[inline(always)]
    fn read_plain(&self, burst: &mut Burst) -> u64 {
        let Some((chains, pieces)) = self.chains.plain() else { return 0 };
        let distance = self.tuning.distance();
        let most = (vnet_hdr::SIZE + burst.bound()) as u32;
        let frames = chains.iter().zip(pieces).enumerate().map(|(index, (chain, piece))| {
            if let Some(piece) = pieces.get(index + distance) {
                piece.prefetch::<FETCH>();
            }
            let head = piece.read_once::<HEAD>().filter(|_| chain.is_readable(most))?;
            Some((head, piece.len() as u32))
        });
        burst.extend(frames)
    }

    /// The normal path: reads the head of one chain. Returns how many bytes its frame has.
    fn read_frame(&self, burst: &mut Burst, chain: &Chain) -> Result<usize, NotAFrame> {
        check(burst, chain)?;
        burst.push(self.chains.readable(chain), chain.first(), chain.readable_len() as usize)
    }

    /// Puts the frames back that are too much for one burst, so that others have their turn before them. Says how many bytes
    /// are left, and how many of the chains are no frames as they are too short or too long.
    #[cold]
    fn shorten(&mut self, burst: &mut Burst) -> (u64, u64, u64) {
        let end = burst.cut(BURST_BYTES);
        let chains = self.chains.list();
        let keep = chains.iter().position(|chain| chain.first() >= end).unwrap_or(chains.len());
        self.ring.untake(&mut self.chains, keep);
        self.batch = keep.max(1);
        let (mut runts, mut oversize) = (0, 0);
        for chain in self.chains.list() {
            match check(burst, chain) {
                Ok(()) => {}
                Err(NotAFrame::Runt) => runts += 1,
                Err(NotAFrame::Oversize) => oversize += 1,
            }
        }
        let bytes = burst.bytes();
        (bytes, runts, oversize)
    }

    /// Takes what is missing for a burst of `batch` frames and fetches its first lines. A fault is reported when it comes
    /// first.
    #[inline(always)]
    fn fetch(
        ring: &mut DeviceRing,
        memory: &Table,
        chains: &mut Chains,
        tuning: &Tuning,
        batch: usize,
    ) -> Result<(), Fault> {
        let there = chains.list().len();
        if there < batch {
            match ring.take(memory, chains, batch - there) {
                Err(fault) if there == 0 => return Err(fault),
                _ => {}
            }
            (there..tuning.prefetch.into()).for_each(|index| prefetch(chains, index));
        }
        Ok(())
    }

    /// Gives the burst's chains back. The driver may see them later, as long as there is more to take.
    #[inline]
    pub fn done(&mut self, burst: &mut Burst) {
        burst.finish(self.chains.pieces_mut());
        self.ring.give_deferred(self.chains.list());
        self.chains.empty();
    }

    /// Whether the driver wants to be notified of what was given back and what it sees. An unsure `false` has to be asked for
    /// again; who wants to be sure shows it everything first.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        if sure {
            self.ring.flush();
        }
        self.ring.wants_notification(sure)
    }

    /// Asks to be notified when the driver sends. `true`: it already has.
    pub fn enable_notification(&mut self) -> bool {
        self.ring.flush();
        self.ring.enable_notification() || !self.ahead.list().is_empty()
    }

    /// Asks not to be notified.
    pub fn disable_notification(&mut self) {
        self.ring.disable_notification()
    }

    /// Where to go on after a stop. Chains that were taken for the next burst go back.
    pub fn base(&mut self) -> u32 {
        self.ring.untake(&mut self.ahead, 0);
        self.ring.base()
    }

    /// The same for good: what a former process had in flight and has not been taken since goes back empty.
    pub fn stop(&mut self) -> u32 {
        self.base();
        self.ring.return_resubmits();
        self.ring.base()
    }

    /// The driver's memory.
    pub fn memory(&self) -> &Arc<Table> {
        &self.memory
    }
}

/// Fetches the first lines of a buffer that will be written. `apart`: the one with the virtio-net header is only read.
#[inline(always)]
fn fetch_target<const WRITE: bool>(target: Span<'_>, apart: bool) {
    match (WRITE, apart) {
        (true, true) => {
            target.prefetch::<1>();
            target.skip(vnet_hdr::SIZE).prefetch_write::<1>();
        }
        (true, false) => target.prefetch_write::<FETCH>(),
        (false, _) => target.prefetch::<FETCH>(),
    }
}

/// Fetches the first buffer of a chain.
#[inline(always)]
fn prefetch(chains: &Chains, index: usize) {
    if let Some(piece) = chains.first_piece(index) {
        piece.prefetch::<FETCH>();
    }
}

/// Checks that a chain is a frame.
fn check(burst: &Burst, chain: &Chain) -> Result<(), NotAFrame> {
    burst.check(chain.readable_len() as usize)?;
    if chain.clipped { Err(NotAFrame::Oversize) } else { Ok(()) }
}

#[cold]
fn fault(chain: &Chain) -> Fault {
    let id = chain.id;
    if chain.writable_len() > 0 {
        Fault::Writable { id }
    } else {
        Fault::Header { id, len: chain.readable_len(), needed: vnet_hdr::SIZE as u32 }
    }
}

/// Copies frames as far as each is in one piece and fits; says how many. `later`: what comes after `targets` in a while.
/// `APART`: the virtio-net header has a line of its own, as with DPDK's drivers, and is nearly always the same: that line is
/// only read. `WRITE`, `SMALL`: `Tuning::prefetch_write`, `Tuning::small_copy`.
#[inline(always)]
fn place_part<'b, const APART: bool, const WRITE: bool, const SMALL: bool>(
    frames: impl ExactSizeIterator<Item = Option<(&'b Frame, Span<'b>)>>,
    chains: &mut [Chain],
    targets: &[Span<'_>],
    later: &[Span<'_>],
) -> usize {
    let mut count = 0;
    for ((frame, chain), &target) in frames.zip(chains).zip(targets) {
        if let Some(&later) = later.get(count) {
            fetch_target::<WRITE>(later, APART);
        }
        let Some((frame, source)) = frame else { break };
        let total = frame.extent();
        if chain.readable_len() > 0 || target.len() < total {
            break;
        }
        let copied = if APART {
            let Some(rest) = frame.full_head_apart() else { break };
            let (source, after) = (source.skip(vnet_hdr::SIZE), target.skip(vnet_hdr::SIZE));
            target.update(const { header(1) }) && source.copy_under(rest, after, total - vnet_hdr::SIZE, SMALL)
        } else {
            let Some(head) = frame.full_head(const { header(1) }) else { break };
            source.copy_under(head, target, total, SMALL)
        };
        if !copied {
            break;
        }
        chain.written = total as u32;
        count += 1;
    }
    count
}

/// A receive queue: we put, the driver receives.
pub struct RxQueue {
    ring: DeviceRing,
    memory: Arc<Table>,
    chains: Chains,
    /// How many of them the driver has got back already.
    given: usize,
    /// Pieces of the chains that were used or put back during this burst.
    walked: usize,
    /// Bytes of the longest frame that the driver receives.
    limit: usize,
    mergeable: bool,
    tuning: Tuning,
    counters: Arc<Counters>,
}

impl RxQueue {
    /// Starts it with the feature bits that the driver has acknowledged.
    pub fn start(
        memory: Arc<Table>,
        acked: u64,
        size: u32,
        at: Addresses,
        base: u32,
        counters: Arc<Counters>,
    ) -> Result<Self, SetupError> {
        Ok(Self::resume(memory, acked, size, at, base, counters, Journal::NONE, Inflight::NONE)?.0)
    }

    /// The same, where a former process has left it, if the journal or the inflight region knows of it.
    #[expect(clippy::too_many_arguments, reason = "what a frontend says of a ring, and two places to note it")]
    pub fn resume(
        memory: Arc<Table>,
        acked: u64,
        size: u32,
        at: Addresses,
        base: u32,
        counters: Arc<Counters>,
        journal: Journal,
        inflight: Inflight,
    ) -> Result<(Self, Resumed), SetupError> {
        let features = RingFeatures::negotiated(acked);
        let (mut ring, resumed) = DeviceRing::resume(&memory, features, size, at, base, journal, inflight)?;
        // New buffers are found when there is something to put into them.
        ring.disable_notification();
        let mergeable = acked & bits::NET_F_MRG_RXBUF != 0;
        let chains = Chains::new(RX_CHAINS, RX_PIECES);
        let (tuning, limit) = (Tuning::default(), MAX_FRAME);
        Ok((RxQueue { ring, memory, chains, given: 0, walked: 0, limit, mergeable, tuning, counters }, resumed))
    }

    /// Frames with more bytes, from the destination address to the end of the payload, are dropped and counted.
    pub fn limit(&mut self, frame: usize) {
        self.limit = frame;
    }

    /// Turns off what should be off.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
        self.ring.tune(tuning);
    }

    /// Copies frames to the driver and publishes them. What does not fit is dropped and counted. After a fault the queue
    /// is of no use, and none of the frames has been counted.
    #[inline]
    pub fn put(&mut self, burst: &Burst, which: &[u8]) -> Result<usize, Fault> {
        if self.tuning.prefetch_write {
            self.put_tuned::<true>(burst, which)
        } else {
            self.put_tuned::<false>(burst, which)
        }
    }

    /// `WRITE`: `Tuning::prefetch_write`.
    #[inline(always)]
    fn put_tuned<const WRITE: bool>(&mut self, burst: &Burst, which: &[u8]) -> Result<usize, Fault> {
        let (mut short, all) = ([0; BURST], which.len());
        let which = if burst.bound() > self.limit { self.fitting(burst, which, &mut short) } else { which };
        self.want::<WRITE>(which.len())?;
        self.walked = 0;
        let frame = |index: u8| burst.frames().get(index as usize);
        let (mut used, mut bytes) =
            if self.tuning.fast_path { self.place_plain::<WRITE>(burst, which) } else { (0, 0) };
        let (mut frames, mut full, mut stopped) = (used as u64, 0u64, 0u64);
        let mut oversize = (all - which.len()) as u64;
        let (mut fault, distance) = (None, self.tuning.distance());
        for (done, &index) in which.iter().enumerate().skip(used) {
            let Some(frame) = frame(index) else { continue };
            let left = which.len() - done;
            if self.walked > BURST_PIECES {
                full += left as u64;
                break;
            }
            if used == self.chains.list().len() {
                match self.more(&mut used, left) {
                    Ok(0) => {
                        full += left as u64;
                        break;
                    }
                    Ok(_) => {}
                    Err(found) => {
                        (fault, stopped) = (Some(found), left as u64);
                        break;
                    }
                }
            }
            self.prefetch::<WRITE>(used + distance);
            let mut placed = self.place(burst, index, used);
            if let Err(Refusal::Crowded) = placed {
                self.give(&mut used);
                placed = self.place(burst, index, used);
            }
            match placed {
                Ok(count) => {
                    used += count;
                    frames += 1;
                    bytes += frame.len() as u64;
                }
                Err(Refusal::Full | Refusal::Crowded) => full += 1,
                Err(Refusal::Oversize) => oversize += 1,
                Err(Refusal::Fault(found)) => {
                    (fault, stopped) = (Some(found), left as u64);
                    break;
                }
            }
        }
        self.give(&mut used);
        // What the next burst will write to can come meanwhile. A fault in there is that burst's.
        if self.tuning.fetches() {
            let _ = self.want::<WRITE>(which.len());
        }
        if let Some(fault) = fault
            && frames == 0
        {
            return Err(fault);
        }
        // A fault after good frames comes first at the next burst.
        let counters = &self.counters;
        counters.frames.add(frames);
        counters.bytes.add(bytes);
        counters.full.add(full);
        counters.oversize.add(oversize);
        counters.stopped.add(stopped);
        counters.bursts.add(1);
        Ok(frames as usize)
    }

    /// Those of the frames that are not too long.
    #[cold]
    fn fitting<'s>(&self, burst: &Burst, which: &[u8], short: &'s mut [u8; BURST]) -> &'s [u8] {
        let fits = |index: u8| burst.frames().get(usize::from(index)).is_some_and(|frame| frame.len() <= self.limit);
        let mut count = 0;
        for (place, &index) in short.iter_mut().zip(which.iter().filter(|&&index| fits(index))) {
            *place = index;
            count += 1;
        }
        short.get(..count).unwrap_or_default()
    }

    /// Sees that there are `count` chains, as far as the driver has so many.
    #[inline(always)]
    fn want<const WRITE: bool>(&mut self, count: usize) -> Result<(), Fault> {
        let there = self.chains.list().len();
        if there == 0 {
            self.chains.start(&self.memory);
        }
        if there < count {
            match self.ring.take(&self.memory, &mut self.chains, count - there) {
                Err(fault) if there == 0 => return Err(fault),
                _ => {}
            }
            // Those after them have their turn while frames are copied.
            (there..self.tuning.prefetch.into()).for_each(|index| self.prefetch::<WRITE>(index));
        }
        Ok(())
    }

    /// Fetches the first buffer of a chain that was taken for writing.
    #[inline(always)]
    fn prefetch<const WRITE: bool>(&self, index: usize) {
        if let Some(piece) = self.chains.first_piece(index) {
            fetch_target::<WRITE>(piece, piece.ends_line(vnet_hdr::SIZE));
        }
    }

    /// Takes up to `max` more chains; says how many. Where our own list has no room for them, the `used` ones go first.
    fn more(&mut self, used: &mut usize, max: usize) -> Result<usize, Fault> {
        let more = self.ring.take(&self.memory, &mut self.chains, max)?;
        if more > 0 || *used == 0 {
            return Ok(more);
        }
        self.give(used);
        self.ring.take(&self.memory, &mut self.chains, max)
    }

    /// Gives the first `used` chains to the driver, puts the others back, and starts an empty list.
    #[inline(always)]
    fn give(&mut self, used: &mut usize) {
        self.walked += self.chains.pieces();
        self.ring.untake(&mut self.chains, *used);
        self.ring.give(self.chains.list().get(self.given..).unwrap_or_default());
        self.given = 0;
        self.chains.start(&self.memory);
        *used = 0;
    }

    /// The fast path: copies the first frames, as far as each lies in one piece and fits into one. Says how many, and how
    /// many bytes they have. What comes then is for `place`.
    #[inline(always)]
    fn place_plain<const WRITE: bool>(&mut self, burst: &Burst, which: &[u8]) -> (usize, u64) {
        let frames = burst.frames();
        let Some(sources) = burst.plain() else { return (0, 0) };
        if sources.len() == frames.len() && ALL.get(..frames.len()) == Some(which) {
            // Each piece is a frame, and all of them go here.
            return self.place_all::<WRITE, _>(which.len(), |part| {
                let sources = sources.get(part.clone()).unwrap_or_default();
                let frames = frames.get(part).unwrap_or_default();
                frames.iter().zip(sources).map(|(frame, &source)| Some((frame, source)))
            });
        }
        self.place_all::<WRITE, _>(which.len(), |part| {
            which.get(part).unwrap_or_default().iter().map(|&index| {
                let frame = frames.get(index as usize)?;
                Some((frame, *sources.get(burst.piece(frame))?))
            })
        })
    }

    /// The same for `count` frames, which `frames` returns part by part. Not inlined: its loop needs all registers.
    #[inline(never)]
    fn place_all<'b, const WRITE: bool, F>(&mut self, count: usize, frames: impl Fn(Range<usize>) -> F) -> (usize, u64)
    where
        F: ExactSizeIterator<Item = Option<(&'b Frame, Span<'b>)>>,
    {
        let (distance, small) = (self.tuning.distance(), self.tuning.small_copy);
        let Some((chains, targets)) = self.chains.plain_mut() else { return (0, 0) };
        let most = count.min(chains.len()).min(targets.len());
        let (Some(chains), Some(targets)) = (chains.get_mut(..most), targets.get(..most)) else { return (0, 0) };
        // Where the driver has put the first buffer says where it puts others, nearly always; if not, what is done is the
        // same.
        let apart = targets.first().is_some_and(|target| target.ends_line(vnet_hdr::SIZE));
        let mut done = 0;
        while done < most {
            // A full burst: we are behind, and the driver takes more at once the fewer parts there are. Else it waits for us,
            // and the first line of the ring is worth more to it now than all of them later.
            let part = if count == BURST { most } else { (done + self.ring.left_in_line()).min(most) };
            let (chains, frames) = (chains.get_mut(done..part).unwrap_or_default(), frames(done..part));
            let later = targets.get(done + distance..).unwrap_or_default();
            let targets = targets.get(done..part).unwrap_or_default();
            let placed = match (small, apart) {
                (true, false) => place_part::<false, WRITE, true>(frames, chains, targets, later),
                (true, true) => place_part::<true, WRITE, true>(frames, chains, targets, later),
                (false, false) => place_part::<false, WRITE, false>(frames, chains, targets, later),
                (false, true) => place_part::<true, WRITE, false>(frames, chains, targets, later),
            };
            done += placed;
            if done < part || done == most {
                break;
            }
            self.ring.give(chains);
            self.given = done;
        }
        let placed = chains.get(..done).unwrap_or_default();
        let bytes: u64 = placed.iter().map(|chain| u64::from(chain.written)).sum();
        (done, bytes - (done * vnet_hdr::SIZE) as u64)
    }

    /// The normal path: copies one frame into chains of any shape, as many as it needs from this one on; says how many.
    fn place(&mut self, burst: &Burst, index: u8, first: usize) -> Result<usize, Refusal> {
        let Some(frame) = burst.frames().get(usize::from(index)) else { return Err(Refusal::Full) };
        // First see that there are enough, then copy: what is not given back must stay untouched.
        let count = self.reserve(first, frame.extent())?;
        let (mut head, head_len) = frame.head();
        if let Some(headroom) = head.first_chunk_mut() {
            *headroom = header(count as u16);
        }
        let head = head.get(..head_len).unwrap_or_default();
        let mut source = Pieces { head, rest: burst.rest(index.into()), current: None };
        for index in first..first + count {
            let Some(&chain) = self.chains.list().get(index) else { break };
            let written = self.chains.writable(&chain).iter().map(|&target| source.fill(target)).sum::<usize>();
            if let Some(chain) = self.chains.list_mut().get_mut(index) {
                chain.written = written as u32;
            }
        }
        Ok(count)
    }

    /// Takes chains until those from the `first` one on have room for `total` bytes; says how many that are.
    fn reserve(&mut self, first: usize, total: usize) -> Result<usize, Refusal> {
        let (mut count, mut room) = (0, 0);
        while room < total {
            if count > 0 && !self.mergeable {
                return Err(Refusal::Oversize);
            }
            if first + count == self.chains.list().len() {
                match self.ring.take(&self.memory, &mut self.chains, 1) {
                    Ok(0) if first > 0 => return Err(Refusal::Crowded),
                    Ok(0) if self.chains.room() == 0 => return Err(Refusal::Oversize),
                    Ok(0) => return Err(Refusal::Full),
                    Ok(_) => {}
                    Err(fault) => return Err(Refusal::Fault(fault)),
                }
            }
            let Some(&chain) = self.chains.list().get(first + count) else { return Err(Refusal::Full) };
            let (id, len, needed) = (chain.id, chain.writable_len(), vnet_hdr::SIZE as u32);
            if chain.readable_len() > 0 {
                return Err(Refusal::Fault(Fault::Readable { id }));
            }
            if len < needed {
                return Err(Refusal::Fault(Fault::Header { id, len, needed }));
            }
            if chain.clipped {
                return Err(Refusal::Oversize);
            }
            room += len as usize;
            count += 1;
        }
        Ok(count)
    }

    /// Receives up to a burst of frames straight into the driver's buffers and publishes them: for a source that does not
    /// know what it has before it has read it. `read` gets spans for `room` bytes or more; it returns how many it has
    /// written, a virtio-net header first, or more than there was room for if the frame was longer, or `None` if there
    /// is nothing left. Says how many frames that were, or `None` if there are no such buffers and nothing was read.
    pub fn fill(
        &mut self,
        room: usize,
        read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>,
    ) -> Result<Option<usize>, Fault> {
        self.ring.untake(&mut self.chains, 0);
        self.chains.start(&self.memory);
        let (mut used, mut frames, mut bytes, mut oversize, mut runts) = (0, 0, 0, 0, 0);
        let mut refusal = None;
        for _ in 0..BURST {
            let count = match self.reserve(used, room) {
                Ok(count) => count,
                Err(found) => {
                    refusal = Some(found);
                    break;
                }
            };
            let Some(len) = read(self.chains.writable_range(used, count)) else { break };
            if len > vnet_hdr::SIZE + self.limit {
                oversize += 1;
                continue;
            }
            if len < vnet_hdr::SIZE + ethernet::HEADER {
                runts += 1;
                continue;
            }
            match self.divide(used, count, len) {
                Some(count) => {
                    used += count;
                    frames += 1;
                    bytes += len - vnet_hdr::SIZE;
                }
                None => oversize += 1,
            }
        }
        self.give(&mut used);
        self.chains.clear();
        let counters = &self.counters;
        counters.frames.add(frames);
        counters.bytes.add(bytes as u64);
        counters.oversize.add(oversize);
        counters.runt.add(runts);
        counters.bursts.add(u64::from(frames > 0));
        match refusal {
            Some(Refusal::Fault(fault)) if frames == 0 => Err(fault),
            Some(_) if frames + oversize + runts == 0 => Ok(None),
            _ => Ok(Some(frames as usize)),
        }
    }

    /// Notes in up to `count` chains what a frame of `len` bytes has taken of each, and writes its header; says how many
    /// it has taken. `None`: it was longer than all of them.
    fn divide(&mut self, first: usize, count: usize, len: usize) -> Option<usize> {
        let mut left = len;
        let mut taken = 0;
        while left > 0 && taken < count {
            let chain = self.chains.list_mut().get_mut(first + taken)?;
            chain.written = chain.writable_len().min(left as u32);
            left -= chain.written as usize;
            taken += 1;
        }
        if left > 0 {
            return None;
        }
        let header = header(taken as u16);
        let mut header = &header[..];
        for piece in self.chains.writable_range(first, 1) {
            header = header.get(piece.write(header)..).unwrap_or_default();
        }
        Some(taken)
    }

    /// Whether the driver wants to be notified of what was put. An unsure `false` has to be asked for again.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        self.ring.wants_notification(sure)
    }

    /// Where to go on after a stop. Chains that were taken for the next burst go back.
    pub fn base(&mut self) -> u32 {
        self.ring.untake(&mut self.chains, 0);
        self.ring.base()
    }

    /// The same for good: what a former process had in flight and has not been taken since goes back empty.
    pub fn stop(&mut self) -> u32 {
        self.base();
        self.ring.return_resubmits();
        self.ring.base()
    }

    /// The driver's memory.
    pub fn memory(&self) -> &Arc<Table> {
        &self.memory
    }
}

/// Why a frame was not placed.
enum Refusal {
    /// Not enough buffers now.
    Full,
    /// Not enough beside those of the frames before it.
    Crowded,
    /// It never fits.
    Oversize,
    /// The driver has broken the queue.
    Fault(Fault),
}

/// A frame as a stream of bytes: its private head, then the sender's pieces.
struct Pieces<'a> {
    head: &'a [u8],
    rest: Rest<'a>,
    current: Option<Span<'a>>,
}

impl Pieces<'_> {
    /// Copies as much as the target holds; says how much that was.
    fn fill(&mut self, mut target: Span<'_>) -> usize {
        let head = target.write(self.head);
        self.head = self.head.get(head..).unwrap_or_default();
        target = target.skip(head);
        let mut done = head;
        while !target.is_empty() {
            let Some(piece) = self.current.take().or_else(|| self.rest.next()) else { break };
            let copied = piece.copy_to(target);
            target = target.skip(copied);
            done += copied;
            self.current = Some(piece.skip(copied)).filter(|rest| !rest.is_empty());
        }
        done
    }
}
