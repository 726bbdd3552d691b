//! The packed virtqueue (virtio 1.3, 2.8).

mod device;
mod driver;
mod layout;
#[cfg(not(loom))]
mod recover;
#[cfg(not(loom))]
mod tracked;

pub use device::Device;
pub use driver::Driver;
#[cfg(not(loom))]
pub(crate) use layout::Position;
pub use layout::{Base, Layout};
