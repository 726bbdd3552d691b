//! Non-blocking output to stderr and stdout, and the backend of the `log` crate. Each descriptor is written by its own thread
//! from a bounded queue: a full pipe costs log lines but never blocks a caller. main.rs calls [`init`] and [`flush`].
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

use env_filter::Filter;
use log::{Level, Log, Metadata, Record};
use ringroad_host::Quota;
use std::{
    backtrace::{Backtrace, BacktraceStatus},
    collections::VecDeque,
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock},
    thread,
    time::{Duration, Instant},
};

/// Default limit of log lines a second, in total (key `log.lines`).
pub const LINES: u32 = 1000;
/// Capacity of the stderr queue, in lines and in bytes.
const ROOM: usize = 4096;
const BYTES: usize = 1 << 20;
/// Maximum length of a line, in bytes.
const LINE: usize = 4096;
/// Capacity of the stdout queue, in counter reports and in bytes.
const TABLES: usize = 4;
const TABLE_BYTES: usize = 16 << 20;
/// Minimum interval between log lines about suppressed lines.
const REPORT: Duration = Duration::from_secs(1);
/// Time limit for flushing at exit.
const PATIENCE: Duration = Duration::from_millis(200);

/// Texts that have not been written yet.
#[derive(Default)]
struct Queue {
    texts: VecDeque<String>,
    bytes: usize,
    /// Texts dropped because the queue was full.
    lost: u64,
    /// Lines suppressed by the rate limit, and when their number was last reported.
    over: u64,
    reported: Option<Instant>,
    /// Whether the thread is writing.
    busy: bool,
}

impl Queue {
    /// Returns the time until the suppressed lines are to be reported; `None` if there are none.
    fn due(&self, now: Instant) -> Option<Duration> {
        let since = self.reported.map_or(REPORT, |reported| now.saturating_duration_since(reported));
        (self.over > 0).then(|| REPORT.saturating_sub(since))
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    written: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A descriptor with its queue and the thread that writes to it.
struct Outlet {
    shared: Arc<Shared>,
    room: usize,
    bytes: usize,
    /// The thread's name and descriptor, until the thread is started.
    idle: Mutex<Option<(&'static str, File)>>,
}

impl Outlet {
    /// `name`: of the descriptor and its thread.
    fn new(name: &'static str, to: File, room: usize, bytes: usize) -> Outlet {
        Outlet { shared: Arc::default(), room, bytes, idle: Mutex::new(Some((name, to))) }
    }

    /// Starts the thread, unless it is running.
    fn start(&self) -> io::Result<()> {
        let Some((name, to)) = self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take() else {
            return Ok(());
        };
        let shared = self.shared.clone();
        thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(move || write(name, to, &shared))?;
        Ok(())
    }

    /// Queues a text. Never blocks; returns `false` if the queue is full.
    fn put(&self, text: String) -> bool {
        let mut queue = self.shared.queue();
        if queue.texts.len() >= self.room || queue.bytes.saturating_add(text.len()) > self.bytes {
            queue.lost = queue.lost.saturating_add(1);
            return false;
        }
        queue.bytes += text.len();
        queue.texts.push_back(text);
        drop(queue);
        self.shared.changed.notify_one();
        true
    }

    /// Counts a line suppressed by the rate limit.
    fn count_over(&self) {
        let mut queue = self.shared.queue();
        queue.over = queue.over.saturating_add(1);
        if queue.over == 1 {
            // The thread may be waiting without a timeout.
            self.shared.changed.notify_one();
        }
    }

    /// Waits until everything is written or `until` has passed.
    fn flush(&self, until: Instant) {
        let mut queue = self.shared.queue();
        while queue.busy || !queue.texts.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.shared.written.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }
}

/// The thread of an outlet.
fn write(name: &str, mut to: File, shared: &Shared) {
    let mut queue = shared.queue();
    loop {
        let due = queue.due(Instant::now());
        if queue.texts.is_empty() && queue.lost == 0 && due.is_none_or(|left| !left.is_zero()) {
            queue.busy = false;
            shared.written.notify_all();
            queue = match due {
                None => shared.changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(left) => {
                    shared.changed.wait_timeout(queue, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
            continue;
        }
        queue.busy = true;
        let texts = std::mem::take(&mut queue.texts);
        queue.bytes = 0;
        // Reported after the queued texts: these were dropped later.
        let lost = std::mem::take(&mut queue.lost);
        let over = if due.is_some_and(|left| left.is_zero()) {
            queue.reported = Some(Instant::now());
            std::mem::take(&mut queue.over)
        } else {
            0
        };
        drop(queue);
        let mut all = texts.into_iter().collect::<String>();
        if name == "stderr" {
            if lost > 0 {
                all += &format!("[WARN ] {lost} log lines lost: stderr was not read\n");
            }
            if over > 0 {
                all += &format!("[WARN ] {over} log lines suppressed: above the limit per second (key `log.lines`)\n");
            }
        }
        write_all(&mut to, all.as_bytes());
        queue = shared.queue();
    }
}

/// Writes all bytes, or up to the first error. Polls a descriptor that another process has made non-blocking.
fn write_all(to: &mut File, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return,
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(20)),
            // The reader has closed it; the daemon continues without it.
            Err(_) => return,
        }
    }
}

/// The program's log.
struct Logger {
    filter: Filter,
    stderr: Outlet,
    quota: Mutex<Quota>,
}

impl Logger {
    /// Returns whether only the operator can cause a message: these are exempt from the rate limit, so that noisy guests cannot
    /// suppress them.
    fn is_operators(metadata: &Metadata<'_>) -> bool {
        metadata.target() == "ringroad" || metadata.target().starts_with("ringroad::")
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.filter.matches(record) {
            return;
        }
        let quota = self.quota.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !Logger::is_operators(record.metadata()) && quota.take().is_none() {
            return self.stderr.count_over();
        }
        drop(quota);
        self.stderr.put(line(record.level(), &record.args().to_string()));
    }

    fn flush(&self) {
        self.stderr.flush(Instant::now() + PATIENCE);
    }
}

/// Formats a line as `env_logger` does without time and target, cut to [`LINE`] bytes.
fn line(level: Level, text: &str) -> String {
    let end = text.char_indices().map(|(at, _)| at).take_while(|&at| at <= LINE).last().unwrap_or(0);
    let cut = if text.len() > LINE { text.get(..end).map(|text| format!("{text}…")) } else { None };
    format!("[{level:<5}] {}\n", cut.as_deref().unwrap_or(text))
}

static LOGGER: OnceLock<Logger> = OnceLock::new();
static STDOUT: OnceLock<Outlet> = OnceLock::new();

/// Installs the logger and the panic hook. Lines are queued from now on and written from [`start`] on. `level`: the filter if
/// `RUST_LOG` is not set.
///
/// # Errors
/// stderr cannot be duplicated.
pub fn init(level: &str) -> io::Result<()> {
    let filter = env_filter::Builder::new().parse(&std::env::var("RUST_LOG").unwrap_or_else(|_| level.into())).build();
    let max = filter.filter();
    // A duplicate: the standard library would hold its lock while the pipe is full.
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let stderr = Outlet::new("stderr", stderr, ROOM, BYTES);
    let quota = Mutex::new(Quota::new(LINES, LINES));
    let logger = LOGGER.get_or_init(|| Logger { filter, stderr, quota });
    if log::set_logger(logger).is_ok() {
        log::set_max_level(max);
    }
    std::panic::set_hook(Box::new(|info| {
        let backtrace = Backtrace::capture();
        let mut text = format!("thread '{}' {info}", thread::current().name().unwrap_or("without a name"));
        if backtrace.status() == BacktraceStatus::Captured {
            text += &format!("\n{backtrace}");
        }
        print_error(&text);
        // The process may be about to end.
        flush();
    }));
    Ok(())
}

/// Starts the thread that writes to stderr. It inherits the confinement of the calling thread.
///
/// # Errors
/// The thread cannot be started.
pub fn start() -> io::Result<()> {
    LOGGER.get().map_or(Ok(()), |logger| logger.stderr.start())
}

/// Sets the limit of log lines a second, in total.
pub fn limit(lines: u32) {
    if let Some(logger) = LOGGER.get() {
        *logger.quota.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Quota::new(lines, lines);
    }
}

/// Queues a line for stderr, without level and rate limit.
pub fn print_error(text: &str) {
    match LOGGER.get() {
        Some(logger) => {
            logger.stderr.put(format!("{text}\n"));
        }
        None => eprintln!("{text}"),
    }
}

/// Queues a text for stdout. Returns `false` if the queue is full because stdout is not read.
pub fn print(text: String) -> bool {
    let start = || {
        let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let outlet = Outlet::new("stdout", stdout, TABLES, TABLE_BYTES);
        outlet.start().map(|()| outlet)
    };
    let outlet = match STDOUT.get() {
        Some(outlet) => outlet,
        None => match start() {
            Ok(outlet) => STDOUT.get_or_init(|| outlet),
            Err(_) => return false,
        },
    };
    outlet.put(text)
}

/// Waits until everything queued is written, for at most 200 ms.
pub fn flush() {
    let until = Instant::now() + PATIENCE;
    if let Some(outlet) = STDOUT.get() {
        outlet.flush(until);
    }
    if let Some(logger) = LOGGER.get() {
        // After an early failure the thread may not be running yet.
        let _ = logger.stderr.start();
        logger.stderr.flush(until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};

    #[test]
    fn long_lines_are_cut() {
        assert_eq!(line(Level::Info, "short"), "[INFO ] short\n");
        let long = line(Level::Error, &"ü".repeat(LINE));
        assert!(long.starts_with("[ERROR] ü") && long.ends_with("ü…\n") && long.len() < LINE + 16, "{}", long.len());
    }

    #[test]
    fn writers_do_not_block_on_a_full_pipe() {
        let (reader, writer) = io::pipe().unwrap();
        let outlet = Outlet::new("stderr", File::from(std::os::fd::OwnedFd::from(writer)), ROOM, BYTES);
        outlet.start().unwrap();
        let text = "x".repeat(99) + "\n";
        let start = Instant::now();
        // More than the pipe and the queue hold.
        let put = (0..100_000).filter(|_| outlet.put(text.clone())).count();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!((ROOM..100_000).contains(&put), "{put}");
        let start = Instant::now();
        outlet.flush(start + PATIENCE);
        assert!((PATIENCE..4 * PATIENCE).contains(&start.elapsed()), "{:?}", start.elapsed());
        // Once it is read, all queued lines are there, and the dropped ones are counted.
        let (sender, all) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let (mut lines, mut lost) = (0, 0);
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                match line
                    .strip_prefix("[WARN ] ")
                    .and_then(|rest| rest.strip_suffix(" log lines lost: stderr was not read"))
                {
                    Some(count) => lost += count.parse::<usize>().unwrap(),
                    None => lines += usize::from(line.len() == 99),
                }
                if lines + lost >= 100_000 {
                    let _ = sender.send((lines, lost));
                }
            }
        });
        assert_eq!(all.recv_timeout(Duration::from_secs(10)).unwrap(), (put, 100_000 - put));
    }
}
