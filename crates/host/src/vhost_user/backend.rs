//! Requests to a frontend (vhost-user, SET_BACKEND_REQ_FD): a device says that its configuration space has changed. The session
//! sets the channel, `status.rs` uses it.

use crate::socket::ChannelFd;
use parking_lot::Mutex;
use std::sync::Arc;

/// The channel on which a device tells its frontend that its configuration space has changed; none before a frontend that wants
/// to know has handed one over. Cheap to clone: all clones are the same channel.
#[derive(Clone, Default)]
pub struct BackendChannel(Arc<Mutex<Option<Arc<ChannelFd>>>>);

impl BackendChannel {
    /// Tells the frontend to read the configuration space again (BACKEND_CONFIG_CHANGE_MSG). Never blocks, and a frontend that does
    /// not read has one message waiting: it says the same as all that would follow.
    pub fn config_changed(&self) {
        let channel = self.0.lock().clone();
        channel.inspect(|channel| channel.config_changed());
    }

    pub(super) fn set(&self, channel: Option<Arc<ChannelFd>>) {
        // The old descriptor is closed without the lock.
        let _before = std::mem::replace(&mut *self.0.lock(), channel);
    }
}

impl std::fmt::Debug for BackendChannel {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("BackendChannel").field(&self.0.lock().is_some()).finish()
    }
}
