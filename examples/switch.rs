//! A switch between two guests and a TAP interface of the host. As root:
//!
//!     cargo run --example switch -- /tmp/vm1.sock /tmp/vm2.sock rr0
//!
//! Then start the guests with these sockets (README.md shows how, for QEMU and User-Mode Linux).

use ringroad::{
    Port, TapPort, Worker, WorkerConfig, ports,
    switch::Limits,
    vhost_user::{Server, VhostConfig, VhostPort},
};
use std::{error::Error, thread, time::Duration};

ports! {
    /// The kinds of ports of this switch.
    enum Ports {
        Guest(VhostPort),
        Tap(TapPort),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [first, second, interface] = &arguments[..] else {
        return Err("expected two sockets and an interface, such as: /tmp/vm1.sock /tmp/vm2.sock rr0".into());
    };
    let worker = Worker::start(WorkerConfig::default())?;
    let mut guests = Vec::new();
    for (number, socket) in (1..).zip([first, second]) {
        let mut config = VhostConfig::new(&format!("vm{number}"), socket);
        // Each guest has an address of its own, which no other port can take.
        config.config.mac.0[5] = number;
        config.settings.limits.own = Some(config.config.mac);
        guests.push(Server::start(config, &worker, Ports::Guest)?);
    }
    let tap = TapPort::open("uplink", interface, 1, None)?;
    let mut settings = ringroad::PortSettings::default();
    settings.limits = Limits { addresses: 1024, ..settings.limits };
    let uplink = worker.add(Port::new(Ports::Tap(tap), settings))?;
    println!("ready");
    loop {
        thread::sleep(Duration::from_secs(1));
        for port in guests.iter().map(Server::handle).chain([&uplink]) {
            let report = port.port().report();
            println!("{}: {} frames received, {} sent", report.name, report.received.frames, report.sent.frames);
        }
    }
}
