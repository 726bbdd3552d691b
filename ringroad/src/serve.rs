//! `ringroad serve`: runs the ports and vsock devices of a configuration file. Called by main.rs.
//!
//! Two threads: the main thread only receives signals and never blocks on anything else; the "control" thread starts, reloads,
//! reports and stops everything (state.rs). So the program ends on request even if control is blocked.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod changes;
mod print;
mod progress;
mod sandbox;
mod state;
mod vsock;

use self::{progress::Progress, sandbox::Sandbox, state::State};
use crate::{
    config::{self, Config},
    logger,
    outcome::Outcome,
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{Handle, Signals},
};
use std::{
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    thread,
    time::Duration,
};

/// Run the switch and vsock devices that a configuration file describes
#[derive(clap::Args)]
#[command(after_help = "Example configuration:\n  \
    [[port]]\n  name = \"vm1\"\n  kind = \"vhost-user\"\n  socket = \"/run/ringroad/vm1.sock\"\n\n  \
    [[port]]\n  name = \"host\"\n  kind = \"tap\"\n  interface = \"rr0\"\n\n  \
    [[vsock]]\n  cid = 3\n  socket = \"/run/ringroad/vm1.vsock\"\n  host = \"/run/ringroad/vm1.host\"\n\n\
    Create the directory for the sockets first: sudo install -d -m 0750 -o $USER /run/ringroad\n\n\
    Examples:\n  \
    ringroad serve -c ringroad.toml --check                     validate the file against this machine\n  \
    ringroad serve -c ringroad.toml --stats 10                  run, and print the counters every 10 seconds\n  \
    ringroad serve -c new.toml --check --against ringroad.toml  list what a reload would change and disconnect\n\n\
    Signals: SIGUSR1 prints the counters. SIGHUP reloads the file; SIGUSR2 only reports what a reload would do. SIGTERM and\n\
    SIGINT stop the daemon. README.md describes all configuration keys and counters.")]
pub struct Args {
    /// The configuration file
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Print the counters every SECONDS
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    stats: Option<u64>,
    /// Write the counters as JSON to FILE on exit
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Check the configuration and whether this machine can run it, then exit
    #[arg(long)]
    check: bool,
    /// With --check: list each difference from FILE (the running configuration) and what applying it would disrupt
    #[arg(long, value_name = "FILE", requires = "check")]
    against: Option<PathBuf>,
    /// Run without seccomp, Landlock and dropped capabilities, to rule them out when debugging
    #[arg(long)]
    no_sandbox: bool,
}

/// A request to the control thread.
enum Order {
    Reload,
    /// Report what a reload would do.
    Preview,
    /// Print the counters; `true`: each vsock connection too.
    Print(bool),
    Stop,
}

/// Capacity of the order queue; orders beyond it are dropped.
const ORDERS: usize = 16;
/// Time limit for an orderly shutdown; after it the process exits anyway. Together with flushing the log, less than a second.
const PATIENCE: Duration = Duration::from_millis(600);

/// Runs the daemon until SIGTERM or SIGINT.
pub fn run(args: Args) -> Outcome {
    let config = Config::load(&args.config)?;
    if args.check {
        return check(&args, &config);
    }
    if let Some(findings) = print::explain(&args.config, &config::check(&config)) {
        return Err(findings.into());
    }
    logger::limit(config.log.lines);
    ringroad_host::raise_file_limit();
    ringroad_host::keep_freed_memory();
    let sandbox = Sandbox::enter(&config, &args.config, args.json.as_deref(), args.no_sandbox)?;
    // Threads inherit the confinement of their creator: the first ones are started only now.
    logger::start()?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP])?;
    let (orders, received) = mpsc::sync_channel(ORDERS);
    let (sender, ended) = mpsc::channel();
    let progress = Progress::default();
    if let Some(seconds) = args.stats {
        let orders = orders.clone();
        thread::Builder::new().name("stats".into()).spawn(move || {
            loop {
                thread::sleep(Duration::from_secs(seconds));
                // If control is busy, this report is skipped.
                let _ = orders.try_send(Order::Print(false));
            }
        })?;
    }
    {
        let (end, progress) = (End(signals.handle()), progress.clone());
        thread::Builder::new().name("control".into()).spawn(move || {
            let end = end;
            let result = control(&args, (config, sandbox), &received, &progress).map_err(|error| error.to_string());
            let _ = sender.send(result);
            drop(end);
        })?;
    }
    for signal in signals.forever() {
        if matches!(signal, SIGTERM | SIGINT) {
            progress.stop();
            let _ = orders.try_send(Order::Stop);
            break;
        }
        forward(&orders, signal, &progress);
    }
    match ended.recv_timeout(PATIENCE) {
        Ok(result) => Ok(result.map(|()| ExitCode::SUCCESS)?),
        Err(RecvTimeoutError::Disconnected) => Err("the control thread panicked".into()),
        Err(RecvTimeoutError::Timeout) => {
            log::error!(
                "shutdown timed out after {} ms while {}; exiting anyway",
                PATIENCE.as_millis(),
                progress.doing()
            );
            progress.remove_sockets();
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Turns a signal into an order for control.
fn forward(orders: &SyncSender<Order>, signal: i32, progress: &Progress) {
    let order = match signal {
        SIGUSR1 => Order::Print(true),
        SIGUSR2 => Order::Preview,
        _ => Order::Reload,
    };
    if orders.try_send(order).is_err() {
        log::warn!("signal {signal} ignored: control is still busy {}", progress.doing());
    }
}

/// Dropped when control returns or panics: ends the main thread's wait for signals.
struct End(Handle);

impl Drop for End {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The control thread, from start to shutdown.
fn control(
    args: &Args,
    (config, sandbox): (Config, Sandbox),
    orders: &Receiver<Order>,
    progress: &Progress,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut state = State::start(&config, sandbox.clone(), progress.clone())?;
    if !progress.is_stopping() {
        sandbox.log();
        log::info!("ready: {}", state.summary());
    }
    while !progress.is_stopping() {
        match orders.recv()? {
            Order::Reload => state.reload(&args.config),
            Order::Preview => state.preview(&args.config),
            Order::Print(all) => state.print(all),
            Order::Stop => break,
        }
    }
    log::info!("stopping");
    state.print(false);
    progress.at("writing the counters");
    if let Some(file) = &args.json {
        ringroad_text::save(file, &state.json())?;
    }
    state.end();
    Ok(())
}

/// `--check`.
fn check(args: &Args, config: &Config) -> Outcome {
    if let Some(findings) = print::explain(&args.config, &config::check(config)) {
        return Err(findings.into());
    }
    if let Some(file) = &args.against {
        let changes = changes::changes(&Config::load(file)?, config);
        changes.iter().for_each(|change| println!("{change}"));
        if changes.is_empty() {
            println!("no changes");
        }
    }
    println!(
        "{}: configuration OK: {}",
        args.config.display(),
        print::summary(config.ports.len(), config.vsocks.len())
    );
    Ok(ExitCode::SUCCESS)
}
