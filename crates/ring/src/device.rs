//! Device end of either layout.

use crate::{Chain, Chains, Fault, Tuning, packed, split};
use ringroad_mem::Table;

/// Device end of a virtqueue: a split or a packed one, told apart once per burst.
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
    /// Takes up to `max` chains and adds them to `chains`; says how many. A fault is reported when it comes first.
    #[inline]
    pub fn take(&mut self, memory: &Table, chains: &mut Chains, max: usize) -> Result<usize, Fault> {
        either!(self, ring => ring.take(memory, chains, max))
    }

    /// Turns off what should be off.
    pub fn tune(&mut self, tuning: Tuning) {
        either!(self, ring => ring.tune(tuning))
    }

    /// Puts back the last chains taken, all from the `keep`th of the burst on.
    pub fn untake(&mut self, chains: &mut Chains, keep: usize) {
        either!(self, ring => ring.untake(chains, keep))
    }

    /// Gives chains back to the driver and publishes them at once.
    #[inline]
    pub fn give(&mut self, chains: &[Chain]) {
        either!(self, ring => ring.give(chains))
    }

    /// The same, but publishes them together with others, a quarter of the ring at most. Who finds nothing more to take calls
    /// `flush`.
    #[inline]
    pub fn give_late(&mut self, chains: &[Chain]) {
        either!(self, ring => ring.give_late(chains))
    }

    /// How many used descriptors or elements from the next one on share a cache line of the ring.
    #[inline]
    pub fn line(&self) -> usize {
        either!(self, ring => ring.line())
    }

    /// Notes that all that was taken so far is about to be carried on: should this process end now, its successor gives it back
    /// without taking it again.
    #[inline]
    pub fn consume(&mut self) {
        either!(self, ring => ring.consume())
    }

    /// Publishes what was given late.
    #[inline]
    pub fn flush(&mut self) {
        either!(self, ring => ring.flush())
    }

    /// Whether the driver wants to be notified of what was given. An unsure `false` has to be asked for again.
    #[inline]
    pub fn wants_notification(&mut self, sure: bool) -> bool {
        either!(self, ring => ring.wants_notification(sure))
    }

    /// Asks the driver to notify us of the next chain. `true`: there is one already.
    pub fn enable_notification(&mut self) -> bool {
        either!(self, ring => ring.enable_notification())
    }

    /// Asks the driver not to notify us.
    pub fn disable_notification(&mut self) {
        either!(self, ring => ring.disable_notification())
    }

    /// Where to go on after a stop, as vhost-user's GET_VRING_BASE carries it.
    pub fn base(&mut self) -> u32 {
        match self {
            DeviceRing::Split(ring) => ring.base().into(),
            DeviceRing::Packed(ring) => ring.base().0,
        }
    }
}

#[cfg(not(loom))]
impl DeviceRing {
    /// The ring stops: what a former process had in flight and was not taken yet goes back empty, as no base can tell of it. To be
    /// called with nothing taken.
    pub fn settle(&mut self) {
        either!(self, ring => ring.settle())
    }

    /// Starts a ring where a driver has put it, at the base that SET_VRING_BASE carried.
    pub fn start(
        memory: &Table,
        features: crate::Features,
        size: u32,
        at: crate::Addresses,
        base: u32,
    ) -> Result<DeviceRing, crate::SetupError> {
        Ok(Self::resume(memory, features, size, at, base, crate::Journal::NONE, crate::Inflight::NONE)?.0)
    }

    /// The same, where a former process has left the ring, if the journal knows of it, for rings that are given back in the
    /// order in which they were taken; else if the inflight region does, for any. Says how the place was found. What is taken and
    /// given back is noted in both from now on.
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
