//! Whether interrupts come at the rate that ITR asks for: a driver that receives what fills a gigabit link, and one that receives as
//! fast as the card can give.

use super::{drive::drive, latency::interval};
use crate::{
    figures::{RATIO, Spread, extend},
    options::Common,
    rig::Device,
    session::{Rounds, Session},
};
use ringroad_text::table;
use ringroad_traffic::{
    Mode, Settings,
    options::{AccessKind, LemOptions, name},
};
use serde_json::json;
use std::fmt;

/// Number of receive descriptors: the default of Linux's driver.
const RING: u32 = 256;
/// Size of the frames in bytes: what a port with `mode = "generate"` sends.
const SIZE: u16 = 64;
/// 20 032, 8005 and 3998 interrupts a second.
const INTERVALS: [u16; 3] = [195, 488, 977];

/// Frames of 64 bytes a second on a link of 1 Gb/s, with frame check sequence, preamble and gap (IEEE 802.3): 84 bytes each.
pub const GIGABIT: u32 = 1_488_095;

/// What comes: each at a device of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offered {
    Gigabit,
    Unlimited,
}

impl fmt::Display for Offered {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Offered::Gigabit => "gigabit",
            Offered::Unlimited => "unlimited",
        })
    }
}

/// What one run showed.
#[derive(Clone, Copy)]
struct Run {
    /// Interrupts per second.
    rate: f64,
    mpps: f64,
}

/// Cards that generate frames, and how they are driven.
pub struct Load<'a> {
    /// One at [`GIGABIT`], and one without limit.
    pub devices: &'a [Device; 2],
    pub accesses: AccessKind,
    pub poll: &'a str,
    pub common: &'a Common,
}

/// A row of the table.
type Variant = (Offered, u16);

/// Measures each interval in turn, and adds the rows.
pub fn run(load: &Load<'_>, session: &mut Session<'_>) -> Result<(), String> {
    let variants: Vec<Variant> = [Offered::Gigabit, Offered::Unlimited]
        .iter()
        .flat_map(|&offered| INTERVALS.map(|itr| (offered, itr)))
        .collect();
    let rounds = session.rounds("e1000 under load", &variants, |&variant| measure(load, variant))?;
    let mut lines = Vec::new();
    for (index, &variant) in variants.iter().enumerate() {
        lines.push(add(load, session, &rounds, index, variant)?);
    }
    let Load { poll, common, .. } = load;
    let title = format!(
        "e1000, interrupts per second while frames of {SIZE} B are received, ring {RING}, worker polls for {poll}, {}",
        common.runs()
    );
    session.print(
        &title,
        &format!("{}{NOTE}", table(&["load", "ITR", "asked for", "had", "", "ratio", "", "Mpps"], &lines)),
    );
    Ok(())
}

/// Explains the table.
const NOTE: &str = "\
ratio: interrupts that the driver had, to those that ITR (in units of 256 ns) asks for\n\
gigabit: as many frames of 64 B as such a link carries; unlimited: as many as the card has room for. Where the card fills the ring\n\
as fast as the driver empties it, the driver goes on receiving, up to 4096 frames, before it unmasks the interrupt: there are fewer.\n\
The driver does not sleep (`ringroad blast --driver lem --busy`), as a guest that has other work to do: it would wake too late.\n\n";

/// Returns how many interrupts a second an interval asks for.
fn asked(itr: u16) -> f64 {
    1e6 / interval(itr)
}

fn measure(load: &Load<'_>, (offered, itr): Variant) -> Result<Run, String> {
    let &Load { devices: [gigabit, unlimited], accesses, common, .. } = load;
    let device = if offered == Offered::Gigabit { gigabit } else { unlimited };
    let options = LemOptions { mit: false, itr, accesses, busy: true };
    let settings = Settings { mode: Mode::Rx, ..Settings::flood(SIZE.into()) };
    let run = drive((device, common), &format!("interrupts at ITR {itr}"), options, RING, settings)?;
    let seconds = run.totals.time.as_secs_f64();
    match run.totals.received {
        0 => Err(format!("interrupts at ITR {itr}: nothing was received")),
        received => Ok(Run { rate: run.interrupts as f64 / seconds, mpps: received as f64 / seconds / 1e6 }),
    }
}

/// Adds the JSON row of an interval; returns its line of the table.
fn add(
    load: &Load<'_>,
    session: &mut Session<'_>,
    rounds: &Rounds<Run>,
    index: usize,
    (offered, itr): Variant,
) -> Result<Vec<String>, String> {
    let (asked, had) = (asked(itr), rounds.spread(index, |run| run.rate));
    let ratio = Spread::of(&rounds.of(index, |run| run.rate / asked));
    let mpps = rounds.spread(index, |run| run.mpps).median;
    let Load { accesses, poll, common, .. } = load;
    let mut row = json!({
        "policy": "mitigated device, receiving driver", "load": offered.to_string(), "itr": itr, "asked": asked,
        "size": SIZE, "queue_size": RING, "poll": poll, "unit": "interrupts/s", "mpps": mpps, "pairs": common.pairs, "seconds": common.seconds,
        "accesses": name(accesses),
    });
    had.add_to(&mut row, ["had", "had_min", "had_max"]);
    ratio.add_to(&mut row, RATIO);
    extend(&mut row, json!({ "line_ns": rounds.line().median }));
    session.push(row)?;
    let mut line = vec![offered.to_string(), itr.to_string(), format!("{asked:.0}")];
    line.extend([had.columns(0), ratio.columns(3)].concat());
    line.push(format!("{mpps:.2}"));
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_compared_with_what_was_asked_for() {
        let common: Common = crate::testing::parse("");
        let device = || Device { name: "ours".into(), sockets: Vec::new(), programs: Vec::new() };
        let load = Load { devices: &[device(), device()], accesses: AccessKind::Posted, poll: "0", common: &common };
        let mut session = Session::new("lem", &common, 1, false);
        let runs = [4006.4, 20032.05, 10016.03].map(|rate| Run { rate, mpps: 1.5 });
        let line = add(&load, &mut session, &Rounds::new(vec![runs.to_vec()]), 0, (Offered::Gigabit, 195)).unwrap();
        assert_eq!(line, ["gigabit", "195", "20032", "10016", "4006–20032", "0.500", "0.200–1.000", "1.50"]);
        let row = &session.rows()[0];
        assert_eq!((row["had"].as_f64(), row["itr"].as_u64()), (Some(10016.03), Some(195)));
        assert!((row["ratio"].as_f64().unwrap() - 0.5).abs() < 1e-6);
    }
}
