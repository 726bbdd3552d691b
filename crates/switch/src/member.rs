//! A port and its state in the switch. Used by `forward.rs` and `delivery.rs`.

use crate::{
    Dropped, Limits,
    limits::{Notices, Storm},
    pace::Pace,
    port::{Port, panic_message},
    steering::Steering,
};
use ringroad_frame::Burst;
use std::{
    any::Any,
    cell::{Cell, OnceCell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

/// A time that has passed.
pub(crate) const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

/// Whether frames wait for a queue.
#[derive(Default)]
pub(crate) struct Room {
    /// Whether they wait at their sender when the queue has no room: it may be told to, and takes frames now and then.
    waits: Cell<bool>,
    /// When it was first found to have no room, without having accepted a frame since.
    full: Cell<Option<Duration>>,
}

impl Room {
    /// Starts over, with frames that wait or not.
    pub fn reset(&self, waits: bool) {
        self.full.set(None);
        self.waits.set(waits);
    }

    /// Returns whether frames wait when there is no room.
    #[inline(always)]
    pub fn waits(&self) -> bool {
        self.waits.get()
    }

    /// The queue has accepted frames.
    #[inline]
    pub fn accepted(&self, limits: &Limits) {
        if self.full.get().is_some() {
            self.reset(!limits.wait.is_zero());
        }
    }

    /// The queue has no room. Returns until when frames wait; `None` if they do not, or not any more.
    #[cold]
    pub fn refused(&self, limits: &Limits, now: Duration) -> Option<Duration> {
        let since = self.full.get().unwrap_or(now);
        self.full.set(Some(since));
        let until = since + limits.wait;
        self.waits.set(now < until);
        self.waits.get().then_some(until)
    }
}

/// A port and its state in the switch.
pub(crate) struct Member<P: Port> {
    pub port: Arc<P>,
    pub limits: Limits,
    pub storm: Cell<Storm>,
    pub pace: Cell<Pace>,
    pub notices: Cell<Notices>,
    /// The port's code has panicked.
    pub broken: Cell<bool>,
    /// Notifications may be pending: when to look; see [`Port::settle`].
    pub open: Cell<Option<Duration>>,
    /// Of the first queue that frames go to, or of all together if flows do not choose between them.
    room: Room,
    /// Of the others that flows choose from.
    rooms: OnceCell<Box<[Room]>>,
    /// Where flows go if there are several queues.
    pub steering: Steering,
    /// Leases kept from recent bursts, by queue; released when the queues are idle.
    pub leases: RefCell<Vec<Option<P::Lease>>>,
}

impl<P: Port> Member<P> {
    pub fn new(port: Arc<P>, limits: Limits) -> Member<P> {
        Member {
            port,
            limits,
            storm: Cell::default(),
            pace: Cell::default(),
            notices: Cell::new(Notices::new()),
            broken: Cell::new(false),
            open: Cell::new(None),
            room: Room::default(),
            rooms: OnceCell::new(),
            steering: Steering::new(),
            leases: RefCell::default(),
        }
    }

    /// Sets the limits. What waits starts over.
    pub fn limit(&mut self, limits: Limits) {
        self.limits = limits;
        let rooms = self.rooms.get().into_iter().flatten();
        std::iter::once(&self.room).chain(rooms).for_each(|room| room.reset(!limits.wait.is_zero()));
    }

    /// Returns what is known of a queue's room; always the same if flows do not choose between queues.
    #[inline(always)]
    pub fn room(&self, queue: u8) -> &Room {
        if queue == 0 { &self.room } else { self.other_room(queue) }
    }

    #[cold]
    fn other_room(&self, queue: u8) -> &Room {
        let new = || {
            let room = Room::default();
            room.reset(!self.limits.wait.is_zero());
            room
        };
        let rooms = self.rooms.get_or_init(|| (1..=u8::MAX).map(|_| new()).collect());
        rooms.get(usize::from(queue) - 1).unwrap_or(&self.room)
    }

    /// Returns a queue's lease: the one that was kept, or a new one.
    #[inline]
    pub fn lease(&self, queue: usize) -> Option<P::Lease> {
        let kept = self.leases.borrow_mut().get_mut(queue).and_then(Option::take);
        kept.filter(|_| !self.port.is_wanted(queue)).or_else(|| self.port.lease(queue))
    }

    /// Keeps a lease for the next burst.
    #[inline(always)]
    pub fn keep(&self, queue: usize, lease: P::Lease) {
        let mut leases = self.leases.borrow_mut();
        if leases.len() <= queue {
            leases.resize_with(queue + 1, || None);
        }
        if let Some(place) = leases.get_mut(queue) {
            *place = Some(lease);
        }
    }

    /// Excludes the port, whose code has panicked.
    #[cold]
    pub fn panicked(&self, payload: &(dyn Any + Send)) {
        self.broken.set(true);
        self.open.set(None);
        // Its code may panic again here.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            if let Ok(mut leases) = self.leases.try_borrow_mut() {
                leases.clear();
            }
            self.port.panicked(panic_message(payload));
        }));
    }

    /// Returns until when no frames are taken from the port, because it has sent more than its rate.
    #[cold]
    pub fn paused(&self, now: Duration) -> Option<Duration> {
        self.pace.get().next(now)
    }

    /// Counts the frames of a burst below this index towards the port's rate.
    #[cold]
    pub fn paces(&self, burst: &Burst, end: usize, now: Duration) {
        let frames = burst.frames().get(..end).unwrap_or(burst.frames());
        let bytes = frames.iter().map(|frame| frame.len() as u64).sum();
        let mut pace = self.pace.get();
        pace.take(&self.limits.rate, bytes, frames.len(), now);
        self.pace.set(pace);
    }

    /// Drops frames of a queue.
    #[cold]
    pub fn dropped(&self, queue: usize, why: Dropped, frames: usize) {
        self.port.dropped(queue, why, frames);
    }
}

/// The ports of a switch, by number.
pub(crate) type Members<P> = [Option<Member<P>>];
