//! The file as a whole, and its tables but those of ports, vsock devices and the sandbox.

use super::{
    error::{ConfigError, Places},
    frontend,
    port::{self, Port},
    sandbox::Sandbox,
    table::{Source, Table},
    taken::Taken,
    value::{self, amount, int, text, wrong},
    vsock::{self, Vsock},
};
use ringroad_switch::{Gather, Poll};
use serde::{Deserialize, Deserializer, de::IgnoredAny};
use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    time::Duration,
};

/// Maximum size of the file, in bytes.
const MAX_FILE: usize = 1 << 20;

/// A parsed configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Maximum number of lines a second, in total.
    #[serde(deserialize_with = "int::<1, 1_000_000, u32, _, _>")]
    pub lines: u32,
}

/// The threads that forward frames; in this version one, shared by all ports.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct Workers {
    /// The CPU of each worker; at most one in this version; empty: not pinned.
    #[serde(deserialize_with = "cpus")]
    pub cpus: Vec<usize>,
    /// How long a worker polls an empty queue before it sleeps.
    #[serde(deserialize_with = "value::poll")]
    pub poll: Poll,
    /// How long a worker pauses after a partial burst, so that a slower driver can fill the queue.
    #[serde(deserialize_with = "gather")]
    pub gather: Gather,
    /// Quantum of a queue: full bursts that are forwarded before the next queue's turn.
    #[serde(deserialize_with = "int::<1, 64, usize, _, _>")]
    pub turn: usize,
}

/// The forwarding table.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct SwitchConfig {
    /// Time without a frame after which an address is forgotten.
    #[serde(deserialize_with = "seconds::<1, _>")]
    pub ageing: Duration,
    /// Minimum capacity, in addresses.
    #[serde(deserialize_with = "int::<1, { 1 << 20 }, usize, _, _>")]
    pub entries: usize,
    /// How long an address must be silent before it can move to another port.
    #[serde(deserialize_with = "seconds::<0, _>")]
    pub move_after: Duration,
}

/// The tables of the file; ports and devices are read one by one.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Tables {
    log: Log,
    workers: Workers,
    switch: SwitchConfig,
    sandbox: Sandbox,
    #[serde(rename = "port")]
    _port: IgnoredAny,
    #[serde(rename = "vsock")]
    _vsock: IgnoredAny,
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
        let large = || io::Error::other(format!("expected at most {MAX_FILE} bytes, found more"));
        if let Err(error) = read.and_then(|len| if len > MAX_FILE { Err(large()) } else { Ok(()) }) {
            return Err(ConfigError::Read { file, error });
        }
        let text = str::from_utf8(&bytes).map_err(|error| {
            let valid = bytes.iter().take(error.valid_up_to());
            let line = 1 + valid.filter(|&&byte| byte == b'\n').count();
            ConfigError::Line { file: file.clone(), line, message: "expected UTF-8, found an invalid byte".into() }
        })?;
        Config::parse(text, &file)
    }

    /// Parses `text`; errors name it `file`.
    ///
    /// # Errors
    /// [`ConfigError::Line`]: the text is not a valid configuration.
    pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
        let source = Source::new(file, text);
        let root = source.parse()?;
        let root = Table::root(&source, &root);
        let Tables { log, workers, switch, sandbox, .. } = root.read()?;
        let mut taken = Taken::default();
        root.note(&mut taken.places);
        if root.get("vsock").is_none() {
            root.require("port", port::EXPECTED)?;
        }
        let mut ports = port::ports(&root, &mut taken)?;
        let mut vsocks = vsock::vsocks(&root, &mut taken)?;
        let guests = ports.iter_mut().filter_map(|port| port.frontend_mut()).map(|frontend| &mut frontend.limits);
        frontend::share(&root, guests.chain(vsocks.iter_mut().map(|vsock| &mut vsock.frontend.limits)).collect())?;
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
        Workers { cpus: Vec::new(), poll: Poll::Auto, gather: Gather::Auto, turn: 4 }
    }
}

impl Default for SwitchConfig {
    fn default() -> SwitchConfig {
        SwitchConfig { ageing: Duration::from_secs(300), entries: 4096, move_after: Duration::from_secs(2) }
    }
}

fn cpus<'de, D: Deserializer<'de>>(node: D) -> Result<Vec<usize>, D::Error> {
    const EXPECTED: &str = "a list of at most one CPU (this version has one worker), 0 to 1023";
    let cpu = |value: &toml::Value| value.as_integer()?.try_into().ok().filter(|&cpu| cpu <= 1023);
    let cpus: Vec<usize> = value::list(node, EXPECTED, cpu)?;
    if cpus.len() > 1 { Err(wrong(EXPECTED)) } else { Ok(cpus) }
}

fn gather<'de, D: Deserializer<'de>>(node: D) -> Result<Gather, D::Error> {
    text(node, "\"auto\", \"off\" or \"<N>us\" (at most 100 us)", |text| match text {
        "auto" => Some(Gather::Auto),
        "off" => Some(Gather::Off),
        _ => amount(text, "us").filter(|&time| time <= 100).map(|time| Gather::For(Duration::from_micros(time))),
    })
}

fn seconds<'de, const MIN: u64, D: Deserializer<'de>>(node: D) -> Result<Duration, D::Error> {
    text(node, &format!("\"{MIN}s\" to \"1000000s\""), |text| {
        amount(text, "s").filter(|seconds| (MIN..=1_000_000).contains(seconds)).map(Duration::from_secs)
    })
}
