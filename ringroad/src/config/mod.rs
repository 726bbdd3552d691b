//! The configuration file of `ringroad serve -c FILE`: read once, validated in full, turned into plain structs.
//!
//! `serve` calls [`Config::load`] at start and for each reload. The file is walked by hand rather than through serde, so that
//! each error names the line and the key at fault, also where the syntax is valid and the value is not.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable)
)]

mod check;
mod frontend;
mod sandbox;
mod vsock;

pub use check::{Finding, check, owner, vsock_owner};
pub use frontend::Frontend;
pub use sandbox::{Sandbox, barred, barred_forwards, folder, gives_away};
pub use vsock::Vsock;

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::ports::Mode;
use ringroad_host::vhost_user::Role;
use ringroad_net::Features;
use ringroad_ring::Tuning;
use ringroad_switch::{Gather, Limits, Poll};
use ringroad_wire::ethernet::MacAddr;
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Maximum size of the file, in bytes.
const MAX_FILE: usize = 1 << 20;
/// Maximum length of a Unix socket's path, in bytes: `sun_path` less the terminating NUL.
const MAX_SOCKET: usize = 107;
/// Maximum length of an interface name, in bytes: IFNAMSIZ less the terminating NUL.
const MAX_INTERFACE: usize = 15;
const MAX_POLL: Duration = Duration::from_secs(10);
/// Microseconds.
const MAX_GATHER: u64 = 100;

/// A parsed configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `[log]`.
    pub log: Log,
    /// `[workers]`.
    pub workers: Workers,
    /// `[switch]`.
    pub switch: SwitchConfig,
    /// `[sandbox]`.
    pub sandbox: Sandbox,
    /// `[[port]]`, in the order of the file.
    pub ports: Vec<Port>,
    /// `[[vsock]]`, in the order of the file. There is at least one port or device.
    pub vsocks: Vec<Vsock>,
    /// Line numbers of some keys, for later findings.
    pub places: Places,
}

/// Limits of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Maximum number of lines a second, in total.
    pub lines: u32,
}

/// Line numbers of keys, by owner and key, whose values can be valid and still not work on this machine. They are not part of the
/// configuration's value: all places compare equal.
#[derive(Clone, Debug, Default)]
pub struct Places(HashMap<(String, String), usize>);

impl PartialEq for Places {
    fn eq(&self, _: &Places) -> bool {
        true
    }
}

impl Eq for Places {}

impl Places {
    /// Returns the line of an owner's key ("port \"vm1\"", "socket"), else that of the owner, else 1.
    pub fn line(&self, owner: &str, key: &str) -> usize {
        let line = |key: &str| self.0.get(&(owner.to_owned(), key.to_owned())).copied();
        line(key).or_else(|| line("")).unwrap_or(1)
    }
}

/// The threads that forward frames; in this version one, shared by all ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workers {
    /// The CPU of each worker; at most one in this version; empty: not pinned.
    pub cpus: Vec<usize>,
    /// How long a worker polls an empty queue before it sleeps.
    pub poll: Poll,
    /// How long a worker pauses after a partial burst, so that a slower driver can fill the queue.
    pub gather: Gather,
    /// Quantum of a queue: full bursts that are forwarded before the next queue's turn.
    pub turn: usize,
}

/// The forwarding table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Time without a frame after which an address is forgotten.
    pub ageing: Duration,
    /// Minimum capacity, in addresses.
    pub entries: usize,
    /// How long an address must be silent before it can move to another port.
    pub move_after: Duration,
}

/// One port of the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Unique among the ports; letters, digits, `_`, `.` and `-`.
    pub name: String,
    /// What is done with received frames.
    pub mode: Mode,
    /// Whether frames may be sent back to the port that they came from.
    pub hairpin: bool,
    /// The MTU in bytes, if set in the file.
    pub mtu: Option<u16>,
    /// Overrides [`Workers::poll`] for this port.
    pub poll: Option<Poll>,
    /// Limits on its effect on other ports.
    pub limits: Limits,
    /// The kind of port, with the settings of that kind.
    pub kind: Kind,
}

/// The kinds of port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A guest, over vhost-user.
    VhostUser {
        /// Path of the Unix socket; unique.
        socket: PathBuf,
        /// Whether ringroad listens on the socket or connects to it.
        role: Role,
        /// Features offered to the driver.
        features: Features,
        /// Queue pairs, 1 to 16.
        queues: u16,
        /// The MAC address advertised to the guest, if set in the file.
        mac: Option<MacAddr>,
        /// Optimisations that can be turned off for measurements.
        tuning: Tuning,
        /// Access to the socket, and a frontend's budgets.
        frontend: Frontend,
    },
    /// The host's network stack, through a TAP interface.
    Tap {
        /// Name of the interface, unique among the ports.
        interface: String,
        /// Queue pairs, 1 to 16.
        queues: u16,
    },
}

/// The first error in a file.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: {error}")]
    Read {
        /// The file.
        file: String,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The file is larger than any sensible configuration.
    #[error("{file}: expected at most {MAX_FILE} bytes, found more")]
    TooLarge {
        /// The file.
        file: String,
    },
    /// A line is not UTF-8, not TOML, or has an invalid key or value.
    #[error("{file}:{line}: {message}")]
    Line {
        /// The file.
        file: String,
        /// The line, counted from 1.
        line: usize,
        /// Port and key, what was expected and what was found.
        message: String,
    },
}

impl Config {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read or is not a valid configuration.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let file = path.display().to_string();
        let mut bytes = Vec::new();
        // Bounded by what is read, not by the file's size: a device or a pipe reports none.
        let read = File::open(path).and_then(|open| open.take(MAX_FILE as u64 + 1).read_to_end(&mut bytes));
        if let Err(error) = read {
            return Err(ConfigError::Read { file, error });
        }
        if bytes.len() > MAX_FILE {
            return Err(ConfigError::TooLarge { file });
        }
        match str::from_utf8(&bytes) {
            Ok(text) => Config::parse(text, &file),
            Err(error) => {
                let line = line(&bytes, error.valid_up_to());
                Err(ConfigError::Line { file, line, message: "expected UTF-8, found an invalid byte".into() })
            }
        }
    }

    /// Parses `text`; errors name it `file`.
    ///
    /// # Errors
    /// [`ConfigError::Line`]: the text is not a valid configuration.
    pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
        let source = Source { file, text };
        let (root, errors) = DeTable::parse_recoverable(text);
        // The first by position, not in the parser's order: it reports an unterminated string after its consequences.
        if let Some(error) = errors.iter().min_by_key(|error| error.span().map(|span| span.start)) {
            return Err(source.syntax(error));
        }
        let root = Section { source, owner: String::new(), prefix: "", table: root.get_ref(), at: 0 };
        root.only(&["log", "workers", "switch", "sandbox", "port", "vsock"], &["e1000"])?;
        let mut taken = Taken::default();
        let (log, workers, switch) = (log(&root)?, workers(&root, &mut taken)?, switch(&root)?);
        let mut ports = ports(&root, &mut taken)?;
        let mut vsocks = vsock::vsocks(&root, &mut taken)?;
        let limits = ports.iter_mut().filter_map(|port| match &mut port.kind {
            Kind::VhostUser { frontend, .. } => Some(&mut frontend.limits),
            Kind::Tap { .. } => None,
        });
        let mut limits: Vec<_> = limits.chain(vsocks.iter_mut().map(|vsock| &mut vsock.frontend.limits)).collect();
        frontend::share(&root, &taken, &mut limits)?;
        let sandbox = sandbox::sandbox(&root)?;
        Ok(Config { log, workers, switch, sandbox, ports, vsocks, places: taken.places })
    }
}

impl Default for Log {
    fn default() -> Log {
        Log { lines: crate::logger::LINES }
    }
}

impl Default for Workers {
    fn default() -> Workers {
        Workers { cpus: Vec::new(), poll: Poll::For(Duration::ZERO), gather: Gather::Auto, turn: 4 }
    }
}

impl Default for SwitchConfig {
    fn default() -> SwitchConfig {
        SwitchConfig { ageing: Duration::from_secs(300), entries: 4096, move_after: Duration::from_secs(2) }
    }
}

fn log(root: &Section) -> Result<Log, ConfigError> {
    let default = Log::default();
    let Some(table) = root.section("log", "log.")? else { return Ok(default) };
    table.only(&["lines"], &[])?;
    Ok(Log { lines: table.number("lines", 1..=1_000_000)?.map_or(default.lines, |lines| lines as u32) })
}

fn workers(root: &Section, taken: &mut Taken) -> Result<Workers, ConfigError> {
    let default = Workers::default();
    let Some(table) = root.section("workers", "workers.")? else { return Ok(default) };
    table.only(&["model", "cpus", "poll", "gather", "turn"], &[])?;
    table.one_of("model", &[("shared", Some(())), ("per-device", None), ("per-queue", None), ("dynamic", None)])?;
    let poll = table.poll()?.unwrap_or(default.poll);
    let expected = "\"auto\", \"off\" or \"<N>us\" (at most 100 us)";
    let gather = table.text("gather", expected, parse_gather)?.unwrap_or(default.gather);
    let turn = table.number("turn", 1..=64)?.map_or(default.turn, |bursts| bursts as usize);
    taken.note(&table, "cpus");
    let Some(list) = table.get("cpus") else { return Ok(Workers { poll, gather, turn, ..default }) };
    let expected = "a list of at most one CPU (this version has one worker)";
    let cpus = list.get_ref().as_array().ok_or_else(|| table.wrong("cpus", list, expected))?;
    if let Some(second) = cpus.get(1) {
        let message = format!("expected {expected}, found {}", cpus.len());
        return Err(table.error("cpus", second.span().start, &message));
    }
    let cpus = cpus.iter().map(|cpu| table.integer("cpus", cpu, 0..=1023).map(|cpu| cpu as usize));
    Ok(Workers { poll, gather, turn, cpus: cpus.collect::<Result<_, _>>()? })
}

fn switch(root: &Section) -> Result<SwitchConfig, ConfigError> {
    let default = SwitchConfig::default();
    let Some(table) = root.section("switch", "switch.")? else { return Ok(default) };
    table.only(&["ageing", "entries", "move_after"], &[])?;
    let seconds = |text: &str, least| {
        amount(text, "s").filter(|seconds| (least..=1_000_000).contains(seconds)).map(Duration::from_secs)
    };
    let ageing = table.text("ageing", "\"1s\" to \"1000000s\"", |text| seconds(text, 1))?;
    let move_after = table.text("move_after", "\"0s\" to \"1000000s\"", |text| seconds(text, 0))?;
    let entries = table.number("entries", 1..=1 << 20)?.map(|entries| entries as usize);
    Ok(SwitchConfig {
        ageing: ageing.unwrap_or(default.ageing),
        entries: entries.unwrap_or(default.entries),
        move_after: move_after.unwrap_or(default.move_after),
    })
}

fn ports(root: &Section, taken: &mut Taken) -> Result<Vec<Port>, ConfigError> {
    let expected = "at least one port, written [[port]]";
    let Some(list) = root.get("port") else {
        // A file with vsock devices alone needs no ports.
        return if root.get("vsock").is_some() { Ok(Vec::new()) } else { Err(root.missing("port", expected)) };
    };
    let tables = list.get_ref().as_array().filter(|tables| !tables.is_empty());
    let tables = tables.ok_or_else(|| root.wrong("port", list, expected))?;
    let port = |(index, value): (usize, &Spanned<DeValue>)| {
        let table = value.get_ref().as_table().ok_or_else(|| root.wrong("port", value, expected))?;
        let owner = match table_name(table) {
            Some(name) => format!("port {name:?}"),
            None => format!("port {}", index + 1),
        };
        port(&Section { source: root.source, owner, prefix: "", table, at: value.span().start }, taken)
    };
    tables.iter().enumerate().map(port).collect()
}

/// Values that must be unique, with the offset of their first use, and other state gathered while parsing.
#[derive(Default)]
struct Taken {
    names: HashMap<String, usize>,
    sockets: HashMap<PathBuf, usize>,
    interfaces: HashMap<String, usize>,
    cids: HashMap<u64, usize>,
    macs: HashMap<MacAddr, usize>,
    places: Places,
    /// `limits.mapped` and `limits.regions` of each guest, if set, in the order of the file.
    memory: Vec<(Option<u64>, Option<usize>)>,
}

impl Taken {
    /// Records the line of a key, if it is present; the empty key is the table itself.
    fn note(&mut self, table: &Section, key: &str) {
        let at = if key.is_empty() { Some(table.at) } else { table.get(key).map(|value| value.span().start) };
        if let Some(at) = at {
            let line = line(table.source.text.as_bytes(), at);
            self.places.0.insert((table.owner.clone(), key.to_owned()), line);
        }
    }
}

#[derive(Clone, Copy)]
enum KindName {
    VhostUser,
    Tap,
}

fn port(table: &Section, taken: &mut Taken) -> Result<Port, ConfigError> {
    const COMMON: [&str; 9] = ["name", "kind", "mode", "hairpin", "queues", "mtu", "poll", "limits", "link_local"];
    const VHOST_USER: [&str; 6] = ["socket", "role", "features", "mac", "addresses", "tuning"];
    const TAP: [&str; 1] = ["interface"];
    table.only(&[&COMMON[..], &VHOST_USER, &frontend::KEYS, &TAP].concat(), &["xdp"])?;

    let expected = "1 to 32 letters, digits, `_`, `.` or `-`";
    let name = table.text("name", expected, |text| is_name(text).then(|| text.to_owned()))?;
    let name = name.ok_or_else(|| table.missing("name", expected))?;
    table.unique("name", &name, &mut taken.names)?;
    ["", "socket", "interface", "queues", "mac"].into_iter().for_each(|key| taken.note(table, key));
    let kinds = [("vhost-user", Some(KindName::VhostUser)), ("tap", Some(KindName::Tap)), ("af-xdp", None)];
    let kind = table.one_of("kind", &kinds)?;
    let kind = kind.ok_or_else(|| table.missing("kind", "\"vhost-user\" or \"tap\""))?;
    match kind {
        KindName::VhostUser => table.foreign(&TAP, "tap", "vhost-user")?,
        KindName::Tap => table.foreign(&[&VHOST_USER[..], &frontend::KEYS].concat(), "vhost-user", "tap")?,
    }
    let modes = [
        ("switch", Some(Mode::Switch)),
        ("reflect", Some(Mode::Reflect)),
        ("drop", Some(Mode::Drop)),
        ("generate", Some(Mode::Generate)),
    ];
    let mode = table.one_of("mode", &modes)?.unwrap_or(Mode::Switch);
    // Nothing would wake a generating port: no frames arrive.
    let poll = table.poll()?.or((mode == Mode::Generate).then_some(Poll::Unlimited));
    let queues = table.number("queues", 1..=16)?.unwrap_or(1) as u16;
    let (hairpin, mtu) = (table.boolean("hairpin", false)?, table.number("mtu", 68..=65535)?.map(|mtu| mtu as u16));
    let (kind, default) = match kind {
        KindName::VhostUser => (vhost_user(table, queues, taken)?, Limits::GUEST),
        KindName::Tap => (tap(table, queues, taken)?, Limits::NETWORK),
    };
    let limits = limits(table, &kind, default)?;
    Ok(Port { name, mode, hairpin, mtu, poll, limits, kind })
}

/// Keys of `limits` that bound a port's effect on other ports.
const NEIGHBOURS: [&str; 2] = ["addresses", "storm"];

/// Parses the limits on a port's effect on other ports.
fn limits(port: &Section, kind: &Kind, default: Limits) -> Result<Limits, ConfigError> {
    let own = match kind {
        Kind::VhostUser { mac, .. } => *mac,
        Kind::Tap { .. } => None,
    };
    let fixed = port.one_of("addresses", &[("learn", Some(false)), ("fixed", Some(true))])?.unwrap_or(default.fixed);
    if let Some(value) = port.get("addresses").filter(|_| fixed && own.is_none()) {
        let message = "\"fixed\" requires key `mac`, which is missing";
        return Err(port.error("addresses", value.span().start, message));
    }
    let link_local = port.one_of("link_local", &[("drop", Some(false)), ("forward", Some(true))])?;
    let limits = Limits { own, fixed, link_local: link_local.unwrap_or(default.link_local), ..default };
    let Some(table) = port.section("limits", "limits.")? else { return Ok(limits) };
    let frontend: &[&str] = if matches!(kind, Kind::VhostUser { .. }) { &frontend::LIMITS } else { &[] };
    table.only(&[&NEIGHBOURS[..], frontend].concat(), &[])?;
    let addresses = table.number("addresses", 1..=1 << 18)?.map_or(limits.addresses, |addresses| addresses as u32);
    let storm = match table.get("storm") {
        None => limits.storm,
        Some(value) if value.get_ref().as_str() == Some("unlimited") => 0,
        Some(value) => {
            let expected = "1 to 1000000000 frames a second or \"unlimited\"";
            let number = table.integer("storm", value, 1..=1_000_000_000);
            number.map_err(|_| table.wrong("storm", value, expected))? as u32
        }
    };
    Ok(Limits { addresses, storm, ..limits })
}

/// Parses the path and role of a vhost-user socket.
fn socket(table: &Section, taken: &mut Taken) -> Result<(PathBuf, Role), ConfigError> {
    let (socket, expected) = table.path("socket", MAX_SOCKET)?;
    let socket = socket.ok_or_else(|| table.missing("socket", &expected))?;
    let roles = [("server", Some(Role::Server)), ("client", Some(Role::Client))];
    let role = table.one_of("role", &roles)?.unwrap_or(Role::Server);
    table.unique("socket", &socket, &mut taken.sockets)?;
    Ok((socket, role))
}

fn vhost_user(table: &Section, queues: u16, taken: &mut Taken) -> Result<Kind, ConfigError> {
    let (socket, role) = socket(table, taken)?;
    let mac = table.text("mac", "a unicast, non-zero address such as 52:54:00:12:34:56", |text| {
        text.parse().ok().filter(|mac: &MacAddr| !mac.is_multicast() && !mac.is_zero())
    })?;
    if let Some(mac) = mac {
        table.unique("mac", &mac, &mut taken.macs)?;
    }
    let (features, tuning, frontend) =
        (features(table)?, tuning(table)?, frontend::frontend(table, taken, &NEIGHBOURS)?);
    Ok(Kind::VhostUser { socket, role, features, queues, mac, tuning, frontend })
}

fn tuning(port: &Section) -> Result<Tuning, ConfigError> {
    let default = Tuning::default();
    let Some(table) = port.section("tuning", "tuning.")? else { return Ok(default) };
    table.only(&["fast_path", "shadow_used", "prefetch", "prefetch_write", "translation_cache", "small_copy"], &[])?;
    Ok(Tuning {
        fast_path: table.boolean("fast_path", default.fast_path)?,
        shadow_used: table.boolean("shadow_used", default.shadow_used)?,
        prefetch: table.number("prefetch", 0..=31)?.map_or(default.prefetch, |frames| frames as u16),
        prefetch_write: table.boolean("prefetch_write", default.prefetch_write)?,
        translation_cache: table.boolean("translation_cache", default.translation_cache)?,
        small_copy: table.boolean("small_copy", default.small_copy)?,
    })
}

fn features(port: &Section) -> Result<Features, ConfigError> {
    let default = Features::ALL;
    let Some(table) = port.section("features", "features.")? else { return Ok(default) };
    table.only(&["packed", "in_order", "mrg_rxbuf", "event_idx", "indirect", "mac", "status", "mtu"], &[])?;
    Ok(Features {
        packed: table.boolean("packed", default.packed)?,
        in_order: table.boolean("in_order", default.in_order)?,
        mrg_rxbuf: table.boolean("mrg_rxbuf", default.mrg_rxbuf)?,
        event_idx: table.boolean("event_idx", default.event_idx)?,
        indirect: table.boolean("indirect", default.indirect)?,
        mac: table.boolean("mac", default.mac)?,
        status: table.boolean("status", default.status)?,
        mtu: table.boolean("mtu", default.mtu)?,
    })
}

fn tap(table: &Section, queues: u16, taken: &mut Taken) -> Result<Kind, ConfigError> {
    let expected = format!("the name of an interface, 1 to {MAX_INTERFACE} bytes without `/`, `:`, `%` or space");
    let interface = table.text("interface", &expected, |text| is_interface(text).then(|| text.to_owned()))?;
    let interface = interface.ok_or_else(|| table.missing("interface", &expected))?;
    table.unique("interface", &interface, &mut taken.interfaces)?;
    Ok(Kind::Tap { interface, queues })
}

/// Returns the MAC address advertised to a port's guest: the configured one, or one derived from the port's name (FNV-1a), so
/// that a guest keeps it across restarts.
pub fn mac(port: &Port) -> MacAddr {
    let named =
        || port.name.bytes().fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    match &port.kind {
        Kind::VhostUser { mac: Some(mac), .. } => *mac,
        _ => MacAddr::local(named()),
    }
}

fn is_name(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=32).contains(&text.len()) && text.bytes().all(good)
}

/// The kernel's rule (`dev_valid_name`), and no `%`, which would make the kernel pick a number.
fn is_interface(text: &str) -> bool {
    let bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':' | '%');
    (1..=MAX_INTERFACE).contains(&text.len()) && !matches!(text, "." | "..") && !text.contains(bad)
}

/// Parses N from `N<unit>`, digits only.
fn amount(text: &str, unit: &str) -> Option<u64> {
    let digits = text.strip_suffix(unit)?;
    // `parse` would accept a sign.
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

fn parse_poll(text: &str) -> Option<Poll> {
    match text {
        "0" => return Some(Poll::For(Duration::ZERO)),
        "unlimited" => return Some(Poll::Unlimited),
        _ => {}
    }
    let time = amount(text, "us").map(Duration::from_micros).or(amount(text, "ms").map(Duration::from_millis))?;
    (time <= MAX_POLL).then_some(Poll::For(time))
}

fn parse_gather(text: &str) -> Option<Gather> {
    match text {
        "auto" => Some(Gather::Auto),
        "off" => Some(Gather::Off),
        _ => amount(text, "us").filter(|&time| time <= MAX_GATHER).map(|time| Gather::For(Duration::from_micros(time))),
    }
}

/// Returns a port's name if it is valid, so that errors can use it.
fn table_name<'a>(table: &'a DeTable) -> Option<&'a str> {
    table.get("name")?.get_ref().as_str().filter(|name| is_name(name))
}

/// The file's name and text, for errors.
#[derive(Clone, Copy)]
struct Source<'a> {
    file: &'a str,
    text: &'a str,
}

impl Source<'_> {
    fn error(&self, at: usize, message: String) -> ConfigError {
        ConfigError::Line { file: self.file.to_owned(), line: line(self.text.as_bytes(), at), message }
    }

    fn syntax(&self, error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or_default();
        let message = format!("not valid TOML: {}", error.message().replace('\n', " "));
        match self.text.get(span.clone()) {
            Some(found) if !found.trim().is_empty() => {
                self.error(span.start, format!("{message}, found {}", quote(found)))
            }
            _ => self.error(span.start, message),
        }
    }
}

/// One table of the file, with the context for its errors.
struct Section<'a> {
    source: Source<'a>,
    /// The port or device that it belongs to; empty if none.
    owner: String,
    /// Prefix of its keys in messages: `workers.`, or empty.
    prefix: &'static str,
    table: &'a DeTable<'a>,
    /// Its byte offset in the file.
    at: usize,
}

impl<'a> Section<'a> {
    fn get(&self, key: &str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.table.get(key)
    }

    fn error(&self, key: &str, at: usize, message: &str) -> ConfigError {
        let owner = if self.owner.is_empty() { String::new() } else { format!("{}: ", self.owner) };
        self.source.error(at, format!("{owner}key `{}{}`: {message}", self.prefix, key.escape_debug()))
    }

    fn wrong(&self, key: &str, value: &Spanned<DeValue>, expected: &str) -> ConfigError {
        let message = format!("expected {expected}, found {}", describe(value.get_ref()));
        self.error(key, value.span().start, &message)
    }

    fn missing(&self, key: &str, expected: &str) -> ConfigError {
        self.error(key, self.at, &format!("missing, expected {expected}"))
    }

    /// Returns a table within this one.
    fn section(&self, key: &str, prefix: &'static str) -> Result<Option<Section<'a>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let table = value.get_ref().as_table().ok_or_else(|| self.wrong(key, value, "a table"))?;
        let (source, owner, at) = (self.source, self.owner.clone(), value.span().start);
        Ok(Some(Section { source, owner, prefix, table, at }))
    }

    /// Fails at the first key that is not in `known`. `planned`: keys reserved for later versions.
    fn only(&self, known: &[&str], planned: &[&str]) -> Result<(), ConfigError> {
        let unknown = self.table.keys().filter(|key| !known.contains(&key.get_ref().as_ref()));
        // The parser sorts keys by name; report the first in the file.
        let Some(key) = unknown.min_by_key(|key| key.span().start) else { return Ok(()) };
        let name = key.get_ref().as_ref();
        let message = if planned.contains(&name) {
            "not supported by this version".to_owned()
        } else {
            let near = known.iter().map(|known| (distance(known, &shorten(name)), known)).min();
            match near.filter(|&(distance, known)| distance <= known.len() / 3) {
                Some((_, near)) => format!("unknown key, did you mean `{near}`?"),
                None => format!("unknown key, expected one of {}", list(known, '`', "or")),
            }
        };
        Err(self.error(&shorten(name), key.span().start, &message))
    }

    /// Fails at a key of `keys`, which are valid for ports of kind `valid` only.
    fn foreign(&self, keys: &[&str], valid: &str, kind: &str) -> Result<(), ConfigError> {
        let found = self.table.keys().filter(|key| keys.contains(&key.get_ref().as_ref()));
        let Some(key) = found.min_by_key(|key| key.span().start) else { return Ok(()) };
        let message = format!("only valid for kind {valid:?}, but this port is of kind {kind:?}; remove it");
        Err(self.error(key.get_ref(), key.span().start, &message))
    }

    fn text<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let converted = value.get_ref().as_str().and_then(convert);
        converted.map(Some).ok_or_else(|| self.wrong(key, value, expected))
    }

    /// Parses one of several texts; those without a value are reserved for later versions.
    fn one_of<T: Copy>(&self, key: &str, choices: &[(&str, Option<T>)]) -> Result<Option<T>, ConfigError> {
        let available = choices.iter().filter(|(_, value)| value.is_some()).map(|&(name, _)| name);
        let expected = list(&available.collect::<Vec<_>>(), '"', "or");
        let choice = self.text(key, &expected, |text| choices.iter().find(|(name, _)| *name == text))?;
        match (choice, self.get(key)) {
            (Some((name, None)), Some(value)) => {
                let message = format!("expected {expected}, found {name:?}, which this version does not support");
                Err(self.error(key, value.span().start, &message))
            }
            (choice, _) => Ok(choice.and_then(|&(_, value)| value)),
        }
    }

    /// Parses the path of a Unix socket of at most `max` bytes; also returns the description for messages.
    fn path(&self, key: &str, max: usize) -> Result<(Option<PathBuf>, String), ConfigError> {
        let expected = format!("the path of a Unix socket, 1 to {max} bytes");
        let path = self.text(key, &expected, |text| {
            ((1..=max).contains(&text.len()) && !text.contains('\0')).then(|| PathBuf::from(text))
        })?;
        Ok((path, expected))
    }

    /// Parses a list whose elements `convert` accepts; empty if the key is absent.
    fn list<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&DeValue) -> Option<T>,
    ) -> Result<Vec<T>, ConfigError> {
        let Some(list) = self.get(key) else { return Ok(Vec::new()) };
        let values = list.get_ref().as_array().ok_or_else(|| self.wrong(key, list, expected))?;
        let value = |value: &Spanned<DeValue>| convert(value.get_ref()).ok_or_else(|| self.wrong(key, value, expected));
        values.iter().map(value).collect()
    }

    fn number(&self, key: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ConfigError> {
        self.get(key).map(|value| self.integer(key, value, range)).transpose()
    }

    fn integer(&self, key: &str, value: &Spanned<DeValue>, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        let number = value.get_ref().as_integer();
        let number = number.and_then(|number| u64::from_str_radix(number.as_str(), number.radix()).ok());
        number
            .filter(|number| range.contains(number))
            .ok_or_else(|| self.wrong(key, value, &format!("{} to {}", range.start(), range.end())))
    }

    fn boolean(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.get_ref().as_bool().ok_or_else(|| self.wrong(key, value, "true or false"))
    }

    fn poll(&self) -> Result<Option<Poll>, ConfigError> {
        self.text("poll", "\"0\", \"<N>us\", \"<N>ms\" (at most 10 s) or \"unlimited\"", parse_poll)
    }

    /// Fails if the same `value` was used earlier in the file.
    fn unique<K: Clone + Eq + Hash>(
        &self,
        key: &str,
        value: &K,
        taken: &mut HashMap<K, usize>,
    ) -> Result<(), ConfigError> {
        let Some(found) = self.get(key) else { return Ok(()) };
        let at = found.span().start;
        let Some(first) = taken.insert(value.clone(), at) else { return Ok(()) };
        let first = line(self.source.text.as_bytes(), first);
        let found = describe(found.get_ref());
        Err(self.error(key, at, &format!("duplicate {key} {found}, already used in line {first}")))
    }
}

/// Returns the line, from 1, of the byte at `at`.
fn line(text: &[u8], at: usize) -> usize {
    1 + text.iter().take(at).filter(|&&byte| byte == b'\n').count()
}

/// Formats a value for a message.
fn describe(value: &DeValue) -> String {
    match value {
        DeValue::String(text) => quote(text),
        DeValue::Integer(number) => shorten(&number.to_string()),
        DeValue::Float(number) => shorten(number.as_str()),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(list) if list.is_empty() => "an empty list".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

fn quote(text: &str) -> String {
    format!("{:?}", shorten(text))
}

/// Cuts a text to what fits into a message.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Joins names: `a`, `b` and `c`.
fn list(names: &[&str], quote: char, last: &str) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("{quote}{name}{quote}")).collect();
    match quoted.split_last() {
        Some((end, rest)) if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// Returns the edit distance (Levenshtein) between `a` and `b`.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut left = i + 1;
        let mut row = vec![left];
        for (&y, (&diagonal, &above)) in b.iter().zip(above.iter().zip(above.iter().skip(1))) {
            left = (diagonal + usize::from(x != y)).min(above + 1).min(left + 1);
            row.push(left);
        }
        above = row;
    }
    above.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"
[workers]
model = "shared"
cpus = [1]
poll = "50us"
gather = "8us"
turn = 1
[switch]
ageing = "60s"
entries = 1_000
move_after = "5s"
[[port]]
name = "vm1"
kind = "vhost-user"         # vhost-user | tap
socket = "/run/ringroad/vm1.sock"
role = "client"
mode = "reflect"
hairpin = true
features = { packed = true, in_order = false, mrg_rxbuf = true, event_idx = true, indirect = true, mtu = false }
queues = 2
mac = "52:54:00:12:34:56"
addresses = "fixed"
limits = { addresses = 2, storm = 1_000 }
link_local = "forward"
mtu = 1500
poll = "unlimited"
[[port]]
name = "uplink"
kind = "tap"
interface = "rr0"
limits = { storm = "unlimited" }
"#;

    /// A valid vhost-user port in lines 1 to 4, then `rest` from line 5 on.
    fn vm1(rest: &str) -> String {
        format!("[[port]]\nname = \"vm1\"\nkind = \"vhost-user\"\nsocket = \"/run/1\"\n{rest}")
    }

    /// A valid TAP port in lines 1 to 4, then `rest` from line 5 on.
    fn rr0(rest: &str) -> String {
        format!("[[port]]\nname = \"up\"\nkind = \"tap\"\ninterface = \"rr0\"\n{rest}")
    }

    fn parse(text: &str) -> Config {
        Config::parse(text, "rr.toml").unwrap()
    }

    fn error(text: &str) -> String {
        Config::parse(text, "rr.toml").expect_err(text).to_string()
    }

    #[test]
    fn example() {
        let config = parse(EXAMPLE);
        let (poll, gather) = (Poll::For(Duration::from_micros(50)), Gather::For(Duration::from_micros(8)));
        assert_eq!(config.workers, Workers { cpus: vec![1], poll, gather, turn: 1 });
        assert_eq!(
            config.switch,
            SwitchConfig { ageing: Duration::from_secs(60), entries: 1000, move_after: Duration::from_secs(5) }
        );
        let mac = Some(MacAddr([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]));
        let vm1 = Port {
            name: "vm1".into(),
            mode: Mode::Reflect,
            hairpin: true,
            mtu: Some(1500),
            poll: Some(Poll::Unlimited),
            limits: Limits { addresses: 2, own: mac, fixed: true, storm: 1000, link_local: true },
            kind: Kind::VhostUser {
                socket: "/run/ringroad/vm1.sock".into(),
                role: Role::Client,
                features: Features { in_order: false, mtu: false, ..Features::ALL },
                queues: 2,
                mac,
                tuning: Tuning::default(),
                frontend: Frontend::default(),
            },
        };
        let uplink = Port {
            name: "uplink".into(),
            mode: Mode::Switch,
            hairpin: false,
            mtu: None,
            poll: None,
            limits: Limits { addresses: 4096, own: None, fixed: false, storm: 0, link_local: false },
            kind: Kind::Tap { interface: "rr0".into(), queues: 1 },
        };
        assert_eq!(config.ports, [vm1, uplink]);
    }

    #[test]
    fn defaults() {
        let config = parse(&vm1(""));
        let workers = Workers { cpus: vec![], poll: Poll::For(Duration::ZERO), gather: Gather::Auto, turn: 4 };
        assert_eq!(config.workers, workers);
        assert_eq!(config.switch, SwitchConfig::default());
        assert_eq!(
            (config.switch.ageing.as_secs(), config.switch.entries, config.switch.move_after.as_secs()),
            (300, 4096, 2)
        );
        let port = &config.ports[0];
        let limits = Limits { addresses: 256, own: None, fixed: false, storm: 10_000, link_local: false };
        assert_eq!(port.limits, limits);
        assert_eq!((port.mode, port.hairpin, port.mtu, port.poll), (Mode::Switch, false, None, None));
        let (role, features) = (Role::Server, Features::ALL);
        let tuning = Tuning::default();
        let (socket, frontend) = ("/run/1".into(), Frontend::default());
        let kind = Kind::VhostUser { socket, role, features, queues: 1, mac: None, tuning, frontend };
        assert_eq!(port.kind, kind);
        assert_eq!(parse(&vm1("features = {}\n[workers]\n[switch]")), config);
    }

    #[test]
    fn each_tuning_has_its_key() {
        let read = |line: &str| match parse(&vm1(&format!("[port.tuning]\n{line}"))).ports.remove(0).kind {
            Kind::VhostUser { tuning, .. } => tuning,
            Kind::Tap { .. } => unreachable!(),
        };
        let all = Tuning::default();
        assert_eq!(read("fast_path = false"), Tuning { fast_path: false, ..all });
        assert_eq!(read("shadow_used = false"), Tuning { shadow_used: false, ..all });
        assert_eq!(read("prefetch = 0"), Tuning { prefetch: 0, ..all });
        assert_eq!(read("prefetch_write = false"), Tuning { prefetch_write: false, ..all });
        assert_eq!(read("translation_cache = false"), Tuning { translation_cache: false, ..all });
        assert_eq!(read("small_copy = false"), Tuning { small_copy: false, ..all });
        let found = error(&vm1("[port.tuning]\nprefetch = 32"));
        assert!(found.contains("tuning.prefetch") && found.contains("31"), "{found}");
    }

    #[test]
    fn each_feature_has_its_key() {
        let keys = ["packed", "in_order", "mrg_rxbuf", "event_idx", "indirect", "mac", "status", "mtu"];
        for (index, key) in keys.iter().enumerate() {
            let config = parse(&vm1(&format!("features.{key} = false")));
            let Kind::VhostUser { features: f, .. } = config.ports[0].kind else { panic!("not vhost-user") };
            let found = [f.packed, f.in_order, f.mrg_rxbuf, f.event_idx, f.indirect, f.mac, f.status, f.mtu];
            assert_eq!(found, std::array::from_fn(|other| other != index), "{key}");
        }
    }

    #[test]
    fn values_at_their_bounds() {
        for rest in [
            "queues = 16",
            "mtu = 68",
            "mtu = 65535",
            "mtu = 0xffff",
            "poll = \"0\"",
            "poll = \"0us\"",
            "poll = \"10000ms\"",
            "mode = \"drop\"",
            "[switch]\nentries = 1\nageing = \"1s\"",
            "[switch]\nmove_after = \"0s\"",
            "limits = { addresses = 262144, storm = 1000000000 }",
            "addresses = \"learn\"\nlink_local = \"drop\"\nlimits = {}",
            "[switch]\nentries = 1048576\nageing = \"1000000s\"",
            "[workers]\ncpus = []",
            "[workers]\ncpus = [1023]",
            "[log]\nlines = 1",
            "[[port]]\nname = \"vm2\"\nkind = \"vhost-user\"\nsocket = \"/run/2\"\nrole = \"client\"",
            // A port may be named after another's interface.
            "[[port]]\nname = \"rr0\"\nkind = \"tap\"\ninterface = \"fifteen-bytes.x\"",
        ] {
            parse(&vm1(rest));
        }
        let long = "s".repeat(MAX_SOCKET);
        parse(&format!("[[port]]\nname = \"a-b_c.9\"\nkind = \"vhost-user\"\nsocket = \"{long}\""));
    }

    #[test]
    fn broken_files() {
        let tap = |name: &str| format!("[[port]]\nname = \"x\"\nkind = \"tap\"\ninterface = \"{name}\"");
        let server =
            |path: &str| vm1(&format!("[[port]]\nname = \"vm2\"\nkind = \"vhost-user\"\nsocket = \"{path}\"\n"));
        let socket = |path: &str| server(path).replace("/run/1", "/run/0");
        let rows: Vec<(String, &str)> = vec![
            // The file as a whole.
            ("".into(), "1: key `port`: missing, expected at least one port, written [[port]]"),
            ("\n\nport = []".into(), "3: key `port`: expected at least one port, written [[port]], found an empty"),
            ("[port]\nname = \"vm1\"".into(), "1: key `port`: expected at least one port, written [[port]], found a"),
            ("port = [\n{},\n7]".into(), "2: port 1: key `name`: missing, expected 1 to 32 letters"),
            ("port = [\n7]".into(), "2: key `port`: expected at least one port, written [[port]], found 7"),
            (vm1("[wrokers]"), "5: key `wrokers`: unknown key, did you mean `workers`?"),
            (vm1("[ports]"), "5: key `ports`: unknown key, did you mean `port`?"),
            (
                vm1("[bridge]"),
                "5: key `bridge`: unknown key, expected one of `log`, `workers`, `switch`, `sandbox`, `port` or `vsock`",
            ),
            (vm1("[[e1000]]"), "5: key `e1000`: not supported by this version"),
            // Syntax.
            (vm1("queues 2"), "5: not valid TOML: "),
            (vm1("queues = "), "5: not valid TOML: "),
            (vm1("mode = \"drop"), "5: not valid TOML: invalid basic string"),
            (vm1("mode = \"drop\nmtu = 1500\""), "5: not valid TOML: invalid basic string"),
            (vm1("mtu = 1500\nmtu = 1500"), "6: not valid TOML: duplicate key, found \"mtu\""),
            (vm1("[workers]\n[switch]\n[workers]"), "7: not valid TOML: duplicate key, found \"workers\""),
            (format!("a = {}", "[".repeat(100_000)), "1: not valid TOML: cannot recurse further"),
            (format!("a{} = 1", ".a".repeat(100_000)), "1: not valid TOML: recursion limit"),
            // [workers].
            (vm1("workers = 3"), "5: port \"vm1\": key `workers`: unknown key, expected one of `name`, `kind`"),
            (vm1("[[workers]]"), "5: key `workers`: expected a table, found a list"),
            (vm1("[workers]\n\nspin = true"), "7: key `workers.spin`: unknown key, expected one of `model`, `cpus`"),
            (
                vm1("[workers]\nmodel = \"per-queue\""),
                "6: key `workers.model`: expected \"shared\", found \"per-queue\", which this version does not support",
            ),
            (vm1("[workers]\nmodel = \"per-device\""), "6: key `workers.model`: expected \"shared\", found \"per-d"),
            (
                vm1("[workers]\nmodel = \"dynamic\""),
                "6: key `workers.model`: expected \"shared\", found \"dynamic\", w",
            ),
            (vm1("[workers]\nmodel = \"one\""), "6: key `workers.model`: expected \"shared\", found \"one\""),
            (vm1("[workers]\nmodel = 1"), "6: key `workers.model`: expected \"shared\", found 1"),
            (vm1("[workers]\ncpus = 1"), "6: key `workers.cpus`: expected a list of at most one CPU (this version has"),
            (vm1("[workers]\ncpus = [\n1,\n2]"), "8: key `workers.cpus`: expected a list of at most one CPU (this ve"),
            (vm1("[workers]\ncpus = [1024]"), "6: key `workers.cpus`: expected 0 to 1023, found 1024"),
            (vm1("[workers]\ncpus = [\"1\"]"), "6: key `workers.cpus`: expected 0 to 1023, found \"1\""),
            (vm1("[workers]\ncpus = [-1]"), "6: key `workers.cpus`: expected 0 to 1023, found -1"),
            (vm1("[workers]\nturn = 0"), "6: key `workers.turn`: expected 1 to 64, found 0"),
            (
                vm1("[workers]\ngather = \"101us\""),
                "6: key `workers.gather`: expected \"auto\", \"off\" or \"<N>us\" (at most 100 us), found \"101us\"",
            ),
            (
                vm1("[workers]\npoll = 50"),
                "6: key `workers.poll`: expected \"0\", \"<N>us\", \"<N>ms\" (at most 10 s) or \"unlimited\", found 50",
            ),
            (vm1("[workers]\npoll = \"50\""), "6: key `workers.poll`: expected \"0\", "),
            (vm1("[workers]\npoll = \"us\""), "6: key `workers.poll`: expected \"0\", "),
            (vm1("[workers]\npoll = \"-1us\""), "6: key `workers.poll`: expected \"0\", "),
            (vm1("[workers]\npoll = \"+1us\""), "6: key `workers.poll`: expected \"0\", "),
            (vm1("[workers]\npoll = \"10001ms\""), "6: key `workers.poll`: expected \"0\", "),
            (vm1("[workers]\npoll = \"99999999999999999999ms\""), "6: key `workers.poll`: expected \"0\", "),
            // [switch].
            (vm1("[switch]\nageing = 300"), "6: key `switch.ageing`: expected \"1s\" to \"1000000s\", found 300"),
            (vm1("[switch]\nageing = \"0s\""), "6: key `switch.ageing`: expected \"1s\" to \"1000000s\", found \"0s\""),
            (vm1("[switch]\nageing = \"5m\""), "6: key `switch.ageing`: expected \"1s\" to \"1000000s\", found \"5m\""),
            (vm1("[switch]\naging = \"5s\""), "6: key `switch.aging`: unknown key, did you mean `ageing`?"),
            (vm1("[switch]\nentries = 0"), "6: key `switch.entries`: expected 1 to 1048576, found 0"),
            (vm1("[switch]\nentries = 1048577"), "6: key `switch.entries`: expected 1 to 1048576, found 1048577"),
            // Any port.
            (vm1("queue = 1"), "5: port \"vm1\": key `queue`: unknown key, did you mean `queues`?"),
            (vm1("zone = 1\ncolour = 2"), "5: port \"vm1\": key `zone`: unknown key, expected one of `name`, `kind`, "),
            (vm1("xdp = {}"), "5: port \"vm1\": key `xdp`: not supported by this version"),
            ("[[port]]\nkind = \"tap\"".into(), "1: port 1: key `name`: missing, expected 1 to 32 letters, digits, "),
            (vm1("\n[[port]]"), "6: port 2: key `name`: missing, expected 1 to 32 letters, digits, `_`, `.` or `-`"),
            (
                vm1("[[port]]\nname = \"\""),
                "6: port 2: key `name`: expected 1 to 32 letters, digits, `_`, `.` or `-`, ",
            ),
            (vm1("[[port]]\nname = \"a b\""), "6: port 2: key `name`: expected 1 to 32 letters, digits, `_`, `.` or `"),
            (
                vm1("[[port]]\nname = 5"),
                "6: port 2: key `name`: expected 1 to 32 letters, digits, `_`, `.` or `-`, fou",
            ),
            (
                vm1("[[port]]\nkind = \"tap\"\nname = \"vm1\""),
                "7: port \"vm1\": key `name`: duplicate name \"vm1\", already used in line 2",
            ),
            (
                "[[port]]\nname = \"vm1\"".into(),
                "1: port \"vm1\": key `kind`: missing, expected \"vhost-user\" or \"tap\"",
            ),
            (
                "[[port]]\nname = \"x\"\nkind = \"af-xdp\"".into(),
                "3: port \"x\": key `kind`: expected \"vhost-user\" or \"tap\", found \"af-xdp\", which this version does not",
            ),
            (
                "[[port]]\nname = \"x\"\nkind = \"veth\"".into(),
                "3: port \"x\": key `kind`: expected \"vhost-user\" or \"tap\", found \"veth\"",
            ),
            (
                vm1("mode = \"hub\""),
                "5: port \"vm1\": key `mode`: expected \"switch\", \"reflect\", \"drop\" or \"generate\", found \"hub\"",
            ),
            (vm1("hairpin = 1"), "5: port \"vm1\": key `hairpin`: expected true or false, found 1"),
            (vm1("queues = 99"), "5: port \"vm1\": key `queues`: expected 1 to 16, found 99"),
            (vm1("queues = 0"), "5: port \"vm1\": key `queues`: expected 1 to 16, found 0"),
            (vm1("queues = 1.5"), "5: port \"vm1\": key `queues`: expected 1 to 16, found 1.5"),
            (vm1("queues = \"2\""), "5: port \"vm1\": key `queues`: expected 1 to 16, found \"2\""),
            (vm1("queues = 99999999999999999999"), "5: port \"vm1\": key `queues`: expected 1 to 16, found 9999"),
            (vm1("mtu = 67"), "5: port \"vm1\": key `mtu`: expected 68 to 65535, found 67"),
            (vm1("mtu = 0x10000"), "5: port \"vm1\": key `mtu`: expected 68 to 65535, found 0x10000"),
            (vm1("mtu = 1979-05-27"), "5: port \"vm1\": key `mtu`: expected 68 to 65535, found 1979-05-27"),
            (vm1("poll = \"1s\""), "5: port \"vm1\": key `poll`: expected \"0\", \"<N>us\", \"<N>ms\" (at most 10 s)"),
            // vhost-user.
            (
                vm1("\ninterface = \"x\""),
                "6: port \"vm1\": key `interface`: only valid for kind \"tap\", but this port is of",
            ),
            (
                vm1("role = \"master\""),
                "5: port \"vm1\": key `role`: expected \"server\" or \"client\", found \"master\"",
            ),
            (vm1("mac = \"52:54:00:12:34\""), "5: port \"vm1\": key `mac`: expected a unicast, non-zero address su"),
            (vm1("mac = \"01:00:5e:00:00:01\""), "5: port \"vm1\": key `mac`: expected a unicast, non-zero addres"),
            (vm1("mac = \"00:00:00:00:00:00\""), "5: port \"vm1\": key `mac`: expected a unicast, non-zero addres"),
            (
                server("/run/2").replace("/run/1\"", "/run/1\"\nmac = \"52:54:00:00:00:01\"")
                    + "mac = \"52:54:00:00:00:01\"",
                "10: port \"vm2\": key `mac`: duplicate mac \"52:54:00:00:00:01\", already used in line 5",
            ),
            (
                vm1("addresses = \"fixed\""),
                "5: port \"vm1\": key `addresses`: \"fixed\" requires key `mac`, which is missing",
            ),
            (
                vm1("addresses = \"any\""),
                "5: port \"vm1\": key `addresses`: expected \"learn\" or \"fixed\", found \"any\"",
            ),
            (
                vm1("link_local = true"),
                "5: port \"vm1\": key `link_local`: expected \"drop\" or \"forward\", found true",
            ),
            (vm1("limits = 5"), "5: port \"vm1\": key `limits`: expected a table, found 5"),
            (
                vm1("limits.storm = 0"),
                "5: port \"vm1\": key `limits.storm`: expected 1 to 1000000000 frames a second or \"unlimited\"",
            ),
            (vm1("limits.addresses = 0"), "5: port \"vm1\": key `limits.addresses`: expected 1 to 262144, found 0"),
            (
                vm1("limits.address = 9"),
                "5: port \"vm1\": key `limits.address`: unknown key, did you mean `addresses`?",
            ),
            (
                vm1("[switch]\nmove_after = \"-1s\""),
                "6: key `switch.move_after`: expected \"0s\" to \"1000000s\", found",
            ),
            (rr0("addresses = \"learn\""), "5: port \"up\": key `addresses`: only valid for kind \"vhost-user\""),
            (vm1("features = true"), "5: port \"vm1\": key `features`: expected a table, found true"),
            (vm1("features.packed = 1"), "5: port \"vm1\": key `features.packed`: expected true or false, found 1"),
            (
                vm1("features = {\n  packed = true,\n  in-order = true\n}"),
                "7: port \"vm1\": key `features.in-order`: unknown key, did you mean `in_order`?",
            ),
            (
                "[[port]]\nname = \"x\"\nkind = \"vhost-user\"".into(),
                "1: port \"x\": key `socket`: missing, expected the path of a Unix socket, 1 to 107 bytes",
            ),
            (
                socket(""),
                "8: port \"vm2\": key `socket`: expected the path of a Unix socket, 1 to 107 bytes, found \"\"",
            ),
            (
                socket("a\\u0000b"),
                "8: port \"vm2\": key `socket`: expected the path of a Unix socket, 1 to 107 bytes, f",
            ),
            (socket(&"s".repeat(108)), "8: port \"vm2\": key `socket`: expected the path of a Unix socket, 1 to 107 "),
            (server("/run//1"), "8: port \"vm2\": key `socket`: duplicate socket \"/run//1\", already used in line 4"),
            // tap.
            (
                rr0("socket = \"x\""),
                "5: port \"up\": key `socket`: only valid for kind \"vhost-user\", but this port is of k",
            ),
            (rr0("role = \"server\""), "5: port \"up\": key `role`: only valid for kind \"vhost-user\""),
            (
                rr0("mtu = 1500\nmac = \"52:54:00:12:34:56\""),
                "6: port \"up\": key `mac`: only valid for kind \"vhost-user\"",
            ),
            (rr0("[port.features]"), "5: port \"up\": key `features`: only valid for kind \"vhost-user\""),
            (
                "[[port]]\nname = \"x\"\nkind = \"tap\"".into(),
                "1: port \"x\": key `interface`: missing, expected the name of an interface, 1 to 15 bytes without ",
            ),
            (tap(""), "4: port \"x\": key `interface`: expected the name of an interface"),
            (tap("sixteen-bytes.xx"), "4: port \"x\": key `interface`: expected the name of an interface"),
            (tap("a/b"), "4: port \"x\": key `interface`: expected the name of an interface"),
            (tap("a b"), "4: port \"x\": key `interface`: expected the name of an interface"),
            (tap("rr%d"), "4: port \"x\": key `interface`: expected the name of an interface"),
            (tap(".."), "4: port \"x\": key `interface`: expected the name of an interface"),
            (rr0(&tap("rr0")), "8: port \"x\": key `interface`: duplicate interface \"rr0\", already used in line 4"),
        ];
        for (text, expected) in &rows {
            let found = error(text);
            assert!(found.starts_with(&format!("rr.toml:{expected}")), "{text}\nexpected {expected}\nfound {found}");
            assert!(!found.contains('\n') && found.len() < 600, "not one short line: {found}");
        }
    }

    #[test]
    fn complete_message() {
        assert_eq!(error(&vm1("queues = 99")), "rr.toml:5: port \"vm1\": key `queues`: expected 1 to 16, found 99");
    }

    #[test]
    fn nothing_panics() {
        for end in 0..EXAMPLE.len() {
            let _ = Config::parse(&EXAMPLE[..end], "rr.toml");
            for other in ["", "\"", "=", "[", "\n", "\0", "é"] {
                let _ = Config::parse(&format!("{}{other}{}", &EXAMPLE[..end], &EXAMPLE[end + 1..]), "rr.toml");
            }
        }
    }

    #[test]
    fn files_that_cannot_be_read() {
        let load = |path: &str| Config::load(Path::new(path)).unwrap_err().to_string();
        assert_eq!(load("/nonexistent/rr.toml"), "/nonexistent/rr.toml: No such file or directory (os error 2)");
        assert_eq!(load("/"), "/: Is a directory (os error 21)");
        let large = "/dev/zero: expected at most 1048576 bytes, found more";
        assert_eq!(load("/dev/zero"), large);
    }

    #[test]
    fn files() {
        let path = std::env::temp_dir().join(format!("ringroad-config-{}.toml", std::process::id()));
        std::fs::write(&path, EXAMPLE).unwrap();
        let good = Config::load(&path);
        std::fs::write(&path, b"[workers]\n# caf\xe9\n").unwrap();
        let other = Config::load(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(good.unwrap(), parse(EXAMPLE));
        let expected = format!("{}:2: expected UTF-8, found an invalid byte", path.display());
        assert_eq!(other.unwrap_err().to_string(), expected);
    }
}
