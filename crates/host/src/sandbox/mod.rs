//! The sandbox: limits what an attacker who takes over the process from a guest can do. `ringroad serve` calls [`confine`]
//! before it starts its first thread, so that the same rules hold for all threads, at start-up and for every reload.
//!
//! Four layers: no_new_privs; Landlock (landlock.rs) for files and TCP ports; dropped capabilities; seccomp (seccomp.rs) for
//! system calls, with fewer of them for the thread that forwards frames. A layer that the kernel lacks is skipped and
//! reported.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod confinement;
mod landlock;
mod seccomp;

pub(crate) use seccomp::narrow;

pub use confinement::{Confinement, Privilege};

use crate::{notes, sys};
use caps::{CapSet, Capability, CapsHashSet};
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

impl Privilege {
    /// All of them.
    pub const ALL: [Privilege; 4] = [Privilege::NetAdmin, Privilege::Chown, Privilege::Fowner, Privilege::DacOverride];

    /// Returns its name in the configuration, such as `net_admin`.
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

/// Why the process was not confined.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// Landlock and capabilities apply to the calling thread: other threads would stay unconfined.
    #[error("expected one thread in the process before it is confined, found {0}")]
    Threads(usize),
    /// The threads of the process cannot be counted.
    #[error("cannot count the threads of this process in /proc/self/task: {0}")]
    Proc(io::Error),
}

/// What is in force. Displayed, it is one log line.
#[derive(Clone, Debug)]
pub struct InForce {
    /// Directories that may be used, as canonical paths.
    folders: Vec<PathBuf>,
    /// Files that may be written, as canonical paths.
    files: Vec<PathBuf>,
    tcp: Vec<u16>,
    /// Capabilities that were kept, and those before; `None`: unchanged.
    privileges: Option<(Vec<Privilege>, Vec<Privilege>)>,
    no_new_privileges: bool,
    landlock: landlock::Status,
    /// The numbers of system calls allowed to the process and to the worker.
    calls: Option<(usize, usize)>,
    /// What is not in force, and why.
    missing: Vec<String>,
}

impl InForce {
    /// Returns what is not in force, and why; empty if everything is.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Returns whether sockets can be created in a directory.
    pub fn allows_folder(&self, folder: &Path) -> bool {
        let within = |path: PathBuf| self.folders.iter().any(|allowed| path.starts_with(allowed));
        !self.landlock.files || fs::canonicalize(folder).is_ok_and(within)
    }

    /// Returns whether a file can be written.
    pub fn allows_file(&self, file: &Path) -> bool {
        !self.landlock.files || fs::canonicalize(file).is_ok_and(|file| self.files.contains(&file))
    }

    /// Returns whether a TCP port can be connected to.
    pub fn allows_tcp(&self, port: u16) -> bool {
        // If no port was configured at start-up, seccomp forbids TCP sockets altogether.
        let sockets = self.calls.is_none() || !self.tcp.is_empty();
        sockets && (!self.landlock.tcp || self.tcp.contains(&port))
    }

    /// Returns whether the process has dropped a capability that it had.
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

/// Confines the process irrevocably. Must be called by its first thread, before it starts another one.
///
/// # Errors
/// There are other threads; nothing was changed. A layer that the kernel lacks is no error, see [`InForce::missing`].
pub fn confine(confinement: &Confinement) -> Result<InForce, SandboxError> {
    let threads = fs::read_dir("/proc/self/task").map_err(SandboxError::Proc)?.count();
    if threads != 1 {
        return Err(SandboxError::Threads(threads));
    }
    let mut missing = Vec::new();
    let Confinement { folders, write, tcp, .. } = confinement;
    // Created now, as it cannot be created under the rules.
    let notes = notes::common_folder().ok();
    let mut note = |what: &str, error: &dyn fmt::Display| missing.push(format!("{what}: {error}"));
    let no_new_privileges = sys::no_new_privileges().inspect_err(|error| note("no_new_privs", error)).is_ok();
    let landlock = landlock::restrict(confinement, notes.as_deref(), &mut missing);
    let mut note = |what: &str, error: &dyn fmt::Display| missing.push(format!("{what}: {error}"));
    let privileges =
        drop_capabilities(&confinement.privileges).inspect_err(|error| note("capabilities not dropped", error)).ok();
    // Last, as it forbids the calls made above.
    let calls = seccomp::install(!tcp.is_empty()).inspect_err(|error| note("seccomp", error)).ok();
    let mut folders: Vec<_> = folders.iter().filter_map(|folder| fs::canonicalize(folder).ok()).collect();
    folders.sort();
    folders.dedup();
    let mut tcp = tcp.clone();
    tcp.sort_unstable();
    tcp.dedup();
    let files = write.iter().filter_map(|file| fs::canonicalize(file).ok()).collect();
    Ok(InForce { folders, files, tcp, privileges, no_new_privileges, landlock, calls, missing })
}

/// Drops all capabilities except `keep`, irrevocably. Returns which of [`Privilege::ALL`] are left, and which there were.
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
