//! Common parts of the tests: a frontend that sends exactly the given messages, well-behaved guests, a switch with ports for
//! them, and the log by port.

mod frontend;
mod guest;
mod lines;
pub mod request;
mod rig;

use ringroad_mem::Region;
use ringroad_net::bits;
use std::{
    fs,
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::{
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
    sock_ctrl_msg::ScmSocket,
};
#[allow(unused_imports, reason = "each test program uses some of the parts")]
pub use {frontend::*, guest::*, lines::*, rig::*};

/// How long to wait for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Feature bits of a driver with split rings.
pub const SPLIT: u64 = bits::VERSION_1 | bits::PROTOCOL_FEATURES;
/// The same with packed rings.
pub const PACKED: u64 = SPLIT | bits::RING_PACKED;

/// Waits until a condition holds. Returns `false` if it does not hold within `patience`.
pub fn within(patience: Duration, mut is: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !is() {
        if start.elapsed() > patience {
            return false;
        }
        thread::sleep(Duration::from_micros(200));
    }
    true
}

pub fn eventfd() -> EventFd {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap()
}

/// A directory that is removed on drop.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ringroad-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Duplicates a descriptor into a file, by sending it over a socket: std has no safe conversion from raw descriptors.
pub fn file_of(fd: &impl AsRawFd) -> fs::File {
    let (from, to) = UnixStream::pair().unwrap();
    from.send_with_fd(&[0u8][..], fd.as_raw_fd()).unwrap();
    to.recv_with_fd(&mut [0]).unwrap().1.unwrap()
}

/// Clears O_NONBLOCK, as a frontend can on a descriptor that it has sent.
pub fn set_blocking(fd: &impl AsRawFd) {
    // An ioctl that works on any file.
    UnixStream::from(OwnedFd::from(file_of(fd))).set_nonblocking(false).unwrap();
}

/// Checks that the daemon's ports stop in time, whatever their frontends do.
#[track_caller]
pub fn ends_soon<T: Send + 'static>(rig: T) {
    let (ended, result) = mpsc::channel();
    thread::spawn(move || {
        drop(rig);
        let _ = ended.send(());
    });
    assert!(result.recv_timeout(PATIENCE).is_ok(), "a frontend blocks the ports from stopping");
}

/// Creates a memfd of `len` bytes.
pub fn memory(len: usize) -> fs::File {
    Region::create(len, 0, false).unwrap().1
}

/// Returns how many mappings and descriptors of a file, given by device and inode, this process has.
pub fn held((device, inode): (u64, u64)) -> (usize, usize) {
    // Inode numbers alone are not enough: notes of ring positions are files of another tmpfs, which counts from 1 as well.
    let file = format!("{:02x}:{:02x} {inode}", libc::major(device), libc::minor(device));
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let at = |line: &str| line.split_whitespace().skip(3).take(2).collect::<Vec<_>>().join(" ");
    let maps = maps.lines().filter(|line| at(line) == file).count();
    let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is = |meta: fs::Metadata| (meta.dev(), meta.ino()) == (device, inode);
    (maps, fds.filter_map(|fd| fs::metadata(fd.path()).ok()).filter(|meta| is(meta.clone())).count())
}

pub fn identity(file: &fs::File) -> (u64, u64) {
    let meta = file.metadata().unwrap();
    (meta.dev(), meta.ino())
}

/// A TCP socket with unsent data and SO_LINGER: its last close takes ten seconds.
pub fn lingering() -> (socket2::Socket, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = socket2::Socket::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    socket.set_nonblocking(true).unwrap();
    while socket.send(&[7; 16 << 10]).is_ok() {}
    socket.set_linger(Some(Duration::from_secs(10))).unwrap();
    (socket, listener)
}
