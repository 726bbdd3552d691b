//! Tests of the `ringroad` binary with vsock devices: the guests are our driver, the host programs are this test.

mod idle;
mod testing;

use ringroad_host::vsock::VsockClient;
use ringroad_vsock::{Addr, Listener, SocketType, Stream};
use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    thread,
    time::{Duration, Instant},
};
use testing::*;

/// Starts the daemon with two guests, 3 and 4, in one group; guest 3 has a host socket.
fn serve(folder: &Folder, more: &str) -> Program {
    let path = |name: &str| folder.file(name).display().to_string();
    let config = folder.write(&format!(
        "[[vsock]]\ncid = 3\nsocket = \"{}\"\nhost = \"{}\"\ngroups = [\"g\"]\n{more}\n[[vsock]]\ncid = 4\nsocket = \"{}\"\ngroups = [\"g\"]\n",
        path("vm3.sock"),
        path("host"),
        path("vm4.sock"),
    ));
    let serve = Program::serve(&config, &[]);
    serve.logs("ready");
    serve
}

/// Connects to a port of the guest, as a host program.
fn connect(host: &Path, port: u32) -> UnixStream {
    let mut stream = UnixStream::connect(host).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    writeln!(stream, "CONNECT {port}").unwrap();
    let mut line = String::new();
    BufReader::with_capacity(1, &stream).read_line(&mut line).unwrap();
    assert!(line.starts_with("OK ") && line.ends_with('\n'), "{line:?}");
    stream
}

/// Runs an echo server on a port.
fn echo(client: &VsockClient, port: u32) {
    let listener = Listener::bind(client.stack(), port, SocketType::Stream).unwrap();
    thread::spawn(move || {
        while let Ok(stream) = listener.accept() {
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn(move || {
                    let mut stream = stream;
                    let mut buffer = [0; 4096];
                    while let Ok(count @ 1..) = stream.read(&mut buffer) {
                        if stream.write_all(&buffer[..count]).is_err() {
                            break;
                        }
                    }
                })
                .unwrap();
        }
    });
}

#[test]
fn a_thousand_idle_connections_cost_nothing() {
    let folder = Folder::new("idle");
    ringroad_host::raise_file_limit();
    let daemon = serve(&folder, "");
    let client = vsock_guest(&folder.file("vm3.sock"));
    echo(&client, 7);
    let mut streams: Vec<UnixStream> = (0..1000).map(|_| connect(&folder.file("host"), 7)).collect();
    assert_eq!(client.stack().report().connections, 1000);
    let ask = |streams: &mut Vec<UnixStream>| {
        for (index, stream) in streams.iter_mut().enumerate() {
            let question = (index as u64).to_le_bytes();
            stream.write_all(&question).unwrap();
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer, question);
        }
    };
    ask(&mut streams);
    thread::sleep(idle::SETTLE);
    assert_eq!(idle::is_idle(daemon.child.id()), Ok(()));
    ask(&mut streams);
    drop(streams);
    let start = Instant::now();
    while client.stack().report().connections > 0 {
        assert!(start.elapsed() < PATIENCE, "{} are left", client.stack().report().connections);
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_daemon_that_ends_resets_its_connections() {
    for signal in ["TERM", "KILL"] {
        let folder = Folder::new(&format!("end-{signal}"));
        let mut daemon = serve(&folder, "");
        let client = vsock_guest(&folder.file("vm3.sock"));
        echo(&client, 7);
        let listener = UnixListener::bind(folder.file("host_9")).unwrap();
        let mut there = connect(&folder.file("host"), 7);
        let mut here = Stream::connect(client.stack(), Addr { cid: 2, port: 9 }).unwrap();
        let _program = listener.accept().unwrap();
        there.write_all(b"ping").unwrap();
        there.read_exact(&mut [0; 4]).unwrap();
        let reader = thread::spawn(move || here.read(&mut [0; 1]));
        thread::sleep(Duration::from_millis(50));
        daemon.signal(signal);
        daemon.ends(PATIENCE);
        // A host program sees the end of its socket, the guest a reset.
        assert!(matches!(there.read(&mut [0; 1]), Ok(0) | Err(_)));
        let start = Instant::now();
        let error = reader.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(2), "{signal}: after {:?}", start.elapsed());
        assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset, "{signal}");
        let refused = Stream::connect(client.stack(), Addr { cid: 2, port: 9 }).map(|_| ()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotConnected, "{signal}: {refused}");
    }
}

#[test]
fn a_killed_daemon_leaves_no_blocked_writer_and_can_be_restarted() {
    let folder = Folder::new("again");
    let mut daemon = serve(&folder, "");
    let client = vsock_guest(&folder.file("vm3.sock"));
    let listener = UnixListener::bind(folder.file("host_9")).unwrap();
    let mut stream = Stream::connect(client.stack(), Addr { cid: 2, port: 9 }).unwrap();
    let _program = listener.accept().unwrap();
    // The program does not read.
    let writer = thread::spawn(move || stream.write_all(&vec![0; 64 << 20]));
    thread::sleep(Duration::from_millis(200));
    assert!(!writer.is_finished());
    daemon.signal("KILL");
    daemon.ends(PATIENCE);
    let start = Instant::now();
    assert_eq!(writer.join().unwrap().unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(start.elapsed() < Duration::from_secs(2), "after {:?}", start.elapsed());
    drop(client);

    // The sockets of the killed daemon still exist.
    assert!(folder.file("vm3.sock").exists() && folder.file("host").exists());
    let _daemon = serve(&folder, "");
    let client = vsock_guest(&folder.file("vm3.sock"));
    echo(&client, 7);
    let mut program = connect(&folder.file("host"), 7);
    program.write_all(b"ping").unwrap();
    program.read_exact(&mut [0; 4]).unwrap();
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario, each step of which starts from what those before it left")]
fn a_reload_resets_only_affected_connections() {
    let folder = Folder::new("reload");
    let mut daemon = serve(&folder, "");
    let clients = [vsock_guest(&folder.file("vm3.sock")), vsock_guest(&folder.file("vm4.sock"))];
    clients.iter().for_each(|client| echo(client, 7));
    let listener = UnixListener::bind(folder.file("host_9")).unwrap();
    let mut kept = Stream::connect(clients[0].stack(), Addr { cid: 2, port: 9 }).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    let mut between = Stream::connect(clients[0].stack(), Addr { cid: 4, port: 7 }).unwrap();
    let mut check = |between: Option<&mut Stream<_>>| {
        if let Some(between) = between {
            between.write_all(b"ping").unwrap();
            between.read_exact(&mut [0; 4]).unwrap();
        }
        kept.write_all(b"ping").unwrap();
        program.read_exact(&mut [0; 4]).unwrap();
        program.write_all(b"pong").unwrap();
        kept.read_exact(&mut [0; 4]).unwrap();
    };
    check(Some(&mut between));

    let config = folder.file("ringroad.toml");
    let text = fs::read_to_string(&config).unwrap();
    let path = |name: &str| folder.file(name).display().to_string();
    let reload = |text: &str| {
        fs::write(&config, text).unwrap();
        daemon.reload();
    };
    // The last section is that of guest 4.
    let host = format!("host = \"{}\"", path("host4"));
    let mut keys = text.clone();
    for key in [
        &host,
        "forward = { 80 = \"127.0.0.1:9\" }",
        "send = \"queued\"",
        "buffer = 8192",
        "connections = 5",
        "poll = \"50us\"",
    ] {
        keys = format!("{keys}{key}\n");
        reload(&keys);
        check(Some(&mut between));
    }
    reload(&format!("[workers]\npoll = \"20us\"\n{keys}"));
    check(Some(&mut between));
    // The host socket exists, and moves.
    connect(&folder.file("host4"), 7).write_all(b"ping").unwrap();
    reload(&keys.replace("host4", "there4"));
    assert!(!folder.file("host4").exists());
    connect(&folder.file("there4"), 7).write_all(b"ping").unwrap();
    check(Some(&mut between));

    // Guests 3 and 4 no longer share a group: their connection is reset, and no other.
    reload(&format!("{}groups = [\"h\"]\n", keys.replace("groups = [\"g\"]\nhost = ", "host = ")));
    let error = between.read(&mut [0; 1]).expect_err("they have no group in common");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    check(None);
    assert!(clients[1].stack().is_running());
    reload(&keys);
    let mut between = Stream::connect(clients[0].stack(), Addr { cid: 4, port: 7 }).unwrap();
    check(Some(&mut between));

    // A change of features reconnects guest 4; guest 5 is new.
    let five = path("vm5.sock");
    reload(&format!("{keys}features = {{ packed = false }}\n[[vsock]]\ncid = 5\nsocket = \"{five}\"\n"));
    let error = between.read(&mut [0; 1]).expect_err("the peer is disconnected");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    check(None);
    let start = Instant::now();
    while clients[1].stack().is_running() {
        assert!(start.elapsed() < PATIENCE, "guest 4 is disconnected");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(vsock_guest(&folder.file("vm5.sock")).stack().cid(), 5);
    let client = vsock_guest(&folder.file("vm4.sock"));
    echo(&client, 7);
    connect(&folder.file("host4"), 7).write_all(b"ping").unwrap();
    daemon.stop("TERM");
}

/// Starts `ringroad vsock cat`; returns it with its standard input and output.
fn cat(socket: &Path, arguments: &[&str]) -> (Child, ChildStdin, BufReader<ChildStdout>) {
    let mut command = ringroad();
    command.args(["vsock", "cat"]).arg(socket).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    (child, stdin, stdout)
}

#[test]
fn cat_connects_to_host_programs_and_other_guests() {
    let folder = Folder::new("cat");
    let _daemon = serve(&folder, "");
    // To a listening host program.
    let listener = UnixListener::bind(folder.file("host_1024")).unwrap();
    let (mut child, mut stdin, mut stdout) = cat(&folder.file("vm3.sock"), &["2:1024"]);
    let (mut program, _) = listener.accept().unwrap();
    stdin.write_all(b"hello\n").unwrap();
    let mut line = String::new();
    BufReader::new(&program).read_line(&mut line).unwrap();
    assert_eq!(line, "hello\n");
    program.write_all(b"good day\n").unwrap();
    line.clear();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "good day\n");
    // End of input shuts down the stream to the program; when the program closes it, cat exits.
    drop(stdin);
    assert_eq!(program.read(&mut [0; 1]).unwrap(), 0);
    program.write_all(b"the end\n").unwrap();
    drop(program);
    line.clear();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "the end\n");
    assert!(child.wait().unwrap().success());

    // From guest to guest, messages.
    let (mut accepting, accepting_in, mut accepting_out) =
        cat(&folder.file("vm4.sock"), &["--accept", "5", "--seqpacket"]);
    let start = Instant::now();
    let (mut connecting, mut connecting_in, _out) = loop {
        let mut cat = cat(&folder.file("vm3.sock"), &["4:5", "--seqpacket"]);
        thread::sleep(Duration::from_millis(200));
        match cat.0.try_wait().unwrap() {
            // The other end is not listening yet.
            Some(_) if start.elapsed() < PATIENCE => continue,
            Some(status) => panic!("it exited: {status}"),
            None => break cat,
        }
    };
    connecting_in.write_all(b"one\ntwo\n").unwrap();
    for expected in ["one\n", "two\n"] {
        line.clear();
        accepting_out.read_line(&mut line).unwrap();
        assert_eq!(line, expected);
    }
    drop((connecting_in, accepting_in));
    assert!(connecting.wait().unwrap().success() && accepting.wait().unwrap().success());

    // Without a listener.
    let output = ringroad().args(["vsock", "cat"]).arg(folder.file("vm3.sock")).arg("2:77").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("cannot connect to 2:77: connection refused"), "{said}");
}
