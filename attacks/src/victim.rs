//! Those that do nothing wrong: two ports that exchange 10 000 frames a second, and a vsock guest that echoes. Each says what
//! rate and what latency it had over a time.

use crate::{
    daemon::Daemon,
    frontend::wait,
    net::{NetPort, RX, frame},
    vsock::{self, Header, VsockGuest, op},
};
use std::{
    io::{self, Read, Write},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Frames in each tick.
const FRAMES: u64 = 10;
/// How often frames are sent.
const TICK: Duration = Duration::from_millis(1);
/// How often the echo is asked.
const ASK: Duration = Duration::from_millis(2);
/// The port that the echo listens at.
const PORT: u32 = 7;

/// What a victim had over a time.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Frames or round trips a second.
    pub rate: f64,
    /// The latency that half of them had at most.
    pub p50: Duration,
    /// The one that 99 of 100 had at most.
    pub p99: Duration,
    /// The longest.
    pub max: Duration,
    /// Frames that came twice, or after a later one.
    pub disorder: u64,
}

impl Figures {
    /// The worse of two, in each figure.
    pub fn worse(&self, other: &Figures) -> Figures {
        Figures {
            rate: self.rate.min(other.rate),
            p50: self.p50.max(other.p50),
            p99: self.p99.max(other.p99),
            max: self.max.max(other.max),
            disorder: self.disorder + other.disorder,
        }
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Figures { rate, p50, p99, max, .. } = self;
        write!(f, "{rate:.0}/s, p50 {p50:.1?}, p99 {p99:.1?}, max {max:.1?}")
    }
}

#[derive(Debug)]
struct Record {
    start: Instant,
    latencies: Vec<Duration>,
    disorder: u64,
}

/// A record that a victim writes, and whoever judges it reads.
#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    record: Mutex<Record>,
}

impl Shared {
    fn new() -> Arc<Shared> {
        let record = Record { start: Instant::now(), latencies: Vec::new(), disorder: 0 };
        Arc::new(Shared { stop: AtomicBool::new(false), record: Mutex::new(record) })
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A victim at work. Dropped, it ends.
#[derive(Debug)]
pub struct Victim {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Victim {
    /// What it had since it was asked last, or began.
    pub fn figures(&self) -> Figures {
        let (mut latencies, seconds, disorder) = {
            let mut record = self.shared.lock();
            let seconds = record.start.elapsed().as_secs_f64();
            record.start = Instant::now();
            let latencies = std::mem::take(&mut record.latencies);
            (latencies, seconds, std::mem::take(&mut record.disorder))
        };
        latencies.sort_unstable();
        let at = |share: f64| {
            let index = ((latencies.len() as f64 * share) as usize).min(latencies.len().saturating_sub(1));
            latencies.get(index).copied().unwrap_or(Duration::MAX)
        };
        Figures { rate: latencies.len() as f64 / seconds, p50: at(0.5), p99: at(0.99), max: at(1.0), disorder }
    }

    /// Two ports of a daemon: the first sends to the second.
    pub fn net(daemon: &Daemon, from: &str, to: &str, packed: bool) -> io::Result<Victim> {
        let sender = NetPort::connect(&daemon.socket(from), packed)?;
        let mut receiver = NetPort::connect(&daemon.socket(to), packed)?;
        // So that its address is known before the first frame.
        receiver.put(&frame(sender.mac, receiver.mac, b"hello"));
        receiver.flush();
        let shared = Shared::new();
        let pair = Pair { sender, receiver, shared: shared.clone(), start: Instant::now(), next: 0, expected: 0 };
        let thread = thread::Builder::new().name("victim".into()).spawn(move || pair.run())?;
        Ok(Victim { shared, threads: vec![thread] })
    }

    /// A vsock guest of a daemon that echoes what a program of the host says: 64 bytes, 500 times a second.
    pub fn echo(daemon: &Daemon, name: &str, packed: bool) -> io::Result<Victim> {
        let mut guest = VsockGuest::connect(&daemon.socket(name), packed, 128, 4096)?;
        guest.give(128);
        let shared = Shared::new();
        let mut threads = Vec::new();
        let told = shared.clone();
        threads.push(thread::Builder::new().name("echo-guest".into()).spawn(move || {
            let mut service = Echo::default();
            while !told.stopped() {
                wait(&guest.device.calls[vsock::RX], Duration::from_millis(20));
                service.serve(&mut guest);
            }
        })?);
        let mut victim = Victim { shared: shared.clone(), threads };
        let mut stream = daemon.connect(name, PORT, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        victim.threads.push(thread::Builder::new().name("echo-host".into()).spawn(move || {
            let (mut due, mut bytes) = (Instant::now(), [0; 64]);
            while !shared.stopped() {
                let start = Instant::now();
                if stream.write_all(&bytes).and_then(|()| stream.read_exact(&mut bytes)).is_err() {
                    break;
                }
                shared.lock().latencies.push(start.elapsed());
                due = (due + ASK).max(Instant::now() - 50 * ASK);
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        })?);
        victim.figures();
        Ok(victim)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Two ports in one thread.
struct Pair {
    sender: NetPort,
    receiver: NetPort,
    shared: Arc<Shared>,
    start: Instant,
    next: u64,
    expected: u64,
}

impl Pair {
    fn run(mut self) {
        let mut due = Instant::now();
        while !self.shared.stopped() {
            self.sender.reclaim();
            for _ in 0..FRAMES {
                let mut payload = [0; 24];
                payload[..8].copy_from_slice(b"ringroad");
                payload[8..16].copy_from_slice(&self.next.to_le_bytes());
                payload[16..].copy_from_slice(&(self.start.elapsed().as_nanos() as u64).to_le_bytes());
                let frame = frame(self.receiver.mac, self.sender.mac, &payload);
                // A full queue: the device does not take what was sent, which is what a victim suffers.
                if self.sender.put(&frame) {
                    self.next += 1;
                }
            }
            self.sender.flush();
            // After a pause of the machine it catches up, but not for ever.
            due = (due + TICK).max(Instant::now() - 100 * TICK);
            loop {
                self.receive();
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                wait(&self.receiver.device.calls[RX], left);
            }
        }
    }

    fn receive(&mut self) {
        let Pair { receiver, shared, start, expected, .. } = self;
        let now = start.elapsed();
        let mut latencies = Vec::new();
        let mut disorder = 0;
        receiver.receive(38, |bytes, _| {
            if bytes.len() < 38 || &bytes[14..22] != b"ringroad" {
                return;
            }
            let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
            let (sequence, sent) = (number(22), number(30));
            if sequence < *expected {
                disorder += 1;
            } else {
                *expected = sequence + 1;
                latencies.push(now.saturating_sub(Duration::from_nanos(sent)));
            }
        });
        if !latencies.is_empty() || disorder > 0 {
            let mut record = shared.lock();
            record.latencies.append(&mut latencies);
            record.disorder += disorder;
        }
    }
}

/// A guest's service that sends everything back.
#[derive(Debug, Default)]
pub struct Echo {
    received: u32,
}

impl Echo {
    /// Answers all packets that have come.
    pub fn serve(&mut self, guest: &mut VsockGuest) {
        let mut answers = Vec::new();
        let received = &mut self.received;
        let count = guest.received(|header, payload| match header.op {
            op::REQUEST => {
                *received = 0;
                answers.push((header.answer(op::RESPONSE), Vec::new()));
            }
            op::RW => {
                *received = received.wrapping_add(header.len);
                let answer = Header { fwd_cnt: *received, ..header.answer(op::RW) };
                answers.push((answer, payload.to_vec()));
            }
            op::CREDIT_REQUEST => {
                answers.push((Header { fwd_cnt: *received, ..header.answer(op::CREDIT_UPDATE) }, Vec::new()));
            }
            op::SHUTDOWN => answers.push((header.answer(op::RST), Vec::new())),
            _ => {}
        });
        if count > 0 {
            guest.give(count);
        }
        for (header, payload) in answers {
            guest.send(header, &payload);
        }
    }
}

/// Whether two ports that connect now can exchange frames: `count` of them within a time. An error says what went wrong.
pub fn exchange(daemon: &Daemon, from: &str, to: &str, count: u64, patience: Duration) -> Result<(), String> {
    let end = Instant::now() + patience;
    let connect = |name: &str| {
        NetPort::connect(&daemon.socket(name), name.len().is_multiple_of(2))
            .map_err(|error| format!("a new frontend of {name} cannot connect: {error}"))
    };
    let (mut sender, mut receiver) = (connect(from)?, connect(to)?);
    receiver.put(&frame(sender.mac, receiver.mac, b"hello"));
    receiver.flush();
    let (mut sent, mut seen) = (0, 0);
    while seen < count {
        if Instant::now() > end {
            return Err(format!("new frontends of {from} and {to}: {seen} of {count} frames in {patience:?}"));
        }
        sender.reclaim();
        // A few more than needed: one may be dropped while the receiver begins.
        for _ in 0..4 {
            if sent < 4 * count && sender.put(&frame(receiver.mac, sender.mac, b"exchange")) {
                sent += 1;
            }
        }
        sender.flush();
        wait(&receiver.device.calls[RX], Duration::from_millis(5));
        receiver.receive(22, |bytes, _| seen += u64::from(bytes.len() >= 22 && &bytes[14..22] == b"exchange"));
    }
    Ok(())
}
