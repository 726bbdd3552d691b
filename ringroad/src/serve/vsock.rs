//! The vsock devices of the running daemon: start, reload, counters. Called by state.rs.

use super::{
    changes::{Change, of_vsock},
    print,
    progress::Progress,
};
use crate::config;
use ringroad_host::{
    vhost_user::Role,
    vsock::{VsockConfig, VsockServer, VsockWorker},
};
use ringroad_switch::Poll;
use ringroad_vsock::{Settings, SocketType};
use std::time::Duration;

/// The devices and the worker that serves them.
pub struct Vsocks {
    // Declared before the worker, so that they are dropped first.
    pub devices: Vec<ServedDevice>,
    pub worker: Option<VsockWorker>,
}

/// A running device; dropping it removes it.
pub struct ServedDevice {
    pub config: config::Vsock,
    server: VsockServer,
}

fn duration(poll: Poll) -> Duration {
    match poll {
        Poll::For(time) => time,
        // It is the worker's schedule that adapts.
        Poll::Auto => Duration::ZERO,
        Poll::Unlimited => Duration::MAX,
    }
}

/// `poll`: the default for devices that set none.
fn vsock_config(vsock: &config::Vsock, poll: Poll) -> VsockConfig {
    let settings = Settings {
        direct: vsock.direct,
        buffer: vsock.buffer,
        connections: vsock.connections,
        memory: vsock.memory,
        poll: duration(vsock.poll.unwrap_or(poll)),
        interrupt_delay: vsock.interrupt_delay,
        ..Settings::default()
    };
    VsockConfig {
        name: format!("vsock {}", vsock.cid),
        cid: vsock.cid,
        socket: vsock.socket.clone(),
        role: vsock.role,
        host: vsock.host.clone(),
        forward: vsock.forward.clone(),
        groups: vsock.groups.clone(),
        features: vsock.features,
        settings,
        connects: vsock.connects,
        socket_memory: vsock.socket_memory,
        limits: vsock.frontend.limits,
        access: vsock.frontend.access(),
    }
}

impl Vsocks {
    /// Starts the devices of the configuration. Stops early, without an error, if the shutdown is requested meanwhile.
    pub fn start(config: &config::Config, progress: &Progress) -> Result<Vsocks, Box<dyn std::error::Error>> {
        let mut vsocks = Vsocks { devices: Vec::new(), worker: None };
        for vsock in &config.vsocks {
            if !progress.is_stopping() {
                vsocks.add(vsock, config, progress)?;
            }
        }
        Ok(vsocks)
    }

    fn add(
        &mut self,
        vsock: &config::Vsock,
        config: &config::Config,
        progress: &Progress,
    ) -> Result<(), Box<dyn std::error::Error>> {
        progress.at(format!("starting vsock {}", vsock.cid));
        let worker = match &mut self.worker {
            Some(worker) => worker,
            // Started with the first device.
            none => {
                let (cpu, poll) = (config.workers.cpus.first().copied(), duration(config.workers.poll));
                let worker = VsockWorker::start(cpu, poll, CROSSINGS);
                none.insert(worker.map_err(|error| format!("cannot start the vsock worker: {error}"))?)
            }
        };
        let server = VsockServer::start(vsock_config(vsock, config.workers.poll), worker)?;
        let made = (vsock.role == Role::Server).then_some(&vsock.socket);
        made.into_iter().chain(&vsock.host).for_each(|path| progress.made(path));
        self.devices.push(ServedDevice { config: vsock.clone(), server });
        Ok(())
    }

    /// Reloads the devices: removes those no longer in the configuration, changes in place what can be, restarts devices that
    /// need it, starts new ones. The others are not affected. `wrong`: returns why an owner's device cannot run on this machine.
    pub fn reload(&mut self, config: &config::Config, progress: &Progress, wrong: impl Fn(&str) -> Option<String>) {
        let wrong = |cid: u64| {
            let index = config.vsocks.iter().position(|vsock| vsock.cid == cid)?;
            wrong(&config::vsock_owner(index))
        };
        let poll = config.workers.poll;
        if let Some(worker) = &self.worker
            && let Err(error) = worker.set(config.workers.cpus.first().copied(), duration(poll))
        {
            log::error!("cannot move the vsock worker (key `workers.cpus`): {error}; it keeps its current CPU");
        }
        self.devices.retain(|device| {
            let after = config.vsocks.iter().find(|vsock| vsock.cid == device.config.cid);
            let restart = after.is_none_or(|vsock| of_vsock(&device.config, vsock).iter().any(Change::disrupts));
            if !restart {
                return true;
            }
            if let Some(why) = wrong(device.config.cid) {
                log::error!("{why}; vsock {} is left unchanged", device.config.cid);
                return true;
            }
            progress.at(format!("stopping vsock {}", device.config.cid));
            false
        });
        for vsock in &config.vsocks {
            if progress.is_stopping() {
                return;
            }
            let Some(device) = self.devices.iter_mut().find(|device| device.config.cid == vsock.cid) else {
                let added = wrong(vsock.cid).map_or_else(|| self.add(vsock, config, progress), |why| Err(why.into()));
                added.unwrap_or_else(|error| log::error!("{error}"));
                continue;
            };
            if of_vsock(&device.config, vsock).iter().any(Change::disrupts) {
                continue;
            }
            progress.at(format!("changing vsock {}", vsock.cid));
            let host = device.config.host.clone();
            match device.server.set(&vsock_config(vsock, poll)) {
                Ok(()) => device.config = vsock.clone(),
                Err(error) => {
                    log::error!("{error}; its host socket is left unchanged");
                    device.config = config::Vsock { host, ..vsock.clone() };
                }
            }
            if let Some(host) = &device.config.host {
                progress.made(host);
            }
        }
        let place = |cid: u64| config.vsocks.iter().position(|vsock| vsock.cid == cid);
        self.devices.sort_by_key(|device| place(device.config.cid));
    }

    /// Returns the counters of all devices as a table.
    pub fn table(&self) -> String {
        let groups = [
            ("", &["cid"][..]),
            ("connections", &["open", "total"]),
            ("connects refused", &["total", "over rate"]),
            ("memory", &["bytes", "exhausted"]),
            ("packets", &["received", "sent direct", "sent queued", "dropped"]),
            ("errors", &["protocol", "faults"]),
        ];
        let rows = self.devices.iter().map(|ServedDevice { config, server }| {
            let report = server.stack().report();
            let numbers = [
                report.connections as u64,
                report.opened,
                report.refused,
                report.limited,
                (report.memory + report.crossing) as u64,
                report.exhausted,
                report.received,
                report.ways.direct,
                report.ways.queued,
                report.ways.dropped,
                report.wrong,
                report.faults,
            ];
            (config.cid.to_string(), numbers.to_vec())
        });
        print::grouped(&groups, rows)
    }

    /// Returns the state of each connection with the host as a table.
    pub fn connections(&self) -> String {
        let header = ["guest (cid:port)", "host port", "kind", "bytes sent", "received", "credit", "queued", "unread"];
        let mut rows: Vec<Vec<String>> = Vec::new();
        for ServedDevice { server, .. } in &self.devices {
            for connection in server.stack().connections() {
                let kind = match connection.kind {
                    SocketType::Stream => "stream",
                    SocketType::SeqPacket => "seqpacket",
                };
                let numbers = [
                    connection.sent,
                    connection.received,
                    connection.credit as u64,
                    connection.queued as u64,
                    connection.unread as u64,
                ];
                let names = [connection.key.peer.to_string(), connection.key.port.to_string(), kind.into()];
                rows.push(names.into_iter().chain(numbers.map(ringroad_text::count)).collect());
            }
        }
        if rows.is_empty() { String::new() } else { ringroad_text::table(&header, &rows) }
    }

    /// Returns the counters as JSON.
    pub fn json(&self) -> serde_json::Value {
        let device = |ServedDevice { config, server }: &ServedDevice| {
            let report = server.stack().report();
            let sockets = server.sockets();
            serde_json::json!({
                "cid": config.cid,
                "connections": report.connections,
                "opened": report.opened,
                "refused": report.refused,
                "limited": report.limited,
                "memory": report.memory,
                "memory_siblings": report.crossing,
                "exhausted": report.exhausted,
                "received": report.received,
                "direct": report.ways.direct,
                "queued": report.ways.queued,
                "dropped": report.ways.dropped,
                "wrong": report.wrong,
                "faults": report.faults,
                "sockets": sockets.open,
                "socket_bytes": sockets.buffers,
                "over_limit": sockets.refused,
                "turned_away": sockets.turned_away,
            })
        };
        self.devices.iter().map(device).collect()
    }
}

/// Limit of the connections to other guests that each guest may have open at once.
const CROSSINGS: usize = 16384;
