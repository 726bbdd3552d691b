//! The inflight region of a connection (vhost-user, GET_INFLIGHT_FD and SET_INFLIGHT_FD): created or mapped for `session.rs`,
//! with one part per vring. `ringroad_ring::Inflight` handles its contents.

use super::quirks;
use crate::{socket::MemoryFile, sys};
use parking_lot::Mutex;
use ringroad_mem::{Region, Words, sync::AtomicU64};
use ringroad_ring::{Inflight, MAX_SIZE};
use std::{fs::File, sync::Arc};
use vhost::vhost_user::message::VhostUserInflight as Message;

/// The vrings that a message can address.
const MOST_QUEUES: u16 = 256;

/// A region and its offset in its file, in bytes.
type Placed = (Arc<Region>, u64);

/// The region that was used last at a socket, over all its connections.
///
/// A frontend can keep the descriptors of all regions that it asks for or hands over, and what a device writes there counts as
/// the daemon's memory. So only the last one keeps its contents.
#[derive(Clone, Default)]
pub(crate) struct LastUsed(Arc<Mutex<Option<Placed>>>);

impl LastUsed {
    /// Empties the region that was used before this one, unless it is the same. No vring may use it any more.
    pub(crate) fn replace(&self, by: &InflightRegion) {
        let mut last = self.0.lock();
        if let Some((before, _)) = last.take_if(|(before, offset)| !by.is_at(before, *offset)) {
            empty(&before);
        }
        // The longest mapping of it covers all that may have been written.
        if last.as_ref().is_none_or(|(before, _)| before.len() < by.region.len()) {
            *last = Some((by.region.clone(), by.offset));
        }
    }
}

/// A region that the frontend keeps for the next back end.
pub(crate) struct InflightRegion {
    region: Arc<Region>,
    /// Where it begins in its file, in bytes.
    offset: u64,
    queues: u16,
    queue_size: u16,
    /// Whether it was last used for packed rings; `None`: not used yet.
    packed: Option<bool>,
}

impl InflightRegion {
    /// Creates a region with room for either layout; the first `vrings` queues are tracked. Also returns the reply to the
    /// frontend and the descriptor to send with it.
    pub(crate) fn make(asked: &Message, vrings: usize) -> Result<(InflightRegion, Message, File), String> {
        let (queues, queue_size) = (asked.num_queues, asked.queue_size);
        check(queues, queue_size)?;
        let len = pages(queues.into(), queue_size);
        let file =
            sys::sealed_memory(len as u64).map_err(|error| format!("cannot create an inflight region: {error}"))?;
        let message = quirks::inflight(asked, len as u64);
        Ok((Self::map(len, vrings, &message, |len| Region::map(&file, 0, len, 0, 0))?, message, file))
    }

    /// Maps a region that the frontend hands back, from any back end.
    pub(crate) fn take(told: &Message, file: &MemoryFile, vrings: usize) -> Result<InflightRegion, String> {
        check(told.num_queues, told.queue_size)?;
        let len = usize::try_from(told.mmap_size).unwrap_or(usize::MAX);
        let offset = told.mmap_offset;
        Self::map(len, vrings, told, |len| file.map(offset, len, 0, 0))
    }

    /// Maps the part that the device's vrings use.
    fn map(
        len: usize,
        vrings: usize,
        told: &Message,
        map: impl FnOnce(u64) -> Result<Arc<Region>, ringroad_mem::Error>,
    ) -> Result<InflightRegion, String> {
        let (queues, queue_size) = (told.num_queues, told.queue_size);
        let most = pages(vrings.min(queues.into()), queue_size);
        let region = map(len.min(most) as u64).map_err(|error| format!("cannot map the inflight region: {error}"))?;
        Ok(InflightRegion { region, offset: told.mmap_offset, queues, queue_size, packed: None })
    }

    /// Returns whether it is the region at this offset of the same file.
    fn is_at(&self, other: &Region, offset: u64) -> bool {
        (self.region.identity(), self.offset) == (other.identity(), offset)
    }

    /// Returns whether both are the same part of the same file.
    pub(crate) fn is_same(&self, other: &InflightRegion) -> bool {
        self.is_at(&other.region, other.offset)
    }

    /// Returns the part of a vring that starts in this layout; [`Inflight::NONE`] if the region does not cover it.
    pub(crate) fn start(&mut self, index: usize, packed: bool) -> Result<Inflight, String> {
        if index >= usize::from(self.queues) {
            return Ok(Inflight::NONE);
        }
        if self.packed.replace(packed) == Some(!packed) {
            // Another driver with the other layout: the old contents are meaningless.
            empty(&self.region);
        }
        self.part(index, packed).ok_or_else(|| {
            format!(
                "the inflight region of {} bytes has no room for it; expected {} bytes for each of {} queues of {} entries",
                self.region.len(),
                Inflight::bytes(packed, self.queue_size),
                self.queues,
                self.queue_size
            )
        })
    }

    fn part(&self, index: usize, packed: bool) -> Option<Inflight> {
        Inflight::new(&self.region, index, self.queue_size, packed)
    }

    /// Clears a vring's part: the frontend knows its position, or its driver starts over.
    pub(crate) fn end(&self, index: usize) {
        if let Some(part) = self.packed.and_then(|packed| self.part(index, packed)) {
            part.end();
        }
    }
}

/// Returns the size in bytes of a region for these queues, in whole pages, which can be freed.
fn pages(queues: usize, queue_size: u16) -> usize {
    (queues * Inflight::bytes(true, queue_size)).next_multiple_of(4096)
}

/// Zeroes a region and frees its pages.
fn empty(region: &Arc<Region>) {
    let words: Option<Words<AtomicU64>> = Words::new(region, 0, region.len() / 8);
    words.inspect(|words| words.clear_from(0));
}

fn check(queues: u16, queue_size: u16) -> Result<(), String> {
    if queues == 0 || queues > MOST_QUEUES || queue_size == 0 || u32::from(queue_size) > MAX_SIZE {
        return Err(format!(
            "inflight region for {queues} queues of {queue_size} entries, expected 1 to {MOST_QUEUES} queues of 1 to {MAX_SIZE}"
        ));
    }
    Ok(())
}
