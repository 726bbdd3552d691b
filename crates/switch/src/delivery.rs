//! Puts the frames of a burst where they go: into a port's queue or, by their flows, into several. Used by `forward.rs`.

use crate::{
    member::{AT_ONCE, Member, Members},
    mirror::Direction,
    port::Port,
};
use ringroad_frame::{ALL, BURST, Burst, Flow, Sink, Software, Source};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

/// Why frames stayed with their sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The port that has no room; `None`: their own port has sent more than its rate.
    pub port: Option<u32>,
    /// When to try again at the latest, as time since the switch was created.
    pub until: Duration,
}

/// Indices of frames of a burst, in order.
pub(crate) struct Group {
    which: [u8; BURST],
    len: usize,
}

impl Group {
    const EMPTY: Group = Group { which: [0; BURST], len: 0 };

    /// Returns these indices.
    pub fn of(which: &[u8]) -> Group {
        let mut all = Group::EMPTY;
        which.iter().for_each(|&index| all.push(index));
        all
    }

    /// Returns those of which it is true, and the others.
    #[inline(always)]
    pub fn split(&self, of: impl Fn(u8) -> bool) -> (Group, Group) {
        let (mut group, mut others) = (Group::EMPTY, Group::EMPTY);
        self.list().iter().for_each(|&index| if of(index) { &mut group } else { &mut others }.push(index));
        (group, others)
    }

    #[inline(always)]
    fn push(&mut self, index: u8) {
        if let Some(place) = self.which.get_mut(self.len) {
            *place = index;
            self.len += 1;
        }
    }

    #[inline(always)]
    pub fn list(&self) -> &[u8] {
        self.which.get(..self.len).unwrap_or_default()
    }
}

/// What finding a frame's flow costs, in copies of a frame.
pub(crate) const STEERING: usize = 4;

/// A queue of a port.
pub(crate) struct To<'a, P: Port> {
    pub member: &'a Member<P>,
    /// Selects it; see [`Port::sink`].
    pub hint: usize,
    /// Its index if flows choose between queues; else 0.
    pub queue: u8,
}

// Not derived, as that would ask for ports that can be copied.
impl<P: Port> Clone for To<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Port> Copy for To<'_, P> {}

/// The state of delivering a burst.
pub(crate) struct Delivery<'a, P: Port + 'a> {
    pub ports: &'a Members<P>,
    /// The last destination, kept until the source has published.
    held: Option<P::Sink<'a>>,
    /// Cost of the copies so far.
    pub weight: usize,
    software: &'a mut Option<Software>,
    /// Whether the source keeps frames that wait.
    retains: bool,
    /// Whether their sender notices that they wait.
    notices: bool,
    /// Index behind the last frame that was delivered.
    behind: usize,
    /// The frames from this index on wait, whatever their destination, for `waiting`.
    pub end: usize,
    pub waiting: Option<Wait>,
    now: Duration,
}

impl<'a, P: Port> Delivery<'a, P> {
    /// Nothing was delivered yet.
    #[inline(always)]
    pub fn new(ports: &'a Members<P>, software: &'a mut Option<Software>, source: &impl Source, now: Duration) -> Self {
        let (retains, notices) = (source.retains(), source.notices());
        Delivery { ports, held: None, weight: 0, software, retains, notices, behind: 0, end: BURST, waiting: None, now }
    }

    /// Frames beyond the rate of their port stay there.
    #[cold]
    pub fn admit(&mut self, burst: &Burst, from: &Member<P>) {
        let (end, until) = from.admits(burst, self.now);
        if end < burst.frames().len() {
            self.end = end;
            self.waiting = Some(Wait { port: None, until });
        }
    }

    /// Puts frames of a burst into a port's queue, which is kept; returns how many were handled.
    #[inline(always)]
    fn put(&mut self, to: To<'a, P>, burst: &Burst, which: &[u8], wait: bool) -> usize {
        if to.member.is_mirrored {
            self.put_mirrored(to, burst, which, wait)
        } else {
            self.put_there(to, burst, which, wait)
        }
    }

    /// Puts frames into the queue of a port that is mirrored. One that others are mirrored to gets none.
    #[cold]
    fn put_mirrored(&mut self, to: To<'a, P>, burst: &Burst, which: &[u8], wait: bool) -> usize {
        if to.member.is_mirror {
            return which.len();
        }
        let handled = self.put_there(to, burst, which, wait);
        self.copy(to.member, Direction::To, burst, which.get(..handled).unwrap_or_default());
        handled
    }

    /// Copies the frames that come from a port, without those that stay there: they come again.
    pub fn mirror_from(&mut self, from: &Member<P>, burst: &Burst) {
        let which = ALL.get(..self.end.min(burst.frames().len())).unwrap_or_default();
        self.copy(from, Direction::From, burst, which);
    }

    /// Copies these frames of a port.
    fn copy(&mut self, of: &Member<P>, direction: Direction, burst: &Burst, which: &[u8]) {
        let wanted = if direction == Direction::From { of.mirror.from } else { of.mirror.to };
        if !wanted || which.is_empty() {
            return;
        }
        if of.mirror.captures {
            of.port.capture(direction, burst, which);
        }
        if let Some(Some(target)) = of.mirror.port.and_then(|number| self.ports.get(number as usize)) {
            self.put_copies(target, burst, which);
        }
    }

    /// Puts copies of frames into the first queue of a port that others are mirrored to, as far as there is room.
    fn put_copies(&mut self, member: &'a Member<P>, burst: &Burst, which: &[u8]) {
        // The frames themselves may still have to wait.
        let behind = self.behind;
        self.put_there(To { member, hint: 0, queue: 0 }, burst, which, false);
        self.behind = behind;
    }

    /// A panic there stops that port only: the others get their frames, and the source its buffers.
    fn put_there(&mut self, to: To<'a, P>, burst: &Burst, which: &[u8], wait: bool) -> usize {
        let To { member, hint, queue } = to;
        // First release the previous destination: it may be the same one.
        self.held = None;
        self.behind = which.last().map_or(self.behind, |&last| self.behind.max(usize::from(last) + 1));
        let all = which.len();
        if member.broken.get() {
            return all;
        }
        let (held, software, notices, now) = (&mut self.held, &mut *self.software, self.notices, self.now);
        let mut work = all;
        let put = catch_unwind(AssertUnwindSafe(|| {
            let Some(sink) = member.port.sink(hint, all) else { return all };
            member.open.set(AT_ONCE);
            let sink = held.insert(sink);
            let coalesces = member.port.coalesces();
            let accepted;
            match (burst.has_offloads() || coalesces, wait) {
                (false, true) => return sink.offer(burst, which),
                (false, false) => accepted = sink.put(burst, which),
                (true, true) => {
                    let offer = if coalesces { Software::offer_coalesced } else { Software::offer_finished };
                    let handled;
                    (handled, work) = offer(software, sink, burst, which);
                    return handled;
                }
                (true, false) => {
                    let put = if coalesces { Software::put_coalesced } else { Software::put_finished };
                    (accepted, work) = put(software, sink, burst, which);
                }
            }
            member.room(queue).accepted(&member.limits, burst, which, accepted, notices, now);
            all
        }));
        self.weight += work * member.port.weight();
        put.unwrap_or_else(|payload| {
            self.held = None;
            member.panicked(&*payload);
            all
        })
    }

    /// Puts frames into the queue of the port with this number, their only destination; or into several queues, by their flows. If
    /// there is no room for them, they and all behind them stay with the sender.
    #[inline(always)]
    pub fn put_waiting(&mut self, number: u32, to: To<'a, P>, burst: &Burst, which: &[u8]) {
        if to.member.port.queues() > 1 {
            return self.put_flows(Some(number), to.member, burst, which);
        }
        self.put_or_leave(number, to, burst, which);
    }

    /// Puts frames into a port's queue, or into several by their flows. Those without room are dropped.
    pub fn put_dropping(&mut self, to: To<'a, P>, burst: &Burst, which: &[u8]) {
        if to.member.port.queues() > 1 {
            return self.put_flows(None, to.member, burst, which);
        }
        self.put(to, burst, which, false);
    }

    /// Puts frames into the queues that their flows go to. `number`: the port's, if it is their only destination.
    #[inline(never)]
    fn put_flows(&mut self, number: Option<u32>, member: &'a Member<P>, burst: &Burst, which: &[u8]) {
        let queues = member.port.queues();
        let mut queue = [0; BURST];
        let steering = &member.steering;
        let steers = catch_unwind(AssertUnwindSafe(|| member.port.steer(burst, which, &mut queue)));
        let steers = steers.unwrap_or_else(|payload| {
            member.panicked(&*payload);
            false
        });
        // A hash by the guest's key takes twice as long.
        self.weight += which.len() * if steers { 2 * STEERING } else { STEERING };
        if !steers {
            for &index in which {
                if let Some(place) = queue.get_mut(usize::from(index)) {
                    *place = steering.queue(Flow::read(burst, index.into()), queues);
                }
            }
        }
        let of = |index: u8| queue.get(usize::from(index)).copied().unwrap_or_default();
        let mut left = Group::of(which);
        while let Some(&first) = left.list().first() {
            let group;
            (group, left) = left.split(|index| of(index) == of(first));
            let to = To { member, hint: of(first).into(), queue: of(first) };
            match number {
                // What stays with the sender is not put anywhere.
                Some(number) => {
                    let which = before(group.list(), self.end);
                    if !which.is_empty() {
                        self.put_or_leave(number, to, burst, which);
                    }
                }
                None => drop(self.put(to, burst, group.list(), false)),
            }
        }
    }

    #[inline(always)]
    fn put_or_leave(&mut self, number: u32, to: To<'a, P>, burst: &Burst, which: &[u8]) {
        let room = to.member.room(to.queue);
        let wait = self.retains && room.waits();
        let behind = self.behind;
        let handled = self.put(to, burst, which, wait);
        if handled < which.len() {
            self.behind = behind;
            self.leave(number, to, burst, which, handled);
        } else if wait {
            room.accepted(&to.member.limits, burst, which, handled, self.notices, self.now);
        }
    }

    /// The frames of `which` behind the first `handled` ones found no room.
    #[cold]
    fn leave(&mut self, number: u32, to: To<'a, P>, burst: &Burst, which: &[u8], handled: usize) {
        let (room, limits) = (to.member.room(to.queue), &to.member.limits);
        let (done, left) = which.split_at_checked(handled).unwrap_or((which, &[]));
        if handled > 0 {
            room.accepted(limits, burst, done, handled, self.notices, self.now);
        }
        self.behind = done.last().map_or(self.behind, |&last| self.behind.max(usize::from(last) + 1));
        // Frames to other ports that were behind them have been delivered already and are not sent again: only those behind all
        // of these can wait.
        let Some(until) = room.refused(limits, self.now) else {
            self.put(to, burst, left, false);
            return;
        };
        let split = left.partition_point(|&index| usize::from(index) < self.behind);
        let (late, waiting) = left.split_at_checked(split).unwrap_or((left, &[]));
        if !late.is_empty() {
            self.put(to, burst, late, false);
        }
        if let Some(&first) = waiting.first() {
            self.end = first.into();
            self.waiting = Some(Wait { port: Some(number), until });
        }
    }
}

/// Returns the indices below `end`.
#[cold]
pub(crate) fn before(which: &[u8], end: usize) -> &[u8] {
    which.get(..which.partition_point(|&index| usize::from(index) < end)).unwrap_or_default()
}
