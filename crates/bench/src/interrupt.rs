//! What a signal does to a bench. SIGINT (Ctrl-C) or SIGTERM ends it after the current run, and with it the programs that it has
//! started: a device or driver that polls and is left behind would have a CPU to itself, and spoil what is measured next.

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::sync::{
    Arc, LazyLock,
    atomic::{AtomicBool, Ordering},
};

/// Whether there was a signal.
static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Runs a bench that a signal ends. A second one ends the process at once.
pub fn run(bench: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let failed = |error| format!("cannot handle signals: {error}");
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag clear and sets it, the second one finds it set.
        flag::register_conditional_shutdown(signal, 1, INTERRUPTED.clone()).map_err(failed)?;
        flag::register(signal, INTERRUPTED.clone()).map_err(failed)?;
    }
    // A signal to the whole process group has ended the devices, too: what failed for lack of them is of no interest.
    bench().or_else(|error| check().and(Err(error)))
}

/// Fails if the bench is to end. Called between two runs.
pub fn check() -> Result<(), String> {
    match INTERRUPTED.load(Ordering::Relaxed) {
        true => Err("interrupted by a signal; finished cells are in the file of --json, if there is one".to_owned()),
        false => Ok(()),
    }
}
