//! `ringroad blast`: a virtio-net driver (virtio 1.3, 5.1) that sends, receives or reflects test traffic on a vhost-user device; or
//! the e1000's, on a vfio-user device. Command line and summary; the drivers are in the crate `traffic`. `demo` starts this command,
//! too.

mod args;
mod lem;
mod report;

pub use args::Args;

use crate::outcome::Outcome;
use args::settings;
use report::{result, second, stop_on_signals, summary};
use ringroad_host::vhost_user::Connector;
use ringroad_net::bits;
use ringroad_ring::BURST;
use ringroad_text::save;
use ringroad_traffic::{
    Mode, PLAIN_BURST, Plain, Traffic,
    options::{DriverKind, Ring, Target, pin},
};
use std::{process::ExitCode, time::Duration};

/// Runs the driver for the requested time.
pub fn run(args: Args) -> Outcome {
    if args.driver == DriverKind::Lem {
        if let Some(cpu) = args.cpu {
            pin("--cpu", cpu)?;
        }
        return lem::run(&args);
    }
    if let Some(option) = args.lem.given() {
        return Err(format!("{option} is for --driver lem").into());
    }
    let Target { socket, listen, ring } = &args.target;
    if *ring == Ring::Split && !args.queue_size.is_power_of_two() {
        return Err(format!("--queue-size {}: a split ring needs a power of two", args.queue_size).into());
    }
    if let (DriverKind::Plain, Some(option)) = (args.driver, beyond_plain(&args)) {
        return Err(format!(
            "--driver plain sends at full rate and knows no {option}; leave it out, or use --driver blast"
        )
        .into());
    }
    if let Some(cpu) = args.cpu {
        pin("--cpu", cpu)?;
    }
    let settings = settings(&args);
    let frame = args.buffer.map_or(settings.longest().max(1518), usize::from);
    let connector = Connector {
        listen: *listen,
        patience: Duration::from_secs(if *listen { 60 } else { 1 }),
        ..args.without.connector(socket, *ring, args.queue_size, frame)
    };
    let mut connection = connector.connect()?;
    if *ring == Ring::Packed && connection.acked & bits::RING_PACKED == 0 {
        return Err("the device does not offer VIRTIO_F_RING_PACKED; use --ring split".into());
    }
    stop_on_signals(&settings)?;
    let time = Duration::from_secs_f64(args.seconds);
    let (totals, disconnected) = if args.driver == DriverKind::Plain {
        let mut plain = Plain::new(connection, settings)
            .ok_or_else(|| format!("--driver plain: --queue-size must be more than {PLAIN_BURST}"))?;
        (plain.run(time, second(args.lines))?, plain.is_closed())
    } else {
        let totals = Traffic::new(settings, &mut connection.driver).run(&mut connection, time, second(args.lines))?;
        (totals, connection.is_closed())
    };
    let result = result(&args, &totals);
    if args.lines {
        println!("{result}");
    } else {
        summary(&args, &totals);
    }
    if let Some(file) = &args.json {
        save(file, &result)?;
    }
    if disconnected {
        let advice = if args.reconnect.is_some() { "" } else { "; use --reconnect to wait for it and resume" };
        return Err(format!("the device at {} has disconnected{advice}", socket.display()).into());
    }
    let lost = totals.left.is_some_and(|left| left.under_way > 0 || left.missing != Some(0));
    Ok(if totals.errors > 0 || lost { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the first option given that the plain driver does not have.
fn beyond_plain(args: &Args) -> Option<&'static str> {
    let given = [
        (args.mode != Mode::Tx, "--mode"),
        (args.rate.is_some(), "--rate"),
        (args.window.is_some(), "--window"),
        (args.burst != BURST as u16, "--burst"),
        (args.verify, "--verify"),
        (args.destinations > 1, "--destinations"),
        (args.sources > 1, "--sources"),
        (args.event_driven, "--event-driven"),
        (args.reconnect.is_some(), "--reconnect"),
    ];
    given.into_iter().find(|(given, _)| *given).map(|(_, option)| option)
}
