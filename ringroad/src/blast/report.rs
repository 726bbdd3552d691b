//! What `ringroad blast` prints while it runs and at its end, and how a signal ends it.

use super::args::Args;
use ringroad_host::cpu_time;
use ringroad_text::{count, table, time};
use ringroad_traffic::{Settings, Totals, gbps, options::name};
use serde_json::json;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::io;

/// Ends the run early at a signal, and the program at the second one.
pub fn stop_on_signals(settings: &Settings) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag clear and sets it; the second one finds it set and exits.
        flag::register_conditional_shutdown(signal, 1, settings.stop.clone())?;
        flag::register(signal, settings.stop.clone())?;
    }
    Ok(())
}

/// Returns a function that prints what has happened since its last call, as text or as `lines` of JSON.
pub fn second(lines: bool) -> impl FnMut(&Totals) {
    let mut before = (0, 0, cpu_time());
    move |totals| {
        let (sent, received, cpu) = (totals.sent - before.0, totals.received - before.1, cpu_time());
        let (busy, second) = ((cpu - before.2).as_secs_f64() * 100.0, totals.time.as_secs());
        before = (totals.sent, totals.received, cpu);
        let errors = totals.errors;
        if lines {
            println!(
                "{}",
                json!({ "second": second, "sent": sent, "received": received, "errors": errors, "cpu_percent": busy })
            );
        } else {
            let [sent, received] = [sent, received].map(|frames| frames as f64 / 1e6);
            println!(
                "{second:>4} s   sent {sent:7.3} Mpps   received {received:7.3} Mpps   errors {errors}   CPU {busy:.0} %"
            );
        }
    }
}

pub fn result(args: &Args, totals: &Totals) -> serde_json::Value {
    let percentile = |p: f64| (!totals.round_trip.is_empty()).then(|| totals.round_trip.value_at_quantile(p));
    let recovery = (!totals.recovery.is_empty()).then(|| {
        let times = &totals.recovery;
        json!({ "min": times.min(), "p50": times.value_at_quantile(0.5), "max": times.max(), "samples": times.len() })
    });
    json!({
        "blast": name(&args.mode),
        "ring": name(&args.target.ring),
        "queue_size": args.queue_size,
        "sizes": args.size.0,
        "seconds": totals.time.as_secs_f64(),
        "sent": totals.sent,
        "received": totals.received,
        "errors": totals.errors,
        "duplicates": totals.duplicates,
        "foreign": totals.foreign,
        "reconnects": totals.reconnects,
        "recovery_ns": recovery,
        "not_returned": totals.left.map(|left| left.under_way),
        "missing": totals.left.and_then(|left| left.missing),
        "sent_mpps": totals.sent_mpps(),
        "received_mpps": totals.received_mpps(),
        "sent_gbps": gbps(totals.sent_bytes, totals.time),
        "received_gbps": gbps(totals.received_bytes, totals.time),
        "round_trip_ns": { "p50": percentile(0.5), "p99": percentile(0.99), "samples": totals.round_trip.len() },
        "cpu_seconds": cpu_time().as_secs_f64(),
    })
}

pub fn summary(args: &Args, totals: &Totals) {
    let row = |name: &str, frames: u64, mpps: f64, bytes: u64| {
        vec![name.to_owned(), count(frames), format!("{mpps:.3}"), format!("{:.2}", gbps(bytes, totals.time))]
    };
    let rows = [
        row("sent", totals.sent, totals.sent_mpps(), totals.sent_bytes),
        row("received", totals.received, totals.received_mpps(), totals.received_bytes),
    ];
    print!("\n{}", table(&["", "frames", "Mpps", "Gb/s"], &rows));
    if !totals.round_trip.is_empty() {
        let at = |quantile| time(totals.round_trip.value_at_quantile(quantile));
        println!("round trip  p50 {}  p99 {}  ({} frames timed)", at(0.5), at(0.99), count(totals.round_trip.len()));
    }
    if totals.foreign > 0 {
        println!("foreign frames received: {}", count(totals.foreign));
    }
    if totals.reconnects > 0 {
        println!("reconnects to the device: {}", count(totals.reconnects));
    }
    if !totals.recovery.is_empty() {
        let [min, median, max] =
            [totals.recovery.min(), totals.recovery.value_at_quantile(0.5), totals.recovery.max()].map(time);
        println!("from disconnect to the next frame  min {min}  median {median}  max {max}");
    }
    if let Some(left) = totals.left {
        let missing = left.missing.map_or("unknown".into(), |missing| count(missing.into()));
        println!(
            "at the end  {} frames not returned by the device, {missing} buffers lost by it, {} duplicate frames",
            count(left.under_way as u64),
            count(totals.duplicates)
        );
    }
    println!("payload errors {}{}", totals.errors, if args.verify { "" } else { " (--verify checks every byte)" });
}
