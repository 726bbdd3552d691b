//! Where a packed ring is that a former process has used: what it noted, as far as the ring agrees. Called by `device.rs` when a
//! ring starts.
//!
//! The USED bit of a descriptor changes once in each pass, when the device uses it; so one look at the first descriptor of the
//! batch that was noted says whether it was published.

use super::layout::{AVAILABLE, Layout, Position, USED, used_flags};
use crate::{
    INDIRECT, Journal, JournalKey, NEXT,
    journal::{Noted, Progress, Staged},
};
use ringroad_mem::sync::Ordering;

/// Where to go on.
pub(super) struct Found {
    /// How far the driver sees what was used.
    pub published: Position,
    /// How far used descriptors are written.
    pub staged: Position,
    /// How far all was carried on, if that is noted.
    pub taken: Option<Position>,
    /// The descriptor that is withheld, if the first two differ.
    pub word: u64,
    /// As in `Staged`.
    pub which: bool,
    /// As in `Staged`.
    pub writes: bool,
    /// As in `Staged`.
    pub strict: bool,
}

/// What the journal says of a ring, if the ring agrees.
pub(super) fn find(ring: &Layout, journal: &Journal, key: &JournalKey) -> Option<Found> {
    let Noted { published, staged, taken, word, progress } = journal.read(key)?;
    let Staged { position: staged, which, writes, strict } = staged;
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
        // Nothing is withheld. What was published last is still there, or was made available again, which the driver does only
        // after all that comes before in the ring; and nothing behind it is used. Where a descriptor may have been passed over,
        // its flags are those of the pass before.
        let is_behind = if strict { is_published } else { is_used };
        let good = batch == published
            || if is_used(ring, batch) {
                second(ring, batch) == u64::from_le(word)
            } else {
                is_published(ring, batch) && is_available(ring, published)
            };
        // Where none is ever passed over, the one before was used too: so also where the last batch went on beyond the ring's end.
        let mut before = published;
        before.back(1, size);
        if !good || is_behind(ring, published) || strict && progress.is_some() && !is_published(ring, before) {
            return None;
        }
        return Some(Found { published, staged, taken, word, which, writes, strict });
    }
    // A batch that is not published: its first descriptor is as the driver made it.
    if !is_available(ring, published) {
        return None;
    }
    let written = if writes { written(ring, staged, progress?)? } else { staged };
    if !(1..=all).contains(&published.distance(written, size)) {
        return None;
    }
    // What was carried on is given back without another look. Buffers to write to whose turn had not come are simply taken again.
    Some(Found { published, staged: written, taken, word, which, writes, strict })
}

/// Whether a ring that is said to be fresh has been used before.
pub(super) fn is_in_use(ring: &Layout, at: Position) -> bool {
    at == Position::START && is_published(ring, at)
}

/// How far the used descriptors behind the first one are written.
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

/// Id and number of descriptors of the chain at a position, which is available there; `None`: there is none.
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

/// Used in this pass, and not made available since.
fn is_used(ring: &Layout, at: Position) -> bool {
    flags(ring, at) == used_flags(at.wrap)
}

/// Used in this pass, perhaps made available since.
fn is_published(ring: &Layout, at: Position) -> bool {
    (flags(ring, at) & USED != 0) == at.wrap
}

/// Available in this pass, and not used.
fn is_available(ring: &Layout, at: Position) -> bool {
    flags(ring, at) == super::layout::available_flags(at.wrap)
}
