//! Landlock: the files and TCP ports that the process may use. Called by `confine` in mod.rs. A rule applies to a file, or to
//! a directory and everything below it, not to a path: an object put at the same path later is not allowed.

use super::confinement::Confinement;
use crate::sys;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use std::{
    fs::{self, File},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The newest ABI version considered; what the kernel lacks of it is left out and reported.
const NEWEST: ABI = ABI::V9;

/// What each ABI version added, for the report about an older kernel.
const BROUGHT: [(u32, &str); 5] = [
    (3, "truncation of files (Linux 6.2)"),
    (4, "TCP ports (Linux 6.7)"),
    (5, "ioctl on devices (Linux 6.10)"),
    (6, "signals and abstract sockets (Linux 6.12)"),
    (9, "Unix sockets outside the configured folders (Linux 7.1)"),
];

/// Features up to this ABI version are reported as missing; newer ones are too recent to expect.
const WANTED: u32 = 6;

/// What is in force.
#[derive(Clone, Debug, Default)]
pub(super) struct Status {
    pub version: u32,
    pub files: bool,
    pub tcp: bool,
}

/// Restricts the calling thread and all threads that it starts.
pub(super) fn restrict(confinement: &Confinement, notes: Option<&Path>, missing: &mut Vec<String>) -> Status {
    let status = match try_restrict(confinement, notes) {
        Ok(status) => status,
        Err(error) => {
            missing.push(format!("Landlock: {error}"));
            return Status::default();
        }
    };
    match status.landlock {
        LandlockStatus::NotEnabled => missing.push("Landlock: disabled at boot (kernel parameter lsm=)".to_owned()),
        LandlockStatus::NotImplemented => {
            missing.push("Landlock: not supported by this kernel; it needs Linux 5.13".to_owned())
        }
        LandlockStatus::Available { effective_abi, .. } => {
            let version = effective_abi as u32;
            let lacks = BROUGHT.iter().filter(|(since, _)| (version + 1..=WANTED).contains(since));
            missing.extend(lacks.map(|(_, what)| format!("Landlock ABI {version} does not restrict {what}")));
            return Status { version, files: true, tcp: version >= 4 };
        }
    }
    Status::default()
}

/// Applies all rules that the kernel supports.
fn try_restrict(confinement: &Confinement, notes: Option<&Path>) -> Result<RestrictionStatus, RulesetError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let mut rules = Rules(rules);
    for folder in &confinement.folders {
        rules.folder(folder)?;
    }
    if let Some(notes) = notes {
        rules.path(notes, BitFlags::from(AccessFs::ReadDir) | FILES)?;
    }
    for path in &confinement.read {
        rules.read(path)?;
    }
    for path in &confinement.write {
        // Pipes and unnamed sockets need no rule: whoever has the descriptor may use them.
        if fs::canonicalize(path).is_ok_and(|real| real.exists()) {
            rules.path(path, AccessFs::WriteFile | AccessFs::Truncate)?;
        }
    }
    for path in READ {
        rules.read(Path::new(path))?;
    }
    if let Ok(program) = std::env::current_exe() {
        // For the symbol names in backtraces.
        rules.read(&program)?;
    }
    rules.path(Path::new("/dev/net/tun"), AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev)?;
    rules.own_process()?;
    for &port in &confinement.tcp {
        rules.0 = rules.0.add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
    }
    rules.0.restrict_self()
}

/// Paths read along the way: CPUs and interfaces when a configuration is checked; users and groups by name; the C library's
/// allocator.
const READ: [&str; 6] = [
    "/sys/devices/system/cpu",
    "/sys/devices/virtual/net",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/proc/sys/vm/overcommit_memory",
];

/// Access to notes of rings: regular files in a directory of this process.
const FILES: BitFlags<AccessFs> = landlock::make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | MakeReg | RemoveFile
});
/// Access to sockets: create and connect.
const SOCKETS: BitFlags<AccessFs> = landlock::make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile | ResolveUnix});

struct Rules(RulesetCreated);

impl Rules {
    /// Allows access to a path; one that does not exist cannot be allowed and is skipped.
    fn path(&mut self, path: &Path, access: BitFlags<AccessFs>) -> Result<(), RulesetError> {
        let Ok(fd) = PathFd::new(path) else { return Ok(()) };
        // A file takes only the access rights that apply to files.
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
        (&mut self.0).add_rule(PathBeneath::new(fd, access)).map(|_| ())
    }

    fn read(&mut self, path: &Path) -> Result<(), RulesetError> {
        self.path(path, AccessFs::ReadFile | AccessFs::ReadDir)
    }

    /// Allows a directory of sockets, and files for ring notes in it if it is on a tmpfs.
    fn folder(&mut self, path: &Path) -> Result<(), RulesetError> {
        let in_memory = File::open(path).and_then(|folder| sys::is_tmpfs(folder.as_fd())).unwrap_or(false);
        self.path(path, if in_memory { SOCKETS | FILES } else { SOCKETS })
    }

    /// Allows /proc/self: descriptors and mappings of this process.
    fn own_process(&mut self) -> Result<(), RulesetError> {
        /// Never closed: under memory pressure the kernel may drop the directory's inode and create a new one, to which the
        /// rule does not apply.
        static KEEP: OnceLock<File> = OnceLock::new();
        let path = PathBuf::from("/proc/self");
        if let Ok(folder) = File::open(&path) {
            KEEP.get_or_init(|| folder);
        }
        self.read(&path)
    }
}
