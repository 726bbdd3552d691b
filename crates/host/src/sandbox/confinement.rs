//! What a confined process keeps.

use std::path::PathBuf;

/// What the process keeps. Everything else is dropped.
#[derive(Clone, Debug, Default)]
pub struct Confinement {
    /// Directories where it creates, removes and connects to sockets, and keeps ring notes if they are on a tmpfs. A
    /// directory that does not exist yet is skipped and cannot be used later.
    pub folders: Vec<PathBuf>,
    /// Files and directories that it reads.
    pub read: Vec<PathBuf>,
    /// Existing files that it writes.
    pub write: Vec<PathBuf>,
    /// TCP ports that it connects to.
    pub tcp: Vec<u16>,
    /// Capabilities that it keeps if it has them.
    pub privileges: Vec<Privilege>,
}

/// A capability that part of the configuration needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// To create TAP interfaces and to bring them up.
    NetAdmin,
    /// To give sockets to other users and groups.
    Chown,
    /// To set the mode of a socket after giving it away.
    Fowner,
    /// To use directories and sockets of other users.
    DacOverride,
}
