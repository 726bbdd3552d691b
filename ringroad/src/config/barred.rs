//! What a configuration needs but the confined process has given up.

use super::{Config, Finding, Kind, Port, Tap, Vsock, check, vsock_owner};
use ringroad_host::{
    sandbox::{InForce, Privilege},
    vhost_user::Access,
};
use std::path::Path;

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
        if let Some(capture) = port.capture().filter(|capture| !in_force.allows_file(&capture.file)) {
            let shown = capture.file.display();
            find(
                "mirror",
                format!(
                    "the sandbox, fixed at start, does not allow writing {shown}; only files of captures that the file had at start; restart"
                ),
            );
        }
        if let (Some(socket), Some(frontend)) = (port.socket(), port.frontend()) {
            may_use(socket, in_force).unwrap_or_else(|message| find("socket", message));
            may_give(frontend.access(), in_force).unwrap_or_else(|(key, why)| find(key, why));
        }
        if let Kind::Tap(Tap { interface, .. }) = &port.kind {
            let there = Path::new("/sys/class/net").join(interface).exists();
            if !there && in_force.has_dropped(Privilege::NetAdmin) {
                find("interface", dropped(&format!("create interface {interface}"), &[Privilege::NetAdmin]));
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
