//! Notification suppression: decides whether the other side wants to be notified. Called by both ends of both layouts.

/// Split rings with EVENT_IDX (2.7.7.2, 2.7.10.1): returns whether `event` is among the last `added` entries before `next`.
#[inline(always)]
pub(crate) fn need_event(event: u16, next: u16, added: u32) -> bool {
    u32::from(next.wrapping_sub(event).wrapping_sub(1)) < added
}

/// Packed rings: an event suppression structure (2.8.14), one 32-bit word in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event(u32);

const ENABLE: u32 = 0;
const DISABLE: u32 = 1;
const DESC: u32 = 2;

impl Event {
    pub(crate) const ENABLED: Event = Event(ENABLE << 16);
    pub(crate) const DISABLED: Event = Event(DISABLE << 16);

    /// Requests a notification when this ring position is passed.
    pub(crate) fn at(slot: u16, wrap: bool) -> Event {
        Event(u32::from(slot & 0x7fff) | u32::from(wrap) << 15 | DESC << 16)
    }

    pub(crate) fn from_word(word: u32) -> Event {
        Event(u32::from_le(word))
    }

    pub(crate) fn to_word(self) -> u32 {
        self.0.to_le()
    }

    /// Returns whether to notify after adding `added` entries that end just before `next` with wrap counter `wrap`; never
    /// if `added` is 0.
    #[inline(always)]
    pub(crate) fn wanted(self, next: u16, wrap: bool, added: u32, size: u16) -> bool {
        match self.0 >> 16 & 3 {
            ENABLE => added > 0,
            DISABLE => false,
            // Any other value that the peer writes is treated as a position. At worst the peer gets too many notifications
            // or, by its own fault, too few.
            _ if added >= u32::from(size) => true,
            _ => {
                let (slot, event_wrap) = (self.0 as u16 & 0x7fff, self.0 & 0x8000 != 0);
                let slot = if event_wrap == wrap { slot } else { slot.wrapping_sub(size) };
                need_event(slot, next, added)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_event_index() {
        assert!(need_event(5, 6, 1));
        assert!(!need_event(6, 6, 1));
        assert!(!need_event(4, 6, 1));
        assert!(need_event(65535, 2, 8));
        assert!(!need_event(2, 2, 8));
        assert!(!need_event(0, 7, 0), "nothing added");
        assert!((0..=65535).all(|event| need_event(event, 7, 65536)), "every index has been passed");
    }

    #[test]
    fn packed_events() {
        assert!(Event::ENABLED.wanted(5, true, 1, 8) && !Event::ENABLED.wanted(5, true, 0, 8));
        assert!(!Event::DISABLED.wanted(5, true, 5, 8));
        // After a full pass of the ring every position has been passed.
        assert!([8, 65536, 65537].iter().all(|&added| Event::at(5, true).wanted(5, true, added, 8)));
        // Positions 0..8 of a ring of 8, both wraps: entries [next - added, next) contain the position or not.
        for next in 0..8u16 {
            for added in 0..8u32 {
                for back in 0..8u32 {
                    // The position `back` entries before `next`; 0 is the entry that is added next.
                    let slot = (i32::from(next) - back as i32).rem_euclid(8) as u16;
                    let wrap = back <= u32::from(next);
                    let wanted = Event::at(slot, wrap).wanted(next, true, added, 8);
                    assert_eq!(wanted, back > 0 && back <= added, "next {next} added {added} back {back}");
                }
            }
        }
    }
}
