//! Gain of each optimisation of the device: all off, then each one alone, then added one by one.

use crate::{
    figures::{LINE, LINE_NOTE, RATIO, Spread},
    options::Common,
    rig::Rings,
    session::Session,
};
use ringroad_text::table;
use ringroad_traffic::{Settings, Touch, child::Folder, options::Ring};
use serde_json::json;
use std::ops::Range;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ring layout
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    /// Frame size in bytes, without FCS
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: u64,
    /// Leave the payload alone: measures the rings
    #[arg(long)]
    no_touch: bool,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: u32,
    #[command(flatten)]
    common: Common,
}

/// The optimisations in the order in which they are added: name, configuration when off and when on.
const SWITCHES: [(&str, &str, &str); 5] = [
    ("translation_cache", "translation_cache = false", "translation_cache = true"),
    ("small_copy", "small_copy = false", "small_copy = true"),
    ("prefetch", "prefetch = 0, prefetch_write = false", "prefetch = 8, prefetch_write = true"),
    ("shadow_used", "shadow_used = false", "shadow_used = true"),
    ("fast_path", "fast_path = false", "fast_path = true"),
];

/// The gain of all of them together that the original work (the seed) reports.
const SEED: f64 = 1.40;

/// A step: its number, its name, and the optimisations that are on.
type Step = (usize, String, Range<usize>);

/// Returns all steps after the one with all optimisations off, which has number 0.
fn steps() -> Vec<Step> {
    let names = || SWITCHES.iter().map(|(name, ..)| name).enumerate();
    let alone = names().map(|(index, name)| (format!("{name} alone"), index..index + 1));
    let added = names().skip(1).map(|(index, name)| (format!("+ {name}"), 0..index + 1));
    (1..).zip(alone.chain(added)).map(|(number, (name, on))| (number, name, on)).collect()
}

/// Measures every step, each in turn with a run with all optimisations off.
pub fn run(args: &Args) -> Result<(), String> {
    let Args { common, ring, size, no_touch, queue_size } = args;
    let rings = Rings { layout: *ring, size: *queue_size };
    let folder = Folder::new("packed")?;
    let steps = steps();
    let port = |on: &Range<usize>| {
        let switches = SWITCHES.iter().enumerate();
        let all: Vec<_> = switches.map(|(i, &(_, off, is))| if on.contains(&i) { is } else { off }).collect();
        format!("mode = \"reflect\"\ntuning = {{ {} }}", all.join(", "))
    };
    let ports: Vec<String> = [&(0..0)].into_iter().chain(steps.iter().map(|(_, _, on)| on)).map(port).collect();
    let ports: Vec<&str> = ports.iter().map(String::as_str).collect();
    let device = common.ours(&folder, "ours", "unlimited", &ports)?;
    let touch = if *no_touch { Touch::Nothing } else { Touch::Word };
    let settings = Settings { touch, ..Settings::flood(*size as usize) };
    let mut session = Session::new("packed", common, 1, false);
    let rounds = session.rounds(&format!("{} steps", steps.len()), &steps, |&(step, ..)| {
        let rate = |port: usize| Ok::<_, String>(common.run(&device, port, rings, &settings)?.received_mpps());
        Ok([rate(0)?, rate(step)?])
    })?;
    let before = |step: &usize| rounds.of(step - 1, |&[before, _]| before);
    let all_off: Vec<f64> = steps.iter().flat_map(|(step, ..)| before(step)).collect();
    let all_off = Spread::of(&all_off);
    let mut lines = vec![[vec!["all off".to_owned()], all_off.columns(2).to_vec()].concat()];
    for (step, name, on) in &steps {
        let rates = rounds.of(step - 1, |&[_, after]| after);
        let (after, ratio) = (Spread::of(&rates), Spread::of_ratios(&rates, &before(step)));
        let mut row = json!({
            "ring": ring.to_string(), "size": size, "touch": !no_touch, "queue_size": queue_size, "step": name,
            "unit": "Mpps", "before": all_off.median, "after": after.median, "pairs": common.pairs,
            "seed_ratio": (on.len() == SWITCHES.len()).then_some(SEED),
        });
        ratio.add_to(&mut row, RATIO);
        rounds.line().add_to(&mut row, LINE);
        session.push(row)?;
        lines.push([vec![name.clone()], after.columns(2).to_vec(), ratio.columns(2).to_vec()].concat());
    }
    let Common { pairs, seconds, .. } = common;
    let title = format!(
        "{ring} {size} B, Mpps each way through one device core, ring {queue_size}, {pairs} pairs of {seconds} s, median and min–max\n\
         each step in turn with a run with all off; from \"+\" on, one after the other is added; the seed reports {SEED} for all"
    );
    let Spread { median, min, max } = rounds.line();
    let note = format!("{LINE_NOTE}: {median:.0} ns ({min:.0}–{max:.0})\n");
    session.print(&title, &(table(&["", "Mpps", "", "gain", ""], &lines) + &note));
    session.finish()
}
