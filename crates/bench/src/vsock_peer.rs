//! Our vsock device against rust-vmm's, with the same driver (ours) and the same program of the host behind Unix sockets. Guest
//! to guest, our device connects two guests ring to ring: against a relay program of the host, and rust-vmm's sibling groups.

mod args;
mod devices;
mod measure;

use crate::{
    figures::{RATIO, Spread, extend},
    options::Common,
    session::{Rounds, Session},
};
pub use args::Args;
use args::Polling;
use devices::{ECHO, GUEST, PEER_RECEIVE, RELAY, SIBLING, SINK, Vsock};
use measure::Figure;
use ringroad_text::table;
use ringroad_traffic::{child::Folder, options::pin, vsock::RECEIVE};
use ringroad_vsock::Addr;
use serde_json::{Value, json};
use std::cell::RefCell;

/// A device, and where the guest's program connects to.
type Way<'a> = (&'a Vsock, Addr);

/// What is measured.
struct Case {
    name: String,
    unit: &'static str,
    fields: Value,
}

impl Args {
    /// Returns the case of a stream in a direction.
    fn stream(&self, direction: &str) -> Case {
        let fields = json!({ "direction": direction, "size": self.write });
        Case { name: format!("stream {direction}"), unit: "Gb/s", fields }
    }
}

/// The cases of one setting: their rows, and the lines of its table.
struct Group<'a, 's> {
    args: &'a Args,
    polling: &'a Polling,
    session: &'a mut Session<'s>,
    lines: Vec<Vec<String>>,
}

impl Group<'_, '_> {
    /// Measures all cases on our device, and on the peer's if there is one.
    fn run(&mut self, ours: &Vsock, peer: Option<&Vsock>) -> Result<(), String> {
        let args = self.args;
        let other = peer.map_or("", |peer| &peer.device.name);
        let devices = |port: u32| -> Vec<Way<'_>> {
            [ours].into_iter().chain(peer).map(|vsock| (vsock, Addr { cid: 2, port })).collect()
        };
        for &size in &args.size {
            let fields = json!({ "direction": "there-and-back", "size": size });
            let case = Case { name: format!("round trip {size} B"), unit: "us", fields };
            self.compare(&case, &devices(ECHO), other, |&(vsock, to)| args.round_trip(vsock, to, size))?;
        }
        self.compare(&args.stream("to-host"), &devices(SINK), other, |&(vsock, to)| args.to_host(vsock, to))?;
        self.compare(&args.stream("to-guest"), &devices(GUEST), other, |&(vsock, _)| args.to_guest(vsock))?;
        let (mut case, direct) = (args.stream("to-sibling"), Addr { cid: SIBLING, port: GUEST });
        let one = |&(vsock, to): &Way<'_>| args.to_sibling(vsock, to);
        let relay = (ours, Addr { cid: 2, port: RELAY });
        self.compare(&case, &[(ours, direct), relay], "a program between Unix sockets", one)?;
        match peer {
            Some(peer) => {
                extend(&mut case.fields, json!({ "receive": RECEIVE, "peer_receive": PEER_RECEIVE }));
                self.compare(&case, &[(ours, direct), (peer, direct)], &format!("{other}, sibling groups"), one)
            }
            None => Ok(()),
        }
    }

    /// Measures a case in two ways, ours and that of `other`, or in ours alone. If rust-vmm's device fails, for example because
    /// it loses the connection, the row is skipped with its error as the reason.
    fn compare(
        &mut self,
        case: &Case,
        ways: &[Way<'_>],
        other: &str,
        one: impl Fn(&Way<'_>) -> Result<Figure, String>,
    ) -> Result<(), String> {
        let (name, failure) = (format!("{}, {}", self.polling, case.name), RefCell::new(None));
        let rounds = self.session.rounds(&name, ways, |way| {
            one(way).inspect_err(|error| {
                if way.0.is_peer {
                    failure.replace(Some(error.clone()));
                }
            })
        });
        if let Some(reason) = failure.into_inner() {
            let mut row = self.row(case);
            extend(&mut row, json!({ "peer_name": other }));
            return self.session.skip(&format!("{name}, {other}"), row, &reason);
        }
        let (row, columns) = self.results(case, other, &rounds?);
        self.lines.push(columns);
        self.session.push(row)
    }

    /// Returns the part of a case's row that does not depend on results.
    fn row(&self, case: &Case) -> Value {
        let Polling { poll, device_poll } = self.polling;
        let mut row = json!({ "unit": case.unit, "poll": poll, "device_poll": device_poll });
        extend(&mut row, case.fields.clone());
        row
    }

    /// Returns a case's row and its line of the table.
    fn results(&self, case: &Case, other: &str, rounds: &Rounds<Figure>) -> (Value, Vec<String>) {
        let [ours, theirs] = [0, 1].map(|way| rounds.of(way, |figure| figure.value));
        let [ring, peer_ring] = [0, 1].map(|way| rounds.first(way).map(|figure| figure.ring.to_string()));
        let (mine, ring) = (Spread::of(&ours), ring.unwrap_or_default());
        let mut row = self.row(case);
        let fields = json!({ "pairs": ours.len(), "ring": ring, "line_ns": rounds.line().median });
        extend(&mut row, fields);
        mine.add_to(&mut row, ["ours", "ours_min", "ours_max"]);
        let mut columns = vec![format!("{}, {}", case.name, case.unit)];
        columns.extend(mine.columns(1));
        if let Some(peer_ring) = peer_ring {
            // A ratio above 1 is a gain, of times, too.
            let (above, below) = if case.unit == "us" { (&theirs, &ours) } else { (&ours, &theirs) };
            let (peer, ratio) = (Spread::of(&theirs), Spread::of_ratios(above, below));
            extend(&mut row, json!({ "peer": peer.median, "peer_name": other, "peer_ring": peer_ring }));
            ratio.add_to(&mut row, RATIO);
            columns.extend([peer.columns(1), ratio.columns(2)].concat());
            columns.push(if ring == peer_ring { ring } else { format!("{ring} / {peer_ring}") });
            columns.push(other.to_owned());
        }
        (row, columns)
    }
}

/// Measures all cases with each setting.
pub fn run(args: &Args) -> Result<(), String> {
    let (common, pollings) = (&args.common, args.pollings()?);
    // The guest has a CPU to itself. Devices and programs of the host share the other one, which threads inherit.
    pin("--device-cpu", common.device_cpu)?;
    let cases = args.size.len() + 3 + usize::from(!args.alone);
    let mut session = Session::new("vsock-peer", common, pollings.len() * cases, false);
    let found = args.find(&mut session)?;
    for polling in &pollings {
        let folder = Folder::new("vsock")?;
        let ours = args.ours(&folder, polling)?;
        let peer = found.as_ref().map(|peer| args.peer(&folder, peer, polling)).transpose()?;
        let mut group = Group { args, polling, session: &mut session, lines: Vec::new() };
        group.run(&ours, peer.as_ref())?;
        let lines = group.lines;
        let Common { driver_cpu, device_cpu, pairs, seconds, .. } = common;
        let title = format!(
            "vsock, {polling}: our driver on CPU {driver_cpu}, devices and the host's programs on CPU {device_cpu}, \
             {pairs} pairs of {seconds} s, median and min–max"
        );
        let table = table(&["", "ours", "", "peer", "", "ratio", "", "rings", ""], &lines);
        session.print(&title, &format!("{table}{NOTES}\n\n"));
    }
    session.finish()
}

/// Notes under each table.
const NOTES: &str = "rings: the negotiated layout; with ours / with the peer, if they differ\n\
    sibling groups: the driver's receive buffers have 64 KiB instead of 16, because the peer loses packets that do not fit";

#[cfg(test)]
mod tests;
