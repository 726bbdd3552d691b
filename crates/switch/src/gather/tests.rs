use super::*;
use std::cell::Cell;

/// Lets a driver run for so long: it has sent so many frames when it was left alone for a time, and the worker's burst takes
/// 1 µs and 20 ns a frame. Says how many frames there were, and the part of time in pauses.
fn run(pauses: &mut Pauses, clock: &Cell<Instant>, time: Duration, sends: impl Fn(Duration) -> usize) -> (u64, f64) {
    let (start, mut paused, mut frames) = (clock.get(), Duration::ZERO, 0);
    let mut alone = us(1);
    while clock.get() - start < time {
        let there = sends(alone).clamp(1, BURST);
        frames += there as u64;
        let work = us(1) + Duration::from_nanos(20 * there as u64);
        clock.set(clock.get() + work);
        let pause = pauses.after(there, || clock.get());
        clock.set(clock.get() + pause);
        paused += pause;
        alone = work + pause;
    }
    (frames, paused.as_secs_f64() / time.as_secs_f64())
}

/// Undisturbed it needs 60 ns a frame, and 150 ns for the first eight.
fn limits(alone: Duration) -> usize {
    let ns = alone.as_nanos() as usize;
    if ns < 1200 { ns / 150 } else { 8 + (ns - 1200) / 60 }
}

/// It has 16 frames, which come back before it sends them again.
fn waits(_: Duration) -> usize {
    16
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_driver_that_limits_is_left_alone() {
    let clock = Cell::new(Instant::now());
    let (off, _) = run(&mut Pauses::new(Gather::Off), &clock, SECOND, limits);
    let mut pauses = Pauses::new(Gather::Auto);
    let (frames, paused) = run(&mut pauses, &clock, SECOND, limits);
    assert!(frames > off * 3 / 2 && paused > 0.3, "{frames} instead of {off}, {paused}");
    let fixed = PAUSES.map(|pause| run(&mut Pauses::new(Gather::For(pause)), &clock, SECOND, limits).0);
    let best = *fixed.iter().max().unwrap();
    assert!(frames > best * 95 / 100, "{frames}, and one of {fixed:?}");
}

#[test]
fn a_cpu_that_is_taken_away_now_and_then_says_nothing_about_a_pause() {
    let clock = Cell::new(Instant::now());
    let mut pauses = Pauses::new(Gather::Auto);
    let (undisturbed, _) = run(&mut pauses, &clock, SECOND, limits);
    let mut pauses = Pauses::new(Gather::Auto);
    let (mut frames, mut held) = (0, 0);
    for _ in 0..500 {
        frames += run(&mut pauses, &clock, us(1700), limits).0;
        clock.set(clock.get() + us(300));
        held += usize::from(pauses.which > 0);
    }
    assert!(held > 450 && frames > undisturbed * 80 / 100, "{held} of 500, {frames} instead of {undisturbed}");
}

#[test]
fn a_driver_that_waits_is_tried_less_and_less() {
    let clock = Cell::new(Instant::now());
    let mut pauses = Pauses::new(Gather::Auto);
    let (_, paused) = run(&mut pauses, &clock, SECOND, waits);
    assert!(paused > 0.0 && paused < 0.01, "{paused}");
    let (_, paused) = run(&mut pauses, &clock, 60 * SECOND, waits);
    assert!(paused > 0.0 && paused < 1e-4, "{paused}");
}

#[test]
fn a_driver_that_begins_to_wait_is_noticed_at_once() {
    let clock = Cell::new(Instant::now());
    let mut pauses = Pauses::new(Gather::Auto);
    run(&mut pauses, &clock, SECOND, limits);
    let (_, paused) = run(&mut pauses, &clock, Duration::from_millis(2), waits);
    assert!(paused > 0.0);
    let (_, paused) = run(&mut pauses, &clock, SECOND, waits);
    assert!(paused < 0.01, "{paused}");
    run(&mut pauses, &clock, SECOND, limits);
    assert!(pauses.which > 0);
}

#[test]
fn there_is_no_pause_without_load_or_with_full_bursts() {
    let clock = Cell::new(Instant::now());
    for (frames, gap) in [(3, us(10)), (BURST, us(1))] {
        let mut pauses = Pauses::new(Gather::Auto);
        for _ in 0..1_000_000 {
            clock.set(clock.get() + gap);
            assert_eq!(pauses.after(frames, || clock.get()), Duration::ZERO);
        }
    }
    // What held before does not hold after a silence.
    let mut pauses = Pauses::new(Gather::Auto);
    run(&mut pauses, &clock, SECOND, limits);
    assert!(pauses.which > 0);
    clock.set(clock.get() + SECOND);
    assert_eq!(pauses.after(1, || clock.get()), Duration::ZERO);
}

#[test]
fn a_fixed_pause_is_made_after_what_is_not_full() {
    let mut pauses = Pauses::new(Gather::For(us(5)));
    assert_eq!(pauses.after(BURST - 1, || unreachable!()), us(5));
    assert_eq!(pauses.after(BURST, || unreachable!()), Duration::ZERO);
    assert_eq!(Pauses::new(Gather::Off).after(1, || unreachable!()), Duration::ZERO);
}

/// Once in a while the host of a VM takes the CPU away for longer than an epoch.
#[test]
fn a_long_interruption_does_not_end_a_pause() {
    let clock = Cell::new(Instant::now());
    let mut pauses = Pauses::new(Gather::Auto);
    run(&mut pauses, &clock, Duration::from_millis(200), limits);
    assert!(pauses.which > 0);
    for _ in 0..20 {
        clock.set(clock.get() + us(3000));
        let (_, paused) = run(&mut pauses, &clock, Duration::from_millis(5), limits);
        assert!(paused > 0.1 && pauses.which > 0, "{paused}");
    }
    // Nor do some that follow each other at once, but no more.
    for (interruptions, holds) in [(3, true), (4, false)] {
        run(&mut pauses, &clock, Duration::from_millis(200), limits);
        assert!(pauses.which > 0);
        let held = (0..interruptions).all(|_| {
            clock.set(clock.get() + us(3000));
            pauses.after(1, || clock.get());
            pauses.which > 0
        });
        assert_eq!(held, holds, "{interruptions}");
    }
}

/// Once disturbed, it needs 0.5 µs before it sends again, a frame in 120 ns.
fn starts_slowly(alone: Duration) -> usize {
    (alone.as_nanos() as usize).saturating_sub(500) / 120
}

#[test]
fn a_pause_that_holds_is_compared_with_its_neighbours() {
    let clock = Cell::new(Instant::now());
    let mut pauses = Pauses::new(Gather::Auto);
    run(&mut pauses, &clock, Duration::from_millis(200), starts_slowly);
    let found = pauses.which;
    assert!(found > 1, "{found}");
    // Nearly until all are tried again.
    let (mut seen, start) = ([0u32; PAUSES.len()], clock.get());
    while clock.get() - start < 10 * HOLD {
        run(&mut pauses, &clock, us(100), starts_slowly);
        seen[pauses.which] += 1;
    }
    let tried = seen.iter().filter(|&&times| times > 0).count();
    assert!(seen[0] == 0 && (2..=5).contains(&tried), "{seen:?}");
    let near = seen.iter().enumerate().all(|(which, &times)| times == 0 || which.abs_diff(found) <= 2);
    assert!(near, "{found}: {seen:?}");
}
