//! `[[vsock]]`: the vsock devices of guests (virtio 1.3, 5.10).

use super::{ConfigError, Frontend, MAX_SOCKET, Section, Taken, frontend, is_name, socket};
use ringroad_host::vhost_user::Role;
use ringroad_switch::Poll;
use ringroad_vsock::Features;
use std::{net::SocketAddr, path::PathBuf};
use toml::Spanned;
use toml::de::DeValue;

/// A guest's vsock device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vsock {
    /// The guest's context identifier, 3 to 2³² − 2; unique.
    pub cid: u64,
    /// Path of the vhost-user socket; unique.
    pub socket: PathBuf,
    /// Whether ringroad listens on the socket or connects to it.
    pub role: Role,
    /// Unix socket where host programs connect with "CONNECT <port>"; the guest's connections go to `<host>_<port>`.
    pub host: Option<PathBuf>,
    /// Host ports that are forwarded to TCP addresses.
    pub forward: Vec<(u32, SocketAddr)>,
    /// Guests that share a group may connect to each other.
    pub groups: Vec<String>,
    /// Whether senders write to the ring themselves where possible, instead of queueing for the worker.
    pub direct: bool,
    /// Receive buffer of each connection, in bytes.
    pub buffer: u32,
    /// Maximum number of concurrent connections.
    pub connections: usize,
    /// Maximum number of connects to host sockets a second.
    pub connects: u32,
    /// Kernel memory for data that host programs have not read, in bytes, beyond 8 KiB for each socket.
    pub socket_memory: usize,
    /// Memory budget in bytes for the guest's connections with the host, and as much again for those with other guests.
    pub memory: usize,
    /// How long programs in this process poll the ring before they sleep.
    pub poll: Option<Poll>,
    /// Features offered to the driver.
    pub features: Features,
    /// Access to its sockets, and a frontend's budgets.
    pub frontend: Frontend,
}

/// Length of the longest "_<port>".
const SUFFIX: usize = 11;

pub(super) fn vsocks(root: &Section, taken: &mut Taken) -> Result<Vec<Vsock>, ConfigError> {
    let expected = "a list of vsock devices, written [[vsock]]";
    let Some(list) = root.get("vsock") else { return Ok(Vec::new()) };
    let tables = list.get_ref().as_array().filter(|tables| !tables.is_empty());
    let tables = tables.ok_or_else(|| root.wrong("vsock", list, expected))?;
    let vsock = |(index, value): (usize, &Spanned<DeValue>)| {
        let table = value.get_ref().as_table().ok_or_else(|| root.wrong("vsock", value, expected))?;
        let owner = format!("vsock {}", index + 1);
        vsock(&Section { source: root.source, owner, prefix: "", table, at: value.span().start }, taken)
    };
    tables.iter().enumerate().map(vsock).collect()
}

fn vsock(table: &Section, taken: &mut Taken) -> Result<Vsock, ConfigError> {
    const KEYS: [&str; 15] = [
        "cid",
        "socket",
        "role",
        "host",
        "forward",
        "groups",
        "send",
        "buffer",
        "connections",
        "connects",
        "memory",
        "limits",
        "socket_memory",
        "poll",
        "features",
    ];
    table.only(&[&KEYS[..], &frontend::KEYS].concat(), &[])?;
    // 0, 1 and 2 are the hypervisor, the local machine and the host; 2^32 - 1 is the wildcard (5.10.4).
    let cids = 3..=u64::from(u32::MAX) - 1;
    let cid = table.number("cid", cids.clone())?;
    let cid = cid.ok_or_else(|| table.missing("cid", &format!("{} to {}", cids.start(), cids.end())))?;
    table.unique("cid", &cid, &mut taken.cids)?;
    let (socket, role) = socket(table, taken)?;
    let (host, _) = table.path("host", MAX_SOCKET - SUFFIX)?;
    if let Some(host) = &host {
        table.unique("host", host, &mut taken.sockets)?;
    }
    ["", "socket", "host"].into_iter().for_each(|key| taken.note(table, key));
    let direct = table.one_of("send", &[("direct", Some(true)), ("queued", Some(false))])?.unwrap_or(true);
    Ok(Vsock {
        cid,
        socket,
        role,
        host,
        forward: forward(table)?,
        groups: groups(table)?,
        direct,
        buffer: table.number("buffer", 4096..=1 << 30)?.unwrap_or(256 << 10) as u32,
        connections: table.number("connections", 1..=1 << 20)?.unwrap_or(16384) as usize,
        connects: table.number("connects", 1..=1_000_000)?.unwrap_or(5000) as u32,
        socket_memory: table.number("socket_memory", 0..=1 << 40)?.unwrap_or(64 << 20) as usize,
        memory: table.number("memory", 1 << 20..=1 << 40)?.unwrap_or(64 << 20) as usize,
        poll: table.poll()?,
        features: features(table)?,
        frontend: frontend::frontend(table, taken, &[])?,
    })
}

/// `forward = { 1024 = "127.0.0.1:22" }`.
fn forward(vsock: &Section) -> Result<Vec<(u32, SocketAddr)>, ConfigError> {
    let Some(table) = vsock.section("forward", "forward.")? else { return Ok(Vec::new()) };
    let entry = |(key, value): (&Spanned<_>, &Spanned<DeValue>)| {
        let name: &str = std::convert::AsRef::<str>::as_ref(key.get_ref() as &std::borrow::Cow<str>);
        let digits = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        let port = digits.then(|| name.parse::<u32>().ok()).flatten().filter(|&port| port < u32::MAX);
        let port = port.ok_or_else(|| table.error(name, key.span().start, "expected a vsock port, 0 to 4294967294"))?;
        let address = value.get_ref().as_str().and_then(|text| text.parse().ok());
        let address =
            address.ok_or_else(|| table.wrong(name, value, "an address and port such as \"127.0.0.1:8080\""))?;
        Ok((port, address))
    };
    let mut list = table.table.iter().map(entry).collect::<Result<Vec<_>, _>>()?;
    list.sort_unstable();
    Ok(list)
}

fn groups(vsock: &Section) -> Result<Vec<String>, ConfigError> {
    let expected = "a list of names, each 1 to 32 letters, digits, `_`, `.` or `-`";
    let Some(list) = vsock.get("groups") else { return Ok(Vec::new()) };
    let names = list.get_ref().as_array().ok_or_else(|| vsock.wrong("groups", list, expected))?;
    let name = |value: &Spanned<DeValue>| {
        let name = value.get_ref().as_str().filter(|text| is_name(text));
        name.map(str::to_owned).ok_or_else(|| vsock.wrong("groups", value, expected))
    };
    names.iter().map(name).collect()
}

fn features(vsock: &Section) -> Result<Features, ConfigError> {
    let default = Features::ALL;
    let Some(table) = vsock.section("features", "features.")? else { return Ok(default) };
    table.only(&["packed", "in_order", "event_idx", "indirect", "seqpacket"], &[])?;
    Ok(Features {
        packed: table.boolean("packed", default.packed)?,
        in_order: table.boolean("in_order", default.in_order)?,
        event_idx: table.boolean("event_idx", default.event_idx)?,
        indirect: table.boolean("indirect", default.indirect)?,
        seqpacket: table.boolean("seqpacket", default.seqpacket)?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;
    use std::time::Duration;

    fn parse(text: &str) -> Vec<Vsock> {
        Config::parse(text, "rr.toml").unwrap().vsocks
    }

    #[test]
    fn keys_and_defaults() {
        let full = r#"
[[vsock]]
cid = 3
socket = "/run/vm1.vsock"
role = "client"
host = "/run/vm1.host"
forward = { 80 = "127.0.0.1:8080", 22 = "[::1]:22" }
groups = ["a", "b"]
send = "queued"
buffer = 1_048_576
connections = 5
connects = 100
socket_memory = 1_000_000
memory = 2_097_152
poll = "50us"
features = { packed = false, seqpacket = false }
[[vsock]]
cid = 4294967294
socket = "/run/vm2.vsock"
"#;
        let [first, second] = parse(full).try_into().unwrap();
        let expected = Vsock {
            cid: 3,
            socket: "/run/vm1.vsock".into(),
            role: Role::Client,
            host: Some("/run/vm1.host".into()),
            forward: vec![(22, "[::1]:22".parse().unwrap()), (80, "127.0.0.1:8080".parse().unwrap())],
            groups: vec!["a".into(), "b".into()],
            direct: false,
            buffer: 1 << 20,
            connections: 5,
            connects: 100,
            socket_memory: 1_000_000,
            memory: 2 << 20,
            poll: Some(Poll::For(Duration::from_micros(50))),
            features: Features { packed: false, seqpacket: false, ..Features::ALL },
            frontend: Frontend::default(),
        };
        assert_eq!(first, expected);
        let expected = Vsock {
            cid: u64::from(u32::MAX) - 1,
            socket: "/run/vm2.vsock".into(),
            role: Role::Server,
            host: None,
            forward: vec![],
            groups: vec![],
            direct: true,
            buffer: 256 << 10,
            connections: 16384,
            connects: 5000,
            socket_memory: 64 << 20,
            memory: 64 << 20,
            poll: None,
            features: Features::ALL,
            frontend: Frontend::default(),
        };
        assert_eq!(second, expected);
    }

    #[test]
    fn broken_devices() {
        let vsock = |rest: &str| format!("[[vsock]]\ncid = 3\nsocket = \"/run/1\"\n{rest}");
        let long = "h".repeat(MAX_SOCKET - SUFFIX + 1);
        let rows: Vec<(String, &str)> = vec![
            ("vsock = 3".into(), "1: key `vsock`: expected a list of vsock devices, written [[vsock]], found 3"),
            ("[[vsock]]".into(), "1: vsock 1: key `cid`: missing, expected 3 to 4294967294"),
            ("[[vsock]]\ncid = 2".into(), "2: vsock 1: key `cid`: expected 3 to 4294967294, found 2"),
            ("[[vsock]]\ncid = 3".into(), "1: vsock 1: key `socket`: missing, expected the path of a Unix socket, 1"),
            (vsock("[[vsock]]\ncid = 3\nsocket = \"/run/2\""), "5: vsock 2: key `cid`: duplicate cid 3, already used"),
            (vsock("[[vsock]]\ncid = 4\nsocket = \"/run/1\""), "6: vsock 2: key `socket`: duplicate socket \"/run/1\""),
            (vsock("host = \"/run/1\""), "4: vsock 1: key `host`: duplicate host \"/run/1\""),
            (
                vsock(&format!("host = \"{long}\"")),
                "4: vsock 1: key `host`: expected the path of a Unix socket, 1 to 96",
            ),
            (vsock("send = \"fast\""), "4: vsock 1: key `send`: expected \"direct\" or \"queued\", found \"fast\""),
            (vsock("buffer = 1"), "4: vsock 1: key `buffer`: expected 4096 to 1073741824, found 1"),
            (vsock("connects = 0"), "4: vsock 1: key `connects`: expected 1 to 1000000, found 0"),
            (vsock("memory = 1000"), "4: vsock 1: key `memory`: expected 1048576 to 1099511627776, found 1000"),
            (vsock("forward = 3"), "4: vsock 1: key `forward`: expected a table, found 3"),
            (vsock("forward = { x = \"127.0.0.1:1\" }"), "4: vsock 1: key `forward.x`: expected a vsock port"),
            (vsock("forward = { 1 = \"localhost\" }"), "4: vsock 1: key `forward.1`: expected an address and port"),
            (vsock("groups = [\"a b\"]"), "4: vsock 1: key `groups`: expected a list of names"),
            (vsock("sockets = 1"), "4: vsock 1: key `sockets`: unknown key, did you mean `socket`?"),
            (vsock("features = { mac = true }"), "4: vsock 1: key `features.mac`: unknown key"),
        ];
        for (text, expected) in rows {
            let found = Config::parse(&text, "rr.toml").expect_err(&text).to_string();
            assert!(found.starts_with(&format!("rr.toml:{expected}")), "{text}\n{found}");
        }
    }
}
