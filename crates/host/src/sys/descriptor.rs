//! Inspects a peer's descriptor without calling a file system: the file may be on a FUSE mount of the peer, where `fstat` and
//! `fstatfs` block for as long as the peer likes.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd},
};

/// Returns domain and type of a socket, such as AF_UNIX and SOCK_STREAM; `None` if it is not a socket.
pub(crate) fn socket_kind(fd: BorrowedFd<'_>) -> Option<(libc::c_int, libc::c_int)> {
    let option = |name| {
        let mut value: libc::c_int = 0;
        let mut len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel stores an int there, and its length. A descriptor that is not a socket is refused before any
        // operation of its file is called, and these two options take no lock.
        let result =
            unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
        (result == 0).then_some(value)
    };
    Some((option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?))
}

/// Creates a memfd whose length cannot be changed.
pub(crate) fn sealed_memory(len: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the call returns a new descriptor or -1.
    let fd = unsafe { libc::memfd_create(c"ringroad".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor with no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no memory is involved.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether it is a file in memory: a memfd, or a file on tmpfs or hugetlbfs. Only these support seals, and the kernel
/// tells by comparing the file's operations, without calling them.
pub(crate) fn has_seals(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}
