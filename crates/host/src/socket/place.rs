//! Unix sockets in the file system: creates listening sockets with their owner and mode, removes them, connects to others.

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

/// Why a socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A program listens on it.
    #[error("{name}: socket {path} is in use by a running program; stop that program or choose another path")]
    InUse {
        /// Name of the port or device.
        name: String,
        /// The socket.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{name}: {path} exists and is not a socket; remove it or choose another path")]
    NotASocket {
        /// Name of the port or device.
        name: String,
        /// The path.
        path: PathBuf,
    },
    /// The directory is missing, not writable, …
    #[error("{name}: cannot create socket {path}: {error}")]
    Bind {
        /// Name of the port or device.
        name: String,
        /// The socket.
        path: PathBuf,
        /// The error from the kernel.
        error: io::Error,
    },
    /// The owner or group cannot be set.
    #[error("{name}: cannot change socket {path} to user {owner:?}, group {group:?}: {error}")]
    Owner {
        /// Name of the port or device.
        name: String,
        /// The socket.
        path: PathBuf,
        /// The user id, if one is configured.
        owner: Option<u32>,
        /// The group id, if one is configured.
        group: Option<u32>,
        /// The error from the kernel.
        error: io::Error,
    },
    /// A thread or an eventfd cannot be created.
    #[error("{name}: {error}")]
    Start {
        /// Name of the port or device.
        name: String,
        /// The error from the kernel.
        error: io::Error,
    },
}

/// Who may connect to a socket, which takes write permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Its mode, regardless of the umask.
    pub mode: u32,
    /// Its user id; `None`: that of this process.
    pub owner: Option<u32>,
    /// Its group id; `None`: that of this process, or of the directory.
    pub group: Option<u32>,
}

impl Default for Access {
    /// Only the user of this process.
    fn default() -> Access {
        Access { mode: 0o600, owner: None, group: None }
    }
}

/// A listening socket's file. Dropped, the file is removed, unless it was replaced by another one.
pub(crate) struct Place {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Place {
    fn is_ours(&self) -> bool {
        identity(&self.path).is_ok_and(|there| there == self.identity)
    }

    /// Sets owner, group and mode.
    pub(crate) fn give(&self, name: &str, access: Access) -> Result<(), SocketError> {
        let Access { mode, owner, group } = access;
        let (name, path) = (name.to_owned(), self.path.clone());
        if !self.is_ours() {
            let error = io::Error::other("the file was replaced by another one");
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
            log::warn!("socket {} was replaced by another file, which is not removed", self.path.display());
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|data| (data.dev(), data.ino()))
}

/// Connects without blocking. Fails with `WouldBlock` if the listener's backlog is full.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}

/// Connects to a socket that refused with `error`, if it looks like one that `bind` had not finished when its process was killed:
/// such a socket has mode 0, which only its owner can change.
fn connect_to_unfinished(path: &Path, metadata: &fs::Metadata, error: io::Error) -> io::Result<UnixStream> {
    if error.kind() != io::ErrorKind::PermissionDenied || metadata.mode() & 0o7777 != 0 {
        return Err(error);
    }
    sys::set_mode(path, 0o600).map_err(|_| error)?;
    connect(path)
}

/// Creates a listening socket. Removes a stale one that nobody listens on.
pub(crate) fn bind(name: &str, path: &Path, access: Access) -> Result<(UnixListener, Place), SocketError> {
    let (name, path) = (name.to_owned(), path.to_owned());
    if let Ok(metadata) = fs::symlink_metadata(&path) {
        if !metadata.file_type().is_socket() {
            return Err(SocketError::NotASocket { name, path });
        }
        match connect(&path).or_else(|error| connect_to_unfinished(&path, &metadata, error)) {
            Ok(_) => return Err(SocketError::InUse { name, path }),
            // The backlog is full, so a program listens.
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
        // Mode 0 until owner and mode are set. Nobody can connect before `listen` either.
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

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::PermissionsExt, thread};

    /// A process that was killed between making its socket and setting the mode leaves one that nobody may connect to, not even its
    /// owner, unless that is root.
    #[test]
    fn an_unfinished_socket_is_replaced() {
        let folder = std::env::temp_dir().join(format!("ringroad-place-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        let path = folder.join("port.sock");
        drop(UnixListener::bind(&path).unwrap());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o0)).unwrap();
        let root = sys::user() == 0;
        if root {
            [&folder, &path].iter().for_each(|file| lchown(file, Some(65534), None).unwrap());
        }
        let path_of_thread = path.clone();
        let bound = thread::spawn(move || {
            if root {
                rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(65534)).unwrap();
                assert_eq!(connect(&path_of_thread).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            }
            bind("test", &path_of_thread, Access::default()).map(|(listener, place)| {
                assert_eq!(fs::metadata(&path_of_thread).unwrap().mode() & 0o7777, 0o600);
                assert!(connect(&path_of_thread).is_ok());
                drop((listener, place));
            })
        });
        bound.join().unwrap().unwrap();
        assert!(!path.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
