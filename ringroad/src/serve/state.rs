//! The running daemon: the worker, the ports, the vsock devices; how they start, reload and stop. Only the control thread of
//! serve.rs uses it.

use super::{
    changes::{Change, MTU, changes, of_port},
    print::{self, explain},
    progress::Progress,
    sandbox::Sandbox,
    vsock::Vsocks,
};
use crate::{
    config::{self, Config, VhostUser},
    logger,
    ports::{Measured, Ports},
};
use ringroad_host::{
    Capture, CaptureConfig, Port, PortHandle, PortReport, PortSettings, TapPort, Worker, WorkerConfig,
    e1000::{E1000Config, E1000Server},
    vhost_user::{Role, Server, VhostConfig},
};
use ringroad_net::Config as Space;
use ringroad_switch::Poll;
use std::{path::Path, sync::Arc, time::Duration};

type Failure = Box<dyn std::error::Error>;

/// Everything that runs.
pub struct State {
    // Declared before the worker that serves them, so that they are dropped first.
    ports: Vec<Running>,
    vsocks: Vsocks,
    worker: Worker<ServedPort>,
    /// The settings of the program itself; ports and devices hold their own.
    config: Config,
    sandbox: Sandbox,
    progress: Progress,
}

fn worker_config(config: &Config) -> WorkerConfig {
    let cpu = config.workers.cpus.first().copied();
    let (addresses, ageing) = (config.switch.entries, config.switch.ageing.as_secs() as u32);
    let config::Workers { gather, turn, .. } = config.workers;
    let hold = config.switch.move_after.as_secs() as u32;
    WorkerConfig { cpu, addresses, ageing, hold, gather, turn }
}

fn start_worker(config: &Config) -> Result<Worker<ServedPort>, Failure> {
    let worker = worker_config(config);
    Worker::start(worker).map_err(|error| match worker.cpu {
        Some(cpu) => format!("cannot run a worker on CPU {cpu} (key `workers.cpus`): {error}").into(),
        None => format!("cannot start a worker: {error}").into(),
    })
}

impl State {
    /// Starts everything in the configuration. Stops early, without an error, if the shutdown is requested meanwhile.
    pub fn start(config: &Config, sandbox: Sandbox, progress: Progress) -> Result<State, Failure> {
        progress.at("starting the worker");
        let worker = start_worker(config)?;
        let mut ports = Vec::new();
        for port in &config.ports {
            if !progress.is_stopping() {
                ports.push(Running::start(port, config.workers.poll, &worker, &progress)?);
            }
        }
        mirror(&mut ports);
        let vsocks = Vsocks::start(config, &progress)?;
        progress.at("waiting for signals");
        Ok(State { ports, vsocks, worker, config: config.clone(), sandbox, progress })
    }

    /// Returns the number of ports and devices as text.
    pub fn summary(&self) -> String {
        print::summary(self.ports.len(), self.vsocks.devices.len())
    }

    /// Returns the configuration as it runs now: without what could not be started.
    fn running(&self) -> Config {
        let ports = self.ports.iter().map(|running| running.config.clone()).collect();
        let vsocks = self.vsocks.devices.iter().map(|device| device.config.clone()).collect();
        Config { ports, vsocks, ..self.config.clone() }
    }

    /// Logs what a reload would do.
    pub fn preview(&mut self, file: &Path) {
        let config = match Config::load(file) {
            Ok(config) => config,
            Err(error) => return log::error!("{error}; a reload would be refused"),
        };
        let barred = [self.sandbox.barred(&config), self.sandbox.barred_forwards(&config)].concat();
        let findings = [config::check(&config), barred].concat();
        if let Some(findings) = explain(file, &findings) {
            findings.lines().for_each(|line| log::error!("{line}"));
        }
        let changes = changes(&self.running(), &config);
        for change in &changes {
            log::info!("reload preview: {change}");
        }
        let disruptive = changes.iter().filter(|change| change.disrupts()).count();
        log::info!("reload preview: {} changes, {disruptive} of them disruptive", changes.len());
    }

    /// Reloads the configuration: removes ports that are no longer in it, changes in place what can be, restarts ports that need
    /// it, starts new ones. The others are not affected.
    pub fn reload(&mut self, file: &Path) {
        self.progress.at(format!("reading {}", file.display()));
        let mut config = match Config::load(file) {
            Ok(config) => config,
            Err(error) => return log::error!("{error}; the running configuration is kept"),
        };
        let (running, barred) = (self.running(), self.sandbox.barred(&config));
        self.sandbox.hold(&mut config, &running, &barred, |found| explain(file, found));
        let changes = changes(&running, &config);
        for change in &changes {
            match change.disrupts() {
                true => log::warn!("reload: {change}"),
                false => log::info!("reload: {change}"),
            }
        }
        let findings = [config::check(&config), barred].concat();
        self.configure(&config);
        let wrong = |owner: &str| {
            let found: Vec<_> = findings.iter().filter(|finding| finding.owner == owner).cloned().collect();
            explain(file, &found)
        };
        self.reload_ports(&config, wrong);
        self.vsocks.reload(&config, &self.progress, wrong);
        self.progress.at("waiting for signals");
        log::info!("configuration reloaded: {}{}", self.summary(), print::difference(&running, &self.running()));
    }

    /// Applies the settings of the program as a whole.
    fn configure(&mut self, config: &Config) {
        logger::limit(config.log.lines);
        self.progress.at("changing the worker");
        let before = self.config.workers.cpus.clone();
        self.config = Config { ports: Vec::new(), vsocks: Vec::new(), ..config.clone() };
        if let Err(error) = self.worker.set(worker_config(config)) {
            log::error!(
                "cannot move the worker to CPU {:?} (key `workers.cpus`): {error}; it keeps its current CPU",
                config.workers.cpus
            );
            self.config.workers.cpus = before;
        }
    }

    /// `wrong`: returns why an owner's port cannot run on this machine.
    fn reload_ports(&mut self, config: &Config, wrong: impl Fn(&str) -> Option<String>) {
        let wrong = |port: &config::Port| wrong(&port.owner());
        let poll = config.workers.poll;
        // Stop first, so that other ports can take over sockets and interfaces.
        for running in std::mem::take(&mut self.ports) {
            let after = config.ports.iter().find(|port| port.name == running.config.name);
            let restart = after.is_none_or(|port| of_port(&running.config, port).iter().any(Change::disrupts));
            match after.filter(|_| restart).and_then(wrong) {
                Some(why) => {
                    log::error!("{why}; port {} is left unchanged", running.config.name);
                    self.ports.push(running);
                }
                None if restart => {
                    self.progress.at(format!("stopping port {}", running.config.name));
                    drop(running);
                }
                None => self.ports.push(running),
            }
        }
        self.change_settings(config);
        for port in &config.ports {
            if self.progress.is_stopping() {
                return;
            }
            match self.ports.iter_mut().find(|running| running.config.name == port.name) {
                Some(running) if of_port(&running.config, port).iter().any(Change::disrupts) => {}
                Some(running) => {
                    self.progress.at(format!("changing port {}", port.name));
                    running.set(port);
                }
                None => match wrong(port)
                    .map_or_else(|| Running::start(port, poll, &self.worker, &self.progress), |why| Err(why.into()))
                {
                    Ok(running) => self.ports.push(running),
                    Err(error) => log::error!("{error}"),
                },
            }
        }
        let place = |name: &str| config.ports.iter().position(|port| port.name == name);
        self.ports.sort_by_key(|running| place(&running.config.name));
        mirror(&mut self.ports);
    }

    /// Changes the settings of all ports that go on at once, before any other starts: ports that swap their VLANs never share one.
    fn change_settings(&self, config: &Config) {
        self.progress.at("changing ports");
        let changes = self.ports.iter().filter_map(|running| {
            let port = config.ports.iter().find(|port| port.name == running.config.name)?;
            let (handle, settings) = (running.handle(), settings(port, config.workers.poll));
            let differs = settings != handle.port().settings();
            let restarts = of_port(&running.config, port).iter().any(Change::disrupts);
            (differs && !restarts).then_some((handle, settings))
        });
        let changes: Vec<_> = changes.collect();
        self.worker.set_ports(&changes);
    }

    /// Prints the counters to stdout; `all`: each vsock connection too.
    pub fn print(&self, all: bool) {
        let mut text = String::new();
        if !self.ports.is_empty() {
            text += &print::tables(self.ports.iter().map(Running::report));
        }
        if !self.vsocks.devices.is_empty() {
            text += &self.vsocks.table();
            if all {
                text += &self.vsocks.connections();
            }
        }
        if !logger::print(text) {
            log::warn!("counters not printed: stdout still holds earlier reports that nobody has read");
        }
    }

    /// Returns the counters as JSON.
    pub fn json(&self) -> serde_json::Value {
        let ports: Vec<_> = self.ports.iter().map(|running| print::json(&running.report())).collect();
        serde_json::json!({ "ports": ports, "vsock": self.vsocks.json() })
    }

    /// Stops everything in order, noting each step in the progress.
    pub fn end(self) {
        let State { ports, vsocks, worker, progress, .. } = self;
        for running in ports {
            progress.at(format!("stopping port {}", running.config.name));
            drop(running);
        }
        for device in vsocks.devices {
            progress.at(format!("stopping vsock {}", device.config.cid));
            drop(device);
        }
        progress.at("stopping the vsock worker");
        drop(vsocks.worker);
        progress.at("stopping the worker");
        drop(worker);
    }
}

/// The program's ports.
type ServedPort = Measured<Ports>;

/// A running port; dropping it removes it.
struct Running {
    config: config::Port,
    kind: Kind,
    /// Where its frames are captured.
    capture: Option<(CaptureConfig, Arc<Capture>)>,
}

enum Kind {
    Vhost(Server<ServedPort>),
    E1000(E1000Server<ServedPort>),
    Tap(PortHandle<ServedPort>),
}

/// Returns a port's settings. `poll`: the default for ports that set none.
fn settings(port: &config::Port, poll: Poll) -> PortSettings {
    let config::Port { hairpin, gro, mut limits, .. } = *port;
    let (tuning, interrupt_delay) = match &port.kind {
        config::Kind::VhostUser(guest) => {
            // The address advertised to the guest is reserved for it, whether configured or derived from the port's name.
            limits.own = Some(port.mac());
            (guest.tuning, guest.interrupt_delay)
        }
        config::Kind::E1000(_) => {
            limits.own = Some(port.mac());
            Default::default()
        }
        config::Kind::Tap(_) => Default::default(),
    };
    let poll = match (port.poll.unwrap_or(poll), &port.kind) {
        // What adapts saves a guest the exits of its notifications. A card's are messages that another thread takes, and a TAP
        // interface would be read in vain, a system call each time.
        (Poll::Auto, config::Kind::E1000(_) | config::Kind::Tap(_)) => Poll::For(Duration::ZERO),
        (poll, _) => poll,
    };
    PortSettings { hairpin, gro, poll, tuning, limits, vlans: port.vlans, interrupt_delay }
}

/// Has frames of ports copied to others, whose numbers change when they are restarted, and to files.
fn mirror(ports: &mut [Running]) {
    for running in ports.iter_mut() {
        running.capture();
    }
    for running in ports.iter() {
        let mirror = running.config.mirror.as_ref();
        let name = mirror.and_then(|mirror| mirror.port.as_ref());
        let target = name.and_then(|name| ports.iter().find(|other| other.config.name == *name));
        if name.is_some() && target.is_none() {
            log::error!("port {}: the port of its key `mirror` does not run and gets no copies", running.config.name);
        }
        let frames = mirror.map_or(&[][..], |mirror| &mirror.frames);
        let capture = running.capture.as_ref().map(|(_, capture)| capture.clone());
        running.handle().mirror(target.map(Running::handle), capture, frames);
    }
}

impl Running {
    fn start(
        port: &config::Port,
        poll: Poll,
        worker: &Worker<ServedPort>,
        progress: &Progress,
    ) -> Result<Self, Failure> {
        progress.at(format!("starting port {}", port.name));
        let (settings, mode) = (settings(port, poll), port.mode);
        let kind = match &port.kind {
            config::Kind::VhostUser(VhostUser { socket, role, features, speed, link, frontend, .. }) => {
                let config = Space {
                    mac: port.mac(),
                    link_up: *link,
                    announce: false,
                    queue_pairs: port.queues,
                    mtu: port.mtu.unwrap_or(MTU),
                    speed: *speed,
                };
                let vhost = VhostConfig {
                    name: port.name.clone(),
                    socket: socket.clone(),
                    role: *role,
                    features: *features,
                    config,
                    settings,
                    frontend: frontend.limits,
                    access: frontend.access(),
                };
                let server = Server::start(vhost, worker, |guest| Measured::new(Ports::Vhost(guest), mode))?;
                if *role == Role::Server {
                    progress.made(socket);
                }
                Kind::Vhost(server)
            }
            config::Kind::E1000(card) => {
                let config = E1000Config {
                    name: port.name.clone(),
                    socket: card.socket.clone(),
                    mac: port.mac(),
                    mtu: port.mtu.unwrap_or(MTU),
                    mitigation: card.mitigation,
                    link_up: card.link,
                    settings,
                    client: card.frontend.limits,
                    access: card.frontend.access(),
                    access_poll: card.access_poll,
                };
                let server = E1000Server::start(config, worker, |card| Measured::new(Ports::E1000(card), mode))?;
                progress.made(&card.socket);
                Kind::E1000(server)
            }
            config::Kind::Tap(config::Tap { interface, tunnels }) => {
                let mut tap = TapPort::open(&port.name, interface, port.queues, port.mtu)?;
                if *tunnels && !tap.use_tunnels()? {
                    let name = &port.name;
                    log::warn!(
                        "port {name}: key `tunnels` needs Linux 6.17; the kernel here cuts frames in UDP tunnels itself"
                    );
                }
                Kind::Tap(worker.add(Port::new(Measured::new(Ports::Tap(tap), mode), settings))?)
            }
        };
        Ok(Running { config: port.clone(), kind, capture: None })
    }

    /// Starts a capture, or ends it; one that has not changed continues.
    fn capture(&mut self) {
        let wanted = self.config.capture();
        if self.capture.as_ref().map(|(config, _)| config) == wanted {
            return;
        }
        // Complete before the next one may begin in the same file.
        self.handle().mirror(None, None, &[]);
        let wanted = wanted.cloned();
        self.capture = None;
        self.capture = wanted.and_then(|config| match Capture::start(&self.config.name, &config) {
            Ok(capture) => Some((config, Arc::new(capture))),
            Err(error) => {
                log::error!("port {}: cannot capture in {}: {error}", self.config.name, config.file.display());
                None
            }
        });
    }

    fn handle(&self) -> &PortHandle<ServedPort> {
        match &self.kind {
            Kind::Vhost(server) => server.handle(),
            Kind::E1000(server) => server.handle(),
            Kind::Tap(handle) => handle,
        }
    }

    /// Applies what can be changed in place beside [`settings`]; the guest does not notice.
    fn set(&mut self, port: &config::Port) {
        let before = std::mem::replace(&mut self.config, port.clone());
        let handle = self.handle();
        if port.mode != before.mode {
            let mode = port.mode;
            handle.change(move |kind| kind.set_mode(mode));
        }
        if let Some(frontend) = port.frontend() {
            let set = match (&self.kind, &port.kind) {
                (Kind::Vhost(server), _) => {
                    server.set_link(port.link());
                    server.set_frontend(frontend.limits, frontend.access())
                }
                (Kind::E1000(server), config::Kind::E1000(card)) => {
                    server.set_link(port.link());
                    server.set_mtu(port.mtu.unwrap_or(MTU));
                    server.set_access_poll(card.access_poll);
                    server.set_client(frontend.limits, frontend.access())
                }
                _ => Ok(()),
            };
            set.unwrap_or_else(|error| log::error!("{error}"));
        }
        if let (Ports::Tap(tap), Some(mtu)) = (handle.port().kind().kind(), port.mtu.filter(|_| port.mtu != before.mtu))
            && let Err(error) = tap.set_mtu(mtu)
        {
            log::error!("port {}: cannot set the interface's MTU to {mtu}: {error}; it is left unchanged", port.name);
            self.config.mtu = before.mtu;
        }
    }

    fn report(&self) -> PortReport {
        self.handle().port().report()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_guests_that_notify_are_polled_by_auto() {
        const PORTS: [(&str, Poll); 3] = [
            ("kind = \"vhost-user\"\nsocket = \"/run/a.sock\"", Poll::Auto),
            ("kind = \"e1000\"\nsocket = \"/run/a.sock\"", Poll::For(Duration::ZERO)),
            ("kind = \"tap\"\ninterface = \"a\"", Poll::For(Duration::ZERO)),
        ];
        for (kind, auto) in PORTS {
            let of = |own: &str, default: Poll| {
                let text = format!("[[port]]\nname = \"a\"\n{kind}\n{own}");
                let config = Config::parse(&text, "test").unwrap_or_else(|error| panic!("{text}: {error}"));
                settings(&config.ports[0], default).poll
            };
            assert_eq!(of("", Poll::Auto), auto, "{kind}: the default");
            assert_eq!(of("poll = \"auto\"", Poll::Unlimited), auto, "{kind}: its own");
            let some = Poll::For(Duration::from_micros(50));
            assert_eq!([of("poll = \"50us\"", Poll::Auto), of("", some)], [some; 2], "{kind}");
            assert_eq!(of("poll = \"unlimited\"", Poll::Auto), Poll::Unlimited, "{kind}");
        }
    }
}
