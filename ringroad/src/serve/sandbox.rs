//! How `serve` confines itself before it starts its first thread: derives from the configuration which rights are needed; all
//! others are dropped. The mechanism (seccomp, Landlock, capabilities) is `ringroad_host::sandbox`.

use crate::config::{self, Config, Finding, Kind};
use ringroad_host::{
    sandbox::{Confinement, InForce, Privilege, confine},
    vhost_user::Role,
};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The confinement in force.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// `None` with `--no-sandbox`.
    in_force: Option<InForce>,
    /// The configuration file, if it can be edited in place but not replaced, because its directory is shared.
    fixed: Option<PathBuf>,
}

impl Sandbox {
    /// Confines the process to what the configuration read from `file` needs, and to writing `json` on exit. `off`: does nothing.
    ///
    /// # Errors
    /// The kernel lacks a part and `sandbox.require` is set, or `json` cannot be created.
    pub fn enter(config: &Config, file: &Path, json: Option<&Path>, off: bool) -> Result<Sandbox, String> {
        if off {
            return Ok(Sandbox { in_force: None, fixed: None });
        }
        json.map_or(Ok(()), make)?;
        for file in captures(config) {
            ringroad_host::make_capture(file).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        }
        let mut needs = needs(config, file);
        needs.write.extend(json.map(Path::to_owned));
        let folder = fs::canonicalize(file).ok().map(|real| config::folder(&real).to_owned());
        let fixed = folder.filter(|folder| !needs.read.contains(folder)).map(|_| file.to_owned());
        let in_force = confine(&needs).map_err(|error| format!("cannot confine this process: {error}"))?;
        if config.sandbox.require && !in_force.missing().is_empty() {
            let missing = in_force.missing().join("; ");
            return Err(format!("cannot confine this process fully, which key `sandbox.require` demands: {missing}"));
        }
        Ok(Sandbox { in_force: Some(in_force), fixed })
    }

    /// Logs which parts are in force and which are missing.
    pub fn log(&self) {
        let Some(in_force) = &self.in_force else {
            return log::warn!(
                "not confined (--no-sandbox): an attacker who takes over this process has all rights of its user"
            );
        };
        log::info!("confined: {in_force}");
        if !in_force.missing().is_empty() {
            log::warn!("only partly confined: {}", in_force.missing().join("; "));
        }
        if let Some(file) = &self.fixed {
            log::info!(
                "edit {} in place before a SIGHUP: its directory is shared and not accessible, so a file that replaces it \
                 cannot be read; a directory of its own allows both",
                file.display()
            );
        }
    }

    /// Returns what ports and devices of a configuration need but the confinement forbids.
    pub fn barred(&self, config: &Config) -> Vec<Finding> {
        self.in_force.as_ref().map_or_else(Vec::new, |in_force| config::barred(config, in_force))
    }

    /// The same for forwards, without which their devices still work.
    pub fn barred_forwards(&self, config: &Config) -> Vec<Finding> {
        self.in_force.as_ref().map_or_else(Vec::new, |in_force| config::barred_forwards(config, in_force))
    }

    /// Removes what is barred from a reloaded configuration, and logs it: forwards are left out, running ports and devices keep
    /// their old settings. New ones stay in: starting them fails with the finding.
    pub fn hold(
        &self,
        config: &mut Config,
        running: &Config,
        barred: &[Finding],
        explain: impl Fn(&[Finding]) -> Option<String>,
    ) {
        if let Some(in_force) = &self.in_force {
            let found = self.barred_forwards(config);
            let lines = found.iter().filter_map(|finding| explain(std::slice::from_ref(finding)));
            lines.for_each(|line| log::error!("{line}; the forward is left out"));
            for vsock in &mut config.vsocks {
                vsock.forward.retain(|(_, to)| in_force.allows_tcp(to.port()));
            }
        }
        let why = |owner: &str| {
            let found: Vec<_> = barred.iter().filter(|finding| finding.owner == owner).cloned().collect();
            explain(&found)
        };
        for port in &mut config.ports {
            let before = running.ports.iter().find(|before| before.name == port.name && *before != port);
            if let Some(before) = before
                && let Some(why) = why(&port.owner())
            {
                log::error!("{why}; port {} is left unchanged", port.name);
                *port = before.clone();
            }
        }
        for (index, vsock) in config.vsocks.iter_mut().enumerate() {
            let before = running.vsocks.iter().find(|before| before.cid == vsock.cid && *before != vsock);
            if let Some(before) = before
                && let Some(why) = why(&config::vsock_owner(index))
            {
                log::error!("{why}; vsock {} is left unchanged", vsock.cid);
                *vsock = before.clone();
            }
        }
    }
}

/// Returns the rights that a configuration needs, now and for reloads.
fn needs(config: &Config, file: &Path) -> Confinement {
    let ports = config.ports.iter().filter_map(config::Port::socket);
    let vsocks = config.vsocks.iter().flat_map(|vsock| [&vsock.socket].into_iter().chain(&vsock.host));
    let sockets = ports.chain(vsocks.map(PathBuf::as_path));
    let mut folders: Vec<PathBuf> = sockets.map(|socket| config::folder(socket).to_owned()).collect();
    let privileges = privileges(config, &folders);
    folders.extend(config.sandbox.folders.iter().cloned());
    folders.sort();
    folders.dedup();
    let forwards = config.vsocks.iter().flat_map(|vsock| &vsock.forward).map(|(_, address)| address.port());
    let tcp = forwards.chain(config.sandbox.tcp.iter().copied()).collect();
    let write = captures(config).map(Path::to_owned).collect();
    Confinement { folders, read: files(file), write, tcp, privileges }
}

/// Returns the files that frames are captured in.
fn captures(config: &Config) -> impl Iterator<Item = &Path> {
    config.ports.iter().filter_map(config::Port::capture).map(|capture| capture.file.as_path())
}

/// Returns the capabilities that the configuration needs now, or may need for a reload.
fn privileges(config: &Config, folders: &[PathBuf]) -> Vec<Privilege> {
    let mut kept = config.sandbox.capabilities.clone();
    if config.ports.iter().any(|port| matches!(port.kind, Kind::Tap(_))) {
        kept.push(Privilege::NetAdmin);
    }
    let gives_away = config::gives_away(config);
    if gives_away {
        kept.extend([Privilege::Chown, Privilege::Fowner]);
    }
    // Without it, root may not be able to write to sockets and directories of other users.
    let client = |port: &config::Port| port.vhost_user().is_some_and(|guest| guest.role == Role::Client);
    let connects = config.ports.iter().any(client)
        || config.vsocks.iter().any(|vsock| vsock.role == Role::Client || vsock.host.is_some());
    let user = fs::metadata("/proc/self").map(|data| data.uid()).ok();
    let foreign = |folder: &PathBuf| fs::metadata(folder).is_ok_and(|data| Some(data.uid()) != user);
    if gives_away || connects || folders.iter().any(foreign) {
        kept.push(Privilege::DacOverride);
    }
    kept.dedup();
    kept
}

/// Returns the paths to keep readable: the configuration file and, unless it is shared, its directory: editors replace a file by
/// a new one, which a rule for the old file does not cover.
fn files(file: &Path) -> Vec<PathBuf> {
    let Ok(real) = fs::canonicalize(file) else { return vec![file.to_owned()] };
    let folder = config::folder(&real).to_owned();
    let mut files = vec![real];
    if is_own(&folder) {
        files.push(folder);
    }
    files
}

/// Returns whether a directory is for ringroad alone: not a system directory, not a home, not world-writable.
fn is_own(folder: &Path) -> bool {
    const SHARED: u32 = 0o1000;
    let home = std::env::var_os("HOME").is_some_and(|home| fs::canonicalize(home).is_ok_and(|home| home == folder));
    let open = fs::metadata(folder).map_or(true, |data| data.mode() & SHARED != 0);
    // At least the root and two names, as in /etc/ringroad.
    !home && !open && folder.components().count() > 2 && folder.parent() != Some(Path::new("/home"))
}

/// Creates the file of `--json` if it does not exist: once confined, the process cannot create files there.
fn make(path: &Path) -> Result<(), String> {
    if path == Path::new("-") || fs::symlink_metadata(path).is_ok() {
        return Ok(());
    }
    fs::write(path, "").map_err(|error| format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_directories_are_recognised() {
        for (folder, own) in
            [("/", false), ("/etc", false), ("/tmp", false), ("/home/alice", false), ("/dev/shm", false)]
        {
            assert_eq!(is_own(Path::new(folder)), own, "{folder}");
        }
        let folder = std::env::temp_dir().join(format!("ringroad-own-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        assert!(is_own(&folder));
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn rights_follow_from_the_configuration() {
        let kept = |text: &str| {
            let text = format!("[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket = \"/proc/self/a\"\n{text}");
            let needs = needs(&Config::parse(&text, "rr.toml").unwrap(), Path::new("/etc/rr.toml"));
            (needs.privileges, needs.folders.len(), needs.tcp)
        };
        assert_eq!(kept(""), (vec![], 1, vec![]));
        assert_eq!(kept("[[port]]\nname = \"t\"\nkind = \"tap\"\ninterface = \"t\"").0, [Privilege::NetAdmin]);
        let given = [Privilege::Chown, Privilege::Fowner, Privilege::DacOverride];
        assert_eq!(kept("socket_owner = \"7\"").0, given);
        assert_eq!(kept("role = \"client\"").0, [Privilege::DacOverride]);
        let forward = "[[vsock]]\ncid = 3\nsocket = \"/proc/self/b\"\nforward = { 1 = \"127.0.0.1:8\" }\n[sandbox]\ntcp = [9]\nfolders = [\"/x\"]";
        assert_eq!(kept(forward), (vec![], 2, vec![8, 9]));
    }
}
