//! What a descriptor is, asked in ways that call no file system: a peer's file may be one of a FUSE mount of its own, where
//! `fstat` and `fstatfs` take as long as it likes.

use std::os::fd::{AsRawFd, BorrowedFd};

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

/// Whether it is a file in memory: a memfd, or one of tmpfs or hugetlbfs. Only these have seals, set or not, and the kernel looks
/// at the file's own operations to tell.
pub(crate) fn has_seals(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}
