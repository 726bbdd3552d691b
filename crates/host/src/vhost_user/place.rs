//! Where a listening socket is, and who may connect to it.

use crate::sys;
use socket2::{Domain, SockAddr, Type};
use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, lchown},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A program answers there.
    #[error("{name}: socket {path} is in use by a running program; stop that or choose another path")]
    InUse {
        /// Whose it would be.
        name: String,
        /// The socket.
        path: PathBuf,
    },
    /// Something else has that name.
    #[error("{name}: {path} exists and is not a socket; remove it or choose another path")]
    NotASocket {
        /// Whose it would be.
        name: String,
        /// The path.
        path: PathBuf,
    },
    /// The directory is missing, not writable, …
    #[error("{name}: cannot make socket {path}: {error}")]
    Bind {
        /// Whose it would be.
        name: String,
        /// The socket.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// The owner or group cannot be set.
    #[error("{name}: cannot give socket {path} to user {owner:?}, group {group:?}: {error}")]
    Owner {
        /// Whose it would be.
        name: String,
        /// The socket.
        path: PathBuf,
        /// The user's number, if one was asked for.
        owner: Option<u32>,
        /// The group's.
        group: Option<u32>,
        /// What the kernel says.
        error: io::Error,
    },
    /// No thread, no eventfd.
    #[error("{name}: {error}")]
    Start {
        /// Whose it would be.
        name: String,
        /// What the kernel says.
        error: io::Error,
    },
}

/// Who may connect to a socket: those who may write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Its permissions, whatever the umask.
    pub mode: u32,
    /// The number of its user; `None`: the one that this process runs as.
    pub owner: Option<u32>,
    /// The number of its group; `None`: that of this process, or of the folder.
    pub group: Option<u32>,
}

impl Default for Access {
    /// For this process's user only.
    fn default() -> Access {
        Access { mode: 0o600, owner: None, group: None }
    }
}

/// A socket in the file system. Dropped, it is removed, unless somebody else has put another one there.
pub(crate) struct Place {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Place {
    fn is_ours(&self) -> bool {
        identity(&self.path).is_ok_and(|there| there == self.identity)
    }

    /// From now on these may connect.
    pub(crate) fn give(&self, name: &str, access: Access) -> Result<(), SocketError> {
        let Access { mode, owner, group } = access;
        let (name, path) = (name.to_owned(), self.path.clone());
        if !self.is_ours() {
            let error = io::Error::other("it is not ours any more");
            return Err(SocketError::Bind { name, path, error });
        }
        if (owner.is_some() || group.is_some())
            && let Err(error) = lchown(&path, owner, group)
        {
            return Err(SocketError::Owner { name, path, owner, group, error });
        }
        sys::set_mode(&path, mode).map_err(|error| SocketError::Bind { name, path, error })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_ours() {
            let _ = fs::remove_file(&self.path);
        } else {
            log::warn!("socket {} is not ours any more: left alone", self.path.display());
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|data| (data.dev(), data.ino()))
}

/// Connects without waiting: `WouldBlock` if there is no room in the backlog of who listens.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}

/// Makes a listening socket. One that a dead program has left is removed.
pub(crate) fn bind(name: &str, path: &Path, access: Access) -> Result<(UnixListener, Place), SocketError> {
    let (name, path) = (name.to_owned(), path.to_owned());
    if let Ok(metadata) = fs::symlink_metadata(&path) {
        if !metadata.file_type().is_socket() {
            return Err(SocketError::NotASocket { name, path });
        }
        match connect(&path) {
            Ok(_) => return Err(SocketError::InUse { name, path }),
            // Somebody listens, with so many that wait that there is no room.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(SocketError::InUse { name, path }),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                log::info!("{name}: removing the stale socket {}", path.display());
                if let Err(error) = fs::remove_file(&path) {
                    return Err(SocketError::Bind { name, path, error });
                }
            }
            Err(error) => return Err(SocketError::Bind { name, path, error }),
        }
    }
    let made = socket2::Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None).and_then(|socket| {
        // For nobody until it is as it should be. Nobody can connect before it listens either.
        sys::set_socket_mode(socket.as_fd(), 0)?;
        socket.bind(&SockAddr::unix(&path)?)?;
        Ok((socket, Place { identity: identity(&path)?, path: path.clone() }))
    });
    let (socket, place) = match made {
        Ok(made) => made,
        Err(error) => return Err(SocketError::Bind { name, path, error }),
    };
    place.give(&name, access)?;
    match socket.listen(BACKLOG) {
        Ok(()) => Ok((OwnedFd::from(socket).into(), place)),
        Err(error) => Err(SocketError::Bind { name, path, error }),
    }
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
