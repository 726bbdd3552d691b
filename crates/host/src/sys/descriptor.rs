//! Inspects a peer's descriptor without calling a file system: the file may be on a FUSE mount of the peer, where `fstat` and
//! `fstatfs` block for as long as the peer likes.

use rustix::{
    fs::{self, MemfdFlags, SealFlags},
    net::{AddressFamily, SocketType, sockopt},
};
use std::{fs::File, io, os::fd::BorrowedFd};

/// Returns whether it is a Unix stream socket. A descriptor that is not a socket is refused before any operation of its file is
/// called, and these two options take no lock.
pub(crate) fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

/// Creates a memfd whose length cannot be changed.
pub(crate) fn sealed_memory(len: u64) -> io::Result<File> {
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
