//! What a frontend may use up of what it shares with others: address space, the log, the time of this process.

use crate::Quota;
use std::{fmt, sync::Arc};

/// So many at once, so many a second in the long run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// At once.
    pub burst: u32,
    /// A second.
    pub rate: u32,
}

impl Rate {
    pub(super) fn quota(self) -> Quota {
        Quota::new(self.burst, self.rate)
    }
}

/// The limits of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of address space that its memory takes up here; beyond it memory is refused. While memory is replaced (SET_MEM_TABLE,
    /// ADD_MEM_REG) up to twice as much is mapped.
    pub mapped: u64,
    /// Regions that it may be made of, as GET_MAX_MEM_SLOTS says; at most [`ringroad_mem::SLOTS`].
    pub regions: usize,
    /// Connections that are accepted; beyond it they wait in the socket's backlog.
    pub connects: Rate,
    /// Messages that are looked at; beyond it they wait in the socket.
    pub messages: Rate,
    /// Messages that are refused on one connection; beyond it the connection ends.
    pub refusals: Rate,
    /// Lines in the log; beyond it they are counted, and the next line says how many.
    pub lines: Rate,
}

impl Limits {
    /// Bytes that all ports of a process may be allowed together: x86-64 has 128 TiB, half of which stays free while memory is
    /// replaced.
    pub const ALL_MAPPED: u64 = 48 << 40;
    /// The same of regions: each is a mapping, of which a process may have 65 530 by default (vm.max_map_count).
    pub const ALL_REGIONS: usize = 24_000;
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            mapped: 1 << 40,
            regions: ringroad_mem::SLOTS,
            connects: Rate { burst: 20, rate: 10 },
            messages: Rate { burst: 4000, rate: 1000 },
            refusals: Rate { burst: 1000, rate: 1000 },
            lines: Rate { burst: 20, rate: 1 },
        }
    }
}

/// Lines in the log that a frontend or guest can provoke.
#[derive(Clone)]
pub(crate) struct Lines {
    name: Arc<str>,
    quota: Arc<Quota>,
}

impl Lines {
    /// `name`: whose they are, as in "port vm1".
    pub(crate) fn new(name: &str, rate: Rate) -> Lines {
        Lines { name: name.into(), quota: Arc::new(rate.quota()) }
    }

    /// From now on so many.
    pub(crate) fn set(&self, rate: Rate) {
        self.quota.set(rate.burst, rate.rate);
    }

    /// One line, which begins with the name itself; or none, if there were too many.
    pub(crate) fn say(&self, level: log::Level, line: fmt::Arguments<'_>) {
        let Some(suppressed) = self.quota.take() else { return };
        if suppressed > 0 {
            log::warn!("{}: {suppressed} more lines suppressed", self.name);
        }
        log::log!(level, "{line}");
    }
}

/// `say!(lines, Error, "{name}: …")`.
macro_rules! say {
    ($lines:expr, $level:ident, $($line:tt)+) => {
        $lines.say(log::Level::$level, format_args!($($line)+))
    };
}
pub(crate) use say;
