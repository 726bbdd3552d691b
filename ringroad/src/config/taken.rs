//! What may be used once in a file, and where keys are.

use super::{
    error::{ConfigError, Places},
    table::{Table, Uses},
};
use std::path::{Path, PathBuf};

/// What the tables that were read so far have in common.
#[derive(Default)]
pub(super) struct Taken {
    pub uses: Uses,
    pub places: Places,
}

impl Taken {
    /// Notes the path of a socket, which no other port or device may have.
    pub(super) fn socket(&mut self, table: &Table, key: &str, path: &Path) -> Result<(), ConfigError> {
        // `/run//1` is `/run/1`.
        let path: PathBuf = path.components().collect();
        table.unique(&mut self.uses, "socket", key, path.display())
    }
}
