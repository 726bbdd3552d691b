//! The thread that serves a socket, as its owner sees it: dropped, it ends soon, whatever its peer does.

use crate::sys;
use parking_lot::Mutex;
use std::{
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::EventFd;

/// How long dropping a [`Serving`] waits for its thread, which a peer can delay by a descriptor that is slow to close.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// The current connection. A peer that sends half a message, or does not read replies, blocks the thread; dropping the [`Serving`]
/// shuts the connection down.
pub(crate) type Current = Arc<Mutex<Option<UnixStream>>>;

/// Closes the connection, for the thread. Without the lock, which the owner needs, and guarded: what the peer has sent last and
/// nobody has read may hold descriptors that are slow to close (`sys::refuse_descriptors`).
pub(crate) fn close(current: &Current) {
    let stream = current.lock().take();
    sys::guard::guarded(|| drop(stream));
}

/// A running thread.
pub(crate) struct Serving {
    /// Name of the device in log lines.
    pub(crate) name: String,
    /// What its peers are called there.
    pub(crate) peer: &'static str,
    /// Tells the thread to stop.
    pub(crate) stop: EventFd,
    pub(crate) current: Current,
    pub(crate) thread: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        // After `stop`: the thread sees either that or the shutdown of its connection.
        if let Some(stream) = &*self.current.lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let Some(thread) = self.thread.take() else { return };
        let start = Instant::now();
        while !thread.is_finished() && start.elapsed() < STOP_TIMEOUT {
            thread::sleep(Duration::from_micros(200));
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            let (name, peer, waited) = (&self.name, self.peer, STOP_TIMEOUT.as_millis());
            log::error!(
                "{name}: the {peer} has blocked the port's thread for {waited} ms; not waiting for it any longer"
            );
        }
    }
}
