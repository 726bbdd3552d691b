//! Both ends of a virtqueue, whatever its layout: told apart once per call, that is once per burst. Used by the device and driver
//! crates.

#[cfg(not(loom))]
use crate::{Addresses, Inflight, Journal, JournalKey, Resumed, SetupError};
use crate::{
    Buffer, Chain, Chains, DriverFault, Fault, Features, Full, IndirectTables, Tuning, Used,
    device::{Device, DeviceEnd},
    driver::{Driver, DriverEnd},
    packed, split,
};
use ringroad_mem::Table;
#[cfg(not(loom))]
use {ringroad_mem::Region, std::sync::Arc};

/// An end of a split ring (virtio 1.3, 2.7) or of a packed one (2.8).
#[allow(clippy::large_enum_variant, reason = "one per queue, never moved while it runs")]
enum Either<S, P> {
    Split(S),
    Packed(P),
}

macro_rules! either {
    ($ends:expr, $ring:ident => $do:expr) => {
        match $ends {
            Either::Split($ring) => $do,
            Either::Packed($ring) => $do,
        }
    };
}

/// Device end of a virtqueue.
pub struct DeviceRing(Either<Device<split::Layout>, Device<packed::Layout>>);

impl std::fmt::Debug for DeviceRing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("DeviceRing").field("packed", &self.is_packed()).finish_non_exhaustive()
    }
}

impl DeviceRing {
    /// Takes up to `max` chains and appends them to `chains`; returns how many.
    ///
    /// # Errors
    /// The [`Fault`] if the next chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        either!(&mut self.0, ring => ring.take(memory, chains, max))
    }

    /// Sets which optimisations are used.
    pub fn tune(&mut self, tuning: Tuning) {
        either!(&mut self.0, ring => ring.tuning = tuning)
    }

    /// Fetches the descriptors of the next `most` available entries of a split ring for writing, although they are only read. A driver
    /// that reads a descriptor and then writes it, to put it on its free list, misses its line once then, else twice: read elsewhere,
    /// it is shared when the driver has read it. It costs the device some time: for one that would else wait for the driver, on a CPU
    /// where [`ringroad_mem::reads_take_lines`]. Of a packed ring, nothing is fetched.
    #[inline]
    pub fn hand_over(&self, most: usize) {
        if let Either::Split(ring) = &self.0 {
            ring.hand_over(most);
        }
    }

    /// Moves the last `most` used descriptors of a packed ring, which this core has written, to the cache that it shares with the driver's:
    /// the driver reads them there sooner. It costs the device some time, as `hand_over` does. Of a split ring, nothing is moved.
    #[inline]
    pub fn demote_used(&self, most: usize) {
        if let Either::Packed(ring) = &self.0 {
            ring.demote_used(most);
        }
    }

    /// Returns whether the ring is packed (2.8).
    #[inline]
    pub fn is_packed(&self) -> bool {
        matches!(self.0, Either::Packed(_))
    }

    /// Undoes the taking of the last chains, which were not needed: all from index `keep` of the burst on.
    pub fn untake(&mut self, chains: &mut Chains, keep: usize) {
        either!(&mut self.0, ring => ring.untake(chains, keep))
    }

    /// Returns chains to the driver and publishes them at once.
    #[inline]
    pub fn give(&mut self, chains: &[Chain]) {
        either!(&mut self.0, ring => ring.give(chains))
    }

    /// Returns chains to the driver but defers publishing, until about a quarter of the ring is deferred. The caller must
    /// call `flush` when it finds no more to take.
    #[inline]
    pub fn give_deferred(&mut self, chains: &[Chain]) {
        either!(&mut self.0, ring => ring.give_deferred(chains))
    }

    /// Returns how many used descriptors or elements, from the next one on, share a cache line of the ring.
    #[inline]
    pub fn left_in_line(&self) -> usize {
        either!(&self.0, ring => ring.left_in_line())
    }

    /// Records that everything taken so far is about to be forwarded. If this process dies now, its successor returns these
    /// chains without taking them again.
    #[inline]
    pub fn consume(&mut self) {
        either!(&mut self.0, ring => ring.consume())
    }

    /// Publishes deferred chains.
    #[inline]
    pub fn flush(&mut self) {
        either!(&mut self.0, ring => ring.flush())
    }

    /// Returns how many published descriptors or elements the driver has not been notified of yet, nor does not want to be.
    #[inline]
    pub fn unsignalled(&self) -> u32 {
        either!(&self.0, ring => ring.unsignalled)
    }

    /// Returns whether the driver wants to be notified of chains published since the last `true`, or the last `sure` answer.
    ///
    /// A sure answer costs a full fence. Without the fence `true` is reliable, but `false` may miss a request that the driver
    /// has just written: the caller must check again before going idle.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        either!(&mut self.0, ring => ring.wants_notification(sure))
    }

    /// Returns whether the driver wants to be notified of the `oldest` of those that it has not been notified of
    /// ([`DeviceRing::unsignalled`]). If not, it has seen them or will not wait for them, and they no longer count. Costs a full fence.
    ///
    /// With EVENT_IDX (2.7.10) a driver that asks to be notified of a newer one has seen the older ones, or does not want to be
    /// interrupted for them.
    #[inline]
    pub fn wants_notification_of(&mut self, oldest: u32) -> bool {
        either!(&mut self.0, ring => ring.wants_notification_of(oldest))
    }

    /// Asks the driver to notify us of the next chain. Returns `true` if a chain is available already; the caller must take
    /// it, as the driver may or may not send a notification for it.
    pub fn enable_notification(&mut self) -> bool {
        either!(&mut self.0, ring => ring.enable_notification())
    }

    /// Asks the driver not to notify us.
    pub fn disable_notification(&mut self) {
        either!(&mut self.0, ring => ring.suppress())
    }

    /// Returns where to resume after a stop, in the format of vhost-user's GET_VRING_BASE. Publishes deferred chains first.
    pub fn base(&mut self) -> u32 {
        either!(&mut self.0, ring => {
            ring.flush();
            ring.base()
        })
    }
}

#[cfg(not(loom))]
impl DeviceRing {
    /// Called when the ring stops, with nothing taken: returns, unused, chains that a former process had in flight and that
    /// have not been taken again, as a base cannot express them.
    pub fn return_resubmits(&mut self) {
        either!(&mut self.0, ring => ring.return_resubmits())
    }

    /// Starts a ring at the addresses that the driver chose, at the base from SET_VRING_BASE.
    ///
    /// # Errors
    /// [`SetupError`] if size, base or addresses are invalid.
    pub fn start(
        memory: &Table,
        features: Features,
        size: u32,
        at: Addresses,
        base: u32,
    ) -> Result<DeviceRing, SetupError> {
        Ok(Self::resume(memory, features, size, at, base, Journal::NONE, Inflight::NONE)?.0)
    }

    /// Like `start`, but continues where a former process left the ring: where the journal says, if chains are returned in
    /// order; else where the inflight region says, in any order. Also returns how the position was found. From now on takes
    /// and returns are recorded in both.
    ///
    /// # Errors
    /// As for `start`, and [`SetupError::Inflight`] if the inflight region is invalid.
    pub fn resume(
        memory: &Table,
        features: Features,
        size: u32,
        at: Addresses,
        base: u32,
        journal: Journal,
        inflight: Inflight,
    ) -> Result<(DeviceRing, Resumed), SetupError> {
        let layout = u64::from(size) | u64::from(features.packed) << 32 | u64::from(features.in_order) << 33;
        let (device, inode) = memory.user_identity(at.descriptor).unwrap_or_default();
        let key = JournalKey([device, inode, at.descriptor, at.driver, at.device, layout]);
        Ok(if features.packed {
            let ring = packed::Layout::resolve(memory, size, at)?;
            inflight.check(ring.size())?;
            if base & 0x7fff >= size || base >> 16 & 0x7fff >= size {
                return Err(SetupError::Base { base, size });
            }
            let (device, resumed) =
                Device::<packed::Layout>::resume(ring, features, packed::Base(base), journal, &key, inflight)?;
            (DeviceRing(Either::Packed(device)), resumed)
        } else {
            let ring = split::Layout::resolve(memory, size, at)?;
            inflight.check(size as u16)?;
            let index = base.try_into().map_err(|_| SetupError::Base { base, size })?;
            let (device, resumed) = Device::<split::Layout>::resume(ring, features, index, journal, &key, inflight)?;
            (DeviceRing(Either::Split(device)), resumed)
        })
    }
}

/// Driver end of a virtqueue.
pub struct DriverRing(Either<Driver<split::Layout>, Driver<packed::Layout>>);

impl std::fmt::Debug for DriverRing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("DriverRing").field("packed", &matches!(self.0, Either::Packed(_))).finish_non_exhaustive()
    }
}

impl DriverRing {
    /// Starts a fresh ring in the driver's own memory, which must be zeroed there: at `offset`, [`DriverRing::bytes`] long. Each of
    /// its areas is on cache lines of its own. Also returns their addresses, for the device.
    ///
    /// # Errors
    /// [`SetupError`] if the size is invalid or the memory too small.
    #[cfg(not(loom))]
    pub fn start(
        region: &Arc<Region>,
        offset: usize,
        features: Features,
        size: u32,
    ) -> Result<(DriverRing, Addresses), SetupError> {
        Ok(if features.packed {
            let (ring, at) = packed::Layout::place(region, offset, size)?;
            (DriverRing(Either::Packed(Driver::<packed::Layout>::new(ring, features))), at)
        } else {
            let (ring, at) = split::Layout::place(region, offset, size)?;
            (DriverRing(Either::Split(Driver::<split::Layout>::new(ring, features))), at)
        })
    }

    /// Returns the size in bytes of a ring in a driver's memory.
    #[cfg(not(loom))]
    pub fn bytes(features: Features, size: u32) -> usize {
        if features.packed { packed::Layout::bytes(size) } else { split::Layout::bytes(size) }
    }

    /// From now on places each chain of more than one buffer in an indirect table, if INDIRECT_DESC was negotiated.
    pub fn set_indirect(&mut self, tables: IndirectTables) {
        either!(&mut self.0, ring => ring.tables = ring.features.indirect.then_some(tables))
    }

    /// Returns how many descriptors are free.
    #[inline]
    pub fn free(&self) -> usize {
        either!(&self.0, ring => ring.free())
    }

    /// Returns the id of the single-buffer chain to be added after `ahead` others, so that its buffer can be filled in
    /// advance.
    #[inline(always)]
    pub fn next_id(&self, ahead: usize) -> Option<u16> {
        either!(&self.0, ring => ring.next_id(ahead))
    }

    /// Returns ids of the single-buffer chains to be added after `ahead` others: up to `count`, possibly fewer.
    #[inline(always)]
    pub fn next_ids(&self, ahead: usize, count: usize) -> &[u16] {
        either!(&self.0, ring => ring.next_ids(ahead, count))
    }

    /// Prefetches the lines that adding `count` chains will write to.
    #[inline]
    pub fn prefetch(&self, count: usize) {
        either!(&self.0, ring => ring.prefetch(count))
    }

    /// Turns the fast path of taking used chains on or off, for measurements. (For adding, `add_single` is the fast path
    /// and `add` the normal one.)
    pub fn set_fast_path(&mut self, on: bool) {
        either!(&mut self.0, ring => ring.fast_path = on)
    }

    /// Adds a chain of device-readable, then device-writable buffers; returns its id. The device sees it after `publish`.
    ///
    /// # Errors
    /// [`Full`] if there are too few free descriptors, or the chain is empty or longer than the queue.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> Result<u16, Full> {
        either!(&mut self.0, ring => ring.add(readable, writable))
    }

    /// Adds up to `count` single-buffer chains; `buffer` returns the buffer for an id. Returns how many chains were added.
    #[inline]
    pub fn add_single(&mut self, count: usize, writable: bool, buffer: impl FnMut(u16) -> Buffer) -> usize {
        either!(&mut self.0, ring => ring.add_single(count, writable, buffer))
    }

    /// Makes all added chains available to the device.
    #[inline]
    pub fn publish(&mut self) {
        either!(&mut self.0, ring => ring.publish())
    }

    /// Takes up to `out.len()` chains that the device has used; returns how many.
    ///
    /// # Errors
    /// The [`DriverFault`] if the next used chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, DriverFault> {
        either!(&mut self.0, ring => ring.take_used(out))
    }

    /// Like `take_used` for up to `max` chains, for callers that do not need their ids. Does not read each entry if the
    /// device works in order.
    ///
    /// # Errors
    /// As for `take_used`.
    #[inline]
    pub fn reclaim(&mut self, max: usize) -> Result<usize, DriverFault> {
        either!(&mut self.0, ring => ring.reclaim(max))
    }

    /// Returns whether the device wants to be notified of what was published since the last call.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        either!(&mut self.0, ring => ring.wants_notification())
    }

    /// Asks the device to notify us of the next chain that it uses. Returns `true` if a used chain is there already.
    pub fn enable_notification(&mut self) -> bool {
        either!(&mut self.0, ring => ring.enable_notification())
    }

    /// Asks the device not to notify us.
    pub fn disable_notification(&mut self) {
        either!(&mut self.0, ring => ring.suppress())
    }

    /// Returns where a device without state of its own must resume, in the format of vhost-user's SET_VRING_BASE: behind
    /// the last used chain, whether taken here or not. Only meaningful while no device works on the ring.
    pub fn base(&self) -> u32 {
        either!(&self.0, ring => ring.base())
    }

    /// Returns how many descriptors (packed) or chains (split) a device that stopped at this base (from GET_VRING_BASE)
    /// took and never returned.
    pub fn missing(&self, base: u32) -> u32 {
        either!(&self.0, ring => ring.missing(base))
    }
}

/// Returns both ends of a fresh ring of loom's atomics.
#[cfg(loom)]
pub fn model(features: Features, size: u16) -> (DriverRing, DeviceRing) {
    if features.packed {
        let ring = packed::Layout::model(size);
        let device = Device::<packed::Layout>::new(ring.clone(), features, packed::Base(crate::types::FRESH));
        let driver = Driver::<packed::Layout>::new(ring, features);
        (DriverRing(Either::Packed(driver)), DeviceRing(Either::Packed(device)))
    } else {
        let ring = split::Layout::model(size);
        let device = Device::<split::Layout>::new(ring.clone(), features, 0);
        let driver = Driver::<split::Layout>::new(ring, features);
        (DriverRing(Either::Split(driver)), DeviceRing(Either::Split(device)))
    }
}
