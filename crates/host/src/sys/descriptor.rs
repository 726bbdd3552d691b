//! What a descriptor is, asked in ways that call no file system: a peer's file may be one of a FUSE mount of its own, where
//! `fstat` and `fstatfs` take as long as it likes.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd},
};

/// Domain and type of a socket (AF_UNIX, SOCK_STREAM); `None`: it is none.
pub(crate) fn socket_kind(fd: BorrowedFd<'_>) -> Option<(libc::c_int, libc::c_int)> {
    let option = |name| {
        let mut value: libc::c_int = 0;
        let mut len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the kernel stores an int there, and how long it is. What is no socket is refused before anything of it is
        // called, and these two options take no lock.
        let result =
            unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
        (result == 0).then_some(value)
    };
    Some((option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?))
}

/// A file in memory whose length nobody can change.
pub(crate) fn sealed_memory(len: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; a new descriptor or -1 comes back.
    let fd = unsafe { libc::memfd_create(c"ringroad".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no memory is involved.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether it is a file in memory: a memfd, or one of tmpfs or hugetlbfs. Only these have seals, set or not, and the kernel looks
/// at the file's own operations to tell.
pub(crate) fn has_seals(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}
