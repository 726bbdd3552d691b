//! What a port is to the switch: queues that frames come from and queues that they go to.

use crate::Burst;
use ringroad_mem::Span;

/// A queue that frames come from. The frames of a burst stay the sender's until `done`.
pub trait Source {
    /// Takes up to a burst of frames. Returns how many buffers were taken, frames or not, which `done` gives back; 0: there is
    /// nothing now.
    fn take(&mut self, burst: &mut Burst) -> usize;

    /// Gives the buffers of the burst back to the sender and notifies it if it wants that.
    fn done(&mut self, burst: &mut Burst);

    /// Whether it can [`Source::pour`]: it learns what a frame is only by reading it, and reads best into the receiver's
    /// buffers.
    fn pours(&self) -> bool {
        false
    }

    /// Reads up to a burst of frames straight into the buffers of their only possible destination. Returns how many frames;
    /// `None`: not possible now, nothing was read.
    fn pour(&mut self, _sink: &mut impl Sink) -> Option<usize> {
        None
    }
}

/// A queue that frames go to.
pub trait Sink {
    /// Copies the frames with these indices to the receiver and notifies it if it wants that. Returns how many it took; the
    /// sink drops and counts the rest.
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize;

    /// Lets a source read up to a burst of frames straight into the receiver's buffers: `read` is called with spans of at
    /// least `room` bytes and returns how many bytes it has written (more than there was room for: the frame was cut), or
    /// `None` when there are no more frames. The first [`crate::HEADROOM`] bytes of the spans are not part of the frame, and
    /// `read` may write anything to them. Returns how many frames were received; `None`: not possible now, nothing was read.
    fn fill(&mut self, _room: usize, _read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Option<usize> {
        None
    }
}
