//! The peers that ringroad is compared with: DPDK's testpmd in two versions, and OVS-DPDK. Called by each bench.

use crate::{options::Common, rig::Device};
use clap::ValueEnum;
use ringroad_traffic::child::{Folder, Program};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// A peer to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// The installed DPDK: dpdk-testpmd
    Dpdk,
    /// The newer DPDK in the chroot that `scripts/peers forky` sets up
    Forky,
    /// A private OVS-DPDK
    Ovs,
    /// No peer: ringroad alone
    None,
}

/// The peers of a bench.
#[derive(Debug, clap::Args)]
pub struct Peers {
    /// Peers to compare with, as a list [default: dpdk if it is installed]
    #[arg(long, value_enum, value_delimiter = ',')]
    peer: Vec<Choice>,
    /// Short for --peer none
    #[arg(long, conflicts_with = "peer")]
    alone: bool,
    /// Another ringroad program as the peer, such as one from before a change
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["peer", "alone"])]
    against: Option<PathBuf>,
    /// Command of --peer dpdk
    #[arg(long, default_value = "dpdk-testpmd")]
    testpmd: String,
}

/// A peer that is installed.
pub enum Peer {
    /// DPDK, with the words of its testpmd command.
    Testpmd(Vec<String>),
    /// OVS-DPDK.
    Ovs,
    /// Another ringroad program.
    Ringroad(PathBuf),
    /// No peer, as requested.
    None,
    /// No peer, because it is missing: the reason.
    Missing(String),
}

/// The line of a port of ours behind which there are more addresses than behind a guest.
pub const MANY_ADDRESSES: &str = "limits = { addresses = 8192 }";

/// Debian's path of the ovs-vswitchd that is built with DPDK.
const VSWITCHD: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
/// The flow that makes OVS do what testpmd calls macswap.
const MACSWAP: &str =
    "actions=push:NXM_OF_ETH_SRC[],push:NXM_OF_ETH_DST[],pop:NXM_OF_ETH_SRC[],pop:NXM_OF_ETH_DST[],IN_PORT";

impl Peers {
    /// Returns the requested peers. A missing one is an error if it was requested.
    pub fn found(&self) -> Result<Vec<Peer>, String> {
        if let Some(program) = &self.against {
            return Ok(vec![Peer::Ringroad(program.clone())]);
        }
        if self.alone {
            return Ok(vec![Peer::None]);
        }
        if self.peer.is_empty() {
            return Ok(vec![self.find(Choice::Dpdk).unwrap_or_else(Peer::Missing)]);
        }
        self.peer.iter().map(|&choice| self.find(choice)).collect()
    }

    /// Returns the words of the testpmd command whose driver is measured beside a peer: the peer's own, or the installed one;
    /// `None` if there is none.
    pub fn driver(&self, peer: &Peer) -> Option<Vec<String>> {
        match peer {
            Peer::Testpmd(words) => Some(words.clone()),
            Peer::Ovs | Peer::Ringroad(_) | Peer::None | Peer::Missing(_) => match self.find(Choice::Dpdk) {
                Ok(Peer::Testpmd(words)) => Some(words),
                _ => None,
            },
        }
    }

    fn find(&self, choice: Choice) -> Result<Peer, String> {
        match choice {
            Choice::Dpdk => {
                let words = words(&self.testpmd);
                // Whatever it answers: it is installed.
                match command(&words).arg("--version").output() {
                    Ok(_) => Ok(Peer::Testpmd(words)),
                    Err(_) => {
                        Err(format!("{} is not installed (on Debian, scripts/peers dpdk installs it)", self.testpmd))
                    }
                }
            }
            Choice::Forky => {
                let words = in_chroot("dpdk-testpmd")
                    .map_err(|missing| format!("--peer forky: no {missing} (scripts/peers forky sets it up)"))?;
                if !std::env::temp_dir().starts_with("/tmp") {
                    return Err("--peer forky: the chroot shares only /tmp, but TMPDIR is another folder".into());
                }
                Ok(Peer::Testpmd(words))
            }
            Choice::Ovs if !Path::new(VSWITCHD).exists() => {
                Err(format!("--peer ovs: no {VSWITCHD} (on Debian, scripts/peers dpdk installs it)"))
            }
            Choice::Ovs => Ok(Peer::Ovs),
            Choice::None => Ok(Peer::None),
        }
    }
}

impl Peer {
    /// Starts its device with a number of ports, stopped. testpmd forwards in the mode `forward`. OVS reflects frames with the
    /// MAC addresses swapped if there is one port, and is a learning switch if there are several.
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
            Peer::Ringroad(program) => {
                let line = if forward == "macswap" { "mode = \"reflect\"" } else { MANY_ADDRESSES };
                let (config, sockets) = common.config(folder, "other", "unlimited", &vec![line; ports]);
                Device::other(program, folder, "other", &config, sockets)?
            }
            Peer::None | Peer::Missing(_) => return Ok(None),
        };
        device.hold(true);
        Ok(Some(device))
    }
}

/// Splits a command line at spaces.
pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Returns the command that these words are.
pub fn command(words: &[String]) -> Command {
    let mut command = Command::new(words.first().map_or("", String::as_str));
    command.args(words.iter().skip(1));
    command
}

/// Returns the words of the command that runs a program in the chroot that `scripts/peers forky` sets up, or the file that is
/// missing.
pub fn in_chroot(program: &str) -> Result<Vec<String>, String> {
    let folder = cache().join("forky");
    // The second file exists if the chroot's file systems are mounted.
    for file in [format!("usr/bin/{program}"), "proc/self/exe".into()] {
        if !folder.join(&file).exists() {
            return Err(format!("{}/{file}", folder.display()));
        }
    }
    Ok(vec!["chroot".into(), folder.display().to_string(), program.into()])
}

/// Returns a testpmd command for one CPU, without PCI, up to its `--`. `name` distinguishes it from others that run.
pub fn testpmd(words: &[String], cpu: usize, name: &str) -> Command {
    hugepages();
    let mut command = command(words);
    command
        .args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--main-lcore", "0", "-v", "--no-pci", "--in-memory"])
        .args(["--file-prefix", &format!("ringroad{}{name}", std::process::id()), "-m", "512"]);
    command
}

/// Returns DPDK's version from testpmd's log.
pub fn version(log: &Path) -> String {
    let log = fs::read_to_string(log).unwrap_or_default();
    let version = log.split("RTE Version: 'DPDK ").nth(1).and_then(|rest| rest.split('\'').next());
    version.unwrap_or("of unknown version").to_owned()
}

fn start_testpmd(words: &[String], cpu: usize, folder: &Folder, ports: usize, forward: &str) -> Result<Device, String> {
    let log = folder.file("dpdk.log");
    let sockets: Vec<_> = (0..ports).map(|port| folder.file(&format!("dpdk-{port}.sock"))).collect();
    let mut command = testpmd(words, cpu, "");
    for (number, socket) in sockets.iter().enumerate() {
        // Another peer may have left it behind.
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
    // It starts forwarding some time after its sockets exist.
    thread::sleep(Duration::from_secs(1));
    let ports = if ports > 1 { format!(", {ports} ports, {forward}") } else { String::new() };
    Ok(Device { name: format!("DPDK {} net_vhost{ports}", version(&log)), sockets, programs: vec![program] })
}

/// A private OVS, whose files are all in one folder.
struct Ovs {
    folder: PathBuf,
}

impl Ovs {
    fn file(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn database(&self) -> String {
        format!("unix:{}", self.file("db.sock"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.envs(["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"].map(|name| (name, &self.folder)));
        command
    }

    fn vsctl(&self, words: &[&str]) -> Result<String, String> {
        finish(self.command("ovs-vsctl").args(["--timeout=15", "--db", &self.database()]).args(words))
    }

    /// Starts a server, with its control socket and its process number in the folder.
    fn server(&self, program: &str, arguments: &[String], log: &Path) -> Result<Program, String> {
        let name = Path::new(program).file_name().unwrap_or_default().display().to_string();
        let mut command = self.command(program);
        command
            .args(arguments)
            .arg(format!("--unixctl={}", self.file(&format!("{name}.ctl"))))
            .arg(format!("--pidfile={}", self.file(&format!("{name}.pid"))))
            .stdout(Stdio::null());
        Program::start(&name, &mut command, log)
    }
}

/// Starts a database and a switch, whose polling thread is on the CPU.
fn start_ovs(cpu: usize, folder: &Folder, ports: usize) -> Result<Device, String> {
    hugepages();
    let ovs = Ovs { folder: folder.file("ovs") };
    let _ = fs::remove_dir_all(&ovs.folder);
    fs::create_dir_all(&ovs.folder).map_err(|error| format!("cannot create {}: {error}", ovs.folder.display()))?;
    let schema = "/usr/share/openvswitch/vswitch.ovsschema";
    finish(ovs.command("ovsdb-tool").args(["create", &ovs.file("conf.db"), schema]))?;
    let log = folder.file("ovsdb.log");
    let remote = format!("--remote=p{}", ovs.database());
    let mut database = ovs.server("ovsdb-server", &[ovs.file("conf.db"), remote], &log)?;
    database.wait_for(&ovs.folder.join("db.sock"), Duration::from_secs(5), &log)?;
    let mask = format!("{:#x}", 1u64 << cpu);
    let extra = format!("--no-pci --in-memory --no-telemetry --file-prefix=ringroad-ovs-{}", std::process::id());
    ovs.vsctl(&["--no-wait", "init"])?;
    for setting in [
        "dpdk-init=true".to_owned(),
        "dpdk-socket-mem=512".to_owned(),
        "vhost-sock-dir=.".to_owned(),
        format!("dpdk-lcore-mask={mask}"),
        format!("pmd-cpu-mask={mask}"),
        format!("dpdk-extra=\"{extra}\""),
    ] {
        ovs.vsctl(&["--no-wait", "set", "Open_vSwitch", ".", &format!("other_config:{setting}")])?;
    }
    let log = folder.file("ovs.log");
    let mut switch = ovs.server(VSWITCHD, &[ovs.database()], &log)?;
    ovs.vsctl(&["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"])?;
    let mut sockets = Vec::new();
    for port in 0..ports {
        let name = format!("vhost{port}");
        ovs.vsctl(&["add-port", "br0", &name, "--", "set", "Interface", &name, "type=dpdkvhostuser"])?;
        let socket = ovs.folder.join(name);
        switch.wait_for(&socket, Duration::from_secs(5), &log)?;
        sockets.push(socket);
    }
    let mut name = ovs_version()?;
    if ports == 1 {
        let bridge = format!("unix:{}", ovs.file("br0.mgmt"));
        finish(ovs.command("ovs-ofctl").args(["add-flow", &bridge, MACSWAP]))?;
    } else {
        name += &format!(", {ports} ports, learning");
    }
    // The switch ends before its database.
    Ok(Device { name, sockets, programs: vec![switch, database] })
}

/// Returns the versions of OVS and of its DPDK.
fn ovs_version() -> Result<String, String> {
    let text = finish(Command::new(VSWITCHD).arg("--version"))?;
    let last = |name: &str| {
        let line = text.lines().find(|line| line.contains(name));
        line.and_then(|line| line.split_whitespace().last()).unwrap_or("of unknown version").to_owned()
    };
    Ok(format!("OVS {} with DPDK {}", last("Open vSwitch"), last("DPDK ")))
}

/// Runs a program to its end. Returns its output, or how it failed.
fn finish(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("cannot start {name}: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{name} exited with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr))),
    }
}

/// Returns the folder in which scripts/peers keeps what it sets up.
fn cache() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("RINGROAD_CACHE").unwrap_or_else(|| {
        let home = || variable("HOME").unwrap_or_default().join(".cache");
        variable("XDG_CACHE_HOME").unwrap_or_else(home).join("ringroad")
    })
}

/// Reserves hugepages, which DPDK needs, if there are too few and we are permitted to.
fn hugepages() {
    let path = Path::new("/proc/sys/vm/nr_hugepages");
    let pages: u64 = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    if pages < 512 && fs::write(path, "1024").is_ok() {
        eprintln!("set vm.nr_hugepages to 1024 for DPDK (it was {pages})");
    }
}
