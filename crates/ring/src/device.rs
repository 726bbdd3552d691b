//! Device end of a virtqueue, split or packed (virtio 1.3, 2.7 and 2.8). Owned by the receive and transmit queues of the
//! device crates.

use crate::{Chain, Chains, Fault, Tuning, packed, split};
use ringroad_mem::Table;

/// Device end of a virtqueue; matches on the layout once per burst.
#[allow(clippy::large_enum_variant, reason = "one per queue, never moved while it runs")]
pub enum DeviceRing {
    /// Virtio 1.3, 2.7.
    Split(split::Device),
    /// Virtio 1.3, 2.8.
    Packed(packed::Device),
}

macro_rules! either {
    ($self:ident, $ring:ident => $do:expr) => {
        match $self {
            DeviceRing::Split($ring) => $do,
            DeviceRing::Packed($ring) => $do,
        }
    };
}

impl DeviceRing {
    /// Takes up to `max` chains and appends them to `chains`; returns how many.
    ///
    /// # Errors
    /// The [`Fault`] if the next chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        either!(self, ring => ring.take(memory, chains, max))
    }

    /// Sets which optimisations are used.
    pub fn tune(&mut self, tuning: Tuning) {
        either!(self, ring => ring.tune(tuning))
    }

    /// Undoes the taking of the last chains: all from index `keep` of the burst on.
    pub fn untake(&mut self, chains: &mut Chains, keep: usize) {
        either!(self, ring => ring.untake(chains, keep))
    }

    /// Returns chains to the driver and publishes them at once.
    #[inline]
    pub fn give(&mut self, chains: &[Chain]) {
        either!(self, ring => ring.give(chains))
    }

    /// Returns chains to the driver but defers publishing, until about a quarter of the ring is deferred. The caller must
    /// call `flush` when it finds no more to take.
    #[inline]
    pub fn give_deferred(&mut self, chains: &[Chain]) {
        either!(self, ring => ring.give_deferred(chains))
    }

    /// Returns how many used descriptors or elements, from the next one on, share a cache line of the ring.
    #[inline]
    pub fn left_in_line(&self) -> usize {
        either!(self, ring => ring.left_in_line())
    }

    /// Records that everything taken so far is about to be forwarded. If this process dies now, its successor returns these
    /// chains without taking them again.
    #[inline]
    pub fn consume(&mut self) {
        either!(self, ring => ring.consume())
    }

    /// Publishes deferred chains.
    #[inline]
    pub fn flush(&mut self) {
        either!(self, ring => ring.flush())
    }

    /// Returns whether the driver wants to be notified of published chains. If `sure` is not set, `false` is not final: the
    /// caller must check again before going idle.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        either!(self, ring => ring.wants_notification(sure))
    }

    /// Asks the driver to notify us of the next chain. Returns `true` if a chain is available already.
    pub fn enable_notification(&mut self) -> bool {
        either!(self, ring => ring.enable_notification())
    }

    /// Asks the driver not to notify us.
    pub fn disable_notification(&mut self) {
        either!(self, ring => ring.disable_notification())
    }

    /// Returns where to resume after a stop, in the format of vhost-user's GET_VRING_BASE. Publishes deferred chains first.
    pub fn base(&mut self) -> u32 {
        match self {
            DeviceRing::Split(ring) => ring.base().into(),
            DeviceRing::Packed(ring) => ring.base().0,
        }
    }
}

#[cfg(not(loom))]
impl DeviceRing {
    /// Called when the ring stops, with nothing taken: returns, unused, chains that a former process had in flight and that
    /// have not been taken again, as a base cannot express them.
    pub fn return_resubmits(&mut self) {
        either!(self, ring => ring.return_resubmits())
    }

    /// Starts a ring at the addresses that the driver chose, at the base from SET_VRING_BASE.
    ///
    /// # Errors
    /// [`SetupError`](crate::SetupError) if size, base or addresses are invalid.
    pub fn start(
        memory: &Table,
        features: crate::Features,
        size: u32,
        at: crate::Addresses,
        base: u32,
    ) -> Result<DeviceRing, crate::SetupError> {
        Ok(Self::resume(memory, features, size, at, base, crate::Journal::NONE, crate::Inflight::NONE)?.0)
    }

    /// Like `start`, but continues where a former process left the ring: where the journal says, if chains are returned in
    /// order; else where the inflight region says, in any order. Also returns how the position was found. From now on takes
    /// and returns are recorded in both.
    ///
    /// # Errors
    /// As for `start`, and [`SetupError::Inflight`](crate::SetupError::Inflight) if the inflight region is invalid.
    pub fn resume(
        memory: &Table,
        features: crate::Features,
        size: u32,
        at: crate::Addresses,
        base: u32,
        journal: crate::Journal,
        inflight: crate::Inflight,
    ) -> Result<(DeviceRing, crate::Resumed), crate::SetupError> {
        let layout = u64::from(size) | u64::from(features.packed) << 32 | u64::from(features.in_order) << 33;
        let (device, inode) = memory.user_identity(at.descriptor).unwrap_or_default();
        let key = crate::JournalKey([device, inode, at.descriptor, at.driver, at.device, layout]);
        Ok(if features.packed {
            let ring = packed::Layout::resolve(memory, size, at)?;
            inflight.check(ring.size())?;
            if base & 0x7fff >= size || base >> 16 & 0x7fff >= size {
                return Err(crate::SetupError::Base { base, size });
            }
            let (device, resumed) =
                packed::Device::resume(ring, features, packed::Base(base), journal, &key, inflight)?;
            (DeviceRing::Packed(device), resumed)
        } else {
            let ring = split::Layout::resolve(memory, size, at)?;
            inflight.check(size as u16)?;
            let index = base.try_into().map_err(|_| crate::SetupError::Base { base, size })?;
            let (device, resumed) = split::Device::resume(ring, features, index, journal, &key, inflight)?;
            (DeviceRing::Split(device), resumed)
        })
    }
}
