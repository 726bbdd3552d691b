//! The kinds of ports that the configuration knows.

use ringroad_host::{TapPort, vhost_user::VhostPort};
pub use ringroad_traffic::ports::{Measured, Mode};

ringroad_host::ports! {
    /// The kinds of ports that the configuration knows.
    pub enum Ports {
        /// A guest.
        Vhost(VhostPort),
        /// An interface of the host.
        Tap(TapPort),
    }
}
