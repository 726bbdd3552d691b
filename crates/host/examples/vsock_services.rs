//! The host end of a guest's vsock in a single program, without the daemon and without host sockets. `VsockWorker` and
//! `VsockServer` are the device; services are threads with sockets on its stack (see `main`).
//!
//!     vsock_services CID SOCKET [echo=PORT] [sink=PORT] [source=PORT:BYTES] [packets=PORT]
//!
//! SOCKET is the vhost-user socket, which this program creates. The services are those of `vsock listen`
//! (tests/guest/vsock.c): echo returns what it receives; source sends BYTES; sink expects exactly those, from one connection
//! at a time; packets expects the known messages (SOCK_SEQPACKET) with their boundaries and records. Commands on standard
//! input:
//!
//!     packets PORT COUNT        sends COUNT messages to a port of the guest, prints "ok …" or "FAILED …"
//!
//! It ends at the end of its standard input; the guest's connections are then reset.

use ringroad_host::vsock::{HostSide, VsockConfig, VsockServer, VsockWorker};
use ringroad_vsock::{Addr, Listener, SeqPacket, SocketType, Stack, Stream};
use std::{
    error::Error,
    io::{self, Read, Write},
    net::Shutdown,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cid, socket, services @ ..] = &arguments[..] else {
        return Err("expected CID SOCKET [echo=PORT] [sink=PORT] [source=PORT:BYTES] [packets=PORT]".into());
    };
    let cid = cid.parse()?;
    let config = VsockConfig::new(cid, socket.into());
    let worker = VsockWorker::start(None, Duration::ZERO, 0)?;
    let server = VsockServer::start(config, &worker)?;
    for service in services {
        start(server.stack(), service)?;
    }
    println!("serving {socket}");
    for line in io::stdin().lines() {
        match command(server.stack(), cid, &line?) {
            Ok(said) => println!("ok {said}"),
            Err(error) => println!("FAILED {error}"),
        }
    }
    Ok(())
}

/// Listens on a port and serves each connection in a thread.
fn start(stack: &Arc<Stack<HostSide>>, service: &str) -> Result<(), Box<dyn Error>> {
    let wrong = || format!("expected echo=PORT, sink=PORT, source=PORT:BYTES or packets=PORT, found {service}");
    let (name, port) = service.split_once('=').ok_or_else(wrong)?;
    let (port, total) = port.split_once(':').unwrap_or((port, "0"));
    let (port, total) = (port.parse()?, total.parse()?);
    let bytes: fn(&Stream<HostSide>, u64) -> io::Result<()> = match name {
        "echo" => |stream, _| echo(stream),
        "sink" => |stream, _| sink(stream),
        "source" => source,
        "packets" => {
            let listener = Listener::bind(stack, port, SocketType::SeqPacket)?;
            return spawn(move || listener.accept_messages(), |socket| take_packets(&socket));
        }
        _ => return Err(wrong().into()),
    };
    let listener = Listener::bind(stack, port, SocketType::Stream)?;
    spawn(move || listener.accept(), move |stream| bytes(&stream, total))
}

fn spawn<T: Send + 'static>(
    accept: impl Fn() -> io::Result<T> + Send + 'static,
    serve: impl Fn(T) -> io::Result<()> + Clone + Send + 'static,
) -> Result<(), Box<dyn Error>> {
    thread::Builder::new().spawn(move || {
        while let Ok(socket) = accept() {
            let serve = serve.clone();
            thread::spawn(move || serve(socket).unwrap_or_else(|error| eprintln!("a connection: {error}")));
        }
    })?;
    Ok(())
}

fn command(stack: &Arc<Stack<HostSide>>, cid: u64, line: &str) -> Result<String, Box<dyn Error>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["packets", port, count] => send_packets(stack, Addr { cid, port: port.parse()? }, count.parse()?),
        _ => Err(format!("expected packets PORT COUNT, found {line:?}").into()),
    }
}

// --- streams ------------------------------------------------------------------------------------------------------------

fn echo(mut stream: &Stream<HostSide>) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            count => stream.write_all(&buffer[..count])?,
        }
    }
    stream.shutdown(Shutdown::Write);
    Ok(())
}

/// Expects the stream of seed 1 up to its end, and replies "COUNT ok" or with the first error.
fn sink(mut stream: &Stream<HostSide>) -> io::Result<()> {
    let (mut known, mut total) = (Known::new(1), 0);
    let (mut got, mut expected) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    let answer = loop {
        let count = stream.read(&mut got)?;
        if count == 0 {
            break format!("{total} ok\n");
        }
        known.fill(&mut expected[..count]);
        if let Some(at) = got[..count].iter().zip(&expected).position(|(got, expected)| got != expected) {
            break format!("byte {} is wrong\n", total + at);
        }
        total += count;
    };
    stream.write_all(answer.as_bytes())?;
    stream.shutdown(Shutdown::Write);
    Ok(())
}

/// Sends the stream of seed 1; the receiver replies with its length.
fn source(mut stream: &Stream<HostSide>, total: u64) -> io::Result<()> {
    let (mut known, mut left) = (Known::new(1), total);
    let mut buffer = vec![0; 64 << 10];
    while left > 0 {
        let chunk = &mut buffer[..(64 << 10).min(left) as usize];
        known.fill(chunk);
        stream.write_all(chunk)?;
        left -= chunk.len() as u64;
    }
    stream.shutdown(Shutdown::Write);
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if !answer.starts_with(&format!("{total} ")) {
        return Err(io::Error::other(format!("expected \"{total} …\", got {answer:?}")));
    }
    Ok(())
}

// --- messages -----------------------------------------------------------------------------------------------------------

/// Expects the known messages and then "end COUNT"; replies "COUNT ok" or with the first error.
fn take_packets(socket: &SeqPacket<HostSide>) -> io::Result<()> {
    let (mut buffer, mut expected) = (vec![0; LONGEST], vec![0; LONGEST]);
    let (mut count, mut fault) = (0, None);
    loop {
        let (len, record) = message(count, &mut expected);
        // Some buffers are too short: the message must be truncated, and the next one complete.
        let room = if count % 32 == 5 && len >= 32 { len - 1 } else { LONGEST };
        let Some((got, got_record)) = socket.receive(&mut buffer[..room])? else {
            return Err(io::Error::other(format!("the stream ended after {count} messages, before \"end COUNT\"")));
        };
        let there = &buffer[..got.min(room)];
        if let Some(sent) = end(there) {
            let missing = (sent != count).then(|| format!("{count} of {sent} messages arrived"));
            let answer = fault.or(missing).unwrap_or_else(|| format!("{count} ok"));
            return socket.send(answer.as_bytes(), false);
        }
        if fault.is_some() {
        } else if (got, got_record) != (len, record) {
            fault = Some(format!(
                "message {count}: expected {len} bytes, record end {record}; got {got} bytes, {got_record}"
            ));
        } else if *there != expected[..len.min(room)] {
            fault = Some(format!("message {count} of {len} bytes: content differs from what was sent"));
        }
        count += 1;
    }
}

fn end(message: &[u8]) -> Option<u64> {
    std::str::from_utf8(message).ok()?.strip_prefix("end ")?.parse().ok()
}

fn send_packets(stack: &Arc<Stack<HostSide>>, to: Addr, count: u64) -> Result<String, Box<dyn Error>> {
    let socket = SeqPacket::connect(stack, to)?;
    let start = Instant::now();
    let (mut buffer, mut bytes) = (vec![0; LONGEST], 0);
    for number in 0..count {
        let (len, record) = message(number, &mut buffer);
        socket.send(&buffer[..len], record).map_err(|error| format!("message {number}: {error}"))?;
        bytes += len;
    }
    socket.send(format!("end {count}").as_bytes(), false)?;
    let got = socket.receive(&mut buffer)?.ok_or("the stream ended, expected a reply")?;
    let answer = String::from_utf8_lossy(&buffer[..got.0.min(LONGEST)]);
    if answer != format!("{count} ok") {
        return Err(answer.into());
    }
    let seconds = start.elapsed().as_secs_f64();
    let rate = count as f64 / seconds;
    Ok(format!("packets {count} messages {bytes} bytes {seconds:.3} seconds {rate:.0} messages/s"))
}

// --- test data, which the guest's end generates in the same way (tests/guest/stream.h) ------------------------------------

/// Maximum bytes of a message.
const LONGEST: usize = 131_072;

/// Writes the content of message `number` to the buffer. Returns its length and whether it ends a record.
fn message(number: u64, buffer: &mut [u8]) -> (usize, bool) {
    let mut content = Known::new(number + 1);
    let first = content.word();
    let len = match number {
        _ if number % 128 == 127 => LONGEST,
        _ if number % 64 == 63 => 65536,
        _ => 1 + (first % if number.is_multiple_of(8) { 16 } else { 4096 }) as usize,
    };
    content.fill(&mut buffer[..len]);
    (len, number % 16 == 15)
}

/// The stream of a seed: xorshift64*, as bytes.
struct Known {
    state: u64,
    word: [u8; 8],
    left: usize,
}

impl Known {
    fn new(seed: u64) -> Known {
        Known { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), word: [0; 8], left: 0 }
    }

    fn word(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn fill(&mut self, mut target: &mut [u8]) {
        while !target.is_empty() {
            if self.left == 0 {
                (self.word, self.left) = (self.word().to_le_bytes(), 8);
            }
            let count = self.left.min(target.len());
            let from = 8 - self.left;
            let (now, later) = target.split_at_mut(count);
            now.copy_from_slice(&self.word[from..from + count]);
            self.left -= count;
            target = later;
        }
    }
}
