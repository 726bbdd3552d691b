//! The vsock devices of a running daemon.

use crate::{config, report};
use ringroad_host::vsock::{VsockConfig, VsockServer, VsockWorker};
use ringroad_switch::Poll;
use ringroad_vsock::{Kind, Settings};
use std::time::Duration;

/// The devices and the worker that serves them.
pub struct Vsocks {
    // Dropped before the worker.
    pub devices: Vec<(config::Vsock, VsockServer)>,
    worker: Option<VsockWorker>,
}

fn duration(poll: Poll) -> Duration {
    match poll {
        Poll::For(time) => time,
        Poll::Unlimited => Duration::MAX,
    }
}

impl Vsocks {
    /// Starts what the configuration names.
    pub fn start(config: &config::Config) -> Result<Vsocks, Box<dyn std::error::Error>> {
        let mut vsocks = Vsocks { devices: Vec::new(), worker: None };
        for vsock in &config.vsocks {
            vsocks.add(vsock, config)?;
        }
        Ok(vsocks)
    }

    fn add(&mut self, vsock: &config::Vsock, config: &config::Config) -> Result<(), Box<dyn std::error::Error>> {
        let worker = match &mut self.worker {
            Some(worker) => worker,
            // Without vsock devices it is not needed.
            none => {
                let (cpu, poll) = (config.workers.cpus.first().copied(), duration(config.workers.poll));
                let worker = VsockWorker::start(cpu, poll, CROSSINGS);
                none.insert(worker.map_err(|error| format!("cannot start the vsock worker: {error}"))?)
            }
        };
        let settings = Settings {
            direct: vsock.direct,
            buffer: vsock.buffer,
            connections: vsock.connections,
            memory: vsock.memory,
            poll: duration(vsock.poll.unwrap_or(config.workers.poll)),
            ..Settings::default()
        };
        let server = VsockServer::start(
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
            },
            worker,
        )?;
        self.devices.push((vsock.clone(), server));
        Ok(())
    }

    /// Devices that are not in the configuration any more, or differ, go; new ones come; the others do not notice.
    pub fn reload(&mut self, config: &config::Config) {
        self.devices.retain(|(running, _)| config.vsocks.contains(running));
        for vsock in &config.vsocks {
            if !self.devices.iter().any(|(running, _)| running.cid == vsock.cid)
                && let Err(error) = self.add(vsock, config)
            {
                log::error!("{error}");
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
            .map(|(config, server)| {
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
        for (_, server) in &self.devices {
            for connection in server.stack().connections() {
                let kind = match connection.kind {
                    Kind::Stream => "stream",
                    Kind::SeqPacket => "seqpacket",
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
        let device = |(config, server): &(config::Vsock, VsockServer)| {
            let report = server.stack().report();
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
            })
        };
        self.devices.iter().map(device).collect()
    }
}

/// Connections with others that each guest may have asked for at once.
const CROSSINGS: usize = 16384;
