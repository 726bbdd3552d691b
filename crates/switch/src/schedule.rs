//! Which queues a worker polls, and when it may sleep. A state machine over time; the loop around it, with clock, epoll and
//! notifications, is in `host`.

use crate::{
    gather::{Gather, Pauses},
    linger::{Linger, Rest},
};
use ringroad_frame::BURST;
use std::time::{Duration, Instant};

/// How long a queue is polled after its last frame before the worker waits for a notification instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poll {
    /// For this long. Zero: event driven.
    For(Duration),
    /// For as long as its frames follow each other, 50 us at most, and not while another thread needs the CPU: event driven at low
    /// rates.
    Auto,
    /// Without limit: the worker's core is never idle.
    Unlimited,
}

/// The work that a burst was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Number of buffers taken, whether they held frames or not.
    pub frames: usize,
    /// It took as long as several ordinary bursts, so it is a whole turn.
    pub heavy: bool,
    /// Nothing was taken because it is not time yet, whether the queue is empty or not.
    pub early: bool,
}

/// When a queue that wakes has its turn, in the round that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Before those that are polled: its driver has notified the device, and it has waited longer. As it is polled then until its
    /// following turn at least, it gets no more turns than they do.
    Next,
    /// Behind them. It may have had its turn in this round, and stopped being polled for lack of room.
    Last,
}

/// Frames after which a round is interrupted, for the caller to look at queues that are not polled. A heavy burst counts as many.
const ENOUGH: usize = 16 * BURST;

/// How long a queue is polled at most with [`Poll::Auto`].
const MOST: Duration = Duration::from_micros(50);

/// How long queues with [`Poll::Auto`] are not polled at most because another thread needs the CPU. Each try may delay frames for a
/// time slice of that thread.
const REST: Duration = Duration::from_millis(400);

/// A queue that is polled.
#[derive(Clone, Copy, Debug)]
struct Active<K> {
    key: K,
    poll: Poll,
    /// When it was first found empty; `None` if it had frames at the last poll.
    empty: Option<Instant>,
    /// For [`Poll::Auto`].
    linger: Linger,
}

impl<K> Active<K> {
    /// Returns whether the queue, which is empty, has been polled for long enough.
    fn has_waited(&mut self, rest: &Rest, now: impl Fn() -> Instant) -> bool {
        let budget = match self.poll {
            Poll::For(Duration::ZERO) => return true,
            Poll::For(budget) => budget,
            Poll::Auto => self.linger.time(MOST),
            Poll::Unlimited => return false,
        };
        let now = now();
        let polled = now.saturating_duration_since(*self.empty.get_or_insert(now));
        polled >= budget || self.poll == Poll::Auto && rest.is_on(|| now)
    }
}

/// A queue with [`Poll::Auto`] that is not polled.
#[derive(Clone, Copy, Debug)]
struct Asleep<K> {
    key: K,
    /// When it was first found empty; `None` if it sleeps because it is too early for its frames.
    empty: Option<Instant>,
    linger: Linger,
}

/// The queues that are polled, in turn. `K` identifies a queue.
#[derive(Debug)]
pub struct Schedule<K> {
    active: Vec<Active<K>>,
    /// Where an interrupted round goes on: those before have had their turn.
    next: usize,
    /// Number of queues that have woken since with [`Turn::Next`].
    woken: usize,
    /// See [`Schedule::is_long`].
    long: bool,
    asleep: Vec<Asleep<K>>,
    /// For queues with [`Poll::Auto`].
    rest: Rest,
    /// The thread has yielded since, and nobody else needed the CPU.
    unshared: bool,
    gather: Gather,
    turn: usize,
    alone: Option<Alone<K>>,
}

/// The only queue that is polled.
#[derive(Debug)]
struct Alone<K> {
    key: K,
    pauses: Pauses,
    /// Not to be polled before this.
    until: Option<Instant>,
}

impl<K: Copy + Eq> Schedule<K> {
    /// Creates a schedule without queues. `gather`: the pause after bursts that are not full, if only one queue is polled.
    /// `turn`: maximum number of bursts of a queue before the next queue's turn; only full bursts that are not heavy are followed
    /// by another. Within a turn what a queue uses stays in the caches; after the turns of many others it does not.
    pub fn new(gather: Gather, turn: usize) -> Self {
        Schedule {
            active: Vec::new(),
            next: 0,
            woken: 0,
            long: false,
            asleep: Vec::new(),
            rest: Rest::new(REST),
            unshared: false,
            gather,
            turn,
            alone: None,
        }
    }

    /// Starts polling a queue, which has or may have frames. Returns `true` if it was not polled before; its notifications can be
    /// turned off then. `now` is called for [`Poll::Auto`].
    pub fn wake(&mut self, key: K, poll: Poll, turn: Turn, now: impl Fn() -> Instant) -> bool {
        if let Some(active) = self.active.iter_mut().find(|active| active.key == key) {
            active.empty = None;
            return false;
        }
        let mut linger = Linger::default();
        if let Some(index) = self.asleep.iter().position(|asleep| asleep.key == key) {
            let asleep = self.asleep.swap_remove(index);
            linger = asleep.linger;
            if let Some(empty) = asleep.empty {
                linger.waited(MOST, now().saturating_duration_since(empty));
            }
        }
        let active = Active { key, poll, empty: None, linger };
        match turn {
            // In the order in which they wake.
            Turn::Next => {
                self.active.insert((self.next + self.woken).min(self.active.len()), active);
                self.woken += 1;
            }
            Turn::Last => self.active.push(active),
        }
        true
    }

    /// The thread has yielded and got its CPU back at `now`, after `took`.
    pub fn yielded(&mut self, now: Instant, took: Duration) {
        self.unshared = !self.rest.yielded(now, took);
    }

    /// Sets how long these queues are polled.
    pub fn set_poll(&mut self, which: impl Fn(K) -> bool, poll: Poll) {
        for active in self.active.iter_mut().filter(|active| which(active.key)) {
            active.poll = poll;
        }
    }

    /// Sets pause and turn. If they change, measuring the pause starts anew.
    pub fn set(&mut self, gather: Gather, turn: usize) {
        if (gather, turn) != (self.gather, self.turn) {
            (self.gather, self.turn, self.alone) = (gather, turn, None);
        }
    }

    /// Removes queues.
    pub fn forget(&mut self, which: impl Fn(K) -> bool) {
        let served = self.active.iter().take(self.next).filter(|active| !which(active.key)).count();
        self.active.retain(|active| !which(active.key));
        (self.next, self.woken) = (if served < self.active.len() { served } else { 0 }, 0);
        self.asleep.retain(|asleep| !which(asleep.key));
    }

    /// Returns the number of queues that are polled.
    pub fn len(&self) -> usize {
        self.active.len()
    }

    /// Returns whether no queue is polled: the worker can wait for events without a timeout.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Returns whether the worker may have to share its CPU: it polls no queue without limit.
    pub fn shares(&self) -> bool {
        self.active.iter().all(|active| active.poll != Poll::Unlimited)
    }

    /// Returns whether the worker is faster than the driver of the only queue that is polled, so that it pauses now and then.
    #[inline]
    pub fn has_spare(&self) -> bool {
        self.active.len() == 1 && self.alone.as_ref().is_some_and(|alone| alone.pauses.is_on())
    }

    /// Returns whether the last round took long enough to look at queues that are not polled. It may have been interrupted for that;
    /// the next one goes on there.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.long
    }

    /// Gives each polled queue its turn, or as many as take a limited time; returns whether any work was done. `work` carries one
    /// burst of a queue and returns how much work that was. `sleep` turns a queue's notifications on and returns whether polling may
    /// stop, that is whether the queue is still empty. `now` is called when a queue is empty, and when there is only one.
    #[inline]
    pub fn round(
        &mut self,
        now: impl Fn() -> Instant,
        mut work: impl FnMut(K) -> Work,
        mut sleep: impl FnMut(K) -> bool,
    ) -> bool {
        let mut any = false;
        self.long = false;
        let (mut index, mut done) = (std::mem::take(&mut self.next), 0);
        self.woken = 0;
        let mut alone = Self::alone(&self.active, self.gather, &mut self.alone);
        if let Some(alone) = &mut alone
            && let Some(until) = alone.until
        {
            if now() < until {
                return false;
            }
            alone.until = None;
        }
        while let Some(active) = self.active.get_mut(index) {
            index += 1;
            let mut last = work(active.key);
            let worked = last.frames;
            done += worked;
            if alone.is_none() {
                for _ in 1..self.turn {
                    if last.frames < BURST || last.heavy {
                        break;
                    }
                    last = work(active.key);
                    done += last.frames;
                }
            }
            if worked > 0 {
                active.empty = None;
                any = true;
                if let Some(alone) = &mut alone {
                    let pause = alone.pauses.after(worked, &now);
                    alone.until = (!pause.is_zero()).then(|| now() + pause);
                }
                if done >= ENOUGH || last.heavy {
                    self.long = true;
                    self.next = if index < self.active.len() { index } else { 0 };
                    break;
                }
                continue;
            }
            let early = last.early && active.poll == Poll::Auto;
            if !early && !active.has_waited(&self.rest, &now) {
                continue;
            }
            if sleep(active.key) {
                index -= 1;
                let Active { key, poll, empty, linger } = self.active.swap_remove(index);
                if poll == Poll::Auto {
                    self.asleep.push(Asleep { key, empty: empty.filter(|_| !early), linger });
                    if std::mem::take(&mut self.unshared) {
                        self.rest.polled();
                    }
                }
            }
        }
        any
    }

    /// Returns the only queue, if there is just one. With several there is no need to pause: each is left alone during the turns
    /// of the others.
    #[inline]
    fn alone<'a>(active: &[Active<K>], gather: Gather, alone: &'a mut Option<Alone<K>>) -> Option<&'a mut Alone<K>> {
        let &[Active { key, .. }] = active else { return None };
        if alone.as_ref().is_none_or(|alone| alone.key != key) {
            *alone = Some(Alone { key, pauses: Pauses::new(gather), until: None });
        }
        alone.as_mut()
    }
}

#[cfg(test)]
mod tests;
