//! System calls, by rustix where it has them. Those with `unsafe` are ones for which no library has a safe interface, or none
//! for memory that is shared with a guest.

mod confine;
mod descriptor;
pub(crate) mod guard;
mod tun;

pub(crate) use confine::{add_filter, no_new_privileges};
pub(crate) use descriptor::{PeerFile, has_seals, is_unix_stream, refuse_descriptors, sealed_memory};
pub(crate) use tun::{mtu, open_tap, set_carrier, set_link, set_mtu, set_tap_header, set_tap_offloads};

use ringroad_mem::Span;
use rustix::{
    fs::{self, Access, AtFlags, Mode, OFlags},
    io::Errno,
    net::{self, RecvFlags},
    process::{self, Pid, Resource, Rlimit},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
};
use std::{
    cell::Cell,
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    time::Duration,
};

/// Maximum iovecs of one `readv` or `writev`: a frame's header and its payload.
pub(crate) const IOVECS: usize = 64;

/// Bytes of freed memory that the allocator keeps at the end of each of its heaps. A guest that fills and drains its budget then
/// causes no page fault per page: one packet of 64 KiB cost 16 of them, 25 us, and the other guests waited for it.
const KEPT: libc::c_int = 8 << 20;

/// Tells the C library's allocator to keep freed memory for the next allocation; to be called once, early. Other C libraries than
/// GNU's do as they like.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes two numbers of the allocator, which has locks of its own. It cannot fail for these.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_TOP_PAD, KEPT / 8);
    }
}

thread_local!(static WOKEN: Cell<bool> = const { Cell::new(false) });

/// The calling thread has just woken others, or may have.
#[inline]
pub(crate) fn woken() {
    WOKEN.set(true);
}

/// Returns whether the calling thread has woken others since the last call.
#[inline]
pub(crate) fn take_woken() -> bool {
    WOKEN.take()
}

/// Pins the calling thread to a CPU.
///
/// # Errors
/// The CPU does not exist, or the process may not use it.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(Errno::INVAL.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Lets the calling thread run on the CPUs of the process's first thread, which is never pinned.
///
/// # Errors
/// The kernel refuses to read or set the affinity.
pub fn unpin_current_thread() -> io::Result<()> {
    Ok(sched_setaffinity(None, &sched_getaffinity(Some(process::getpid()))?)?)
}

/// Checks whether this process may create files in a directory.
///
/// # Errors
/// It may not; the error says why.
pub fn is_writable(folder: &Path) -> io::Result<()> {
    Ok(fs::accessat(fs::CWD, folder, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)?)
}

/// Raises the limit of open files to its maximum: each connection of a vsock device may be a socket.
pub fn raise_file_limit() {
    let limit = process::getrlimit(Resource::Nofile);
    // The old limit does, with fewer connections.
    let _ = process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Returns how many files this process may have open.
pub(crate) fn file_limit() -> usize {
    let limit = process::getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Returns the process at the other end of a Unix socket when it connected; 0 if it is not visible in this PID namespace.
pub(crate) fn peer_process(fd: BorrowedFd<'_>) -> i32 {
    peer_of(fd).map_or(0, |(process, _)| process)
}

/// Returns the CPU time used by this process, user and system together.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the CPU time used by the calling thread.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Waits until one of the descriptors is readable or has hung up, or until the timeout (`None`: no timeout). Returns which
/// are; none after a timeout or a signal.
pub(crate) fn wait_readable<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let mut list = fds.map(|fd| libc::pollfd {
        // poll ignores negative descriptors.
        fd: fd.map_or(-1, |fd| fd.as_raw_fd()),
        events: libc::POLLIN,
        revents: 0,
    });
    let timeout = timeout.map_or(-1, |time| time.as_millis().min(i32::MAX as u128) as i32);
    // SAFETY: the list is an array of N entries that outlives the call.
    let result = unsafe { libc::poll(list.as_mut_ptr(), N as libc::nfds_t, timeout) };
    if result < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        return Ok([false; N]);
    }
    Ok(list.map(|entry| entry.revents != 0))
}

/// Copies what is next to be read from a socket without consuming it and without blocking. Returns its length.
pub(crate) fn peek(fd: BorrowedFd<'_>, target: &mut [u8]) -> io::Result<usize> {
    let (len, _) = net::recv(fd, target, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    Ok(len)
}

/// Returns whether data written to a socket has not been read at the other end.
pub(crate) fn is_unread(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(unread(fd)? > 0)
}

/// Returns how much of the data written to a socket has not been read at the other end, in bytes of kernel memory.
pub(crate) fn unread(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which Linux defines as the same number as TIOCOUTQ, stores an int there.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if result == 0 { Ok(usize::try_from(bytes).unwrap_or(0)) } else { Err(io::Error::last_os_error()) }
}

/// Sets O_NONBLOCK.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(fs::fcntl_setfl(fd, fs::fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}

/// Writes a private header and then spans as one message. The error is `None` if there are too many spans.
#[inline]
pub(crate) fn write_message<'a>(
    fd: BorrowedFd<'_>,
    head: &[u8],
    rest: impl Iterator<Item = Span<'a>>,
) -> Result<usize, Option<io::Error>> {
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut list = [empty; IOVECS];
    list[0] = libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() };
    let mut count = 1;
    for span in rest {
        let Some(place) = list.get_mut(count) else { return Err(None) };
        *place = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
        count += 1;
    }
    woken();
    // SAFETY: the entries describe the borrowed header and spans, whose bounds were checked when they were made and whose
    // memory lives for `'a`; the kernel only reads them, and returns EFAULT where a peer has truncated the file.
    let result = unsafe { libc::writev(fd.as_raw_fd(), list.as_ptr(), count as libc::c_int) };
    if result < 0 { Err(Some(io::Error::last_os_error())) } else { Ok(result as usize) }
}

/// Reads one message into spans, and what does not fit into `overflow`.
#[inline]
pub(crate) fn read_message(fd: BorrowedFd<'_>, target: &[Span<'_>], overflow: &[Span<'_>]) -> io::Result<usize> {
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut list = [empty; IOVECS];
    let mut count = 0;
    for span in target.iter().chain(overflow) {
        let place = list.get_mut(count).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        *place = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
        count += 1;
    }
    // SAFETY: spans are writable memory of their length, kept mapped by their lifetimes; the kernel returns EFAULT where a
    // peer has truncated the file.
    let result = unsafe { libc::readv(fd.as_raw_fd(), list.as_ptr(), count as libc::c_int) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// Converts the first [`IOVECS`] spans to iovecs.
fn pieces<'a>(spans: impl Iterator<Item = Span<'a>>) -> ([libc::iovec; IOVECS], usize) {
    let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; IOVECS];
    let mut count = 0;
    for (place, span) in list.iter_mut().zip(spans) {
        *place = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
        count += 1;
    }
    (list, count)
}

/// Writes spans to a socket without blocking. Returns how many bytes were written.
pub(crate) fn send_spans<'a>(fd: BorrowedFd<'_>, spans: impl Iterator<Item = Span<'a>>) -> io::Result<usize> {
    let (mut list, count) = pieces(spans);
    // SAFETY: the entries describe spans, whose bounds were checked when they were made and whose memory lives for `'a`; the
    // kernel only reads them, and returns EFAULT where a peer has truncated the file.
    let result = unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = count;
        libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// Reads from a socket without blocking. Returns how many bytes were read; 0 at the end of the stream. Guarded, as in
/// [`receive_spans`].
pub(crate) fn receive(fd: BorrowedFd<'_>, target: &mut [u8]) -> io::Result<usize> {
    let (len, _) = guard::guarded(|| net::recv(fd, target, RecvFlags::DONTWAIT))?;
    Ok(len)
}

/// Reads from a socket into spans without blocking. Returns how many bytes were read; 0 at the end of the stream. Guarded, as the
/// call closes descriptors that the peer has sent: see [`refuse_descriptors`].
pub(crate) fn receive_spans(fd: BorrowedFd<'_>, spans: &[Span<'_>]) -> io::Result<usize> {
    let (mut list, count) = pieces(spans.iter().copied());
    // SAFETY: spans are writable memory of their length, kept mapped by their lifetimes; the kernel returns EFAULT where a
    // peer has truncated the file.
    let result = guard::guarded(|| unsafe {
        let mut message = std::mem::zeroed::<libc::msghdr>();
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = count;
        libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT)
    });
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// Borrows an eventfd's descriptor; the library offers only the raw one.
pub(crate) fn borrow(fd: &vmm_sys_util::eventfd::EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor stays open while its owner is borrowed.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

/// Returns the effective user id of this process.
pub(crate) fn user() -> u32 {
    process::geteuid().as_raw()
}

/// Returns whether a file is on a tmpfs.
pub(crate) fn is_tmpfs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(fs::fstatfs(fd)?.f_type == libc::TMPFS_MAGIC)
}

/// Returns the process and user at the other end of a Unix socket when it connected. rustix takes the process for one above 0,
/// which a process of another PID namespace is not.
pub(crate) fn peer_of(fd: BorrowedFd<'_>) -> Option<(i32, u32)> {
    // SAFETY: zeros are a valid ucred; the kernel writes at most the given length.
    let (peer, result) = unsafe {
        let mut peer = std::mem::zeroed::<libc::ucred>();
        let mut len = size_of_val(&peer) as libc::socklen_t;
        let at = (&raw mut peer).cast();
        let result = libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, at, &raw mut len);
        (peer, result)
    };
    (result == 0).then_some((peer.pid, peer.uid))
}

/// Sets the mode of a file; fails if the path is a symbolic link, which rustix's call does not support.
pub(crate) fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string.
    let result = unsafe { libc::fchmodat(libc::AT_FDCWD, path.as_ptr(), mode, libc::AT_SYMLINK_NOFOLLOW) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the mode that a socket file gets from `bind`, before the umask.
pub(crate) fn set_socket_mode(fd: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    Ok(fs::fchmod(fd, Mode::from_raw_mode(mode))?)
}

/// Returns the id of a user, or `None` if there is no such user.
pub fn user_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 16384];
    // SAFETY: zeros are a valid passwd (null pointers), which the call fills together with the buffer; it stores null or the
    // address of the entry in `found`.
    unsafe {
        let mut entry = std::mem::zeroed::<libc::passwd>();
        let mut found = std::ptr::null_mut();
        libc::getpwnam_r(name.as_ptr(), &mut entry, buffer.as_mut_ptr(), buffer.len(), &mut found);
        (!found.is_null()).then_some(entry.pw_uid)
    }
}

/// Returns the id of a group, or `None` if there is no such group.
pub fn group_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 65536];
    // SAFETY: as in `user_id`.
    unsafe {
        let mut entry = std::mem::zeroed::<libc::group>();
        let mut found = std::ptr::null_mut();
        libc::getgrnam_r(name.as_ptr(), &mut entry, buffer.as_mut_ptr(), buffer.len(), &mut found);
        (!found.is_null()).then_some(entry.gr_gid)
    }
}

/// Duplicates a descriptor into a file.
#[cfg(test)]
pub(crate) fn duplicate(fd: &impl AsRawFd) -> io::Result<std::fs::File> {
    // SAFETY: the descriptor stays open while its owner is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    fd.try_clone_to_owned().map(Into::into)
}

/// Clears O_NONBLOCK, as a frontend can on the descriptors that it has sent.
#[cfg(test)]
pub(crate) fn set_blocking(fd: BorrowedFd<'_>) {
    fs::fcntl_setfl(fd, OFlags::empty()).unwrap();
}

/// A signal to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM.
    Terminate,
    /// SIGSTOP.
    Stop,
    /// SIGCONT.
    Continue,
    /// SIGHUP.
    Hangup,
    /// SIGUSR1.
    User1,
}

/// Sends a signal to a child of this process.
pub fn signal(pid: u32, signal: Signal) {
    let signal = match signal {
        Signal::Terminate => process::Signal::TERM,
        Signal::Hangup => process::Signal::HUP,
        Signal::User1 => process::Signal::USR1,
        Signal::Stop => process::Signal::STOP,
        Signal::Continue => process::Signal::CONT,
    };
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may be gone.
        let _ = process::kill_process(pid, signal);
    }
}
