//! Counters, blast, demo and help.

use crate::testing::*;
use ringroad_net::Features;
use serde_json::Value;
use std::{os::unix::net::UnixListener, path::Path, process::Stdio, sync::Arc, thread, time::Duration};

#[test]
fn counters() {
    let folder = Folder::new("usr1");
    let config = folder.config(&[("left", ""), ("right", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let (mut left, mut right) = (Guest::plain(&folder.file("left.sock")), Guest::plain(&folder.file("right.sock")));
    exchange(&mut left, &mut right);
    serve.signal("USR1");
    serve.prints("right  ");
    let out = serve.out();
    let columns = |line: usize| {
        let columns = out.lines().nth(line).unwrap().split("  ").map(str::trim).filter(|c| !["", "|"].contains(c));
        columns.take(9).collect::<Vec<_>>()
    };
    let groups: Vec<&str> = out.lines().next().unwrap().split('|').map(str::trim).collect();
    assert_eq!(groups, ["", "from port", "from port, dropped", "to port", "to port, dropped", "events"]);
    assert_eq!(columns(1), ["port", "frames", "bytes", "total", "storm", "spoofed", "vlan", "frames", "bytes"]);
    // Four frames of 61 to 64 bytes one way, four of 1514 the other.
    assert_eq!(columns(2), ["left", "4", "250", "0", "0", "0", "0", "4", "6 056"]);
    assert_eq!(columns(3), ["right", "4", "6 056", "0", "0", "0", "0", "4", "250"]);
    serve.stop("INT");

    // The reader of the counters may close the pipe.
    let mut command = ringroad();
    command.args(["serve", "-c", text(&config)]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let err = follow(child.stderr.take().unwrap());
    let mut serve = Program { child, out: Arc::default(), err };
    serve.logs("ready");
    serve.signal("USR1");
    let (mut left, mut right) = (Guest::plain(&folder.file("left.sock")), Guest::plain(&folder.file("right.sock")));
    exchange(&mut left, &mut right);
    serve.stop("TERM");
}

// ------------------------------------------------------------------------------------------------------------ blast

#[test]
fn blast_against_nothing() {
    let folder = Folder::new("nothing");
    let socket = folder.file("nobody.sock");
    let expected = format!("ringroad: cannot connect to {}: ", socket.display());
    let (code, out, err) = run(&["blast", text(&socket), "--seconds", "1"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with(&expected) && err.contains("is a vhost-user device listening there?"), "{err}");
    // A listener that closes the connection.
    let listener = UnixListener::bind(&socket).unwrap();
    let accept = thread::spawn(move || drop(listener.accept()));
    let (code, _, err) = run(&["blast", text(&socket), "--seconds", "1"]);
    assert_eq!(code, 1);
    assert!(err.contains("did not accept"), "{err}");
    accept.join().unwrap();
    for (arguments, log) in [
        (&["--ring", "split", "--queue-size", "3"][..], "--queue-size 3: a split ring needs a power of two"),
        (&["--queue-size", "32769"], "32769"),
        (&["--size", "59"], "expected sizes of 60 to"),
        (&["--rate", "fast"], "expected a number"),
        (&["--without", "packed"], "packed"),
    ] {
        let (code, _, err) = run(&[&["blast", text(&socket)], arguments].concat());
        assert!(code != 0 && err.contains(log), "{arguments:?}: {code}, {err}");
    }
}

/// Runs blast briefly; returns its result.
#[track_caller]
fn blast(socket: &Path, arguments: &[&str]) -> Value {
    let all = [&["blast", text(socket), "--verify", "--seconds", "0.15", "--json", "-"], arguments].concat();
    let (code, out, err) = run(&all);
    assert_eq!(code, 0, "{arguments:?}: {out}{err}");
    serde_json::from_str(&out[out.find("\n{").unwrap() + 1..]).unwrap_or_else(|error| panic!("{error} in {out}"))
}

/// The same, where all frames must be returned except those still in flight.
#[track_caller]
fn blast_all(socket: &Path, arguments: &[&str], window: u64) {
    let window_argument = window.to_string();
    let result = blast(socket, &[arguments, &["--window", &window_argument]].concat());
    let number = |key: &str| result[key].as_u64().unwrap();
    assert_eq!((number("errors"), number("foreign")), (0, 0), "{arguments:?}: {result}");
    assert!(number("received") > 0, "{arguments:?}: {result}");
    assert!(number("received") + window >= number("sent"), "{arguments:?}: frames were lost: {result}");
}

#[test]
fn blast_reads_what_it_is_told_to() {
    let folder = Folder::new("touch");
    let serve = Program::serve(&folder.config(&[("a", "mode = \"reflect\"")]), &[]);
    serve.logs("ready");
    let socket = folder.file("a.sock");
    for arguments in [&["--no-read"][..], &["--no-touch"], &["--no-read", "--driver", "plain"], &[]] {
        let all = [&["blast", text(&socket), "--seconds", "0.2", "--json", "-"], arguments].concat();
        let (code, out, err) = run(&all);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        let result: Value = serde_json::from_str(&out[out.find("\n{").unwrap() + 1..]).unwrap();
        assert!(result["received"].as_u64().unwrap() > 1024, "{arguments:?}: {result}");
        // A round trip is known from a frame that was read.
        assert_eq!(out.contains("round trip"), arguments.is_empty(), "{arguments:?}: {out}");
    }
    let (code, _, err) = run(&["blast", text(&socket), "--no-read", "--verify"]);
    assert!(code != 0 && err.contains("cannot be used with"), "{err}");
}

#[test]
fn blast_every_ring() {
    let folder = Folder::new("rings");
    let config = folder.config(&[("a", "mode = \"reflect\"\nmtu = 65535")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let socket = folder.file("a.sock");
    for size in ["1", "3", "200", "32768"] {
        blast_all(&socket, &["--ring", "packed", "--queue-size", size], if size == "1" { 1 } else { 3 });
    }
    for size in ["1", "2", "256", "32768"] {
        blast_all(&socket, &["--ring", "split", "--queue-size", size], if size == "1" { 1 } else { 2 });
    }
    for ring in ["split", "packed"] {
        for without in ["in_order", "mrg_rxbuf", "event_idx", "indirect", "in_order,mrg_rxbuf,event_idx,indirect"] {
            blast_all(&socket, &["--ring", ring, "--without", without], 100);
        }
        blast_all(&socket, &["--ring", ring, "--event-driven", "--size", "imix"], 64);
        blast_all(&socket, &["--ring", ring, "--size", "60,64,1518,4096,9018,65000"], 16);
        blast_all(&socket, &["--ring", ring, "--size", "9018,65000", "--without", "mrg_rxbuf"], 16);
        // Without a window: frames may be dropped, but none damaged or duplicated.
        let result = blast(&socket, &["--ring", ring, "--size", "imix", "--flows", "8"]);
        assert_eq!(result["errors"], 0, "{result}");
        assert!(result["received"].as_u64().unwrap() > 0, "{result}");
    }
    serve.stop("TERM");
}

#[test]
fn the_device_disconnects() {
    let folder = Folder::new("goes");
    let config = folder.config(&[("a", "mode = \"reflect\"")]);
    let mut serve = Program::serve(&config, &["-vv"]);
    serve.logs("ready");
    let mut command = ringroad();
    command.args(["blast", text(&folder.file("a.sock")), "--seconds", "30", "--rate", "1000", "--event-driven"]);
    let mut blast = Program::start(command);
    serve.logs("queue 1: started");
    serve.stop("TERM");
    let status = blast.ends(Duration::from_secs(5));
    assert_eq!(status.code(), Some(1), "{}", blast.out());
    assert!(blast.err().contains("the device at") && blast.err().contains("has disconnected"), "{}", blast.err());
}

#[test]
fn jumbo_frames() {
    let folder = Folder::new("jumbo");
    let config = folder.config(&[
        ("large", "mtu = 65535"),
        ("small", "mtu = 65535"),
        ("plain", "mtu = 65535\n[port.features]\nmrg_rxbuf = false"),
    ]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let socket = |name: &str| folder.file(&format!("{name}.sock"));
    for packed in [false, true] {
        let features = Features::layout(packed);
        let mut large = Guest::new(&socket("large"), features, 256, 65549);
        let mut small = Guest::new(&socket("small"), features, 256, 1518);
        let mut plain = Guest::new(&socket("plain"), features, 256, 1518);
        for (number, len) in (1..).zip([60, 1514, 1518, 1600, 9014, 65000, 65549]) {
            large.send(number, len);
            // As many buffers as needed: each holds 1600 bytes, and the first one has the header of 12 bytes.
            assert_eq!(small.receives(number, len), (len + 12).div_ceil(1600), "{len} bytes");
            if len <= 1600 - 12 {
                assert_eq!(plain.receives(number, len), 1);
            }
        }
        // Frames too large for a driver without mergeable buffers are dropped and counted; others still arrive.
        small.send(9, 64);
        plain.receives(9, 64);
        large.receives(9, 64);
    }
    serve.signal("USR1");
    serve.prints("plain");
    let out = serve.out();
    let plain = out.lines().find(|line| line.starts_with("plain")).unwrap();
    let oversize = plain.split("  ").map(str::trim).filter(|cell| !["", "|"].contains(cell)).nth(10).unwrap();
    assert_eq!(oversize, "8", "four sizes, twice: {out}");
    serve.stop("TERM");
}

#[test]
fn demo() {
    let (code, out, err) = run(&["demo", "--seconds", "1"]);
    assert_eq!(code, 0, "{out}{err}");
    for line in ["frames returned", "payload errors          0\n", "round trip p50 / p99"] {
        assert!(out.contains(line), "no {line:?} in {out}");
    }
}

// ------------------------------------------------------------------------------------------------------------ bench

/// Returns whether a process runs whose command line names this folder.
fn uses(folder: &Path) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let commands = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    commands.map(|command| String::from_utf8_lossy(&command).into_owned()).any(|command| command.contains(text(folder)))
}

#[test]
fn a_bench_ends_at_a_signal_and_its_programs_with_it() {
    for signal in ["TERM", "INT"] {
        let mut command = ringroad();
        command.args(["bench", "pvp", "--peer", "none", "--driver", "plain", "--pairs", "1000", "--seconds", "0.1"]);
        let mut bench = Program::start(command);
        let folder = std::env::temp_dir().join(format!("ringroad-pvp-{}", bench.child.id()));
        // A device, stopped or not.
        assert!(within(PATIENCE, || uses(&folder)), "{}", bench.err());
        bench.signal(signal);
        let status = bench.ends(PATIENCE);
        assert_eq!(status.code(), Some(1), "{}", bench.err());
        assert!(bench.err().contains("interrupted by a signal"), "{}", bench.err());
        assert!(!uses(&folder) && !folder.exists());
    }
}

#[test]
fn help() {
    let (code, _, err) = run(&[]);
    assert!(code == 2 && err.contains("Usage"), "{err}");
    for (arguments, examples) in [
        (&["--help"][..], &["Examples:", "ringroad demo", "ringroad serve -c", "ringroad blast", "ringroad bench"][..]),
        (&["serve", "--help"], &["Example", "[[port]]", "kind = \"vhost-user\"", "SIGUSR1"]),
        (&["demo", "--help"], &["Example", "ringroad demo --seconds"]),
        (&["blast", "--help"], &["Examples:", "ringroad blast /run/ringroad/vm1.sock"]),
        (&["vsock", "--help"], &["Examples:", "ringroad vsock cat"]),
        (&["vsock", "cat", "--help"], &["Example:", "ringroad vsock cat"]),
        (&["bench", "--help"], &["Example", "ringroad bench"]),
    ] {
        let (code, out, _) = run(arguments);
        assert_eq!(code, 0);
        examples.iter().for_each(|example| assert!(out.contains(example), "{arguments:?}: no {example:?} in {out}"));
    }
    let (code, out, _) = run(&["--version"]);
    assert_eq!((code, out), (0, format!("ringroad {}\n", env!("CARGO_PKG_VERSION"))));
}

// -------------------------------------------------------------------------------------------------------- footprint
