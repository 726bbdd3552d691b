//! Captures of frames in a file of the format pcapng (draft-ietf-opsawg-pcapng), which tcpdump and Wireshark read. The worker copies
//! frames to a queue of fixed size and never waits; a thread of its own writes them.

use parking_lot::Mutex;
use ringroad_frame::Burst;
use ringroad_switch::Direction;
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Size of the queue in bytes; there are two, of which one is being written.
const QUEUE: usize = 4 << 20;
/// How long frames are gathered before they are written.
const GATHER: Duration = Duration::from_millis(10);

/// What a capture holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureConfig {
    /// The file, which is overwritten.
    pub file: PathBuf,
    /// Bytes of each frame that are kept.
    pub snap: u32,
    /// Maximum size of the file, in bytes.
    pub size: u64,
}

impl Default for CaptureConfig {
    /// Whole frames, 1 GiB.
    fn default() -> CaptureConfig {
        CaptureConfig { file: PathBuf::new(), snap: 1 << 18, size: 1 << 30 }
    }
}

/// How often the worker tries the lock, which the writer holds for a few instructions.
const TRIES: usize = 100;
/// How long the writer waits if the worker has the lock.
const PAUSE: Duration = Duration::from_micros(200);

/// A file that frames are written to. Dropped, it is complete.
pub struct Capture {
    shared: Arc<Shared>,
    snap: usize,
    name: String,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Capture").field("name", &self.name).field("snap", &self.snap).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Blocks to be written.
    blocks: Vec<u8>,
    /// Bytes that the file may still grow by.
    left: u64,
    /// No more frames are taken: the file has its size, or cannot be written.
    full: bool,
    closed: bool,
}

impl Capture {
    /// Starts a capture of the port with this name.
    ///
    /// # Errors
    /// The file cannot be created or written, or is not a regular file; or there are no more threads.
    pub fn start(name: &str, config: &CaptureConfig) -> io::Result<Capture> {
        let mut file = open(&config.file)?;
        file.set_len(0)?;
        let mut start = Vec::new();
        section(&mut start, name, config.snap);
        file.write_all(&start)?;
        let left = config.size.saturating_sub(start.len() as u64);
        let queue = Queue { blocks: Vec::with_capacity(QUEUE), left, ..Queue::default() };
        let shared = Arc::new(Shared { queue: Mutex::new(queue) });
        let (writer, path) = (shared.clone(), config.file.clone());
        let thread = thread::Builder::new().name("capture".into()).spawn(move || writer.write(file, &path))?;
        let snap = usize::try_from(config.snap).unwrap_or(usize::MAX);
        Ok(Capture { shared, snap, name: name.to_owned(), thread: Some(thread) })
    }

    /// Adds frames of a burst; returns how many were not added: the queue was full or in use, or the file has its size. Never blocks.
    pub(crate) fn add(&self, direction: Direction, burst: &Burst, which: &[u8]) -> usize {
        let tries = (0..TRIES).find_map(|_| {
            let queue = self.shared.queue.try_lock();
            queue.is_none().then(std::hint::spin_loop);
            queue
        });
        let Some(mut queue) = tries else { return which.len() };
        let was_empty = queue.blocks.is_empty();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut missed = 0;
        for index in which.iter().map(|&index| usize::from(index)) {
            let len = burst.frames().get(index).map_or(0, |frame| frame.len());
            let kept = len.min(self.snap);
            let block = packet_len(kept);
            if queue.full || queue.blocks.len() + block > QUEUE {
                missed += 1;
                continue;
            }
            if queue.left < block as u64 {
                queue.full = true;
                log::warn!("port {}: the capture file has its `size`; further frames are not in it", self.name);
                missed += 1;
                continue;
            }
            queue.left -= block as u64;
            packet(&mut queue.blocks, time, direction, (kept, len), |place| _ = burst.copy(index, 0, place));
        }
        let wake = was_empty && !queue.blocks.is_empty();
        drop(queue);
        if wake && let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        missed
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Writes what is in the queue until it is closed.
    fn write(&self, mut file: File, path: &Path) {
        let mut blocks = Vec::with_capacity(QUEUE);
        loop {
            // Not `lock`: it would be handed over to this thread while it sleeps, and the worker would not get it.
            let Some(mut queue) = self.queue.try_lock() else {
                thread::sleep(PAUSE);
                continue;
            };
            if queue.blocks.is_empty() && !queue.closed {
                drop(queue);
                thread::park();
                continue;
            }
            let closed = queue.closed;
            std::mem::swap(&mut queue.blocks, &mut blocks);
            drop(queue);
            if let Err(error) = file.write_all(&blocks) {
                log::error!("cannot write the capture file {}: {error}; it ends here", path.display());
                self.queue.lock().full = true;
                return;
            }
            if closed {
                return;
            }
            blocks.clear();
            thread::sleep(GATHER);
        }
    }
}

/// Opens the file, whose frames are nobody else's business. A pipe would block.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file =
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("expected a regular file"));
    }
    Ok(file)
}

/// Makes a capture file if it does not exist: a confined process cannot create it.
///
/// # Errors
/// It cannot be created or written, or is not a regular file.
pub fn make_capture(path: &Path) -> io::Result<()> {
    open(path).map(drop)
}

/// Adds a number.
fn number<const N: usize>(out: &mut Vec<u8>, bytes: [u8; N]) {
    out.extend_from_slice(&bytes);
}

/// Adds an option, padded to 32 bits (3.5 of the draft).
fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    number(out, code.to_le_bytes());
    number(out, (value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Adds a block (3.1 of the draft), whose length is known when it is complete.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    number(out, kind.to_le_bytes());
    number(out, [0; 4]);
    body(out);
    let len = ((out.len() + 4 - at) as u32).to_le_bytes();
    number(out, len);
    out.get_mut(at + 4..at + 8).into_iter().for_each(|place| place.copy_from_slice(&len));
}

/// Adds the start of the file: a section (4.1) with one interface (4.2), whose clock counts nanoseconds.
fn section(out: &mut Vec<u8>, name: &str, snap: u32) {
    block(out, 0x0a0d_0d0a, |out| {
        number(out, 0x1a2b_3c4du32.to_le_bytes());
        number(out, [1, 0, 0, 0]);
        number(out, u64::MAX.to_le_bytes());
    });
    block(out, 1, |out| {
        // LINKTYPE_ETHERNET.
        number(out, [1, 0, 0, 0]);
        number(out, snap.to_le_bytes());
        option(out, 2, name.as_bytes());
        option(out, 9, &[9]);
        option(out, 0, &[]);
    });
}

/// Length of an Enhanced Packet Block with so many bytes of a frame: head, frame, option of flags, end of options, length.
const fn packet_len(kept: usize) -> usize {
    28 + kept.next_multiple_of(4) + 8 + 4 + 4
}

/// Adds a frame (Enhanced Packet Block, 4.3), of which some bytes are kept.
fn packet(
    out: &mut Vec<u8>,
    time: Duration,
    direction: Direction,
    (kept, len): (usize, usize),
    copy: impl FnOnce(&mut [u8]),
) {
    let time = time.as_nanos() as u64;
    block(out, 6, |out| {
        number(out, [0; 4]);
        number(out, ((time >> 32) as u32).to_le_bytes());
        number(out, (time as u32).to_le_bytes());
        number(out, (kept as u32).to_le_bytes());
        number(out, (len as u32).to_le_bytes());
        let at = out.len();
        out.resize(at + kept, 0);
        copy(out.get_mut(at..).unwrap_or_default());
        pad(out);
        // Inbound or outbound, as the port sees it.
        let flags = if direction == Direction::From { 1u32 } else { 2 };
        option(out, 2, &flags.to_le_bytes());
        option(out, 0, &[]);
    });
}

#[cfg(test)]
mod tests;
