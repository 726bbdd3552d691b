//! `[[port]]`: the ports of the switch.

mod values;

use super::{
    error::ConfigError,
    frontend::{Frontend, LimitKeys},
    mirror::{self, Mirror},
    table::{Table, keys},
    taken::Taken,
    value::{self, NAME, int},
};
use crate::ports::Mode;
use ringroad_host::{
    CaptureConfig, INTERRUPT_DELAY,
    e1000::{ACCESS_POLL, Mitigation},
    vhost_user::{MAX_PAIRS, Role},
};
use ringroad_net::Features;
use ringroad_ring::Tuning;
use ringroad_switch::{Limits, Poll, Rate, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use values::{E1000, INTERFACE, TAP, VHOST_USER};

/// Maximum length of a Unix socket's path, in bytes: `sun_path` less the terminating NUL.
pub(super) const MAX_SOCKET: usize = 107;

/// One port of the switch.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Port {
    /// Unique among the ports; letters, digits, `_`, `.` and `-`.
    #[serde(deserialize_with = "value::name")]
    pub name: String,
    /// What is done with received frames.
    #[serde(deserialize_with = "values::mode")]
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
    #[serde(deserialize_with = "values::address")]
    pub mac: Option<MacAddr>,
    /// Whether all its frames must come from that address.
    #[serde(rename = "addresses", deserialize_with = "values::fixed")]
    pub fixed: bool,
    /// How its interrupts are moderated.
    #[serde(deserialize_with = "values::mitigation")]
    pub mitigation: Mitigation,
    /// How long the thread that serves accesses to its registers polls for the next one.
    #[serde(deserialize_with = "value::short_time")]
    pub access_poll: Duration,
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
            access_poll: ACCESS_POLL,
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
    #[serde(deserialize_with = "values::features")]
    pub features: Features,
    /// The MAC address advertised to the guest, if set in the file.
    #[serde(deserialize_with = "values::address")]
    pub mac: Option<MacAddr>,
    /// Whether all its frames must come from that address.
    #[serde(rename = "addresses", deserialize_with = "values::fixed")]
    pub fixed: bool,
    /// Optimisations that can be turned off for measurements.
    #[serde(with = "TuningKeys")]
    pub tuning: Tuning,
    /// Link speed advertised to the guest, in Mb/s, if set in the file.
    #[serde(deserialize_with = "values::speed")]
    pub speed: Option<u32>,
    /// Whether the link is up.
    pub link: bool,
    /// How long the interrupt for sent frames may wait for more of them, and for TCP's acknowledgements as the guest goes on sending.
    #[serde(deserialize_with = "value::short_time")]
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

    /// Returns the access to the socket of a guest's port, and the budgets of its frontend.
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
    #[serde(deserialize_with = "values::kind")]
    kind: String,
    limits: Neighbours,
    #[serde(deserialize_with = "values::link_local")]
    link_local: Option<bool>,
    #[serde(deserialize_with = "values::full")]
    full: Option<bool>,
    isolated: bool,
}

/// Keys of a port's VLANs.
#[derive(Default, Deserialize)]
#[serde(default)]
struct VlanKeys {
    #[serde(deserialize_with = "values::vlan")]
    vlan: Option<Vid>,
    /// `None` within: all.
    #[serde(deserialize_with = "values::trunk")]
    trunk: Option<Option<Vec<Vid>>>,
    #[serde(deserialize_with = "values::vlan")]
    native: Option<Vid>,
}

/// Keys of `limits` about a port's effect on other ports.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Neighbours {
    #[serde(deserialize_with = "int::<1, { 1 << 18 }, u32, _, _>")]
    addresses: Option<u32>,
    #[serde(deserialize_with = "values::storm")]
    storm: Option<u32>,
    #[serde(deserialize_with = "values::wait")]
    wait: Option<Duration>,
    #[serde(deserialize_with = "values::bits")]
    rate: u64,
    #[serde(deserialize_with = "values::frames")]
    frames: u64,
    #[serde(deserialize_with = "values::burst")]
    burst: Option<Duration>,
}

/// Settings of a TAP interface.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Tap {
    /// Its name, unique among the ports.
    #[serde(deserialize_with = "values::interface")]
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
    let of_guest = [&common, &keys(VhostUser::deserialize)[..], &keys(Frontend::deserialize)].concat();
    let of_card = [&common, &keys(E1000Card::deserialize)[..], &keys(Frontend::deserialize)].concat();
    let of_tap = [common, keys(Tap::deserialize)].concat();
    let others = of_tap.iter().chain(&of_card).filter(|key| !of_guest.contains(key));
    table.only(None, &[&of_guest[..], &others.copied().collect::<Vec<_>>()].concat())?;
    let (mut port, Common { kind, limits, link_local, full, isolated }): (Port, _) = (table.read()?, table.read()?);
    table.require("name", NAME)?;
    table.unique(&mut taken.uses, "port", "name", &port.name)?;
    table.note(&mut taken.places);
    table.require("kind", "\"vhost-user\", \"e1000\" or \"tap\"")?;
    // Nothing would wake a generating port: no frames arrive.
    port.poll = port.poll.or((port.mode == Mode::Generate).then_some(Poll::Unlimited));
    port.vlans = vlans(table)?;
    let neighbours = keys(Neighbours::deserialize);
    table.only_of_kind(&kind, &[(VHOST_USER, &of_guest[..]), (E1000, &of_card), (TAP, &of_tap)])?;
    let default;
    (port.kind, default) = if kind == TAP {
        table.only(Some("limits"), &neighbours)?;
        tap(table, taken)?
    } else {
        table.only(Some("limits"), &[neighbours, keys(LimitKeys::deserialize)].concat())?;
        guest(table, taken, &kind, port.queues)?
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

/// Reads what a tap has beside the keys of all ports. Returns its default limits, too.
fn tap(table: &Table, taken: &mut Taken) -> Result<(Kind, Limits), ConfigError> {
    let tap: Tap = table.read()?;
    table.require("interface", INTERFACE)?;
    table.unique(&mut taken.uses, "interface", "interface", &tap.interface)?;
    Ok((Kind::Tap(tap), Limits::NETWORK))
}

/// The same for a guest's port.
fn guest(table: &Table, taken: &mut Taken, kind: &str, queues: u16) -> Result<(Kind, Limits), ConfigError> {
    table.require("socket", &value::socket_path(MAX_SOCKET))?;
    if kind == E1000 {
        if queues > 1 {
            return Err(table.error("queues", "this card has one queue each way, expected 1"));
        }
        let card = E1000Card { frontend: table.read()?, ..table.read()? };
        let limits = exclusive(table, taken, &card.socket, card.mac, card.fixed)?;
        return Ok((Kind::E1000(card), limits));
    }
    let guest = VhostUser { frontend: table.read()?, ..table.read()? };
    let limits = exclusive(table, taken, &guest.socket, guest.mac, guest.fixed)?;
    Ok((Kind::VhostUser(guest), limits))
}

/// Checks the socket and the address of a guest's port, which no other port may have. Returns its default limits.
fn exclusive(
    table: &Table,
    taken: &mut Taken,
    socket: &Path,
    mac: Option<MacAddr>,
    fixed: bool,
) -> Result<Limits, ConfigError> {
    taken.socket(table, "socket", socket)?;
    if let Some(mac) = mac {
        table.unique(&mut taken.uses, "mac", "mac", mac)?;
    } else if fixed {
        return Err(table.error("addresses", "\"fixed\" requires key `mac`, which is missing"));
    }
    Ok(Limits { own: mac, fixed, ..Limits::GUEST })
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
