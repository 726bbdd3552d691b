//! Transmit queues: the driver sends, we take.

use super::{FETCH, count_offload};
use crate::{
    control::Interrupts,
    moderation::{Coalesce, Moderation, Notice},
    offload,
};
use ringroad_frame::{
    Burst, Counters, MAX_FRAME, NotAFrame, PIECES,
    offload::{Offload, Support},
};
use ringroad_mem::Table;
use ringroad_ring::{
    Addresses, BURST, Chain, Chains, DeviceRing, Fault, Features as RingFeatures, Inflight, Journal, Resumed,
    SetupError, Tuning,
};
use ringroad_wire::vnet_hdr;
use std::{sync::Arc, time::Duration};

/// Limit for a burst of frames, in bytes, as [`Burst::work`] counts them: the sender's next frames wait for its next turn.
const BURST_BYTES: u64 = 256 << 10;

/// Device end of a transmit queue: the driver sends, we take.
#[derive(Debug)]
pub struct TxQueue {
    ring: DeviceRing,
    memory: Arc<Table>,
    /// Chains of the burst in progress. The burst holds their pieces until it is done.
    chains: Chains,
    /// Chains taken for the next burst, so that their first lines can be prefetched while this one is carried.
    ahead: Chains,
    /// Maximum number of chains to take: fewer than a burst after long frames.
    batch: usize,
    /// Length in bytes of the longest frame that the driver may send.
    limit: usize,
    /// Length of the header in bytes.
    header: usize,
    /// The offloads that the driver may use.
    support: Support,
    tuning: Tuning,
    moderation: Moderation,
    counters: Arc<Counters>,
    /// Number of chains, of those to be taken next, that were counted before they were put back.
    counted: usize,
}

impl TxQueue {
    queue_calls!();

    /// Like `start`, but continues where a former process left the queue, if the journal or the inflight region has a record of
    /// it. Also returns how the position was found.
    ///
    /// # Errors
    /// As for `start`, and [`SetupError::Inflight`] if the inflight region is invalid.
    #[expect(
        clippy::too_many_arguments,
        reason = "a frontend's parameters of a ring, and two places to record its state"
    )]
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
        let list = || Chains::new(BURST, PIECES).read_only();
        let (chains, ahead) = (list(), list());
        let (batch, limit, header) = (BURST, MAX_FRAME, offload::header_len(acked));
        let tuning = Tuning { fast_path: header == vnet_hdr::SIZE, ..Tuning::default() };
        let support = offload::driver_sends(acked);
        let moderation = Moderation::new(size);
        let queue = TxQueue {
            ring,
            memory,
            chains,
            ahead,
            batch,
            limit,
            header,
            support,
            tuning,
            moderation,
            counters,
            counted: 0,
        };
        Ok((queue, resumed))
    }

    /// Takes up to a burst of chains and reads the heads of their frames. Returns the number of chains, which [`TxQueue::done`]
    /// returns to the driver.
    ///
    /// # Errors
    /// The driver's [`Fault`], if it comes first; then the queue is unusable. A fault behind valid frames is returned by the next
    /// call.
    #[inline]
    pub fn take(&mut self, burst: &mut Burst) -> Result<usize, Fault> {
        self.begin(burst);
        match Self::fetch(&mut self.ring, &self.memory, &mut self.chains, &self.tuning, self.batch) {
            Ok(()) if !self.chains.list().is_empty() => {}
            // Do not keep the memory mapped until the next burst.
            nothing => {
                self.chains.clear();
                self.ring.flush();
                return nothing.map(|()| 0);
            }
        }
        let mut bytes = if self.tuning.fast_path { self.read_plain(burst) } else { 0 };
        let mut dropped = Unsuitable::default();
        let distance = self.tuning.distance();
        for index in burst.frames().len()..self.chains.list().len() {
            let Some(&chain) = self.chains.list().get(index) else { break };
            if chain.writable_len() > 0 || chain.readable_len() < self.header as u32 {
                // Frames before it are valid; the next burst begins with it.
                self.ring.untake(&mut self.chains, index);
                if index == 0 {
                    self.chains.clear();
                    self.ring.flush();
                    return Err(fault(&chain, self.header));
                }
                break;
            }
            prefetch(&self.chains, index + distance);
            match self.read_frame(burst, &chain) {
                Ok(len) => bytes += len as u64,
                Err(why) if index >= self.counted => dropped.add(why, index),
                Err(_) => {}
            }
        }
        if bytes > BURST_BYTES || burst.has_offloads() && self.is_long(burst) {
            bytes = self.shorten(burst, &mut dropped);
        } else if self.batch < BURST {
            self.batch = (2 * self.batch).min(BURST);
        }
        burst.weigh(bytes);
        burst.exchange(self.chains.pieces_mut());
        // Should this process die now, its successor does not forward these frames again.
        self.ring.consume();
        // A fault here is reported by the next burst.
        self.ahead.start(&self.memory);
        if self.tuning.fetches() {
            let _ = Self::fetch(&mut self.ring, &self.memory, &mut self.ahead, &self.tuning, self.batch);
            if let Some((_, pieces)) = self.ahead.plain() {
                // The first ones were just fetched.
                burst.announce(pieces.get(self.tuning.distance()..).unwrap_or_default());
            }
        }
        if burst.has_offloads() {
            self.count_offloads(burst);
        }
        let (frames, bytes) =
            if self.counted == 0 { (burst.frames().len() as u64, bytes) } else { self.uncounted(burst) };
        self.counters.frames.add(frames);
        self.counters.bytes.add(bytes);
        if !dropped.is_empty() {
            dropped.count(&self.counters, self.limit);
            burst.refuse(dropped.total());
        }
        self.counters.bursts.add(1);
        Ok(self.chains.list().len())
    }

    /// Begins a burst with the chains that were taken ahead.
    #[inline(always)]
    fn begin(&mut self, burst: &mut Burst) {
        burst.start(self.limit, self.header);
        if burst.has_spare() {
            // What this burst takes, and ahead for the next one.
            self.ring.hand_over(2 * BURST);
        }
        std::mem::swap(&mut self.chains, &mut self.ahead);
        if self.chains.list().is_empty() {
            self.chains.start(&self.memory);
        }
    }

    /// Fast path: reads the heads of the first chains, up to the first unusual one, which is left to `read_frame`, as are all if
    /// one of them has an offload. Returns the total length of the frames in bytes.
    #[inline(always)]
    fn read_plain(&self, burst: &mut Burst) -> u64 {
        let Some((chains, pieces)) = self.chains.plain() else { return 0 };
        let distance = self.tuning.distance();
        let most = (vnet_hdr::SIZE + burst.bound()) as u32;
        let usable = chains.iter().zip(pieces).enumerate().map(|(index, (chain, piece))| {
            if let Some(piece) = pieces.get(index + distance) {
                piece.prefetch::<FETCH>();
            }
            chain.is_readable(most).then_some(*piece)
        });
        // `flags` and `gso_type` of all headers: a branch for each frame would cost more.
        let (bytes, headers) = burst.extend(usable);
        if headers & 0xffff == 0 {
            return bytes;
        }
        burst.remove_frames();
        0
    }

    /// Normal path: reads the head of one chain. Returns the length of its frame in bytes.
    fn read_frame(&self, burst: &mut Burst, chain: &Chain) -> Result<usize, Why> {
        let offload = self.check(burst, chain)?;
        let pieces = self.chains.readable(chain);
        burst.push(pieces, chain.first(), chain.readable_len() as usize, offload).map_err(Why::NotAFrame)
    }

    /// Checks the length of the frame in a chain, and its offload.
    fn check(&self, burst: &Burst, chain: &Chain) -> Result<Offload, Why> {
        let total = chain.readable_len() as usize;
        if chain.clipped {
            return Err(Why::NotAFrame(NotAFrame::Oversize));
        }
        let offload = offload::read_behind(self.chains.readable(chain), self.header, total, self.support);
        let offload = offload.map_err(|_| Why::Refused)?;
        burst.check(total, offload).map(|()| offload).map_err(Why::NotAFrame)
    }

    /// Returns whether the frames are too much for one burst when they are cut.
    fn is_long(&self, burst: &Burst) -> bool {
        (0..burst.frames().len()).map(|index| burst.work(index)).sum::<u64>() > BURST_BYTES
    }

    /// Puts back the frames beyond the limit of one burst, so that other queues get their turn first. Returns the remaining bytes.
    #[cold]
    fn shorten(&mut self, burst: &mut Burst, dropped: &mut Unsuitable) -> u64 {
        let end = burst.cut(BURST_BYTES);
        let chains = self.chains.list();
        let keep = chains.iter().position(|chain| chain.first() >= end).unwrap_or(chains.len());
        self.ring.untake(&mut self.chains, keep);
        self.batch = keep.max(1);
        dropped.truncate(keep);
        burst.bytes()
    }

    /// Returns number and total length of the frames of the burst that were not counted before.
    #[cold]
    fn uncounted(&mut self, burst: &Burst) -> (u64, u64) {
        let chains = self.chains.list();
        let start = chains.get(self.counted).map_or(usize::MAX, Chain::first);
        self.counted = self.counted.saturating_sub(chains.len());
        let frames = burst.frames().iter().filter(|frame| burst.piece(frame) >= start);
        frames.fold((0, 0), |(count, bytes), frame| (count + 1, bytes + frame.len() as u64))
    }

    /// Counts the offloads of the frames of the burst that were not counted before.
    #[inline(never)]
    fn count_offloads(&self, burst: &Burst) {
        let start = self.chains.list().get(self.counted).map_or(usize::MAX, Chain::first);
        for (index, frame) in burst.frames().iter().enumerate().filter(|(_, frame)| burst.piece(frame) >= start) {
            count_offload(&self.counters, burst.offload(index), self.support, frame.len());
        }
    }

    /// Takes the chains that are missing for a burst of `batch` frames and prefetches their first lines. Returns a fault only if
    /// no valid chain precedes it.
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

    /// Returns the burst's chains to the driver. Publishing may be deferred as long as there is more to take.
    #[inline]
    pub fn done(&mut self, burst: &mut Burst) {
        burst.finish(self.chains.pieces_mut());
        self.moderation.count(self.chains.list().len(), burst.bytes(), self.chains.pieces());
        self.ring.give_deferred(self.chains.list());
        self.chains.empty();
    }

    /// Like `done`, but the frames from index `first` on stay with the driver: the next burst begins with them.
    #[cold]
    pub fn retain(&mut self, burst: &mut Burst, first: usize) {
        let start = burst.frames().get(first).map_or(usize::MAX, |frame| burst.piece(frame));
        burst.finish(self.chains.pieces_mut());
        self.ring.untake(&mut self.ahead, 0);
        let chains = self.chains.list();
        let keep = chains.iter().position(|chain| chain.first() >= start).unwrap_or(chains.len());
        self.counted += chains.len() - keep;
        self.ring.untake(&mut self.chains, keep);
        // Their bytes do not matter: the sender waits anyway.
        self.moderation.count(self.chains.list().len(), 0, self.chains.pieces());
        // A successor of this process forwards them.
        self.ring.consume();
        self.ring.give_deferred(self.chains.list());
        self.chains.empty();
    }

    /// Returns whether the driver certainly wants to be notified of published chains now. `false` is not final:
    /// [`TxQueue::settle`] must be called before going idle.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        self.moderation.wants_notification(&mut self.ring)
    }

    /// Publishes deferred chains and decides whether to notify the driver. `now`: time since any fixed point.
    pub fn settle(&mut self, now: Duration) -> Notice {
        self.ring.flush();
        self.moderation.settle(&mut self.ring, now)
    }

    /// Asks the driver to notify us when it sends. Returns `true` if it already has.
    pub fn enable_notification(&mut self) -> bool {
        self.ring.flush();
        self.ring.enable_notification() || !self.ahead.list().is_empty()
    }

    /// Asks the driver not to notify us.
    pub fn disable_notification(&mut self) {
        self.ring.disable_notification()
    }

    /// Puts back chains taken for the next burst and returns where to resume after a stop (GET_VRING_BASE).
    pub fn base(&mut self) -> u32 {
        self.ring.untake(&mut self.ahead, 0);
        self.ring.base()
    }

    /// Like `base`, for a final stop: also returns, unused, chains that a former process had in flight and that have not been
    /// taken again.
    pub fn stop(&mut self) -> u32 {
        self.base();
        self.ring.return_resubmits();
        self.ring.base()
    }

    /// Returns the driver's memory.
    pub fn memory(&self) -> &Arc<Table> {
        &self.memory
    }
}

/// Prefetches the first buffer of a chain.
#[inline(always)]
fn prefetch(chains: &Chains, index: usize) {
    if let Some(piece) = chains.first_piece(index) {
        piece.prefetch::<FETCH>();
    }
}

/// Why a chain holds no frame that can be forwarded.
enum Why {
    NotAFrame(NotAFrame),
    /// Its offload was refused.
    Refused,
}

/// Chains of a burst without a frame that can be forwarded: a bit for each, by its index. Decided once: the driver may have changed
/// the headers since.
#[derive(Default)]
struct Unsuitable {
    runt: u64,
    oversize: u64,
    offload: u64,
}

const _: () = assert!(BURST <= u64::BITS as usize);

impl Unsuitable {
    #[cold]
    fn add(&mut self, why: Why, index: usize) {
        let chains = match why {
            Why::NotAFrame(NotAFrame::Runt) => &mut self.runt,
            Why::NotAFrame(NotAFrame::Oversize) => &mut self.oversize,
            Why::Refused => &mut self.offload,
        };
        *chains |= 1u64.checked_shl(index as u32).unwrap_or_default();
    }

    /// Removes the chains from this index on.
    fn truncate(&mut self, len: usize) {
        let rest = u64::MAX.checked_shl(len as u32).unwrap_or_default();
        [&mut self.runt, &mut self.oversize, &mut self.offload].into_iter().for_each(|chains| *chains &= !rest);
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.runt | self.oversize | self.offload == 0
    }

    fn total(&self) -> usize {
        (self.runt | self.oversize | self.offload).count_ones() as usize
    }

    #[cold]
    fn count(&self, counters: &Counters, limit: usize) {
        let [runt, oversize, offload] =
            [self.runt, self.oversize, self.offload].map(|chains| chains.count_ones().into());
        counters.runt.add(runt);
        let too_long = if limit == 0 { &counters.stopped } else { &counters.oversize };
        too_long.add(oversize);
        counters.offload.add(offload);
    }
}

#[cold]
fn fault(chain: &Chain, header: usize) -> Fault {
    let id = chain.id;
    if chain.writable_len() > 0 {
        Fault::Writable { id }
    } else {
        Fault::Header { id, len: chain.readable_len(), needed: header as u32 }
    }
}
