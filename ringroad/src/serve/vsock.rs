//! The vsock devices of a running daemon.

use super::{
    changes::{Change, of_vsock},
    progress::Progress,
};
use crate::{config, report};
use ringroad_host::{
    vhost_user::Role,
    vsock::{VsockConfig, VsockServer, VsockWorker},
};
use ringroad_switch::Poll;
use ringroad_vsock::{Settings, SocketType};
use std::time::Duration;

/// The devices and the worker that serves them.
pub struct Vsocks {
    // Dropped before the worker.
    pub devices: Vec<ServedDevice>,
    pub worker: Option<VsockWorker>,
}

/// A device that works. Dropped, it is gone.
pub struct ServedDevice {
    pub config: config::Vsock,
    server: VsockServer,
}

fn duration(poll: Poll) -> Duration {
    match poll {
        Poll::For(time) => time,
        Poll::Unlimited => Duration::MAX,
    }
}

/// `poll`: what holds for devices that say nothing themselves.
fn vsock_config(vsock: &config::Vsock, poll: Poll) -> VsockConfig {
    let settings = Settings {
        direct: vsock.direct,
        buffer: vsock.buffer,
        connections: vsock.connections,
        memory: vsock.memory,
        poll: duration(vsock.poll.unwrap_or(poll)),
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
        access: vsock.frontend.access,
    }
}

impl Vsocks {
    /// Starts what the configuration names; told to stop meanwhile, it has not started the rest.
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
            // Without vsock devices it is not needed.
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

    /// What can be changed in place is; devices that are not in the configuration any more go, new ones come, those that cannot
    /// be changed in place are made anew; the others do not notice. `wrong`: why an owner's device cannot be made on this machine.
    pub fn reload(&mut self, config: &config::Config, progress: &Progress, wrong: impl Fn(&str) -> Option<String>) {
        let wrong = |cid: u64| {
            let index = config.vsocks.iter().position(|vsock| vsock.cid == cid)?;
            wrong(&config::vsock_owner(index))
        };
        let poll = config.workers.poll;
        if let Some(worker) = &self.worker
            && let Err(error) = worker.set(config.workers.cpus.first().copied(), duration(poll))
        {
            log::error!("the vsock worker stays where it is (key `workers.cpus`): {error}");
        }
        self.devices.retain(|device| {
            let after = config.vsocks.iter().find(|vsock| vsock.cid == device.config.cid);
            let cut = after.is_none_or(|vsock| of_vsock(&device.config, vsock).iter().any(Change::cuts));
            if !cut {
                return true;
            }
            if let Some(why) = wrong(device.config.cid) {
                log::error!("{why}; vsock {} stays as it is", device.config.cid);
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
            if of_vsock(&device.config, vsock).iter().any(Change::cuts) {
                continue;
            }
            progress.at(format!("changing vsock {}", vsock.cid));
            let host = device.config.host.clone();
            match device.server.set(&vsock_config(vsock, poll)) {
                Ok(()) => device.config = vsock.clone(),
                Err(error) => {
                    log::error!("{error}; it stays as it is");
                    device.config = config::Vsock { host, ..vsock.clone() };
                }
            }
            if let Some(host) = &device.config.host {
                progress.made(host);
            }
        }
    }

    /// What has happened at each device.
    pub fn table(&self) -> String {
        let header = [
            "vsock",
            "connections",
            "opened",
            "refused",
            "limited",
            "memory",
            "exhausted",
            "received",
            "sent: direct",
            "queued",
            "dropped",
            "wrong",
            "faults",
        ];
        let rows: Vec<Vec<String>> = self
            .devices
            .iter()
            .map(|ServedDevice { config, server }| {
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
                std::iter::once(config.cid.to_string()).chain(numbers.into_iter().map(report::count)).collect()
            })
            .collect();
        report::table(&header, &rows)
    }

    /// The connections with the host.
    pub fn connections(&self) -> String {
        let header = ["guest", "host port", "kind", "to guest", "from guest", "credit", "queued", "unread"];
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
                rows.push(names.into_iter().chain(numbers.map(report::count)).collect());
            }
        }
        if rows.is_empty() { String::new() } else { report::table(&header, &rows) }
    }

    /// The same as JSON.
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

/// Connections with others that each guest may have asked for at once.
const CROSSINGS: usize = 16384;
