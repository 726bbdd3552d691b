//! `port.mirror`: where a port's frames are copied to.

use super::{error::ConfigError, table::Table, value};
use ringroad_host::CaptureConfig;
use ringroad_switch::Direction;
use serde::{Deserialize, Deserializer};
use std::path::Path;
use toml::Value;

/// Where a port's frames are copied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The name of the port that gets copies, and has no other traffic.
    pub port: Option<String>,
    /// The file that they are written to.
    pub capture: Option<CaptureConfig>,
    /// Which frames are copied.
    pub frames: Vec<Direction>,
}

const EXPECTED: &str = "the name of a port, or a table of `port` (a name) or `file` (a path), or both; `frames` (\"from\", \"to\" or \
                        \"both\"); with `file` also `snap` (64 to 262144 bytes of each frame) and `size` (at least 65536 bytes)";

/// Reads the key's value.
pub(super) fn mirror<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Mirror>, D::Error> {
    let value = Value::deserialize(node).ok();
    value.and_then(read).map(Some).ok_or_else(|| value::wrong(EXPECTED))
}

fn read(value: Value) -> Option<Mirror> {
    let both = vec![Direction::From, Direction::To];
    let table = match value {
        Value::String(port) if value::is_name(&port) => {
            return Some(Mirror { port: Some(port), capture: None, frames: both });
        }
        Value::Table(table) => table,
        _ => return None,
    };
    let (mut mirror, mut capture) = (Mirror { port: None, capture: None, frames: both }, CaptureConfig::default());
    for (key, value) in &table {
        let integer = || value.as_integer().and_then(|integer| u64::try_from(integer).ok());
        match (key.as_str(), value.as_str()) {
            ("port", Some(name)) if value::is_name(name) => mirror.port = Some(name.to_owned()),
            ("file", Some(file)) if !file.is_empty() && !file.contains('\0') => capture.file = file.into(),
            ("frames", Some("both")) => {}
            ("frames", Some("from")) => mirror.frames = vec![Direction::From],
            ("frames", Some("to")) => mirror.frames = vec![Direction::To],
            ("snap", None) => capture.snap = integer().filter(|snap| (64..=1 << 18).contains(snap))?.try_into().ok()?,
            ("size", None) => capture.size = integer().filter(|&size| size >= 1 << 16)?,
            _ => return None,
        }
    }
    if table.contains_key("file") {
        mirror.capture = Some(capture);
    } else if mirror.port.is_none() || table.contains_key("snap") || table.contains_key("size") {
        return None;
    }
    Some(mirror)
}

/// Checks that the other port exists and is not mirrored itself, and that no other port is captured in the same file. `all`: the
/// names of all ports, and their mirrors.
pub(super) fn check(
    table: &Table,
    name: &str,
    mirror: &Mirror,
    all: &[(&str, Option<&Mirror>)],
) -> Result<(), ConfigError> {
    let file = |mirror: &Mirror| mirror.capture.as_ref().map(|capture| capture.file.clone());
    let same = |other: &Mirror| file(other).is_some() && file(other) == file(mirror);
    if let Some((other, _)) = all.iter().find(|(other, mirror)| *other != name && mirror.is_some_and(same)) {
        return Err(table.error("mirror", format!("expected a file of its own, found that of port {other:?}")));
    }
    let Some(port) = &mirror.port else { return Ok(()) };
    let wrong = |message: &str| Err(table.error("mirror", format!("{message}, found {port:?}")));
    match all.iter().find(|(other, _)| other == port) {
        None => wrong("expected the name of a port in this file"),
        Some((other, _)) if *other == name => wrong("expected another port"),
        Some((_, Some(_))) => wrong("expected a port without key `mirror`"),
        Some(_) => Ok(()),
    }
}

/// Checks that the file can probably be written, without creating it.
pub(super) fn can_be_written(file: &Path) -> Result<(), String> {
    let place = file.parent().filter(|place| !place.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = file.display();
    let wrong = |error: std::io::Error| format!("cannot write {shown}: {error}; choose another file");
    match file.metadata() {
        Ok(found) if !found.is_file() => {
            Err(format!("expected a regular file, but {shown} is not one; remove it or choose another"))
        }
        Ok(_) => Ok(()),
        Err(_) if !place.is_dir() => {
            Err(format!("directory {} does not exist; create it or choose another", place.display()))
        }
        Err(_) => ringroad_host::is_writable(place).map_err(wrong),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn parse(mirror: &str) -> Result<Option<Mirror>, String> {
        let port = |name: &str, rest: &str| {
            format!("[[port]]\nname = \"{name}\"\nkind = \"tap\"\ninterface = \"{name}\"\n{rest}\n")
        };
        let text = port("a", mirror) + &port("b", "") + &port("c", "mirror = { port = \"b\", file = \"/c\" }");
        let config = Config::parse(&text, "rr.toml").map_err(|error| error.to_string())?;
        Ok(config.ports[0].mirror.clone())
    }

    #[test]
    fn forms() {
        let (from, to) = (Direction::From, Direction::To);
        let some =
            |frames: &[Direction]| Ok(Some(Mirror { port: Some("b".into()), capture: None, frames: frames.to_vec() }));
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("mirror = \"b\""), some(&[from, to]));
        assert_eq!(parse("mirror = { port = \"b\" }"), some(&[from, to]));
        assert_eq!(parse("mirror = { port = \"b\", frames = \"both\" }"), some(&[from, to]));
        assert_eq!(parse("mirror = { port = \"b\", frames = \"from\" }"), some(&[from]));
        assert_eq!(parse("mirror = { port = \"b\", frames = \"to\" }"), some(&[to]));
        let capture = CaptureConfig { file: "/x".into(), ..CaptureConfig::default() };
        let file = |port: Option<&str>, capture: CaptureConfig| {
            Ok(Some(Mirror { port: port.map(str::to_owned), capture: Some(capture), frames: vec![from, to] }))
        };
        assert_eq!(parse("mirror = { file = \"/x\" }"), file(None, capture.clone()));
        assert_eq!(parse("mirror = { file = \"/x\", port = \"b\" }"), file(Some("b"), capture.clone()));
        let short = CaptureConfig { snap: 64, size: 65536, ..capture };
        assert_eq!(parse("mirror = { file = \"/x\", snap = 64, size = 65536 }"), file(None, short));
    }

    #[test]
    fn invalid_values() {
        for (mirror, expected) in [
            ("5", EXPECTED),
            ("\"a b\"", EXPECTED),
            ("{}", EXPECTED),
            ("{ port = \"b\", frames = \"all\" }", EXPECTED),
            ("{ port = \"b\", frames = 1 }", EXPECTED),
            ("{ port = \"b\", frame = \"to\" }", EXPECTED),
            ("{ port = \"b\", snap = 64 }", EXPECTED),
            ("{ file = \"\" }", EXPECTED),
            ("{ file = \"/x\", snap = 63 }", EXPECTED),
            ("{ file = \"/x\", snap = 262145 }", EXPECTED),
            ("{ file = \"/x\", size = 65535 }", EXPECTED),
            ("{ file = \"/x\", size = -1 }", EXPECTED),
            ("\"d\"", "the name of a port in this file, found \"d\""),
            ("\"a\"", "another port, found \"a\""),
            ("\"c\"", "a port without key `mirror`, found \"c\""),
            ("{ file = \"/c\" }", "a file of its own, found that of port \"c\""),
        ] {
            let found = parse(&format!("mirror = {mirror}")).unwrap_err();
            let start = format!("rr.toml:5: port \"a\": key `mirror`: expected {expected}");
            assert!(found.starts_with(&start) && found.len() < 600, "{mirror}\n{found}");
        }
    }

    #[test]
    fn files_that_can_be_written() {
        for (file, can) in [("/etc/hostname/x", false), ("/dev/null", false), ("/", false), ("/nonexistent/x", false)] {
            assert_eq!(can_be_written(Path::new(file)).is_ok(), can, "{file}");
        }
        let file = std::env::temp_dir().join(format!("ringroad-mirror-{}", std::process::id()));
        assert_eq!(can_be_written(&file), Ok(()));
        std::fs::write(&file, "").unwrap();
        assert_eq!(can_be_written(&file), Ok(()));
        std::fs::remove_file(file).unwrap();
    }
}
