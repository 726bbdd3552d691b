//! Devices that are stopped while another one is measured, and runs of our driver against them.

use crate::options::Common;
use ringroad_host::vhost_user::Connection;
use ringroad_ring::DriverFault;
use ringroad_traffic::{
    PLAIN_BURST, Plain, Settings, Totals, Traffic,
    child::{Folder, Program, port},
    options::{Ring, pin},
};
use std::{
    fmt::Display,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

/// The rings of a driver.
#[derive(Clone, Copy)]
pub struct Rings {
    /// Their layout.
    pub layout: Ring,
    /// Number of entries of each.
    pub size: u32,
}

/// A device under test. It only runs while it is measured.
pub struct Device {
    /// Name and version.
    pub name: String,
    /// The sockets of its ports.
    pub sockets: Vec<PathBuf>,
    /// Its processes, ended in this order.
    pub programs: Vec<Program>,
}

impl Device {
    /// Starts `ringroad serve` with a configuration, waits for its sockets, and stops it (SIGSTOP). `name` distinguishes its
    /// files from those of others in the folder.
    pub fn ours(folder: &Folder, name: &str, config: &str, sockets: Vec<PathBuf>) -> Result<Device, String> {
        let program = Program::serve(folder, name, config, &[], &sockets)?;
        program.hold(true);
        Ok(Device { name: format!("ringroad {}", env!("CARGO_PKG_VERSION")), sockets, programs: vec![program] })
    }

    /// As `ours`, of another ringroad program.
    pub fn other(
        program: &Path,
        folder: &Folder,
        name: &str,
        config: &str,
        sockets: Vec<PathBuf>,
    ) -> Result<Device, String> {
        let serve = Program::serve_by(Command::new(program), folder, name, config, &[], &sockets)?;
        serve.hold(true);
        Ok(Device { name: format!("{}", program.display()), sockets, programs: vec![serve] })
    }

    /// Stops or continues all its processes.
    pub fn hold(&self, still: bool) {
        self.programs.iter().for_each(|program| program.hold(still));
    }

    /// Lets it run for the time of `work`.
    pub fn awake<T>(&self, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        self.hold(false);
        let result = work();
        self.hold(true);
        result
    }

    /// Returns the socket of a port.
    pub fn socket(&self, port: usize) -> Result<&PathBuf, String> {
        self.sockets.get(port).ok_or_else(|| format!("{} has no port {port}", self.name))
    }
}

/// Runs `work` in a thread of its own on a CPU, so that processes that this thread starts later do not inherit the CPU.
pub fn on<T: Send>(option: &str, cpu: usize, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    let pinned = || pin(option, cpu).and_then(|()| work());
    thread::scope(|scope| scope.spawn(pinned).join().map_err(|_| "a measuring thread panicked".to_owned())?)
}

impl Common {
    /// Runs `work` on the driver's CPU.
    pub fn on_driver_cpu<T: Send>(&self, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
        on("--driver-cpu", self.driver_cpu, work)
    }

    /// Starts our device with ports that have these lines in their configuration, stopped.
    pub fn ours(&self, folder: &Folder, name: &str, poll: &str, ports: &[&str]) -> Result<Device, String> {
        let (config, sockets) = self.config(folder, name, poll, ports);
        Device::ours(folder, name, &config, sockets)
    }

    /// Returns a configuration with ports that have these lines, and their sockets.
    pub fn config(&self, folder: &Folder, name: &str, poll: &str, ports: &[&str]) -> (String, Vec<PathBuf>) {
        let Common { device_cpu, gather, turn, .. } = self;
        let mut config =
            format!("[workers]\ncpus = [{device_cpu}]\npoll = \"{poll}\"\ngather = \"{gather}\"\nturn = {turn}\n");
        let mut sockets = Vec::new();
        for (number, lines) in ports.iter().enumerate() {
            let socket = folder.file(&format!("{name}-{number}.sock"));
            config += &port(&format!("p{number}"), &socket, lines);
            sockets.push(socket);
        }
        (config, sockets)
    }

    /// Connects our driver to a port.
    pub fn connect(&self, device: &Device, port: usize, rings: Rings, frame: usize) -> Result<Connection, String> {
        let connector = self.without.connector(device.socket(port)?, rings.layout, rings.size, frame.max(1518));
        connector.connect().map_err(|error| format!("{}, {} {frame} B: {error}", device.name, rings.layout))
    }

    /// Does a warm-up run and a measured run of what `start` returns, on the driver's CPU while the device is awake.
    pub fn measure<R: FnMut(Duration) -> Result<Totals, DriverFault>>(
        &self,
        device: &Device,
        what: &str,
        start: impl FnOnce() -> Result<R, String> + Send,
    ) -> Result<Totals, String> {
        let failed = |error: &dyn Display| format!("{}, {what}: {error}", device.name);
        let work = || {
            let mut run = start()?;
            run(Duration::from_millis(200))
                .and_then(|_| run(Duration::from_secs_f64(self.seconds)))
                .map_err(|error| failed(&error))
        };
        match device.awake(|| self.on_driver_cpu(work))? {
            Totals { received: 0, .. } => Err(failed(&"no frame arrived")),
            totals => Ok(totals),
        }
    }

    /// Measures the plain driver on one port of a device.
    pub fn run_plain(&self, device: &Device, port: usize, rings: Rings, settings: &Settings) -> Result<Totals, String> {
        let frame = settings.longest();
        self.measure(device, &format!("{} {frame} B, ring {}", rings.layout, rings.size), || {
            let connection = self.connect(device, port, rings, frame)?;
            let mut plain = Plain::new(connection, settings.clone())
                .ok_or_else(|| format!("the plain driver needs a --queue-size above {PLAIN_BURST}"))?;
            Ok(move |time| plain.run(time, |_| {}))
        })
    }

    /// Measures our driver on one port of a device.
    pub fn run(&self, device: &Device, port: usize, rings: Rings, settings: &Settings) -> Result<Totals, String> {
        let frame = settings.longest();
        self.measure(device, &format!("{} {frame} B, ring {}", rings.layout, rings.size), || {
            let mut connection = self.connect(device, port, rings, frame)?;
            let mut traffic = Traffic::new(settings.clone(), &mut connection.driver);
            Ok(move |time| traffic.run(&mut connection, time, |_| {}))
        })
    }
}
