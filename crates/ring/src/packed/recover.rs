//! Crash recovery of a packed ring: finds the position from the journal of a former process, if the ring agrees with it.
//! Called by `device.rs` when a ring starts.
//!
//! The device changes a descriptor's USED bit once per pass, when it uses the descriptor. So the first descriptor of the
//! recorded batch shows whether the batch was published.

use super::layout::{AVAILABLE, Layout, Position, USED, used_flags};
use crate::{
    INDIRECT, Journal, JournalKey, NEXT,
    journal::{Frontend, Progress, Record, Staged},
    layout::RingPosition,
};
use ringroad_mem::sync::Ordering;

/// Where to continue.
pub(super) struct Found {
    /// Position up to which the driver sees used descriptors.
    pub published: Position,
    /// Position up to which used descriptors are written.
    pub staged: Position,
    /// Position up to which chains were consumed, if recorded.
    pub taken: Option<Position>,
    /// Second word of the deferred head, if the first two positions differ.
    pub word: u64,
    /// As in `Staged`.
    pub second_word: bool,
    /// As in `Staged`.
    pub per_chain: bool,
    /// As in `Staged`.
    pub all_written: bool,
    /// The former process's frontend.
    pub frontend: Frontend,
}

/// Returns what the journal says about a ring; `None` if there is no record or the ring contradicts it.
pub(super) fn find(ring: &Layout, journal: &Journal, key: &JournalKey) -> Option<Found> {
    let Record { published, staged, taken, word, progress, frontend } = journal.read(key)?;
    let Staged { position: staged, second_word, per_chain, all_written } = staged;
    let size = ring.size;
    let position = |bits: u16| (bits & 0x7fff < size).then(|| Position::from_bits(bits, size));
    let (mut published, staged) = (position(published)?, position(staged)?);
    let taken = match taken {
        Some(taken) => Some(position(taken)?),
        None => None,
    };
    let batch = match &progress {
        Some(progress) => position(progress.batch)?,
        None => published,
    };
    let all = published.distance(staged, size);
    if all > size || taken.is_some_and(|taken| !(all..=size).contains(&published.distance(taken, size))) {
        return None;
    }
    if all > 0 && is_published(ring, published) {
        published = staged;
    }
    if published == staged {
        // Nothing is deferred. The batch published last must still be in the ring, or have been made available again, which
        // the driver does only after everything before it; and nothing behind it may be used. Where descriptors may have
        // been skipped, their flags are those of the previous pass.
        let is_behind = if all_written { is_published } else { is_used };
        let good = batch == published
            || if is_used(ring, batch) {
                second(ring, batch) == u64::from_le(word)
            } else {
                is_published(ring, batch) && is_available(ring, published)
            };
        // If no descriptor is ever skipped, the one before was used too, even if the last batch crossed the ring's end.
        let mut before = published;
        before.back(1, size);
        if !good || is_behind(ring, published) || all_written && progress.is_some() && !is_published(ring, before) {
            return None;
        }
        return Some(Found { published, staged, taken, word, second_word, per_chain, all_written, frontend });
    }
    // An unpublished batch: its first descriptor must be as the driver wrote it.
    if !is_available(ring, published) {
        return None;
    }
    let written = if per_chain { written(ring, staged, progress?)? } else { staged };
    if !(1..=all).contains(&published.distance(written, size)) {
        return None;
    }
    // Consumed chains are returned without being read again. Writable chains beyond `written` are simply taken again.
    Some(Found { published, staged: written, taken, word, second_word, per_chain, all_written, frontend })
}

/// A run of descriptors that the frontend used itself while no device was connected; see [`foreign`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Foreign {
    /// Position of the first.
    pub from: Position,
    /// Position behind the last.
    pub to: Position,
}

/// Returns the descriptors ahead of `next` that the frontend used itself while no device was connected; `base` is what it
/// says now.
///
/// QEMU drops what a guest transmits while the link is down: it takes chains at an index of its own, where the last clean
/// stop left it (hw/net/virtio-net.c, `virtio_net_drop_tx_queue_data`), not where the killed device was. If the guest has
/// made the descriptor there available, QEMU uses it, and the driver gets it back when the device has returned everything
/// before it. A device that arrived there would wait forever for a descriptor that is used already. The base tells how far
/// QEMU went; of the run, its first descriptor shows that it was used in this pass: both flags equal the wrap counter, as in
/// no descriptor ahead of the device that it used itself.
pub(super) fn foreign(ring: &Layout, known: Frontend, base: Position, next: Position) -> Option<Foreign> {
    let (size, from) = (ring.size, Position::from_bits(known.from, ring.size));
    let is_ahead = next.distance(from, size) < size;
    let run = from.distance(base, size);
    (is_ahead && (1..=size).contains(&run) && is_used(ring, from)).then_some(Foreign { from, to: base })
}

/// Returns whether a ring that should be fresh has been used before.
pub(super) fn is_in_use(ring: &Layout, at: Position) -> bool {
    at == Position::START && is_published(ring, at)
}

/// Returns the position up to which the used descriptors behind the first one are written.
fn written(ring: &Layout, staged: Position, progress: Progress) -> Option<Position> {
    let size = ring.size;
    let position = |bits: u16| (bits & 0x7fff < size).then(|| Position::from_bits(bits, size));
    let mut at = position(progress.at)?;
    if !progress.singles {
        return Some(if at != staged && is_used(ring, at) { position(progress.next)? } else { at });
    }
    for _ in 0..size {
        if at == staged || !is_used(ring, at) {
            break;
        }
        at.advance(1, size);
    }
    Some(at)
}

/// Returns the id and number of descriptors of the available chain at a position; `None` if there is none.
pub(super) fn chain(ring: &Layout, mut at: Position) -> Option<(u16, u16)> {
    if !is_available(ring, at) {
        return None;
    }
    for slots in 1..=ring.size {
        let word = second(ring, at);
        let flags = (word >> 48) as u16;
        if flags & NEXT == 0 || flags & INDIRECT != 0 {
            return Some(((word >> 32) as u16, slots));
        }
        at.advance(1, ring.size);
    }
    None
}

fn second(ring: &Layout, at: Position) -> u64 {
    let word = ring.pairs().get(usize::from(at.slot)).map_or(0, |[_, word]| word.load(Ordering::Acquire));
    u64::from_le(word)
}

fn flags(ring: &Layout, at: Position) -> u16 {
    (second(ring, at) >> 48) as u16 & (AVAILABLE | USED)
}

/// Returns whether the descriptor was used in this pass and not made available since.
fn is_used(ring: &Layout, at: Position) -> bool {
    flags(ring, at) == used_flags(at.wrap)
}

/// Returns whether the descriptor was used in this pass; it may have been made available since.
fn is_published(ring: &Layout, at: Position) -> bool {
    (flags(ring, at) & USED != 0) == at.wrap
}

/// Returns whether the descriptor is available in this pass and not used.
fn is_available(ring: &Layout, at: Position) -> bool {
    flags(ring, at) == super::layout::available_flags(at.wrap)
}
