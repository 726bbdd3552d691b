//! Tests of the confined daemon, as root and as an ordinary user: its confinement as /proc shows it, forbidden operations tried
//! from inside, and that everything it should do still works.

mod testing;

use ringroad_host::vsock::VsockClient;
use ringroad_vsock::{Addr, Listener, SocketType, Stream};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use serde_json::Value;
use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::unix::{
        fs::{PermissionsExt, chown},
        net::{SocketAddr as UnixAddr, UnixListener, UnixStream},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};
use testing::{PATIENCE, Program, is_root, unshared, vsock_guest, within};

const SIGSYS: i32 = 31;
/// The user `nobody`.
const NOBODY: u32 = 65534;

/// The user that runs the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    /// The user who runs the tests.
    Tester,
    /// `nobody`; only if root runs the tests.
    Nobody,
}

impl Who {
    /// Root and an ordinary user, or only the tester if that is an ordinary user.
    fn all() -> &'static [Who] {
        if is_root() { &[Who::Tester, Who::Nobody] } else { &[Who::Tester] }
    }

    fn is_root(self) -> bool {
        self == Who::Tester && is_root()
    }

    /// Returns a command that runs as this user.
    fn command(self, program: &Path) -> Command {
        match self {
            Who::Tester => Command::new(program),
            Who::Nobody => {
                let mut command = Command::new("setpriv");
                command.args(SETPRIV).arg(program);
                command
            }
        }
    }
}

const SETPRIV: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];

/// A temporary directory, owned by the user under test.
struct Folder(testing::Folder, Who);

impl Folder {
    fn new(name: &str, who: Who) -> Folder {
        let folder = Folder(testing::Folder::new(&format!("sandbox-{name}-{who:?}")), who);
        folder.give(&folder.0.0);
        // The build directory may not be accessible for that user.
        fs::copy(env!("CARGO_BIN_EXE_ringroad"), folder.program()).unwrap();
        folder
    }

    fn program(&self) -> PathBuf {
        self.file("ringroad")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.file(name)
    }

    fn give(&self, path: &Path) {
        if self.1 == Who::Nobody {
            chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }

    fn folder(&self, name: &str) -> PathBuf {
        let path = self.file(name);
        fs::create_dir_all(&path).unwrap();
        self.give(&path);
        path
    }

    /// Writes the configuration as editors do: by a new file that replaces the old one.
    fn write(&self, text: &str) -> PathBuf {
        let (new, path) = (self.file("new.toml"), self.file("ringroad.toml"));
        fs::write(&new, text).unwrap();
        fs::rename(&new, &path).unwrap();
        path
    }

    /// Starts `ringroad serve` with this configuration and these arguments.
    fn serve(&self, text: &str, arguments: &[&str]) -> Program {
        let mut command = self.1.command(&self.program());
        command.args(["serve", "-c"]).arg(self.write(text)).args(arguments);
        Program::start(command)
    }

    fn blast(&self, socket: &Path, arguments: &[&str]) -> Command {
        let mut command = self.1.command(&self.program());
        command.arg("blast").arg(socket).args(["--verify", "--window", "50", "--json", "-"]).args(arguments);
        command
    }

    /// Checks that frames are sent and returned.
    #[track_caller]
    fn blasts(&self, socket: &Path, arguments: &[&str]) {
        let output = self.blast(socket, &[&["--seconds", "0.2"], arguments].concat()).output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
        let result: Value = serde_json::from_str(&out[out.find("\n{").unwrap() + 1..]).unwrap();
        assert_eq!(result["errors"], 0, "{result}");
        assert!(result["received"].as_u64().unwrap() > 0, "{result}");
    }
}

impl Program {
    /// Returns `/proc/PID/task/*/status` by thread name.
    fn threads(&self) -> HashMap<String, HashMap<String, String>> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let status = |text: String| {
            let field = |line: &str| line.split_once(':').map(|(key, value)| (key.to_owned(), value.trim().to_owned()));
            text.lines().filter_map(field).collect::<HashMap<_, _>>()
        };
        let all = tasks.map(|task| status(fs::read_to_string(task.unwrap().path().join("status")).unwrap()));
        all.map(|status| (status["Name"].clone(), status)).collect()
    }
}

fn port(name: &str, socket: &Path, more: &str) -> String {
    format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = {socket:?}\nmode = \"reflect\"\n{more}\n")
}

fn vsock(cid: u32, socket: &Path, more: &str) -> String {
    format!("[[vsock]]\ncid = {cid}\nsocket = {socket:?}\n{more}\n")
}

// ----------------------------------------------------------------------------------------------------- seen in /proc

#[test]
fn every_thread_is_confined() {
    for &who in Who::all() {
        let folder = Folder::new("threads", who);
        let file = |name: &str| folder.file(name);
        let text = port("a", &file("a.sock"), "") + &vsock(3, &file("v.sock"), "");
        let mut serve = folder.serve(&text, &["--stats", "1000"]);
        serve.logs("ready");
        serve.logs("[INFO ] confined: seccomp (");
        assert!(serve.err().contains(", no capabilities, no_new_privs\n"), "{}", serve.err());
        assert!(!serve.err().contains("not confined") && !serve.err().contains("partly confined"), "{}", serve.err());
        serve.signal("USR1");
        assert!(within(PATIENCE, || serve.threads().contains_key("stdout")), "the stdout thread starts on first use");
        let threads = serve.threads();
        for name in ["ringroad", "control", "stats", "stderr", "worker", "vsock", "guard", "vhost port a"] {
            assert!(threads.contains_key(name), "no {name} in {:?}", threads.keys());
        }
        for (name, status) in &threads {
            for (key, expected) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
                assert_eq!(status[key], expected, "{who:?}, {name}: {key}");
            }
            for key in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
                assert_eq!(status[key], "0000000000000000", "{who:?}, {name}: {key}");
            }
            if who.is_root() {
                assert_eq!(status["CapBnd"], "0000000000000000", "{name}");
            }
        }
        // The kernel does not show the filters, only their number.
        let filters = |name: &str| threads[name]["Seccomp_filters"].parse::<u32>().unwrap();
        assert_eq!(filters("worker"), filters("control") + 1);
        serve.stop("TERM");

        let free = folder.serve(&text, &["--no-sandbox"]);
        free.logs("ready");
        free.logs("[WARN ] not confined (--no-sandbox)");
        for (name, status) in free.threads() {
            assert_eq!((&*status["NoNewPrivs"], &*status["Seccomp"]), ("0", "0"), "{name}");
            assert_eq!(status["CapEff"] != "0000000000000000", who.is_root(), "{name}");
        }
    }
}

#[test]
fn needed_capabilities_are_kept() {
    if !is_root() {
        // Without capabilities there is nothing to keep; `every_thread_is_confined` checks that case.
        return eprintln!("an ordinary user has no capabilities to keep");
    }
    let folder = Folder::new("caps", Who::Tester);
    let socket = folder.file("a.sock");
    for (text, log, bits) in [
        (port("a", &socket, "socket_owner = \"nobody\""), "capabilities chown, fowner, dac_override", 0b1011),
        (port("a", &socket, "role = \"client\""), "capabilities dac_override", 0b10),
        (port("a", &socket, "[sandbox]\ncapabilities = [\"net_admin\"]"), "capabilities net_admin", 1 << 12),
    ] {
        let mut serve = folder.serve(&text, &[]);
        serve.logs("ready");
        serve.logs(log);
        for (name, status) in serve.threads() {
            assert_eq!(u64::from_str_radix(&status["CapEff"], 16).unwrap(), bits, "{name}: {text}");
        }
        serve.stop("TERM");
    }
}

// ------------------------------------------------------------------------------------------------------ tried inside

/// Builds the example `confined`, which tries forbidden operations, in the profile of this test.
fn confined(folder: &Folder) -> PathBuf {
    let target = Path::new(env!("CARGO_BIN_EXE_ringroad")).parent().unwrap();
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--quiet", "--package", "ringroad-host", "--example", "confined"]);
    command.arg("--target-dir").arg(target.parent().unwrap());
    if target.ends_with("release") {
        command.arg("--release");
    }
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let program = folder.file("confined");
    fs::copy(target.join("examples/confined"), &program).unwrap();
    program
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of operations")]
fn forbidden_operations_fail() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (open, shut) = (listener.local_addr().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let abstract_name = format!("ringroad-sandbox-{}", std::process::id());
    let address = <UnixAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(&abstract_name).unwrap();
    let _abstract_listener = UnixListener::bind_addr(&address).unwrap();
    for &who in Who::all() {
        let folder = Folder::new("acts", who);
        let program = confined(&folder);
        let (mine, other) = (folder.folder("mine"), folder.folder("other"));
        let run = |free: bool, act: &str, with: &str| -> Output {
            let mut command = who.command(&program);
            if free {
                command.arg("--free");
            }
            command.arg("--folder").arg(&mine).args(["--tcp", &open.port().to_string(), act, with]);
            command.stdin(Stdio::null()).output().unwrap()
        };
        let does = |output: &Output| output.status.success() && output.stdout.starts_with(b"done");
        let path = |folder: &Path, name: &str| folder.join(name).display().to_string();
        fs::write(other.join("there"), "secret").unwrap();
        folder.give(&other.join("there"));

        fs::write(mine.join("file"), "").unwrap();
        folder.give(&mine.join("file"));
        for (act, with) in [
            ("listen", path(&mine, "socket")),
            ("mode", path(&mine, "file")),
            ("connect", open.to_string()),
            ("thread", String::new()),
            ("see-itself", String::new()),
            ("memfd", String::new()),
            ("serve-a-pci-device", path(&mine, "pci")),
        ] {
            let output = run(false, act, &with);
            assert!(does(&output), "{who:?}: {act} {with}: {output:?}");
        }

        const EPERM: &str = "refused: Operation not permitted";
        const EACCES: &str = "refused: Permission denied";
        const ENOSYS: &str = "refused: Function not implemented";
        // The operation; the expected error (`None`: killed by a signal); whether it works without confinement.
        for (act, with, why, anybody) in [
            ("exec", String::new(), None, false),
            ("spawn", String::new(), Some(""), true),
            ("fork", String::new(), Some(EPERM), true),
            ("new-namespace", String::new(), Some(EPERM), false),
            ("ptrace", String::new(), None, true),
            ("read-memory-of-another", String::new(), None, false),
            ("signal-to-another", String::new(), Some(EPERM), who == Who::Tester),
            ("map-code", String::new(), Some(EPERM), true),
            ("turn-into-code", String::new(), Some(EPERM), true),
            ("own-memory", String::new(), Some(EACCES), true),
            ("read", "/etc/hostname".into(), Some(EACCES), true),
            ("read", "/etc/shadow".into(), Some(EACCES), who.is_root()),
            ("read", "/proc/1/environ".into(), Some(EACCES), false),
            ("read", path(&other, "there"), Some(EACCES), true),
            ("write", path(&other, "new"), Some(EACCES), true),
            ("write", path(&other, "there"), Some(EACCES), true),
            (
                "write",
                path(&std::env::temp_dir(), &format!("ringroad-never-{}", std::process::id())),
                Some(EACCES),
                true,
            ),
            ("setuid-file", path(&other, "there"), Some(EPERM), true),
            ("setgid-file-at", path(&other, "there"), Some(EPERM), true),
            ("setuid-memfd", String::new(), Some(EPERM), true),
            ("folder", path(&other, "folder"), Some(EACCES), true),
            ("folder", path(&mine, "folder"), Some(EACCES), true),
            ("listen", path(&other, "socket"), Some(EACCES), true),
            ("device", path(&mine, "device"), Some(ENOSYS), who.is_root()),
            ("connect", shut.local_addr().unwrap().to_string(), Some(EACCES), true),
            ("listen-tcp", String::new(), Some(EACCES), true),
            ("abstract", abstract_name.clone(), Some(EPERM), true),
            ("udp", String::new(), Some(EPERM), true),
            ("netlink", String::new(), Some(EPERM), true),
            ("packet", String::new(), Some(EPERM), who.is_root()),
            ("mptcp", String::new(), Some(EPERM), false),
            ("raw", String::new(), Some(EPERM), who.is_root()),
            ("io-uring", String::new(), None, false),
            ("bpf", String::new(), None, false),
            ("userfaultfd", String::new(), None, false),
            ("perf", String::new(), None, false),
            ("keyring", String::new(), None, false),
            ("mount", String::new(), None, false),
            ("unshare", String::new(), None, true),
            ("personality", String::new(), None, true),
            ("user", String::new(), None, true),
            ("handle", String::new(), None, false),
            ("type", String::new(), Some(EPERM), false),
            ("unknown", String::new(), Some(ENOSYS), false),
        ] {
            let output = run(false, act, &with);
            let log = String::from_utf8_lossy(&output.stdout);
            match why {
                None => assert_eq!(output.status.signal(), Some(SIGSYS), "{who:?}: {act} {with}: {output:?}"),
                Some(why) => assert!(
                    log.starts_with("refused: ") && log.starts_with(why) || why.is_empty() && !does(&output),
                    "{who:?}: {act} {with}: expected {why}: {output:?}"
                ),
            }
            if anybody {
                let output = run(true, act, &with);
                assert!(does(&output), "{who:?}: without confinement, {act} {with}: {output:?}");
            } else {
                assert_ne!(run(true, act, &with).status.signal(), Some(SIGSYS), "{act}");
            }
            // Without confinement it may have created a file.
            if act == "write" && !with.ends_with("there") {
                let _ = fs::remove_file(&with);
            }
        }
        let output = run(false, "remove", &path(&other, "there"));
        assert!(String::from_utf8_lossy(&output.stdout).starts_with(EACCES), "{output:?}");
        assert!(other.join("there").exists());
    }
}

// ---------------------------------------------------------------------------------------------------- allowed operations

/// Sends a ping to a host port and gets a pong back.
#[track_caller]
fn reaches<S: Read + Write>(client: &VsockClient, port: u32, accept: impl FnOnce() -> S) {
    let mut guest =
        Stream::connect(client.stack(), Addr { cid: 2, port }).unwrap_or_else(|error| panic!("{port}: {error}"));
    let mut program = accept();
    guest.write_all(b"ping").unwrap();
    program.read_exact(&mut [0; 4]).unwrap();
    program.write_all(b"pong").unwrap();
    guest.read_exact(&mut [0; 4]).unwrap();
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, each step of which starts from what those before it left")]
fn allowed_operations_work() {
    for &who in Who::all() {
        let folder = Folder::new("all", who);
        let (elsewhere, beyond) = (Folder::new("elsewhere", who), Folder::new("beyond", who));
        let (other, far) = (&elsewhere.0.0, &beyond.0.0);
        let file = |name: &str| folder.file(name);
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [first, second, third] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        let id = who.command(Path::new("id")).arg("-un").output().unwrap();
        // By name: it is looked up again by each reload.
        let owner = format!("socket_owner = {:?}", String::from_utf8(id.stdout).unwrap().trim());
        let client = port("client", &file("client.sock"), "role = \"client\"");
        let common = format!("[sandbox]\nfolders = [{other:?}]\ntcp = [{}]\nrequire = true\n", second.port())
            + &port("a", &file("a.sock"), &owner)
            + &client;
        let host = format!("host = {:?}", file("host"));
        let counters = file("counters.json");
        let vsock3 = |forwards: &str| vsock(3, &file("v3.sock"), &format!("{host}\nforward = {{ {forwards} }}"));
        let text = common.clone() + &vsock3(&format!("80 = \"{first}\""));
        let mut serve = folder.serve(&text, &["--json", counters.to_str().unwrap()]);
        serve.logs("ready: 2 ports, 1 vsock device\n");

        // Frames, also after a driver is killed.
        folder.blasts(&file("a.sock"), &[]);
        folder.blasts(&file("a.sock"), &["--ring", "split", "--event-driven"]);
        let mut driver = Program::start(folder.blast(&file("a.sock"), &["--seconds", "60"]));
        assert!(within(PATIENCE, || serve.err().matches("port a: frontend connected").count() == 3), "{}", serve.err());
        thread::sleep(Duration::from_millis(100));
        driver.signal("KILL");
        driver.ends(PATIENCE);
        folder.blasts(&file("a.sock"), &[]);
        // A frontend that creates the socket, and returns.
        for _ in 0..2 {
            let _ = fs::remove_file(file("client.sock"));
            folder.blasts(&file("client.sock"), &["--listen"]);
        }

        // vsock: to a host program, from one, to TCP.
        let client = vsock_guest(&file("v3.sock"));
        let programs = UnixListener::bind(file("host_9")).unwrap();
        fs::set_permissions(file("host_9"), fs::Permissions::from_mode(0o777)).unwrap();
        reaches(&client, 9, || programs.accept().unwrap().0);
        reaches(&client, 80, || listeners[0].accept().unwrap().0);
        let inside = Listener::bind(client.stack(), 7, SocketType::Stream).unwrap();
        let mut program = UnixStream::connect(file("host")).unwrap();
        writeln!(program, "CONNECT 7").unwrap();
        let mut line = String::new();
        BufReader::with_capacity(1, &program).read_line(&mut line).unwrap();
        assert!(line.starts_with("OK "), "{line:?}");
        let mut accepted = inside.accept().unwrap();
        program.write_all(b"ping").unwrap();
        accepted.read_exact(&mut [0; 4]).unwrap();

        // A new port, in a directory listed in `sandbox.folders`; a new device; a new forward; all with the guest connected.
        let b = port("b", &other.join("b.sock"), "");
        let forwards = format!("80 = \"{first}\", 81 = \"{second}\"");
        folder.write(&(common.clone() + &b + &vsock3(&forwards) + &vsock(4, &file("v4.sock"), "")));
        let log = serve.reload();
        assert!(log.contains("3 ports, 2 vsock devices (+b, +vsock 4)\n") && !log.contains("ERROR"), "{log}");
        folder.blasts(&other.join("b.sock"), &[]);
        drop(vsock_guest(&file("v4.sock")));
        reaches(&client, 81, || listeners[1].accept().unwrap().0);
        accepted.write_all(b"pong").unwrap();
        program.read_exact(&mut [0; 4]).unwrap();
        // CPUs, polling: in place.
        folder.write(&("[workers]\ncpus = [0]\npoll = \"50us\"\n".to_owned() + &common + &b + &vsock3(&forwards)));
        let log = serve.reload();
        assert!(log.contains("3 ports, 1 vsock device (-vsock 4)\n") && !log.contains("ERROR"), "{log}");

        // Beyond what was allowed at start: refused with the reason, everything else keeps running.
        let c = port("c", &far.join("c.sock"), "");
        let moved = b.replace(other.to_str().unwrap(), far.to_str().unwrap());
        let forwards = format!("80 = \"{first}\", 82 = \"{third}\"");
        folder.write(&(common.clone() + &moved + &c + &vsock3(&forwards)));
        let log = serve.reload();
        let refused = |name: &str| {
            let start = format!("port {name:?}: key `socket`: the sandbox, fixed at start, does not allow sockets in ");
            let line =
                log.lines().find(|line| line.contains(&start)).unwrap_or_else(|| panic!("no {start:?} in {log}"));
            assert!(line.contains("add the directory to key `sandbox.folders` and restart"), "{line}");
        };
        refused("c");
        refused("b");
        assert!(log.contains("port b is left unchanged"), "{log}");
        assert!(
            log.contains(&format!("{third}: the sandbox, fixed at start, does not allow connecting to TCP port"))
                && log.contains("add it to key `sandbox.tcp` and restart; the forward is left out"),
            "{log}"
        );
        assert!(!far.join("c.sock").exists());
        folder.blasts(&other.join("b.sock"), &[]);
        reaches(&client, 80, || listeners[0].accept().unwrap().0);
        assert!(Stream::connect(client.stack(), Addr { cid: 2, port: 82 }).is_err());

        assert!(!serve.err().contains("cannot record ring positions"), "{}", serve.err());
        serve.signal("USR1");
        assert!(within(PATIENCE, || serve.out.lock().unwrap().contains("from port")));
        serve.stop("TERM");
        let report: Value = serde_json::from_str(&fs::read_to_string(&counters).unwrap()).unwrap();
        assert!(report["ports"].as_array().is_some_and(|ports| ports.len() == 3), "{report}");
        assert!(!file("a.sock").exists() && !other.join("b.sock").exists());
    }
}

#[test]
fn notes_of_rings_are_kept_beside_sockets_in_memory() {
    for &who in Who::all() {
        let folder = Folder::new("notes", who);
        let memory = PathBuf::from(format!("/dev/shm/ringroad-sandbox-{who:?}-{}", std::process::id()));
        fs::create_dir(&memory).unwrap();
        folder.give(&memory);
        let text = port("a", &memory.join("a.sock"), "");
        let mut serve = folder.serve(&text, &[]);
        serve.logs("ready");
        folder.write(&(text + &port("b", &memory.join("b.sock"), "")));
        let log = serve.reload();
        assert!(!log.contains("ERROR"), "{log}");
        folder.blasts(&memory.join("b.sock"), &[]);
        assert!(memory.join("a.sock.rings").exists() && memory.join("b.sock.rings").exists());
        assert!(!serve.err().contains("cannot record ring positions"), "{}", serve.err());
        serve.stop("TERM");
        fs::remove_dir_all(memory).unwrap();
    }
}

/// Starts `ringroad serve` in a new network namespace, where interface names are free, after running `prepare` there.
fn in_own_network(folder: &Folder, text: &str, prepare: &str) -> Program {
    let mut command = unshared("--net");
    command.arg("--mount");
    let run = format!("{prepare}\nexec \"$@\"");
    command.args(["sh", "-e", "-c", &run, "sh"]);
    if folder.1 == Who::Nobody {
        command.arg("setpriv").args(SETPRIV);
    }
    command.arg(folder.program()).args(["serve", "-c"]).arg(folder.write(text));
    Program::start(command)
}

fn tap(name: &str) -> String {
    format!("[[port]]\nname = {name:?}\nkind = \"tap\"\ninterface = {name:?}\n")
}

#[test]
fn a_reload_adds_tap_interfaces() {
    let folder = Folder::new("tap", Who::Tester);
    let mut serve = in_own_network(&folder, &tap("rrtest0"), "");
    serve.logs("ready");
    serve.logs("capabilities net_admin, ");
    folder.write(&(tap("rrtest0") + "mtu = 1400\n" + &tap("rrtest1")));
    let log = serve.reload();
    assert!(log.contains("reloaded: 2 ports (+rrtest1)\n") && !log.contains("ERROR"), "{log}");
    serve.stop("TERM");

    // Without net_admin kept at start, the interface cannot be created.
    let a = port("a", &folder.file("a.sock"), "");
    let mut serve = in_own_network(&folder, &a, "");
    serve.logs("ready");
    folder.write(&(a.clone() + &tap("rrtest0")));
    let log = serve.reload();
    let expected = "key `interface`: cannot create interface rrtest0: the capability was dropped at start";
    assert!(log.contains(expected) && log.contains("add \"net_admin\" to key `sandbox.capabilities`"), "{log}");
    folder.blasts(&folder.file("a.sock"), &[]);
    serve.stop("TERM");
    let kept = "[sandbox]\ncapabilities = [\"net_admin\"]\n";
    let mut serve = in_own_network(&folder, &(kept.to_owned() + &a), "");
    serve.logs("ready");
    folder.write(&(kept.to_owned() + &a + &tap("rrtest0")));
    let log = serve.reload();
    assert!(log.contains("reloaded: 2 ports (+rrtest0)\n") && !log.contains("ERROR"), "{log}");
    serve.stop("TERM");
}

#[test]
fn an_ordinary_user_can_use_prepared_interfaces() {
    if !is_root() {
        // Preparing an interface for another user needs root; `tap_without_permission` in program.rs tests the case without.
        return eprintln!("only root can prepare an interface for another user");
    }
    let folder = Folder::new("prepared", Who::Nobody);
    // Some containers have the device for root only.
    let device = "[ $(stat -c %a /dev/net/tun) = 666 ] || { mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200; }";
    let prepare = format!(
        "{device}; for i in 0 1; do ip tuntap add rrtest$i mode tap vnet_hdr user nobody; ip link set rrtest$i up; done"
    );
    let mut serve = in_own_network(&folder, &tap("rrtest0"), &prepare);
    serve.logs("ready: 1 port\n");
    serve.logs(", no capabilities, no_new_privs");
    folder.write(&(tap("rrtest0") + &tap("rrtest1")));
    let log = serve.reload();
    assert!(log.contains("reloaded: 2 ports (+rrtest1)\n") && !log.contains("ERROR"), "{log}");
    serve.stop("TERM");
}

// -------------------------------------------------------------------------------------------------- lacking in a kernel

/// Starts the daemon as on a kernel where this system call fails with `errno`.
fn without(call: i64, errno: i32, folder: &Folder, text: &str) -> Program {
    thread::scope(|scope| {
        // A filter applies to this thread and what it starts.
        let start = scope.spawn(|| {
            let action = SeccompAction::Errno(errno.unsigned_abs());
            let arch = std::env::consts::ARCH.try_into().unwrap();
            let filter = SeccompFilter::new([(call, vec![])].into(), SeccompAction::Allow, action, arch).unwrap();
            apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
            folder.serve(text, &[])
        });
        start.join().unwrap()
    })
}

#[test]
fn missing_kernel_features_are_logged_and_can_be_required() {
    let folder = Folder::new("lacks", Who::Tester);
    let text = port("a", &folder.file("a.sock"), "");
    let landlock = libc::SYS_landlock_create_ruleset;
    for (call, errno, log, left) in [
        (landlock, libc::ENOSYS, "Landlock: not supported by this kernel; it needs Linux 5.13", "confined: seccomp ("),
        (landlock, libc::EOPNOTSUPP, "Landlock: disabled at boot (kernel parameter lsm=)", "confined: seccomp ("),
        (libc::SYS_seccomp, libc::EINVAL, "seccomp: Invalid argument", "confined: Landlock "),
        (libc::SYS_capset, libc::EPERM, "capabilities not dropped: ", "confined: seccomp ("),
    ] {
        let mut serve = without(call, errno, &folder, &text);
        serve.logs("ready");
        serve.logs(&format!("[WARN ] only partly confined: {log}"));
        serve.logs(left);
        folder.blasts(&folder.file("a.sock"), &[]);
        serve.stop("TERM");
        let mut serve = without(call, errno, &folder, &format!("[sandbox]\nrequire = true\n{text}"));
        assert_eq!(serve.ends(PATIENCE).code(), Some(1), "{}", serve.err());
        let expected = "ringroad: cannot confine this process fully, which key `sandbox.require` demands: ";
        assert!(serve.err().starts_with(&format!("{expected}{log}")), "{}", serve.err());
        assert!(!folder.file("a.sock").exists());
    }
}
