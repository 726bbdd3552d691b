//! What `serve` says of configurations that are wrong, or that this machine cannot serve.

use crate::testing::*;
use std::{fs, path::Path};

#[test]
fn check() {
    let folder = Folder::new("check");
    let config = folder.config(&[("a", ""), ("b", "mode = \"drop\"")]);
    let (code, out, err) = run(&["serve", "--check", "-c", text(&config)]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(out, format!("{}: configuration OK: 2 ports\n", config.display()));
    assert!(!folder.file("a.sock").exists(), "--check must not create anything");
}

#[test]
fn configuration_errors() {
    let folder = Folder::new("errors");
    let port = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket = \"/tmp/never-made.sock\"\n";
    let cases = [
        (format!("{port}qeues = 2\n"), 5, "port \"a\": key `qeues`: unknown key, did you mean `queues`?"),
        (format!("{port}queues = 128\n"), 5, "port \"a\": key `queues`: expected 1 to 127, found 128"),
        (format!("{port}poll = \"5s\"\n"), 5, "key `poll`: expected"),
        (format!("\n\n{port}[port.features]\npackt = true\n"), 8, "key `features.packt`: unknown key, did you mean"),
        (format!("[workers]\ncpus = [0, 1]\n{port}"), 2, "key `workers.cpus`: expected a list of at most one CPU"),
        (format!("{port}{port}"), 6, "key `name`: duplicate name \"a\", already used in line 2"),
        (
            port.replace("vhost-user", "af-xdp"),
            3,
            "key `kind`: expected \"vhost-user\", \"e1000\" or \"tap\", found \"af-xdp\"",
        ),
        ("[[port]]\nname = \"a\"\n".into(), 1, "key `kind`: missing, expected \"vhost-user\", \"e1000\" or \"tap\""),
        (format!("{port}interface = \"rr0\"\n"), 5, "key `interface`: only valid for kind \"tap\""),
        (
            port.replace("/tmp/", &"x".repeat(100)),
            4,
            "key `socket`: expected the path of a Unix socket, 1 to 107 bytes",
        ),
        ("[[port]\n".into(), 1, "not valid TOML"),
        (String::new(), 1, "key `port`: missing, expected at least one port"),
    ];
    for (text_of_file, line, message) in cases {
        let config = folder.write(&text_of_file);
        for arguments in [&["serve", "-c", text(&config)][..], &["serve", "--check", "-c", text(&config)]] {
            let (code, out, err) = run(arguments);
            assert_eq!((code, out.as_str()), (1, ""), "{err}");
            let start = format!("ringroad: {}:{line}: ", config.display());
            assert!(err.starts_with(&start) && err.contains(message), "expected {start}{message}, found {err}");
            assert_eq!(err.lines().count(), 1, "{err}");
        }
    }
    let missing = folder.file("missing.toml");
    let (code, _, err) = run(&["serve", "-c", text(&missing)]);
    assert_eq!(code, 1);
    assert_eq!(err, format!("ringroad: {}: No such file or directory (os error 2)\n", missing.display()));
    let (code, _, err) = run(&["serve"]);
    assert_eq!(code, 2);
    assert!(err.contains("--config <FILE>"), "{err}");
}

#[test]
fn sockets_that_cannot_be_made() {
    let folder = Folder::new("sockets");
    let config = folder.config(&[("a", "")]);
    let mut first = Program::serve(&config, &[]);
    first.logs("ready: 1 port\n");
    let (code, _, err) = run(&["serve", "-c", text(&config)]);
    assert_eq!(code, 1);
    let expected = format!("port a: socket {} is in use by a running program", folder.file("a.sock").display());
    assert!(err.contains(&expected), "{err}");
    // The first one is not affected and keeps its socket.
    let _ = Guest::plain(&folder.file("a.sock"));
    // A killed daemon leaves its socket behind; the next one takes it over.
    first.signal("KILL");
    first.ends(PATIENCE);
    assert!(folder.file("a.sock").exists());
    let mut second = Program::serve(&config, &[]);
    second.logs("port a: removing the stale socket");
    second.logs("ready: 1 port\n");
    drop(Guest::plain(&folder.file("a.sock")));
    second.stop("TERM");

    let socket = "[[port]]\nname = \"a\"\nkind = \"vhost-user\"\nsocket =";
    let here = folder.0.display();
    for (path, log) in [
        (format!("{here}/missing/a.sock"), "does not exist; create it"),
        (format!("{here}/ringroad.toml"), "exists and is not a socket"),
        (format!("{here}"), "exists and is not a socket"),
        // procfs takes no files from anybody, root included.
        ("/proc/a.sock".into(), "cannot create socket /proc/a.sock"),
    ] {
        let config = folder.write(&format!("{socket} {path:?}\n"));
        let (code, _, err) = run(&["serve", "-c", text(&config)]);
        assert_eq!(code, 1, "{err}");
        let place = Path::new(&path).parent().unwrap().to_str().unwrap();
        assert!(err.starts_with("ringroad: ") && err.contains(log) && err.contains(place), "{err}");
    }
    // A CPU that does not exist.
    let config = folder.write(&format!("[workers]\ncpus = [1023]\n{socket} \"{here}/b.sock\"\n"));
    let (code, _, err) = run(&["serve", "-c", text(&config)]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("ringroad.toml:2: key `workers.cpus`: expected an online CPU ("), "{err}");
}

#[test]
fn check_against_this_machine() {
    let folder = Folder::new("has");
    let here = folder.0.display();
    fs::write(folder.file("file"), "").unwrap();
    let port = |name: &str, rest: &str| format!("[[port]]\nname = {name:?}\nkind = \"vhost-user\"\n{rest}\n");
    let text_of_file = [
        "[workers]\ncpus = [1023]\n".into(),
        port("a", &format!("socket = \"{here}/missing/a.sock\"")),
        port("b", &format!("socket = \"{here}/file\"")),
        port("c", &format!("socket = \"{here}/file/c.sock\"")),
        port("d", &format!("socket = \"{here}/d.sock\"")),
        port("e", &format!("socket = \"{here}/../{}/d.sock\"", folder.0.file_name().unwrap().display())),
        "[[port]]\nname = \"lo\"\nkind = \"tap\"\ninterface = \"lo\"\n".into(),
        format!("[[vsock]]\ncid = 3\nsocket = \"{here}/v.sock\"\nhost = \"{here}/absent/host\"\n"),
    ]
    .concat();
    let config = folder.write(&text_of_file);
    let line = |number: usize, rest: String| format!("ringroad: {}:{number}: {rest}", config.display());
    let expected = [
        line(2, "key `workers.cpus`: expected an online CPU (0".into()),
        line(6, format!("port \"a\": key `socket`: directory {here}/missing does not exist; create it: install -d -m 0750 -o $USER {here}/missing")),
        line(10, format!("port \"b\": key `socket`: {here}/file exists and is not a socket; remove it or choose another path")),
        line(14, format!("port \"c\": key `socket`: expected a directory, but {here}/file is not one; choose another path")),
        line(22, format!("port \"e\": key `socket`: duplicate socket: {here}/../")),
        line(26, "port \"lo\": key `interface`: expected a TAP interface, but lo exists and is of another kind; choose another name".into()),
        line(30, format!("vsock 1: key `host`: directory {here}/absent does not exist; create it")),
    ];
    for arguments in [&["serve", "--check", "-c", text(&config)][..], &["serve", "-c", text(&config)]] {
        let (code, out, err) = run(arguments);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        assert_eq!(err.lines().count(), expected.len(), "{err}");
        for (line, expected) in err.lines().zip(&expected) {
            assert!(line.starts_with(expected), "expected {expected}, found {line}");
        }
    }
    // Duplicate addresses.
    let port = |name: &str, rest: &str| port(name, &format!("socket = \"{here}/{name}.sock\"\n{rest}"));
    let mac = "mac = \"52:54:00:00:00:01\"";
    let config = folder.write(&(port("a", mac) + &port("b", mac)));
    let (code, _, err) = run(&["serve", "--check", "-c", text(&config)]);
    assert!(code == 1 && err.contains(":10: port \"b\": key `mac`: duplicate mac \"52:54:00:00:00:01\""), "{err}");
    // The configuration of a running daemon passes.
    let config = folder.config(&[("a", "")]);
    let serve = Program::serve(&config, &[]);
    serve.logs("ready");
    assert_eq!(run(&["serve", "--check", "-c", text(&config)]).0, 0);
}

#[test]
fn previews_of_a_reload() {
    let folder = Folder::new("cost");
    let before = folder.file("before.toml");
    fs::rename(folder.config(&[("a", ""), ("b", ""), ("c", "")]), &before).unwrap();
    let after = folder.config(&[("a", "poll = \"1ms\""), ("b", "queues = 2\nhairpin = true"), ("d", "")]);
    let expected = "port c: removed\nport a: key `port.poll`: in place\nport b: key `port.queues`: reconnects the guest\n\
        port b: key `port.hairpin`: in place\nport d: added\n";
    let (code, out, err) = run(&["serve", "--check", "-c", text(&after), "--against", text(&before)]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, format!("{expected}{}: configuration OK: 3 ports\n", after.display()));
    let (_, out, _) = run(&["serve", "--check", "-c", text(&after), "--against", text(&after)]);
    assert!(out.starts_with("no changes\n"), "{out}");

    // SIGUSR2: the daemon reports the same and changes nothing.
    let config = folder.config(&[("a", ""), ("b", ""), ("c", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let guests = ["b", "c"].map(|name| Guest::plain(&folder.file(&format!("{name}.sock"))));
    folder.config(&[("a", "poll = \"1ms\""), ("b", "queues = 2\nhairpin = true"), ("d", "")]);
    serve.signal("USR2");
    serve.logs("reload preview: 5 changes, 2 of them disruptive\n");
    for line in expected.lines() {
        assert!(serve.err().contains(&format!("reload preview: {line}\n")), "{line}: {}", serve.err());
    }
    assert!(guests.iter().all(|guest| !guest.0.is_closed()) && !folder.file("d.sock").exists());
    serve.signal("HUP");
    serve.logs("configuration reloaded: 3 ports (+d, -c)\n");
    for line in expected.lines() {
        assert!(serve.err().contains(&format!("reload: {line}\n")), "{line}: {}", serve.err());
    }
    assert!(within(PATIENCE, || guests.iter().all(|guest| guest.0.is_closed())));
    serve.stop("TERM");
}

// ---------------------------------------------------------------------------------------------------------- signals
