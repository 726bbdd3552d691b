//! What a frontend's descriptors are. Each is looked at once, here, before anything else is done with it, and becomes a
//! type that says what may be done: a [`Kick`] is waited for, a [`CallFd`] written to, a [`MemoryFile`] mapped.
//!
//! A descriptor can be a file of the frontend's own file system (FUSE): `fstat`, `fstatfs`, `poll`, a page fault and even `close`
//! then take as long as the frontend likes. So it is asked by its link in /proc (`d_path`: names in the kernel's memory; those
//! of the file systems that a user can mount begin with a slash, "anon_inode:" does not), by `getsockopt`, which refuses
//! all but sockets, and by F_GET_SEALS, which only files in memory have. What is refused is closed by a thread of its own
//! ([`Disposal`]).

use crate::sys;
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

/// Why a descriptor is of no use. The file comes with it, for a [`Disposal`].
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

/// The link's name: "anon_inode:[eventfd]", "socket:[17]", "/memfd:ram (deleted)", "/mnt/x".
fn name(file: &File) -> String {
    match fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        // A frontend can make it as long as it likes, and of any bytes.
        Ok(link) => link.to_string_lossy().chars().flat_map(char::escape_debug).take(80).collect(),
        Err(error) => format!("unknown ({error}; is /proc mounted?)"),
    }
}

fn is_eventfd(name: &str) -> bool {
    name == "anon_inode:[eventfd]"
}

/// By which a frontend says that there is something: an eventfd.
#[derive(Clone)]
pub(crate) struct Kick(Arc<File>);

impl Kick {
    /// What the frontend has sent as one.
    pub(crate) fn new(file: File) -> Result<Kick, Refused> {
        let found = name(&file);
        if !is_eventfd(&found) {
            return Err(Refused { file, expected: "an eventfd", found });
        }
        Ok(Kick(Arc::new(file)))
    }

    /// Takes what has come, without waiting.
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

/// By which we notify a frontend: an eventfd, or a stream socket of this host (User-Mode Linux calls it a pipe). No other:
/// a write to a pipe may wait, and other sockets have locks that a peer can hold (TCP, while it copies from a page that it
/// does not deliver).
pub(crate) struct CallFd {
    file: File,
    socket: bool,
}

impl CallFd {
    /// What the frontend has sent as one.
    pub(crate) fn new(file: File) -> Result<CallFd, Refused> {
        let socket = sys::socket_kind(file.as_fd()) == Some((libc::AF_UNIX, libc::SOCK_STREAM));
        let found = name(&file);
        if !socket && !is_eventfd(&found) {
            return Err(Refused { file, expected: "an eventfd or a stream socket of this host", found });
        }
        // It is not relied on: the frontend can change that. It makes a full one that behaves cost nothing.
        match sys::set_nonblocking(file.as_fd()) {
            Ok(()) => Ok(CallFd { file, socket }),
            Err(error) => Err(Refused { file, expected: "one that need not wait", found: error.to_string() }),
        }
    }

    pub(crate) fn is_socket(&self) -> bool {
        self.socket
    }

    pub(crate) fn try_clone(&self) -> io::Result<CallFd> {
        Ok(CallFd { file: self.file.try_clone()?, socket: self.socket })
    }

    /// Adds one. `WouldBlock`: full. `Interrupted`: the frontend had it wait.
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

/// Guest memory, not mapped yet: a file that is in memory itself, so that a page fault is a matter of the kernel only.
pub(crate) struct MemoryFile(File);

impl MemoryFile {
    /// What the frontend has sent as one.
    pub(crate) fn new(file: File) -> Result<MemoryFile, Refused> {
        if !sys::has_seals(file.as_fd()) {
            let found = name(&file);
            return Err(Refused { file, expected: "a memfd, or a file of tmpfs or hugetlbfs", found });
        }
        Ok(MemoryFile(file))
    }

    /// Maps a part of it, as [`Region::map`].
    pub(crate) fn map(&self, offset: u64, len: u64, guest: u64, user: u64) -> Result<Arc<Region>, ringroad_mem::Error> {
        Region::map(&self.0, offset, len, guest, user)
    }
}

/// Closes descriptors that were refused. Closing a file of FUSE waits for the frontend: not in the thread of the port, which
/// has to be there when it is to end.
#[derive(Clone, Default)]
pub(crate) struct Disposal(Arc<AtomicUsize>);

impl Disposal {
    pub(crate) fn close(&self, files: impl IntoIterator<Item = File>) {
        let files: Vec<File> = files.into_iter().collect();
        let pending = self.0.clone();
        pending.fetch_add(1, Ordering::Relaxed);
        let close = move || {
            drop(files);
            pending.fetch_sub(1, Ordering::Release);
        };
        if thread::Builder::new().name("close".into()).stack_size(64 << 10).spawn(close).is_err() {
            // Without a thread they were closed here: the closure is dropped where it was made.
            self.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether there are some that are not closed yet: until then the frontend can do nothing, so that it has one message's at
    /// most.
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
    fn each_is_taken_for_what_it_is() {
        let (pipe, _other) = std::io::pipe().unwrap();
        let (stream, _peer) = UnixStream::pair().unwrap();
        let (datagram, _peer) = UnixDatagram::pair().unwrap();
        let memory = Region::create(4096, 0, false).unwrap().1;
        let shm = std::path::Path::new("/dev/shm").join(format!("ringroad-test-{}", std::process::id()));
        let tmpfs = OpenOptions::new().read(true).write(true).create_new(true).open(&shm).unwrap();
        fs::remove_file(&shm).unwrap();
        let proc = File::open("/proc/self/status").unwrap();
        // Named so that its link begins as one of a memfd does.
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
