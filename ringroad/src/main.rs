//! ringroad: a switch for virtual machines. See README.md.
#![forbid(unsafe_code)]

mod bench;
mod blast;
mod child;
mod config;
mod demo;
mod logger;
mod report;
mod serve;
mod traffic;
mod vsock;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    version,
    about = "A user-space switch for virtual machines: virtio-net and vsock over vhost-user, TAP",
    after_help = "Examples:\n  ringroad demo                      see it work: no root, no guests needed\n  \
                  ringroad serve -c ringroad.toml    run a switch\n  \
                  ringroad blast /run/ringroad/vm1.sock    send test traffic to a vhost-user device\n  \
                  ringroad vsock cat /run/ringroad/vm1.vsock 2:22    talk to a vsock device as its guest would\n  \
                  ringroad bench pvp                 measure, against DPDK where it is installed"
)]
struct Cli {
    /// Say more: -v for info, -vv for debug (RUST_LOG works too)
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a switch as a configuration file describes it
    Serve(serve::Args),
    /// Run a switch with two drivers of our own for a few seconds, and show what it does
    Demo(demo::Args),
    /// Send and receive test traffic through a vhost-user network device, ours or another's
    Blast(blast::Args),
    /// Be a guest of a vhost-user vsock device, ours or another's
    Vsock(vsock::Args),
    /// Measure
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match (&cli.command, cli.verbose) {
        (Command::Serve(_), 0) => "info",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    // `serve` starts its threads when it is confined.
    let writes = || if matches!(cli.command, Command::Serve(_)) { Ok(()) } else { logger::start() };
    if let Err(error) = logger::init(level).and_then(|()| writes()) {
        eprintln!("ringroad: cannot start the log: {error}");
        return ExitCode::FAILURE;
    }
    let result = match cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Blast(args) => blast::run(args),
        Command::Vsock(args) => vsock::run(args),
        Command::Bench(args) => bench::run(args),
    };
    let code = result.unwrap_or_else(|error| {
        logger::say(&format!("ringroad: {error}"));
        ExitCode::FAILURE
    });
    logger::flush();
    code
}

/// How a command ends: an exit code, or a message for whoever typed it.
type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;
