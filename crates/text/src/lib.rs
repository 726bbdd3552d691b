//! Numbers and tables as people read them, and the file that output goes to. Used by `serve` for its counters, and by all tools
//! that measure.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

use std::{fmt::Display, path::Path};

/// Formats rows under a header: the first column aligned to the left, the others to the right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |(column, name): (usize, &&str)| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.fold(name.chars().count(), usize::max)
    };
    let widths: Vec<usize> = header.iter().enumerate().map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let rows = rows.iter().map(|row| line(&mut row.iter().map(String::as_str)));
    line(&mut header.iter().copied()) + &rows.collect::<String>()
}

/// Formats a count with groups of three digits.
pub fn count(n: u64) -> String {
    match n {
        0..1000 => n.to_string(),
        _ => format!("{} {:03}", count(n / 1000), n % 1000),
    }
}

/// Formats a time in the unit that suits it.
pub fn time(nanoseconds: u64) -> String {
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.1} µs", nanoseconds as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanoseconds as f64 / 1e6),
        _ => format!("{:.1} s", nanoseconds as f64 / 1e9),
    }
}

/// Writes a value and a newline to a file, or to standard output if the path is `-`; in its alternate form, which indents JSON.
///
/// # Errors
/// A message with the path, if the file cannot be written.
pub fn save(file: &Path, value: &dyn Display) -> Result<(), String> {
    let text = format!("{value:#}\n");
    if file == Path::new("-") {
        print!("{text}");
        return Ok(());
    }
    std::fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures() {
        assert_eq!((count(1_234_567), count(5_000_040)), ("1 234 567".into(), "5 000 040".into()));
        assert_eq!((count(0), count(999), count(1000)), ("0".into(), "999".into(), "1 000".into()));
        assert_eq!((time(999), time(1500), time(2_000_000)), ("999 ns".into(), "1.5 µs".into(), "2.0 ms".into()));
        assert_eq!(table(&["a", "b"], &[vec!["x".into(), "10".into()]]), "a   b\nx  10\n");
    }
}
