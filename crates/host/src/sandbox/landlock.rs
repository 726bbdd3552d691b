//! Which files and TCP ports the process may use. A rule belongs to a file or a folder itself, with all below it, not to its path:
//! what is put in its place later is not allowed.

use super::Confinement;
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

/// The newest version that was looked at; what the kernel does not know of it is left out, and said.
const NEWEST: ABI = ABI::V9;

/// What each version of the kernel's brought, by number, for those who have an older one.
const BROUGHT: [(u32, &str); 5] = [
    (3, "truncation of files (Linux 6.2)"),
    (4, "TCP ports (Linux 6.7)"),
    (5, "ioctl on devices (Linux 6.10)"),
    (6, "signals and abstract sockets (Linux 6.12)"),
    (9, "sockets outside its folders (Linux 7.1)"),
];

/// The versions up to this one are what `missing` counts: the newer ones are too new for most.
const WANTED: u32 = 6;

/// How much of it there is.
#[derive(Clone, Debug, Default)]
pub(super) struct Status {
    pub version: u32,
    pub files: bool,
    pub tcp: bool,
}

/// Puts the rules over this thread, and so over all that it starts.
pub(super) fn restrict(confinement: &Confinement, notes: Option<&Path>, missing: &mut Vec<String>) -> Status {
    let status = match try_restrict(confinement, notes) {
        Ok(status) => status,
        Err(error) => {
            missing.push(format!("Landlock: {error}"));
            return Status::default();
        }
    };
    match status.landlock {
        LandlockStatus::NotEnabled => missing.push("Landlock: the kernel was started without it (lsm=)".to_owned()),
        LandlockStatus::NotImplemented => missing.push("Landlock: the kernel does not have it (Linux 5.13)".to_owned()),
        LandlockStatus::Available { effective_abi, .. } => {
            let version = effective_abi as u32;
            let lacks = BROUGHT.iter().filter(|(since, _)| (version + 1..=WANTED).contains(since));
            missing.extend(lacks.map(|(_, what)| format!("Landlock {version} knows nothing of {what}")));
            return Status { version, files: true, tcp: version >= 4 };
        }
    }
    Status::default()
}

/// As much as the kernel can.
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
        // Pipes and sockets without a name are open to all that have them.
        if fs::canonicalize(path).is_ok_and(|real| real.exists()) {
            rules.path(path, AccessFs::WriteFile | AccessFs::Truncate)?;
        }
    }
    for path in READ {
        rules.read(Path::new(path))?;
    }
    if let Ok(program) = std::env::current_exe() {
        // Where a backtrace finds its names.
        rules.read(&program)?;
    }
    rules.path(Path::new("/dev/net/tun"), AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev)?;
    rules.own_process()?;
    for &port in &confinement.tcp {
        rules.0 = rules.0.add_rule(NetPort::new(port, AccessNet::ConnectTcp))?;
    }
    rules.0.restrict_self()
}

/// What is read on the way: CPUs and interfaces, when a configuration is checked; users and groups by name; the C library's
/// allocator.
const READ: [&str; 6] = [
    "/sys/devices/system/cpu",
    "/sys/devices/virtual/net",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/proc/sys/vm/overcommit_memory",
];

/// Notes of rings: plain files in a folder of ours.
const FILES: BitFlags<AccessFs> = landlock::make_bitflags!(AccessFs::{
    ReadFile | WriteFile | Truncate | MakeReg | RemoveFile
});
/// Sockets, made and connected to.
const SOCKETS: BitFlags<AccessFs> = landlock::make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile | ResolveUnix});

struct Rules(RulesetCreated);

impl Rules {
    /// What is not there cannot be allowed.
    fn path(&mut self, path: &Path, access: BitFlags<AccessFs>) -> Result<(), RulesetError> {
        let Ok(fd) = PathFd::new(path) else { return Ok(()) };
        // Of a file, only what a file has.
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
        (&mut self.0).add_rule(PathBeneath::new(fd, access)).map(|_| ())
    }

    fn read(&mut self, path: &Path) -> Result<(), RulesetError> {
        self.path(path, AccessFs::ReadFile | AccessFs::ReadDir)
    }

    /// A folder of sockets. Notes of their rings are kept there only if it lies in memory.
    fn folder(&mut self, path: &Path) -> Result<(), RulesetError> {
        let in_memory = File::open(path).and_then(|folder| sys::is_tmpfs(folder.as_fd())).unwrap_or(false);
        self.path(path, if in_memory { SOCKETS | FILES } else { SOCKETS })
    }

    /// What the kernel says of this process: its descriptors, its mappings.
    fn own_process(&mut self) -> Result<(), RulesetError> {
        /// Kept open for ever: the kernel may forget the folder when it is short of memory, and make another one, which the rule
        /// does not know.
        static KEEP: OnceLock<File> = OnceLock::new();
        let path = PathBuf::from("/proc/self");
        if let Ok(folder) = File::open(&path) {
            KEEP.get_or_init(|| folder);
        }
        self.read(&path)
    }
}
