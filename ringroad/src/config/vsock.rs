//! `[[vsock]]`: the vsock devices of guests (virtio 1.3, 5.10).

use super::{
    error::ConfigError,
    frontend::{Frontend, LimitKeys},
    port::MAX_SOCKET,
    table::{Table, keys},
    taken::Taken,
    value::{self, NAME, amount, choice, int, is_name, list, text},
};
use ringroad_host::{INTERRUPT_DELAY, vhost_user::Role};
use ringroad_switch::Poll;
use ringroad_vsock::Features;
use serde::{Deserialize, Deserializer};
use std::{collections::BTreeMap, net::SocketAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

/// 0, 1 and 2 are the hypervisor, the local machine and the host; 2^32 - 1 is the wildcard (5.10.4).
const CIDS: RangeInclusive<u64> = 3..=u32::MAX as u64 - 1;
/// Maximum length of [`Vsock::host`]: a socket's without the longest "_<port>".
const MAX_HOST: usize = MAX_SOCKET - 11;

/// A guest's vsock device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Vsock {
    /// The guest's context identifier, 3 to 2³² − 2; unique.
    #[serde(deserialize_with = "int::<{ *CIDS.start() }, { *CIDS.end() }, u64, _, _>")]
    pub cid: u64,
    /// Path of the vhost-user socket; unique.
    #[serde(deserialize_with = "value::socket::<MAX_SOCKET, _, _>")]
    pub socket: PathBuf,
    /// Whether ringroad listens on the socket or connects to it.
    #[serde(deserialize_with = "value::role")]
    pub role: Role,
    /// Unix socket where host programs connect with "CONNECT <port>"; the guest's connections go to `<host>_<port>`.
    #[serde(deserialize_with = "value::socket::<MAX_HOST, _, _>")]
    pub host: Option<PathBuf>,
    /// Host ports that are forwarded to TCP addresses.
    #[serde(deserialize_with = "forward")]
    pub forward: Vec<(u32, SocketAddr)>,
    /// Guests that share a group may connect to each other.
    #[serde(deserialize_with = "groups")]
    pub groups: Vec<String>,
    /// Whether senders write to the ring themselves where possible, instead of queueing for the worker.
    #[serde(rename = "send", deserialize_with = "direct")]
    pub direct: bool,
    /// Receive buffer of each connection, in bytes.
    #[serde(deserialize_with = "int::<4096, { 1 << 30 }, u32, _, _>")]
    pub buffer: u32,
    /// Maximum number of concurrent connections.
    #[serde(deserialize_with = "int::<1, { 1 << 20 }, usize, _, _>")]
    pub connections: usize,
    /// Maximum number of connects to host sockets a second.
    #[serde(deserialize_with = "int::<1, 1_000_000, u32, _, _>")]
    pub connects: u32,
    /// Kernel memory for data that host programs have not read, in bytes, beyond 8 KiB for each socket.
    #[serde(deserialize_with = "int::<0, { 1 << 40 }, usize, _, _>")]
    pub socket_memory: usize,
    /// Memory budget in bytes for the guest's connections with the host, and as much again for those with other guests.
    #[serde(deserialize_with = "int::<{ 1 << 20 }, { 1 << 40 }, usize, _, _>")]
    pub memory: usize,
    /// How long programs in this process poll the ring before they sleep.
    #[serde(deserialize_with = "value::poll")]
    pub poll: Option<Poll>,
    /// How long the interrupt for packets that the guest has sent may wait for more of them.
    #[serde(deserialize_with = "value::short_time")]
    pub interrupt_delay: Duration,
    /// Features offered to the driver.
    #[serde(deserialize_with = "features")]
    pub features: Features,
    /// Access to its sockets, and a frontend's budgets.
    #[serde(skip)]
    pub frontend: Frontend,
}

impl Default for Vsock {
    fn default() -> Vsock {
        Vsock {
            cid: *CIDS.start(),
            socket: PathBuf::new(),
            role: Role::default(),
            host: None,
            forward: Vec::new(),
            groups: Vec::new(),
            direct: true,
            buffer: 256 << 10,
            connections: 16384,
            connects: 5000,
            socket_memory: 64 << 20,
            memory: 64 << 20,
            poll: None,
            interrupt_delay: INTERRUPT_DELAY,
            features: Features::default(),
            frontend: Frontend::default(),
        }
    }
}

/// Reads all devices.
pub(super) fn vsocks(root: &Table, taken: &mut Taken) -> Result<Vec<Vsock>, ConfigError> {
    let tables = root.list("vsock", "a list of vsock devices, written [[vsock]]", |_| None)?;
    tables.iter().map(|table| vsock(table, taken)).collect()
}

fn vsock(table: &Table, taken: &mut Taken) -> Result<Vsock, ConfigError> {
    table.only(None, &[keys(Vsock::deserialize), keys(Frontend::deserialize)].concat())?;
    table.only(Some("limits"), &keys(LimitKeys::deserialize))?;
    let vsock = Vsock { frontend: table.read()?, ..table.read()? };
    table.require("cid", &format!("{} to {}", CIDS.start(), CIDS.end()))?;
    table.require("socket", &value::socket_path(MAX_SOCKET))?;
    table.unique(&mut taken.uses, "vsock", "cid", vsock.cid)?;
    taken.socket(table, "socket", &vsock.socket)?;
    vsock.host.iter().try_for_each(|host| taken.socket(table, "host", host))?;
    table.note(&mut taken.places);
    Ok(vsock)
}

fn features<'de, D: Deserializer<'de>>(node: D) -> Result<Features, D::Error> {
    value::features(node, Features::REQUIRED)
}

fn direct<'de, D: Deserializer<'de>>(node: D) -> Result<bool, D::Error> {
    choice(node, &[("direct", true), ("queued", false)])
}

/// Reads `{ 1024 = "127.0.0.1:22" }`.
fn forward<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<(u32, SocketAddr)>, D::Error> {
    let list = BTreeMap::<Port, Address>::deserialize(node)?;
    Ok(list.into_iter().map(|(Port(port), Address(address))| (port, address)).collect())
}

/// A vsock port.
#[derive(Deserialize, Eq, Ord, PartialEq, PartialOrd)]
struct Port(#[serde(deserialize_with = "vsock_port")] u32);

#[derive(Deserialize)]
struct Address(#[serde(deserialize_with = "address")] SocketAddr);

fn vsock_port<'de, D: Deserializer<'de>>(node: D) -> Result<u32, D::Error> {
    let port = |text: &str| amount(text, "")?.try_into().ok().filter(|&port: &u32| port < u32::MAX);
    text(node, "a vsock port, 0 to 4294967294", port)
}

fn address<'de, D: Deserializer<'de>>(node: D) -> Result<SocketAddr, D::Error> {
    text(node, "an address and port such as \"127.0.0.1:8080\"", |text| text.parse::<SocketAddr>().ok())
}

fn groups<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<String>, D::Error> {
    list(node, &format!("a list of names, each {NAME}"), |name| {
        name.as_str().filter(|name| is_name(name)).map(str::to_owned)
    })
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

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
interrupt_delay = "1ms"
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
            interrupt_delay: Duration::from_millis(1),
            features: Features::all() - Features::PACKED - Features::SEQPACKET,
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
            interrupt_delay: Duration::from_micros(300),
            features: Features::all(),
            frontend: Frontend::default(),
        };
        assert_eq!(second, expected);
    }

    #[test]
    fn broken_devices() {
        let vsock = |rest: &str| format!("[[vsock]]\ncid = 3\nsocket = \"/run/1\"\n{rest}");
        let long = "h".repeat(MAX_HOST + 1);
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
