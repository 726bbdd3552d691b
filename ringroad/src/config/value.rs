//! How single values of the file are read: for serde's `deserialize_with`. Each error says what was expected; table.rs adds where
//! and what was found. `R` is the field's type: the value's or an `Option` of it.

use super::table::alternatives;
use ringroad_host::vhost_user::Role;
use ringroad_switch::Poll;
use serde::{Deserialize, Deserializer, de};
use std::{fmt, path::PathBuf, time::Duration};
use toml::Value;

/// What a name must be.
pub(super) const NAME: &str = "1 to 32 letters, digits, `_`, `.` or `-`";
const MAX_POLL: Duration = Duration::from_secs(10);

/// Reads a text that `convert` accepts.
pub(super) fn text<'de, D: Deserializer<'de>, T, R: From<T>>(
    node: D,
    expected: &str,
    convert: impl FnOnce(&str) -> Option<T>,
) -> Result<R, D::Error> {
    let value = String::deserialize(node).ok().and_then(|text| convert(&text));
    value.map(R::from).ok_or_else(|| wrong(expected))
}

/// Reads one of several texts, each of which stands for a value.
pub(super) fn choice<'de, D: Deserializer<'de>, T: Copy, R: From<T>>(
    node: D,
    choices: &[(&str, T)],
) -> Result<R, D::Error> {
    let names: Vec<&str> = choices.iter().map(|&(name, _)| name).collect();
    let convert = |text: &str| choices.iter().find(|(name, _)| *name == text).map(|&(_, value)| value);
    text(node, &alternatives(&names, '"'), convert)
}

/// Reads an integer from `MIN` to `MAX`, which `T` can represent.
pub(super) fn int<'de, const MIN: u64, const MAX: u64, T: TryFrom<u64>, R: From<T>, D: Deserializer<'de>>(
    node: D,
) -> Result<R, D::Error> {
    let number = u64::deserialize(node).ok().filter(|number| (MIN..=MAX).contains(number));
    number.and_then(|number| number.try_into().ok()).map(R::from).ok_or_else(|| wrong(format_args!("{MIN} to {MAX}")))
}

/// Reads a list of elements that `convert` accepts.
pub(super) fn list<'de, D: Deserializer<'de>, T>(
    node: D,
    expected: &str,
    convert: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<T>, D::Error> {
    let list = Vec::<Value>::deserialize(node).map_err(|_| wrong(expected))?;
    list.iter().map(convert).collect::<Option<_>>().ok_or_else(|| wrong(expected))
}

/// Returns an error about a value; table.rs adds what was found.
pub(super) fn wrong<E: de::Error>(expected: impl fmt::Display) -> E {
    E::custom(format_args!("expected {expected}"))
}

pub(super) fn name<'de, D: Deserializer<'de>>(node: D) -> Result<String, D::Error> {
    text(node, NAME, |text| is_name(text).then(|| text.to_owned()))
}

pub(super) fn role<'de, D: Deserializer<'de>>(node: D) -> Result<Role, D::Error> {
    choice(node, &[("server", Role::Server), ("client", Role::Client)])
}

pub(super) fn poll<'de, D: Deserializer<'de>, R: From<Poll>>(node: D) -> Result<R, D::Error> {
    text(node, "\"0\", \"<N>us\", \"<N>ms\" (at most 10 s) or \"unlimited\"", |text| match text {
        "0" => Some(Poll::For(Duration::ZERO)),
        "unlimited" => Some(Poll::Unlimited),
        _ => {
            let time = amount(text, "us").map(Duration::from_micros);
            time.or(amount(text, "ms").map(Duration::from_millis)).filter(|&time| time <= MAX_POLL).map(Poll::For)
        }
    })
}

/// Reads the path of a Unix socket.
pub(super) fn socket<'de, const MAX: usize, D: Deserializer<'de>, R: From<PathBuf>>(node: D) -> Result<R, D::Error> {
    text(node, &socket_path(MAX), |text| {
        ((1..=MAX).contains(&text.len()) && !text.contains('\0')).then(|| PathBuf::from(text))
    })
}

/// Returns what the path of a Unix socket must be.
pub(super) fn socket_path(max: usize) -> String {
    format!("the path of a Unix socket, 1 to {max} bytes")
}

pub(super) fn is_name(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=32).contains(&text.len()) && text.bytes().all(good)
}

/// Parses N from `N<unit>`, digits only.
pub(super) fn amount(text: &str, unit: &str) -> Option<u64> {
    let digits = text.strip_suffix(unit)?;
    // `parse` would accept a sign.
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}
