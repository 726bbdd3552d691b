//! Driver end of a virtqueue, split or packed (virtio 1.3, 2.7 and 2.8), and what both layouts share. Used by the driver
//! crates.

use crate::{packed, split};

/// A buffer that the driver makes available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub address: u64,
    /// Length in bytes, more than 0.
    pub len: u32,
}

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The id that [`DriverRing::add`] returned.
    pub id: u16,
    /// Bytes written by the device, never more than the size of the chain's writable buffers.
    pub len: u32,
}

/// Too few free descriptors, or the chain is empty or longer than the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for the descriptor chain")]
pub struct Full;

/// A device error on a queue, found by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverFault {
    /// The used index is further ahead than there are chains in flight (2.7.8).
    #[error("used index {index} is {ahead} ahead of {next}, with only {outstanding} chains in flight")]
    UsedJump {
        /// The used index that the device wrote.
        index: u16,
        /// The index that the driver takes next.
        next: u16,
        /// The distance between the two.
        ahead: u16,
        /// Chains in flight.
        outstanding: u16,
    },
    /// The device returned a chain that is not in flight.
    #[error("the device returned buffer {id}, which is not in flight")]
    Id {
        /// The id that the device wrote.
        id: u32,
    },
    /// The device reports more bytes written than the chain can hold.
    #[error("the device reported {len} bytes written to buffer {id}, expected at most {room}")]
    Length {
        /// Id of the buffer.
        id: u16,
        /// The length that the device wrote.
        len: u32,
        /// Size of the chain's writable buffers.
        room: u32,
    },
}

/// Returns the length that the device reports as written. If the chain has no writable buffers, the field is meaningless
/// (2.8.7): DPDK's devices leave there what the driver wrote.
#[inline(always)]
pub(crate) fn written(id: u16, len: u32, room: u32) -> Result<u32, DriverFault> {
    match room {
        0 => Ok(0),
        _ if len > room => Err(DriverFault::Length { id, len, room }),
        _ => Ok(len),
    }
}

/// The ids of a ring in a circular list: first the free ones, starting at the one to use next, then those in flight, oldest
/// first. Ids that return in order leave the list unchanged, so a device that works in order reads descriptors in order.
pub(crate) struct Ids {
    ids: Box<[u16]>,
    next: usize,
    free: usize,
}

impl Ids {
    /// All ids are free.
    pub(crate) fn new(size: u16) -> Ids {
        Ids { ids: (0..size).collect(), next: 0, free: size.into() }
    }

    #[inline(always)]
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// Returns the id to be used after `ahead` others.
    #[inline(always)]
    pub(crate) fn next(&self, ahead: usize) -> Option<u16> {
        (ahead < self.free).then(|| self.ids[self.wrap(self.next + ahead)])
    }

    /// Returns the ids to be used after `ahead` others: up to `count`, as many as are contiguous in the list.
    #[inline(always)]
    pub(crate) fn run(&self, ahead: usize, count: usize) -> &[u16] {
        let count = count.min(self.free.saturating_sub(ahead));
        let start = self.wrap(self.next + ahead.min(self.free));
        let run = self.ids.get(start..).unwrap_or_default();
        run.get(..count).unwrap_or(run)
    }

    /// With IN_ORDER: returns how many ids are in flight up to and including this one, oldest first; 0 if it is not in
    /// flight.
    #[inline(always)]
    pub(crate) fn count_up_to(&self, id: usize) -> usize {
        if !self.is_in_flight(id) {
            return 0;
        }
        let oldest = self.wrap(self.next + self.free);
        if id >= oldest { id - oldest + 1 } else { id + self.ids.len() - oldest + 1 }
    }

    /// With IN_ORDER: frees the oldest `count` ids in flight.
    #[inline(always)]
    pub(crate) fn put_back_oldest(&mut self, count: usize) {
        debug_assert!(self.free + count <= self.ids.len());
        self.free += count;
    }

    /// Marks the next `count` free ids as in flight.
    #[inline(always)]
    pub(crate) fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.free);
        self.next = self.wrap(self.next + count);
        self.free -= count;
    }

    /// With IN_ORDER: returns the oldest id in flight.
    #[inline(always)]
    pub(crate) fn oldest(&self) -> Option<u16> {
        (self.free < self.ids.len()).then(|| self.ids[self.wrap(self.next + self.free)])
    }

    /// With IN_ORDER: returns the id in flight that is preceded by `ahead` older ones.
    #[cfg(not(loom))]
    pub(crate) fn in_flight(&self, ahead: usize) -> Option<u16> {
        let place =
            (ahead < self.ids.len() - self.free).then(|| self.wrap(self.wrap(self.next + self.free) + ahead))?;
        self.ids.get(place).copied()
    }

    /// With IN_ORDER: returns the oldest ids in flight, up to `count`, as many as are contiguous in the list.
    #[inline(always)]
    pub(crate) fn oldest_run(&self, count: usize) -> &[u16] {
        let count = count.min(self.ids.len() - self.free);
        let run = self.ids.get(self.wrap(self.next + self.free)..).unwrap_or_default();
        run.get(..count).unwrap_or(run)
    }

    /// With IN_ORDER: returns whether an id is in flight.
    #[inline(always)]
    pub(crate) fn is_in_flight(&self, id: usize) -> bool {
        // In order, each id stays at its own index of the list.
        let size = self.ids.len();
        let ahead = if id >= self.next { id - self.next } else { id + size - self.next };
        id < size && ahead >= self.free
    }

    /// Frees an id that was in flight.
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

/// Driver end of a virtqueue; matches on the layout once per call.
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
    /// Returns how many descriptors are free.
    #[inline]
    pub fn free(&self) -> usize {
        either!(self, ring => ring.free())
    }

    /// Returns the id of the single-buffer chain to be added after `ahead` others, so that its buffer can be filled in
    /// advance.
    #[inline(always)]
    pub fn next_id(&self, ahead: usize) -> Option<u16> {
        either!(self, ring => ring.next_id(ahead))
    }

    /// Returns ids of the single-buffer chains to be added after `ahead` others: up to `count`, possibly fewer.
    #[inline(always)]
    pub fn next_ids(&self, ahead: usize, count: usize) -> &[u16] {
        either!(self, ring => ring.next_ids(ahead, count))
    }

    /// Prefetches the lines that adding `count` chains will write to.
    #[inline]
    pub fn prefetch(&self, count: usize) {
        either!(self, ring => ring.prefetch(count))
    }

    /// Turns the fast path of taking used chains on or off, for measurements. (For adding, `add_single` is the fast path
    /// and `add` the normal one.)
    pub fn set_fast_path(&mut self, on: bool) {
        either!(self, ring => ring.set_fast_path(on))
    }

    /// Adds a chain of device-readable, then device-writable buffers; returns its id. The device sees it after `publish`.
    ///
    /// # Errors
    /// [`Full`] if there are too few free descriptors, or the chain is empty or longer than the queue.
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> Result<u16, Full> {
        either!(self, ring => ring.add(readable, writable))
    }

    /// Adds up to `count` single-buffer chains; `buffer` returns the buffer for an id. Returns how many chains were added.
    #[inline]
    pub fn add_single(&mut self, count: usize, writable: bool, buffer: impl FnMut(u16) -> Buffer) -> usize {
        either!(self, ring => ring.add_single(count, writable, buffer))
    }

    /// Makes all added chains available to the device.
    #[inline]
    pub fn publish(&mut self) {
        either!(self, ring => ring.publish())
    }

    /// Takes up to `out.len()` chains that the device has used; returns how many.
    ///
    /// # Errors
    /// The [`DriverFault`] if the next used chain is invalid. A fault behind valid chains is returned by the next call.
    #[inline]
    pub fn take_used(&mut self, out: &mut [Used]) -> Result<usize, DriverFault> {
        either!(self, ring => ring.take_used(out))
    }

    /// Like `take_used` for up to `max` chains, for callers that do not need their ids. Does not read each entry if the
    /// device works in order.
    ///
    /// # Errors
    /// As for `take_used`.
    #[inline]
    pub fn reclaim(&mut self, max: usize) -> Result<usize, DriverFault> {
        either!(self, ring => ring.reclaim(max))
    }

    /// Returns whether the device wants to be notified of what was published since the last call.
    #[inline]
    pub fn wants_notification(&mut self) -> bool {
        either!(self, ring => ring.wants_notification())
    }

    /// Asks the device to notify us of the next chain that it uses. Returns `true` if a used chain is there already.
    pub fn enable_notification(&mut self) -> bool {
        either!(self, ring => ring.enable_notification())
    }

    /// Asks the device not to notify us.
    pub fn disable_notification(&mut self) {
        either!(self, ring => ring.disable_notification())
    }

    /// Returns where a device without state of its own must resume, in the format of vhost-user's SET_VRING_BASE: behind
    /// the last used chain, whether taken here or not. Only meaningful while no device works on the ring.
    #[cfg(not(loom))]
    pub fn base(&self) -> u32 {
        match self {
            DriverRing::Split(ring) => ring.base().into(),
            DriverRing::Packed(ring) => ring.base().0,
        }
    }

    /// Returns how many descriptors (packed) or chains (split) a device that stopped at this base (from GET_VRING_BASE)
    /// took and never returned.
    #[cfg(not(loom))]
    pub fn missing(&self, base: u32) -> u32 {
        match self {
            DriverRing::Split(ring) => u32::from((base as u16).wrapping_sub(ring.base())),
            DriverRing::Packed(ring) => ring.missing(base),
        }
    }
}

/// Indirect descriptor tables in the driver's memory, one per id, so that a chain takes one descriptor of the ring.
#[cfg(not(loom))]
pub struct IndirectTables {
    region: std::sync::Arc<ringroad_mem::Region>,
    offset: usize,
    entries: usize,
}

#[cfg(not(loom))]
impl IndirectTables {
    /// Places tables of `entries` descriptors, for a ring of `size`, at `offset` of the driver's memory; `None` unless the
    /// region has `size * entries * 16` bytes there.
    pub fn new(region: std::sync::Arc<ringroad_mem::Region>, offset: usize, size: u32, entries: usize) -> Option<Self> {
        region.span(offset, size as usize * entries * crate::DESCRIPTOR)?;
        // A chain may not be longer than the queue, also in an indirect table (2.7.5.3.1).
        let entries = entries.min(size as usize);
        Some(IndirectTables { region, offset, entries })
    }

    /// Writes the table of `id` and returns the buffer for the ring's descriptor; `None` if the chain does not fit.
    /// `linked`: with `next` fields, as split rings need them.
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
