//! Where the rings of a port are, in a file that outlives this process, so that after a crash they go on where they were
//! (`ringroad_ring::Journal`). One file for each vhost-user socket, readable by this user only.
//!
//! It should lie in memory: on a disk the kernel writes a dirty page back now and then, and whoever stores to it meanwhile waits. So
//! it stands beside the socket where that is a tmpfs (/run is), else in a folder of our own in /dev/shm.

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

/// Notes of all vrings of a port; none, if there is no place for them.
#[derive(Clone, Default)]
pub(crate) struct Notes {
    file: Option<Arc<Open>>,
}

struct Open {
    region: Arc<Region>,
    /// Locked as long as we are there: notes have one writer.
    _file: File,
}

impl Notes {
    /// Opens or makes the notes of the socket at `path`. A port works without; what is wrong is logged.
    pub(crate) fn open(name: &str, path: &Path, vrings: usize) -> Notes {
        match Self::try_open(path, vrings) {
            Ok(open) => Notes { file: Some(Arc::new(open)) },
            Err((file, error)) => {
                log::warn!(
                    "{name}: cannot keep notes of its rings in {}: {error}; after a crash of ringroad packed rings will not go on",
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
            let why = "it belongs to somebody else, or others can open it; expected a file of mode 0600 of this user, remove it";
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

    /// The journal of a vring.
    pub(crate) fn journal(&self, vring: usize) -> Journal {
        self.file.as_ref().map_or(Journal::NONE, |open| Journal::new(&open.region, vring))
    }
}

/// Logs how a vring has found its place, if that is worth a line.
pub(crate) fn say(name: &str, vring: usize, base: u32, resumed: Resumed) {
    match resumed {
        Resumed::Base => {}
        Resumed::Journal { finished } => log::info!(
            "{name} queue {vring}: goes on where it was before, not at {base:#x} as the frontend says; {finished} buffers given back that had been taken"
        ),
        Resumed::Inflight { resubmitted } => log::info!(
            "{name} queue {vring}: goes on as its inflight region says, not at {base:#x} as the frontend says; {resubmitted} buffers taken once more"
        ),
        Resumed::UsedIndex => log::info!(
            "{name} queue {vring}: goes on at its used index, not at {base:#x} as the frontend says: what lies between was never given back"
        ),
        Resumed::Lost => log::warn!(
            "{name} queue {vring}: the frontend says that the ring is fresh, but it has been used, and where it was is not known; reset the device in the guest to continue"
        ),
    }
}

/// Where the notes of a socket are kept.
fn place(socket: &Path) -> Result<PathBuf, (PathBuf, io::Error)> {
    let mut beside = socket.as_os_str().to_owned();
    beside.push(".rings");
    let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if File::open(folder).and_then(|folder| sys::is_tmpfs(folder.as_fd())).unwrap_or(false) {
        return Ok(beside.into());
    }
    let folder = common_folder()?;
    // A name for each path, of whatever length.
    let absolute = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    let hash =
        absolute.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let name = socket.file_name().unwrap_or_default().to_string_lossy().chars().take(64).collect::<String>();
    Ok(folder.join(format!("{name}-{hash:016x}.rings")))
}

/// The folder of notes whose sockets do not lie in memory.
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
        let why = "it belongs to somebody else, or others can write there; expected a folder of mode 0700 of this user";
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
    fn notes_stand_beside_a_socket_in_memory_and_have_one_writer() {
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
    fn what_somebody_else_has_put_there_is_not_used() {
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
    fn elsewhere_they_are_kept_apart_by_path() {
        let [one, other] = ["/proc/a/vm.sock", "/proc/b/vm.sock"].map(|path| place(Path::new(path)).unwrap());
        assert!(one != other && one.starts_with(format!("/dev/shm/ringroad-{}", sys::user())));
    }
}
