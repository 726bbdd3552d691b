//! `[sandbox]`: rights that the daemon keeps for later reloads, beyond what the rest of the file needs; and the check of a
//! reloaded configuration against the confinement in force.

use super::value::list;
use ringroad_host::sandbox::Privilege;
use serde::{Deserialize, Deserializer};
use std::path::PathBuf;

/// The `[sandbox]` table.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Whether to exit if the kernel lacks a part.
    pub require: bool,
    /// Directories in which a reload may create sockets.
    #[serde(deserialize_with = "folders")]
    pub folders: Vec<PathBuf>,
    /// TCP ports that a reload may forward to.
    #[serde(deserialize_with = "tcp")]
    pub tcp: Vec<u16>,
    /// Capabilities that a reload may need.
    #[serde(deserialize_with = "capabilities")]
    pub capabilities: Vec<Privilege>,
}

fn folders<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<PathBuf>, D::Error> {
    list(node, "a list of directories, each an absolute path", |value| {
        value.as_str().map(PathBuf::from).filter(|path| path.is_absolute())
    })
}

fn tcp<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<u16>, D::Error> {
    list(node, "a list of TCP ports, 1 to 65535", |value| {
        value.as_integer()?.try_into().ok().filter(|&port: &u16| port > 0)
    })
}

fn capabilities<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<Privilege>, D::Error> {
    let names = Privilege::ALL.map(|privilege| format!("{:?}", privilege.name())).join(", ");
    list(node, &format!("a list of capabilities out of {names}"), |value| {
        Privilege::ALL.into_iter().find(|privilege| Some(privilege.name()) == value.as_str())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const PORT: &str = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket = \"/run/a\"\n";

    #[test]
    fn keys_and_defaults() {
        let parse = |text: &str| Config::parse(&format!("{text}\n{PORT}"), "rr.toml").unwrap().sandbox;
        assert_eq!(parse(""), Sandbox::default());
        let all = "[sandbox]\nrequire = true\nfolders = [\"/run/a\", \"/run/b\"]\ntcp = [22, 0x50]\ncapabilities = [\"net_admin\", \"chown\"]";
        let expected = Sandbox {
            require: true,
            folders: vec!["/run/a".into(), "/run/b".into()],
            tcp: vec![22, 80],
            capabilities: vec![Privilege::NetAdmin, Privilege::Chown],
        };
        assert_eq!(parse(all), expected);
    }

    #[test]
    fn invalid_values() {
        for (text, expected) in [
            ("folders = \"/run\"", "2: key `sandbox.folders`: expected a list of directories, each an absolute path"),
            ("folders = [\"run\"]", "2: key `sandbox.folders`: expected a list of directories, each an absolute path"),
            ("tcp = [0]", "2: key `sandbox.tcp`: expected a list of TCP ports, 1 to 65535, found"),
            ("tcp = [65536]", "2: key `sandbox.tcp`: expected a list of TCP ports"),
            (
                "capabilities = [\"sys_admin\"]",
                "2: key `sandbox.capabilities`: expected a list of capabilities out of \"net_admin\"",
            ),
            ("required = true", "2: key `sandbox.required`: unknown key, did you mean `require`?"),
        ] {
            let found = Config::parse(&format!("[sandbox]\n{text}\n{PORT}"), "rr.toml").expect_err(text).to_string();
            assert!(found.starts_with(&format!("rr.toml:{expected}")), "{text}\n{found}");
        }
    }
}
