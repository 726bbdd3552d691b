//! How `serve` confines itself: what the configuration needs is kept, all else goes, before the first thread starts.

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

/// What is in force.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Nothing with `--no-sandbox`.
    in_force: Option<InForce>,
    /// The configuration may be changed but not replaced: its folder is not its own.
    fixed: Option<PathBuf>,
}

impl Sandbox {
    /// Confines the process to what the configuration, which is at `file`, needs, and to `json`, which it writes at its end.
    ///
    /// # Errors
    /// A part cannot be had, and `sandbox.require` says that it must be; or there can be no such file.
    pub fn enter(config: &Config, file: &Path, json: Option<&Path>, off: bool) -> Result<Sandbox, String> {
        if off {
            return Ok(Sandbox { in_force: None, fixed: None });
        }
        json.map_or(Ok(()), make)?;
        let mut needs = needs(config, file);
        needs.write.extend(json.map(Path::to_owned));
        let folder = fs::canonicalize(file).ok().map(|real| config::folder(&real).to_owned());
        let fixed = folder.filter(|folder| !needs.read.contains(folder)).map(|_| file.to_owned());
        let in_force = confine(&needs).map_err(|error| format!("cannot confine this process: {error}"))?;
        if config.sandbox.require && !in_force.missing().is_empty() {
            let missing = in_force.missing().join("; ");
            return Err(format!("cannot confine this process as key `sandbox.require` wants it: {missing}"));
        }
        Ok(Sandbox { in_force: Some(in_force), fixed })
    }

    /// Logs what is in force, and what is not.
    pub fn say(&self) {
        let Some(in_force) = &self.in_force else {
            return log::warn!(
                "not confined (--no-sandbox): whoever takes this process over has all that its user has"
            );
        };
        log::info!("confined: {in_force}");
        if !in_force.missing().is_empty() {
            log::warn!("not confined in all: {}", in_force.missing().join("; "));
        }
        if let Some(file) = &self.fixed {
            log::info!(
                "for SIGHUP {} is to be changed, not replaced: nothing else of its folder is read; in a folder of its own it may be",
                file.display()
            );
        }
    }

    /// What a configuration asks for that is not to be had any more: ports and devices that cannot be.
    pub fn barred(&self, config: &Config) -> Vec<Finding> {
        self.in_force.as_ref().map_or_else(Vec::new, |in_force| config::barred(config, in_force))
    }

    /// The same for forwards, without which devices are as good.
    pub fn barred_forwards(&self, config: &Config) -> Vec<Finding> {
        self.in_force.as_ref().map_or_else(Vec::new, |in_force| config::barred_forwards(config, in_force))
    }

    /// Takes what is barred out of a configuration that was read again, and says so: forwards are left out, ports and devices that
    /// are there stay as they are. New ones are left, for whoever starts them to refuse.
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
            lines.for_each(|line| log::error!("{line}; it is left out"));
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
                && let Some(why) = why(&config::owner(port))
            {
                log::error!("{why}; port {} stays as it is", port.name);
                *port = before.clone();
            }
        }
        for (index, vsock) in config.vsocks.iter_mut().enumerate() {
            let before = running.vsocks.iter().find(|before| before.cid == vsock.cid && *before != vsock);
            if let Some(before) = before
                && let Some(why) = why(&config::vsock_owner(index))
            {
                log::error!("{why}; vsock {} stays as it is", vsock.cid);
                *vsock = before.clone();
            }
        }
    }
}

/// What a configuration needs, now and when it is read again.
fn needs(config: &Config, file: &Path) -> Confinement {
    let sockets = config.ports.iter().filter_map(|port| match &port.kind {
        Kind::VhostUser { socket, .. } => Some(socket),
        Kind::Tap { .. } => None,
    });
    let sockets = sockets.chain(config.vsocks.iter().flat_map(|vsock| [&vsock.socket].into_iter().chain(&vsock.host)));
    let mut folders: Vec<PathBuf> = sockets.map(|socket| config::folder(socket).to_owned()).collect();
    let privileges = privileges(config, &folders);
    folders.extend(config.sandbox.folders.iter().cloned());
    folders.sort();
    folders.dedup();
    let forwards = config.vsocks.iter().flat_map(|vsock| &vsock.forward).map(|(_, address)| address.port());
    let tcp = forwards.chain(config.sandbox.tcp.iter().copied()).collect();
    Confinement { folders, read: files(file), write: Vec::new(), tcp, privileges }
}

/// Capabilities that the file needs, or may need when it is read again.
fn privileges(config: &Config, folders: &[PathBuf]) -> Vec<Privilege> {
    let mut kept = config.sandbox.capabilities.clone();
    if config.ports.iter().any(|port| matches!(port.kind, Kind::Tap { .. })) {
        kept.push(Privilege::NetAdmin);
    }
    let gives_away = config::gives_away(config);
    if gives_away {
        kept.extend([Privilege::Chown, Privilege::Fowner]);
    }
    // Sockets that other users make need not be writable for root without it; nor folders of theirs.
    let client = |port: &config::Port| matches!(port.kind, Kind::VhostUser { role: Role::Client, .. });
    let connects = config.ports.iter().any(client)
        || config.vsocks.iter().any(|vsock| vsock.role == Role::Client || vsock.host.is_some());
    let ours = fs::metadata("/proc/self").map(|data| data.uid()).ok();
    let foreign = |folder: &PathBuf| fs::metadata(folder).is_ok_and(|data| Some(data.uid()) != ours);
    if gives_away || connects || folders.iter().any(foreign) {
        kept.push(Privilege::DacOverride);
    }
    kept.dedup();
    kept
}

/// The configuration. A file that is replaced, as editors do, is another one then: what may be read is its folder, unless that is
/// one where others keep things.
fn files(file: &Path) -> Vec<PathBuf> {
    let Ok(real) = fs::canonicalize(file) else { return vec![file.to_owned()] };
    let folder = config::folder(&real).to_owned();
    let mut files = vec![real];
    if is_own(&folder) {
        files.push(folder);
    }
    files
}

/// Whether a folder is nobody else's: not of the system, no home, and not open to all.
fn is_own(folder: &Path) -> bool {
    const SHARED: u32 = 0o1000;
    let home = std::env::var_os("HOME").is_some_and(|home| fs::canonicalize(home).is_ok_and(|home| home == folder));
    let open = fs::metadata(folder).map_or(true, |data| data.mode() & SHARED != 0);
    // The root and two names: /etc/ringroad.
    !home && !open && folder.components().count() > 2 && folder.parent() != Some(Path::new("/home"))
}

/// Makes the file of `--json`, if there is none, as none can be made in its folder later.
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
    fn what_folders_are_a_configuration_s_own() {
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
    fn what_is_kept() {
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
