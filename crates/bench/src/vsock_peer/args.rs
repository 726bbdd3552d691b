//! The options, and the settings that they select.

use crate::options::Common;
use ringroad_traffic::options::{Ring, poll};
use std::fmt;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench vsock-peer                       every case event driven, and polling for 50us\n  \
    ringroad bench vsock-peer --poll 0              event driven alone\n  \
    ringroad bench vsock-peer --poll 0,unlimited --device-poll 50us")]
pub struct Args {
    /// Message sizes of the round trips in bytes, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 4096],
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(super) size: Vec<u64>,
    /// Size of each write to a stream in bytes
    #[arg(long, default_value_t = 65536, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(super) write: u64,
    /// How long the driver's programs poll the rings before they sleep, as a list: 0, 50us, unlimited. Each value is measured
    /// with the value of --device-poll at the same place [default: as --device-poll, or 0,50us]
    #[arg(long, value_delimiter = ',')]
    poll: Vec<String>,
    /// How long our device polls, as a list of equal length, or one value for all; the peer has no such setting [default: as
    /// --poll]
    #[arg(long, value_delimiter = ',')]
    device_poll: Vec<String>,
    /// Command of the peer [default: vhost-device-vsock, from the chroot of scripts/peers forky if it is set up]
    #[arg(long)]
    pub(super) vhost_device_vsock: Option<String>,
    /// Measure ringroad alone
    #[arg(long)]
    pub(super) alone: bool,
    /// Ring layout, if the device offers it: rows contain the negotiated one
    #[arg(long, value_enum, default_value = "packed")]
    pub(super) ring: Ring,
    #[command(flatten)]
    pub(super) common: Common,
}

/// How long the driver's programs (`poll`) and our device poll before they sleep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Polling {
    pub(super) poll: String,
    pub(super) device_poll: String,
}

impl fmt::Display for Polling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.poll, &*self.device_poll) {
            ("0", "0") => f.write_str("event driven"),
            (poll, device_poll) => write!(f, "poll {poll}, device poll {device_poll}"),
        }
    }
}

impl Args {
    /// Returns the settings to measure.
    pub(super) fn pollings(&self) -> Result<Vec<Polling>, String> {
        let both = ["0", "50us"].map(str::to_owned);
        let (polls, device_polls) = match (&*self.poll, &*self.device_poll) {
            ([], []) => (&both[..], &both[..]),
            ([], given) | (given, []) => (given, given),
            given => given,
        };
        let count = polls.len().max(device_polls.len());
        if [polls, device_polls].iter().any(|list| list.len() != count && list.len() != 1) {
            return Err(format!(
                "--poll and --device-poll: expected lists of equal length, or one value for all, found {} and {} values",
                polls.len(),
                device_polls.len()
            ));
        }
        polls.iter().chain(device_polls).try_for_each(|text| poll(text).map(drop))?;
        let pairs = polls.iter().cycle().zip(device_polls.iter().cycle()).take(count);
        Ok(pairs.map(|(poll, device_poll)| Polling { poll: poll.clone(), device_poll: device_poll.clone() }).collect())
    }
}
