//! The receive ring of the driver.

use super::{
    bus::Bus,
    ring::{BUFFER, GUEST, Ring},
};
use crate::{
    descriptor::rx::{DD, EOP},
    registers::RDT,
};
use ringroad_frame::MAX_FRAME;
use ringroad_mem::Span;

/// Buffers that the longest frame needs.
const PARTS: usize = MAX_FRAME.div_ceil(BUFFER);
/// Frames that are received in one call.
const BUDGET: u32 = 256;

/// The receive ring, and where the driver is in it.
#[derive(Debug)]
pub(super) struct Receiver {
    pub ring: Ring,
    /// First buffer of the frame that is next.
    next: u32,
}

impl Receiver {
    pub fn new(ring: Ring) -> Receiver {
        Receiver { ring, next: 0 }
    }

    /// Fills the ring anew.
    pub fn prepare(&mut self) {
        (0..self.ring.count).for_each(|index| self.make_available(index));
        self.next = 0;
    }

    fn make_available(&self, index: u32) {
        self.ring.write(index, [GUEST + self.ring.buffer_at(index) as u64, 0]);
    }

    pub fn receive(&mut self, bus: &mut impl Bus, mut frame: impl FnMut(&[Span<'_>])) -> u32 {
        let mut frames = 0;
        let (mut next, mut at) = (self.next, self.next);
        let mut parts = [Span::empty(); PARTS];
        let mut count = 0;
        // Once round the ring at most: the device may write descriptors back as soon as they are available.
        for _ in 0..self.ring.count {
            let word = self.ring.status(at);
            if word & DD == 0 || frames == BUDGET {
                break;
            }
            if let Some(place) = parts.get_mut(count) {
                *place = self.ring.buffer(at).first((word as usize & 0xffff).min(BUFFER));
            }
            count += 1;
            at = self.ring.next(at);
            // A device that never ends a frame gets its buffers back, once there are more than any frame has.
            let complete = word & EOP != 0;
            if complete && let Some(parts) = parts.get(..count) {
                frame(parts);
                frames += 1;
            }
            if complete || count > PARTS {
                while next != at {
                    self.make_available(next);
                    next = self.ring.next(next);
                }
                count = 0;
            }
        }
        if next != self.next {
            self.next = next;
            // One descriptor always stays with us, so that a full ring does not look empty.
            bus.write(RDT, if next == 0 { self.ring.count - 1 } else { next - 1 });
        }
        frames
    }
}
