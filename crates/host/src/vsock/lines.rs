//! Log lines that a guest or a program can provoke: some at once, then one a second, and how many there would have been.

use crate::Quota;
use log::Level;
use std::fmt::Arguments;

/// Lines at once.
const BURST: u32 = 20;
/// Lines a second after that.
const RATE: u32 = 1;

/// The log lines of one guest.
pub(super) struct Lines(Quota);

impl Lines {
    pub(super) fn new() -> Lines {
        Lines(Quota::new(BURST, RATE))
    }

    /// Logs a line, unless there were too many. The next one that is logged says how many were not.
    pub(super) fn say(&self, level: Level, line: Arguments<'_>) {
        // A line that nobody wants takes nothing from those that somebody does.
        if !log::log_enabled!(level) {
            return;
        }
        match self.0.take() {
            Some(0) => log::log!(level, "{line}"),
            Some(suppressed) => log::log!(level, "{line} ({suppressed} more lines suppressed)"),
            None => {}
        }
    }
}
