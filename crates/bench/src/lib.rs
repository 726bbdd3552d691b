//! `ringroad bench`: benchmarks of our devices, in pairs with a peer's, so that a noisy machine affects both alike. Called by the
//! program's main.rs.
//!
//! A file for each bench. What they share: options.rs, devices and runs of our driver (rig.rs), peers (peer.rs), rounds, tables
//! and JSON rows (session.rs), statistics (figures.rs), both ends of a vsock device (vsock_ends.rs), what a signal does (interrupt.rs).
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod curves;
mod driver;
mod figures;
mod flood;
mod frames;
mod guest_tcp;
mod interrupt;
mod lab;
mod latency;
mod lem;
mod mergeable;
mod options;
mod packed;
mod peer;
mod pvp;
mod rig;
mod session;
mod sweep;
mod switch;
#[cfg(test)]
mod testing;
mod testpmd;
mod vsock_ends;
mod vsock_latency;
mod vsock_peer;
mod vsock_stream;

/// Benchmark network and vsock paths, in pairs against a peer
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench pvp --ring packed --size 64 --json pvp.json\n  \
    ringroad bench pvp --all --peer dpdk,forky,ovs   the whole matrix, a table for each peer\n  \
    ringroad bench curves --curve ports              one worker with 1 to 32 ports\n  \
    ringroad bench driver --ring packed --mode txonly")]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Throughput of one port that reflects frames, on one core; ringroad against a peer
    Pvp(pvp::Args),
    /// Gain of each optimisation in `port.tuning`: each alone, then added one by one
    Packed(packed::Args),
    /// Throughput from guest to guest through two ports; ringroad against a peer
    Switch(switch::Args),
    /// Round trip of a single frame, polling and event driven; ringroad against a peer, which polls
    Latency(frames::Frames),
    /// Cost per frame by the driver's burst size, and by the number of ports per worker
    Curves(curves::Args),
    /// What drives a device fastest: burst, window and back-off of our driver, against the plain driver
    Sweep(sweep::Args),
    /// Throughput of DPDK's driver on our device, against the same driver on DPDK's device
    Driver(driver::Args),
    /// Round trips of a vsock connection, with direct against queued sending
    VsockLatency(vsock_latency::Args),
    /// Throughput of vsock connections, with direct against queued sending
    VsockStream(vsock_stream::Args),
    /// TCP and UDP of Linux guests through ringroad, against the same guests on a TAP interface of their own
    GuestTcp(guest_tcp::Args),
    /// Pings of a quiet Linux guest while the host floods another one, against those without the flood
    Flood(flood::Args),
    /// TCP to our own driver behind a TAP interface, with receive buffers of each policy
    Mergeable(mergeable::Args),
    /// Driver and device of an emulated network card (e1000), with and without moderated interrupts and a deferred doorbell
    Lem(lem::Args),
    /// Our vsock device against rust-vmm's with the same driver and host program; guest to guest against a relay program
    VsockPeer(vsock_peer::Args),
}

/// Runs a bench, prints its tables, and saves its rows as JSON if requested.
///
/// # Errors
/// A message for the user: a device, peer or driver did not start, no frames arrived, or SIGINT or SIGTERM has ended it.
pub fn run(args: Args) -> Result<(), String> {
    interrupt::run(|| match args.bench {
        Bench::Pvp(args) => pvp::run(&args),
        Bench::Packed(args) => packed::run(&args),
        Bench::Switch(args) => switch::run(&args),
        Bench::Latency(args) => latency::run(&args),
        Bench::Curves(args) => curves::run(&args),
        Bench::Sweep(args) => sweep::run(&args),
        Bench::Driver(args) => driver::run(&args),
        Bench::VsockLatency(args) => vsock_latency::run(&args),
        Bench::VsockStream(args) => vsock_stream::run(&args),
        Bench::GuestTcp(args) => guest_tcp::run(&args),
        Bench::Flood(args) => flood::run(&args),
        Bench::Mergeable(args) => mergeable::run(&args),
        Bench::Lem(args) => lem::run(&args),
        Bench::VsockPeer(args) => vsock_peer::run(&args),
    })
}
