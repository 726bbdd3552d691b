//! VERSION: the versions and capabilities of both sides. Called by `session.rs` and `client.rs`.

use super::messages::Version;
use serde_json::{Map, Value, json};
use zerocopy::{FromBytes, IntoBytes};

/// Protocol version 0.1.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;

/// `max_data_xfer_size`: bytes of one read or write.
pub(super) const TRANSFER: u32 = 64 << 10;
/// `max_msg_fds`: descriptors with one message.
pub(super) const FDS: usize = 8;
/// `pgsizes`: maps are multiples of this.
pub(super) const PAGE: u64 = 4096;

/// Capabilities of the other side that matter to this one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capabilities {
    /// REGION_WRITE_MULTI may be sent.
    pub write_multiple: bool,
    /// Bytes of one read or write.
    pub transfer: u32,
    /// Descriptors with one message.
    pub fds: usize,
}

/// Returns the payload of a proposal, or of the reply to one. A reply has `write_multiple` only if that was proposed. It is shorter
/// than any proposal of QEMU, which has no room for a longer one.
pub(super) fn payload(minor: u16, regions: usize, write_multiple: bool) -> Vec<u8> {
    let mut capabilities = json!({
        "max_msg_fds": FDS,
        "max_data_xfer_size": TRANSFER,
        "max_dma_maps": regions,
        "pgsizes": PAGE,
    });
    if write_multiple && let Some(capabilities) = capabilities.as_object_mut() {
        capabilities.insert("write_multiple".to_owned(), true.into());
    }
    let version = Version { major: MAJOR, minor };
    let text = json!({ "capabilities": capabilities }).to_string();
    [version.as_bytes(), text.as_bytes(), &[0]].concat()
}

/// Returns the payload of a proposal.
pub(super) fn proposal() -> Vec<u8> {
    payload(MINOR, ringroad_mem::SLOTS, true)
}

/// Checks a proposal, or the reply to one. Returns the minor version that both have, and the other side's capabilities.
pub(super) fn check(payload: &[u8]) -> Result<(u16, Capabilities), String> {
    let Ok((version, text)) = Version::read_from_prefix(payload) else {
        return Err(format!("VERSION with {} bytes, expected at least 4", payload.len()));
    };
    if version.major != MAJOR {
        return Err(format!("vfio-user {}.{}, expected {MAJOR}.x", version.major, version.minor));
    }
    let top = match text.split_last() {
        None => Map::new(),
        Some((0, text)) => match serde_json::from_slice(text) {
            Ok(Value::Object(top)) => top,
            Ok(_) => return Err("version data that is no JSON object".to_owned()),
            Err(error) => return Err(format!("version data that is no JSON: {error}")),
        },
        Some(_) => return Err("version data without a NUL at the end".to_owned()),
    };
    let none = Map::new();
    let capabilities = match top.get("capabilities") {
        None => &none,
        Some(Value::Object(capabilities)) => capabilities,
        Some(_) => return Err("capabilities that are no JSON object".to_owned()),
    };
    let number = |name: &str, default: u64| match capabilities.get(name) {
        None => Ok(default),
        Some(value) => {
            value.as_u64().ok_or_else(|| format!("capability {name} = {:.40}, expected a number", value.to_string()))
        }
    };
    let write_multiple = match capabilities.get("write_multiple") {
        None => false,
        Some(Value::Bool(value)) => *value,
        Some(value) => {
            return Err(format!("capability write_multiple = {:.40}, expected true or false", value.to_string()));
        }
    };
    let transfer = number("max_data_xfer_size", 1 << 20)?.min(TRANSFER.into()) as u32;
    let fds = number("max_msg_fds", 1)?.min(FDS as u64) as usize;
    Ok((version.minor.min(MINOR), Capabilities { write_multiple, transfer, fds }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&[0, 0, 1, 0][..], text.as_bytes(), &[0]].concat()
    }

    #[test]
    fn both_sides_understand_each_other() {
        let (minor, capabilities) = check(&proposal()).unwrap();
        assert_eq!((minor, capabilities.write_multiple), (MINOR, true));
        assert_eq!((capabilities.transfer, capabilities.fds), (TRANSFER, FDS));
        assert!(!check(&payload(0, 7, false)).unwrap().1.write_multiple);
        // QEMU 11.1 proposes this; the reply must not be longer.
        let qemu = r#"{"capabilities": {"max_msg_fds": 16, "max_data_xfer_size": 1048576, "max_dma_maps": 65535, "pgsizes": 4096,
            "write_multiple": true, "migration": {"pgsize": 4096, "max_bitmap_size": 268435456}}}"#
            .replace("\n            ", " ");
        assert!(check(&text(&qemu)).unwrap().1.write_multiple);
        assert!(payload(0, 509, true).len() <= 4 + qemu.len());
    }

    #[test]
    fn defaults_hold_without_capabilities() {
        for payload in [vec![0; 4], text("{}"), text(r#"{"capabilities":{}}"#)] {
            let (minor, capabilities) = check(&payload).unwrap();
            assert!(minor <= MINOR && !capabilities.write_multiple);
            assert_eq!((capabilities.transfer, capabilities.fds), (TRANSFER, 1));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let deep = "[".repeat(50_000);
        for payload in [
            vec![],
            vec![0; 3],
            vec![1, 0, 0, 0],
            vec![0, 0, 0, 0, b'{', b'}'],
            text("{"),
            text("[]"),
            text(r#"{"capabilities":7}"#),
            text(r#"{"capabilities":{"max_msg_fds":-1}}"#),
            text(r#"{"capabilities":{"max_data_xfer_size":1e99}}"#),
            text(r#"{"capabilities":{"write_multiple":1}}"#),
            text(&deep),
            [&[0; 4][..], &[0xff; 9], &[0]].concat(),
        ] {
            assert!(check(&payload).is_err(), "{:?}", payload.iter().take(80).collect::<Vec<_>>());
        }
    }
}
