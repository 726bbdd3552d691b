//! `ringroad blast --driver lem`: the e1000's driver, over vfio-user.

use super::{
    args::{Args, settings},
    report::{result, second, stop_on_signals, summary},
};
use crate::outcome::Outcome;
use ringroad_host::vfio_user::Accesses;
use ringroad_ring::BURST;
use ringroad_switch::Gather;
use ringroad_text::{count, save};
use ringroad_traffic::{
    Lem, LemTotals, Mode,
    options::{Ring, name},
};
use serde_json::{Value, json};
use std::{process::ExitCode, time::Duration};

/// Size of the driver's buffers, none of which is longer than one frame.
const LONGEST: usize = 2048;

/// Runs the driver for the requested time.
pub fn run(args: &Args) -> Outcome {
    if let Some(option) = beyond(args) {
        return Err(
            format!("--driver lem drives an e1000 and knows no {option}; leave it out, or use --driver blast").into()
        );
    }
    let ring = args.queue_size;
    if !(8..=4096).contains(&ring) || !ring.is_multiple_of(8) {
        return Err(format!("--queue-size {ring}: expected 8 to 4096 descriptors, a multiple of 8").into());
    }
    let settings = settings(args);
    if settings.longest() > LONGEST {
        return Err(format!("--size {}: this driver's frames have up to {LONGEST} bytes", settings.longest()).into());
    }
    stop_on_signals(&settings)?;
    let mut driver = Lem::connect(&args.target.socket, args.lem, ring, settings)?;
    let totals = driver.run(Duration::from_secs_f64(args.seconds), second(args.lines))?;
    drop(driver);
    let result = merge(result(args, &totals.totals), args, &totals);
    if args.lines {
        println!("{result}");
    } else {
        summary(args, &totals.totals);
        print(&totals);
    }
    if let Some(file) = &args.json {
        save(file, &result)?;
    }
    let lost = totals.totals.left.is_some_and(|left| left.under_way > 0);
    Ok(if totals.totals.errors > 0 || lost { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the first option given that this driver does not have.
fn beyond(args: &Args) -> Option<&'static str> {
    let given = [
        (args.mode == Mode::Reflect, "--mode reflect"),
        (args.target.listen, "--listen"),
        (args.target.ring != Ring::Packed, "--ring"),
        (args.window.is_some(), "--window"),
        (args.burst != BURST as u16, "--burst"),
        (args.gather != Gather::Auto, "--gather"),
        (args.buffer.is_some(), "--buffer"),
        (args.destinations > 1, "--destinations"),
        (args.sources > 1, "--sources"),
        (args.event_driven, "--event-driven (it always is)"),
        (args.reconnect.is_some(), "--reconnect"),
        (!args.without.is_empty(), "--without"),
    ];
    given.into_iter().find(|(given, _)| *given).map(|(_, option)| option)
}

/// Adds what only this driver has to the result, and removes what it does not have.
fn merge(mut result: Value, args: &Args, totals: &LemTotals) -> Value {
    let Accesses { reads, writes, posted } = totals.accesses;
    let [reads_each, writes_each, interrupts_each] = totals.per_frame();
    let more = json!({
        "driver": "lem",
        "mit_enable": args.lem.mit,
        "itr": args.lem.itr,
        "accesses": name(&args.lem.accesses),
        "transmitted": totals.transmitted,
        "reads": reads,
        "writes": writes,
        "posted_writes": posted,
        "interrupts": totals.interrupts,
        "reads_per_frame": reads_each,
        "writes_per_frame": writes_each,
        "interrupts_per_frame": interrupts_each,
    });
    if let (Value::Object(result), Value::Object(more)) = (&mut result, more) {
        result.remove("ring");
        result.extend(more);
    }
    result
}

fn print(totals: &LemTotals) {
    let Accesses { reads, writes, posted } = totals.accesses;
    let [reads_each, writes_each, interrupts_each] = totals.per_frame();
    println!(
        "register reads {} ({reads_each:.4} per frame)  writes {}, of these posted {} ({writes_each:.4})  interrupts {} \
         ({interrupts_each:.4})",
        count(reads),
        count(writes + posted),
        count(posted),
        count(totals.interrupts),
    );
}
