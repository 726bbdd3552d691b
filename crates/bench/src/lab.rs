//! Linux guests for benches: boots them with `scripts/guests` on one of our devices or on a TAP interface, in a network
//! namespace of its own, and runs commands in them. Used by guest_tcp.rs and flood.rs.

use crate::{peer::in_chroot, rig::on};
use ringroad_traffic::child::{Folder, Program, ourselves};
use serde_json::Value;
use std::{
    env, fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Set in the process that runs in the network namespace.
const INSIDE: &str = "RINGROAD_BENCH_NETNS";

/// Runs this program again in a network namespace of its own, so that its interfaces and addresses collide with no
/// others. Returns that process's exit status; `None` in that process itself.
pub fn enter() -> Result<Option<ExitStatus>, String> {
    if env::var_os(INSIDE).is_some() {
        return command("ip", &["link", "set", "lo", "up"]).map(|_| None);
    }
    let program = ourselves()?;
    let mut unshare = Command::new("unshare");
    unshare.args(["--net", "--"]).arg(program.get_program()).args(env::args_os().skip(1)).env(INSIDE, "1");
    let failed = |error| format!("cannot run unshare (util-linux): {error}");
    let status = unshare.status().map_err(failed)?;
    Ok(Some(status))
}

/// Runs a command; returns its output.
pub fn command(program: &str, words: &[&str]) -> Result<String, String> {
    finish(Command::new(program).args(words))
}

fn finish(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("cannot run {name}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let (said, out) = (text(&output.stderr), text(&output.stdout));
    Err(format!("{name} {}: {}\n{said}\n{out}", words.join(" "), output.status))
}

/// Adds a TAP interface as the kernel's own peers need it, and brings it up.
pub fn add_tap(name: &str) -> Result<(), String> {
    command("ip", &["tuntap", "add", name, "mode", "tap", "vnet_hdr"])?;
    command("ip", &["link", "set", name, "up"]).map(drop)
}

/// Gives an interface the first address of a network, such as 10.0.0 for 10.0.0.0/24. Waits for it to come up: a switch may have its
/// sockets before its interfaces.
///
/// TCP connections to it have this congestion control from the start. A socket that begins with bbr, the default of some hosts, keeps
/// pacing what it sends, whatever congestion control the program sets later.
pub fn add_network(interface: &str, network: &str, congestion: &str) -> Result<(), String> {
    let (all, first) = (format!("{network}.0/24"), format!("{network}.1"));
    let (start, patience) = (Instant::now(), Duration::from_secs(5));
    while !command("ip", &["-oneline", "link", "show", "dev", interface, "up"]).is_ok_and(|line| !line.is_empty()) {
        if start.elapsed() > patience {
            return Err(format!("{interface} did not come up within {patience:?}"));
        }
        thread::sleep(Duration::from_millis(5));
    }
    command("ip", &["addr", "add", &format!("{first}/24"), "dev", interface, "noprefixroute"])?;
    command("ip", &["route", "add", &all, "dev", interface, "src", &first, "congctl", congestion]).map(drop)
}

/// The guests of a bench. Dropped, they end.
pub struct Lab {
    scripts: PathBuf,
    folder: PathBuf,
    started: Vec<String>,
}

impl Lab {
    /// Sets up what guests of a kind need; `scripts` has the program `guests`.
    pub fn new(scripts: PathBuf, kind: &str, folder: &Folder) -> Result<Lab, String> {
        if !scripts.join("guests").exists() {
            let scripts = scripts.display();
            return Err(format!(
                "no {scripts}/guests: run it in the project's folder, or name its scripts (--scripts)"
            ));
        }
        let lab = Lab { scripts, folder: folder.file("guests"), started: Vec::new() };
        finish(lab.guests("setup").arg(kind))?;
        Ok(lab)
    }

    fn guests(&self, verb: &str) -> Command {
        let mut command = Command::new(self.scripts.join("guests"));
        command.arg(verb).env("RINGROAD_GUESTS", &self.folder);
        command
    }

    /// Boots a guest on a CPU. `network`: a socket or `tap:NAME`.
    pub fn boot(&mut self, kind: &str, name: &str, network: &str, address: &str, cpu: usize) -> Result<(), String> {
        let mut boot = self.guests("boot");
        boot.args([kind, network, "--name", name, "--ip", &format!("{address}/24")]);
        self.started.push(name.to_owned());
        // The guest's processes inherit the CPU of this thread.
        on("--driver-cpu", cpu, || finish(&mut boot)).map(drop)
    }

    /// Ends all guests.
    pub fn stop(&mut self) -> Result<(), String> {
        if self.started.is_empty() {
            return Ok(());
        }
        self.started.clear();
        finish(self.guests("stop").arg("--all")).map(drop)
    }

    /// Lets the processes of a guest run before all others on their CPU.
    pub fn prefer(&self, name: &str) -> Result<(), String> {
        let leader = self.process(name)?.to_string();
        let processes = command("pgrep", &["--session", &leader])?;
        processes
            .lines()
            .try_for_each(|process| command("chrt", &["--fifo", "--all-tasks", "--pid", "1", process]).map(drop))
    }

    /// Returns the process of a guest: QEMU or UML.
    pub fn process(&self, name: &str) -> Result<u32, String> {
        let file = self.folder.join(name).join("pid");
        let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let process = text.split_whitespace().next().and_then(|process| process.parse().ok());
        process.ok_or_else(|| format!("{}: expected a process, found {text:?}", file.display()))
    }

    /// Runs a command in a guest; returns its output.
    pub fn run(&self, guest: &str, seconds: f64, command: &str) -> Result<String, String> {
        let timeout = (seconds as u64 + 20).to_string();
        finish(self.guests("run").args([guest, "--timeout", &timeout, command]))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// Starts iperf3's server in this network namespace for one test, on this CPU.
pub fn iperf3_server(cpu: usize, port: u16) -> Result<Server, String> {
    let words = in_chroot("iperf3").map_err(|missing| format!("no {missing} (scripts/peers forky sets it up)"))?;
    on("--device-cpu", cpu, || {
        let mut command = Command::new(words.first().map_or("", String::as_str));
        command.args(words.iter().skip(1)).args(["-s", "-1", "-p", &port.to_string()]);
        let failed = |error| format!("cannot run iperf3: {error}");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(failed)?;
        let server = Server(child);
        wait_for_listener(port)?;
        Ok(server)
    })
}

/// A server on the host for one test. Dropped, it ends.
pub struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a program of this network namespace listens on a TCP port.
fn wait_for_listener(port: u16) -> Result<(), String> {
    let start = Instant::now();
    let listens = || {
        let tables =
            ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(|file| fs::read_to_string(file).unwrap_or_default());
        // The local address and port, and the state: 0A is TCP_LISTEN.
        tables.iter().flat_map(|table| table.lines()).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().is_some_and(|local| local.ends_with(&format!(":{port:04X}")));
            local && fields.nth(1) == Some("0A")
        })
    };
    while !listens() {
        if start.elapsed() > Duration::from_secs(5) {
            return Err(format!("iperf3 does not listen on port {port} after 5 s"));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Parses what iperf3 prints; an error that it reports is one.
pub fn iperf3_report(text: &str) -> Result<Value, String> {
    let begin = text.find('{').unwrap_or(0);
    let json = text.get(begin..).unwrap_or_default();
    let report: Value =
        serde_json::from_str(json).map_err(|error| format!("iperf3 printed no report: {error}\n{text}"))?;
    match report.get("error") {
        Some(error) => Err(format!("iperf3: {error}")),
        None => Ok(report),
    }
}

/// Starts our switch with ports of this configuration, and waits for its sockets.
pub fn serve(folder: &Folder, name: &str, config: &str, sockets: &[PathBuf]) -> Result<Program, String> {
    Program::serve(folder, name, config, &[], sockets)
}

/// Round-trip times in microseconds of one byte to a TCP echo server and back, for a time.
pub fn round_trips(to: SocketAddr, time: Duration) -> Result<Vec<f64>, String> {
    let failed = |error: std::io::Error| format!("round trips to {to}: {error}");
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(5)).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).map_err(failed)?;
    let (start, mut times, mut byte) = (Instant::now(), Vec::new(), [0x55]);
    while start.elapsed() < time {
        let sent = Instant::now();
        stream.write_all(&byte).and_then(|()| stream.read_exact(&mut byte)).map_err(failed)?;
        times.push(sent.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn reports_and_errors_of_iperf3() {
        let report = iperf3_report("noise\n{ \"end\": { \"x\": 1 } }").unwrap();
        assert_eq!(report["end"]["x"], 1);
        assert!(iperf3_report("{ \"error\": \"unable to connect\" }").unwrap_err().contains("unable to connect"));
        assert!(iperf3_report("Killed").unwrap_err().contains("printed no report"));
    }

    #[test]
    fn round_trips_are_measured() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        wait_for_listener(address.port()).unwrap();
        let echo = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0];
            while stream.read_exact(&mut byte).is_ok() {
                stream.write_all(&byte).unwrap();
            }
        });
        let times = round_trips(address, Duration::from_millis(20)).unwrap();
        assert!(!times.is_empty() && times.iter().all(|&time| time > 0.0));
        echo.join().unwrap();
    }

    #[test]
    fn a_failing_command_says_what_it_printed() {
        assert!(command("sh", &["-c", "echo no room >&2; exit 3"]).unwrap_err().contains("no room"));
        assert_eq!(command("echo", &["hello"]).unwrap(), "hello");
        assert!(command("/does/not/exist", &[]).unwrap_err().contains("cannot run /does/not/exist"));
    }
}
