//! SIGTERM and SIGHUP: what changes in place, and what does not.

use crate::testing::*;
use serde_json::Value;
use std::{
    fs,
    io::Write,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

#[test]
fn termination() {
    let folder = Folder::new("term");
    let config = folder.config(&[("a", ""), ("b", "queues = 4"), ("c", ""), ("d", ""), ("e", "role = \"client\"")]);
    for signal in ["TERM", "INT"] {
        let json = folder.file("counters.json");
        let mut serve = Program::serve(&config, &["--json", text(&json)]);
        serve.logs("ready: 5 ports\n");
        let (mut a, mut b) = (Guest::plain(&folder.file("a.sock")), Guest::plain(&folder.file("b.sock")));
        exchange(&mut a, &mut b);
        // An incomplete message, and a frontend that does not read replies: neither may delay the exit.
        let mut stalled = connects(&folder.file("c.sock"));
        stalled.write_all(&[1, 0, 0, 0, 1]).unwrap();
        let deaf = connects(&folder.file("d.sock"));
        deaf.set_nonblocking(true).unwrap();
        let question = [1u32, 1, 0].map(u32::to_ne_bytes).concat().repeat(64);
        let mut last = Instant::now();
        assert!(within(PATIENCE, || {
            while (&deaf).write(&question).is_ok() {
                last = Instant::now();
            }
            last.elapsed() > Duration::from_millis(100)
        }));
        serve.stop(signal);
        for name in ["a", "b", "c", "d"] {
            assert!(!folder.file(&format!("{name}.sock")).exists(), "{name}");
        }
        let counters: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(counters["ports"][0]["name"], "a");
        assert_eq!(counters["ports"][0]["from"]["frames"], 4);
        assert_eq!(counters["ports"][1]["to"]["frames"], 4);
        assert!(serve.out().lines().nth(1).is_some_and(|line| line.starts_with("port  |  frames")), "{}", serve.out());
    }
}

#[test]
fn reload() {
    let folder = Folder::new("reload");
    let socket = |name: &str| folder.file(&format!("{name}.sock"));
    let config = folder.config(&[("kept", ""), ("too", ""), ("gone", ""), ("changed", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready: 4 ports\n");
    let (mut kept, mut too) = (Guest::plain(&socket("kept")), Guest::plain(&socket("too")));
    let (gone, changed) = (Guest::plain(&socket("gone")), Guest::plain(&socket("changed")));
    exchange(&mut kept, &mut too);

    folder.config(&[("new", ""), ("changed", "mtu = 9000"), ("kept", ""), ("too", "")]);
    serve.signal("HUP");
    serve.logs("configuration reloaded: 4 ports (+new, -gone)\n");
    assert!(within(PATIENCE, || gone.0.is_closed() && changed.0.is_closed()));
    assert!(!socket("gone").exists());
    assert!(!kept.0.is_closed() && !too.0.is_closed());
    exchange(&mut kept, &mut too);
    drop(too);
    let mut new = Guest::plain(&socket("new"));
    exchange(&mut kept, &mut new);
    exchange(&mut Guest::plain(&socket("changed")), &mut kept);
    let _ = new.received();

    // An invalid file changes nothing.
    fs::write(&config, "[[port]]\nname = 7\n").unwrap();
    serve.signal("HUP");
    serve.logs("ringroad.toml:2: port 1: key `name`: expected");
    serve.logs("the running configuration is kept");
    exchange(&mut kept, &mut new);
    // A port that cannot be created is left out; the others work.
    fs::write(folder.file("blocked.sock"), "").unwrap();
    folder.config(&[("kept", ""), ("new", ""), ("blocked", "")]);
    serve.signal("HUP");
    serve.logs("ringroad.toml:14: port \"blocked\": key `socket`: ");
    serve.logs("blocked.sock exists and is not a socket");
    serve.logs("configuration reloaded: 2 ports (-changed, -too)\n");
    exchange(&mut kept, &mut new);
    fs::remove_file(folder.file("blocked.sock")).unwrap();
    serve.signal("HUP");
    serve.logs("configuration reloaded: 3 ports (+blocked)\n");
    drop(Guest::plain(&socket("blocked")));
    serve.stop("TERM");
}

/// Two guests that keep sending each other frames in turn. Each frame must arrive once and intact; other frames are ignored.
struct Traffic {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<usize>,
}

/// A limit that [`Traffic`] does not reach: its addresses are new all the time, so its frames are flooded.
const STORMS: &str = "limits = { storm = 1000000 }";

/// Frame numbers from here on are not used by [`Traffic`].
const OTHERS: u8 = 200;

impl Traffic {
    fn start(mut guests: [Guest; 2]) -> Traffic {
        let stop = Arc::<AtomicBool>::default();
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) {
                let (number, len) = ((rounds % 199) as u8 + 1, 60 + rounds % 1400);
                guests[rounds % 2].send(number, len);
                let mut frames = Vec::new();
                within(PATIENCE, || {
                    let ours = |(frame, _): &(Vec<u8>, usize)| (1..OTHERS).contains(&frame[11]);
                    frames.extend(guests[(rounds + 1) % 2].received().into_iter().filter(ours));
                    !frames.is_empty()
                });
                assert_eq!(frames.len(), 1, "frames in round {rounds}");
                assert!(frames[0].0.len() == len && frames[0].0[14..].iter().all(|&byte| byte == number), "damaged");
                assert!(guests.iter().all(|guest| !guest.0.is_closed()), "disconnected in round {rounds}");
                rounds += 1;
            }
            rounds
        });
        Traffic { stop, thread }
    }

    /// Stops it; at least `frames` must have arrived, and none been lost.
    #[track_caller]
    fn ends(self, frames: usize) {
        self.stop.store(true, Ordering::Relaxed);
        let rounds = self.thread.join().expect("no frame was lost or damaged");
        assert!(rounds >= frames, "{rounds} frames");
    }
}

/// Reloads a running daemon with changed configurations.
struct Reloads<'a> {
    folder: &'a Folder,
    serve: &'a Program,
    head: String,
}

impl Reloads<'_> {
    /// Returns a configuration: ports `a` and `b` never change, port `c` has these further lines.
    fn text(&self, c: &str) -> String {
        let socket = |name: &str| self.folder.file(&format!("{name}.sock")).display().to_string();
        let port =
            |name: &str| format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\nsocket = \"{}\"\n", socket(name));
        let [a, b] = ["a", "b"].map(|name| format!("{}{STORMS}\n", port(name)));
        format!("{}{a}{b}{}{c}\n", self.head, port("c"))
    }

    /// Reloads; returns what the daemon logged.
    #[track_caller]
    fn reload(&self, text: &str) -> String {
        self.folder.write(text);
        self.serve.reload()
    }

    /// Reloads with further lines for port `c`.
    #[track_caller]
    fn port(&mut self, c: &str) -> String {
        self.reload(&self.text(c))
    }

    /// Reloads with these lines before all ports, from now on.
    #[track_caller]
    fn head(&mut self, head: &str) -> String {
        self.head = format!("{head}\n");
        self.port("")
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, each step of which starts from what those before it left")]
fn a_reload_changes_in_place_what_it_can() {
    let folder = Folder::new("inplace");
    let guest = |name: &str| Guest::plain(&folder.file(&format!("{name}.sock")));
    let config = folder.config(&[("a", STORMS), ("b", STORMS), ("c", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready: 3 ports\n");
    let traffic = Traffic::start([guest("a"), guest("b")]);
    let mut c = guest("c");
    let mut reloads = Reloads { folder: &folder, serve: &serve, head: String::new() };
    let only = |log: String, key: &str| {
        let logged: Vec<&str> = log.lines().filter(|line| line.contains("reload: ")).collect();
        assert!(logged.len() == 1 && logged[0].contains(&format!("key `{key}`: in place")), "{key}: {log}");
    };
    for (head, keys) in [
        ("[workers]\npoll = \"50us\"", &["workers.poll"][..]),
        ("[workers]\npoll = \"unlimited\"", &["workers.poll"]),
        ("[workers]\nturn = 1", &["workers.poll", "workers.turn"]),
        ("[workers]\ngather = \"8us\"", &["workers.gather", "workers.turn"]),
        ("[workers]\ncpus = [0]", &["workers.cpus", "workers.gather"]),
        ("[switch]\nageing = \"1s\"", &["workers.cpus", "switch.ageing"]),
        ("[switch]\nentries = 7", &["switch.ageing", "switch.entries"]),
        ("[log]\nlines = 77", &["switch.entries", "log.lines"]),
        ("", &["log.lines"]),
    ] {
        let log = reloads.head(head);
        for key in keys {
            assert!(log.contains(&format!("[INFO ] reload: key `{key}`: in place\n")), "{key}: {log}");
        }
        assert_eq!(log.matches("reload: ").count(), keys.len(), "{log}");
        assert!(!c.0.is_closed(), "{head}");
        c.send(OTHERS, 100);
    }
    // Returns how many frames c gets back of what it sends.
    let back = |c: &mut Guest| {
        while !c.received().is_empty() {}
        c.send(OTHERS + 1, 100);
        let mut count = 0;
        within(Duration::from_millis(200), || {
            count += c.received().iter().filter(|(frame, _)| frame[14] == OTHERS + 1).count();
            count > 0
        });
        count
    };
    assert_eq!(back(&mut c), 0);
    only(reloads.port("hairpin = true"), "port.hairpin");
    assert_eq!(back(&mut c), 1);
    reloads.port("");
    assert_eq!(back(&mut c), 0);
    only(reloads.port("mode = \"reflect\""), "port.mode");
    assert_eq!(back(&mut c), 1);
    reloads.port("mode = \"drop\"");
    assert_eq!(back(&mut c), 0);
    reloads.port("mode = \"generate\"");
    let made = |frames: Vec<(Vec<u8>, usize)>| frames.iter().filter(|(frame, _)| frame.len() == 64).count();
    assert!(within(PATIENCE, || made(c.received()) > 0), "the port generates frames");
    reloads.port("");
    assert_eq!(back(&mut c), 0);
    for poll in ["50us", "auto", "unlimited", "0"] {
        let log = reloads.port(&format!("poll = {poll:?}"));
        only(log, "port.poll");
    }
    reloads.port("");
    for tuning in [
        "fast_path = false",
        "shadow_used = false",
        "prefetch = 0",
        "prefetch_write = false",
        "translation_cache = false",
        "small_copy = false",
        "prefetch = 31",
    ] {
        only(reloads.port(&format!("tuning = {{ {tuning} }}")), "port.tuning");
        reloads.head("[workers]\nturn = 2");
        c.send(OTHERS, 1000);
    }
    assert!(!c.0.is_closed(), "{}", serve.err());
    reloads.head("");

    // What the guest of c negotiates reconnects it, and no other guest. The MAC address is not one of the traffic's: it would be
    // reserved for c from then on.
    for key in ["mac = \"02:00:00:00:01:00\"", "mtu = 9000", "features = { packed = false }", "queues = 2"] {
        let log = reloads.port(key);
        let name = key.split(' ').next().unwrap();
        let expected = format!("[WARN ] reload: port c: key `port.{name}`: reconnects the guest");
        assert!(log.contains(&expected), "{log}");
        assert!(within(PATIENCE, || c.0.is_closed()), "{key}");
        c = guest("c");
        c.send(OTHERS, 100);
    }
    traffic.ends(100);
    for name in ["a", "b"] {
        assert_eq!(serve.err().matches(&format!("port {name}: frontend connected")).count(), 1, "{}", serve.err());
    }
    serve.stop("TERM");
}

#[test]
fn ports_that_swap_their_vlans_share_none_meanwhile() {
    let folder = Folder::new("swap");
    let guest = |name: &str| Guest::plain(&folder.file(&format!("{name}.sock")));
    let ports = |a: &str, b: &str| folder.config(&[("a", &format!("{STORMS}\n{a}")), ("b", b)]);
    let mut serve = Program::serve(&ports("vlan = 10", "vlan = 20"), &[]);
    serve.logs("ready: 2 ports\n");
    let (mut a, mut b) = (guest("a"), guest("b"));
    let stop = AtomicBool::new(false);
    let sent = thread::scope(|scope| {
        let sends = scope.spawn(|| {
            let mut sent = 0;
            while !stop.load(Ordering::Relaxed) {
                while a.0.driver.tx[0].reclaim().unwrap() > 0 {}
                if a.0.driver.tx[0].free() > 0 {
                    a.send(OTHERS, 60);
                    sent += 1;
                }
            }
            sent
        });
        for _ in 0..10 {
            for (a, b) in [
                ("vlan = 20", "vlan = 10"),
                ("vlan = 10\nisolated = true", "vlan = 10\nisolated = true"),
                ("vlan = 10", "vlan = 20"),
            ] {
                ports(a, b);
                serve.reload();
            }
        }
        stop.store(true, Ordering::Relaxed);
        sends.join().unwrap()
    });
    assert!(sent > 1000, "{sent}");
    assert!(b.received().is_empty());
    ports("vlan = 10", "vlan = 10");
    serve.reload();
    a.send(OTHERS + 1, 60);
    assert!(within(PATIENCE, || b.received().iter().any(|(frame, _)| frame[14] == OTHERS + 1)));
    serve.stop("TERM");
}

#[test]
fn a_reload_keeps_interfaces() {
    let folder = Folder::new("keeps");
    let tap = |more: &str| format!("[[port]]\nname = \"host\"\nkind = \"tap\"\ninterface = \"rrtest2\"\n{more}");
    let config = folder.write(&tap(""));
    // In a network namespace, so that the interface name is free.
    let mut command = unshared("--net");
    command.args([env!("CARGO_BIN_EXE_ringroad"), "serve", "-c", text(&config)]);
    let mut serve = Program::start(command);
    serve.logs("ready: 1 port\n");
    let ip = |arguments: &str| {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &serve.child.id().to_string()]);
        if !is_root() {
            command.args(["--user", "--preserve-credentials"]);
        }
        let output = command.arg("ip").args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    ip("addr add 10.99.0.1/24 dev rrtest2");
    let reload = |text: String| {
        folder.write(&text);
        serve.reload()
    };
    let address = "inet 10.99.0.1/24";
    for text in [
        format!("[workers]\npoll = \"50us\"\n{}", tap("")),
        tap("poll = \"1ms\""),
        tap("hairpin = true"),
        tap("mode = \"drop\""),
        tap("mtu = 9000"),
        tap("mtu = 1400"),
    ] {
        let log = reload(text.clone());
        assert!(log.contains(": in place") && !log.contains("recreates"), "{log}");
        assert!(ip("-o addr show dev rrtest2").contains(address), "{text}");
    }
    assert!(ip("-o link show dev rrtest2").contains("mtu 1400"), "changed in place");
    let log = reload(tap("queues = 2"));
    assert!(log.contains("[WARN ] reload: port host: key `port.queues`: recreates the interface"), "{log}");
    assert!(!ip("-o addr show dev rrtest2").contains(address), "the interface was recreated");
    serve.stop("TERM");
}
