//! Which queues a worker looks at, and when it may sleep. A state machine over time; the loop around it, with the clock,
//! epoll and the notifications, is in `host`.

use crate::gather::{Gather, Pauses};
use ringroad_frame::BURST;
use std::time::{Duration, Instant};

/// How long a queue is polled after its last frame before its worker waits for a notification instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poll {
    /// For this long; zero: event driven.
    For(Duration),
    /// For ever: its core is never idle.
    Unlimited,
}

/// What a burst of a queue has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Frames, or other buffers that were taken.
    pub frames: usize,
    /// It took as long as several bursts of usual frames: a turn by itself.
    pub heavy: bool,
}

/// A queue that the worker looks at without being told.
#[derive(Clone, Copy)]
struct Active<K> {
    key: K,
    poll: Poll,
    /// When it first was found empty; `None`: it had something the last time.
    empty: Option<Instant>,
}

/// The queues that are being polled, in turn. `K` names a queue.
pub struct Schedule<K> {
    active: Vec<Active<K>>,
    gather: Gather,
    turn: usize,
    alone: Option<Alone<K>>,
}

/// The only queue that is being polled.
struct Alone<K> {
    key: K,
    pauses: Pauses,
    /// It is left alone until then.
    until: Option<Instant>,
}

impl<K: Copy + Eq> Schedule<K> {
    /// No queues yet. `gather`: for how long the only one there is to poll is left alone between bursts that are not full.
    /// `turn`: the bursts of one queue before the others have theirs, while all of them are full and none is heavy. What a queue
    /// touches is in the cache by then; after the turns of many others it is not.
    pub fn new(gather: Gather, turn: usize) -> Self {
        Schedule { active: Vec::new(), gather, turn, alone: None }
    }

    /// The queue has, or may have, something to do. Says whether that is news, so that its notifications can be turned
    /// off.
    pub fn wake(&mut self, key: K, poll: Poll) -> bool {
        if let Some(active) = self.active.iter_mut().find(|active| active.key == key) {
            active.empty = None;
            return false;
        }
        self.active.push(Active { key, poll, empty: None });
        true
    }

    /// From now on these queues are polled for as long as this.
    pub fn set_poll(&mut self, which: impl Fn(K) -> bool, poll: Poll) {
        for active in self.active.iter_mut().filter(|active| which(active.key)) {
            active.poll = poll;
        }
    }

    /// From now on pauses and turns are like this; what was found out about pauses is found out again.
    pub fn set(&mut self, gather: Gather, turn: usize) {
        if (gather, turn) != (self.gather, self.turn) {
            (self.gather, self.turn, self.alone) = (gather, turn, None);
        }
    }

    /// These queues are gone.
    pub fn forget(&mut self, gone: impl Fn(K) -> bool) {
        self.active.retain(|active| !gone(active.key));
    }

    /// How many queues are being polled.
    pub fn len(&self) -> usize {
        self.active.len()
    }

    /// Whether no queue is being polled: the worker can wait for events without a limit.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Gives each active queue its turn. `work` does a burst of it and says how much that was; `sleep` turns its
    /// notifications on and says whether it may be left alone (there was nothing in between). Says whether any work was
    /// done. `now` is asked when a queue is found empty, and when there is only one.
    #[inline]
    pub fn round(
        &mut self,
        now: impl Fn() -> Instant,
        mut work: impl FnMut(K) -> Work,
        mut sleep: impl FnMut(K) -> bool,
    ) -> bool {
        let mut any = false;
        let mut index = 0;
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
            if alone.is_none() {
                for _ in 1..self.turn {
                    if last.frames < BURST || last.heavy {
                        break;
                    }
                    last = work(active.key);
                }
            }
            if worked > 0 {
                active.empty = None;
                any = true;
                if let Some(alone) = &mut alone {
                    let pause = alone.pauses.after(worked, &now);
                    alone.until = (!pause.is_zero()).then(|| now() + pause);
                }
                continue;
            }
            let Poll::For(budget) = active.poll else { continue };
            if !budget.is_zero() {
                let now = now();
                let since = *active.empty.get_or_insert(now);
                if now.saturating_duration_since(since) < budget {
                    continue;
                }
            }
            if sleep(active.key) {
                index -= 1;
                self.active.swap_remove(index);
            }
        }
        any
    }

    /// The only queue, if there is just one. Others have their turn while one is left alone: with them there is no need to wait.
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
