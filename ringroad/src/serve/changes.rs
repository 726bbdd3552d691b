//! What a new configuration changes, key by key, and what each change costs: told before it happens, by `serve --check --against`,
//! by SIGUSR2, and in the log at SIGHUP.

use crate::config::{Config, Frontend, Kind, Log, Port, SwitchConfig, Vsock, Workers, mac};
use ringroad_host::vhost_user::Access;
use ringroad_switch::Limits;
use std::fmt;

/// What a change costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nobody notices.
    InPlace,
    /// The guest is disconnected, and comes back if it connects again.
    Reconnects,
    /// The interface goes and comes back, without its addresses if it was not prepared.
    Recreates,
    /// A port or device that was not there.
    Comes,
    /// One that is not in the file any more.
    Goes,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Whose: `port vm1`, `vsock 3`; empty if it is the program's.
    pub owner: String,
    /// As the README writes it.
    pub key: &'static str,
    /// What it costs.
    pub effect: Effect,
}

impl Change {
    /// Whether somebody is cut off.
    pub fn cuts(&self) -> bool {
        matches!(self.effect, Effect::Reconnects | Effect::Recreates | Effect::Goes)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.owner.is_empty() {
            write!(f, "{}: ", self.owner)?;
        }
        match self.effect {
            Effect::InPlace => write!(f, "key `{}`: in place", self.key),
            Effect::Reconnects => write!(f, "key `{}`: reconnects the guest", self.key),
            Effect::Recreates => write!(f, "key `{}`: recreates the interface", self.key),
            Effect::Comes => write!(f, "new"),
            Effect::Goes => write!(f, "goes"),
        }
    }
}

/// Collects the keys of one owner that differ.
struct Diff {
    owner: String,
    changes: Vec<Change>,
}

impl Diff {
    fn new(owner: String) -> Diff {
        Diff { owner, changes: Vec::new() }
    }

    fn key<T: PartialEq>(&mut self, key: &'static str, effect: Effect, before: &T, after: &T) {
        if before != after {
            self.changes.push(Change { owner: self.owner.clone(), key, effect });
        }
    }
}

/// All that differs, in the order of the new file; what goes comes first.
pub fn changes(before: &Config, after: &Config) -> Vec<Change> {
    let whole = |owner: String, effect| vec![Change { owner, key: "", effect }];
    let mut all = Vec::new();
    for port in &before.ports {
        if !after.ports.iter().any(|other| other.name == port.name) {
            all.extend(whole(format!("port {}", port.name), Effect::Goes));
        }
    }
    for vsock in &before.vsocks {
        if !after.vsocks.iter().any(|other| other.cid == vsock.cid) {
            all.extend(whole(format!("vsock {}", vsock.cid), Effect::Goes));
        }
    }
    all.extend(program(before, after));
    for port in &after.ports {
        all.extend(match before.ports.iter().find(|other| other.name == port.name) {
            Some(before) => of_port(before, port),
            None => whole(format!("port {}", port.name), Effect::Comes),
        });
    }
    for vsock in &after.vsocks {
        all.extend(match before.vsocks.iter().find(|other| other.cid == vsock.cid) {
            Some(before) => of_vsock(before, vsock),
            None => whole(format!("vsock {}", vsock.cid), Effect::Comes),
        });
    }
    all
}

// In what follows each struct is taken apart in full: who adds a key has to say here what its change costs.

fn program(before: &Config, after: &Config) -> Vec<Change> {
    use Effect::InPlace;
    let mut diff = Diff::new(String::new());
    let Config { log, workers, switch, ports: _, vsocks: _, places: _ } = before;
    let Log { lines } = log;
    diff.key("log.lines", InPlace, lines, &after.log.lines);
    let Workers { cpus, poll, gather, turn } = workers;
    diff.key("workers.cpus", InPlace, cpus, &after.workers.cpus);
    diff.key("workers.poll", InPlace, poll, &after.workers.poll);
    diff.key("workers.gather", InPlace, gather, &after.workers.gather);
    diff.key("workers.turn", InPlace, turn, &after.workers.turn);
    let SwitchConfig { ageing, entries, move_after } = switch;
    diff.key("switch.ageing", InPlace, ageing, &after.switch.ageing);
    diff.key("switch.move_after", InPlace, move_after, &after.switch.move_after);
    diff.key("switch.entries", InPlace, entries, &after.switch.entries);
    diff.changes
}

/// What differs between two ports of one name.
pub fn of_port(before: &Port, after: &Port) -> Vec<Change> {
    use Effect::{InPlace, Reconnects, Recreates};
    let mut diff = Diff::new(format!("port {}", after.name));
    let Port { name: _, mode, hairpin, mtu, poll, kind, limits } = before;
    match (kind, &after.kind) {
        (Kind::VhostUser { socket, role, features, queues, mac: _, tuning, frontend }, Kind::VhostUser { .. }) => {
            let Kind::VhostUser { socket: s, role: r, features: f, queues: q, mac: _, tuning: t, frontend: other } =
                &after.kind
            else {
                return diff.changes;
            };
            of_frontend(&mut diff, ["port.limits", "port.socket_mode", "port.socket_owner"], frontend, other);
            diff.key("port.socket", Reconnects, socket, s);
            diff.key("port.role", Reconnects, role, r);
            diff.key("port.features", Reconnects, features, f);
            diff.key("port.queues", Reconnects, queues, q);
            // Drivers read the configuration space when they start.
            diff.key("port.mac", Reconnects, &mac(before), &mac(after));
            diff.key("port.mtu", Reconnects, &mtu.unwrap_or(MTU), &after.mtu.unwrap_or(MTU));
            diff.key("port.tuning", InPlace, tuning, t);
        }
        (Kind::Tap { interface, queues }, Kind::Tap { interface: i, queues: q }) => {
            diff.key("port.interface", Recreates, interface, i);
            diff.key("port.queues", Recreates, queues, q);
            diff.key("port.mtu", InPlace, mtu, &after.mtu);
        }
        (Kind::VhostUser { .. }, Kind::Tap { .. }) => diff.key("port.kind", Reconnects, &0, &1),
        (Kind::Tap { .. }, Kind::VhostUser { .. }) => diff.key("port.kind", Recreates, &0, &1),
    }
    if std::mem::discriminant(kind) == std::mem::discriminant(&after.kind) {
        let Limits { addresses, own: _, fixed, storm, link_local } = limits;
        diff.key("port.limits.addresses", InPlace, addresses, &after.limits.addresses);
        diff.key("port.limits.storm", InPlace, storm, &after.limits.storm);
        diff.key("port.addresses", InPlace, fixed, &after.limits.fixed);
        diff.key("port.link_local", InPlace, link_local, &after.limits.link_local);
    }
    diff.key("port.mode", InPlace, mode, &after.mode);
    diff.key("port.hairpin", InPlace, hairpin, &after.hairpin);
    diff.key("port.poll", InPlace, poll, &after.poll);
    diff.changes
}

/// What differs between two vhost-user sockets.
fn of_frontend(diff: &mut Diff, [limits, mode, owner]: [&'static str; 3], before: &Frontend, after: &Frontend) {
    use Effect::{InPlace, Reconnects};
    let Frontend { limits: before_limits, access } = before;
    diff.key(limits, InPlace, before_limits, &after.limits);
    diff.key(mode, InPlace, &access.mode, &after.access.mode);
    // Back to whoever makes it: only a new socket has that owner.
    let goes = access.owner.is_some() && after.access.owner.is_none()
        || access.group.is_some() && after.access.group.is_none();
    let given = |access: &Access| (access.owner, access.group);
    diff.key(owner, if goes { Reconnects } else { InPlace }, &given(access), &given(&after.access));
}

/// What a guest reads if the file does not say.
pub const MTU: u16 = 1500;

/// What differs between two vsock devices of one guest.
pub fn of_vsock(before: &Vsock, after: &Vsock) -> Vec<Change> {
    use Effect::{InPlace, Reconnects};
    let mut diff = Diff::new(format!("vsock {}", after.cid));
    let Vsock {
        cid: _,
        socket,
        role,
        host,
        forward,
        groups,
        direct,
        buffer,
        connections,
        connects,
        memory,
        socket_memory,
        poll,
        features,
        frontend,
    } = before;
    of_frontend(&mut diff, ["vsock.limits", "vsock.socket_mode", "vsock.socket_owner"], frontend, &after.frontend);
    diff.key("vsock.socket", Reconnects, socket, &after.socket);
    diff.key("vsock.role", Reconnects, role, &after.role);
    diff.key("vsock.features", Reconnects, features, &after.features);
    diff.key("vsock.host", InPlace, host, &after.host);
    diff.key("vsock.forward", InPlace, forward, &after.forward);
    diff.key("vsock.groups", InPlace, groups, &after.groups);
    diff.key("vsock.send", InPlace, direct, &after.direct);
    diff.key("vsock.buffer", InPlace, buffer, &after.buffer);
    diff.key("vsock.connections", InPlace, connections, &after.connections);
    diff.key("vsock.memory", InPlace, memory, &after.memory);
    diff.key("vsock.connects", InPlace, connects, &after.connects);
    diff.key("vsock.socket_memory", InPlace, socket_memory, &after.socket_memory);
    diff.key("vsock.poll", InPlace, poll, &after.poll);
    diff.changes
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = r#"
[workers]
poll = "0"
[[port]]
name = "vm1"
kind = "vhost-user"
socket = "/run/1"
mtu = 1500
[[port]]
name = "host"
kind = "tap"
interface = "rr0"
[[vsock]]
cid = 3
socket = "/run/v"
"#;

    fn found(after: &str) -> Vec<String> {
        let parse = |text: &str| Config::parse(text, "rr.toml").unwrap();
        changes(&parse(BEFORE), &parse(after)).iter().map(Change::to_string).collect()
    }

    #[test]
    fn each_key_costs_what_it_must() {
        assert_eq!(found(BEFORE), [""; 0]);
        // What a file says that held before anyway is no change.
        assert_eq!(found(&BEFORE.replace("mtu = 1500\n", "")), [""; 0]);
        for (what, with, expected) in [
            ("poll = \"0\"", "poll = \"50us\"", "key `workers.poll`: in place"),
            ("poll = \"0\"", "turn = 2", "key `workers.turn`: in place"),
            ("poll = \"0\"", "gather = \"off\"", "key `workers.gather`: in place"),
            ("poll = \"0\"", "cpus = [0]", "key `workers.cpus`: in place"),
            ("[workers]\npoll = \"0\"", "[switch]\nageing = \"1s\"", "key `switch.ageing`: in place"),
            ("[workers]\npoll = \"0\"", "[switch]\nentries = 1", "key `switch.entries`: in place"),
            ("[workers]\npoll = \"0\"", "[log]\nlines = 1", "key `log.lines`: in place"),
            ("mtu = 1500", "mtu = 1400", "port vm1: key `port.mtu`: reconnects the guest"),
            ("mtu = 1500", "mac = \"02:00:00:00:00:01\"", "port vm1: key `port.mac`: reconnects the guest"),
            ("mtu = 1500", "queues = 2", "port vm1: key `port.queues`: reconnects the guest"),
            ("mtu = 1500", "role = \"client\"", "port vm1: key `port.role`: reconnects the guest"),
            ("mtu = 1500", "features = { packed = false }", "port vm1: key `port.features`: reconnects the guest"),
            ("mtu = 1500", "tuning = { prefetch = 0 }", "port vm1: key `port.tuning`: in place"),
            ("mtu = 1500", "mode = \"drop\"", "port vm1: key `port.mode`: in place"),
            ("mtu = 1500", "limits = { storm = 5 }", "port vm1: key `port.limits.storm`: in place"),
            ("mtu = 1500", "limits = { addresses = 5 }", "port vm1: key `port.limits.addresses`: in place"),
            ("mtu = 1500", "limits = { connects = 5 }", "port vm1: key `port.limits`: in place"),
            ("mtu = 1500", "socket_mode = \"0660\"", "port vm1: key `port.socket_mode`: in place"),
            ("mtu = 1500", "socket_owner = \"0\"", "port vm1: key `port.socket_owner`: in place"),
            ("mtu = 1500", "link_local = \"forward\"", "port vm1: key `port.link_local`: in place"),
            ("[workers]\npoll = \"0\"", "[switch]\nmove_after = \"1s\"", "key `switch.move_after`: in place"),
            ("mtu = 1500", "hairpin = true", "port vm1: key `port.hairpin`: in place"),
            ("mtu = 1500", "poll = \"1ms\"", "port vm1: key `port.poll`: in place"),
            ("\"/run/1\"", "\"/run/2\"", "port vm1: key `port.socket`: reconnects the guest"),
            ("\"rr0\"", "\"rr1\"", "port host: key `port.interface`: recreates the interface"),
            ("\"rr0\"", "\"rr0\"\nqueues = 2", "port host: key `port.queues`: recreates the interface"),
            ("\"rr0\"", "\"rr0\"\nmtu = 9000", "port host: key `port.mtu`: in place"),
            ("\"rr0\"", "\"rr0\"\npoll = \"1ms\"", "port host: key `port.poll`: in place"),
            ("\"tap\"\ninterface", "\"vhost-user\"\nsocket", "port host: key `port.kind`: recreates the interface"),
            ("\"/run/v\"", "\"/run/w\"", "vsock 3: key `vsock.socket`: reconnects the guest"),
            ("\"/run/v\"", "\"/run/v\"\nrole = \"client\"", "vsock 3: key `vsock.role`: reconnects the guest"),
            ("\"/run/v\"", "\"/run/v\"\nfeatures = { packed = false }", "vsock 3: key `vsock.features`: reconnects"),
            ("\"/run/v\"", "\"/run/v\"\nhost = \"/run/h\"", "vsock 3: key `vsock.host`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nforward = { 1 = \"[::1]:1\" }", "vsock 3: key `vsock.forward`: in place"),
            ("\"/run/v\"", "\"/run/v\"\ngroups = [\"a\"]", "vsock 3: key `vsock.groups`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nsend = \"queued\"", "vsock 3: key `vsock.send`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nbuffer = 8192", "vsock 3: key `vsock.buffer`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nconnections = 1", "vsock 3: key `vsock.connections`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nmemory = 1048576", "vsock 3: key `vsock.memory`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nconnects = 1", "vsock 3: key `vsock.connects`: in place"),
            ("\"/run/v\"", "\"/run/v\"\nsocket_memory = 65536", "vsock 3: key `vsock.socket_memory`: in place"),
            ("\"/run/v\"", "\"/run/v\"\npoll = \"1us\"", "vsock 3: key `vsock.poll`: in place"),
        ] {
            let after = BEFORE.replacen(what, with, 1);
            let found = found(&after);
            assert!(found.len() == 1 && found[0].starts_with(expected), "{with}: expected {expected}, found {found:?}");
        }
    }

    #[test]
    fn ports_come_and_go() {
        let after = BEFORE.replace("\"vm1\"", "\"vm2\"").replace("cid = 3", "cid = 4");
        assert_eq!(found(&after), ["port vm1: goes", "vsock 3: goes", "port vm2: new", "vsock 4: new"]);
    }
}
