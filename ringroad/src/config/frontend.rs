//! Keys that `[[port]]` and `[[vsock]]` share, about their vhost-user sockets: access, and a frontend's budgets.

use super::{
    error::ConfigError,
    table::Table,
    value::{amount, int, text},
};
use ringroad_host::{
    group_id, user_id,
    vhost_user::{Access, Limits, Rate},
};
use serde::{Deserialize, Deserializer};

/// Settings of a vhost-user socket.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Frontend {
    /// Budgets of a frontend.
    #[serde(default = "shared", with = "LimitKeys")]
    pub limits: Limits,
    /// Permissions of the socket.
    #[serde(deserialize_with = "mode")]
    pub socket_mode: u32,
    /// Its user, if set in the file.
    #[serde(deserialize_with = "user")]
    pub socket_owner: Option<u32>,
    /// Its group, if set in the file.
    #[serde(deserialize_with = "group")]
    pub socket_group: Option<u32>,
}

impl Default for Frontend {
    fn default() -> Frontend {
        let Access { mode: socket_mode, owner: socket_owner, group: socket_group } = Access::default();
        Frontend { limits: Limits::default(), socket_mode, socket_owner, socket_group }
    }
}

impl Frontend {
    /// Returns owner and permissions of the socket.
    pub fn access(&self) -> Access {
        Access { mode: self.socket_mode, owner: self.socket_owner, group: self.socket_group }
    }
}

/// Keys of `limits` about a frontend. The bursts are the same multiples of the rates as in the defaults.
#[derive(Deserialize)]
#[serde(remote = "Limits", default = "shared")]
pub(super) struct LimitKeys {
    #[serde(deserialize_with = "size")]
    mapped: u64,
    #[serde(deserialize_with = "int::<1, { ringroad_mem::SLOTS as u64 }, usize, _, _>")]
    regions: usize,
    #[serde(deserialize_with = "rate::<2, _>")]
    connects: Rate,
    #[serde(deserialize_with = "rate::<4, _>")]
    messages: Rate,
    #[serde(deserialize_with = "rate::<1, _>")]
    refusals: Rate,
    #[serde(deserialize_with = "rate::<20, _>")]
    lines: Rate,
}

/// Returns the default limits, with a portion of what is shared: [`share`] sets it.
fn shared() -> Limits {
    Limits { mapped: PORTION, regions: PORTION as usize, ..Limits::default() }
}

const PORTION: u64 = u64::MAX;
/// Minimum address space, in bytes, of each port that does not set `limits.mapped`.
const LEAST_MAPPED: u64 = 1 << 30;
/// Minimum number of memory regions of each port that does not set `limits.regions`.
const LEAST_REGIONS: u64 = 8;

/// Divides the remaining address space and memory regions equally among the ports that do not set their own limits. Both are
/// shared by the whole process, and each port must have enough, whatever the others do.
pub(super) fn share(root: &Table, mut all: Vec<&mut Limits>) -> Result<(), ConfigError> {
    let mapped = portion(all.iter().map(|limits| limits.mapped), Limits::ALL_MAPPED, LEAST_MAPPED);
    let mapped = mapped.map_err(|(set, others)| {
        let message = format!(
            "expected at most 48 TiB for all ports together, with 1 GiB for each port without the key; found {} TiB and {others} \
             ports without it",
            set >> 40
        );
        root.error("limits.mapped", message)
    })?;
    let most = Limits::ALL_REGIONS;
    let regions = portion(all.iter().map(|limits| limits.regions as u64), most as u64, LEAST_REGIONS);
    let regions = regions.map_err(|(set, others)| {
        let message = format!(
            "expected at most {most} for all ports together, with 8 for each port without the key; found {set} and {others} ports \
             without it"
        );
        root.error("limits.regions", message)
    })?;
    let default = Limits::default();
    for limits in &mut all {
        if limits.mapped == PORTION {
            limits.mapped = default.mapped.min(mapped);
        }
        if limits.regions as u64 == PORTION {
            limits.regions = default.regions.min(regions as usize);
        }
    }
    Ok(())
}

/// Returns what each [`PORTION`] gets of `total`, at least `least`.
///
/// # Errors
/// The other numbers are too large, or the portions too many: the sum of the former and the number of the latter.
fn portion(all: impl Iterator<Item = u64>, total: u64, least: u64) -> Result<u64, (u64, u64)> {
    let (portions, set): (Vec<u64>, Vec<u64>) = all.partition(|&own| own == PORTION);
    let (set, others) = (set.into_iter().fold(0, u64::saturating_add), portions.len() as u64);
    let each = total.saturating_sub(set) / others.max(1);
    if set > total || others > 0 && each < least { Err((set, others)) } else { Ok(each) }
}

fn mode<'de, D: Deserializer<'de>>(node: D) -> Result<u32, D::Error> {
    text(node, "octal permissions such as \"0660\"", |text| {
        let octal = text.len() <= 4 && !text.is_empty() && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        octal.then(|| u32::from_str_radix(text, 8).ok()).flatten().filter(|&mode| mode <= 0o777)
    })
}

fn user<'de, D: Deserializer<'de>>(node: D) -> Result<Option<u32>, D::Error> {
    text(node, "the name or number of a user", |text| number_or(text, user_id))
}

fn group<'de, D: Deserializer<'de>>(node: D) -> Result<Option<u32>, D::Error> {
    text(node, "the name or number of a group", |text| number_or(text, group_id))
}

fn number_or(text: &str, look_up: impl Fn(&str) -> Option<u32>) -> Option<u32> {
    match amount(text, "").and_then(|number| u32::try_from(number).ok()) {
        // u32::MAX means "unchanged" to chown(2).
        Some(number) => Some(number).filter(|&number| number < u32::MAX),
        None => look_up(text),
    }
}

fn size<'de, D: Deserializer<'de>>(node: D) -> Result<u64, D::Error> {
    let units = [("MiB", 20), ("GiB", 30), ("TiB", 40)];
    text(node, "\"1MiB\" to \"48TiB\", in whole MiB, GiB or TiB", |text| {
        let size = units.iter().find_map(|&(unit, bits)| amount(text, unit)?.checked_mul(1 << bits));
        size.filter(|size| (1 << 20..=Limits::ALL_MAPPED).contains(size))
    })
}

fn rate<'de, const BURST: u32, D: Deserializer<'de>>(node: D) -> Result<Rate, D::Error> {
    let rate = int::<1, 1_000_000, u32, u32, _>(node)?;
    Ok(Rate { rate, burst: rate.saturating_mul(BURST) })
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Port};
    use super::*;

    fn frontends(text: &str) -> Vec<Frontend> {
        let config = Config::parse(text, "rr.toml").unwrap();
        let ports = config.ports.iter().filter_map(Port::vhost_user).map(|guest| guest.frontend);
        ports.chain(config.vsocks.iter().map(|vsock| vsock.frontend)).collect()
    }

    fn port(number: usize, rest: &str) -> String {
        format!("[[port]]\nname = \"p{number}\"\nkind = \"vhost-user\"\nsocket = \"/run/{number}\"\n{rest}\n")
    }

    #[test]
    fn keys_and_defaults() {
        let all = "limits = { mapped = \"3GiB\", regions = 8, connects = 5, messages = 70, refusals = 9, lines = 2 }\n\
                   socket_mode = \"0660\"\nsocket_owner = \"root\"\nsocket_group = \"7\"";
        let vsock = "[[vsock]]\ncid = 3\nsocket = \"/run/v\"\nsocket_mode = \"666\"\nlimits = { regions = 2 }";
        let found = frontends(&[port(1, ""), port(2, all), vsock.to_owned()].concat());
        assert_eq!(found[0], Frontend::default());
        assert_eq!(found[0].access(), Access::default());
        let limits = Limits {
            mapped: 3 << 30,
            regions: 8,
            connects: Rate { burst: 10, rate: 5 },
            messages: Rate { burst: 280, rate: 70 },
            refusals: Rate { burst: 9, rate: 9 },
            lines: Rate { burst: 40, rate: 2 },
        };
        assert_eq!(found[1], Frontend { limits, socket_mode: 0o660, socket_owner: Some(0), socket_group: Some(7) });
        let vsock = &found[2];
        assert_eq!((vsock.socket_mode, vsock.limits.regions, vsock.limits.mapped), (0o666, 2, 1 << 40));
    }

    #[test]
    fn bursts_are_multiples_as_in_the_defaults() {
        let rates = "limits = { connects = 10, messages = 1000, refusals = 1000, lines = 1 }";
        assert_eq!(frontends(&port(1, rates))[0].limits, Limits::default());
    }

    #[test]
    fn ports_share_the_address_space() {
        let sizes = |texts: Vec<String>| -> Vec<(u64, usize)> {
            frontends(&texts.concat()).iter().map(|found| (found.limits.mapped, found.limits.regions)).collect()
        };
        let found = sizes((0..40).map(|number| port(number, "")).collect());
        assert_eq!(found, [(1 << 40, 509); 40]);
        let found = sizes((0..64).map(|number| port(number, "")).collect());
        assert_eq!(found, [((48 << 40) / 64, 24_000 / 64); 64]);
        let large = "limits = { mapped = \"40TiB\" }";
        let found = sizes((0..17).map(|number| port(number, if number == 0 { large } else { "" })).collect());
        assert_eq!((found[0].0, found[1].0), (40 << 40, 1 << 39));
        let text = [port(1, large), port(2, "limits = { mapped = \"9TiB\" }")].concat();
        let error = Config::parse(&text, "rr.toml").unwrap_err().to_string();
        assert!(error.contains("key `limits.mapped`: expected at most 48 TiB for all ports"), "{error}");
    }

    #[test]
    fn invalid_values() {
        for (rest, expected) in [
            ("limits = 3", "key `limits`: expected a table, found 3"),
            ("limits = { maped = 1 }", "key `limits.maped`: unknown key, did you mean `mapped`?"),
            ("limits = { mapped = \"1TB\" }", "key `limits.mapped`: expected \"1MiB\" to \"48TiB\""),
            ("limits = { mapped = \"99999999TiB\" }", "key `limits.mapped`: expected \"1MiB\" to \"48TiB\""),
            ("limits = { mapped = \"0GiB\" }", "key `limits.mapped`: expected \"1MiB\" to \"48TiB\""),
            ("limits = { regions = 510 }", "key `limits.regions`: expected 1 to 509, found 510"),
            ("limits = { connects = 0 }", "key `limits.connects`: expected 1 to 1000000, found 0"),
            (
                "socket_mode = \"0888\"",
                "key `socket_mode`: expected octal permissions such as \"0660\", found \"0888\"",
            ),
            ("socket_mode = \"7777\"", "key `socket_mode`: expected octal permissions"),
            ("socket_mode = 660", "key `socket_mode`: expected octal permissions such as \"0660\", found 660"),
            ("socket_owner = \"no such user\"", "key `socket_owner`: expected the name or number of a user"),
            ("socket_group = \"4294967295\"", "key `socket_group`: expected the name or number of a group"),
        ] {
            let error = Config::parse(&port(1, rest), "rr.toml").expect_err(rest).to_string();
            assert!(error.starts_with(&format!("rr.toml:5: port \"p1\": {expected}")), "{error}");
        }
        let tap = "[[port]]\nname = \"t\"\nkind = \"tap\"\ninterface = \"t0\"\nsocket_mode = \"0660\"";
        let error = Config::parse(tap, "rr.toml").unwrap_err().to_string();
        assert!(error.contains("only valid for kind \"vhost-user\""), "{error}");
    }
}
