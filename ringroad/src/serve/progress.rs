//! What control is currently doing and which sockets it has created: lets the main thread report and clean up when it has to exit
//! although control hangs.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

/// A socket that we created: its path, and its device and inode then.
struct Made {
    path: PathBuf,
    file: (u64, u64),
}

#[derive(Default)]
struct Inner {
    doing: Mutex<String>,
    sockets: Mutex<Vec<Made>>,
    stopping: AtomicBool,
}

/// Shared by control and the main thread. Neither blocks while it holds one of the locks.
#[derive(Clone, Default)]
pub struct Progress(Arc<Inner>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn file(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

impl Progress {
    /// Sets what control is doing from now on.
    pub fn at(&self, what: impl Into<String>) {
        *lock(&self.0.doing) = what.into();
    }

    /// Returns what control is doing.
    pub fn doing(&self) -> String {
        lock(&self.0.doing).clone()
    }

    /// Records a socket that was created.
    pub fn made(&self, path: &Path) {
        let Some(file) = file(path) else { return };
        let mut sockets = lock(&self.0.sockets);
        sockets.retain(|made| made.path != path);
        sockets.push(Made { path: path.to_owned(), file });
    }

    /// Removes the recorded sockets, except those that have been replaced by another file.
    pub fn remove_sockets(&self) {
        for made in lock(&self.0.sockets).drain(..) {
            if file(&made.path) == Some(made.file) {
                let _ = fs::remove_file(&made.path);
            }
        }
    }

    /// Requests the shutdown.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::Release);
    }

    /// Returns whether the shutdown was requested.
    pub fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn removes_only_sockets_that_were_not_replaced() {
        let folder = std::env::temp_dir().join(format!("ringroad-progress-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (kept, replaced) = (folder.join("kept"), folder.join("replaced"));
        let progress = Progress::default();
        let listeners = [UnixListener::bind(&kept).unwrap(), UnixListener::bind(&replaced).unwrap()];
        [&kept, &replaced].into_iter().for_each(|path| progress.made(path));
        fs::remove_file(&replaced).unwrap();
        fs::write(&replaced, "").unwrap();
        progress.remove_sockets();
        assert_eq!((kept.exists(), replaced.exists()), (false, true));
        drop(listeners);
        fs::remove_dir_all(folder).unwrap();
    }
}
