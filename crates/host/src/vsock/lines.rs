//! Rate-limited log lines that a guest or a program can trigger: a burst, then a few a second, with the number of those
//! suppressed.

use crate::Quota;
use log::Level;
use std::fmt::Arguments;

/// Log lines of one guest.
pub(super) struct Lines(Quota);

impl Lines {
    /// Lines about events.
    pub(super) fn new() -> Lines {
        Lines(Quota::new(20, 1))
    }

    /// Lines about violations of the protocol, which have a quota of their own, so that they suppress no others.
    pub(super) fn of_violations() -> Lines {
        Lines(Quota::new(10, 10))
    }

    /// Logs a line, unless the rate is exceeded. The next one that is logged includes the number of suppressed lines.
    pub(super) fn say(&self, level: Level, line: Arguments<'_>) {
        // A line below the log level takes no token.
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
