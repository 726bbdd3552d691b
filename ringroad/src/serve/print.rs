//! The counters of the running daemon as text and JSON. Called by state.rs and vsock.rs.

use crate::config::{Config, Finding, Port};
use ringroad_frame::Snapshot;
use ringroad_host::{PortReport, e1000::Exits};
use std::path::Path;

/// Formats findings as error lines for the user; `None` if there are none.
pub fn explain(file: &Path, findings: &[Finding]) -> Option<String> {
    let lines: Vec<String> = findings.iter().map(|finding| format!("{}:{finding}", file.display())).collect();
    (!lines.is_empty()).then(|| lines.join("\nringroad: "))
}

/// Returns the number of ports and vsock devices as text.
pub fn summary(ports: usize, vsocks: usize) -> String {
    let count = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    match (ports, vsocks) {
        (ports, 0) => count(ports, "port"),
        (0, vsocks) => count(vsocks, "vsock device"),
        (ports, vsocks) => format!("{}, {}", count(ports, "port"), count(vsocks, "vsock device")),
    }
}

/// Returns which ports and devices were added and removed: ` (+vm3, -vm1, +vsock 4)`, or nothing.
pub fn difference(before: &Config, after: &Config) -> String {
    let names = |config: &Config| -> Vec<String> {
        let ports = config.ports.iter().map(|Port { name, .. }| name.clone());
        ports.chain(config.vsocks.iter().map(|vsock| format!("vsock {}", vsock.cid))).collect()
    };
    let (before, after) = (names(before), names(after));
    let added = after.iter().filter(|name| !before.contains(name)).map(|name| format!("+{name}"));
    let removed = before.iter().filter(|name| !after.contains(name)).map(|name| format!("-{name}"));
    let all: Vec<String> = added.chain(removed).collect();
    if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
}

/// Returns a port's counters.
pub fn json(report: &PortReport) -> serde_json::Value {
    let side = |snapshot: &Snapshot| {
        let mut side: serde_json::Map<_, _> =
            snapshot.named().map(|(name, value)| (name.into(), value.into())).collect();
        side.insert("dropped".into(), snapshot.dropped().into());
        side
    };
    let mut port = serde_json::Map::new();
    port.insert("name".into(), report.name.clone().into());
    port.insert("from".into(), side(&report.received).into());
    port.insert("to".into(), side(&report.sent).into());
    if !report.queues.is_empty() {
        let queue = |[received, sent]: &[Snapshot; 2]| serde_json::json!({ "from": side(received), "to": side(sent) });
        port.insert("queues".into(), report.queues.iter().map(queue).collect());
    }
    if let Some(Exits { reads, writes, interrupts }) = report.exits {
        port.insert("exits".into(), serde_json::json!({ "reads": reads, "writes": writes, "interrupts": interrupts }));
    }
    port.into()
}

/// Returns the counters of all ports as tables, and of each queue of those with several. README.md, "Counters", explains the columns.
pub fn tables(ports: impl Iterator<Item = PortReport>) -> String {
    let ports: Vec<_> = ports.collect();
    let exits = |port: &PortReport| {
        let Exits { reads, writes, interrupts } = port.exits?;
        Some((port.name.clone(), vec![reads, writes, interrupts]))
    };
    let exits: Vec<_> = ports.iter().filter_map(exits).collect();
    let mut tables = table(ports.into_iter());
    if !exits.is_empty() {
        tables += &grouped(&[("", &["e1000"]), ("exits", &["reads", "writes", "interrupts"])], exits.into_iter());
    }
    tables
}

fn table(ports: impl Iterator<Item = PortReport>) -> String {
    let groups = [
        ("", &["port"][..]),
        ("from port", &["frames", "bytes"]),
        ("from port, dropped", &["total", "storm", "spoofed", "vlan"]),
        ("to port", &["frames", "bytes"]),
        ("to port, dropped", &["no buffer", "oversize", "not running"]),
        ("events", &["faults", "panics", "claimed", "notified", "filtered"]),
    ];
    let rows = ports.flat_map(|PortReport { name, received, sent, queues, .. }| {
        let queues = queues.into_iter().enumerate();
        let queues: Vec<_> =
            queues.map(|(index, [received, sent])| (format!("{name}:{index}"), received, sent)).collect();
        std::iter::once((name, received, sent)).chain(queues)
    });
    let rows = rows.map(|(name, received, sent)| {
        let numbers = [
            received.frames,
            received.bytes,
            received.dropped(),
            received.storm,
            received.spoofed,
            received.vlan,
            sent.frames,
            sent.bytes,
            sent.full,
            sent.oversize,
            sent.stopped + sent.busy,
            received.faults + sent.faults,
            received.panics,
            received.claimed,
            received.notifications + sent.notifications,
            sent.filtered,
        ];
        (name, numbers.to_vec())
    });
    grouped(&groups, rows)
}

/// Formats a table whose columns are in groups, each with a title above its columns. The first group is that of the row's name.
pub fn grouped(groups: &[(&str, &[&str])], rows: impl Iterator<Item = (String, Vec<u64>)>) -> String {
    let mut header: Vec<&str> = Vec::new();
    for (index, (_, columns)) in groups.iter().enumerate() {
        header.extend((index > 0).then_some(BAR));
        header.extend(*columns);
    }
    let rows: Vec<Vec<String>> = rows
        .map(|(name, numbers)| {
            let mut cells = std::iter::once(name).chain(numbers.into_iter().map(ringroad_text::count));
            let cell = |&column: &&str| if column == BAR { BAR.into() } else { cells.next().unwrap_or_default() };
            header.iter().map(cell).collect()
        })
        .collect();
    let table = ringroad_text::table(&header, &rows);
    let parts = table.lines().next().unwrap_or_default().split(BAR).map(|part| part.chars().count());
    let titles = groups.iter().zip(parts).map(|((title, _), width)| {
        let title = if title.is_empty() { String::new() } else { format!("  {title}") };
        format!("{title:<width$}")
    });
    format!("{}\n{table}", titles.collect::<Vec<_>>().join(BAR).trim_end())
}

/// Separates the groups of a table.
const BAR: &str = "|";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_stand_above_their_columns() {
        let groups = [("", &["port"][..]), ("from port", &["frames", "bytes"]), ("events", &["faults"])];
        let rows = [("vm1".to_owned(), vec![1, 20_000, 3]), ("b".to_owned(), vec![0; 3])];
        let expected = "      |  from port       |  events\n\
                        port  |  frames   bytes  |  faults\n\
                        vm1   |       1  20 000  |       3\n\
                        b     |       0       0  |       0\n";
        assert_eq!(grouped(&groups, rows.into_iter()), expected);
    }

    #[test]
    fn cards_have_a_table_of_their_own() {
        let exits = Some(Exits { reads: 3, writes: 10_000, interrupts: 1 });
        let card = PortReport { name: "old".into(), exits, ..PortReport::default() };
        let other = PortReport { name: "vm1".into(), ..PortReport::default() };
        let text = tables([card.clone(), other.clone()].into_iter());
        let expected = "       |  exits\n\
                        e1000  |  reads  writes  interrupts\n\
                        old    |      3  10 000           1\n";
        assert!(text.ends_with(expected), "{text}");
        assert!(!tables([other.clone()].into_iter()).contains("exits"));
        assert_eq!(json(&card)["exits"], serde_json::json!({ "reads": 3, "writes": 10_000, "interrupts": 1 }));
        assert!(json(&other).get("exits").is_none());
    }

    #[test]
    fn additions_and_removals() {
        let port = |name: &str| format!("[[port]]\nname = {name:?}\nkind = \"tap\"\ninterface = {name:?}\n");
        let vsock = "[[vsock]]\ncid = 4\nsocket = \"/run/v\"\n";
        let parse = |text: String| Config::parse(&text, "rr.toml").unwrap();
        let (before, after) = (parse(port("a") + &port("b")), parse(port("c") + &port("b") + vsock));
        assert_eq!(difference(&before, &after), " (+c, +vsock 4, -a)");
        assert_eq!(difference(&before, &before), "");
        assert_eq!(
            [summary(1, 0), summary(2, 1), summary(0, 2)],
            ["1 port", "2 ports, 1 vsock device", "2 vsock devices"]
        );
    }
}
