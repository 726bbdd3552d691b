//! A switch with ports, and well-behaved guests on them.

use super::{
    Folder, PACKED, PATIENCE, SPLIT,
    frontend::Peer,
    guest::Guest,
    lines::{keep_log, log_of},
    within,
};
use ringroad_host::{
    PortReport, PortSettings, WorkerConfig,
    vhost_user::{Access, Limits, Rate, Role, SocketError, VhostConfig, VhostPort},
};
use ringroad_net::{Config, Features};
use ringroad_switch::Gather;
use ringroad_wire::ethernet::MacAddr;
use std::path::{Path, PathBuf};

/// All ports of these tests are guests.
pub type Worker = ringroad_host::Worker<VhostPort>;
pub type Server = ringroad_host::vhost_user::Server<VhostPort>;

pub fn start_server(config: VhostConfig, worker: &Worker) -> Result<Server, SocketError> {
    Server::start(config, worker, |port| port)
}

pub fn worker() -> Worker {
    keep_log();
    Worker::start(WorkerConfig { cpu: None, addresses: 64, ageing: 300, hold: 2, gather: Gather::Auto, turn: 4 })
        .unwrap()
}

/// The configuration space of all ports.
pub const CONFIG: Config = Config {
    mac: MacAddr([0x52, 0x54, 0, 0x12, 0x34, 0x56]),
    link_up: true,
    announce: false,
    queue_pairs: 1,
    mtu: 9001,
    speed: None,
};

/// A rate that tests of other things never reach.
const MUCH: Rate = Rate { burst: 1_000_000, rate: 1_000_000 };
pub const GENEROUS: Limits =
    Limits { mapped: 1 << 40, regions: 509, connects: MUCH, messages: MUCH, refusals: MUCH, lines: MUCH };

pub fn config(name: &str, socket: &Path) -> VhostConfig {
    VhostConfig {
        name: name.to_owned(),
        socket: socket.to_owned(),
        role: Role::Server,
        features: Features::all(),
        config: CONFIG,
        settings: PortSettings { limits: Default::default(), ..PortSettings::default() },
        frontend: GENEROUS,
        access: Access::default(),
    }
}

/// A switch with three ports: the tests attack port 0, ports 1 and 2 must not be affected.
pub struct Rig {
    pub servers: Vec<Server>,
    name: String,
    pub folder: Folder,
    pub worker: Worker,
}

impl Rig {
    pub fn new(name: &str) -> Rig {
        Rig::with_limits(name, GENEROUS)
    }

    /// The same with limits for port 0.
    pub fn with_limits(name: &str, frontend: Limits) -> Rig {
        Rig::with(name, |config| VhostConfig { frontend, ..config })
    }

    /// The same with a port 0 of another configuration.
    pub fn with(name: &str, first: impl Fn(VhostConfig) -> VhostConfig) -> Rig {
        let (worker, folder) = (worker(), Folder::new(name));
        let start = |index| {
            let config = config(&format!("{name}-{index}"), &folder.file(&format!("{index}.sock")));
            start_server(if index == 0 { first(config) } else { config }, &worker).unwrap()
        };
        Rig { servers: (0..3).map(start).collect(), name: name.to_owned(), folder, worker }
    }

    pub fn socket(&self, port: usize) -> PathBuf {
        self.folder.file(&format!("{port}.sock"))
    }

    /// Returns the name of port 0.
    pub fn victim(&self) -> String {
        format!("{}-0", self.name)
    }

    pub fn guest(&self, port: usize, acked: u64) -> Guest {
        let mut guest = Guest::new(Peer::connect(&self.socket(port)), acked, 64);
        guest.mac = MacAddr::local(port as u32 + 1);
        guest.start_all();
        guest
    }

    /// Returns a connection to port 0 that has negotiated features, and nothing else.
    pub fn peer(&self, acked: u64) -> Peer {
        let mut peer = Peer::connect(&self.socket(0));
        peer.negotiate(acked);
        peer
    }

    pub fn others(&self) -> Others {
        Others(self.guest(1, SPLIT), self.guest(2, PACKED))
    }

    pub fn report(&self, port: usize) -> PortReport {
        self.servers[port].handle().port().report()
    }

    /// Returns the faults of port 0, in both directions.
    pub fn faults(&self) -> u64 {
        let report = self.report(0);
        report.received.faults + report.sent.faults
    }

    #[track_caller]
    pub fn expect_faults(&self, faults: u64) {
        within(PATIENCE, || self.faults() >= faults);
        assert_eq!(self.faults(), faults, "faults of {}; log: {:#?}", self.victim(), log_of(&self.victim()));
    }
}

/// Two well-behaved guests, on ports 1 and 2.
pub struct Others(pub Guest, pub Guest);

impl Others {
    /// Checks that frames go both ways, on the connections that were made at the start.
    #[track_caller]
    pub fn work(&mut self) {
        exchange(&mut self.0, &mut self.1);
    }
}

/// Exchanges a few frames each way.
#[track_caller]
pub fn exchange(a: &mut Guest, b: &mut Guest) {
    for _ in 0..3 {
        let sequence = a.send_to(b.mac);
        assert!(b.receives(a.mac, sequence), "a frame from {} to {} was lost", a.mac, b.mac);
        let sequence = b.send_to(a.mac);
        assert!(a.receives(b.mac, sequence), "a frame from {} to {} was lost", b.mac, a.mac);
    }
}
