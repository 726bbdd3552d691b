//! A port and its state in the switch. Used by `forward.rs` and `delivery.rs`.

use crate::{
    Dropped, Limits, Mirror, Vlans,
    limits::{Notices, Storm},
    pace::Pace,
    port::{Port, panic_message},
    steering::Steering,
};
use ringroad_frame::Burst;
use ringroad_wire::ethernet;
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
    /// When it last had no room.
    last: Cell<Duration>,
    /// How long frames have waited for it, of [`Limits::wait`]. Frames that it accepts give that back.
    spent: Cell<Duration>,
    /// Whether any of these is to be given back.
    owes: Cell<bool>,
}

/// So many bytes in accepted frames, 50 of [`UNIT`], give back all of [`Limits::wait`]. A queue that accepts fewer in that time is not
/// waited for: else one that gets a buffer now and then would stop its senders for ever, and with them their frames to others.
const ALL: usize = 50 * UNIT;
/// A shorter frame counts like one of this length.
const UNIT: usize = 1500;
/// But if its sender does not notice that frames wait ([`Source::notices`]), one below this length gives nothing back: waiting for
/// the receiver of a flood of short datagrams only delays what is behind them. TCP's segments are longer.
///
/// [`Source::notices`]: ringroad_frame::Source::notices
const SHORT: usize = 512;
/// There, a queue that has had room for so many times [`Limits::wait`] owes nothing.
const CALM: u32 = 20;

/// Returns what these frames of a burst count for, in bytes, when they are accepted.
fn worth(burst: &Burst, which: &[u8], notices: bool) -> usize {
    let lens = which.iter().map(|&index| burst.frames().get(usize::from(index)).map_or(0, |frame| frame.len()));
    if notices { lens.sum::<usize>().max(UNIT * which.len()) } else { lens.filter(|&len| len >= SHORT).sum() }
}

impl Room {
    /// Starts over, with frames that wait or not.
    pub fn reset(&self, waits: bool) {
        self.full.set(None);
        self.spent.set(Duration::ZERO);
        self.owes.set(false);
        self.waits.set(waits);
    }

    /// Returns whether frames wait when there is no room.
    #[inline(always)]
    pub fn waits(&self) -> bool {
        self.waits.get()
    }

    /// The queue has accepted the first `accepted` of these frames, and drops the others. `notices`: [`Source::notices`].
    ///
    /// [`Source::notices`]: ringroad_frame::Source::notices
    #[inline]
    pub fn accepted(
        &self,
        limits: &Limits,
        burst: &Burst,
        which: &[u8],
        accepted: usize,
        notices: bool,
        now: Duration,
    ) {
        if self.owes.get() {
            let (taken, dropped) = which.split_at_checked(accepted).unwrap_or((which, &[]));
            self.give_back(limits, burst, taken, !dropped.is_empty(), notices, now);
        }
    }

    #[cold]
    fn give_back(&self, limits: &Limits, burst: &Burst, taken: &[u8], drops: bool, notices: bool, now: Duration) {
        if drops {
            self.last.set(now);
        }
        if taken.is_empty() {
            return;
        }
        let calm = !notices && now.saturating_sub(self.last.get()) >= limits.wait.saturating_mul(CALM);
        let worth = if calm { ALL } else { worth(burst, taken, notices) };
        let waited = self.full.take().map_or(Duration::ZERO, |since| now.saturating_sub(since));
        let earned = limits.wait.saturating_mul(worth.min(ALL) as u32) / ALL as u32;
        let spent = (self.spent.get() + waited).min(limits.wait).saturating_sub(earned);
        self.spent.set(spent);
        self.owes.set(!spent.is_zero());
        self.waits.set(spent < limits.wait);
    }

    /// The queue has no room. Returns until when frames wait; `None` if they do not, or not any more.
    #[cold]
    pub fn refused(&self, limits: &Limits, now: Duration) -> Option<Duration> {
        let since = self.full.get().unwrap_or(now);
        self.full.set(Some(since));
        self.last.set(now);
        self.owes.set(true);
        let until = since.saturating_add(limits.wait.saturating_sub(self.spent.get()));
        self.waits.set(now < until);
        self.waits.get().then_some(until)
    }
}

/// A port and its state in the switch.
pub(crate) struct Member<P: Port> {
    pub port: Arc<P>,
    pub limits: Limits,
    pub vlans: Option<Box<Vlans>>,
    /// Which of its frames are copied.
    pub mirror: Mirror,
    /// It is where frames of others are copied to, and has no other traffic.
    pub is_mirror: bool,
    /// Frames to it do not simply go there: for either reason.
    pub is_mirrored: bool,
    pub storm: Cell<Storm>,
    pub pace: Cell<Pace>,
    /// Of its queues whose frames count towards its rate: the one that was served last, and the one whose turn is next.
    last: Cell<usize>,
    turn: Cell<Option<usize>>,
    pub notices: Cell<Notices>,
    /// The port's code has panicked.
    pub broken: Cell<bool>,
    /// Notifications may be pending: when to look; see [`Port::settle`].
    pub open: Cell<Option<Duration>>,
    /// [`Port::is_timed`].
    pub timed: bool,
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
            timed: port.is_timed(),
            port,
            limits,
            vlans: None,
            mirror: Mirror::default(),
            is_mirror: false,
            is_mirrored: false,
            storm: Cell::default(),
            pace: Cell::default(),
            last: Cell::new(0),
            turn: Cell::new(None),
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
        if limits.rate != self.limits.rate {
            self.pace.set(Pace::default());
        }
        self.limits = limits;
        let rooms = self.rooms.get().into_iter().flatten();
        std::iter::once(&self.room).chain(rooms).for_each(|room| room.reset(!limits.wait.is_zero()));
    }

    /// Returns the VLANs that it belongs to, if any port has VLANs.
    pub fn vlans(&self) -> &Vlans {
        self.vlans.as_deref().unwrap_or(&Vlans::DEFAULT)
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

    /// Returns until when no frames are taken from a queue, because the port has sent more than its rate, or because it is the turn
    /// of another of its queues.
    #[cold]
    pub fn paused(&self, queue: usize, now: Duration) -> Option<Duration> {
        let next = self.pace.get().next(now);
        match self.turn.get() {
            Some(other) if next.is_none() && other != queue => {
                // Refused once only: the other one may have stopped.
                self.turn.set(None);
                return Some(now);
            }
            // Of a port whose queues are all polled, the first one would always come first.
            None if next.is_some() && queue != self.last.get() => self.turn.set(Some(queue)),
            _ => {}
        }
        next
    }

    /// Returns how many frames of a burst may go now, at least one, and when the next one may.
    #[cold]
    pub fn admits(&self, burst: &Burst, now: Duration) -> (usize, Duration) {
        let mut pace = self.pace.get();
        let admitted = burst.frames().iter().take_while(|frame| {
            let admitted = pace.next(now).is_none();
            if admitted {
                pace.take(&self.limits.rate, frame.len() as u64, 1, now);
            }
            admitted
        });
        (admitted.count().max(1), pace.next(now).unwrap_or(now))
    }

    /// Counts the frames of a queue's burst below this index towards the port's rate, and each buffer without a frame as the shortest
    /// one.
    #[cold]
    pub fn paces(&self, queue: usize, burst: &Burst, end: usize, now: Duration) {
        let frames = burst.frames().get(..end).unwrap_or(burst.frames());
        let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
        let refused = burst.refused();
        let mut pace = self.pace.get();
        pace.take(&self.limits.rate, (bytes + refused * ethernet::HEADER) as u64, frames.len() + refused, now);
        self.pace.set(pace);
        self.last.set(queue);
        if self.turn.get() == Some(queue) {
            self.turn.set(None);
        }
    }

    /// Drops frames of a queue.
    #[cold]
    pub fn dropped(&self, queue: usize, why: Dropped, frames: usize) {
        self.port.dropped(queue, why, frames);
    }
}

/// The ports of a switch, by number.
pub(crate) type Members<P> = [Option<Member<P>>];
