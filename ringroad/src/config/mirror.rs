//! `port.mirror`: where a port's frames are copied to.

use super::{error::ConfigError, table::Table, value};
use ringroad_switch::Direction;
use serde::{Deserialize, Deserializer};
use toml::Value;

/// Where a port's frames are copied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The name of the port that gets copies, and has no other traffic.
    pub port: String,
    /// Which frames are copied.
    pub frames: Vec<Direction>,
}

const EXPECTED: &str = "the name of a port, or { port = \"NAME\", frames = \"from\", \"to\" or \"both\" }";

/// Reads the key's value.
pub(super) fn mirror<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Mirror>, D::Error> {
    let value = Value::deserialize(node).ok();
    value.and_then(read).map(Some).ok_or_else(|| value::wrong(EXPECTED))
}

fn read(value: Value) -> Option<Mirror> {
    let both = || vec![Direction::From, Direction::To];
    let name = |value: &Value| value.as_str().filter(|name| value::is_name(name)).map(str::to_owned);
    let Value::Table(table) = &value else { return Some(Mirror { port: name(&value)?, frames: both() }) };
    let frames = match table.get("frames").map(Value::as_str) {
        None | Some(Some("both")) => both(),
        Some(Some("from")) => vec![Direction::From],
        Some(Some("to")) => vec![Direction::To],
        _ => return None,
    };
    let known = table.keys().all(|key| ["port", "frames"].contains(&key.as_str()));
    known.then_some(Mirror { port: name(table.get("port")?)?, frames })
}

/// Checks that the other port exists and is not mirrored itself. `ports`: the names of all ports, and whether they are mirrored.
pub(super) fn check(table: &Table, name: &str, mirror: &Mirror, ports: &[(&str, bool)]) -> Result<(), ConfigError> {
    let wrong = |message: &str| Err(table.error("mirror", format!("{message}, found {:?}", mirror.port)));
    match ports.iter().find(|(other, _)| *other == mirror.port) {
        None => wrong("expected the name of a port in this file"),
        Some((other, _)) if *other == name => wrong("expected another port"),
        Some((_, true)) => wrong("expected a port without key `mirror`"),
        Some(_) => Ok(()),
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
        let text = port("a", mirror) + &port("b", "") + &port("c", "mirror = \"b\"");
        let config = Config::parse(&text, "rr.toml").map_err(|error| error.to_string())?;
        Ok(config.ports[0].mirror.clone())
    }

    #[test]
    fn both_forms() {
        let (from, to) = (Direction::From, Direction::To);
        let some = |frames: &[Direction]| Ok(Some(Mirror { port: "b".into(), frames: frames.to_vec() }));
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("mirror = \"b\""), some(&[from, to]));
        assert_eq!(parse("mirror = { port = \"b\" }"), some(&[from, to]));
        assert_eq!(parse("mirror = { port = \"b\", frames = \"both\" }"), some(&[from, to]));
        assert_eq!(parse("mirror = { port = \"b\", frames = \"from\" }"), some(&[from]));
        assert_eq!(parse("mirror = { port = \"b\", frames = \"to\" }"), some(&[to]));
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
            ("\"d\"", "the name of a port in this file, found \"d\""),
            ("\"a\"", "another port, found \"a\""),
            ("\"c\"", "a port without key `mirror`, found \"c\""),
        ] {
            let found = parse(&format!("mirror = {mirror}")).unwrap_err();
            let start = format!("rr.toml:5: port \"a\": key `mirror`: expected {expected}");
            assert!(found.starts_with(&start), "{mirror}\n{found}");
        }
    }
}
