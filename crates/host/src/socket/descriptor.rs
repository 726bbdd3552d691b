//! Validates the descriptors that a frontend sends. Each is checked once, here, before any other use, and becomes a type that
//! determines its use: a [`Kick`] is waited for, a [`CallFd`] written to, a [`MemoryFile`] mapped. Called by the sessions.
//!
//! A descriptor may be a file on a FUSE mount of the frontend: then `fstat`, `fstatfs`, `poll`, a page fault and even `close`
//! block for as long as the frontend likes. So it is identified by its link in /proc (`d_path`, which uses names in kernel
//! memory; on file systems that a user can mount they begin with a slash, which "anon_inode:" does not), by `getsockopt`,
//! which fails on anything but a socket, and by F_GET_SEALS, which only files in memory support. Refused descriptors are
//! closed by a separate thread ([`Disposal`]).

use crate::sys::{self, PeerFile};
use ringroad_mem::Region;
use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Why a descriptor is refused, and the file, which goes to a [`Disposal`].
pub(crate) struct Refused {
    pub file: File,
    expected: &'static str,
    found: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "is {}, expected {}", self.found, self.expected)
    }
}

/// Returns the target of the link in /proc: `anon_inode:[eventfd]`, `socket:[17]`, `/memfd:ram (deleted)`, `/mnt/x`.
fn name(file: &File) -> String {
    match fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        // The frontend controls its length and bytes.
        Ok(link) => link.to_string_lossy().chars().flat_map(char::escape_debug).take(80).collect(),
        Err(error) => format!("unknown ({error}; is /proc mounted?)"),
    }
}

fn is_eventfd(name: &str) -> bool {
    name == "anon_inode:[eventfd]"
}

/// A descriptor on which a frontend kicks: an eventfd.
#[derive(Clone, Debug)]
pub struct Kick(Arc<File>);

impl Kick {
    /// Checks a file from the frontend.
    pub(crate) fn new(file: File) -> Result<Kick, Refused> {
        let found = name(&file);
        if !is_eventfd(&found) {
            return Err(Refused { file, expected: "an eventfd", found });
        }
        Ok(Kick(Arc::new(file)))
    }

    /// Clears pending kicks without blocking.
    pub(crate) fn clear(&self) {
        sys::guard::drain(self.0.as_fd());
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Kick {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A descriptor for notifying a frontend: an eventfd or a Unix stream socket (User-Mode Linux sends one, as it would a pipe).
/// Nothing else: a write to a pipe may block, and other sockets have locks that a peer can hold (TCP, while it copies from a
/// page that the peer does not provide).
pub(crate) struct CallFd {
    file: PeerFile,
    socket: bool,
}

impl CallFd {
    /// Checks a file from the frontend.
    pub(crate) fn new(file: File) -> Result<CallFd, Refused> {
        let socket = sys::is_unix_stream(file.as_fd());
        let found = name(&file);
        if !socket && !is_eventfd(&found) {
            return Err(Refused { file, expected: "an eventfd or a Unix stream socket", found });
        }
        // Not relied upon, as the frontend can clear it again. It spares an honest frontend whose descriptor is full from
        // blocking.
        match sys::set_nonblocking(file.as_fd()) {
            Ok(()) => Ok(CallFd { file: PeerFile::new(file), socket }),
            Err(error) => Err(Refused { file, expected: "one that accepts O_NONBLOCK", found: error.to_string() }),
        }
    }

    pub(crate) fn is_socket(&self) -> bool {
        self.socket
    }

    /// Adds one. Fails with `WouldBlock` if it is full, with `Interrupted` if the frontend made the write block.
    #[inline]
    pub(crate) fn add_one(&self) -> io::Result<()> {
        if self.socket { sys::guard::send_one(self.file.as_fd()) } else { sys::guard::add_one(self.file.as_fd()) }
    }
}

impl AsFd for CallFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A descriptor for requests to a frontend: a Unix stream socket.
pub(crate) struct ChannelFd(PeerFile);

impl ChannelFd {
    /// Checks a file from the frontend.
    pub(crate) fn new(file: File) -> Result<ChannelFd, Refused> {
        if !sys::is_unix_stream(file.as_fd()) {
            let found = name(&file);
            return Err(Refused { file, expected: "a Unix stream socket", found });
        }
        Ok(ChannelFd(PeerFile::new(file)))
    }

    /// Sends BACKEND_CONFIG_CHANGE_MSG without asking for a reply, unless what was sent before has not been read.
    pub(crate) fn config_changed(&self) {
        const CONFIG_CHANGE: u32 = 2;
        const VERSION: u32 = 1;
        if !sys::is_unread(self.0.as_fd()).unwrap_or(true) {
            let message = [CONFIG_CHANGE, VERSION, 0].map(u32::to_ne_bytes);
            // Its end may be closed.
            let _ = sys::guard::send(self.0.as_fd(), message.as_flattened());
        }
    }
}

/// Guest memory that is not mapped yet: a file in memory, so that page faults are served by the kernel alone.
pub(crate) struct MemoryFile(File);

impl MemoryFile {
    /// Checks a file from the frontend.
    pub(crate) fn new(file: File) -> Result<MemoryFile, Refused> {
        if !sys::has_seals(file.as_fd()) {
            let found = name(&file);
            return Err(Refused { file, expected: "a memfd, or a file on tmpfs or hugetlbfs", found });
        }
        Ok(MemoryFile(file))
    }

    /// Maps a part of it, see [`Region::map`].
    pub(crate) fn map(&self, offset: u64, len: u64, guest: u64, user: u64) -> Result<Arc<Region>, ringroad_mem::Error> {
        Region::map(&self.0, offset, len, guest, user)
    }

    /// Maps a part of it for reading, see [`Region::map_read_only`].
    pub(crate) fn map_read_only(
        &self,
        offset: u64,
        len: u64,
        guest: u64,
        user: u64,
    ) -> Result<Arc<Region>, ringroad_mem::Error> {
        Region::map_read_only(&self.0, offset, len, guest, user)
    }
}

/// Closes refused descriptors. Closing a FUSE file may block until the frontend answers, so a separate thread does it: the
/// port's thread must be able to stop.
#[derive(Clone, Default)]
pub(crate) struct Disposal(Arc<AtomicUsize>);

impl Disposal {
    pub(crate) fn close(&self, files: impl IntoIterator<Item = File>) {
        let files: Vec<File> = files.into_iter().collect();
        if files.is_empty() {
            return;
        }
        let pending = self.0.clone();
        pending.fetch_add(1, Ordering::Relaxed);
        let close = move || {
            drop(files);
            pending.fetch_sub(1, Ordering::Release);
        };
        if thread::Builder::new().name("close".into()).stack_size(64 << 10).spawn(close).is_err() {
            // No thread: the files were closed here, when the closure was dropped.
            self.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns whether descriptors are still being closed. Until they are, the frontend's messages wait, so that at most one
    /// message's descriptors are pending.
    pub(crate) fn is_busy(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::OpenOptions,
        net::{TcpListener, UdpSocket},
        os::{
            fd::OwnedFd,
            unix::net::{UnixDatagram, UnixStream},
        },
    };
    use vmm_sys_util::{epoll::Epoll, eventfd::EventFd, tempfile::TempFile, timerfd::TimerFd};

    fn file(fd: &impl AsRawFd) -> File {
        sys::duplicate(fd).unwrap()
    }

    #[test]
    fn each_kind_of_file_is_recognised() {
        let (pipe, _other) = std::io::pipe().unwrap();
        let (stream, _peer) = UnixStream::pair().unwrap();
        let (datagram, _peer) = UnixDatagram::pair().unwrap();
        let memory = Region::create(4096, 0, false).unwrap().1;
        let shm = std::path::Path::new("/dev/shm").join(format!("ringroad-test-{}", std::process::id()));
        let tmpfs = OpenOptions::new().read(true).write(true).create_new(true).open(&shm).unwrap();
        fs::remove_file(&shm).unwrap();
        let proc = File::open("/proc/self/status").unwrap();
        // Named so that its link begins like that of a memfd.
        let named = TempFile::new_with_prefix("/tmp/memfd:").unwrap();
        let cases: [(&str, File, [bool; 3]); 12] = [
            ("eventfd", file(&EventFd::new(0).unwrap()), [true, true, false]),
            ("stream", OwnedFd::from(stream).into(), [false, true, false]),
            ("datagram", OwnedFd::from(datagram).into(), [false; 3]),
            ("tcp", OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap()).into(), [false; 3]),
            ("udp", OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap()).into(), [false; 3]),
            ("pipe", OwnedFd::from(pipe).into(), [false; 3]),
            ("epoll", file(&Epoll::new().unwrap()), [false; 3]),
            ("timerfd", file(&TimerFd::new().unwrap()), [false; 3]),
            ("memfd", memory, [false, false, true]),
            ("tmpfs", tmpfs, [false, false, true]),
            ("procfs", proc, [false; 3]),
            ("/tmp/memfd:", file(named.as_file()), [false, false, sys::has_seals(named.as_file().as_fd())]),
        ];
        for (what, file, expected) in cases {
            let copy = || file.try_clone().unwrap();
            let found = [Kick::new(copy()).is_ok(), CallFd::new(copy()).is_ok(), MemoryFile::new(copy()).is_ok()];
            assert_eq!(found, expected, "{what} as kick, call, memory");
        }
        let refused = Kick::new(File::open("/proc/self/status").unwrap()).err().unwrap().to_string();
        assert!(refused.starts_with("is /proc/"), "{refused}");
        assert!(refused.ends_with("/status, expected an eventfd"), "{refused}");
    }
}
