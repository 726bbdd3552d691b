//! `ringroad serve`: runs a switch as a configuration file describes it.
//!
//! Two threads: the first one hears signals and does nothing that could keep it from the next one; "control" starts, changes, prints
//! and ends what runs (state.rs). So the program ends when it is told to, whatever control waits for.
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
    Outcome,
    config::{self, Config, Finding},
    logger,
};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{Handle, Signals},
};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    thread,
    time::Duration,
};

/// Run a switch as a configuration file describes it
#[derive(clap::Args)]
#[command(after_help = "Example configuration:\n  \
    [[port]]\n  name = \"vm1\"\n  kind = \"vhost-user\"\n  socket = \"/run/ringroad/vm1.sock\"\n\n  \
    [[port]]\n  name = \"host\"\n  kind = \"tap\"\n  interface = \"rr0\"\n\n  \
    [[vsock]]\n  cid = 3\n  socket = \"/run/ringroad/vm1.vsock\"\n  host = \"/run/ringroad/vm1.host\"\n\n\
    The folder of the sockets is yours to make: install -d -m 0750 -o $USER /run/ringroad\n\n\
    SIGUSR1 prints the counters. SIGHUP reads the file again, SIGUSR2 only says what that would do. SIGTERM and SIGINT end it.")]
pub struct Args {
    /// The configuration file
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Print the counters of all ports every so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    stats: Option<u64>,
    /// Write the counters of all ports as JSON to a file at the end
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Say whether the configuration is right and whether this machine has what it asks for, and end
    #[arg(long)]
    check: bool,
    /// With --check: say what each difference to this file (the one that is running) would cost
    #[arg(long, value_name = "FILE", requires = "check")]
    against: Option<PathBuf>,
    /// Do not confine the process: for those who look for the reason of a failure
    #[arg(long)]
    no_sandbox: bool,
}

/// What control is to do.
enum Order {
    Reload,
    /// Say what a reload would do.
    Preview,
    /// Print the counters; `true`: connection by connection too.
    Print(bool),
    Stop,
}

/// Orders that wait: more are no use to anybody.
const ORDERS: usize = 16;
/// How long the end may take before the program ends without it. With what the log may take it is less than a second.
const PATIENCE: Duration = Duration::from_millis(600);

/// Runs until it is told to stop.
pub fn run(args: Args) -> Outcome {
    let config = Config::load(&args.config)?;
    if args.check {
        return check(&args, &config);
    }
    if let Some(findings) = explain(&args.config, &config::check(&config)) {
        return Err(findings.into());
    }
    logger::limit(config.log.lines);
    ringroad_host::raise_file_limit();
    ringroad_host::keep_freed_memory();
    let sandbox = Sandbox::enter(&config, &args.config, args.json.as_deref(), args.no_sandbox)?;
    // The first threads are started here, as they have what their maker has.
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
                // Control is busy: the next time.
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
        tell(&orders, signal, &progress);
    }
    match ended.recv_timeout(PATIENCE) {
        Ok(result) => Ok(result.map(|()| ExitCode::SUCCESS)?),
        Err(RecvTimeoutError::Disconnected) => Err("the thread that controls everything has failed".into()),
        Err(RecvTimeoutError::Timeout) => {
            log::error!("still busy after {} ms: {}; ending without it", PATIENCE.as_millis(), progress.doing());
            progress.remove_sockets();
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Passes a signal on to control.
fn tell(orders: &SyncSender<Order>, signal: i32, progress: &Progress) {
    let order = match signal {
        SIGUSR1 => Order::Print(true),
        SIGUSR2 => Order::Preview,
        _ => Order::Reload,
    };
    if orders.try_send(order).is_err() {
        log::warn!("a signal was passed over: still busy: {}", progress.doing());
    }
}

/// Ends the wait for signals when control is over, however it is.
struct End(Handle);

impl Drop for End {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What control does, from the start to the end.
fn control(
    args: &Args,
    (config, sandbox): (Config, Sandbox),
    orders: &Receiver<Order>,
    progress: &Progress,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut state = State::start(&config, sandbox.clone(), progress.clone())?;
    if !progress.is_stopping() {
        sandbox.say();
        log::info!("{}, ready", state.summary());
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
        crate::blast::write_json(file, &state.json())?;
    }
    state.end();
    Ok(())
}

/// What does not go on this machine, for whoever typed the command.
fn explain(file: &Path, findings: &[Finding]) -> Option<String> {
    let lines: Vec<String> = findings.iter().map(|finding| format!("{}:{finding}", file.display())).collect();
    (!lines.is_empty()).then(|| lines.join("\nringroad: "))
}

/// `--check`.
fn check(args: &Args, config: &Config) -> Outcome {
    if let Some(findings) = explain(&args.config, &config::check(config)) {
        return Err(findings.into());
    }
    if let Some(file) = &args.against {
        let changes = changes::changes(&Config::load(file)?, config);
        changes.iter().for_each(|change| println!("{change}"));
        if changes.is_empty() {
            println!("nothing changes");
        }
    }
    println!("{}: {}, right", args.config.display(), print::summary(config.ports.len(), config.vsocks.len()));
    Ok(ExitCode::SUCCESS)
}
