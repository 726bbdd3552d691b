//! Rate-limited log lines that a guest or a program can trigger: a burst, then one a second, with the number of those
//! suppressed.

use crate::Quota;
use log::Level;
use std::fmt::Arguments;

/// Lines in a burst.
const BURST: u32 = 20;
/// Lines a second after the burst.
const RATE: u32 = 1;

/// The log lines of one guest.
pub(super) struct Lines(Quota);

impl Lines {
    pub(super) fn new() -> Lines {
        Lines(Quota::new(BURST, RATE))
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
