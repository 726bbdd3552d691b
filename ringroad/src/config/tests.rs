use super::port::MAX_SOCKET;
use super::*;
use crate::ports::Mode;
use ringroad_host::vhost_user::Role;
use ringroad_net::Features;
use ringroad_ring::Tuning;

use ringroad_switch::{Gather, Limits, Poll, Rate, Vid, Vlans};
use ringroad_wire::ethernet::MacAddr;
use std::{path::Path, time::Duration};

const EXAMPLE: &str = r#"
[workers]
cpus = [1]
poll = "50us"
gather = "8us"
turn = 1
[switch]
ageing = "60s"
entries = 1_000
move_after = "5s"
[[port]]
name = "vm1"
kind = "vhost-user"         # vhost-user | tap
socket = "/run/ringroad/vm1.sock"
role = "client"
mode = "reflect"
hairpin = true
gro = true
features = { packed = true, in_order = false, mrg_rxbuf = true, event_idx = true, indirect = true, mtu = false }
queues = 2
mac = "52:54:00:12:34:56"
addresses = "fixed"
limits = { addresses = 2, storm = 1_000, wait = "2ms", rate = "20Mb/s", frames = 500, burst = "3ms" }
isolated = true
vlan = 10
link_local = "forward"
speed = "25Gb/s"
link = false
interrupt_delay = "2ms"
mtu = 1500
poll = "unlimited"
[[port]]
name = "uplink"
kind = "tap"
interface = "rr0"
limits = { storm = "unlimited" }
full = "drop"
trunk = [10, 20]
native = 1
"#;

/// A valid vhost-user port in lines 1 to 4, then `rest` from line 5 on.
fn vm1(rest: &str) -> String {
    format!("[[port]]\nname = \"vm1\"\nkind = \"vhost-user\"\nsocket = \"/run/1\"\n{rest}")
}

/// A valid TAP port in lines 1 to 4, then `rest` from line 5 on.
fn rr0(rest: &str) -> String {
    format!("[[port]]\nname = \"up\"\nkind = \"tap\"\ninterface = \"rr0\"\n{rest}")
}

fn vid(number: u16) -> Vid {
    Vid::new(number).unwrap()
}

/// A valid port with an emulated card in lines 1 to 4, then `rest` from line 5 on.
fn card(rest: &str) -> String {
    format!("[[port]]\nname = \"old\"\nkind = \"e1000\"\nsocket = \"/run/3\"\n{rest}")
}

fn parse(text: &str) -> Config {
    Config::parse(text, "rr.toml").unwrap()
}

fn error(text: &str) -> String {
    Config::parse(text, "rr.toml").expect_err(text).to_string()
}

#[test]
fn example() {
    let config = parse(EXAMPLE);
    let (poll, gather) = (Poll::For(Duration::from_micros(50)), Gather::For(Duration::from_micros(8)));
    assert_eq!(config.workers, Workers { cpus: vec![1], poll, gather, turn: 1 });
    assert_eq!(
        config.switch,
        SwitchConfig { ageing: Duration::from_secs(60), entries: 1000, move_after: Duration::from_secs(5) }
    );
    let mac = Some(MacAddr([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]));
    let vm1 = Port {
        name: "vm1".into(),
        mode: Mode::Reflect,
        hairpin: true,
        gro: true,
        mtu: Some(1500),
        poll: Some(Poll::Unlimited),
        limits: Limits {
            addresses: 2,
            own: mac,
            fixed: true,
            storm: 1000,
            link_local: true,
            isolated: true,
            rate: Rate { bits: 20_000_000, frames: 500, burst: Duration::from_millis(3) },
            wait: Duration::from_millis(2),
        },
        vlans: Some(Vlans::access(vid(10))),
        mirror: None,
        queues: 2,
        kind: Kind::VhostUser(VhostUser {
            socket: "/run/ringroad/vm1.sock".into(),
            role: Role::Client,
            features: Features::default() - Features::IN_ORDER - Features::MTU,
            mac,
            fixed: true,
            tuning: Tuning::default(),
            speed: Some(25_000),
            link: false,
            interrupt_delay: Duration::from_millis(2),
            frontend: Frontend::default(),
        }),
    };
    let uplink = Port {
        name: "uplink".into(),
        mode: Mode::Switch,
        hairpin: false,
        gro: false,
        mtu: None,
        poll: None,
        limits: Limits { addresses: 4096, storm: 0, wait: Duration::ZERO, ..Limits::GUEST },
        vlans: Some(Vlans::trunk([10, 20].map(vid), Some(vid(1)))),
        mirror: None,
        queues: 1,
        kind: Kind::Tap(Tap { interface: "rr0".into(), tunnels: false }),
    };
    assert_eq!(config.ports, [vm1, uplink]);
}

#[test]
fn tunnels_of_an_interface() {
    for (rest, tunnels) in [("", false), ("tunnels = false", false), ("tunnels = true", true)] {
        let tap = Tap { interface: "rr0".into(), tunnels };
        assert_eq!(parse(&rr0(rest)).ports[0].kind, Kind::Tap(tap));
    }
}

#[test]
fn defaults() {
    let config = parse(&vm1(""));
    let workers = Workers { cpus: vec![], poll: Poll::Auto, gather: Gather::Auto, turn: 4 };
    assert_eq!(config.workers, workers);
    assert_eq!(config.switch, SwitchConfig::default());
    assert_eq!(
        (config.switch.ageing.as_secs(), config.switch.entries, config.switch.move_after.as_secs()),
        (300, 4096, 2)
    );
    let port = &config.ports[0];
    let limits = Limits {
        addresses: 256,
        own: None,
        fixed: false,
        storm: 10_000,
        link_local: false,
        isolated: false,
        rate: Rate { bits: 0, frames: 0, burst: Duration::from_millis(10) },
        wait: Duration::from_millis(5),
    };
    assert_eq!((port.limits, port.vlans), (limits, None));
    assert_eq!((port.mode, port.hairpin, port.queues, port.mtu, port.poll), (Mode::Switch, false, 1, None, None));
    let (role, features) = (Role::Server, Features::default());
    let (tuning, interrupt_delay) = (Tuning::default(), ringroad_host::INTERRUPT_DELAY);
    let (socket, frontend) = ("/run/1".into(), Frontend::default());
    let kind = Kind::VhostUser(VhostUser {
        socket,
        role,
        features,
        mac: None,
        fixed: false,
        tuning,
        speed: None,
        link: true,
        interrupt_delay,
        frontend,
    });
    assert_eq!(port.kind, kind);
    assert_eq!(parse(&vm1("features = {}\n[workers]\n[switch]")), config);
}

#[test]
fn each_tuning_has_its_key() {
    let read = |line: &str| parse(&vm1(&format!("[port.tuning]\n{line}"))).ports[0].vhost_user().unwrap().tuning;
    let all = Tuning::default();
    assert_eq!(read("fast_path = false"), Tuning { fast_path: false, ..all });
    assert_eq!(read("shadow_used = false"), Tuning { shadow_used: false, ..all });
    assert_eq!(read("prefetch = 0"), Tuning { prefetch: 0, ..all });
    assert_eq!(read("prefetch_write = false"), Tuning { prefetch_write: false, ..all });
    assert_eq!(read("translation_cache = false"), Tuning { translation_cache: false, ..all });
    assert_eq!(read("small_copy = false"), Tuning { small_copy: false, ..all });
    let found = error(&vm1("[port.tuning]\nprefetch = 32"));
    assert!(found.contains("tuning.prefetch") && found.contains("31"), "{found}");
}

#[test]
fn vlans_of_ports() {
    let read = |rest: &str| parse(&vm1(rest)).ports[0].vlans;
    assert_eq!(read("vlan = 4094"), Some(Vlans::access(vid(4094))));
    assert_eq!(read("trunk = [1, 1, 4094]"), Some(Vlans::trunk([1, 4094].map(vid), None)));
    assert_eq!(read("trunk = [20]\nnative = 10"), Some(Vlans::trunk([vid(20)], Some(vid(10)))));
    assert_eq!(read("trunk = \"all\""), Some(Vlans::all(None)));
    assert_eq!(read("trunk = \"all\"\nnative = 1"), Some(Vlans::all(Some(vid(1)))));
}

#[test]
fn each_feature_has_its_key() {
    let rings = ["packed", "in_order", "mrg_rxbuf", "event_idx", "indirect", "mac", "status", "mtu", "speed_duplex"];
    let sends = ["csum", "host_tso4", "host_tso6", "host_ecn", "host_ufo", "host_uso"];
    let takes = ["guest_csum", "guest_tso4", "guest_tso6", "guest_ecn", "guest_ufo", "guest_uso4", "guest_uso6"];
    let control = [
        "ctrl_vq",
        "ctrl_rx",
        "ctrl_rx_extra",
        "ctrl_vlan",
        "ctrl_mac_addr",
        "ctrl_guest_offloads",
        "mq",
        "rss",
        "notf_coal",
        "vq_notf_coal",
        "hash_report",
        "guest_announce",
        "device_stats",
    ];
    let keys: Vec<_> = [&rings[..], &sends, &takes, &control].concat();
    assert_eq!(keys.len() + 1, Features::all().iter().count(), "all but version_1");
    for key in &keys {
        let config = parse(&vm1(&format!("features.{key} = false")));
        let off = Features::from_name(&key.to_uppercase()).unwrap();
        let features = config.ports[0].vhost_user().unwrap().features;
        assert_eq!(features, (Features::default() - off).consistent(), "{key}");
    }
    let config = parse(&vm1("features = { csum = false, guest_csum = false }"));
    assert_eq!(config.ports[0].vhost_user().unwrap().features, Features::default() - Features::OFFLOADS);
    let found = error(&vm1("features.zone = true"));
    assert!(found.contains("key `features.zone`: unknown key, expected one of "), "{found}");
    assert!(keys.iter().all(|key| found.contains(&format!("`{key}`"))) && !found.contains("version_1"), "{found}");
}

#[test]
fn values_at_their_bounds() {
    for rest in [
        "queues = 16",
        "mtu = 68",
        "mtu = 65535",
        "mtu = 0xffff",
        "poll = \"auto\"",
        "poll = \"0\"",
        "poll = \"0us\"",
        "poll = \"10000ms\"",
        "interrupt_delay = \"0\"",
        "interrupt_delay = \"1us\"",
        "interrupt_delay = \"10ms\"",
        "mode = \"drop\"",
        "[switch]\nentries = 1\nageing = \"1s\"",
        "[switch]\nmove_after = \"0s\"",
        "limits = { addresses = 262144, storm = 1000000000 }",
        "limits = { rate = \"1Mb/s\", frames = 1, burst = \"1000ms\" }\nisolated = false",
        "limits = { rate = \"1000Gb/s\", frames = \"unlimited\", burst = \"1ms\" }",
        "limits = { rate = \"unlimited\" }",
        "speed = \"10Mb/s\"",
        "addresses = \"learn\"\nlink_local = \"drop\"\nlimits = {}",
        "[switch]\nentries = 1048576\nageing = \"1000000s\"",
        "[workers]\ncpus = []",
        "[workers]\ncpus = [1023]",
        "[log]\nlines = 1",
        "[[port]]\nname = \"vm2\"\nkind = \"vhost-user\"\nsocket = \"/run/2\"\nrole = \"client\"",
        "[[port]]\nname = \"old\"\nkind = \"e1000\"\nsocket = \"/run/2\"\nmitigation = false\nmac = \"02:00:00:00:00:09\"\naddresses = \"fixed\"",
        "[[port]]\nname = \"old\"\nkind = \"e1000\"\nsocket = \"/run/2\"\nmitigation = \"clamped\"\nlimits = { regions = 9, storm = 1 }",
        "[[port]]\nname = \"old\"\nkind = \"e1000\"\nsocket = \"/run/2\"\naccess_poll = \"10ms\"",
        // A port may be named after another's interface.
        "[[port]]\nname = \"rr0\"\nkind = \"tap\"\ninterface = \"fifteen-bytes.x\"",
    ] {
        parse(&vm1(rest));
    }
    let long = "s".repeat(MAX_SOCKET);
    parse(&format!("[[port]]\nname = \"a-b_c.9\"\nkind = \"vhost-user\"\nsocket = \"{long}\""));
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of files and messages")]
fn broken_files() {
    let tap = |name: &str| format!("[[port]]\nname = \"x\"\nkind = \"tap\"\ninterface = \"{name}\"");
    let server = |path: &str| vm1(&format!("[[port]]\nname = \"vm2\"\nkind = \"vhost-user\"\nsocket = \"{path}\"\n"));
    let socket = |path: &str| server(path).replace("/run/1", "/run/0");
    let rows: Vec<(String, &str)> = vec![
        // The file as a whole.
        ("".into(), "1: key `port`: missing, expected at least one port, written [[port]]"),
        ("\n\nport = []".into(), "3: key `port`: expected at least one port, written [[port]], found []"),
        ("[port]\nname = \"vm1\"".into(), "1: key `port`: expected at least one port, written [[port]], found a"),
        ("port = [\n{},\n{}]".into(), "2: port 1: key `name`: missing, expected 1 to 32 letters"),
        (
            "port = [\n{},\n7]".into(),
            "1: key `port`: expected at least one port, written [[port]], found a list of tables",
        ),
        ("port = [\n7]".into(), "1: key `port`: expected at least one port, written [[port]], found [ 7]"),
        (vm1("[wrokers]"), "5: key `wrokers`: unknown key, did you mean `workers`?"),
        (vm1("[ports]"), "5: key `ports`: unknown key, did you mean `port`?"),
        (
            vm1("[bridge]"),
            "5: key `bridge`: unknown key, expected one of `log`, `workers`, `switch`, `sandbox`, `port` or `vsock`",
        ),
        (card("queues = 2"), "5: port \"old\": key `queues`: this card has one queue each way, expected 1"),
        (card("mitigation = 1"), "5: port \"old\": key `mitigation`: expected true, false or \"clamped\", found 1"),
        (
            card("role = \"client\""),
            "5: port \"old\": key `role`: only valid for kind \"vhost-user\", but this port is of kind \"e1000\"; remove it",
        ),
        (
            card("addresses = \"fixed\""),
            "5: port \"old\": key `addresses`: \"fixed\" requires key `mac`, which is missing",
        ),
        (card("access_poll = \"1s\""), "5: port \"old\": key `access_poll`: expected \"0\", or \"1us\" to \"10ms\""),
        (vm1("access_poll = \"0\""), "5: port \"vm1\": key `access_poll`: only valid for kind \"e1000\""),
        (vm1("mitigation = true"), "5: port \"vm1\": key `mitigation`: only valid for kind \"e1000\""),
        (
            rr0("mac = \"02:00:00:00:00:09\""),
            "5: port \"up\": key `mac`: only valid for kind \"vhost-user\" and \"e1000\"",
        ),
        (vm1("[[e1000]]"), "5: key `e1000`: unknown key, expected one of `log`, `workers`"),
        // Syntax.
        (vm1("queues 2"), "5: not valid TOML: "),
        (vm1("queues = "), "5: not valid TOML: "),
        (vm1("mode = \"drop"), "5: not valid TOML: invalid basic string"),
        (vm1("mode = \"drop\nmtu = 1500\""), "5: not valid TOML: invalid basic string"),
        (vm1("mtu = 1500\nmtu = 1500"), "6: not valid TOML: duplicate key, found \"mtu\""),
        (vm1("[workers]\n[switch]\n[workers]"), "7: not valid TOML: duplicate key, found \"workers\""),
        (format!("a = {}", "[".repeat(100_000)), "1: not valid TOML: cannot recurse further"),
        (format!("a{} = 1", ".a".repeat(100_000)), "1: not valid TOML: recursion limit"),
        // [workers].
        (vm1("workers = 3"), "5: port \"vm1\": key `workers`: unknown key, expected one of `name`, `mode`"),
        (vm1("[[workers]]"), "5: key `workers`: expected a table, found a list"),
        (vm1("[workers]\n\nspin = true"), "7: key `workers.spin`: unknown key, expected one of `cpus`, `poll`, "),
        (vm1("[workers]\nmodel = \"shared\""), "6: key `workers.model`: unknown key, expected one of `cpus`, `poll`, "),
        (
            vm1("[workers]\ncpus = 1"),
            "6: key `workers.cpus`: expected a list of at most one CPU (this version has one worker), 0 to 1023, found 1",
        ),
        (
            vm1("[workers]\ncpus = [\n1,\n2]"),
            "6: key `workers.cpus`: expected a list of at most one CPU (this version has one worker), 0 to 1023, found [ 1, 2]",
        ),
        (
            vm1("[workers]\ncpus = [\n1024]"),
            "6: key `workers.cpus`: expected a list of at most one CPU (this version has one worker), 0 to 1023, found [ 1024]",
        ),
        (
            vm1("[workers]\ncpus = [\"1\"]"),
            "6: key `workers.cpus`: expected a list of at most one CPU (this version has one worker), 0 to 1023, found [\"1\"]",
        ),
        (
            vm1("[workers]\ncpus = [-1]"),
            "6: key `workers.cpus`: expected a list of at most one CPU (this version has one worker), 0 to 1023, found [-1]",
        ),
        (vm1("[workers]\nturn = 0"), "6: key `workers.turn`: expected 1 to 64, found 0"),
        (
            vm1("[workers]\ngather = \"101us\""),
            "6: key `workers.gather`: expected \"auto\", \"off\" or \"<N>us\" (at most 100 us), found \"101us\"",
        ),
        (
            vm1("[workers]\npoll = 50"),
            "6: key `workers.poll`: expected \"auto\", \"0\", \"<N>us\", \"<N>ms\" (at most 10 s) or \"unlimited\", found 50",
        ),
        (vm1("[workers]\npoll = \"50\""), "6: key `workers.poll`: expected \"auto\", \"0\", "),
        (vm1("[workers]\npoll = \"us\""), "6: key `workers.poll`: expected \"auto\", \"0\", "),
        (vm1("[workers]\npoll = \"-1us\""), "6: key `workers.poll`: expected \"auto\", \"0\", "),
        (vm1("[workers]\npoll = \"+1us\""), "6: key `workers.poll`: expected \"auto\", \"0\", "),
        (vm1("[workers]\npoll = \"10001ms\""), "6: key `workers.poll`: expected \"auto\", \"0\", "),
        (vm1("[workers]\npoll = \"99999999999999999999ms\""), "6: key `workers.poll`: expected \"auto\", \"0\", "),
        // [switch].
        (vm1("[switch]\nageing = 300"), "6: key `switch.ageing`: expected \"1s\" to \"1000000s\", found 300"),
        (vm1("[switch]\nageing = \"0s\""), "6: key `switch.ageing`: expected \"1s\" to \"1000000s\", found \"0s\""),
        (vm1("[switch]\nageing = \"5m\""), "6: key `switch.ageing`: expected \"1s\" to \"1000000s\", found \"5m\""),
        (vm1("[switch]\naging = \"5s\""), "6: key `switch.aging`: unknown key, did you mean `ageing`?"),
        (vm1("[switch]\nentries = 0"), "6: key `switch.entries`: expected 1 to 1048576, found 0"),
        (vm1("[switch]\nentries = 1048577"), "6: key `switch.entries`: expected 1 to 1048576, found 1048577"),
        // Any port.
        (vm1("queue = 1"), "5: port \"vm1\": key `queue`: unknown key, did you mean `queues`?"),
        (vm1("zone = 1\ncolour = 2"), "5: port \"vm1\": key `zone`: unknown key, expected one of `name`, `mode`, "),
        (vm1("xdp = {}"), "5: port \"vm1\": key `xdp`: unknown key, expected one of `name`"),
        ("[[port]]\nkind = \"tap\"".into(), "1: port 1: key `name`: missing, expected 1 to 32 letters, digits, "),
        (vm1("\n[[port]]"), "6: port 2: key `name`: missing, expected 1 to 32 letters, digits, `_`, `.` or `-`"),
        (vm1("[[port]]\nname = \"\""), "6: port 2: key `name`: expected 1 to 32 letters, digits, `_`, `.` or `-`, "),
        (vm1("[[port]]\nname = \"a b\""), "6: port 2: key `name`: expected 1 to 32 letters, digits, `_`, `.` or `"),
        (vm1("[[port]]\nname = 5"), "6: port 2: key `name`: expected 1 to 32 letters, digits, `_`, `.` or `-`, fou"),
        (
            vm1("[[port]]\nkind = \"tap\"\nname = \"vm1\""),
            "7: port \"vm1\": key `name`: duplicate name \"vm1\", already used in line 2",
        ),
        (
            "[[port]]\nname = \"vm1\"".into(),
            "1: port \"vm1\": key `kind`: missing, expected \"vhost-user\", \"e1000\" or \"tap\"",
        ),
        (
            "[[port]]\nname = \"x\"\nkind = \"veth\"".into(),
            "3: port \"x\": key `kind`: expected \"vhost-user\", \"e1000\" or \"tap\", found \"veth\"",
        ),
        (
            vm1("mode = \"hub\""),
            "5: port \"vm1\": key `mode`: expected \"switch\", \"reflect\", \"drop\" or \"generate\", found \"hub\"",
        ),
        (vm1("gro = \"on\""), "5: port \"vm1\": key `gro`: expected true or false, found \"on\""),
        (vm1("hairpin = 1"), "5: port \"vm1\": key `hairpin`: expected true or false, found 1"),
        (vm1("queues = 128"), "5: port \"vm1\": key `queues`: expected 1 to 127, found 128"),
        (vm1("queues = 0"), "5: port \"vm1\": key `queues`: expected 1 to 127, found 0"),
        (vm1("queues = 1.5"), "5: port \"vm1\": key `queues`: expected 1 to 127, found 1.5"),
        (vm1("queues = \"2\""), "5: port \"vm1\": key `queues`: expected 1 to 127, found \"2\""),
        (vm1("queues = 99999999999999999999"), "5: port \"vm1\": key `queues`: expected 1 to 127, found 9999"),
        (vm1("mtu = 67"), "5: port \"vm1\": key `mtu`: expected 68 to 65535, found 67"),
        (vm1("mtu = 0x10000"), "5: port \"vm1\": key `mtu`: expected 68 to 65535, found 0x10000"),
        (vm1("mtu = 1979-05-27"), "5: port \"vm1\": key `mtu`: expected 68 to 65535, found 1979-05-27"),
        (
            vm1("interrupt_delay = \"11ms\""),
            "5: port \"vm1\": key `interrupt_delay`: expected \"0\", or \"1us\" to \"10ms\"",
        ),
        (vm1("interrupt_delay = \"us\""), "5: port \"vm1\": key `interrupt_delay`: expected \"0\", or"),
        (
            vm1("poll = \"1s\""),
            "5: port \"vm1\": key `poll`: expected \"auto\", \"0\", \"<N>us\", \"<N>ms\" (at most 10 s)",
        ),
        // vhost-user.
        (
            vm1("\ninterface = \"x\""),
            "6: port \"vm1\": key `interface`: only valid for kind \"tap\", but this port is of",
        ),
        (vm1("tunnels = true"), "5: port \"vm1\": key `tunnels`: only valid for kind \"tap\", but this port is of"),
        (vm1("role = \"master\""), "5: port \"vm1\": key `role`: expected \"server\" or \"client\", found \"master\""),
        (vm1("mac = \"52:54:00:12:34\""), "5: port \"vm1\": key `mac`: expected a unicast, non-zero address su"),
        (vm1("mac = \"01:00:5e:00:00:01\""), "5: port \"vm1\": key `mac`: expected a unicast, non-zero addres"),
        (vm1("mac = \"00:00:00:00:00:00\""), "5: port \"vm1\": key `mac`: expected a unicast, non-zero addres"),
        (
            server("/run/2").replace("/run/1\"", "/run/1\"\nmac = \"52:54:00:00:00:01\"")
                + "mac = \"52:54:00:00:00:01\"",
            "10: port \"vm2\": key `mac`: duplicate mac \"52:54:00:00:00:01\", already used in line 5",
        ),
        (
            vm1("addresses = \"fixed\""),
            "5: port \"vm1\": key `addresses`: \"fixed\" requires key `mac`, which is missing",
        ),
        (
            vm1("addresses = \"any\""),
            "5: port \"vm1\": key `addresses`: expected \"learn\" or \"fixed\", found \"any\"",
        ),
        (vm1("vlan = 0"), "5: port \"vm1\": key `vlan`: expected 1 to 4094, found 0"),
        (vm1("vlan = 4095"), "5: port \"vm1\": key `vlan`: expected 1 to 4094, found 4095"),
        (vm1("vlan = [10]"), "5: port \"vm1\": key `vlan`: expected 1 to 4094, found [10]"),
        (
            vm1("trunk = 10"),
            "5: port \"vm1\": key `trunk`: expected a list of VLANs, 1 to 4094 each, or \"all\", found 10",
        ),
        (
            vm1("trunk = []"),
            "5: port \"vm1\": key `trunk`: expected a list of VLANs, 1 to 4094 each, or \"all\", found []",
        ),
        (vm1("trunk = [1, 4095]"), "5: port \"vm1\": key `trunk`: expected a list of VLANs, 1 to 4094 each, or"),
        (vm1("trunk = \"any\""), "5: port \"vm1\": key `trunk`: expected a list of VLANs, 1 to 4094 each, or"),
        (
            vm1("vlan = 1\ntrunk = [2]"),
            "6: port \"vm1\": key `trunk`: the port has key `vlan`, too; remove one of them",
        ),
        (vm1("native = 1"), "5: port \"vm1\": key `native`: requires key `trunk`, which is missing"),
        (vm1("vlan = 1\nnative = 1"), "6: port \"vm1\": key `native`: requires key `trunk`, which is missing"),
        (vm1("link = 1"), "5: port \"vm1\": key `link`: "),
        (vm1("isolated = 1"), "5: port \"vm1\": key `isolated`: "),
        (
            vm1("limits = { rate = \"999kb/s\" }"),
            "5: port \"vm1\": key `limits.rate`: expected \"1Mb/s\" to \"1000Gb/s\" or \"unlimited\", found \"999kb/s\"",
        ),
        (vm1("limits = { rate = \"1001Gb/s\" }"), "5: port \"vm1\": key `limits.rate`: expected \"1Mb/s\" to"),
        (vm1("limits = { rate = 1000000 }"), "5: port \"vm1\": key `limits.rate`: expected \"1Mb/s\" to"),
        (vm1("limits = { rate = \"99999999999999999999Gb/s\" }"), "5: port \"vm1\": key `limits.rate`: expected"),
        (vm1("limits = { frames = 0 }"), "5: port \"vm1\": key `limits.frames`: expected 1 to 1000000000 frames"),
        (vm1("limits = { burst = \"0ms\" }"), "5: port \"vm1\": key `limits.burst`: expected \"1ms\" to \"1000ms\""),
        (
            vm1("speed = \"9Mb/s\""),
            "5: port \"vm1\": key `speed`: expected \"10Mb/s\" to \"1000Gb/s\", found \"9Mb/s\"",
        ),
        (vm1("link_local = true"), "5: port \"vm1\": key `link_local`: expected \"drop\" or \"forward\", found true"),
        (vm1("limits = 5"), "5: port \"vm1\": key `limits`: expected a table, found 5"),
        (
            vm1("limits.storm = 0"),
            "5: port \"vm1\": key `limits.storm`: expected 1 to 1000000000 frames a second or \"unlimited\"",
        ),
        (vm1("full = \"block\""), "5: port \"vm1\": key `full`: expected \"wait\" or \"drop\", found \"block\""),
        (vm1("limits.wait = \"2s\""), "5: port \"vm1\": key `limits.wait`: expected \"100us\" to \"1000ms\", found"),
        (vm1("limits.wait = \"50us\""), "5: port \"vm1\": key `limits.wait`: expected \"100us\" to \"1000ms\", found"),
        (vm1("limits.addresses = 0"), "5: port \"vm1\": key `limits.addresses`: expected 1 to 262144, found 0"),
        (vm1("limits.address = 9"), "5: port \"vm1\": key `limits.address`: unknown key, did you mean `addresses`?"),
        (vm1("[switch]\nmove_after = \"-1s\""), "6: key `switch.move_after`: expected \"0s\" to \"1000000s\", found"),
        (rr0("addresses = \"learn\""), "5: port \"up\": key `addresses`: only valid for kind \"vhost-user\""),
        (vm1("features = [true]"), "5: port \"vm1\": key `features`: expected a table, found [true]"),
        (vm1("features = true"), "5: port \"vm1\": key `features`: expected a table, found true"),
        (vm1("features.packed = 1"), "5: port \"vm1\": key `features.packed`: expected true or false, found 1"),
        (
            vm1("features = {\n  packed = true,\n  in-order = true\n}"),
            "7: port \"vm1\": key `features.in-order`: unknown key, did you mean `in_order`?",
        ),
        (
            "[[port]]\nname = \"x\"\nkind = \"vhost-user\"".into(),
            "1: port \"x\": key `socket`: missing, expected the path of a Unix socket, 1 to 107 bytes",
        ),
        (socket(""), "8: port \"vm2\": key `socket`: expected the path of a Unix socket, 1 to 107 bytes, found \"\""),
        (socket("a\\u0000b"), "8: port \"vm2\": key `socket`: expected the path of a Unix socket, 1 to 107 bytes, f"),
        (socket(&"s".repeat(108)), "8: port \"vm2\": key `socket`: expected the path of a Unix socket, 1 to 107 "),
        (server("/run//1"), "8: port \"vm2\": key `socket`: duplicate socket \"/run//1\", already used in line 4"),
        // tap.
        (rr0("socket = \"x\""), "5: port \"up\": key `socket`: only valid for kind \"vhost-user\" and \"e1000\", but"),
        (rr0("role = \"server\""), "5: port \"up\": key `role`: only valid for kind \"vhost-user\""),
        (
            rr0("mtu = 1500\nmac = \"52:54:00:12:34:56\""),
            "6: port \"up\": key `mac`: only valid for kind \"vhost-user\"",
        ),
        (rr0("[port.features]"), "5: port \"up\": key `features`: only valid for kind \"vhost-user\""),
        (
            "[[port]]\nname = \"x\"\nkind = \"tap\"".into(),
            "1: port \"x\": key `interface`: missing, expected the name of an interface, 1 to 15 bytes without ",
        ),
        (tap(""), "4: port \"x\": key `interface`: expected the name of an interface"),
        (tap("sixteen-bytes.xx"), "4: port \"x\": key `interface`: expected the name of an interface"),
        (tap("a/b"), "4: port \"x\": key `interface`: expected the name of an interface"),
        (tap("a b"), "4: port \"x\": key `interface`: expected the name of an interface"),
        (tap("rr%d"), "4: port \"x\": key `interface`: expected the name of an interface"),
        (tap(".."), "4: port \"x\": key `interface`: expected the name of an interface"),
        (rr0(&tap("rr0")), "8: port \"x\": key `interface`: duplicate interface \"rr0\", already used in line 4"),
    ];
    for (text, expected) in &rows {
        let found = error(text);
        assert!(found.starts_with(&format!("rr.toml:{expected}")), "{text}\nexpected {expected}\nfound {found}");
        assert!(!found.contains('\n') && found.len() < 600, "not one short line: {found}");
    }
}

#[test]
fn complete_message() {
    assert_eq!(error(&vm1("queues = 128")), "rr.toml:5: port \"vm1\": key `queues`: expected 1 to 127, found 128");
}

#[test]
fn nothing_panics() {
    for end in 0..EXAMPLE.len() {
        let _ = Config::parse(&EXAMPLE[..end], "rr.toml");
        for other in ["", "\"", "=", "[", "\n", "\0", "é"] {
            let _ = Config::parse(&format!("{}{other}{}", &EXAMPLE[..end], &EXAMPLE[end + 1..]), "rr.toml");
        }
    }
}

#[test]
fn files_that_cannot_be_read() {
    let load = |path: &str| Config::load(Path::new(path)).unwrap_err().to_string();
    assert_eq!(load("/nonexistent/rr.toml"), "/nonexistent/rr.toml: No such file or directory (os error 2)");
    assert_eq!(load("/"), "/: Is a directory (os error 21)");
    let large = "/dev/zero: expected at most 1048576 bytes, found more";
    assert_eq!(load("/dev/zero"), large);
}

#[test]
fn files() {
    let path = std::env::temp_dir().join(format!("ringroad-config-{}.toml", std::process::id()));
    std::fs::write(&path, EXAMPLE).unwrap();
    let good = Config::load(&path);
    std::fs::write(&path, b"[workers]\n# caf\xe9\n").unwrap();
    let other = Config::load(&path);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(good.unwrap(), parse(EXAMPLE));
    let expected = format!("{}:2: expected UTF-8, found an invalid byte", path.display());
    assert_eq!(other.unwrap_err().to_string(), expected);
}
