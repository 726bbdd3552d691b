//! The packed virtqueue (virtio 1.3, 2.8).

mod device;
mod driver;
mod layout;
#[cfg(not(loom))]
mod recover;

pub use device::Device;
pub use driver::Driver;
pub use layout::{Base, Layout};
