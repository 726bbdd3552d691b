//! What a configuration asks of this machine that it does not have: folders, CPUs, interfaces. A file can be right and still not go
//! here. `serve` looks before it starts anything, `serve --check` does nothing else; each finding says where in the file, what was
//! expected, and what to do.

use super::{Config, Kind, Port, mac};
use ringroad_host::vhost_user::Role;
use std::{
    collections::HashMap,
    fmt, fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

/// Something that does not go on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// As errors in the file call it: `port "vm1"`; empty if it is nobody's.
    pub owner: String,
    line: usize,
    key: &'static str,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = if self.owner.is_empty() { String::new() } else { format!("{}: ", self.owner) };
        write!(f, "{}: {owner}key `{}`: {}", self.line, self.key, self.message)
    }
}

impl Finding {
    /// What is wrong with an owner's key.
    pub(super) fn new(config: &Config, owner: &str, key: &'static str, message: String) -> Finding {
        let line = config.places.line(owner, key.rsplit('.').next().unwrap_or(key));
        Finding { owner: owner.to_owned(), line, key, message }
    }
}

/// All that does not go here, in the order of the file.
pub fn check(config: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut find = |owner: &str, key: &'static str, message: String| {
        found.push(Finding::new(config, owner, key, message));
    };
    for &cpu in &config.workers.cpus {
        cpu_is_there(cpu).unwrap_or_else(|message| find("", "workers.cpus", message));
    }
    let mut sockets = HashMap::new();
    let mut macs: HashMap<_, &str> = HashMap::new();
    for port in &config.ports {
        let owner = owner(port);
        match &port.kind {
            Kind::VhostUser { socket, role, .. } => {
                if *role == Role::Server {
                    socket_can_be_made(socket).unwrap_or_else(|message| find(&owner, "socket", message));
                }
                alone(socket, &owner, &mut sockets).unwrap_or_else(|message| find(&owner, "socket", message));
                let mac = mac(port);
                if let Some(other) = macs.insert(mac, &port.name) {
                    find(
                        &owner,
                        "mac",
                        format!(
                            "expected an address that no other port has, found {mac}, which port {other:?} has too (without the key it comes from the name); give one of them another"
                        ),
                    );
                }
            }
            Kind::Tap { interface, queues } => {
                interface_is_tap(interface, *queues).unwrap_or_else(|(key, message)| find(&owner, key, message));
            }
        }
    }
    for (index, vsock) in config.vsocks.iter().enumerate() {
        let owner = vsock_owner(index);
        let made = (vsock.role == Role::Server).then_some(("socket", &vsock.socket));
        for (key, path) in made.into_iter().chain(vsock.host.iter().map(|host| ("host", host))) {
            socket_can_be_made(path).unwrap_or_else(|message| find(&owner, key, message));
            alone(path, &owner, &mut sockets).unwrap_or_else(|message| find(&owner, key, message));
        }
    }
    found.sort_by_key(|finding| finding.line);
    found
}

/// A port as errors in the file call it.
pub fn owner(port: &Port) -> String {
    format!("port {:?}", port.name)
}

/// The same for the device at a place of the list.
pub fn vsock_owner(index: usize) -> String {
    format!("vsock {}", index + 1)
}

/// `0-3,8`: the kernel's way to write a list of CPUs.
fn list_has(list: &str, cpu: usize) -> bool {
    list.trim().split(',').any(|range| {
        let mut ends = range.split('-').map(|end| end.parse::<usize>().ok());
        match (ends.next().flatten(), ends.next()) {
            (Some(only), None) => only == cpu,
            (Some(first), Some(Some(last))) => (first..=last).contains(&cpu),
            _ => false,
        }
    })
}

fn cpu_is_there(cpu: usize) -> Result<(), String> {
    // Without the file nothing is known, and the kernel will say.
    let Ok(online) = fs::read_to_string("/sys/devices/system/cpu/online") else { return Ok(()) };
    if list_has(&online, cpu) {
        return Ok(());
    }
    Err(format!(
        "expected a CPU of this machine that is online, {}, found {cpu}; name one of these, or remove the key to run on any",
        online.trim()
    ))
}

/// The folder that a path is in.
pub(super) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether there is a folder for it that we may write to, and nothing else in its place. A socket may be there: that of a daemon
/// that runs, or of one that was killed.
fn socket_can_be_made(path: &Path) -> Result<(), String> {
    let place = folder(path);
    let shown = place.display();
    match fs::metadata(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!(
                "expected a folder that exists, found no {shown}; make it: install -d -m 0750 -o $USER {shown}"
            ));
        }
        Err(error) => return Err(format!("expected a folder, but {shown} cannot be looked at: {error}")),
        Ok(found) if !found.is_dir() => {
            return Err(format!("expected a folder, found {shown}, which is none; choose another path"));
        }
        Ok(_) => {}
    }
    if let Err(error) = ringroad_host::is_writable(place) {
        return Err(format!(
            "expected a folder that this user may write to, found {shown} ({error}); change its owner (chown), or choose another path"
        ));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(format!(
            "expected nothing or a socket at {}, which exists and is not a socket; remove it or choose another path",
            path.display()
        )),
        _ => Ok(()),
    }
}

/// Fails if somebody has the same socket under another name.
fn alone(path: &Path, owner: &str, sockets: &mut HashMap<PathBuf, String>) -> Result<(), String> {
    let Ok(place) = folder(path).canonicalize() else { return Ok(()) };
    let place = place.join(path.file_name().unwrap_or_default());
    match sockets.insert(place, owner.to_owned()) {
        None => Ok(()),
        Some(other) => Err(format!(
            "expected a socket that nothing else has, found {}, which is that of {other} by another name; choose another path",
            path.display()
        )),
    }
}

/// Whether the interface is one that this program can have, if it is there.
fn interface_is_tap(name: &str, queues: u16) -> Result<(), (&'static str, String)> {
    const TAP: u32 = libc::IFF_TAP as u32;
    const MULTI_QUEUE: u32 = libc::IFF_MULTI_QUEUE as u32;
    let place = Path::new("/sys/class/net").join(name);
    if !place.exists() {
        return Ok(());
    }
    let flags = fs::read_to_string(place.join("tun_flags")).ok();
    let flags = flags.and_then(|text| u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok());
    let add = |queues| format!("ip tuntap add {name} mode tap {queues}vnet_hdr user $USER");
    match flags {
        Some(flags) if flags & TAP == 0 => Err((
            "interface",
            format!("expected a TAP interface, found {name}, which is a TUN interface; choose another name"),
        )),
        None => Err((
            "interface",
            format!(
                "expected a TAP interface, or none of that name, found {name}, which is of another kind; choose another name"
            ),
        )),
        Some(flags) if (flags & MULTI_QUEUE != 0) != (queues > 1) => {
            let (found, queues) = if queues > 1 { ("one queue", "multi_queue ") } else { ("several queues", "") };
            Err(("queues", format!("found {name} made for {found}; make it anew: ip link del {name}; {}", add(queues))))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        for (list, there, missing) in [("0\n", 0, 1), ("0-3\n", 3, 4), ("0-1,4,6-7\n", 4, 5), ("", 0, 0)] {
            assert_eq!((list_has(list, there), list_has(list, missing)), (!list.is_empty(), false), "{list:?}");
        }
    }

    #[test]
    fn a_configuration_that_does_not_go_here() {
        let text = r#"
[workers]
cpus = [1023]
[[port]]
name = "a"
kind = "vhost-user"
socket = "/nowhere-at-all/a.sock"
mac = "02:00:ff:00:00:01"
[[port]]
name = "lo"
kind = "tap"
interface = "lo"
[[vsock]]
cid = 3
socket = "/etc/hostname/v.sock"
[[port]]
name = "b"
kind = "vhost-user"
socket = "/proc/self/../stat"
"#;
        let config = Config::parse(text, "rr.toml").unwrap();
        let found: Vec<String> = check(&config).iter().map(Finding::to_string).collect();
        for expected in [
            "3: key `workers.cpus`: expected a CPU of this machine that is online, 0",
            "7: port \"a\": key `socket`: expected a folder that exists, found no /nowhere-at-all; make it: install -d",
            "12: port \"lo\": key `interface`: expected a TAP interface, or none of that name, found lo",
            "15: vsock 1: key `socket`: expected a folder, ",
            "19: port \"b\": key `socket`: expected nothing or a socket at /proc/self/../stat, which exists and is not",
        ] {
            assert!(found.iter().any(|found| found.starts_with(expected)), "no {expected:?} in {found:#?}");
        }
        assert_eq!(found.len(), 5, "{found:#?}");
    }

    #[test]
    fn addresses_and_sockets_by_another_name() {
        let here = std::env::temp_dir();
        let port = |name: &str, socket: &str, more: &str| {
            let socket = format!("{}/{socket}", here.display());
            format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = {socket:?}\n{more}\n")
        };
        let again = format!("../{}/rr-b.sock", here.file_name().unwrap().display());
        let derived = Config::parse(&port("a", "rr-a.sock", ""), "rr.toml").unwrap();
        assert_eq!(check(&derived), []);
        let taken = format!("mac = \"{}\"", mac(&derived.ports[0]));
        let text = port("a", "rr-a.sock", "") + &port("b", "rr-b.sock", &taken) + &port("c", &again, "");
        let found: Vec<String> =
            check(&Config::parse(&text, "rr.toml").unwrap()).iter().map(Finding::to_string).collect();
        let [address, socket] = &found[..] else { panic!("{found:#?}") };
        assert!(
            address.starts_with("10: port \"b\": key `mac`: expected an address that no other port has"),
            "{address}"
        );
        assert!(address.contains("which port \"a\" has too"), "{address}");
        assert!(
            socket.starts_with("14: port \"c\": key `socket`: expected a socket that nothing else has"),
            "{socket}"
        );
    }
}
