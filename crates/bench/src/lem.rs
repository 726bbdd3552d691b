//! An emulated e1000 and its driver (seed 002): what moderated interrupts are worth, and a driver that defers its doorbell. 64-byte
//! frames, as fast as the driver can; each access to a register is a vfio-user message.

mod drive;
mod latency;
mod load;

use crate::{
    figures::{RATIO, Spread, extend},
    options::Common,
    rig::{Device, on},
    session::{Rounds, Session},
};
use drive::drive;
use latency::Lone;
use load::Load;
use ringroad_text::table;
use ringroad_traffic::{
    LemTotals, Settings,
    child::Folder,
    options::{AccessKind, LemOptions, name},
};
use serde_json::json;
use std::fmt;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench lem --json lem.json\n  \
    ringroad bench lem --accesses posted --itr 800 --pairs 9")]
pub struct Args {
    /// How registers are written, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["posted", "synchronous"])]
    accesses: Vec<AccessKind>,
    /// Least interval between interrupts that the driver sets, in units of 256 ns
    #[arg(long, default_value_t = 488)]
    itr: u16,
    /// Number of descriptors of each ring
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(64..=4096))]
    queue_size: u32,
    /// Size of the frames in bytes
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(60..=1518))]
    size: u16,
    /// How long the worker polls before it sleeps (`workers.poll`)
    #[arg(long, default_value = "0")]
    poll: String,
    #[command(flatten)]
    common: Common,
}

/// Who moderates: the rows of the seed's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// The device interrupts for each burst, the driver writes the tail for each frame.
    Standard,
    /// The device keeps to the registers for moderation.
    Mitigated,
    /// The driver defers its tail, too.
    Deferring,
}

const POLICIES: [Policy; 3] = [Policy::Standard, Policy::Mitigated, Policy::Deferring];

impl fmt::Display for Policy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Policy::Standard => "standard device, standard driver",
            Policy::Mitigated => "mitigated device, standard driver",
            Policy::Deferring => "mitigated device, deferring driver",
        })
    }
}

impl Policy {
    /// Returns the rate in the seed, under KVM, over that of the first row: 20, 37 and 200 Kpps.
    fn seed(self) -> f64 {
        match self {
            Policy::Standard => 1.0,
            Policy::Mitigated => 1.85,
            Policy::Deferring => 10.0,
        }
    }
}

/// What one run showed.
#[derive(Clone, Copy)]
struct Run {
    /// Thousands of frames per second.
    rate: f64,
    reads: f64,
    writes: f64,
    interrupts: f64,
}

/// A device without moderation and one with it.
struct Bed<'a> {
    args: &'a Args,
    standard: Device,
    mitigated: Device,
    /// The same two, which send each frame back.
    reflecting: [Device; 2],
    /// A mitigated one that generates frames: at [`load::GIGABIT`], and as fast as the driver takes them.
    generating: [Device; 2],
}

impl<'a> Bed<'a> {
    fn new(args: &'a Args, folder: &Folder) -> Result<Bed<'a>, String> {
        let Common { driver_cpu, device_cpu, .. } = args.common;
        let limited = |name: &str, mitigation: bool, mode: &str, limit: &str| {
            let socket = folder.file(&format!("{name}.sock"));
            // The only port of its switch: the card transmits and counts every frame, and there is nowhere else for it to go.
            let config = format!(
                "[workers]\ncpus = [{device_cpu}]\npoll = \"{}\"\n\
                 [[port]]\nname = \"card\"\nkind = \"e1000\"\nsocket = \"{}\"\nmitigation = {mitigation}\n\
                 mode = \"{mode}\"\n{limit}\n",
                args.poll,
                socket.display()
            );
            // The socket's thread inherits the driver's CPU, which is where a virtual machine's exits are handled.
            on("--driver-cpu", driver_cpu, || Device::ours(folder, name, &config, vec![socket]))
        };
        let device = |name: &str, mitigation, mode: &str| limited(name, mitigation, mode, "");
        let (standard, mitigated) = (device("standard", false, "switch")?, device("mitigated", true, "switch")?);
        let reflecting = [device("reflecting", false, "reflect")?, device("reflecting-mitigated", true, "reflect")?];
        let gigabit = format!("limits = {{ frames = {}, burst = \"1ms\" }}", load::GIGABIT);
        let generating =
            [limited("gigabit", true, "generate", &gigabit)?, limited("generating", true, "generate", "")?];
        Ok(Bed { args, standard, mitigated, reflecting, generating })
    }

    fn measure(&self, policy: Policy, accesses: AccessKind) -> Result<Run, String> {
        let Args { itr, queue_size, size, common, .. } = self.args;
        let device = if policy == Policy::Standard { &self.standard } else { &self.mitigated };
        let options = LemOptions { mit: policy == Policy::Deferring, itr: *itr, accesses, busy: false };
        let what = format!("{policy}, {} writes", name(&accesses));
        let totals = drive((device, common), &what, options, *queue_size, Settings::flood((*size).into()))?;
        let lost = totals.totals.left.map_or(0, |left| left.under_way);
        if totals.totals.sent == 0 || lost > 0 || totals.transmitted != totals.totals.sent {
            let (sent, card) = (totals.totals.sent, totals.transmitted);
            return Err(format!(
                "{what}: {sent} frames were sent and {lost} not returned, but the card has transmitted {card}"
            ));
        }
        Ok(totals.into())
    }
}

impl From<LemTotals> for Run {
    fn from(totals: LemTotals) -> Run {
        let [reads, writes, interrupts] = totals.per_frame();
        Run { rate: totals.totals.sent_mpps() * 1e3, reads, writes, interrupts }
    }
}

/// Measures all rows in turn.
pub fn run(args: &Args) -> Result<(), String> {
    let folder = Folder::new("lem")?;
    let bed = Bed::new(args, &folder)?;
    let mut session = Session::new("lem", &args.common, 2, false);
    let variants: Vec<(AccessKind, Policy)> =
        args.accesses.iter().flat_map(|&accesses| POLICIES.map(|policy| (accesses, policy))).collect();
    let rounds = session.rounds("e1000", &variants, |&(accesses, policy)| bed.measure(policy, accesses))?;
    let mut lines = Vec::new();
    for (index, &(accesses, policy)) in variants.iter().enumerate() {
        let first = index - index % POLICIES.len();
        lines.push(add(args, &mut session, &rounds, (accesses, policy), [first, index])?);
    }
    let Args { size, queue_size, itr, poll, .. } = args;
    let title = format!(
        "e1000, {size} B, ring {queue_size}, ITR {itr}, worker polls for {poll}, thousands of frames per second, {}",
        args.common.runs()
    );
    let header = ["", "tail writes", "Kpps", "", "ratio", "", "reads", "writes", "interrupts"];
    session.print(&title, &format!("{}{NOTE}", table(&header, &lines)));
    let (devices, accesses) = (&bed.reflecting, args.accesses.first().copied().unwrap_or_default());
    let (itr, queue_size, size) = (*itr, *queue_size, *size);
    let lone = Lone { devices, accesses, itr, queue_size, size, poll, common: &args.common };
    latency::run(&lone, &mut session)?;
    load::run(&Load { devices: &bed.generating, accesses, poll, common: &args.common }, &mut session)?;
    session.finish()
}

/// Explains the table.
const NOTE: &str = "\
ratio: to the first row with the same kind of writes; reads, writes, interrupts: per frame, as the driver counts them\n\
standard device: ITR, TIDV and TADV have no effect, it interrupts after each burst of descriptors that it has written back\n\
standard driver: a tail write for each frame, as FreeBSD's lem; for each interrupt a read of ICR, and writes of IMC and IMS\n\
deferring driver: no tail write while an interrupt for sent frames is pending; its handler writes the tail for all that wait\n\
Each access is one vfio-user message, in place of one exit of a virtual machine: posted, the driver only sends it; synchronous, it\n\
waits for the reply. A read always waits. An interrupt is an eventfd, which the driver reads after each access.\n\
The thread of the card's socket is on the driver's CPU, as exits are handled on the guest's; the worker is on the other one.\n\n";

/// Adds the JSON row of a variant; returns its line of the table. `first`: the variant that it is compared with.
fn add(
    args: &Args,
    session: &mut Session<'_>,
    rounds: &Rounds<Run>,
    (accesses, policy): (AccessKind, Policy),
    [first, index]: [usize; 2],
) -> Result<Vec<String>, String> {
    let rates = [first, index].map(|variant| rounds.of(variant, |run| run.rate));
    let [before, after] = rates.each_ref().map(|rates| Spread::of(rates));
    let [before_rates, after_rates] = &rates;
    let ratio = Spread::of_ratios(after_rates, before_rates);
    let each = |figure: fn(&Run) -> f64| rounds.spread(index, figure).median;
    let [reads, writes, interrupts] = [each(|run| run.reads), each(|run| run.writes), each(|run| run.interrupts)];
    let Args { size, queue_size, itr, poll, common, .. } = args;
    let mut row = json!({
        "policy": policy.to_string(), "accesses": name(&accesses), "size": size, "queue_size": queue_size, "itr": itr,
        "poll": poll, "unit": "Kpps", "seed_ratio": policy.seed(), "reads_per_frame": reads, "writes_per_frame": writes,
        "accesses_per_frame": reads + writes, "interrupts_per_frame": interrupts, "pairs": common.pairs,
        "seconds": common.seconds,
    });
    before.add_to(&mut row, ["before", "before_min", "before_max"]);
    after.add_to(&mut row, ["after", "after_min", "after_max"]);
    ratio.add_to(&mut row, RATIO);
    extend(&mut row, json!({ "line_ns": rounds.line().median }));
    session.push(row)?;
    let mut line = vec![policy.to_string(), name(&accesses)];
    line.extend([after.columns(0), ratio.columns(2)].concat());
    line.extend([reads, writes, interrupts].map(|each| format!("{each:.4}")));
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn rows_are_compared_with_the_first_one() {
        let Cli { args } = Cli::parse_from(["bench"]);
        let mut session = Session::new("lem", &args.common, 1, false);
        let run = |rate, writes| Run { rate, reads: 0.5, writes, interrupts: 0.25 };
        let mut figures = vec![vec![run(20.0, 1.0), run(40.0, 1.0)], vec![run(40.0, 1.0), run(60.0, 1.0)]];
        figures.push(vec![run(200.0, 0.01), run(440.0, 0.03)]);
        let rounds = Rounds::new(figures);
        let variant = (AccessKind::Posted, Policy::Deferring);
        let line = add(&args, &mut session, &rounds, variant, [0, 2]).unwrap();
        assert_eq!(line[..4], ["mitigated device, deferring driver", "posted", "320", "200–440"]);
        let row = &session.rows()[0];
        for (key, value) in
            [("before", 30.0), ("after", 320.0), ("ratio", 10.5), ("seed_ratio", 10.0), ("accesses_per_frame", 0.52)]
        {
            assert_eq!(row[key].as_f64(), Some(value), "{key}");
        }
        assert_eq!(
            (&row["policy"], &row["accesses"]),
            (&json!("mitigated device, deferring driver"), &json!("posted"))
        );
    }
}
