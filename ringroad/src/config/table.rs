//! Tables of the file. Serde and toml read them; errors are reported here with their line, their key, what was expected and what
//! was found.

use super::{ConfigError, Places};
use serde::{Deserialize, Deserializer, de, forward_to_deserialize_any};
use std::{cell::Cell, collections::HashMap, ops::Range, rc::Rc};
use toml::{
    Spanned,
    de::{DeString, DeTable, DeValue, ValueDeserializer},
};

/// The file's name and text.
pub(super) struct Source<'a> {
    file: &'a str,
    text: &'a str,
    /// Offsets of the newlines.
    newlines: Vec<usize>,
}

impl<'a> Source<'a> {
    pub(super) fn new(file: &'a str, text: &'a str) -> Source<'a> {
        Source { file, text, newlines: text.match_indices('\n').map(|(at, _)| at).collect() }
    }

    pub(super) fn parse(&self) -> Result<Spanned<DeValue<'a>>, ConfigError> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        // The first by position, not in the parser's order: it reports an unterminated string after its consequences.
        let Some(error) = errors.iter().min_by_key(|error| error.span().map(|span| span.start)) else {
            return Ok(Spanned::new(root.span(), DeValue::Table(root.into_inner())));
        };
        let span = error.span().unwrap_or_default();
        let found = self.text.get(span.clone()).filter(|found| !found.trim().is_empty());
        let found = found.map_or_else(String::new, |found| format!(", found {:?}", shorten(found)));
        Err(self.error(span.start, format!("not valid TOML: {}{found}", error.message().replace('\n', " "))))
    }

    /// Returns a value for a message, as it is written.
    fn describe(&self, value: &Spanned<DeValue>) -> String {
        match value.get_ref() {
            DeValue::Table(_) => "a table".to_owned(),
            DeValue::Array(list) if list.iter().any(|value| value.get_ref().is_table()) => {
                "a list of tables".to_owned()
            }
            _ => shorten(&self.text.get(value.span()).unwrap_or_default().replace('\n', " ")),
        }
    }

    /// Returns the key at `span`, with those of the tables that it is in, and what is there.
    fn locate(&self, value: &Spanned<DeValue>, span: &Range<usize>) -> Option<(String, String)> {
        if value.span() == *span {
            return Some((String::new(), self.describe(value)));
        }
        match value.get_ref() {
            DeValue::Table(table) => table.iter().find_map(|(key, value)| {
                let name = shorten(key.get_ref());
                if key.span() == *span {
                    return Some((name.clone(), name));
                }
                let (inner, found) = self.locate(value, span)?;
                Some((if inner.is_empty() { name } else { format!("{name}.{inner}") }, found))
            }),
            DeValue::Array(list) => list.iter().find_map(|value| self.locate(value, span)),
            _ => None,
        }
    }

    fn error(&self, at: usize, message: String) -> ConfigError {
        ConfigError::Line { file: self.file.to_owned(), line: self.line(at), message }
    }

    /// Returns the line, from 1, of the byte at `at`.
    fn line(&self, at: usize) -> usize {
        1 + self.newlines.partition_point(|&newline| newline < at)
    }
}

/// One table of the file.
pub(super) struct Table<'a> {
    source: &'a Source<'a>,
    /// The port or device that it belongs to, as errors name it; empty if none.
    owner: String,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Table<'a> {
    pub(super) fn root(source: &'a Source<'a>, value: &'a Spanned<DeValue<'a>>) -> Table<'a> {
        Table { source, owner: String::new(), value }
    }

    /// Returns the tables of the list `key`. `name` returns what errors call one; without a name, that is its number.
    pub(super) fn list(
        &self,
        key: &str,
        expected: &str,
        name: impl Fn(&DeTable) -> Option<String>,
    ) -> Result<Vec<Table<'a>>, ConfigError> {
        let Some(list) = self.get(key) else { return Ok(Vec::new()) };
        let tables = list.get_ref().as_array().filter(|list| !list.is_empty()).into_iter().flatten();
        let table = |(index, value): (usize, &'a Spanned<DeValue<'a>>)| {
            let name = name(value.get_ref().as_table()?);
            let owner = format!("{key} {}", name.unwrap_or_else(|| (index + 1).to_string()));
            Some(Table { source: self.source, owner, value })
        };
        let tables: Option<Vec<_>> = tables.enumerate().map(table).collect();
        tables.filter(|tables| !tables.is_empty()).ok_or_else(|| self.wrong(key, expected))
    }

    /// Reads those keys that `T` has.
    pub(super) fn read<T: Deserialize<'a>>(&self) -> Result<T, ConfigError> {
        // serde would take the values of a list as those of the struct's fields.
        if let Some(key) = TABLES.into_iter().find(|key| self.get(key).is_some_and(|value| !value.get_ref().is_table()))
        {
            return Err(self.wrong(key, "a table"));
        }
        T::deserialize(ValueDeserializer::from(self.value.clone())).map_err(|error| {
            let span = error.span().unwrap_or_else(|| self.value.span());
            let (key, found) = self.source.locate(self.value, &span).unwrap_or_default();
            // serde's messages end with "expected …", as those of value.rs do.
            let (before, expected) = error.message().rsplit_once("expected ").unwrap_or_default();
            let message = match expected {
                names if before.starts_with("unknown field") => unknown(
                    key.rsplit('.').next().unwrap_or_default(),
                    &names.split('`').skip(1).step_by(2).collect::<Vec<_>>(),
                ),
                "a boolean" => format!("expected true or false, found {found}"),
                other => format!("expected {other}, found {found}"),
            };
            self.error_at(span.start, &key, message)
        })
    }

    /// Fails if a key is absent.
    pub(super) fn require(&self, key: &str, expected: &str) -> Result<(), ConfigError> {
        let missing = || self.error(key, format!("missing, expected {expected}"));
        self.get(key).map(|_| ()).ok_or_else(missing)
    }

    /// Fails at the first key that is not in `known`; `sub`: of that table within this one.
    pub(super) fn only(&self, sub: Option<&str>, known: &[&str]) -> Result<(), ConfigError> {
        let value = sub.map_or(Some(self.value), |sub| self.get(sub));
        let Some(key) = value.and_then(|value| outside(value, known)) else { return Ok(()) };
        let name = sub.into_iter().chain([&shorten(key.get_ref())[..]]).collect::<Vec<_>>().join(".");
        Err(self.error_at(key.span().start, &name, unknown(key.get_ref(), known)))
    }

    /// Fails at the first key that a port of this kind does not have, but another does. `kinds`: each with its keys.
    pub(super) fn only_of_kind(&self, kind: &str, kinds: &[(&str, &[&str])]) -> Result<(), ConfigError> {
        let known = kinds.iter().find(|(name, _)| *name == kind).map_or(&[][..], |(_, keys)| keys);
        let Some(key) = outside(self.value, known) else { return Ok(()) };
        let has = |keys: &[&str]| keys.contains(&&**key.get_ref());
        let others: Vec<_> = kinds.iter().filter(|(_, keys)| has(keys)).map(|(name, _)| format!("{name:?}")).collect();
        let others = others.join(" and ");
        Err(self.error(
            key.get_ref(),
            format!("only valid for kind {others}, but this port is of kind {kind:?}; remove it"),
        ))
    }

    /// Fails if another table of the file has the same value under a key of this kind.
    pub(super) fn unique(
        &self,
        uses: &mut Uses,
        kind: &'static str,
        key: &str,
        value: impl ToString,
    ) -> Result<(), ConfigError> {
        let Some(found) = self.get(key) else { return Ok(()) };
        let line = self.source.line(found.span().start);
        let Some(first) = uses.insert((kind, value.to_string()), line) else { return Ok(()) };
        Err(self.error(key, format!("duplicate {key} {}, already used in line {first}", self.source.describe(found))))
    }

    /// Notes the lines of the keys.
    pub(super) fn note(&self, places: &mut Places) {
        let mut note = |key: String, at: usize| places.0.insert((self.owner.clone(), key), self.source.line(at));
        note(String::new(), self.value.span().start);
        for (key, value) in self.value.get_ref().as_table().into_iter().flatten() {
            note(key.get_ref().to_string(), value.span().start);
            for (sub, value) in value.get_ref().as_table().into_iter().flatten() {
                note(format!("{}.{}", key.get_ref(), sub.get_ref()), value.span().start);
            }
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> ConfigError {
        let found = self.get(key).map(|value| self.source.describe(value)).unwrap_or_default();
        self.error(key, format!("expected {expected}, found {found}"))
    }

    /// Returns an error about a key: at its value, or at the table if it is absent.
    pub(super) fn error(&self, key: &str, message: impl ToString) -> ConfigError {
        let at = self.get(key).unwrap_or(self.value).span().start;
        self.error_at(at, key, message.to_string())
    }

    fn error_at(&self, at: usize, key: &str, message: String) -> ConfigError {
        let owner = if self.owner.is_empty() { String::new() } else { format!("{}: ", self.owner) };
        self.source.error(at, format!("{owner}key `{}`: {message}", key.escape_debug()))
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.value.get_ref().as_table()?.get(key)
    }
}

/// Keys whose values are tables.
const TABLES: [&str; 8] = ["log", "workers", "switch", "sandbox", "limits", "features", "tuning", "forward"];

/// Values that must be unique, by the kind of key, with the line of their first use.
pub(super) type Uses = HashMap<(&'static str, String), usize>;

/// Returns the first key in the file that is not in `known`.
fn outside<'a>(table: &'a Spanned<DeValue<'a>>, known: &[&str]) -> Option<&'a Spanned<DeString<'a>>> {
    let keys = table.get_ref().as_table()?.keys();
    keys.filter(|key| !known.contains(&key.get_ref().as_ref())).min_by_key(|key| key.span().start)
}

fn unknown(key: &str, known: &[&str]) -> String {
    let near = known.iter().map(|known| (strsim::levenshtein(known, &shorten(key)), known)).min();
    match near.filter(|&(distance, known)| distance <= known.len() / 3) {
        Some((_, near)) => format!("unknown key, did you mean `{near}`?"),
        None => format!("unknown key, expected one of {}", alternatives(known, '`')),
    }
}

/// Returns the keys of a struct: what its `deserialize` asks for.
pub(super) fn keys<T>(deserialize: impl FnOnce(Keys) -> Result<T, de::value::Error>) -> Vec<&'static str> {
    let keys = Rc::default();
    let _ = deserialize(Keys(Rc::clone(&keys)));
    keys.get().to_vec()
}

/// A deserializer that only notes the keys.
pub(super) struct Keys(Rc<Cell<&'static [&'static str]>>);

impl<'de> Deserializer<'de> for Keys {
    type Error = de::value::Error;

    fn deserialize_any<V: de::Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(de::Error::custom("no value"))
    }

    fn deserialize_struct<V: de::Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.set(fields);
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}

/// Cuts a text to what fits into a message.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Joins names: `a`, `b` or `c`.
pub(super) fn alternatives(names: &[&str], quote: char) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("{quote}{name}{quote}")).collect();
    match quoted.split_last() {
        Some((end, rest)) if !rest.is_empty() => format!("{} or {end}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
