//! An independent client that attacks a running `ringroad serve` over its sockets: a vhost-user frontend and drivers for
//! network and vsock devices, written from the specifications, without any of ringroad's crates. The tests in `tests/` start the
//! daemon, let well-behaved victims run beside an attacker, and judge what the attack does to them.
//!
//! The daemon under test is `$RINGROAD_BIN`, or else the `ringroad` that was built beside the tests.
//!
//! Guest memory is written and read through its file (pwrite, pread), never mapped: no unsafe code, and a truncated file is
//! an error here rather than a signal.

#![forbid(unsafe_code)]
#![allow(clippy::missing_errors_doc, reason = "called by tests only, which fail on any error")]

pub mod daemon;
pub mod frontend;
pub mod fuse;
pub mod net;
pub mod ring;
pub mod scene;
pub mod victim;
pub mod vsock;

use std::process::{Command, Stdio};

/// A small generator of pseudo-random numbers (xorshift64*): an attack that was seen once can be seen again.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers that follow from a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    /// Fills a slice.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.number().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// The calling thread, and those that it starts, yield to all others from now on: what an attack does to a victim is to be the daemon's
/// doing, not that of the scheduler.
///
/// An idle policy (SCHED_IDLE), which every thread that wakes up preempts at once. Since Linux 6.6 a thread that is merely nice may
/// finish its time slice first: that made 4 to 8 % of the ticks of a victim late by more than 200 µs.
pub fn be_nice() {
    let thread = rustix::thread::gettid();
    let _ = rustix::process::setpriority_process(Some(thread), 19);
    let mut chrt = Command::new("chrt");
    chrt.args(["--idle", "--pid", "0", &thread.as_raw_nonzero().to_string()]).stdin(Stdio::null());
    match chrt.status() {
        Ok(status) if status.success() => {}
        other => eprintln!("no idle policy for the attack (chrt, of util-linux): {other:?}"),
    }
}
