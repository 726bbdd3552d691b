//! Command-line options and their values, as `blast`, `vsock`, `demo` and the benches share them.

use clap::ValueEnum;
use ringroad_host::{pin_current_thread, vhost_user::Connector};
use ringroad_net::Features;
use ringroad_switch::Gather;
use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Layout of a driver's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Ring {
    /// Virtio 1.3, 2.7
    Split,
    /// Virtio 1.3, 2.8
    Packed,
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}

/// The drivers of the traffic tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DriverKind {
    /// The fast one, with all options
    #[default]
    Blast,
    /// A simple one with ring code of its own, as a cross-check: sends as fast as it can, in bursts of 32, and counts what returns
    Plain,
    /// Intel's e1000 ("lem"), over vfio-user instead of vhost-user; takes its interrupts as a guest does
    Lem,
}

/// How registers are written. Reads always wait for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AccessKind {
    /// The driver goes on before the device has the write
    #[default]
    Posted,
    /// The driver waits until the device has the write, as a virtual machine does without an eventfd for it
    Synchronous,
}

/// Options of the lem driver. Without them it is FreeBSD's, with FreeBSD's defaults.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct LemOptions {
    /// With --driver lem: defer writes of the transmit tail while an interrupt for sent frames is pending (mit_enable)
    #[arg(long)]
    pub mit: bool,
    /// With --driver lem: least interval between interrupts, in units of 256 ns; 0: none
    #[arg(long, value_name = "UNITS", default_value_t = ITR)]
    pub itr: u16,
    /// With --driver lem: how registers are written
    #[arg(long, value_enum, default_value = "posted")]
    pub accesses: AccessKind,
    /// With --driver lem: do not sleep until the interrupt, but go on looking for it, as a guest's CPU that has other work to do
    #[arg(long)]
    pub busy: bool,
}

/// FreeBSD's default: 8000 interrupts a second.
const ITR: u16 = 488;

impl Default for LemOptions {
    fn default() -> LemOptions {
        LemOptions { mit: false, itr: ITR, accesses: AccessKind::default(), busy: false }
    }
}

impl LemOptions {
    /// Returns the first option given, if any.
    pub fn given(&self) -> Option<&'static str> {
        let accesses = self.accesses != AccessKind::default();
        let given = [(self.mit, "--mit"), (self.itr != ITR, "--itr"), (accesses, "--accesses"), (self.busy, "--busy")];
        given.into_iter().find(|(given, _)| *given).map(|(_, option)| option)
    }
}

/// Returns a value's name on the command line, which JSON uses, too.
pub fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The device that a driver connects to.
#[derive(clap::Args, Clone, Debug)]
pub struct Target {
    /// Vhost-user socket of the device
    pub socket: PathBuf,
    /// Create the socket and wait for the device to connect, instead of connecting to it
    #[arg(long)]
    pub listen: bool,
    /// Ring layout
    #[arg(long, value_enum, default_value = "packed")]
    pub ring: Ring,
}

/// Virtio features that a network driver leaves out.
#[derive(clap::Args, Clone, Debug)]
pub struct Without {
    /// Features not to negotiate, as a list: in_order, mrg_rxbuf, event_idx, indirect
    #[arg(long, value_delimiter = ',', value_parser = ["in_order", "mrg_rxbuf", "event_idx", "indirect"])]
    without: Vec<String>,
}

impl Without {
    /// Returns whether no feature is left out.
    pub fn is_empty(&self) -> bool {
        self.without.is_empty()
    }

    /// Returns how to connect a driver with one queue pair whose receive buffers hold `frame` bytes.
    pub fn connector(&self, socket: &Path, ring: Ring, queue_size: u32, frame: usize) -> Connector {
        let off: Features = self.without.iter().filter_map(|name| Features::from_name(&name.to_uppercase())).collect();
        Connector {
            socket: socket.to_owned(),
            listen: false,
            patience: Duration::from_secs(5),
            features: Features::layout(ring == Ring::Packed).difference(off).bits(),
            queue_pairs: 1,
            queue_size,
            frame,
            huge: true,
        }
    }
}

/// Parses a number of seconds.
///
/// # Errors
/// A message, if it is not a number above 0 and up to a million.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e6 => Ok(number),
        _ => Err(format!("expected a number of seconds above 0, found {text}")),
    }
}

/// Parses a polling time: "0", "50us", "3ms" or "unlimited".
///
/// # Errors
/// A message, if it is none of these.
pub fn poll(text: &str) -> Result<Duration, String> {
    let number = |unit: &str| text.strip_suffix(unit).and_then(|digits| digits.parse::<u64>().ok());
    match text {
        "0" => Ok(Duration::ZERO),
        "unlimited" => Ok(Duration::MAX),
        _ => number("us")
            .map(Duration::from_micros)
            .or_else(|| number("ms").map(Duration::from_millis))
            .ok_or_else(|| format!("expected 0, a number of us or ms, or unlimited, found {text}")),
    }
}

/// Parses how long a driver pauses for a slower device: "auto", "off" or a number of microseconds, "8us".
///
/// # Errors
/// A message, if it is none of these.
pub fn gather(text: &str) -> Result<Gather, String> {
    let number = || text.strip_suffix("us")?.parse::<u64>().ok().filter(|&number| number <= 100);
    match text {
        "auto" => Ok(Gather::Auto),
        "off" => Ok(Gather::Off),
        _ => number()
            .map(|number| Gather::For(Duration::from_micros(number)))
            .ok_or_else(|| format!("expected auto, off or a number of us up to 100, found {text}")),
    }
}

/// Pins the calling thread, and those that it starts, to the CPU that an option names.
///
/// # Errors
/// A message with the option.
pub fn pin(option: &str, cpu: usize) -> Result<(), String> {
    pin_current_thread(cpu).map_err(|error| format!("{option} {cpu}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!((gather("auto"), gather("8us")), (Ok(Gather::Auto), Ok(Gather::For(Duration::from_micros(8)))));
        assert!(gather("8").is_err() && gather("101us").is_err());
        assert_eq!(poll("0"), Ok(Duration::ZERO));
        assert_eq!(poll("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(poll("unlimited"), Ok(Duration::MAX));
        assert!(poll("5").is_err());
        assert_eq!(seconds("0.5"), Ok(0.5));
        ["0", "-1", "1e7", "NaN", ""].iter().for_each(|wrong| assert!(seconds(wrong).is_err(), "{wrong}"));
    }

    #[test]
    fn features_to_leave_out() {
        let bits = |ring, names: &[&str]| {
            let without = Without { without: names.iter().map(|&name| name.to_owned()).collect() };
            without.connector(Path::new("a.sock"), ring, 256, 1518).features
        };
        assert_eq!(bits(Ring::Packed, &[]), (Features::all() - Features::OFFLOADS - Features::CONTROL).bits());
        assert_eq!(bits(Ring::Split, &["in_order"]), (Features::layout(false) - Features::IN_ORDER).bits());
        assert_eq!(Ring::Split.to_string(), "split");
    }
}
