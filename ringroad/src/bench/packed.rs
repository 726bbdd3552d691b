//! What each optimisation of the device is worth: all off, then each one alone, then one after the other added.

use super::rig::{Common, Rings, finished, progress};
use crate::{
    Outcome,
    blast::Ring,
    child::Folder,
    report::{Spread, table},
    traffic::{Settings, Touch},
};
use serde_json::json;
use std::process::ExitCode;

/// What each switch of a port's tuning is worth: all off, each alone, one after the other added
#[derive(clap::Args)]
pub struct Args {
    /// The layout of the rings
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    /// Frame size without FCS
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: u64,
    /// Leave the payload alone: the cost of the rings
    #[arg(long)]
    no_touch: bool,
    /// Entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: u32,
    #[command(flatten)]
    common: Common,
}

/// The switches, in the order in which they are added, as the configuration has them: off and on.
const SWITCHES: [(&str, &str, &str); 5] = [
    ("translation_cache", "translation_cache = false", "translation_cache = true"),
    ("small_copy", "small_copy = false", "small_copy = true"),
    ("prefetch", "prefetch = 0, prefetch_write = false", "prefetch = 8, prefetch_write = true"),
    ("shadow_used", "shadow_used = false", "shadow_used = true"),
    ("fast_path", "fast_path = false", "fast_path = true"),
];

/// The gain of all of them together that the seed reports.
const SEED: f64 = 1.40;

/// Measures every step against the one where all is off.
pub fn run(args: Args) -> Outcome {
    let Args { common, ring, queue_size, .. } = &args;
    let rings = Rings { layout: *ring, size: *queue_size };
    let folder = Folder::new("packed")?;
    // Which switches are on at each step; the first one has none.
    let alone = (0..SWITCHES.len()).map(|on| (on..on + 1, format!("{} alone", SWITCHES[on].0)));
    let added = (1..SWITCHES.len()).map(|on| (0..on + 1, format!("+ {}", SWITCHES[on].0)));
    let steps: Vec<_> = [(0..0, "all off".to_owned())].into_iter().chain(alone).chain(added).collect();
    let ports: Vec<String> = steps
        .iter()
        .map(|(on, _)| {
            let switches = SWITCHES.iter().enumerate();
            let all: Vec<&str> = switches.map(|(i, &(_, off, is))| if on.contains(&i) { is } else { off }).collect();
            format!("mode = \"reflect\"\ntuning = {{ {} }}", all.join(", "))
        })
        .collect();
    let ports: Vec<&str> = ports.iter().map(String::as_str).collect();
    let device = common.ours(&folder, "ours", "\"unlimited\"", &ports)?;
    let touch = if args.no_touch { Touch::Nothing } else { Touch::Word };
    let settings = Settings { touch, ..Settings::flood(args.size as usize) };
    let mut figures = vec![Vec::new(); steps.len()];
    let mut ratios = vec![Vec::new(); steps.len()];
    let mut round_trips = Vec::new();
    for pair in 1..=common.pairs {
        round_trips.push(common.line()?);
        for (step, (_, name)) in steps.iter().enumerate().skip(1) {
            progress(&format!("{name} ({step} of {}), pair {pair} of {}", steps.len() - 1, common.pairs));
            let before = common.run(&device, 0, rings, &settings)?.received_mpps();
            let after = common.run(&device, step, rings, &settings)?.received_mpps();
            figures[0].push(before);
            figures[step].push(after);
            ratios[step].push(after / before);
        }
    }
    finished();
    let before = Spread::of(&figures[0]);
    let line = Spread::of(&round_trips);
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    for (step, (on, name)) in steps.iter().enumerate() {
        let (after, ratio) = (Spread::of(&figures[step]), Spread::of(&ratios[step]));
        let mut columns = vec![name.clone()];
        columns.extend(after.columns(2));
        if step > 0 {
            columns.extend(ratio.columns(2));
            let all = on.len() == SWITCHES.len();
            rows.push(json!({
                "ring": ring.name(), "size": args.size, "touch": !args.no_touch, "queue_size": queue_size,
                "step": name, "unit": "Mpps", "before": before.median, "after": after.median, "pairs": common.pairs,
                "ratio": ratio.median, "min": ratio.min, "max": ratio.max,
                "seed_ratio": if all { json!(SEED) } else { json!(null) },
                "line_ns": line.median, "line_ns_min": line.min, "line_ns_max": line.max,
            }));
        }
        lines.push(columns);
    }
    let Common { pairs, seconds, .. } = common;
    println!(
        "{} {} B, Mpps each way through one device core, ring {queue_size}, {pairs} pairs of {seconds} s, median and min–max",
        ring.name(),
        args.size
    );
    println!(
        "each step beside a run with all off; from \"+\" on one after the other is added; the seed's gain of all: {SEED}"
    );
    print!("{}", table(&["", "Mpps", "", "gain", ""], &lines));
    println!("{}: {:.0} ns ({:.0}–{:.0})", super::LINE, line.median, line.min, line.max);
    common.save("packed", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}
