//! Both ends of a vsock device in one process, for vsock_latency.rs and vsock_stream.rs. They compare
//! direct sending (a sender's own thread writes packets to the ring) with queued sending (a worker does).

use crate::{
    figures::{LINE, RATIO, Spread, extend},
    options::Common,
    rig::on,
};
use ringroad_host::vsock::{VsockClient, VsockConfig, VsockConnector, VsockServer, VsockWorker};
use ringroad_traffic::{
    child::Folder,
    options::Ring,
    vsock::{RECEIVE, connector, layout},
};
use ringroad_vsock::Settings;
use serde_json::{Value, json};
use std::{
    io, thread,
    time::{Duration, Instant},
};

/// Options of the device and its driver.
#[derive(Debug, clap::Args)]
pub struct Setup {
    /// Ring layout
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    /// Number of entries of each ring
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=32768))]
    queue_size: u32,
    /// Receive buffer of each connection at each end, in bytes
    #[arg(long, default_value_t = 256 << 10, value_parser = clap::value_parser!(u32).range(4096..))]
    buffer: u32,
    /// Payload bytes of each of the driver's receive buffers
    #[arg(long, default_value_t = RECEIVE, hide = true)]
    receive: usize,
    #[command(flatten)]
    pub common: Common,
}

/// The guest's CID.
pub const CID: u64 = 3;
/// The port of the program that is connected to.
pub const PORT: u32 = 7;
/// Explains the column of the seed.
pub const SEED_NOTE: &str = "seed: the gain reported for the same change in Linux's vhost-vsock, which sleeps; \
    comparable with event-driven rows only";
/// How sending is done, in the order of measuring: queued, direct.
pub const WAYS: [bool; 2] = [false, true];

/// Both ends, connected.
pub struct Ends {
    // Dropped in this order.
    pub client: VsockClient,
    pub server: VsockServer,
    _worker: VsockWorker,
}

impl Setup {
    /// Returns the CPUs of the programs: the host's, which is the device's, and the guest's, which is the driver's.
    pub fn programs(&self) -> [usize; 2] {
        [self.common.device_cpu, self.common.driver_cpu]
    }

    /// Connects new ends, whose workers run on these CPUs: the host's, the guest's.
    pub fn connect(&self, folder: &Folder, direct: bool, poll: Duration, workers: [usize; 2]) -> Result<Ends, String> {
        let settings = Settings { direct, poll, buffer: self.buffer, ..Settings::default() };
        let (socket, [host, guest]) = (folder.file("vsock.sock"), workers);
        // The worker does not poll: the waiting program does.
        let worker = VsockWorker::start(Some(host), Duration::ZERO, 1024)
            .map_err(|error| format!("the host's worker cannot run on CPU {host}: {error}"))?;
        let config = VsockConfig { name: "bench".into(), settings, ..VsockConfig::new(CID, socket.clone()) };
        let server = VsockServer::start(config, &worker).map_err(|error| error.to_string())?;
        let connector = VsockConnector {
            queue_size: self.queue_size,
            receive: self.receive,
            ..connector(&socket, self.ring, settings)
        };
        // Its worker inherits the CPU.
        let connect = || connector.connect().map_err(|error| error.to_string());
        let client = on("the guest's worker cannot run on CPU", guest, connect)?;
        // Rows have the negotiated layout.
        if layout(client.acked()) != self.ring {
            return Err(format!("expected {} rings, but {} ones were negotiated", self.ring, layout(client.acked())));
        }
        let start = Instant::now();
        while !server.stack().is_running() {
            if start.elapsed() > Duration::from_secs(5) {
                return Err("the device did not start within 5 s".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Ends { client, server, _worker: worker })
    }

    /// Returns a cell's JSON row, and its last columns: ratio, seed, line. `seed` is the ratio that the original work reports for
    /// comparable work.
    pub fn row(
        &self,
        cell: Value,
        [queued, direct]: [Spread; 2],
        ratio: Spread,
        line: Spread,
        seed: Option<f64>,
    ) -> (Value, Vec<String>) {
        let mut row = json!({
            "ring": self.ring.to_string(), "queue_size": self.queue_size, "before": queued.median, "after": direct.median,
            "pairs": self.common.pairs,
        });
        extend(&mut row, cell);
        ratio.add_to(&mut row, RATIO);
        line.add_to(&mut row, LINE);
        if let Some(seed) = seed {
            extend(&mut row, json!({ "seed_ratio": seed }));
        }
        let mut columns = ratio.columns(2).to_vec();
        columns.push(seed.map_or(String::new(), |seed| format!("{seed:.2}")));
        columns.push(format!("{:.0}", line.median));
        (row, columns)
    }
}

/// Turns an error into a message.
pub fn message(error: io::Error) -> String {
    error.to_string()
}
