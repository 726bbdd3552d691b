//! Measures whether a process is idle, for tests of the program (program/machine.rs, vsock.rs): CPU time in nanoseconds and
//! context switches of each of its threads, from /proc/PID/task.

use std::{collections::BTreeMap, fs, thread, time::Duration};

/// How long a daemon may take to come to rest after its last frame or connection: a vsock device has a timer of 2 s for each
/// connection of a program of the host (its CONNECT line).
pub const SETTLE: Duration = Duration::from_millis(2500);
/// How long it is watched.
const WINDOW: Duration = Duration::from_secs(3);
/// Maximum CPU time of all threads in that time: 0.1 % of a CPU.
const MOST_TIME: Duration = Duration::from_millis(3);
/// Maximum number of context switches of all threads in that time: a wake-up is one or two.
const MOST_SWITCHES: u64 = 10;

/// CPU time in nanoseconds, and the number of context switches, voluntary and not, of each thread.
type Usage = BTreeMap<u64, (u64, u64)>;

fn usage(process: u32) -> Usage {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("the process runs");
    let thread = |task: std::io::Result<fs::DirEntry>| {
        let folder = task.expect("a task").path();
        // A thread that has just ended has no files any more.
        let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let (schedstat, status) = (read("schedstat")?, read("status")?);
        let time =
            schedstat.split_whitespace().next().and_then(|time| time.parse().ok()).expect("CPU time in schedstat");
        let switches = |line: &str| line.split_once("voluntary_ctxt_switches:")?.1.trim().parse::<u64>().ok();
        let switches: Vec<u64> = status.lines().filter_map(switches).collect();
        assert_eq!(switches.len(), 2, "voluntary and nonvoluntary context switches in:\n{status}");
        let number = folder.file_name()?.to_str()?.parse().ok()?;
        Some((number, (time, switches.iter().sum())))
    };
    tasks.filter_map(thread).collect()
}

/// Watches a process for some time. Returns the CPU time and the context switches of all its threads.
///
/// # Errors
/// A thread has started or ended.
pub fn used(process: u32, window: Duration) -> Result<(Duration, u64), String> {
    let before = usage(process);
    thread::sleep(window);
    let after = usage(process);
    if before.is_empty() || !before.keys().eq(after.keys()) {
        return Err(format!(
            "expected the same threads all the time, got {:?}, then {:?}",
            before.keys(),
            after.keys()
        ));
    }
    let sum = |usage: &Usage| usage.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let (before, after) = (sum(&before), sum(&after));
    Ok((Duration::from_nanos(after.0 - before.0), after.1 - before.1))
}

/// Watches a process for three seconds.
///
/// # Errors
/// It used more than 0.1 % of a CPU, or switched contexts more than ten times, or its threads changed.
pub fn is_idle(process: u32) -> Result<(), String> {
    let (time, switches) = used(process, WINDOW)?;
    if time > MOST_TIME {
        return Err(format!("expected at most {MOST_TIME:?} of CPU time in {WINDOW:?}, got {time:?}"));
    }
    if switches > MOST_SWITCHES {
        return Err(format!("expected at most {MOST_SWITCHES} context switches in {WINDOW:?}, got {switches}"));
    }
    Ok(())
}
