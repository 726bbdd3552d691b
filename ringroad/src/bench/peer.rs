//! Whom ringroad is measured against: DPDK's testpmd of two versions, and OVS-DPDK. Called by each bench.

use super::rig::{Common, Device};
use crate::child::{Folder, Program};
use clap::ValueEnum;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// Whom to measure against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// DPDK as it is installed: dpdk-testpmd
    Dpdk,
    /// The newer DPDK in the chroot of scripts/peers forky
    Forky,
    /// A private OVS-DPDK
    Ovs,
    /// Nobody: ours alone
    None,
}

/// The peers of a bench.
#[derive(clap::Args)]
pub struct Peers {
    /// Whom to measure against, one after the other [default: dpdk, where it is installed]
    #[arg(long, value_enum, value_delimiter = ',')]
    peer: Vec<Kind>,
    /// Short for --peer none
    #[arg(long, conflicts_with = "peer")]
    alone: bool,
    /// Another command for --peer dpdk
    #[arg(long, default_value = "dpdk-testpmd")]
    testpmd: String,
}

/// A peer that is there.
pub enum Peer {
    /// DPDK: the words of the command that is its testpmd.
    Testpmd(Vec<String>),
    /// OVS-DPDK.
    Ovs,
    /// Nobody.
    None,
}

/// Where Debian has the ovs-vswitchd that is built with DPDK.
const VSWITCHD: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
/// The flow by which OVS does what testpmd calls macswap.
const MACSWAP: &str =
    "actions=push:NXM_OF_ETH_SRC[],push:NXM_OF_ETH_DST[],pop:NXM_OF_ETH_SRC[],pop:NXM_OF_ETH_DST[],IN_PORT";

impl Peers {
    /// Those that were asked for. One that is missing is an error; the default is nobody then.
    pub fn found(&self) -> Result<Vec<Peer>, String> {
        if self.alone {
            return Ok(vec![Peer::None]);
        }
        if self.peer.is_empty() {
            let peer = self.find(Kind::Dpdk).unwrap_or_else(|missing| {
                eprintln!("{missing}: measuring ours alone");
                Peer::None
            });
            return Ok(vec![peer]);
        }
        self.peer.iter().map(|&kind| self.find(kind)).collect()
    }

    fn find(&self, kind: Kind) -> Result<Peer, String> {
        match kind {
            Kind::Dpdk => {
                let words: Vec<String> = self.testpmd.split_whitespace().map(str::to_owned).collect();
                // Whatever it answers: that it answers says that it is there.
                match command(&words).arg("--version").output() {
                    Ok(_) => Ok(Peer::Testpmd(words)),
                    Err(_) => {
                        Err(format!("{} is not installed (on Debian, scripts/peers dpdk installs it)", self.testpmd))
                    }
                }
            }
            Kind::Forky => {
                let folder = cache().join("forky");
                // The second one is there when the chroot's mounts are.
                for file in ["usr/bin/dpdk-testpmd", "proc/self/exe"] {
                    if !folder.join(file).exists() {
                        let folder = folder.display();
                        return Err(format!("--peer forky: no {folder}/{file} (scripts/peers forky sets it up)"));
                    }
                }
                if !std::env::temp_dir().starts_with("/tmp") {
                    return Err("--peer forky: the chroot shares /tmp with us, but TMPDIR is another folder".into());
                }
                Ok(Peer::Testpmd(vec!["chroot".into(), folder.display().to_string(), "dpdk-testpmd".into()]))
            }
            Kind::Ovs if !Path::new(VSWITCHD).exists() => {
                Err(format!("--peer ovs: no {VSWITCHD} (on Debian, scripts/peers dpdk installs it)"))
            }
            Kind::Ovs => Ok(Peer::Ovs),
            Kind::None => Ok(Peer::None),
        }
    }
}

impl Peer {
    /// Its device with so many ports, held still. testpmd does what `forward` says; OVS sends back what comes, with the MAC
    /// addresses swapped, where there is one port, and is a learning switch where there are several.
    pub fn start(
        &self,
        common: &Common,
        folder: &Folder,
        ports: usize,
        forward: &str,
    ) -> Result<Option<Device>, String> {
        let device = match self {
            Peer::Testpmd(words) => start_testpmd(words, common.device_cpu, folder, ports, forward)?,
            Peer::Ovs => start_ovs(common.device_cpu, folder, ports)?,
            Peer::None => return Ok(None),
        };
        device.hold(true);
        Ok(Some(device))
    }
}

fn command(words: &[String]) -> Command {
    let mut command = Command::new(words.first().map_or("", String::as_str));
    command.args(words.iter().skip(1));
    command
}

/// testpmd on one CPU, without PCI; what comes behind `--` is missing. `name` sets it apart from others that run.
pub fn testpmd(words: &[String], cpu: usize, name: &str) -> Command {
    hugepages();
    let mut command = command(words);
    command
        .args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--main-lcore", "0", "-v", "--no-pci", "--in-memory"])
        .args(["--file-prefix", &format!("ringroad{}{name}", std::process::id()), "-m", "512"]);
    command
}

/// DPDK's version, as testpmd says it in its log.
pub fn version(log: &Path) -> String {
    let said = fs::read_to_string(log).unwrap_or_default();
    let version = said.split("RTE Version: 'DPDK ").nth(1).and_then(|rest| rest.split('\'').next());
    version.unwrap_or("of unknown version").to_owned()
}

fn start_testpmd(words: &[String], cpu: usize, folder: &Folder, ports: usize, forward: &str) -> Result<Device, String> {
    let log = folder.file("dpdk.log");
    let sockets: Vec<_> = (0..ports).map(|port| folder.file(&format!("dpdk-{port}.sock"))).collect();
    let mut command = testpmd(words, cpu, "");
    for (number, socket) in sockets.iter().enumerate() {
        // Another peer's may lie there still.
        let _ = fs::remove_file(socket);
        command.args(["--vdev", &format!("net_vhost{number},iface={},queues=1", socket.display())]);
    }
    command
        .args(["--", "--nb-cores=1", &format!("--forward-mode={forward}"), "--auto-start", "--txpkts=64"])
        .args(["--stats-period", "3600"])
        .stdout(Stdio::null());
    let mut program = Program::start(&words.join(" "), &mut command, &log)?;
    for socket in &sockets {
        program.wait_for(socket, Duration::from_secs(20), &log)?;
    }
    // It forwards from a moment after its sockets are there.
    thread::sleep(Duration::from_secs(1));
    let ports = if ports > 1 { format!(", {ports} ports, {forward}") } else { String::new() };
    Ok(Device { name: format!("DPDK {} net_vhost{ports}", version(&log)), sockets, programs: vec![program] })
}

/// A database and a switch of our own, all of whose files are in the folder; its polling thread is on the CPU.
fn start_ovs(cpu: usize, folder: &Folder, ports: usize) -> Result<Device, String> {
    hugepages();
    let at = folder.file("ovs");
    let _ = fs::remove_dir_all(&at);
    fs::create_dir_all(&at).map_err(|error| format!("cannot make {}: {error}", at.display()))?;
    let file = |name: &str| at.join(name).display().to_string();
    let database = format!("unix:{}", file("db.sock"));
    let ovs = |program: &str| {
        let mut command = Command::new(program);
        ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"].iter().for_each(|name| {
            command.env(name, &at);
        });
        command
    };
    let vsctl = |words: &[&str]| finish(ovs("ovs-vsctl").args(["--timeout=15", "--db", &database]).args(words));
    finish(ovs("ovsdb-tool").args(["create", &file("conf.db"), "/usr/share/openvswitch/vswitch.ovsschema"]))?;
    let log = folder.file("ovsdb.log");
    let mut server = Program::start(
        "ovsdb-server",
        ovs("ovsdb-server")
            .arg(file("conf.db"))
            .arg(format!("--remote=p{database}"))
            .arg(format!("--unixctl={}", file("ovsdb.ctl")))
            .arg(format!("--pidfile={}", file("ovsdb.pid")))
            .stdout(Stdio::null()),
        &log,
    )?;
    server.wait_for(&at.join("db.sock"), Duration::from_secs(5), &log)?;
    let mask = format!("{:#x}", 1u64 << cpu);
    let extra = format!("--no-pci --in-memory --no-telemetry --file-prefix=ringroad-ovs-{}", std::process::id());
    vsctl(&["--no-wait", "init"])?;
    for setting in [
        "dpdk-init=true".to_owned(),
        "dpdk-socket-mem=512".to_owned(),
        "vhost-sock-dir=.".to_owned(),
        format!("dpdk-lcore-mask={mask}"),
        format!("pmd-cpu-mask={mask}"),
        format!("dpdk-extra=\"{extra}\""),
    ] {
        vsctl(&["--no-wait", "set", "Open_vSwitch", ".", &format!("other_config:{setting}")])?;
    }
    let log = folder.file("ovs.log");
    let switch = Program::start(
        "ovs-vswitchd-dpdk",
        ovs(VSWITCHD)
            .arg(&database)
            .arg(format!("--unixctl={}", file("vswitchd.ctl")))
            .arg(format!("--pidfile={}", file("vswitchd.pid")))
            .stdout(Stdio::null()),
        &log,
    )?;
    // The switch ends before its database.
    let mut device = Device { name: ovs_version()?, sockets: Vec::new(), programs: vec![switch, server] };
    vsctl(&["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"])?;
    for port in 0..ports {
        let name = format!("vhost{port}");
        vsctl(&["add-port", "br0", &name, "--", "set", "Interface", &name, "type=dpdkvhostuser"])?;
        let socket = at.join(name);
        device.programs[0].wait_for(&socket, Duration::from_secs(5), &log)?;
        device.sockets.push(socket);
    }
    let bridge = format!("unix:{}", file("br0.mgmt"));
    if ports == 1 {
        finish(ovs("ovs-ofctl").args(["add-flow", &bridge, MACSWAP]))?;
    } else {
        device.name += &format!(", {ports} ports, learning");
    }
    Ok(device)
}

/// OVS's version, with that of its DPDK.
fn ovs_version() -> Result<String, String> {
    let said = finish(Command::new(VSWITCHD).arg("--version"))?;
    let last = |name: &str| {
        let line = said.lines().find(|line| line.contains(name));
        line.and_then(|line| line.split_whitespace().last()).unwrap_or("of unknown version").to_owned()
    };
    Ok(format!("OVS {} with DPDK {}", last("Open vSwitch"), last("DPDK ")))
}

/// Runs a program to its end; what it prints, or what it says went wrong.
fn finish(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("cannot start {name}: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{name} ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr))),
    }
}

/// Where scripts/peers keeps what it sets up.
pub fn cache() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("RINGROAD_CACHE").unwrap_or_else(|| {
        let home = || variable("HOME").unwrap_or_default().join(".cache");
        variable("XDG_CACHE_HOME").unwrap_or_else(home).join("ringroad")
    })
}

/// DPDK wants hugepages; if there are none and we may, there are some afterwards.
fn hugepages() {
    let path = Path::new("/proc/sys/vm/nr_hugepages");
    let pages: u64 = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    if pages < 512 && fs::write(path, "1024").is_ok() {
        eprintln!("set vm.nr_hugepages to 1024 for DPDK (it was {pages})");
    }
}
