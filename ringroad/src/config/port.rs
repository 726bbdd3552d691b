//! `[[port]]`: the ports of the switch.

use super::{
    error::ConfigError,
    frontend::{Frontend, LimitKeys},
    mirror::{self, Mirror},
    table::{Table, keys},
    taken::Taken,
    value::{self, NAME, choice, int, text, wrong},
};
use crate::ports::Mode;
use ringroad_host::{
    CaptureConfig, INTERRUPT_DELAY,
    e1000::Mitigation,
    vhost_user::{MAX_PAIRS, Role},
};
use ringroad_net::Features;
use ringroad_ring::Tuning;
use ringroad_switch::{Limits, Poll, Rate, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use serde::{Deserialize, Deserializer};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use toml::Value;

/// Maximum length of a Unix socket's path, in bytes: `sun_path` less the terminating NUL.
pub(super) const MAX_SOCKET: usize = 107;
/// Maximum length of an interface name, in bytes: IFNAMSIZ less the terminating NUL.
const MAX_INTERFACE: usize = 15;
const INTERFACE: &str = "the name of an interface, 1 to 15 bytes without `/`, `:`, `%` or space";
const VHOST_USER: &str = "vhost-user";
const TAP: &str = "tap";
const E1000: &str = "e1000";

/// One port of the switch.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Port {
    /// Unique among the ports; letters, digits, `_`, `.` and `-`.
    #[serde(deserialize_with = "value::name")]
    pub name: String,
    /// What is done with received frames.
    #[serde(deserialize_with = "mode")]
    pub mode: Mode,
    /// Whether frames may be sent back to the port that they came from.
    pub hairpin: bool,
    /// Whether TCP segments to the port become longer frames, if its guest takes those (GRO).
    pub gro: bool,
    /// Queue pairs, 1 to 127.
    #[serde(deserialize_with = "int::<1, { MAX_PAIRS as u64 }, u16, _, _>")]
    pub queues: u16,
    /// The MTU in bytes, if set in the file.
    #[serde(deserialize_with = "int::<68, 65535, u16, _, _>")]
    pub mtu: Option<u16>,
    /// Overrides [`super::Workers::poll`] for this port.
    #[serde(deserialize_with = "value::poll")]
    pub poll: Option<Poll>,
    /// Limits on its effect on other ports.
    #[serde(skip)]
    pub limits: Limits,
    /// The VLANs that it belongs to, if any are set in the file.
    #[serde(skip)]
    pub vlans: Option<Vlans>,
    /// Where its frames are copied to.
    #[serde(deserialize_with = "mirror::mirror")]
    pub mirror: Option<Mirror>,
    /// The kind of port, with the settings of that kind.
    #[serde(skip)]
    pub kind: Kind,
}

/// The kinds of port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A guest, over vhost-user.
    VhostUser(VhostUser),
    /// The host's network stack, through a TAP interface.
    Tap(Tap),
    /// A guest with an emulated network card, over vfio-user.
    E1000(E1000Card),
}

/// Settings of an emulated network card.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct E1000Card {
    /// Path of the Unix socket; unique.
    #[serde(deserialize_with = "value::socket::<MAX_SOCKET, _, _>")]
    pub socket: PathBuf,
    /// The MAC address in its EEPROM, if set in the file.
    #[serde(deserialize_with = "address")]
    pub mac: Option<MacAddr>,
    /// Whether all its frames must come from that address.
    #[serde(rename = "addresses", deserialize_with = "fixed")]
    pub fixed: bool,
    /// How its interrupts are moderated.
    #[serde(deserialize_with = "mitigation")]
    pub mitigation: Mitigation,
    /// Whether the link is up.
    pub link: bool,
    /// Access to the socket, and a client's budgets.
    #[serde(skip)]
    pub frontend: Frontend,
}

impl Default for E1000Card {
    fn default() -> E1000Card {
        E1000Card {
            socket: PathBuf::new(),
            mac: None,
            fixed: false,
            mitigation: Mitigation::default(),
            link: true,
            frontend: Frontend::default(),
        }
    }
}

/// Settings of a guest's port.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct VhostUser {
    /// Path of the Unix socket; unique.
    #[serde(deserialize_with = "value::socket::<MAX_SOCKET, _, _>")]
    pub socket: PathBuf,
    /// Whether ringroad listens on the socket or connects to it.
    #[serde(deserialize_with = "value::role")]
    pub role: Role,
    /// Features offered to the driver.
    #[serde(deserialize_with = "features")]
    pub features: Features,
    /// The MAC address advertised to the guest, if set in the file.
    #[serde(deserialize_with = "address")]
    pub mac: Option<MacAddr>,
    /// Whether all its frames must come from that address.
    #[serde(rename = "addresses", deserialize_with = "fixed")]
    pub fixed: bool,
    /// Optimisations that can be turned off for measurements.
    #[serde(with = "TuningKeys")]
    pub tuning: Tuning,
    /// Link speed advertised to the guest, in Mb/s, if set in the file.
    #[serde(deserialize_with = "speed")]
    pub speed: Option<u32>,
    /// Whether the link is up.
    pub link: bool,
    /// How long the interrupt for sent frames may wait for more of them.
    #[serde(deserialize_with = "interrupt_delay")]
    pub interrupt_delay: Duration,
    /// Access to the socket, and a frontend's budgets.
    #[serde(skip)]
    pub frontend: Frontend,
}

impl Default for Port {
    fn default() -> Port {
        Port {
            name: String::new(),
            mode: Mode::default(),
            hairpin: false,
            gro: false,
            queues: 1,
            mtu: None,
            poll: None,
            limits: Limits::default(),
            vlans: None,
            mirror: None,
            kind: Kind::default(),
        }
    }
}

impl Default for VhostUser {
    fn default() -> VhostUser {
        VhostUser {
            socket: PathBuf::new(),
            role: Role::default(),
            features: Features::default(),
            mac: None,
            fixed: false,
            tuning: Tuning::default(),
            speed: None,
            link: true,
            interrupt_delay: INTERRUPT_DELAY,
            frontend: Frontend::default(),
        }
    }
}

impl Default for Kind {
    fn default() -> Kind {
        Kind::VhostUser(VhostUser::default())
    }
}

impl Port {
    /// Returns its name in errors.
    pub fn owner(&self) -> String {
        format!("port {:?}", self.name)
    }

    /// Returns the file that its frames are captured in.
    pub fn capture(&self) -> Option<&CaptureConfig> {
        self.mirror.as_ref()?.capture.as_ref()
    }

    /// Returns the settings of a port over vhost-user.
    pub fn vhost_user(&self) -> Option<&VhostUser> {
        match &self.kind {
            Kind::VhostUser(guest) => Some(guest),
            _ => None,
        }
    }

    /// Returns whether a guest's link is up.
    pub fn link(&self) -> bool {
        match &self.kind {
            Kind::VhostUser(guest) => guest.link,
            Kind::E1000(card) => card.link,
            Kind::Tap(_) => true,
        }
    }

    /// Returns the socket of a guest's port.
    pub fn socket(&self) -> Option<&Path> {
        match &self.kind {
            Kind::VhostUser(guest) => Some(&guest.socket),
            Kind::E1000(card) => Some(&card.socket),
            Kind::Tap(_) => None,
        }
    }

    /// Returns the access to the socket of a guest's port, and the budgets of who connects to it.
    pub fn frontend(&self) -> Option<&Frontend> {
        match &self.kind {
            Kind::VhostUser(guest) => Some(&guest.frontend),
            Kind::E1000(card) => Some(&card.frontend),
            Kind::Tap(_) => None,
        }
    }

    pub(super) fn frontend_mut(&mut self) -> Option<&mut Frontend> {
        match &mut self.kind {
            Kind::VhostUser(guest) => Some(&mut guest.frontend),
            Kind::E1000(card) => Some(&mut card.frontend),
            Kind::Tap(_) => None,
        }
    }

    /// Returns the MAC address advertised to the guest: the configured one, or one derived from the port's name (FNV-1a), so
    /// that a guest keeps it across restarts.
    pub fn mac(&self) -> MacAddr {
        let hash = |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let named = || MacAddr::local(self.name.bytes().fold(0x811c_9dc5, hash));
        let configured = match &self.kind {
            Kind::VhostUser(guest) => guest.mac,
            Kind::E1000(card) => card.mac,
            Kind::Tap(_) => None,
        };
        configured.unwrap_or_else(named)
    }
}

/// The other keys of all ports.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Common {
    #[serde(deserialize_with = "kind")]
    kind: String,
    limits: Neighbours,
    #[serde(deserialize_with = "link_local")]
    link_local: Option<bool>,
    #[serde(deserialize_with = "full")]
    full: Option<bool>,
    isolated: bool,
}

/// Keys of a port's VLANs.
#[derive(Default, Deserialize)]
#[serde(default)]
struct VlanKeys {
    #[serde(deserialize_with = "vlan")]
    vlan: Option<Vid>,
    /// `None` within: all.
    #[serde(deserialize_with = "trunk")]
    trunk: Option<Option<Vec<Vid>>>,
    #[serde(deserialize_with = "vlan")]
    native: Option<Vid>,
}

/// Keys of `limits` about a port's effect on other ports.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Neighbours {
    #[serde(deserialize_with = "int::<1, { 1 << 18 }, u32, _, _>")]
    addresses: Option<u32>,
    #[serde(deserialize_with = "storm")]
    storm: Option<u32>,
    #[serde(deserialize_with = "wait")]
    wait: Option<Duration>,
    #[serde(deserialize_with = "bits")]
    rate: u64,
    #[serde(deserialize_with = "frames")]
    frames: u64,
    #[serde(deserialize_with = "burst")]
    burst: Option<Duration>,
}

/// Settings of a TAP interface.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Tap {
    /// Its name, unique among the ports.
    #[serde(deserialize_with = "interface")]
    pub interface: String,
    /// Whether frames in UDP tunnels pass uncut.
    pub tunnels: bool,
}

#[derive(Deserialize)]
#[serde(remote = "Tuning", default = "Tuning::default", deny_unknown_fields)]
struct TuningKeys {
    fast_path: bool,
    shadow_used: bool,
    #[serde(deserialize_with = "int::<0, 31, u16, _, _>")]
    prefetch: u16,
    prefetch_write: bool,
    translation_cache: bool,
    small_copy: bool,
}

/// Reads all ports.
pub(super) fn ports(root: &Table, taken: &mut Taken) -> Result<Vec<Port>, ConfigError> {
    let name = |table: &toml::de::DeTable| {
        let name = table.get("name")?.get_ref().as_str().filter(|name| value::is_name(name))?;
        Some(format!("{name:?}"))
    };
    let tables = root.list("port", EXPECTED, name)?;
    let ports = tables.iter().map(|table| port(table, taken)).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<_> = ports.iter().map(|port| (port.name.as_str(), port.mirror.as_ref())).collect();
    for (table, port) in tables.iter().zip(&ports) {
        port.mirror.as_ref().map_or(Ok(()), |mirror| mirror::check(table, &port.name, mirror, &all))?;
    }
    Ok(ports)
}

/// What the list of ports must be.
pub(super) const EXPECTED: &str = "at least one port, written [[port]]";

fn port(table: &Table, taken: &mut Taken) -> Result<Port, ConfigError> {
    let common = [keys(Port::deserialize), keys(Common::deserialize), keys(VlanKeys::deserialize)].concat();
    let guest = [&common, &keys(VhostUser::deserialize)[..], &keys(Frontend::deserialize)].concat();
    let card = [&common, &keys(E1000Card::deserialize)[..], &keys(Frontend::deserialize)].concat();
    let tap = [common, keys(Tap::deserialize)].concat();
    let others = tap.iter().chain(&card).filter(|key| !guest.contains(key));
    table.only(None, &[&guest[..], &others.copied().collect::<Vec<_>>()].concat())?;
    let (mut port, Common { kind, limits, link_local, full, isolated }): (Port, _) = (table.read()?, table.read()?);
    table.require("name", NAME)?;
    table.unique(&mut taken.uses, "port", "name", &port.name)?;
    table.note(&mut taken.places);
    table.require("kind", "\"vhost-user\", \"e1000\" or \"tap\"")?;
    // Nothing would wake a generating port: no frames arrive.
    port.poll = port.poll.or((port.mode == Mode::Generate).then_some(Poll::Unlimited));
    port.vlans = vlans(table)?;
    let neighbours = keys(Neighbours::deserialize);
    let kinds = [(VHOST_USER, &guest[..]), (E1000, &card), (TAP, &tap)];
    table.only_of_kind(&kind, &kinds)?;
    let default = if kind == TAP {
        table.only(Some("limits"), &neighbours)?;
        let tap: Tap = table.read()?;
        table.require("interface", INTERFACE)?;
        table.unique(&mut taken.uses, "interface", "interface", &tap.interface)?;
        port.kind = Kind::Tap(tap);
        Limits::NETWORK
    } else {
        table.only(Some("limits"), &[neighbours, keys(LimitKeys::deserialize)].concat())?;
        table.require("socket", &value::socket_path(MAX_SOCKET))?;
        let (mac, fixed);
        port.kind = if kind == E1000 {
            if port.queues > 1 {
                return Err(table.error("queues", "this card has one queue each way, expected 1"));
            }
            let card = E1000Card { frontend: table.read()?, ..table.read()? };
            (mac, fixed) = (card.mac, card.fixed);
            Kind::E1000(card)
        } else {
            let guest = VhostUser { frontend: table.read()?, ..table.read()? };
            (mac, fixed) = (guest.mac, guest.fixed);
            Kind::VhostUser(guest)
        };
        taken.socket(table, "socket", port.socket().unwrap_or(Path::new("")))?;
        if let Some(mac) = mac {
            table.unique(&mut taken.uses, "mac", "mac", mac)?;
        } else if fixed {
            return Err(table.error("addresses", "\"fixed\" requires key `mac`, which is missing"));
        }
        Limits { own: mac, fixed, ..Limits::GUEST }
    };
    let wait = limits.wait.unwrap_or(default.wait);
    port.limits = Limits {
        wait: if full.unwrap_or(true) { wait } else { Duration::ZERO },
        addresses: limits.addresses.unwrap_or(default.addresses),
        storm: limits.storm.unwrap_or(default.storm),
        link_local: link_local.unwrap_or(default.link_local),
        isolated,
        rate: Rate { bits: limits.rate, frames: limits.frames, burst: limits.burst.unwrap_or(Rate::NONE.burst) },
        ..default
    };
    Ok(port)
}

/// Reads the VLANs of a port.
fn vlans(table: &Table) -> Result<Option<Vlans>, ConfigError> {
    let VlanKeys { vlan, trunk, native } = table.read()?;
    match (vlan, trunk) {
        (Some(_), Some(_)) => Err(table.error("trunk", "the port has key `vlan`, too; remove one of them")),
        (_, None) if native.is_some() => Err(table.error("native", "requires key `trunk`, which is missing")),
        (Some(vlan), None) => Ok(Some(Vlans::access(vlan))),
        (None, Some(Some(vlans))) => Ok(Some(Vlans::trunk(vlans, native))),
        (None, Some(None)) => Ok(Some(Vlans::all(native))),
        (None, None) => Ok(None),
    }
}

fn vlan<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Vid>, D::Error> {
    let vid = u64::deserialize(node).ok().and_then(|number| Vid::new(number.try_into().ok()?));
    vid.map(Some).ok_or_else(|| wrong("1 to 4094"))
}

fn trunk<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Option<Vec<Vid>>>, D::Error> {
    let vids = match Value::deserialize(node) {
        Ok(Value::String(text)) if text == "all" => return Ok(Some(None)),
        Ok(Value::Array(list)) => {
            list.iter().map(|value| Vid::new(value.as_integer()?.try_into().ok()?)).collect::<Option<Vec<_>>>()
        }
        _ => None,
    };
    let vids = vids.filter(|vids| !vids.is_empty());
    vids.map(|vids| Some(Some(vids))).ok_or_else(|| wrong("a list of VLANs, 1 to 4094 each, or \"all\""))
}

fn features<'de, D: Deserializer<'de>>(node: D) -> Result<Features, D::Error> {
    Ok(value::features(node, Features::REQUIRED)?.consistent())
}

fn kind<'de, D: Deserializer<'de>>(node: D) -> Result<String, D::Error> {
    choice(node, &[(VHOST_USER, VHOST_USER), (E1000, E1000), (TAP, TAP)])
}

fn mode<'de, D: Deserializer<'de>>(node: D) -> Result<Mode, D::Error> {
    let modes =
        [("switch", Mode::Switch), ("reflect", Mode::Reflect), ("drop", Mode::Drop), ("generate", Mode::Generate)];
    choice(node, &modes)
}

/// Reads how interrupts are moderated: as the registers say, as by QEMU's device, or not at all.
fn mitigation<'de, D: Deserializer<'de>>(node: D) -> Result<Mitigation, D::Error> {
    match Value::deserialize(node) {
        Ok(Value::Boolean(enabled)) => Ok(Mitigation { enabled, clamp_itr: false }),
        Ok(Value::String(text)) if text == "clamped" => Ok(Mitigation { enabled: true, clamp_itr: true }),
        _ => Err(wrong("true, false or \"clamped\"")),
    }
}

fn fixed<'de, D: Deserializer<'de>>(node: D) -> Result<bool, D::Error> {
    choice(node, &[("learn", false), ("fixed", true)])
}

fn link_local<'de, D: Deserializer<'de>>(node: D) -> Result<Option<bool>, D::Error> {
    choice(node, &[("drop", false), ("forward", true)])
}

fn full<'de, D: Deserializer<'de>>(node: D) -> Result<Option<bool>, D::Error> {
    choice(node, &[("wait", true), ("drop", false)])
}

fn wait<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Duration>, D::Error> {
    text(node, "\"100us\" to \"1000ms\"", |text| {
        value::time(text).filter(|time| (Duration::from_micros(100)..=Duration::from_secs(1)).contains(time))
    })
}

fn interrupt_delay<'de, D: Deserializer<'de>>(node: D) -> Result<Duration, D::Error> {
    text(node, "\"0\", or \"1us\" to \"10ms\"", |text| {
        let time = value::time(text).or((text == "0").then_some(Duration::ZERO));
        time.filter(|&time| time <= Duration::from_millis(10))
    })
}

/// Reads bits a second; 0 is unlimited.
fn bits<'de, D: Deserializer<'de>>(node: D) -> Result<u64, D::Error> {
    text(node, "\"1Mb/s\" to \"1000Gb/s\" or \"unlimited\"", |text| {
        let units = [("Mb/s", 1_000_000), ("Gb/s", 1_000_000_000)];
        let bits = units.iter().find_map(|&(unit, bits)| value::amount(text, unit)?.checked_mul(bits));
        bits.filter(|bits| (1_000_000..=1_000_000_000_000).contains(bits)).or((text == "unlimited").then_some(0))
    })
}

fn speed<'de, D: Deserializer<'de>>(node: D) -> Result<Option<u32>, D::Error> {
    text(node, "\"10Mb/s\" to \"1000Gb/s\"", |text| {
        let (mega, giga) = (value::amount(text, "Mb/s"), value::amount(text, "Gb/s"));
        let speed = mega.or(giga.and_then(|giga| giga.checked_mul(1000)))?;
        u32::try_from(speed).ok().filter(|speed| (10..=1_000_000).contains(speed))
    })
}

fn frames<'de, D: Deserializer<'de>>(node: D) -> Result<u64, D::Error> {
    Ok(storm(node)?.unwrap_or(0).into())
}

fn burst<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Duration>, D::Error> {
    text(node, "\"1ms\" to \"1000ms\"", |text| {
        value::time(text).filter(|time| (Duration::from_millis(1)..=Duration::from_secs(1)).contains(time))
    })
}

/// Reads frames a second; 0 is unlimited.
fn storm<'de, D: Deserializer<'de>>(node: D) -> Result<Option<u32>, D::Error> {
    match Value::deserialize(node) {
        Ok(Value::Integer(rate @ 1..=1_000_000_000)) => Ok(Some(rate as u32)),
        Ok(Value::String(text)) if text == "unlimited" => Ok(Some(0)),
        _ => Err(wrong("1 to 1000000000 frames a second or \"unlimited\"")),
    }
}

fn address<'de, D: Deserializer<'de>>(node: D) -> Result<Option<MacAddr>, D::Error> {
    text(node, "a unicast, non-zero address such as 52:54:00:12:34:56", |text| {
        text.parse().ok().filter(|mac: &MacAddr| !mac.is_multicast() && !mac.is_zero())
    })
}

/// Reads a name that meets the kernel's rule (`dev_valid_name`) and has no `%`, which would make the kernel pick a number.
fn interface<'de, D: Deserializer<'de>>(node: D) -> Result<String, D::Error> {
    let bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':' | '%');
    text(node, INTERFACE, |text| {
        let good = (1..=MAX_INTERFACE).contains(&text.len()) && !matches!(text, "." | "..") && !text.contains(bad);
        good.then(|| text.to_owned())
    })
}
