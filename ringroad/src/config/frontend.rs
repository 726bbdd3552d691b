//! Keys that `[[port]]` and `[[vsock]]` share, about their vhost-user sockets: access, and a frontend's budgets.

use super::{ConfigError, Section, Taken, amount};
use ringroad_host::{
    group_id, user_id,
    vhost_user::{Access, Limits, Rate},
};

/// Settings of a vhost-user socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frontend {
    /// Budgets of a frontend.
    pub limits: Limits,
    /// Owner and permissions of the socket.
    pub access: Access,
}

/// The keys parsed here, besides `limits`.
pub(super) const KEYS: [&str; 3] = ["socket_mode", "socket_owner", "socket_group"];

/// Minimum address space, in bytes, of each port that does not set `limits.mapped`.
const LEAST_MAPPED: u64 = 1 << 30;

/// Keys of `limits` parsed here.
pub(super) const LIMITS: [&str; 6] = ["mapped", "regions", "connects", "messages", "refusals", "lines"];

/// `others`: further keys allowed in `limits`.
pub(super) fn frontend(table: &Section, taken: &mut Taken, others: &[&'static str]) -> Result<Frontend, ConfigError> {
    let access = Access {
        mode: table.text("socket_mode", "octal permissions such as \"0660\"", parse_mode)?.unwrap_or(0o600),
        owner: table.text("socket_owner", "the name or number of a user", |text| number_or(text, user_id))?,
        group: table.text("socket_group", "the name or number of a group", |text| number_or(text, group_id))?,
    };
    Ok(Frontend { limits: limits(table, taken, others)?, access })
}

fn limits(port: &Section, taken: &mut Taken, others: &[&'static str]) -> Result<Limits, ConfigError> {
    let default = Limits::default();
    let Some(table) = port.section("limits", "limits.")? else {
        taken.memory.push((None, None));
        return Ok(default);
    };
    table.only(&[&LIMITS[..], others].concat(), &[])?;
    let sizes = (1 << 20)..=Limits::ALL_MAPPED;
    let mapped = table.text("mapped", "\"1MiB\" to \"48TiB\", in whole MiB, GiB or TiB", |text| {
        parse_size(text).filter(|size| sizes.contains(size))
    })?;
    let regions = table.number("regions", 1..=ringroad_mem::SLOTS as u64)?.map(|regions| regions as usize);
    taken.memory.push((mapped, regions));
    // The burst is the same multiple of the rate as the default's.
    let rate = |key, default: Rate| {
        let rate = table.number(key, 1..=1_000_000)?.map(|rate| rate as u32);
        let times = default.burst / default.rate;
        Ok(rate.map_or(default, |rate| Rate { rate, burst: rate.saturating_mul(times) }))
    };
    Ok(Limits {
        mapped: mapped.unwrap_or(default.mapped),
        regions: regions.unwrap_or(default.regions),
        connects: rate("connects", default.connects)?,
        messages: rate("messages", default.messages)?,
        refusals: rate("refusals", default.refusals)?,
        lines: rate("lines", default.lines)?,
    })
}

/// Divides the remaining address space and memory regions equally among the ports that do not set their own limits. Both are
/// shared by the whole process, and each port must have enough, whatever the others do.
pub(super) fn share(root: &Section, taken: &Taken, limits: &mut [&mut Limits]) -> Result<(), ConfigError> {
    let at_least_one = |count: usize| u64::try_from(count.max(1)).unwrap_or(u64::MAX);
    let configured: u64 = taken.memory.iter().filter_map(|(mapped, _)| *mapped).fold(0, u64::saturating_add);
    let others = taken.memory.iter().filter(|(mapped, _)| mapped.is_none()).count();
    let each = Limits::ALL_MAPPED.saturating_sub(configured) / at_least_one(others);
    if configured > Limits::ALL_MAPPED || others > 0 && each < LEAST_MAPPED {
        let message = format!(
            "expected at most 48 TiB for all ports together, with 1 GiB for each port without the key; found {} TiB and {others} \
             ports without it",
            configured >> 40
        );
        return Err(root.error("limits.mapped", root.at, &message));
    }
    let configured: usize = taken.memory.iter().filter_map(|(_, regions)| *regions).sum();
    let others = taken.memory.iter().filter(|(_, regions)| regions.is_none()).count();
    let regions = Limits::ALL_REGIONS.saturating_sub(configured) / others.max(1);
    if configured > Limits::ALL_REGIONS || others > 0 && regions < 8 {
        let message = format!(
            "expected at most {} for all ports together, with 8 for each port without the key; found {configured} and {others} \
             ports without it",
            Limits::ALL_REGIONS
        );
        return Err(root.error("limits.regions", root.at, &message));
    }
    for ((own_mapped, own_regions), limits) in taken.memory.iter().zip(limits) {
        if own_mapped.is_none() {
            limits.mapped = limits.mapped.min(each);
        }
        if own_regions.is_none() {
            limits.regions = limits.regions.min(regions);
        }
    }
    Ok(())
}

fn parse_mode(text: &str) -> Option<u32> {
    let octal = text.len() <= 4 && !text.is_empty() && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    octal.then(|| u32::from_str_radix(text, 8).ok()).flatten().filter(|&mode| mode <= 0o777)
}

fn number_or(text: &str, look_up: impl Fn(&str) -> Option<u32>) -> Option<u32> {
    match amount(text, "").and_then(|number| u32::try_from(number).ok()) {
        // u32::MAX means "unchanged" to chown(2).
        Some(number) => Some(number).filter(|&number| number < u32::MAX),
        None => look_up(text),
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let units = [("MiB", 20), ("GiB", 30), ("TiB", 40)];
    units.iter().find_map(|&(unit, bits)| amount(text, unit)?.checked_mul(1 << bits))
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Kind};
    use super::*;

    fn frontends(text: &str) -> Vec<Frontend> {
        let config = Config::parse(text, "rr.toml").unwrap();
        let ports = config.ports.iter().filter_map(|port| match &port.kind {
            Kind::VhostUser { frontend, .. } => Some(*frontend),
            Kind::Tap { .. } => None,
        });
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
        let limits = Limits {
            mapped: 3 << 30,
            regions: 8,
            connects: Rate { burst: 10, rate: 5 },
            messages: Rate { burst: 280, rate: 70 },
            refusals: Rate { burst: 9, rate: 9 },
            lines: Rate { burst: 40, rate: 2 },
        };
        assert_eq!(found[1], Frontend { limits, access: Access { mode: 0o660, owner: Some(0), group: Some(7) } });
        let vsock = &found[2];
        assert_eq!((vsock.access.mode, vsock.limits.regions, vsock.limits.mapped), (0o666, 2, 1 << 40));
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
