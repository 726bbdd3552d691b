//! A port as the switch sees it. Implemented in `host`, called by `forward.rs`.

use crate::{Claim, Direction, Dropped, Limits, Vlans};
use ringroad_frame::{BURST, Burst, Sink, Source};
use ringroad_wire::ethernet::MacAddr;
use std::{any::Any, time::Duration};

/// A port of the switch, shared by its worker and by control, which starts and stops its queues. Neither blocks the other: a
/// queue that control holds neither has nor accepts frames.
pub trait Port: Send + Sync {
    /// Exclusive use of a queue that frames come from. The worker keeps it from burst to burst, to save locking.
    type Lease;
    /// Exclusive use of a queue that frames come from, for one burst.
    type Source<'a>: Source
    where
        Self: 'a;
    /// Exclusive use of a queue that frames go to, for one burst.
    type Sink<'a>: Sink
    where
        Self: 'a;

    /// Returns the lease of the source queue with this index; `None` if it is in use.
    fn lease(&self, queue: usize) -> Option<Self::Lease>;

    /// Returns whether another thread wants that queue, so that a lease must be released now.
    fn is_wanted(&self, queue: usize) -> bool;

    /// Returns the source queue for one burst; `None` if it is not running.
    fn source<'a>(&'a self, queue: usize, lease: &'a mut Self::Lease) -> Option<Self::Source<'a>>;

    /// Returns the queue that frames of this worker go to; `None` if it is not running or in use. `hint` spreads senders over
    /// several queues. `frames`: number of frames to be counted as dropped if there is none.
    fn sink(&self, hint: usize, frames: usize) -> Option<Self::Sink<'_>>;

    /// Returns among how many queues the switch distributes flows now. If it is more than one, the `hint` of [`Port::sink`] is the
    /// index of one of them.
    #[inline]
    fn queues(&self) -> usize {
        1
    }

    /// Chooses the queues of these frames of a burst, if the port does that itself; returns `false` if not: then a flow goes to the
    /// queue that its frames last came from. `queues`: the queue of each frame of the burst, by index.
    fn steer(&self, _burst: &Burst, _which: &[u8], _queues: &mut [u8; BURST]) -> bool {
        false
    }

    /// Sends the notifications that recent bursts left pending, because checking whether they are wanted was too expensive or
    /// because they may wait. Returns when it must be called again, without another burst, in terms of `now`; `None`: it need not be.
    fn settle(&self, _now: Duration) -> Option<Duration> {
        None
    }

    /// Returns whether a driver has set the times that `settle` returns, so that they are kept while there are bursts to carry, too.
    /// Always the same.
    fn is_timed(&self) -> bool {
        false
    }

    /// Returns whether flooded frames go here: broadcast, multicast, and those to unknown addresses.
    #[inline]
    fn is_flooded(&self) -> bool {
        true
    }

    /// Returns whether frames may go back to the port that they came from.
    fn hairpin(&self) -> bool {
        false
    }

    /// Returns whether TCP segments to the port become longer frames, if it takes those (GRO).
    fn coalesces(&self) -> bool {
        false
    }

    /// Returns the port's limits; called when it is added.
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// Returns the VLANs that the port belongs to, if it has any; called when it is added. See
    /// [`Switch::set_vlans`](crate::Switch::set_vlans).
    fn vlans(&self) -> Option<Vlans> {
        None
    }

    /// Returns the cost of a frame from or to the port, relative to copying one to a guest. A system call per frame costs more.
    fn weight(&self) -> usize {
        1
    }

    /// Frames from a queue were dropped by the switch. Called by the holder of the queue's lease.
    fn dropped(&self, _queue: usize, _why: Dropped, _frames: usize) {}

    /// Frames of the port are to be captured; see [`Mirror::captures`](crate::Mirror::captures). They are whole, but may have work left to
    /// do.
    fn capture(&self, _direction: Direction, _burst: &Burst, _which: &[u8]) {}

    /// An address was not learned because the port has too many. Called by the holder of the queue's lease.
    fn crowded(&self, _queue: usize) {}

    /// The port has sent a frame with a source address of the port `from`. `report`: report it, for example in the log; the rate
    /// of reports is limited. Called by the holder of the queue's lease.
    fn claimed(&self, _queue: usize, _address: MacAddr, _claim: Claim, _from: &Self, _report: bool) {}

    /// The port's code has panicked. Its queues are not used any more until [`Switch::forget`](crate::Switch::forget) is called for it.
    fn panicked(&self, _message: &str) {}
}

/// Returns the message of a panic.
pub fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
