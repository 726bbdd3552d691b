//! Limits on the shared resources that one frontend may use: address space, the log, the time of its port's thread.

use crate::Quota;
use std::{fmt, sync::Arc};

/// A rate limit: `burst` events at once, then `rate` a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Events at once.
    pub burst: u32,
    /// Events a second.
    pub rate: u32,
}

impl Rate {
    pub(crate) fn quota(self) -> Quota {
        Quota::new(self.burst, self.rate)
    }
}

/// The limits of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of address space for its memory; memory beyond that is refused. Up to twice as much is mapped while memory is
    /// replaced (SET_MEM_TABLE, ADD_MEM_REG, DMA_MAP).
    pub mapped: u64,
    /// Memory regions, also the reply to GET_MAX_MEM_SLOTS and the `max_dma_maps` of vfio-user; at most
    /// [`ringroad_mem::SLOTS`].
    pub regions: usize,
    /// Connections that are accepted; the others wait in the socket's backlog.
    pub connects: Rate,
    /// Messages that are handled; the others wait in the socket. Register accesses over vfio-user do not count.
    pub messages: Rate,
    /// Refused messages on one connection; the connection ends beyond that.
    pub refusals: Rate,
    /// Log lines; the others are counted, and the next line logs their number.
    pub lines: Rate,
}

impl Limits {
    /// Upper bound for the sum of `mapped` over all ports: x86-64 has 128 TiB of address space, and up
    /// to twice the limit is mapped while memory is replaced.
    pub const ALL_MAPPED: u64 = 48 << 40;
    /// Upper bound for the sum of `regions`: each is a mapping, of which a process may have 65 530 by default
    /// (vm.max_map_count).
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

/// Rate-limited log lines that a frontend or guest can trigger.
#[derive(Clone)]
pub(crate) struct Lines {
    name: Arc<str>,
    quota: Arc<Quota>,
}

impl Lines {
    /// `name` is the prefix of its lines, such as "port vm1".
    pub(crate) fn new(name: &str, rate: Rate) -> Lines {
        Lines { name: name.into(), quota: Arc::new(rate.quota()) }
    }

    /// Changes the rate.
    pub(crate) fn set(&self, rate: Rate) {
        self.quota.set(rate.burst, rate.rate);
    }

    /// Logs a line, which begins with the name itself, unless the rate is exceeded.
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
