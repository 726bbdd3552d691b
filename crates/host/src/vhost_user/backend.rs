//! Requests to a frontend (vhost-user, SET_BACKEND_REQ_FD): a device reports a change of its configuration space. The session
//! sets the channel, `status.rs` uses it.

use crate::socket::ChannelFd;
use parking_lot::Mutex;
use std::sync::Arc;

/// The channel on which a device reports changes of its configuration space to its frontend; empty until a frontend that wants
/// the reports has handed one over. Cheap to clone: all clones are the same channel.
#[derive(Clone, Default)]
pub struct BackendChannel(Arc<Mutex<Option<Arc<ChannelFd>>>>);

impl BackendChannel {
    /// Asks the frontend to read the configuration space again (BACKEND_CONFIG_CHANGE_MSG). Never blocks: while a message is unread,
    /// no further one is sent, as it would say the same.
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
