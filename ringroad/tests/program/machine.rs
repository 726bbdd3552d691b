//! Idle ports, descriptors, TAP interfaces.

use crate::{idle, testing::*};
use ringroad_host::{Signal, signal};
use std::{
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

#[test]
fn eight_idle_ports() {
    let folder = Folder::new("idle");
    let names: Vec<String> = (0..8).map(|index| format!("port{index}")).collect();
    let config = folder.config(&names.iter().map(|name| (name.as_str(), "")).collect::<Vec<_>>());
    let sockets: Vec<PathBuf> = names.iter().map(|name| folder.file(&format!("{name}.sock"))).collect();
    // The best of five: the machine may be busy.
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        let mut serve = Program::serve(&config, &[]);
        assert!(within(PATIENCE, || sockets.iter().all(|socket| UnixStream::connect(socket).is_ok())));
        best = best.min(start.elapsed());
        serve.logs("ready");
        serve.stop("TERM");
    }
    assert!(best < Duration::from_millis(50), "{best:?} from start to eight sockets");

    let serve = Program::serve(&config, &[]);
    serve.logs("ready");
    // Connected guests without traffic are idle, too.
    let (mut a, mut b) = (Guest::plain(&sockets[0]), Guest::plain(&sockets[1]));
    exchange(&mut a, &mut b);
    thread::sleep(idle::SETTLE);
    assert_eq!(idle::is_idle(serve.child.id()), Ok(()));
    let status = fs::read_to_string(format!("/proc/{}/status", serve.child.id())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(resident < 20 << 10, "{resident} KiB resident");
    exchange(&mut a, &mut b);
}

/// `is_idle` accepts a process that sleeps, and refuses one that uses 1 % of a CPU, and one that wakes up seven times a second.
#[test]
fn the_idle_gate_can_fail() {
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let program = Program::start(command);
        // Its start does not count.
        thread::sleep(Duration::from_millis(200));
        program
    };
    // Watches a process that is stopped, but for `run` in each `period`.
    let watch = |process: u32, run: Duration, period: Duration| {
        let (done, is_done) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                while is_done.recv_timeout(period - run) == Err(RecvTimeoutError::Timeout) {
                    signal(process, Signal::Continue);
                    thread::sleep(run);
                    signal(process, Signal::Stop);
                }
            });
            let result = idle::is_idle(process);
            drop(done);
            result.expect_err("it was not idle")
        })
    };
    let asleep = shell("exec sleep 60");
    assert_eq!(idle::is_idle(asleep.child.id()), Ok(()));
    let error = watch(asleep.child.id(), Duration::from_millis(1), Duration::from_millis(150));
    assert!(error.starts_with("expected at most 10 context switches in 3s, got "), "{error}");
    let busy = shell("while :; do :; done");
    signal(busy.child.id(), Signal::Stop);
    let error = watch(busy.child.id(), Duration::from_millis(1), Duration::from_millis(100));
    assert!(error.starts_with("expected at most 3ms of CPU time in 3s, got "), "{error}");
}

#[test]
fn out_of_descriptors() {
    let folder = Folder::new("nofile");
    let config = folder.config(&[("a", ""), ("b", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let mut a = Guest::plain(&folder.file("a.sock"));
    let limit = |limit: &str| {
        let pid = serve.child.id().to_string();
        assert!(Command::new("prlimit").args(["--pid", &pid, limit]).status().unwrap().success());
    };
    // Below the number of open descriptors: no new ones. Not below what poll(2) is called with, which it would refuse.
    limit("--nofile=8:");
    let second = connects(&folder.file("a.sock"));
    let waiting = connects(&folder.file("b.sock"));
    serve.logs("port b: cannot accept a frontend: Too many open files");
    let (time, _) = idle::used(serve.child.id(), Duration::from_secs(1)).unwrap();
    assert!(time < Duration::from_millis(20), "it spins on frontends that it cannot accept: {time:?} in a second");
    limit("--nofile=1024:");
    serve.logs("port a: a second frontend was turned away");
    serve.logs("port b: frontend connected");
    drop((second, waiting));
    exchange(&mut a, &mut Guest::plain(&folder.file("b.sock")));
    serve.stop("TERM");
}

// -------------------------------------------------------------------------------------------------------------- TAP

fn tap_config(folder: &Folder) -> PathBuf {
    folder.write("[[port]]\nname = \"host\"\nkind = \"tap\"\ninterface = \"rrtest0\"\n")
}

#[test]
fn tap_without_permission() {
    let folder = Folder::new("permission");
    let config = tap_config(&folder);
    let program = env!("CARGO_BIN_EXE_ringroad");
    let mut command = if is_root() {
        // Root without capabilities has no more rights than an ordinary user.
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all", program]);
        command
    } else {
        Command::new(program)
    };
    command.args(["serve", "-c", text(&config)]);
    let mut serve = Program::start(command);
    assert_eq!(serve.ends(PATIENCE).code(), Some(1), "{}", serve.err());
    let expected = if Path::new("/dev/net/tun").exists() {
        "ringroad: TAP interface rrtest0: not permitted; run as root or with CAP_NET_ADMIN"
    } else {
        "ringroad: TAP interface rrtest0: /dev/net/tun does not exist; load the module (modprobe tun)"
    };
    assert!(serve.err().starts_with(expected), "{}", serve.err());
}

#[test]
fn tap_without_a_device() {
    let folder = Folder::new("notun");
    let config = tap_config(&folder);
    let mut command = unshared("--mount");
    let hide = "if [ -d /dev/net ]; then mount -t tmpfs none /dev/net || exit 9; fi; exec \"$@\"";
    command.args(["sh", "-c", hide, "sh", env!("CARGO_BIN_EXE_ringroad"), "serve", "-c", text(&config)]);
    let mut serve = Program::start(command);
    assert_eq!(serve.ends(PATIENCE).code(), Some(1), "{}", serve.err());
    let expected = "ringroad: TAP interface rrtest0: /dev/net/tun does not exist; load the module (modprobe tun)";
    assert!(serve.err().starts_with(expected), "{}", serve.err());
}

#[test]
fn tap_in_use() {
    let folder = Folder::new("busy");
    let config = tap_config(&folder);
    let program = env!("CARGO_BIN_EXE_ringroad");
    // In a network namespace, so that the interface name is free.
    let mut command = unshared("--net");
    command.args([program, "serve", "-c", text(&config)]);
    let mut first = Program::start(command);
    first.logs("ready: 1 port\n");
    let mut command = Command::new("nsenter");
    command.args(["--net", "--target", &first.child.id().to_string()]);
    if !is_root() {
        command.args(["--user", "--preserve-credentials"]);
    }
    command.args([program, "serve", "-c", text(&config)]);
    let mut second = Program::start(command);
    assert_eq!(second.ends(PATIENCE).code(), Some(1), "{}", second.err());
    assert_eq!(second.err(), "ringroad: TAP interface rrtest0 is in use by another program\n");
    first.stop("TERM");
}
