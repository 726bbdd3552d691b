//! Device end of a virtqueue (virtio 1.3, 2.7 and 2.8): takes available chains, returns used ones. What both layouts share;
//! `split/device.rs` and `packed/device.rs` supply the rest ([`DeviceEnd`]). Called through `DeviceRing`, which has the docs.

use crate::{
    Chain, Chains, Fault, Features, INDIRECT, Journal, NEXT, Tuning, WRITE,
    chain::{Descriptor, Draft, indirect},
    inflight::Resubmits,
    layout::{RingLayout, RingPosition},
};
use ringroad_mem::{
    Hit, Table,
    sync::{Ordering, fence},
};

/// Device end of a virtqueue.
pub(crate) struct Device<L: RingLayout> {
    pub ring: L,
    pub features: Features,
    /// The next chain to take.
    pub next_available: L::Position,
    /// Where the next used entry goes.
    pub next_used: L::Position,
    /// Position up to which the driver sees used entries.
    pub published: L::Position,
    /// Slots published since the last decision whether to notify the driver.
    pub unsignalled: u32,
    pub state: L::DeviceState,
    pub journal: Journal,
    /// Records what is in flight in the frontend's inflight region, for any back end that succeeds this one.
    pub track: Option<Box<L::Track>>,
    /// Chains that were in flight when the ring started.
    pub resubmits: Resubmits<L::Saved>,
    pub hit: Hit,
    pub tuning: Tuning,
}

/// What differs between the layouts.
pub(crate) trait DeviceEnd<L: RingLayout> {
    /// Returns how many chains, up to `wanted`, may be available, and prefetches the lines of the ring that they take.
    fn look(&mut self, wanted: usize) -> Result<usize, Fault>;

    /// Returns the flags of the next chain's first descriptor; `None` if there is none, or an invalid one.
    fn next_flags(&self) -> Option<u16>;

    /// Fast path: takes single-buffer chains, all with or all without WRITE (`FLAGS`), up to the end of the ring.
    fn take_run<const FLAGS: u16, const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize;

    /// Reads the first descriptor of the next chain, if there is one.
    fn head(&self) -> Result<Option<Descriptor>, Fault>;

    /// Reads the descriptor behind one with NEXT.
    fn following(&self, descriptor: &Descriptor) -> Result<Descriptor, Fault>;

    /// Checks that a chain may take this many slots.
    fn check(&self, slots: u16) -> Result<(), Fault>;

    /// Moves past a chain, or past chains of one slot each.
    fn advance(&mut self, slots: u16);

    /// Moves back to the start of the chain taken last.
    fn back(&mut self, slots: u16);

    /// Writes used entries that the driver does not see yet.
    fn stage(&mut self, chains: &[Chain]);

    /// Makes them visible to the driver.
    fn publish(&mut self);

    /// Sets the number of chains by which to estimate how many lines to prefetch.
    fn expect(&mut self, _chains: usize) {}

    /// Reads whether the driver wants to be notified of what is published and unsignalled, apart from the newest `newer` entries.
    fn is_requested(&self, newer: u32) -> bool;

    /// Writes the request to be notified of the next chain.
    fn request(&mut self);

    /// Withdraws it.
    fn suppress(&mut self);

    /// Returns whether there is a chain that has not been taken, valid or not.
    fn is_available(&self) -> bool;

    /// Returns where to resume when everything is published, in vhost-user's format.
    fn base(&self) -> u32;

    /// Takes a chain that was in flight when the ring started. Returns `false` if it must wait for the next burst.
    fn take_saved(&mut self, memory: &Table, chains: &mut Chains, saved: L::Saved) -> Result<bool, Fault>;

    /// Returns it as a chain without pieces.
    fn unread(saved: L::Saved) -> Chain;

    /// Records in the inflight region the chains that were just taken from the ring.
    fn record(&mut self, chains: &[Chain]);

    /// Deletes the record of a chain that goes back to the ring.
    fn forget(&mut self, id: u16);
}

impl<L: RingLayout> Device<L> {
    pub fn at(ring: L, features: Features, available: L::Position, used: L::Position, state: L::DeviceState) -> Self {
        Device {
            ring,
            features,
            next_available: available,
            next_used: used,
            published: used,
            unsignalled: 0,
            state,
            journal: Journal::NONE,
            track: None,
            resubmits: Resubmits::default(),
            hit: Hit::default(),
            tuning: Tuning::default(),
        }
    }
}

impl<L: RingLayout> Device<L>
where
    Self: DeviceEnd<L>,
{
    #[inline]
    pub fn consume(&mut self) {
        self.journal.record_taken(self.next_available.to_bits());
    }

    #[inline]
    pub fn take(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        if self.track.is_some() {
            return self.take_tracked(memory, chains, max);
        }
        self.take_fresh(memory, chains, max)
    }

    /// Takes from the ring only and records nothing in the inflight region.
    #[inline]
    fn take_fresh(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        let count = self.look(max.min(chains.room()))?;
        match (self.tuning.fast_path, self.tuning.translation_cache) {
            (true, true) => self.take_burst::<true, true>(memory, chains, count),
            (true, false) => self.take_burst::<true, false>(memory, chains, count),
            (false, true) => self.take_burst::<false, true>(memory, chains, count),
            (false, false) => self.take_burst::<false, false>(memory, chains, count),
        }
    }

    #[inline]
    fn take_burst<const FAST: bool, const CACHE: bool>(
        &mut self,
        memory: &Table,
        chains: &mut Chains,
        count: usize,
    ) -> Result<usize, Fault> {
        let mut taken = 0;
        while taken < count {
            if FAST {
                taken += self.take_singles::<CACHE>(chains, count - taken);
                if taken == count {
                    break;
                }
            }
            if !CACHE {
                self.hit = Hit::NONE;
            }
            match self.take_chain(memory, chains) {
                Ok(true) => taken += 1,
                Ok(false) => break,
                Err(_) if taken > 0 => break,
                Err(fault) => return Err(fault),
            }
        }
        Ok(taken)
    }

    /// Fast path: single-buffer chains, all writable or all readable.
    #[inline(always)]
    fn take_singles<const CACHE: bool>(&mut self, chains: &mut Chains, max: usize) -> usize {
        let mut taken = 0;
        while taken < max {
            let Some(flags) = self.next_flags() else { break };
            let run = if flags & WRITE != 0 {
                self.take_run::<WRITE, CACHE>(chains, max - taken)
            } else {
                self.take_run::<0, CACHE>(chains, max - taken)
            };
            taken += run;
            // Continue at the start of the ring.
            if run == 0 || self.next_available.slot(self.ring.size()) != 0 {
                break;
            }
        }
        taken
    }

    /// Normal path: a chain of any shape. Returns `false` if there is none or it must wait for the next burst.
    fn take_chain(&mut self, memory: &Table, chains: &mut Chains) -> Result<bool, Fault> {
        let Some(head) = self.head()? else { return Ok(false) };
        let slots = self.read_chain(memory, chains, head)?;
        self.advance(slots);
        Ok(slots > 0)
    }

    /// Reads a chain; returns how many slots it takes, or 0 if it must wait for the next burst.
    pub fn read_chain(&mut self, memory: &Table, chains: &mut Chains, head: Descriptor) -> Result<u16, Fault> {
        let mut chain = chains.begin(1);
        chain.id = head.index;
        let followed = self.follow(memory, chains, &mut chain, head);
        match followed.and_then(|()| self.check(chain.slots)) {
            Ok(()) => {
                let slots = chain.slots;
                Ok(if chains.end(chain) { slots } else { 0 })
            }
            Err(fault) => {
                chains.abandon(&chain);
                Err(fault)
            }
        }
    }

    fn follow(
        &mut self,
        memory: &Table,
        chains: &mut Chains,
        chain: &mut Draft,
        mut descriptor: Descriptor,
    ) -> Result<(), Fault> {
        let size = self.ring.size();
        for slots in 1..=size {
            if !L::LINKED {
                // The id is in the chain's last descriptor (2.8.6).
                (chain.slots, chain.id) = (slots, descriptor.tail);
            }
            if descriptor.flags & INDIRECT != 0 {
                if !self.features.indirect {
                    return Err(Fault::Indirect { index: descriptor.index });
                }
                return indirect(chains, chain, memory, &mut self.hit, descriptor, size, L::LINKED);
            }
            if !chain.clipped {
                chains.add(chain, memory, &mut self.hit, descriptor)?;
            }
            // A chain with too many pieces can only be returned. If it is linked, its head is enough for that; else its last
            // descriptor is needed, but not if it must wait for the next burst.
            let enough = if L::LINKED { chain.clipped } else { chains.must_wait(chain) };
            if descriptor.flags & NEXT == 0 || enough {
                return Ok(());
            }
            descriptor = self.following(&descriptor)?;
        }
        Err(Fault::Loop { index: descriptor.index, size })
    }

    pub fn untake(&mut self, chains: &mut Chains, keep: usize) {
        let unused = chains.list().get(keep..).unwrap_or_default();
        let fresh = self.resubmits.untake(unused.len());
        let unused = unused.iter().rev().take(fresh);
        if self.track.is_some() {
            // Newest first, so that a crash leaves the oldest in the record, which come first in the ring.
            for chain in unused {
                self.forget(chain.id);
                self.back(chain.slots());
            }
        } else {
            // Together they have at most as many slots as the ring.
            self.back(unused.fold(0, |slots, chain| slots.wrapping_add(chain.slots())));
        }
        chains.truncate(keep);
    }

    #[inline]
    pub fn give(&mut self, chains: &[Chain]) {
        if self.tuning.shadow_used {
            self.stage(chains);
            return self.flush();
        }
        for chain in chains {
            self.stage(std::slice::from_ref(chain));
            self.flush();
        }
        self.expect(chains.len());
    }

    #[inline]
    pub fn give_deferred(&mut self, chains: &[Chain]) {
        if !self.tuning.shadow_used {
            return self.give(chains);
        }
        self.stage(chains);
        // A driver that has made the whole ring available gets three quarters of it back promptly.
        if self.published.distance(self.next_used, self.ring.size()) >= self.ring.size() / 4 {
            self.flush();
        }
    }

    #[inline]
    pub fn flush(&mut self) {
        if self.published != self.next_used {
            self.publish();
            let slots = self.published.distance(self.next_used, self.ring.size());
            self.unsignalled = self.unsignalled.saturating_add(slots.into());
            self.published = self.next_used;
            self.journal.record_published(self.next_used.to_bits());
        }
    }

    /// Returns how many used entries, from the next one on, share a cache line.
    #[inline(always)]
    pub fn left_in_line(&self) -> usize {
        L::PER_LINE - self.next_used.slot(self.ring.size()) % L::PER_LINE
    }

    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        if self.unsignalled == 0 {
            return false;
        }
        if sure {
            // Pairs with the driver's fence between requesting notifications and re-reading the ring (2.7.7.2, 2.8.21.3.1):
            // without it both sides may sleep. What was published must be visible before the load below, on x86 too.
            fence(Ordering::SeqCst);
        }
        let wants = self.is_requested(0);
        if wants || sure {
            self.unsignalled = 0;
        }
        wants
    }

    #[inline]
    pub fn wants_notification_of(&mut self, oldest: u32) -> bool {
        let newer = self.unsignalled.saturating_sub(oldest);
        if newer == self.unsignalled {
            return false;
        }
        // As in `wants_notification`: older entries are not looked at again.
        fence(Ordering::SeqCst);
        let wants = self.is_requested(newer);
        self.unsignalled = if wants { 0 } else { newer };
        wants
    }

    pub fn enable_notification(&mut self) -> bool {
        self.request();
        // Pairs with the driver's fence between publishing chains and reading the request.
        fence(Ordering::SeqCst);
        self.resubmits.peek().is_some() || self.is_available()
    }

    /// Takes the chains that were in flight first, then from the ring.
    #[cold]
    #[inline(never)]
    fn take_tracked(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        let wanted = max.min(chains.room());
        let mut taken = 0;
        while taken < wanted
            && let Some(saved) = self.resubmits.peek()
        {
            match self.take_saved(memory, chains, saved) {
                Ok(true) => taken += 1,
                Ok(false) => return Ok(taken),
                Err(_) if taken > 0 => return Ok(taken),
                Err(fault) => return Err(fault),
            }
            self.resubmits.advance();
        }
        let before = chains.list().len();
        match self.take_fresh(memory, chains, wanted - taken) {
            Ok(fresh) => {
                self.resubmits.count(fresh, self.ring.size());
                self.record(chains.list().get(before..).unwrap_or_default());
                Ok(taken + fresh)
            }
            Err(_) if taken > 0 => Ok(taken),
            Err(fault) => Err(fault),
        }
    }

    pub fn return_resubmits(&mut self) {
        while let Some(saved) = self.resubmits.peek() {
            self.resubmits.advance();
            self.stage(&[Self::unread(saved)]);
        }
        self.flush();
    }
}
