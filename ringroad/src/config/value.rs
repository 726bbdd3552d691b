//! How single values of the file are read: for serde's `deserialize_with`. Each error says what was expected; table.rs adds where
//! and what was found. `R` is the field's type: the value's or an `Option` of it.

use super::table::alternatives;
use bitflags::Flags;
use ringroad_host::vhost_user::Role;
use ringroad_switch::Poll;
use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed, MapAccess, Visitor},
};
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

/// Reads a table of features, each `true` or `false`; those without a key are as by default, the `required` ones on, which have none.
pub(super) fn features<'de, D: Deserializer<'de>, F: Flags + Copy + Default>(
    node: D,
    required: F,
) -> Result<F, D::Error> {
    node.deserialize_map(Features(required))
}

#[derive(Clone, Copy)]
struct Features<F>(F);

impl<'de, F: Flags + Copy + Default> Visitor<'de> for Features<F> {
    type Value = F;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<F, A::Error> {
        let mut all = F::default();
        while let Some(feature) = table.next_key_seed(self)? {
            all.set(feature, table.next_value()?);
        }
        Ok(all)
    }
}

impl<'de, F: Flags> DeserializeSeed<'de> for Features<F> {
    type Value = F;

    fn deserialize<D: Deserializer<'de>>(self, node: D) -> Result<F, D::Error> {
        let name = String::deserialize(node)?;
        let optional = F::FLAGS.iter().filter(|flag| !self.0.contains(F::from_bits_retain(flag.value().bits())));
        let names: Vec<String> = optional.map(|flag| flag.name().to_lowercase()).collect();
        let known = names.contains(&name).then(|| F::from_name(&name.to_uppercase())).flatten();
        // As serde's derived code says it.
        known.ok_or_else(|| de::Error::custom(format_args!("unknown field, expected one of `{}`", names.join("`, `"))))
    }
}

pub(super) fn name<'de, D: Deserializer<'de>>(node: D) -> Result<String, D::Error> {
    text(node, NAME, |text| is_name(text).then(|| text.to_owned()))
}

pub(super) fn role<'de, D: Deserializer<'de>>(node: D) -> Result<Role, D::Error> {
    choice(node, &[("server", Role::Server), ("client", Role::Client)])
}

pub(super) fn poll<'de, D: Deserializer<'de>, R: From<Poll>>(node: D) -> Result<R, D::Error> {
    text(node, "\"auto\", \"0\", \"<N>us\", \"<N>ms\" (at most 10 s) or \"unlimited\"", |text| match text {
        "auto" => Some(Poll::Auto),
        "0" => Some(Poll::For(Duration::ZERO)),
        "unlimited" => Some(Poll::Unlimited),
        _ => time(text).filter(|&time| time <= MAX_POLL).map(Poll::For),
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

/// Parses a time in `us` or `ms`.
pub(super) fn time(text: &str) -> Option<Duration> {
    amount(text, "us").map(Duration::from_micros).or(amount(text, "ms").map(Duration::from_millis))
}

pub(super) fn short_time<'de, D: Deserializer<'de>>(node: D) -> Result<Duration, D::Error> {
    text(node, "\"0\", or \"1us\" to \"10ms\"", |text| {
        let time = time(text).or((text == "0").then_some(Duration::ZERO));
        time.filter(|&time| time <= Duration::from_millis(10))
    })
}

/// Parses N from `N<unit>`, digits only.
pub(super) fn amount(text: &str, unit: &str) -> Option<u64> {
    let digits = text.strip_suffix(unit)?;
    // `parse` would accept a sign.
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}
