//! The `ringroad` command line: dispatches to the subcommands, sets up logging, turns errors into exit codes. See README.md.
#![forbid(unsafe_code)]

mod attach;
mod blast;
mod config;
mod demo;
mod logger;
mod outcome;
mod ports;
mod serve;
mod vsock;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    version,
    about = "A user-space switch for virtual machines: virtio-net and vsock over vhost-user, TAP",
    after_help = "Examples:\n  \
                  ringroad demo                                     see it work; needs no root and no guests\n  \
                  ringroad serve -c ringroad.toml                   run a switch\n  \
                  ringroad blast /run/ringroad/vm1.sock             send test traffic to a vhost-user network device\n  \
                  ringroad attach /run/ringroad/vm1.sock --tap rr1  put a vhost-user network device behind a TAP interface\n  \
                  ringroad vsock cat /run/ringroad/vm1.vsock 2:22   connect to port 22 of the host, as a guest would\n  \
                  ringroad bench pvp                                benchmark, against DPDK if it is installed\n\n\
                  `ringroad COMMAND --help` describes each command, with examples."
)]
struct Cli {
    /// Log more: -v for info, -vv for debug (RUST_LOG overrides it)
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the switch and vsock devices that a configuration file describes
    Serve(serve::Args),
    /// Run a switch with two built-in drivers for a few seconds and show rates, round trips and drops
    Demo(demo::Args),
    /// Generate, receive or reflect test traffic on any vhost-user network device
    Blast(blast::Args),
    /// Put any vhost-user network device behind a TAP interface, as its driver
    Attach(attach::Args),
    /// Act as the guest of any vhost-user vsock device: cat, echo server, benchmark
    Vsock(vsock::Args),
    /// Benchmark network and vsock paths, in pairs against a peer
    Bench(ringroad_bench::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match (&cli.command, cli.verbose) {
        (Command::Serve(_), 0) => "info",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    // `serve` starts the log thread itself, after it has confined the process.
    let start = || if matches!(cli.command, Command::Serve(_)) { Ok(()) } else { logger::start() };
    if let Err(error) = logger::init(level).and_then(|()| start()) {
        eprintln!("ringroad: cannot start the log: {error}");
        return ExitCode::FAILURE;
    }
    let result = match cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Blast(args) => blast::run(args),
        Command::Attach(args) => attach::run(args),
        Command::Vsock(args) => vsock::run(args),
        Command::Bench(args) => ringroad_bench::run(args).map(|()| ExitCode::SUCCESS).map_err(Into::into),
    };
    let code = result.unwrap_or_else(|error| {
        logger::print_error(&format!("ringroad: {error}"));
        ExitCode::FAILURE
    });
    logger::flush();
    code
}
