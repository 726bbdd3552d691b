//! What is logged, by port.

use super::{PATIENCE, within};
use std::sync::{Mutex, MutexGuard, Once};

struct Log(Mutex<Vec<String>>);

static LOG: Log = Log(Mutex::new(Vec::new()));

impl Log {
    fn lines(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        self.lines().push(format!("{} {}", record.level(), record.args()));
    }
    fn flush(&self) {}
}

/// Returns the log lines of a port, with levels. Each test has its own port names, so that tests do not see each other's
/// lines.
pub fn log_of(port: &str) -> Vec<String> {
    let about = [format!(" port {port}:"), format!(" port {port} ")];
    LOG.lines().iter().filter(|line| about.iter().any(|about| line.contains(about))).cloned().collect()
}

/// Waits for a line of a port that contains all the given words, and returns the first one.
#[track_caller]
pub fn logged(port: &str, wanted: &[&str]) -> String {
    let mut found = None;
    within(PATIENCE, || {
        found = log_of(port).into_iter().find(|line| wanted.iter().all(|word| line.contains(word)));
        found.is_some()
    });
    found.unwrap_or_else(|| panic!("no line with {wanted:?} about {port} in {:#?}", log_of(port)))
}

/// Keeps what is logged from now on.
pub fn keep_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LOG).unwrap();
        log::set_max_level(log::LevelFilter::Debug);
    });
}
