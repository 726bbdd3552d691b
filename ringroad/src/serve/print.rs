//! The counters of a running daemon, as a table and as JSON.

use crate::report;
use ringroad_frame::Snapshot;
use ringroad_host::PortReport;

/// How much there is.
pub fn summary(ports: usize, vsocks: usize) -> String {
    match (ports, vsocks) {
        (ports, 0) => format!("{ports} ports"),
        (0, vsocks) => format!("{vsocks} vsock devices"),
        (ports, vsocks) => format!("{ports} ports, {vsocks} vsock devices"),
    }
}

/// A port's counters.
pub fn json(report: &PortReport) -> serde_json::Value {
    let side = |snapshot: &Snapshot| {
        let mut side: serde_json::Map<_, _> =
            snapshot.named().map(|(name, value)| (name.into(), value.into())).collect();
        side.insert("dropped".into(), snapshot.dropped().into());
        side
    };
    serde_json::json!({ "name": report.name, "from": side(&report.received), "to": side(&report.sent) })
}

/// Those of all ports.
pub fn table(ports: impl Iterator<Item = PortReport>) -> String {
    let header = [
        "port",
        "from: frames",
        "bytes",
        "lost",
        "to: frames",
        "bytes",
        "dropped: full",
        "oversize",
        "stopped",
        "faults",
        "notified",
        "storm",
        "spoofed",
        "claimed",
        "panics",
    ];
    let rows: Vec<Vec<String>> = ports
        .map(|PortReport { name, received, sent }| {
            let numbers = [
                received.frames,
                received.bytes,
                received.dropped(),
                sent.frames,
                sent.bytes,
                sent.full,
                sent.oversize,
                sent.stopped + sent.busy,
                received.faults + sent.faults,
                received.notifications + sent.notifications,
                received.storm,
                received.spoofed,
                received.claimed,
                received.panics,
            ];
            std::iter::once(name).chain(numbers.into_iter().map(report::count)).collect()
        })
        .collect();
    report::table(&header, &rows)
}
