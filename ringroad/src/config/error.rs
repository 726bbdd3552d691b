//! What is wrong with a configuration file, and where.

use std::{collections::HashMap, io};
use thiserror::Error;

/// The first error in a file.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read, or is larger than any sensible configuration.
    #[error("{file}: {error}")]
    Read {
        /// The file.
        file: String,
        /// The error of the operating system.
        error: io::Error,
    },
    /// A line is not UTF-8, not TOML, or has an invalid key or value.
    #[error("{file}:{line}: {message}")]
    Line {
        /// The file.
        file: String,
        /// The line, counted from 1.
        line: usize,
        /// Port and key, what was expected and what was found.
        message: String,
    },
}

/// Line numbers of keys, by owner and key, whose values can be valid and still not work on this machine. They are not part of the
/// configuration's value: all places compare equal.
#[derive(Clone, Debug, Default)]
pub struct Places(pub(super) HashMap<(String, String), usize>);

impl PartialEq for Places {
    fn eq(&self, _: &Places) -> bool {
        true
    }
}

impl Eq for Places {}

impl Places {
    /// Returns the line of an owner's key ("port \"vm1\"", "socket"), else that of the owner, else 1.
    pub fn line(&self, owner: &str, key: &str) -> usize {
        let line = |key: &str| self.0.get(&(owner.to_owned(), key.to_owned())).copied();
        line(key).or_else(|| line("")).unwrap_or(1)
    }
}
