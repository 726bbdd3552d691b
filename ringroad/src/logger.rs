//! What the program says, on stderr and stdout: nobody who says something waits for whoever should read it. A full pipe costs
//! lines, never a frame. main.rs calls [`init`] at the start and [`flush`] at the end; the `log` crate's macros end here.
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

/// Log lines a second, all together, if the configuration says nothing else.
pub const LINES: u32 = 1000;
/// Lines that wait to be written, at most, and their bytes.
const ROOM: usize = 4096;
const BYTES: usize = 1 << 20;
/// Bytes of a line, at most.
const LINE: usize = 4096;
/// Tables of counters that wait to be written to stdout, at most, and their bytes.
const TABLES: usize = 4;
const TABLE_BYTES: usize = 16 << 20;
/// How often lines that were too many are counted in the log.
const TELL: Duration = Duration::from_secs(1);
/// How long the end waits for what has been said to be written.
const PATIENCE: Duration = Duration::from_millis(200);

/// What has been said and not been written yet.
#[derive(Default)]
struct Queue {
    texts: VecDeque<String>,
    bytes: usize,
    /// Texts that there was no room for.
    lost: u64,
    /// Lines that were more than a second may have, and when that was written last.
    over: u64,
    told: Option<Instant>,
    /// The thread is writing.
    busy: bool,
}

impl Queue {
    /// When the lines that were over are to be counted in the log.
    fn due(&self, now: Instant) -> Option<Duration> {
        let since = self.told.map_or(TELL, |told| now.saturating_duration_since(told));
        (self.over > 0).then(|| TELL.saturating_sub(since))
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

/// A descriptor that texts are written to, by a thread of its own.
struct Outlet {
    shared: Arc<Shared>,
    room: usize,
    bytes: usize,
    /// The thread's name and descriptor, until it starts.
    idle: Mutex<Option<(&'static str, File)>>,
}

impl Outlet {
    /// `name`: the descriptor's, for threads and for the line that counts what was lost.
    fn new(name: &'static str, to: File, room: usize, bytes: usize) -> Outlet {
        Outlet { shared: Arc::default(), room, bytes, idle: Mutex::new(Some((name, to))) }
    }

    /// Starts the thread, if it does not run.
    fn start(&self) -> io::Result<()> {
        let Some((name, to)) = self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take() else {
            return Ok(());
        };
        let shared = self.shared.clone();
        thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(move || write(name, to, &shared))?;
        Ok(())
    }

    /// `false`: there is no room. Never waits.
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

    /// Counts a line that was too many.
    fn count_over(&self) {
        let mut queue = self.shared.queue();
        queue.over = queue.over.saturating_add(1);
        if queue.over == 1 {
            // The thread has a time to keep now.
            self.shared.changed.notify_one();
        }
    }

    /// Waits until all is written, but not longer than that.
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
        // Said behind what there was room for, as it came later.
        let lost = std::mem::take(&mut queue.lost);
        let over = if due.is_some_and(|left| left.is_zero()) {
            queue.told = Some(Instant::now());
            std::mem::take(&mut queue.over)
        } else {
            0
        };
        drop(queue);
        let mut all = texts.into_iter().collect::<String>();
        if name == "stderr" {
            if lost > 0 {
                all += &format!("[WARN ] {lost} lines lost, stderr is not read\n");
            }
            if over > 0 {
                all += &format!("[WARN ] {over} lines lost, more than a second may have (key `log.lines`)\n");
            }
        }
        write_all(&mut to, all.as_bytes());
        queue = shared.queue();
    }
}

/// Writes as far as anybody reads. A descriptor that somebody else has made non-blocking is asked again and again.
fn write_all(to: &mut File, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return,
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(20)),
            // Nobody reads any more: no reason to stop.
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
    /// What only the operator can provoke is not counted: it comes through while guests are noisy.
    fn is_ours(metadata: &Metadata<'_>) -> bool {
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
        if !Logger::is_ours(record.metadata()) && quota.take().is_none() {
            return self.stderr.count_over();
        }
        drop(quota);
        self.stderr.put(line(record.level(), &record.args().to_string()));
    }

    fn flush(&self) {
        self.stderr.flush(Instant::now() + PATIENCE);
    }
}

/// As `env_logger` has it without time and target. One line, of a length that a log can hold.
fn line(level: Level, text: &str) -> String {
    let end = text.char_indices().map(|(at, _)| at).take_while(|&at| at <= LINE).last().unwrap_or(0);
    let cut = if text.len() > LINE { text.get(..end).map(|text| format!("{text}…")) } else { None };
    format!("[{level:<5}] {}\n", cut.as_deref().unwrap_or(text))
}

static LOGGER: OnceLock<Logger> = OnceLock::new();
static STDOUT: OnceLock<Outlet> = OnceLock::new();

/// Takes what is logged from now on; it is written from [`start`] on. `level`: what is said where `RUST_LOG` says nothing else.
///
/// # Errors
/// There is no descriptor.
pub fn init(level: &str) -> io::Result<()> {
    let filter = env_filter::Builder::new().parse(&std::env::var("RUST_LOG").unwrap_or_else(|_| level.into())).build();
    let max = filter.filter();
    // A copy of the descriptor: the lock of the standard library's own would be held while it is full.
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
        say(&text);
        // It may be the last that this process does.
        flush();
    }));
    Ok(())
}

/// Starts to write what is said: with a thread of its own, which has the rights that its maker has.
///
/// # Errors
/// There is no thread.
pub fn start() -> io::Result<()> {
    LOGGER.get().map_or(Ok(()), |logger| logger.stderr.start())
}

/// Lines a second, all together, from now on.
pub fn limit(lines: u32) {
    if let Some(logger) = LOGGER.get() {
        *logger.quota.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Quota::new(lines, lines);
    }
}

/// Says a line on stderr as it is.
pub fn say(text: &str) {
    match LOGGER.get() {
        Some(logger) => {
            logger.stderr.put(format!("{text}\n"));
        }
        None => eprintln!("{text}"),
    }
}

/// Prints on stdout. `false`: it cannot, as what was printed before has not been read.
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

/// Waits for what has been said, as long as anybody reads it: a fifth of a second at most.
pub fn flush() {
    let until = Instant::now() + PATIENCE;
    if let Some(outlet) = STDOUT.get() {
        outlet.flush(until);
    }
    if let Some(logger) = LOGGER.get() {
        // Whoever fails before all has begun wants to say why.
        let _ = logger.stderr.start();
        logger.stderr.flush(until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};

    #[test]
    fn lines_are_cut() {
        assert_eq!(line(Level::Info, "short"), "[INFO ] short\n");
        let long = line(Level::Error, &"ü".repeat(LINE));
        assert!(long.starts_with("[ERROR] ü") && long.ends_with("ü…\n") && long.len() < LINE + 16, "{}", long.len());
    }

    #[test]
    fn who_says_something_does_not_wait_for_who_reads() {
        let (reader, writer) = io::pipe().unwrap();
        let outlet = Outlet::new("stderr", File::from(std::os::fd::OwnedFd::from(writer)), ROOM, BYTES);
        outlet.start().unwrap();
        let text = "x".repeat(99) + "\n";
        let start = Instant::now();
        // More than a pipe and the queue hold.
        let put = (0..100_000).filter(|_| outlet.put(text.clone())).count();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!((ROOM..100_000).contains(&put), "{put}");
        let start = Instant::now();
        outlet.flush(start + PATIENCE);
        assert!((PATIENCE..4 * PATIENCE).contains(&start.elapsed()), "{:?}", start.elapsed());
        // Once it is read, all of them are there, and the others are counted.
        let (sender, all) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let (mut lines, mut lost) = (0, 0);
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                match line
                    .strip_prefix("[WARN ] ")
                    .and_then(|rest| rest.strip_suffix(" lines lost, stderr is not read"))
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
