use super::*;
use std::cell::Cell;

fn light(frames: usize) -> Work {
    Work { frames, heavy: false }
}

#[test]
fn a_queue_that_is_polled_without_limit_has_a_cpu_of_its_own() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    schedule.wake(1, Poll::For(Duration::ZERO));
    assert!(schedule.shares());
    schedule.wake(2, Poll::Unlimited);
    assert!(!schedule.shares());
    schedule.forget(|key| key == 2);
    assert!(schedule.shares());
}

#[test]
fn event_driven_sleeps_at_once() {
    let mut schedule = Schedule::new(Gather::Off, 1);
    let now = Instant::now();
    assert!(schedule.wake(1, Poll::For(Duration::ZERO)));
    assert!(!schedule.wake(1, Poll::For(Duration::ZERO)));
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
    schedule.wake(7, Poll::For(Duration::from_micros(50)));
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
        schedule.wake(key, if key == 2 { Poll::Unlimited } else { Poll::For(Duration::ZERO) });
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
    schedule.wake(1, Poll::Unlimited);
    assert_eq!([0, 4, 5, 9].map(|us| looks(&mut schedule, us, 3)), [1, 0, 1, 0]);
    // Nothing there, or more than fits into a burst: it is looked at again.
    assert_eq!([10, 10].map(|us| looks(&mut schedule, us, 0)), [1, 1]);
    assert_eq!([11, 11].map(|us| looks(&mut schedule, us, BURST)), [1, 1]);
    assert_eq!([12, 12].map(|us| looks(&mut schedule, us, 3)), [1, 0]);
    schedule.wake(2, Poll::Unlimited);
    assert_eq!([12, 12].map(|us| looks(&mut schedule, us, 3)), [2, 2]);
}

#[test]
fn what_is_changed_holds_from_the_next_round_on() {
    let mut schedule = Schedule::new(Gather::For(Duration::from_micros(5)), 4);
    let now = Instant::now();
    let looks = |schedule: &mut Schedule<i32>, frames| {
        let looks = Cell::new(0);
        let work = |_| {
            looks.set(looks.get() + 1);
            Work { frames, heavy: false }
        };
        schedule.round(|| now, work, |_| true);
        looks.get()
    };
    schedule.wake(1, Poll::Unlimited);
    assert_eq!([3, 3].map(|frames| looks(&mut schedule, frames)), [1, 0], "left alone");
    schedule.set(Gather::Off, 2);
    assert_eq!([3, 3].map(|frames| looks(&mut schedule, frames)), [1, 1]);
    schedule.wake(2, Poll::Unlimited);
    assert_eq!(looks(&mut schedule, BURST), 4, "two queues, two bursts each");
    schedule.set_poll(|key| key == 1, Poll::For(Duration::ZERO));
    looks(&mut schedule, 0);
    assert_eq!(schedule.len(), 1, "only the other one is still polled");
}

#[test]
fn a_turn_ends_with_a_burst_that_is_not_full() {
    let mut schedule = Schedule::new(Gather::Off, 4);
    let now = Instant::now();
    (0..3).for_each(|key| assert!(schedule.wake(key, Poll::Unlimited)));
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

#[test]
fn a_heavy_burst_is_a_turn_by_itself() {
    let mut schedule = Schedule::new(Gather::Off, 4);
    let now = Instant::now();
    (0..2).for_each(|key| assert!(schedule.wake(key, Poll::Unlimited)));
    let mut order = Vec::new();
    let work = |key| {
        order.push(key);
        Work { frames: BURST, heavy: key == 0 }
    };
    schedule.round(|| now, work, |_| true);
    assert_eq!(order, [0, 1, 1, 1, 1]);
}
