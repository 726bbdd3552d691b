//! Nobody reads the output, sockets block, reloads fail.

use crate::testing::*;
use std::{
    fs,
    io::{self, Write},
    os::unix::net::{UnixListener, UnixStream},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Returns a full pipe.
fn full_pipe() -> (io::PipeReader, io::PipeWriter) {
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(&vec![b'.'; 65536]).unwrap();
    (reader, writer)
}

/// Sends SIGTERM; returns how long the exit took.
#[track_caller]
fn time_to_end(child: &mut Child) -> (Duration, ExitStatus) {
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let start = Instant::now();
    let mut status = None;
    within(PATIENCE, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    (
        start.elapsed(),
        status.unwrap_or_else(|| {
            let _ = child.kill();
            panic!("it did not exit")
        }),
    )
}

/// So that the port's own limits do not bound the log.
const UNLIMITED: &str = "limits = { connects = 1000000, lines = 1000000, messages = 1000000 }";

#[test]
fn output_that_nobody_reads() {
    let folder = Folder::new("unread");
    let config = folder.config(&[("a", UNLIMITED), ("b", "")]);
    let (socket_a, socket_b) = (folder.file("a.sock"), folder.file("b.sock"));
    let (err, err_writer) = full_pipe();
    let (out, out_writer) = full_pipe();
    let mut command = ringroad();
    command.args(["serve", "-vv", "-c", text(&config)]).stdin(Stdio::null()).stdout(out_writer).stderr(err_writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    assert!(within(PATIENCE, || socket_a.exists() && socket_b.exists()));
    let (mut a, mut b) = (Guest::plain(&socket_a), Guest::plain(&socket_b));
    exchange(&mut a, &mut b);
    // More lines than fit into a pipe, and counters that nobody reads.
    for _ in 0..2000 {
        let _ = UnixStream::connect(&socket_a);
    }
    for _ in 0..20 {
        assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
    }
    exchange(&mut a, &mut b);
    folder.config(&[("a", &format!("poll = \"1ms\"\n{UNLIMITED}")), ("b", ""), ("new", "")]);
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
    assert!(within(PATIENCE, || folder.file("new.sock").exists()));
    exchange(&mut a, &mut b);
    let (time, status) = time_to_end(&mut child);
    assert!(status.success() && time < Duration::from_secs(1), "{status}, {time:?}");
    assert!(!socket_a.exists());
    drop((err, out));
}

#[test]
fn the_log_is_bounded() {
    let folder = Folder::new("bounded");
    let config = folder.config(&[("a", UNLIMITED), ("b", "")]);
    fs::write(&config, format!("[log]\nlines = 5\n{}", fs::read_to_string(&config).unwrap())).unwrap();
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let _a = Guest::plain(&folder.file("a.sock"));
    let start = Instant::now();
    let mut connects = 0;
    while start.elapsed() < Duration::from_secs(2) {
        connects += usize::from(UnixStream::connect(folder.file("a.sock")).is_ok());
    }
    assert!(connects > 100, "{connects}");
    serve.logs("log lines suppressed: above the limit per second (key `log.lines`)");
    let lines = serve.err().lines().filter(|line| line.contains("port a")).count();
    // A burst of five, five a second, for two or three seconds.
    assert!(lines < 5 + 5 * 8, "{lines} lines for {connects} connects");
    // Messages caused by the operator are exempt.
    serve.signal("HUP");
    serve.logs("configuration reloaded");
    serve.stop("TERM");
}

/// A port is not stopped by a reload if it could not be started again.
#[test]
fn a_reload_that_would_fail_disconnects_no_guest() {
    let folder = Folder::new("cannot");
    let config = folder.config(&[("a", ""), ("b", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let guest = |name: &str| Guest::plain(&folder.file(&format!("{name}.sock")));
    let (mut a, mut b) = (guest("a"), guest("b"));
    let text_of_file = fs::read_to_string(&config).unwrap();
    folder.write(&text_of_file.replace("a.sock", "missing/a.sock"));
    serve.signal("HUP");
    serve.logs("missing does not exist; create it");
    serve.logs("port a is left unchanged");
    serve.logs("configuration reloaded: 2 ports\n");
    exchange(&mut a, &mut b);
    assert!(!a.0.is_closed() && !b.0.is_closed());
    // Two ports can swap their sockets: both are stopped before either is started.
    let swapped = text_of_file.replace("a.sock", "x.sock").replace("b.sock", "a.sock").replace("x.sock", "b.sock");
    folder.write(&swapped);
    serve.signal("HUP");
    assert!(within(PATIENCE, || a.0.is_closed() && b.0.is_closed()));
    assert!(
        within(PATIENCE, || serve.err().matches("configuration reloaded: 2 ports\n").count() == 2),
        "{}",
        serve.err()
    );
    exchange(&mut guest("a"), &mut guest("b"));
    serve.stop("TERM");
}

#[test]
fn exits_while_starting() {
    let folder = Folder::new("starts");
    ringroad_host::raise_file_limit();
    // A foreign socket with a full backlog: checking whether it is in use blocks.
    let socket = folder.file("a.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let waiting = Arc::<Mutex<Vec<UnixStream>>>::default();
    {
        let (waiting, socket) = (waiting.clone(), socket.clone());
        thread::spawn(move || {
            while let Ok(stream) = UnixStream::connect(&socket) {
                waiting.lock().unwrap().push(stream);
            }
        });
    }
    let mut count = 0;
    assert!(within(PATIENCE, || {
        thread::sleep(Duration::from_millis(100));
        let now = waiting.lock().unwrap().len();
        std::mem::replace(&mut count, now) == now
    }));
    let mut serve = Program::serve(&folder.config(&[("a", "")]), &[]);
    thread::sleep(Duration::from_millis(300));
    let (time, _) = time_to_end(&mut serve.child);
    assert!(time < Duration::from_secs(1), "{time:?} with {count} waiting: {}", serve.err());
    assert!(socket.exists(), "another program's socket");
}

#[test]
fn exits_while_control_is_blocked() {
    let folder = Folder::new("hangs");
    let config = folder.config(&[("a", "")]);
    let socket = folder.file("a.sock");
    let fifo = |name: &str| {
        let path = folder.file(name);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    };
    // At exit it blocks writing the counters to a FIFO without a reader.
    let counters = fifo("counters.json");
    let mut serve = Program::serve(&config, &["--json", text(&counters)]);
    serve.logs("ready");
    let (time, status) = time_to_end(&mut serve.child);
    assert!(time < Duration::from_secs(1), "{time:?}");
    assert_eq!(status.code(), Some(1), "the shutdown was incomplete");
    serve.logs("shutdown timed out after 600 ms while writing the counters; exiting anyway");
    assert!(!socket.exists());
    // In a reload it blocks reading the configuration from a FIFO without a writer.
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let guest = Guest::plain(&socket);
    fs::remove_file(&config).unwrap();
    fifo("ringroad.toml");
    serve.signal("HUP");
    thread::sleep(Duration::from_millis(100));
    assert!(!guest.0.is_closed());
    let (time, _) = time_to_end(&mut serve.child);
    assert!(time < Duration::from_secs(1), "{time:?}");
    serve.logs("exiting anyway");
    assert!(!socket.exists());
}
