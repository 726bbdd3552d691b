use super::*;
use std::cell::Cell;

fn light(frames: usize) -> Work {
    Work { frames, ..Work::default() }
}

#[test]
fn a_queue_that_is_polled_without_limit_has_a_cpu_of_its_own() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    schedule.wake(1, Poll::For(Duration::ZERO), Turn::Next, Instant::now);
    assert!(schedule.shares());
    schedule.wake(2, Poll::Unlimited, Turn::Next, Instant::now);
    assert!(!schedule.shares());
    schedule.forget(|key| key == 2);
    assert!(schedule.shares());
}

#[test]
fn event_driven_sleeps_at_once() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    let now = Instant::now();
    assert!(schedule.wake(1, Poll::For(Duration::ZERO), Turn::Next, Instant::now));
    assert!(!schedule.wake(1, Poll::For(Duration::ZERO), Turn::Next, Instant::now));
    assert!(schedule.round(|| now, |_| light(3), |_| true));
    assert!(!schedule.is_empty());
    // Something came in while it was about to sleep.
    assert!(!schedule.round(|| now, |_| light(0), |_| false));
    assert!(!schedule.is_empty());
    assert!(!schedule.round(|| now, |_| light(0), |_| true));
    assert!(schedule.is_empty());
}

#[test]
fn polls_for_its_budget_after_the_last_frame() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    let start = Instant::now();
    let at = |us| start + Duration::from_micros(us);
    let slept = Cell::new(0);
    schedule.wake(7, Poll::For(Duration::from_micros(50)), Turn::Next, Instant::now);
    let mut round = |us, work| {
        schedule.round(
            || at(us),
            |_| light(work),
            |_| {
                slept.set(slept.get() + 1);
                true
            },
        )
    };
    round(0, 0);
    round(49, 0);
    assert_eq!(slept.get(), 0);
    round(49, 1);
    round(60, 0);
    round(109, 0);
    assert_eq!(slept.get(), 0);
    round(110, 0);
    assert_eq!(slept.get(), 1);
}

#[test]
fn unlimited_never_sleeps_and_all_get_their_turn() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    let now = Instant::now();
    for key in 0..5 {
        schedule.wake(
            key,
            if key == 2 { Poll::Unlimited } else { Poll::For(Duration::ZERO) },
            Turn::Next,
            Instant::now,
        );
    }
    let mut seen = Vec::new();
    schedule.round(
        || now,
        |key| {
            seen.push(key);
            light(0)
        },
        |_| true,
    );
    seen.sort();
    assert_eq!(seen, [0, 1, 2, 3, 4]);
    let mut seen = Vec::new();
    schedule.round(
        || now,
        |key| {
            seen.push(key);
            light(0)
        },
        |_| true,
    );
    assert_eq!(seen, [2]);
    schedule.forget(|key| key == 2);
    assert!(schedule.is_empty());
}

#[test]
fn only_a_queue_alone_is_left_alone() {
    let mut schedule = Schedule::new(Gather::For(Duration::from_micros(5)), 4);
    let start = Instant::now();
    let looks = |schedule: &mut Schedule<i32>, us, frames| {
        let looks = Cell::new(0);
        let work = |_| {
            looks.set(looks.get() + 1);
            light(frames)
        };
        schedule.round(|| start + Duration::from_micros(us), work, |_| true);
        looks.get()
    };
    schedule.wake(1, Poll::Unlimited, Turn::Next, Instant::now);
    assert_eq!([0, 4, 5, 9].map(|us| looks(&mut schedule, us, 3)), [1, 0, 1, 0]);
    // Nothing there, or more than fits into a burst: it is looked at again.
    assert_eq!([10, 10].map(|us| looks(&mut schedule, us, 0)), [1, 1]);
    assert_eq!([11, 11].map(|us| looks(&mut schedule, us, BURST)), [1, 1]);
    assert_eq!([12, 12].map(|us| looks(&mut schedule, us, 3)), [1, 0]);
    assert!(schedule.has_spare());
    schedule.wake(2, Poll::Unlimited, Turn::Next, Instant::now);
    assert_eq!([12, 12].map(|us| looks(&mut schedule, us, 3)), [2, 2]);
    assert!(!schedule.has_spare(), "the others have their turns");
}

#[test]
fn what_is_changed_holds_from_the_next_round_on() {
    let mut schedule = Schedule::new(Gather::For(Duration::from_micros(5)), 4);
    let now = Instant::now();
    let looks = |schedule: &mut Schedule<i32>, frames| {
        let looks = Cell::new(0);
        let work = |_| {
            looks.set(looks.get() + 1);
            Work { frames, ..Work::default() }
        };
        schedule.round(|| now, work, |_| true);
        looks.get()
    };
    schedule.wake(1, Poll::Unlimited, Turn::Next, Instant::now);
    assert_eq!([3, 3].map(|frames| looks(&mut schedule, frames)), [1, 0], "left alone");
    schedule.set(Gather::Off, 2);
    assert_eq!([3, 3].map(|frames| looks(&mut schedule, frames)), [1, 1]);
    schedule.wake(2, Poll::Unlimited, Turn::Next, Instant::now);
    assert_eq!(looks(&mut schedule, BURST), 4, "two queues, two bursts each");
    schedule.set_poll(|key| key == 1, Poll::For(Duration::ZERO));
    looks(&mut schedule, 0);
    assert_eq!(schedule.len(), 1, "only the other one is still polled");
}

#[test]
fn a_turn_ends_with_a_burst_that_is_not_full() {
    let mut schedule = Schedule::new(Gather::Off, 4);
    let now = Instant::now();
    (0..3).for_each(|key| assert!(schedule.wake(key, Poll::Unlimited, Turn::Next, Instant::now)));
    // The first one has more than its turn, the second one less, the third one nothing.
    let mut left = [6 * BURST, BURST + 1, 0];
    let mut order = Vec::new();
    let mut round = || {
        order.clear();
        let work = |key: usize| {
            let frames = left[key].min(BURST);
            left[key] -= frames;
            order.push(key);
            light(frames)
        };
        let any = schedule.round(|| now, work, |_| true);
        (any, order.clone())
    };
    assert_eq!(round(), (true, vec![0, 0, 0, 0, 1, 1, 2]));
    assert_eq!(round(), (true, vec![0, 0, 0, 1, 2]));
    assert_eq!(round(), (false, vec![0, 1, 2]));
}

/// Rounds of full bursts, those of the queues below `heavy` being so: the turns of one round.
fn turns(schedule: &mut Schedule<usize>, heavy: usize) -> Vec<usize> {
    let mut order = Vec::new();
    let now = Instant::now();
    let work = |key| {
        order.push(key);
        Work { frames: BURST, heavy: key < heavy, early: false }
    };
    schedule.round(|| now, work, |_| true);
    order
}

fn all_polled(keys: std::ops::Range<usize>, turn: usize) -> Schedule<usize> {
    let mut schedule = Schedule::new(Gather::Off, turn);
    keys.for_each(|key| assert!(schedule.wake(key, Poll::Unlimited, Turn::Next, Instant::now)));
    schedule
}

#[test]
fn a_heavy_burst_is_a_turn_by_itself_and_interrupts_the_round() {
    let mut schedule = all_polled(0..3, 4);
    assert_eq!(turns(&mut schedule, 1), [0]);
    assert!(schedule.is_long());
    assert_eq!(turns(&mut schedule, 1), [1, 1, 1, 1, 2, 2, 2, 2]);
    assert!(!schedule.is_long());
    // Also if there is nothing left to interrupt.
    let mut schedule = all_polled(0..1, 4);
    assert_eq!(turns(&mut schedule, 1), [0]);
    assert!(schedule.is_long());
}

#[test]
fn a_round_is_interrupted_after_enough_frames() {
    let mut schedule = all_polled(0..9, 4);
    let four = |keys: std::ops::Range<usize>| keys.flat_map(|key| [key; 4]).collect::<Vec<_>>();
    assert_eq!(ENOUGH, 16 * BURST);
    for keys in [0..4, 4..8, 8..9, 0..4] {
        assert_eq!(turns(&mut schedule, 0), four(keys));
    }
}

#[test]
fn a_queue_that_wakes_is_next_and_gets_no_more_turns_than_others() {
    let mut schedule = all_polled(0..4, 1);
    assert_eq!(turns(&mut schedule, 9), [0]);
    assert!(schedule.wake(7, Poll::Unlimited, Turn::Next, Instant::now));
    assert!(!schedule.wake(7, Poll::Unlimited, Turn::Next, Instant::now));
    let rest: Vec<_> = (0..6).flat_map(|_| turns(&mut schedule, 9)).collect();
    assert_eq!(rest, [7, 1, 2, 3, 0, 7]);
    // One that had stopped for lack of room waits for its turn.
    schedule.forget(|key| key == 7);
    assert!(schedule.wake(7, Poll::Unlimited, Turn::Last, Instant::now));
    let rest: Vec<_> = (0..5).flat_map(|_| turns(&mut schedule, 9)).collect();
    assert_eq!(rest, [1, 2, 3, 7, 0]);
}

#[test]
fn queues_that_wake_have_their_turns_in_that_order() {
    let mut schedule = all_polled(0..3, 1);
    assert_eq!(turns(&mut schedule, 9), [0]);
    [7, 8, 9].iter().for_each(|&key| assert!(schedule.wake(key, Poll::Unlimited, Turn::Next, Instant::now)));
    let rest: Vec<_> = (0..6).flat_map(|_| turns(&mut schedule, 10)).collect();
    assert_eq!(rest, [7, 8, 9, 1, 2, 0]);
}

#[test]
fn an_interrupted_round_goes_on_where_it_was_when_queues_stop() {
    let interrupted = || {
        let mut schedule = all_polled(0..4, 1);
        assert_eq!([turns(&mut schedule, 9), turns(&mut schedule, 9)], [[0], [1]]);
        schedule
    };
    for (stops, then) in [(0, [2, 3, 1]), (1, [2, 3, 0]), (2, [3, 0, 1]), (3, [2, 0, 1])] {
        let mut schedule = interrupted();
        schedule.forget(|key| key == stops);
        let rest: Vec<_> = (0..3).flat_map(|_| turns(&mut schedule, 9)).collect();
        assert_eq!(rest, then, "{stops} stops");
    }
    let mut schedule = interrupted();
    schedule.forget(|key| key > 1);
    assert_eq!(turns(&mut schedule, 9), [0]);
}

#[test]
fn a_queue_that_sleeps_in_an_interrupted_round_costs_no_other_its_turn() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    (0..4).for_each(|key| assert!(schedule.wake(key, Poll::For(Duration::ZERO), Turn::Next, Instant::now)));
    let now = Instant::now();
    let mut order = Vec::new();
    for _ in 0..3 {
        let work = |key| {
            order.push(key);
            Work { frames: usize::from(key != 1), heavy: true, early: false }
        };
        schedule.round(|| now, work, |_| true);
    }
    assert_eq!(order, [0, 1, 3, 2], "1 sleeps, and the last one takes its place");
    assert_eq!(schedule.len(), 3);
}

/// A queue with [`Poll::Auto`], and a clock.
struct Paced {
    schedule: Schedule<u8>,
    start: Instant,
    now: u64,
}

impl Paced {
    fn new() -> Paced {
        Paced { schedule: Schedule::new(Gather::Off, 1), start: Instant::now(), now: 0 }
    }

    fn at(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    fn round(&mut self, frames: usize) {
        let now = self.at();
        self.schedule.round(|| now, |_| light(frames), |_| true);
    }

    /// One frame comes after so many microseconds in which the worker, if it polls, finds nothing each time that it looks. Returns
    /// whether the driver had to notify.
    fn frame_after(&mut self, gap: u64) -> bool {
        for _ in 0..gap {
            self.round(0);
            self.now += 1;
        }
        let now = self.at();
        let notified = self.schedule.wake(1, Poll::Auto, Turn::Next, || now);
        self.round(1);
        notified
    }
}

#[test]
fn frames_that_follow_each_other_are_polled_for_and_others_are_not() {
    let mut paced = Paced::new();
    // The first one's wait is unknown; then it polls for 10 us, 20, 40.
    assert_eq!([30; 6].map(|gap| paced.frame_after(gap)), [true, true, true, true, false, false]);
    // Short of 50 us, it doubles once more.
    assert_eq!([45; 4].map(|gap| paced.frame_after(gap)), [true, false, false, false]);
    // Twice as long is too long: 50 us become 25 and 12, which are in vain, then none.
    assert_eq!([100; 4].map(|gap| paced.frame_after(gap)), [true; 4]);
    paced.round(0);
    assert!(paced.schedule.is_empty(), "it sleeps at once");
}

#[test]
fn an_idle_queue_sleeps_however_it_was_polled() {
    let mut paced = Paced::new();
    (0..10).for_each(|_| _ = paced.frame_after(45));
    paced.round(0);
    paced.now += 49;
    paced.round(0);
    assert!(!paced.schedule.is_empty());
    paced.now += 1;
    paced.round(0);
    assert!(paced.schedule.is_empty());
}

#[test]
fn no_polling_beside_a_thread_that_needs_the_cpu() {
    let mut paced = Paced::new();
    (0..10).for_each(|_| _ = paced.frame_after(20));
    let now = paced.at();
    paced.schedule.yielded(now, Duration::from_micros(90));
    assert!(!paced.frame_after(20));
    paced.schedule.yielded(now, Duration::from_millis(2));
    assert_eq!([20; 4].map(|gap| paced.frame_after(gap)), [true; 4]);
    // Later it tries again.
    paced.now += 50_000;
    paced.frame_after(0);
    assert_eq!([20; 4].map(|gap| paced.frame_after(gap)), [false; 4]);
}

#[test]
fn rests_are_longer_each_time_that_the_cpu_is_shared() {
    let mut paced = Paced::new();
    (0..10).for_each(|_| _ = paced.frame_after(20));
    let is_on = |paced: &Paced, micros: u64| paced.schedule.rest.is_on(|| paced.at() + Duration::from_micros(micros));
    for millis in [50, 100, 200, 400, 400] {
        // The queue was empty before the yield, which took longer than it is polled.
        paced.round(0);
        paced.now += 200;
        let now = paced.at();
        paced.schedule.yielded(now, Duration::from_micros(200));
        paced.round(0);
        assert!(paced.schedule.is_empty());
        assert_eq!([millis * 1000 - 1, millis * 1000].map(|micros| is_on(&paced, micros)), [true, false], "{millis}");
        paced.now += millis * 1000;
        paced.frame_after(0);
    }
    // Shorter again after polling that disturbed nobody.
    for _ in 0..3 {
        let now = paced.at();
        paced.schedule.yielded(now, Duration::from_micros(1));
        paced.round(0);
        paced.now += 100;
        paced.round(0);
        assert!(paced.schedule.is_empty());
        paced.frame_after(0);
    }
    let now = paced.at();
    paced.schedule.yielded(now, Duration::from_micros(200));
    assert_eq!([99_999, 100_000].map(|micros| is_on(&paced, micros)), [true, false]);
}

#[test]
fn a_queue_whose_frames_have_their_time_is_not_polled_until_then() {
    let mut paced = Paced::new();
    (0..10).for_each(|_| _ = paced.frame_after(20));
    let early = |paced: &mut Paced| {
        let now = paced.at();
        let work = |_| Work { early: true, ..Work::default() };
        paced.schedule.round(|| now, work, |_| true);
    };
    let before = paced.schedule.active[0].linger;
    early(&mut paced);
    assert!(paced.schedule.is_empty());
    // The pause says nothing about how quickly frames follow each other.
    paced.now += 1000;
    paced.frame_after(0);
    assert_eq!(paced.schedule.active[0].linger, before);
    // For as long as its port says, if that is not "auto".
    paced.schedule.set_poll(|_| true, Poll::For(Duration::from_micros(20)));
    early(&mut paced);
    assert!(!paced.schedule.is_empty());
}

#[test]
fn queues_that_stop_leave_nothing_behind() {
    let mut paced = Paced::new();
    (0..10).for_each(|_| _ = paced.frame_after(20));
    paced.now += 50;
    paced.round(0);
    paced.now += 50;
    paced.round(0);
    assert_eq!((paced.schedule.len(), paced.schedule.asleep.len()), (0, 1));
    paced.schedule.forget(|key| key == 1);
    assert!(paced.schedule.asleep.is_empty());
}
