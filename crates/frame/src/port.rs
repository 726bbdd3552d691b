//! A port as the switch sees it: queues that frames come from ([`Source`]) and queues that frames go to ([`Sink`]). Implemented
//! by the ports in `host`, called by `switch`.

use crate::{Burst, offload::Support};
use ringroad_mem::Span;

/// A queue that frames come from. The sender's buffers stay in use until `done`.
pub trait Source {
    /// Takes up to a burst of frames. Returns how many buffers were taken, whether they hold valid frames or not; `done` returns
    /// them. 0 if the queue is empty.
    fn take(&mut self, burst: &mut Burst) -> usize;

    /// Returns the burst's buffers to the sender and notifies it if requested.
    fn done(&mut self, burst: &mut Burst);

    /// Returns whether [`Source::retain`] is supported.
    #[inline]
    fn retains(&self) -> bool {
        false
    }

    /// Like `done`, but the frames from index `first` on were not delivered: they stay with the sender, and the next burst begins
    /// with them.
    fn retain(&mut self, burst: &mut Burst, _first: usize) {
        self.done(burst);
    }

    /// Returns whether the sender notices that its frames wait, whatever they are: its queue is full, and it stops. One that does
    /// not, such as the host's network stack behind a TAP interface, drops what its queue has no room for.
    #[inline]
    fn notices(&self) -> bool {
        true
    }

    /// Returns whether [`Source::pour`] is supported: for a source that must read a frame to see its addresses, and reads most
    /// cheaply straight into the receiver's buffers.
    fn pours(&self) -> bool {
        false
    }

    /// Reads up to a burst of frames straight into the buffers of their only possible destination.
    fn pour(&mut self, _sink: &mut impl Sink) -> Poured {
        Poured::Unable
    }
}

/// What [`Source::pour`] and [`Sink::fill`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poured {
    /// They moved this many frames; 0 if there were none.
    Frames(usize),
    /// The receiver has too few buffers now. Nothing was read.
    Full,
    /// The receiver's buffers do not suit. Nothing was read.
    Unable,
}

/// A queue that frames go to.
pub trait Sink {
    /// Returns the offloads that frames put here may have. The caller completes all others.
    #[inline]
    fn support(&self) -> Support {
        Support::empty()
    }

    /// Returns whether frames of [`Sink::support`] that are to be cut are cut here: each segment is a frame's work then.
    fn cuts(&self) -> bool {
        false
    }

    /// Copies the frames with these indices, which ascend, to the receiver and notifies it if requested. Returns how many were
    /// accepted; the sink drops and counts the rest.
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize;

    /// Like `put`, but stops at the first frame for which there is no room now: that frame and those behind it are neither
    /// accepted nor counted. Returns how many of `which` were handled, that is accepted or dropped. Of a frame that is cut here
    /// ([`Sink::cuts`]) the receiver may have got a part already: it gets the rest when the frame is offered again.
    fn offer(&mut self, burst: &Burst, which: &[u8]) -> usize {
        self.put(burst, which);
        which.len()
    }

    /// Returns whether `put` would probably find room for this many more frames of ordinary length.
    fn has_room(&mut self, _frames: usize) -> bool {
        true
    }

    /// Lets a source read up to a burst of frames straight into the receiver's buffers. `read` is called with spans of at least
    /// `room` bytes in total and returns how many bytes it wrote (more than the spans hold if the frame was truncated), or `None`
    /// if there are no more frames. The first [`crate::HEADROOM`] bytes are not part of the frame, but a virtio-net header, which
    /// says what is left to do to it.
    fn fill(&mut self, _room: usize, _read: &mut dyn FnMut(&[Span<'_>]) -> Option<usize>) -> Poured {
        Poured::Unable
    }
}
