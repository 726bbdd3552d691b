//! Compares two configurations key by key and classifies what applying each change disrupts. Used by `serve --check --against`,
//! SIGUSR2 (preview) and SIGHUP (logged before the reload; state.rs and vsock.rs decide by it what to restart).

use crate::config::{
    Config, E1000Card, Frontend, Kind, Log, Port, Sandbox, SwitchConfig, Tap, VhostUser, Vsock, Workers,
};
use ringroad_switch::Limits;
use std::fmt;

/// What applying a change disrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: the guest does not notice.
    InPlace,
    /// Read only at start: takes effect when the daemon is started again.
    NextStart,
    /// The guest is disconnected; its frontend has to reconnect.
    Reconnects,
    /// The interface is closed and opened again; if the daemon created it, its addresses are lost.
    Recreates,
    /// A new port or device.
    Added,
    /// A port or device that is no longer in the file.
    Removed,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The owner of the key: `port vm1`, `vsock 3`; empty for keys of the whole program.
    pub owner: String,
    /// The key as the README spells it.
    pub key: &'static str,
    /// What applying it disrupts.
    pub effect: Effect,
}

impl Change {
    /// Returns whether it disconnects a guest or takes an interface away.
    pub fn disrupts(&self) -> bool {
        matches!(self.effect, Effect::Reconnects | Effect::Recreates | Effect::Removed)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.owner.is_empty() {
            write!(f, "{}: ", self.owner)?;
        }
        match self.effect {
            Effect::InPlace => write!(f, "key `{}`: in place", self.key),
            Effect::NextStart => write!(f, "key `{}`: takes effect at the next start", self.key),
            Effect::Reconnects => write!(f, "key `{}`: reconnects the guest", self.key),
            Effect::Recreates => write!(f, "key `{}`: recreates the interface", self.key),
            Effect::Added => write!(f, "added"),
            Effect::Removed => write!(f, "removed"),
        }
    }
}

/// Collects the differing keys of one owner.
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

/// Returns all differences: removals first, then the rest in the order of the new file.
pub fn changes(before: &Config, after: &Config) -> Vec<Change> {
    let whole = |owner: String, effect| vec![Change { owner, key: "", effect }];
    let mut all = Vec::new();
    for port in &before.ports {
        if !after.ports.iter().any(|other| other.name == port.name) {
            all.extend(whole(format!("port {}", port.name), Effect::Removed));
        }
    }
    for vsock in &before.vsocks {
        if !after.vsocks.iter().any(|other| other.cid == vsock.cid) {
            all.extend(whole(format!("vsock {}", vsock.cid), Effect::Removed));
        }
    }
    all.extend(program(before, after));
    for port in &after.ports {
        all.extend(match before.ports.iter().find(|other| other.name == port.name) {
            Some(before) => of_port(before, port),
            None => whole(format!("port {}", port.name), Effect::Added),
        });
    }
    for vsock in &after.vsocks {
        all.extend(match before.vsocks.iter().find(|other| other.cid == vsock.cid) {
            Some(before) => of_vsock(before, vsock),
            None => whole(format!("vsock {}", vsock.cid), Effect::Added),
        });
    }
    all
}

// The functions below destructure each struct in full, so that adding a key without classifying it does not compile.

fn program(before: &Config, after: &Config) -> Vec<Change> {
    use Effect::{InPlace, NextStart};
    let mut diff = Diff::new(String::new());
    let Config { log, workers, switch, sandbox, ports: _, vsocks: _, places: _ } = before;
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
    let Sandbox { require, folders, tcp, capabilities } = sandbox;
    diff.key("sandbox.require", NextStart, require, &after.sandbox.require);
    diff.key("sandbox.folders", NextStart, folders, &after.sandbox.folders);
    diff.key("sandbox.tcp", NextStart, tcp, &after.sandbox.tcp);
    diff.key("sandbox.capabilities", NextStart, capabilities, &after.sandbox.capabilities);
    diff.changes
}

/// Returns the differences between two ports of the same name.
pub fn of_port(before: &Port, after: &Port) -> Vec<Change> {
    use Effect::{InPlace, Reconnects, Recreates};
    let mut diff = Diff::new(format!("port {}", after.name));
    let Port { name: _, mode, hairpin, gro, queues, mtu, poll, kind, limits, vlans, mirror } = before;
    match (kind, &after.kind) {
        (Kind::VhostUser(guest), Kind::VhostUser(other)) => {
            let VhostUser { socket, role, features, mac: _, fixed: _, tuning, speed, link, interrupt_delay, frontend } =
                guest;
            of_frontend(&mut diff, ["port.limits", "port.socket_mode", "port.socket_owner"], frontend, &other.frontend);
            diff.key("port.socket", Reconnects, socket, &other.socket);
            diff.key("port.role", Reconnects, role, &other.role);
            diff.key("port.features", Reconnects, features, &other.features);
            diff.key("port.queues", Reconnects, queues, &after.queues);
            // Drivers read these only when they start, and the MTU must not change (virtio 1.3, 5.1.4.1).
            diff.key("port.mac", Reconnects, &before.mac(), &after.mac());
            diff.key("port.mtu", Reconnects, &mtu.unwrap_or(MTU), &after.mtu.unwrap_or(MTU));
            diff.key("port.speed", Reconnects, speed, &other.speed);
            diff.key("port.link", InPlace, link, &other.link);
            diff.key("port.tuning", InPlace, tuning, &other.tuning);
            diff.key("port.interrupt_delay", InPlace, interrupt_delay, &other.interrupt_delay);
        }
        (Kind::E1000(card), Kind::E1000(other)) => {
            let E1000Card { socket, mac: _, fixed: _, mitigation, access_poll, link, frontend } = card;
            diff.key("port.link", InPlace, link, &other.link);
            of_frontend(&mut diff, ["port.limits", "port.socket_mode", "port.socket_owner"], frontend, &other.frontend);
            diff.key("port.socket", Reconnects, socket, &other.socket);
            diff.key("port.mitigation", Reconnects, mitigation, &other.mitigation);
            diff.key("port.access_poll", InPlace, access_poll, &other.access_poll);
            diff.key("port.mac", Reconnects, &before.mac(), &after.mac());
            diff.key("port.mtu", InPlace, &mtu.unwrap_or(MTU), &after.mtu.unwrap_or(MTU));
        }
        (Kind::Tap(Tap { interface, tunnels }), Kind::Tap(other)) => {
            diff.key("port.interface", Recreates, interface, &other.interface);
            diff.key("port.tunnels", Recreates, tunnels, &other.tunnels);
            diff.key("port.queues", Recreates, queues, &after.queues);
            diff.key("port.mtu", InPlace, mtu, &after.mtu);
        }
        (Kind::Tap(_), _) => diff.key("port.kind", Recreates, &0, &1),
        _ => diff.key("port.kind", Reconnects, &0, &1),
    }
    if std::mem::discriminant(kind) == std::mem::discriminant(&after.kind) {
        of_limits(&mut diff, limits, &after.limits);
        // `vlan`, `trunk` and `native` are in this one value.
        diff.key(vlan_key(before, after), InPlace, vlans, &after.vlans);
    }
    diff.key("port.mode", InPlace, mode, &after.mode);
    diff.key("port.mirror", InPlace, mirror, &after.mirror);
    diff.key("port.hairpin", InPlace, hairpin, &after.hairpin);
    diff.key("port.gro", InPlace, gro, &after.gro);
    diff.key("port.poll", InPlace, poll, &after.poll);
    diff.changes
}

/// Returns the key that gives a port its VLANs.
fn vlan_key(before: &Port, after: &Port) -> &'static str {
    let vlans = after.vlans.or(before.vlans);
    if vlans.is_some_and(|vlans| !vlans.is_access()) { "port.trunk" } else { "port.vlan" }
}

/// Compares what limits two ports.
fn of_limits(diff: &mut Diff, before: &Limits, after: &Limits) {
    use Effect::InPlace;
    let Limits { addresses, own: _, fixed, storm, link_local, isolated, rate, wait } = before;
    diff.key("port.limits.addresses", InPlace, addresses, &after.addresses);
    diff.key("port.limits.storm", InPlace, storm, &after.storm);
    // Both keys are in this one value.
    let full = |limits: &Limits| limits.wait.is_zero();
    diff.key("port.full", InPlace, &full(before), &full(after));
    if !full(before) && !full(after) {
        diff.key("port.limits.wait", InPlace, wait, &after.wait);
    }
    diff.key("port.addresses", InPlace, fixed, &after.fixed);
    diff.key("port.link_local", InPlace, link_local, &after.link_local);
    diff.key("port.isolated", InPlace, isolated, &after.isolated);
    diff.key("port.limits.rate", InPlace, &rate.bits, &after.rate.bits);
    diff.key("port.limits.frames", InPlace, &rate.frames, &after.rate.frames);
    diff.key("port.limits.burst", InPlace, &rate.burst, &after.rate.burst);
}

/// Compares the socket settings of two ports or devices.
fn of_frontend(
    diff: &mut Diff,
    [limits_key, mode_key, owner_key]: [&'static str; 3],
    before: &Frontend,
    after: &Frontend,
) {
    use Effect::{InPlace, Reconnects};
    let Frontend { limits, socket_mode, socket_owner, socket_group } = before;
    diff.key(limits_key, InPlace, limits, &after.limits);
    diff.key(mode_key, InPlace, socket_mode, &after.socket_mode);
    // Only a new socket gets the default owner back.
    let reset = socket_owner.is_some() && after.socket_owner.is_none()
        || socket_group.is_some() && after.socket_group.is_none();
    let given = (&after.socket_owner, &after.socket_group);
    diff.key(owner_key, if reset { Reconnects } else { InPlace }, &(socket_owner, socket_group), &given);
}

/// The MTU that a guest reads in its configuration space if the file sets none.
pub const MTU: u16 = 1500;

/// Returns the differences between two vsock devices of the same CID.
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
        interrupt_delay,
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
    diff.key("vsock.interrupt_delay", InPlace, interrupt_delay, &after.interrupt_delay);
    diff.changes
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = r#"
[workers]
poll = "auto"
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
        found_in(BEFORE, after)
    }

    fn found_in(before: &str, after: &str) -> Vec<String> {
        let parse = |text: &str| Config::parse(text, "rr.toml").unwrap();
        changes(&parse(before), &parse(after)).iter().map(Change::to_string).collect()
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of keys and effects")]
    fn effect_of_each_key() {
        assert_eq!(found(BEFORE), [""; 0]);
        // Spelling out a default is no change.
        assert_eq!(found(&BEFORE.replace("mtu = 1500\n", "")), [""; 0]);
        for (what, with, expected) in [
            ("poll = \"auto\"", "poll = \"50us\"", "key `workers.poll`: in place"),
            ("poll = \"auto\"", "turn = 2", "key `workers.turn`: in place"),
            ("poll = \"auto\"", "gather = \"off\"", "key `workers.gather`: in place"),
            ("poll = \"auto\"", "cpus = [0]", "key `workers.cpus`: in place"),
            ("[workers]\npoll = \"auto\"", "[switch]\nageing = \"1s\"", "key `switch.ageing`: in place"),
            ("[workers]\npoll = \"auto\"", "[switch]\nentries = 1", "key `switch.entries`: in place"),
            ("[workers]\npoll = \"auto\"", "[log]\nlines = 1", "key `log.lines`: in place"),
            ("mtu = 1500", "link = false", "port vm1: key `port.link`: in place"),
            ("mtu = 1500", "mtu = 1400", "port vm1: key `port.mtu`: reconnects the guest"),
            ("mtu = 1500", "mac = \"02:00:00:00:00:01\"", "port vm1: key `port.mac`: reconnects the guest"),
            ("mtu = 1500", "queues = 2", "port vm1: key `port.queues`: reconnects the guest"),
            ("mtu = 1500", "role = \"client\"", "port vm1: key `port.role`: reconnects the guest"),
            ("mtu = 1500", "features = { packed = false }", "port vm1: key `port.features`: reconnects the guest"),
            ("mtu = 1500", "tuning = { prefetch = 0 }", "port vm1: key `port.tuning`: in place"),
            ("mtu = 1500", "mode = \"drop\"", "port vm1: key `port.mode`: in place"),
            ("mtu = 1500", "limits = { storm = 5 }", "port vm1: key `port.limits.storm`: in place"),
            ("mtu = 1500", "limits = { wait = \"1ms\" }", "port vm1: key `port.limits.wait`: in place"),
            ("mtu = 1500", "full = \"drop\"", "port vm1: key `port.full`: in place"),
            ("mtu = 1500", "limits = { addresses = 5 }", "port vm1: key `port.limits.addresses`: in place"),
            ("mtu = 1500", "limits = { connects = 5 }", "port vm1: key `port.limits`: in place"),
            ("mtu = 1500", "socket_mode = \"0660\"", "port vm1: key `port.socket_mode`: in place"),
            ("mtu = 1500", "socket_owner = \"0\"", "port vm1: key `port.socket_owner`: in place"),
            ("mtu = 1500", "limits = { rate = \"1Mb/s\" }", "port vm1: key `port.limits.rate`: in place"),
            ("mtu = 1500", "limits = { frames = 7 }", "port vm1: key `port.limits.frames`: in place"),
            ("mtu = 1500", "limits = { burst = \"2ms\" }", "port vm1: key `port.limits.burst`: in place"),
            ("mtu = 1500", "speed = \"1Gb/s\"", "port vm1: key `port.speed`: reconnects the guest"),
            ("mtu = 1500", "isolated = true", "port vm1: key `port.isolated`: in place"),
            ("mtu = 1500", "mirror = \"host\"", "port vm1: key `port.mirror`: in place"),
            ("mtu = 1500", "vlan = 10", "port vm1: key `port.vlan`: in place"),
            ("mtu = 1500", "trunk = [10]", "port vm1: key `port.trunk`: in place"),
            ("mtu = 1500", "link_local = \"forward\"", "port vm1: key `port.link_local`: in place"),
            ("[workers]\npoll = \"auto\"", "[switch]\nmove_after = \"1s\"", "key `switch.move_after`: in place"),
            ("mtu = 1500", "hairpin = true", "port vm1: key `port.hairpin`: in place"),
            ("mtu = 1500", "gro = true", "port vm1: key `port.gro`: in place"),
            ("mtu = 1500", "poll = \"1ms\"", "port vm1: key `port.poll`: in place"),
            ("\"/run/1\"", "\"/run/2\"", "port vm1: key `port.socket`: reconnects the guest"),
            (
                "kind = \"vhost-user\"\nsocket = \"/run/1\"",
                "kind = \"e1000\"\nsocket = \"/run/1\"",
                "port vm1: key `port.kind`: reconnects the guest",
            ),
            ("\"rr0\"", "\"rr1\"", "port host: key `port.interface`: recreates the interface"),
            ("\"rr0\"", "\"rr0\"\nqueues = 2", "port host: key `port.queues`: recreates the interface"),
            ("\"rr0\"", "\"rr0\"\ntunnels = true", "port host: key `port.tunnels`: recreates the interface"),
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
            ("\"/run/v\"", "\"/run/v\"\ninterrupt_delay = \"0\"", "vsock 3: key `vsock.interrupt_delay`: in place"),
        ] {
            let after = BEFORE.replacen(what, with, 1);
            let found = found(&after);
            assert!(found.len() == 1 && found[0].starts_with(expected), "{with}: expected {expected}, found {found:?}");
        }
    }

    #[test]
    fn effect_of_each_key_of_a_card() {
        let before = "[[port]]\nname = \"old\"\nkind = \"e1000\"\nsocket = \"/run/1\"\n";
        for (line, expected) in [
            ("link = false", "port old: key `port.link`: in place"),
            ("mtu = 1400", "port old: key `port.mtu`: in place"),
            ("access_poll = \"1us\"", "port old: key `port.access_poll`: in place"),
            ("mitigation = false", "port old: key `port.mitigation`: reconnects the guest"),
            ("mac = \"02:00:00:00:00:01\"", "port old: key `port.mac`: reconnects the guest"),
        ] {
            let found = found_in(before, &format!("{before}{line}\n"));
            assert!(found.len() == 1 && found[0].starts_with(expected), "{line}: expected {expected}, found {found:?}");
        }
    }

    #[test]
    fn added_and_removed() {
        let after = BEFORE.replace("\"vm1\"", "\"vm2\"").replace("cid = 3", "cid = 4");
        assert_eq!(found(&after), ["port vm1: removed", "vsock 3: removed", "port vm2: added", "vsock 4: added"]);
    }
}
