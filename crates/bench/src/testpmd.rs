//! DPDK's driver: testpmd with net_virtio_user on a device. Used by `bench driver` and `bench pvp`.

use crate::{peer, rig::Device, session::Run};
use ringroad_traffic::{
    child::{Folder, Program},
    options::Ring,
};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// How testpmd is started.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// The words of its command.
    pub words: &'a [String],
    pub cpu: usize,
    /// Its forwarding mode: flowgen, txonly, rxonly.
    pub mode: &'a str,
    pub ring: Ring,
    pub queue_size: u32,
    /// Bytes of the frames that it sends.
    pub size: usize,
    /// Frames that it sends or receives at once.
    pub burst: u8,
    pub mrg_rxbuf: bool,
    pub in_order: bool,
    /// Its vectorized functions, if it has any for the case.
    pub vectorized: bool,
}

/// A driver on a device. Both only run while they are measured.
pub struct Testpmd<'a> {
    driver: Program,
    device: &'a Device,
    /// The driver's output: its rates, every second.
    output: PathBuf,
    pub log: PathBuf,
    rate: &'static str,
    /// The functions that it has chosen for receiving and sending.
    pub paths: [String; 2],
}

impl<'a> Testpmd<'a> {
    /// Starts a driver on a device and waits until it has chosen its functions. `title` distinguishes its files.
    pub fn start(
        options: &Options<'_>,
        folder: &Folder,
        (title, device): (&str, &'a Device),
    ) -> Result<Testpmd<'a>, String> {
        let &Options { words, cpu, mode, ring, queue_size, size, burst, mrg_rxbuf, in_order, vectorized } = options;
        let (log, output) = (folder.file(&format!("{title}.log")), folder.file(&format!("{title}.out")));
        let stdout = fs::File::create(&output).map_err(|error| format!("{}: {error}", output.display()))?;
        let vdev = format!(
            "net_virtio_user0,path={},queues=1,queue_size={queue_size},packed_vq={},mrg_rxbuf={},in_order={},vectorized={}",
            device.socket(0)?.display(),
            u8::from(ring == Ring::Packed),
            u8::from(mrg_rxbuf),
            u8::from(in_order),
            u8::from(vectorized),
        );
        let mut command = peer::testpmd(words, cpu, title);
        command
            .args(["--single-file-segments", "--force-max-simd-bitwidth=512"])
            .args(["--log-level=pmd.net.virtio.init:debug", "--vdev", &vdev])
            .args([
                "--",
                "--nb-cores=1",
                &format!("--forward-mode={mode}"),
                &format!("--txpkts={size}"),
                "--auto-start",
            ])
            .args([&format!("--rxd={queue_size}"), &format!("--txd={queue_size}"), &format!("--burst={burst}")])
            // Each call posts and reclaims this many buffers, 32 by default: with larger bursts, half of what is received has none.
            .args([&format!("--rxfreet={}", burst.max(32)), &format!("--txfreet={}", burst.max(32))])
            .args(["--no-flush-rx", "--stats-period", "1"])
            .stdout(stdout);
        let rate = if mode == "txonly" { "Tx-pps:" } else { "Rx-pps:" };
        device.hold(false);
        let driver = Program::start(&words.join(" "), &mut command, &log)?;
        let mut started = Testpmd { driver, device, output, log, rate, paths: Default::default() };
        started.wait(1)?;
        started.paths = ["Rx", "Tx"].map(|way| path(&started.log, way));
        started.hold(true);
        Ok(started)
    }

    /// Returns the feature bits that it has negotiated, from its log.
    pub fn features(&self) -> u64 {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let bits = log.split("features after negotiate = ").nth(1).unwrap_or_default();
        let digits = bits.trim_start_matches("0x").split(|c: char| !c.is_ascii_hexdigit()).next().unwrap_or_default();
        u64::from_str_radix(digits, 16).unwrap_or(0)
    }

    /// Ends the driver, and stops the device when it has noticed.
    pub fn end(self) {
        let device = self.device;
        drop(self);
        thread::sleep(Duration::from_millis(200));
        device.hold(true);
    }

    fn hold(&self, still: bool) {
        self.device.hold(still);
        self.driver.hold(still);
    }

    /// Measures the driver's mean rate for a number of seconds, and ends it. Each run has a new one: where its memory happens to be
    /// makes a difference of 5 to 45 %, and those that are started one after the other get it by turns.
    pub fn measure_once(self, seconds: usize) -> Result<Run, String> {
        let run = self.measure(seconds);
        self.end();
        run
    }

    /// Measures its mean rate. The first figure includes the time when it was stopped, and does not count.
    fn measure(&self, seconds: usize) -> Result<Run, String> {
        let before = self.rates().len() + 1;
        self.hold(false);
        let rates = self.wait(before + seconds)?;
        self.hold(true);
        let rates = rates.get(before..).unwrap_or_default();
        let mpps = rates.iter().sum::<f64>() / rates.len() as f64 / 1e6;
        match mpps {
            0.0 => Err(format!("testpmd on {}: no frames", self.device.name)),
            mpps => Ok(Run { mpps, idle: None }),
        }
    }

    /// Returns the rates that the driver has printed so far, in frames per second.
    fn rates(&self) -> Vec<f64> {
        rates(&fs::read_to_string(&self.output).unwrap_or_default(), self.rate)
    }

    /// Waits until it has printed this number of rates.
    fn wait(&self, count: usize) -> Result<Vec<f64>, String> {
        let (start, missing) = (Instant::now(), count.saturating_sub(self.rates().len()));
        loop {
            let rates = self.rates();
            if rates.len() >= count {
                return Ok(rates);
            }
            if start.elapsed() > Duration::from_secs(15 + 2 * missing as u64) {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                return Err(format!("testpmd on {} printed too few rates:\n{log}", self.device.name));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Testpmd<'_> {
    fn drop(&mut self) {
        // The driver asks it to stop its queues when it ends.
        self.device.hold(false);
    }
}

/// Returns the rates with this name in testpmd's output, without one that is not complete yet.
fn rates(output: &str, name: &str) -> Vec<f64> {
    let rest = output.split(name).skip(1);
    rest.filter_map(|rest| rest.trim_start().split_once(char::is_whitespace)?.0.parse().ok()).collect()
}

/// Returns the function that a driver uses, from its log.
fn path(log: &Path, way: &str) -> String {
    let log = fs::read_to_string(log).unwrap_or_default();
    let end = format!(" {way} path on port 0");
    let line = log.lines().rfind(|line| line.contains(&end)).unwrap_or_default();
    let path = line.split(&end).next().and_then(|line| line.rsplit("using ").next());
    path.unwrap_or("unknown").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_testpmd() {
        let output = "  Throughput (since last show)\n  Rx-pps:            0          Rx-bps:            0\n  \
                    Tx-pps:      6532032          Tx-bps:   3135375824\n  Rx-pps:      1525469          Rx-bps: 7\n  Rx-pps:   12";
        assert_eq!(rates(output, "Rx-pps:"), [0.0, 1525469.0], "the last one is incomplete");
        assert_eq!(rates(output, "Tx-pps:"), [6532032.0]);
        assert_eq!(rates("", "Tx-pps:"), [0.0; 0]);
    }
}
