//! The devices, ours and rust-vmm's, with the host's programs of their guests, and our driver on them.

use super::args::{Args, Polling};
use crate::{
    peer::{command, in_chroot, words},
    rig::{Device, on},
    session::Session,
    vsock_ends::CID,
};
use ringroad_host::vsock::{VsockClient, VsockConnector};
use ringroad_traffic::{
    child::{Folder, Program},
    options::poll,
    vsock::{connector, each_read},
};
use ringroad_vsock::{MAX_PACKET, Settings};
use serde_json::json;
use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A device, and the host's programs of its guest. It has a second guest, whose socket is the second one.
pub(super) struct Vsock {
    pub(super) device: Device,
    pub(super) host: PathBuf,
    /// Whether it is rust-vmm's.
    pub(super) is_peer: bool,
    /// How long the driver's programs poll.
    pub(super) poll: Duration,
    /// What the host's program has received from the guest.
    pub(super) count: Count,
}

/// Bytes received.
pub(super) type Count = Arc<AtomicU64>;

/// rust-vmm's device, which is installed.
pub(super) struct Peer {
    words: Vec<String>,
    name: String,
}

/// Port of the host's echo server.
pub(super) const ECHO: u32 = 7;
/// Port of the host's program that counts what it receives.
pub(super) const SINK: u32 = 8;
/// Port of the guest's program that counts what it receives.
pub(super) const GUEST: u32 = 9;
/// Port of the host's program that relays to the other guest.
pub(super) const RELAY: u32 = 10;
/// CID of the other guest.
pub(super) const SIBLING: u64 = CID + 1;
/// How long to wait for a device, or for progress of a connection.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Payload bytes of the driver's receive buffers for siblings of rust-vmm's device. It passes packets on as they are, and loses
/// those that do not fit.
pub(super) const PEER_RECEIVE: usize = MAX_PACKET;
/// The program of rust-vmm's device.
pub(super) const PEER: &str = "vhost-device-vsock";

impl Vsock {
    /// Starts the host's programs for the guest of a device.
    fn new(device: Device, host: PathBuf, polling: &Polling) -> Result<Vsock, String> {
        let count = Count::default();
        serve(&host, ECHO, |stream| each_read(&stream, 64 << 10, |bytes| (&stream).write_all(bytes)))?;
        let received = count.clone();
        serve(&host, SINK, move |stream| each_read(&stream, 64 << 10, |bytes| add(&received, bytes)))?;
        Ok(Vsock { device, host, is_peer: false, poll: poll(&polling.poll)?, count })
    }
}

/// Returns the option of rust-vmm's device for a guest, whose siblings are the other guests of its group.
pub(super) fn vm(cid: u64, socket: &Path, host: &Path) -> String {
    format!("guest-cid={cid},socket={},uds-path={},groups=g", socket.display(), host.display())
}

/// Counts received bytes.
pub(super) fn add(count: &Count, bytes: &[u8]) -> io::Result<()> {
    count.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    Ok(())
}

/// Runs a program of the host that serves a guest's connections to a port, each in a thread.
pub(super) fn serve(
    host: &Path,
    port: u32,
    program: impl Fn(UnixStream) -> io::Result<()> + Clone + Send + 'static,
) -> Result<(), String> {
    let mut path = host.as_os_str().to_owned();
    path.push(format!("_{port}"));
    let listener = UnixListener::bind(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let program = program.clone();
            thread::spawn(move || program(stream));
        }
    });
    Ok(())
}

/// Connects a program of the host to a guest.
pub(super) fn connect(host: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(host)?;
    stream.write_all(format!("CONNECT {GUEST}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::with_capacity(1, &stream).read_line(&mut line)?;
    Ok(stream)
}

impl Args {
    /// Starts our device with two guests, and a program that relays from the first one to the second one, as guests need that are
    /// not connected ring to ring.
    pub(super) fn ours(&self, folder: &Folder, polling: &Polling) -> Result<Vsock, String> {
        let guest = |cid: u64, name: &str| {
            let [socket, host] = ["sock", "host"].map(|kind| folder.file(&format!("{name}.{kind}")));
            let section = format!(
                "[[vsock]]\ncid = {cid}\nsocket = \"{}\"\nhost = \"{}\"\ngroups = [\"g\"]\n",
                socket.display(),
                host.display()
            );
            (section, socket, host)
        };
        let (first, socket, host) = guest(CID, "ours");
        let (second, sibling, sibling_host) = guest(SIBLING, "sibling");
        let workers = format!("[workers]\ncpus = [{}]\npoll = \"{}\"\n", self.common.device_cpu, polling.device_poll);
        let sockets = vec![socket, sibling, host.clone(), sibling_host.clone()];
        let device = Device::ours(folder, "ours", &(workers + &first + &second), sockets)?;
        serve(&host, RELAY, move |from| {
            let mut to = connect(&sibling_host)?;
            each_read(from, 64 << 10, |bytes| to.write_all(bytes))
        })?;
        Vsock::new(device, host, polling)
    }

    /// Returns rust-vmm's device, or `None` if it is not requested. If it is not installed, adds a row to `session`.
    pub(super) fn find(&self, session: &mut Session<'_>) -> Result<Option<Peer>, String> {
        if self.alone {
            return Ok(None);
        }
        let words = match &self.vhost_device_vsock {
            Some(line) => words(line),
            None => in_chroot(PEER).unwrap_or_else(|_| vec![PEER.into()]),
        };
        let Ok(version) = command(&words).arg("--version").output() else {
            let reason = format!("{PEER} is not installed (scripts/peers forky installs it)");
            session.without("peer", json!({ "peer": null }), &reason)?;
            return Ok(None);
        };
        let name = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        Ok(Some(Peer { words, name }))
    }

    /// Starts rust-vmm's device.
    pub(super) fn peer(
        &self,
        folder: &Folder,
        Peer { words, name }: &Peer,
        polling: &Polling,
    ) -> Result<Vsock, String> {
        let log = folder.file("peer.log");
        let file = |guest: &str, kind: &str| folder.file(&format!("{guest}.{kind}"));
        let guests =
            [(CID, "peer"), (SIBLING, "peer-sibling")].map(|(cid, name)| (cid, file(name, "sock"), file(name, "host")));
        let mut line = Command::new("taskset");
        line.arg("-c").arg(self.common.device_cpu.to_string()).args(words).stdout(Stdio::null());
        guests.iter().for_each(|(cid, socket, host)| {
            line.arg("--vm").arg(vm(*cid, socket, host));
        });
        let mut program = Program::start(PEER, &mut line, &log)?;
        for path in guests.iter().flat_map(|(_, socket, host)| [socket, host]) {
            program.wait_for(path, PATIENCE, &log)?;
        }
        program.hold(true);
        let [(_, socket, host), (_, sibling, _)] = guests;
        let device = Device { name: name.clone(), sockets: vec![socket, sibling], programs: vec![program] };
        Ok(Vsock { is_peer: true, ..Vsock::new(device, host, polling)? })
    }

    /// Connects our driver to a device as one of its guests, the first one being 0, with receive buffers of this size.
    pub(super) fn connect(
        &self,
        vsock: &Vsock,
        guest: usize,
        receive: usize,
        cpu: usize,
    ) -> Result<VsockClient, String> {
        let settings = Settings { poll: vsock.poll, ..Settings::default() };
        let connector = connector(vsock.device.socket(guest)?, self.ring, settings);
        let connector = VsockConnector { cid: Some(CID + guest as u64), receive, ..connector };
        let start = Instant::now();
        let client = loop {
            match on("cannot run on CPU", cpu, || connector.connect().map_err(|error| error.to_string())) {
                // vhost-device-vsock creates a new socket for each frontend; until then, connections are reset.
                Err(_) if start.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(50)),
                result => break result?,
            }
        };
        while !client.stack().is_running() && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(client)
    }
}
