//! Files that record the ring positions of a port, so that its rings resume after a crash of this process
//! (`ringroad_ring::Journal`). There is one file per vhost-user socket, readable by this user only. Opened by the devices in
//! `vhost_user/net.rs` and `vsock/guest.rs`.
//!
//! The file should be in memory: on a disk, a store to a page stalls while the kernel writes that page back. So it is placed
//! beside the socket if that directory is a tmpfs (/run is), else in a directory of this user in /dev/shm.

use crate::sys;
use ringroad_mem::Region;
use ringroad_ring::{Journal, Resumed};
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
};

/// The notes of all vrings of a port; empty if the file cannot be opened.
#[derive(Clone, Default)]
pub(crate) struct Notes {
    file: Option<Arc<Open>>,
}

struct Open {
    region: Arc<Region>,
    /// Locked while open: notes have one writer.
    _file: File,
}

impl Notes {
    /// Opens or creates the notes of the socket at `path`. On failure it logs a warning, and the port runs without notes.
    pub(crate) fn open(name: &str, path: &Path, vrings: usize) -> Notes {
        match Self::try_open(path, vrings) {
            Ok(open) => Notes { file: Some(Arc::new(open)) },
            Err((file, error)) => {
                log::warn!(
                    "{name}: cannot record ring positions in {}: {error}; packed rings will not resume after a crash of ringroad",
                    file.display()
                );
                Notes::default()
            }
        }
    }

    fn try_open(path: &Path, vrings: usize) -> Result<Open, (PathBuf, io::Error)> {
        let place = place(path)?;
        let failed = |error| (place.clone(), error);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&place)
            .map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if !meta.is_file() || meta.uid() != sys::user() || meta.mode() & 0o077 != 0 || meta.nlink() != 1 {
            let why =
                "owned by another user, or open to others; expected a file of mode 0600 owned by this user; remove it";
            return Err(failed(io::Error::other(why)));
        }
        file.try_lock().map_err(|error| failed(error.into()))?;
        let len = (vrings * Journal::BYTES).next_multiple_of(4096) as u64;
        if meta.len() < len {
            file.set_len(len).map_err(failed)?;
        }
        let region = Region::map(&file, 0, len, 0, 0).map_err(|error| failed(io::Error::other(error)))?;
        Ok(Open { region, _file: file })
    }

    /// Returns the journal of a vring.
    pub(crate) fn journal(&self, vring: usize) -> Journal {
        self.file.as_ref().map_or(Journal::NONE, |open| Journal::new(&open.region, vring))
    }
}

/// Logs how a vring found its starting position, unless it is the frontend's base.
pub(crate) fn say(name: &str, vring: usize, base: u32, resumed: Resumed) {
    match resumed {
        Resumed::Base => {}
        Resumed::Journal { finished } => log::info!(
            "{name} queue {vring}: resumes at its recorded position instead of base {base:#x} from the frontend; \
             {finished} buffers in flight were returned to the driver"
        ),
        Resumed::Inflight { resubmitted } => log::info!(
            "{name} queue {vring}: resumes by its inflight region instead of base {base:#x} from the frontend; \
             {resubmitted} buffers in flight are processed again"
        ),
        Resumed::UsedIndex => log::info!(
            "{name} queue {vring}: resumes at its used index instead of base {base:#x} from the frontend; the buffers in \
             between were taken but never returned"
        ),
        Resumed::Lost => log::warn!(
            "{name} queue {vring}: base {base:#x} from the frontend is that of an unused ring, but this ring was in use and its \
             position is unknown; reset the device in the guest to continue"
        ),
    }
}

/// Returns the path of a socket's notes.
fn place(socket: &Path) -> Result<PathBuf, (PathBuf, io::Error)> {
    let mut beside = socket.as_os_str().to_owned();
    beside.push(".rings");
    let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if File::open(folder).and_then(|folder| sys::is_tmpfs(folder.as_fd())).unwrap_or(false) {
        return Ok(beside.into());
    }
    let folder = common_folder()?;
    // The hash of the path makes the name unique and bounds its length.
    let absolute = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    let hash =
        absolute.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let name = socket.file_name().unwrap_or_default().to_string_lossy().chars().take(64).collect::<String>();
    Ok(folder.join(format!("{name}-{hash:016x}.rings")))
}

/// Returns the directory for notes of sockets that are not on a tmpfs, and creates it if necessary.
pub(crate) fn common_folder() -> Result<PathBuf, (PathBuf, io::Error)> {
    let folder = PathBuf::from(format!("/dev/shm/ringroad-{}", sys::user()));
    let failed = |error| (folder.clone(), error);
    match DirBuilder::new().mode(0o700).create(&folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    let meta = fs::symlink_metadata(&folder).map_err(failed)?;
    if !meta.is_dir() || meta.uid() != sys::user() || meta.mode() & 0o077 != 0 {
        let why = "owned by another user, or open to others; expected a directory of mode 0700 owned by this user";
        return Err(failed(io::Error::other(why)));
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn folder(name: &str) -> PathBuf {
        let folder = PathBuf::from(format!("/dev/shm/ringroad-notes-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        folder
    }

    #[test]
    fn notes_are_beside_a_socket_on_tmpfs_and_have_one_writer() {
        let folder = folder("beside");
        let socket = folder.join("vm1.sock");
        let notes = Notes::open("port vm1", &socket, 3);
        assert!(notes.file.is_some());
        let file = folder.join("vm1.sock.rings");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert!(Notes::open("port vm1", &socket, 3).file.is_none(), "a second writer");
        drop(notes);
        assert!(Notes::open("port vm1", &socket, 100).file.is_some());
        assert!(fs::metadata(&file).unwrap().len() >= 100 * Journal::BYTES as u64);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_symlink_or_a_file_open_to_others_is_not_used() {
        let folder = folder("squat");
        let (socket, file) = (folder.join("vm1.sock"), folder.join("vm1.sock.rings"));
        symlink("/dev/shm/elsewhere", &file).unwrap();
        assert!(Notes::open("port vm1", &socket, 2).file.is_none());
        fs::remove_file(&file).unwrap();
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(Notes::open("port vm1", &socket, 2).file.is_none());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn sockets_of_the_same_name_have_separate_notes_in_dev_shm() {
        let [one, other] = ["/proc/a/vm.sock", "/proc/b/vm.sock"].map(|path| place(Path::new(path)).unwrap());
        assert!(one != other && one.starts_with(format!("/dev/shm/ringroad-{}", sys::user())));
    }
}
