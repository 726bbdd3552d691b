//! Inspects a peer's descriptor without calling a file system: the file may be on a FUSE mount of the peer, where `fstat` and
//! `fstatfs` block for as long as the peer likes.

use super::guard;
use rustix::{
    fs::{self, MemfdFlags, SealFlags},
    net::{AddressFamily, SocketType, sockopt},
    process::{self, Resource},
};
use std::{
    fs::File,
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

/// SO_PASSRIGHTS (Linux 6.16), which the `libc` crate does not have: whether a Unix socket takes descriptors.
const PASS_RIGHTS: libc::c_int = 83;

/// Returns whether it is a Unix stream socket. A descriptor that is not a socket is refused before any operation of its file is
/// called, and these two options take no lock.
pub(crate) fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

/// Has a Unix socket refuse messages with descriptors (SCM_RIGHTS). A listening socket passes that on to those that are accepted
/// from it. Kernels before Linux 6.16 cannot.
///
/// A descriptor that nobody takes is closed by the thread that reads the message, or closes the socket, and that may take as long
/// as its sender likes: a TCP socket with unsent data and SO_LINGER, for instance.
pub(crate) fn refuse_descriptors(fd: BorrowedFd<'_>) {
    let off: libc::c_int = 0;
    let len = size_of_val(&off) as libc::socklen_t;
    // SAFETY: the option is an int, which outlives the call.
    unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, PASS_RIGHTS, (&raw const off).cast(), len) };
}

/// A peer's file that may be a Unix socket. Closing that also closes the descriptors in messages that nobody has read, which the
/// guard keeps short: see [`refuse_descriptors`].
pub(crate) struct PeerFile(ManuallyDrop<File>);

impl PeerFile {
    pub(crate) fn new(file: File) -> PeerFile {
        PeerFile(ManuallyDrop::new(file))
    }
}

impl AsFd for PeerFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for PeerFile {
    fn drop(&mut self) {
        // SAFETY: the file is not used after this.
        guard::guarded(|| unsafe { ManuallyDrop::drop(&mut self.0) });
    }
}

/// Creates a memfd whose length cannot be changed.
pub(crate) fn sealed_memory(len: u64) -> io::Result<File> {
    // The kernel would send SIGXFSZ, which ends the process.
    if process::getrlimit(Resource::Fsize).current.is_some_and(|most| most < len) {
        return Err(rustix::io::Errno::FBIG.into());
    }
    let file = File::from(fs::memfd_create("ringroad", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(len)?;
    fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Returns whether it is a file in memory: a memfd, or a file on tmpfs or hugetlbfs. Only these support seals, and the kernel
/// tells by comparing the file's operations, without calling them.
pub(crate) fn has_seals(fd: BorrowedFd<'_>) -> bool {
    fs::fcntl_get_seals(fd).is_ok()
}
