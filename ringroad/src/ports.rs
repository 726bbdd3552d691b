//! The kinds of ports that the configuration knows.

use ringroad_host::{TapPort, e1000::E1000Port, vhost_user::VhostPort};
pub use ringroad_traffic::ports::{Measured, Mode};

ringroad_host::ports! {
    /// The kinds of ports that the configuration knows.
    pub enum Ports {
        /// A guest.
        Vhost(VhostPort),
        /// A guest with an emulated network card.
        E1000(E1000Port),
        /// An interface of the host.
        Tap(TapPort),
    }
}
