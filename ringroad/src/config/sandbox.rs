//! `[sandbox]`: rights that the daemon keeps for later reloads, beyond what the rest of the file needs; and the check of a
//! reloaded configuration against the confinement in force.

use super::{Config, Finding, Kind, Port, VhostUser, Vsock, check, value::list, vsock_owner};
use ringroad_host::{
    sandbox::{InForce, Privilege},
    vhost_user::Access,
};
use serde::{Deserialize, Deserializer};
use std::path::{Path, PathBuf};

/// The `[sandbox]` table.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Whether to exit if the kernel lacks a part.
    pub require: bool,
    /// Directories in which a reload may create sockets.
    #[serde(deserialize_with = "folders")]
    pub folders: Vec<PathBuf>,
    /// TCP ports that a reload may forward to.
    #[serde(deserialize_with = "tcp")]
    pub tcp: Vec<u16>,
    /// Capabilities that a reload may need.
    #[serde(deserialize_with = "capabilities")]
    pub capabilities: Vec<Privilege>,
}

fn folders<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<PathBuf>, D::Error> {
    list(node, "a list of directories, each an absolute path", |value| {
        value.as_str().map(PathBuf::from).filter(|path| path.is_absolute())
    })
}

fn tcp<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<u16>, D::Error> {
    list(node, "a list of TCP ports, 1 to 65535", |value| {
        value.as_integer()?.try_into().ok().filter(|&port: &u16| port > 0)
    })
}

fn capabilities<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<Privilege>, D::Error> {
    let names = Privilege::ALL.map(|privilege| format!("{:?}", privilege.name())).join(", ");
    list(node, &format!("a list of capabilities out of {names}"), |value| {
        Privilege::ALL.into_iter().find(|privilege| Some(privilege.name()) == value.as_str())
    })
}

/// Returns the directory that a socket is in.
pub fn folder(socket: &Path) -> &Path {
    check::folder(socket)
}

/// Returns whether some socket gets another owner or group.
pub fn gives_away(config: &Config) -> bool {
    let ports = config.ports.iter().filter_map(Port::vhost_user).map(|guest| guest.frontend);
    ports.chain(config.vsocks.iter().map(|vsock| vsock.frontend)).any(|frontend| is_given(frontend.access()))
}

fn is_given(access: Access) -> bool {
    access.owner.is_some() || access.group.is_some()
}

/// Returns what a configuration needs but the process has given up.
pub fn barred(config: &Config, in_force: &InForce) -> Vec<Finding> {
    let mut found = Vec::new();
    for port in &config.ports {
        let owner = port.owner();
        let mut find = |key, message| found.push(Finding::new(config, &owner, key, message));
        match &port.kind {
            Kind::VhostUser(VhostUser { socket, frontend, .. }) => {
                may_use(socket, in_force).unwrap_or_else(|message| find("socket", message));
                may_give(frontend.access(), in_force).unwrap_or_else(|(key, why)| find(key, why));
            }
            Kind::Tap(interface) => {
                let there = Path::new("/sys/class/net").join(interface).exists();
                if !there && in_force.has_dropped(Privilege::NetAdmin) {
                    find("interface", dropped(&format!("create interface {interface}"), &[Privilege::NetAdmin]));
                }
            }
        }
    }
    for (index, vsock) in config.vsocks.iter().enumerate() {
        let owner = vsock_owner(index);
        let mut find = |key, message| found.push(Finding::new(config, &owner, key, message));
        let Vsock { socket, host, frontend, .. } = vsock;
        for (key, path) in [("socket", Some(socket)), ("host", host.as_ref())] {
            path.map_or(Ok(()), |path| may_use(path, in_force)).unwrap_or_else(|message| find(key, message));
        }
        may_give(frontend.access(), in_force).unwrap_or_else(|(key, why)| find(key, why));
    }
    found
}

/// Returns the forwards to TCP ports that the process may no longer connect to.
pub fn barred_forwards(config: &Config, in_force: &InForce) -> Vec<Finding> {
    let mut found = Vec::new();
    for (index, vsock) in config.vsocks.iter().enumerate() {
        for (_, address) in vsock.forward.iter().filter(|(_, to)| !in_force.allows_tcp(to.port())) {
            let port = address.port();
            let message = format!(
                "{address}: the sandbox, fixed at start, does not allow connecting to TCP port {port}; add it to key \
                 `sandbox.tcp` and restart"
            );
            found.push(Finding::new(config, &vsock_owner(index), "forward", message));
        }
    }
    found
}

fn may_use(socket: &Path, in_force: &InForce) -> Result<(), String> {
    let place = folder(socket);
    // A missing directory is another finding.
    if in_force.allows_folder(place) || !place.exists() {
        return Ok(());
    }
    let shown = place.display();
    Err(format!(
        "the sandbox, fixed at start, does not allow sockets in {shown}; add the directory to key `sandbox.folders` and restart"
    ))
}

fn may_give(access: Access, in_force: &InForce) -> Result<(), (&'static str, String)> {
    let needed = [Privilege::Chown, Privilege::Fowner];
    if !is_given(access) || !needed.iter().any(|&privilege| in_force.has_dropped(privilege)) {
        return Ok(());
    }
    let key = if access.owner.is_some() { "socket_owner" } else { "socket_group" };
    Err((key, dropped("change the owner of sockets", &needed)))
}

fn dropped(what: &str, needed: &[Privilege]) -> String {
    let names: Vec<_> = needed.iter().map(|privilege| format!("{:?}", privilege.name())).collect();
    format!(
        "cannot {what}: the capability was dropped at start, when nothing needed it; add {} to key `sandbox.capabilities` and \
         restart",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: &str = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket = \"/run/a\"\n";

    #[test]
    fn keys_and_defaults() {
        let parse = |text: &str| Config::parse(&format!("{text}\n{PORT}"), "rr.toml").unwrap().sandbox;
        assert_eq!(parse(""), Sandbox::default());
        let all = "[sandbox]\nrequire = true\nfolders = [\"/run/a\", \"/run/b\"]\ntcp = [22, 0x50]\ncapabilities = [\"net_admin\", \"chown\"]";
        let expected = Sandbox {
            require: true,
            folders: vec!["/run/a".into(), "/run/b".into()],
            tcp: vec![22, 80],
            capabilities: vec![Privilege::NetAdmin, Privilege::Chown],
        };
        assert_eq!(parse(all), expected);
    }

    #[test]
    fn invalid_values() {
        for (text, expected) in [
            ("folders = \"/run\"", "2: key `sandbox.folders`: expected a list of directories, each an absolute path"),
            ("folders = [\"run\"]", "2: key `sandbox.folders`: expected a list of directories, each an absolute path"),
            ("tcp = [0]", "2: key `sandbox.tcp`: expected a list of TCP ports, 1 to 65535, found"),
            ("tcp = [65536]", "2: key `sandbox.tcp`: expected a list of TCP ports"),
            (
                "capabilities = [\"sys_admin\"]",
                "2: key `sandbox.capabilities`: expected a list of capabilities out of \"net_admin\"",
            ),
            ("required = true", "2: key `sandbox.required`: unknown key, did you mean `require`?"),
        ] {
            let found = Config::parse(&format!("[sandbox]\n{text}\n{PORT}"), "rr.toml").expect_err(text).to_string();
            assert!(found.starts_with(&format!("rr.toml:{expected}")), "{text}\n{found}");
        }
    }
}
