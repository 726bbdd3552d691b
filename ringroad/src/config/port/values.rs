//! What the keys of a port may be set to.

use crate::{
    config::value::{self, choice, text, wrong},
    ports::Mode,
};
use ringroad_host::e1000::Mitigation;
use ringroad_net::Features;
use ringroad_switch::Vid;
use ringroad_wire::ethernet::MacAddr;
use serde::{Deserialize, Deserializer};
use std::time::Duration;
use toml::Value;

pub(super) const INTERFACE: &str = "the name of an interface, 1 to 15 bytes without `/`, `:`, `%` or space";
pub(super) const VHOST_USER: &str = "vhost-user";
pub(super) const TAP: &str = "tap";
pub(super) const E1000: &str = "e1000";
/// Maximum length of an interface name, in bytes: IFNAMSIZ less the terminating NUL.
const MAX_INTERFACE: usize = 15;

pub(super) fn vlan<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Vid>, D::Error> {
    let vid = u64::deserialize(node).ok().and_then(|number| Vid::new(number.try_into().ok()?));
    vid.map(Some).ok_or_else(|| wrong("1 to 4094"))
}

pub(super) fn trunk<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Option<Vec<Vid>>>, D::Error> {
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

pub(super) fn features<'de, D: Deserializer<'de>>(node: D) -> Result<Features, D::Error> {
    Ok(value::features(node, Features::REQUIRED)?.consistent())
}

pub(super) fn kind<'de, D: Deserializer<'de>>(node: D) -> Result<String, D::Error> {
    choice(node, &[(VHOST_USER, VHOST_USER), (E1000, E1000), (TAP, TAP)])
}

pub(super) fn mode<'de, D: Deserializer<'de>>(node: D) -> Result<Mode, D::Error> {
    let modes =
        [("switch", Mode::Switch), ("reflect", Mode::Reflect), ("drop", Mode::Drop), ("generate", Mode::Generate)];
    choice(node, &modes)
}

/// Reads how interrupts are moderated: as the registers say, as by QEMU's device, or not at all.
pub(super) fn mitigation<'de, D: Deserializer<'de>>(node: D) -> Result<Mitigation, D::Error> {
    match Value::deserialize(node) {
        Ok(Value::Boolean(enabled)) => Ok(Mitigation { enabled, clamp_itr: false }),
        Ok(Value::String(text)) if text == "clamped" => Ok(Mitigation { enabled: true, clamp_itr: true }),
        _ => Err(wrong("true, false or \"clamped\"")),
    }
}

pub(super) fn fixed<'de, D: Deserializer<'de>>(node: D) -> Result<bool, D::Error> {
    choice(node, &[("learn", false), ("fixed", true)])
}

pub(super) fn link_local<'de, D: Deserializer<'de>>(node: D) -> Result<Option<bool>, D::Error> {
    choice(node, &[("drop", false), ("forward", true)])
}

pub(super) fn full<'de, D: Deserializer<'de>>(node: D) -> Result<Option<bool>, D::Error> {
    choice(node, &[("wait", true), ("drop", false)])
}

pub(super) fn wait<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Duration>, D::Error> {
    text(node, "\"100us\" to \"1000ms\"", |text| {
        value::time(text).filter(|time| (Duration::from_micros(100)..=Duration::from_secs(1)).contains(time))
    })
}

/// Reads bits a second; 0 is unlimited.
pub(super) fn bits<'de, D: Deserializer<'de>>(node: D) -> Result<u64, D::Error> {
    text(node, "\"1Mb/s\" to \"1000Gb/s\" or \"unlimited\"", |text| {
        let units = [("Mb/s", 1_000_000), ("Gb/s", 1_000_000_000)];
        let bits = units.iter().find_map(|&(unit, bits)| value::amount(text, unit)?.checked_mul(bits));
        bits.filter(|bits| (1_000_000..=1_000_000_000_000).contains(bits)).or((text == "unlimited").then_some(0))
    })
}

pub(super) fn speed<'de, D: Deserializer<'de>>(node: D) -> Result<Option<u32>, D::Error> {
    text(node, "\"10Mb/s\" to \"1000Gb/s\"", |text| {
        let (mega, giga) = (value::amount(text, "Mb/s"), value::amount(text, "Gb/s"));
        let speed = mega.or(giga.and_then(|giga| giga.checked_mul(1000)))?;
        u32::try_from(speed).ok().filter(|speed| (10..=1_000_000).contains(speed))
    })
}

pub(super) fn frames<'de, D: Deserializer<'de>>(node: D) -> Result<u64, D::Error> {
    Ok(storm(node)?.unwrap_or(0).into())
}

pub(super) fn burst<'de, D: Deserializer<'de>>(node: D) -> Result<Option<Duration>, D::Error> {
    text(node, "\"1ms\" to \"1000ms\"", |text| {
        value::time(text).filter(|time| (Duration::from_millis(1)..=Duration::from_secs(1)).contains(time))
    })
}

/// Reads frames a second; 0 is unlimited.
pub(super) fn storm<'de, D: Deserializer<'de>>(node: D) -> Result<Option<u32>, D::Error> {
    match Value::deserialize(node) {
        Ok(Value::Integer(rate @ 1..=1_000_000_000)) => Ok(Some(rate as u32)),
        Ok(Value::String(text)) if text == "unlimited" => Ok(Some(0)),
        _ => Err(wrong("1 to 1000000000 frames a second or \"unlimited\"")),
    }
}

pub(super) fn address<'de, D: Deserializer<'de>>(node: D) -> Result<Option<MacAddr>, D::Error> {
    text(node, "a unicast, non-zero address such as 52:54:00:12:34:56", |text| {
        text.parse().ok().filter(|mac: &MacAddr| !mac.is_multicast() && !mac.is_zero())
    })
}

/// Reads a name that meets the kernel's rule (`dev_valid_name`) and has no `%`, which would make the kernel pick a number.
pub(super) fn interface<'de, D: Deserializer<'de>>(node: D) -> Result<String, D::Error> {
    let bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':' | '%');
    text(node, INTERFACE, |text| {
        let good = (1..=MAX_INTERFACE).contains(&text.len()) && !matches!(text, "." | "..") && !text.contains(bad);
        good.then(|| text.to_owned())
    })
}
