//! The process confines itself: whoever takes it over from a guest's side finds little to do with it. `ringroad serve` calls
//! [`confine`] before it starts its first thread, so that all threads have the same and everything is opened, at the start as at
//! a reload, under the same rules.
//!
//! Four parts: no_new_privs; Landlock (landlock.rs) says which files and TCP ports; capabilities go; seccomp (seccomp.rs) says which
//! system calls, with fewer of them for the thread that carries frames. A kernel that lacks one costs that part, which is said.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod landlock;
mod seccomp;

pub(crate) use seccomp::narrow;

use crate::{notes, sys};
use caps::{CapSet, Capability, CapsHashSet};
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

/// What the process is to keep. All else goes.
#[derive(Clone, Debug, Default)]
pub struct Confinement {
    /// Folders where it makes, removes and connects to sockets, and keeps notes of rings if they lie in memory. They need not
    /// exist; one that does not cannot be used later.
    pub folders: Vec<PathBuf>,
    /// Files and folders that it reads.
    pub read: Vec<PathBuf>,
    /// Files that it writes, which exist.
    pub write: Vec<PathBuf>,
    /// TCP ports that it connects to.
    pub tcp: Vec<u16>,
    /// Capabilities that it keeps if it has them.
    pub privileges: Vec<Privilege>,
}

/// A capability that some of what can be configured needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// To make TAP interfaces, and to bring them up.
    NetAdmin,
    /// To give sockets to other users and groups.
    Chown,
    /// To set the permissions of what was given away.
    Fowner,
    /// To use folders and sockets of other users.
    DacOverride,
}

impl Privilege {
    /// All there are.
    pub const ALL: [Privilege; 4] = [Privilege::NetAdmin, Privilege::Chown, Privilege::Fowner, Privilege::DacOverride];

    /// As it is written: `net_admin`.
    pub fn name(self) -> &'static str {
        match self {
            Privilege::NetAdmin => "net_admin",
            Privilege::Chown => "chown",
            Privilege::Fowner => "fowner",
            Privilege::DacOverride => "dac_override",
        }
    }

    fn capability(self) -> Capability {
        match self {
            Privilege::NetAdmin => Capability::CAP_NET_ADMIN,
            Privilege::Chown => Capability::CAP_CHOWN,
            Privilege::Fowner => Capability::CAP_FOWNER,
            Privilege::DacOverride => Capability::CAP_DAC_OVERRIDE,
        }
    }
}

/// Why the process is as it was.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Landlock and capabilities are the calling thread's: the others would keep theirs.
    #[error("expected to be the only thread of the process, found {0}")]
    Threads(usize),
    /// How many threads there are is not known.
    #[error("cannot count the threads of this process: {0}")]
    Proc(io::Error),
}

/// What is in force. As text, a line for the log.
#[derive(Clone, Debug)]
pub struct InForce {
    /// Folders that may be used, by the paths that lead there without links.
    folders: Vec<PathBuf>,
    tcp: Vec<u16>,
    /// Capabilities that were kept, and those that were there before; `None`: they are as they were.
    privileges: Option<(Vec<Privilege>, Vec<Privilege>)>,
    no_new_privileges: bool,
    landlock: landlock::Status,
    /// System calls that are left, and those that the worker has.
    calls: Option<(usize, usize)>,
    /// What is not in force, and why.
    missing: Vec<String>,
}

impl InForce {
    /// What is not in force, and why; nothing, if all is.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Whether sockets can be made in a folder.
    pub fn allows_folder(&self, folder: &Path) -> bool {
        let within = |path: PathBuf| self.folders.iter().any(|allowed| path.starts_with(allowed));
        !self.landlock.files || fs::canonicalize(folder).is_ok_and(within)
    }

    /// Whether a TCP port can be connected to.
    pub fn allows_tcp(&self, port: u16) -> bool {
        // Without a port at the start there are no such sockets at all.
        let sockets = self.calls.is_none() || !self.tcp.is_empty();
        sockets && (!self.landlock.tcp || self.tcp.contains(&port))
    }

    /// Whether it had a capability that it has not any more.
    pub fn has_dropped(&self, privilege: Privilege) -> bool {
        self.privileges.as_ref().is_some_and(|(kept, had)| had.contains(&privilege) && !kept.contains(&privilege))
    }
}

impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some((all, worker)) = self.calls {
            parts.push(format!("seccomp ({all} system calls, the worker {worker})"));
        }
        if self.landlock.files {
            let folders: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
            let folders =
                if folders.is_empty() { "no sockets".to_owned() } else { format!("sockets in {}", folders.join(", ")) };
            let mut text = format!("Landlock {} ({folders}", self.landlock.version);
            if self.landlock.tcp {
                let ports: Vec<_> = self.tcp.iter().map(u16::to_string).collect();
                text += &match ports.is_empty() {
                    true => "; no TCP".to_owned(),
                    false => format!("; TCP ports {}", ports.join(", ")),
                };
            }
            parts.push(text + ")");
        }
        if let Some((kept, _)) = &self.privileges {
            let names: Vec<_> = kept.iter().map(|privilege| privilege.name()).collect();
            parts.push(match names.is_empty() {
                true => "no capabilities".to_owned(),
                false => format!("capabilities {}", names.join(", ")),
            });
        }
        if self.no_new_privileges {
            parts.push("no_new_privs".to_owned());
        }
        if parts.is_empty() {
            parts.push("nothing".to_owned());
        }
        write!(f, "{}", parts.join(", "))
    }
}

/// Confines the process to that, for good. To be called by its first thread, before there is another one.
///
/// # Errors
/// There are other threads; nothing has been done. What the kernel cannot do is no error, see [`InForce::missing`].
pub fn confine(confinement: &Confinement) -> Result<InForce, SandboxError> {
    let threads = fs::read_dir("/proc/self/task").map_err(SandboxError::Proc)?.count();
    if threads != 1 {
        return Err(SandboxError::Threads(threads));
    }
    let mut missing = Vec::new();
    let Confinement { folders, tcp, .. } = confinement;
    // Made now, as it could not be made later.
    let notes = notes::common_folder().ok();
    let mut note = |what: &str, error: &dyn fmt::Display| missing.push(format!("{what}: {error}"));
    let no_new_privileges = sys::no_new_privileges().inspect_err(|error| note("no_new_privs", error)).is_ok();
    let landlock = landlock::restrict(confinement, notes.as_deref(), &mut missing);
    let mut note = |what: &str, error: &dyn fmt::Display| missing.push(format!("{what}: {error}"));
    let privileges =
        drop_capabilities(&confinement.privileges).inspect_err(|error| note("capabilities as they were", error)).ok();
    // The last: it forbids what the others have just done.
    let calls = seccomp::install(!tcp.is_empty()).inspect_err(|error| note("seccomp", error)).ok();
    let mut folders: Vec<_> = folders.iter().filter_map(|folder| fs::canonicalize(folder).ok()).collect();
    folders.sort();
    folders.dedup();
    let mut tcp = tcp.clone();
    tcp.sort_unstable();
    tcp.dedup();
    Ok(InForce { folders, tcp, privileges, no_new_privileges, landlock, calls, missing })
}

/// Drops all capabilities but these, for good; says which of those that have a name here are left, and which there were.
fn drop_capabilities(keep: &[Privilege]) -> Result<(Vec<Privilege>, Vec<Privilege>), caps::errors::CapsError> {
    let had = caps::read(None, CapSet::Permitted)?;
    let named: Vec<_> = Privilege::ALL.into_iter().filter(|privilege| had.contains(&privilege.capability())).collect();
    let kept: Vec<_> = named.iter().copied().filter(|privilege| keep.contains(privilege)).collect();
    let set: CapsHashSet = kept.iter().map(|privilege| privilege.capability()).collect();
    if had.contains(&Capability::CAP_SETPCAP) {
        for capability in caps::read(None, CapSet::Bounding)? {
            caps::drop(None, CapSet::Bounding, capability)?;
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::set(None, CapSet::Effective, &set)?;
    caps::set(None, CapSet::Permitted, &set)?;
    caps::clear(None, CapSet::Inheritable)?;
    Ok((kept, named))
}
