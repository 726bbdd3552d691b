//! Checks a valid configuration against this machine: directories, CPUs, interfaces, duplicate sockets and addresses. `serve`
//! calls it before it starts or reloads anything, `serve --check` does only this. Each finding has the line in the file, what was
//! expected, what was found, and what to do.

use super::{Config, Kind, Tap, mirror};
use ringroad_host::vhost_user::Role;
use std::{
    collections::HashMap,
    fmt, fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

/// Something in the configuration that does not work on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The port or device, as errors in the file name it: `port "vm1"`; empty for keys of the whole program.
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
    /// Creates a finding about an owner's key.
    pub(super) fn new(config: &Config, owner: &str, key: &'static str, message: String) -> Finding {
        Finding { owner: owner.to_owned(), line: config.places.line(owner, key), key, message }
    }
}

/// Returns all findings, in the order of the file.
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
        let owner = port.owner();
        if let Some(capture) = port.capture() {
            mirror::can_be_written(&capture.file).unwrap_or_else(|message| find(&owner, "mirror", message));
        }
        if let Some(socket) = port.socket() {
            if port.vhost_user().is_none_or(|guest| guest.role == Role::Server) {
                socket_can_be_made(socket).unwrap_or_else(|message| find(&owner, "socket", message));
            }
            alone(socket, &owner, &mut sockets).unwrap_or_else(|message| find(&owner, "socket", message));
            let mac = port.mac();
            if let Some(other) = macs.insert(mac, &port.name) {
                find(
                    &owner,
                    "mac",
                    format!(
                        "duplicate MAC address {mac}, also used by port {other:?} (without the key it is derived from the \
                         port's name); choose another one"
                    ),
                );
            }
        }
        if let Kind::Tap(Tap { interface, .. }) = &port.kind {
            interface_is_tap(interface, port.queues).unwrap_or_else(|(key, message)| find(&owner, key, message));
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

/// Returns the name in errors of the vsock device at `index` of the list.
pub fn vsock_owner(index: usize) -> String {
    format!("vsock {}", index + 1)
}

/// Returns whether a CPU list in the kernel's format (`0-3,8`) has `cpu`.
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
    // Without this file, pinning the worker reports the error.
    let Ok(online) = fs::read_to_string("/sys/devices/system/cpu/online") else { return Ok(()) };
    if list_has(&online, cpu) {
        return Ok(());
    }
    Err(format!(
        "expected an online CPU ({}), found {cpu}; choose one of these, or remove the key to run on any CPU",
        online.trim()
    ))
}

/// Returns the directory that a path is in.
pub(super) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Checks that the directory exists and is writable, and that the path is free. An existing socket is fine: it belongs to a
/// running daemon or was left behind by a killed one.
fn socket_can_be_made(path: &Path) -> Result<(), String> {
    let place = folder(path);
    let shown = place.display();
    match fs::metadata(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!("directory {shown} does not exist; create it: install -d -m 0750 -o $USER {shown}"));
        }
        Err(error) => return Err(format!("cannot access directory {shown}: {error}")),
        Ok(found) if !found.is_dir() => {
            return Err(format!("expected a directory, but {shown} is not one; choose another path"));
        }
        Ok(_) => {}
    }
    if let Err(error) = ringroad_host::is_writable(place) {
        return Err(format!(
            "directory {shown} is not writable by this user ({error}); change its owner (chown) or choose another path"
        ));
    }
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            Err(format!("{} exists and is not a socket; remove it or choose another path", path.display()))
        }
        _ => Ok(()),
    }
}

/// Fails if another port or device uses the same socket under another path.
fn alone(path: &Path, owner: &str, sockets: &mut HashMap<PathBuf, String>) -> Result<(), String> {
    let Ok(place) = folder(path).canonicalize() else { return Ok(()) };
    let place = place.join(path.file_name().unwrap_or_default());
    match sockets.insert(place, owner.to_owned()) {
        None => Ok(()),
        Some(other) => Err(format!(
            "duplicate socket: {} is the same file as a socket of {other}; choose another path",
            path.display()
        )),
    }
}

/// Checks that the interface, if it exists, is a TAP interface with the right number of queues.
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
        Some(flags) if flags & TAP == 0 => {
            Err(("interface", format!("expected a TAP interface, but {name} is a TUN interface; choose another name")))
        }
        None => Err((
            "interface",
            format!("expected a TAP interface, but {name} exists and is of another kind; choose another name"),
        )),
        Some(flags) if (flags & MULTI_QUEUE != 0) != (queues > 1) => {
            let (found, queues) = if queues > 1 { ("a single queue", "multi_queue ") } else { ("multiple queues", "") };
            Err((
                "queues",
                format!("{name} was created with {found}; recreate it: ip link del {name}; {}", add(queues)),
            ))
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
    fn findings_name_line_key_and_remedy() {
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
            "3: key `workers.cpus`: expected an online CPU (0",
            "7: port \"a\": key `socket`: directory /nowhere-at-all does not exist; create it: install -d",
            "12: port \"lo\": key `interface`: expected a TAP interface, but lo exists and is of another kind",
            "15: vsock 1: key `socket`: ",
            "19: port \"b\": key `socket`: /proc/self/../stat exists and is not a socket",
        ] {
            assert!(found.iter().any(|found| found.starts_with(expected)), "no {expected:?} in {found:#?}");
        }
        assert_eq!(found.len(), 5, "{found:#?}");
    }

    #[test]
    fn duplicate_addresses_and_sockets() {
        let here = std::env::temp_dir();
        let port = |name: &str, socket: &str, more: &str| {
            let socket = format!("{}/{socket}", here.display());
            format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = {socket:?}\n{more}\n")
        };
        let again = format!("../{}/rr-b.sock", here.file_name().unwrap().display());
        let derived = Config::parse(&port("a", "rr-a.sock", ""), "rr.toml").unwrap();
        assert_eq!(check(&derived), []);
        let taken = format!("mac = \"{}\"", derived.ports[0].mac());
        let text = port("a", "rr-a.sock", "") + &port("b", "rr-b.sock", &taken) + &port("c", &again, "");
        let found: Vec<String> =
            check(&Config::parse(&text, "rr.toml").unwrap()).iter().map(Finding::to_string).collect();
        let [address, socket] = &found[..] else { panic!("{found:#?}") };
        assert!(address.starts_with("10: port \"b\": key `mac`: duplicate MAC address"), "{address}");
        assert!(address.contains("also used by port \"a\""), "{address}");
        assert!(socket.starts_with("14: port \"c\": key `socket`: duplicate socket: "), "{socket}");
    }
}
