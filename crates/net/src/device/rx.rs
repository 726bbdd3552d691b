//! Receive queues: we put, the driver receives.

mod acks;
mod fill;
mod place;
mod room;

use super::count_offload;
use crate::{
    control::Interrupts,
    features::bits,
    filter::Filter,
    moderation::{Coalesce, Moderation, Notice},
    offload,
    rss::Rss,
};
use acks::Acks;
use ringroad_frame::{Burst, Counters, HEADROOM, MAX_FRAME, offload::Support};
use ringroad_mem::Table;
use ringroad_ring::{
    Addresses, BURST, Chains, DeviceRing, Fault, Features as RingFeatures, Inflight, Journal, Resumed, SetupError,
    Tuning,
};
use ringroad_wire::vnet_hdr;
use std::{sync::Arc, time::Duration};

/// Returns a virtio-net header without offloads (5.1.6).
const fn header(num_buffers: u16) -> [u8; vnet_hdr::SIZE] {
    let [low, high] = num_buffers.to_le_bytes();
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, low, high]
}

/// Capacity in chains of a burst of receive buffers, so that a large frame can be spread over many small buffers.
const RX_CHAINS: usize = 256;
/// Capacity in spans of a burst of receive buffers.
const RX_PIECES: u16 = 1024;

/// Limit for the pieces of receive buffers that a burst uses or looks at. The remaining frames are dropped: a receiver whose
/// buffers are in very many pieces would take time from the others.
const BURST_PIECES: usize = 2048;

/// Device end of a receive queue: we put, the driver receives.
#[derive(Debug)]
pub struct RxQueue {
    ring: DeviceRing,
    memory: Arc<Table>,
    chains: Chains,
    /// How many of them have already been returned to the driver.
    given: usize,
    /// Pieces of the chains that were used or put back during this burst.
    walked: usize,
    /// Number of chains that there were when a frame found too few; `None` if none did since the driver was last asked to notify.
    short: Option<usize>,
    /// Number of entries of the ring.
    size: usize,
    /// Length in bytes of the longest frame that the driver receives.
    limit: usize,
    mergeable: bool,
    /// Length of the header in bytes.
    header: usize,
    /// Whether hashes are reported in it.
    hashes: bool,
    /// How hashes are computed for it, if it has them; `None`: there are none.
    hash: Option<Arc<Rss>>,
    /// The offloads that the driver takes.
    support: Support,
    /// Which frames it receives; `None`: all.
    filter: Option<Arc<Filter>>,
    tuning: Tuning,
    moderation: Moderation,
    acks: Acks,
    counters: Arc<Counters>,
}

impl RxQueue {
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
        let features = RingFeatures::negotiated(acked);
        let (mut ring, resumed) = DeviceRing::resume(&memory, features, size, at, base, journal, inflight)?;
        // We look for new buffers when there are frames to put into them.
        ring.disable_notification();
        let mergeable = acked & bits::NET_F_MRG_RXBUF != 0;
        let chains = Chains::new(RX_CHAINS, RX_PIECES);
        let (header, limit) = (offload::header_len(acked), MAX_FRAME);
        let tuning = Tuning { fast_path: header == vnet_hdr::SIZE, ..Tuning::default() };
        let support = offload::driver_takes(acked);
        let queue = RxQueue {
            ring,
            memory,
            chains,
            given: 0,
            walked: 0,
            short: None,
            size: size as usize,
            limit,
            mergeable,
            header,
            hashes: acked & bits::NET_F_HASH_REPORT != 0,
            hash: None,
            support,
            filter: None,
            tuning,
            moderation: Moderation::new(size),
            acks: Acks::new(size),
            counters,
        };
        Ok((queue, resumed))
    }

    /// Returns the offloads that frames put here may have.
    pub fn support(&self) -> Support {
        self.support
    }

    /// Sets how the hashes are computed that frames are reported with, if the driver has negotiated that.
    pub fn report(&mut self, hash: Option<&Arc<Rss>>) {
        self.hash = hash.filter(|_| self.hashes).cloned();
    }

    /// Applies what the driver has asked for on the control queue: which frames it receives, and the offloads it takes.
    pub fn control(&mut self, filter: &Arc<Filter>, support: Support) {
        self.filter = (!filter.passes_all()).then(|| filter.clone());
        self.support = support;
    }

    /// Copies the frames with these indices to the driver and publishes them; returns how many. Frames that do not fit are
    /// dropped and counted. Their offloads must be among [`RxQueue::support`].
    ///
    /// # Errors
    /// The driver's [`Fault`], if no frame was put; then the queue is unusable and no frame was counted. A fault behind good
    /// frames is returned by the next call.
    #[inline]
    pub fn put(&mut self, burst: &Burst, which: &[u8]) -> Result<usize, Fault> {
        let (accepted, left) = self.deliver(burst, which, false)?;
        self.counters.full.add(left as u64);
        Ok(accepted)
    }

    /// Like `put`, but stops at the first frame for which there are too few buffers now: that frame and those behind it are
    /// neither accepted nor counted. Returns how many of `which` were handled, that is accepted or dropped.
    ///
    /// # Errors
    /// As for `put`.
    #[inline]
    pub fn offer(&mut self, burst: &Burst, which: &[u8]) -> Result<usize, Fault> {
        let (_, left) = self.deliver(burst, which, true)?;
        Ok(which.len() - left)
    }

    /// Copies frames to the driver and publishes them. Returns how many, and how many are left because there are too few buffers
    /// now: with `wait` all behind the first such frame.
    #[inline(always)]
    fn deliver(&mut self, burst: &Burst, which: &[u8], wait: bool) -> Result<(usize, usize), Fault> {
        if self.tuning.prefetch_write {
            self.put_tuned::<true>(burst, which, wait)
        } else {
            self.put_tuned::<false>(burst, which, wait)
        }
    }

    /// `WRITE`: `Tuning::prefetch_write`.
    #[inline(always)]
    fn put_tuned<const WRITE: bool>(
        &mut self,
        burst: &Burst,
        which: &[u8],
        wait: bool,
    ) -> Result<(usize, usize), Fault> {
        let (mut suitable, all) = (None, which);
        let picks = burst.bound() > self.limit || self.filter.is_some();
        let which = if picks { self.suitable(burst, which, suitable.insert([0; BURST])) } else { which };
        if burst.has_spare() {
            // What this burst takes now, and below for the next one.
            self.ring.hand_over(2 * which.len());
        }
        self.want::<WRITE>(which.len())?;
        self.walked = 0;
        let (mut used, bytes) = if self.tuning.fast_path { self.place_plain::<WRITE>(burst, which) } else { (0, 0) };
        let mut tally = Tally { frames: used as u64, bytes, ..Tally::default() };
        if used < which.len() {
            self.place_rest::<WRITE>(burst, which, wait, &mut used, &mut tally);
        }
        if which.len() < all.len() {
            self.drop_others(burst, all, which, wait, &mut tally);
        }
        let placed = used;
        if burst.has_spare() {
            self.demote(placed);
        }
        self.give(&mut used);
        if burst.has_spare() {
            self.ring.demote_used(placed);
        }
        // Prefetch what the next burst will write to. A fault here is reported by that burst.
        if self.tuning.fetches() {
            let _ = self.want::<WRITE>(which.len());
        }
        if let Some(fault) = tally.fault
            && tally.frames == 0
        {
            return Err(fault);
        }
        // A fault behind good frames is reported by the next burst.
        let counters = &self.counters;
        self.moderation.count(tally.frames as usize, tally.bytes, 0);
        self.acks.note(tally.frames, tally.bytes, || acks::all(burst, which));
        counters.frames.add(tally.frames);
        counters.bytes.add(tally.bytes);
        counters.oversize.add(tally.oversize);
        counters.filtered.add(tally.filtered);
        counters.stopped.add(tally.stopped);
        counters.bursts.add(1);
        Ok((tally.frames as usize, tally.left))
    }

    /// Normal path: places the frames behind the first `used` ones. `wait`: up to the first one without room, else all that fit.
    fn place_rest<const WRITE: bool>(
        &mut self,
        burst: &Burst,
        which: &[u8],
        wait: bool,
        used: &mut usize,
        tally: &mut Tally,
    ) {
        let distance = self.tuning.distance();
        for (done, &index) in which.iter().enumerate().skip(*used) {
            let Some(frame) = burst.frames().get(usize::from(index)) else { continue };
            let left = which.len() - done;
            if self.walked > BURST_PIECES {
                tally.left += left;
                // Not for lack of buffers.
                self.found_short(0);
                return;
            }
            if *used == self.chains.list().len() {
                match self.more(used, left) {
                    Ok(0) => {
                        tally.left += left;
                        self.found_short(0);
                        return;
                    }
                    Ok(_) => {}
                    Err(fault) => {
                        (tally.fault, tally.stopped) = (Some(fault), left as u64);
                        return;
                    }
                }
            }
            self.prefetch::<WRITE>(*used + distance);
            let mut placed = self.place(burst, index, *used);
            if let Err(Refusal::Crowded) = placed {
                self.give(used);
                placed = self.place(burst, index, *used);
            }
            match placed {
                Ok(count) => {
                    *used += count;
                    tally.frames += 1;
                    tally.bytes += frame.len() as u64;
                    if burst.has_offloads() {
                        count_offload(&self.counters, burst.offload(index.into()), self.support, frame.len());
                    }
                }
                Err(Refusal::Full | Refusal::Crowded) if wait => {
                    tally.left += left;
                    return;
                }
                Err(Refusal::Full | Refusal::Crowded) => tally.left += 1,
                Err(Refusal::Oversize) => tally.oversize += 1,
                Err(Refusal::Fault(fault)) => {
                    (tally.fault, tally.stopped) = (Some(fault), left as u64);
                    return;
                }
            }
        }
    }

    /// Moves the heads of the frames in the first chains of a packed ring to the cache that is shared with the driver's core. It reads
    /// them there sooner, and writes them sooner if it sends from the same buffers next, as DPDK's does.
    #[cold]
    #[inline(never)]
    fn demote(&self, chains: usize) {
        if self.ring.is_packed() {
            let pieces = (0..chains).filter_map(|index| self.chains.first_piece(index));
            pieces.for_each(|piece| piece.skip(vnet_hdr::SIZE).demote());
        }
    }

    /// Returns the frames that are not too long and that the driver wants.
    fn suitable<'s>(&self, burst: &Burst, which: &[u8], short: &'s mut [u8; BURST]) -> &'s [u8] {
        let suits = |index: u8| self.fits(burst, index) && self.is_wanted(burst, index);
        let mut count = 0;
        for (place, &index) in short.iter_mut().zip(which.iter().filter(|&&index| suits(index))) {
            *place = index;
            count += 1;
        }
        short.get(..count).unwrap_or_default()
    }

    fn fits(&self, burst: &Burst, index: u8) -> bool {
        burst.link_len(index.into()) <= self.limit
    }

    fn is_wanted(&self, burst: &Burst, index: u8) -> bool {
        match (&self.filter, burst.frames().get(usize::from(index))) {
            (Some(filter), Some(frame)) => filter.passes(frame.head().0.get(HEADROOM..).unwrap_or_default()),
            _ => true,
        }
    }

    /// Counts the frames of `all` that are not `suitable`, as dropped. With `wait`, those behind the first frame that is left are left
    /// with it, to be dropped when their turn comes again.
    fn drop_others(&self, burst: &Burst, all: &[u8], suitable: &[u8], wait: bool, tally: &mut Tally) {
        let left = suitable.len().checked_sub(tally.left).filter(|_| wait).and_then(|at| suitable.get(at));
        let handled = left.and_then(|left| all.iter().position(|index| index == left)).unwrap_or(all.len());
        if wait {
            tally.left = all.len() - handled;
        }
        let others = all.get(..handled).unwrap_or_default().iter().filter(|index| !suitable.contains(index));
        for &index in others {
            match self.fits(burst, index) {
                true => tally.filtered += 1,
                false if self.limit == 0 => tally.stopped += 1,
                false => tally.oversize += 1,
            }
        }
    }

    /// Takes chains until there are `count`, if the driver has made that many available.
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
            // The others are prefetched while frames are copied.
            (there..self.tuning.prefetch.into()).for_each(|index| self.prefetch::<WRITE>(index));
        }
        Ok(())
    }

    /// Takes up to `max` more chains; returns how many. If our list has no room for them, the `used` ones are returned first.
    fn more(&mut self, used: &mut usize, max: usize) -> Result<usize, Fault> {
        let more = self.ring.take(&self.memory, &mut self.chains, max)?;
        if more > 0 || *used == 0 {
            return Ok(more);
        }
        self.give(used);
        self.ring.take(&self.memory, &mut self.chains, max)
    }

    /// Returns the first `used` chains to the driver, puts the others back, and starts an empty list.
    #[inline(always)]
    fn give(&mut self, used: &mut usize) {
        self.walked += self.chains.pieces();
        if *used < self.chains.list().len() {
            self.ring.untake(&mut self.chains, *used);
        }
        self.moderation.count(0, 0, self.chains.pieces());
        self.ring.give(self.chains.list().get(self.given..).unwrap_or_default());
        self.given = 0;
        self.chains.start(&self.memory);
        *used = 0;
    }

    /// Returns whether the driver certainly wants to be notified of published frames now. `false` is not final:
    /// [`RxQueue::settle`] must be called before going idle.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        if self.acks_wait() {
            return false;
        }
        let wants = self.moderation.wants_notification(&mut self.ring);
        if wants {
            self.acks.notified();
        }
        wants
    }

    /// Decides whether to notify the driver of published frames. `now`: time since any fixed point.
    pub fn settle(&mut self, now: Duration) -> Notice {
        let until = if self.moderation.is_asked() { None } else { self.acks.until(now) };
        if let Some(until) = until.filter(|_| self.acks_wait() && self.ring.unsignalled() > 0) {
            return Notice::At(until);
        }
        let notice = self.moderation.settle(&mut self.ring, now);
        match notice {
            Notice::Now => self.acks.notified(),
            Notice::Not => self.acks.taken(),
            Notice::At(_) => {}
        }
        notice
    }

    /// Returns whether published frames are acknowledgements of what the driver goes on sending.
    #[inline(always)]
    fn acks_wait(&self) -> bool {
        self.acks.wait() && !self.moderation.is_asked() && !self.moderation.is_urgent()
    }

    /// Sets how long the notification of TCP's acknowledgements may wait while the driver goes on sending, if it has not set limits
    /// of its own; without, not at all. `sent`: what it sends on the transmit queue of the pair.
    pub fn acknowledge(&mut self, delay: Duration, sent: Arc<Counters>) {
        self.acks.set(delay, sent);
    }

    /// Puts back chains taken for the next burst and returns where to resume after a stop (GET_VRING_BASE).
    pub fn base(&mut self) -> u32 {
        self.ring.untake(&mut self.chains, 0);
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

/// What became of the frames of a burst.
#[derive(Default)]
struct Tally {
    frames: u64,
    bytes: u64,
    /// Number of frames for which there were too few buffers.
    left: usize,
    oversize: u64,
    filtered: u64,
    stopped: u64,
    fault: Option<Fault>,
}

/// Why a frame was not placed.
enum Refusal {
    /// Too few buffers are available now.
    Full,
    /// Too few buffers beside those that earlier frames of the burst hold: these must be returned first.
    Crowded,
    /// The frame never fits.
    Oversize,
    /// The driver broke a rule.
    Fault(Fault),
}
