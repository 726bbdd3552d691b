//! What control is doing, for the thread that has to end the program even if control hangs: where it is, and which sockets are to
//! be removed.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

/// A socket of ours: its path, and which file that was when we made it.
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

/// Shared by control and the thread that hears signals; neither holds it while it waits for something.
#[derive(Clone, Default)]
pub struct Progress(Arc<Inner>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn file(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

impl Progress {
    /// What control does from now on.
    pub fn at(&self, what: impl Into<String>) {
        *lock(&self.0.doing) = what.into();
    }

    /// What it is doing.
    pub fn doing(&self) -> String {
        lock(&self.0.doing).clone()
    }

    /// A socket was made.
    pub fn made(&self, path: &Path) {
        let Some(file) = file(path) else { return };
        let mut sockets = lock(&self.0.sockets);
        sockets.retain(|made| made.path != path);
        sockets.push(Made { path: path.to_owned(), file });
    }

    /// Removes what was made and is still there; not what somebody else has put in its place.
    pub fn remove_sockets(&self) {
        for made in lock(&self.0.sockets).drain(..) {
            if file(&made.path) == Some(made.file) {
                let _ = fs::remove_file(&made.path);
            }
        }
    }

    /// It is time to end.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::Release);
    }

    /// Whether it is.
    pub fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_what_is_ours_is_removed() {
        let folder = std::env::temp_dir().join(format!("ringroad-progress-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (ours, theirs) = (folder.join("ours"), folder.join("theirs"));
        let progress = Progress::default();
        let keep = [UnixListener::bind(&ours).unwrap(), UnixListener::bind(&theirs).unwrap()];
        [&ours, &theirs].into_iter().for_each(|path| progress.made(path));
        fs::remove_file(&theirs).unwrap();
        fs::write(&theirs, "").unwrap();
        progress.remove_sockets();
        assert_eq!((ours.exists(), theirs.exists()), (false, true));
        drop(keep);
        fs::remove_dir_all(folder).unwrap();
    }
}
