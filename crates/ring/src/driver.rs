//! Driver end of either layout, and what both have in common.

use crate::{packed, split};

/// A buffer that a driver makes available: a guest address and a length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub address: u64,
    /// Bytes, more than 0.
    pub len: u32,
}

/// A chain that the device has given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The id that [`DriverRing::add`] returned.
    pub id: u16,
    /// How many bytes the device wrote; never more than the chain's writable buffers have.
    pub len: u32,
}

/// There are not as many free descriptors, or the chain is empty or longer than the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for the descriptor chain")]
pub struct Full;

/// What a device can do wrong with a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverFault {
    /// The used index went further than there are chains under way (2.7.8).
    #[error("used index {index} is {ahead} ahead of {next}, with {outstanding} chains under way")]
    UsedJump {
        /// What the device wrote.
        index: u16,
        /// What we take next.
        next: u16,
        /// The distance.
        ahead: u16,
        /// Chains that the device has.
        outstanding: u16,
    },
    /// A chain that the device does not have.
    #[error("the device gave back buffer {id}, which it does not have")]
    Id {
        /// What it wrote.
        id: u32,
    },
    /// More than the chain can hold.
    #[error("the device says that it wrote {len} bytes to buffer {id}, which has {room}")]
    Length {
        /// The buffer.
        id: u16,
        /// What the device wrote.
        len: u32,
        /// What the buffer holds.
        room: u32,
    },
}

/// What the device says that it wrote to a buffer. Where it could not write, the length means nothing (2.8.7); DPDK's
/// devices leave there what the driver wrote.
#[inline(always)]
pub(crate) fn written(id: u16, len: u32, room: u32) -> Result<u32, DriverFault> {
    match room {
        0 => Ok(0),
        _ if len > room => Err(DriverFault::Length { id, len, room }),
        _ => Ok(len),
    }
}

/// The ids of a ring in a circle: the free ones, from the one that is used next on, then, oldest first, those under way.
/// Ids that come back in order leave it as it is, so that a device that works in order finds descriptors in order.
pub(crate) struct Ids {
    ids: Box<[u16]>,
    next: usize,
    free: usize,
}

impl Ids {
    /// All free.
    pub(crate) fn new(size: u16) -> Ids {
        Ids { ids: (0..size).collect(), next: 0, free: size.into() }
    }

    #[inline(always)]
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// The id that will be used after `ahead` others.
    #[inline(always)]
    pub(crate) fn next(&self, ahead: usize) -> Option<u16> {
        (ahead < self.free).then(|| self.ids[self.wrap(self.next + ahead)])
    }

    /// The ids that will be used after `ahead` others: up to `count`, as many as lie in a row.
    #[inline(always)]
    pub(crate) fn run(&self, ahead: usize, count: usize) -> &[u16] {
        let count = count.min(self.free.saturating_sub(ahead));
        let start = self.wrap(self.next + ahead.min(self.free));
        let run = self.ids.get(start..).unwrap_or_default();
        run.get(..count).unwrap_or(run)
    }

    /// With IN_ORDER: how many ids are under way up to this one, oldest first; 0: it is not under way.
    #[inline(always)]
    pub(crate) fn up_to(&self, id: usize) -> usize {
        if !self.is_under_way(id) {
            return 0;
        }
        let oldest = self.wrap(self.next + self.free);
        if id >= oldest { id - oldest + 1 } else { id + self.ids.len() - oldest + 1 }
    }

    /// With IN_ORDER: the oldest `count` ids under way are free again.
    #[inline(always)]
    pub(crate) fn put_back_oldest(&mut self, count: usize) {
        debug_assert!(self.free + count <= self.ids.len());
        self.free += count;
    }

    /// The next `count` ids, which are free, are used.
    #[inline(always)]
    pub(crate) fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.free);
        self.next = self.wrap(self.next + count);
        self.free -= count;
    }

    /// With IN_ORDER: the id that has been under way for longest.
    #[inline(always)]
    pub(crate) fn oldest(&self) -> Option<u16> {
        (self.free < self.ids.len()).then(|| self.ids[self.wrap(self.next + self.free)])
    }

    /// With IN_ORDER: the id that has been under way for longest but for `ahead` others.
    #[cfg(not(loom))]
    pub(crate) fn under_way(&self, ahead: usize) -> Option<u16> {
        let place =
            (ahead < self.ids.len() - self.free).then(|| self.wrap(self.wrap(self.next + self.free) + ahead))?;
        self.ids.get(place).copied()
    }

    /// With IN_ORDER: the ids that have been under way for longest, up to `count`, as many as lie in a row.
    #[inline(always)]
    pub(crate) fn oldest_run(&self, count: usize) -> &[u16] {
        let count = count.min(self.ids.len() - self.free);
        let run = self.ids.get(self.wrap(self.next + self.free)..).unwrap_or_default();
        run.get(..count).unwrap_or(run)
    }

    /// With IN_ORDER: whether an id is under way.
    #[inline(always)]
    pub(crate) fn is_under_way(&self, id: usize) -> bool {
        // In order, each id stays at the place of its number.
        let size = self.ids.len();
        let ahead = if id >= self.next { id - self.next } else { id + size - self.next };
        id < size && ahead >= self.free
    }

    /// An id that was under way is free again.
    #[inline(always)]
    pub(crate) fn put_back(&mut self, id: u16) {
        debug_assert!(self.free < self.ids.len());
        let place = self.wrap(self.next + self.free);
        if self.ids[place] != id {
            self.ids[place] = id;
        }
        self.free += 1;
    }

    #[inline(always)]
    fn wrap(&self, at: usize) -> usize {
        if at >= self.ids.len() { at - self.ids.len() } else { at }
    }
}

/// Driver end of a virtqueue: a split or a packed one, told apart once per call.
#[allow(clippy::large_enum_variant, reason = "one per queue, never moved while it runs")]
pub enum DriverRing {
    /// Virtio 1.3, 2.7.
    Split(split::Driver),
    /// Virtio 1.3, 2.8.
    Packed(packed::Driver),
}

macro_rules! either {
    ($self:ident, $ring:ident => $do:expr) => {
        match $self {
            DriverRing::Split($ring) => $do,
            DriverRing::Packed($ring) => $do,
        }
    };
}

impl DriverRing {
    /// How many descriptors are free.
    #[inline]
    pub fn free(&self) -> usize {
        either!(self, ring => ring.free())
    }

    /// The id that the chain after `ahead` more single-buffer chains will have, so that its buffer can be filled.
    #[inline(always)]
    pub fn next_id(&self, ahead: usize) -> Option<u16> {
        either!(self, ring => ring.next_id(ahead))
    }

    /// Ids that single-buffer chains will have after `ahead` others: up to `count`, perhaps fewer than will follow.
    #[inline(always)]
    pub fn next_ids(&self, ahead: usize, count: usize) -> &[u16] {
        either!(self, ring => ring.next_ids(ahead, count))
    }

    /// Fetches what adding `count` chains will write to, while there is something else to do.
    #[inline]
    pub fn prefetch(&self, count: usize) {
        either!(self, ring => ring.prefetch(count))
    }

    /// Turns the fast path of taking back off, to compare. (That of adding is `add_single`, the normal one `add`.)
    pub fn set_fast_path(&mut self, on: bool) {
        either!(self, ring => ring.set_fast_path(on))
    }

    /// Adds a chain: what the device reads, then what it writes. Returns its id. The device sees it at `publish`.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> Result<u16, Full> {
        either!(self, ring => ring.add(readable, writable))
    }

    /// Adds `count` chains of one buffer each, which `buffer` tells for their ids. Says how many there was room for.
    #[inline]
    pub fn add_single(&mut self, count: usize, writable: bool, buffer: impl FnMut(u16) -> Buffer) -> usize {
        either!(self, ring => ring.add_single(count, writable, buffer))
    }

    /// Makes available all that was added.
    #[inline]
    pub fn publish(&mut self) {
        either!(self, ring => ring.publish())
    }

    /// Takes back up to `out.len()` chains that the device has used; says how many.
    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, DriverFault> {
        either!(self, ring => ring.take_used(out))
    }

    /// The same for up to `max` chains, where nobody needs to know which. Without a look at each, if they were used in order.
    #[inline]
    pub fn reclaim(&mut self, max: usize) -> Result<usize, DriverFault> {
        either!(self, ring => ring.reclaim(max))
    }

    /// Whether the device wants to be notified of what was published since the last call.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        either!(self, ring => ring.wants_notification())
    }

    /// Asks the device to notify us of the next chain that it uses. `true`: there is one already.
    pub fn enable_notification(&mut self) -> bool {
        either!(self, ring => ring.enable_notification())
    }

    /// Asks the device not to notify us.
    pub fn disable_notification(&mut self) {
        either!(self, ring => ring.disable_notification())
    }

    /// Where a device that knows nothing of this ring has to go on, as vhost-user's SET_VRING_BASE carries it: behind all that
    /// was used, whether we have taken it back or not. Meaningful while no device works on the ring.
    #[cfg(not(loom))]
    pub fn base(&self) -> u32 {
        match self {
            DriverRing::Split(ring) => ring.base().into(),
            DriverRing::Packed(ring) => ring.base().0,
        }
    }

    /// How many descriptors (packed) or chains (split) a device that has stopped at this base, GET_VRING_BASE's answer, took and
    /// never gave back.
    #[cfg(not(loom))]
    pub fn missing(&self, base: u32) -> u32 {
        match self {
            DriverRing::Split(ring) => u32::from((base as u16).wrapping_sub(ring.base())),
            DriverRing::Packed(ring) => ring.missing(base),
        }
    }
}

/// Tables of descriptors in a driver's memory, one for each id, so that a chain takes one descriptor of the ring.
#[cfg(not(loom))]
pub struct IndirectTables {
    region: std::sync::Arc<ringroad_mem::Region>,
    offset: usize,
    entries: usize,
}

#[cfg(not(loom))]
impl IndirectTables {
    /// Tables of `entries` descriptors for a ring of `size`, at an offset of the driver's memory that has
    /// `size * entries * 16` bytes for them.
    pub fn new(region: std::sync::Arc<ringroad_mem::Region>, offset: usize, size: u32, entries: usize) -> Option<Self> {
        region.span(offset, size as usize * entries * crate::DESCRIPTOR)?;
        // A chain may not be longer than the queue, in a table either (2.7.5.3.1).
        let entries = entries.min(size as usize);
        Some(IndirectTables { region, offset, entries })
    }

    /// Writes the table of `id`; returns what the ring's descriptor refers to. `linked`: as split rings have it.
    pub(crate) fn write(
        &self,
        id: u16,
        chain: impl ExactSizeIterator<Item = (Buffer, u16)>,
        linked: bool,
    ) -> Option<Buffer> {
        let count = chain.len();
        if count == 0 || count > self.entries {
            return None;
        }
        let at = self.offset + id as usize * self.entries * crate::DESCRIPTOR;
        for (i, (buffer, flags)) in chain.enumerate() {
            let more = linked && i + 1 < count;
            let next = if more { i as u64 + 1 } else { 0 };
            let flags = u64::from(flags | if more { crate::NEXT } else { 0 });
            let word = u64::from(buffer.len) | if linked { flags << 32 | next << 48 } else { flags << 48 };
            let bytes = (u128::from(buffer.address) | u128::from(word) << 64).to_le_bytes();
            self.region.span(at + i * crate::DESCRIPTOR, crate::DESCRIPTOR)?.write(&bytes);
        }
        Some(Buffer { address: self.region.guest() + at as u64, len: (count * crate::DESCRIPTOR) as u32 })
    }
}
